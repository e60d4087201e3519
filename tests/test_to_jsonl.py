"""tools/to_jsonl.py: files of other projects, and the lines or the message that they become"""

import io
import json
import sys

import pytest
from conftest import refusal, run_here
from PIL import Image

import common

A, B, C = 'two "red" kites, flying', "cats &amp;quot;play&quot;", "ein Bär im Grünen"
PAIRS = ("1.jpg", A), ("1.jpg", B), ("2.jpg", C)
CSV = f'img/1.jpg,"two ""red"" kites, flying"\r\nimg/1.jpg,{B}\r\nimg/2.jpg,{C}\r\n'
TOKEN = "".join(f"{name}#0\t{text}\n" for name, text in (*PAIRS, ("2.jpg.1", "of no photo")))
RESULTS = "".join(f"{name}| 0| {text}\n" for name, text in (("image_name", "comment"), *PAIRS))
HUB = [{"file_name": name, "text": text, "split": "dev", "tags": ["x"]} for name, text in PAIRS]
RAW = {"filename": "1.jpg", "split": "restval", "sentences": [{"raw": A}, {"raw": B}]}
RAW = [RAW, {"filename": "2.jpg", "filepath": "img", "split": "test", "sentences": [{"raw": C}]}]
COCO = {"images": [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2, 2)]}
COCO["annotations"] = [{"image_id": name[0], "caption": text} for name, text in PAIRS]
ROWS = [{"image": "1.jpg", "caption": [A, " ", B]}, {"image": "2.jpg", "caption": C}]
CAPTIONED = {"img/1.jpg": [A, 'cats "play"'], "img/2.jpg": [C]}  # what most of them become

FORMATS = {  # the file, and what else the lines of the two photos have
    "photo: filename; captions: sentences; split: split": ({"images": RAW}, "train", "test"),
    "photo: image; captions: caption": (TOKEN,),
    "photo: image; captions: caption\n": ("image,caption\r\n" + CSV,),
    "photo: image_name; captions: comment; not used: comment_number": (
        RESULTS.replace(" 0", " comment_number", 1),
    ),
    "photo: file_name; captions: caption; not used: id, image_id": (COCO,),
    "photo: file_name; captions: text; tags: tags": ("\n".join(map(json.dumps, HUB)), "val", "val"),
    "photo: file_name; captions: text\n": ("\ufefffile_name,text\n" + CSV,),
    "photo: filepath; captions: title": ("filepath\ttitle\n" + CSV.replace("jpg,", "jpg\t"),),
    "photo: name; captions: caption; not used: id": (
        "id,name,caption\n" + CSV.replace("img/", "7,"),
    ),
    "file: photo: image; captions: caption\n ": ({"annotations": ROWS, "info": {"year": 2014}},),
    "photo: key; captions: captions": (CAPTIONED,),
}

LISTS = "image,caption\n1.jpg,\"['a cat', \"\"a dog's\"\"]\"\n2.jpg,\"[\"\"a\"\"]\"\n3.jpg,[a b]\n"
SEVERAL = "id,image_id,caption_1,caption_2,Finding Labels\n1,2,a cat,a dog,x|y\n2,1,nan,a bear,\n"
THRICE = "image,caption,split\nimg/1.jpg,a,train\n./img/1.jpg,b,val\n{root}/img/1.jpg,c,\n"
LOST = {**COCO, "annotations": [{"image_id": n, "caption": "a"} for n in (7, "2")]}
JOINED = "a 👍🏽 می\u200cخواهم"
INVISIBLE = [("1", "tu\u00admor ﬁnd\u200bing"), ("1", "\u200b\u2800"), ("2", f"\ud83d {JOINED}")]
INVISIBLE = [{"image_id": name, "caption": text} for name, text in INVISIBLE]

PAIR = {"image": "1.jpg", "caption": "a"}

