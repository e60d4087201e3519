"""Captions by a model of virtex.py, and where it looks for each word.  [VirTex Sec. 4.4, Fig. 6]

    python -m downstream.captioning photo.jpg --weights runs/virtex-photos/checkpoint.pth
    python -m downstream.captioning --evaluate --data coco \\
        --weights runs/virtex-coco/checkpoint.pth

Prints a caption for each photo and draws the attention of the last layer for each word into
--output. --evaluate writes captions of the validation split into captions.json and scores them by
CIDEr and SPICE, which need pycocoevalcap and Java. --weights may also be an official checkpoint; it
has no tokenizer, so you have to add --tokenizer coco_10k.model. Photos are cropped as in the
official evaluation: resize 256, centre crop 224, or in proportion for other image sizes.
"""

import importlib.util
import math
import re
import shutil
import subprocess
from pathlib import Path

import sentencepiece
import torch
from PIL import Image
from torch.utils.data import DataLoader

import common
import virtex
from common import fail, number, print_main, progress
from downstream import tasks
from downstream.pictures import draw_attention, photo_files
from eval_linear import CentralSquares
from extras import checkpoints
from virtex import EOS, MASK, PAD, SOS


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("photos", nargs="*", metavar="PHOTO", help="photos to caption")
    tasks.add_weights(parser, "virtex")
    add("--tokenizer", help="SentencePiece .model file, which official weights need")
    add("--output", default="runs/captioning", help="folder for the results (default %(default)s)")
    add("--beams", type=number("int > 0"), default=5, help="width of beam search [Sec. 4.4]")
    add("--evaluate", action="store_true", help="score captions of the validation split [Fig. 6]")
    add("--data", default="coco", help="data set for --evaluate, as for virtex.py (default coco)")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--val-split", help="split for --evaluate (default val2017 for coco, else val)")
    add("--workers", type=number("int >= 0"), default=0, help="processes that load photos")
    args = parser.parse_args(argv)
    if bool(args.photos) == args.evaluate:
        parser.error("give either photos or --evaluate")
    args.val_split = args.val_split or ("val2017" if args.data == "coco" else "val")
    return args


def main(args):
    common.make_folder(args.output)
    device = common.init_distributed()
    model, tokenizer, image_size = load_virtex(args.weights, args.tokenizer)
    model.to(device)
    if args.evaluate:
        return evaluate(model, tokenizer, image_size, device, args)
    data = photo_files(args.photos)
    captions = caption_images(model, tokenizer, data, image_size, device, args)
    for n, caption, tokens, image_features, pixels in captions:
        pieces = [tokenizer.id_to_piece(token) for token in tokens[1:].tolist()]
        words = word_attention(model.textual, image_features, tokens, pieces)
        picture = Path(args.output, f"{n + 1}_{Path(args.photos[n]).stem}.png")
        draw_attention(Image.fromarray(pixels.numpy()), caption, words, picture)
        print_main(f"{args.photos[n]}: {caption}  ({picture})")


def load_virtex(path, tokenizer_path=None):
    """A captioning model of ours or an official one -> VirTex in eval mode, tokenizer, image size

    Layer sizes are read from the weights.
    """
    content = common.read_checkpoint(path)
    state = content.get("model", {})
    args = content.get("args", {})
    print_main(f"{path}: trained on {args.get('data', 'unknown data')}")
    if "textual.embedding.words.weight" not in state or args.get("task") == "masked_lm":
        fail(f"{path} is not a captioning model: give a checkpoint.pth of virtex.py, trained with "
             "--task bicaptioning or captioning")
    if tokenizer_path:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=f"{tokenizer_path}")
    elif "tokenizer" in content:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content["tokenizer"])
    else:
        fail(f"{path} has no tokenizer: add --tokenizer coco_10k.model")
    vocab_size, hidden = state["textual.embedding.words.weight"].shape
    ids = tokenizer.piece_to_id(["[SOS]", "[EOS]", "[MASK]"])
    if tokenizer.get_piece_size() != vocab_size or ids != [SOS, EOS, MASK]:
        fail(f"--tokenizer {tokenizer_path} is not the one with which {path} was trained")

    layers = [name for name in state if re.match(r"textual\..*\.linear1\.bias", name)]
    bidirectional = any(name.startswith("backward_textual.") for name in state)
    model = virtex.VirTex(
        common.build_backbone(args.get("arch") or checkpoints.load_backbone(path).arch),
        vocab_size,
        hidden,
        layers=len(layers),
        max_length=len(state["textual.embedding.positions.weight"]),
        task="bicaptioning" if bidirectional else "captioning",
    )
    # Left out: layers that only a loss of the training needs, and the official file's classifier
    ours = model.state_dict()
    model.load_state_dict({name: x for name, x in state.items() if name in ours})
    return model.eval(), tokenizer, args.get("image_size", 224)


@torch.no_grad()
def caption_images(model, tokenizer, data, image_size, device, args):
    """Yield (n, caption, its tokens (T,), image features (1, S, H), pixels) for each photo of data
    that can be decoded.  tokens: from [SOS] on, without [EOS]
    """
    batches = DataLoader(CentralSquares(data, image_size), 16, num_workers=args.workers)
    first = 0
    for pixels, readable in progress(batches, desc="captions", unit=" batches", leave=False):
        batch = common.augment(pixels.to(device))
        image_features = model.textual.project(model.visual["cnn"](batch))  # (B, S, H)
        captions, _ = beam_search(model.textual, image_features, args.beams)
        before_end = (captions == EOS).cumsum(1) == 0  # (B, T)
        for n in range(len(pixels)):
            if readable[n]:
                tokens = captions[n, before_end[n]]
                caption = tokenizer.decode([token for token in tokens.tolist() if token > MASK])
                yield first + n, caption, tokens, image_features[n : n + 1], pixels[n]
        first += len(pixels)


