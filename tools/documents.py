"""What `python tools/reproduce.py --docs` writes: parts of the pages in docs/, and pictures

Commands and tables come from tools/rows.toml. The pictures of claims.md have the papers' numbers
beside ours, which are in docs/logs/tables, a folder per size, as tools/reproduce.py wrote them.
"""

import json
import re
import statistics
import textwrap

from tools import tables
from tools.tables import BACKBONES, MEASURES, REPO, TABLES

DOCUMENTS = [str(path.relative_to(REPO)) for path in sorted(REPO.glob("docs/*.md"))]
LOGS = REPO / "docs/logs/tables"
# Folders in LOGS: by how many times the demo's length
SCENES = {"scenes-half": 0.5, "scenes": 1, "scenes-x2": 2, "scenes-x4": 4}
PHOTOS = {"flickr8k": 1, "flickr8k-x4": 4}
PICTURES = {  # docs/claims-NAME.png: tables
    "virtex": ["VirTex Fig. 5 (a)", "VirTex Fig. 4", "VirTex Tab. 1", "VirTex Fig. 5 (c)"],
    "icmlm": ["ICMLM Tab. 3", "ICMLM Tab. 4", "ICMLM Tab. 2"],
    "mmcontrastive": ["Contrastive Sec. 4.4"],
}


def write_documents(dry_run):
    for name, text in documents(dry_run).items():
        (REPO / name).write_text(text)
    for name, shown in PICTURES.items():
        draw(name, shown)
    draw_lengths(["VirTex Fig. 5 (a)", "ICMLM Tab. 4", "Contrastive Sec. 4.4"])


def documents(dry_run):
    """-> {name: its text with the tables and commands of rows.toml between the markers}

    dry_run() returns a reproduce.Steps that only collects commands.
    """

    def fill(match):
        start, kind, what, end = match.groups()
        lines = commands(what, dry_run()) if kind == "commands" else papers_tables(what, dry_run)
        return "\n".join([start, *lines, "", end])

    pattern = r"(<!-- rows: (\w+) ?(.*?) -->\n).*?(<!-- end -->)"
    texts = {name: (REPO / name).read_text() for name in DOCUMENTS}
    return {name: re.sub(pattern, fill, text, flags=re.S) for name, text in texts.items()}


def commands(pattern, steps):
    """A code block: the measures whose names match"""
    for name, measure in MEASURES.items():
        if re.fullmatch(pattern, name) and "command" in measure:
            steps.scores(name, "NAME", 0)
    return ["```sh", *(line for command in steps.commands for line in wrapped(command)), "```"]


def wrapped(command):
    """-> its lines, with a backslash at the end of all but the last"""
    whole = re.sub(" (?!--)", "\0", command)  # do not wrap between a flag and its values
    parts = textwrap.wrap(whole, 96, subsequent_indent="    ", break_on_hyphens=False)
    return " \\\n".join(parts).replace("\0", " ").split("\n")


def papers_tables(paper, dry_run):
    """A section for each table of a paper, then what has no rows"""
    lines, others, homes = [], [], {}  # {command: the first table that has it}
    for name, table in TABLES.items():
        if name.startswith(f"{paper} ") and "rows" in table:
            lines += [*papers_table(name, dry_run(), homes), ""]
        elif name.startswith(f"{paper} "):
            others.append(f"{name} ({table['note']})")
    return [*lines, *textwrap.wrap(f"Without rows: {', '.join(others)}.", 100)]


def papers_table(name, steps, homes):
    """A section: per row a comment with the paper's numbers, and the command that trains it"""
    table = TABLES[name]
    blocks, measures = {}, dict.fromkeys(table["columns"])  # {command: comments above it}
    names = [MEASURES[column]["name"] for column in table["columns"]]
    texts = [[str(cell).partition(" by ")[0].replace(" / ", "/") for cell in cells]
             for _, _, *cells in table["rows"]]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(names, *texts)]
    if sum(widths) > 40:
        widths = [max(map(len, column)) for column in zip(*texts)]
    for (label, backbone, *cells), numbers in zip(table["rows"], texts):
        others = dict.fromkeys(str(cell).partition(" by ")[2] for cell in cells)
        others.pop("", None)
        measures |= others
        label += f" (by {', '.join(others)})" if others else ""
        key = label  # for what is not trained here
        if backbone not in BACKBONES:
            label += f": {steps.weights(backbone, 0)}"
        elif "missing" in BACKBONES[backbone]:
            label += f": no command, {BACKBONES[backbone]['missing']}"
        else:
            output = steps.train(backbone, 0)
            [command] = [c for c in steps.commands if c.endswith(f" --output {output}")]
            new = [c for c in steps.commands if homes.setdefault(c, name) == name]
            blocks |= {c: blocks.get(c, []) for c in new}
            key = command if command in new else label
            if key == label:
                label += f": {output.name}, see {homes[command].split(' ', 1)[1]}"
        blocks.setdefault(key, []).append(comment(numbers, widths, label))
    lines = [comment(names, widths, "row")]
    for key, comments in blocks.items():
        lines += [*comments, *(wrapped(key) if key in steps.commands else [])]
    steps.commands = []
    for measure in measures:
        steps.scores(measure, "NAME", 0)
    lines += [""] * bool(steps.commands) + [x for c in steps.commands for x in wrapped(c)]
    return [f"### {name}: {table['title']}", "", "```sh", *lines, "```", *tables.below_table(table)]


def comment(texts, widths, label):
    line = " | ".join([*(f"{text:>{width}}" for text, width in zip(texts, widths)), label])
    return textwrap.fill(f"# {line}", 100, subsequent_indent="#     ", break_on_hyphens=False)


# ------------------------------------------------------------------------------------- claims.md


def measured(table, size):
    """-> {row: its cell of the probe, as reproduce.Steps.table makes it, with its column}"""
    cells = {}
    for path in sorted(LOGS.glob(f"{size}/*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"] if run["table"] == table else ():
            for column, cell in row["cells"].items():
                if cell["by"].endswith("-probe") and cell["ours"]:
                    cells[row["row"]] = {"column": column, **cell}
    return {label: cells[label] for label, *_ in TABLES[table]["rows"] if label in cells}


def draw(name, shown):
    """docs/claims-NAME.png: for each table the paper's order, beside it ours on scenes and photos

    Dots are means, strokes seeds, lines deviations; dashed: random initialisation.
    """
    from matplotlib.figure import Figure

    ours = [[measured(table, size) for size in ("scenes", "flickr8k")] for table in shown]
    known = [{**scenes, **photos} for scenes, photos in ours]
    heights = [1.5 + len(cells) for cells in known]
    figure = Figure((9.6, 0.24 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(shown), 3, squeeze=False, sharey="row",
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
        titles = f"{table}: {measure}", "ours: scenes", "ours: photos"
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

    figure = Figure((3.6 * len(shown), 6.4), layout="constrained")
    grid = figure.subplots(2, len(shown), sharey="row")
    for panels, place, lengths in zip(grid, ("scenes", "photos"), (SCENES, PHOTOS)):
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
