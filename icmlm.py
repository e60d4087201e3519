"""ICMLM: a backbone learned by filling in a word that is missing in the caption of a photo.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020, Sec. 3.2.

One word of a caption is masked: a noun, adjective or verb that can be seen. A frozen language model reads the rest; the
photo says what is missing. In tfm a Transformer reads both together (App. E), in att-fc the text only says where to
look and the word is named from there (Eqs. 3-6). Tag prediction (tp.py) is trained beside it (Eq. 8).

    laptop        python icmlm.py
    own photos    python icmlm.py --data photos.jsonl --lm scratch --arch resnet18 --image-size 112 --batch-size 32 --lr 0.03 --iters 20000
    one GPU       python icmlm.py --data coco --batch-size 128 --init runs/tp/backbone.pth
    eight GPUs    torchrun --nproc_per_node=8 icmlm.py --data coco --init runs/tp/backbone.pth
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 icmlm.py --data coco ...
                  (with --output on a file system that both see)
    VG, VGG-16    torchrun --nproc_per_node=4 icmlm.py --data vg --arch vgg16 --head att-fc --init runs/tp/backbone.pth
    pictures      python icmlm.py --explain photo.jpg --caption "a dog on a surfboard" --word surfboard --weights runs/icmlm/checkpoint.pth

What to expect: in tfm the masked-word loss starts where the language model stands without the photo, because its vector
passes through; in att-fc it starts near ln V, the logarithm of the vocabulary. The end of every run prints the share of
masked words found with the photo, with the photo of another caption and by the language model alone (Tab. 1): the first
minus the second is what was seen.
"""

import argparse
import copy
import functools
import math
import sys
from array import array
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_outputs import BaseModelOutput

import common
import language
import probe
from common import fail, progress, say

DEFAULTS = {
    #                    on shapes   on real data (the paper's)
    #                    (ours)      ResNet                VGG-16
    "image_size":       (96,         224,                  224),        # App. F.2, of the evaluation
    "crop_min":         (0.7,        0.2,                  0.2),        # ours
    "colour_jitter":    (0.25,       1.0,                  1.0),        # ours
    "layers":           (1,          1,                    1),          # Sec. 4
    "heads":            (1,          1,                    12),         # Sec. 4.3, Sec. 4
    "lambda_tp":        (1.0,        0.1,                  1.0),        # App. B
    "num_concepts":     (5000,       5000,                 1000),       # Sec. 4.3, Sec. 4.2
    "batch_size":       (32,         512,                  896),        # App. F.1
    "iters":            (700,        500_000,              200_000),    # App. F.1
    "warmup_attention": (0.0,        0.0,                  0.25),       # App. F.1: 50K of 200K, att-fc
    "optimizer":        ("radam",    "sgd",                "radam"),    # App. F.1
    "lr":               (1e-3,       3e-2,                 1e-4),       # App. F.1; VGG-16: as for tags
    "weight_decay":     (1e-4,       1e-4,                 1e-3),       # App. F.1; VGG-16: as for tags
    "steps":            ((0.8,),     (),                   (0.8, 0.9)), # App. F.1; VGG-16: as for tags
    "lm":               ("scratch",  "bert-base-uncased",  "bert-base-uncased"),  # Sec. 3.2
    "lm_iters":         (300,        20_000,               20_000),     # ours
    "log_every":        (10,         20,                   20),
    "checkpoint_every": (200,        2000,                 2000),
    "probe_images":     (2000,       10_000,               10_000),
}  # fmt: skip


