"""What the scripts share: captioned photos, batches, backbones, processes, and what a run writes"""

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import unicodedata
import zlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
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
    """Exit with one line instead of a traceback, because the user can fix it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all fail in the same way, torchrun ends the others before they print
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
# Invisible characters and halves of surrogate pairs, but not joiners within words
INVISIBLE = regex.compile(r"(?!(?<=[^\s\p{C}])[\u200c\u200d](?=[^\s\p{C}]))[\p{Cf}\p{Cs}]")
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


@dataclass
class CaptionData:
    """What every source gives: photos, each with captions and tags, either of which may be empty"""

    images: np.ndarray  # (N,) of paths, or of what `open` takes instead
    captions: StringLists  # captions[i]: a list of strings
    tags: StringLists  # tags[i]: a list of some of tag_names
    tagged: np.ndarray  # (N,) bool: are the tags known? If so, [] means that none fits
    tag_names: list  # of all splits; [] if there are no tags, or if they were not asked for
    open: callable = Image.open  # images[i] -> PIL image, not yet decoded

    def __len__(self):
        return len(self.images)

    def all_captions(self):
        return [caption for captions in self.captions for caption in captions]

    def select(self, keep):
        """-> CaptionData of the photos with the indices `keep`"""
        columns = "images", "captions", "tags", "tagged"
        return replace(self, **{name: getattr(self, name)[keep] for name in columns})

    def checksum(self):
        """It differs if a photo, a caption, a tag, or the order of tag_names differs."""
        photos = fingerprint(self.images, self.captions, self.tags, self.tagged)
        return zlib.crc32(repr(self.tag_names).encode(), photos)

    def captioned(self):
        """-> CaptionData of the photos that have a caption"""
        keep = [n for n, captions in enumerate(self.captions) if captions]
        if not keep:
            fail(f"no photo has a caption. A .jsonl has {JSONL}")
        if len(keep) == len(self):
            return self
        print_main(f"{len(self) - len(keep)} of {len(self)} photos have no caption: left out")
        return self.select(keep)


def caption_data(name, root=None, split="train", tags=False):
    """One split of --data -> CaptionData.  tags: whether COCO's file of instances is read, too"""
    if "://" in name:
        fail(f"--data {name}: training needs a local copy. Download the shards, then run "
             "tools/make_shards.py --index-only on them (docs/running.md)")
    if name == "coco":
        return read_photos(coco_photos, split, root or "datasets/coco", tags)
    if name.endswith(".jsonl"):
        return read_photos(jsonl_photos, split, root or os.path.dirname(name), name)
    return extra("sources").caption_data(name, root, split)  # shapes, vg, shards


def read_photos(read, split, *given):
    """-> CaptionData.  read(split, *given) -> [(path, captions, tags or None)], names of tags"""
    data = [None]
    if is_main():  # one process reads, because the annotations of COCO take 3 GB meanwhile
        photos, tag_names = read(split, *given)
        missing = [path for path, *_ in photos if not os.path.isfile(path)]
        if missing or not photos:
            fail(f"{split} has {len(photos)} photos, of which {len(missing)} are missing: "
                 f"{missing[:3]}. See --root, --train-split and --val-split")
        paths, captions, tags = zip(*photos)
        empty = sum(row.count("") for row in captions)
        if empty:
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
        fail(f"{path} is missing, or is not JSON ({error}): see --root, --train-split, --val-split")


def one_line(text):
    """NFC, single spaces, nothing invisible except for joiners within words"""
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return " ".join(text.split())


def texts(values):
    """A list of strings -> the same, each on one line; None -> None"""
    if not isinstance(values, list | None) or not all(isinstance(x, str) for x in values or ()):
        raise ValueError(f"{values!r} is not a list of texts")
    return values and [one_line(value) for value in values]


def coco_photos(split, root, with_tags):
    """From annotations/captions_{split}.json; tags are categories of instances_{split}.json"""
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
                   f"{len(strays)} ids are left out, which no image has: {strays[:3]}")
    photos = [(os.path.join(root, split, files[n]), captions[n], tags[n]) for n in files]
    return photos, list(dict.fromkeys(names[n] for n in sorted(names)))


