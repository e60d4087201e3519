"""TP: a backbone learned by predicting what the captions of a photo mention.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020.

Captions are turned into labels once: their nouns, adjectives and verbs, the clusters of their
[CLS] vectors (Eq. 1), or their topics. A convolutional network is then trained to predict all
labels of a photo, with one softmax over them (Eq. 2) [Sec. 3.1]. The same loop runs the paper's
baselines: annotated tags, and rotations, which also pretrain its VGG-16 [App. F.1].

    laptop        python tp.py
    own photos    python tp.py --data photos.jsonl
    one GPU       python tp.py --data coco
    eight GPUs    torchrun --nproc_per_node=8 tp.py --data coco   (batch norm then sees 16, not 128)
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 tp.py --data coco   (on both; shared --output)
    VGG-16        python tp.py --data coco --labels rotation --output runs/rotation
                  python tp.py --data coco --arch vgg16_bn --init runs/rotation/backbone.pth
    labels        python -m downstream.labels photo.jpg --weights runs/tp/checkpoint.pth

Where the paper is:

    Eq. 1, clusters of caption vectors     cluster_labels: embed_captions, train_kmeans
    Eq. 2, softmax over all labels         label_loss, language.tag_loss
    TP-Postag [Sec. 3.1]                   postag_labels, language.count_concepts
    TP-LDA, TP-Label [Sec. 4]              lda_labels, label_loss; instance_labels
    heads of Fig. 2, module tp             language.tag_head
    rotations, recipes [App. F.1]          four_rotations; RECIPES, VGG16, ROTATION

What to expect (a finished run is in docs/logs/tp): the loss starts near ln K, K being the number of
labels (topics: near 0.7 K), and falls at once to that of predicting the label frequencies for every
photo. It never comes near zero: a photo with n labels costs at least ln n. If the validation scores
stall near those of the frequencies, train longer, or predict fewer labels: --num-labels, --pos nn.
"""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import common
import language
from common import positive_int, print_main, progress, require
from language import POS, TAGGERS

eval_linear = common.import_if_there("eval_linear")  # the probe at the end

LABELS = "postag", "cluster", "lda", "instances", "rotation"

# fmt: off
RECIPES = {  #           demo        small       paper: ResNet-50 [App. F.1]
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.3
    "image_size":       (48,         112,        224),
    "crop_min":         (1.0,        0.2,        0.2),                  # ours
    "colour_jitter":    (0.0,        1.0,        1.0),                  # ours
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 3.1
    "lm_iters":         (400,        2000,       20_000),               # ours
    "optimizer":        ("adamw",    "sgd",      "sgd"),                # App. F.1
    "batch_size":       (32,         32,         128),                  # App. F.1
    "iters":            (560,        None,       100_000),              # App. F.1
    "epochs":           (None,       25.0,       None),
    "lr":               (1e-3,       3e-2,       3e-2),                 # App. F.1
    "warmup":           (0.05,       0.0,        0.0),
    "steps":            ([],         [],         []),                   # App. F.1
    "weight_decay":     (1e-2,       1e-4,       1e-4),                 # App. F.1
    "log_every":        (10,         20,         20),
    "validate_every":   (400,        2000,       5000),
    "checkpoint_every": (200,        500,        2000),
    "val_images":       (5000,       5000,       5000),                 # at most; drawn once
    "probe_images":     (2000,       10_000,     10_000),
}
# What the paper changes for VGG-16, and for its pretraining on rotations.
VGG16 = {  # App. F.1
    "optimizer": "radam",
    "lr": 1e-4,
    "weight_decay": 1e-3,
    "steps": [0.8, 0.9],
}
ROTATION = {  # App. F.1
    "arch": "vgg16_bn",
    "optimizer": "radam",
    "iters": 120_000,
    "lr": 1e-3,
    "weight_decay": 1e-5,
    "steps": [5 / 6, 11 / 12],
}
NUM_LABELS = {"postag": 5000, "cluster": 1000, "lda": 40}  # Sec. 4.3, Tab. 2, Sec. 4.2
# fmt: on


