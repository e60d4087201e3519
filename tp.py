"""TP: a backbone learned by predicting what the captions of a photo mention.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

Before training, captions are turned into labels: their nouns, adjectives and verbs, the clusters of
their [CLS] vectors (Eq. 1), or their topics. A convolutional network is then trained to predict all
labels of a photo, with one softmax over them (Eq. 2) [Sec. 3.1]. The same loop runs the paper's
baselines: annotated tags, and rotations, which also pretrain its VGG-16 [App. F.1].

    laptop        python tp.py
    own photos    python tp.py --data photos.jsonl
    one GPU       python tp.py --data coco
    eight GPUs    torchrun --nproc_per_node=8 tp.py --data coco   (batch norm over 16 photos [ours])
    VGG-16        python tp.py --data coco --labels rotation --output runs/rotation
                  python tp.py --data coco --arch vgg16_bn --init runs/rotation/backbone.pth
    labels        python -m downstream.labels photo.jpg --weights runs/tp-photos/checkpoint.pth

Where the paper is:

    Eq. 1, clusters of caption vectors     cluster_labels, embed_captions
    Eq. 2, softmax over all labels         label_loss, tag_loss
    TP-Postag [Sec. 3.1]                   count_concepts, top_concepts, postag_labels
    module tp of Fig. 2                    tag_head
    TP-LDA, TP-Label [Sec. 4]              lda_labels, label_loss; annotated_labels
    rotations, recipes [App. F.1]          four_rotations; FLAGS, VGG16, ROTATION

What to expect: the loss starts near ln K for K labels (0.7 K for topics) and soon reaches the loss
of predicting the label frequencies. It never comes near zero, because a photo with n labels costs
at least ln n. If the validation scores stall near those of the frequencies, train longer, or
predict fewer labels (--num-labels, --pos nn). A finished run is in docs/logs/tp.
"""

import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import regex
import torch
import torch.nn.functional as F
from scipy import sparse
from sklearn.cluster import KMeans
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer
from sklearn.metrics import pairwise_distances_argmin
from sklearn.preprocessing import MultiLabelBinarizer
from torch import nn

import common
from common import fail, print_main, progress

