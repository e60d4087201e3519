"""downstream/detection.py and boxes.py: readers, scores, precise BN, and the real script."""

import importlib.util
import json
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU, checkpoint_in, kill_at, metrics, refusal, result, run_here
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sklearn.metrics import average_precision_score

import common
import shapes
from downstream import boxes, detection

# Pictures of 32 pixels: what runs is everything, what is learned is nothing.
TINY = [
    *("--weights", "random", "--arch", "resnet18", "--image-size", 32, "--batch-size", 2),
    *("--workers", 0, "--log-every", 1, "--bn-batches", 2, "--rois", 8),
]


def command(*flags):
    return ["downstream.detection", *TINY, *flags]


def square(x, y, side):
    return [[x, y, x + side, y, x + side, y + side, x, y + side]]


@pytest.fixture
def coco(tmp_path):
    """Six scenes of 64 px in COCO's layout, as both splits; each has a crowd and a thin box."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "photos").mkdir()
    images, rows = [], []
    for scene in range(6):
        shapes.draw(scene, 64).save(tmp_path / "photos" / f"{scene}.png")
        images.append({"id": 10 + scene, "file_name": f"{scene}.png", "height": 64, "width": 64})
        kinds = [(5.0, 7, 0, 20 + scene), (9.0, 7, 0, 30), (20.0, 3, 1, 20), (3.0, 3, 0, 0)]
        for x, category, crowd, side in kinds:
            row = {"id": len(rows) + 1, "image_id": 10 + scene, "category_id": category}
            row |= {"bbox": [x, 10.0, side, side], "area": side**2, "iscrowd": crowd}
            rows.append({**row, "segmentation": square(x, 10.0, side)})
    categories = [{"id": 7, "name": "cup"}, {"id": 3, "name": "cat"}]
    content = {"images": images, "annotations": rows, "categories": categories}
    (tmp_path / "annotations" / "instances_photos.json").write_text(json.dumps(content))
    return tmp_path


def of_coco(root):
    return "--data", "coco", "--root", root, "--train-split", "photos", "--val-split", "photos"


def test_coco_objects(coco):
    """Classes from 1 by their ids, corners and masks flipped; crowds and empty boxes left out."""
    data = boxes.load("coco", str(coco), "photos")
    assert list(data.names.values()) == ["cat", "cup"] and data.ids == list(range(10, 16))
    assert [found[:5] for found in data.objects_of(2)] == [[2, 5, 10, 22, 22], [2, 9, 10, 30, 30]]
    photo = np.asarray(Image.open(coco / "photos" / "2.png"))
    seen = set()
    for seed in range(8):
        sample = boxes.make_sample(data, [2], 0, np.random.default_rng(seed))
        target, pixels = sample["target"], sample["image"].permute(1, 2, 0).numpy()
        flipped = not (pixels == photo).all()
        assert (pixels == (photo[:, ::-1] if flipped else photo)).all()
        for (x, y, right, bottom), mask in zip(target["boxes"].int().tolist(), target["masks"]):
            inside = torch.zeros(64, 64, dtype=torch.uint8)
            inside[y:bottom, x:right] = 1
            assert torch.equal(mask, inside)
        first = [64 - 27, 10, 64 - 5, 32] if flipped else [5, 10, 27, 32]
        assert target["boxes"][0].tolist() == first and target["labels"].tolist() == [2, 2]
        seen.add(flipped)
    assert seen == {True, False}
    assert boxes.make_sample(data, [2], 0, None)["target"].keys() == {"image_id"}


VOC = """<annotation><size><width>60</width></size>{}</annotation>"""
OBJECT = """<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin>
<xmax>{}</xmax><ymax>{}</ymax></bndbox><part><name>head</name></part></object>"""


@pytest.fixture
def voc(tmp_path):
    """A photo of 2007 with a dog, a difficult dog and a cat; one of 2012 with a cat."""
    one = [("dog", 0, 1, 1, 20, 20), ("dog", 1, 31, 1, 50, 20), ("cat", 0, 1, 31, 20, 50)]
    for year, name, objects in (("2007", "000012", one), ("2012", "2008_01", one[2:])):
        folder = tmp_path / f"VOC{year}"
        for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / part).mkdir(parents=True)
        text = VOC.format("".join(OBJECT.format(*found) for found in objects))
        (folder / "Annotations" / f"{name}.xml").write_text(text)
        Image.new("RGB", (60, 60), "red").save(folder / "JPEGImages" / f"{name}.jpg")
        (folder / "ImageSets" / "Main" / "trainval.txt").write_text(f"{name}\n")
    return tmp_path


def test_voc_objects(voc):
    """Both years; pixels count from 1 and the last belongs to the box; difficult ones stay."""
    data = boxes.load("voc", str(voc), "2007_trainval+2012_trainval")
    assert list(data.names) == ["cat", "dog"] and not data.masks and len(data) == 2
    expected = [[2, 0, 0, 20, 20, []], [2, 30, 0, 20, 20, []], [1, 0, 30, 20, 20, []]]
    assert data.objects_of(0) == expected and data.objects_of(1) == expected[2:]
    assert [row["iscrowd"] for row in data.content["annotations"]] == [0, 1, 0, 0]
    assert data.images[1] == str(voc / "VOC2012" / "JPEGImages" / "2008_01.jpg")


def test_difficult_objects_are_ignored(voc):
    """Any number of detections of a difficult object; a small one within it is a false alarm."""
    data = boxes.load("voc", str(voc), "2007_trainval")
    cat = {"image_id": 1, "category_id": "cat", "bbox": [0, 30, 20, 20], "score": 0.9}
    dog, difficult, beside, within = [0, 0, 20, 20], [30, 0, 20, 20], [31, 0, 20, 20], [35, 5, 5, 5]
    # VOC's own matching leaves the difficult one out; cats, found as they are, have 100.
    after_false_alarm = 100 * average_precision_score([False, True], [0.7, 0.5])
    for others, expected in ([], 100), ([(within, 0.7)], (100 + after_false_alarm) / 2):
        rows = [cat]
        for box, score in [(difficult, 0.9), (beside, 0.8), (dog, 0.5), *others]:
            rows.append({"image_id": 1, "category_id": "dog", "bbox": box, "score": score})
        assert boxes.score(data, rows)["AP50"] == pytest.approx(expected)
    assert after_false_alarm == 50


def test_lvis_images_and_resampling(coco):
    """Photos of both folders of COCO; max(1, sqrt(0.001 / f)) times, on average."""
    path = coco / "annotations" / "instances_photos.json"
    content = json.loads(path.read_text())
    for image in content["images"]:
        image["coco_url"] = f"http://images.cocodataset.org/photos/{image.pop('file_name')}"
    (coco / "annotations" / "lvis_v1_val.json").write_text(json.dumps(content))
    data = boxes.load("lvis", str(coco), "val")
    assert data.images[3] == str(coco / "photos" / "3.png") and data.masks

    class Rare:
        """Class 1 in all of 10,000 images, class 2 in the first 4: sqrt(0.001 / 0.0004) = 1.58"""

        def __len__(self):
            return 10_000

        def objects_of(self, i):
            return [[1], [2]] if i < 4 else [[1]]

    times = np.zeros(10_000)
    for seed in range(20):
        rows = boxes.repeat_rare(list(range(10_000)), Rare(), seed)
        times += np.bincount(rows, minlength=10_000)
    assert (times[4:] == 20).all()
    assert times[:4].sum() / 80 == pytest.approx(np.sqrt(0.001 / 0.0004), abs=0.15)


def detections_of(data):
    """The ground truth as detections, crowds too: they are ignored"""
    truth = COCO()
    truth.imgs = {row["id"]: row for row in data.content["images"]}
    rows = []
    for row in data.content["annotations"]:
        rows.append({key: row[key] for key in ("image_id", "category_id", "bbox")})
        rows[-1]["score"] = 1.0
        if data.masks:
            rows[-1]["segmentation"] = truth.annToRLE(row)
    return rows


def test_ground_truth_scores_100(coco, voc):
    coco_data = boxes.load("coco", str(coco), "photos")
    annotations = coco_data.content["annotations"]
    coco_data.content["annotations"] = [row for row in annotations if row["area"]]
    voc_data = boxes.load("voc", str(voc), "2007_trainval+2012_trainval")
    for data, count in (coco_data, 6), (voc_data, 3), (boxes.load("shapes", None, "val"), 3):
        scores = boxes.score(data, detections_of(data))
        assert scores == pytest.approx(dict.fromkeys(scores, 100)) and len(scores) == count
    assert boxes.score(voc_data, []) == {"AP": 0, "AP50": 0, "AP75": 0}


def test_lvis_scores_are_those_of_its_package(coco, monkeypatch):
    """Here its interface only, which the real package has; without it one line says what to do."""
    if not importlib.util.find_spec("lvis"):
        assert "pip install lvis" in refusal(command("--data", "lvis", "--root", coco))
    data = boxes.load("coco", str(coco), "photos")
    data.source = "lvis"

    def evaluation(truth, results, kind):
        assert truth == data.path and results[1] == 300
        score = {"bbox": 0.25, "segm": 0.5}[kind]
        scores = {"AP": score, "AP50": 2 * score, "AP75": 0, "APr": 9}
        return types.SimpleNamespace(run=lambda: None, get_results=lambda: scores)

    package = types.ModuleType("lvis")
    package.LVIS, package.LVISEval = lambda path: path, evaluation
    package.LVISResults = lambda truth, rows, max_dets: (rows, max_dets)
    monkeypatch.setitem(sys.modules, "lvis", package)
    expected = {"AP": 25, "AP50": 50, "AP75": 0, "mask AP": 50, "mask AP50": 100, "mask AP75": 0}
    assert boxes.score(data, detections_of(data)) == expected


def test_scores_are_those_of_pycocotools(coco):
    """It reads our json of detections, here of noisy ones, and the annotations by itself."""
    data = boxes.load("coco", str(coco), "photos")
    rng, rows = np.random.default_rng(0), detections_of(data)
    for row in rows:
        row["bbox"] = (np.array(row["bbox"]) + rng.normal(0, 1.5, 4)).tolist()
        row["score"] = float(rng.random())
        row["segmentation"]["counts"] = row["segmentation"]["counts"].decode()
    path = coco / "detections.json"
    path.write_text(json.dumps(rows))
    scores = boxes.score(data, rows)
    truth = COCO(str(coco / "annotations" / "instances_photos.json"))
    for kind, prefix in (("bbox", ""), ("segm", "mask ")):
        evaluation = COCOeval(truth, truth.loadRes(str(path)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        for name, expected in zip(boxes.SCORES, evaluation.stats):
            assert scores[prefix + name] == pytest.approx(100 * expected)
    assert 1 < scores["AP"] < 99 and 1 < scores["mask AP"] < 99


def test_precise_bn():
    """The first batch norm's statistics are plain means over batches of literal ones."""
    args = detection.get_args(["--weights", "random", "--arch", "resnet18", "--bn-batches", "3"])
    args.batch_size, args.workers = 2, 0
    data = boxes.load("shapes", None, "val")
    torch.manual_seed(0)
    backbone = common.build_backbone("resnet18")
    model = detection.Detector(backbone, 9, False, args)
    samples = common.Samples(lambda i, rng: boxes.make_sample(data, range(500), i, rng), 500, 0)
    detection.precise_bn(model, samples, args, CPU)

    order = common.infinite_sampler(500, 2, ALONE, 0)
    moments = []
    for _ in range(3):
        images = [samples[next(order)]["image"].float() / 255 for _ in range(2)]
        resized, _ = model.rcnn.transform(images)
        values = backbone.conv1(resized.tensors).double().detach()
        moments.append(torch.stack(torch.var_mean(values, (0, 2, 3))))
    var, mean = sum(moments) / 3
    assert torch.allclose(backbone.bn1.running_mean.double(), mean, rtol=1e-4, atol=1e-6)
    assert torch.allclose(backbone.bn1.running_var.double(), var, rtol=1e-4)


