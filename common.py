"""What the scripts share: captioned photos, batches, backbones, processes, and what a run writes"""

import argparse
import difflib
import importlib
import io
import json
import math
import multiprocessing
import operator
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import unicodedata
import zlib
from collections import OrderedDict, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm


def fail(message):
    """Exit with one line instead of a traceback, for what the user can mend."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all fail in the same way, torchrun ends the others before they print
    sys.exit(f"error: {message}")


EXTRAS = Path(__file__).with_name("extras")


def extra(name):
    """Import extras/{name}.py, which a copied script may lack."""
    if not EXTRAS.is_dir():
        fail("the folder extras is missing: copy it beside the script")
    return importlib.import_module(f"extras.{name}")


# ------------------------------------------------------------------------------ captioned photos

STRINGS = "T"  # numpy's dtype of strings of any length, in one block of memory
JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} on each line'


@dataclass
class StringLists:
    """N lists of strings in one block of memory, which worker processes share"""

    joined: np.ndarray  # (N,) of strings, each a list that is joined by newlines

    def __getitem__(self, key):
        chosen = self.joined[key]
        return chosen.splitlines() if isinstance(chosen, str) else StringLists(chosen)


def lists(rows):
    """Lists of strings without line breaks (see one_line) -> StringLists, without empty strings"""
    return StringLists(np.array(["\n".join(filter(None, row)) for row in rows], STRINGS))


def open_photo(path):
    """-> PIL image, not yet decoded. Given a path, PIL would read some rotated TIFFs wrongly."""
    return Image.open(io.BytesIO(Path(path).read_bytes()))


@dataclass
class CaptionData:
    """What every source gives: photos, each with captions and tags, either of which may be empty"""

    images: np.ndarray  # (N,) of paths, or of what `open` takes instead
    captions: StringLists  # captions[i]: a list of strings
    tags: StringLists  # tags[i]: a list of some of tag_names
    tagged: np.ndarray  # (N,) bool: are the tags known? If so, [] means that none fits
    tag_names: list  # of all splits; [] if there are no tags, or if they were not asked for
    open: callable = open_photo  # images[i] -> PIL image, not yet decoded

    def __len__(self):
        return len(self.images)

    def all_captions(self):
        return [caption for captions in self.captions for caption in captions]

    def select(self, keep):
        """-> CaptionData of the photos with the indices `keep`"""
        columns = "images", "captions", "tags", "tagged"
        return replace(self, **{name: getattr(self, name)[keep] for name in columns})

    def checksum(self):
        """It differs if a photo's name, a caption, a tag, or the order of tag_names differs."""
        captions, tags = self.captions.joined, self.tags.joined
        return fingerprint(self.images, captions, tags, self.tagged, self.tag_names)

    def captioned(self):
        """-> CaptionData of the photos that have a caption"""
        keep = [n for n, captions in enumerate(self.captions) if captions]
        if not keep:
            fail(f"no photo has a caption. A .jsonl has {JSONL}")
        if len(keep) == len(self):
            return self
        print_main(f"{len(self) - len(keep)} of {len(self)} photos have no caption: left out")
        return self.select(keep)


def caption_data(name, root=None, splits=("train", "val"), tags=False):
    """-> CaptionData of each of the splits of --data.  tags: whether COCO's are read, too"""
    if name == "coco":
        return read_photos(coco_photos, splits, root or "datasets/coco", tags)
    if name.endswith(".jsonl"):
        return read_photos(jsonl_photos, splits, root or os.path.dirname(name), name)
    return extra("sources").caption_data(name, root, splits)  # shapes, vg, shards


def read_photos(read, splits, *given):
    """-> CaptionData of each split

    read(splits, *given) yields for each split [(path, captions, tags or None)] and names of tags
    """
    data = [None] * len(splits)
    if is_main():  # one process reads, because the annotations of COCO take 3 GB while it does
        found = read(splits, *given)
        data = [to_caption_data(split, *next(found)) for split in splits]
        names = dict.fromkeys(name for part in data for name in part.tag_names)  # of all splits
        data = [replace(part, tag_names=list(names)) for part in data]
    if world_size() > 1:
        dist.broadcast_object_list(data)
    return data


def to_caption_data(split, photos, tag_names):
    if not photos:
        fail(f"no photo belongs to the split {split}: see --train-split and --val-split")
    missing = [path for path, *_ in photos if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(photos)} photos of {split} are missing: {missing[:3]}. See "
             "--root, --train-split and --val-split")
    paths, captions, tags = zip(*photos)
    empty = sum(row.count("") for row in captions)
    if empty:
        print_main(f"{empty} captions of {split} are empty: left out")
    tagged = np.array([row is not None for row in tags])
    tags = lists(dict.fromkeys(row or ()) for row in tags)
    return CaptionData(np.array(paths, STRINGS), lists(captions), tags, tagged, tag_names)


def read_json(path):
    if not os.path.isfile(path):
        fail(f"there is no {path}: see --root, --train-split and --val-split, or download it "
             "(docs/running.md)")
    return parse_json(Path(path).read_bytes(), path)


def parse_json(text, path):
    try:
        return json.loads(text)
    except ValueError as error:  # a damaged file
        fail(f"{path} is not valid JSON: {error}")


def one_line(text):
    """NFC, with single spaces and no line break"""
    text = text.encode(errors="ignore").decode()  # without halves of surrogate pairs
    return " ".join(unicodedata.normalize("NFC", text).split())


def texts(values):
    """A list of strings -> the same, each on one line; None -> None"""
    if not isinstance(values, list | None) or not all(isinstance(x, str) for x in values or ()):
        raise ValueError(f"{values!r} is not a list of texts")
    return values and [one_line(value) for value in values]


