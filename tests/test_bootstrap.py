"""extras/bootstrap.py and the verdict of eval_linear.py, against literal draws."""

import contextlib
import io
import json
import math
import shutil
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from conftest import REAL, result, run_here
from PIL import Image
from sklearn.metrics import average_precision_score

import common
import eval_linear
from extras import bootstrap

N, CLASSES = 60, 7


@pytest.fixture(autouse=True)
def fifty_draws(monkeypatch):
    monkeypatch.setattr(bootstrap, "DRAWS", 50)
    monkeypatch.setattr(bootstrap, "PART", 25)


def literal_draws(photos, seed=0):
    """-> for each draw the list of photos, with repetitions"""
    draws = []
    for counts in bootstrap.counts_of_draws(photos, seed):
        assert counts.shape == (photos, 25) and (counts.sum(0) == photos).all()
        for column in counts.T:
            draws.append([n for n, count in enumerate(column) for _ in range(count)])
    return draws


def interpolated(truth, decision):
    """Goyal et al.: at each recall the best precision at this or a higher recall, literally"""
    points = []
    for threshold in sorted(set(decision), reverse=True):
        found = decision >= threshold
        points.append(((truth[found] == 1).sum() / (truth == 1).sum(), (truth[found] == 1).mean()))
    area = before = 0.0
    for n, (recall, _) in enumerate(points):
        area += (recall - before) * max(precision for _, precision in points[n:])
        before = recall
    return area


@pytest.mark.parametrize("precision", [average_precision_score, interpolated])
def test_map_of_literal_draws(precision):
    """Equal decisions, "difficult" labels, a class that few draws have, one that was not learned,
    one that no photo has, and one that all have; photos of another run, which are drawn, too
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (N, CLASSES)).astype(np.int8)
    labels[:, 1] = 0
    labels[7, 1] = 1
    labels[:, 5], labels[:, 6] = 0, 1
    decisions = (labels + rng.normal(size=(N, CLASSES))).round(1)
    decisions[:, 3] = np.nan
    rows = np.sort(rng.choice(80, N, replace=False))
    given = {"mAP": torch.from_numpy(decisions)}, torch.from_numpy(labels), rows, 80
    found = bootstrap.scores_of_draws(*given, interpolated=precision is interpolated)["mAP"]
    expected, without = [], 0
    for draw in literal_draws(80):
        kept = [np.flatnonzero(rows == photo)[0] for photo in draw if photo in rows]
        of_classes = []
        for c in (0, 1, 2, 4):
            counted = [n for n in kept if labels[n, c] >= 0]
            truth, decision = labels[counted, c], decisions[counted, c]
            if truth.any():
                of_classes.append(100 * precision(truth, decision))
        without += len(of_classes) == 3
        expected.append(np.mean(of_classes))
    assert 5 < without < 40
    assert found == pytest.approx(np.array(expected))


def test_a_draw_of_all_photos_is_the_score():
    """With each photo once, it is what eval_linear prints, for each way to score."""
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(rng.integers(-1, 2, (N, CLASSES)).astype(np.int8))
    x = torch.from_numpy(rng.normal(size=(N, CLASSES)).round(1))
    once, names = np.ones((N, 1), np.int32), list(range(CLASSES))
    for smooth in (False, True):
        rankings = [bootstrap.rank(*column) for column in zip(x.T.numpy(), labels.T.numpy())]
        [found] = bootstrap.mean_average_precision(rankings, smooth, once)
        assert found == pytest.approx(eval_linear.score(x, labels, names, smooth)["mAP"])


def test_top_1_of_literal_draws():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(3, size=N))
    x = torch.from_numpy(rng.normal(size=(N, 3)))
    found = bootstrap.scores_of_draws({"top-1": x}, labels, np.arange(N), N)["top-1"]
    right = [x[n].argmax() == labels[n] for n in range(N)]
    expected = [100 * np.mean([right[n] for n in draw]) for draw in literal_draws(N)]
    assert found == pytest.approx(np.array(expected))


def test_an_interval_lies_around_the_score():
    """95% of a sample of 1,001 draws, moved by what they are off in the mean"""
    low, high = bootstrap.interval(7.0, np.linspace(-10, 30, 1001))
    assert (low, high) == (pytest.approx(7 - 19), pytest.approx(7 + 19))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """{train,val}/{blue,red}/<n>.png: noise around two colours that are close, 20 images of each"""
    root, rng = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    for split in ("train", "val"):
        for name, colour in {"blue": (110, 100, 120), "red": (120, 100, 110)}.items():
            (root / split / name).mkdir(parents=True)
            for n in range(20):
                noise = rng.normal(colour, 90, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noise).save(root / split / name / f"{n}.png")
    return root


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two backbones of a small network"""
    monkeypatch.setattr(torchvision.models, "resnet18", REAL["resnet18"])
    monkeypatch.setitem(common.BACKBONES, "resnet18", 512)
    for name in "AB":
        torch.manual_seed(ord(name))
        common.save_weights(tmp_path / f"{name}.pth", common.build_backbone("resnet18"))
    return f"{tmp_path}/A.pth", f"{tmp_path}/B.pth"


