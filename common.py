"""What the scripts share: captioned photos, batches, backbones, processes, and what a run writes"""

import argparse
import importlib
import json
import math
import os
import sys
import time
import unicodedata
import zlib
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from pprint import pformat

import numpy as np
import regex
import torch
import torch.distributed as dist
from PIL import Image, ImageOps, PngImagePlugin
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

torch.serialization.add_safe_globals([argparse.Namespace])  # DINO's checkpoints hold one
PngImagePlugin.MAX_TEXT_CHUNK = 2**26  # PIL would refuse photos with 1 MB of text


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
        fail(f"{error.name} is missing: copy our folder extras to the script, or pip install it")


# ------------------------------------------------------------------------------ captioned photos

LETTERS = r"\p{L}[\p{L}\p{M}\u200c\u200d]*"  # with their marks and joiners
ACCENTS = "(?<=[a-zß-ɏ])[\u0300-\u036f]+"  # of decomposed, lower-case Latin letters
INVISIBLE = regex.compile(r"(?!(?<=[^\s\p{C}])[\u200c\u200d](?=[^\s\p{C}]))[\p{Cf}\p{Cs}]")
STRINGS = "T"  # numpy's dtype of strings of any length, in one block of memory
JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} on each line'


@dataclass
class Lists:
    """Lists of strings, each joined to lines: one block of memory, which workers share"""

    joined: np.ndarray  # (N,) of strings

    def __getitem__(self, key):
        found = self.joined[key]
        return found.splitlines() if isinstance(found, str) else Lists(found)


def lists(rows):
    """rows: of strings without line breaks (see one_line); empty ones are left out"""
    return Lists(np.array(["\n".join(filter(None, row)) for row in rows], STRINGS))


@dataclass
class CaptionData:
    """Photos, each with captions and tags (either may be empty): every source takes this form."""

    images: np.ndarray  # (N,) of paths, or of what `open` takes instead
    captions: Lists  # captions[i]: a list of strings
    tags: Lists  # tags[i]: a list of some of tag_names
    tagged: np.ndarray  # (N,) bool: are the tags known? Then [] says that none fits
    tag_names: list  # of all splits; []: there are no tags, or they were not asked for
    open: callable = Image.open  # images[i] -> PIL image, not yet decoded

    def __len__(self):
        return len(self.images)

    def columns(self):
        return self.images, self.captions, self.tags, self.tagged

    def all_captions(self):
        return [caption for captions in self.captions for caption in captions]

    def select(self, keep):
        """-> CaptionData of the photos with the indices `keep`"""
        columns = [column[keep] for column in self.columns()]
        return CaptionData(*columns, self.tag_names, self.open)

    def captioned(self):
        """-> CaptionData of the photos that have a caption"""
        keep = [n for n, captions in enumerate(self.captions) if captions]
        if not keep:
            fail(f"no photo has a caption. A .jsonl has {JSONL}")
        if lacking := len(self) - len(keep):
            print_main(f"{lacking} of {len(self)} photos have no caption: left out")
        return self.select(keep) if lacking else self


def caption_data(name, root=None, split="train", tags=False):
    """One split of --data -> CaptionData.  tags: whether COCO's file of instances is read, too"""
    if name == "coco":
        return read_photos(coco_photos, split, root or "datasets/coco", tags)
    if name.endswith(".jsonl"):
        return read_photos(jsonl_photos, split, root or os.path.dirname(name), name)
    return extra("sources").caption_data(name, root, split)  # shapes, vg, shards


def read_photos(read, split, *given):
    """-> CaptionData.  read(split, *given) -> [(path, captions, tags or None)], names of tags"""
    data = [None]
    if is_main():  # one process reads: the annotations of COCO take 3 GB meanwhile
        photos, tag_names = read(split, *given)
        missing = [path for path, *_ in photos if not os.path.isfile(path)]
        if missing or not photos:
            fail(f"{split} has {len(photos)} photos, of which {len(missing)} are missing: "
                 f"{missing[:3]}. See --root, --train-split and --val-split")  # fmt: skip
        paths, captions, tags = zip(*photos)
        if empty := sum(row.count("") for row in captions):
            print_main(f"{empty} captions of {split} are empty: left out")
        tagged = np.array([row is not None for row in tags])
        tags = lists(dict.fromkeys(row or ()) for row in tags)
        data = [CaptionData(np.array(paths, STRINGS), lists(captions), tags, tagged, tag_names)]
    if world_size() > 1:
        dist.broadcast_object_list(data)
    return data[0]


