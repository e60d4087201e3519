"""VirTex: a backbone learned by writing captions, from left to right and from right to left.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021.

A convolutional network turns a photo into a 7x7 grid of features. Two Transformers look at the
grid and predict the photo's caption, one forward and one backward (Eq. 1), all trained from random
initialisation. Captions say which objects are there, how they look, where they are and what they
do. A backbone whose features suffice to write them has learned to see. Only the backbone is kept.

    laptop        python virtex.py
    own photos    python virtex.py --data photos.jsonl
    one GPU       python virtex.py --data coco   (18.4 GiB; for less, --accumulate 8)
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
    early stopping [Sec. 3]                    --keep-every, then eval_linear.py: by VOC07, as
                                               in the paper; else by --hold-out [ours]
    other tasks [Sec. 4.1, 4.2]                the ablations at the end

What to expect: with the recipe paper (H = 2048, 10K tokens) the loss starts at 15.3 in each
direction (12.9 with --no-zero-residual), not at ln 10000 = 9.2. The output layer is the token
embedding, so at first each position predicts the token that it has just read. Then comes a plateau,
on which the heads write plausible captions without looking at the photo. The loss falls again once
they start to use the image features. If training stalls on the plateau, train longer or raise
--text-lr. A finished run is in docs/logs/virtex.
"""

import copy
import io
import math
import os
import re
import shlex
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
from common import fail, print_main, progress

TASKS = ("bicaptioning", "captioning", "masked_lm", "token_classification",
         "multilabel_classification")