def test_killed_ends_with_the_same_bits(coco, tmp_path):
    """SIGKILL between two checkpoints; also what a run leaves in its folder."""
    flags = *of_coco(coco), "--model", "c4", "--rois", 4, "--bn-batches", 1
    flags += "--iters", 3, "--checkpoint-every", 2, "--output"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(command(*flags, whole))
    kill_at(3, command(*flags, killed))
    assert "resuming from iteration 2" in run_here(command(*flags, killed))
    one, other = checkpoint_in(whole)["model"], checkpoint_in(killed)["model"]
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert (whole / "detections.json").read_bytes() == (killed / "detections.json").read_bytes()
    assert result(whole)["random"] == result(killed)["random"]

    rows = metrics(killed)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    terms = "loss_classifier loss_box_reg loss_mask loss_objectness loss_rpn_box_reg".split()
    assert rows[0]["loss"] == pytest.approx(sum(rows[0][term] for term in terms), rel=1e-4)
    assert Image.open(killed / "detections.png").width > 4 * 320
    detections = json.loads((killed / "detections.json").read_text())
    assert detections[0].keys() == {"image_id", "category_id", "bbox", "score", "segmentation"}


def test_three_iterations_on_coco(real_data, tmp_path):
    """Photos of COCO at 32 px, masks and all, in a feature pyramid"""
    flags = "--data", "coco", "--root", real_data / "coco-mini", "--output", tmp_path
    args = detection.get_args(list(map(str, (*TINY, *flags, "--iters", 3, "--bn-batches", 1))))
    args.detections = 5
    detection.main(args)
    assert len(metrics(tmp_path)) == 3
    masks = {f"mask {name}" for name in boxes.SCORES}
    assert result(tmp_path)["random"].keys() == {*boxes.SCORES, *masks}


