"""tools/: benchmark.py measures every method, plot.py draws; twelve cases of tests/fuzz.py."""

import json
import re

import fuzz
import pytest
import transformers
from conftest import NEEDS_PICTURES, fork_and_read, refusal, run_here
from conftest import one_split
from PIL import Image

from tools import benchmark, plot

IS_NO_FOLDER = "--output {tmp}/file cannot be a folder: File exists"
WRONG = [
    ("tools.crop_coco --output {tmp}/file", IS_NO_FOLDER),
    ("tools.crop_coco --root {tmp} --output {tmp}/a", "--root is the folder of COCO"),
    ("tools.crop_coco --margin -1", "--margin: invalid whole number (0 or more) value: '-1'"),
    ("tools.label_list --root {tmp} --output {tmp}/file/a.jsonl", IS_NO_FOLDER),
    ("tools.label_list --root {tmp} --output {tmp}",
     "must end in .jsonl, and must not be a folder"),
    ("tools.label_list --root {tmp} --output {tmp}/a.jsonl", "has only one class, images, so"),
    ("tools.make_shards --output {tmp}/file", IS_NO_FOLDER),
    ("downstream.tagging --tags {tmp}/none.json", "none.json is not a concepts.json of tp.py"),
]


def test_own_words(tmp_path):
    """The frequent nouns, verbs and adjectives; photos of the other split have them or not."""
    shared = {0: "a dog runs", 1: "a dog sits", 2: "a red ball"}
    rows = []
    for n in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
        captions = ["the photo"] + ([shared[n % 10]] if n % 10 in shared else [])
        split = "val" if n >= 30 else "train"
        rows.append({"image": f"{n}.png", "captions": captions, "split": split})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "words.jsonl"
    run_here(["tools.own_words", tmp_path / "a.jsonl", "--output", output])
    found = list(map(json.loads, output.read_text().splitlines()))
    assert [row["image"] for row in found] == [str(tmp_path / f"{n}.png") for n in range(30, 40)]
    assert found[0]["tags"][0] == "dog" and found[1]["tags"][0] == "dog"  # 20%; "photo" is in all
    assert {*found[2]["tags"]} == {"red", "ball"} and not any(row["tags"] for row in found[3:])
    assert sorted(row["split"] for row in found) == ["learn"] * 5 + ["score"] * 5


