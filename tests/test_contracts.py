"""What all four training scripts promise, as one table over them: resuming, files, processes."""

import argparse
import gc
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torchvision
from conftest import ROOT, SCRIPTS, TESTS, TORCHRUN, checkpoint_in, files_in, finished
from conftest import in_two_processes, kill_at, metrics, refusal, result, run_copy, run_here
from conftest import run_script
from PIL import Image

import common

# At least: in all lines of metrics.jsonl; in those of validation; own files; flags that do not fit
# --init
ABOUT = {
    "virtex": ("forward backward text_lr", "forward backward", "tokenizer.model", "--hidden 128"),
    "tp": ("", "loss top1 top5 mAP", "concepts.json labels.json labels.npz val_labels.npz",
           "--pos nn"),
    "icmlm": ("mlm tp", "mlm tp", "concepts.json captions.json triplets.npz", "--head att-fc"),
    "mmcontrastive": ("ii tag cc ic ci text_lr", "image_to_text_R@10 text_to_image_R@10",
                      "caption_model", "--inter-dim 16"),
}
FILES = {script: set(row[2].split()) for script, row in ABOUT.items()}
RUN_FILES = {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json"}
ALWAYS = {"iteration", "loss", "lr", "images_per_s", "data_wait"}

RATES_OF_GROUPS = {  # with --lr 0.05 --text-lr 0.02; the backbone comes first
    "virtex": [0.05, 0.02, 0.02], "tp": [0.05] * 2, "icmlm": [0.05] * 3,
    "mmcontrastive": [0.05, 0.05, 0.02],
}
RATES_OF_NEW_LAYERS = {  # beside a backbone from --init: the flags
    "virtex": ["text_lr"], "tp": ["head_lr"], "icmlm": ["head_lr"],
    "mmcontrastive": ["head_lr", "text_lr"],
}
WARMUP = "--head", "att-fc", "--warmup-attention", 0.4  # four of ten iterations
every_script = pytest.mark.parametrize("script", SCRIPTS)


@every_script
def test_output_directory(script, tiny, tmp_path):
    """Each file of the contract; the backbone is torchvision's but for the classifier."""
    logged, validated, *_ = map(str.split, ABOUT[script])
    flags = ("--validate-every", 2) if validated else ()
    flags += ("--text-lr", 0.02) if "text_lr" in logged else ()
    output = run_here(tiny(script, tmp_path, "--iters", 3, "--keep-every", 2, *flags))
    assert files_in(tmp_path) >= RUN_FILES | FILES[script] | {"model_2.pth"} and result(tmp_path)
    args = json.loads((tmp_path / "args.json").read_text())
    assert args["iters"] == 3 and args["recipe"] == "paper" and args["processes"] == 1
    assert args["torch"] == torch.__version__
    assert {"command", "commit", "date", "machine", "seconds"} <= args.keys()
    for n, row in enumerate(metrics(tmp_path)):
        scores = {f"validation_{name}" for name in validated if n > 0}
        assert row.keys() >= ALWAYS | {*logged} | scores
        lr = 0.05 * common.lr_factor(n, 3, args["warmup"])
        assert (row["iteration"], row["lr"]) == (n + 1, pytest.approx(lr, rel=1e-5))
        if "text_lr" in logged:
            assert row["text_lr"] == pytest.approx(0.4 * lr, rel=1e-5)
    assert n == 2
    measure = f"eval_linear.py --weights {tmp_path}/backbone.pth random imagenet --data folder"
    assert f"measure it:  python {measure}" in output
    state = torch.load(tmp_path / "backbone.pth", weights_only=True)
    wrong = torchvision.models.resnet18().load_state_dict(state, strict=False)
    assert wrong.missing_keys == ["fc.weight", "fc.bias"] and not wrong.unexpected_keys
    checkpoint = checkpoint_in(tmp_path)
    model = torch.load(tmp_path / "model_2.pth", weights_only=True)
    assert checkpoint.keys() - model.keys() - {"lookahead"} == {"optimizer", "scaler"}
    groups = checkpoint["optimizer"]["param_groups"]
    assert [group["initial_lr"] for group in groups] == RATES_OF_GROUPS[script]
    assert (model["script"], model["iteration"], model["args"]["lr"]) == (script, 2, 0.05)
    assert model["model"].keys() == checkpoint["model"].keys()


@every_script
def test_killed_three_times_ends_with_the_same_bits(script, tiny, tmp_path):
    """Each time within a line of metrics.jsonl; tp ends in another Python, of another hash seed."""
    flags = ["--iters", 10, "--checkpoint-every", 3, *(WARMUP if script == "icmlm" else ())]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(tiny(script, whole, *flags))
    command = tiny(script, killed, *flags, "--workers", 2 if script == "tp" else 0)
    for iteration in (2, 4, 8):
        kill_at(iteration, command)
        with open(killed / "metrics.jsonl", "a") as file:
            file.write('{"iteration": 2, "lo')
    if script == "tp":
        output = finished(run_script(TESTS / "conftest.py", *command)).stdout
    else:
        output = run_here(command)
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


@every_script
def test_validation_changes_no_training(script, tiny, tmp_path):
    """Dropout, batch norm and a frozen backbone are as before, and no random number is drawn."""
    flags = "--iters", 5, *(WARMUP if script == "icmlm" else ())
    run_here(tiny(script, tmp_path / "last", *flags))
    run_here(tiny(script, tmp_path / "each", *flags, "--validate-every", 1))
    last, each = [(tmp_path / name / "backbone.pth").read_bytes() for name in ("last", "each")]
    assert last == each


QUARTER = (1 + math.sqrt(0.5)) / 2  # of a cosine
COSINE = {0: 3e-2, 25_000: 3e-2 * QUARTER, 50_000: 1.5e-2, 100_000: 0}
STEPS = {0: 1e-4, 79_999: 1e-4, 80_000: 1e-5, 89_999: 1e-5, 90_000: 1e-6, 100_000: 1e-6}
ROTNET = {0: 1e-3, 99_999: 1e-3, 100_000: 1e-4, 109_999: 1e-4, 110_000: 1e-5, 120_000: 1e-5}
VIRTEX = {0: 0, 1: 2e-5, 5000: 0.1, 10_000: 0.2, 132_500: 0.2 * QUARTER, 255_000: 0.1, 500_000: 0}
RATES = {  # on coco: the optimizer, weight decay, batch size, learning rates by iteration
    "virtex": ("SGD", 1e-4, 256, VIRTEX),  # Sec. 3: 10K iterations of warm-up
    "tp": ("SGD", 1e-4, 128, COSINE),  # ICMLM App. F.1, as all others
    "tp --arch resnet50 --labels rotation": ("SGD", 1e-4, 128, COSINE),
    "tp --arch vgg16_bn": ("RAdam", 1e-3, 128, STEPS),
    "tp --arch vgg16_bn --labels rotation": ("RAdam", 1e-5, 128, ROTNET),
    "tp --labels rotation": ("RAdam", 1e-5, 128, ROTNET),
    "icmlm": ("SGD", 1e-4, 512, {5 * n: rate for n, rate in COSINE.items()}),
    "icmlm --arch vgg16_bn": ("RAdam", 1e-3, 896, {2 * n: rate for n, rate in STEPS.items()}),
    "mmcontrastive": ("SGD", 1e-4, 512, {0: 0.03, 23_103: 0.015, 46_206: 0}),  # 200 x 118,287 / 512
}


@pytest.mark.parametrize("command", RATES)
def test_learning_rates_of_the_papers(command):
    """Those of the backbone and of parameters with a rate of their own"""
    script, *flags = command.split()
    args = importlib.import_module(script).get_args(["--data", "coco", *flags])
    kind, decay, batch_size, rates = RATES[command]
    share = 4e-5 / 0.03 if script == "mmcontrastive" else 1 / 200  # VirTex Sec. 3: 1e-3 / 0.2
    text_lr = getattr(args, "text_lr", args.lr / 200)
    iters = args.iters or round(args.epochs * 118_287 / args.batch_size)
    assert iters == max(rates) and args.batch_size == batch_size
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (args.lr, text_lr)]
    optimizer = common.build_optimizer(args, groups)
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, decay]
    for iteration, rate in rates.items():
        steps = getattr(args, "steps", ())
        common.set_lr(optimizer, common.lr_factor(iteration, iters, args.warmup, steps))
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([rate, rate * share], rel=1e-9, abs=1e-15)


