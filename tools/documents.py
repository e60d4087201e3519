"""Write our tables and verdicts into README and docs/, from docs/logs:   python tools/documents.py

Between these markers a page has the table of a log (or of all logs that a pattern matches) with
these columns; NAME = the heading. `means` instead of `table` leaves out deviations. After `runs`
come the runs of docs/papers.md that are its rows, in this order; one without a score is "not run
yet". Without `runs`, the table has all rows of the log that have a score.

    <!-- table race/own-photos.json: own-mean = mean, seeds; runs own-virtex own-words-alone -->
    <!-- end -->

A table of claims is written by hand but for our scores and verdicts. Its marker names the folder
of the logs and the measure; each claim names the runs that it compares. What stands after a
verdict, and "no test", is kept. "; papers": the runs on papers.md, if they have other names.

    <!-- claims race own-mean -->
    | VirTex > TP <!-- own-virtex > own-tp; papers virtex > tp --> | 88.7, 82.6 | | |
    <!-- end -->

A paragraph, a list item or a table with other numbers says in comments where each of them is:

    <!-- log: class.json: mAP: blind; papers: virtex -->     a file and keys; a run of papers.md
    <!-- log: tables/scenes/scenes.json: TP-Postag: scenes-map -->      a row (and a column)
    <!-- log: tables/race/own-photos.json: own-virtex - own-moco: own-mean -->    their difference
    <!-- by hand: 44.4 48.5: no log of these runs was kept -->           numbers, and why
    <!-- paper: 0.02 15% -->                       what the paper says of its own method

tests/test_documents.py looks for each decimal, and each integer before "%" and "points", there.
"""

import argparse
import functools
import json
import re
import statistics
import sys
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import reproduce
from tools.reproduce import REPO, in_words, line_of

LOGS = REPO / "docs/logs"
PAGES = [REPO / "README.md", *sorted(REPO.glob("docs/**/*.md"))]
PAGES.remove(reproduce.PAGE)
TABLE = r"(<!-- (table|means) (\S+): ([^>;]+)(?:;\s+runs ([^>]+))? -->\n+)"
MARKED = TABLE + r"(?:\|.*\n)*(\n*<!-- end -->)"
CLAIMS = r"(<!-- claims (\S+) (\S+) -->\n)(.*?)(<!-- end -->)"
CLAIM = r"<!-- (?:(\S+): )?(\S+) > (\S+?)(?:, control (\S+?))?(?:; papers (\S+) > (\S+))? -->"
CHANCE = r"(<!-- chance -->\n)[^<]*(<!-- end -->)"


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=layout).parse_args(argv)


def main():
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))


def with_tables(text):
    """A page with our tables and verdicts between its markers"""

    def replaced(match):
        marker, kind, files, columns, runs, end = match.groups()
        lines = "".join(f"{line}\n" for line in table(files, columns, (runs or "").split()))
        return marker + (re.sub(r" ± [\d.]+", "", lines) if kind == "means" else lines) + end

    def judged(match):
        marker, folder, measure, lines, end = match.groups()
        heads, rule, *rows = lines.splitlines()
        rows = [claim(row, cells_of(heads), folder, measure) for row in rows]
        return "\n".join([marker.strip(), heads, rule, *rows, end])

    text = re.sub(MARKED, replaced, text)
    text = re.sub(CLAIMS, judged, text, flags=re.S)
    return re.sub(CHANCE, rf"\g<1>{by_chance(text)}\g<2>", text)


@functools.cache
def read(path):
    return json.loads(path.read_text())


def table(files, columns, runs=()):
    """files: a pattern in docs/logs/tables -> lines of Markdown"""
    logs = [read(path) for path in sorted((LOGS / "tables").glob(files))]
    heads = {}  # {name of a column: its heading}
    for column in re.split(r",\s+", columns):
        name, _, head = column.partition(" = ")
        heads[name] = head or logs[0]["columns"].get(name, name)
    lines = [f"|  | {' | '.join(heads.values())} |", "|" + (1 + len(heads)) * "---|"]
    rows = [row for log in logs for row in log["rows"]]
    if runs:
        rows = [find_row(rows, run) for run in runs]
    for row in rows:
        cells = {name: row["cells"].get(name, {"ours": []})["ours"] for name in heads}
        counts = sorted({len(seeds) for seeds in cells.values()} - {0})
        words = {name: in_words(cells[name], 2 if "loss" in name else 1) for name in cells}
        words["seeds"] = " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
        if runs and not counts:
            words[next(iter(heads))] = "not run yet"
        if runs or counts:
            lines.append(line_of([row["row"], *(words[name] for name in heads)]))
    return lines


