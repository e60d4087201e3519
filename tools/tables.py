"""Write the tables of our scores into README and docs/, from docs/scores.csv

    python tools/tables.py
    python tools/tables.py --add comparison "Words alone" flowers runs/seed-*/flowers/result.json

A line of scores.csv holds one measure of one run: its scores, one for each seed; the commands, in
older lines with {a,b} for words that differ between the seeds; the seconds of each training ("?" if
some were lost with a killed process); commit, date and machine. What is empty was not written down.

--add takes these from each result.json of eval_linear.py, of the first of its --weights, and from
the args.json beside these. Several results of one backbone and seed become their mean. With --key
it takes another number of a training run's result.json, such as validation_loss.forward.

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
from collections import defaultdict
from pathlib import Path

from scipy import stats

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
    add("--add", nargs=3, metavar=("TABLE", "ROW", "MEASURE"), help="what to put into scores.csv")
    add("--key", help="with --add: take this number of each RESULT")
    return parser.parse_args(argv)


def main(args):
    lines = read_scores()
    if args.add:
        add_line(lines, line_of(args))
        with open(SCORES, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    for page in PAGES:
        page.write_text(with_lengths(with_tables(page.read_text(), lines)))


def read_scores(path=None):
    """-> [{field: text}], the lines of docs/scores.csv"""
    with open(path or SCORES, newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------- tables


def to_tables(lines):
    """-> {table: {row: {measure: the scores of its seeds, as text}}}"""
    tables = {}
    for line in lines:
        row = tables.setdefault(line["table"], {}).setdefault(line["row"], {})
        row[line["measure"]] = line["scores"].split()
    return tables


def with_tables(text, lines):
    """A page whose marked tables have the scores of these lines"""
    tables = to_tables(lines)

    def replaced(match):
        marker, kind, content, body, end = match.groups()
        columns, _, rows = " ".join(content.split()).partition("; rows ")
        table, _, columns = columns.partition(": ")
        heads = {name: head or name for name, head in read_pairs(columns).items()}
        if kind == "table":
            made = table_of_scores(tables, table, heads, read_pairs(rows))
        else:
            made = table_of_differences(tables[table], heads, body)
        return marker + made + end

    return MARKED.sub(replaced, text)


def with_lengths(text):
    """A page that says how many lines the scripts have"""

    def counted(match):
        lines = len((REPO / match[2]).read_text().splitlines())
        return f"{match[1]} {round(lines, -1)} |"

    return re.sub(r"(\[(\w+\.py)\]\(\S*\) \|) \d+ \|", counted, text)


def read_pairs(text):
    """ "b = c | d" -> {"b": "c", "d": ""} """
    return dict(pair.partition(" = ")[::2] for pair in text.split(" | ")) if text else {}


def table_of_scores(tables, table, heads, notes):
    """heads: {measure: heading}.  notes: {row: text for the column "how"}; {} are all rows"""
    how = ["how"] if any(notes.values()) else []
    rows = []
    for row in notes or tables[table]:
        cells = [cell_of(tables, table, row, column) for column in heads]
        rows.append([row, *(notes[row] for _ in how), *cells])
    return in_markdown(["", *how, *heads.values()], rows)


def in_markdown(heads, rows):
    lines = [f"| {' | '.join(cells)} |\n" for cells in (heads, *rows)]
    return "".join([lines[0], "|" + len(heads) * "---|" + "\n", *lines[1:]])


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


def table_of_differences(rows, heads, body):
    """rows: {row: {measure: scores}}.  body: lines of Markdown, whose first two cells stay"""
    given = [line.strip("| ").split(" | ")[:2] for line in body.splitlines()]
    pairs = [re.match(r"(.+?) > (.+?)(?: \[.*)?$", claim).groups() for claim, _ in given[2:]]
    names = {name for pair in pairs for name in pair}
    for measure in heads:
        runs = {name: list(map(float, rows[name].get(measure, []))) for name in names}
        for cells, pair in zip(given[2:], pairs):
            cells += compared(*pair, runs)
    more = [text for heading in heads.values() for text in (heading, "difference")]
    return in_markdown(given[0] + more, given[2:])


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


def add_line(lines, new):
    """Replace the line of the same measure, or put the new one after those of its table."""
    same = [n for n, x in enumerate(lines) if all(x[name] == new[name] for name in FIELDS[:3])]
    if same:
        lines[same[0]] = new
    else:
        table = [n for n, x in enumerate(lines, 1) if x["table"] == new["table"]]
        lines.insert(([len(lines)] + table)[-1], new)
    unknown = [name for name in FIELDS if not new[name]]
    print("replaced:" if same else "new:", ", ".join(new[name] for name in FIELDS[:4]),
          f"({', '.join(unknown)} unknown)" if unknown else "")


def line_of(args):
    """What --add is given -> {field: text}"""
    scores, trainings, commands = defaultdict(list), {}, []
    for path in map(Path, args.results):
        result = json.loads(path.read_text())
        if args.key:
            seed, about = path, path.with_name("args.json")
            score = functools.reduce(dict.__getitem__, args.key.split("."), result)
        else:
            weights = result["args"]["weights"][0]
            seed, about = (weights, result["args"]["seed"]), Path(weights).with_name("args.json")
            score = next(iter(result["backbones"][weights]["mean"].values()))  # mAP or top-1
        scores[seed].append(score)
        trainings[seed] = json.loads(about.read_text()) if about.exists() else result
        commands += [trainings[seed].get("command"), result.get("command")]
    means = [statistics.mean(values) for values in scores.values()]
    commands = [shlex.join(["python", *command]) for command in commands if command]
    texts = {
        "scores": [str(x) if isinstance(x, int) else f"{x:.4f}" for x in means],
        "command": ["; ".join(dict.fromkeys(commands))],
        "seconds": [f"{x['seconds']:.0f}" for x in trainings.values() if "seconds" in x],
    }
    for name in "commit", "date", "machine":
        texts[name] = dict.fromkeys(x[name] for x in trainings.values() if x.get(name))
    place = dict(zip(FIELDS, args.add))
    return place | {name: " ".join(values) for name, values in texts.items()}


if __name__ == "__main__":
    main(get_args())
