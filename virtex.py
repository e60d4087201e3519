"""VirTex: a backbone learned by writing captions, from left to right and from right to left.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021.

A convolutional network turns a photo into a 7x7 grid of features. Two Transformers look at the grid and predict the
photo's caption, one forward and one backward (Eq. 1), everything from random initialisation. Captions say which
objects are there, how they look, where they are and what they do: a backbone that can be captioned from has learned to
see, and only the backbone is kept [Sec. 3].

    laptop        python virtex.py
    own photos    python virtex.py --data photos.jsonl --arch resnet18 --image-size 112 --hidden 512 --epochs 60 \
                      --batch-size 32 --lr 0.1 --text-lr 0.1
    one GPU       python virtex.py --data coco --batch-size 64
    eight GPUs    torchrun --nproc_per_node=8 virtex.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 virtex.py --data coco
                  (with --output on a file system that both see)
    captions      python virtex.py --caption photo1.jpg photo2.jpg --weights runs/virtex/checkpoint.pth

What to expect: with the paper's head (H = 2048, 10K words) the loss starts near 12.5 in each direction and not at
ln 10000 = 9.2: the output layer is the token embedding, so at first each position predicts the token it has just read,
which is hardly ever the right answer. Word frequencies are learned at once; then comes a plateau on which the heads
write plausible captions without looking, and it is left when the backbone begins to see. (Measured with the README's
commands: the plateau is near 0.95 per direction on shapes, H = 256, and 3.2 on Flickr8k, H = 512.)
"""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import common
import language
import probe
from common import fail, progress, say
from language import EOS, MASK, SOS, UNKNOWN, clean

TASKS = ("bicaptioning", "captioning", "masked_lm", "token_classification")

DEFAULTS = {
    #                    on shapes   on real data (the paper's)
    "arch":             ("resnet18", "resnet50"),  # Sec. 3
    "image_size":       (64,         224),         # Sec. 3
    "crop_min":         (0.7,        0.2),         # Sec. 3
    "colour_jitter":    (0.25,       1.0),         # official code; the captions of shapes name exact colours
    "hidden":           (256,        2048),        # Sec. 4.1
    "batch_size":       (32,         256),         # Sec. 3
    "iters":            (1200,       500_000),     # Sec. 3
    "lr":               (0.2,        0.2),         # Sec. 3
    "text_lr":          (0.1,        1e-3),        # Sec. 3
    "log_every":        (10,         20),
    "checkpoint_every": (200,        2000),
    "probe_images":     (2000,       10_000),
}  # fmt: skip


