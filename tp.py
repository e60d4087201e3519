"""TP: a backbone learned by naming what the captions of a photo speak of.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020, Sec. 3.1.

Captions are turned into labels once: their nouns, adjectives and verbs, the clusters that a language model sorts them
into (Eq. 1), their topics or their tokens. Then a convolutional network learns to predict all labels of a photo, with
one softmax over them (Eq. 2). Annotated tags (TP-Label) and rotations (RotNet, which needs neither captions nor tags and
is the paper's start for VGG-16) are trained by the same loop, as the baselines that they are.

    laptop        python tp.py
    own photos    python tp.py --data photos.jsonl --arch resnet18 --image-size 112 --epochs 60 --batch-size 32 --lr 0.03
    one GPU       python tp.py --data coco
    eight GPUs    torchrun --nproc_per_node=8 tp.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 tp.py --data coco
                  (with --output on a file system that both see)
    VGG-16        torchrun --nproc_per_node=8 tp.py --data coco --labels rotation --output runs/rotation
                  torchrun --nproc_per_node=8 tp.py --data coco --arch vgg16 --init runs/rotation/backbone.pth
    tags          python tp.py --predict photo.jpg --weights runs/tp/checkpoint.pth

What to expect: the loss starts near ln K, the logarithm of the number of labels, and drops at once to that of naming the
frequent labels for every photo. It never comes near zero: a photo with n labels asks for 1/n on each of them and costs
ln n at best. (lda has a loss of its own: a binary cross-entropy summed over the topics, from 0.7 K.) Whether the backbone sees shows in the validation scores, which are logged beside those of predicting
label frequencies.
"""

import functools
import math
import os
import sys
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import common
import language
import probe
from common import fail, progress, say

LABELS = ("postag", "cluster", "lda", "tokens", "instances", "rotation")

DEFAULTS = {
    #                    on shapes               on real data (the paper's, App. F.1)
    #                    labels      rotation    ResNet       VGG-16       VGG-16, rotation
    "image_size":       (64,         64,         224,         224,         224),
    "crop_min":         (0.7,        0.7,        0.2,         0.2,         0.2),          # ours
    "colour_jitter":    (0.25,       0.25,       1.0,         1.0,         1.0),          # ours
    "batch_size":       (32,         32,         128,         128,         128),
    "iters":            (1200,       500,        100_000,     100_000,     120_000),
    "optimizer":        ("radam",    "radam",    "sgd",       "radam",     "radam"),
    "lr":               (1e-3,       1e-3,       3e-2,        1e-4,        1e-3),
    "weight_decay":     (1e-4,       1e-5,       1e-4,        1e-3,        1e-5),
    "steps":            ((0.8,),     (0.8,),     (),          (0.8, 0.9),  (5 / 6, 11 / 12)),
    "lm":               ("scratch",  None,       "bert-base-uncased", "bert-base-uncased", None),  # Sec. 3.1
    "lm_iters":         (400,        None,       20_000,      20_000,      None),         # ours
    "log_every":        (10,         10,         20,          20,          20),
    "validate_every":   (400,        200,        5000,        5000,        5000),
    "checkpoint_every": (200,        200,        2000,        2000,        2000),
    "probe_images":     (2000,       2000,       10_000,      10_000,      10_000),
}  # fmt: skip

NUM_LABELS = {
    #           shapes  ResNet  VGG-16
    "postag":  (5000,   5000,   1000),    # Sec. 4.3, Tab. 2 (VGG-16: also 10K)
    "cluster": (200,    1000,   1000),    # Tab. 2 (also 10K)
    "lda":     (40,     40,     40),      # Sec. 4.2
    "tokens":  (10_000, 10_000, 10_000),  # VirTex Sec. 4.2
}  # fmt: skip


