"""downstream/detection.py and boxes.py: readers, scores, precise BN, and the real script."""

import importlib.util
import json
import sys
import types

import numpy as np
import pytest
import torch
from conftest import CPU, checkpoint_in, kill_at, metrics, refusal, result, run_here
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.models import resnet18

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


def overlap(a, b):
    """IoU of two boxes x, y, w, h"""
    width, height = (min(a[k] + a[k + 2], b[k] + b[k + 2]) - max(a[k], b[k]) for k in (0, 1))
    common_area = max(0, width) * max(0, height)
    return common_area / (a[2] * a[3] + b[2] * b[3] - common_area)


def voc07_ap(objects, detections, threshold):
    """Of one class: the mean of the best precisions from 11 recalls on"""
    right, wrong, taken, points = 0, 0, set(), []
    for row in sorted(detections, key=lambda row: -row["score"]):
        near = [o for o in objects if o["image_id"] == row["image_id"]]
        best = max(near, key=lambda o: overlap(o["bbox"], row["bbox"]))
        if overlap(best["bbox"], row["bbox"]) < threshold or best["id"] in taken:
            wrong += 1
        elif not best["difficult"]:  # difficult ones count neither way
            right += 1
            taken.add(best["id"])
        points.append((right, right / max(1, right + wrong)))
    count = sum(not o["difficult"] for o in objects)
    recalls = np.arange(0, 1.1, 0.1)
    return sum(max([p for n, p in points if n / count >= r], default=0) for r in recalls) / 11


