"""Object detection and instance segmentation: a backbone fine-tuned in Faster or Mask R-CNN.

VirTex, Sec. 4.3, App. A.3, Tabs. 3, 4; multimodal contrastive training, Sec. 4.2, Tabs. 2, 3, with
the same settings. All layers are trained, batch norm is synchronised over the GPUs, and its
statistics are estimated anew before the scores are taken (precise BN).

    laptop          python virtex.py, then python -m downstream.detection
    VOC 07+12       torchrun --nproc_per_node=8 -m downstream.detection --data voc
    COCO or LVIS    torchrun --nproc_per_node=8 -m downstream.detection --data coco   (or lvis)
    random start    the same with --weights random --arch resnet50 --output runs/detection_random

--root holds VOC2007/ and VOC2012/; or annotations/instances_{split}.json (LVIS: lvis_v1_{split})
beside train2017/ and val2017/. VOC's splits are years and lists, joined by +. On shapes a second
detector, from random initialisation, is trained into OUTPUT/random, and the last line compares the
two (measured: AP50 55 against 23). Rerunning the command resumes from its checkpoint.
metrics.jsonl names the terms of the loss: four, with masks five.

Scores are COCO's: AP over IoU 0.50 to 0.95, AP50, AP75. The papers use Detectron2, here the parts
are torchvision's. What is known to differ: VOC's AP is the mean over COCO's 101 recalls, not over
VOC07's 11; the box loss is smooth L1 with beta 1/9, not L1; RoIAlign has no half-pixel shift.
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
from downstream import boxes

# fmt: off
DATA = "shapes", "voc", "coco", "lvis"
DEFAULTS = {  #          shapes        voc [Tab. 6]                   coco [Tab. 5]
    "recipe":           ("demo",       "paper",                       "paper"),
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
PROPOSALS = {  # of Detectron2 at its 512 RoIs, in proportion to --rois: (fpn, c4)
    "rpn_pre_nms_top_n_train":  (2000, 12_000),
    "rpn_pre_nms_top_n_test":   (1000, 6000),
    "rpn_post_nms_top_n_train": (1000, 2000),
    "rpn_post_nms_top_n_test":  (1000, 1000),
}
LVIS = {"train_split": "train", "val_split": "val", "min_score": 1e-4, "detections": 300}  # Tab. 7
# fmt: on


def get_args(argv=None):
    data = common.peek(argv, "--data").data or "shapes"
    column = {"shapes": 0, "voc": 1}.get(data, 2)
    recipe = {name: row[column] for name, row in DEFAULTS.items()}
    if data == "lvis":
        recipe |= LVIS

    parser = common.Parser(__doc__)
    eval_linear.backbone_flags(parser, DATA)
    add = parser.add_argument_group("model and optimisation").add_argument
    add("--image-size", type=common.positive_int, help="shorter side; training draws smaller ones")
    add("--model", choices=("fpn", "c4"), help="feature pyramid, or layer3 alone [Sec. 4.3]")
    add("--batch-size", type=common.positive_int, help="images per iteration over all processes")
    add("--iters", type=common.positive_int, help="length of the run")
    add("--lr", type=common.positive, help="peak; the default scales with the batch size")
    add("--rois", type=common.positive_int, help="per image in training; fewer to save memory")
    add("--bn-batches", type=common.positive_int, help="of precise BN; few for a quick look")
    common.run_flags(parser, "detection")
    parser.set_defaults(**{**recipe, "lr": None, "amp": "off"})  # off: as Detectron2
    args = eval_linear.parse(parser, argv)
    lr_scale = args.batch_size / recipe["batch_size"]
    args.lr = args.lr or lr_scale * recipe["lr"]
    return args


def main(args):
    world = common.init_distributed()
    if args.data == "lvis":  # now: after 180K iterations it would be late
        there = importlib.util.find_spec("lvis")
        require(there, "LVIS is scored by its own package: pip install lvis")
    train = boxes.load(args.data, args.root, args.train_split)
    val = boxes.load(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    require(train.masks == val.masks, "only one of the splits has masks")
    train.content = None  # gigabytes, which only the scores need
    num_classes = len(train.names)
    print_main(f"{len(train)} training and {len(val)} validation images, {num_classes} classes")

    scores = eval_linear.with_random_baseline(args, world, partial(fine_tune, train, val))
    if scores:
        origins = {"trained": f"from {args.weights}", "random": "from random initialisation"}
        parts = [f"{common.format_scores(scores[name], 1)} {origins[name]}" for name in scores]
        print_main(f"{args.data}, {args.iters} iterations: {'; '.join(parts)}")


def fine_tune(train, val, args, world):
    """Train into args.output, see common.Run -> {score: percent}, None but on the first process"""
    from torchvision.ops._utils import split_normalization_params

    device = world.device
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    require(hasattr(backbone, "layer4"), f"{backbone.arch} has no layer1 to layer4: give a ResNet")
    run = common.Run(args, "detection", world, train)

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = Detector(backbone, 1 + len(train.names), train.masks, args)
    if device.type == "cuda" and world.size > 1:  # there is none for CPUs
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device)
    norms, others = split_normalization_params(model)
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]  # Detectron2's default
    optimizer = common.build_optimizer("sgd", groups, args.lr, 1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.rcnn.backbone.compile(dynamic=True)  # the rest depends on the number of boxes
    parallel = common.data_parallel(model, world).train()

    rows = boxes.training_rows(train, args.seed)
    samples = common.Samples(partial(boxes.make_sample, train, rows), len(rows), args.seed)
    for iteration, batch in run.steps(samples, boxes.collate_fn, args.iters):
        lr_scale = common.lr_factor(iteration - 1, args.iters, args.warmup, args.steps)
        common.set_lr(optimizer, lr_scale)
        with common.autocast(device, args.amp):
            losses = parallel(batch)  # {name: scalar}
        loss = sum(losses.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.log(loss=loss, lr=args.lr * lr_scale, **losses)
    if not world.is_main:
        return None  # the first process goes on alone

    precise_bn(model, samples, args, device)
    results = detect(model, val, args, device)
    common.write_json(f"{args.output}/detections.json", results)
    scores = boxes.score(val, results)
    draw_detections(val, results, f"{args.output}/detections.png")
    return scores


# ------------------------------------------------------------------------------------- the model


class Detector(nn.Module):
    """torchvision's Faster R-CNN, with masks Mask R-CNN, on our ResNet; class 0 is background.

    A batch of images, uint8 (3, H, W) of any size -> {loss: scalar} in training, otherwise for each
    image {"boxes" (N, 4), "labels" (N,), "scores" (N,), "masks" (N, 1, H, W)}.
    """

    def __init__(self, backbone, num_classes, masks, args):
        from torchvision.models import detection
        from torchvision.models.detection.anchor_utils import AnchorGenerator
        from torchvision.models.detection.backbone_utils import BackboneWithFPN
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
        from torchvision.ops import MultiScaleRoIAlign

        super().__init__()
        channels = backbone.channels
        anchor_sizes = [args.anchor * 2**k for k in range(5)]
        heads = {}
        if args.model == "fpn":
            levels = {f"layer{n + 1}": str(n) for n in range(4)}
            widths = [channels // 8, channels // 4, channels // 2, channels]
            norm = nn.BatchNorm2d
            body = BackboneWithFPN(backbone, levels, widths, args.fpn_width, norm_layer=norm)
            scale = 7 * args.anchor  # 224 for anchors from 32 on
            roi_pool = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 0, canonical_scale=scale)
            anchor_sizes = [[size] for size in anchor_sizes]  # one for each level
        else:  # C4: layer4 and a batch norm are the head of the boxes
            body = backbone[:-1]
            body.out_channels = channels // 2
            roi_pool = MultiScaleRoIAlign(["0"], 14, 0)
            norm = nn.BatchNorm2d(channels)
            heads["box_head"] = nn.Sequential(backbone[-1], norm, nn.AdaptiveAvgPool2d(1))
            anchor_sizes = [anchor_sizes]

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
            box_roi_pool=roi_pool,
            box_batch_size_per_image=args.rois,
            box_score_thresh=args.min_score,
            box_detections_per_img=args.detections,
            **proposals,
            **heads,
        )
        if args.model == "c4":
            self.rcnn.roi_heads.box_predictor = FastRCNNPredictor(channels, num_classes)

    def forward(self, batch):
        images = [image.float() / 255 for image in batch["images"]]
        return self.rcnn(images, batch["targets"] if self.training else None)


# ------------------------------------------------------------------------------- after training


def precise_bn(model, samples, args, device):
    """Batch norm's statistics become plain means of those of --bn-batches batches of training

    instead of moving averages [VirTex App. A.3: Detectron2's PRECISE_BN, with 200 batches].
    """
    torch.manual_seed(args.seed)
    single_process = common.World(0, 1, device)  # with whole batches
    order = common.infinite_sampler(len(samples), args.batch_size, single_process, args.seed)
    collate_fn = boxes.collate_fn
    batches = common.loader(samples, args.batch_size, args.workers, collate_fn, device, order)
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
            rows_of[i] = result_rows(val, i, output)
    return [row for rows in rows_of.values() for row in rows]


def result_rows(val, i, output):
    """The detections of one image, see Detector -> rows of COCO's results"""
    from pycocotools import mask

    category_ids = list(val.names)
    output = {name: values.float().cpu().numpy() for name, values in output.items()}
    rows = []
    for n, (left, top, right, bottom) in enumerate(output["boxes"].tolist()):
        row = {
            "image_id": val.ids[i],
            "category_id": category_ids[int(output["labels"][n]) - 1],
            "bbox": [left, top, right - left, bottom - top],
            "score": float(output["scores"][n]),
        }
        if val.masks:
            rle = mask.encode(np.asfortranarray(output["masks"][n, 0] > 0.5))
            row["segmentation"] = {**rle, "counts": rle["counts"].decode()}
        rows.append(row)
    return rows


def draw_detections(val, results, path, side=320):
    """Eight validation images, made square, with what was detected with a score above 0.5"""
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
            photo = draw_bounding_boxes(
                photo,
                corners,
                labels,
                colors="yellow",
                width=2,
                label_colors="black",
                fill_labels=True,
            )
        tiles.append(photo / 255)
    save_image(tiles, path, nrow=4)


if __name__ == "__main__":
    common.run(main, get_args)
