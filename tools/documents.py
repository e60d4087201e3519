"""What `python tools/reproduce.py --docs` writes into README and docs/: our numbers, and pictures

All of them come from docs/logs: result.json of finished runs, and in docs/logs/tables, a folder per
size, the tables that tools/reproduce.py wrote. Between the markers of a page

    <!-- table race/own-photos.json: own-mean = mean, own-knn-flowers -->
    <!-- end -->

it writes this table with these columns (NAME = the heading), without the rows that were left out;
`seeds` is a column, too. `means` instead of `table` leaves out deviations. Between the markers

    <!-- claims race -->
    <!-- end -->

it writes these claims of tools/claims.toml with our scores and verdicts. tools/quotes.toml has the
sentences with numbers; tests/test_reproduce.py looks them up on the pages, and every other score.
"""

import json
import math
import re
import statistics
import sys
import tomllib
from functools import cache

if __name__ == "__main__":
    sys.exit("error: this is no command but a part of tools/reproduce.py: see its --help")

from tools import tables
from tools.tables import MEASURES, REPO, TABLES

PAGES = ["README.md", *(str(path.relative_to(REPO)) for path in sorted(REPO.glob("docs/*.md")))]
QUOTES = tomllib.loads((REPO / "tools/quotes.toml").read_text())
CLAIMS = tomllib.loads((REPO / "tools/claims.toml").read_text())
LOGS = REPO / "docs/logs/tables"
# Folders in LOGS: by how many times the demo's length
SCENES = {"scenes-half": 0.5, "scenes": 1, "scenes-x2": 2, "scenes-x4": 4}
PICTURES = {  # docs/claims-NAME.png: tables
    "virtex": ["VirTex Fig. 5 (a)", "VirTex Fig. 4", "VirTex Tab. 1", "VirTex Fig. 5 (c)"],
    "icmlm": ["ICMLM Tab. 3", "ICMLM Tab. 4", "ICMLM Tab. 2"],
    "mmcontrastive": ["Contrastive Sec. 4.4"],
}


def write_documents():
    for name, text in documents().items():
        (REPO / name).write_text(text)
    for name, shown in PICTURES.items():
        draw(name, shown)
    draw_lengths(["VirTex Fig. 5 (a)", "ICMLM Tab. 4", "Contrastive Sec. 4.4"])
    race = json.loads((LOGS / "race/own-photos.json").read_text())
    shown = {column: name for column, name in race["columns"].items() if column.startswith("own-m")}
    measures = {column: {"name": name} for column, name in shown.items()}
    title = "Frozen ResNet-18 of Flickr8k's captions, linear probes on other photos"
    tables.draw(title, list(shown), measures, race["rows"], REPO / "docs/race.png")


def documents():
    """-> {page: its text with our tables between the markers}"""
    pages = {name: read(name) for name in PAGES}
    for pattern, make in MARKERS.items():
        block = re.compile(rf"(<!-- {pattern} -->\n+)(?:\|.*\n)*(\n*<!-- end -->)")
        for name in PAGES:
            lines = lambda at: "".join(f"{line}\n" for line in make(*at.groups()[1:-1]))
            pages[name] = block.sub(lambda at: at[1] + lines(at) + at[at.lastindex], pages[name])
    return pages


def read(page):
    return (REPO / page).read_text()


def our_table(files, columns):
    """-> lines of Markdown.  files: a pattern in LOGS; columns: "own-mean = mean, seeds" of them"""
    logs = [json.loads(path.read_text()) for path in sorted(LOGS.glob(files))]
    pairs = [column.partition(" = ")[::2] for column in re.split(r",\s+", columns)]
    heads = [text or {"seeds": "seeds", **logs[0]["columns"]}[name] for name, text in pairs]
    lines = tables.heading(["", *heads])
    for row in (row for log in logs for row in log["rows"]):
        texts = {name: in_words(row, name) for name, _ in pairs if name != "seeds"}
        numbers = sorted({len(row["cells"][name]["ours"]) for name in texts} - {0})
        texts["seeds"] = " to ".join(map(str, numbers[:1] + numbers[1:][-1:]))
        if numbers:
            lines.append(tables.line_of([row["row"], *(texts[name] for name, _ in pairs)]))
    return lines


