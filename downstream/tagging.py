"""Image tagging on frozen features.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021. Sec. 4.3.
Tags that occur on the same photos get similar vectors (pointwise mutual information, PMI). A
2-layer MLP on features of the frozen backbone is trained to output the direction of the mean of a
photo's tag vectors. The tags nearest to its output are predicted and scored by mIOU@K [Tab. 5].

    laptop       python -m downstream.tagging
    own photos   python -m downstream.tagging --data photos.jsonl --weights FILE --num-tags 1000
    COCO         python -m downstream.tagging --data coco --weights FILE
    TP's words   python -m downstream.tagging --data coco --weights FILE \\
                     --tags runs/tp-coco/concepts.json --num-tags 1000

Tags are the categories of COCO's instances, or the tags of a .jsonl; for a built-in scene shape,
colour, size, fill, place, and colour with shape. With --tags they are the words of that file that
occur in a photo's captions. The paper's Stock photos are not public.

What the paper leaves open is [ours]: a tag has PMI with itself as well; vectors are l2-normalised
rows of U sqrt(S) of the truncated SVD U S V'; "nearest" is by cosine; optimizer and epochs. mIOU@K
compares the K nearest tags with all n tags of a photo: it cannot exceed min(n, K) / max(n, K).
"""

import math
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import common
import eval_linear
from common import fail, number, print_main, progress
from downstream import tasks
from extras import shapes

CUTS = 5, 10, 15, 20  # the K of mIOU@K [Tab. 5]
FREQUENT = "most frequent tags"  # predicted for all photos, to compare with
IN_WORDS = {**tasks.IN_WORDS, FREQUENT: f"by the {FREQUENT}"}


def get_args(argv=None):
    parser = common.Parser(__doc__)
    tasks.add_flags(parser)
    add = parser.add_argument_group("tags").add_argument
    add("--tags", metavar="FILE", help="concepts.json of tp.py, whose words are the tags")
    add("--num-tags", type=number("int > 0"), default=18157, help="size of the vocabulary")
    add("--dim", type=number("int > 0"), default=4096, help="maximum width of tag vectors")
    fraction = "use this fraction of the training photos (default 0.2 for shapes, else 1)"
    add("--fraction", type=number("> 0, <= 1"), help=fraction)
    add = parser.add_argument_group("MLP").add_argument
    add("--hidden", type=number("int > 0"), default=2048, help="width of the hidden layer")
    add("--epochs", type=number("int > 0"), default=10, help="passes over the training photos")
    add("--batch-size", type=number("int > 0"), default=128, help="photos per iteration")
    add("--lr", type=number("> 0"), default=1e-3, help="peak learning rate of AdamW [ours]")
    add("--runs", type=number("int > 0"), default=1, help="number of seeds to average over")
    args = parser.parse_args(argv)
    tasks.fill_defaults(parser, args, "tagging", fraction=0.2 if args.data == "shapes" else 1.0)
    return args


def main(args):
    device = tasks.begin(args)
    train, val = tagged_photos(args)
    eval_linear.report_shared(train, val)
    print_main(f"{len(train)} training and {len(val)} validation photos, {len(train.names)} tags")

    vectors = tag_vectors(train.labels, args.dim, device)  # (tags, dim)
    runs = defaultdict(list)
    for name, seeds, backbone in tasks.backbones(args, device):
        train_x = None  # or the memory holds two backbones' features: 47.5 GB each on Stock
        train_data, train_x = tasks.central_features(backbone, train, args, device)
        val_data, val_x = tasks.central_features(backbone, val, args, device)
        for seed in seeds:
            mlp = train_mlp(train_x, train_data.labels, vectors, args, seed)
            ranked = nearest_tags(mlp, val_x, vectors)  # (N, 20)
            runs[name].append(miou_at_cuts(ranked, val_data.labels))
    always = np.tile(range(min(CUTS[-1], len(train.names))), (len(val_data), 1))
    runs[FREQUENT] = [miou_at_cuts(always, val_data.labels)]
    tasks.report(runs, args, "tagging of", "mIOU@5", IN_WORDS)


def tagged_photos(args):
    """-> LabelData for training and for validation, with sparse labels (N, tags)

    Names are the --num-tags most frequent tags of the training photos, most frequent first.
    """
    splits = args.train_split, args.val_split
    train, val = common.caption_data(args.data, args.root, splits, tags=True)
    if args.fraction < 1:
        order = np.random.default_rng(args.seed).permutation(len(train))
        train = train.select(np.sort(order[: max(1, round(args.fraction * len(train)))]))
    train_tags, val_tags = tags_of_photos(train, args), tags_of_photos(val, args)
    counts = Counter(tag for tags in train_tags for tag in tags)
    if len(counts) < 2:
        fail(f"the photos have {len(counts)} different tags, but at least two are needed: give "
             "--tags a concepts.json of tp.py whose words occur in the captions")
    names = sorted(counts, key=lambda tag: (-counts[tag], tag))[: args.num_tags]
    train = with_tags(train, train_tags, names)
    return train, with_tags(val, val_tags, names)