def get_args(argv=None):
    parser = common.flag_parser("icmlm", __doc__, DEFAULTS)

    text = parser.add_argument_group("language model and concepts")
    text.add_argument("--lm", help="a BERT-like masked language model of the hub, a local folder, or scratch: a small one trained on the captions [Sec. 3.2]")
    text.add_argument("--lm-iters", type=int, help="iterations of --lm scratch; more for more captions [ours]")
    text.add_argument("--pos", choices=("nn", "nn+adj", "nn+adj+vb"), default="nn+adj+vb", help="parts of speech that are masked and are tags [Sec. 4.2]")
    text.add_argument("--num-concepts", type=int, help="that many most frequent words are masked and are tags; fewer where the captions hold fewer [Sec. 4.2, 4.3]")
    text.add_argument("--tagger", choices=("textblob", "spacy"), default="textblob", help="spacy is the paper's and more careful; it needs a download")

    model = parser.add_argument_group("model")
    model.add_argument("--head", choices=("tfm", "att-fc"), default="tfm", help="tfm fills in more words, att-fc gave the paper's best backbones on VOC [Sec. 4.1]")
    model.add_argument("--layers", type=int, help="layers of tfm, or of fc; more help the proxy task and hurt the backbone [App. B]")
    model.add_argument("--heads", type=int, help="attention heads of tfm, or of att [Sec. 4, Sec. 4.3]")
    model.add_argument("--attention-width", type=int, default=512, help="att-fc: d_z of Eq. 3, per head [ours]")
    model.add_argument("--dropout", type=float, default=0.1, help="in tfm [BERT]")
    model.add_argument("--arch", choices=sorted(common.BACKBONES), help="resnet50 [Sec. 4.3] or vgg16 [Sec. 4] for the paper's numbers, resnet18 for small data or a CPU (default resnet18 on shapes, resnet50 on real data). Of two defaults of another flag the second is vgg16's")
    model.add_argument("--init", help="start from this backbone.pth, of tp.py in the paper; without it the first thousands of iterations go into seeing at all [App. F.1]")

    optim = parser.add_argument_group("optimisation")
    optim.add_argument("--lambda-tp", type=float, help="weight of tag prediction beside masked words; 0 for none [Eq. 8, App. B]")
    optim.add_argument("--batch-size", type=int, help="triplets of photo, caption and masked word per iteration over all processes [App. F.1]")
    optim.add_argument("--iters", type=int, help="iterations; scale with the number of captions [App. F.1]")
    optim.add_argument("--epochs", type=float, help="length in passes over the triplets, instead of --iters")
    optim.add_argument("--warmup-attention", type=float, help="share of the run in which the backbone stays frozen; helps att-fc on VGG-16 [App. F.1]")
    common.add_recipe_flags(optim)
    optim.add_argument("--proxy-triplets", type=int, default=5000, help="score masked words on at most this many triplets of the validation split, drawn once [ours]")

    use = parser.add_argument_group("use of a trained model")
    use.add_argument("--weights", help="a checkpoint.pth of this script")
    use.add_argument("--explain", metavar="IMAGE", help="fill in --word of --caption with and without this photo; a picture of the attention goes to OUTPUT/explained")
    use.add_argument("--caption", help="what the photo shows")
    use.add_argument("--word", help="the word of the caption to mask")

    args = parser.parse_args(argv)
    given = {flag for flag, value in vars(args).items() if value is not None}
    args.arch = args.arch or ("resnet18" if args.data == "shapes" else "resnet50")
    column = 2 if args.arch == "vgg16" else 1
    defaults = {flag: (row[0], row[column]) for flag, row in DEFAULTS.items()}
    args = common.fill_defaults(args, defaults, scaled=("lr",))
    common.check_recipe(args, given, defaults["optimizer"][args.data != "shapes"])
    if "warmup_attention" not in given and (args.head != "att-fc" or not args.init):  # attention needs features that see something
        args.warmup_attention = 0.0
    if args.explain and "lm" not in given:
        args.lm = None
    if not 0 <= args.dropout < 1 or not 0 <= args.warmup_attention < 1 or not args.lambda_tp >= 0:
        fail("--dropout and --warmup-attention must be in [0, 1), --lambda-tp at least 0")
    if min(args.layers, args.heads, args.attention_width, args.num_concepts, args.lm_iters, args.proxy_triplets) < 1:
        fail("--layers, --heads, --attention-width, --num-concepts, --lm-iters and --proxy-triplets must be at least 1")
    if len({bool(flag) for flag in (args.explain, args.caption, args.word, args.weights)}) > 1:
        fail('--explain photo.jpg, --caption "...", --word WORD and --weights FILE go together')
    return args


