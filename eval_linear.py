"""Linear classifiers on frozen features: how good a backbone is, by the protocols of the papers.

    python eval_linear.py --weights runs/virtex/backbone.pth --data folder --root photos
    python eval_linear.py --weights runs/virtex/backbone.pth --data voc07 --root VOCdevkit
    python eval_linear.py --weights random --arch resnet50 --data voc07 --root VOCdevkit --runs 5
    torchrun --nproc_per_node=8 eval_linear.py --weights runs/virtex/backbone.pth \\
        --data folder --root imagenet --protocol sgd-virtex

--weights accepts our backbone.pth, checkpoint.pth or model_N.pth, an official VirTex checkpoint,
files of MoCo, SwAV, VICReg, DINO or torchvision, "imagenet" (torchvision's, downloaded), "random",
or clip:NAME for comparison. Early stopping [VirTex Sec. 3]: --keep-every, the best model_N.pth by

    python eval_linear.py --weights runs/virtex/model_1000.pth --data photos.jsonl --hold-out 0.2

    protocol       classifier on the frozen backbone, which is always in eval mode       score
    svm-virtex     one SVM per class on pooled features, cost by cross-validation        mAP
    svm-icmlm      one SVM per class on features pooled 2x2, 40 costs                    mAP
    sgd-virtex     linear layer, trained with augmentation                               top-1
    sgd-mct        linear layer on features extracted once                               top-1
    logreg-icmlm   the same; learning rate and weight decay chosen from 25 trials        top-1
    knn            votes of the 20 nearest training images: nothing is trained           either
    layers         linear layers on VGG-16's last 3 convolutions, with augmentation      either

The table PROTOCOLS has their settings. Images have several labels, or one (folder), which top-1
needs. sgd-virtex and layers resume from --output. Trainings end with svm-virtex: see Probe.
"""

import math
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

import common
from common import STRINGS, image_files, print_main, progress, require
from svm import average_precisions, l2_normalize, mean_of, scorable, svm_probe

sources = common.import_if_there("sources")
DATA = "shapes (built in), coco, voc07, folder, or a .jsonl file with tags"
LABEL_SPLITS = {"coco": ("train2017", "val2017"), "voc07": ("trainval", "test")}

# ----------------------------------------------------------------------------------------- flags


def backbone_flags(parser, choices=None, data_help=common.DATA):
    """Flags of all scripts that start from a backbone.  choices: for --data, the default first"""
    add = parser.add_argument
    add("--weights", default="runs/virtex/backbone.pth", help="a file, imagenet or random")
    add("--arch", choices=common.BACKBONES, help="needed for imagenet and random")
    default, *_ = choices or ["shapes"]
    built_in = "shapes is built in"
    add("--data", choices=choices, default=default, help=built_in if choices else data_help)
    add("--root", help="folder of the data (default datasets/<name>; for a .jsonl, its folder)")
    add("--train-split", help="usually trainval for voc07, train2017 for coco, else train")
    add("--val-split", help="usually test for voc07, val2017 for coco, else val")
    add("--workers", type=int, default=min(8, os.cpu_count()), help="DataLoader workers")


def flag_parser(script, description, choices=None, data_help=common.DATA):
    """A parser with the flags common to all scripts that measure a frozen backbone"""
    parser = common.build_parser(description)
    backbone_flags(parser, choices, data_help)
    add = parser.add_argument
    add("--image-size", type=common.positive_int, help="default 48 for shapes, else 224 [VirTex]")
    add("--runs", type=common.positive_int, default=1, help="number of seeds; reports mean and std")
    add("--seed", type=int, default=0, help="seed of the first run")
    add("--output", default=f"runs/{script}", help="directory for result.json and other files")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="off for numbers to report")
    parser.set_defaults(batch_size=None, accumulate=1)
    return parser


def parse(parser, argv):
    """Parse the command line; flags of flag_parser that are left out depend on the data set."""
    args = common.parse(parser, argv)
    if args.weights in ("random", "imagenet") and not args.arch:
        parser.error(f"--weights {args.weights} needs --arch")
    if args.weights.startswith("clip:") and getattr(args, "protocol", "layers") == "layers":
        parser.error("clip:NAME is for eval_linear.py, and not for its --protocol layers")
    train_split, val_split = LABEL_SPLITS.get(args.data, ("train", "val"))
    args.train_split = args.train_split or train_split
    args.val_split = args.val_split or val_split
    args.image_size = args.image_size or (48 if args.data == "shapes" else 224)
    return args