def read_json(path):
    try:
        return json.loads(Path(path).read_bytes())
    except Exception as error:
        fail(f"{path} is missing or no JSON ({error}): see --root, --train-split and --val-split")


def one_line(text):
    """NFC, single spaces, nothing invisible but joiners within words, no half emojis"""
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return " ".join(text.split())


def texts(values):
    """A list of strings -> the same, each on one line; None -> None"""
    if not isinstance(values, list | None):
        raise ValueError(f"{values!r} is no list of texts")
    return values and [one_line(value) for value in values]


def coco_photos(split, root, with_tags):
    """{split}/, annotations/captions_{split}.json; tags: categories of instances_{split}.json"""
    instances = f"{root}/annotations/instances_{split}.json"
    captions, tags, names = defaultdict(list), defaultdict(list), {}
    content = read_json(f"{root}/annotations/captions_{split}.json")
    try:
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
        fail(f"{root}, split {split}, is not in the layout of COCO: {error!r}")
    strays = [n for n in {**captions, **tags} if n not in files]  # 12 is not "12"
    if repeated or strays:
        print_main(f"{root}: {repeated} images of {split} are listed again; annotations of "
                   f"{len(strays)} ids are left out, which no image has: {strays[:3]}")  # fmt: skip
    photos = [(os.path.join(root, split, files[n]), captions[n], tags[n]) for n in files]
    return photos, list(dict.fromkeys(names[n] for n in sorted(names)))


def jsonl_photos(split, root, file):
    """One {"image", "captions", "tags", "split"} per line; all but "image" may be missing. Paths
    start from `root`. If no line has a split, the first, 21st... belong to val.
    """
    photos, splits, tag_names, unread, number = {}, [], {}, {}, 0
    try:
        for number, line in enumerate(open(file, "rb"), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            path = os.path.abspath(Path(root, row.pop("image")))
            if "caption" in row or path in photos:
                raise ValueError(f'{path} has one line, with a list of all its "captions"')
            captions, tags = texts(row.pop("captions", None)) or [], texts(row.pop("tags", None))
            photos[path] = path, captions, tags
            tag_names |= dict.fromkeys(filter(None, tags or ()))
            splits += [one_line(row.pop("split", None) or "")]
            unread |= row
    except Exception as error:  # no file, no UTF-8, no JSON, no "image", wrong types
        fail(f"{file}, line {number}: {type(error).__name__}: {error}. Expected, in UTF-8: "
             f"{JSONL}. tools/to_jsonl.py converts other files")  # fmt: skip
    splits = np.array(splits, STRINGS)
    if not any(splits):
        splits[::20] = "val"
    splits[splits == ""] = "train"
    sizes = Counter(splits)
    report_once(f"{file}: photos {dict(sizes)}; keys that are not read: {list(unread)}")
    photos = [row for row, found in zip(photos.values(), splits) if found == split]
    return photos, list(tag_names)


def fingerprint(names, *columns):
    """A checksum of photos' names, without folders, their sizes, and columns (captions, labels)"""
    checksum = 0
    for name, *row in zip(map(str, names), *columns):
        size = os.path.isfile(name) and os.path.getsize(name)
        checksum = zlib.crc32(repr([os.path.basename(name), size, *row]).encode(), checksum)
    return checksum


def swap_left_right(caption):
    """The caption of the flipped photo: the whole words [ours] left and right are swapped."""
    return regex.sub(r"\b(?i:(left)|right)\b", lambda word: "right" if word[1] else "left", caption)


# ----------------------------------------------------------------------------- photos to batches

NO_JITTER = np.float32([1, 1, 1, 0])  # factors of brightness, contrast and saturation; hue
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])  # of ImageNet
YIQ = (0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)
TO_YIQ = torch.DoubleTensor(YIQ).T
CONSTANTS = TO_YIQ.float(), TO_YIQ.inverse().float(), MEAN, STD
PHOTO_ENDINGS = tuple(
    ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm".split()
)
report_once = cache(tqdm.write)  # once per process: each worker of a DataLoader has its own