def command(output, root, *weights, data="folder"):
    words = ["eval_linear.py", "--output", output, "--data", data, "--root", root, "--workers", 0]
    return [*words, "--image-size", 32, "--weights", *weights]


@pytest.mark.parametrize("flags", [
    "svm-virtex --both-ways", "sgd-virtex --epochs 1 --batch-size 16 --hold-out 0.4"
])
def test_differences_of_repeated_runs(flags, files, folder, tmp_path, monkeypatch):
    """Two seeds: in each draw, the mean over the runs of one backbone less that of the other"""
    given, measure = [], eval_linear.measure

    def recorded(decisions, run):
        given.append((run, decisions))
        return measure(decisions, run)

    monkeypatch.setattr(eval_linear, "measure", recorded)
    weights = [*files, "random", "--runs", 2, "--shots", 8, "--protocol", *flags.split()]
    printed = run_here(command(tmp_path / "out", folder, *weights))
    content = (tmp_path / "out/result.json").read_text()
    rows = json.loads(content, parse_constant=pytest.fail)["backbones"]  # JSON has no NaN
    assert list(rows) == sorted(rows, key=lambda name: -first(rows[name]["mean"]))

    ways = 2 if "both" in flags else 1
    kept = {name: [pair for pair in given if pair[0].source == name] for name in rows}
    assert all(len(pairs) == 2 * ways for pairs in kept.values())
    draws = {}
    for name, pairs in kept.items():
        if name == "random":  # seed by seed
            tested = [n % ways for n in range(2 * ways)]
        else:  # way by way
            tested = [n // 2 for n in range(2 * ways)]
        of_runs = []
        for way, (run, decisions) in zip(tested, pairs):
            scores = []
            for draw in literal_draws(40, way):
                place = {row: n for n, row in enumerate(run.test_rows.tolist())}
                found = [place[photo] for photo in draw if photo in place]
                assert decisions.rows.tolist() == list(place)
                x, y = decisions.x[found], decisions.y[found]
                if run.protocol.metric == "mAP":
                    of_classes = [average_precision_score(y[:, c], x[:, c]) for c in (0, 1)]
                    scores.append(100 * np.mean(of_classes))
                else:
                    scores.append(100 * np.mean((x.argmax(1) == y).tolist()))
            of_runs.append(scores)
        draws[name] = np.mean(of_runs, 0)
    for name in files:
        [(metric, row)] = rows[name]["differences"]["random"].items()
        points = rows[name]["mean"][metric] - rows["random"]["mean"][metric]
        moved = draws[name] - draws["random"]
        low, high = points + np.quantile(moved, [0.025, 0.975]) - moved.mean()
        assert row == {"points": points, "interval": pytest.approx([low, high])}
        if low <= 0 <= high:
            said = f"{name} cannot be told apart from random: the difference is {points:.1f} points"
        else:
            said = f"{name} is {abs(points):.1f} points {'above' if points > 0 else 'below'} random"
        assert said in printed
    assert rows["random"]["differences"] == {}


def first(scores):
    return next(iter(scores.values()))


def test_sentences():
    """Above, below, neither, for each reference"""
    of_draws = np.tile([-2.0, -1.0, 0.0, 1.0, 2.0], 10)
    draws = {"imagenet": 0 * of_draws, "mine": of_draws, "random": 0 * of_draws}
    scores = {"imagenet": 93.0, "mine": 41.5, "random": 37.0}
    rows = {name: {"mean": {"mAP": score}} for name, score in scores.items()}
    runs = {name: [{"mAP": values}] for name, values in draws.items()}
    assert bootstrap.compare(rows, runs, ["random", "imagenet"]) == [
        "imagenet is 56.0 points above random (56.0 to 56.0)",
        "mine is 4.5 points above random (2.5 to 6.5)",
        "mine is 51.5 points below imagenet (49.5 to 53.5)",
        bootstrap.WHAT_INTERVALS_SAY,
    ]
    assert rows["mine"]["interval"]["mAP"] == pytest.approx([39.5, 43.5])
    assert rows["random"]["differences"]["imagenet"]["mAP"]["points"] == -56
    rows = {"mine": {"mean": {"mAP": 38.0}}, "theirs": {"mean": {"mAP": 37.0}}}
    runs = {"mine": runs["mine"], "theirs": runs["random"]}
    sentence, _ = bootstrap.compare(rows, runs, ["mine"])
    said = "theirs cannot be told apart from mine: the difference is -1.0 points (-3.0 to 1.0)"
    assert sentence == said


def test_layers_are_compared_one_by_one():
    names = "C-11 mAP", "C-12 mAP"
    rows = {name: {"mean": dict.fromkeys(names, score)} for name, score in (("A", 9.0), ("B", 1.0))}
    runs = {name: [dict.fromkeys(names, np.zeros(50))] for name in rows}
    first, second, _ = bootstrap.compare(rows, runs, ["A"])
    assert first == "C-11 mAP: B is 8.0 points below A (8.0 to 8.0)"
    assert second.startswith("C-12 mAP: B is")


def test_both_ways_is_the_mean_of_two_calls(files, folder, tmp_path):
    flags = ["--protocol", "knn"]
    both = [*command(tmp_path / "both", folder, files[0]), *flags, "--both-ways"]
    printed = run_here(both)
    assert printed.count("seed 0, 40 training and 40 test photos of 32 px: top-1") == 2
    found = result(tmp_path / "both")["backbones"][files[0]]
    scores = []
    for train, val in (("train", "val"), ("val", "train")):
        splits = ["--train-split", train, "--val-split", val]
        run_here([*command(tmp_path / "one", folder, files[0]), *flags, *splits])
        scores.append(first(result(tmp_path / "one")["backbones"][files[0]]["mean"]))
    assert [first(run) for run in found["runs"]] == scores
    assert found["mean"]["top-1"] == pytest.approx(np.mean(scores))
    run_here([*both, "--runs", 2])  # of the same features
    found = result(tmp_path / "both")["backbones"][files[0]]
    assert [first(run) for run in found["runs"]] == 2 * scores and first(found["std"]) == 0


def test_weights_that_a_run_began_from(files, folder, tmp_path):
    """They are what it is compared with, like random and imagenet."""
    begun, run = files[0], tmp_path / "run"
    run.mkdir()
    shutil.copy(files[1], run / "backbone.pth")
    flags = {"script": "virtex", "arch": "resnet18", "image_size": 32, "init": begun}
    (run / "args.json").write_text(json.dumps(flags))
    words = [*command(tmp_path / "out", folder, begun, run / "backbone.pth", "random")]
    run_here([*words, "--protocol", "knn"])
    differences = result(tmp_path / "out")["backbones"][f"{run}/backbone.pth"]["differences"]
    assert differences.keys() == {begun, "random"}


def test_what_cannot_be_opened(files, folder, tmp_path, monkeypatch):
    """A missing file, a broken one, a hub's model and weights without a network: a line each, code
    1, and the others are measured. If none of the user's own can be opened, nothing is.
    """

    def offline(*given, **more):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    broken = {name: x * math.nan for name, x in common.read_checkpoint(files[0]).items()}
    common.save(tmp_path / "nan.pth", broken)
    lacking = [f"{tmp_path}/none.pth", f"{tmp_path}/nan.pth", "imagenet", f"clip:{tmp_path}/none"]
    words = [*command(tmp_path / "out", folder, *lacking, files[0], "random"), "--protocol", "knn"]
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stdout(io.StringIO()) as output:
        eval_linear.main(eval_linear.get_args(list(map(str, words[1:]))))
    assert str(stopped.value).startswith("error: ") and lacking[0] in str(stopped.value)
    content = result(tmp_path / "out")
    assert content["backbones"].keys() == {files[0], "random"}
    assert content["not_measured"].keys() == {*lacking}
    before, table = output.getvalue().split("commonest class\n")
    for source, cause in content["not_measured"].items():
        assert f"{source} will not be measured: {cause}\n" in before
        [line] = [line for line in table.splitlines() if line.startswith(source)]
        assert line.split("not measured: ")[1] == cause
    assert "are you online?" in content["not_measured"]["imagenet"]

    shutil.rmtree(tmp_path / "out")
    words = [*command(tmp_path / "out", folder, *lacking, "random"), "--protocol", "knn"]
    with pytest.raises(SystemExit, match="error: .*none.pth"):
        eval_linear.main(eval_linear.get_args(list(map(str, words[1:]))))
    assert not (tmp_path / "out").exists()