def get_args(argv=None):
    parser = common.flag_parser("virtex", __doc__, DEFAULTS)

    model = parser.add_argument_group("model")
    model.add_argument("--task", choices=TASKS, default="bicaptioning", help="what is predicted from the photo; the others are ablations [Sec. 4.2]")
    model.add_argument("--arch", choices=sorted(common.BACKBONES), help="resnet50 for the paper's numbers [Sec. 3], resnet18 for small data or a CPU")
    model.add_argument("--layers", type=int, default=1, help="L, Transformer layers per direction; 2 or 3 generally help, 4 overfits slightly [Sec. 4.2]. No layer in token_classification")
    model.add_argument("--hidden", type=int, help="H, width of the Transformers; larger is better and slower [Sec. 4.2]. A = H/64 heads and F = 4H follow")
    model.add_argument("--dropout", type=float, default=0.1, help="in the Transformers; raise it when few captions are learned by heart [official code]")
    model.add_argument("--vocab-size", type=int, default=10_000, help="tokens of the tokenizer; fewer where the captions do not hold as many [Sec. 3]")
    model.add_argument("--tokenizer", help="an existing SentencePiece .model instead of one trained on the captions")
    model.add_argument("--max-length", type=int, default=30, help="tokens per caption, [SOS] and [EOS] included; raise it for long captions [official code]")

    optim = parser.add_argument_group("optimisation")
    optim.add_argument("--batch-size", type=int, help="images per iteration over all processes [Sec. 3]")
    optim.add_argument("--iters", type=int, help="iterations; scale with the number of images [Sec. 3]")
    optim.add_argument("--epochs", type=float, help="length in passes over the images, instead of --iters")
    optim.add_argument("--lr", type=float, help="maximum for the backbone; lower it when the loss is not finite [Sec. 3]")
    optim.add_argument("--text-lr", type=float, help="maximum for everything else; 0.05 to 0.1 suits short runs on small data, see the README [Sec. 3]")
    optim.add_argument("--warmup", type=float, default=0.02, help="share of the run in which the learning rates rise [Sec. 3: 10K of 500K]")
    optim.add_argument("--weight-decay", type=float, default=1e-4, help="none on norms and biases of the Transformers [Sec. 3]")
    optim.add_argument("--clip", type=float, default=10.0, help="maximum norm of the gradient [official code]")
    optim.add_argument("--lookahead-k", type=int, default=5, help="steps between updates of the slow weights [Sec. 3]")
    optim.add_argument("--lookahead-alpha", type=float, default=0.5, help="how far the slow weights then move [Sec. 3]")
    optim.add_argument("--crop-min", type=float, help="smallest part of a photo that a crop may show; raise it when captions speak of the whole [Sec. 3]")
    optim.add_argument("--colour-jitter", type=float, help="strength of the colour jitter; lower it when captions name exact colours, 0 for none [official code]")

    use = parser.add_argument_group("use of a trained model")
    use.add_argument("--weights", help="a checkpoint.pth of ours or an official VirTex checkpoint (then with --tokenizer)")
    use.add_argument("--caption", nargs="+", metavar="IMAGE", help="caption these photos; pictures of the attention go to OUTPUT/captions")
    use.add_argument("--evaluate", action="store_true", help="caption the validation split: CIDEr and SPICE (pip install pycocoevalcap) [Fig. 6]")
    use.add_argument("--beams", type=int, default=5, help="hypotheses kept by beam search [official code]")

    args = common.fill_defaults(parser.parse_args(argv), DEFAULTS, scaled=("lr", "text_lr"))
    if args.hidden % 64:
        fail(f"--hidden {args.hidden} must be a multiple of 64: a head is 64 wide (A = H/64)")
    if not 0 < args.crop_min <= 1 or not 0 <= args.warmup < 1 or not 0 <= args.dropout < 1 or not 0 <= args.colour_jitter <= 1:
        fail("--crop-min must be in (0, 1], --warmup and --dropout in [0, 1), --colour-jitter in [0, 1]")
    if args.max_length < 3 or args.layers < 1 or args.lookahead_k < 1 or args.beams < 1:
        fail("--max-length must be at least 3; --layers, --lookahead-k and --beams at least 1")
    if not 0 < args.lookahead_alpha <= 1 or args.clip <= 0 or args.weight_decay < 0:
        fail("--lookahead-alpha must be in (0, 1], --clip above 0 and --weight-decay at least 0")
    if args.caption and args.evaluate:
        fail("give --caption or --evaluate, not both")
    if bool(args.caption or args.evaluate) != bool(args.weights):
        fail("--weights FILE goes with --caption IMAGE... or --evaluate" if args.weights else "--caption and --evaluate need --weights FILE")
    return args


