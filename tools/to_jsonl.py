"""Convert captions of other projects to our photos.jsonl

    python tools/to_jsonl.py dataset_flickr8k.json --root flickr8k --output flickr8k.jsonl
    python tools/to_jsonl.py FOLDER    # with photos KEY.jpg and, in KEY.txt, a caption on each line
    python tools/to_jsonl.py train.csv val.csv --image-column photo --caption-column short long

It reads Karpathy's dataset_*.json, RSICD, token.txt and captions.txt of Flickr8k, results.csv of
Flickr30k, captions_*.json of COCO, R2Gen's annotation.json, metadata.jsonl, .csv and .parquet of
Hugging Face, tables of open_clip and ROCO, conversations of LLaVA (their first answer becomes the
caption), and other .json, .jsonl, .csv and .tsv with a photo and captions in each row. Photos that
are not where a file says are looked up by their path in the subfolders of --root, and, only if none
of the file's photos is found, by name without folder and ending (a missing photo is not replaced by
its mask); those inside a .parquet are written into a folder beside --output. Captions lose HTML's
entities, invisible characters such as soft hyphens, and ligatures. Tags in a cell stand between |;
if a column has none, between ; and else between commas. Columns of --tag-column that hold only 0
and 1 are tags by their names. It prints what it took for what, what it left out, and a command.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from pathlib import Path

import regex

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import fail, make_folder, print_main
from extras.caption_files import (
    ENDING,
    SPLITS,
    clean,
    column_name,
    find_photos,
    parse_list,
    photos_below,
    place,
    read_rows,
    short,
    split_in,
)

# Of several columns with such names, the first in this order counts. "caption" also stands for
# captions, caption_1, caption_2...
PHOTOS = """image image_path img_path image_name image_file file_name filename filepath path file
img photo picture jpg image_id img_id""".split()
VAGUE = "name", "id", "key"  # only if no other column has the photo's name
CAPTIONS = """caption conversation raw sentence text description title comment report finding
prompt txt""".split()
TAGS = "tag label keyword categorie category classe class finding_label".split()
SETS = "set", "subset", "partition", "fold"  # the split, if all values are names of splits
NOTHING = "", "nan", "none", "null", "n/a"  # what programs write into an empty cell
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")
MARKS = *YES, *NO, "-1", "-1.0"  # -1: not sure, by CheXpert, say
NUMBER = re.compile(r"-?\d+(\.\d*)?")


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="captions, in UTF-8 or UTF-16: one file, several "
        "(train, val or test in their names is the split), or a folder")  # fmt: skip
    add("--root", help="folder of the photos (default: that of each file)")
    add("--image-column", type=column_name, help="column or key with the photo's path or name")
    many = dict(type=column_name, nargs="+", default=[])
    add("--caption-column", **many, help="one or more, with captions")
    add("--tag-column", **many, help="one or more, with tags, or with 0 and 1")
    add("--output", default="photos.jsonl", help=".jsonl to write; an existing one is replaced")
    return parser.parse_args(argv)


def main(args):
    output = Path(args.output)
    files = [Path(file) for file in args.files]
    inputs = [file.resolve() for file in files]
    if output.suffix != ".jsonl" or output.is_dir() or output.resolve() in inputs:
        fail(f"--output {output} must end in .jsonl, be no folder, and must not be the input file")
    make_folder(output.absolute().parent)
    photos = {}  # path, links resolved: {"image": the path that was found, "captions", ...}
    notes = defaultdict(list)  # what was left out or changed: all examples of it
    for file in files:
        check = partial(check_columns, file, args)
        rows, spelling = read_rows(file, output.with_name(f"{output.stem}_photos"), check)
        words = [*re.findall("[a-z]+", file.stem.lower()), file.parent.name]
        if len(files) > 1 and (split := split_in(words)):
            rows = [{"split": split, **row} for row in rows]
        root = os.path.abspath(args.root or (file if file.is_dir() else file.parent))
        columns = choose_columns(file, rows, spelling, root, args)
        gather(rows, root, columns, photos, notes)
    write(output, photos, notes)


# ------------------------------------------------------------------------------------- columns


def choose_columns(file, rows, spelling, root, args):
    """-> {what: names of columns}, which it prints

    what: "photo", "captions", "split", "tags" (name: separator), "tags where 1" (name: tag)
    spelling: {name of a column: as the file spells it}
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    some = rows[:1000]
    like_photos = [key for key in keys if any(ENDING.search(str(row.get(key))) for row in some)]
    found = [columns_of([kind], keys) for kind in (*PHOTOS, *like_photos, *VAGUE)]
    candidates = [[args.image_column]] if args.image_column else list(filter(None, found))
    check_columns(file, args, keys, candidates, f". The first row is {short(rows[0])}")
    captions = args.caption_column or columns_of(CAPTIONS, keys)
    tags = args.tag_column or columns_of(TAGS, keys)
    for photo in candidates:  # the first that leads to a photo
        names = [name for row in some for name in names_of(row, photo)]
        if any(find_photos(root, names).values()):
            break
    else:
        there = sorted(chain(*photos_below(root).values()))[:3] or "no photo"
        fail(f"{root} and its subfolders hold no photo of {file}, such as {short(names[:1])} of "
             f"{', '.join(sum(candidates, []))}, but {there}: do the names differ? See --root and "
             "--image-column")  # fmt: skip
    sets = sum([columns_of([kind], keys) for kind in SETS], [])
    sets = [name for name in sets if set() < values_of(rows, name) <= SPLITS.keys()]
    splits = columns_of(["split"], keys) or sets[:1]
    columns = {"photo": photo, "captions": captions, "tags": tags, "split": splits}
    if {*photo} & {*captions, *tags}:
        fail(f"{file}: the column {photo[0]} has the paths of the photos: it cannot hold captions "
             f"or tags, too. The columns are {', '.join(keys)}")  # fmt: skip
    marks = marked(rows, tags)
    if marks and not (args.tag_column or tags[1:]):
        fail(f"{file}: with --tag-column {tags[0]}, photos with a 1 have the tag {tags[0]}; or "
             "write names of classes in place of 0 and 1")  # fmt: skip
    columns["tags where 1"] = {name: clean(spelling[name]) for name in marks}
    columns["tags"] = {name: separator_of(rows, name) for name in tags if name not in marks}
    unused = {"not used": sorted({*keys}.difference(*columns.values()))}
    taken = [f"{what}: {', '.join(names)}" for what, names in (columns | unused).items() if names]
    print_main(f"{file}: {'; '.join(taken)}")
    return columns


