"""Words of a caption, masked and predicted by a model of icmlm.py, and where it looks for them.

    python -m downstream.masked_words photo.jpg --caption "a dog on a surfboard" --word surfboard
    python -m downstream.masked_words --photos 10

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020:
Figs. 1, 3, 4 and 5. Masks one word at a time, prints the best predictions with the photo and by the
language model alone, and draws into --output where the model looks for the word, with the word and
its best prediction below. --photos N does so for all maskable words of N random validation photos,
one caption each; on the built-in scenes its last line is the fraction of the attention inside the
box of the object that a word names.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import common
import icmlm
from common import fail, number, print_main
from downstream import tasks
from downstream.pictures import draw_attention, photo_files
from eval_linear import CentralSquares
from extras import shapes


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("photo", nargs="?", help="a photo; give --caption and --word with it")
    add("--caption", help="what the photo shows")
    add("--word", type=str.lower, nargs="+", help="words of the caption, masked one at a time")
    add("--photos", type=number("int > 0"), metavar="N", help="take N validation photos instead")
    tasks.add_weights(parser, "icmlm")
    add("--lm", help="language model (default: that of the training run)")
    add("--root", help="folder of the data (default: that of the training run)")
    add("--output", default="runs/masked_words", help="folder for pictures (default %(default)s)")
    args = parser.parse_args(argv)
    own_photo = [args.photo, args.caption, args.word]
    if any(own_photo) != all(own_photo) or bool(args.photo) == bool(args.photos):
        parser.error('give a photo, --caption "..." and --word WORD, or --photos N')
    return args


def main(args):
    device = common.init_distributed()
    common.make_folder(args.output)
    model, lm, tokenizer, concepts, trained = load_icmlm(args.weights, args.lm, device)
    if args.photo:
        captions = common.lists([[common.one_line(args.caption)]])
        data = replace(photo_files([args.photo]), captions=captions)
    else:
        data = validation_photos(args, trained, tokenizer)
    common.extra("language").check_known(tokenizer, data.all_captions(), "the language model")
    maskable = [{} for _ in range(len(data))]  # of each photo {word: where it occurs first}
    names = list(concepts)
    for photo, _, position, concept in icmlm.find_triplets(data, concepts, tokenizer).tolist():
        maskable[photo].setdefault(names[concept], position)
    if args.photo:
        [positions] = maskable
        for word in args.word:
            if word not in positions:
                fail(f'"{word}" cannot be masked: it must be one token of --lm and a concept of '
                     f"the training run, as are {', '.join(positions)}")
        maskable = [{word: positions[word] for word in args.word}]

    looked = []  # (number of the scene or path of the photo, word, attention)
    squares = CentralSquares(data, trained["image_size"], side_fraction=1.0)
    for n, (positions, [caption]) in enumerate(zip(maskable, data.captions)):
        pixels, readable = squares[n]
        if not readable or not positions:
            continue
        words = list(positions)
        maps, predicted = explain(model, lm, tokenizer, pixels, caption, positions)
        picture = Path(args.output, f"{n + 1}_{Path(str(data.images[n])).stem}.png")
        titles = [f"{word}: {guess}" for word, guess in zip(words, predicted)]
        draw_attention(Image.fromarray(pixels), caption, list(zip(titles, maps)), picture)
        print_main(f"the attention is in {picture}")
        looked += [(data.images[n], word, attention) for word, attention in zip(words, maps)]

    if args.photos and trained["data"] == "shapes":
        inside, area = attention_inside_boxes(looked)
        print_main(f"attention inside the masked object's box: {100 * np.mean(inside):.1f}%, "
                   f"its area: {100 * np.mean(area):.1f}% (mean of {len(area)} words)")


def load_icmlm(path, lm_name, device):
    """-> model in eval mode, lm, tokenizer, concepts {word: part of speech}, flags of training"""
    checkpoint = tasks.read_model("icmlm", path)
    trained = checkpoint["args"]
    concepts = checkpoint["concepts"]
    lm_name = lm_name or trained["lm"]
    if lm_name == "scratch":
        lm_name = str(Path(path).parent / "language_model")
    tokenizer, lm = icmlm.load_language_model(lm_name, device, amp="off")
    model = icmlm.ICMLM(argparse.Namespace(**trained), lm.token_embeddings.size(1), len(concepts))
    model.load_state_dict(checkpoint["model"])
    return model.to(device).eval(), lm, tokenizer, concepts, trained


def validation_photos(args, trained, tokenizer):
    """-> CaptionData of --photos random photos of the validation split, with a caption of each"""
    root = args.root or trained["root"]
    [data] = common.caption_data(trained["data"], root, [trained["val_split"]])
    data = data.captioned()
    order = np.random.default_rng(0).permutation(len(data))
    data = data.select(np.sort(order[: args.photos]))
    data = icmlm.filter_captions(data, tokenizer.tokenize, trained["max_words"]).captioned()
    return replace(data, captions=common.lists(captions[:1] for captions in data.captions))


@torch.no_grad()
def explain(model, lm, tokenizer, pixels, caption, positions):
    """Print a table of the best predictions -> attention (words, h, w), the best of each word

    pixels: uint8 (size, size, 3).  positions: {word: index of its token in the caption}
    """
    ids = tokenizer(caption)["input_ids"]
    device = lm.token_embeddings.device
    mask_pos = torch.tensor(list(positions.values()), device=device)
    tokens = torch.tensor(ids, device=device).repeat(len(mask_pos), 1)  # (words, T)
    batch_idx = torch.arange(len(tokens), device=device)
    tokens[batch_idx, mask_pos] = tokenizer.mask_token_id
    attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    token_features = lm(tokens, attention_mask)
    images = common.augment(torch.from_numpy(pixels)[None].to(device))
    features = model.backbone(images).expand(len(tokens), -1, -1, -1)

    vector = model.head(features, token_features, attention_mask, mask_pos)
    with_photo = model.head.scores(vector, lm)  # Eq. 6
    without = lm.mlm_head(icmlm.at_mask(token_features, mask_pos))
    table = [("masked word", "with the photo", "without it")]
    for n, word in enumerate(positions):
        guesses = [best_words(tokenizer, logits[n]) for logits in (with_photo, without)]
        table.append((word, *guesses))
    print_main(caption)
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print_main("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    predicted = [best_words(tokenizer, logits, number=1) for logits in with_photo]
    maps = attention_maps(model.head, features, token_features, attention_mask, mask_pos)
    return maps.cpu(), predicted


def best_words(tokenizer, logits, number=3):
    """logits (|V|,) -> "dog 71.0%, cat 12.5%, ..." """
    probabilities, tokens = logits.softmax(0).topk(number)
    words = [tokenizer.decode([token]).strip() for token in tokens.tolist()]
    return ", ".join(f"{word} {100 * p:.1f}%" for word, p in zip(words, probabilities.tolist()))


def attention_maps(head, features, token_features, attention_mask, mask_pos):
    """Where the head looks in the photo for the masked token -> (B, H, W), each sums to one

    att-fc: p of Eq. 5. tfm: the masked token's row of Eq. 14's softmax in the last layer, averaged
    over the heads; its part on the photo, rescaled to sum to one.
    """
    if isinstance(head, icmlm.AttFc):
        x = features.flatten(2).mT
        attention = head.attention(x, token_features, attention_mask)
    else:
        z, mask = head.join(features, token_features, attention_mask)
        for layer in head.layers[:-1]:
            z = layer(z, mask)
        layer = head.layers[-1]
        num_places = z.size(1) - token_features.size(1)
        masked = icmlm.at_mask(z, num_places + mask_pos)  # (B, d_w)
        key = layer.per_head(layer.key(masked[:, None]))  # (B, heads, 1, d_w)
        query = layer.per_head(layer.query(z))  # (B, heads, S, d_w)
        scores = key @ query.mT / math.sqrt(key.size(-1))  # (B, heads, 1, S)
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        weights = scores.softmax(-1).mean(1).squeeze(1)  # (B, S)
        attention = weights[:, :num_places]
        attention = attention / attention.sum(1, keepdim=True)
    return attention.unflatten(1, features.shape[2:])


def attention_inside_boxes(looked):
    """How much attention is inside the box of the object that the masked word names

    looked: [(scene of extras/shapes.py, word, attention (h, w), which sums to one), ...]
    -> for each word that names exactly one object, by shape or colour: the attention inside, the
    area of the box (the share of a uniform map), both in [0, 1]
    """
    inside, area = [], []
    for scene, word, attention in looked:
        named = [o for o in shapes.objects_of(scene) if word in (o.shape, o.colour)]
        if len(named) == 1:
            fine = np.kron(attention.numpy(), np.full((100, 100), 1e-4))  # 100 x 100 per cell
            left, top, right, bottom = [round(edge * len(fine)) for edge in named[0].box]
            inside.append(fine[top:bottom, left:right].sum())
            area.append((right - left) * (bottom - top) / fine.size)
    return inside, area


if __name__ == "__main__":
    main(get_args())
