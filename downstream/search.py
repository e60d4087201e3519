"""Search photos by text, with a model of mmcontrastive.py: the nearest in the common space.

    python -m downstream.search "a dog in the snow" "two children" --root photos
    python -m downstream.search "a red circle" --weights runs/mmcontrastive/checkpoint.pth

Draws a row of ten photos for each text, the nearest first, into search.png in --output. Without
--root it searches the validation split of the training run.
"""

from argparse import Namespace
from pathlib import Path

import torch
from PIL import Image

import common
import mmcontrastive
from common import print_main, require
from downstream.pictures import draw_rows


def get_args(argv=None):
    parser = common.build_parser(__doc__)
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="what to look for, worded like a caption")
    add("--root", help="folder of photos, with its subfolders (default: the validation split)")
    add("--weights", default="runs/mmcontrastive/checkpoint.pth", help="or a model_N.pth beside it")
    add("--output", default="runs/search", help="folder for the picture")
    add("--amp", choices=("bf16", "fp16", "off"), help="default bf16 where the device has it")
    add("--workers", type=int, default=2, help="DataLoader workers; 0: none")
    return parser.parse_args(argv)


def main(args):
    device = common.init_distributed().device
    amp = common.choose_amp(device, args.amp)
    encoders, tokenizer, flags = load_encoders(args.weights)
    encoders.to(device, memory_format=torch.channels_last)
    if args.root:
        images = images_in(args.root)
    else:
        images = common.caption_data(flags.data, flags.root, flags.val_split).images

    vectors, readable = mmcontrastive.encode_images(
        encoders["image"], images, flags.image_size, args.workers, device, amp
    )
    texts = mmcontrastive.encode_captions(encoders["caption"], tokenizer, args.texts, device, amp)
    scores, order = (texts @ vectors.T).topk(min(10, len(vectors)))  # (texts, 10)
    nearest = [[readable[n] for n in row] for row in order.tolist()]

    path = Path(args.output, "search.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_rows(args.texts, images, nearest, scores.tolist(), path)
    if args.root:
        for text, row in zip(args.texts, nearest):
            print_main(f"{text}: " + ", ".join(images[n] for n in row[:3]) + ", ...")
    print_main(f"the ten nearest of {len(readable)} photos to each text are in {path}")


def images_in(folder):
    """-> the paths of all photos in a folder and its subfolders"""
    formats = Image.registered_extensions()
    paths = sorted(Path(folder).rglob("*"))
    paths = [str(path) for path in paths if path.suffix.lower() in formats]
    require(paths, f"{folder} holds no photo")
    return common.image_files(paths)


def load_encoders(path):
    """A checkpoint.pth or model_N.pth of mmcontrastive.py -> its query encoders in eval mode, the
    tokenizer, and the flags of that run"""
    content = common.read_checkpoint(path, "mmcontrastive")
    flags = Namespace(**content["args"])
    problem = "was trained without --lambda-ic: photos and captions share no space in it"
    require(flags.lambda_ic, f"{path} {problem}")
    folder = Path(path).parent / "caption_model"
    tokenizer, bert_config = mmcontrastive.read_caption_model(folder)
    encoders = mmcontrastive.build_encoders(flags, bert_config)
    state = {
        name.removeprefix("queries."): value
        for name, value in content["model"].items()
        if name.startswith("queries.")
    }
    encoders.load_state_dict(state)
    return encoders.eval(), tokenizer, flags


if __name__ == "__main__":
    common.run(main, get_args)