def get_args(argv=None):
    parser = flag_parser("eval_linear", __doc__, data_help=DATA)
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="svm-virtex", help="see above")
    images = "at most this many, drawn with the run's seed; default 2000 for shapes, else all"
    add("--train-images", type=common.positive_int, help=images)
    shots = "this many training images for each class (their other labels count, too)"
    add("--shots", type=common.positive_int, help=shots)
    held_out = "hold out this fraction of the training split and score it instead of --val-split"
    add("--hold-out", type=common.fraction, default=0.0, metavar="FRACTION", help=held_out)
    add = parser.add_argument_group("linear layers (defaults depend on --protocol)").add_argument
    add("--epochs", type=common.positive_int, help="passes over the training images")
    add("--batch-size", type=common.positive_int, help="images per iteration over all processes")
    add("--lr", type=common.positive, nargs="+", help="peak; three peaks for layers")

    # The defaults are the protocol's.
    chosen = common.peek(argv, "--protocol", "--data")
    protocol = PROTOCOLS.get(chosen.protocol, PROTOCOLS["svm-virtex"])
    single_label = chosen.data == "folder"
    layers = chosen.protocol == "layers"
    if layers and not single_label:
        protocol = protocol._replace(epochs=60, batch_size=128, lr=[0.01, 0.01, 0.02])
    parser.set_defaults(epochs=protocol.epochs, batch_size=protocol.batch_size)
    parser.set_defaults(arch="vgg16_bn" if layers else None)
    args = parse(parser, argv)
    if args.data == "shapes":
        args.train_images = args.train_images or 2000

    drawn = args.weights == "random" or args.train_images or args.hold_out or args.shots
    num_rates = len(protocol.lr or ())
    contradictions = {
        "needs one label per image: --data folder": protocol.single_label and not single_label,
        "is for VGG-16: --arch vgg16_bn": layers and args.arch != "vgg16_bn",
        f"takes {num_rates} values of --lr": args.lr and len(args.lr) != num_rates,
        "takes no --epochs": args.epochs and not protocol.epochs,
        "gives all --runs the same score: draw images by --shots, --train-images or --hold-out": (
            args.protocol in ("svm-virtex", "knn") and args.runs > 1 and not drawn
        ),
    }
    for message, is_true in contradictions.items():
        if is_true:
            parser.error(f"--protocol {args.protocol} {message}")
    if protocol.lr:
        lr_scale = args.batch_size / protocol.batch_size
        args.lr = args.lr or [lr_scale * lr for lr in protocol.lr]
    args.crop_min = 0.08  # both public codes; VirTex App. A.1 still has the first version's 20%
    args.colour_jitter = 1.0 if layers else 0.0  # ours: half of SimCLR's, which ICMLM App. F names
    return args


def main(args):
    world = common.init_distributed()
    os.makedirs(args.output, exist_ok=True)
    protocol = PROTOCOLS[args.protocol]

    # The backbone and the labelled images.
    backbone = load_backbone(args.weights, args.arch, args.seed)
    data = label_data(args.data, args.root, args.train_split)
    val = data if args.hold_out else label_data(args.data, args.root, args.val_split)
    check_same_classes(data, val)

    # Each run has its own seed for everything that is drawn: images, weights, costs.
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        first = seed == args.seed
        if args.weights == "random":
            backbone = load_backbone("random", args.arch, seed)
        backbone.to(world.device, memory_format=torch.channels_last)
        backbone.eval().requires_grad_(False)
        train, test = draw_images(data, val, args, seed)
        if first:
            sizes = f"{len(train.images)} training and {len(test.images)} test images"
            classes = f"{len(data.names)} classes, at {args.image_size} px, into {args.output}"
            print_main(f"{args.protocol}: {sizes} of {classes}")
            warn_if_few(test)
        if not protocol.side_fraction:
            runs.append(protocol.score(backbone, train, test, args, world, seed))
            continue

        # Extract features once, and again only if a run has other images or another backbone.
        new_test = first or args.weights == "random" or args.hold_out
        if new_test or args.train_images or args.shots:
            train_x, train_y = labelled_features(backbone, train, args, world, protocol)
        if new_test:
            test_x, test_y = labelled_features(backbone, test, args, world, protocol)
        torch.manual_seed(seed)
        if world.is_main:
            scores = protocol.score(
                train_x,
                train_y,
                test_x,
                test_y,
                data.names,
                args,
                world.device,
                seed,
            )
            runs.append(scores)
    common.end_distributed(world)
    if world.is_main:
        report(runs, data.names, args)


