"""eval_linear.py: the SVM probe against scikit-learn, the protocols on small data in genuine layouts, the weights it takes."""

import argparse
import json
import math
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from conftest import FeaturesAsGiven, run_script
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
    eval_linear.main(eval_linear.get_args([str(word) for word in (*tiny, *command)]))
    return json.loads((output / "result.json").read_text())


RANDOM = ("--weights", "random", "--arch", "resnet18")
VGG = ("--weights", "random", "--arch", "vgg16", "--protocol", "layers", "--batch-size", 16)
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


SOLVERS = pytest.mark.parametrize("solver", ("torch", "liblinear"))


@SOLVERS
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_svm_probe_is_scikit_learns(features, solver):
    """The same C by cross-validation and the same average precision, difficult entries included."""
    scores = probe.svm_probe(*features, list("abcdef"), solver=solver)
    chosen = set()
    for k in range(3):
        expected, C = literal_probe(*features, k)
        chosen.add(C)
        assert scores["abcdef"[k]] == pytest.approx(expected, abs=1e-9)
        others = {literal_probe(*features, k, (other,))[0] for other in {0.01, 0.1, 1.0, 10.0} - {C}}
        assert any(abs(other - expected) > 1e-3 for other in others)  # or the choice of C would not be tested
    assert len(chosen) > 1


@SOLVERS
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_class_too_rare_for_cross_validation(features, solver):
    """Fewer than three positives: C = 1."""
    assert probe.svm_probe(*features, list("abcdef"), solver=solver)["d"] == pytest.approx(literal_probe(*features, 3, (1.0,))[0], abs=1e-9)


@SOLVERS
def test_classes_without_positives_are_left_out(features, solver):
    """No positive in testing or in training: no score, and the others are not moved by it."""
    assert sorted(probe.svm_probe(*features, list("abcdef"), solver=solver)) == list("abcd")


@pytest.mark.parametrize("width", (12, 150), ids=("few features", "more features than images"))
@pytest.mark.parametrize("cost", (1e-5, 0.1, 10.0, 1e5))
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_solve_svms_finds_the_minimum(cost, width):
    """The gradient of the squared hinge, written in loops, is zero; an example of cost zero is as good as absent."""
    rng = np.random.default_rng(width)
    x, y = rng.normal(size=(60, width)) / math.sqrt(width), rng.random((60, 2)) < 0.3
    costs = np.full((60, 2), cost)
    costs[:7, 1] = 0
    basis = probe.principal_axes(torch.from_numpy(x))
    assert basis.shape[1] == min(60, width) and torch.allclose(basis.T @ basis, torch.eye(len(basis.T), dtype=torch.float64), atol=1e-8)
    w = basis @ probe.solve_svms(torch.from_numpy(x) @ basis, torch.from_numpy(y), torch.from_numpy(costs))
    for k in range(2):
        gradient, at_zero = w[:, k].numpy().copy(), np.zeros(width)
        for i in range(60):
            sign, c = (1, 2 * costs[i, k]) if y[i, k] else (-1, costs[i, k])  # positives weigh 2
            gradient -= 2 * c * max(0, 1 - sign * w[:, k].numpy() @ x[i]) * sign * x[i]
            at_zero -= 2 * c * sign * x[i]
        assert np.linalg.norm(gradient) <= 1.1e-5 * np.linalg.norm(at_zero)


