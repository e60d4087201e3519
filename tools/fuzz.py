"""Bad input on purpose: how the scripts end when files are damaged, flags odd, and signals come.

    python tools/fuzz.py                          # a minute
    python tools/fuzz.py --minutes 20 --seed 1
    python tools/fuzz.py --kind kill --script tp  # only SIGKILL, only of tp.py
    python tools/fuzz.py --seed 1 --case 17       # one case again, with all that it prints

A case is drawn from the seed and its number. It begins with a copy of a small training run, half
done; then a file is damaged, a flag gets an odd value, or the process gets a signal at a random
moment. How it ended is counted, for each script:

    accepted     the run went on and ended
    refused      one line that says what is wrong
    traceback    the words of an error of Python, which no user should see       a defect
    hang         it neither ended in time nor after SIGTERM                      a defect
    lost         a good checkpoint is gone, or a run goes on to other weights    a defect
"""

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
os.environ["OMP_NUM_THREADS"] = "1"  # cases are processes forked from this one: no threads in it
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import common
import eval_linear
import icmlm
import mmcontrastive
import tp
import virtex

DEFECTS = "traceback", "hang", "lost"
SHARED = "--data photos.jsonl --image-size 32 --batch-size 8 --workers 0 --amp off --iters 4"
SHARED += " --checkpoint-every 2 --log-every 1"
WORDS = "--caption", "a red ball on grass", "--word", "ball"
PHOTO = "0.jpg"
TINY_BERT = "--lm-iters 2 --lm-layers 1 --lm-width 64 --queue 8"
# fmt: off
SCRIPTS = {  #       module         small sizes                               use of a trained model
    "virtex":        (virtex,        "--hidden 64 --vocab-size 60",           ("--caption", PHOTO)),
    "tp":            (tp,            "--num-labels 9",                        ("--predict", PHOTO)),
    "icmlm":         (icmlm,         "--lm-iters 2",             ("--explain", PHOTO, *WORDS)),
    "mmcontrastive": (mmcontrastive, TINY_BERT, ("--search", "ball")),
    "eval_linear":   (eval_linear,   "--data folder --root labelled --image-size 32", ()),
}
# fmt: on
NUMBERS = "0", "-1", "1", "2", "3", "7", "64", "0.5", "1.5", "1e-9", "100000", "1000000000000"
ODD = *NUMBERS, *"nan inf -inf x ü photos.jsonl labelled /dev/null no".split(), "", " "
JSON = None, True, 0, -1, 1.5, "", "x", [], {}, [None], ["", ""], [[1]], {"x": 1}, "9" * 5000


NO_ROWS = "{", "[" * 10_000, "null", "9" * 5000, "\0\0", '{"image": NaN}', "[]"


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=common.positive, default=1.0, help="how long")
    add("--seed", type=common.seed_number, default=0, help="of the cases")
    add("--case", type=common.natural, help="only this one, with its output")
    add("--script", choices=SCRIPTS, nargs="+", default=list(SCRIPTS), help="only of these")
    add("--seconds", type=common.positive, default=30.0, help="until a case is told to end")
    add("--kind", choices=KINDS, nargs="+", default=list(KINDS), help="only of these")
    return parser.parse_args(argv)


def main(args):
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        make_data(random.Random(0))
        bases = {name: make_base(name) for name in dict.fromkeys(["tp", *args.script])}
        counts, stop = {name: Counter() for name in args.script}, time.time() + 60 * args.minutes
        bar, number = common.progress(desc="fuzz", unit=" cases"), args.case or 0
        while time.time() < stop:
            how, name, line, output = one_case(number, bases, args)
            counts[name][how] += 1
            if how in DEFECTS or args.case is not None:
                common.say(f"case {number}, {name}, {line}: {how}\n{output[-3000:]}")
            if args.case is not None:
                break
            bar.update()
            number += 1
        bar.close()
        os.chdir(REPO)
    columns = "accepted", "refused", *DEFECTS
    common.say(f"{'':14}" + "".join(f"{how:>11}" for how in columns))
    for name, found in counts.items():
        common.say(f"{name:14}" + "".join(f"{found[how]:11}" for how in columns))
    if any(found[how] for found in counts.values() for how in DEFECTS):
        sys.exit(1)


# ------------------------------------------------------------------------- what cases begin with


