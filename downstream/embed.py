"""The features of all photos in a folder, as a NumPy array. No labels are needed.

    python -m downstream.embed photos --weights runs/virtex-photos/backbone.pth
    python -m downstream.embed photos --weights random --arch resnet50 --output runs/embed-random

Writes features.npy (N, D), the average of the backbone's last feature maps for each photo, and
files.txt, the path of each row's photo. In NumPy: `features = np.load("runs/embed/features.npy")`;
with each row divided by its norm, `features @ features.T` are cosine similarities.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import common
import eval_linear
from common import print_main
from downstream import baselines
from downstream.search import images_in


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of photos, with its subfolders")
    add("--weights", required=True, help="a backbone.pth, or others as in eval_linear.py")
    add("--arch", choices=common.BACKBONES, help="of imagenet and random (default resnet50)")
    add("--image-size", type=common.count,
        help="side of the central square (default that of training, by args.json beside a file)")
    add("--output", default="runs/embed", help="folder for features.npy and files.txt")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="precision")
    add("--workers", type=common.whole, default=2, help="DataLoader workers; 0: none")
    return parser.parse_args(argv)


def main(args):
    eval_linear.run_alone()
    device = common.init_distributed()
    photos = images_in(args.folder)
    common.make_folder(args.output)
    default = None if eval_linear.is_file(args.weights) else "resnet50"
    backbone = eval_linear.load_backbone(args.weights, args.arch or default, seed=0)
    backbone.to(device, memory_format=torch.channels_last).eval()
    size = args.image_size or eval_linear.trained_with(args.weights, "image_size") or 224
    squares = eval_linear.CentralSquares(photos, size)
    features, readable = baselines.extract_features(backbone, squares, args, device)
    if common.is_main():
        np.save(Path(args.output, "features.npy"), features)
        Path(args.output, "files.txt").write_text("\n".join(photos.images[readable]) + "\n")
        width = features.shape[1]
        sizes = f"{len(features)} photos at {size} px, {width} features each"
        print_main(f"{sizes}: {args.output}/features.npy")
    common.end_distributed()


if __name__ == "__main__":
    main(get_args())
