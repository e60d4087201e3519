"""What the scripts share:

    captioned photos     caption_data -> CaptionData: COCO, a .jsonl, and others through extras/
    photos to batches    Photos, read_crops, infinite_sampler, train_batches; on the device: augment
    training             build_backbone, read_init, load_init, build_optimizer, lr_factor, set_lr
    processes            init_distributed, is_main, gather, data_parallel, autocast
    a training run       apply_recipe, start, once, restore, Metrics, save_checkpoint
"""

import argparse
import html
import importlib
import json
import math
import mmap
import os
import shlex
import shutil
import sys
import time
import unicodedata
import warnings
import zlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import numpy as np
import regex
import torch
import torch.distributed as dist
from PIL import ExifTags, Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


def fail(message):
    """Exit with one line instead of a traceback: for what a user can fix."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all fail alike, only the first speaks: torchrun then ends the others
    sys.exit(f"error: {message}")


def extra(name):
    """Import extras/{name}.py, which a copied script may lack."""
    try:
        return importlib.import_module(f"extras.{name}")
    except ModuleNotFoundError as error:
        fail(f"{error.name} is missing: copy our folder extras beside the script, or install the "
             "packages of requirements.txt")  # fmt: skip


# ------------------------------------------------------------------------------ captioned photos

STRINGS = np.dtypes.StringDType()  # of any length, in one block of memory
JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} on each line'


class Lists:
    """A list of lists in two arrays, which DataLoader workers share; they would copy objects."""

    def __init__(self, rows, dtype):
        self.ends = np.cumsum([0, *map(len, rows)])
        self.values = np.array([value for row in rows for value in row], dtype)

    def __getitem__(self, i):
        return self.values[self.ends[i] : self.ends[i + 1]].tolist()

    def select(self, keep):
        return Lists([self[i] for i in keep], self.values.dtype)


@dataclass
class CaptionData:
    """Photos, each with captions and tags (either may be empty): every source takes this form."""

    images: np.ndarray  # (N,) of paths, or of what `open` takes instead
    captions: Lists  # captions[i]: a list of strings
    tags: Lists  # tags[i]: indices into tag_names, in ascending order
    tag_names: list = None  # of all splits; None: the source has no tags
    open: callable = Image.open  # images[i] -> PIL image, not yet decoded
    sampler: callable = None  # of the training batches; None: infinite_sampler

    def __len__(self):
        return len(self.images)

    def all_captions(self):
        return [caption for captions in self.captions for caption in captions]

    def select(self, keep):
        """-> CaptionData of the photos with the indices `keep`"""
        captions, tags = self.captions.select(keep), self.tags.select(keep)
        return replace(self, images=self.images[keep], captions=captions, tags=tags)

    def with_captions(self, rows):
        """-> CaptionData with other captions.  rows: a list of strings for each photo"""
        return replace(self, captions=Lists(rows, STRINGS))

    def captioned(self):
        """-> CaptionData of the photos that have a caption"""
        keep = np.flatnonzero(np.diff(self.captions.ends))
        if len(keep) == 0:
            fail(f"no photo has a caption. A .jsonl has {JSONL}")
        if len(keep) == len(self):
            return self
        print_main(f"{len(self) - len(keep)} of {len(self)} photos have no caption: left out")
        return self.select(keep)


def caption_data(name, root=None, split="train"):
    """One split of --data -> CaptionData.  root: --root"""
    if name == "shapes":
        return extra("shapes").caption_data(split)
    if name not in ("coco", "vg") and os.path.isdir(name):
        return extra("shards").caption_data(name, split)
    data = [read_captions(name, root, split) if is_main() else None]
    if world_size() > 1:  # one process reads: the annotations of COCO take 3 GB meanwhile
        dist.broadcast_object_list(data, device=torch.device("cpu"))
    return data[0]


def read_captions(name, root, split):
    """COCO, Visual Genome or a .jsonl -> CaptionData"""
    if name == "coco":
        photos, tag_names = coco_photos(root or "datasets/coco", split)
    elif name == "vg":
        photos, tag_names = extra("visual_genome").photos(root or "datasets/vg", split)
    elif os.path.isfile(name) and name.endswith(".jsonl"):
        photos, tag_names = jsonl_photos(name, root or os.path.dirname(name), split)
    else:
        fail(f"no data set {name}: --data is shapes, coco, vg, a .jsonl file or a folder of "
             "shards; python tools/to_jsonl.py FILE converts other files")  # fmt: skip
    paths, captions, tags = zip(*photos)
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    captions = [[caption for caption in row if caption] for row in captions]
    index = {tag: k for k, tag in enumerate(tag_names)}
    tags = [sorted({index[tag] for tag in row}) for row in tags]
    images = np.array(paths, STRINGS)
    data = CaptionData(images, Lists(captions, STRINGS), Lists(tags, int), tag_names or None)
    require_decodable(data)
    return data


def read_json(path):
    if not os.path.isfile(path):
        fail(f"there is no {path}: see --root, --train-split and --val-split")
    return json.loads(Path(path).read_bytes())


def one_line(text):
    """Composed characters (NFC), no HTML entities, single spaces; half an emoji becomes "?"."""
    text = regex.sub(r"&#?\w+;", lambda entity: html.unescape(entity[0]), text)
    text = unicodedata.normalize("NFC", text.encode(errors="replace").decode())
    return " ".join(text.split())


def coco_photos(root, split):
    """annotations/captions_{split}.json; the photos are in {split}/. The categories of
    instances_{split}.json, if it is there, are the tags.

    -> (path, captions, tags) of each photo, the names of all tags
    """
    content = read_json(f"{root}/annotations/captions_{split}.json")
    instances = f"{root}/annotations/instances_{split}.json"
    annotated = read_json(instances) if os.path.exists(instances) else {}
    names = {row["id"]: one_line(row["name"]) for row in annotated.get("categories", [])}
    captions, tags, photos = defaultdict(list), defaultdict(list), []
    try:
        for row in content["annotations"]:
            captions[row["image_id"]].append(one_line(row["caption"]))
        for row in annotated.get("annotations", []):
            tags[row["image_id"]].append(names[row["category_id"]])
        for row in content["images"]:
            path = os.path.join(root, split, row["file_name"])
            photos.append((path, captions[row["id"]], tags[row["id"]]))
    except (KeyError, TypeError) as error:
        fail(f"{root}, split {split}: {error!r} in {str(row)[:200]}")
    return photos, [names[category] for category in sorted(names)]


def jsonl_photos(path, root, split):
    """One {"image", "captions", "tags", "split"} per line; all but "image" are optional.

    Paths start from `root`. A line without a split belongs to "train"; if no line has one, a fixed
    random twentieth is "val". -> (path, captions, tags) of each photo, the names of all tags
    """
    photos, splits = [], []
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            captions, tags = row.get("captions", []), row.get("tags", [])
            wrong = "caption" in row or "captions" not in row and row.keys() & {"text", "title"}
            if wrong or not isinstance(captions, list) or not isinstance(tags, list):
                raise ValueError(f"it has {', '.join(row)}; captions and tags are lists")
            captions = [one_line(caption) for caption in captions]
            tags = [one_line(str(tag)) for tag in tags]
            photos.append((os.path.join(root, row["image"]), captions, tags))
            splits.append(row.get("split"))
        except Exception as error:  # no UTF-8, no JSON, no "image", wrong types
            fail(f"{path}, line {number}: {type(error).__name__}: {error}. Expected, in UTF-8: "
                 f"{JSONL}. tools/to_jsonl.py converts other files")  # fmt: skip
    if len({image for image, *_ in photos}) < len(photos):
        fail(f"{path} repeats an image: one line should have all its captions")
    if not any(splits):
        order = np.random.default_rng(0).permutation(len(photos))
        for n in order[: max(1, len(photos) // 20)]:
            splits[n] = "val"
    splits = [found or "train" for found in splits]
    if split not in splits:
        found = ", ".join(sorted({*splits}))
        fail(f"{path} has no split {split}, but {found}: see --train-split, --val-split")
    tag_names = dict.fromkeys(tag for *_, tags in photos for tag in tags)
    photos = [photo for photo, found in zip(photos, splits) if found == split]
    return photos, list(tag_names)


LETTERS = r"\p{L}[\p{L}\p{M}\u200c\u200d]*"  # with their marks and joiners
ACCENTS = "(?<=[a-zß-ɏ])[\u0300-\u036f]+"  # of decomposed, lower-case Latin letters
UNSPACED = regex.compile(r"\p{Han}|\p{Hiragana}|\p{Katakana}|\p{Thai}|\p{Lao}|\p{Khmer}")


def require_spaces(captions):
    """For what needs words: these scripts (Chinese, Japanese, Thai...) write no spaces between."""
    if sum(map(bool, map(UNSPACED.search, captions))) > len(captions) / 2:
        fail("captions are split into words at spaces, and most of these have none: use virtex.py, "
             "mmcontrastive.py or tp.py --labels cluster")  # fmt: skip


def swap_left_right(caption):
    """The caption of the flipped photo: the whole words [ours] left and right are swapped."""
    other = {"left": "right", "right": "left"}
    return regex.sub(r"(?i)\b(left|right)\b", lambda word: other[word[0].lower()], caption)


# ----------------------------------------------------------------------------- photos to batches


class Unreadable(Exception):
    """A photo that cannot be decoded; the message is its path and the reason."""


class Photos(Dataset):
    """The scripts derive their data sets from it, with sample(index, rng) -> dict.

    In training, a key is (seed, epoch, index), on which alone rng depends; in validation, a key is
    an index, and rng is None.
    """

    def __init__(self, data, args):
        """data: CaptionData or similar.  args: image_size, crop_min, colour_jitter"""
        self.data = data
        self.args = args

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        """The sample, or the next one whose photo can be decoded"""
        training = isinstance(key, tuple)
        rng = np.random.default_rng(key) if training else None
        index = key[-1] if training else key
        unreadable = set()  # photos, of which icmlm.py has many samples each
        for candidate in range(index, index + len(self)):
            try:
                return self.sample(candidate % len(self), rng)
            except Unreadable as error:
                report_once(f"cannot decode {error}", ": the next photo is used")
                unreadable.add(str(error))
            if len(unreadable) == 100:
                break
        raise Unreadable(f"{len(unreadable)} photos in a row cannot be decoded: see above")

    def photo(self, index, rng):
        """-> {"image": uint8 (size, size, 3), "jitter": (4,) for `augment`, "flipped": bool}"""
        crop = partial(random_crop, rng, self.args.crop_min) if rng else centre_crop
        [image] = read_crops(self.data, index, [crop], self.args.image_size)
        jitter = colour_jitter(rng, self.args.colour_jitter) if rng else NO_JITTER
        flipped = bool(rng) and rng.random() < 0.5
        return {"image": image[:, ::-1] if flipped else image, "jitter": jitter, "flipped": flipped}


reported = mmap.mmap(-1, 2**16)  # by this process or its DataLoaders' workers, which share it


def report_once(what, more=""):
    """Print it, unless it was printed before in this training run."""
    place = zlib.crc32(what.encode()) % len(reported)
    if not reported[place]:
        reported[place] = 1
        tqdm.write(what + more)


def require_decodable(data):
    """End at once, not after hours, if none of the first hundred photos can be decoded."""
    for index in range(min(100, len(data))):
        try:
            return read_crops(data, index, [centre_crop], 1)
        except Unreadable as error:
            unreadable = error
    fail(f"none of the first {index + 1} photos can be decoded, for example {unreadable}")


# What turns a photo upright whose EXIF orientation is 2 to 8; from 5 on, its sides are swapped.
TURNS = """FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE
ROTATE_90""".split()


def orientation(image):
    """EXIF's, from 2 to 8; 1, upright, if there is none or the metadata are broken"""
    if image.format == "TIFF":
        return 1  # PIL turns these itself
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a dozen kinds: metadata are no reason to refuse pixels
        return 1
    return next((n for n in range(2, 9) if found in (n, f"{n}", f"{n}".encode(), bytes([n]))), 1)


