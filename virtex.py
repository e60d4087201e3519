"""VirTex: a backbone learned by writing captions, from left to right and from right to left.

Desai, Johnson. VirTex: Learning Visual Representations from Textual Annotations. CVPR 2021.

A convolutional network turns a photo into a 7x7 grid of features. Two Transformers look at the
grid and predict the photo's caption, one forward and one backward (Eq. 1), everything from random
initialisation. Captions say which objects are there, how they look, where they are and what they
do: a backbone that can be captioned from has learned to see, and only the backbone is kept.

    laptop        python virtex.py
    own photos    python virtex.py --data photos.jsonl
    one GPU       python virtex.py --data coco --batch-size 64
    eight GPUs    torchrun --nproc_per_node=8 virtex.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 virtex.py --data coco   (on both; shared --output)
    captions      python virtex.py --caption photo.jpg --weights runs/virtex/checkpoint.pth

What to expect: with the paper's head (H = 2048, 10K words) the loss starts near 12.5 in each
direction and not at ln 10000 = 9.2. The output layer is the token embedding, so at first each
position predicts the token it has just read. Word frequencies are learned at once. Then comes a
plateau on which the heads write plausible captions without looking, near 3.2 per direction on
Flickr8k (H = 512), and it is left when the backbone begins to see. A run that stays there wants
more iterations or a higher --text-lr.
"""

import io
import math
import re
import shutil
import subprocess
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import common
import language
from common import check, count, dim, fail, positive, positive_share, progress, proper_share, say

try:
    import eval_linear
except ModuleNotFoundError:  # copied without it: no probe at the end
    eval_linear = None

TASKS = "bicaptioning", "captioning", "masked_lm", "token_classification"

# fmt: off
RECIPES = {  #           demo        small       paper
    "arch":             ("resnet18", "resnet18", "resnet50"),  # Sec. 3
    "image_size":       (64,         112,        224),         # Sec. 3
    "crop_min":         (0.8,        0.2,        0.2),         # Sec. 3
    "colour_jitter":    (0.25,       1.0,        1.0),         # official code
    "hidden":           (256,        512,        2048),        # Sec. 4.1
    "init_std":         (0.06,       0.02,       0.02),        # official code
    "dropout":          (0.0,        0.1,        0.1),         # official code
    "batch_size":       (64,         32,         256),         # Sec. 3
    "iters":            (650,        None,       500_000),     # Sec. 3
    "epochs":           (None,       25.0,       None),
    "optimizer":        ("adamw",    "sgd",      "sgd"),       # Sec. 3
    "lr":               (1e-3,       0.1,        0.2),         # Sec. 3
    "text_lr":          (1e-3,       0.1,        1e-3),        # Sec. 3
    "warmup":           (0.1,        0.02,       0.02),        # Sec. 3: 10K of 500K iterations
    "weight_decay":     (1e-2,       1e-4,       1e-4),        # Sec. 3
    "lookahead_alpha":  (1.0,        0.5,        0.5),         # Sec. 3; at 1 it does nothing
    "log_every":        (10,         20,         20),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
# fmt: on


def get_args(argv=None):
    parser = common.flag_parser("virtex", __doc__)

    add = parser.add_argument_group("model").add_argument
    add("--task", choices=TASKS, default=TASKS[0], help="the others are ablations [Sec. 4.2]")
    add("--layers", type=dim, default=1, help="L; 2 or 3 generally help [Sec. 4.2]")
    add("--hidden", type=dim, help="H; larger is better and slower; A = H/64, F = 4H follow")
    add(
        "--init-std",
        type=positive,
        help="deviation of the heads' first weights; about H^-0.5 if H < 512",
    )
    add("--dropout", type=proper_share, help="in the heads; raise it for few captions")
    add("--vocab-size", type=dim, default=10_000, help="tokens, at most [Sec. 3]")
    add("--tokenizer", help="a SentencePiece .model, instead of one trained on the captions")
    add("--max-length", type=dim, default=30, help="tokens per caption, [SOS], [EOS] included")

    add = parser.add_argument_group("optimisation of the heads").add_argument
    add("--optimizer", choices=common.OPTIMIZERS, help="if changed, give --lr and --text-lr")
    add("--text-lr", type=positive, help="peak, of the heads; with sgd 0.05 to 0.1 for few data")
    add("--clip", type=positive, default=10.0, help="maximum norm of the gradient [official code]")
    add("--lookahead-k", type=count, default=5, help="steps between slow updates [Sec. 3]")
    add("--lookahead-alpha", type=positive_share, help="size of the slow updates; 1: none")

    use = parser.add_argument_group("use of a trained model")
    use.add_argument("--weights", help="a checkpoint.pth, or an official one (with --tokenizer)")
    add = use.add_mutually_exclusive_group().add_argument
    add("--caption", nargs="+", metavar="IMAGE", help="caption photos, with pictures of attention")
    add("--evaluate", action="store_true", help="CIDEr and SPICE of the validation split [Fig. 6]")
    use.add_argument("--beams", type=dim, default=5, help="of beam search [Sec. 4.4]")

    recipe = common.choose_recipe(RECIPES, argv)
    args = common.parse(parser, argv, recipe, scaled=("lr", "text_lr"))
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden} must be a multiple of 64: a head is 64 wide")
    if args.max_length < 3:
        parser.error("--max-length must be at least 3: [SOS], a token and [EOS]")
    if bool(args.caption or args.evaluate) != bool(args.weights):
        parser.error("--weights FILE goes with --caption IMAGE... or --evaluate")
    return args