LABELS = "postag", "cluster", "lda", "instances", "rotation"
POS = "nn", "nn+adj", "nn+adj+vb"  # nouns, adjectives, verbs [Tab. 4]
TAGGERS = "textblob", "spacy"  # the first is the default [ours]
VAL_IMAGES = 5000  # at most this many photos are for validation, drawn by the seed [ours]

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
    # Labels
    "labels":            ("postag",    "postag",    "postag",            LABELS,
        "what is predicted [Sec. 3.1, 4]"),
    "num_labels":        (None,        None,        None,                "int > 0",
        "K: at most this many words, clusters or topics (5000, 1000 and 40; see get_args)"),
    "pos":               ("nn+adj+vb", "nn+adj+vb", "nn+adj+vb",         POS,
        "parts of speech of the words to predict [Sec. 4.2, Tab. 4]"),
    "tagger":            ("textblob",  "textblob",  "textblob",          TAGGERS,
        "what finds the parts of speech; the paper uses spacy"),
    "max_words":         (25,          25,          25,                  "int > 0",
        "longer captions are left out [Sec. 4]; raise it for reports"),
    "lm":                ("scratch",   "scratch",   "bert-base-uncased", str,
        "BERT of --labels cluster, from the hub or a folder; scratch trains a small one first "
        "[Sec. 3.1: BERT-base; uncased: ours]"),
    "lm_iters":          (400,         2000,        20_000,              "int > 0",
        "iterations of training --lm scratch; raise them with the captions [ours]"),
    # Model and optimisation
    "arch":              ("resnet18",  "resnet18",  "resnet50",          common.BACKBONES,
        "architecture of the backbone; resnet18 suits few photos or a CPU [Sec. 4.3]"),
    "init":              (None,        None,        None,                str,
        "weights that the backbone starts from: imagenet, or a file with a backbone"),
    "batch_size":        (32,          64,          128,                 "int > 0",
        "photos per iteration, over all processes [App. F.1]"),
    "iters":             (560,         None,        100_000,             "int > 0",
        "training iterations; raise them with the data [App. F.1]"),
    "epochs":            (None,        25.0,        None,                "> 0",
        "passes over the photos, instead of --iters"),
    "optimizer":         ("AdamW",     "AdamW",     "SGD",               common.OPTIMIZERS,
        "how the weights are updated [App. F.1]"),
    "lr":                (1e-3,        1e-3,        0.03,                "> 0",
        "peak learning rate; lower it if the loss is not finite [App. F.1]"),
    "head_lr":           (None,        None,        None,                "> 0",
        "peak learning rate of the layers above the backbone, which start anew (that of --lr)"),
    "warmup":            (0.05,        0.05,        0.0,                 ">= 0, < 1",
        "length of the learning rate's warm-up, as a fraction of training [ours]"),
    "weight_decay":      (0.01,        0.01,        1e-4,                ">= 0",
        "weight decay; raise it if photos are few [App. F.1]"),
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
    "validate_every":    (400,         None,        5000,                "int > 0",
        "iterations between validations (2,000, or a fifth of a shorter run)"),
    "checkpoint_every":  (200,         500,         5000,                "int > 0",
        "iterations between saves of checkpoint.pth; each validation saves, too"),
    "save_minutes":      (2.0,         2.0,         10.0,                "> 0",
        "minutes after which checkpoint.pth is saved in any case"),
    "keep_every":        (None,        None,        None,                "int > 0",
        "also keep a model_N.pth every N iterations, to choose the best later"),
}
# What the paper changes for VGG-16, and for its pretraining on rotations.
VGG16 = {  # App. F.1
    "optimizer": "RAdam",
    "lr": 1e-4,
    "weight_decay": 1e-3,
    "steps": [0.8, 0.9],
}
ROTATION = {  # App. F.1; a batch of 128 photos has 512 rotated images [ours]
    "arch": "vgg16_bn",  # with batch norm [ours]
    "optimizer": "RAdam",
    "iters": 120_000,
    "lr": 1e-3,
    "weight_decay": 1e-5,
    "steps": [5 / 6, 11 / 12],
}