def get_args(argv=None):
    recipe = choose_recipe(argv)
    parser = common.flag_parser("tp", __doc__, recipe)
    add = parser.add_argument_group("TP").add_argument
    add("--labels", choices=LABELS, default=LABELS[0], help="what to predict [Sec. 3.1, 4]")
    add("--num-labels", type=positive_int, help="K, at most: words, clusters, topics [Tab. 2, 4]")
    add("--pos", choices=POS, default=POS[-1], help="postag: parts of speech to keep [Tab. 4]")
    add("--tagger", choices=TAGGERS, default=TAGGERS[0], help="postag: the paper uses spacy")
    add("--lm", help="cluster: BERT, from the hub or a folder; scratch: train one on the captions")
    add("--lm-iters", type=positive_int, help="iterations of --lm scratch; more for more captions")
    add("--init", help="a backbone (VGG-16: of --labels rotation), a checkpoint.pth, or imagenet")
    add("--validate-every", type=positive_int, help="iterations between validation scores")
    args = common.parse(parser, argv)
    if args.num_labels and args.labels not in NUM_LABELS:
        names = ", ".join(NUM_LABELS)
        parser.error(f"--num-labels goes with {names}: with {args.labels}, K is fixed")
    batch_scale = args.batch_size / recipe["batch_size"]  # the rate grows with the batch
    args.lr = args.lr or batch_scale * recipe["lr"]
    return args


def choose_recipe(argv):
    """The paper's recipe and K depend on --arch and --labels as well -> {name: default}"""
    given = common.peek(argv, "--arch", "--labels")
    labels = given.labels or LABELS[0]
    paper = VGG16 if given.arch == "vgg16_bn" else {}
    if labels == "rotation" and given.arch in (None, "vgg16_bn"):
        paper = ROTATION
    recipe = common.choose_recipe(RECIPES, argv, paper)
    recipe["num_labels"] = NUM_LABELS.get(labels)
    if labels == "postag" and given.arch == "vgg16_bn":
        recipe["num_labels"] = 1000  # Tab. 2
    if labels == "cluster" and recipe["recipe"] == "demo":
        recipe["num_labels"] = 200
    return recipe


def main(args):
    world = common.init_distributed()
    device = world.device
    args.amp = common.choose_amp(device, args.amp)

    # Data: photos, and labels from their captions. Photos without a label are left out.
    train = common.caption_data(args.data, args.root, args.train_split)
    val = common.caption_data(args.data, args.root, args.val_split)
    probe = eval_linear and eval_linear.Probe(args, train, val, args.labels == "instances")
    run = common.Run(args, "tp", world, train)
    names, labels, val_labels = load_labels(args, train, val, run)  # K names; (N, K) sparse
    rows = labelled_rows(labels, args.train_split)
    val_rows = labelled_rows(val_labels, args.val_split)
    shuffled = np.random.default_rng(args.seed).permutation(val_rows)
    val_rows = np.sort(shuffled[: args.val_images])
    iters = args.iters or math.ceil(args.epochs * len(rows) / args.batch_size)
    print_main(f"{len(rows)} photos ({len(val_rows)} for validation), {len(names)} labels; "
               f"{iters} iterations at lr {args.lr:g}")  # fmt: skip

    # Model and optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = TagPredictor(args.arch, len(names), args.labels)
    same_labels = run.saved.get("names") == names
    run.initialize(model, model.backbone, anew=() if same_labels else "head.")
    model.to(device, memory_format=torch.channels_last)
    parameters = model.parameters()
    optimizer = common.build_optimizer(args.optimizer, parameters, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.compile()
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(make_sample, train.images, rows, args), len(rows))
    val_samples = common.Samples(partial(make_sample, val.images, val_rows, args), len(val_rows))
    validation = partial(validate, model, val_samples, val_labels, args, device)
    flip_permutation = language.flip_permutation(names)
    collate_fn = partial(collate, labels, flip_permutation)
    for iteration, micro_batches in run.steps(samples, collate_fn, iters, names=names):
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)  # [App. F.1]
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        for part, batch in enumerate(micro_batches, 1):
            parallel.require_backward_grad_sync = part == args.accumulate  # DDP: one all-reduce
            images = common.augment(batch["images"], batch["jitter"])  # (B, 3, h, w)
            targets = batch["targets"]  # (B, K)
            if args.labels == "rotation":
                images, targets = four_rotations(images)  # (4B, 3, h, w), (4B, 4)
            with common.autocast(device, args.amp):
                logits = parallel(images)  # (B, K)
            loss = label_loss(logits, targets, args.labels)
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss)
        scaler.step(optimizer)
        scaler.update()
        if world.is_main and run.due("validate") and iteration < iters:
            run.validation = validation()
        run.log(lr=args.lr * lr_scale)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        common.save_weights(run.folder / "backbone.pth", model.backbone)
        result = {"validation": validation()}
        if args.labels != "rotation":
            prior = prior_scores(labels[rows], val_labels[val_rows], args.labels)
            result["label_frequencies"] = prior
        run.finish(probe, model.backbone, **result)