def main(args):
    world = common.start()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.caption:
        return caption_photos(args, device)
    if args.evaluate:
        return evaluate_captions(args, device)

    # Data: photos with at least one caption, and a tokenizer learned from the captions.
    train = load_captions(args, args.train_split, args.fraction, args.captions_per_image)
    val = load_captions(args, args.val_split)
    run = common.Run(args, "virtex", world, train, val)
    probe = eval_linear and eval_linear.Probe(args, train, val)
    with common.main_first(world):
        tokenizer = load_tokenizer(args, train.captions, run)
    vocab_size, size = tokenizer.get_piece_size(), len(train)
    iters = args.iters or math.ceil(args.epochs * size / args.batch_size)
    say(f"{size} photos ({len(val)} for validation), {len(train.captions)} captions, "
        f"{vocab_size} tokens; {iters} iterations")  # fmt: skip

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    sizes = args.hidden, args.layers, args.dropout, args.max_length
    model = VirTex(args.arch, vocab_size, *sizes, task=args.task, init_std=args.init_std)
    model.to(device, memory_format=torch.channels_last)
    groups = parameter_groups(model, args.lr, args.text_lr, args.weight_decay)
    optimizer = common.build_optimizer(args.optimizer, groups, args.lr, args.weight_decay)
    lookahead = LookAhead(optimizer, args.lookahead_k, args.lookahead_alpha)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, lookahead=lookahead, scaler=scaler)
    backbone = model.visual["cnn"]
    if args.compile:
        compile_parts(model)
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(sample, train, tokenizer, args), size, args.seed)
    words = torch.frombuffer(bytearray(tokenizer.serialized_model_proto()), dtype=torch.uint8)
    for iteration, batch in run.steps(samples, collate, iters, probe, backbone, tokenizer=words):
        factor = common.lr_factor(iteration - 1, iters, args.warmup)  # then a cosine [Sec. 3]
        common.set_lr(optimizer, factor)
        images = common.augment(batch.pop("images"), batch.pop("jitter"))
        with common.autocast(device, args.amp):
            losses = parallel(images, **batch)
        loss = sum(losses.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        lookahead.step()
        run.log(loss=loss, **losses, lr=args.lr * factor, text_lr=args.text_lr * factor)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        run.save_weights("backbone.pth", backbone)
        result = validate(model, val, tokenizer, args, device)
        say(f"validation loss: {common.in_words(result, 3)}")
        run.finish(probe, backbone, validation_loss=result)


# ---------------------------------------------------------------------------- captions to tokens

UNKNOWN, SOS, EOS, MASK = range(4)  # of the official model; padding shares its id with unknown
MAX_CAPTIONS = 2_000_000  # that the tokenizer is learned from, evenly spaced [ours]


def load_captions(args, split, fraction=1.0, captions_per_image=None):
    """The images of a split that have a caption -> CaptionData"""
    subset = fraction, captions_per_image, args.seed
    data = common.caption_data(args.data, args.root, split, *subset, cache=args.cache)
    captioned = np.flatnonzero(data.captioned())
    check(len(captioned), f"no image of the split {split} has a caption")
    missing = len(data) - len(captioned)
    if missing:
        say(f"{missing} of {len(data)} images of the split {split} have no caption: left out")
        data = data.select(captioned)
    return data


def clean(caption):
    """Lower case, accents stripped [Sec. 3]; NFKD first, which can produce capitals"""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return "".join(char for char in decomposed if not unicodedata.combining(char))


def load_tokenizer(args, captions, run):
    """The run's tokenizer: the checkpoint's if it goes on, --tokenizer, or learned from captions"""
    path = run.folder / "tokenizer.model"
    if run.world.is_main:
        if run.checkpoint:
            with common.reading(run.path, common.CHECKPOINT):
                content = run.checkpoint["tokenizer"].numpy().tobytes()
        elif args.tokenizer:
            content = read_tokenizer(args.tokenizer).serialized_model_proto()
        else:
            step = math.ceil(len(captions) / MAX_CAPTIONS)
            chosen = progress(range(0, len(captions), step), desc="tokenizer", unit=" captions")
            content = train_tokenizer((clean(captions[i]) for i in chosen), args.vocab_size)
        common.write_file(path, lambda file: file.write(content))
    return read_tokenizer(path)


def train_tokenizer(captions, vocab_size):
    """SentencePiece BPE [Sec. 3] -> the serialised model, of at most `vocab_size` tokens"""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            split_by_unicode_script=True,  # no piece joins letters and punctuation [Sec. 3]
            character_coverage=1.0,
            unk_id=UNKNOWN,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols="[SOS],[EOS],[MASK]",
            minloglevel=3,
        )
    except RuntimeError as error:  # more letters than tokens, or no letter at all
        reason = str(error).split("] ")[-1].strip()
        fail(f"no tokenizer of {vocab_size} tokens can be trained on these captions ({reason})")
    return model.getvalue()


