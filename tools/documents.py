"""Write our tables and verdicts into README and docs/, from docs/logs:   python tools/documents.py

Between these markers stands a table of the logs that match: its columns (NAME = the heading), and
after `runs` the runs of docs/papers.md that are its rows, "not run yet" if they have no score.
Without `runs`, each row with a score is there. `means` instead of `table` leaves out deviations.

    <!-- table race/own-photos.json: own-mean = mean, seeds; runs own-virtex own-words-alone -->
    <!-- end -->

A table of claims is written by hand but for our scores and verdicts. Its marker names the folder
of the logs and the measure; each claim names the runs that it compares ("; papers": those of
papers.md, if they have other names). "No test", and a number behind a verdict, are kept.

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
CLAIMS = r"(<!-- claims (\S+) (\S+) -->\n)((?:\|.*\n)*)(<!-- end -->)"
CLAIM = r"<!-- (?:(\S+): )?(\S+) > (\S+?)(?:, control (\S+?))?(?:; papers (\S+) > (\S+))? -->"
CHANCE = r"(<!-- chance -->\n)[^<]*(<!-- end -->)"
CODE = r"(?m)^ *```\w(?:.*\n)*?^ *```"


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
    text = re.sub(CLAIMS, judged, text)
    return re.sub(CHANCE, rf"\g<1>{by_chance(text)}\g<2>", text)


@functools.cache
def read(path):
    return json.loads(path.read_text())


def read_all(files):
    """files: a pattern in docs/logs/tables -> {column: heading} and the rows of all these logs"""
    columns, rows = {}, []
    for path in sorted((LOGS / "tables").glob(files)):
        columns |= read(path).get("columns", {})
        rows += read(path).get("rows", [])  # a few logs have no table
    return columns, rows


@functools.cache
def page():
    """-> the runs, measures and tables of docs/papers.md"""
    return reproduce.read_page()


def rows_of_papers(run):
    return [row for rows in page()[-1].values() for row in rows[1:] if row[1] == run]


def table(files, columns, runs=()):
    """-> lines of Markdown, with these columns of the logs, and with these runs or all"""
    names, rows = read_all(files)
    heads = {}  # {name of a column: its heading}
    for column in re.split(r",\s+", columns):
        name, _, head = column.partition(" = ")
        heads[name] = head or names.get(name, name)
    lines = [f"|  | {' | '.join(heads.values())} |", "|" + (1 + len(heads)) * "---|"]
    if runs:
        found = {row.get("run"): row for row in rows}
        rows = [found.get(run) or {"row": rows_of_papers(run)[0][0], "cells": {}} for run in runs]
    for row in rows:
        cells = {name: row["cells"].get(name, {"ours": []})["ours"] for name in heads}
        words = {name: in_words(cells[name], 2 if "loss" in name else 1) for name in cells}
        counts = {len(seeds) for seeds in cells.values() if seeds}
        if counts:
            words["seeds"] = " to ".join(map(str, sorted({min(counts), max(counts)})))
        elif runs:
            words[next(iter(heads))] = "not run yet"
        if counts or runs:
            lines.append(line_of([row["row"], *(words[name] for name in heads)]))
    return lines


# ---------------------------------------------------------------------------------------- claims

SIGNS = {"holds": "+", "reversed": "-", "noise": "0"}


def cells_of(line):
    return re.split(r" *\| *", line)[1:-1]


def claim(line, heads, folder, measure):
    """A row of a table of claims, with our scores and verdicts"""
    other, *runs = re.search(CLAIM, line).groups()[:4]
    first, second, *control = [scores_of(folder, run, other or measure) for run in runs if run]
    longer = [scores_of("scenes-x4", run, other or measure) for run in runs[:2]]
    ours = {"mean mAP": [first, second], "scenes": [first, second], "control": control}
    ours["4x"] = longer if all(longer) else []
    cells = dict(zip(heads, cells_of(line)))
    for head, text in cells.items():
        if head in ours:
            cells[head] = ", ".join(map(listed, ours[head]))
        elif head.startswith("here"):
            words = "; ".join(verdict(first, scores) for scores in [second, *control])
            cells[head] = re.sub(r"^(?!no test).*?(?= \(|$)", words, text)  # a note stays
        elif head.startswith("flowers") and not other:
            maps = [f"own-map-{name}" for name in head.split(", ")]
            words = [verdict(*(scores_of(folder, run, m) for run in runs[:2])) for m in maps]
            cells[head] = ", ".join(SIGNS[word] for word in words if word in SIGNS)
    return line_of(cells.values())


def listed(scores):
    seeds = scores if len({*scores}) > 1 else scores[:1]
    return in_words([[score] for score in seeds]) or "not run"


def scores_of(folder, run, measure):
    """-> a score for each seed, of the log that has most of them; "i2t.1": its second number"""
    measure, _, index = measure.partition(".")
    rows = [row["cells"] for row in read_all(f"{folder}/*.json")[1] if row.get("run") == run]
    cells = [(cell.get("by") or name, cell["ours"]) for row in rows for name, cell in row.items()]
    seeds = max((ours for by, ours in cells if by == measure), key=len, default=[])
    scores = [numbers[int(index or 0)] for numbers in seeds]
    # Published weights have no seeds: as many as one wants give the same number.
    return 3 * scores[:1] if reproduce.published(page()[0].get(run, "")) else scores


def verdict(first, second):
    """Of "first > second", by Welch's t-test at p < 0.05, from three seeds each"""
    fewest = min(len(first), len(second))
    if fewest < 3:
        return ["not run", "one seed", "two seeds"][fewest]
    one, two = [(statistics.mean(x), statistics.stdev(x), len(x)) for x in (first, second)]
    test = stats.ttest_ind_from_stats(*one, *two, equal_var=False)
    order = "holds" if test.statistic > 0 else "reversed"
    return order if test.pvalue < 0.05 else "noise"


def by_chance(text):
    """The sentence of claims.md on its verdicts"""
    claims = "".join(lines for *_, lines, _ in re.findall(CLAIMS, text))
    words = len(re.findall(r"\b(?:holds|reversed|noise)\b", claims))
    signs = len(re.findall(r"(?<= )[+0-](?=, [+0-]| \|\n)", claims))
    return (
        f"The tables have {words} verdicts by a test and {signs} signs. If no methods differed,\n"
        f"chance alone would give {0.05 * words:.1f} verdicts and {0.05 * signs:.1f} signs that are"
        " not noise (5%).\n"
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
])


def blocks(text):
    """The paragraphs, list items and tables of a page that are written by hand"""
    papers = []  # the second column of claims has the numbers of papers' runs
    for *_, lines, _ in re.findall(CLAIMS, text):
        for line in lines.splitlines()[2:]:
            _, first, second, _, one, other = re.search(CLAIM, line).groups()
            places = f"papers: {one or first}; papers: {other or second}"
            papers.append(f"{cells_of(line)[1]} <!-- log: {places} -->")
    for other in MARKED, CLAIMS, CHANCE, CODE:
        text = re.sub(other, "", text)
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
    found = written(block) - allowed
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
        cells = sum((row[2:] for row in rows_of_papers(keys[0])), [])
        return set(re.findall(r"\d+(?:\.\d+)?", " ".join(cells)))
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
