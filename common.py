"""What the methods share: captioned images, batches, backbones, and the output folder of a run.

In the order in which a script meets it:

    messages               fail, check, say, in_words, progress, run
    processes, precision   World, start, main_first, any_process, data_parallel, autocast
    captioned images       CaptionData, caption_data (.jsonl here, others in sources.py)
    from file to batch     Samples, photo, read_crops, infinite_sampler, loader, validation_batches
    on the device          augment: colour jitter and normalisation
    backbones              build_backbone, load_backbone
    optimisation           build_optimizer, lr_factor
    flags                  flag_parser, choose_recipe, parse
    the output folder      cached; Run, whose `steps` feed the training loop
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
import zipfile
import zlib
from array import array
from collections import OrderedDict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import ExifTags, Image, ImageOps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

# -------------------------------------------------------------------------------------- messages


def fail(message, everywhere=True):
    """End the program with one line that says what is wrong and what to do.

    everywhere: all processes fail alike, and one on each machine speaks for all.
    """
    speaks = not everywhere or int(os.environ.get("LOCAL_RANK", 0)) == 0
    sys.exit(f"error: {message}" if speaks else 1)


def check(condition, message):
    """End the program with the message unless the condition holds."""
    if not condition:
        fail(message)


def say(message):
    """Print a line, from the first process only, without tearing the progress bar."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(str(message), file=sys.stdout)
        sys.stdout.flush()


def in_words(scores, digits=2):
    """{name: number} -> "top1 45.90, top5 84.10" """
    return ", ".join(f"{name} {score:.{digits}f}" for name, score in scores.items())


