"""common.py and shapes.py: captions and labels, pictures, batches, augmentation, backbones, checkpoints, the run folder."""

import argparse
import contextlib
import errno
import importlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms.functional as TF
from PIL import Image
from torch.utils.data import Dataset

import common
import probe
import shapes

CPU = torch.device("cpu")
ALONE = common.World(0, 1, CPU)


@contextlib.contextmanager
def error_naming(*parts):
    """The block ends the program with one line, "error: ...", in which each of `parts` stands."""
    with pytest.raises(SystemExit) as ended:
        yield
    message = str(ended.value)
    assert message.startswith("error: ") and "\n" not in message
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"


def edit_json(path, change):
    """Let `change` alter the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------ strings


def test_packed_strings_keep_every_string():
    """Letters of every alphabet and empty strings come back as they went in."""
    strings = ["a dog", "", "schöne Grüße", "日本語", "🙂🙃", ""]
    packed = common.PackedStrings(strings[:3])
    for string in strings[3:]:
        packed.append(string)
    assert len(packed) == 6 and list(packed) == strings and packed[3] == "日本語"


def test_packed_strings_end_with_an_index_error():
    """A position outside is an IndexError, so that a `for` loop ends and a wrong index does not go unseen."""
    packed = common.PackedStrings(["one", "two"])
    for outside in (2, -1):
        with pytest.raises(IndexError):
            packed[outside]


def test_packed_strings_take_broken_unicode():
    """Half a surrogate pair, which JSON allows, does not end a run."""
    assert common.PackedStrings(["a \ud83d dog"])[0] == "a ? dog"


def test_packed_strings_are_small():
    """200,000 captions cost their letters, the eighth by which a bytearray grows ahead, and 9 bytes each."""
    captions = [f"photo number {n} shows a thing" for n in range(200_000)]
    packed = common.PackedStrings(captions)
    letters = sum(map(len, captions))
    assert sys.getsizeof(packed.buffer) + sys.getsizeof(packed.ends) < 1.13 * letters + 9 * len(captions)


# ------------------------------------------------------------------------------------------ sources: coco


@pytest.fixture
def coco(coco_folder, tmp_path):
    """A copy of the COCO folder that a test may damage."""
    return shutil.copytree(coco_folder, tmp_path / "coco")


def test_coco_layout(coco_folder):
    """Images, their captions and their tags belong together."""
    data = common.caption_data("coco", str(coco_folder), "val2017")
    assert len(data) == 12 and data.tag_names == list(shapes.SHAPES)
    for i in range(len(data)):
        assert data.images[i] == f"{coco_folder}/val2017/{1000 + i:012d}.jpg"
        assert data.captions_of(i) == shapes.describe_scene(1000 + i)
        assert {data.tag_names[tag] for tag in data.tags_of(i)} == {o.shape for o in shapes.shapes_scene(1000 + i)}


def test_coco_without_instances_has_no_tags(coco):
    """The instances file is optional."""
    (coco / "annotations" / "instances_train2017.json").unlink()
    data = common.caption_data("coco", str(coco), "train2017")
    assert data.tag_names is None and data.tags_of(0) == [] and len(data.captions_of(0)) == 5


def test_coco_labels_are_the_tags(coco_folder):
    """label_data("coco") is the multi-hot form of the instances."""
    labels, tags = probe.label_data("coco", str(coco_folder), "train2017"), common.caption_data("coco", str(coco_folder), "train2017")
    assert labels.names == tags.tag_names and list(labels.images) == list(tags.images)
    assert [np.flatnonzero(row).tolist() for row in labels.labels] == [tags.tags_of(i) for i in range(24)]


def test_real_coco(real_data):
    """The genuine layout: 32 + 32 photos, five captions each, 80 categories."""
    for split in ("train2017", "val2017"):
        data = common.caption_data("coco", str(real_data / "coco-mini"), split)
        assert len(data) == 32 and len(data.tag_names) == 80 and data.tag_names[0] == "person"
        assert all(len(data.captions_of(i)) >= 5 for i in range(32))
        assert any(data.tags_of(i) for i in range(32))


def test_real_flickr8k(real_data):
    """6,000 training and 1,000 validation photos with five captions each, and no tags."""
    for split, size in (("train", 6000), ("val", 1000)):
        data = common.caption_data("coco", str(real_data / "flickr8k"), split)
        assert len(data) == size and len(data.captions) == 5 * size and data.tag_names is None
        assert {len(data.captions_of(i)) for i in range(size)} == {5}


# ------------------------------------------------------------------------------------------ sources: Visual Genome


def write_vg(root, count=40, backwards=False):
    """A Visual Genome folder with empty image files and k % 3 + 1 regions for image k."""
    images, regions = [], []
    for k in range(1, count + 1):
        folder = "VG_100K_2" if k % 2 else "VG_100K"
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / f"{k}.jpg").touch()
        images.append({"image_id": k, "url": f"https://cs.stanford.edu/people/rak248/{folder}/{k}.jpg", "width": 800})
        regions.append({"id": k, "regions": [{"region_id": n, "phrase": f' region {n} of [{k}], "é" '} for n in range(k % 3 + 1)]})
    step = -1 if backwards else 1
    (root / "image_data.json").write_text(json.dumps(images[::step]))
    (root / "region_descriptions.json").write_text(json.dumps(regions[::step], indent=1 if backwards else None))
    return root


def test_vg_layout(tmp_path):
    """Each region's phrase is a caption of its image, whichever folder the image lies in."""
    data = common.caption_data("vg", str(write_vg(tmp_path)), "train")
    assert len(data) == 36 and data.tag_names is None
    for i in range(len(data)):
        folder, k = re.search(r"(VG_100K(?:_2)?)/(\d+)\.jpg$", data.images[i]).groups()
        assert folder == ("VG_100K_2" if int(k) % 2 else "VG_100K")
        assert data.captions_of(i) == [f'region {n} of [{k}], "é"' for n in range(int(k) % 3 + 1)]


def test_vg_split_is_fixed(tmp_path):
    """Training and validation share no image, leave none out, and do not depend on the order within the files."""
    splits = []
    for name, backwards in (("a", False), ("b", True)):
        root = write_vg(tmp_path / name, backwards=backwards)
        splits.append([{os.path.basename(p) for p in common.caption_data("vg", str(root), split).images} for split in ("train", "val")])
    (train, val), again = splits[0], splits[1]
    assert not train & val and len(train | val) == 40 and len(val) == 4 and again == [train, val]


@pytest.mark.parametrize("piece", (1, 7, 64, 10_000))
def test_huge_lists_are_read_in_pieces(tmp_path, monkeypatch, piece):
    """iterate_json_list gives what json.load gives, wherever the ends of its chunks fall."""
    path = write_vg(tmp_path) / "region_descriptions.json"

    class SmallReads(io.TextIOWrapper):
        def read(self, size=-1):
            return super().read(min(size, piece))

    monkeypatch.setattr(common, "open", lambda path, encoding: SmallReads(io.FileIO(path), encoding), raising=False)
    assert list(common.iterate_json_list(str(path), "")) == json.loads(path.read_text())


# ------------------------------------------------------------------------------------------ sources: jsonl


def write_jsonl(path, rows):
    """One JSON object per line, and an empty file for each image."""
    for row in rows:
        image = path.parent / row["image"]
        image.parent.mkdir(parents=True, exist_ok=True)
        image.touch()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_paths(tmp_path):
    """Relative images start from the file's folder or from --root; absolute ones stay as they are."""
    absolute = str(tmp_path / "elsewhere" / "b.jpg")
    rows = [{"image": "photos/a.jpg", "captions": ["one"]}, {"image": absolute, "captions": ["two"]}]
    rows = [{**row, "split": "train"} for row in rows]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    assert list(common.caption_data(path, None, "train").images) == [str(tmp_path / "photos/a.jpg"), absolute]
    moved = shutil.copy(path, str(tmp_path / "photos" / "moved.jsonl"))
    assert common.caption_data(moved, str(tmp_path), "train").images[0] == str(tmp_path / "photos/a.jpg")


def test_jsonl_in_the_current_folder(tmp_path, monkeypatch):
    """`--data photos.jsonl`, with the images right beside it, finds them."""
    write_jsonl(tmp_path / "photos.jsonl", [{"image": "a.jpg", "captions": ["one"], "split": "train"}])
    monkeypatch.chdir(tmp_path)
    assert len(common.caption_data("photos.jsonl", None, "train")) == 1


