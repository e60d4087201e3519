"""Image tagging on frozen features.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021. Sec. 4.3.

Tags that occur on the same images get similar vectors (pointwise mutual information, PMI). A
2-layer MLP on features of the frozen backbone is trained to output the direction of the mean of an
image's tag vectors. The tags nearest to its output are predicted and scored by mIOU@K [Tab. 5].

    laptop       python -m downstream.tagging
    own photos   python -m downstream.tagging --data photos.jsonl --num-tags 1000
    COCO         python -m downstream.tagging --data coco \\
                     --weights runs/mmcontrastive-coco/backbone.pth
    TP's words   python -m downstream.tagging --data coco \\
                     --weights runs/tp-coco/backbone.pth \\
                     --tags runs/tp-coco/concepts.json --num-tags 1000
    eight GPUs   torchrun --nproc_per_node=8 -m downstream.tagging --data coco   (extract features)

Tags are the categories of COCO's instances, or the tags of a .jsonl; for a built-in scene shape,
colour, size, fill, place, and colour with shape. With --tags they are the words of that file that
occur in an image's captions. The paper's Stock photos are not public.

What the paper leaves open is [ours]: PMI is computed from fractions of the training images, for a
tag with itself as well; vectors are rows of U sqrt(S) of the truncated SVD U S V', l2-normalised;
"nearest" is by cosine. mIOU@K compares the K nearest tags with all n tags of an image: its maximum
is min(n, K) / max(n, K), the table's last line. Only tags of the vocabulary count, and images
without one are left out. Optimizer, epochs and standardised features are ours, too.

What to expect: the loss starts near 1 and falls. A trained backbone should beat random
initialisation and the most frequent tags, predicted for all images. tagging.png shows eight photos.
"""

import json
import math
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import common
import eval_linear
import language
from common import positive_int, print_main, progress, require
from downstream.baselines import IN_WORDS, backbones

CUTS = 5, 10, 15, 20  # the K of mIOU@K [Tab. 5]


def get_args(argv=None):
    parser = eval_linear.flag_parser("tagging", __doc__)
    add = parser.add_argument_group("tags").add_argument
    add("--tags", metavar="FILE", help="concepts.json of tp.py: its words in captions are tags")
    add("--num-tags", type=positive_int, default=18157, help="size of the vocabulary [Sec. 4.1]")
    add("--dim", type=positive_int, default=4096, help="maximum width of tag vectors [Sec. 4.3]")
    add("--fraction", type=common.fraction, help="of the training images (default 1, shapes 0.2)")
    add = parser.add_argument_group("MLP").add_argument
    add("--hidden", type=positive_int, default=2048, help="hidden width [Sec. 4.3]")
    add("--epochs", type=positive_int, default=10, help="passes over the training images [ours]")
    add("--batch-size", type=positive_int, default=128, help="images per iteration [ours]")
    add("--lr", type=common.positive, default=1e-3, help="peak for AdamW; cosine decay [ours]")
    args = eval_linear.parse(parser, argv)
    usual = 0.2 if args.data == "shapes" else 1.0
    args.fraction = args.fraction or usual
    return args


def main(args):
    world = common.init_distributed()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    train, val = tagged_images(args)
    counts = f"{len(train.images)} training and {len(val.images)} validation images"
    print_main(f"{counts}, {len(train.names)} tags")

    vectors = tag_vectors(train.labels, args.dim, world.device)  # (tags, dim)
    runs = defaultdict(list)
    for name, seed, backbone in backbones(args):
        if backbone:
            train_x = None  # or the disk holds two backbones' features: 47.5 GB each on Stock
            train_data, train_x = frozen_features(backbone, train, args, world)
            val_data, val_x = frozen_features(backbone, val, args, world)
        if not world.is_main:
            continue
        mlp = train_mlp(train_x, train_data.labels, vectors, args, seed)
        ranked = nearest_tags(mlp, val_x, vectors)  # (N, 20)
        if not runs:
            draw_tags(val_data, ranked, f"{args.output}/tagging.png")
        runs[name].append(miou_at_cuts(ranked, val_data.labels))
    common.end_distributed(world)
    if world.is_main:
        report(runs | baselines(val_data.labels), args)


# ------------------------------------------------------------------------------- images and tags