def to_rgb(image):
    """A PIL image as people see it: turned as EXIF says, and on white where it is transparent

    What has more than 8 bits (X-rays, thermal images) is scaled from its own range to 0..255.
    """
    turn = orientation(image)
    if image.mode[0] in "IF":
        values = np.asarray(image, float)
        finite = values[np.isfinite(values)]
        low, high = finite.min(), finite.max()
        with np.errstate(invalid="ignore"):  # 0 / 0 of a constant image becomes grey
            grey = np.nan_to_num((values - low) / (high - low), nan=0.5, posinf=1, neginf=0)
        image = Image.fromarray((255 * grey).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    return image.transpose(Image.Transpose[TURNS[turn - 2]]) if turn > 1 else image


def read_crops(data, index, crops, size):
    """Decode a photo once and cut several crops from it -> list of (size, size, 3) uint8 arrays

    crops: functions (width, height) -> box. A large JPEG is decoded at a half, a quarter or an
    eighth of its size if that has enough pixels [ours]. Raises Unreadable.
    """
    try:
        image = data.open(data.images[index])
        order = -1 if orientation(image) > 4 else 1  # of width and height: they are to be swapped
        full_size = np.array(image.size[::order])
        boxes = np.array([crop(*full_size) for crop in crops])  # left, top, right, bottom
        if image.format in ("JPEG", "MPO"):  # MPO: several JPEGs, of phones
            smallest = (boxes[:, 2:] - boxes[:, :2]).min(0)  # crop's width and height, in pixels
            needed = np.ceil(size * full_size / smallest).astype(int).tolist()
            image.draft("RGB", needed[::order])
        image = to_rgb(image)
        boxes = boxes * np.tile(image.size / full_size, 2)  # draft may have shrunk it
        boxes = np.minimum(boxes, np.tile(image.size, 2)).tolist()  # rounding errors may exceed it
        return [np.array(image.resize((size, size), Image.BILINEAR, box)) for box in boxes]
    except Exception as error:  # PIL's decoders raise a dozen kinds
        reason = str(error).replace(f" {str(data.images[index])!r}", "")
        raise Unreadable(f"{data.images[index]} ({reason or type(error).__name__})") from error


def random_crop(rng, min_area, width, height):
    """A box of random area (a fraction in [min_area, 1]) and aspect ratio, as for Inception"""
    for _ in range(10):
        area = width * height * rng.uniform(min_area, 1.0)
        aspect = (4 / 3) ** rng.uniform(-1, 1)
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return x, y, x + w, y + h
    return centre_crop(width, height)


def centre_crop(width, height, side_fraction=1.0):
    """The box of a central square; side_fraction 224 / 256 is "resize 256, centre crop 224"."""
    side = side_fraction * min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return x, y, x + side, y + side


NO_JITTER = np.array([1, 1, 1, 0], np.float32)


def colour_jitter(rng, strength):
    """-> factors of brightness, contrast and saturation, and a hue rotation in turns, (4,) float32

    At strength 1, within 1 +- 0.4 and +- 0.1 turns. With probability 0.2, no change.
    """
    limits = strength * np.array([0.4, 0.4, 0.4, 0.1])
    factors = rng.uniform(NO_JITTER - limits, NO_JITTER + limits)
    return factors.astype(np.float32) if rng.random() < 0.8 else NO_JITTER


def stack(samples, name):
    """The arrays or numbers `name` of all samples -> tensor (B, ...)"""
    return torch.from_numpy(np.stack([sample[name] for sample in samples]))


def infinite_sampler(size, batch_size, seed, start=0):
    """Yield (seed, epoch, index) forever, beginning with batch number `start`, from 0

    The epochs' permutations, which depend only on the seed, are concatenated. Batch t is their
    t-th slice of `batch_size` (global), of which each process takes its part.
    """
    position = start * batch_size
    while True:
        epoch, done = divmod(position, size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        for index in order[done:]:
            if position % batch_size // (batch_size // world_size()) == rank():
                yield seed, epoch, int(index)
            position += 1


def train_batches(dataset, collate, args, device, start):
    """Yield micro-batches on the device forever, --accumulate of them for each iteration

    start: the iterations that are done. Torch is seeded for each micro-batch: a resumed run
    repeats its dropout.
    """
    sampler = getattr(dataset.data, "sampler", None) or infinite_sampler  # shards have their own
    loader = DataLoader(
        dataset,
        args.batch_size // world_size() // args.accumulate,
        sampler=sampler(len(dataset), args.batch_size, args.seed, start),
        num_workers=args.workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
    )
    for number, batch in enumerate(loader, (start + 1) * args.accumulate):
        iteration, part = divmod(number, args.accumulate)  # from 1, as in main
        place = (iteration * world_size() + rank()) * args.accumulate + part
        torch.manual_seed((args.seed << 40) % 2**64 + place)  # 2^40 places for each seed
        yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def validation_batches(dataset, collate, args, device, batch_size=64):
    """One pass over the photos, in order -> batches on the device"""
    loader = DataLoader(dataset, batch_size, num_workers=args.workers, collate_fn=collate)
    for batch in progress(loader, desc="validation", unit=" batches", leave=False):
        yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}


# --------------------------------------------------------------------------------- on the device

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
YIQ = (0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)


@cache
def colour_constants(device):
    """RGB to YIQ, YIQ to RGB, mean and deviation; cached: each copy would synchronise a GPU."""
    to_yiq = torch.tensor(YIQ, dtype=torch.float64).T
    constants = to_yiq, to_yiq.inverse(), torch.tensor(MEAN), torch.tensor(STD)
    return [constant.float().to(device) for constant in constants]


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size), channels-last in memory

    jitter: (B, 4) from colour_jitter, applied in its order in the colour space YIQ: Y is grey, and
    hue rotates the plane of I and Q. [ours: YIQ, the fixed order, one clamp at the end]
    """
    to_yiq, to_rgb, mean, std = colour_constants(images.device)
    pixels = images.float() / 255
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None, None]  # (B, 1, 1) each
        y, i, q = (pixels @ to_yiq).unbind(-1)  # (B, size, size) each
        y = contrast * y + (1 - contrast) * y.mean((1, 2), keepdim=True)
        colour = torch.complex(i, q) * torch.polar(contrast * saturation, 2 * math.pi * hue)
        yiq = torch.stack([y, colour.real, colour.imag], -1)
        pixels = (brightness[..., None] * yiq @ to_rgb).clamp(0, 1)
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------- backbones

BACKBONES = "resnet18", "resnet50", "resnet101", "wide_resnet50_2", "vgg16_bn"  # in torchvision


def build_backbone(arch, **kwargs):
    """torchvision's network with its key names, without its classifier, from random weights

    (B, 3, H, W) -> (B, backbone.channels, H / 32, W / 32).  kwargs: of torchvision
    """
    from torchvision import models  # only here: it takes seconds, and --help needs none

    model = getattr(models, arch)(**kwargs)
    *children, _, _ = model.named_children()  # the last two are average pooling and classifier
    backbone = nn.Sequential(OrderedDict(children))
    backbone.arch = arch
    backbone.channels = 512 if arch == "vgg16_bn" else model.fc.in_features
    return backbone


def read_init(args):
    """--init -> {"backbone": state dict}, the content of a checkpoint of the same script, or {}"""
    if not args.init:
        return {}
    if args.init == "imagenet":  # torchvision's, downloaded once
        return {"backbone": build_backbone(args.arch, weights="IMAGENET1K_V1").state_dict()}
    content = read_checkpoint(args.init)
    if content.get("script") == args.script:
        if content["args"]["arch"] != args.arch:
            fail(f"--init {args.init} is a {content['args']['arch']}, not --arch {args.arch}")
        return content
    if content.keys() == build_backbone(args.arch).state_dict().keys():  # a backbone.pth
        return {"backbone": content}
    # Other scripts' checkpoints, files of other authors, and messages for what is neither
    return {"backbone": extra("checkpoints").load_backbone(args.init, args.arch).state_dict()}


def load_init(init, model, backbone, skip=()):
    """Start from what read_init returned: the backbone, or all tensors of the model that fit

    skip: prefix of tensors that stay random, since their classes or words are others
    """
    if "backbone" in init:
        backbone.load_state_dict(init["backbone"])
        print_main("--init: loaded the backbone")
    elif init:
        state = model.state_dict()
        loaded = {}
        for name, value in init["model"].items():
            if name in state and value.shape == state[name].shape and not name.startswith(skip):
                loaded[name] = value
        model.load_state_dict(loaded, strict=False)
        print_main(f"--init: loaded {len(loaded)} of {len(state)} tensors")


# ---------------------------------------------------------------------------------- optimisation


def build_optimizer(args, parameters, lr=None):
    """SGD with momentum 0.9 (all three papers), RAdam [ICMLM App. F.1] or AdamW.  lr: or args.lr"""
    rates = {"lr": lr or args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "sgd":  # in fp16 a first overflow would leave garbage as fused momentum
        return torch.optim.SGD(parameters, momentum=0.9, fused=args.amp != "fp16", **rates)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **rates)
    return torch.optim.RAdam(parameters, decoupled_weight_decay=True, **rates)  # authors' code


def lr_factor(iteration, total, warmup=0.0, steps=()):
    """Factor of the learning rate at an iteration, counted from 0

    Linear warm-up over the fraction `warmup` of training [ours], then cosine decay to 0. With
    `steps`, it is divided by 10 after each of these fractions instead [ICMLM App. F.1].
    """
    start = warmup * total
    if iteration < start:
        return iteration / start
    if steps:
        return 0.1 ** sum(iteration >= step * total for step in steps)
    return 0.5 * (1 + math.cos(math.pi * (iteration - start) / (total - start)))


def set_lr(optimizer, factor):
    """Set the learning rates to `factor` times their peaks, those the optimizer was built with."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])  # kept in checkpoints


