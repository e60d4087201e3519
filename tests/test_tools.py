"""tools/: benchmark.py measures every method, plot.py draws; tests/fuzz.py for half a minute."""

import json
import re

import pytest
import transformers
from conftest import finished, run_script
from PIL import Image

from tools import benchmark, plot

TINY = ["--arch", "resnet18", "--image-size", "32", "--batch-size", "8", "--hidden", "64"]
TINY += ["--rounds", "1", "--amp", "off"]


def printed_speeds(output):
    """{name: (images per second, comment)}"""
    speeds = {}
    for line in output.splitlines():
        if "images/s" in line:
            speed, comment = line[20:].split("images/s")
            speeds[line[:20].strip()] = float(speed), comment.strip()
    return speeds


def test_benchmark_runs(monkeypatch, capsys):
    """Each method's step beside its floor, with a small BERT."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = transformers.BertConfig(vocab_size=10_000, intermediate_size=64, **sizes)
    monkeypatch.setattr(benchmark, "BERT_BASE", bert)
    monkeypatch.setattr(benchmark, "STEPS", 1)
    benchmark.main(benchmark.get_args(TINY))
    speeds = printed_speeds(capsys.readouterr().out)
    assert speeds.keys() == {*benchmark.METHODS, "bare backbone", "contrastive floor"}
    for method in benchmark.METHODS:
        name = "contrastive floor" if method == "mmcontrastive" else "bare backbone"
        (speed, comment), (floor, _) = speeds[method], speeds[name]
        share, text = comment.split("% of the ")
        assert text == name and float(share) == pytest.approx(100 * speed / floor, rel=0.05)


def test_plot(tmp_path, capsys):
    """One panel per term that all runs have, also of validation alone; or those asked for."""
    rows = {"a": {"loss": 2.0, "ii": 1.0, "top1": 5}, "b": {"loss": 3.0, "validation_top1": 7}}
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        line = json.dumps({"iteration": 10, "lr": 0.1, **row})
        (tmp_path / name / "metrics.jsonl").write_text(f"{line}\n{line}\n")
    picture, other = tmp_path / "b" / "curves.png", str(tmp_path / "ii.png")
    flags = [str(tmp_path / "a"), str(tmp_path / "b")]
    for more, terms in ([], "loss, top1 of 2"), (["--terms", "ii", "--output", other], "ii of 2"):
        plot.main(plot.get_args(flags + more))
        assert capsys.readouterr().out.startswith(terms)
        assert Image.open(more[-1] if more else picture).width == 675 * (1 + terms.count(","))
    with pytest.raises(SystemExit, match="metrics.jsonl is missing"):
        plot.main(plot.get_args([str(tmp_path)]))


def test_bad_input():
    """Damaged files, wrong lines and SIGKILL: nothing lost, no hang, no code run"""
    flags = "--minutes", 0.15, "--seed", 1, "--scripts", "tp", "eval_linear"
    output = finished(run_script("tests/fuzz.py", *flags)).stdout.splitlines()[-1]
    counts = {ending: int(count) for count, ending in re.findall(r"(\d+) (\w+)", output)}
    assert counts["accepted"] + counts["refused"]
    assert not any(counts[ending] for ending in ("unclear", "hang", "code", "lost"))
