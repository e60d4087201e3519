"""Image tagging on frozen features.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021. Sec. 4.3.

Tags that occur at the same images get similar vectors (pointwise mutual information, PMI). A
2-layer MLP on features of the frozen backbone is trained to point where the vectors of the image's
tags point. The tags whose vectors are nearest to its output are predicted: mIOU@K [Tab. 5].

    laptop       python -m downstream.tagging
    own photos   python -m downstream.tagging --data photos.jsonl --num-tags 1000
    COCO         python -m downstream.tagging --weights runs/mmcontrastive/backbone.pth --data coco
    TP's words   python -m downstream.tagging --weights runs/tp/backbone.pth --data coco \\
                     --tags runs/tp/concepts.json --num-tags 1000
    eight GPUs   torchrun --nproc_per_node=8 -m downstream.tagging --data coco   (extract features)

Tags are the categories of COCO's instances, or the tags of a .jsonl; of a built-in scene shape,
colour, size, fill, place, and colour with shape. With --tags they are the words in that file which
occur in an image's captions. The paper's Stock photos are not public.

What the paper leaves open is [ours]: PMI is that of shares of the training images, a tag's with
itself included; vectors are rows of U sqrt(S) of the truncated SVD U S V', at unit length;
"nearest" is by cosine. mIOU@K compares the K nearest tags with all n tags of an image: at most it
is min(n, K) / max(n, K), the table's last line. Only tags of the vocabulary count, images without
one are left out. Optimizer, epochs and standardised features are ours, too.

What to expect: the loss starts near 1 and falls. A trained backbone has to beat random
initialisation and the most frequent tags for every image. tagging.png shows eight photos.
"""

import json
import math
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import common
import eval_linear
from common import check, progress, say

CUTS = 5, 10, 15, 20  # the K of mIOU@K [Tab. 5]


def get_args(argv=None):
    parser = eval_linear.flag_parser("tagging", __doc__)
    add = parser.add_argument_group("tags").add_argument
    add("--tags", metavar="FILE", help="concepts.json of tp.py: words of captions are the tags")
    add("--num-tags", type=common.count, default=18157, help="the most frequent [Sec. 4.1]")
    add("--dim", type=common.dim, default=4096, help="of the tags' vectors, at most [Sec. 4.3]")
    add("--fraction", type=common.positive_share, help="of the training images (shapes: 0.2)")
    add = parser.add_argument_group("MLP").add_argument
    add("--hidden", type=common.dim, default=2048, help="its width [Sec. 4.3]")
    add("--epochs", type=common.count, default=10, help="passes over the training images [ours]")
    add("--batch-size", type=common.dim, default=128, help="images per iteration [ours]")
    add("--lr", type=common.positive, default=1e-3, help="peak of AdamW, falls by a cosine [ours]")
    args = eval_linear.parse(parser, argv)
    args.fraction = args.fraction or (0.2 if args.data == "shapes" else 1.0)
    return args


def main(args):
    world = common.start()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    trained = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    train, val = tagged_images(args)
    sizes = len(train.images), len(val.images), len(train.names)
    say("{} training and {} validation images, {} tags".format(*sizes))

    # Each run has a seed of its own, for the MLP and for the backbone that is not trained.
    how = args.image_size, world, args.amp, args.workers
    frozen = {}
    if args.weights != "random":
        frozen["trained"] = [frozen_features(trained, data, *how) for data in (train, val)]
    vectors = tag_vectors(train.labels, args.dim, world.device)
    runs, rankings = {name: [] for name in (*frozen, "random")}, []
    for seed in range(args.seed, args.seed + args.runs):
        other = eval_linear.load_backbone("random", trained.arch, seed)
        frozen["random"] = [frozen_features(other, data, *how) for data in (train, val)]
        if world.is_main:
            for name, ((fit, features), (held, held_features)) in frozen.items():
                mlp = train_mlp(features, fit.labels, vectors, args, seed)
                rankings.append(nearest_tags(mlp, held_features, vectors))
                runs[name].append(miou_at_cuts(rankings[-1], held.labels))
    common.end_processes(world)
    if world.is_main:
        held, _ = next(iter(frozen.values()))[1]
        draw_tags(held, rankings[0], f"{args.output}/tagging.png")
        report(runs | baselines(held.labels), args)


# ------------------------------------------------------------------------------- images and tags