def get_args(argv=None):
    parser = common.flag_parser("tp", __doc__, DEFAULTS, on_shapes=2)

    labels = parser.add_argument_group("labels")
    labels.add_argument("--labels", choices=LABELS, default="postag", help="what is predicted; postag is best in the paper [Sec. 3.1, Sec. 4]")
    labels.add_argument("--pos", choices=("nn", "nn+adj", "nn+adj+vb"), default="nn+adj+vb", help="postag: parts of speech that become labels [Tab. 4]")
    labels.add_argument("--num-labels", type=int, help="K: the most frequent words, clusters, topics, or tokens; fewer where the captions hold fewer [Tab. 2, 4] (default 5000 words, with vgg16 1000; 1000 clusters, 200 on shapes; 40 topics; 10000 tokens)")
    labels.add_argument("--tagger", choices=("textblob", "spacy"), default="textblob", help="postag: spacy is the paper's and more careful; it needs a download")
    labels.add_argument("--lm", help="cluster: a BERT-like model of the hub, a local folder, or scratch: a small one trained on the captions [Sec. 3.1]")
    labels.add_argument("--lm-iters", type=int, help="iterations of --lm scratch; more for more captions [ours]")

    model = parser.add_argument_group("model")
    model.add_argument("--arch", choices=sorted(common.BACKBONES), help="resnet50 [Sec. 4.3] or vgg16 [Sec. 4] for the paper's numbers, resnet18 for small data or a CPU (default resnet18 on shapes, resnet50 on real data, there vgg16 for rotation). Of two defaults of another flag the second is vgg16's")
    model.add_argument("--init", help="start from this backbone.pth; VGG-16 wants one of --labels rotation [App. F.1]")

    optim = parser.add_argument_group("optimisation")
    optim.add_argument("--batch-size", type=int, help="images per iteration over all processes; rotation shows each in four ways [App. F.1; Gidaris et al. 2018]")
    optim.add_argument("--iters", type=int, help="iterations; scale with the number of images [App. F.1]")
    optim.add_argument("--epochs", type=float, help="length in passes over the images, instead of --iters")
    common.add_recipe_flags(optim)
    optim.add_argument("--validate-every", type=int, help="iterations between validation scores")
    optim.add_argument("--val-images", type=int, default=5000, help="score at most this many images of the validation split, drawn once [ours]")

    use = parser.add_argument_group("use of a trained model")
    use.add_argument("--weights", help="a checkpoint.pth of this script")
    use.add_argument("--predict", nargs="+", metavar="IMAGE", help="print the ten most likely labels of these photos")

    args = parser.parse_args(argv)
    given = {flag for flag, value in vars(args).items() if value is not None}
    shapes, rotation = args.data == "shapes", args.labels == "rotation"
    args.arch = args.arch or ("resnet18" if shapes else "vgg16" if rotation else "resnet50")
    vgg = args.arch == "vgg16"
    column = 3 + rotation if vgg else 2
    defaults = {flag: (row[rotation], row[column]) for flag, row in DEFAULTS.items()}
    args = common.fill_defaults(args, defaults, scaled=("lr",))
    common.check_recipe(args, given, defaults["optimizer"][not shapes])
    if args.labels not in NUM_LABELS and "num_labels" in given:
        fail(f"--num-labels goes with {', '.join(NUM_LABELS)}: {args.labels} has as many as it has")
    if args.num_labels is None and args.labels in NUM_LABELS:
        args.num_labels = NUM_LABELS[args.labels][0 if shapes else 1 + vgg]
    if args.num_labels is not None and args.num_labels < 2 or args.lm_iters is not None and args.lm_iters < 1:
        fail("--num-labels must be at least 2, --lm-iters at least 1")
    if args.validate_every < 1 or args.val_images < 1:
        fail("--validate-every and --val-images must be at least 1")
    if bool(args.predict) != bool(args.weights):
        fail("--weights FILE goes with --predict IMAGE..." if args.weights else "--predict needs --weights FILE")
    return args