def our_means(files, columns):
    return [re.sub(r" ± [\d.]+", "", line) for line in our_table(files, columns)]


def in_words(row, column):
    return tables.in_words(row["cells"][column], MEASURES.get(column, {}).get("digits", 1))


def quotes():
    """-> [(page, text)] of tools/quotes.toml, with the numbers of the logs put in"""
    found = []
    for quote in QUOTES["quotes"]:
        text = quote["text"].format(*map(look_up, quote["numbers"]))
        found += [(page, text) for page in quote["pages"]]
    return found


def look_up(path):
    """ "icmlm/result.json: masked_words: triplets" -> that number of docs/logs

    Of a table "tables/FILE: ROW: COLUMN" -> the cell in words, "88.7 ± 0.2".
    """
    file, *keys = path.split(": ")
    found = json.loads(read(f"docs/logs/{file}"))
    if "rows" in found:
        label, column = keys
        [row] = [row for row in found["rows"] if row["row"] == label]
        return in_words(row, column)
    for key in keys:
        found = found[key]
    return found


def scores_in(page):
    """-> the numbers of a page that may be scores, outside of code"""
    text = re.sub(r"^```.*?^```|`[^`]*`|<!--.*?-->", "", read(page), flags=re.S | re.M)
    return set(re.findall(r"(?<![\d.])\d{1,3}\.\d{1,2}(?![\d.])", text))


@cache
def known_scores():
    """-> scores of docs/logs in the digits of our pages, and all numbers of the papers' tables"""
    texts = [read("tools/rows.toml")]
    for path in REPO.glob("docs/logs/**/*.json"):
        log = json.loads(path.read_text()) if path.name != "args.json" else {}
        for row in log.pop("rows", []):
            texts += [in_words(row, column) for column in row["cells"]]
        scores = [(run["mean"], run["std"]) for run in log.pop("backbones", {}).values()]
        for number in re.findall(r"\d+\.\d+", json.dumps([log, scores])):
            texts.append(f"{float(number):.1f} {float(number):.2f}")
    return set(re.findall(r"\d+\.\d+", " ".join(texts)))


# ------------------------------------------------------------------------------------- claims.md


def claims_table(name):
    """-> lines of Markdown: the claims of which there are scores; without columns that are empty"""
    claims = CLAIMS[name]
    sets = claims.get("sets", [])
    heads = ["claim", f"paper: {claims['paper']}", claims["ours"], "control", "4x"]
    rows = [[*heads, claims["here"], ", ".join(sets)]]
    for claim, paper, names, note in claims["rows"]:
        column, _, names = names.rpartition(": ")
        column = column or claims["column"]
        names, _, control = names.partition(", control ")
        names = names.split(" > ")
        ours = [scores_of(claims["folder"], x, column) for x in names]
        longer = [scores_of(claims.get("longer"), x, column) for x in names]
        each = [[scores_of("race", x, f"own-map-{place}") for x in names] for place in sets]
        control = scores_of(claims["folder"], control, column)
        if all(ours):
            here = [note] if note == "no test" else [verdict(*ours)]
            if control:
                here.append(verdict(ours[0], control))
            texts = [listed(*ours), listed(control), listed(*longer) * all(longer)]
            texts += ["; ".join(here) + f" ({note})" * note.isdigit()]
            texts += [", ".join(SIGNS[verdict(*pair)] for pair in each)]
            rows.append([claim, paper, *texts])
    rows = [*zip(*(column for column in zip(*rows) if any(column[1:])))]
    return [*tables.heading(rows[0]), *map(tables.line_of, rows[1:])]


