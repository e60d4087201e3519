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
from common import fail, number, print_main
from downstream import tasks
from downstream.pictures import draw_nearest, photo_files
from extras import folders

MOST_DRAWN = 50  # texts; a picture of 400 rows is higher than matplotlib can draw


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="what to look for, worded like a caption")
    add("--root", help="folder of photos, with its subfolders (default: the validation split)")
    add_flags(parser, "search")
    return parser.parse_args(argv)


def add_flags(parser, name):
    """Those of classify.py, too"""
    add = parser.add_argument
    tasks.add_weights(parser, "mmcontrastive")
    add("--output", default=f"runs/{name}", help="folder for the results (default %(default)s)")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision (default bf16 if supported)")
    add("--workers", type=number("int >= 0"), default=2, help="processes that load photos")


def main(args):
    model = Model(args)
    if args.root:
        paths = folders.list_photos(args.root)
        if not paths:
            fail(f"there is no photo in the folder {args.root} or its subfolders")
        data = photo_files(paths)
    else:
        trained = model.trained
        [data] = common.caption_data(trained.data, trained.root, [trained.val_split])
    model.check_texts(args.texts)
    path = Path(args.output, "search.png")
    _, readable, nearest = model.find(args.texts, data, path)
    if args.root:
        for text, row in zip(args.texts, nearest):
            print_main(f"{text}: " + ", ".join(data.images[n] for n in row[:3]) + ", ...")
    print_main(f"the ten nearest of {len(readable)} photos to each text are in {path}")


class Model:
    """The encoders of --weights, which map photos and texts into one space"""

    def __init__(self, args):
        self.device = common.init_distributed()
        common.make_folder(args.output)  # before the work, in case it cannot be one
        self.encoders, self.tokenizer, self.trained = load_encoders(args.weights)
        self.encoders.to(self.device, memory_format=torch.channels_last)
        self.trained.amp = common.choose_amp(self.device, args.amp)
        self.trained.workers = args.workers

    def check_texts(self, texts):
        """Refuse texts of unknown words; name those that the model does not read as they are."""
        common.extra("language").check_known(self.tokenizer, texts, "the model")
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        longest = self.tokenizer.model_max_length - 2  # without [CLS] and [SEP]
        unknown = [text for text, row in zip(texts, rows) if self.tokenizer.unk_token_id in row]
        alike = [text for text, row in zip(texts, rows) if rows.count(row) > 1]
        cut = [text for text, row in zip(texts, rows) if len(row) > longest]
        for what, found in (
            ("does not know every word of", unknown),
            ("cannot tell apart", alike),
            (f"reads only {longest} tokens of", cut),
        ):
            if found:
                some = ", ".join(found[:20])
                print_main(f"the model {what} {some} ({len(found)} of {len(texts)})")

    def find(self, texts, data, path):
        """Draw a row of the ten nearest photos for each text.  data: CaptionData or similar

        -> cosines (T, N) of T texts with the N photos that can be decoded, the indices of these in
        `data`, and for each text the indices in `data` of the ten, the nearest first
        """
        encoders, given = self.encoders, (self.trained, self.device)
        photos, readable = mmcontrastive.encode_images(encoders["image"], data, *given)
        vectors = mmcontrastive.encode_captions(encoders["caption"], self.tokenizer, texts, *given)
        similarity = vectors @ photos.T
        scores, order = similarity.topk(min(10, len(photos)))  # (T, 10)
        nearest = [[readable[n] for n in row] for row in order.tolist()]
        draw_nearest(path, texts[:MOST_DRAWN], data, nearest, scores.tolist())
        if len(texts) > MOST_DRAWN:
            print_main(f"{path} shows {MOST_DRAWN} of {len(texts)} texts")
        return similarity, readable, nearest


def load_encoders(path):
    """A checkpoint.pth or model_N.pth of mmcontrastive.py -> its query encoders in eval mode, the
    tokenizer, and the flags of that run"""
    content = tasks.read_model("mmcontrastive", path)
    trained = argparse.Namespace(**content["args"])
    if not trained.lambda_ic:
        fail(f"{path} was trained without --lambda-ic: photos and captions share no space in it")
    folder = Path(path).parent / "caption_model"
    if not folder.is_dir():
        fail(f"there is no folder {folder}, which training writes: copy it with {path}")
    tokenizer, bert_config = common.load_lm_tokenizer(folder)
    encoders = mmcontrastive.build_encoders(trained, bert_config)
    state = content["model"].items()
    queries = {name: value for name, value in state if name.startswith("queries.")}
    encoders.load_state_dict({name.removeprefix("queries."): queries[name] for name in queries})
    return encoders.eval(), tokenizer, trained


if __name__ == "__main__":
    main(get_args())
