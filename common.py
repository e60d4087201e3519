"""What the methods share: captioned images, augmentation, backbones, the output folder.

From top to bottom, in the order in which a script meets it:

    processes and precision    run, start_processes, main_first, choose_amp, autocast
    strings and captions       PackedStrings, CaptionData, caption_data (shapes, coco, vg, jsonl), filter_captions
    from file to batch         read_crops, read_crop, random_crop, centre_crop, photo_sample, CropView, InfiniteSampler, make_loader, Feed
    on the device              draw_colour_jitter (parameters), augment (pixels)
    backbones                  build_backbone, read_checkpoint, backbone_weights, load_backbone, tag_head
    optimisers, schedules      build_optimizer, sgd, warmup_cosine, learning_rate_factor, and a loss: tag_loss
    flags                      help_formatter, flag_parser, fill_defaults; of tp.py and icmlm.py: add_recipe_flags, check_recipe
    pictures                   draw_attention
    the output folder          cached_arrays (read_arrays, keep_arrays), Run (args.json, metrics.jsonl, checkpoint.pth, result.json), StopSignals

Beside it: language.py (words, tokens, language models), probe.py (labelled images, the SVM probe) and shapes.py (the
built-in data set).
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
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from array import array
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vgg import cfgs, make_layers
from tqdm import tqdm

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def fail(message, everywhere=True):
    """End the program with one line that says what is wrong and what to do.

    everywhere: all processes come here, so that one on each machine speaks for all.
    """
    sys.exit(f"error: {message}" if not everywhere or int(os.environ.get("LOCAL_RANK", 0)) == 0 else 1)


def run(main, get_args):
    """Start a script; Ctrl-C outside the training loop, which minds it itself, is no error to trace."""
    try:
        main(get_args())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:  # the workers ignore SIGTERM: after an error Python would wait for them for ever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()


def say(message):
    """A line for the user, from the first process only, that does not tear the progress bar."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(str(message), file=sys.stdout)
        sys.stdout.flush()


def progress(iterable=None, **kwargs):
    """A tqdm bar on the first process only."""
    return tqdm(iterable, disable=int(os.environ.get("RANK", 0)) != 0, dynamic_ncols=True, **kwargs)


# ------------------------------------------------------------------------------------------ processes and precision


class World(NamedTuple):
    """The place of this process among all: rank in [0, size), and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0


def start_processes():
    """Join the other processes when started by torchrun (NCCL on GPUs, gloo on CPUs); alone otherwise. -> World"""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
    if "RANK" not in os.environ:
        return World(0, 1, torch.device("cuda" if cuda else "cpu"))
    local = int(os.environ["LOCAL_RANK"])
    if cuda and local >= torch.cuda.device_count():
        fail(f"torchrun started more processes than the {torch.cuda.device_count()} GPUs here: lower --nproc_per_node")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # gloo beside NCCL: flags on the host can be shared without waiting for the GPU.
        # Hours, because the others wait while the first one builds labels or probes.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=6))
    return World(dist.get_rank(), dist.get_world_size(), device)


def keep_freed_memory():
    """Let glibc keep what a step frees for the next one: returned to the kernel and zeroed by it anew, it cost a third."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # as size_t: never


def end_processes(world):
    """Part from the other processes: what the first one still has to do (the probe) it does alone."""
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def main_first(world):
    """The first process runs the block before the others do: build a file once, then read it everywhere."""
    if not world.is_main and any_process(world, False):
        sys.exit(1)  # the first process has failed, and has said why
    failed = True
    try:
        yield
        failed = False
    finally:
        if world.is_main:
            any_process(world, failed)


def any_process(world, flag):
    """True on every process when `flag` is true on one. Host memory only: the GPU is not waited for."""
    if world.size == 1:
        return flag
    flag = torch.tensor(int(flag))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def average(world, values):
    """Mean of a tensor over the processes."""
    if world.size > 1:
        dist.all_reduce(values)
    return values / world.size


def choose_amp(device, wish=None):
    """`--amp`: what the user wished, or bf16 where the device computes in it natively and fp32 elsewhere."""
    if wish:
        return wish
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "off"
    return "bf16" if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "off"


def autocast(device, amp):
    return torch.autocast(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp), enabled=amp != "off")


# ------------------------------------------------------------------------------------------ strings and captions


class PackedStrings:
    """Strings in one byte buffer: append and read, nothing else.

    Millions of Python strings cost 50 bytes each beside their letters, and worker processes copy them as soon as
    they touch their reference counts. One buffer and 8 bytes per string stay shared.
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

    def digest(self):
        """A number that differs, as good as surely, for other strings."""
        return zlib.crc32(self.ends, zlib.crc32(self.buffer))

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.buffer[self.ends[i] : self.ends[i + 1]].decode()


class ImageFiles(PackedStrings):
    """Paths of images; `open(i)` gives a PIL image, not yet decoded."""

    def open(self, i):
        return Image.open(self[i])

    def check(self, hint="check --root and the split"):
        """End the program when files are missing. Each folder is listed once: no file is touched by itself."""
        folders, missing = {}, []
        for path in self:
            folder, name = os.path.split(path)
            if folder not in folders:
                folders[folder] = set(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else set()
            if name not in folders[folder]:
                missing.append(path)
        if missing:
            fail(f"{len(missing)} of {len(self)} images are missing, the first is {missing[0]}: {hint}")


class CaptionData:
    """Images, each with captions and tags (either may be empty): what every source is turned into.

    images: ImageFiles or ShapeImages.  captions: all captions, packed; image i has those from first_caption[i] to
    first_caption[i + 1].  tag_names: None when the source knows no tags; tags are indices into it.
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

    def digest(self):
        """A number that differs, as good as surely, for other captions or tags of the images: what is made of them can be kept by it."""
        parts = (self.first_caption, self.tags, self.first_tag, json.dumps(self.tag_names).encode())
        return functools.reduce(lambda number, part: zlib.crc32(part, number), parts, self.captions.digest())

    def tags_of(self, i):
        return list(self.tags[self.first_tag[i] : self.first_tag[i + 1]])

    def select(self, keep, captions_per_image=None, seed=0):
        """The images `keep` (indices), with at most `captions_per_image` captions each, drawn once and for all."""
        selected = CaptionData(type(self.images)(), self.tag_names)
        for i in keep:
            captions = self.captions_of(i)
            if captions_per_image and len(captions) > captions_per_image:
                captions = sample_rng(seed, 0, i).permutation(captions)[:captions_per_image].tolist()
            selected.add(self.images[i], captions, self.tags_of(i))
        return selected


