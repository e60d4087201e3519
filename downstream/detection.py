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
two (measured: AP50 55 against 23). The same command goes on after a stop.
metrics.jsonl names the terms of the loss: four, with masks five.

Scores are COCO's: AP over IoU 0.50 to 0.95, AP50, AP75. The papers use Detectron2, here the parts
are torchvision's. What is known to differ: VOC's AP is the mean over COCO's 101 recalls, not over
VOC07's 11; the box loss is smooth L1 with beta 1/9, not L1; RoIAlign has no half-pixel shift.
"""

from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import nn

import common
import eval_linear
from common import check, say
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
LVIS = {"train_split": "train", "val_split": "val", "min_score": 1e-4, "detections": 300}  # Tab. 7
# fmt: on


def get_args(argv=None):
    parser = common.Parser(__doc__)
    eval_linear.backbone_flags(parser, DATA)
    add = parser.add_argument_group("model and optimisation").add_argument
    add("--image-size", type=common.image_side, help="shorter side; training draws smaller ones")
    add("--model", choices=("fpn", "c4"), help="feature pyramid, or layer3 alone [Sec. 4.3]")
    add("--batch-size", type=common.dim, help="images per iteration over all processes")
    add("--iters", type=common.count, help="length of the run")
    add("--lr", type=common.positive, help="peak; the default scales with the batch size")
    add("--rois", type=common.count, help="per image in training; fewer when memory runs out")
    add("--bn-batches", type=common.count, help="batches of precise BN; few for a quick look")
    common.run_flags(parser, "detection")

    data = common.look(argv, "--data").data or DATA[0]
    column = {"shapes": 0, "voc": 1}.get(data, 2)
    defaults = {flag: row[column] for flag, row in DEFAULTS.items()}
    defaults |= LVIS if data == "lvis" else {}
    lr = defaults.pop("lr") / defaults["batch_size"]
    parser.set_defaults(**defaults, amp="off", probe_every=0)  # off: as Detectron2
    args = eval_linear.parse(parser, argv)
    common.refuse_uneven_batch(parser, args.batch_size)
    args.lr = args.lr or lr * args.batch_size
    return args


def main(args):
    world = common.start()
    if args.data == "lvis":
        boxes.lvis_package()  # now: after 180K iterations it would be late
    train = boxes.load(args.data, args.root, args.train_split)
    val = boxes.load(args.data, args.root, args.val_split)
    eval_linear.check_same_classes(train, val)
    check(train.masks == val.masks, "only one of the splits has masks")
    train.content = None  # gigabytes, which only the scores need
    say(f"{len(train)} training and {len(val)} validation images, {len(train.names)} classes")

    train_from = partial(fine_tune, train, val)
    scores = eval_linear.from_both_starts(args, world, train_from)
    if scores:
        origins = {"trained": f"from {args.weights}", "random": "from random initialisation"}
        parts = [f"{common.in_words(scores[name], 1)} {origins[name]}" for name in scores]
        say(f"{args.data}, {args.iters} iterations: {'; '.join(parts)}")


def fine_tune(train, val, args, world):
    """Train into args.output, see common.Run -> {score: percent}, None but on the first process"""
    from torchvision.ops._utils import split_normalization_params

    device = world.device
    run = common.Run(args, "detection", world, train, val)
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    check(hasattr(backbone, "layer4"), f"{backbone.arch} has no layer1 to layer4: give a ResNet")

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
    samples = common.Samples(partial(boxes.sample, train, rows), len(rows), args.seed)
    for iteration, batch in run.steps(samples, boxes.collate, args.iters, None, backbone):
        factor = common.lr_factor(iteration - 1, args.iters, args.warmup, args.steps)
        common.set_lr(optimizer, factor)
        with common.autocast(device, args.amp):
            losses = parallel(batch)
        loss = sum(losses.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.log(loss=loss, lr=args.lr * factor, **losses)
    if not world.is_main:
        return None  # the first process goes on alone

    precise_bn(model, samples, args, device)
    found = detect(model, val, args, device)
    common.write_json(f"{args.output}/detections.json", found)
    scores = boxes.score(val, found)
    draw_detections(val, found, f"{args.output}/detections.png")
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
        channels, side, heads = backbone.channels, args.image_size, {}
        anchors = [args.anchor * 2**k for k in range(5)]
        if args.model == "fpn":
            levels = {f"layer{n + 1}": str(n) for n in range(4)}
            widths = [channels // 8, channels // 4, channels // 2, channels], args.fpn_width
            body = BackboneWithFPN(backbone, levels, *widths, norm_layer=nn.BatchNorm2d)
            how = {"canonical_scale": 7 * args.anchor}  # 224 for anchors from 32 on
            heads["box_roi_pool"] = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 0, **how)
            sizes, before_nms, after_nms = [[size] for size in anchors], (2000, 1000), (1000, 1000)
        else:
            body, layer4 = backbone[:-1], backbone[-1]
            body.out_channels = channels // 2
            heads["box_roi_pool"] = MultiScaleRoIAlign(["0"], 14, 0)
            norm, pool = nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1)
            heads["box_head"] = nn.Sequential(layer4, norm, pool)
            sizes, before_nms, after_nms = [anchors], (12_000, 6000), (2000, 1000)

        # Detectron2's numbers of proposals, in proportion to its 512 RoIs.
        before_nms, after_nms = np.array((before_nms, after_nms)) * args.rois // 512
        smaller = range(round(args.smallest * side), side, 32)
        self.rcnn = (detection.MaskRCNN if masks else detection.FasterRCNN)(
            body,
            num_classes,
            min_size=[*smaller, side],  # training draws one of them, evaluation takes the last
            max_size=round(side * 1333 / 800),
            rpn_anchor_generator=AnchorGenerator(sizes, [[0.5, 1.0, 2.0]] * len(sizes)),
            rpn_pre_nms_top_n_train=before_nms[0],
            rpn_pre_nms_top_n_test=before_nms[1],
            rpn_post_nms_top_n_train=after_nms[0],
            rpn_post_nms_top_n_test=after_nms[1],
            rpn_batch_size_per_image=max(1, args.rois // 2),
            box_batch_size_per_image=args.rois,
            box_score_thresh=args.min_score,
            box_detections_per_img=args.detections,
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
    alone = common.World(0, 1, device)  # with whole batches

    def batches():
        sampler = common.infinite_sampler(len(samples), args.batch_size, alone, args.seed)
        how = args.batch_size, args.workers, boxes.collate, device, sampler
        first = islice(common.loader(samples, *how), args.bn_batches)
        for batch in common.progress(first, desc="precise BN", total=args.bn_batches, leave=False):
            del batch["unreadable"]  # named in training
            yield common.to_device(batch, device)

    torch.manual_seed(args.seed)
    torch.optim.swa_utils.update_bn(batches(), model)


def detect(model, val, args, device):
    """-> rows of COCO's results: image_id, category_id, bbox, score, segmentation (as RLE)"""
    from pycocotools import mask

    samples = common.Samples(partial(boxes.sample, val, range(len(val))), len(val))
    how = args.workers, boxes.collate, device, "detection", 4  # 300 masks of one photo are 0.4 GB
    category_ids, found = list(val.names), {}
    model.eval()
    for batch in common.validation_batches(samples, *how):
        with torch.no_grad(), common.autocast(device, args.amp):
            outputs = model(batch)
        for target, output in zip(batch["targets"], outputs):
            rows = found[target["image_id"].item()] = []  # once, if it replaces an unreadable one
            output = {name: values.float().cpu().numpy() for name, values in output.items()}
            for n, (left, top, right, bottom) in enumerate(output["boxes"].tolist()):
                row = {"category_id": category_ids[int(output["labels"][n]) - 1]}
                row |= {"bbox": [left, top, right - left, bottom - top]}
                row["score"] = float(output["scores"][n])
                if val.masks:
                    inside = mask.encode(np.asfortranarray(output["masks"][n, 0] > 0.5))
                    row["segmentation"] = {**inside, "counts": inside["counts"].decode()}
                rows.append(row)
    return [{"image_id": val.ids[i], **row} for i, rows in found.items() for row in rows]