def list_photos(folder, endings=PHOTO_ENDINGS):
    """The paths of all photos below a folder, sorted -> list of str

    Links to folders are followed, but no folder is read twice: a link to a parent would list each
    photo many times. Files and folders whose names start with a dot are hidden, and left out.
    """
    paths, visited = [], set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if name.lower().endswith(endings) and not name.startswith("."):
                paths.append(os.path.join(parent, name))
    return sorted(paths)


class Unreadable(Exception):
    """A photo that cannot be decoded; the message is its path and the reason."""


@dataclass
class Photos:
    """The scripts derive their data sets from it, with sample(index, rng) -> dict. A key is (seed,
    epoch, index) in training, which seeds rng, and an index in validation, where rng is None.
    """

    data: CaptionData  # or similar
    args: argparse.Namespace  # image_size, crop_min, colour_jitter

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        """The sample, or the next one whose photo can be decoded"""
        rng = np.random.default_rng(key) if isinstance(key, tuple) else None
        index = key[-1] if rng else key
        for candidate in range(index, index + 1000):  # icmlm.py has many samples of a photo
            try:
                return self.sample(candidate % len(self), rng)
            except Unreadable as error:
                report_once(f"cannot decode {error}: the next photo is used")
        raise Unreadable("a thousand samples in a row cannot be decoded: see above")

    def photo(self, index, rng):
        """-> {"image": uint8 (size, size, 3), "jitter": (4,) for `augment`}; was it flipped?"""
        crop = partial(random_crop, rng, self.args.crop_min) if rng else centre_crop
        [image] = read_crops(self.data, index, [crop], self.args.image_size)
        jitter = colour_jitter(rng, self.args.colour_jitter) if rng else NO_JITTER
        flipped = rng and rng.random() < 0.5
        return {"image": image[:, ::-1].copy() if flipped else image, "jitter": jitter}, flipped


def read_crops(data, index, crops, size):
    """Decode a photo once and cut several crops from it -> list of (size, size, 3) uint8 arrays
    crops: functions of (width, height) -> two corners. A large JPEG is decoded at a half, a quarter
    or an eighth of its size if that has enough pixels [ours]. Raises Unreadable.
    """
    try:
        image = data.open(data.images[index])
        full_size = np.array(image.size)
        boxes = np.array([crop(full_size) for crop in crops])  # (N, 2, 2)
        smallest = np.ptp(boxes, 1).min(0)  # box's width and height, in pixels
        image.draft("RGB", [*np.ceil(size * full_size / smallest)])
        if image.mode[0] in "IF" or image.has_transparency_data:
            image = importlib.import_module("extras.sources").to_rgb(image)  # a copy skips these
        image = image.convert("RGB")
        boxes *= image.size / full_size  # draft may have shrunk it
        cut = [image.resize((size, size), Image.BILINEAR, [*box.flat]) for box in boxes]
        return [np.array(ImageOps.exif_transpose(crop)) for crop in cut]  # as people see them
    except Exception as error:  # PIL's decoders raise a dozen kinds
        raise Unreadable(f"{data.images[index]} ({error or type(error).__name__})")


def random_crop(rng, min_area, size):
    """A box of random area (a fraction in [min_area, 1]) and aspect ratio, as for Inception"""
    for _ in range(10):
        area = size.prod() * rng.uniform(min_area, 1.0)
        aspect = (4 / 3) ** rng.uniform(-1, 1)
        box = np.sqrt([area * aspect, area / aspect])  # width and height
        if (box <= size).all():
            corner = rng.uniform(0, size - box)
            return corner, corner + box
    # No luck: as torchvision, the largest box in the centre with an aspect ratio from 3/4 to 4/3.
    box = np.minimum(size, 4 / 3 * size[::-1])
    corner = (size - box) / 2
    return corner, corner + box