def test_jsonl_captions_and_tags_may_be_missing(tmp_path):
    """Mixtures: some lines have captions, some have tags, some have both; blank lines and captions do not count."""
    rows = [
        {"image": "a.jpg", "captions": [" one ", "", "two"], "split": "train"},
        {"image": "b.jpg", "tags": ["cat", "dog", "cat"], "split": "train"},
        {"image": "c.jpg", "captions": ["three"], "tags": ["dog"], "split": "train"},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    with open(path, "a") as file:
        file.write("\n")
    data = common.caption_data(path, None, "train")
    assert [data.captions_of(i) for i in range(3)] == [["one", "two"], [], ["three"]]
    assert [[data.tag_names[tag] for tag in data.tags_of(i)] for i in range(3)] == [[], ["cat", "dog"], ["dog"]]


def test_jsonl_splits_by_key(tmp_path):
    """A line's "split" decides; the tag names are the same in both splits."""
    rows = [{"image": f"{n}.jpg", "tags": [f"tag {n}"], "split": "val" if n in (1, 4) else "train"} for n in range(6)]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    train, val = (common.caption_data(path, None, split) for split in ("train", "val"))
    assert [os.path.basename(p) for p in val.images] == ["1.jpg", "4.jpg"] and len(train) == 4
    assert train.tag_names == val.tag_names == [f"tag {n}" for n in range(6)]
    assert val.tags_of(1) == [4]


def test_jsonl_lines_without_a_split_among_others(tmp_path, capsys):
    """Left out, and said so; a split that no line names is refused with those that there are."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"image": "a.jpg", "split": "train"}, {"image": "b.jpg"}, {"image": "c.jpg", "split": "dev"}])
    assert [os.path.basename(image) for image in common.caption_data(path, None, "dev").images] == ["c.jpg"]
    assert "1 lines name no split, while others do: they are left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no line is of the split val, there are dev, train"):
        common.caption_data(path, None, "val")


def test_jsonl_default_split(tmp_path):
    """Without "split" a fixed twentieth is for validation, the rest for training, and none for both."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"image": f"{n}.jpg", "captions": ["x"]} for n in range(60)])
    train, val, again = (set(common.caption_data(path, None, split).images) for split in ("train", "val", "val"))
    assert len(val) == 3 and len(train) == 57 and not train & val and val == again


# ------------------------------------------------------------------------------------------ fraction, captions per image


def test_fraction_and_captions_per_image(coco_folder):
    """Half of the images with two captions each: the right counts, real captions, the same choice every time."""
    full, half, again = (
        common.caption_data("coco", str(coco_folder), "train2017", fraction, captions)
        for fraction, captions in ((1.0, None), (0.5, 2), (0.5, 2))
    )
    assert len(half) == 12 and list(half.images) == list(again.images) and list(half.captions) == list(again.captions)
    known = {full.images[i]: (full.captions_of(i), full.tags_of(i)) for i in range(len(full))}
    for i in range(len(half)):
        captions, tags = known[half.images[i]]
        assert len(set(half.captions_of(i)) & set(captions)) == 2 == len(half.captions_of(i)) and half.tags_of(i) == tags


def test_fraction_depends_on_the_seed(coco_folder):
    """Another seed takes other images, and a smaller fraction is a part of a larger one."""
    choose = lambda fraction, seed: set(common.caption_data("coco", str(coco_folder), "train2017", fraction, None, seed).images)
    assert choose(0.5, 0) != choose(0.5, 1) and choose(0.25, 0) < choose(0.5, 0) and len(choose(0.001, 0)) == 1


def test_select_does_not_depend_on_the_order(coco_folder):
    """The captions kept of an image are the same whatever else is selected, and in whatever order."""
    data = common.caption_data("coco", str(coco_folder), "train2017")
    one, two = data.select([3, 9, 5], 2), data.select([5, 3], 2)
    assert one.captions_of(0) == two.captions_of(1) and one.captions_of(2) == two.captions_of(0)
    assert list(two.images) == [data.images[5], data.images[3]] and two.tags_of(1) == data.tags_of(3)


# ------------------------------------------------------------------------------------------ bad data


def test_unknown_data():
    """A data set that does not exist is refused with the list of those that do."""
    with error_naming("--data cocoo is unknown", "shapes, coco, vg", ".jsonl"):
        common.caption_data("cocoo")


def test_unknown_label_data():
    """The same for labelled images."""
    with error_naming("imagenet is unknown", "voc07"):
        probe.label_data("imagenet")


@pytest.mark.parametrize("name, file", [("coco", "annotations/captions_train.json"), ("vg", "image_data.json"), ("no.jsonl", "no.jsonl")])
def test_missing_folder(tmp_path, name, file):
    """A missing folder is named by the file that was looked for."""
    name = str(tmp_path / name) if name.endswith("jsonl") else name
    with error_naming(tmp_path, file, "not found"):
        common.caption_data(name, str(tmp_path / "nowhere"), "train")


@pytest.mark.parametrize("name", ("coco", "vg", "shapes", "jsonl"))
def test_missing_split(coco_folder, tmp_path, name):
    """A split that the data set does not have is named."""
    root = {"coco": coco_folder, "vg": write_vg(tmp_path)}.get(name)
    if name == "jsonl":
        name = write_jsonl(tmp_path / "data.jsonl", [{"image": "a.jpg", "split": "train"}])
    with error_naming("test"):
        common.caption_data(name, root and str(root), "test")


def test_missing_regions(tmp_path):
    """A VG folder without its region descriptions."""
    (write_vg(tmp_path) / "region_descriptions.json").unlink()
    with error_naming(tmp_path / "region_descriptions.json", "not found", "VG_100K"):
        common.caption_data("vg", str(tmp_path), "train")


@pytest.mark.parametrize("kind", ("captions", "instances"))
def test_truncated_coco(coco, kind):
    """Half a file is not valid JSON; the file is named."""
    path = coco / "annotations" / f"{kind}_train2017.json"
    path.write_bytes(path.read_bytes()[:-100])
    with error_naming(path, "not valid JSON"):
        common.caption_data("coco", str(coco), "train2017")


@pytest.mark.parametrize("lost", (1, 100, 1000), ids="{} bytes lost".format)
@pytest.mark.parametrize("name", ("image_data.json", "region_descriptions.json"))
def test_truncated_vg(tmp_path, name, lost):
    """Half a file is found out wherever it was cut."""
    path = write_vg(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-lost])
    with error_naming(path, "not valid JSON"):
        common.caption_data("vg", str(tmp_path), "train")


@pytest.mark.parametrize("name", ("coco", "vg", "jsonl"))
def test_annotations_that_are_not_text(coco, tmp_path, name):
    """A file in another encoding is named, not a UnicodeDecodeError."""
    path = {"coco": coco / "annotations" / "captions_train2017.json", "vg": tmp_path / "image_data.json"}.get(name, tmp_path / "a.jsonl")
    path.write_bytes(b'[{"image_id": "caf\xe9"}]')
    with error_naming(path):
        common.caption_data(str(path) if name == "jsonl" else name, str({"coco": coco}.get(name, tmp_path)), "train2017" if name == "coco" else "train")


@pytest.mark.parametrize(
    "kind, top, key",
    [("captions", "images", "file_name"), ("captions", "annotations", "caption"), ("captions", "annotations", "image_id"),
     ("instances", "annotations", "category_id"), ("instances", "categories", "name")],
)  # fmt: skip
def test_coco_entry_lacks_a_key(coco, kind, top, key):
    """The message names the file, the entry and the key."""
    path = coco / "annotations" / f"{kind}_train2017.json"
    edit_json(path, lambda content: content[top][3].pop(key))
    with error_naming(path, f'entry 3 of "{top}"', f'lacks "{key}"'):
        common.caption_data("coco", str(coco), "train2017")


def test_coco_without_annotations(coco):
    """A JSON file of another kind: the list that is missing is named."""
    path = coco / "annotations" / "captions_train2017.json"
    edit_json(path, lambda content: content.pop("annotations"))
    with error_naming(path, 'lacks the list "annotations"'):
        common.caption_data("coco", str(coco), "train2017")


def test_coco_caption_of_an_unknown_image(coco):
    """A caption of an image that the file does not list."""
    path = coco / "annotations" / "captions_train2017.json"
    edit_json(path, lambda content: content["annotations"][7].update(image_id=4711))
    with error_naming(path, 'entry 7 of "annotations"', "4711"):
        common.caption_data("coco", str(coco), "train2017")


