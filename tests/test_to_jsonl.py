"""tools/to_jsonl.py: files of other projects, and the lines or the message that they become"""

import io
import json
import sys

import pytest
from conftest import ROOT, refusal, run_here
from conftest import one_split
from PIL import Image

import common

A, B, C = 'two "red" kites, flying', "cats &amp;quot;play&quot;", "ein Bär im Grünen"
PAIRS = ("1.jpg", A), ("1.jpg", B), ("2.jpg", C)
CSV = f'img/1.jpg,"two ""red"" kites, flying"\r\nimg/1.jpg,{B}\r\nimg/2.jpg,{C}\r\n'
TABLE = "image\tcaption\n1.jpg\tdogs\n2.jpg\ta cat\n"
RESULTS = "".join(f"{name}| 0| {text}\n" for name, text in (("image_name", "comment"), *PAIRS))
HUB = [{"file_name": name, "text": text, "split": "dev", "tags": ["x"]} for name, text in PAIRS]
RAW = {"filename": "1.jpg", "split": "restval", "sentences": [{"raw": A}, {"raw": B}]}
RAW = [RAW, {"filename": "2.jpg", "filepath": "img", "split": "test", "sentences": [{"raw": C}]}]
COCO = {"images": [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2, 2)]}
COCO["annotations"] = [{"image_id": name[0], "caption": text} for name, text in PAIRS]
ROWS = [{"image": "1.jpg", "caption": [A, " ", B]}, {"image": "2.jpg", "caption": C}]
CAPTIONED = {"img/1.jpg": [A, 'cats "play"'], "img/2.jpg": [C]}  # what most of them become

FORMATS = {  # the file, flags, and what else the lines of the two photos have
    "photo: filename; captions: sentences; split: split": ({"images": RAW}, "", "train", "test"),
    "photo: image; captions: caption\n": ("image,caption\r\n" + CSV, ""),
    "photo: image_name; captions: comment; not used: comment_number": (
        RESULTS.replace(" 0", " comment_number", 1), "--caption-column comment",
    ),
    "photo: file_name; captions: caption; not used: id, image_id": (COCO, ""),
    "photo: file_name; captions: text; tags: tags": (
        "\n".join(map(json.dumps, HUB)), "--caption-column text --tag-column tags", "val", "val",
    ),
    "photo: file_name; captions: text\n": ("\ufefffile_name,text\n" + CSV, "--caption-column text"),
    "photo: filepath; captions: title": (
        "filepath\ttitle\n" + CSV.replace("jpg,", "jpg\t"), "--caption-column title",
    ),
    "photo: name; captions: caption; not used: id": (
        "id,name,caption\n" + CSV.replace("img/", "7,"), "",
    ),
    "file: photo: image; captions: caption\n ": ({"annotations": ROWS, "info": {"year": 2014}}, ""),
}

def table(header, *rows):
    return "\n".join([header, *rows])


THRICE = "image,caption,split\nimg/1.jpg,a,train\n./img/1.jpg,b,val\n{root}/img/1.jpg,c,\n"
LOST = {**COCO, "annotations": [{"image_id": n, "caption": "a"} for n in (7, "2")]}
JOINED = "a 👍🏽 می\u200cخواهم"
INVISIBLE = [("1", "tu\u00admor find\u200bing"), ("1", "\u200b"), ("2", f"\ud83d {JOINED}")]
INVISIBLE = [{"image_id": name, "caption": text} for name, text in INVISIBLE]

PAIR = {"image": "1.jpg", "caption": "a"}