# ---------------------------------------------------------------------------- captions to labels


def load_labels(args, train, val, run):
    """Load labels.npz from the output directory; the first process makes it, unless the run resumes

    -> K names, and for each split (N, K) sparse: 1 where an image has a label; lda: probabilities
    """
    world = run.world
    path = run.folder / "labels.npz"
    if world.is_main and not run.iteration:
        names, labels, val_labels = make_labels(args, train, val, run.folder, world.device)
        language.save_labels(path, names, labels, val_labels)
    common.barrier(world)
    return language.load_labels(path, len(train))


def make_labels(args, train, val, folder, device):
    """Make the labels that --labels chooses -> names, train, val as load_labels returns them"""
    if args.labels == "rotation":
        return rotation_labels(train, val)
    if args.labels == "instances":
        return instance_labels(train, val)
    train = language.filter_captions(train, language.words_of)
    val = language.filter_captions(val, language.words_of)
    enough = sum(train.num_captions) and sum(val.num_captions)
    require(enough, f"--labels {args.labels} needs captions of 3 to 25 words in both splits")
    if args.labels == "cluster":
        return cluster_labels(args, train, val, folder, device)
    if args.labels == "lda":
        return lda_labels(train, val, args.num_labels, args.seed)
    concepts = language.count_concepts(train.all_captions(), args.tagger)
    common.write_json(folder / "concepts.json", concepts)
    return postag_labels(train, val, concepts, args.pos, args.num_labels)


def postag_labels(train, val, concepts, pos, num_labels):
    """TP-Postag: of the K most frequent words, those in an image's captions [Sec. 3.1]"""
    names = language.top_concepts(concepts, pos, num_labels)
    return names, language.concept_labels(train, names), language.concept_labels(val, names)


def cluster_labels(args, train, val, folder, device):
    """TP-Cluster: the clusters of an image's captions [Sec. 3.1, Eq. 1]"""
    captions = train.all_captions()
    lm = args.lm
    if lm == "scratch":
        lm = folder / "language_model"
        language.scratch_language_model(
            lm,
            captions,
            iters=args.lm_iters,
            seed=args.seed,
            device=device,
            amp=args.amp,
        )
    tokenizer, model = language.language_model(lm, device, masked_words=False)

    # The vectors of both splits go to a file, not to memory: VG's captions need 8 GB.
    size = len(captions)
    captions += val.all_captions()
    shape = (len(captions), model.config.hidden_size)
    path = folder / "caption_vectors.npy"
    vectors = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    embed_captions(tokenizer, model, captions, vectors, device, args.amp)

    num_clusters = min(args.num_labels, size)
    centres = train_kmeans(vectors[:size], num_clusters, args.seed, device)
    clusters, distances = [], []
    for _, cluster, distance in nearest_centres(vectors, centres):
        clusters.append(cluster.cpu())
        distances.append(distance.cpu())
    cluster = torch.cat(clusters).numpy()
    distance = torch.cat(distances).numpy()
    path.unlink()
    names = cluster_names(captions, cluster[:size], distance[:size], num_clusters)
    labels = image_clusters(train, cluster[:size], num_clusters)
    val_labels = image_clusters(val, cluster[size:], num_clusters)
    return names, labels, val_labels


