"""Fine-tuning: a backbone and a linear layer, trained end to end on labelled photos.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021,
Sec. 4.3, Tab. 3 (iNaturalist 2018), App. A.3; App. A.1, Fig. 4 (IN-sup: see papers/virtex.sh).

While eval_linear.py freezes the backbone, here training starts from it. Batch norm is per process,
as in the paper's code.

    laptop          python virtex.py, then python -m downstream.finetune
    own photos      python -m downstream.finetune --data folder --root labelled \\
                        --weights runs/virtex-photos/backbone.pth --batch-size 32 --epochs 30
    a tenth of it   the same with --fraction 0.1 --output runs/finetune_tenth
    iNaturalist     torchrun --nproc_per_node=8 -m downstream.finetune --data inat
    random start    the same with --weights random --arch resnet50 --output runs/finetune_random

An image folder holds train/<class>/<photo> and val/<class>/<photo>. What to expect: the loss starts
at ln(number of classes) and drops when the learning rate falls to a tenth. On shapes a second
backbone, randomly initialised, is trained into OUTPUT/random, and the last line compares the two.
--output holds the same files as in training (docs/running.md), and the same command resumes.
"""

import math
import time

import numpy as np
import torch
from torch import nn

import common
import eval_linear
from common import fail, number, print_main
from downstream import pictures, tasks
from extras import layers

DATA = "shapes", "folder", "inat"
DEFAULTS = {  #          shapes    folder    inat
    "train_split":      ("train",  "train",  "train2018"),  # Sec. 4.3
    "val_split":        ("val",    "val",    "val2018"),    # Sec. 4.3
    "fraction":         (0.02,     1.0,      1.0),
    "epochs":           (40.0,     100.0,    100.0),        # Sec. 4.3
    "batch_size":       (32,       256,      256),          # Sec. 4.3
    "crop_min":         (0.2,      0.08,     0.08),         # see below
    "log_every":        (10,       20,       20),
    "checkpoint_every": (100,      1000,     5000),
    "save_minutes":     (2.0,      2.0,      10.0),
}
# crop_min: App. A.1 says "20-100%", which the authors' list of changes corrects to 8-100% for
# ImageNet; their iNaturalist configuration has 8-100%, and so has torchvision's training (IN-sup).
SGD = {"optimizer": "SGD", "weight_decay": 1e-4}  # Sec. 4.3, App. A.3
LR, RANDOM_LR, BATCH = 0.025, 0.1, 256  # pretrained, randomly initialised [Sec. 4.3]
STEPS = 0.7, 0.9  # of the run: where the learning rate falls to a tenth [Sec. 4.3]


def get_args(argv=None):
    parser = common.Parser(__doc__)
    tasks.add_flags(parser, DATA, amp=None)
    add = parser.add_argument_group("labels and optimisation").add_argument
    add("--fraction", type=number("> 0, <= 1"),
        help="use this fraction of the training photos of each class (default 1; shapes: 0.02)")
    add("--shots", type=number("int > 0"), help="use this many training photos of each class")
    add("--batch-size", type=number("int > 0"), help="photos per iteration over all processes")
    add("--epochs", type=number("> 0"), help="passes over the photos (default 100; shapes: 40)")
    add("--lr", type=number("> 0"), help="peak learning rate, on shapes of both runs (default "
        f"{LR} for batches of {BATCH}, {RANDOM_LR} for random weights, scaled to --batch-size)")
    add("--steps", type=number("> 0"), nargs="+", metavar="EPOCHS", help="epochs after which "
        "the learning rate falls to a tenth (default: 70%% and 90%% of --epochs)")
    add_training_flags(parser)
    args = parser.parse_args(argv)
    defaults = {name: row[DATA.index(args.data)] for name, row in DEFAULTS.items()}
    tasks.fill_defaults(parser, args, "finetune", colour_jitter=0.0, **SGD, **defaults)
    if args.fraction < 1 and args.shots:
        parser.error("give --fraction or --shots, not both")
    if args.steps and not min(1, args.epochs / 2) <= max(args.steps) < args.epochs:
        parser.error(f"--steps are epochs: at least 1, and the last below {args.epochs:g}")
    return args


