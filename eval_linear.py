"""Linear classifiers on frozen features: what a backbone is worth, by the protocols of the papers.

    python eval_linear.py --weights runs/virtex/backbone.pth --data folder --root photos
    python eval_linear.py --weights runs/virtex/backbone.pth --data voc07 --root VOCdevkit
    python eval_linear.py --weights random --arch resnet50 --data voc07 --root VOCdevkit --runs 5
    torchrun --nproc_per_node=8 eval_linear.py --weights FILE --data folder --root imagenet --protocol sgd-virtex

`--weights` takes a backbone.pth or checkpoint.pth of ours, an official VirTex checkpoint, MoCo, SwAV, VICReg, DINO or
torchvision files, `imagenet` (torchvision's, downloaded) or `random`. The backbone is always in eval mode.

    svm-virtex     one SVM per class on pooled features, C by cross-validation; mAP [VirTex Sec. 4.1, App. A.1]
    svm-icmlm      the same on features pooled 2x2, 8192 for ResNet-50, with 40 costs; mAP [ICMLM App. F.2]
    sgd-virtex     one linear layer trained with augmentation; top-1 [VirTex Sec. 4.1, App. A.1]
    sgd-mct        one linear layer on features extracted once; top-1 [multimodal contrastive training, Sec. 4.2]
    logreg-icmlm   the same, learning rate and weight decay by 25 trials on held-out training images; top-1 [ICMLM App. F.2]
    layers         one linear layer after each of VGG-16's last three convolutions, with augmentation; mAP or top-1 [ICMLM Sec. 4]

SVMs and `layers` take images with several labels (voc07, coco, shapes) and with one (folder), the others folders only.
Features extracted once stay in the output folder, and are found again for the same weights, images and size.
"""

import argparse
import functools
import json
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import common
import probe
from common import fail, progress, say

EXTRACTED = {  # protocols on features extracted once
    #                crop: its part of the smaller side        cells x cells of the average pooling
    "svm-virtex":   (224 / 256,                                1),  # VirTex App. A.1: resize 256, crop 224; 2048-d
    "svm-icmlm":    (1.0,                                      2),  # ICMLM App. F.2: smallest side 224, crop 224; 8192-d
    "sgd-mct":      (224 / 256,                                1),  # MCT Sec. 4.2: no augmentation; 2048-d; crop ours
    "logreg-icmlm": (1.0,                                      1),  # ICMLM App. F.2; 2048-d
}  # fmt: skip

TRAINED = {  # protocols trained by SGD with momentum 0.9
    #                epochs  batch_size  lr
    "sgd-virtex":   (100,    256,        0.3),   # VirTex Sec. 4.1: cosine, no weight decay
    "sgd-mct":      (60,     256,        30.0),  # MCT Sec. 4.2: divided by 5 at three epochs, no weight decay
    "logreg-icmlm": (100,    1024,       None),  # ICMLM App. F.2: cosine; epochs ours
    "layers":       (100,    256,        0.01),  # ours, cosine and no weight decay too: the paper leaves them to its code
}  # fmt: skip

