"""VirTex: a backbone learned by writing captions, from left to right and from right to left.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021.

A convolutional network turns a photo into a 7x7 grid of features. Two Transformers look at the
grid and predict the photo's caption, one forward and one backward (Eq. 1), all trained from random
initialisation. Captions say which objects are there, how they look, where they are and what they
do. A backbone whose features suffice to write them has learned to see. Only the backbone is kept.

    laptop        python virtex.py
    own photos    python virtex.py --data photos.jsonl
    one GPU       python virtex.py --data coco --accumulate 8
    eight GPUs    torchrun --nproc_per_node=8 virtex.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 virtex.py --data coco   (on both; shared --output)
    captions      python -m downstream.captioning photo.jpg \\
                      --weights runs/virtex-photos/checkpoint.pth

Where the paper is:

    Eq. 1, log-likelihood of both directions   VirTex.text_losses, token_loss
    Fig. 3, visual backbone, textual head      VirTex, TextualHead
    shared embeddings, tied output [Sec. 3]    VirTex.__init__, TextualHead.__init__
    crops, colours [Sec. 3]                    common.Photos.photo, common.augment
    flip with left and right swapped [Sec. 3]  CaptionedPhotos.sample
    tokenizer [Sec. 3]                         normalise, train_tokenizer
    SGD with look-ahead, two rates [Sec. 3]    parameter_groups, look_ahead
    warm-up and cosine [Sec. 3]                common.lr_factor
    early stopping [Sec. 3]                    --keep-every, then eval_linear.py: the paper selects
                                               by VOC07; on other data --hold-out [ours]
    other tasks [Sec. 4.1, 4.2]                the ablations at the end

What to expect: with the paper's head (H = 2048, 10K words) the loss starts near 12.5 in each
direction, not at ln 10000 = 9.2: the output layer is the token embedding, so at first each
position predicts the token it has just read. Then comes a plateau: the heads write plausible
captions without looking at the photo. The loss falls again when the image features start to lower
it. If training stalls there, train longer or raise --text-lr. The recipe small, whose heads have
read the captions first, ends at 3.19 per direction on Flickr8k. A finished run is in
docs/logs/virtex.
"""

import argparse
import copy
import io
import math
import os
import re
import time
import unicodedata
from collections import Counter

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

import common
from common import count, fail, fraction, positive, print_main, progress, share, weight, whole

