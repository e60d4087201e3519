"""Linear classifiers on frozen features: what a backbone is worth, by the protocols of the papers.

    python eval_linear.py --weights runs/virtex/backbone.pth --data folder --root photos
    python eval_linear.py --weights runs/virtex/backbone.pth --data voc07 --root VOCdevkit
    python eval_linear.py --weights random --arch resnet50 --data voc07 --root VOCdevkit --runs 5
    torchrun --nproc_per_node=8 eval_linear.py --weights runs/virtex/backbone.pth \\
        --data folder --root imagenet --protocol sgd-virtex

--weights takes a backbone.pth or checkpoint.pth of ours, an official VirTex checkpoint, files of
MoCo, SwAV, VICReg, DINO or torchvision, "imagenet" (torchvision's, downloaded) or "random".

    protocol       classifier on the frozen backbone, which is always in eval mode       score
    svm-virtex     one SVM per class on pooled features, cost by cross-validation        mAP
    svm-icmlm      one SVM per class on features pooled 2x2, 40 costs                    mAP
    sgd-virtex     linear layer, trained with augmentation                               top-1
    sgd-mct        linear layer on features extracted once                               top-1
    logreg-icmlm   the same; learning rate and weight decay chosen out of 25 trials      top-1
    layers         linear layers on each of VGG-16's last three convolutions,            top-1
                   trained with augmentation                                             or mAP

The SVMs and `layers` take images with several labels (voc07, coco, shapes) and with one (folder),
the others need one. Features that are extracted once are kept in the output folder and used again
for the same weights, images and size. The training scripts end with svm-virtex: see `Probe`.
"""

import argparse
import functools
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn

import common
from common import ImageFiles, check, fail, progress, say

# fmt: off
EXTRACTED = {  # protocols on features extracted once, without augmentation
    #               crop: its share of the smaller side; average pooling in cells x cells
    "svm-virtex":   (224 / 256, 1),  # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d
    "svm-icmlm":    (1.0,       2),  # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "sgd-mct":      (224 / 256, 1),  # [contrastive paper Sec. 4.2] 2048-d; the crop is ours
    "logreg-icmlm": (1.0,       1),  # [ICMLM App. F.2] 2048-d
}
TRAINED = {  # protocols trained by SGD with momentum 0.9
    #               epochs  batch  learning rate
    "sgd-virtex":   (100,   256,   0.3),   # [VirTex Sec. 4.1, App. A.1] cosine, no weight decay
    "sgd-mct":      (60,    256,   30.0),  # [contrastive paper Sec. 4.2] 3 steps, no weight decay
    "logreg-icmlm": (100,   1024,  None),  # [ICMLM App. F.2] cosine; searched; the epochs are ours
    "layers":       (100,   256,   0.01),  # [ICMLM Sec. 4] as DeeperCluster's code; C-13: twice it
}
LAYERS_VOC = (60, 128, 0.01)  # with several labels per image
LAYERS_DECAY = 1e-5  # weight decay; the learning rate falls as lr / sqrt(1 + lr * decay * t)
LABEL_SPLITS = {
    "shapes": ("train", "val"), "coco": ("train2017", "val2017"),
    "folder": ("train", "val"), "voc07": ("trainval", "test"),
}
# fmt: on
PROTOCOLS = "svm-virtex", "svm-icmlm", "sgd-virtex", "sgd-mct", "logreg-icmlm", "layers"
ONE_LABEL = "sgd-virtex", "sgd-mct", "logreg-icmlm"  # protocols for images with one label each
COSTS = (0.01, 0.1, 1.0, 10.0)  # C of the SVMs [VirTex App. A.1]
IN_WORDS = {"trained": "trained", "random": "at random initialisation"}  # two backbones' scores


def backbone_flags(parser, data=None):
    """The flags of everything that starts from a backbone.

    data: the choices of --data, the first is the default; None: whatever common.caption_data reads.
    """
    add = parser.add_argument
    add("--weights", default="runs/virtex/backbone.pth", help="a file, imagenet or random")
    add("--arch", choices=sorted(common.BACKBONES), help="for imagenet and random")
    if data:
        add("--data", choices=data, default=data[0], help="the images")
    else:
        add("--data", default="shapes", help=common.DATA)
    add("--root", help="folder of the data (default datasets/<name>)")
    add("--train-split", help="usually trainval for voc07, train2017 for coco, else train")
    add("--val-split", help="usually test for voc07, val2017 for coco, else val")
    add("--workers", type=common.natural, default=min(8, os.cpu_count()), help="per process")


def flag_parser(script, description, data=None):
    """A parser with the flags that mean the same wherever a frozen backbone is measured.

    data: see backbone_flags.
    """
    parser = common.Parser(description)
    backbone_flags(parser, data)
    add = parser.add_argument
    add("--image-size", type=common.image_side, help="default 64 for shapes, else 224 [App. A.1]")
    add("--runs", type=common.count, default=1, help="with other seeds: mean and deviation")
    add("--seed", type=common.seed_number, default=0, help="of the first run")
    add("--output", default=f"runs/{script}", help="folder of result.json and what else is written")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="off for numbers to report")
    return parser


def parse(parser, argv):
    """Parse the command line; what flag_parser's flags leave out is the data set's."""
    args = parser.parse_args(argv)
    if args.weights in ("random", "imagenet") and not args.arch:
        parser.error(f"--weights {args.weights} needs --arch")
    if args.weights == parser.get_default("weights") and not os.path.exists(args.weights):
        parser.error(f"{args.weights} not found: make it with python virtex.py, or give --weights")
    splits = LABEL_SPLITS.get(args.data, ("train", "val"))
    args.train_split = args.train_split or splits[0]
    args.val_split = args.val_split or splits[1]
    args.image_size = args.image_size or (64 if args.data == "shapes" else 224)
    return args


