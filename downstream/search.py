"""Search photos by text, with a model of mmcontrastive.py: the nearest in the common space.

    python -m downstream.search "a dog in the snow" "two children" --root photos
    python -m downstream.search "a red circle" --weights runs/mmcontrastive/checkpoint.pth

Draws a row of ten photos for each text, the nearest first, into search.png in --output. Without
--root it searches the validation split of the training run.
"""

import argparse
from pathlib import Path

import torch

import common
import mmcontrastive
from common import fail, print_main
from downstream.pictures import draw_rows, photo_files
from extras.checkpoints import of_script


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="what to look for, worded like a caption")
    add("--root", help="folder of photos, with its subfolders (default: the validation split)")
    add_flags(parser, "search")
    return parser.parse_args(argv)


def main(args):
    model = Model(args)
    if args.root:
        data = images_in(args.root)
    else:
        trained = model.trained
        data = common.caption_data(trained.data, trained.root, trained.val_split)
    photos, readable = model.encode_photos(data)
    path = Path(args.output, "search.png")
    nearest = draw_nearest(path, args.texts, model.encode(args.texts), data, photos, readable)
    if args.root:
        for text, row in zip(args.texts, nearest):
            print_main(f"{text}: " + ", ".join(data.images[n] for n in row[:3]) + ", ...")
    print_main(f"the ten nearest of {len(readable)} photos to each text are in {path}")


def images_in(folder):
    """-> CaptionData, without captions, of all photos in a folder and its subfolders"""
    paths = common.list_photos(folder)
    if not paths:
        fail(f"{folder} holds no photo")
    return photo_files(paths)


# ------------------------------------------------------------- also of classify.py


def add_flags(parser, name):
    add = parser.add_argument
    add("--weights", default="runs/mmcontrastive/checkpoint.pth",
        help="checkpoint.pth or model_N.pth of a run; trained on photos.jsonl, it is in "
        "runs/mmcontrastive-photos (default %(default)s)")  # fmt: skip
    add("--output", default=f"runs/{name}", help="folder of the results (default %(default)s)")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    add("--workers", type=common.whole, default=2, help="DataLoader workers; 0: none")


class Model:
    """The encoders of --weights: vectors of photos and of texts in their common space"""

    def __init__(self, args):
        self.device = common.init_distributed()
        common.make_folder(args.output)  # a wrong one ends it now
        self.encoders, self.tokenizer, self.trained = load_encoders(args.weights)
        print_main(f"{args.weights} was trained on {self.trained.data}")
        self.encoders.to(self.device, memory_format=torch.channels_last)
        self.trained.amp = common.choose_amp(self.device, args.amp)
        self.trained.workers = args.workers

    def encode_photos(self, data):
        """-> (N, D) of unit length, the indices in `data` of the N photos that can be read"""
        return mmcontrastive.encode_images(
            self.encoders["image"], data, self.trained, self.device
        )

    def encode(self, texts):
        """-> (T, D) of unit length"""
        return mmcontrastive.encode_captions(
            self.encoders["caption"], self.tokenizer, texts, self.trained, self.device
        )


def load_encoders(path):
    """A checkpoint.pth or model_N.pth of mmcontrastive.py -> its query encoders in eval mode, the
    tokenizer, and the flags of that run"""
    others = ", ".join(sorted(map(str, Path("runs").glob("mmcontrastive*/checkpoint.pth"))))
    if others and not Path(path).exists():
        fail(f"there is no {path}: give --weights one of {others}")
    content = of_script("mmcontrastive", path)
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


def draw_nearest(path, texts, vectors, data, photos, readable):
    """A row of the ten nearest photos for each text -> their indices in `data`, the nearest first

    vectors (T, D), photos (N, D), readable (N,): of the texts and photos, by Model
    """
    scores, order = (vectors @ photos.T).topk(min(10, len(photos)))  # (T, 10)
    nearest = [[readable[n] for n in row] for row in order.tolist()]
    draw_rows(texts, data, nearest, scores.tolist(), path)
    return nearest


if __name__ == "__main__":
    main(get_args())
