"""ICMLM: a backbone learned by predicting masked words of captions with the help of the photo.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

One word of a caption is masked: a noun, adjective or verb. A frozen language model reads the rest
of the caption, and the photo has to tell the missing word [Sec. 3.2]. In tfm a Transformer encoder
reads photo and text together (Eqs. 13-15). In att-fc the text only says where to look, and the word
is predicted from what is seen there (Eqs. 3-6). Tag prediction is trained beside both (Eq. 8).

    laptop        python icmlm.py
    own photos    python tp.py --data photos.jsonl
                  python icmlm.py --data photos.jsonl --init runs/tp/backbone.pth
    one GPU       python icmlm.py --data coco --batch-size 128 --init runs/tp/backbone.pth
    eight GPUs    torchrun --nproc_per_node=8 icmlm.py --data coco --init runs/tp/backbone.pth
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 icmlm.py --data coco   (on both; shared --output)
    VG, VGG-16    torchrun --nproc_per_node=4 icmlm.py --data vg --arch vgg16 --head att-fc \\
                      --init runs/rotation/backbone.pth
    attention     python icmlm.py --explain photo.jpg --caption "a dog on a surfboard" \\
                      --word surfboard --weights runs/icmlm/checkpoint.pth
                  python icmlm.py --explain-split 10 --weights runs/icmlm/checkpoint.pth

What to expect: in tfm the loss `mlm` starts near that of the language model without a photo, whose
vectors pass through the encoder layer; in att-fc it starts near ln V, V being the size of the
vocabulary. Every run ends with the accuracy of masked token prediction with the photo, with another
photo, and of the language model alone [Tab. 1]. If the first two are alike, the photo is not looked
at: start from the backbone of tp.py (--init), take --head att-fc, and train its attention first
(--warmup-attention 0.25).
"""

import copy
import json
import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import sparse
from torch import nn

import common
import language
from common import check, count, dim, non_negative, positive_share, proper_share, say

try:
    import eval_linear
except ModuleNotFoundError:  # copied without it: no probe at the end
    eval_linear = None

HEADS = "tfm", "att-fc"
POS = "nn", "nn+adj", "nn+adj+vb"
TAGGERS = "textblob", "spacy"

# fmt: off
RECIPES = {  #           demo        small       paper: ResNet-50
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.3
    "image_size":       (96,         112,        224),                  # App. F.2, of the probe
    "crop_min":         (0.8,        0.2,        0.2),                  # ours
    "colour_jitter":    (0.25,       1.0,        1.0),                  # ours
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 3.2
    "lm_iters":         (300,        2000,       20_000),               # ours
    "num_concepts":     (5000,       5000,       5000),                 # Sec. 4.3
    "heads":            (1,          1,          1),                    # Sec. 4.3
    "lambda_tp":        (1.0,        1.0,        0.1),                  # App. B
    "warmup_attention": (0.0,        0.0,        0.0),                  # App. F.1
    "optimizer":        ("adamw",    "adamw",    "sgd"),                # App. F.1
    "batch_size":       (64,         64,         512),                  # App. F.1
    "iters":            (300,        3000,       500_000),              # App. F.1
    "lr":               (1e-3,       5e-4,       3e-2),                 # App. F.1
    "warmup":           (0.1,        0.1,        0.0),
    "steps":            ([],         [],         []),                   # App. F.1
    "weight_decay":     (1e-2,       1e-2,       1e-4),                 # App. F.1
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        1000,       5000),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
VGG16 = {  # what the paper does otherwise with VGG-16
    "num_concepts": 1000, "heads": 12, "lambda_tp": 1.0,  # Sec. 4.2; Sec. 4 (App. E: 8); App. B
    "warmup_attention": 0.25, "batch_size": 896, "iters": 200_000,      # App. F.1: 50K of 200K
    "optimizer": "radam", "lr": 1e-4, "steps": [0.8, 0.9], "weight_decay": 1e-3,  # App. F.1: TP's
}
# fmt: on


