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

    Eq. 1, log-likelihood of both directions   VirTex.caption_losses, token_loss
    Fig. 3, visual backbone, textual head      VirTex, TextualHead
    shared embeddings, tied output [Sec. 3]    VirTex.__init__, TextualHead.__init__
    crops, colours [Sec. 3]                    common.Photos.photo, common.augment
    flip with left and right swapped [Sec. 3]  CaptionedPhotos.sample
    tokenizer [Sec. 3]                         clean, train_tokenizer
    SGD with look-ahead, two rates [Sec. 3]    parameter_groups, LookAhead
    warm-up and cosine [Sec. 3]                common.lr_factor
    early stopping [Sec. 3]                    --keep-every, then eval_linear.py --hold-out
    other tasks [Sec. 4.1, 4.2]                VirTex.masked_loss, token_set_loss

What to expect: with the paper's head (H = 2048, 10K words) the loss starts near 12.5 in each
direction, not at ln 10000 = 9.2: the output layer is the token embedding, so at first each
position predicts the token it has just read. Then comes a plateau, near 3.2 per direction on
Flickr8k (H = 512): the heads write plausible captions without looking at the photo. The loss falls
again when the image features start to lower it. If training stalls there, train longer or raise
--text-lr. A finished run is in docs/logs/virtex.
"""

import argparse
import copy
import io
import math
import os
import re
import time
import unicodedata
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import fail, print_main, progress

CLASSIFICATION = "token_classification", "multilabel_classification"
TASKS = "bicaptioning", "captioning", "masked_lm", *CLASSIFICATION

# fmt: off
RECIPES = {  #           demo        small       paper      (demo, small [ours])
    "arch":             ("resnet18", "resnet18", "resnet50"),  # Sec. 3
    "image_size":       (48,         112,        224),         # Sec. 3
    "crop_min":         (1.0,        0.2,        0.2),         # Sec. 3
    "colour_jitter":    (0.0,        1.0,        1.0),         # official code
    "hidden":           (256,        512,        2048),        # Sec. 4.1
    "init_std":         (None,       None,       0.02),        # official code; None: H^-0.5
    "zero_residual":    (False,      False,      True),        # official code; others [ours]
    "dropout":          (0.0,        0.1,        0.1),         # official code
    "vocab_size":       (10_000,     10_000,     10_000),      # Sec. 3; fewer for few captions
    "batch_size":       (32,         32,         256),         # Sec. 3
    "iters":            (540,        None,       500_000),     # Sec. 3
    "epochs":           (None,       25.0,       None),
    "optimizer":        ("adamw",    "sgd",      "sgd"),       # Sec. 3
    "lr":               (2e-3,       0.1,        0.2),         # Sec. 3
    "text_lr":          (5e-4,       0.1,        1e-3),        # Sec. 3
    "text_iters":       (0,          600,        0),           # small [ours]
    "warmup":           (0.05,       0.02,       0.02),        # Sec. 3: 10K of 500K iterations
    "weight_decay":     (1e-2,       1e-4,       1e-4),        # Sec. 3
    "lookahead_k":      (5,          5,          5),           # Sec. 3
    "lookahead_alpha":  (1.0,        0.5,        0.5),         # Sec. 3; 1: no look-ahead
    "max_norm":         (10.0,       10.0,       10.0),        # of the gradient: official code
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        2000,       10_000),
    "checkpoint_every": (200,        500,        10_000),
}
# fmt: on
MAX_LENGTH = 30  # tokens per caption, [SOS] and [EOS] included [official code]


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
    add("--fraction", type=float, default=1.0, help="of photos; scale --iters yourself [Fig. 4]")
    add("--captions-per-image", type=int, help="use at most this many captions [Fig. 4]")
    add("--image-size", type=int, help="crop side in pixels; cost grows with its square")
    add("--crop-min", type=float, help="smallest fraction of a photo's area in a crop")
    add("--colour-jitter", type=float, help="strength; lower it if captions name colours")
    add("--workers", type=int, default=min(8, os.cpu_count() // 2), help="more if data_wait > 0.05")

    add = parser.add_argument_group("model").add_argument
    add("--arch", choices=common.BACKBONES, help="the backbone; resnet18 for small data or a CPU")
    add("--init", help="start from a backbone, a checkpoint.pth with its heads, or imagenet")
    add("--task", choices=TASKS, default=TASKS[0], help="others: ablations [Tab. 1, Fig. 5]")
    add("--layers", type=int, default=1, help="L; 2 or 3 generally help [Sec. 4.2]")
    add("--hidden", type=int, help="H; larger is better but slower; sets A = H/64, F = 4H")
    add("--dropout", type=float, help="in the heads; raise it if captions are few")
    add("--tokenizer", help="a SentencePiece .model, instead of one trained on the captions")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch-size", type=int, help="photos per iteration over all processes")
    add("--iters", type=int, help="training iterations; scale them with the data")
    add("--epochs", type=float, help="instead of --iters: passes over the data")
    add("--lr", type=float, help="peak rate of the backbone; lower if the loss is not finite")
    add("--text-lr", type=float, help="peak rate of heads; 0.05 to 0.1 with SGD on little data")
    add("--text-iters", type=common.whole, help="in which the heads first read captions alone")
    add("--warmup", type=float, help="of the learning rate, as a fraction of training")
    add("--weight-decay", type=float, help="raise it if photos are few")

    add = parser.add_argument_group("run").add_argument
    add("--output", help="where the same command resumes (default runs/SCRIPT, runs/SCRIPT-DATA)")
    add("--seed", type=int, default=0, help="random seed")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    add("--accumulate", type=int, default=1, help="micro-batches per batch, if memory is short")
    add("--compile", action="store_true", help="torch.compile: slower to start, faster on GPUs")
    add("--log-every", type=int, help="iterations between lines of metrics.jsonl")
    add("--validate-every", type=int, help="iterations between validations")
    add("--checkpoint-every", type=int, help="iterations between saves of checkpoint.pth")
    add("--keep-every", type=int, help="iterations between model_N.pth (early stopping)")
    # fmt: on
    args = parser.parse_args(argv)
    common.apply_recipe(args, "virtex", RECIPES)
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden} must be a multiple of 64 (A = H / 64 heads)")
    args.init_std = args.init_std or args.hidden**-0.5  # less, and heads are deaf to the photo
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
    if tags:
        train, val = with_tags(train), with_tags(val)
    common.check_data(args, checkpoint, train.images, train.captions, train.tags)
    tokenizer = load_tokenizer(args, train, init)
    num_outputs = tokenizer.get_piece_size()
    if args.task == "multilabel_classification":
        num_outputs = FIRST_TAG + len(train.tag_names)
    iters = args.iters or math.ceil(args.epochs * len(train) / args.batch_size)
    print_main(f"{len(train)} photos ({len(val)} for validation), {num_outputs} outputs, {iters} "
               f"iterations at lr {args.lr:g}, text lr {args.text_lr:g}, on {device}, amp "
               f"{args.amp}, into {args.output}")  # fmt: skip

    # Model and optimizer, restored where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = VirTex(
        args.arch,
        num_outputs,
        args.hidden,
        layers=args.layers,
        dropout=args.dropout,
        task=args.task,
        init_std=args.init_std,
        zero_residual=args.zero_residual and args.arch != "vgg16_bn",  # which has none
    )
    backbone = model.visual["cnn"]
    common.load_init(init, model, backbone)
    model.to(device, memory_format=torch.channels_last)
    if args.text_iters and not (checkpoint or init.get("model") or args.task in CLASSIFICATION):
        make = partial(language_first, model, train.all_captions(), tokenizer, args, device)
        heads = torch.load(common.once(args, "heads.pth", make), device, weights_only=True)
        model.load_state_dict(heads, strict=False)
    groups = parameter_groups(model, args.lr, args.text_lr, args.weight_decay)
    optimizer = common.build_optimizer(args, groups)
    lookahead = LookAhead(optimizer, args.lookahead_k, args.lookahead_alpha)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "lookahead": lookahead, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, parts)
    if args.compile:
        compile_parts(model)
    ddp = common.data_parallel(model).train()

    photos = CaptionedPhotos(train, tokenizer, args)
    val_photos = CaptionedPhotos(val, tokenizer, args)
    batches = common.train_batches(photos, partial(collate, args.task), args, device, done)
    log = common.Log(args, checkpoint)
    words = {"tokenizer": tokenizer.serialized_model_proto()}  # part of each checkpoint
    bar = progress(range(done + 1, iters + 1), initial=done, total=iters, unit=" its")
    for iteration in bar:
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup)  # [Sec. 3]
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part in range(args.accumulate):
            asked = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - asked
            # DDP averages the gradients of all processes, once: after the last micro-batch.
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(batch.pop("images"), batch.pop("jitter"))  # (B, 3, h, w)
            with common.autocast(device, args.amp):
                losses = ddp(images, **batch)
            loss = sum(losses.values())  # both directions [Eq. 1]
            scaler.scale(loss / args.accumulate).backward()
            log.add(loss=loss, **losses)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        scaler.step(optimizer)
        scaler.update()
        lookahead.step()

        last = iteration == iters
        validate_now = iteration % args.validate_every == 0 or last
        if iteration % args.log_every == 0 or validate_now:
            row = log.means(iteration)
            row |= {"lr": args.lr * lr_scale, "text_lr": args.text_lr * lr_scale}
            bar.set_postfix(loss=f"{row['loss']:.3f}")
            if validate_now and common.is_main():
                scores = validate(model, val_photos, args, device)
                row |= {f"validation_{name}": score for name, score in scores.items()}
                if last:
                    common.save(f"{args.output}/result.json", {"validation_loss": scores})
            log.write(iteration, row)
        if iteration % args.checkpoint_every == 0 or last:
            common.save_checkpoint(args, "checkpoint.pth", iteration, parts, **words)
        if args.keep_every and iteration % args.keep_every == 0:
            kept = {"model": model}
            common.save_checkpoint(args, f"model_{iteration}.pth", iteration, kept, **words)

    common.end_run(args, backbone, train)  # eval_linear.py says what the backbone is worth


# ---------------------------------------------------------------------------- captions to tokens

PAD = UNK = 0  # padding and unknown tokens share an id, as in the official model
SOS, EOS, MASK = 1, 2, 3
FIRST_TAG = 4  # in multi-label classification, ids of tags replace those of words
MAX_CAPTIONS = 2_000_000  # at most, evenly spaced, to train the tokenizer [ours]


def subset(data, fraction, captions_per_image, seed):
    """A random fraction of the photos, each with at most so many captions [Fig. 4] -> CaptionData

    A photo keeps the same captions, whatever the fraction.
    """
    if fraction == 1 and not captions_per_image:
        return data
    order = np.random.default_rng(seed).permutation(len(data))
    chosen = np.sort(order[: max(1, round(fraction * len(data)))])
    data = data.select(chosen)
    if not captions_per_image:
        return data
    rows = list(data.captions)
    for i, captions in zip(chosen, rows):
        np.random.default_rng([seed, 0, i]).shuffle(captions)
    return data.with_captions([captions[:captions_per_image] for captions in rows])


def with_tags(data):
    """-> CaptionData of the images that have tags [official code]"""
    keep = [i for i in range(len(data)) if data.tags[i]]
    if not keep:
        fail("--task multilabel_classification needs tags (for coco: instances_*.json)")
    return data.select(keep)


def clean(caption):
    """Lower-case, and Latin letters without accents [Sec. 3]; NFKD first: it can make capitals"""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return unicodedata.normalize("NFC", re.sub(common.ACCENTS, "", decomposed))  # Latin [ours]


def load_tokenizer(args, train, init):
    """The tokenizer of --init's checkpoint, else --tokenizer, else one trained on the captions"""

    def make(path):
        if "tokenizer" in init:
            content = init["tokenizer"]
        elif args.tokenizer:
            content = read_tokenizer(args.tokenizer).serialized_model_proto()
        else:
            captions = train.all_captions()
            every = math.ceil(len(captions) / MAX_CAPTIONS)
            chosen = progress(captions[::every], desc="tokenizer", unit=" captions")
            content = train_tokenizer(map(clean, chosen), args.vocab_size)
        path.write_bytes(content)

    return read_tokenizer(common.once(args, "tokenizer.model", make))


