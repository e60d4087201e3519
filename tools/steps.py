"""The steps behind the tables of tools/reproduce.py: training runs and measurements, each once"""

import glob
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.exit("error: this is no command but a part of tools/reproduce.py: see its --help")

from tools import sizes, tables
from tools.tables import BACKBONES, MEASURES, ROWS, TABLES

FILES, DRAWS, QUICK = ROWS["files"], ROWS["draws"], ROWS["quick"]
OPTIONAL = "clip", "imagenet", "minilm"  # flags: rows of weights that somebody else has trained


class Failed(Exception):
    """Why there is no number."""


class Steps:
    """Training runs and measurements, each once, by their names in rows.toml

    kept: the name of a model_N.pth to measure instead of the backbone, or None
    """

    def __init__(self, args):
        self.args = args
        rows = sizes.at_small_size(args) if args.small else (BACKBONES, MEASURES, TABLES)
        rows = sizes.for_each_folder(*rows, ROWS["lists"], args)
        self.backbones, self.measures, self.tables, self.lists = rows
        self.commands = []  # that were started, or would be
        self.used = {}  # {output: command} of the row at hand
        self.outcomes = {}  # {output of a step: None, or why it has no result}

    def table(self, name):
        """-> [{"row", "backbone", "cells": {column: {"paper", "by", "ours", "state"}}, "steps"}]

        ours: the scores of each seed.  steps: what led to them, [{"command", "seconds"}]
        """
        rows, table = [], self.tables[name]
        columns = table.get("columns", [])
        for label, backbone, *cells in table.get("rows", []):
            if not any(text in label for text in self.args.rows):
                continue
            texts = dict(zip(columns, cells or len(columns) * ["-"]))
            for kept in self.each_kept(backbone) if "each_kept" in table else [None]:
                self.used = {}
                results = {c: self.cell(c, str(texts[c]), backbone, kept) for c in columns}
                text = f"{label}, {kept}" if kept else label
                steps = [self.step(*used) for used in self.used.items()]
                row = {"row": text, "backbone": backbone, "cells": results}
                rows.append({**row, "steps": steps})
        return rows

    def cell(self, column, text, backbone, kept):
        paper, _, other = text.partition(" by ")
        cell = {"paper": paper, "by": other, "ours": [], "state": "measured"}
        measure = self.measures[other or column]
        if "mean" in measure:
            cells = [self.cell(name, text, backbone, kept) for name in measure["mean"]]
            cell["state"] = tables.state_of(cells)
            for seeds in zip(*(each["ours"] for each in cells)):
                cell["ours"].append([statistics.mean(scores) for scores in zip(*seeds)])
            return cell
        if f"{backbone}-{measure.get('folder')}" in self.backbones.keys() - ROWS["backbones"]:
            backbone += f"-{measure['folder']}"  # trained on this folder's labels
        try:
            for seed in range(self.seeds(backbone)) if text else ():
                cell["ours"].append(self.scores(other or column, backbone, seed, kept))
        except Failed as error:
            cell["state"] = str(error)
        return cell

    def seeds(self, backbone):
        """How many; one of published weights, which are among the files in rows.toml"""
        published = backbone not in self.backbones and not backbone.startswith("random")
        if published or re.fullmatch(ROWS["once"]["backbones"], backbone):
            return 1
        return self.args.seeds or DRAWS.get(backbone, 1)

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

    def step(self, output, command):
        """-> {"command", "seconds"}, by the log that `start` writes

        It is said if the result is another command's, say with other photos; that is then named.
        """
        log = Path(f"{output}.log")
        text = log.read_text(errors="replace") if log.exists() else ""
        for before in re.findall(r"^# ((?:python|torchrun) .*)$", text, re.M)[-1:]:
            if before != command:
                print(f"# {output} is the result of another command: {before}", flush=True)
                command = before
        seconds = re.findall(r"^# (\d+) seconds$", text, re.M)
        return {"command": command, "seconds": sum(map(int, seconds)) if seconds else None}

    def weights(self, name, seed):
        """The value of --weights: published weights, or the backbone of a training run"""
        if name not in self.backbones:
            arch = "vgg16_bn" if "vgg" in name else "resnet50"
            if self.args.quick:
                return f"random --arch {arch}"
            self.check_given(FILES.get(name, ""))
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

    def check_given(self, command):
        for flag in OPTIONAL:
            if f"{{{flag}}}" in command and not getattr(self.args, flag):
                raise Failed(tables.NO_FLAG + flag)

    def words(self, command, seed, **values):
        """Make everything that a command of rows.toml depends on -> the words of the command"""
        self.check_given(command)
        command = re.sub(r"{seen/(\d+)}", lambda by: str(self.args.seen // int(by[1])), command)
        given = {name: shlex.quote(str(value)) for name, value in vars(self.args).items()}
        values = {**given, "seed": seed, **values}
        names = re.findall(r"{([\w./-]+)}", command)
        for name in names:
            backbone, _, file = name.partition("/")
            if backbone in self.backbones and file:  # of its run: {own-tfm/language_model}
                values[name] = shlex.quote(str(self.train(backbone, seed) / file))
            elif name in self.backbones:
                values[name] = self.weights(name, seed)
            elif name in self.lists:
                values[name] = shlex.quote(str(self.make_list(name, seed)))
        for name in names:
            command = command.replace(f"{{{name}}}", str(values[name]))
        return shlex.split(command)

    def make_list(self, name, seed):
        """-> its path. The script runs in any case: what exists, it keeps or writes again."""
        path = Path(self.args.output, name)
        command = self.lists[name]
        if "{seed}" in command and seed:
            path = path.with_stem(f"{path.stem}-{seed}")
        if not (self.args.quick and re.search(QUICK["skip"], command)):
            self.run(self.words(command, seed), path)
        return path

    def run(self, words, output, pictures=False):
        """Start a script unless its result is there, result.json or (for pictures) a .png"""
        if self.args.quick:
            words = sizes.quick_words(words, self.args)
        words = [*words, "--output", str(output)]
        command = shlex.join(as_command(words, self.args.processes))
        command = re.sub(r"'([\w./-]+\*[\w.]+)'", r"\1", command)  # the shell finds *
        self.used[output] = command
        if output not in self.outcomes:
            ended = (output / "result.json").exists() or pictures and any(output.glob("*.png"))
            self.outcomes[output] = None if ended else self.start(words, command, output)
        if self.outcomes[output]:
            raise Failed(self.outcomes[output])

    def start(self, words, command, output):
        """-> None, or why there is no result"""
        self.commands.append(command)
        if self.args.dry_run:
            return None
        if self.args.quick and re.search(QUICK["skip"], command):
            return "not in --quick"
        print(command, flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
        began = time.time()
        with open(f"{output}.log", "a") as log:
            log.write(f"# {command}\n")
            log.flush()
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
