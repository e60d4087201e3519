"""Zero-shot classification by class names, with a model of mmcontrastive.py [ours]

    python -m downstream.classify                            # the built-in scenes
    python -m downstream.classify --data folder --root photos

Nothing is trained here: each photo gets the class whose name, in a caption such as "a
photo of a daisy", is nearest in the common space of photos and captions. With several labels per
photo the score is mean average precision. Draws the ten photos nearest to each class in
classify.png of --output.
"""

import argparse
from pathlib import Path

import torch

import common
import eval_linear
import mmcontrastive
from common import print_main
from downstream.pictures import draw_rows
from downstream.search import load_encoders


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--weights", default="runs/mmcontrastive/checkpoint.pth", help="or a model_N.pth beside it")
    add("--data", default="shapes", help="as of eval_linear.py: shapes, folder, voc07, coco, ...")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--val-split", help="default test for voc07, val2017 for coco, else val")
    add("--prompt", help='caption for a class (default "a photo of a {}", for shapes "a {}")')
    add("--output", default="runs/classify", help="folder for result.json and the picture")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    add("--workers", type=int, default=2, help="DataLoader workers; 0: none")
    args = parser.parse_args(argv)
    _, val_split = eval_linear.SPLITS.get(args.data, ("train", "val"))
    args.val_split = args.val_split or val_split
    args.prompt = args.prompt or ("a {}" if args.data == "shapes" else "a photo of a {}")
    return args


def main(args):
    device = common.init_distributed()
    encoders, tokenizer, trained = load_encoders(args.weights)
    encoders.to(device, memory_format=torch.channels_last)
    trained.amp, trained.workers = common.choose_amp(device, args.amp), args.workers
    data = eval_linear.label_data(args.data, args.root, args.val_split)
    images, readable = mmcontrastive.encode_images(encoders["image"], data, trained, device)
    prompts = [args.prompt.format(name) for name in data.names]
    texts = mmcontrastive.encode_captions(encoders["caption"], tokenizer, prompts, trained, device)
    labels = torch.from_numpy(data.labels[readable])
    [(metric, score)] = eval_linear.score(images @ texts.T, labels).items()
    if metric == "top-1":
        guess = 100 / len(data.names)
    else:  # the precision of a random ranking is the fraction of positives
        guess = 100 * labels[labels >= 0].double().mean().item()

    path = Path(args.output)
    path.mkdir(parents=True, exist_ok=True)
    result = {"metric": metric, "zero-shot": score, "guessing": guess, "images": len(images)}
    common.save(path / "result.json", {"args": vars(args), **result})
    scores, order = (texts @ images.T).topk(min(10, len(images)))  # (classes, 10)
    nearest = [[readable[n] for n in row] for row in order.tolist()]
    draw_rows(prompts, data, nearest, scores.tolist(), path / "classify.png")
    print_main(f"the photos nearest to each class are in {path / 'classify.png'}")
    scores = f"{score:.1f} {metric} by class names, {guess:.1f} by guessing"
    print_main(f"{args.data}, {len(images)} photos of {len(data.names)} classes: {scores}")


if __name__ == "__main__":
    main(get_args())