def train_tokenizer(captions, vocab_size):
    """SentencePiece BPE [Sec. 3] -> the serialised model, of at most `vocab_size` tokens"""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(captions),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        split_by_unicode_script=True,  # no piece joins letters and punctuation [Sec. 3]
        character_coverage=1.0,
        max_sentence_length=1 << 20,  # bytes; what is longer would be ignored
        unk_id=UNK,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        control_symbols="[SOS],[EOS],[MASK]",
        minloglevel=3,
    )
    return model.getvalue()


def read_tokenizer(path):
    if not os.path.isfile(path):
        fail(f"there is no {path}: --tokenizer is a SentencePiece .model file")
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    if ids != [SOS, EOS, MASK]:
        fail(f"{path} must have [SOS], [EOS], [MASK] as ids 1, 2, 3")
    return tokenizer


def language_first(model, captions, tokenizer, args, device, path):
    """Train the heads on captions alone, the image features being zero, and save them in `path`

    Few photos are not to be spent on learning English: from here on, what lowers the loss is what
    the photo shows. [ours; the other scripts' language models read the captions first, too]
    """
    heads = {name: p for name, p in model.named_parameters() if not name.startswith("visual.")}
    optimizer = torch.optim.AdamW(heads.values(), 1e-3, weight_decay=1e-2)
    rng = np.random.default_rng(args.seed)
    no_photo = torch.zeros(64, 1, args.hidden, device=device)  # (B, S, H)
    for iteration in progress(range(args.text_iters), desc="captions alone", unit=" its"):
        common.set_lr(optimizer, common.lr_factor(iteration, args.text_iters, warmup=0.1))
        chosen = [captions[n] for n in rng.integers(len(captions), size=len(no_photo))]
        samples = [text_sample(caption, tokenizer, args.task, rng) for caption in chosen]
        batch = {name: x.to(device) for name, x in collate_text(args.task, samples).items()}
        with common.autocast(device, args.amp):
            losses = model.text_losses(no_photo, **batch)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(heads.values(), 1.0)
        optimizer.step()
    common.save(path, {name: parameter.detach().cpu() for name, parameter in heads.items()})


