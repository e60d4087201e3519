"""Search photos by text, with a model of mmcontrastive.py: the nearest in the common space.

    python -m downstream.search "a dog in the snow" "two children" --root photos
    python -m downstream.search "a red circle" --weights runs/mmcontrastive/checkpoint.pth

Draws a row of ten photos for each text, the nearest first, into search.png in --output. Without
--root it searches the validation split of the training run.
"""

import argparse
import os
from pathlib import Path

import torch

import common
import eval_linear
import mmcontrastive
from common import fail, print_main
from downstream.pictures import draw_rows, photo_files


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="what to look for, worded like a caption")
    add("--root", help="folder of photos, with its subfolders (default: the validation split)")
    add("--weights", default="runs/mmcontrastive/checkpoint.pth", help="or a model_N.pth beside it")
    add("--output", default="runs/search", help="folder for the picture (default %(default)s)")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    add("--workers", type=int, default=2, help="DataLoader workers; 0: none")
    return parser.parse_args(argv)


def main(args):
    device = common.init_distributed()
    encoders, tokenizer, trained = load_encoders(args.weights)
    encoders.to(device, memory_format=torch.channels_last)
    trained.amp, trained.workers = common.choose_amp(device, args.amp), args.workers
    if args.root:
        data = images_in(args.root)
    else:
        data = common.caption_data(trained.data, trained.root, trained.val_split)

    vectors, readable = mmcontrastive.encode_images(encoders["image"], data, trained, device)
    texts = mmcontrastive.encode_captions(
        encoders["caption"], tokenizer, args.texts, trained, device
    )
    scores, order = (texts @ vectors.T).topk(min(10, len(vectors)))  # (texts, 10)
    nearest = [[readable[n] for n in row] for row in order.tolist()]

    path = Path(args.output, "search.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_rows(args.texts, data, nearest, scores.tolist(), path)
    if args.root:
        for text, row in zip(args.texts, nearest):
            print_main(f"{text}: " + ", ".join(data.images[n] for n in row[:3]) + ", ...")
    print_main(f"the ten nearest of {len(readable)} photos to each text are in {path}")


def images_in(folder):
    """-> CaptionData, without captions, of all photos in a folder and its subfolders"""
    found = os.walk(folder, followlinks=True)
    files = [os.path.join(parent, name) for parent, _, names in found for name in names]
    paths = [path for path in files if eval_linear.is_photo(path, folder)]
    if not paths:
        fail(f"{folder} holds no photo")
    return photo_files(sorted(paths))


def load_encoders(path):
    """A checkpoint.pth or model_N.pth of mmcontrastive.py -> its query encoders in eval mode, the
    tokenizer, and the flags of that run"""
    content = common.read_checkpoint(path, "mmcontrastive")
    trained = argparse.Namespace(**content["args"])
    if not trained.lambda_ic:
        fail(f"{path} was trained without --lambda-ic: photos and captions share no space in it")
    folder = Path(path).parent / "caption_model"
    tokenizer, bert_config = mmcontrastive.read_caption_model(folder)
    encoders = mmcontrastive.build_encoders(trained, bert_config)
    prefix, state = "queries.", {}
    for name, value in content["model"].items():
        if name.startswith(prefix):
            state[name.removeprefix(prefix)] = value
    encoders.load_state_dict(state)
    return encoders.eval(), tokenizer, trained


if __name__ == "__main__":
    main(get_args())
