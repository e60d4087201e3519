"""eval_linear.py: labelled photos, each protocol on small ones, several backbones, mistakes."""

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
import transformers
from conftest import CPU, REAL, ROOT, finished, in_two_processes, kill_at, refusal, result
from conftest import photos_at, run_here, run_script
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn import functional as F

import common
import eval_linear
from downstream import pictures
from extras import folders, layers, shapes, svm


@pytest.fixture(scope="module", autouse=True)
def real_resnet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "resnet18", REAL["resnet18"])
        patch.setitem(common.BACKBONES, "resnet18", 512)
        yield


def command(output, root, flags="", data="folder"):
    """eval_linear.py on small images; the weights are random unless the flags name others."""
    words = ["eval_linear.py", "--output", output, "--data", data, "--root", root]
    arch = "vgg16_bn" if "layers" in flags else "resnet18"
    weights = [] if "--weights" in flags else ["--weights", "random", "--arch", arch]
    words += ["--image-size", 32, "--workers", 0, *weights, *flags.split()]
    return list(map(str, words))


def evaluate(*given, **kwargs):
    """Run the command -> {backbone: its "mean", "std" and "runs"}"""
    run_here(command(*given, **kwargs))
    return result(given[0])["backbones"]


def test_voc07(tmp_path):
    """Its genuine layout. --root may be any of three folders; 1, -1 and 0 become 1, 0 and -1.
    Classes without examples are left out, by name: no test photo shows a cow. Lists are aligned.
    """
    rng, classes, root = np.random.default_rng(0), ("bird", "cat", "cow"), "VOCdevkit/VOC2007"
    photos, lists = tmp_path / root / "JPEGImages", tmp_path / root / "ImageSets" / "Main"
    photos.mkdir(parents=True)
    lists.mkdir(parents=True)
    for split, numbers in (("trainval", range(48)), ("test", range(48, 80))):
        labels = rng.integers(-1, 2, (len(numbers), 3)).clip(max=(1, 1, split == "trainval"))
        for n in numbers:
            shapes.draw(n, 48).save(photos / f"{n:06d}.jpg")
        for name, column in zip(classes, labels.T):
            lines = [f"{n:06d} {label:2d}\n" for n, label in zip(numbers, column)]
            lines = lines[:: -1 if name == "cat" else 1]
            (lists / f"{name}_{split}.txt").write_text("".join(lines))
        for inside in ("", "VOCdevkit", root):
            data = eval_linear.label_data("voc07", tmp_path / inside, split)
            assert tuple(data.names) == classes
            assert np.array_equal(data.labels, np.choose(labels + 1, [0, -1, 1]))
            assert list(data.images) == [str(photos / f"{n:06d}.jpg") for n in numbers]
    output = run_here(command(tmp_path, tmp_path, data="voc07"))
    assert "1 classes are left out, which lack training or test examples: cow" in output
    scores = result(tmp_path)["backbones"]["random"]["mean"]
    assert scores == {**scores, "mAP": (scores["bird"] + scores["cat"]) / 2} and len(scores) == 4