def report(runs, classes, args):
    """Print mean and deviation of the runs, {name: percent} each; write result.json."""
    content = {"args": vars(args), **over_runs(runs)}
    mean = content["mean"]
    width = max(map(len, mean))
    for name in sorted(mean, key=lambda name: (name not in classes, name)):  # metrics come last
        line = f"{name:{width}}  {mean[name]:6.2f}"
        if len(runs) > 1:
            line += f" ± {content['std'][name]:.2f}"
        print_main(line)
    common.write_json(f"{args.output}/result.json", content)


def over_runs(runs):
    """[{name: percent} of each run] -> {"mean": {name: percent}, "std": likewise, "runs": runs}"""
    mean, deviation = {}, {}
    for name in dict.fromkeys(name for scores in runs for name in scores):
        values = [scores[name] for scores in runs if name in scores]
        mean[name], deviation[name] = mean_and_deviation(values)
    return {"mean": mean, "std": deviation, "runs": runs}


def mean_and_deviation(values):
    """Mean and sample standard deviation, which is 0 for a single value"""
    return float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))


def load_backbone(weights, arch, seed):
    """weights: "random", "imagenet", clip:NAME or a file -> backbone without classifier"""
    torch.manual_seed(seed)
    if weights == "random":
        return common.build_backbone(arch)
    if weights.startswith("clip:"):
        return sources.ClipEncoder(weights.removeprefix("clip:"))
    if sources:
        return sources.load_backbone(weights, arch)
    backbone = common.build_backbone(arch)
    with common.error_context(f"without sources.py {weights} must be a backbone.pth of a {arch}"):
        backbone.load_state_dict(common.read_checkpoint(weights))
    return backbone


# ------------------------------------------------------------------------------- labelled images


class LabelData(NamedTuple):
    """Images with labels

    One label per image (folder): labels (N,) int64, the indices of the classes in `names`.
    Several (all other data): labels (N, classes) int8, 1 yes, 0 no, -1 "difficult" (VOC only).
    """

    images: np.ndarray  # keys, see common.open_image
    labels: np.ndarray
    names: list

    def select(self, keep):
        return LabelData(self.images[keep], self.labels[keep], self.names)


def label_data(name, root=None, split="train"):
    """One split of "folder", "voc07", "coco", or of anything with tags -> LabelData"""
    if name == "folder":
        return folder_labels(root or "datasets/folder", split)
    if name == "voc07":
        return voc07_labels(root or "datasets/voc07", split)
    data = common.caption_data(name, root, split)
    require(data.tag_names, f"--data {name} has no tags to score: choose from {DATA}")
    return label_from_tags(data)


def label_from_tags(data):
    """The tags of CaptionData are the classes -> LabelData"""
    labels = np.zeros((len(data), len(data.tag_names)), np.int8)
    for i in range(len(data)):
        labels[i, data.tags_of(i)] = 1
    return LabelData(data.images, labels, data.tag_names)


def voc07_labels(root, split):
    """ImageSets/Main/<class>_{split}.txt, images in JPEGImages/ -> LabelData"""
    folders = [Path(root, inside) for inside in ("", "VOC2007", "VOCdevkit/VOC2007")]
    lists = [path for f in folders for path in sorted(f.glob(f"ImageSets/Main/*_{split}.txt"))]
    if not lists:
        missing = f"VOCdevkit/VOC2007/ImageSets/Main/<class>_{split}.txt: give VOCdevkit's folder"
        raise FileNotFoundError(f"{root} holds no {missing}")
    ours = {"1": 1, "-1": 0, "0": -1}  # their yes, no and difficult
    columns = []
    for path in lists:
        with common.error_context(f"{path} should hold an image and 1, -1 or 0 in each line"):
            ids, truth = np.loadtxt(path, str, ndmin=2).T
            columns.append([ours[word] for word in truth])
    names = [path.name.removesuffix(f"_{split}.txt") for path in lists]
    photos = lists[0].parents[2] / "JPEGImages"
    images = image_files([f"{photos}/{image}.jpg" for image in ids])
    return LabelData(images, np.array(columns, np.int8).T, names)


def folder_labels(root, split):
    """{split}/<class>/<image>, as torchvision's ImageFolder reads it -> LabelData"""
    from torchvision.datasets import folder  # only here, for a quick --help

    path = os.path.join(root, split)
    layout = f"an image folder holds {split}/<class>/<image>: see --root and --train-split"
    with common.error_context(layout):
        names, _ = folder.find_classes(path)
        names = [name for name in names if not name.startswith(".")]  # .ipynb_checkpoints
        index = {name: k for k, name in enumerate(names)}
        samples = folder.make_dataset(path, index, folder.IMG_EXTENSIONS)
    paths, labels = zip(*samples)
    return LabelData(np.array(paths, STRINGS), np.array(labels), names)


