"""Command lines that are refused, each with one line that says what is wrong (DESIGN Sec. 8).

Data, weights and photos that are refused stand with what refuses them, in the other tests.
"""

import json

import pytest
from conftest import SCRIPTS, refusal

every_script = pytest.mark.parametrize("script", SCRIPTS)

# Beside --data coco: flags, and words of the message.
ALL_SCRIPTS = [
    ("--data nonsense", "--data nonsense is unknown"),
    ("--data", "argument --data: expected one argument"),
    ("--data missing.jsonl", "missing.jsonl not found"),
    ("--data shapes --train-split test", 'has the splits "train" and "val", not "test"'),
    ("--root no/such/folder", "no/such/folder/annotations/captions_train2017.json not found"),
    ("--val-split val2014", "captions_val2014.json not found"),
    ("--recipe tiny", "--recipe tiny is unknown"),
    ("--batch 8", "unrecognized arguments: --batch 8"),
    ("--arch resnet34", "argument --arch: invalid choice"),
    ("--fraction 0", "argument --fraction: 0 is not above 0 and at most 1"),
    ("--captions-per-image 0", "argument --captions-per-image: 0 is not from 1"),
    ("--image-size 0", "argument --image-size: 0 is not"),
    ("--crop-min 0", "argument --crop-min: 0 is not"),
    ("--colour-jitter 1.5", "argument --colour-jitter: 1.5 is not in [0, 1]"),
    ("--workers -1", "argument --workers: -1 is not from 0"),
    ("--batch-size 0", "argument --batch-size: 0 is not from 1"),
    ("--batch-size 100000000", "argument --batch-size: 100000000 is not from 1 to 65536"),
    ("--image-size 100000", "argument --image-size: 100000 is not from 1 to 4096"),
    ("--arch vgg16 --image-size 16", "--arch vgg16 halves a photo five times"),
    ("--batch-size 8.5", "argument --batch-size: invalid int value: '8.5'"),
    ("--iters 0", "argument --iters: 0 is not from 1"),
    ("--epochs 0", "argument --epochs: 0 is not a number above 0"),
    ("--iters 5 --epochs 1", "give --iters or --epochs, not both"),
    ("--lr 0", "argument --lr: 0 is not a number above 0"),
    ("--lr nan", "argument --lr: nan is not"),
    ("--lr inf", "argument --lr: inf is not"),
    ("--warmup 1", "argument --warmup: 1 is not at least 0 and below 1"),
    ("--weight-decay -1", "argument --weight-decay: -1 is not a number of 0 or more"),
    ("--seed -1", "argument --seed: -1 is not from 0 to 8388607"),
    ("--seed 8388608", "argument --seed: 8388608 is not"),
    ("--amp fp8", "argument --amp: invalid choice"),
    ("--log-every 0", "argument --log-every: 0 is not"),
    ("--checkpoint-every 0", "argument --checkpoint-every: 0 is not"),
    ("--probe-images 0", "argument --probe-images: 0 is not"),
    ("--probe-every -1", "argument --probe-every: -1 is not"),
    ("--probe-root folder", "--probe-root goes with --probe-data"),
    ("--weights x.pth", "--weights FILE go"),  # "goes with", or "go together"
]

