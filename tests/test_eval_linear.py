"""eval_linear.py: the SVM probe against scikit-learn, the protocols on small data in genuine layouts, the weights it takes."""

import json
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from conftest import run_script
from PIL import Image
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

import common
import eval_linear
import probe
import shapes

CPU = torch.device("cpu")
ALONE = common.World(0, 1, CPU)


def ends(match):
    """The block ends the program with one line that says `match`."""
    return pytest.raises(SystemExit, match=f"^error: [^\n]*{match}[^\n]*$")


def evaluate(output, *command):
    """Run eval_linear.py in this process at tiny size -> the content of result.json."""
    tiny = ("--image-size", 32, "--workers", 0, "--output", output)
    eval_linear.main(eval_linear.get_args([str(word) for word in (*command, *tiny)]))
    return json.loads((output / "result.json").read_text())


RANDOM = ("--weights", "random", "--arch", "resnet18")
SGD = ("--protocol", "sgd-virtex", "--batch-size", 16)


# ------------------------------------------------------------------------------------------ the SVM probe


@pytest.fixture(scope="module")
def features():
    """Random features in which six classes are more or less visible, with difficult entries, rare and absent classes."""
    rng = np.random.default_rng(0)
    x, directions = rng.normal(size=(140, 12)).astype(np.float32), rng.normal(size=(12, 6))
    y = (x @ directions + 4 * rng.normal(size=(140, 6)) > 2).astype(np.int8)
    y[rng.random(y.shape) < 0.1] = -1
    train_x, test_x, train_y, test_y = x[:90], x[90:], y[:90], y[90:]
    train_y[:, 3] = 0
    train_y[:2, 3] = 1  # two positives: too few for 3-fold cross-validation
    test_y[:, 4] = np.where(test_y[:, 4] == 1, 0, test_y[:, 4])  # no test positive
    train_y[:, 5] = np.where(train_y[:, 5] == 1, -1, train_y[:, 5])  # no training positive
    return train_x, train_y, test_x, test_y


def literal_probe(train_x, train_y, test_x, test_y, k, costs=(0.01, 0.1, 1.0, 10.0)):
    """Class k as VirTex App. A.1 has it, in scikit-learn's own words -> (average precision, C)."""
    train_x, test_x = (x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1)[:, None] for x in (train_x, test_x))
    svm = lambda C: LinearSVC(C=C, class_weight={1: 2, 0: 1}, penalty="l2", loss="squared_hinge", max_iter=2000, tol=1e-4, dual=True, random_state=0)
    positive = np.array([1 if label == 1 else 0 for label in train_y[:, k]])  # difficult images are negatives
    means = [cross_val_score(svm(C), train_x, positive, cv=3, scoring="average_precision").mean() for C in costs] if len(costs) > 1 else [0]
    C = costs[int(np.argmax(means))]
    easy = [n for n in range(len(test_y)) if test_y[n, k] != -1]  # difficult images do not count
    decisions = svm(C).fit(train_x, positive).decision_function(test_x[easy])
    return 100 * average_precision_score([test_y[n, k] for n in easy], decisions), C


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_svm_probe_is_scikit_learns(features):
    """The same C by cross-validation and the same average precision, difficult entries included."""
    scores = probe.svm_probe(*features, list("abcdef"))
    chosen = set()
    for k in range(3):
        expected, C = literal_probe(*features, k)
        chosen.add(C)
        assert scores["abcdef"[k]] == pytest.approx(expected, abs=1e-9)
        others = {literal_probe(*features, k, (other,))[0] for other in {0.01, 0.1, 1.0, 10.0} - {C}}
        assert any(abs(other - expected) > 1e-3 for other in others)  # or the choice of C would not be tested
    assert len(chosen) > 1


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_class_too_rare_for_cross_validation(features):
    """Fewer than three positives: C = 1."""
    assert probe.svm_probe(*features, list("abcdef"))["d"] == pytest.approx(literal_probe(*features, 3, (1.0,))[0], abs=1e-9)


def test_classes_without_positives_are_left_out(features):
    """No positive in testing or in training: no score, and the others are not moved by it."""
    assert sorted(probe.svm_probe(*features, list("abcdef"))) == list("abcd")


def test_difficult_entries_count_as_described(features):
    """Difficult ones are negatives in training; in testing their features do not matter."""
    train_x, train_y, test_x, test_y = (array.copy() for array in features)
    scores = probe.svm_probe(train_x, train_y, test_x, test_y, list("abcdef"))
    test_x[test_y[:, 0] == -1] *= -1
    assert probe.svm_probe(train_x, train_y, test_x, test_y, list("abcdef"))["a"] == scores["a"]
    train_y[train_y == -1] = 0
    assert probe.svm_probe(train_x, train_y, features[2], test_y, list("abcdef")) == scores