def test_coco_instance_of_an_unknown_category(coco):
    """An instance of a category that the file does not list."""
    path = coco / "annotations" / "instances_train2017.json"
    edit_json(path, lambda content: content["annotations"][7].update(category_id=4711))
    with error_naming(path, 'entry 7 of "annotations"', "category_id"):
        common.caption_data("coco", str(coco), "train2017")


@pytest.mark.parametrize(
    "name, key, change",
    [("image_data.json", "url", lambda rows: rows[5].pop("url")),
     ("image_data.json", "image_id", lambda rows: rows[5].pop("image_id")),
     ("image_data.json", "image_id", lambda rows: rows.__setitem__(5, 4711)),
     ("region_descriptions.json", "id", lambda rows: rows[5].pop("id")),
     ("region_descriptions.json", "regions", lambda rows: rows[5].pop("regions")),
     ("region_descriptions.json", "phrase", lambda rows: rows[5]["regions"][0].pop("phrase"))],
    ids=("url", "image_id", "no object", "id", "regions", "phrase"),
)  # fmt: skip
def test_vg_entry_lacks_a_key(tmp_path, name, key, change):
    """The message names the file, the entry and the key."""
    path = write_vg(tmp_path) / name
    edit_json(path, change)
    with error_naming(path, "entry 5", f'"{key}"'):
        for split in ("train", "val"):  # the entry belongs to one of them
            common.caption_data("vg", str(tmp_path), split)


@pytest.mark.parametrize(
    "line, expected",
    [("{broken", "not valid JSON"), ("[]", '"image"'), ('{"captions": ["x"]}', '"image"'),
     ('{"image": "a.jpg", "captions": "x"}', "lists of strings"), ('{"image": "a.jpg", "tags": [1]}', "lists of strings")],
)  # fmt: skip
def test_jsonl_bad_line(tmp_path, line, expected):
    """The message names the file, the line (counted from 1) and what was expected."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"image": "a.jpg"}])
    with open(path, "a") as file:
        file.write(f"\n{line}\n")
    with error_naming(f"{path}, line 3", expected):
        common.caption_data(path, None, "train")


def test_missing_images_are_found_before_training(coco):
    """Images that are not there: how many, and the first of them."""
    for scene in (5, 9):
        (coco / "train2017" / f"{scene:012d}.jpg").unlink()
    for load in (common.caption_data, probe.label_data):
        with error_naming("2 of 24 images are missing", coco / "train2017" / "000000000005.jpg"):
            load("coco", str(coco), "train2017")


def test_missing_image_folder(coco):
    """The folder of the split is not there at all."""
    shutil.rmtree(coco / "train2017")
    with error_naming("24 of 24 images are missing", "train2017"):
        common.caption_data("coco", str(coco), "train2017")


def test_one_process_speaks_for_all(monkeypatch):
    """What all processes run into is said once; what one process ran into, by that process."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        common.fail("said by the first")
    assert ended.value.code == 1
    with error_naming("said by this one"):
        common.fail("said by this one", everywhere=False)


# ------------------------------------------------------------------------------------------ shapes

SCENES = range(300)


def words(caption):
    return re.findall(r"[a-z]+", caption)


def test_scenes_are_functions_of_their_number():
    """A scene, its picture and its captions are the same every time, and differ between scenes."""
    assert np.array_equal(shapes.draw_scene(5), shapes.draw_scene(5)) and shapes.describe_scene(5) == shapes.describe_scene(5)
    assert not np.array_equal(shapes.draw_scene(5), shapes.draw_scene(6)) and shapes.shapes_scene(5) != shapes.shapes_scene(6)


def test_scenes_hold_one_to_three_objects_apart():
    """Each object lies within the picture and none touches another."""
    counts = set()
    for scene in SCENES:
        objects = shapes.shapes_scene(scene)
        counts.add(len(objects))
        for o in objects:
            assert 0 <= min(o.box) and max(o.box) <= 1
        for o, p in itertools.combinations(objects, 2):
            assert math.hypot(o.x - p.x, o.y - p.y) > o.radius + p.radius
    assert counts == {1, 2, 3}


def test_pictures_show_the_scene():
    """In the middle of a solid circle, square or heart is its colour, and not the background's."""
    for scene in range(40):
        picture = np.asarray(shapes.draw_scene(scene), float)
        for o in shapes.shapes_scene(scene):
            if o.fill == "solid" and o.shape in ("circle", "square", "heart"):
                x, y = round(o.x * 96), round(o.y * 96)
                seen = picture[y - 2 : y + 3, x - 2 : x + 3].mean((0, 1))
                assert np.abs(seen - shapes.COLOURS[o.colour]).max() < 30


def test_captions_name_what_is_there_and_nothing_else():
    """Shapes, colours, sizes and fills in the captions are those of the scene; every shape is named."""
    for scene in SCENES:
        objects, captions = shapes.shapes_scene(scene), shapes.describe_scene(scene)
        said = {word for caption in captions for word in words(caption)}
        for vocabulary, present in (
            (shapes.SHAPES, {o.shape for o in objects}), (shapes.COLOURS, {o.colour for o in objects}),
            (("large", "small"), {o.size for o in objects}), (("solid", "hollow", "striped"), {o.fill for o in objects}),
        ):  # fmt: skip
            assert said & set(vocabulary) <= present
        assert {o.shape for o in objects} <= said
        assert len(set(captions)) == 5


def test_captions_pair_the_words_rightly():
    """"a red circle" and "the red circle is large" are said only when one object is all of it."""
    adjectives = {**{c: "colour" for c in shapes.COLOURS}, "large": "size", "small": "size", "solid": "fill", "hollow": "fill", "striped": "fill"}
    for scene in SCENES:
        objects = shapes.shapes_scene(scene)
        for caption in shapes.describe_scene(scene):
            said = words(caption)
            for n, word in enumerate(said):
                if word in shapes.SHAPES:
                    before = list(itertools.takewhile(adjectives.__contains__, reversed(said[:n])))
                    after = [a for a in said[n + 2 :] if a in adjectives] if said[n + 1 : n + 2] == ["is"] else []
                    assert any(o.shape == word and all(getattr(o, adjectives[a]) == a for a in before + after) for o in objects), caption


def test_relations_are_true():
    """"X to the left of Y" in the first caption: the first object's coordinates against the second's."""
    true = {"left of": lambda o, p: o.x < p.x, "right of": lambda o, p: o.x > p.x, "above": lambda o, p: o.y < p.y, "below": lambda o, p: o.y > p.y}
    seen = set()
    for scene in SCENES:
        objects, caption = shapes.shapes_scene(scene), shapes.describe_scene(scene)[0]
        for relation, holds in true.items():
            if len(objects) > 1 and f" {relation} " in caption:
                subject, other = (re.findall("|".join(shapes.SHAPES), side)[0] for side in caption.split(relation))
                assert (subject, other) == (objects[0].shape, objects[1].shape) and holds(*objects[:2]), caption
                seen.add(relation)
    assert seen == set(true)


def test_mirrored_scenes_swap_left_and_right(monkeypatch):
    """The captions of a mirrored scene are the captions with "left" and "right" swapped: flips can do the same."""
    plain = {scene: shapes.describe_scene(scene) for scene in SCENES}
    scenes = {scene: shapes.shapes_scene(scene) for scene in SCENES}
    monkeypatch.setattr(shapes, "shapes_scene", lambda scene: [o._replace(x=1 - o.x, angle=-o.angle) for o in scenes[scene]])
    swap = {"left": "right", "right": "left"}
    for scene in SCENES:
        assert shapes.describe_scene(scene) == [re.sub(r"\b(left|right)\b", lambda m: swap[m[0]], caption) for caption in plain[scene]]


def test_shapes_data(monkeypatch):
    """As captions and as labels: tags are the shapes present, and no scene is in both splits."""
    monkeypatch.setattr(shapes, "SHAPES_SIZE", {"train": 30, "val": 10})
    train, val = (common.caption_data("shapes", split=split) for split in ("train", "val"))
    assert (len(train), len(val)) == (30, 10) and not set(train.images) & set(val.images)
    for i in range(10):
        scene = val.images[i]
        assert val.captions_of(i) == shapes.describe_scene(scene) and np.array_equal(val.images.open(i), shapes.draw_scene(scene))
        assert {val.tag_names[tag] for tag in val.tags_of(i)} == {o.shape for o in shapes.shapes_scene(scene)}
    labels = probe.label_data("shapes", split="val")
    assert [np.flatnonzero(row).tolist() for row in labels.labels] == [val.tags_of(i) for i in range(10)]


