"""Object detection and instance segmentation: a backbone fine-tuned in Faster or Mask R-CNN.

VirTex, Sec. 4.3, App. A.3, Tabs. 3, 4; multimodal contrastive training, Sec. 4.2, Tabs. 2, 3, with
the same settings. All layers are trained, batch norm is synchronised over the GPUs, and its
statistics are re-estimated after the last iteration (precise BN).

    laptop          python virtex.py, then python -m downstream.detection
    VOC 07+12       torchrun --nproc_per_node=8 -m downstream.detection --data voc
    COCO or LVIS    torchrun --nproc_per_node=8 -m downstream.detection --data coco   (or lvis)
    IN-sup on LVIS  the same with --weights imagenet --arch resnet50 --frozen-bn   [Tab. 7]
    LVIS v0.5       ... --train-split v0.5_train --val-split v0.5_val --min-score 0   [Tab. 8]
    random start    the same with --weights random --arch resnet50 --output runs/detection_random
    pretraining     ... --data coco --weights random --arch resnet50 --schedule 9x   [Tab. 1]

--root holds VOC2007/ and VOC2012/; or annotations/instances_{split}.json (LVIS: lvis_{split}.json)
beside train2017/ and val2017/. A VOC split is YEAR_LIST, or several joined by +. On shapes a second
detector is trained from random initialisation into OUTPUT/random, and the last line compares the
two (measured: AP50 73 against 39). Rerunning the command resumes from its checkpoint.
metrics.jsonl logs four loss terms, with masks five. backbone.pth is the fine-tuned backbone.

Scores are COCO's AP (IoU 0.50 to 0.95), AP50 and AP75, on VOC with VOC07's 11 recalls. The papers
use Detectron2; here the parts are torchvision's. Known differences: box losses are smooth L1 with
beta 1/9, not L1; RoIAlign has no half-pixel shift; anchors are rounded to whole pixels; photos are
resized without antialiasing; masks are bitmaps, not polygons; batches mix tall and wide photos.
"""

import importlib.util
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import nn

import common
import eval_linear
from common import print_main, require
from downstream import baselines, boxes

# fmt: off
DATA = "shapes", "voc", "coco", "lvis"
DEFAULTS = {  #          shapes        voc [Tab. 6]                   coco [Tab. 5]
    "train_split":      ("train",      "2007_trainval+2012_trainval", "train2017"),
    "val_split":        ("val",        "2007_test",                   "val2017"),
    "model":            ("fpn",        "c4",                          "fpn"),
    "image_size":       (64,           800,                           800),   # Detectron2
    "smallest":         (1.0,          0.6,                           0.8),   # of it, in training
    "batch_size":       (8,            16,                            16),
    "lr":               (0.05,         0.02,                          0.02),
    "iters":            (400,          24_000,                        180_000),
    "warmup":           (0.1,          100 / 24_000,                  1 / 180),
    "steps":            ([3/4, 11/12], [3/4, 11/12],                  [2/3, 8/9]),
    "bn_batches":       (20,           200,                           200),   # Detectron2
    "anchor":           (8,            32,                            32),    # Detectron2
    "fpn_width":        (64,           256,                           256),   # Detectron2
    "rois":             (32,           512,                           512),   # Detectron2
    "min_score":        (0.05,         0.05,                          0.05),  # Detectron2
    "detections":       (100,          100,                           100),   # Detectron2
    "checkpoint_every": (100,          1000,                          2000),
}
PROPOSALS = {  # (fpn, c4): Detectron2's for 512 RoIs, scaled with --rois
    "rpn_pre_nms_top_n_train":  (2000, 12_000),
    "rpn_pre_nms_top_n_test":   (1000, 6000),
    "rpn_post_nms_top_n_train": (1000, 2000),
    "rpn_post_nms_top_n_test":  (1000, 1000),
}
# Tab. 7
LVIS = {"train_split": "v1_train", "val_split": "v1_val", "min_score": 1e-4, "detections": 300}
NINE_TIMES = {  # Detectron2's scratch_mask_rcnn_R_50_FPN_9x_syncbn; VirTex names no file [ours]
    "batch_size": 64,
    "lr":         0.08,
    "iters":      202_500,
    "warmup":     1000 / 202_500,
    "steps":      [187.5 / 202.5, 197.5 / 202.5],
}
INITIAL_STD = {  # Detectron2
    "box_predictor.cls_score":        0.01,
    "box_predictor.bbox_pred":        0.001,
    "mask_predictor.mask_fcn_logits": 0.001,
}
# fmt: on