def main(args):
    world = common.start_processes()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.explain:
        return explain(args, device)
    run = common.Run(args, "icmlm", world)
    checkpoint = run.begin()
    initial = common.load_backbone(args.arch, args.init) if args.init and not checkpoint else None

    # Data: photos and captions, the frozen language model, and every word of a caption that can be masked.
    train, val = (
        common.caption_data(args.data, args.root, args.train_split, args.fraction, args.captions_per_image, args.seed),
        common.caption_data(args.data, args.root, args.val_split),
    )
    run.same_data(checkpoint, train, val)
    labelled = probe.probe_data(args, train, val)
    if not len(train.captions) or not len(val.captions):
        fail("no image of the training or of the validation split has a caption")
    with common.main_first(world):
        tokenizer, pretrained = language.language_model(args, train.captions, run.folder / "language_model", device)
        concepts, train, val = cached_triplets(args, train, val, tokenizer, run)
    lm = FrozenLanguageModel(pretrained, args.amp)
    iters = math.ceil(args.epochs * len(train) / args.batch_size) if args.epochs else args.iters
    say(f"{len(train.images)} photos, {len(train)} triplets of {len(concepts)} concepts, {lm.vocabulary.shape[0]} tokens; {iters} iterations of {args.batch_size}")

    # Model, optimiser, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = build_model(args, lm, len(concepts))
    if initial:
        model.backbone = initial
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start, best = run.restore(checkpoint, parts)
    checkpoint = None
    if args.compile:
        model.backbone.compile()

    sampler = common.InfiniteSampler(len(train), args.batch_size, world, args.seed, start)
    together = functools.partial(collate, tags=train.tags, mirrored=language.mirrored_labels(list(concepts)), padding=tokenizer.pad_token_id)
    loader = common.make_loader(TripletView(train, tokenizer, args), sampler, args.batch_size // world.size, args.workers, together, device)
    feed = common.Feed(loader, device, run, train.images)

    frozen_until = int(args.warmup_attention * iters)
    parallel = prepare(model, world, frozen=start < frozen_until)
    bar = progress(total=iters, initial=start, unit=" its", desc="icmlm")
    with common.StopSignals() as stop:
        for iteration, batch in zip(range(start + 1, iters + 1), feed):
            if iteration == frozen_until + 1 and frozen_until > start:
                parallel = prepare(model, world, frozen=False)
            factor = common.learning_rate_factor(args, iteration - 1, iters)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * factor
            # Dropout, too, is a function of the seed, the iteration and the rank: a resumed run draws the same.
            torch.manual_seed((args.seed << 40) + iteration * world.size + world.rank)

            images = common.augment(batch["images"], batch["jitter"])
            words = lm.read(batch["tokens"], batch["visible"])
            with common.autocast(device, args.amp):
                found, tag_logits = parallel(images, words, batch["visible"], batch["position"])
                logits = lm.score(found, args.head)
            # Eq. 7 over triplets, as App. F.1 counts them: a caption has as many as it has words to mask.
            losses = {"mlm": F.cross_entropy(logits.float(), batch["target"])}
            if tag_logits is not None:
                losses["tp"] = common.tag_loss(tag_logits, batch["tags"])  # Eq. 2
            loss = losses["mlm"] + args.lambda_tp * losses.get("tp", 0.0)  # Eq. 8
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            bar.update()

            stopping = common.any_process(world, bool(stop.number))
            saving = stopping or iteration % args.checkpoint_every == 0 or iteration == iters
            if saving or iteration % args.log_every == 0:  # the only places that wait for the device
                terms = common.average(world, torch.stack([term.detach() for term in (loss, *losses.values())])).tolist()
                run.check_finite(iteration, {"loss": terms[0]})
                bar.set_postfix({name: f"{term:.3f}" for name, term in zip(losses, terms[1:])})
            if iteration % args.log_every == 0:
                run.log(iteration, feed, loss=terms[0], **dict(zip(losses, terms[1:])), lr=args.lr * factor)
            if args.probe_every and iteration % args.probe_every == 0 and world.is_main:
                best = probe.keep_best(run, iteration, model.backbone, labelled, best, device)
            if saving:
                run.save(iteration, **{name: part.state_dict() for name, part in parts.items()}, best=best, concepts=concepts)
            if stopping:
                bar.close()
                say(f"stopped after iteration {iteration}: checkpoint written, the same command goes on from there")
                sys.exit(128 + stop.number)
    bar.close()

    # The backbone is the result; the probe says what it is worth, and the proxy task whether the photo was looked at.
    common.end_processes(world)
    if not world.is_main:
        return
    run.save_weights("backbone.pth", model.backbone.state_dict())
    result = validate(model, lm, val, concepts, tokenizer, args, device)
    for name in RANKED:
        scores = result["masked_words"][name]
        say(f"masked words, {name}: " + ", ".join(f"{part} {score:.1f}" for part, score in scores.items()))
    if "attention" in result:
        say("attention inside the box of the masked word's object: {inside:.1f}% on {area:.1f}% of the area".format(**result["attention"]))
    run.finish(**result, **probe.final_probe(run, model.backbone, labelled, best, device))


def build_model(args, lm, num_concepts):
    num_tags = num_concepts if args.lambda_tp else 0
    return ICMLM(args.arch, args.head, lm.width, lm.vocabulary.size(1), num_tags, args.layers, args.heads, args.attention_width, args.dropout)


def prepare(model, world, frozen):
    """The model ready for training, its backbone `frozen` (no gradient; fixed batch statistics, too [ours]) or not; in DDP
    where there are several processes."""
    model.train()
    model.backbone.train(not frozen).requires_grad_(not frozen)
    return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if world.size > 1 else model


# ------------------------------------------------------------------------------------------ captions to triplets


class Triplets:
    """Photo, caption, masked word [Sec. 4, Datasets]: two numbers each, because VG has 13 million of them.

    images; tags: sparse (images, concepts).  tokens: all captions' token ids one behind the other; caption c has those
    from first_token[c] to first_token[c + 1] and belongs to image[c].  caption, position: of each triplet, in the order
    of the images.
    """

    PARTS = ("tokens", "first_token", "image", "caption", "position")

    def __init__(self, images, tags, tokens, first_token, image, caption, position):
        self.images, self.tags, self.tokens, self.first_token, self.image = images, tags, tokens, first_token, image
        self.caption, self.position = caption, position

    def __len__(self):
        return len(self.caption)

    def __getitem__(self, n):
        """-> the image's index, the caption's token ids, the position of the masked one"""
        c = self.caption[n]
        return int(self.image[c]), self.tokens[self.first_token[c] : self.first_token[c + 1]].copy(), int(self.position[n])


# What triplets are made of, beside the captions and the vocabulary: with any other value of these they are made anew.
TRIPLET_FLAGS = ("pos", "num_concepts", "tagger")


def cached_triplets(args, train, val, tokenizer, run):
    """The triplets of this run, from triplets.npz in its folder when they are there -> {concept: part of speech}, Triplets, Triplets"""

    def build():
        kept = [common.filter_captions(data, tokenizer.tokenize) for data in (train, val)]
        counts = language.count_concepts(kept[0].captions, args.tagger)
        common.write_json(run.folder / "concepts.json", counts)
        words = list(language.top_concepts(counts, args.pos, args.num_concepts))
        part = {word: part for part, group in counts.items() for word in group}
        arrays = {"concepts": np.array(words), "parts": np.array([part[word] for word in words])}
        maskable = maskable_tokens(tokenizer, words)
        say(f"{len(maskable)} of {len(words)} concepts are one token of the language model and can be masked")
        for split, data in zip(("train", "val"), kept):
            tags = language.concept_labels(data, words)
            arrays |= language.sparse_parts(f"{split}_tags", tags)
            arrays |= {f"{split}_{name}": value for name, value in find_triplets(data, tokenizer, maskable).items()}
            if not len(arrays[f"{split}_caption"]):
                fail(f"no caption of the split holds a word to mask: {split} needs captions of 3 to 25 tokens with {args.pos} among the concepts")
        return arrays

    vocabulary = common.PackedStrings(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    made_of = {"data": (train.digest(), val.digest(), vocabulary.digest()), **{flag: getattr(args, flag) for flag in TRIPLET_FLAGS}}
    arrays = common.cached_arrays(run.folder / "triplets.npz", made_of, build)
    concepts = dict(zip(arrays["concepts"].tolist(), arrays["parts"].tolist()))
    return concepts, *(
        Triplets(data.images, language.sparse_from(f"{split}_tags", arrays, len(concepts)), *(arrays[f"{split}_{name}"] for name in Triplets.PARTS))
        for split, data in (("train", train), ("val", val))
    )


def maskable_tokens(tokenizer, words):
    """{token id: word} for the words that are one token [ours]. In a sentence a word follows a space."""
    ids = tokenizer([" " + word for word in words], add_special_tokens=False)["input_ids"] if words else []
    return {row[0]: word for row, word in zip(ids, words) if len(row) == 1 and row[0] != tokenizer.unk_token_id}


def find_triplets(data, tokenizer, maskable):
    """Tokenise the captions and find the whole words in them that can be masked -> the arrays of Triplets"""
    tokens, ends, caption, position = array("i"), array("q", [0]), array("i"), array("i")
    for first in progress(range(0, len(data.captions), 1000), desc="triplets", unit=" batches"):
        encoded = tokenizer([data.captions[i] for i in range(first, min(first + 1000, len(data.captions)))])
        for n, ids in enumerate(encoded["input_ids"]):
            words = encoded.word_ids(n)
            for m, token in enumerate(ids):
                if token in maskable and words[m] is not None and words.count(words[m]) == 1:
                    caption.append(first + n)
                    position.append(m)
            tokens.extend(ids)
            ends.append(len(tokens))
    image = np.repeat(np.arange(len(data)), np.diff(data.first_caption))
    return {"tokens": np.array(tokens), "first_token": np.array(ends), "image": image, "caption": np.array(caption), "position": np.array(position)}


class TripletView(Dataset):
    """One triplet, as ICMLM is trained on it: the photo cropped and mirrored at random (or, not `training`, centred), a word masked."""

    def __init__(self, triplets, tokenizer, args, training=True, chosen=None):
        self.triplets, self.args, self.training, self.chosen = triplets, args, training, chosen
        self.mask, sides = tokenizer.mask_token_id, list(maskable_tokens(tokenizer, ["left", "right"]))
        self.left_right = dict(zip(sides, reversed(sides))) if len(sides) == 2 else {}
        self.image_of_triplet = triplets.image[triplets.caption]

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, key):
        epoch, n = key if self.training else (0, self.chosen[key])
        draw, unreadable = n, []
        while True:  # once, unless a photo cannot be decoded: then the first triplet of the next photo takes its place
            image, tokens, position = self.triplets[n]
            sample = common.photo_sample(self.triplets.images, image, self.args, common.sample_rng(self.args.seed, epoch, draw), self.training)
            unreadable += sample["unreadable"]
            if sample["index"] == image:
                break
            n = int(np.searchsorted(self.image_of_triplet, sample["index"])) % len(self.triplets)
        if sample["mirrored"]:  # in the mirrored photo left is right
            tokens = np.array([self.left_right.get(token, token) for token in tokens.tolist()])
        target, tokens[position] = tokens[position], self.mask
        return {**sample, "unreadable": unreadable, "tokens": torch.from_numpy(tokens).long(), "position": position, "target": int(target)}


def collate(samples, tags, mirrored, padding):
    """-> images (B, size, size, 3), jitter (B, 4), index (B,) of the photos, tokens (B, T), visible (B, T): no padding,
    position (B,), target (B,), tags (B, K)"""
    tokens = [sample["tokens"] for sample in samples]
    lengths = torch.tensor([len(row) for row in tokens])
    tokens = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=padding)
    return {
        **common.collate_photos(samples), "tokens": tokens, "visible": torch.arange(tokens.size(1)) < lengths[:, None],
        **{name: torch.tensor([sample[name] for sample in samples]) for name in ("index", "position", "target")},
        "tags": language.label_rows(samples, tags, mirrored),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ the frozen language model


class FrozenLanguageModel:
    """psi of the paper, and what it knows about its vocabulary. No autograd runs inside it.

    width: d_w.  vocabulary: its input embeddings V (|V|, d_v), where d_v = d_w in BERT.
    """

    def __init__(self, model, amp):
        self.encoder, self.amp, self.width = model.base_model, amp, model.config.hidden_size
        self.vocabulary = model.get_input_embeddings().weight
        self.classifier = token_classifier(model)

    def read(self, tokens, visible):
        """tokens, visible (B, T) -> W (B, T, d_w)"""
        with torch.inference_mode(), common.autocast(tokens.device, self.amp):
            words = self.encoder(input_ids=tokens, attention_mask=language.attention_mask(self.encoder, visible)).last_hidden_state
        return words.clone()  # a usual tensor again: the heads save it for their backward

    def classify(self, vectors):
        """The pretrained token classification layer: vectors (B, d_w) of masked tokens -> logits (B, |V|)"""
        return self.classifier(vectors[:, None]).logits[:, 0]

    def score(self, found, head):
        """What the head found, x^ of Eq. 7, (B, d_w) -> logits (B, |V|): classified (tfm), or v_k = x^ . V_k (att-fc, Eq. 6)"""
        return self.classify(found) if head == "tfm" else F.linear(found, self.vocabulary)


def token_classifier(model):
    """The pretrained layers that follow the encoder of a masked language model, whatever its architecture calls them."""

    class Given(nn.Module):
        def forward(self, input_ids, **_):
            return BaseModelOutput(last_hidden_state=input_ids)

    classifier = copy.copy(model)
    classifier._modules = {**model._modules, model.base_model_prefix: Given()}  # the copy's; the model keeps its own
    return classifier


# ------------------------------------------------------------------------------------------ model


class ICMLM(nn.Module):
    """Backbone, the head that fills in the masked word, and the tag head (modules 1, 3 or 4, and 5 of Fig. 2)."""

    def __init__(self, arch, head, width, vocabulary_width, num_tags, layers, heads, attention_width, dropout):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        channels = self.backbone.channels
        if head == "tfm":
            self.head = Tfm(channels, width, layers, heads, dropout)
        else:
            self.head = AttFc(channels, width, vocabulary_width, layers, heads, attention_width)
        self.tags = common.tag_head(arch, channels, num_tags) if num_tags else None

    def forward(self, images, words, visible, position, maps=False):
        """images (B, 3, h, w); words W (B, T, d_w), visible (B, T), position (B,) of the masked token

        -> what was found for the masked token (B, d_w); tag logits (B, K) or None; with `maps` also the attention (B, h', w')
        """
        features = self.backbone(images)
        found, attention = self.fill_in(features, words, visible, position, maps)
        tags = self.tags(features) if self.tags is not None else None
        return (found, tags, attention) if maps else (found, tags)

    def fill_in(self, features, words, visible, position, maps=False):
        """features (B, d_x, H, W) -> what was found (B, d_w); the attention (B, H, W), or None without `maps`"""
        x = features.flatten(2).transpose(1, 2)  # X: (B, H * W, d_x)
        found, attention = self.head(x, words, visible, position, maps)
        return found, attention.unflatten(1, features.shape[2:]) if maps else None


class Tfm(nn.Module):
    """ICMLM-tfm: X is projected to the token space and read together with W by a Transformer encoder [Sec. 3.2, App. E]."""

    def __init__(self, channels, width, layers, heads, dropout):
        super().__init__()
        self.project = nn.Linear(channels, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, dropout) for _ in range(layers))

    def forward(self, x, words, visible, position, maps=False):
        z = torch.cat([self.project(x), words.to(x.dtype)], 1)  # Z = [X; W]: (B, S, d_w)
        seen = torch.cat([visible.new_ones(x.shape[:2]), visible], 1)  # all places of the photo, and no padding
        rows, place = torch.arange(len(x), device=x.device), x.size(1) + position
        for layer in self.layers:
            before, z = z, layer(z, seen)
        attention = None
        if maps:  # of the last layer: from the masked token to the photo
            attention = self.layers[-1].attention(before, seen)[rows, :, place, : x.size(1)].mean(1)
            attention = attention / attention.sum(1, keepdim=True)
        return z[rows, place], attention


