"""Linear classifiers on frozen features: what a backbone is worth, by the protocols of the papers.

    python eval_linear.py --weights runs/virtex/backbone.pth --data folder --root photos
    python eval_linear.py --weights runs/virtex/backbone.pth --data voc07 --root VOCdevkit
    python eval_linear.py --weights random --arch resnet50 --data voc07 --root VOCdevkit
    torchrun --nproc_per_node=8 eval_linear.py --weights FILE --data folder --root imagenet --protocol sgd-virtex --image-size 224

`--weights` takes a backbone.pth or checkpoint.pth of ours, an official VirTex checkpoint, MoCo, SwAV, VICReg, DINO or
torchvision files, `imagenet` (torchvision's, downloaded) or `random`. The backbone is always in eval mode.

    svm-virtex    one SVM per class on pooled features, C by cross-validation; mAP [VirTex Sec. 4.1, App. A.1]
    sgd-virtex    one linear layer trained with augmentation; top-1 [VirTex Sec. 4.1, App. A.1]
"""

import argparse
import math
import os

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

PROTOCOLS = ("svm-virtex", "sgd-virtex")


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="a checkpoint file, imagenet or random")
    parser.add_argument("--arch", choices=sorted(common.BACKBONES), help="needed for imagenet and random only: a file's is recognised")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="svm-virtex", help="svm-virtex for VOC07 and small sets, sgd-virtex for ImageNet")
    parser.add_argument("--data", choices=sorted(common.LABEL_SPLITS), default="shapes", help="labelled images; folder is ImageNet's layout")
    parser.add_argument("--root", help="folder of the data set (default datasets/<name>)")
    parser.add_argument("--train-split", help="default: trainval for voc07, train2017 for coco, train otherwise")
    parser.add_argument("--val-split", help="default: test for voc07, val2017 for coco, val otherwise")
    parser.add_argument("--train-images", type=int, help="train on at most this many images, drawn by --seed (default 2000 for shapes, all otherwise)")
    parser.add_argument("--image-size", type=int, default=224, help="side of the crops; the one the backbone was trained at is best [App. A.1]")
    parser.add_argument("--runs", type=int, default=1, help="repeat with different seeds: mean and standard deviation")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--output", help="folder of result.json (default runs/eval_linear)", default="runs/eval_linear")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count()), help="data processes per process")
    parser.add_argument("--amp", choices=("bf16", "fp16", "off"), default="off", help="precision of the frozen backbone; off for numbers to report")

    sgd = parser.add_argument_group("sgd-virtex [App. A.1]")
    sgd.add_argument("--epochs", type=int, default=100, help="passes over the training images")
    sgd.add_argument("--batch-size", type=int, default=256, help="images per iteration over all processes")
    sgd.add_argument("--lr", type=float, help="maximum, cosine to zero (default 0.3 at batch 256, scaled linearly)")
    args = parser.parse_args(argv)

    train, val = common.LABEL_SPLITS[args.data]
    args.train_split, args.val_split = args.train_split or train, args.val_split or val
    if args.train_images is None and args.data == "shapes":
        args.train_images = 2000
    args.lr = args.lr or 0.3 * args.batch_size / 256
    if args.weights in ("random", "imagenet") and not args.arch:
        fail(f"--weights {args.weights} needs --arch")
    if args.protocol == "sgd-virtex" and args.data != "folder":
        fail("--protocol sgd-virtex wants one label per image: --data folder")
    if args.batch_size < 1 or args.batch_size % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"--batch-size {args.batch_size} cannot be divided over {os.environ.get('WORLD_SIZE')} processes: it is the global batch")
    if args.runs < 1 or args.epochs < 1 or args.image_size < 1:
        fail("--runs, --epochs and --image-size must be at least 1")
    return args