# fmt: off
RECIPES = {  #           demo        small       paper      (demo, small [ours])
    "arch":             ("resnet18", "resnet18", "resnet50"),  # Sec. 3
    "image_size":       (48,         112,        224),         # Sec. 3
    "crop_min":         (1.0,        0.5,        0.2),         # Sec. 3
    "colour_jitter":    (0.0,        0.4,        1.0),         # official code
    "hidden":           (256,        512,        2048),        # Sec. 4.1
    "init_std":         (None,       None,       0.02),        # official code; None: H^-0.5
    "zero_residual":    (False,      False,      True),        # official code; others [ours]
    "dropout":          (0.0,        0.1,        0.1),         # official code
    "batch_size":       (32,         64,         256),         # Sec. 3
    "iters":            (540,        None,       500_000),     # Sec. 3
    "epochs":           (None,       25.0,       None),
    "optimizer":        ("AdamW",    "AdamW",    "SGD"),       # Sec. 3
    "lr":               (2e-3,       1e-3,       0.2),         # Sec. 3
    "text_lr":          (5e-4,       5e-4,       1e-3),        # Sec. 3
    "text_first":       (0.0,        0.2,        0.0),         # small [ours]
    "lambda_words":     (0.0,        2.0,        0.0),         # small [ours]
    "warmup":           (0.05,       0.05,       0.02),        # Sec. 3: 10K of 500K iterations
    "weight_decay":     (1e-2,       1e-2,       1e-4),        # Sec. 3
    "lookahead_alpha":  (1.0,        1.0,        0.5),         # Sec. 3; 1: no look-ahead
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        2000,       10_000),
    "checkpoint_every": (200,        500,        10_000),
}
# fmt: on
TEXT_ITERS = 600  # of captions alone, at most [ours]
MAX_LENGTH = 30  # tokens per caption, [SOS] and [EOS] included [official code]
LOOKAHEAD_K = 5  # iterations [Sec. 3]


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__, epilog=common.recipe_table(RECIPES),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", help="shapes (built in), coco, vg, a .jsonl, folder of shards")
    add("--recipe", choices=common.RECIPE_NAMES, help="demo (shapes), small (.jsonl) or paper")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--train-split", help="default train2017 for coco, else train")
    add("--val-split", help="default val2017 for coco, else val")
    add("--fraction", type=share, default=1.0, help="of photos; scale --iters yourself [Fig. 4]")
    add("--captions-per-image", type=count, help="use at most this many captions [Fig. 4]")
    add("--image-size", type=count, help="crop side in pixels; cost grows with its square")
    add("--crop-min", type=share, help="smallest fraction of a photo's area in a crop")
    add("--colour-jitter", type=weight, help="strength; lower it if captions name colours")
    add("--workers", type=whole, default=min(8, os.cpu_count() // 2),
        help="more if data_wait > 0.05")

    add = parser.add_argument_group("model").add_argument
    add("--arch", choices=common.BACKBONES, help="the backbone; resnet18 for small data or a CPU")
    add("--init", help="start from a backbone, a checkpoint.pth with its heads, or imagenet")
    add("--task", choices=("bicaptioning", "captioning", *ABLATIONS), default="bicaptioning",
        help="others: ablations [Tab. 1, Fig. 5]")
    add("--layers", type=count, default=1, help="L; 2 or 3 generally help [Sec. 4.2]")
    add("--hidden", type=count, help="H; larger is better but slower; sets A = H/64, F = 4H")
    add("--dropout", type=fraction, help="in the heads; raise it if captions are few")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch-size", type=count, help="photos per iteration over all processes")
    add("--iters", type=count, help="training iterations; scale them with the data")
    add("--epochs", type=positive, help="instead of --iters: passes over the data")
    add("--lr", type=positive, help="peak rate of the backbone; lower if the loss is not finite")
    add("--text-lr", type=positive, help="peak rate of the heads; lower it if their loss rises")
    add("--text-first", type=common.non_negative,
        help="let the heads first read captions alone, for this share of --iters (at most 600)")
    add("--lambda-words", type=weight, help="weight of words from the photo alone; for few photos")
    add("--warmup", type=fraction, help="of the learning rate, as a fraction of training")
    add("--weight-decay", type=weight, help="raise it if photos are few")

    add = parser.add_argument_group("run").add_argument
    add("--output", help="where the same command resumes (default runs/SCRIPT, runs/SCRIPT-DATA)")
    add("--seed", type=whole, default=0, help="random seed")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    add("--accumulate", type=count, default=1, help="micro-batches per batch, if memory is short")
    add("--compile", action="store_true", help="torch.compile: slower to start, faster on GPUs")
    add("--log-every", type=count, help="iterations between lines of metrics.jsonl")
    add("--validate-every", type=count, help="iterations between validations")
    add("--checkpoint-every", type=count, help="iterations between saves of checkpoint.pth")
    add("--keep-every", type=count, help="iterations between model_N.pth (early stopping)")
    # fmt: on
    args = parser.parse_args(argv)
    common.apply_recipe(args, "virtex", RECIPES)
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden} must be a multiple of 64 (A = H / 64 heads)")
    if args.task in ABLATIONS:
        args.lambda_words = 0.0  # they have no such loss
    if args.task.endswith("classification"):
        args.text_first = 0.0  # there are no heads that could read
    args.init_std = args.init_std or args.hidden**-0.5  # of 0.02, narrow heads ignore the photo
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    checkpoint = common.load_checkpoint(args)  # {} unless the same command was interrupted
    init = {} if checkpoint else common.read_init(args)

    # Data: photos with at least one caption, and a tokenizer learned from the captions.
    tags = args.task == "multilabel_classification"
    train = common.caption_data(args.data, args.root, args.train_split, tags)
    train = subset(train, args.fraction, args.captions_per_image, args.seed).captioned()
    val = common.caption_data(args.data, args.root, args.val_split, tags).captioned()
    common.begin_run(args, checkpoint, train.columns(), val.columns())
    tokenizer = load_tokenizer(args, train.all_captions(), init)
    Model, Photos = ABLATIONS.get(args.task, (VirTex, CaptionedPhotos))
    photos = Photos(train, tokenizer, args)
    val_photos = Photos(val, tokenizer, args)
    num_outputs = FIRST_TAG + len(train.tag_names) if tags else tokenizer.get_piece_size()
    iters = args.iters or math.ceil(args.epochs * len(photos) / args.batch_size)
    print_main(f"{len(photos)} photos ({len(val_photos)} for validation), {num_outputs} outputs, "
               f"{iters} iterations at lr {args.lr:g}, text lr {args.text_lr:g}, on {device}, amp "
               f"{args.amp}, into {args.output}")  # fmt: skip

    # Model and optimizer, restored where an earlier run stopped.
    torch.manual_seed(args.seed)
    residual = {"zero_init_residual": args.zero_residual} if "resnet" in args.arch else {}
    backbone = common.build_backbone(args.arch, **residual)  # VGG has no residual blocks
    model = Model(
        backbone, num_outputs, args.hidden, args.layers, args.dropout,
        task=args.task, lambda_words=args.lambda_words, init_std=args.init_std
    )  # fmt: skip
    common.load_init(init, model, backbone)
    model.to(device, memory_format=torch.channels_last)
    text_iters = min(TEXT_ITERS, round(args.text_first * iters))
    if text_iters and not (checkpoint or init.get("model")) and common.is_main():
        language_first(model, photos, text_iters, args, device)  # DDP copies these weights
    if args.compile:
        model.visual["cnn"].compile()
        for head in model.children():
            head.compile(dynamic=True)  # caption lengths vary
    ddp = common.data_parallel(model).train()
    optimizer = common.build_optimizer(args, parameter_groups(model, args.text_lr))
    lookahead = copy.deepcopy(model)  # the slow weights
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "lookahead": lookahead, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, parts)

    batches = common.train_batches(photos, photos.collate, args, device, done)
    log = common.Log(args, checkpoint)
    own = {"tokenizer": tokenizer.serialized_model_proto()}  # part of each checkpoint
    bar = progress(range(done + 1, iters + 1), initial=done, total=iters, unit=" its")
    for iteration in bar:
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup)  # [Sec. 3]
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part in range(args.accumulate):
            asked = time.perf_counter()
            images, jitter, *captions = next(batches).values()  # in the order of collate
            log.waited += time.perf_counter() - asked
            # DDP averages the gradients of all processes, once: after the last micro-batch.
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(images, jitter)  # on the device: (B, 3, h, w)
            with common.autocast(device, args.amp):
                totals = ddp(images, *captions)
            losses = {name: total / number for name, (total, number) in totals.items()}
            loss = sum(losses.values())  # both directions [Eq. 1]
            scaler.scale(loss / args.accumulate).backward()
            log.add(loss=loss, **losses)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)  # [official code]
        scaler.step(optimizer)
        scaler.update()
        if iteration % LOOKAHEAD_K == 0:
            look_ahead(lookahead, model, args.lookahead_alpha)  # [Sec. 3]

        last = iteration == iters
        validate_now = iteration % args.validate_every == 0 or last
        if iteration % args.log_every == 0 or validate_now:
            row = log.means()
            row |= {"lr": args.lr * lr_scale, "text_lr": args.text_lr * lr_scale}
            bar.set_postfix(loss=f"{row['loss']:.3f}")
            if validate_now and common.is_main():
                scores = validate(model, val_photos, args, device)
                row |= {f"validation_{name}": score for name, score in scores.items()}
                if last:
                    common.save(f"{args.output}/result.json", {"validation_loss": scores})
            log.write(iteration, row)
        if args.keep_every and iteration % args.keep_every == 0:
            common.save_checkpoint(args, f"model_{iteration}.pth", iteration,
                                   {"model": model}, **own)  # fmt: skip
        if iteration % args.checkpoint_every == 0 or last:
            common.save_checkpoint(args, "checkpoint.pth", iteration, parts, **own)

    common.end_run(args, backbone)  # eval_linear.py says what the backbone is worth