def find_row(rows, run):
    """The row of a run in a log, or one without scores, with its name on papers.md"""
    for row in rows:
        if row.get("run") == run:
            return row
    labels = [row[0] for rows in page()[-1].values() for row in rows[1:] if row[1] == run]
    return {"row": labels[0], "cells": {}}


@functools.cache
def page():
    """-> the runs, measures and tables of docs/papers.md"""
    return reproduce.read_page()


# ---------------------------------------------------------------------------------------- claims


def cells_of(line):
    return re.split(r" *\| *", line)[1:-1]


def claim(line, heads, folder, measure):
    """A row of a table of claims, with our scores and verdicts"""
    cells = dict(zip(heads, cells_of(line)))
    other, first, second, control, *_ = re.search(CLAIM, line).groups()
    for head, text in cells.items():
        place = "scenes-x4" if head == "4x" else folder
        pair = [scores_of(place, run, other or measure) for run in (first, second)]
        versus = [pair[0], scores_of(place, control, other or measure)]
        if head in ("mean mAP", "scenes", "4x"):
            cells[head] = ", ".join(map(listed, pair)) if head != "4x" or all(pair) else ""
        elif head == "control":
            cells[head] = listed(versus[1]) if control else ""
        elif head.startswith("here") and not text.startswith("no test"):
            words = [verdict(*pair), *([verdict(*versus)] if control else [])]
            cells[head] = "; ".join(words) + "".join(re.findall(r" \(\d+\)$", text))
        elif head.startswith("flowers"):
            maps = [f"own-map-{name}" for name in head.split(", ")]
            signs = [verdict(*(scores_of(folder, run, m) for run in (first, second))) for m in maps]
            cells[head] = ", ".join(SIGNS[sign] for sign in signs if sign in SIGNS)
    return line_of(cells.values())


SIGNS = {"holds": "+", "reversed": "-", "noise": "0"}


def listed(scores):
    values = scores if len({*scores}) > 1 else scores[:1]
    return in_words([[score] for score in values]) or "not run"


def scores_of(folder, run, measure):
    """-> a score for each seed, of the log that has most of them; "i2t.1": its second number"""
    measure, _, index = measure.partition(".")
    found = [[]]
    for path in sorted(LOGS.glob(f"tables/{folder}/*.json")):
        for row in read(path).get("rows", []):
            for name, cell in row["cells"].items():
                if row.get("run") == run and (cell.get("by") or name) == measure:
                    found.append([scores[int(index or 0)] for scores in cell["ours"]])
    if reproduce.published(page()[0].get(run, "")):
        return 3 * max(found, key=len)[:1]  # as many seeds as one wants give the same number
    return max(found, key=len)


def verdict(first, second):
    """Of "first > second", by Welch's t-test at p < 0.05, from three seeds each"""
    fewest = min(len(first), len(second))
    if fewest < 3:
        return ["not run", "one seed", "two seeds"][fewest]
    if len({*second}) == 1:  # a number without seeds
        test = stats.ttest_1samp(first, second[0])
    else:
        test = stats.ttest_ind(first, second, equal_var=False)
    if test.pvalue >= 0.05:
        return "noise"
    return "holds" if statistics.mean(first) > statistics.mean(second) else "reversed"


def by_chance(text):
    """The sentence of claims.md on its verdicts"""
    claims = "".join(match[4] for match in re.finditer(CLAIMS, text, re.S))
    words = re.findall(r"\b(?:holds|reversed|noise)\b", claims)
    signs = "".join(re.findall(r"[+0-](?:, [+0-])+", claims)).replace(", ", "")
    return (
        f"The tables have {len(words)} verdicts by a test and {len(signs)} signs. If no methods "
        f"differed,\nchance alone would give {0.05 * len(words):.1f} verdicts and "
        f"{0.05 * len(signs):.1f} signs that are not noise (5%).\n"
    )