def centre_crop(size, side_fraction=1.0):
    """The central square; side_fraction 224 / 256 is "resize 256, centre crop 224"."""
    side = side_fraction * min(size)
    corner = (size - side) / 2
    return corner, corner + side


def colour_jitter(rng, strength):
    """-> factors of brightness, contrast and saturation, hue rotation in turns: (4,) float32"""
    limits = strength * np.array([0.4, 0.4, 0.4, 0.1])
    factors = rng.uniform(NO_JITTER - limits, NO_JITTER + limits)
    return np.float32(factors) if rng.random() < 0.8 else NO_JITTER  # a fifth as they are


def infinite_sampler(size, batch_size, seed, start=0):
    """Yield (seed, epoch, index) forever, from batch number `start` on: this process's share of
    each. Batch t is the t-th slice of the epochs' permutations, which depend only on the seed.
    """
    position, per_process = start * batch_size, batch_size // world_size()
    while True:
        epoch, done = divmod(position, size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        for index in order[done:]:
            if position % batch_size // per_process == rank():  # the place within the batch
                yield seed, epoch, index
            position += 1


def train_batches(dataset, collate, args, device, done):
    """Yield micro-batches on the device forever, --accumulate for each iteration after `done`.
    Torch is seeded for each, by --seed and its place among those of all: dropout can be resumed.
    """
    size = args.batch_size // world_size() // args.accumulate
    sampler = infinite_sampler(len(dataset), args.batch_size, args.seed, done)
    batches = load_batches(dataset, collate, args, device, size, sampler)
    for number, batch in enumerate(batches, (done + 1) * args.accumulate):
        torch.manual_seed((args.seed << 40) % 2**64 + number * world_size() + rank())
        yield batch


def load_batches(dataset, collate, args, device, batch_size=64, sampler=None):
    """Yield batches on the device: in validation one pass over the photos, in order"""
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=args.workers, collate_fn=collate,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    for batch in loader if sampler else progress(loader, desc="validation", leave=False):
        yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size), channels-last in memory

    jitter: (B, 4) from colour_jitter, applied in its order in the colour space YIQ: contrast mixes
    Y, grey, with its mean; contrast and saturation scale I and Q, whose plane hue rotates;
    brightness scales all. [ours: YIQ, the order, one clamp at the end]
    """
    to_yiq, to_rgb, mean, std = (x.to(images.device, non_blocking=True) for x in CONSTANTS)
    pixels = images / 255
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None, None]  # (B, 1, 1) each
        y, i, q = (pixels @ to_yiq).unbind(-1)  # (B, size, size) each
        y = contrast * y + (1 - contrast) * y.mean((1, 2), keepdim=True)
        angle, scale = math.tau * hue, contrast * saturation
        cos, sin = scale * angle.cos(), scale * angle.sin()
        yiq = torch.stack([y, cos * i - sin * q, sin * i + cos * q], -1)
        pixels = (brightness[..., None] * yiq @ to_rgb).clamp(0, 1)
    return ((pixels - mean) / std).movedim(3, 1)


# ------------------------------------------------------------------ backbones and their optimizers

BACKBONES = "resnet18", "resnet50", "resnet101", "wide_resnet50_2", "vgg16_bn"  # in torchvision


def build_backbone(arch, **kwargs):
    """torchvision's network with its key names, without its classifier, from random weights:
    (B, 3, H, W) -> (B, backbone.channels, H / 32, W / 32).  kwargs: of torchvision
    """
    from torchvision import models  # only here: it takes seconds, and --help needs none

    try:
        model = getattr(models, arch)(**kwargs)
    except OSError as error:  # from urllib
        fail(f"the weights of {arch} cannot be downloaded ({error}): is there a network?")
    *children, _, _ = model.named_children()  # the last two are average pooling and classifier
    backbone = nn.Sequential(OrderedDict(children))
    backbone.arch = arch
    backbone.channels = 512 if arch == "vgg16_bn" else model.fc.in_features
    return backbone


def read_init(args):
    """--init -> {}, the content of a checkpoint of the same script, or a backbone's state dict"""
    if not args.init:
        return {}
    if args.head_lr != args.lr:
        print_main(f"--init: these weights were learned elsewhere, so the backbone trains at lr "
                   f"{args.lr:g} and not at the recipe's {args.head_lr:g}")  # fmt: skip
    if args.init == "imagenet":  # torchvision's, downloaded once
        return build_backbone(args.arch, weights="IMAGENET1K_V1").state_dict()
    content = read_checkpoint(args.init)
    own = content.get("script") == args.script and content["args"]["arch"] == args.arch
    if own or content.keys() == build_backbone(args.arch).state_dict().keys():
        return content
    return extra("checkpoints").load_backbone(args.init, args.arch).state_dict()


def load_init(init, model, backbone, skip=()):
    """Start from what read_init returned: a backbone, or all tensors of the model that fit, but for
    those with the prefix `skip`, whose classes or words are others.
    """
    if init:
        module = model if "model" in init else backbone
        state = module.state_dict()
        start = init.get("model", init).items()
        fit = {name: x for name, x in start if name in state and x.shape == state[name].shape}
        fit = {name: x for name, x in fit.items() if not name.startswith(skip)}
        module.load_state_dict(fit, strict=module is backbone)
        print_main(f"--init: loaded {len(fit)} of {len(state)} tensors")


def build_optimizer(args, parameters, lr=None):
    """SGD with momentum 0.9 (all three papers), RAdam [ICMLM App. F.1] or AdamW.  lr: or args.lr"""
    options = {
        # In fp16 a first overflow would leave garbage as fused momentum.
        "SGD": {"momentum": 0.9, "fused": args.amp != "fp16"},
        "AdamW": {"fused": True},
        # Decay as in the authors' code, which skips its first five updates; torch's does not [ours]
        "RAdam": {"decoupled_weight_decay": True},
    }[args.optimizer]
    build = getattr(torch.optim, args.optimizer)
    return build(parameters, lr=lr or args.lr, weight_decay=args.weight_decay, **options)


def lr_factor(iteration, total, warmup=0.0, steps=()):
    """Linear warm-up in this fraction of training [VirTex Sec. 3; for others ours], then cosine
    decay to 0, or, with `steps`, division by 10 after each of these fractions [ICMLM App. F.1]
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

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def init_distributed():
    """Join the other processes if torchrun started this one -> this process's device"""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32, which --amp off needs on GPUs
    sys.__stdout__.reconfigure(errors="replace", line_buffering=True)  # replace: no UTF-8
    if sys.platform == "linux":  # Python 3.14 would pickle the data for each worker
        torch.multiprocessing.set_start_method("fork", force=True)
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
        dist.init_process_group(backend, timeout=timedelta(hours=6))  # one makes labels
    return device


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
    # Buffers are not broadcast: statistics of batch norm may differ, queues are equal anyway.
    ddp = nn.parallel.DistributedDataParallel
    return ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def autocast(device, amp):
    """amp: "bf16", "fp16" or "off" """
    return torch.autocast(device.type, HALF.get(amp), enabled=amp != "off")


def choose_amp(device, requested):
    """--amp if given, else bf16 [ours] if the device computes in it natively, else "off"."""
    native = torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return requested or ("bf16" if native else "off")


def print_main(message):
    """Print a line from the first process only, without breaking the progress bar."""
    if is_main():
        tqdm.write(message)


def progress(iterable, **kwargs):
    return tqdm(iterable, disable=not is_main(), dynamic_ncols=True, **kwargs)


# -------------------------------------------------------------------------------- a training run

RECIPE_NAMES = "demo", "small", "paper"
# Where things are (`fingerprint` tells what is in them), how fast it goes, what is measured
RESUME_CAN_CHANGE = """output data root workers amp compile accumulate log_every
checkpoint_every keep_every validate_every""".split()