def get_args(argv=None):
    parser = flag_parser("eval_linear", __doc__, common.LABELLED)
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="svm-virtex", help="see above")
    add("--train-images", type=common.count, help="at most; default 2000 for shapes, else all")
    add = parser.add_argument_group("all but svm-* (defaults are the protocol's)").add_argument
    add("--epochs", type=common.count, help="passes over the training images")
    add("--batch-size", type=common.dim, help="images per iteration over all processes")
    add("--lr", type=common.positive, help="peak; the default scales with the batch size")
    args = parse(parser, argv)

    protocol = f"--protocol {args.protocol}"
    if args.data != "folder" and args.protocol in ONE_LABEL:
        parser.error(f"{protocol} wants one label per image: --data folder")
    if args.protocol not in TRAINED and (args.epochs or args.batch_size or args.lr):
        parser.error(f"--epochs, --batch-size and --lr do not go with {protocol}: it has no SGD")
    if args.protocol == "logreg-icmlm" and args.lr:
        parser.error(f"--lr does not go with {protocol}, which searches for its learning rate")

    # What was left out is the data set's and the protocol's.
    if args.data == "shapes":
        args.train_images = args.train_images or 2000
    if args.protocol in TRAINED:
        epochs, batch_size, lr = TRAINED[args.protocol]
        if args.protocol == "layers" and args.data != "folder":
            epochs, batch_size, lr = LAYERS_VOC
        args.epochs = args.epochs or epochs
        args.batch_size = args.batch_size or batch_size
        if lr:
            args.lr = args.lr or lr * args.batch_size / batch_size
        common.refuse_uneven_batch(parser, args.batch_size)
    if args.protocol == "layers" and args.image_size < 48:
        parser.error("--protocol layers pools maps of 3x3 and more: --image-size 48 or more")
    return args


def main(args):
    world = common.start()
    os.makedirs(args.output, exist_ok=True)

    # The backbone and the labelled images.
    backbone = load_backbone(args.weights, args.arch, args.seed)
    if args.protocol == "layers" and not hasattr(backbone, "features"):
        fail("--protocol layers is for VGG-16, its last three convolutions: --arch vgg16")
    if hasattr(backbone, "features") and args.image_size < 32:
        fail("VGG-16 halves a photo five times: give --image-size 32 or more")
    train = label_data(args.data, args.root, args.train_split)
    test = label_data(args.data, args.root, args.val_split)
    check_same_classes(train, test)
    if {"mAP", "top-1"} & set(train.names):
        fail("a class is called mAP or top-1, as the scores are: rename its folder")
    if args.train_images:
        order = np.random.default_rng(args.seed).permutation(len(train.images))
        train = train.select(np.sort(order[: args.train_images]))
    sizes = f"{len(train.images)} training and {len(test.images)} test images"
    say(f"{args.protocol}: {sizes} of {len(train.names)} classes, at {args.image_size} px")
    if args.protocol in EXTRACTED:
        width = backbone.channels * EXTRACTED[args.protocol][1] ** 2
        warn_of_memory(args.protocol, len(train.images), width, len(train.names), world.device)

    # Each run has a seed of its own.
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        if args.weights == "random" and seed > args.seed:
            backbone = load_backbone(args.weights, args.arch, seed)
        backbone.to(world.device, memory_format=torch.channels_last)
        backbone.eval().requires_grad_(False)
        if args.protocol not in EXTRACTED:
            runs.append(score_augmented(backbone, train, test, args, world, seed))
            continue
        how = args.image_size, *EXTRACTED[args.protocol], args.amp, args.workers, world
        fit = kept_features(Path(args.output, "features_train.npy"), backbone, train, *how)
        held = kept_features(Path(args.output, "features_test.npy"), backbone, test, *how)
        torch.manual_seed(seed)  # the same, whether features were extracted or found
        if world.is_main:
            runs.append(score_features(args, fit, held, train.names, world.device, seed))
    common.end_processes(world)
    if world.is_main:
        report(runs, train.names, args)


def report(runs, classes, args):
    """Print mean and sample standard deviation of the runs, {name: percent} each; write
    result.json.
    """
    content = {"args": vars(args), **over_runs(runs)}
    mean, deviation = content["mean"], content["std"]
    width = max(map(len, mean))
    for name in sorted(mean, key=lambda name: (name not in classes, name)):  # metrics come last
        line = f"{name:{width}}  {mean[name]:6.2f}"
        if len(runs) > 1:
            line += f" ± {deviation[name]:.2f}"
        say(line)
    common.write_json(f"{args.output}/result.json", content)


def over_runs(runs):
    """[{name: percent} of each run] -> {"mean": {name: percent}, "std": likewise, "runs": runs}"""
    found = {name: [scores[name] for scores in runs] for name in runs[0]}
    both = {name: mean_and_deviation(values) for name, values in found.items()}
    mean = {name: value for name, (value, _) in both.items()}
    deviation = {name: value for name, (_, value) in both.items()}
    return {"mean": mean, "std": deviation, "runs": runs}


def mean_and_deviation(values):
    """Mean and sample standard deviation; that of one value is 0"""
    return float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))


def load_backbone(weights, arch, seed):
    """weights: "random", "imagenet" or a file -> the backbone, its classifier left behind"""
    torch.manual_seed(seed)
    if weights == "random":
        return common.build_backbone(arch)
    if weights != "imagenet":
        return common.load_backbone(weights, arch)
    import torchvision

    from sources import backbone_weights  # only here: a script that is copied does without it

    published = torchvision.models.get_model_weights(common.BACKBONES[arch])["IMAGENET1K_V1"]
    try:
        state = published.get_state_dict(progress=True, check_hash=True)
    except OSError as error:
        fail(f"--weights imagenet: the file cannot be downloaded ({error}); give one")
    backbone = common.build_backbone(arch)
    backbone.load_state_dict(backbone_weights(state, "torchvision's download")[1])
    return backbone


def from_both_starts(args, world, train):
    """train(args, world) from --weights, on shapes, which takes minutes, from random weights, too

    -> {"trained", "random": what it gives}, in result.json as well. None on all processes but the
    first, which alone does the second: a group of processes cannot be joined again.
    """
    starts = {"random" if args.weights == "random" else "trained": args}
    if args.data == "shapes" and args.weights != "random":
        arch = load_backbone(args.weights, args.arch, args.seed).arch
        other = {"weights": "random", "arch": arch, "output": f"{args.output}/random"}
        starts["random"] = argparse.Namespace(**{**vars(args), **other})
    scores = {}
    for name, start in starts.items():
        scores[name] = train(start, world)
        if not world.is_main:
            return None
        world = common.World(0, 1, world.device)
    common.write_json(f"{args.output}/result.json", {"args": vars(args), **scores})
    return scores