MEANT = {  # files, the captions of img/1.jpg and img/2.jpg, words of the output
    "a list in a cell": (
        {"a.csv": LISTS}, {"1": ["a cat", "a dog's"], "2": ["a"]},
        "1 missing photos, the first: {root}/3.jpg",
    ),
    "numpy's list, without commas": (
        {"a.csv": "image,caption\n1.jpg,['a cat' 'a dog']\n"}, {"1": ["a cat", "a dog"]},
        "1 photos looked up by name, the first: ['1.jpg', '{root}/img/1.jpg']",
    ),
    "HTML's tags, and how many captions differ": (
        {"a.csv": "image,caption\n1.jpg,<p>a dog</p>\n2.jpg,a <b>dog</b>\n"},
        {"1": ["a dog"], "2": ["a dog"]}, "2 captions, 1 different ones\n",
    ),
    "several columns, image_id before id": (
        {"a.csv": SEVERAL}, {"2": ["a cat", "a dog"], "1": ["a bear"]},
        "1 captions without a letter, the first: 'nan'",
    ),
    "labels": (
        {"a.csv": SEVERAL}, {"2": ["a cat", "a dog"], "1": ["a bear"]}, '"tags": ["x", "y"]',
    ),
    "labels that are no words": (
        {"a.json": [{"image": "1.jpg", "text": "a", "labels": [0, 1, 0]}]}, {"1": ["a"]},
        "3 tags that are no text, the first: 0\n",
    ),
    "a photo spelled three ways": (
        {"a.csv": THRICE}, {"1": ["a", "b", "c"]},
        "1 rows in another split than their photo's first",
    ),
    "numbers of photos as keys": (
        {"a.json": {"1": ["a", "aa"], "2": {"caption": "b"}}}, {"1": ["a", "aa"], "2": ["b"]},
        "photo: key; captions: captions, caption\n",
    ),
    "a file for each split": (
        {"val2014.csv": "image,caption\n2.jpg,b", "train2014.csv": "image,caption\n1.jpg,a"},
        {"2": ["b"], "1": ["a"]}, "1 photos (val)\n      1 photos (train)",
    ),
    "texts beside photos": (
        {"img/1.txt": f"{A}\n\n{B}\n", "img/9.txt": "no photo"},
        {"1": CAPTIONED["img/1.jpg"], "2": []},
        "1 photos without a caption, the first: img/2.jpg",
    ),
    "texts in another folder": (
        {"texts/1.txt": "a", "texts/2.jpg.txt": "b"}, {"1": ["a"], "2": ["b"]},
        "2 photos looked up by name",
    ),
    "numbers beside photos, as YOLO's": (
        {"img/1.txt": "0 0.5 0.5 1 1\n", "img/2.txt": "a dog"}, {"1": [], "2": ["a dog"]},
        "1 captions without a letter, the first: '0 0.5 0.5 1 1'",
    ),
    "a mask is no photo": (
        {"a.csv": "image,caption\n1.jpg,a\n3.jpg,b", "masks/3.png": b""}, {"1": ["a"]},
        "1 missing photos, the first: {root}/3.jpg",
    ),
    "converted photos": (
        {"a.csv": "image,caption\nx/1.png,a\nx/2.png,b"}, {"1": ["a"], "2": ["b"]},
        "the first: ['x/1.png', '{root}/img/1.jpg']",
    ),
    "a caption of no photo": (
        {"a.json": LOST}, {"1": [], "2": ["a"]},
        "1 rows without a photo, the first: {{'image_id': 7, 'caption': 'a', 'file_name': None}}",
    ),
    "invisible characters": (
        {"a.json": INVISIBLE}, {"1": ["tumor finding"], "2": [JOINED]},
        "1 empty captions, the first: {{'image_id': '1', 'caption': '\\u200b",
    ),
    "an empty cell, and one of a number": (
        {"a.csv": "image,caption\n1.jpg,\n1.jpg,&nbsp;\n2.jpg,-\n1.jpg,a"},
        {"1": ["a"], "2": []}, "2 empty captions, the first: {{'image': '1.jpg', 'caption': ''}}",
    ),
    "a caption that is no text": (
        {"a.json": [{"image": "1.jpg", "caption": [{"de": "ein Hund"}, "a", None]}]}, {"1": ["a"]},
        "1 captions that are no text, the first: {{'de': 'ein Hund'}}",
    ),
    "dictionaries in cells": (
        {"a.csv": "image,caption\n1.jpg,\"{'raw': 'a'}\"\n2.jpg,{b c}\n"},
        {"1": ["a"], "2": ["{b c}"]},
        "2 captions\n",
    ),
    "columns of one name": (
        {"a.csv": "image,caption,Caption\n1.jpg,a,b\n"}, {"1": ["a", "b"]},
        "photo: image; captions: caption, Caption_2\n",
    ),
    "two texts of a photo": (
        {"img/1.txt": "a", "img/1.jpg.txt": "b"}, {"1": ["b", "a"], "2": []}, "2 captions\n",
    ),
    "splits in lists": (
        {"a.json": [{**PAIR, "split": ["train"]}, {**PAIR, "image": "2.jpg", "split": ["val"]}]},
        {"1": ["a"], "2": ["a"]}, "1 photos (train)\n      1 photos (val)\n",
    ),
    "splits by another name": (
        {"a.csv": "image,caption,fold,Set\n1.jpg,a,1,Train\n2.jpg,b,2,valid\n"},
        {"1": ["a"], "2": ["b"]},
        "split: Set; not used: fold\n      1 photos (train)\n      1 photos (val)\n",
    ),
    "sets that are no splits": (
        {"a.csv": "image,caption,set\n1.jpg,a,train\n2.jpg,b,coco\n"},
        {"1": ["a"], "2": ["b"]}, "captions: caption; not used: set\n      2 photos (no split)",
    ),
    "hidden files": (
        {"img/1.txt": "a", "img/._1.txt": b"\0", "img/.x/2.txt": "b", "img/._1.jpg": b""},
        {"1": ["a"], "2": []}, "2 photos (no split)",
    ),
    "tags that are dictionaries": (
        {"a.json": [{**PAIR, "tags": {"dog": 1}}, {**PAIR, "tags": [{"name": "cat"}]}]},
        {"1": ["a"]}, "1 tags that are no text, the first: {{'dog': 1}}\n",
    ),
    "repeated rows": (
        {"a.csv": "image,caption\n1.jpg,a\nimg/1.jpg,a\n2.jpg,a\n1.jpg,A"},
        {"1": ["a", "A"], "2": ["a"]},
        "1 captions that their photo has already, the first: ['{root}/img/1.jpg', 'a']",
    ),
    "names in upper and lower case": (
        {"a.csv": "image,caption\n1.jpg,a\n1.JPG,b\nIMG\\2.jpg,c"}, {"1": ["a", "b"], "2": ["c"]},
        "3 photos looked up by name",
    ),
    "names that differ in their folders": (
        {"a.csv": "image,caption\nx/1.jpg,a\ny/1.jpg,b\nx/2.jpg,c"}, {"2": ["c"]},
        "2 names of several photos, or several names of one, the first: ['x/1.jpg', '{root}/img",
    ),
    "upper case beside photos": (
        {"img/1.TXT": "a", "IMG/2.txt": "b"}, {"1": ["a"], "2": ["b"]}, "2 captions\n",
    ),
    "a folder for each split": (
        {"img/train2014/1.txt": "a", "img/val2014/2.txt": "b"}, {"1": ["a"], "2": ["b"]},
        '"captions": ["a"], "split": "train"',
    ),
    "Flickr30k's row without a separator": (
        {"a.csv": "image_name| n| comment\n1.jpg| 0| a\n1.jpg| 4   b\n"}, {"1": ["a"]},
        "1 empty captions, the first: {{'image_name': '1.jpg', 'n': ' 4 b', 'comment': ''}}",
    ),
    "a table of Excel": (
        {"a.csv": "\ufeffsep=;\r\nImage;Caption\r\n1.jpg;a, b\r\n"}, {"1": ["a, b"]},
        "photo: Image; captions: Caption\n",
    ),
}  # fmt: skip

