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
result is one table, and in --output result.json: {"args", "backbones": {WEIGHTS: {"mean", "std",
"runs"}}}, scores in percent.

    protocol       classifier on the frozen backbone, which is always in eval mode       score
    svm-virtex     one SVM per class on pooled features, cost by cross-validation        mAP
    svm-icmlm      one SVM per class on features pooled 2x2, 40 costs                    mAP
    sgd-mct        linear layer on pooled features                                       top-1
    logreg-icmlm   the same; learning rate and weight decay chosen from 25 trials        top-1
    knn            votes of the 20 nearest training photos: nothing is trained           either
    sgd-virtex     linear layer, trained with augmentation                               top-1
    layers         linear layers on VGG-16's last 3 convolutions, with augmentation      either

Photos have several labels, or one (--data folder), which top-1 needs. Linear layers are kept in
--output, from which sgd-virtex and layers resume. Early stopping [VirTex Sec. 3]: train with
--keep-every, then choose by

    python eval_linear.py --weights runs/virtex-coco/model_*.pth --data coco --hold-out 0.2
"""

import argparse
import json
import math
import os
import statistics
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
    """What a protocol does with the photos, and the defaults of its flags"""

    on_features: bool = True  # of the central squares, extracted once; else trained on random crops
    side_fraction: float = 224 / 256  # of the central square's side and the photo's shorter side
    grid: int = 1  # features are average-pooled to grid x grid
    l2_normalised: bool = False  # features are
    one_label: bool = False  # each photo must have exactly one
    epochs: int = None
    batch_size: int = None
    lr: list = None  # peak, one for each linear layer
    colour_jitter: float = 0.0
    crop_min: float = 0.08  # of the area: both public codes; VirTex App. A.1 still has 20%


# fmt: off
PROTOCOLS = {
    # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d
    "svm-virtex": Protocol(l2_normalised=True),
    # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "svm-icmlm": Protocol(side_fraction=1.0, grid=2, l2_normalised=True),
    # [contrastive paper Sec. 4.2] 2048-d; 3 steps, no weight decay; the crop [ours]
    "sgd-mct": Protocol(one_label=True, epochs=60, batch_size=256, lr=[30.0]),
    # [ICMLM App. F.2] 2048-d; cosine, lr is searched; epochs and l2 [ours]
    "logreg-icmlm": Protocol(side_fraction=1.0, l2_normalised=True, one_label=True,
        epochs=100, batch_size=1024),
    # as DINO reports it
    "knn": Protocol(l2_normalised=True),
    # [VirTex Sec. 4.1, App. A.1] cosine, no weight decay
    "sgd-virtex": Protocol(on_features=False, one_label=True, epochs=100, batch_size=256, lr=[0.3]),
    # [ICMLM Sec. 4] DeeperCluster's code, for ImageNet; for Places --lr 0.01 0.01 0.02. The jitter
    # [ours]: half of SimCLR's, which ICMLM App. F names
    "layers": Protocol(on_features=False, epochs=100, batch_size=256, lr=[0.02, 0.02, 0.02],
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
    add("--runs", type=int, default=1, help="number of seeds; the table has mean and deviation")
    add("--seed", type=int, default=0, help="of the first run: what is drawn depends on it")
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help="shapes (built in), voc07, folder, or any with tags: "
        "coco, a .jsonl, folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--train-split", help="default trainval for voc07, train2017 for coco, else train")
    add("--val-split", help="default test for voc07, val2017 for coco, else val")
    add("--image-size", type=int, help="crop side in pixels (default: that of each file's training, "
        "which args.json beside it names; of random and imagenet the first file's; else 224)")
    add("--train-images", type=int, help="at most this many (default 2000 for shapes, else all)")
    add("--shots", type=int, help="training photos of each class (their other labels count, too)")
    add("--hold-out", type=float, default=0.0, metavar="FRACTION",
        help="hold out this part of the training split, and score it instead of --val-split")
    add("--workers", type=int, default=min(8, os.cpu_count()), help="DataLoader workers; 0: none")
    add = parser.add_argument_group("linear layers (the defaults are the protocol's)").add_argument
    add("--epochs", type=int, help="passes over the training photos")
    add("--batch-size", type=int, help="photos per iteration over all processes")
    add("--lr", type=float, nargs="+", help="peak; three peaks for layers")
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
    for flag in ("epochs", "batch_size", "lr"):
        if getattr(args, flag) and not getattr(protocol, flag):
            parser.error(f"{name} takes no --{flag.replace('_', '-')}")
    if args.lr and len(args.lr) != len(protocol.lr):
        parser.error(f"{name} takes {len(protocol.lr)} values of --lr")
    if protocol.one_label and args.data != "folder":
        parser.error(f"{name} needs one label per photo: --data folder")

    # What was left out has the protocol's value. Learning rates are scaled to --batch-size.
    defaults = protocol._asdict()
    if args.batch_size and protocol.lr:
        batch_scale = args.batch_size / protocol.batch_size
        defaults["lr"] = [batch_scale * lr for lr in protocol.lr]
    defaults["train_split"], defaults["val_split"] = SPLITS.get(args.data, ("train", "val"))
    data = Path(args.root or "folder").resolve().name if args.data == "folder" else args.data
    shots = f"-{args.shots}-shots" if args.shots else ""
    data = Path(data).name.removesuffix(".jsonl")
    defaults["output"] = f"runs/eval_linear/{data}-{args.protocol}{shots}"
    defaults["train_images"] = 2000 if args.data == "shapes" else None
    for flag, value in defaults.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
    drawn = args.train_images or args.shots or args.hold_out or "random" in args.weights
    if args.protocol in ("svm-virtex", "knn") and args.runs > 1 and not drawn:
        parser.error(f"{name} gives all --runs the same score: draw photos by --shots, "
                     "--train-images or --hold-out")  # fmt: skip
    return args


def main(args):
    device = common.init_distributed()
    torch.backends.cudnn.allow_tf32 = False  # by default, convolutions on GPUs would be rounded
    Path(args.output).mkdir(parents=True, exist_ok=True)
    files = [source for source in args.weights if is_file(source)]
    for path in files:
        common.read_checkpoint(path)  # a wrong path ends it now, not when its turn comes
    arch = args.arch or (load_backbone(files[0], None, 0).arch if files else "resnet50")
    size = trained_with(files[0], "image_size") if files else None
    size = size or (48 if args.data == "shapes" else 224)
    data = label_data(args.data, args.root, args.train_split)
    val = data if args.hold_out else label_data(args.data, args.root, args.val_split)
    check_same_classes(data, val)

    results = {}  # of each backbone: the scores of its runs
    for source in args.weights:
        results[source] = []
        for seed in range(args.seed, args.seed + args.runs):
            run = argparse.Namespace(**{**vars(args), "seed": seed})
            run.image_size = args.image_size or trained_with(source, "image_size") or size
            new_backbone = seed == args.seed or source == "random"
            if new_backbone:
                backbone = load_backbone(source, args.arch if is_file(source) else arch, seed)
                backbone.to(device, memory_format=torch.channels_last)
                backbone.eval().requires_grad_(False)
                train_features = test_features = None  # frees the memory of the last backbone's
            train, test = draw_photos(data, val, run)
            if args.on_features:
                # Extracted once for each backbone; again only if this run has drawn other photos.
                if new_backbone or args.train_images or args.shots or args.hold_out:
                    train_features = extract_features(backbone, train, run, device)
                if new_backbone or args.hold_out:
                    test_features = extract_features(backbone, test, run, device)
                path = layers_path(source, run)
                both = train_features, test_features
                scores = score_features(*both, data.names, path, run, device)
            else:
                scores = train_with_augmentation(source, backbone, train, test, run, device)
            results[source].append(scores)
            sizes = f"{len(train)} training and {len(test)} test photos of {run.image_size} px"
            print_main(f"{source}, seed {seed}, {sizes}: {format_scores(scores, data.names)}")
    if len(test) < 50:
        print_main(f"the scores are rough: they are of {len(test)} photos only")
    if common.is_main():
        report(results, data.names, args)
    common.end_distributed()


def format_scores(scores, classes):
    """Without those of single classes"""
    return ", ".join(f"{name} {scores[name]:.2f}" for name in scores if name not in classes)


def report(results, classes, args):
    """Print a line for each backbone; write result.json, which has the classes' scores, too.

    results: {source: [scores of a run]}
    """
    results = {source: over_runs(runs) for source, runs in results.items()}
    content = {"args": vars(args), "backbones": results}
    path = f"{args.output}/result.json"
    replaced = ", instead of an earlier call's" if os.path.exists(path) else ""
    common.save(path, content)
    columns = [name for name in results[args.weights[0]]["mean"] if name not in classes]
    width = max(map(len, results))
    print(" " * width, *(f"{column:>13}" for column in columns))
    for source, scores in results.items():
        cells = [f"{scores['mean'][column]:.2f}" for column in columns]
        if args.runs > 1:
            cells = [f"{cell} ± {scores['std'][name]:.2f}" for cell, name in zip(cells, columns)]
        print(f"{source:{width}}", *(f"{cell:>13}" for cell in cells))
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


def layers_path(source, args):
    """The file for the linear layers of one backbone and one seed"""
    return Path(args.output, f"{args.protocol}_{quote(source, safe='')}_{args.seed}.pth")


# ------------------------------------------------------------------------------------- backbones


def is_file(source):
    return source not in ("random", "imagenet") and not source.startswith("clip:")


def trained_with(source, flag):
    """What args.json beside a file says of a flag of its training; None if it is not there"""
    path = Path(source).parent / "args.json"
    return json.loads(path.read_text()).get(flag) if is_file(source) and path.exists() else None


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
    return common.extra("checkpoints").load_backbone(source, arch)


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
        data = folder_labels(root or "datasets/folder", split)
    elif name == "voc07":
        data = LabelData(*common.extra("voc07").labels(root or "datasets/voc07", split))
    else:
        captioned = common.caption_data(name, root, split, tags=True)
        if not captioned.tag_names:
            fail(f"--data {name} has no tags to score. With a folder for each class: --data folder")
        labels = np.zeros((len(captioned), len(captioned.tag_names)), np.int8)
        for row, tags in zip(labels, captioned.tags):
            row[tags] = 1
        data = LabelData(captioned.images, labels, captioned.tag_names, captioned.open)
    return data


def folder_labels(root, split):
    """{split}/<class>/<photo>, in the order of torchvision's ImageFolder -> LabelData"""
    path = Path(root, split)
    folders = sorted(path.glob("[!.]*/"))
    names = [folder.name for folder in folders]
    photos = photos_in(*folders)
    empty = [name for name, found in zip(names, photos) if not found]
    if empty or not names:
        lacking = f"no photo of the classes {empty[:5]}" if names else "no folders of classes"
        fail(f"{path} holds {lacking}, {split}/CLASS/PHOTO: see --root, --train-split")
    paths = [photo for found in photos for photo in found]
    labels = np.repeat(np.arange(len(names)), list(map(len, photos)))
    return LabelData(np.array(paths, common.STRINGS), labels, names)