# ------------------------------------------------------------------------------- labelled images


class LabelData(NamedTuple):
    """Images with labels.

    One label per image (folder): labels (N,) int64, the indices of the classes in `names`.
    Several (the others): labels (N, classes) int8, 1 yes, 0 no, -1 "difficult" (VOC only).
    """

    images: object  # common.ImageFiles or shapes.ShapeImages
    labels: np.ndarray
    names: list

    def select(self, keep):
        images = type(self.images)(self.images[i] for i in keep)
        return LabelData(images, self.labels[keep], self.names)

    def digest(self):
        """A checksum of labels and classes: the images may move"""
        labels = np.ascontiguousarray(self.labels)
        return zlib.crc32(repr(self.names).encode(), zlib.crc32(labels))


def label_data(name, root=None, split="train"):
    """One split of "shapes", "coco", "voc07" or "folder" -> LabelData"""
    if name == "shapes":
        return label_from_tags(common.caption_data(name, split=split))
    readers = {"coco": coco_labels, "voc07": voc07_labels, "folder": folder_labels}
    check(name in readers, f"{name} are no labelled images: choose from {common.LABELLED}")
    data = readers[name](root or f"datasets/{name}", split)
    data.images.check_files()
    return data


def check_same_classes(train, test):
    differing = sorted(set(train.names) ^ set(test.names))[:5]
    check(train.names == test.names, f"the splits have different classes: {differing} in one only")


def class_of(labels):
    """The class of each image that has one: labels (N,) or (N, classes) -> (N,)"""
    return labels if labels.ndim == 1 else labels.argmax(1)


def label_columns(labels, classes):
    """labels as in LabelData -> (N, len(classes)): 1, 0 or -1 for each of these classes"""
    return labels[:, None] == classes if labels.ndim == 1 else labels[:, classes]


def multi_hot(groups, size):
    """N lists of classes -> (N, size) int8"""
    labels = np.zeros((len(groups), size), np.int8)
    for row, group in zip(labels, groups):
        row[list(group)] = 1
    return labels


def label_from_tags(data):
    """The tags of CaptionData are the classes -> LabelData"""
    tags = [data.tags_of(i) for i in range(len(data))]
    return LabelData(data.images, multi_hot(tags, len(data.tag_names)), data.tag_names)


def coco_labels(root, split):
    """annotations/instances_{split}.json, images in {split}/ -> LabelData"""
    import sources  # only here: a script that is copied elsewhere does without it

    present, names, paths = sources.coco_instances(root, split)
    images = ImageFiles(paths[image] for image in present)
    return LabelData(images, multi_hot(present.values(), len(names)), names)


def voc07_labels(root, split):
    """ImageSets/Main/<class>_{split}.txt, images in JPEGImages/ -> LabelData"""
    folders = Path(root), Path(root, "VOC2007"), Path(root, "VOCdevkit", "VOC2007")
    folders = [folder for folder in folders if Path(folder, "ImageSets", "Main").is_dir()]
    check(folders, f"{root} holds no VOCdevkit/VOC2007/ImageSets/Main: give VOCdevkit's folder")
    lists = sorted(Path(folders[0], "ImageSets", "Main").glob(f"*_{split}.txt"))
    check(lists, f"{folders[0]}/ImageSets/Main holds no <class>_{split}.txt: was it downloaded?")
    ours = {"1": 1, "-1": 0, "0": -1}  # their yes, no and difficult
    ids, columns = [], []
    for path in lists:
        rows = [line.split() for line in path.read_text().splitlines()]
        for n, row in enumerate(rows, 1):
            good = not row or (len(row) == 2 and row[1] in ours)
            check(good, f"{path}, line {n}: expected an image name and 1, -1 or 0")
        found = [row[0] for row in rows if row]
        ids = ids or found
        check(found == ids, f"{path} lists other images than {lists[0]}")
        columns.append([ours[row[1]] for row in rows if row])
    names = [path.name.removesuffix(f"_{split}.txt") for path in lists]
    images = ImageFiles(f"{folders[0]}/JPEGImages/{name}.jpg" for name in ids)
    return LabelData(images, np.array(columns, np.int8).T, names)


def folder_labels(root, split):
    """{split}/<class>/<image>, as ImageNet, Places and torchvision's ImageFolder -> LabelData"""
    folder = Path(root, split)
    layout = f"an image folder holds {split}/<class>/<image>"
    check(folder.is_dir(), f"{folder} not found: {layout}; see --train-split and --val-split")
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    names = sorted(name for name in names if not name.startswith("."))  # .ipynb_checkpoints
    images, classes = ImageFiles(), []
    for k, name in enumerate(progress(names, desc="image folder", unit=" classes", leave=False)):
        for path in sorted((folder / name).rglob("*")):
            if path.suffix.lower() in Image.registered_extensions():
                images.append(str(path))
                classes.append(k)
    check(classes, f"{folder} holds no image: {layout}")
    return LabelData(images, np.array(classes), names)


# --------------------------------------------------------------------------------------- features


def pooled(backbone, images, device, amp="off", cells=1):
    """uint8 (B, size, size, 3) -> averages over cells x cells parts, (B, channels * cells^2)

    The parts overlap: of 7x7 places 2x2 parts have 6x6 each [Goyal et al. 2019, ICMLM's 24].
    """
    with torch.no_grad(), common.autocast(device, amp):
        maps = backbone(common.augment(images.to(device, non_blocking=True)))
    part = [max(1, side - cells + 1) for side in maps.shape[2:]]
    return F.avg_pool2d(maps.float(), part, stride=1).flatten(1)


def extract_features(
    backbone, images, size, world, amp="off", workers=0, part=224 / 256, cells=1, create=np.empty
):
    """Pooled features in eval mode -> as describe_images"""
    describe = functools.partial(pooled, backbone, device=world.device, amp=amp, cells=cells)
    training = backbone.training
    backbone.eval()
    features, readable = describe_images(describe, images, size, world, workers, part, create)
    backbone.train(training)
    finite = not world.is_main or np.isfinite(features.sum(dtype=np.float64))
    check(finite, "the features are not finite: has the training diverged? Is --amp fp16 to blame?")
    return features, readable