def tagged_images(args):
    """-> LabelData for training and for validation, with labels that are sparse (N, tags)

    Names are the --num-tags tags that most training images have, in this order.
    """
    subset = args.fraction, None, args.seed
    train = common.caption_data(args.data, args.root, args.train_split, *subset)
    val = common.caption_data(args.data, args.root, args.val_split)
    words, val_words = [tag_words(data, args.data, args.tags) for data in (train, val)]
    counts = Counter(word for of_image in words for word in of_image)
    found = f"no caption holds a word of {args.tags}" if args.tags else f"{args.data} has no tags"
    check(counts, f"{found}: give --tags the concepts.json of tp.py and captions that it knows")
    names = sorted(counts, key=lambda word: (-counts[word], word))[: args.num_tags]
    train, val = with_tags(train, words, names), with_tags(val, val_words, names)
    check(len(val.images), f"no image of {args.val_split} has a tag of {args.train_split}")
    return train, val


def tag_words(data, source, path):
    """CaptionData of --data `source` -> the different tags of each image, as N lists or sets

    path: None, or a concepts.json: then its words in an image's captions are the tags.
    """
    bar = progress(range(len(data)), desc="tags", unit=" images")
    if path:
        import language  # only here: other tags do without it

        with common.reading(path, '{"nouns": {word: count, ...}, ...} of tp.py or icmlm.py'):
            parts = json.loads(Path(path).read_bytes()).values()
            concepts = {word for part in parts for word in part}
        captions = (" ".join(data.captions_of(i)) for i in bar)
        return [concepts.intersection(language.words_of(text)) for text in captions]
    if source == "shapes":
        return [scene_tags(data.images[i]) for i in bar]
    return [[data.tag_names[k] for k in data.tags_of(i)] for i in bar]


def scene_tags(scene):
    """What is to be seen in a built-in scene, 94 different tags in all -> {word, ...}"""
    import shapes

    tags = set()
    for o in shapes.objects_of(scene):
        tags |= {o.shape, o.colour, o.size, o.fill, shapes.place(o), f"{o.colour} {o.shape}"}
    return tags


def with_tags(data, words, names):
    """CaptionData, the words of each image -> LabelData without the images that have no tag"""
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(analyzer=list, vocabulary=names, dtype=np.float32)
    tags = sparse.csr_array(counter.transform(words))
    rows = np.flatnonzero(tags.sum(1))
    if len(rows) < len(data):
        say(f"{len(data) - len(rows)} of {len(data)} images have no tag and are left out")
    return eval_linear.LabelData(data.images, tags, names).select(rows)


# ---------------------------------------------------------------------- vectors, features, MLP


def tag_vectors(tags, dim, device):
    """PMI embedding: sparse (N, tags) -> (tags, dim), or fewer if there are fewer tags; length 1

    PMI(a, b) = log P(a, b) / (P(a) P(b)) [Church & Hanks 1990, the paper's reference], where P are
    shares of the N images. A tag of all images has PMI 0 with every tag and the vector 0.
    """
    both = torch.from_numpy((tags.T @ tags).toarray()).to(device)  # images that have both tags
    each = both.diagonal()
    pmi = torch.log(both * tags.shape[0] / torch.outer(each, each))  # -inf if no image has both
    # Of a symmetric matrix the singular values are the eigenvalues without their signs.
    values, axes = torch.linalg.eigh(pmi.clamp(min=0))
    largest = values.abs().argsort(descending=True)[:dim]
    vectors = axes[:, largest] * values[largest].abs().sqrt()
    return F.normalize(vectors, eps=1e-3)  # a vector that is rounding error alone stays near 0


def frozen_features(backbone, data, size, world, amp, workers):
    """-> readable images as LabelData, features (M, D); (None, None) but on the first process"""
    backbone.to(world.device, memory_format=torch.channels_last)
    how = size, world, amp, workers
    features, rows = eval_linear.extract_features(backbone, data.images, *how)
    return (data.select(rows), features) if world.is_main else (None, None)


def train_mlp(features, tags, vectors, args, seed):
    """features: (N, D).  tags: sparse (N, tags).  vectors: (tags, dim) -> MLP from D to dim"""
    torch.manual_seed(seed)
    device, rng, width = vectors.device, np.random.default_rng(seed), features.shape[1]
    features = torch.from_numpy(features).to(device)
    # Zero mean, unit variance: or backbones with small features would learn more slowly. [ours]
    scale = nn.BatchNorm1d(width, affine=False).eval()
    scale.running_mean, scale.running_var = features.mean(0), features.var(0, correction=0)
    layers = nn.Linear(width, args.hidden), nn.ReLU(), nn.Linear(args.hidden, vectors.shape[1])
    mlp = nn.Sequential(scale, *layers).to(device)
    optimizer = common.build_optimizer("adamw", mlp.parameters(), args.lr, weight_decay=0.01)
    bar = progress(range(args.epochs), desc="MLP", unit=" epochs", leave=False)
    for epoch in bar:
        common.set_lr(optimizer, common.lr_factor(epoch, args.epochs))
        order = rng.permutation(len(features))
        for batch in np.array_split(order, math.ceil(len(order) / args.batch_size)):
            loss = cosine_loss(mlp(features[batch]), mean_vectors(tags[batch], vectors))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    check(loss.isfinite(), "the loss is not finite: lower --lr")
    return mlp