def tagged_images(args):
    """-> LabelData for training and for validation, with sparse labels (N, tags)

    Names are the --num-tags most frequent tags of the training images, most frequent first.
    """
    train = common.caption_data(args.data, args.root, args.train_split)
    val = common.caption_data(args.data, args.root, args.val_split)
    if args.fraction < 1:
        order = np.random.default_rng(args.seed).permutation(len(train))
        count = max(1, round(args.fraction * len(train)))
        train = train.select(np.sort(order[:count]))
    train_tags = tags_of_images(train, args.data, args.tags)
    val_tags = tags_of_images(val, args.data, args.tags)
    counts = Counter(tag for tags in train_tags for tag in tags)
    none = f"no caption holds a word of {args.tags}" if args.tags else f"{args.data} has no tags"
    require(counts, f"{none}: give --tags a concepts.json of tp.py and captions with its words")
    most_frequent_first = sorted(counts, key=lambda tag: (-counts[tag], tag))
    names = most_frequent_first[: args.num_tags]
    train = with_tags(train, train_tags, names)
    val = with_tags(val, val_tags, names)
    require(len(val.images), f"no image of {args.val_split} has a tag of {args.train_split}")
    return train, val


def tags_of_images(data, source, path):
    """CaptionData of --data `source` -> the different tags of each image, as N lists or sets

    path: None, or a concepts.json: then its words in an image's captions are the tags.
    """
    images = progress(range(len(data)), desc="tags", unit=" images")
    if path:
        with common.error_context(f"{path} should be a concepts.json of tp.py or icmlm.py"):
            parts_of_speech = json.loads(Path(path).read_bytes())
        concepts = {word for words in parts_of_speech.values() for word in words}
        captions = (" ".join(data.captions_of(i)) for i in images)
        return [concepts.intersection(language.words_of(text)) for text in captions]
    if source == "shapes":
        return [scene_tags(data.images[i]) for i in images]
    return [[data.tag_names[k] for k in data.tags_of(i)] for i in images]


def scene_tags(scene):
    """What a built-in scene shows; 94 different tags in all -> {tag, ...}"""
    import shapes

    tags = set()
    for o in shapes.objects_of(scene):
        tags |= {o.shape, o.colour, o.size, o.fill}
        tags |= {shapes.place(o), f"{o.colour} {o.shape}"}
    return tags


def with_tags(data, tags, names):
    """CaptionData, the tags of each image -> LabelData of the images that have any of `names`"""
    index = {name: k for k, name in enumerate(names)}
    rows = []
    for tags_of_image in tags:
        rows.append({index[tag] for tag in tags_of_image if tag in index})
    keep = [i for i, row in enumerate(rows) if row]
    if len(keep) < len(data):
        print_main(f"{len(data) - len(keep)} of {len(data)} images have no tag and are left out")
    labels = language.multi_hot(rows, len(names))
    labelled = eval_linear.LabelData(data.images, labels, names)
    return labelled.select(keep)


# ---------------------------------------------------------------------- vectors, features, MLP


def tag_vectors(tags, dim, device):
    """PMI embedding: sparse (N, tags) -> (tags, dim), or (tags, tags) if dim is larger; length 1

    PMI(a, b) = log P(a, b) / (P(a) P(b)) [Church & Hanks 1990, the paper's reference], where P are
    fractions of the N images. A tag on all images has PMI 0 with every tag and the vector 0.
    """
    num_images, _ = tags.shape
    both = (tags.T @ tags).toarray()  # the number of images with both tags
    both = torch.from_numpy(both).to(device)
    each = both.diagonal()
    pmi = torch.log(both * num_images / torch.outer(each, each))  # -inf if no image has both
    # A symmetric matrix has as singular values its eigenvalues without their signs.
    values, axes = torch.linalg.eigh(pmi.clamp(min=0))
    values = values.abs()
    largest = values.argsort(descending=True)[:dim]
    vectors = axes[:, largest] * values[largest].sqrt()
    return F.normalize(vectors, eps=1e-3)  # a vector of rounding errors stays near 0


def frozen_features(backbone, data, args, world):
    """-> readable images as LabelData; features (M, D), None on all processes but the first"""
    backbone.to(world.device, memory_format=torch.channels_last)
    features, readable = eval_linear.extract_features(backbone, data.images, args, world)
    return data.select(readable), features


