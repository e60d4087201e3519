"""Feed the scripts bad input: nothing may be lost, hang, or run code from a file

    python tests/fuzz.py --cases 500 --seed 1 --scripts tp icmlm
    python tests/fuzz.py --seed 1 --case 17       # repeat one case, with its output

A file of a killed run is damaged, a line of photos.jsonl made wrong, or the run killed again; then
it is started again. Seed and number decide everything.

    accepted, refused    it finished; it ended with one line that says what is wrong
    traceback            a traceback after damage to a file that the run itself wrote
    unclear, hang        defects: a traceback after damage to the user's files; not done in time
    code, lost           defects: a file ran code; the checkpoint is lost, or final weights differ

It exits with 1 if there are defects.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from conftest import Touch, fork_and_read, kill_at

import common
from extras import shapes

ENDINGS = "accepted", "refused", "traceback", "unclear", "hang", "code", "lost"
DATA = "--data photos.jsonl --image-size 32 --workers 0"
RUN = f"{DATA} --output run --batch-size 8 --amp off --iters 4 --checkpoint-every 2 --log-every 1"
SCRIPTS = {
    "virtex": f"{RUN} --hidden 64",
    "tp": f"{RUN} --num-labels 9 --init weights.pth",
    "icmlm": f"{RUN} --lm-iters 2 --init weights.pth",
    "mmcontrastive": f"{RUN} --lm-iters 2 --queue 8",
    "eval_linear": f"{DATA} --weights weights.pth",
}
ODD = None, True, 0, -1.5, "", "x", [], {}, [None], ["", ""], [[1]], {"x": 1}, "9" * 5000
NO_ROWS = "{", "null", "\0\0", '{"image": NaN}', "[]"


def get_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", type=int, default=30, help="how many")
    add("--seed", type=int, default=0, help="of the cases")
    add("--case", type=int, help="only this one, with its output")
    add("--scripts", choices=SCRIPTS, nargs="+", default=list(SCRIPTS), help="only these")
    return parser.parse_args(argv)


def main(args):
    """-> {ending: how many cases}"""
    counts = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.chdir(folder):
        make_photos()
        common.save_weights("weights.pth", common.build_backbone("resnet18"))
        for name in set(args.scripts) - {"eval_linear"}:
            make_runs(name)
        for number in range(args.cases) if args.case is None else [args.case]:
            what, ending, output = one_case(number, args)
            counts[ending] += 1
            if ending in ENDINGS[3:] or args.case is not None:
                print(f"case {number}, {what}: {ending}\n{output[-3000:]}")
    print(", ".join(f"{counts[ending]} {ending}" for ending in ENDINGS))
    return counts


def make_photos():
    lines = []
    for n in range(24):
        objects = shapes.objects_of(n)
        shapes.draw(n).save(f"{n}.jpg")
        row = {"image": f"{n}.jpg", "captions": shapes.describe(objects)}
        row |= {"tags": [objects[0].colour], "split": "train" if n < 16 else "val"}
        lines.append(json.dumps(row))
    Path("photos.jsonl").write_text("\n".join(lines))


def make_runs(name):
    """NAME.whole: a run from start to end; NAME.half: one killed at iteration 3"""
    code, output = run_script(name, 600)
    assert code == 0, output
    os.rename("run", f"{name}.whole")
    kill_at(3, [name, *SCRIPTS[name].split()])
    os.rename("run", f"{name}.half")


def run_script(name, seconds):
    """-> exit code, None if it was killed after so many seconds; what it printed"""
    module = importlib.import_module(name)

    def work():
        module.main(module.get_args(SCRIPTS[name].split()))

    return fork_and_read(work, seconds=seconds)


def one_case(number, args):
    """-> the script and what was done; how it ended; what was printed"""
    rng = random.Random(f"{args.seed} {number}")
    name = rng.choice(args.scripts)
    shutil.rmtree("case", ignore_errors=True)
    shutil.copytree(".", "case", ignore=shutil.ignore_patterns("*.whole", "*.half", "case"))
    if name != "eval_linear":
        shutil.copytree(f"{name}.half", "case/run")
    with contextlib.chdir("case"):
        own = sorted(path for path in Path("run").rglob("[!.]*") if path.is_file())
        given = [Path("weights.pth"), *sorted(Path().glob("*.jpg"))[:3]]
        kind = rng.choice(("own", "given", "line", "killed"))
        if kind == "killed":
            what = kind
            run_script(name, rng.uniform(0, 3))
        elif kind == "line":
            what = wrong_line(rng)
            shutil.rmtree("run", ignore_errors=True)  # it had other numbers of captions
        else:
            what = damage(rng, rng.choice(own if own and kind == "own" else given))
        before = checkpoint_iteration()
        code, output = run_script(name, seconds=200)
        ending = "accepted"
        if Path("ran").exists():
            ending = "code"
        elif code is None:
            ending = "hang"
        elif before > checkpoint_iteration():
            ending = "lost"
        elif code and re.search("^error: .+$", output, re.M):
            ending = "refused"
        elif code:
            ending = "traceback" if kind == "own" else "unclear"
        elif kind == "killed" and name != "eval_linear" and not same_weights(name):
            ending = "lost"
        return f"{name}: {what}", ending, output


def checkpoint_iteration():
    with contextlib.suppress(Exception):  # there is none, or it cannot be read
        return torch.load("run/checkpoint.pth", weights_only=True)["iteration"]
    return 0


def same_weights(name):
    expected = torch.load(f"../{name}.whole/backbone.pth")
    run = torch.load("run/backbone.pth")
    return all(torch.equal(run[key], expected[key]) for key in expected)


def damage(rng, path):
    how = rng.choice(("flipped", "cut", "gone", "code"))
    content = path.read_bytes()
    first = rng.randrange(len(content) + 1)
    path.unlink()
    if how == "flipped":
        path.write_bytes(content[:first] + bytes(255 - byte for byte in content[first:]))
    elif how == "cut":
        path.write_bytes(content[:first])
    elif how == "code" and path.suffix == ".npz":
        np.savez(path, names=np.array([Touch()]))
    elif how == "code":
        torch.save({"model": Touch()}, path)
    return f"{path} {how}"


def wrong_line(rng):
    lines = Path("photos.jsonl").read_text().splitlines()
    n = rng.randrange(24)
    row = json.loads(lines[n])
    row[rng.choice(("image", "captions", "tags", "split", "other"))] = rng.choice(ODD)
    lines[n] = rng.choice([*NO_ROWS, *10 * [json.dumps(row)]])
    Path("photos.jsonl").write_text("\n".join(lines))
    return lines[n][:99]


if __name__ == "__main__":
    found = main(get_args())
    sys.exit(any(found[ending] for ending in ENDINGS[3:]))
