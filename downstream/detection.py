"""Object detection and instance segmentation: a backbone fine-tuned in Faster or Mask R-CNN.

VirTex, Sec. 4.3, App. A.3, Tabs. 3, 4; multimodal contrastive training, Sec. 4.2, Tabs. 2, 3, with
the same settings. All layers are trained; batch norm is synchronised, and re-estimated at the end.

    laptop          python virtex.py, then python -m downstream.detection
    VOC 07+12       torchrun --nproc_per_node=8 -m downstream.detection --data voc
    COCO or LVIS    torchrun --nproc_per_node=8 -m downstream.detection --data coco   (or lvis)

--root holds VOC2007/ and VOC2012/; or annotations/instances_{split}.json (LVIS: lvis_{split}.json)
beside train2017/ and val2017/. A VOC split is YEAR_LIST, or several joined by +. Boxes are of
photos as EXIF turns them. On shapes a second detector is trained from random initialisation, into
OUTPUT/random. The same command resumes. Commands of VirTex's Tabs. 1, 7, 8: papers/virtex.sh.

Scores are COCO's AP (IoU 0.50 to 0.95), AP50 and AP75, on VOC with VOC07's 11 recalls. The papers
use Detectron2, we use torchvision's parts [ours]. Known differences: box losses are smooth L1 with
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
from common import fail, number, print_main, progress
from downstream import boxes, finetune, tasks

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
    "log_every":        (10,           20,                            20),
    "checkpoint_every": (100,          1000,                          2000),
    "save_minutes":     (2.0,          10.0,                          10.0),
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


def get_args(argv=None):
    parser = common.Parser(__doc__, conflict_handler="resolve")
    tasks.add_flags(parser, DATA)
    add = parser.add_argument_group("model and optimisation").add_argument
    add("--image-size", type=number("int > 0"), help="shorter side of photos in pixels")
    add("--model", choices=("fpn", "c4"), help="c4 has no feature pyramid [Sec. 4.3]")
    add("--frozen-bn", action="store_true", help="keep batch norm as it is [Sec. 4.3, LVIS]")
    add("--schedule", choices=["9x"],
        help="longer training, with batch norm in the heads of fpn; give --weights random, "
        "too [Tab. 1]")
    add("--batch-size", type=number("int > 0"), help="photos per iteration over all processes")
    add("--iters", type=number("int > 0"), help="training iterations")
    add("--lr", type=number("> 0"), help="peak learning rate; lower it if the loss is not finite")
    add("--rois", type=number("int > 0"), help="RoIs per training photo; fewer save memory")
    add("--min-score", type=number(">= 0, < 1"), help="drop detections that score less")
    add("--bn-batches", type=number("int > 0"), help="batches for batch norm's final statistics")
    finetune.add_training_flags(parser)
    args = parser.parse_args(argv)
    column = {"shapes": 0, "voc": 1}.get(args.data, 2)
    recipe = finetune.SGD | {name: row[column] for name, row in DEFAULTS.items()}
    recipe |= LVIS if args.data == "lvis" else {}
    recipe |= NINE_TIMES if args.schedule == "9x" else {}
    recipe["lr"] *= (args.batch_size or recipe["batch_size"]) / recipe["batch_size"]
    tasks.fill_defaults(parser, args, "detection", **recipe)
    return args


def main(args):
    device = common.init_distributed()
    runs = tasks.compared_runs(args)
    for package in ["pycocotools", "faster-coco-eval"] if args.data == "lvis" else ["pycocotools"]:
        if not importlib.util.find_spec(package.replace("-", "_")):
            fail(f"{package} is needed to score detections: pip install {package}")
    train = boxes.load(args.data, args.root, args.train_split)
    val = boxes.load(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    eval_linear.report_shared(train, val)
    if train.masks != val.masks:
        fail("one of the splits has masks, and the other has none")
    train.content = None  # gigabytes that only scoring needs
    print_main(f"{len(train)} + {len(val)} photos, {len(train.names)} classes, on {device}")

    scores = {name: fine_tune(train, val, run, device) for name, run in runs.items()}
    tasks.report_trainings(scores, args, "detection on", "AP")


def fine_tune(train, val, args, device):
    """Train into args.output -> scores on `val`; {} in all processes but the first"""
    from torchvision.ops import FrozenBatchNorm2d
    from torchvision.ops._utils import split_normalization_params

    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    if not hasattr(backbone, "layer4"):
        fail(f"{backbone.arch} has no layer1 to layer4: give a ResNet")
    checkpoint = common.begin_run(args, common.fingerprint(train.images, train.objects))
    print_main(f"{args.weights}: {args.iters} iterations at lr {args.lr:g}, into {args.output}")

    if args.frozen_bn:
        plain = backbone.state_dict()
        backbone = common.build_backbone(args.arch, norm_layer=FrozenBatchNorm2d)
        backbone.load_state_dict(plain)
    elif device.type == "cuda" and common.world_size() > 1:  # SyncBatchNorm needs GPUs
        backbone = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)
    torch.manual_seed(args.seed)
    model = Detector(backbone, 1 + len(train.names), train.masks, args).to(device)
    norms, others = split_normalization_params(model)
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]  # Detectron2's default
    optimizer = common.build_optimizer(args, groups)

    photos = boxes.BoxPhotos(train, boxes.training_rows(train, args.seed))

    def losses_of(ddp, batch):
        with common.autocast(device, args.amp):
            losses = ddp(batch)  # {name: scalar}
        return {"loss": sum(losses.values()), **losses}

    def after_step(iteration):
        if iteration == args.iters:  # before the last checkpoint, by all processes
            precise_bn(model, photos, args, device)
        return {}

    finetune.run(
        model, optimizer, photos, boxes.collate, losses_of, after_step, args, device, checkpoint,
        args.iters, args.warmup, args.steps,
    )
    common.save_weights(f"{args.output}/backbone.pth", backbone)
    return evaluate(val, model, args, device) if common.is_main() else {}


class Detector(nn.Module):
    """torchvision's Faster R-CNN (with masks: Mask R-CNN) on our ResNet; class 0 is background.

    A batch of boxes.collate -> {loss: scalar} in training, otherwise for each photo
    {"boxes" (N, 4), "labels" (N,), "scores" (N,), "masks" (N, 1, H, W)}.
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
        images = [sample["image"].float() / 255 for sample in batch["samples"]]
        return self.rcnn(images, batch["samples"] if self.training else None)