def coco_photos(splits, root, with_tags):
    """From annotations/captions_{split}.json; tags are categories of instances_{split}.json"""
    for split in splits:
        instances = f"{root}/annotations/instances_{split}.json"
        captions, tags, names = defaultdict(list), defaultdict(list), {}
        try:
            content = read_json(f"{root}/annotations/captions_{split}.json")
            files = {row["id"]: row["file_name"] for row in content["images"]}
            for row in content["annotations"]:
                captions[row["image_id"]].append(one_line(row["caption"]))
            repeated = len(content["images"]) - len(files)
            if with_tags and os.path.exists(instances):
                content = read_json(instances)
                names = {row["id"]: one_line(row["name"]) for row in content["categories"]}
                for row in content["annotations"]:
                    tags[row["image_id"]].append(names[row["category_id"]])
        except Exception as error:
            fail(f"annotations/*_{split}.json of {root} are not in the layout of COCO: {error!r}")
        strays = [n for n in {**captions, **tags} if n not in files]  # 12 is not "12"
        if repeated or strays:
            print_main(f"{root}: {repeated} images of {split} are listed again; annotations of "
                       f"{len(strays)} ids are left out, which no image has: {strays[:3]}")
        photos = [(os.path.join(root, split, files[n]), captions[n], tags[n]) for n in files]
        yield photos, list(dict.fromkeys(names[n] for n in sorted(names)))


def jsonl_photos(splits, root, file):
    """One {"image", "captions", "tags", "split"} per line, of which only "image" is needed. Paths
    start from `root`. If no line has a split, the first, 21st, 41st... belong to val.
    """
    if not os.path.isfile(file):
        fail(f"there is no file {file}: see --data")
    photos, named = defaultdict(list), False  # of each split; does a line have a split?
    tag_names, unread, paths = {}, {}, set()  # the first two are dictionaries to keep the order
    number = 0
    try:
        for number, line in enumerate(open(file, "rb"), 1):
            if not line.strip():
                continue
            content = json.loads(line)
            if "image" not in content or "caption" in content:
                raise ValueError('it needs "image", and "captions" instead of "caption"')
            path = os.path.abspath(os.path.join(root, content.pop("image")))
            if path in paths:
                raise ValueError(f"{path} is on an earlier line, too: join the two")
            captions = texts(content.pop("captions", None)) or []
            tags = texts(content.pop("tags", None))
            split = content.pop("split", None)
            [split] = texts(["" if split is None else split])
            photos[split or "train"].append((path, captions, tags))
            tag_names |= dict.fromkeys(filter(None, tags or ()))
            paths.add(path)
            named = named or split != ""
            unread |= content
    except Exception as error:  # not UTF-8, not JSON, no "image", wrong types
        fail(f"{file}, line {number}: {str(error) or type(error).__name__}. Expected, in UTF-8: "
             f"{JSONL}. tools/to_jsonl.py converts other files")
    if not named:
        rows = photos["train"]
        photos = {"train": [row for n, row in enumerate(rows) if n % 20], "val": rows[::20]}
    listed = ", ".join(f"{len(rows):,} photos in {split}" for split, rows in photos.items())
    more = f"; keys that are not read: {', '.join(unread)}" if unread else ""
    print_main(f"{file}: {listed}{more}")
    for split in splits:
        yield photos.get(split), list(tag_names)


def fingerprint(names, *columns):
    """A checksum of photos' names, without folders, and of columns (captions, tags, labels)"""
    names = [os.path.basename(str(name)) for name in names]
    total = zlib.crc32("\0".join(names).encode())
    for column in columns:
        total = zlib.crc32("\0".join(map(str, column)).encode(), total)
    return total


OTHER_SIDE = {"left": "right", "Left": "Right", "LEFT": "RIGHT"}
OTHER_SIDE |= {other: side for side, other in OTHER_SIDE.items()}
SIDE = re.compile(rf"(?<![^\W_])({'|'.join(OTHER_SIDE)})(?![^\W_])")


def swap_left_right(text):
    """The text of the mirrored photo: left and right are swapped as whole words, also between
    underscores (turn_left), and their capitals stay. [ours]
    """
    return SIDE.sub(lambda word: OTHER_SIDE[word[0]], text)


def mirrored(names):
    """For each of the labels the index of the one that it becomes in a mirrored photo -> (N,)

    It is the one with left and right swapped; if none is exactly that, also within words and in
    other capitals (leftHand, Righthand). A label without a counterpart stays. [ours]
    """
    names = list(map(str, names))  # iNaturalist's are numbers
    lower = [name.lower() for name in names]
    becomes = np.arange(len(names))
    alone = []
    for k, name in enumerate(names):
        other = swap_left_right(name)
        inside = re.sub("left|right", lambda side: OTHER_SIDE[side[0]], lower[k])
        if other != name and other in names:
            becomes[k] = names.index(other)
        elif inside != lower[k] and lower.count(inside) == lower.count(lower[k]) == 1:
            becomes[k] = lower.index(inside)
        elif other != name:
            alone.append(name)
    swapped = [name for k, name in enumerate(names) if becomes[k] != k]
    for what, found in (("change sides", swapped), ("stay: the other side is missing", alone)):
        if found and is_main():
            report_once(f"in mirrored photos {len(found)} labels {what}: {', '.join(found[:2])}")
    return becomes


# ----------------------------------------------------------------------------- photos to batches

NO_JITTER = np.float32([1, 1, 1, 0])  # factors of brightness, contrast and saturation; hue
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])  # of ImageNet
report_once = cache(tqdm.write)  # once per process: each worker of a DataLoader has its own


class Unreadable(Exception):
    """A photo that cannot be decoded; the message is its path and the reason."""


@dataclass
class Photos:
    """The base of the scripts' data sets, which have sample(index, rng) -> dict. In training a key
    is (seed, epoch, index), which seeds rng; in validation it is an index, and rng is None.
    """

    data: CaptionData  # or similar
    args: argparse.Namespace  # image_size, crop_min, colour_jitter

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        """The sample, or the next one whose photo can be decoded"""
        rng = np.random.default_rng(key) if isinstance(key, tuple) else None
        index = key[-1] if rng else key
        for candidate in range(index, index + 1000):  # in icmlm.py, many in a row share a photo
            try:
                return self.sample(candidate % len(self), rng)
            except Unreadable as error:
                report_once(f"cannot decode {error}: the next photo is used")
        raise Unreadable("a thousand samples in a row cannot be decoded: see above")

    def photo(self, index, rng):
        """-> {"image": uint8 (size, size, 3), "jitter": (4,) for `augment`}, was it flipped"""
        crop = partial(random_crop, rng, self.args.crop_min) if rng else centre_crop
        [image] = read_crops(self.data, index, [crop], self.args.image_size)
        jitter = colour_jitter(rng, self.args.colour_jitter) if rng else NO_JITTER
        flipped = rng and rng.random() < 0.5
        image = torch.from_numpy(image)  # it flips in a fifth of numpy's time
        return {"image": image.flip(1) if flipped else image, "jitter": jitter}, flipped


