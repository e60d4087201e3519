"""ICMLM: a backbone learned by predicting masked words of captions with the help of the photo.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

One word of a caption is masked: a noun, adjective or verb. A frozen language model reads the rest
of the caption, and the photo has to supply the missing word [Sec. 3.2]. In tfm a Transformer
encoder reads photo and text together; in att-fc the text only says where to look, and the word is
predicted from the features there. Both variants also train tag prediction.

    laptop        python icmlm.py
    own photos    python tp.py --data photos.jsonl
                  python icmlm.py --data photos.jsonl --init runs/tp-photos/backbone.pth
    one GPU       python icmlm.py --data coco --accumulate 4 --init runs/tp-coco/backbone.pth
    eight GPUs    torchrun --nproc_per_node=8 icmlm.py --data coco \\
                      --init runs/tp-coco/backbone.pth
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 icmlm.py --data coco   (on both; shared --output)
    VG, VGG-16    torchrun --nproc_per_node=4 tp.py --data vg --arch vgg16_bn --labels rotation \\
                      --output runs/rotation-vg
                  torchrun --nproc_per_node=4 icmlm.py --data vg --arch vgg16_bn --head att-fc \\
                      --init runs/rotation-vg/backbone.pth
    attention     python -m downstream.masked_words photo.jpg --caption "a dog on a surfboard" \\
                      --word surfboard --weights runs/icmlm/checkpoint.pth

Where the paper is:

    Eq. 2, tag prediction                      language.tag_head, language.tag_loss
    Eqs. 3, 4, match of location and caption   AttentionHead.forward
    Eqs. 5, 6, attention, scores of tokens     AttFc.attention, AttFc.forward
    Eqs. 7, 8, losses                          main
    Eqs. 13, 14, 15, Transformer encoder       EncoderLayer.forward, Tfm
    triplets of photo, caption, word [Sec. 4]  find_words, make_sample
    masked token prediction [Tab. 1]           validate

What to expect: in tfm the loss `mlm` starts near that of the language model without a photo,
because the residual path of the new encoder layer carries its vectors; in att-fc it starts near
ln |V|, |V| being the vocabulary size. Every run ends with the accuracy of masked token prediction
[Tab. 1] with the photo, with another photo, and by the language model alone. If the first two are
alike, the model ignores the photo: start from the backbone of tp.py (--init), use --head att-fc,
and train its attention first (--warmup-attention 0.25). A finished run is in docs/logs/icmlm.
"""

import json
import math
import shutil
from array import array
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import common
import language
from common import fraction, positive_int, print_main, require

eval_linear = common.import_if_there("eval_linear")  # the probe at the end

HEADS = "tfm", "att-fc"

# fmt: off
RECIPES = {  #           demo        small       paper: ResNet-50
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.3
    "image_size":       (48,         112,        224),                  # App. F.2, for evaluation
    "crop_min":         (1.0,        0.2,        0.2),                  # ours
    "colour_jitter":    (0.0,        1.0,        1.0),                  # ours
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 3.2
    "lm_iters":         (200,        2000,       20_000),               # ours
    "lm_layers":        (2,          4,          4),                    # of scratch: ours
    "num_concepts":     (5000,       5000,       5000),                 # Sec. 4.3
    "heads":            (1,          1,          1),                    # Sec. 4.3
    "lambda_tp":        (4.0,        1.0,        0.1),                  # App. B
    "warmup_attention": (0.0,        0.0,        0.0),                  # App. F.1
    "optimizer":        ("adamw",    "adamw",    "sgd"),                # App. F.1
    "batch_size":       (32,         64,         512),                  # App. F.1
    "iters":            (440,        None,       500_000),              # App. F.1
    "epochs":           (None,       1.14,       None),                 # of triplets
    "lr":               (1e-3,       5e-4,       3e-2),                 # App. F.1
    "warmup":           (0.05,       0.1,        0.0),
    "steps":            ([],         [],         []),                   # App. F.1
    "weight_decay":     (1e-2,       1e-2,       1e-4),                 # App. F.1
    "log_every":        (10,         20,         20),
    "validate_every":   (1000,       1000,       5000),
    "checkpoint_every": (200,        500,        2000),
    "proxy_triplets":   (2000,       5000,       None),                 # at the end; None: all
    "probe_images":     (2000,       10_000,     10_000),
}
# fmt: on
VGG16 = {  # what the paper does differently with VGG-16
    "num_concepts": 1000,  # Sec. 4.2
    "lambda_tp": 1.0,  # App. B
    "warmup_attention": 0.25,  # App. F.1: 50K of 200K iterations, only for att-fc
    "optimizer": "radam",  # App. F.1, as all below
    "batch_size": 896,
    "iters": 200_000,
    "lr": 1e-4,
    "steps": [0.8, 0.9],
    "weight_decay": 1e-3,
}
ATTENTION_WIDTH = 512  # d_z of Eq. 3, per head [ours]
DROPOUT = 0.1  # in tfm [BERT]


