"""ICMLM: a backbone learned by predicting masked words of captions with the help of the photo.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

One word of a caption is masked: a noun, an adjective or a verb. A frozen language model reads the
rest of the caption, and the photo has to supply the missing word [Sec. 3.2]. In the variant tfm, a
Transformer encoder reads photo and text together. In att-fc, the text only decides where to look,
and the word is predicted from the image features at that place. Both also predict tags.

    laptop        python icmlm.py
    own photos    python tp.py --data photos.jsonl
                  python icmlm.py --data photos.jsonl --init runs/tp-photos/backbone.pth
    one GPU       python icmlm.py --data coco --accumulate 4 --init runs/tp-coco/backbone.pth
    eight GPUs    torchrun --nproc_per_node=8 icmlm.py --data coco \\
                      --init runs/tp-coco/backbone.pth
    VG, VGG-16    python tp.py --data vg --labels rotation --output runs/rotation-vg   (one GPU)
                  torchrun --nproc_per_node=4 icmlm.py --data vg --arch vgg16_bn --head att-fc \\
                      --init runs/rotation-vg/backbone.pth
    attention     python -m downstream.masked_words photo.jpg --caption "a dog on a surfboard" \\
                      --word surfboard --weights runs/icmlm-coco/checkpoint.pth

Where the paper is:

    Eqs. 1, 2, labels, tag prediction          tp.py; tag_head, tag_loss
    Eqs. 3, 4, match of location and caption   AttentionHead.forward
    Eq. 5, attention, pooling                  AttFc.attention, AttFc.forward
    Eq. 6, scores of tokens                    AttFc.scores, Tfm.scores
    Eqs. 7, 8, losses                          main
    Eqs. 13, 14, 15, Transformer encoder       EncoderLayer.forward, Tfm
    triplets of photo, caption, word [Sec. 4]  find_triplets, MaskedWords
    masked token prediction [Tab. 1]           validate

What to expect: in tfm, the loss `mlm` starts near that of the language model alone, because the
residual path of the new encoder layer passes on the language model's vectors. In att-fc, it starts
near ln |V| for a vocabulary of |V| tokens. Each validation measures the accuracy of masked token
prediction [Tab. 1] with the photo, with another photo (of few validation photos, that is sometimes
the same), and by the language model alone. If the first two are about equal, the model ignores the
photo. Then start from the backbone of tp.py (--init), use --head att-fc, and train its attention
first (--warmup-attention 0.25). See docs/logs/icmlm for a run.
"""

import math
import time
import zlib
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import regex
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset, default_collate

import common
from common import fail, print_main, progress

