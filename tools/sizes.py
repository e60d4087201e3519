"""tools/reproduce.py --labelled, --small and --quick: the rows of tools/rows.toml, changed."""

import importlib
import multiprocessing
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.exit("error: this is no command but a part of tools/reproduce.py: see its --help")

from tools.tables import ROWS

QUICK, SMALL = ROWS["quick"], ROWS["small"]


# ------------------------------------------------------------------------------------ --labelled


def for_each_folder(backbones, measures, tables, lists, args):
    """What reads {labelled}, once for each of these folders: own-knn becomes own-knn-flowers

    -> backbones, measures, tables, lists. Such a measure has its "folder" by name.
    """
    names = [re.sub(r"[^\w-]+", "-", Path(folder).resolve().name) for folder in args.labelled]
    if len({*names}) < len(names):
        sys.exit(f"--labelled: the table cannot tell folders of one name apart: {names}")
    folders = dict(zip(names, args.labelled))
    new = {}
    for key, measure in measures.items():
        if "mean" in measure:
            new[key] = {**measure, "mean": [f"{measure['mean']}-{name}" for name in folders]}
        for name, command in repeated({key: measure.get("command", "")}, folders).items():
            new.setdefault(name, {**measure, "command": command})
            if name != key:
                folder = name.removeprefix(f"{key}-")
                new[name] |= {"name": f"{measure['name']}, {folder}", "folder": folder}
    spread = measures.keys() - new
    tables = {key: spread_table(table, spread, names) for key, table in tables.items()}
    return repeated(backbones, folders), new, tables, repeated(lists, folders)


def repeated(commands, folders):
    """{name: command}, those with {labelled} or {labelled.jsonl} for each folder"""
    new = {}
    for key, command in commands.items():
        if "{labelled" not in command:
            new[key] = command
        else:
            stem, suffix = os.path.splitext(key)
            for name, folder in folders.items():
                text = command.replace("{labelled}", shlex.quote(folder))
                new[f"{stem}-{name}{suffix}"] = text.replace("{labelled.", f"{{labelled-{name}.")
    return new


def spread_table(table, spread, folders):
    """A column for each folder instead of one that uses a measure of `spread`

    Of "88.7 by own-probe" in the column voc07, the second folder's column is own-probe-NAME.
    """
    old, columns = table.get("columns", []), {}  # columns: {name: a text for each row}
    rows = table.get("rows", [])
    for n, column in enumerate(old):
        texts = [str(row[2 + n]) if len(row) > 2 else "-" for row in rows]
        used = {text.partition(" by ")[2] or column for text in texts if text} & spread
        if ROWS["measures"][column].get("mean") and len(folders) == 1:
            continue
        for folder in folders if used else [None]:
            [measure] = used or [column]
            if folder is None or measure == column:
                columns[f"{column}-{folder}" if folder else column] = texts
            elif folder == folders[0]:
                columns[column] = [text and f"{text}-{folder}" for text in texts]
            else:
                columns[f"{measure}-{folder}"] = [text and "-" for text in texts]
    rows = [[*row[:2], *cells] for row, *cells in zip(rows, *columns.values())]
    return {**table, "columns": list(columns), "rows": rows} if old else table


# --------------------------------------------------------------------------------------- --small


def check_photos(args):
    """End with one line, before anything is trained, if --photos or --labelled is not there"""
    if args.photos == "shapes":
        return
    if not (args.photos.endswith(".jsonl") and os.path.exists(args.photos)):
        scenes = "; left out, it is the built-in scenes" if args.small else ""
        sys.exit(f"--photos {args.photos}: there is no such .jsonl (docs/running.md){scenes}")
    for folder in args.labelled:
        if not all(Path(folder, split).is_dir() for split in ("train", "val")):
            sys.exit(f"--labelled {folder}: it needs train/<class>/ and val/<class>/ with photos "
                     "(a TABLE stands before --labelled)")  # fmt: skip


def choice(value, args):
    """Of [on photos, on the scenes] in rows.toml"""
    return value[args.photos == "shapes"] if isinstance(value, list) else value