def jsonl_photos(split, root, file):
    """One {"image", "captions", "tags", "split"} per line, of which only "image" is needed. Paths
    start from `root`. If no line has a split, the first, 21st, 41st... belong to val.
    """
    rows, unread = read_jsonl(file, root)
    if not any(row["split"] for row in rows):
        for row in rows[::20]:
            row["split"] = "val"
    sizes = Counter(row["split"] or "train" for row in rows)
    report_once(f"{file}: photos {dict(sizes)}; keys that are not read: {unread}")
    tag_names = [tag for row in rows for tag in row["tags"] or () if tag]
    chosen = [row for row in rows if (row["split"] or "train") == split]
    photos = [(row["image"], row["captions"] or [], row["tags"]) for row in chosen]
    return photos, list(dict.fromkeys(tag_names))


def read_jsonl(file, root):
    """-> [{"image": path, "captions", "tags": lists or None, "split"}], keys that are not read"""
    rows, paths, unread, number = [], set(), {}, 0
    try:
        for number, line in enumerate(open(file, "rb"), 1):
            if not line.strip():
                continue
            pairs = json.loads(line, object_pairs_hook=tuple)
            content = dict(pairs)
            if len(content) < len(pairs):  # json would keep the last
                raise ValueError("a key occurs twice")
            row = {"image": os.path.abspath(Path(root, content.pop("image")))}
            if "caption" in content or row["image"] in paths:
                raise ValueError(f'{row["image"]} needs a single line, with the list "captions"')
            row["captions"] = texts(content.pop("captions", None))
            row["tags"] = texts(content.pop("tags", None))
            split = content.pop("split", None)
            [row["split"]] = texts(["" if split is None else split])
            rows.append(row)
            paths.add(row["image"])
            unread |= content
    except Exception as error:  # no file, no UTF-8, no JSON, no "image", wrong types
        fail(f"{file}, line {number}: {type(error).__name__}: {error}. Expected, in UTF-8: "
             f"{JSONL}. tools/to_jsonl.py converts other files")
    return rows, list(unread)


def fingerprint(names, *columns):
    """A checksum of photos' names, without folders, their sizes, and columns (captions, labels)"""
    total = 0
    for name, *row in zip(map(str, names), *columns):
        size = os.path.isfile(name) and os.path.getsize(name)
        total = zlib.crc32(repr([os.path.basename(name), size, *row]).encode(), total)
    return total


def checksum(path):
    """Of the content of a file, or of all files in a folder; 0 if there is none"""
    path, total = Path(path), 0
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            total = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), total))
    return total


def swap_left_right(caption):
    """The caption of the flipped photo: left and right, as whole words [ours], are swapped."""
    return regex.sub(r"\b(?i:(left)|right)\b", lambda word: "right" if word[1] else "left", caption)


def check_known(unknown, total, what):
    """Fail if the model does not know half of the tokens; warn from 5% on

    unknown, total: numbers of tokens.  what: where they are from, for example "the texts"
    """
    if not total:
        return
    share = f"{unknown} of {total} tokens ({100 * unknown / total:.0f}%) of {what} are unknown"
    if unknown >= 0.5 * total:
        fail(f"{share} to the model: it has learned from captions with other words or letters")
    if unknown >= 0.05 * total:
        print_main(f"{share} to the model, which cannot tell them apart")


# ----------------------------------------------------------------------------- photos to batches

NO_JITTER = np.float32([1, 1, 1, 0])  # factors of brightness, contrast and saturation; hue
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])  # of ImageNet
YIQ = (0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)
KEEP_GREY = (1, 0, 0), (0, 0, 0), (0, 0, 0)  # they multiply (Y, I, Q) from the right
KEEP_COLOURS = (0, 0, 0), (0, 1, 0), (0, 0, 1)
TURN_COLOURS = (0, 0, 0), (0, 0, 1), (0, -1, 0)
PHOTO_ENDINGS = ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm"
PHOTO_ENDINGS = tuple(PHOTO_ENDINGS.split())
report_once = cache(tqdm.write)  # once per process: each worker of a DataLoader has its own


def list_photos(folder, endings=PHOTO_ENDINGS):
    """The paths of all photos below a folder, sorted -> list of str

    Links to folders are followed, but no folder is read twice, and none above this one: a link to
    a parent would list each photo many times. What starts with a dot is hidden, and left out.
    """
    paths, visited, start = [], set(), os.path.realpath(folder)
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited or start.startswith(f"{real}/"):
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
        return {"image": image[:, ::-1].copy() if flipped else image, "jitter": jitter}, flipped


