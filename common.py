"""What the methods share:

    starting, messages       run, fail, require, error_context, print_main, progress
    flags                    choose_recipe, flag_parser, parse
    processes, precision     World, init_distributed, barrier, gather, data_parallel, autocast
    captioned images         caption_data -> CaptionData: the built-in scenes, COCO, a .jsonl
    from file to batch       Samples, load_image, read_crops, infinite_sampler, loader
    on the device            augment: applies the colour jitter of load_image, normalises
    backbones, optimisation  build_backbone, build_optimizer, lr_factor, set_lr
    the output directory     Run, whose `steps` feed the training loop; read_checkpoint
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import time
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import torch
import torch.distributed as dist
from PIL import ExifTags, Image, ImageOps
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

# ---------------------------------------------------------------------------- starting, messages


def run(main, get_args):
    """Start a script. What is missing (a file, a package, memory) ends it with one line; other
    errors keep their traceback and the notes of error_context.
    """
    try:
        main(get_args())
    except KeyboardInterrupt:
        sys.exit("interrupted: a training resumes from its last checkpoint, if it has saved one")
    except ModuleNotFoundError as error:
        fail(f"{error.name} is missing: pip install -r requirements.txt, or copy our file of that "
             "name beside the script")  # fmt: skip
    except (torch.OutOfMemoryError, MemoryError):
        fail("out of memory: try a smaller --batch-size, --image-size or --arch, or, in training, "
             "--accumulate 4")  # fmt: skip
    except OSError as error:  # a wrong path, no permission, a full disk, no such model on the hub
        fail("; ".join([" ".join(str(error).split()), *getattr(error, "__notes__", [])]))


def fail(message):
    """Exit with a one-line message. Other ranks sleep: torchrun ends them when the first exits."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)
    sys.exit(f"error: {message}")


def require(condition, message):
    if not condition:
        fail(message)


@contextlib.contextmanager
def error_context(note):
    """Add a note to any error in the block: which file was read, or what it should contain."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


IS_MAIN = os.environ.get("RANK", "0") == "0"  # as World.is_main, but known at once


def print_main(message):
    """Print a line from the first process only, without breaking the progress bar."""
    if IS_MAIN:
        tqdm.write(message)
        sys.stdout.flush()


progress = partial(tqdm, disable=not IS_MAIN, dynamic_ncols=True)


def format_scores(scores):
    """{name: number} -> "forward 3.03, backward 3.05" """
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


def import_if_there(name):
    """Import one of our modules; None if the script was copied without it."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


# ----------------------------------------------------------------------------------------- flags

RECIPE_NAMES = "demo", "small", "paper"
BACKBONES = "resnet18", "resnet50", "resnet101", "wide_resnet50_2", "vgg16_bn"  # in torchvision
DATA = "shapes (built in), coco, vg, a .jsonl file, or a folder made by tools/make_shards.py"


def positive(text, kind=float):
    value = kind(text)
    if value > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not above 0")


def positive_int(text):
    return positive(text, int)


def fraction(text):
    value = float(text)
    if 0 <= value <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a fraction between 0 and 1")


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of the docstring and shows each default."""

    def _get_help_string(self, action):
        silent = str(action.default) in ("None", "False", argparse.SUPPRESS)
        return action.help if silent else f"{action.help} (default %(default)s)"


def build_parser(description=None, **kwargs):
    parser = argparse.ArgumentParser(
        description=description, formatter_class=Help, allow_abbrev=False, **kwargs
    )
    parser.error = fail  # errors are one line
    return parser


def peek(argv, *flags):
    """The command line's values of a few flags, on which defaults depend -> Namespace"""
    parser = build_parser(add_help=False)
    for flag in flags:
        parser.add_argument(flag)
    return parser.parse_known_args(argv)[0]


def choose_recipe(table, argv, paper={}):
    """The column of the table for --recipe, or else for --data -> {name: default}

    table: {name: (demo, small, paper)}. A name without a flag is a constant: change it there.
    paper: {name: value} that override the column `paper`.
    """
    given = peek(argv, "--data", "--recipe", "--iters", "--epochs")
    data = given.data or "shapes"
    name = "demo" if data == "shapes" else "small" if data.endswith(".jsonl") else "paper"
    if given.recipe in RECIPE_NAMES:
        name = given.recipe
    recipe = {key: row[RECIPE_NAMES.index(name)] for key, row in table.items()}
    if name == "paper":
        recipe |= paper
    if given.iters or given.epochs:
        recipe |= {"iters": None, "epochs": None}
    year = "2017" if data == "coco" else ""
    return {**recipe, "recipe": name, "train_split": f"train{year}", "val_split": f"val{year}"}