def at_small_size(args):
    """rows.toml as its section [small] changes it -> backbones, measures, tables"""
    backbones = {name: {"missing": "published weights"} for name in ROWS["files"]}
    for name, command in ROWS["backbones"].items():
        reason = why_not(command, args)
        backbones[name] = {"missing": reason} if reason else change(command, args)
    measures = {name: dict(measure) for name, measure in ROWS["measures"].items()}
    for measure in measures.values():
        measure["command"] = change(measure.get("command", ""), args)
    tables = {name: small_table(table, args) for name, table in ROWS["tables"].items()}
    return backbones, measures, tables


def why_not(command, args):
    """-> why there is no row of this size, or None"""
    if "missing" in command:
        return command["missing"]
    command = one_line(command)
    skip = SMALL["skip"] | ({} if has_tags(args.photos) else SMALL["untagged"])
    reasons = [choice(why, args) for pattern, why in skip.items() if re.search(pattern, command)]
    return next(filter(None, reasons), None)


def change(command, args):
    """-> the command at this size"""
    command = one_line(command)
    for pattern, new in SMALL["replace"].items():
        command = re.sub(pattern, choice(new, args), command)
    return one_line(command)


def one_line(command):
    return " ".join(command.split())


@cache
def has_tags(photos):
    if not os.path.exists(photos):
        return True  # the scenes have; or --dry-run
    with open(photos, encoding="utf-8") as file:
        return any(re.search(r'"tags":\s*\["', line) for line in file)


def small_table(table, args):
    """With only the columns that are measured, of the probed ones the first"""
    columns, probe = table.get("columns", []), choice(SMALL["probe"], args)
    probed = [column for column in columns if re.fullmatch(SMALL["probed"], column)]
    chosen = [x for x in columns if x in probed[:1] or re.fullmatch(SMALL["kept"], x)]
    if not columns:
        return table
    if not chosen:
        names = ", ".join(ROWS["measures"][column]["name"] for column in columns)
        return {"note": f"left out, not measured at this size: {names}"}
    if "each_kept" in table and "--keep-every" not in args.flags:
        return {"note": "left out, needs a flag: --keep-every N"}
    rows = []
    for label, backbone, *cells in table["rows"]:
        texts = dict(zip(columns, map(str, cells)))
        for column in probed:
            paper = texts[column].partition(" by ")[0]
            texts[column] = paper and f"{paper} by {probe}"
        rows.append([label, backbone, *(texts[column] for column in chosen)])
    note = choice(SMALL["note"], args).format(photos=args.photos, labelled=", ".join(args.labelled))
    return {**table, "columns": chosen, "rows": rows, "ours": note}


# --------------------------------------------------------------------------------------- --quick


def prepare_quick(args):
    """Make a few scenes and labelled pictures; import everything once for all steps"""
    args.processes = 1
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    for name in QUICK["imports"]:
        importlib.import_module(name)
    from extras import shapes

    shapes.SPLITS = {"train": range(48), "val": range(10**7, 10**7 + 12)}
    args.captions = "--data shapes --train-split train --val-split val"
    if args.root:
        splits = "--train-split train2017 --val-split val2017"
        args.captions = f"--data coco --root {shlex.quote(args.root)} {splits}"
    args.photos = "shapes"
    args.labelled, args.imagenet = [f"{args.output}/labelled"], "imagenet"
    for scene in range(60):
        shape = shapes.objects_of(scene)[0].shape
        folder = Path(args.labelled[0], "train" if scene % 3 else "val", shape)
        folder.mkdir(parents=True, exist_ok=True)
        args.photo = f"{folder}/{scene}.png"
        shapes.draw(scene).save(args.photo)


def quick_words(words, args):
    """Append the flags of [quick] in rows.toml: the last value of a flag counts"""
    command = " ".join(words)
    for pattern, flags in QUICK["flags"].items():
        if re.search(pattern, command):
            words = [*words, *shlex.split(flags.format(**vars(args)))]
    return words


def in_fork(words, log):
    """Run in a fork of this process, which has all imports already -> its exit code"""

    def work():
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
        module.main(module.get_args(words[1:]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode
