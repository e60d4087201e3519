"""What all four training scripts promise, as one table over them: resuming, files, processes."""

import gc
import itertools
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torchvision
from conftest import REAL, ROOT, SCRIPTS, TORCHRUN, checkpoint_in, environment, files_in, finished
from conftest import in_two_processes, kill_at, metrics, refusal, result, run_here
from conftest import run_script

import common

# Loss terms and other numbers in each line of metrics.jsonl, and the script's own files.
LOGGED = {
    "virtex": {"forward", "backward", "text_lr"},
    "tp": set(),
    "icmlm": {"mlm", "tp"},
    "mmcontrastive": {"ii", "tag", "cc", "ic", "ci", "text_lr"},
}
FILES = {
    "virtex": {"tokenizer.model"},
    "tp": {"concepts.json", "labels.npz"},
    "icmlm": {"concepts.json", "captions.json", "triplets.npz"},
    "mmcontrastive": {"caption_model"},
}
RUN_FILES = {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json"}
ALWAYS = {"iteration", "loss", "lr", "images_per_s", "data_wait"}

WARMUP = "--head", "att-fc", "--warmup-attention", 0.4  # four of ten iterations
every_script = pytest.mark.parametrize("script", SCRIPTS)


@every_script
def test_output_directory(script, tiny, tmp_path):
    """Each file of the contract; the backbone is torchvision's but for the classifier."""
    output = run_here(tiny(script, tmp_path, "--iters", 3, "--keep-every", 2))
    assert files_in(tmp_path) == RUN_FILES | FILES[script] | {"model_2.pth"}
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert all(row.keys() == ALWAYS | LOGGED[script] for row in rows)
    assert result(tmp_path)
    measure = f"python eval_linear.py --weights {tmp_path}/backbone.pth random --image-size "
    assert output.splitlines()[-1].startswith(f"measure it: {measure}")
    state = torch.load(tmp_path / "backbone.pth", weights_only=True)
    wrong = torchvision.models.resnet18().load_state_dict(state, strict=False)
    assert wrong.missing_keys == ["fc.weight", "fc.bias"] and not wrong.unexpected_keys
    args = json.loads((tmp_path / "args.json").read_text())
    assert args["iters"] == 3 and args["recipe"] == "paper" and args["processes"] == 1
    assert args["torch"] == torch.__version__ and "command" in args
    checkpoint = checkpoint_in(tmp_path)
    model = torch.load(tmp_path / "model_2.pth", weights_only=True)
    more = checkpoint.keys() - model.keys() - {"lookahead"}
    assert more == {"optimizer", "scaler"}
    assert (model["script"], model["iteration"], model["args"]["lr"]) == (script, 2, 0.05)
    assert model["model"].keys() == checkpoint["model"].keys()


@every_script
def test_killed_three_times_ends_with_the_same_bits(script, tiny, tmp_path, request):
    """Each time within a line of metrics.jsonl; tp ends in another Python, of another hash seed."""
    if script == "tp":
        request.getfixturevalue("real_models")
    flags = ["--iters", 10, "--checkpoint-every", 3, *(WARMUP if script == "icmlm" else ())]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(tiny(script, whole, *flags))
    command = tiny(script, killed, *flags, "--workers", 2 if script == "tp" else 0)
    for iteration in (2, 4, 8):
        kill_at(iteration, command)
        with open(killed / "metrics.jsonl", "a") as file:
            file.write('{"iteration": 2, "lo')
    output = finished(run_script(*command)).stdout if script == "tp" else run_here(command)
    assert f"{killed}: 6 of 10 iterations are done" in output
    speed = {"images_per_s": 0, "data_wait": 0}
    for again in (False, True):
        if again:
            output = run_here(command)
            assert "10 of 10 iterations are done" in output and "measure it: " in output
        for name in ("backbone.pth", "result.json"):
            assert (whole / name).read_bytes() == (killed / name).read_bytes()
        assert [row["iteration"] for row in metrics(killed)] == list(range(1, 11))
        for one, other in zip(metrics(whole), metrics(killed)):
            assert one | speed == other | speed
        one, other = checkpoint_in(whole)["model"], checkpoint_in(killed)["model"]
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_means_over_the_log_interval(tiny, tmp_path):
    """A line of metrics.jsonl has the mean losses of its iterations, those of a validation, too."""
    flags = "--iters", 7, "--validate-every", 5
    run_here(tiny("virtex", tmp_path / "one", *flags))
    run_here(tiny("virtex", tmp_path / "three", *flags, "--log-every", 3))
    losses = [row["loss"] for row in metrics(tmp_path / "one")]
    rows = {row["iteration"]: row for row in metrics(tmp_path / "three")}
    assert rows.keys() == {3, 5, 6} and "validation_forward" in rows[5]
    for now, of_line in ((3, losses[:3]), (5, losses[3:5]), (6, losses[5:6])):
        assert rows[now]["loss"] == pytest.approx(sum(of_line) / len(of_line), rel=1e-5)


def test_what_a_folder_refuses(tiny, tmp_path):
    """Other flags, data of another size, another script's run; but not --fresh"""
    command = tiny("virtex", tmp_path, "--iters", 2)
    run_here([*command, "--keep-every", 1])
    checkpoint, path = checkpoint_in(tmp_path), tmp_path / "checkpoint.pth"
    for name, other, message in (
        ("lr", 0.2, "a run with lr 0.2, not 0.05"),
        ("photos", 25, "a run on 25 photos, not 24"),
    ):
        torch.save({**checkpoint, "args": {**checkpoint["args"], name: other}}, path)
        assert f"{tmp_path} holds {message}" in refusal(command)
    for other in set(SCRIPTS) - {"virtex"}:
        torch.save({**checkpoint, "script": other}, path)
        assert "checkpoint.pth or model_N.pth of virtex.py" in refusal(command)
    path.write_bytes(path.read_bytes()[:900])
    assert f"{path} is not a checkpoint" in refusal(command)
    assert {"model_1.pth", "backbone.pth"} <= files_in(tmp_path) and path.stat().st_size == 900
    (tmp_path / "notes.txt").touch()
    kill_at(1, [*command, "--fresh"])
    assert files_in(tmp_path) == {"args.json", "metrics.jsonl", "notes.txt"} | FILES["virtex"]


def test_a_full_disk_and_another_amp(tiny, tmp_path):
    """A checkpoint that cannot be written leaves the one before. --amp, --accumulate may change."""
    flags = ["--iters", 3, "--lr", 0.01]
    run_here(tiny("virtex", tmp_path, *flags))
    path, unfinished = tmp_path / "checkpoint.pth", tmp_path / "checkpoint.pth.tmp"
    torch.save({**checkpoint_in(tmp_path), "iteration": 1}, path)  # as if it had been killed
    kept = path.read_bytes()
    unfinished.symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        run_here(tiny("virtex", tmp_path, *flags))
    assert path.read_bytes() == kept
    unfinished.unlink()
    gc.collect()
    run_here(tiny("virtex", tmp_path, *flags, "--amp", "fp16", "--accumulate", 2))
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint["iteration"] == 3 and checkpoint["scaler"]
    assert all(value.isfinite().all() for value in checkpoint["model"].values())


@every_script
def test_two_processes(script, tiny, tmp_path, request):
    """By gloo: every iteration is logged once, one set of files, equal weights."""
    if script == "virtex":
        request.getfixturevalue("real_models")
    folder, flags = tmp_path / "run", WARMUP if script == "icmlm" else ()
    command = tiny(script, folder, "--iters", 5, "--checkpoint-every", 3, *flags)
    in_two_processes(run_here, command)
    assert [row["iteration"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    assert files_in(folder) == RUN_FILES | FILES[script]
    assert json.loads((folder / "args.json").read_text())["processes"] == 2
    assert not any(name.startswith("module.") for name in checkpoint_in(folder)["model"])
    if script == "virtex":  # once is enough: both processes leave in peace
        ended = finished(run_script(*TORCHRUN, *command))
        assert ended.stdout.count("5 of 5 iterations are done") == 1
        assert "Traceback" not in ended.stderr
    if script == "icmlm":  # with a frozen backbone two do what one does
        run_here(tiny(script, tmp_path / "one", "--iters", 5, *WARMUP))
        alone, shared = ([row["loss"] for row in metrics(tmp_path / x)] for x in ("one", "run"))
        assert shared[:2] == pytest.approx(alone[:2], rel=1e-3)
        # After that, the batch statistics are those of four photos each.
        assert shared[2:] != pytest.approx(alone[2:], rel=1e-3)


def gradients(folder):
    """The first step's, times a constant: the optimizer's running means"""
    states = checkpoint_in(folder)["optimizer"]["state"].values()
    return [state.get("momentum_buffer", state.get("exp_avg")) for state in states]


@every_script
def test_micro_batches_are_processes(script, tiny, tmp_path):
    """--accumulate 2 has the gradients of two processes: each part its batch norm, its dropout."""
    flags = ["--iters", 1]
    if script == "mmcontrastive":
        flags = "--iters 2 --recipe demo --lm scratch --bn-splits 1".split()  # keys, no dropout
    in_two_processes(run_here, tiny(script, tmp_path / "two", *flags))
    run_here(tiny(script, tmp_path / "one", *flags, "--accumulate", 2))
    run_here(tiny(script, tmp_path / "whole", *flags))
    apart = []
    moments = [gradients(tmp_path / name) for name in ("two", "one", "whole")]
    for two, one, whole in zip(*moments, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4 * float(two.abs().max()))
        apart.append(float((whole - two).norm() / two.norm().clamp(min=1e-12)))
    assert max(apart) > 0.05
    rows = [metrics(tmp_path / name)[0] for name in ("two", "one")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)  # a mean, not the last part


def test_a_diverging_run(tiny, tmp_path):
    """It stops, says what to try, and its checkpoint is finite."""
    flags = "--iters", 60, "--checkpoint-every", 1, "--warmup", 0.2, "--lr", 1e30, "--text-lr", 1e30
    message = refusal(tiny("virtex", tmp_path, *flags))
    assert "is not finite at iteration" in message
    assert "the last checkpoint is kept. Try a lower --lr" in message
    model = checkpoint_in(tmp_path)["model"]
    assert all(value.isfinite().all() for value in model.values())


def test_weights_that_are_not_finite(tiny, tmp_path, monkeypatch):
    """Such weights are never saved, even if the loss of that step was finite."""
    step, count = torch.optim.SGD.step, itertools.count(1)

    def broken(optimizer):
        step(optimizer)
        if next(count) == 2:
            optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.SGD, "step", broken)
    message = refusal(tiny("tp", tmp_path, "--iters", 2, "--checkpoint-every", 1))
    assert "a weight is not finite at iteration 2" in message
    assert checkpoint_in(tmp_path)["iteration"] == 1


@pytest.mark.parametrize("script", ["icmlm", "mmcontrastive"])  # two kinds of samples
def test_photos_that_cannot_be_decoded_or_are_missing(script, tiny, coco_folder, tmp_path):
    """The first are named and replaced by the next ones, the others are found before training."""
    data = tmp_path / "data"
    shutil.copytree(coco_folder, data)
    bad = sorted((data / "train2017").iterdir())[5]
    bad.write_bytes(bad.read_bytes()[:300])
    command = tiny(script, tmp_path / "run", "--root", data, "--iters", 6)
    output = run_here(command)
    assert output.count("the next photo is used") == 1 and str(bad) in output
    assert len(metrics(tmp_path / "run")) == 6
    bad.unlink()
    assert "1 of 24 photos are missing" in refusal([*command, "--fresh"])


@every_script
def test_copied_into_an_empty_folder(script, coco_folder, tiny_lm, tmp_path):
    """Two files train on a .jsonl, from a backbone, with no other flag but sizes and --lm."""
    for name in ("common.py", f"{script}.py"):
        shutil.copy(ROOT / name, tmp_path)
    captions = ["a red circle on the left", "one small circle", "a circle and a blue square"]
    photos = sorted((coco_folder / "train2017").iterdir())
    rows = [{"image": str(path), "captions": captions} for path in photos]
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    state = REAL["resnet18"]().state_dict()
    state = {name: x for name, x in state.items() if not name.startswith("fc.")}
    torch.save(state, tmp_path / "weights.pth")
    flags = "--data photos.jsonl --iters 2 --image-size 32 --workers 0 --batch-size 16".split()
    flags += ["--init", "weights.pth"]
    if script in ("icmlm", "mmcontrastive"):
        flags += ["--lm", str(tiny_lm)]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment()}
    process = subprocess.run([sys.executable, f"{script}.py", *flags], **options)
    assert "--init: loaded the backbone" in finished(process).stdout
    assert (tmp_path / f"runs/{script}-photos/backbone.pth").exists()
    if script == "virtex":
        process = subprocess.run([sys.executable, "virtex.py"], **options)
        assert process.stderr.startswith("error: extras is missing: copy our folder extras")


@every_script
def test_starts_from_a_whole_model(script, tiny, tmp_path):
    """--init loads backbone, heads and tokenizer of the script's own checkpoint.pth."""
    still = ["--iters", 1, "--lr", 1e-12]
    if script in ("virtex", "mmcontrastive"):
        still += ["--text-lr", 1e-12]
    if script == "icmlm":
        still += ["--lm", "scratch", "--lm-iters", 2]
    run_here(tiny(script, tmp_path / "first", *still, "--seed", 1))
    first = checkpoint_in(tmp_path / "first")["model"]
    init = "--init", tmp_path / "first" / "checkpoint.pth"
    output = run_here(tiny(script, tmp_path / "second", *still, *init))
    loaded, total = re.search(r"loaded (\d+) of (\d+) tensors", output).groups()
    assert loaded == total
    for name, value in checkpoint_in(tmp_path / "second")["model"].items():
        if not re.search("queues|running|num_batches", name):
            torch.testing.assert_close(value, first[name], rtol=0, atol=1e-6)
    other = {
        "virtex": ("--hidden", 128),
        "tp": ("--pos", "nn"),
        "icmlm": ("--head", "att-fc"),
        "mmcontrastive": ("--inter-dim", 16),
    }
    output = run_here(tiny(script, tmp_path / "third", *still, *init, *other[script]))
    loaded, total = re.search(r"loaded (\d+) of (\d+) tensors", output).groups()
    assert int(loaded) < int(total)
    assert "not --arch vgg16_bn" in refusal(
        tiny(script, tmp_path / "fourth", *still, *init, "--arch", "vgg16_bn")
    )


@every_script
def test_flickr8k(script, tiny, real_data, tmp_path, monkeypatch):
    """A few steps on forty real photos, in COCO's layout with splits of another name."""
    caption_data = common.caption_data
    few = lambda *given: caption_data(*given).select(range(40))
    monkeypatch.setattr(common, "caption_data", few)
    flags = ["--root", real_data / "flickr8k", "--train-split", "train", "--val-split", "val"]
    run_here(tiny(script, tmp_path, *flags, "--iters", 3))
    assert len(metrics(tmp_path)) == 3