def embed_captions(tokenizer, model, captions, vectors, device, amp, batch_size=256):
    """psi(c)_[CLS] of Eq. 1, from the last layer, before the pooler -> into vectors (N, d_w)"""
    first = range(0, len(captions), batch_size)
    for n in progress(first, desc="caption vectors", unit=" batches"):
        batch = captions[n : n + batch_size]
        inputs = tokenizer(
            batch,
            padding=True,
            truncation=True,
            max_length=64,
            return_tensors="pt",
        ).to(device)
        with common.autocast(device, amp):
            hidden = model.base_model(**inputs).last_hidden_state  # (B, T, d_w)
        vectors[n : n + len(batch)] = hidden[:, 0].float().cpu().numpy()


def train_kmeans(vectors, num_clusters, seed, device="cpu", passes=20):
    """Eq. 1: centres xi that minimise the sum of |vector - its nearest centre|^2 -> (K, d_w)

    vectors: (N, d_w). Lloyd's algorithm from random vectors, until no centre moves, or for
    `passes` passes. An empty cluster is re-seeded with the vector farthest from its centre. [ours]
    """
    chosen = np.random.default_rng(seed).permutation(len(vectors))[:num_clusters]
    centres = torch.from_numpy(vectors[np.sort(chosen)]).to(device).float()
    for _ in progress(range(passes), desc="k-means", unit=" passes"):
        sums = torch.zeros_like(centres)
        sizes = centres.new_zeros(num_clusters)
        distances = []
        for batch, cluster, distance in nearest_centres(vectors, centres):
            sums.index_add_(0, cluster, batch)
            sizes += cluster.bincount(minlength=num_clusters)
            distances.append(distance)
        previous = centres
        centres = sums / sizes.clamp(min=1)[:, None]
        empty = sizes == 0
        farthest = torch.cat(distances).topk(int(empty.sum())).indices
        seeds = vectors[farthest.sort().values.cpu()]
        centres[empty] = torch.from_numpy(seeds).to(device).float()
        if torch.equal(previous, centres):
            break
    return centres


def nearest_centres(vectors, centres, batch_size=4096):
    """y of Eq. 1: yield vectors (B, d_w), their nearest centres (B,) and distances (B,)

    On the device of the centres, in batches that fit into memory.
    """
    first = range(0, len(vectors), batch_size)
    for n in progress(first, desc="nearest centres", unit=" batches", leave=False):
        batch = torch.from_numpy(vectors[n : n + batch_size]).to(centres.device).float()
        distance, cluster = torch.cdist(batch, centres).min(1)
        yield batch, cluster, distance


def cluster_names(captions, cluster, distance, num_clusters):
    """Name each cluster by the three captions nearest to its centre [ours] -> [name]"""
    nearest = [[] for _ in range(num_clusters)]
    for n in np.argsort(distance):
        chosen = nearest[cluster[n]]
        if len(chosen) < 3 and captions[n] not in chosen:
            chosen.append(captions[n])
    return [" | ".join(chosen) for chosen in nearest]


def image_clusters(data, cluster, num_clusters):
    """cluster: (captions,), that of each caption -> (images, clusters) sparse"""
    per_image = np.split(cluster, data.num_captions.cumsum()[:-1])
    return language.multi_hot((set(row.tolist()) for row in per_image), num_clusters)


