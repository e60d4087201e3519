"""Reproduce any row of the papers' tables: train, measure, print our score and the paper's.

    python tools/reproduce.py --list                                  # tables and figures
    python tools/reproduce.py "VirTex Tab. 1" --processes 8           # on eight GPUs
    python tools/reproduce.py "VirTex Tab. 1" --dry-run               # the remaining commands
    python tools/reproduce.py "ICMLM Tab. 3" --rows ICMLM --seeds 3
    python tools/reproduce.py --quick                                 # all tables in minutes
    python tools/reproduce.py scenes --seeds 3                        # our own comparisons
    python tools/reproduce.py "own photos" --photos photos.jsonl --labelled labelled
    python tools/reproduce.py "VirTex Fig. 5" --small --photos photos.jsonl --labelled labelled

tools/rows.toml defines the rows. A backbone that several rows share is trained once, into
runs/papers/NAME; its measurements go into runs/papers/NAME/MEASURE. A step with a result is not
repeated, an interrupted step resumes; if a step fails, its log is named and the other steps go on.
Unknown flags, say --amp fp16, go to every training run. runs/papers/tables gets each table as
Markdown, JSON and a picture.

--small trains the papers' rows with the recipe `demo`, on --photos or without them on the built-in
scenes, and measures all backbones alike, on --labelled or the scenes. The section [small] of
rows.toml says what becomes of each row.

--quick checks every step with a few small iterations, before you spend a week of GPU time: on some
built-in scenes, or with --root on photos in COCO's layout. Published weights are then random.
"""

import argparse
import glob
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import documents, sizes, tables
from tools.tables import BACKBONES, MEASURES, ROWS, TABLES

FILES, LISTS, DRAWS, QUICK = ROWS["files"], ROWS["lists"], ROWS["draws"], ROWS["quick"]


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("tables", nargs="*", metavar="TABLE", help='say "ICMLM Tab. 2" (default all of the papers)')
    add("--rows", nargs="+", metavar="TEXT", default=[""],
        help="only rows whose name contains TEXT")  # fmt: skip
    add("--list", action="store_true", help="list the tables")
    add("--dry-run", action="store_true", help="only print what is missing, and the commands")
    add("--images-per-s", type=float, help="for --dry-run: a speed, to estimate hours")
    add("--processes", type=int, default=1, help="torchrun processes, one per GPU")
    seeds = "train each backbone N times: mean and deviation (default as the paper, mostly once)"
    add("--seeds", type=int, help=seeds)
    add("--output", default="runs/papers",
        help="folder for all runs; in it quick/, or photos/ and scenes/ of --small")  # fmt: skip
    add("--quick", action="store_true", help="a few small iterations of every step, one process")
    add("--root", help="for --quick: a folder in COCO's layout")
    small = "the papers' rows with the recipe demo, on --photos or the built-in scenes"
    add("--small", action="store_true", help=small)
    add("--photos", help='for "own photos" (default photos.jsonl) and --small: with captions')
    add("--labelled", default="labelled", help="for both: train/<class>/, val/<class>/")
    clip = "for the row CLIP: from the hub, or a folder"
    add("--clip", default="openai/clip-vit-base-patch32", help=clip)
    add("--photo", default="photo.jpg", help="photo to caption [VirTex Figs. 6, 9, 10]")
    add("--docs", action="store_true", help="write the tables of the pages in docs/")
    args, args.flags = parser.parse_known_args(argv)
    for name in args.tables:
        if not tables_of([name]):
            parser.error(f"there is no table {name}: see --list")
    labels = [row[0] for name in tables_of(args.tables) for row in TABLES[name].get("rows", ())]
    for text in args.rows:
        if not any(text in label for label in labels):
            parser.error(f"no row has {text} in its name (put tables before --rows)")
    if args.quick:
        args.output += "/quick"
        args.seeds = args.seeds or 1
    args.photos = args.photos or ("shapes" if args.small else "photos.jsonl")
    if args.small:
        args.output += "/scenes" if args.photos == "shapes" else "/photos"
    return args


def main(args):
    if args.list:
        return print(*tables.table_of_tables(), sep="\n")
    if args.docs:
        return documents.write_documents(lambda: Steps(get_args(["--dry-run"])))
    if args.quick:
        sizes.prepare_quick(args)
    elif args.small and not args.dry_run:
        sizes.check_photos(args)
    steps = Steps(args)
    states = []
    for name in tables_of(args.tables):
        rows = steps.table(name)
        states += [tables.state_of(row) for row in rows]
        if rows and not args.dry_run:
            tables.write_table(name, steps.tables[name], rows, Path(args.output, "tables"))
        elif args.small and "rows" not in steps.tables[name]:
            print(f"# {name}: {steps.tables[name]['note']}")
    if args.dry_run:
        print(*tables.plan(steps.commands, args.output, args.images_per_s), sep="\n")
    else:
        counts = [f"{states.count(state)} {state}" for state in sorted(set(states))]
        print(f"rows: {', '.join(counts)}")
        return int("failed" in states)


