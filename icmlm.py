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
    VG, VGG-16    python tp.py --data vg --labels rotation --output runs/rotation-vg   (one GPU)
                  torchrun --nproc_per_node=4 icmlm.py --data vg --arch vgg16_bn --head att-fc \\
                      --init runs/rotation-vg/backbone.pth
    attention     python -m downstream.masked_words photo.jpg --caption "a dog on a surfboard" \\
                      --word surfboard --weights runs/icmlm/checkpoint.pth

Where the paper is:

    Eqs. 1, 2, labels, tag prediction          tp.py; tag_head, tag_loss
    Eqs. 3, 4, match of location and caption   AttentionHead.forward
    Eq. 5, attention, pooling                  AttFc.attention, AttFc.forward
    Eqs. 6, 7, 8, scores of tokens, losses     main
    Eqs. 13, 14, 15, Transformer encoder       EncoderLayer.forward, Tfm
    triplets of photo, caption, word [Sec. 4]  find_triplets, MaskedWords
    masked token prediction [Tab. 1]           validate

What to expect: in tfm the loss `mlm` starts near the loss of the language model alone,
because the residual path of the new encoder layer carries its vectors; in att-fc it starts near
ln |V|, |V| being the vocabulary size. Every run ends with the accuracy of masked token prediction
[Tab. 1] with the photo, with another photo, and by the language model alone. If the first two are
alike, the model ignores the photo: start from the backbone of tp.py (--init), use --head att-fc,
and train its attention first (--warmup-attention 0.25). A finished run is in docs/logs/icmlm.
"""

import argparse
import math
import os
import time
from array import array
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import regex
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset, default_collate

import common
from common import LETTERS, count, fail, fraction, positive, print_main, progress, share, weight
from common import whole

HEADS = "tfm", "att-fc"

# fmt: off
RECIPES = {  #           demo        small       paper: ResNet-50           (demo, small [ours])
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.3
    "image_size":       (48,         112,        224),                  # [ours], as in App. F.2
    "crop_min":         (1.0,        0.5,        0.2),                  # [ours]
    "colour_jitter":    (0.0,        0.4,        1.0),                  # [ours]
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 3.2
    "lm_iters":         (200,        2000,       20_000),               # [ours]
    "lm_layers":        (2,          4,          4),                    # of scratch [ours]
    "num_concepts":     (5000,       5000,       5000),                 # Sec. 4.3
    "heads":            (1,          1,          1),                    # Sec. 4.3
    "lambda_tp":        (4.0,        1.0,        0.1),                  # App. B
    "warmup_attention": (0.0,        0.0,        0.0),                  # App. F.1
    "optimizer":        ("AdamW",    "AdamW",    "SGD"),                # App. F.1
    "batch_size":       (32,         64,         512),                  # App. F.1
    "iters":            (440,        None,       500_000),              # App. F.1
    "epochs":           (None,       1.14,       None),                 # of triplets
    "lr":               (1e-3,       5e-4,       3e-2),                 # App. F.1
    "warmup":           (0.05,       0.1,        0.0),
    "steps":            ([],         [],         []),                   # App. F.1
    "weight_decay":     (1e-2,       1e-2,       1e-4),                 # App. F.1
    "log_every":        (10,         20,         20),
    "validate_every":   (1000,       1000,       10_000),
    "checkpoint_every": (200,        500,        5000),
    "proxy_triplets":   (2000,       5000,       None),                 # at the end; None: all
}
# fmt: on
VGG16 = {  # what the paper does differently with VGG-16
    "num_concepts": 1000,  # Sec. 4.2
    "lambda_tp": 1.0,  # App. B
    "warmup_attention": 0.25,  # App. F.1: 50K of 200K iterations, only for att-fc
    "optimizer": "RAdam",  # App. F.1, of TP: optimizer, lr, steps, decay [ours here]
    "batch_size": 896,
    "iters": 200_000,
    "lr": 1e-4,
    "steps": [0.8, 0.9],
    "weight_decay": 1e-3,
}
ATTENTION_WIDTH = 512  # d_z of Eq. 3, per head [ours]
DROPOUT = 0.1  # in tfm [BERT]; none on its attention [ours]


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
    add("--image-size", type=count, help="crop side in pixels; cost grows with its square")
    add("--crop-min", type=share, help="smallest fraction of a photo's area in a crop")
    add("--colour-jitter", type=weight, help="strength; lower it if captions name colours")
    add("--workers", type=whole, default=min(8, os.cpu_count() // 2),
        help="more if data_wait > 0.05")

    add = parser.add_argument_group("language model and concepts").add_argument
    add("--lm", help="BERT or RoBERTa, from the hub or a folder; scratch: trained on the captions")
    add("--lm-iters", type=count, help="iterations for --lm scratch; more for many captions")
    add("--pos", choices=POS, default=POS[-1], help="words to mask, and predict as tags [Sec. 4.2]")
    add("--num-concepts", type=count, help="keep the N most frequent [Sec. 4.2, 4.3]")
    add("--tagger", choices=TAGGERS, default=TAGGERS[0], help="the paper uses spacy")
    add("--max-words", type=count, default=25, help="of a caption [Sec. 4]; raise it for reports")

    add = parser.add_argument_group("model").add_argument
    add("--arch", choices=common.BACKBONES, help="the backbone; resnet18 for small data or a CPU")
    add("--init", help="start from a backbone, a checkpoint.pth with its heads, or imagenet")
    add("--head", choices=HEADS, default=HEADS[0], help="att-fc: better on VOC [Sec. 4.1]")
    add("--layers", type=count, default=1,
        help="of tfm, or of fc; 2 give a worse backbone, except att-fc's on IN-1K [Tab. 5]")
    add("--heads", type=count, help="of attention, in tfm or att [Sec. 4, 4.3]; VGG-16: 12")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch-size", type=count, help="triplets per iteration over all processes")
    add("--iters", type=count, help="training iterations; scale them with the data")
    add("--epochs", type=positive, help="instead of --iters: passes over the triplets")
    add("--lr", type=positive, help="peak learning rate; lower if the loss is not finite")
    add("--warmup", type=fraction, help="of the learning rate, as a fraction of training")
    add("--weight-decay", type=weight, help="raise it if photos are few")
    add("--lambda-tp", type=weight, help="weight of tag prediction [Eq. 8]; 0: not in the backbone")
    add("--warmup-attention", type=fraction, help="fraction of training with a frozen backbone")

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
    vgg = args.arch == "vgg16_bn"
    if vgg and args.heads is None:
        args.heads = 12  # in every recipe [Sec. 4]; one head is worse [App. B]; App. E: 8
    if args.warmup_attention is None and not (args.init and args.head == "att-fc"):
        args.warmup_attention = 0.0  # attention needs trained features
    common.apply_recipe(args, "icmlm", RECIPES, **(VGG16 if vgg else {}))
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    checkpoint = common.load_checkpoint(args)  # {} unless the same command was interrupted
    init = {} if checkpoint else common.read_init(args)

    # Data: the frozen language model, and one triplet for each word that can be masked.
    train = common.caption_data(args.data, args.root, args.train_split).captioned()
    val = common.caption_data(args.data, args.root, args.val_split).captioned()
    common.begin_run(args, checkpoint, train.columns(), val.columns())
    lm_name = args.lm
    if args.lm == "scratch":
        lm_name = common.extra("small_bert").made_once(args, init, train, device)
    tokenizer, lm = load_language_model(lm_name, device, args.amp)
    concepts, triplets, val_triplets = load_triplets(args, [train, val], tokenizer)
    iters = args.iters or math.ceil(args.epochs * len(triplets) / args.batch_size)
    V = lm.token_embeddings  # (|V|, d_w)
    print_main(f"{len(train)} photos ({len(val)} for validation), {len(triplets)} triplets, "
               f"{len(concepts)} concepts, vocabulary of {len(V)}; {iters} "
               f"iterations at lr {args.lr:g}, on {device}, amp {args.amp}, "
               f"into {args.output}")  # fmt: skip

    # Model and optimizer, restored where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = ICMLM(args, V.size(1), len(concepts))
    skip = () if list(init.get("concepts", ())) == list(concepts) else "tags."  # other words
    common.load_init(init, model, model.backbone, skip)
    model.to(device, memory_format=torch.channels_last)
    # A group each: fused SGD wants momentum for all of a group, and a frozen backbone has none.
    groups = [
        {"params": model.backbone.parameters()},
        {"params": model.head.parameters(), "lr": args.head_lr},
        {"params": model.tags.parameters(), "lr": args.head_lr},
    ]
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, parts)
    if args.compile:
        model.backbone.compile()

    frozen_iters = int(args.warmup_attention * iters)
    batches = common.train_batches(triplets, collate, args, device, done)
    log = common.Log(args, checkpoint)
    bar = progress(range(done + 1, iters + 1), initial=done, total=iters, unit=" its")
    for iteration in bar:
        if iteration in (done + 1, frozen_iters + 1):  # at first, and after a warm-up
            frozen = iteration <= frozen_iters  # [App. F.1], its batch statistics, too [ours]
            model.train()
            model.backbone.train(not frozen).requires_grad_(not frozen)
            ddp = common.data_parallel(model)  # once more: it averages what has a gradient now
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part in range(args.accumulate):
            asked = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - asked
            # DDP averages the gradients of all processes, once: after the last micro-batch.
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(batch["image"], batch["jitter"])  # (B, 3, size, size)
            mask = batch["attention_mask"]  # (B, T)
            with common.autocast(device, args.amp):
                W = lm(batch["tokens"], mask)  # (B, T, d_w)
                vector, tag_logits = ddp(images, W, mask, batch["mask_pos"])
                # Its own layer, or Eq. 6: v_k = fc(x^)^T V_k  -> (B, |V|)
                logits = lm.mlm_head(vector) if args.head == "tfm" else vector @ V.T
            # Eqs. 6, 7: softmax over the vocabulary; mean over triplets, not captions [App. F.1].
            mlm = F.cross_entropy(logits.float(), batch["target"])
            tp = tag_loss(tag_logits, batch["tags"])  # Eq. 2
            loss = mlm + args.lambda_tp * tp  # Eq. 8
            # At lambda = 0 the tag head learns from detached features [ours]: App. B compares tp.
            trained_loss = loss if args.lambda_tp else loss + tp
            scaler.scale(trained_loss / args.accumulate).backward()
            log.add(loss=loss, mlm=mlm, tp=tp)
        scaler.step(optimizer)
        scaler.update()

        last = iteration == iters
        validate_now = iteration % args.validate_every == 0 or last
        if iteration % args.log_every == 0 or validate_now:
            row = log.means() | {"lr": args.lr * lr_scale}
            bar.set_postfix(loss=f"{row['loss']:.3f}")
            if validate_now and common.is_main():
                size = args.proxy_triplets if last else 5000
                result = validate(model, lm, val_triplets, args, device, size)
                row |= {f"validation_{name}": x for name, x in result["validation_loss"].items()}
                if last:
                    common.save(f"{args.output}/result.json", result)
            log.write(iteration, row)
        if args.keep_every and iteration % args.keep_every == 0:
            name = f"model_{iteration}.pth"
            common.save_checkpoint(args, name, iteration, {"model": model}, concepts=concepts)
        if iteration % args.checkpoint_every == 0 or last:
            common.save_checkpoint(args, "checkpoint.pth", iteration, parts, concepts=concepts)

    common.end_run(args, model.backbone)  # eval_linear.py says what the backbone is worth


# ------------------------------------------ captions to concepts: this section is copied from tp.py

POS = "nn", "nn+adj", "nn+adj+vb"  # --pos [Tab. 4]
TAGGERS = "textblob", "spacy"  # the first is the default [ours]
PARTS_OF_SPEECH = {"nn": "nouns", "adj": "adjectives", "vb": "verbs"}
PENN = {"NN": "nouns", "JJ": "adjectives", "VB": "verbs"}  # first two letters of textblob's tags
# Auxiliary verbs name nothing visible. spaCy has a tag for them; the Penn tags do not. [ours]
AUXILIARIES = set(
    "be am is are was were been being do does did have has had having can could may might must "
    "shall should will would".split()
)
# A possessive 's, which is skipped; or letters that follow no letter or digit ("2x" has none), and
# more of them after ' or - ("can't", "t-shirt"), but for a possessive. The group: a word. [ours]
WORD = regex.compile(rf"['’]s\b|(?<![^\W_])({LETTERS}(?:(?!['’]s\b)['’-]{LETTERS})*)", regex.I)


def words_of(caption):
    """-> its words in lower case"""
    return [word.lower() for word in WORD.findall(caption) if word]


def filter_captions(data, tokenize, max_words):
    """Keep each photo's distinct captions of 3 to 25 tokens [Sec. 4, Datasets] -> CaptionData

    tokenize: caption -> its tokens: words, or the language model's. [ours]  max_words: the 25
    """
    kept = []
    for captions in progress(list(data.captions), desc="caption lengths", leave=False):
        distinct = dict.fromkeys(captions)
        kept.append([text for text in distinct if 3 <= len(tokenize(text)) <= max_words])
    before, after = len(data.all_captions()), sum(map(len, kept))
    print_main(f"{before - after} of {before} captions are left out: repeated for one photo, or "
               f"not of 3 to {max_words} words or tokens")  # fmt: skip
    if not after:
        fail("a split has no captions left: raise --max-words, join keywords to one caption, or, "
             "for Chinese and others without spaces, use virtex.py")  # fmt: skip
    return replace(data, captions=common.lists(kept))


def tag_words(captions, tagger):
    """Yield (word, "nouns" | "adjectives" | "verbs" | None) for each word of the captions."""
    rows = map(words_of, captions)
    if tagger == "spacy":
        yield from common.extra("nouns").tag_by_spacy(rows)
        return
    from textblob.en.taggers import PatternTagger  # its lexicon is in the package

    pattern = PatternTagger()
    for words in rows:
        for word, tag in pattern.tag(" ".join(words), tokenize=False):
            yield word, PENN.get(tag[:2])


def count_concepts(captions, tagger):
    """The words of the captions by part of speech, with their counts, the most frequent first

    -> {"nouns": {word: count}, "adjectives": ..., "verbs": ...}. A word that is tagged in several
    ways belongs to its most frequent part of speech; all its occurrences count [ours]. [Sec. 3.1]
    """
    counts = defaultdict(Counter)  # of the parts of speech that each word is tagged as
    captions = progress(captions, desc="parts of speech", leave=False)
    for word, part in tag_words(captions, tagger):
        if part == "verbs" and word in AUXILIARIES:
            part = None
        if len(word) > 1 and not regex.search("['’]", word):  # [ours]
            counts[word][part] += 1
    concepts = {part: {} for part in PARTS_OF_SPEECH.values()}
    for word in sorted(counts, key=lambda word: (-counts[word].total(), word)):
        part = max(counts[word], key=counts[word].get)
        if part:
            concepts[part][word] = counts[word].total()
    return concepts


def top_concepts(counts, pos, num_concepts):
    """The most frequent words of the parts of speech `pos` -> {word: its part of speech}

    counts: from count_concepts
    """
    parts = [PARTS_OF_SPEECH[name] for name in pos.split("+")]
    chosen = sorted((-count, word, part) for part in parts for word, count in counts[part].items())
    concepts = {word: part for _, word, part in chosen[:num_concepts]}
    if ("left" in concepts) != ("right" in concepts):  # one alone would be wrong if flipped [ours]
        concepts.pop("left", None)
        concepts.pop("right", None)
    if not concepts:
        fail(f"no caption that is kept has a word to predict (--pos {pos})")
    return concepts


# ----------------------------------------------------------- triplets of photo, caption and word


def load_triplets(args, splits, tokenizer):
    """What the first process finds in the captions, once, and writes into --output

    splits: CaptionData of train and val
    -> {concept: part of speech}, the most frequent first; MaskedWords of train; of val
    """

    def make(path):
        longest = min(args.max_words, tokenizer.model_max_length - 2)  # beside [CLS] and [SEP]
        kept = [filter_captions(data, tokenizer.tokenize, longest) for data in splits]
        common.save(f"{args.output}/captions.json", [list(data.captions) for data in kept])
        counts = count_concepts(kept[0].all_captions(), args.tagger)
        common.save(f"{args.output}/concepts.json", counts)
        concepts = top_concepts(counts, args.pos, args.num_concepts)
        np.savez(path, *[find_triplets(data, concepts, tokenizer) for data in kept])

    path = common.once(args, "triplets.npz", make)
    counts = common.read_json(f"{args.output}/concepts.json")
    concepts = top_concepts(counts, args.pos, args.num_concepts)
    samples, kept = [], common.read_json(f"{args.output}/captions.json")
    with np.load(path) as arrays:
        for data, captions, triplets in zip(splits, kept, arrays.values()):
            data = replace(data, captions=common.lists(captions))
            samples.append(MaskedWords(data, triplets, concepts, tokenizer, args))
    return concepts, *samples


def find_triplets(data, concepts, tokenizer):
    """A triplet for each concept in each caption that is exactly one token [ours] -> (N, 4) int32

    Photo, number of the caption, position of the token in it, concept. "shirt" cannot be masked in
    "t-shirt", which is one word of several tokens.
    """
    index = {concept: k for k, concept in enumerate(concepts)}
    triplets = array("i")
    for photo in progress(range(len(data)), desc="triplets", leave=False):
        for n, caption in enumerate(data.captions[photo]):
            encoded = tokenizer(caption, return_offsets_mapping=True)
            positions = {span: t for t, span in enumerate(encoded["offset_mapping"])}
            for match in WORD.finditer(caption):
                concept = index.get(match[0].lower())
                t = positions.get(match.span())
                if None not in (concept, t) and encoded["input_ids"][t] != tokenizer.unk_token_id:
                    triplets.extend((photo, n, t, concept))
    if not triplets:
        fail("no caption holds a word to mask: see --pos and --num-concepts of icmlm.py")
    return np.array(triplets).reshape(-1, 4)


class MaskedWords(common.Photos):
    """Photo, caption, masked word [Sec. 4, Datasets]: up to 13 million triplets [App. F.1]"""

    def __init__(self, data, triplets, concepts, tokenizer, args):
        super().__init__(data, args)
        self.triplets = triplets  # (N, 4), see find_triplets
        self.concepts = concepts  # {concept: part of speech}
        self.index = {concept: k for k, concept in enumerate(concepts)}
        self.tokenizer = tokenizer
        # If they were several tokens, to swap them would move those behind them. [ours]
        self.can_swap = {"left", "right"} <= tokenizer.get_vocab().keys()

    def __len__(self):
        return len(self.triplets)

    def sample(self, index, rng):
        photo, n, mask_pos, concept = self.triplets[index].tolist()
        sample, flipped = self.photo(photo, rng)
        captions = self.data.captions[photo]
        caption = captions[n]
        if flipped:
            captions = [common.swap_left_right(caption) for caption in captions]
            caption = captions[n] if self.can_swap else caption
        tokens = torch.tensor(self.tokenizer(caption)["input_ids"])
        target = int(tokens[mask_pos])
        tokens[mask_pos] = self.tokenizer.mask_token_id
        tags = np.zeros(len(self.index), np.float32)
        found = self.index.keys() & words_of(" ".join(captions))
        tags[[self.index[word] for word in found]] = 1
        sample |= {"tokens": tokens, "mask_pos": mask_pos, "target": target}
        return sample | {"concept": concept, "tags": tags}


def collate(samples):
    """-> image uint8 (B, size, size, 3), jitter (B, 4), tokens (B, T), tags (B, K), mask_pos,
    target, concept (B,), attention_mask (B, T): False at padding
    """
    tokens = [sample.pop("tokens") for sample in samples]
    tokens = pad_sequence(tokens, batch_first=True, padding_value=-1)  # no token: for the mask
    batch = default_collate(samples)
    batch["tokens"] = tokens.clamp(min=0)
    batch["attention_mask"] = tokens >= 0
    return batch


# --------------------------------------------------------------------- the frozen language model


def load_language_model(name, device, amp):
    """name: a BERT or RoBERTa, on the hub or in a folder -> tokenizer, LanguageModel"""
    import huggingface_hub  # only here: they take seconds, and --help needs none
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # DataLoader workers tokenise
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = "a BERT or RoBERTa with its head for masked tokens"
    try:
        if not os.path.isdir(name):  # asks once; transformers would ask for a minute
            huggingface_hub.snapshot_download(name, allow_patterns="config.json")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model, report = transformers.AutoModelForMaskedLM.from_pretrained(
            name, attn_implementation="sdpa", output_loading_info=True
        )
    except huggingface_hub.errors.LocalEntryNotFoundError:
        fail(f"--lm {name} is no folder here, and the hub (huggingface.co) cannot be reached")
    except (OSError, ValueError):
        fail(f"--lm {name}: give {kind}, on the hub or in a folder, or scratch")
    missing = sorted(report["missing_keys"])
    if missing or not (hasattr(model, "cls") or hasattr(model, "lm_head")):
        fail(f"--lm {name} is not {kind}, but {type(model).__name__} without {missing[:3]}")
    model.float().to(device)  # transformers 5 keeps half precision
    return tokenizer, LanguageModel(model, amp)


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
        if not self.lambda_tp:
            features = features.detach()
        return vector, self.tags(features)


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

    def join(self, features, token_features, attention_mask):
        """-> Z = [X; W] (B, S, d_w), S = H * W + T; its attention mask (B, S)"""
        x = self.project(features.flatten(2).mT)  # (B, H * W, d_w)
        z = torch.cat([x, token_features.to(x.dtype)], 1)
        return z, F.pad(attention_mask, (x.size(1), 0), value=True)


def at_mask(states, mask_pos):
    """states (B, T, d), mask_pos (B,) -> (B, d), at the masked tokens"""
    return states.take_along_dim(mask_pos[:, None, None], 1).squeeze(1)


class EncoderLayer(nn.Module):
    """Multi-head attention, then a feed-forward layer [App. E]; a head is as wide as the model

    App. E names one residual connection, dropout and layer norm. Both parts have them, as in BERT,
    and the hidden layer is 4 times as wide. [ours]
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
        # Eq. 14: softmax(K Q^T / sqrt(d_w)) V. What the paper calls K is the usual query: row K_i
        # attends to all Q_j.
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
        return scores.logsumexp(2)  # Eq. 4; [CLS] and [SEP] are among its tokens [ours]