def main(args):
    world = common.start_processes()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.predict:
        return predict_photos(args, device)
    run = common.Run(args, "tp", world)
    checkpoint = run.begin()
    initial = common.load_backbone(args.arch, args.init) if args.init and not checkpoint else None

    # Data: photos, and labels made of their captions, once. A photo without any label is left out.
    train, val = (
        common.caption_data(args.data, args.root, args.train_split, args.fraction, args.captions_per_image, args.seed),
        common.caption_data(args.data, args.root, args.val_split),
    )
    run.same_data(checkpoint, train, val)
    labelled = probe.probe_data(args, train, val)
    if args.labels == "rotation":
        names, images, targets, val_images, val_targets = ROTATIONS, train.images, None, val.images, None
    else:
        with common.main_first(world):
            labels = cached_labels(args, train, val, run, device)
        names = labels.names
        images, targets = with_labels(train.images, labels.train, args.train_split)
        val_images, val_targets = with_labels(val.images, labels.val, args.val_split)
    if len(val_images) > args.val_images:
        drawn = np.sort(np.random.default_rng(args.seed).permutation(len(val_images))[: args.val_images])
        val_images, val_targets = type(val_images)(val_images[i] for i in drawn), None if val_targets is None else val_targets[drawn]
    iters = math.ceil(args.epochs * len(images) / args.batch_size) if args.epochs else args.iters
    say(f"{len(images)} photos ({len(val_images)} for validation), {len(names)} labels; {iters} iterations of {args.batch_size}")

    # Model, optimiser, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = TagPredictor(args.arch, len(names))
    if initial:
        model.backbone = initial
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start, best = run.restore(checkpoint, parts)
    checkpoint = None
    if args.compile:
        model.compile()
    parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if world.size > 1 else model

    sampler = common.InfiniteSampler(len(images), args.batch_size, world, args.seed, start)
    together = functools.partial(collate, targets=targets, mirrored=language.mirrored_labels(names))
    loader = common.make_loader(TagView(images, args), sampler, args.batch_size // world.size, args.workers, together, device)
    feed = common.Feed(loader, device, run, images)
    validation = functools.partial(validate, model, TagView(val_images, args, training=False), val_targets, args, device)

    parallel.train()
    bar = progress(total=iters, initial=start, unit=" its", desc="tp")
    with common.StopSignals() as stop:
        for iteration, batch in zip(range(start + 1, iters + 1), feed):
            factor = common.learning_rate_factor(args, iteration - 1, iters)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * factor

            pixels = common.augment(batch["images"], batch["jitter"])
            wanted = batch.get("targets")
            if args.labels == "rotation":
                pixels, wanted = four_rotations(pixels)
            with common.autocast(device, args.amp):
                logits = parallel(pixels)
            loss = label_loss(logits, wanted, args.labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            bar.update()

            stopping = common.any_process(world, bool(stop.number))
            saving = stopping or iteration % args.checkpoint_every == 0 or iteration == iters
            logging, validating = iteration % args.log_every == 0, iteration % args.validate_every == 0 and iteration < iters
            if saving or logging or validating:  # the only places that wait for the device
                value = common.average(world, loss.detach()).item()
                run.check_finite(iteration, {"loss": value})
                bar.set_postfix(loss=f"{value:.3f}")
            scores = {}
            if validating and world.is_main:
                scores = {f"validation_{name}": score for name, score in validation().items()}
                say(f"iteration {iteration}: " + ", ".join(f"{name.replace('_', ' ')} {score:.2f}" for name, score in scores.items()))
            if logging or validating:
                run.log(iteration, feed, loss=value, lr=args.lr * factor, **scores)
            if args.probe_every and iteration % args.probe_every == 0 and world.is_main:
                best = probe.keep_best(run, iteration, model.backbone, labelled, best, device)
            if saving:
                run.save(iteration, **{name: part.state_dict() for name, part in parts.items()}, best=best, names=names)
            if stopping:
                bar.close()
                say(f"stopped after iteration {iteration}: checkpoint written, the same command goes on from there")
                sys.exit(128 + stop.number)
    bar.close()

    # The backbone is the result; the probe says what it is worth.
    common.end_processes(world)
    if not world.is_main:
        return
    run.save_weights("backbone.pth", model.backbone.state_dict())
    result = {"validation": validation()}
    say("validation: " + ", ".join(f"{name} {score:.2f}" for name, score in result["validation"].items()))
    if targets is not None:
        result["label_frequencies"] = tag_scores(np.broadcast_to(targets.mean(0), val_targets.shape), val_targets, args.labels)
        say("by label frequencies alone: " + ", ".join(f"{name} {score:.2f}" for name, score in result["label_frequencies"].items()))
    run.finish(**result, **probe.final_probe(run, model.backbone, labelled, best, device))


# ------------------------------------------------------------------------------------------ captions to labels


class Labels(NamedTuple):
    """names: K labels in words.  train, val: sparse (N, K), multi-hot or, for lda, topic probabilities."""

    names: list
    train: sparse.csr_array
    val: sparse.csr_array


# What labels are made of, beside captions and tags: with any other value of these they are made anew.
LABEL_FLAGS = ("labels", "pos", "num_labels", "tagger", "lm", "lm_iters", "seed")


def cached_labels(args, train, val, run, device):
    """The labels of this run, from labels.npz in its folder when they are there already -> Labels"""

    def build():
        if args.labels == "instances":
            labels = instance_labels(train, val)
        else:
            kept = [common.filter_captions(data, language.words_of) for data in (train, val)]
            if not all(len(data.captions) for data in kept):
                fail(f"--labels {args.labels} needs captions of 3 to 25 words in both splits")
            labels = {"postag": postag_labels, "cluster": cluster_labels, "lda": lda_labels, "tokens": token_labels}[args.labels](args, *kept, run, device)
        return {"names": np.array(labels.names), **language.sparse_parts("train", labels.train), **language.sparse_parts("val", labels.val)}

    made_of = {"data": (train.digest(), val.digest()), **{flag: getattr(args, flag) for flag in LABEL_FLAGS}}
    arrays = common.cached_arrays(run.folder / "labels.npz", made_of, build)
    names = arrays["names"].tolist()
    return Labels(names, *(language.sparse_from(split, arrays, len(names)) for split in ("train", "val")))


def postag_labels(args, train, val, run, device):
    """TP-Postag: the K most frequent nouns, adjectives and verbs, each present where a caption holds the word [Sec. 3.1]."""
    concepts = language.count_concepts(train.captions, args.tagger)
    common.write_json(run.folder / "concepts.json", concepts)
    names = list(language.top_concepts(concepts, args.pos, args.num_labels))
    return Labels(names, *(language.concept_labels(data, names) for data in (train, val)))


def token_labels(args, train, val, run, device):
    """The set of the captions' SentencePiece tokens, as VirTex's token classification has it."""
    captions = progress(train.captions, desc="tokenizer", unit=" captions")
    model = language.train_tokenizer((language.clean(caption) for caption in captions), args.num_labels)
    common.write_file(run.folder / "tokenizer.model", lambda file: file.write(model))
    tokenizer, first = sentencepiece.SentencePieceProcessor(model_proto=model), language.MASK + 1
    names = [tokenizer.id_to_piece(token) for token in range(first, tokenizer.get_piece_size())]

    def labels_of(caption):
        return (token - first for token in tokenizer.encode(language.clean(caption)) if token >= first)

    return Labels(names, *(language.caption_labels(data, labels_of, len(names)) for data in (train, val)))


def instance_labels(train, val):
    """TP-Label: the annotated tags [Sec. 4]."""
    if not train.tag_names or train.tag_names != val.tag_names:
        fail('--labels instances needs tags, the same in both splits: annotations/instances_{split}.json for coco, "tags" in a .jsonl')
    return Labels(train.tag_names, *(language.multi_hot((data.tags_of(i) for i in range(len(data))), len(data.tag_names)) for data in (train, val)))


def cluster_labels(args, train, val, run, device, passes=5):
    """TP-Cluster: k-means on the [CLS] vectors; an image has the clusters of all its captions [Sec. 3.1, Eq. 1].

    Five passes in mini-batches from random captions as centres [ours], and vectors that lie on the disk in half
    precision: memory holds the centres, one batch and its distances. A label is called by the three captions nearest to
    its centre.
    """
    from sklearn.cluster import MiniBatchKMeans

    tokenizer, model = language.language_model(args, train.captions, run.folder / "language_model", device, masked_words=False)
    if len(train.captions) < 10 * args.num_labels:
        say(f"note: {len(train.captions)} captions are few for {args.num_labels} clusters: a smaller --num-labels gives labels that several photos share")
    path, number, clusters = run.folder / "caption_vectors.npy", len(train.captions), min(args.num_labels, len(train.captions))
    vectors = np.lib.format.open_memmap(path, "w+", np.float16, (number + len(val.captions), model.config.hidden_size))
    try:
        with open(path, "r+b") as file:  # a hole in the file would end the program without a word when the disk fills up
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        path.unlink()
        fail(f"{path} cannot be written ({error.strerror}): clustering needs {vectors.nbytes / 1e9:.1f} GB there for a while", everywhere=False)
    language.embed_captions(tokenizer, model, train.captions, vectors[:number], device, args.amp)
    language.embed_captions(tokenizer, model, val.captions, vectors[number:], device, args.amp)

    size, rng = max(4096, 2 * clusters), np.random.default_rng(args.seed)
    kmeans = MiniBatchKMeans(clusters, init="random", batch_size=size, random_state=args.seed)  # k-means++: minutes at 10K
    for _ in progress(range(passes), desc="k-means", unit=" passes"):
        order = rng.permutation(number)
        batches = np.array_split(order, max(1, number // size))  # none smaller than the number of clusters
        for batch in progress(batches, desc="pass", unit=" batches", leave=False):
            kmeans.partial_fit(vectors[np.sort(batch)].astype(np.float32))
    cluster, distance = np.empty(len(vectors), np.int32), np.empty(len(vectors), np.float32)
    for first in progress(range(0, len(vectors), 4096), desc="clusters", unit=" batches"):
        distances = kmeans.transform(vectors[first : first + 4096].astype(np.float32))
        cluster[first : first + 4096], distance[first : first + 4096] = distances.argmin(1), distances.min(1)
    path.unlink()

    nearest = [{} for _ in range(clusters)]  # dicts keep their order and each caption once
    for n in np.argsort(distance[:number]):
        if len(nearest[cluster[n]]) < 3:
            nearest[cluster[n]][train.captions[n]] = None

    def of_images(data, cluster):
        return language.multi_hot((set(cluster[data.first_caption[i] : data.first_caption[i + 1]].tolist()) for i in range(len(data))), clusters)

    return Labels([" | ".join(captions) for captions in nearest], of_images(train, cluster[:number]), of_images(val, cluster[number:]))


def lda_labels(args, train, val, run, device, passes=10):
    """TP-LDA: topic probabilities; a document is all captions of an image [Sec. 4, Additional TP models].

    English stop words are left out, 10K words kept [ours]. A label is called by the five words most likely in its topic.
    """
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    documents = lambda data: (" ".join(data.captions_of(i)) for i in progress(range(len(data)), desc="words", unit=" images"))
    vectorizer = CountVectorizer(stop_words="english", analyzer="word", token_pattern=r"[^\W\d_]{2,}", max_features=10_000)
    try:
        counts = vectorizer.fit_transform(documents(train)), vectorizer.transform(documents(val))
    except ValueError:
        fail("--labels lda finds no word in the captions that is not a stop word")
    rng, number = np.random.default_rng(args.seed), len(train)
    lda = LatentDirichletAllocation(args.num_labels, learning_method="online", total_samples=number, random_state=args.seed)
    for _ in progress(range(passes), desc="topics", unit=" passes"):
        for batch in np.array_split(rng.permutation(number), max(1, number // 1024)):
            lda.partial_fit(counts[0][batch])

    def probabilities(matrix):
        parts = [lda.transform(matrix[first : first + 1024]) for first in progress(range(0, matrix.shape[0], 1024), desc="topics of images")]
        return sparse.csr_array(np.concatenate(parts).astype(np.float32) * (np.diff(matrix.indptr) > 0)[:, None])  # no word, no topic

    words = vectorizer.get_feature_names_out()
    names = [", ".join(words[np.argsort(-weights)[:5]]) for weights in lda.components_]
    return Labels(names, *map(probabilities, counts))


def with_labels(images, labels, split):
    """The images that have a label, and the labels; those without are counted in the log."""
    kept = np.flatnonzero(labels.sum(1) > 0)
    if not len(kept):
        fail(f"no image of the split {split} has a label")
    if len(kept) < len(images):
        say(f"{len(images) - len(kept)} of {len(images)} images of the split {split} have no label and are left out")
    return type(images)(images[i] for i in kept), labels[kept]


# ------------------------------------------------------------------------------------------ samples and batches


class TagView(Dataset):
    """One photo, cropped and mirrored at random (or, not `training`, centred)."""

    def __init__(self, images, args, training=True):
        self.images, self.args, self.training = images, args, training

    def __len__(self):
        return len(self.images)

    def __getitem__(self, key):
        (epoch, index) = key if self.training else (0, key)
        return common.photo_sample(self.images, index, self.args, common.sample_rng(self.args.seed, epoch, index), self.training)


def collate(samples, targets=None, mirrored=None):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), and targets (B, K) when there are any

    targets: sparse (N, K).  mirrored: (K,) which label takes the place of each when a photo is mirrored.
    """
    batch = common.collate_photos(samples)
    if targets is not None:
        batch["targets"] = language.label_rows(samples, targets, mirrored)
    return batch


ROTATIONS = ["0°", "90°", "180°", "270°"]


def four_rotations(images):
    """RotNet (Gidaris et al. 2018) shows every image in four ways at once -> images (4B, 3, h, w), labels (4B, 4)"""
    turned = torch.cat([torch.rot90(images, k, (2, 3)) for k in range(4)])
    return turned.contiguous(memory_format=torch.channels_last), torch.eye(4, device=images.device).repeat_interleave(len(images), 0)


# ------------------------------------------------------------------------------------------ model and loss


class TagPredictor(nn.Module):
    """tp(phi(I)): a backbone and a head that scores K labels. (B, 3, h, w) -> logits (B, K)"""

    def __init__(self, arch, num_labels):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        self.head = common.tag_head(arch, self.backbone.channels, num_labels)

    def forward(self, images):
        return self.head(self.backbone(images))


def label_loss(logits, targets, labels):
    """Eq. 2; for topics the binary cross-entropy instead [Sec. 4, Additional TP models], summed over the topics [ours]."""
    if labels == "lda":
        return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum") / len(targets)
    return common.tag_loss(logits, targets)


# ------------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, view, targets, args, device):
    """Scores on the validation split, each photo centred -> {"loss", "top1", "top5", "mAP"} (rotation: loss and top1)"""
    model.eval()
    logits, rows = [], []
    loader = DataLoader(view, 64, num_workers=args.workers, collate_fn=functools.partial(collate, targets=targets), worker_init_fn=common.ignore_signals)
    for batch in progress(loader, desc="validation", unit=" batches", leave=False):
        pixels, wanted = common.augment(batch["images"].to(device)), batch.get("targets")
        if targets is None:
            pixels, wanted = four_rotations(pixels)
        with common.autocast(device, args.amp):
            logits.append(model(pixels).float().cpu())
        rows.append(wanted.cpu())
    model.train()
    logits, rows = torch.cat(logits), torch.cat(rows)
    loss = label_loss(logits, rows, args.labels).item()
    return {"loss": loss, **tag_scores(logits.numpy(), sparse.csr_array(rows.numpy()), args.labels)}


def tag_scores(scores, targets, labels):
    """How well `scores` (N, K) rank the labels -> {name: percent}

    top1, top5: images one of whose 1 or 5 best-scored labels is right. mAP: mean over the labels that occur of the
    average precision. Of topics those count as right that make up a tenth of the captions or more [ours].
    """
    from sklearn.metrics import average_precision_score

    right = targets.toarray() >= (0.1 if labels == "lda" else 0.5)
    ranked = torch.from_numpy(np.array(scores)).topk(min(5, scores.shape[1])).indices.numpy()
    hits = np.take_along_axis(right, ranked, 1)
    result = {"top1": 100 * float(hits[:, 0].mean())}
    if labels != "rotation":
        occurring = np.flatnonzero(right.any(0))
        precision = [average_precision_score(right[:, k], scores[:, k]) for k in progress(occurring, desc="mAP", unit=" labels", leave=False)]
        result |= {"top5": 100 * float(hits.any(1).mean())} | ({"mAP": 100 * float(np.mean(precision))} if precision else {})
    return result


# ------------------------------------------------------------------------------------------ labels for photos


@torch.no_grad()
def predict_photos(args, device):
    """`--predict`: print the ten most likely labels of each photo, in words."""
    content = common.read_checkpoint(args.weights)
    if not isinstance(content, dict) or content.get("script") != "tp":
        fail(f"{args.weights} is no checkpoint.pth of tp.py (a backbone alone has no labels)")
    names, trained = content["names"], content["args"]
    model = TagPredictor(trained["arch"], len(names))
    model.load_state_dict(content["model"])
    model.to(device).eval()
    photos = common.ImageFiles(args.predict)
    photos.check("check the path")
    for n, (pixels, readable) in enumerate(common.CropView(photos, trained["image_size"], part=1.0)):
        if not readable:
            say(f"{photos[n]}: cannot be decoded, is it a photo?")
            continue
        logits = model(common.augment(torch.from_numpy(pixels)[None].to(device)))[0]
        probabilities = logits.sigmoid() if trained["labels"] == "lda" else logits.softmax(0)
        say(f"{photos[n]}")
        for probability, label in zip(*(part.tolist() for part in probabilities.topk(min(10, len(names))))):
            say(f"  {100 * probability:5.1f}%  {names[label]}")


if __name__ == "__main__":
    common.run(main, get_args)
