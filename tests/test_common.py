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
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms.functional as TF
from conftest import ALONE, CPU, ROOT, TORCHRUN, environment, files_in, metrics, result
from PIL import Image
from torch import nn

import common
import shapes


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
    """Letters of every alphabet come back; half a surrogate pair, which JSON allows, is no error."""
    strings = ["a dog", "", "schöne Grüße", "日本語", "🙂🙃", ""]
    packed = common.PackedStrings(strings[:3])
    for string in strings[3:]:
        packed.append(string)
    assert list(packed) == strings and len(packed) == 6 and packed[3] == "日本語"
    for outside in (6, -1):
        with pytest.raises(IndexError):
            packed[outside]
    assert common.PackedStrings(["a \ud83d dog"])[0] == "a ? dog"


def test_packed_strings_are_small():
    """A caption costs its letters, an eighth more (a bytearray grows ahead) and 9 bytes."""
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
    """Each phrase is a caption of its image; the split is everybody's, in any order of the files."""
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


def test_jsonl_without_splits(tmp_path):
    """A fixed twentieth of the lines is for validation, the rest for training."""
    path = write_jsonl(tmp_path / "data.jsonl", *({"image": f"{n}.jpg"} for n in range(60)))
    splits = "train", "val", "val"
    train, val, again = (list(common.caption_data(path, split=s).images) for s in splits)
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
        with fails(f"{path} not found: a " if content is None else path):
            read_folder()


@pytest.mark.parametrize(
    "file, change, message",
    [
        (CAPTIONS, lambda c: c.pop("annotations"), "'annotations' is missing"),
        (CAPTIONS, lambda c: c["images"][3].pop("file_name"), "'file_name' is missing"),
        (CAPTIONS, lambda c: c["annotations"][3].pop("caption"), ", entry 3: 'caption' is missing"),
        (CAPTIONS, lambda c: c["annotations"][3].update(caption=None), ", entry 3: "),
        (CAPTIONS, lambda c: c["annotations"][7].update(image_id=4711), ", entry 7: 4711 is missing"),
        (INSTANCES, lambda c: c["annotations"][7].update(category_id=4711), ", entry 7: 4711 is"),
        (INSTANCES, lambda c: c["annotations"][3].pop("category_id"), ", entry 3: 'category_id'"),
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
        (b"7", ""),
        (b'{"captions": ["x"]}', "'image' is missing"),
        (b'{"image": 7}', ""),
        (b'{"image": "a.jpg", "caption": "x"}', 'the key is "captions"'),
        (b'{"image": "a.jpg", "captions": "x"}', '"captions" must be a list of strings'),
        (b'{"image": "a.jpg", "captions": [7]}', ""),
        (b'{"image": "a.jpg", "tags": "x"}', '"tags" must be a list of strings'),
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
    path = write_jsonl(tmp_path / "data.jsonl", {"image": "a.jpg", "split": "train"})
    (tmp_path / "a.jpg").unlink()
    with fails("1 of 1 images are missing", "from the folder of the .jsonl, or from --root"):
        common.caption_data(path)


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
    picture = shapes.draw(3, 1200).crop((0, 0, 1200, 900))
    picture.save(tmp_path / "a.jpg", quality=95)
    images, box = Watched([str(tmp_path / "a.jpg")]), (401.5, 300.25, 701.5, 600.25)
    _, pixels = common.read_crops(images, 0, [everything, lambda width, height: box], 64)
    assert images.opened.size == (300, 225)  # a quarter: 300 / 4 is still more than 64
    error = apart(pixels, resized(picture, 64, box))
    assert error < 3
    for x, y in ((6, 0), (-6, 0), (0, 6), (0, -6)):
        shifted = tuple(np.add(box, (x, y, x, y)))
        assert apart(pixels, resized(picture, 64, shifted)) > 1.5 * error


def test_small_jpegs_are_decoded_whole(tmp_path):
    """When no smaller version has enough pixels the result is that of a full decode."""
    shapes.draw(3, 100).save(tmp_path / "a.jpg")
    expected = resized(Image.open(tmp_path / "a.jpg"), 64)
    assert np.array_equal(read(tmp_path / "a.jpg", size=64), expected)


@pytest.mark.parametrize("suffix", ("jpg", "png"))
@pytest.mark.parametrize(
    "orientation, stored",
    [(2, Image.FLIP_LEFT_RIGHT), (3, Image.ROTATE_180), (6, Image.ROTATE_90), (8, Image.ROTATE_270)],
)
def test_rotated_photos_come_upright(tmp_path, suffix, orientation, stored):
    """A phone stores how it was held; the crop is cut from the upright photo."""
    upright, exif = shapes.draw(3, 160).crop((0, 0, 160, 100)), Image.Exif()
    exif[0x0112] = orientation
    upright.transpose(stored).save(tmp_path / f"a.{suffix}", exif=exif)
    boxes = {(160, 100): (10, 20, 90, 100)}
    seen = read(tmp_path / f"a.{suffix}", lambda *size: boxes[size])
    assert apart(seen, resized(upright.crop(boxes[160, 100]))) < 4


def colour_modes():
    """-> {file name: (picture, how to save it, the picture that one sees)}"""
    picture = shapes.draw(8, 64)
    grey, palette, bits = picture.convert("L"), picture.quantize(64), picture.convert("1")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)  # X-rays, satellites
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
    """Files with bytes overturned or cut off raise nothing but Unreadable."""
    exif, draw, path = Image.Exif(), random.Random(0), tmp_path / f"a.{suffix}"
    exif[0x0112], exif[0x010E] = 6, "upside down"
    shapes.draw(2, 48).save(path, **({} if suffix == "gif" else {"exif": exif}))
    whole, unreadable = path.read_bytes(), []
    for _ in range(40):
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
    """Uncropped and without jitter, a photo is as it is or mirrored; in validation it is as it is."""
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
    """The first batches of an InfiniteSampler, each put together from the ranks' shares."""
    parts, share = [], batch_size // ranks
    for rank in range(ranks):
        world = common.World(rank, ranks, CPU)
        sampler = iter(common.InfiniteSampler(size, batch_size, world, seed, start))
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


def test_batches_do_not_depend_on_the_number_of_workers():
    """The same bits in the same order. The workers leave signals to the main process."""
    loaded, samples = [], common.Samples(draws, 20)
    for workers in (0, 2):
        sampler = common.InfiniteSampler(20, 4, ALONE, 0)
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
ERRORS = """
import common

def unreadable(index, rng):
    raise common.Unreadable(f"{index}.jpg")

def main(_):
    next(iter(common.loader(range(20), 4, 2)))
    try:
        next(iter(common.loader(common.Samples(unreadable, 3), 1, 2)))
    except common.Unreadable as error:
        try:
            common.run(lambda _: next(iter(common.loader(common.Samples(unreadable, 3), 1, 2))), lambda: None)
        except SystemExit as stopped:
            print(stopped)
    raise RuntimeError("CUDA out of memory")

common.run(main, lambda: None)
"""
TWO_PROCESSES = """
import common

world = common.start()
print("any:", common.any_process(world, world.is_main), flush=True)
with common.main_first(world):
    if world.is_main:
        common.fail("no room", everywhere=False)
    print("the other has been here", flush=True)
"""