def check_columns(file, args, keys, photos=True, about=""):
    """End with one line if columns that a flag names, or those of photos or captions, are missing.

    photos: whether there are any of photos;  about: what else to say of the file
    """
    named = [args.image_column, *args.caption_column, *args.tag_column]
    if missing := [name for name in named if name and name not in keys]:
        fail(f"{file} has no column {', '.join(missing)}, but {', '.join(keys)}")
    if not photos or not (args.tag_column or args.caption_column or columns_of(CAPTIONS, keys)):
        fail(f"{file}: which columns hold the photo and its caption? Name them with "
             "--image-column, --caption-column or, for tags alone, --tag-column: "
             f"{', '.join(keys)}{about}")  # fmt: skip


def columns_of(kinds, keys):
    """The columns of the first kind that there is, as caption_1 and caption_2"""
    for kind in kinds:
        if found := [key for key in keys if re.fullmatch(rf"{kind}s?_?\d*", key)]:
            return found
    return []


def marked(rows, columns):
    """Those of the columns that hold 0 or 1 (or nothing) in each row: their name is a tag"""
    values = {column: values_of(rows, column) for column in columns}
    found = [column for column in columns if values[column] and values[column] <= {*MARKS}]
    for column in columns if found else ():
        others = sorted(values[column].difference(YES, NO))
        if others and all(value in MARKS or NUMBER.fullmatch(value) for value in values[column]):
            fail(f"the column {column} holds {others[0]}, where 0 and 1 are expected: write 0 or 1 "
                 "(an empty cell counts as 0; if all tag columns of a row are empty, its tags are "
                 "not known), or name other columns with --tag-column")  # fmt: skip
    return found