MEANT = {  # files, the captions of img/1.jpg and img/2.jpg, words of the output
    "HTML's tags": (
        {"a.csv": "image,caption\n1.jpg,<p>a dog</p>\n2.jpg,a <b>dog</b>\n"},
        {"1": ["a dog"], "2": ["a dog"]}, "2 captions\n",
    ),
    "a photo spelled three ways": (
        {"a.csv": THRICE}, {"1": ["a", "b", "c"]},
        "1 rows in another split than their photo's first",
    ),
    "texts beside photos": (
        {"img/1.txt": f"{A}\n\n{B}\n", "img/9.txt": "no photo"},
        {"1": CAPTIONED["img/1.jpg"], "2": []},
        "1 photos without a caption, the first: img/2.jpg",
    ),
    "texts in another folder": (
        {"texts/1.txt": "a", "texts/2.jpg.txt": "b"}, {"1": ["a"], "2": ["b"]},
        "2 rows with a photo that is looked up by name",
    ),
    "numbers beside photos, as YOLO's": (
        {"img/1.txt": "0 0.5 0.5 1 1\n", "img/2.txt": "a dog"}, {"1": [], "2": ["a dog"]},
        "1 captions without a letter, the first: {{'image': 'img/1.jpg', 'captions': ['0 0.5",
    ),
    "a mask is no photo": (
        {"a.csv": "image,caption\n1.jpg,a\n3.jpg,b", "masks/3.png": b""}, {"1": ["a"]},
        "1 rows without a photo, the first: [{{'image': '3.jpg', 'caption': 'b'}}]",
    ),
    "converted photos": (
        {"a.csv": "image,caption\nx/1.png,a\nx/2.png,b"}, {"1": ["a"], "2": ["b"]},
        "the first: ['x/1.png', '{root}/img/1.jpg']",
    ),
    "a caption of no photo": (
        {"a.json": LOST}, {"1": [], "2": ["a"]},
        "1 rows without a photo, the first: [{{'image_id': 7, 'caption': 'a', 'file_name': None}}]",
    ),
    "invisible characters": (
        {"a.json": INVISIBLE}, {"1": ["tumor finding"], "2": [JOINED]},
        "1 captions without a letter, the first: {{'image_id': '1', 'caption': '\\u200b",
    ),
    "an empty cell, and one of a number": (
        {"a.csv": "image,caption\n1.jpg,\n1.jpg,&nbsp;\n2.jpg,-\n1.jpg,a"},
        {"1": ["a"], "2": []},
        "3 captions without a letter, the first: {{'image': '1.jpg', 'caption': ''}}",
    ),
    "errors of spreadsheets": (
        {"a.csv": "image,caption\n1.jpg,#DIV/0!\n1.jpg,<NA>\n1.jpg,#name?\n2.jpg,a #N/A\n"},
        {"1": [], "2": ["a #N/A"]}, "3 captions without a letter, the first: {{'image': '1.jpg', '",
    ),
    "signs that are no HTML": (
        {"a.csv": table("image,caption", "1.jpg,depth <b > 3 m and p<i or q>a",
                        "2.jpg,<B>1</B> <font size='2'>or</font> <br /> x<a<b")},
        {"1": ["depth <b > 3 m and p<i or q>a"], "2": ["1 or x<a<b"]},
        "1 captions that lost HTML, the first: <B>1</B> <font size='2'>or</font> <br /> x<a<b\n",
    ),
    "the end of a path that one photo has": (
        {"a.csv": "image,caption\n/old/img/1.jpg,a\nold/img/2.jpg,b", "small/1.jpg": b""},
        {"1": ["a"], "2": ["b"]}, "2 rows with a photo that is looked up by name",
    ),
    "a name that two photos have": (
        {"a.csv": "image,caption\n1.jpg,a\n2.jpg,b", "small/1.jpg": b""}, {"2": ["b"]},
        "1 rows whose name several photos have (write folder/name, or narrow --root), the first: [",
    ),
    "files that are no photos": (
        {"a.csv": "image,caption\nimg/1.jpg,a\nimg/2.heic,b\nimg/3,c\nimg/2.jpg,d",
         "img/2.heic": b"", "img/3": b""}, {"1": ["a"], "2": ["d"]},
        "2 rows without a photo, the first: [{{'image': 'img/2.heic',",
    ),
    "a caption that is no text": (
        {"a.json": [{"image": "1.jpg", "caption": [{"de": "ein Hund"}, "a", None]}]}, {"1": ["a"]},
        "1 captions that are no text, the first: {{'image': '1.jpg', 'caption': [{{'de': 'ein",
    ),
    "two texts of a photo": (
        {"img/1.txt": "a", "img/1.jpg.txt": "b"}, {"1": ["b", "a"], "2": []}, "2 captions\n",
    ),
    "sets that are no splits": (
        {"a.csv": "image,caption,set\n1.jpg,a,train\n2.jpg,b,coco\n"},
        {"1": ["a"], "2": ["b"]}, "captions: caption; not used: set\n      2 photos (no split)",
    ),
    "hidden files": (
        {"img/1.txt": "a", "img/._1.txt": b"\0", "img/.x/2.txt": "b", "img/._1.jpg": b""},
        {"1": ["a"], "2": []}, "2 photos (no split)",
    ),
    "captions that may be lists": (
        {"a.csv": table("image,caption", '1.jpg,"(a kite, a cat)"', '1.jpg,"[a; b]"', "1.jpg,(a b)",
                        '2.jpg,"[x] a, b (c)"')},
        {"1": ["(a kite, a cat)", "[a; b]", "(a b)"], "2": ["[x] a, b (c)"]}, "4 captions",
    ),
    "repeated in one row, and in the next": (
        {"a.json": [{"image": "1.jpg", "captions": ["a", "b", "a"]}, {**PAIR}, {**PAIR}]},
        {"1": ["a", "b"]}, "3 repeated captions, the first: a\n",
    ),
    "a list and what is beside it": (
        {"a.json": {"rows": [PAIR], "val": {"2.jpg": "b"}, "year": 7}}, {"1": ["a"]},
        "a.json: read ['rows'], not ['val', 'year']\n",
    ),
    "two hosts in two tables": (
        {"a.csv": "image,caption\nhttp://x.org/1.jpg,a\n", "b.csv":
         "image,caption\nhttp://y.org/1.jpg,b\nhttp://y.org/2.jpg,c\n"}, {"2": ["c"]},
        "2 rows with several names of one photo, the first: ['{root}/img/1.jpg', 'http:/x.org/1.jp",
    ),
    "the path in one table, the bare name or another path in the next": (
        {"a.csv": "image,caption\nimg/1.jpg,a\nimg/2.jpg,b\n",
         "b.csv": "image,caption\n1,c\nval/2,d\n"}, {"1": ["a", "c"], "2": ["b"]},
        "1 rows with several names of one photo, the first: ['{root}/img/2.jpg', '2', 'val/2']",
    ),
    "keys that differ in their case": (
        {"a.csv": "image,caption\nqR1.jpg,a\nQr1.jpg,b\n1.jpg,c\n", "img/qR1.jpg": b""},
        {"1": ["c"], "qR1": ["a"]}, "1 rows with several names of one photo",
    ),
    "files beside texts that are not read": (
        {"img/1.txt": "a", "img/1.json": "{}"}, {"1": ["a"], "2": []},
        "{root}: only KEY.txt is read, not 1 files such as {root}/img/1.json",
    ),
    "repeated rows": (
        {"a.csv": "image,caption\n1.jpg,a\nimg/1.jpg,a\n2.jpg,a\n1.jpg,A"},
        {"1": ["a", "A"], "2": ["a"]},
        "1 repeated captions, the first: a\n",
    ),
    "names in upper and lower case": (
        {"a.csv": "image,caption\n1.jpg,a\n1.JPG,b\nIMG\\2.jpg,c"}, {"1": ["a", "b"], "2": ["c"]},
        "3 rows with a photo that is looked up by name",
    ),
    "names that differ in their folders": (
        {"a.csv": "image,caption\nx/1.jpg,a\ny/1.jpg,b\nx/2.jpg,c"}, {"2": ["c"]},
        "2 rows with several names of one photo, the first: ['{root}/img/1.jpg', 'x/1.jpg', 'y/1.j",
    ),
    "upper case beside photos": (
        {"img/1.TXT": "a", "IMG/2.txt": "b"}, {"1": ["a"], "2": ["b"]}, "2 captions\n",
    ),
    "Flickr30k's row without a separator": (
        {"a.csv": "image_name| n| caption\n1.jpg| 0| a\n1.jpg| 4   b\n"}, {"1": ["a"]},
        "1 captions without a letter, the first: {{'image_name': '1.jpg', ' n': ' 4 b', '",
    ),
    "a table of Excel": (
        {"a.csv": "\ufeffImage;Caption\r\n1.jpg;a, b\r\n"}, {"1": ["a, b"]},
        "photo: Image; captions: Caption\n",
    ),
}