def read_tokenizer(path):
    with common.reading(path, "a SentencePiece model, the file of --tokenizer"):
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    right = ids == [SOS, EOS, MASK]
    check(right, f"--tokenizer {path} must have [SOS], [EOS], [MASK] as ids 1, 2, 3")
    return tokenizer


# --------------------------------------------------------------------------- samples and batches


def sample(data, tokenizer, args, index, rng):
    """A photo with one of its captions; rng None: centred, with its first caption."""
    photo = common.photo(
        data.images, index, rng, args.image_size, args.crop_min, args.colour_jitter
    )
    captions = data.captions_of(index)
    caption = captions[0] if rng is None else captions[rng.integers(len(captions))]
    if photo["mirrored"]:
        caption = language.swap_left_right(caption)  # flipped with the photo [Sec. 3]
    tokens = [SOS, *tokenizer.encode(clean(caption)), EOS][: args.max_length]
    masked = None
    if args.task == "masked_lm":
        rng = rng or np.random.default_rng([args.seed, 0, index])
        masked = mask_tokens(tokens, tokenizer.get_piece_size(), rng)
    return {**photo, "tokens": tokens, "masked": masked, "task": args.task}


def mask_tokens(tokens, vocab_size, rng):
    """15% of the words' tokens, at least one: 85% [MASK], 10% any, 5% kept [official code]"""
    masked = list(tokens)
    words = range(1, len(tokens) - (tokens[-1] == EOS))
    for t in rng.permutation(words)[: math.ceil(0.15 * len(words))]:
        draw = rng.random()
        if draw < 0.85:
            masked[t] = MASK
        elif draw < 0.95:
            masked[t] = int(rng.integers(MASK + 1, vocab_size))
    return masked


def pad(sequences):
    """Lists of ids -> (B, T) int64, zeros behind"""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in sequences], batch_first=True)


