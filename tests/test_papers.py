"""papers/: commands of *.sh are parsed, results kept, a table comes out; crops, lists of photos"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, one_split, refusal, run_here
from PIL import Image


TABLES = "virtex", "icmlm", "contrastive"
# In place of python and torchrun: it writes down its arguments, and makes the files that the shell
# scripts look for. The mAP of --weights A B is 60 and 59, and the seed more.
STAND_IN = r"""#!/bin/sh
case $1 in -c | -) exec "$REAL_PYTHON" "$@" ;; esac
printf '%s\0' "${0##*/}" "$@" END >> "$LOG"
if [ -n "$WAIT" ]; then
    trap "exit 1" INT  # as our scripts do
    sleep 100
fi
for word; do
    case $flag in
        --output) output=$word ;;
        --seed) seed=$word ;;
    esac
    flag=$word
done
[ -z "$FAIL" ] || case $output in *"$FAIL"*) exit 1 ;; esac
case $output in *.jsonl) : > "$output"; exit ;; esac
score=60
for word; do
    case $word in --*) flag=$word; continue ;; esac
    [ "$flag" = --weights ] || continue
    scores="$scores, \"$word\": {\"mean\": {\"mAP\": $((score + seed))}}"
    score=59
done
mkdir -p "$output"
echo "{\"backbones\": {${scores#, }}}" > "$output/result.json"
case " $* " in *" --keep-every "*)
    echo 5 > "$output/model_5.pth"
    echo 10 > "$output/model_10.pth"
esac
"""


class Shell:
    """Runs papers/*.sh, with stand-ins, in a folder with a space, a ; and a quote in its name."""

    def __init__(self, folder):
        self.folder = folder / "it's; here"
        self.log = folder / "log"
        self.out = self.folder / "my runs"
        (folder / "bin").mkdir()
        self.folder.mkdir()
        for name in "python", "torchrun":
            path = folder / "bin" / name
            path.write_text(STAND_IN)
            path.chmod(0o755)
        self.env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "REAL_PYTHON": sys.executable}
        self.env |= {"LOG": str(self.log), "OUT": str(self.out)}
        self.env |= {"DATA": f"{self.folder}/data sets", "PHOTO": f"{self.folder}/a photo.jpg"}

    def start(self, name, *given, **env):
        self.log.write_text("")
        return subprocess.Popen(
            ["bash", ROOT / f"papers/{name}.sh", *map(str, given)],
            env={**os.environ, **self.env, **env}, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def commands(self):
        """-> [its words] of each command that was started"""
        return [words.split("\0") for words in self.log.read_text().split("\0END\0")[:-1]]

    def run(self, name, *given, **env):
        """-> commands, exit status, standard output, standard error"""
        process = self.start(name, *given, **env)
        printed, errors = process.communicate()
        return self.commands(), process.returncode, printed, errors

    def parsed(self, words):
        """-> launcher, script, args by its own get_args"""
        launcher, *words = words
        while words[0] in ("--nproc_per_node=8", "-m"):
            words = words[1:]
        script = words[0].removeprefix(f"{ROOT}/papers/../")
        for word in words:  # no path was cut into pieces
            assert str(self.folder) not in word or word.startswith(str(self.folder))
            assert word not in ("here", "sets", "runs") and not word.startswith("here/")
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        return launcher, script, module.get_args(words[1:])


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def test_tables(shell):
    """All commands are parsed; TP runs in one process.

    What a command reads of other runs was made before, and no two commands have one output.
    """
    commands = []
    for name in TABLES:
        found, code, printed, errors = shell.run(name)
        assert code == 0 and errors == "" and "another command" not in printed
        commands += found

    for path in shell.out.glob("*/*.pth"):  # they hold nothing that a parser could read
        path.unlink()
    made = set()
    for words in commands:
        launcher, script, args = shell.parsed(words)
        assert launcher == "python" or script != "tp.py"
        assert launcher == "torchrun" or script not in ("virtex.py", "icmlm.py", "mmcontrastive.py")
        read = {word for word in words[:-1] if word.startswith(f"{shell.out}/")}
        read = {re.sub(r"/(backbone|best|checkpoint|model_\d+)\.pth$", "", word) for word in read}
        assert read <= made, words
        assert args.output not in made
        made.add(args.output)
    assert len(made) > 400