# ---------------------------------------------------------------------------- captions to tokens

PAD = UNK = 0  # padding and unknown tokens share an id, as in the official model
SOS, EOS, MASK = 1, 2, 3


def subset(data, fraction, captions_per_image, seed):
    """A random fraction of the photos, each with at most so many captions [Fig. 4] -> CaptionData

    A photo keeps the same captions, whatever the fraction.
    """
    order = np.random.default_rng(seed).permutation(len(data))
    chosen = np.sort(order[: max(1, round(fraction * len(data)))])
    data = data.select(chosen)
    if captions_per_image:
        rows = []
        for i, captions in zip(chosen, data.captions):
            rng = np.random.default_rng([seed, 0, i])  # of this photo
            rows.append(rng.permutation(captions)[:captions_per_image])
        data.captions = common.lists(rows)
    return data


def normalise(caption):
    """Lower-case, without accents [Sec. 3]; of Latin letters, and NFKD first, NFC last [ours]"""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return unicodedata.normalize("NFC", re.sub(common.ACCENTS, "", decomposed))


def load_tokenizer(args, captions, init):
    """The tokenizer of --init's checkpoint, or one trained on the captions"""

    def make(path):
        path.write_bytes(init["tokenizer"] if "tokenizer" in init else train_tokenizer(captions))

    path = common.once(args, "tokenizer.model", make)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=f"{path}")
    some = captions[:: 1 + len(captions) // 10_000]  # all would take a minute
    cut = np.mean([len(tokenizer.encode(normalise(text))) > MAX_LENGTH - 2 for text in some])
    if cut > 0.01:
        print_main(f"{cut:.0%} of the captions are cut at {MAX_LENGTH - 2} tokens")
    return tokenizer


def train_tokenizer(captions, vocab_size=10_000):
    """SentencePiece BPE [Sec. 3] -> the serialised model

    Few captions get fewer tokens, one for eight captions, beside their characters [ours]: of 10,000
    tokens, three in four would occur less than five times in Flickr8k's 30,000 captions.
    Its defaults: no piece joins letters and punctuation [Sec. 3], UNK is 0, there is no padding.
    """
    characters = {*normalise("".join(captions))}
    vocab_size = min(vocab_size, len(characters) + max(1000, len(captions) // 8))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=map(normalise, progress(captions, desc="tokenizer")),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentence_length=1 << 20,  # bytes; what is longer would be ignored
        bos_id=-1,  # none
        eos_id=-1,
        control_symbols="[SOS],[EOS],[MASK]",  # 1, 2, 3
        minloglevel=3,
    )
    return model.getvalue()


def language_first(model, photos, iters, args, device):
    """Train the heads on captions alone, the image features being zero

    Few photos are not to be spent on learning English: from here on, what lowers the loss is what
    the photo shows. [ours; the other scripts' language models read the captions first, too]
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the backbone gets no gradient
    captions = sorted(photos.data.all_captions(), key=len)
    batch_size = min(64, len(captions))
    rng = np.random.default_rng(args.seed)
    no_photo = torch.zeros(batch_size, 1, args.hidden, device=device)  # (B, S, H)
    for iteration in progress(range(iters), desc="captions alone"):
        common.set_lr(optimizer, common.lr_factor(iteration, iters, warmup=0.1))
        # Captions of similar length: of a batch drawn at random, half would be padding.
        start = rng.integers(len(captions) - batch_size + 1)
        chosen = captions[start : start + batch_size]
        batch = photos.collate_text([photos.text(caption, rng) for caption in chosen])
        with common.autocast(device, "off" if args.amp == "fp16" else args.amp):  # no scaler here
            totals = model.text_losses(no_photo, *(x.to(device) for x in batch.values()))
        optimizer.zero_grad()
        sum(total / number for total, number in totals.values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# --------------------------------------------------------------------------- samples and batches


class CaptionedPhotos(common.Photos):
    """Photos, each with one of its captions: a random one, in validation always the same"""

    def __init__(self, data, tokenizer, args):
        super().__init__(data, args)
        self.tokenizer = tokenizer

    def sample(self, index, rng):
        sample, flipped = self.photo(index, rng)
        captions = self.data.captions[index]
        caption = rng.choice(captions) if rng else captions[index % len(captions)]
        if flipped:
            caption = common.swap_left_right(caption)  # flipped with the photo [Sec. 3]
        rng = rng or np.random.default_rng([self.args.seed, 0, index])
        return sample | {"text": self.text(caption, rng)}

    def text(self, caption, rng):
        """-> its tokens"""
        return [SOS, *self.tokenizer.encode(normalise(caption)), EOS][:MAX_LENGTH]

    def collate(self, samples):
        """-> image uint8 (B, size, size, 3), jitter (B, 4), and what collate_text returns"""
        texts = [sample.pop("text") for sample in samples]
        return default_collate(samples) | self.collate_text(texts)

    def collate_text(self, rows):
        """-> tokens (B, T), the same of each caption's reverse, and the positions of all N targets
        in either's [:, 1:], without padding (N, 2). Found on a GPU, they would synchronise.
        """
        targets = pad([[1] * len(row) for row in rows])[:, 1:]  # (B, T - 1), 0 at padding
        return {
            "tokens": pad(rows),
            "backward_tokens": pad([row[::-1] for row in rows]),
            "positions": targets.nonzero(),
        }


def pad(sequences):
    """Lists of ids -> (B, T) int64, zero-padded on the right"""
    return nn.utils.rnn.pad_sequence([*map(torch.tensor, sequences)], batch_first=True)


# ----------------------------------------------------------------------------------------- model


class VirTex(nn.Module):
    """Backbone and textual heads; calling it returns the losses [Sec. 3].

    Names of the official code; in Eq. 1 theta is visual, phi_f textual, phi_b backward_textual.
    backbone: (B, 3, h, w) -> (B, channels, h / 32, w / 32).  sizes, options: of TextualHead
    """

    def __init__(self, backbone, *sizes, task="bicaptioning", lambda_words=0.0, **options):
        super().__init__()
        self.lambda_words = lambda_words
        self.visual = nn.ModuleDict({"cnn": backbone})
        self.textual = head = TextualHead(backbone.channels, *sizes, **options)
        self.backward_textual = None
        if task == "bicaptioning":
            # The Transformers start alike and are trained apart [official code]; the directions
            # share embedding, output [Sec. 3] and projection [official code].
            backward = copy.deepcopy(head)
            backward.embedding = head.embedding
            backward.output = head.output
            backward.visual_projection = head.visual_projection
            self.backward_textual = backward

    def forward(self, images, *captions):
        """images (B, 3, h, w), captions: see collate_text -> {name: (sum of losses, number)}"""
        features = self.visual["cnn"](images)  # (B, channels, h / 32, w / 32)
        return self.text_losses(self.textual.project(features), *captions)

    def text_losses(self, image_features, tokens, backward_tokens, positions):
        """Minus Eq. 1, whose mean is over the tokens of each direction [official code]: each token
        is predicted from the image and from the tokens before it in the direction of reading.

        image_features: (B, S, H), S = h / 32 * w / 32: N_I
        """
        photo, place = positions.T

        def one_direction(head, tokens):
            vectors = head(tokens[:, :-1], image_features)  # (B, T - 1, H)
            return token_loss(head.output(vectors[photo, place]), tokens[photo, place + 1])

        losses = {"forward": one_direction(self.textual, tokens)}
        if self.backward_textual:
            losses["backward"] = one_direction(self.backward_textual, backward_tokens)
        if self.lambda_words:  # Eq. 1 without the tokens before: from the image alone [ours]
            logits = self.textual.output(image_features.mean(1))  # (B, vocabulary)
            total, number = token_loss(logits[photo], tokens[photo, place + 1])
            losses["words"] = (self.lambda_words * total, number)
        return losses


def token_loss(logits, targets):
    """logits (N, vocabulary), targets (N,) -> sum of the cross-entropies of known tokens, their
    number (1 if there are none). Unknown ones, which share the id of padding, are no targets
    [official code]. (Padding has been left out, so that it does not pass through the output layer.)
    """
    total = F.cross_entropy(logits, targets, ignore_index=UNK, reduction="sum")
    return total, (targets != UNK).sum().clamp(min=1)


class TextualHead(nn.Module):
    """One direction: a Transformer that reads tokens and an image [Sec. 3]. Official names."""

    def __init__(
        self, channels, vocab_size, hidden, layers=1, dropout=0.1,
        max_length=MAX_LENGTH, init_std=0.02
    ):  # fmt: skip
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = Embedding(vocab_size, hidden, dropout, max_length)
        layer = nn.TransformerDecoderLayer(  # post-norm; A = H / 64, F = 4H [Sec. 3]
            hidden, hidden // 64, 4 * hidden, dropout, activation="gelu", batch_first=True
        )
        self.transformer = nn.TransformerDecoder(layer, layers)
        self.output = nn.Linear(hidden, vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)  # [ours]
        nn.init.zeros_(self.embedding.words.weight[PAD])
        self.output.weight = self.embedding.words.weight  # weight tying [Sec. 3]

    def project(self, features):
        """(B, channels, h, w) -> the image's vectors (B, h * w, H)"""
        return self.visual_projection(features.flatten(2).mT)

    def forward(self, tokens, image_features):
        """tokens (B, T), image_features (B, S, H) -> vectors (B, T, H)

        Each token sees the image, itself and the tokens before it.
        """
        future = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), tokens.device)
        x = self.embedding(tokens)
        return self.transformer(x, image_features, tgt_mask=future, tgt_is_causal=True)