# --------------------------------------------------------------------------- samples and batches


class CaptionedPhotos(common.Photos):
    """Photos with one of their captions; in validation the centre crop and the first caption"""

    def __init__(self, data, tokenizer, args):
        super().__init__(data, args)
        self.tokenizer = tokenizer
        self.task = args.task
        self.seed = args.seed

    def sample(self, index, rng):
        sample = self.photo(index, rng)
        captions = self.data.captions[index]
        caption = captions[0] if rng is None else captions[rng.integers(len(captions))]
        if sample["flipped"]:
            caption = common.swap_left_right(caption)  # flipped with the photo [Sec. 3]
        rng = rng or np.random.default_rng([self.seed, 0, index])
        sample |= text_sample(caption, self.tokenizer, self.task, rng)
        if self.task == "multilabel_classification":
            sample["tokens"] = [FIRST_TAG + tag for tag in self.data.tags[index]]
        return sample


def text_sample(caption, tokenizer, task, rng):
    """-> {"tokens": [SOS] caption [EOS]}, for masked_lm also "masked": the same with [MASK]s"""
    tokens = [SOS, *tokenizer.encode(clean(caption)), EOS][:MAX_LENGTH]
    if task != "masked_lm":
        return {"tokens": tokens}
    return {"tokens": tokens, "masked": mask_tokens(tokens, tokenizer.get_piece_size(), rng)}


