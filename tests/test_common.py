"""common.py: captioned images, decoding, batches, augmentation, backbones, flags, output folder."""

import argparse
import contextlib
import errno
import functools
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
import time

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms.functional as TF
from conftest import ALONE, CPU, ROOT, TORCHRUN, environment, files_in, metrics
from PIL import Image
from torch import nn

import common
import pictures
import shapes
import sources


@contextlib.contextmanager
def fails(*parts):
    """The block ends the program with one line, "error: ...", in which each of `parts` stands."""
    with pytest.raises(SystemExit) as stopped:
        yield
    message = str(stopped.value)
    assert message.startswith("error: ") and "\n" not in message
    for part in parts:
        assert str(part) in message


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------- packed strings


def test_packed_strings():
    """Letters of every alphabet come back; half a surrogate pair (JSON allows it) is no error."""
    strings = ["a dog", "", "schöne Grüße", "日本語", "🙂🙃", ""]
    packed = common.PackedStrings(strings[:3])
    for string in strings[3:]:
        packed.append(string)
    assert list(packed) == strings and len(packed) == 6 and packed[3] == "日本語"
    for outside in (6, -1):
        with pytest.raises(IndexError):
            packed[outside]
    assert common.PackedStrings(["a \ud83d dog"])[0] == "a ? dog"
    # One costs its letters, an eighth more (a bytearray grows ahead) and 9 bytes.
    captions = [f"photo number {n} shows a thing" for n in range(200_000)]
    packed = common.PackedStrings(captions)
    size = sys.getsizeof(packed.buffer) + sys.getsizeof(packed.ends)
    assert size < 1.13 * sum(map(len, captions)) + 9 * len(captions)


def test_digest():
    """It changes with each caption, its image, tags and their names, but not with the paths."""

    def digest(one=("a", "bc"), two=("d",), tags=([0], [1]), names="xy", path=""):
        data = common.CaptionData(common.ImageFiles(), list(names))
        data.add(f"{path}1.jpg", one, tags[0])
        data.add(f"{path}2.jpg", two, tags[1])
        return data.digest()

    found = {digest(), digest(["a", "bd"]), digest(["ab", "c"]), digest(["a"], ["bc", "d"])}
    found |= {digest(tags=([0], [0])), digest(tags=([0, 1], [])), digest(names="xz")}
    assert len(found) == 7 and digest(path="moved/") == digest()


# --------------------------------------------------------------------------------- data sources


def coco(root, split="train2017", **more):
    return common.caption_data("coco", str(root), split, **more)


def test_coco(coco_folder, tmp_path):
    """Images, their captions and their tags belong together; a file of instances is optional."""
    root = shutil.copytree(coco_folder, tmp_path / "coco")
    data = coco(root, "val2017")
    assert len(data) == 12 and data.tag_names == list(shapes.SHAPES) and data.captioned().all()
    for i, scene in enumerate(range(1000, 1012)):
        objects = shapes.objects_of(scene)
        assert data.images[i] == f"{root}/val2017/{scene:012d}.jpg"
        assert data.captions_of(i) == shapes.describe(scene, objects)
        assert data.tags_of(i) == shapes.tags(objects)
    (root / "annotations" / "instances_val2017.json").unlink()
    untagged = coco(root, "val2017")
    assert untagged.tag_names is None and untagged.tags_of(0) == []
    assert list(untagged.captions) == list(data.captions)


def test_real_photos(real_data):
    """The genuine layout: COCO with five captions or more and 80 categories, Flickr8k without."""
    for split in ("train2017", "val2017"):
        data = coco(real_data / "coco-mini", split)
        assert len(data) == 32 and len(data.tag_names) == 80 and data.tags
        assert min(np.diff(data.first_caption)) == 5
    for split, size in (("train", 6000), ("val", 1000)):
        data = coco(real_data / "flickr8k", split)
        assert len(data) == size and set(np.diff(data.first_caption)) == {5}
        assert data.tag_names is None


def write_vg(root, step=1):
    """A Visual Genome folder of 40 empty images, with k % 3 + 1 phrases for image k."""
    images, regions = [], []
    for k in range(1, 41)[::step]:
        path = f"VG_100K{'_2' if k % 2 else ''}/{k}.jpg"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
        images.append({"image_id": k, "url": f"https://cs.stanford.edu/people/rak248/{path}"})
        phrases = [f' region {n} of [{k}], "é" ' for n in range(k % 3 + 1)]
        rows = [{"region_id": n, "phrase": phrase} for n, phrase in enumerate([*phrases, " "])]
        regions.append({"id": k, "regions": rows})
    (root / "image_data.json").write_text(json.dumps(images))
    (root / "region_descriptions.json").write_text(json.dumps(regions))
    return root


@pytest.mark.parametrize("step", (1, -1))
def test_vg(tmp_path, step):
    """Each phrase is a caption of its image; the split does not depend on the files' order."""
    root, seen = str(write_vg(tmp_path, step)), {"train": set(), "val": set()}
    for split, images in seen.items():
        data = common.caption_data("vg", root, split)
        for i in range(len(data)):
            folder, k = re.search(r"VG_100K(_2)?/(\d+)\.jpg$", data.images[i]).groups()
            k = int(k)
            assert folder == ("_2" if k % 2 else None)
            assert data.captions_of(i) == [f'region {n} of [{k}], "é"' for n in range(k % 3 + 1)]
            images.add(k)
    assert seen["val"] == {5, 12, 25, 28} and seen["train"] == set(range(1, 41)) - seen["val"]


def write_jsonl(path, *rows):
    """One JSON object per line, and an empty file for each image."""
    for row in rows:
        image = path.parent / row["image"]
        image.parent.mkdir(parents=True, exist_ok=True)
        image.touch()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_paths(tmp_path, monkeypatch):
    """Relative images start from the file's folder or from --root; absolute ones stay."""
    photo, absolute = str(tmp_path / "photos" / "a.jpg"), str(tmp_path / "elsewhere" / "b.jpg")
    rows = [{"image": image, "split": "train"} for image in ("photos/a.jpg", absolute)]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    assert list(common.caption_data(path).images) == [photo, absolute]
    moved = shutil.copy(path, tmp_path / "photos")
    assert list(common.caption_data(moved, str(tmp_path)).images) == [photo, absolute]
    monkeypatch.chdir(tmp_path)
    assert common.caption_data("data.jsonl").images[0] == "photos/a.jpg"


