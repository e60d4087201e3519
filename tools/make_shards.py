"""Write a data set as shards, tar files in WebDataset's layout, with an index for --data

    python tools/make_shards.py --data photos.jsonl --output shards
    python tools/make_shards.py --data photos.jsonl --size 256 --output shards
    python tools/make_shards.py --index-only photos/{000000..004000}.tar --output shards
    python tools/make_shards.py --index-only 'photos/{split}-*.tar' --splits train val
    python virtex.py --data shards

Shards of other tools (WebDataset, img2dataset) need only the index. In ours, KEY.json has captions
and tags of the photo KEY.jpg (or .png...), which is a copy of its file, or smaller with --size. The
index holds the paths of the shards: if you move them, make it again with --index-only.
"""

import glob
import html
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import tarfile
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, print_main, progress
from extras import folders, shards
from tools.to_jsonl import HTML_TAG

ENDINGS = {"JPEG": "jpg", "JPEG2000": "jp2"}  # where Pillow's name for a format is not its ending


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--data", default="shapes", help="shapes (built in), coco, vg, a .jsonl, folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--index-only", nargs="+", metavar="SHARD", help="index existing shards: paths, also with "
        "* or ?; without {split}, one shard in twenty (at most 5) becomes the split val")
    add("--splits", nargs="+", help="default train2017 val2017 for coco, else train val")
    add("--size", type=common.number("int > 0"), help="shrink larger photos, so that the shorter "
        "side has this many pixels, and write them as JPEGs of quality 95")
    add("--per-shard", type=common.number("int > 0"), default=5000, help="photos per shard")
    add("--output", default="shards", help="folder for the shards and the index")
    return parser.parse_args(argv)


def main(args):
    year = "2017" if args.data == "coco" else ""
    args.splits = args.splits or [f"train{year}", f"val{year}"]
    common.make_folder(args.output)
    if args.index_only:
        paths = find_shards(args.index_only, args.splits)
    else:
        for split in args.splits:
            if any(Path(args.output).glob(f"{glob.escape(split)}-*.tar")):
                fail(f"{args.output} holds shards of {split}: delete them or change --output")
        found = common.caption_data(args.data, args.root, args.splits, tags=True)
        for split, data in zip(args.splits, found):
            write_shards(args, split, data)
        paths = defaultdict(list)
        for path in sorted(Path(args.output).glob("*-*.tar")):  # earlier splits, too
            paths[path.name.rsplit("-", 1)[0]].append(str(path))
    write_index(args.output, paths)
    print_main(f"use them with --data {args.output}; the splits are {', '.join(paths)}")


