"""The features of all photos in a folder, as a NumPy array. No labels are needed.

    python -m downstream.embed photos --weights runs/virtex-photos/backbone.pth
    python -m downstream.embed photos --weights random --arch resnet50 --output runs/embed-random

Writes features.npy (N, D), the average of the backbone's last feature maps for each photo, and
files.txt, the path of each row's photo. In NumPy: `features = np.load("runs/embed/features.npy")`;
with each row divided by its norm, `features @ features.T` are cosine similarities.
"""

from pathlib import Path

import numpy as np
import torch

import common
import eval_linear
from common import fail, number, print_main
from downstream import pictures, tasks


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of photos; its subfolders are read, too")
    add("--weights", required=True, help="a file for eval_linear.py, imagenet or random")
    add("--arch", choices=common.BACKBONES, help="network for random, imagenet (default resnet50)")
    add("--image-size", type=number("int > 0"), help="side in pixels (default: as in training)")
    add("--output", default="runs/embed", help="folder for the two files (default %(default)s)")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="precision (default off)")
    add("--workers", type=number("int >= 0"), default=2, help="processes that load photos")
    return parser.parse_args(argv)


def main(args):
    photos = pictures.images_in(args.folder)
    broken = [path for path in photos.images if len(path.splitlines()) > 1]
    if broken:
        fail(f"files.txt has one path on each line, but this one has line breaks: {broken[0]!r}")
    device = tasks.begin(args)
    default = None if eval_linear.is_file(args.weights) else "resnet50"
    backbone = eval_linear.load_backbone(args.weights, args.arch or default, seed=0)
    backbone.to(device, memory_format=torch.channels_last).eval()
    size = args.image_size or eval_linear.trained_with(args.weights, "image_size") or 224
    squares = eval_linear.CentralSquares(photos, size)
    features, readable = tasks.extract_features(backbone, squares, args, device)
    np.save(Path(args.output, "features.npy"), features)
    Path(args.output, "files.txt").write_text("\n".join(photos.images[readable]) + "\n")
    counts = f"{len(features)} photos at {size} px, {features.shape[1]} features each"
    print_main(f"{counts}: {args.output}/features.npy")


if __name__ == "__main__":
    main(get_args())