def lda_labels(train, val, num_labels, seed, passes=10):
    """TP-LDA: topic probabilities; an image's captions form one document [Sec. 4]

    The vocabulary is the 10K most frequent words, without English stop words. Each topic is named
    by its five most probable words. [ours]
    """
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    word = r"[^\W\d_]{2,}"
    vectorizer = CountVectorizer(stop_words="english", token_pattern=word, max_features=10_000)
    counts = vectorizer.fit_transform(documents(train))
    rng = np.random.default_rng(seed)
    size = len(train)
    lda = LatentDirichletAllocation(num_labels, total_samples=size, random_state=seed)
    for _ in progress(range(passes), desc="topics", unit=" passes"):
        for batch in np.array_split(rng.permutation(size), max(1, size // 1024)):
            lda.partial_fit(counts[batch])
    words = vectorizer.get_feature_names_out()
    names = []
    for weights in lda.components_:
        best = words[np.argsort(-weights)[:5]]
        names.append(", ".join(best))
    val_counts = vectorizer.transform(documents(val))
    labels = topic_probabilities(lda, counts)
    val_labels = topic_probabilities(lda, val_counts)
    return names, labels, val_labels


def documents(data):
    for i in range(len(data)):
        yield " ".join(data.captions_of(i))


def topic_probabilities(lda, counts):
    """counts: (N, words) sparse -> (N, topics) sparse; an image without words has no topic"""
    rows = lda.transform(counts)
    rows[np.diff(counts.indptr) == 0] = 0
    return sparse.csr_array(rows.astype(np.float32))


def instance_labels(train, val):
    """TP-Label: the annotated tags [Sec. 4]"""
    where = 'annotations/instances_{split}.json for coco, "tags" in a .jsonl'
    tagged = train.tag_names and val.tag_names
    require(tagged, f"--labels instances needs tags in both splits: {where}")
    names = train.tag_names  # the same in both
    tags = map(train.tags_of, range(len(train)))
    val_tags = map(val.tags_of, range(len(val)))
    labels = language.multi_hot(tags, len(names))
    val_labels = language.multi_hot(val_tags, len(names))
    return names, labels, val_labels


def rotation_labels(train, val):
    """Every photo has all four labels: the loss sees it in each rotation (four_rotations)."""
    names = ["0°", "90°", "180°", "270°"]
    labels = language.multi_hot([range(4)] * len(train), 4)
    val_labels = language.multi_hot([range(4)] * len(val), 4)
    return names, labels, val_labels


def labelled_rows(labels, split):
    """The images of a split that have a label; prints how many have none."""
    labelled = labels.sum(1) > 0
    require(labelled.any(), f"no image of the split {split} has a label")
    missing = np.sum(~labelled)
    if missing:
        size = len(labelled)
        print_main(f"{missing} of {size} images of the split {split} have no label: left out")
    return np.flatnonzero(labelled)


# --------------------------------------------------------------------------- samples and batches


def make_sample(images, rows, args, index, rng):
    """The photo images[rows[index]] and its row in the labels; the centre crop if rng is None"""
    row = int(rows[index])
    sample = common.load_image(images[row], rng, args)
    sample["row"] = row
    return sample


def collate(labels, flip_permutation, samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), targets (B, K)

    flip_permutation: (K,), the label that replaces each one in a flipped photo.
    """
    rows = [sample["row"] for sample in samples]
    flipped = [sample["flipped"] for sample in samples]
    batch = common.collate_images(samples)
    batch["targets"] = language.label_rows(labels, rows, flipped, flip_permutation)
    return batch


def four_rotations(images):
    """RotNet (Gidaris et al. 2018): each image in 4 rotations -> (4B, 3, h, w), targets (4B, 4)"""
    rotated = [torch.rot90(images, k, (2, 3)) for k in range(4)]
    targets = torch.eye(4, device=images.device)
    targets = targets.repeat_interleave(len(images), 0)
    return torch.cat(rotated).contiguous(memory_format=torch.channels_last), targets


# -------------------------------------------------------------------------------- model and loss


class TagPredictor(nn.Module):
    """A backbone and a head that scores K labels. (B, 3, h, w) -> logits (B, K)

    kind: --labels. VGG-16 predicts rotations with its own fully connected layers [App. F.1].
    """

    def __init__(self, arch, num_labels, kind="postag"):
        super().__init__()
        self.backbone = common.build_backbone(arch)
        self.head = language.tag_head(arch, self.backbone.channels, num_labels)
        if arch == "vgg16_bn" and kind == "rotation":
            from torchvision.models import VGG  # only here: it takes seconds

            vgg = VGG(nn.Identity(), num_labels)
            self.head = nn.Sequential(vgg.avgpool, nn.Flatten(), vgg.classifier)

    def forward(self, images):
        return self.head(self.backbone(images))


def label_loss(logits, targets, kind):
    """Eq. 2, or, for topics, binary cross-entropy [Sec. 4] summed over the topics [ours]

    logits, targets: (B, K) -> scalar.  kind: --labels
    """
    if kind == "lda":
        total = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum")
        return total / len(targets)
    return language.tag_loss(logits, targets)  # Eq. 2


# ------------------------------------------------------------------------------------ validation


@torch.no_grad()
def validate(model, samples, labels, args, device):
    """Loss and tag_scores on centre crops of the validation split -> {name: score}"""
    model.eval()
    all_logits, all_targets = [], []
    collate_fn = partial(collate, labels, None)
    for batch in common.validation_batches(samples, args.workers, collate_fn, device):
        images = common.augment(batch["images"])
        targets = batch["targets"]
        if args.labels == "rotation":
            images, targets = four_rotations(images)
        with common.autocast(device, args.amp):
            features = model.backbone(images)
        logits = model.head(features.float())  # half precision would tie
        all_logits.append(logits.cpu())
        all_targets.append(targets.cpu())
    model.train()
    logits = torch.cat(all_logits)
    targets = torch.cat(all_targets)
    scores = {"loss": label_loss(logits, targets, args.labels).item()}
    scores |= tag_scores(logits.numpy(), targets.numpy(), args.labels)
    print_main(f"validation: {common.format_scores(scores)}")
    return scores


def prior_scores(labels, val_labels, kind):
    """tag_scores of always predicting the label frequencies of the training photos"""
    prior = np.tile(labels.mean(0), (val_labels.shape[0], 1))
    scores = tag_scores(prior, val_labels.toarray(), kind)
    print_main(f"by label frequencies alone: {common.format_scores(scores)}")
    return scores


def tag_scores(scores, targets, kind):
    """How well `scores` (N, K) rank the labels `targets` (N, K) -> {name: percent}

    top1, top5: images for which one of the 1 or 5 highest-scored labels is right. mAP: average
    precision, averaged over the labels that occur. A topic is right if its probability is at least
    0.1 [ours]. Rotations have only top1.
    """
    from sklearn.metrics import average_precision_score

    right = targets >= (0.1 if kind == "lda" else 0.5)
    five = min(5, scores.shape[1])
    best = torch.from_numpy(scores).topk(five).indices.numpy()
    best_right = np.take_along_axis(right, best, 1)  # (N, 5)
    result = {"top1": best_right[:, 0].mean()}
    if kind != "rotation":
        result["top5"] = best_right.any(1).mean()
    occurs = right.any(0)
    if kind != "rotation" and occurs.any():
        result["mAP"] = average_precision_score(right[:, occurs], scores[:, occurs])
    return {name: 100 * float(score) for name, score in result.items()}


if __name__ == "__main__":
    common.run(main, get_args)