def get_args(argv=None):
    given = common.peek(argv, "--arch", "--head", "--init")
    vgg = given.arch == "vgg16_bn"
    recipe = common.choose_recipe(RECIPES, argv, paper=VGG16 if vgg else {})
    if vgg:
        recipe["heads"] = 12  # in every recipe [Sec. 4]; one head overfits [App. B]; App. E: 8
    if given.head != "att-fc" or not given.init:  # attention needs trained features
        recipe["warmup_attention"] = 0.0
    parser = common.flag_parser("icmlm", __doc__, recipe)

    add = parser.add_argument_group("language model and concepts").add_argument
    add("--lm", help="BERT or RoBERTa, from the hub or a folder; scratch: trained on the captions")
    add("--lm-iters", type=positive_int, help="iterations for --lm scratch; more for many captions")
    words = "words to mask and to predict as tags [Sec. 4.2]"
    add("--pos", choices=language.POS, default="nn+adj+vb", help=words)
    add("--num-concepts", type=positive_int, help="keep the N most frequent [Sec. 4.2, 4.3]")
    add("--tagger", choices=language.TAGGERS, default="textblob", help="the paper uses spacy")

    add = parser.add_argument_group("model").add_argument
    add("--init", help="a backbone (of tp.py, for VGG-16 of rotations), a checkpoint.pth with its "
        "head, or imagenet")
    add("--head", choices=HEADS, default="tfm", help="att-fc: better on VOC [Sec. 4.1]")
    layers = "of tfm, or of fc; 2 give a worse backbone, except att-fc's on IN-1K [Tab. 5]"
    add("--layers", type=positive_int, default=1, help=layers)
    add("--heads", type=positive_int, help="attention heads of tfm, or of att [Sec. 4, 4.3]")

    add = parser.add_argument_group("training and validation").add_argument
    add("--lambda-tp", type=float, help="weight of tag prediction; 0 for none [Eq. 8]")
    add("--warmup-attention", type=fraction, help="fraction of training with a frozen backbone")
    add("--validate-every", type=positive_int, help="iterations between validation losses")
    args = common.parse(parser, argv)
    batch_scale = args.batch_size / recipe["batch_size"]
    args.lr = args.lr or batch_scale * recipe["lr"]
    return args