# ------------------------------------------------------------------------------ numbers in text

DECIMAL = r"(?<![\w.^])(?<!\w-)(?<!\^-)\d+\.\d+(?: ± \d+\.\d+)?(?!\w|\.\d)"
INTEGER = r"(?<![\d.])((?:\d+(?:, | and | to | or ))*\d+)(?:%| points)"
NO_SCORES = "|".join([
    r"<!--.*?-->",
    r"(?<!`)`[^`]+`(?!`)",
    r"\$\$?[^$]*\$\$?",
    r"\]\([^)]*\)",
    r"\b(?:arXiv|[Pp]ython|torch|transformers) [\d.]+",
    r"\b(?:Sec|App|Tab|Fig|Eq)s?\.\s[\w.]+(?:, [A-Z]?\.?[\d.]+)*",
])  # fmt: skip


def blocks(text):
    """The paragraphs, list items and tables of a page that are written by hand"""
    papers = []  # the second column of claims has the numbers of papers' runs
    for lines in (match[4] for match in re.finditer(CLAIMS, text, re.S)):
        for line in lines.splitlines()[2:]:
            _, first, second, _, one, other = re.search(CLAIM, line).groups()
            places = f"papers: {one or first}; papers: {other or second}"
            papers.append(f"{cells_of(line)[1]} <!-- log: {places} -->")
    text = re.sub(MARKED, "", text)
    text = re.sub(CLAIMS, "", text, flags=re.S)
    text = re.sub(CHANCE, "", text)
    text = re.sub(r"^ *```\w.*?^ *```", "", text, flags=re.S | re.M)
    return papers + re.split(r"\n\s*\n(?!\s*\|)|\n(?=\* |\d\. )", text)


def written(block):
    """-> the scores in a paragraph: {"52.6 ± 0.3", "88.7", "7", "10"} of "7 to 10 points" """
    text = re.sub(NO_SCORES, "", " ".join(block.split()))
    found = set(re.findall(DECIMAL, text))
    for numbers in re.findall(INTEGER, text):
        found.update(re.findall(r"\d+", numbers))
    return found


def wrong(block):
    """-> the scores in a paragraph that are not where its comments say"""
    allowed = known(block)
    found = {score for score in written(block) if score not in allowed}
    return {score for score in found if not {*score.split(" ± ")} <= allowed}


def known(block):
    """-> the numbers that a paragraph's comments allow"""
    found = set()
    for kind, content in re.findall(r"(?<!`)<!-- (log|by hand|paper): (.*?) -->", block, re.S):
        content = " ".join(content.split())
        if kind == "log":
            for place in content.split("; "):
                found |= numbers_at(*place.split(": "))
        else:
            found.update(re.findall(r"[\d.]+(?: ± [\d.]+)?", content.split(": ")[0]))
    return found


@functools.cache
def numbers_at(name, *keys):
    """-> the numbers at a place of a log as our pages write them, with 0, 1 or 2 digits"""
    if name == "papers":
        rows = [row for rows in page()[-1].values() for row in rows[1:] if row[1] == keys[0]]
        return set(re.findall(r"\d+(?:\.\d+)?", " ".join(sum((row[2:] for row in rows), []))))
    found = read(LOGS / name)
    if "rows" in found and keys:
        label, *column = keys
        runs = label.split(" - ")
        rows = [row for run in runs for row in found["rows"] if run in (row["row"], row.get("run"))]
        cells = [row["cells"][key] for row in rows for key in column or row["cells"]]
        if len(runs) == 2:
            first, second = (statistics.mean(sum(cell["ours"], [])) for cell in cells)
            return in_digits(first - second)
        texts = [in_words(cell["ours"], digits) for cell in cells for digits in (0, 1, 2)]
        return set(" / ".join(texts).split(" / "))
    for key in keys:
        found = found[key]
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", json.dumps(found))
    return set().union(*(in_digits(float(number)) for number in numbers))


def in_digits(number):
    return {f"{abs(number):.{digits}f}" for digits in (0, 1, 2)}


if __name__ == "__main__":
    get_args()
    main()
