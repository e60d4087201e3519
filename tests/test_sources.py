"""COCO, Visual Genome, shards and their index, checkpoints of others. (.jsonl: test_common.py)"""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
from conftest import CPU, kill_at, refusal, run_here
from PIL import Image

import common
import sources


def encoded(image, kind):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


RED = encoded(Image.new("RGB", (16, 12), "red"), "JPEG")


def write_tar(path, files):
    """files: {name: bytes}"""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def grey(level):
    return encoded(Image.new("L", (16, 12), level), "PNG")


def row(*captions, **more):
    return json.dumps({"captions": captions, **more}).encode()


@pytest.fixture
def folder(tmp_path):
    """Three shards of two photos"""
    for n in range(3):
        files = {f"{n}a.png": grey(40 * n), f"{n}b.png": grey(40 * n + 20), f"{n}b.json": row()}
        files[f"{n}a.json"] = row(f"photo {n}", "ä", tags=["dog", f"t{n}"])
        write_tar(tmp_path / f"{n:02d}.tar", dict(sorted(files.items())))
    return tmp_path


def index(folder, pattern="{00..02}.tar", splits=("train", "val")):
    """tools/make_shards.py --index-only -> CaptionData of each split"""
    command = ["tools.make_shards", "--index-only", f"{folder}/{pattern}", "--output", folder]
    run_here([*command, "--splits", *splits])
    return [common.caption_data(str(folder), split=split) for split in splits]


def test_what_shards_hold(folder):
    """Photos with their captions and tags; one shard is held out; splits have the same tags."""
    train, val = index(folder)
    assert (len(train), len(val)) == (4, 2)
    for data in (train, val):
        for i in range(len(data)):
            n, rest = divmod(int(np.asarray(data.images.open(i))[0, 0]), 40)
            tags = {data.tag_names[tag] for tag in data.tags_of(i)}
            expected = ([], set()) if rest else ([f"photo {n}", "ä"], {"dog", f"t{n}"})
            assert (data.captions_of(i), tags) == expected
    assert train.tag_names == val.tag_names and set(val.tag_names) == {"dog", "t0", "t1", "t2"}


def test_layouts_of_others(tmp_path):
    """img2dataset: one caption in KEY.txt or KEY.json; suffixes with dots; other files; folders;
    odd names"""
    folder = tmp_path / "photos in May, 1 + 2"
    folder.mkdir()
    files = {
        "0.jpg": RED, "0.txt": b" a dog ", "0.json": b'{"caption": "a dog", "width": 16}',
        "b/1.seg.png": b"no photo of ours", "b/1.JPEG": RED, "b/1.cls": b"7", "2.txt": b"lost",
        "3.jpg": RED, "3.json": b'{"caption": "a cat"}',
        "./x/ä b: 4.jpg": RED, "./x/ä b: 4.json": b'{"caption": null}',
    }  # fmt: skip
    write_tar(folder / "a at 3: b.tar", files)
    write_tar(folder / "b.tar", files)
    for data in index(folder, "*.tar"):
        assert [data.captions_of(i) for i in range(len(data))] == [["a dog"], [], ["a cat"], []]
        assert {data.images.open(i).size for i in range(4)} == {(16, 12)}
        assert data.tag_names is None


def test_splits_in_the_name(tmp_path):
    for name in ("train-0", "train-1", "test-0"):
        write_tar(tmp_path / f"{name}.tar", {"0.jpg": RED, "0.json": row(name)})
    train, test = index(tmp_path, "{split}-*.tar", ("train", "test"))
    assert list(train.captions) == ["train-0", "train-1"] and list(test.captions) == ["test-0"]


SCATTERED = {"0.jpg": RED, "1.jpg": RED, "0.json": row("a")}
BAD = {
    "the files of 0 are not side by side": SCATTERED,
    "it holds no photo": {"0.json": row("a dog")},
    "0.json holds no JSON object": {"0.jpg": RED, "0.json": b"[1]"},
    '"captions" (not "caption")': {"0.jpg": RED, "0.json": b'{"captions": "a"}'},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_shards(message, folder):
    """One line that names the shard, and no index"""
    write_tar(folder / "01.tar", BAD[message])
    shards = folder / "{00..02}.tar"
    output = refusal(["tools.make_shards", "--index-only", shards, "--output", folder])
    assert f"{folder}/01.tar: {message}" in output and "Expected: uncompressed tar" in output
    assert not list(folder.glob("*.index"))


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("{split}-*.tar", "no such file"),
        ("{00..03}.tar", "1 shards are missing"),
        ("{02..01}.tar", "0 shards are missing"),
        ("00.tar", "is one shard, and validation needs"),
    ],
)
def test_missing_shards(pattern, message, folder):
    shards = "--index-only", folder / pattern, "--output", folder
    assert message in refusal(["tools.make_shards", *shards])


@pytest.mark.parametrize("length", (0, 100, 700, 3600))
def test_a_shard_that_is_cut_off(length, folder):
    path = folder / "01.tar"
    path.write_bytes(path.read_bytes()[:length])
    shards = "--index-only", folder / "{00..02}.tar", "--output", folder
    message = refusal(["tools.make_shards", *shards])
    assert f"{path}: " in message and "Expected: uncompressed tar" in message


