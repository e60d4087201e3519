"""Convert the caption files of other projects to our photos.jsonl

    python tools/to_jsonl.py dataset_flickr8k.json --root flickr8k --output flickr8k.jsonl
    python tools/to_jsonl.py table.csv --image-column photo --caption-column sentence

By content it recognises Karpathy's dataset_*.json, RSICD, token.txt and captions.txt of Flickr8k,
results.csv of Flickr30k, captions_*.json of COCO, metadata.jsonl and .csv of Hugging Face, tables
of open_clip and ROCO, conversations of LLaVA (their first answer becomes the caption), and other
.json, .jsonl, .csv and .tsv with an image and a caption, or a list of captions, in each row.
Photos that are not where the file says are looked up by name in the subfolders of --root.
"""

import argparse
import csv
import io
import json
import os
import re
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, print_main

LAYOUTS = {  # by the columns of the image and of its captions; all names are in lower case
    ("filename", "sentences"): "Karpathy's splits",
    ("image", "conversations"): "LLaVA's conversations",
    ("image_name", "comment"): "Flickr30k's results",
    ("file_name", "text"): "Hugging Face's imagefolder",
    ("filepath", "title"): "open_clip's table",
}
# Of several columns with such names, the first in this order counts.
IMAGES = "image image_path img_path image_name file_name filename filepath path file img name id"
CAPTIONS = "caption captions conversations raw sentences sentence text title comment description"
SPLITS = {"restval": "train", "validation": "val", "valid": "val", "dev": "val"}
ENDING = re.compile(r"(?i)\.(jpe?g|png|webp|gif|bmp|tiff?)$")
LINE = re.compile(r"(?i)(\S.*\.(jpe?g|png)(#\d+)?|ROCO\w*)\t")  # of token.txt: it has no header


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("file", help="the captions; in UTF-8, or UTF-16 with a byte order mark")
    add("--root", help="folder of the photos (default: that of the file)")
    add("--image-column", type=str.lower, help="column or key with the photo's path or name")
    add("--caption-column", type=str.lower, help="column or key with a caption or a list of them")
    add("--output", default="photos.jsonl", help=".jsonl to write; an existing one is replaced")
    return parser.parse_args(argv)


def main(args):
    root = Path(args.root or Path(args.file).parent)
    output = Path(args.output)
    if output.suffix != ".jsonl" or output.resolve() == Path(args.file).resolve():
        fail(f"--output {output} must end in .jsonl and must not be the input file")
    name, rows = read_rows(args.file)
    keys = {key for row in rows for key in row}
    image = args.image_column or next(filter(keys.__contains__, IMAGES.split()), None)
    caption = args.caption_column or next(filter(keys.__contains__, CAPTIONS.split()), None)
    if not {image, caption} <= keys:
        fail(f"{args.file}: which columns hold the image and its caption? Name two of them with "
             f"--image-column and --caption-column: {', '.join(sorted(keys))}")  # fmt: skip
    name = name or LAYOUTS.get((image, caption), "rows of images and captions")
    print_main(f"recognised: {name} (columns {image}, {caption})")
    photos, counts = gather(rows, image, caption)
    places = find_photos(root.resolve(), photos)
    lost = [str(root / name) for name in photos if not places[name]]
    if len(lost) == len(photos):
        fail(f"--root {root}: no photo is there or in a subfolder; tried {''.join(lost[:1])}")
    folder = output.parent.resolve()
    photos = [{"image": os.path.relpath(places[name], folder), **photos[name]}
              for name in photos if places[name]]  # fmt: skip
    splits = Counter(row.get("split", "no split") for row in photos)
    if splits.keys() <= {"train", "no split"}:
        for row in photos:  # without any split, --data holds out some photos for validation
            row.pop("split", None)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False).encode(errors="replace") for row in photos]
    output.write_bytes(b"\n".join([*lines, b""]))
    counts = {"captions": sum(len(row["captions"]) for row in photos), **counts}
    counts |= {f"photos ({split})": splits[split] for split in splits}
    counts[" ".join(["missing photos", *lost[:1]])] = len(lost)
    print_main("\n".join(f"{count:7d} {what}" for what, count in counts.items()))
    print_main(b"\n".join(lines[:3]).decode())
    print_main(f"python virtex.py --data {shlex.quote(args.output)}")