def get_args(argv=None):
    parser = common.flag_parser("icmlm", __doc__)

    add = parser.add_argument_group("language model and concepts").add_argument
    add("--lm", help="BERT or alike, of the hub or a folder; scratch: trained on the captions")
    add("--lm-iters", type=count, help="iterations of --lm scratch; more for more captions")
    add("--pos", choices=POS, default=POS[-1], help="words to mask, also the tags [Sec. 4.2]")
    add("--num-concepts", type=count, help="only so many, the most frequent [Sec. 4.2, 4.3]")
    add("--tagger", choices=TAGGERS, default=TAGGERS[0], help="spacy is the paper's")

    add = parser.add_argument_group("model").add_argument
    add("--init", help="start from this backbone.pth of tp.py; vgg16: of its rotations [App. F.1]")
    add("--head", choices=HEADS, default=HEADS[0], help="att-fc: better on VOC [Sec. 4.1]")
    add("--layers", type=dim, default=1, help="of tfm, or of fc; more hurt the backbone [App. B]")
    add("--heads", type=dim, help="attention heads of tfm, or of att [Sec. 4, 4.3]")
    add("--attention-width", type=dim, default=512, help="att-fc: d_z of Eq. 3, per head [ours]")
    add("--dropout", type=proper_share, default=0.1, help="in tfm [BERT]")

    add = parser.add_argument_group("optimizer and validation").add_argument
    add("--optimizer", choices=common.OPTIMIZERS, help="radam for vgg16; another needs its --lr")
    add("--steps", type=positive_share, nargs="*", help="lr falls to a tenth after these shares")
    add("--lambda-tp", type=non_negative, help="weight of tag prediction; 0 for none [Eq. 8]")
    add("--warmup-attention", type=proper_share, help="share of the run with a frozen backbone")
    add("--validate-every", type=count, help="iterations, rounded up to a multiple of --log-every")
    add("--proxy-triplets", type=count, default=5000, help="validate on at most so many [ours]")

    use = parser.add_argument_group("use of a trained model")
    add = use.add_mutually_exclusive_group().add_argument
    add("--explain", metavar="IMAGE", help="predict words with this photo, draw their attention")
    add("--explain-split", type=count, metavar="N", help="the same for N validation photos")
    add = use.add_argument
    add("--caption", help="what the photo shows")
    add("--word", nargs="+", help="the words of the caption to mask, one at a time")
    add("--weights", help="a checkpoint.pth of this script")

    given = common.look(argv, "--arch", "--head", "--init", "--lm")
    other = VGG16 if given.arch == "vgg16" else {}
    recipe = common.choose_recipe(RECIPES, argv, paper=other)
    recipe["heads"] = other.get("heads", recipe["heads"])  # in every recipe
    if given.head != "att-fc" or not given.init:  # attention needs features that mean something
        recipe["warmup_attention"] = 0.0
    args = common.parse(parser, argv, recipe, scaled=("lr",))
    if args.optimizer == "sgd" and args.steps:
        parser.error("--steps goes with --optimizer radam or adamw: sgd follows a cosine")
    one, uses = (args.explain, args.caption, args.word), args.explain or args.explain_split
    if any(one) != all(one) or bool(args.weights) != bool(uses):
        together = '--explain IMAGE, --caption "...", --word WORD and --weights FILE go together'
        parser.error(f"{together}, or --explain-split N and --weights FILE")
    if args.weights:
        args.lm = given.lm  # if not given, the one that the checkpoint was trained with
    return args


def main(args):
    world = common.start()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.weights:
        return explain(args, device)

    # Data: the frozen language model, and each word of each caption that can be masked.
    subset, cache = (args.fraction, args.captions_per_image, args.seed), args.cache
    train = common.caption_data(args.data, args.root, args.train_split, *subset, cache=cache)
    val = common.caption_data(args.data, args.root, args.val_split, cache=cache)
    check(len(train.captions), f"no image of the split {args.train_split} has a caption")
    run = common.Run(args, "icmlm", world, train, val)
    probe = eval_linear and eval_linear.Probe(args, train, val)
    # Now: a wrong file is refused before a BERT is trained.
    initial = args.init and not run.checkpoint and common.load_backbone(args.init, args.arch)
    with common.main_first(world):
        folder, settings = run.folder / "language_model", (args.lm_iters, args.seed, args.amp)
        scratch = train.captions, folder, args.cache, *settings
        tokenizer, pretrained = language.language_model(args.lm, device, scratch)
        concepts, train, val = load_triplets(args, train, val, tokenizer, run)
    lm, size = FrozenLanguageModel(pretrained, args.amp), len(train)
    iters = args.iters or math.ceil(args.epochs * size / args.batch_size)
    say(f"{len(train.images)} photos ({len(val.images)} for validation), {size} triplets of "
        f"{len(concepts)} concepts, {len(lm.vocabulary)} tokens; {iters} iterations")  # fmt: skip

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = build_model(args, lm, len(concepts))
    model.backbone = initial or model.backbone
    model.to(device, memory_format=torch.channels_last)
    weights = model.parameters()
    optimizer = common.build_optimizer(args.optimizer, weights, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.backbone.compile()

    warmup, parallel = int(args.warmup_attention * iters), None
    validation = partial(validate, model, lm, val, concepts, tokenizer, args, device)
    samples, together = triplet_samples(train, tokenizer, concepts, args)
    steps = run.steps(samples, together, iters, probe, model.backbone, concepts=concepts)
    for iteration, batch in steps:
        if parallel is None or iteration == warmup + 1:
            parallel = prepare(model, world, frozen=iteration <= warmup)
        factor = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, factor)
        images = common.augment(batch["images"], batch["jitter"])
        words = lm.read(batch["tokens"], batch["visible"])
        with common.autocast(device, args.amp):
            logits, tag_logits = parallel(images, words, batch["visible"], batch["position"])
        # Eqs. 6, 7: softmax over the vocabulary, mean over the triplets of the batch [App. F.1].
        losses = {"mlm": F.cross_entropy(logits.float(), batch["target"])}
        if args.lambda_tp:
            losses["tp"] = language.tag_loss(tag_logits, batch["tags"])  # Eq. 2
        loss = losses["mlm"] + args.lambda_tp * losses.get("tp", 0.0)  # Eq. 8
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        held_out = validation()["validation_loss"] if run.validating() else None
        run.log(held_out, loss=loss, **losses, lr=args.lr * factor)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        run.save_weights("backbone.pth", model.backbone)
        run.finish(probe, model.backbone, **validation())