PROTOCOLS = (*EXTRACTED, *(name for name in TRAINED if name not in EXTRACTED))


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.help_formatter({}))
    parser.add_argument("--weights", required=True, help="a checkpoint file, imagenet or random")
    parser.add_argument("--arch", choices=sorted(common.BACKBONES), help="needed for imagenet and random only: a file's is recognised")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="svm-virtex", help="svm-* for VOC07, COCO, small sets; layers for VGG-16; others for ImageNet")
    parser.add_argument("--data", choices=sorted(common.LABEL_SPLITS), default="shapes", help="labelled images; folder is ImageNet's layout")
    parser.add_argument("--root", help="folder of the data set (default datasets/<name>)")
    parser.add_argument("--train-split", help="default: trainval for voc07, train2017 for coco, train otherwise")
    parser.add_argument("--val-split", help="default: test for voc07, val2017 for coco, val otherwise")
    parser.add_argument("--train-images", type=int, help="train on at most this many images, drawn by --seed (default 2000 for shapes, all otherwise)")
    parser.add_argument("--image-size", type=int, default=224, help="side of the crops; the one the backbone was trained at is best [App. A.1]")
    parser.add_argument("--runs", type=int, default=1, help="repeat with different seeds: mean and standard deviation (svm-virtex on a file draws nothing and repeats itself)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--output", help="folder of result.json and of the features (default runs/eval_linear)", default="runs/eval_linear")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count()), help="data processes per process")
    parser.add_argument("--amp", choices=("bf16", "fp16", "off"), default="off", help="precision of the frozen backbone; off for numbers to report")

    svm = parser.add_argument_group("svm-*")
    svm.add_argument("--solver", choices=("torch", "liblinear"), help="torch solves all SVMs at once, liblinear is the paper's and slow (default torch)")
    sgd = parser.add_argument_group("sgd-*, logreg-icmlm, layers")
    sgd.add_argument("--epochs", type=int, help="passes over the training images (default the protocol's)")
    sgd.add_argument("--batch-size", type=int, help="images per iteration over all processes (default the protocol's)")
    sgd.add_argument("--lr", type=float, help="maximum (default the protocol's, scaled linearly with the batch size; logreg-icmlm searches its own)")
    args = parser.parse_args(argv)

    train, val = common.LABEL_SPLITS[args.data]
    args.train_split, args.val_split = args.train_split or train, args.val_split or val
    if args.train_images is None and args.data == "shapes":
        args.train_images = 2000
    if args.weights in ("random", "imagenet") and not args.arch:
        fail(f"--weights {args.weights} needs --arch")
    if args.protocol in TRAINED:
        fill_recipe(args)
    elif (args.epochs, args.batch_size, args.lr) != (None, None, None):
        fail(f"--epochs, --batch-size and --lr do not go with --protocol {args.protocol}, which solves its SVMs")
    if args.solver and not args.protocol.startswith("svm"):
        fail(f"--solver does not go with --protocol {args.protocol}, which has no SVMs")
    if args.data != "folder" and args.protocol in ("sgd-virtex", "sgd-mct", "logreg-icmlm"):
        fail(f"--protocol {args.protocol} wants one label per image: --data folder")
    if min(args.runs, args.image_size, 1 if args.train_images is None else args.train_images) < 1 or args.workers < 0:
        fail("--runs, --image-size and --train-images must be at least 1, --workers at least 0")
    if not 0 <= args.seed < 2**32:
        fail(f"--seed {args.seed} must be from 0 to {2**32 - 1}")
    return args


def fill_recipe(args):
    """Give --epochs, --batch-size and --lr the protocol's values where the user gave none."""
    epochs, batch_size, lr = TRAINED[args.protocol]
    if lr is None and args.lr is not None:
        fail(f"--lr does not go with --protocol {args.protocol}, which searches for its learning rate")
    args.epochs = epochs if args.epochs is None else args.epochs
    args.batch_size = batch_size if args.batch_size is None else args.batch_size
    common.check_batch_size(args.batch_size)
    if lr is not None and args.lr is None:
        args.lr = lr * args.batch_size / batch_size
    if args.epochs < 1 or args.lr is not None and not args.lr > 0:
        fail("--epochs must be at least 1, --lr above 0")