def read_crops(data, index, crops, size):
    """Decode a photo once, and cut several crops from it -> list of uint8 (size, size, 3)
    crops: functions of (width, height) -> two corners.  Raises Unreadable. A large JPEG is decoded
    at 1/2, 1/4 or 1/8 of its size if that suffices. Corners are rounded to whole pixels, as in
    torchvision. Resizing is antialiased, unlike VirTex [ours].
    """
    try:
        image = data.open(data.images[index])
        full_size = np.array(image.size)
        boxes = np.array([crop(full_size) for crop in crops])  # (N, 2, 2)
        smallest = np.ptp(boxes, 1).min(0)  # box's width and height, in pixels
        image.draft("RGB", [*np.ceil(size * full_size / smallest)])
        image = to_rgb(image)
        boxes = np.rint(boxes * (image.size / full_size)).astype(int)  # draft may have shrunk it
        boxes[:, 0] = np.minimum(boxes[:, 0], np.array(image.size) - 1)  # a pixel at least
        boxes[:, 1] = np.maximum(boxes[:, 1], boxes[:, 0] + 1)
        cut = [image.crop(corners) for corners in boxes.reshape(-1, 4).tolist()]
        for crop in cut:
            ImageOps.exif_transpose(crop, in_place=True)  # as people see them
        return [resize(crop, size) for crop in cut]
    except UnidentifiedImageError:
        raise Unreadable(f"{data.images[index]} (it is not an image that PIL can read)")
    except Exception as error:  # PIL's decoders raise a dozen kinds
        raise Unreadable(f"{data.images[index]} ({str(error) or type(error).__name__})")