# ------------------------------------------------------------------------------------------ VOC07


def voc_label(scene, shape):
    """1 when the scene shows the shape, 0 ("difficult") when only a small and not solid one, -1 otherwise."""
    objects = [o for o in shapes.shapes_scene(scene) if o.shape == shape]
    return -1 if not objects else 0 if all(o.size == "small" and o.fill != "solid" for o in objects) else 1


VOC_SCENES = {"trainval": range(100, 148), "test": range(400, 432)}


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    """VOCdevkit/VOC2007 in its genuine layout, of built-in scenes."""
    root = tmp_path_factory.mktemp("voc")
    main, pictures = root / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main", root / "VOCdevkit" / "VOC2007" / "JPEGImages"
    main.mkdir(parents=True)
    pictures.mkdir()
    for split, scenes in VOC_SCENES.items():
        (main / f"{split}.txt").write_text("".join(f"{scene:06d}\n" for scene in scenes))
        for shape in shapes.SHAPES:
            (main / f"{shape}_{split}.txt").write_text("".join(f"{scene:06d} {voc_label(scene, shape):2d}\n" for scene in scenes))
        for scene in scenes:
            shapes.draw_scene(scene, 48).save(pictures / f"{scene:06d}.jpg")
    return root


@pytest.mark.parametrize("inside", ("", "VOCdevkit", "VOCdevkit/VOC2007"))
def test_voc07_labels(voc, inside):
    """Classes by name; 1, -1 and 0 become 1, 0 and -1; --root may be any of the three folders."""
    for split, scenes in VOC_SCENES.items():
        data = probe.label_data("voc07", str(voc / inside), split)
        assert data.names == sorted(shapes.SHAPES)
        assert [path.split("/")[-1] for path in data.images] == [f"{scene:06d}.jpg" for scene in scenes]
        expected = [[{1: 1, -1: 0, 0: -1}[voc_label(scene, shape)] for shape in data.names] for scene in scenes]
        assert data.labels.tolist() == expected and any(-1 in row for row in expected)


def test_svm_virtex_on_voc07(voc, tmp_path, capsys):
    """From the folder to result.json and the table: a score per class and their mean."""
    result = evaluate(tmp_path, *RANDOM, "--data", "voc07", "--root", voc)
    scores = result["mean"]
    present = {shape for shape in shapes.SHAPES if any(voc_label(scene, shape) == 1 for scene in VOC_SCENES["test"])}
    assert set(scores) == {*present, "mAP"} and all(0 < score <= 100 for score in scores.values())
    assert scores["mAP"] == pytest.approx(np.mean([scores[shape] for shape in present]))
    assert f"mAP        {scores['mAP']:.2f}".split() == capsys.readouterr().out.splitlines()[-1].split()


def test_voc07_without_lists(tmp_path):
    """A folder without VOCdevkit."""
    with ends("VOCdevkit"):
        evaluate(tmp_path, *RANDOM, "--data", "voc07", "--root", tmp_path)


def test_voc07_without_test(voc, tmp_path):
    """A split that was not downloaded."""
    with ends("test2012"):
        evaluate(tmp_path, *RANDOM, "--data", "voc07", "--root", voc, "--val-split", "test2012")


def test_voc07_with_a_bad_line(tmp_path):
    """The file, the line and what was expected."""
    folder = tmp_path / "VOC2007" / "ImageSets" / "Main"
    folder.mkdir(parents=True)
    (folder / "cat_test.txt").write_text("000005 -1\n000007 yes\n")
    with ends("cat_test.txt, line 2: expected an image name and 1, -1 or 0"):
        probe.label_data("voc07", str(tmp_path), "test")


# ------------------------------------------------------------------------------------------ folders