def get_args(argv=None):
    given = common.peek(argv, "--data", "--schedule")
    column = {None: 0, "shapes": 0, "voc": 1}.get(given.data, 2)
    recipe = {name: row[column] for name, row in DEFAULTS.items()}
    if given.data == "lvis":
        recipe |= LVIS
    if given.schedule == "9x":
        recipe |= NINE_TIMES

    parser = common.build_parser(__doc__)
    eval_linear.backbone_flags(parser, DATA)
    add = parser.add_argument_group("model and optimisation").add_argument
    add("--image-size", type=common.positive_int, help="shorter side; training draws smaller ones")
    add("--model", choices=("fpn", "c4"), help="feature pyramid, or layer3 alone [Sec. 4.3]")
    add("--frozen-bn", action="store_true", help="freeze batch norm [Sec. 4.3, LVIS]")
    add("--schedule", choices=["9x"], help="from scratch: longer, batch norm in the heads [Tab. 1]")
    add("--batch-size", type=common.positive_int, help="images per iteration over all processes")
    add("--iters", type=common.positive_int, help="iterations of training")
    add("--lr", type=common.positive, help="peak; the default scales with the batch size")
    add("--rois", type=common.positive_int, help="RoIs per training image; fewer save memory")
    add("--min-score", type=common.fraction, help="lowest score of a detection [Tabs. 7, 8]")
    add("--bn-batches", type=common.positive_int, help="batches for precise BN; fewer are faster")
    common.run_flags(parser, "detection")
    parser.set_defaults(**{**recipe, "lr": None, "amp": "off"})  # off: as Detectron2
    args = eval_linear.parse(parser, argv)
    lr_scale = args.batch_size / recipe["batch_size"]
    args.lr = args.lr or lr_scale * recipe["lr"]
    return args


def main(args):
    world = common.init_distributed()
    if args.data == "lvis":  # check now, not after 180K iterations
        there = importlib.util.find_spec("lvis")
        require(there, "LVIS is scored by its own package: pip install lvis")
    train = boxes.load(args.data, args.root, args.train_split)
    val = boxes.load(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    require(train.masks == val.masks, "only one of the splits has masks")
    train.content = None  # gigabytes that only scoring needs
    num_classes = len(train.names)
    print_main(f"{len(train)} training and {len(val)} validation images, {num_classes} classes")

    scores = baselines.with_random_baseline(args, world, partial(fine_tune, train, val))
    if scores:
        origins = {"trained": f"from {args.weights}", "random": "from random initialisation"}
        parts = [f"{common.format_scores(scores[name])} {origins[name]}" for name in scores]
        print_main(f"{args.data}, {args.iters} iterations: {'; '.join(parts)}")


def fine_tune(train, val, args, world):
    """Train into args.output (see Run) -> {score: percent}, None on all processes but the first"""
    from torchvision.ops._utils import split_normalization_params

    device = world.device
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    require(hasattr(backbone, "layer4"), f"{backbone.arch} has no layer1 to layer4: give a ResNet")
    run = common.Run(args, "detection", world, train)

    # Model and optimizer, resumed where an earlier run stopped.
    torch.manual_seed(args.seed)
    if args.frozen_bn:
        freeze_batch_norm(backbone)
    elif device.type == "cuda" and world.size > 1:  # SyncBatchNorm needs GPUs
        backbone = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)
    model = Detector(backbone, 1 + len(train.names), train.masks, args).to(device)
    norms, others = split_normalization_params(model)
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]  # Detectron2's default
    optimizer = common.build_optimizer("sgd", groups, args.lr, 1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.rcnn.backbone.compile(dynamic=True)  # the rest depends on the number of boxes
    parallel = common.data_parallel(model, world).train()

    rows = boxes.training_rows(train, args.seed)
    samples = common.Samples(partial(boxes.make_sample, train, rows), len(rows))
    for iteration, micro_batches in run.steps(samples, boxes.collate_fn, args.iters):
        lr_scale = common.lr_factor(iteration - 1, args.iters, args.warmup, args.steps)
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part, batch in enumerate(micro_batches, 1):
            parallel.require_backward_grad_sync = part == args.accumulate  # one all-reduce a batch
            with common.autocast(device, args.amp):
                losses = parallel(batch)  # {name: scalar}
            loss = sum(losses.values())
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss, **losses)
        scaler.step(optimizer)
        scaler.update()
        run.log(lr=args.lr * lr_scale)
        if iteration == args.iters:  # before the last checkpoint, by all processes
            precise_bn(model, samples, args, world)
    if not world.is_main:
        return None  # the first process goes on alone

    common.save_weights(run.folder / "backbone.pth", backbone)
    results = detect(model, val, args, device)
    common.write_json(f"{args.output}/detections.json", results)
    scores = boxes.score(val, results)
    draw_detections(val, results, f"{args.output}/detections.png")
    return scores