class EncoderLayer(nn.Module):
    """Eqs. 13-15, then dropout, residual and layer norm [App. E] and the feed-forward layers of Vaswani et al.

    As in the paper each head is as wide as the model, and K asks while Q answers: the softmax runs along Q.
    """

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.key, self.query, self.value = (nn.Linear(width, heads * width) for _ in range(3))
        self.merge = nn.Linear(heads * width, width)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        for module in self.modules():  # as BERT
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def per_head(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, S, heads * d_w) -> (B, heads, S, d_w)

    def attention(self, z, seen):
        """softmax(K Q^T / sqrt(d_w)) of Eq. 14 -> (B, heads, S, S)"""
        key, query = self.per_head(self.key(z)), self.per_head(self.query(z))
        scores = key @ query.transpose(2, 3) / math.sqrt(key.size(-1))
        return scores.float().masked_fill(~seen[:, None, None], -math.inf).softmax(-1)

    def forward(self, z, seen):
        """z (B, S, d_w), seen (B, S) -> (B, S, d_w)"""
        key, query, value = (self.per_head(project(z)) for project in (self.key, self.query, self.value))  # Eq. 13
        heads = F.scaled_dot_product_attention(key, query, value, seen[:, None, None])  # Eq. 14
        z = self.norm1(z + self.dropout(self.merge(heads.transpose(1, 2).flatten(2))))  # Eq. 15
        return self.norm2(z + self.dropout(self.linear2(F.relu(self.linear1(z)))))