def test_means_over_the_log_interval(tiny, tmp_path):
    """A line of metrics.jsonl has the mean losses of its iterations, those of a validation, too."""
    flags = "--iters", 7, "--validate-every", 5
    run_here(tiny("virtex", tmp_path / "one", *flags))
    run_here(tiny("virtex", tmp_path / "three", *flags, "--log-every", 3))
    losses = [row["loss"] for row in metrics(tmp_path / "one")]
    rows = {row["iteration"]: row for row in metrics(tmp_path / "three")}
    validated = {iteration for iteration, row in rows.items() if "validation_forward" in row}
    assert rows.keys() == {3, 5, 6, 7} and rows.keys() - {3, 6} == validated
    for now, of_line in ((3, losses[:3]), (5, losses[3:5]), (6, losses[5:6]), (7, losses[6:])):
        assert rows[now]["loss"] == pytest.approx(sum(of_line) / len(of_line), rel=1e-5)


@pytest.mark.parametrize("signum, code", ((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_stopped_by_a_signal(signum, code, tiny, tmp_path):
    """A run says in one line how far it is, and goes on by the same command."""
    command = tiny("virtex", tmp_path, "--iters", 100_000, "--checkpoint-every", 2)
    words = [sys.executable, TESTS / "conftest.py", *command]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "checkpoint.pth").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signum)
    errors = process.communicate()[1].splitlines()
    assert process.returncode == code
    line = r"stopped after (\d+) of 100000 iterations; the checkpoint is of (\d+); the same "
    done, saved = re.fullmatch(line + "command goes on from there", errors[-1]).groups()
    assert checkpoint_in(tmp_path)["iteration"] == int(saved) <= int(done)
    assert not any("Traceback" in line for line in errors)


def test_a_validation_that_is_not_finite(tiny, tmp_path):
    """With such a rate the last step alone breaks the model: nothing of it is saved."""
    message = refusal(tiny("virtex", tmp_path, "--iters", 1, "--warmup", 0, "--lr", 1e30))
    assert "a loss or a weight is not finite: the last checkpoint is kept" in message
    assert not files_in(tmp_path) & {"checkpoint.pth", "backbone.pth", "result.json"}


def test_what_a_folder_refuses(tiny, tmp_path):
    """Other flags, other data, another script's run"""
    command = tiny("virtex", tmp_path, "--iters", 2)
    run_here([*command, "--keep-every", 1])
    checkpoint, path = checkpoint_in(tmp_path), tmp_path / "checkpoint.pth"
    for name, other, message in (
        ("lr", 0.2, " holds a run with lr 0.2, not 0.05: choose another --output"),
        ("epochs", 3.0, " holds a run with epochs 3.0, not left out: choose another"),
        ("script", "tp", " holds a run with script tp, not virtex"),
        ("fingerprints", [0], " holds a run with other data (photos, captions, tags"),
        ("format", None, "/checkpoint.pth was written by an earlier version: it can be measured"),
    ):
        torch.save({**checkpoint, "args": {**checkpoint["args"], name: other}}, path)
        assert f"{tmp_path}{message}" in refusal(command)
    torch.save(checkpoint, path)
    place = command.index("--lr")
    without = [*command[:place], *command[place + 2 :]]
    assert f"{tmp_path} holds a run with lr 0.05, not " in refusal(without)
    torch.save({"model": {}, "args": argparse.Namespace(lr=0.1)}, path)
    foreign = f"{path} was not written by a script of ours: choose another --output"
    assert foreign in refusal(command)
    torch.save(checkpoint, path)
    path.write_bytes(path.read_bytes()[:900])
    assert f"{path} is cut off, or holds more than" in refusal(command)
    assert {"model_1.pth", "backbone.pth"} <= files_in(tmp_path) and path.stat().st_size == 900


def test_other_captions_under_the_same_names(tmp_path):
    """A caption of the validation split or a photo's name is another. Where they lie may change,
    and the file of --init may be gone."""
    path, init, output = tmp_path / "a.jsonl", tmp_path / "init.pth", tmp_path / "run"
    rows = [
        {"image": f"{n}.jpg", "captions": [f"photo {n} of a dog"], "split": split}
        for n, split in enumerate(("train", "train", "val"))
    ]
    for row in rows:
        Image.new("RGB", (32, 32)).save(tmp_path / row["image"])

    def write(caption, name="0.jpg", folder="."):
        rows[2]["captions"] = [caption]
        rows[0]["image"] = f"{folder}/{name}"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    common.save_weights(init, common.build_backbone("resnet18"))
    flags = "--data", path, "--output", output, "--init", init, "--iters", 1, "--batch-size", 2
    small = "--image-size", 32, "--hidden", 64, "--workers", 0
    command = "virtex.py", *flags, *small
    write("a dog")
    assert "these weights were learned elsewhere" in run_here(command)
    init.unlink()
    assert "1 of 1 iterations are done" in run_here(command)
    write("a cat")
    assert "holds a run with other data" in refusal(command)
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "0.jpg", tmp_path / "moved")
    write("a dog", folder="moved")
    assert "1 of 1 iterations are done" in run_here(command)
    shutil.copy(tmp_path / "0.jpg", tmp_path / "9.jpg")
    write("a dog", "9.jpg")
    assert "holds a run with other data" in refusal(command)