def main(args):
    world = common.start_processes()
    try:
        os.makedirs(args.output, exist_ok=True)
    except OSError as error:
        fail(f"--output {args.output} cannot be made ({error.strerror})")
    backbone = load_backbone(args.weights, args.arch, args.seed)
    if args.protocol == "layers" and not isinstance(backbone, common.VGG16):
        fail("--protocol layers looks at the last three convolutions of a VGG-16: --arch vgg16, or a file of one")
    train, test = (probe.label_data(args.data, args.root, split) for split in (args.train_split, args.val_split))
    if train.names != test.names:
        fail(f"the splits have different classes: {sorted(set(train.names) ^ set(test.names))[:5]} are in one of them only")
    if {"mAP", "top-1"} & set(train.names):
        fail("a class is called mAP or top-1, as the scores are: rename its folder")
    if args.train_images:
        train = train.select(np.sort(np.random.default_rng(args.seed).permutation(len(train.images))[: args.train_images]))
    say(f"{len(train.images)} training and {len(test.images)} test images of {len(train.names)} classes; {args.protocol}")

    scores = []
    for seed in range(args.seed, args.seed + args.runs):
        if args.weights == "random" and seed > args.seed:
            backbone = load_backbone(args.weights, args.arch, seed)
        backbone.to(world.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        torch.manual_seed(seed)
        if args.protocol in EXTRACTED:
            fit, held = (extracted(backbone, data, f"features_{name}.npz", args, world) for name, data in (("train", train), ("test", test)))
            torch.manual_seed(seed)  # features found again leave the generator where it was
            if world.is_main:  # what follows is one process's work
                classify = {"sgd-mct": sgd_mct, "logreg-icmlm": logreg_icmlm}.get(args.protocol, svm)
                scores.append(classify(*fit, *held, train.names, args, world.device, seed))
        else:
            scores.append(augmented(backbone, train, test, args, world, seed))
    common.end_processes(world)
    if not world.is_main:
        return

    mean = {name: float(np.mean([score[name] for score in scores])) for name in scores[0]}
    deviation = {name: float(np.std([score[name] for score in scores])) for name in scores[0]}
    width = max(map(len, mean))
    for name in sorted(mean, key=lambda name: (name not in train.names, name)):
        say(f"{name:{width}}  {mean[name]:6.2f}" + (f" ± {deviation[name]:.2f}" if args.runs > 1 else ""))
    common.write_json(f"{args.output}/result.json", {"args": vars(args), "mean": mean, "std": deviation, "runs": scores})


def load_backbone(weights, arch, seed):
    """-> backbone; its classifier, if the file has one, is left behind"""
    torch.manual_seed(seed)
    if weights == "random":
        return common.build_backbone(arch)
    if weights == "imagenet":
        name = {"resnet50w2x": "wide_resnet50_2", "vgg16": "vgg16_bn"}.get(arch, arch)
        try:
            state = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"].get_state_dict(progress=True, check_hash=True)
        except OSError as error:
            fail(f"--weights imagenet: torchvision's weights cannot be downloaded ({error}); give a file")
        backbone = common.build_backbone(arch)
        backbone.load_state_dict(common.backbone_weights(state, "torchvision's download")[1])
        return backbone
    return common.load_backbone(arch, weights)


# ------------------------------------------------------------------------------------------ features extracted once


def extracted(backbone, data, name, args, world):
    """Pooled features (N, D) float32 and labels (N, classes) of the images that can be decoded; (None, None) but on the first process.

    Kept in the output folder under `name` with what they were made of.
    """
    part, cells = EXTRACTED[args.protocol]
    path, made_of = Path(args.output, name), [digest(backbone, data), args.image_size, part, cells, args.amp]
    kept = common.read_arrays(path, made_of) if world.is_main else None
    if common.any_process(world, world.is_main and kept is None):
        features, labels = probe.extract_features(backbone, data, args.image_size, world.device, args.amp, args.workers, name, part, cells, world)
        if world.is_main:
            kept = {"features": features, "labels": labels}
            common.keep_arrays(path, made_of, kept)
    if kept and len(kept["features"]) < len(data.images):
        say(f"{path}: {len(data.images) - len(kept['features'])} of {len(data.images)} images could not be decoded and are left out")
    return (kept["features"], kept["labels"]) if world.is_main else (None, None)


def digest(backbone, data):
    """A number that differs, as good as surely, for other weights, labels, lists of images, or files that have changed."""
    arrays = [tensor.cpu().contiguous().numpy() for tensor in backbone.state_dict().values()] + [np.ascontiguousarray(data.labels)]
    number = functools.reduce(lambda n, values: zlib.crc32(values, n), arrays, 0)
    stats = [os.stat(path) for path in data.images if os.path.exists(path)] if isinstance(data.images, common.ImageFiles) else []  # a broken link does not
    return zlib.crc32(json.dumps([*data.images, *((file.st_size, file.st_mtime_ns) for file in stats)]).encode(), number)


def svm(train_x, train_y, test_x, test_y, names, args, device, seed):
    """One SVM per class -> {class: average precision, "mAP": their mean}"""
    costs = probe.COSTS
    if args.protocol == "svm-icmlm":  # 40 costs, log-uniform [App. F.2; ours: each is tried, where the paper searches with Optuna]
        costs = sorted(10 ** np.random.default_rng(seed).uniform(-5, 5, 40))
    scores = probe.svm_probe(train_x, train_y, test_x, test_y, names, seed, costs, args.solver or "torch", device)
    if not scores:
        fail("no class has both positive and negative training images and a positive test image")
    left_out = [name for name in names if name not in scores]
    if left_out:
        say(f"{len(left_out)} classes without training or test examples are left out: {', '.join(left_out[:5])}")
    return probe.with_mean(scores)


def sgd_mct(train_x, train_y, test_x, test_y, names, args, device, seed):
    """One linear layer, learning rate divided by 5 at epochs 30, 40, 50 of 60 [MCT Sec. 4.2] -> {"top-1": percent}"""

    def factor(share):
        return 0.2 ** sum(share >= epoch / 60 for epoch in (30, 40, 50))

    [layer] = train_linear(train_x, train_y, [(args.lr, 0.0)], factor, args, device, seed)
    return scores_of(finite(logits_of(layer, test_x, device)), test_y, names)


def logreg_icmlm(train_x, train_y, test_x, test_y, names, args, device, seed):
    """One linear layer, with the best of 25 learning rates and weight decays for held-out images [ICMLM App. F.2] -> {"top-1": percent}

    [ours: a fifth is held out, the trials are random (the paper's are Optuna's), features are l2-normalised as for the SVMs]
    """
    rng = np.random.default_rng(seed)
    trials = [(float(10**power), float(decay)) for power, decay in zip(rng.uniform(-1, 2, 25), rng.uniform(0, 1e-5, 25))]
    train_x, test_x = probe.unit_length(train_x), probe.unit_length(test_x)
    held, fit = np.split(rng.permutation(len(train_x)), [len(train_x) // 5])
    if not len(held):
        fail(f"--protocol logreg-icmlm holds out a fifth of the training images, and there are {len(train_x)}: give it 5 at least")

    cosine = functools.partial(common.warmup_cosine, total=1, warmup=0)
    layers = train_linear(train_x[fit], train_y[fit], trials, cosine, args, device, seed)
    best = max(range(25), key=lambda n: scores_of(logits_of(layers[n], train_x[held], device), train_y[held], names)["top-1"])
    say("chosen: learning rate {:.3g}, weight decay {:.2g}".format(*trials[best]))
    [layer] = train_linear(train_x, train_y, [trials[best]], cosine, args, device, seed)
    return scores_of(logits_of(layer, test_x, device), test_y, names)


def train_linear(x, y, trials, factor, args, device, seed):
    """One linear layer per (learning rate, weight decay) in `trials`, trained side by side on the same batches -> list of nn.Linear

    x: (N, D) float32.  y: (N, classes), one label each.  factor(share of the run) scales the learning rates.
    """
    x, classes = torch.from_numpy(x).to(device), torch.from_numpy(y.argmax(1)).to(device)
    layers = [linear_layer(x.shape[1], y.shape[1]).to(device) for _ in trials]
    groups = [{"params": layer.parameters(), "lr": lr, "peak": lr, "weight_decay": decay} for layer, (lr, decay) in zip(layers, trials)]
    optimizer, order = torch.optim.SGD(groups, momentum=0.9), np.random.default_rng(seed)
    for epoch in progress(range(args.epochs), desc=f"{len(trials)} linear layers" if len(trials) > 1 else "linear layer", unit=" epochs", leave=False):
        batches = torch.from_numpy(order.permutation(len(x))).to(device).split(args.batch_size)
        for n, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor((epoch + n / len(batches)) / args.epochs)
            optimizer.zero_grad()
            sum(F.cross_entropy(layer(x[batch]), classes[batch]) for layer in layers).backward()  # separate parameters: separate trainings
            optimizer.step()
    return layers


def linear_layer(inputs, outputs):
    """Weights N(0, 0.01), bias 0 [VirTex App. A.1; ours for the other protocols]"""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def logits_of(layer, x, device):
    """(N, D) -> (N, classes) on the CPU, in parts that fit on a GPU"""
    return np.concatenate([layer(torch.from_numpy(rows).to(device)).cpu().numpy() for rows in np.array_split(x, math.ceil(len(x) / 2**16))])


def finite(logits):
    if not np.isfinite(logits).all():
        fail("the linear layer has diverged: its outputs are not finite. Try a lower --lr")
    return logits


def scores_of(logits, labels, names, several=False):
    """(N, classes) both -> {"top-1": percent}, or with `several` labels per image {"mAP": percent}, difficult ones not counted"""
    if several:
        return {"mAP": probe.with_mean(probe.average_precisions(logits, labels, names))["mAP"]}
    return {"top-1": 100 * float((logits.argmax(1) == labels.argmax(1)).mean())}


# ------------------------------------------------------------------------------------------ trained with augmentation


class LabelView(Dataset):
    """One labelled image: a random crop of 20-100% with a random flip [VirTex App. A.1], for `layers` also colour jitter.

    -> uint8 (size, size, 3), jitter (4,), labels (classes,), index of an image that could not be decoded and is replaced
    by the next, or -1. ICMLM's `layers` augments more heavily, citing SimCLR, and says no more [Sec. 4]: here, colour jitter of half
    SimCLR's strength is added [ours].
    """

    def __init__(self, data, size, seed, jitter=0.0):
        self.data, self.size, self.seed, self.jitter = data, size, seed, jitter

    def __getitem__(self, key):
        epoch, index = key
        rng = common.sample_rng(self.seed, epoch, index)
        image, index, unreadable = common.read_crop(self.data.images, index, common.random_crop(rng), self.size)
        image = image[:, ::-1].copy() if rng.random() < 0.5 else image
        return image, common.draw_colour_jitter(rng, self.jitter), self.data.labels[index], unreadable[0] if unreadable else -1


class LinearProbes(nn.Module):
    """Linear layers side by side, each on its own feature of the frozen backbone."""

    def __init__(self, widths, classes):
        super().__init__()
        self.layers = nn.ModuleList(linear_layer(width, classes) for width in widths)

    def forward(self, features):
        return [layer(feature) for layer, feature in zip(self.layers, features)]


def probed_features(backbone, images, jitter, args, device):
    """-> list of (B, width): pooled over the image, or with `layers` the three last convolutions of VGG-16 in 4x4 cells

    512 channels x 16 cells are 8192 numbers, the square grid nearest to about 9K [ICMLM App. C after Caron et al. 2019; ours].
    """
    if args.protocol != "layers":
        return [probe.pooled(backbone, images, device, args.amp)]
    with torch.no_grad(), common.autocast(device, args.amp):
        maps = backbone.maps(common.augment(images.to(device, non_blocking=True), None if jitter is None else jitter.to(device, non_blocking=True)))
    return [F.adaptive_avg_pool2d(value.float(), 4).flatten(1) for value in maps.values()]


def multi_label_loss(logits, labels):
    """A logistic regression per class, summed over the classes; difficult entries are left out [ours]. (B, classes) both -> scalar"""
    losses = F.binary_cross_entropy_with_logits(logits, (labels == 1).float(), reduction="none")
    return (losses * (labels >= 0)).sum(1).mean()


def augmented(backbone, train, test, args, world, seed):
    """Train linear layers on augmented images -> on the first process {"top-1": percent}, or {"mAP": percent} when images have
    several labels, for `layers` three of them; None on the others
    """
    device, several, layers = world.device, args.data != "folder", args.protocol == "layers"
    iters = math.ceil(args.epochs * len(train.images) / args.batch_size)
    kinds, width = ([f"{name} " for name in backbone.LAST_RELU], 16 * backbone.channels) if layers else ([""], backbone.channels)
    probes = LinearProbes([width] * len(kinds), len(train.names)).to(device)
    parallel = DistributedDataParallel(probes) if world.size > 1 else probes
    optimizer = torch.optim.SGD(probes.parameters(), args.lr, momentum=0.9, weight_decay=0)
    sampler = common.InfiniteSampler(len(train.images), args.batch_size, world, seed)
    view = LabelView(train, args.image_size, seed, jitter=float(layers))
    loader = common.make_loader(view, sampler, args.batch_size // world.size, args.workers, None, device)

    unreadable = set()
    for iteration, (images, jitter, labels, replaced) in zip(progress(range(iters), desc=args.protocol, unit=" its"), loader):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * common.warmup_cosine(iteration, iters, 0)
        outputs, labels = parallel(probed_features(backbone, images, jitter, args, device)), labels.to(device, non_blocking=True)
        loss = sum(multi_label_loss(logits, labels) if several else F.cross_entropy(logits, labels.argmax(1)) for logits in outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        unreadable.update(replaced.tolist())
    for i in unreadable - {-1}:
        say(f"cannot decode {train.images[i]}: the next image took its place")

    with torch.no_grad():
        logits_of = lambda images: torch.cat(probes(probed_features(backbone, images, None, args, device)), 1)
        logits, labels = probe.describe_images(logits_of, test, args.image_size, args.workers, "test images", world=world)
    if not world.is_main:
        return None
    scores = {kind: scores_of(part, labels, train.names, several) for kind, part in zip(kinds, np.split(finite(logits), len(kinds), 1))}
    return {kind + metric: value for kind, found in scores.items() for metric, value in found.items()}


if __name__ == "__main__":
    common.run(main, get_args)