# ---------------------------------------------------------------------- processes and precision


def init_distributed():
    """Join the other processes if torchrun started this one -> this process's device"""
    torch.backends.cudnn.benchmark = True
    if sys.platform == "linux":  # Python 3.14 would pickle the data for each worker
        torch.multiprocessing.set_start_method("fork", force=True)
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            fail("there are fewer GPUs than processes: lower --nproc_per_node")
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # set by torchrun
        # CPU tensors go through gloo. Others may wait for hours while the first makes labels.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=6))
        warnings.filterwarnings("ignore", ".*(broadcast_buffers|all_gather_into)", FutureWarning)
    return device


def end_distributed():
    """The last line of main: the processes leave together."""
    barrier()
    if dist.is_initialized():
        end_distributed.group = dist.group.WORLD  # if DDP outlived it, torch 2.5 could hang
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
    # Buffers are not broadcast: statistics of batch norm may differ, queues are equal anyway.
    return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, amp):
    """The context of mixed precision; amp: "bf16", "fp16" or "off"."""
    return torch.autocast(device.type, HALF.get(amp), enabled=amp != "off")


def choose_amp(device, requested):
    """--amp if given, else bf16 [ours] if the device computes in it natively, else "off"."""
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return requested or ("bf16" if native else "off")


def print_main(message):
    """Print a line from the first process only, without breaking the progress bar."""
    if is_main():
        tqdm.write(message)
        sys.stdout.flush()


