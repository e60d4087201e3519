"""Linear classifiers on frozen features: what a backbone is worth, by the protocols of the papers.

    python eval_linear.py                       what virtex.py has learned, and a random backbone
    python eval_linear.py --weights runs/virtex/backbone.pth runs/tp/backbone.pth random imagenet \\
        --data voc07 --root VOCdevkit
    torchrun --nproc_per_node=8 eval_linear.py --weights runs/virtex-coco/backbone.pth \\
        --data folder --root imagenet --protocol sgd-virtex
    python eval_linear.py --embed photos --weights runs/virtex-photos/backbone.pth

--weights are measured one after the other, on the same photos: backbone.pth, checkpoint.pth or
model_N.pth of ours, an official VirTex checkpoint, files of MoCo, SwAV, VICReg, DINO, Lightly,
torchvision, timm or transformers (also .safetensors); "imagenet" (torchvision's, downloaded),
"random", or clip:NAME, to compare with. The result is one table, the best first, below it how far
each is from random and imagenet; in --output result.json: {"args", "image_size", "backbones":
{WEIGHTS: {"mean", "std", "runs"; of several also "interval", "differences"}}, "not_measured"},
scores in percent.

    protocol       classifier on the frozen backbone, which is always in eval mode       score
    svm-virtex     one SVM per class on pooled features, cost by cross-validation        mAP
    svm-icmlm      one SVM per class on features pooled 2x2, 40 costs                    mAP
    sgd-mct        linear layer on pooled features                                       top-1
    logreg-icmlm   the same; learning rate and weight decay chosen from 25 trials        top-1
    knn            votes of the 20 nearest training photos: nothing is trained           either
    sgd-virtex     linear layer, trained with augmentation                               top-1
    layers         linear layers on VGG-16's last 3 convolutions, with augmentation      either

Photos have several labels, or one (--data folder), which top-1 needs. Linear layers are kept in
--output, from which sgd-virtex and layers resume.
Early stopping: train with --keep-every, give --weights runs/NAME/model_*.pth, and take the best on
VOC07 with --train-split train --val-split val [VirTex Sec. 3], or with --hold-out 0.2 [ours].
--embed FOLDER measures nothing, and needs no labels: of all photos in this folder and those within
it, features.npy has the average of the backbone's last feature maps (N, D), files.json the paths.
"""

import argparse
import copy
import hashlib
import itertools
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import common
from common import fail, number, print_main, progress

REFERENCES = "random", "imagenet"  # what backbones are compared with, and what they began from
SPLITS = {"coco": ("train2017", "val2017"), "voc07": ("trainval", "test")}


def get_args(argv=None):
    parser = common.Parser(__doc__)
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
    add("--embed", metavar="FOLDER", help="only write the features of these photos (see above)")
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
    add("--both-ways", action="store_true",
        help="also learn from the test split and test on the training split: scores are of both")
    add("--workers", type=number("int >= 0"), default=common.default_workers(measuring=True),
        help="processes that load photos; with 0 the main process loads them")
    add = parser.add_argument_group("linear layers (the defaults are the protocol's)").add_argument
    add("--epochs", type=number("int > 0"), help="passes over the training photos")
    add("--batch-size", type=number("int > 0"), help="photos per iteration over all processes")
    add("--lr", type=number("> 0"), nargs="+", help="peak learning rate; layers takes three")
    add("--steps", type=number(">= 0, < 1"), nargs="+", metavar="FRACTION", help="fractions of "
        "training after which sgd-virtex divides the rate by 10 (default: cosine decay)")
    add = parser.add_argument_group("run").add_argument
    add("--output", help="folder for result.json and the linear layers (default: "
        "runs/eval_linear/DATA-PROTOCOL, or DATA-PROTOCOL-K-shots; for --embed: runs/embed)")
    add("--amp", choices=("bf16", "fp16", "off"), default="off",
        help="precision of the backbone; leave it off for numbers to report")
    args = parser.parse_args(argv)
    args.weights = list(dict.fromkeys(args.weights))
    if args.embed and len(args.weights) > 1:
        parser.error("--embed writes the features of one backbone: name it by --weights")
    choose_defaults(args, parser)
    return args


