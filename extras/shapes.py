"""The built-in data set `--data shapes`: scenes of one or two objects, and captions for them.

A scene follows from its number and is drawn when it is needed. Nouns, colours, sizes, fills, verbs
and places (left, right, above...) all describe what is in the picture. Therefore every method can
learn something in minutes, and mirrored pictures, attention and retrieval can be judged by eye.
"""

import math
import random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

import common

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "moon", "arrow")
COLOURS = {
    "red": (215, 45, 40),
    "green": (40, 160, 60),
    "blue": (50, 85, 215),
    "yellow": (240, 215, 50),
    "purple": (140, 60, 175),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SPLITS = {"train": range(20_000), "val": range(10_000_000, 10_001_000)}  # scene numbers


class Shape(NamedTuple):
    """One object: x, y (its centre), radius as fractions of the image's side; angle in degrees"""

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
        """(left, top, right, bottom) as fractions of the side"""
        left, top = self.x - self.radius, self.y - self.radius
        return left, top, self.x + self.radius, self.y + self.radius


def caption_data(split):
    """One split of --data shapes -> common.CaptionData, whose images are numbers for `draw`"""
    scenes = SPLITS.get(split) or common.fail(f"--data shapes has no split {split}")
    objects = [objects_of(scene) for scene in scenes]
    captions = common.lists(map(describe, objects))
    tags = common.lists({o.shape: None for o in found} for found in objects)
    images, tagged = np.array(scenes, object), np.full(len(scenes), True)  # numbers of scenes
    return common.CaptionData(images, captions, tags, tagged, list(SHAPES), draw)


def objects_of(scene):
    """The one or two objects of a scene, which do not touch -> list of Shape

    Most scenes have one object, and most objects are solid and upright, so that a small network
    learns the shapes in minutes.
    """
    rng, objects = random.Random(scene), []
    wanted = rng.choice((1, 1, 1, 1, 1, 2))
    while len(objects) < wanted:
        size = rng.choice(("large", "small"))
        radius = rng.uniform(0.28, 0.34) if size == "large" else rng.uniform(0.2, 0.24)
        x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
        if all(math.hypot(x - o.x, y - o.y) > radius + o.radius for o in objects):
            shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
            fill = rng.choice(6 * ("solid",) + ("hollow", "striped"))
            angle = rng.choice((0, 0, 0, 0, -15, 15))
            angle = 0 if shape == "circle" else angle
            objects.append(Shape(shape, colour, size, fill, x, y, radius, angle))
        elif rng.random() < 0.05:  # there may be no room left, so start again
            objects.clear()
    return objects


def outline(shape, n=48):
    """-> (corners, 2), the outline of a shape in the unit circle, y downwards"""
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
        radius = np.where(np.arange(10) % 2, 0.42, 1)[:, None]
        return np.stack([np.sin(turn), -np.cos(turn)], 1) * radius
    if shape == "cross":
        a, b = 0.28, 0.92
        quarter = np.array([(-a, -b), (a, -b), (a, -a)])
        turn = np.array([(0, 1), (-1, 0)])  # by 90 degrees
        return np.concatenate([quarter @ np.linalg.matrix_power(turn, k) for k in range(4)])
    if shape == "heart":
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([16 * np.sin(turn) ** 3, -y], 1) / 17
    if shape == "moon":
        turn = np.linspace(0.2 * np.pi, 1.8 * np.pi, n)
        outer = np.stack([np.cos(turn), np.sin(turn)], 1)
        inner = np.stack([0.3 + 0.75 * np.cos(turn), 0.83 * np.sin(turn)], 1)
        return 0.95 * np.concatenate([outer, inner[::-1]])
    left = np.array([(0, -1), (0.75, -0.15), (0.3, -0.15), (0.3, 0.95)])  # an arrow's right half
    return np.concatenate([left, left[:0:-1] * (-1, 1)])


def draw(scene, side=96):
    """-> PIL image (side x side) with the objects on a blotchy background"""
    rng, big = np.random.default_rng([7, scene]), 2 * side  # twice the size, for smooth edges
    shade = rng.integers(90, 170) + rng.integers(-25, 26, (3, 3, 1))
    shade = shade + rng.integers(-12, 13, (3, 3, 3))
    background = Image.fromarray(shade.astype(np.uint8)).resize((side, side), Image.BICUBIC)
    image = background.resize((big, big), Image.NEAREST)
    for o in objects_of(scene):
        colour = np.clip(COLOURS[o.colour] + rng.integers(-18, 19, 3), 0, 255)
        draw_object(image, o, tuple(colour.tolist()))
    return image.reduce(2)


def draw_object(image, o, colour):
    canvas, side = ImageDraw.Draw(image), image.width
    angle = math.radians(o.angle)
    cos, sin = math.cos(angle), math.sin(angle)
    turned = outline(o.shape) @ np.array([[cos, sin], [-sin, cos]])
    corners = [tuple(p) for p in (turned * o.radius + (o.x, o.y)) * side]
    line = max(4, round(0.16 * o.radius * side))
    if o.fill == "solid":
        canvas.polygon(corners, fill=colour)
    elif o.fill == "hollow":
        canvas.line([*corners, *corners[:2]], colour, line, joint="curve")
    else:
        mask = Image.new("L", (side, side))
        ImageDraw.Draw(mask).polygon(corners, fill=255)
        stripes = ((np.arange(side) // line) % 2 * 255).astype(np.uint8)
        striped = np.minimum(np.asarray(mask), stripes[:, None])
        image.paste(colour, mask=Image.fromarray(striped))
        canvas.line([*corners, *corners[:1]], colour, max(2, line // 3))


def describe(objects):
    """Five captions of one or two objects -> list of str

    Each names the shape, but only some of colour, size, fill, place and verb, because a network
    learns to see the shape sooner if there are fewer other words to predict.
    """
    if len(objects) == 1:
        [o] = objects
        return [
            f"{a(o, 'size', 'fill')} {verb(o)}",
            f"there is {a(o, 'colour')} {place(o)}",
            f"a picture of {a(o, 'colour')}",
            f"the {o.shape} is {o.size} and {o.fill}",
            f"{place(o)} {verb(o)} {a(o)}",
        ]
    o, p = objects
    return [
        f"{a(o, 'colour')} {verb(o)} {relation(o, p)} {a(p, 'colour')}",
        f"{a(p, 'size', 'fill')} {verb(p)} {place(p)}",
        f"there are {a(o)} and {a(p)}",
        f"the {o.shape} is {o.size} and {o.fill}",
        f"a picture of {a(o, 'colour')} {place(o)} and {a(p)}",
    ]


def a(o, *adjectives):
    """-> the shape after these adjectives, in the usual order: "a large red circle" """
    words = [getattr(o, kind) for kind in ("size", "fill", "colour") if kind in adjectives]
    phrase = " ".join([*words, o.shape])
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def place(o):
    row = "high" if o.y < 0.4 else "low" if o.y > 0.6 else ""
    column = "on the left" if o.x < 0.4 else "on the right" if o.x > 0.6 else ""
    return f"{row} {column}".strip() or "centred"


def verb(o):
    if o.angle:
        return "leans"
    return "floats" if o.y < 0.4 else "rests" if o.y > 0.6 else "stands"


def relation(o, p):
    if abs(o.x - p.x) > abs(o.y - p.y):
        return "to the left of" if o.x < p.x else "to the right of"
    return "above" if o.y < p.y else "below"