def describe_images(describe, images, size, world, workers=0, part=224 / 256, create=np.empty):
    """describe(uint8 (B, size, size, 3)) -> (B, D), for the central crop of each image

    images: common.ImageFiles or shapes.ShapeImages.  part: see common.CropView.
    create(shape=, dtype=): the array that is filled batch by batch and returned, without a copy.
    -> (M, D) float32 in the order of `images`, without those that cannot be decoded, and the
    indices (M,) of the others; (None, None) on all processes but the first: they do their share.
    """
    number = len(images)
    share = math.ceil(number / world.size)
    # Every process has as many: the first images come again at the end.
    mine = [i % number for i in range(world.rank, share * world.size, world.size)]
    batches = common.loader(common.CropView(images, size, part), 64, workers, sampler=mine)
    features, readable, seen, filled = None, np.zeros(number, bool), 0, 0
    for pixels, good in progress(batches, desc="images", unit=" batches", leave=False):
        rows, good = gather(describe(pixels).float().cpu(), world), gather(good, world)
        if not world.is_main:
            continue
        good = good[: number - seen].numpy()
        rows = rows[: len(good)].numpy()[good]
        if features is None:
            features = create(shape=(number, rows.shape[1]), dtype=np.float32)
        features[filled : filled + len(rows)] = rows
        readable[seen : seen + len(good)] = good
        seen, filled = seen + len(good), filled + len(rows)
    if not world.is_main:
        return None, None

    check(filled, f"none of the {number} images can be decoded, as {images[0]}")
    for i in np.flatnonzero(~readable):
        say(f"cannot decode {images[i]}: left out")
    return features[:filled], np.flatnonzero(readable)


def gather(rows, world):
    """The rows of all processes in turns on the first process, None on the others"""
    if world.size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world.size)] if world.is_main else None
    dist.gather(rows, parts)
    return torch.stack(parts, 1).flatten(0, 1) if world.is_main else None


def kept_features(path, backbone, data, size, part, cells, amp, workers, world):
    """extract_features, kept in the file `path` -> features (M, D), memory-mapped, and labels

    Beside it a .npz holds the labels and what the features were made of. (None, None) on all
    processes but the first.
    """
    note, temporary, kept = path.with_suffix(".npz"), f"{path}.tmp", None
    if world.is_main:
        made_of = [checksum(backbone, data), size, part, cells, "overlapping", amp]
        kept = common.read_arrays(note, made_of) if path.exists() else None
    if common.any_process(world, world.is_main and kept is None):
        if world.is_main:
            gb = 4e-9 * len(data.images) * backbone.channels * cells**2
            free = 1e-9 * shutil.disk_usage(path.parent).free
            check(gb < free, f"{path} needs {gb:.1f} GB, and {free:.1f} are free: make room")
        create = functools.partial(np.lib.format.open_memmap, temporary, "w+")
        how = size, world, amp, workers, part, cells, create
        features, readable = extract_features(backbone, data.images, *how)
        if world.is_main:
            features.flush()  # the note must not reach the disk before them
            note.unlink(missing_ok=True)  # it is about the old file
            os.replace(temporary, path)
            kept = {"labels": data.labels[readable]}
            common.keep_arrays(note, made_of, kept)
    if not world.is_main:
        return None, None
    found, number = len(kept["labels"]), len(data.images)
    if found < number:
        say(f"{path}: {number - found} of {number} images could not be decoded and are left out")
    with common.reading(path, "what this command wrote: delete it"):
        # "c": the file is read where it is looked at, and never changed. Its end may be empty.
        return np.load(path, mmap_mode="c")[:found], kept["labels"]


def checksum(backbone, data):
    """Of the weights, the labels, the list of images, and the sizes and dates of their files."""
    number = data.digest()
    for image in data.images:
        number = zlib.crc32(str(image).encode(), number)
        if isinstance(data.images, ImageFiles) and os.path.exists(image):  # no broken link
            file = os.stat(image)
            number = zlib.crc32(f"{file.st_size} {file.st_mtime_ns}".encode(), number)
    for value in backbone.state_dict().values():
        number = zlib.crc32(value.cpu().contiguous().numpy(), number)
    return number


def warn_of_memory(protocol, number, dim, classes, device):
    """Say how much memory a protocol needs beside the features on the disk, if there is less

    number, dim: of the training images' features. Linear layers are slow where the memory does not
    hold these; the SVMs have them once more, in their principal axes, and some matrices.
    """
    needed = 2**30 + 4 * number * dim
    if protocol.startswith("svm"):
        needed += 4 * 8 * dim**2 + 10 * 8 * min(CHUNK, 3 * number * classes)  # as measured
    there = math.inf
    if device.type == "cuda":
        there, _ = torch.cuda.mem_get_info(device)
    elif hasattr(os, "sysconf"):  # not on Windows
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        what = f"{protocol} on {number} x {dim} features needs {needed / 1e9:.0f} GB of memory"
        say(f"{what}, and there are {there / 1e9:.0f}: give fewer --train-images if it fails")


def score_features(args, fit, held, names, device, seed):
    """fit, held: features (N, D) and labels as in LabelData, of training and of test images

    -> {"top-1": percent}, or {class: average precision in percent, "mAP": their mean}
    """
    if args.protocol == "sgd-mct":
        return sgd_mct(*fit, *held, args.epochs, args.batch_size, args.lr, device, seed)
    if args.protocol == "logreg-icmlm":
        return logreg_icmlm(*fit, *held, args.epochs, args.batch_size, device, seed)
    costs, interpolated = COSTS, args.protocol == "svm-icmlm"  # as the code of Goyal et al.
    if interpolated:
        # Log-uniform [ICMLM App. F.2]. All 40 are tried [ours], where the paper lets Optuna search.
        costs = sorted(10 ** np.random.default_rng(seed).uniform(-5, 5, 40))
    scores = svm_probe(*fit, *held, names, costs, device, interpolated)
    if not scores:
        fail("no class has both positive and negative training images and a positive test image")
    left_out = [name for name in names if name not in scores]
    if left_out:
        which = ", ".join(left_out[:5])
        say(f"{len(left_out)} classes without training or test examples are left out: {which}")
    return {**scores, "mAP": mean_of(scores)}


# ----------------------------------------------------------------------- support vector machines