def main(args):
    world = common.init_distributed()
    device = world.device
    args.amp = common.choose_amp(device, args.amp)

    # Data: the frozen language model, and one triplet for each word that can be masked.
    train = common.caption_data(args.data, args.root, args.train_split).captioned()
    val = common.caption_data(args.data, args.root, args.val_split).captioned()
    probe = eval_linear and eval_linear.Probe(args, train, val)
    run = common.Run(args, "icmlm", world, train)
    tokenizer, lm = load_language_model(args, train, run)
    concepts, train, val = load_triplets(args, train, val, tokenizer, run)
    iters = args.iters or math.ceil(args.epochs * len(train) / args.batch_size)
    print_main(f"{len(train.images)} photos ({len(val.images)} for validation), {len(train)} "
               f"triplets, {len(concepts)} concepts, vocabulary of {len(lm.token_embeddings)}; "
               f"{iters} iterations at lr {args.lr:g}")  # fmt: skip

    # Model and optimizer, restored from a checkpoint if there is one.
    torch.manual_seed(args.seed)
    num_tags = len(concepts) if args.lambda_tp else 0
    model = ICMLM(args.arch, args.head, lm, num_tags, args.layers, args.heads)
    same_tags = run.saved.get("concepts") == concepts
    run.initialize(model, model.backbone, anew=() if same_tags else "tags.")
    model.to(device, memory_format=torch.channels_last)
    weights = model.parameters()
    optimizer = common.build_optimizer(args.optimizer, weights, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.backbone.compile()

    frozen_iters = int(args.warmup_attention * iters)
    parallel = None
    validation = partial(validate, model, lm, val, concepts, tokenizer, args)
    samples, collate_fn = triplet_samples(train, tokenizer, concepts, args)
    for iteration, micro_batches in run.steps(samples, collate_fn, iters, concepts=concepts):
        if parallel is None or iteration == frozen_iters + 1:
            parallel = freeze_and_wrap(model, world, frozen=iteration <= frozen_iters)
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part, batch in enumerate(micro_batches, 1):
            parallel.require_backward_grad_sync = part == args.accumulate  # DDP: one all-reduce
            images = common.augment(batch["images"], batch["jitter"])  # (B, 3, size, size)
            mask = batch["attention_mask"]  # (B, T)
            token_features = lm.encode(batch["tokens"], mask)  # W: (B, T, d_w)
            with common.autocast(device, args.amp):  # logits (B, |V|), tag logits (B, K)
                logits, tag_logits = parallel(images, token_features, mask, batch["mask_pos"])
            # Eqs. 6, 7: softmax over the vocabulary, mean over the batch's triplets [App. F.1].
            losses = {"mlm": F.cross_entropy(logits.float(), batch["target"])}
            loss = losses["mlm"]
            if args.lambda_tp:
                losses["tp"] = language.tag_loss(tag_logits, batch["tags"])  # Eq. 2
                loss = loss + args.lambda_tp * losses["tp"]  # Eq. 8
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss, **losses)
        scaler.step(optimizer)
        scaler.update()
        if world.is_main and run.due("validate") and iteration < iters:
            run.validation = validation()["validation_loss"]
        run.log(lr=args.lr * lr_scale)

    # The backbone is the result; the probe evaluates it.
    if world.is_main:
        common.save_weights(run.folder / "backbone.pth", model.backbone)
        scores = validation(num_triplets=args.proxy_triplets)
        run.finish(probe, model.backbone, **scores)


def freeze_and_wrap(model, world, frozen):
    """Freeze or unfreeze the backbone [App. F.1] and its batch statistics [ours]; wrap for DDP.

    The model is wrapped again when the backbone is unfrozen: DistributedDataParallel only averages
    gradients of parameters that required them when it was built.
    """
    model.train()
    model.backbone.train(not frozen).requires_grad_(not frozen)
    return common.data_parallel(model, world)


# ---------------------------------------------------------- triplets of photo, caption and token


@dataclass
class Triplets:
    """Photo, caption, masked word [Sec. 4, Datasets], as integers: up to 13 million [App. F.1].

    The tokens of all captions are concatenated: those of caption c are
    tokens[token_offsets[c] : token_offsets[c + 1]].
    """

    images: np.ndarray  # keys, see common.open_image
    tags: sparse.csr_array  # (images, concepts)
    image_idx: np.ndarray  # (captions,): the image of each
    tokens: np.ndarray
    token_offsets: np.ndarray
    masked: np.ndarray  # (N, 3): caption, position of the masked token in it, concept

    def __len__(self):
        return len(self.masked)


ARRAYS = "image_idx", "tokens", "token_offsets", "masked"