def collate(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T), and what the task needs

    `predicted` are the flat indices of the positions that have something to predict: not padding,
    nor unknown tokens, which share its id [official code]. They are found on the host: finding them
    on the GPU would make every step wait for it.
    """
    tokens, task = pad([sample["tokens"] for sample in samples]), samples[0]["task"]
    batch = {**common.collate_photos(samples), "tokens": tokens}
    if task in ("bicaptioning", "captioning"):
        batch["predicted"] = places(tokens[:, 1:] != UNKNOWN)
    if task == "bicaptioning":
        backward = pad([sample["tokens"][::-1] for sample in samples])
        batch["backward_tokens"] = backward
        batch["backward_predicted"] = places(backward[:, 1:] != UNKNOWN)
    if task == "masked_lm":
        masked = pad([sample["masked"] for sample in samples])
        batch |= {"masked": masked, "predicted": places((masked == MASK) & (tokens > MASK))}
        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        batch["visible"] = torch.arange(tokens.size(1)) < lengths[:, None]
    return batch


def places(mask):
    """(B, T) bool -> flat indices of what is true"""
    return mask.flatten().nonzero().squeeze(1)


# ----------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017), with the parameter names of torch's.

    Projecting is a step of its own, so that decoding can keep keys and values.
    """

    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def per_head(self, x):
        """(B, T, H) -> (B, heads, T, H / heads)"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def query_key_value(self, x):
        x = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return [self.per_head(part) for part in x.chunk(3, dim=-1)]

    def query(self, x):
        hidden = x.size(-1)
        # split, not slices: gradients are joined once instead of padded with zeros and added.
        weight, _ = self.in_proj_weight.split((hidden, 2 * hidden))
        bias, _ = self.in_proj_bias.split((hidden, 2 * hidden))
        return self.per_head(F.linear(x, weight, bias))

    def key_value(self, x):
        hidden = x.size(-1)
        _, weight = self.in_proj_weight.split((hidden, 2 * hidden))
        _, bias = self.in_proj_bias.split((hidden, 2 * hidden))
        return [self.per_head(part) for part in F.linear(x, weight, bias).chunk(2, dim=-1)]

    def forward(self, query, key, value, causal=False, mask=None):
        """Projected query, key, value; mask (B, 1, 1, S): True where a key is seen -> (B, T, H)"""
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
        return self.out_proj(x.transpose(1, 2).flatten(2))

    @staticmethod
    def weights(query, key):
        """How much each query looks at each key -> (B, T, S), the mean over the heads"""
        return (query @ key.mT / math.sqrt(query.size(-1))).softmax(-1).mean(1)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the image, feed-forward; each with dropout, residual, layer norm

    Parameter names are those of nn.TransformerDecoderLayer (post-norm [Sec. 3]).
    """

    def __init__(self, hidden, dropout):
        super().__init__()
        heads, feedforward = hidden // 64, 4 * hidden  # A and F [Sec. 3]
        self.self_attn = Attention(hidden, heads, dropout)
        self.multihead_attn = Attention(hidden, heads, dropout)
        self.linear1 = nn.Linear(hidden, feedforward)
        self.linear2 = nn.Linear(feedforward, hidden)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(hidden) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, causal=True, mask=None, past=None):
        """x (B, T, H); memory: keys and values of the image; past: those of earlier tokens

        -> x, and the keys and values of all tokens so far
        """
        query, key, value = self.self_attn.query_key_value(x)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            causal = False  # one new token, which sees all
        x = self.norm1(x + self.dropout(self.self_attn(query, key, value, causal, mask)))
        seen = self.multihead_attn(self.multihead_attn.query(x), *memory)
        x = self.norm2(x + self.dropout(seen))
        hidden = self.dropout(F.gelu(self.linear1(x)))
        x = self.norm3(x + self.dropout(self.linear2(hidden)))
        return x, (key, value)


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
        return x * (tokens != UNKNOWN).unsqueeze(-1)  # padding, unknown: zero [official code]