def to_rgb(image):
    """PIL image -> RGB: 16-bit greys are scaled from their own range, transparency is white"""
    info = image.info  # with EXIF's orientation
    if image.mode == "F":
        raise ValueError("its pixels are floats: convert it to 8 bits, with a range of your choice")
    if image.mode[0] == "I":
        values = np.asarray(image)
        low, high = np.percentile(values, [0.1, 99.9])  # without a few broken pixels
        values = 255 * (values.clip(low, high) - low) / max(high - low, 1)
        if image.format == "TIFF" and image.tag_v2.get(262) == 0:
            values = 255 - values  # low values are white, as in X-rays: PIL says so of 8 bits only
        image = Image.fromarray(values.round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":  # an RGB image would be copied
        image = image.convert("RGB")
    image.info = info
    return image


def resize(image, size):
    """RGB PIL image -> uint8 (size, size, 3), antialiased, in less than half of PIL's time

    Values are within a level of PIL's; of 48 million, two were two levels off.
    """
    pixels = torch.from_numpy(np.array(image)).movedim(2, 0)[None]  # (1, 3, height, width)
    pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return pixels[0].movedim(0, 2).numpy()


def random_crop(rng, min_area, size):
    """A box of random area (a fraction in [min_area, 1]) and aspect ratio, as for Inception"""
    for _ in range(10):
        area = size.prod() * rng.uniform(min_area, 1.0)
        aspect = (4 / 3) ** rng.uniform(-1, 1)
        box = np.sqrt([area * aspect, area / aspect])  # width and height
        if (box <= size).all():
            corner = rng.uniform(0, size - box)
            return corner, corner + box
    # None has fit. As in torchvision: the largest central box with an aspect ratio of 3/4 to 4/3.
    box = np.minimum(size, 4 / 3 * size[::-1])
    corner = (size - box) / 2
    return corner, corner + box


def centre_crop(size, side_fraction=1.0):
    """The central square; side_fraction 224 / 256 is "resize to 256, then centre crop 224"."""
    side = side_fraction * min(size)
    corner = (size - side) / 2
    return corner, corner + side


def colour_jitter(rng, strength):
    """-> factors of brightness, contrast and saturation, hue rotation in turns: (4,) float32"""
    limits = strength * np.array([0.4, 0.4, 0.4, 0.1])
    factors = rng.uniform(NO_JITTER - limits, NO_JITTER + limits)
    return np.float32(factors) if rng.random() < 0.8 else NO_JITTER  # a fifth stay as they are


def infinite_sampler(size, batch_size, seed, start=0):
    """Yield (seed, epoch, index) forever: this process's share of each batch, from number `start`
    on. Batch t is the t-th slice of the epochs' permutations, which depend only on the seed.
    """
    position, per_process, process = start * batch_size, batch_size // world_size(), rank()
    while True:
        epoch, done = divmod(position, size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        for index in order[done:]:
            if position % batch_size // per_process == process:  # is it in our slice of the batch?
                yield seed, epoch, index
            position += 1


def train_batches(dataset, collate, args, device, done):
    """Yield micro-batches on the device forever, --accumulate for each iteration after `done`.
    Torch is seeded for each, by --seed and its number and process, so that dropout resumes, too.
    """
    size = args.batch_size // world_size() // args.accumulate
    sampler = infinite_sampler(len(dataset), args.batch_size, args.seed, done)
    batches = load_batches(dataset, collate, args, device, size, sampler)
    for number, batch in enumerate(batches, (done + 1) * args.accumulate):
        torch.manual_seed((args.seed << 40) % 2**64 + number * world_size() + rank())
        yield batch


def load_batches(dataset, collate, args, device, batch_size=64, sampler=None):
    """Yield batches on the device, without a sampler in one pass over the photos, in order"""
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=args.workers, collate_fn=collate,
        pin_memory=device.type == "cuda",
    )
    try:
        for batch in loader if sampler else progress(loader, desc="validation", leave=False):
            yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}
    except Unreadable:  # see Photos; the reasons are printed
        fail("a thousand samples in a row cannot be decoded: see above")


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size), channels-last in memory

    jitter: (B, 4) from colour_jitter, applied in the colour space YIQ: Y is grey, I and Q are
    colours. [ours: YIQ, the order, one clamp at the end]
    """
    size = images.shape[1:3]
    to_grey, colour_parts, mean, std = constants_on(images.device)
    pixels = images.flatten(1, 2) / 255  # (B, size * size, 3)
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None]  # (B, 1) each
        # Contrast scales grey and colours, saturation scales the colours, hue rotates their plane.
        colours, angle = contrast * saturation, math.tau * hue
        weights = torch.cat([contrast, colours * angle.cos(), colours * angle.sin()], 1)  # (B, 3)
        matrices = (brightness * weights @ colour_parts.flatten(1)).unflatten(1, (3, 3))  # (B, ...)
        # Contrast mixes grey, Y, with its mean: contrast * Y + (1 - contrast) * mean(Y).
        mean_grey = pixels.mean(1) @ to_grey  # (B, 1)
        shift = brightness * (1 - contrast) * mean_grey
        pixels = torch.baddbmm(shift[..., None], pixels, matrices).clamp_(0, 1)
    return pixels.sub_(mean).div_(std).unflatten(1, size).movedim(3, 1)


YIQ = (0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)
KEEP_GREY = (1, 0, 0), (0, 0, 0), (0, 0, 0)  # they multiply (Y, I, Q) from the right
KEEP_COLOURS = (0, 0, 0), (0, 1, 0), (0, 0, 1)
TURN_COLOURS = (0, 0, 0), (0, 0, 1), (0, -1, 0)


@cache
def constants_on(device):
    """For `augment` -> the weights of RGB in grey (3, 1); three matrices that multiply RGB to keep
    its grey, keep its colours, turn its colours by 90 degrees (3, 3, 3); ImageNet's mean and std
    """
    to_yiq = torch.tensor(YIQ, dtype=torch.double).T
    in_yiq = torch.tensor([KEEP_GREY, KEEP_COLOURS, TURN_COLOURS], dtype=torch.double)
    parts = to_yiq @ in_yiq @ to_yiq.inverse()
    return [x.float().to(device) for x in (to_yiq[:, :1], parts, MEAN, STD)]


# ------------------------------------------------------------------ backbones and their optimizers

BACKBONES = {  # torchvision's, with the channels of their features; a new one is one line
    "resnet18": 512,
    "resnet50": 2048,
    "resnet101": 2048,
    "wide_resnet50_2": 2048,
    "vgg16_bn": 512,
    "convnext_tiny": 768,  # [ours]
}
AFTER_FEATURES = "avgpool", "fc", "classifier"


def build_backbone(arch, zero_init_residual=False, **kwargs):
    """torchvision's network with its key names, without its classifier, from random weights:
    (B, 3, H, W) -> (B, backbone.channels, H / 32, W / 32).  kwargs: of torchvision
    """
    from torchvision import models  # only here, because it takes seconds, and --help needs none

    if "resnet" in arch:  # others have no blocks that could start as identities
        kwargs["zero_init_residual"] = zero_init_residual
    try:
        model = getattr(models, arch)(**kwargs)
    except OSError as error:  # from urllib
        fail(f"the weights of {arch} cannot be downloaded ({error}): are you online? If not, give "
             "a file with such weights")
    layers = [(name, x) for name, x in model.named_children() if name not in AFTER_FEATURES]
    backbone = nn.Sequential(OrderedDict(layers))
    backbone.arch = arch
    backbone.channels = BACKBONES[arch]
    return backbone


def shapes(state):
    """{name: tensor} -> {name: shape}; None for what is not a tensor"""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def backbone_shapes(arch):
    """-> {name: shape} of a backbone's tensors, which are not made: no random number is drawn"""
    importlib.import_module("torchvision")  # with PyTorch 2.6, this fails on the device meta
    with torch.device("meta"):
        return shapes(build_backbone(arch).state_dict())


def read_init(args):
    """--init -> a backbone's state dict; None without --init, and if the run goes on

    At its full rate, the recipe small would spoil weights that were learned from many photos: the
    backbone's --lr is divided by ten, unless it is given or a script of ours has trained it. [ours]
    """
    if not args.init or os.path.exists(f"{args.output}/checkpoint.pth"):
        return None
    if args.init == "imagenet":  # torchvision's, downloaded once
        state = build_backbone(args.arch, weights="IMAGENET1K_V1").state_dict()
    else:
        state = read_checkpoint(args.init)
        if shapes(state) != backbone_shapes(args.arch):
            state = extra("checkpoints").load_backbone(args.init, args.arch).state_dict()
    print_main(f"--init: the backbone starts from {args.init}, all other layers at random")
    if args.recipe == "small" and "lr" not in args.given and not flags_of(args.init):
        args.lr *= 0.1
        print_main(f"these weights were learned elsewhere: the backbone trains at lr {args.lr:g}, "
                   f"the recipe's is {10 * args.lr:g}")
    return state


def build_optimizer(args, parameters, lr=None):
    """SGD with momentum 0.9 (all papers), RAdam [ICMLM App. F.1] or AdamW.  lr: else args.lr"""
    options = {
        # In fp16, fused SGD would keep an overflow of the first step in its momentum. On CPUs, it
        # would copy channels-last weights.
        "SGD": {"momentum": 0.9, "fused": torch.cuda.is_available() and args.amp != "fp16"},
        "AdamW": {"fused": True},
        # Decoupled decay as in the authors' code; in the first five updates, too [ours]
        "RAdam": {"decoupled_weight_decay": True},
    }[args.optimizer]
    build = getattr(torch.optim, args.optimizer)
    return build(parameters, lr=lr or args.lr, weight_decay=args.weight_decay, **options)