def read_rows(path):
    """-> name of the format or None, [{column in lower case: value}]"""
    if not os.path.isfile(path):
        fail(f"there is no {path}")
    name, content = None, Path(path).read_bytes()
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 (byte {error.start}). Convert it, for example from CP1252: "
             f"iconv -f CP1252 -t UTF-8 {shlex.quote(path)} > NEW_FILE")  # fmt: skip
    if text.lstrip().startswith(("{", "[")):
        name, rows = read_json(path, text)
    elif LINE.match(text):  # here quotes are only characters
        lines = re.findall(r"(.+?)(?:#\d+)?\t(.*)", text)
        name = "lines of name, tab, caption"
        rows = [{"image": photo, "caption": caption} for photo, caption in lines]
    else:
        rows = read_table(path, text)
    bad = [row for row in rows if not isinstance(row, dict) or None in row]
    if bad or not rows:
        fail(f"{path} needs rows with a name for each cell (commas in captions need quotes), but "
             f"has {str(bad[:1])[:200]}")  # fmt: skip
    return name, [{key.strip().lower(): row[key] for key in row} for row in rows]


def read_json(path, text):
    """-> name of the format or None, rows"""
    lines = [line for line in text.split("\n") if line.strip()]
    many = len(lines) > 1 and lines[0].rstrip().endswith("}")  # JSON on each line
    try:
        content = [json.loads(line) for line in lines] if many else json.loads(text)
    except json.JSONDecodeError as error:
        fail(f"{path} is not valid JSON: {error}, in {error.doc[:80]!r}")
    if isinstance(content, list):
        return None, content
    images, others = content.get("images"), content.get("annotations")
    if isinstance(images, list) and others and "file_name" in images[0]:
        names = {row.get("id"): row["file_name"] for row in images}
        others = [{**row, "file_name": names.get(row.get("image_id"))} for row in others]
        return "COCO's captions", images + others
    return None, others or images or [content]


def read_table(path, text):
    """csv, or another delimiter, as the header tells, which holds no captions"""
    delimiter = max(",\t|;", key=text.split("\n", 1)[0].count)
    lines = io.StringIO(text, newline="")  # captions may have several lines
    reader = csv.DictReader(lines, delimiter=delimiter, restval="", strict=True)
    try:
        return list(reader)
    except csv.Error as error:
        fail(f"{path}, line {reader.line_num}: {error}: captions with quotes need those of csv")


def gather(rows, image, caption):
    """-> {name of a photo: {"captions", "tags", "split"}}, counts of what is left out"""
    photos, counts = {}, Counter({"rows without a photo": 0, "empty captions": 0})
    for row in rows:
        name = str(row.get(image) or "").strip()
        if image == "filename":  # Karpathy's photos of COCO are in two folders
            name = os.path.join(row.get("filepath") or "", name)
        if not name:
            counts["rows without a photo"] += 1
            continue
        photo = photos.setdefault(name, {"captions": []})
        for text in texts(row.get(caption, [])):
            if common.one_line(text):
                photo["captions"].append(" ".join(text.split()))
            else:
                counts["empty captions"] += 1
        tags = row.get("tags") or row.get("labels")
        if tags and isinstance(tags, list) and isinstance(tags[0], str):
            photo["tags"] = tags
        split = str(row.get("split") or "").lower()
        if split:
            photo["split"] = SPLITS.get(split, split)
    return photos, counts


def texts(value):
    """A caption, a list of captions, or a chat -> strings, of which some may be empty"""
    items = value if isinstance(value, list) else [value]
    if items and isinstance(items[0], dict) and "from" in items[0]:  # the first exchange
        items = [turn["value"] for turn in items if turn["from"] == "gpt"][:1]
    for item in items:
        if isinstance(item, dict):
            item = item.get("raw") or item.get("caption")
        yield item if isinstance(item, str) else ""


def find_photos(root, names):
    """-> {name: path or None}; what is not at root/name is looked up by name in all subfolders"""
    places = {name: os.path.join(root, name) for name in names}
    missing = [name for name in places if not os.path.isfile(places[name])]
    index = defaultdict(list)  # without endings: ROCO's lines have none, and people convert photos
    for folder, _, files in os.walk(root) if missing else ():
        for file in files:
            index[ENDING.sub("", file)].append(os.path.join(folder, file))
    for name in missing:
        ending = "/" + name.replace("\\", "/")
        paths = index[ENDING.sub("", os.path.basename(ending))]
        paths = [path for path in paths if path.endswith(ending)] or paths
        places[name] = paths[0] if len(paths) == 1 else None
    return places


if __name__ == "__main__":
    main(get_args())