class TextualHead(nn.Module):
    """A Transformer that reads tokens and an image [Sec. 3]. Module names of the official code."""

    def __init__(self, channels, vocab_size, hidden, layers, dropout, max_length, init_std=0.02):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = Embedding(vocab_size, hidden, dropout, max_length)
        decoder = nn.ModuleList(DecoderLayer(hidden, dropout) for _ in range(layers))
        self.transformer = nn.ModuleDict({"layers": decoder})
        self.output = nn.Linear(hidden, vocab_size)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, Attention):
                nn.init.normal_(module.in_proj_weight, std=init_std)
        nn.init.zeros_(self.embedding.words.weight[UNKNOWN])
        self.output.weight = self.embedding.words.weight  # weight tying [Sec. 3]

    def share(self, other):
        """Use the other direction's parts; only the Transformer is a direction's own [Sec. 3]."""
        self.visual_projection = other.visual_projection
        self.embedding, self.output = other.embedding, other.output
        return self

    def project(self, features):
        """(B, channels, h, w) -> the image's vectors (B, h * w, H)"""
        return self.visual_projection(features.flatten(2).mT)

    def memory(self, projected):
        """The image's vectors -> keys and values for each layer"""
        return [layer.multihead_attn.key_value(projected) for layer in self.transformer["layers"]]

    def forward(self, tokens, memory, causal=True, mask=None, past=None):
        """tokens (B, T) -> vectors (B, T, H), and for each layer the keys and values so far"""
        first = past[0][0].size(2) if past else 0
        return self.decode(self.embedding(tokens, first), memory, causal, mask, past)

    def decode(self, x, memory, causal=True, mask=None, past=None):
        """The Transformer, from embedded tokens x (B, T, H)"""
        present = []
        for n, layer in enumerate(self.transformer["layers"]):
            x, kept = layer(x, memory[n], causal, mask, past[n] if past else None)
            present.append(kept)
        return x, present


class VirTex(nn.Module):
    """Backbone and textual heads; calling it gives the losses of the task by name [Sec. 3, 4.2].

    visual["cnn"] is the backbone; textual and backward_textual are the two directions.
    """

    def __init__(self, arch, vocab_size, hidden, layers=1, dropout=0.1, max_length=30,
                 task=TASKS[0], init_std=0.02):  # fmt: skip
        super().__init__()
        self.task = task
        self.visual = nn.ModuleDict({"cnn": common.build_backbone(arch)})
        channels = self.visual["cnn"].channels
        if task == "token_classification":
            self.textual = nn.ModuleDict({"output": nn.Linear(channels, vocab_size)})
            return
        sizes = channels, vocab_size, hidden, layers, dropout, max_length, init_std
        self.textual = TextualHead(*sizes)
        if task == "bicaptioning":
            self.backward_textual = TextualHead(*sizes).share(self.textual)

    def forward(self, images, tokens, **batch):
        """images (B, 3, h, w), the rest from `collate` -> {name: loss}"""
        features = self.visual["cnn"](images)
        if self.task == "token_classification":
            logits = self.textual["output"](features.mean((2, 3)))
            return {"token_classification": token_set_loss(logits, tokens)}
        projected = self.textual.project(features)
        if self.task == "masked_lm":
            return {"masked_lm": self.masked_loss(projected, tokens, **batch)}
        return self.caption_losses(projected, tokens, **batch)

    def caption_losses(self, projected, tokens, predicted, backward_tokens=None,
                       backward_predicted=None):  # fmt: skip
        """Minus Eq. 1, per direction and averaged over its tokens: each token is predicted from
        the image and from the tokens before it in the direction of reading.
        """
        heads, sequences, predicted = {"forward": self.textual}, [tokens], [predicted]
        if self.task == "bicaptioning":
            heads["backward"] = self.backward_textual
            sequences.append(backward_tokens)
            predicted.append(backward_predicted)
        # What the directions share, embedding and output layer, is run once for both.
        inputs = torch.cat([sequence[:, :-1] for sequence in sequences])
        embedded = self.textual.embedding(inputs).chunk(len(heads))
        vectors = []
        for head, x in zip(heads.values(), embedded):
            x, _ = head.decode(x, head.memory(projected))
            vectors.append(x)
        targets = [sequence[:, 1:] for sequence in sequences]
        losses = prediction_losses(self.textual.output, vectors, targets, predicted)  # Eq. 1
        return dict(zip(heads, losses))

    def masked_loss(self, projected, tokens, masked, predicted, visible):
        """Masked language modelling: [MASK]ed tokens from the image and all other tokens"""
        memory, mask = self.textual.memory(projected), visible[:, None, None]
        vectors, _ = self.textual(masked, memory, causal=False, mask=mask)
        return prediction_losses(self.textual.output, [vectors], [tokens], [predicted])[0]


