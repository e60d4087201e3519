"""Linear classifiers on frozen features: what a backbone is worth, by the protocols of the papers.

    python eval_linear.py                       what virtex.py has learned, and a random backbone
    python eval_linear.py --weights runs/virtex/backbone.pth runs/tp/backbone.pth random imagenet \\
        --data voc07 --root VOCdevkit
    python eval_linear.py --weights runs/tp-photos/backbone.pth random \\
        --data folder --root photos --shots 10 --runs 5
    torchrun --nproc_per_node=8 eval_linear.py --weights runs/virtex-coco/backbone.pth \\
        --data folder --root imagenet --protocol sgd-virtex

--weights are measured one after the other, on the same photos: backbone.pth, checkpoint.pth or
model_N.pth of ours, an official VirTex checkpoint, files of MoCo, SwAV, VICReg, DINO or
torchvision; "imagenet" (torchvision's, downloaded), "random", or clip:NAME, to compare with. The
result is one table, and in --output result.json: {"args", "image_size", "backbones": {WEIGHTS:
{"mean", "std", "runs"}}}, scores in percent.

    protocol       classifier on the frozen backbone, which is always in eval mode       score
    svm-virtex     one SVM per class on pooled features, cost by cross-validation        mAP
    svm-icmlm      one SVM per class on features pooled 2x2, 40 costs                    mAP
    sgd-mct        linear layer on pooled features                                       top-1
    logreg-icmlm   the same; learning rate and weight decay chosen from 25 trials        top-1
    knn            votes of the 20 nearest training photos: nothing is trained           either
    sgd-virtex     linear layer, trained with augmentation                               top-1
    layers         linear layers on VGG-16's last 3 convolutions, with augmentation      either

Photos have several labels, or one (--data folder), which top-1 needs. Linear layers are kept in
--output, from which sgd-virtex and layers resume. MoCo's probe of ImageNet, which VirTex quotes in
Tab. 2, is --protocol sgd-virtex --lr 30 --steps 0.6 0.8; PCL's has --lr 5.
Early stopping: train with --keep-every, give --weights runs/NAME/model_*.pth, and take the best on
VOC07 with --train-split train --val-split val [VirTex Sec. 3], or with --hold-out 0.2 [ours].
"""

import argparse
import hashlib
import importlib.util
import os
import statistics
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import common
from common import fail, number, print_main, progress