def get_args(argv=None):
    parser = common.Parser(__doc__, FLAGS)
    parser.add_argument("--steps", type=common.number(">= 0, < 1"), nargs="+",
        help="divide the rates by 10 after these fractions of training,\ninstead of the cosine")
    args = parser.parse_args(argv)
    changes = VGG16 if args.arch == "vgg16_bn" else {}
    if args.labels == "rotation" and args.arch in (None, "vgg16_bn"):
        changes = ROTATION
    common.apply_recipe(args, "tp", FLAGS, **changes)
    args.head_lr = args.head_lr or args.lr
    args.steps = args.steps or []  # cosine
    num_labels = {"postag": 5000, "cluster": 1000, "lda": 40}  # Sec. 4.3, Tab. 2, Sec. 4.2
    if args.arch == "vgg16_bn":
        num_labels["postag"] = 1000  # Sec. 4.2, Tab. 2
    elif args.recipe == "demo":
        num_labels["cluster"] = 200  # [ours]
    if args.num_labels and args.labels not in num_labels:
        fail(f"--labels {args.labels} fixes K: leave out --num-labels")
    args.num_labels = args.num_labels or num_labels.get(args.labels)
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    init = common.read_init(args)  # a backbone's weights, or None

    # Data: photos, and labels made from their captions. Photos without a label are left out.
    with_tags = args.labels == "instances"  # TP-Label [Sec. 4]
    splits = args.train_split, args.val_split
    train, val = common.caption_data(args.data, args.root, splits, with_tags)
    checkpoint = common.begin_run(args, train.checksum(), val.checksum())  # {} for a new run
    if common.is_main() and not checkpoint:
        make_labels(args, (train, val), device)  # once, for all processes
    common.barrier()
    names = common.read_json(f"{args.output}/labels.json")
    train, labels = labelled(train, sparse.load_npz(f"{args.output}/labels.npz"))
    val, val_labels = labelled(val, sparse.load_npz(f"{args.output}/val_labels.npz"))
    order = np.random.default_rng(args.seed).permutation(len(val))
    chosen = np.sort(order[:VAL_IMAGES])
    photos = LabelledPhotos(train, labels, names, args)
    val_photos = LabelledPhotos(val.select(chosen), val_labels[chosen], names, args)
    outputs = f"{len(names):,} labels to predict"
    iters, validate_every = common.plan_run(args, device, len(photos), len(val_photos), outputs)

    # Model: from random weights, from --init, or from the checkpoint.
    torch.manual_seed(args.seed)
    model = TagPredictor(args.arch, len(names), args.labels)
    if init:
        model.backbone.load_state_dict(init)
    model.to(device, memory_format=torch.channels_last)
    ddp = common.data_parallel(model).train()  # all processes get the first one's weights
    groups = [
        {"params": model.backbone.parameters()},
        {"params": model.head.parameters(), "lr": args.head_lr},
    ]
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, state)

    batches = common.train_batches(photos, None, args, device, done)
    log = common.Log(args, done)
    more = {"names": names}  # for downstream/labels.py
    bar = common.iterations(done, iters)
    for iteration in bar:
        # Learning rates: warm-up [ours], then cosine decay or steps [App. F.1]
        decay = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, decay)

        # Gradients: --accumulate micro-batches, averaged over all processes after the last one
        optimizer.zero_grad()
        for part in range(args.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - started
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = common.augment(batch["image"], batch["jitter"])  # (B, 3, h, w)
            targets = batch["targets"]  # (B, K)
            if args.labels == "rotation":
                images, targets = four_rotations(images)  # (4B, 3, h, w), (4B, 4)
            with common.autocast(device, args.amp):
                logits = ddp(images)  # (B, K)
            loss = label_loss(logits, targets, args.labels)  # Eq. 2
            scaler.scale(loss / args.accumulate).backward()
            log.add(loss=loss)

        # Step
        scaler.step(optimizer)
        scaler.update()

        # Log, validate, save
        validating = iteration == iters or iteration % validate_every == 0
        if validating or iteration % args.log_every == 0:
            row = log.means() | {"lr": args.lr * decay}
            bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
            if validating and common.is_main():
                print_main(f"validation after {iteration:,} of {iters:,} iterations:")
                result = validate(model, val_photos, labels.mean(0), args, device)
                row |= {f"validation_{name}": x for name, x in result["validation"].items()}
                # Before the checkpoint, so that no finished run lacks its result
                common.save(f"{args.output}/result.json", result)
            log.write(iteration, row)
        common.save_if_due(args, iteration, state, more, validating)

    common.end_run(args, model.backbone, None if args.labels == "rotation" else "labels PHOTO")


# --------------------------------------- captions to concepts: this section is copied in icmlm.py

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


# ---------------------------------------------------------------------------- captions to labels


def make_labels(args, splits, device):
    """Write K names and labels (N, K): 1 where a photo has a label, else 0; lda: probabilities.

    splits: CaptionData of train and val
    """
    names, labels = LABEL_SETS[args.labels](args, splits, device)
    common.save(f"{args.output}/labels.json", names)
    for name, rows in zip(("labels.npz", "val_labels.npz"), labels):
        with common.writing(f"{args.output}/{name}") as file:
            sparse.save_npz(file, sparse.csr_array(rows, dtype=np.float32))


def postag_labels(args, splits, device):
    """TP-Postag: which words a photo's captions have [Sec. 3.1] -> names, [(N, K) sparse]"""
    splits = [filter_captions(data, words_of, args.max_words) for data in splits]
    counts = count_concepts(splits[0].all_captions(), args.tagger)
    common.save(f"{args.output}/concepts.json", counts)
    if args.pos == "nn":
        print_main(WHO_TAGGED[args.tagger])
    names = list(top_concepts(counts, args.pos, args.num_labels))
    vectorizer = CountVectorizer(analyzer=words_of, vocabulary=names, binary=True)
    return names, [vectorizer.transform(map(" ".join, data.captions)) for data in splits]


def cluster_labels(args, splits, device):
    """TP-Cluster: the clusters of a photo's captions [Sec. 3.1, Eq. 1] -> names, [(N, K) sparse]

    A cluster is named after the caption that is nearest to its centre. [ours]
    """
    lm = args.lm
    if lm == "scratch":
        lm = f"{args.output}/language_model"
        common.extra("small_bert").train(
            lm, splits[0].all_captions(), args.lm_iters, args.seed, device, args.amp,
            max_words=args.max_words,
        )
    tokenizer, _ = common.load_lm_tokenizer(lm)
    bert = common.load_lm(lm, "AutoModel").to(device)  # without its head
    longest = min(args.max_words, tokenizer.model_max_length - 2)  # [CLS] and [SEP] are added
    splits = [filter_captions(data, tokenizer.tokenize, longest) for data in splits]
    captions = splits[0].all_captions()
    if args.lm != "scratch":
        common.check_tokenizer(tokenizer, captions, f"--lm {args.lm}")
    vectors = [embed_captions(tokenizer, bert, data.all_captions(), args.amp) for data in splits]
    # Eq. 1: centres xi that minimise the sum of |vector - its nearest centre|^2; y is the nearest.
    # [ours: a random start, 20 passes] Under torchrun (OMP_NUM_THREADS=1) it uses one thread.
    k = min(args.num_labels, len({*captions}))
    print_main(f"k-means: {k} clusters of {len(captions)} captions")
    kmeans = KMeans(k, init="random", n_init=1, max_iter=20, random_state=args.seed, copy_x=False)
    kmeans.fit(vectors[0])
    names = [captions[n] for n in pairwise_distances_argmin(kmeans.cluster_centers_, vectors[0])]
    labels = []
    for data, points in zip(splits, vectors):
        ends = np.cumsum([len(texts) for texts in data.captions])
        clusters = np.split(kmeans.predict(points), ends[:-1])  # of each photo's captions
        labels.append(multi_hot(clusters, range(k)))
    return names, labels


@torch.no_grad()
def embed_captions(tokenizer, bert, captions, amp, batch_size=256):
    """psi(c)_[CLS] of Eq. 1: from the last layer, before the pooler -> (captions, d_w) float32

    They are float32 for scikit-learn; those of VG's 5.4 million captions take 17 GB.
    """
    vectors = np.empty((len(captions), bert.config.hidden_size), np.float32)
    for n in progress(range(0, len(captions), batch_size), desc="caption vectors"):
        batch = captions[n : n + batch_size]
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        with common.autocast(bert.device, amp):
            hidden = bert(**inputs.to(bert.device)).last_hidden_state  # (B, T, d_w)
        vectors[n : n + batch_size] = hidden[:, 0].float().cpu()
    return vectors


def multi_hot(rows, classes):
    """For each of N photos some of the K classes -> (N, K) sparse, of 1 and 0"""
    return MultiLabelBinarizer(classes=classes, sparse_output=True).fit_transform(rows)


def labelled(data, labels):
    """The photos that have a label [ours] -> CaptionData, (N, K) sparse"""
    keep = np.flatnonzero(labels.sum(1))
    if not len(keep):
        fail("no photo of the training split, or none of the validation split, has a label")
    if len(keep) < len(data):
        print_main(f"{len(data) - len(keep)} of {len(data)} photos have no label: left out")
    return data.select(keep), labels[keep]


# --------------------------------------------------------------------------- samples and batches


class LabelledPhotos(common.Photos):
    """Photos and their rows in the labels; in validation the centre crop"""

    def __init__(self, data, labels, names, args):
        super().__init__(data, args)
        self.labels = labels  # (N, K) sparse
        self.mirrored = common.mirrored(names)  # left and right are swapped by a flip [ours]

    def sample(self, index, rng):
        """-> image uint8 (size, size, 3), jitter (4,), targets (K,)"""
        sample, flipped = self.photo(index, rng)
        targets = self.labels[[index]].toarray()[0]
        return sample | {"targets": targets[self.mirrored] if flipped else targets}


# -------------------------------------------------------------------------------- model and loss


class TagPredictor(nn.Module):
    """A backbone and a head that scores K labels. (B, 3, h, w) -> logits (B, K)

    kind: --labels. VGG-16 predicts rotations with its own fully connected layers [App. F.1].
    """

    def __init__(self, arch, num_labels, kind="postag"):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        self.head = tag_head(arch, self.backbone.channels, num_labels)
        if arch == "vgg16_bn" and kind == "rotation":
            from torchvision.models import VGG  # only here, because it takes seconds

            vgg = VGG(nn.Identity(), num_labels)
            self.head = nn.Sequential(vgg.avgpool, nn.Flatten(), vgg.classifier)

    def forward(self, images):
        return self.head(self.backbone(images))


# Copied in icmlm.py
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


# Copied in icmlm.py
def tag_loss(logits, labels):
    """Eq. 2: softmax cross-entropy with multi-hot labels, normalised to sum to one

    logits (B, K), labels (B, K) -> scalar, the mean over the rows that have a label
    """
    counts = labels.sum(1, keepdim=True)
    targets = labels / counts.clamp(min=1)
    total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return total / (counts > 0).sum().clamp(min=1)


def label_loss(logits, targets, kind):
    """Eq. 2, or, for topics, binary cross-entropy [Sec. 4] summed over the topics [ours]

    logits, targets: (B, K) -> scalar.  kind: --labels
    """
    if kind == "lda":
        total = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum")
        return total / len(targets)
    return tag_loss(logits, targets)  # Eq. 2


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, photos, frequencies, args, device):
    """Loss and tag_scores on centre crops of the validation split -> entries of result.json

    frequencies: of the K labels in training. Scores of predicting them for every photo stand beside
    the model's.
    """
    model.eval()
    all_logits, all_targets = [], []
    for batch in common.load_batches(photos, None, args, device):
        images, targets = common.augment(batch["image"]), batch["targets"]
        if args.labels == "rotation":
            images, targets = four_rotations(images)
        with common.autocast(device, args.amp):
            features = model.backbone(images)
        # The head runs in float32, because in half precision many scores would be equal.
        all_logits.append(model.head(features.float()).cpu())
        all_targets.append(targets.cpu())
    model.train()
    logits, targets = torch.cat(all_logits), torch.cat(all_targets)
    scores = {"loss": round(label_loss(logits, targets, args.labels).item(), 4)}
    scores |= tag_scores(logits.numpy(), targets.numpy(), args.labels)
    frequencies = np.broadcast_to(frequencies, targets.shape)
    alone = tag_scores(frequencies, targets.numpy(), args.labels)
    rows = {"this model": scores, "label frequencies alone": alone}
    common.print_table(f"{len(photos):,} photos", rows)
    return {"validation": scores, "label_frequencies": alone}