def load_triplets(args, train, val, tokenizer, run):
    """The triplets of both splits: the first process finds them and writes them into --output

    -> {concept: part of speech}, the most frequent first; Triplets of train; Triplets of val
    """
    if run.world.is_main and not run.iteration:
        save_triplets(args, train, val, tokenizer, run.folder)
    common.barrier(run.world)
    path = run.folder / "labels.npz"
    names, train_tags, val_tags = language.load_labels(path, len(train))
    part_of = {}
    for part, counts in json.loads((run.folder / "concepts.json").read_text()).items():
        part_of |= dict.fromkeys(counts, part)
    concepts = {name: part_of[name] for name in names}
    with np.load(run.folder / "triplets.npz") as file:
        train_arrays = {name: file[f"train_{name}"] for name in ARRAYS}
        val_arrays = {name: file[f"val_{name}"] for name in ARRAYS}
    train = Triplets(train.images, train_tags, **train_arrays)
    val = Triplets(val.images, val_tags, **val_arrays)
    return concepts, train, val


def save_triplets(args, train, val, tokenizer, folder):
    train = language.filter_captions(train, tokenizer.tokenize)
    val = language.filter_captions(val, tokenizer.tokenize)
    counts = language.count_concepts(train.all_captions(), args.tagger)
    common.write_json(folder / "concepts.json", counts)
    concepts = language.top_concepts(counts, args.pos, args.num_concepts)
    train_tags = language.concept_labels(train, concepts)
    val_tags = language.concept_labels(val, concepts)
    language.save_labels(folder / "labels.npz", concepts, train_tags, val_tags)
    arrays = {}
    for split, data in (("train", train), ("val", val)):
        triplets = find_triplets(data, tokenizer, concepts)
        needed = f"{split} needs captions of 3 to 25 tokens with a concept to mask ({args.pos})"
        found = len(triplets["masked"])
        require(found, f"no caption of the split holds a word to mask: {needed}")
        arrays |= {f"{split}_{name}": triplets[name] for name in ARRAYS}
    np.savez(folder / "triplets.npz", **arrays)
    num_maskable = len(np.unique(arrays["train_masked"][:, 2]))
    print_main(f"{num_maskable} of {len(concepts)} concepts are single tokens and can be masked")


def find_triplets(data, tokenizer, concepts):
    """The tokens of all captions, and the words in them that can be masked -> {name: array}"""
    tokens = array("i")
    token_offsets = array("q", [0])
    masked = array("i")
    index_of = {concept: k for k, concept in enumerate(concepts)}
    find = partial(find_words, tokenizer, index_of)
    for chunk in language.map_captions(find, data.all_captions(), "triplets"):
        for ids, words in chunk:
            caption = len(token_offsets) - 1
            for mask_pos, concept in words:
                masked.extend((caption, mask_pos, concept))
            tokens.extend(ids)
            token_offsets.append(len(tokens))
    return {
        "image_idx": data.image_of_caption(),
        "tokens": np.array(tokens),
        "token_offsets": np.array(token_offsets),
        "masked": np.array(masked).reshape(-1, 3),
    }


def find_words(tokenizer, index_of, captions):
    """The concepts that can be masked: those that are exactly one token where they occur

    "shirt" cannot be masked in "t-shirt", which is one word of several tokens.
    index_of: {concept: its index} -> [(token ids, [(position of the token, index), ...]), ...]
    """
    encoded = tokenizer(captions)
    found = []
    for n, caption in enumerate(captions):
        ids = encoded["input_ids"][n]
        words = []
        for word, first, last in language.word_spans(caption):
            position = encoded.char_to_token(n, first)
            if word not in index_of or position is None:
                continue
            start, end = encoded.token_to_chars(n, position)
            token = caption[start:end].strip()  # RoBERTa's may include the space
            if token == caption[first:last] and ids[position] != tokenizer.unk_token_id:
                words.append((position, index_of[word]))
        found.append((ids, words))
    return found


def triplet_samples(triplets, tokenizer, concepts, args):
    """-> Samples, and the function that collates them into batches"""
    other_side = left_right_tokens(tokenizer)
    make = partial(make_sample, triplets, tokenizer.mask_token_id, other_side, args)
    permutation = language.flip_permutation(list(concepts))
    collate_fn = partial(collate, triplets.tags, permutation, tokenizer.pad_token_id)
    return common.Samples(make, len(triplets)), collate_fn