def lr_factor(iteration, total, warmup=0.0, steps=()):
    """Linear warm-up in this fraction of training [VirTex Sec. 3; in the other methods ours], then
    cosine decay to 0, or division by 10 after each of the fractions `steps` [ICMLM App. F.1]
    """
    start = warmup * total
    if iteration < start:
        return iteration / start
    if steps:
        return 0.1 ** sum(iteration >= step * total for step in steps)
    return 0.5 * (1 + math.cos(math.pi * (iteration - start) / (total - start)))


def set_lr(optimizer, factor):
    """Set the learning rates to `factor` times their peaks, with which the optimizer was built."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])  # kept in checkpoints


# ------------------------------------------------------------------- pretrained language models


def import_transformers():
    """-> the module transformers, without its reports and bars"""
    import huggingface_hub  # only here, because they take seconds, and --help needs none
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # DataLoader workers tokenise
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # those of downloads, too, which take minutes
    huggingface_hub.utils.enable_progress_bars()
    return transformers


def load_lm_tokenizer(name, **options):
    """name: a BERT or RoBERTa on the hub, or a folder -> its tokenizer, its configuration

    options: of the tokenizer. It reads no more tokens than its model has positions.
    """
    import huggingface_hub

    transformers = import_transformers()
    try:
        folder = name
        if not os.path.isdir(name):  # one request; transformers would try for a minute
            patterns = "*.json", "*.txt", "*.model"  # not the weights
            folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
        config = transformers.AutoConfig.from_pretrained(folder)
        # The vector of the first token must be that of [CLS], not of padding.
        options["padding_side"] = "right"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        positions = config.max_position_embeddings
    except huggingface_hub.errors.LocalEntryNotFoundError:
        fail(f"--lm {name} is not a folder, and the hub (huggingface.co) cannot be reached")
    except (OSError, ValueError, AttributeError):  # the last of a T5, which has no positions
        fail(f"--lm {name}: give a BERT, on the hub or in a folder, or scratch")
    if "roberta" in config.model_type:  # its positions start after padding's number
        positions -= config.pad_token_id + 1
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return tokenizer, config


def load_lm(name, kind, **options):
    """name: as above -> the model in float32, in eval mode. A missing pooler is drawn at random.

    kind: a class of transformers, such as "AutoModel".  options: of its from_pretrained
    """
    build = getattr(import_transformers(), kind).from_pretrained
    try:
        model, report = build(name, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        fail(f"--lm {name} cannot be loaded: {str(error).splitlines()[0]}")
    missing = sorted(weight for weight in report["missing_keys"] if "pooler" not in weight)
    if missing:
        fail(f"--lm {name} lacks weights of {type(model).__name__}: {missing[:3]}")
    return model.float()  # transformers 5 keeps half precision


def check_tokenizer(tokenizer, captions, name):
    """Warn, or fail, if it does not know the captions' words (if the folder extras is there)."""
    if EXTRAS.is_dir():
        extra("language").check_tokenizer(tokenizer, captions, name)
    else:
        print_main(f"without the folder extras, it is not checked whether {name} knows the words "
                   "of the captions")


# ---------------------------------------------------------------------- processes and precision

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
STOPPED_BY = signal.SIGINT, signal.SIGTERM  # see `stop`


def init_distributed():
    """Set up torch, and join the other processes if torchrun started this one -> its device"""
    torch.backends.cudnn.benchmark = True  # the fastest convolutions for our one size of images
    torch.set_float32_matmul_precision("high")  # TF32: --amp off would be slow on GPUs without it
    sys.__stdout__.reconfigure(errors="replace", line_buffering=True)  # "?" if there is no UTF-8
    if sys.platform == "linux":  # the default of Python 3.14 would copy the data for each worker
        torch.multiprocessing.set_start_method("fork", force=True)
    for number in STOPPED_BY:
        signal.signal(number, stop)
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPPED_BY),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOPPED_BY),
            after_in_child=end_silently,
        )
    local = dist.get_node_local_rank(0)
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", local)
        if local >= torch.cuda.device_count():
            fail("there are fewer GPUs than processes: lower --nproc_per_node")
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        if local == 0:
            print("waiting for all processes (without torchrun: unset RANK WORLD_SIZE)")
        dist.init_process_group(backend, timeout=timedelta(hours=6))  # while one makes labels
    return device


def end_silently():
    """Let signals end a worker without a word, also one that came while it was forked."""
    for number in STOPPED_BY:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED_BY)


def end_distributed():
    """The last line of main: the processes leave together."""
    barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    return rank() == 0


def barrier():
    if dist.is_initialized():
        dist.barrier()


def gather(x):
    """(B, ...) of each process -> (processes * B, ...) on all of them, in their order"""
    if world_size() == 1:
        return x
    gathered = x.new_empty(world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous())
    return gathered


def data_parallel(model):
    """DistributedDataParallel if there are several processes. Batch norm stays per process."""
    if world_size() == 1:
        return model
    # Buffers are not broadcast, because statistics of batch norm may differ and queues do not.
    ddp = nn.parallel.DistributedDataParallel
    return ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def autocast(device, amp):
    """amp: "bf16", "fp16" or "off" """
    return torch.autocast(device.type, HALF.get(amp), enabled=amp != "off")


def choose_amp(device, requested):
    """--amp if it is given, else bf16 [ours] if the device has it natively, else "off" """
    native = torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return requested or ("bf16" if native else "off")