def choose_defaults(args, parser):
    """Refuse flags that --protocol does not take, and give those that were left out its values."""
    protocol = PROTOCOLS[args.protocol]
    name = f"--protocol {args.protocol}"
    if protocol.metric == "top-1" and args.data != "folder":
        parser.error(f"{name} needs one label per photo: --data folder")
    defaults = dict(protocol.flags)
    if args.protocol == "layers" and args.data != "folder":
        # As DeeperCluster's code for VOC; the first two rates [ours]
        defaults |= {"epochs": 60, "batch_size": 128, "lr": [0.01, 0.01, 0.02]}
    if args.both_ways and (args.hold_out or "epochs" in defaults):
        parser.error("--both-ways is for svm-virtex, svm-icmlm and knn, without --hold-out")
    for flag in ("epochs", "batch_size", "lr", "steps"):
        if getattr(args, flag) and flag not in defaults:
            parser.error(f"{name} takes no --{flag.replace('_', '-')}")
    if args.lr and len(args.lr) != len(defaults["lr"]):
        parser.error(f"{name} takes {len(defaults['lr'])} values of --lr")
    if args.batch_size and "lr" in defaults:  # rates are scaled to the batch [ours]
        scale = args.batch_size / defaults["batch_size"]
        defaults["lr"] = [scale * lr for lr in defaults["lr"]]

    defaults["train_split"], defaults["val_split"] = SPLITS.get(args.data, ("train", "val"))
    all_photos = args.data != "shapes" or args.shots
    defaults["train_images"] = None if all_photos else 2000
    data = Path(args.root or "folder").resolve() if args.data == "folder" else Path(args.data)
    shots = f"-{args.shots}-shots" if args.shots else ""
    name_of_data = data.name.removesuffix(".jsonl")
    defaults["output"] = f"runs/eval_linear/{name_of_data}-{args.protocol}{shots}"
    if args.embed:
        defaults["output"] = "runs/embed"
    for flag, value in defaults.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if args.protocol == "layers" and args.arch != "vgg16_bn":
        parser.error(f"{name} is for VGG-16: --arch vgg16_bn")


def main(args):
    protocol = PROTOCOLS[args.protocol]
    if args.embed or protocol.trained_on == "features":
        run_alone()
    device = common.init_distributed()
    # Full float32 on GPUs, too: TF32, which training uses, would round each product to 10 bits.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    archs, sizes, causes = open_weights(args)
    if len(archs) > 1 or args.protocol != "knn":
        common.extra("bootstrap")  # A copy lacks this and the classifiers: it says so at once
    if args.embed:
        embed(args, archs, sizes, device)
        return

    data = label_data(args.data, args.root, args.train_split)
    val = data if args.hold_out else label_data(args.data, args.root, args.val_split)
    check_same_classes(data, val)
    train_rows, test_rows = draw_photos(data, val, args)
    report_shared(data.select(train_rows), val.select(test_rows))
    common.make_folder(args.output)

    ways = [(data, val), (val, data)] if args.both_ways else [(data, val)]
    seeds = range(args.seed, args.seed + args.runs)
    groups = []  # Each run has other random weights. Runs of any other backbone share its features
    for source in archs:
        groups += [(source, [x]) for x in seeds] if source == "random" else [(source, seeds)]
    results = {source: defaultdict(list) for source in archs}  # of each seed
    draws = {source: [] for source in archs}  # the same photos for all, others for each way
    for (source, group), way in itertools.product(groups, range(len(ways))):
        train, test = ways[way]
        photos = len(test)
        backbone = load_backbone(source, archs[source], group[0]).eval().requires_grad_(False)
        backbone.to(device, memory_format=torch.channels_last)
        runs = []
        for seed in group:
            flags = copy.copy(args)
            flags.seed, flags.image_size = seed, sizes[source]
            rows = draw_photos(train, test, flags)
            runs.append(Run(flags, protocol, source, backbone, data.names, device, *rows))
        if protocol.trained_on == "features":  # extracted once, in place of the photos
            train = extract_features(runs[0], train, [run.train_rows for run in runs])
            test = extract_features(runs[0], test, [run.test_rows for run in runs])
        for run in runs:
            torch.manual_seed(run.args.seed)
            learned, tested = train.select(run.train_rows), test.select(run.test_rows)
            decisions = protocol.decide(learned, tested, run)
            if not common.is_main():
                continue
            scores = measure(decisions, run)
            results[source][run.args.seed].append(scores)
            if len(archs) > 1:
                draws[source].append(common.extra("bootstrap").scores_of_draws(
                    by_metric(decisions, run), decisions.y, decisions.rows, photos,
                    protocol.interpolated, seed=way))
            counts = f"{len(learned)} training and {len(decisions)} test photos"
            print_main(f"{source}, seed {run.args.seed}, {counts} of {sizes[source]} px: "
                       f"{format_scores(scores, data.names)}")
        del learned, tested  # else the next backbone's features would be in memory beside them
    num_tested = len(data) + len(val) if args.both_ways else len(test_rows)
    if num_tested < 300:
        print_main(f"the scores are rough: there are only {num_tested} test photos")
    if common.is_main():
        report(results, draws, sizes, causes, data.names, args)
    common.end_distributed()
    if causes:
        fail(f"not measured: {', '.join(causes)}; see the causes below the table")


