"""Fine-tuning: a backbone and a linear layer, trained end to end on labelled images.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021,
Sec. 4.3, Tab. 3 (iNaturalist 2018), App. A.3; App. A.1, Fig. 4 (IN-sup).

While eval_linear.py freezes the backbone, here training starts from it: the better the backbone,
the fewer labels are needed. --fraction keeps a fraction of the labels of each class. Batch norm is
per process, as in the paper's code.

    laptop          python virtex.py, then python -m downstream.finetune
    own photos      python -m downstream.finetune --data folder --root photos --image-size 112 \\
                        --batch-size 32 --epochs 30
    a tenth of it   the same with --fraction 0.1 --output runs/finetune_tenth
    iNaturalist     torchrun --nproc_per_node=8 -m downstream.finetune --data inat
    random start    torchrun --nproc_per_node=8 -m downstream.finetune --data inat \\
                        --weights random --arch resnet50 --output runs/finetune_random
    IN-sup-10%      torchrun --nproc_per_node=8 -m downstream.finetune --data folder \\
                        --root datasets/imagenet --weights random --arch resnet50 \\
                        --fraction 0.1 --epochs 90 --steps 30 60 --output runs/insup_10

An image folder holds train/<class>/<image> and val/<class>/<image>. What to expect: the loss starts
at ln(number of classes) and drops when the learning rate falls to a tenth (at 70% of the run).
On shapes a second backbone, randomly initialised, is trained into OUTPUT/random, and the last line
compares the two; on other data run it as a command of its own, as above. --output holds the
same files as in training (docs/output.md): rerunning the command resumes from its checkpoint.
"""

import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import common
import eval_linear
from common import image_files, print_main
from downstream import baselines

# fmt: off
DEFAULTS = {  #          shapes    folder    inat
    "train_split":      ("train",  "train",  "train2018"),  # Sec. 4.3
    "val_split":        ("val",    "val",    "val2018"),    # Sec. 4.3
    "fraction":         (0.02,     1.0,      1.0),
    "image_size":       (48,       224,      224),          # App. A.1
    "epochs":           (40.0,     100.0,    100.0),        # Sec. 4.3
    "batch_size":       (32,       256,      256),          # Sec. 4.3
    "crop_min":         (0.2,      0.08,     0.08),         # see below
    "colour_jitter":    (0.0,      0.0,      0.0),          # App. A.1
    "log_every":        (10,       20,       20),
    "checkpoint_every": (100,      1000,     1000),
}
# fmt: on
# crop_min: App. A.1 says "20-100%", which the authors' list of changes corrects to 8-100% for
# ImageNet; their iNaturalist configuration has 8-100%, and so has torchvision's training (IN-sup).
DATA = "shapes", "folder", "inat"
LR, RANDOM_LR, BATCH = 0.025, 0.1, 256  # pretrained, randomly initialised [Sec. 4.3]
STEPS = (0.7, 0.9)  # of the run: where the learning rate falls to a tenth [Sec. 4.3]


def get_args(argv=None):
    parser = common.build_parser(__doc__)
    eval_linear.backbone_flags(parser, DATA)
    add = parser.add_argument_group("data and optimisation").add_argument
    add("--fraction", type=common.fraction, help="train on this fraction of each class")
    add("--shots", type=common.positive_int, help="train on this many images of each class")
    add("--image-size", type=common.positive_int, help="side of the crops")
    add("--epochs", type=common.positive, help="passes over the images; more for few images")
    steps = "epochs after which the learning rate falls to a tenth (default: after 70%% and 90%%)"
    add("--steps", type=common.positive, nargs="+", help=steps)
    add("--batch-size", type=common.positive_int, help="images per iteration over all processes")
    rates = f"{LR} at batch {BATCH}, {RANDOM_LR} for random weights; scales with the batch"
    add("--lr", type=common.positive, help=f"initial; on shapes for both starts (default {rates})")
    add("--weight-decay", type=float, default=1e-4, help="of all weights [Sec. 4.3]")
    common.run_flags(parser, "finetune")

    data = common.peek(argv, "--data").data
    column = DATA.index(data) if data in DATA else 0
    parser.set_defaults(**{name: row[column] for name, row in DEFAULTS.items()})
    args = eval_linear.parse(parser, argv)
    return args