def prediction_losses(output, vectors, targets, predicted):
    """Mean cross-entropy of each (B, T) of `targets` given its vectors (B, T, H)

    Only the positions `predicted` go through the vocabulary layer: padding costs nothing.
    """
    logits = output(torch.cat([x.flatten(0, 1)[p] for x, p in zip(vectors, predicted)]))
    targets = torch.cat([target.flatten()[p] for target, p in zip(targets, predicted)])
    losses = F.cross_entropy(logits, targets, reduction="none").split([len(p) for p in predicted])
    return [loss.sum() / max(1, len(loss)) for loss in losses]


def token_set_loss(logits, tokens):
    """Softmax cross-entropy with the set of a caption's K tokens, each 1/K [Sec. 4.1, 4.2]"""
    targets = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, tokens, 1.0)
    targets[:, : MASK + 1] = 0  # neither special tokens nor padding
    return F.cross_entropy(logits.float(), targets / targets.sum(1, keepdim=True).clamp(min=1))


def compile_parts(model):
    model.visual["cnn"].compile()
    for head in model.children():
        if isinstance(head, TextualHead):
            head.decode = torch.compile(head.decode, dynamic=True)  # captions have all lengths


# ------------------------------------------------------------------------------------- optimizer


def parameter_groups(model, lr, text_lr, weight_decay):
    """The backbone at `lr`, the rest at `text_lr`; no decay on norms and biases of the heads."""
    backbone, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if name.startswith("visual.cnn."):
            backbone.append(parameter)
        elif re.search(r"textual\.(embedding|transformer)\..*(norm|bias)", name):
            plain.append(parameter)
        else:
            decayed.append(parameter)
    groups = (backbone, lr, weight_decay), (decayed, text_lr, weight_decay), (plain, text_lr, 0.0)
    keys = "params", "lr", "weight_decay"
    return [dict(zip(keys, group)) for group in groups if group[0]]


class LookAhead:
    """Look-ahead: every k steps the slow weights move by alpha towards the fast ones, which go on
    from there [Zhang et al. 2019; Sec. 3: k = 5, alpha = 0.5].
    """

    def __init__(self, optimizer, k, alpha):
        self.k, self.alpha, self.steps = k, alpha, 0
        self.fast = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    @torch.no_grad()
    def step(self):
        """Call after the optimizer's own step."""
        self.steps += 1
        if self.steps % self.k == 0:
            torch._foreach_lerp_(self.slow, self.fast, self.alpha)
            torch._foreach_copy_(self.fast, self.slow)

    def state_dict(self):
        return {"steps": self.steps, "slow": self.slow}

    def load_state_dict(self, state):
        self.steps = common.natural(state["steps"])
        for mine, loaded in zip(self.slow, state["slow"], strict=True):
            mine.copy_(loaded)


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, val, tokenizer, args, device):
    """Mean loss per predicted token, each photo with its first caption -> {name: loss}

    In token classification the mean is over captions.
    """
    model.eval()
    samples = common.Samples(partial(sample, val, tokenizer, args), len(val))
    totals, numbers = {}, {}
    for batch in common.validation_batches(samples, args.workers, collate, device):
        del batch["jitter"]
        with common.autocast(device, args.amp):
            losses = model(common.augment(batch.pop("images")), **batch)
        for name, loss in losses.items():
            part = "backward_predicted" if name == "backward" else "predicted"
            n = len(batch.get(part, batch["tokens"]))
            totals[name] = totals.get(name, 0.0) + n * loss.item()
            numbers[name] = numbers.get(name, 0) + n
    return {name: total / max(1, numbers[name]) for name, total in totals.items()}


# --------------------------------------------------------------------------- captions for photos