TAGS = {  # cells of two photos: their tags
    ("Effusion, left|Opacity", "Mass, right"): [["Effusion, left", "Opacity"], ["Mass, right"]],
    ("a, b; c", "d"): [["a, b", "c"], ["d"]],
    ("a, b", "b"): [["a", "b"], ["b"]],
    ("haze primary", "haze"): [["haze primary"], ["haze"]],
    ("R&amp;D, x", "R&amp;D"): [["R&D", "x"], ["R&D"]],
    ('["a, b", "c"]', "c"): [["a, b", "c"], ["c"]],
}

TAGGED = "image,caption,X Ray,y,split\n1.jpg,a,0,1,{}\n"

# The splits of two photos, the last line
COMMANDS = [
    (("train", "train"), ""),
    (("train", "val"), ""),
    (("", "val"), ""),
    (("test", "val"), " --train-split test"),
    (("train", "test"), " --val-split test"),
    (("one", "two 2"), " --train-split one --val-split 'two 2'"),
    (("val", "val"), " --train-split val    # no other split can be validated on"),
]

# The first file, flags, words of the message
REFUSED = [
    ("where,what\n" + CSV, "", "alone, --tag-column: where, what. The first row is {{'where':"),
    ("where,what\n" + CSV, "", "and its caption? Name them with --image-column, --caption-"),
    (TOKEN, "--tag-column kind", "file has no column kind, but image, caption"),
    (TOKEN, "--caption-column a b image", "file has no column a, b, but image, caption"),
    (TOKEN, "--image-column Path", "file has no column path, but image, caption"),
    (TOKEN, "--caption-column image", "the column image has the paths of the photos: it cannot"),
    (TOKEN, "--image-column image --tag-column image", "the column image has the paths of the p"),
    (TOKEN.encode("latin-1"), "", "is not UTF-8 (byte 79). Convert it"),
    (TOKEN, "--output {root}/file", "must not be the input file"),
    (TOKEN, "--root {root}/none", "{root}/none and its subfolders hold no photo of {root}/file"),
    (CSV, "", "file has no header, it begins with img/1.jpg,"),
    ("1.jpg a dog\n2.jpg a cat", "", "file has no header, it begins with 1.jpg a dog: add a"),
    (b"PK\3\4\0\0", "", "is no text: give .json, .jsonl, .csv, .tsv, .txt or .parquet"),
    ("a bus\thttp://x.com/1?w=9\n", "", "file has no header, it begins with a bus http://x.com/1"),
    ('image\tcaption\n1.jpg\t"a\n2.jpg\tb"\n', "", "line 2: a quote takes several lines into one"),
    ("image,caption\n1.jpg,\n2.jpg,-\n", "", "no caption is left: {root}/photos.jsonl is not wri"),
    (TAGGED + "2.jpg,b,-1,1\n", "--tag-column x_ray", "column X Ray holds -1, where 0 and 1 are"),
    (TAGGED + "2.jpg,b,2,0\n", "--tag-column x-ray y", "column X Ray holds 2, where 0 and 1 are"),
    (TOKEN, "--output {root}/file/a.jsonl", "--output {root}/file cannot be a folder: File exists"),
    (TOKEN, "--output {root}/img", "must end in .jsonl, be no folder, and must not be the input"),
    ("[", "", "file, line 1, is not valid JSON: Expecting value"),
    ('{"a": 1}\n\n{"a"', "", "file, line 3, is not valid JSON: Expecting ':' delimiter"),
    ('{\n"a": 1\n"b"', "", "file, line 3, is not valid JSON: Expecting ',' delimiter"),
    ("id,caption\n7,a\n8,b\n", "", "id, but ['img/1.jpg', 'img/2.jpg']: do the names differ? See"),
    ("image,caption,label\n1.jpg,a,0\n2.jpg,b,1\n", "", "with --tag-column label, photos with a 1"),
    ({"a": [{"image": "1.jpg"}], "b": [{"image": "2.jpg"}]}, "", "has several lists, a, b: write"),
    ({"train": [{"id": "7"}], "val": [], "test": [{"id": "8"}]}, "", "several lists, train, test:"),
    ({"image": {"0": "1.jpg"}, "caption": {"0": "a"}}, "", "hold no photo of {root}/file, such as"),
    ([{"image": "1.jpg", "conversations": []}], "", "which columns hold the photo and its caption"),
    ("{}", "", "needs rows with a name for each cell"),
    ("image,caption\n1.jpg,a,b\n", "", "line 2 has 3 cells for 2 columns: captions with , need"),
]


