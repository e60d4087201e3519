"""The built-in scenes, and formats of others: COCO, Visual Genome, WebDataset's, checkpoints.

common.caption_data and common.load_backbone import this file when they need it.
"""

import functools
import glob
import io
import itertools
import json
import os
import re
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import common
import shapes
from common import CaptionData, ImageFiles, PackedStrings, check, progress, reading, say


def caption_data(name, root, split, cache):
    """One split of "shapes", "coco", "vg" or of tar files -> CaptionData"""
    if name == "shapes":
        return shapes_data(split)
    if name == "coco":
        return coco_data(root or "datasets/coco", split)
    if name == "vg":
        return vg_data(root or "datasets/vg", split)
    check(name.endswith(".tar"), f"--data {name} is unknown: give {common.DATA}")
    return shard_data(name, split, cache or "runs/cache")


def shapes_data(split):
    """The built-in scenes: five captions each, tags are the shapes present."""
    check(split in shapes.SPLITS, f'--data shapes has the splits "train" and "val", not "{split}"')
    data = CaptionData(shapes.ShapeImages(), list(shapes.SHAPES))
    for scene in shapes.SPLITS[split]:
        objects = shapes.objects_of(scene)
        data.add(scene, shapes.describe(scene, objects), shapes.tags(objects))
    return data


# ----------------------------------------------------------------------------------- coco and vg

COCO = (
    "a COCO folder with annotations/captions_{split}.json, instances_{split}.json if there are "
    "labels, and images in {split}/; name the splits with --train-split and --val-split"
)


def coco_data(root, split):
    """annotations/captions_{split}.json, images in {split}/, tags from instances_{split}.json."""
    path = os.path.join(root, "annotations", f"captions_{split}.json")
    with reading(path, COCO) as at:
        content = json.loads(Path(path).read_bytes())
        files = {image["id"]: image["file_name"] for image in content["images"]}
        captions = {image: [] for image in files}
        for at.entry, row in enumerate(content["annotations"]):
            captions[row["image_id"]].append(row["caption"].strip())
    tags, tag_names = {}, None
    if os.path.isfile(os.path.join(root, "annotations", f"instances_{split}.json")):
        tags, tag_names, _ = coco_instances(root, split)
    data = CaptionData(ImageFiles(), tag_names)
    for image, file in files.items():
        data.add(os.path.join(root, split, file), captions[image], tags.get(image, ()))
    return data


def coco_instances(root, split):
    """-> ({image id: sorted category indices}, category names by their ids, {image id: path})"""
    path = os.path.join(root, "annotations", f"instances_{split}.json")
    with reading(path, COCO) as at:
        content = json.loads(Path(path).read_bytes())
        categories = sorted(content["categories"], key=lambda category: category["id"])
        index = {category["id"]: k for k, category in enumerate(categories)}
        names = [category["name"] for category in categories]
        paths = {i["id"]: os.path.join(root, split, i["file_name"]) for i in content["images"]}
        present = {image: set() for image in paths}
        for at.entry, row in enumerate(content["annotations"]):
            present[row["image_id"]].add(index[row["category_id"]])
        tags = {image: sorted(found) for image, found in present.items()}
        return tags, names, paths


VG = "a VG folder with region_descriptions.json, image_data.json, VG_100K/ and VG_100K_2/"


