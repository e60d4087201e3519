"""Shards, --data FOLDER: photos in tar files, and an index that tools/make_shards.py writes.

The index is memory-mapped: millions of photos take no memory of their own, and all processes share
the mapping. Photos that are neighbours in a shard are read together, as slow disks like it.
"""

import io
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import common
from common import fail

# ----------------------------------------------------------------------------------------- index


def save_index(folder, split, data):
    """Write FOLDER/{split}.index.  data: CaptionData; data.images: see open_in_shard"""
    index = {
        "tag_names": data.tag_names,
        "caption_ends": torch.from_numpy(data.captions.ends),
        "tag_ends": torch.from_numpy(data.tags.ends),
        "tags": torch.from_numpy(data.tags.values),
    }
    for name, strings in ("image", data.images), ("caption", data.captions.values):
        encoded = [string.encode() for string in strings]
        content = np.frombuffer(bytearray().join(encoded), np.uint8)
        index[f"{name}_text"] = torch.from_numpy(content)
        index[f"{name}_text_ends"] = torch.tensor([0, *map(len, encoded)]).cumsum(0)
    common.save(Path(folder, f"{split}.index"), index)


def caption_data(folder, split):
    """What save_index wrote -> common.CaptionData"""
    path = Path(folder, f"{split}.index")
    if not path.exists():
        found = ", ".join(sorted(file.stem for file in path.parent.glob("*.index")))
        if not found:
            fail(f"--data {folder} is no folder of indexed shards. Photos KEY.jpg with captions in "
                 f"KEY.txt: python tools/to_jsonl.py {folder}. Tar files of such photos: python "
                 f"tools/make_shards.py --index-only '{folder}/*.tar'")  # fmt: skip
        fail(f"there is no {path} of tools/make_shards.py. The folder's splits: {found}; "
             "see --train-split and --val-split")  # fmt: skip
    index = torch.load(path, mmap=True, weights_only=True)
    if "image_text" not in index:
        fail(f"{path} is of an earlier version: run tools/make_shards.py --index-only again")
    tag_names = index.pop("tag_names")
    arrays = {name: tensor.numpy() for name, tensor in index.items()}

    def mapped(content, ends, make):
        return Mapped(content, arrays[ends][:-1], arrays[ends][1:], make)

    images = mapped(arrays["image_text"], "image_text_ends", decode)
    captions = mapped(arrays["caption_text"], "caption_text_ends", decode)
    captions = mapped(captions, "caption_ends", list)  # of each photo
    tags = mapped(arrays["tags"], "tag_ends", np.ndarray.tolist)
    shard, *_ = images[0].split("\t")
    if not os.path.exists(shard):
        fail(f"{shard} is missing. Was it moved? Run tools/make_shards.py --index-only again")
    return common.CaptionData(images, captions, tags, tag_names, open_in_shard, block_sampler)


def decode(content):
    return content.tobytes().decode()


class Mapped:
    """An array of strings, or common.Lists, whose parts may lie in a file mapped into memory

    Entry i is make(content[starts[i] : stops[i]]). Indexing by an array or a slice selects.
    """

    def __init__(self, content, starts, stops, make):
        self.content = content
        self.starts = starts
        self.stops = stops
        self.make = make

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, key):
        start, stop = self.starts[key], self.stops[key]
        if np.ndim(start):
            return Mapped(self.content, start, stop, self.make)
        return self.make(self.content[start:stop])

    select = __getitem__

    @property
    def ends(self):
        """As those of common.Lists"""
        return np.append(0, np.cumsum(self.stops - self.starts))


# ---------------------------------------------------------------------------------------- photos


def open_in_shard(place):
    """place: SHARD.tar, KEY.jpg, OFFSET, SIZE, tab-separated -> PIL image, not yet decoded"""
    shard, _, offset, size = place.split("\t")
    content = os.pread(open_shard(shard).fileno(), int(size), int(offset))
    return Image.open(io.BytesIO(content))


@lru_cache(128)
def open_shard(path):
    return open(path, "rb")


def block_sampler(size, batch_size, seed, start=0, block=512, window=64):
    """Like common.infinite_sampler, but reads neighbouring samples of a shard together

    Each epoch cuts the samples into blocks, at different places. Each process gets blocks of its
    own in random order, and shuffles the samples of `window` blocks at a time. Samples that do not
    fill a block on every process are left out of the epoch. The order depends only on seed, epoch
    and number of processes, so that a resumed run continues with the very next sample.
    """
    rank, processes = common.rank(), common.world_size()
    block = max(1, min(block, size // (8 * processes)))
    blocks_per_process = size // block // processes
    position = start * (batch_size // processes)
    while True:
        epoch, done = divmod(position, blocks_per_process * block)
        rng = np.random.default_rng([seed, epoch])
        first = rng.integers(size)
        blocks = rng.permutation(size // block)
        blocks = blocks[rank * blocks_per_process :][:blocks_per_process]

        step, skipped = divmod(done, window * block)
        chosen = blocks[step * window :][:window]
        samples = (first + chosen[:, None] * block + np.arange(block)) % size
        rng = np.random.default_rng([seed, epoch, rank, step])
        for index in rng.permutation(samples.ravel())[skipped:]:
            yield seed, epoch, int(index)
            position += 1
