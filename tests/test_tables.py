"""README and docs/: tables are those of docs/scores.csv, and prose has no number from nowhere."""

import json
import re

import pytest
from conftest import run_here
from scipy import stats
from tools import tables
from tools.tables import PAGES

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_tables_are_written(page):
    text = page.read_text()
    assert tables.with_tables(text, tables.read_scores()) == text, "run python tools/tables.py"


SOURCE = r"\[(?:[^]]*, )?(?:official code|(?:Sec|App|Tab|Fig|Eq)s?\. [^]]*)\]"
NO_PROSE = "|".join([
    r"<!--.*?-->",
    r"^ *```.*?^ *```",
    r"^\|[^\n]*",  # a table
    r"`[^`]+`",
    r"\$\$?[^$]*\$\$?",
    r"\]\([^)]*\)",  # an address
    r"\b(?:arXiv|[Pp]ython|torch)\s[\d.]+",
    r"\b(?:Sec|App|Tab|Fig|Eq)s?\.\s[\w.]+",
])
DECIMAL = r"(?<![\w.^])(?<![\w^]-)\d+\.\d+(?!\w|\.\d)"


def sentences(text):
    """The prose of a page"""
    prose = re.sub(SOURCE, "[source]", text)
    prose = re.sub(NO_PROSE, "", prose, flags=re.S | re.M)
    return re.split(r"(?<=[.:?!])\s|\n\n", prose)


def from_nowhere(text, known):
    """The decimals of sentences that name no source, and are in none of these lines of tables"""
    prose = " ".join(x for x in sentences(text) if "[source]" not in x)
    return set(re.findall(DECIMAL, prose)) - set(re.findall(DECIMAL, known))


@every_page
def test_decimals(page):
    """Each stands in a table of some page, or in a sentence that names its source in brackets."""
    lines = "\n".join(page.read_text() for page in PAGES).splitlines()
    known = "\n".join(line for line in lines if line.startswith("|"))
    assert from_nowhere(page.read_text(), known) == set(), "write about, or a whole number"


KNOWN = "| MoCo | 47.8 ± 0.6 |"
NOWHERE = {
    "MoCo has 47.8, VirTex 52.0.": {"52.0"},
    "MoCo has 47.8 (-0.6).": set(),
    "It starts at 0.02 [official code], and then has 0.03. The rate is 0.01.": {"0.01"},
    "The rate is 0.01 [ours].": {"0.01"},
    "It is 1.5 [ICMLM, App. F.1], as in Sec. 4.4, `0.25`, H^-0.5, arXiv 2006.06666.": set(),
    "```\nprints 54.41\n```\n| 1.5 | <!-- 2.5 --> $x^{0.5}$ [a](b-1.5.md)": set(),
}


@pytest.mark.parametrize("text", NOWHERE)
def test_from_nowhere(text):
    assert from_nowhere(text, KNOWN) == NOWHERE[text]


def lines_of(*rows):
    return [dict(zip(tables.FIELDS, row)) for row in rows]


LINES = lines_of(
    ("photos", "MoCo", "mean", "48.1000 47.2000"),
    ("photos", "MoCo", "loss", "1.0040"),
    ("photos", "TP", "mean", "50.2500"),
    ("photos", "TP", "photos per second", "1200 1300"),
    ("longer", "TP", "mean", "56.1000"),
)
WRITTEN = """
<!-- table photos: mean / loss = score
     | longer: mean | photos per second = speed | seeds; rows TP | MoCo -->
|  | score | longer: mean | speed | seeds |
|---|---|---|---|---|
| TP | 50.2 | 56.1 | 1,250 ± 71 | 2 |
| MoCo | 47.7 ± 0.6 / 1.00 |  |  | 2 |
<!-- end -->
text
"""


def test_table():
    """Rows in the order that is asked for, two measures in a cell, digits, a column elsewhere"""
    empty = re.sub(r"^\|.*\n", "", WRITTEN, flags=re.M)
    assert tables.with_tables(empty, LINES) == WRITTEN == tables.with_tables(WRITTEN, LINES)
    everything = tables.with_tables("<!-- table photos: mean -->\n<!-- end -->", LINES)
    assert "| MoCo | 47.7 ± 0.6 |\n| TP | 50.2 |\n" in everything


def test_how_and_lengths():
    page = tables.with_tables("<!-- table longer: mean; rows TP = `tp.py` -->\n<!-- end -->", LINES)
    assert "|  | how | mean |\n" in page and "| TP | `tp.py` | 56.1 |\n" in page
    lines = len((tables.REPO / "tp.py").read_text().splitlines())
    [_, counted, _] = tables.with_lengths("| [tp.py](docs/tp.md) | 1 | 2 |").split(" | ")
    assert abs(int(counted) - lines) <= 5 and int(counted) % 10 == 0