def build_model(args, lm, num_concepts):
    num_tags = num_concepts if args.lambda_tp else 0
    sizes = args.layers, args.heads, args.attention_width, args.dropout
    return ICMLM(args.arch, args.head, lm, num_tags, *sizes)


def prepare(model, world, frozen):
    """Ready for training. A frozen backbone [App. F.1] keeps its batch statistics, too [ours]."""
    model.train()
    model.backbone.train(not frozen).requires_grad_(not frozen)
    return common.data_parallel(model, world)


# ---------------------------------------------------------- triplets of photo, caption and token


@dataclass
class Triplets:
    """Photo, caption, masked word [Sec. 4, Datasets]: two numbers each, as VG has 13 million.

    The captions' tokens stand one behind the other: those of caption c are
    tokens[first_token[c] : first_token[c + 1]], and it belongs to image[c].
    """

    images: common.ImageFiles  # or shapes.ShapeImages
    tags: sparse.csr_array  # (images, concepts)
    tokens: np.ndarray
    first_token: np.ndarray
    image: np.ndarray
    caption: np.ndarray  # of each triplet
    position: np.ndarray  # of the masked token in the caption, of each triplet

    def __len__(self):
        return len(self.caption)

    def __getitem__(self, n):
        """-> the image's index, the caption's token ids, the position of the masked one"""
        c = self.caption[n]
        tokens = self.tokens[self.first_token[c] : self.first_token[c + 1]]
        return int(self.image[c]), tokens.copy(), int(self.position[n])


ARRAYS = "tokens", "first_token", "image", "caption", "position"