def number(what, convert, low, high=9e18):
    """-> the `type` of a flag; of a value out of range argparse says "invalid WHAT value" """

    def parse(text):
        value = convert(text)
        if not low <= value <= high:
            raise ValueError
        return value

    parse.__name__ = what
    return parse


non_negative_int = number("whole number (0 or more)", int, 0)
positive_int = number("whole number (1 or more)", int, 1)
non_negative = number("number (0 or more)", float, 0)
positive = number("number (above 0)", float, 1e-30)
probability = number("fraction (0 to 1)", float, 0, 1)
fraction_below_1 = number("fraction (0 to below 1)", float, 0, 0.999999999)
fraction_above_0 = number("fraction (above 0, up to 1)", float, 1e-9, 1)
# The old names, until no script uses them.
whole, count, weight = non_negative_int, positive_int, non_negative
fraction, share = fraction_below_1, fraction_above_0


def recipe_table(table):
    """For --help: the defaults of the three recipes"""
    return pformat({"defaults of --recipe": RECIPE_NAMES, **table}, sort_dicts=False)


def apply_recipe(args, script, table, **changes):
    """Give flags that were left out the value of the recipe's column; call it after parse_args.
    table: {name: (demo, small, paper)}, also for constants without a flag; batch_size before the
    learning rates, which are scaled to it.  changes: what replaces the column paper
    """
    by_data = "small" if args.data.endswith(".jsonl") else "paper"
    args.recipe = args.recipe or ("demo" if args.data == "shapes" else by_data)
    recipe = {name: row[RECIPE_NAMES.index(args.recipe)] for name, row in table.items()}
    recipe |= changes if args.recipe == "paper" else {}
    if args.iters and args.epochs:
        fail("give --iters or --epochs, not both")
    if args.iters or args.epochs:
        recipe |= {"iters": None, "epochs": None}
    year = "2017" if args.data == "coco" else ""
    recipe |= {"script": script, "train_split": f"train{year}", "val_split": f"val{year}"}
    recipe["output"] = f"runs/{script}-{Path(args.data).stem}".removesuffix("-shapes")
    scale = (args.batch_size or recipe["batch_size"]) / recipe["batch_size"]
    recipe |= {name: scale * recipe[name] for name in ("lr", "text_lr") if name in recipe}  # [ours]
    args.head_lr = args.lr or recipe["lr"]
    if args.recipe == "small" and args.init and not written_by_us(args.init):
        # Few photos would take away from weights that were learned from many. [ours]
        args.head_lr = recipe["lr"]
        recipe["lr"] *= 0.1
    for name, value in recipe.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def run_args(path):
    """-> the arguments of the run of ours that wrote this file, by args.json beside it, or {}"""
    try:
        content = json.loads(Path(path).with_name("args.json").read_bytes())
    except (OSError, ValueError):  # there is none, or it is another program's and no JSON
        return {}
    return content if isinstance(content, dict) and "script" in content else {}


def written_by_us(path):
    """Whether a run of ours wrote these weights. Those of "imagenet" come from elsewhere."""
    if path == "imagenet" or not os.path.isfile(path):
        return False
    return bool(run_args(path)) or "script" in read_checkpoint(path)


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f"--output {path} cannot be a folder: {error.strerror}")


def save(path, content):
    """The first process writes JSON, or what torch.save takes; until then the old file stays."""
    if is_main():
        temporary = f"{path}.{os.getpid()}.tmp"  # what a crash or a full disk leaves
        with open(temporary, "wb") as file:
            if f"{path}".endswith(".json"):
                file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())
            else:
                torch.save(content, file)
        os.replace(temporary, path)


def save_weights(path, module):
    """A plain state dict, on the CPU and in the usual memory format"""
    save(path, {name: v.cpu().contiguous() for name, v in module.state_dict().items()})