HEADS = "tfm", "att-fc"
POS = "nn", "nn+adj", "nn+adj+vb"  # nouns, adjectives, verbs [Tab. 4]
TAGGERS = "textblob", "spacy"  # the first is the default [ours]
# Each flag: its values in the recipes demo, small [ours] and paper; what may be given; help. Round
# brackets say what None stands for.
FLAGS = {
    # name                demo         small        paper                what may be given; help
    # Data
    "data":              ("shapes",    "shapes",    "shapes",            str,
        "shapes (built in), coco, vg, the path of a .jsonl file, or a folder of shards"),
    "recipe":            (None,        None,        None,                common.RECIPES,
        "which column of this table the defaults come from (demo for shapes, small for a "
        ".jsonl, else paper)"),
    "root":              (None,        None,        None,                str,
        "folder of the data (datasets/NAME; for a .jsonl, its own folder)"),
    "train_split":       (None,        None,        None,                str,
        "split for training (train2017 for coco, else train)"),
    "val_split":         (None,        None,        None,                str,
        "split for validation (val2017 for coco, else val)"),
    "image_size":        (48,          112,         224,                 "int > 0",
        "side of the crops in pixels; the cost grows with its square [as in App. F.2]"),
    "crop_min":          (1.0,         0.5,         0.2,                 "> 0, <= 1",
        "smallest crop, as a fraction of the photo's area [ours]"),
    "colour_jitter":     (0.0,         0.4,         1.0,                 ">= 0",
        "strength of the colour jitter; lower it if captions name colours [ours]"),
    "workers":           (None,        None,        None,                "int >= 0",
        "processes that load photos (a share of the cores); raise it if data_wait exceeds 0.05"),
    # Language model and concepts
    "lm":                ("scratch",   "scratch",   "bert-base-uncased", str,
        "a BERT or RoBERTa from the hub or a folder, or scratch, which trains a small one first"
        " [Sec. 3.2: BERT-base; uncased: ours]"),
    "lm_iters":          (200,         2000,        20_000,              "int > 0",
        "iterations of training --lm scratch; raise them with the captions [ours]"),
    "lm_layers":         (2,           4,           4,                   "int > 0",
        "layers of --lm scratch [ours]"),
    "pos":               ("nn+adj+vb", "nn+adj+vb", "nn+adj+vb",         POS,
        "parts of speech of the words to predict [Sec. 4.2, Tab. 4]"),
    "tagger":            ("textblob",  "textblob",  "textblob",          TAGGERS,
        "what finds the parts of speech; the paper uses spacy"),
    "max_words":         (25,          25,          25,                  "int > 0",
        "longer captions are left out [Sec. 4]; raise it for reports"),
    "num_concepts":      (5000,        5000,        5000,                "int > 0",
        "mask and predict this many words, the most frequent ones [Sec. 4.2, 4.3]"),
    # Model
    "arch":              ("resnet18",  "resnet18",  "resnet50",          common.BACKBONES,
        "architecture of the backbone; resnet18 suits few photos or a CPU [Sec. 4.3]"),
    "init":              (None,        None,        None,                str,
        "weights that the backbone starts from: imagenet, or a file with a backbone"),
    "head":              ("tfm",       "tfm",       "tfm",               HEADS,
        "how the photo helps; att-fc gives better backbones on VOC [Sec. 4.1]"),
    "layers":            (1,           1,           1,                   "int > 0",
        "layers of tfm, or of fc in att-fc; two mostly give a worse backbone [Tab. 5]"),
    "heads":             (1,           1,           1,                   "int > 0",
        "attention heads of tfm or att-fc [Sec. 4.3]"),
    # Optimisation
    "batch_size":        (32,          64,          512,                 "int > 0",
        "triplets per iteration, over all processes [App. F.1]"),
    "iters":             (440,         None,        500_000,             "int > 0",
        "training iterations; raise them with the data [App. F.1]"),
    "epochs":            (None,        1.14,        None,                "> 0",
        "passes over the triplets, instead of --iters"),
    "optimizer":         ("AdamW",     "AdamW",     "SGD",               common.OPTIMIZERS,
        "how the weights are updated [App. F.1]"),
    "lr":                (1e-3,        2e-4,        0.03,                "> 0",
        "peak learning rate; lower it if the loss is not finite [App. F.1]"),
    "head_lr":           (None,        None,        None,                "> 0",
        "peak learning rate of the layers above the backbone, which start anew (that of --lr)"),
    "warmup":            (0.05,        0.1,         0.0,                 ">= 0, < 1",
        "length of the learning rate's warm-up, as a fraction of training [ours]"),
    "weight_decay":      (0.01,        0.01,        1e-4,                ">= 0",
        "weight decay; raise it if photos are few [App. F.1]"),
    "lambda_tp":         (4.0,         1.0,         0.1,                 ">= 0",
        "weight of tag prediction [Eq. 8, App. B]; with 0 the backbone does not learn from tags"),
    "warmup_attention":  (0.0,         0.0,         0.0,                 ">= 0, < 1",
        "fraction of training in which the backbone of --init is frozen, while attention "
        "learns [App. F.1: VGG-16]"),
    # Run
    "output":            (None,        None,        None,                str,
        "folder for results, and for resuming (runs/SCRIPT, or runs/SCRIPT-DATA)"),
    "seed":              (0,           0,           0,                   "int >= 0",
        "seed of all random numbers"),
    "amp":               (None,        None,        None,                common.PRECISIONS,
        "mixed precision (bf16 if the device supports it, else off)"),
    "accumulate":        (1,           1,           1,                   "int > 0",
        "split each batch into this many micro-batches, if memory is short"),
    "log_every":         (10,          20,          20,                  "int > 0",
        "iterations between lines of metrics.jsonl"),
    "validate_every":    (1000,        None,        10_000,              "int > 0",
        "iterations between validations (2,000, or a fifth of a shorter run)"),
    "checkpoint_every":  (200,         500,         5000,                "int > 0",
        "iterations between saves of checkpoint.pth; each validation saves, too"),
    "save_minutes":      (2.0,         2.0,         10.0,                "> 0",
        "minutes after which checkpoint.pth is saved in any case"),
    "keep_every":        (None,        None,        None,                "int > 0",
        "also keep a model_N.pth every N iterations, to choose the best later"),
    "proxy_triplets":    (2000,        5000,        None,                "int > 0",
        "masked words of the last validation (all of them)"),
}
VGG16 = {  # of the recipe paper, what is different with VGG-16
    "num_concepts": 1000,  # Sec. 4.2
    "lambda_tp": 1.0,  # App. B
    "warmup_attention": 0.25,  # App. F.1: 50K of 200K iterations, only for att-fc
    "optimizer": "RAdam",  # App. F.1 gives these, lr, steps and decay for TP; here too [ours]
    "batch_size": 896,
    "iters": 200_000,
    "lr": 1e-4,
    "steps": [0.8, 0.9],
    "weight_decay": 1e-3,
}
ATTENTION_WIDTH = 512  # d_z of Eq. 3, per head [ours]
DROPOUT = 0.1  # in tfm, as in BERT, but its attention has none [ours]