@pytest.fixture
def convert(tmp_path):
    """-> function (files, flags) -> what is printed, lines of the output"""
    for name in "img/1.jpg", "img/2.jpg":
        (tmp_path / "img").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)

    def run(files, flags="", how=run_here):
        for name, content in files.items():
            if not isinstance(content, (str, bytes)):
                content = json.dumps(content, indent=1)
            if isinstance(content, str):
                content = content.replace("{root}", str(tmp_path)).encode("utf-8", "surrogatepass")
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        given = [tmp_path / name for name in files if "/" not in name] or [tmp_path]
        lines = tmp_path / "photos.jsonl"
        flags = flags.format(root=tmp_path).split()
        printed = how(["tools.to_jsonl", *given, "--output", lines, *flags])
        return printed, lines.exists() and list(map(json.loads, lines.open(encoding="utf-8")))

    return run


@pytest.mark.parametrize("taken", FORMATS)
def test_formats(taken, convert):
    content, *splits = FORMATS[taken]
    printed, lines = convert({"file": content})
    assert taken in printed and " 3 captions\n" in printed
    assert {line["image"]: line["captions"] for line in lines} == CAPTIONED
    assert [line["split"] for line in lines if "split" in line] == splits


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant(case, convert, tmp_path):
    files, expected, words = MEANT[case]
    printed, lines = convert(files)
    assert {line["image"][4:-4]: line["captions"] for line in lines} == expected
    assert words.format(root=tmp_path) in printed


