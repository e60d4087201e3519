"""tools/to_jsonl.py: files of other projects, and the lines or the message that they become"""

import importlib
import io
import json
import sys

import pytest
from conftest import one_split, refusal, run_here
from PIL import Image

from extras import folders
from tools import to_jsonl

A, B, C = 'two "red" kites, flying', "cats &amp;quot;play&quot;", "ein Bär im Grünen"
PAIRS = ("img/1.jpg", A), ("img/1.jpg", B), ("img/2.jpg", C)
CAPTIONED = {"img/1.jpg": [A, 'cats "play"'], "img/2.jpg": [C]}  # what all LAYOUTS become
CELLS = f'img/1.jpg,"two ""red"" kites, flying"\nimg/1.jpg,"{B}"\nimg/2.jpg,{C}\n'
PIPES = "".join(f"{name}| 0| {text}\n" for name, text in PAIRS)
COCO = {
    "info": {},
    "images": [{"id": n, "file_name": f"img/{n}.jpg"} for n in (1, 2, 2)],
    "annotations": [{"id": 7, "image_id": name[4], "caption": text} for name, text in PAIRS],
}
ROWS = [{"image": "img/1.jpg", "caption": [A, " ", B]}, {"image": "img/2.jpg", "caption": C}]
KARPATHY = [
    {"filename": "1.jpg", "split": "restval", "sentences": [{"raw": A}, {"raw": B}]},
    {"filename": "2.jpg", "split": "test", "sentences": [{"raw": C}]},
]
IN_COCO = [{**row, "filepath": "img"} for row in KARPATHY]
LLAVA = [
    {"image": name, "talk": [{"from": "Human", "value": "?"}, {"from": "gpt", "value": text}]}
    for name, text in PAIRS
]
CHATS = [
    {"images": [name], "messages": [{"role": "user", "content": "?"},
                                    {"role": "assistant", "content": text}]}
    for name, text in PAIRS
]

LAYOUTS = {  # FILE, its content, flags
    "a table": ("a.csv", "image,caption\n" + CELLS, ""),
    "of Excel": ("a.csv", "\ufeffImage;Text;;\r\n" + CELLS.replace("jpg,", "jpg;"), ""),
    "of pandas": ("a.csv", ",image,caption\n" + CELLS.replace("img", "7,img"), ""),
    "with tabs": ("a.tsv", "filepath\ttitle\n" + CELLS.replace("jpg,", "jpg\t"), ""),
    "of a Mac": ("a.csv", "image, text\r" + CELLS.replace(",", ", ").replace("\n", "\r"), ""),
    "Flickr30k": ("a.csv", "name| n| what\n" + PIPES, "--image name --captions what"),
    "keys": (
        "a.txt", "id,what\n" + CELLS.replace("img/", "").replace(".jpg", ""),
        "--image id --captions what --root {root}/img --ending .jpg",
    ),
    "COCO": ("a.json", COCO, ""),
    "a list": ("a.json", ROWS, ""),
    "lines": ("a.jsonl", "\n\n".join(map(json.dumps, ROWS)), ""),
    "an object": ("a.json", {"data": ROWS, "year": 2014}, ""),
    "Karpathy's COCO": ("a.json", {"images": IN_COCO, "dataset": "coco"}, ""),
    "Karpathy's Flickr": ("img/a.json", {"images": KARPATHY, "dataset": "flickr8k"}, ""),
    "LLaVA": ("a.json", LLAVA, "--captions talk"),
    "chats": ("a.jsonl", "\n".join(map(json.dumps, CHATS)), "--image images --captions messages"),
}


@pytest.fixture
def convert(tmp_path):
    """-> function ({file: content}, flags, FILEs) -> what is printed, lines of the output"""
    for name in "img/1.jpg", "img/2.jpg":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")

    def run(files, flags="", given=None, how=run_here):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            if not isinstance(content, (str, bytes)):
                content = json.dumps(content, indent=1)
            content = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(content)
        given = [tmp_path / name for name in ([*files][:1] if given is None else given)]
        flags = flags.format(root=tmp_path).split()
        printed = how(["tools.to_jsonl", *given, "--output", tmp_path / "photos.jsonl", *flags])
        lines = tmp_path / "photos.jsonl"
        return printed, lines.exists() and list(map(json.loads, lines.open(encoding="utf-8")))

    return run


def table(header, *rows):
    return {"a.csv": "\n".join([header, *rows])}