def write_folder(root, split, classes, count):
    """{split}/<class>/<n>.png: noise around a colour."""
    rng = np.random.default_rng(len(split))
    for name, colour in classes.items():
        (root / split / name).mkdir(parents=True)
        for n in range(count):
            noise = rng.normal(colour, 40, (40, 40, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noise).save(root / split / name / f"{n}.png")


COLOURS = {"blue": (50, 50, 200), "red": (200, 50, 50)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """32 training and 16 validation images, half of them red and half blue."""
    root = tmp_path_factory.mktemp("folder")
    write_folder(root, "train", COLOURS, 16)
    write_folder(root, "val", COLOURS, 8)
    return root


def test_folder_labels(folder):
    """Class names are those of the folders, in order."""
    data = probe.label_data("folder", str(folder), "val")
    assert data.names == ["blue", "red"] and data.labels.tolist() == [[1, 0]] * 8 + [[0, 1]] * 8
    assert all(f"/{data.names[labels.argmax()]}/" in path for path, labels in zip(data.images, data.labels, strict=True))


def test_folder_ignores_other_files(tmp_path):
    """Notes beside the images are no images; images in deeper folders are."""
    write_folder(tmp_path, "train", {"red": COLOURS["red"]}, 2)
    (tmp_path / "train" / "red" / "notes.txt").touch()
    (tmp_path / "train" / "red" / "deep").mkdir()
    (tmp_path / "train" / "red" / "deep" / "b.JPEG").touch()
    assert len(probe.label_data("folder", str(tmp_path), "train").images) == 3


def test_sgd_learns_what_is_separable(folder, tmp_path):
    """Red against blue, on features of a random network: nearly all right."""
    result = evaluate(tmp_path, *RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 12)
    assert result["mean"]["top-1"] > 95


def test_sgd_is_not_right_by_itself(folder, tmp_path):
    """The same with a learning rate of almost zero: the score above was learned."""
    result = evaluate(tmp_path, *RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 1, "--lr", 1e-9)
    assert result["mean"]["top-1"] < 95


def test_svm_on_a_folder(folder, tmp_path):
    """The SVM protocol takes folders, too."""
    assert evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", folder)["mean"]["mAP"] > 95


def test_sgd_does_not_depend_on_the_workers(folder):
    """The order of the images and their augmentation come from the seed alone."""
    view, batches = eval_linear.LabelView(probe.label_data("folder", str(folder), "train"), 32, 0), []
    for workers in (0, 2):
        loader = common.make_loader(view, common.InfiniteSampler(32, 16, ALONE, 0), 16, workers, None, CPU)
        batches.append([batch[:2] for batch, _ in zip(loader, range(3))])
    for (x, i), (y, j) in zip(*batches, strict=True):
        assert torch.equal(x, y) and torch.equal(i, j)


def test_label_view_gives_the_right_classes(folder):
    """The class of an augmented image is that of its folder."""
    view = eval_linear.LabelView(probe.label_data("folder", str(folder), "train"), 32, 0)
    for index in (0, 5, 16, 31):
        image, label, *_ = view[0, index]
        assert label == (image[..., 0].mean() > image[..., 2].mean()) == (index >= 16)


def test_a_replacement_brings_its_own_class(tmp_path):
    """Where the last blue image cannot be decoded, the first red one takes its place, as red."""
    write_folder(tmp_path, "train", COLOURS, 2)
    (tmp_path / "train" / "blue" / "1.png").write_text("no picture")
    view = eval_linear.LabelView(probe.label_data("folder", str(tmp_path), "train"), 32, 0)
    image, label, unreadable = view[0, 1]
    assert image[..., 0].mean() > image[..., 2].mean() and label == 1 and unreadable == 1


def test_two_runs_give_mean_and_deviation(voc, tmp_path, capsys):
    """--runs 2: two seeds, their mean and standard deviation, in the file and in the table."""
    command = (*RANDOM, "--data", "voc07", "--root", voc)
    result = evaluate(tmp_path, *command, "--runs", 2)
    table, scores = capsys.readouterr().out.splitlines()[-1], [run["mAP"] for run in result["runs"]]
    assert scores[0] != scores[1] and result["mean"]["mAP"] == np.mean(scores) and result["std"]["mAP"] == np.std(scores)
    assert table.split() == ["mAP", f"{np.mean(scores):.2f}", "±", f"{np.std(scores):.2f}"]
    assert evaluate(tmp_path / "second", *command, "--seed", 1)["runs"] == result["runs"][1:]


@pytest.mark.parametrize("protocol", eval_linear.PROTOCOLS)
def test_the_backbone_is_frozen(folder, tmp_path, monkeypatch, protocol):
    """Weights and BatchNorm's running statistics are the same bits afterwards, and it is in eval mode."""
    backbone = common.build_backbone("resnet18")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(eval_linear, "load_backbone", lambda *_: backbone)
    evaluate(tmp_path, *RANDOM, *SGD, "--protocol", protocol, "--data", "folder", "--root", folder, "--epochs", 1)
    assert not backbone.training and all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


def test_undecodable_training_images_are_named(tmp_path, capsys):
    """sgd-virtex says which training image it had to replace, as the other scripts do."""
    for split in ("train", "val"):
        write_folder(tmp_path, split, COLOURS, 4)
    (tmp_path / "train" / "red" / "1.png").write_text("no picture")
    evaluate(tmp_path / "out", *RANDOM, *SGD, "--data", "folder", "--root", tmp_path, "--epochs", 2)
    assert str(tmp_path / "train" / "red" / "1.png") in capsys.readouterr().out


def test_folder_without_a_split(folder, tmp_path):
    """A missing split is named, with the layout that was expected."""
    with ends("valid not found: an image folder holds"):
        evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", folder, "--val-split", "valid")


def test_folder_without_images(tmp_path):
    """A split without any image."""
    (tmp_path / "train" / "red").mkdir(parents=True)
    with ends("train holds no image"):
        probe.label_data("folder", str(tmp_path), "train")


def test_splits_with_different_classes(folder, tmp_path):
    """The classes that are in one split only are named."""
    write_folder(tmp_path, "train", COLOURS, 2)
    write_folder(tmp_path, "val", {"red": COLOURS["red"], "green": (50, 200, 50)}, 2)
    with ends("different classes: .*blue.*green"):
        evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", tmp_path)


def test_real_flowers(real_data):
    """Five classes with 300 training and 100 validation photos each."""
    for split, size in (("train", 300), ("val", 100)):
        data = probe.label_data("folder", str(real_data / "flowers"), split)
        assert len(data.names) == 5 and data.labels.sum(0).tolist() == [size] * 5 and len(data.images) == 5 * size


# ------------------------------------------------------------------------------------------ weights


def test_weights_of_a_backbone(folder, tmp_path):
    """A backbone.pth needs no --arch, and its numbers are what is measured."""
    torch.manual_seed(5)
    backbone = common.build_backbone("resnet18")
    torch.save(backbone.state_dict(), tmp_path / "backbone.pth")
    loaded = eval_linear.load_backbone(str(tmp_path / "backbone.pth"), None, 0)
    assert all(torch.equal(a, b) for a, b in zip(backbone.state_dict().values(), loaded.state_dict().values(), strict=True))
    assert evaluate(tmp_path, "--weights", tmp_path / "backbone.pth", "--data", "folder", "--root", folder)["mean"]["mAP"] > 0


def test_another_architecture_is_refused(tmp_path):
    """--arch resnet50 with a file of a ResNet-18."""
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "backbone.pth")
    with ends("backbone.pth is a resnet18, not --arch resnet50"):
        eval_linear.load_backbone(str(tmp_path / "backbone.pth"), "resnet50", 0)


def test_random_weights_depend_on_the_seed():
    """The same seed gives the same network, another one another."""
    one, same, other = (eval_linear.load_backbone("random", "resnet18", seed).conv1.weight for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_imagenet_weights_offline(tmp_path, monkeypatch):
    """Without a network: one line that says so."""

    def no_network(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", no_network)
    with ends("--weights imagenet.*cannot be downloaded.*Name or service not known"):
        eval_linear.load_backbone("imagenet", "resnet18", 0)


def test_imagenet_weights_in_the_cache(tmp_path, monkeypatch):
    """torchvision's file, where torchvision keeps it after a download: its classifier is left behind."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    assert torch.equal(eval_linear.load_backbone("imagenet", "resnet18", 0).conv1.weight, state["conv1.weight"])


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "command, message",
    [
        ([*RANDOM, "--protocol", "sgd-virtex", "--data", "voc07"], "--protocol sgd-virtex wants one label per image"),
        (["--weights", "random"], "--weights random needs --arch"),
        (["--weights", "imagenet"], "--weights imagenet needs --arch"),
        ([*RANDOM, "--batch-size", "0"], "--batch-size 0"),
        ([*RANDOM, "--runs", "0"], "--runs"),
    ],
)
def test_wrong_flags_are_refused(command, message):
    """Before any data is read."""
    with ends(message):
        eval_linear.get_args(command)


def test_batch_size_and_processes(monkeypatch):
    """The global batch is divided over the processes."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with ends("--batch-size 16 cannot be divided over 3 processes"):
        eval_linear.get_args([*RANDOM, "--batch-size", "16"])


def test_learning_rate_is_scaled():
    """0.3 belongs to a batch of 256; --lr is taken literally."""
    lr = lambda *flags: eval_linear.get_args([*RANDOM, *flags]).lr
    assert lr() == pytest.approx(0.3) and lr("--batch-size", "64") == pytest.approx(0.075) and lr("--batch-size", "64", "--lr", "0.2") == 0.2


# ------------------------------------------------------------------------------------------ two processes


def test_two_processes(folder, tmp_path):
    """torchrun with two gloo processes: one result, one table, and as good as with one process."""
    command = (*RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 8, "--image-size", 32, "--workers", 0, "--output", tmp_path)
    ran = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval_linear.py", *command)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("top-1") == 1 and json.loads((tmp_path / "result.json").read_text())["mean"]["top-1"] > 95