def test_solve_svms_from_another_start():
    """The path over the costs ends where a cold start does."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(80, 9))), torch.from_numpy(rng.random((80, 3)) < 0.4)
    cold = probe.solve_svms(x, y, torch.full((80, 3), 10.0, dtype=torch.float64), tolerance=1e-9)
    warm = probe.solve_svms(x, y, torch.full((80, 3), 10.0, dtype=torch.float64), start=100 * torch.ones_like(cold), tolerance=1e-9)
    assert torch.allclose(cold, warm, atol=1e-6)


def same_by_both_solvers(data, size, images):
    """On the features of a random backbone, mAP and every class agree to 0.05 points."""
    torch.manual_seed(0)
    backbone = common.build_backbone("resnet18")
    train, test = data
    train = train.select(np.random.default_rng(0).permutation(len(train.images))[:images])
    test = test.select(np.random.default_rng(1).permutation(len(test.images))[:images])
    features = [array for part in (train, test) for array in probe.extract_features(backbone, part, size, CPU)]
    fast, slow = (probe.svm_probe(*features, train.names, solver=solver) for solver in ("torch", "liblinear"))
    assert fast.keys() == slow.keys() and len(fast) > 4
    assert max(abs(fast[name] - slow[name]) for name in fast) < 0.05


def test_solvers_agree_on_shapes():
    """On built-in scenes."""
    same_by_both_solvers([probe.label_data("shapes", None, split) for split in ("train", "val")], 32, 200)


def test_solvers_agree_on_flowers(real_data):
    """On real photos."""
    same_by_both_solvers([probe.label_data("folder", str(real_data / "flowers"), split) for split in ("train", "val")], 48, 300)


def test_chunks_of_classes_change_nothing(features, monkeypatch):
    """What does not fit in memory together is solved in parts: here one class at a time."""
    together = probe.svm_probe(*features, list("abcdef"))
    monkeypatch.setattr(probe, "CHUNK", 1)
    assert probe.svm_probe(*features, list("abcdef")) == pytest.approx(together, abs=1e-9)


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
        batches.append([batch for batch, _ in zip(loader, range(3))])
    for one, two in zip(*batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_label_view_gives_the_right_classes(folder):
    """The class of an augmented image is that of its folder."""
    view = eval_linear.LabelView(probe.label_data("folder", str(folder), "train"), 32, 0)
    for index in (0, 5, 16, 31):
        image, _, labels, _ = view[0, index]
        assert labels.argmax() == (image[..., 0].mean() > image[..., 2].mean()) == (index >= 16)


def test_a_replacement_brings_its_own_class(tmp_path):
    """Where the last blue image cannot be decoded, the first red one takes its place, as red."""
    write_folder(tmp_path, "train", COLOURS, 2)
    (tmp_path / "train" / "blue" / "1.png").write_text("no picture")
    view = eval_linear.LabelView(probe.label_data("folder", str(tmp_path), "train"), 32, 0)
    image, _, labels, unreadable = view[0, 1]
    assert image[..., 0].mean() > image[..., 2].mean() and labels.tolist() == [0, 1] and unreadable == 1


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
    backbone = common.build_backbone("vgg16" if protocol == "layers" else "resnet18")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(eval_linear, "load_backbone", lambda *_: backbone)
    length = ("--epochs", 1) if protocol in eval_linear.TRAINED else ()
    evaluate(tmp_path, *RANDOM, "--protocol", protocol, "--data", "folder", "--root", folder, *length)
    assert not backbone.training and all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


def test_undecodable_training_images_are_named(tmp_path, capsys):
    """sgd-virtex says which training image it had to replace, as the other scripts do."""
    for split in ("train", "val"):
        write_folder(tmp_path, split, COLOURS, 4)
    (tmp_path / "train" / "red" / "1.png").write_text("no picture")
    evaluate(tmp_path / "out", *RANDOM, *SGD, "--data", "folder", "--root", tmp_path, "--epochs", 2)
    assert str(tmp_path / "train" / "red" / "1.png") in capsys.readouterr().out


def test_a_broken_link_and_a_broken_photo(tmp_path, capsys):
    """Both are left out by name, and told again when the kept features are used."""
    for split in ("train", "val"):
        write_folder(tmp_path, split, COLOURS, 4)
    (tmp_path / "train" / "red" / "1.png").write_text("no picture")
    (tmp_path / "train" / "red" / "link.png").symlink_to(tmp_path / "nowhere.png")
    command = (*RANDOM, "--data", "folder", "--root", tmp_path)
    first, named = evaluate(tmp_path / "out", *command), capsys.readouterr().out
    assert all(f"cannot decode {tmp_path / 'train' / 'red' / name}" in named for name in ("1.png", "link.png"))
    assert evaluate(tmp_path / "out", *command)["mean"] == first["mean"]
    assert f"2 of {4 * len(COLOURS) + 1} images could not be decoded" in capsys.readouterr().out


def test_hidden_folders_are_no_classes(tmp_path):
    """.ipynb_checkpoints and the like."""
    write_folder(tmp_path, "train", COLOURS, 2)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    assert list(probe.label_data("folder", str(tmp_path), "train").names) == sorted(COLOURS)


def test_a_class_that_is_called_as_the_score_is(tmp_path):
    """Its score would be overwritten by the mean."""
    for split in ("train", "val"):
        write_folder(tmp_path, split, COLOURS, 2)
        (tmp_path / split / "red").rename(tmp_path / split / "mAP")
    with ends("a class is called mAP"):
        evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", tmp_path)


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


# ------------------------------------------------------------------------------------------ features extracted once


def map_of_numbers(size):
    """One image whose pixel (row, column) is 10 row + column in each channel, as uint8 (1, size, size, 3)."""
    numbers = 10 * torch.arange(size)[:, None] + torch.arange(size)
    return numbers[None, ..., None].expand(1, size, size, 3).to(torch.uint8)


def test_average_pooling_2x2():
    """ICMLM App. F.2: the 7x7 maps in 2x2 parts of 4x4 places (they share the middle row and column), channel by channel: 8192 for ResNet-50."""
    images = map_of_numbers(7)
    pixels, expected = common.augment(images)[0], []
    for channel in range(3):
        for rows in (range(4), range(3, 7)):
            for columns in (range(4), range(3, 7)):
                expected.append(np.mean([pixels[channel, i, j] for i in rows for j in columns]))
    np.testing.assert_allclose(probe.pooled(FeaturesAsGiven(3), images, CPU, cells=2)[0], expected, rtol=1e-5)
    assert 2048 * 4 == 8192 and probe.pooled(FeaturesAsGiven(3), images, CPU)[0].numpy() == pytest.approx(pixels.mean((1, 2)).numpy(), rel=1e-5)


def features_in(output, split="train"):
    return np.load(output / f"features_{split}.npz")["features"]


@pytest.mark.parametrize("protocol, part, cells", [("svm-virtex", 224 / 256, 1), ("svm-icmlm", 1, 2), ("sgd-mct", 224 / 256, 1), ("logreg-icmlm", 1, 1)])
def test_what_is_extracted(folder, tmp_path, protocol, part, cells):
    """The crop and the pooling of each paper, from training and from test images alike, without augmentation."""
    evaluate(tmp_path, *RANDOM, "--protocol", protocol, "--data", "folder", "--root", folder, "--image-size", 64, *(("--epochs", 1) if protocol in eval_linear.TRAINED else ()))
    backbone = eval_linear.load_backbone("random", "resnet18", 0).eval()
    for split, name in (("train", "train"), ("val", "test")):
        image = probe.label_data("folder", str(folder), split).images[5]
        pixels = np.array(Image.open(image).resize((64, 64), Image.BILINEAR, (20 - 20 * part, 20 - 20 * part, 20 + 20 * part, 20 + 20 * part)))
        found = features_in(tmp_path, name)
        assert found.shape == (32 if split == "train" else 16, 512 * cells**2)
        np.testing.assert_allclose(found[5], probe.pooled(backbone, torch.from_numpy(pixels)[None], CPU, cells=cells)[0], rtol=1e-3, atol=1e-4)


def count_extractions(monkeypatch):
    """-> list to which every extraction of features adds the name of its file"""
    extracted, extract = [], probe.extract_features
    monkeypatch.setattr(probe, "extract_features", lambda *given: extracted.append(given[6]) or extract(*given))
    return extracted


def test_features_are_kept(folder, tmp_path, monkeypatch):
    """Extracted once, however many runs; found again by another protocol with the same crop and pooling, with the same scores."""
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "backbone.pth")
    command, extracted = ("--weights", tmp_path / "backbone.pth", "--data", "folder", "--root", folder), count_extractions(monkeypatch)
    first = evaluate(tmp_path, *command, "--runs", 2)
    assert extracted == ["features_train.npz", "features_test.npz"]
    assert evaluate(tmp_path, *command, "--runs", 2)["runs"] == first["runs"]
    evaluate(tmp_path, *command, "--protocol", "sgd-mct", "--epochs", 1)
    assert len(extracted) == 2


@pytest.mark.parametrize("content", (b"", b"PK\x03\x04 and no more", b"a text"))
def test_damaged_features_are_made_again(folder, tmp_path, capsys, content):
    """A file that was cut off does not block the folder."""
    first = evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", folder)
    (tmp_path / "features_train.npz").write_bytes(content)
    assert evaluate(tmp_path, *RANDOM, "--data", "folder", "--root", folder)["mean"] == first["mean"]
    assert "features_train.npz is damaged" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_refused(folder, tmp_path, monkeypatch):
    """In the weights, the features or the outputs of the linear layer: an error, not a score that is chance."""
    state = common.build_backbone("resnet18").state_dict()
    state["conv1.weight"][0] = math.nan
    torch.save(state, tmp_path / "nan.pth")
    with ends("nan.pth holds weights that are not finite"):
        evaluate(tmp_path, "--weights", tmp_path / "nan.pth", "--data", "folder", "--root", folder)
    with ends("the linear layer has diverged"):
        evaluate(tmp_path, *RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 2, "--lr", 1e38)
    with ends("the linear layer has diverged"):
        evaluate(tmp_path, *RANDOM, "--protocol", "sgd-mct", "--data", "folder", "--root", folder, "--lr", 1e38)
    monkeypatch.setattr(probe, "pooled", lambda backbone, images, *_: torch.full((len(images), 4), math.inf))
    with ends("the features are not finite"):
        evaluate(tmp_path / "other", *RANDOM, "--data", "folder", "--root", folder)


@pytest.mark.parametrize("change", ("weights", "size", "list", "file", "crop", "precision"))
def test_features_of_something_else_are_not_used(tmp_path, monkeypatch, change):
    """Other weights, another size, other images, an image that has changed, another crop or precision: extracted anew."""
    for split in ("train", "val"):
        write_folder(tmp_path, split, COLOURS, 4)
    command = [*RANDOM, "--data", "folder", "--root", tmp_path]
    evaluate(tmp_path, *command)
    before, extracted = features_in(tmp_path), count_extractions(monkeypatch)
    if change == "file":
        Image.new("RGB", (40, 40)).save(tmp_path / "train" / "red" / "3.png")
    flags = {"weights": ("--seed", 1), "size": ("--image-size", 64), "list": ("--train-images", 7), "crop": ("--protocol", "svm-icmlm"), "precision": ("--amp", "bf16")}
    evaluate(tmp_path, *command, *flags.get(change, ()))
    after = features_in(tmp_path)
    assert "features_train.npz" in extracted
    assert before.shape != after.shape or not np.array_equal(before, after)


def test_labels_that_were_corrected_are_used(voc, tmp_path, monkeypatch):
    """The same images with other labels: what was kept is not used."""
    command = (*RANDOM, "--data", "voc07", "--root", voc)
    before, load = evaluate(tmp_path, *command)["mean"], probe.label_data

    def corrected(*given):
        data = load(*given)
        return data._replace(labels=data.labels[:, ::-1])

    monkeypatch.setattr(probe, "label_data", corrected)
    after = evaluate(tmp_path, *command)["mean"]
    assert after[min(shapes.SHAPES)] == pytest.approx(before[max(shapes.SHAPES)])


# ------------------------------------------------------------------------------------------ the protocols, one by one


def test_forty_costs(folder, tmp_path, monkeypatch):
    """svm-icmlm: 40 costs, log-uniform between 1e-5 and 1e5, drawn by the seed; svm-virtex: its four."""
    asked = []
    monkeypatch.setattr(probe, "torch_svms", lambda x, y, test_x, costs, device: asked.append(np.array(costs)) or test_x[:, :2])
    command = (*RANDOM, "--data", "folder", "--root", folder)
    evaluate(tmp_path, *command, "--protocol", "svm-icmlm", "--runs", 2)
    evaluate(tmp_path, *command)
    assert asked[2].tolist() == [0.01, 0.1, 1, 10]
    for costs in asked[:2]:
        powers = np.log10(costs)
        assert len(costs) == 40 and (np.diff(costs) > 0).all() and powers.min() >= -5 and powers.max() <= 5
        assert np.histogram(powers, 5, (-5, 5))[0].min() >= 3  # evenly over the powers
    assert not np.array_equal(asked[0], asked[1])


def test_solver_flag(folder, tmp_path, monkeypatch):
    """--solver liblinear is scikit-learn's, which the default is not."""
    monkeypatch.setattr(probe, "torch_svms", None)
    command = (*RANDOM, "--data", "folder", "--root", folder)
    assert evaluate(tmp_path, *command, "--solver", "liblinear")["mean"]["mAP"] > 95
    with pytest.raises(TypeError):
        evaluate(tmp_path, *command)