SPLITS = {"coco": ("train2017", "val2017"), "voc07": ("trainval", "test")}


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what is measured").add_argument
    add("--weights", nargs="+", default=["runs/virtex/backbone.pth", "random"],
        help="the backbones: files, random, imagenet or clip:NAME (see above)")
    add("--arch", choices=common.BACKBONES, help="architecture of random and imagenet (default: "
        "that of the first file, else resnet50; vgg16_bn for --protocol layers)")
    add("--protocol", choices=PROTOCOLS, default="svm-virtex", help="see the table above")
    add("--runs", type=number("int > 0"), default=1,
        help="repeat with this many seeds, and report the mean and the deviation")
    add("--seed", type=number("int >= 0"), default=0,
        help="seed of the first run; it also decides which photos are drawn")
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help="labelled photos: shapes (built in), voc07, folder, or "
        "captioned photos with tags, which are coco, a .jsonl file or a folder of shards")
    add("--root", help="folder of the data (default: datasets/NAME; for a .jsonl, its own folder)")
    add("--train-split", help="training split (default: trainval for voc07, train2017 for "
        "coco, else train)")
    add("--val-split", help="test split (default: test for voc07, val2017 for coco, else val)")
    add("--image-size", type=number("int > 0"), help="side of a crop in pixels (default: the "
        "one each file was trained at; if unknown, the first file's; else 224, or 48 for shapes)")
    add("--train-images", type=number("int > 0"),
        help="train on at most this many photos (default: 2000 for shapes, else all)")
    add("--shots", type=number("int > 0"),
        help="train on this many photos of each class, with all labels that they have")
    add("--hold-out", type=number(">= 0, < 1"), default=0.0, metavar="FRACTION",
        help="test on this fraction of the training split, not on --val-split; train on the rest")
    add("--workers", type=number("int >= 0"), default=min(8, os.cpu_count()),
        help="processes that load photos; with 0 the main process loads them")
    add = parser.add_argument_group("linear layers (the defaults are the protocol's)").add_argument
    add("--epochs", type=number("int > 0"), help="passes over the training photos")
    add("--batch-size", type=number("int > 0"), help="photos per iteration over all processes")
    add("--lr", type=number("> 0"), nargs="+", help="peak learning rate; layers takes three")
    add("--steps", type=number(">= 0, < 1"), nargs="+", metavar="FRACTION", help="fractions of "
        "training after which sgd-virtex divides the rate by 10 (default: cosine decay)")
    add = parser.add_argument_group("run").add_argument
    add("--output", help="folder for result.json and the linear layers (default: "
        "runs/eval_linear/DATA-PROTOCOL, or DATA-PROTOCOL-K-shots)")
    add("--amp", choices=("bf16", "fp16", "off"), default="off",
        help="precision of the backbone; leave it off for numbers to report")
    args = parser.parse_args(argv)

    name = f"--protocol {args.protocol}"
    protocol = PROTOCOLS[args.protocol]
    defaults = dict(protocol.flags)
    if args.protocol == "layers":
        args.arch = args.arch or "vgg16_bn"
        if args.arch != "vgg16_bn" or any(source.startswith("clip:") for source in args.weights):
            parser.error("--protocol layers is for VGG-16: --arch vgg16_bn")
        if args.data != "folder":  # as DeeperCluster's code for VOC; the first two rates [ours]
            defaults |= {"epochs": 60, "batch_size": 128, "lr": [0.01, 0.01, 0.02]}
    for flag in ("epochs", "batch_size", "lr", "steps"):
        if vars(args)[flag] and flag not in defaults:
            parser.error(f"{name} takes no --{flag.replace('_', '-')}")
    if args.lr and len(args.lr) != len(defaults["lr"]):
        parser.error(f"{name} takes {len(defaults['lr'])} values of --lr")
    if protocol.labels == "one" and args.data != "folder":
        parser.error(f"{name} needs one label per photo: --data folder")

    # Flags that were left out take the protocol's values. Rates are scaled to --batch-size [ours].
    if args.batch_size and "lr" in defaults:
        defaults["lr"] = [args.batch_size / defaults["batch_size"] * lr for lr in defaults["lr"]]
    defaults["train_split"], defaults["val_split"] = SPLITS.get(args.data, ("train", "val"))
    defaults["train_images"] = 2000 if args.data == "shapes" else None
    data = Path(args.root or "folder").resolve() if args.data == "folder" else Path(args.data)
    shots = f"-{args.shots}-shots" if args.shots else ""
    name_of_data = data.name.removesuffix(".jsonl")
    defaults["output"] = f"runs/eval_linear/{name_of_data}-{args.protocol}{shots}"
    for flag, value in defaults.items():
        if vars(args)[flag] is None:
            setattr(args, flag, value)
    runs_differ = args.train_images or args.shots or args.hold_out or "random" in args.weights
    if args.protocol in ("svm-virtex", "knn") and args.runs > 1 and not runs_differ:
        parser.error(f"{name} gives all --runs the same score: draw photos by --shots, "
                     "--train-images or --hold-out")
    return args


def main(args):
    protocol = PROTOCOLS[args.protocol]
    if protocol.trained_on == "features":
        run_alone()
    device = common.init_distributed()
    # Full float32 on GPUs, too: TF32, which training uses, would round each product to 10 bits.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    common.make_folder(args.output)

    # Check all files now, before the first hour of measuring.
    files = [source for source in args.weights if is_file(source)]
    archs = {path: load_backbone(path, args.arch, 0).arch for path in files}
    arch = args.arch or next(iter(archs.values()), "resnet50")
    sizes = {path: trained_with(path, "image_size") for path in files}
    usual_size = next(filter(None, sizes.values()), 48 if args.data == "shapes" else 224)

    data = label_data(args.data, args.root, args.train_split)
    val = data if args.hold_out else label_data(args.data, args.root, args.val_split)
    check_same_classes(data, val)
    train_rows, test_rows = draw_photos(data, val, args)
    report_shared(data.select(train_rows), val.select(test_rows))

    results = {}
    seeds = range(args.seed, args.seed + args.runs)
    for source in args.weights:
        sizes[source] = args.image_size or sizes.get(source) or usual_size
        results[source] = []
        # Each run has other random weights. All runs of any other backbone share its features.
        for group in [[seed] for seed in seeds] if source == "random" else [seeds]:
            backbone = load_backbone(source, archs.get(source, arch), group[0])
            backbone.to(device, memory_format=torch.channels_last)
            backbone.eval().requires_grad_(False)
            runs = []
            for seed in group:
                changed = {"seed": seed, "image_size": sizes[source]}
                flags = argparse.Namespace(**vars(args) | changed)
                runs.append(Run(flags, protocol, source, backbone, data.names, device))
            results[source] += measure(runs, data, val)
    if len(test_rows) < 50:
        print_main(f"the scores are rough: they are of only {len(test_rows)} photos")
    if common.is_main():
        report(results, sizes, data.names, args)
    common.end_distributed()


@dataclass
class Run:
    """What a protocol is told beside the photos"""

    args: argparse.Namespace  # with the seed and the image size of this run
    protocol: "Protocol"
    source: str  # one of --weights
    backbone: nn.Module  # frozen, in eval mode, on the device
    names: list  # of the classes
    device: torch.device


def measure(runs, data, val):
    """Runs of one backbone -> [{metric: percent} of each]; [] in all processes but the first"""
    protocol = runs[0].protocol
    draws = [draw_photos(data, val, run.args) for run in runs]
    if protocol.trained_on == "features":  # extracted once: the runs draw rows of these matrices
        all_train, all_test = zip(*draws)
        train_x = extract_features(runs[0], data, all_train)
        test_x = extract_features(runs[0], val, all_test)
    results = []
    for run, (train_rows, test_rows) in zip(runs, draws):
        train, test = data.select(train_rows), val.select(test_rows)
        torch.manual_seed(run.args.seed)
        if protocol.trained_on == "features":
            scores = protocol.score(train_x.select(train_rows), test_x.select(test_rows), run)
        else:
            scores = protocol.score(train, test, run)
        if common.is_main():
            results.append(scores | by_chance(scores, test))
            photos = f"{len(train)} training and {len(test)} test photos"
            print_main(f"{run.source}, seed {run.args.seed}, {photos} of {run.args.image_size} px: "
                       f"{format_scores(results[-1], run.names)}")
    return results


def run_alone():
    """Features are extracted and scored by one process: the others of torchrun end here."""
    os.environ.pop("WORLD_SIZE", None)  # so that it waits for nobody
    if os.environ.get("RANK", "0") != "0":
        print("The first process measures; this one ends. Without torchrun: unset RANK WORLD_SIZE")
        sys.exit()


def format_scores(scores, classes=()):
    """All but those of single classes"""
    return ", ".join(f"{name} {scores[name]:.2f}" for name in scores if name not in classes)


def report(results, sizes, classes, args):
    """Print a line for each backbone; write result.json, which has the classes' scores, too.

    results: {source: [scores of a run]}.  sizes: {source: pixels}
    """
    results = {source: over_runs(runs) for source, runs in results.items()}
    path = f"{args.output}/result.json"
    replaced = ", instead of an earlier call's" if os.path.exists(path) else ""
    content = {"args": vars(args), "image_size": sizes, "backbones": results}
    common.save(path, content | common.circumstances())
    columns = [name for name in results[args.weights[0]]["mean"] if name not in classes]
    width = max(map(len, results))
    print(" " * width, *(f"{column:>15}" for column in columns))
    for source, scores in results.items():
        cells = [f"{scores['mean'][column]:.2f}" for column in columns]
        if args.runs > 1:
            cells = [f"{cell} ± {scores['std'][name]:.2f}" for cell, name in zip(cells, columns)]
        print(f"{source:{width}}", *(f"{cell:>15}" for cell in cells))
    print(f"all scores, by class and run, are in {path}{replaced}")


def over_runs(runs):
    """[{name: percent} of each run] -> {"mean", "std" (of the sample; 0 for one run), "runs"}"""
    mean, std = {}, {}
    for name in dict.fromkeys(name for scores in runs for name in scores):
        values = [scores[name] for scores in runs if name in scores]
        mean[name] = statistics.mean(values)
        std[name] = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": mean, "std": std, "runs": runs}


# ------------------------------------------------------------------------------------- backbones


def is_file(source):
    return source not in ("random", "imagenet") and not source.startswith("clip:")


def trained_with(source, flag):
    """The value of a flag when a file was trained; None if nothing says it"""
    flags = common.flags_of(source)
    whole_photos = flag == "image_size" and flags.get("script") == "detection"
    return None if whole_photos else flags.get(flag)


