"""common.py: captioned images, batches, augmentation, backbones, processes, recipes"""

import argparse
import itertools
import json
import math
import multiprocessing
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import urllib.error
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from conftest import ROOT, TORCHRUN, Touch, captioned, files_in, fork_and_read, one_split
from conftest import photos_at, run_script
from PIL import Image, ImageOps

import common
from extras import checkpoints, shapes


def test_captioned(capsys):
    """Photos with 0, 2 and 5 captions; tags stay with their photos."""
    data = captioned([], ["a", "b"], ["c", "d", "e", "f", "g"], tags=[["x"], [], ["y", "z"]])
    assert data.all_captions() == list("abcdefg") and data.captions[0] == []
    assert [*data.captions] == [[], ["a", "b"], ["c", "d", "e", "f", "g"]]
    kept = data.captioned()
    assert list(kept.images) == ["1.jpg", "2.jpg"]
    assert [*kept.captions] == [["a", "b"], ["c", "d", "e", "f", "g"]]
    assert [*kept.tags] == [[], ["y", "z"]] and kept.captioned() is kept
    assert data.select([2, 0]).tags[0] == ["y", "z"]
    assert "1 of 3 photos have no caption: left out" in capsys.readouterr().out


def test_coco(coco_folder, tmp_path):
    """Images, their captions and their tags belong together; a file of instances is optional."""
    root = shutil.copytree(coco_folder, tmp_path / "coco")
    data = one_split("coco", str(root), "val2017", tags=True)
    assert len(data) == 12 and data.tag_names == list(shapes.SHAPES)
    for i, scene in enumerate(range(1000, 1012)):
        objects = shapes.objects_of(scene)
        assert data.images[i] == f"{root}/val2017/{scene:012d}.jpg"
        assert data.captions[i] == shapes.describe(objects)
        assert set(data.tags[i]) == {o.shape for o in objects}
        assert len(data.tags[i]) == len(set(data.tags[i]))
    untagged = [one_split("coco", str(root), "val2017")]
    (root / "annotations" / "instances_val2017.json").unlink()
    untagged.append(one_split("coco", str(root), "val2017", tags=True))
    for other in untagged:
        assert other.tag_names == other.tags[0] == []
        assert other.all_captions() == data.all_captions()


def write_jsonl(path, *rows):
    """One JSON object per line, and its image"""
    for row in rows:
        Image.new("L", (8, 8)).save(path.parent / row["image"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl(tmp_path):
    """What may be missing, blank or repeated; paths start from the file's folder or --root."""
    absolute = str(tmp_path / "4.jpg")
    rows = [
        {"image": "0.jpg", "captions": [" one ", "", "two"], "split": "train"},
        {"image": "1.jpg", "tags": ["cat", "dog", "cat"], "split": "train"},
        {"image": "2.jpg", "captions": ["three"], "tags": ["cow"], "split": "val"},
        {"image": "3.jpg", "captions": ["four \ud83d"]},  # half an emoji
        {"image": absolute, "captions": ["five"], "tags": ["dog"], "text": "7", "split": "train"},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    spaced = (tmp_path / "data.jsonl").read_text().replace("\n", "\n \n")
    (tmp_path / "data.jsonl").write_text(spaced, encoding="utf-8-sig")
    train, val = (one_split(path, split=split) for split in ("train", "val"))
    captions = [["one", "two"], [], ["four"], ["five"]]  # a line without a split is of train
    assert [train.captions[i] for i in range(4)] == captions
    assert [train.tags[i] for i in range(4)] == [[], ["cat", "dog"], [], ["dog"]]
    assert val.captions[0] == ["three"] and val.tags[0] == ["cow"] and len(val) == 1
    assert train.tag_names == val.tag_names == ["cat", "dog", "cow"]
    moved = shutil.copy(path, f"{tmp_path}-moved.jsonl")
    assert list(one_split(moved, str(tmp_path)).images) == list(train.images)
    assert train.images[0] == str(tmp_path / "0.jpg") and train.images[3] == absolute
    # Without splits, every twentieth photo is for validation, the rest for training.
    path = write_jsonl(tmp_path / "other.jsonl", *({"image": f"{n}.jpg"} for n in range(41)))
    train, val = (one_split(path, split=x).images for x in ("train", "val"))
    assert list(val) == photos_at(*(tmp_path / f"{n}.jpg" for n in (0, 20, 40))).tolist()
    assert len(train) == 38 and not {*train} & {*val}


WRONG_LINES = {
    b"{broken": "Expecting property name",
    b"\xe9": "codec can't decode",
    b'{"image": "b.jpg", "captions": "x"}': "'x' is not a list of texts",
    b'{"image": "b.jpg", "captions": [null]}': "None. is not a list of texts",
    b'{"image": "b.jpg", "captions": [7]}': "7. is not a list of texts",
    b'{"image": "b.jpg", "captions": NaN}': "nan is not a list of texts",
    b'{"image": "b.jpg", "tags": [null]}': "None. is not a list of texts",
    b'{"image": "b.jpg", "tags": [NaN]}': "nan. is not a list of texts",
    b'{"image": "b.jpg", "tags": "x"}': "'x' is not a list of texts",
    b'{"image": "b.jpg", "split": NaN}': "nan. is not a list of texts",
    b'{"image": "b.jpg", "split": 0}': "0. is not a list of texts",
    b'{"image": "./a.jpg"}': "/a.jpg is on an earlier line",
    b'{"image": "x/../a.jpg"}': "/a.jpg is on an earlier line",
    b'{"captions": ["x"]}': 'it needs "image"',
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_bad_lines(line, tmp_path):
    """The message names the file, the line (counted from 1) and what was expected."""
    (tmp_path / "data.jsonl").write_bytes(b'{"image": "a.jpg"}\n\n' + line)
    expected = f"^error: .*/data.jsonl, line 3: .*{WRONG_LINES[line]}.* Expected.*: "
    with pytest.raises(SystemExit, match=expected + '{"image": "photo.jpg"'):
        one_split(f"{tmp_path}/data.jsonl")


def test_what_is_left_out_of_a_jsonl_is_said(tmp_path, capsys):
    rows = [{"image": f"{n}.jpg", "labels": ["x"], "Split": "val"} for n in range(3)]
    rows += [{"image": "3.jpg", "split": "train", "tags": [""], "captions": ["a", "", " "]}]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    data = one_split(path)
    keys = f"{path}: 4 photos in train; keys that are not read: labels, Split\n"
    printed = capsys.readouterr().out
    assert printed.count(keys) == 1 and "2 captions of train are empty: left out" in printed
    assert data.tag_names == [] and data.tagged.tolist() == [False, False, False, True]


def test_both_splits_from_one_reading(tmp_path, monkeypatch):
    rows = [{"image": f"{n}.jpg", "split": "val" if n > 2 else "train"} for n in range(5)]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    lines = []
    loads = common.json.loads
    monkeypatch.setattr(common.json, "loads", lambda line: lines.append(line) or loads(line))
    train, val = common.caption_data(path)
    assert (len(train), len(val), len(lines)) == (3, 2, 5)


def test_caption_is_no_key(tmp_path):
    rows = {"image": "b.jpg", "captions": []}, {"image": "a.jpg", "caption": "a dog"}
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    with pytest.raises(SystemExit, match="line 2: it needs .*.captions. instead of .caption."):
        one_split(path)


def test_a_split_without_photos(tmp_path, capsys):
    """null is no split, no captions and no tags; the splits that there are stand in the output."""
    row = {"image": "a.jpg", "captions": None, "tags": None, "split": None}
    path = write_jsonl(tmp_path / "data.jsonl", row, {"image": "b.jpg", "split": "a"})
    data = one_split(path)
    assert data.captions[0] == [] and not data.tagged.any()
    message = "^error: no photo belongs to the split val: .* --val-split$"
    with pytest.raises(SystemExit, match=message):
        one_split(path, split="val")
    assert "1 photos in train, 1 photos in a" in capsys.readouterr().out


def coco_file(root, kind="captions", **content):
    """A COCO file of two photos, 0.jpg and 1.jpg, with this content"""
    images = [{"id": n, "file_name": f"{n}.jpg"} for n in range(2)]
    for folder in ("annotations", "train"):
        (root / folder).mkdir(exist_ok=True)
    for n in range(2):
        Image.new("L", (8, 8)).save(root / "train" / f"{n}.jpg")
    content = {"images": images, "annotations": [], "categories": [], **content}
    (root / "annotations" / f"{kind}_train.json").write_text(json.dumps(content))
    return images


def test_what_coco_files_leave_out(tmp_path, capsys):
    """Annotations of no image and images that are listed again, each with a count"""
    of = [{"image_id": n, "caption": f"photo {n}"} for n in (0, "1", 1, 1, 7)]
    images = coco_file(tmp_path)
    coco_file(tmp_path, annotations=of, images=images + images[:1])
    instances = [{"image_id": n, "category_id": 5} for n in (1, 9)]
    coco_file(tmp_path, "instances", annotations=instances, categories=[{"id": 5, "name": "cat"}])
    data = one_split("coco", str(tmp_path), "train", tags=True)
    assert [*data.captions] == [["photo 0"], ["photo 1", "photo 1"]]
    assert [*data.tags] == [[], ["cat"]]
    printed = capsys.readouterr().out
    assert "1 images of train are listed again; annotations of 3 ids are left out" in printed
    assert "left out, which no image has: ['1', 7, 9]" in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"images": []', "captions_train.json is not valid JSON: Expecting"),
        ('{"images": [], "annotations": []}', "no photo belongs to the split train: see"),
        ('{"images": []}', "are not in the layout of COCO: KeyError('annotations')"),
        ('["a.jpg"]', "are not in the layout of COCO: TypeError"),
        (
            '{"images": [{"id": 1, "file_name": "1.jpg"}], '
            '"annotations": [{"image_id": 1, "caption": null}]}',
            "layout of COCO",
        ),
    ],
)
def test_files_that_are_not_coco_s(content, message, tmp_path):
    coco_file(tmp_path)
    (tmp_path / "annotations/captions_train.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        one_split("coco", str(tmp_path), "train")
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


def test_fingerprint(coco_folder, tmp_path):
    """The same in another folder; another if a name, a caption or a label is."""
    moved = shutil.copytree(coco_folder, tmp_path / "elsewhere")
    read = lambda root: one_split("coco", str(root), "train2017", tags=True)
    one, other = read(coco_folder), read(moved)
    of = lambda data: common.fingerprint(data.images, data.captions, data.tags)
    assert of(one) == of(other) != of(one.select(range(23)))
    rows = [*one.captions]
    rows[5] = [*rows[5][:-1], "another"]
    assert of(replace(one, captions=common.lists(rows))) != of(one)
    names, labels = ["a/0.jpg", "a/1.jpg"], [0, 1]
    assert common.fingerprint(names, labels) == common.fingerprint(["b/0.jpg", "b/1.jpg"], labels)
    assert common.fingerprint(names, labels) != common.fingerprint(names, [1, 0])
    assert common.fingerprint(names, labels) != common.fingerprint(["a/0.jpg", "a/2.jpg"], labels)


def test_checksum_of_data():
    """Another one if the tags have another order, because their numbers are their places."""
    tags = [["cat"], ["dog"]]
    one = captioned([], [], tags=tags, tag_names=["cat", "dog"])
    assert one.checksum() == captioned([], [], tags=tags, tag_names=["cat", "dog"]).checksum()
    assert one.checksum() != captioned([], [], tags=tags, tag_names=["dog", "cat"]).checksum()
    assert one.checksum() != captioned([], [], tags=tags[::-1], tag_names=["cat", "dog"]).checksum()
    assert one.checksum() != captioned(["a"], [], tags=tags, tag_names=["cat", "dog"]).checksum()


def test_a_url_is_no_data():
    with pytest.raises(SystemExit, match="^error: no data set https://a.org/0.tar: "):
        one_split("https://a.org/0.tar")


def test_the_log_of_a_run_that_goes_on(tmp_path):
    """It keeps the lines up to the checkpoint; those behind it, and half a line, are gone."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"iteration": {n}}}\n' for n in (1, 2, 3)]
    path.write_text("".join(lines) + '{"itera')
    args = argparse.Namespace(output=str(tmp_path), batch_size=4, accumulate=1)
    log = common.Log(args, 2)
    assert path.read_text() == "".join(lines[:2])
    log.write(3, {"loss": 1.0})
    log.write(4, {"loss": 2.0})
    expected = lines[:2] + ['{"iteration": 3, "loss": 1.0}\n', '{"iteration": 4, "loss": 2.0}\n']
    assert path.read_text() == "".join(expected)
    common.Log(args, 0)  # a new run
    assert path.read_text() == ""


def test_rank_alone_is_no_torchrun(monkeypatch):
    """Another program may have left it in the shell."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    common.init_distributed()
    assert not torch.distributed.is_initialized() and common.world_size() == 1


def test_imagenet_without_a_network(monkeypatch):
    def resnet18(**kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(torchvision.models, "resnet18", resnet18)
    args = argparse.Namespace(init="imagenet", arch="resnet18", output="runs/none")
    with pytest.raises(SystemExit, match="of resnet18 cannot be downloaded .*are you online"):
        common.read_init(args)


def test_bars_without_a_terminal(capsys, monkeypatch):
    """A line each 30 seconds, with the numbers of that moment, and one at the end"""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = common.progress(range(100), desc="photos")
    for n in bar:
        bar.set_postfix(number=n, refresh=False)
        now[0] += 1
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("photos: ") for line in lines)
    shown = [re.search(r"(\d+)/100 .* number=(\d+)", line) for line in lines]
    assert [(int(x[1]), int(x[2])) for x in shown] == [(30, 29), (60, 59), (90, 89), (100, 99)]


def test_a_terminal_without_utf8():
    code = "import common; common.init_distributed(); common.print_main('caf\u00e9')"
    ended = run_script("-c", code, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, "caf?\n")


BOUNDS = [
    ("int >= 0", ("0", "7"), ("-1", "1.5"), "at least 0"),
    ("int > 0", ("1", "7"), ("0", "-1"), "above 0"),
    ("> 0", ("1e-9", "30"), ("0", "-1", "nan", "inf"), "above 0"),
    (">= 0", ("0", "1e4"), ("-1", "nan", "inf"), "at least 0"),
    (">= 0, <= 1", ("0", "1"), ("-0.1", "1.1", "nan"), "at least 0 and at most 1"),
    (">= 0, < 1", ("0", "0.999"), ("1", "500", "-0.1", "nan"), "at least 0 and below 1"),
    ("> 0, <= 1", ("1", "1e-3"), ("0", "50", "nan"), "above 0 and at most 1"),
]


@pytest.mark.parametrize("bounds, good, bad, words", BOUNDS)
def test_bounds_of_numbers(bounds, good, bad, words, capsys):
    """What a flag accepts, and the one line that answers anything else"""
    parser = common.Parser("A program", {"rate": (None, None, None, bounds, "how fast")})
    for text in good:
        assert parser.parse_args(["--rate", text]).rate == float(text)
    for text in (*bad, "x"):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([f"--rate={text}"])
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and printed.count("\n") == 1
        expected = f"error: --rate must be (a whole number |a number )?{words}, not {text}\n"
        assert re.fullmatch(expected, printed)


FLAGS = {
    "data": ("shapes", "shapes", "shapes", str, "what to learn from"),
    "recipe": (None, None, None, common.RECIPES, "where defaults come from"),
    "batch_size": (32, 64, 256, "int > 0", "photos per iteration [Sec. 3]"),
    "grey": (False, False, True, bool, "in 50% of all cases"),
}


def test_the_table_is_the_help(capsys):
    """In 80 columns: each flag with its three values, its bounds or choices, and its help"""
    with pytest.raises(SystemExit) as ended:
        common.Parser("What it does\n", FLAGS).parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and max(map(len, lines)) <= 80
    assert lines[0].startswith("usage: ") and lines[0].endswith("[--FLAG VALUE ...]")
    words = [line.split() for line in lines]
    assert ["default", "of", "--recipe", "demo", "small", "paper", "may", "be"] in words
    assert ["--batch-size", "32", "64", "256", "int", ">", "0"] in words
    assert "photos per iteration [Sec. 3]" in [line.strip() for line in lines]
    assert "in 50% of all cases" in [line.strip() for line in lines]
    assert ["--recipe", "-", "-", "-", "demo,", "small,"] in words
    assert ["paper"] in words  # the choices go on


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batchsize", "3"], "--batchsize: did you mean --batch-size?"),
        (["--compile"], "--compile: this flag was removed"),
        (["--foo=3"], "--foo: there is no such flag: see --help"),
        (["--recipe", "big"], "--recipe: invalid choice: 'big'"),
        (["--batch-size"], "--batch-size: expected one argument"),
        (["photos"], "photos: it needs a flag before it"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        common.Parser("What it does", FLAGS).parse_args(argv)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1


def test_what_is_given():
    args = common.Parser("What it does", FLAGS).parse_args(["--batch-size", "3", "--no-grey"])
    assert args.given == ["batch_size", "grey"] and args.grey is False and args.recipe is None



def box(left, top, right, bottom):
    """-> a function for read_crops, with which it cuts this box"""
    return lambda size: np.array([[left, top], [right, bottom]], float)


def whole(size):
    return box(0, 0, *size)(size)


def read(path, crop=whole, size=32):
    """One readable file -> float pixels"""
    [pixels] = common.read_crops(captioned([], images=photos_at(path)), 0, [crop], size)
    assert pixels.dtype == np.uint8 and pixels.shape == (size, size, 3)
    return pixels.astype(float)


def resized(image, size=32, box=None):
    return np.asarray(image.convert("RGB").resize((size, size), Image.BILINEAR, box), float)


def apart(one, other):
    return np.abs(one - other).mean()


def exif(*entries):
    """(tag, type, count, four bytes) of each entry -> EXIF data, right or wrong"""
    rows = [struct.pack(">HHI4s", *entry) for entry in sorted(entries)]
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(rows)) + b"".join(rows) + bytes(4)


ORIENTATION, COPYRIGHT = 0x112, 0x8298
SIDEWAYS = exif((ORIENTATION, 3, 1, b"\0\6\0\0"))  # 6: to be turned by 270 degrees


@pytest.mark.parametrize("kind", ("JPEG", "MPO"))
@pytest.mark.parametrize("turned", (False, True))
def test_large_jpegs_are_decoded_small(tmp_path, kind, turned):
    """At a fraction of the size that the smallest crop needs; the crop is the right part of it."""
    picture = shapes.draw(33, 1200).crop((0, 0, 1200, 900))
    stored = picture.transpose(Image.Transpose.ROTATE_90) if turned else picture
    stored.save(tmp_path / "a.jpg", kind, quality=95, exif=SIDEWAYS if turned else b"")
    opened, part = Image.open(tmp_path / "a.jpg"), (401.5, 300.25, 701.5, 600.25)
    as_stored = (300.25, 1200 - 701.5, 600.25, 1200 - 401.5) if turned else part
    data = captioned([])
    data.open = lambda path: opened
    _, pixels = common.read_crops(data, 0, [whole, box(*as_stored)], 64)
    # A quarter: 300 / 4 is still more than 64.
    assert opened.size == ((225, 300) if turned else (300, 225))
    error = apart(pixels, resized(picture, 64, part))
    assert error < 3
    for x, y in ((6, 0), (-6, 0), (0, 6), (0, -6)):
        shifted = tuple(np.add(part, (x, y, x, y)))
        assert apart(pixels, resized(picture, 64, shifted)) > 1.5 * error
    picture.resize((100, 75)).save(tmp_path / "a.jpg")  # no smaller version has enough pixels
    expected = resized(Image.open(tmp_path / "a.jpg"), 64)
    assert np.abs(read(tmp_path / "a.jpg", size=64) - expected).max() <= 1


RAMP = np.clip(np.add.outer(3 * np.arange(80), np.arange(120)) - 30, 0, 255) / 255
PICTURE = Image.fromarray((255 * RAMP).round().astype(np.uint8))
STORED = PICTURE.transpose(Image.Transpose.ROTATE_90)
INK = Image.new("L", PICTURE.size)  # black, and more transparent where it is brighter
ALPHA = PICTURE.point(lambda value: 255 - value)
BROKEN = exif((ORIENTATION, 3, 1, b"\0\6\0\0"), (COPYRIGHT, 2, 99, b"\0\0\x0f\0"))  # points nowhere


@pytest.mark.parametrize(
    "name, image, settings",
    [
        ("8-bit.png", PICTURE, {}),
        ("12-bit.png", Image.fromarray((4095 * RAMP).astype(np.uint16)), {}),
        ("16-bit.tif", Image.fromarray((65535 * RAMP).astype(np.uint16)), {}),
        ("hounsfield.tif", Image.fromarray((3000 * RAMP - 1000).astype(np.int32)), {}),
        ("32-bit.tif", Image.fromarray((255 * RAMP).astype(np.int32)), {}),
        ("cmyk.jpg", PICTURE.convert("CMYK"), {"quality": 95}),
        ("alpha.png", Image.merge("LA", (INK, ALPHA)), {}),
        ("alpha.webp", Image.merge("RGBA", (INK, INK, INK, ALPHA)), {"lossless": True}),
        ("palette.gif", PICTURE.point(lambda v: v % 255), {"transparency": 0}),
        ("turned.jpg", STORED, {"exif": SIDEWAYS}),
        ("turned.tif", STORED, {"exif": SIDEWAYS, "compression": "tiff_lzw"}),
        ("turned.mpo", STORED, {"exif": SIDEWAYS, "save_all": True, "append_images": [PICTURE]}),
        ("broken.jpg", STORED, {"exif": BROKEN}),
    ],
)
def test_one_picture_in_many_files(tmp_path, name, image, settings):
    """The same grey picture, whatever its depth, transparency and rotation"""
    image.save(tmp_path / name, **settings)
    cut = {PICTURE.size: (10, 20, 70, 80), STORED.size: (20, 50, 80, 110)}
    seen = read(tmp_path / name, lambda size: box(*cut[tuple(size)])(size))
    assert apart(seen, resized(PICTURE, box=cut[PICTURE.size])) < 1.5


def noise(mode, width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(pixels).convert(mode)


# Box as given, and in whole pixels
BOXES = {
    "whole": ((0, 0, 90, 70), (0, 0, 90, 70)),
    "enlarged": ((30.4, 20.4, 49.6, 37.6), (30, 20, 50, 38)),
    "tall": ((10.6, 0, 30.4, 70), (11, 0, 30, 70)),
    "one pixel": ((40, 30, 41, 31), (40, 30, 41, 31)),
    "less than a pixel": ((40.1, 30.1, 40.3, 30.3), (40, 30, 41, 31)),
    "in the last corner": ((89.7, 69.8, 90, 70), (89, 69, 90, 70)),
}


@pytest.mark.parametrize("given, expected", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("mode", ("RGB", "L", "RGBA"))
def test_crops_are_those_of_pil(tmp_path, mode, given, expected):
    """Of noise: within one level of PIL's resize of the same box in whole pixels"""
    picture = noise(mode, 90, 70)
    picture.save(tmp_path / "a.png")
    if mode == "RGBA":
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    part = picture.convert("RGB").crop(expected)
    assert np.abs(read(tmp_path / "a.png", box(*given)) - resized(part)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations(tmp_path, orientation):
    """A crop of noise, turned and mirrored as EXIF says: as PIL does it with the whole photo"""
    noise("RGB", 90, 70).save(
        tmp_path / "a.png", exif=exif((ORIENTATION, 3, 1, bytes([0, orientation, 0, 0])))
    )
    with Image.open(tmp_path / "a.png") as stored:
        upright = ImageOps.exif_transpose(stored)
    # The box in the middle is the same in the photo as it is stored, but for its sides.
    part = (30, 25, 60, 45) if orientation < 5 else (25, 30, 45, 60)
    seen = read(tmp_path / "a.png", box(30, 25, 60, 45))
    assert np.abs(seen - resized(upright.crop(part))).max() <= 1


def test_odd_pictures(tmp_path):
    """A constant of 16 bits is black; floats have no range of their own, so they are refused."""
    Image.fromarray(np.full((8, 8), 777, np.uint16)).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == 0).all()
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tif")
    message = "a.tif .its pixels are floats: convert it to 8 bits"
    with pytest.raises(common.Unreadable, match=message):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("of_pixels", (np.uint8, np.uint16))
def test_tiffs_in_which_zero_is_white(tmp_path, of_pixels):
    """PIL inverts those of 8 bits itself, and also when it writes them."""
    values = np.linspace(0, np.iinfo(of_pixels).max, 64).astype(of_pixels).reshape(8, 8)
    stored = values if of_pixels == np.uint8 else values.max() - values
    Image.fromarray(stored).save(tmp_path / "a.tif", tiffinfo={262: 0})
    with Image.open(tmp_path / "a.tif") as image:
        assert image.tag_v2[262] == 0
    expected = resized(Image.fromarray(np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)))
    assert apart(read(tmp_path / "a.tif"), expected) < 2


@pytest.mark.parametrize("mode", ("L", "P", "I;16", "RGBA", "CMYK"))
def test_turned_tiffs(tmp_path, mode):
    """Without compression, PIL would map the file with rows of the wrong length."""
    picture = PICTURE.resize((60, 40))
    if mode == "I;16":
        stored = Image.fromarray(257 * np.asarray(picture, np.uint16))
    else:
        stored = picture.convert("RGB").convert(mode) if mode == "CMYK" else picture.convert(mode)
    stored = stored.transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "a.tif", exif=SIDEWAYS)
    assert apart(read(tmp_path / "a.tif"), resized(picture)) < 3


def test_unreadable_photos(capsys):
    """The next readable one is used, also at the end; a thousand in a row end the run."""

    def found(size, key, broken):
        """The sample at this key of a data set; those in `broken` cannot be decoded"""

        def sample(index, rng):
            if index in broken:
                raise common.Unreadable(f"{index}.jpg")
            return index

        photos = common.Photos(range(size), None)
        photos.sample = sample
        return photos[key]

    assert found(2000, 0, range(999)) == found(2000, (0, 0, 0), range(999)) == 999
    assert found(9, 8, [8]) == 0
    assert capsys.readouterr().out.count("cannot decode 8.jpg: the next photo is used") == 1
    with pytest.raises(common.Unreadable, match="a thousand samples in a row cannot be decoded"):
        found(2000, 0, range(1000))


@pytest.mark.parametrize("width, height", [(640, 480), (375, 500), (64, 64)])
def test_random_crop(width, height):
    """Within the image, 20-100% of its area, aspect between 3/4 and 4/3, and each range is used."""
    rng = np.random.default_rng(0)
    size = np.array([width, height])
    boxes = np.array([common.random_crop(rng, 0.2, size) for _ in range(2000)])
    left, top, right, bottom = boxes.reshape(2000, 4).T
    area = (right - left) * (bottom - top) / (width * height)
    aspect = (right - left) / (bottom - top)
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    room = size - boxes[:, 1] + boxes[:, 0]
    places = (boxes[:, 0] / room)[(room > 1).all(1)]  # (N, 2): anywhere
    assert places.min(0).max() < 0.05 and places.max(0).min() > 0.95
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.1
    assert 0.2 - 1e-9 <= area.min() < 0.22 and 0.8 < area.max() <= 1 + 1e-9
    assert 3 / 4 - 1e-9 <= aspect.min() < 0.77 and 1.3 < aspect.max() <= 4 / 3 + 1e-9
    square = common.centre_crop(np.array([512, 256]), 224 / 256)
    assert np.ravel(square).tolist() == [144, 16, 368, 240]


@pytest.mark.parametrize("width, height", [(500, 375), (500, 250), (90, 300), (333, 333)])
def test_random_crop_where_none_fits(width, height):
    """After ten failures, the box that torchvision takes: its corners, to a pixel"""
    from torchvision.transforms import RandomResizedCrop

    photo = torch.zeros(3, height, width)
    top, left, h, w = RandomResizedCrop.get_params(photo, [1.5, 1.5], [3 / 4, 4 / 3])
    box = common.random_crop(np.random.default_rng(0), 1.0, np.array([width, height]))
    assert np.abs(np.ravel(box) - [left, top, left + w, top + h]).max() < 1


def test_left_and_right():
    """Of whole words, in any case. (Which photos are flipped: test_virtex.py, test_tp.py)"""
    caption = "Left of a bright cleft: left, RIGHT-handed"
    assert common.swap_left_right(caption) == "Right of a bright cleft: right, LEFT-handed"
    assert common.swap_left_right("turn_Left_2, lefts, left2") == "turn_Right_2, lefts, left2"


def test_mirrored_labels(capsys):
    """A side becomes the other one if that is a label, too; it is said once."""
    names = ["turn_left", "cat", "turn_right", "left lung", "Right-Hand", "Left-Hand", "cat"]
    common.report_once.cache_clear()
    for _ in range(2):
        assert common.mirrored(names).tolist() == [2, 1, 0, 3, 5, 4, 6]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "in mirrored photos 4 labels change sides: turn_left, turn_right",
        "in mirrored photos 1 labels stay: the other side is missing: left lung",
    ]
    assert common.mirrored(["left", 7]).tolist() == [0, 1]
    assert "1 labels stay" in capsys.readouterr().out


@pytest.mark.parametrize("names, expected", [
    (["leftHand", "other", "rightHand"], [2, 1, 0]),
    (["RIGHT1", "LEFT1"], [1, 0]),
    (["Left", "straight", "right"], [2, 1, 0]),
    (["bright left lamp", "bright right lamp", "brleft"], [1, 0, 2]),
    (["Left", "left", "right", "Right"], [3, 2, 1, 0]),
    (["Left", "left", "right"], [0, 2, 1]),
])
def test_sides_within_words_of_labels(names, expected):
    """Of labels, unlike captions: the mirrored one is among them, so that it is no other word."""
    assert common.mirrored(names).tolist() == expected


def take(batches, size, batch_size, ranks=1, seed=0, start=0):
    """The first batches of infinite_sampler, each put together from the parts of the ranks."""
    parts, per_rank = [], batch_size // ranks
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "rank", lambda: rank)
            patch.setattr(common, "world_size", lambda: ranks)
            sampler = iter(common.infinite_sampler(size, batch_size, seed, start))
            parts.append([list(itertools.islice(sampler, per_rank)) for _ in range(batches)])
    return [list(itertools.chain(*batch)) for batch in zip(*parts)]


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_sampler(ranks):
    """Each epoch is another permutation; the number of processes and the start change nothing."""
    keys = np.reshape(take(30, 40, 4, ranks), (3, 40, 3))  # of three epochs
    for epoch, order in enumerate(keys.tolist()):
        assert sorted(order) == [[0, epoch, index] for index in range(40)]
    assert len({tuple(order) for order in keys[..., 2].tolist()}) == 3
    assert take(20, 37, 8, ranks) == take(20, 37, 8)  # epochs end within a batch
    assert take(5, 37, 8, ranks, start=13) == take(18, 37, 8)[13:]
    assert take(3, 40, 8, ranks, seed=1) != take(3, 40, 8)
    few = list(itertools.chain(*take(3, 3, 8, ranks)))  # images repeat within a batch
    assert [epoch for _, epoch, _ in few] == [n // 3 for n in range(24)]


TWO_PROCESSES = """
import common, time

sleep = time.sleep
common.time.sleep = lambda seconds: sleep(20 * seconds * {0})  # on a busy machine torchrun is slow
common.init_distributed()
if {0} or common.rank() == 1:
    common.fail("no room")
common.barrier()
"""


@pytest.mark.parametrize("all_alike", (True, False))
def test_errors_of_processes(tmp_path, all_alike):
    """What all find alike is said once; what rank 1 alone finds is said, too."""
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES.format(all_alike))
    ended = run_script(*TORCHRUN, script, PYTHONPATH=str(ROOT))
    assert ended.returncode == 1 and ended.stderr.count("error: no room") == 1


def test_several_gpus(monkeypatch, capsys):
    """Each process has its own; tensors on the host, which NCCL would refuse, go through gloo."""
    backends = []
    multiprocessing.set_start_method("spawn", force=True)
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    joined = lambda backend, **_: backends.append(backend)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert common.init_distributed() == torch.device("cuda", int(rank))
    assert backends == ["cpu:gloo,cuda:nccl"] * 2
    assert capsys.readouterr().out.count("unset RANK") == 1  # it may be left over in a shell
    assert multiprocessing.get_start_method() == "fork"  # also where Python's default is another
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(common.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="fewer GPUs than processes: lower --nproc_per_node"):
        common.init_distributed()


@pytest.mark.parametrize("gpu, amp", ((True, "bf16"), (True, "fp16"), (False, "bf16")))
def test_sgd_of_a_backbone_that_is_frozen_at_first(gpu, amp, monkeypatch):
    """The literal update of each group from when it has gradients; fused on GPUs, not in fp16"""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    frozen, head = weights = [torch.nn.Parameter(torch.ones(3)) for _ in "ab"]
    groups = [{"params": [weight]} for weight in weights]
    args = argparse.Namespace(optimizer="SGD", lr=0.1, weight_decay=0.5, amp=amp)
    optimizer = common.build_optimizer(args, groups)
    fused = gpu and amp == "bf16"
    assert all(group["fused"] == fused for group in optimizer.param_groups)
    literal, momentum = [1.0, 1.0], [0.0, 0.0]
    for step in range(4):
        for n, weight in enumerate(weights):
            if weight is head or step > 1:
                weight.grad = torch.full((3,), 1.0 + n)
                momentum[n] = 0.9 * momentum[n] + (1 + n) + 0.5 * literal[n]
                literal[n] -= 0.1 * momentum[n]
        optimizer.step()
        assert torch.allclose(torch.stack([frozen[0], head[0]]), torch.tensor(literal))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
YIQ = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
GREY, *_ = YIQ = torch.tensor(YIQ, dtype=torch.float64)
NEUTRAL = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
FOUR = [(0.8, 1.3, 0.7, 0.08), (1.2, 0.7, 1.4, -0.1), (0.7, 1.2, 1.3, 0.03), (1.3, 0.8, 0.6, -0.05)]


def literal_jitter(pixels, brightness, contrast, saturation, hue):
    """One after the other, pixel by pixel in float64: (H, W, 3)"""
    x = brightness * pixels.double() / 255
    x = contrast * x + (1 - contrast) * (x @ GREY).mean()
    x = saturation * x + (1 - saturation) * (x @ GREY)[..., None]
    y, i, q = (x @ YIQ.T).unbind(-1)
    cos, sin = math.cos(2 * math.pi * hue), math.sin(2 * math.pi * hue)
    return torch.stack([y, cos * i - sin * q, sin * i + cos * q], -1) @ torch.linalg.inv(YIQ).T


def test_the_four_together():
    """One matrix and offset are the four maps in the documented order, for each image its own."""
    pixels = np.random.default_rng(0).integers(100, 156, (5, 16, 16, 3), np.uint8)
    pixels[4, ::2] = 255  # this one is clamped; the others stay within [0, 1]
    pixels, parameters = torch.from_numpy(pixels), [*FOUR, (1.4, 1.4, 1.4, 0.1)]
    expected = torch.stack([literal_jitter(x, *row) for x, row in zip(pixels, parameters)])
    assert 0 < expected[:4].min() and expected[:4].max() < 1 < expected[4].max()
    expected = (expected.clamp(0, 1) - torch.tensor(MEAN)) / torch.tensor(STD)
    found = common.augment(pixels, torch.tensor(parameters))
    torch.testing.assert_close(found, expected.permute(0, 3, 1, 2).float(), rtol=0, atol=4e-5)


@pytest.mark.parametrize("strength", (1.0, 0.5))
def test_colour_jitter(strength):
    """A fifth of the images stay as they are; the factors of the others fill their ranges."""
    rng = np.random.default_rng(0)
    drawn = np.array([common.colour_jitter(rng, strength) for _ in range(4000)])
    neutral = (drawn == np.float32(NEUTRAL)).all(1)
    assert drawn.dtype == np.float32 and abs(neutral.mean() - 0.2) < 0.03
    factors = (drawn[~neutral] - NEUTRAL) / strength / (0.4, 0.4, 0.4, 0.1)  # within +- 1
    assert np.abs(factors).max() < 1 + 1e-6 and np.abs(factors.mean(0)).max() < 0.06
    assert factors.min(0).max() < -0.98 and factors.max(0).min() > 0.98
    assert np.abs(np.corrcoef(factors.T) - np.eye(4)).max() < 0.06


@pytest.mark.parametrize("arch", common.BACKBONES)
def test_backbones_have_torchvision_s_names(arch):
    """Only the classifier is missing; the shapes fit."""
    with torch.device("meta"):  # without numbers: quick to build
        theirs, ours = getattr(torchvision.models, arch)(), common.build_backbone(arch)
    wrong = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert {key.split(".")[0] for key in wrong.missing_keys} in ({"fc"}, {"classifier"})
    assert not wrong.unexpected_keys
    features = ours.eval()(torch.empty(2, 3, 64, 96, device="meta"))
    assert features.shape == (2, ours.channels, 2, 3)


def test_blocks_that_start_as_identities():
    """The last norm of each block is zero, if it is asked for; other networks have no such norm."""
    gains = [common.build_backbone("resnet18", zero).layer4[1].bn2.weight for zero in (True, False)]
    assert not gains[0].any() and (gains[1] == 1).all()
    common.build_backbone("vgg16_bn", True)


def test_checkpoints_that_run_code_are_refused(tmp_path, monkeypatch):
    """weights_only: a foreign file's code is not run, in torch's format nor in plain pickle."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Touch()}, "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Touch(), 2))
    for name in ("evil.pth", "evil.pkl"):
        with pytest.raises(SystemExit, match=f"{name} is cut off, or holds more than"):
            common.read_checkpoint(name)
    assert not (tmp_path / "ran").exists()


class Copy:
    def __reduce__(self):  # a function that PyTorch does not block by its module
        return shutil.copy, ("weights.pth", "ran"), {"state": 1}


def test_what_lies_beside_weights_is_not_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "flags": Copy(), "class": Copy}, "weights.pth")
    content = common.read_checkpoint("weights.pth")
    assert torch.equal(content["w"], torch.ones(2)) and content.keys() == {"w", "flags", "class"}
    assert isinstance(content["flags"], checkpoints.Ignored)
    assert content["class"] is checkpoints.Ignored
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name, value", [("x.pth", torch.zeros(10**5)), ("x.json", "x" * 10**5)])
def test_a_full_disk(name, value, tmp_path):
    """What cannot be written as a whole leaves the old file, no half one, and a line."""
    path = tmp_path / name
    common.save(path, {"value": 1})
    before = path.read_bytes()

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        common.save(path, {"value": value})

    code, printed = fork_and_read(fill)
    kept = "cannot be written (File too large): what was there before is kept"
    assert code == 1 and printed == f"error: {path} {kept}\n"
    assert path.read_bytes() == before and files_in(tmp_path) == {name}


def test_standard_output_is_closed():
    code = "import common; [common.print_main(str(n)) for n in range(100_000)]"
    command = f"'{sys.executable}' -c '{code}' | head -1"
    process = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("0\n", "error: standard output is closed\n")


TABLE = {"batch_size": (32, 64, 256), "lr": (0.01, 0.2, 0.4), "image_size": (48, 112, 224)}
TABLE |= {"iters": (900, None, 5000), "epochs": (None, 20.0, None), "margin": (7, 8, 9)}
TABLE |= {"data": ("shapes", "shapes", "shapes"), "recipe": (None, None, None)}


@pytest.mark.parametrize(
    "given, recipe, expected",
    [
        ({}, "demo", {"image_size": 48, "iters": 900, "lr": 0.01, "output": "runs/virtex"}),
        ({"data": "b/a.jsonl"}, "small", {"epochs": 20.0, "output": "runs/virtex-a"}),
        ({"data": "vg"}, "paper", {"image_size": 224, "val_split": "val", "margin": 1}),
        ({"data": "coco"}, "paper", {"output": "runs/virtex-coco", "train_split": "train2017"}),
        ({"recipe": "small"}, "small", {"data": "shapes", "image_size": 112, "margin": 8}),
        ({"data": "coco", "recipe": "demo"}, "demo", {"image_size": 48, "val_split": "val2017"}),
        ({"val_split": "x", "lr": 3.0}, "demo", {"val_split": "x", "lr": 3.0, "batch_size": 32}),
        ({"data": "vg", "batch_size": 64}, "paper", {"lr": 0.1, "iters": 5000, "epochs": None}),
        ({"data": "my-shapes", "epochs": 3}, "paper", {"epochs": 3, "iters": None}),
    ],
)
def test_recipes(given, recipe, expected):
    """--data chooses one unless --recipe does; a flag given wins; rows without a flag, too."""
    left_out = dict.fromkeys(TABLE) | {"data": "shapes", "recipe": None, "init": None}
    args = argparse.Namespace(**left_out | given)
    common.apply_recipe(args, "virtex", TABLE, margin=1)
    assert vars(args).items() >= {"recipe": recipe, **expected}.items()


def test_rates_from_foreign_weights(tmp_path):
    """In `small` the backbone gets a tenth of the recipe's rate, or --lr, unless a run of ours has
    written the weights; in the other recipes the rate stays."""
    weights = common.build_backbone("resnet18").state_dict()
    torch.save(weights, tmp_path / "foreign.pth")
    (tmp_path / "run").mkdir()
    torch.save(weights, tmp_path / "run/backbone.pth")
    (tmp_path / "run/args.json").write_text('{"script": "tp", "arch": "resnet18"}')
    model = {f"backbone.{name}": value for name, value in weights.items()}
    ours = {"script": "tp", "args": {"arch": "resnet18"}, "model": model}
    torch.save(ours, tmp_path / "checkpoint.pth")

    def rate(init, recipe="small", given=()):
        args = argparse.Namespace(init=f"{tmp_path}/{init}", arch="resnet18", recipe=recipe, lr=1.0,
                                  given=given, output=f"{tmp_path}/new")
        state = common.read_init(args)
        assert all(torch.equal(value, state[name]) for name, value in weights.items())
        return args.lr

    assert rate("foreign.pth") == pytest.approx(0.1)
    assert rate("foreign.pth", given=["lr"]) == rate("foreign.pth", recipe="paper") == 1.0
    assert rate("run/backbone.pth") == rate("checkpoint.pth") == 1.0
    with pytest.raises(SystemExit, match="there is no file .*gone.pth"):
        rate("gone.pth")


def test_speed_and_waiting(tmp_path, monkeypatch):
    """Two micro-batches of four photos in two seconds, half a second of them without data"""
    now = [10.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    args = argparse.Namespace(batch_size=8, accumulate=2, output=tmp_path)
    log = common.Log(args, 0)
    for loss in (1.0, 3.0):
        log.add(loss=torch.tensor(loss))
    log.waited, now[0] = 0.5, 12.0
    assert log.means() == {"loss": 2.0, "images_per_s": 4.0, "data_wait": 0.25}


FORKS = """
import os, signal, time, common
common.init_distributed()
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        time.sleep(10)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
print("ended")
"""


def test_a_worker_that_is_ended_while_it_is_forked():
    """It ends at once. Else multiprocessing.Pool would wait for it forever."""
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "ended\n", done.stderr