def left_right_tokens(tokenizer):
    """{token: its opposite} for left and right, which change places in a flipped photo"""
    other_side = {}
    for word in ("left", "right", "Left", "Right"):
        for form in (word, f" {word}"):  # different tokens in RoBERTa
            pair = [form, common.swap_left_right(form)]
            token, other = tokenizer(pair, add_special_tokens=False)["input_ids"]
            if len(token) == len(other) == 1 and tokenizer.unk_token_id not in token + other:
                other_side[token[0]] = other[0]
    return other_side


def make_sample(triplets, mask_token, other_side, args, index, rng):
    """A photo and its caption with one word masked [Sec. 3.2]; rng None: centre crop."""
    caption, mask_pos, concept = triplets.masked[index].tolist()
    image_idx = int(triplets.image_idx[caption])
    sample = common.load_image(triplets.images[image_idx], rng, args)
    first, end = triplets.token_offsets[caption : caption + 2]
    tokens = triplets.tokens[first:end].tolist()
    if sample["flipped"]:
        tokens = [other_side.get(token, token) for token in tokens]
    sample["target"] = tokens[mask_pos]
    tokens[mask_pos] = mask_token
    sample["tokens"] = torch.tensor(tokens)
    return sample | {"image_idx": image_idx, "mask_pos": mask_pos, "concept": concept}


