"""TP: a backbone learned by predicting what the captions of a photo mention.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

Captions are turned into labels once: their nouns, adjectives and verbs, the clusters of their
[CLS] vectors (Eq. 1), or their topics. A convolutional network is then trained to predict all
labels of a photo, with one softmax over them (Eq. 2) [Sec. 3.1]. The paper's baselines run through
the same loop: annotated tags, and rotations, from which its VGG-16 starts [App. F.1].

    laptop        python tp.py
    own photos    python tp.py --data photos.jsonl
    one GPU       python tp.py --data coco
    eight GPUs    torchrun --nproc_per_node=8 tp.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 tp.py --data coco   (on both; shared --output)
    VGG-16        python tp.py --data coco --labels rotation --output runs/rotation
                  python tp.py --data coco --arch vgg16 --init runs/rotation/backbone.pth
    labels        python tp.py --predict photo.jpg --weights runs/tp/checkpoint.pth

What to expect: the loss starts near ln K, K being the number of labels, and falls at once to that
of predicting the label frequencies for every photo. It never comes near zero: a photo with n
labels costs at least ln n. (Topics have another loss, a binary cross-entropy that starts near
0.7 K.) The validation scores show whether the backbone sees: they stand beside those of the label
frequencies. A run that does not get above these wants more iterations, or fewer and better labels:
look into concepts.json, then try a smaller --num-labels, --pos nn, or --tagger spacy.
"""

import json
import math
import os
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import common
import language
from common import check, count, fail, positive_share, progress, say

try:
    import eval_linear
except ModuleNotFoundError:  # copied without it: no probe at the end
    eval_linear = None

LABELS = "postag", "cluster", "lda", "instances", "rotation"
POS = "nn", "nn+adj", "nn+adj+vb"
TAGGERS = "textblob", "spacy"
two_or_more = common.number(int, "2 or more", lambda n: n >= 2)  # an argparse type

# fmt: off
RECIPES = {  #           demo        small       paper: ResNet-50 [App. F.1]
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.3
    "image_size":       (64,         112,        224),
    "crop_min":         (0.8,        0.2,        0.2),                  # ours
    "colour_jitter":    (0.25,       1.0,        1.0),                  # ours
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 3.1
    "lm_iters":         (400,        2000,       20_000),               # ours
    "optimizer":        ("adamw",    "sgd",      "sgd"),                # App. F.1
    "batch_size":       (64,         32,         128),                  # App. F.1
    "iters":            (600,        None,       100_000),              # App. F.1
    "epochs":           (None,       25.0,       None),
    "lr":               (1e-3,       3e-2,       3e-2),                 # App. F.1
    "warmup":           (0.1,        0.0,        0.0),
    "steps":            ([],         [],         []),                   # App. F.1
    "weight_decay":     (1e-2,       1e-4,       1e-4),                 # App. F.1
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        2000,       5000),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
# What the paper does otherwise with VGG-16, and with the rotations that VGG-16 begins with.
VGG16 = {"optimizer": "radam", "lr": 1e-4, "weight_decay": 1e-3, "steps": [0.8, 0.9]}  # App. F.1
ROTATION = {"arch": "vgg16", "optimizer": "radam", "lr": 1e-3, "weight_decay": 1e-5,
            "iters": 120_000, "steps": [5 / 6, 11 / 12]}  # App. F.1
NUM_LABELS = {"postag": 5000, "cluster": 1000, "lda": 40}  # Sec. 4.3, Tab. 2, Sec. 4.2
# fmt: on


