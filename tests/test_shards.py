"""COCO, Visual Genome, shards and their index, checkpoints of others. (.jsonl: test_common.py)"""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
from conftest import CPU, kill_at, run_here
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
            n, rest = divmod(int(np.asarray(common.open_image(data.images[i]))[0, 0]), 40)
            tags = {data.tag_names[tag] for tag in data.tags_of(i)}
            expected = ([], set()) if rest else ([f"photo {n}", "ä"], {"dog", f"t{n}"})
            assert (data.captions_of(i), tags) == expected
    assert train.tag_names == val.tag_names and set(val.tag_names) == {"dog", "t0", "t1", "t2"}


def test_layouts_of_others(tmp_path):
    """img2dataset: one caption in KEY.txt or KEY.json; other files, folders, odd names"""
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
        assert {common.open_image(data.images[i]).size for i in range(4)} == {(16, 12)}
        assert data.tag_names is None


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
        for _, epoch, index in draw(3 * size, max(size, processes), rank, processes):
            seen.setdefault(epoch, []).append(index)
    for epoch in range(2):
        indices = [index for index in seen[epoch]]
        assert len(set(indices)) == len(indices) and max(indices) < max(size, processes)
        assert len(indices) > size - (processes + 1) * 5


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