def progress(iterable, **kwargs):
    return tqdm(iterable, disable=not is_main(), dynamic_ncols=True, **kwargs)


# -------------------------------------------------------------------------------- a training run

RECIPE_NAMES = "demo", "small", "paper"


def number(convert, what, accepts):
    """-> the `type` of a flag, which ends in one line that names the unit if a value is no `what`"""

    def parse(text):
        value = convert(text)
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    parse.__name__ = what  # "invalid ... value" of what is no number at all
    return parse


whole = number(int, "a whole number from 0 on", lambda n: n >= 0)
count = number(int, "a whole number from 1 on", lambda n: n >= 1)
positive = number(float, "a number above 0", lambda x: 0 < x < math.inf)
weight = number(float, "a number from 0 on", lambda x: 0 <= x < math.inf)
fraction = number(float, "a fraction, from 0 to below 1", lambda x: 0 <= x < 1)
share = number(float, "a fraction, above 0 and at most 1", lambda x: 0 < x <= 1)


def recipe_table(table):
    """For --help: the defaults of the three recipes"""
    rows = {"defaults of --recipe": RECIPE_NAMES, **table}
    return "\n".join(f"  {name:20}" + "".join(f"{x!s:>20}" for x in rows[name]) for name in rows)


def apply_recipe(args, script, table, **paper):
    """Give flags that were left out the value of the recipe's column; call it after parse_args.

    table: {name: (demo, small, paper)}; a name without a flag is a constant.  paper: {name: value}
    that override the column `paper`. Learning rates are scaled to --batch-size; a given one is not.
    """
    by_data = "small" if args.data.endswith(".jsonl") else "paper"
    args.script = script
    args.recipe = args.recipe or ("demo" if args.data == "shapes" else by_data)
    recipe = {name: row[RECIPE_NAMES.index(args.recipe)] for name, row in table.items()}
    recipe |= paper if args.recipe == "paper" else {}
    lengths = [length for length in (args.iters, args.epochs) if length is not None]
    if len(lengths) > 1 or min(lengths, default=1) <= 0:
        fail("give --iters or --epochs, one of them and above 0")
    if lengths:
        recipe |= {"iters": None, "epochs": None}
    year = "2017" if args.data == "coco" else ""
    recipe |= {"train_split": f"train{year}", "val_split": f"val{year}"}
    suffix = "" if args.data == "shapes" else f"-{Path(args.data).stem}"
    recipe["output"] = f"runs/{script}{suffix}"  # other data: no collision
    batch_scale = (args.batch_size or recipe["batch_size"]) / recipe["batch_size"]  # [ours]
    for name, value in recipe.items():
        if getattr(args, name, None) is None:
            setattr(args, name, batch_scale * value if name in ("lr", "text_lr") else value)
    if args.fresh and args.init and Path(args.init).parent == Path(args.output):
        fail(f"--fresh would delete --init {args.init}: choose another --output")
    parts = int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate
    if args.batch_size < 1 or args.batch_size % parts:
        fail(f"--batch-size {args.batch_size} cannot be divided by {parts}, which is the number of "
             "processes times --accumulate")  # fmt: skip


