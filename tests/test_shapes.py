"""extras/shapes.py: the scenes are what their captions and tags say."""

import re

import numpy as np
import pytest

from extras import shapes

SCENES = range(300)
ADJECTIVES = {
    **dict.fromkeys(shapes.COLOURS, "colour"),
    **dict.fromkeys(("large", "small"), "size"),
    **dict.fromkeys(("solid", "hollow", "striped"), "fill"),
}


def captions_of(scene):
    return shapes.describe(shapes.objects_of(scene))


def test_pictures_show_the_scene():
    """In the middle of a solid circle, square or heart is its colour, and not the background's."""
    for scene in range(40):
        picture = np.asarray(shapes.draw(scene), float)
        for o in shapes.objects_of(scene):
            if o.fill == "solid" and o.shape in ("circle", "square", "heart"):
                x, y = round(o.x * 96), round(o.y * 96)
                seen = picture[y - 2 : y + 3, x - 2 : x + 3].mean((0, 1))
                assert np.abs(seen - shapes.COLOURS[o.colour]).max() < 30


@pytest.mark.parametrize("kind", ("shape", "colour", "size", "fill"))
def test_captions_name_what_is_there_and_nothing_else(kind):
    """Every shape is named; each of the five captions says something of its own."""
    vocabulary = {word for word, other in ADJECTIVES.items() if other == kind} or shapes.SHAPES
    for scene in SCENES:
        captions, present = captions_of(scene), {getattr(o, kind) for o in shapes.objects_of(scene)}
        said = set(re.findall("[a-z]+", " ".join(captions))) & set(vocabulary)
        assert said <= present and (kind != "shape" or said == present)
        assert len(set(captions)) == 5


RELATIONS = {
    "left of": lambda o, p: o.x < p.x,
    "right of": lambda o, p: o.x > p.x,
    "above": lambda o, p: o.y < p.y,
    "below": lambda o, p: o.y > p.y,
}


def test_relations_are_true():
    """ "X to the left of Y" in the first caption: the first object against the second."""
    seen = set()
    for scene in SCENES:
        objects, caption = shapes.objects_of(scene), captions_of(scene)[0]
        said = [relation for relation in RELATIONS if f" {relation} " in caption]
        for relation in said if len(objects) > 1 else ():
            named = re.findall("|".join(shapes.SHAPES), caption)
            assert named == [o.shape for o in objects[:2]]
            assert RELATIONS[relation](*objects[:2]), caption
            seen.add(relation)
    assert seen == set(RELATIONS)