# ------------------------------------------------------------------------------------------ read_crop


def everything(width, height):
    return 0, 0, width, height


def read(path, crop=everything, size=32):
    """read_crop of one readable file -> float pixels."""
    pixels, index, unreadable = common.read_crop(common.ImageFiles([str(path)]), 0, crop, size)
    assert pixels.dtype == np.uint8 and pixels.shape == (size, size, 3) and index == 0 and not unreadable
    return pixels.astype(float)


def resized(image, size=32):
    return np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR), float)


def test_read_crop_is_crop_then_resize(tmp_path):
    """One step gives the pixels of two. At the border it may look at the pixels around the box; within, it is exact."""
    picture, box = shapes.draw_scene(5, 200), (20, 30, 140, 150)
    picture.save(tmp_path / "a.png")
    ours, theirs = read(tmp_path / "a.png", lambda w, h: box, 48), resized(picture.crop(box), 48)
    assert np.array_equal(ours[1:-1, 1:-1], theirs[1:-1, 1:-1]) and np.abs(ours - theirs).max() < 16
    assert np.array_equal(read(tmp_path / "a.png", size=48), resized(picture, 48))


def test_large_jpegs_are_decoded_small(tmp_path):
    """A large JPEG is decoded at a fraction of its size, and that is hardly seen; the crop is the right part of it."""
    picture = shapes.draw_scene(3, 1200).crop((0, 0, 1200, 900))
    picture.save(tmp_path / "a.jpg", quality=95)
    opened = []

    class Watched(common.ImageFiles):
        def open(self, i):
            opened.append(super().open(i))
            return opened[-1]

    box = (401.5, 300.25, 701.5, 600.25)
    pixels, _, _ = common.read_crop(Watched([str(tmp_path / "a.jpg")]), 0, lambda w, h: box, 64)
    assert opened[0].size == (300, 225)  # a quarter: 300 / 4 is still more than 64
    off = lambda shift: np.abs(pixels - np.asarray(picture.resize((64, 64), Image.BILINEAR, tuple(np.add(box, shift))), float)).mean()
    assert off(0) < 3
    assert all(off(shift) > 1.5 * off(0) for shift in ((6, 0, 6, 0), (-6, 0, -6, 0), (0, 6, 0, 6), (0, -6, 0, -6)))


def test_small_jpegs_are_decoded_whole(tmp_path):
    """When no smaller version has enough pixels the result is that of a full decode."""
    shapes.draw_scene(3, 100).save(tmp_path / "a.jpg")
    assert np.array_equal(read(tmp_path / "a.jpg", size=64), resized(Image.open(tmp_path / "a.jpg"), 64))


@pytest.mark.parametrize("suffix", ("jpg", "png"))
@pytest.mark.parametrize("orientation, stored", [(3, Image.ROTATE_180), (6, Image.ROTATE_90), (8, Image.ROTATE_270), (2, Image.FLIP_LEFT_RIGHT)])
def test_rotated_photos_come_upright(tmp_path, suffix, orientation, stored):
    """A phone stores how it was held; the crop is cut from the upright photo."""
    upright, exif = shapes.draw_scene(3, 160).crop((0, 0, 160, 100)), Image.Exif()
    exif[0x0112] = orientation
    upright.transpose(stored).save(tmp_path / f"a.{suffix}", exif=exif)
    box = (10, 20, 90, 100)
    seen = read(tmp_path / f"a.{suffix}", lambda w, h: box if (w, h) == (160, 100) else (0, 0, 1, 1))
    assert np.abs(seen - resized(upright.crop(box))).mean() < 4


@pytest.mark.filterwarnings("ignore:Palette images")
def test_other_colour_modes(tmp_path):
    """Grey, CMYK, palette and transparent files become the RGB picture that one sees."""
    picture = shapes.draw_scene(8, 64)
    grey, palette, transparent = picture.convert("L"), picture.quantize(64), picture.copy()
    transparent.putalpha(255)
    grey.save(tmp_path / "grey.jpg", quality=95)
    grey.convert("LA").save(tmp_path / "grey.png")
    picture.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    palette.save(tmp_path / "palette.png", transparency=0)
    palette.save(tmp_path / "alphas.png", transparency=bytes(range(0, 256, 4)))
    palette.save(tmp_path / "palette.gif")
    transparent.save(tmp_path / "alpha.png")
    picture.convert("1").save(tmp_path / "bits.png")
    for name, seen in (("grey.jpg", grey), ("grey.png", grey), ("cmyk.jpg", picture), ("palette.png", palette),
                       ("alphas.png", palette), ("palette.gif", palette), ("alpha.png", picture), ("bits.png", picture.convert("1"))):  # fmt: skip
        assert np.abs(read(tmp_path / name) - resized(seen)).mean() < 4, name


def test_16_bit_grey(tmp_path):
    """16-bit pictures (X-rays, satellites) keep their shades: they must not turn white."""
    grey = shapes.draw_scene(8, 64).convert("L")
    Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert np.abs(read(tmp_path / "a.png") - resized(grey)).mean() < 4


def damage(tmp_path):
    """Four files: garbage, a truncated JPEG, a good one, an empty one."""
    shapes.draw_scene(1, 64).save(tmp_path / "good.jpg")
    (tmp_path / "garbage.jpg").write_bytes(b"this is no picture" * 50)
    (tmp_path / "truncated.jpg").write_bytes((tmp_path / "good.jpg").read_bytes()[:900])
    (tmp_path / "empty.jpg").touch()
    return common.ImageFiles(str(tmp_path / f"{name}.jpg") for name in ("garbage", "truncated", "good", "empty"))


def test_undecodable_images_are_replaced_and_reported(tmp_path):
    """The next image that can be decoded takes their place, past the end of the list too."""
    images = damage(tmp_path)
    good = read(images[2])
    for start, passed_over in ((0, [0, 1]), (1, [1]), (2, []), (3, [3, 0, 1])):
        pixels, index, unreadable = common.read_crop(images, start, everything, 32)
        assert index == 2 and unreadable == passed_over and np.array_equal(pixels, good)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damaged_files_never_raise(tmp_path):
    """Files with bytes overturned or cut off are read or replaced: no exception but those that read_crop knows."""
    exif, draw = Image.Exif(), random.Random(0)
    exif[0x0112], exif[0x010E] = 6, "upside down"
    shapes.draw_scene(1, 48).save(tmp_path / "good.png")
    for suffix in ("jpg", "png", "webp", "gif"):
        shapes.draw_scene(2, 48).save(tmp_path / f"a.{suffix}", **({} if suffix == "gif" else {"exif": exif}))
        whole = (tmp_path / f"a.{suffix}").read_bytes()
        images = common.ImageFiles([str(tmp_path / f"a.{suffix}"), str(tmp_path / "good.png")])
        for _ in range(40):
            damaged = bytearray(whole[: draw.choice((None, draw.randrange(len(whole))))])
            for _ in range(min(8, len(damaged))):
                damaged[draw.randrange(min(len(damaged), draw.choice((100, 10**6))))] = draw.randrange(256)
            (tmp_path / f"a.{suffix}").write_bytes(damaged)
            assert common.read_crop(images, 0, everything, 8)[1] in (0, 1)


# ------------------------------------------------------------------------------------------ crops, batches


@pytest.mark.parametrize("width, height", [(640, 480), (375, 500), (64, 64)])
def test_random_crops_keep_their_promises(width, height):
    """Inside the image, 20-100% of its area, aspect between 3/4 and 4/3, and each of these ranges is used."""
    crop = common.random_crop(np.random.default_rng(0))
    left, top, right, bottom = np.array([crop(width, height) for _ in range(2000)]).T
    area, aspect = (right - left) * (bottom - top) / (width * height), (right - left) / (bottom - top)
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    assert 0.2 - 1e-9 <= area.min() < 0.22 and 0.8 < area.max() <= 1 + 1e-9
    assert 3 / 4 - 1e-9 <= aspect.min() < 0.77 and 1.3 < aspect.max() <= 4 / 3 + 1e-9


def test_random_crop_of_a_strip():
    """Where no such crop fits, the central square is taken."""
    assert common.random_crop(np.random.default_rng(0))(1000, 10) == (495, 0, 505, 10)


def test_centre_crop():
    """224 / 256 of the smaller side, in the middle."""
    assert common.centre_crop(224 / 256)(512, 256) == (144, 16, 368, 240)