def check_same_classes(train, test):
    differing = sorted(set(train.names) ^ set(test.names))[:5]
    require(train.names == test.names, f"the splits differ in their classes: {differing}")


def warn_if_few(test):
    if len(test.images) < 50:
        print_main(f"the score is rough: it is of {len(test.images)} images only")


def class_of(labels):
    """The class of images with one label each: labels (N,) or (N, classes) -> (N,)"""
    return labels if labels.ndim == 1 else labels.argmax(1)


def draw_images(data, val, args, seed):
    """Training and test images of a run, drawn by its seed: --hold-out, --shots, --train-images"""
    order = np.random.default_rng(seed).permutation(len(data.images))
    held_out, rest = np.split(order, [round(args.hold_out * len(order))])
    test = data.select(np.sort(held_out)) if args.hold_out else val
    if args.shots:
        labels = data.labels[rest]
        if labels.ndim == 1:
            labels = labels[:, None] == np.arange(len(data.names))
        chosen = [np.flatnonzero(column == 1)[: args.shots] for column in labels.T]
        rest = rest[np.unique(np.concatenate(chosen))]
    return data.select(np.sort(rest[: args.train_images])), test


# --------------------------------------------------------------------------------------- features


def pooled(backbone, images, device, amp="off", grid_size=1):
    """uint8 (B, size, size, 3) -> average-pooled features, (B, channels * grid_size^2)

    Windows overlap: on a 7x7 map the four windows are 6x6 [Goyal et al. 2019, ICMLM's 24].
    """
    with torch.no_grad(), common.autocast(device, amp):
        maps = backbone(common.augment(images.to(device, non_blocking=True)))
    part = [max(1, side - grid_size + 1) for side in maps.shape[2:]]
    return F.avg_pool2d(maps.float(), part, stride=1).flatten(1)


# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`.
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}


def convolution_features(backbone, images, device, amp="off", jitter=None):
    """uint8 (B, size, size, 3) -> for each of CONVOLUTIONS its maps, average-pooled 3x3

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


def extract_features(backbone, images, args, world, side_fraction=224 / 256, grid_size=1):
    """Pooled features in eval mode -> see run_over_images"""
    function = partial(pooled, backbone, device=world.device, amp=args.amp, grid_size=grid_size)
    training = backbone.training
    backbone.eval()
    results = run_over_images(function, images, args, world, side_fraction)
    backbone.train(training)
    return results


def labelled_features(backbone, data, args, world, protocol):
    """-> features (M, D), None on all processes but the first; labels (M,) or (M, classes)"""
    features, readable = extract_features(
        backbone, data.images, args, world, protocol.side_fraction, protocol.grid_size
    )
    require(features is None or np.isfinite(features.sum()), "features not finite: try --amp off")
    return features, data.labels[readable]


def run_over_images(function, images, args, world, side_fraction=224 / 256):
    """function(uint8 (B, size, size, 3)) -> (B, D), on the central square of each image

    images: keys, see common.open_image, or CentreCrops.  args: image_size, workers, output.
    -> (M, D) float32 for the M images that can be decoded, in the order of `images`, and their
    indices (M,). The features are None on all processes but the first, where they are mapped from
    a temporary file in args.output: ImageNet's 10 GB need no memory.
    """
    count = len(images)
    per_rank = math.ceil(count / world.size)
    # All processes get equally many: the first images are repeated at the end.
    indices = [i % count for i in range(world.rank, per_rank * world.size, world.size)]
    crops = images
    if not isinstance(images, CentreCrops):
        crops = CentreCrops(images, args.image_size, side_fraction)
    batches = common.loader(crops, 64, args.workers, sampler=indices)
    readable = []
    folder = args.output if world.is_main else None  # the others write nothing
    with tempfile.TemporaryFile(dir=folder) as file:  # unnamed: vanishes when closed
        for pixels, good in progress(batches, desc="images", unit=" batches", leave=False):
            rows = gather_in_turns(function(pixels).float().cpu(), world)
            good = gather_in_turns(good, world)[: count - len(readable)]
            readable += good.tolist()
            if world.is_main:
                file.write(rows[: len(good)][good].numpy().tobytes())
        if not any(readable):
            raise common.Unreadable(f"none of the {count} images can be decoded")
        file.flush()
        features = None
        if world.is_main:
            values = np.memmap(file, np.float32, "c")
            features = values.reshape(sum(readable), -1)
    return features, np.flatnonzero(readable)


class CentreCrops(Dataset):
    """The central square of each image -> uint8 (size, size, 3), and whether it is readable"""

    def __init__(self, images, size, side_fraction=224 / 256):
        self.images = images
        self.size = size
        self.crop = partial(common.centre_crop, side_fraction=side_fraction)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        try:
            [pixels] = common.read_crops(self.images[i], [self.crop], self.size)
            return pixels, True
        except common.Unreadable:
            tqdm.write(f"cannot decode {self.images[i]}: left out")
            return np.zeros((self.size, self.size, 3), np.uint8), False


def gather_in_turns(x, world):
    """The rows of all processes, interleaved: the first of each, the second of each ..."""
    by_process = common.gather(x, world).unflatten(0, (world.size, -1))
    return by_process.transpose(0, 1).flatten(0, 1)


# -------------------------------------------------------------------------- SVMs on features


def svm_virtex(train_x, train_y, test_x, test_y, names, args, device, seed):
    """svm.py's four costs [VirTex App. A.1] -> {class: average precision, "mAP": their mean}"""
    scores = svm_probe(train_x, train_y, test_x, test_y, names, device=device)
    return with_mean(scores, names)