def default_workers(measuring=False):
    """How many processes load photos for each process that trains or measures, by its cores"""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine, by torchrun
    if torch.cuda.is_available():
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count())
        return min(24, max(1, len(cores) // processes - 1))
    return min(8, os.cpu_count() // (1 if measuring else 2) // processes)


def print_main(message):
    """Print a line from the first process only, without breaking the progress bar."""
    if is_main():
        try:
            tqdm.write(message)
        except BrokenPipeError:  # by `| head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain when it ends
            fail("standard output is closed")


class LogFile:
    """Where bars are written without a terminal: each time a new line"""

    def write(self, text):
        if text.strip():  # else the bar is cleared, or ends
            sys.stderr.write(text.strip() + "\n")

    def flush(self):
        sys.stderr.flush()


def progress(iterable, **kwargs):
    """A bar; without a terminal a line each 30 seconds"""
    if not sys.stderr.isatty():
        kwargs |= {"file": LogFile(), "mininterval": 30, "delay": 30}
        kwargs["miniters"] = 1  # else a thread of tqdm's writes the same numbers again
    return tqdm(iterable, disable=not is_main(), dynamic_ncols=True, **kwargs)


def on_all_cores(function, items, desc):
    """Yield function(part) for parts of the items, in their order, from one process per core."""
    size = max(1000, len(items) // (8 * os.cpu_count()))
    if len(items) <= size:
        yield function(items)
        return
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    with multiprocessing.Pool() as pool:
        results = pool.imap(function, parts)
        yield from progress(results, desc=desc, total=len(parts), leave=False)


# -------------------------------------------------------------------------------- a training run

RECIPES = "demo", "small", "paper"
OPTIMIZERS = "SGD", "AdamW", "RAdam"
PRECISIONS = "bf16", "fp16", "off"
COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
IN_WORDS = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
GONE = {
    "--compile": "this flag was removed, because nobody had measured a gain: leave it out",
    "--text-first": "this flag was removed, because it had gained too little: leave it out",
}
FORMAT = 2  # of checkpoints; those of format 1 have other fingerprints
# Where data are (fingerprints compare the contents), how fast training goes, what is measured
RESUME_CAN_CHANGE = """given output data root backtranslations workers amp accumulate log_every
checkpoint_every save_minutes keep_every validate_every proxy_triplets""".split()
RUN = {}  # how far a run is: for `stop`, `save_if_due` and the seconds in args.json


def number(bounds):
    """The type of a flag -> text -> an int or float within bounds: "int > 0", ">= 0, < 1" """
    kind, name = (int, "a whole number") if bounds.startswith("int") else (float, "a number")
    limits = [bound.split() for bound in bounds.removeprefix("int").split(",")]
    allowed = " and ".join(f"{IN_WORDS[sign]} {limit}" for sign, limit in limits)

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {name} {allowed}, not {text}")
        inside = (COMPARISONS[sign](value, float(limit)) for sign, limit in limits)
        if not all(inside) or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text}")
        return value

    return convert


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line; it makes a flag of each row of a table

    flags: {name: (its value in the recipes demo, small, paper; what may be given; help)}. What may
    be given is str, bool, a choice of names, or the bounds of a `number`.
    """

    def __init__(self, doc, flags=None, **more):
        layout = partial(argparse.RawTextHelpFormatter, max_help_position=26, width=80)
        super().__init__(description=doc, formatter_class=layout, allow_abbrev=False, **more)
        if flags:
            self.usage = f"python {self.prog} [--FLAG VALUE ...]"
            head = "".join(f"{name:14}" for name in RECIPES)
            self.description += f"\n{'default of --recipe':26}{head}may be"
        for name, (*values, allowed, about) in (flags or {}).items():
            if allowed is bool:
                shown, how = "given or not", {"action": argparse.BooleanOptionalAction}
            elif allowed is str:
                shown, how = "text", {"metavar": ""}
            elif isinstance(allowed, str):  # bounds
                shown, how = allowed, {"type": number(allowed), "metavar": ""}
            else:
                shown, how = ", ".join(allowed), {"choices": list(allowed), "metavar": ""}
            row = "".join(f"{'-' if value is None else value!s:14}" for value in values)
            text = f"{textwrap.fill(row + shown, 54)}\n{textwrap.fill(about, 54)}"
            self.add_argument(f"--{name.replace('_', '-')}", help=text.replace("%", "%%"), **how)

    def parse_args(self, argv=None):
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            flag = word.partition("=")[0]
            flags = list(self._option_string_actions)
            close = [name for name in flags if name.startswith(flag)]
            close = close or difflib.get_close_matches(flag, flags, 1, 0.75)
            hint = f"did you mean {close[0]}?" if close else "there is no such flag: see --help"
            if not word.startswith("-"):
                hint = "it needs a flag before it: see --help"
            self.error(f"{flag}: {GONE.get(flag, hint)}")
        given = (name for name, value in vars(args).items() if value != self.get_default(name))
        args.given = list(given)
        return args

    def error(self, message):
        """In one line, without usage"""
        message = message.removeprefix("argument ").replace(": must be", " must be", 1)
        self.exit(2, f"error: {message}\n")


def apply_recipe(args, script, flags, **changes):
    """Give flags that were left out the recipe's values, with learning rates for the batch size.

    flags: see Parser.  changes: what replaces the values of the recipe paper
    """
    data = args.data or flags["data"][0]
    by_data = "small" if data.endswith(".jsonl") else "paper"
    args.recipe = args.recipe or ("demo" if data == "shapes" else by_data)
    column = RECIPES.index(args.recipe)
    recipe = {name: row[column] for name, row in flags.items()}
    recipe |= changes if args.recipe == "paper" else {}
    if args.iters and args.epochs:
        fail("give --iters or --epochs, not both")
    if args.iters or args.epochs:
        recipe |= {"iters": None, "epochs": None}
    year = "2017" if data == "coco" else ""
    recipe |= {"script": script, "train_split": f"train{year}", "val_split": f"val{year}"}
    recipe["workers"] = default_workers()
    recipe["output"] = f"runs/{script}-{Path(data).stem}".removesuffix("-shapes")
    scale = (args.batch_size or recipe["batch_size"]) / recipe["batch_size"]
    for name in "lr", "text_lr":
        if name in recipe:
            recipe[name] *= scale  # [ours]
    for name, value in recipe.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


OUR_TRAININGS = "virtex", "tp", "icmlm", "mmcontrastive", "finetune", "detection"


def flags_of(path):
    """The flags with which a script of ours trained these weights, as the file or args.json beside
    it says; {} if none of ours did, or if it is no file ("imagenet", "random")
    """
    if not os.path.isfile(path):
        return {}
    content = read_checkpoint(path)
    if content.get("script") in OUR_TRAININGS:
        return content["args"]
    beside = Path(path).with_name("args.json")
    flags = read_json(beside) if beside.exists() else {}
    if flags.get("script") not in OUR_TRAININGS:
        return {}
    # A file of another author may lie beside a run of ours.
    return flags if shapes(content) == backbone_shapes(flags["arch"]) else {}


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f"--output {path} cannot be a folder: {error.strerror}")


@contextmanager
def writing(path):
    """A file for bytes, which becomes `path` when all are written: a crash leaves the old file."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        Path(temporary).unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__  # of torch.save
        if not isinstance(reason, OSError):
            raise
        fail(f"{path} cannot be written ({reason.strerror}): what was there before is kept")


def save(path, content):
    """The first process writes JSON, or what torch.save takes."""
    if is_main():
        with writing(path) as file:
            if f"{path}".endswith(".json"):
                file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())
            else:
                torch.save(content, file)


def save_weights(path, module):
    """A plain state dict, on the CPU and in the usual memory format"""
    save(path, {name: v.cpu().contiguous() for name, v in module.state_dict().items()})


def read_checkpoint(path):
    """-> the dict in a file, its tensors on the CPU. No code of the file is run."""
    if not os.path.isfile(path):
        fail(f"there is no file {path}")
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception:  # from zipfile, pickle or torch; or it holds no dict
        return extra("checkpoints").read_others(path)


def begin_run(args, *fingerprints):
    """Begin a run, or resume it, once the data are read -> {} or its checkpoint; write args.json

    fingerprints: of all that is learned from. With other data or flags, a run is not resumed.
    """
    if args.batch_size % (args.accumulate * world_size()):
        fail(f"--batch-size {args.batch_size} cannot be divided by processes times --accumulate")
    args.format, args.fingerprints = FORMAT, list(fingerprints)
    make_folder(args.output)
    path = f"{args.output}/checkpoint.pth"
    checkpoint = read_checkpoint(path) if os.path.exists(path) else {}
    earlier = checkpoint.get("args", vars(args))
    if checkpoint and "script" not in checkpoint:
        fail(f"{path} was not written by a script of ours: choose another --output")
    if earlier.get("format") != FORMAT:
        fail(f"{path} was written by an earlier version: it can be measured and captioned, but not "
             "resumed. Choose another --output, or go on with `git checkout before-less`")
    if "lr" not in [*args.given, *earlier["given"]]:
        args.lr = earlier["lr"]  # read_init may have divided it, but does not when a run goes on
    for name, now in vars(args).items():
        before = earlier.get(name, now)
        if before != now and name not in RESUME_CAN_CHANGE:
            before, now = ("left out" if value is None else value for value in (before, now))
            what = f"{name} {before}, not {now}"
            if name == "fingerprints":
                what = "other data (photos, captions, tags or back-translations)"
            fail(f"{args.output} holds a run with {what}: choose another --output, or delete the "
                 "folder to start over")
    about = f"{args.output}/args.json"
    seconds = read_json(about).get("seconds", 0) if checkpoint and os.path.exists(about) else 0
    RUN["began"] = time.time() - seconds  # of the parts of an interrupted run
    save(about, vars(args) | circumstances() | {"seconds": seconds})
    barrier()
    learned_from = [item for item in vars(args).items() if item[0] not in RESUME_CAN_CHANGE]
    flags = zlib.crc32(repr(sorted(learned_from)).encode())
    check_shared(args.output, checkpoint.get("iteration", 0), os.path.exists(about), flags)
    return checkpoint


def check_shared(folder, *numbers):
    """Fail if these numbers differ among the processes, as when nodes do not share --output."""
    found = gather(torch.tensor([numbers]))
    if world_size() > 1 and (found != found[:1]).any():
        fail(f"the processes find different things in --output {folder}, or have other flags or "
             "data: start all nodes by the same command, with a folder that they share")


def circumstances():
    """-> what must be known beside a score, for args.json and result.json; no git: commit None"""
    describe = "git describe --always --dirty --exclude='*'"
    folder = Path(__file__).resolve().parent
    git = subprocess.run(describe, shell=True, cwd=folder, capture_output=True, text=True)
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    chips = re.findall("model name.*: (.*)", cpuinfo)[:1] or [platform.machine()]
    if torch.cuda.is_available():
        chips.append(f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}")
    return {
        "command": sys.argv,
        "processes": world_size(),
        "commit": git.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "machine": ", ".join([f"{os.cpu_count()} cores", *chips]),
        "torch": torch.__version__,
    }


def plan_run(args, device, train, val, outputs, samples=None):
    """Say in words what a run will do -> its iterations, and how many lie between validations

    train, val: numbers of photos.  outputs: words for what is predicted.  samples: in an epoch, if
    they are not the photos
    """
    samples = samples or train
    iters = args.iters or math.ceil(args.epochs * samples / args.batch_size)
    passes = iters * args.batch_size / samples
    parts = {"lr": "backbone", "head_lr": "heads", "text_lr": "text"}
    rates = [f"{vars(args)[name]:g} ({part})" for name, part in parts.items() if name in args]
    print_main(f"{train:,} photos to learn from, {val:,} to check; {args.arch} at "
               f"{args.image_size} px, {outputs}")
    print_main(f"{iters:,} iterations of {args.batch_size} are {passes:.3g} passes; learning rates "
               f"{', '.join(rates)}; amp {args.amp} on {device}; into {args.output}")
    if train < 1000 and not args.init:
        print_main("that is few for random weights: see whether --init imagenet is better")
    return iters, args.validate_every or min(2000, math.ceil(iters / 5))


def print_table(title, rows):
    """Print numbers in aligned columns.  rows: {name: {column: number}}, not all in each row"""
    check_finite(torch.tensor([*row.values()]) for row in rows.values())
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    width = max(map(len, [title, *rows]))
    print_main(f"{title:{width}}" + "".join(f"{column:>17}" for column in columns))
    for name, row in rows.items():
        cells = [f"{row[column]:17.2f}" if column in row else 17 * " " for column in columns]
        print_main(f"{name:{width}}" + "".join(cells))


def restore(args, checkpoint, iters, state):
    """Load the checkpoint into `state`, {name: model, optimizer...} -> the iterations done"""
    RUN.update(iters=iters, done=0, saved=0, saved_at=time.monotonic())
    if not checkpoint:
        return 0
    for name, module in state.items():
        if checkpoint[name]:  # a scaler that was not in use has no state
            module.load_state_dict(checkpoint.pop(name))  # so that its memory is free again
    done = checkpoint["iteration"]
    RUN.update(done=done, saved=done)
    print_main(f"{args.output}: {done} of {iters} iterations are done")
    return done


def iterations(done, iters):
    """The bar over the iterations. After twenty it says once how many minutes are left."""

    def count():
        for iteration in range(done + 1, iters + 1):
            RUN["done"] = iteration - 1
            if iteration == done + 5:  # the first ones are slow
                started = time.monotonic()
            if iteration == done + 20:
                minutes = (time.monotonic() - started) / 15 * (iters - iteration) / 60
                if minutes > 1:
                    print_main(f"about {minutes:.0f} minutes are left")
            yield iteration
        RUN["done"] = iters

    return progress(count(), initial=done, total=iters, unit=" its")


def stop(signum, frame):
    """Ctrl-C and SIGTERM end the first process in one line, and all others silently."""
    signal.signal(signum, signal.SIG_IGN)  # Slurm and torchrun both send one
    if is_main():
        text = "stopped"
        if "saved" in RUN:
            saved = f"the checkpoint is of {RUN['saved']}; the same command goes on from there"
            saved = saved if RUN["saved"] else "none was saved; the same command starts over"
            text = f"stopped after {RUN['done']} of {RUN['iters']} iterations; {saved}"
        tqdm.write("")
        tqdm.write(text, file=sys.stderr)
    for child in multiprocessing.active_children():  # of on_all_cores: they would print errors
        child.terminate()
    os._exit(128 + signum)


def save_if_due(args, iteration, state, more=None, validated=False):
    """Write checkpoint.pth after a validation, --checkpoint-every or --save-minutes since the last
    one; with --keep-every model_N.pth.  state, more: see save_checkpoint
    """
    keep_every = getattr(args, "keep_every", None)  # downstream has no such flag
    if keep_every and iteration % keep_every == 0:
        name = f"model_{iteration}.pth"
        save_checkpoint(args, name, iteration, {"model": state["model"]}, more)
    minutes = (time.monotonic() - RUN["saved_at"]) / 60
    if validated or iteration % args.checkpoint_every == 0 or minutes > args.save_minutes:
        save_checkpoint(args, "checkpoint.pth", iteration, state, more)


def save_checkpoint(args, name, iteration, state, more=None):
    """Write `state`, {name: model, optimizer...}, and `more`; no weight may be infinite or NaN."""
    content = {key: module.state_dict() for key, module in state.items()}
    check_finite(content["model"].values())
    content |= {"script": args.script, "args": vars(args), "iteration": iteration}
    save(f"{args.output}/{name}", content | (more or {}))
    if name == "checkpoint.pth":
        RUN.update(saved=iteration, saved_at=time.monotonic())
        if is_main():
            about = read_json(f"{args.output}/args.json")
            about["seconds"] = round(time.time() - RUN["began"])
            save(f"{args.output}/args.json", about)


def check_finite(values):
    """Stop if a weight, a loss or a score is infinite or NaN."""
    if not all(value.isfinite().all() for value in values):
        fail("a loss or a weight is not finite: the last checkpoint is kept. Try a lower --lr")


class Log:
    """metrics.jsonl has a line for each log interval, with means over it (docs/running.md)."""

    def __init__(self, args, done):
        self.photos = args.batch_size / args.accumulate  # in each micro-batch
        self.path = Path(args.output, "metrics.jsonl")
        if is_main() and self.path.exists():
            # A run that goes on keeps the lines up to its checkpoint. A kill may leave half a line.
            lines = [x for x in self.path.read_bytes().splitlines(True) if x.endswith(b"}\n")]
            kept = [line for line in lines if parse_json(line, self.path)["iteration"] <= done]
            with writing(self.path) as file:
                file.write(b"".join(kept))
        self.begin()

    def begin(self):
        self.losses = []  # of each micro-batch
        self.waited = 0.0  # seconds of waiting for batches, which main adds up
        self.time = time.perf_counter()

    def add(self, **losses):
        """Scalar losses of a micro-batch: the next line has their means, also over processes."""
        self.names = list(losses)
        self.losses.append(torch.stack([*losses.values()]).detach())

    def means(self):
        """-> {"loss": ..., "images_per_s", "data_wait"} since the last line; synchronises once"""
        means = gather(torch.stack(self.losses)).mean(0).cpu()
        check_finite(means)
        seconds = time.perf_counter() - self.time
        speed = len(self.losses) * self.photos / seconds
        row = dict(zip(self.names, means.tolist()))
        return row | {"images_per_s": speed, "data_wait": self.waited / seconds}

    def write(self, iteration, row):
        """Append a line. The time since `means`, spent on validation, is not counted."""
        if is_main():
            with open(self.path, "a") as file:
                file.write(json.dumps({"iteration": iteration, **row}) + "\n")
        self.begin()


def end_run(args, backbone, task):
    """The last line of main: write backbone.pth, say what to do next, and leave together

    task: of downstream/, with its flags: what the whole model can do; None if it has none
    """
    save_weights(f"{args.output}/backbone.pth", backbone)
    start = shlex.quote(args.init or "imagenet")
    data = "" if args.data == "shapes" else f" {start} --data folder --root LABELLED_PHOTOS"
    folder = shlex.quote(args.output)
    print_main(f"measure it:  python eval_linear.py --weights {folder}/backbone.pth random{data}")
    if task:
        print_main(f"use it:      python -m downstream.{task} --weights {folder}/checkpoint.pth")
    end_distributed()