class AttFc(nn.Module):
    """ICMLM-att-fc: the text says where to look, and the word is named from what is seen there alone [Sec. 3.2]."""

    def __init__(self, channels, width, vocabulary_width, layers, heads, attention_width):
        super().__init__()
        self.att = nn.ModuleList(AttentionHead(channels, width, attention_width) for _ in range(heads))
        self.average = nn.Linear(heads, 1)  # a weighted average, equal weights at first
        nn.init.constant_(self.average.weight, 1 / heads)
        nn.init.zeros_(self.average.bias)
        widths = [channels, *[vocabulary_width] * layers]
        self.fc = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()) for a, b in zip(widths, widths[1:])))

    def forward(self, x, words, visible, position, maps=False):  # it asks the whole caption, and its maps cost nothing
        s = torch.stack([head(x, words, visible) for head in self.att], -1)
        # Not as a layer, which autocast would round: half a percent more attention is a lot at first.
        s = (s * self.average.weight[0]).sum(-1) + self.average.bias
        p = s.softmax(1)  # Eq. 5: (B, H * W)
        pooled = (p[:, None].to(x.dtype) @ x).squeeze(1)  # x^ = X^T p: (B, d_x)
        return self.fc(pooled), p


class AttentionHead(nn.Module):
    """Eqs. 3 and 4: how much each place of the photo answers to the caption."""

    def __init__(self, channels, width, attention_width):
        super().__init__()
        self.sigma_x, self.norm_x = nn.Linear(channels, attention_width, bias=False), nn.LayerNorm(attention_width)
        self.sigma_w, self.norm_w = nn.Linear(width, attention_width, bias=False), nn.LayerNorm(attention_width)

    def forward(self, x, words, visible):
        """x (B, H * W, d_x), words (B, T, d_w), visible (B, T) -> s (B, H * W)"""
        x, words = F.relu(self.norm_x(self.sigma_x(x))), F.relu(self.norm_w(self.sigma_w(words)))
        scores = x @ words.transpose(1, 2) / math.sqrt(x.size(-1))  # Eq. 3: S (B, H * W, T)
        return scores.float().masked_fill(~visible[:, None], -math.inf).logsumexp(2)  # Eq. 4