def add_training_flags(parser):
    """Also of detection.py"""
    add = parser.add_argument_group("training").add_argument
    add("--accumulate", type=number("int > 0"), default=1, help="split batches, to save memory")
    add("--log-every", type=number("int > 0"), help="iterations between lines of metrics.jsonl")
    add("--checkpoint-every", type=number("int > 0"), help="iterations between checkpoints")
    add("--save-minutes", type=number("> 0"), help="minutes after which a checkpoint is due, too")


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    runs = tasks.compared_runs(args)

    # Data: photos with one label each; --fraction or --shots of those for training.
    train = labelled_split(args.data, args.root, args.train_split)
    val = labelled_split(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    eval_linear.report_shared(train, val)
    if args.fraction < 1 or args.shots:
        train = part_of_classes(train, args.fraction, args.seed, args.shots)
    counts = f"{len(train)} training and {len(val)} validation photos"
    print_main(f"{counts}, {len(train.names)} classes, on {device}, amp {args.amp}")

    scores = {name: fine_tune(train, val, run, device) for name, run in runs.items()}
    tasks.report_trainings(scores, args, "fine-tuning on", "top-1")


def fine_tune(train, val, args, device):
    """Train into args.output -> scores on `val`; {} in all processes but the first"""
    checkpoint = common.begin_run(args, common.fingerprint(train.images, train.labels))
    usual = RANDOM_LR if args.weights == "random" else LR
    lr = args.lr or usual * args.batch_size / BATCH
    iters = math.ceil(args.epochs * len(train) / args.batch_size)
    steps = [epoch / args.epochs for epoch in args.steps or ()] or STEPS
    print_main(f"{args.weights}: {iters} iterations at lr {lr:.3g}, into {args.output}")

    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    # The linear layer starts from N(0, 0.01) [App. A.1, A.3], as in the IN-sup rows [ours: they
    # follow torchvision, which has torch's default there].
    linear = layers.linear_layer(backbone.channels, len(train.names))
    model = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, model.parameters(), lr=lr)

    # Validate at most once an epoch, after at least five times as many training photos as
    # there are validation photos, and with a line of metrics.jsonl.
    photos_per_line = args.batch_size * args.log_every
    validate_every = args.log_every * math.ceil(max(len(train), 5 * len(val)) / photos_per_line)

    def loss_of(ddp, batch):
        images = common.augment(batch["image"])  # (B, 3, h, w)
        with common.autocast(device, args.amp):
            logits = ddp(images)  # (B, classes)
        return {"loss": layers.classification_loss(logits.float(), batch["labels"])}

    def after_step(iteration):
        if iteration % validate_every or iteration == iters or not common.is_main():
            return {}
        return {"validation_top1": validate(val, model, args, device)["top-1"]}

    photos = layers.LabelledPhotos(train, args)
    run(
        model, optimizer, photos, None, loss_of, after_step, args, device, checkpoint, iters,
        steps=steps,
    )
    common.save_weights(f"{args.output}/backbone.pth", backbone)
    return validate(val, model, args, device) if common.is_main() else {}


def run(
    model, optimizer, photos, collate, loss_of, after_step, args, device, checkpoint, iters,
    warmup=0.0, steps=(),
):
    """The training loop, also of detection.py; it goes on where an earlier run stopped.

    loss_of(model, batch) -> {"loss": scalar, ...}.  after_step(iteration) -> scores for the log.
    warmup, steps: of common.lr_factor
    """
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, state)
    ddp = common.data_parallel(model).train()
    batches = common.train_batches(photos, collate, args, device, done)
    log = common.Log(args, done)
    bar = common.iterations(done, iters)
    for iteration in bar:
        common.set_lr(optimizer, common.lr_factor(iteration - 1, iters, warmup, steps))

        # Gradients: DDP averages those of all processes once, after the last micro-batch.
        optimizer.zero_grad()
        for part in range(args.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - started
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            losses = loss_of(ddp, batch)
            scaler.scale(losses["loss"] / args.accumulate).backward()
            log.add(**losses)
        scaler.step(optimizer)
        scaler.update()

        # Log and save.
        row = log.means() if iteration % args.log_every == 0 else {}
        scores = after_step(iteration)
        if row:
            row["lr"] = optimizer.param_groups[0]["lr"]
            log.write(iteration, row | scores)
            bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
        common.save_if_due(args, iteration, state, validated=iteration == iters)


def labelled_split(name, root, split):
    """One split of "shapes", "folder" or "inat" -> eval_linear.LabelData, one label per photo"""
    if name == "inat":
        return inat_labels(root or "datasets/inat", split)
    data = eval_linear.label_data(name, root, split)  # at least two classes
    if name == "shapes":  # only scenes with one shape, which is the class
        data = data.select(np.flatnonzero(data.labels.sum(1) == 1))
        data.labels = data.labels.argmax(1)
    return data


def inat_labels(root, split):
    """{split}.json of iNaturalist 2018, photos below `root` -> eval_linear.LabelData"""
    path = f"{root}/{split}.json"
    content = tasks.read_coco(path)
    category_of = {row["image_id"]: row["category_id"] for row in content["annotations"]}
    images = [image for image in content["images"] if image["id"] in category_of]
    lost = len(content["images"]) - len(images)
    if lost:
        print_main(f"{path}: {lost} of {len(content['images'])} photos have no label: left out")
    paths = [f"{root}/{image['file_name']}" for image in images]
    names, labels = np.unique([category_of[image["id"]] for image in images], return_inverse=True)
    if len(names) < 2:
        fail(f"all photos of {path} are of one class")
    return eval_linear.LabelData(pictures.photo_files(paths).images, labels, names.tolist())


def part_of_classes(data, fraction, seed, shots=None):
    """This fraction of each class, at least one photo, or `shots` photos -> eval_linear.LabelData

    The class frequencies are those of the whole, as in VirTex's subsets of ImageNet [App. A.1].
    A smaller fraction with the same seed is a subset of a larger one.
    """
    shuffled = np.random.default_rng(seed).permutation(len(data))
    keep = []
    for k in np.unique(data.labels):
        members = shuffled[data.labels[shuffled] == k]
        keep.extend(members[: shots or max(1, round(fraction * len(members)))])
    return data.select(np.sort(keep))


@torch.no_grad()
def validate(val, model, args, device):
    """On the centres of the photos ("resize 256, crop 224" [App. A.1]), in one process

    -> {"top-1": percent, "commonest class": percent that guessing it would score}
    """

    def logits_of(images):
        with common.autocast(device, args.amp):
            return model(common.augment(images))

    model.eval()
    squares = eval_linear.CentralSquares(val, args.image_size)
    logits, readable = eval_linear.run_over_photos(logits_of, squares, args, device)
    model.train()
    labels = torch.from_numpy(val.labels[readable])
    scores = eval_linear.score(logits, labels, val.names)
    print_main(f"validation: {eval_linear.format_scores(scores)}")
    return {name: round(score, 2) for name, score in scores.items()}


if __name__ == "__main__":
    main(get_args())