def test_schedules():
    """[VirTex Sec. 4.3, App. A.3] as far as flags decide them; the rate scales with the batch."""

    def rates(args, *iterations):
        schedule = args.iters, args.warmup, args.steps
        return [args.lr * common.lr_factor(i, *schedule) for i in iterations]

    flags = ["--weights", "random", "--arch", "resnet50"]
    voc = detection.get_args([*flags, "--data", "voc"])
    assert (voc.model, voc.iters, voc.lr, voc.batch_size) == ("c4", 24_000, 0.02, 16)
    first = rates(voc, 50, 100, 17_999, 18_000, 21_999, 22_000)
    assert first == pytest.approx([0.01, 0.02, 0.02, 0.002, 0.002, 0.0002])
    lvis = detection.get_args([*flags, "--data", "lvis", "--batch-size", "8"])
    assert (lvis.model, lvis.min_score, lvis.detections, lvis.lr) == ("fpn", 1e-4, 300, 0.01)
    last = rates(lvis, 119_999, 120_000, 159_999, 160_000)
    assert last == pytest.approx([0.01, 0.001, 0.001, 0.0001])
    assert detection.get_args([*flags, "--batch-size", "4", "--lr", "0.3"]).lr == 0.3


def test_c4_is_the_papers():
    """Body up to layer3, RoIs of 14x14 through layer4 and a batch norm, 15 anchors of 32 to 512."""
    args = detection.get_args(["--weights", "random", "--arch", "resnet18", "--data", "voc"])
    backbone = common.build_backbone("resnet18")
    model = detection.Detector(backbone, 21, False, args).rcnn
    assert model.backbone[-1] is backbone.layer3 and len(model.backbone) == 7
    head = model.roi_heads.box_head
    assert head[0] is backbone.layer4 and head[1].num_features == 512
    assert model.roi_heads.box_roi_pool.output_size == (14, 14)
    assert model.rpn.anchor_generator.sizes == [[32, 64, 128, 256, 512]]
    assert model.transform.min_size == [*range(480, 801, 32)] and model.transform.max_size == 1333
    assert model.rpn.head.cls_logits.out_channels == 15
    assert model.rpn._pre_nms_top_n == {"training": 12_000, "testing": 6000}
    assert model.rpn._post_nms_top_n == {"training": 2000, "testing": 1000}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_refusals(coco, voc, tmp_path):
    out = "--output", tmp_path / "out"
    for flags, words in (
        ((*of_coco(coco), "--weights", "runs/none.pth"), "runs/none.pth"),
        ((*of_coco(coco), "--arch", "vgg16_bn"), "has no layer1"),
        (("--data", "coco", "--root", "no"), "no/annotations/instances_train2017.json"),
        (("--data", "voc", "--root", voc, "--train-split", "2009_x"), "splits are as 2007_test"),
    ):
        assert words in refusal(command(*flags, *out))
    path = coco / "annotations" / "instances_photos.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    assert "holds no image with objects" in refusal(command(*of_coco(coco), *out))
    (coco / "photos" / "3.png").unlink()
    assert "1 of 6 images are missing" in refusal(command(*of_coco(coco), *out))