def test_nodes_that_do_not_share_the_folder(tiny, tmp_path, monkeypatch):
    """Neither at the first start nor when they go on would all have the same state."""
    command = tiny("virtex", "run", "--iters", 2, "--checkpoint-every", 1)
    for rank in "01":
        (tmp_path / rank).mkdir()

    def start():
        os.chdir(tmp_path / os.environ["RANK"])
        return refusal(command)

    for message in in_two_processes(start):
        assert "error: the processes find different things in --output run, or have" in message
    monkeypatch.chdir(tmp_path / "0")
    run_here(command)
    shutil.copytree(tmp_path / "0/run", tmp_path / "1/run", dirs_exist_ok=True)
    (tmp_path / "1/run/checkpoint.pth").unlink()
    for message in in_two_processes(start):
        assert "error: the processes find different things in --output run, or have" in message


def test_nodes_with_other_flags(tiny, tmp_path, monkeypatch):
    """Each would move its copy of the weights by rates of its own."""
    monkeypatch.chdir(tmp_path)

    def start():
        rate = ("0.01", "0.02")[int(os.environ["RANK"])]
        return refusal(tiny("virtex", "run", "--iters", 2, "--lr", rate))

    for message in in_two_processes(start):
        assert "have other flags or data: start all nodes by the same command" in message