@pytest.mark.parametrize("cells", TAGS)
def test_what_separates_tags(cells, convert):
    """One of | ; and , does in a whole column, and nothing within the items of a list."""
    tags = TAGS[cells]
    rows = [{**PAIR, "image": f"{n}.jpg", "tags": cell} for n, cell in enumerate(cells, 1)]
    printed, lines = convert({"a.json": rows})
    assert [line["tags"] for line in lines] == tags
    different = len({*sum(tags, [])})
    assert f"tags, {different} different ones, the first: {tags[0][0]}\n" in printed


@pytest.mark.parametrize("content, flags, words", REFUSED)
def test_refusals(content, flags, words, convert, tmp_path):
    message, _ = convert({"file": content}, flags, how=refusal)
    assert words.format(root=tmp_path) in message


def test_named_columns(convert):
    flags = "--image-column where --caption-column what --tag-column kind"
    _, lines = convert({"file": "where,what,Kind\n1.jpg,a,b c\n2.jpg,d,"}, flags)
    assert lines[0] == {"image": "img/1.jpg", "captions": ["a"], "tags": ["b c"]}
    assert lines[1] == {"image": "img/2.jpg", "captions": ["d"]}  # it says nothing about tags


def test_columns_of_0_and_1(convert):
    """Their names in the file are the tags; 0 in all is none, nothing in all is not known."""
    rows = "2.jpg,b,true,1.0,\n3.jpg,c,0,0.0,\n4.jpg,d,,nan,\n5.jpg,e,1,,\n"
    photos = {f"img/{n}.jpg": b"" for n in (3, 4, 5)}
    printed, lines = convert({"file": TAGGED + rows, **photos}, "--tag-column X-Ray y")
    tags = [["y"], ["X Ray", "y"], [], None, ["X Ray"]]
    assert [line.get("tags") for line in lines] == tags and "tags where 1: X Ray, y\n" in printed
    assert "1 empty cells beside 0 and 1, which count as 0, the first: {'image': '5.jpg'" in printed


def test_a_linked_photo_is_one(convert, tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path / "img")
    rows = "image,caption,split\nimg/1.jpg,a,train\nlinked/1.jpg,b,val\n"
    printed, lines = convert({"file": rows})
    assert lines == [{"image": "img/1.jpg", "captions": ["a", "b"]}]
    assert "1 rows in another split than their photo's first, the first: {" in printed


@pytest.mark.parametrize("splits, flags", COMMANDS)
def test_the_command_that_it_prints(splits, flags, convert, tmp_path):
    rows = [f"{n}.jpg,a,{split}\n" for n, split in enumerate(splits, 1)]
    printed, _ = convert({"file": "image,caption,split\n" + "".join(rows)})
    assert printed.endswith(f"python virtex.py --data {tmp_path}/photos.jsonl{flags}\n")


def test_photos_with_tags_alone(convert):
    """The tables of labels that eval_linear.py and tp.py read"""
    printed, lines = convert({"file": "image,label\n1.jpg,a\n2.jpg,b\n"}, "--tag-column label")
    assert [line["tags"] for line in lines] == [["a"], ["b"]]
    assert "python tp.py --labels instances --data " in printed