@torch.no_grad()
def beam_search(head, image_features, beams=5):
    """The most probable captions -> tokens (B, T) from [SOS] on, padded after [EOS]; log p (B,)

    image_features (B, S, H). A hypothesis that has ended keeps its score and competes on. The
    search is over when all have ended or have the maximum length. After the first token each has
    two continuations, and no token follows itself [official code; that [SOS] does not: ours]. [SOS]
    stays in front, as in training, and at most 29 tokens follow it [ours]: the official search
    drops it after the first step, which shifts all positions by one, and writes 30, so that its
    captions often differ.
    """
    batch, vocab_size = len(image_features), head.output.out_features
    device = image_features.device
    of_each_beam = image_features.repeat_interleave(beams, 0)  # (B * beams, S, H)
    first_row = beams * torch.arange(batch, device=device)[:, None]
    tokens = torch.full((batch, beams, 1), SOS, device=device)
    scores = torch.zeros(batch, beams, device=device)
    scores[:, 1:] = -math.inf  # all beams start alike: only one counts
    while tokens.size(2) < head.embedding.positions.num_embeddings:
        ended = (tokens == EOS).any(2)  # (B, beams)
        if ended.all():
            break
        vectors = head(tokens.flatten(0, 1), of_each_beam)[:, -1]
        log_p = head.output(vectors).float().log_softmax(-1).view(batch, beams, vocab_size)
        log_p.scatter_(2, tokens[:, :, -1:], -math.inf)
        if tokens.size(2) > 1:
            second = log_p.topk(2).values[..., 1:]
            log_p[log_p < second] = -math.inf
        log_p[ended] = -math.inf  # nothing follows [EOS]...
        log_p[..., PAD][ended] = 0.0  # ...but padding, at no cost
        continued = scores[:, :, None] + log_p  # (B, beams, vocabulary)
        scores, choice = continued.flatten(1).topk(beams)
        beam = choice // vocab_size  # (B, beams): which hypothesis is continued
        token = choice % vocab_size  # (B, beams): by which token
        before = tokens.flatten(0, 1)[first_row + beam]
        tokens = torch.cat([before, token[:, :, None]], 2)
    return tokens[:, 0], scores[:, 0]


@torch.no_grad()
def word_attention(head, image_features, tokens, pieces):
    """Where the last layer looks when it predicts each word [Sec. 4.4] -> list of (word, (h, w))

    image_features (1, S, H); tokens (T,) from [SOS] on, without [EOS]; pieces: those after [SOS] as
    strings, "▁" at the start of a word. The map of a word is the mean over its tokens, each of
    which is predicted at the position before it; it sums to one.
    """
    x = head.embedding(tokens[None])
    *earlier, last = head.transformer.layers
    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=x.device).triu(1)
    for layer in earlier:
        x = layer(x, image_features, tgt_mask=future, tgt_is_causal=True)
    self_out, _ = last.self_attn(x, x, x, attn_mask=future)
    query = last.norm1(x + self_out)
    _, weights = last.multihead_attn(query, image_features, image_features)  # mean over the heads
    side = math.isqrt(image_features.size(1))
    words, maps = [], []
    for piece, attention in zip(pieces, weights[0]):  # (S,): row t predicts token t + 1
        if piece.startswith("▁") or not words:
            words.append("")
            maps.append([])
        words[-1] += piece.lstrip("▁")
        maps[-1].append(attention.view(side, side))
    return [(word, torch.stack(of_word).mean(0)) for word, of_word in zip(words, maps)]


def evaluate(model, tokenizer, image_size, device, args):
    """Caption the validation split, and score the captions [Fig. 6]"""
    if not importlib.util.find_spec("pycocoevalcap"):
        fail("pycocoevalcap is missing: python -m pip install pycocoevalcap")
    if not shutil.which("java"):
        fail("Java is missing: apt-get install default-jre-headless")
    [val] = common.caption_data(args.data, args.root, [args.val_split])
    val = val.captioned()
    rows = []
    for n, caption, *_ in caption_images(model, tokenizer, val, image_size, device, args):
        references = val.captions[n]
        rows.append({"image": str(val.images[n]), "caption": caption, "references": references})
    path = Path(args.output, "captions.json")
    common.save(path, {"args": vars(args), "captions": rows})
    print_main(f"the captions of {len(rows)} of {len(val)} photos are in {path}")
    common.save(f"{args.output}/result.json", score(rows) | {"args": vars(args)})


def score(rows):
    """Captions with their references -> {"CIDEr", "SPICE": percent}

    What cannot be measured here is reported, and left out, as is CIDEr of one photo.
    """
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.spice.spice import Spice
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    references = [[{"caption": text} for text in row["references"]] for row in rows]
    truth = PTBTokenizer().tokenize(dict(enumerate(references)))
    written = PTBTokenizer().tokenize({n: [row] for n, row in enumerate(rows)})
    metrics, scores = {"CIDEr": Cider, "SPICE": Spice}, {}
    if len(rows) == 1:
        print_main("CIDEr is left out: of one photo it is 0, whatever the caption")
        del metrics["CIDEr"]
    elif len(rows) < 100:
        print_main("CIDEr of fewer than 100 photos means little: a word counts less, the more of "
                   "them have it in their references")
    for name, metric in metrics.items():
        try:
            scores[name] = 100 * metric().compute_score(truth, written)[0]
            print_main(f"{name} {scores[name]:.1f} on {len(rows)} images")
        except (OSError, subprocess.CalledProcessError) as error:  # SPICE loads CoreNLP once
            print_main(f"{name} was not measured: {error}")
    return scores


if __name__ == "__main__":
    main(get_args())
