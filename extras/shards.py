"""Shards, --data FOLDER: photos in tar files, and an index that tools/make_shards.py writes.

The index is memory-mapped: millions of photos take no memory of their own, and all processes share
the mapping. Training reads the photos of all shards in random order, each by its place.
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
        "tagged": torch.from_numpy(data.tagged),
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
    tagged = arrays.get("tagged", True)  # older indices have none: no tag meant that none fits
    return common.CaptionData(images, captions, tags, tag_names, tagged, open_in_shard)


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