def make_files(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def labels_in(root):
    """-> LabelData of train/, what was printed"""
    common.report_once.cache_clear()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        data = eval_linear.label_data("folder", root, "train")
    return data, output.getvalue()


def test_photos_in_folders(tmp_path):
    """In order, whatever their names' case; through links; nothing hidden; others with a count."""
    train = tmp_path / "train"
    photos = "a/1.PNG a/x/2.tif a-b/3.gif b/4.webp b/far/5.jp2".split()
    others = "a/6.heic b/README.txt a/.ipynb_checkpoints/7.jpg a/._1.jpg 9.MPO .git/8.jpg".split()
    make_files(train, photos + others)
    (train / "b/far").rename(tmp_path / "far")
    (train / "b/far").symlink_to(tmp_path / "far")
    data, output = labels_in(tmp_path)
    left_out = "2 files are left out, because their names are not those of photos, for example "
    assert f"{left_out}{train}/a/6.heic" in output
    assert "3 files and folders are left out, which are hidden or added by a file system" in output
    assert "1 photos are in no folder of a class and are left out" in output
    assert list(data.images) == [f"{train}/{name}" for name in photos]
    assert data.labels.tolist() == [0, 0, 1, 2, 2] and data.names == ["a", "a-b", "b"]
    assert {*folders.list_photos(train)} == {*data.images, f"{train}/9.MPO"}


ADDED = "@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "lost+found", "__MACOSX", ".thumbs"


def test_what_file_systems_and_archivers_add(folder, tmp_path):
    """Thumbnails beside each photo are no photos, and their folders are no classes."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in ADDED:
        for inside in (tmp_path / "train", tmp_path / "train/red", tmp_path / "val/blue"):
            (inside / name / "0.png").mkdir(parents=True)
            shutil.copy(folder / "train/red/0.png", inside / name / "0.png/SYNOPHOTO_THUMB_M.jpg")
    flags = "--protocol knn --hold-out 0.5"
    output = run_here(command(tmp_path / "added", tmp_path, flags))
    assert "2 classes: blue, red" in output and "16 training and 16 test photos" in output
    assert "14 files and folders are left out, which are hidden or added by a file" in output
    assert evaluate(tmp_path / "plain", folder, flags) == result(tmp_path / "added")["backbones"]


def test_a_turned_tiff(tmp_path):
    """Uncompressed, grey and turned by its EXIF: opened by its path alone, it would be stripes."""
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(256, size=(24, 40), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
    photo.save(tmp_path / "train/a/1.tif", exif=exif)
    photo.transpose(Image.ROTATE_270).save(tmp_path / "train/b/2.png")
    data, _ = labels_in(tmp_path)
    [turned, _], [upright, _] = eval_linear.CentralSquares(data, 24, side_fraction=1.0)
    assert np.array_equal(turned, upright)


DEEPER = [  # the photos of two classes; is it said that the folders within may be the classes?
    ("a/airfield/1.png a/alley/2.png b/bakery/3.png", True),
    ("a/airfield/x/1.png b/bakery/3.png", True),
    ("a/images/1.png b/images/2.png", False),  # Tiny ImageNet
    ("a/old/1.png a/new/2.png b/old/3.png b/new/4.png", False),
    ("a/airfield/1.png a/2.png b/bakery/3.png", False),
]


@pytest.mark.parametrize("photos, said", DEEPER)
def test_classes_below_letters(photos, said, tmp_path):
    """Places and SUN397 have a/airfield: a line says what to do, which then works."""
    make_files(tmp_path / "train", photos.split())
    data, output = labels_in(tmp_path)
    assert data.names == ["a", "b"] and len(data) == len(photos.split())
    words = "no class has photos of its own, only folders such as a/airfield. If these are"
    assert (words in output) == said
    if said:
        advice = output.split("new --root: ")[1].replace("ROOT", f"{tmp_path}/links")
        subprocess.run(advice, shell=True, check=True)
        data, output = labels_in(tmp_path / "links")
        assert {"airfield", "bakery"} <= set(data.names) and words not in output


def test_classes_are_named(tmp_path):
    """Their number, and the first five of them"""
    make_files(tmp_path / "train", [f"{name}/1.png" for name in "abcdefg"])
    data, _ = labels_in(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        eval_linear.check_same_classes(data, data)
    assert output.getvalue() == "7 classes: a, b, c, d, e, ...\n"
    other, _ = labels_in(tmp_path)
    other.names[0] = "z"
    with pytest.raises(SystemExit, match=r"the splits differ in their classes: \['a', 'z'\]"):
        eval_linear.check_same_classes(data, other)


def test_one_class_is_an_error(folder, tmp_path):
    """A --root one folder too high makes one class of all photos: every backbone would have 100."""
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "images").symlink_to(folder / split)
    wrong = refusal(command(tmp_path / "out", tmp_path, "--protocol knn"))
    assert f"{tmp_path}/train has fewer than two classes: images. Is --root a folder too" in wrong


def test_a_class_on_all_photos_has_no_score(tmp_path):
    """Neither by votes nor by SVMs"""
    truth = torch.tensor([[1, 1], [1, 0], [1, -1]], dtype=torch.int8)
    decisions = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]])
    expected = {"mAP": 100.0, "some": 100.0, "chance": 50.0}  # chance, too, is without "all"
    assert eval_linear.score(decisions, truth, ["all", "some"]) == expected
    with pytest.raises(SystemExit, match="no class has positive and negative photos"):
        eval_linear.score(torch.rand(3, 1), truth[:, :1], ["all"])
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.ones((12, 3), np.int8)
    y[::2, 1] = 0
    test = outputs(x[:3], np.int8([[1, 1, 1], [1, 0, 0], [0, -1, 1]]))
    run = run_of("svm-virtex", ["all", "some", "all in training"])
    decisions = eval_linear.svm_virtex(outputs(x, y), test, run)
    assert decisions.x.isnan().all(0).tolist() == [True, False, True]
    assert eval_linear.measure(decisions, run).keys() == {"mAP", "some", "chance"}


@pytest.mark.parametrize("protocol", ["knn", "sgd-virtex --batch-size 16 --epochs 1"])
def test_a_backbone_that_is_not_finite(protocol, folder, tmp_path):
    state = common.build_backbone("resnet18").state_dict()
    state["layer4.1.bn2.weight"][3] = math.nan
    torch.save(state, tmp_path / "broken.pth")
    flags = f"--protocol {protocol} --weights {tmp_path}/broken.pth"
    wrong = refusal(command(tmp_path, folder, flags))
    assert f"the features of {tmp_path}/broken.pth are not finite: its weights are broken" in wrong


def test_outputs_that_are_not_finite(folder):
    """As when fp16 overflows on some of the photos"""
    data = eval_linear.label_data("folder", str(folder), "val")
    photos, args = eval_linear.CentralSquares(data, 32), SimpleNamespace(workers=0)
    with pytest.raises(SystemExit, match="the outputs are not finite: the weights are broken, or"):
        eval_linear.run_over_photos(lambda x: torch.full((len(x), 2), math.inf), photos, args, CPU)


def test_what_guesses_would_score():
    """Beside mAP the fraction of positives, mean over the classes that have a score: not d, which
    was not learned; -1 does not count. Beside top-1 the commonest class
    """
    truth = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, -1, 0, 1], [1, 0, 0, 0]]).to(torch.int8)
    decisions = torch.tensor([[0, 3.0, 0, torch.nan]]).expand(4, 4) / torch.arange(1, 5)[:, None]
    found = eval_linear.score(decisions, truth, "abcd")
    assert found == {"mAP": 100, "b": 100, "chance": pytest.approx(100 / 3)}
    one = torch.tensor([0, 1, 2, 1])
    found = eval_linear.score(F.one_hot(one), one, "abc")
    assert found == {"top-1": 100, "commonest class": 50}


def test_each_layer_has_its_scores():
    """Decisions on 3 classes after 3 convolutions are 9 columns."""
    labels = torch.tensor([0, 1, 2, 1])
    right = F.one_hot(labels)
    decisions = eval_linear.Outputs(torch.cat([right, right.roll(1, 0), 1 - right], 1), labels)
    scores = eval_linear.measure(decisions, run_of("layers", "abc"))
    expected = {"C-11 top-1": 100, "C-12 top-1": 0, "C-13 top-1": 0, "commonest class": 50}
    assert scores == expected
    decisions.y = right.to(torch.int8)
    scores = eval_linear.measure(decisions, run_of("layers", "abc"))
    assert list(scores) == ["C-11 mAP", "C-12 mAP", "C-13 mAP", "chance"]
    assert scores["C-11 mAP"] == 100 > scores["C-13 mAP"]


COPIES = [  # of training photos: what becomes of them in val
    ([], 0),
    ([("red/0.png", "blue/other.png"), ("blue/3.png", "blue/x.png")], 2),
    ([(f"{name}/{n}.png", f"{name}/{n}.png") for name in ("blue", "red") for n in range(16)], 32),
]


@pytest.mark.parametrize("copies, count", COPIES)
def test_test_photos_that_are_training_photos_are_counted(copies, count, folder, tmp_path):
    """By the bytes of the files, whatever their names; others of the same size are none."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train/red/size.png").write_bytes(bytes(9))
    (tmp_path / "val/red/size.png").write_bytes(bytes(8) + b"1")
    for old, new in copies:
        shutil.copy(tmp_path / "train" / old, tmp_path / "val" / new)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train = eval_linear.label_data("folder", tmp_path, "train")
        val = eval_linear.label_data("folder", tmp_path, "val")
        eval_linear.report_shared(train, val)
    said = f"{count} of {len(val)} test photos are training photos, too"
    assert (said in output.getvalue()) == (count > 0)