RADAM, SGD = "--optimizer radam --lr 1e-4", "--recipe demo --optimizer sgd --lr 0.1"
ONE_SCRIPT = {
    "virtex": [
        ("--output /dev/null/run", "/dev/null/run: Not a directory"),
        ("--task tagging", "argument --task: invalid choice"),
        ("--layers 0", "argument --layers: 0 is not"),
        ("--hidden 0", "argument --hidden: 0 is not"),
        ("--hidden 100", "--hidden 100 must be a multiple of 64"),
        ("--dropout 1", "argument --dropout: 1 is not"),
        ("--vocab-size 3", "no tokenizer of 3 tokens can be trained"),
        ("--tokenizer none.model", "none.model not found"),
        ("--max-length 2", "--max-length must be at least 3"),
        ("--text-lr 0", "argument --text-lr: 0 is not"),
        ("--clip -1", "argument --clip: -1 is not a number above 0"),
        ("--lookahead-k 0", "argument --lookahead-k: 0 is not"),
        ("--lookahead-alpha 0", "argument --lookahead-alpha: 0 is not"),
        ("--beams 0", "argument --beams: 0 is not"),
        ("--caption photo.jpg", "--weights FILE goes with --caption IMAGE"),
        ("--evaluate", "--weights FILE goes with --caption IMAGE... or --evaluate"),
        ("--caption a.jpg --evaluate --weights x.pth", "not allowed with argument --caption"),
        ("--caption photo.jpg --weights none.pth", "none.pth not found"),
    ],
    "tp": [
        ("--num-labels 1", "argument --num-labels: 1 is not 2 or more"),
        ("--labels instances --num-labels 5", "--num-labels goes with postag, cluster, lda"),
        ("--labels cluster --lm-iters 0", "argument --lm-iters: 0 is not"),
        ("--labels cluster --lm /no/model", "--lm /no/model: no such folder"),
        ("--init none.pth", "none.pth not found"),
        ("--optimizer radam", "--optimizer radam needs its own --lr"),
        ("--steps 0.5", "--steps goes with --optimizer radam"),
        (f"{RADAM} --steps 0.5 1.5", "argument --steps: 1.5 is not above 0 and at most 1"),
        ("--validate-every 0", "argument --validate-every: 0 is not"),
        ("--val-images 0", "argument --val-images: 0 is not"),
        ("--predict photo.jpg", "--weights FILE goes with --predict"),
        ("--predict photo.jpg --weights none.pth", "none.pth not found"),
    ],
    "icmlm": [
        ("--lm /no/model", "--lm /no/model: no such folder"),
        ("--lm-iters 0", "argument --lm-iters: 0 is not"),
        ("--num-concepts 0", "argument --num-concepts: 0 is not"),
        ("--init none.pth", "none.pth not found"),
        ("--layers 0", "argument --layers: 0 is not"),
        ("--heads 0", "argument --heads: 0 is not"),
        ("--attention-width 0", "argument --attention-width: 0 is not"),
        ("--dropout 1", "argument --dropout: 1 is not"),
        ("--recipe demo --optimizer sgd", "--optimizer sgd needs its own --lr"),
        (f"{SGD} --steps 0.5", "--steps goes with --optimizer radam"),
        (f"{RADAM} --steps 80000", "argument --steps: 80000 is not above 0 and at most 1"),
        ("--lambda-tp -1", "argument --lambda-tp: -1 is not"),
        ("--warmup-attention 1", "argument --warmup-attention: 1 is not"),
        ("--proxy-triplets 0", "argument --proxy-triplets: 0 is not"),
        ("--explain photo.jpg", "--weights FILE go together"),
        ("--explain photo.jpg --caption dog --word dog --weights none.pth", "none.pth not found"),
    ],
    "mmcontrastive": [
        ("--greyscale -0.1", "argument --greyscale: -0.1 is not in [0, 1]"),
        ("--blur 1.1", "argument --blur: 1.1 is not"),
        ("--lm-layers 0", "argument --lm-layers: 0 is not"),
        ("--lm-width 0", "argument --lm-width: 0 is not"),
        ("--lm-width 100", "--lm-width 100 must be a multiple of 64"),
        ("--dropout 1", "argument --dropout: 1 is not"),
        ("--lm scratch --caption-views same --dropout 0", "same needs --dropout above 0"),
        ("--mlp-hidden 0", "argument --mlp-hidden: 0 is not"),
        ("--intra-dim 0", "argument --intra-dim: 0 is not"),
        ("--inter-dim 0", "argument --inter-dim: 0 is not"),
        ("--unified-mlp", "--intra-dim and --inter-dim must be equal"),
        ("--queue 511", "--queue 511 must hold at least one batch of 512"),
        ("--momentum 1.01", "argument --momentum: 1.01 is not"),
        ("--momentum nan", "argument --momentum: nan is not"),
        ("--bn-splits 0", "argument --bn-splits: 0 is not"),
        (
            "--batch-size 12 --bn-splits 8",
            "12 cannot be split into --bn-splits 8 groups of two or more",
        ),
        ("--batch-size 8 --bn-splits 8", "--batch-size 8 cannot be split"),
        ("--lambda-ii -1", "argument --lambda-ii: -1 is not"),
        ("--lambda-cc inf", "argument --lambda-cc: inf is not"),
        ("--lambda-ii 0 --lambda-tag 0 --lambda-ic 0 --lambda-ci 0", "give --lambda-ii"),
        ("--lambda-ic 0", "--lambda-ic and --lambda-ci go together"),
        ("--lambda-ci 0", "--lambda-ic and --lambda-ci go together"),
        ("--temperature 0", "argument --temperature: 0 is not a number above 0"),
        ("--margin -0.1", "argument --margin: -0.1 is not"),
        ("--tag-threshold -1", "argument --tag-threshold: -1 is not"),
        ("--text-lr nan", "argument --text-lr: nan is not"),
        ("--recipe demo --optimizer sgd --lr 0.1", "--optimizer sgd needs its own --text-lr"),
        ("--retrieval-images 0", "argument --retrieval-images: 0 is not"),
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


@every_script
def test_a_batch_that_processes_cannot_divide(script, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--batch-size 9 is for all 2 processes together" in refused(script, "--batch-size", 9)


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