def main(args):
    world = common.start_processes()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.caption:
        return caption_photos(args, device)
    if args.evaluate:
        return evaluate_captions(args, device)
    run = common.Run(args, "virtex", world)
    checkpoint = run.begin()

    # Data: photos with at least one caption, and a tokenizer learned from the captions.
    train, val = load_captions(args, args.train_split, args.fraction, args.captions_per_image), load_captions(args, args.val_split)
    run.same_data(checkpoint, train, val)
    labelled = probe.probe_data(args, train, val)
    if len(train) < args.batch_size:
        say(f"note: {len(train)} images are fewer than a batch of {args.batch_size}; images repeat within a batch")
    iters = math.ceil(args.epochs * len(train) / args.batch_size) if args.epochs else args.iters
    with common.main_first(world):
        path = run.folder / "tokenizer.model"
        if world.is_main:
            common.write_file(path, lambda file: file.write(tokenizer_model(args, train.captions, checkpoint)))
        tokenizer = read_tokenizer(path)
    say(f"{len(train)} photos with {len(train.captions)} captions, {tokenizer.get_piece_size()} tokens; {iters} iterations of {args.batch_size}")

    # Model, optimiser, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = VirTex(args.arch, tokenizer.get_piece_size(), args.hidden, args.layers, dropout=args.dropout, max_length=args.max_length, task=args.task)
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.sgd(parameter_groups(model, args.lr, args.text_lr, args.weight_decay), args.lr, args.weight_decay)
    lookahead = LookAhead(optimizer, args.lookahead_k, args.lookahead_alpha)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "lookahead": lookahead, "scaler": scaler}
    start, best = run.restore(checkpoint, parts)
    checkpoint = None  # at the paper's size 2 GB per process
    if args.compile:
        model.visual["cnn"].compile()
        for head in (module for module in model.children() if isinstance(module, TextualHead)):
            head.decode = torch.compile(head.decode, dynamic=True)  # captions have all lengths
    parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if world.size > 1 else model

    view = CaptionView(train, tokenizer, args)
    sampler = common.InfiniteSampler(len(train), args.batch_size, world, args.seed, start)
    loader = common.make_loader(view, sampler, args.batch_size // world.size, args.workers, collate, device)
    feed = common.Feed(loader, device, run, train.images)

    parallel.train()
    bar = progress(total=iters, initial=start, unit=" its", desc="virtex")
    with common.StopSignals() as stop:
        for iteration, batch in zip(range(start + 1, iters + 1), feed):
            factor = common.warmup_cosine(iteration - 1, iters, args.warmup * iters)
            for group in optimizer.param_groups:
                group["lr"] = group["max_lr"] * factor
            # Dropout, too, is a function of the seed, the iteration and the rank: a resumed run draws the same.
            torch.manual_seed((args.seed << 40) + iteration * world.size + world.rank)

            images = common.augment(batch.pop("images"), batch.pop("jitter"))
            with common.autocast(device, args.amp):
                losses = parallel(images, **batch)
            loss = sum(losses.values())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            lookahead.step()
            bar.update()

            stopping = common.any_process(world, bool(stop.number))
            saving = stopping or iteration % args.checkpoint_every == 0 or iteration == iters
            if saving or iteration % args.log_every == 0:  # the only places that wait for the device
                terms = common.average(world, torch.stack([term.detach() for term in (loss, *losses.values())])).tolist()
                # (In fp16 the scaler skips steps whose gradient is infinite.)
                run.check_finite(iteration, {"loss": terms[0]} if args.amp == "fp16" else {"loss": terms[0], "gradient": grad_norm.item()})
                bar.set_postfix(loss=f"{terms[0]:.3f}")
            if iteration % args.log_every == 0:
                run.log(iteration, feed, loss=terms[0], **dict(zip(losses, terms[1:])), lr=args.lr * factor, text_lr=args.text_lr * factor)
            if args.probe_every and iteration % args.probe_every == 0 and world.is_main:
                best = probe.keep_best(run, iteration, model.visual["cnn"], labelled, best, device)
            if saving:
                states = {name: part.state_dict() for name, part in parts.items()}
                words = torch.frombuffer(bytearray(tokenizer.serialized_model_proto()), dtype=torch.uint8)
                run.save(iteration, **states, best=best, tokenizer=words)
            if stopping:
                bar.close()
                say(f"stopped after iteration {iteration}: checkpoint written, the same command goes on from there")
                sys.exit(128 + stop.number)
    bar.close()

    # The backbone is the result; the probe says what it is worth.
    common.end_processes(world)
    if not world.is_main:
        return
    run.save_weights("backbone.pth", model.visual["cnn"].state_dict())
    result = {"validation_loss": validate(model, CaptionView(val, tokenizer, args, training=False), args, device)}
    say("validation loss: " + ", ".join(f"{name} {value:.3f}" for name, value in result["validation_loss"].items()))
    run.finish(**result, **probe.final_probe(run, model.visual["cnn"], labelled, best, device))


# ------------------------------------------------------------------------------------------ captions to tokens

def tokenizer_model(args, captions, checkpoint):
    """The serialised tokenizer of this run: the checkpoint's when it goes on, the user's, or one learned from the captions."""
    if checkpoint:
        return checkpoint["tokenizer"].numpy().tobytes()
    if args.tokenizer:
        return read_tokenizer(args.tokenizer).serialized_model_proto()
    return language.train_tokenizer((clean(caption) for caption in progress(captions, desc="tokenizer", unit=" captions")), args.vocab_size)


def read_tokenizer(path):
    if not Path(path).is_file():
        fail(f"--tokenizer {path} not found")
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError:
        fail(f"--tokenizer {path} is not a SentencePiece model")
    if [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")] != [SOS, EOS, MASK]:
        fail(f"--tokenizer {path} must have [SOS], [EOS], [MASK] as ids 1, 2, 3")
    return tokenizer


def encode(tokenizer, caption, max_length):
    """-> list of ids: [SOS] c_1 ... c_T [EOS], cut after `max_length`."""
    return [SOS, *tokenizer.encode(clean(caption)), EOS][:max_length]


def decode(tokenizer, row):
    """(T,) tokens -> the caption, without special and unknown tokens."""
    return tokenizer.decode([token for token in row.tolist() if token > MASK])


# ------------------------------------------------------------------------------------------ samples and batches


def load_captions(args, split, fraction=1.0, captions_per_image=None):
    data = common.caption_data(args.data, args.root, split, fraction, captions_per_image, args.seed)
    captioned = [i for i in range(len(data)) if data.first_caption[i + 1] > data.first_caption[i]]
    if not captioned:
        fail(f"no image of the split {split} has a caption")
    if len(captioned) < len(data):
        say(f"{len(data) - len(captioned)} of {len(data)} images of the split {split} have no caption and are left out")
        data = data.select(captioned)
    return data


class CaptionView(Dataset):
    """One photo with one of its captions, as VirTex is trained on it (or, not `training`, centred, with its first)."""

    def __init__(self, data, tokenizer, args, training=True):
        self.data, self.tokenizer, self.args, self.training = data, tokenizer, args, training

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        epoch, index = key if self.training else (0, key)
        args, rng = self.args, common.sample_rng(self.args.seed, epoch, index)
        crop = common.random_crop(rng, (args.crop_min, 1.0)) if self.training else common.centre_crop(1.0)
        image, index, unreadable = common.read_crop(self.data.images, index, crop, args.image_size)
        captions = self.data.captions_of(index)
        caption = captions[rng.integers(len(captions))] if self.training else captions[0]
        jitter = np.array([1, 1, 1, 0], np.float32)
        if self.training:
            jitter = common.draw_colour_jitter(rng, args.colour_jitter)
            if rng.random() < 0.5:
                image, caption = image[:, ::-1].copy(), language.swap_left_right(caption)
        tokens = encode(self.tokenizer, caption, args.max_length)
        sample = {"image": image, "jitter": jitter, "tokens": tokens, "unreadable": unreadable, "task": args.task}
        if args.task == "masked_lm":
            sample["masked"] = mask_tokens(tokens, self.tokenizer.get_piece_size(), rng)
        return sample


def mask_tokens(tokens, vocab_size, rng):
    """15% of the words' tokens (one at least): 85% become [MASK], 10% any token, 5% stay [Sec. 4.2, official code]."""
    masked = list(tokens)
    words = range(1, len(tokens) - (tokens[-1] == EOS))
    for t in rng.permutation(words)[: math.ceil(0.15 * len(words))]:
        draw = rng.random()
        if draw < 0.95:
            masked[t] = MASK if draw < 0.85 else int(rng.integers(MASK + 1, vocab_size))
    return masked


def pad(sequences):
    """Lists of ids -> (B, T) int64, zeros behind."""
    return nn.utils.rnn.pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)


def collate(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T) and what the task needs beside them.

    `predicted` are the flat indices of the positions that have something to predict. They are found here, on the
    host: finding them on the GPU would make every step wait for it.
    """
    tokens, task = pad([sample["tokens"] for sample in samples]), samples[0]["task"]
    lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
    batch = {**common.collate_photos(samples), "tokens": tokens}
    if task in ("bicaptioning", "captioning"):
        has_next = torch.arange(tokens.size(1) - 1) < lengths[:, None] - 1
        batch["predicted"] = has_next.flatten().nonzero().squeeze(1)
        if task == "bicaptioning":
            batch["backward_tokens"] = pad([sample["tokens"][::-1] for sample in samples])
    elif task == "masked_lm":
        batch["masked"], batch["lengths"] = pad([sample["masked"] for sample in samples]), lengths
        batch["predicted"] = ((batch["masked"] == MASK) & (tokens != MASK)).flatten().nonzero().squeeze(1)
    return batch


# ------------------------------------------------------------------------------------------ model


class Attention(nn.Module):
    """Multi-headed attention of Vaswani et al., with the parameter names of nn.MultiheadAttention.

    Projecting is a call of its own, so that decoding can keep keys and values.
    """

    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def per_head(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, T, H) -> (B, heads, T, H / heads)

    def project(self, x, parts):
        """x (B, T, H) -> some of "qkv", (B, heads, T, H / heads) each"""
        hidden = x.size(-1)
        # split, not slices: their gradients are put together once instead of being padded with zeros and added.
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if parts != "qkv":
            n = 0 if parts == "q" else 1
            weight, bias = weight.split((hidden, 2 * hidden))[n], bias.split((hidden, 2 * hidden))[n]
        return [self.per_head(part) for part in F.linear(x, weight, bias).chunk(len(parts), dim=-1)]

    def forward(self, query, keys, values, causal=False, mask=None):
        """Projected query, keys and values; mask (B, 1, 1, S), True where a key may be seen -> (B, T, H)"""
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, keys, values, mask, dropout, is_causal=causal)
        return self.out_proj(attended.transpose(1, 2).flatten(2))

    @staticmethod
    def weights(query, keys):
        """How much each query looks at each key -> (B, T, S), the mean over the heads."""
        return (query @ keys.transpose(2, 3) / math.sqrt(query.size(-1))).softmax(-1).mean(1)


class DecoderLayer(nn.Module):
    """Self-attention, attention over the image, feed-forward; each with dropout, residual and then layer norm [Sec. 3].

    Parameter names are those of nn.TransformerDecoderLayer.
    """

    def __init__(self, hidden, heads, feedforward, dropout):
        super().__init__()
        self.self_attn = Attention(hidden, heads, dropout)
        self.multihead_attn = Attention(hidden, heads, dropout)
        self.linear1, self.linear2 = nn.Linear(hidden, feedforward), nn.Linear(feedforward, hidden)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(hidden) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, causal=True, mask=None, past=None):
        """x (B, T, H); memory: keys and values of the image; past: keys and values of earlier tokens -> x, past"""
        query, keys, values = self.self_attn.project(x, "qkv")
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        x = self.norm1(x + self.dropout(self.self_attn(query, keys, values, causal and past is None, mask)))
        x = self.norm2(x + self.dropout(self.multihead_attn(*self.multihead_attn.project(x, "q"), *memory)))
        x = self.norm3(x + self.dropout(self.linear2(self.dropout(F.gelu(self.linear1(x))))))
        return x, (keys, values)


class Embedding(nn.Module):
    """Token and position, summed, layer norm, dropout [Sec. 3]."""

    def __init__(self, vocab_size, hidden, dropout, max_length):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden, padding_idx=UNKNOWN)
        self.positions = nn.Embedding(max_length, hidden)
        self.layer_norm = nn.LayerNorm(hidden, eps=1e-8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens, first=0):
        positions = self.positions.weight[first : first + tokens.size(1)]
        x = self.dropout(self.layer_norm(self.words(tokens) + positions))
        return x * (tokens != UNKNOWN).unsqueeze(-1)  # padding and unknown tokens are zero vectors [official code]


class TextualHead(nn.Module):
    """A Transformer that reads tokens and an image, and scores the vocabulary. Module names of the official code."""

    def __init__(self, channels, vocab_size, hidden, layers, heads, feedforward, dropout, max_length):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = Embedding(vocab_size, hidden, dropout, max_length)
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(DecoderLayer(hidden, heads, feedforward, dropout) for _ in range(layers))})
        self.output = nn.Linear(hidden, vocab_size)
        for module in self.modules():  # N(0, 0.02) [official code]
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, Attention):
                nn.init.normal_(module.in_proj_weight, std=0.02)
        nn.init.zeros_(self.embedding.words.weight[UNKNOWN])
        self.output.weight = self.embedding.words.weight  # tied [Sec. 3]

    def share(self, other):
        """Use the other direction's projection, embedding and output layer; only the Transformer is one's own [Sec. 3]."""
        self.visual_projection, self.embedding, self.output = other.visual_projection, other.embedding, other.output
        return self

    def project(self, features):
        """(B, channels, h, w) -> the image vectors, (B, h * w, H)"""
        return self.visual_projection(features.flatten(2).transpose(1, 2))

    def memory(self, projected):
        """Image vectors -> keys and values for each layer."""
        return [layer.multihead_attn.project(projected, "kv") for layer in self.transformer["layers"]]

    def forward(self, tokens, memory, causal=True, mask=None, past=None):
        """tokens (B, T) -> vectors (B, T, H), and for each layer the keys and values of all tokens so far."""
        return self.decode(self.embedding(tokens, first=past[0][0].size(2) if past else 0), memory, causal, mask, past)

    def decode(self, x, memory, causal=True, mask=None, past=None):
        """The Transformer, from embedded tokens x (B, T, H)."""
        present = []
        for n, layer in enumerate(self.transformer["layers"]):
            x, kept = layer(x, memory[n], causal, mask, past[n] if past else None)
            present.append(kept)
        return x, present


class VirTex(nn.Module):
    """Backbone and textual heads; calling it gives the losses of the task by name [Sec. 3, Sec. 4.2].

    `visual["cnn"]` is the backbone; `textual` and `backward_textual` the two directions.
    """

    def __init__(self, arch, vocab_size, hidden, layers=1, heads=None, feedforward=None, dropout=0.1, max_length=30, task="bicaptioning"):
        super().__init__()
        self.task = task
        self.visual = nn.ModuleDict({"cnn": common.build_backbone(arch)})
        channels = self.visual["cnn"].channels
        if task == "token_classification":
            self.textual = nn.ModuleDict({"output": nn.Linear(channels, vocab_size)})
            return
        size = channels, vocab_size, hidden, layers, heads or hidden // 64, feedforward or 4 * hidden, dropout, max_length
        self.textual = TextualHead(*size)
        if task == "bicaptioning":
            self.backward_textual = TextualHead(*size).share(self.textual)

    def forward(self, images, tokens, predicted=None, backward_tokens=None, masked=None, lengths=None):
        """images (B, 3, h, w), the rest from `collate` -> {name: loss}"""
        features = self.visual["cnn"](images)
        if self.task == "token_classification":
            return {"token_classification": token_set_loss(self.textual["output"](features.mean((2, 3))), tokens)}
        projected = self.textual.project(features)
        if self.task == "masked_lm":
            visible = (torch.arange(tokens.size(1), device=tokens.device) < lengths[:, None])[:, None, None]
            vectors, _ = self.textual(masked, self.textual.memory(projected), causal=False, mask=visible)
            return {"masked_lm": prediction_losses(self.textual.output, [vectors], [tokens], predicted)[0]}
        # The negative of Eq. 1, each direction as a mean over its tokens: a token is predicted from the image and from
        # those before it in the direction of reading. What both share, embedding and vocabulary layer, is run once.
        heads, sequences = {"forward": self.textual}, [tokens]
        if self.task == "bicaptioning":
            heads["backward"], sequences = self.backward_textual, [tokens, backward_tokens]
        x = self.textual.embedding(torch.cat([sequence[:, :-1] for sequence in sequences])).chunk(len(heads))
        vectors = [head.decode(x[n], head.memory(projected))[0] for n, head in enumerate(heads.values())]
        losses = prediction_losses(self.textual.output, vectors, [sequence[:, 1:] for sequence in sequences], predicted)
        return dict(zip(heads, losses))


def prediction_losses(output, vectors, targets, predicted):
    """Mean cross-entropy of each (B, T) in `targets` given its vectors (B, T, H), over the positions `predicted`.

    No other position goes through the vocabulary layer: padding costs nothing.
    """
    logits = output(torch.cat([x.flatten(0, 1)[predicted] for x in vectors]))
    loss = F.cross_entropy(logits, torch.cat([target.flatten()[predicted] for target in targets]), reduction="none")
    return loss.view(len(vectors), len(predicted)).sum(1) / max(1, len(predicted))


def token_set_loss(logits, tokens):
    """Softmax cross-entropy with the set of a caption's K tokens, each 1/K [Sec. 4.2; Tab. 1, multi-label]."""
    targets = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, tokens, 1.0)
    targets[:, : MASK + 1] = 0  # neither special tokens nor padding
    return common.tag_loss(logits, targets)