def collate(tags, permutation, pad_token, samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T), tags (B, K), image_idx,
    mask_pos, target, concept (B,), attention_mask (B, T): False at padding
    """
    batch = common.collate_images(samples)
    tokens = [sample["tokens"] for sample in samples]
    ones = [torch.ones(len(row), dtype=torch.bool) for row in tokens]
    batch["tokens"] = pad_sequence(tokens, batch_first=True, padding_value=pad_token)
    batch["attention_mask"] = pad_sequence(ones, batch_first=True)
    for name in ("image_idx", "mask_pos", "target", "concept"):
        batch[name] = common.stack(samples, name)
    flipped = [sample["flipped"] for sample in samples]
    image_ids = batch["image_idx"].tolist()
    batch["tags"] = language.label_rows(tags, image_ids, flipped, permutation)
    return batch


# --------------------------------------------------------------------- the frozen language model


def load_language_model(args, train, run):
    """--lm, or a small BERT that the first process trains -> tokenizer, FrozenLanguageModel"""
    name = args.lm
    device = run.world.device
    if name == "scratch":
        name = str(run.folder / "language_model")
        initial = Path(args.init or "").parent / "language_model"
        first = run.world.is_main and not run.iteration
        if first and "model" in run.saved and initial.exists():
            shutil.copytree(initial, name, dirs_exist_ok=True)
        elif first:
            language.scratch_language_model(
                name,
                train.all_captions(),
                iters=args.lm_iters,
                seed=args.seed,
                device=device,
                amp=args.amp,
                layers=args.lm_layers,
            )
        common.barrier(run.world)
    tokenizer, model = language.language_model(name, device)
    return tokenizer, FrozenLanguageModel(model, args.amp)


class FrozenLanguageModel:
    """psi of the paper, module 2 of Fig. 2. Not an nn.Module: neither trained nor checkpointed.

    width: d_w.  token_embeddings: V (|V|, d_w), its input embeddings.
    mlm_head: its token classification layer, (B, d_w) -> (B, |V|).
    """

    def __init__(self, model, amp):
        name = "cls" if hasattr(model, "cls") else "lm_head"  # BERT's and RoBERTa's
        kind = type(model).__name__
        require(hasattr(model, name), f"--lm is a {kind}: give a BERT or a RoBERTa")
        self.mlm_head = getattr(model, name)
        self.encoder = model.base_model
        self.width = model.config.hidden_size
        self.amp = amp
        self.token_embeddings = model.get_input_embeddings().weight.detach()
        # The encoder is cast once, because autocast would cast frozen weights at each use. mlm_head
        # and V stay float32 for validation (see predict); autocast casts them in training.
        if amp in common.HALF:
            for module in self.encoder.modules():
                if isinstance(module, nn.Linear):
                    module.to(common.HALF[amp])

    @torch.no_grad()
    def encode(self, tokens, attention_mask):
        """tokens, attention_mask (B, T) -> W (B, T, d_w), float32"""
        mask = language.attention_mask(self.encoder, attention_mask)
        with common.autocast(tokens.device, self.amp):
            output = self.encoder(input_ids=tokens, attention_mask=mask)
        return output.last_hidden_state.float()


# ----------------------------------------------------------------------------------------- model


class ICMLM(nn.Module):
    """Backbone, a head that predicts the masked token, tag head: modules 1, 3 or 4, 5 of Fig. 2."""

    def __init__(self, arch, head, lm, num_tags, layers, heads):
        """num_tags: K, 0 for no tag prediction.  layers: of tfm or fc.  heads: of tfm or att"""
        super().__init__()
        self.backbone = common.build_backbone(arch)
        channels = self.backbone.channels
        if head == "tfm":
            self.head = Tfm(channels, lm, layers, heads)
        else:
            self.head = AttFc(channels, lm, layers, heads)
        self.tags = language.tag_head(arch, channels, num_tags) if num_tags else None

    def forward(self, images, token_features, attention_mask, mask_pos):
        """images (B, 3, h, w); token_features: W (B, T, d_w); attention_mask (B, T); mask_pos (B,)

        -> logits of the masked token (B, |V|); tag logits (B, K) or None
        """
        features = self.backbone(images)  # X: (B, d_x, H, W)
        logits = self.head(features, token_features, attention_mask, mask_pos)
        tag_logits = self.tags(features) if self.tags else None
        return logits, tag_logits


class Tfm(nn.Module):
    """ICMLM-tfm: a Transformer encoder reads the projected X together with W [Sec. 3.2, App. E]."""

    def __init__(self, channels, lm, layers, heads):
        super().__init__()
        self.lm = lm  # frozen; not an nn.Module, so not registered here
        self.project = nn.Linear(channels, lm.width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(EncoderLayer(lm.width, heads))

    def forward(self, features, token_features, attention_mask, mask_pos):
        """As ICMLM.forward, of features (B, d_x, H, W) -> logits (B, |V|)"""
        z, mask = self.join(features, token_features, attention_mask)
        for layer in self.layers:
            z = layer(z, mask)
        text = z[:, -token_features.size(1) :]  # (B, T, d_w), after the H * W locations
        return self.lm.mlm_head(at_mask(text, mask_pos))

    def join(self, features, token_features, attention_mask):
        """-> Z = [X; W] (B, S, d_w), S = H * W + T; its attention mask (B, S)"""
        x = self.project(features.flatten(2).mT)  # (B, H * W, d_w)
        z = torch.cat([x, token_features.to(x.dtype)], 1)
        image_mask = attention_mask.new_ones(x.shape[:2])
        mask = torch.cat([image_mask, attention_mask], 1)
        return z, mask


def at_mask(states, mask_pos):
    """states (B, T, d), mask_pos (B,) -> (B, d), at the masked tokens"""
    batch_idx = torch.arange(len(states), device=states.device)
    return states[batch_idx, mask_pos]


class EncoderLayer(nn.Module):
    """Multi-head attention and feed-forward, each with dropout, residual and layer norm [App. E]

    As in the paper, each head is as wide as the model.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.key = nn.Linear(width, heads * width)
        self.query = nn.Linear(width, heads * width)
        self.value = nn.Linear(width, heads * width)
        self.out_proj = nn.Linear(heads * width, width)
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)
        for module in self.modules():  # as in BERT
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def per_head(self, x):
        """(B, S, heads * d_w) -> (B, heads, S, d_w)"""
        x = x.unflatten(-1, (self.heads, -1))
        return x.transpose(1, 2)

    def forward(self, z, mask):
        """z (B, S, d_w), mask (B, S) -> z"""
        K = self.per_head(self.key(z))  # Eq. 13
        Q = self.per_head(self.query(z))
        V = self.per_head(self.value(z))
        # Eq. 14: softmax(K Q^T / sqrt(d_w)) V
        output = F.scaled_dot_product_attention(
            query=K, key=Q, value=V, attn_mask=mask[:, None, None]
        )
        heads = output.transpose(1, 2).flatten(2)  # [O^1 | O^2 | ...]: (B, S, heads * d_w)
        z = self.norm1(z + self.dropout(self.out_proj(heads)))  # Eq. 15
        hidden = F.relu(self.linear1(z))
        return self.norm2(z + self.dropout(self.linear2(hidden)))