def main(args):
    world = common.start_processes()
    if args.protocol == "svm-virtex" and world.size > 1:
        fail("--protocol svm-virtex is one process's work: start it without torchrun")
    train, test = (probe.label_data(args.data, args.root, split) for split in (args.train_split, args.val_split))
    if train.names != test.names:
        fail(f"the splits have different classes: {sorted(set(train.names) ^ set(test.names))[:5]} are in one of them only")
    if args.train_images:
        train = train.select(np.sort(np.random.default_rng(args.seed).permutation(len(train.images))[: args.train_images]))
    say(f"{len(train.images)} training and {len(test.images)} test images of {len(train.names)} classes; {args.protocol}")

    scores = []
    for run in range(args.runs):
        seed = args.seed + run
        backbone = load_backbone(args.weights, args.arch, seed).to(world.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        if args.protocol == "svm-virtex":
            scores.append(svm_virtex(backbone, train, test, args, world, seed))
        else:
            scores.append(sgd_virtex(backbone, train, test, args, world, seed))
    common.end_processes(world)
    if not world.is_main:
        return

    mean = {name: float(np.mean([score[name] for score in scores])) for name in scores[0]}
    deviation = {name: float(np.std([score[name] for score in scores])) for name in scores[0]}
    width = max(map(len, mean))
    for name in sorted(mean, key=lambda name: (name not in train.names, name)):
        say(f"{name:{width}}  {mean[name]:6.2f}" + (f" ± {deviation[name]:.2f}" if args.runs > 1 else ""))
    os.makedirs(args.output, exist_ok=True)
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


def svm_virtex(backbone, train, test, args, world, seed):
    """-> {class: average precision, "mAP": their mean}"""
    scores = probe.probe_scores(backbone, train, test, args, world.device, "features", seed)
    if math.isnan(scores["mAP"]):
        fail("no class has both positive and negative training images and a positive test image")
    left_out = [name for name in train.names if name not in scores]
    if left_out:
        say(f"{len(left_out)} classes without training or test examples are left out: {', '.join(left_out[:5])}")
    return scores


# ------------------------------------------------------------------------------------------ sgd-virtex


class LabelView(Dataset):
    """One labelled image: a random crop of 20-100% with a random flip.

    -> uint8 (size, size, 3), class, index of an image that could not be decoded and is replaced by the next, or -1
    """

    def __init__(self, data, size, seed):
        self.data, self.size, self.seed = data, size, seed
        self.classes = data.labels.argmax(1)

    def __getitem__(self, key):
        epoch, index = key
        rng = common.sample_rng(self.seed, epoch, index)
        image, index, unreadable = common.read_crop(self.data.images, index, common.random_crop(rng), self.size)
        image = image[:, ::-1].copy() if rng.random() < 0.5 else image
        return image, self.classes[index], unreadable[0] if unreadable else -1


def sgd_virtex(backbone, train, test, args, world, seed):
    """Train one linear layer on pooled features -> {"top-1": percent}"""
    device, iters = world.device, math.ceil(args.epochs * len(train.images) / args.batch_size)
    linear = nn.Linear(backbone.channels, len(train.names)).to(device)
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    parallel = DistributedDataParallel(linear) if world.size > 1 else linear
    optimizer = torch.optim.SGD(linear.parameters(), args.lr, momentum=0.9, weight_decay=0)
    sampler = common.InfiniteSampler(len(train.images), args.batch_size, world, seed)
    loader = common.make_loader(LabelView(train, args.image_size, seed), sampler, args.batch_size // world.size, args.workers, None, device)

    def pooled(images):
        with torch.no_grad(), common.autocast(device, args.amp):
            return backbone(common.augment(images.to(device, non_blocking=True))).float().mean((2, 3))

    unreadable = set()
    for iteration, (images, classes, replaced) in zip(progress(range(iters), desc="linear layer", unit=" its"), loader):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * common.warmup_cosine(iteration, iters, 0)
        loss = F.cross_entropy(parallel(pooled(images)), classes.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        unreadable.update(replaced.tolist())
    for i in unreadable - {-1}:
        say(f"cannot decode {train.images[i]}: the next image took its place")

    x, y = probe.extract_features(backbone, test, args.image_size, device, args.amp, args.workers, "test features")
    with torch.no_grad():
        correct = linear(torch.from_numpy(x).to(device)).argmax(1).cpu().numpy() == y.argmax(1)
    return {"top-1": 100 * float(correct.mean())}


if __name__ == "__main__":
    common.run(main, get_args)
