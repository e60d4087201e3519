"""Command lines that are refused, each with one line that says what is wrong (DESIGN Sec. 8).

Data, weights and photos that are refused stand with what refuses them, in the other tests.
"""

import importlib
import json

import pytest
from conftest import SCRIPTS, refusal

import common

every_script = pytest.mark.parametrize("script", SCRIPTS)

# Beside --data coco: flags, and words of the message.
ALL_SCRIPTS = [
    ("--data nonsense", "--data nonsense is unknown"),
    ("--data missing.jsonl", "missing.jsonl not found"),
    ("--root no/such/folder", "no/such/folder/annotations/captions_train2017.json not found"),
    ("--val-split val2014", "captions_val2014.json not found"),
    ("--weights x.pth", "--weights FILE go"),  # "goes with", or "go together"
]
SGD = "--recipe demo --optimizer sgd --lr 0.1"
ONE_SCRIPT = {
    "virtex": [
        # Of code that all scripts share
        ("--data", "argument --data: expected one argument"),
        ("--data shapes --train-split test", 'has the splits "train" and "val", not "test"'),
        ("--recipe tiny", "--recipe tiny is unknown"),
        ("--batch 8", "unrecognized arguments: --batch 8"),
        ("--arch resnet34", "argument --arch: invalid choice"),
        ("--batch-size 100000000", "argument --batch-size: 100000000 is not from 1 to 65536"),
        ("--image-size 100000", "argument --image-size: 100000 is not from 1 to 4096"),
        ("--seed 8388608", "argument --seed: 8388608 is not from 0 to 8388607"),
        ("--arch vgg16 --image-size 16", "--arch vgg16 halves a photo five times"),
        ("--iters 5 --epochs 1", "give --iters or --epochs, not both"),
        ("--amp fp8", "argument --amp: invalid choice"),
        ("--probe-root folder", "--probe-root goes with --probe-data"),
        # Its own
        ("--output /dev/null/run", "/dev/null/run: Not a directory"),
        ("--task tagging", "argument --task: invalid choice"),
        ("--hidden 100", "--hidden 100 must be a multiple of 64"),
        ("--vocab-size 3", "no tokenizer of 3 tokens can be trained"),
        ("--tokenizer none.model", "none.model not found"),
        ("--max-length 2", "--max-length must be at least 3"),
        ("--caption photo.jpg", "--weights FILE goes with --caption IMAGE"),
        ("--evaluate", "--weights FILE goes with --caption IMAGE... or --evaluate"),
        ("--caption a.jpg --evaluate --weights x.pth", "not allowed with argument --caption"),
        ("--caption photo.jpg --weights none.pth", "none.pth not found"),
    ],
    "tp": [
        ("--num-labels 1", "argument --num-labels: 1 is not 2 or more"),
        ("--labels instances --num-labels 5", "--num-labels goes with postag, cluster, lda"),
        ("--labels cluster --lm /no/model", "--lm /no/model: no such folder"),
        ("--init none.pth", "none.pth not found"),
        ("--optimizer radam", "--optimizer radam needs its own --lr"),
        ("--steps 0.5", "--steps goes with --optimizer radam"),
        ("--predict photo.jpg", "--weights FILE goes with --predict"),
        ("--predict photo.jpg --weights none.pth", "none.pth not found"),
    ],
    "icmlm": [
        ("--lm /no/model", "--lm /no/model: no such folder"),
        ("--init none.pth", "none.pth not found"),
        ("--recipe demo --optimizer sgd", "--optimizer sgd needs its own --lr"),
        (f"{SGD} --steps 0.5", "--steps goes with --optimizer radam"),
        ("--explain photo.jpg", "--weights FILE go together"),
        ("--explain photo.jpg --caption dog --word dog --weights none.pth", "none.pth not found"),
    ],
    "mmcontrastive": [
        ("--lm-width 100", "--lm-width 100 must be a multiple of 64"),
        ("--lm scratch --caption-views same --dropout 0", "same needs --dropout above 0"),
        ("--unified-mlp", "--intra-dim and --inter-dim must be equal"),
        ("--queue 511", "--queue 511 must hold at least one batch of 512"),
        (
            "--batch-size 12 --bn-splits 8",
            "12 cannot be split into --bn-splits 8 groups of two or more",
        ),
        ("--batch-size 8 --bn-splits 8", "--batch-size 8 cannot be split"),
        ("--lambda-ii 0 --lambda-tag 0 --lambda-ic 0 --lambda-ci 0", "give --lambda-ii"),
        ("--lambda-ic 0", "--lambda-ic and --lambda-ci go together"),
        ("--lambda-ci 0", "--lambda-ic and --lambda-ci go together"),
        ("--recipe demo --optimizer sgd --lr 0.1", "--optimizer sgd needs its own --text-lr"),
        ("--search dog", "--weights FILE goes with --search"),
        ("--search dog --weights x.pth --backtranslate", "not allowed with argument --search"),
        ("--search dog --weights none.pth", "none.pth not found"),
        ("--translator model-{}", "--translator model-{} must hold {} twice"),
        ("--backtranslate --data missing.jsonl", "missing.jsonl not found"),
    ],
}
ROWS = [(script, *row) for script, rows in ONE_SCRIPT.items() for row in rows]


