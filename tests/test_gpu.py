"""What only a GPU can show: that it learns the same, resumes, and has memory enough.

The suite sees no GPU (conftest.py), so everything here runs in processes of its own that see what
was visible before. They are spawned: a fork cannot use CUDA once its parent has asked for it. Most
tests share one process, which has CUDA and all libraries loaded; what is killed has its own, and
so has what torchrun starts.
"""

import gc
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from conftest import SCRIPTS, TESTS, TORCHRUN, compare_weights, finished, metrics
from conftest import result, run_here, run_script, run_until_killed

import icmlm
from extras import shapes

SPAWN = multiprocessing.get_context("spawn")
DEVICE = "cuda"
SCENES = {"train": range(320), "val": range(10**7, 10**7 + 320)}  # of --data shapes
ITERS = 30
FLAGS = "--iters", ITERS, "--checkpoint-every", 10
OWN = {
    "virtex": ["--dropout", 0],  # whose random numbers differ between devices
    "tp": [],
    "icmlm": ["--head", "att-fc", "--lr", 0.1],  # its loss falls in 30 iterations
    # In batches of 8 its losses differ by 9% in bf16, also on a CPU.
    "mmcontrastive": ["--lr", 0.003, "--text-lr", 0.003, "--data", "shapes", "--batch-size", 64,
                      "--queue", 64],
}

every_script = pytest.mark.parametrize("script", SCRIPTS)


def begin():
    """In each process that sees the GPUs, before CUDA starts: undo what conftest.py did"""
    before = os.environ["GPUS_BEFORE_TESTS"]
    if before == "all":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    icmlm.DROPOUT = 0.0
    shapes.SPLITS = SCENES


@pytest.fixture(scope="module")
def on_gpu():
    """-> function (function, *given) -> what it returns in the process that has CUDA loaded"""
    if not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch is built without CUDA")
    with ProcessPoolExecutor(1, SPAWN, initializer=begin) as process:

        def call(function, *given):
            return process.submit(function, *given).result()

        if not call(torch.cuda.device_count):
            pytest.skip("there is no GPU")
        yield call


def run_measured(command):
    """Run a script -> what it printed, and the most bytes that it held on the GPU

    Those of a training script are two numbers: in training, and in validation.
    """
    script = importlib.import_module(command[0].removesuffix(".py"))
    validate = getattr(script, "validate", None)  # eval_linear.py has none
    peaks = []

    def note_peak():
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def measured(*given):
        note_peak()  # of training
        scores = validate(*given)
        note_peak()
        return scores

    torch.backends.cudnn.allow_tf32 = True  # the default, which eval_linear.py changes
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    if validate:
        script.validate = measured
    try:
        printed = run_here(command)
    finally:
        if validate:
            script.validate = validate
    if not peaks:
        note_peak()
    assert peaks[0] > 2**20, "nothing was on the GPU"
    return printed, peaks


def run_killed(iteration, command):
    begin()
    run_until_killed(iteration, command)


def kill_on_gpu(iteration, command):
    """conftest.kill_at, but in a process that is no fork"""
    process = SPAWN.Process(target=run_killed, args=(iteration, command))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def losses_in(folder):
    return [row["loss"] for row in metrics(folder)]