@dataclass
class Run:
    """One classifier on a backbone: what its protocol is told beside the photos"""

    args: argparse.Namespace  # with the seed and the image size of this run
    protocol: "Protocol"
    source: str  # one of --weights
    backbone: nn.Module  # frozen, in eval mode, on the device
    names: list  # of the classes
    device: torch.device
    train_rows: np.ndarray  # the photos, as draw_photos gives them
    test_rows: np.ndarray


def run_alone():
    """Features are extracted and scored by one process: the others of torchrun end here."""
    os.environ.pop("WORLD_SIZE", None)  # so that it waits for nobody
    if os.environ.get("RANK", "0") != "0":
        print("The first process measures; this one ends. Without torchrun: unset RANK WORLD_SIZE")
        sys.exit()


def format_scores(scores, classes=()):
    """All but those of single classes"""
    return ", ".join(f"{name} {scores[name]:.2f}" for name in scores if name not in classes)


def report(results, draws, sizes, causes, classes, args):
    """Print a line for each backbone, the best first, and how they differ; write result.json

    results: {source: {seed: [scores, of both ways]}}.  draws: {source: [scores_of_draws of a run]}.
    sizes and causes: see open_weights.  classes: their scores are not printed
    """
    rows = []
    for source, seeds in results.items():
        means = [over_runs(ways)["mean"] for ways in seeds.values()]  # the deviation is over these
        runs = [scores for ways in seeds.values() for scores in ways]
        rows.append((source, over_runs(means) | {"runs": runs}))
    *metrics, guess = [name for name in rows[0][1]["mean"] if name not in classes]
    rows.sort(key=lambda row: -max(row[1]["mean"][metric] for metric in metrics))
    verdict = []
    if len(rows) > 1:
        starts = {os.path.abspath(common.flags_of(source).get("init") or "") for source in results}
        references = [source for source in results if source in REFERENCES]
        references += [source for source in results if os.path.abspath(source) in starts]
        references = references or [rows[0][0]]  # else the best
        verdict = common.extra("bootstrap").compare(dict(rows), draws, references)
    path = f"{args.output}/result.json"
    content = {"args": vars(args), "image_size": sizes, "backbones": dict(rows)}
    common.save(path, content | {"not_measured": causes} | common.circumstances())

    width = max(map(len, args.weights))
    print(" " * width, *(f"{column:>15}" for column in (*metrics, guess)))
    for source, scores in rows:
        cells = []
        for column in (*metrics, guess):
            deviation = f" ± {scores['std'][column]:.2f}" if args.runs > 1 else ""
            cells.append(f"{scores['mean'][column]:.2f}{deviation}")
        print(f"{source:{width}}", *(f"{cell:>15}" for cell in cells))
    for source, cause in causes.items():
        print(f"{source:{width}} not measured: {cause}")
    print(f"all scores, by class and run, are in {path}", *verdict, sep="\n")


def over_runs(runs):
    """[{name: percent} of each run] -> {"mean", "std" (of the sample; 0 for one run), "runs"}"""
    mean, std = {}, {}
    for name in dict.fromkeys(name for scores in runs for name in scores):
        values = [scores[name] for scores in runs if name in scores]
        mean[name] = statistics.mean(values)
        std[name] = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": mean, "std": std, "runs": runs}


# ------------------------------------------------------------------------------------- backbones


def trained_with(source, flag):
    """The value of a flag when a file was trained; None if nothing says it"""
    flags = common.flags_of(source)
    whole_photos = flag == "image_size" and flags.get("script") == "detection"
    return None if whole_photos else flags.get(flag)