def mask_tokens(tokens, vocab_size, rng):
    """15% of tokens: 85% [MASK], 10% a random one, 5% kept; a single one: [MASK] [official code]"""
    masked = list(tokens)
    words = range(1, len(tokens) - (tokens[-1] == EOS))  # a truncated caption has no [EOS]
    num_masked = math.ceil(0.15 * len(words))
    for t in rng.permutation(words)[:num_masked]:
        draw = rng.random() if num_masked > 1 else 0.0
        if draw < 0.85:
            masked[t] = MASK
        elif draw < 0.95:
            masked[t] = int(rng.integers(MASK + 1, vocab_size))  # not a special one [ours]
    return masked


def pad(sequences):
    """Lists of ids -> (B, T) int64, zero-padded on the right"""
    return nn.utils.rnn.pad_sequence(list(map(torch.tensor, sequences)), batch_first=True)


def collate(task, samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), and what collate_text returns"""
    images, jitter = common.stack(samples, "image"), common.stack(samples, "jitter")
    return {"images": images, "jitter": jitter, **collate_text(task, samples)}


def collate_text(task, samples):
    """-> tokens (B, T), and what the task needs

    Target positions are flat indices of the tokens to predict, into tokens[:, 1:], for masked_lm
    into tokens: not padding, nor unknown tokens, which share its id [official code]. Finding them
    on the GPU would synchronise it.
    """
    tokens = pad([sample["tokens"] for sample in samples])
    batch = {"tokens": tokens}
    if task in ("bicaptioning", "captioning"):
        batch["target_positions"] = flat_indices(tokens[:, 1:] != PAD)
    if task == "bicaptioning":
        backward = pad([sample["tokens"][::-1] for sample in samples])
        batch["backward_tokens"] = backward
        batch["backward_target_positions"] = flat_indices(backward[:, 1:] != PAD)
    if task == "masked_lm":
        batch["masked"] = masked = pad([sample["masked"] for sample in samples])
        batch["target_positions"] = flat_indices((masked == MASK) & (tokens > MASK))
        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        batch["padding"] = torch.arange(tokens.size(1)) >= lengths[:, None]
    return batch


def flat_indices(mask):
    """(B, T) bool -> flat indices of the True entries"""
    return mask.flatten().nonzero().squeeze(1)


# ----------------------------------------------------------------------------------------- model


class VirTex(nn.Module):
    """Backbone and textual heads; calling it returns the losses of the task [Sec. 3, 4.2].

    Names of the official code; in Eq. 1 theta is visual, phi_f textual, phi_b backward_textual.
    zero_residual: the residual blocks start as identities, their last batch norm at 0.
    """

    def __init__(
        self,
        arch,
        vocab_size,
        hidden,
        layers=1,
        dropout=0.1,
        max_length=MAX_LENGTH,
        task=TASKS[0],
        init_std=0.02,
        zero_residual=False,
    ):
        super().__init__()
        self.task = task
        kwargs = {"zero_init_residual": True} if zero_residual else {}
        self.visual = nn.ModuleDict({"cnn": common.build_backbone(arch, **kwargs)})
        channels = self.visual["cnn"].channels
        if task in CLASSIFICATION:
            self.textual = nn.ModuleDict({"output": nn.Linear(channels, vocab_size)})
            return
        self.textual = TextualHead(
            channels, vocab_size, hidden, layers, dropout, max_length, init_std
        )
        if task == "bicaptioning":
            # The Transformers start alike and are trained apart [official code]; the directions
            # share embedding, output [Sec. 3] and projection [official code].
            self.backward_textual = copy.deepcopy(self.textual)
            self.backward_textual.visual_projection = self.textual.visual_projection
            self.backward_textual.embedding = self.textual.embedding
            self.backward_textual.output = self.textual.output

    def forward(self, images, tokens, **batch):
        """images (B, 3, h, w), the rest from `collate` -> {name: loss}"""
        features = self.visual["cnn"](images)  # (B, channels, h / 32, w / 32)
        if self.task in CLASSIFICATION:
            logits = self.textual["output"](features.mean((2, 3)))
            return {self.task: token_set_loss(logits, tokens)}
        image_features = self.textual.project(features)  # (B, S, H), S = h / 32 * w / 32: N_I
        return self.text_losses(image_features, tokens, **batch)

    def text_losses(self, image_features, tokens, **batch):
        if self.task == "masked_lm":
            return {"masked_lm": self.masked_loss(image_features, tokens, **batch)}
        return self.caption_losses(image_features, tokens, **batch)

    def caption_losses(
        self,
        image_features,
        tokens,
        target_positions,
        backward_tokens=None,
        backward_target_positions=None,
    ):
        """Minus Eq. 1, averaged over the tokens of each direction [official code]: each token is
        predicted from the image and from the tokens before it in the direction of reading.
        """
        directions = {"forward": (self.textual, tokens, target_positions)}
        if self.task == "bicaptioning":
            head = self.backward_textual
            directions["backward"] = (head, backward_tokens, backward_target_positions)
        losses = {}
        for name, (head, sequence, positions) in directions.items():
            vectors = head(sequence[:, :-1], image_features)  # (B, T - 1, H)
            losses[name] = token_loss(head.output, vectors, sequence[:, 1:], positions)  # Eq. 1
        return losses

    def masked_loss(self, image_features, tokens, masked, target_positions, padding):
        """Masked language modelling: [MASK]ed tokens from the image and all other tokens"""
        vectors = self.textual(masked, image_features, causal=False, padding=padding)
        return token_loss(self.textual.output, vectors, tokens, target_positions)


def token_loss(output, vectors, targets, positions):
    """Mean cross-entropy of the targets (B, T) at the flat `positions`, given vectors (B, T, H)

    Only these positions pass through the output layer: padding costs nothing.
    """
    logits = output(vectors.flatten(0, 1)[positions])  # (positions, vocabulary)
    total = F.cross_entropy(logits, targets.flatten()[positions], reduction="sum")
    return total / max(1, len(positions))


def token_set_loss(logits, tokens):
    """Softmax cross-entropy with targets of 1/K for each of K tokens or tags [Sec. 4.1, 4.2]"""
    targets = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, tokens, 1.0)
    targets[:, : MASK + 1] = 0  # neither special tokens nor padding
    return F.cross_entropy(logits.float(), targets / targets.sum(1, keepdim=True).clamp(min=1))


class TextualHead(nn.Module):
    """One direction: a Transformer that reads tokens and an image [Sec. 3]. Official names."""

    def __init__(self, channels, vocab_size, hidden, layers, dropout, max_length, init_std):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = Embedding(vocab_size, hidden, dropout, max_length)
        layer = nn.TransformerDecoderLayer(  # post-norm [Sec. 3]
            d_model=hidden,
            nhead=hidden // 64,  # A
            dim_feedforward=4 * hidden,  # F
            dropout=dropout,
            activation="gelu",
            batch_first=True,
        )
        self.transformer = nn.TransformerDecoder(layer, layers)
        self.output = nn.Linear(hidden, vocab_size)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)  # [ours]
            if isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=init_std)
        nn.init.zeros_(self.embedding.words.weight[PAD])
        self.output.weight = self.embedding.words.weight  # weight tying [Sec. 3]

    def project(self, features):
        """(B, channels, h, w) -> the image's vectors (B, h * w, H)"""
        return self.visual_projection(features.flatten(2).mT)

    def forward(self, tokens, image_features, causal=True, padding=None):
        """tokens (B, T), image_features (B, S, H) -> vectors (B, T, H)

        causal: each token sees itself and those before it.  padding: (B, T), True where not seen
        """
        x = self.embedding(tokens)
        future = None
        if causal:
            future = x.new_ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        return self.transformer(
            x,
            image_features,
            tgt_mask=future,
            tgt_is_causal=causal,
            tgt_key_padding_mask=padding,
        )


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
        return x * (tokens != PAD).unsqueeze(-1)  # 0 for padding and unknown [official code]