# ------------------------------------------------------------------------------------------ the proxy task

RANKED = ("with the photo", "with another photo", "language model alone")


@torch.no_grad()
def validate(model, lm, triplets, concepts, tokenizer, args, device):
    """Masked words found on the validation split -> the entries of result.json

    {"masked_words": {"triplets": n, "with the photo": {"top1", "top5", "nouns top1", ...}, "language model alone": {...} [Tab. 1],
    "with another photo": {...}}}: of another sample, what the head knows of captions without seeing [ours]; on shapes also
    "attention": what part of it lies inside the box of the masked word's object, and the box's part of the area.
    """
    model.eval()
    chosen = np.sort(np.random.default_rng(args.seed).permutation(len(triplets))[: args.proxy_triplets])
    view = TripletView(triplets, tokenizer, args, training=False, chosen=chosen)
    together = functools.partial(collate, tags=triplets.tags, mirrored=None, padding=tokenizer.pad_token_id)
    loader = DataLoader(view, 64, num_workers=args.workers, collate_fn=together, worker_init_fn=common.ignore_signals)
    ranks, targets, maps = {name: [] for name in RANKED}, [], []
    for batch in progress(loader, desc="masked words", unit=" batches", leave=False):
        batch.pop("unreadable")
        batch = {key: value.to(device) for key, value in batch.items()}
        words = lm.read(batch["tokens"], batch["visible"])
        with common.autocast(device, args.amp):
            features = model.backbone(common.augment(batch["images"]))
            found, attention = model.fill_in(features, words, batch["visible"], batch["position"], maps=True)
            blind, _ = model.fill_in(features[another_photo(batch["index"].tolist())], words, batch["visible"], batch["position"])
        alone = words[torch.arange(len(words), device=device), batch["position"]]
        # In float32: in half precision many words share the best score, and each of them would count as found.
        logits = lm.score(found.float(), args.head), lm.score(blind.float(), args.head), lm.classify(alone.float())
        for name, scores in zip(RANKED, logits):
            ranks[name].append((scores > scores.gather(1, batch["target"][:, None])).sum(1).cpu())
        targets += batch["target"].tolist()
        maps.append(attention.float().cpu())
    model.train()
    word_of = maskable_tokens(tokenizer, list(concepts))
    masked = [word_of[target] for target in targets]
    parts = np.array([concepts[word] for word in masked])
    result = {"triplets": len(masked)}
    for name in ranks:
        rank = torch.cat(ranks[name]).numpy()
        result[name] = {f"top{k}": 100 * float((rank < k).mean()) for k in (1, 5)}
        result[name] |= {f"{part} top1": 100 * float((rank[parts == part] < 1).mean()) for part in sorted(set(parts))}
    result = {"masked_words": result}
    if args.data == "shapes":
        scenes = [triplets.images[triplets[n][0]] for n in chosen]
        shares = attention_inside_boxes(scenes, masked, torch.cat(maps).numpy())
        result |= {"attention": shares} if shares["words"] else {}
    return result


