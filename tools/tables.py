"""The output of tools/reproduce.py: the tables of tools/rows.toml as text, pictures; the plan."""

import importlib
import json
import os
import re
import shlex
import statistics
import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.exit("error: this is no command but a part of tools/reproduce.py: see its --help")

REPO = Path(__file__).resolve().parent.parent
ROWS = tomllib.loads((REPO / "tools/rows.toml").read_text())
BACKBONES, MEASURES, TABLES = ROWS["backbones"], ROWS["measures"], ROWS["tables"]
NO_FLAG = "left out: no --"


# ----------------------------------------------------------------------------------- our numbers


def write_table(name, steps, rows, folder):
    """Print the table as Markdown; save that, JSON and a picture.  rows: from Steps.table"""
    table, measures = steps.tables[name], steps.measures
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    lines = with_the_paper(name, table, measures, rows)
    print("", *lines, "", sep="\n", flush=True)
    path.write_text("\n".join(lines) + "\n")
    columns = {column: measures[column]["name"] for column in table["columns"]}
    content = {"table": name, "columns": columns, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(content, indent=2))
    draw(name, table["columns"], measures, rows, path.with_suffix(".png"))


def with_the_paper(name, table, measures, rows):
    """-> lines of Markdown; the paper's numbers beside ours in columns where it has some"""
    heads = ["row"]
    for column in table["columns"]:
        heads += [measures[column]["name"]]
        heads += [ours(column, measures, rows)] * of_a_paper(rows, column)
    lines = [f"**{name}.** {table['title']}", "", *heading(heads)]
    left_out = []
    for row in rows:
        texts = [row["row"]]
        for column, cell in row["cells"].items():
            digits = measures[cell["by"] or column].get("digits", 1)
            texts += [cell["paper"]] * of_a_paper(rows, column) + [in_words(cell, digits)]
        if state_of(row["cells"].values()).startswith(NO_FLAG):
            left_out.append(row["row"])
        else:
            lines.append(line_of(texts))
    lines += below_table(table)
    return lines + (wrapped(f"Left out: {'; '.join(left_out)}.") if left_out else [])


def ours(column, measures, rows):
    """The heading of our numbers, with the measure's if all rows use another than the paper"""
    used = {row["cells"][column]["by"] for row in rows if row["cells"][column]["paper"]}
    other = used.pop() if len(used) == 1 else ""
    return f"ours: {measures[other]['name']}" if other else "ours"


def below_table(table):
    """-> a list in Markdown: the table's notes"""
    notes = [table[key] for key in ("note", "ours") if key in table]
    notes = [text for note in notes for text in ([note] if isinstance(note, str) else note)]
    lines = [""] if notes else []
    return lines + [line for text in notes for line in wrapped(text)]


def wrapped(text):
    """-> lines of an item of a list in Markdown"""
    return textwrap.wrap(f"* {text}", 98, subsequent_indent="  ", break_on_hyphens=False)


def of_a_paper(rows, column):
    return any(row["cells"][column]["paper"] not in ("", "-") for row in rows)


def line_of(texts):
    return f"| {' | '.join(texts)} |"


def heading(names):
    return [line_of(names), "|" + len(names) * "---|"]


def in_words(cell, digits=1):
    """ "88.7 / 53.8", with several seeds "88.7 ± 0.2 / 53.8 ± 0.1", or why there is no score

    For a measure that only draws pictures: "done".
    """
    if cell["state"] != "measured":
        return cell["state"]
    parts = []
    for values in zip(*cell["ours"]):
        part = f"{statistics.mean(values):.{digits}f}"
        if len(values) > 1:
            part += f" ± {statistics.stdev(values):.{digits}f}"
        parts.append(part)
    done = "done" if cell["ours"] else ""
    return " / ".join(parts) or done


def state_of(cells):
    """ "measured", or the first reason why not"""
    return next((cell["state"] for cell in cells if cell["state"] != "measured"), "measured")


def draw(name, columns, measures, rows, path):
    """The first number of each cell: ours as a bar, the paper's as a line"""
    from matplotlib.figure import Figure

    size = 4 + 3 * len(columns), 1.5 + 0.3 * len(rows)
    figure = Figure(size, layout="constrained")
    [all_axes] = figure.subplots(1, len(columns), sharey=True, squeeze=False)
    for axes, column in zip(all_axes, columns):
        heads = measures[column]["name"], ours(column, measures, rows)
        firsts = [head.split(" / ")[0] for head in heads if head != "ours"]
        axes.set_title("\n".join(firsts), fontsize=10)
        axes.set_yticks(range(len(rows)), [row["row"] for row in rows])
        for y, row in enumerate(rows):
            cell = row["cells"][column]
            scores = [scores[0] for scores in cell["ours"] if scores]
            if scores:
                deviation = statistics.stdev(scores) if len(scores) > 1 else None
                axes.barh(y, statistics.mean(scores), xerr=deviation, color="#8fb4d9")
            paper = cell["paper"].split(" / ")[0]
            if paper[:1].isdigit():
                axes.vlines(float(paper), y - 0.4, y + 0.4, "black")
    all_axes[0].invert_yaxis()
    paper = any(of_a_paper(rows, column) for column in columns)
    figure.suptitle(f"{name}: ours (bars), the paper (lines)" if paper else name)
    figure.savefig(path)