def save(path, content):
    """A text, JSON or what torch.save takes. A crash or a full disk leaves the old file intact."""
    temporary = Path(f"{path}.tmp")
    if f"{path}".endswith(".json") and not isinstance(content, str):
        indent = 2 if isinstance(content, dict) else None  # long lists stay compact, and fast
        content = json.dumps(content, indent=indent, ensure_ascii=False)
    try:
        if isinstance(content, str):
            temporary.write_text(content, "utf-8")
        else:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:  # the latter is torch's, which names no reason
        free = shutil.disk_usage(temporary.parent).free >> 20
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path}, where {free} MB are free: {error}")
    temporary.replace(path)


def save_weights(path, module):
    """A plain state dict, on the CPU and in the usual memory format"""
    save(path, {name: v.cpu().contiguous() for name, v in module.state_dict().items()})


def read_checkpoint(path, script=None):
    """Load a file onto the CPU without running code from it.  script: that must have written it"""
    if not os.path.isfile(path):
        fail(f"there is no {path}; for example, python {script or 'virtex'}.py writes one")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # DINO's hold one
            content = torch.load(path, map_location="cpu", weights_only=True)
        found = content.get("script")
    except Exception as error:  # from zipfile, pickle or torch; or it holds no dict
        what = f"is not a checkpoint, or is truncated ({type(error).__name__})"
        if code := regex.search(r"GLOBAL (\S+)", str(error)):  # what torch does not load
            what = f"holds a {code[1]}, but may hold tensors and numbers only"
        fail(f"{path} {what}")
    if script not in (None, found):
        fail(f"{path} is not a checkpoint.pth or model_N.pth of {script}.py")
    return content