def open_weights(args):
    """Open all of --weights before the first hour of measuring -> {source: architecture}, {source:
    side of its photos in pixels}, {source: why it cannot be opened}

    What nothing says of one of them is that of the first file that says it.
    """
    archs, sizes, causes = {}, {}, {}
    for source in sorted(args.weights, key=lambda source: source in REFERENCES):  # files first
        arch = args.arch
        if source in REFERENCES and not arch:
            arch = next((x for x in archs.values() if x in common.BACKBONES), "resnet50")
        try:
            backbone = load_backbone(source, arch, 0).eval()
            if not pooled(backbone, torch.zeros(1, 64, 64, 3)).isfinite().all():
                fail(f"the features of {source} are not finite: its weights are broken")
            archs[source] = backbone.arch
            sizes[source] = trained_with(source, "image_size")
        except (SystemExit, OSError) as error:  # from `fail`; from the hub, in several lines
            causes[source] = str(error).removeprefix("error: ").splitlines()[0]
    own = [source for source in args.weights if source not in REFERENCES] or args.weights
    if causes.keys() >= set(own):  # random weights alone say nothing
        fail(causes[own[0]])
    for source, cause in causes.items():
        print_main(f"{source} will not be measured: {cause}")
    on_scenes = args.data == "shapes" and not args.embed
    first_size = next(filter(None, sizes.values()), 48 if on_scenes else 224)
    for source in sizes:
        sizes[source] = args.image_size or sizes[source] or first_size
    return archs, sizes, causes


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
        if common.shapes(content) == common.shapes(backbone.state_dict()):
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
    open: callable = common.CaptionData.open  # images[i] -> PIL image, not yet decoded

    def __len__(self):
        return len(self.images)

    def select(self, keep):
        return LabelData(self.images[keep], self.labels[keep], self.names, self.open)


def label_data(name, root, split):
    """One split of "folder", "voc07", or of captioned photos with tags -> LabelData"""
    if name == "folder":
        return LabelData(*common.extra("folders").labelled(root or "datasets/folder", split))
    if name == "voc07":
        return LabelData(*common.extra("sources").voc07(root or "datasets/voc07", split))
    [captioned] = common.caption_data(name, root, [split], tags=True)
    if not captioned.tag_names:
        fail(f"--data {name} has no tags to score. With a folder for each class: --data folder")
    keep = np.flatnonzero(captioned.tagged)
    if not len(keep):
        fail(f"no photo of the split {split} has tags")
    if len(keep) < len(captioned):
        print_main(f"{len(captioned) - len(keep)} of {len(captioned)} photos are left out, which "
                   'have no "tags"; "tags": [] says that none fits')
        captioned = captioned.select(keep)
    column = {name: k for k, name in enumerate(captioned.tag_names)}
    labels = np.zeros((len(captioned), len(column)), np.int8)
    for row, tags in enumerate(captioned.tags):
        labels[row, [column[tag] for tag in tags]] = 1
    return LabelData(captioned.images, labels, captioned.tag_names, captioned.open)


def check_same_classes(train, test):
    """Fail if two splits differ in their classes, of which it says the first names."""
    if train.names != test.names:
        fail(f"the splits differ in their classes: {sorted({*train.names} ^ {*test.names})[:5]}")
    more = ", ..." if len(train.names) > 5 else ""
    print_main(f"{len(train.names)} classes: {', '.join(map(str, list(train.names)[:5]))}{more}")