def get_args(argv=None):
    parser = common.flag_parser("tp", __doc__)

    add = parser.add_argument_group("labels").add_argument
    add("--labels", choices=LABELS, default=LABELS[0], help="what is predicted [Sec. 3.1, 4]")
    add("--num-labels", type=two_or_more, help="K words, clusters or topics, at most [Tab. 2, 4]")
    add("--pos", choices=POS, default=POS[-1], help="postag: nouns, adjectives, verbs [Tab. 4]")
    add("--tagger", choices=TAGGERS, default=TAGGERS[0], help="postag: spacy is the paper's")
    add("--lm", help="cluster: a BERT of the hub or in a folder; scratch: trained on the captions")
    add("--lm-iters", type=count, help="iterations of --lm scratch; more for more captions")

    add = parser.add_argument_group("model").add_argument
    add("--init", help="start from this backbone.pth: for vgg16 from that of --labels rotation")

    add = parser.add_argument_group("optimizer and validation").add_argument
    add("--optimizer", choices=common.OPTIMIZERS, help="radam for vgg16; a change needs its --lr")
    add("--steps", type=positive_share, nargs="*", help="shares of the run after which the "
        "learning rate falls to a tenth; empty: it falls by a cosine, as with sgd")  # fmt: skip
    add("--validate-every", type=count, help="iterations, rounded up to a multiple of --log-every")
    add("--val-images", type=count, default=5000, help="validate on at most this many, drawn once")

    add = parser.add_argument_group("use of a trained model").add_argument
    add("--predict", nargs="+", metavar="IMAGE", help="print the ten most likely labels of photos")
    add("--weights", help="a checkpoint.pth of this script")

    args = common.parse(parser, argv, choose_recipe(argv), scaled=("lr",))
    if args.num_labels and args.labels not in NUM_LABELS:
        names = ", ".join(NUM_LABELS)
        parser.error(f"--num-labels goes with {names}: {args.labels} has as many as it has")
    if args.optimizer == "sgd" and args.steps:
        parser.error("--steps goes with --optimizer radam or adamw: sgd follows a cosine")
    if bool(args.predict) != bool(args.weights):
        parser.error("--weights FILE goes with --predict IMAGE...")
    return args


def choose_recipe(argv):
    """The recipe for these flags; the paper's depends on --arch and --labels -> {flag: default}"""
    given = common.look(argv, "--arch", "--labels")
    labels = given.labels or LABELS[0]
    other = VGG16 if given.arch == "vgg16" else {}
    if labels == "rotation" and given.arch in (None, "vgg16"):
        other = ROTATION
    recipe = common.choose_recipe(RECIPES, argv, paper=other)

    recipe["num_labels"] = NUM_LABELS.get(labels)
    if labels == "postag" and given.arch == "vgg16":
        recipe["num_labels"] = 1000  # Tab. 2
    if labels == "cluster" and recipe["recipe"] == "demo":
        recipe["num_labels"] = 200
    return recipe