def values_of(rows, column):
    """Different values of a column, without empty ones, as lower-case text"""
    return {str(row.get(column)).strip().lower() for row in rows}.difference(NOTHING)


def cells(row, columns, separator=None):
    """The values in these columns; one that holds a list, also written as text, gives its items."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str):
            value = parse_list(value.strip())
        if isinstance(value, str) and separator:
            value = clean(value).split(separator)
        yield from value if isinstance(value, list) else [value]


def separator_of(rows, column):
    """What stands between the tags of a cell: the first of | ; and , that the column holds"""
    texts = [clean(row[column]) for row in rows if isinstance(row.get(column), str)]
    return next((mark for mark in "|;" if any(mark in text for text in texts)), ",")


# ------------------------------------------------------------------------------ rows to photos


def gather(rows, root, columns, photos, notes):
    """Add the rows to {path of a photo: {"image", "captions", "tags", "split"}}."""
    places = find_photos(root, [name for row in rows for name in names_of(row, columns["photo"])])
    for name, paths in places.items():
        if not paths:
            notes["missing photos"].append(place(root, name))
        elif len(paths) > 1:
            notes["names of several photos, or several names of one"].append([name, *paths])
        elif paths[0] != place(root, name):
            notes["photos looked up by name"].append([name, paths[0]])
    for row in rows:
        names = list(names_of(row, columns["photo"]))
        if not names:
            notes["rows without a photo"].append(row)
        captions = captions_of(row, columns["captions"], notes)
        tags = tags_of(row, columns, notes)
        split = split_of(row, columns["split"])
        for path in sum((places[name] for name in names if len(places[name]) == 1), []):
            photo = photos.setdefault(os.path.realpath(path), {"image": path, "captions": []})
            for caption in captions:
                if caption in photo["captions"]:
                    notes["captions that their photo has already"].append([path, caption])
                else:
                    photo["captions"].append(caption)
            if tags is not None:
                photo["tags"] = [*dict.fromkeys(photo.get("tags", []) + tags)]
            if split and photo.setdefault("split", split) != split:
                notes["rows in another split than their photo's first"].append(row)


def names_of(row, columns):
    """-> the names of a row's photos: none, one, or several that share its captions"""
    for name in cells(row, columns):
        if isinstance(name, dict):  # of Hugging Face
            name = name.get("path") or name.get("file_name")
        if columns == ["filename"]:  # Karpathy's photos of COCO are in two folders
            name = os.path.join(row.get("filepath") or "", name or "")
        if not is_empty(name):
            yield os.path.normpath(str(name).strip().replace("\\", "/"))


def captions_of(row, columns, notes):
    captions = []
    for text in texts(list(cells(row, [column for column in columns if column in row]))):
        cleaned = clean(text) if isinstance(text, str) else text
        if cleaned in ("", None):
            notes["empty captions"].append(row)
        elif not isinstance(text, str):
            notes["captions that are no text"].append(text)
        elif is_empty(cleaned) or not regex.search(r"[\p{L}\p{So}]", cleaned):
            notes["captions without a letter"].append(repr(text))
        else:
            if cleaned != " ".join(text.split()):
                notes["captions cleaned, and kept"].append(repr(text))
            captions.append(cleaned)
    return captions