def test_jsonl(tmp_path, capsys):
    """Captions, tags and splits may be missing; blank captions and repeated tags do not count."""
    rows = [
        {"image": "0.jpg", "captions": [" one ", "", "two"], "split": "train"},
        {"image": "1.jpg", "tags": ["cat", "dog", "cat"], "split": "train"},
        {"image": "2.jpg", "captions": ["three"], "tags": ["cow"], "split": "val"},
        {"image": "3.jpg", "captions": ["four"]},
        {"image": "4.jpg", "captions": ["five"], "tags": ["dog"], "split": "train"},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    with open(path, "a") as file:
        file.write("\n")
    train, val = (common.caption_data(path, split=split) for split in ("train", "val"))
    assert [train.captions_of(i) for i in range(3)] == [["one", "two"], [], ["five"]]
    assert [train.tags_of(i) for i in range(3)] == [[], [0, 1], [1]]
    assert train.captioned().tolist() == [True, False, True]
    assert val.captions_of(0) == ["three"] and val.tags_of(0) == [2] and len(val) == 1
    assert train.tag_names == val.tag_names == ["cat", "dog", "cow"]
    assert "1 lines name no split, as others do, and are left out" in capsys.readouterr().out


def test_jsonl_with_other_keys(tmp_path):
    """A file whose captions have another name is refused; further keys beside them do no harm."""
    path = write_jsonl(tmp_path / "data.jsonl", *({"image": "a.jpg", "text": "a dog"},) * 3)
    with fails("""no line has "captions" or "tags", but ['text']: rename the key"""):
        common.caption_data(path)
    rows = [{"image": f"{n}.jpg", "tags": ["dog"], "text": "a dog"} for n in range(3)]
    assert len(common.caption_data(write_jsonl(tmp_path / "data.jsonl", *rows))) == 2


def test_jsonl_without_splits(tmp_path):
    """A fixed twentieth of the lines is for validation, the rest for training."""
    path = write_jsonl(tmp_path / "data.jsonl", *({"image": f"{n}.jpg"} for n in range(60)))
    splits = "train", "val", "val"
    train, val, again = (list(common.caption_data(path, split=s).images) for s in splits)
    with fails('names no splits: give "train" or "val", not "valid"'):
        common.caption_data(path, split="valid")
    assert sorted(train + val) == sorted(str(tmp_path / f"{n}.jpg") for n in range(60))
    assert val == again and len(val) == 3


def test_parts_of_the_data(coco_folder):
    """--fraction, --captions-per-image: the right counts; the seed alone decides which."""
    full, half, again = coco(coco_folder), *(coco(coco_folder, fraction=0.5) for _ in range(2))
    assert len(half) == 12 and half.digest() == again.digest()
    assert len(coco(coco_folder, fraction=0.001)) == 1
    assert set(coco(coco_folder, fraction=0.25).images) < set(half.images)
    assert set(coco(coco_folder, fraction=0.5, seed=1).images) != set(half.images)
    two, others = (coco(coco_folder, captions_per_image=2, seed=seed) for seed in (0, 1))
    assert list(two.images) == list(full.images) and two.tags == full.tags
    for i in range(24):
        assert len(two.captions_of(i)) == 2 and set(two.captions_of(i)) < set(full.captions_of(i))
    assert others.digest() != two.digest()
    turned = full.select([9, 3], captions_per_image=2)  # in another order, the same captions
    assert list(turned.images) == [full.images[9], full.images[3]]
    assert [turned.captions_of(i) for i in (0, 1)] == [two.captions_of(i) for i in (9, 3)]
    assert [turned.tags_of(i) for i in (0, 1)] == [two.tags_of(i) for i in (9, 3)]


# ------------------------------------------------------------------------------------- bad data

CAPTIONS, INSTANCES = (f"annotations/{kind}_train2017.json" for kind in ("captions", "instances"))
IMAGES, REGIONS = "image_data.json", "region_descriptions.json"


@pytest.fixture
def bad_file(coco_folder, tmp_path):
    """-> function (file of COCO or VG) -> its path, and a function that reads its folder"""

    def prepare(file):
        if file in (IMAGES, REGIONS):
            root = write_vg(tmp_path)
            return root / file, lambda: common.caption_data("vg", str(root), "val")
        root = shutil.copytree(coco_folder, tmp_path / "coco")
        return root / file, lambda: coco(root)

    return prepare


@pytest.mark.parametrize("content", (b'[{"image_id": "caf\xe9"}]', -1, -100, -1000, None))
@pytest.mark.parametrize("file", (CAPTIONS, INSTANCES, IMAGES, REGIONS))
def test_files_that_are_no_json(bad_file, file, content):
    """Not UTF-8, cut off or missing: the file is named. COCO's instances may be missing."""
    path, read_folder = bad_file(file)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:content])
    if (file, content) == (INSTANCES, None):
        read_folder()
    else:
        with fails(f"{path} not found: check the path" if content is None else path):
            read_folder()


@pytest.mark.parametrize(
    "file, change, message",
    [
        (CAPTIONS, lambda c: c.pop("annotations"), "'annotations' is missing"),
        (CAPTIONS, lambda c: c["images"][3].pop("file_name"), "'file_name' is missing"),
        (CAPTIONS, lambda c: c["annotations"][3].pop("caption"), ", entry 3: 'caption' is missing"),
        (CAPTIONS, lambda c: c["annotations"][7].update(image_id=4711), ", entry 7: 4711 is"),
        (INSTANCES, lambda c: c["annotations"][7].update(category_id=4711), ", entry 7: 4711 is"),
        (INSTANCES, lambda c: c["categories"][3].pop("name"), ".json: 'name' is missing"),
        (IMAGES, lambda c: c[5].pop("url"), ", entry 5: 'url' is missing"),
        (IMAGES, lambda c: c.insert(5, 4711), ", entry 5: "),
        (REGIONS, lambda c: c[5].pop("id"), ", entry 5: 'id' is missing"),
        (REGIONS, lambda c: c[5].update(regions=None), ", entry 5: "),
        (REGIONS, lambda c: c[5]["regions"][0].pop("phrase"), ", entry 5: 'phrase' is missing"),
    ],
)
def test_files_that_lack_something(bad_file, file, change, message):
    """The file, the entry where there is one, what is wrong and what was expected are named."""
    path, read_folder = bad_file(file)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with fails(path, message, "Expected: a "):
        read_folder()


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{broken", "Expecting property name"),
        (b"\xe9", "codec can't decode"),
        (b"[]", ""),
        (b'{"captions": ["x"]}', "'image' is missing"),
        (b'{"image": "a.jpg", "caption": "x"}', 'the key is "captions"'),
        (b'{"image": "a.jpg", "captions": "x"}', '"captions" must be a list of strings'),
        (b'{"image": "a.jpg", "captions": [7]}', ""),
        (b'{"image": "a.jpg", "split": [7]}', '"split" must be a string'),
    ],
)
def test_bad_lines(tmp_path, line, message):
    """The message names the file, the line (counted from 1) and what was expected."""
    path = write_jsonl(tmp_path / "data.jsonl", {"image": "a.jpg"})
    with open(path, "ab") as file:
        file.write(b"\n" + line)
    with fails(f"{path}, entry 3: ", message, 'Expected: {"image": "photo.jpg"'):
        common.caption_data(path)


def test_missing_splits(tmp_path):
    jsonl = write_jsonl(tmp_path / "data.jsonl", {"image": "a.jpg", "split": "train"})
    with fails(f"{jsonl}: no line is of the split test, there are ['train']"):
        common.caption_data(jsonl, split="test")
    with fails('--data vg has the splits "train" and "val", not "test"'):
        common.caption_data("vg", str(write_vg(tmp_path)), "test")


def test_missing_images(coco_folder, tmp_path):
    """Images that are not there are found before training: how many, and the first of them."""
    folder = shutil.copytree(coco_folder, tmp_path / "coco") / "train2017"
    for scene in (5, 9):
        (folder / f"{scene:012d}.jpg").unlink()
    with fails("2 of 24 images are missing, the first is", folder / "000000000005.jpg"):
        coco(tmp_path / "coco")
    shutil.rmtree(folder)
    with fails("24 of 24 images are missing", "check --root and the split"):
        coco(tmp_path / "coco")


# ------------------------------------------------------------------------------- reading photos


def everything(width, height):
    return 0, 0, width, height