def initialize(roi_heads):
    """Initialise the layers after RoI pooling as Detectron2 does; all others already match it."""
    for name, layer in roi_heads.named_modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, a=1)  # Detectron2's "Xavier"
        if name in INITIAL_STD:
            nn.init.normal_(layer.weight, std=INITIAL_STD[name])
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def precise_bn(model, photos, args, device):
    """Replace batch norm's moving averages by plain means over --bn-batches training batches, of
    which each process has its part [VirTex App. A.3: Detectron2's PRECISE_BN, with 200 batches].
    """
    batches = common.train_batches(photos, boxes.collate, args, device, 0)
    count = args.bn_batches * args.accumulate
    first = progress(islice(batches, count), desc="precise BN", total=count, leave=False)
    torch.optim.swa_utils.update_bn(first, model)


@torch.no_grad()
def evaluate(val, model, args, device):
    """Write detections.json, in COCO's results format, and a picture -> {score: percent}"""
    photos = boxes.BoxPhotos(val, range(len(val)))
    model.eval()
    results, scored = [], []
    # Four photos at a time: 300 masks of one are 0.4 GB.
    for batch in common.load_batches(photos, boxes.collate, args, device, batch_size=4):
        if batch["samples"]:
            with common.autocast(device, args.amp):
                outputs = model(batch)
            for sample, output in zip(batch["samples"], outputs):
                scored.append(sample["image_id"].item())
                results += result_rows(val, scored[-1], output)
    if len(scored) < len(val):
        lost = len(val) - len(scored)
        print_main(f"{lost} of {len(val)} photos cannot be decoded: left out of the score")
    common.save(f"{args.output}/detections.json", results)
    boxes.draw(val, results, f"{args.output}/detections.png")
    return boxes.score(val, results, scored)


def result_rows(val, i, output):
    """The detections of one photo -> rows of image_id, category_id, bbox, score, segmentation"""
    from pycocotools import mask

    category_ids = list(val.categories)
    output = {name: values.float().cpu().numpy() for name, values in output.items()}
    rows = []
    for n, (left, top, right, bottom) in enumerate(output["boxes"].tolist()):
        row = {"image_id": val.ids[i], "bbox": [left, top, right - left, bottom - top]}
        row["category_id"] = category_ids[int(output["labels"][n]) - 1]
        row["score"] = float(output["scores"][n])
        if val.masks:
            rle = mask.encode(np.asfortranarray(output["masks"][n, 0] > 0.5))
            row["segmentation"] = {**rle, "counts": rle["counts"].decode()}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(get_args())