class Embedding(nn.Module):
    """Token plus position embedding, then layer norm and dropout [Sec. 3]."""

    def __init__(self, vocab_size, hidden, dropout, max_length):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden, padding_idx=PAD)
        self.positions = nn.Embedding(max_length, hidden)
        self.layer_norm = nn.LayerNorm(hidden, eps=1e-8)  # official code
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions.weight[: tokens.size(1)]
        x = self.dropout(self.layer_norm(x))
        return x * (tokens != PAD)[..., None]  # 0 for padding and unknown [official code]


# ------------------------------------------------------------------------------------- optimizer


def parameter_groups(model, text_lr):
    """The backbone at the optimizer's rate, the rest at `text_lr`. No weight decay on norms and
    biases of embedding and Transformers; biases of projection and output do decay [official code].
    """
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if re.search(r"textual\.(embedding|transformer)\..*(norm|bias)", name):
            no_decay.append(parameter)
        elif not name.startswith("visual."):
            decay.append(parameter)
    return [
        {"params": model.visual.parameters()},
        {"params": decay, "lr": text_lr},
        {"params": no_decay, "lr": text_lr, "weight_decay": 0.0},
    ]


@torch.no_grad()
def look_ahead(slow_model, model, alpha):
    """The slow weights move a fraction alpha of the way to the model's, which restart from there.

    To be called every k steps [Zhang et al. 2019; Sec. 3: k = 5, alpha = 0.5].
    """
    for slow, fast in zip(slow_model.parameters(), model.parameters()):
        fast.copy_(slow.lerp_(fast, alpha))


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, photos, args, device):
    """-> {name: loss}, its mean over what it is a sum of: known tokens, or photos"""
    model.eval()
    sums = Counter()
    for batch in common.load_batches(photos, photos.collate, args, device):
        images, _, *captions = batch.values()
        with common.autocast(device, args.amp):
            losses = model(common.augment(images), *captions)
        for name, loss in losses.items():
            sums[name] += np.array([*map(float, loss)])
    model.train()
    means = {name: total / number for name, (total, number) in sums.items()}
    for name, loss in means.items():
        print_main(f"validation loss, {name}: {loss:.2f}")
    return means


