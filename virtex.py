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
    shared embeddings, tied output [Sec. 3]    TextualHead.__init__, TextualHead.share
    crops, colours [Sec. 3]                    common.load_image, common.augment
    flip with left and right swapped [Sec. 3]  common.load_image (photo), make_sample (caption)
    tokenizer [Sec. 3]                         train_tokenizer
    SGD with look-ahead, two rates [Sec. 3]    parameter_groups, LookAhead
    warm-up and cosine [Sec. 3]                common.lr_factor
    early stopping [Sec. 3]                    --keep-every, then docs/output.md
    other tasks [Sec. 4.1, 4.2]                VirTex.masked_loss, token_set_loss

What to expect: with the paper's head (H = 2048, 10K words) the loss starts near 12.5 in each
direction, not at ln 10000 = 9.2: the output layer is the token embedding, so at first each
position predicts the token it has just read. Then comes a plateau, near 3.2 per direction on
Flickr8k (H = 512): the heads write plausible captions without looking at the photo. The loss falls
again when the image features start to lower it. If training stalls there, train longer or raise
--text-lr. A finished run is in docs/logs/virtex.
"""

import io
import math
import re
import unicodedata
from functools import partial

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import error_context, fraction, positive, positive_int, print_main, progress, require

eval_linear = common.import_if_there("eval_linear")  # the probe at the end

CLASSIFICATION = "token_classification", "multilabel_classification"
TASKS = "bicaptioning", "captioning", "masked_lm", *CLASSIFICATION

# fmt: off
RECIPES = {  #           demo        small       paper
    "arch":             ("resnet18", "resnet18", "resnet50"),  # Sec. 3
    "image_size":       (48,         112,        224),         # Sec. 3
    "crop_min":         (1.0,        0.2,        0.2),         # Sec. 3
    "colour_jitter":    (0.0,        1.0,        1.0),         # official code
    "hidden":           (256,        512,        2048),        # Sec. 4.1
    "init_std":         (0.06,       0.02,       0.02),        # official code; demo: ours
    "zero_residual":    (False,      False,      True),        # official code: class VirTex
    "dropout":          (0.0,        0.1,        0.1),         # official code
    "vocab_size":       (10_000,     10_000,     10_000),      # Sec. 3; fewer for few captions
    "batch_size":       (32,         32,         256),         # Sec. 3
    "iters":            (540,        None,       500_000),     # Sec. 3
    "epochs":           (None,       25.0,       None),
    "optimizer":        ("adamw",    "sgd",      "sgd"),       # Sec. 3
    "lr":               (2e-3,       0.1,        0.2),         # Sec. 3
    "text_lr":          (5e-4,       0.1,        1e-3),        # Sec. 3
    "warmup":           (0.05,       0.02,       0.02),        # Sec. 3: 10K of 500K iterations
    "weight_decay":     (1e-2,       1e-4,       1e-4),        # Sec. 3
    "lookahead_k":      (5,          5,          5),           # Sec. 3
    "lookahead_alpha":  (1.0,        0.5,        0.5),         # Sec. 3; 1: no look-ahead
    "max_norm":         (10.0,       10.0,       10.0),        # of the gradient: official code
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        2000,       5000),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
# fmt: on
MAX_LENGTH = 30  # tokens per caption, [SOS] and [EOS] included [official code]


def get_args(argv=None):
    recipe = common.choose_recipe(RECIPES, argv)
    parser = common.flag_parser("virtex", __doc__, recipe)
    add = parser.add_argument_group("VirTex").add_argument
    tasks = f"{', '.join(TASKS)}; all but the first are ablations [Tab. 1, Fig. 5]"
    add("--task", choices=TASKS, default=TASKS[0], metavar="TASK", help=tasks)
    add("--layers", type=positive_int, default=1, help="L; 2 or 3 generally help [Sec. 4.2]")
    add("--hidden", type=positive_int, help="H; larger is better but slower; sets A = H/64, F = 4H")
    add("--dropout", type=fraction, help="in the heads; raise it if captions are few")
    add("--text-lr", type=positive, help="peak rate of heads; 0.05 to 0.1 with SGD on little data")
    add("--init", help="start from a backbone, a checkpoint.pth with its heads, or imagenet")
    add("--tokenizer", help="a SentencePiece .model, instead of one trained on the captions")
    add("--fraction", type=fraction, default=1.0, help="of photos; scale --iters yourself [Fig. 4]")
    add("--captions-per-image", type=positive_int, help="use at most this many captions [Fig. 4]")
    add("--validate-every", type=positive_int, help="iterations between validation losses")
    args = common.parse(parser, argv)
    batch_scale = args.batch_size / recipe["batch_size"]  # rates grow with the batch
    args.lr = args.lr or batch_scale * recipe["lr"]
    args.text_lr = args.text_lr or batch_scale * recipe["text_lr"]
    require(args.hidden % 64 == 0, f"--hidden {args.hidden} must be a multiple of 64 (head dim)")
    return args


def main(args):
    world = common.init_distributed()
    device = world.device
    args.amp = common.choose_amp(device, args.amp)

    # Data: photos with at least one caption, and a tokenizer learned from the captions.
    train = common.caption_data(args.data, args.root, args.train_split)
    train = subset(train, args.fraction, args.captions_per_image, args.seed).captioned()
    val = common.caption_data(args.data, args.root, args.val_split).captioned()
    trained_on_tags = args.task == "multilabel_classification"
    if trained_on_tags:
        train = with_tags(train)
        val = with_tags(val)
    probe = eval_linear and eval_linear.Probe(args, train, val, trained_on_tags)
    run = common.Run(args, "virtex", world, train)  # reads the checkpoint or --init
    tokenizer = load_tokenizer(args, train, run)
    vocab_size = tokenizer.get_piece_size()
    if trained_on_tags:
        vocab_size = FIRST_TAG + len(train.tag_names)
    iters = args.iters or math.ceil(args.epochs * len(train) / args.batch_size)
    sizes = f"{len(train)} photos ({len(val)} for validation), {sum(train.num_captions)} captions"
    lrs = f"lr {args.lr:g}, text lr {args.text_lr:g}"
    print_main(f"{sizes}, {vocab_size} outputs; {iters} iterations at {lrs}")

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = VirTex(
        args.arch,
        vocab_size,
        args.hidden,
        layers=args.layers,
        dropout=args.dropout,
        task=args.task,
        init_std=args.init_std,
        zero_residual=args.zero_residual and args.arch != "vgg16_bn",  # which has none
    )
    backbone = model.visual["cnn"]
    run.initialize(model, backbone)
    model.to(device, memory_format=torch.channels_last)
    groups = parameter_groups(model, args.lr, args.text_lr, args.weight_decay)
    optimizer = common.build_optimizer(args.optimizer, groups, args.lr, args.weight_decay)
    lookahead = LookAhead(optimizer, args.lookahead_k, args.lookahead_alpha)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, lookahead=lookahead, scaler=scaler)
    if args.compile:
        compile_parts(model)
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(make_sample, train, tokenizer, args), len(train))
    tokenizer_bytes = bytearray(tokenizer.serialized_model_proto())
    state = {"tokenizer": torch.frombuffer(tokenizer_bytes, dtype=torch.uint8)}
    for iteration, micro_batches in run.steps(samples, collate, iters, **state):
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup)  # [Sec. 3]
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part, batch in enumerate(micro_batches, 1):
            parallel.require_backward_grad_sync = part == args.accumulate  # DDP: one all-reduce
            images = common.augment(batch.pop("images"), batch.pop("jitter"))  # (B, 3, h, w)
            with common.autocast(device, args.amp):
                losses = parallel(images, **batch)
            loss = sum(losses.values())  # both directions [Eq. 1]
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss, **losses)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        scaler.step(optimizer)
        scaler.update()
        lookahead.step()
        if world.is_main and run.due("validate") and iteration < iters:
            run.validation = validate(model, val, tokenizer, args, device)
        run.log(lr=args.lr * lr_scale, text_lr=args.text_lr * lr_scale)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        common.save_weights(run.folder / "backbone.pth", backbone)
        validation = validate(model, val, tokenizer, args, device)
        run.finish(probe, backbone, validation_loss=validation)


# ---------------------------------------------------------------------------- captions to tokens

PAD = UNK = 0  # padding and unknown tokens share an id, as in the official model
SOS, EOS, MASK = 1, 2, 3
FIRST_TAG = 4  # in multi-label classification, ids of tags replace those of words
MAX_CAPTIONS = 2_000_000  # at most, evenly spaced, to train the tokenizer [ours]


def subset(data, fraction, captions_per_image, seed):
    """A random fraction of images, each with at most so many captions [Fig. 4] -> CaptionData"""
    if fraction == 1 and not captions_per_image:
        return data
    order = np.random.default_rng(seed).permutation(len(data))
    chosen = np.sort(order[: max(1, round(fraction * len(data)))])
    data = data.select(chosen)
    if not captions_per_image:
        return data
    captions = [data.captions_of(i) for i in range(len(data))]
    for i, strings in zip(chosen, captions):
        np.random.default_rng([seed, 0, i]).shuffle(strings)  # of a photo alike for any fraction
    return data.with_captions(strings[:captions_per_image] for strings in captions)


def with_tags(data):
    """-> CaptionData of the images that have tags [official code]"""
    keep = [i for i in range(len(data)) if data.tags[i]]
    require(keep, "--task multilabel_classification needs tags (for coco: instances_*.json)")
    return data.select(keep)


def clean(caption):
    """Lower-case without accents [Sec. 3]; NFKD comes first, as it can produce capitals"""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return "".join(char for char in decomposed if not unicodedata.combining(char))


def load_tokenizer(args, train, run):
    """-> that of the checkpoint or --init, even beside --tokenizer, else one trained on captions"""
    path = run.folder / "tokenizer.model"
    if run.world.is_main:
        if "tokenizer" in run.saved:
            content = run.saved["tokenizer"].numpy().tobytes()
        elif args.tokenizer:
            content = read_tokenizer(args.tokenizer).serialized_model_proto()
        else:
            every = math.ceil(sum(train.num_captions) / MAX_CAPTIONS)
            chosen = progress(train.all_captions()[::every], desc="tokenizer", unit=" captions")
            content = train_tokenizer(map(clean, chosen), args.vocab_size)
        path.write_bytes(content)
    common.barrier(run.world)
    return read_tokenizer(path)


def train_tokenizer(captions, vocab_size):
    """SentencePiece BPE [Sec. 3] -> the serialised model, of at most `vocab_size` tokens"""
    model = io.BytesIO()
    with error_context("the tokenizer needs captions, and an alphabet smaller than vocab_size"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            split_by_unicode_script=True,  # no piece joins letters and punctuation [Sec. 3]
            character_coverage=1.0,
            unk_id=UNK,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols="[SOS],[EOS],[MASK]",
            minloglevel=3,
        )
    return model.getvalue()


def read_tokenizer(path):
    with error_context(f"{path} should be a SentencePiece model"), open(path, "rb") as file:
        tokenizer = sentencepiece.SentencePieceProcessor(model_proto=file.read())
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    require(ids == [SOS, EOS, MASK], f"{path} must have [SOS], [EOS], [MASK] as ids 1, 2, 3")
    return tokenizer


# --------------------------------------------------------------------------- samples and batches


def make_sample(data, tokenizer, args, index, rng):
    """A photo with one of its captions; if rng is None, the centre crop and the first caption."""
    photo = common.load_image(data.images[index], rng, args)
    captions = data.captions_of(index)
    caption = captions[0] if rng is None else captions[rng.integers(len(captions))]
    if photo["flipped"]:
        caption = common.swap_left_right(caption)  # flipped with the photo [Sec. 3]
    tokens = [SOS, *tokenizer.encode(clean(caption)), EOS][:MAX_LENGTH]
    if args.task == "multilabel_classification":
        tokens = [FIRST_TAG + tag for tag in data.tags_of(index)]
    masked = None
    if args.task == "masked_lm":
        rng = rng or np.random.default_rng([args.seed, 0, index])
        masked = mask_tokens(tokens, tokenizer.get_piece_size(), rng)
    return {**photo, "tokens": tokens, "masked": masked, "task": args.task}


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
            masked[t] = int(rng.integers(MASK + 1, vocab_size))
    return masked


def pad(sequences):
    """Lists of ids -> (B, T) int64, zero-padded on the right"""
    return nn.utils.rnn.pad_sequence(list(map(torch.tensor, sequences)), batch_first=True)


def collate(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T), and what the task needs

    Target positions are flat indices of the tokens to predict, into tokens[:, 1:], for masked_lm
    into tokens: not padding, nor unknown tokens, which share its id [official code]. Finding them
    on the GPU would synchronise it.
    """
    batch = common.collate_images(samples)
    task = samples[0]["task"]
    batch["tokens"] = tokens = pad([sample["tokens"] for sample in samples])
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
        build_head = partial(
            TextualHead, channels, vocab_size, hidden, layers, dropout, max_length, init_std
        )
        self.textual = build_head()
        if task == "bicaptioning":
            self.backward_textual = build_head().share(self.textual)

    def forward(self, images, tokens, **batch):
        """images (B, 3, h, w), the rest from `collate` -> {name: loss}"""
        features = self.visual["cnn"](images)  # (B, channels, h / 32, w / 32)
        if self.task in CLASSIFICATION:
            logits = self.textual["output"](features.mean((2, 3)))
            return {self.task: token_set_loss(logits, tokens)}
        image_features = self.textual.project(features)  # (B, S, H), S = h / 32 * w / 32: N_I
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
        """Minus Eq. 1, averaged over the tokens of each direction: each token is predicted from
        the image and from the tokens before it in the direction of reading.
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
        decoder = nn.ModuleList()
        for _ in range(layers):
            layer = nn.TransformerDecoderLayer(  # post-norm [Sec. 3]
                d_model=hidden,
                nhead=hidden // 64,  # A
                dim_feedforward=4 * hidden,  # F
                dropout=dropout,
                activation="gelu",
                batch_first=True,
            )
            decoder.append(layer)
        self.transformer = nn.ModuleDict({"layers": decoder})
        self.output = nn.Linear(hidden, vocab_size)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=init_std)
        nn.init.zeros_(self.embedding.words.weight[PAD])
        self.output.weight = self.embedding.words.weight  # weight tying [Sec. 3]

    def share(self, other):
        """Use the other direction's embedding, output [Sec. 3] and projection [official code]."""
        self.visual_projection = other.visual_projection
        self.embedding = other.embedding
        self.output = other.output
        return self

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
        for layer in self.transformer["layers"]:
            x = layer(
                x,
                image_features,
                tgt_mask=future,
                tgt_is_causal=causal,
                tgt_key_padding_mask=padding,
            )
        return x


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
def validate(model, val, tokenizer, args, device):
    """-> {name: mean loss}: per token of the photos' first captions; classification: per photo"""
    model.eval()
    samples = common.Samples(partial(make_sample, val, tokenizer, args), len(val))
    totals = {}
    counts = {}
    for batch in common.validation_batches(samples, args.workers, collate, device):
        del batch["jitter"]
        with common.autocast(device, args.amp):
            losses = model(common.augment(batch.pop("images")), **batch)
        for name, loss in losses.items():
            positions = "backward_target_positions" if name == "backward" else "target_positions"
            count = len(batch.get(positions, batch["tokens"]))
            totals[name] = totals.get(name, 0.0) + count * loss.item()
            counts[name] = counts.get(name, 0) + count
    model.train()
    means = {name: total / max(1, counts[name]) for name, total in totals.items()}
    print_main(f"validation loss: {common.format_scores(means)}")
    return means


if __name__ == "__main__":
    common.run(main, get_args)