def load_triplets(args, train, val, tokenizer, run):
    """The triplets of both splits, made once and kept in --cache

    -> {concept: part of speech}, the most frequent first; Triplets of train; Triplets of val
    """
    vocabulary = common.PackedStrings(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    key = {"data": (train.digest(), val.digest(), vocabulary.digest())}
    key |= {flag: getattr(args, flag) for flag in ("lm", "pos", "num_concepts", "tagger")}
    build = partial(build_triplets, args, train, val, tokenizer)

    def use(arrays):
        concepts = dict(zip(arrays["concepts"].tolist(), arrays["parts"].tolist()))
        splits = []
        for split, data in (("train", train), ("val", val)):
            tags = language.sparse_from(f"{split}_tags", arrays, len(concepts))
            parts = [arrays[f"{split}_{part}"] for part in ARRAYS]
            splits.append(Triplets(data.images, tags, *parts))
        return json.loads(str(arrays["counts"])), concepts, *splits

    counts, concepts, train, val = common.cached(args.cache, "triplets", key, build, use)
    before = run.checkpoint.get("concepts") if run.checkpoint else concepts
    same = before == concepts and list(before) == list(concepts)
    check(same, f"{run.folder} holds a run on other concepts: --fresh starts over")
    if run.world.is_main:
        common.write_json(run.folder / "concepts.json", counts)
    return concepts, train, val


def build_triplets(args, train, val, tokenizer):
    """-> the arrays that load_triplets keeps"""
    train, val = (language.filter_captions(data, tokenizer.tokenize) for data in (train, val))
    counts = language.count_concepts(train.captions, args.tagger)
    concepts = language.top_concepts(counts, args.pos, args.num_concepts)
    part_of = {word: part for part, words in counts.items() for word in words}
    arrays = {"concepts": np.array(concepts), "counts": np.array(json.dumps(counts))}
    arrays["parts"] = np.array([part_of[word] for word in concepts])
    maskable = maskable_tokens(tokenizer, concepts)
    say(f"{len(maskable)} of {len(concepts)} concepts are one token and can be masked")
    for split, data in (("train", train), ("val", val)):
        found = find_triplets(data, tokenizer, maskable)
        needed = f"{split} needs captions of 3 to 25 tokens with {args.pos} among the concepts"
        check(len(found["caption"]), f"no caption of the split holds a word to mask: {needed}")
        arrays |= {f"{split}_{name}": value for name, value in found.items()}
        tags = language.concept_labels(data, concepts)
        arrays |= language.sparse_parts(f"{split}_tags", tags)
    return arrays


def maskable_tokens(tokenizer, words):
    """{token: word} of the words that are one token of the language model [ours]"""
    in_sentence = [f" {word}" for word in words]  # to RoBERTa a word without a space is another
    ids = tokenizer(in_sentence, add_special_tokens=False)["input_ids"] if words else []
    single = {row[0]: word for row, word in zip(ids, words) if len(row) == 1}
    single.pop(tokenizer.unk_token_id, None)
    return single


def word_positions(encoded, n):
    """Where the tokens of each word of caption n stand -> list of lists; no special tokens"""
    words = defaultdict(list)
    for position, word in enumerate(encoded.word_ids(n)):
        words[word].append(position)
    words.pop(None, None)
    return list(words.values())


def find_words(tokenizer, maskable, captions):
    """Tokenise captions and find the whole words in them that can be masked

    -> all tokens, the number of each caption's, and for each word its caption and position
    """
    tokens, sizes = array("i"), array("i")
    caption, position = array("i"), array("i")
    encoded = tokenizer(captions)
    for n, ids in enumerate(encoded["input_ids"]):
        for positions in word_positions(encoded, n):
            if len(positions) == 1 and ids[positions[0]] in maskable:
                caption.append(n)
                position.append(positions[0])
        tokens.extend(ids)
        sizes.append(len(ids))
    return [np.array(part, np.int32) for part in (tokens, sizes, caption, position)]


def find_triplets(data, tokenizer, maskable):
    """The tokens of all captions, and the words in them that can be masked -> {ARRAYS}"""
    parts, first = [4 * [np.zeros(0, np.int32)]], 0
    find = partial(find_words, tokenizer, maskable)
    for part in language.for_parts(find, data.captions, "triplets"):
        tokens, sizes, caption, position = part
        parts.append([tokens, sizes, first + caption, position])
        first += len(sizes)
    tokens, sizes, caption, position = map(np.concatenate, zip(*parts))
    first_token = np.concatenate([[0], sizes.cumsum(dtype=np.int64)])
    parts = tokens, first_token, data.image_of_caption(), caption, position
    return dict(zip(ARRAYS, parts))


def triplet_samples(triplets, tokenizer, concepts, args):
    """-> Samples, and the function that collates them to batches"""
    sides = list(maskable_tokens(tokenizer, ["left", "right"]))
    left_right = dict(zip(sides, reversed(sides)))  # each token -> the other
    make = partial(sample, triplets, tokenizer.mask_token_id, left_right, args)
    swap = language.left_right_swap(list(concepts))
    together = partial(collate, triplets.tags, swap, tokenizer.pad_token_id)
    return common.Samples(make, len(triplets), args.seed), together


def sample(triplets, mask, left_right, args, index, rng):
    """A photo and its caption with one word masked [Sec. 3.2]; rng None: centred."""
    image, tokens, position = triplets[index]
    crop = args.image_size, args.crop_min, args.colour_jitter
    photo = common.photo(triplets.images, image, rng, *crop)
    if photo["mirrored"]:
        tokens = np.array([left_right.get(token, token) for token in tokens.tolist()])
    target, tokens[position] = int(tokens[position]), mask
    return {**photo, "index": image, "tokens": tokens, "position": position, "target": target}


def collate(tags, swap, padding, samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), index (B,) of the photos, tokens (B, T),
    visible (B, T): what is no padding, position and target (B,) of the masked token, tags (B, K)
    """
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    tokens = [torch.from_numpy(sample["tokens"]).long() for sample in samples]
    batch = {**common.collate_photos(samples), "tokens": pad(tokens, padding_value=padding)}
    batch["visible"] = pad([torch.ones_like(row, dtype=torch.bool) for row in tokens])
    for name in ("index", "position", "target"):
        batch[name] = common.stack(samples, name)
    mirrored = [sample["mirrored"] for sample in samples]
    batch["tags"] = language.label_rows(tags, batch["index"].tolist(), mirrored, swap)
    return batch


# --------------------------------------------------------------------- the frozen language model


class FrozenLanguageModel:
    """psi of the paper, module 2 of Fig. 2. No nn.Module: not trained, and in no checkpoint.

    The encoder of `model` is kept, in the precision of --amp.
    width: d_w.  vocabulary: V, its input embeddings (|V|, d_v); in BERT d_v = d_w.
    """

    def __init__(self, model, amp):
        self.encoder, self.classifier = model.base_model, token_classifier(model)
        self.width, self.amp = model.config.hidden_size, amp
        self.vocabulary = model.get_input_embeddings().weight.detach()
        if amp != "off":  # once: autocast would round these frozen weights at each use
            for module in self.encoder.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.float16 if amp == "fp16" else torch.bfloat16)

    def read(self, tokens, visible):
        """tokens, visible (B, T) -> W (B, T, d_w), float32"""
        mask = language.attention_mask(self.encoder, visible)
        with torch.inference_mode(), common.autocast(tokens.device, self.amp):
            words = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return words.to(torch.float32, copy=True)  # autograd refuses tensors of inference mode

    def classify(self, states):
        """The pretrained token classification layer: states (B, d_w) -> logits (B, |V|)"""
        return self.classifier(states[:, None]).logits[:, 0]


def token_classifier(model):
    """The pretrained layers behind the encoder of a masked language model, whatever their names

    -> a copy of the model in which the encoder returns what it is given. deepcopy takes what its
    memo holds instead of copying it: the weights stay shared and the encoder is replaced.
    """
    from transformers.modeling_outputs import BaseModelOutput  # only here: it takes seconds

    class Given(nn.Module):
        def forward(self, input_ids, *_, **__):
            return BaseModelOutput(last_hidden_state=input_ids)

    not_copied = {id(parameter): parameter for parameter in model.parameters()}
    not_copied[id(model.base_model)] = Given()
    return copy.deepcopy(model, not_copied)


# ----------------------------------------------------------------------------------------- model


class ICMLM(nn.Module):
    """Backbone, a head that predicts the masked token, tag head: modules 1, 3 or 4, 5 of Fig. 2."""

    def __init__(self, arch, head, lm, num_tags, layers, heads, attention_width, dropout):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        channels = self.backbone.channels
        if head == "tfm":
            self.head = Tfm(channels, lm, layers, heads, dropout)
        else:
            self.head = AttFc(channels, lm, layers, heads, attention_width)
        self.tags = language.tag_head(arch, channels, num_tags) if num_tags else None

    def forward(self, images, words, visible, position):
        """images (B, 3, h, w); words W (B, T, d_w); visible (B, T); position (B,) of what is masked

        -> logits of the masked token (B, |V|); tag logits (B, K) or None
        """
        features = self.backbone(images)
        logits, _ = self.predict(features, words, visible, position)
        return logits, None if self.tags is None else self.tags(features)

    def predict(self, features, words, visible, position, need_weights=False):
        """features (B, d_x, H, W) -> logits (B, |V|), attention (B, H, W) or None"""
        x = features.flatten(2).mT  # X: (B, H * W, d_x)
        logits, attention = self.head(x, words, visible, position, need_weights)
        if attention is not None:
            attention = attention.unflatten(1, features.shape[2:])
        return logits, attention


class Tfm(nn.Module):
    """ICMLM-tfm: a Transformer encoder reads the projected X together with W [Sec. 3.2, App. E]."""

    def __init__(self, channels, lm, layers, heads, dropout):
        super().__init__()
        self.project = nn.Linear(channels, lm.width)
        self.layers = nn.ModuleList(EncoderLayer(lm.width, heads, dropout) for _ in range(layers))
        self.classify = lm.classify  # frozen, and no part of this module

    def forward(self, x, words, visible, position, need_weights=False):
        """-> logits (B, |V|); where the masked token looks in the photo (B, H * W), if needed"""
        x = self.project(x)
        places = x.size(1)
        z = torch.cat([x, words.to(x.dtype)], 1)  # Z = [X; W]: (B, S, d_w)
        visible = torch.cat([visible.new_ones(x.shape[:2]), visible], 1)
        for layer in self.layers:
            z, weights = layer(z, visible, need_weights)
        rows, masked = torch.arange(len(z), device=z.device), places + position
        logits = self.classify(z[rows, masked])
        if not need_weights:
            return logits, None
        attention = weights[rows, :, masked, :places].mean(1)  # over heads, of the last layer
        return logits, attention / attention.sum(1, keepdim=True)


class EncoderLayer(nn.Module):
    """Multi-head attention, feed-forward; each with dropout, residual and layer norm [App. E]

    As in the paper each head is as wide as the model.
    """

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.key, self.query, self.value = (nn.Linear(width, heads * width) for _ in range(3))
        self.merge = nn.Linear(heads * width, width)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():  # as BERT
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def per_head(self, x):
        """(B, S, heads * d_w) -> (B, heads, S, d_w)"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, z, visible, need_weights=False):
        """z (B, S, d_w), visible (B, S) -> z; the attention weights (B, heads, S, S), if needed"""
        key = self.per_head(self.key(z))  # Eq. 13
        query = self.per_head(self.query(z))
        value = self.per_head(self.value(z))
        # Eq. 14: softmax(K Q^T / sqrt(D)) V. What the paper calls K asks, and Q is asked.
        mask = visible[:, None, None]
        attend = partial(F.scaled_dot_product_attention, key, query, attn_mask=mask)
        merged = self.merge(attend(value).transpose(1, 2).flatten(2))  # Eq. 15
        weights = None
        if need_weights:  # with the identity for V what remains is the softmax
            identity = torch.eye(z.size(1), dtype=key.dtype, device=z.device)
            weights = attend(identity.expand(*key.shape[:2], -1, -1))
        z = self.norm1(z + self.dropout(merged))
        hidden = F.relu(self.linear1(z))
        return self.norm2(z + self.dropout(self.linear2(hidden))), weights


class AttentionHead(nn.Module):
    """att, one head: how well each place of the photo matches the caption [Sec. 3.2]."""

    def __init__(self, channels, width, attention_width):
        super().__init__()
        self.sigma_x = nn.Linear(channels, attention_width, bias=False)
        self.norm_x = nn.LayerNorm(attention_width)
        self.sigma_w = nn.Linear(width, attention_width, bias=False)
        self.norm_w = nn.LayerNorm(attention_width)

    def forward(self, x, words, visible):
        """x (B, H * W, d_x), words (B, T, d_w), visible (B, T) -> s (B, H * W)"""
        x = F.relu(self.norm_x(self.sigma_x(x))).float()
        words = F.relu(self.norm_w(self.sigma_w(words))).float()
        with common.autocast(x.device, "off"):  # sums of hundreds of products, then exponentials
            scores = x @ words.mT / math.sqrt(x.size(-1))  # Eq. 3: S (B, H * W, T)
        return scores.masked_fill(~visible[:, None], -math.inf).logsumexp(2)  # Eq. 4


class AttFc(nn.Module):
    """ICMLM-att-fc: the text says where to look; the word is predicted from there [Sec. 3.2]."""

    def __init__(self, channels, lm, layers, heads, attention_width):
        super().__init__()
        sizes = channels, lm.width, attention_width
        self.att = nn.ModuleList(AttentionHead(*sizes) for _ in range(heads))
        self.average = nn.Linear(heads, 1)  # equal weights at first
        nn.init.constant_(self.average.weight, 1 / heads)
        nn.init.zeros_(self.average.bias)
        widths = [channels, *[lm.vocabulary.size(1)] * layers]
        self.fc = nn.Sequential()
        for before, after in zip(widths, widths[1:]):
            linear = nn.Linear(before, after)
            self.fc.append(nn.Sequential(linear, nn.LayerNorm(after), nn.ReLU()))
        self.register_buffer("vocabulary", lm.vocabulary, persistent=False)  # V, frozen

    def forward(self, x, words, visible, position, need_weights=False):
        """-> logits (B, |V|), p (B, H * W). The whole caption is read, not one position of it."""
        s = torch.stack([head(x, words, visible) for head in self.att], -1)
        # Written out: autocast would round a linear layer, and the softmax needs the digits.
        s = (s * self.average.weight[0]).sum(-1) + self.average.bias
        p = s.softmax(1)  # Eq. 5: (B, H * W)
        pooled = (p[:, None].to(x.dtype) @ x).squeeze(1)  # Eq. 5: x^ = X^T p (B, d_x)
        logits = F.linear(self.fc(pooled), self.vocabulary)  # v_k of Eq. 6: fc(x^)^T V_k
        return logits, p


# ----------------------------------------------------------------------- masked token prediction

# With another photo [ours]: what the head knows of captions without seeing.
PREDICTED = "with the photo", "with another photo", "language model alone"


@torch.no_grad()
def validate(model, lm, val, concepts, tokenizer, args, device):
    """Losses, and accuracies of masked token prediction [Tab. 1] -> the entries of result.json

    {"validation_loss": {"mlm": Eqs. 6, 7, "tp": Eq. 2, by which lambda is chosen [App. B]},
    "masked_words": {"triplets": N, and for each of PREDICTED {"top1", "top5", "nouns top1", ...}},
    "attention": on shapes, what attention_inside_boxes gives}
    """
    frozen = not model.backbone.training
    model.eval()
    order = np.random.default_rng(args.seed).permutation(len(val))
    chosen = np.sort(order[: args.proxy_triplets])
    val = replace(val, caption=val.caption[chosen], position=val.position[chosen])
    samples, together = triplet_samples(val, tokenizer, concepts, args)
    batches = common.validation_batches(samples, args.workers, together, device)
    rows = []
    for batch in batches:
        logits, attention, tag_logits = predictions(model, lm, batch, args.amp)
        target, index = batch["target"], batch["index"]
        places = {name: ranks(v, target) for name, v in logits.items()}
        places["mlm"] = F.cross_entropy(logits[PREDICTED[0]], target, reduction="none")
        if tag_logits is not None:
            places["tp"] = language.tag_loss(tag_logits, batch["tags"]).expand(len(target))
        rows.append({"attention": attention, "target": target, "index": index, **places})
    model.train()
    model.backbone.train(not frozen)
    found = {name: torch.cat([row[name] for row in rows]).cpu().numpy() for name in rows[0]}
    losses = {name: float(found[name].mean()) for name in ("mlm", "tp") if name in found}
    say(f"validation loss: {common.in_words(losses, 3)}")

    word_of = maskable_tokens(tokenizer, list(concepts))
    words = [word_of[target] for target in found["target"]]
    parts = np.array([concepts[word] for word in words])
    result = {"validation_loss": losses, "masked_words": {"triplets": len(words)}}
    for name in PREDICTED:
        scores = accuracies(found[name], parts)
        result["masked_words"][name] = scores
        say(f"masked token prediction, {name}: {common.in_words(scores, 1)}")
    if args.data == "shapes":
        scenes = [val.images[i] for i in found["index"]]
        shares = attention_inside_boxes(scenes, words, found["attention"])
        if shares:
            result["attention"] = shares
            line = "attention inside the masked object's box: {inside:.1f}%, its area: {area:.1f}%"
            say(line.format(**shares))
    return result


def predictions(model, lm, batch, amp):
    """-> {one of PREDICTED: logits (B, |V|)}, attention (B, H, W), tag logits (B, K) or None"""
    visible, position = batch["visible"], batch["position"]
    words = lm.read(batch["tokens"], visible)
    with common.autocast(words.device, amp):
        features = model.backbone(common.augment(batch["images"]))
    # The rest in float32: in half precision many tokens share the best score, and all would count.
    features = features.float()
    logits, attention = model.predict(features, words, visible, position, need_weights=True)
    other = features[another_photo(batch["index"].tolist())]
    blind, _ = model.predict(other, words, visible, position)
    rows = torch.arange(len(words), device=words.device)
    alone = lm.classify(words[rows, position])
    tag_logits = None if model.tags is None else model.tags(features)
    return dict(zip(PREDICTED, (logits, blind, alone))), attention, tag_logits


def another_photo(photos):
    """photos: of each sample of a batch -> the next sample of another photo, itself if none is"""
    others = []
    for i, photo in enumerate(photos):
        following = [*range(i + 1, len(photos)), *range(i)]
        others.append(next((j for j in following if photos[j] != photo), i))
    return others


def ranks(logits, target):
    """The place of each target (B,) among its logits (B, |V|), from 0 -> (B,)

    Equal logits share the mean of their places; a target whose logit is NaN comes last.
    """
    own = logits.gather(1, target[:, None])
    equal = (logits == own).sum(1) - 1
    rank = (logits > own).sum(1) + equal / 2
    return rank.masked_fill(own.isnan().squeeze(1), logits.size(1))


def accuracies(rank, parts):
    """rank (N,) of the masked tokens, from 0; parts (N,) of speech -> {"top1": percent, ...}"""
    scores = {f"top{k}": 100 * float((rank <= k - 1).mean()) for k in (1, 5)}
    for part in np.unique(parts):
        scores[f"{part} top1"] = 100 * float((rank[parts == part] <= 0).mean())
    return scores


def attention_inside_boxes(scenes, words, maps):
    """How much attention is inside the box of the object that the masked word names, in percent

    Only for words that name exactly one object, by shape or colour.  maps (N, h, w), each sums to 1
    -> {"inside", "area" of the box: what an even map would get, "words": their number}, or None
    """
    import shapes  # only here: a script that is copied elsewhere does without it

    inside, area = [], []
    for scene, word, attention in zip(scenes, words, maps):
        named = [o for o in shapes.objects_of(scene) if word in (o.shape, o.colour)]
        if len(named) == 1:
            left, top, right, bottom = named[0].box
            rows = covered(top, bottom, attention.shape[0])
            columns = covered(left, right, attention.shape[1])
            inside.append(rows @ attention @ columns)
            area.append((right - left) * (bottom - top))
    if not inside:
        return None
    mean = {"inside": 100 * float(np.mean(inside)), "area": 100 * float(np.mean(area))}
    return {**mean, "words": len(inside)}


def covered(low, high, cells):
    """The share of each of the cells that divide [0, 1] which lies in [low, high] -> (cells,)"""
    cell = np.arange(cells)
    overlap = np.minimum(high * cells, cell + 1) - np.maximum(low * cells, cell)
    return overlap.clip(0)


# --------------------------------------------------------------------- where a trained model looks


def load_icmlm(path, lm_name, amp, device):
    """A checkpoint.pth of this script -> model in eval mode, lm, tokenizer, concepts, its flags"""
    content = common.read_checkpoint(path)
    ours = isinstance(content, dict) and content.get("script") == "icmlm"
    check(ours, f"{path} is no checkpoint.pth of icmlm.py (a backbone alone cannot predict words)")
    with common.reading(path, f"{common.CHECKPOINT}, and the --lm that it was trained with"):
        trained, concepts = SimpleNamespace(**content["args"]), content["concepts"]
        trained.image_size = common.image_side(trained.image_size)
        name = lm_name or trained.lm
        if name == "scratch":
            name = str(Path(path).parent / "language_model")
        tokenizer, pretrained = language.language_model(name, device)
        lm = FrozenLanguageModel(pretrained, amp)
        model = build_model(trained, lm, len(concepts))
        model.load_state_dict(content["model"])
        return model.to(device).eval(), lm, tokenizer, concepts, trained


@torch.no_grad()
def explain(args, device):
    """`--explain`, `--explain-split`: predict masked words, one at a time, and draw where the model
    looks for each [Figs. 1, 3, 4, 5].
    """
    from pictures import draw_attention  # only here: trainings do without it

    model, lm, tokenizer, concepts, trained = load_icmlm(args.weights, args.lm, args.amp, device)
    if args.explain:
        images, captions = common.ImageFiles([args.explain]), [args.caption]
        images.check_files("check the path")
    else:
        source = trained.data, args.root or trained.root, trained.val_split
        data = common.caption_data(*source, cache=args.cache)
        drawn = np.random.default_rng(args.seed).permutation(np.flatnonzero(data.captioned()))
        data = data.select(np.sort(drawn[: args.explain_split]))
        images, captions = data.images, [data.captions_of(i)[0] for i in range(len(data))]
    folder = Path(args.output, "explained")
    squares = common.CropView(images, trained.image_size, part=1.0)
    maskable = maskable_tokens(tokenizer, list(concepts))
    limit = min(tokenizer.model_max_length, lm.encoder.config.max_position_embeddings)
    for n, (caption, (pixels, readable)) in enumerate(zip(captions, squares)):
        encoded = tokenizer(caption, return_tensors="pt")
        number = len(encoded["input_ids"][0])
        if args.explain:
            check(readable, f"{images[n]} cannot be decoded, is it a photo?")
            length = f"has {number} tokens, more than the {limit} of the language model"
            check(number <= limit, f"the caption {length}: shorten it")
        elif not readable or number > limit:
            say(f"{images[n]} is left out: it cannot be decoded, or its caption is too long")
            continue
        if args.explain:
            positions = {word: find_word(tokenizer, encoded, word, maskable) for word in args.word}
        else:
            positions = maskable_words(encoded, maskable)
        if positions:
            maps = explain_photo(model, lm, tokenizer, pixels, encoded, positions, args.amp)
            name = "_".join([Path(str(images[n])).stem, *positions])[:200]
            name = name if args.explain else f"{n + 1}_{name}"
            folder.mkdir(parents=True, exist_ok=True)
            draw_attention(Image.fromarray(pixels), caption, maps, folder / f"{name}.png")
            say(f"the attention is in {folder / name}.png")


def explain_photo(model, lm, tokenizer, pixels, encoded, positions, amp):
    """Print the best predictions for each word -> [(word, attention (h, w))]

    pixels: uint8 (size, size, 3).  encoded: the caption.  positions: {word: its token's place}
    """
    tokens = encoded["input_ids"].repeat(len(positions), 1)
    position = torch.tensor(list(positions.values()))
    tokens[torch.arange(len(tokens)), position] = tokenizer.mask_token_id
    images = torch.from_numpy(pixels).repeat(len(tokens), 1, 1, 1)
    batch = {"images": images, "index": torch.arange(len(tokens))}
    batch |= {"tokens": tokens, "position": position}
    batch["visible"] = torch.ones_like(tokens, dtype=torch.bool)
    batch = {name: value.to(lm.vocabulary.device) for name, value in batch.items()}
    logits, attention, _ = predictions(model, lm, batch, amp)
    for n, (word, row) in enumerate(zip(positions, tokens)):
        say(f"{tokenizer.decode(row)}  ({word})")
        say(f"with the photo: {best_words(tokenizer, logits[PREDICTED[0]][n])}")
        say(f"without it: {best_words(tokenizer, logits[PREDICTED[2]][n])}")
    if attention[0].numel() == 1:
        say("the attention has one place only: train with a larger --image-size to see more")
    return list(zip(positions, attention.cpu()))


def best_words(tokenizer, logits, number=5):
    """logits (|V|,) -> "dog 71.0%, cat 12.5%, ..." """
    p, tokens = logits.softmax(0).topk(number)
    words = [tokenizer.decode([token]).strip() for token in tokens.tolist()]
    return ", ".join(f"{word} {100 * p:.1f}%" for word, p in zip(words, p.tolist()))


def maskable_words(encoded, maskable):
    """The words of a caption that can be masked -> {word: position of its token}"""
    tokens, found = encoded["input_ids"][0].tolist(), {}
    for positions in word_positions(encoded, 0):
        token = tokens[positions[0]]
        if len(positions) == 1 and token in maskable:
            found.setdefault(maskable[token], positions[0])
    return found


def find_word(tokenizer, encoded, word, maskable):
    """The position of `word` in the caption; ends the program if it cannot be masked there."""
    tokens = encoded["input_ids"][0].tolist()
    wanted = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    spelled = [[tokens[m] for m in positions] for positions in word_positions(encoded, 0)]
    possible = maskable_words(encoded, maskable)
    hint = f"these words of the caption can be masked: {', '.join(possible) or 'none'}"
    check(wanted in spelled, f'"{word}" is not a word of the caption; {hint}')
    pieces = " ".join(tokenizer.convert_ids_to_tokens(wanted))
    several = f"is {len(wanted)} tokens of the language model, {pieces}, and only one can be masked"
    check(len(wanted) == 1, f'"{word}" {several}; {hint}')
    position = word_positions(encoded, 0)[spelled.index(wanted)][0]
    trained = "is not among the words that were trained"
    check(position in possible.values(), f'"{word}" {trained}; {hint}')
    return position


if __name__ == "__main__":
    common.run(main, get_args)