# ----------------------------------------------------------- ablations: other tasks [Sec. 4.1, 4.2]


class MaskedPhotos(CaptionedPhotos):
    """Photos with a caption in which some tokens are masked"""

    def text(self, caption, rng):
        """-> its tokens, and the same with [MASK]s"""
        tokens = super().text(caption, rng)
        return tokens, mask_tokens(tokens, self.tokenizer.get_piece_size(), rng)

    def collate_text(self, texts):
        """-> tokens (B, T), the same with [MASK]s, padding (B, T), positions (N, 2) of [MASK]s"""
        tokens, masked = map(pad, zip(*texts))
        return {
            "tokens": tokens,
            "masked": masked,
            "padding": pad([[1] * len(row) for row, _ in texts]) == 0,
            "positions": (masked == MASK).nonzero(),
        }


def mask_tokens(tokens, vocab_size, rng):
    """15% of tokens: 85% [MASK], 10% a random one, 5% kept; a single one: [MASK] [official code]"""
    masked = list(tokens)
    words = range(1, len(tokens) - (tokens[-1] == EOS))  # a last word that is cut, too [ours]
    num_masked = math.ceil(0.15 * len(words))
    for t in rng.permutation(words)[:num_masked]:
        draw = rng.random() if num_masked > 1 else 0.0
        if draw < 0.85:
            masked[t] = MASK
        elif draw < 0.95:
            masked[t] = rng.integers(MASK + 1, vocab_size)  # not a special one [ours]
    return masked