def captions_of(lines):
    return {line["image"]: line["captions"] for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, convert):
    name, content, flags = LAYOUTS[layout]
    printed, lines = convert({name: content}, flags)
    assert captions_of(lines) == CAPTIONED and " 3 captions\n" in printed
    splits = ["train", "test"] if "Karpathy" in layout else []
    assert [line["split"] for line in lines if "split" in line] == splits


TEXTS = f"{A}\n\n{B}\n", C
METADATA = "\n".join(json.dumps({"file_name": name, "text": text}) for name, text in PAIRS)


@pytest.mark.parametrize("files", (
    dict(zip(("img/1.txt", "img/2.TXT"), TEXTS)),
    dict(zip(("img/1.caption", "img/2.caption"), TEXTS)),
    {"metadata.csv": "file_name,text\n" + CELLS},
    {"metadata.jsonl": METADATA},
))
def test_folders(files, convert):
    assert captions_of(convert(files, given=[""])[1]) == CAPTIONED


def test_columns_are_printed(convert):
    printed, _ = convert(table("id,file_name,text", "1,img/1.jpg,a"))
    assert "a.csv: image: file_name; captions: text; not used: id\n" in printed


def test_what_it_writes_is_read(convert, tmp_path):
    convert({"a.json": IN_COCO})
    train = one_split(str(tmp_path / "photos.jsonl"))
    assert list(train.captions) == [CAPTIONED["img/1.jpg"]]


def test_cells_are_as_written(convert):
    """pandas drops NA and null, makes 3.0 of 3, and loses digits of long numbers."""
    long = "9007199254740993"
    rows = "img/1.jpg,NA,3", "img/1.jpg,null,3.0", f"img/2.jpg,None,{long}", "img/2.jpg,nan,007"
    printed, lines = convert(table("image,a,b", *rows), "--captions a b")
    assert lines[0]["captions"] == ["NA", "3", "null", "3.0"]
    assert lines[1]["captions"] == ["None", long, "nan", "007"]
    words = " 8 captions without a word (NA, nan, None, null...), kept, the first: ['NA']"
    assert words in printed
    text = f'[{{"image": "img/1.jpg", "text": [3, 3.0, {long}, 1e5, null, NaN]}}]'
    assert convert({"a.json": text})[1][0]["captions"] == ["3", "3.0", long, "1e5"]


COUNTED = {  # rows: captions of the photo, words of the output
    ("img/1.jpg,a", "img/3.jpg,b", ",c"): (
        ["a"], "2 rows without a photo, the first: ['{root}/img/3.jpg']",
    ),
    ("img/1.jpg,a", "./img\\1.jpg,a"): (["a"], "1 repeated captions, the first: ['a']"),
    ("img/1.jpg,&nbsp;",): ([], "1 empty captions, left out, the first: ['{root}/a.csv, line 3"),
    ("img/1.jpg,",): ([], "1 photos without a caption, the first: ['{root}/img/1.jpg']"),
    ("img/1.jpg,<p>1 <b>or</b></p> x<a<b",): (
        ["1 or x<a<b"], "1 captions that lost HTML, the first: ['<p>1",
    ),
    ("img/1.jpg,0 0.5 0.5 1 1",): (["0 0.5 0.5 1 1"], "1 captions without a word"),
    ('img/1.jpg,"a\n\nb"',): (["a b"], "1 captions with line breaks, now spaces, the first: ['a"),
}


@pytest.mark.parametrize("rows", COUNTED)
def test_what_is_counted(rows, convert, tmp_path):
    captions, words = COUNTED[rows]
    printed, lines = convert(table("image,caption", "img/2.jpg,z", *rows))
    assert lines[1:] == [{"image": "img/1.jpg", "captions": captions}]
    assert f" {words.format(root=tmp_path)}" in printed


def test_captions_of_no_image(convert, tmp_path):
    lost = {**COCO, "annotations": [*COCO["annotations"], {"image_id": 7, "caption": "a"}]}
    printed, lines = convert({"a.json": lost})
    assert captions_of(lines) == CAPTIONED
    assert f"1 rows without a photo, the first: ['{tmp_path}/a.json, row 7']" in printed


def test_texts_without_photos(convert, tmp_path):
    files = {"img/1.txt": "a\nb", "img/9.txt": "c", "img/.3.txt": "d", ".x/4.txt": "e"}
    printed, lines = convert(files, given=[""])
    assert [line["captions"] for line in lines] == [["a", "b"], []]
    assert "1 photos have a text of several lines, each of which is a caption, the fir" in printed
    assert f"1 rows without a photo, the first: ['{tmp_path}/img/9.txt']" in printed