def tag_scores(scores, targets, kind):
    """How well `scores` (N, K) rank the labels `targets` (N, K) -> {name: percent}

    top1, top5: photos for which one of the 1 or 5 highest-scored labels is right. mAP: average
    precision, averaged over the labels that occur. A topic is right if its probability is at least
    0.1 [ours]. Rotations have only top1.
    """
    right = targets >= (0.1 if kind == "lda" else 0.5)
    best = np.argsort(-scores, 1, kind="stable")[:, :5]
    best_right = np.take_along_axis(right, best, 1)  # (N, 5)
    result = {"top1": best_right[:, 0].mean()}
    if kind != "rotation":
        result["top5"] = best_right.any(1).mean()
        occurring = np.flatnonzero(right.any(0))
        if len(occurring):
            parts = [average_precision(scores[:, k], right[:, k]) for k in occurring]
            result["mAP"] = np.mean(parts)
    return {name: round(100 * float(score), 2) for name, score in result.items()}


def average_precision(scores, right):
    """Of one label, as in scikit-learn, but in 0.6 s for 2,000 labels instead of 22 s

    scores: (N,).  right: (N,) bool, one of them at least. The mean over all right photos of the
    precision among the photos with at least their score.
    """
    order = np.argsort(-scores)
    last = np.append(np.diff(scores[order]) != 0, True)  # is a photo the last with its score?
    num_right = right[order].cumsum()[last]
    num_photos = np.flatnonzero(last) + 1
    gained = np.diff(num_right, prepend=0)
    return (gained * num_right / num_photos).sum() / num_right[-1]


