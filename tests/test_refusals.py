"""Everyday mistakes, each of which ends with one clear line.

What a directory with another run refuses stands in test_contracts.py.
"""

import json
import sys

import pytest
import torch
from conftest import SCRIPTS, refusal

import common

JSONL = '{"image": "photo.jpg", "captions": ["...", ...], "tags": ["...", ...]} on each line'
WRONG_LINE = "bad.jsonl, line 2: it needs \"image\", and \"captions\" instead of \"caption\". "

# After --data coco: flags, and words of the message.
ALL_SCRIPTS = [
    ("--data nonsense", "no data set nonsense: --data is shapes, coco, vg, a .jsonl"),
    ("--data missing.jsonl", "there is no file missing.jsonl"),
    ("--val-split val2014", "captions_val2014.json: see --root"),
    ("--data shapes", "--root is for other data than the built-in shapes: give --data, too"),
    ("--data shapes --root= --train-split test", "--data shapes has no split test"),
    ("--data {tmp}/bad.jsonl", WRONG_LINE + "Expected, in UTF-8: " + JSONL),
    ("--data {tmp}/gone.jsonl", "24 of 24 photos of train are missing: ['"),
    ("--data", "--data: expected one argument"),
    ("--batch 8", "--batch: did you mean --batch-size?"),
    ("--iters 5 --epochs 1", "give --iters or --epochs, not both"),
    ("--output {tmp}/bad.jsonl", "bad.jsonl cannot be a folder: File exists"),
]
INIT = [
    ("--init none.pth", "there is no file none.pth"),
    ("--init {tmp}/bad.jsonl", "bad.jsonl is cut off, or holds more than"),
    ("--init {tmp}/tiny.pth --arch resnet18", "tiny.pth holds no ResNet, VGG or ConvNeXt"),
    ("--init {tmp}/resnet18.pth", "resnet18.pth is a resnet18, not --arch resnet50"),
    ("--init {tmp}/wide.pth", "wide.pth is a wide_resnet50_2, not --arch resnet50"),
]
RANGES = [
    ("--batch-size 0", "--batch-size must be above 0, not 0"),
    ("--iters 0", "--iters must be above 0, not 0"),
    ("--epochs 0", "--epochs must be above 0, not 0"),
    ("--lr nan", "--lr must be above 0, not nan"),
    ("--warmup 500", "--warmup must be at least 0 and below 1, not 500"),
    ("--crop-min 20", "--crop-min must be above 0 and at most 1, not 20"),
    ("--colour-jitter -1", "--colour-jitter must be at least 0, not -1"),
    ("--weight-decay -1", "--weight-decay must be at least 0, not -1"),
    ("--seed -1", "--seed must be at least 0, not -1"),
    ("--workers -1", "--workers must be at least 0, not -1"),
    ("--accumulate 0", "--accumulate must be above 0, not 0"),
    ("--log-every 0", "--log-every must be above 0, not 0"),
    ("--checkpoint-every 0", "--checkpoint-every must be above 0, not 0"),
    ("--image-size 0", "--image-size must be above 0, not 0"),
]
NO_CAPTIONS = "no photo has a caption. A .jsonl has " + JSONL
ONE_SCRIPT = {
    "virtex": [
        ("--dropout 10", "--dropout must be at least 0 and below 1, not 10"),
        ("--fraction 50", "--fraction must be above 0 and at most 1, not 50"),
        ("--captions-per-image 0", "--captions-per-image must be above 0, not 0"),
        ("--task tagging", "--task: invalid choice: 'tagging'"),
        ("--hidden 100", "--hidden 100 must be a multiple of 64"),
        ("--data {tmp}/photos.jsonl", NO_CAPTIONS),
        ("--data vg", "there is no datasets/vg/image_data.json: --root is the folder of Visual"),
    ],
    "tp": [
        *INIT,
        ("--lm /no/model --labels cluster", "--lm /no/model"),
        ("--labels instances --num-labels 5", "--num-labels"),
        ("--num-labels -3", "--num-labels must be above 0, not -3"),
        ("--warmup 500", "--warmup must be at least 0 and below 1, not 500"),
        ("--data {tmp}/photos.jsonl", "captions"),
        ("--data {tmp}/photos.jsonl --labels instances", "--labels instances needs two tags"),
    ],
    "icmlm": [
        *INIT,
        ("--lambda-tp -1", "--lambda-tp must be at least 0, not -1"),
        ("--layers 0", "--layers must be above 0, not 0"),
        ("--heads 0", "--heads must be above 0, not 0"),
        ("--warmup-attention 1", "--warmup-attention must be at least 0 and below 1, not 1"),
        ("--lm /no/model", "--lm /no/model"),
        ("--data {tmp}/photos.jsonl", NO_CAPTIONS),
    ],
    "mmcontrastive": [
        ("--batch-size 12", "12 cannot be split into --bn-splits 8 groups of 2 or more"),
        ("--lambda-ii 0 --lambda-tag 0 --lambda-ic 0 --lambda-ci 0", "nothing trains the backbone"),
        ("--lambda-ic 0", "--lambda-ic and --lambda-ci go together"),
        ("--data {tmp}/photos.jsonl", "no photo has a caption: with --lambda-cc 0"),
        ("--arch vgg16_bn", "--arch: invalid choice: 'vgg16_bn'"),
        ("--caption-views backtranslation", "--caption-views sibling needs none"),
        ("--batch-size 512", "24 photos are fewer than"),
        ("--lm /no/model", "--lm /no/model"),
    ],
    "eval_linear": [
        ("--epochs 5", "--protocol svm-virtex takes no --epochs"),
        ("--lr 1", "--protocol svm-virtex takes no --lr"),
        ("--protocol sgd-mct", "--protocol sgd-mct needs one label per photo: --data folder"),
    ],
}
ROWS = [(script, *row) for script in SCRIPTS for row in ALL_SCRIPTS + RANGES]
ROWS += [(script, *row) for script, rows in ONE_SCRIPT.items() for row in rows]