ROW = {"image": "img/1.jpg", "text": "a"}
TWICE = {**COCO, "images": [{"id": 1, "file_name": name} for name in "ab"]}

REFUSED = [  # {file: content}, flags, words of the message
    ({"a.xml": ""}, "", "a.xml must end in .csv, .tsv, .txt, .xlsx, .json, .jsonl, .parquet"),
    (table("image,text", "img/1.jpg,a"), "--output {root}/a.csv", "must end in .jsonl, and be"),
    (table("image,text", "b,a"), "--captions c", "a.csv has no column c, but image, text"),
    (table("x,text", "b,a"), "", "give --image COLUMN, one of x, text (of the usual image, "),
    (table("image,y", "b,a"), "", "give --captions COLUMN, one of image, y (of the usual capt"),
    (table("image,filename,text", "b,b,a"), "", ", filename it has image and filename; the fir"),
    (table("image,text,caption", "b,b,a"), "", "sentences it has text and caption; the first l"),
    (table("image,text,text", "b,b,a"), "", "a.csv has two columns named 'text': rename one"),
    (table("image,text", "b,a", "b,a,b"), "", "line 3, has 3 cells, but 2 columns are named"),
    (table("image,text", "b,a", "b"), "", "line 3, has 1 cells, but 2 columns are named"),
    (table("image,text,", "b,a,", "b,a,b"), "", "line 3, has 3 cells, but 2 columns are named"),
    (table("image,text", 'b,"a" b'), "", "after line 1: ',' expected after '\"': quotes must be"),
    (table("image,text", 'b,"a'), "", "a.csv, after line 1: unexpected end of data: quotes mu"),
    (table("image,text", "img/1.jpg,\"['a', 'b']\""), "", "line 2: text holds ['a', 'b']: write"),
    (table("image,text", "\"{'path': 'b'}\",a"), "", "line 2: {{'path': 'b'}} is not the path of"),
    (table("image,text", "3.jpg,a"), "", "photo; that of the first is ['{root}/3.jpg']: cells"),
    (table("image,text", "img/1.jpg,"), "", "no caption has a word (see --captions): {root}/p"),
    (table("image,text", "img/1.jpg,17"), "", "no caption has a word (see --captions): {root}/p"),
    (table("image,text"), "", "a.csv has no rows below the names of its columns"),
    ({"a.csv": "image,text\nb,ä".encode("latin-1")}, "", "a.csv, line 2, is not UTF-8 text: save"),
    ({"a.json": '[{"image": 1\n"b"'}, "", "not valid JSON: Expecting ',' delimiter: line 2"),
    ({"a.json": '[{"image": 1, "image": 2}]'}, "", "an object has a key twice: [('image', '1')"),
    ({"a.json": {"x": [ROW], "y": [ROW]}}, "", "a.json is one object, with x, y: write a list"),
    ({"a.json": {**ROW, "y": [ROW]}}, "", "a.json is one object, with image, text, y: write a"),
    ({"a.json": ["img/1.jpg"]}, "", 'a.json has no rows such as {{"image": "1.jpg", "captions"'),
    ({"a.json": [{**ROW, "image": ["1", "2"]}]}, "", "row 1: ['1', '2'] is not the path of one"),
    ({"a.json": [{**ROW, "text": {"de": "a"}}]}, "", "row 1: text holds {{'de': 'a'}}: write"),
    ({"a.json": [{**ROW, "text": [{"from": "bot", "value": "a"}]}]}, "", "text holds {{'from':"),
    ({"a.json": TWICE}, "", "a.json: the image b has no id, or that of another image"),
]


@pytest.mark.parametrize("files, flags, words", REFUSED)
def test_refusals(files, flags, words, convert, tmp_path):
    message, lines = convert(files, flags, how=refusal)
    assert words.format(root=tmp_path) in message and len(message) < 500 and not lines


@pytest.mark.parametrize("files, words", [
    ({"img/a.csv": ""}, "has neither metadata.csv or .jsonl nor KEY.txt beside KEY.jpg: name the"),
    ({"img/1.txt": "a", "img/1.caption": "b"}, "which text is of which photo? {root}/img/1.jpg, "),
    ({"img/1.txt": "a", "img/1.png": ""}, "which text is of which photo? {root}/img/1.jpg, {root}"),
])
def test_refused_folders(files, words, convert, tmp_path):
    message, _ = convert(files, given=[""], how=refusal)
    assert words.format(root=tmp_path) in message