@pytest.fixture(scope="module")
def command_of(tiny, tiny_lm, tmp_path_factory):
    """-> function (script, output, *flags) -> the command of a tiny run without dropout

    Some flags are given twice: the last one counts.
    """
    lm = shutil.copytree(tiny_lm, tmp_path_factory.mktemp("no_dropout") / "lm")
    config = json.loads((lm / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (lm / "config.json").write_text(json.dumps(config))

    def command(script, output, *flags):
        more = ["--lm", lm] if script in ("icmlm", "mmcontrastive") else []
        return tiny(script, output, *FLAGS, *OWN[script], *more, *flags)

    return command


@pytest.fixture(scope="module")
def whole_runs(on_gpu, command_of, tmp_path_factory):
    """-> function (script) -> the folder of its run of 30 iterations on the GPU, in float32"""
    folders = {}

    def whole_run(script):
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp("whole") / script
            on_gpu(run_measured, command_of(script, folders[script]))
        return folders[script]

    return whole_run


@every_script
def test_losses(script, on_gpu, whole_runs, command_of, tmp_path, monkeypatch, few_scenes):
    """They fall, and begin and end as on the CPU, in float32 and in bf16."""
    monkeypatch.setattr(icmlm, "DROPOUT", 0.0)
    few_scenes(*map(len, SCENES.values()))
    run_here(command_of(script, tmp_path / "cpu"))
    on_cpu = losses_in(tmp_path / "cpu")
    on_gpu(run_measured, command_of(script, tmp_path / "bf16", "--amp", "bf16"))
    for folder, tolerance in ((whole_runs(script), 0.02), (tmp_path / "bf16", 0.05)):
        losses = losses_in(folder)
        assert losses[:3] == pytest.approx(on_cpu[:3], rel=tolerance)
        assert sum(losses[-5:]) == pytest.approx(sum(on_cpu[-5:]), rel=2 * tolerance)
        # mmcontrastive's start near 0, its queues being empty: they fall after 30 iterations only.
        assert script == "mmcontrastive" or sum(losses[-5:]) < 0.95 * sum(losses[:5]), losses


@pytest.mark.parametrize("script", ["mmcontrastive", "virtex"])
def test_a_killed_run_resumes(script, on_gpu, whole_runs, command_of, tmp_path):
    """It ends with nearly the loss of one that was not killed. (On a GPU sums have no fixed order.)
    """
    kill_on_gpu(17, command_of(script, tmp_path))
    printed, _ = on_gpu(run_measured, command_of(script, tmp_path))
    assert "10 of 30 iterations are done" in printed
    killed, whole = losses_in(tmp_path), losses_in(whole_runs(script))
    assert len(killed) == len(whole) == ITERS
    assert killed[-1] == pytest.approx(whole[-1], rel=0.05)


def test_torchrun_on_all_gpus(on_gpu, command_of, tmp_path):
    """All processes have the same weights at the end. (One GPU: by NCCL, but alone)"""
    num_gpus = on_gpu(torch.cuda.device_count)
    command = command_of("virtex", tmp_path, "--batch-size", 8 * num_gpus)
    launch = *TORCHRUN[:-1], f"--nproc_per_node={num_gpus}", TESTS / "test_gpu.py"
    ended = finished(run_script(*launch, *command))
    assert ended.stdout.count(f"on {DEVICE}") == 1 and len(metrics(tmp_path)) == ITERS
    assert all(math.isfinite(loss) for loss in losses_in(tmp_path))
    assert json.loads((tmp_path / "args.json").read_text())["processes"] == num_gpus


@pytest.mark.parametrize("protocol", ["svm-virtex", "svm-icmlm"])
def test_scores_of_eval_linear(protocol, on_gpu, whole_runs, few_scenes, tmp_path):
    """Those of the CPU, but for 0.2 points of mAP"""
    few_scenes(*map(len, SCENES.values()))
    weights = f"{whole_runs('virtex')}/backbone.pth"
    flags = "--weights", weights, "random", "--protocol", protocol, "--workers", "0"
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    run_here(["eval_linear.py", *flags, "--output", here])
    on_gpu(run_measured, ["eval_linear.py", *flags, "--output", str(there)])
    expected, found = (result(folder)["backbones"] for folder in (here, there))
    for source in (weights, "random"):
        difference = found[source]["mean"]["mAP"] - expected[source]["mean"]["mAP"]
        assert abs(difference) < 0.2, source


@every_script
def test_memory(script, on_gpu, command_of, tmp_path):
    """Validation and eval_linear.py hold less than the training, in batches of the same size."""
    flags = ["--data", "shapes", "--arch", "resnet50", "--image-size", 64, "--batch-size", 64]
    run = tmp_path / "run"
    command = command_of(script, run, *flags, "--iters", 3)
    _, (training, validation) = on_gpu(run_measured, command)
    assert validation < training
    if script == "virtex":
        evaluate = "eval_linear.py", "--weights", f"{run}/backbone.pth", "--workers", "0"
        _, [evaluation] = on_gpu(run_measured, [*evaluate, "--output", f"{tmp_path}/scores"])
        assert evaluation < training


if __name__ == "__main__":  # of torchrun
    begin()
    waiting = compare_weights()
    print(run_here(sys.argv[1:]), end="")
    assert not waiting, "the weights were not compared"
