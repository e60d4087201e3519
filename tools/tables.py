"""Write the tables of our scores into README and docs/, from docs/scores.csv

    python tools/tables.py
    python tools/tables.py --add comparison "Words alone" runs/seed-*/flowers/result.json

A line of scores.csv holds one measure of one run: its scores, one for each seed; the command, where
{a,b} stands for words that differ between the seeds; the seconds of each training ("?" if some were
lost with a killed process); commit, date and machine. What is empty was not written down.

--add takes these from the result.json of eval_linear.py, and from the args.json beside the weights
that it measured; a measure is named after its data. With --key it takes other numbers of a training
run's result.json, such as validation_loss.forward.

On a page these lines mark a table: its measures, with headings; then its rows, if not all of them.

    <!-- table comparison: own_words = own words | minutes; rows MoCo = `--queue 64` | TP -->
    <!-- end -->

What follows a row's name, as here, becomes a column "how". A column may have two measures (`mean /
minutes`), also of another table (`default: mean`). A loss has two digits, other numbers have one,
and those that are whole in scores.csv have none.

    <!-- differences comparison: mean = three sets | own_words = own words -->

This marks a table whose lines begin with `| MoCo > Words alone | any text |`. For each measure they
get both means, and the difference with its 95% interval by Student's t, whose deviation is pooled
over all runs that stand in the table. In a cell after a link to a script, such as
`| [tp.py](docs/tp.md) | 690 |`, its lines are counted, in tens.
"""

import argparse
import csv
import functools
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import fail

REPO = Path(__file__).resolve().parent.parent
SCORES = REPO / "docs/scores.csv"
PAGES = [REPO / "README.md", *sorted(REPO.glob("docs/**/*.md"))]
FIELDS = "table", "row", "measure", "scores", "command", "seconds", "commit", "date", "machine"
MARKED = re.compile(r"(<!-- (table|differences) ([^>]+?) -->\n+)((?:\|.*\n)*)(\n*<!-- end -->)")


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("results", nargs="*", metavar="RESULT", help="with --add: the result.json of each seed")
    add("--add", nargs=2, metavar=("TABLE", "ROW"), help="put scores into this row of scores.csv")
    add("--key", nargs="+", default=[], help="with --add: take these numbers of each RESULT")
    add("--measure", help="with --add: the measure's name, if it is not to be the data's or key's")
    add("--mean", action="store_true", help="with --add: add the mean of these measures, too")
    args = parser.parse_args(argv)
    if bool(args.add) != bool(args.results):
        parser.error("--add TABLE ROW and RESULT go together")
    return args


def main(args):
    lines = read_scores()
    if args.add:
        lines = with_results(lines, args)
        write_scores(lines)
    for page in PAGES:
        page.write_text(with_lengths(with_tables(page.read_text(), lines)))


def read_scores():
    """-> [{field: text}], the lines of docs/scores.csv"""
    with open(SCORES, newline="") as file:
        return list(csv.DictReader(file))