def report_shared(train, test):
    """Say how many test photos are training photos, too, by the bytes of their files."""

    def files(images):
        return [x for x in images if isinstance(x, str) and os.path.isfile(x)]

    def content(path):
        return hashlib.sha256(Path(path).read_bytes()).digest()

    tested = files(test.images[:: 1 + len(test) // 10_000])  # at most 10,000
    sizes = {os.path.getsize(path) for path in tested}
    similar = {content(x) for x in files(train.images) if os.path.getsize(x) in sizes}
    shared = [path for path in tested if content(path) in similar]
    if shared:
        print_main(f"{len(shared)} of {len(tested)} test photos are training photos, too, "
                   f"which raises the scores: for example {shared[0]}")


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
        fewer = sum(len(rows) < args.shots for rows in chosen)
        if fewer and common.is_main():
            common.report_once(f"{fewer} of {len(chosen)} classes have fewer training photos than "
                               f"--shots {args.shots}: they use all they have")
        rest = rest[np.unique(np.concatenate(chosen))]
    train = np.sort(rest[: args.train_images])
    if not len(train) or not len(test):
        fail(f"{len(train)} training and {len(test)} test photos are left by --shots, "
             "--train-images and --hold-out")
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
    if not outputs[:filled].sum().isfinite():
        fail("the outputs are not finite: the weights are broken, or try --amp off")
    return outputs[:filled], np.flatnonzero(readable)


@dataclass
class Outputs:
    """Of photos that can be decoded, on the CPU: features, or the decisions of a classifier"""

    x: torch.Tensor  # (N, D); decisions have a column for each class, NaN if nothing was learned
    y: torch.Tensor  # labels as in LabelData
    rows: np.ndarray = None  # (N,) the photos' indices in their LabelData

    def __len__(self):
        return len(self.x)

    def select(self, rows):
        """Those of `rows`, not copied if they are all, which may fill the memory"""
        keep = np.isin(self.rows, rows)
        return self if keep.all() else Outputs(self.x[keep], self.y[keep], self.rows[keep])


def outputs_of(function, data, rows, run):
    """function(uint8 (B, size, size, 3)) -> (B, D), on the photos with these indices -> Outputs"""
    squares = CentralSquares(data.select(rows), run.args.image_size, run.protocol.side_fraction)
    x, readable = run_over_photos(function, squares, run.args, run.device)
    return Outputs(x, torch.from_numpy(data.labels[rows[readable]]), rows[readable])


def extract_features(run, data, draws):
    """-> Outputs: features as the protocol has them.  draws: the indices of each run's photos"""

    def features_of(images):
        features = pooled(run.backbone, images, run.args.amp, run.protocol.grid)
        return F.normalize(features) if run.protocol.unit_length else features

    return outputs_of(features_of, data, np.unique(np.concatenate(draws)), run)


def embed(args, archs, sizes, device):
    """Write the features of all photos below a folder, and the list of their paths."""
    [source] = args.weights
    paths = common.extra("folders").list_photos(args.embed)
    if not paths:
        fail(f"there is no photo in the folder {args.embed} or its subfolders")
    common.make_folder(args.output)
    backbone = load_backbone(source, archs[source], args.seed).eval()
    backbone.to(device, memory_format=torch.channels_last)
    photos = LabelData(np.array(paths, common.STRINGS), np.zeros(len(paths)), [])
    features_of = partial(pooled, backbone, amp=args.amp)
    squares = CentralSquares(photos, sizes[source])
    features, readable = run_over_photos(features_of, squares, args, device)
    with common.writing(f"{args.output}/features.npy") as file:
        np.save(file, features)
    common.save(f"{args.output}/files.json", photos.images[readable].tolist())
    print_main(f"{len(features)} photos of {sizes[source]} px, {features.shape[1]} features each: "
               f"{args.output}/features.npy")


# ---------------------------------------------------------------------------------------- scores


def measure(decisions, run):
    """Outputs of a run -> see `score`; of several layers {"C-11 mAP": percent, ...}, no classes"""
    scores = {}
    for metric, x in by_metric(decisions, run).items():
        of_layer = score(x, decisions.y, run.names, run.protocol.interpolated)
        first, *_, guess = of_layer
        scores[metric] = of_layer[first]
    return of_layer if len(scores) == 1 else scores | {guess: of_layer[guess]}


def by_metric(decisions, run):
    """Outputs of a run -> {"mAP", "C-11 top-1" or similar: (N, classes)}"""
    metric = "top-1" if decisions.y.ndim == 1 else "mAP"
    names = [f"{layer} {metric}".strip() for layer in run.protocol.layers]
    return dict(zip(names, decisions.x.chunk(len(names), 1)))


def score(decisions, labels, names, interpolated=False):
    """-> {"top-1": percent, "commonest class": percent}; with several labels {"mAP": percent,
    class: average precision, ..., "chance": percent}. The last is what guesses would score.

    decisions: (N, classes); those of a class may be NaN: it has no score. Neither has one that all
    or none of the photos have.  labels: (N,) or (N, classes), as in LabelData
    """
    if labels.ndim == 1:
        commonest = 100 * labels.bincount().max().item() / len(labels)
        top_1 = 100 * (decisions.argmax(1) == labels).double().mean().item()
        return {"top-1": top_1, "commonest class": commonest}
    areas, left_out = {}, []
    for name, decision, truth in zip(names, decisions.T.numpy(), labels.T.numpy()):
        if (truth == 1).any() and (truth == 0).any() and not np.isnan(decision).any():
            counted = truth >= 0  # the others are "difficult"
            areas[name] = average_precision(decision[counted], truth[counted], interpolated)
        else:
            left_out.append(str(name))
    if not areas:
        fail("no class has positive and negative photos, both in training and in testing: do the "
             "splits spell their tags alike?")
    if left_out:
        common.report_once(f"{len(left_out)} classes are left out, which lack training or test "
                           f"examples: {', '.join(left_out[:5])}")
    # The average precision of a random order is about the fraction of positives.
    scored = labels[:, [name in areas for name in names]]
    chance = (scored == 1).sum(0).double() / (scored >= 0).sum(0)
    mean = statistics.mean(areas.values())
    return {"mAP": mean, **areas, "chance": 100 * chance.mean().item()}


def average_precision(decision, truth, interpolated=False):
    """(N,) both -> percent: the area under the whole curve, not VOC07's mean over eleven recalls

    interpolated: takes the best precision at this or a higher recall [Goyal et al. 2019].
    """
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(truth, decision)  # recall falls
    if interpolated:
        precision = np.maximum.accumulate(precision)
    return 100 * float(-np.sum(np.diff(recall) * precision[:-1]))


# --------------- protocols on features: (train: Outputs, test: Outputs, run: Run) -> test's Outputs


def svm_virtex(train, test, run):
    """One SVM per class [VirTex App. A.1]

    Squared hinge loss, positives weighted 2, C by 3-fold cross-validation; "difficult" photos are
    negatives in training, and left out in testing [official code].
    """
    return svms(train, test, run, [0.01, 0.1, 1.0, 10.0])


def svm_icmlm(train, test, run):
    """The same with 40 log-uniform costs [ICMLM App. F.2], all of which are tried [ours: the paper
    uses Optuna]; interpolated precision, as in the code of Goyal et al.
    """
    costs = 10 ** np.random.default_rng(run.args.seed).uniform(-5, 5, 40)
    return svms(train, test, run, sorted(costs))


def svms(train, test, run, costs):
    """Classes that lack positives or negatives, in training or in testing, get no SVM."""
    positive = label_columns(train.y.numpy(), len(run.names)) == 1
    truth = label_columns(test.y.numpy(), len(run.names))
    learnable = positive.any(0) & ~positive.all(0) & (truth == 1).any(0) & (truth == 0).any(0)
    decisions = np.full(truth.shape, np.nan)
    if learnable.any():
        decisions[:, learnable] = common.extra("svm").svm_decisions(
            train.x.numpy(), positive[:, learnable], test.x.numpy(), costs, run.device)
    return Outputs(torch.from_numpy(decisions), torch.from_numpy(truth), test.rows)


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
    return replace(test, x=torch.cat(votes))


def sgd_mct(train, test, run):
    """A linear layer; lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2]"""

    def lr_factor(fraction):
        return 0.2 ** sum(fraction >= epoch / 60 for epoch in (30, 40, 50))

    return linear_layer(run.args.lr[0], 0.0, train, test, lr_factor, run)  # no weight decay


def logreg_icmlm(train, test, run):
    """A linear layer; 25 pairs of lr and weight decay are tried on held-out photos [ICMLM App. F.2]

    [ours: a fifth is held out, and the pairs are random where the paper uses Optuna]
    """
    rng = np.random.default_rng(run.args.seed)
    rates = 10 ** rng.uniform(-1, 2, 25)
    decays = rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    held_out, rest = np.split(rng.permutation(len(train.x)), [len(train.x) // 5 or 1])

    layers = common.extra("layers")
    x, y = train.x.to(run.device), train.y.to(run.device)
    cosine = partial(common.lr_factor, total=1)
    accuracies = []
    for layer in layers.train_linear(x, y, rest, trials, cosine, run.args):
        found = layers.predict(layer, train.x[held_out]).argmax(1)
        accuracies.append((found == train.y[held_out]).double().mean().item())
    lr, decay = trials[np.argmax(accuracies)]
    print_main(f"chosen: learning rate {lr:.3g}, weight decay {decay:.2g}")
    return linear_layer(lr, decay, train, test, cosine, run)


def linear_layer(lr, decay, train, test, lr_factor, run):
    """Train a layer on all features, and keep it in --output -> test's Outputs"""
    layers = common.extra("layers")
    x, y = train.x.to(run.device), train.y.to(run.device)
    [layer] = layers.train_linear(x, y, np.arange(len(x)), [(lr, decay)], lr_factor, run.args)
    common.save_weights(layers.path_of(run), layer)
    return replace(test, x=layers.predict(layer, test.x))


# ------------- protocols on crops: (train: LabelData, test: LabelData, run: Run) -> test's Outputs


def sgd_virtex(train, test, run):
    """A linear layer on pooled features; cosine decay, or --steps [VirTex Sec. 4.1, App. A.1]"""

    def features_of(images, jitter=None):
        return [pooled(run.backbone, images, run.args.amp)]

    def learning_rate(peak, iteration, iters):
        return peak * common.lr_factor(iteration, iters, steps=run.args.steps)

    layers = common.extra("layers")
    probe = layers.Probe(features_of, [run.backbone.channels], len(run.names))
    return train_probe(probe, train, test, run, learning_rate)


def vgg_layers(train, test, run):
    """A linear layer after each of VGG-16's last three convolutions [ICMLM Sec. 4]"""
    layers = common.extra("layers")
    probe = layers.vgg_probe(run)
    return train_probe(probe, train, test, run, layers.learning_rate, layers.DECAY)


def train_probe(probe, train, test, run, learning_rate, decay=0.0):
    """See extras.layers.train -> Outputs, (N, layers * classes); only of the first process"""

    def decisions():
        logits_of = lambda images: torch.cat(probe(images), 1)
        with torch.no_grad():
            return outputs_of(logits_of, test, np.arange(len(test)), run)

    scores = lambda: format_scores(measure(decisions(), run), run.names)
    common.extra("layers").train(probe, train, run, scores, learning_rate, decay)
    if common.is_main():
        found = decisions()
        return replace(found, rows=run.test_rows[found.rows])  # as for features: of all photos


# ------------------------------------------------------------------ all protocols, with settings


@dataclass
class Protocol:
    """A function and the settings of its paper"""

    decide: callable  # (train, test, run) -> Outputs: decisions on the test photos; see train_probe
    trained_on: str  # "features" of central squares, extracted once, or random "crops"
    metric: str  # "mAP", "top-1", for which photos have one label, or "either", as their labels are
    flags: dict  # defaults of the flags that it takes; lr: a peak for each linear layer
    interpolated: bool = False  # see average_precision
    layers: tuple = ("",)  # names of its linear layers, "" if there is one
    side_fraction: float = 224 / 256  # of the central square's side and the photo's shorter side
    grid: int = 1  # features are average-pooled to grid x grid
    unit_length: bool = False  # features are l2-normalised
    colour_jitter: float = 0.0


PROTOCOLS = {
    # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d; l2-normalised [official code]
    "svm-virtex": Protocol(svm_virtex, "features", "mAP", {}, unit_length=True),
    # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "svm-icmlm": Protocol(svm_icmlm, "features", "mAP", {},
        interpolated=True, side_fraction=1.0, grid=2, unit_length=True),
    # As DINO reports it
    "knn": Protocol(knn, "features", "either", {}, unit_length=True),
    # [contrastive paper Sec. 4.2] 2048-d; 3 steps, no weight decay; the crop [ours]
    "sgd-mct": Protocol(sgd_mct, "features", "top-1",
        {"epochs": 60, "batch_size": 256, "lr": [30.0]}),
    # [ICMLM App. F.2] 2048-d; cosine, lr is searched; epochs and l2 [ours]
    "logreg-icmlm": Protocol(logreg_icmlm, "features", "top-1",
        {"epochs": 100, "batch_size": 1024}, side_fraction=1.0, unit_length=True),
    # [VirTex Sec. 4.1, App. A.1] cosine (no steps), no weight decay
    "sgd-virtex": Protocol(sgd_virtex, "crops", "top-1",
        {"epochs": 100, "batch_size": 256, "lr": [0.3], "steps": ()}),
    # [ICMLM Sec. 4] DeeperCluster's, for ImageNet; for Places --lr 0.01 0.01 0.02; jitter [ours]
    "layers": Protocol(vgg_layers, "crops", "either",
        {"arch": "vgg16_bn", "epochs": 100, "batch_size": 256, "lr": [0.02] * 3},
        layers=("C-11", "C-12", "C-13"), colour_jitter=1.0),
}


if __name__ == "__main__":
    main(get_args())