def flag_parser(script, description, recipe):
    """The flags that mean the same in every training script -> parser

    --lr and --text-lr have no default: get_args scales the recipe's, but not a given one.
    """
    # fmt: off
    parser = build_parser(description)
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help=DATA)
    add("--recipe", choices=RECIPE_NAMES, help="default demo (shapes), small (.jsonl) or paper")
    add("--root", help="folder of the data (default datasets/<name>; for a .jsonl, its folder)")
    add("--train-split", help="name of the training split")
    add("--val-split", help="name of the validation split")
    add("--image-size", type=positive_int, help="crop side in pixels; cost grows with its square")
    add("--crop-min", type=fraction, help="smallest fraction of a photo's area in a crop")
    add("--colour-jitter", type=fraction, help="strength; lower it if captions name colours")
    add("--workers", type=int, default=min(8, os.cpu_count() // 2),  # on 2 cores, 2 were slower
        help="DataLoader workers per process; raise it if data_wait > 0.05")

    group = parser.add_argument_group("backbone and optimisation")
    add = group.add_argument
    add("--arch", choices=BACKBONES, help="the backbone; resnet18 for small data or a CPU")
    add("--batch-size", type=positive_int, help="images per iteration over all processes")
    length = group.add_mutually_exclusive_group().add_argument
    length("--iters", type=positive_int, help="training iterations; scale them with the data")
    length("--epochs", type=positive, help="training length in passes over the data")
    add("--lr", type=positive, help="peak learning rate; lower if the loss is not finite (default "
        f"{recipe['lr']:g} for batches of {recipe['batch_size']}, scaled to --batch-size)")
    add("--warmup", type=fraction, help="warm-up of the learning rate, as a fraction of training")
    add("--weight-decay", type=float, help="raise it if photos are few")

    run_flags(parser, script)

    add = parser.add_argument_group("probe of the backbone (see eval_linear.py)").add_argument
    add("--probe-data", help="shapes, coco, voc07, folder or a .jsonl (default: --data's tags)")
    add("--probe-root", help="folder of --probe-data")
    parser.set_defaults(**recipe | {"lr": None, "text_lr": None})
    return parser


def run_flags(parser, script):
    """The flags of everything that trains into an output directory: see Run."""
    # fmt: off
    add = parser.add_argument_group("run").add_argument
    parser.script = script
    add("--output", help="output directory, from which the same command resumes (default "
        f"runs/{script}; runs/{script}-NAME for data that is not built in)")
    add("--fresh", action="store_true", help="delete the earlier run in --output and start over")
    add("--seed", type=int, default=0, help="random seed")
    add("--amp", choices=("bf16", "fp16", "off"),
        help="precision; where no default is shown, bf16 if supported")
    add("--accumulate", type=positive_int, default=1,
        help="micro-batches per batch: their gradients are accumulated, which saves memory")
    add("--compile", action="store_true", help="torch.compile: slower to start, faster on GPUs")
    add("--log-every", type=positive_int, help="iterations between lines of metrics.jsonl")
    add("--checkpoint-every", type=positive_int, help="iterations between saves of checkpoint.pth")
    add("--keep-every", type=positive_int, help="iterations between model_N.pth (early stopping)")


def parse(parser, argv):
    args = parser.parse_args(argv)
    suffix = "" if args.data == "shapes" else f"-{Path(args.data).stem}"
    args.output = args.output or f"runs/{parser.script}{suffix}"  # other data: no collision
    parts = int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate
    if args.batch_size and args.batch_size % parts:
        fail(f"--batch-size {args.batch_size} cannot be divided by {parts}, which is the number "
             "of processes times --accumulate")  # fmt: skip
    return args


# ---------------------------------------------------------------------- processes and precision


class World(NamedTuple):
    """This process among all: its rank, in [0, size), and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0


def init_distributed():
    """Join the other processes if torchrun started this one (NCCL or gloo) -> World"""
    gpus = torch.cuda.is_available() and torch.cuda.device_count()
    torch.backends.cudnn.benchmark = True
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local}" if gpus else "cpu")
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if gpus:
        require(local < gpus, "there are fewer GPUs than processes: lower --nproc_per_node")
        torch.cuda.set_device(device)
    # CPU tensors go through gloo. Others may wait for hours while the first process makes labels.
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=6))
    return World(dist.get_rank(), dist.get_world_size(), device)


def end_distributed(world):
    """Leave the process group: the first process does the rest alone."""
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()


def barrier(world):
    if world.size > 1:
        dist.barrier()


def gather(x, world):
    """(B, ...) of each process -> (size * B, ...) on all of them, in the order of the processes"""
    if world.size == 1:
        return x
    gathered = x.new_empty(world.size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous())
    return gathered


def data_parallel(model, world):
    """DistributedDataParallel if there are several processes. BatchNorm stays per process."""
    if world.size == 1:
        return model
    warnings.filterwarnings("ignore", category=FutureWarning)  # on broadcast_buffers in torch 2.15
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)  # queues are equal


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, amp):
    """The context of mixed precision; amp: "bf16", "fp16" or "off"."""
    return torch.autocast(device.type, HALF.get(amp), enabled=amp != "off")


def choose_amp(device, requested):
    """--amp if given, else bf16 if the device computes in it natively, else "off"."""
    if requested:
        return requested
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        mkldnn = torch.backends.mkldnn.is_available()
        native = mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if native else "off"


# ------------------------------------------------------------------------------ captioned images

STRINGS = np.dtypes.StringDType()  # variable-length, in one block that DataLoader workers share


def image_files(paths):
    """Paths of images, all of which are there -> (N,) of STRINGS"""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} images are missing, the first is {missing[0]}")
    return np.array(paths, STRINGS)


@dataclass
class CaptionData:
    """Images, each with captions and tags (either may be empty): every data source takes this form.

    An image is a key, see open_image. Its captions are one string, a line each, likewise its tags:
    millions of Python lists would be copied into each DataLoader worker. For shards the columns are
    sources.MappedStrings, whose `sampler` Run.steps uses instead of infinite_sampler.
    """

    images: np.ndarray  # (N,) of keys
    captions: np.ndarray  # (N,) of STRINGS, from join_lines
    tags: np.ndarray  # (N,) likewise
    tag_names: list = None  # all that an image may have; None: the source knows no tags

    def __len__(self):
        return len(self.images)

    @cached_property
    def num_captions(self):
        return np.array([len(text.splitlines()) for text in self.captions], int)

    def captions_of(self, i):
        return self.captions[i].splitlines()

    def tags_of(self, i):
        """-> indices into tag_names, in ascending order"""
        return sorted({self.tag_names.index(name) for name in self.tags[i].splitlines()})

    def all_captions(self):
        """-> list of the captions of all images, in their order"""
        return [caption for text in self.captions for caption in text.splitlines()]

    def image_of_caption(self):
        """(captions,) int64: the index of each caption's image"""
        return np.repeat(np.arange(len(self)), self.num_captions)

    def select(self, keep):
        """-> CaptionData of the images with the indices `keep`"""
        images, captions, tags = self.images[keep], self.captions[keep], self.tags[keep]
        selected = CaptionData(images, captions, tags, self.tag_names)
        selected.num_captions = self.num_captions[keep]  # counting those of shards takes long
        return selected

    def with_captions(self, captions):
        """-> CaptionData with other captions: a list of strings for each image"""
        return CaptionData(self.images, join_lines(captions), self.tags, self.tag_names)

    def captioned(self):
        """-> CaptionData of the images that have a caption; prints how many have none"""
        keep = np.flatnonzero(self.num_captions)
        require(len(keep), f"no image has a caption. Expected in a .jsonl: {JSONL}")
        if len(keep) == len(self):
            return self
        print_main(f"{len(self) - len(keep)} of {len(self)} images have no caption: left out")
        return self.select(keep)


def join_lines(lists):
    """A list of strings for each image -> (N,) of STRINGS, a line for each string"""
    return np.array(["\n".join(clean(strings)) for strings in lists], STRINGS)


def clean(strings):
    """Single spaces for all white space, line breaks too -> list, without empty strings

    Half an emoji, of a text that was cut, becomes a question mark.
    """
    split = (text.encode(errors="replace").decode().split() for text in strings)
    return [" ".join(words) for words in split if words]


def caption_data(name, root=None, split="train"):
    """One split of --data -> CaptionData.  root: --root"""
    if name.endswith(".jsonl"):
        data = jsonl_data(name, root or os.path.dirname(name), split)
    elif name == "coco":
        data = coco_data(root or "datasets/coco", split)
    elif name == "shapes":
        import shapes  # only here: a copied script works without it

        scenes, captions, tags = shapes.captioned_scenes(split)
        images = np.array(scenes, object)  # of int
        data = CaptionData(images, join_lines(captions), join_lines(tags), list(shapes.SHAPES))
    else:
        import sources  # only here: a copied script works without it

        data = sources.caption_data(name, root, split)
    require(len(data), f"--data {name} has no image of the split {split}")
    return data


COCO = (
    "expected: a folder --root with annotations/captions_{split}.json, instances_{split}.json for "
    "labels, and the photos in {split}/; --train-split and --val-split name the splits"
)


def coco_data(root, split):
    """See COCO; the categories of instances_{split}.json, if it is there, are the tags"""
    captions = defaultdict(list)
    tags = defaultdict(list)
    names = {}
    folder = Path(root, "annotations")
    with error_context(COCO):
        content = json.loads((folder / f"captions_{split}.json").read_bytes())
        files = {image["id"]: image["file_name"] for image in content["images"]}
        for row in content["annotations"]:
            captions[row["image_id"]].append(row["caption"])
        instances = folder / f"instances_{split}.json"
        if instances.exists():
            content = json.loads(instances.read_bytes())
            names = {row["id"]: row["name"] for row in content["categories"]}
            for row in content["annotations"]:
                tags[row["image_id"]].append(names[row["category_id"]])
        return CaptionData(
            image_files([os.path.join(root, split, file) for file in files.values()]),
            join_lines(captions[image] for image in files),
            join_lines(tags[image] for image in files),
            clean(names[category] for category in sorted(names)) or None,
        )


JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} on each line'