def record_sgd(monkeypatch):
    """-> list to which every step of SGD adds its groups' lr, momentum and weight decay"""
    steps, step = [], torch.optim.SGD.step

    def recorded(self, *given):
        steps.append([(group["lr"], group["momentum"], group["weight_decay"]) for group in self.param_groups])
        return step(self, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    return steps


def test_schedule_of_sgd_virtex(folder, tmp_path, monkeypatch):
    """0.3 for batch 256, scaled linearly, a cosine to zero; momentum 0.9, no weight decay; 100 epochs."""
    steps = record_sgd(monkeypatch)
    evaluate(tmp_path, *RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 5)
    lr = 0.3 * 16 / 256
    assert [step[0] for step in steps] == [(pytest.approx(lr * (1 + math.cos(math.pi * n / 10)) / 2), 0.9, 0) for n in range(10)]
    assert eval_linear.TRAINED["sgd-virtex"] == (100, 256, 0.3)


def test_schedule_of_sgd_mct(folder, tmp_path, monkeypatch):
    """30 for batch 256, divided by 5 at epochs 30, 40 and 50 of 60 (here 6, 8 and 10 of 12); momentum 0.9, no weight decay."""
    steps = record_sgd(monkeypatch)
    result = evaluate(tmp_path, *RANDOM, "--protocol", "sgd-mct", "--data", "folder", "--root", folder, "--epochs", 12, "--batch-size", 32)
    factors = [1] * 6 + [1 / 5] * 2 + [1 / 25] * 2 + [1 / 125] * 2
    assert [step[0] for step in steps] == [(pytest.approx(30 * 32 / 256 * factor), 0.9, 0) for factor in factors]
    assert eval_linear.TRAINED["sgd-mct"] == (60, 256, 30.0) and result["mean"]["top-1"] > 95


def test_linear_layers_start_as_in_virtex():
    """N(0, 0.01) and bias 0 [App. A.1]."""
    layer = eval_linear.linear_layer(400, 50)
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05) and abs(layer.weight.mean()) < 1e-3 and not layer.bias.any()