# Of what PIL knows: no photos, or formats that it can only write
NO_PHOTOS = "BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PALM", "PDF", "WMF"


def photos_in(*folders):
    """-> for each folder (a Path) a list of the paths of all photos in it and its subfolders

    The order is torchvision's. Links are followed, but no folder is read twice, nor one around
    these: links may form a loop. Names that begin with a dot are left out: .ipynb_checkpoints
    """
    kinds = Image.registered_extensions()
    seen = {outer for folder in folders for outer in folder.resolve().parents}
    photos = [[] for _ in folders]
    queue = list(zip(photos, folders))
    for found, folder in queue:  # it grows: of two ways to a folder, the shorter one comes first
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        for path in sorted(folder.glob("[!.]*")):
            if path.is_dir():
                queue.append((found, path))
            elif kinds.get(path.suffix.lower(), "PDF") not in NO_PHOTOS:
                if "\\udc" in ascii(path):  # for Python, a byte that is not UTF-8
                    fail(f"the name {path.name!a} in {folder} is not UTF-8: rename it")
                found.append(str(path))
    return [sorted(found, key=os.path.split) for found in photos]


def check_same_classes(train, test):
    if train.names != test.names:
        fail(f"the splits differ in their classes: {sorted({*train.names} ^ {*test.names})[:5]}")


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
        fail(f"{counts}, {args.protocol} needs at least {fewest} and 1: see --hold-out")
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


# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`.
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}


def convolution_features(backbone, images, amp="off", jitter=None):
    """uint8 (B, size, size, 3) -> for each of CONVOLUTIONS its maps, average-pooled 3x3

    At 224 pixels (B, 512 * 4 * 4): the "about 9K" of ICMLM Sec. 4. [DeeperCluster's code]
    """
    features = []
    maps = common.augment(images, jitter)
    with torch.no_grad(), common.autocast(images.device, amp):
        for n, module in enumerate(backbone.features):
            maps = module(maps)
            if n in CONVOLUTIONS.values():
                features.append(F.avg_pool2d(maps.float(), 3, stride=3).flatten(1))
    return features


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

    photos: CentralSquares or similar.  args: workers.  Each of P processes reads every P-th photo.
    -> (M, D) float32 on the CPU for the M photos that can be decoded, in their order, but None on
    all processes but the first; and the indices of these photos (M,)
    """
    count, processes = len(photos), common.world_size()
    # All processes get equally many: the first photos come again at the end.
    end = math.ceil(count / processes) * processes
    indices = np.arange(common.rank(), end, processes)
    loader = DataLoader(
        photos,
        batch_size=64,
        sampler=(indices % count).tolist(),
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
    )
    outputs, readable, filled = None, [], 0
    for images, good in progress(loader, desc="photos", unit=" batches", leave=False):
        rows = function(images.to(device, non_blocking=True)).float().cpu()
        rows = gather_in_turns(rows)
        good = gather_in_turns(good)[: count - len(readable)]
        readable += good.tolist()
        if common.is_main():
            rows = rows[: len(good)][good]
            if outputs is None:  # filled in place: a list and its concatenation take twice as much
                outputs = torch.empty(count, rows.shape[1])
            outputs[filled : filled + len(rows)] = rows
            filled += len(rows)
    if not any(readable):
        fail(f"none of the {count} photos can be decoded")
    return None if outputs is None else outputs[:filled], np.flatnonzero(readable)


def gather_in_turns(x):
    """The rows of all processes, interleaved: the first of each, the second of each ..."""
    by_process = common.gather(x).view(common.world_size(), *x.shape)
    return by_process.transpose(0, 1).flatten(0, 1)


class Features(NamedTuple):
    """Of photos that can be decoded, on the CPU"""

    x: torch.Tensor  # (N, D) float32
    y: torch.Tensor  # labels as in LabelData


def extract_features(backbone, data, args, device):
    """-> Features of LabelData, as the protocol has them; None on all processes but the first"""

    def features_of(images):
        features = pooled(backbone, images, args.amp, args.grid)
        return F.normalize(features) if args.l2_normalised else features

    squares = CentralSquares(data, args.image_size, args.side_fraction)
    x, readable = run_over_photos(features_of, squares, args, device)
    if x is None:
        return None
    if not x.sum().isfinite():
        fail("the features are not finite: try --amp off")
    return Features(x, torch.from_numpy(data.labels[readable]))


# ------------------------------------------------------------------------ protocols on features


def score_features(train, test, names, path, args, device):
    """The protocol -> {metric: percent}, {} on all processes but the first

    train, test: Features.  names: of the classes.  path: where a linear layer is kept
    """
    if not common.is_main():
        return {}
    torch.manual_seed(args.seed)
    if args.protocol == "svm-virtex":
        return svm_virtex(train, test, names)
    if args.protocol == "svm-icmlm":
        return svm_icmlm(train, test, names, args.seed, device)
    if args.protocol == "knn":
        return knn(train, test, len(names), device)
    fit = {"sgd-mct": sgd_mct, "logreg-icmlm": logreg_icmlm}[args.protocol]
    layer = fit(train, args, device)
    common.save_weights(path, layer)
    return score(predict(layer, test.x), test.y)


def score(decisions, labels):
    """decisions (N, classes) -> {"top-1": percent}; {"mAP": percent} with several labels"""
    if not decisions.isfinite().all():
        fail("the linear layer has diverged: try a lower --lr")
    if labels.ndim == 1:
        correct = decisions.argmax(1) == labels
        return {"top-1": 100 * correct.double().mean().item()}
    both = zip(decisions.T.numpy(), labels.T.numpy())
    areas = [average_precision(decision, truth) for decision, truth in both if 1 in truth]
    if not areas:
        fail("no class has a positive test photo")
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
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import LinearSVC

    # scikit-learn's tol, 1e-4, stops early: up to 0.04 points of a class are missing or too many
    svm = LinearSVC(dual=False, class_weight={True: 2}, max_iter=2000, tol=1e-6)
    costs = {"C": [0.01, 0.1, 1.0, 10.0]}
    jobs = -1 if len(train.x) > 5000 else 1  # processes take longer to start than small SVMs
    search = GridSearchCV(svm, costs, scoring="average_precision", cv=3, n_jobs=jobs)
    train_x, test_x = train.x.double().numpy(), test.x.double().numpy()
    train_y = label_columns(train.y.numpy(), len(names)) == 1
    test_y = label_columns(test.y.numpy(), len(names))
    scores = {}
    for k, name in enumerate(progress(names, desc="SVMs", leave=False)):
        positive, truth = train_y[:, k], test_y[:, k]
        rarer = min(positive.sum(), (~positive).sum())
        if rarer == 0 or not (truth == 1).any():
            continue
        classifier = search if rarer >= 3 else svm  # one for each fold; otherwise C is 1
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
        fail("no class has positive and negative training photos and a positive test photo")
    left_out = [name for name in names if name not in scores]
    if left_out:
        common.report_once(f"{len(left_out)} classes are left out, which lack training or test "
                           f"examples: {', '.join(left_out[:5])}")  # fmt: skip
    return {"mAP": statistics.mean(scores.values()), **scores}


def sgd_mct(train, args, device):
    """lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2] -> linear layer"""

    def lr_factor(fraction):
        return 0.2 ** sum(fraction >= epoch / 60 for epoch in (30, 40, 50))

    x, y = train.x.to(device), train.y.to(device)
    trials = [(args.lr[0], 0.0)]  # no weight decay
    [layer] = train_linear(x, y, np.arange(len(x)), trials, lr_factor, args)
    return layer


def logreg_icmlm(train, args, device):
    """The best of 25 pairs of lr and weight decay on held-out photos [ICMLM App. F.2]

    [ours: a fifth is held out, the trials are random where the paper uses Optuna] -> linear layer
    """
    rng = np.random.default_rng(args.seed)
    rates = 10 ** rng.uniform(-1, 2, 25)
    decays = rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    order = rng.permutation(len(train.x))
    held_out, rest = np.split(order, [len(order) // 5 or 1])

    x, y = train.x.to(device), train.y.to(device)
    cosine = partial(common.lr_factor, total=1)
    layers = train_linear(x, y, rest, trials, cosine, args)
    logits = [predict(layer, train.x[held_out]) for layer in layers]
    accuracies = [score(part, train.y[held_out])["top-1"] for part in logits]
    best = trials[np.argmax(accuracies)]
    print_main(f"chosen: learning rate {best[0]:.3g}, weight decay {best[1]:.2g}")
    [layer] = train_linear(x, y, np.arange(len(x)), [best], cosine, args)
    return layer


def train_linear(x, y, rows, trials, lr_factor, args, width=None, loss_fn=F.cross_entropy):
    """One linear layer for each (learning rate, weight decay) in `trials`, on the same batches

    x: features (N, D).  y: classes (N,).  rows: of those to train on; x may fill the memory, so it
    is not copied.  lr_factor(fraction of training): of the learning rates.  width: outputs of a
    layer, by default one per class.  loss_fn(outputs (B, width), classes (B,))
    """
    layers = LinearLayers(len(trials), x.shape[1], width or int(y.max()) + 1).to(x.device)
    groups = [
        {"params": layer.parameters(), "lr": lr, "weight_decay": weight_decay}
        for layer, (lr, weight_decay) in zip(layers, trials)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    rng = np.random.default_rng(args.seed)
    for epoch in progress(range(args.epochs), desc="linear layers", unit=" epochs", leave=False):
        order = torch.from_numpy(rng.permutation(rows)).to(x.device)
        batches = order.split(args.batch_size)
        for n, batch in enumerate(batches):
            done = (epoch + n / len(batches)) / args.epochs
            common.set_lr(optimizer, lr_factor(done))
            features, classes = x[batch], y[batch]
            losses = [loss_fn(layer(features), classes) for layer in layers]
            optimizer.zero_grad()
            sum(losses).backward()  # the layers share no parameters: each is trained on its own
            optimizer.step()
    return layers


class LinearLayers(nn.ModuleList):
    """Linear layers side by side; weights N(0, 0.01), bias 0 [VirTex App. A.1], elsewhere [ours]"""

    def __init__(self, count, width, num_classes):
        super().__init__()
        for _ in range(count):
            layer = nn.Linear(width, num_classes)
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
            self.append(layer)

    def forward(self, features):
        return [layer(feature) for layer, feature in zip(self, features)]


@torch.no_grad()
def predict(layer, x):
    """Features (N, D) -> logits (N, classes) on the CPU, in parts that fit on a GPU"""
    device = layer.weight.device
    logits = [layer(part.to(device)).cpu() for part in x.split(2**16)]
    return torch.cat(logits)


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


# ------------------------------------------------------------------- protocols with augmentation

RESUME_CAN_CHANGE = "weights", "root", "runs", "output", "workers"
LAYERS_DECAY = 1e-5  # weight decay; the learning rate falls as lr / sqrt(1 + lr * decay * t)


def train_with_augmentation(source, backbone, train, test, args, device):
    """sgd-virtex: one linear layer [VirTex App. A.1] -> {"top-1": percent}
    layers: one after each of CONVOLUTIONS [ICMLM Sec. 4] -> {"C-11 top-1": percent, ...}

    {} on all processes but the first. After each epoch the layers are saved in --output, from which
    the same command resumes.
    """
    if args.batch_size % common.world_size():
        fail(f"--batch-size {args.batch_size} cannot be divided by the number of processes")
    vgg_layers = args.protocol == "layers"
    heads = [""]
    width = backbone.channels
    weight_decay = 0.0
    if vgg_layers:
        heads = list(CONVOLUTIONS)
        width *= (args.image_size // 16 // 3) ** 2
        weight_decay = LAYERS_DECAY

    def features_of(images, jitter=None):  # -> [(B, width)], one for each head
        if vgg_layers:
            return convolution_features(backbone, images, args.amp, jitter)
        return [pooled(backbone, images, args.amp)]

    def logits_of(images):  # -> (B, heads * classes)
        return torch.cat(model(features_of(images)), 1)

    # The layers, resumed where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = LinearLayers(len(heads), width, len(train.names)).to(device)
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, args.lr)]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=weight_decay)
    path = layers_path(source, args)
    settings = {name: value for name, value in vars(args).items() if name not in RESUME_CAN_CHANGE}
    settings["photos"] = len(train), len(test)
    settings["weights_date"] = os.path.exists(source) and os.path.getmtime(source)
    start = 0
    if path.exists():
        saved = common.read_checkpoint(path)
        if saved["settings"] == settings:
            start = saved["iteration"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            print_main(f"{path}: resuming from iteration {start}")
    parallel = common.data_parallel(model)

    iters = math.ceil(args.epochs * len(train) / args.batch_size)
    epoch = math.ceil(len(train) / args.batch_size)
    args.accumulate = 1
    photos = LabelledPhotos(train, args)
    batches = common.train_batches(photos, collate, args, device, start)
    bar = progress(range(start + 1, iters + 1), initial=start, total=iters, desc=args.protocol)
    for iteration in bar:
        batch = next(batches)
        done = iteration - 1
        for group, lr in zip(optimizer.param_groups, args.lr):
            if vgg_layers:
                group["lr"] = lr / math.sqrt(1 + lr * LAYERS_DECAY * done)
            else:
                group["lr"] = lr * common.lr_factor(done, iters)
        outputs = parallel(features_of(batch["images"], batch["jitter"]))
        losses = [classification_loss(logits, batch["labels"]) for logits in outputs]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        if common.is_main() and (iteration % epoch == 0 or iteration == iters):
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            common.save(path, parts | {"settings": settings, "iteration": iteration})
        if iteration % (10 * epoch) == 0 and iteration < iters:
            scores = score_heads(heads, logits_of, test, args, device)
            print_main(f"epoch {iteration // epoch}: {format_scores(scores, train.names)}")
    return score_heads(heads, logits_of, test, args, device)


class LabelledPhotos(common.Photos):
    """Random crops with their labels"""

    def sample(self, index, rng):
        return {**self.photo(index, rng), "labels": self.data.labels[index]}


def collate(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), labels (B,) or (B, classes)"""
    return {
        "images": common.stack(samples, "image"),
        "jitter": common.stack(samples, "jitter"),
        "labels": common.stack(samples, "labels"),
    }


def classification_loss(logits, labels):
    """Softmax cross-entropy; with several labels per photo, binary cross-entropy per class

    The latter is summed over classes, without "difficult" labels [ours].  logits: (B, classes).
    labels: as in LabelData -> scalar
    """
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels)
    targets = (labels == 1).float()
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (losses * (labels >= 0)).sum(1).mean()


@torch.no_grad()
def score_heads(heads, logits_of, test, args, device):
    """logits_of(images) -> (B, heads * classes) -> {"C-11 top-1": percent, ...}"""
    squares = CentralSquares(test, args.image_size)
    logits, readable = run_over_photos(logits_of, squares, args, device)
    scores = {}
    if common.is_main():
        labels = torch.from_numpy(test.labels[readable])
        for head, part in zip(heads, logits.chunk(len(heads), 1)):
            for metric, percent in score(part, labels).items():
                scores[f"{head} {metric}".strip()] = percent
    return scores


if __name__ == "__main__":
    main(get_args())