def take(batches, size, batch_size, ranks=1, seed=0, start=0):
    """The first batches of an InfiniteSampler, each put together from the ranks' shares."""
    parts = []
    for rank in range(ranks):
        sampler = iter(common.InfiniteSampler(size, batch_size, common.World(rank, ranks, CPU), seed, start))
        share = batch_size // ranks
        parts.append([list(itertools.islice(sampler, share)) for _ in range(batches)])
    return [list(itertools.chain(*shares)) for shares in zip(*parts)]


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_every_index_once_per_epoch(ranks):
    """Over all ranks, an epoch is a permutation of the data, and every epoch another one."""
    keys = list(itertools.chain(*take(10 * 3, 40, 4, ranks)))  # three epochs of 40
    epochs = [[index for epoch, index in keys if epoch == e] for e in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("ranks", (2, 4))
def test_batches_do_not_depend_on_the_number_of_processes(ranks):
    """The same global batches, also where an epoch ends within one."""
    assert take(20, 37, 8, ranks) == take(20, 37, 8, 1)


@pytest.mark.parametrize("ranks", (1, 2))
def test_sampler_starts_anywhere(ranks):
    """Starting at iteration k is the same as having seen k batches."""
    assert take(5, 37, 8, ranks, start=13) == take(18, 37, 8, ranks)[13:]


def test_sampler_with_fewer_images_than_a_batch():
    """Images repeat within a batch, epoch by epoch."""
    batch = list(itertools.chain(*take(3, 3, 8)))
    assert [epoch for epoch, _ in batch] == [n // 3 for n in range(24)] and sorted(batch[:3]) == [(0, 0), (0, 1), (0, 2)]


def test_sampler_depends_on_the_seed():
    """Another seed, another order."""
    assert take(3, 40, 8, seed=0) != take(3, 40, 8, seed=1)


class Draws(Dataset):
    """A sample is what its generator draws, and whether the process ignores SIGTERM and Ctrl-C."""

    def __getitem__(self, key):
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGTERM, signal.SIGINT)]
        return common.sample_rng(0, *key).random(3), key[1], ignored


def load(workers, batches=6):
    sampler = common.InfiniteSampler(20, 4, ALONE, 0)
    return list(itertools.islice(common.make_loader(Draws(), sampler, 4, workers, None, CPU), batches))


def test_batches_do_not_depend_on_the_number_of_workers():
    """No worker or two: the same bits in the same order. The workers leave signals to the main process."""
    alone, together = load(0), load(2)
    for (x, i, _), (y, j, ignored) in zip(alone, together, strict=True):
        assert torch.equal(x, y) and torch.equal(i, j) and all(flag.all() for flag in ignored)
    assert len({tuple(x.flatten().tolist()) for x, _, _ in alone}) == 6


FAILING_SCRIPT = """
import common, test_common

def main(args):
    sampler = common.InfiniteSampler(20, 4, test_common.ALONE, 0)
    batches = iter(common.make_loader(test_common.Draws(), sampler, 4, 2, None, test_common.CPU))  # as in Feed
    next(batches)
    raise RuntimeError("CUDA out of memory")

common.run(main, lambda: None)
"""