def test_layers_side_by_side_are_trained_separately():
    """The layer of one learning rate is the same beside another that diverges as alone; weight decay is its own, too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), np.eye(3, dtype=np.int8)[rng.integers(0, 3, 40)]
    args, trained = argparse.Namespace(epochs=4, batch_size=16), []
    for trials in ([(0.5, 0.0)], [(0.5, 0.0), (1e30, 1e-5)], [(0.5, 0.1)]):
        torch.manual_seed(0)
        trained.append(eval_linear.train_linear(x, y, trials, lambda share: 1 - share, args, CPU, 0)[0].weight)
    assert torch.equal(trained[0], trained[1]) and not torch.allclose(trained[0], trained[2])


def test_logreg_searches_on_held_out_images(monkeypatch, capsys):
    """25 trials on four fifths, learning rates log-uniform in [0.1, 100], decays uniform in [0, 1e-5]; the best for the other fifth is trained on all."""
    rng = np.random.default_rng(0)
    y = np.eye(2, dtype=np.int8)[rng.integers(0, 2, 50)]
    x = (7 * y + rng.normal(size=y.shape)).astype(np.float32)
    calls = []

    def trained(x, y, trials, factor, *_):
        calls.append((x, trials, [factor(share) for share in (0, 0.5, 1)]))
        layers = [torch.nn.Linear(2, 2) for _ in trials]
        for n, layer in enumerate(layers):  # only the trial number 17 knows the classes, and the last one
            layer.weight.data, layer.bias.data = torch.eye(2) * (1 if n == 17 or len(layers) == 1 else -1), torch.zeros(2)
        return layers

    monkeypatch.setattr(eval_linear, "train_linear", trained)
    assert eval_linear.logreg_icmlm(x, y, x, y, ["a", "b"], None, CPU, 3) == {"top-1": 100}
    (fit, trials, factors), (everything, [final], _) = calls
    rates, decays = np.log10([lr for lr, _ in trials]), np.array([decay for _, decay in trials])
    assert len(trials) == 25 and (-1 <= rates).all() and (rates <= 2).all() and (0 <= decays).all() and (decays <= 1e-5).all()
    assert np.ptp(rates) > 2 and np.ptp(decays) > 5e-6 and factors == pytest.approx([1, 0.5, 0])  # a cosine
    assert final == trials[17] and len(fit) == 40 and len(everything) == 50
    assert np.linalg.norm(everything, axis=1) == pytest.approx(1, abs=1e-5)
    assert eval_linear.TRAINED["logreg-icmlm"][1] == 1024 and f"{final[0]:.3g}" in capsys.readouterr().out


def test_logreg_learns(folder, tmp_path):
    """Red against blue."""
    assert evaluate(tmp_path, *RANDOM, "--protocol", "logreg-icmlm", "--data", "folder", "--root", folder, "--epochs", 30)["mean"]["top-1"] > 95


def test_layers_are_the_last_three_convolutions():
    """C-11, C-12, C-13 of VGG-16, each pooled to 4x4 cells: 8192 numbers."""
    torch.manual_seed(0)
    backbone, images = common.build_backbone("vgg16").eval(), torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    args = argparse.Namespace(protocol="layers", amp="off")
    features = eval_linear.probed_features(backbone, images, None, args, CPU)
    with torch.no_grad():
        maps = backbone.maps(common.augment(images))
    assert len(features) == 3
    for feature, name in zip(features, ("C-11", "C-12", "C-13"), strict=True):  # maps of 4x4 places: nothing is averaged
        assert feature.shape == (2, 8192) and torch.allclose(feature, maps[name].flatten(1))
    jitter = torch.tensor([[1.3, 0.7, 1.2, 0.05]] * 2)
    with torch.no_grad():
        jittered = backbone.maps(common.augment(images, jitter))["C-13"].flatten(1)
    assert torch.allclose(eval_linear.probed_features(backbone, images, jitter, args, CPU)[2], jittered) and not torch.allclose(jittered, features[2])


def test_layers_are_trained_with_colour_jitter(folder):
    """Crops and flips as sgd-virtex has them, and colour jitter, which sgd-virtex has not."""
    data = probe.label_data("folder", str(folder), "train")
    plain, jittered = (eval_linear.LabelView(data, 32, 0, jitter) for jitter in (0.0, 1.0))
    assert all(np.array_equal(plain[0, i][0], jittered[0, i][0]) and plain[0, i][1].tolist() == [1, 1, 1, 0] for i in range(8))
    assert np.ptp([jittered[0, i][1] for i in range(8)], 0).min() > 0.05 and not np.array_equal(plain[0, 3][0], plain[1, 3][0])


def test_layers_of_images_with_one_label(folder, tmp_path, monkeypatch):
    """Top-1 after each convolution, learned by SGD with a cosine; better than chance even after a random network."""
    steps = record_sgd(monkeypatch)
    mean = evaluate(tmp_path, *VGG, "--data", "folder", "--root", folder, "--epochs", 8, "--lr", 0.1)["mean"]
    assert list(mean) == ["C-11 top-1", "C-12 top-1", "C-13 top-1"] and min(mean.values()) > 80
    assert [step[0][0] for step in steps] == [pytest.approx(0.1 * (1 + math.cos(math.pi * n / 16)) / 2) for n in range(16)]


def test_layers_of_images_with_several_labels(voc, tmp_path):
    """mAP after each convolution."""
    mean = evaluate(tmp_path, *VGG, "--data", "voc07", "--root", voc, "--epochs", 1)["mean"]
    assert list(mean) == ["C-11 mAP", "C-12 mAP", "C-13 mAP"] and all(0 < score < 100 for score in mean.values())


def test_multi_label_loss():
    """Binary cross-entropy summed over classes, mean over images; difficult entries do not count."""
    rng = np.random.default_rng(0)
    logits, labels, expected = rng.normal(size=(4, 5)), rng.integers(-1, 2, (4, 5)), 0
    for row, marks in zip(logits, labels):
        for logit, label in zip(row, marks):
            chance = 1 / (1 + math.exp(-logit))
            expected -= {1: math.log(chance), 0: math.log(1 - chance), -1: 0}[int(label)] / 4
    assert (labels == -1).any() and eval_linear.multi_label_loss(torch.from_numpy(logits), torch.from_numpy(labels)).item() == pytest.approx(expected)


def test_layers_are_scored_without_difficult_entries():
    """Average precision of a class over the images where it is not difficult, then the mean over classes with a positive."""
    logits, labels = np.array([[3.0, 1], [2, 2], [1, 3]]), np.array([[1, 0], [-1, 0], [0, 0]], np.int8)
    assert eval_linear.scores_of(logits, labels, ["a", "b"], several=True) == {"mAP": 100}
    assert eval_linear.scores_of(logits, np.array([[0, 0], [1, 0], [-1, 1]], np.int8), ["a", "b"], several=True) == {"mAP": 75}


def test_svm_on_coco(coco_folder, tmp_path):
    """Several labels per image, from instances."""
    mean = evaluate(tmp_path, *RANDOM, "--data", "coco", "--root", coco_folder)["mean"]
    assert len(mean) > 4 and all(0 < score <= 100 for score in mean.values())


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


def test_foreign_files(tmp_path):
    """MoCo's and DINO's files as they are downloaded; DINO keeps its arguments in an object that is no tensor."""
    state = common.build_backbone("resnet18").state_dict()
    moco = {"module.encoder_q." + key: value for key, value in state.items()} | {"module.encoder_q.fc.weight": torch.zeros(128, 512), "module.queue": torch.zeros(2)}
    dino = {"backbone." + key: value for key, value in state.items()} | {"head.last_layer.weight_g": torch.zeros(2)}
    torch.save({"epoch": 200, "arch": "resnet18", "state_dict": moco}, tmp_path / "moco.pth.tar")
    torch.save({"teacher": dino, "args": argparse.Namespace(arch="resnet18")}, tmp_path / "dino.pth")
    for name in ("moco.pth.tar", "dino.pth"):
        loaded = eval_linear.load_backbone(str(tmp_path / name), None, 0).state_dict()
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize(
    "change, named",
    [(lambda s: s.pop("layer4.1.bn2.weight"), "is no resnet18, the closest match: missing .'layer4.1.bn2.weight'.*unexpected .."),
     (lambda s: s.update({"attnpool.weight": torch.zeros(1)}), "is no resnet18.*unexpected .'attnpool.weight'"),
     (lambda s: [s.pop(key) for key in list(s)[:1]], "holds no ResNet or VGG")],
    ids=("missing", "unexpected", "not a ResNet"),
)  # fmt: skip
def test_wrong_checkpoints_are_refused(folder, tmp_path, change, named):
    """By the file's name and the keys that do not fit, before any image is read."""
    state = dict(common.build_backbone("resnet18").state_dict())
    change(state)
    torch.save(state, tmp_path / "wrong.pth")
    with ends(f"wrong.pth {named}"):
        evaluate(tmp_path, "--weights", tmp_path / "wrong.pth", "--data", "folder", "--root", tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "command, message",
    [
        ([*RANDOM, "--protocol", "sgd-virtex", "--data", "voc07"], "--protocol sgd-virtex wants one label per image"),
        (["--weights", "random"], "--weights random needs --arch"),
        (["--weights", "imagenet"], "--weights imagenet needs --arch"),
        ([*RANDOM, *SGD, "--batch-size", "0"], "--batch-size 0"),
        ([*RANDOM, *SGD, "--epochs", "0"], "--epochs must be at least 1"),
        ([*RANDOM, *SGD, "--lr", "0"], "--lr above 0"),
        ([*RANDOM, "--epochs", "5"], "--epochs, --batch-size and --lr do not go with --protocol svm-virtex"),
        ([*RANDOM, "--protocol", "sgd-mct", "--data", "coco"], "--protocol sgd-mct wants one label per image"),
        ([*RANDOM, "--protocol", "logreg-icmlm"], "--protocol logreg-icmlm wants one label per image"),
        ([*RANDOM, "--protocol", "logreg-icmlm", "--lr", "1"], "--lr does not go with --protocol logreg-icmlm"),
        ([*RANDOM, *SGD, "--solver", "torch"], "--solver does not go with --protocol sgd-virtex"),
        ([*RANDOM, "--train-images", "0"], "--train-images must be at least 1"),
        ([*RANDOM, "--runs", "0"], "--runs"),
        ([*RANDOM, "--seed", "-1"], "--seed -1 must be from 0"),
    ],
)
def test_wrong_flags_are_refused(command, message):
    """Before any data is read."""
    with ends(message):
        eval_linear.get_args([str(word) for word in command])