def test_selection(shell):
    """`best` takes the kept model that is best on VOC07; the measures are of it."""
    commands, *_ = shell.run("virtex", "virtex")
    best = shell.out / "virtex/best.pth"
    assert best.read_text() == "10\n"
    measures = commands[2:]
    assert len(measures) == 8 and all(str(best) in words for words in measures)


def test_failures(shell):
    """A row that fails does not stop the others, and is named; so is a run that no row has."""
    given = "tp-labels", "tp", "nonsense"
    commands, code, _, errors = shell.run("icmlm", *given, FAIL="tp-labels")
    outputs = [words[-1].removeprefix(f"{shell.out}/") for words in commands]
    assert outputs[0] == "tp-labels" and outputs[-1] == "tp/coco-icmlm"
    assert code == 1 and "no row has a run nonsense" in errors
    assert errors.splitlines()[-1].startswith(f"# FAILED: {shell.out}/tp-labels")


def test_interrupted(shell):
    """A training that was interrupted after a validation is started again."""
    run = shell.out / "tp"
    run.mkdir(parents=True)
    for file in "result.json", "args.json":
        (run / file).touch()
    assert len(shell.run("icmlm", "tp")[0]) == 4
    (run / "backbone.pth").touch()
    commands, _, printed, _ = shell.run("icmlm", "tp", DATA="elsewhere")
    assert not commands and "has the result of another command: python tp.py" in printed


def test_ctrl_c(shell):
    """It ends the shell script, too, although the command that it reaches exits by itself."""
    process = shell.start("icmlm", WAIT="yes")
    while not shell.commands() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and len(shell.commands()) == 1


@pytest.mark.parametrize("name", TABLES)
def test_rows(name):
    """Each row has a cell for each column of its table's heading."""
    text = (ROOT / f"papers/{name}.sh").read_text()
    tables = re.findall(r"^# ----- (.*)\n((?:.+\n)+)", text, re.M)
    assert len(tables) > 5
    for heading, body in tables:
        columns = heading.split(" | ")[1:]
        rows = [row.split(" |") for row in re.findall(r"^.*?# ([^#\n]+ \|.*)", body, re.M)]
        assert rows and all(len(row) == 1 + len(columns) for row in rows), heading


def test_compare(shell):
    """All methods see as many photos, and are measured on each set; the table has all scores."""
    sets = shell.folder / "flowers", shell.folder / "a; b"
    for folder in sets:
        folder.mkdir()
    photos = shell.folder / "my photos.jsonl"
    photos.touch()
    given = [photos, *sets, "--", "--arch", "resnet50"]
    commands, code, printed, errors = shell.run("compare", *given, SEEDS="0 1", SEEN="6400")
    assert code == 0 and errors == ""
    seen, measured = {}, []
    for words in commands:
        _, script, args = shell.parsed(words)
        if script in ("virtex.py", "tp.py", "icmlm.py", "mmcontrastive.py"):
            assert args.arch == "resnet50" and args.seed == int(args.output.split("/seed-")[1][0])
            start = (args.init or "").removesuffix("/backbone.pth")
            seen[args.output] = 64 * args.iters + seen.get(start, 0)
        elif script == "eval_linear.py":
            measured.append(args.output)
    parts = {name: n for name, n in seen.items() if name.endswith(("/tp-half", "/language-model"))}
    assert {*parts.values()} == {3200, 64}
    assert {n for output, n in seen.items() if output not in parts} == {6400}
    table = printed.split("|  | on flowers | on a; b | mean | own words |\n")[1]
    rows = table.splitlines()[1:]
    assert rows[0] == "| random | 60.5 ± 0.7 | 60.5 ± 0.7 | 60.5 ± 0.7 | 60.5 ± 0.7 |"
    assert rows[1] == "| imagenet | 60.0 | 60.0 | 60.0 | 60.0 |"
    assert rows[-1] == "| supervised | 60.5 ± 0.7 | 60.5 ± 0.7 | 60.5 ± 0.7 |  |"
    assert len(rows) == 12 and len(measured) == 2 * (3 * 10 + 2) + 3
    assert not shell.run("compare", *given, SEEDS="0 1", SEEN="6400")[0]