def get_args(argv=None):
    parser = common.Parser(__doc__, FLAGS)
    parser.add_argument("--steps", type=common.number(">= 0, < 1"), nargs="+",
        help="divide the rates by 10 after these fractions of training,\ninstead of the cosine")
    args = parser.parse_args(argv)
    vgg = args.arch == "vgg16_bn"
    if vgg and args.heads is None:
        args.heads = 12  # one head is worse [App. B]; Sec. 4 has 12, App. E 8
    if args.warmup_attention is None and not (args.init and args.head == "att-fc"):
        args.warmup_attention = 0.0  # attention needs trained features
    common.apply_recipe(args, "icmlm", FLAGS, **(VGG16 if vgg else {}))
    args.head_lr = args.head_lr or args.lr
    args.steps = args.steps or []  # cosine
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    init = common.read_init(args)  # a backbone's weights, or None

    # Data: a frozen language model, and one triplet for each word that can be masked.
    splits = args.train_split, args.val_split
    train, val = common.caption_data(args.data, args.root, splits)
    train, val = train.captioned(), val.captioned()
    lm_name = f"{args.output}/language_model" if args.lm == "scratch" else args.lm
    checkpoint = common.begin_run(args, train.checksum(), val.checksum())  # {} for a new run
    if args.lm == "scratch" and common.is_main() and not checkpoint:
        common.extra("small_bert").make_language_model(lm_name, args, train, device)
    common.barrier()
    tokenizer, lm = load_language_model(lm_name, device, args.amp)
    teacher = checksum(lm)
    if checkpoint and checkpoint["teacher"] != teacher:
        fail(f"{args.output} holds a run with another language model than {lm_name}: choose "
             "another --output, or delete the folder to start over")
    if common.is_main() and not checkpoint:
        make_triplets(args, (train, val), tokenizer)  # once, for all processes
    common.barrier()
    concepts, triplets, val_triplets = load_triplets(args, (train, val), tokenizer)
    outputs = (f"{len(triplets):,} masked words to predict among {len(lm.token_embeddings):,} "
               f"tokens, {len(concepts):,} concepts")
    counts = [len(np.unique(data.triplets[:, 0])) for data in (triplets, val_triplets)]  # photos
    iters, validate_every = common.plan_run(args, device, *counts, outputs, len(triplets))

    # Model: from random weights, from --init, or from the checkpoint.
    torch.manual_seed(args.seed)
    model = ICMLM(args, lm.token_embeddings.size(1), len(concepts))
    if init:
        model.backbone.load_state_dict(init)
    model.to(device, memory_format=torch.channels_last)
    frozen_iters = int(args.warmup_attention * iters)  # App. F.1
    frozen = checkpoint.get("iteration", 0) < frozen_iters
    freeze_backbone(model, frozen)
    ddp = common.data_parallel(model)
    # The backbone has its own group: while it is frozen, it has no momentum, and fused SGD needs
    # that for a whole group.
    groups = [
        {"params": model.backbone.parameters()},
        {"params": model.head.parameters(), "lr": args.head_lr},
        {"params": model.tags.parameters(), "lr": args.head_lr},
    ]
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, state)

    batches = common.train_batches(triplets, collate, args, device, done)
    log = common.Log(args, done)
    more = {"concepts": concepts, "teacher": teacher}  # for downstream/masked_words.py
    bar = common.iterations(done, iters)
    for iteration in bar:
        # Learning rates: warm-up [ours], then cosine decay or steps [App. F.1]
        decay = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, decay)

        # The end of the attention's warm-up [App. F.1]
        if frozen and iteration > frozen_iters:
            frozen = False
            freeze_backbone(model, frozen)
            ddp = common.data_parallel(model)  # anew: the old one ignores the backbone's gradients

        # Gradients: --accumulate micro-batches, averaged over all processes after the last one
        optimizer.zero_grad()
        for part in range(args.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - started
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(batch["image"], batch["jitter"])  # (B, 3, h, w)
            mask = batch["attention_mask"]  # (B, T)
            with common.autocast(device, args.amp):
                W = lm(batch["tokens"], mask)  # (B, T, d_w)
                vector, tag_logits = ddp(images, W, mask, batch["mask_pos"])
                logits = model.head.scores(vector, lm)  # Eq. 6: (B, |V|)
            # Eq. 7: softmax over the vocabulary; mean over triplets, not captions [App. F.1]
            mlm = F.cross_entropy(logits.float(), batch["target"])
            tp = tag_loss(tag_logits, batch["tags"])  # Eq. 2
            loss = mlm + args.lambda_tp * tp  # Eq. 8
            log.add(loss=loss, mlm=mlm, tp=tp)
            if not args.lambda_tp:  # the tag head learns from detached features [ours; App. B]
                loss = loss + tp
            scaler.scale(loss / args.accumulate).backward()

        # Step
        scaler.step(optimizer)
        scaler.update()

        # Log, validate, save
        last = iteration == iters
        validating = last or iteration % validate_every == 0
        if validating or iteration % args.log_every == 0:
            row = log.means() | {"lr": args.lr * decay}
            bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
            if validating and common.is_main():
                print_main(f"validation after {iteration:,} of {iters:,} iterations:")
                num_triplets = args.proxy_triplets  # None for all
                if not last:
                    num_triplets = min(5000, num_triplets or 5000)  # [ours]
                result = validate(model, lm, val_triplets, args, device, num_triplets)
                row |= {f"validation_{name}": x for name, x in result["validation"].items()}
                # Before the checkpoint, so that no finished run lacks its result
                common.save(f"{args.output}/result.json", result)
            log.write(iteration, row)
        common.save_if_due(args, iteration, state, more, validating)

    common.end_run(args, model.backbone, "masked_words --photos 4")


def freeze_backbone(model, frozen):
    """Train the whole model, or all but the backbone, whose batch statistics then stay [ours]"""
    model.train()
    model.backbone.train(not frozen).requires_grad_(not frozen)


# ------------------------------------------ captions to concepts: this section is copied from tp.py

PARTS_OF_SPEECH = {"nn": "nouns", "adj": "adjectives", "vb": "verbs"}
PENN = {"NN": "nouns", "JJ": "adjectives", "VB": "verbs"}  # first two letters of textblob's tags
WHO_TAGGED = {  # said where only nouns are kept
    "textblob": "TextBlob says which words are nouns, and mistakes some for verbs, for example "
    "bear and sink; the paper used spaCy (--tagger spacy)",
    "spacy": "spaCy says which words are nouns, as in the paper",
}
# Auxiliary verbs name nothing visible. spaCy has a tag for them, TextBlob does not. [ours]
AUXILIARIES = set(
    "be am is are was were been being do does did have has had having can could may might must "
    "shall should will would".split()
)
# Group 1 is a word: letters, also joined by ' or - ("can't", "t-shirt"), but not the x of "2x". A
# possessive 's matches without a group, and is dropped. [ours]
LETTERS = r"\p{L}[\p{L}\p{M}\u200c\u200d]*"  # with their marks and joiners
JOINED = rf"{LETTERS}(?:(?!['’]s\b)['’-]{LETTERS})*"
WORD = regex.compile(rf"['’]s\b|(?<![^\W_])({JOINED})", regex.I)


def words_of(caption):
    """-> its words in lower case"""
    return [word.lower() for word in WORD.findall(caption) if word]


def filter_captions(data, tokenize, max_words):
    """Keep each photo's distinct captions of 3 to 25 tokens [Sec. 4, Datasets] -> CaptionData

    tokenize: caption -> its words, or the language model's tokens [ours].  max_words: that 25
    """
    keep = partial(captions_of_length, tokenize=tokenize, max_words=max_words)
    rows, kept = list(data.captions), []
    for part in common.on_all_cores(keep, rows, "caption lengths"):
        kept += part
    before, after = sum(map(len, rows)), sum(map(len, kept))
    if before > after:
        print_main(f"{before - after:,} of {before:,} captions are left out: a photo has them "
                   f"twice, or they do not have 3 to {max_words} words or tokens")
    if not after:
        fail(f"of {before:,} captions of a split, none is left: raise --max-words, join keywords "
             "into a caption, or use virtex.py for Chinese and other languages without spaces")
    return replace(data, captions=common.lists(kept))


def captions_of_length(rows, tokenize, max_words):
    """Lists of captions -> the same without repeated, short and long captions"""
    kept = []
    for captions in rows:
        distinct = dict.fromkeys(captions)
        kept.append([text for text in distinct if 3 <= len(tokenize(text)) <= max_words])
    return kept


def count_tags(captions, tagger):
    """-> {(word, "nouns" | "adjectives" | "verbs" | None): how often it is tagged as that}"""
    if tagger == "spacy":
        captions = progress(captions, desc="parts of speech", leave=False)
        return Counter(common.extra("nouns").tag_by_spacy(map(words_of, captions)))
    counts = Counter()
    for part in common.on_all_cores(count_tags_of_textblob, captions, "parts of speech"):
        counts.update(part)
    return counts


def count_tags_of_textblob(captions):
    from textblob.en.taggers import PatternTagger  # its lexicon is in the package

    pattern = PatternTagger()
    counts = Counter()
    for caption in captions:
        tags = pattern.tag(" ".join(words_of(caption)), tokenize=False)
        counts.update((word, PENN.get(tag[:2])) for word, tag in tags)
    return counts


def count_concepts(captions, tagger):
    """The words of the captions by part of speech [Sec. 3.1], with counts, the most frequent first

    -> {"nouns": {word: count}, "adjectives": ..., "verbs": ...}. A word belongs to what it is
    tagged as most often, with all its occurrences; if that is none of the three, it is out. [ours]
    """
    counts = defaultdict(Counter)  # of the parts of speech that each word is tagged as
    for (word, part), number in count_tags(captions, tagger).items():
        if part == "verbs" and word in AUXILIARIES:
            part = None
        counts[word][part] += number
    concepts = {part: {} for part in PARTS_OF_SPEECH.values()}
    for word in sorted(counts, key=lambda word: (-counts[word].total(), word)):
        part = max(counts[word], key=counts[word].get)
        if part and len(word) > 1 and not regex.search("['’]", word):  # [ours]
            concepts[part][word] = counts[word].total()
    return concepts


def top_concepts(counts, pos, num_concepts):
    """The most frequent words of the parts of speech `pos` -> {word: its part of speech}

    counts: from count_concepts
    """
    parts = [PARTS_OF_SPEECH[name] for name in pos.split("+")]
    chosen = sorted((-count, word, part) for part in parts for word, count in counts[part].items())
    concepts = {word: part for _, word, part in chosen[:num_concepts]}
    if ("left" in concepts) != ("right" in concepts):  # a flipped photo would need the other [ours]
        concepts.pop("left", None)
        concepts.pop("right", None)
    if not concepts:
        fail(f"no remaining caption has a word to predict (--pos {pos})")
    return concepts


# ----------------------------------------------------------- triplets of photo, caption and word


def make_triplets(args, splits, tokenizer):
    """Write what is found in the captions into --output.  splits: CaptionData of train and val"""
    if args.pos == "nn":
        print_main(WHO_TAGGED[args.tagger])
    if args.lm != "scratch":
        common.check_tokenizer(tokenizer, splits[0].all_captions(), f"--lm {args.lm}")
    longest = min(args.max_words, tokenizer.model_max_length - 2)  # [CLS] and [SEP] are added
    splits = [filter_captions(data, tokenizer.tokenize, longest) for data in splits]
    common.save(f"{args.output}/captions.json", [list(data.captions) for data in splits])
    counts = count_concepts(splits[0].all_captions(), args.tagger)
    common.save(f"{args.output}/concepts.json", counts)
    concepts = top_concepts(counts, args.pos, args.num_concepts)
    triplets = [find_triplets(data, concepts, tokenizer) for data in splits]
    with common.writing(f"{args.output}/triplets.npz") as file:
        np.savez(file, *triplets)


def load_triplets(args, splits, tokenizer):
    """-> {concept: part of speech}, the most frequent first; MaskedWords of train; those of val"""
    counts = common.read_json(f"{args.output}/concepts.json")
    concepts = top_concepts(counts, args.pos, args.num_concepts)
    kept = common.read_json(f"{args.output}/captions.json")
    samples = []
    with np.load(f"{args.output}/triplets.npz") as arrays:
        for data, captions, triplets in zip(splits, kept, arrays.values()):
            data = replace(data, captions=common.lists(captions))
            samples.append(MaskedWords(data, triplets, concepts, tokenizer, args))
    return concepts, samples[0], samples[1]


def find_triplets(data, concepts, tokenizer):
    """A triplet for each concept that is exactly one token of a caption [ours] -> (N, 4) int32

    Its columns are the photo, the number of the caption, the position of the token in it, and the
    concept. "shirt" cannot be masked in "t-shirt", which is one word of several tokens.
    """
    index = {concept: k for k, concept in enumerate(concepts)}
    find = partial(find_concepts, index=index, tokenizer=tokenizer)
    rows = list(enumerate(data.captions))
    found = np.concatenate(list(common.on_all_cores(find, rows, "triplets")))
    triplets = found[found[:, 2] >= 0]
    if not len(triplets):
        fail("no caption has one of the words that icmlm.py masks: see its --pos, --num-concepts")
    if len(triplets) < len(found) / 2:
        print_main(f"only {len(triplets)} of {len(found)} words to mask are single tokens of the "
                   "language model, and the others are left out: is it meant for such captions?")
    return triplets


def find_concepts(rows, index, tokenizer):
    """As find_triplets, but for all concepts: the position is -1 if a concept is not one token

    rows: (photo, its captions).  index: {concept: its number}
    """
    found = []
    for photo, captions in rows:
        for n, caption in enumerate(captions):
            encoded = tokenizer(caption, return_offsets_mapping=True)
            positions = {}  # of the tokens, by their spans
            for t, (start, end) in enumerate(encoded["offset_mapping"]):
                if encoded["input_ids"][t] != tokenizer.unk_token_id:
                    piece = caption[start:end].lstrip()  # the space before it may be in its token
                    positions[end - len(piece), end] = t
            for match in WORD.finditer(caption):
                word = match[0].lower()
                if word in index:
                    t = positions.get(match.span(), -1)
                    found.append((photo, n, t, index[word]))
    return np.array(found, np.int32).reshape(-1, 4)


class MaskedWords(common.Photos):
    """Photo, caption, masked word [Sec. 4, Datasets]: up to 13 million triplets [App. F.1]"""

    def __init__(self, data, triplets, concepts, tokenizer, args):
        super().__init__(data, args)
        self.triplets = triplets  # (N, 4), see find_triplets
        self.concepts = concepts  # {concept: part of speech}
        self.index = {concept: k for k, concept in enumerate(concepts)}
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.triplets)

    def sample(self, index, rng):
        """-> image, jitter, tokens (T,), mask_pos, target, concept, tags (K,); see `collate`"""
        photo, n, mask_pos, concept = self.triplets[index].tolist()
        sample, flipped = self.photo(photo, rng)
        captions = self.data.captions[photo]
        encoded = self.tokenizer(captions[n])
        if flipped:
            captions = [common.swap_left_right(caption) for caption in captions]
            swapped = self.tokenizer(captions[n])
            # If LEFT is two tokens and RIGHT one, a swap would move the words between them. [ours]
            if swapped.word_ids() == encoded.word_ids():
                encoded = swapped
        tokens = torch.tensor(encoded["input_ids"])
        target = int(tokens[mask_pos])
        tokens[mask_pos] = self.tokenizer.mask_token_id
        tags = np.zeros(len(self.index), np.float32)
        words = self.index.keys() & words_of(" ".join(captions))
        tags[[self.index[word] for word in words]] = 1
        sample |= {"tokens": tokens, "mask_pos": mask_pos, "target": target}
        return sample | {"concept": concept, "tags": tags}