def jsonl_data(path, root, split):
    """One {"image", "captions", "tags", "split"} per line; all but "image" are optional.

    Relative paths start from `root`. A line without a split belongs to "train"; if no line has one,
    a fixed random twentieth is "val".
    """
    rows = []
    with open(path, "rb") as file:  # json detects the encoding of bytes
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                row["image"] = os.path.join(root, row["image"])
                row["captions"], row["tags"] = captions_and_tags(row)
                rows.append(row)
            except Exception as error:  # no JSON, no "image", wrong types
                fail(f"{path}, line {number}: {error!r}. Expected: {JSONL}")
    distinct = {row["image"] for row in rows}
    require(len(distinct) == len(rows), f"{path} repeats an image: one line has all its captions")
    tag_names = dict.fromkeys(tag for row in rows for tag in row["tags"])
    if not any(row.get("split") for row in rows):
        order = np.random.default_rng(0).permutation(len(rows))
        for n in order[: max(1, len(rows) // 20)]:
            rows[n]["split"] = "val"
    rows = [row for row in rows if (row.get("split") or "train") == split]
    return CaptionData(
        image_files([row["image"] for row in rows]),
        join_lines(row["captions"] for row in rows),
        join_lines(row["tags"] for row in rows),
        list(tag_names) or None,
    )


def captions_and_tags(row):
    """{"captions": [...], "tags": [...]}, both optional -> two lists of strings"""
    captions = row.get("captions", [])
    tags = row.get("tags", [])
    if "caption" in row or {type(captions), type(tags)} != {list}:
        raise ValueError('"captions" (not "caption") and "tags" are lists of strings')
    return clean(captions), clean(map(str, tags))


def swap_left_right(caption):
    """The caption of the flipped photo: the whole words left and right are swapped."""
    other = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda word: other[word[0].lower()], caption, flags=re.I)


# ---------------------------------------------------------------------------- from file to batch


class Unreadable(Exception):
    """An image that cannot be decoded; the message is its path."""


report_once = cache(tqdm.write)  # in each process


@dataclass
class Samples(Dataset):
    """make_sample(index, rng) -> one sample, a dict.

    In training a key is (seed, epoch, index), on which alone rng depends. In validation a key is
    an index, and rng is None. The next sample replaces an unreadable one.
    """

    make_sample: object
    size: int

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        training = isinstance(key, tuple)
        rng = np.random.default_rng(key) if training else None
        index = key[-1] if training else key
        for candidate in range(index, index + 1000):  # in icmlm.py a photo has many samples
            try:
                return self.make_sample(candidate % self.size, rng)
            except Unreadable as error:
                report_once(f"cannot decode {error}: the next photo is used")
        raise Unreadable("1,000 samples in a row cannot be decoded: see above")


def random_crop(rng, smallest, width, height):
    """A box of random area (a fraction in [smallest, 1]) and aspect ratio, as for Inception"""
    for _ in range(10):
        area = width * height * rng.uniform(smallest, 1.0)
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


def open_image(key):
    """key: a path, the number of a scene, or a place in a shard -> PIL image, not yet decoded"""
    if isinstance(key, int):
        import shapes

        return shapes.draw(key)
    if ".tar\t" in key:
        import sources

        return sources.open_in_shard(key)
    return Image.open(key)


def read_crops(key, crops, size):
    """Decode an image once and cut several crops from it -> list of (size, size, 3) uint8 arrays

    key: see open_image.  crops: functions (width, height) -> box. A large JPEG is decoded at a
    half, a quarter or an eighth of its size if that has enough pixels. Raises Unreadable.
    """
    try:
        image = open_image(key)
        if image.getexif().get(ExifTags.Base.Orientation, 1) > 1:
            ImageOps.exif_transpose(image, in_place=True)  # only if needed: it decodes all pixels
        full_size = np.array(image.size)
        boxes = np.array([crop(*full_size) for crop in crops])
        if image.format == "JPEG":
            smallest = (boxes[:, 2:] - boxes[:, :2]).min(0)
            image.draft("RGB", np.ceil(size * full_size / smallest).astype(int).tolist())
        image = to_rgb(image)
        boxes = boxes * np.tile(image.size / full_size, 2)  # draft may have shrunk it
        boxes = np.minimum(boxes, np.tile(image.size, 2)).tolist()  # rounding errors may exceed it
        return [np.array(image.resize((size, size), Image.BILINEAR, box)) for box in boxes]
    except Exception as error:  # PIL's decoders raise a dozen kinds
        raise Unreadable(str(key)) from error


def to_rgb(image):
    """A PIL image in RGB; 16-bit pixels, which PIL would clip to white, become 8-bit"""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


NO_JITTER = np.array([1, 1, 1, 0], np.float32)


def load_image(key, rng, args):
    """One photo, cropped and flipped at random; the centre crop if rng is None

    key: see open_image.  args: image_size, crop_min, colour_jitter.
    -> {"image": uint8 (size, size, 3), "jitter": (4,) for `augment`, "flipped": bool}
    """
    crop = partial(random_crop, rng, args.crop_min) if rng else centre_crop
    [image] = read_crops(key, [crop], args.image_size)
    jitter = colour_jitter(rng, args.colour_jitter) if rng else NO_JITTER
    flipped = bool(rng) and rng.random() < 0.5
    return {"image": image[:, ::-1] if flipped else image, "jitter": jitter, "flipped": flipped}


def colour_jitter(rng, strength):
    """(4,) float32: factors of brightness, contrast and saturation, and a hue rotation in turns

    At strength 1, factors within 1 +- 0.4 and +- 0.1 turns. With probability 0.2, no change.
    """
    limits = strength * np.array([0.4, 0.4, 0.4, 0.1])
    factors = rng.uniform(NO_JITTER - limits, NO_JITTER + limits)
    return factors.astype(np.float32) if rng.random() < 0.8 else NO_JITTER


def stack(samples, name):
    """The arrays or numbers `name` of all samples -> tensor (B, ...)"""
    return torch.from_numpy(np.stack([sample[name] for sample in samples]))


def collate_images(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4)"""
    return {"images": stack(samples, "image"), "jitter": stack(samples, "jitter")}


def infinite_sampler(size, batch_size, world, seed, start=0):
    """Yield (seed, epoch, index) forever, beginning with batch number `start`, from 0

    The epochs' permutations, which depend only on the seed, are concatenated. Batch t is their
    t-th slice of `batch_size` (global), of which each process takes its part.
    """
    position = start * batch_size
    while True:
        epoch, done = divmod(position, size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        for index in order[done:]:
            if position % batch_size // (batch_size // world.size) == world.rank:
                yield seed, epoch, int(index)
            position += 1


def loader(dataset, batch_size, workers, collate_fn=None, sampler=None):
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available(),
    )


def validation_batches(samples, workers, collate_fn, device, batch_size=64):
    """One pass over Samples, in order -> batches on `device`"""
    batches = loader(samples, batch_size, workers, collate_fn)
    for batch in progress(batches, desc="validation", unit=" batches", leave=False):
        yield to_device(batch, device)


def to_device(batch, device):
    """Move all tensors of a batch: dicts and lists of tensors."""
    return tree_map(lambda tensor: tensor.to(device, non_blocking=True), batch)


# --------------------------------------------------------------------------------- on the device

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
GREY = np.array([0.299, 0.587, 0.114])
YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
# In RGB, a rotation by a in the plane of I and Q is the matrix GREY (in each row) + cos(a) HUE[0]
# + sin(a) HUE[1].
HUE = np.eye(3) - GREY, np.linalg.inv(YIQ) @ [[0, 0, 0], [0, 0, -1], [0, 1, 0]] @ YIQ


@cache
def colour_constants(device):
    """Cached on the device: copying them from the host would synchronise it."""
    constants = GREY, np.array(HUE), MEAN, STD
    return [torch.tensor(value, dtype=torch.float32, device=device) for value in constants]


def augment(images, jitter=None):
    """uint8 (B, size, size, 3) -> normalised float32 (B, 3, size, size), channels-last in memory

    jitter: (B, 4) from colour_jitter. Brightness, contrast, saturation and hue (a rotation in YIQ),
    in this order, are each linear in the colours. Combined they are one 3x3 matrix and one offset
    per image: a single pass over the pixels. [ours: the fixed order, one clamp at the end]
    """
    grey, hue_plane, mean, std = colour_constants(images.device)
    pixels = images.float() / 255
    if jitter is not None:
        brightness, contrast, saturation, hue = jitter.T[..., None, None]  # (B, 1, 1) each
        hue_angle = 2 * math.pi * hue
        rotate = grey + hue_angle.cos() * hue_plane[0] + hue_angle.sin() * hue_plane[1]
        saturate = saturation * torch.eye(3, device=pixels.device) + (1 - saturation) * grey
        matrix = contrast * brightness * rotate @ saturate
        red, green, blue = matrix[:, None, None].unbind(-1)  # (B, 1, 1, 3) each
        # Contrast blends with the mean grey, which saturation and hue do not change.
        mean_grey = (pixels.mean((1, 2)) @ grey)[:, None, None]
        offset = (1 - contrast) * brightness * mean_grey
        pixels = pixels[..., :1] * red + pixels[..., 1:2] * green + pixels[..., 2:] * blue
        pixels = (pixels + offset[..., None]).clamp_(0, 1)
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


# ----------------------------------------------------------------------- backbones, optimisation


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


def build_optimizer(name, parameters, lr, weight_decay):
    """SGD with momentum 0.9 (all three papers), RAdam [ICMLM App. F.1] or AdamW"""
    kinds = {
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, fused=True),
        "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True),  # as in its authors' code
    }
    return kinds[name](parameters, lr=lr, weight_decay=weight_decay)


def lr_factor(iteration, total, warmup=0.0, steps=()):
    """Factor of the learning rate at an iteration, counted from 0

    Linear warm-up over the fraction `warmup` of training, then cosine decay to 0. With `steps`, it
    is divided by 10 after each of these fractions instead [ICMLM App. F.1].
    """
    start = warmup * total
    if iteration < start:
        return iteration / start
    if steps:
        return 0.1 ** sum(iteration >= step * total for step in steps)
    return 0.5 * (1 + math.cos(math.pi * (iteration - start) / (total - start)))


def set_lr(optimizer, factor):
    """Set the learning rates to `factor` times those that the optimizer was built with."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


# ------------------------------------------------------------------------- the output directory

# Flags that may change on resuming: where and how fast a run goes, and what is measured.
RESUME_CAN_CHANGE = (
    "output root fresh workers amp compile log_every checkpoint_every keep_every validate_every "
    "probe_data probe_root probe_images"
).split()

DIVERGED = "the last checkpoint is kept. Try a lower --lr, a longer --warmup, or --amp off"


def write_json(path, content):
    Path(path).write_text(json.dumps(content, indent=2))


def save(path, content):
    """torch.save through a temporary file: a crash or a full disk leaves the old file intact."""
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def save_weights(path, module):
    """A plain state dict, on the CPU and in the usual memory format"""
    save(path, {name: v.cpu().contiguous() for name, v in module.state_dict().items()})


def read_checkpoint(path, script=None):
    """Load a file onto the CPU without running code from it.  script: that must have written it"""
    note = f"for example, python {script or 'virtex'}.py writes one"
    with error_context(note), open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
            found = content.get("script")
        except Exception as error:  # from zipfile, pickle or torch; or it holds no dict
            fail(f"{path} is not a checkpoint, or is truncated ({type(error).__name__})")
    if script not in (None, found):
        fail(f"{path} is not a checkpoint.pth or model_N.pth of {script}.py")
    return content


class Run:
    """The output directory (docs/output.md): args.json, metrics.jsonl, and checkpoint.pth, from
    which the same command resumes. The result is bit-identical to that of an uninterrupted run
    (one process on a CPU).
    """

    def __init__(self, args, script, world, data):
        """data: the training data, CaptionData or similar; a resumed run needs the same size"""
        self.args = args
        self.script = script
        self.world = world
        self.sampler = getattr(data.images, "sampler", infinite_sampler)  # shards have one
        self.folder = Path(args.output)
        captions = int(sum(getattr(data, "num_captions", ())))  # labelled images have none
        self.settings = vars(args) | {"images": len(data.images), "captions": captions}
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = filelock.FileLock(self.folder / ".lock")
            with error_context("another run trains into this directory: choose another --output"):
                self.lock.acquire(timeout=8)  # by then workers of a run just killed have ended
        self.saved = {}  # the content of checkpoint.pth, or else of --init
        self.iteration = 0  # otherwise the run resumes from checkpoint.pth
        self.metrics = []  # the lines of metrics.jsonl
        path = self.folder / "checkpoint.pth"
        if path.exists() and not args.fresh:
            self.saved = read_checkpoint(path, script)
            for name, now in self.settings.items():  # in the order of --help
                before = self.saved["args"].get(name)
                if before != now and name not in RESUME_CAN_CHANGE:
                    flag = name.replace("_", "-")
                    fail(f"{self.folder} holds a run with {flag} {before}, not {now}: choose "
                         "another --output, or give --fresh to start over")  # fmt: skip
            self.iteration = self.saved["iteration"]
            self.metrics = self.saved["metrics"]
        elif self.settings.get("init"):
            import sources  # only here: a copied script works without it

            self.saved = sources.read_init(args.init, script, args.arch)
        barrier(world)  # before the first process removes or writes anything
        if world.is_main:
            for path in self.folder.iterdir() if args.fresh else ():
                if re.fullmatch(r"result\.json|(checkpoint|backbone|model_\d+)\.pth", path.name):
                    path.unlink()
            (self.folder / "metrics.jsonl").write_text("".join(self.metrics))
            about = {"command": sys.argv, "torch": torch.__version__, "processes": world.size}
            write_json(self.folder / "args.json", self.settings | about)
        print_main(f"{script}: {world.size} process(es), {args.batch_size} images per iteration, "
                   f"device {world.device}, amp {args.amp}, into {args.output}")  # fmt: skip

    def initialize(self, model, backbone, **kwargs):
        """Start from the weights of --init.  kwargs: of sources.initialize"""
        if self.saved and not self.iteration:
            import sources

            sources.initialize(self.saved, model, backbone, **kwargs)

    def resume(self, **parts):
        """Name what checkpoints hold (model, optimizer...) and restore it when a run resumes."""
        self.parts = parts
        if self.iteration:
            for name, part in parts.items():
                if self.saved[name]:  # a scaler that was not in use has no state
                    part.load_state_dict(self.saved[name])
        self.saved = {}  # frees gigabytes at the papers' sizes

    def steps(self, samples, collate_fn, total, **extra_state):
        """Yield (iteration, its micro-batches on the device, --accumulate of them) up to `total`

        `for iteration, batches in run.steps(...): ...; run.log(loss=loss)`: when the loop asks for
        the next iteration, metrics and checkpoints are written. After the last one the process
        group has ended: only the first process goes on.  extra_state: also in checkpoints
        """
        args, world = self.args, self.world
        if self.iteration >= total:
            print_main(f"the run in {self.folder} has finished and is only evaluated again: a "
                       "longer one needs --fresh or another --output")  # fmt: skip
        elif self.iteration:
            print_main(f"resuming from iteration {self.iteration}")
        order = self.sampler(len(samples), args.batch_size, world, args.seed, self.iteration)
        part_size = args.batch_size // world.size // args.accumulate
        batches = iter(loader(samples, part_size, args.workers, collate_fn, order))

        def micro_batches():
            for part in range(args.accumulate):
                asked = time.perf_counter()
                batch = to_device(next(batches), world.device)
                self.waited += time.perf_counter() - asked
                # Dropout depends only on seed, iteration, rank and part: a resumed run repeats it.
                place = self.iteration * world.size + world.rank
                torch.manual_seed((args.seed << 40) % 2**64 + place * args.accumulate + part)
                yield batch

        self.waited = 0.0  # seconds for data, since the time and iteration of the last line
        self.since = time.perf_counter(), self.iteration
        to_do = range(self.iteration + 1, total + 1)
        bar = progress(to_do, initial=self.iteration, total=total, unit=" its")
        for self.iteration in bar:
            self.values = defaultdict(list)
            self.validation = {}
            yield self.iteration, micro_batches()

            if self.due("log") or self.due("validate"):
                bar.set_postfix(loss=f"{self.write_metrics():.3f}")
            if self.due("checkpoint") or self.iteration == total:
                self.save("checkpoint.pth", self.parts, metrics=self.metrics, **extra_state)
            if self.due("keep"):
                self.save(f"model_{self.iteration}.pth", ["model"], **extra_state)
        end_distributed(world)

    def due(self, what):
        """Whether this iteration is a multiple of --log-every, --validate-every..."""
        every = getattr(self.args, f"{what}_every", None)
        return every and self.iteration % every == 0

    def log(self, **values):
        """Numbers or tensors for the next line of metrics.jsonl: means over the calls in this
        iteration (one for each micro-batch) and over the processes

        Scores from the first process alone go into run.validation: {name: score}.
        """
        for name, value in values.items():
            self.values[name].append(torch.as_tensor(value).detach())

    def write_metrics(self):
        """Append a line to metrics.jsonl; reading the values synchronises the device -> the loss"""
        means = torch.tensor([[torch.stack(values).mean() for values in self.values.values()]])
        row = dict(zip(self.values, gather(means, self.world).mean(0).tolist()))
        if not math.isfinite(row["loss"]):
            fail(f"the loss is not finite at iteration {self.iteration}: {DIVERGED}")
        row |= {f"validation_{name}": score for name, score in self.validation.items()}
        now = time.perf_counter()
        start, iteration = self.since
        seconds = now - start
        row["images_per_s"] = (self.iteration - iteration) * self.args.batch_size / seconds
        row["data_wait"] = self.waited / seconds
        self.since = now, self.iteration
        self.waited = 0.0
        rounded = {name: float(f"{value:.6g}") for name, value in row.items()}
        self.metrics.append(json.dumps({"iteration": self.iteration, **rounded}) + "\n")
        if self.world.is_main:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(self.metrics[-1])
        return row["loss"]

    def save(self, name, parts, **extra_state):
        """Write the named parts, unless the last step has made a weight infinite or NaN."""
        if self.world.is_main:
            state = {part: self.parts[part].state_dict() for part in parts}
            if not all(value.isfinite().all() for value in state["model"].values()):
                fail(f"a weight is not finite at iteration {self.iteration}: {DIVERGED}")
            state |= {"script": self.script, "args": self.settings, "iteration": self.iteration}
            save(self.folder / name, state | extra_state)

    def finish(self, probe, backbone, **result):
        """Measure the backbone and write result.json.  probe: eval_linear.Probe, or None"""
        if probe:
            result |= probe.final(backbone, self.folder, self.world.device)
        else:
            print_main("eval_linear.py is not here: the backbone is not probed")
        write_json(self.folder / "result.json", result)