# ------------------------------------------------------------------------------------- the model


def freeze_batch_norm(module):
    """Replace each batch norm by a fixed scale and shift, with its present statistics"""
    from torchvision.ops import FrozenBatchNorm2d

    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_batch_norm(child)


class Detector(nn.Module):
    """torchvision's Faster R-CNN (with masks: Mask R-CNN) on our ResNet; class 0 is background.

    Layers are initialised as in Detectron2, see `initialize`.

    A batch of images, uint8 (3, H, W) of any size -> {loss: scalar} in training, otherwise for each
    image {"boxes" (N, 4), "labels" (N,), "scores" (N,), "masks" (N, 1, H, W)}.
    """

    def __init__(self, backbone, num_classes, masks, args):
        from torchvision.models import detection
        from torchvision.models.detection.anchor_utils import AnchorGenerator
        from torchvision.models.detection.backbone_utils import BackboneWithFPN
        from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
        from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
        from torchvision.ops import MultiScaleRoIAlign

        super().__init__()
        channels = backbone.channels
        norm = type(backbone.bn1)  # FrozenBatchNorm2d, SyncBatchNorm or BatchNorm2d
        anchor_sizes = [args.anchor * 2**k for k in range(5)]
        pooling = {"sampling_ratio": 0, "canonical_scale": 7 * args.anchor}  # FPN: 224 at anchor 32
        roi_pool = partial(MultiScaleRoIAlign, ["0", "1", "2", "3"], **pooling)
        parts = {"mask_roi_pool": roi_pool(14)} if masks else {}
        if args.model == "fpn":
            levels = {f"layer{n + 1}": str(n) for n in range(4)}
            widths = [channels // 8, channels // 4, channels // 2, channels]
            width = args.fpn_width
            fpn_norm = None if args.frozen_bn else norm  # Tab. 7
            body = BackboneWithFPN(backbone, levels, widths, width, norm_layer=fpn_norm)
            anchor_sizes = [[size] for size in anchor_sizes]  # one for each level
            parts["box_roi_pool"] = roi_pool(7)
            if args.schedule == "9x":
                parts["box_head"] = FastRCNNConvFCHead((width, 7, 7), 4 * [width], [1024], norm)
                parts["mask_head"] = MaskRCNNHeads(width, 4 * [width], 1, norm)
        else:  # C4: layer4 and a batch norm form the box head
            body = backbone[:-1]
            body.out_channels = channels // 2
            anchor_sizes = [anchor_sizes]
            parts["box_roi_pool"] = roi_pool(14)
            parts["box_head"] = nn.Sequential(backbone[-1], norm(channels), nn.AdaptiveAvgPool2d(1))

        side = args.image_size
        smaller = range(round(args.smallest * side), side, 32)
        column = ("fpn", "c4").index(args.model)
        proposals = {name: row[column] * args.rois // 512 for name, row in PROPOSALS.items()}
        self.rcnn = (detection.MaskRCNN if masks else detection.FasterRCNN)(
            body,
            num_classes,
            min_size=[*smaller, side],  # training draws one of them, evaluation takes the last
            max_size=round(side * 1333 / 800),
            rpn_anchor_generator=AnchorGenerator(anchor_sizes, [[0.5, 1, 2]] * len(anchor_sizes)),
            rpn_batch_size_per_image=max(1, args.rois // 2),
            box_batch_size_per_image=args.rois,
            box_score_thresh=args.min_score,
            box_detections_per_img=args.detections,
            **proposals,
            **parts,
        )
        if args.model == "c4":
            self.rcnn.roi_heads.box_predictor = FastRCNNPredictor(channels, num_classes)
        initialize(self.rcnn.roi_heads)

    def forward(self, batch):
        images = [image.float() / 255 for image in batch["images"]]
        return self.rcnn(images, batch["targets"] if self.training else None)


def initialize(roi_heads):
    """Initialise the layers after RoI pooling as Detectron2 does; all others already match it."""
    for name, layer in roi_heads.named_modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, a=1)  # Detectron2's "Xavier"
        if name in INITIAL_STD:
            nn.init.normal_(layer.weight, std=INITIAL_STD[name])
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


# ------------------------------------------------------------------------------- after training


def precise_bn(model, samples, args, world):
    """Replace batch norm's moving averages by plain means over --bn-batches training batches

    [VirTex App. A.3: Detectron2's PRECISE_BN, with 200 batches]. Each process has its part of a
    batch, as in training.
    """
    device = world.device
    order = common.infinite_sampler(len(samples), args.batch_size, world, args.seed)
    per_rank_batch = args.batch_size // world.size
    collate_fn = boxes.collate_fn
    batches = common.loader(samples, per_rank_batch, args.workers, collate_fn, order)
    first = islice(batches, args.bn_batches)
    first = common.progress(first, desc="precise BN", total=args.bn_batches, leave=False)
    torch.optim.swa_utils.update_bn((common.to_device(batch, device) for batch in first), model)


@torch.no_grad()
def detect(model, val, args, device):
    """-> rows of COCO's results: image_id, category_id, bbox, score, segmentation (as RLE)"""
    samples = common.Samples(partial(boxes.make_sample, val, range(len(val))), len(val))
    batch_size = 4  # 300 masks of one photo are 0.4 GB
    batches = common.validation_batches(samples, args.workers, boxes.collate_fn, device, batch_size)
    model.eval()
    rows_of = {}  # each image once, even if it replaces an unreadable one
    for batch in batches:
        with common.autocast(device, args.amp):
            outputs = model(batch)
        for target, output in zip(batch["targets"], outputs):
            i = target["image_id"].item()
            rows_of[i] = boxes.result_rows(val, i, output)
    return [row for rows in rows_of.values() for row in rows]


def draw_detections(val, results, path, side=320):
    """Draw eight validation images, resized to squares, with the detections that score above 0.5"""
    from pycocotools import mask
    from torchvision.transforms.functional import pil_to_tensor, resize
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, save_image

    tiles = []
    for i in range(min(8, len(val))):
        rows = [row for row in results if row["image_id"] == val.ids[i] and row["score"] > 0.5]
        try:
            photo = pil_to_tensor(boxes.read_photo(val.images, i))
        except common.Unreadable:
            continue
        _, height, width = photo.shape
        if rows and val.masks:
            masks = np.stack([mask.decode(row["segmentation"]) for row in rows])
            photo = draw_segmentation_masks(photo, torch.tensor(masks) > 0, colors="red")
        photo = resize(photo, [side, side])
        if rows:
            corners = torch.tensor([row["bbox"] for row in rows])
            corners[:, 2:] += corners[:, :2]
            corners *= side / torch.tensor([width, height, width, height])
            labels = [f"{val.names[row['category_id']]} {row['score']:.2f}" for row in rows]
            style = {"colors": "yellow", "width": 2, "label_colors": "black", "fill_labels": True}
            photo = draw_bounding_boxes(photo, corners, labels, **style)
        tiles.append(photo / 255)
    save_image(tiles, path, nrow=4)


if __name__ == "__main__":
    common.run(main, get_args)