def main(args):
    world = common.init_distributed()
    args.amp = common.choose_amp(world.device, args.amp)

    # Refuse a wrong file before reading data.
    args.arch = eval_linear.load_backbone(args.weights, args.arch, args.seed).arch

    # Data: images with one label each; --fraction or --shots of those for training.
    train = labelled_split(args.data, args.root, args.train_split)
    val = labelled_split(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    if args.fraction < 1 or args.shots:
        train = part_of_classes(train, args.fraction, args.seed, args.shots)
    num_images, num_classes = len(train.images), len(train.names)
    counts = f"{num_images} training and {len(val.images)} validation images"
    print_main(f"{counts}, {num_classes} classes")

    scores = baselines.with_random_baseline(args, world, partial(fine_tune, train, val))
    if scores:
        origins = {"trained": args.weights, "random": "random initialisation"}
        parts = [f"{scores[name]['top-1']} from {origins[name]}" for name in scores]
        labels = f"top-1 on {args.data} after fine-tuning on {num_images} labels"
        print_main(f"{labels}: {', '.join(parts)}")


def fine_tune(train, val, args, world):
    """Train on `train` into args.output (see common.Run) -> {"top-1": percent on `val`}

    None on all processes but the first.
    """
    device = world.device
    num_images = len(train.images)
    run = common.Run(args, "finetune", world, train)
    usual = RANDOM_LR if args.weights == "random" else LR
    lr = args.lr or usual * args.batch_size / BATCH
    iters = math.ceil(args.epochs * num_images / args.batch_size)
    steps = [epoch / args.epochs for epoch in args.steps or ()] or STEPS
    print_main(f"{args.weights}: learning rate {lr:.3g}, {iters} iterations")

    # Model and optimizer, resumed where an earlier run stopped.
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    model = Classifier(backbone, len(train.names))
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer("sgd", model.parameters(), lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.compile()
    parallel = common.data_parallel(model, world).train()

    # Validate at most once an epoch, after at least five times as many training images as
    # there are validation images, and with a line of metrics.jsonl.
    images_per_line = args.batch_size * args.log_every
    lines = math.ceil(max(num_images, 5 * len(val.images)) / images_per_line)
    validate_every = lines * args.log_every
    make_sample = partial(eval_linear.labelled_photo, train, args)
    samples = common.Samples(make_sample, num_images)
    for iteration, micro_batches in run.steps(samples, eval_linear.collate_labelled, iters):
        lr_scale = common.lr_factor(iteration - 1, iters, steps=steps)
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part, batch in enumerate(micro_batches, 1):
            parallel.require_backward_grad_sync = part == args.accumulate  # one all-reduce a batch
            labels = batch["labels"]
            with common.autocast(device, args.amp):
                logits = parallel(common.augment(batch["images"]))  # (B, classes)
            loss = eval_linear.classification_loss(logits.float(), labels, multi_label=False)
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss)
        scaler.step(optimizer)
        scaler.update()
        if iteration % validate_every == 0 and iteration < iters:
            run.validation = validate(model, val, args, world) or {}
        run.log(lr=lr * lr_scale)

    # The other processes end: the first one scores the result alone.
    if world.is_main:
        common.save_weights(run.folder / "backbone.pth", model.backbone)
        scores = validate(model, val, args, common.World(0, 1, device))
        return {"top-1": round(scores["top1"], 2)}


# --------------------------------------------------------------------------------- labelled images


def labelled_split(name, root, split):
    """One split of "shapes", "folder" or "inat", one label per image -> eval_linear.LabelData"""
    if name == "inat":
        return inat_labels(root or "datasets/inat", split)
    data = eval_linear.label_data(name, root, split)
    if name == "shapes":  # only scenes with one shape, which is the class
        data = data.select(np.flatnonzero(data.labels.sum(1) == 1))
    return data


def inat_labels(root, split):
    """{split}.json of iNaturalist 2018, images below `root` -> eval_linear.LabelData"""
    path = Path(root, f"{split}.json")
    with common.error_context(f"{path} should hold iNaturalist's images and categories"):
        content = json.loads(path.read_bytes())
        category_ids = sorted(category["id"] for category in content["categories"])
        class_of_category = {category: k for k, category in enumerate(category_ids)}
        category_of = {row["image_id"]: row["category_id"] for row in content["annotations"]}
        paths, labels = [], []
        for image in content["images"]:
            paths.append(os.path.join(root, image["file_name"]))
            labels.append(class_of_category[category_of[image["id"]]])
    names = list(map(str, category_ids))
    return eval_linear.LabelData(image_files(paths), np.array(labels), names)


def part_of_classes(data, fraction, seed, shots=None):
    """This fraction of each class, at least one image, or `shots` images -> eval_linear.LabelData

    The class frequencies are those of the whole, as in VirTex's subsets of ImageNet [App. A.1].
    A smaller fraction with the same seed is a subset of a larger one.
    """
    classes = eval_linear.class_of(data.labels)
    shuffled = np.random.default_rng(seed).permutation(len(classes))
    keep = []
    for k in np.unique(classes):
        members = shuffled[classes[shuffled] == k]
        keep.extend(members[: shots or max(1, round(fraction * len(members)))])
    return data.select(np.sort(keep))


# ---------------------------------------------------------------------------- model and validation


class Classifier(nn.Module):
    """The backbone, average pooling and a linear layer: (B, 3, h, w) -> logits (B, classes)

    The linear layer starts with weights from N(0, 0.01) and bias 0 [App. A.1, A.3].
    """

    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone = backbone
        [self.linear] = eval_linear.LinearLayers([backbone.channels], num_classes)

    def forward(self, images):
        return self.linear(self.backbone(images).mean((2, 3)))


@torch.no_grad()
def validate(model, val, args, world):
    """Top-1 on the centres of the images ("resize 256, crop 224" [App. A.1]) -> {"top1": percent}

    Each process scores a part. None on all processes but the first.
    """
    if world.size > 1:  # use the first process's batch norm statistics
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def logits_of(images):
        images = images.to(world.device, non_blocking=True)
        with common.autocast(world.device, args.amp):
            return model(common.augment(images))

    model.eval()
    logits, readable = eval_linear.run_over_images(logits_of, val.images, args, world)
    model.train()
    if world.is_main:
        eval_linear.check_finite(logits)
        top1 = eval_linear.top1(logits, val.labels[readable])
        print_main(f"validation: top1 {top1:.2f}")
        return {"top1": top1}


if __name__ == "__main__":
    common.run(main, get_args)