def read_json(path, keys, hint):
    """The JSON in `path`, checked: `keys` maps each top-level list to the keys that all its entries must have."""
    if not os.path.isfile(path):
        fail(f"{path} not found: {hint}")
    if os.path.getsize(path) > 50e6:
        say(f"reading {path}")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        fail(f"{path} is not valid JSON ({error}): is the download complete?")
    for top, wanted in keys.items():
        if not isinstance(content, dict) or not isinstance(content.get(top), list):
            fail(f'{path} lacks the list "{top}": {hint}')
        for n, entry in enumerate(content[top]):
            for key in wanted:
                if not isinstance(entry, dict) or key not in entry:
                    fail(f'{path}: entry {n} of "{top}" lacks "{key}"')
    return content


def iterate_json_list(path, hint):
    """Yield the entries of a file that is one huge JSON list, chunk by chunk (VG's is 700 MB, and several times that as objects)."""
    if not os.path.isfile(path):
        fail(f"{path} not found: {hint}")
    decoder, separator, text, at, n = json.JSONDecoder(), re.compile(r"[,\s]*"), "", 0, 0
    try:
        with open(path, encoding="utf-8") as file:
            if file.read(1) != "[":
                fail(f"{path} is not a JSON list: {hint}")
            while True:
                at = separator.match(text, at).end()
                if text.startswith("]", at):
                    return
                try:
                    entry, at = decoder.raw_decode(text, at)
                except json.JSONDecodeError:  # the chunk ends inside an entry
                    more = file.read(1 << 24)
                    if not more:
                        fail(f"{path} is not valid JSON after entry {n - 1}: is the download complete?")
                    text, at = text[at:] + more, 0
                else:
                    yield entry
                    n += 1
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 after entry {n - 1} ({error}): is the download complete?")


def caption_data(name, root=None, split="train", fraction=1.0, captions_per_image=None, seed=0):
    """Load one split of a captioned data set -> CaptionData.

    name: "shapes", "coco", "vg" or the path of a .jsonl file.  root: the folder of the data (default datasets/<name>;
    for a .jsonl the folder that relative image paths start from, default the file's own).
    fraction, captions_per_image: VirTex Fig. 4; the subset depends on the seed alone.
    """
    if name == "shapes":
        data = built_in_shapes(split)
    elif name == "coco":
        data = coco_data(root or "datasets/coco", split)
    elif name == "vg":
        data = vg_data(root or "datasets/vg", split)
    elif name.endswith(".jsonl"):
        data = jsonl_data(name, root, split)
    else:
        fail(f"--data {name} is unknown: give shapes, coco, vg or the path of a .jsonl file")
    if not len(data):
        fail(f"--data {name}: the split {split} holds no image")
    if fraction < 1 or captions_per_image:
        order = np.random.default_rng(seed).permutation(len(data))
        data = data.select(np.sort(order[: max(1, round(fraction * len(data)))]), captions_per_image, seed)
    if isinstance(data.images, ImageFiles):
        data.images.check("relative paths start from the folder of the .jsonl, or from --root" if name.endswith(".jsonl") else "check --root and the split")
    return data


def built_in_shapes(split):
    import shapes  # only here: a script copied elsewhere with common.py does without it

    return shapes.shapes_data(split)


COCO_LAYOUT = "a COCO folder holds annotations/captions_{split}.json and the images in {split}/; name the splits with --train-split and --val-split"


def coco_data(root, split):
    """annotations/captions_{split}.json, images in {split}/, tags from annotations/instances_{split}.json if there."""
    path = os.path.join(root, "annotations", f"captions_{split}.json")
    content = read_json(path, {"images": ["id", "file_name"], "annotations": ["image_id", "caption"]}, COCO_LAYOUT)
    captions = {image["id"]: [] for image in content["images"]}
    for n, entry in enumerate(content["annotations"]):
        if entry["image_id"] not in captions:
            fail(f'{path}: entry {n} of "annotations" names the unknown image_id {entry["image_id"]}')
        captions[entry["image_id"]].append(str(entry["caption"]).strip())
    tags, tag_names = {}, None
    if os.path.isfile(os.path.join(root, "annotations", f"instances_{split}.json")):
        tags, tag_names, _ = coco_instances(root, split)
    data = CaptionData(ImageFiles(), tag_names)
    for image in content["images"]:
        data.add(os.path.join(root, split, image["file_name"]), captions[image["id"]], tags.get(image["id"], ()))
    return data


def coco_instances(root, split):
    """-> ({image id: sorted category indices}, category names in the order of their ids, {image id: path})"""
    path = os.path.join(root, "annotations", f"instances_{split}.json")
    wanted = {"images": ["id", "file_name"], "annotations": ["image_id", "category_id"], "categories": ["id", "name"]}
    content = read_json(path, wanted, "labels need annotations/instances_{split}.json in a COCO folder, beside the images in {split}/")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    index = {category["id"]: k for k, category in enumerate(categories)}
    present = {image["id"]: set() for image in content["images"]}
    for n, entry in enumerate(content["annotations"]):
        if entry["category_id"] not in index or entry["image_id"] not in present:
            fail(f'{path}: entry {n} of "annotations" names an unknown image_id or category_id')
        present[entry["image_id"]].add(index[entry["category_id"]])
    paths = {image["id"]: os.path.join(root, split, image["file_name"]) for image in content["images"]}
    return {i: sorted(tags) for i, tags in present.items()}, [category["name"] for category in categories], paths


