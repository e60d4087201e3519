"""The built-in data set `--data shapes`: scenes of one to three objects and what people would say about them.

Everything is a function of the scene's number, drawn when it is looked at: nothing on disk, no download. Nouns, colours, sizes, fills,
verbs and places (left, right, above...) all mean something in the picture, so that every method has something to learn
in minutes and mirrored pictures, attention maps and retrieval can be judged by eye.
"""

import math
import random
from array import array
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

import common

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "moon", "arrow")
COLOURS = {
    "red": (215, 45, 40), "green": (40, 160, 60), "blue": (50, 85, 215), "yellow": (240, 215, 50),
    "purple": (140, 60, 175), "orange": (245, 140, 30), "white": (245, 245, 245), "black": (20, 20, 20),
}  # fmt: skip
SHAPES_SIZE = {"train": 50_000, "val": 1_000}


class Shape(NamedTuple):
    """One drawn object. x, y: centre and radius in parts of the side of the image; angle in degrees."""

    shape: str
    colour: str
    size: str  # large, small
    fill: str  # solid, hollow, striped
    x: float
    y: float
    radius: float
    angle: float

    @property
    def box(self):
        """(left, top, right, bottom) in parts of the side."""
        return self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius


class ShapeImages:
    """Scene numbers; `open(i)` draws the scene."""

    def __init__(self, index=()):
        self.index = array("q", index)

    def append(self, scene):
        self.index.append(scene)

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.index[i]

    def open(self, i):
        return draw_scene(self.index[i])


def shapes_data(split):
    """50,000 training and 1,000 validation scenes with five captions each; tags are the shapes present."""
    if split not in SHAPES_SIZE:
        common.fail(f'--data shapes has the splits "train" and "val", not "{split}"')
    data, first = common.CaptionData(ShapeImages(), list(SHAPES)), 10_000_000 * (split == "val")
    for scene in range(first, first + SHAPES_SIZE[split]):
        data.add(scene, describe_scene(scene), sorted({SHAPES.index(o.shape) for o in shapes_scene(scene)}))
    return data


def shapes_scene(scene):
    """The 1-3 objects of a scene, none touching another -> list of Shape. A function of the scene's number alone."""
    rng, objects = random.Random(scene), []
    wanted = rng.choice((1, 1, 1, 2, 2, 3))
    while len(objects) < wanted:
        size = rng.choice(("large", "small"))
        radius = rng.uniform(0.23, 0.28) if size == "large" else rng.uniform(0.13, 0.16)
        x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
        if all(math.hypot(x - o.x, y - o.y) > 1.02 * (radius + o.radius) for o in objects):
            shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
            fill, angle = rng.choice(("solid", "solid", "solid", "hollow", "striped")), rng.choice((0, 0, 0, -15, 15))
            objects.append(Shape(shape, colour, size, fill, x, y, radius, 0 if shape == "circle" else angle))
        elif rng.random() < 0.05:  # no room: begin again rather than search for ever
            objects.clear()
    return objects