# Each flag: its values in the recipes demo, small [ours] and paper; what may be given; help. Round
# brackets say what None stands for.
FLAGS = {
    # name                  demo            small           paper           what may be given; help
    # Data
    "data":                ("shapes",       "shapes",       "shapes",       str,
        "shapes (built in), coco, vg, the path of a .jsonl file, or a folder of shards"),
    "recipe":              (None,           None,           None,           common.RECIPES,
        "which column of this table the defaults come from (demo for shapes, small for a "
        ".jsonl, else paper)"),
    "root":                (None,           None,           None,           str,
        "folder of the data (datasets/NAME; for a .jsonl, its own folder)"),
    "train_split":         (None,           None,           None,           str,
        "split for training (train2017 for coco, else train)"),
    "val_split":           (None,           None,           None,           str,
        "split for validation (val2017 for coco, else val)"),
    "fraction":            (1.0,            1.0,            1.0,            "> 0, <= 1",
        "use this fraction of the photos; set --iters accordingly [Fig. 4]"),
    "captions_per_image":  (None,           None,           None,           "int > 0",
        "use at most this many captions of a photo [Fig. 4]"),
    "image_size":          (48,             112,            224,            "int > 0",
        "side of the crops in pixels; the cost grows with its square [Sec. 3]"),
    "crop_min":            (1.0,            0.5,            0.2,            "> 0, <= 1",
        "smallest crop, as a fraction of the photo's area [Sec. 3]"),
    "colour_jitter":       (0.0,            0.4,            1.0,            ">= 0",
        "strength of the colour jitter; lower it if captions name colours [official code]"),
    "vocab_size":          (None,           None,           10_000,         "int > 0",
        "tokens of the vocabulary [Sec. 3] (by the number of captions)"),
    "workers":             (None,           None,           None,           "int >= 0",
        "processes that load photos (a share of the cores); raise it if data_wait exceeds 0.05"),
    # Model
    "arch":                ("resnet18",     "resnet18",     "resnet50",     common.BACKBONES,
        "architecture of the backbone; resnet18 suits few photos or a CPU [Sec. 3]"),
    "zero_residual":       (False,          False,          True,           bool,
        "start the residual blocks as identities [official code]"),
    "init":                (None,           None,           None,           str,
        "weights that the backbone starts from: imagenet, or a file with a backbone"),
    "task":                ("bicaptioning", "bicaptioning", "bicaptioning", TASKS,
        "what is predicted; all but the default are ablations [Tab. 1, Fig. 5]"),
    "layers":              (1,              1,              1,              "int > 0",
        "L, layers of a textual head; 2 or 3 generally help [Sec. 4.2]"),
    "hidden":              (256,            512,            2048,           "int > 0",
        "H, width of the heads; A = H / 64, F = 4H; larger is better but slower [Sec. 4.1]"),
    "init_std":            (None,           None,           0.02,           "> 0",
        "standard deviation of the heads' first weights [official code] (H^-0.5 [ours])"),
    "dropout":             (0.0,            0.1,            0.1,            ">= 0, < 1",
        "dropout in the heads; raise it if captions are few [official code]"),
    # Optimisation
    "batch_size":          (32,             64,             256,            "int > 0",
        "photos per iteration, over all processes [Sec. 3]"),
    "iters":               (540,            None,           500_000,        "int > 0",
        "training iterations; raise them with the data [Sec. 3]"),
    "epochs":              (None,           25.0,           None,           "> 0",
        "passes over the photos, instead of --iters"),
    "optimizer":           ("AdamW",        "AdamW",        "SGD",          common.OPTIMIZERS,
        "how the weights are updated [Sec. 3]"),
    "lr":                  (2e-3,           1e-3,           0.2,            "> 0",
        "peak learning rate of the backbone; lower it if the loss is not finite [Sec. 3]"),
    "text_lr":             (5e-4,           5e-4,           1e-3,           "> 0",
        "peak learning rate of the heads; lower it if their loss rises [Sec. 3]"),
    "lambda_words":        (0.0,            2.0,            0.0,            ">= 0",
        "weight of predicting words from the photo alone; helps if photos are few [ours]"),
    "warmup":              (0.05,           0.05,           0.02,           ">= 0, < 1",
        "length of the learning rate's warm-up, as a fraction of training [Sec. 3: 10K of 500K]"),
    "weight_decay":        (0.01,           0.01,           1e-4,           ">= 0",
        "weight decay; raise it if photos are few [Sec. 3]"),
    "lookahead_alpha":     (1.0,            1.0,            0.5,            "> 0, <= 1",
        "alpha of look-ahead; 1 switches it off [Sec. 3]"),
    # Run
    "output":              (None,           None,           None,           str,
        "folder for results, and for resuming (runs/SCRIPT, or runs/SCRIPT-DATA)"),
    "seed":                (0,              0,              0,              "int >= 0",
        "seed of all random numbers"),
    "amp":                 (None,           None,           None,           common.PRECISIONS,
        "mixed precision (bf16 if the device supports it, else off)"),
    "accumulate":          (1,              1,              1,              "int > 0",
        "split each batch into this many micro-batches, if memory is short"),
    "log_every":           (10,             20,             20,             "int > 0",
        "iterations between lines of metrics.jsonl"),
    "validate_every":      (400,            None,           10_000,         "int > 0",
        "iterations between validations (2,000, or a fifth of a shorter run)"),
    "checkpoint_every":    (200,            500,            10_000,         "int > 0",
        "iterations between saves of checkpoint.pth; each validation saves, too"),
    "save_minutes":        (2.0,            2.0,            10.0,           "> 0",
        "minutes after which checkpoint.pth is saved in any case"),
    "keep_every":          (None,           None,           None,           "int > 0",
        "also keep a model_N.pth every N iterations, to choose the best later"),
}
MAX_LENGTH = 30  # tokens per caption, [SOS] and [EOS] included [official code]
LOOKAHEAD_K = 5  # iterations [Sec. 3]