# Flags that may change on resuming: where things are, how fast it goes, and what is measured. Of
# --data, which may be spelled otherwise, `restore` compares the size.
RESUME_CAN_CHANGE = """output data root fresh workers amp compile accumulate log_every
checkpoint_every keep_every validate_every""".split()


def start(args):
    """The first line of main -> the content of checkpoint.pth in --output; {} for a new run

    --fresh removes what an earlier run saved; otherwise its flags must be the same.
    """
    folder = Path(args.output)
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir() if args.fresh else ():
            if regex.fullmatch(r"result\.json|(checkpoint|backbone|model_\d+)\.pth", old.name):
                old.unlink()
    barrier()
    if not (folder / "checkpoint.pth").exists():
        return {}
    saved = read_checkpoint(folder / "checkpoint.pth", args.script)
    for name, now in vars(args).items():
        before = saved["args"].get(name, now)  # a flag may be new
        if before != now and name not in RESUME_CAN_CHANGE:
            fail(f"{folder} holds a run with {name.replace('_', '-')} {before}, not {now}: choose "
                 "another --output, or give --fresh to start over")  # fmt: skip
    return saved


def once(args, name, make):
    """make(path) a file of --output, in the first process and unless the run resumes -> its path

    For what takes long, or may differ between processes, all of which read it.
    """
    path = Path(args.output, name)
    if is_main() and not Path(args.output, "checkpoint.pth").exists():
        make(path)
    barrier()
    return path