def another_photo(images):
    """For each sample of a batch, by the index of its photo, the next sample that has another photo (if there is one)."""
    n = len(images)
    return [next((j % n for j in range(i + 1, i + n) if images[j % n] != image), i) for i, image in enumerate(images)]


def attention_inside_boxes(scenes, masked, maps):
    """Where a masked word names exactly one object of a scene by shape or colour: the part of the attention inside the
    object's box, and the box's part of the area, which a blind attention would get -> {"inside", "area", "words"}, percent

    maps (N, h, w), each with the sum 1; the attention of a cell is spread evenly over it.
    """
    import shapes

    inside, area = [], []
    for scene, word, attention in zip(scenes, masked, maps):
        named = [o for o in shapes.shapes_scene(scene) if word in (o.shape, o.colour)]
        if len(named) != 1:
            continue
        left, top, right, bottom = named[0].box
        overlap = lambda low, high, n: (np.minimum(high * n, np.arange(n) + 1) - np.maximum(low * n, np.arange(n))).clip(0)
        inside.append(overlap(top, bottom, maps.shape[1]) @ attention @ overlap(left, right, maps.shape[2]))
        area.append((right - left) * (bottom - top))
    return {"inside": 100 * float(np.mean(inside or 0)), "area": 100 * float(np.mean(area or 0)), "words": len(inside)}