def cosine_loss(output, target):
    """1 - cos(output, target), mean over the batch [Sec. 4.3]; both (B, dim) -> scalar"""
    return 1 - F.cosine_similarity(output, target).mean()


def mean_vectors(tags, vectors):
    """The mean of the vectors (tags, dim) of each image's tags, sparse (B, tags) -> (B, dim)"""
    indices, first = torch.from_numpy(tags.indices), torch.from_numpy(tags.indptr[:-1])
    indices, first = indices.to(vectors.device), first.to(vectors.device)
    return F.embedding_bag(indices, vectors, first, mode="mean")


# ------------------------------------------------------------------------- predictions, scores


@torch.no_grad()
def nearest_tags(mlp, features, vectors):
    """features (N, D) -> (N, 20, or all) indices of tags, the nearest to the output first"""
    nearest = []
    for part in torch.from_numpy(features).split(1024):
        cosines = F.normalize(mlp(part.to(vectors.device))) @ vectors.T  # vectors have length 1
        nearest.append(cosines.topk(min(CUTS[-1], len(vectors))).indices.cpu())
    return torch.cat(nearest).numpy()


def miou_at_cuts(ranked, tags):
    """Mean over the images of |pred & gt| / |pred | gt| [Sec. 4.3] -> {"mIOU@5": percent, ...}

    ranked: (N, 20) tags; pred are the first K of them.  tags: sparse (N, tags); gt.
    """
    truth = [set(own) for own in np.split(tags.indices, tags.indptr[1:-1])]
    scores = {}
    for k in CUTS:
        predicted = [set(row) for row in ranked[:, :k].tolist()]
        overlaps = [len(pred & gt) / len(pred | gt) for pred, gt in zip(predicted, truth)]
        scores[f"mIOU@{k}"] = 100 * float(np.mean(overlaps))
    return scores


def baselines(tags):
    """The most frequent tags for every image, and what is possible -> {name: [miou_at_cuts]}"""
    number, size = np.diff(tags.indptr), tags.shape[1]
    always = np.tile(np.arange(min(CUTS[-1], size)), (len(number), 1))  # sorted by tagged_images
    bound = {}
    for k in CUTS:
        best = np.minimum(number, k) / np.maximum(number, min(k, size))
        bound[f"mIOU@{k}"] = 100 * float(best.mean())
    return {"most frequent tags": [miou_at_cuts(always, tags)], "upper bound": [bound]}


def report(runs, args):
    """Print the table, write result.json.  runs: {name: [{"mIOU@5": percent, ...} of each run]}"""
    mean, deviation = {}, {}
    for name, found in runs.items():
        both = eval_linear.over_runs(found)
        mean[name], deviation[name] = both["mean"], both["std"]
        say(f"{name:18}  {common.in_words(mean[name])}")
        if len(found) > 1:
            say(f"{'':17}±  {common.in_words(deviation[name])}")
    content = {"args": vars(args), **mean, "std": deviation, "runs": runs}
    common.write_json(f"{args.output}/result.json", content)
    words = eval_linear.IN_WORDS
    at_5 = [f"{mean[name]['mIOU@5']:.1f} {words.get(name, f'by the {name}')}" for name in mean]
    say(f"tagging of {args.data}: mIOU@5 {', '.join(at_5)}")


def draw_tags(data, ranked, path, side=192):
    """Eight images of LabelData: their five nearest tags, green if right, and below all their own

    ranked: what nearest_tags gives for them.
    """
    font, width, height = ImageFont.load_default(13), side + 16, side + 200
    sheet = Image.new("RGB", (4 * width, 2 * height), "white")
    draw = ImageDraw.Draw(sheet)
    for n, nearest in enumerate(ranked[:8, : CUTS[0]]):
        x, y = 8 + n % 4 * width, 8 + n // 4 * height
        [pixels] = common.read_crops(data.images, n, [common.centre_crop(1.0)], side)
        sheet.paste(Image.fromarray(pixels), (x, y))
        own = data.labels[[n]].indices
        for line, k in enumerate(nearest):
            colour = "green" if k in own else "firebrick"
            draw.text((x, y + side + 4 + 17 * line), data.names[k], colour, font)
        text = "tags: " + ", ".join(data.names[k] for k in sorted(own))
        lines = textwrap.wrap(text, side // 7, max_lines=5)
        draw.multiline_text((x, y + side + 95), "\n".join(lines), "black", font)
    sheet.save(path)


if __name__ == "__main__":
    common.run(main, get_args)