# ------------------------------------------------------------------------------------------ optimiser


def parameter_groups(model, lr, text_lr, weight_decay):
    """The backbone at `lr`, everything else at `text_lr`; no decay on norms and biases of the Transformers [Sec. 3]."""
    backbone, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if name.startswith("visual.cnn."):
            backbone.append(parameter)
        elif re.search(r"textual\.(embedding|transformer)\..*(norm|bias)", name):
            plain.append(parameter)
        else:
            decayed.append(parameter)
    groups = ((backbone, lr, weight_decay), (decayed, text_lr, weight_decay), (plain, text_lr, 0.0))
    return [{"params": params, "lr": rate, "max_lr": rate, "weight_decay": decay} for params, rate, decay in groups if params]


class LookAhead:
    """Every k steps the slow weights move by alpha towards the fast ones, which go on from there (Zhang et al. 2019)."""

    def __init__(self, optimizer, k, alpha):
        self.k, self.alpha, self.steps = k, alpha, 0
        self.fast = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    @torch.no_grad()
    def step(self):
        """Call after the optimiser's own step."""
        self.steps += 1
        if self.steps % self.k == 0:
            torch._foreach_lerp_(self.slow, self.fast, self.alpha)
            torch._foreach_copy_(self.fast, self.slow)

    def state_dict(self):
        return {"steps": self.steps, "slow": self.slow}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.steps = state["steps"]
        torch._foreach_copy_(self.slow, [slow.to(here.device) for slow, here in zip(state["slow"], self.slow)])