def load_virtex(path, tokenizer_path=None):
    """A captioning model of ours or an official one -> VirTex in eval mode, tokenizer, image size

    Sizes are read off the weights. An official checkpoint has no tokenizer: give coco_10k.model.
    """
    from sources import backbone_weights  # only here: trainings do without it

    content = common.read_checkpoint(path)
    with common.reading(path, common.CHECKPOINT):
        state = content.get("model", {}) if isinstance(content, dict) else {}
        args = content.get("args", {}) if state else {}
        captions = "textual.embedding.words.weight" in state and args.get("task") != "masked_lm"
        problem = f"{path} holds no captioning model (a backbone alone cannot caption)"
        check(captions, f"{problem}: give a checkpoint.pth of --task bicaptioning or captioning")
        if not tokenizer_path:
            hint = "add --tokenizer FILE (the official one is coco_10k.model)"
            check("tokenizer" in content, f"{path} holds no tokenizer: {hint}")
            proto = content["tokenizer"].numpy().tobytes()
            tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
        else:
            tokenizer = read_tokenizer(tokenizer_path)
        vocab_size, hidden = state["textual.embedding.words.weight"].shape
        pieces = tokenizer.get_piece_size()
        check(pieces == vocab_size, f"the tokenizer has {pieces} tokens and {path} {vocab_size}")

        bidirectional = any(name.startswith("backward_textual.") for name in state)
        model = VirTex(
            backbone_weights(content, path)[0],
            vocab_size,
            hidden,
            layers=sum(re.match(r"textual\..*\.linear1\.bias", name) is not None for name in state),
            max_length=len(state["textual.embedding.positions.weight"]),
            task="bicaptioning" if bidirectional else "captioning",
        )
        state = {name: v for name, v in state.items() if not name.startswith("visual.cnn.fc.")}
        model.load_state_dict(state)
        return model.eval(), tokenizer, common.image_side(args.get("image_size", 224))


@torch.no_grad()
def beam_search(head, projected, beams=5, max_length=30, cached=True):
    """The most probable captions -> tokens (B, T) from [SOS] on, zeros behind [EOS]; log p (B,)

    projected: the images' vectors (B, S, H). A hypothesis that has ended keeps its score and its
    place; the search is over when all have ended. cached: keep the keys and values of earlier
    tokens instead of computing them again (the same result, 7 times as fast).
    """
    batch, vocab_size = len(projected), head.output.out_features
    memory = []
    for key, value in head.memory(projected):
        memory.append((key.repeat_interleave(beams, 0), value.repeat_interleave(beams, 0)))
    tokens = torch.full((batch, beams, 1), SOS, device=projected.device)
    alike = [0.0] + [-math.inf] * (beams - 1)  # all beams are the same at first: one counts
    scores = projected.new_tensor(alike).repeat(batch, 1)
    first_row = beams * torch.arange(batch, device=projected.device)[:, None]
    past = None
    while tokens.size(2) < max_length and not (tokens == EOS).any(2).all():
        flat = tokens.flatten(0, 1)
        vectors, present = head(flat[:, -1:] if past else flat, memory, past=past)
        log_p = head.output(vectors[:, -1]).float().log_softmax(-1).view(batch, beams, vocab_size)
        ended = (tokens == EOS).any(2)
        log_p[ended] = -math.inf  # nothing follows [EOS]...
        log_p[..., UNKNOWN][ended] = 0.0  # ...but padding, at no cost
        scores, choice = (scores[:, :, None] + log_p).flatten(1).topk(beams)
        beam, token = choice // vocab_size, choice % vocab_size
        before = tokens.gather(1, beam[:, :, None].expand(-1, -1, tokens.size(2)))
        tokens = torch.cat([before, token[:, :, None]], 2)
        if cached:
            rows = (first_row + beam).flatten()
            past = [(key[rows], value[rows]) for key, value in present]
    return tokens[:, 0], scores[:, 0]