def test_an_error_ends_the_program_and_its_workers():
    """Workers that ignore SIGTERM are not waited for for ever when the main process dies of an error."""
    path = os.pathsep.join(os.path.dirname(module.__file__) for module in (common, sys.modules[__name__]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", FAILING_SCRIPT], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1 and ended.stderr.strip().endswith("RuntimeError: CUDA out of memory")


TWO_PROCESSES = """
import sys
import common

world = common.start_processes()
with common.main_first(world):
    if world.is_main and sys.argv[1] == "fail":
        common.fail("no room", everywhere=False)
    print(f"rank {world.rank} has been here", flush=True)
"""


@pytest.mark.parametrize("first", ["succeeds", "fail"])
def test_the_first_process_goes_first(first, tmp_path):
    """The others wait for the first, and do not wait for ever, nor repeat its work, when it has failed; its error is told once."""
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(common.__file__), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, first]
    ended = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if first == "succeeds":
        assert ended.returncode == 0 and ended.stdout.splitlines() == ["rank 0 has been here", "rank 1 has been here"]
    else:
        assert ended.returncode == 1 and "has been here" not in ended.stdout and ended.stderr.count("error: no room") == 1


def test_feed_reports_unreadable_images():
    """The list of unreadable images is taken out of the batch and given to the run; waiting is counted."""
    reported = []
    run = types.SimpleNamespace(report_unreadable=lambda indices, images: reported.append((indices, images)))
    feed = common.Feed([{"images": torch.zeros(2), "unreadable": [4, 7]}], CPU, run, "the images")
    assert list(next(feed)) == ["images"] and reported == [([4, 7], "the images")] and feed.waited > 0


# ------------------------------------------------------------------------------------------ augmentation

MEAN, STD = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
GREY = torch.tensor([0.299, 0.587, 0.114])
NEUTRAL = (1.0, 1.0, 1.0, 0.0)


@pytest.fixture
def pixels():
    """Four images of middle shades, which no jitter in these tests drives out of [0, 1]."""
    return torch.randint(100, 156, (4, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def planes(pixels):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [0, 1], as torchvision wants it."""
    return pixels.permute(0, 3, 1, 2) / 255


def jittered(pixels, *parameters):
    """augment with the same parameters for every image, normalisation taken back."""
    jitter = torch.tensor(parameters, dtype=torch.float32).expand(len(pixels), 4)
    return common.augment(pixels, jitter) * STD + MEAN


def test_augment_normalises(pixels):
    """Without jitter it is torchvision's normalize, and so it is with neutral jitter."""
    expected = TF.normalize(planes(pixels), common.IMAGENET_MEAN, common.IMAGENET_STD)
    torch.testing.assert_close(common.augment(pixels), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(common.augment(pixels, torch.tensor([NEUTRAL] * 4)), expected, rtol=0, atol=1e-5)


def test_augment_gives_channels_last_float32(pixels):
    """The layout that convolutions are fastest in, without a copy."""
    for images in (common.augment(pixels), common.augment(pixels, torch.tensor([NEUTRAL] * 4))):
        assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("factor", (0.6, 0.9, 1.4))
def test_brightness(pixels, factor):
    """Brightness is torchvision's."""
    torch.testing.assert_close(jittered(pixels, factor, 1, 1, 0), TF.adjust_brightness(planes(pixels), factor), rtol=0, atol=1e-5)


@pytest.mark.parametrize("factor", (0.6, 0.9, 1.4))
@pytest.mark.parametrize("position, adjust", [(1, TF.adjust_contrast), (2, TF.adjust_saturation)], ids=("contrast", "saturation"))
def test_contrast_and_saturation(pixels, monkeypatch, factor, position, adjust):
    """Contrast and saturation are torchvision's, once its weight of red is 0.299 (it rounds to 0.2989) as in ours."""
    from torchvision.transforms import _functional_tensor

    monkeypatch.setattr(_functional_tensor, "rgb_to_grayscale", lambda image, *_: torch.einsum("...chw,c->...hw", image, GREY)[..., None, :, :])
    parameters = [1.0, 1.0, 1.0, 0.0]
    parameters[position] = factor
    torch.testing.assert_close(jittered(pixels, *parameters), adjust(planes(pixels), factor), rtol=0, atol=1e-5)


def literal_jitter(pixels, brightness, contrast, saturation, hue):
    """Brightness, contrast, saturation, hue, one after the other, pixel by pixel in float64: (H, W, 3)."""
    grey, to_yiq = GREY.double(), torch.tensor([(0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)]).double()
    x = brightness * pixels.double() / 255
    x = contrast * x + (1 - contrast) * (x @ grey).mean()
    x = saturation * x + (1 - saturation) * (x @ grey)[..., None]
    y, i, q = (x @ to_yiq.T).unbind(-1)
    turn = 2 * math.pi * hue
    i, q = math.cos(turn) * i - math.sin(turn) * q, math.sin(turn) * i + math.cos(turn) * q
    return torch.stack([y, i, q], -1) @ torch.linalg.inv(to_yiq).T


def test_the_four_together(pixels):
    """One matrix and one offset are the four maps in the documented order, with other parameters for each image."""
    parameters = [(0.8, 1.3, 0.7, 0.08), (1.2, 0.7, 1.4, -0.1), (0.7, 1.2, 1.3, 0.03), (1.3, 0.8, 0.6, -0.05)]
    ours = common.augment(pixels, torch.tensor(parameters)) * STD + MEAN
    for image, result, four in zip(pixels, ours, parameters):
        expected = literal_jitter(image, *four).permute(2, 0, 1).float()
        assert 0 < expected.min() and expected.max() < 1  # nothing is clamped here
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_parameters_belong_to_their_image(pixels):
    """What one image gets does not depend on the others in its batch."""
    jitter = torch.tensor([(0.8, 1.3, 0.7, 0.08), (1.2, 0.7, 1.4, -0.1), NEUTRAL, (1.3, 0.8, 0.6, -0.05)])
    together = common.augment(pixels, jitter)
    for i in range(4):
        torch.testing.assert_close(together[i : i + 1], common.augment(pixels[i : i + 1], jitter[i : i + 1]))


def test_hue_rotates_colours(pixels):
    """Colours change, brightness as the eye sees it does not; a whole turn is no turn."""
    before, after = planes(pixels), jittered(pixels, 1, 1, 1, 0.1)
    assert (before - after).abs().max() > 0.02
    luma = lambda images: torch.einsum("bchw,c->bhw", images, GREY)
    torch.testing.assert_close(luma(after), luma(before), rtol=0, atol=1e-5)
    torch.testing.assert_close(jittered(pixels, 1, 1, 1, 1.0), before, rtol=0, atol=1e-5)


def test_hue_keeps_grey():
    """Grey has no hue to rotate."""
    grey = torch.arange(0, 256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    torch.testing.assert_close(jittered(grey, 1, 1, 1, 0.37), planes(grey), rtol=0, atol=1e-5)


def test_jitter_is_clamped():
    """No value leaves [0, 1]."""
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(8, 12).view(1, 8, 8, 3)
    result = jittered(image, 1.4, 1.4, 1.4, 0.1)
    assert -1e-6 < result.min() and result.max() < 1 + 1e-6


def test_draw_colour_jitter():
    """A fifth of the images stay as they are; the factors of the others fill their ranges."""
    rng = np.random.default_rng(0)
    drawn = np.array([common.draw_colour_jitter(rng) for _ in range(4000)])
    neutral = (drawn == np.float32(NEUTRAL)).all(1)
    assert drawn.dtype == np.float32 and abs(neutral.mean() - 0.2) < 0.03
    for values, (low, high) in zip(drawn[~neutral].T, [(0.6, 1.4)] * 3 + [(-0.1, 0.1)]):
        width = high - low
        assert low - 1e-6 <= values.min() < low + 0.01 * width and high - 0.01 * width < values.max() <= high + 1e-6
        assert abs(values.mean() - (low + high) / 2) < 0.03 * width
    assert np.abs(np.corrcoef(drawn[~neutral].T) - np.eye(4)).max() < 0.06


# ------------------------------------------------------------------------------------------ backbones

TORCHVISION = {name: name for name in common.BACKBONES} | {"resnet50w2x": "wide_resnet50_2", "vgg16": "vgg16_bn"}
CLASSIFIER = {"resnet": ["fc.weight", "fc.bias"], "vgg16": [f"classifier.{n}.{name}" for n in (0, 3, 6) for name in ("weight", "bias")]}


def on_meta(build, *arguments):
    """A model with shapes and names but no numbers: quick to build."""
    with torch.device("meta"):
        return build(*arguments)


@pytest.mark.parametrize("arch", common.BACKBONES)
def test_backbones_have_torchvisions_names(arch):
    """Exactly the classifier is missing and nothing is unexpected; the shapes fit, too."""
    reference, ours = on_meta(getattr(torchvision.models, TORCHVISION[arch])), on_meta(common.build_backbone, arch)
    keys = reference.load_state_dict(ours.state_dict(), strict=False)
    assert keys.missing_keys == CLASSIFIER["vgg16" if arch == "vgg16" else "resnet"] and keys.unexpected_keys == []
    assert ours.channels == (512 if arch == "vgg16" else reference.fc.in_features)


def test_backbone_computes_torchvisions_features():
    """The output is torchvision's before its average pooling: 7 x 7 for images of 224."""
    torch.manual_seed(0)
    ours, theirs = common.build_backbone("resnet18").eval(), torchvision.models.resnet18().eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        features, expected = ours(images), torch.nn.Sequential(*list(theirs.children())[:-2])(images)
    assert features.shape == (1, 512, 7, 7) and torch.equal(features, expected)


def test_vgg16_computes_torchvisions_features():
    """The output is that of vgg16_bn.features; C-11, C-12 and C-13 are what its 11th to 13th convolutions put out after their ReLU."""
    torch.manual_seed(0)
    ours = common.build_backbone("vgg16").eval()
    theirs = torchvision.models.vgg16_bn(init_weights=False).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    images, outputs, convolutions = torch.randn(2, 3, 64, 64), {}, 0
    for module in theirs.features:
        convolutions += isinstance(module, torch.nn.Conv2d)
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_hook(lambda _, __, output, n=convolutions: outputs.update({n: output.clone()}))
    with torch.no_grad():
        expected, features, maps = theirs.features(images), ours(images), ours.maps(images)
    assert convolutions == 13 and features.shape == (2, 512, 2, 2) and torch.equal(features, expected)
    assert maps.keys() == {"C-11", "C-12", "C-13"}
    assert all(maps[f"C-{n}"].shape == (2, 512, 4, 4) and torch.equal(maps[f"C-{n}"], outputs[n]) for n in (11, 12, 13))
    assert torch.equal(torch.nn.functional.max_pool2d(maps["C-13"], 2), features)


def prefixed(prefix, state, **more):
    return {**{prefix + key: value for key, value in state.items()}, **more}


def heads(prefix, *names):
    return {prefix + name: torch.zeros(2) for name in names}


FOREIGN = {
    "backbone.pth": lambda s: s,
    "torchvision": lambda s: {**s, **heads("", "fc.weight", "fc.bias")},
    "checkpoint.pth of ours": lambda s: {"script": "virtex", "iteration": 7, "model": prefixed("visual.cnn.", s, **heads("textual.", "output.weight"))},
    "official VirTex": lambda s: {"model": prefixed("visual.cnn.", s, **heads("backward_textual.", "output.bias")), "iteration": 500000},
    "MoCo v1": lambda s: {"state_dict": prefixed("module.encoder_q.", s, **prefixed("module.encoder_k.", s), **heads("module.", "encoder_q.fc.weight", "encoder_q.fc.bias", "queue", "queue_ptr"))},
    "MoCo v2": lambda s: {"state_dict": prefixed("module.encoder_q.", s, **heads("module.encoder_q.fc.", "0.weight", "0.bias", "2.weight", "2.bias"), **heads("module.", "queue"))},
    "SwAV": lambda s: prefixed("module.", s, **heads("module.", "projection_head.0.weight", "projection_head.1.running_mean", "prototypes.weight")),
    "VICReg": lambda s: {"epoch": 1, "model": prefixed("module.backbone.", s, **heads("module.projector.", "0.weight"))},
    "DINO": lambda s: {"student": prefixed("module.backbone.", s), "teacher": prefixed("backbone.", s, **heads("head.", "mlp.0.weight", "last_layer.weight_v"))},
}  # fmt: skip


@pytest.mark.parametrize("source", FOREIGN)
def test_foreign_checkpoints(source):
    """Whatever wraps it, the ResNet inside comes out: its tensors and none of the heads'."""
    state = on_meta(common.build_backbone, "resnet18").state_dict()
    arch, found = common.backbone_weights(FOREIGN[source](state), source)
    assert arch == "resnet18" and found.keys() == state.keys() and all(found[key] is state[key] for key in state)


@pytest.mark.parametrize("arch", common.BACKBONES)
def test_architectures_are_recognised(arch):
    """By names and shapes, also where two differ in widths only."""
    state = on_meta(getattr(torchvision.models, TORCHVISION[arch])).state_dict()
    assert common.backbone_weights(state, "file")[0] == arch


def test_files_older_than_num_batches_tracked():
    """Older files (torchvision's resnet50-19c8e357.pth) lack BatchNorm's counters, which inference does not use."""
    state = common.build_backbone("resnet18").state_dict()
    arch, found = common.backbone_weights({key: value for key, value in state.items() if "num_batches" not in key}, "old.pth")
    backbone = common.build_backbone(arch)
    backbone.load_state_dict(found)
    assert arch == "resnet18" and torch.equal(backbone.conv1.weight, state["conv1.weight"])


@pytest.mark.parametrize(
    "change, named",
    [(lambda s: s.pop("layer3.0.bn2.bias"), "missing ['layer3.0.bn2.bias']"),
     (lambda s: s.update({"layer3.0.se.weight": torch.zeros(1)}), "unexpected ['layer3.0.se.weight']"),
     (lambda s: s.update({"layer3.0.conv2.weight": torch.zeros(1)}), "missing ['layer3.0.conv2.weight']")],
    ids=("missing", "unexpected", "other shape"),
)  # fmt: skip
def test_keys_that_do_not_fit_are_named(change, named):
    """A ResNet with a key too few or too many is refused; the file, the closest architecture and the key are named."""
    state = dict(on_meta(common.build_backbone, "resnet50").state_dict())
    change(state)
    with error_naming("some.pth", "no resnet50", named):
        common.backbone_weights(state, "some.pth")


def test_a_checkpoint_without_a_resnet():
    """A file with other weights is refused by its first keys."""
    with error_naming("vit.pth", "no ResNet or VGG", "patch_embed.weight"):
        common.backbone_weights({"model": {"patch_embed.weight": torch.zeros(1)}}, "vit.pth")


@pytest.mark.parametrize("content", (None, b"", b"Not a checkpoint.\n" * 20, "half"), ids=("missing", "empty", "text", "half"))
def test_no_checkpoint(tmp_path, content):
    """What is missing, empty, no checkpoint at all or half of one is refused by its name."""
    if content == "half":
        torch.save(torch.zeros(5000), tmp_path / "whole.pth")
        content = (tmp_path / "whole.pth").read_bytes()[:9000]
    if content is not None:
        (tmp_path / "file.pth").write_bytes(content)
    with error_naming(tmp_path / "file.pth"):
        common.read_checkpoint(str(tmp_path / "file.pth"))


def test_a_tensor_is_no_state_dict(tmp_path):
    """A file that loads but holds something else."""
    with error_naming("whole.pth", "no state dict"):
        common.backbone_weights(torch.zeros(5), "whole.pth")


class Touch:
    """Pickled, it is a command to create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


def test_checkpoints_that_run_code_are_refused(tmp_path):
    """weights_only: the code in a foreign checkpoint is not run, in torch's format nor in plain pickle."""
    torch.save({"model": Touch(tmp_path / "ran")}, tmp_path / "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Touch(tmp_path / "ran"), 2))
    for name in ("evil.pth", "evil.pkl"):
        with error_naming(tmp_path / name, "cannot be loaded"):
            common.read_checkpoint(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------ schedules


def test_warmup_cosine():
    """Linear from 0 to 1 over the warm-up, then half a cosine to 0."""
    values = [common.warmup_cosine(iteration, 110, 10) for iteration in (0, 1, 5, 10, 35, 60, 110)]
    assert values == pytest.approx([0, 0.1, 0.5, 1, 0.5 + math.sqrt(2) / 4, 0.5, 0], abs=1e-12)
    assert common.warmup_cosine(0, 10, 0) == 1 and common.warmup_cosine(5, 10, 0) == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------ the output folder

FEED = types.SimpleNamespace(started=0.0, waited=0.0)


def make_run(folder, script="virtex", **flags):
    """A Run with a few flags in `folder`/run."""
    flags = {"output": str(folder / "run"), "fresh": False, "lr": 0.1, "batch_size": 4, "workers": 0, "data": "shapes", **flags}
    return common.Run(argparse.Namespace(**flags), script, ALONE)


def iterations(folder):
    return [json.loads(line)["iteration"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_infinite_weights_are_not_written(tmp_path):
    """The last good checkpoint stays when a step has made one weight infinite."""
    run = make_run(tmp_path)
    run.begin()
    run.save(1, model={"weight": torch.zeros(2)})
    with pytest.raises(SystemExit, match=r"the model is nan at iteration 2; checkpoint.pth keeps the last good state"):
        run.save(2, model={"bias": torch.zeros(1), "weight": torch.tensor([0.0, math.inf])})
    assert torch.load(tmp_path / "run" / "checkpoint.pth")["iteration"] == 1


def test_run_begins_and_goes_on(tmp_path):
    """A fresh folder has no checkpoint; after a save the next run starts from it."""
    run = make_run(tmp_path)
    assert run.begin() is None
    run.save(3, model={"w": torch.ones(2)})
    checkpoint = make_run(tmp_path).begin()
    assert checkpoint["iteration"] == 3 and torch.equal(checkpoint["model"]["w"], torch.ones(2))


def test_args_json(tmp_path):
    """All arguments, the command line and the versions of the libraries."""
    make_run(tmp_path).begin()
    content = json.loads((tmp_path / "run" / "args.json").read_text())
    assert content["lr"] == 0.1 and content["command"][1:] == sys.argv and content["versions"]["torch"] == torch.__version__


def test_metrics_are_those_up_to_the_checkpoint(tmp_path):
    """Lines after the checkpoint, and a last line that a kill cut in half, are dropped: they will be written again."""
    run = make_run(tmp_path)
    run.begin()
    for iteration in (2, 4, 6, 8):
        run.log(iteration, FEED, loss=1 / iteration)
        if iteration == 6:
            run.save(iteration)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "lo')
    again = make_run(tmp_path)
    again.begin()
    assert iterations(tmp_path) == [2, 4, 6]
    again.log(8, FEED, loss=0.5)
    assert iterations(tmp_path) == [2, 4, 6, 8]


def test_metrics_without_a_checkpoint_are_dropped(tmp_path):
    """A run killed before its first checkpoint starts over with an empty file."""
    run = make_run(tmp_path)
    run.begin()
    run.log(1, FEED, loss=1.0)
    make_run(tmp_path).begin()
    assert iterations(tmp_path) == []


def test_log_tells_speed_and_waiting(tmp_path, monkeypatch):
    """Images per second and the share of time spent waiting, since the line before or the start of the loop."""
    clock, feed = iter((10.0, 14.0)), types.SimpleNamespace(started=5.0, waited=2.0)
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    run = make_run(tmp_path)
    run.folder.mkdir()
    run.log(10, feed, loss=2.0)
    feed.waited = 3.0
    run.log(20, feed, loss=1.0)
    first, last = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    assert first == {"iteration": 10, "loss": 2.0, "images_per_s": 8.0, "data_wait": 0.4}
    assert last == {"iteration": 20, "loss": 1.0, "images_per_s": 10.0, "data_wait": 0.25}


def test_another_flag_is_refused(tmp_path):
    """A run is not continued with a flag that changes what it learns; the flag and both values are named."""
    run = make_run(tmp_path)
    run.begin()
    run.save(1)
    with error_naming("--batch-size 4", "not 8", "--fresh"):
        make_run(tmp_path, batch_size=8).begin()


def test_flags_that_change_nothing_may_differ(tmp_path):
    """More workers, another place of the data: the run goes on."""
    run = make_run(tmp_path, root="here")
    run.begin()
    run.save(1)
    assert make_run(tmp_path, root="there", workers=7).begin()["iteration"] == 1


def test_another_scripts_checkpoint_is_refused(tmp_path):
    """By name."""
    run = make_run(tmp_path, "tp")
    run.begin()
    run.save(1)
    with error_naming("a run of tp.py", "--output"):
        make_run(tmp_path, "virtex").begin()


def test_fresh_starts_over(tmp_path):
    """--fresh forgets the checkpoint, the metrics and the result, of whatever run it was."""
    run = make_run(tmp_path, "tp")
    run.begin()
    run.log(1, FEED, loss=1.0)
    run.save(1)
    run.finish(probe={})
    assert make_run(tmp_path, lr=0.5, fresh=True).begin() is None
    assert iterations(tmp_path) == [] and sorted(os.listdir(run.folder)) == ["args.json", "metrics.jsonl"]


def test_a_finished_run_says_so(tmp_path, capsys):
    """Started once more it does nothing, and that is no error."""
    run = make_run(tmp_path)
    run.begin()
    run.save(1)
    run.finish(score=1.5)
    with pytest.raises(SystemExit) as ended:
        make_run(tmp_path).begin()
    assert ended.value.code == 0 and "has ended" in capsys.readouterr().out
    assert json.loads((run.folder / "result.json").read_text()) == {"score": 1.5}


def test_an_output_that_cannot_be_made(tmp_path):
    """The output folder stands where a file is."""
    (tmp_path / "run").touch()
    with error_naming("--output", tmp_path / "run"):
        make_run(tmp_path).begin()


def test_saved_weights_are_plain(tmp_path):
    """backbone.pth: CPU tensors in the usual memory format, loaded with weights_only."""
    run = make_run(tmp_path)
    run.begin()
    run.save_weights("backbone.pth", {"w": torch.randn(2, 3, 4, 4, requires_grad=True).to(memory_format=torch.channels_last)})
    saved = torch.load(run.folder / "backbone.pth", weights_only=True)["w"]
    assert saved.is_contiguous() and not saved.requires_grad


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """When the disk is full as the last bytes are forced to it, the old file stays and nothing else lies about."""
    path = tmp_path / "checkpoint.pth"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with error_naming(path, "No space left on device", "kept"):
        common.write_file(path, lambda file: file.write(b"new"))
    assert os.listdir(tmp_path) == ["checkpoint.pth"] and path.read_bytes() == b"old"


def save_too_much(folder, numbers):
    """Write a checkpoint that does not fit -> the old one must be there, and only it."""
    path = folder / "checkpoint.pth"
    path.write_bytes(b"old")
    with error_naming(path, "kept"):
        common.write_file(path, lambda file: torch.save({"a": torch.zeros(numbers), "b": torch.zeros(numbers)}, file))
    assert os.listdir(folder) == ["checkpoint.pth"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("numbers", (10, 20_000, 1_000_000))
def test_a_checkpoint_on_a_full_device(tmp_path, numbers):
    """/dev/full takes no byte at all."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    (tmp_path / "checkpoint.pth.tmp").symlink_to("/dev/full")
    save_too_much(tmp_path, numbers)


@pytest.mark.parametrize("numbers", (8_100, 20_000, 1_000_000))
def test_a_checkpoint_that_fits_in_part(tmp_path, numbers):
    """The disk fills up while torch.save writes (here: the largest size that this process may give a file)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_000, hard))
    try:
        save_too_much(tmp_path, numbers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_on_a_full_disk(tmp_path):
    """A real disk of 64 KB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        save_too_much(tmp_path, 20_000)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_metrics_on_a_full_disk(tmp_path):
    """A metrics line that cannot be written ends the run with a line, not a traceback."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    run = make_run(tmp_path)
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").symlink_to("/dev/full")
    with error_naming("metrics.jsonl", "No space left on device"):
        run.log(1, FEED, loss=1.0)


def test_unreadable_images_are_named_once(tmp_path, capsys):
    """In the log and in skipped.txt, over the interruptions of a run."""
    images = common.ImageFiles(f"{n}.jpg" for n in range(300))
    for run in (make_run(tmp_path), make_run(tmp_path)):
        run.begin()
        run.report_unreadable([5, 5], images)
        run.report_unreadable([5, 7], images)
    assert (run.folder / "skipped.txt").read_text() == "5.jpg\n7.jpg\n"
    printed = capsys.readouterr().out
    assert printed.count("5.jpg") == 1 and printed.count("7.jpg") == 1


def test_too_many_unreadable_images_end_the_run(tmp_path):
    """One in a hundred is borne, more is not; the list is in skipped.txt."""
    images, run = common.ImageFiles(f"{n}.jpg" for n in range(200)), make_run(tmp_path)
    run.begin()
    run.report_unreadable([11, 22], images)
    with error_naming("3 of 200 images cannot be decoded", run.folder / "skipped.txt"):
        run.report_unreadable([33], images)
    assert (run.folder / "skipped.txt").read_text().split() == ["11.jpg", "22.jpg", "33.jpg"]


def test_a_loss_that_is_not_finite(tmp_path):
    """The run stops, and says which value, when, what is kept and what to try."""
    run = make_run(tmp_path)
    run.begin()
    run.check_finite(7, {"loss": 1e30, "gradient norm": 0.0})
    with error_naming("the loss is inf at iteration 7", "no checkpoint", "learning rate", "--warmup", "--amp off"):
        run.check_finite(7, {"loss": math.inf})
    run.save(5)
    with error_naming("the gradient norm is nan at iteration 8", "checkpoint.pth keeps the last good state"):
        run.check_finite(8, {"loss": 1.0, "gradient norm": math.nan})


# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_is_only_noted(number):
    """The loop sees the number and leaves when its step is done; afterwards the old handlers are back."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with common.StopSignals() as stop:
        assert stop.number == 0
        os.kill(os.getpid(), number)
        assert stop.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_signal_ends_at_once():
    """Ctrl-C, and again because it does not end quickly enough; the handlers are restored all the same."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), common.StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


# ------------------------------------------------------------------------------------------ features


def labelled(images):
    return probe.LabelData(images, np.arange(len(images), dtype=np.int8)[:, None], ["number"])


def test_features_are_pooled_in_eval_mode(coco_folder):
    """Pooled output of the backbone on the central crop; its running statistics and its mode stay as they were."""
    torch.manual_seed(0)
    backbone, data = common.build_backbone("resnet18"), probe.label_data("coco", str(coco_folder), "val2017")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    features, labels = probe.extract_features(backbone, data, 32, CPU)
    assert backbone.training and all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())
    pixels = common.read_crop(data.images, 3, common.centre_crop(224 / 256), 32)[0]
    with torch.no_grad():
        expected = backbone.eval()(common.augment(torch.from_numpy(pixels)[None])).mean((2, 3))[0].numpy()
    np.testing.assert_allclose(features[3], expected, rtol=1e-4, atol=1e-6)
    assert features.shape == (12, 512) and features.dtype == np.float32 and np.array_equal(labels, data.labels)


def test_features_leave_out_what_cannot_be_decoded(tmp_path, capsys):
    """Undecodable images are named and have neither features nor labels."""
    images = damage(tmp_path)
    features, labels = probe.extract_features(common.build_backbone("resnet18"), labelled(images), 32, CPU)
    assert len(features) == 1 and labels.tolist() == [[2]]
    printed = capsys.readouterr().out
    assert all(f"{name}.jpg" in printed for name in ("garbage", "truncated", "empty")) and "good.jpg" not in printed


def test_nothing_but_undecodable_images(tmp_path):
    """When no image can be decoded the program ends with a line, not with a traceback from inside a worker."""
    images = common.ImageFiles(damage(tmp_path)[i] for i in (0, 1, 3))
    with error_naming("decoded"):
        probe.extract_features(common.build_backbone("resnet18"), labelled(images), 32, CPU)


def test_probe_data_are_the_tags(coco_folder):
    """Without --probe-data the probe's labels are the tags; --probe-images limits the training images."""
    train, val = (common.caption_data("coco", str(coco_folder), split) for split in ("train2017", "val2017"))
    args = argparse.Namespace(probe_data=None, probe_root=None, probe_images=10, probe_every=0, data="coco", seed=0)
    name, fit, test = probe.probe_data(args, train, val)
    assert name == "coco" and len(fit.images) == len(fit.labels) == 10 and len(test.images) == 12
    row = {path: labels for path, labels in zip(fit.images, fit.labels)}
    for i in range(len(train)):
        if train.images[i] in row:
            assert np.flatnonzero(row[train.images[i]]).tolist() == train.tags_of(i)
    train.tag_names = None
    assert probe.probe_data(args, train, val) is None
    args.probe_every = 5
    with error_naming("--probe-every", "--probe-data"):
        probe.probe_data(args, train, val)


def test_an_even_attention_looks_even(tmp_path):
    """Brightness is in proportion to the map: no structure is drawn that is not there, and the strongest place is brightest."""
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    common.draw_attention(grey, "x", [("even", torch.full((2, 2), 0.25) + 1e-4 * torch.arange(4).view(2, 2)), ("left", torch.tensor([[0.4, 0.1], [0.4, 0.1]]))], tmp_path / "a.png", side=32)
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    even, left = sheet[34:66, 48:80], sheet[34:66, 88:120]
    assert np.ptp(even[8:24, 8:24], (0, 1)).max() <= 2
    assert left[16, 4, 0] > left[16, 28, 0] + 30


@pytest.mark.parametrize("script, lines", [
    ("virtex", ["224 on real data", "default 0.1 on shapes, 0.001 on real data", "default 0.02)"]),
    ("tp", ["default 0.8 on shapes, none or 0.8 0.9 or 0.833 0.917 on real data", "default 0.001 on shapes, 0.03 or 0.0001 or 0.001 on real data"]),
    ("icmlm", ["default 0.0 on shapes, 0.0 or 0.25 on real data", "default 1)"]),
    ("mmcontrastive", ["default 900 on shapes, none on real data", "default none on shapes, 200.0 on real data", "default 128)"]),
])  # fmt: skip
def test_help_tells_the_defaults(script, lines, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).get_args(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and all(line in told for line in lines)