def write_scores(lines):
    with open(SCORES, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


# ---------------------------------------------------------------------------------------- tables


def with_tables(text, lines):
    """A page whose marked tables have the scores of these lines"""
    tables = {}  # {table: {row: {measure: the scores of its seeds, as text}}}
    for line in lines:
        row = tables.setdefault(line["table"], {}).setdefault(line["row"], {})
        row[line["measure"]] = line["scores"].split()

    def replaced(match):
        marker, kind, content, body, end = match.groups()
        make = table_of_scores if kind == "table" else table_of_differences
        return marker + make(tables, " ".join(content.split()), body) + end

    return MARKED.sub(replaced, text)


def with_lengths(text):
    """A page that says how many lines the scripts have"""

    def counted(match):
        lines = len((REPO / match[2]).read_text().splitlines())
        return f"{match[1]} {round(lines, -1)} |"

    return re.sub(r"(\[(\w+\.py)\]\(\S*\) \|) \d+ \|", counted, text)


def read_marker(content):
    """"a: b = c | d; rows f = g | h" -> "a", {"b": "c", "d": ""}, {"f": "g", "h": ""} """
    columns, _, rows = content.partition("; rows ")
    table, _, columns = columns.partition(": ")
    heads, notes = (dict(x.partition(" = ")[::2] for x in y.split(" | ")) for y in (columns, rows))
    return table, {measure: head or measure for measure, head in heads.items()}, notes


def table_of_scores(tables, content, _):
    table, heads, notes = read_marker(content)
    known = tables.get(table, {})
    rows = list(filter(None, notes))
    missing = [row for row in rows if row not in known]
    if missing or not known:
        fail(f"docs/scores.csv has no {', '.join(missing) or 'line'} in a table {table}")
    lines = [[row, *(cell_of(tables, table, row, x) for x in heads)] for row in rows or known]
    heads = ["", *heads.values()]
    if any(notes.values()):
        heads.insert(1, "how")
        for line in lines:
            line.insert(1, notes[line[0]])
    return in_markdown(heads, lines)


def in_markdown(heads, lines):
    rows = [f"| {' | '.join(cells)} |\n" for cells in (heads, *lines)]
    return "".join([rows[0], "|" + len(heads) * "---|" + "\n", *rows[1:]])


def cell_of(tables, table, row, column):
    """column: "mean / minutes", or "default: mean" of another table -> "47.7 ± 0.6 / 8.6" """
    other, _, measures = column.rpartition(": ")
    found = tables[other or table].get(row, {})
    if measures == "seeds":
        return str(max(map(len, found.values())))
    return " / ".join(in_words(m, found[m]) for m in measures.split(" / ") if m in found)


def in_words(measure, scores):
    """scores: ["48.1000", "47.2000"], one for each seed -> "47.7 ± 0.6" """
    digits = 2 if "loss" in measure else 1
    if not any("." in score for score in scores):
        digits = 0
    numbers = [float(score) for score in scores]
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):,.{digits}f}{deviation}"


def table_of_differences(tables, content, body):
    """body: lines of Markdown, whose first two cells stay as they are"""
    table, heads, _ = read_marker(content)
    given = [line.strip("| ").split(" | ")[:2] for line in body.splitlines()]
    pairs = [re.match(r"(.+?) > (.+?)(?: \[.*)?$", claim).groups() for claim, _ in given[2:]]
    names = {name for pair in pairs for name in pair}
    lines = []
    for cells, pair in zip(given[2:], pairs):
        for measure in heads:
            runs = {name: list(map(float, tables[table][name].get(measure, []))) for name in names}
            cells = cells + compared(*pair, runs)
        lines.append(cells)
    more = [text for heading in heads.values() for text in (heading, "difference")]
    return in_markdown(given[0] + more, lines)


def compared(first, second, runs):
    """runs: {name: scores of its seeds} -> ["52.0, 51.7", "0.3 (-1.2 to 1.9)"]"""
    if not runs[first] or not runs[second]:
        return ["", ""]
    one, two = statistics.mean(runs[first]), statistics.mean(runs[second])
    margin = margin_of(first, second, runs)
    numbers = one - two, one - two - margin, one - two + margin
    difference, low, high = (f"{round(x, 1) + 0.0:.1f}" for x in numbers)  # -0.0 becomes 0.0
    return [f"{one:.1f}, {two:.1f}", f"{difference} ({low} to {high})"]


def margin_of(first, second, runs):
    """Half of the 95% interval of the difference of two means

    The variance is pooled over all runs. Frozen weights of somebody else vary with no seed.
    """
    freedom = sum(len(scores) - 1 for scores in runs.values() if scores)
    squares = sum(statistics.variance(x) * (len(x) - 1) for x in runs.values() if len(x) > 1)
    of_means = [1 / len(runs[name]) for name in (first, second) if "frozen" not in name]
    return stats.t.ppf(0.975, freedom) * (squares / freedom * sum(of_means)) ** 0.5