def write_shards(args, split, data):
    """Decode or shrink a split's photos on all cores; write those that can be decoded, in order."""
    tagged = bool(data.tag_names) & data.tagged
    with multiprocessing.Pool() as pool:
        files = pool.imap(partial(photo_file, data.open, args.size), data.images, chunksize=20)
        files = iter(progress(files, desc=split, total=len(data), unit=" photos"))
        for number, start in enumerate(range(0, len(data), args.per_shard)):
            with (
                common.writing(f"{args.output}/{split}-{number:06d}.tar") as file,
                tarfile.open(fileobj=file, mode="w") as tar,
            ):
                for n in range(start, min(start + args.per_shard, len(data))):
                    ending, photo = next(files)
                    if not ending:
                        print_main(f"cannot decode {data.images[n]} ({photo}): left out")
                        continue
                    row = {"captions": data.captions[n]}
                    if tagged[n]:
                        row["tags"] = data.tags[n]
                    for suffix, content in (ending, photo), ("json", json.dumps(row).encode()):
                        entry = tarfile.TarInfo(f"{n:09d}.{suffix}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))


def photo_file(open_photo, size, place):
    """-> ending and bytes of its own file, or of a JPEG if it is drawn or shrunk; None, an error"""
    try:
        image = open_photo(place)
        shrunk = size and size < min(image.size)
        if shrunk:
            sides = [math.ceil(size * side / min(image.size)) for side in image.size]
            image = common.to_rgb(image)
            image.thumbnail(sides)
            image = ImageOps.exif_transpose(image)
        if shrunk or not image.format:
            content = io.BytesIO()
            image.save(content, "JPEG", quality=95)
            return "jpg", content.getvalue()
        content = image.fp.getvalue()
        image.load()  # raises if the file is truncated
        return ENDINGS.get(image.format, image.format.lower()), content
    except Exception as error:  # PIL's decoders raise many kinds
        return None, common.one_line(f"{type(error).__name__}: {error}")


def find_shards(patterns, splits):
    """--index-only -> {split: paths}"""
    if "{split}" in patterns[0]:
        return {split: shard_paths(patterns, split) for split in splits}
    paths = shard_paths(patterns)
    if len(paths) == 1:
        fail(f"{paths[0]} is one shard, and validation needs another one")
    num_val = min(5, max(1, len(paths) // 20))  # some 10,000 photos are enough
    val = sorted(map(str, np.random.default_rng(0).permutation(paths)[:num_val]))
    print_main(f"held out for validation: {', '.join(val)}")
    return {"train": [path for path in paths if path not in val], "val": val}


def shard_paths(patterns, split=""):
    """Paths, also with * or ?, in which {split} stands for the split -> those of files, sorted"""
    paths = []
    for pattern in patterns:
        pattern = pattern.replace("{split}", split)
        found = glob.glob(pattern.replace("[", "[[]"))  # brackets are only characters
        if not found:
            fail(f"--index-only: there is no {pattern}")
        paths += found
    return sorted(paths)


def write_index(folder, paths):
    """Write the index of each split, and print what is left out.  paths: {split: of its shards}"""
    photos = defaultdict(list)
    with multiprocessing.Pool() as pool:
        for split in paths:
            found = pool.imap(read_shard, paths[split])
            found = progress(found, desc=split, total=len(paths[split]), unit=" shards")
            for path, (rows, faults) in zip(paths[split], found):
                photos[split] += rows
                if faults:
                    print_main(common.one_line(f"{path}: {faults[0]}; left out: {len(faults)}"))
            if not photos[split]:
                fail(f"no photo of the split {split} can be read, see above. Expected: uncompressed"
                     " tar files with KEY.jpg and, beside it, KEY.txt or KEY.json")
    tags = [tag for rows in photos.values() for _, _, tags, _ in rows for tag in tags or ()]
    tag_names = list(dict.fromkeys(tags))  # of all splits alike
    for split, rows in photos.items():
        places, captions, tags, sources = zip(*rows)
        tagged = np.array([row is not None for row in tags])
        tags = [dict.fromkeys(row or ()) for row in tags]
        texts = common.lists(captions), common.lists(tags)
        shards.save_index(folder, split, common.CaptionData(places, *texts, tagged, tag_names))
        num_captions, num_tags = sum(map(len, captions)), sum(map(len, tags))
        print_main(f"{split}: {len(rows)} photos, {num_captions} captions, {num_tags} tags")
        for source, number in Counter(sources).items():
            print_main(f"{split}: {number} photos have {source}")


def read_shard(path):
    """-> rows of photos, see read_photo; a message for each fault, also if the shard breaks off"""
    photos, faults, keys = [], [], set()
    try:
        with tarfile.open(path, "r:") as tar:
            # Hidden files and folders: macOS writes ._KEY.jpg beside KEY.jpg.
            shown = (file for file in tar if not re.search(r"(^|/)\.[^/.]", file.name))
            for key, files in itertools.groupby(filter(tarfile.TarInfo.isfile, shown), key_of):
                files = list(files)
                if key in keys:
                    photos = []  # without the texts that come later
                    raise ValueError(f"the files of {key} are not adjacent, so that the whole "
                                     "shard is left out: use tar --sort=name")
                keys.add(key)
                try:
                    photos.append(read_photo(path, tar, key, files))
                except Exception as error:  # two photos, no UTF-8, no JSON, wrong types
                    faults.append(f"{key}: {type(error).__name__}: {error}")
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(512) != bytes(512):  # tarfile takes a broken header for the end
                raise ValueError(f"it breaks off at byte {tar.offset}")
    except Exception as error:  # no tar file, or it breaks off: what came before is kept
        faults.append(f"{type(error).__name__}: {error}")
    return photos, faults


def clean(text):
    """Without HTML's tags, and its entities, which the web often escapes twice"""
    return common.one_line(HTML_TAG.sub(" ", html.unescape(html.unescape(text))))


def key_of(file):
    """ "a/12.seg.png" -> "a/12": as WebDataset does, up to the first dot of the file's name"""
    return re.match(r"(.*/)?[^.]*", file.name, re.S)[0]


def read_photo(path, tar, key, files):
    """The files of a key -> place, see shards.open_in_shard; captions; tags or None; their source

    "captions" and "tags" are read as in a .jsonl; KEY.txt and "caption" of other tools are cleaned.
    """
    beside = {file.name.removeprefix(key).lower(): file for file in files}
    found = [suffix for suffix in beside if suffix in folders.PHOTO_ENDINGS]
    if len(found) != 1 or len(beside) < len(files):  # .txt and .TXT
        raise ValueError(f"{len(found)} photos among {', '.join(file.name for file in files)}")
    photo, present = beside[found[0]], {".json", ".txt"} & beside.keys()
    content = {suffix: tar.extractfile(beside[suffix]).read() for suffix in present}
    row = json.loads(content.get(".json", "{}"))
    if not isinstance(row, dict):
        raise ValueError(f"{beside['.json'].name} is not an object with captions")
    caption = row.get("caption")  # of other tools: a text, a list of texts, or null
    text = content.get(".txt", b"").decode("utf-8-sig")
    if common.one_line(text) == common.one_line(str(caption)):
        text = ""  # img2dataset writes "caption" there, too, also a list, or one with line breaks
    captions, source = [], "no caption in a KEY.txt or KEY.json"
    for where, given, convert in (
        ('"captions" of KEY.json', row.get("captions"), common.one_line),
        ("KEY.txt", text.splitlines(), clean),
        ('"caption" of KEY.json', [caption] if isinstance(caption, str) else caption, clean),
    ):
        given = list(filter(None, common.texts(given) or []))
        cleaned = list(filter(None, map(convert, given)))
        if cleaned and not captions:
            captions, source = cleaned, f"captions from {where}"
            source += ", which lost HTML" if cleaned != given else ""
        elif cleaned and cleaned != captions:
            source += f", not those of {where}"
    tags = common.texts(row.get("tags"))
    name = common.one_line(photo.name)  # to look at; without tabs
    place = f"{os.path.abspath(path)}\t{name}\t{photo.offset_data}\t{photo.size}"
    return place, captions, tags and list(filter(None, tags)), source


if __name__ == "__main__":
    main(get_args())