# ------------------------------------------------------------------------------------------ for people


@torch.no_grad()
def explain(args, device):
    """`--explain`: fill in a masked word with and without the photo, and draw where the model looks [Figs. 1, 3, 4, 5]."""
    content = common.read_checkpoint(args.weights)
    if not isinstance(content, dict) or content.get("script") != "icmlm":
        fail(f"{args.weights} is no checkpoint.pth of icmlm.py (a backbone alone cannot fill in words)")
    trained, concepts = argparse.Namespace(**content["args"]), content["concepts"]
    if args.lm:  # it may have been moved
        trained.lm = args.lm
    elif trained.lm == "scratch":
        trained.lm = str(Path(args.weights).parent / "language_model")
    tokenizer, pretrained = language.language_model(trained, None, None, device)
    lm = FrozenLanguageModel(pretrained, args.amp)
    model = build_model(trained, lm, len(concepts))
    try:
        model.load_state_dict(content["model"])
    except RuntimeError:
        fail(f"--lm {trained.lm} has other sizes than the language model that {args.weights} was trained with")
    model.to(device).eval()

    encoded = tokenizer(args.caption, return_tensors="pt")
    if encoded["input_ids"].size(1) > pretrained.config.max_position_embeddings:
        fail(f"the caption has {encoded['input_ids'].size(1)} tokens, more than the {pretrained.config.max_position_embeddings} of the language model")
    tokens, position = encoded["input_ids"], word_position(tokenizer, encoded, args.word, concepts)
    masked = tokens.clone()
    masked[0, position] = tokenizer.mask_token_id
    photos = common.ImageFiles([args.explain])
    photos.check("check the path")
    pixels, readable = common.CropView(photos, trained.image_size, part=1.0)[0]
    if not readable:
        fail(f"{args.explain} cannot be decoded, is it a photo?")
    visible = torch.ones_like(tokens, dtype=torch.bool, device=device)
    words = lm.read(masked.to(device), visible)
    with common.autocast(device, args.amp):
        images = common.augment(torch.from_numpy(pixels)[None].to(device))
        found, _, attention = model(images, words, visible, torch.tensor([position], device=device), maps=True)
        logits = {"with the photo": lm.score(found, trained.head), "without it": lm.classify(words[:, position])}
    say(tokenizer.decode(masked[0], skip_special_tokens=False))
    for name, scores in logits.items():
        best = scores.float().softmax(1)[0].topk(5)
        guesses = ", ".join(f"{tokenizer.decode([token]).strip()} {100 * p:.1f}%" for p, token in zip(best.values.tolist(), best.indices.tolist()))
        say(f"{name}: {guesses}")
    folder = Path(args.output, "explained")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(args.explain).stem}_{args.word}.png"
    heat = attention[0].float().cpu()
    if heat.numel() == 1:
        say("the attention has one place only: train at a larger --image-size to see where it looks")
    common.draw_attention(Image.fromarray(pixels), args.caption, [(args.word, heat)], path)
    say(f"the attention is in {path}")


def word_position(tokenizer, encoded, word, concepts):
    """Where `word` stands in the caption; ends the program when it cannot be masked there."""
    pieces = {}
    for m, n in enumerate(encoded.word_ids(0)):
        if n is not None:
            pieces.setdefault(n, []).append(m)
    tokens, maskable = encoded["input_ids"][0].tolist(), maskable_tokens(tokenizer, list(concepts))
    wanted = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    spelled = [group for group in pieces.values() if [tokens[m] for m in group] == wanted]
    choice = [maskable[tokens[group[0]]] for group in pieces.values() if len(group) == 1 and tokens[group[0]] in maskable]
    others = f"; these words of the caption can be masked: {', '.join(dict.fromkeys(choice)) or 'none'}"
    if not spelled:
        fail(f'"{word}" is not a word of the caption{others}')
    if len(wanted) > 1:
        fail(f'"{word}" is {len(wanted)} tokens of the language model, {" ".join(tokenizer.convert_ids_to_tokens(wanted))}, and only one can be masked{others}')
    if wanted[0] not in maskable:
        fail(f'"{word}" is not among the {len(concepts)} concepts that were trained{others}')
    return spelled[0][0]


if __name__ == "__main__":
    common.run(main, get_args)