# ------------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, view, args, device):
    """Mean loss per predicted token (token classification: per caption), each photo with its first caption -> {name: loss}"""
    model.eval()
    totals, count = {}, 0
    loader = DataLoader(view, 64, num_workers=args.workers, collate_fn=collate, worker_init_fn=common.ignore_signals)
    for batch in progress(loader, desc="validation", unit=" batches", leave=False):
        batch.pop("unreadable"), batch.pop("jitter")
        batch = {key: value.to(device) for key, value in batch.items()}
        n = len(batch["predicted"]) if "predicted" in batch else len(batch["tokens"])
        with common.autocast(device, args.amp):
            losses = model(common.augment(batch.pop("images")), **batch)
        for name, loss in losses.items():
            totals[name] = totals.get(name, 0.0) + n * loss.item()
        count += n
    return {name: total / max(1, count) for name, total in totals.items()}


# ------------------------------------------------------------------------------------------ captions for photos


def load_virtex(path, tokenizer_path=None):
    """A captioning model from a checkpoint of ours or an official one -> (VirTex in eval mode, tokenizer, image size)

    All sizes are read off the weights. An official checkpoint does not hold its tokenizer: give coco_10k.model.
    """
    content = common.read_checkpoint(path)
    args = content.get("args", {}) if isinstance(content, dict) else {}
    if isinstance(content, dict) and content.get("script", "virtex") != "virtex":
        fail(f"{path} is a checkpoint of {content['script']}.py, not of virtex.py")
    state = content.get("model") if isinstance(content, dict) else None
    if not state or "textual.embedding.words.weight" not in state or args.get("task") == "masked_lm":
        fail(f"{path} holds no captioning model (a backbone alone cannot caption): give the checkpoint.pth of a run with --task bicaptioning or captioning")
    if tokenizer_path:
        tokenizer = read_tokenizer(tokenizer_path)
    elif "tokenizer" in content:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content["tokenizer"].numpy().tobytes())
    else:
        fail(f"{path} holds no tokenizer: add --tokenizer FILE (the official one is coco_10k.model)")
    vocab_size, hidden = state["textual.embedding.words.weight"].shape
    if tokenizer.get_piece_size() != vocab_size:
        fail(f"the tokenizer has {tokenizer.get_piece_size()} tokens and {path} {vocab_size}: they do not belong together")
    model = VirTex(
        common.backbone_weights(content, path)[0], vocab_size, hidden,
        layers=sum(name.startswith("textual.transformer.layers.") and name.endswith("linear1.bias") for name in state),
        feedforward=len(state["textual.transformer.layers.0.linear1.bias"]),
        max_length=len(state["textual.embedding.positions.weight"]),
        task="bicaptioning" if any(name.startswith("backward_textual.") for name in state) else "captioning",
    )  # fmt: skip
    wrong = model.load_state_dict(state, strict=False)
    if wrong.missing_keys or [name for name in wrong.unexpected_keys if not common.CLASSIFIER.match(name.removeprefix("visual.cnn."))]:
        fail(f"{path} does not fit: missing {wrong.missing_keys[:5]}, unexpected {wrong.unexpected_keys[:5]}")
    return model.eval(), tokenizer, args.get("image_size", 224)