CHUNK = 2**25  # numbers in a matrix of images x SVMs that are solved together: 256 MB
BLOCK = 2**10  # rows of features that are in float64 at a time


def svm_probe(
    train_x, train_y, test_x, test_y, names, costs=COSTS, device="cpu", interpolated=False
):
    """One linear SVM per class [VirTex App. A.1] -> {class: average precision in percent}

    Squared hinge loss, positives weighted 2, C by 3-fold cross-validation.  train_x, test_x: (N, D)
    features, l2-normalised here [official code].  train_y, test_y: labels as in LabelData;
    "difficult" are negatives in training, left out in testing [official code].  costs: rising.
    A class without positives or negatives in training, or positives in testing, has no score.
    """
    classes, scores = np.flatnonzero(scorable(train_y, test_y, len(names))), {}
    if not len(classes):
        return {}
    axes = principal_axes(train_x, device)
    x = torch.empty(len(train_x), axes.shape[1], device=device)
    for out, rows in zip(x.split(BLOCK), blocks(train_x, device)):
        out.copy_(rows @ axes)
    parts = min(len(classes), 1 + 3 * len(x) * len(classes) // CHUNK)
    for part in progress(np.array_split(classes, parts), desc="SVMs", unit=" parts", leave=False):
        positive = label_columns(train_y, part) == 1
        chosen = torch.from_numpy(choose_costs(x, positive, costs)).to(device)
        w = solve_svms(x, torch.from_numpy(positive).to(device), chosen.expand(len(x), -1))
        w = axes @ w
        decisions = torch.cat([rows @ w for rows in blocks(test_x, device)]).cpu().numpy()
        some = [names[k] for k in part]
        scores |= average_precisions(decisions, label_columns(test_y, part), some, interpolated)
    return scores


def scorable(train_y, test_y, number):
    """-> (number,) bool: classes with positives and negatives to learn from, positives to find"""
    train, test = (label_columns(y, np.arange(number)) == 1 for y in (train_y, test_y))
    return train.any(0) & ~train.all(0) & test.any(0)


def blocks(x, device):
    """BLOCK rows of x (N, D) at a time, in float64: unit length, and a constant feature

    Its weight is the bias: regularised as in LIBLINEAR.
    """
    for start in range(0, len(x), BLOCK):
        rows = unit_length(x[start : start + BLOCK].astype(np.float64))
        yield F.pad(torch.from_numpy(rows), (0, 1), value=1).to(device)


def unit_length(x):
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def principal_axes(x, device="cpu"):
    """The rows z of blocks(x) -> (D + 1, at most min(N, D + 1)), eigenvectors of z'z

    The SVMs are quicker to solve there.
    """
    if len(x) > x.shape[1]:
        return torch.linalg.eigh(sum(rows.T @ rows for rows in blocks(x, device)))[1]
    z = torch.cat(list(blocks(x, device)))
    values, vectors = torch.linalg.eigh(z @ z.T)  # the smaller matrix has the same eigenvalues
    kept = values > 1e-12 * values[-1]
    return z.T @ vectors[:, kept] / values[kept].sqrt()


def choose_costs(x, positive, costs):
    """The cost with the best average precision in 3-fold cross-validation -> (classes,)

    x: (N, D) in its principal axes.  positive: (N, classes) bool; the cost is 1 for a class with
    fewer than three positives or negatives, one for each fold.
    """
    chosen = np.ones(positive.shape[1])
    rarer = np.minimum(positive.sum(0), (~positive).sum(0))
    validated = np.flatnonzero(rarer >= 3)
    if len(validated):
        scores = cross_validate(x, positive[:, validated], costs)
        chosen[validated] = np.array(costs)[scores.argmax(0)]
    return chosen


def cross_validate(x, positive, costs):
    """Average precision, the mean over three folds -> (costs, classes)"""
    from sklearn.metrics import average_precision_score
    from sklearn.model_selection import StratifiedKFold

    folds = []  # a column each: the class, and the images held out
    for k in range(positive.shape[1]):
        folds += [(k, held) for _, held in StratifiedKFold(3).split(positive, positive[:, k])]
    of_folds = torch.from_numpy(positive[:, [k for k, _ in folds]]).to(x.device)
    mask = torch.ones(of_folds.shape, dtype=torch.float64, device=x.device)
    for column, (_, held) in enumerate(folds):
        mask[held, column] = 0  # what is held out costs nothing
    w, scores = None, []
    for cost in progress(costs, desc="cross-validation", unit=" costs", leave=False):
        w = solve_svms(x, of_folds, cost * mask, start=w)  # near the solution of the cost before
        decisions = times(x, w).cpu().numpy()
        for column, (k, held) in enumerate(folds):
            scores.append(average_precision_score(positive[held, k], decisions[held, column]))
    return np.reshape(scores, (len(costs), -1, 3)).mean(2)


def solve_svms(x, positive, costs, start=None, tolerance=1e-5):
    """Each column of w (D, M) minimises w'w / 2 + sum_i c_i max(0, 1 - s_i w'x_i)^2

    s_i = 1 or -1, c_i doubled for positives.  x: (N, D) in its principal axes, float32 or float64.
    positive: (N, M) bool.  costs: (N, M), 0 leaves an example out.  start: (D, M).
    Newton's method with conjugate gradients [Lin, Weng, Keerthi 2008], all columns at once, until
    the gradient of each is `tolerance` of that at w = 0.
    """
    sign, costs = 2.0 * positive - 1, costs * (1.0 + positive)
    w = costs.new_zeros(x.shape[1], sign.shape[1]) if start is None else start.clone()
    goal = tolerance * (2 * times_transposed(x, costs * sign)).norm(dim=0)
    left = torch.arange(sign.shape[1], device=x.device)  # the columns that are not solved yet
    for _ in range(1000):
        slack = (1 - sign * times(x, w[:, left])).clamp(min=0)
        gradient = w[:, left] - 2 * times_transposed(x, costs * sign * slack)
        far = gradient.norm(dim=0) > goal[left]
        if not far.any():
            break
        left, sign, costs = left[far], sign[:, far], costs[:, far]
        curvature = 2 * costs * (slack[:, far] > 0)  # the Hessian is I + x' diag(curvature) x
        step = conjugate_gradients(x, curvature, -gradient[:, far])
        w[:, left] = line_search(x, sign, costs, w[:, left], step)
    return w


def times(x, w):
    """x w, with x (N, D) in float32 to save memory, but each product and sum in float64"""
    return torch.cat([rows.to(w.dtype) @ w for rows in x.split(BLOCK)])


def times_transposed(x, y):
    """x' y, likewise"""
    result = y.new_zeros(x.shape[1], y.shape[1])
    for rows, part in zip(x.split(BLOCK), y.split(BLOCK)):
        result.addmm_(rows.to(y.dtype).T, part)
    return result


def line_search(x, sign, costs, w, step):
    """w + step, where the step of a column is halved until its loss does not rise"""

    def loss(w):
        slack = (1 - sign * times(x, w)).clamp(min=0)
        return w.square().sum(0) / 2 + (costs * slack.square()).sum(0)

    highest = loss(w) * (1 + 1e-12)  # rounding errors are no rise
    for _ in range(30):
        too_long = loss(w + step) > highest
        if not too_long.any():
            break
        step = torch.where(too_long, step / 2, step)
    return w + step


def conjugate_gradients(x, curvature, target, iterations=200):
    """Per column: solve (I + x' diag(curvature) x) step = target up to a tenth of its norm

    In the principal axes the matrix is nearly diagonal: its diagonal is the preconditioner.
    """
    diagonal = 1 + x.norm(dim=0)[:, None].square() / len(x) * curvature.sum(0)
    step, rest = torch.zeros_like(target), target.clone()
    direction = rest / diagonal
    inner = (rest * direction).sum(0)
    for _ in range(iterations):
        image = direction + times_transposed(x, curvature * times(x, direction))
        length = inner / (direction * image).sum(0).clamp(min=1e-300)  # 0 / 0 once it is solved
        step += length * direction
        rest -= length * image
        if (rest.norm(dim=0) <= 0.1 * target.norm(dim=0)).all():
            break
        scaled, before = rest / diagonal, inner
        inner = (rest * scaled).sum(0)
        direction = scaled + inner / before.clamp(min=1e-300) * direction
    return step


def average_precisions(decisions, labels, names, interpolated=False):
    """(N, classes) both, labels of -1 not counted -> {class: average precision in percent}

    The area under the whole curve, not VOC07's mean over eleven recalls; of classes with positives.
    interpolated: with the best precision at this recall or a higher one.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    def area(truth, decision):
        if not interpolated:
            return average_precision_score(truth, decision)
        precision, recall, _ = precision_recall_curve(truth, decision)  # recall falls
        return -np.sum(np.diff(recall) * np.maximum.accumulate(precision)[:-1])

    scores = {}
    for k, name in enumerate(names):
        counted = labels[:, k] >= 0
        if (labels[:, k] == 1).any():
            scores[name] = 100 * float(area(labels[counted, k], decisions[counted, k]))
    return scores


def mean_of(scores):
    return float(np.mean(list(scores.values()))) if scores else math.nan


# ---------------------------------------------------------------- linear layers, features given


def sgd_mct(x, y, test_x, test_y, epochs, batch_size, lr, device, seed):
    """lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2] -> {"top-1": percent}"""

    def factor(share):
        return 0.2 ** sum(share >= epoch / 60 for epoch in (30, 40, 50))

    how = [(lr, 0.0)], factor, epochs, batch_size, device, seed
    [layer] = train_linear(x, y, np.arange(len(x)), *how)
    logits = predict(layer, test_x, device)
    check_finite(logits)
    return {"top-1": top1(logits, test_y)}


def logreg_icmlm(x, y, test_x, test_y, epochs, batch_size, device, seed):
    """The best of 25 pairs of lr and weight decay for held-out images [ICMLM App. F.2]

    [ours: a fifth is held out, the trials are random where the paper's are Optuna's, and features
    are l2-normalised as for the SVMs] -> {"top-1": percent}
    """
    number = len(x)
    check(number >= 5, f"logreg-icmlm holds out a fifth of the images: give it 5, not {number}")
    rng = np.random.default_rng(seed)
    rates, decays = 10 ** rng.uniform(-1, 2, 25), rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    held, fit = np.split(rng.permutation(number), [number // 5])
    cosine = functools.partial(common.lr_factor, total=1)
    how = cosine, epochs, batch_size, device, seed, True
    layers = train_linear(x, y, fit, trials, *how)
    held_x, held_y = unit_length(x[held]), y[held]
    scores = [top1(predict(layer, held_x, device), held_y) for layer in layers]
    best = trials[np.argmax(scores)]
    say(f"chosen: learning rate {best[0]:.3g}, weight decay {best[1]:.2g}")
    [layer] = train_linear(x, y, np.arange(number), [best], *how)
    return {"top-1": top1(predict(layer, unit_length(test_x), device), test_y)}


def train_linear(
    x,
    y,
    rows,
    trials,
    factor,
    epochs,
    batch_size,
    device,
    seed,
    unit=False,
    width=None,
    loss=F.cross_entropy,
):
    """One linear layer per (learning rate, weight decay) in `trials`, on the same batches

    x: (N, D) float32.  y: (N,), their classes.  rows: which of the N to learn from: x may be as
    large as the memory, and is not copied.  factor(share of the run): of the learning rates.
    unit: features are l2-normalised.  width: outputs of a layer, by default one per class.
    loss(outputs (B, width), classes (B,))
    """
    x, y = torch.from_numpy(x).to(device), torch.from_numpy(class_of(y)).to(device)
    layers = LinearLayers(len(trials) * [x.shape[1]], width or int(y.max()) + 1).to(device)
    groups = []
    for layer, (lr, decay) in zip(layers, trials):
        groups.append({"params": layer.parameters(), "lr": lr, "weight_decay": decay})
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    rng = np.random.default_rng(seed)
    for epoch in progress(range(epochs), desc="linear layers", unit=" epochs", leave=False):
        batches = torch.from_numpy(rng.permutation(rows)).to(device).split(batch_size)
        for n, batch in enumerate(batches):
            common.set_lr(optimizer, factor((epoch + n / len(batches)) / epochs))
            features, wanted = x[batch], y[batch]
            if unit:
                features = F.normalize(features)
            losses = [loss(layer(features), wanted) for layer in layers]
            optimizer.zero_grad()
            sum(losses).backward()  # the layers share no parameters: each is trained by itself
            optimizer.step()
    return layers


class LinearLayers(nn.ModuleList):
    """Linear layers side by side; weights N(0, 0.01), bias 0 [VirTex App. A.1; elsewhere ours]"""

    def __init__(self, widths, classes):
        super().__init__()
        for width in widths:
            layer = nn.Linear(width, classes)
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
            self.append(layer)

    def forward(self, features):
        return [layer(feature) for layer, feature in zip(self, features)]


@torch.no_grad()
def predict(layer, x, device):
    """(N, D) -> logits (N, classes) on the CPU, in parts that fit on a GPU"""
    parts = torch.from_numpy(x).split(2**16)
    return torch.cat([layer(part.to(device)).cpu() for part in parts]).numpy()


def top1(logits, labels):
    """logits (N, classes), labels as in LabelData -> percent"""
    return 100 * float((logits.argmax(1) == class_of(labels)).mean())


def check_finite(logits):
    check(np.isfinite(logits).all(), "the linear layer has diverged: try a lower --lr")


# -------------------------------------------------------- linear layers, trained with augmentation

# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`.
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}


def convolution_features(backbone, images, device, amp="off", jitter=None):
    """uint8 (B, size, size, 3) -> for each of CONVOLUTIONS its maps averaged over 3x3 places

    At 224 pixels (B, 512 * 4 * 4): the "about 9K" of ICMLM Sec. 4. [DeeperCluster's code]
    """
    features = []
    with torch.no_grad(), common.autocast(device, amp):
        maps = common.augment(images.to(device, non_blocking=True), jitter)
        for n, module in enumerate(backbone.features):
            maps = module(maps)
            if n in CONVOLUTIONS.values():
                features.append(F.avg_pool2d(maps.float(), 3, stride=3).flatten(1))
    return features


def labelled_photo(data, size, jitter, index, rng):
    """A sample (see common.Samples): a crop of 20-100%, mirrored at random [VirTex App. A.1]

    VirTex's public configuration has crops of 8-100%.
    """
    sample = common.photo(data.images, index, rng, size, 0.2, jitter)
    return {**sample, "labels": data.labels[index]}


def collate_labelled(samples):
    return {**common.collate_photos(samples), "labels": common.stack(samples, "labels")}


def classification_loss(logits, labels, several):
    """Softmax cross-entropy, or with several labels per image a logistic regression per class

    The latter summed over classes, without difficult entries [ours].  logits: (B, classes).
    labels: as in LabelData -> scalar
    """
    if not several:
        return F.cross_entropy(logits, class_of(labels))
    positive, counted = (labels == 1).float(), labels >= 0
    losses = F.binary_cross_entropy_with_logits(logits, positive, reduction="none")
    return (losses * counted).sum(1).mean()


def labelled_batches(train, args, world, seed, strength, start, iters):
    """Yield (iteration, batch on the device) from `start` on, and name photos that cannot be read

    strength: of colour jitter.
    """
    share, number, unreadable = args.batch_size // world.size, len(train.images), set()
    sample = functools.partial(labelled_photo, train, args.image_size, strength)
    samples = common.Samples(sample, number, seed)
    sampler = common.infinite_sampler(number, args.batch_size, world, seed, start)
    how = share, args.workers, collate_labelled, world.device, sampler
    for iteration, batch in zip(range(start, iters), common.loader(samples, *how)):
        unreadable.update(batch.pop("unreadable"))
        yield iteration, common.to_device(batch, world.device)
    for name in sorted(unreadable):
        say(f"cannot decode {name}: the next image took its place")


def score_augmented(backbone, train, test, args, world, seed):
    """Protocols sgd-virtex and layers -> {"top-1": percent}; "mAP" with several labels per image

    `layers` has one for each convolution. None on all processes but the first. `layers` augments as
    SimCLR, ICMLM Sec. 4 says and no more: with colour jitter of half its strength [ours].
    After each epoch it is written to --output, from where the same command goes on. Test images are
    scored then, too, if they are few beside those for training.
    """
    device, several, layers = world.device, args.data != "folder", args.protocol == "layers"
    names, widths, rates = [""], [backbone.channels], [args.lr]
    strength, decay = (1.0, LAYERS_DECAY) if layers else (0.0, 0.0)
    if layers:
        names = [f"{name} " for name in CONVOLUTIONS]
        widths = 3 * [backbone.channels * (args.image_size // 16 // 3) ** 2]
        rates = [args.lr, args.lr, 2 * args.lr]

    def describe(images, jitter=None):
        if layers:
            return convolution_features(backbone, images, device, args.amp, jitter)
        return [pooled(backbone, images, device, args.amp)]

    # The layers, and where an earlier run stopped.
    torch.manual_seed(seed)
    model = LinearLayers(widths, len(train.names)).to(device)
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, rates)]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay)
    flags = args.protocol, args.epochs, args.batch_size, args.lr, args.image_size, args.amp, seed
    made_of = 0
    if world.is_main:
        images = [checksum(backbone, data) for data in (train, test)]
        made_of = zlib.crc32(repr((flags, images)).encode())
    path, start = Path(args.output, f"linear_{of_first(made_of, world)}.pth"), 0
    state = earlier_state(path)
    if "scores" in state:  # of --runs that a stop has interrupted
        return state["scores"]
    if state:
        start = state["iteration"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        say(f"{path}: going on from iteration {start}")
    parallel = common.data_parallel(model, world)

    @torch.no_grad()
    def scores():
        def logits_of(images):
            return torch.cat(model(describe(images)), 1)

        size, workers = args.image_size, args.workers
        logits, readable = describe_images(logits_of, test.images, size, world, workers)
        if world.is_main:
            return score_layers(names, logits, test.labels[readable], train.names, several)

    number = len(train.images)
    iters = math.ceil(args.epochs * number / args.batch_size)
    epoch = math.ceil(number / args.batch_size)
    scored = math.ceil(max(number, 5 * len(test.images)) / args.batch_size)  # a sixth of the work
    bar = progress(total=iters, initial=start, desc=args.protocol, unit=" its")
    for iteration, batch in labelled_batches(train, args, world, seed, strength, start, iters):
        if layers:
            for group, lr in zip(optimizer.param_groups, rates):
                group["lr"] = lr / math.sqrt(1 + lr * decay * iteration)
        else:
            common.set_lr(optimizer, common.lr_factor(iteration, iters))
        outputs = parallel(describe(batch["images"], batch["jitter"]))
        losses = [classification_loss(logits, batch["labels"], several) for logits in outputs]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        bar.update()
        if iteration % 20 == 0:
            check_losses(names, losses, iteration)
            bar.set_postfix(loss=f"{sum(losses).item() / len(losses):.3f}")
        done = iteration + 1
        if done % scored == 0 and done < iters:
            found = scores()
            if world.is_main:
                say(f"epoch {done * args.batch_size / number:.1f}: {common.in_words(found)}")
        if done % epoch == 0 and done < iters and world.is_main:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["iteration"] = done
            common.write_file(path, lambda file: torch.save(state, file))
    bar.close()
    found = scores()
    if world.is_main:
        common.write_file(path, lambda file: torch.save({"scores": found}, file))
    return found


def check_losses(names, losses, iteration):
    for name, loss in zip(names, losses):
        if not loss.isfinite():
            diverged = f"the linear layer {name}has diverged at iteration {iteration}"
            fail(f"{diverged}: try a lower --lr", everywhere=False)


def of_first(number, world):
    """The first process's number, on all of them"""
    number = torch.tensor(number)
    if world.size > 1:
        dist.broadcast(number, 0)
    return int(number)


def earlier_state(path):
    """What an earlier run of the same probe has written, {} if there is none"""
    if not path.exists():
        return {}
    with common.reading(path, "what this command wrote: delete it"):
        return torch.load(path, map_location="cpu", weights_only=True)


def score_layers(names, logits, labels, classes, several):
    """logits (N, layers * classes) side by side -> {"C-11 top-1": percent, ...}"""
    check_finite(logits)
    scores = {}
    for name, part in zip(names, np.split(logits, len(names), 1)):
        if several:
            scores[f"{name}mAP"] = mean_of(average_precisions(part, labels, classes))
        else:
            scores[f"{name}top-1"] = top1(part, labels)
    return scores


# ---------------------------------------------------------------------- the probe in a training run


class Probe:
    """What a training script measures its backbone by: svm-virtex on --probe-data or on its tags.

    labelled: training and test LabelData; None if there are no labels.
    """

    def __init__(self, args, train, val):
        """args: of common.flag_parser.  train, val: CaptionData"""
        self.args, self.labelled = args, None
        self.name = args.probe_data or os.path.basename(args.data)
        if args.probe_data:
            splits = LABEL_SPLITS[args.probe_data]
            fit, test = [label_data(args.probe_data, args.probe_root, split) for split in splits]
        elif train.tag_names and val.tag_names:
            fit, test = train, val.numbered_as(train.tag_names)  # those of shards can differ
        else:
            needed = f"--probe-every needs labels and {args.data} has no tags: add --probe-data"
            check(not args.probe_every, needed)
            return
        order = np.random.default_rng(args.seed).permutation(len(fit.images))
        fit = fit.select(np.sort(order[: args.probe_images]))
        if not args.probe_data:  # only now: of millions of photos few are chosen
            fit, test = label_from_tags(fit), label_from_tags(test)
        check_same_classes(fit, test)
        if scorable(fit.labels, test.labels, len(fit.names)).any():
            self.labelled = fit, test
        else:
            message = f"no class of {self.name} has examples in both splits: nothing to probe on"
            check(not args.probe_every, message)
            say(message)
        if args.probe_every:
            rest, held = self.early_stopping_split()
            few = "--probe-every holds out a fifth of the probe's training images, too few to score"
            enough = scorable(rest.labels, held.labels, len(rest.names)).any()
            check(enough, f"{few}: raise --probe-images")

    def early_stopping_split(self):
        """Four fifths of the training images to learn from and a fifth to score -> LabelData"""
        fit, _ = self.labelled
        order = np.random.default_rng(self.args.seed).permutation(len(fit.images))
        held, rest = np.split(order, [len(order) // 5])
        return fit.select(rest), fit.select(held)

    def score(self, backbone, fit, test, device):
        """SVMs on the features of the LabelData `fit`, tested on `test` -> mAP in percent"""
        alone = common.World(0, 1, device)  # the first process probes while the others wait
        how = self.args.image_size, alone, self.args.amp, self.args.workers
        problem = []
        for data in (fit, test):
            features, readable = extract_features(backbone, data.images, *how)
            problem += features, data.labels[readable]
        return mean_of(svm_probe(*problem, fit.names, device=device))

    def keep_best(self, backbone, run):
        """Early stopping [VirTex Sec. 3]: save the backbone if it is the best so far

        Never by test images, but by a fifth of the training images -> {"iteration", "score"}
        """
        score = self.score(backbone, *self.early_stopping_split(), run.world.device)
        say(f"iteration {run.iteration}: probe on held-out training images {score:.2f} mAP")
        if run.best and not score > run.best["score"]:
            return run.best
        run.save_weights("backbone_best.pth", backbone)
        return {"iteration": run.iteration, "score": score}

    def final(self, backbone, run, tags_seen):
        """Probe the trained backbone, a random one, and the best of the run -> for result.json"""
        args, device = self.args, run.world.device
        if not self.labelled:
            flags = f"--image-size {args.image_size} --data folder --root FOLDER"
            command = f"python eval_linear.py --weights {run.folder}/backbone.pth {flags}"
            say(f"no labels to probe on: measure with {command}")
            return {}
        torch.manual_seed(args.seed)
        other = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
        trained = round(self.score(backbone, *self.labelled, device), 2)
        random = round(self.score(other, *self.labelled, device), 2)
        result = {"data": self.name, "metric": "mAP", "trained": trained, "random": random}
        if run.best:
            other.load_state_dict(common.read_checkpoint(run.folder / "backbone_best.pth"))
            best = round(self.score(other, *self.labelled, device), 2)
            result["best"] = {**run.best, "trained": best}
        scores = f"{trained:.1f} mAP trained, {random:.1f} mAP at random initialisation"
        seen = " (trained on the same tags)" if tags_seen and not args.probe_data else ""
        say(f"linear probe on {self.name}{seen}: {scores}")
        return {"probe": result}


if __name__ == "__main__":
    common.run(main, get_args)
