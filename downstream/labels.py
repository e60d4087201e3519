"""The ten most likely labels of each photo, by a model of tp.py.  [ICMLM Sec. 3.1]

    python -m downstream.labels photo.jpg --weights runs/tp-photos/checkpoint.pth

Words, clusters and rotations share one softmax, as in training; topics are independent, each with
its own probability. The model sees the central square of a photo, as in validation.
"""

import torch

import common
import tp
from common import print_main
from downstream import tasks
from downstream.pictures import photo_files
from eval_linear import CentralSquares


def get_args(argv=None):
    parser = common.Parser(__doc__)
    parser.add_argument("photos", nargs="+", metavar="PHOTO", help="photos to label")
    tasks.add_weights(parser, "tp")
    return parser.parse_args(argv)


@torch.no_grad()
def main(args):
    device = common.init_distributed()
    photos = photo_files(args.photos)
    checkpoint = tasks.read_model("tp", args.weights)
    names, trained = checkpoint["names"], checkpoint["args"]
    model = tp.TagPredictor(trained["arch"], len(names), trained["labels"])
    model.load_state_dict(checkpoint["model"])
    model.to(device).eval()
    squares = CentralSquares(photos, trained["image_size"], side_fraction=1.0)
    for photo, (pixels, readable) in zip(args.photos, squares):
        if not readable:
            continue
        logits = model(common.augment(torch.from_numpy(pixels)[None].to(device)))[0]  # (K,)
        probabilities = logits.sigmoid() if trained["labels"] == "lda" else logits.softmax(0)
        best = probabilities.topk(min(10, len(names)))
        print_main(photo)
        for probability, k in zip(best.values.tolist(), best.indices.tolist()):
            print_main(f"  {100 * probability:5.1f}%  {names[k]}")


if __name__ == "__main__":
    main(get_args())