def read(path, crop=everything, size=32):
    """One readable file -> float pixels"""
    [pixels] = common.read_crops(common.ImageFiles([str(path)]), 0, [crop], size)
    assert pixels.dtype == np.uint8 and pixels.shape == (size, size, 3)
    return pixels.astype(float)


def resized(image, size=32, box=None):
    return np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR, box), float)


def apart(one, other):
    return np.abs(one - other).mean()


def test_crop_then_resize(tmp_path):
    """One step gives the pixels of two; at its border it may look at the pixels around the box."""
    picture, box, path = shapes.draw(5, 200), (20, 30, 140, 150), tmp_path / "a.png"
    picture.save(path)
    crops = everything, lambda width, height: box
    whole, part = common.read_crops(common.ImageFiles([str(path)]), 0, crops, 48)
    expected = resized(picture.crop(box), 48)
    assert np.array_equal(part[1:-1, 1:-1], expected[1:-1, 1:-1])
    assert np.abs(part - expected).max() < 16 and np.array_equal(whole, resized(picture, 48))


class Watched(common.ImageFiles):
    """Keeps the image that it opened."""

    def open(self, i):
        self.opened = super().open(i)
        return self.opened


def test_large_jpegs_are_decoded_small(tmp_path):
    """At a fraction of the size that the smallest crop needs; the crop is the right part of it."""
    picture = shapes.draw(33, 1200).crop((0, 0, 1200, 900))
    picture.save(tmp_path / "a.jpg", quality=95)
    images, box = Watched([str(tmp_path / "a.jpg")]), (401.5, 300.25, 701.5, 600.25)
    _, pixels = common.read_crops(images, 0, [everything, lambda width, height: box], 64)
    assert images.opened.size == (300, 225)  # a quarter: 300 / 4 is still more than 64
    error = apart(pixels, resized(picture, 64, box))
    assert error < 3
    for x, y in ((6, 0), (-6, 0), (0, 6), (0, -6)):
        shifted = tuple(np.add(box, (x, y, x, y)))
        assert apart(pixels, resized(picture, 64, shifted)) > 1.5 * error
    picture.resize((100, 75)).save(tmp_path / "a.jpg")  # no smaller version has enough pixels
    whole = resized(Image.open(tmp_path / "a.jpg"), 64)
    assert np.array_equal(read(tmp_path / "a.jpg", size=64), whole)


@pytest.mark.parametrize("suffix", ("jpg", "png"))
@pytest.mark.parametrize(
    "orientation, stored",
    [(2, "FLIP_LEFT_RIGHT"), (3, "ROTATE_180"), (6, "ROTATE_90"), (8, "ROTATE_270")],
)
def test_rotated_photos_come_upright(tmp_path, suffix, orientation, stored):
    """A phone stores how it was held; the crop is cut from the upright photo."""
    upright, exif = shapes.draw(3, 160).crop((0, 0, 160, 100)), Image.Exif()
    exif[0x0112] = orientation
    upright.transpose(Image.Transpose[stored]).save(tmp_path / f"a.{suffix}", exif=exif)
    boxes = {(160, 100): (10, 20, 90, 100)}
    seen = read(tmp_path / f"a.{suffix}", lambda *size: boxes[size])
    assert apart(seen, resized(upright.crop(boxes[160, 100]))) < 4


def colour_modes():
    """-> {file name: (picture, how to save it, the picture that one sees)}"""
    picture = shapes.draw(8, 64)
    grey, palette, bits = picture.convert("L"), picture.quantize(64), picture.convert("1")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 99)  # X-rays, satellites
    return {
        "grey.jpg": (grey, {"quality": 95}, grey),
        "grey.png": (grey.convert("LA"), {}, grey),
        "16-bit.png": (deep, {}, grey),
        "cmyk.jpg": (picture.convert("CMYK"), {"quality": 95}, picture),
        "palette.png": (palette, {"transparency": 0}, palette),
        "alphas.png": (palette, {"transparency": bytes(range(0, 256, 4))}, palette),
        "palette.gif": (palette, {}, palette),
        "alpha.png": (picture.convert("RGBA"), {}, picture),
        "bits.png": (bits, {}, bits),
    }


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("name", colour_modes())
def test_colour_modes(tmp_path, name):
    picture, settings, seen = colour_modes()[name]
    picture.save(tmp_path / name, **settings)
    assert apart(read(tmp_path / name), resized(seen)) < 4


@pytest.fixture
def damaged(tmp_path):
    """Five files, of which the third alone is a photo; reading the pipe would hang."""
    garbage, cut, good, empty, pipe = (tmp_path / f"{n}.jpg" for n in range(5))
    shapes.draw(1, 64).save(good)
    garbage.write_bytes(b"this is no picture" * 50)
    cut.write_bytes(good.read_bytes()[:900])
    empty.touch()
    os.mkfifo(pipe)
    return common.ImageFiles(map(str, (garbage, cut, good, empty, pipe)))


def photos(images, size=32, crop_min=0.2, jitter=1.0):
    """Samples of the photos, as the scripts make them."""
    settings = {"size": size, "crop_min": crop_min, "jitter": jitter}
    return common.Samples(functools.partial(common.photo, images, **settings), len(images))


def test_one_bad_photo_may_have_many_samples():
    """150 triplets of one undecodable photo are passed over; it is named once."""

    def make(index, rng):
        if index < 150:
            raise common.Unreadable("bad.jpg")
        return {"index": index}

    assert common.Samples(make, 200)[0] == {"index": 150, "unreadable": ["bad.jpg"]}


def test_undecodable_photos_are_replaced_and_named(damaged, capsys):
    """The next photo that can be decoded takes their place, past the end of the list too."""
    samples, good = photos(damaged), read(damaged[2], common.centre_crop(1.0))
    for start, passed_over in ((0, [0, 1]), (1, [1]), (2, []), (3, [3, 4, 0, 1])):
        assert samples[start]["unreadable"] == [damaged[i] for i in passed_over]
        assert np.array_equal(samples[start]["image"], good)
    [batch] = common.validation_batches(samples, 0, common.collate_photos, CPU)
    assert batch["images"].shape == (5, 32, 32, 3) and batch.keys() == {"images", "jitter"}
    printed = capsys.readouterr().out
    assert f"cannot decode {damaged[3]}" in printed and damaged[2] not in printed


def test_crop_view(damaged):
    """For features: the central square of each photo, and whether there is one."""
    view = common.CropView(damaged, 32)
    assert [view[i][1] for i in range(len(view))] == [False, False, True, False, False]
    assert np.array_equal(view[2][0], read(damaged[2], common.centre_crop(224 / 256)))
    assert view[0][0].shape == (32, 32, 3)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("suffix", ("jpg", "png", "webp", "gif"))
