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

Early stopping: train with --keep-every and choose by VOC07, as VirTex does [Sec. 3]; without VOC07,
by a part of the training photos [ours], which on COCO needs its labels of objects:

    python eval_linear.py --weights runs/virtex-coco/model_*.pth --data voc07 --root VOCdevkit \\
        --train-split train --val-split val
    python eval_linear.py --weights runs/virtex-coco/model_*.pth --data coco --hold-out 0.2
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import common
from common import fail, print_main, progress


class Protocol(NamedTuple):
    """A row of PROTOCOLS"""

    trained_on: str  # "features" of central squares, extracted once, or random "crops"
    labels: str  # of each photo: "one", or "any" number of them
    side_fraction: float = 224 / 256  # of the central square's side and the photo's shorter side
    grid: int = 1  # features are average-pooled to grid x grid
    unit_length: bool = False  # features are l2-normalised
    epochs: int = None  # this and what follows are defaults of flags; None: there is no such flag
    batch_size: int = None
    lr: list = None  # peak, one for each linear layer
    steps: tuple = None  # fractions of training after which lr falls to a tenth; (): cosine decay
    colour_jitter: float = 0.0
    crop_min: float = 0.08  # of the area: both public codes; VirTex App. A.1 still has 20%


# fmt: off
PROTOCOLS = {
    # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d; l2-normalised [official code]
    "svm-virtex":   Protocol("features", "any", 224 / 256, 1, True),
    # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "svm-icmlm":    Protocol("features", "any", 1.0,       2, True),
    # [contrastive paper Sec. 4.2] 2048-d; 3 steps, no weight decay; the crop [ours]
    "sgd-mct":      Protocol("features", "one", 224 / 256, 1, False, 60, 256, [30.0]),
    # [ICMLM App. F.2] 2048-d; cosine, lr is searched; epochs and l2 [ours]
    "logreg-icmlm": Protocol("features", "one", 1.0,       1, True, 100, 1024),
    # as DINO reports it
    "knn":          Protocol("features", "any", 224 / 256, 1, True),
    # [VirTex Sec. 4.1, App. A.1] cosine, no weight decay
    "sgd-virtex":   Protocol("crops",    "one", epochs=100, batch_size=256, lr=[0.3], steps=()),
    # [ICMLM Sec. 4] DeeperCluster's code, for ImageNet; for Places --lr 0.01 0.01 0.02
    # The jitter is half of SimCLR's [ours], which ICMLM Sec. 4 cites
    "layers":       Protocol("crops",    "any", epochs=100, batch_size=256, lr=[0.02] * 3,
                             colour_jitter=1.0),
}
# fmt: on
SPLITS = {"coco": ("train2017", "val2017"), "voc07": ("trainval", "test")}


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what is measured").add_argument
    add("--weights", nargs="+", default=["runs/virtex/backbone.pth", "random"], help="see above")
    add("--arch", choices=common.BACKBONES,
        help="of random and imagenet (default: the first file's, else resnet50; layers: vgg16_bn)")
    add("--protocol", choices=PROTOCOLS, default="svm-virtex", help="see above")
    add("--runs", type=common.count, default=1, help="seeds; the table has mean and deviation")
    add("--seed", type=common.whole, default=0, help="of the first run: what is drawn follows it")
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help="shapes (built in), voc07, folder, or any with tags: "
        "coco, a .jsonl, folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--train-split", help="default trainval for voc07, train2017 for coco, else train")
    add("--val-split", help="default test for voc07, val2017 for coco, else val")
    add("--image-size", type=common.count, help="crop side in pixels (default: that of each file's "
        "training, by args.json beside it; else the first file's; else 224, 48 for shapes)")
    add("--train-images", type=common.count, help="at most (default 2000 for shapes, else all)")
    add("--shots", type=common.count,
        help="training photos of each class (their other labels count, too)")
    add("--hold-out", type=common.fraction, default=0.0, metavar="FRACTION",
        help="hold out this part of the training split, and score it instead of --val-split")
    add("--workers", type=common.whole, default=min(8, os.cpu_count()),
        help="DataLoader workers; 0: none")
    add = parser.add_argument_group("linear layers (the defaults are the protocol's)").add_argument
    add("--epochs", type=common.count, help="passes over the training photos")
    add("--batch-size", type=common.count, help="photos per iteration over all processes")
    add("--lr", type=common.positive, nargs="+", help="peak; three peaks for layers")
    add("--steps", type=common.fraction, nargs="+", metavar="FRACTION",
        help="of training, after which the rate falls to a tenth; only sgd-virtex (default cosine)")
    add = parser.add_argument_group("run").add_argument
    add("--output", help="folder of result.json and the linear layers (default "
        "runs/eval_linear/DATA-PROTOCOL, or DATA-PROTOCOL-K-shots)")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="off for numbers to report")
    # fmt: on
    args = parser.parse_args(argv)

    protocol = PROTOCOLS[args.protocol]
    if args.protocol == "layers":
        args.arch = args.arch or "vgg16_bn"
        if args.arch != "vgg16_bn" or any(source.startswith("clip:") for source in args.weights):
            parser.error("--protocol layers is for VGG-16: --arch vgg16_bn")
        if args.data != "folder":  # as DeeperCluster's code for VOC; the first two rates [ours]
            protocol = protocol._replace(epochs=60, batch_size=128, lr=[0.01, 0.01, 0.02])
    name = f"--protocol {args.protocol}"
    for flag in ("epochs", "batch_size", "lr", "steps"):
        if getattr(args, flag) and getattr(protocol, flag) is None:
            parser.error(f"{name} takes no --{flag.replace('_', '-')}")
    if args.lr and len(args.lr) != len(protocol.lr):
        parser.error(f"{name} takes {len(protocol.lr)} values of --lr")
    if protocol.labels == "one" and args.data != "folder":
        parser.error(f"{name} needs one label per photo: --data folder")

    # What was left out has the protocol's value. Learning rates are scaled to --batch-size.
    defaults = protocol._asdict()
    if args.batch_size and protocol.lr:
        batch_scale = args.batch_size / protocol.batch_size
        defaults["lr"] = [batch_scale * lr for lr in protocol.lr]
    defaults["train_split"], defaults["val_split"] = SPLITS.get(args.data, ("train", "val"))
    defaults["train_images"] = 2000 if args.data == "shapes" else None
    data = Path(args.root or "folder").resolve() if args.data == "folder" else Path(args.data)
    shots = f"-{args.shots}-shots" if args.shots else ""
    name_of_data = data.name.removesuffix(".jsonl")
    defaults["output"] = f"runs/eval_linear/{name_of_data}-{args.protocol}{shots}"
    for flag, value in defaults.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
    runs_differ = args.train_images or args.shots or args.hold_out or "random" in args.weights
    if args.protocol in ("svm-virtex", "knn") and args.runs > 1 and not runs_differ:
        parser.error(f"{name} gives all --runs the same score: draw photos by --shots, "
                     "--train-images or --hold-out")  # fmt: skip
    return args