@torch.no_grad()
def word_attention(head, projected, tokens, pieces):
    """Where the last layer looks when it predicts each word [Sec. 4.4] -> list of (word, (h, w))

    projected (1, S, H); tokens (T,) from [SOS] to [EOS]; pieces: the tokens as strings, "▁" at
    the start of a word. The map of a word is the mean over its tokens, each of which is predicted
    at the position before it; it sums to one.
    """
    x = head.embedding(tokens[None, :-1])
    for layer, (key, value) in zip(head.transformer["layers"], head.memory(projected)):
        attended = layer.self_attn(*layer.self_attn.query_key_value(x), causal=True)
        query = layer.multihead_attn.query(layer.norm1(x + attended))
        weights = layer.multihead_attn.weights(query, key)[0]
        x, _ = layer(x, (key, value))
    side, words = math.isqrt(projected.size(1)), []
    for t, piece in enumerate(pieces):
        if piece.startswith("▁") or not words:
            words.append(["", []])
        words[-1][0] += piece.lstrip("▁")
        words[-1][1].append(weights[t])
    return [(word, torch.stack(maps).mean(0).view(side, side)) for word, maps in words]


@torch.no_grad()
def caption_images(model, tokenizer, images, args, size, device):
    """Yield (n, caption, tokens (T,), image vectors (1, S, H), pixels) of each readable image"""
    crops = common.loader(common.CropView(images, size, part=1.0), 16, args.workers)
    length = model.textual.embedding.positions.num_embeddings
    number = 0
    for pixels, readable in progress(crops, desc="captions", unit=" batches", leave=False):
        features = model.visual["cnn"](common.augment(pixels.to(device)))
        projected = model.textual.project(features)
        tokens, _ = beam_search(model.textual, projected, args.beams, length)
        for n, row in enumerate(tokens):
            ids = row.tolist()
            end = ids.index(EOS) + 1 if EOS in ids else len(ids)
            caption = tokenizer.decode([token for token in ids[:end] if token > MASK])
            if readable[n]:
                yield number, caption, row[:end], projected[n : n + 1], pixels[n]
            else:
                say(f"{images[number]}: cannot be decoded, is it a photo?")
            number += 1


def caption_photos(args, device):
    """`--caption`: print a caption for each photo and draw where its words look."""
    from pictures import draw_attention  # only here: trainings do without it

    model, tokenizer, size = load_virtex(args.weights, args.tokenizer)
    photos, folder = common.ImageFiles(args.caption), Path(args.output, "captions")
    photos.check_files("check the path")
    folder.mkdir(parents=True, exist_ok=True)
    captions = caption_images(model.to(device), tokenizer, photos, args, size, device)
    for n, caption, tokens, projected, pixels in captions:
        pieces = [tokenizer.id_to_piece(token) for token in tokens[1:].tolist() if token != EOS]
        words = word_attention(model.textual, projected, tokens, pieces)
        picture = folder / f"{n + 1}_{Path(photos[n]).stem}.png"
        draw_attention(Image.fromarray(pixels.numpy()), caption, words, picture)
        say(f"{photos[n]}: {caption}  ({picture})")


def evaluate_captions(args, device):
    """`--evaluate`: caption the validation split and score it against its own captions [Fig. 6]."""
    try:
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.spice.spice import Spice
        from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    except ImportError:
        fail("--evaluate needs the captioning metrics: python -m pip install pycocoevalcap")
    check(shutil.which("java"), "--evaluate needs Java for the metrics: apt install default-jre")
    model, tokenizer, size = load_virtex(args.weights, args.tokenizer)
    val = load_captions(args, args.val_split)
    captions = caption_images(model.to(device), tokenizer, val.images, args, size, device)
    written = {n: [{"caption": caption}] for n, caption, *_ in captions}
    truth = {n: [{"caption": caption} for caption in val.captions_of(n)] for n in written}
    path = Path(args.output, f"captions_{args.val_split}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_json(path, [{"image": val.images[n], **row[0]} for n, row in written.items()])
    truth, written = PTBTokenizer().tokenize(truth), PTBTokenizer().tokenize(written)
    say(f"the captions are in {path}")
    for metric in (Cider(), Spice()):
        try:
            score = 100 * metric.compute_score(truth, written)[0]
            say(f"{metric.method()} {score:.1f} on {len(written)} images")
        except (OSError, subprocess.CalledProcessError) as error:  # SPICE: CoreNLP and Java 8
            say(f"{metric.method()} was not measured: {error}")


if __name__ == "__main__":
    common.run(main, get_args)