def test_layers_want_a_vgg(folder, tmp_path):
    """Another architecture has no C-11."""
    with ends("--protocol layers looks at the last three convolutions of a VGG-16"):
        evaluate(tmp_path, *RANDOM, "--protocol", "layers", "--data", "folder", "--root", folder)


def test_logreg_wants_images_to_hold_out(folder, tmp_path):
    """Four images have no fifth."""
    with ends("logreg-icmlm holds out a fifth of the training images, and there are 4"):
        evaluate(tmp_path, *RANDOM, "--protocol", "logreg-icmlm", "--data", "folder", "--root", folder, "--train-images", 4)


def test_output_that_cannot_be_made(folder, tmp_path):
    """--output names a file."""
    (tmp_path / "file").touch()
    with ends("--output .*file cannot be made"):
        evaluate(tmp_path / "file", *RANDOM, "--data", "folder", "--root", folder)


def test_batch_size_and_processes(monkeypatch):
    """The global batch is divided over the processes."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with ends("--batch-size 16 cannot be divided over 3 processes"):
        eval_linear.get_args([*RANDOM, "--protocol", "sgd-virtex", "--batch-size", "16"])


def test_learning_rate_is_scaled():
    """0.3 belongs to a batch of 256; --lr is taken literally."""
    lr = lambda *flags: eval_linear.get_args([*RANDOM, "--protocol", "sgd-virtex", "--data", "folder", *flags]).lr
    assert lr() == pytest.approx(0.3) and lr("--batch-size", "64") == pytest.approx(0.075) and lr("--batch-size", "64", "--lr", "0.2") == 0.2


# ------------------------------------------------------------------------------------------ two processes


def test_two_processes(folder, tmp_path):
    """torchrun with two gloo processes: one result, one table, and as good as with one process."""
    command = (*RANDOM, *SGD, "--data", "folder", "--root", folder, "--epochs", 8, "--image-size", 32, "--workers", 0, "--output", tmp_path)
    ran = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval_linear.py", *command)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("top-1") == 1 and json.loads((tmp_path / "result.json").read_text())["mean"]["top-1"] > 95


def test_two_processes_extract_what_one_does(tmp_path):
    """Each image once and in order, also when their number is odd and one cannot be decoded: the features and the scores of one process."""
    write_folder(tmp_path, "train", COLOURS, 9)
    write_folder(tmp_path, "val", COLOURS, 5)
    (tmp_path / "train" / "blue" / "3.png").write_text("no picture")
    command = [*RANDOM, "--data", "folder", "--root", tmp_path, "--train-images", 17]
    alone = evaluate(tmp_path / "alone", *command)
    ran = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval_linear.py", *command, "--image-size", 32, "--workers", 0, "--output", tmp_path / "two")
    assert ran.returncode == 0, ran.stderr[-3000:]
    for split, count in (("train", 16), ("test", 10)):
        one, two = (np.load(tmp_path / name / f"features_{split}.npz") for name in ("alone", "two"))
        assert len(one["features"]) == count and np.array_equal(one["labels"], two["labels"])
        np.testing.assert_allclose(one["features"], two["features"], rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "two" / "result.json").read_text())["mean"] == pytest.approx(alone["mean"]) and ran.stdout.count("mAP") == 1