def collate(samples):
    """-> image uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T), tags (B, K), mask_pos,
    target, concept (B,), attention_mask (B, T): False at padding
    """
    rows = [sample.pop("tokens") for sample in samples]
    batch = default_collate(samples)
    batch["tokens"] = pad_sequence(rows, batch_first=True)
    visible = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    batch["attention_mask"] = pad_sequence(visible, batch_first=True)
    return batch


# --------------------------------------------------------------------- the frozen language model


def load_language_model(name, device, amp):
    """name: a BERT or RoBERTa, on the hub or in a folder -> tokenizer, LanguageModel"""
    tokenizer, _ = common.load_lm_tokenizer(name)
    model = common.load_lm(name, "AutoModelForMaskedLM", attn_implementation="sdpa")
    if not (hasattr(model, "cls") or hasattr(model, "lm_head")):
        fail(f"--lm {name} is a {type(model).__name__}, not a BERT or RoBERTa")
    return tokenizer, LanguageModel(model.to(device), amp)


def checksum(lm):
    """Of its token embeddings: the weights of LanguageModel are in no checkpoint"""
    return zlib.crc32(lm.token_embeddings.cpu().numpy())


class LanguageModel(nn.Module):
    """psi of the paper, module 2 of Fig. 2, frozen: tokens and their mask (B, T) -> W (B, T, d_w)

    token_embeddings: V (|V|, d_w), its input embeddings.
    mlm_head: its token classification layer, (B, d_w) -> (B, |V|).
    """

    def __init__(self, model, amp):
        super().__init__()
        self.encoder = model.base_model
        self.mlm_head = getattr(model, "cls", None) or model.lm_head  # RoBERTa's
        self.token_embeddings = model.get_input_embeddings().weight
        self.eval().requires_grad_(False)
        # The encoder is cast once, because autocast would cast frozen weights at each use. mlm_head
        # and V stay float32 for validation; autocast casts them in training.
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear):
                module.to(common.HALF.get(amp, torch.float32))

    @torch.no_grad()
    def forward(self, tokens, attention_mask):
        mask = attention_mask[:, None, None]  # (B, T) would make transformers wait for the GPU
        return self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state.float()