def make_data(rng):
    """photos.jsonl of 24 photos with captions and tags, and the same photos in class folders"""
    lines = []
    for n in range(24):
        colour, thing = rng.choice(["red", "green"]), rng.choice(["ball", "dog"])
        pixels = np.random.default_rng(n).integers(0, 255, (40, 48, 3), np.uint8)
        image = Image.fromarray(pixels)
        image.save(f"{n}.jpg")
        for split in ("train", "val"):
            path = Path("labelled", split, thing)
            path.mkdir(parents=True, exist_ok=True)
            image.save(path / f"{n}.png")
        captions = [f"a {colour} {thing} on grass", f"one small {thing} in front of a tree"]
        row = {"image": f"{n}.jpg", "captions": captions, "tags": [thing, colour]}
        lines.append(json.dumps({**row, "split": "train" if n < 16 else "val"}))
    Path("photos.jsonl").write_text("\n".join(lines) + "\n")


def make_base(name):
    """A run that has ended, in NAME.whole, and the same half done, in NAME.half -> its flags"""
    module, sizes, _ = SCRIPTS[name]
    if name == "eval_linear":
        flags = ["--weights", "tp.whole/backbone.pth", *sizes.split()]
    else:
        flags = [*SHARED.split(), *sizes.split()]
    for folder, stop, ending in (("whole", None, 0), ("half", 2, 128 + signal.SIGTERM)):
        argv = [*flags, "--output", f"{name}.{folder}"]
        code, output = in_a_child(module, argv, 600, None if name == "eval_linear" else stop)
        good = code == (0 if name == "eval_linear" else ending)
        common.check(good, f"the run to begin with ended with {code}:\n{output}")
    return flags


def in_a_child(module, argv, seconds, stop=None, signals=()):
    """Run a script in a forked process -> (exit code, or None if it hung; what it printed)

    stop: SIGTERM after this iteration.  signals: (seconds, number), sent at these times.
    """
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os._exit(script_in_this_process(module, argv, stop))
        start, code = time.time(), None
        pending = [*signals, (seconds, signal.SIGTERM), (seconds + 20, signal.SIGKILL)]
        while code is None:
            time.sleep(0.005)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif pending and time.time() - start > pending[0][0]:
                os.kill(child, pending.pop(0)[1])
        file.seek(0)
        return (code if pending else None), file.read().decode(errors="replace")


def script_in_this_process(module, argv, stop):
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # 16 GiB: sizes that no machine has
    sys.argv = [module.__file__, *argv]
    tqdm._instances.clear()  # the bar of the fuzzing is not of this process
    tqdm.set_lock(threading.RLock())  # nor its lock: a killed child would never give it back
    torch.set_num_threads(1)
    if stop:
        log = common.Run.log

        def log_and_stop(run, *scores, **values):
            log(run, *scores, **values)
            if run.iteration == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        common.Run.log = log_and_stop
    code = 0
    try:
        common.run(module.main, module.get_args)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


# ------------------------------------------------------------------------------------------ cases


def one_case(number, bases, args):
    """-> how it ended, the script, what was done in words, what was printed"""
    rng = random.Random(f"{args.seed} {number}")
    name = rng.choice(args.script)
    module, _, use = SCRIPTS[name]
    shutil.rmtree("case", ignore_errors=True)
    shutil.copytree(".", "case", ignore=shutil.ignore_patterns("*.whole", "*.half", "case"))
    run = Path("case", "run")
    shutil.copytree(f"{name}.half", run)
    shutil.copytree("tp.whole", "case/tp.whole", copy_function=os.link)
    os.chdir("case")
    try:
        argv, line, signals = KINDS[rng.choice(args.kind)](rng, name, list(bases[name]), use)
        before = checkpoint_iteration()
        code, output = in_a_child(module, argv, args.seconds, signals=signals)
        after = checkpoint_iteration()
        if signals and code is not None:  # the same command goes on
            code, output = in_a_child(module, argv, args.seconds)
            if code == 0 and name != "eval_linear" and not same_weights(f"../{name}.whole"):
                return "lost", name, line, output
        if code is None:
            return "hang", name, line, output
        if "Traceback" in output:
            return "traceback", name, line, output
        if before and (after or 0) < before and "--fresh" not in argv:
            return "lost", name, line, output
        if code in (0, 128 + signal.SIGTERM, -signal.SIGTERM):  # told to end after --seconds
            return "accepted", name, line, output
        refused = re.search(r"(^|\r *)(error: .+|interrupted)$", output, re.M)
        return "refused" if refused else "traceback", name, line, output
    finally:
        os.chdir("..")


def checkpoint_iteration():
    """The iteration of the checkpoint of the case, None if there is none or it cannot be read"""
    path = Path("run/checkpoint.pth")
    try:
        return int(torch.load(path, weights_only=True)["iteration"]) if path.is_file() else None
    except Exception:
        return None