def main(args):
    if args.trained_on == "features":
        run_alone()
    device = common.init_distributed()
    torch.backends.cudnn.allow_tf32 = False  # by default, convolutions on GPUs would be rounded
    common.make_folder(args.output)
    files = [source for source in args.weights if is_file(source)]
    # A wrong file ends it now, not when its turn comes.
    archs = [load_backbone(path, args.arch, 0).arch for path in files]
    arch = args.arch or next(iter(archs), "resnet50")
    data = label_data(args.data, args.root, args.train_split)
    val = data if args.hold_out else label_data(args.data, args.root, args.val_split)
    check_same_classes(data, val)
    report_shared(*draw_photos(data, val, args))

    results, sizes = defaultdict(list), {}  # of each backbone: the scores of its runs
    for source in args.weights:
        known = [trained_with(path, "image_size") for path in (source, *files)]
        usual = next(filter(None, known), 48 if args.data == "shapes" else 224)
        sizes[source] = args.image_size or usual
        for seed in range(args.seed, args.seed + args.runs):
            changed = {"seed": seed, "image_size": sizes[source]}
            run = argparse.Namespace(**{**vars(args), **changed})
            new_backbone = seed == args.seed or source == "random"
            if new_backbone:
                backbone = load_backbone(source, args.arch if is_file(source) else arch, seed)
                backbone.to(device, memory_format=torch.channels_last)
                backbone.eval().requires_grad_(False)
                train_x = test_x = None  # frees the memory of the last backbone's features
            train, test = draw_photos(data, val, run)
            path = Path(args.output, f"{args.protocol}_{quote(source, safe='')}_{seed}.pth")
            if args.trained_on == "features":
                # Extracted once for each backbone; again only if this run has drawn other photos.
                if new_backbone or args.train_images or args.shots or args.hold_out:
                    train_x = extract_features(backbone, train, run, device)
                if new_backbone or args.hold_out:
                    test_x = extract_features(backbone, test, run, device)
                scores = score_features(train_x, test_x, data.names, path, run, device)
            else:
                probe = train_probe(backbone, train, test, path, run, device)
                if not common.is_main():
                    continue
                scores = score_probe(probe, test, run, device)
            scores |= by_chance(scores, test)
            results[source].append(scores)
            photos = f"{len(train)} training and {len(test)} test photos of {run.image_size} px"
            print_main(f"{source}, seed {seed}, {photos}: {format_scores(scores, data.names)}")
    if len(test) < 50:
        print_main(f"the scores are rough: they are of {len(test)} photos only")
    if common.is_main():
        report(results, sizes, data.names, args)
    common.end_distributed()