# ---------------------------------------- baselines: other labels [Sec. 4], rotations [App. F.1]

# Of scikit-learn's stop words, those that captions use for visible things: fire hydrant, front
# door, mountain side, table top, full plate. [ours]
VISIBLE = set("back bill bottom cry empty fill fire front full mill side thick thin top".split())


def lda_labels(args, splits, device):
    """TP-LDA: topic probabilities [Sec. 4] -> names, [(N, K) sparse]

    A photo's captions form one document, the vocabulary is the 10K most frequent words without
    English stop words (scikit-learn's, but for VISIBLE), and each topic is named by its five most
    probable words. [ours]
    """
    splits = [filter_captions(data, words_of, args.max_words) for data in splits]
    find_words = regex.compile(r"[\p{L}\p{M}]{2,}").findall
    stop_words = sorted(ENGLISH_STOP_WORDS - VISIBLE)
    vectorizer = CountVectorizer(
        tokenizer=find_words, token_pattern=None, stop_words=stop_words, max_features=10_000
    )
    vectorizer.fit(map(" ".join, splits[0].captions))
    counts = [vectorizer.transform(map(" ".join, data.captions)) for data in splits]
    print_main(f"LDA: {args.num_labels} topics of {len(splits[0])} photos")
    lda = LatentDirichletAllocation(
        args.num_labels, learning_method="online", batch_size=1024, random_state=args.seed
    )
    lda.fit(counts[0])
    labels = []
    for rows in counts:
        has_words = np.asarray(rows.sum(1)) > 0  # (N, 1)
        # A photo with none of the words gets no topic; LDA would give it all.
        labels.append(has_words * lda.transform(rows))
    words = vectorizer.get_feature_names_out()
    names = [", ".join(words[np.argsort(-weights)[:5]]) for weights in lda.components_]
    return names, labels


def annotated_labels(args, splits, device):
    """TP-Label: tags that people gave [Sec. 4] -> names, [(N, K) sparse]"""
    names = splits[0].tag_names
    if len(names) < 2:
        fail('--labels instances needs two tags: "tags" in the .jsonl, or instances_*.json')
    return names, [multi_hot(data.tags, names) for data in splits]


def rotation_labels(args, splits, device):
    """RotNet [App. F.1]: each photo has all four labels, because it is seen in each rotation"""
    return ["0°", "90°", "180°", "270°"], [np.ones((len(data), 4)) for data in splits]


def four_rotations(images):
    """RotNet (Gidaris et al. 2018): each image in 4 rotations -> (4B, 3, h, w), targets (4B, 4)"""
    rotated = [torch.rot90(images, k, (2, 3)) for k in range(4)]
    targets = torch.eye(4, device=images.device).repeat_interleave(len(images), 0)
    return torch.cat(rotated).contiguous(memory_format=torch.channels_last), targets


LABEL_SETS = {  # of --labels: the function that makes them
    "postag": postag_labels,
    "cluster": cluster_labels,
    "lda": lda_labels,
    "instances": annotated_labels,
    "rotation": rotation_labels,
}

if __name__ == "__main__":
    main(get_args())