def draw_detections(val, found, path, side=320):
    """Eight validation images, made square, with what was detected with a score above 0.5"""
    from pycocotools import mask
    from torchvision.transforms.functional import pil_to_tensor, resize
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, save_image

    tiles, words = [], {"colors": "yellow", "width": 2, "label_colors": "black"}
    for i in range(min(8, len(val))):
        rows = [row for row in found if row["image_id"] == val.ids[i] and row["score"] > 0.5]
        try:
            photo = pil_to_tensor(boxes.read_photo(val.images, i))
        except common.Unreadable:
            continue
        inside = [mask.decode(row["segmentation"]) for row in rows if val.masks]
        if inside:
            photo = draw_segmentation_masks(photo, torch.tensor(np.stack(inside)) > 0, colors="red")
        scale = side / torch.tensor(photo.shape[:0:-1] * 2)
        photo = resize(photo, [side, side])
        if rows:
            corners = torch.tensor([row["bbox"] for row in rows])
            corners[:, 2:] += corners[:, :2]
            labels = [f"{val.names[row['category_id']]} {row['score']:.2f}" for row in rows]
            photo = draw_bounding_boxes(photo, corners * scale, labels, fill_labels=True, **words)
        tiles.append(photo / 255)
    save_image(tiles, path, nrow=4)


if __name__ == "__main__":
    common.run(main, get_args)