def run_alone():
    """Features are extracted and scored by one process: the others of torchrun end here."""
    os.environ.pop("WORLD_SIZE", None)  # so that it waits for nobody
    if os.environ.get("RANK", "0") != "0":
        print("the first process measures, this one ends. Without torchrun: unset RANK WORLD_SIZE")
        sys.exit()


def format_scores(scores, classes):
    """Without those of single classes"""
    return ", ".join(f"{name} {scores[name]:.2f}" for name in scores if name not in classes)


def report(results, sizes, classes, args):
    """Print a line for each backbone; write result.json, which has the classes' scores, too.

    results: {source: [scores of a run]}.  sizes: {source: pixels}
    """
    results = {source: over_runs(runs) for source, runs in results.items()}
    path = f"{args.output}/result.json"
    replaced = ", instead of an earlier call's" if os.path.exists(path) else ""
    common.save(path, {"args": vars(args), "image_size": sizes, "backbones": results})
    columns = [name for name in results[args.weights[0]]["mean"] if name not in classes]
    width = max(map(len, results))
    print(" " * width, *(f"{column:>15}" for column in columns))
    for source, scores in results.items():
        cells = [f"{scores['mean'][column]:.2f}" for column in columns]
        if args.runs > 1:
            cells = [f"{cell} ± {scores['std'][name]:.2f}" for cell, name in zip(cells, columns)]
        print(f"{source:{width}}", *(f"{cell:>15}" for cell in cells))
    print(f"all of it, also for each class and run: {path}{replaced}")


def over_runs(runs):
    """[{name: percent} of each run] -> {"mean": {name: percent}, "std": likewise, "runs": runs}

    std: the sample standard deviation, which is 0 for a single run
    """
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
    """What args.json beside a file says of a flag of its training; None if it does not"""
    path = Path(source).parent / "args.json"
    content = json.loads(path.read_text()) if is_file(source) and path.exists() else {}
    if flag == "image_size" and content.get("script") == "detection":
        return None  # it trains on whole photos
    return content.get(flag)