def get_args(argv=None):
    args = common.Parser(__doc__, FLAGS).parse_args(argv)
    common.apply_recipe(args, "virtex", FLAGS)
    if args.hidden % 64:
        fail(f"--hidden {args.hidden} must be a multiple of 64 (A = H / 64 heads)")
    if not args.task.endswith("captioning"):
        args.lambda_words = 0.0  # the ablations have no such loss
    args.init_std = args.init_std or args.hidden**-0.5  # with 0.02, narrow heads ignore the photo
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    init = common.read_init(args)  # a backbone's weights, or None

    # Data: photos with captions, and a tokenizer learned from the captions.
    Model, Photos = MODELS[args.task]  # classes
    with_tags = args.task == "multilabel_classification"
    splits = args.train_split, args.val_split
    train, val = common.caption_data(args.data, args.root, splits, with_tags)
    train = subset(train, args.fraction, args.captions_per_image, args.seed).captioned()
    val = val.captioned()
    checkpoint = common.begin_run(args, train.checksum(), val.checksum())  # {} for a new run
    if common.is_main() and not checkpoint:  # once, for all processes
        serialised = train_tokenizer(train.all_captions(), args.vocab_size)
        with common.writing(f"{args.output}/tokenizer.model") as file:
            file.write(serialised)
    common.barrier()
    tokenizer = load_tokenizer(args, train)
    photos = Photos(train, tokenizer, args)
    val_photos = Photos(val, tokenizer, args)
    outputs = f"{photos.num_outputs:,} {'tags' if with_tags else 'tokens'} to predict"
    iters, validate_every = common.plan_run(args, device, len(photos), len(val_photos), outputs)

    # Model: from random weights, from --init, or from the checkpoint.
    torch.manual_seed(args.seed)
    backbone = common.build_backbone(args.arch, args.zero_residual)
    model = Model(
        backbone, photos.num_outputs, args.hidden, args.layers, args.dropout,
        task=args.task, lambda_words=args.lambda_words, init_std=args.init_std
    )
    if init:
        backbone.load_state_dict(init)
    model.to(device, memory_format=torch.channels_last)
    ddp = common.data_parallel(model).train()  # all processes get the first one's weights
    groups = parameter_groups(model, args.text_lr)
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if args.lookahead_alpha < 1:
        slow_model = copy.deepcopy(model)  # after DDP has made all processes' weights equal
        state["lookahead"] = slow_model
    weights = [*model.parameters()]  # listed once, because it takes 0.3 ms
    done = common.restore(args, checkpoint, iters, state)

    batches = common.train_batches(photos, photos.collate, args, device, done)
    log = common.Log(args, done)
    more = {"tokenizer": tokenizer.serialized_model_proto()}  # for downstream/captioning.py
    bar = common.iterations(done, iters)
    for iteration in bar:
        # Learning rates: warm-up, then cosine decay [Sec. 3]
        decay = common.lr_factor(iteration - 1, iters, args.warmup)
        common.set_lr(optimizer, decay)

        # Gradients: --accumulate micro-batches, averaged over all processes after the last one
        optimizer.zero_grad()
        for part in range(args.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - started
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(batch["image"], batch["jitter"])  # (B, 3, h, w)
            with common.autocast(device, args.amp):
                sums = ddp(images, batch)  # {name: (sum of losses, number)}
            losses = {name: total / number for name, (total, number) in sums.items()}
            loss = sum(losses.values())  # Eq. 1: both directions; and the words' [ours]
            scaler.scale(loss / args.accumulate).backward()
            log.add(loss=loss, **losses)

        # Step: clipped [official code], and every fifth one followed by look-ahead [Sec. 3]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 10.0)
        scaler.step(optimizer)
        scaler.update()
        if args.lookahead_alpha < 1 and iteration % LOOKAHEAD_K == 0:
            look_ahead(slow_model, model, args.lookahead_alpha)

        # Log, validate, save
        validating = iteration == iters or iteration % validate_every == 0
        if validating or iteration % args.log_every == 0:
            row = log.means() | {"lr": args.lr * decay, "text_lr": args.text_lr * decay}
            bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
            if validating and common.is_main():
                print_main(f"validation after {iteration:,} of {iters:,} iterations:")
                result = validate(model, val_photos, args, device)
                row |= {f"validation_{name}": x for name, x in result["validation"].items()}
                # Before the checkpoint, so that no finished run lacks its result
                common.save(f"{args.output}/result.json", result)
            log.write(iteration, row)
        common.save_if_due(args, iteration, state, more, validating)

    examples = filter(os.path.isfile, map(str, val.images[:2]))  # scenes and shards have no files
    use = f"captioning {shlex.join(examples) or 'PHOTO'}"
    common.end_run(args, backbone, use if args.task.endswith("captioning") else None)


# ---------------------------------------------------------------------------- captions to tokens

ACCENTS = "(?<=[a-zß-ɏ])[\u0300-\u036f]+"  # of decomposed, lower-case Latin letters
PAD = UNK = 0  # padding and unknown tokens share an id, as in the official model
SOS, EOS, MASK = 1, 2, 3


def normalise(caption):
    """Lower-case, without accents [Sec. 3]; [ours]: of Latin letters only, from NFKD to NFC"""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return unicodedata.normalize("NFC", re.sub(ACCENTS, "", decomposed))


def load_tokenizer(args, data):
    """-> the tokenizer in --output; says how many captions are cut"""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=f"{args.output}/tokenizer.model")
    some = data.captions[:: 1 + len(data) // 10_000]  # all would take a minute
    rows = [tokenizer.encode(normalise(captions[0])) for captions in some]
    cut = sum(len(row) > MAX_LENGTH - 2 for row in rows) / len(rows)
    if cut > 0.01:
        print_main(f"{cut:.0%} of the captions are cut at {MAX_LENGTH - 2} tokens")
    return tokenizer


def train_tokenizer(captions, vocab_size=None):
    """SentencePiece BPE [Sec. 3] -> the serialised model

    vocab_size None: the characters, and one token for eight captions, at least 1000 [ours]. Of
    10,000 tokens, 74% would occur fewer than five times in Flickr8k's 30,000 captions.
    By SentencePiece's defaults, no token mixes letters and punctuation [Sec. 3], and UNK is 0.
    """
    if vocab_size is None:
        characters = {*normalise("".join(captions))}
        vocab_size = min(10_000, len(characters) + max(1000, len(captions) // 8))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=map(normalise, progress(captions, desc="tokenizer")),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentence_length=1 << 20,  # bytes; longer captions would be skipped
        bos_id=-1,  # none
        eos_id=-1,
        control_symbols="[SOS],[EOS],[MASK]",  # 1, 2, 3
        minloglevel=3,
    )
    return model.getvalue()


# --------------------------------------------------------------------------- samples and batches


class CaptionedPhotos(common.Photos):
    """Photos, each with one of its captions: a random one, in validation always the same"""

    def __init__(self, data, tokenizer, args):
        super().__init__(data, args)
        self.tokenizer = tokenizer
        self.num_outputs = tokenizer.get_piece_size()

    def sample(self, index, rng):
        """-> image uint8 (size, size, 3), jitter (4,), text: the tokens of a caption"""
        sample, flipped = self.photo(index, rng)
        captions = self.data.captions[index]
        caption = rng.choice(captions) if rng else captions[index % len(captions)]
        if flipped:
            caption = common.swap_left_right(caption)  # flipped with the photo [Sec. 3]
        tokens = [SOS, *self.tokenizer.encode(normalise(caption)), EOS]
        return sample | {"text": tokens[:MAX_LENGTH]}

    def collate(self, samples):
        """-> image uint8 (B, size, size, 3), jitter (B, 4), and what collate_text returns"""
        texts = [sample.pop("text") for sample in samples]
        return default_collate(samples) | self.collate_text(texts)

    def collate_text(self, rows):
        """-> tokens (B, T), those of the reversed captions, and places (N,): where in
        tokens[:, 1:].flatten() the N tokens to predict are. (A GPU would make the CPU wait here.)
        """
        targets = pad([[1] * len(row) for row in rows])[:, 1:]  # (B, T - 1), 0 at padding
        return {
            "tokens": pad(rows),
            "backward_tokens": pad([row[::-1] for row in rows]),
            "places": targets.flatten().nonzero()[:, 0],
        }


def pad(sequences):
    """Lists of ids -> (B, T) int64, zero-padded on the right"""
    return nn.utils.rnn.pad_sequence([*map(torch.tensor, sequences)], batch_first=True)


# ----------------------------------------------------------------------------------------- model


class VirTex(nn.Module):
    """Backbone and textual heads; calling it returns the losses [Sec. 3].

    The names are those of the official code. In Eq. 1, theta is visual, phi_f is textual, and phi_b
    is backward_textual.
    """

    def __init__(
        self, backbone, vocab_size, hidden, layers=1, dropout=0.1, max_length=MAX_LENGTH,
        init_std=0.02, task="bicaptioning", lambda_words=0.0
    ):
        super().__init__()
        self.lambda_words = lambda_words
        self.visual = nn.ModuleDict({"cnn": backbone})
        self.textual = TextualHead(
            backbone.channels, vocab_size, hidden, layers, dropout, max_length, init_std
        )
        self.backward_textual = None
        if task == "bicaptioning":
            # The two Transformers start with the same weights [official code]. The directions
            # share embedding, output [Sec. 3] and projection [official code].
            backward = copy.deepcopy(self.textual)
            backward.embedding = self.textual.embedding
            backward.output = self.textual.output
            backward.visual_projection = self.textual.visual_projection
            self.backward_textual = backward

    def forward(self, images, batch):
        """images (B, 3, h, w), batch: of collate_text -> {name: (sum of losses, number)}"""
        features = self.visual["cnn"](images)  # (B, channels, h / 32, w / 32)
        return self.text_losses(self.textual.project(features), batch)

    def text_losses(self, image_features, batch):
        """Minus Eq. 1: -log p of each token, given the image and the tokens that are read before
        it. The mean is over the tokens of each direction [official code].

        image_features: (B, S, H), where S = h / 32 * w / 32 is N_I
        """
        directions = {"forward": (self.textual, batch["tokens"])}
        if self.backward_textual:
            directions["backward"] = self.backward_textual, batch["backward_tokens"]
        places = batch["places"]  # (N,)
        losses = {}
        for name, (head, tokens) in directions.items():
            vectors = head(tokens[:, :-1], image_features)  # (B, T - 1, H)
            logits = head.output(pick(vectors, places))  # (N, vocabulary)
            losses[name] = token_loss(logits, pick(tokens[:, 1:], places))
        if self.lambda_words:  # Eq. 1 without the tokens before: from the image alone [ours]
            logits = self.textual.output(image_features.mean(1))  # (B, vocabulary)
            targets = batch["tokens"][:, 1:]  # (B, T - 1)
            photo = places // targets.size(1)  # (N,): of each target
            logits = logits.index_select(0, photo)  # (N, vocabulary)
            total, number = token_loss(logits, pick(targets, places))
            losses["words"] = (self.lambda_words * total, number)
        return losses


def pick(x, places):
    """x (B, T, ...), places (N,), each b * T + t -> x[b, t] of each, (N, ...), but fast on GPUs"""
    return x.flatten(0, 1).index_select(0, places)


def token_loss(logits, targets):
    """logits (N, vocabulary), targets (N,) -> sum of the cross-entropies of known tokens, their
    number (1 if there are none). Unknown tokens are not predicted [official code].
    """
    total = F.cross_entropy(logits, targets, ignore_index=UNK, reduction="sum")
    return total, (targets != UNK).sum().clamp(min=1)


class TextualHead(nn.Module):
    """One direction: a Transformer that reads tokens and an image [Sec. 3]. The names of its parts
    are those of the official code.
    """

    def __init__(
        self, channels, vocab_size, hidden, layers=1, dropout=0.1,
        max_length=MAX_LENGTH, init_std=0.02
    ):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = Embedding(vocab_size, hidden, dropout, max_length)
        layer = nn.TransformerDecoderLayer(  # post-norm; A = H / 64, F = 4H [Sec. 3]
            hidden, hidden // 64, 4 * hidden, dropout, activation="gelu", batch_first=True
        )
        self.transformer = nn.TransformerDecoder(layer, layers)
        self.output = nn.Linear(hidden, vocab_size)
        mask = nn.Transformer.generate_square_subsequent_mask(max_length)
        self.register_buffer("future", mask, persistent=False)
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
        """tokens (B, T), image_features (B, S, H) -> vectors (B, T, H). Each token sees the image,
        itself and the tokens before it.
        """
        future = self.future[: tokens.size(1), : tokens.size(1)]
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
        inside = ".embedding." in name or ".transformer." in name
        if inside and ("norm" in name or name.endswith("bias")):
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
    """Every k steps the slow weights move a fraction alpha of the way to the model's weights, which
    go on from there [Zhang et al. 2019; Sec. 3: k = 5, alpha = 0.5].
    """
    for slow, fast in zip(slow_model.parameters(), model.parameters()):
        slow.lerp_(fast, alpha)  # slow += alpha * (fast - slow)
        fast.copy_(slow)


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, photos, args, device):
    """-> {"validation": {name: mean loss}}, over the known tokens, or over the photos"""
    model.eval()
    totals, numbers = Counter(), Counter()
    for batch in common.load_batches(photos, photos.collate, args, device):
        with common.autocast(device, args.amp):
            losses = model(common.augment(batch["image"]), batch)
        for name, (total, number) in losses.items():
            totals[name] += total.item()
            numbers[name] += int(number)
    model.train()
    means = {name: totals[name] / numbers[name] for name in totals}
    knowing_nothing = {name: math.log(photos.num_outputs) for name in means}
    if "words" in means:
        knowing_nothing["words"] *= args.lambda_words
    common.print_table("loss in nats", {"this model": means, "knowing nothing": knowing_nothing})
    return {"validation": means}


# --------------------------------- ablations: fewer photos [Fig. 4], other tasks [Sec. 4.1, 4.2]


def subset(data, fraction, captions_per_image, seed):
    """A random fraction of the photos, each with at most so many captions [Fig. 4] -> CaptionData.
    A photo keeps the same captions, whatever the fraction is.
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


class MaskedPhotos(CaptionedPhotos):
    """Photos with a caption in which some tokens are masked"""

    def sample(self, index, rng):
        sample = super().sample(index, rng)
        rng = rng or np.random.default_rng([self.args.seed, 0, index])  # in validation
        masked = mask_tokens(sample["text"], self.num_outputs, rng)
        return sample | {"text": (sample["text"], masked)}

    def collate_text(self, texts):
        """-> tokens (B, T), the same with [MASK]s, padding (B, T), places (N,) of the [MASK]s"""
        tokens, masked = map(pad, zip(*texts))
        return {
            "tokens": tokens,
            "masked": masked,
            "padding": pad([[1] * len(row) for row, _ in texts]) == 0,
            "places": (masked == MASK).flatten().nonzero()[:, 0],
        }


def mask_tokens(tokens, vocab_size, rng):
    """15% of the tokens are chosen: 85% of them become [MASK], 10% a random token, and 5% stay. A
    single one always becomes [MASK]. [official code]
    """
    masked = list(tokens)
    words = range(1, len(tokens) - (tokens[-1] == EOS))  # a cut caption has no EOS [ours]
    num_masked = math.ceil(0.15 * len(words))
    for t in rng.permutation(words)[:num_masked]:
        draw = rng.random() if num_masked > 1 else 0.0
        if draw < 0.85:
            masked[t] = MASK
        elif draw < 0.95:
            masked[t] = rng.integers(MASK + 1, vocab_size)  # no special token [ours]
    return masked


class MaskedLM(VirTex):
    """Masked language modelling: predicts [MASK]ed tokens from the image and all other tokens"""

    def text_losses(self, image_features, batch):
        head = self.textual
        x = head.embedding(batch["masked"])
        vectors = head.transformer(x, image_features, tgt_key_padding_mask=batch["padding"])
        logits = head.output(pick(vectors, batch["places"]))
        return {"masked_lm": token_loss(logits, pick(batch["tokens"], batch["places"]))}


FIRST_TAG = 4  # tags follow the ids of special tokens: 84 outputs for COCO's 80 tags [ours]


class TaggedPhotos(CaptionedPhotos):
    """Photos that have tags [official code], with these in place of a caption"""

    def __init__(self, data, tokenizer, args):
        keep = [n for n, tags in enumerate(data.tags) if tags]
        if not keep:
            fail("--task multilabel_classification needs tags (for coco: instances_*.json)")
        print_main(f"{len(keep)} of {len(data)} photos have tags; the others are left out")
        super().__init__(data.select(keep), tokenizer, args)
        self.num_outputs = FIRST_TAG + len(data.tag_names)
        self.mirrored = common.mirrored(data.tag_names)  # flipped with the photo [ours]

    def sample(self, index, rng):
        sample, flipped = self.photo(index, rng)
        tags = [self.data.tag_names.index(tag) for tag in self.data.tags[index]]
        tags = self.mirrored[tags] if flipped else tags
        return sample | {"text": [FIRST_TAG + tag for tag in tags]}


class Classifier(nn.Module):
    """Softmax cross-entropy, where each of a photo's K words or tags has the target 1/K

    sizes, options: of VirTex's heads, which it lacks
    """

    def __init__(self, backbone, num_outputs, *sizes, task, **options):
        super().__init__()
        self.task = task
        self.visual = nn.ModuleDict({"cnn": backbone})
        self.textual = nn.ModuleDict({"output": nn.Linear(backbone.channels, num_outputs)})

    def forward(self, images, batch):
        """images (B, 3, h, w), batch["tokens"] (B, K) -> {task: (sum of losses, photos)}"""
        logits = self.textual["output"](self.visual["cnn"](images).mean((2, 3))).float()
        targets = torch.zeros_like(logits).scatter_(1, batch["tokens"], 1.0)
        targets[:, :FIRST_TAG] = 0  # of special tokens and padding
        targets = F.normalize(targets, p=1)  # their sum is 1
        return {self.task: (F.cross_entropy(logits, targets, reduction="sum"), len(images))}


MODELS = {  # of --task: model and data set
    "bicaptioning": (VirTex, CaptionedPhotos),
    "captioning": (VirTex, CaptionedPhotos),
    "masked_lm": (MaskedLM, MaskedPhotos),
    "token_classification": (Classifier, CaptionedPhotos),
    "multilabel_classification": (Classifier, TaggedPhotos),
}

if __name__ == "__main__":
    main(get_args())