def compile_parts(model):
    model.visual["cnn"].compile()
    for head in model.children():
        if isinstance(head, TextualHead):
            head.compile(dynamic=True)  # caption lengths vary


# ------------------------------------------------------------------------------------- optimizer


def parameter_groups(model, lr, text_lr, weight_decay):
    """The backbone at `lr`, the rest at `text_lr`. No weight decay on norms and biases of the
    embedding and the Transformers; biases of projection and output do decay [official code].
    """
    groups = {
        "backbone": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "decay": {"params": [], "lr": text_lr, "weight_decay": weight_decay},
        "no_decay": {"params": [], "lr": text_lr, "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if name.startswith("visual.cnn."):
            group = "backbone"
        elif re.search(r"textual\.(embedding|transformer)\..*(norm|bias)", name):
            group = "no_decay"
        else:
            group = "decay"
        groups[group]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]  # classification has fewer


class LookAhead:
    """Look-ahead: every k steps the slow weights move a fraction alpha of the way to the fast ones,
    which restart from there [Zhang et al. 2019; Sec. 3: k = 5, alpha = 0.5].
    """

    def __init__(self, optimizer, k, alpha):
        self.k = k
        self.alpha = alpha
        self.steps = 0
        self.fast = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    @torch.no_grad()
    def step(self):
        """Call after optimizer.step()."""
        self.steps += 1
        if self.steps % self.k == 0:
            torch._foreach_lerp_(self.slow, self.fast, self.alpha)
            torch._foreach_copy_(self.fast, self.slow)

    def state_dict(self):
        return {"steps": self.steps, "slow": self.slow}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, photos, args, device):
    """-> {name: mean loss}: per token of the photos' first captions; classification: per photo"""
    model.eval()
    totals, counts = defaultdict(float), defaultdict(int)
    for batch in common.validation_batches(photos, partial(collate, args.task), args, device):
        del batch["jitter"]
        with common.autocast(device, args.amp):
            losses = model(common.augment(batch.pop("images")), **batch)
        for name, loss in losses.items():
            positions = "backward_target_positions" if name == "backward" else "target_positions"
            count = len(batch.get(positions, batch["tokens"]))
            totals[name] += count * loss.item()
            counts[name] += count
    model.train()
    means = {name: totals[name] / max(1, counts[name]) for name in totals}
    listed = ", ".join(f"{name} {loss:.2f}" for name, loss in means.items())
    print_main(f"validation loss: {listed}")
    return means


if __name__ == "__main__":
    main(get_args())