def vg_data(root, split):
    """Visual Genome: each region's phrase is a caption of its image. A fixed split, 5,000 images for validation."""
    hint = "a VG folder holds region_descriptions.json, image_data.json, VG_100K/ and VG_100K_2/"
    if split not in ("train", "val"):
        fail(f'--data vg has the splits "train" and "val", not "{split}"')
    path, paths = os.path.join(root, "image_data.json"), {}
    for n, image in enumerate(iterate_json_list(path, hint)):
        if not isinstance(image, dict) or "image_id" not in image or "url" not in image:
            fail(f'{path}: entry {n} lacks "image_id" or "url"')
        paths[image["image_id"]] = os.path.join(root, *image["url"].split("/")[-2:])
    ids = np.random.default_rng(0).permutation(sorted(paths)).tolist()  # a fixed seed: everybody's split is the same
    num_val = min(5000, len(ids) // 10)
    wanted = set(ids[:num_val] if split == "val" else ids[num_val:])
    path, data = os.path.join(root, "region_descriptions.json"), CaptionData(ImageFiles())
    for n, entry in enumerate(progress(iterate_json_list(path, hint), desc="captions", unit=" images", total=len(paths))):
        if not isinstance(entry, dict) or "id" not in entry or not isinstance(entry.get("regions"), list):
            fail(f'{path}: entry {n} lacks "id" or the list "regions"')
        if not all(isinstance(region, dict) and "phrase" in region for region in entry["regions"]):
            fail(f'{path}: a region of entry {n} lacks "phrase"')
        if entry["id"] in wanted:
            data.add(paths[entry["id"]], [region["phrase"].strip() for region in entry["regions"] if region["phrase"].strip()])
    return data


def jsonl_data(path, root, split):
    """One {"image", "captions", "tags", "split"} per line; all but "image" may be missing.

    Relative images start from `root` (default: the file's folder). When no line names a split, "val" is a fixed
    random twentieth of the lines and any other name is the rest.
    """
    if not os.path.isfile(path):
        fail(f"{path} not found: --data takes the path of a file with one JSON object per line")
    root, index, splits, data = root or os.path.dirname(path), {}, [], CaptionData(ImageFiles(), [])
    with open(path, "rb") as file:
        for n, line in enumerate(progress(file, desc=os.path.basename(path), unit=" lines"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                fail(f"{path}, line {n}: not valid JSON ({error})")
            if not isinstance(row, dict) or not isinstance(row.get("image"), str):
                fail(f'{path}, line {n}: expected {{"image": "photo.jpg", "captions": ["..."]}}')
            if "caption" in row and "captions" not in row:
                fail(f'{path}, line {n}: has "caption", but the key is "captions", a list of strings')
            captions, tags = row.get("captions", []), row.get("tags", [])
            if not all(isinstance(field, list) and all(isinstance(s, str) for s in field) for field in (captions, tags)):
                fail(f'{path}, line {n}: "captions" and "tags" must be lists of strings')
            tags = sorted({index.setdefault(tag, len(index)) for tag in tags})
            data.add(os.path.join(root, row["image"]), [s.strip() for s in captions if s.strip()], tags)
            splits.append(row.get("split"))
    data.tag_names = list(index) or None
    if any(splits) and not all(splits):
        say(f"{path}: {splits.count(None)} lines name no split, while others do: they are left out")
    if splits and split not in splits and any(splits):
        fail(f"{path}: no line is of the split {split}, there are {', '.join(sorted(filter(None, set(splits))))}")
    if not any(splits):
        val = set(np.random.default_rng(0).permutation(len(data))[: max(1, len(data) // 20)].tolist())
        splits = ["val" if i in val else split if split != "val" else "train" for i in range(len(data))]
    return data.select([i for i in range(len(data)) if splits[i] == split])


def filter_captions(data, tokenize):
    """Each image's captions without repetitions and with 3 to 25 tokens [ICMLM Sec. 4, Datasets] -> CaptionData

    tokenize: function caption -> its tokens: words in tp.py, those of the language model in icmlm.py. What was taken out
    is counted in the log.
    """
    kept, repeated, wrong_length = CaptionData(type(data.images)(), data.tag_names), 0, 0
    for i in progress(range(len(data)), desc="captions", unit=" images", leave=False):
        captions = data.captions_of(i)
        different = list(dict.fromkeys(captions))
        fitting = [caption for caption in different if 3 <= len(tokenize(caption)) <= 25]
        repeated, wrong_length = repeated + len(captions) - len(different), wrong_length + len(different) - len(fitting)
        kept.add(data.images[i], fitting, data.tags_of(i))
    say(f"{len(kept.captions)} captions; left out: {repeated} repeated for their image, {wrong_length} of fewer than 3 or more than 25 tokens")
    return kept


# ------------------------------------------------------------------------------------------ from file to batch


def sample_rng(seed, epoch, index):
    """The generator of one sample's augmentation: a function of its arguments alone, whatever process draws from it."""
    return np.random.default_rng([seed, epoch, index])


def random_crop(rng, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3)):
    """-> function (width, height) -> box: a random part of the area and a random aspect, as in Inception training."""

    def crop(width, height):
        for _ in range(10):
            area, aspect = width * height * rng.uniform(*scale), math.exp(rng.uniform(*map(math.log, ratio)))
            w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if w <= width and h <= height:
                x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
                return x, y, x + w, y + h
        return centre_crop(1.0)(width, height)

    return crop


def centre_crop(part):
    """-> function (width, height) -> box: the central square. part 224 / 256 is "resize to 256, centre crop 224"."""

    def crop(width, height):
        side = part * min(width, height)
        x, y = (width - side) / 2, (height - side) / 2
        return x, y, x + side, y + side

    return crop


UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)  # what PIL raises on bad files


def read_crops(images, index, crops, size):
    """Decode one image and cut several crops from it -> (list of (size, size, 3) uint8 arrays, index, unreadable).

    An image that cannot be decoded is replaced by the next: `index` is that of the image returned and `unreadable`
    lists those passed over. The box is cut and resized in one step, and a large JPEG is decoded at a half, a quarter
    or an eighth of its size when that still has more pixels than are wanted.
    """
    unreadable = []
    while len(unreadable) < min(100, len(images)):
        try:
            image = images.open(index)
            if image.getexif().get(0x0112, 1) > 1:  # a phone held upright
                image = ImageOps.exif_transpose(image)
            width, height = image.size
            boxes = [crop(width, height) for crop in crops]
            if image.format == "JPEG":
                smallest = min(right - left for left, _, right, _ in boxes), min(bottom - top for _, top, _, bottom in boxes)
                image.draft("RGB", (math.ceil(size * width / smallest[0]), math.ceil(size * height / smallest[1])))
            if image.mode.startswith("I"):  # 16 bits per pixel: PIL would clip them to white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            sx, sy, image = image.width / width, image.height / height, image.convert("RGB")
            boxes = [(left * sx, top * sy, min(right * sx, image.width), min(bottom * sy, image.height)) for left, top, right, bottom in boxes]
            return [np.array(image.resize((size, size), Image.BILINEAR, box)) for box in boxes], index, unreadable
        except UNREADABLE:
            unreadable.append(index)
            index = (index + 1) % len(images)
    return [np.zeros((size, size, 3), np.uint8) for _ in crops], unreadable[0], unreadable  # more than 1% of the images: the run ends by itself


def read_crop(images, index, crop, size):
    """One crop of one image -> ((size, size, 3) uint8 array, index, unreadable), as read_crops."""
    pixels, index, unreadable = read_crops(images, index, [crop], size)
    return pixels[0], index, unreadable


def photo_sample(images, index, args, rng, training=True):
    """One photo, cropped, jittered and mirrored at random by --crop-min and --colour-jitter (or, not `training`, centred)."""
    crop = random_crop(rng, (args.crop_min, 1.0)) if training else centre_crop(1.0)
    image, index, unreadable = read_crop(images, index, crop, args.image_size)
    jitter, mirrored = np.array([1, 1, 1, 0], np.float32), False
    if training:
        jitter, mirrored = draw_colour_jitter(rng, args.colour_jitter), rng.random() < 0.5
    return {"image": image[:, ::-1] if mirrored else image, "jitter": jitter, "index": index, "mirrored": mirrored, "unreadable": unreadable}


def collate_photos(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), and the list of unreadable images"""
    return {
        "images": torch.from_numpy(np.stack([sample["image"] for sample in samples])),
        "jitter": torch.from_numpy(np.stack([sample["jitter"] for sample in samples])),
        "unreadable": sorted({index for sample in samples for index in sample["unreadable"]}),
    }


class CropView(Dataset):
    """Every image once, by its central square: `part` 224 / 256 is "resize to 256, centre crop 224".

    -> uint8 (size, size, 3), and whether it could be decoded (otherwise the pixels are another image's)
    """

    def __init__(self, images, size, part=224 / 256):
        self.images, self.size, self.part = images, size, part

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        pixels, _, unreadable = read_crop(self.images, i, centre_crop(self.part), self.size)
        return pixels, not unreadable


class InfiniteSampler(Sampler):
    """Yields (epoch, index) for ever, beginning with batch number `start`.

    The epochs' permutations stand one behind the other; batch t is the t-th slice of `batch_size` (global) of them,
    and each rank takes its own share of the slice. Nothing else decides what is seen when.
    """

    def __init__(self, size, batch_size, world, seed, start=0):
        self.size, self.batch_size, self.world, self.seed, self.start = size, batch_size, world, seed, start

    def __iter__(self):
        share, epoch, order = self.batch_size // self.world.size, -1, None
        for position in itertools.count(self.start * self.batch_size):
            if (position % self.batch_size) // share != self.world.rank:
                continue
            if position // self.size != epoch:
                epoch = position // self.size
                order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            yield epoch, int(order[position % self.size])


def make_loader(dataset, sampler, batch_size, workers, collate, device):
    """A DataLoader whose workers leave Ctrl-C and SIGTERM to the main process."""
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=collate, pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals, prefetch_factor=4 if workers else None,
    )  # fmt: skip


def ignore_signals(_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Feed:
    """Batches (dicts of tensors) of a loader on the device; counts the seconds spent waiting for them in `waited`.

    `unreadable` in a batch (list of indices) is taken out and reported to `run`.
    """

    def __init__(self, loader, device, run, images):
        self.device, self.run, self.images = device, run, images
        self.started, self.waited = time.perf_counter(), 0.0
        self.batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        start = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - start
        self.run.report_unreadable(batch.pop("unreadable"), self.images)
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}


# ------------------------------------------------------------------------------------------ on the device


def draw_colour_jitter(rng, strength=1.0, p=0.8):
    """(4,) float32: factors of brightness, contrast and saturation, and hue in turns. Neutral with probability 1 - p.

    At strength 1 the ranges are 1 +- 0.4 and +- 0.1 turns.
    """
    b, c, s, h = (strength * limit for limit in (0.4, 0.4, 0.4, 0.1))
    factors = rng.uniform((1 - b, 1 - c, 1 - s, -h), (1 + b, 1 + c, 1 + s, h))
    return (factors if rng.random() < p else np.array([1, 1, 1, 0])).astype(np.float32)


GREY = np.array([0.299, 0.587, 0.114])
YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
# A rotation by an angle in the plane of I and Q, seen from RGB: HUE[0] + cos HUE[1] + sin HUE[2].
PLANE = np.diag([1, 0, 0]), np.diag([0, 1, 1]), np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0]])
HUE = np.stack([np.linalg.inv(YIQ) @ part @ YIQ for part in PLANE])


@functools.cache
def colour_constants(device):
    """GREY, HUE, and ImageNet's mean and deviation as tensors. Kept: a copy from the host would make the GPU wait."""
    return [torch.tensor(np.asarray(value), dtype=torch.float32, device=device) for value in (GREY, HUE, IMAGENET_MEAN, IMAGENET_STD)]


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size) in channels-last memory, jittered if asked.

    jitter: (B, 4) from draw_colour_jitter. Brightness, contrast, saturation and hue (a rotation in YIQ), in this
    order, are each linear in the colours: together they are one 3x3 matrix and one offset per image, so that the
    whole jitter is a single pass over the pixels. [ours: the order is fixed, and values are clamped once, at the end]
    """
    grey, hue_basis, mean, std = colour_constants(images.device)
    pixels = images.float() / 255
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None, None]  # (B, 1, 1) each
        turn = 2 * math.pi * hue
        rotate = hue_basis[0] + turn.cos() * hue_basis[1] + turn.sin() * hue_basis[2]
        saturate = saturation * torch.eye(3, device=pixels.device) + (1 - saturation) * grey
        red, green, blue = (contrast * brightness * rotate @ saturate)[:, None, None].unbind(-1)  # (B, 1, 1, 3) each
        # Contrast blends with the mean grey, which saturation and hue leave as it is.
        offset = (1 - contrast) * brightness * (pixels.mean((1, 2)) @ grey)[:, None, None]
        pixels = pixels[..., :1] * red + pixels[..., 1:2] * green + pixels[..., 2:] * blue
        pixels = (pixels + offset[..., None]).clamp_(0, 1)
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------------ backbones


class ResNet(torchvision.models.ResNet):
    """torchvision's ResNet without the classifier: (B, 3, H, W) -> (B, channels, H / 32, W / 32), its key names kept."""

    def __init__(self, block, layers, width=64):
        super().__init__(block, layers, width_per_group=width)
        self.channels = self.fc.in_features
        del self.fc

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class VGG16(nn.Module):
    """torchvision's vgg16_bn without the classifier: (B, 3, H, W) -> (B, 512, H / 32, W / 32), its key names kept.

    Batch norm as in DeeperCluster, whose probes the paper uses [ICMLM Sec. 4]. The last three convolutions are probed
    one by one: `maps` gives what they put out, after batch norm and ReLU.
    """

    channels = 512
    LAST_RELU = {"C-11": 36, "C-12": 39, "C-13": 42}  # of each convolution, as indices into `features`

    def __init__(self):
        super().__init__()
        self.features = make_layers(cfgs["D"], batch_norm=True)
        for module in self.features:
            if isinstance(module, nn.Conv2d):  # as torchvision does
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x):
        return self.features(x)

    def maps(self, x):
        """-> {"C-11": (B, 512, H / 16, W / 16), "C-12": ..., "C-13": ...}"""
        kept = {}
        for n, module in enumerate(self.features[:-1]):
            x = module(x)
            kept |= {name: x for name, last in self.LAST_RELU.items() if n == last}
        return kept


BACKBONES = {
    "resnet18": functools.partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet50": functools.partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": functools.partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet50w2x": functools.partial(ResNet, Bottleneck, (3, 4, 6, 3), 128),  # torchvision's wide_resnet50_2
    "vgg16": VGG16,  # torchvision's vgg16_bn
}


def build_backbone(arch):
    """A randomly initialised backbone: images (B, 3, H, W) -> features (B, backbone.channels, H / 32, W / 32)."""
    return BACKBONES[arch]()


PREFIXES = ("queries.image.trunk.0.", "module.encoder_q.", "module.backbone.", "visual.cnn.", "backbone.", "encoder_q.", "module.", "")
CLASSIFIER = re.compile(r"(fc|classifier|head|projection_head|prototypes|projector)\b")


def read_checkpoint(path):
    """torch.load with weights_only, on the CPU; a clear end when there is nothing to load."""
    if not os.path.isfile(path):
        fail(f"{path} not found: expected a checkpoint file")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # DINO's and others keep their arguments beside the weights
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # truncated, not a checkpoint, or one that wants to run code: all end here, with the reason
        known = isinstance(error, (OSError, RuntimeError, EOFError))
        reason = str(error) or type(error).__name__ if known else "it holds more than weights, or is no checkpoint"
        fail(f"{path} cannot be loaded as weights ({reason.splitlines()[0]})")


def backbone_weights(content, path):
    """The ResNet or VGG-16 in a checkpoint of ours, of VirTex, MoCo, SwAV, VICReg, DINO or torchvision -> (arch, state dict).

    content: what read_checkpoint(path) gave. The architecture is recognised by names and shapes. What is left
    under the backbone's prefix must be exactly a classifier or projection head and nothing may be missing, or the program
    ends and names the keys. Keys under other prefixes (text, momentum encoder, queue) are ignored.
    """
    for key in ("model", "state_dict", "teacher"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        fail(f"{path} holds no state dict")
    first = ("conv1.weight", "features.0.weight")  # of ResNet and VGG
    prefix = next((prefix for prefix in PREFIXES if any(prefix + key in content for key in first)), None)
    if prefix is None:
        fail(f"{path} holds no ResNet or VGG: no key ends in {' or '.join(first)}; its first keys are {', '.join(map(str, list(content)[:5]))}")
    state = {key[len(prefix) :]: value for key, value in content.items() if key.startswith(prefix) and isinstance(value, torch.Tensor)}
    for key in [key for key in state if key.endswith("running_mean")]:  # files from before PyTorch 0.4.1 lack the counters
        state.setdefault(key.replace("running_mean", "num_batches_tracked"), torch.tensor(0))
    matches = []
    for arch in BACKBONES:
        with torch.device("meta"):
            wanted = {key: value.shape for key, value in build_backbone(arch).state_dict().items()}
        missing = [key for key in wanted if key not in state or state[key].shape != wanted[key]]
        unexpected = [key for key in state if key not in wanted and not CLASSIFIER.match(key)]
        matches.append((len(missing) + len(unexpected), arch, missing, unexpected))
    wrong, arch, missing, unexpected = min(matches)
    if wrong:
        batch_norm = ": VGG-16 means torchvision's vgg16_bn" if arch == "vgg16" else ""
        fail(f"{path} is no {arch}, the closest match{batch_norm}: missing {missing[:5]}, unexpected {unexpected[:5]}")
    return arch, {key: value for key, value in state.items() if not CLASSIFIER.match(key)}


def all_finite(state_dict):
    return all(value.isfinite().all() for value in state_dict.values())


def load_backbone(arch, path):
    """The backbone in the file `path`, refused when it is not of the architecture `arch` (None: whichever it is)."""
    found, state = backbone_weights(read_checkpoint(path), path)
    if arch and arch != found:
        fail(f"{path} is a {found}, not --arch {arch}")
    if not all_finite(state):
        fail(f"{path} holds weights that are not finite: its training has diverged")
    backbone = build_backbone(found)
    backbone.load_state_dict(state)
    return backbone


def tag_head(arch, channels, num_labels):
    """The module tp of ICMLM's Fig. 2: (B, channels, h, w) -> logits (B, K). Widths, kernels and norms are [ours].

    ResNets: pooling and a 2-layer MLP [ICMLM Sec. 4.3]. VGG-16: 4 convolutions, pooling and a linear layer, in place of
    its fully connected layers [ICMLM Sec. 4, Networks].
    """
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    if arch != "vgg16":
        return nn.Sequential(*pool, nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, num_labels))
    layer = lambda: (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    return nn.Sequential(*layer(), *layer(), *layer(), *layer(), *pool, nn.Linear(channels, num_labels))


# ------------------------------------------------------------------------------------------ optimisers, schedules, losses


def build_optimizer(args, parameters):
    """`--optimizer`: SGD with momentum, or RAdam [ICMLM App. F.1]. parameters: as torch.optim takes them, in groups or not."""
    if args.optimizer == "radam":  # weight decay decoupled, as in the code of RAdam's authors
        return torch.optim.RAdam(parameters, args.lr, weight_decay=args.weight_decay, decoupled_weight_decay=True)
    return sgd(parameters, args.lr, args.weight_decay)


def sgd(parameters, lr, weight_decay):
    """Fused SGD with momentum 0.9, which all three papers use."""
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # uninitialised otherwise when fp16's scaler skips the first step
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def warmup_cosine(iteration, total, warmup):
    """Factor of the learning rate: linear from 0 over `warmup` iterations, then a cosine to 0 at `total`."""
    if iteration < warmup:
        return iteration / warmup
    return 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / max(1, total - warmup)))


def learning_rate_factor(args, iteration, iters):
    """SGD: a cosine; RAdam: a tenth after each of --steps [ICMLM App. F.1]. Both after --warmup."""
    if args.optimizer == "sgd" or iteration < args.warmup * iters:
        return warmup_cosine(iteration, iters, args.warmup * iters)
    return 0.1 ** sum(iteration >= step * iters for step in args.steps)


def tag_loss(logits, labels):
    """Softmax cross-entropy with labels that sum to one [ICMLM Eq. 2]. logits, labels (multi-hot): (B, K) -> scalar"""
    return F.cross_entropy(logits.float(), labels / labels.sum(1, keepdim=True).clamp(min=1))


# ------------------------------------------------------------------------------------------ flags

LABEL_SPLITS = {"shapes": ("train", "val"), "coco": ("train2017", "val2017"), "voc07": ("trainval", "test"), "folder": ("train", "val")}


def help_formatter(defaults, on_shapes=1):
    """A formatter whose --help tells every default. defaults: {flag: values, the first `on_shapes` of them on shapes}, of flags that `fill_defaults` fills in"""

    def told(values):
        words = (" ".join(f"{part:.3g}" for part in value) or "none" if isinstance(value, tuple) else value for value in values)
        return " or ".join(dict.fromkeys(str(word) for word in words if word is not None)) or "none"

    class HelpFormatter(argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            if action.dest in defaults:
                shapes, real = told(defaults[action.dest][:on_shapes]), told(defaults[action.dest][on_shapes:])
                return f"{action.help} (default {shapes if shapes == real else f'{shapes} on shapes, {real} on real data'})"
            silent = action.default in (None, argparse.SUPPRESS) or action.const or "(default" in action.help
            return action.help if silent else f"{action.help} (default %(default)s)"

    return HelpFormatter


def flag_parser(script, description, defaults, on_shapes=1):
    """A parser with the flags that mean the same in every training script. defaults, on_shapes: see help_formatter."""
    parser = argparse.ArgumentParser(description=description, formatter_class=help_formatter(defaults, on_shapes))
    data = parser.add_argument_group("data")
    data.add_argument("--data", default="shapes", help="shapes (built in), coco, vg, or the path of a .jsonl file")
    data.add_argument("--root", help="folder of the data set (default datasets/<name>; for a .jsonl its own folder)")
    data.add_argument("--train-split", help="name of the training split (default train; train2017 for coco)")
    data.add_argument("--val-split", help="name of the validation split (default val; val2017 for coco)")
    data.add_argument("--fraction", type=float, default=1.0, help="train on this part of the images [VirTex Fig. 4]")
    data.add_argument("--captions-per-image", type=int, help="train on this many captions of each image [VirTex Fig. 4]")
    data.add_argument("--image-size", type=int, help="side of the training crops; the cost grows with its square")
    data.add_argument("--workers", type=int, default=min(8, os.cpu_count()), help="data processes per training process; more when data_wait in metrics.jsonl is above 0.05")

    run = parser.add_argument_group("run")
    run.add_argument("--output", default=f"runs/{script}", help="folder of the results; the same command started again goes on from its checkpoint")
    run.add_argument("--fresh", action="store_true", help="forget what --output holds and start over")
    run.add_argument("--seed", type=int, default=0, help="of the initialisation, the order of samples, augmentation and dropout")
    run.add_argument("--amp", choices=("bf16", "fp16", "off"), help="precision (default bf16 where the device computes in it; fp16 for GPUs before Ampere)")
    run.add_argument("--compile", action="store_true", help="torch.compile the model: slower to start, faster on GPUs")
    run.add_argument("--log-every", type=int, help="iterations between lines of metrics.jsonl")
    run.add_argument("--checkpoint-every", type=int, help="iterations between checkpoints: what a killed run can lose")

    probe = parser.add_argument_group("probe (SVM on frozen features, eval_linear.py's svm-virtex)")
    probe.add_argument("--probe-data", choices=sorted(LABEL_SPLITS), help="labelled images to probe on (default: the tags of --data when it has some)")
    probe.add_argument("--probe-root", help="folder of --probe-data")
    probe.add_argument("--probe-images", type=int, help="probe on at most this many training images")
    probe.add_argument("--probe-every", type=int, default=0, help="probe every N iterations on a held-out fifth of the probe's training images and keep the best as backbone_best.pth [Sec. 3, early stopping]")
    return parser


def fill_defaults(args, defaults, scaled=()):
    """Give every flag that the user left out its default, and refuse what cannot be.

    defaults: {flag: (on shapes, on real data)}.  scaled: flags of learning rates, which belong to the default batch
    size and grow linearly with it; what was chosen is printed.
    """
    if args.iters and args.epochs:
        fail("give --iters or --epochs, not both")
    if args.probe_root and not args.probe_data:
        fail("--probe-root goes with --probe-data")
    if not 0 <= args.seed < 2**23:
        fail(f"--seed {args.seed} must be from 0 to {2**23 - 1}")
    column = 0 if args.data == "shapes" else 1
    factor = (args.batch_size or defaults["batch_size"][column]) / defaults["batch_size"][column]
    for flag, values in defaults.items():
        if getattr(args, flag) is None:
            setattr(args, flag, values[column] * factor if flag in scaled else values[column])
            if flag in scaled and factor != 1:
                chosen, usual = f"--{flag.replace('_', '-')} {getattr(args, flag):g}", defaults["batch_size"][column]
                say(f"{chosen}: {values[column]} at batch {usual}, scaled linearly to batch {args.batch_size}")
    if args.train_split is None:
        args.train_split = "train2017" if args.data == "coco" else "train"
    if args.val_split is None:
        args.val_split = "val2017" if args.data == "coco" else "val"
    check_batch_size(args.batch_size)
    if not 0 < args.fraction <= 1:
        fail(f"--fraction {args.fraction} must be above 0 and at most 1")
    for flag in ("captions_per_image", "epochs", "probe_images"):
        if getattr(args, flag) is not None and not 0 < getattr(args, flag) < math.inf:
            fail(f"--{flag.replace('_', '-')} must be above 0")
    for flag, least in {"image_size": 1, "iters": 1, "log_every": 1, "checkpoint_every": 1, "workers": 0, "probe_every": 0}.items():
        if getattr(args, flag) is not None and getattr(args, flag) < least:
            fail(f"--{flag.replace('_', '-')} must be at least {least}")
    return args


def check_batch_size(batch_size):
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if batch_size < 1 or batch_size % processes:
        fail(f"--batch-size {batch_size} cannot be divided over {processes} processes: it is the global batch")


def add_recipe_flags(optim):
    """The flags of optimisation and augmentation that tp.py and icmlm.py have in common [ICMLM App. F.1]."""
    optim.add_argument("--optimizer", choices=("sgd", "radam"), help="sgd with a cosine for ResNets, radam with --steps for VGG-16 [App. F.1]")
    optim.add_argument("--lr", type=float, help="initial learning rate; lower it when the loss is not finite; 0.03 suits small batches, too [App. F.1]")
    optim.add_argument("--warmup", type=float, default=0.0, help="share of the run in which the learning rate rises; 0.02 helps large batches [ours]")
    optim.add_argument("--steps", type=float, nargs="*", help="radam: shares of the run after which the learning rate falls to a tenth [App. F.1]")
    optim.add_argument("--weight-decay", type=float, help="raise it when few images are learned by heart [App. F.1]")
    optim.add_argument("--crop-min", type=float, help="smallest part of a photo that a crop may show; raise it when captions speak of the whole [ours]")
    optim.add_argument("--colour-jitter", type=float, help="strength of the colour jitter; lower it when labels name colours, 0 for none [ours]")


def check_recipe(args, given, optimizer):
    """Refuse optimisation flags that cannot be or do not belong together. given: the flags that the user gave.

    --steps belong to RAdam; another optimiser than the recipe's, `optimizer`, needs its own --lr.
    """
    if args.optimizer == "sgd":
        if "steps" in given:
            fail("--steps goes with --optimizer radam: sgd follows a cosine")
        args.steps = []
    if args.optimizer != optimizer and "lr" not in given:
        fail(f"--optimizer {args.optimizer} needs its --lr: the default belongs to {optimizer}")
    args.steps = list(args.steps)
    if not args.lr > 0 or not args.weight_decay >= 0 or not 0 <= args.warmup < 1 or any(not 0 < step < 1 for step in args.steps):
        fail("--lr must be above 0, --weight-decay at least 0; --warmup and --steps are shares of the run, between 0 and 1")
    if not 0 < args.crop_min <= 1 or not 0 <= args.colour_jitter <= 1:
        fail("--crop-min must be in (0, 1], --colour-jitter in [0, 1]")


# ------------------------------------------------------------------------------------------ pictures


def draw_attention(image, caption, words, path, side=192):
    """One picture: the photo, then the photo under the attention map of each word, bicubically enlarged [Sec. 4.4].

    words: [(word, (h, w) not negative), ...]. Brightness is in proportion to the map's maximum, so that an even map looks even.
    """
    photo, font = image.resize((side, side), Image.BICUBIC), ImageFont.load_default(15)
    columns = min(6, len(words) + 1)
    rows, width = math.ceil((len(words) + 1) / columns), columns * (side + 8) + 8
    lines = textwrap.wrap(caption, width // 8)
    top = 16 + 18 * len(lines)
    sheet = Image.new("RGB", (width, rows * (side + 28) + top), "white")
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((8, 8), "\n".join(lines), "black", font)
    for n, (word, attention) in enumerate([("", None), *words]):
        x, y = 8 + n % columns * (side + 8), top + n // columns * (side + 28)
        tile = np.asarray(photo, np.float32)
        if attention is not None:
            heat = F.interpolate((attention / attention.max())[None, None].float().cpu(), (side, side), mode="bicubic", align_corners=False)
            heat = heat[0, 0].clamp(0, 1).numpy()[..., None]
            tile = tile * (0.35 + 0.25 * heat) + heat * np.array([102, 70, 0])  # dim the photo, glow where it looks
        sheet.paste(Image.fromarray(tile.clip(0, 255).astype(np.uint8)), (x, y))
        draw.text((x + side / 2, y + side + 4), word, "black", font, anchor="ma")
    sheet.save(path)


# ------------------------------------------------------------------------------------------ the output folder

RUN_FILES = ("args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "backbone_best.pth", "result.json", "skipped.txt")
# Flags that may differ when a run goes on: they change where and how fast it runs, not what it learns.
FREE_FLAGS = ("output", "root", "fresh", "workers", "amp", "compile", "log_every", "checkpoint_every", "probe_root", "backtranslations", "require_tags")


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
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        fail(f"{path} cannot be written ({reason.strerror}); what it held before is kept: make room and start the same command again", everywhere=False)


def append_line(path, line):
    try:
        with open(path, "a") as file:
            file.write(line + "\n")
    except OSError as error:
        fail(f"{path} cannot be written ({error.strerror}): make room and start the same command again", everywhere=False)


def write_json(path, content):
    write_file(path, lambda file: file.write(json.dumps(content, indent=2).encode() + b"\n"))


def cached_arrays(path, made_of, build):
    """The dict of arrays that build() gives, kept in the file `path` and found there again while `made_of` (JSON) is the same."""
    arrays = read_arrays(path, made_of)
    if arrays is None:
        arrays = build()
        keep_arrays(path, made_of, arrays)
    return arrays


def read_arrays(path, made_of):
    """The arrays that `path` keeps, or None when there are none, they were made of something else, or the file is damaged."""
    if path.exists():
        try:
            with np.load(path) as file:
                if file["made_of"] == json.dumps(made_of):
                    return {name: file[name] for name in file.files}
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            say(f"{path} is damaged ({error}): it is made again")
    return None


def keep_arrays(path, made_of, arrays):
    write_file(path, lambda file: np.savez(file, made_of=json.dumps(made_of), **arrays))


class Run:
    """The output folder of one training run (see the README): what is kept, found again and reported."""

    def __init__(self, args, script, world):
        self.args, self.script, self.world, self.folder = args, script, world, Path(args.output)
        self.unreadable, self.first_iteration, self.last_log, self.data = set(), 0, None, None

    def begin(self):
        """-> the checkpoint to go on from, or None. Ends the program when the folder holds an ended or another run."""
        with main_first(self.world):
            if self.world.is_main:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    fail(f"--output {self.folder} cannot be made ({error.strerror})")
                for name in RUN_FILES if self.args.fresh else ():
                    (self.folder / name).unlink(missing_ok=True)
            path = self.folder / "checkpoint.pth"
            checkpoint = read_checkpoint(path) if path.exists() else None
            if checkpoint:
                self.check_same_run(checkpoint)
                if (self.folder / "result.json").exists():
                    say(f"{self.folder} holds a run that has ended: see result.json there. --fresh starts over.")
                    sys.exit(0)
                say(f"{self.folder} holds a checkpoint: going on from iteration {checkpoint['iteration']}")
                self.first_iteration = checkpoint["iteration"]
            if self.world.is_main:
                (self.folder / "result.json").unlink(missing_ok=True)
                self.keep_metrics_until(self.first_iteration)
                self.write_args()
        return checkpoint

    def same_data(self, checkpoint, *data):
        """Refuse to go on with other captions or tags than those that the run began with."""
        self.data = [part.digest() for part in data]
        if checkpoint and checkpoint.get("data", self.data) != self.data:
            fail(f"{self.folder} holds a run on other captions or tags than --data gives now: choose another --output, or --fresh to start over")

    def restore(self, checkpoint, parts):
        """Load the states of `parts` {name: module, optimiser...} -> the iteration, and the best of early stopping"""
        if not checkpoint:
            return 0, None
        for name, part in parts.items():
            if checkpoint[name]:  # a scaler that was not in use has no state
                part.load_state_dict(checkpoint[name])
        return checkpoint["iteration"], checkpoint["best"]

    def check_same_run(self, checkpoint):
        if checkpoint.get("script") != self.script:
            fail(f"{self.folder} holds a run of {checkpoint.get('script', 'another program')}.py: choose another --output")
        for flag, value in vars(self.args).items():
            before = checkpoint["args"].get(flag)
            if flag not in FREE_FLAGS and before != value:
                fail(f"{self.folder} holds a run with --{flag.replace('_', '-')} {before}, not {value}: choose another --output, or --fresh to start over")

    def keep_metrics_until(self, iteration):
        """Drop the lines that a killed run wrote after its last checkpoint: they will be written again."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["iteration"] <= iteration]
        write_file(path, lambda file: file.write("".join(kept).encode()))

    def write_args(self):
        git = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "torchvision": torchvision.__version__, "numpy": np.__version__}
        content = {"command": [sys.executable, *sys.argv], "versions": versions, "processes": self.world.size}
        if git.returncode == 0:
            content["git_commit"] = git.stdout.strip()
        write_json(self.folder / "args.json", {**vars(self.args), **content})
        say(" ".join(f"{key}={value}" for key, value in vars(self.args).items() if value is not None))

    def log(self, iteration, feed, **values):
        """One line of metrics.jsonl: `values` (floats) with the speed and the wait for data since the last line."""
        now, (before, first, waited) = time.perf_counter(), self.last_log or (feed.started, self.first_iteration, 0.0)
        speed = (iteration - first) * self.args.batch_size / (now - before)
        values |= {"images_per_s": speed, "data_wait": (feed.waited - waited) / (now - before)}
        self.last_log = now, iteration, feed.waited
        if self.world.is_main:
            line = json.dumps({"iteration": iteration, **{k: float(f"{v:.6g}") for k, v in values.items()}})
            append_line(self.folder / "metrics.jsonl", line)

    def check_finite(self, iteration, values):
        """values: {name: float}; ends the run, before anything is written, when one of them is not a number."""
        for name, value in values.items():
            if not math.isfinite(value):
                kept = "checkpoint.pth keeps the last good state" if (self.folder / "checkpoint.pth").exists() else "no checkpoint was written yet"
                fail(f"the {name} is {value} at iteration {iteration}; {kept}. Try a lower learning rate, a longer --warmup, or --amp off")

    def save(self, iteration, **state):
        """Write checkpoint.pth, unless the last step has made a weight infinite: then the one before is kept."""
        if self.world.is_main:
            if not all_finite(state.get("model", {})):
                self.check_finite(iteration, {"model": math.nan})
            state = {"script": self.script, "args": vars(self.args), "data": self.data, "iteration": iteration, **state}
            write_file(self.folder / "checkpoint.pth", lambda file: torch.save(state, file))

    def save_weights(self, name, state_dict):
        """A plain state dict beside the checkpoint, on the CPU and in PyTorch's usual memory format."""
        if self.world.is_main:
            plain = {key: value.detach().cpu().contiguous() for key, value in state_dict.items()}
            write_file(self.folder / name, lambda file: torch.save(plain, file))

    def report_unreadable(self, indices, images):
        """Name each undecodable image once, in the log and in skipped.txt; end the run when they are more than 1%."""
        for index in set(indices) - self.unreadable:
            self.unreadable.add(index)
            path = self.folder / "skipped.txt"
            named = set(path.read_text().splitlines()) if path.exists() else set()
            if images[index] not in named:
                named.add(images[index])
                tqdm.write(f"cannot decode {images[index]}: the next image takes its place", file=sys.stdout)
                append_line(path, images[index])
            if len(named) > 0.01 * len(images):
                fail(f"{len(named)} of {len(images)} images cannot be decoded, and at most 1% may be: repair or remove those listed in {path}, which are those met so far", everywhere=False)

    def finish(self, **result):
        if self.world.is_main:
            write_json(self.folder / "result.json", result)


class StopSignals:
    """Within the block, SIGTERM and the first Ctrl-C only set `number`: the loop leaves when its step is done."""

    def __enter__(self):
        self.number = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame):
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