def test_a_folder_without_an_index(folder):
    """Or with the index of other splits, or no folder at all"""
    index(folder)
    assert "is unknown: give shapes" in refusal(["virtex.py", "--data", f"{folder}/none"])
    message = refusal(["virtex.py", "--data", folder, "--val-split", "test"])
    assert f"{folder}/test.index" in message and "tools/make_shards.py" in message


def draw(number, size, rank=0, processes=1, batch=4, seed=0, start=0):
    world = common.World(rank, processes, CPU)
    order = sources.block_sampler(size, batch, world, seed, start, block=5, window=3)
    return list(itertools.islice(order, number))


@pytest.mark.parametrize("processes", (1, 2))
@pytest.mark.parametrize("size", (1, 7, 100, 103))
def test_sampler(size, processes):
    """An epoch holds nearly all samples, each once; processes have blocks of their own."""
    seen = {}
    for rank in range(processes):
        for epoch, index in draw(3 * size, max(size, processes), rank, processes):
            seen.setdefault(epoch, []).append(index)
    for epoch in range(2):
        indices = [index for index in seen[epoch]]
        assert len(set(indices)) == len(indices) and max(indices) < max(size, processes)
        assert len(indices) > size - (processes + 1) * 5


def test_sampler_keeps_neighbours_together():
    """A window mixes three blocks of five: 15 samples are drawn from three runs of neighbours, of
    which one may go on from the last sample to the first.
    """
    for n, (epoch, group) in enumerate(itertools.groupby(draw(200, 100), lambda key: key[0])):
        indices = [index for _, index in group]
        for first in range(0, len(indices) - 14, 15):
            window = sorted(indices[first : first + 15])
            assert sum(b - a > 1 for a, b in itertools.pairwise(window)) <= 3
            assert indices[first : first + 15] != window


FLAGS = ["--recipe", "small", "--image-size", 32, "--batch-size", 4, "--workers", 0, "--hidden", 64]
FLAGS += ["--log-every", 1, "--checkpoint-every", 2, "--iters", 6]


def test_a_training_on_shards(few_scenes, tmp_path):
    """Of tools/make_shards.py; killed and started again it ends with the same bits."""
    few_scenes(60, 12)
    data = tmp_path / "shards"
    output = run_here(["tools.make_shards", "--output", data, "--per-shard", 25])
    assert f"3 files {data}/train-*.tar of up to 25 photos" in output
    run_here(["virtex.py", "--data", data, *FLAGS, "--output", tmp_path / "whole"])
    stopped = ["virtex.py", "--data", data, *FLAGS, "--output", tmp_path / "stopped"]
    kill_at(5, stopped)
    assert "resuming from iteration 4" in run_here(stopped)
    one, other = (torch.load(tmp_path / name / "backbone.pth") for name in ("whole", "stopped"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_photos_stay_as_they_are(real_data, tmp_path):
    """JPEG files are copied; with --side they are made smaller; captions and tags are COCO's."""
    root, flags = str(real_data / "coco-mini"), ["--splits", "val2017", "--per-shard", 20]
    command = ["tools.make_shards", "--data", "coco", "--root", root, *flags, "--output"]
    run_here([*command, tmp_path])
    run_here([*command, tmp_path / "small", "--side", 64])
    coco = common.caption_data("coco", root, "val2017")
    folders = str(tmp_path), str(tmp_path / "small")
    data, small = (common.caption_data(folder, split="val2017") for folder in folders)
    for i in range(len(coco)):
        assert data.captions_of(i) == small.captions_of(i) == coco.captions_of(i)
        names = {data.tag_names[tag] for tag in data.tags_of(i)}
        assert names == {coco.tag_names[tag] for tag in coco.tags_of(i)}
        assert data.images.open(i).tobytes() == coco.images.open(i).tobytes()
        assert min(small.images.open(i).size) == 64


def test_photos_that_cannot_be_decoded_are_left_out(tmp_path):
    """Their places are taken by the next ones: no file is empty. In order."""
    lines = [{"image": f"{n}.jpg", "captions": [f"photo {n}"], "split": "train"} for n in range(9)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "photos.jsonl").write_text(text)
    for n in range(9):
        Image.new("RGB", (40, 30), (20 * n, 0, 0)).save(tmp_path / f"{n}.jpg")
    for n in (0, 3, 4, 5):
        (tmp_path / f"{n}.jpg").write_bytes(b"no photo")
    command = ["tools.make_shards", "--data", tmp_path / "photos.jsonl", "--splits", "train"]
    command += ["--per-shard", 3, "--output", tmp_path / "shards"]
    output = run_here(command)
    assert output.count("cannot decode") == 4 and "2 files" in output
    assert "holds shards of train" in refusal(command)
    data = common.caption_data(str(tmp_path / "shards"), split="train")
    captions = [data.captions_of(i) for i in range(len(data))]
    assert captions == [[f"photo {n}"] for n in (1, 2, 6, 7, 8)]
    for n in (1, 2, 6, 7, 8):
        (tmp_path / f"{n}.jpg").write_bytes(b"no photo")
    message = refusal([*command[:-1], tmp_path / "none"])
    assert "no photo of the split train can be decoded" in message