def tables_of(names):
    """Tables whose names start so: "VirTex Fig. 5" gives three. No names: the papers' tables"""
    if not names:
        return [table for table in TABLES if table not in ("scenes", "own photos")]
    return [table for table in TABLES if table.startswith(tuple(names))]


# ----------------------------------------------------------------------------------------- steps


class Failed(Exception):
    """Why there is no number."""


class Steps:
    """Training runs and measurements, each once, by their names in rows.toml

    kept: the name of a model_N.pth to measure instead of the backbone, or None
    """

    def __init__(self, args):
        self.args = args
        rows = sizes.at_small_size(args) if args.small else (BACKBONES, MEASURES, TABLES)
        self.backbones, self.measures, self.tables = rows
        self.commands = []
        self.outcomes = {}  # {output of a step: None, or why it has no result}

    def table(self, name):
        """-> [{"row", "backbone", "seconds", "cells": {column: {"paper", "by", "ours", "state"}}}]

        seconds: of the training run of each seed
        """
        rows, table = [], self.tables[name]
        columns = table.get("columns", [])
        for label, backbone, *cells in table.get("rows", []):
            if not any(text in label for text in self.args.rows):
                continue
            texts = dict(zip(columns, cells or len(columns) * ["-"]))
            for kept in self.each_kept(backbone) if "each_kept" in table else [None]:
                results = {c: self.cell(c, str(texts[c]), backbone, kept) for c in columns}
                text = f"{label}, {kept}" if kept else label
                seconds = self.seconds(backbone, max(len(c["ours"]) for c in results.values()))
                row = {"row": text, "backbone": backbone, "seconds": seconds}
                rows.append({**row, "cells": results})
        return rows

    def cell(self, column, text, backbone, kept):
        paper, _, other = text.partition(" by ")
        cell = {"paper": paper, "by": other, "ours": [], "state": "measured"}
        try:
            # Published weights and random backbones (of files in rows.toml) have one seed.
            seeds = (self.args.seeds or DRAWS.get(backbone, 1)) if backbone in self.backbones else 1
            for seed in range(seeds) if text else ():
                cell["ours"].append(self.scores(other or column, backbone, seed, kept))
        except Failed as error:
            cell["state"] = str(error)
        return cell

    def scores(self, name, backbone, seed, kept=None):
        """Run a measure on a backbone -> its scores"""
        paths = self.measures[name]["scores"]
        name = self.measures[name].get("of", name)
        output = trained = self.folder(backbone, seed)
        weights = shlex.quote(str(trained / kept)) if kept else self.weights(backbone, seed)
        if name != "training":
            command = self.measures[name]["command"]
            alone = kept and "{weights}" in command  # else all kept models at once
            output = trained / (f"{name}-{kept[:-4]}" if alone else name)
            values = {"weights": weights, "folder": shlex.quote(str(trained))}
            self.run(self.words(command, seed, **values), output, not paths)
        if self.args.dry_run or not paths:
            return []
        file = output / "result.json"
        if not file.exists():
            raise Failed(f"no result: {file} is missing")
        result = json.loads(file.read_text())
        return [look_up(result, path, weights) for path in paths]

    def train(self, name, seed):
        """Train a backbone, unless it is there -> its output folder"""
        command = self.backbones[name]
        if "missing" in command:
            why = "left out" if self.args.small else "not available"
            raise Failed(f"{why}: {command['missing']}")
        output = self.folder(name, seed)
        words = self.words(command, seed) + self.args.flags
        if seed:
            words += ["--seed", str(seed)]
        self.run(words, output)
        return output

    def folder(self, name, seed):
        return Path(self.args.output, f"{name}-{seed}" if seed else name)

    def seconds(self, name, seeds):
        """By their logs, which `start` writes"""
        logs = [Path(f"{self.folder(name, seed)}.log") for seed in range(seeds)]
        texts = [log.read_text(errors="replace") for log in logs if log.exists()]
        return [sum(map(int, re.findall(r"^# (\d+) seconds$", text, re.M))) for text in texts]

    def weights(self, name, seed):
        """The value of --weights: published weights, or the backbone of a training run"""
        if name not in self.backbones:
            arch = "vgg16_bn" if "vgg" in name else "resnet50"
            if self.args.quick:
                return f"random --arch {arch}"
            return FILES.get(name, "FILE").format(**vars(self.args))
        file = "backbone.pth"
        if "--keep-every" in self.backbones[name]:
            kept = self.kept_models(name, seed)
            file = max(kept, key=lambda kept: self.scores(ROWS["select"], name, seed, kept))
        return shlex.quote(str(self.train(name, seed) / file))

    def kept_models(self, name, seed):
        names = [path.name for path in self.train(name, seed).glob("model_[0-9]*.pth")]
        if not names and not self.args.dry_run:
            raise Failed("failed: no model_N.pth was kept, --keep-every is longer than the run")
        return sorted(names, key=lambda name: int(name[6:-4])) or ["model_N.pth"]

    def each_kept(self, name):
        """The names of the kept models; [None] if the run failed, which the cells then say"""
        try:
            return self.kept_models(name, 0)
        except Failed:
            return [None]

    def words(self, command, seed, **values):
        """Make everything that a command of rows.toml depends on -> the words of the command"""
        values = {**vars(self.args), "seed": seed, **values}
        names = re.findall(r"{([\w./-]+)}", command)
        for name in names:
            backbone, _, file = name.partition("/")
            if backbone in self.backbones and file:  # of its run: {own-tfm/language_model}
                values[name] = shlex.quote(str(self.train(backbone, seed) / file))
            elif name in self.backbones:
                values[name] = self.weights(name, seed)
            elif name in LISTS:
                values[name] = shlex.quote(str(self.make_list(name, seed)))
        for name in names:
            command = command.replace(f"{{{name}}}", str(values[name]))
        return shlex.split(command)

    def make_list(self, name, seed):
        """-> its path. The script runs in any case: what exists, it keeps or writes again."""
        path = Path(self.args.output, name)
        if "{seed}" in LISTS[name] and seed:
            path = path.with_stem(f"{path.stem}-{seed}")
        if not (self.args.quick and re.search(QUICK["skip"], LISTS[name])):
            self.run(self.words(LISTS[name], seed), path)
        return path

    def run(self, words, output, pictures=False):
        """Start a script unless its result is there, result.json or (for pictures) a .png"""
        if output not in self.outcomes:
            ended = (output / "result.json").exists() or pictures and any(output.glob("*.png"))
            self.outcomes[output] = None if ended else self.start(words, output)
        if self.outcomes[output]:
            raise Failed(self.outcomes[output])

    def start(self, words, output):
        """-> None, or why there is no result"""
        if self.args.quick:
            words = sizes.quick_words(words, self.args)
        words = [*words, "--output", str(output)]
        command = shlex.join(as_command(words, self.args.processes))
        self.commands.append(re.sub(r"'([\w./-]+\*[\w.]+)'", r"\1", command))  # the shell finds *
        if self.args.dry_run:
            return None
        if self.args.quick and re.search(QUICK["skip"], self.commands[-1]):
            return "not in --quick"
        print(self.commands[-1], flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
        began = time.time()
        with open(f"{output}.log", "a") as log:
            try:
                if self.args.quick:
                    failed = sizes.in_fork(words, log)
                else:
                    failed = in_subprocess(as_command(words, self.args.processes), log)
            finally:  # also if it is interrupted
                log.write(f"\n# {time.time() - began:.0f} seconds\n")
        return f"failed: see {output}.log" if failed else None


def as_command(words, processes):
    """The command line with which a user would start the script"""
    if processes == 1 or re.fullmatch(ROWS["single"], words[0]):
        launcher = ["python"]
    else:
        launcher = ["torchrun", f"--nproc_per_node={processes}"]
    if not words[0].endswith(".py"):
        launcher.append("-m")
    return [*launcher, *words]


def look_up(result, path, weights):
    """ "backbones.{weights}.mean.mAP" of {"backbones": {"runs/b.pth": {"mean": {"mAP": 88.7}}}}

    weights: the value of --weights, of which the file's name counts: the folder may have moved.
    With random weights, "random" replaces "trained".
    """
    for key in path.split("."):
        if key == "{weights}":
            names = {Path(name).name: name for name in result}
            key = names.get(Path(shlex.split(weights)[0]).name, weights)
        key = "random" if key == "trained" and key not in result else key
        if key not in result:
            raise Failed(f"no result: result.json has no {path}")
        result = result[key]
    return result


def in_subprocess(command, log):
    """With the Python that runs this script, and its torchrun -> the exit code"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, stdout=log, stderr=log, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(get_args()))