def load_backbone(source, arch, seed):
    """source: "random", "imagenet", clip:NAME or a file -> backbone with `arch` and `channels`

    arch: that of the first two; the one that a file must have, or None
    """
    torch.manual_seed(seed)
    arch = arch or trained_with(source, "arch")
    if source == "random":
        return common.build_backbone(arch)
    if source == "imagenet":
        return common.build_backbone(arch, weights="IMAGENET1K_V1")
    if source.startswith("clip:"):
        return common.extra("checkpoints").ClipEncoder(source.removeprefix("clip:"))
    if arch:  # a copy of this script and common.py reads a backbone.pth, too
        backbone = common.build_backbone(arch)
        content = common.read_checkpoint(source)
        if content.keys() == backbone.state_dict().keys():
            backbone.load_state_dict(content)
            return backbone
    return common.extra("checkpoints").load_backbone(source, arch)  # or give --arch, for a copy


# ------------------------------------------------------------------------------- labelled photos


@dataclass
class LabelData:
    """Photos with labels

    One label per photo (folder): labels (N,) int64, the indices of the classes in `names`.
    Several (all other data): labels (N, classes) int8, 1 yes, 0 no, -1 "difficult" (VOC only).
    """

    images: np.ndarray  # (N,) of paths, or of what `open` takes instead
    labels: np.ndarray
    names: list
    open: callable = Image.open  # images[i] -> PIL image, not yet decoded

    def __len__(self):
        return len(self.images)

    def select(self, keep):
        return LabelData(self.images[keep], self.labels[keep], self.names, self.open)


def label_data(name, root, split):
    """One split of "folder", "voc07", or of captioned photos with tags -> LabelData"""
    if name == "folder":
        return folder_labels(root or "datasets/folder", split)
    if name == "voc07":
        return LabelData(*common.extra("sources").voc07(root or "datasets/voc07", split))
    shards = os.path.isdir(name) and not os.path.isdir(os.path.join(name, split))
    if not (shards or name in ("shapes", "coco", "vg") or name.endswith(".jsonl")):
        fail(f"no data set {name}: photos in {split}/CLASS/ are --data folder --root FOLDER, other "
             "--data are shapes, voc07, coco, a .jsonl file or a folder of shards")
    [captioned] = common.caption_data(name, root, [split], tags=True)
    if not captioned.tag_names:
        fail(f"--data {name} has no tags to score. With a folder for each class: --data folder")
    if not captioned.tagged.all():
        keep = np.flatnonzero(captioned.tagged)
        left_out = f"{len(captioned) - len(keep)} of {len(captioned)} photos are left out"
        print_main(f'{left_out}, which have no "tags"; "tags": [] says that none fits')
        captioned = captioned.select(keep)
    column = {name: k for k, name in enumerate(captioned.tag_names)}
    labels = np.zeros((len(captioned), len(column)), np.int8)
    for row, tags in enumerate(captioned.tags):
        labels[row, [column[tag] for tag in tags]] = 1
    return LabelData(captioned.images, labels, captioned.tag_names, captioned.open)


def folder_labels(root, split):
    """{split}/<class>/<photo>, or deeper -> LabelData"""
    path = Path(root, split)
    if not path.is_dir():
        fail(f"there is no folder {path}. Expected: {split}/CLASS/PHOTO: see --root")
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    names = [name for name in names if not name.startswith(".")]
    photos = photos_below([path / name for name in names])
    check_classes(path, names, photos)
    real = cache(os.path.realpath)  # of each folder once, because there may be a million photos
    pairs = [os.path.split(photo) for files in photos for photo in files]
    repeated = len(pairs) - len({(real(folder), name) for folder, name in pairs})
    if repeated:
        print_main(f"{path}: {repeated} photos are listed twice, because of links")
    loose = [name for name in os.listdir(path) if name.lower().endswith(common.PHOTO_ENDINGS)]
    if loose:
        print_main(f"{path}: {len(loose)} photos are in no folder of a class and are left out")
    labels = np.repeat(np.arange(len(names)), [len(files) for files in photos])
    paths = np.array([photo for files in photos for photo in files], common.STRINGS)
    return LabelData(paths, labels, names)


def photos_below(folders):
    """-> [[path of each photo below a folder], ...]; other files are counted"""
    files = [common.list_photos(folder, "") for folder in folders]  # all: each ends with ""
    odd = [x for paths in files for x in paths if x != x.encode(errors="ignore").decode()]
    if odd:
        fail(f"the name of {odd[0]!r} is not in UTF-8: rename this file")
    is_photo = lambda path: path.lower().endswith(common.PHOTO_ENDINGS)
    others = [path for paths in files for path in paths if not is_photo(path)]
    if others:
        print_main(f"{len(others)} files are left out, because their names are not those of "
                   f"photos, for example {others[0]}")
    return [list(filter(is_photo, paths)) for paths in files]


