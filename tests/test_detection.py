"""downstream/detection.py and boxes.py: readers, scores, precise BN, and the real script."""

import json
from collections import Counter
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import CPU, checkpoint_in, kill_at, metrics, refusal, result, run_here
from PIL import Image

import common
from downstream import boxes, detection
from extras import shapes

frPyObjects = pytest.importorskip("pycocotools.mask").frPyObjects
RESNET18 = "--weights", "random", "--arch", "resnet18"


@pytest.fixture
def coco(tmp_path):
    """Six scenes of 64 x 56 px in COCO's layout; each has two cups, a crowd and a thin box."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "photos").mkdir()
    images, rows = [], []
    for n in range(6):
        shapes.draw(n, 64).crop((0, 0, 64, 56)).save(tmp_path / "photos" / f"{n}.png")
        images.append({"id": 10 + n, "file_name": f"{n}.png", "height": 56, "width": 64})
        objects = (5, 20 + n, 7, 0), (9, 30, 7, 0), (20, 20, 3, 1), (3, 0, 3, 0)
        for x, side, category, crowd in objects:
            row = {"id": len(rows) + 1, "image_id": 10 + n, "category_id": category}
            row |= {"bbox": [x, 10, side, side], "area": side**2, "iscrowd": crowd}
            polygon = [x, 10, x + side, 10, x + side, 10 + side, x, 10 + side]
            whole = {"counts": [0, 64 * 56], "size": [56, 64]}
            rows.append({**row, "segmentation": whole if crowd else [polygon]})
    categories = [{"id": 7, "name": "cup"}, {"id": 3, "name": "cat"}]
    content = {"images": images, "annotations": rows, "categories": categories}
    (tmp_path / "annotations" / "instances_photos.json").write_text(json.dumps(content))
    return tmp_path


def test_coco_objects(coco):
    """Classes from 1 by their ids, corners and masks flipped; crowds and empty boxes left out."""
    data = boxes.load("coco", str(coco), "photos")
    assert data.names == ["cat", "cup"] and data.ids == list(range(10, 16))
    assert [found[:5] for found in data.objects_of(2)] == [[2, 5, 10, 22, 22], [2, 9, 10, 30, 30]]
    photo = np.asarray(Image.open(coco / "photos" / "2.png"))
    seen = set()
    for seed in range(4):
        target = boxes.BoxPhotos(data, [2]).sample(0, np.random.default_rng(seed))
        pixels = target["image"].permute(1, 2, 0).numpy()
        flipped = not (pixels == photo).all()
        assert (pixels == (photo[:, ::-1] if flipped else photo)).all()
        for (x, y, right, bottom), mask in zip(target["boxes"].int().tolist(), target["masks"]):
            assert mask.sum() == mask[y:bottom, x:right].sum() == (right - x) * (bottom - y)
        first = [64 - 27, 10, 64 - 5, 32] if flipped else [5, 10, 27, 32]
        assert target["boxes"][0].tolist() == first and target["labels"].tolist() == [2, 2]
        seen.add(flipped)
    assert seen == {True, False}
    assert boxes.BoxPhotos(data, [2])[0].keys() == {"image", "image_id"}


@pytest.mark.parametrize("form", ["polygons", "string", "list"])
def test_own_coco_file(coco, form):
    """Any form of mask, ids from 0, no areas: ground truth as detections scores 100."""
    file, results = coco / "annotations" / "instances_photos.json", []
    content = json.loads(file.read_text())
    content["annotations"] = [row for row in content["annotations"] if row["bbox"][2]]
    for n, row in enumerate(content["annotations"]):
        x, y, w, h = row["bbox"]
        runs = [56 * x + y, h] + (w - 1) * [56 - h, h]  # down each column
        rle = {"size": [56, 64], "counts": [*runs, 56 * 64 - sum(runs)]}
        string = {**rle, "counts": frPyObjects(rle, 56, 64)["counts"].decode()}
        row["id"] = n
        del row["area"]
        if not row["iscrowd"]:
            results.append({**row, "segmentation": string, "score": 0.9})
            row["segmentation"] = {"string": string, "list": rle}.get(form, row["segmentation"])
    file.write_text(json.dumps(content))
    data = boxes.load("coco", str(coco), "photos")
    assert [row["area"] for row in data.content["annotations"][:2]] == [20**2, 30**2]
    masks = boxes.make_target(data, 3, False)["masks"]
    assert masks.sum() == masks[0, 10:33, 5:28].sum() + masks[1, 10:40, 9:39].sum() == 23**2 + 30**2
    assert list(boxes.score(data, results, range(6)).values()) == 6 * [100.0]


def voc07_ap(rows, count, threshold):
    """Rows: (score, IoU with its object, that one's number, difficult) -> mean over 11 recalls"""
    right, wrong, taken, points = 0, 0, set(), []
    for _, overlap, n, difficult in sorted(rows, reverse=True):
        if overlap < threshold or n in taken:
            wrong += 1
        elif not difficult:  # those count neither way
            right += 1
            taken.add(n)
        points.append((right / count, right / max(1, right + wrong)))
    recalls = np.arange(0, 1.1, 0.1)
    return sum(max([p for found, p in points if found >= r], default=0) for r in recalls) / 11


def test_voc07_score():
    """VOC's own score in plain loops: 11 recalls, and difficult objects that are ignored."""
    rng, objects, results, rows = np.random.default_rng(0), [], [], {"cat": [], "dog": []}
    for n in range(300):  # six in a photo, far from each other
        name, (w, h), x = rng.choice(["cat", "dog"]), rng.uniform(30, 70, 2), 100 * (n % 6)
        row = {"image_id": 1 + n // 6, "category_id": name, "bbox": [x, 0, w, h]}
        difficult = int(rng.random() < 0.3)
        more = {"id": n + 1, "area": w * h, "iscrowd": difficult, "segmentation": []}
        objects.append({**row, **more})
        found = [row["bbox"] + rng.normal(0, s, 4) for s in (3, 3, 6, 30)[rng.integers(3) :]]
        found.append([x + 1, 1, w / 3, h / 3])  # too small, also for a difficult one
        for box in found:
            left, top, width, height = np.clip(box, 1, None).tolist()
            score = rng.random()
            results.append({**row, "bbox": [left, top, width, height], "score": score})
            common_width = min(left + width, x + w) - max(left, x)
            common_area = max(0, common_width) * max(0, min(top + height, h) - top)
            overlap = common_area / (width * height + w * h - common_area)
            rows[name].append((score, overlap, n, difficult))
    images = [{"id": n + 1, "path": "", "width": 600, "height": 70} for n in range(50)]
    categories = [{"id": name, "name": name} for name in rows]
    content = {"images": images, "annotations": objects, "categories": categories}
    scores = boxes.score(boxes.BoxData(content, "voc"), results, range(50))
    counts = Counter(o["category_id"] for o in objects if not o["iscrowd"])
    aps = []
    for threshold in np.arange(0.5, 1, 0.05):
        of_classes = [voc07_ap(rows[name], counts[name], threshold) for name in rows]
        aps.append(100 * np.mean(of_classes))
    assert scores == pytest.approx({"AP": np.mean(aps), "AP50": aps[0], "AP75": aps[5]})
    assert 30 < scores["AP50"] < 90


def test_precise_bn(coco, monkeypatch):
    """The first batch norm's statistics are plain means over literal ones, of a process's share."""
    args = detection.get_args([*RESNET18, *"--batch-size 4 --bn-batches 3 --workers 0".split()])
    data = boxes.load("coco", str(coco), "photos")
    backbone = common.build_backbone("resnet18")
    model = detection.Detector(backbone, 3, True, args)
    photos = boxes.BoxPhotos(data, range(6))
    monkeypatch.setattr(common, "rank", lambda: 1)
    monkeypatch.setattr(common, "world_size", lambda: 2)
    detection.precise_bn(model, photos, args, CPU)

    order, moments = common.infinite_sampler(6, 4, args.seed), []
    for _ in range(3):
        images = [photos[next(order)]["image"].float() / 255 for _ in range(2)]
        resized, _ = model.rcnn.transform(images)
        values = backbone.conv1(resized.tensors).double().detach()
        moments.append(torch.stack(torch.var_mean(values, (0, 2, 3))))
    found = torch.stack([backbone.bn1.running_var, backbone.bn1.running_mean])
    torch.testing.assert_close(found, (sum(moments) / 3).float(), rtol=1e-4, atol=1e-6)


def test_pyramid(coco, tmp_path):
    """The real script: its files; a killed run ends with the same bits; other boxes are refused."""
    flags = "--data coco --train-split photos --val-split photos --image-size 32 --batch-size 2"
    flags += " --workers 0 --log-every 1 --rois 2 --bn-batches 1 --iters 3 --checkpoint-every 1"
    command = "downstream.detection", *RESNET18, *flags.split(), "--root", coco, "--output"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here([*command, whole])
    content = checkpoint_in(whole)
    assert metrics(whole)[0]["lr"] == 0  # warm-up
    others, of_norms = content["optimizer"]["param_groups"]
    assert (others["weight_decay"], of_norms["weight_decay"]) == (1e-4, 0)  # Detectron2
    assert len(of_norms["params"]) == 2 * (20 + 8)
    backbone = torch.load(whole / "backbone.pth", weights_only=True)
    for name, value in content["model"].items():
        if "body" in name:
            assert torch.equal(value, backbone.pop(name.removeprefix("rcnn.backbone.body.")))
    assert not backbone and len(result(whole)["random"]) == 6

    kill_at(2, [*command, killed])
    assert checkpoint_in(killed)["iteration"] == 1
    run_here([*command, killed])
    resumed = checkpoint_in(killed)["model"]
    assert all(torch.equal(value, resumed[name]) for name, value in content["model"].items())

    file = coco / "annotations" / "instances_photos.json"
    file.write_text(file.read_text().replace('"bbox": [5, ', '"bbox": [6, '))  # one more pixel
    assert "whole holds a run with other data" in refusal([*command, whole])


@pytest.mark.parametrize(
    "flags, lr, iters, warmup, drops, score, detections",
    [
        ("voc", 0.02, 24_000, 100, [18_000, 22_000], 0.05, 100),
        ("voc --batch-size 8", 0.01, 24_000, 100, [18_000, 22_000], 0.05, 100),
        ("coco", 0.02, 180_000, 1000, [120_000, 160_000], 0.05, 100),
        ("lvis", 0.02, 180_000, 1000, [120_000, 160_000], 1e-4, 300),
        ("coco --schedule 9x", 0.08, 202_500, 1000, [187_500, 197_500], 0.05, 100),
    ],
)
def test_recipes(flags, lr, iters, warmup, drops, score, detections):
    """In iterations: the warm-up, and where the rate falls [VirTex Sec. 4.3, App. A.3]"""
    args = detection.get_args([*RESNET18, "--data", *flags.split()])
    assert (args.lr, args.iters) == (lr, iters)
    assert (args.min_score, args.detections) == (score, detections)
    in_iterations = [round(fraction * args.iters) for fraction in (args.warmup, *args.steps)]
    assert in_iterations == [warmup, *drops]


def detector(*flags, backbone=None):
    """For five classes with masks -> torchvision's model"""
    args = detection.get_args([*RESNET18, "--data", *flags])
    torch.manual_seed(0)
    return detection.Detector(backbone or common.build_backbone("resnet18"), 6, True, args).rcnn


def norms(module):
    return [x for x in module.modules() if isinstance(x, torch.nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("model", ["fpn", "c4"])
def test_heads_are_those_of_detectron2(model):
    """What torchvision starts otherwise; a pretrained layer4 stays; batch norm is synchronised."""
    backbone = torch.nn.SyncBatchNorm.convert_sync_batchnorm(common.build_backbone("resnet18"))
    for norm in norms(backbone):
        torch.nn.init.constant_(norm.bias, 5.0)
    rcnn = detector("coco", "--model", model, backbone=backbone)
    heads = rcnn.roi_heads
    assert heads.box_roi_pool.sampling_ratio == heads.mask_roi_pool.sampling_ratio == 0
    layers = heads.box_predictor.cls_score, heads.box_predictor.bbox_pred
    for layer, std in zip((*layers, heads.mask_predictor.mask_fcn_logits), (0.01, 0.001, 0.001)):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.06)
    biases = {x.max().item() for name, x in heads.named_parameters() if name.endswith("bias")}
    assert biases == ({0} if model == "fpn" else {0, 5})
    assert {type(x) for x in norms(rcnn)} == {torch.nn.SyncBatchNorm}
    assert len(norms(rcnn)) == 20 + (8 if model == "fpn" else 1)
    if model == "fpn":
        limit = (3 / (256 * 7 * 7)) ** 0.5
        assert heads.box_head.fc6.weight.max().item() == pytest.approx(limit, rel=0.001)
        heads = detector("coco", "--schedule", "9x").roi_heads
        assert len(norms(heads.box_head)) == len(norms(heads.mask_head)) == 4


def test_rare_classes_of_lvis():
    """max(1, sqrt(0.001 / f)) times, in the mean over seeds [VirTex App. A.3]"""
    objects = 4 * [[[1], [2]]] + 9996 * [[[1]]]  # class 1 in all photos, class 2 in four
    data = MagicMock(source="lvis", objects_of=objects.__getitem__, __len__=lambda _: 10_000)
    rows = np.concatenate([boxes.training_rows(data, seed) for seed in range(20)])
    times = np.bincount(rows) / 20
    assert (times[4:] == 1).all()
    assert times[:4].mean() == pytest.approx(np.sqrt(0.001 / 0.0004), abs=0.15)