def vg_data(root, split):
    """Visual Genome: each region's phrase is a caption of its image. A fixed 103K / 5K split."""
    import ijson  # reads a list of 700 MB entry by entry

    check(split in ("train", "val"), f'--data vg has the splits "train" and "val", not "{split}"')
    path, files = os.path.join(root, "image_data.json"), {}
    with reading(path, VG) as at, open(path, "rb") as file:
        for at.entry, image in enumerate(ijson.items(file, "item")):
            files[image["image_id"]] = image["url"].split("/")[-2:]
    ids = np.random.default_rng(0).permutation(sorted(files)).tolist()  # everybody's split alike
    num_val = min(5000, len(ids) // 10)
    wanted = set(ids[:num_val] if split == "val" else ids[num_val:])

    data, path = CaptionData(ImageFiles()), os.path.join(root, "region_descriptions.json")
    with reading(path, VG) as at, open(path, "rb") as file:
        entries = progress(ijson.items(file, "item"), desc="captions", total=len(files))
        for at.entry, image in enumerate(entries):
            phrases = [region["phrase"].strip() for region in image["regions"]]
            if image["id"] in wanted:
                data.add(os.path.join(root, *files[image["id"]]), [p for p in phrases if p])
    return data


# ----------------------------------------------------------------------------------------- shards

SHARDS = (
    "uncompressed tar files in WebDataset's layout: KEY.jpg, and beside it KEY.json with "
    '{"captions": ["...", ...], "tags": ["...", ...]} or KEY.txt with one caption'
)
PHOTOS = "jpg", "jpeg", "png", "webp"
HELD_OUT = 5  # shards at most: some 10,000 photos are enough to validate on


def shard_data(pattern, split, cache):
    """The photos of a split in tar files -> CaptionData, which stays on the disk

    pattern: "photos/{000000..004000}.tar" or "photos/*.tar": one shard in twenty is held out as the
    split "val". "photos/{split}-*.tar" names the splits itself.
    An index of captions, tags and places of photos is made once, in the folder `cache`, and mapped
    into memory: a process needs no more of its own for more photos.
    """
    paths = shard_paths(pattern.replace("{split}", split))
    if "{split}" not in pattern:
        check(split in ("train", "val"), f'{pattern} has the splits "train" and "val", not {split}')
        check(len(paths) > 1, f"{pattern} is one shard, and validation needs one of its own")
        order = np.random.default_rng(0).permutation(len(paths))
        val, train = np.split(order, [min(HELD_OUT, max(1, len(paths) // 20))])
        paths = [paths[n] for n in sorted(val if split == "val" else train)]
        if split == "val":
            say(f"held out for validation: {', '.join(paths)}")
    stats = [os.stat(path) for path in paths]
    key = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in zip(paths, stats)]
    folder = common.cache_path(cache, "shards", key)
    data = read_index(folder, key)
    if data is None and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with common.locked(folder):
            data = read_index(folder, key)  # another run may have made it meanwhile
            if data is None:
                common.write_folder(folder, functools.partial(index_shards, paths, key))
    while data is None:  # the first process is making it; if it fails, torchrun ends the others
        time.sleep(0.1)
        data = read_index(folder, key)
    return data


def shard_paths(pattern):
    """ "a/{08..11}.tar" or "a/*.tar" -> sorted paths; those that braces name must all be there"""
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if not braces:
        paths = sorted(filter(os.path.isfile, glob.glob(pattern)))
        check(paths, f"--data {pattern}: no such file")
        return paths
    before, first, last, after = braces.groups()
    numbers = range(int(first), int(last) + 1)
    paths = [f"{before}{number:0{len(first)}}{after}" for number in numbers]
    check(paths, f"--data {pattern}: the braces count upwards, from the first to the last shard")
    missing = [path for path in paths if not os.path.isfile(path)]
    check(not missing, f"{len(missing)} of {len(paths)} shards are missing, as {missing[:1]}")
    return paths


def index_shard(path):
    """-> CaptionData of one shard, with tag names of its own. Raises what is wrong with it."""
    data, index, size = CaptionData(ShardImages(), []), {}, os.path.getsize(path)
    keys = set()
    with tarfile.open(path, "r:") as tar:
        files = filter(tarfile.TarInfo.isfile, tar)
        for key, group in itertools.groupby(files, lambda file: split_name(file.name)[0]):
            if key in keys:
                raise ValueError(f"the files of {key} are not side by side: use tar --sort=name")
            keys.add(key)
            found = {split_name(file.name)[1]: file for file in group}
            photos = [found[suffix] for suffix in PHOTOS if suffix in found]
            if not photos:
                continue
            row = {}
            try:
                if "json" in found:
                    row = json.loads(tar.extractfile(found["json"]).read())
                if "txt" in found:
                    row["captions"] = [tar.extractfile(found["txt"]).read().decode()]
                elif "captions" not in row:  # img2dataset's: one, or null
                    row["captions"] = [row["caption"]] if row.get("caption") else []
                captions, tags = common.captions_and_tags(row)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{key}: {error}") from error
            tags = sorted({index.setdefault(tag, len(index)) for tag in tags})
            start, length = photos[0].offset_data, photos[0].size
            if start + length > size:
                raise ValueError("the file is cut off")
            data.add(f"{path}: {photos[0].name} at {start} + {length}", captions, tags)
    if not len(data):
        raise ValueError("it holds no photo")
    data.tag_names = list(index)
    return data


def split_name(name):
    """ "a/12.seg.png" -> "a/12", "seg.png": as WebDataset, at the first dot of the file's name"""
    folder, file = os.path.split(name)
    key, _, suffix = file.partition(".")
    return os.path.join(folder, key), suffix.lower()


# The files of an index: strings in one buffer each, and where each string, each image's captions
# and each image's tags end (see common.PackedStrings and CaptionData).
NUMBERS = {
    "image_bytes": np.uint8, "image_ends": np.int64, "caption_bytes": np.uint8,
    "caption_ends": np.int64, "first_caption": np.int64, "tags": np.int32, "first_tag": np.int64,
}  # fmt: skip


def index_shards(paths, key, folder):
    """Write the index of these shards into the folder, one after another; index.json comes last"""
    tags = {}
    ends = {name: 0 for name in NUMBERS if name.endswith("_ends") or name.startswith("first_")}
    for name in NUMBERS:
        (folder / name).write_bytes(bytes(8) if name in ends else b"")  # each begins with 0
    parts = common.all_cores(index_shard, paths)
    for path in progress(paths, desc="index of the shards", unit=" shards"):
        with reading(path, SHARDS):
            data = next(parts)
        own = [tags.setdefault(name, len(tags)) for name in data.tag_names]
        arrays = {
            "image_bytes": data.images.buffer, "image_ends": data.images.ends,
            "caption_bytes": data.captions.buffer, "caption_ends": data.captions.ends,
            "first_caption": data.first_caption, "first_tag": data.first_tag,
            "tags": [own[tag] for tag in data.tags],
        }  # fmt: skip
        for name, array in arrays.items():
            array = np.asarray(array, NUMBERS[name])
            if name in ends:
                array = array + ends[name]
                ends[name], array = array[-1], array[1:]
            with open(folder / name, "ab") as file:
                file.write(array.tobytes())
    content = {"key": key, "sizes": file_sizes(folder), "tag_names": list(tags)}
    common.write_json(folder / "index.json", content)


def file_sizes(folder):
    return {name: (folder / name).stat().st_size for name in NUMBERS}


def read_index(folder, key):
    """-> CaptionData, mapped into memory; None if there is no whole index of these shards"""
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if (index["key"], index["sizes"]) != (key, file_sizes(folder)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    mapped = {name: map_file(folder / name, kind) for name, kind in NUMBERS.items()}
    data = CaptionData(ShardImages(), index["tag_names"] or None)
    data.images.buffer, data.images.ends = mapped["image_bytes"], mapped["image_ends"]
    data.captions.buffer, data.captions.ends = mapped["caption_bytes"], mapped["caption_ends"]
    data.first_caption, data.first_tag = mapped["first_caption"], mapped["first_tag"]
    data.tags = mapped["tags"]
    return data


def map_file(path, kind):
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros(0, kind)
    return np.memmap(path, kind, "r").view(np.ndarray)


class ShardImages(PackedStrings):
    """Where photos stand, "a.tar: KEY.jpg at OFFSET + SIZE"; `open(i)` gives a PIL image."""

    def open(self, i):
        place = re.fullmatch(r"(.*?\.tar): .* at (\d+) \+ (\d+)", self[i], re.DOTALL)
        shard, offset, size = place.groups()
        content = os.pread(opened(shard).fileno(), int(size), int(offset))
        return Image.open(io.BytesIO(content))

    @staticmethod
    def sampler(size, batch_size, world, seed, start=0, block=512, window=64):
        """As common.infinite_sampler, but samples that are neighbours in a shard are drawn together

        The samples are cut into blocks, at other places in each epoch. A process has blocks of its
        own, in random order, and draws from a window of them at a time. Samples that do not fill a
        block on every process are left out of the epoch. All is a function of seed, epoch, number
        of processes and `start`: a run goes on at the sample where it stopped.
        """
        block = max(1, min(block, size // (8 * world.size)))
        own = size // block // world.size  # blocks of a process
        check(own, f"{size} samples are fewer than processes: start fewer")
        position = start * (batch_size // world.size)
        while True:
            epoch, place = divmod(position, own * block)
            rng = np.random.default_rng([seed, epoch])
            first = rng.integers(size)
            blocks = rng.permutation(size // block)[world.rank * own :][:own]
            number, skipped = divmod(place, window * block)
            mixed = blocks[number * window :][:window, None] * block + np.arange(block)
            rng = np.random.default_rng([seed, epoch, world.rank, number])
            for index in rng.permutation((first + mixed.ravel()) % size)[skipped:]:
                yield epoch, int(index)
                position += 1


@functools.lru_cache(128)
def opened(path):
    return open(path, "rb")


# ------------------------------------------------------------------------- checkpoints of others

# What others put before the names of a backbone, and what may stand beside it under that prefix.
# In turns: mmcontrastive.py, MoCo, SwAV and DINO, VirTex.
PREFIXES = (
    "queries.image.trunk.0.", "module.encoder_q.", "encoder_q.", "module.backbone.", "backbone.",
    "module.", "visual.cnn.", "",
)  # fmt: skip
CLASSIFIER = re.compile(r"(fc|classifier|head|projection_head|prototypes|projector)\b")


def backbone_weights(content, path):
    """The ResNet or VGG-16 in a checkpoint of ours, VirTex, MoCo, SwAV, VICReg, DINO, torchvision

    content: what read_checkpoint(path) gave -> (arch, state dict). The architecture is recognised
    by names and shapes. Under the backbone's prefix nothing may be missing and nothing be left but
    a classifier or projection head; keys under other prefixes (text, queues) are ignored.
    """
    for key in ("model", "state_dict", "teacher"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    check(isinstance(content, dict), f"{path} holds no state dict")
    first = "conv1.weight", "features.0.weight"  # of ResNet and VGG
    prefixes = [p for p in PREFIXES if any(p + key in content for key in first)]
    check(prefixes, f"{path} holds no ResNet or VGG; its first keys are {list(content)[:5]}")
    state = {}
    for key, value in content.items():
        if isinstance(key, str) and key.startswith(prefixes[0]) and torch.is_tensor(value):
            state[key.removeprefix(prefixes[0])] = value
    for key in [key for key in state if key.endswith("running_mean")]:  # from before PyTorch 0.4.1
        state.setdefault(key.replace("running_mean", "num_batches_tracked"), torch.tensor(0))

    state = {key: value for key, value in state.items() if not CLASSIFIER.match(key)}
    shapes, differences = {key: value.shape for key, value in state.items()}, {}
    for arch in common.BACKBONES:
        with torch.device("meta"):  # shapes without memory
            wanted = {
                key: value.shape for key, value in common.build_backbone(arch).state_dict().items()
            }
        differences[arch] = sorted({key for key, _ in shapes.items() ^ wanted.items()})
    arch = min(common.BACKBONES, key=lambda arch: len(differences[arch]))
    keys = differences[arch]
    name = f"{common.BACKBONES[arch]} of torchvision, the closest match"
    check(not keys, f"{path} is no {name}: it differs in {keys[:5]}")
    return arch, state