@torch.no_grad()
def beam_search(head, projected, beams=5, max_length=30, cached=True):
    """The most probable captions of a batch -> tokens (B, T) from [SOS] on (zeros behind [EOS]), log-probabilities (B,)

    projected: image vectors (B, S, H). A hypothesis that ended keeps its score and its place among the beams; the
    search is over when all have ended. cached: keep the keys and values of earlier tokens instead of computing them
    again (the same result, faster).
    """
    batch, vocab_size = len(projected), head.output.out_features
    memory = [tuple(part.repeat_interleave(beams, 0) for part in layer) for layer in head.memory(projected)]
    tokens = torch.full((batch, beams, 1), SOS, device=projected.device)
    scores = projected.new_tensor([0.0] + [-math.inf] * (beams - 1)).repeat(batch, 1)  # all beams are equal at first
    past, first_row = None, beams * torch.arange(batch, device=projected.device)[:, None]
    while tokens.size(2) < max_length:
        flat = tokens.flatten(0, 1)
        vectors, present = head(flat[:, -1:] if past else flat, memory, past=past)
        log_p = head.output(vectors[:, -1]).float().log_softmax(-1).view(batch, beams, vocab_size)
        ended = (tokens == EOS).any(2)
        log_p[ended] = -math.inf  # nothing follows [EOS]...
        log_p[..., UNKNOWN][ended] = 0.0  # ...but padding, at no cost
        scores, choice = (scores[:, :, None] + log_p).flatten(1).topk(beams)
        beam, token = choice // vocab_size, choice % vocab_size
        tokens = torch.cat([tokens.gather(1, beam[:, :, None].expand(-1, -1, tokens.size(2))), token[:, :, None]], 2)
        if cached:
            rows = (first_row + beam).flatten()
            past = [(keys[rows], values[rows]) for keys, values in present]
        if (tokens == EOS).any(2).all():
            break
    return tokens[:, 0], scores[:, 0]