def list_rows(name):
    """-> lines: each row's numbers in the paper, below them the command that trains its backbone"""
    table = TABLES[name]
    lines = [f"{name}: {table.get('title', 'no rows')}", *below_table(table), ""]
    if "rows" in table:
        lines.append(line_of(["row", *(MEASURES[column]["name"] for column in table["columns"])]))
    for label, backbone, *cells in table.get("rows", []):
        command = BACKBONES.get(backbone) or f"--weights {ROWS['files'][backbone]}"
        if "missing" in command:
            command = f"no command: {command['missing']}"
        lines.append(line_of([label, *map(str, cells)]))
        lines.append(f"    {backbone}: {' '.join(command.split())}")
    return lines


def list_all():
    """A line for each table or figure, with the numbers of its rows and of those with a command"""
    lines = heading(["table or figure", "content", "rows", "with a command"])
    for name, table in TABLES.items():
        rows = table.get("rows", [])
        content = [table["title"] if rows else table["note"]]
        count = len(rows)
        for label, backbone, *_ in rows:
            if "missing" in BACKBONES.get(backbone, ""):
                content.append(f"not {label}: {BACKBONES[backbone]['missing']}")
                count -= 1
        lines.append(line_of([name, "; ".join(content), str(len(rows)), str(count)]))
    return lines


# ----------------------------------------------------------------------------------- the plan

# Training images of the papers' data, by --data or the name of its folder; voc is VOC07+12.
TRAINING_IMAGES = {
    "coco": 118_287,
    "vg": 103_077,
    "imagenet": 1_281_167,
    "VOCdevkit": 5_011,
    "voc": 16_551,
    "lvis": 100_170,
    "inat": 437_513,
}


def plan(commands, output, images_per_s):
    """-> lines: the inputs that are missing, then the commands, each with its length, and a total

    images_per_s: for the hours; None: without.  What is in `output` is made by earlier commands.
    """
    missing = Counter()
    lines = []
    total = 0
    for command in commands:
        words = shlex.split(command)
        for path in inputs(words):
            if not path.startswith(output) and not os.path.exists(path):
                missing[path] += 1
        text, images = length(words)
        notes = [text] if text else []
        if images and images_per_s:
            notes.append(f"{images / images_per_s / 3600:.1f} hours")
        if "model_N.pth" in command:
            notes.append("N: of the model that the validation selects")
        lines.append(f"{command}  # {', '.join(notes)}" if notes else command)
        total += images
    first = [f"# missing, for {n} commands: {path}" for path, n in missing.items()]
    if total and images_per_s:
        hours = f"{total / images_per_s / 3600:.1f} hours of training at {images_per_s:g} images/s"
        lines.append(f"# {len(lines)} commands, {hours}; those without hours are not counted")
    return first + lines


def inputs(words):
    """The files and folders that a command reads -> set of paths"""
    given = dict(zip(words, words[1:]))
    data = given.get("--data", "shapes")
    if data.endswith(".jsonl"):
        yield data
    elif data != "shapes":
        yield given.get("--root", f"datasets/{data}")
    for flag in ("--weights", "--init", "--lm"):
        if "/" in given.get(flag, "") and ":" not in given[flag]:
            yield given[flag]


def length(words):
    """-> (text, images) of a command: ("500,000 iterations of 256 images", 128_000_000)

    "" for what trains neither a network nor linear layers on photos; images 0: not known, or
    (detection) of another size.
    """
    [first] = [n for n, word in enumerate(words) if re.search(r"\.py$|^(downstream|tools)\.", word)]
    script = words[first].removesuffix(".py")
    if not re.fullmatch("virtex|tp|icmlm|mmcontrastive|eval_linear|.*(finetune|detection)", script):
        return "", 0
    module = importlib.import_module(script)
    args = module.get_args(words[first + 1 :])
    iters = getattr(args, "iters", None)
    if script == "eval_linear" and module.PROTOCOLS[args.protocol].trained_on == "features":
        return "features of all images, once", 0
    if iters:
        images = 0 if script.endswith("detection") else iters * args.batch_size
        return f"{iters:,.0f} iterations of {args.batch_size} images", images
    images = args.epochs * training_images(args.data, args.root) * getattr(args, "fraction", 1)
    images *= getattr(args, "runs", 1)
    if getattr(args, "shots", None):
        return f"{args.epochs:g} passes over {args.shots} images of each class", 0
    if not images or script == "icmlm":  # how many triplets there are is known when they are found
        of = "triplets" if script == "icmlm" else "images"
        return f"{args.epochs:g} passes over the {of} in batches of {args.batch_size}", 0
    return f"{images / args.batch_size:,.0f} iterations of {args.batch_size} images", images


def training_images(data, root):
    """How many there are, at most; 0 if that is not known"""
    if data.endswith(".jsonl") and os.path.exists(data):
        with open(data, "rb") as file:
            return sum(1 for line in file if line.strip())
    return TRAINING_IMAGES.get(data) or TRAINING_IMAGES.get(os.path.basename(root or ""), 0)
