"""What all four training scripts promise (DESIGN Secs. 3, 4, 8), as one table over them."""

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import (
    ROOT,
    SCRIPTS,
    TORCHRUN,
    checkpoint_in,
    environment,
    files_in,
    finished,
    in_two_processes,
    kill_at,
    metrics,
    refusal,
    result,
    run_here,
    run_script,
    running,
)

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
    "tp": {"concepts.json"},
    "icmlm": {"concepts.json"},
    "mmcontrastive": {"caption_model"},
}
RUN_FILES = {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json"}
ALWAYS = {"iteration", "loss", "lr", "images_per_s", "data_wait"}

every_script = pytest.mark.parametrize("script", SCRIPTS)


@every_script
def test_output_folder(script, tiny, tmp_path):
    """Each file of the contract; the backbone is torchvision's but for the classifier."""
    output = run_here(tiny(script, tmp_path, "--iters", 3, "--probe-every", 2))
    assert files_in(tmp_path) == RUN_FILES | FILES[script] | {"backbone_best.pth"}
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert all(row.keys() == ALWAYS | LOGGED[script] for row in rows)
    probe = result(tmp_path)["probe"]
    assert probe.keys() == {"data", "metric", "trained", "random", "best"}
    assert probe["best"]["iteration"] == 2
    trained, random = probe["trained"], probe["random"]
    expected = f"{trained:.1f} mAP trained, {random:.1f} mAP at random initialisation"
    seen = " (trained on the same tags)" if script == "mmcontrastive" else ""  # by Eq. 5
    assert output.splitlines()[-1] == f"linear probe on coco{seen}: {expected}"
    state = torch.load(tmp_path / "backbone.pth", weights_only=True)
    wrong = torchvision.models.resnet18().load_state_dict(state, strict=False)
    assert wrong.missing_keys == ["fc.weight", "fc.bias"] and not wrong.unexpected_keys
    args = json.loads((tmp_path / "args.json").read_text())
    assert args["iters"] == 3 and args["recipe"] == "paper" and args["processes"] == 1
    assert args["versions"]["torch"] == torch.__version__


@every_script
def test_killed_three_times_ends_with_the_same_bits(script, tiny, tmp_path):
    """SIGKILL before the first checkpoint, right after one and between two; tp with 2 workers.

    It ends in a Python of its own, whose sets have another order.
    """
    flags = ["--iters", 14, "--checkpoint-every", 4]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(tiny(script, whole, *flags))
    command = tiny(script, killed, *flags, "--workers", 2 if script == "tp" else 0)
    for iteration in (2, 5, 11):
        kill_at(iteration, command)
    assert "going on from iteration 8" in finished(run_script(*command)).stdout
    for name in ("backbone.pth", "result.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    speed = {"images_per_s": 0, "data_wait": 0}
    assert [row["iteration"] for row in metrics(killed)] == list(range(1, 15))
    for one, other in zip(metrics(whole), metrics(killed)):
        assert one | speed == other | speed
    one, other = checkpoint_in(whole)["model"], checkpoint_in(killed)["model"]
    assert all(torch.equal(value, other[name]) for name, value in one.items())

    with pytest.raises(SystemExit, match="^0$"):
        run_here(command)
    assert "--lr 0.05, not 0.2" in refusal([*command, "--lr", 0.2])


def test_one_run_in_one_folder_until_sigterm(tiny, tmp_path):
    """A second one is refused while the first one trains. SIGTERM: the step is finished, the
    checkpoint written, and a line says how to go on.
    """
    flags = "--iters", 100_000, "--checkpoint-every", 100_000, "--workers", 1
    command = tiny("virtex", tmp_path, *flags)
    with running(tmp_path, *command) as process:
        assert "another run trains into" in refusal(command)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on there" in output and "Traceback" not in errors
    assert checkpoint_in(tmp_path)["iteration"] == metrics(tmp_path)[-1]["iteration"] >= 1
    assert "going on" not in run_here(tiny("virtex", tmp_path, "--iters", 2, "--fresh"))


def test_a_run_keeps_its_number_of_threads(tiny, tmp_path, monkeypatch):
    """Another number would give other bits: a run that goes on takes that of its checkpoint."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(common, "choose_threads", lambda: None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run_here(tiny("tp", tmp_path, "--iters", 1))
        (tmp_path / "result.json").unlink()
        torch.set_num_threads(1)
        run_here(tiny("tp", tmp_path, "--iters", 1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_process_dies(tiny, tmp_path):
    """Killed in the middle of a run: the others end within seconds, with one line of ours."""
    if not os.path.exists("/proc/self/environ"):
        pytest.skip("this system has no /proc")
    second = []
    command = [*TORCHRUN, *tiny("virtex", tmp_path, "--iters", 100_000)]
    with running(tmp_path, *command) as launcher:
        for path in Path("/proc").glob("[0-9]*"):
            if str(tmp_path).encode() in (path / "cmdline").read_bytes():
                if b"\0RANK=1\0" in (path / "environ").read_bytes():
                    second.append(int(path.name))
        os.kill(min(second), signal.SIGKILL)  # the others are its data workers
        _, errors = launcher.communicate(timeout=60)
    ours = errors.index("error: another process has ended")
    assert "Traceback" not in errors[:ours]


WARMUP = "--head", "att-fc", "--warmup-attention", 0.4


@every_script
def test_two_processes(script, tiny, tmp_path):
    """By gloo: every iteration is logged once, one set of files, equal weights."""
    folder, more = tmp_path / "run", WARMUP if script == "icmlm" else ()
    command = tiny(script, folder, "--iters", 5, "--checkpoint-every", 3, *more)
    in_two_processes(run_here, command)
    assert [row["iteration"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    assert files_in(folder) == RUN_FILES | FILES[script]
    assert json.loads((folder / "args.json").read_text())["processes"] == 2
    assert not any(name.startswith("module.") for name in checkpoint_in(folder)["model"])
    if script == "virtex":  # once is enough: in `Run`, both processes leave in peace
        ended = finished(run_script(*TORCHRUN, *command))
        assert ended.stdout.count("has ended") == 1 and "Traceback" not in ended.stderr
    if script == "icmlm":  # with a frozen backbone two do what one does
        run_here(tiny(script, tmp_path / "one", "--iters", 5, *WARMUP))
        alone, shared = ([row["loss"] for row in metrics(tmp_path / x)] for x in ("one", "run"))
        assert shared[:2] == pytest.approx(alone[:2], rel=1e-3)
        # Behind the switch the batch statistics are those of four photos each.
        assert shared[2:] != pytest.approx(alone[2:], rel=1e-3)


@pytest.mark.parametrize("script", ("virtex", "mmcontrastive"))
def test_fp16_goes_on_from_fp32(script, tiny, tmp_path):
    """--amp may change; the steps that the scaler skips leave the weights finite."""
    flags = ["--iters", 3, "--lr", 0.01]
    run_here(tiny(script, tmp_path, *flags))
    path = tmp_path / "checkpoint.pth"
    torch.save({**checkpoint_in(tmp_path), "iteration": 1}, path)  # as if it had been killed
    (tmp_path / "result.json").unlink()
    run_here(tiny(script, tmp_path, *flags, "--amp", "fp16"))
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint["iteration"] == 3 and checkpoint["scaler"]
    assert common.all_finite(checkpoint["model"])


@every_script
def test_a_loss_that_is_not_finite(script, tiny, tmp_path):
    """A diverging run stops, says what to try, and its checkpoint is finite."""
    flags = ["--iters", 60, "--checkpoint-every", 1, "--warmup", 0.2, "--lr", 1e15]
    if script == "virtex":
        flags += ["--text-lr", 1e15, "--clip", 1e15]
    message = refusal(tiny(script, tmp_path, *flags))
    assert "checkpoint.pth keeps the last good state. Try a lower learning rate" in message
    assert common.all_finite(checkpoint_in(tmp_path)["model"])


@every_script
def test_photos_that_cannot_be_decoded_or_are_missing(script, tiny, coco_folder, tmp_path):
    """One bad photo in 24 is over 1%: the run ends and names it; skipped.txt lists it."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(coco_folder, data)
    bad = sorted((data / "train2017").iterdir())[5]
    bad.write_bytes(bad.read_bytes()[:300])
    flags = ["--root", data, "--iters", 60]
    assert "cannot be decoded" in refusal(tiny(script, run, *flags))
    assert (run / "skipped.txt").read_text() == f"{bad}\n"
    bad.unlink()
    assert "1 of 24 images are missing" in refusal(tiny(script, run, *flags, "--fresh"))


@every_script
def test_other_data_is_refused(script, tiny, tmp_path):
    """Other captions or tags than those that the run began with: refused, nothing is lost."""
    command = tiny(script, tmp_path, "--iters", 2)
    run_here(command)
    path, checkpoint = tmp_path / "checkpoint.pth", checkpoint_in(tmp_path)
    torch.save({**checkpoint, "data": [number + 1 for number in checkpoint["data"]]}, path)
    (tmp_path / "result.json").unlink()
    kept = path.read_bytes()
    assert "other captions, tags or labels" in refusal(command)
    assert path.read_bytes() == kept


def test_odd_entries_of_a_checkpoint_are_refused(tiny, tmp_path):
    """They end with a line, before the first step; settings are those of the flags."""
    command = tiny("virtex", tmp_path, "--iters", 2)
    run_here(command)
    (tmp_path / "result.json").unlink()
    path, whole = tmp_path / "checkpoint.pth", (tmp_path / "checkpoint.pth").read_bytes()
    odd = [("lookahead", "steps", "x"), ("lookahead", "slow", []), ("optimizer", "state", 0)]
    for part, name, value in odd:
        checkpoint = torch.load(io.BytesIO(whole), weights_only=True)
        checkpoint[part][name] = value
        torch.save({**checkpoint, "iteration": 1}, path)
        assert "checkpoint.pth: " in refusal(command)
    checkpoint = torch.load(io.BytesIO(whole), weights_only=True)
    checkpoint["optimizer"]["param_groups"][0]["momentum"] = "x"
    torch.save({**checkpoint, "iteration": 1}, path)
    run_here(command)


@every_script
def test_another_script_and_damage_are_refused(script, tiny, tmp_path):
    """A checkpoint of another script, and half a checkpoint, end with a line that names it."""
    command = tiny(script, tmp_path, "--iters", 1)
    torch.save({"script": "other", "args": {}}, tmp_path / "checkpoint.pth")
    assert "holds a run of other.py" in refusal(command)
    content = (tmp_path / "checkpoint.pth").read_bytes()
    (tmp_path / "checkpoint.pth").write_bytes(content[: len(content) // 2])
    assert "Expected: a whole checkpoint of" in refusal(command)


@every_script
def test_a_full_disk_keeps_the_last_checkpoint(script, tiny, tmp_path):
    """The run ends with a line when a checkpoint cannot be written; the one before is whole."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    run_here(tiny(script, tmp_path, "--iters", 2))
    (tmp_path / "result.json").unlink()
    torch.save({**checkpoint_in(tmp_path), "iteration": 1}, tmp_path / "checkpoint.pth")
    kept = (tmp_path / "checkpoint.pth").read_bytes()
    (tmp_path / "checkpoint.pth.tmp").symlink_to("/dev/full")
    message = refusal(tiny(script, tmp_path, "--iters", 2))
    assert "checkpoint.pth cannot be written" in message and "make room" in message
    assert (tmp_path / "checkpoint.pth").read_bytes() == kept


@every_script
def test_copied_into_an_empty_folder(script, coco_folder, tmp_path):
    """The script, common.py and language.py alone train on a .jsonl with no other flag but size."""
    for name in (f"{script}.py", "common.py", "language.py"):
        shutil.copy(ROOT / name, tmp_path)
    captions = ["a red circle on the left", "one small circle", "a circle and a blue square"]
    photos = sorted((coco_folder / "train2017").iterdir()) * 3
    rows = [{"image": str(path), "captions": captions} for path in photos[:50]]
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--data", "photos.jsonl", "--iters", "2", "--image-size", "32", "--workers", "0"]
    flags += ["--batch-size", "16"]
    if script != "virtex":
        flags += ["--lm-iters", "2"]
    command = [sys.executable, f"{script}.py", *flags]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment()}
    process = subprocess.run(command, **options)
    assert "eval_linear.py is not here" in finished(process).stdout
    assert (tmp_path / "runs" / script / "backbone.pth").exists()


USES = {"virtex": "--caption a.jpg", "tp": "--predict a.jpg", "mmcontrastive": "--search dog",
        "icmlm": "--explain a.jpg --caption dog --word dog"}  # fmt: skip


@every_script
def test_what_a_model_draws_lies_beside_it(script):
    """The default of --output with --weights is their folder."""
    module = importlib.import_module(script)
    use = [*USES[script].split(), "--weights", "some/run/checkpoint.pth"]
    assert module.get_args(use).output == "some/run"
    assert module.get_args([*use, "--output", "there"]).output == "there"
    assert module.get_args([]).output == f"runs/{script}"


@every_script
def test_help_tells_the_recipe_s_defaults(script, capsys):
    """--help shows the defaults for the --data beside it, at most 100 columns wide."""
    module = importlib.import_module(script)
    widths, batch_sizes = [], module.RECIPES["batch_size"]
    for data, batch_size in zip(("shapes", "photos.jsonl", "coco"), batch_sizes):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setenv("COLUMNS", "100")
            module.get_args(["--data", data, "--help"])
        text = capsys.readouterr().out
        assert f"over all processes (default {batch_size})" in " ".join(text.split())
        widths.append(max(map(len, text.splitlines())))
    assert max(widths) <= 100


@every_script
def test_flickr8k(script, tiny, real_data, tmp_path):
    """A few steps on real photos, in COCO's layout with splits of another name."""
    flags = ["--root", real_data / "flickr8k", "--train-split", "train", "--val-split", "val"]
    run_here(tiny(script, tmp_path, *flags, "--fraction", 0.02, "--iters", 3))
    assert "probe" not in result(tmp_path) and len(metrics(tmp_path)) == 3
