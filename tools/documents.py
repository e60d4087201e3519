"""What `python tools/reproduce.py --docs` writes into README and docs/: our numbers, and pictures

All of them come from docs/logs: result.json of finished runs, and in docs/logs/tables, a folder per
size, the tables that tools/reproduce.py wrote. Between the markers of a page

    <!-- table race/own-photos.json: own-mean = mean, own-knn-flowers -->
    <!-- end -->

it writes this table with these columns (NAME = the heading), without the rows that were left out.
tools/quotes.toml has the sentences with numbers; tests/test_reproduce.py looks them up on the
pages, and every other score.
"""

import json
import re
import statistics
import tomllib
from functools import cache

from tools import tables
from tools.tables import MEASURES, REPO, TABLES

PAGES = ["README.md", *(str(path.relative_to(REPO)) for path in sorted(REPO.glob("docs/*.md")))]
QUOTES = tomllib.loads((REPO / "tools/quotes.toml").read_text())
LOGS = REPO / "docs/logs/tables"
# Folders in LOGS: by how many times the demo's length
SCENES = {"scenes-half": 0.5, "scenes": 1, "scenes-x2": 2, "scenes-x4": 4}
PHOTOS = {"flickr8k": 1, "flickr8k-x4": 4}
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


def documents():
    """-> {page: its text with our tables between the markers}"""
    fill = lambda match: "\n".join([match[1], *our_table(match[2], match[3]), "", match[4]])
    pattern = r"(<!-- table (\S+): (.*?) -->\n).*?(<!-- end -->)"
    return {name: re.sub(pattern, fill, read(name), flags=re.S) for name in PAGES}


def read(page):
    return (REPO / page).read_text()


def our_table(file, columns):
    """-> lines of Markdown.  columns: "own-mean = mean, own-knn-flowers" of that log"""
    log = json.loads((LOGS / file).read_text())
    pairs = [column.partition(" = ")[::2] for column in re.split(r",\s+", columns)]
    lines = tables.heading(["", *(text or log["columns"][name] for name, text in pairs)])
    for row in log["rows"]:
        if any(row["cells"][name]["ours"] for name, _ in pairs):
            lines.append(tables.line_of([row["row"], *(in_words(row, name) for name, _ in pairs)]))
    return lines


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
    """docs/claims-NAME.png: for each table the paper's order, beside it ours on scenes and photos

    Dots are means, strokes seeds, lines deviations; dashed: random initialisation.
    """
    from matplotlib.figure import Figure

    places = {"scenes": "scenes", "flickr8k": "photos"}
    places = {size: place for size, place in places.items() if (LOGS / size).exists()}
    ours = [[measured(table, size) for size in places] for table in shown]
    known = [dict(pair for cells in sizes for pair in cells.items()) for sizes in ours]
    heights = [1.5 + len(cells) for cells in known]
    figure = Figure((3.2 * (1 + len(places)), 0.24 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(shown), 1 + len(places), squeeze=False, sharey="row",
                           gridspec_kw={"height_ratios": heights})  # fmt: skip
    for panels, table, sizes, cells in zip(grid, shown, ours, known):
        labels = [label for label, *_ in TABLES[table]["rows"] if label in cells]
        for y, label in enumerate(labels):
            number = cells[label]["paper"].partition(" ")[0]
            if number[:1].isdigit():
                panels[0].plot(float(number), y, "ko")
            for panel, own in zip(panels[1:], sizes):
                if label in own:
                    draw_scores(panel, y, own[label]["ours"])
        measure = MEASURES[cells[labels[0]]["column"]]["name"].partition(" / ")[0]
        titles = [f"{table}: {measure}", *(f"ours: {place}" for place in places.values())]
        panels[0].set_yticks(range(len(labels)), labels)
        panels[0].set_ylim(len(labels) - 0.5, -0.5)
        for panel, title in zip(panels, titles):
            panel.set_visible(panel.has_data())
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
    """docs/claims-lengths.png: a panel per table and place, a line per row also trained longer"""
    from matplotlib.figure import Figure

    places = {"scenes": SCENES, "photos": PHOTOS}
    places = {place: sizes for place, sizes in places.items() if (LOGS / [*sizes][-1]).exists()}
    figure = Figure((3.6 * len(shown), 3.2 * len(places)), layout="constrained")
    grid = figure.subplots(len(places), len(shown), sharey="row", squeeze=False)
    for panels, (place, lengths) in zip(grid, places.items()):
        panels[0].set_ylabel(f"mAP on {place}")
        for panel, table in zip(panels, shown):
            ours = {times: measured(table, size) for size, times in lengths.items()}
            for label, *_ in TABLES[table]["rows"]:
                means = {times: statistics.mean(scores[0] for scores in cells[label]["ours"])
                         for times, cells in ours.items() if label in cells}  # fmt: skip
                if len(means) > 1:
                    panel.plot(list(means), list(means.values()), "o-", label=label)
            if not panel.has_data():
                panel.set_visible(False)
                continue
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(lengths.values()), [f"{times:g}x" for times in lengths.values()])
            panel.set_title(table, fontsize=9)
            panel.set_xlabel("length of training")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(fontsize=7)
    figure.savefig(REPO / "docs/claims-lengths.png", dpi=110)