def test_damaged_files_are_read_or_unreadable(tmp_path, suffix):
    """Files with bytes overturned or cut off raise nothing but Unreadable, whatever PIL raises."""
    exif, draw, path = Image.Exif(), random.Random(0), tmp_path / f"a.{suffix}"
    exif[0x0112], exif[0x010E] = 6, "upside down"
    shapes.draw(2, 48).save(path, **({} if suffix == "gif" else {"exif": exif}))
    whole, unreadable = path.read_bytes(), []
    for _ in range(120):
        content = bytearray(whole[: draw.choice((None, draw.randrange(len(whole))))])
        for _ in range(min(8, len(content))):
            limit = draw.choice((100, len(content)))  # the header, or anywhere
            content[draw.randrange(min(len(content), limit))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            read(path, size=8)
        except common.Unreadable as error:
            unreadable.append(str(error))
    assert set(unreadable) == {str(path)}


# -------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("width, height", [(640, 480), (375, 500), (64, 64)])
def test_random_crop(width, height):
    """Within the image, 20-100% of its area, aspect between 3/4 and 4/3, and each range is used."""
    crop = common.random_crop(np.random.default_rng(0))
    left, top, right, bottom = np.array([crop(width, height) for _ in range(2000)]).T
    area = (right - left) * (bottom - top) / (width * height)
    aspect = (right - left) / (bottom - top)
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    assert 0.2 - 1e-9 <= area.min() < 0.22 and 0.8 < area.max() <= 1 + 1e-9
    assert 3 / 4 - 1e-9 <= aspect.min() < 0.77 and 1.3 < aspect.max() <= 4 / 3 + 1e-9


def test_centre_crop():
    """The middle of the image; of a strip in which no random crop fits, the central square."""
    assert common.centre_crop(224 / 256)(512, 256) == (144, 16, 368, 240)
    assert common.random_crop(np.random.default_rng(0))(1000, 10) == (495, 0, 505, 10)


def test_mirrored_photos_say_so():
    """Uncropped and without jitter, a photo is as it is or mirrored; never in validation."""
    images, seen = shapes.ShapeImages(range(5)), set()
    samples = photos(images, 16, crop_min=1.0, jitter=0)
    for key in [*range(5), *itertools.product(range(8), range(5))]:
        sample, index = samples[key], key[1] if isinstance(key, tuple) else key
        whole, mirrored = resized(images.open(index), 16), sample["mirrored"]
        assert np.array_equal(sample["image"], whole[:, ::-1] if mirrored else whole)
        assert sample["jitter"].tolist() == [1, 1, 1, 0]
        seen.add((isinstance(key, tuple), index, mirrored))
    assert len(seen) == 15


def test_samples_depend_on_seed_and_key_alone():
    drawn = lambda seed, *key: common.Samples(lambda i, rng: {"x": rng.random()}, 9, seed)[key]["x"]
    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({drawn(0, 1, 2), drawn(1, 1, 2), drawn(0, 2, 2), drawn(0, 1, 3)}) == 4


def take(batches, size, batch_size, ranks=1, seed=0, start=0):
    """The first batches of infinite_sampler, each put together from the ranks' shares."""
    parts, share = [], batch_size // ranks
    for rank in range(ranks):
        world = common.World(rank, ranks, CPU)
        sampler = iter(common.infinite_sampler(size, batch_size, world, seed, start))
        parts.append([list(itertools.islice(sampler, share)) for _ in range(batches)])
    return [list(itertools.chain(*shares)) for shares in zip(*parts)]


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_sampler(ranks):
    """Each epoch is another permutation; the number of processes and the start change nothing."""
    orders, keys = set(), list(itertools.chain(*take(30, 40, 4, ranks)))
    for epoch in range(3):
        order = keys[40 * epoch : 40 * epoch + 40]
        assert sorted(order) == [(epoch, index) for index in range(40)]
        orders.add(tuple(index for _, index in order))
    assert len(orders) == 3
    assert take(20, 37, 8, ranks) == take(20, 37, 8)  # epochs end within a batch
    assert take(5, 37, 8, ranks, start=13) == take(18, 37, 8)[13:]
    assert take(3, 40, 8, ranks, seed=1) != take(3, 40, 8)


def test_sampler_with_fewer_images_than_a_batch():
    """Images repeat within a batch, epoch by epoch."""
    keys = list(itertools.chain(*take(3, 3, 8)))
    assert [epoch for epoch, _ in keys] == [n // 3 for n in range(24)]
    assert sorted(keys[:3]) == [(0, 0), (0, 1), (0, 2)]


def draws(index, rng):
    """A sample that tells what its generator draws and which signals its process ignores."""
    signals = signal.SIGTERM, signal.SIGINT
    ignored = [signal.getsignal(number) == signal.SIG_IGN for number in signals]
    return {"number": rng.random(3), "index": index, "ignored": ignored}


def collate_draws(samples):
    batch = {name: common.stack(samples, name) for name in ("number", "index", "ignored")}
    return {**batch, "unreadable": [path for sample in samples for path in sample["unreadable"]]}


@pytest.fixture
def interruptible():
    """A shell starts jobs in the background with Ctrl-C ignored: not so here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_batches_do_not_depend_on_the_number_of_workers(interruptible):
    """The same bits in the same order. The workers leave signals to the main process."""
    loaded, samples = [], common.Samples(draws, 20)
    for workers in (0, 2):
        sampler = common.infinite_sampler(20, 4, ALONE, 0)
        batches = common.loader(samples, 4, workers, collate_draws, CPU, sampler)
        loaded.append(list(itertools.islice(batches, 6)))
    for alone, together in zip(*loaded, strict=True):
        assert torch.equal(alone["number"], together["number"])
        assert torch.equal(alone["index"], together["index"])
        assert together["ignored"].all() and not alone["ignored"].any()
    assert len({tuple(batch["number"].flatten().tolist()) for batch in loaded[0]}) == 6


# ------------------------------------------------------------------------------------ processes


def run_text(tmp_path, text, *command):
    """Run a text as a script -> the ended process"""
    (tmp_path / "script.py").write_text(text)
    words = [sys.executable, *command, tmp_path / "script.py"]
    options = {"env": environment(PYTHONPATH=str(ROOT)), "timeout": 120}
    return subprocess.run(words, capture_output=True, text=True, **options)


# With two workers, which ignore SIGTERM: Python would wait for them for ever.
ERROR = """
import common

def unreadable(index, rng):
    raise common.Unreadable(f"{index}.jpg")

def main(_):
    batches = iter(common.loader(range(9), 4, 2))
    next(batches)
    ERROR

common.run(main, lambda: None)
"""


@pytest.mark.parametrize(
    "error, message",
    [
        ('raise RuntimeError("no memory")', r"Traceback.*\nRuntimeError: no memory\n"),
        (
            "next(iter(common.loader(common.Samples(unreadable, 3), 4, 2)))",
            r"error: 3 images in a row cannot be decoded, as [012].jpg[^\n]*\n",
        ),
    ],
)
def test_an_error_ends_the_program_and_its_workers(tmp_path, error, message):
    ended = run_text(tmp_path, ERROR.replace("ERROR", error))
    assert ended.returncode == 1 and re.fullmatch(message, ended.stderr, re.DOTALL), ended.stderr


TWO_PROCESSES = """
import sys
import common

world = common.start()
sys.stdout.write(f"any: {common.any_process(world, world.is_main)}\\n")  # one write
sys.stdout.flush()
with common.main_first(world):
    if world.is_main:
        common.fail("no room", everywhere=False)
    print("the second goes on", flush=True)
"""


def test_the_first_process_fails_alone(tmp_path):
    """The second waits for it, but not for ever when it has failed; the error is told once."""
    ended = run_text(tmp_path, TWO_PROCESSES, *TORCHRUN)
    assert ended.returncode == 1 and ended.stdout == "any: True\n" * 2
    assert ended.stderr.count("error: no room") == 1


@pytest.mark.parametrize("rank, order", ((0, ["block", "barrier"]), (1, ["barrier", "block"])))
def test_the_first_process_goes_first(rank, order, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda: seen.append("barrier"))
    with common.main_first(common.World(rank, 2, CPU)):
        seen.append("block")
    assert seen == order


def test_one_process_speaks_for_all(monkeypatch):
    """What all processes run into is said once; what one process ran into, by that process."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        common.fail("said by the first")
    assert stopped.value.code == 1
    with fails("said by this one"):
        common.fail("said by this one", everywhere=False)


# --------------------------------------------------------------------------------- augmentation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
GREY = torch.tensor([0.299, 0.587, 0.114])
YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
NEUTRAL = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
FOUR = [(0.8, 1.3, 0.7, 0.08), (1.2, 0.7, 1.4, -0.1), (0.7, 1.2, 1.3, 0.03), (1.3, 0.8, 0.6, -0.05)]


@pytest.fixture
def pixels():
    """Four images of middle shades, which no jitter in these tests drives out of [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 156, (4, 16, 16, 3), dtype=torch.uint8, generator=generator)


def planes(pixels):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [0, 1], as torchvision wants it"""
    return pixels.permute(0, 3, 1, 2) / 255


def jittered(pixels, *parameters):
    """augment with these parameters (of all images, or of each), normalisation taken back"""
    images = common.augment(pixels, torch.tensor(parameters).expand(len(pixels), 4))
    return images * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


def test_normalisation(pixels):
    """Without jitter, or with a neutral one, it is torchvision's; channels-last and float32."""
    expected = TF.normalize(planes(pixels), MEAN, STD)
    for jitter in (None, torch.tensor([NEUTRAL] * 4)):
        images = common.augment(pixels, jitter)
        near(images, expected)
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("factor", (0.6, 0.9, 1.4))
@pytest.mark.parametrize("name", ("brightness", "contrast", "saturation"))
def test_jitter_is_torchvision_s(pixels, monkeypatch, factor, name):
    """Once its weight of red is 0.299 as in ours (it rounds to 0.2989)."""
    from torchvision.transforms import _functional_tensor

    def grey(image, *_):
        return torch.einsum("...chw,c->...hw", image, GREY)[..., None, :, :]

    monkeypatch.setattr(_functional_tensor, "rgb_to_grayscale", grey)
    parameters = list(NEUTRAL)
    parameters[["brightness", "contrast", "saturation"].index(name)] = factor
    near(jittered(pixels, *parameters), getattr(TF, f"adjust_{name}")(planes(pixels), factor))


def literal_jitter(pixels, brightness, contrast, saturation, hue):
    """One after the other, pixel by pixel in float64: (H, W, 3)"""
    grey, to_yiq = GREY.double(), YIQ.double()
    x = brightness * pixels.double() / 255
    x = contrast * x + (1 - contrast) * (x @ grey).mean()
    x = saturation * x + (1 - saturation) * (x @ grey)[..., None]
    y, i, q = (x @ to_yiq.T).unbind(-1)
    cos, sin = math.cos(2 * math.pi * hue), math.sin(2 * math.pi * hue)
    return torch.stack([y, cos * i - sin * q, sin * i + cos * q], -1) @ torch.linalg.inv(to_yiq).T


def test_the_four_together(pixels):
    """One matrix and offset are the four maps in the documented order, for each image its own."""
    for image, found, parameters in zip(pixels, jittered(pixels, *FOUR), FOUR):
        expected = literal_jitter(image, *parameters).permute(2, 0, 1).float()
        assert 0 < expected.min() and expected.max() < 1  # nothing is clamped here
        near(found, expected)
        near(jittered(image[None], *parameters)[0], found)


def test_hue(pixels):
    """Colours turn, brightness as the eye sees it and grey stay; a whole turn is no turn."""
    before, after = planes(pixels), jittered(pixels, 1.0, 1.0, 1.0, 0.1)
    luma = lambda images: torch.einsum("bchw,c->bhw", images, GREY)
    assert (before - after).abs().max() > 0.02
    near(luma(after), luma(before))
    near(jittered(pixels, 1.0, 1.0, 1.0, 1.0), before)
    grey = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    near(jittered(grey, 1.0, 1.0, 1.0, 0.37), planes(grey))


def test_jitter_is_clamped():
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(8, 12).view(1, 8, 8, 3)
    found = jittered(image, 1.4, 1.4, 1.4, 0.1)
    assert -1e-6 < found.min() and found.max() < 1 + 1e-6


@pytest.mark.parametrize("strength", (1.0, 0.5))
def test_colour_jitter(strength):
    """A fifth of the images stay as they are; the factors of the others fill their ranges."""
    rng = np.random.default_rng(0)
    drawn = np.array([common.colour_jitter(rng, strength) for _ in range(4000)])
    neutral = (drawn == np.float32(NEUTRAL)).all(1)
    assert drawn.dtype == np.float32 and abs(neutral.mean() - 0.2) < 0.03
    factors = (drawn[~neutral] - NEUTRAL) / strength / (0.4, 0.4, 0.4, 0.1)  # within +- 1
    low, high = factors.min(0), factors.max(0)
    assert -1 - 1e-6 < low.min() and low.max() < -0.98
    assert 0.98 < high.min() and high.max() < 1 + 1e-6
    assert np.abs(factors.mean(0)).max() < 0.06
    assert np.abs(np.corrcoef(factors.T) - np.eye(4)).max() < 0.06


# ------------------------------------------------------------------------------------ backbones


def on_meta(build, *arguments):
    """A model with shapes and names but no numbers: quick to build."""
    with torch.device("meta"):
        return build(*arguments)


@pytest.mark.parametrize("arch, name", common.BACKBONES.items())
def test_backbones_have_torchvision_s_names(arch, name):
    """Only the classifier is missing; the shapes fit; a torchvision file is recognised by them."""
    theirs, ours = on_meta(getattr(torchvision.models, name)), on_meta(common.build_backbone, arch)
    wrong = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert {key.split(".")[0] for key in wrong.missing_keys} in ({"fc"}, {"classifier"})
    assert not wrong.unexpected_keys
    last = [m for m in theirs.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))][-1]
    assert ours.channels == last.weight.size(0)
    assert sources.backbone_weights(theirs.state_dict(), "file")[0] == arch