def test_a_full_disk_and_another_amp(tiny, tmp_path):
    """A checkpoint that cannot be written leaves the one before. --amp, --accumulate may change."""
    flags = ["--iters", 3, "--lr", 0.01]
    run_here(tiny("virtex", tmp_path, *flags))
    path = tmp_path / "checkpoint.pth"
    unfinished = tmp_path / "checkpoint.pth.tmp"
    torch.save({**checkpoint_in(tmp_path), "iteration": 1}, path)  # as if it had been killed
    args = json.loads((tmp_path / "args.json").read_text())
    (tmp_path / "args.json").write_text(json.dumps({**args, "seconds": 1000}))
    kept = path.read_bytes()
    unfinished.symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="No space left on device"):
        run_here(tiny("virtex", tmp_path, *flags))
    assert path.read_bytes() == kept and not unfinished.is_symlink()
    gc.collect()
    run_here(tiny("virtex", tmp_path, *flags, "--amp", "fp16", "--accumulate", 2))
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint["iteration"] == 3 and checkpoint["scaler"]
    assert json.loads((tmp_path / "args.json").read_text())["seconds"] >= 1000  # of both parts
    assert all(value.isfinite().all() for value in checkpoint["model"].values())


@every_script
def test_two_processes(script, tiny, tmp_path):
    """By gloo: every iteration is logged once, one set of files, equal weights."""
    folder, flags = tmp_path / "run", WARMUP if script == "icmlm" else ()
    command = tiny(script, folder, "--iters", 5, "--checkpoint-every", 3, *flags)
    in_two_processes(run_here, command)
    assert [row["iteration"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    assert files_in(folder) >= RUN_FILES | FILES[script]
    assert json.loads((folder / "args.json").read_text())["processes"] == 2
    assert not any(name.startswith("module.") for name in checkpoint_in(folder)["model"])
    if script == "virtex":  # once is enough: both processes leave in peace
        ended = finished(run_script(*TORCHRUN, TESTS / "conftest.py", *command))
        assert ended.stdout.count("5 of 5 iterations are done") == 1
        assert "Traceback" not in ended.stderr


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


@pytest.mark.parametrize("log_every, every", ((1, 2), (9, 1)))  # found in the loss, in a weight
def test_a_diverging_run(log_every, every, tiny, tmp_path):
    """It stops and says what to try; weights that are not finite are never saved."""
    flags = "--checkpoint-every", every, "--warmup", 0.2, "--lr", 5e18, "--text-lr", 5e18
    flags += "--log-every", log_every
    message = refusal(tiny("virtex", tmp_path, "--iters", 60, *flags))
    assert "not finite: the last checkpoint is kept. Try a lower --lr" in message
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint["iteration"] == 2
    assert all(value.isfinite().all() for value in checkpoint["model"].values())


@pytest.mark.parametrize("script", ["icmlm", "mmcontrastive"])  # two kinds of samples
def test_photos_that_cannot_be_decoded(script, tiny, coco_folder, tmp_path):
    """They are named, and replaced by the next ones. (Missing ones: test_refusals.py)"""
    data = shutil.copytree(coco_folder, tmp_path / "data")
    bad = sorted((data / "train2017").iterdir())[5]
    bad.write_bytes(bad.read_bytes()[:300])
    output = run_here(tiny(script, tmp_path / "run", "--root", data, "--iters", 6))
    assert output.count("the next photo is used") == 1 and str(bad) in output
    assert len(metrics(tmp_path / "run")) == 6


@every_script
def test_copied_into_an_empty_folder(script, coco_folder, tiny_lm, tmp_path, real_models):
    """Two files train on a .jsonl, from a backbone, with no other flag but sizes and --lm. They say
    what needs the folder extras: whether --lm knows the words, and the scenes.

    virtex.py starts as a user starts it, in a Python of its own.
    """
    for name in ("common.py", f"{script}.py"):
        shutil.copy(ROOT / name, tmp_path)
    captions = ["a red circle on the left", "one small circle", "a circle and a blue square"]
    photos = sorted((coco_folder / "train2017").iterdir())
    rows = [{"image": str(path), "captions": captions} for path in photos]
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common.save_weights(tmp_path / "weights.pth", common.build_backbone("resnet18"))
    flags = "--data photos.jsonl --iters 2 --image-size 32 --workers 0 --batch-size 16".split()
    flags += ["--lm", tiny_lm] if script in ("icmlm", "mmcontrastive") else []
    flags += ["--lambda-words", 2] if script == "virtex" else []
    command = f"{script}.py", *flags, "--init", "weights.pth"
    if script == "virtex":
        printed = finished(run_script(*command, cwd=tmp_path)).stdout
    else:
        code, printed = run_copy(tmp_path, *command)
        assert code == 0, printed
    assert "--init: the backbone starts from weights.pth, all other layers at random" in printed
    run = tmp_path / f"runs/{script}-photos"
    assert (run / "backbone.pth").exists()
    args = json.loads((run / "args.json").read_text())
    assert args["commit"] is None  # there is no git
    groups = checkpoint_in(run)["optimizer"]["param_groups"]
    of_backbone, *others = [group["initial_lr"] for group in groups]
    _, usual, *_ = __import__(script).FLAGS["lr"]
    assert of_backbone == args["lr"] == pytest.approx(0.1 * usual * 16 / 64)
    assert {*others} == {*map(args.get, RATES_OF_NEW_LAYERS[script])}
    if script == "tp":  # with a language model, too
        more = "--labels", "cluster", "--lm", tiny_lm, "--output", "clusters"
        code, printed = run_copy(tmp_path, *command, *more)
        assert code == 0, printed
    unchecked = f"it is not checked whether --lm {tiny_lm} knows the words of the captions"
    assert printed.count(unchecked) == (script != "virtex")
    code, printed = run_copy(tmp_path, f"{script}.py", "--data", "shapes")
    assert code == 1
    assert "error: the folder extras is missing: copy it beside the script" in printed


@every_script
def test_starts_from_a_checkpoint(script, tiny, tmp_path):
    """Of a checkpoint.pth, --init takes the backbone, and says so; heads and words start anew."""
    still = "--iters", 1, "--lr", 1e-12, *(["--seed", 1] if script == "tp" else [])
    run_here(tiny(script, tmp_path / "first", "--iters", 1, "--keep-every", 1))
    for n, weights in enumerate(("checkpoint.pth", "model_1.pth", "backbone.pth")):
        init = "--init", tmp_path / "first" / weights
        printed = run_here(tiny(script, tmp_path / str(n), *still, *init))
        assert f"the backbone starts from {tmp_path / 'first' / weights}, all other" in printed
        first, now = (torch.load(tmp_path / x / "backbone.pth") for x in ("first", str(n)))
        for name, value in now.items():
            if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
                torch.testing.assert_close(value, first[name], rtol=0, atol=1e-6)
    with pytest.raises(SystemExit, match="not --arch resnet50"):
        init = "--init", tmp_path / "first/checkpoint.pth", "--arch", "resnet50"
        run_here(tiny(script, tmp_path / "other", *still, *init))


@every_script
def test_flickr8k(script, tiny, real_data, tmp_path, monkeypatch):
    """A few steps on forty real photos, in COCO's layout with splits of another name."""
    caption_data = common.caption_data
    few = lambda *given: [x.select(range(40)) for x in caption_data(*given)]
    monkeypatch.setattr(common, "caption_data", few)
    flags = ["--root", real_data / "flickr8k", "--train-split", "train", "--val-split", "val"]
    run_here(tiny(script, tmp_path, *flags, "--iters", 3))
    assert len(metrics(tmp_path)) == 3