@pytest.mark.parametrize("between", (0, 1, 60))
@pytest.mark.parametrize(
    "header", ("image,caption", "image,caption,month", "caption,image", "image\tcaption")
)
def test_rows_that_a_quote_swallows(header, between, convert):
    """Two stray quotes in 400 rows join rows into one, whose length is right."""
    mark = "\t" if "\t" in header else ","
    texts = [f"field {n}" for n in range(400)]
    texts[70], texts[71 + between] = '"a harbour', 'a quay"'
    cells = {"image": "img/1.jpg", "month": "5"}
    rows = [mark.join({**cells, "caption": x}[name] for name in header.split(mark)) for x in texts]
    message, _ = convert(table(header, *rows), how=refusal)
    assert f"a.csv: a quote joins the lines 72 to {73 + between}" in message


# ---------------------------------------------------------------------------------- splits and tags


def test_split_of_a_column(convert):
    rows = "img/1.jpg,a,Validation", "img/2.jpg,b,", "img/2.jpg,c,train", "img/1.jpg,d,test"
    printed, lines = convert(table("image,text,split", *rows))
    assert [line["split"] for line in lines] == ["val", "train"]
    assert "1 rows in another split than their photo's first, the first: [" in printed
    _, lines = convert(table("image,text,fold", *rows), "--split fold")
    assert [line["split"] for line in lines] == ["val", "train"]
    printed, lines = convert(table("image,text,split", *rows), "--split-name dev")
    assert [line["split"] for line in lines] == ["val", "val"] and "; not used: split\n" in printed


def test_all_for_training_is_no_split(convert):
    """Otherwise no photo would be held out."""
    printed, lines = convert(table("image,text", "img/1.jpg,a"), "--split-name train")
    assert lines == [{"image": "img/1.jpg", "captions": ["a"]}]
    assert "1 photos (no split)" in printed


HUB = {"train/metadata.jsonl": {"file_name": "3.jpg", "text": "a"},
       "validation/metadata.jsonl": {"file_name": "3.jpg", "text": "b"}}
PHOTOS = {"train/3.jpg": "", "validation/3.jpg": ""}


@pytest.mark.parametrize("given", ([""], HUB))
def test_splits_of_folders(given, convert):
    """Hugging Face's imagefolder, and several FILEs"""
    printed, lines = convert({**HUB, **PHOTOS}, given=given)
    assert captions_of(lines) == {"train/3.jpg": ["a"], "validation/3.jpg": ["b"]}
    assert [line["split"] for line in lines] == ["train", "val"]
    assert "validation/metadata.jsonl: split: validation, the name of its folder\n" in printed


def test_splits_that_would_be_mixed(convert):
    text = "file_name,text\ntrain/3.jpg,a\nvalidation/3.jpg,b"
    files = {**PHOTOS, "a.csv": text, "img/a.csv": text}
    message, _ = convert(files, given=["a.csv"], how=refusal)
    assert "photos are in folders train and validation, but no column says their spl" in message
    message, _ = convert(files, given=["a.csv", "img/a.csv"], how=refusal)
    assert "a.csv has no column split, and its folder is not named train, val or tes" in message
    _, lines = convert(files, "--split-name train", given=["a.csv"])
    assert not any("split" in line for line in lines)


TAGS = {  # columns, flags, cells of the two photos: their tags
    ("kind", "--tags kind", "a; b", "b"): [["a; b"], ["b"]],
    ("kind", "--tags kind --separator ;", "a; b;", "b"): [["a", "b"], ["b"]],
    ("x,y", "--tags x y", "a,b", ","): [["a", "b"], None],
    ("X Ray,y", "--tags-if-1 y", "0,1", "1,0"): [["y"], []],
    ("x,y", "--tags-if-1 x y", "TRUE,no", "0.0,"): [["x"], []],
}


@pytest.mark.parametrize("case", TAGS)
def test_tags(case, convert):
    columns, flags, *cells = case
    rows = [f"img/{n}.jpg,z,{row}" for n, row in enumerate(cells, 1)]
    printed, lines = convert(table(f"image,caption,{columns}", *rows), flags)
    assert [line.get("tags") for line in lines] == TAGS[case]
    empty = "1 empty cells of --tags-if-1, which count as 0, the first: ["
    assert (empty in printed) == ("0.0," in case)


def test_tags_in_lists(convert):
    """An empty list says that no tag fits. Photos may have tags alone."""
    rows = [{"image": "img/1.jpg", "tags": ["a; b", "c"]}, {"image": "img/2.jpg", "tags": []}]
    printed, lines = convert({"a.json": rows}, "--tags tags --separator ;")
    assert [line["tags"] for line in lines] == [["a; b", "c"], []]
    assert " 2 photos with known tags\n" in printed
    assert " 2 tags, 2 different ones: a; b, c\n" in printed