def tags_of_photos(data, args):
    """The different tags of each photo of CaptionData: N lists or sets of strings"""
    if args.tags:
        from tp import words_of  # only here: it imports scikit-learn, which takes seconds

        concepts = {word for words in common.read_json(args.tags).values() for word in words}
        captions = progress(data.captions, desc="tags", total=len(data), leave=False)
        return [concepts.intersection(words_of(" ".join(texts))) for texts in captions]
    if args.data == "shapes":
        return [scene_tags(scene) for scene in data.images]
    return data.tags


def scene_tags(scene):
    """What a built-in scene shows; 94 different tags in all -> {tag, ...}"""
    tags = set()
    for o in shapes.objects_of(scene):
        tags |= {o.shape, o.colour, o.size, o.fill, shapes.place(o), f"{o.colour} {o.shape}"}
    return tags


def with_tags(data, tags, names):
    """CaptionData, the tags of each photo -> LabelData of the photos that have any of `names`"""
    from tp import multi_hot  # only here: see tags_of_photos

    known = set(names)
    labels = sparse.csr_array(multi_hot(map(known.intersection, tags), names), dtype=np.float32)
    keep = np.flatnonzero(labels.sum(1))
    if len(keep) < len(data):
        print_main(f"{len(data) - len(keep)} of {len(data)} photos have no tag, and are left out")
    return eval_linear.LabelData(data.images, labels, names, data.open).select(keep)


def tag_vectors(tags, dim, device):
    """PMI embedding: sparse (N, tags) -> (tags, dim), or (tags, tags) if dim is larger; length 1

    PMI(a, b) = log P(a, b) / (P(a) P(b)) [Church & Hanks 1990, the paper's reference], where P are
    fractions of the N photos. A tag on all photos has PMI 0 with every tag and the vector 0.
    """
    both = torch.from_numpy((tags.T @ tags).toarray()).to(device)  # how many photos have both tags
    each = both.diagonal()
    pmi = torch.log(both * tags.shape[0] / torch.outer(each, each))  # -inf if no photo has both
    # A symmetric matrix has as singular values its eigenvalues without their signs.
    values, axes = torch.linalg.eigh(pmi.clamp(min=0))
    largest = values.abs().argsort(descending=True)[:dim]
    vectors = axes[:, largest] * values[largest].abs().sqrt()
    return F.normalize(vectors, eps=1e-3)  # a vector of rounding errors stays near 0


def train_mlp(features, tags, vectors, args, seed):
    """features: (N, D).  tags: sparse (N, tags).  vectors: (tags, dim) -> MLP from D to dim"""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    device = vectors.device
    width = features.shape[1]
    # Zero mean, unit variance: otherwise backbones with small features would learn slowly. [ours]
    scale = nn.BatchNorm1d(width, affine=False).eval()
    scale.running_mean = features.mean(0)
    scale.running_var = features.var(0, correction=0)
    hidden = nn.Linear(width, args.hidden)
    mlp = nn.Sequential(scale, hidden, nn.ReLU(), nn.Linear(args.hidden, vectors.shape[1]))
    mlp.to(device)
    optimizer = torch.optim.AdamW(mlp.parameters(), args.lr, weight_decay=0.01, fused=True)
    num_batches = math.ceil(len(features) / args.batch_size)
    bar = progress(range(args.epochs), desc="MLP", unit=" epochs", leave=False)
    for epoch in bar:
        common.set_lr(optimizer, common.lr_factor(epoch, args.epochs))
        order = rng.permutation(len(features))
        for batch in np.array_split(order, num_batches):
            x = features[batch].to(device)
            loss = cosine_loss(mlp(x), mean_vectors(tags[batch], vectors))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    if not loss.isfinite():
        fail("the loss is not finite: try a lower --lr")
    return mlp


def cosine_loss(output, target):
    """1 - cos(output, target), mean over the batch [Sec. 4.3]; both (B, dim) -> scalar"""
    return 1 - F.cosine_similarity(output, target).mean()


def mean_vectors(tags, vectors):
    """The mean of the vectors (tags, dim) of each photo's tags, sparse (B, tags) -> (B, dim)"""
    indices = torch.from_numpy(tags.indices).to(vectors.device)
    offsets = torch.from_numpy(tags.indptr[:-1]).to(vectors.device)
    return F.embedding_bag(indices, vectors, offsets, mode="mean")


@torch.no_grad()
def nearest_tags(mlp, features, vectors):
    """features (N, D) -> (N, 20 or all tags) indices of tags, the nearest to the output first"""
    nearest = []
    k = min(CUTS[-1], len(vectors))
    for x in features.split(1024):
        cosine = F.normalize(mlp(x.to(vectors.device))) @ vectors.T  # vectors have length 1
        nearest.append(cosine.topk(k).indices.cpu())
    return torch.cat(nearest).numpy()


def miou_at_cuts(ranked, tags):
    """Mean over the photos of |pred & gt| / |pred | gt| [Sec. 4.3] -> {"mIOU@5": percent, ...}

    ranked: (N, 20) tags; pred are the first K of them.  tags: sparse (N, tags); gt.
    """
    truth = np.split(tags.indices, tags.indptr[1:-1])
    scores = {}
    for k in CUTS:
        overlaps = []
        for pred, gt in zip(ranked[:, :k], map(set, truth)):
            pred = set(pred)
            overlaps.append(len(pred & gt) / len(pred | gt))
        scores[f"mIOU@{k}"] = 100 * float(np.mean(overlaps))
    return scores


if __name__ == "__main__":
    main(get_args())