def test_compare_without_a_score(shell):
    """A mean is over all sets, or there is none."""
    (shell.folder / "a").mkdir()
    (shell.folder / "b").mkdir()
    _, code, printed, _ = shell.run("compare", "a", "a", "b", FAIL="tp/on b")
    assert "\n| tp | 60.0 |  |  | 60.0 |\n" in printed and code == 1


def test_compare_refuses(shell):
    (shell.folder / "a").mkdir()
    for given, message in [
        (["a", "a", "../it's; here/a"], "the table cannot tell folders of one name apart: a"),
        (["a", "c"], "there is no c"),
        (["a", "--", "a"], "give captioned photos and labelled folders: "),
    ]:
        commands, code, _, errors = shell.run("compare", *given)
        assert not commands and code == 2 and errors.startswith(f"error: {message}")


def test_crops_and_their_list(tmp_path):
    """crop_coco.py makes an image folder of COCO's objects, of which label_list.py draws some."""
    root, crops, lines = tmp_path / "coco", tmp_path / "crops", tmp_path / "list.jsonl"
    categories = [{"id": 3, "name": "dog"}, {"id": 5, "name": "cat"}]
    for split in ("train", "val"):
        objects = []
        for n, (category, crowd) in enumerate([(3, 0), (3, 0), (5, 0), (5, 1)]):
            row = {"id": n, "image_id": 7, "category_id": category, "iscrowd": crowd}
            objects.append({**row, "bbox": [10 + n, 20, 30, 15]})
        objects[1]["bbox"] = [41, 35, -30, -15]  # corners in another order
        image = {"id": 7, "file_name": "7.jpg"}
        content = {"images": [image], "annotations": objects, "categories": categories}
        (root / f"{split}2017").mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(content))
        Image.new("RGB", (90, 60)).save(root / f"{split}2017/7.jpg")
    crop = ["papers.crop_coco", "--root", root, "--output", crops, "--margin", 5]
    counts = run_here(crop)
    assert "train: 3 crops written\n" in counts
    assert "_train2017.json: 1 of 4 annotations are crowds (iscrowd 1): not learned" in counts
    assert sorted(path.name for path in crops.glob("train/*/*")) == ["1.jpg", "2.jpg", "3.jpg"]
    width, height = Image.open(crops / "val/dog/2.jpg").size
    assert 30 <= width <= 41 and 15 <= height <= 26

    exif = Image.Exif()
    exif[0x0112] = 6  # boxes are of the photo that EXIF turns
    red = Image.new("RGB", (60, 90), (90, 90, 90))
    red.paste((250, 0, 0), (10, 20, 40, 35))
    red.transpose(Image.Transpose.ROTATE_90).save(root / "val2017/7.jpg", exif=exif, quality=95)
    run_here(["papers.crop_coco", "--root", root, "--output", tmp_path / "turned", "--margin", 0])
    seen = Image.open(tmp_path / "turned/val/dog/1.jpg").resize((1, 1)).getpixel((0, 0))
    assert seen == pytest.approx([250, 0, 0], abs=25)

    draw = ["papers.label_list", "--root", crops, "--output", lines, "--per-class"]
    assert "1 classes have fewer photos than --per-class, the first: cat\n" in run_here([*draw, 2])
    assert run_here([*draw, 1]).startswith("2 photos of 2 classes\n")
    train = one_split(str(lines))
    assert train.tag_names == ["cat", "dog"] and list(train.tags) == [["cat"], ["dog"]]


def test_crops_without_annotations(tmp_path):
    crop = ["papers.crop_coco", "--root", tmp_path, "--output", tmp_path / "a"]
    assert f"{tmp_path}/annotations/instances_train2017.json: see --root" in refusal(crop)
