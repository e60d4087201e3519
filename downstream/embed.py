"""The features of all photos in a folder, as a NumPy array. No labels are needed.

    python -m downstream.embed photos --weights runs/virtex/backbone.pth --image-size 64
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
from common import print_main
from downstream.search import images_in


def get_args(argv=None):
    parser = common.build_parser(__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder of photos, with its subfolders")
    add("--weights", required=True, help="a backbone.pth, or others as in eval_linear.py")
    add("--arch", choices=common.BACKBONES, help="needed for imagenet and random")
    add("--image-size", type=common.positive_int, default=224, help="use that of training")
    add("--output", default="runs/embed", help="directory for features.npy and files.txt")
    add("--amp", choices=("bf16", "fp16", "off"), default="off", help="precision")
    add("--workers", type=int, default=2, help="DataLoader workers; 0: none")
    return parser.parse_args(argv)


def main(args):
    world = common.init_distributed()
    images = images_in(args.folder)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    backbone = eval_linear.load_backbone(args.weights, args.arch, seed=0)
    backbone.to(world.device, memory_format=torch.channels_last)
    features, readable = eval_linear.extract_features(backbone, images, args, world)
    common.end_distributed(world)
    if world.is_main:
        np.save(Path(args.output, "features.npy"), features)
        Path(args.output, "files.txt").write_text("".join(f"{images[i]}\n" for i in readable))
        width = features.shape[1]
        print_main(f"{len(features)} photos, {width} features each: {args.output}/features.npy")


if __name__ == "__main__":
    common.run(main, get_args)
