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


def save_index(folder, split, data):
    """Write FOLDER/{split}.index.  data: CaptionData; data.images: see open_in_shard"""
    shards = {place.split("\t")[0] for place in data.images}
    index = {"tag_names": data.tag_names, "tagged": torch.from_numpy(data.tagged)}
    index["shards"] = {shard: os.path.getmtime(shard) for shard in shards}
    columns = {"images": data.images, "captions": data.captions.joined, "tags": data.tags.joined}
    for name, strings in columns.items():
        encoded = [string.encode() for string in strings]
        index[name] = torch.from_numpy(np.frombuffer(bytearray().join(encoded), np.uint8))
        index[f"{name}_ends"] = torch.tensor([0, *map(len, encoded)]).cumsum(0)
    common.save(Path(folder, f"{split}.index"), index)


def caption_data(folder, split):
    """What save_index wrote -> common.CaptionData"""
    path = Path(folder, f"{split}.index")
    if not path.exists():
        found = ", ".join(sorted(file.stem for file in path.parent.glob("*.index")))
        if not found:
            fail(f"--data {folder} is not a folder of indexed shards. Photos in {split}/CLASS/ are "
                 f"for eval_linear.py --data folder --root {folder}. Photos KEY.jpg with captions "
                 f"in KEY.txt: python tools/to_jsonl.py {folder}. Tar files of such photos: python "
                 f"tools/make_shards.py --index-only '{folder}/*.tar'")
        fail(f"there is no {path} of tools/make_shards.py. The folder's splits: {found}; "
             "see --train-split and --val-split")
    index = torch.load(path, mmap=True, weights_only=True)
    images, captions, tags = (
        Mapped(index[name].numpy(), index[f"{name}_ends"].numpy())
        for name in ("images", "captions", "tags")
    )
    for shard, time in index["shards"].items():
        if not os.path.exists(shard) or os.path.getmtime(shard) != time:
            fail(f"{shard} is missing, or was written after it was indexed: was it moved or "
                 "changed? Run tools/make_shards.py --index-only again")
    captions, tags = common.StringLists(captions), common.StringLists(tags)
    tagged = index["tagged"].numpy()
    return common.CaptionData(images, captions, tags, tagged, index["tag_names"], open_in_shard)


class Mapped:
    """An array of strings in a file mapped into memory; indexing by an array or a slice selects"""

    def __init__(self, content, ends, starts=None):
        self.content = content  # bytes
        self.starts, self.ends = (ends[:-1], ends[1:]) if starts is None else (starts, ends)

    def __len__(self):
        return len(self.starts)

    def __iter__(self):  # in half of the time of __getitem__
        view = memoryview(self.content)
        for start, end in zip(self.starts.tolist(), self.ends.tolist()):
            yield str(view[start:end], "utf-8")

    def __getitem__(self, key):
        start, end = self.starts[key], self.ends[key]
        if np.ndim(start):
            return Mapped(self.content, end, start)
        return self.content[start:end].tobytes().decode()


def open_in_shard(place):
    """place: SHARD.tar, KEY.jpg, OFFSET, SIZE, tab-separated -> PIL image, not yet decoded"""
    shard, _, offset, size = place.split("\t")
    content = os.pread(open_shard(shard).fileno(), int(size), int(offset))
    return Image.open(io.BytesIO(content))


@lru_cache(128)
def open_shard(path):
    return open(path, "rb")