def load_backbone(source, arch, seed):
    """source: "random", "imagenet", clip:NAME or a file -> backbone with `arch` and `channels`

    arch: of the first two; that a file must have, or None
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
    from sklearn.preprocessing import MultiLabelBinarizer  # only here: --help needs none

    if name == "folder":
        return folder_labels(root or "datasets/folder", split)
    if name == "voc07":
        return LabelData(*common.extra("sources").voc07(root or "datasets/voc07", split))
    shards = os.path.isdir(name) and not os.path.isdir(os.path.join(name, split))
    if not (shards or name in ("shapes", "coco", "vg") or name.endswith(".jsonl")):
        fail(f"no data set {name}: photos in {split}/CLASS/ are --data folder --root FOLDER, other "
             "--data are shapes, voc07, coco, a .jsonl file or a folder of shards")  # fmt: skip
    captioned = common.caption_data(name, root, split, tags=True)
    if not captioned.tag_names:
        fail(f"--data {name} has no tags to score. With a folder for each class: --data folder")
    if not captioned.tagged.all():
        keep = np.flatnonzero(captioned.tagged)
        left_out = f"{len(captioned) - len(keep)} of {len(captioned)} photos are left out"
        print_main(f'{left_out}, which have no "tags"; "tags": [] says that none fits')
        captioned = captioned.select(keep)
    binarizer = MultiLabelBinarizer(classes=captioned.tag_names, sparse_output=True)
    labels = binarizer.fit_transform(captioned.tags).astype(np.int8).toarray()
    return LabelData(captioned.images, labels, captioned.tag_names, captioned.open)


PHOTOS = ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".avif", ".gif", ".bmp"
PHOTOS += ".tif", ".tiff", ".jp2", ".ppm", ".pgm"


def is_photo(path, folder, others):
    """Whether a file below the folder is a photo by its name. Others are noted, but hidden ones."""
    hidden = "/." in path.removeprefix(f"{folder}")
    named = path.lower().endswith(PHOTOS)
    others += [] if named or hidden else [path]
    return named and not hidden


def folder_labels(root, split):
    """{split}/<class>/<photo> -> LabelData"""
    from torchvision.datasets import ImageFolder

    path, others = Path(root, split), []
    try:
        found = ImageFolder(path, is_valid_file=partial(is_photo, folder=path, others=others))
    except FileNotFoundError as error:  # no folders of classes, or nothing in one of them
        fail(f"{str(error).strip()} Expected is {split}/CLASS/PHOTO: see --root, --train-split")
    if len(found.classes) == 1:
        fail(f"{path} holds one class, {found.classes[0]}, of which nothing can be learned: "
             "are others missing, or is --root a folder too high?")  # fmt: skip
    if others:
        print_main(f"{len(others)} files are left out, by their names no photos, as {others[0]}")
    paths, labels = zip(*found.samples)
    check_depth(path, paths, found.classes)
    if twice := in_several(paths, labels, lambda photo: (os.path.basename(photo), size(photo))):
        print_main(f"{len(twice)} photos of {path} are in several classes (with the same names and "
                   f"content), as {paths[twice[0]]} and {paths[twice[1]]}")  # fmt: skip
    return LabelData(np.array(paths, common.STRINGS), np.array(labels), found.classes)


def check_depth(path, photos, classes):
    """Count photos in folders within those of their classes; if all classes share these, refuse"""
    tops = {os.path.join(path, name) for name in classes}
    deeper = [photo for photo in photos if os.path.dirname(photo) not in tops]
    within = defaultdict(set)  # of each class: the folders of its photos
    for folder in {*map(os.path.dirname, photos)}:
        name, *parts = Path(folder).relative_to(path).parts
        within[name].add("/".join(parts))
    shared = sorted(set.intersection(*within.values()))
    if len(deeper) == len(photos) and len(shared) > 1:
        fail(f"each of {', '.join(classes[:5])} in {path} has the folders {', '.join(shared[:5])}: "
             "these are the likely classes. Is --root or --train-split a folder too high?")
    if deeper:
        print_main(f"{len(deeper)} of {len(photos)} photos are in folders within those of their "
                   f"classes, as {deeper[0]}")  # fmt: skip


def check_same_classes(train, test):
    if train.names != test.names:
        fail(f"the splits differ in their classes: {sorted({*train.names} ^ {*test.names})[:5]}")


def report_shared(train, test):
    """Say how many test photos are training photos, too, by the bytes of their files

    Of more than 10,000 test photos evenly spaced ones are compared.
    """
    tested = test.images[np.arange(0, len(test), 1 + len(test) // 10_000)]
    images, in_test = [*tested, *train.images], len(tested) * [True] + len(train) * [False]
    shared = [images[i] for i in in_several(images, in_test, size) if in_test[i]]
    if shared:
        print_main(f"{len(shared)} of {len(tested)} test photos are training photos, too, "
                   f"which raises the scores: for example {shared[0]}")  # fmt: skip


def in_several(images, groups, look):
    """The indices of images that are in several groups: the same, or files of the same bytes

    groups: of each image.  look(image): a quick look, by which equal files are equal; only files
    that are equal by it in several groups are read
    """
    rows = range(len(images))
    for key in (look, content):
        equal = defaultdict(list)
        for i in rows:
            equal[key(images[i])].append(i)
        rows = [i for same in equal.values() if len({groups[i] for i in same}) > 1 for i in same]
    return rows


def is_path(image):
    """Scenes, and photos in shards, are none."""
    return isinstance(image, str) and os.path.isfile(image)


def size(image):
    return os.path.getsize(image) if is_path(image) else image


def content(image):
    return hash(Path(image).read_bytes()) if is_path(image) else image


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
    """Training and test photos of a run, drawn by its seed: --hold-out, --shots, --train-images"""
    order = np.random.default_rng(args.seed).permutation(len(data))
    held_out, rest = np.split(order, [round(args.hold_out * len(order))])
    test = data.select(np.sort(held_out)) if args.hold_out else val
    if args.shots:
        columns = label_columns(data.labels[rest], len(data.names))
        chosen = [np.flatnonzero(column == 1)[: args.shots] for column in columns.T]
        rest = rest[np.unique(np.concatenate(chosen))]
    train = data.select(np.sort(rest[: args.train_images]))
    fewest = 5 if args.protocol == "logreg-icmlm" else 1  # it chooses by a fifth of them
    if len(train) < fewest or not len(test):
        counts = f"{len(train)} training and {len(test)} test photos"
        fail(f"{counts} are left by --shots, --train-images and --hold-out: {args.protocol} needs "
             f"{fewest} and 1")  # fmt: skip
    return train, test


def label_columns(labels, num_classes):
    """Labels as in LabelData -> (N, classes), 1, 0 or -1"""
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
    """The central square of each photo -> uint8 (size, size, 3), and whether it can be decoded"""

    def __init__(self, data, size, side_fraction=224 / 256):
        """data: LabelData, CaptionData or similar"""
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
    pin = device.type == "cuda"
    loader = DataLoader(photos, 64, num_workers=args.workers, pin_memory=pin)
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


class Features(NamedTuple):
    """Of photos that can be decoded, on the CPU"""

    x: torch.Tensor  # (N, D) float32
    y: torch.Tensor  # labels as in LabelData


def extract_features(backbone, data, args, device):
    """-> Features of LabelData, as the protocol has them"""

    def features_of(images):
        features = pooled(backbone, images, args.amp, args.grid)
        return F.normalize(features) if args.unit_length else features

    squares = CentralSquares(data, args.image_size, args.side_fraction)
    x, readable = run_over_photos(features_of, squares, args, device)
    if not x.sum().isfinite():
        fail("the features are not finite: the weights are broken, or try --amp off")
    return Features(x, torch.from_numpy(data.labels[readable]))


# ------------------------------------------------------------------------ protocols on features


def score_features(train, test, names, path, args, device):
    """The protocol -> {metric: percent}

    train, test: Features.  names: of the classes.  path: where a linear layer is kept
    """
    torch.manual_seed(args.seed)
    if args.protocol == "svm-virtex":
        return svm_virtex(train, test, names)
    if args.protocol == "svm-icmlm":
        return svm_icmlm(train, test, names, args.seed, device)
    if args.protocol == "knn":
        return knn(train, test, len(names), device)
    layers = common.extra("layers")
    fit = {"sgd-mct": layers.sgd_mct, "logreg-icmlm": layers.logreg_icmlm}[args.protocol]
    layer = fit(train.x, train.y, args, device)
    common.save_weights(path, layer)
    return score(layers.predict(layer, test.x), test.y)


def score(decisions, labels):
    """decisions (N, classes) -> {"top-1": percent}; {"mAP": percent} with several labels"""
    if not decisions.isfinite().all():
        fail("the linear layer has diverged: try a lower --lr")
    if labels.ndim == 1:
        correct = decisions.argmax(1) == labels
        return {"top-1": 100 * correct.double().mean().item()}
    both = zip(decisions.T.numpy(), labels.T.numpy())
    areas = [average_precision(*column) for column in both if {0, 1} <= {*column[1]}]
    if not areas:
        fail("no class has a positive and a negative test photo")
    return {"mAP": statistics.mean(areas)}


def average_precision(decision, truth):
    """The area under the whole curve, not VOC07's mean over eleven recalls -> percent

    decision (N,); truth (N,): 1, 0, or -1, "difficult", which does not count
    """
    from sklearn.metrics import average_precision_score

    counted = truth >= 0
    return 100 * float(average_precision_score(truth[counted], decision[counted]))


def svm_virtex(train, test, names):
    """One SVM per class [VirTex App. A.1] -> {"mAP": percent, class: average precision, ...}

    Squared hinge loss, positives weighted 2, C by 3-fold cross-validation; "difficult" are
    negatives in training, left out in testing [official code]. The primal problem has the same
    solution as the paper's dual one, and is solved sooner [ours].
    """
    from joblib import parallel_config
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import LinearSVC

    # scikit-learn's tol, 1e-4, stops early: up to 0.04 points of a class are missing or too many
    svm = LinearSVC(dual=False, class_weight={True: 2}, max_iter=2000, tol=1e-6)
    costs = {"C": [0.01, 0.1, 1.0, 10.0]}
    search = GridSearchCV(svm, costs, scoring="average_precision", cv=3)
    train_x, test_x = train.x.double().numpy(), test.x.double().numpy()
    train_y = label_columns(train.y.numpy(), len(names)) == 1
    test_y = label_columns(test.y.numpy(), len(names))
    scores = {}
    for k, name in enumerate(progress(names, desc="SVMs", leave=False)):
        positive, truth = train_y[:, k], test_y[:, k]
        rarer = min(positive.sum(), (~positive).sum())
        if rarer == 0 or not {0, 1} <= {*truth}:
            continue
        classifier = search if rarer >= 3 else svm  # one for each fold; otherwise C is 1
        with parallel_config("threading", n_jobs=-1):  # LIBLINEAR lets other threads run
            classifier.fit(train_x, positive)
        scores[name] = average_precision(classifier.decision_function(test_x), truth)
    return with_mean(scores, names)


def svm_icmlm(train, test, names, seed, device):
    """40 log-uniform costs [ICMLM App. F.2], all of them tried [ours; the paper uses Optuna];
    interpolated precision, as in the code of Goyal et al.

    On COCO that are 9,680 SVMs in 8192 dimensions, which extras/svm.py solves all at once.
    """
    costs = 10 ** np.random.default_rng(seed).uniform(-5, 5, 40)
    data = [tensor.numpy() for tensor in (*train, *test)]
    svm = common.extra("svm")
    scores = svm.svm_probe(*data, names, sorted(costs), device, interpolated=True)
    return with_mean(scores, names)


def with_mean(scores, names):
    if not scores:
        fail("no class has positive and negative photos, both in training and in testing: do the "
             "splits spell their tags alike?")  # fmt: skip
    left_out = [name for name in names if name not in scores]
    if left_out:
        common.report_once(f"{len(left_out)} classes are left out, which lack training or test "
                           f"examples: {', '.join(left_out[:5])}")  # fmt: skip
    return {"mAP": statistics.mean(scores.values()), **scores}


def knn(train, test, num_classes, device):
    """Votes of the 20 nearest training photos, weighted by exp(cosine / 0.07) [Wu et al. 2018]

    train, test: Features, l2-normalised -> {"top-1": percent}; with several labels the votes rank
    each class's photos: {"mAP": percent}
    """
    train_x, train_y = train.x.to(device), train.y.to(device)
    votes = []
    for part in test.x.split(1024):
        similarity = part.to(device) @ train_x.T
        cosine, nearest = similarity.topk(min(20, len(train_x)))  # (B, 20) both
        weights = (cosine / 0.07).exp()[..., None]
        labels = train_y[nearest]  # (B, 20), or (B, 20, classes)
        if labels.ndim == 2:
            labels = F.one_hot(labels, num_classes)
        votes.append((weights * (labels == 1)).sum(1).cpu())  # (B, classes)
    return score(torch.cat(votes), test.y)


# ------------------------------------------------------------------------------ trained on crops


def train_probe(backbone, train, test, path, args, device):
    """sgd-virtex, layers -> extras.layers.Probe, trained by all processes"""
    torch.manual_seed(args.seed)
    layers = common.extra("layers")
    probe = layers.Probe(backbone, len(train.names), args, pooled).to(device)
    test_scores = partial(score_probe, probe, test, args, device)
    layers.train(probe, train, path, args, device, test_scores)
    return probe


@torch.no_grad()
def score_probe(probe, test, args, device):
    """probe: extras.layers.Probe -> {"top-1": percent}, or {"C-11 top-1": percent, ...}"""
    squares = CentralSquares(test, args.image_size)
    logits_of = lambda images: torch.cat(probe(images), 1)  # (B, layers * classes)
    logits, readable = run_over_photos(logits_of, squares, args, device)
    labels, scores = torch.from_numpy(test.labels[readable]), {}
    for name, part in zip(probe.names, logits.chunk(len(probe.names), 1)):
        for metric, percent in score(part, labels).items():
            scores[f"{name} {metric}".strip()] = percent
    return scores


if __name__ == "__main__":
    main(get_args())