@torch.no_grad()
def word_attention(head, projected, tokens, pieces):
    """Where the last layer looks when it predicts each word [Sec. 4.4] -> list of (word, (h, w) map that sums to one)

    projected (1, S, H); tokens (T,) from [SOS] to [EOS]; pieces: the tokens as strings, "▁" at the start of a word.
    The map of a word is the mean over its tokens, each of which is predicted at the position before it.
    """
    memory, x = head.memory(projected), head.embedding(tokens[None, :-1])
    for layer, (keys, values) in zip(head.transformer["layers"], memory):
        attended = layer.norm1(x + layer.self_attn(*layer.self_attn.project(x, "qkv"), causal=True))
        weights = layer.multihead_attn.weights(*layer.multihead_attn.project(attended, "q"), keys)[0]
        x, _ = layer(x, (keys, values))
    side, words = math.isqrt(projected.size(1)), []
    for t, piece in enumerate(pieces):
        if piece.startswith("▁") or not words:
            words.append(["", []])
        words[-1][0] += piece.lstrip("▁")
        words[-1][1].append(weights[t])
    return [(word, torch.stack(rows).mean(0).view(side, side)) for word, rows in words]


@torch.no_grad()
def caption_images(model, pixels, beams, device):
    """uint8 (B, size, size, 3) -> list of token rows ([SOS] to [EOS]) and the image vectors they were read from."""
    projected = model.textual.project(model.visual["cnn"](common.augment(pixels.to(device))))
    tokens, _ = beam_search(model.textual, projected, beams, model.textual.embedding.positions.num_embeddings)
    ends = [row.tolist().index(EOS) + 1 if EOS in row.tolist() else len(row) for row in tokens]
    return [row[:end] for row, end in zip(tokens, ends)], projected