@pytest.fixture
def refused(coco_folder, tmp_path, no_training):
    """-> function (script, *flags) -> the message"""

    def start(script, *flags):
        data = "--data", "coco", "--root", coco_folder, "--workers", 0
        return refusal([f"{script}.py", *data, "--output", tmp_path / "run", *flags])

    return start


@every_script
@pytest.mark.parametrize("flags, words", ALL_SCRIPTS)
def test_flags_of_all_scripts(script, flags, words, refused):
    assert words in refused(script, *flags.split())


@pytest.mark.parametrize("script, flags, words", ROWS)
def test_flags_of_one_script(script, flags, words, refused):
    assert words in refused(script, *flags.split())


# Flags with numbers of which 0 is one, and those that are shares; all others are above 0.
MAY_BE_0 = "workers probe-every seed warmup weight-decay colour-jitter dropout warmup-attention"
MAY_BE_0 += " lambda-tp lambda-ii lambda-tag lambda-cc lambda-ic lambda-ci margin tag-threshold"
MAY_BE_0 += " greyscale blur momentum"
SHARES = "fraction crop-min colour-jitter warmup dropout lookahead-alpha steps warmup-attention"
SHARES += " greyscale blur momentum"
DOWNSTREAM = "detection", "finetune", "retrieval", "tagging", "zeroshot"


class Found(Exception):
    pass


def flags_with_numbers(script):
    """Of the script's parser: they have a type"""

    def found(parser, _):
        raise Found([action.option_strings[0] for action in parser._actions if action.type])

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Found) as stopped:
        patch.setattr(common.Parser, "parse_args", found)
        importlib.import_module(script).get_args([])
    return stopped.value.args[0]


@pytest.mark.parametrize(
    "script", (*SCRIPTS, "eval_linear", *(f"downstream.{name}" for name in DOWNSTREAM))
)
def test_numbers(script):
    """No flag takes words, negative or infinite numbers; few take 0, and shares end at 1."""
    flags, may_be_0 = flags_with_numbers(script), MAY_BE_0.split()
    if script == "mmcontrastive":  # whose BERT may be untrained
        may_be_0.append("lm-iters")
    assert len(flags) > 4
    for flag in flags:
        wrong = ["x", "-2", "nan", "inf"]
        wrong += ["0"] * (flag[2:] not in may_be_0) + ["1.5"] * (flag[2:] in SHARES.split())
        for text in wrong:
            assert f"argument {flag}: " in refusal([script, flag, text])


def test_a_batch_that_processes_cannot_divide(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--batch-size 9 is for all 2 processes together" in refused("tp", "--batch-size", 9)


@pytest.mark.parametrize(
    "script, words",
    [
        ("virtex", "no image of the split train has a caption"),
        ("tp", "--labels postag needs captions"),
        ("icmlm", "no image of the split train has a caption"),
        ("mmcontrastive", "no photo has a caption: with --lambda-cc 0"),
    ],
)
def test_photos_without_captions(script, words, refused, coco_folder, tmp_path):
    photos = (coco_folder / "train2017").iterdir()
    rows = [json.dumps({"image": str(photo)}) for photo in photos]
    (tmp_path / "photos.jsonl").write_text("\n".join(rows))
    assert words in refused(script, "--data", tmp_path / "photos.jsonl")