def svm_icmlm(train_x, train_y, test_x, test_y, names, args, device, seed):
    """40 log-uniform costs [ICMLM App. F.2], all of them tried [ours; the paper uses Optuna];
    interpolated precision, as in the code of Goyal et al."""
    costs = sorted(10 ** np.random.default_rng(seed).uniform(-5, 5, 40))
    scores = svm_probe(train_x, train_y, test_x, test_y, names, costs, device, interpolated=True)
    return with_mean(scores, names)


def with_mean(scores, names):
    require(scores, "no class has positive and negative training images and a positive test image")
    left_out = [name for name in names if name not in scores]
    if left_out:
        print_main(f"without training or test examples, left out: {', '.join(left_out[:5])}...")
    return {**scores, "mAP": mean_of(scores)}


# ---------------------------------------------------------------------- linear layers on features


def sgd_mct(train_x, train_y, test_x, test_y, names, args, device, seed):
    """lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2] -> {"top-1": percent}"""

    def lr_factor(fraction):
        return 0.2 ** sum(fraction >= epoch / 60 for epoch in (30, 40, 50))

    rows = np.arange(len(train_x))
    trials = [(args.lr[0], 0.0)]
    [layer] = train_linear(
        train_x, train_y, rows, trials, lr_factor, args.epochs, args.batch_size, device, seed
    )
    logits = predict(layer, test_x, device)
    check_finite(logits)
    common.save_weights(f"{args.output}/{args.protocol}_{seed}.pth", layer)
    return {"top-1": top1(logits, test_y)}