class MaskedLM(VirTex):
    """Masked language modelling: [MASK]ed tokens from the image and all other tokens"""

    def text_losses(self, image_features, tokens, masked, padding, positions):
        head = self.textual
        x = head.embedding(masked)
        vectors = head.transformer(x, image_features, tgt_key_padding_mask=padding)
        photo, place = positions.T
        return {"masked_lm": token_loss(head.output(vectors[photo, place]), tokens[photo, place])}


class TaggedPhotos(CaptionedPhotos):
    """Images that have tags [official code], with these in place of a caption"""

    def __init__(self, data, tokenizer, args):
        keep = [n for n, tags in enumerate(data.tags) if tags]
        if not keep:
            fail("--task multilabel_classification needs tags (for coco: instances_*.json)")
        print_main(f"{len(keep)} of {len(data)} photos have tags, the others are left out")
        super().__init__(data.select(keep), tokenizer, args)

    def sample(self, index, rng):
        tags = [FIRST_TAG + self.data.tag_names.index(tag) for tag in self.data.tags[index]]
        return self.photo(index, rng)[0] | {"text": tags}


FIRST_TAG = 4  # tags follow the ids of special tokens: 4 outputs more than the paper's 80 [ours]


class Classifier(nn.Module):
    """Softmax cross-entropy with targets of 1/K for each of a set of K words or tags"""

    def __init__(self, backbone, num_outputs, *_, task, **__):
        super().__init__()
        self.task = task
        self.visual = nn.ModuleDict({"cnn": backbone})
        self.textual = nn.ModuleDict({"output": nn.Linear(backbone.channels, num_outputs)})

    def forward(self, images, tokens, *_):
        """images (B, 3, h, w), tokens (B, K) -> {task: (sum of losses, number of photos)}"""
        logits = self.textual["output"](self.visual["cnn"](images).mean((2, 3))).float()
        targets = torch.zeros_like(logits).scatter_(1, tokens, 1.0)
        targets[:, :FIRST_TAG] = 0  # neither special tokens nor padding
        targets = F.normalize(targets, p=1)  # their sum is 1
        return {self.task: (F.cross_entropy(logits, targets, reduction="sum"), len(images))}


ABLATIONS = {
    "masked_lm": (MaskedLM, MaskedPhotos),
    "token_classification": (Classifier, CaptionedPhotos),
    "multilabel_classification": (Classifier, TaggedPhotos),
}

if __name__ == "__main__":
    main(get_args())