@pytest.mark.parametrize("arch, size", (("resnet18", 224), ("vgg16", 64)))
def test_backbones_compute_torchvision_s_features(arch, size):
    """The output is torchvision's before its pooling: 1/32 of the side."""
    ours, images = common.build_backbone(arch).eval(), torch.randn(1, 3, size, size)
    theirs = getattr(torchvision.models, common.BACKBONES[arch])().eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    with torch.no_grad():
        expected = nn.Sequential(*list(theirs.children())[:-2])(images)
        features = ours(images)
    assert features.shape == (1, 512, size // 32, size // 32) and torch.equal(features, expected)


# Source: the key under which the weights are, the backbone's prefix, what stands beside it.
FOREIGN = {
    "backbone.pth": (None, "", ""),
    "torchvision": (None, "", "fc.weight fc.bias"),
    "virtex": ("model", "visual.cnn.", "textual.output.weight backward_textual.output.bias"),
    "tp": ("model", "backbone.", "head.2.weight"),
    "mmcontrastive": ("model", "queries.image.trunk.0.", "keys.image.trunk.0.conv1.weight"),
    "MoCo v1": ("state_dict", "module.encoder_q.", "module.encoder_q.fc.weight module.queue_ptr"),
    "MoCo v2": ("state_dict", "module.encoder_q.", "module.encoder_q.fc.2.bias module.encoder_k.x"),
    "SwAV": (None, "module.", "module.projection_head.1.running_mean module.prototypes.weight"),
    "VICReg": ("model", "module.backbone.", "module.projector.0.weight"),
    "DINO": ("teacher", "backbone.", "head.mlp.0.weight head.last_layer.weight_v"),
}


@pytest.mark.parametrize("wrapped, prefix, beside", FOREIGN.values(), ids=FOREIGN)
def test_foreign_checkpoints(wrapped, prefix, beside):
    """Whatever wraps it, the ResNet inside comes out: its tensors and none of the heads'."""
    state = on_meta(common.build_backbone, "resnet18").state_dict()
    content = {prefix + key: value for key, value in state.items()}
    content |= {name: torch.zeros(2) for name in beside.split()}
    content = {wrapped: content, "epoch": 1, "student": {}} if wrapped else content
    arch, found = sources.backbone_weights(content, "some.pth")
    assert arch == "resnet18" and found.keys() == state.keys()
    assert all(found[key] is state[key] for key in state)


@pytest.mark.parametrize(
    "key, value",
    [
        ("layer3.0.bn2.bias", None),
        ("layer3.0.conv2.weight", torch.zeros(1)),
        ("layer3.0.se.weight", torch.zeros(1)),
    ],
)
def test_keys_that_do_not_fit(key, value):
    """Missing, of another shape, unexpected: the file, the closest match and the key are named."""
    state = {**on_meta(common.build_backbone, "resnet50").state_dict(), key: value}
    state = {k: v for k, v in state.items() if v is not None}
    with fails("some.pth is no resnet50", f"['{key}']"):
        sources.backbone_weights(state, "some.pth")


@pytest.mark.parametrize(
    "content, message",
    [
        ({"model": {"patch_embed.weight": torch.zeros(1)}}, "its first keys are ['patch_embed"),
        (torch.zeros(5), "holds no state dict"),
        (None, "not found"),
        (b"", "Expected: a whole checkpoint of"),
        (b"Not a checkpoint.\n" * 20, "Expected: a whole checkpoint of"),
    ],
    ids=("another model", "a tensor", "missing", "empty", "text"),
)
def test_files_that_hold_no_backbone(tmp_path, content, message):
    path = tmp_path / "file.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with fails(path, message):
        common.load_backbone(path)


def test_load_backbone(tmp_path):
    """Also from before BatchNorm had counters; refused: half a file, another arch, not finite."""
    path, state = tmp_path / "a.pth", common.build_backbone("resnet18").state_dict()
    torch.save({k: v for k, v in state.items() if "num_batches_tracked" not in k}, path)
    assert torch.equal(common.load_backbone(path).conv1.weight, state["conv1.weight"])
    with fails(f"{path} is a resnet18, not --arch resnet50"):
        common.load_backbone(path, "resnet50")
    path.write_bytes(path.read_bytes()[:-9000])
    with fails(path, "Expected: a whole checkpoint of"):
        common.load_backbone(path)
    state["layer4.1.bn2.running_var"][7] = math.inf
    torch.save(state, path)
    with fails(path, "has weights that are not finite"):
        common.load_backbone(path, "resnet18")


class Touch:
    """Pickled, it is a command to create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


def test_checkpoints_that_run_code_are_refused(tmp_path):
    """weights_only: a foreign file's code is not run, in torch's format nor in plain pickle."""
    torch.save({"model": Touch(tmp_path / "ran")}, tmp_path / "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Touch(tmp_path / "ran"), 2))
    for name in ("evil.pth", "evil.pkl"):
        with fails(tmp_path / name, "Expected: a whole checkpoint of"):
            common.read_checkpoint(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


# --------------------------------------------------------------------------------- optimisation


def test_sgd():
    """ICMLM App. F.1: momentum 0.9 and weight decay, two steps written out."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = common.build_optimizer("sgd", [parameter], 3e-2, 1e-4)
    value, velocity = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([0.5, 1.0], [-1.0, 0.25]):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        velocity = [0.9 * v + g + 1e-4 * p for v, g, p in zip(velocity, gradient, value)]
        value = [p - 3e-2 * v for p, v in zip(value, velocity)]
        assert parameter.tolist() == pytest.approx(value, rel=1e-6)


def test_radam():
    """ICMLM App. F.1, Liu et al. 2020: Alg. 2 over ten steps; decoupled weight decay."""
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = common.build_optimizer("radam", [parameter], 1e-2, 1e-3)
    p, m, v, adaptive, limit = 1.0, 0.0, 0.0, 0, 2 / (1 - 0.999) - 1
    for t in range(1, 11):
        g = math.sin(3.0 * t)
        parameter.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        p -= 1e-2 * 1e-3 * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = 1e-2 * m / (1 - 0.9**t)
        length = limit - 2 * t * 0.999**t / (1 - 0.999**t)
        if length > 5:
            adaptive += 1
            rectify = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            step *= math.sqrt(rectify) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p -= step
        assert parameter.item() == pytest.approx(p, abs=1e-10)
    assert 0 < adaptive < 10


@pytest.mark.parametrize(
    "warmup, steps, factors",
    [
        (0, (), {0: 1, 25: 0.5 + math.sqrt(2) / 4, 50: 0.5, 75: 0.5 - math.sqrt(2) / 4, 100: 0}),
        (0.2, (), {0: 0, 1: 0.05, 10: 0.5, 20: 1, 60: 0.5, 100: 0}),
        (0, (0.8, 0.9), {0: 1, 79: 1, 80: 0.1, 89: 0.1, 90: 0.01, 99: 0.01}),
        (0.2, (0.8,), {0: 0, 5: 0.25, 20: 1, 79: 1, 80: 0.1}),
    ],
)
def test_lr_factor(warmup, steps, factors):
    """Linear warm-up, then half a cosine to 0, or a tenth after each of the steps."""
    found = {iteration: common.lr_factor(iteration, 100, warmup, steps) for iteration in factors}
    assert found == pytest.approx(factors, abs=1e-12)


def test_set_lr():
    """Each group's own rate is scaled, always from the one that it was built with."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.4)]
    optimizer = torch.optim.SGD(groups)
    for factor in (0.5, 0.25):
        common.set_lr(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.4 * factor]


# ---------------------------------------------------------------------------------------- flags

TABLE = {
    "optimizer": ("radam", "sgd", "sgd"),
    "steps": ((0.8,), (), ()),
    "lr": (0.01, 0.2, 0.4),
    "batch_size": (32, 64, 256),
    "image_size": (48, 112, 224),
    "iters": (900, None, 5000),
    "epochs": (None, 20.0, None),
}


def parsed(flags):
    argv, parser = flags.split(), common.flag_parser("virtex", "words")
    parser.add_argument("--optimizer", choices=("sgd", "radam"))
    parser.add_argument("--steps", type=common.share, nargs="*")
    return common.parse(parser, argv, common.choose_recipe(TABLE, argv), scaled=("lr",))


@pytest.mark.parametrize(
    "flags, recipe, expected",
    [
        ("", "demo", {"image_size": 48, "iters": 900, "lr": 0.01, "train_split": "train"}),
        ("--data a.jsonl", "small", {"image_size": 112, "epochs": 20.0, "val_split": "val"}),
        ("--data vg", "paper", {"image_size": 224, "steps": (), "val_split": "val"}),
        ("--data s/{00..19}.tar", "paper", {"image_size": 224, "train_split": "train"}),
        ("--data coco", "paper", {"image_size": 224, "lr": 0.4, "train_split": "train2017"}),
        ("--data coco --val-split x", "paper", {"train_split": "train2017", "val_split": "x"}),
        ("--recipe small", "small", {"data": "shapes", "image_size": 112}),
        ("--data coco --recipe=demo", "demo", {"image_size": 48, "val_split": "val2017"}),
        ("--image-size 32 --lr 3", "demo", {"image_size": 32, "lr": 3.0, "batch_size": 32}),
        ("--epochs 0.5", "demo", {"iters": None, "epochs": 0.5}),
        ("--recipe small --iters 7", "small", {"iters": 7, "epochs": None}),
        ("--batch-size 64", "demo", {"batch_size": 64, "lr": 0.02}),
        ("--data coco --batch-size=64", "paper", {"batch_size": 64, "lr": 0.1}),
        ("--batch-size 64 --lr 0.01", "demo", {"batch_size": 64, "lr": 0.01}),
        ("--optimizer radam --batch-size 16", "demo", {"lr": 0.005, "steps": (0.8,)}),
        ("--optimizer sgd --lr 1", "demo", {"optimizer": "sgd", "lr": 1.0, "steps": ()}),
        ("--data vg --optimizer radam --lr 1 --steps 0.5", "paper", {"steps": [0.5]}),
    ],
)
def test_recipes(flags, recipe, expected, capsys):
    """--data chooses one unless --recipe does; a flag given wins; the batch scales the rate."""
    args = vars(parsed(flags))
    assert {name: args[name] for name in ("recipe", *expected)} == {"recipe": recipe, **expected}
    scaled = f"--lr {args['lr']:g}: the recipe's, scaled from batch"
    assert (scaled in capsys.readouterr().out) == ("--batch" in flags and "--lr" not in flags)


@pytest.mark.parametrize(
    "kind, accepted, refused",
    [
        (common.natural, "0 7", "-1 0.5 x"),
        (common.count, "1 7", "0 -1 nan"),
        (common.seed_number, "0 8388607", "-1 8388608"),
        (common.positive, "1e-9 7", "0 -1 nan inf x"),
        (common.non_negative, "0 7", "-0.1 nan inf"),
        (common.share, "0 0.5 1", "-0.1 1.1 nan inf"),
        (common.positive_share, "1e-9 1", "0 1.1 nan"),
        (common.proper_share, "0 0.99", "-0.1 1 nan"),
    ],
)
def test_types_of_flags(kind, accepted, refused):
    parser = common.Parser()
    parser.add_argument("--flag", type=kind)
    for text in accepted.split():
        assert parser.parse_args(["--flag", text]).flag == float(text)
    for text in refused.split():
        with fails("argument --flag: ", text):
            parser.parse_args(["--flag", text])


# ----------------------------------------------------------------------------- the output folder

FLAGS = {
    "fresh": False, "recipe": "demo", "amp": "off", "lr": 0.1, "batch_size": 4, "seed": 0,
    "workers": 0, "root": "here", "log_every": 1, "checkpoint_every": 3, "probe_every": 0,
}  # fmt: skip


def start(folder, **flags):
    """The run of a model of two numbers on 200 images in `folder`."""
    data = common.CaptionData(common.ImageFiles())
    for n in range(200):
        data.add(f"{n}.jpg", [])
    run = common.Run(argparse.Namespace(output=str(folder), **FLAGS | flags), "virtex", ALONE, data)
    model = nn.Linear(1, 1)
    run.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return run


def train(run, total, probe=None, killed_in=None, **more):
    samples = common.Samples(draws, 20)
    for iteration, batch in run.steps(samples, collate_draws, total, probe, "backbone", **more):
        assert batch.keys() == {"number", "index", "ignored"}
        if iteration == killed_in:
            break
        run.log(loss=batch["number"].mean(), lr=0.5**iteration)
    return run


def logged(folder):
    return [row["iteration"] for row in metrics(folder)]


def test_steps(tmp_path, monkeypatch):
    """What is due is done: lines of metrics, checkpoints, probes; the clock ticks at each look."""
    probed, saved, save = [], [], common.Run.save

    class Probe:
        def keep_best(self, backbone, run):
            probed.append((run.iteration, backbone))
            return {"iteration": run.iteration}

    def watched(run, **more):
        saved.append(run.iteration)
        save(run, **more)

    monkeypatch.setattr(common.Run, "save", watched)
    monkeypatch.setattr(common.time, "perf_counter", itertools.count(0.0).__next__)
    run = train(start(tmp_path, log_every=2, probe_every=4), 8, Probe(), extra=[1.5])
    assert probed == [(4, "backbone"), (8, "backbone")] and saved == [3, 6, 8]
    checkpoint = common.read_checkpoint(tmp_path / "checkpoint.pth")
    assert checkpoint["iteration"] == 8 and checkpoint["best"] == {"iteration": 8}
    assert checkpoint["extra"] == [1.5]
    assert torch.equal(checkpoint["model"]["weight"], run.parts["model"].weight)
    assert logged(tmp_path) == [2, 4, 6, 8] and metrics(tmp_path)[1]["lr"] == 0.5**4
    # Between two lines it ticks 5 times; 2 steps of 4 images, each of which waits for a tick.
    speeds = [(row["images_per_s"], row["data_wait"]) for row in metrics(tmp_path)]
    assert speeds == [(1.6, 0.4)] * 4


def test_a_killed_run_goes_on(tmp_path, capsys):
    """From its checkpoint; the lines after it, and those that a power failure has left (half a
    line, zeros, an empty one), are dropped and come again.
    """
    train(start(tmp_path), 8, killed_in=2)
    assert logged(tmp_path) == [1] and start(tmp_path).iteration == 0 and logged(tmp_path) == []
    first = train(start(tmp_path), 8, killed_in=6)
    assert logged(tmp_path) == [1, 2, 3, 4, 5]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('\n\0\0\0\n{"iteration": 2, "lo')
    capsys.readouterr()
    run = start(tmp_path, workers=2, root="there", amp="bf16")  # where and how fast it runs
    assert run.iteration == 3 and logged(tmp_path) == [1, 2, 3]
    assert "metrics.jsonl: 3 lines that cannot be read are dropped" in capsys.readouterr().out
    assert torch.equal(run.parts["model"].weight, first.parts["model"].weight)
    train(run, 8)
    assert logged(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_another_run_is_refused(tmp_path):
    """With --fresh it begins anew, and nothing of the first is left."""
    train(start(tmp_path), 3).finish(None, None)  # without eval_linear.py
    with fails(f"{tmp_path} holds a run with --batch-size 4, not 8: choose another", "--fresh"):
        start(tmp_path, batch_size=8)
    with fails(f"{tmp_path} holds a run with --new-flag None, not 1"):
        start(tmp_path, new_flag=1)
    assert start(tmp_path, fresh=True, lr=7).iteration == 0 and logged(tmp_path) == []
    assert files_in(tmp_path) == {"args.json", "metrics.jsonl"}


def test_saved_weights_are_plain(tmp_path):
    """CPU tensors in the usual memory format, loaded with weights_only."""
    module = nn.Conv2d(3, 2, 4).to(memory_format=torch.channels_last)
    start(tmp_path).save_weights("backbone.pth", module)
    weight = torch.load(tmp_path / "backbone.pth", weights_only=True)["weight"]
    assert weight.is_contiguous() and not weight.requires_grad
    assert torch.equal(weight, module.weight)


def test_numbers_that_are_not_finite(tmp_path):
    """Which value, when, what is kept and what to try; infinite weights are not written."""
    run = start(tmp_path)
    run.iteration, run.values = 1, {"loss": torch.tensor(1.0), "norm": math.nan}
    with fails("the norm is not finite at iteration 1; no checkpoint yet. Try a lower", "--warmup"):
        run.write_metrics()
    train(run, 3)
    run.iteration, run.values = 4, {"loss": torch.tensor(math.inf)}
    kept = "checkpoint.pth keeps the last good state"
    with fails(f"the loss is not finite at iteration 4; {kept}"):
        run.write_metrics()
    run.parts["model"].weight.data.fill_(math.inf)
    with fails(f"the model is not finite at iteration 4; {kept}"):
        run.save()
    assert common.read_checkpoint(tmp_path / "checkpoint.pth")["iteration"] == 3
    assert logged(tmp_path) == [2, 3]


def test_undecodable_photos_are_named_once(tmp_path, capsys):
    """In the log and in skipped.txt, over the interruptions of a run; one in a hundred is borne."""
    for run in (start(tmp_path), start(tmp_path)):
        run.report_unreadable(["5.jpg", "5.jpg"])
        run.report_unreadable(["5.jpg", "7.jpg"])
    skipped = tmp_path / "skipped.txt"
    assert skipped.read_text() == "5.jpg\n7.jpg\n"
    printed = capsys.readouterr().out
    assert printed.count("5.jpg") == 1 and printed.count("7.jpg") == 1
    with fails("3 of 200 images cannot be decoded, at most 1% may be", skipped):
        run.report_unreadable(["33.jpg"])
    assert skipped.read_text().split() == ["5.jpg", "7.jpg", "33.jpg"]


@pytest.mark.parametrize("busy", (False, True))
def test_threads_where_others_are_busy(busy, monkeypatch, capsys):
    """One thread is taken if an operation of all threads is slower, and that is said."""
    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    slow = {1: 4, 2: 2, 3: 1.3, 4: 20 if busy else 1}
    monkeypatch.setattr(torch, "conv2d", lambda *_: time.sleep(2e-4 * slow[threads[-1]]))
    common.choose_threads()
    assert threads[-1] == (3 if busy else 4)
    assert ("other programs are busy: 3 of 4 threads" in capsys.readouterr().out) == busy


def test_threads_are_left_to_the_user(monkeypatch):
    monkeypatch.setattr(common, "choose_threads", lambda: pytest.fail("OMP_NUM_THREADS is set"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    common.start()


def test_an_error_beside_a_pool_of_processes(tmp_path):
    """The program ends: it does not wait for ever for processes of the pool that were killed."""
    code = """
import common, time

def main(args):
    parts = common.all_cores(abs, range(8))
    print(next(parts), next(parts))
    time.sleep(0.3)
    raise IndexError("something")

common.run(main, lambda: None)
"""
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    options["env"] = environment(PYTHONPATH=str(ROOT))
    ended = subprocess.run([sys.executable, "-c", code], **options)
    assert ended.returncode == 1 and ended.stdout == "0 1\n"
    assert "IndexError: something" in ended.stderr


def test_a_second_run_waits(tmp_path, capsys):
    """For what another process makes in the cache; then it finds it."""
    path = tmp_path / "labels-1"
    code = f"import common, pathlib, time\nwith common.locked(pathlib.Path({str(path)!r})):\n"
    code += "    print('locked', flush=True); time.sleep(1); open('made', 'w').close()"
    command = [sys.executable, "-c", code]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)), **options) as other:
        assert other.stdout.readline() == "locked\n"
        with common.locked(path):
            assert (tmp_path / "made").exists()
    assert f"waiting for another run, which is making {path}" in capsys.readouterr().out


def test_cached(tmp_path, capsys):
    """Built once for what they are made of; a damaged file is made again, and that is said."""
    built = []

    def cached(made_of):
        build = lambda: built.append(made_of) or {"a": np.arange(len(built))}
        return common.cached(tmp_path, "x", made_of, build, lambda arrays: arrays["a"].tolist())

    assert [cached(1), cached(1), cached({"b": 2}), cached({"b": 2})] == [[0], [0], [0, 1], [0, 1]]
    assert built == [1, {"b": 2}] and capsys.readouterr().out == ""
    with fails("what this version of the scripts has made: delete it"):
        common.cached(tmp_path, "x", 1, None, lambda arrays: arrays["b"])
    path = common.cache_path(tmp_path, "x", {"b": 2}).with_suffix(".npz")
    content = path.read_bytes()
    for damage in (content[:-40], b"", b"no archive", content.replace(b"NUMPY", b"NOMPY")):
        path.write_bytes(damage)
        assert len(cached({"b": 2})) == len(built)
        assert f"{path} is damaged" in capsys.readouterr().out
    assert len(built) == 6


# ------------------------------------------------------------------------------------- full disk


@contextlib.contextmanager
def room_for_a_part():
    """The disk fills up while it is written: the largest file that this process may make."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def full_at_the_end():
    """It is noticed as the last bytes are forced to the disk."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


@pytest.mark.parametrize("numbers", (8_100, 20_000, 1_000_000))
@pytest.mark.parametrize("disk", (room_for_a_part, full_at_the_end))
def test_a_failed_write_keeps_the_old_file(tmp_path, disk, numbers):
    """Wherever torch.save stops, the old file stays and nothing else lies about."""
    path = tmp_path / "checkpoint.pth"
    content = {"a": torch.zeros(numbers), "b": torch.ones(numbers)}
    path.write_bytes(b"old")
    with disk(), fails(path, "cannot be written", "what it held before is kept: make room"):
        common.write_file(path, lambda file: torch.save(content, file))
    assert files_in(tmp_path) == {"checkpoint.pth"} and path.read_bytes() == b"old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_line_on_a_full_disk():
    with fails("/dev/full cannot be written (No space left on device): make room"):
        common.append_line("/dev/full", "{}")


# --------------------------------------------------------------------------- signals and pictures


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_is_only_noted(number):
    """A second one ends at once; afterwards the old handlers are back."""
    handlers = lambda: [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before = handlers()
    with pytest.raises(KeyboardInterrupt), common.StopSignals() as stop:
        assert stop.number == 0
        os.kill(os.getpid(), number)
        assert stop.number == number
        os.kill(os.getpid(), signal.SIGINT)
    assert handlers() == before


def test_an_even_attention_looks_even(tmp_path):
    """Brightness is in proportion to the map: an even one shows no structure of its own."""
    even = torch.full((2, 2), 0.25) + 1e-4 * torch.arange(4).view(2, 2)
    words = [("even", even), ("left", torch.tensor([[0.4, 0.1], [0.4, 0.1]]))]
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    pictures.draw_attention(grey, "a caption", words, tmp_path / "a.png", side=32)
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    even, left = sheet[34:66, 48:80], sheet[34:66, 88:120]
    assert np.ptp(even[8:24, 8:24], (0, 1)).max() <= 2
    assert left[16, 4, 0] > left[16, 28, 0] + 30