def restore(args, saved, data, iters, **parts):
    """Write args.json; restore model, optimizer... of a resumed run -> the iterations it has done

    saved: from `start`.  data: of the same size as before.  iters: the whole length. The result
    has the same bits as an uninterrupted run (one process on a CPU).
    """
    args.photos = len(data)
    args.captions = int(data.captions.ends[-1]) if hasattr(data, "captions") else 0
    about = {"command": sys.argv, "torch": torch.__version__, "processes": world_size()}
    if is_main():
        save(f"{args.output}/args.json", vars(args) | about)
    if not saved:
        return 0
    for what in "photos", "captions":
        before, now = saved["args"].get(what), getattr(args, what)
        if before not in (None, now):
            fail(f"{args.output} holds a run on {before} {what}, not {now}")
    for name, part in parts.items():
        if saved[name]:  # a scaler that was not in use has no state
            part.load_state_dict(saved[name])
    print_main(f"{args.output}: {saved['iteration']} of {iters} iterations are done")
    return saved["iteration"]


DIVERGED = "the last checkpoint is kept. Try a lower --lr, a longer --warmup, or --amp off"


def save_checkpoint(args, name, iteration, parts, **more):
    """Write {name: what has a state_dict} and `more`, unless a weight is infinite or NaN."""
    if is_main():
        content = {part: module.state_dict() for part, module in parts.items()}
        if not all(value.isfinite().all() for value in content["model"].values()):
            fail(f"a weight is not finite at iteration {iteration}: {DIVERGED}")
        content |= {"script": args.script, "args": vars(args), "iteration": iteration}
        save(Path(args.output, name), content | more)