def train_mlp(features, tags, vectors, args, seed):
    """features: (N, D).  tags: sparse (N, tags).  vectors: (tags, dim) -> MLP from D to dim"""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    device = vectors.device
    features = torch.from_numpy(features)  # memory-mapped: they stay in their file
    width = features.shape[1]
    # Zero mean, unit variance: otherwise backbones with small features would learn slowly. [ours]
    scale = nn.BatchNorm1d(width, affine=False).eval()
    scale.running_mean = features.mean(0)
    scale.running_var = features.var(0, correction=0)
    mlp = nn.Sequential(
        scale,
        nn.Linear(width, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, vectors.shape[1]),
    )
    mlp.to(device)
    optimizer = common.build_optimizer("adamw", mlp.parameters(), args.lr, weight_decay=0.01)
    num_batches = math.ceil(len(features) / args.batch_size)
    bar = progress(range(args.epochs), desc="MLP", unit=" epochs", leave=False)
    for epoch in bar:
        common.set_lr(optimizer, common.lr_factor(epoch, args.epochs))
        order = rng.permutation(len(features))
        for batch in np.array_split(order, num_batches):
            x = features[batch].to(device)
            target = mean_vectors(tags[batch], vectors)
            loss = cosine_loss(mlp(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    require(loss.isfinite(), "the loss is not finite: lower --lr")
    return mlp


def cosine_loss(output, target):
    """1 - cos(output, target), mean over the batch [Sec. 4.3]; both (B, dim) -> scalar"""
    return 1 - F.cosine_similarity(output, target).mean()


def mean_vectors(tags, vectors):
    """The mean of the vectors (tags, dim) of each image's tags, sparse (B, tags) -> (B, dim)"""
    indices = torch.from_numpy(tags.indices).to(vectors.device)
    offsets = torch.from_numpy(tags.indptr[:-1]).to(vectors.device)
    return F.embedding_bag(indices, vectors, offsets, mode="mean")


# ------------------------------------------------------------------------- predictions, scores


@torch.no_grad()
def nearest_tags(mlp, features, vectors):
    """features (N, D) -> (N, 20 or all tags) indices of tags, the nearest to the output first"""
    nearest = []
    k = min(CUTS[-1], len(vectors))
    for x in torch.from_numpy(features).split(1024):
        output = F.normalize(mlp(x.to(vectors.device)))
        cosine = output @ vectors.T  # vectors have length 1
        nearest.append(cosine.topk(k).indices.cpu())
    return torch.cat(nearest).numpy()


def miou_at_cuts(ranked, tags):
    """Mean over the images of |pred & gt| / |pred | gt| [Sec. 4.3] -> {"mIOU@5": percent, ...}

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


def baselines(tags):
    """The most frequent tags for every image, and the upper bound -> {name: [miou_at_cuts]}"""
    num_images, num_tags = tags.shape
    most_frequent = np.arange(min(CUTS[-1], num_tags))  # sorted by tagged_images
    always = np.tile(most_frequent, (num_images, 1))
    n = np.diff(tags.indptr)  # (N,) tags of each image
    bound = {}
    for k in CUTS:
        best = np.minimum(n, k) / np.maximum(n, min(k, num_tags))
        bound[f"mIOU@{k}"] = 100 * float(best.mean())
    return {
        "most frequent tags": [miou_at_cuts(always, tags)],
        "upper bound": [bound],
    }


def report(runs, args):
    """Print the table, write result.json.  runs: {name: [{"mIOU@5": percent, ...} of each run]}"""
    mean, std = {}, {}
    for name, scores in runs.items():
        results = eval_linear.over_runs(scores)
        mean[name] = results["mean"]
        std[name] = results["std"]
        print_main(f"{name:18}  {common.format_scores(mean[name])}")
        if len(scores) > 1:
            print_main(f"{'':17}±  {common.format_scores(std[name])}")
    content = {"args": vars(args), **mean, "std": std, "runs": runs}
    common.write_json(f"{args.output}/result.json", content)
    at_5 = [f"{mean[name]['mIOU@5']:.1f} {IN_WORDS.get(name, f'by the {name}')}" for name in mean]
    print_main(f"tagging of {args.data}: mIOU@5 {', '.join(at_5)}")


def draw_tags(data, ranked, path, side=192):
    """Draw eight images, their five nearest tags, green if right, and below them all true tags

    data: LabelData.  ranked: the output of nearest_tags.
    """
    font = ImageFont.load_default(13)
    width = side + 16
    height = side + 200
    sheet = Image.new("RGB", (4 * width, 2 * height), "white")
    draw = ImageDraw.Draw(sheet)
    for n, nearest in enumerate(ranked[:8, : CUTS[0]]):
        x = 8 + n % 4 * width
        y = 8 + n // 4 * height
        [pixels] = common.read_crops(data.images[n], [common.centre_crop], side)
        sheet.paste(Image.fromarray(pixels), (x, y))
        truth = data.labels[[n]].indices
        names = ", ".join(data.names[k] for k in sorted(truth))
        lines = textwrap.wrap(f"tags: {names}", side // 7, max_lines=5)
        draw.multiline_text((x, y + side + 95), "\n".join(lines), "black", font)
        for line, k in enumerate(nearest):
            colour = "green" if k in truth else "firebrick"
            line_y = y + side + 4 + 17 * line
            draw.text((x, line_y), data.names[k], colour, font)
    sheet.save(path)


if __name__ == "__main__":
    common.run(main, get_args)