class AttentionHead(nn.Module):
    """One head of att: how well each location of the photo matches the caption [Sec. 3.2]."""

    def __init__(self, channels, width):
        super().__init__()
        self.sigma_x = nn.Linear(channels, ATTENTION_WIDTH, bias=False)
        self.norm_x = nn.LayerNorm(ATTENTION_WIDTH)
        self.sigma_w = nn.Linear(width, ATTENTION_WIDTH, bias=False)
        self.norm_w = nn.LayerNorm(ATTENTION_WIDTH)

    def forward(self, x, w, attention_mask):
        """X (B, H * W, d_x), W (B, T, d_w), attention_mask (B, T) -> s (B, H * W)"""
        x = F.relu(self.norm_x(self.sigma_x(x)))  # Eq. 3: (B, H * W, d_z)
        w = F.relu(self.norm_w(self.sigma_w(w)))  # (B, T, d_z)
        with common.autocast(x.device, "off"):  # float32: long sums, then exponentials
            scores = x.float() @ w.float().mT / math.sqrt(x.size(-1))  # S (B, H * W, T)
        scores = scores.masked_fill(~attention_mask[:, None], -math.inf)
        return scores.logsumexp(2)  # Eq. 4


class AttFc(nn.Module):
    """ICMLM-att-fc: the text says where to look, the features there name the word [Sec. 3.2]."""

    def __init__(self, channels, lm, layers, heads):
        super().__init__()
        self.att = nn.ModuleList()
        for _ in range(heads):
            self.att.append(AttentionHead(channels, lm.width))
        self.sigma_h = nn.Parameter(torch.full((heads,), 1 / heads))  # initialised uniformly
        self.b_h = nn.Parameter(torch.zeros(1))
        self.fc = nn.Sequential()
        d_in = channels
        d_out = lm.token_embeddings.size(1)
        for _ in range(layers):
            layer = nn.Sequential(
                nn.Linear(d_in, d_out),
                nn.LayerNorm(d_out),
                nn.ReLU(),
            )
            self.fc.append(layer)
            d_in = d_out
        self.register_buffer("token_embeddings", lm.token_embeddings, persistent=False)  # V, frozen

    def attention(self, x, token_features, attention_mask):
        """X (B, H * W, d_x), W (B, T, d_w), attention_mask (B, T) -> p (B, H * W)"""
        scores = [head(x, token_features, attention_mask) for head in self.att]
        s = torch.stack(scores, -1)  # [s^1 | s^2 | ...]: (B, H * W, heads)
        # Not nn.Linear, which autocast would round: the softmax needs float32. b_h cancels in it.
        s = (s * self.sigma_h).sum(-1) + self.b_h
        return s.softmax(1)  # Eq. 5: p_att

    def forward(self, features, token_features, attention_mask, mask_pos):
        """As ICMLM.forward, of features (B, d_x, H, W) -> logits (B, |V|)"""
        x = features.flatten(2).mT  # X: (B, H * W, d_x)
        p = self.attention(x, token_features, attention_mask)
        pooled = p[:, None].to(x.dtype) @ x  # Eq. 5: x^ = X^T p, (B, 1, d_x)
        prediction = self.fc(pooled.squeeze(1))
        return F.linear(prediction, self.token_embeddings)  # v_k of Eq. 6: fc(x^)^T V_k


# ----------------------------------------------------------------------- masked token prediction