def texts(items):
    """Captions, in dictionaries or not, or the turns of a chat -> texts, or what stands there"""
    if items and isinstance(items[0], dict) and "from" in items[0]:  # the first exchange
        items = [turn["value"] for turn in items if turn["from"] == "gpt"][:1]
    for item in items:
        if isinstance(item, dict):
            item = next((item[key] for key in ("raw", "caption", "text") if key in item), item)
        yield item


def tags_of(row, columns, notes):
    """-> a list of strings; None if the row says nothing about them"""
    marks = {name: str(row.get(name)).strip().lower() for name in columns["tags where 1"]}
    values = []
    for column, separator in columns["tags"].items():
        for tag in cells(row, [column], separator):
            values.append(tag.get("name", tag) if isinstance(tag, dict) else tag)
    if any(isinstance(value, (list, dict)) for value in values):
        notes["tags that are no text"].append(values)
        return None
    if len(values) > 1 and not any(isinstance(value, str) for value in values):
        notes["lists of numbers, which are no tags"].append(values)
        return None
    known = [not is_empty(value) for value in (*values, *marks.values())]
    if not (columns["tags"] or marks) or known and not any(known):
        return None
    if any(map(is_empty, marks.values())):
        notes["empty cells beside 0 and 1, which count as 0"].append(row)
    tags = [clean(str(value)) for value in values if not is_empty(clean(str(value)))]
    return tags + [columns["tags where 1"][name] for name, mark in marks.items() if mark in YES]


def split_of(row, columns):
    names = [str(value).strip().lower() for value in cells(row, columns[:1])]
    return next((SPLITS.get(name, name) for name in names if not is_empty(name)), None)


def is_empty(cell):
    return cell is None or str(cell).strip().lower() in NOTHING


# ------------------------------------------------------------------------------- what it writes


def write(output, photos, notes):
    """Write the lines; print counts of what they hold and of what was left out."""
    folder = output.absolute().parent
    rows = [{**row, "image": os.path.relpath(row["image"], folder)} for row in photos.values()]
    splits = Counter(row.get("split", "no split") for row in rows)
    hold_out = splits.keys() <= {"train", "no split"}
    for row in rows if hold_out else ():  # without any split, --data holds out some photos
        row.pop("split", None)
    counts = {f"photos ({split})": splits[split] for split in splits}
    captions = [caption for row in rows for caption in row["captions"]]
    different = len({*captions})
    repeated = f", {different} different ones" * (different < len(captions))
    counts[f"captions{repeated}"] = len(captions)
    tags = [tag for row in rows for tag in row.get("tags", [])]
    if tags:
        counts[f"tags, {len({*tags})} different ones, the first: {short(tags[0])}"] = len(tags)
    notes["photos without a caption"] = [row["image"] for row in rows if not row["captions"]]
    for what, examples in notes.items():
        if examples:
            counts[f"{what}, the first: {short(examples[0])}"] = len(examples)
    print_main("\n".join(f"{count:7d} {what}" for what, count in counts.items()))
    if not captions and not tags:
        fail(f"no {'caption' if rows else 'photo'} is left: {output} is not written")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    output.write_bytes("\n".join([*lines, ""]).encode(errors="replace"))
    print_main(f"the first line: {lines[0]}")
    what = "captions" if captions else "tags"
    found = Counter(row.get("split", "train") for row in rows if row.get(what))
    how = "virtex.py" if what == "captions" else "tp.py --labels instances"
    flags = "" if hold_out else split_flags(found)
    print_main(f"python {how} --data {shlex.quote(str(output))}{flags}")


def split_flags(found):
    """For splits with other names than train and val.  found: {split: number of its photos}"""
    train, *others = sorted(found, key=lambda name: (name != "train", name == "val", -found[name]))
    val = "val" if "val" in others else [*others, train][0]
    flags = "" if train == "train" else f" --train-split {shlex.quote(train)}"
    flags += "" if val == "val" else f" --val-split {shlex.quote(val)}"
    return flags + ("    # no other split can be validated on" if train == val else "")


if __name__ == "__main__":
    main(get_args())