def test_votes(convert):
    rows = table("image,text,x", "img/1.jpg,a,1", "img/2.jpg,b,-1")
    message, _ = convert(rows, "--tags-if-1 x", how=refusal)
    assert "a.csv, line 3: --tags-if-1 x needs 1 or 0 (true, false, yes, no), not -1" in message


# -------------------------------------------------------------------------------- optional packages


@pytest.mark.parametrize("name, package", [("a.xlsx", "openpyxl"), ("a.parquet", "pyarrow")])
def test_missing_packages(name, package, convert, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message, _ = convert({name: b""}, how=refusal)
    assert message == f"error: {package} is missing: python -m pip install {package}"


def test_excel(convert, tmp_path):
    book = pytest.importorskip("openpyxl").Workbook()
    for cells in ("image", "text", None), ("img/1.jpg", 3, None), ("img/1.jpg", 7), (None,):
        book.active.append(cells)
    book.active["B3"].number_format = "000"
    book.create_sheet("notes")
    book.save(tmp_path / "a.xlsx")
    printed, lines = convert({}, given=["a.xlsx"])
    assert lines == [{"image": "img/1.jpg", "captions": ["3", "007"]}]
    assert "a.xlsx: read the sheet Sheet, not ['notes']\n" in printed


@pytest.fixture
def parquet(tmp_path):
    """-> function (name, rows): write a file of them"""
    pyarrow = pytest.importorskip("pyarrow")
    module = importlib.import_module("pyarrow.parquet")

    def write(name, rows):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        module.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)

    return write


def jpeg(colour):
    content = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(content, "JPEG")
    return content.getvalue()


def test_photos_inside_parquet(convert, parquet, tmp_path):
    """As on the Hub; as datasets writes them without their bytes; as img2dataset, one not found"""
    hub = {"image": {"bytes": jpeg("red"), "path": "1.jpg"}, "captions": ["a", "b"]}
    parquet("a.parquet", [hub])
    _, [line] = convert({}, given=["a.parquet"])
    assert (tmp_path / line["image"]).read_bytes() == jpeg("red")
    assert line["captions"] == ["a", "b"]
    hub["image"] = {"bytes": None, "path": str(tmp_path / "img/2.jpg")}
    parquet("a.parquet", [hub])
    assert captions_of(convert({}, given=["a.parquet"])[1]) == {"img/2.jpg": ["a", "b"]}
    parquet("a.parquet", [{"jpg": jpeg("blue"), "text": "c"}, {"jpg": None, "text": "d"}])
    printed, [line] = convert({}, "--image jpg", given=["a.parquet"])
    assert (tmp_path / line["image"]).read_bytes() == jpeg("blue") and line["captions"] == ["c"]
    assert "1 rows without a photo, the first: [" in printed


def test_parquet_files_of_one_name(convert, parquet, tmp_path):
    """In one command or in two, no photo overwrites another one's."""
    colours = {"train/0.parquet": ["red", "blue"], "val/0.parquet": ["green", "red"]}
    for name, values in colours.items():
        rows = [{"image": {"bytes": jpeg(x), "path": "0.jpg"}, "caption": x} for x in values]
        parquet(name, rows)
    printed, lines = convert({}, given=colours)
    assert [line["split"] for line in lines] == ["train", "train", "val"]
    assert "1 rows in another split than their photo's first" in printed
    for name in colours:
        lines += convert({}, given=[name])[1]
    for line in lines:
        assert (tmp_path / line["image"]).read_bytes() == jpeg(line["captions"][0])


def test_copies():
    """to_jsonl.py imports nothing that needs torch."""
    assert to_jsonl.PHOTO_ENDINGS == folders.PHOTO_ENDINGS
    assert to_jsonl.ADDED_FOLDERS == folders.ADDED_FOLDERS


def test_deleted_photos_stay_deleted(tmp_path, convert):
    """A NAS keeps them, with their captions, in the folder from which they were deleted."""
    for inner in "", "#recycle", "b/@Recycle", "@eaDir/1.jpg":
        (tmp_path / "a" / inner).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / "a" / inner / "1.jpg")
        (tmp_path / "a" / inner / "1.txt").write_text("a dog")
    printed, lines = convert({}, given=["a"])
    assert [line["image"] for line in lines] == ["a/1.jpg"]
    assert "files and folders are left out, which a file system or an archiver" in printed