class AttFc(nn.Module):
    """ICMLM-att-fc: the text says where to look, the features there name the word [Sec. 3.2]."""

    def __init__(self, channels, width, layers, heads):
        super().__init__()
        self.att = nn.ModuleList(AttentionHead(channels, width) for _ in range(heads))
        self.sigma_h = nn.Parameter(torch.full((heads,), 1 / heads))  # initialised uniformly [ours]
        self.b_h = nn.Parameter(torch.zeros(1))
        self.fc = nn.Sequential()
        for d_in in (channels, *(layers - 1) * [width]):
            self.fc.extend([nn.Linear(d_in, width), nn.LayerNorm(width), nn.ReLU()])

    def attention(self, x, token_features, attention_mask):
        """X (B, H * W, d_x), W (B, T, d_w), attention_mask (B, T) -> p (B, H * W)"""
        scores = [head(x, token_features, attention_mask) for head in self.att]
        s = torch.stack(scores, -1)  # [s^1 | s^2 | ...]: (B, H * W, heads)
        # Not nn.Linear, which autocast would round: the softmax needs float32. b_h cancels in it.
        s = (s * self.sigma_h).sum(-1) + self.b_h
        return s.softmax(1)  # Eq. 5: p_att

    def forward(self, features, token_features, attention_mask, mask_pos):
        """As ICMLM.forward, of features (B, d_x, H, W) -> fc(x^) (B, d_w)"""
        x = features.flatten(2).mT  # X: (B, H * W, d_x)
        p = self.attention(x, token_features, attention_mask)
        pooled = p[:, None].to(x.dtype) @ x  # Eq. 5: x^ = X^T p, (B, 1, d_x)
        return self.fc(pooled.squeeze(1))