# ------------------------------------------------------------------------------------------ --add


def with_results(lines, args):
    """The lines with new ones after those of their row, or in place of one of the same measure"""
    for new in lines_of(args):
        same = [line for line in lines if all(line[field] == new[field] for field in FIELDS[:3])]
        lines = [line for line in lines if line not in same]
        row = [n for n, x in enumerate(lines, 1) if (x["table"], x["row"]) == tuple(args.add)]
        table = [n for n, x in enumerate(lines, 1) if x["table"] == args.add[0]]
        lines.insert(([len(lines)] + table + row)[-1], new)
        unknown = [field for field in FIELDS if not new[field]]
        print("replaced:" if same else "new:", ", ".join(new[field] for field in FIELDS[:4]),
              f"({', '.join(unknown)} unknown)" if unknown else "")
    return lines


def lines_of(args):
    """The files given to --add -> [{field: text}], a line for each measure"""
    found = {}  # {measure: [(score, circumstances of its commands) of each seed]}
    for path in args.results:
        for measure, *seed in seeds_in(Path(path), args.key):
            found.setdefault(args.measure or measure, []).append(seed)
    lines = [dict(zip(FIELDS, [*args.add, x, *texts(seeds)])) for x, seeds in found.items()]
    if args.mean:
        of_seeds = zip(*([score for score, _ in seeds] for seeds in found.values()), strict=True)
        means = " ".join(map(in_digits, map(statistics.mean, of_seeds)))
        command = f"mean of {', '.join(found)}"
        lines.append(lines[0] | {"measure": "mean", "scores": means, "command": command})
    return lines


def seeds_in(path, keys):
    """A result.json -> (measure, score, [what args.json or result.json says of each command])"""
    result = json.loads(path.read_text())
    for key in keys:
        beside = json.loads(path.with_name("args.json").read_text())
        yield key, functools.reduce(dict.__getitem__, key.split("."), result), [beside]
    if keys:
        return
    args = result["args"]
    data = Path(args["root"] if args["data"] == "folder" else args["data"]).stem
    protocol = "" if args["protocol"] == "svm-virtex" else f"-{args['protocol']}"
    measure = data + protocol + (f"-{args['shots']}-shots" if args["shots"] else "")
    for source, scores in result["backbones"].items():
        metric = next(iter(scores["mean"]))  # mAP or top-1, before the single classes
        beside = Path(source).with_name("args.json")
        if beside.exists():
            yield measure, scores["mean"][metric], [json.loads(beside.read_text()), result]
        elif len(result["backbones"]) == 1:  # random, of several seeds, or published weights
            for run in scores["runs"]:
                yield measure, run[metric], [result]


def texts(seeds):
    """seeds: [(score, circumstances)] -> scores, command, seconds, commit, date, machine"""
    scores, abouts = zip(*seeds)
    yield " ".join(map(in_digits, scores))
    commands = [[shlex.join(["python", *x.get("command", "?")]) for x in about] for about in abouts]
    yield "; ".join(map(joined, zip(*commands)))
    first = [about[0] for about in abouts]  # the training
    yield " ".join(f"{x['seconds']:.0f}" for x in first if "seconds" in x)
    for field in "commit", "date", "machine":
        yield " ".join(dict.fromkeys(x[field] for x in first if x.get(field)))


def in_digits(score):
    return str(score) if isinstance(score, int) else f"{score:.4f}"


def joined(commands):
    """["x --seed 0", "x --seed 1"] -> "x --seed {0,1}" """
    if len({len(command.split()) for command in commands}) > 1:
        return " or ".join(commands)
    words = zip(*map(str.split, commands))
    return " ".join(x[0] if len(set(x)) == 1 else f"{{{','.join(x)}}}" for x in words)


if __name__ == "__main__":
    main(get_args())