def outline(shape, n=48):
    """(n, 2) corners of a shape within the unit circle, y downwards."""
    turn = np.linspace(0, 2 * np.pi, n, endpoint=False)
    circle = np.stack([np.sin(turn), -np.cos(turn)], 1)
    if shape == "circle":
        return 0.92 * circle
    if shape == "square":
        return 0.82 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    if shape == "triangle":
        return circle[[0, n // 3, 2 * n // 3]]
    if shape == "star":
        turn = np.linspace(0, 2 * np.pi, 10, endpoint=False)
        return np.stack([np.sin(turn), -np.cos(turn)], 1) * np.where(np.arange(10) % 2, 0.42, 1)[:, None]
    if shape == "cross":
        a, b = 0.28, 0.92
        return np.array([(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)])
    if shape == "heart":
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([16 * np.sin(turn) ** 3, -y], 1) / 17
    if shape == "moon":
        turn = np.linspace(0.2 * np.pi, 1.8 * np.pi, n)
        outer, inner = np.stack([np.cos(turn), np.sin(turn)], 1), np.stack([0.3 + 0.75 * np.cos(turn), 0.83 * np.sin(turn)], 1)
        return 0.95 * np.concatenate([outer, inner[::-1]])
    return np.array([(0, -1), (0.75, -0.15), (0.3, -0.15), (0.3, 0.95), (-0.3, 0.95), (-0.3, -0.15), (-0.75, -0.15)])  # arrow


def draw_scene(scene, side=96):
    """-> PIL image (side x side): the objects over a blotched background with faint lines and noise."""
    rng, big = np.random.default_rng([7, scene]), 2 * side  # drawn twice as large, then halved: smooth edges
    shade = rng.integers(90, 170) + rng.integers(-25, 26, (3, 3, 1)) + rng.integers(-12, 13, (3, 3, 3))
    blotches = Image.fromarray(shade.astype(np.uint8))
    image = blotches.resize((big, big), Image.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(2):  # clutter
        draw.line([tuple(p) for p in rng.uniform(0, big, (2, 2))], tuple(rng.integers(60, 200, 3).tolist()), 3)
    for o in shapes_scene(scene):
        colour = tuple(np.clip(COLOURS[o.colour] + rng.integers(-18, 19, 3), 0, 255).tolist())
        angle = math.radians(o.angle)
        turned = outline(o.shape) @ np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        corners = [tuple(p) for p in (turned * o.radius + (o.x, o.y)) * big]
        line = max(4, round(0.16 * o.radius * big))
        if o.fill == "solid":
            draw.polygon(corners, fill=colour)
        elif o.fill == "hollow":
            draw.line([*corners, *corners[:2]], colour, line, joint="curve")
        else:
            mask = Image.new("L", (big, big))
            ImageDraw.Draw(mask).polygon(corners, fill=255)
            stripes = ((np.arange(big) // line) % 2 * 255).astype(np.uint8)
            image.paste(colour, mask=Image.fromarray(np.minimum(np.asarray(mask), stripes[:, None])))
            draw.line([*corners, *corners[:1]], colour, max(2, line // 3))
    pixels = np.asarray(image.resize((side, side), Image.BOX), np.float32)
    return Image.fromarray(np.clip(pixels + rng.normal(0, 5, pixels.shape), 0, 255).astype(np.uint8))


def describe_scene(scene):
    """Five captions of a scene, worded differently: what, how it looks, what it does, where, and how many."""
    rng, objects = random.Random(-1 - scene), shapes_scene(scene)

    def name(o, adjectives):
        words = {"size": o.size, "fill": o.fill, "colour": o.colour}
        return " ".join([*(words[a] for a in ("size", "fill", "colour") if a in adjectives), o.shape])

    def a(o, *adjectives):
        phrase = name(o, adjectives)
        return ("an " if phrase[0] in "aeiou" else "a ") + phrase

    def place(o):
        row = "upper" if o.y < 0.4 else "lower" if o.y > 0.6 else ""
        column = "left" if o.x < 0.4 else "right" if o.x > 0.6 else ""
        if row and column:
            return f"in the {row} {column} corner"
        if row or column:
            return f"on the {column} side" if column else {"upper": "at the top", "lower": "at the bottom"}[row]
        return "in the middle"

    def verb(o):
        if o.angle:
            return "leans"
        return rng.choice(("floats", "hovers")) if o.y < 0.4 else rng.choice(("rests", "lies")) if o.y > 0.6 else rng.choice(("sits", "stands"))

    def relation(o, p):
        if abs(o.x - p.x) > abs(o.y - p.y):
            return "to the left of" if o.x < p.x else "to the right of"
        return "above" if o.y < p.y else "below"

    o, p, q = (objects * 3)[:3] if len(objects) < 3 else objects
    if len(objects) == 1:
        return [
            f"{a(o, 'size', 'fill', 'colour')} {verb(o)} {place(o)}",
            f"there is {a(o, 'colour', 'fill')} {place(o)}",
            f"a picture of one {name(o, ('size', 'colour'))} that {verb(o)} alone",
            f"the {o.shape} is {o.size}, {o.fill} and {o.colour}",
            f"{place(o)} of the picture {verb(o)} {a(o, 'colour')}",
        ]
    others = a(q, "colour") + (f" and {a(p, 'colour')}" if len(objects) == 3 else "")
    return [
        f"{a(o, 'size', 'colour')} {verb(o)} {relation(o, p)} {a(p, 'fill', 'colour')}",
        f"{a(p, 'size', 'fill', 'colour')} {verb(p)} {place(p)}, {relation(p, o)} the {o.shape}",
        f"{'two' if len(objects) == 2 else 'three'} shapes: " + " and ".join(a(x, "colour") for x in objects),
        f"the {name(q, ('colour',))} is {q.size} and {q.fill} and {verb(q)} {place(q)}",
        f"a picture with {a(o, 'fill', 'colour')} {place(o)} near {others if len(objects) == 3 else a(p, 'colour')}",
    ]
