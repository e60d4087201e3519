"""Reproduce tables of the papers, or ours: train, measure, print our scores and the paper's.

    python tools/reproduce.py "VirTex Tab. 1" --dry-run               # the commands that are left
    python tools/reproduce.py "VirTex Tab. 1" --processes 8           # run them on eight GPUs
    python tools/reproduce.py "ICMLM Tab. 3" --rows ICMLM --seeds 3
    python tools/reproduce.py scenes --seeds 3                        # our own comparisons
    python tools/reproduce.py "own photos" --photos photos.jsonl --labelled flowers textures

docs/papers.md has the tables, and says how to read them. A run that several rows share is trained
once. A step that has a result is not repeated, an interrupted one resumes; if a step fails, its log
is named and the others go on. Unknown flags, say --amp fp16, go to every training run. Tables go to
runs/papers/tables, as Markdown and as JSON with the steps of each score: their commands, seconds,
commit, date, machine and torch.
"""

import argparse
import collections
import datetime
import functools
import importlib.metadata
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs/papers.md"
# TP's batch norm sees all 128 photos [ICMLM App. F.1]; the others use one process in any case.
ONE_PROCESS = r"tp.py|tools/.*|downstream.(captioning|masked_words)"


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("tables", nargs="+", metavar="TABLE", help='how titles start: "VirTex" means all of VirTex')
    add("--rows", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    add("--dry-run", action="store_true", help="print the commands, and which files they lack")
    add("--processes", type=int, default=1, help="torchrun processes, one per GPU")
    add("--seeds", type=int, default=1, help="train each run N times: mean and deviation")
    add("--output", default="runs/papers", help="folder for all runs")
    add("--photos", default="photos.jsonl", help="captioned photos of your own")
    add("--labelled", nargs="+", default=["labelled"], metavar="FOLDER",
        help="folders with train/<class>/ and val/<class>/: each backbone is measured on each")
    add("--seen", type=int, default=100_096, help='"own photos": photos that each row sees')
    add("--minilm", metavar="FOLDER", help='"own photos": a pretrained BERT, for rows that use one')
    add("--clip", metavar="NAME", help='"own photos": say openai/clip-vit-base-patch32')
    add("--imagenet", metavar="WEIGHTS", help="ResNet-18 for the rows from ImageNet: a file with "
        'torchvision\'s weights, or "imagenet", which downloads them')
    add("--words", metavar="FILE", help="what tools/own_words.py wrote of your photos")
    add("--photo", default="photo.jpg", help="photo to caption [VirTex Figs. 6, 9, 10]")
    args, args.flags = parser.parse_known_args(argv)
    args.iters, args.half = args.seen // 64, args.seen // 128
    sets = [Path(folder).resolve().name for folder in args.labelled]
    if len({*sets}) < len(sets):
        parser.error(f"--labelled: the table cannot tell folders of one name apart: {sets}")
    args.sets = dict(zip(sets, map(shlex.quote, args.labelled)))
    if shlex.quote(args.output) != args.output:
        parser.error(f"--output {args.output!r} must be a name without spaces or quotes")
    tables = read_page()[-1]
    args.titles = [title for title in tables if title.startswith(tuple(args.tables))]
    if not args.titles:
        parser.error(f"no table starts with {args.tables}: they are {'; '.join(tables)}")
    return args


def main(args):
    steps = Steps(args)
    for title in args.titles:
        columns, rows = steps.table(title)
        if rows and not args.dry_run:
            write_table(title, columns, rows, Path(args.output, "tables"))
    for command in steps.commands if args.dry_run else ():
        missing = [path for path in inputs(command, args.output) if not os.path.exists(path)]
        print(command, *[f"  # missing: {path}" for path in missing])
    for flag, number in steps.left_out.items():
        print(f"# left out: {number} scores, which need {flag}")


def read_page(sets=()):
    """-> {run: command}, {measure: (heading, command, scores)}, {title: [names, *rows]}

    sets: {name: folder} of --labelled. What has {set} in its name is repeated for each.
    """
    runs, measures, tables = {}, {}, {}
    for title, body in re.findall(r"^##? (.*)\n((?:(?!##? ).*\n)*)", PAGE.read_text(), re.M):
        rows = [re.split(r" *\| *", line)[1:-1] for line in re.findall(r"^\|.*", body, re.M)]
        if title == "Training runs":
            code = "".join(re.findall(r"^```\n(.*?)^```", body, re.S | re.M))
            runs = dict(repeated([line.split(None, 1) for line in code.splitlines()], sets))
        elif title == "Measures":
            measures = {row[0]: row[1:] for row in repeated(rows[2:], sets)}
        elif rows:
            tables[title] = [rows[0], *rows[2:]]
    return runs, measures, tables


def published(command):
    """Did others train these weights? They are measured once, whatever --seeds says."""
    return command.startswith("--weights") and "random" not in command


def repeated(rows, sets):
    """Yield the rows; one with {set} in its name, once for each of the sets"""
    for row in rows:
        for name, folder in dict(sets).items() if "{set}" in row[0] else [("", "")]:
            yield [x.replace("{set}", name).replace("{labelled}", folder) for x in row]


class Failed(Exception):
    """Why there is no number."""


class Steps:
    """The commands of papers.md, each started once"""

    def __init__(self, args):
        self.args = args
        given = {name: value for name, value in vars(args).items() if value is not None}
        self.values = {name: shlex.quote(str(value)) for name, value in given.items()}
        self.runs, self.measures, self.tables = read_page(args.sets)
        self.commands = []
        self.failed = {}  # {output: why, or None}
        self.used = []  # outputs of the steps that the present score needs
        self.left_out = collections.Counter()  # {flag: how many scores need it}

    def table(self, title):
        """-> {column: heading}, [{"row", "run", "cells": {column: {"paper", "ours", "state"}}}]"""
        (_, _, *names), *rows = self.tables[title]
        columns, table = {}, []
        for label, run, *papers in rows:
            if self.args.rows not in label:
                continue
            cells = {}
            for name, text in zip(names, papers):
                for at in self.args.sets if "{set}" in name else ["{set}"]:  # no name of a set
                    column = name.replace("{set}", at)
                    columns[column] = self.measures[column][0]
                    cells[column] = self.cell(column, text, run.replace("{set}", at))
            table.append({"row": label, "run": run, "cells": cells})
        return columns, table

    def cell(self, column, text, run):
        """text: "87.5 (voc07-icmlm)", "-", "" -> the scores of each seed, or why there are none"""
        paper, _, other = text.strip(")").partition(" (")
        cell = {"paper": paper, "ours": [], "state": "measured", "steps": []}
        if not text or run == "-":
            return cell
        try:
            for seed in range(1 if published(self.runs.get(run, "")) else self.args.seeds):
                self.used = []
                cell["ours"].append(self.scores(other or column, run, seed))
                cell["steps"].append([str(output) for output in dict.fromkeys(self.used)])
        except Failed as error:
            cell["state"] = str(error)
        return cell

    def scores(self, measure, run, seed):
        """Train the run, and run the measure on its backbone -> [score]"""
        if measure == "own-mean":
            runs = {at: run.replace("{set}", at) for at in self.args.sets}
            found = sum((self.scores(f"own-map-{at}", runs[at], seed) for at in runs), [])
            return [statistics.mean(found)] if found else []
        _, command, keys = self.measures[measure]
        if command in self.measures:  # the same result.json has the scores of both
            measure, command = command, self.measures[command][1]
        output, weights = self.train(run, seed)
        if command != "training":
            folder, output = output, output / measure
            self.step(command, output, seed, weights=weights, run=folder, picture=not keys)
        if self.args.dry_run or not keys:
            return []
        result = json.loads((output / "result.json").read_text())
        return [look_up(result, key, weights) for key in keys.split(" / ")]

    def train(self, run, seed):
        """-> the folder of its output; the value of --weights for it"""
        command, folder = self.runs[run], Path(self.root(seed), run)
        if command.startswith("--weights"):
            return folder, self.fill(command.removeprefix("--weights "))
        if not command.startswith("tools/"):
            flags = [*self.args.flags, *(["--seed", str(seed)] if seed else [])]
            command = " ".join([command, *map(shlex.quote, flags)])
        self.step(command, folder, seed)
        if "--keep-every" not in command:
            return folder, folder / "backbone.pth"
        best = folder / "best.pth"  # early stopping
        self.step(self.measures["voc07-val"][1], folder / "voc07-val", seed, run=folder)
        if not (self.args.dry_run or best.exists()):
            scores = json.loads((folder / "voc07-val/result.json").read_text())["backbones"]
            os.link(max(scores, key=lambda path: scores[path]["mean"]["mAP"]), best)
        return folder, best

    def root(self, seed):
        return f"{self.args.output}/seed-{seed}" if seed else self.args.output

    def fill(self, command, **values):
        values = self.values | values
        for name in re.findall(r"{(\w+)}", command):
            if name not in values:
                self.left_out[f"--{name}"] += 1
                raise Failed(f"left out: no --{name}")
            command = command.replace(f"{{{name}}}", str(values[name]))
        return command

    def step(self, command, output, seed, picture=False, **values):
        """Start a command unless its result is there. What it reads of other runs is made first."""
        command = self.fill(command, seed=seed, **values)
        for other in re.findall(r"runs/papers/([^/\s]+)", command):
            if other in self.runs and Path(self.root(seed), other) not in (output, output.parent):
                self.train(other, seed)
        command = command.replace("runs/papers", self.root(seed)) if not values else command
        line = f"{launcher(command, self.args.processes)} {command} --output {output}"
        if output not in self.failed:
            done = (output / "result.json").exists() or picture and any(output.glob("*.png"))
            before = record(output)["command"]
            if done and before not in (None, line):
                print(f"# {output} is the result of another command: {before}", flush=True)
            self.failed[output] = None if done else self.start(line, output)
        self.used.append(output)
        if self.failed[output]:
            raise Failed(self.failed[output])

    def start(self, line, output):
        """-> None, or why there is no result"""
        self.commands.append(line)
        if self.args.dry_run:
            return None
        print(line, flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        path = Path(f"{output}.step.json")
        start = {"seconds": None, **circumstances()}  # None: it was interrupted
        step = {"command": line, "starts": [*record(output)["starts"], start]}
        path.write_text(json.dumps(step, indent=1))
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        began = time.time()
        with open(f"{output}.log", "a") as log:
            ended = subprocess.run(line, shell=True, stdout=log, stderr=log, env=env)
        start["seconds"] = round(time.time() - began)
        path.write_text(json.dumps(step, indent=1))
        return f"failed: see {output}.log" if ended.returncode else None


def record(output):
    """-> {"command": as typed, "starts": [{"seconds", "date", "commit", "machine", "torch"}]}"""
    path = Path(f"{output}.step.json")
    return json.loads(path.read_text()) if path.exists() else {"command": None, "starts": []}


@functools.cache
def circumstances():
    """-> {"date", "commit", "machine", "torch"} of this sitting"""
    gpus = output_of("nvidia-smi --query-gpu=name --format=csv,noheader").splitlines()
    cpus = re.findall(r"Model name: *(.*)", output_of("lscpu")) or ["an unknown CPU"]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": output_of("git describe --always --dirty").strip(),
        "machine": ", ".join([*gpus, f"{os.cpu_count()} cores of {cpus[0]}"]),
        "torch": importlib.metadata.version("torch"),
    }


def output_of(command):
    """What a program prints; nothing if this machine has no such program"""
    return subprocess.run(command, shell=True, cwd=REPO, capture_output=True, text=True).stdout


def launcher(command, processes):
    script = command.split()[0]
    one = processes == 1 or re.fullmatch(ONE_PROCESS, script)
    words = "python" if one else f"torchrun --nproc_per_node={processes}"
    return words if script.endswith(".py") else f"{words} -m"


def look_up(result, key, weights):
    """key: "mAP" of eval_linear.py, "AP50" of a task, "validation.tp" of a training run"""
    if "backbones" in result:
        result = result["backbones"][shlex.split(str(weights))[0]]["mean"]
    result = result.get("trained") or result.get("random") or result
    for part in key.split("."):
        if part not in result:
            raise Failed(f"no result: result.json has no {key}")
        result = result[part]
    return result


def inputs(command, output):
    """The files and folders that a command reads, but for those of earlier commands"""
    given = dict(re.findall(r"--(\S+) (\S+)", command))
    data = given.get("data", "shapes")
    root = "" if data == "shapes" else f"datasets/{data}"
    paths = [data if data.endswith(".jsonl") else given.get("root", root)]
    paths += [path for path in map(given.get, ("weights", "init", "lm")) if path and "/" in path]
    return [path for path in paths if path and not path.startswith(output) and ":" not in path]


def write_table(title, columns, rows, folder):
    """Print the table, and save it as Markdown and JSON.  rows: from Steps.table"""
    folder.mkdir(parents=True, exist_ok=True)
    name, _, about = title.partition(": ")
    path = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    papers = [c for c in columns if any(row["cells"][c]["paper"].strip("-") for row in rows)]
    heads = [head for c in columns for head in [columns[c], "ours"][: 1 + (c in papers)]]
    lines = [f"**{name}.** {about}", "", line_of(["row", *heads]), "|" + (1 + len(heads)) * "---|"]
    for row in rows:
        cells = [row["row"]]
        for column, cell in row["cells"].items():
            ours = in_words(cell["ours"]) if cell["state"] == "measured" else cell["state"]
            cells += [cell["paper"]] * (column in papers) + [ours]
        lines.append(line_of(cells))
    print("", *lines, "", sep="\n", flush=True)
    path.write_text("\n".join(lines) + "\n")
    cells = [cell for row in rows for cell in row["cells"].values()]
    steps = {output: record(output) for cell in cells for seed in cell["steps"] for output in seed}
    content = {"table": name, "columns": columns, "rows": rows, "steps": steps}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1))


def in_words(seeds, digits=1):
    """[[88.9, 53.8], [88.5, 53.8]] of two seeds -> "88.7 ± 0.3 / 53.8 ± 0.0" """
    parts = []
    for values in zip(*seeds):
        deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        parts.append(f"{statistics.mean(values):.{digits}f}{deviation}")
    return " / ".join(parts)


def line_of(cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(get_args())