def main(args):
    world = common.start()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.predict:
        return predict_photos(args.predict, args.weights, device)

    # Data: photos, and labels made of their captions. Photos without a label are left out.
    subset, cache = (args.fraction, args.captions_per_image, args.seed), args.cache
    train = common.caption_data(args.data, args.root, args.train_split, *subset, cache=cache)
    val = common.caption_data(args.data, args.root, args.val_split, cache=cache)
    run = common.Run(args, "tp", world, train, val)
    probe = eval_linear and eval_linear.Probe(args, train, val)
    # Now: a wrong file is refused before labels are made.
    initial = args.init and not run.checkpoint and common.load_backbone(args.init, args.arch)
    with common.main_first(world):
        labels = load_labels(args, train, val, run)
    rows = labelled_rows(labels.train, len(train), args.train_split)
    val_rows = labelled_rows(labels.val, len(val), args.val_split, args.val_images, args.seed)
    names, size = labels.names, len(rows)
    iters = args.iters or math.ceil(args.epochs * size / args.batch_size)
    say(f"{size} photos ({len(val_rows)} for validation), {len(names)} labels; {iters} iterations")

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = TagPredictor(args.arch, len(names), args.labels)
    model.backbone = initial or model.backbone
    model.to(device, memory_format=torch.channels_last)
    parameters, backbone = model.parameters(), model.backbone
    optimizer = common.build_optimizer(args.optimizer, parameters, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.compile()
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(sample, train.images, rows, args), size, args.seed)
    val_samples = common.Samples(partial(sample, val.images, val_rows, args), len(val_rows))
    validation = partial(validate, model, val_samples, labels.val, args, device)
    together = partial(collate, labels.train, language.left_right_swap(names))
    for iteration, batch in run.steps(samples, together, iters, probe, backbone, names=names):
        factor = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, factor)
        images, targets = common.augment(batch["images"], batch["jitter"]), batch.get("targets")
        if args.labels == "rotation":
            images, targets = four_rotations(images)
        with common.autocast(device, args.amp):
            logits = parallel(images)
        loss = label_loss(logits, targets, args.labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scores = validation() if run.validating() else None
        run.log(scores, loss=loss, lr=args.lr * factor)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        run.save_weights("backbone.pth", backbone)
        result = {"validation": validation()}
        if args.labels != "rotation":
            result["label_frequencies"] = frequency_scores(labels, rows, val_rows, args.labels)
        run.finish(probe, backbone, args.labels == "instances", **result)


# ---------------------------------------------------------------------------- captions to labels


class Labels(NamedTuple):
    """names: K labels in words.  train, val: sparse (N, K), a row for each image of the split:
    multi-hot, for lda probabilities, for rotations None.  concepts: of postag, all words by part of
    speech.
    """

    names: list
    train: sparse.csr_array | None
    val: sparse.csr_array | None
    concepts: dict | None = None


ROTATIONS = ["0°", "90°", "180°", "270°"]


def load_labels(args, train, val, run):
    """The labels of --labels, for a run that goes on the same as before -> Labels"""
    labels = Labels(ROTATIONS, None, None)
    if args.labels != "rotation":
        labels = kept_labels(args, train, val, run.folder, run.world.device)
    same = not run.checkpoint or run.checkpoint.get("names") == labels.names
    check(same, f"{run.folder} holds a run on other labels, has --lm changed? --fresh starts over")
    if labels.concepts and run.world.is_main:
        common.write_json(run.folder / "concepts.json", labels.concepts)
    return labels


def kept_labels(args, train, val, folder, device):
    """Labels made of captions or tags, once, and kept in --cache -> Labels"""
    make, names = MADE_BY[args.labels]
    flags, where = {name: getattr(args, name) for name in names}, {}
    key = {**flags, "labels": args.labels, "data": (train.digest(), val.digest())}
    if args.labels == "cluster":
        key["lm_files"] = folder_digest(args.lm)
        where = {"folder": folder, "cache": args.cache, "device": device, "amp": args.amp}

    def build():
        labels = make(train, val, **flags, **where)
        rows = language.sparse_parts("train", labels.train)
        rows |= language.sparse_parts("val", labels.val)
        concepts = np.array(json.dumps(labels.concepts))
        return {"names": np.array(labels.names), "concepts": concepts, **rows}

    def use(arrays):
        names = arrays["names"].tolist()
        rows = [language.sparse_from(split, arrays, len(names)) for split in ("train", "val")]
        return Labels(names, *rows, json.loads(str(arrays["concepts"])))

    return common.cached(args.cache, "labels", key, build, use)


def folder_digest(name):
    """A checksum of the files of a model's folder; 0 for a model of the hub"""
    number = 0
    for path in filter(Path.is_file, sorted(Path(name).glob("*"))):
        number = zlib.crc32(path.read_bytes(), number)
    return number


def usable_captions(train, val, labels):
    """Both splits with the captions that labels are made of [Sec. 4, Datasets]"""
    splits = [language.filter_captions(data, language.words_of) for data in (train, val)]
    enough = all(len(data.captions) for data in splits)
    check(enough, f"--labels {labels} needs captions of 3 to 25 words in both splits")
    return splits


def postag_labels(train, val, num_labels, pos, tagger):
    """TP-Postag: the K most frequent nouns, adjectives and verbs [Sec. 3.1]

    A label is present when one of the image's captions holds the word.
    """
    train, val = usable_captions(train, val, "postag")
    concepts = language.count_concepts(train.captions, tagger)
    names = language.top_concepts(concepts, pos, num_labels)
    rows = [language.concept_labels(data, names) for data in (train, val)]
    return Labels(names, *rows, concepts)


def cluster_labels(train, val, num_labels, seed, lm, lm_iters, folder, cache, device, amp):
    """TP-Cluster: the clusters of an image's captions [Sec. 3.1, Eq. 1]"""
    train, val = usable_captions(train, val, "cluster")
    captions, size = train.captions, len(train.captions)
    clusters = min(num_labels, size)
    if size < 10 * num_labels:
        say(f"note: {size} captions are few for {num_labels} clusters: try a smaller --num-labels")
    scratch = captions, folder / "language_model", cache, lm_iters, seed, amp
    tokenizer, model = language.language_model(lm, device, scratch, masked_words=False)
    path = folder / "caption_vectors.npy"
    vectors = array_on_disk(path, (size + len(val.captions), model.config.hidden_size))
    embed_captions(tokenizer, model, captions, vectors[:size], device, amp)
    embed_captions(tokenizer, model, val.captions, vectors[size:], device, amp)
    centres = train_kmeans(vectors[:size], clusters, seed, device)
    found = [(near.cpu(), far.cpu()) for _, near, far in nearest_centres(vectors, centres)]
    cluster, distance = [torch.cat(parts).numpy() for parts in zip(*found)]
    path.unlink()
    names = cluster_names(captions, cluster[:size], distance[:size], clusters)
    rows = image_clusters(train, cluster[:size], clusters)
    return Labels(names, rows, image_clusters(val, cluster[size:], clusters))


def array_on_disk(path, shape):
    """A half-precision array in the file `path`, not in memory: VG's captions need 8 GB."""
    try:
        array = np.lib.format.open_memmap(path, "w+", np.float16, shape)
        with open(path, "r+b") as file:  # else a disk that fills up later would kill the process
            if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        path.unlink(missing_ok=True)
        needed = f"clustering needs {2 * math.prod(shape) / 1e9:.1f} GB there for a while"
        fail(f"{path} cannot be written ({error.strerror}): {needed}", everywhere=False)
    return array


def embed_captions(tokenizer, model, captions, vectors, device, amp, batch_size=256):
    """psi(c)_[CLS] of Eq. 1, from the last layer, before the pooler -> into vectors (N, d_w)"""
    first = range(0, len(captions), batch_size)
    for n in progress(first, desc="caption vectors", unit=" batches"):
        batch = [captions[i] for i in range(n, min(n + batch_size, len(captions)))]
        settings = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
        inputs = tokenizer(batch, **settings).to(device)
        with common.autocast(device, amp):
            hidden = model.base_model(**inputs).last_hidden_state
        vectors[n : n + len(batch)] = hidden[:, 0].float().cpu().numpy()


def train_kmeans(vectors, clusters, seed, device="cpu", passes=20):
    """Eq. 1: centres xi that minimise the sum of |vector - its nearest centre|^2 -> (K, d_w)

    vectors: (N, d_w). Lloyd's algorithm from random vectors, until no centre moves or the passes
    are over. A cluster without a vector begins again at the one farthest from its centre. [ours]
    """
    drawn = np.random.default_rng(seed).permutation(len(vectors))[:clusters]
    centres = torch.from_numpy(vectors[np.sort(drawn)]).to(device).float()
    for _ in progress(range(passes), desc="k-means", unit=" passes"):
        sums, sizes, distances = torch.zeros_like(centres), centres.new_zeros(clusters), []
        for part, cluster, distance in nearest_centres(vectors, centres):
            sums.index_add_(0, cluster, part)
            sizes += cluster.bincount(minlength=clusters)
            distances.append(distance)
        before, centres = centres, sums / sizes[:, None]
        empty = sizes == 0
        farthest = torch.cat(distances).topk(int(empty.sum())).indices.sort().values.cpu()
        centres[empty] = torch.from_numpy(vectors[farthest]).to(device).float()
        if torch.equal(before, centres):
            break
    return centres


def nearest_centres(vectors, centres, batch_size=4096):
    """y of Eq. 1: yield vectors (B, d_w), their nearest centres (B,) and distances (B,) in turns

    On the device of the centres, in parts that fit into memory.
    """
    first = range(0, len(vectors), batch_size)
    for n in progress(first, desc="nearest centres", unit=" batches", leave=False):
        part = torch.from_numpy(vectors[n : n + batch_size]).to(centres.device).float()
        distance, cluster = torch.cdist(part, centres).min(1)
        yield part, cluster, distance


def cluster_names(captions, cluster, distance, clusters):
    """A cluster is called by the three captions nearest to its centre [ours] -> [name]"""
    nearest = [[] for _ in range(clusters)]
    for n in np.argsort(distance):
        chosen = nearest[cluster[n]]
        if len(chosen) < 3 and captions[n] not in chosen:
            chosen.append(captions[n])
    return [" | ".join(chosen) for chosen in nearest]


def image_clusters(data, cluster, clusters):
    """cluster: that of each caption -> (images, clusters) sparse"""
    per_image = np.split(cluster, data.first_caption[1:-1])
    return language.multi_hot((set(part.tolist()) for part in per_image), clusters)


def lda_labels(train, val, num_labels, seed, passes=10):
    """TP-LDA: topic probabilities; a document is all captions of an image [Sec. 4]

    Without English stop words, of the 10K most frequent words. A topic is called by its five most
    probable words. [ours]
    """
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    train, val = usable_captions(train, val, "lda")
    word = r"[^\W\d_]{2,}"
    vectorizer = CountVectorizer(stop_words="english", token_pattern=word, max_features=10_000)
    try:
        counts = vectorizer.fit_transform(documents(train))
    except ValueError:  # an empty vocabulary
        fail("--labels lda finds no word in the captions that is not a stop word")
    rng, size = np.random.default_rng(seed), len(train)
    lda = LatentDirichletAllocation(num_labels, total_samples=size, random_state=seed)
    for _ in progress(range(passes), desc="topics", unit=" passes"):
        for batch in np.array_split(rng.permutation(size), max(1, size // 1024)):
            lda.partial_fit(counts[batch])
    words = vectorizer.get_feature_names_out()
    names = [", ".join(words[np.argsort(-weights)[:5]]) for weights in lda.components_]
    val_counts = vectorizer.transform(documents(val))
    return Labels(names, topic_probabilities(lda, counts), topic_probabilities(lda, val_counts))


def documents(data):
    for i in progress(range(len(data)), desc="words", unit=" images"):
        yield " ".join(data.captions_of(i))


def topic_probabilities(lda, counts, batch_size=1024):
    """counts: (N, words) sparse -> (N, topics) sparse; an image without words has no topic"""
    first = range(0, counts.shape[0], batch_size)
    batches = progress(first, desc="topics of images", unit=" batches")
    rows = np.concatenate([lda.transform(counts[n : n + batch_size]) for n in batches])
    rows[np.diff(counts.indptr) == 0] = 0
    return sparse.csr_array(rows.astype(np.float32))


def instance_labels(train, val):
    """TP-Label: the annotated tags [Sec. 4]"""
    check(train.tag_names and val.tag_names, "--labels instances needs tags in both splits: "
          'annotations/instances_{split}.json for coco, "tags" in a .jsonl')  # fmt: skip
    number = len(train.tag_names)
    val = val.numbered_as(train.tag_names)  # those of shards can differ
    tags = [map(data.tags_of, range(len(data))) for data in (train, val)]
    rows = [language.multi_hot(per_image, number) for per_image in tags]
    return Labels(train.tag_names, *rows)


MADE_BY = {  # --labels: the function that makes them, and the flags that it is given
    "postag": (postag_labels, ("num_labels", "pos", "tagger")),
    "cluster": (cluster_labels, ("num_labels", "seed", "lm", "lm_iters")),
    "lda": (lda_labels, ("num_labels", "seed")),
    "instances": (instance_labels, ()),
}


def labelled_rows(labels, number, split, at_most=None, seed=0):
    """Which of the `number` images of a split have a label; the others are counted in the log.

    at_most: so many of them, drawn by the seed.
    """
    rows = np.arange(number) if labels is None else np.flatnonzero(labels.sum(1) > 0)
    check(len(rows), f"no image of the split {split} has a label")
    missing = number - len(rows)
    if missing:
        say(f"{missing} of {number} images of the split {split} have no label and are left out")
    if at_most:
        rows = np.sort(np.random.default_rng(seed).permutation(rows)[:at_most])
    return rows


# --------------------------------------------------------------------------- samples and batches


def sample(images, rows, args, index, rng):
    """The photo images[rows[index]] and the row of its labels; rng None: centred"""
    row, crop = int(rows[index]), (args.image_size, args.crop_min, args.colour_jitter)
    return {**common.photo(images, row, rng, *crop), "row": row}


def collate(labels, swap, samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), and targets (B, K) unless labels is None

    swap: (K,) which label takes the place of each in a mirrored photo.
    """
    batch = common.collate_photos(samples)
    if labels is not None:
        rows = [sample["row"] for sample in samples]
        mirrored = [sample["mirrored"] for sample in samples]
        batch["targets"] = language.label_rows(labels, rows, mirrored, swap)
    return batch


def four_rotations(images):
    """RotNet (Gidaris et al. 2018): each image in four ways -> (4B, 3, h, w), targets (4B, 4)"""
    turned = torch.cat([torch.rot90(images, k, (2, 3)) for k in range(4)])
    targets = torch.eye(4, device=images.device).repeat_interleave(len(images), 0)
    return turned.contiguous(memory_format=torch.channels_last), targets


# -------------------------------------------------------------------------------- model and loss


class TagPredictor(nn.Module):
    """tp(phi(I)): a backbone, and a head that scores K labels. (B, 3, h, w) -> logits (B, K)

    Rotations are predicted by VGG-16's own fully connected layers [App. F.1].
    """

    def __init__(self, arch, num_labels, labels="postag"):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        self.head = language.tag_head(arch, self.backbone.channels, num_labels)
        if arch == "vgg16" and labels == "rotation":
            from torchvision.models import VGG  # only here: it takes seconds

            vgg = VGG(nn.Identity(), num_labels)
            self.head = nn.Sequential(vgg.avgpool, nn.Flatten(), vgg.classifier)

    def forward(self, images):
        return self.head(self.backbone(images))


def label_loss(logits, targets, labels):
    """Eq. 2, or for topics the binary cross-entropy [Sec. 4], summed over the topics [ours]

    logits, targets: (B, K) -> scalar
    """
    if labels == "lda":
        total = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum")
        return total / len(targets)
    return language.tag_loss(logits, targets)  # Eq. 2 stands there


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, samples, labels, args, device):
    """Loss and tag_scores on the validation split, each photo centred -> {name: score}"""
    model.eval()
    logits, targets = [], []
    together = partial(collate, labels, None)
    for batch in common.validation_batches(samples, args.workers, together, device):
        images, wanted = common.augment(batch["images"]), batch.get("targets")
        if args.labels == "rotation":
            images, wanted = four_rotations(images)
        with common.autocast(device, args.amp):
            logits.append(model(images).float().cpu())
        targets.append(wanted.cpu())
    model.train()
    logits, targets = torch.cat(logits), torch.cat(targets)
    loss = label_loss(logits, targets, args.labels).item()
    scores = {"loss": loss, **tag_scores(logits.numpy(), targets.numpy(), args.labels)}
    say(f"validation: {common.in_words(scores)}")
    return scores


def frequency_scores(labels, rows, val_rows, kind):
    """tag_scores of always predicting the label frequencies of the training photos

    rows, val_rows: the images of both splits that have a label
    """
    always = np.tile(labels.train[rows].mean(0), (len(val_rows), 1))
    scores = tag_scores(always, labels.val[val_rows].toarray(), kind)
    say(f"by label frequencies alone: {common.in_words(scores)}")
    return scores


def tag_scores(scores, targets, labels):
    """How well `scores` (N, K) rank the labels `targets` (N, K) -> {name: percent}

    top1, top5: images of which one of the 1 or 5 best-scored labels is right. mAP: average
    precision, mean over the labels that occur. Of topics those are right that make up a tenth of
    the captions or more [ours]. Rotations have top1 alone.
    """
    from sklearn.metrics import average_precision_score

    right = targets >= (0.1 if labels == "lda" else 0.5)
    best = torch.from_numpy(scores).topk(min(5, scores.shape[1])).indices.numpy()
    hits = np.take_along_axis(right, best, 1)
    result = {"top1": 100 * float(hits[:, 0].mean())}
    if labels == "rotation":
        return result
    result["top5"] = 100 * float(hits.any(1).mean())
    occurring = np.flatnonzero(right.any(0))
    bar = progress(occurring, desc="mAP", unit=" labels", leave=False)
    precisions = [average_precision_score(right[:, k], scores[:, k]) for k in bar]
    if precisions:
        result["mAP"] = 100 * float(np.mean(precisions))
    return result


# ----------------------------------------------------------------------------- labels for photos


@torch.no_grad()
def predict_photos(paths, weights, device):
    """`--predict`: print the ten most likely labels of each photo."""
    content = common.read_checkpoint(weights)
    ours = isinstance(content, dict) and content.get("script") == "tp"
    check(ours, f"{weights} is no checkpoint.pth of tp.py (a backbone alone has no labels)")
    photos = common.ImageFiles(paths)
    photos.check_files("check the path")
    with common.reading(weights, common.CHECKPOINT):
        names, trained = content["names"], content["args"]
        model = TagPredictor(trained["arch"], len(names), trained["labels"])
        model.load_state_dict(content["model"])
        side = common.image_side(trained["image_size"])
        squares = common.CropView(photos, side, part=1.0)
    model.to(device).eval()
    for path, (pixels, readable) in zip(paths, squares):
        if not readable:
            say(f"{path}: cannot be decoded, is it a photo?")
            continue
        logits = model(common.augment(torch.from_numpy(pixels)[None].to(device)))[0]
        chances = logits.sigmoid() if trained["labels"] == "lda" else logits.softmax(0)
        say(path)
        best = chances.topk(min(10, len(names)))
        for chance, k in zip(best.values.tolist(), best.indices.tolist()):
            say(f"  {100 * chance:5.1f}%  {names[k]}")


if __name__ == "__main__":
    common.run(main, get_args)