# ----------------------------------------------------------------------------------------- model


class ICMLM(nn.Module):
    """Backbone, a head for the masked token, a tag head: modules 1, 3 or 4, 5 of Fig. 2."""

    def __init__(self, args, width, num_tags):
        """args: arch, head, layers, heads, lambda_tp.  width: d_w of the language model"""
        super().__init__()
        self.backbone = common.build_backbone(args.arch)
        channels = self.backbone.channels
        kind = Tfm if args.head == "tfm" else AttFc
        self.head = kind(channels, width, args.layers, args.heads)
        self.tags = tag_head(args.arch, channels, num_tags)
        self.lambda_tp = args.lambda_tp

    def forward(self, images, token_features, attention_mask, mask_pos):
        """images (B, 3, h, w); token_features: W (B, T, d_w); attention_mask (B, T); mask_pos (B,)

        -> a vector that stands for the masked token (B, d_w); tag logits (B, K)
        """
        features = self.backbone(images)  # X: (B, d_x, H, W)
        vector = self.head(features, token_features, attention_mask, mask_pos)
        return vector, self.tags(features if self.lambda_tp else features.detach())


# Copied from tp.py
def tag_head(arch, channels, num_labels):
    """Module tp of Fig. 2: (B, channels, h, w) -> logits (B, K). Widths and norms [ours].

    ResNets: pooling and a 2-layer MLP [Sec. 4.3]. VGG-16: 4 convolutions, pooling and a linear
    layer, in place of its fully connected layers [Sec. 4, Networks].
    """
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if arch == "vgg16_bn":
        layers = []
        for _ in range(4):
            convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
        layers += pool
    else:
        layers = [*pool, nn.Linear(channels, channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(channels, num_labels))


# Copied from tp.py
def tag_loss(logits, labels):
    """Eq. 2: softmax cross-entropy with multi-hot labels, normalised to sum to one

    logits (B, K), labels (B, K) -> scalar, the mean over the rows that have a label
    """
    counts = labels.sum(1, keepdim=True)
    targets = labels / counts.clamp(min=1)
    total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return total / (counts > 0).sum().clamp(min=1)


class Tfm(nn.Module):
    """ICMLM-tfm: a Transformer encoder reads the projected X together with W [Sec. 3.2, App. E]."""

    def __init__(self, channels, width, layers, heads):
        super().__init__()
        self.project = nn.Linear(channels, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))

    def forward(self, features, token_features, attention_mask, mask_pos):
        """As ICMLM.forward, of features (B, d_x, H, W) -> (B, d_w)"""
        z, mask = self.join(features, token_features, attention_mask)
        for layer in self.layers:
            z = layer(z, mask)
        text = z[:, -token_features.size(1) :]  # (B, T, d_w), after the H * W locations
        return at_mask(text, mask_pos)

    def scores(self, vector, lm):
        """A vector (B, d_w) of forward -> scores of all tokens (B, |V|), by BERT's own layer"""
        return lm.mlm_head(vector)

    def join(self, features, token_features, attention_mask):
        """-> Z = [X; W] (B, S, d_w) with S = H * W + T; its attention mask (B, S)"""
        x = self.project(features.flatten(2).mT)  # (B, H * W, d_w)
        z = torch.cat([x, token_features.to(x.dtype)], 1)
        return z, F.pad(attention_mask, (x.size(1), 0), value=True)