def read_crops(data, index, crops, size):
    """Decode a photo once, and cut several crops from it -> list of uint8 (size, size, 3)
    crops: functions of (width, height) -> two corners.  Raises Unreadable. A large JPEG is decoded
    at 1/2, 1/4 or 1/8 of its size if that suffices. Resizing is antialiased, unlike VirTex [ours].
    """
    try:
        image = data.open(data.images[index])
        full_size = np.array(image.size)
        boxes = np.array([crop(full_size) for crop in crops])  # (N, 2, 2)
        smallest = np.ptp(boxes, 1).min(0)  # box's width and height, in pixels
        image.draft("RGB", [*np.ceil(size * full_size / smallest)])
        if image.mode[0] not in "IF" and ";16" in str(getattr(image, "tile", "")):
            report_once(f"{data.images[index]}: of 16-bit colours, PIL reads the upper 8 bits; "
                        "store 8-bit images if these are too dark")
        if image.mode[0] in "IF" or image.has_transparency_data:
            image = importlib.import_module("extras.sources").to_rgb(image)
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

# Channels of the features, names of the modules that make them, one after the other; can its blocks
# start as identities? Has it batch norm?
Backbone = namedtuple("Backbone", "channels layers zero_init_residual batch_norm")
RESNET = "conv1 bn1 relu maxpool layer1 layer2 layer3 layer4"
BACKBONES = {  # torchvision's; a new one is one line
    "resnet18": Backbone(512, RESNET, True, True),
    "resnet50": Backbone(2048, RESNET, True, True),
    "resnet101": Backbone(2048, RESNET, True, True),
    "wide_resnet50_2": Backbone(2048, RESNET, True, True),
    "vgg16_bn": Backbone(512, "features", False, True),
    "convnext_tiny": Backbone(768, "features", False, False),  # [ours]
}


def build_backbone(arch, zero_init_residual=False, **kwargs):
    """torchvision's network with its key names, without its classifier, from random weights:
    (B, 3, H, W) -> (B, backbone.channels, H / 32, W / 32).  kwargs: of torchvision
    """
    from torchvision import models  # only here, because it takes seconds, and --help needs none

    row = BACKBONES[arch]
    if row.zero_init_residual:  # blocks that start as identities exist in ResNets only
        kwargs["zero_init_residual"] = zero_init_residual
    try:
        model = getattr(models, arch)(**kwargs)
    except OSError as error:  # from urllib
        fail(f"the weights of {arch} cannot be downloaded ({error}): are you online?")
    layers = [(name, getattr(model, name)) for name in row.layers.split()]
    backbone = nn.Sequential(OrderedDict(layers))
    backbone.arch = arch
    backbone.channels = row.channels
    return backbone


def read_init(args):
    """--init -> {}, the content of a checkpoint of the same script, or a backbone's state dict"""
    if not args.init:
        return {}
    if args.head_lr not in (args.lr, None):  # None: there is no such file, as is said below
        print_main(f"--init: these weights were learned elsewhere. The backbone trains at lr "
                   f"{args.lr:g}; the recipe's is {args.head_lr:g}")
    if args.init == "imagenet":  # torchvision's, downloaded once
        return build_backbone(args.arch, weights="IMAGENET1K_V1").state_dict()
    content = read_checkpoint(args.init)
    if content.get("script") == args.script and content["args"]["arch"] == args.arch:
        return content
    shapes = {name: x.shape for name, x in build_backbone(args.arch).state_dict().items()}
    if shapes == {name: getattr(x, "shape", None) for name, x in content.items()}:
        return content
    return extra("checkpoints").load_backbone(args.init, args.arch).state_dict()


def load_init(init, model, backbone, skip=()):
    """Start from what read_init returned: a backbone, or all tensors of the model that fit, except
    those whose names start with `skip`, because their classes or words are different.
    """
    if init:
        module = model if "model" in init else backbone
        state = module.state_dict()
        start = [(n, x) for n, x in init.get("model", init).items() if not n.startswith(skip)]
        fit = {name: x for name, x in start if name in state and x.shape == state[name].shape}
        module.load_state_dict(fit, strict=module is backbone)  # a backbone fits exactly
        print_main(f"--init: loaded {len(fit)} of {len(state)} tensors")