def test_voc07_score():
    """VOC's own score in plain loops: 11 recalls, and difficult objects that are ignored."""
    rng, objects, rows = np.random.default_rng(0), {"cat": [], "dog": []}, {"cat": [], "dog": []}
    for n in range(300):  # six in a photo, far from each other
        name, (w, h) = rng.choice(["cat", "dog"]), rng.uniform(30, 70, 2)
        row = {"image_id": 1 + n // 6, "category_id": name, "bbox": [100 * (n % 6), 0, w, h]}
        difficult = int(rng.random() < 0.3)
        more = {"id": n + 1, "area": w * h, "iscrowd": difficult, "difficult": difficult}
        objects[name].append({**row, **more})
        found = [row["bbox"] + rng.normal(0, s, 4) for s in (3, 3, 6, 30)[rng.integers(3) :]]
        found.append([100 * (n % 6) + 1, 1, w / 3, h / 3])  # too small, also for a difficult one
        for box in found:
            box = np.clip(box, 1, None).tolist()
            rows[name].append({**row, "bbox": box, "score": rng.random()})
    images = [{"id": n + 1} for n in range(50)]
    categories = [{"id": name, "name": name} for name in objects]
    content = {"images": images, "annotations": sum(objects.values(), []), "categories": categories}
    val = boxes.BoxData(content, images, "voc")
    aps = [
        np.mean([voc07_ap(objects[name], rows[name], threshold) for name in objects])
        for threshold in np.arange(0.5, 1, 0.05)
    ]
    expected = {"AP": 100 * np.mean(aps), "AP50": 100 * aps[0], "AP75": 100 * aps[5]}
    assert 30 < expected["AP50"] < 90
    assert boxes.score(val, sum(rows.values(), [])) == pytest.approx(expected)


def test_lvis_images_and_resampling(coco):
    """Photos of both folders of COCO; max(1, sqrt(0.001 / f)) times, on average."""
    path = coco / "annotations" / "instances_photos.json"
    content = json.loads(path.read_text())
    for image in content["images"]:
        image["coco_url"] = f"http://images.cocodataset.org/photos/{image.pop('file_name')}"
    (coco / "annotations" / "lvis_v0.5_val.json").write_text(json.dumps(content))
    data = boxes.load("lvis", str(coco), "v0.5_val")
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
    assert boxes.score(data, [{}]) == expected


def test_scores_are_those_of_pycocotools(coco):
    """It reads noisy detections from a json, and the annotations by itself."""
    data = boxes.load("coco", str(coco), "photos")
    truth = COCO(str(coco / "annotations" / "instances_photos.json"))
    rng, rows = np.random.default_rng(0), []
    for row in data.content["annotations"]:
        mask = truth.annToRLE(row)
        row = {key: row[key] for key in ("image_id", "category_id", "bbox")}
        row["bbox"] = (np.array(row["bbox"]) + rng.normal(0, 1.5, 4)).tolist()
        row["segmentation"] = {**mask, "counts": mask["counts"].decode()}
        rows.append({**row, "score": rng.random()})
    path = coco / "detections.json"
    path.write_text(json.dumps(rows))
    scores = boxes.score(data, rows)
    for kind, prefix in (("bbox", ""), ("segm", "mask ")):
        evaluation = COCOeval(truth, truth.loadRes(str(path)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        for name, expected in zip(boxes.SCORES, evaluation.stats):
            assert scores[prefix + name] == pytest.approx(100 * expected)
    assert 1 < scores["AP"] < 99 and 1 < scores["mask AP"] < 99


def test_precise_bn():
    """The first batch norm's statistics are plain means over literal ones, of a process's share."""
    args = detection.get_args(["--weights", "random", "--arch", "resnet18", "--bn-batches", "3"])
    args.batch_size, args.workers = 4, 0
    data = boxes.load("shapes", None, "val")
    torch.manual_seed(0)
    backbone = common.build_backbone("resnet18")
    model = detection.Detector(backbone, 9, False, args)
    samples = common.Samples(lambda i, rng: boxes.make_sample(data, range(500), i, rng), 500, 0)
    second = common.World(1, 2, CPU)
    detection.precise_bn(model, samples, args, second)

    order = common.infinite_sampler(500, 4, second, 0)
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
    assert one["rcnn.backbone.bn1.num_batches_tracked"] == 1  # of precise BN, before it was saved
    assert (whole / "backbone.pth").read_bytes() == (killed / "backbone.pth").read_bytes()
    backbone = torch.load(whole / "backbone.pth", weights_only=True)
    only_torchvisions(backbone)
    for key, name in (("bn1", "backbone.bn1"), ("layer4.1.conv2", "roi_heads.box_head.0.1.conv2")):
        assert torch.equal(backbone[f"{key}.weight"], one[f"rcnn.{name}.weight"])
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
    backbone = torch.load(tmp_path / "backbone.pth", weights_only=True)
    for name, value in checkpoint_in(tmp_path)["model"].items():
        if "body" in name:
            assert torch.equal(value, backbone.pop(name.removeprefix("rcnn.backbone.body.")))
    assert not backbone
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
    long = detection.get_args([*flags, "--data", "coco", "--schedule", "9x", "--batch-size", "32"])
    last = rates(long, 999, 1000, 187_499, 187_501, 197_499, 197_501)
    assert last == pytest.approx([0.03996, 0.04, 0.04, 0.004, 0.004, 0.0004])


def detector(*flags, backbone=None):
    """For five classes with masks -> torchvision's model"""
    args = detection.get_args(["--weights", "random", "--arch", "resnet18", *flags])
    return detection.Detector(backbone or common.build_backbone("resnet18"), 6, True, args).rcnn


def norms(module):
    return [x for x in module.modules() if isinstance(x, torch.nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("model", ["fpn", "c4"])
def test_heads_are_those_of_detectron2(model):
    """What torchvision starts otherwise; a pretrained layer4 stays."""
    backbone = common.build_backbone("resnet18")
    for norm in norms(backbone):
        torch.nn.init.constant_(norm.bias, 5.0)
    heads = detector("--data", "coco", "--model", model, backbone=backbone).roi_heads
    assert heads.box_roi_pool.sampling_ratio == heads.mask_roi_pool.sampling_ratio == 0
    layers = heads.box_predictor.cls_score, heads.box_predictor.bbox_pred
    for layer, std in zip((*layers, heads.mask_predictor.mask_fcn_logits), (0.01, 0.001, 0.001)):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.06)
    biases = {x.max().item() for name, x in heads.named_parameters() if name.endswith("bias")}
    assert biases == ({0} if model == "fpn" else {0, 5})
    if model == "fpn":
        limit = (3 / (256 * 7 * 7)) ** 0.5
        assert heads.box_head.fc6.weight.max().item() == pytest.approx(limit, rel=0.001)
        heads = detector("--data", "coco", "--schedule", "9x").roi_heads
        assert len(norms(heads.box_head)) == len(norms(heads.mask_head)) == 4


def test_batch_norm():
    """Synchronised everywhere; or frozen as it was, with torchvision's names, and none elsewhere"""
    synchronised = torch.nn.SyncBatchNorm.convert_sync_batchnorm(common.build_backbone("resnet18"))
    for model, more in ("fpn", 8), ("c4", 1):
        found = norms(detector("--model", model, backbone=synchronised))
        assert {type(x) for x in found} == {torch.nn.SyncBatchNorm} and len(found) == 20 + more

    backbone, images = common.build_backbone("resnet18"), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        backbone.train()(3 * images)  # so that its statistics are of something
        expected = backbone.eval()(images)
    detection.freeze_batch_norm(backbone)
    torch.testing.assert_close(backbone.train()(images), expected)
    assert not norms(detector("--frozen-bn", backbone=backbone))
    assert not any("bn" in name for name, _ in backbone.named_parameters())
    only_torchvisions(dict(backbone.state_dict()))


def only_torchvisions(state):
    loaded = resnet18().load_state_dict(state, strict=False)
    assert loaded.missing_keys == ["fc.weight", "fc.bias"] and not loaded.unexpected_keys


def test_c4_is_the_papers(real_models):
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
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_refusals(coco, voc, tmp_path):
    out = "--output", tmp_path / "out"
    for flags, words in (
        ((*of_coco(coco), "--weights", "runs/none.pth"), "runs/none.pth"),
        ((*of_coco(coco), "--arch", "vgg16_bn"), "has no layer1"),
        (("--data", "coco", "--root", "no"), "no/annotations/instances_train2017.json"),
        (("--data", "voc", "--root", voc, "--train-split", "2009_x"), "named like 2007_test"),
    ):
        assert words in refusal(command(*flags, *out))
    path = coco / "annotations" / "instances_photos.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    assert "holds no image with objects" in refusal(command(*of_coco(coco), *out))
    (coco / "photos" / "3.png").unlink()
    assert "1 of 6 images are missing" in refusal(command(*of_coco(coco), *out))