TAGS = [  # cells of two photos, their tags
    (("Mass, left|Opacity", "Mass, right"), [["Mass, left", "Opacity"], ["Mass, right"]]),
    (("a, b; c", "d"), [["a, b", "c"], ["d"]]),
    (("a, b", "b"), [["a", "b"], ["b"]]),
    (("haze primary", "haze"), [["haze primary"], ["haze"]]),
    (("R&amp;D, x", "R&amp;D"), [["R&D", "x"], ["R&D"]]),
    ((["a, b", "c"], "c"), [["a, b", "c"], ["c"]]),
]

TAGGED = "image,caption,X Ray,y,split\n1.jpg,a,0,1,{}\n"

# The first file, flags, words of the message
REFUSED = [
    ("where,what\n" + CSV, "", "has no column caption: name it with --caption-column"),
    (TABLE, "--tag-column kind", "file has no column kind, but image, caption"),
    (TABLE, "--caption-column a b image", "file has no column a, b, but image, caption"),
    (TABLE, "--image-column Path", "file has no column path, but image, caption"),
    (TABLE, "--caption-column image", "{root} holds no photo of {root}/file, such as {{'image"),
    (f"{TABLE}2.jpg\t{C}\n".encode("latin-1"), "", "file, line 4, is not UTF-8 text: save it as"),
    (TABLE, "--output {root}/file", "nor the input file"),
    (TABLE, "--root {root}/none", "{root}/none holds no photo of {root}/file"),
    (CSV, "", "begin with the names of the columns, which are now img/1.jpg,"),
    ("1.jpg a dog\n2.jpg a cat", "", "the names of the columns, which are now 1.jpg a dog"),
    (b"PK\3\4\x14\0\xb4", "", "is not UTF-8 text: save it as such, a spreadsheet as .csv"),
    ("a bus\thttp://x.com/1?w=9\n", "", "columns, which are now a bus, http://x.com/1"),
    ('image\tcaption\n1.jpg\t"a\n2.jpg\tb"\n', "", "a quote takes several lines into one cell"),
    ("image,caption\n1.jpg,\n2.jpg,-\n", "", "no caption is left: {root}/photos.jsonl is not wri"),
    (TAGGED + "2.jpg,b,-1,1\n", "--tag-column x_ray", "X Ray holds -1, 0: tags are words; or"),
    (TAGGED + "2.jpg,b,2,0\n", "--tag-column x-ray y", "X Ray holds 2, 0: tags are words; or 0"),
    (TABLE, "--output {root}/file/a.jsonl", "--output {root}/file cannot be a folder: File exists"),
    (TABLE, "--output {root}/img", "must end in .jsonl, and be neither a folder nor the input"),
    ("[", "", "file is not valid JSON: Expecting value: line 1"),
    ('{"a": 1}\n\n{"a"', "", "file is not valid JSON: Expecting ':' delimiter: line 3"),
    ('{\n"a": 1\n"b"', "", "file is not valid JSON: Expecting ',' delimiter: line 3"),
    ("id,caption\n7,a\n8,b\n", "", "such as {{'id': '7', 'caption': 'a'}}, but photos of such"),
    ({"a": [{"image": "1.jpg"}], "b": [{"image": "2.jpg"}]}, "", "has no column caption: name it"),
    ({"train": [{"id": "7"}], "val": [], "test": [{"id": "8"}]}, "", "now train, val, test"),
    ({"image": {"0": "1.jpg"}, "caption": {"0": "a"}}, "", "{root} holds no photo of {root}/file"),
    ([{"image": "1.jpg", "conversations": []}], "", "has no column caption: name it"),
    ("{}", "", "needs rows with a name for each cell"),
    ("image,caption\n1.jpg,a,b\n", "", "line 2, has too many cells: captions need quotes"),
    ("image,caption,Caption\n1.jpg,a,b\n", "", "has two columns of one name: image, caption"),
    ("image,caption\n1.jpg,\"['a', 'b']\"\n", "", "caption holds a list as text, ['a', 'b']:"),
    ("image,caption\n1.jpg,['a' 'b']\n", "", "caption holds a list as text, ['a' 'b']: write the"),
    ({"1": ["a"], "2": ["b"]}, "", "has no column caption: name it with --caption-column"),
    ("id,image_id,caption\n1,2,a\n2,1,b\n", "", "which column names the photo, image_id or id?"),
    ('[{"image": "1.jpg", "caption": "a", "caption": "b"}]', "", "an object has a key twice: [('i"),
    ('{"image": "1.jpg", "caption": "a", "gps": {"x": 1, "x": 2}}', "", "a key twice: [('x', "),
    ("image,caption\n1.jpg,\"('a', 'b')\"\n", "", "caption holds a list as text, ('a', 'b'):"),
    ("image,caption\n1.jpg,\"array(['a'])\"\n", "", "caption holds a list as text, array(['a']):"),
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
    content, flags, *splits = FORMATS[taken]
    printed, lines = convert({"file": content}, flags)
    assert taken in printed and " 3 captions\n" in printed
    assert {line["image"]: line["captions"] for line in lines} == CAPTIONED
    assert [line["split"] for line in lines if "split" in line] == splits


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant(case, convert, tmp_path):
    files, expected, words = MEANT[case]
    printed, lines = convert(files)
    assert {line["image"][4:-4]: line["captions"] for line in lines} == expected
    assert words.format(root=tmp_path) in printed


@pytest.mark.parametrize("cells, tags", TAGS)
def test_what_separates_tags(cells, tags, convert):
    """One of | ; and , does in a whole column, and nothing within the items of a list."""
    rows = [{**PAIR, "image": f"{n}.jpg", "tags": cell} for n, cell in enumerate(cells, 1)]
    printed, lines = convert({"a.json": rows}, "--tag-column tags")
    assert [line["tags"] for line in lines] == tags
    assert f" {len(sum(tags, []))} tags\n" in printed


def test_columns_with_the_same_tags(convert):
    rows = [{**PAIR, "bend": "pass", "pull": "fail"}, {**PAIR, "bend": "fail", "pull": ""}]
    printed, [line] = convert({"a.json": rows}, "--tag-column bend pull")
    assert line["tags"] == ["pass", "fail"]
    assert "a.json: bend and pull have the same tags: ['fail']\n" in printed


def test_tags_that_are_dictionaries(convert):
    rows = [{**PAIR, "tags": [{"dog": 1}, "cat"]}]
    printed, [line] = convert({"a.json": rows}, "--tag-column tags")
    assert line["tags"] == ["cat"]
    assert "1 tags that are no text, the first: {'image': '1.jpg', 'caption': 'a'," in printed


def test_tags_are_printed(convert):
    """Also where two rows of a photo do not agree, as two readers of an X-ray"""
    rows = "image,caption,kind,leak\n1.jpg,a,hai,1\n1.jpg,b,hai,0\n2.jpg,c,iie,1\n"
    printed, lines = convert({"file": rows}, "--tag-column kind leak")
    assert [line["tags"] for line in lines] == [["hai", "leak"], ["iie", "leak"]]
    assert " 3 different tags: ['hai', 'leak', 'iie']\n" in printed
    assert "1 rows with other tags than their photo's first row, the first: [" in printed


def test_what_separates_is_said(convert):
    rows = "image,caption,kind\n1.jpg,a,oil; wood\n2.jpg,b,\"oil, wood\"\n"
    printed, lines = convert({"file": rows}, "--tag-column kind")
    assert "file: texts in kind are split at ; and not at ,\n" in printed
    assert " 3 different tags: ['oil', 'wood', 'oil, wood']\n" in printed


def test_photos_whose_tags_are_not_known(convert):
    rows = "image,caption,leak\n1.jpg,a,no\n2.jpg,b,\n"
    printed, _ = convert({"file": rows}, "--tag-column leak")
    assert "1 photos whose tags are not known, the first: img/2.jpg\n" in printed
    assert "not known" not in convert({"file": rows})[0]


def test_links_that_point_nowhere(convert, tmp_path):
    """Are no photos, in tables as beside texts."""
    (tmp_path / "img").mkdir(exist_ok=True)
    (tmp_path / "img/lost.jpg").symlink_to(tmp_path / "gone.jpg")
    table_of_two = {"a.csv": "image,caption\nlost.jpg,a\n1.jpg,b"}
    for files in table_of_two, {"img/lost.txt": "a", "img/1.txt": "b"}:
        printed, lines = convert(files)
        (tmp_path / "a.csv").unlink(missing_ok=True)
        assert "1 rows without a photo, the first: [{'image': '" in printed
        assert not [line for line in lines if "lost" in line["image"]]


@pytest.mark.parametrize("files", ("a.txt a.jpg a.png", "B.txt b.txt b.jpg", "c.txt C.jpg c.jpg"))
def test_texts_of_several_photos(files, convert):
    message, _ = convert({f"img/{name}": b"words" for name in files.split()}, how=refusal)
    assert f"which text is of which photo? img/{files.split()[0]}" in message
    assert message.endswith("keep one KEY.txt and one photo KEY, or rename them")


def test_split(convert):
    """--split is that of all photos, whatever the column says."""
    files = {"a.csv": "image,caption\n2.jpg,b", "b.csv": "image,caption,split\n1.jpg,a,train"}
    printed, lines = convert(files, "--split val")
    assert [line["split"] for line in lines] == ["val", "val"]
    assert "2 photos (val)\n" in printed
    printed, lines = convert(files, "--split train")
    assert "captions: caption; split: train, not the column split; not used: split\n" in printed
    assert "2 photos (no split)\n" in printed
    assert not any("split" in line for line in lines)  # of these, some will be held out


def test_names_of_splits(convert):
    rows = "1.jpg,a,Restval\n2.jpg,b,validation\n"
    _, lines = convert({"file": "image,caption,Split\n" + rows})
    assert [line["split"] for line in lines] == ["train", "val"]


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
    assert f"1 rows in another split than their photo's first, the first: ['{tmp_path}" in printed


def test_photos_with_tags_alone(convert, tmp_path):
    """The tables of labels that eval_linear.py and tp.py read"""
    printed, lines = convert({"file": "image,label\n1.jpg,a\n2.jpg,b\n"}, "--tag-column label")
    assert [line["tags"] for line in lines] == [["a"], ["b"]]
    assert printed.endswith(f"use it with --data {tmp_path}/photos.jsonl\n")


def test_a_folder_without_texts(convert, tmp_path):
    message, _ = convert({"img/info.json": "", "img/a.parquet": ""}, how=refusal)
    assert f"{tmp_path} has no KEY.txt beside KEY.jpg: name the file that holds" in message


def test_what_it_writes_is_read(convert, tmp_path):
    convert({"file": json.dumps(RAW)})
    train = one_split(str(tmp_path / "photos.jsonl"))
    assert list(train.captions) == [CAPTIONED["img/1.jpg"]]


def test_photos_inside_parquet(convert, tmp_path, monkeypatch):
    """The code of docs/running.md makes them files."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    photo = (tmp_path / "img/1.jpg").read_bytes()
    row = {"image": {"bytes": photo, "path": None}, "caption": "a"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    text = (ROOT / "docs/running.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    val = one_split("photos.jsonl", split="val")
    assert list(val.captions) == [["a"]] and open(val.images[0], "rb").read() == photo


def test_parquet(convert):
    message, _ = convert({"train.parquet": b"PAR1"}, how=refusal)
    assert "train.parquet: docs/running.md writes the rows of a .parquet as photos.jsonl" in message


# -------------------------------------------------------------------------- nothing guessed

SCANS = "p07_1.jpg", "p07_2.jpg", "p09_1.jpg", "p11_1.jpg"
BY_KEY = {"p07_1": "a", "p07_2": "b", "p09_1": "c", "p11_1": "d"}


# Which column names the photo: photos, a table, the captions by stem or a refusal; that of captions
COLUMNS = {
    "links that name some of the photos of other rows": (
        SCANS,
        table("link,finding,study", "https://x.org/p07_2.jpg,a,p07_1", "https://x.org/p09_1.jpg,b,p"
              "07_2", "https://x.org/p11_1.jpg,c,p09_1", "https://x.org/p99_1.jpg,d,p11_1"),
        BY_KEY, "finding",
    ),
    "numbers in a column named image": (
        ("0.png", "1.png", "2.png"),
        table("image,text,scan", "0,x,2.png", "1,y,0.png", "2,z,1.png"),
        {"2": "x", "0": "y", "1": "z"}, "text",
    ),
    "numbers that are no names": (
        ("31.jpg", "47.jpg", "31b.jpg", "47b.jpg"),
        table("age,report,number", "31,a,47b", "47,b,31b"), {"47b": "a", "31b": "b"}, "report",
    ),
    "numbers that may be names, of one row each": (
        ("1.tif", "2.tif"), table("patient_id,visit_no,report", "1,2,a", "2,1,b"),
        "which column names the photo, visit_no or patient_id?", "report",
    ),
    "two columns of paths": (
        ("a.jpg", "b.jpg", "a_mask.jpg", "b_mask.jpg"),
        table("tile,segmentation,caption", "a.jpg,a_mask.jpg,x", "b.jpg,b_mask.jpg,y"),
        "which column names the photo, tile or segmentation? Give",
    ),
    "two columns that name the same photos": (
        ("a.jpg", "b.jpg"), table("accession,file,title", "a,a.jpg,x", "b,b.jpg,y"),
        {"a": "x", "b": "y"}, "title",
    ),
    "a hit in seven rows": (
        ("vase.jpg", "cup.jpg"),
        table("object,title", "vase,a", *(f"inv{n},b" for n in range(6))),
        "only 14% of object name a photo below", "title",
    ),
    "more than half of the photos": (
        ("a.jpg", "b.jpg"), table("object,title", "a,x", "b,y", "c,z"), {"a": "x", "b": "y"},
        "title",
    ),
    "a class that is the name of a sample": (
        ("dog.jpg", "cat.jpg"), table("item,caption,label", "k1,x,dog", "k2,y,cat"),
        "holds no photo of",
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
        "has no column caption: name it with --caption-column",
    ),
    "a line end of old Macs": (
        ("a.jpg", "b.jpg"), "image,caption\ra.jpg,x\rb.jpg,y\r", {"a": "x", "b": "y"},
    ),
    "a quote within a caption": (
        ("a.jpg", "b.jpg", "c.jpg"),
        table("image,caption", "a.jpg,x", 'b.jpg,"y" z', "c.jpg,z"), "line 3: ',' expected after",
    ),
    "a quote that is not closed": (
        ("a.jpg", "b.jpg"), table("key,caption", "a,x", 'b,"y', "c,z", 'd,w"'),
        "line 3: {'key': 'b', 'caption': 'y\\nc,z\\nd,w'}: a quote takes several lines",
    ),
    "a third column without a header": (
        ("a.jpg", "b.jpg"), "key\tcaption\na\tx\nb\t4\ty\n", "line 3, has too many cells",
    ),
    "two paths in a cell, with a space": (
        ("n_1.tif", "s_1.tif"), table("tile,caption", "x/n_1.tif x/s_1.tif,a", "x/s_1.tif,b"),
        "a cell of tile names several photos, x/n_1.tif x/s_1.tif: write a row",
    ),
    "two paths in a cell, without endings": (
        ("n_1.tif", "s_1.tif"), table("tile;caption", "x/n_1, x/s_1;a", "x/s_1|x/n_1;b"),
        "a cell of tile names several photos, x/n_1, x/s_1: write a row",
    ),
    "two links in a cell, one of a photo that is not here": (
        ("n_1.tif", "s_1.tif"),
        table("tile,caption", '"http://x.org/n_1.tif?w=9, http://x.org/z.tif?w=9",a', "s_1.tif,b"),
        "a cell of tile names several photos, http:/x.org/n_1.tif, http:/x.org/z.tif: write",
    ),
    "a copy's name, whose beginning is another photo's": (
        ("9 (2).png", "9.png", "cup.png"), table("file,caption", "x/9 (2).jpg,a", "x/cup.jpg,b"),
        {"9 (2)": "a", "cup": "b"},
    ),
    "a name with a comma and a space": (
        ("bowl, 9.jpg b.jpg", "cup.jpg"), table("file|caption", "bowl, 9.jpg b.jpg|x", "cup.jpg|y"),
        {"bowl, 9.jpg b": "x", "cup": "y"},
    ),
    "numbers beside photos that are not here": (
        ("1.png", "2.png"), table("id,photo,title", "1,vase_2.png,a", "2,vase_1.png,b"),
        "which column names the photo, id or photo? Give --image-column", "title",
    ),
    "numbers beside links to other photos": (
        ("1.png", "2.png"),
        table("no,link,title", "1,https://m.org/2.png?s=1,a", "2,https://m.org/1.png#x,b"),
        "which column names the photo,", "title",
    ),
    "numbers beside links to the same photos": (
        ("1.png", "2.png"),
        table("no,link,title", "1,https://m.org/1.png?s=1,a", "2,https://m.org/2.png#x,b"),
        {"1": "a", "2": "b"}, "title",
    ),
    "a fuller column beside image": (
        ("a.jpg", "a_s.jpg", "b.jpg", "b_s.jpg", "c_s.jpg"),
        table("image,small,caption", "a.jpg,a_s.jpg,x", "b.jpg,b_s.jpg,y", ",c_s.jpg,z"),
        "which column names the photo, small or image? Give --image-column",
    ),
    "a column image that names no photo, beside another one": (
        ("a.jpg", "b.jpg"),
        table("image,similar,caption", "iiif/a/max,b.jpg,x", "iiif/b/max,a.jpg,y"),
        "which column names the photo, similar or image? Give --image-column",
    ),
    "two names in a cell, with a slash": (
        ("oak.jpg", "elm.jpg", "fir.jpg"), table("image,caption", "oak,x", "elm/fir,y"),
        "a cell of image names several photos, elm/fir: write a row for each",
    ),
    "one row with a list of parts": (
        ("oak.jpg", "leaf.jpg"),
        json.dumps({"image": "oak.jpg", "caption": "x", "parts": [{"image": "leaf.jpg",
                                                                   "caption": "y"}]}),
        {"oak": "x"},
    ),
    "another folder, of which no photo is here": (
        ("north/1.jpg", "north/2.jpg", "south/3.jpg"),
        table("image,caption", "trap/north/1.jpg,x", "trap/west/2.jpg,y", "trap/north/2.jpg,z"),
        {"north/1": "x", "north/2": "z"},
    ),
    "numbers in a column that is not named like photos": (
        ("1.png", "2.png"), table("floor,title", "1,a", "2,b"),
        "but photos of such names: ['1', '2']. See --root and --image-column", "title",
    ),
    "links": (
        ("old m\xfchle.jpg", "c.png"),
        table("url,caption", "HTTPS://m.org/old%20m%C3%BChle.jpg?s=a/b.jpg,x", "http://m.org/c.png,"
              "y"),
        {"old m\xfchle": "x", "c": "y"},
    ),
    "%20 in a name that is no link": (
        ("old%20mill.jpg", "c.png"), table("file,caption", "old%20mill.jpg,x", "c.png,y"),
        {"old%20mill": "x", "c": "y"},
    ),
    "no photo of a table": (
        ("0007.jpg",), table("id,caption", "7,x"),
        "{'id': '7', 'caption': 'x'}, but photos of such names: ['0007']. See --root",
    ),
    "spaces before quotes": (
        ("a.jpg", "b.jpg"), table("image, caption", 'a.jpg, "x, y"', "b.jpg,  z"),
        {"a": "x, y", "b": "z"},
    ),
    "Excel's empty columns at the end": (
        ("a.jpg", "b.jpg"), table("image;caption;;", "a.jpg;x;;", "b.jpg;y, z;;"),
        {"a": "x", "b": "y, z"},
    ),
    "a column at the end whose name is missing": (
        ("a.jpg", "b.jpg"), table("image,caption,", "a.jpg,x,", "b.jpg,y,z"),
        "line 3, has too many cells",
    ),
    "a header alone": (("a.jpg",), "image,caption\n", "has no rows, or none below the names"),
    "an empty file": (("a.jpg",), "\n", "has no rows, or none below the names"),
    "a long cell": (
        ("a.jpg",), table("image,caption,body", f"a.jpg,x,{'y' * 200_000}"), {"a": "x"},
    ),
    "a lost character": (
        ("a.jpg",), table("image,caption", "a.jpg,x", "a.jpg,fa\ufffdade"),
        "table, line 3, is not UTF-8 text",
    ),
    "a Python list with quotes in its texts": (
        ("a.jpg",), 'image,caption\na.jpg,"[\'it says \'\'go\'\' now\', ""a \'b\' \'c\'""]"\n'
        .replace("''", '""'), "caption holds a list as text",
    ),
    "more keys than a line holds": (
        SCANS, json.dumps({f"q{n}": ["a"] for n in range(9999)}), "has no column caption: name it",
    ),
    "lists of photos and of captions": (
        ("a.jpg", "b.jpg"), json.dumps({"image": ["a.jpg", "b.jpg"], "caption": ["x", "y"]}),
        "a cell of image names several photos, ['a.jpg', 'b.jpg']: write a row for each",
    ),
    "two images of one id": (
        ("a.jpg", "b.jpg"),
        json.dumps({"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}],
                    "annotations": [{"image_id": 1, "caption": "x"}]}),
        "several images have the same id",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_nothing_guessed(case, tmp_path):
    photos, text, expected, *captions = COLUMNS[case]
    for name in photos:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "table").write_bytes(text.encode())
    command = ["tools.to_jsonl", tmp_path / "table", "--output", tmp_path / "photos.jsonl"]
    command += ["--caption-column", *captions] if captions else []
    if isinstance(expected, str):
        message = refusal(command)
        assert expected in message and len(message) < 700
        return
    run_here(command)
    lines = map(json.loads, (tmp_path / "photos.jsonl").open(encoding="utf-8"))
    found = {line["image"].rsplit(".", 1)[0]: "|".join(line["captions"]) for line in lines}
    assert found == expected


VOTES = {  # cells of tag columns: the tags of each row, or words of the refusal
    ("sea,port", "12,0", "3,1"): "sea holds 12, 3: tags are words; or 0 and 1, or yes and no",
    ("sea,port", "0.2,0.7", "0.9,0.1"): "sea holds 0.2, 0.9: tags",
    ("sea,port", "TRUE,FALSE", "false,true"): [["sea"], ["port"]],
    ("sea,port", "Yes,no", "no,no"): [["sea"], []],
    ("sea,port", "x,", ",X", ","): [["sea"], ["port"], []],
    ("sea,port", "✓,✓", "✓,"): [["sea", "port"], ["sea"]],
    ("sea,port", "yes,no", "maybe,yes"): "sea holds yes, maybe: tags are words",
    ("sea,port", "Wahr,FALSCH", "FALSCH,Wahr"): "sea holds falsch, wahr: tags are words",
    ("sea,port", "vrai,quay", "faux,pier"): "sea holds faux, vrai: tags are words",
    ("sea,port", "calm,verdadero", "rough,falso"): "port holds falso, verdadero: tags",
    ("sea,port", "calm,vero", "rough,pier"): "port holds vero, pier: tags",
    ("sea,port", "1,0", "2,0", "0,1"): "sea holds 2, 0, 1: tags are words; or 0 and 1, or yes and "
    "no, or one mark, in all cells: replace votes by 1 and 0",
    ("sea,port", "#N/A,1", "1,0", "0,#REF!"): [["port"], ["sea"], []],
    ("sea,port", "ja,nein", "nein,ja"): "sea holds ja, nein: tags are words",
    ("sea,port", "75%,quay", "5 %,pier"): "sea holds 5 %, 75%: tags are words",
    ("sea,port", "2/3,quay", "0/3,pier"): "sea holds 0/3, 2/3: tags",
    ("sea,port", "<5,quay", ">9,pier"): "sea holds <5, >9: tags",
    ("sea,port", "x,quay", "*,pier"): "sea holds *, x: tags",
    ("sea,port", "x,quay", "1,pier"): "sea holds 1, x: tags",
    ("sea,port", "calm,yes", "rough,pier"): "port holds yes, pier: tags",
    ("sea,port", "calm,Sim", "rough,Não"): "port holds não, sim: tags",
    ("sea,port", "calm,3e-4", "rough,1E5"): "port holds 1e5, 3e-4: tags",
    ("sea,port", "calm,old", "rough,new"): [["calm", "old"], ["rough", "new"]],
    ("sea,port", "calm|0.9,old", "rough|0.7,new"): [["calm", "old"], ["rough", "new"]],
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
    words = "within quotes: 1, the first in line 202: {'image': '2.jpg', 'caption': 'a\\nb'}"
    assert words in printed
    assert lines[1]["captions"] == ["a b"]


@pytest.mark.parametrize("between", (0, 1, 60))
@pytest.mark.parametrize(
    "header", ("image,caption", "image,caption,month", "caption,image", "image\tcaption")
)
def test_rows_that_a_quote_swallows(header, between, convert):
    """Two stray quotes in 400 rows: each line counts, and what looks like a row is enough."""
    mark = "\t" if "\t" in header else ","
    cells = {"image": "1.jpg", "month": "5"}
    texts = [f"field {n}" for n in range(400)]
    texts[70], texts[71 + between] = '"a harbour', 'a quay"'
    rows = [mark.join({**cells, "caption": x}[key] for key in header.split(mark)) for x in texts]
    message, _ = convert({"file": table(header, *rows)}, how=refusal)
    assert "file, line 72: {" in message and "Is it not closed? Write captions of" in message


def test_lines_within_quotes_are_counted(convert):
    """Five in one cell of three hundred rows, without a comma"""
    rows = [f"1.jpg,caption {n}" for n in range(300)] + ['2.jpg,"a\nb\nc\nd\ne"']
    message, _ = convert({"file": table("image,caption", *rows)}, how=refusal)
    assert "line 302: {'image': '2.jpg', 'caption': 'a\\nb" in message


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