def scores_of(folder, backbone, column):
    """-> a score for each seed, of the log that has most of them; [] if none has this backbone

    column: what our score was measured by; "i2t-as-is.1" is the second of its scores.
    """
    column, _, index = column.partition(".")
    found = [[]]
    for path in sorted(LOGS.glob(f"{folder}/*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for name, cell in row["cells"].items():
                if row.get("backbone") == backbone and (cell["by"] or name) == column:
                    found.append([scores[int(index or 0)] for scores in cell["ours"]])
    return max(found, key=len)


def listed(*scores):
    """Lists of a score per seed -> "55.3 ± 3.8, 58.1" """
    cells = ({"state": "measured", "ours": [[x] for x in seeds]} for seeds in scores if seeds)
    return ", ".join(map(tables.in_words, cells))


MARKERS = {
    r"table (\S+): ([^>]+)": our_table,
    r"means (\S+): ([^>]+)": our_means,
    r"claims (\w+)": claims_table,
}
SIGNS = {"holds": "+", "reversed": "-", "noise": "0"}


def verdict(first, second):
    """The rule of docs/claims.md for "first > second".  Each: a score per seed"""
    bound = 10  # points, if one of them is of one seed
    if min(len(first), len(second)) > 1:
        bound = 2 * math.sqrt(sum(statistics.variance(x) / len(x) for x in (first, second)))
    difference = statistics.mean(first) - statistics.mean(second)
    return "noise" if abs(difference) < bound else "holds" if difference > 0 else "reversed"


def measured(table, size):
    """-> {row: its cell of the probe, as reproduce.Steps.table makes it, with its column}"""
    cells = {}
    for path in sorted(LOGS.glob(f"{size}/*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"] if run["table"] == table else ():
            for column, cell in row["cells"].items():
                if "-probe" in cell["by"] and cell["ours"]:
                    cells[row["row"]] = {"column": column, **cell}
    return {label: cells[label] for label, *_ in TABLES[table]["rows"] if label in cells}


def draw(name, shown):
    """docs/claims-NAME.png: for each table the paper's order, beside it ours on scenes

    Dots are means, strokes seeds, lines deviations; dashed: random initialisation.
    """
    from matplotlib.figure import Figure

    ours = [measured(table, "scenes") for table in shown]
    heights = [1.5 + len(cells) for cells in ours]
    figure = Figure((8, 0.24 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(shown), 2, squeeze=False, sharey="row",
                           gridspec_kw={"height_ratios": heights})  # fmt: skip
    for panels, table, cells in zip(grid, shown, ours):
        for y, cell in enumerate(cells.values()):
            number = cell["paper"].partition(" ")[0]
            if number[:1].isdigit():
                panels[0].plot(float(number), y, "ko")
            draw_scores(panels[1], y, cell["ours"])
        first = next(iter(cells.values()))
        measure = MEASURES[first["column"]]["name"].partition(" / ")[0]
        panels[0].set_yticks(range(len(cells)), cells)
        panels[0].set_ylim(len(cells) - 0.5, -0.5)
        for panel, title in zip(panels, (f"{table}: {measure}", "ours: scenes")):
            panel.set_title(title, fontsize=8)
            panel.grid(axis="x", alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
    figure.savefig(REPO / f"docs/claims-{name}.png", dpi=110)


def draw_scores(panel, y, seeds):
    """seeds: [[score, that of random initialisation]]"""
    scores, random = zip(*seeds)
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    panel.plot(scores, [y] * len(scores), "|", color="C0", alpha=0.5)
    panel.errorbar(statistics.mean(scores), y, xerr=deviation, fmt="o", color="C0")
    panel.axvline(statistics.mean(random), color="grey", linestyle="--", linewidth=0.8)


def draw_lengths(shown):
    """docs/claims-lengths.png: a panel per table, a line per row also trained longer on scenes"""
    from matplotlib.figure import Figure

    figure = Figure((3.6 * len(shown), 3.2), layout="constrained")
    [panels] = figure.subplots(1, len(shown), sharey="row", squeeze=False)
    panels[0].set_ylabel("mAP on scenes")
    for panel, table in zip(panels, shown):
        ours = {times: measured(table, size) for size, times in SCENES.items()}
        for label, *_ in TABLES[table]["rows"]:
            means = {times: statistics.mean(scores[0] for scores in cells[label]["ours"])
                     for times, cells in ours.items() if label in cells}  # fmt: skip
            if len(means) > 1:
                panel.plot(list(means), list(means.values()), "o-", label=label)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(SCENES.values()), [f"{times:g}x" for times in SCENES.values()])
        panel.set_title(table, fontsize=9)
        panel.set_xlabel("length of training")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7)
    figure.savefig(REPO / "docs/claims-lengths.png", dpi=110)