def caption_photos(args, device):
    """`--caption`: print a caption for each photo and draw where its words look."""
    model, tokenizer, size = load_virtex(args.weights, args.tokenizer)
    model.to(device)
    photos = common.ImageFiles(args.caption)
    photos.check("check the path")
    folder = Path(args.output, "captions")
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for pixels, readable in DataLoader(common.CropView(photos, size, part=1.0), 16):
        rows, projected = caption_images(model, pixels, args.beams, device)
        for n, row in enumerate(rows):
            path = photos[first + n]
            if not readable[n]:
                say(f"{path}: cannot be decoded, is it a photo?")
                continue
            caption = decode(tokenizer, row)
            pieces = [tokenizer.id_to_piece(token) for token in row[1:].tolist() if token != EOS]
            picture = folder / f"{first + n + 1}_{Path(path).stem}.png"
            common.draw_attention(Image.fromarray(pixels[n].numpy()), caption, word_attention(model.textual, projected[n : n + 1], row, pieces), picture)
            say(f"{path}: {caption}  ({picture})")
        first += len(rows)


def evaluate_captions(args, device):
    """`--evaluate`: caption the validation split and score it against its own captions [Fig. 6]."""
    try:
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.spice.spice import Spice
        from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    except ImportError:
        fail("--evaluate needs the captioning metrics: python -m pip install pycocoevalcap")
    if not shutil.which("java"):
        fail("--evaluate needs Java for the metrics' tokenizer: apt install default-jre")
    model, tokenizer, size = load_virtex(args.weights, args.tokenizer)
    model.to(device)
    val = load_captions(args, args.val_split)
    captions = []
    loader = DataLoader(common.CropView(val.images, size, part=1.0), 64, num_workers=args.workers, worker_init_fn=common.ignore_signals)
    for pixels, readable in progress(loader, desc="captions", unit=" batches"):
        rows, _ = caption_images(model, pixels, args.beams, device)
        captions += [decode(tokenizer, row) if good else None for row, good in zip(rows, readable)]
    written = {i: [{"caption": caption}] for i, caption in enumerate(captions) if caption is not None}
    truth = {i: [{"caption": caption} for caption in val.captions_of(i)] for i in written}
    path = Path(args.output, f"captions_{args.val_split}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_json(path, [{"image": val.images[i], **caption[0]} for i, caption in written.items()])
    truth, written = PTBTokenizer().tokenize(truth), PTBTokenizer().tokenize(written)
    say(f"CIDEr {100 * Cider().compute_score(truth, written)[0]:.1f} on {len(written)} images; the captions are in {path}")
    try:
        say(f"SPICE {100 * Spice().compute_score(truth, written)[0]:.1f}")
    except (OSError, subprocess.CalledProcessError) as error:  # it downloads CoreNLP once and wants Java 8
        say(f"SPICE was not measured: {error}")


if __name__ == "__main__":
    common.run(main, get_args)