@torch.no_grad()
def validate(model, lm, val, concepts, tokenizer, args, num_triplets=5000):
    """Losses and accuracies of masked token prediction [Tab. 1] -> entries of result.json

    "validation_loss": {"mlm": Eqs. 6, 7, "tp": Eq. 2; the paper chose lambda by it [App. B]};
    "masked_words": number of triplets; top1, top5... with the photo, another photo and no photo
    """
    was_training = model.backbone.training
    model.eval()
    rng = np.random.default_rng(args.seed)
    chosen = np.sort(rng.permutation(len(val))[:num_triplets])  # None: all
    val = replace(val, masked=val.masked[chosen])
    samples, collate_fn = triplet_samples(val, tokenizer, concepts, args)
    part_of = list(concepts.values())
    device = lm.token_embeddings.device
    losses = defaultdict(list)
    ranks = defaultdict(list)
    parts = []
    for batch in common.validation_batches(samples, args.workers, collate_fn, device):
        with_image, shuffled, lm_only, tag_logits = predict(model, lm, batch, args.amp)
        target = batch["target"]
        ranks["with the photo"].append(target_ranks(with_image, target))
        ranks["with another photo"].append(target_ranks(shuffled, target))
        ranks["language model alone"].append(target_ranks(lm_only, target))
        losses["mlm"].append(F.cross_entropy(with_image, target, reduction="none"))
        if args.lambda_tp:
            tag_loss = language.tag_loss(tag_logits, batch["tags"])
            losses["tp"].append(tag_loss.expand(len(target)))
        parts += [part_of[k] for k in batch["concept"].tolist()]
    model.train()
    model.backbone.train(was_training)
    mean_loss = {name: float(concatenate(rows).mean()) for name, rows in losses.items()}
    print_main(f"validation loss: {common.format_scores(mean_loss)}")
    results = {"triplets": len(parts)}
    for name, rows in ranks.items():
        results[name] = accuracies(concatenate(rows), np.array(parts))
        scores = common.format_scores(results[name])
        print_main(f"masked token prediction, {len(parts)} triplets, {name}: {scores}")
    return {"validation_loss": mean_loss, "masked_words": results}


def concatenate(batches):
    return torch.cat(batches).cpu().numpy()


def predict(model, lm, batch, amp):
    """-> logits (B, |V|) with the photo, with another one, of the language model alone; tag logits

    With another photo [ours]: what the head predicts without seeing the right one.
    """
    mask = batch["attention_mask"]
    mask_pos = batch["mask_pos"]
    token_features = lm.encode(batch["tokens"], mask)
    with common.autocast(mask.device, amp):
        features = model.backbone(common.augment(batch["images"]))
    # The rest in float32: in half precision many tokens tie for the best: a miss.
    features = features.float()
    other = mismatched_index(batch["image_idx"].tolist())
    with_image = model.head(features, token_features, mask, mask_pos)
    shuffled = model.head(features[other], token_features, mask, mask_pos)
    lm_only = lm.mlm_head(at_mask(token_features, mask_pos))
    tag_logits = model.tags(features) if model.tags else None
    return with_image, shuffled, lm_only, tag_logits


def mismatched_index(image_ids):
    """image_ids (B,) -> for each, the next sample with another photo, or itself if none has"""
    mismatched = []
    for i, own in enumerate(image_ids):
        others = [*range(i + 1, len(image_ids)), *range(i)]
        mismatched.append(next((j for j in others if image_ids[j] != own), i))
    return mismatched


def target_ranks(logits, target):
    """Rank of each target (B,) in its row of logits (B, |V|), counted from 0 -> (B,)

    Equal logits share the mean of their ranks; a target whose logit is NaN comes last.
    """
    target_logit = logits.gather(1, target[:, None])
    num_ties = (logits == target_logit).sum(1) - 1
    ranks = (logits > target_logit).sum(1) + num_ties / 2
    unknown = target_logit.isnan().squeeze(1)
    return ranks.masked_fill(unknown, logits.size(1))


def accuracies(ranks, parts):
    """ranks (N,), from 0, and parts of speech (N,) of masked tokens -> {"top1": percent, ...}"""
    correct = {"top1": ranks <= 0, "top5": ranks <= 4}
    for part in np.unique(parts):
        correct[f"{part} top1"] = ranks[parts == part] <= 0
    return {name: 100 * float(hits.mean()) for name, hits in correct.items()}


if __name__ == "__main__":
    common.run(main, get_args)