def test_differences():
    """Two runs: Student's t-test with equal variances. More runs add to its deviation."""
    runs = {"a": [52.0, 51.9, 52.4], "b": [47.1, 48.9], "c": [30.0, 33.0, 31.0, 36.0]}
    text = "<!-- differences t: m = score -->\n| claim | paper |\n|---|---|\n"
    lines = lines_of(*(("t", name, "m", " ".join(map(str, x))) for name, x in runs.items()))
    for claims in [("a", "b")], [("a", "b"), ("c", "a")]:
        body = "".join(f"| {a} > {b} [Tab. 1] | 9.9 |\n" for a, b in claims)
        written = tables.with_tables(f"{text}{body}<!-- end -->", lines)
        pool = [runs[name] for name in "abc"[: 1 + len(claims)]]
        squares = sum((x - sum(y) / len(y)) ** 2 for y in pool for x in y)
        freedom = sum(map(len, pool)) - len(pool)
        margin = stats.t(freedom).ppf(0.975) * (squares / freedom * (1 / 3 + 1 / 2)) ** 0.5
        difference = f"4.1 ({4.1 - margin:.1f} to {4.1 + margin:.1f})"
        assert f"| a > b [Tab. 1] | 9.9 | 52.1, 48.0 | {difference} |\n" in written
        assert tables.with_tables(written, lines) == written
    two = stats.ttest_ind(runs["a"], runs["b"]).confidence_interval()
    only_two = {"a": runs["a"], "b": runs["b"]}
    assert tables.margin_of("a", "b", only_two) == pytest.approx((two.high - two.low) / 2)
    frozen = {"a": runs["a"], "b, frozen": [85.7]}
    one = stats.ttest_1samp(runs["a"], 85.7).confidence_interval()
    assert tables.margin_of("a", "b, frozen", frozen) == pytest.approx((one.high - one.low) / 2)


def test_add(tiny, coco_folder, tmp_path, monkeypatch, capsys):
    """Two trainings, measured: a line with all that is known, after those of its table"""
    monkeypatch.setattr(tables, "SCORES", tmp_path / "scores.csv")
    monkeypatch.setattr(tables, "PAGES", [])
    before = [dict.fromkeys(tables.FIELDS, "") | line for line in LINES[1:]]
    rows = [tables.FIELDS, *(line.values() for line in before)]
    tables.SCORES.write_text("".join(",".join(row) + "\n" for row in rows))
    results, scores = [], []
    for seed in "01":
        monkeypatch.setattr("sys.argv", ["tp.py", "--seed", seed])
        run_here(tiny("tp", tmp_path / seed, "--iters", 1, "--seed", seed))
        monkeypatch.setattr("sys.argv", ["eval_linear.py"])
        weights = "--weights", tmp_path / seed / "backbone.pth", "random"
        data = "--data", "coco", "--root", coco_folder, "--workers", 0
        run_here(["eval_linear.py", *weights, *data, "--output", tmp_path / seed / "coco"])
        results.append(str(tmp_path / seed / "coco/result.json"))
        content = json.loads((tmp_path / seed / "coco/result.json").read_text())
        scores.append(content["backbones"][str(weights[1])]["mean"]["mAP"])
    add = "--add", "photos", "MoCo", "coco"
    tables.main(tables.get_args([*add, *results]))
    lines = tables.read_scores()
    new = lines.pop(3)  # after photos, before longer
    assert lines == before and [new[name] for name in tables.FIELDS[:3]] == [*add[1:]]
    assert new["scores"] == f"{scores[0]:.4f} {scores[1]:.4f}"
    commands = "tp.py --seed 0", "eval_linear.py", "tp.py --seed 1"
    assert new["command"] == "; ".join(f"python {command}" for command in commands)
    args = json.loads((tmp_path / "0/args.json").read_text())
    assert (new["date"], new["machine"]) == (args["date"], args["machine"])
    assert new["commit"] == (args["commit"] or "") and len(new["seconds"].split()) == 2

    # Now of one seed, with a second result of the same backbone
    content["backbones"][str(weights[1])]["mean"]["mAP"] += 4
    (tmp_path / "other.json").write_text(json.dumps(content))
    tables.main(tables.get_args([*add, results[1], str(tmp_path / "other.json")]))
    assert "replaced: photos, MoCo, coco" in capsys.readouterr().out
    assert tables.read_scores()[3]["scores"] == f"{scores[1] + 2:.4f}"
    add = "--add", "new", "TP", "top-1", "--key", "validation.top1"
    tables.main(tables.get_args([*add, str(tmp_path / "0/result.json")]))
    last = tables.read_scores()[-1]
    validation = json.loads((tmp_path / "0/result.json").read_text())["validation"]
    assert float(last["scores"]) == validation["top1"]
    assert last["command"] == "python tp.py --seed 0"
