"""tools/to_jsonl.py: three rows in each format, with what csv, HTML and ASCII do not like"""

import json

import pytest
from conftest import refusal, run_here
from PIL import Image

import common

A, B, C = 'two "red" kites, flying', "cats &quot;play&quot;", "ein Bär im Grünen"
PAIRS = ("1.jpg", A), ("1.jpg", B), ("2.jpg", C)
CSV = f'img/1.jpg,"two ""red"" kites, flying"\r\nimg/1.jpg,{B}\r\nimg/2.jpg,{C}\r\n'
TOKEN = "".join(f"{name}#0\t{text}\n" for name, text in (*PAIRS, ("2.jpg.1", "of no photo")))
RESULTS = "".join(f"{name}| 0| {text}\n" for name, text in (("image_name", "comment"), *PAIRS))
HUB = [{"file_name": name, "text": text, "split": "dev", "tags": ["x"]} for name, text in PAIRS]
RAW = {"filename": "1.jpg", "split": "restval", "sentences": [{"raw": A}, {"raw": B}]}
RAW = [RAW, {"filename": "2.jpg", "filepath": "img", "split": "test", "sentences": [{"raw": C}]}]
COCO = {"images": [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2)]}
COCO["annotations"] = [{"image_id": int(name[0]), "caption": text} for name, text in PAIRS]
CHATS = [[{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": text},
          {"from": "gpt", "value": "no"}] for _, text in PAIRS]  # fmt: skip
LLAVA = [{"image": name, "conversations": chat} for (name, _), chat in zip(PAIRS, CHATS)]
ROWS = [{"image": "1.jpg", "caption": [A, " ", B]}, {"image": "2.jpg", "caption": C}]
LINES = [{"image": "img/1.jpg", "captions": [A, B]}, {"image": "img/2.jpg", "captions": [C]}]
FORMATS = {  # what is printed: the content of the file, what else the lines of the output have
    "Karpathy's splits": ({"images": RAW}, {"split": "train"}, {"split": "test"}),
    "lines of name, tab, caption": (TOKEN, {}, {}),
    "(columns image, caption)": ("image,caption\r\n" + CSV, {}, {}),
    "Flickr30k's results": (RESULTS.replace(" 0", " comment_number", 1), {}, {}),
    "COCO's captions": (COCO, {}, {}),
    "imagefolder": ("\n".join(map(json.dumps, HUB)), *[{"tags": ["x"], "split": "val"}] * 2),
    "(columns file_name, text)": ("\ufefffile_name,text\n" + CSV, {}, {}),
    "open_clip's table": ("filepath\ttitle\n" + CSV.replace("jpg,", "jpg\t"), {}, {}),
    "LLaVA's conversations": ([{"conversations": CHATS[0]}, *LLAVA], {}, {}),
    "(columns name, caption)": ("id,name,caption\n" + CSV.replace("img/", "7,"), {}, {}),
    "rows of images and captions": ({"annotations": ROWS}, {}, {}),
}


@pytest.fixture
def convert(tmp_path):
    """-> function (content of a file, *flags) -> what is printed, lines of the output"""
    (tmp_path / "img").mkdir()
    for name in "img/1.jpg", "img/2.jpg":
        Image.new("RGB", (8, 8)).save(tmp_path / name)

    def run(content, *flags, encoding="utf-8", how=run_here):
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (tmp_path / "file").write_bytes(text.encode(encoding))
        lines = tmp_path / "photos.jsonl"
        output = how(["tools.to_jsonl", tmp_path / "file", "--output", lines, *flags])
        return output, lines.exists() and list(map(json.loads, lines.open(encoding="utf-8")))

    return run


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, convert):
    content, *more = FORMATS[name]
    output, lines = convert(content)
    assert name in output.splitlines()[0] and " 3 captions\n" in output
    assert lines == [{**line, **its} for line, its in zip(LINES, more)]


def test_data_refusals_and_missing_photos(convert, tmp_path):
    convert(RAW, encoding="utf-16")
    train = common.caption_data(str(tmp_path / "photos.jsonl"))
    assert list(train.captions) == [[A, 'cats "play"']]  # without HTML's entities
    flags = "--image-column", "where", "--caption-column", "what"
    wanted = f"{' and '.join(flags[::2])}: what, where"
    assert wanted in convert("where,what\n" + CSV, how=refusal)[0]
    assert convert("where,what\n" + CSV, *flags)[1] == LINES
    assert "iconv" in convert(TOKEN, encoding="latin-1", how=refusal)[0]
    assert "input" in convert(TOKEN, "--output", tmp_path / "file", how=refusal)[0]
    (tmp_path / "img/2.jpg").rename(tmp_path / "img/x.jpg")
    output, lines = convert(FORMATS["LLaVA's conversations"][0])
    assert "1 rows without a photo" in output and f" 1 missing photos {tmp_path}/2.jpg" in output
    assert lines == LINES[:1]
    message, _ = convert(TOKEN, "--root", tmp_path / "none", how=refusal)
    assert "--root" in message and f"{tmp_path}/none/1.jpg" in message
