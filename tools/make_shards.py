"""Any data set of the scripts as shards: tar files in WebDataset's layout, for --data.

    python tools/make_shards.py --data photos.jsonl --output shards --side 256
    python virtex.py --data 'shards/{split}-*.tar'

A photo is KEY.jpg, and beside it KEY.json holds its captions and tags. JPEG files are taken as they
are unless --side is given; everything else becomes JPEG.
"""

import io
import json
import os
import sys
import tarfile
from pathlib import Path

from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import check, progress, say


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
        firsts = range(0, len(data), args.per_shard)
        bar = progress(total=len(data), desc=split, unit=" photos")
        for number, first in enumerate(firsts):
            path = f"{args.output}/{split}-{number:06d}.tar"
            rows = range(first, min(first + args.per_shard, len(data)))
            common.write_file(path, lambda file: write_shard(file, data, rows, args.side, bar))
        bar.close()
        say(f"{len(firsts)} files {args.output}/{split}-*.tar of up to {args.per_shard} photos")


def write_shard(file, data, rows, side, bar):
    """The photos `rows` of CaptionData as a tar file"""
    with tarfile.open(fileobj=file, mode="w") as tar:
        for i in rows:
            bar.update()
            try:
                photo = jpeg(data.images, i, side)
            except Exception as error:  # PIL and its formats raise a dozen kinds
                say(f"cannot decode {data.images[i]} ({error}): left out")
                continue
            tags = [data.tag_names[tag] for tag in data.tags_of(i)]
            text = json.dumps({"captions": data.captions_of(i), "tags": tags})
            for suffix, content in (("jpg", photo), ("json", text.encode())):
                entry = tarfile.TarInfo(f"{i:09d}.{suffix}")
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