class Metrics:
    """metrics.jsonl: a line for each log interval, with means over it (docs/output.md)"""

    def __init__(self, args, done):
        self.batch_size = args.batch_size
        self.path = Path(args.output, "metrics.jsonl")
        self.losses = defaultdict(list)
        self.waited = 0.0  # seconds for photos, since the time and iteration of the last line
        self.time, self.iteration = time.perf_counter(), done
        if is_main():  # lines after the checkpoint come again; half a line is of a killed run
            text = self.path.read_text() if done and self.path.exists() else ""
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            save(self.path, "".join(x for x in lines if json.loads(x)["iteration"] <= done))

    def wait_for(self, batches):
        """-> the next batch; the time that it takes is counted for data_wait"""
        asked = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - asked
        return batch

    def add(self, **losses):
        """Scalar losses of a micro-batch: the next line has their means, also over processes."""
        for name, loss in losses.items():
            self.losses[name].append(loss.detach())

    def means(self, iteration):
        """-> {"loss": ..., "images_per_s", "data_wait"} since the last line; synchronises once"""
        means = torch.stack([torch.stack(losses).mean() for losses in self.losses.values()])
        row = dict(zip(self.losses, gather(means[None]).mean(0).tolist()))
        if not math.isfinite(row["loss"]):
            fail(f"the loss is not finite at iteration {iteration}: {DIVERGED}")
        seconds = time.perf_counter() - self.time
        row["images_per_s"] = (iteration - self.iteration) * self.batch_size / seconds
        row["data_wait"] = self.waited / seconds  # an upper bound on GPUs, which work meanwhile
        return row

    def write(self, iteration, row):
        """Append a line. The time since `means`, spent on validation, is not counted."""
        self.losses.clear()
        self.waited = 0.0
        self.time, self.iteration = time.perf_counter(), iteration
        if is_main():
            rounded = {name: float(f"{value:.6g}") for name, value in row.items()}
            with open(self.path, "a") as file:
                file.write(json.dumps({"iteration": iteration, **rounded}) + "\n")


def write_result(args, data, **result):
    """Write result.json, the scores of the method's own task; print how to measure the backbone."""
    save(f"{args.output}/result.json", result)
    labels = ["--data", args.data, *(["--root", args.root] if args.root else [])]
    if not data.tag_names:
        labels = "--data", "folder", "--root", "LABELLED_PHOTOS"
    size = "--image-size", str(args.image_size)
    command = "--weights", f"{args.output}/backbone.pth", "random", *size, *labels
    print_main(f"measure it: python eval_linear.py {shlex.join(command)}")
