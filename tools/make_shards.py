"""Any data set of the scripts as shards: tar files in WebDataset's layout, for --data.

    python tools/make_shards.py --data photos.jsonl --output shards --side 256
    python virtex.py --data 'shards/{split}-*.tar'

A photo is KEY.jpg, and beside it KEY.json holds its captions and tags. JPEG files are taken as they
are unless --side is given; everything else becomes JPEG.
"""

import io
import itertools
import json
import os
import sys
import tarfile
from functools import partial
from pathlib import Path

from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import check, progress, say

PART = 20  # photos that a process decodes at a time


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--data", default="shapes", help=common.DATA)
    add("--root", help="as of the scripts")
    add("--splits", nargs="+", help="default train2017 val2017 for coco, else train val")
    add("--side", type=common.image_side, help="make the smaller side of larger photos this long")
    add("--per-shard", type=common.count, default=5000, help="photos in each file")
    add("--output", default="shards", help="folder for the files")
    args = parser.parse_args(argv)
    usual = common.choose_recipe({}, ["--data", args.data])
    args.splits = args.splits or [usual["train_split"], usual["val_split"]]
    return args


def main(args):
    os.makedirs(args.output, exist_ok=True)
    for split in args.splits:
        kept = sorted(Path(args.output).glob(f"{split}-*.tar"))
        check(not kept, f"{args.output} holds shards of {split}: delete them, or another --output")
        data = common.caption_data(args.data, args.root, split)
        photos, number = readable_photos(data, args.side, split), 0
        for first in photos:
            path = f"{args.output}/{split}-{number:06d}.tar"
            chosen = itertools.chain([first], itertools.islice(photos, args.per_shard - 1))
            common.write_file(path, lambda file: write_shard(file, chosen))
            number += 1
        check(number, f"no photo of the split {split} can be decoded")
        say(f"{number} files {args.output}/{split}-*.tar of up to {args.per_shard} photos")


def readable_photos(data, side, split):
    """CaptionData -> (number, JPEG file, JSON file) of each photo that can be decoded, in order"""
    starts = range(0, len(data), PART)
    parts = ((n, data.select(range(n, min(n + PART, len(data))))) for n in starts)
    with progress(total=len(data), desc=split, unit=" photos") as bar:
        for rows in common.all_cores(partial(encode, side), parts):
            bar.update(len(rows))
            for number, photo, text, error in rows:
                if error:
                    say(error)
                else:
                    yield number, photo, text.encode()


def encode(side, part):
    """-> [(number, JPEG file, its JSON, None)], or None and a message if it cannot be decoded"""
    first, data = part
    rows = []
    for i in range(len(data)):
        tags = [data.tag_names[tag] for tag in data.tags_of(i)]
        text = json.dumps({"captions": data.captions_of(i), "tags": tags})
        photo = error = None
        try:
            photo = jpeg(data.images, i, side)
        except MemoryError:
            raise
        except Exception as reason:  # PIL and its formats raise a dozen kinds
            error = f"cannot decode {data.images[i]} ({reason}): left out"
        rows.append((first + i, photo, text, error))
    return rows


def write_shard(file, photos):
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, photo, text in photos:
            for suffix, content in (("jpg", photo), ("json", text)):
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def jpeg(images, i, side):
    """The bytes of a JPEG file: the photo's own, or made again, smaller"""
    image = images.open(i)
    small = not side or min(image.size) <= side
    if image.format == "JPEG" and small:
        image.fp.seek(0)
        content = image.fp.read()
        image.load()  # is it whole?
        return content
    image = common.eight_bit(ImageOps.exif_transpose(image))
    if not small:
        scale = side / min(image.size)
        image = image.resize([round(scale * length) for length in image.size], reducing_gap=3.0)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=90)
    return content.getvalue()


if __name__ == "__main__":
    common.run(main, get_args)