def read_checkpoint(path):
    """-> the dict in a file, its tensors on the CPU. No code of the file is run."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # from zipfile, pickle or torch; or it holds no dict
        fail(f"{path} is missing, cut off, or holds more than tensors and numbers ({error!r:.80}). "
             "Training writes such files, and torch.save(model.state_dict(), FILE)")  # fmt: skip


def load_checkpoint(args):
    """The first line of main -> what the same command saved, {} for a new run"""
    if args.batch_size % (args.accumulate * world_size()):
        fail(f"--batch-size {args.batch_size} cannot be divided by processes times --accumulate")
    make_folder(args.output)
    path = f"{args.output}/checkpoint.pth"
    if not os.path.exists(path):
        return {}
    checkpoint = read_checkpoint(path)
    for name, now in vars(args).items():
        before = checkpoint["args"].get(name, now)  # a flag may be new
        if before != now and name not in RESUME_CAN_CHANGE:
            fail(f"{args.output} holds a run with {name} {before}, not {now} (None: left out): "
                 "choose another --output, or delete the folder to start over")  # fmt: skip
    return checkpoint


def begin_run(args, checkpoint, *splits):
    """Refuse to resume with other data, too; write args.json.  splits: see `fingerprint`"""
    args.checksums = [fingerprint(*columns) for columns in splits]
    if os.path.isfile(getattr(args, "init", None) or ""):
        args.checksums.append(zlib.crc32(Path(args.init).read_bytes()))
    if checkpoint and checkpoint["args"]["checksums"][: len(args.checksums)] != args.checksums:
        fail(f"{args.output} holds a run with other data or --init: choose another --output")
    about = {"command": sys.argv, "torch": torch.__version__, "processes": world_size()}
    save(f"{args.output}/args.json", vars(args) | about)


def once(args, name, make):
    """A file of --output for all processes: make(path), unless the run resumes -> its path"""
    path = Path(args.output, name)
    if is_main() and not os.path.exists(f"{args.output}/checkpoint.pth"):
        make(path)
    barrier()
    return path


def restore(args, checkpoint, iters, parts):
    """Give the parts, which `save_checkpoint` got, their states -> the iterations that are done"""
    if not checkpoint:
        return 0
    for name, part in parts.items():
        if checkpoint[name]:  # a scaler that was not in use has no state
            part.load_state_dict(checkpoint[name])
    print_main(f"{args.output}: {checkpoint['iteration']} of {iters} iterations are done")
    return checkpoint["iteration"]


def save_checkpoint(args, name, iteration, parts, **more):
    """Write {name: what has a state_dict} and `more`, unless a weight is infinite or NaN."""
    content = {part: module.state_dict() for part, module in parts.items()}
    check_finite(content["model"].values())
    content |= {"script": args.script, "args": vars(args), "iteration": iteration}
    content["log"] = Path(f"{args.output}/metrics.jsonl").read_text()
    save(f"{args.output}/{name}", content | more)


def check_finite(values):
    """Of weights, or of the losses"""
    if not all(value.isfinite().all() for value in values):
        fail("a loss or a weight is not finite: the last checkpoint is kept. Try a lower --lr")


class Log:
    """metrics.jsonl: a line for each log interval, with means over it (docs/running.md)"""

    def __init__(self, args, checkpoint):
        self.photos = args.batch_size / args.accumulate  # in each micro-batch
        if is_main():  # after a kill, later lines will come again
            Path(f"{args.output}/metrics.jsonl").write_text(checkpoint.get("log", ""))
            self.file = open(f"{args.output}/metrics.jsonl", "a", buffering=1)  # by lines
        self.begin()

    def begin(self):
        self.losses = []  # of each micro-batch
        self.waited, self.time = 0.0, time.perf_counter()  # seconds for batches, counted in main

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
            self.file.write(json.dumps({"iteration": iteration, **row}) + "\n")
        self.begin()


def end_run(args, backbone):
    """The last line of main: write backbone.pth, say how to measure it, and leave together"""
    weights = f"{args.output}/backbone.pth"
    save_weights(weights, backbone)
    data = "" if args.data == "shapes" else " --data folder --root LABELLED_PHOTOS"
    print_main(f'measure it: python eval_linear.py --weights "{weights}" random{data}')
    end_distributed()