def build_optimizer(args, parameters, lr=None):
    """SGD with momentum 0.9 (all papers), RAdam [ICMLM App. F.1] or AdamW.  lr: or args.lr"""
    options = {
        # In fp16, fused SGD would keep an overflow of the first step in its momentum.
        "SGD": {"momentum": 0.9, "fused": args.amp != "fp16"},
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


# ---------------------------------------------------------------------- processes and precision

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def init_distributed():
    """Set up torch, and join the other processes if torchrun started this one -> its device"""
    torch.backends.cudnn.benchmark = True  # the fastest convolutions for our one size of images
    torch.set_float32_matmul_precision("high")  # TF32: --amp off would be slow on GPUs without it
    sys.__stdout__.reconfigure(errors="replace", line_buffering=True)  # "?" if there is no UTF-8
    if sys.platform == "linux":  # the default of Python 3.14 would copy the data for each worker
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
        dist.init_process_group(backend, timeout=timedelta(hours=6))  # while one makes labels
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
    # Buffers are not broadcast, because statistics of batch norm may differ and queues do not.
    ddp = nn.parallel.DistributedDataParallel
    return ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def autocast(device, amp):
    """amp: "bf16", "fp16" or "off" """
    return torch.autocast(device.type, HALF.get(amp), enabled=amp != "off")


def eager(compiled):
    """For validation after --compile, which would compile the network anew for its other batches"""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def choose_amp(device, requested):
    """--amp if it is given, else bf16 [ours] if the device has it natively, else "off" """
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
# Where data are (checksums compare the contents), how fast training goes, what is measured
RESUME_CAN_CHANGE = """output data root workers amp compile accumulate log_every
checkpoint_every keep_every validate_every""".split()


def number(what, convert, low, high=9e18):
    """-> the `type` of a flag; argparse calls a value out of range an "invalid WHAT value" """

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


def recipe_table(table):
    """For --help: the defaults of the three recipes"""
    return pformat({"defaults of --recipe": RECIPE_NAMES, **table}, sort_dicts=False)


def apply_recipe(args, script, table, **changes):
    """Give flags that were left out the recipe's values, with learning rates for the batch size.

    table: {name: (demo, small, paper)}, with or without a flag.  changes: what replaces paper's
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
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine, by torchrun
    recipe["workers"] = min(8, os.cpu_count() // 2 // processes)
    recipe["output"] = f"runs/{script}-{Path(args.data).stem}".removesuffix("-shapes")
    scale = (args.batch_size or recipe["batch_size"]) / recipe["batch_size"]
    recipe |= {name: scale * recipe[name] for name in ("lr", "text_lr") if name in recipe}  # [ours]
    args.head_lr = args.lr or recipe["lr"]
    if args.init and args.init != "imagenet" and not os.path.exists(args.init):
        args.head_lr = recipe["lr"] = None  # load_checkpoint knows them; a new run will fail
    elif args.recipe == "small" and args.init and not flags_of(args.init):
        # At the full rate, few photos would spoil weights that were learned from many. --lr is the
        # backbone's; layers from random weights keep the recipe's rate. [ours]
        args.head_lr = recipe["lr"]
        recipe["lr"] *= 0.1
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
    try:
        flags = json.loads(Path(path).with_name("args.json").read_bytes())
        known = flags["script"] in OUR_TRAININGS and flags["arch"] in BACKBONES
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # none, or a foreign one
        return {}
    return flags if known and type(flags.get("image_size")) in (int, type(None)) else {}


def make_folder(path):
    """Create --output, and remove what a `save` that was killed more than an hour ago has left."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f"--output {path} cannot be a folder: {error.strerror}")
    for file in Path(path).glob("*.*.[0-9]*.tmp") if is_main() else ():
        if time.time() - file.lstat().st_mtime > 3600:  # a younger one may still be in use
            file.unlink()


def save(path, content):
    """The first process writes JSON, or what torch.save takes. A crash leaves the old file."""
    if is_main():
        temporary = f"{path}.{os.getpid()}.tmp"  # what a crash leaves; see make_folder
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
             "Training and torch.save(model.state_dict(), FILE) write such files")


def load_checkpoint(args):
    """What the same command saved in --output, {} for a new run"""
    if args.batch_size % (args.accumulate * world_size()):
        fail(f"--batch-size {args.batch_size} cannot be divided by processes times --accumulate")
    make_folder(args.output)
    path = f"{args.output}/checkpoint.pth"
    if not os.path.exists(path):
        return {}
    checkpoint = read_checkpoint(path)
    for name, now in vars(args).items():
        before = checkpoint["args"].get(name, now)  # a flag may be new
        if now is None and name in ("lr", "head_lr"):  # see apply_recipe
            vars(args)[name] = now = before
        if before != now and name not in RESUME_CAN_CHANGE:
            fail(f"{args.output} holds a run with {name} {before}, not {now} (None: left out): "
                 "choose another --output, or delete the folder to start over")
    return checkpoint