def same_weights(whole):
    one, other = (torch.load(Path(folder, "backbone.pth")) for folder in ("run", whole))
    return all(torch.equal(value, other[key]) for key, value in one.items())


def going_on(flags):
    return [*flags, "--output", "run"]


def damaged_file(rng, name, flags, use):
    """Bytes of a file are flipped, zeroed, cut off or repeated, or it is gone or a folder."""
    files = [path for path in Path(".").rglob("*") if path.is_file()]
    run = [path for path in files if path.parts[0] in ("run", "tp.whole", "cache")]
    path = rng.choice(run if rng.random() < 0.7 else files)
    content, how = bytearray(path.read_bytes()), rng.choice(DAMAGES)
    path.unlink()
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice((1, 16, 4096)))
    if how == "flipped":
        for n in range(at, end):
            content[n] ^= 1 << rng.randrange(8)
    elif how == "zeroed":
        content[at:end] = bytes(end - at)
    elif how == "cut":
        del content[at:]
    elif how == "repeated":
        content[at:at] = content[at:end]
    elif how == "emptied":
        content.clear()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how != "gone":
        path.write_bytes(content)
    argv = going_on(flags)
    if use and rng.random() < 0.4:
        argv = [*use, "--weights", "run/checkpoint.pth", "--output", "used", "--workers", "0"]
    return argv, f"{path} {how}", ()


DAMAGES = "flipped", "zeroed", "cut", "repeated", "emptied", "gone", "a folder", "a pipe"


def odd_flag(rng, name, flags, use):
    """A flag of the script gets a value that it may not expect."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        SCRIPTS[name][0].get_args(["--weights", "x", "--arch", "resnet18", "--help"])
    known = sorted(set(re.findall(r"^ +(--[a-z-]+)", text.getvalue(), re.M)) - {"--help"})
    flag = rng.choice(known)
    given = rng.choice(([], [rng.choice(ODD)], [rng.choice(ODD)], [rng.choice(ODD)]))
    line = " ".join([flag, *given])
    return [*going_on(flags), "--seed", str(rng.randrange(2)), flag, *given], line, ()


def odd_checkpoint(rng, name, flags, use):
    """An entry of the checkpoint is missing, of another type or shape, or not finite."""
    path = Path("tp.whole/backbone.pth" if name == "eval_linear" else "run/checkpoint.pth")
    content = torch.load(path, weights_only=True)
    place, keys = content, []
    while isinstance(place, dict) and place and (not keys or rng.random() < 0.8):
        keys.append(rng.choice(list(place)))
        parent, place = place, place[keys[-1]]
    if torch.is_tensor(place) and rng.random() < 0.7:
        x = place.float()
        others = x[..., None], x.flatten()[:1], x * float("nan"), -x.abs(), x.to_sparse(), x.half()
        value = rng.choice((*others, torch.empty_like(x, device="meta"), torch.zeros(0)))
    else:
        value = rng.choice((*JSON, torch.zeros(2), "gone"))
    line = f"{path} {keys} = {str(value)[:60]}"
    if isinstance(value, str) and value == "gone":
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = value
    path.unlink()
    torch.save(content, path)
    argv = going_on(flags)
    if use and rng.random() < 0.5:
        argv = [*use, "--weights", str(path), "--output", "used", "--workers", "0"]
    return argv, line, ()


def odd_line(rng, name, flags, use):
    """A line of photos.jsonl has an entry of another kind, or is no JSON."""
    path = Path("photos.jsonl")
    lines = path.read_text().splitlines()
    n = rng.randrange(len(lines))
    row, key = json.loads(lines[n]), rng.choice(("image", "captions", "tags", "split", "other"))
    if rng.random() < 0.3:
        lines[n] = rng.choice(NO_ROWS)
    else:
        row[key] = rng.choice(JSON)
        lines[n] = json.dumps(row)
    path.write_text("\n".join(lines))
    fresh = [] if name == "eval_linear" else ["--fresh"]  # its photos are other files
    return [*going_on(flags), *fresh], lines[n][:99], ()


def killed(rng, name, flags, use, numbers=(signal.SIGKILL,)):
    """A signal at a random moment; then the same command goes on, to the same weights."""
    after, number = rng.uniform(0, 3), rng.choice(numbers)
    return going_on(flags), f"{number.name} after {after:.2f} s", ((after, number),)


def stopped(*given):
    return killed(*given, numbers=(signal.SIGTERM, signal.SIGINT))


KINDS = {"file": damaged_file, "flag": odd_flag, "entry": odd_checkpoint, "line": odd_line,
         "kill": killed, "stop": stopped}  # fmt: skip

if __name__ == "__main__":
    common.run(main, get_args)
