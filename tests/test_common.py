"""common.py: captioned images, batches, augmentation, backbones, processes, recipes"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import time
import urllib.error
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import ROOT, TORCHRUN, Touch, captioned, photos_at, run_script
from PIL import Image, PngImagePlugin
from torch import nn

import common
from extras import shapes


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
    data = common.caption_data("coco", str(root), "val2017", tags=True)
    assert len(data) == 12 and data.tag_names == list(shapes.SHAPES)
    for i, scene in enumerate(range(1000, 1012)):
        objects = shapes.objects_of(scene)
        assert data.images[i] == f"{root}/val2017/{scene:012d}.jpg"
        assert data.captions[i] == shapes.describe(objects)
        assert set(data.tags[i]) == {o.shape for o in objects}
        assert len(data.tags[i]) == len(set(data.tags[i]))
    untagged = [common.caption_data("coco", str(root), "val2017")]
    (root / "annotations" / "instances_val2017.json").unlink()
    untagged.append(common.caption_data("coco", str(root), "val2017", tags=True))
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
    train, val = (common.caption_data(path, split=split) for split in ("train", "val"))
    captions = [["one", "two"], [], ["four"], ["five"]]  # a line without a split is of train
    assert [train.captions[i] for i in range(4)] == captions
    assert [train.tags[i] for i in range(4)] == [[], ["cat", "dog"], [], ["dog"]]
    assert val.captions[0] == ["three"] and val.tags[0] == ["cow"] and len(val) == 1
    assert train.tag_names == val.tag_names == ["cat", "dog", "cow"]
    moved = shutil.copy(path, f"{tmp_path}-moved.jsonl")
    assert list(common.caption_data(moved, str(tmp_path)).images) == list(train.images)
    assert train.images[0] == str(tmp_path / "0.jpg") and train.images[3] == absolute
    # Without splits, every twentieth photo is for validation, the rest for training.
    path = write_jsonl(tmp_path / "other.jsonl", *({"image": f"{n}.jpg"} for n in range(41)))
    train, val = (common.caption_data(path, split=x).images for x in ("train", "val"))
    assert list(val) == photos_at(*(tmp_path / f"{n}.jpg" for n in (0, 20, 40))).tolist()
    assert len(train) == 38 and not {*train} & {*val}


WRONG_LINES = {
    b"{broken": "Expecting property name",
    b"\xe9": "UnicodeDecodeError",
    b'{"image": "b.jpg", "captions": "x"}': "'x' is not a list of texts",
    b'{"image": "b.jpg", "captions": [null]}': "None. is not a list of texts",
    b'{"image": "b.jpg", "captions": [7]}': "7. is not a list of texts",
    b'{"image": "b.jpg", "captions": NaN}': "nan is not a list of texts",
    b'{"image": "b.jpg", "tags": [null]}': "None. is not a list of texts",
    b'{"image": "b.jpg", "tags": [NaN]}': "nan. is not a list of texts",
    b'{"image": "b.jpg", "tags": "x"}': "'x' is not a list of texts",
    b'{"image": "b.jpg", "split": NaN}': "nan. is not a list of texts",
    b'{"image": "b.jpg", "split": 0}': "0. is not a list of texts",
    b'{"image": "b.jpg", "split": "val", "split": "train"}': "a key occurs twice",
    b'{"image": "b.jpg", "image": "c.jpg"}': "a key occurs twice",
    b'{"image": "./a.jpg"}': "/a.jpg needs a single line, with the list .captions",
    b'{"image": "x/../a.jpg"}': "/a.jpg needs a single line, with the list .captions",
    b'{"captions": ["x"]}': "KeyError: 'image'",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_bad_lines(line, tmp_path):
    """The message names the file, the line (counted from 1) and what was expected."""
    (tmp_path / "data.jsonl").write_bytes(b'{"image": "a.jpg"}\n\n' + line)
    expected = f"^error: .*/data.jsonl, line 3: .*{WRONG_LINES[line]}.* Expected.*: "
    with pytest.raises(SystemExit, match=expected + '{"image": "photo.jpg"'):
        common.caption_data(f"{tmp_path}/data.jsonl")


def test_what_is_left_out_of_a_jsonl_is_said_once(tmp_path, capsys):
    rows = [{"image": f"{n}.jpg", "labels": ["x"], "Split": "val"} for n in range(3)]
    rows += [{"image": "3.jpg", "split": "train", "tags": [""], "captions": ["a", "", "\u200b"]}]
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    for _ in range(2):
        data = common.caption_data(path)
    keys = f"{path}: photos {{'train': 4}}; keys that are not read: ['labels', 'Split']\n"
    printed = capsys.readouterr().out
    assert printed.count(keys) == 1 and "2 captions of train are empty: left out" in printed
    assert data.tag_names == [] and data.tagged.tolist() == [False, False, False, True]


def test_caption_is_no_key(tmp_path):
    rows = {"image": "b.jpg", "captions": []}, {"image": "a.jpg", "caption": "a dog"}
    path = write_jsonl(tmp_path / "data.jsonl", *rows)
    with pytest.raises(SystemExit, match="line 2: .*a.jpg needs a single line, with the list"):
        common.caption_data(path)


def test_a_split_without_photos(tmp_path, capsys):
    """null is no split, no captions and no tags; the splits that there are stand in the output."""
    row = {"image": "a.jpg", "captions": None, "tags": None, "split": None}
    path = write_jsonl(tmp_path / "data.jsonl", row, {"image": "b.jpg", "split": "a"})
    data = common.caption_data(path)
    assert data.captions[0] == [] and not data.tagged.any()
    with pytest.raises(SystemExit, match="^error: val has 0 photos, .* --val-split$"):
        common.caption_data(path, split="val")
    assert "photos {'train': 1, 'a': 1}" in capsys.readouterr().out


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
    data = common.caption_data("coco", str(tmp_path), "train", tags=True)
    assert [*data.captions] == [["photo 0"], ["photo 1", "photo 1"]]
    assert [*data.tags] == [[], ["cat"]]
    printed = capsys.readouterr().out
    assert "1 images of train are listed again; annotations of 3 ids are left out" in printed
    assert "left out, which no image has: ['1', 7, 9]" in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"images": []', "captions_train.json is missing, or is not JSON (Expecting"),
        ('{"images": [], "annotations": []}', "train has 0 photos, of which 0 are missing: []"),
        ('{"images": []}', "is not in the layout of COCO: KeyError('annotations')"),
        ('["a.jpg"]', "is not in the layout of COCO: TypeError"),
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
        common.caption_data("coco", str(tmp_path), "train")
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


def test_fingerprint(coco_folder, tmp_path):
    """The same in another folder; another if a name, a caption or a label is."""
    moved = shutil.copytree(coco_folder, tmp_path / "elsewhere")
    read = lambda root: common.caption_data("coco", str(root), "train2017", tags=True)
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


def test_checksum_of_files(tmp_path):
    """Of the content of a file, or of the files in a folder"""
    folder, file = tmp_path / "lm", tmp_path / "lm/vocab.txt"
    assert common.checksum(folder) == 0
    folder.mkdir()
    file.write_text("a b")
    of_file, of_folder = common.checksum(file), common.checksum(folder)
    file.write_text("a c")
    assert common.checksum(file) != of_file and common.checksum(folder) != of_folder
    file.write_text("a b")
    (folder / "cache").mkdir()
    assert (common.checksum(file), common.checksum(folder)) == (of_file, of_folder)
    file.rename(folder / "words.txt")
    assert common.checksum(folder) != of_folder


def test_a_url_is_no_data():
    with pytest.raises(SystemExit, match="^error: --data https://a.org/0.tar: .* --index-only .*$"):
        common.caption_data("https://a.org/0.tar")


@pytest.mark.parametrize("unknown, said", [(0, False), (4, False), (5, True), (49, True)])
def test_unknown_tokens_are_counted(unknown, said, capsys):
    common.check_known(unknown, 100, "the captions")
    common.check_known(0, 0, "no captions")
    expected = f"{unknown} of 100 tokens ({unknown}%) of the captions are unknown"
    assert (expected in capsys.readouterr().out) == said


def test_words_that_a_model_does_not_know():
    with pytest.raises(SystemExit, match="^error: 50 of 100 tokens .50%. of the names are unknown"):
        common.check_known(50, 100, "the names")


def test_files_of_a_killed_save(tmp_path):
    """They go at the next start, if they are older than an hour; nothing else goes."""
    for name, minutes in ("checkpoint.pth.7.tmp", 61), ("args.json.8.tmp", 59), ("my.tmp", 99):
        (tmp_path / name).touch()
        written = time.time() - 60 * minutes
        os.utime(tmp_path / name, (written, written))
    common.make_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"args.json.8.tmp", "my.tmp"}


def logs_in(folder, *checkpoints):
    """-> the logs of runs that start in the same folder"""
    args = argparse.Namespace(output=str(folder), batch_size=4, accumulate=1)
    common.save(folder / "args.json", {"command": sys.argv})
    return [common.Log(args, checkpoint) for checkpoint in checkpoints]


def test_two_runs_in_one_folder(tmp_path):
    """The one that finds lines of the other stops, and what the other has written stays."""
    path = tmp_path / "metrics.jsonl"
    [first] = logs_in(tmp_path, {})
    first.write(1, {"loss": 0.5})
    [second] = logs_in(tmp_path, {})
    first.write(2, {"loss": 0.25})
    kept = path.read_text()
    with pytest.raises(SystemExit, match="another run has written to .*: give each run its own"):
        second.write(1, {"loss": 7.0})
    assert path.read_text() == kept and kept.count("\n") == 2
    first.write(3, {"loss": 0.125})
    [third] = logs_in(tmp_path, {})
    third.write(1, {"loss": 7.0})  # before the first one's next line
    assert path.read_text() == '{"iteration": 1, "loss": 7.0}\n'
    with pytest.raises(SystemExit, match="another run has written"):
        first.write(4, {"loss": 0.0625})
    third.write(2, {"loss": 6.0})


def test_two_runs_that_begin_together(tmp_path):
    """The first one finds that args.json is no longer its own before it writes a line."""
    [first] = logs_in(tmp_path, {})
    common.save(tmp_path / "args.json", {"command": [*sys.argv, "--seed", "1"]})
    with pytest.raises(SystemExit, match="another run has written"):
        first.write(1, {"loss": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_log_of_a_run_that_goes_on(tmp_path):
    """Its lines come first; those that a kill has left are replaced by its own."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"iteration": {n}}}\n' for n in (1, 2, 3)]
    path.write_text("".join(lines) + '{"itera')
    [log] = logs_in(tmp_path, {"iteration": 2})
    assert path.read_text() == "".join(lines) + '{"itera'
    log.write(3, {"loss": 1.0})
    log.write(4, {"loss": 2.0})
    expected = lines[:2] + ['{"iteration": 3, "loss": 1.0}\n', '{"iteration": 4, "loss": 2.0}\n']
    assert path.read_text() == "".join(expected)


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
    args = argparse.Namespace(init="imagenet", arch="resnet18", lr=1.0, head_lr=1.0)
    with pytest.raises(SystemExit, match="of resnet18 cannot be downloaded .*are you online"):
        common.read_init(args)


def test_a_terminal_without_utf8():
    code = "import common; common.init_distributed(); common.print_main('caf\u00e9')"
    ended = run_script("-c", code, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, "caf?\n")


def test_ranges_of_numbers():
    """What a flag's type accepts, and what argparse says of anything else"""
    for kind, good, bad in (
        (common.non_negative_int, ("0", "7"), ("-1", "1.5")),
        (common.positive_int, ("1", "7"), ("0", "-1")),
        (common.positive, ("1e-9", "30"), ("0", "-1", "nan", "inf")),
        (common.non_negative, ("0", "1e4"), ("-1", "nan", "inf")),
        (common.probability, ("0", "1"), ("-0.1", "1.1", "nan")),
        (common.fraction_below_1, ("0", "0.999"), ("1", "500", "-0.1", "nan")),
        (common.fraction_above_0, ("1", "1e-3"), ("0", "50", "nan")),
    ):
        assert [kind(text) for text in good] == list(map(float, good))
        for text in bad:
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                kind(text)


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
    assert np.array_equal(read(tmp_path / "a.jpg", size=64), expected)


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
        ("float.tif", Image.fromarray(RAMP.astype(np.float32)), {}),
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


def test_odd_pictures(tmp_path):
    """A constant of 16 bits is black; NaN is 0; a megabyte of text does no harm."""
    Image.fromarray(np.full((8, 8), 777, np.uint16)).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == 0).all()
    Image.fromarray(np.array([[0, 1], [np.nan, 1]], np.float32)).save(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif", size=2)[..., 0].tolist() == [[0, 255], [0, 255]]
    text = PngImagePlugin.PngInfo()
    text.add_text("prompt", "x" * 3_000_000, zip=True)
    PICTURE.save(tmp_path / "b.png", pnginfo=text)
    assert apart(read(tmp_path / "b.png"), resized(PICTURE)) == 0


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


def test_list_photos(tmp_path):
    """Links are followed, each folder once; hidden files and what is no photo are left out."""
    for name in "a/1.JPG", "a/.hidden.jpg", ".thumbs/2.jpg", "b/3.jfif", "b/notes.txt":
        Path(tmp_path, "photos", name).parent.mkdir(parents=True, exist_ok=True)
        Path(tmp_path, "photos", name).touch()
    Path(tmp_path, "photos/a/parent").symlink_to(tmp_path / "photos")
    Path(tmp_path, "elsewhere").mkdir()
    Path(tmp_path, "elsewhere/4.png").touch()
    Path(tmp_path, "photos/c").symlink_to(tmp_path / "elsewhere")
    found = common.list_photos(tmp_path / "photos")
    assert [str(Path(p).relative_to(tmp_path)) for p in found] == [
        "photos/a/1.JPG", "photos/b/3.jfif", "photos/c/4.png"
    ]


def test_left_and_right():
    """Of whole words, in any case. (Which photos are flipped: test_virtex.py, test_tp.py)"""
    caption = "Left of a bright cleft: left, RIGHT-handed"
    assert common.swap_left_right(caption) == "right of a bright cleft: right, left-handed"


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


@pytest.mark.parametrize("amp", ("bf16", "fp16"))
def test_sgd_of_a_backbone_that_is_frozen_at_first(amp):
    """The literal update of each group from when it has gradients; fused, except in fp16"""
    frozen, head = weights = [torch.nn.Parameter(torch.ones(3)) for _ in "ab"]
    groups = [{"params": [weight]} for weight in weights]
    args = argparse.Namespace(optimizer="SGD", lr=0.1, weight_decay=0.5, amp=amp)
    optimizer = common.build_optimizer(args, groups)
    assert all(group["fused"] == (amp == "bf16") for group in optimizer.param_groups)
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
    norms = [isinstance(module, nn.BatchNorm2d) for module in ours.modules()]
    assert common.BACKBONES[arch].batch_norm == any(norms)


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
        with pytest.raises(SystemExit, match=f"{name} is missing, cut off, or holds more than"):
            common.read_checkpoint(name)
    assert not (tmp_path / "ran").exists()


TABLE = {"batch_size": (32, 64, 256), "lr": (0.01, 0.2, 0.4), "image_size": (48, 112, 224)}
TABLE |= {"iters": (900, None, 5000), "epochs": (None, 20.0, None), "margin": (7, 8, 9)}


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
    """In `small` the backbone gets a tenth of the recipe's rate, or --lr, and new layers all of it,
    unless a run of ours wrote the weights; in the other recipes the rates stay."""
    weights = {"layer1.weight": torch.zeros(2)}
    torch.save(weights, tmp_path / "foreign.pth")
    ours = {"script": "tp", "args": {"arch": "resnet18"}}
    torch.save(weights | ours, tmp_path / "checkpoint.pth")
    (tmp_path / "run").mkdir()
    torch.save(weights, tmp_path / "run/backbone.pth")
    (tmp_path / "run/args.json").write_text('{"script": "tp", "arch": "resnet18"}')

    def rates(init, **flags):
        left_out = dict.fromkeys(TABLE) | {"data": "a.jsonl", "recipe": None}
        init = init if init == "imagenet" else f"{tmp_path}/{init}"
        args = argparse.Namespace(**left_out | flags | {"init": init})
        common.apply_recipe(args, "tp", TABLE)
        return args.lr, args.head_lr

    usual = rates("run/backbone.pth")
    assert usual[0] == usual[1] and rates("checkpoint.pth") == usual
    for init in "foreign.pth", "imagenet":
        assert rates(init) == (pytest.approx(usual[0] / 10), usual[1])
        assert rates(init, lr=3.0) == (3.0, usual[1])
        lr, head_lr = rates(init, recipe="paper")
        assert lr == head_lr
    assert rates("run/backbone.pth", lr=3.0) == (3.0, 3.0)
    assert rates("gone.pth") == (None, None)  # those of the checkpoint, if there is one
    lr, head_lr = rates("gone.pth", lr=3.0)
    gone = argparse.Namespace(init="gone.pth", arch="resnet18", lr=lr, head_lr=head_lr)
    with pytest.raises(SystemExit, match="gone.pth is missing"):
        common.read_init(gone)


def test_colours_of_16_bits(tmp_path, monkeypatch):
    """PIL reads the upper half of each number, which would be dark for 12 bits: it is said."""
    said = []
    monkeypatch.setattr(common, "report_once", said.append)
    row = b"\0" + np.full(8 * 3, 4000, ">u2").tobytes()
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0),  # 16 bits, RGB
        b"IDAT": zlib.compress(8 * row),
        b"IEND": b"",
    }
    path = tmp_path / "x.png"
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, content in chunks.items():
            checked = name + content
            file.write(struct.pack(">I", len(content)) + checked)
            file.write(struct.pack(">I", zlib.crc32(checked)))
    data = common.CaptionData(np.array([str(path)]), None, None, None, [])
    [image] = common.read_crops(data, 0, [common.centre_crop], 8)
    assert (image == 4000 // 256).all()
    assert len(said) == 1
    assert said[0].startswith(f"{path}: of 16-bit colours, PIL reads the upper 8 bits; store")


def test_speed_and_waiting(tmp_path, monkeypatch):
    """Two micro-batches of four photos in two seconds, half a second of them without data"""
    now = [10.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    args = argparse.Namespace(batch_size=8, accumulate=2, output=tmp_path)
    log = common.Log(args, {})
    for loss in (1.0, 3.0):
        log.add(loss=torch.tensor(loss))
    log.waited, now[0] = 0.5, 12.0
    assert log.means() == {"loss": 2.0, "images_per_s": 4.0, "data_wait": 0.25}