@pytest.fixture(scope="module")
def wrong_files(coco_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    photos = [{"image": str(path)} for path in (coco_folder / "train2017").iterdir()]
    gone = [{"image": row["image"] + ".gone", "split": "train"} for row in photos]
    files = {"photos": photos, "gone": gone, "bad": [photos[0], {"captions": ["a dog"]}]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.save({"w": torch.zeros(1)}, folder / "tiny.pth")
    common.save_weights(folder / "resnet18.pth", common.build_backbone("resnet18"))
    with torch.device("meta"):  # the same names as resnet50, other shapes, and a small file
        wide = common.build_backbone("wide_resnet50_2").state_dict()
    small = {name: torch.zeros((), dtype=x.dtype).expand(x.shape) for name, x in wide.items()}
    torch.save(small, folder / "wide.pth")
    return folder


@pytest.mark.parametrize("script, flags, words", ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_mistakes(
    script, flags, words, coco_folder, wrong_files, tmp_path, monkeypatch, no_training
):
    monkeypatch.setitem(sys.modules, "spacy", None)  # as if it were not installed
    data = ["--data", "coco", "--root", coco_folder]
    if script == "mmcontrastive":
        data += ["--caption-views", "sibling", "--batch-size", 16]
    if ".jsonl" in flags and "--data" in flags or "--data vg" in flags:
        data = []
    given = flags.format(tmp=wrong_files).split()
    command = [f"{script}.py", *data, "--workers", 0, "--output", tmp_path / "run", *given]
    assert words in refusal(command)


RANDOM = "--weights random --arch resnet18"
DOWNSTREAM = [  # words of the message after --output, which is a file
    f"tagging {RANDOM}",
    f"zeroshot {RANDOM}",
    f"retrieval {RANDOM}",
    "captioning photo.jpg",
    "masked_words --photos 1",
    "search dog",
    "classify",
]


TRAINED_DOWNSTREAM = [f"downstream.{name} {RANDOM}" for name in ("finetune", "detection")]


@pytest.mark.parametrize("words", DOWNSTREAM)
def test_output_that_is_a_file(words, wrong_files, monkeypatch):
    monkeypatch.chdir(wrong_files)
    (wrong_files / "photo.jpg").touch()
    command = [f"downstream.{words.split()[0]}", *words.split()[1:], "--output", "bad.jsonl"]
    assert "--output bad.jsonl cannot be a folder: File exists" in refusal(command)


@pytest.mark.parametrize("command", [f"{script}.py" for script in SCRIPTS] + TRAINED_DOWNSTREAM)
def test_a_batch_that_cannot_be_divided(command, monkeypatch, tmp_path):
    if "detection" in command:
        pytest.importorskip("pycocotools")
    monkeypatch.setattr(common, "world_size", lambda: 2)
    flags = "--batch-size", 18, "--accumulate", 6, "--output", tmp_path
    message = "--batch-size 18 cannot be divided by processes times --accumulate"
    assert message in refusal([*command.split(), *flags])