def begin_run(args, checkpoint, *checksums):
    """Refuse to resume with other data; write args.json.  checksums: of all beside --init"""
    args.checksums = list(checksums)
    if os.path.isfile(getattr(args, "init", None) or ""):
        args.checksums.append(checksum(args.init))
    # A file of --init that is gone by now is not missed: the checkpoint has all that is needed.
    if checkpoint and checkpoint["args"]["checksums"][: len(args.checksums)] != args.checksums:
        fail(f"{args.output} holds a run with other data or --init (or --lm, back-translations): "
             "choose another --output")
    path = f"{args.output}/args.json"
    earlier = read_json(path) if checkpoint and os.path.exists(path) else {}
    seconds = earlier.get("seconds", 0)  # of the parts of an interrupted run
    about = {"seconds": seconds, "began": time.time() - seconds}
    save(path, vars(args) | circumstances() | about)


def circumstances():
    """-> what a number needs beside it, for args.json and result.json; commit: None without git"""
    describe = "git describe --always --dirty --exclude='*'"
    folder = Path(__file__).resolve().parent
    git = subprocess.run(describe, shell=True, cwd=folder, capture_output=True, text=True)
    cpuinfo = Path("/proc/cpuinfo")
    names = regex.findall("model name.*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}, {machine}"
    return {
        "command": sys.argv,
        "processes": world_size(),
        "commit": git.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "torch": torch.__version__,
    }


def restore(args, checkpoint, iters, state):
    """Load the checkpoint into `state`, {name: model, optimizer...} -> the iterations done"""
    if not checkpoint:
        return 0
    for name, module in state.items():
        if checkpoint[name]:  # a scaler that was not in use has no state
            module.load_state_dict(checkpoint[name])
    print_main(f"{args.output}: {checkpoint['iteration']} of {iters} iterations are done")
    return checkpoint["iteration"]


def save_checkpoint(args, name, iteration, state, more=None):
    """Write `state`, {name: model, optimizer...}, and `more`; no weight may be infinite or NaN."""
    content = {key: module.state_dict() for key, module in state.items()}
    check_finite(content["model"].values())
    content |= {"script": args.script, "args": vars(args), "iteration": iteration}
    save(f"{args.output}/{name}", content | (more or {}))
    if is_main():
        about = read_json(f"{args.output}/args.json")
        about["seconds"] = round(time.time() - about["began"])
        save(f"{args.output}/args.json", about)


def check_finite(values):
    """Stop if a weight or a loss is infinite or NaN."""
    if not all(value.isfinite().all() for value in values):
        fail("a loss or a weight is not finite: the last checkpoint is kept. Try a lower --lr")


class Log:
    """metrics.jsonl has a line for each log interval, with means over it (docs/running.md)."""

    def __init__(self, args, checkpoint):
        self.photos = args.batch_size / args.accumulate  # in each micro-batch
        self.path = Path(args.output, "metrics.jsonl")
        self.left = self.size()  # of the file after our last write, in bytes
        # A run that goes on keeps the lines up to its checkpoint. A kill may have left half a line.
        lines = self.path.read_text().splitlines(True) if self.left else []
        lines = [line for line in lines if line.endswith("}\n")]
        done = checkpoint.get("iteration", 0)
        self.kept = [line for line in lines if json.loads(line)["iteration"] <= done]
        self.begin()

    def size(self):
        return self.path.stat().st_size if self.path.exists() else 0

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
            first = self.kept is not None  # Has another run begun since we did?
            command = read_json(self.path.with_name("args.json"))["command"] if first else sys.argv
            if self.size() != self.left or command != sys.argv:
                fail(f"another run has written to {self.path}: give each run its own --output")
            line = json.dumps({"iteration": iteration, **row}) + "\n"
            if self.kept is None:
                with open(self.path, "a") as file:
                    file.write(line)
            else:  # Our first line. Only now are lines after the checkpoint dropped.
                temporary = Path(f"{self.path}.{os.getpid()}.tmp")
                temporary.write_text("".join(self.kept) + line)
                os.replace(temporary, self.path)
                self.kept = None
            self.left = self.size()
        self.begin()


def end_run(args, backbone):
    """The last line of main: write backbone.pth, say how to measure it, and leave together"""
    weights = f"{args.output}/backbone.pth"
    save_weights(weights, backbone)
    data = "" if args.data == "shapes" else " --data folder --root LABELLED_PHOTOS"
    print_main(f'measure it: python eval_linear.py --weights "{weights}" random{data}')
    end_distributed()