def test_a_split_that_is_both(folder, tmp_path):
    """Photos of a folder, and held-out photos of which there are copies"""
    flags = "--protocol knn --val-split train"
    said = "test photos are training photos, too"
    assert f"32 of 32 {said}" in run_here(command(tmp_path / "out", folder, flags))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for n in range(16):
        shutil.copy(tmp_path / f"train/red/{n}.png", tmp_path / f"train/red/again{n}.png")
    assert said in run_here(command(tmp_path / "out", tmp_path, "--protocol knn --hold-out 0.5"))


def test_lines_without_tags_are_left_out(folder, tmp_path):
    """Only [] says that no tag fits: of a photo without the key nothing is known."""
    lines = []
    for split in ("train", "val"):
        rows = [{"tags": ["red"]}, {"tags": []}, {}, {"tags": ["red", "warm"]}, {"captions": []}]
        for n, row in enumerate(rows):
            row = {"image": f"{split}/red/{n}.png", "split": split, **row}
            lines.append(json.dumps(row) + "\n")
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        data = eval_linear.label_data(f"{tmp_path}/photos.jsonl", str(folder), "train")
    assert [Path(image).name for image in data.images] == ["0.png", "1.png", "3.png"]
    assert data.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    assert '2 of 5 photos are left out, which have no "tags"' in output.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """{train,val}/{blue,red}/<n>.png: noise around the colour, 16 images of each"""
    root, rng = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    colours = {"blue": (50, 50, 200), "red": (200, 50, 50)}
    for split, name in itertools.product(("train", "val"), colours):
        (root / split / name).mkdir(parents=True)
        for n in range(16):
            noise = rng.normal(colours[name], 40, (40, 40, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noise).save(root / split / name / f"{n}.png")
    return root


LAYERS = "layers --batch-size 16 --image-size 48"
TOP_1 = "top-1,commonest class"


@pytest.mark.parametrize(
    "flags, metrics",
    [
        ("svm-virtex", "mAP,chance,blue,red"),
        ("svm-icmlm", "mAP,chance,blue,red"),
        ("knn", TOP_1),
        ("sgd-virtex --batch-size 16 --epochs 12", TOP_1),
        ("sgd-mct --epochs 12", TOP_1),
        ("logreg-icmlm --epochs 30", TOP_1),
        (f"{LAYERS} --epochs 8 --lr 0.3 0.3 0.6", f"C-11 top-1,C-12 top-1,C-13 {TOP_1}"),
    ],
)
def test_what_is_separable_is_learned(flags, metrics, folder, tmp_path, real_models, monkeypatch):
    """Red against blue. The backbone is in eval mode and frozen, and so are its statistics."""
    backbone = common.build_backbone("vgg16_bn" if "layers" in flags else "resnet18")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(eval_linear, "load_backbone", lambda *_: backbone)
    mean = evaluate(tmp_path, folder, f"--protocol {flags}")["random"]["mean"]
    assert mean.keys() == set(metrics.split(","))
    assert mean.pop("chance" if "mAP" in mean else "commonest class") == 50
    assert min(mean.values()) > (80 if "layers" in flags else 95)
    assert not backbone.training
    assert all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


def run_of(protocol, names, **args):
    """eval_linear.Run of a protocol that needs no backbone"""
    args, protocol = SimpleNamespace(seed=0, **args), eval_linear.PROTOCOLS[protocol]
    return eval_linear.Run(args, protocol, "random", None, list(names), CPU, None, None)


def outputs(x, y):
    """Features of unit length, as extract_features makes them"""
    return eval_linear.Outputs(F.normalize(torch.from_numpy(x).float()), torch.from_numpy(y))


@pytest.mark.parametrize("several", [False, True])
def test_nearest_neighbours_written_out(several):
    """The 20 nearest by cosine vote with exp(cosine / 0.07) for each of their labels."""
    rng = np.random.default_rng(0)
    x, test_x = rng.normal(size=(40, 5)), rng.normal(size=(9, 5))
    y = rng.integers(3, size=40) if not several else rng.integers(-1, 2, (40, 3)).astype(np.int8)
    votes = np.zeros((9, 3))
    for i, query in enumerate(test_x):
        cosines = x @ query / np.linalg.norm(x, axis=1) / np.linalg.norm(query)
        for n in np.argsort(-cosines)[:20]:
            for c in range(3):
                has = y[n, c] == 1 if several else y[n] == c
                votes[i, c] += math.exp(cosines[n] / 0.07) * has
    run = run_of("knn", "abc")
    decisions = eval_linear.knn(outputs(x, y), outputs(test_x, y[:9]), run)
    torch.testing.assert_close(decisions.x.double(), torch.from_numpy(votes), rtol=1e-4, atol=1e-4)
    if several:
        of_classes = []
        for vote, truth in zip(votes.T, y[:9].T):
            of_classes.append(100 * average_precision_score(truth[truth >= 0], vote[truth >= 0]))
        expected = {"mAP": np.mean(of_classes), **dict(zip("abc", of_classes))}
    else:
        expected = {"top-1": 100 * np.mean(votes.argmax(1) == y[:9])}
    scores = eval_linear.measure(decisions, run)
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


SECOND = 5 / math.sqrt(1 + 5e-5), 5 / math.sqrt(1 + 5e-5), 10 / math.sqrt(1 + 10e-5)
SCHEDULES = [  # learning rates per iteration, weight decay, strength of colour jitter
    # VirTex App. A.1: batch 256, lr 0.3, 100 epochs: 8 images make 4 iterations.
    ("sgd-virtex --train-images 8", [0.3, 0.256066017, 0.15, 0.043933983], 0, 0),
    ("sgd-virtex --batch-size 16 --epochs 1", [0.3 / 16, 0.15 / 16], 0, 0),
    # MoCo's own: divided by 10 at 60% and 80%
    ("sgd-virtex --batch-size 32 --epochs 5 --lr 3 --steps 0.6 0.8", [3, 3, 3, 0.3, 0.03], 0, 0),
    # Contrastive paper Sec. 4.2: lr 30, divided by 5 at epochs 30, 40 and 50 of 60.
    ("sgd-mct", [30.0] * 30 + [6.0] * 10 + [1.2] * 10 + [0.24] * 10, 0, 0),
    ("sgd-mct --epochs 6 --lr 2", [2.0] * 3 + [0.4, 0.08, 0.016], 0, 0),
    # DeeperCluster's: rates fall as 1 / sqrt(1 + lr * decay * t); on ImageNet all start at 0.02.
    (f"{LAYERS} --epochs 1 --lr 5 5 10", [(5, 5, 10), SECOND], 1e-5, 1),
    ("layers --image-size 48 --epochs 1", [(0.02, 0.02, 0.02)], 1e-5, 1),
]


@pytest.mark.parametrize("flags, rates, weight_decay, jitter", SCHEDULES)
def test_schedules(flags, rates, weight_decay, jitter, folder, tmp_path, monkeypatch):
    """Momentum 0.9; crops of 8-100% of the area [public codes]"""
    steps, step = [], torch.optim.SGD.step

    def recorded(self):
        for group in self.param_groups:
            assert (group["momentum"], group["weight_decay"]) == (0.9, weight_decay)
        steps.append([group["lr"] for group in self.param_groups])
        step(self)

    crops, random_crop, colour_jitter = set(), common.random_crop, common.colour_jitter

    def recorded_crop(rng, smallest_area, size):
        crops.add(("area", smallest_area))
        return random_crop(rng, smallest_area, size)

    def recorded_jitter(rng, strength):
        crops.add(("jitter", strength))
        return colour_jitter(rng, strength)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    monkeypatch.setattr(common, "random_crop", recorded_crop)
    monkeypatch.setattr(common, "colour_jitter", recorded_jitter)
    args = eval_linear.get_args(command(tmp_path, folder, f"--protocol {flags}")[1:])
    eval_linear.main(args)
    assert steps == [pytest.approx(row) for row in np.reshape(rates, (len(rates), -1)).tolist()]
    on_crops = {("area", 0.08), ("jitter", jitter)}
    assert crops == (set() if "sgd-mct" in flags else on_crops)
    assert not {"crop_min", "colour_jitter", "labels"} & vars(args).keys()  # no flags in silence


def test_costs(folder, tmp_path, monkeypatch):
    """svm-icmlm: 40, drawn by the seed, log-uniform between 1e-5 and 1e5. (svm-virtex: test_svm)"""
    asked = []
    recorded = lambda x, y, costs: asked.append(costs) or x.new_ones(y.shape[1])
    monkeypatch.setattr(svm, "choose_costs", recorded)
    evaluate(tmp_path, folder, "--protocol svm-icmlm --runs 2")
    assert len(asked) == 2 and not set(asked[0]) & set(asked[1])
    for costs in asked:
        assert len(costs) == 40 and list(costs) == sorted(costs)
        assert np.histogram(np.log10(costs), 5, (-5, 5))[0].min() >= 3


def test_linear_layers_are_trained_apart():
    """Next to one that diverges a layer is what it is alone; each has its own weight decay."""
    args = SimpleNamespace(epochs=4, batch_size=16, seed=0)
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3

    def train(*trials):
        torch.manual_seed(0)
        given = x, y, np.arange(30), trials, lambda fraction: 1 - fraction, args
        return layers.train_linear(*given)[0].weight

    first = train((0.5, 0.0))
    assert torch.equal(first, train((0.5, 0.0), (1e30, 1e-5)))
    assert not torch.allclose(first, train((0.5, 0.1)))
    x[30:] = math.nan  # not among the rows to train on
    assert torch.equal(first, train((0.5, 0.0)))
    layer = layers.linear_layer(400, 50)  # N(0, 0.01) and bias 0 [VirTex App. A.1]
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(layer.weight.mean()) < 1e-3 and not layer.bias.any()


def test_logreg_searches_on_held_out_photos(tmp_path, monkeypatch):
    """25 trials on four fifths, batches of 1024; the best for the other fifth is trained on all."""
    rng, calls = np.random.default_rng(0), []
    y = rng.integers(0, 2, 50)
    train = outputs(7 * np.eye(2)[y] + rng.normal(size=(50, 2)), y)

    def trained(x, y, rows, trials, factor, args):
        calls.append((rows, trials))
        assert [factor(done) for done in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
        assert x is train.x and (args.epochs, args.batch_size) == (100, 1024)
        layers = [nn.Linear(2, 2, bias=False) for _ in trials]
        for n, layer in enumerate(layers):  # only trial 17 knows the classes, and that of the end
            layer.weight.data = torch.eye(2) * (1 if n == 17 % len(trials) else -1)
        return layers

    monkeypatch.setattr(layers, "train_linear", trained)
    args = eval_linear.get_args(command(tmp_path, "photos", "--protocol logreg-icmlm")[1:])
    run = eval_linear.Run(args, None, "random", None, ["a", "b"], CPU, None, None)
    decisions = eval_linear.logreg_icmlm(train, train, run)
    (fit, trials), (everything, final) = calls
    kept = torch.load(layers.path_of(run))["weight"]
    assert torch.equal(kept, torch.eye(2)) and final == [trials[17]]
    assert torch.equal(decisions.x, train.x) and decisions.y is train.y
    assert (len(trials), len(set(fit)), len(set(everything))) == (25, 40, 50)
    rates, decays = np.array(trials).T  # log-uniform and uniform [ICMLM App. F.2]
    assert 0.1 <= rates.min() < 1 and 10 < rates.max() <= 100
    assert 0 <= decays.min() < 3e-6 and 7e-6 < decays.max() <= 1e-5


def test_layers_are_the_last_three_convolutions():
    """C-11, C-12 and C-13 of torchvision's VGG-16, after ReLU, averaged over 3x3 places"""
    torch.manual_seed(0)
    backbone = common.build_backbone("vgg16_bn").eval()
    theirs = torchvision.models.vgg16_bn().eval().features
    theirs.load_state_dict(backbone.features.state_dict())
    convolutions = [n for n, module in enumerate(theirs) if isinstance(module, nn.Conv2d)]
    images = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    jitter = torch.tensor([[1.3, 0.7, 1.2, 0.05], [0.8, 1.1, 0.9, -0.1]])
    features = layers.convolutions(backbone, images, jitter=jitter)
    for found, n in zip(features, convolutions[-3:], strict=True):
        with torch.no_grad():
            maps = theirs[: n + 3](common.augment(images, jitter))  # and batch norm and ReLU
        cells = maps[..., :6, :6].reshape(2, 512, 2, 3, 2, 3).mean((3, 5))
        torch.testing.assert_close(found, cells.flatten(1))


def test_classification_loss():
    """Binary cross-entropy summed over classes, mean over images; difficult ones do not count."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4, 5)), rng.integers(-1, 2, (4, 5))
    p = 1 / (1 + np.exp(-logits))
    expected = -(np.log(p[labels == 1]).sum() + np.log(1 - p[labels == 0]).sum()) / 4
    given = torch.from_numpy(logits), torch.from_numpy(labels)
    assert layers.classification_loss(*given).item() == pytest.approx(expected)


def test_pooling_in_2x2_parts():
    """ICMLM App. F.2 [Goyal et al. 2019]: 7x7 maps in four parts of 6x6 places"""
    images = torch.randint(0, 256, (1, 7, 7, 3), dtype=torch.uint8)
    expected = []
    for channel in common.augment(images)[0]:
        for rows in (channel[:6], channel[1:]):
            expected += [rows[:, :6].mean(), rows[:, 1:].mean()]
    found = eval_linear.pooled(nn.Identity(), images, grid=2)
    torch.testing.assert_close(found[0], torch.stack(expected))


def test_what_cannot_be_decoded_and_two_processes(folder, tmp_path):
    """A broken photo and a broken link are left out, by name. Only linear layers that are trained
    on crops need several processes.
    """
    blue = tmp_path / "train" / "blue"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (blue / "3.png").write_text("no picture")
    (blue / "link.png").symlink_to(tmp_path / "nowhere.png")
    output = run_here(command(tmp_path, tmp_path))
    assert f"cannot decode {blue}/3.png (it is not an image that PIL can read" in output
    assert f"cannot decode {blue}/link.png ([Errno 2] No such file" in output
    assert "the scores are rough: there are only 32 test photos" in output
    alone = result(tmp_path)["backbones"]
    first, second = in_two_processes(until_its_end, command(tmp_path, tmp_path))
    assert result(tmp_path)["backbones"] == alone and "all scores" in first
    assert second.startswith("The first process measures; this one ends.")
    flags = "--protocol sgd-virtex --batch-size 16 --epochs 15"
    output, _ = in_two_processes(run_here, command(tmp_path, tmp_path, flags))
    assert output.count("epoch 10: top-1") == 1
    assert result(tmp_path)["backbones"]["random"]["mean"]["top-1"] > 95
    for image in (tmp_path / "val").rglob("*.png"):
        image.write_text("no picture")
    assert "none of the 32 photos can be decoded" in refusal(command(tmp_path, tmp_path))


def until_its_end(command):
    """Run a script in this process, which sys.exit() may end without an error -> what it printed"""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            eval_linear.main(eval_linear.get_args(command[1:]))
        except SystemExit as ended:
            assert not ended.code
    return output.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two backbones -> their paths"""
    folder = tmp_path_factory.mktemp("backbones")
    for name in "AB":
        common.save_weights(folder / f"{name}.pth", common.build_backbone("resnet18"))
    return f"{folder}/A.pth", f"{folder}/B.pth"


@pytest.mark.parametrize("protocol, side, width", [
    ("svm-virtex", 35, 512), ("svm-icmlm", 40, 2048), ("logreg-icmlm", 40, 512),
    ("sgd-mct", 35, 512),
])
def test_what_is_extracted(protocol, side, width, files, folder, tmp_path, monkeypatch):
    """The central square of photos of 40 x 40, and features, which have length 1 but for sgd-mct"""
    squares, features = [], []
    centre_crop, run_over_photos = common.centre_crop, eval_linear.run_over_photos

    def crop(*given, **flags):
        squares.append(centre_crop(*given, **flags))
        return squares[-1]

    def run(*given):
        features.append(run_over_photos(*given))
        return features[-1]

    monkeypatch.setattr(common, "centre_crop", crop)
    monkeypatch.setattr(eval_linear, "run_over_photos", run)
    flags = "" if "svm" in protocol else "--epochs 1"
    flags += f" --protocol {protocol} --image-size 64 --weights {files[0]}"
    evaluate(tmp_path, folder, flags)
    assert np.allclose([end - corner for corner, end in squares], side)
    for x, _ in features:
        assert x.shape == (32, width)
        assert torch.allclose(x.norm(dim=1), torch.ones(32)) == (protocol != "sgd-mct")


@pytest.mark.parametrize("flags", ("sgd-virtex --batch-size 16", LAYERS))
def test_layers_on_crops_are_scored_on_central_squares(flags, folder, tmp_path, monkeypatch):
    """VirTex App. A.1: photos are resized to 256, of which the central 224 are scored."""
    squares, centre_crop = [], common.centre_crop

    def crop(*given, **flags):
        squares.append(centre_crop(*given, **flags))
        return squares[-1]

    monkeypatch.setattr(common, "centre_crop", crop)
    evaluate(tmp_path, folder, f"--protocol {flags} --epochs 1")
    corner = 40 * (1 - 224 / 256) / 2
    assert np.allclose(squares, [2 * [corner], 2 * [40 - corner]]) and len(squares) == 32


def test_held_out_photos_are_not_trained_on(folder):
    """A quarter of the photos is tested on, the others are trained on; also with --shots."""
    data = eval_linear.label_data("folder", folder, "train")
    args = SimpleNamespace(seed=0, hold_out=0.25, shots=None, train_images=None, protocol="knn")
    train, test = eval_linear.draw_photos(data, data, args)
    assert sorted([*train, *test]) == list(range(32)) and len(test) == 8
    args.shots = 2
    few, same = eval_linear.draw_photos(data, data, args)
    assert {*few} < {*train} and same.tolist() == test.tolist()
    assert np.bincount(data.labels[few]).tolist() == [2, 2]


def test_over_runs():
    """The deviation is that of a sample (its square is divided by N - 1), 0 for a single run."""
    of_three = eval_linear.over_runs([{"mAP": 1.0}, {"mAP": 2.0}, {"mAP": 6.0}])
    assert of_three["mean"] == {"mAP": 3.0}
    assert of_three["std"] == {"mAP": pytest.approx(math.sqrt((4 + 1 + 9) / 2))}
    assert eval_linear.over_runs([{"mAP": 1.0}])["std"] == {"mAP": 0.0}


def test_shots(capsys):
    """K photos of each class, others with another seed; a line says if a class has fewer."""
    data = eval_linear.LabelData(np.arange(15), np.arange(15) % 3, ["a", "b", "c"])
    args = SimpleNamespace(seed=0, hold_out=0.0, shots=4, train_images=None)
    train, test = eval_linear.draw_photos(data, data, args)
    assert np.bincount(data.labels[train]).tolist() == [4, 4, 4] and len(test) == 15
    args.seed = 1
    assert {*eval_linear.draw_photos(data, data, args)[0]} != {*train}
    common.report_once.cache_clear()
    data.labels[data.labels == 2] = [2, 2, 0, 0, 0]
    assert len(eval_linear.draw_photos(data, data, args)[0]) == 10
    assert "1 of 3 classes have fewer training photos than --shots 4" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["svm-virtex", "sgd-virtex --batch-size 16 --epochs 2"])
def test_several_backbones(protocol, files, folder, tmp_path):
    """--weights A B random equals three single calls, but for comparisons; each has its line, the
    best first, and files of its layers.
    """
    flags, sources = f"--protocol {protocol} --shots 5 --runs 2 --weights", [*files, "random"]
    output = run_here(command(tmp_path / "all", folder, f"{flags} {' '.join(sources)}"))
    together = result(tmp_path / "all")["backbones"]
    assert together.keys() == {*sources}
    scores = []
    for source in together:
        one = evaluate(tmp_path / "one", folder, f"{flags} {source} --arch resnet18")
        assert together[source] == {**together[source], **one[source]}
        mean, std = together[source]["mean"], together[source]["std"]
        scores.append(next(iter(mean.values())))
        [metric] = mean.keys() - {"blue", "red", "commonest class", "chance"}
        cells = f"{source} {mean[metric]:.2f} ± {std[metric]:.2f}".split()
        assert cells in [line.split()[: len(cells)] for line in output.splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(list((tmp_path / "all").glob("*.pth"))) == (0 if "svm" in protocol else 6)


def test_a_killed_training_of_layers_resumes(files, folder, tmp_path):
    """It ends with the same bits; with other flags, weights or photos it begins anew, aloud."""
    weights = tmp_path / "weights.pth"
    shutil.copy(files[0], weights)
    flags = f"--protocol sgd-virtex --batch-size 16 --epochs 3 --weights {weights}"
    whole, killed = [command(tmp_path / name, folder, flags) for name in ("whole", "killed")]
    run_here(whole)
    kill_at(None, killed, common, "save")
    assert "resuming from iteration 2" in run_here(killed)
    first, second = [torch.load(path, weights_only=True) for path in tmp_path.glob("*/*.pth")]
    assert first["iteration"] == second["iteration"] == 6
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    anew = "is of other flags, photos or weights: it is trained anew"
    killed += ["--lr", "1"]
    assert anew in run_here(killed)
    date = os.stat(weights)
    shutil.copy(files[1], weights)
    os.utime(weights, ns=(date.st_atime_ns, date.st_mtime_ns))
    assert anew in run_here(killed)
    shutil.copytree(folder, tmp_path / "moved")
    killed[killed.index(str(folder))] = str(tmp_path / "moved")
    assert "resuming from iteration 6" in run_here(killed)
    photo = tmp_path / "moved/train/red/0.png"
    photo.rename(photo.with_stem("zero"))
    assert anew in run_here(killed)


def test_size_and_architecture_of_the_training(files, folder, tmp_path):
    """args.json beside a file names them; the first file's are those of random; flags overrule."""
    for name, source, size in ("small", files[0], 16), ("large", files[1], 32):
        (tmp_path / name).mkdir()
        shutil.copy(source, tmp_path / name / "backbone.pth")
        content = {"script": "virtex", "arch": "resnet18", "image_size": size}
        (tmp_path / name / "args.json").write_text(json.dumps(content))
    small, large = (f"{tmp_path}/{name}/backbone.pth" for name in ("small", "large"))
    words = command(tmp_path / "out", folder, f"--weights {small} {large} random --protocol knn")
    words.remove("--image-size"), words.remove("32")
    output = run_here(words)
    sizes = {small: 16, large: 32, "random": 16}
    for source, size in sizes.items():
        line = f"{source}, seed 0, 32 training and 32 test photos of {size} px: top-1"
        assert line in output
    assert run_here([*words, "--image-size", "24"]).count(" test photos of 24 px") == 3


FOREIGN = '{"image_size": [224, 224]}', '{"script": "x.py", "arch": "r50", "image_size": 9}'


@pytest.mark.parametrize("content", FOREIGN)
def test_args_json_of_another_program_is_as_good_as_none(content, files, tmp_path):
    shutil.copy(files[0], tmp_path / "weights.pth")
    (tmp_path / "args.json").write_text(content)
    path = str(tmp_path / "weights.pth")
    assert eval_linear.trained_with(path, "arch") is None
    assert eval_linear.trained_with(path, "image_size") is None
    assert eval_linear.load_backbone(path, None, 0).arch == "resnet18"


def test_a_copied_checkpoint_knows_its_own_size_and_architecture(files, folder, tmp_path):
    """It holds its flags itself; args.json beside a copy may be of another training."""
    model = {f"backbone.{name}": x for name, x in torch.load(files[0]).items()}
    flags = {"script": "tp", "arch": "resnet18", "image_size": 24}
    torch.save({"script": "tp", "args": flags, "model": model}, tmp_path / "checkpoint.pth")
    beside = {"script": "virtex", "arch": "vgg16_bn", "image_size": 16}
    (tmp_path / "args.json").write_text(json.dumps(beside))
    source = f"{tmp_path}/checkpoint.pth"
    words = command(tmp_path / "out", folder, f"--weights {source} random --protocol knn")
    words.remove("--image-size"), words.remove("32")
    assert run_here(words).count(" test photos of 24 px: top-1") == 2
    sizes = json.loads((tmp_path / "out/result.json").read_text())["image_size"]
    assert sizes == {source: 24, "random": 24}
    assert eval_linear.trained_with("random", "arch") is None


def test_embed(files, folder, tmp_path):
    """Features of each photo below a folder, at the size of training, in the order of files.json"""
    photos = tmp_path / "photos"
    shutil.copytree(folder / "val", photos)
    (photos / "blue/5.png").write_text("no picture")
    (photos / "blue/two\nlines.png").write_bytes((photos / "red/0.png").read_bytes())
    shutil.copy(files[0], tmp_path / "backbone.pth")
    flags = {"script": "tp", "arch": "resnet18", "image_size": 24}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    words = ["eval_linear.py", "--embed", photos, "--weights", tmp_path / "backbone.pth"]
    output = run_here([*words, "--workers", 0, "--output", tmp_path / "out"])
    assert "32 photos of 24 px, 512 features each" in output and "cannot decode" in output
    features = np.load(tmp_path / "out/features.npy")
    paths = json.loads((tmp_path / "out/files.json").read_text())
    assert paths == [path for path in folders.list_photos(photos) if "blue/5.png" not in path]
    backbone = eval_linear.load_backbone(files[0], "resnet18", 0).eval()
    squares = eval_linear.CentralSquares(pictures.photo_files(paths), 24)
    two = torch.tensor(np.stack([squares[n][0] for n in (5, 20)]))
    wanted = eval_linear.pooled(backbone, two).numpy()
    assert len(features) == 32 and features[[5, 20]] == pytest.approx(wanted, abs=1e-4)
    assert eval_linear.get_args(["--embed", "photos", "--weights", "A"]).output == "runs/embed"


def test_long_paths_of_weights(files, folder, tmp_path):
    """The file of a layer has the end of the path, and a checksum of the whole."""
    paths = []
    for sign in "文字":
        paths.append(tmp_path / (sign * 60) / "run" / "backbone.pth")
        paths[-1].parent.mkdir(parents=True)
        shutil.copy(files[0], paths[-1])
    flags = f"--protocol sgd-mct --epochs 1 --weights {paths[0]} {paths[1]}"
    evaluate(tmp_path / "out", folder, flags)
    assert len(list((tmp_path / "out").glob("sgd-mct-*-backbone.pth-????????-0.pth"))) == 2


def test_features_are_extracted_once(files, folder, tmp_path, monkeypatch):
    """Of the photos that the runs draw, and of nothing else; of random weights for each run"""
    extracted, run_over_photos = [], eval_linear.run_over_photos

    def recorded(function, photos, *given):
        extracted.append(set(photos.data.images))
        return run_over_photos(function, photos, *given)

    monkeypatch.setattr(eval_linear, "run_over_photos", recorded)
    flags = "--protocol knn --runs 3 --hold-out 0.4 --train-images 4 --weights"
    evaluate(tmp_path / "one", folder, f"{flags} {files[0]}")
    args = eval_linear.get_args(command(tmp_path, folder, f"{flags} random")[1:])
    data = eval_linear.label_data("folder", folder, "train")
    drawn = []
    for seed in range(3):
        args.seed = seed
        drawn.append(eval_linear.draw_photos(data, data, args))
    train, test = [set(data.images[np.concatenate(rows)]) for rows in zip(*drawn)]
    assert extracted == [train, test] and 4 < len(train) <= 12 and 13 < len(test) < 32
    extracted.clear()
    evaluate(tmp_path / "random", folder, f"{flags} random --arch resnet18")
    assert [len(photos) for photos in extracted] == [4, 13] * 3


def test_rows_of_features():
    """Photos that could not be decoded have none; all photos are not copied."""
    rows = np.array([0, 2, 3, 7])
    all_rows = eval_linear.Outputs(torch.arange(4.0)[:, None], torch.arange(4), rows)
    some = all_rows.select(np.array([1, 2, 7]))
    assert some.x.flatten().tolist() == [1, 3] and some.y.tolist() == [1, 3]
    assert some.rows.tolist() == [2, 7]
    assert all_rows.select(np.arange(9)) is all_rows


@pytest.mark.parametrize("protocol", ["knn", "sgd-mct", "sgd-virtex"])
def test_products_are_made_in_full_float32(protocol, folder, tmp_path, monkeypatch):
    """On a GPU, training rounds to TF32 (init_distributed); here no product may be."""
    settings = {}

    def record(owner, name):
        original = getattr(owner, name)

        def recorded(*given, **more):
            now = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            settings.setdefault(name, set()).add(now)
            return original(*given, **more)

        monkeypatch.setattr(owner, name, recorded)

    record(torch.nn.functional, "linear")  # of linear layers
    record(nn.Conv2d, "_conv_forward")  # of backbones
    record(torch.Tensor, "topk")  # of neighbours, on the line after their product
    start = common.init_distributed

    def init_distributed():
        device = start()
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        return device

    monkeypatch.setattr(common, "init_distributed", init_distributed)
    small = "" if protocol == "knn" else "--epochs 1"
    evaluate(tmp_path, folder, f"--protocol {protocol} {small} --train-images 12")
    assert {"topk" if protocol == "knn" else "linear", "_conv_forward"} <= settings.keys()
    assert set.union(*settings.values()) == {("highest", False)}


def test_results_of_other_data_and_protocols_are_kept(folder):
    names = []
    for flags in ("", "--shots 3", "--protocol knn"):
        words = command("", folder, flags)[3:]
        names.append(eval_linear.get_args(words).output)
    name = f"runs/eval_linear/{folder.name}-"
    assert names == [f"{name}svm-virtex", f"{name}svm-virtex-3-shots", f"{name}knn"]
    for data, root in ("a/birds.jsonl", "."), ("shards/birds/", "."):
        args = eval_linear.get_args(["--data", data, "--root", root])
        assert args.output == "runs/eval_linear/birds-svm-virtex"


@pytest.mark.parametrize("several", (False, True))
def test_sides_of_mirrored_photos(several, tmp_path):
    """turn_left becomes turn_right in the photos that are mirrored, and in no other."""
    names = ["straight", "turn_left", "turn_right"]
    photo = np.zeros((16, 16, 3), np.uint8)
    photo[:, :8] = 255  # the left half is white
    Image.fromarray(photo).save(tmp_path / "a.png")
    labels = np.array([[0, 1, 0]], np.int8) if several else np.array([1])
    data = eval_linear.LabelData(photos_at(tmp_path / "a.png"), labels, names)
    crops = SimpleNamespace(image_size=16, crop_min=0.9, colour_jitter=0.0)
    photos = layers.LabelledPhotos(data, crops)
    seen = set()
    for epoch in range(20):
        sample = photos[0, epoch, 0]
        side = "turn_left" if sample["image"][8, 3, 0] > sample["image"][8, 12, 0] else "turn_right"
        label = sample["labels"].argmax() if several else sample["labels"]
        assert names[label] == side
        seen.add(side)
    assert len(seen) == 2


def test_in_a_copy(files, folder, tmp_path):
    """eval_linear.py and common.py alone: knn on a .jsonl, of a backbone.pth and its args.json"""
    for name in ("eval_linear.py", "common.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(files[0], tmp_path / "backbone.pth")
    (tmp_path / "args.json").write_text('{"script": "tp", "arch": "resnet18"}')
    flags = f"--weights {tmp_path}/backbone.pth"
    rows = []
    for n, path in enumerate(sorted(folder.rglob("*.png"))):
        row = {"image": str(path), "tags": [path.parent.name], "split": ("train", "val")[n % 2]}
        rows.append(row)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    knn = ["--data", tmp_path / "a.jsonl", "--protocol", "knn", "--workers", 0]
    script = "eval_linear.py", *flags.split(), *knn
    finished(run_script(*script, "--output", tmp_path / "copied", cwd=tmp_path))
    run_here([*script, "--output", tmp_path / "here"])
    [copied], [here] = (result(tmp_path / x)["backbones"].values() for x in ("copied", "here"))
    assert copied["mean"] == pytest.approx(here["mean"])
    lacking = "the folder extras is missing: copy it beside the script"
    ended = run_script(*command(tmp_path, folder, flags), cwd=tmp_path)
    assert ended.returncode == 1 and lacking in ended.stderr
    ended = run_script(*script[:3], "random", *script[3:], cwd=tmp_path)  # two are compared
    assert ended.returncode == 1 and lacking in ended.stderr
    assert "seed 0" not in ended.stdout


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--root /no", "No such file or directory: '/no/train'. Expected: train/CLASS/PHOTO"),
        ("--root {tmp}", "Couldn't find any class folder in {tmp}/train. Expected: train/CLASS"),
        ("--root {tmp}/hidden", "{tmp}/hidden/train has fewer than two classes: none. Is --root"),
        ("--embed {root} --weights {A} random", "--embed writes the features of one backbone"),
        ("--embed {tmp}/train --weights {A}", "there is no photo in the folder {tmp}/train or its"),
        ("--shots 0", "--shots must be above 0, not 0"),
        ("--hold-out -0.2", "--hold-out must be at least 0 and below 1, not -0.2"),
        ("--protocol sgd-virtex --steps 30 60", "--steps must be at least 0 and below 1"),
        ("--steps 0.5", "--protocol svm-virtex takes no --steps"),
        ("--root /no --data voc07", "/no has no VOC2007/ImageSets/Main/<class>_trainval.txt"),
        ("--data {tmp}/photos.jsonl --train-split val", "has no tags to score"),
        ("--protocol layers --weights {A}", "A.pth is a resnet18, not --arch vgg16_bn"),
        ("--protocol layers --lr 1 2", "--protocol layers takes 3 values of --lr"),
        ("--weights none.pth", "there is no file none.pth"),
        ("--weights {A} none.pth", "not measured: none.pth; see the causes below the table"),
        ("--protocol knn --both-ways --hold-out 0.2", "--both-ways is for svm-virtex, svm-icmlm"),
        ("--protocol sgd-mct --both-ways", "--both-ways is for svm-virtex, svm-icmlm and knn"),
        ("--hold-out 0.999", "0 training and 32 test photos"),
        ("--data imagenet", "no data set imagenet: --data is shapes, coco, vg, a .jsonl file or"),
        (
            "--data {root}",
            "Photos in train/CLASS/ are for eval_linear.py --data folder --root {root}",
        ),
    ],
)
def test_mistakes(flags, words, files, folder, tmp_path):
    (tmp_path / "photos.jsonl").write_text(f'{{"image": "{folder}/train/red/0.png"}}')
    (tmp_path / "train").mkdir()
    (tmp_path / "hidden/train/.git").mkdir(parents=True)
    names = {"A": files[0], "tmp": tmp_path, "root": folder}
    wrong = refusal(command(tmp_path, folder, flags.format(**names)))
    assert words.format(**names) in wrong


def test_weights_of_others(tmp_path, monkeypatch):
    """imagenet: what torchvision would download; clip:FOLDER, normalised as CLIP"""
    state = torchvision.models.resnet18().state_dict()
    download = "torchvision.models._api.load_state_dict_from_url"
    monkeypatch.setattr(download, lambda url, **_: state if "resnet18-f37072fd" in url else None)
    taken = eval_linear.load_backbone("imagenet", "resnet18", 0).state_dict()
    assert taken.keys() < state.keys() and all(torch.equal(taken[k], state[k]) for k in taken)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPVisionConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    model = transformers.CLIPVisionModel(config).eval()
    model.save_pretrained(tmp_path / "clip")
    encoder = eval_linear.load_backbone(f"clip:{tmp_path}/clip", None, 0).eval()
    photos = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])  # OpenAI's
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    expected = model(((photos / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output
    found = encoder(common.augment(photos)).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