def logreg_icmlm(train_x, train_y, test_x, test_y, names, args, device, seed):
    """The best of 25 pairs of lr and weight decay on held-out images [ICMLM App. F.2]

    [ours: a fifth is held out, the trials are random where the paper uses Optuna, and features
    are l2-normalised as for the SVMs] -> {"top-1": percent}
    """
    rng = np.random.default_rng(seed)
    rates = 10 ** rng.uniform(-1, 2, 25)
    decays = rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    held_out, rest = np.split(rng.permutation(len(train_x)), [len(train_x) // 5])

    def train(rows, trials):
        return train_linear(
            train_x,
            train_y,
            rows,
            trials,
            partial(common.lr_factor, total=1),
            args.epochs,
            args.batch_size,
            device,
            seed,
            normalize=True,
        )

    def score(layer, x, y):
        return top1(predict(layer, l2_normalize(x), device), y)

    layers = train(rest, trials)
    scores = [score(layer, train_x[held_out], train_y[held_out]) for layer in layers]
    best = trials[np.argmax(scores)]
    print_main(f"chosen: learning rate {best[0]:.3g}, weight decay {best[1]:.2g}")
    [layer] = train(np.arange(len(train_x)), [best])
    common.save_weights(f"{args.output}/{args.protocol}_{seed}.pth", layer)
    return {"top-1": score(layer, test_x, test_y)}


def train_linear(
    x,
    y,
    rows,
    trials,
    lr_factor,
    epochs,
    batch_size,
    device,
    seed,
    normalize=False,
    width=None,
    loss_fn=F.cross_entropy,
):
    """One linear layer per (learning rate, weight decay) in `trials`, on the same batches

    x: (N, D) float32.  y: (N,), their classes.  rows: indices of those to train on: x may fill the
    memory, so it is not copied.  lr_factor(fraction of training): multiplies the learning rates.
    normalize: scale features to length 1.  width: outputs of a layer, by default one per class.
    loss_fn(outputs (B, width), classes (B,))
    """
    x = torch.from_numpy(x).to(device)
    y = torch.from_numpy(class_of(y)).to(device)
    layers = LinearLayers(len(trials) * [x.shape[1]], width or int(y.max()) + 1).to(device)
    groups = []
    for layer, (lr, weight_decay) in zip(layers, trials):
        groups.append({"params": layer.parameters(), "lr": lr, "weight_decay": weight_decay})
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    rng = np.random.default_rng(seed)
    for epoch in progress(range(epochs), desc="linear layers", unit=" epochs", leave=False):
        batches = torch.from_numpy(rng.permutation(rows)).to(device).split(batch_size)
        for n, batch in enumerate(batches):
            common.set_lr(optimizer, lr_factor((epoch + n / len(batches)) / epochs))
            features = x[batch]
            if normalize:
                features = F.normalize(features)
            losses = [loss_fn(layer(features), y[batch]) for layer in layers]
            optimizer.zero_grad()
            sum(losses).backward()  # the layers share no parameters: each is trained on its own
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
    require(np.isfinite(logits).all(), "the linear layer has diverged: try a lower --lr")


# ----------------------------------------------------------------------------- nearest neighbours


def knn(train_x, train_y, test_x, test_y, names, args, device, seed):
    """Votes of the 20 nearest training images, weighted by exp(cosine / 0.07) [Wu et al. 2018]

    -> {"top-1": percent}; with several labels the votes rank each class's images: {"mAP": percent}
    """
    train_x = F.normalize(torch.from_numpy(train_x).to(device))
    labels = torch.from_numpy(train_y).to(device)
    votes = []
    for part in torch.from_numpy(test_x).split(1024):
        similarity = F.normalize(part.to(device)) @ train_x.T
        cosine, nearest = similarity.topk(min(20, len(train_x)))
        weights = (cosine / 0.07).exp()
        classes = labels[nearest]  # (B, 20) or (B, 20, classes)
        if labels.ndim == 1:
            classes = F.one_hot(classes, len(names))
        votes.append((weights[..., None] * (classes == 1)).sum(1).cpu())  # (B, classes)
    votes = torch.cat(votes).numpy()
    if train_y.ndim == 1:
        return {"top-1": top1(votes, test_y)}
    return {"mAP": mean_of(average_precisions(votes, test_y, names))}


# -------------------------------------------------------- linear layers, trained with augmentation

LAYERS_DECAY = 1e-5  # weight decay; the learning rate falls as lr / sqrt(1 + lr * decay * t)


def sgd_virtex(backbone, train, test, args, world, seed):
    """One linear layer, cosine schedule, no weight decay [VirTex App. A.1] -> {"top-1": percent}"""

    def features_of(images, jitter=None):
        return [pooled(backbone, images, world.device, args.amp)]

    def set_lr(optimizer, iteration, iters):
        common.set_lr(optimizer, common.lr_factor(iteration, iters))

    heads = {"": (backbone.channels, args.lr[0])}
    return train_with_augmentation(features_of, heads, 0.0, set_lr, train, test, args, world, seed)


def vgg_layers(backbone, train, test, args, world, seed):
    """A linear layer after each of CONVOLUTIONS [ICMLM Sec. 4, as in DeeperCluster's code]

    -> {"C-11 top-1": percent, ...}; "C-11 mAP" with several labels per image
    """

    def features_of(images, jitter=None):
        return convolution_features(backbone, images, world.device, args.amp, jitter)

    def set_lr(optimizer, iteration, iters):
        for group in optimizer.param_groups:
            lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = lr / math.sqrt(1 + lr * LAYERS_DECAY * iteration)

    width = backbone.channels * (args.image_size // 16 // 3) ** 2
    heads = {f"{name} ": (width, lr) for name, lr in zip(CONVOLUTIONS, args.lr)}
    return train_with_augmentation(
        features_of, heads, LAYERS_DECAY, set_lr, train, test, args, world, seed
    )


def labelled_photo(data, args, index, rng):
    """A sample (see common.Samples): that of load_image, and its labels"""
    sample = common.load_image(data.images[index], rng, args)
    return {**sample, "labels": data.labels[index]}


def collate_labelled(samples):
    return {**common.collate_images(samples), "labels": common.stack(samples, "labels")}


def classification_loss(logits, labels, multi_label):
    """Softmax cross-entropy; with several labels per image, binary cross-entropy per class

    The latter is summed over classes, without "difficult" labels [ours].  logits: (B, classes).
    labels: as in LabelData -> scalar
    """
    if not multi_label:
        return F.cross_entropy(logits, class_of(labels))
    targets = (labels == 1).float()
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (losses * (labels >= 0)).sum(1).mean()


def train_with_augmentation(
    features_of, heads, weight_decay, set_lr, train, test, args, world, seed
):
    """Train linear layers side by side -> {metric: percent}, None on all processes but the first

    features_of(images, jitter) -> [(B, width)], one for each of heads: {name: (width, lr)}.
    set_lr(optimizer, iteration, iters).  After each epoch the layers are saved to PROTOCOL_SEED.pth
    in --output, from which the same command resumes.
    """
    device = world.device
    multi_label = train.labels.ndim == 2

    # The layers, resumed where an earlier run stopped.
    torch.manual_seed(seed)
    widths = [width for width, _ in heads.values()]
    model = LinearLayers(widths, len(train.names)).to(device)
    groups = []
    for layer, (_, lr) in zip(model, heads.values()):
        groups.append({"params": layer.parameters(), "lr": lr})
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=weight_decay)
    path = Path(args.output, f"{args.protocol}_{seed}.pth")
    settings = settings_of(args, train, test)
    start = 0
    if path.exists():
        saved = common.read_checkpoint(path)
        if saved["args"] == settings:
            start = saved["iteration"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            print_main(f"{path}: resuming from iteration {start}")
    parallel = common.data_parallel(model, world)

    @torch.no_grad()
    def score():
        def logits_of(images):
            return torch.cat(model(features_of(images)), 1)

        logits, readable = run_over_images(logits_of, test.images, args, world)
        if world.is_main:
            return score_layers(heads, logits, test.labels[readable], train.names)

    count = len(train.images)
    iters = math.ceil(args.epochs * count / args.batch_size)
    epoch = math.ceil(count / args.batch_size)
    images_between = max(count, 5 * len(test.images))  # scoring is at most a sixth of the work
    eval_every = math.ceil(images_between / args.batch_size)
    samples = common.Samples(partial(labelled_photo, train, args), count)
    sampler = common.infinite_sampler(count, args.batch_size, world, seed, start)
    per_rank_batch = args.batch_size // world.size
    batches = common.loader(samples, per_rank_batch, args.workers, collate_labelled, sampler)
    steps = progress(range(start, iters), initial=start, total=iters, desc=args.protocol)
    for iteration, batch in zip(steps, batches):
        batch = common.to_device(batch, device)
        set_lr(optimizer, iteration, iters)
        features = features_of(batch["images"], batch["jitter"])
        outputs = parallel(features)
        losses = [classification_loss(logits, batch["labels"], multi_label) for logits in outputs]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        done = iteration + 1
        if done % eval_every == 0 and done < iters:
            scores = score()
            if world.is_main:
                seen = done * args.batch_size / count
                print_main(f"epoch {seen:.1f}: {common.format_scores(scores)}")
        if world.is_main and (done % epoch == 0 or done == iters):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "args": settings,
                "iteration": done,
            }
            common.save(path, state)
    return score()


def settings_of(args, train, test):
    """What must not change for the training of linear layers to resume"""
    free = "workers", "runs", "seed", "output"
    settings = {name: value for name, value in vars(args).items() if name not in free}
    settings["images"] = len(train.images), len(test.images)
    if os.path.exists(args.weights):
        settings["weights_date"] = os.path.getmtime(args.weights)
    return settings


def score_layers(names, logits, labels, classes):
    """logits (N, layers * classes) side by side -> {"C-11 top-1": percent, ...}"""
    check_finite(logits)
    scores = {}
    for name, part in zip(names, np.split(logits, len(names), 1)):
        if labels.ndim == 2:
            scores[f"{name}mAP"] = mean_of(average_precisions(part, labels, classes))
        else:
            scores[f"{name}top-1"] = top1(part, labels)
    return scores


# --------------------------------------------------------------------- the table of the protocols


class Protocol(NamedTuple):
    """A function -> {metric: percent}, what it needs, and the defaults of its flags"""

    # With side_fraction: score(train_x, train_y, test_x, test_y, names, args, device, seed), on
    # features that are extracted once. Without: score(backbone, train, test, args, world, seed).
    score: object
    single_label: bool = False  # whether it needs images with one label each
    side_fraction: float = None  # centre crop's side / image's shorter side
    grid_size: int = 1  # of average pooling
    epochs: int = None
    batch_size: int = None
    lr: list = None  # peak, for each linear layer


PROTOCOLS = {
    # [VirTex App. A.1] resize 256, crop 224; ResNet-50: 2048-d
    "svm-virtex": Protocol(svm_virtex, False, 224 / 256),
    # [ICMLM App. F.2] smallest side 224, crop 224; 8192-d
    "svm-icmlm": Protocol(svm_icmlm, False, 1.0, grid_size=2),
    # [VirTex Sec. 4.1, App. A.1] cosine, no weight decay
    "sgd-virtex": Protocol(sgd_virtex, True, epochs=100, batch_size=256, lr=[0.3]),
    # [contrastive paper Sec. 4.2] 2048-d; 3 steps, no weight decay; the crop is ours
    "sgd-mct": Protocol(sgd_mct, True, 224 / 256, epochs=60, batch_size=256, lr=[30.0]),
    # [ICMLM App. F.2] 2048-d; cosine, lr is searched; the epochs are ours
    "logreg-icmlm": Protocol(logreg_icmlm, True, 1.0, epochs=100, batch_size=1024),
    "knn": Protocol(knn, False, 224 / 256),  # as DINO reports it
    # [ICMLM Sec. 4] DeeperCluster's code, for ImageNet; for Places --lr 0.01 0.01 0.02
    "layers": Protocol(vgg_layers, False, epochs=100, batch_size=256, lr=[0.02, 0.02, 0.02]),
}


# ---------------------------------------------------------------------- the probe in a training run


class Probe:
    """How a training script measures its backbone: svm-virtex on --probe-data or on its tags"""

    def __init__(self, args, train, val, trained_on_tags=False):
        """args: of common.flag_parser.  train, val: CaptionData.  trained_on_tags: said in final"""
        self.args = args
        self.labelled = None  # None, or LabelData for training and test
        self.name = os.path.basename(args.probe_data or args.data)
        self.same_tags = trained_on_tags and not args.probe_data
        require(args.probe_data or not args.probe_root, "--probe-root needs --probe-data")
        if args.probe_data:
            train_split, val_split = LABEL_SPLITS.get(args.probe_data, ("train", "val"))
            train = label_data(args.probe_data, args.probe_root, train_split)
            val = label_data(args.probe_data, args.probe_root, val_split)
            check_same_classes(train, val)
        elif not train.tag_names:
            return
        order = np.random.default_rng(args.seed).permutation(len(train.images))
        train = train.select(np.sort(order[: args.probe_images]))
        if not args.probe_data:  # only now: few of perhaps millions of photos are left
            train = label_from_tags(train)
            val = label_from_tags(val)
        if scorable(train.labels, val.labels, len(train.names)).any():
            self.labelled = train, val
        else:
            print_main(f"no class of {self.name} has examples in both splits: nothing to probe on")

    def score(self, backbone, device):
        """-> mAP in percent. The first process probes alone: the others have ended."""
        world = common.World(0, 1, device)
        train, test = self.labelled
        protocol = PROTOCOLS["svm-virtex"]
        train_x, train_y = labelled_features(backbone, train, self.args, world, protocol)
        test_x, test_y = labelled_features(backbone, test, self.args, world, protocol)
        return mean_of(svm_probe(train_x, train_y, test_x, test_y, train.names, device=device))

    def final(self, backbone, folder, device):
        """Probe the trained backbone and a random one -> entry of result.json"""
        args = self.args
        if not self.labelled:
            flags = f"--image-size {args.image_size} --data folder --root FOLDER"
            command = f"python eval_linear.py --weights {folder}/backbone.pth {flags}"
            print_main(f"no labels to probe on: measure with {command}")
            return {}
        other = load_backbone("random", args.arch, args.seed)
        other.to(device, memory_format=torch.channels_last)
        trained = round(self.score(backbone, device), 2)
        random = round(self.score(other, device), 2)
        scores = f"{trained:.1f} mAP trained, {random:.1f} mAP at random initialisation"
        same = " (trained on the same tags)" if self.same_tags else ""
        warn_if_few(self.labelled[1])
        print_main(f"linear probe on {self.name}{same}: {scores}")
        result = {"data": self.name, "metric": "mAP", "trained": trained, "random": random}
        return {"probe": result}


if __name__ == "__main__":
    common.run(main, get_args)