def all_cores(function, parts):
    """Yield function(part) for one part after another, by all cores; the first by this process."""
    parts = iter(parts)
    yield from map(function, itertools.islice(parts, 1))
    blocks = iter(lambda: list(itertools.islice(parts, 8 * os.cpu_count())), [])  # imap takes all
    for first in blocks:
        with multiprocessing.Pool(None, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            for block in itertools.chain([first], blocks):
                yield from pool.imap(function, block)  # Ctrl-C is left to this process


def progress(iterable=None, **kwargs):
    """A tqdm progress bar on the first process only."""
    hidden = int(os.environ.get("RANK", 0)) != 0
    return tqdm(iterable, disable=hidden, dynamic_ncols=True, **kwargs)


def run(main, get_args):
    """Start a script: main(get_args()). What is not the script's fault ends it with one line."""
    try:
        main(get_args())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except ModuleNotFoundError as error:
        install = "python -m pip install -r requirements.txt"
        fail(f"{error.name} is missing: {install}, or copy {error.name}.py beside the script")
    except Unreadable as error:
        last = str(error).splitlines()[-1]  # before it a worker's traceback, if it was in one
        fail(last.removeprefix("common.Unreadable: "), everywhere=False)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename:  # no permission, a file for a folder...
            fail(f"{error.filename}: {error.strerror}", everywhere=False)
        if isinstance(error, MemoryError) or re.search("(out of|allocate) memory", str(error)):
            fail("out of memory: fewer or smaller images, a smaller batch or model", False)
        if "RANK" in os.environ and re.search("[Cc]onnection (closed|reset)", str(error)):
            fail("another process has ended: its message, if it had time for one, says why", False)
        raise
    finally:  # workers ignore SIGTERM: after an error Python would wait for them for ever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            if "Pool" not in worker.name:  # a pool ends its own, and would wait for a killed one
                worker.kill()


# ---------------------------------------------------------------------- processes and precision


class World(NamedTuple):
    """The place of this process among all: rank in [0, size), and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0


def start():
    """Join the other processes if torchrun started this one (NCCL or gloo) -> World"""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1:
            choose_threads()
    if "RANK" not in os.environ:
        return World(0, 1, torch.device("cuda" if cuda else "cpu"))

    local = int(os.environ["LOCAL_RANK"])
    enough = not cuda or local < torch.cuda.device_count()
    check(enough, "torchrun started more processes than there are GPUs: lower --nproc_per_node")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # gloo beside NCCL: flags on the host are shared without waiting for the GPU. Hours,
        # because the others wait while the first process builds labels.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=6))
    return World(dist.get_rank(), dist.get_world_size(), device)


def keep_freed_memory():
    """Let glibc keep what one step frees for the next: handing it back cost a third of the time."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # as size_t: never


def choose_threads():
    """Fewer threads where other programs are busy: each operation waits for the slowest thread."""
    images, weight, seconds = torch.zeros(8, 64, 32, 32), torch.zeros(64, 64, 3, 3), {}
    number = torch.get_num_threads()
    for threads in sorted({1, max(1, number // 2), max(1, number - 1), number}):
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        for _ in range(40):
            torch.conv2d(images, weight)
        seconds[threads] = time.perf_counter() - begin
    best = min(seconds, key=seconds.get)
    if seconds[number] > 1.5 * seconds[best]:
        say(f"other programs are busy: {best} of {number} threads are faster (OMP_NUM_THREADS)")
        torch.set_num_threads(best)


def end_processes(world):
    """Leave the group: what the first process still has to do, it does alone."""
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def main_first(world):
    """The first process runs the block before the others; if it fails, torchrun ends them."""
    if world.size > 1 and not world.is_main:
        dist.barrier()
    yield
    if world.size > 1 and world.is_main:
        dist.barrier()


def any_process(world, flag):
    """True on every process if `flag` is true on one. The GPU is not waited for."""
    if world.size == 1:
        return flag
    flag = torch.tensor(int(flag))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def data_parallel(model, world):
    """DistributedDataParallel when there are several processes. BatchNorm stays per process."""
    if world.size == 1:
        return model
    with warnings.catch_warnings():  # torch 2.15 has a new name, which 2.11 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def autocast(device, amp):
    """The context of mixed precision; amp: "bf16", "fp16" or "off"."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    return torch.autocast(device.type, dtype, enabled=amp != "off")


def choose_amp(device, wish=None):
    """`--amp`: the user's wish, or bf16 where the device computes in it natively, else "off"."""
    if wish:
        return wish
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "off"
    mkldnn = torch.backends.mkldnn.is_available()
    return "bf16" if mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "off"


# ------------------------------------------------------------------------------ captioned images


class PackedStrings:
    """Strings in one byte buffer: append and read, nothing else.

    Millions of Python strings cost 50 bytes each beside their letters, and worker processes copy
    them as soon as they touch the reference counts. A buffer and 8 bytes per string stay shared.
    """

    def __init__(self, strings=()):
        self.buffer, self.ends = bytearray(), array("q", [0])
        for string in strings:
            self.append(string)

    def append(self, string):
        self.buffer += string.encode("utf-8", "replace")
        self.ends.append(len(self.buffer))

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        return bytes(self.buffer[self.ends[i] : self.ends[i + 1]]).decode()

    def digest(self):
        """A checksum of all strings."""
        return zlib.crc32(self.ends, zlib.crc32(self.buffer))


class ImageFiles(PackedStrings):
    """Paths of images; `open(i)` gives a PIL image, not yet decoded."""

    def open(self, i):
        path = self[i]
        if not os.path.isfile(path):  # reading a pipe or a device would hang
            raise OSError(f"{path} is not a file")
        return Image.open(path)

    def check_files(self, hint="check --root and the split"):
        """End the program if files are missing. Folders are listed once; no file is opened."""

        @functools.cache
        def names_in(folder):
            return set(os.listdir(folder)) if os.path.isdir(folder) else set()

        split = enumerate(map(os.path.split, self))
        missing = [self[i] for i, (folder, name) in split if name not in names_in(folder or ".")]
        if missing:
            number = f"{len(missing)} of {len(self)} images are missing"
            fail(f"{number}, the first is {missing[0]}: {hint}")


class CaptionData:
    """Images, each with captions and tags (either may be empty): what every source becomes.

    images: ImageFiles or shapes.ShapeImages.  captions: packed; those of image i are
    captions[first_caption[i]] to captions[first_caption[i + 1] - 1].  tags: indices into
    tag_names, likewise; tag_names is None if the source knows no tags.
    """

    def __init__(self, images, tag_names=None):
        self.images, self.tag_names = images, tag_names
        self.captions, self.first_caption = PackedStrings(), array("q", [0])
        self.tags, self.first_tag = array("i"), array("q", [0])

    def add(self, image, captions, tags=()):
        self.images.append(image)
        for caption in captions:
            self.captions.append(caption)
        self.tags.extend(tags)
        self.first_caption.append(len(self.captions))
        self.first_tag.append(len(self.tags))

    def __len__(self):
        return len(self.images)

    def captions_of(self, i):
        return [self.captions[j] for j in range(self.first_caption[i], self.first_caption[i + 1])]

    def tags_of(self, i):
        return self.tags[self.first_tag[i] : self.first_tag[i + 1]].tolist()

    def captioned(self):
        """(N,) bool: which images have a caption"""
        return np.diff(self.first_caption) > 0

    def image_of_caption(self):
        """(M,) int64: the number of each caption's image"""
        return np.repeat(np.arange(len(self)), np.diff(self.first_caption))

    def select(self, keep, captions_per_image=None, seed=0):
        """The images `keep`, each with at most `captions_per_image` captions, drawn once."""
        selected = CaptionData(type(self.images)(), self.tag_names)
        for i in keep:
            captions = self.captions_of(i)
            if captions_per_image and len(captions) > captions_per_image:
                rng = np.random.default_rng([seed, 0, i])
                captions = rng.permutation(captions)[:captions_per_image].tolist()
            selected.add(self.images[i], captions, self.tags_of(i))
        return selected

    def numbered_as(self, tag_names):
        """The same images with tags that are indices into `tag_names`, without other tags"""
        if self.tag_names == tag_names:
            return self
        index = {name: tag for tag, name in enumerate(tag_names)}
        same = CaptionData(type(self.images)(), tag_names)
        numbers = [index.get(name) for name in self.tag_names]
        for i in range(len(self)):
            tags = sorted(numbers[t] for t in self.tags_of(i) if numbers[t] is not None)
            same.add(self.images[i], self.captions_of(i), tags)
        return same

    def digest(self):
        """A checksum of captions and tags: what is made of them can be kept under it."""
        number = self.captions.digest()
        for part in (self.first_caption, self.tags, self.first_tag):
            number = zlib.crc32(part, number)
        return zlib.crc32(json.dumps(self.tag_names).encode(), number)


DATA = "shapes (built in), coco, vg, the path of a .jsonl, or tar files as 'photos/{00..19}.tar'"


def caption_data(name, root=None, split="train", fraction=1.0, captions_per_image=None, seed=0,
                 cache=None):  # fmt: skip
    """One split of "shapes", "coco", "vg", of a .jsonl file or of tar files -> CaptionData

    root: its folder (default datasets/<name>; for a .jsonl the file's own).
    fraction, captions_per_image: VirTex Fig. 4; the subset depends on the seed alone.
    cache: keeps the index of tar files (default runs/cache).
    """
    hint = "check --root and the split"
    if name.endswith(".jsonl"):
        data = jsonl_data(name, root, split)
        hint = "relative paths start from the folder of the .jsonl, or from --root"
    else:
        import sources  # only here: a script that is copied elsewhere does without it

        data = sources.caption_data(name, root, split, cache)
    check(len(data), f"--data {name}: the split {split} holds no image")
    if fraction < 1 or captions_per_image:
        order = np.random.default_rng(seed).permutation(len(data))
        keep = np.sort(order[: max(1, round(fraction * len(data)))])
        data = data.select(keep, captions_per_image, seed)
    if isinstance(data.images, ImageFiles):
        data.images.check_files(hint)
    return data


@contextlib.contextmanager
def reading(path, expected):
    """`with reading(path, expected) as at:` makes something of a file, the user's or our own.

    Whatever goes wrong ends the program with one line: the file, the entry `at.entry` that is being
    read, the reason, and what was expected.
    """
    check(os.path.isfile(path), f"{path} not found: check the path (expected: {expected})")
    at = argparse.Namespace(entry=None)
    try:
        yield at
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        entry = "" if at.entry is None else f", entry {at.entry}"
        reason = textwrap.shorten(str(error), 200) or type(error).__name__  # torch's: many lines
        reason = f"{reason} is missing" if isinstance(error, KeyError) else reason
        fail(f"{path}{entry}: {reason}. Expected: {expected}")


NEAR_MISSES = set("caption text texts sentences label labels tag".split())
JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} in each line'


def jsonl_data(path, root, split):
    """One {"image", "captions", "tags", "split"} per line; all but "image" may be missing.

    Relative images start from `root` (default: the file's folder). When no line names a split,
    "val" is a fixed random twentieth of the lines and "train" the rest.
    """
    root, index, splits, others = root or os.path.dirname(path), {}, [], set()
    data = CaptionData(ImageFiles(), [])
    with reading(path, JSONL) as at, open(path, "rb") as file:
        bar = progress(file, desc=os.path.basename(path), unit=" lines")
        for at.entry, line in enumerate(bar, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            others |= row.keys() & NEAR_MISSES
            captions, tags = captions_and_tags(row)
            tags = sorted({index.setdefault(tag, len(index)) for tag in tags})
            data.add(os.path.join(root, row["image"]), captions, tags)
            if not isinstance(row.get("split"), str | None):
                raise ValueError('"split" must be a string')
            splits.append(row.get("split"))
    data.tag_names = list(index) or None
    if others and not len(data.captions) and not index:
        fail(f'{path}: no line has "captions" or "tags", but {sorted(others)}: rename the key')

    named = sorted(set(splits) - {None})
    if named:
        check(split in named, f"{path}: no line is of the split {split}, there are {named}")
        if None in splits:
            say(f"{path}: {splits.count(None)} lines name no split, as others do, and are left out")
        return data.select([i for i, name in enumerate(splits) if name == split])
    known = split in ("train", "val")
    check(known, f'{path} names no splits: give "train" or "val", not "{split}"')
    order = np.random.default_rng(0).permutation(len(data))
    val, train = np.split(order, [max(1, len(data) // 20)])
    return data.select(np.sort(val if split == "val" else train).tolist())


def captions_and_tags(row):
    """{"captions": [...], "tags": [...]}, both may be missing -> lists of strings, not empty"""
    if "caption" in row and "captions" not in row:
        raise ValueError('has "caption", but the key is "captions", a list of strings')
    for key in ("captions", "tags"):
        if not isinstance(row.get(key, []), list):
            raise ValueError(f'"{key}" must be a list of strings')
    captions = [caption.strip() for caption in row.get("captions", [])]
    return list(filter(None, captions)), list(map(str, row.get("tags", [])))


# ---------------------------------------------------------------------------- from file to batch


class Unreadable(Exception):
    """An image that cannot be decoded; the message is its path."""


class Samples(Dataset):
    """make(index, rng) -> one sample, a dict; it raises Unreadable if it cannot decode the image.

    A key is (epoch, index) in training: rng depends on the seed and the key alone. In validation
    it is an index and rng is None. The next sample takes the place of one that is unreadable;
    "unreadable" in a sample lists the paths that were passed over.
    """

    def __init__(self, make, size, seed=0):
        self.make, self.size, self.seed = make, size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        rng, index = None, key
        if isinstance(key, tuple):
            rng, index = np.random.default_rng([self.seed, *key]), key[1]
        unreadable = []
        for _ in range(self.size):
            try:
                return {**self.make(index, rng), "unreadable": unreadable}
            except Unreadable as error:
                index = (index + 1) % self.size
                if str(error) not in unreadable:  # a photo may have many samples (icmlm.py)
                    unreadable.append(str(error))
            if len(unreadable) == 100:
                break
        raise Unreadable(f"{len(unreadable)} images in a row cannot be decoded, as {unreadable[0]}")


def random_crop(rng, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3)):
    """-> function (width, height) -> box of a random area and aspect, as in Inception's training"""

    def crop(width, height):
        for _ in range(10):
            area = width * height * rng.uniform(*scale)
            aspect = math.exp(rng.uniform(*map(math.log, ratio)))
            w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if w <= width and h <= height:
                x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
                return x, y, x + w, y + h
        return centre_crop(1.0)(width, height)

    return crop


def centre_crop(part):
    """-> function (width, height) -> central square. 224 / 256 is "resize 256, centre crop 224"."""

    def crop(width, height):
        side = part * min(width, height)
        x, y = (width - side) / 2, (height - side) / 2
        return x, y, x + side, y + side

    return crop


def read_crops(images, index, crops, size):
    """Decode an image once and cut several crops from it -> list of (size, size, 3) uint8 arrays

    A box is cut and resized in one step, and a large JPEG is decoded at a half, a quarter or an
    eighth of its size when that still has more pixels than are wanted. Raises Unreadable.
    """
    try:
        image = images.open(index)
        if image.getexif().get(ExifTags.Base.Orientation, 1) > 1:  # a phone held upright
            ImageOps.exif_transpose(image, in_place=True)  # only then: it decodes the whole photo
        width, height = image.size
        boxes = [crop(width, height) for crop in crops]
        if image.format == "JPEG":
            w = min(right - left for left, _, right, _ in boxes)
            h = min(bottom - top for _, top, _, bottom in boxes)
            image.draft("RGB", (math.ceil(size * width / w), math.ceil(size * height / h)))
        image = eight_bit(image)
        w, h = image.size
        scale = np.array((w / width, h / height, w / width, h / height))
        limit = w, h, w, h  # a box may stand out by a rounding error
        boxes = [np.minimum(scale * box, limit).tolist() for box in boxes]
        return [np.array(image.resize((size, size), Image.BILINEAR, box)) for box in boxes]
    except Exception as error:  # PIL and its formats raise a dozen kinds
        raise Unreadable(images[index]) from error


def eight_bit(image):
    """A PIL image in RGB; 16 bits per pixel, which PIL would clip to white, become 8"""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


NO_JITTER = np.array([1, 1, 1, 0], np.float32)


def photo(images, index, rng, size, crop_min, jitter):
    """One photo, cropped, colour-jittered and mirrored at random; centred if rng is None.

    crop_min: smallest part of the area that a crop shows.  jitter: strength, see colour_jitter.
    -> {"image": uint8 (size, size, 3), "jitter": (4,), "mirrored": bool}
    """
    if rng is None:
        [pixels] = read_crops(images, index, [centre_crop(1.0)], size)
        return {"image": pixels, "jitter": NO_JITTER, "mirrored": False}
    [pixels] = read_crops(images, index, [random_crop(rng, (crop_min, 1.0))], size)
    jitter, mirrored = colour_jitter(rng, jitter), bool(rng.random() < 0.5)
    image = pixels[:, ::-1] if mirrored else pixels
    return {"image": image, "jitter": jitter, "mirrored": mirrored}


def colour_jitter(rng, strength=1.0, p=0.8):
    """(4,) float32: factors of brightness, contrast, saturation, and hue in turns.

    At strength 1 within 1 +- 0.4 and +- 0.1 turns. Neutral with probability 1 - p.
    """
    b, c, s, h = (strength * limit for limit in (0.4, 0.4, 0.4, 0.1))
    factors = rng.uniform((1 - b, 1 - c, 1 - s, -h), (1 + b, 1 + c, 1 + s, h))
    return factors.astype(np.float32) if rng.random() < p else NO_JITTER


def stack(samples, name):
    """The arrays or numbers `name` of all samples -> tensor (B, ...)"""
    return torch.from_numpy(np.stack([sample[name] for sample in samples]))


def collate_photos(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), and the list of unreadable images"""
    unreadable = [path for sample in samples for path in sample["unreadable"]]
    images, jitter = stack(samples, "image"), stack(samples, "jitter")
    return {"images": images, "jitter": jitter, "unreadable": unreadable}


class CropView(Dataset):
    """The central square of every image -> uint8 (size, size, 3), and whether it is readable"""

    def __init__(self, images, size, part=224 / 256):
        self.images, self.size, self.part = images, size, part

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        try:
            return read_crops(self.images, i, [centre_crop(self.part)], self.size)[0], True
        except Unreadable:
            return np.zeros((self.size, self.size, 3), np.uint8), False


def infinite_sampler(size, batch_size, world, seed, start=0):
    """Yield (epoch, index) forever, beginning with batch number `start`.

    The epochs' permutations are concatenated; batch t is the t-th slice of `batch_size` (global) of
    them, and each rank takes its share of the slice. Nothing else decides what is seen.
    """
    share, epoch, order = batch_size // world.size, -1, None
    for position in itertools.count(start * batch_size):
        if (position % batch_size) // share != world.rank:
            continue
        if position // size != epoch:
            epoch = position // size
            order = np.random.default_rng([seed, epoch]).permutation(size)
        yield epoch, int(order[position % size])


def loader(dataset, batch_size, workers, collate=None, device=torch.device("cpu"), sampler=None):
    """A DataLoader whose workers leave Ctrl-C and SIGTERM to the main process."""
    more = {"num_workers": workers, "prefetch_factor": 4 if workers else None}
    more |= {"worker_init_fn": ignore_signals, "pin_memory": device.type == "cuda"}
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, **more)


def ignore_signals(_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def validation_batches(samples, workers, collate, device, desc="validation", batch_size=64):
    """One pass over Samples in their order -> batches, their tensors on `device`"""
    batches = loader(samples, batch_size, workers, collate, device)
    for batch in progress(batches, desc=desc, unit=" batches", leave=False):
        for path in batch.pop("unreadable"):
            say(f"cannot decode {path}: the next image takes its place in the {desc}")
        yield to_device(batch, device)


def to_device(batch, device):
    """A tensor, or lists and dicts of tensors, as images of different sizes with their boxes are"""
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    return batch.to(device, non_blocking=True)


# --------------------------------------------------------------------------------- on the device

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY = np.array([0.299, 0.587, 0.114])
YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
# A rotation by an angle in the plane of I and Q, seen from RGB: HUE[0] + cos HUE[1] + sin HUE[2].
PLANE = np.diag([1, 0, 0]), np.diag([0, 1, 1]), np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0]])
HUE = np.stack([np.linalg.inv(YIQ) @ part @ YIQ for part in PLANE])


@functools.cache
def colour_constants(device):
    """Kept on the device: a copy from the host would make the GPU wait."""
    values = GREY, HUE, IMAGENET_MEAN, IMAGENET_STD
    return [torch.tensor(np.asarray(v), dtype=torch.float32, device=device) for v in values]


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size), channels-last in memory

    jitter: (B, 4) from colour_jitter. Brightness, contrast, saturation and hue (a rotation in YIQ),
    in this order, are each linear in the colours: together one 3x3 matrix and one offset per image,
    a single pass over the pixels. [ours: the order is fixed, values are clamped once, at the end]
    """
    grey, hue_basis, mean, std = colour_constants(images.device)
    pixels = images.float() / 255
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None, None]  # (B, 1, 1) each
        turn = 2 * math.pi * hue
        rotate = hue_basis[0] + turn.cos() * hue_basis[1] + turn.sin() * hue_basis[2]
        saturate = saturation * torch.eye(3, device=pixels.device) + (1 - saturation) * grey
        matrix = contrast * brightness * rotate @ saturate
        red, green, blue = matrix[:, None, None].unbind(-1)  # (B, 1, 1, 3) each
        # Contrast blends with the mean grey, which saturation and hue leave as it is.
        mean_grey = (pixels.mean((1, 2)) @ grey)[:, None, None]
        offset = (1 - contrast) * brightness * mean_grey
        pixels = pixels[..., :1] * red + pixels[..., 1:2] * green + pixels[..., 2:] * blue
        pixels = (pixels + offset[..., None]).clamp_(0, 1)
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------- backbones

BACKBONES = {  # and their names in torchvision
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnet50w2x": "wide_resnet50_2",
    "vgg16": "vgg16_bn",  # batch norm as in DeeperCluster, whose probes ICMLM uses [Sec. 4]
}


def build_backbone(arch):
    """torchvision's, with its key names and without the classifier, randomly initialised

    (B, 3, H, W) -> (B, backbone.channels, H / 32, W / 32); backbone.arch is its name here.
    """
    from torchvision import models  # only here: --help does without the seconds that it takes

    if arch == "vgg16":
        layers = models.vgg.make_layers(models.vgg.cfgs["D"], batch_norm=True)
        for module in layers:
            if isinstance(module, nn.Conv2d):  # as torchvision does
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
        parts, channels = {"features": layers}, 512
    else:
        model = getattr(models, BACKBONES[arch])()
        names = "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"
        parts, channels = {name: getattr(model, name) for name in names}, model.fc.in_features
    backbone = nn.Sequential(OrderedDict(parts))
    backbone.channels, backbone.arch = channels, arch
    return backbone


CHECKPOINT = "a whole checkpoint of this version: weights and settings, no code"


def read_checkpoint(path):
    """torch.load with weights_only, on the CPU; ends the program if there is nothing to load."""
    with reading(path, CHECKPOINT):
        with torch.serialization.safe_globals([argparse.Namespace]):  # DINO's keep their arguments
            return torch.load(path, map_location="cpu", weights_only=True)


def load_backbone(path, arch=None):
    """The backbone in the file `path`, of the architecture `arch` (None: whichever it is)."""
    from sources import backbone_weights  # only here: a script that is copied does without it

    content = read_checkpoint(path)
    with reading(path, CHECKPOINT):
        found, state = backbone_weights(content, path)
        check(arch in (None, found), f"{path} is a {found}, not --arch {arch}")
        check(all_finite(state), f"{path} has weights that are not finite: its training diverged")
        backbone = build_backbone(found)
        backbone.load_state_dict(state)
    return backbone


def all_finite(state):
    return all(value.isfinite().all() for value in state.values())


# ---------------------------------------------------------------------------------- optimisation


def build_optimizer(name, parameters, lr, weight_decay):
    """ "sgd" with momentum 0.9, which all three papers use; "radam" [ICMLM App. F.1]; "adamw" """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=weight_decay, fused=True)
    if name == "radam":  # weight decay decoupled, as in the code of RAdam's authors
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": True}
        return torch.optim.RAdam(parameters, lr, **decay)
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # or undefined when fp16's scaler skips the first step
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def check_state(states):
    """Raise ValueError if an optimizer's state, as loaded, does not fit its parameters."""
    for parameter, state in states.items():
        float(state.get("step", 0))
        tensors = [value for name, value in state.items() if name != "step" and value is not None]
        if any(v.layout != torch.strided or v.shape != parameter.shape for v in tensors):
            raise ValueError("the optimizer's state is of another shape or kind")


def lr_factor(iteration, total, warmup=0.0, steps=()):
    """Factor of the learning rate at an iteration, counted from 0.

    It rises linearly from 0 over the share `warmup` of the run, then falls by a cosine to 0, or,
    with `steps`, to a tenth after each of these shares [ICMLM App. F.1].
    """
    start = warmup * total
    if iteration < start:
        return iteration / start
    if steps:
        return 0.1 ** sum(iteration >= step * total for step in steps)
    return 0.5 * (1 + math.cos(math.pi * (iteration - start) / max(1, total - start)))


def set_lr(optimizer, factor):
    """Scale the learning rates that the optimizer was built with."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


# ----------------------------------------------------------------------------------------- flags

RECIPES = "demo", "small", "paper"
OPTIMIZERS = "sgd", "radam", "adamw"
LABELLED = "shapes", "coco", "voc07", "folder"


def number(kind, words, holds):
    """A type of flags: `--lr -1` ends with "argument --lr: -1 is not above 0"."""

    def parse(text):
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {words}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value"
    return parse


natural = number(int, f"from 0 to {10**9}", lambda n: 0 <= n <= 10**9)
count = number(int, f"from 1 to {10**9}", lambda n: 1 <= n <= 10**9)
dim = number(int, "from 1 to 65536", lambda n: 1 <= n <= 65536)  # a size that memory holds
image_side = number(int, "from 1 to 4096", lambda n: 1 <= n <= 4096)
positive = number(float, "a number above 0", lambda x: 0 < x < math.inf)
non_negative = number(float, "a number of 0 or more", lambda x: 0 <= x < math.inf)
share = number(float, "in [0, 1]", lambda x: 0 <= x <= 1)
positive_share = number(float, "above 0 and at most 1", lambda x: 0 < x <= 1)
proper_share = number(float, "at least 0 and below 1", lambda x: 0 <= x < 1)
seed_number = number(int, f"from 0 to {2**23 - 1}", lambda n: 0 <= n < 2**23)


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of the script's docstring and tells each default."""

    def _get_help_string(self, action):
        silent = action.default in (None, argparse.SUPPRESS, []) or action.default is False
        return action.help if silent else f"{action.help} (default %(default)s)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def __init__(self, description=None, **more):
        super().__init__(description=description, formatter_class=Help, allow_abbrev=False, **more)

    def error(self, message):
        fail(message)


def flag_parser(script, description):
    """A parser with the flags that mean the same in every training script."""
    parser = Parser(description)
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help=DATA)
    add("--recipe", choices=RECIPES, help="defaults: demo (shapes), small (.jsonl), paper (others)")
    add("--root", help="folder of the data (default datasets/<name>; for a .jsonl its own)")
    add("--cache", help="folder of what runs share (default: cache, beside --output)")
    add("--train-split", help="name of the training split")
    add("--val-split", help="name of the validation split")
    add("--fraction", type=positive_share, default=1.0, help="train on this share [VirTex Fig. 4]")
    add("--captions-per-image", type=count, help="train on this many captions [VirTex Fig. 4]")
    add("--image-size", type=image_side, help="side of the crops; the cost grows with its square")
    add("--crop-min", type=positive_share, help="smallest share of a photo that a crop shows")
    add("--colour-jitter", type=share, help="strength; lower if captions name colours, 0 for none")
    half = min(8, os.cpu_count() // 2)  # on two cores two were 4% slower than one
    add("--workers", type=natural, default=half, help="data processes; more if data_wait > 0.05")

    add = parser.add_argument_group("backbone and optimisation").add_argument
    add("--arch", choices=BACKBONES, help="resnet18 for small data or a CPU")
    add("--batch-size", type=dim, help="images per iteration over all processes")
    add("--iters", type=count, help="length in iterations; scale with the number of images")
    add("--epochs", type=positive, help="length in passes over the data, instead of --iters")
    add("--lr", type=positive, help="peak; lower it when the loss is not finite")
    add("--warmup", type=proper_share, default=0.0, help="share of the run in which --lr rises")
    add("--weight-decay", type=non_negative, default=1e-4, help="raise it for few images")

    run_flags(parser, script)

    add = parser.add_argument_group("probe of the backbone (see eval_linear.py)").add_argument
    add("--probe-data", choices=LABELLED, help="labelled images (default: the tags of --data)")
    add("--probe-root", help="folder of --probe-data")
    add("--probe-images", type=count, help="probe on at most this many training images")
    add("--probe-every", type=natural, default=0, help="iterations; the best backbone is kept, too")
    return parser


def run_flags(parser, script):
    """The flags of everything that trains into an output folder: see Run."""
    add = parser.add_argument_group("run").add_argument
    add("--output", default=f"runs/{script}", help="folder in which the same command goes on")
    add("--fresh", action="store_true", help="forget what --output holds and start over, each time")
    add("--seed", type=seed_number, default=0, help="random seed")
    add("--amp", choices=("bf16", "fp16", "off"), help="default bf16 where the device has it")
    add("--compile", action="store_true", help="torch.compile: slower to start, faster on GPUs")
    add("--log-every", type=count, default=20, help="iterations between lines of metrics.jsonl")
    add("--checkpoint-every", type=count, help="iterations that a killed run can lose")


def look(argv, *flags):
    """What the command line gives for a few flags on which defaults depend -> Namespace"""
    parser = Parser(add_help=False)
    for flag in flags:
        parser.add_argument(flag)
    return parser.parse_known_args(argv)[0]


def choose_recipe(table, argv, paper=None):
    """The column of the table for `--recipe`, or else for `--data` -> {flag: default}

    table: {flag: (demo, small, paper)}.  paper: {flag: value} that replace those of its column.
    """
    given = look(argv, "--data", "--recipe", "--iters", "--epochs")
    data = given.data or "shapes"
    by_data = {"shapes": "demo", ".jsonl": "small"}
    name = given.recipe or by_data.get(os.path.splitext(data)[1] or data, "paper")
    check(name in RECIPES, f"--recipe {name} is unknown: choose from {', '.join(RECIPES)}")
    recipe = {flag: row[RECIPES.index(name)] for flag, row in table.items()}
    if name == "paper":
        recipe |= paper or {}
    recipe["recipe"] = name
    if given.iters:
        recipe["epochs"] = None
    if given.epochs:
        recipe["iters"] = None
    year = "2017" if given.data == "coco" else ""
    return {**recipe, "train_split": f"train{year}", "val_split": f"val{year}"}


def parse(parser, argv, recipe, scaled=()):
    """Parse the command line; what it leaves out is the recipe's, as --help then tells.

    scaled: flags of learning rates. The recipe's belong to its batch size and grow linearly with
    another one, and to its optimizer: another needs its own.
    """
    given = look(argv, "--batch-size", "--optimizer")
    recipe, usual = dict(recipe), recipe["batch_size"]
    if given.optimizer and given.optimizer != recipe.get("optimizer"):
        decay = 1e-2 if given.optimizer == "adamw" else 1e-4
        recipe |= {**dict.fromkeys(scaled), "steps": (), "weight_decay": decay}
    elif given.batch_size and given.batch_size.isdecimal() and int(given.batch_size) != usual:
        factor = int(given.batch_size) / usual
        for flag in scaled:
            recipe[flag] *= factor
    parser.set_defaults(**recipe)
    args = parser.parse_args(argv)

    for flag in scaled:
        name, value = f"--{flag.replace('_', '-')}", getattr(args, flag)
        if value is None:
            parser.error(f"--optimizer {args.optimizer} needs its own {name}: the recipe's differs")
        if args.batch_size != usual and value == recipe[flag]:
            say(f"{name} {value:g}: the recipe's, scaled from batch {usual} to {args.batch_size}")
    if args.iters and args.epochs:
        parser.error("give --iters or --epochs, not both")
    if getattr(args, "weights", None) and not look(argv, "--output").output:
        args.output = os.path.dirname(args.weights) or "."  # what a model draws lies beside it
    args.cache = args.cache or str(Path(args.output).parent / "cache")
    if args.probe_root and not args.probe_data:
        parser.error("--probe-root goes with --probe-data")
    if args.arch == "vgg16" and args.image_size < 32:
        parser.error("--arch vgg16 halves a photo five times: give --image-size 32 or more")
    refuse_uneven_batch(parser, args.batch_size)
    return args


def refuse_uneven_batch(parser, batch_size):
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if batch_size % processes:
        together = f"--batch-size {batch_size} is for all {processes} processes together"
        parser.error(f"{together} and cannot be divided by them")


# ----------------------------------------------------------------------------- the output folder

# Flags that may differ when a run goes on: where and how fast it runs, not what it learns.
FREE_FLAGS = {
    "output", "root", "cache", "fresh", "workers", "amp", "compile", "log_every",
    "checkpoint_every", "probe_root", "backtranslations", "tags_required",
}  # fmt: skip


def write_file(path, write):
    """Write through a temporary file: `path` is whole, old or new, whenever the power fails."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        Path(temporary).unlink(missing_ok=True)
        kept = "what it held before is kept: make room and start the same command again"
        fail(f"{path} cannot be written ({error}); {kept}", everywhere=False)


def write_json(path, content):
    write_file(path, lambda file: file.write(json.dumps(content, indent=2).encode() + b"\n"))


def append_line(path, line):
    try:
        with open(path, "a") as file:
            file.write(line + "\n")
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        fail(f"{reason}: make room and start the same command again", everywhere=False)


def lock(path):
    """-> an open file, which holds the lock until it is closed; None if another process has it"""
    # Opened for reading, too: a pipe in its place does not block.
    file = open(path, "r+b", 0, opener=lambda path, _: os.open(path, os.O_RDWR | os.O_CREAT))
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except (ImportError, OSError):  # Windows, and file systems without locks
        pass
    return file


CACHE_VERSION = 1  # to be raised when the code makes other things of the same data


def cache_path(cache, name, key):
    """The path in the folder `cache` for what the code makes of `key` (JSON)"""
    return Path(cache, f"{name}-{zlib.crc32(json.dumps([CACHE_VERSION, key]).encode()):08x}")


@contextlib.contextmanager
def locked(path):
    """Within the block no other process that asks for the same path is in its block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = lock(f"{path}.lock")
    if not file:
        say(f"waiting for another run, which is making {path}")
    while not file:
        time.sleep(0.1)
        file = lock(f"{path}.lock")
    with file:
        yield


def cached(cache, name, key, build, use):
    """Build a dict of arrays, or find it in the folder `cache`, which runs share -> use(arrays)

    build() gives the arrays. key (JSON): all that they depend on.
    """
    path = cache_path(cache, name, key).with_suffix(".npz")
    arrays = read_arrays(path, key)
    if arrays is None:
        with locked(path):
            arrays = read_arrays(path, key)  # another run may have made it meanwhile
            if arrays is None:
                arrays = build()
                keep_arrays(path, key, arrays)
    with reading(path, "what this version of the scripts has made: delete it"):
        return use(arrays)


def read_arrays(path, made_of):
    """What keep_arrays wrote, or None: no file, made of something else, or damaged."""
    if path.is_file():
        try:
            with np.load(path) as file:
                if file["made_of"] == json.dumps(made_of):
                    return {name: file[name] for name in file.files}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            say(f"{path} is damaged ({error}): it is made again")
    return None


def keep_arrays(path, made_of, arrays):
    write_file(path, lambda file: np.savez(file, made_of=json.dumps(made_of), **arrays))


def write_folder(path, write):
    """write(folder) fills a temporary folder, which then becomes `path`: it is always whole."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    finally:  # nothing is left of one that failed
        shutil.rmtree(temporary, ignore_errors=True)


class Run:
    """The output folder of a training run (docs/output.md): what is kept, found again, reported."""

    def __init__(self, args, script, world, *data):
        """data: what the run depends on, the training set first, as CaptionData"""
        self.args, self.script, self.world, self.folder = args, script, world, Path(args.output)
        self.path = self.folder / "checkpoint.pth"
        self.data, self.images = [part.digest() for part in data], len(data[0].images)
        self.sampler = getattr(data[0].images, "sampler", infinite_sampler)
        self.iteration, self.checkpoint, self.best = 0, None, None
        self.values, self.waited, self.unreadable = {}, 0.0, set()
        with main_first(world):
            ended = self.begin()
        if ended:  # all processes come here, and none waits for another
            say(f"{self.folder} holds a run that has ended: see result.json; --fresh starts over")
            sys.exit(0)

    def begin(self):
        """Read or make the folder -> whether it holds a run that has ended"""
        names = "args.json metrics.jsonl checkpoint.pth backbone.pth backbone_best.pth"
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.locked = lock(self.folder / ".lock")  # it ends with this process
            check(self.locked, f"another run trains into {self.folder}: choose another --output")
            for name in (*names.split(), "result.json", "skipped.txt") if self.args.fresh else ():
                (self.folder / name).unlink(missing_ok=True)
        if self.path.exists():
            self.checkpoint = read_checkpoint(self.path)
            with reading(self.path, f"{CHECKPOINT}; --fresh starts over"):
                self.check_same_run()
                self.iteration = natural(self.checkpoint["iteration"])
                self.best = self.checkpoint["best"] and dict(self.checkpoint["best"])
                if "OMP_NUM_THREADS" not in os.environ:  # another number gives other bits
                    threads = self.checkpoint.get("threads", torch.get_num_threads())
                    torch.set_num_threads(count(threads))
            if (self.folder / "result.json").exists():
                return True
            say(f"{self.folder} holds a checkpoint: going on from iteration {self.iteration}")
        if self.world.is_main:
            (self.folder / "result.json").unlink(missing_ok=True)
            self.keep_metrics()
            self.write_args()
        return False

    def check_same_run(self):
        hint = "choose another --output, or --fresh to start over"
        script, before = self.checkpoint.get("script"), self.checkpoint["args"]
        check(script == self.script, f"{self.folder} holds a run of {script}.py: {hint}")
        for flag, value in vars(self.args).items():
            if flag not in FREE_FLAGS and before.get(flag) != value:
                name = f"--{flag.replace('_', '-')} {before.get(flag)}"
                fail(f"{self.folder} holds a run with {name}, not {value}: {hint}")
        same = self.checkpoint["data"] == self.data
        check(same, f"{self.folder} holds a run on other captions, tags or labels: {hint}")

    def keep_metrics(self):
        """Drop the lines that a killed run wrote after its checkpoint: they come again."""
        path, kept, lost = self.folder / "metrics.jsonl", [], 0
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in lines:
            try:
                if json.loads(line)["iteration"] <= self.iteration:
                    kept.append(line + b"\n")
            except (ValueError, TypeError, KeyError):  # cut off or zeros: the power has failed
                lost += 1
        if lost:
            say(f"{path}: {lost} lines that cannot be read are dropped")
        write_file(path, lambda file: file.write(b"".join(kept)))

    def write_args(self):
        versions = {name: version(name) for name in ("torchvision", "numpy")}
        versions |= {"python": sys.version.split()[0], "torch": torch.__version__}  # with its CUDA
        content = {"command": [sys.executable, *sys.argv], "processes": self.world.size}
        if shutil.which("git"):
            here = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
            git = subprocess.run(here, capture_output=True, text=True)
            content["git_commit"] = git.stdout.strip() or None
        write_json(self.folder / "args.json", {**vars(self.args), **content, "versions": versions})
        how = f"recipe {self.args.recipe}, {self.world.device.type}, amp {self.args.amp}"
        say(f"{self.script}: {how}; all settings are in {self.folder}/args.json")

    def resume(self, **parts):
        """The model, optimizer... that checkpoints hold by these names; load an earlier run's."""
        self.parts = parts
        if self.checkpoint:
            with reading(self.path, f"{CHECKPOINT}; --fresh starts over"):
                saved = self.checkpoint["optimizer"]["param_groups"]
                for group, built in zip(saved, parts["optimizer"].param_groups, strict=True):
                    group |= {name: x for name, x in built.items() if name != "params"}  # by flags
                for name, part in parts.items():
                    if self.checkpoint[name]:  # a scaler that was not in use has no state
                        part.load_state_dict(self.checkpoint[name])
                check_state(parts["optimizer"].state)
            self.checkpoint = None  # gigabytes, at the papers' sizes

    def steps(self, samples, collate, total, probe, backbone, **more):
        """Yield (iteration, batch) up to iteration `total`, and do what all scripts do around it:

        feed the device, seed dropout, write metrics and checkpoints, keep the best backbone of
        --probe-every, mind Ctrl-C.  samples: Samples.  collate: list of samples -> dict of tensors
        (or lists of them: to_device), and "unreadable".  probe: eval_linear.Probe or None.
        more: goes into checkpoints, too.
        """
        args, world, device, self.total = self.args, self.world, self.world.device, total
        check(probe or not args.probe_every, "--probe-every needs eval_linear.py beside the script")
        sampler = self.sampler(len(samples), args.batch_size, world, args.seed, self.iteration)
        share = args.batch_size // world.size
        batches = iter(loader(samples, share, args.workers, collate, device, sampler))
        bar = progress(total=total, initial=self.iteration, unit=" its", desc=self.script)
        self.since = time.perf_counter(), self.iteration
        with StopSignals() as stop, bar:
            for self.iteration in range(self.iteration + 1, total + 1):
                asked = time.perf_counter()
                batch = next(batches)
                self.waited += time.perf_counter() - asked
                self.report_unreadable(batch.pop("unreadable"))
                # Dropout is a function of seed, iteration and rank: a resumed run draws the same.
                torch.manual_seed((args.seed << 40) + self.iteration * world.size + world.rank)
                yield self.iteration, to_device(batch, device)
                bar.update()

                stopping = any_process(world, bool(stop.number))
                saving = stopping or self.due(args.checkpoint_every) or self.iteration == total
                if saving or self.due(args.log_every):
                    bar.set_postfix(loss=f"{self.write_metrics():.3f}")
                if args.probe_every and self.due(args.probe_every) and world.is_main:
                    self.best = probe.keep_best(backbone, self)
                if saving and world.is_main:
                    self.save(**more)
                if stopping:
                    say(f"stopped at iteration {self.iteration}: the same command goes on there")
                    sys.exit(128 + stop.number)
        end_processes(world)

    def due(self, every):
        return self.iteration % every == 0

    def validating(self):
        """Whether --validate-every is due: on the first process, with a line of metrics.jsonl"""
        every = math.ceil(self.args.validate_every / self.args.log_every) * self.args.log_every
        return self.world.is_main and self.due(every) and self.iteration < self.total

    def log(self, validation=None, **values):
        """For the next line of metrics.jsonl: numbers or tensors; validation: {name: score}"""
        self.values = values | {f"validation_{name}": x for name, x in (validation or {}).items()}

    def write_metrics(self):
        """Read the logged values, for which the device is waited for, and write them -> the loss"""
        values = dict(self.values)
        tensors = {name: v.detach() for name, v in values.items() if torch.is_tensor(v)}
        mean = torch.stack(list(tensors.values())).float()
        if self.world.size > 1:
            dist.all_reduce(mean)
        values |= dict(zip(tensors, (mean / self.world.size).tolist()))
        for name, value in values.items():
            self.check_finite(name, math.isfinite(value))
        if self.due(self.args.log_every):
            now, (before, first) = time.perf_counter(), self.since
            images = (self.iteration - first) * self.args.batch_size
            values["images_per_s"] = images / (now - before)
            values["data_wait"] = self.waited / (now - before)
            self.since, self.waited = (now, self.iteration), 0.0
            row = {name: float(f"{value:.6g}") for name, value in values.items()}
            if self.world.is_main:
                line = json.dumps({"iteration": self.iteration, **row})
                append_line(self.folder / "metrics.jsonl", line)
        return values["loss"]

    def check_finite(self, name, finite):
        if not finite:
            exists = self.path.exists()
            kept = "checkpoint.pth keeps the last good state" if exists else "no checkpoint yet"
            advice = "Try a lower learning rate, a longer --warmup, or --amp off"
            fail(f"the {name} is not finite at iteration {self.iteration}; {kept}. {advice}")

    def save(self, **more):
        """Write checkpoint.pth, unless the last step has made a weight infinite."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        self.check_finite("model", all_finite(state["model"]))
        state |= {"script": self.script, "args": vars(self.args), "data": self.data, **more}
        state |= dict(iteration=self.iteration, best=self.best, threads=torch.get_num_threads())
        write_file(self.path, lambda file: torch.save(state, file))

    def save_weights(self, name, module):
        """A plain state dict beside the checkpoint, on the CPU and in the usual memory format."""
        state = {k: v.detach().cpu().contiguous() for k, v in module.state_dict().items()}
        write_file(self.folder / name, lambda file: torch.save(state, file))

    def report_unreadable(self, paths):
        """Name each undecodable image once, in skipped.txt too; more than 1% end the run."""
        for path in sorted(set(paths) - self.unreadable):
            self.unreadable.add(path)
            skipped = self.folder / "skipped.txt"
            named = set(skipped.read_text().splitlines()) if skipped.exists() else set()
            if path not in named:
                named.add(path)
                tqdm.write(f"cannot decode {path}: the next image takes its place")
                append_line(skipped, path)
            if len(named) > 0.01 * self.images:
                number = f"{len(named)} of {self.images} images cannot be decoded"
                advice = f"at most 1% may be: repair or leave out of --data those in {skipped}"
                fail(f"{number}, {advice}", everywhere=False)

    def finish(self, probe, backbone, tags_seen=False, **result):
        """Say what the backbone is worth and write result.json: the run has ended.

        tags_seen: the tags of --data, which the probe scores by default, were trained on.
        """
        if probe:
            result |= probe.final(backbone, self, tags_seen)
        else:
            say("eval_linear.py is not here: the backbone is not probed")
        write_json(self.folder / "result.json", result)


class StopSignals:
    """Within the block SIGTERM and the first Ctrl-C only set `number`: the step is done first."""

    def __enter__(self):
        self.number, signals = 0, (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.note) for number in signals}
        return self

    def note(self, number, frame):
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