# ----------------------------------------------------------------------- masked token prediction


@torch.no_grad()
def validate(model, lm, triplets, args, device, num_triplets):
    """Losses, and masked token prediction [Tab. 1] of random triplets -> entries of result.json

    "validation_loss": {"mlm": Eqs. 6, 7, "tp": Eq. 2; the paper chose lambda by it [App. B]};
    "masked_words": number of triplets; top1, top5... with the photo; with another triplet's, which
    is what the head predicts without seeing the right one [ours]; by the language model alone
    """
    V = lm.token_embeddings
    was_training = model.backbone.training  # not while it is frozen
    model.eval()
    order = np.random.default_rng(args.seed).permutation(len(triplets))
    chosen = Subset(triplets, order[:num_triplets].tolist())  # None: all
    mlm, tp, ranks, concepts = 0, 0, defaultdict(list), []
    for batch in common.load_batches(chosen, collate, args, device):
        mask, mask_pos = batch["attention_mask"], batch["mask_pos"]
        target = batch["target"]
        with common.autocast(device, args.amp):
            W = lm(batch["tokens"], mask)
            features = model.backbone(common.augment(batch["image"])).float()
        # From here on in float32: in half precision many tokens tie for the best.
        another_photo = features.roll(1, 0)  # of the triplet before; they are in random order
        logits = {}
        for name, x in (("with the photo", features), ("with another photo", another_photo)):
            vector = model.head(x, W, mask, mask_pos)
            logits[name] = lm.mlm_head(vector) if args.head == "tfm" else vector @ V.T
        logits["language model alone"] = lm.mlm_head(at_mask(W, mask_pos))
        ratio = len(target) / len(chosen)
        mlm += ratio * F.cross_entropy(logits["with the photo"], target).item()
        tp += ratio * tag_loss(model.tags(features), batch["tags"]).item()
        for name in logits:
            ranks[name].append(target_ranks(logits[name], target))
        concepts += batch["concept"].tolist()
    model.train()
    model.backbone.train(was_training)

    loss = {"mlm": round(mlm, 4), "tp": round(tp, 4)}
    print_main(f"validation loss: {loss}")
    parts = np.array(list(triplets.concepts.values()))[concepts]  # of speech
    result = {"triplets": len(parts)}
    for name, rows in ranks.items():
        result[name] = accuracies(torch.cat(rows).cpu().numpy(), parts)
        print_main(f"masked words, {name}: {result[name]}")
    return {"validation_loss": loss, "masked_words": result}


def target_ranks(logits, target):
    """Rank of each target (B,) in its row of logits (B, |V|), from 0; ties and NaN come last."""
    lower = logits < logits.gather(1, target[:, None])
    return (~lower).sum(1) - 1


def accuracies(ranks, parts):
    """ranks (N,), from 0, and parts of speech (N,) of masked tokens -> {"top1": percent, ...}"""
    correct = {"top1": ranks <= 0, "top5": ranks <= 4}
    for part in np.unique(parts):
        correct[f"{part} top1"] = ranks[parts == part] <= 0
    return {name: round(100 * float(hits.mean()), 2) for name, hits in correct.items()}


if __name__ == "__main__":
    main(get_args())