def test_benchmark_runs(monkeypatch):
    """Each method's step beside its floor, with a small BERT."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = transformers.BertConfig(vocab_size=10_000, intermediate_size=64, **sizes)
    monkeypatch.setattr(benchmark, "BERT_BASE", bert)
    monkeypatch.setattr(benchmark, "STEPS", 1)
    flags = "--arch resnet18 --image-size 32 --batch-size 8 --hidden 64 --rounds 1 --amp off"
    printed = run_here(["tools.benchmark", *flags.split()])
    found = re.findall("^(.{20}) +([0-9.]+) images/s *(.*)$", printed, re.M)
    speeds = {name.strip(): (float(speed), comment) for name, speed, comment in found}
    assert speeds.keys() == {*benchmark.METHODS, "bare backbone", "contrastive floor"}
    for method in benchmark.METHODS:
        name = "contrastive floor" if method == "mmcontrastive" else "bare backbone"
        (speed, comment), (floor, _) = speeds[method], speeds[name]
        share, text = comment.split("% of the ")
        assert text == name and float(share) == pytest.approx(100 * speed / floor, rel=0.05)


@NEEDS_PICTURES
def test_plot(tmp_path):
    """One panel per term that all runs have, also of validation alone; or those asked for."""
    rows = {"a": {"loss": 2.0, "ii": 1.0, "top1": 5}, "b": {"loss": 3.0, "validation_top1": 7}}
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        line = json.dumps({"iteration": 10, "lr": 0.1, **row})
        (tmp_path / name / "metrics.jsonl").write_text(f"{line}\n{line}\n")
    assert plot.read_run(tmp_path / "b")["validation_top1"] == ([10, 10], [7, 7])
    picture, other = tmp_path / "b" / "curves.png", tmp_path / "ii.png"
    command = ["tools.plot", tmp_path / "a", tmp_path / "b"]
    for more, terms in ([], "loss, top1 of 2"), (["--terms", "ii", "--output", other], "ii of 2"):
        assert run_here([*command, *more]).startswith(terms)
        assert Image.open(more[-1] if more else picture).width == 675 * (1 + terms.count(","))
    assert "metrics.jsonl is missing" in refusal(["tools.plot", tmp_path])


def test_crops_and_their_list(tmp_path):
    """crop_coco.py makes an image folder of COCO's objects, of which label_list.py draws some."""
    root, crops, lines = tmp_path / "coco", tmp_path / "crops", tmp_path / "list.jsonl"
    categories = [{"id": 3, "name": "dog"}, {"id": 5, "name": "cat"}]
    for split in ("train", "val"):
        objects = []
        for n, (category, crowd) in enumerate([(3, 0), (3, 0), (5, 0), (5, 1)]):
            row = {"id": n, "image_id": 7, "category_id": category, "iscrowd": crowd}
            objects.append({**row, "bbox": [10 + n, 20, 30, 15]})
        image = {"id": 7, "file_name": "7.jpg"}
        objects.append({**row, "id": 4, "image_id": 8, "iscrowd": 0})  # of no photo
        content = {"images": [image], "annotations": objects, "categories": categories}
        (root / f"{split}2017").mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(content))
        Image.new("RGB", (90, 60)).save(root / f"{split}2017/7.jpg")
    crop = ["tools.crop_coco", "--root", root, "--output", crops, "--margin", 5]
    counts = run_here(crop)
    assert "train: 3 crops written; 2 objects left out, which are crowds, or of a photo" in counts
    assert sorted(path.name for path in crops.glob("train/*/*")) == ["0.jpg", "1.jpg", "2.jpg"]
    width, height = Image.open(crops / "val/dog/1.jpg").size
    assert 30 <= width <= 41 and 15 <= height <= 26

    exif = Image.Exif()
    exif[0x0112] = 6  # boxes are of the photo that EXIF turns
    red = Image.new("RGB", (60, 90), (90, 90, 90))
    red.paste((250, 0, 0), (10, 20, 40, 35))
    red.transpose(Image.Transpose.ROTATE_90).save(root / "val2017/7.jpg", exif=exif, quality=95)
    run_here(["tools.crop_coco", "--root", root, "--output", tmp_path / "turned", "--margin", 0])
    seen = Image.open(tmp_path / "turned/val/dog/0.jpg").resize((1, 1)).getpixel((0, 0))
    assert seen == pytest.approx([250, 0, 0], abs=25)
    draw = ["tools.label_list", "--root", crops, "--output", lines, "--per-class"]
    assert "1 classes have fewer photos than --per-class, the first: cat\n" in run_here([*draw, 2])
    assert run_here([*draw, 1]).startswith("2 photos of 2 classes\n")
    train = one_split(str(lines))
    assert train.tag_names == ["cat", "dog"] and list(train.tags) == [["cat"], ["dog"]]


@pytest.mark.parametrize("command, message", WRONG)
def test_wrong_folders(command, message, tmp_path):
    for file in "train/images/cat/1.jpg", "train/images/dog/2.jpg", "file":
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = refusal(command.format(tmp=tmp_path).split())
    assert message.format(tmp=tmp_path) in found


def test_bad_input():
    """Damaged files, wrong lines and SIGKILL: nothing lost, no hang, no code run"""
    args = fuzz.get_args("--cases 12 --seed 1 --scripts tp eval_linear".split())
    code, printed = fork_and_read(fuzz.main, args)
    assert code == 0, printed
    counts = {ending: int(n) for n, ending in re.findall(r"(\d+) (\w+)", printed.splitlines()[-1])}
    assert sum(counts.values()) == 12 and counts["accepted"] and counts["refused"]
    assert not any(counts[ending] for ending in ("unclear", "hang", "code", "lost"))