def at_mask(states, mask_pos):
    """states (B, T, d), mask_pos (B,) -> (B, d), at the masked tokens"""
    return states.take_along_dim(mask_pos[:, None, None], 1).squeeze(1)


class EncoderLayer(nn.Module):
    """Multi-head attention, then a feed-forward layer [App. E]; a head is as wide as the model

    App. E names one residual connection, one dropout and one layer norm. Here both parts have all
    three, and the hidden layer is 4 times as wide, as in BERT. [ours]
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
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, z, mask):
        """z (B, S, d_w), mask (B, S) -> z"""
        K = self.per_head(self.key(z))  # Eq. 13
        Q = self.per_head(self.query(z))
        V = self.per_head(self.value(z))
        # Eq. 14: softmax(K Q^T / sqrt(D)) V with D = d_w. The paper's K is what is usually called
        # the query: row K_i attends to all Q_j.
        output = F.scaled_dot_product_attention(
            query=K, key=Q, value=V, attn_mask=mask[:, None, None]
        )
        heads = output.transpose(1, 2).flatten(2)  # [O^1 | O^2 | ...]: (B, S, heads * d_w)
        z = self.norm1(z + self.dropout(self.out_proj(heads)))  # Eq. 15
        hidden = F.relu(self.linear1(z))
        return self.norm2(z + self.dropout(self.linear2(hidden)))


class AttentionHead(nn.Module):
    """One head of att: how well each location of the photo matches the caption [Sec. 3.2]"""

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
        with exact_float32(x.device):  # because Eq. 4 takes exponentials of these long sums
            scores = x.float() @ w.float().mT / math.sqrt(x.size(-1))  # S (B, H * W, T)
        scores = scores.masked_fill(~attention_mask[:, None], -math.inf)
        return scores.logsumexp(2)  # Eq. 4; [CLS] and [SEP] are among its tokens [ours]


@contextmanager
def exact_float32(device):
    """Forward passes in float32: neither in half precision nor, on GPUs, in TF32"""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with common.autocast(device, "off"):
        yield
    torch.set_float32_matmul_precision(precision)


class AttFc(nn.Module):
    """ICMLM-att-fc: the text says where to look, and the features there name the word [Sec. 3.2]"""

    def __init__(self, channels, width, layers, heads):
        super().__init__()
        self.att = nn.ModuleList(AttentionHead(channels, width) for _ in range(heads))
        self.sigma_h = nn.Parameter(torch.full((heads,), 1 / heads))  # initialised uniformly [ours]
        self.b_h = nn.Parameter(torch.zeros(1))
        self.fc = nn.Sequential()
        for d_in in [channels] + (layers - 1) * [width]:
            self.fc.extend([nn.Linear(d_in, width), nn.LayerNorm(width), nn.ReLU()])

    def attention(self, x, token_features, attention_mask):
        """X (B, H * W, d_x), W (B, T, d_w), attention_mask (B, T) -> p (B, H * W)"""
        scores = [head(x, token_features, attention_mask) for head in self.att]
        s = torch.stack(scores, -1)  # [s^1 | s^2 | ...]: (B, H * W, heads)
        # Not nn.Linear, which autocast would compute in half precision. b_h cancels in the softmax.
        s = (s * self.sigma_h).sum(-1) + self.b_h
        return s.softmax(1)  # Eq. 5: p_att

    def forward(self, features, token_features, attention_mask, mask_pos):
        """As ICMLM.forward, of features (B, d_x, H, W) -> fc(x^) (B, d_w)"""
        x = features.flatten(2).mT  # X: (B, H * W, d_x)
        p = self.attention(x, token_features, attention_mask)
        pooled = p[:, None].to(x.dtype) @ x  # Eq. 5: x^ = X^T p, (B, 1, d_x)
        return self.fc(pooled.squeeze(1))

    def scores(self, vector, lm):
        """fc(x^) (B, d_w) of forward -> scores of all tokens (B, |V|)"""
        return vector @ lm.token_embeddings.T  # Eq. 6: v_k = fc(x^)^T V_k


# ----------------------------------------------------------------------- masked token prediction


@torch.no_grad()
def validate(model, lm, triplets, args, device, num_triplets):
    """Losses, and masked token prediction [Tab. 1] of random triplets -> content of result.json

    "validation": {"mlm": Eqs. 6, 7, "tp": Eq. 2; the paper chose lambda by it [App. B]};
    "masked_words": the number of triplets, and top1, top5... with the photo; with the photo of
    another triplet, which shows what the head guesses without seeing the right one [ours]; by the
    language model alone.  num_triplets: None for all
    """
    frozen = not model.backbone.training
    model.eval()
    order = np.random.default_rng(args.seed).permutation(len(triplets))
    chosen = Subset(triplets, order[:num_triplets].tolist())
    mlm, tp, ranks, concepts = 0, 0, defaultdict(list), []
    for batch in common.load_batches(chosen, collate, args, device):
        mask, mask_pos, target = batch["attention_mask"], batch["mask_pos"], batch["target"]
        with common.autocast(device, args.amp):
            W = lm(batch["tokens"], mask)
            features = model.backbone(common.augment(batch["image"])).float()
        # From here on in float32, because in half precision many tokens tie for the best.
        another_photo = features.roll(1, 0)  # that of the previous triplet; their order is random
        vector = model.head(features, W, mask, mask_pos)
        another_vector = model.head(another_photo, W, mask, mask_pos)
        logits = {
            "with the photo": model.head.scores(vector, lm),
            "with another photo": model.head.scores(another_vector, lm),
            "language model alone": lm.mlm_head(at_mask(W, mask_pos)),
        }
        ratio = len(target) / len(chosen)
        mlm += ratio * F.cross_entropy(logits["with the photo"], target).item()
        tp += ratio * tag_loss(model.tags(features), batch["tags"]).item()
        for name in logits:
            ranks[name].append(target_ranks(logits[name], target))
        concepts += batch["concept"].tolist()
    freeze_backbone(model, frozen)

    loss = {"mlm": round(mlm, 4), "tp": round(tp, 4)}
    parts_of_speech = np.array(list(triplets.concepts.values()))[concepts]  # (N,)
    words = {"triplets": len(concepts)}
    for name, rows in ranks.items():
        words[name] = accuracies(torch.cat(rows).cpu().numpy(), parts_of_speech)
    common.print_table("loss", {"this model": loss})
    title = f"{len(concepts):,} masked words, % right"
    common.print_table(title, {name: words[name] for name in ranks})
    return {"validation": loss, "masked_words": words}


def target_ranks(logits, target):
    """Rank of each target (B,) in its row of logits (B, |V|), from 0; ties and NaN come last."""
    lower = logits < logits.gather(1, target[:, None])
    return (~lower).sum(1) - 1


def accuracies(ranks, parts_of_speech):
    """ranks (N,), from 0, and parts of speech (N,) of masked tokens -> {"top1": percent, ...}"""
    correct = {"top1": ranks <= 0, "top5": ranks <= 4}
    for part in np.unique(parts_of_speech):
        correct[f"{part} top1"] = ranks[parts_of_speech == part] <= 0
    return {name: round(100 * float(hits.mean()), 2) for name, hits in correct.items()}


if __name__ == "__main__":
    main(get_args())