def test_a_folder_without_texts(convert, tmp_path):
    """The message names the file that may be meant."""
    files = dict.fromkeys(("img/info.json", "img/b.parquet", "img/a.parquet"), "")
    message, _ = convert(files, how=refusal)
    assert f"the file that holds them, such as {tmp_path}/img/a.parquet; tar files" in message


def test_what_it_writes_is_read(convert, tmp_path):
    convert({"file": json.dumps(RAW).encode("utf-16")})
    train = common.caption_data(str(tmp_path / "photos.jsonl"))
    assert list(train.captions) == [CAPTIONED["img/1.jpg"]]


def test_parquet_of_hugging_face(convert, tmp_path):
    """Photos inside it become files."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    rows = [{"image": {"bytes": file.getvalue(), "path": None}, "caption": ["a", "b"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file := io.BytesIO())
    printed, [line] = convert({"train.parquet": file.getvalue()})
    assert "photo: image; captions: caption\n" in printed and line["captions"] == ["a", "b"]
    assert line["image"].startswith("photos_photos/") and line["image"].endswith("_image.png")
    with Image.open(tmp_path / line["image"]) as image:
        assert image.size == (8, 8)
    message, _ = convert({"val.parquet": file.getvalue()}, "--caption-column text", refusal)
    assert "val.parquet has no column text, but image, caption" in message
    table = pyarrow.Table.from_pylist([{"image": b"", "label": 1}])
    parquet.write_table(table, file := io.BytesIO())
    message, _ = convert({"val.parquet": file.getvalue()}, how=refusal)
    assert "which columns hold the photo and its caption? " in message
    assert len([*(tmp_path / "photos_photos").iterdir()]) == 1  # nothing was written before
    message, _ = convert({"train.parquet": "version https://git-lfs.github.com"}, how=refusal)
    assert "train.parquet is not in this format: Parquet magic bytes" in message


def test_parquet_without_its_package(convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message, _ = convert({"train.parquet": b"PAR1"}, how=refusal)
    assert "python -m pip install pyarrow" in message


# -------------------------------------------------------------------------- nothing guessed

SCANS = "p07_1.jpg", "p07_2.jpg", "p09_1.jpg", "p11_1.jpg"
BY_KEY = {"p07_1": "a", "p07_2": "b", "p09_1": "c", "p11_1": "d"}


def table(header, *rows):
    return "\n".join([header, *rows])


COLUMNS = {  # which column names the photo: photos, a table, the captions by stem or a refusal
    "links that name some of the photos of other rows": (
        SCANS,
        table("link,finding,study", "https://x.org/p07_2.jpg,a,p07_1", "https://x.org/p09_1.jpg,b,p"
              "07_2", "https://x.org/p11_1.jpg,c,p09_1", "https://x.org/p99_1.jpg,d,p11_1"),
        BY_KEY,
    ),
    "numbers in a column named image": (
        ("0.png", "1.png", "2.png"),
        table("image,text,scan", "0,x,2.png", "1,y,0.png", "2,z,1.png"),
        {"2": "x", "0": "y", "1": "z"},
    ),
    "numbers that are no names": (
        ("31.jpg", "47.jpg", "31b.jpg", "47b.jpg"),
        table("age,report,number", "31,a,47b", "47,b,31b"), {"47b": "a", "31b": "b"},
    ),
    "numbers that may be names, of one row each": (
        ("1.tif", "2.tif"), table("patient_id,visit_no,report", "1,2,a", "2,1,b"),
        "which column names the photo, visit_no or patient_id?",
    ),
    "two columns of paths": (
        ("a.jpg", "b.jpg", "a_mask.jpg", "b_mask.jpg"),
        table("tile,segmentation,caption", "a.jpg,a_mask.jpg,x", "b.jpg,b_mask.jpg,y"),
        "give --image-column",
    ),
    "two columns that name the same photos": (
        ("a.jpg", "b.jpg"), table("accession,file,title", "a,a.jpg,x", "b,b.jpg,y"),
        {"a": "x", "b": "y"},
    ),
    "a hit in seven rows": (
        ("vase.jpg", "cup.jpg"),
        table("object,title", "vase,a", *(f"inv{n},b" for n in range(6))),
        "only 14% of the rows name a photo below",
    ),
    "more than half of the photos": (
        ("a.jpg", "b.jpg"), table("object,title", "a,x", "b,y", "c,z"), {"a": "x", "b": "y"},
    ),
    "a class that is the name of a sample": (
        ("dog.jpg", "cat.jpg"), table("item,caption,label", "k1,x,dog", "k2,y,cat"),
        "hold no photo of",
    ),
    "decomposed on disk": (
        ("mu\u0308hle_1.jpg", "za\u0304le.jpg"),
        table("image,caption", "m\xfchle_1.jpg,a", "Z\u0101le.JPG,b"),
        {"mu\u0308hle_1": "a", "za\u0304le": "b"},
    ),
    "decomposed in the table, without endings": (
        ("m\xfchle.webp",), table("key,caption", "mu\u0308hle,a"), {"m\xfchle": "a"},
    ),
    "unusual endings": (
        ("a.jfif", "b.avif", "c.pgm", "d.jp2"),
        table("image,caption", "a.jfif,x", "b.avif,y", "c.pgm,z", "d.jp2,w"),
        {"a": "x", "b": "y", "c": "z", "d": "w"},
    ),
    "two kinds of captions": (
        ("a.jpg",), table("image,title,description", "a.jpg,x,y"),
        "which columns hold the photo and its caption?",
    ),
    "a line end of old Macs": (
        ("a.jpg", "b.jpg"), "image,caption\ra.jpg,x\rb.jpg,y\r", {"a": "x", "b": "y"},
    ),
    "a key twice": (
        ("a.jpg", "b.jpg"), '{"a": "x", "b": "y", "a": "z"}', "JSON file has the key a twice",
    ),
    "a quote within a caption": (
        ("a.jpg", "b.jpg", "c.jpg"),
        table("image,caption", "a.jpg,x", 'b.jpg,"y" z', "c.jpg,z"), "line 3: ',' expected after",
    ),
    "a quote that is not closed": (
        ("a.jpg", "b.jpg"), table("key,caption", "a,x", 'b,"y', "c,z", 'd,w"'),
        "line 3: a quote takes several lines into one cell, y c,z d,w, as in 1 of 2 rows",
    ),
    "a third column without a header": (
        ("a.jpg", "b.jpg"), "a.jpg\tx\nb.jpg\t4\ty\n", "line 2 has 3 cells for 2 columns",
    ),
    "a Python list with quotes in its texts": (
        ("a.jpg",), 'image,caption\na.jpg,"[\'it says \'\'go\'\' now\', ""a \'b\' \'c\'""]"\n'
        .replace("''", '""'), {"a": "it says \"go\" now|a 'b' 'c'"},
    ),
    "photos as keys, without endings": (
        SCANS, json.dumps({key: [text] for key, text in BY_KEY.items()}), BY_KEY,
    ),
    "more keys than a line holds": (
        SCANS, json.dumps({f"q{n}": ["a"] for n in range(9999)}), "hold no photo of",
    ),
    "lists of photos and of captions": (
        ("a.jpg", "b.jpg"), json.dumps({"image": ["a.jpg", "b.jpg"], "caption": ["x", "y"]}),
        "no photo is left",
    ),
    "two images of one id": (
        ("a.jpg", "b.jpg"),
        json.dumps({"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}],
                    "annotations": [{"image_id": 1, "caption": "x"}]}),
        "several images have the same id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_nothing_guessed(case, tmp_path):
    photos, text, expected = COLUMNS[case]
    for name in photos:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "table").write_bytes(text.encode())
    command = ["tools.to_jsonl", tmp_path / "table", "--output", tmp_path / "photos.jsonl"]
    if isinstance(expected, str):
        message = refusal(command)
        assert expected in message and len(message) < 700
        return
    run_here(command)
    lines = map(json.loads, (tmp_path / "photos.jsonl").open(encoding="utf-8"))
    found = {line["image"].rsplit(".", 1)[0]: "|".join(line["captions"]) for line in lines}
    assert found == expected


VOTES = {  # cells of tag columns: the tags of each row, or words of the refusal
    ("sea,port", "12,0", "3,1"): "the column sea holds 12, where 0 and 1 are expected",
    ("sea,port", "0.2,0.7", "0.9,0.1"): "the column sea holds 0.2",
    ("sea,port", "TRUE,FALSE", "false,true"): [["sea"], ["port"]],
    ("sea,port", "Yes,no", "no,no"): [["sea"], []],
    ("sea,port", "x,", ",X", ","): [["sea"], ["port"], []],
    ("sea,port", "✓,✓", "✓,"): [["sea", "port"], ["sea"]],
    ("sea,port", "yes,no", "maybe,yes"): "the column sea holds maybe",
    ("sea,port", "ja,nein", "nein,ja"): "the columns sea, port hold nothing but ja and nein",
    ("sea,port", "1,quay", "0,pier|quay"): [["quay", "sea"], ["pier", "quay"]],
}


@pytest.mark.parametrize("rows", VOTES)
def test_cells_of_tag_columns(rows, convert, tmp_path):
    header, *cells = rows
    (tmp_path / "img" / "3.jpg").write_bytes(b"")
    lines = [f"image,caption,{header}", *(f"{n}.jpg,a,{row}" for n, row in enumerate(cells, 1))]
    expected = VOTES[rows]
    if isinstance(expected, str):
        message, _ = convert({"file": "\n".join(lines)}, "--tag-column sea port", how=refusal)
        assert expected in message
    else:
        _, lines = convert({"file": "\n".join(lines)}, "--tag-column sea port")
        assert [line["tags"] for line in lines] == expected


def test_line_breaks_in_captions(convert, tmp_path):
    """One in two hundred rows is said, and read."""
    rows = [f"1.jpg,caption {n}" for n in range(200)] + ['2.jpg,"a\nb"']
    printed, lines = convert({"file": "\n".join(["image,caption", *rows])})
    assert "line breaks within quotes in 1 rows, (202, 'a\\nb')" in printed
    assert lines[1]["captions"] == ["a b"]


def test_links_and_hidden_photos(tmp_path):
    """A folder that is a link is followed, once; hidden files and folders are no photos."""
    scans = tmp_path / "elsewhere" / "scans"
    scans.mkdir(parents=True)
    root = tmp_path / "museum"
    (root / ".cache").mkdir(parents=True)
    for path in scans / "1.jpg", root / ".cache/2.jpg", root / "._3.jpg":
        path.write_bytes(b"")
    (scans / "1.txt").write_text("a bowl")
    (root / ".cache/2.txt").write_text("a cup")
    (root / "loop").symlink_to(root)
    (root / "linked").symlink_to(scans)
    for folder in f"{root}", f"{root}/":
        run_here(["tools.to_jsonl", folder, "--output", tmp_path / "photos.jsonl"])
        line = {"image": "museum/linked/1.jpg", "captions": ["a bowl"]}
        assert [json.loads(row) for row in (tmp_path / "photos.jsonl").open()] == [line]


def test_parquet_of_two_folders(tmp_path):
    """Photos of tables with the same name do not meet; those of an earlier call stay."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def photo(grey):
        file = io.BytesIO()
        Image.new("L", (4, 4), grey).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": "0.png"}

    greys = {"aerial/part/0.parquet": (10, 20), "ground/part/0.parquet": (30, 40)}
    for name, pair in greys.items():
        rows = [{"image": photo(grey), "text": f"grey {grey}"} for grey in pair]
        (tmp_path / name).parent.mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    output = tmp_path / "photos.jsonl"
    command = ["tools.to_jsonl", *(tmp_path / name for name in greys), "--output", output]
    run_here(command)
    lines = [json.loads(line) for line in output.open()]
    assert len({line["image"] for line in lines}) == len(lines) == 4
    for line in lines:
        with Image.open(tmp_path / line["image"]) as image:
            assert line["captions"] == [f"grey {image.getpixel((0, 0))}"]
    run_here(command)  # the same again
    one, other = (["tools.to_jsonl", tmp_path / name, "--output", output] for name in greys)
    run_here(one)
    assert "is another photo, of an earlier call" in refusal(other)
    rows = [{"image": photo(1), "mask": photo(2), "text": "a"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "two.parquet")
    two = ["tools.to_jsonl", tmp_path / "two.parquet", "--output", tmp_path / "two.jsonl"]
    assert "which column has the photo, image or mask?" in refusal(two)
    run_here([*two, "--image-column", "image"])
    assert len([*(tmp_path / "two_photos/two").iterdir()]) == 1