def check_classes(path, names, photos):
    """Two classes or more, each with photos.  photos: paths of each"""
    empty = [name for name, files in zip(names, photos) if not files]
    if empty or not names:
        fail(f"{path} has {len(names)} folders, and no photos in {', '.join(empty[:5]) or 'any'}. "
             f"Expected: {path.name}/CLASS/PHOTO: see --root, --train-split, --val-split")
    if len(names) == 1:
        fail(f"{path} has only one class, {names[0]}, so there is nothing to learn. Are the other "
             "classes missing, or is --root a folder too high?")
    # The folders of a class's photos, below that of the class; "" is that of the class itself
    inner = []
    for name, files in zip(names, photos):
        inner.append({os.path.dirname(photo)[len(f"{path / name}/") :] for photo in files})
    shared = sorted(set.intersection(*inner))
    if "" not in set.union(*inner) and len(shared) > 1:
        fail(f"all of {', '.join(names[:5])} in {path} have the folders {', '.join(shared[:5])}: "
             "these are the likely classes. Is --root or --train-split a folder too high?")


def check_same_classes(train, test):
    if train.names != test.names:
        fail(f"the splits differ in their classes: {sorted({*train.names} ^ {*test.names})[:5]}")


def report_shared(train, test):
    """Say how many test photos are training photos, too, by the bytes of their files."""
    tested = test.images[:: 1 + len(test) // 10_000]  # at most 10,000, evenly spaced
    sizes = {of_file(image, os.path.getsize) for image in tested}
    similar = [image for image in train.images if of_file(image, os.path.getsize) in sizes]
    checksum = lambda path: hashlib.sha256(Path(path).read_bytes()).digest()
    content = {of_file(image, checksum) for image in similar}
    shared = [image for image in tested if of_file(image, checksum) in content]
    if shared:
        print_main(f"{len(shared)} of {len(tested)} test photos are training photos, too, "
                   f"which raises the scores: for example {shared[0]}")


def of_file(image, function):
    """function(path). Scenes and photos in shards are no files: they are compared as they are."""
    return function(image) if isinstance(image, str) and os.path.isfile(image) else image


def by_chance(metrics, data):
    """What guesses score: {"commonest class": percent} beside top-1, beside mAP {"chance": percent}

    The average precision of a random order is about the fraction of positives.
    """
    if any("top-1" in name for name in metrics):
        return {"commonest class": 100 * np.bincount(data.labels).max().item() / len(data)}
    labels = label_columns(data.labels, len(data.names))
    fractions = (labels == 1).sum(0) / (labels >= 0).sum(0)
    scored = fractions[(0 < fractions) & (fractions < 1)]
    return {"chance": 100 * scored.mean().item()}


def draw_photos(data, val, args):
    """-> the indices in `data` of a run's training photos, and in `val` of its test photos, rising,
    as --seed draws them for --hold-out (where `val` is `data`), --shots and --train-images
    """
    order = np.random.default_rng(args.seed).permutation(len(data))
    held_out, rest = np.split(order, [round(args.hold_out * len(order))])
    test = np.sort(held_out) if args.hold_out else np.arange(len(val))
    if args.shots:
        columns = label_columns(data.labels[rest], len(data.names))
        chosen = [np.flatnonzero(column == 1)[: args.shots] for column in columns.T]
        rest = rest[np.unique(np.concatenate(chosen))]
    train = np.sort(rest[: args.train_images])
    fewest = 5 if args.protocol == "logreg-icmlm" else 1  # it chooses by a fifth of them
    if len(train) < fewest or not len(test):
        fail(f"{len(train)} training and {len(test)} test photos are left by --shots, "
             f"--train-images and --hold-out: {args.protocol} needs {fewest} and 1")
    return train, test


def label_columns(labels, num_classes):
    """Labels as in LabelData -> (N, classes): 1, 0 or -1"""
    if labels.ndim == 2:
        return labels
    return (labels[:, None] == np.arange(num_classes)).astype(np.int8)


# -------------------------------------------------------------------------------------- features


def pooled(backbone, images, amp="off", grid=1):
    """uint8 (B, size, size, 3) -> average-pooled features, (B, channels * grid^2)

    Windows overlap: on a 7x7 map the four windows are 6x6 [Goyal et al. 2019, ICMLM's 24].
    """
    images = common.augment(images)
    with torch.no_grad(), common.autocast(images.device, amp):
        maps = backbone(images)
    window = [max(1, side - grid + 1) for side in maps.shape[2:]]
    return F.avg_pool2d(maps.float(), window, stride=1).flatten(1)


class CentralSquares(Dataset):
    """Of LabelData or similar -> uint8 (size, size, 3); whether the photo can be decoded"""

    def __init__(self, data, size, side_fraction=224 / 256):
        self.data = data
        self.size = size
        self.crop = partial(common.centre_crop, side_fraction=side_fraction)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        try:
            [image] = common.read_crops(self.data, i, [self.crop], self.size)
            return image, True
        except common.Unreadable as error:
            common.report_once(f"cannot decode {error}: left out")
            return np.zeros((self.size, self.size, 3), np.uint8), False


def run_over_photos(function, photos, args, device):
    """function(uint8 (B, size, size, 3)) -> (B, D), on all photos of a data set in batches of 64

    photos: CentralSquares or similar.  args: workers.  -> (M, D) float32 on the CPU for the M
    photos that can be decoded, in their order; and the indices of these photos (M,)
    """
    loader = DataLoader(photos, 64, num_workers=args.workers, pin_memory=device.type == "cuda")
    outputs, readable, filled = None, [], 0
    for images, good in progress(loader, desc="photos", unit=" batches", leave=False):
        rows = function(images.to(device, non_blocking=True)).float().cpu()[good]
        readable += good.tolist()
        if outputs is None:  # filled in place: a list and its concatenation take twice as much
            outputs = torch.empty(len(photos), rows.shape[1])
        outputs[filled : filled + len(rows)] = rows
        filled += len(rows)
    if not filled:
        fail(f"none of the {len(photos)} photos can be decoded")
    return outputs[:filled], np.flatnonzero(readable)


@dataclass
class Features:
    """Of photos that can be decoded, on the CPU"""

    x: torch.Tensor  # (N, D) float32
    y: torch.Tensor  # labels as in LabelData
    rows: np.ndarray = None  # (N,) the photos' indices in their LabelData

    def select(self, rows):
        """Not copied if they are all, which may fill the memory"""
        keep = np.isin(self.rows, rows)
        return self if keep.all() else Features(self.x[keep], self.y[keep], self.rows[keep])


def extract_features(run, data, draws):
    """-> Features as the protocol has them.  draws: of each run, the rows of its photos in data"""

    def features_of(images):
        features = pooled(run.backbone, images, run.args.amp, run.protocol.grid)
        return F.normalize(features) if run.protocol.unit_length else features

    rows = np.unique(np.concatenate(draws))
    squares = CentralSquares(data.select(rows), run.args.image_size, run.protocol.side_fraction)
    x, readable = run_over_photos(features_of, squares, run.args, run.device)
    if not x.sum().isfinite():
        fail("the features are not finite: the weights are broken, or try --amp off")
    return Features(x, torch.from_numpy(data.labels[rows[readable]]), rows[readable])


# ------------------------------- protocols on features: (train: Features, test: Features, run: Run)


def score(decisions, labels):
    """decisions (N, classes) -> {"top-1": percent}; {"mAP": percent} with several labels"""
    if not decisions.isfinite().all():
        fail("the linear layer has diverged: try a lower --lr")
    if labels.ndim == 1:
        return {"top-1": 100 * (decisions.argmax(1) == labels).double().mean().item()}
    areas = []
    for decision, truth in zip(decisions.T.numpy(), labels.T.numpy()):
        if {0, 1} <= {*truth}:
            areas.append(average_precision(decision, truth))
    if not areas:
        fail("no class has a positive and a negative test photo")
    return {"mAP": statistics.mean(areas)}


def average_precision(decision, truth):
    """(N,) both, truth -1 is not counted -> percent: the area under the whole curve, not VOC07's"""
    from sklearn.metrics import average_precision_score

    counted = truth >= 0
    return 100 * float(average_precision_score(truth[counted], decision[counted]))


def svm_virtex(train, test, run):
    """One SVM per class [VirTex App. A.1] -> {"mAP": percent, class: average precision, ...}

    Squared hinge loss, positives weighted 2, C by 3-fold cross-validation; "difficult" photos are
    negatives in training, and left out in testing [official code].
    """
    return svms(train, test, run, [0.01, 0.1, 1.0, 10.0])


def svm_icmlm(train, test, run):
    """The same with 40 log-uniform costs [ICMLM App. F.2], all of which are tried [ours: the paper
    uses Optuna]; interpolated precision, as in the code of Goyal et al.

    On COCO this makes 9,680 SVMs in 8192 dimensions.
    """
    costs = 10 ** np.random.default_rng(run.args.seed).uniform(-5, 5, 40)
    return svms(train, test, run, sorted(costs), interpolated=True)


def svms(train, test, run, costs, interpolated=False):
    """By extras/svm.py, all at once [ours]: in a tenth of LIBLINEAR's time, which a copy takes"""
    train_y, test_y = [label_columns(part.y.numpy(), len(run.names)) for part in (train, test)]
    data = train.x.numpy(), train_y, test.x.numpy(), test_y, run.names, costs
    if importlib.util.find_spec("extras") or interpolated:
        scores = common.extra("svm").svm_probe(*data, run.device, interpolated)
    else:
        scores = scikit_learn_svms(*data)
    if not scores:
        fail("no class has positive and negative photos, both in training and in testing: do the "
             "splits spell their tags alike?")
    left_out = [name for name in run.names if name not in scores]
    if left_out:
        common.report_once(f"{len(left_out)} classes are left out, which lack training or test "
                           f"examples: {', '.join(left_out[:5])}")
    return {"mAP": statistics.mean(scores.values()), **scores}


def scikit_learn_svms(train_x, train_y, test_x, test_y, names, costs):
    """One after the other -> {class: average precision in percent}

    The primal problem has the same solution as the paper's dual one, and is solved sooner [ours].
    """
    from joblib import parallel_config
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import LinearSVC

    # The default tol of 1e-4 stops too early, which changes a class by up to 0.04 points.
    svm = LinearSVC(dual=False, class_weight={True: 2}, max_iter=2000, tol=1e-6)
    search = GridSearchCV(svm, {"C": costs}, scoring="average_precision", cv=3)
    train_x, test_x = np.float64(train_x), np.float64(test_x)
    scores = {}
    for k, name in enumerate(progress(names, desc="SVMs", leave=False)):
        positive, truth = train_y[:, k] == 1, test_y[:, k]
        rarer = min(positive.sum(), (~positive).sum())
        if rarer == 0 or not {0, 1} <= {*truth}:
            continue
        classifier = search if rarer >= 3 else svm  # one for each fold; otherwise C is 1
        with parallel_config("threading", n_jobs=-1):  # LIBLINEAR lets other threads run
            classifier.fit(train_x, positive)
        scores[name] = average_precision(classifier.decision_function(test_x), truth)
    return scores


def knn(train, test, run):
    """Votes of the 20 nearest training photos, weighted by exp(cosine / 0.07) [Wu et al. 2018]"""
    train_x, train_y = train.x.to(run.device), train.y.to(run.device)
    votes = []
    for part in test.x.split(1024):
        similarity = part.to(run.device) @ train_x.T
        cosine, nearest = similarity.topk(min(20, len(train_x)))  # (B, 20) both
        weights = (cosine / 0.07).exp()[..., None]
        labels = train_y[nearest]  # (B, 20), or (B, 20, classes)
        if labels.ndim == 2:
            labels = F.one_hot(labels, len(run.names))
        votes.append((weights * (labels == 1)).sum(1).cpu())  # (B, classes)
    return score(torch.cat(votes), test.y)


def sgd_mct(train, test, run):
    """A linear layer; lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2]"""

    def lr_factor(fraction):
        return 0.2 ** sum(fraction >= epoch / 60 for epoch in (30, 40, 50))

    x, y = train.x.to(run.device), train.y.to(run.device)
    trials = [(run.args.lr[0], 0.0)]  # no weight decay
    layers = common.extra("layers")
    [layer] = layers.train_linear(x, y, np.arange(len(x)), trials, lr_factor, run.args)
    common.save_weights(layers.path_of(run), layer)
    return score(layers.predict(layer, test.x), test.y)


def logreg_icmlm(train, test, run):
    """A linear layer; 25 pairs of lr and weight decay are tried on held-out photos [ICMLM App. F.2]

    [ours: a fifth is held out, and the pairs are random where the paper uses Optuna]
    """
    rng = np.random.default_rng(run.args.seed)
    rates = 10 ** rng.uniform(-1, 2, 25)
    decays = rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    held_out, rest = np.split(rng.permutation(len(train.x)), [len(train.x) // 5 or 1])

    x, y = train.x.to(run.device), train.y.to(run.device)
    cosine = partial(common.lr_factor, total=1)
    layers = common.extra("layers")
    tried = layers.train_linear(x, y, rest, trials, cosine, run.args)
    found = [layers.predict(layer, train.x[held_out]) for layer in tried]
    accuracies = [(x.argmax(1) == train.y[held_out]).double().mean().item() for x in found]
    best = trials[np.argmax(accuracies)]
    print_main(f"chosen: learning rate {best[0]:.3g}, weight decay {best[1]:.2g}")
    [layer] = layers.train_linear(x, y, np.arange(len(x)), [best], cosine, run.args)
    common.save_weights(layers.path_of(run), layer)
    return score(layers.predict(layer, test.x), test.y)


# -------------------------------- protocols on crops: (train: LabelData, test: LabelData, run: Run)


def sgd_virtex(train, test, run):
    """A linear layer on pooled features; cosine decay, or --steps [VirTex Sec. 4.1, App. A.1]"""

    def features_of(images, jitter=None):
        return [pooled(run.backbone, images, run.args.amp)]

    def learning_rate(peak, iteration, iters):
        return peak * common.lr_factor(iteration, iters, steps=run.args.steps)

    layers = common.extra("layers")
    probe = layers.Probe(features_of, {"": run.backbone.channels}, len(run.names))
    return layers.train(probe, train, run, partial(score_probe, probe, test, run), learning_rate)


def vgg_layers(train, test, run):
    """A linear layer after each of VGG-16's last three convolutions [ICMLM Sec. 4]"""
    layers = common.extra("layers")
    probe = layers.vgg_probe(run)
    scores = partial(score_probe, probe, test, run)
    return layers.train(probe, train, run, scores, layers.learning_rate, layers.DECAY)


@torch.no_grad()
def score_probe(probe, test, run):
    """extras.layers.Probe, on central squares -> {"top-1": percent} or {"C-11 top-1": ..., ...}"""
    squares = CentralSquares(test, run.args.image_size)
    logits_of = lambda images: torch.cat(probe(images), 1)  # (B, layers * classes)
    logits, readable = run_over_photos(logits_of, squares, run.args, run.device)
    labels, scores = torch.from_numpy(test.labels[readable]), {}
    for name, part in zip(probe.names, logits.chunk(len(probe.names), 1)):
        for metric, percent in score(part, labels).items():
            scores[f"{name} {metric}".strip()] = percent
    return scores


# ------------------------------------------------------------------ all protocols, with settings


@dataclass
class Protocol:
    """A function and the settings of its paper"""

    score: callable  # (train, test, run) -> {metric: percent}
    trained_on: str  # "features" of central squares, extracted once, or random "crops"
    labels: str  # of each photo: "one", or "any" number of them
    flags: dict  # defaults of the flags that it takes; lr: a peak for each linear layer
    side_fraction: float = 224 / 256  # of the central square's side and the photo's shorter side
    grid: int = 1  # features are average-pooled to grid x grid
    unit_length: bool = False  # features are l2-normalised
    colour_jitter: float = 0.0
    crop_min: float = 0.08  # of the area: both public codes; VirTex App. A.1 still has 20%


PROTOCOLS = {
    # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d; l2-normalised [official code]
    "svm-virtex": Protocol(svm_virtex, "features", "any", {}, unit_length=True),
    # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "svm-icmlm": Protocol(svm_icmlm, "features", "any", {}, 1.0, grid=2, unit_length=True),
    # As DINO reports it
    "knn": Protocol(knn, "features", "any", {}, unit_length=True),
    # [contrastive paper Sec. 4.2] 2048-d; 3 steps, no weight decay; the crop [ours]
    "sgd-mct": Protocol(sgd_mct, "features", "one",
        {"epochs": 60, "batch_size": 256, "lr": [30.0]}),
    # [ICMLM App. F.2] 2048-d; cosine, lr is searched; epochs and l2 [ours]
    "logreg-icmlm": Protocol(logreg_icmlm, "features", "one",
        {"epochs": 100, "batch_size": 1024}, 1.0, unit_length=True),
    # [VirTex Sec. 4.1, App. A.1] cosine (no steps), no weight decay
    "sgd-virtex": Protocol(sgd_virtex, "crops", "one",
        {"epochs": 100, "batch_size": 256, "lr": [0.3], "steps": ()}),
    # [ICMLM Sec. 4] DeeperCluster's code, for ImageNet; for Places --lr 0.01 0.01 0.02. The jitter
    # is half of SimCLR's [ours], which ICMLM cites.
    "layers": Protocol(vgg_layers, "crops", "any",
        {"epochs": 100, "batch_size": 256, "lr": [0.02] * 3}, colour_jitter=1.0),
}


if __name__ == "__main__":
    main(get_args())
