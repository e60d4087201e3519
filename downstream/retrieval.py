"""Retrieval: photos found by captions and captions by photos, on a frozen backbone.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021.
[Sec. 4.2, Tab. 4; Sec. 4.3, Tab. 6]

Features of random crops and flips of each training photo are extracted once. A linear layer on
these features and a GRU that reads the captions are trained from scratch to give a photo and its
captions similar vectors, by the protocol of VSE++ (Faghri et al., BMVC 2018). A tenth of the
training photos, at most 5,000, is held out to choose the best epoch: on COCO this leaves the
paper's 113K to train on. The test images are those of --val-split.

    laptop        python virtex.py, then python -m downstream.retrieval
    own photos    python -m downstream.retrieval --data photos.jsonl --weights FILE
    COCO          python -m downstream.retrieval --data coco --weights FILE
                  ... --test-images 5000 --folds 5: the mean of five folds of 1,000 photos
    eight GPUs    torchrun --nproc_per_node=8 -m downstream.retrieval ... (they extract features)

Scores: R@K, the percentage of queries whose match is among the first K; Med r, the match's median
rank. A photo's match is the best of its captions. A random backbone and chance are scored as well.

What to expect: the loss per pair falls from 0.4 (twice the margin, all vectors alike) to below 0.1
with --negatives mean. With the paper's hardest negatives it must fall below 0.4: if it does not,
they are too hard for this backbone. On shapes, in four minutes, R@10 reaches 96 (random: 40).
"""

import copy
import math
import re
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import common
import eval_linear
from common import positive_int, print_main, progress, require
from downstream import baselines, pictures
from mmcontrastive import median_rank, recall, retrieval_ranks

# fmt: off
RECIPES = {  #        demo    small   paper: Sec. 4.2, after VSE++
    "train_images":  (2000,   None,   None),       # all
    "negatives":     ("mean", "mean", "hardest"),  # see "What to expect"
    "epochs":        (8,      3,      15),         # at each of the two learning rates
    "lr":            (1e-3,   1e-3,   2e-4),       # in the second half a tenth of it
    "crops":         (2,      4,      10),         # per training photo [VSE++: new ones each epoch]
    "crop_min":      (0.8,    0.2,    0.08),       # smallest part of the photo's area [VSE++ code]
    "dim":           (256,    256,    1024),
    "word_dim":      (128,    128,    300),
}
# fmt: on
BATCH_SIZE = 128  # pairs of a photo and a caption [Sec. 4.2]
HELD_OUT = 5000  # photos at most: 113K of COCO's 118K are trained on, as in the paper
MARGIN = 0.2  # of the loss [VSE++ code]
MAX_NORM = 2.0  # of the gradient [VSE++ code]
MIN_COUNT = 4  # how often a word must occur in the training captions to be kept [VSE++ code]
WORD = re.compile(r"\w+(?:['’-]\w+)*")  # t-shirt and can't are single words [ours]
START, END, UNKNOWN = range(3)  # before and after each caption, and for words that are not kept
IN_WORDS = {**baselines.IN_WORDS, "chance": "by chance"}


def get_args(argv=None):
    parser = eval_linear.flag_parser("retrieval", __doc__)
    add = parser.add_argument
    add("--recipe", choices=common.RECIPE_NAMES, help="demo (shapes), small (.jsonl) or paper")
    add("--train-images", type=positive_int, help="maximum, drawn once; few for a quick look")
    add("--test-images", type=positive_int, default=1000, help="maximum, drawn once [Sec. 4.2]")
    add("--folds", type=positive_int, default=1, help="parts of the test images to average over")
    add("--epochs", type=positive_int, help="epochs at --lr, and as many at a tenth of it")
    add("--negatives", choices=("hardest", "mean"), help="use mean if the loss stays at 0.4")
    add("--lr", type=common.positive, help="learning rate of Adam")
    add("--dim", type=positive_int, help="dimension of the common space")
    add("--word-dim", type=positive_int, help="dimension of the word embeddings")
    parser.set_defaults(**common.choose_recipe(RECIPES, argv))
    return eval_linear.parse(parser, argv)


def main(args):
    world = common.init_distributed()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    train = captioned_images(args, args.train_split, args.train_images)
    held_out = min(HELD_OUT, math.ceil(len(train) / 10))
    val = train.select(range(held_out))
    train = train.select(range(held_out, len(train)))
    test = captioned_images(args, args.val_split, args.test_images)
    require(args.folds <= len(test), f"--folds {args.folds}: there are {len(test)} test images")
    vocabulary = count_words(train.all_captions())
    counts = f"{len(train)} training, {len(val)} validation and {len(test)} test images"
    print_main(f"{counts}, {len(vocabulary)} words")

    runs = defaultdict(list)
    for name, seed, backbone in baselines.backbones(args):
        if backbone:
            backbone.to(world.device, memory_format=torch.channels_last)
            train_x = None  # or the disk holds two backbones' features: 9 GB each on COCO
            train_data, train_x = crop_features(backbone, train, args, world)
            val_data, val_x = image_features(backbone, val, args, world)
            test_data, test_x = image_features(backbone, test, args, world)
        if not world.is_main:
            continue
        model = train_encoders(
            train_data, train_x, val_data, val_x, vocabulary, args, world.device, seed
        )
        similarity = compare(model, test_data, test_x)  # (N images, M captions)
        image_of_caption = test_data.image_of_caption()
        if not runs:
            draw_retrieved(test_data, similarity, f"{args.output}/retrieval.png")
        runs[name].append(fold_scores(similarity, image_of_caption, args.folds))
    common.end_distributed(world)
    if world.is_main:
        for _ in runs["random"]:
            chance = torch.rand_like(similarity)
            runs["chance"].append(fold_scores(chance, image_of_caption, args.folds))
        report(runs, args)


# ------------------------------------------------------------------------------ photos, captions


def captioned_images(args, split, max_images):
    """At most `max_images` random captioned images of a split -> CaptionData"""
    data = common.caption_data(args.data, args.root, split).captioned()
    order = np.random.default_rng(args.seed).permutation(len(data))
    return data.select(order[:max_images].tolist())


class RandomCrops(eval_linear.CentreCrops):
    """A random crop of each of N images, then another of each, flipped, and so on"""

    def __init__(self, images, args):
        super().__init__(images, args.image_size)
        self.args = args

    def __len__(self):
        return self.args.crops * len(self.images)

    def __getitem__(self, i):
        n, photo = divmod(i, len(self.images))
        rng = np.random.default_rng([self.args.seed, i])
        self.crop = partial(common.random_crop, rng, self.args.crop_min)
        pixels, readable = super().__getitem__(photo)
        return (pixels[:, ::-1].copy() if n % 2 else pixels), readable


def image_features(backbone, data, args, world):
    """-> CaptionData of the images that can be decoded; features (N, channels) of their central
    squares. The features are None on all processes but the first.
    """
    features, readable = eval_linear.extract_features(backbone, data.images, args, world)
    return data.select(readable.tolist()), features


def crop_features(backbone, data, args, world):
    """The same for RandomCrops, with features (crops, N, channels)"""
    crops = RandomCrops(data.images, args)
    features, readable = eval_linear.extract_features(backbone, crops, args, world)
    readable = readable[: len(readable) // args.crops]
    if world.is_main:
        features = features.reshape(args.crops, len(readable), -1)
    return data.select(readable.tolist()), features


def count_words(captions):
    """The words that occur at least MIN_COUNT times, the most frequent first -> {word: id}"""
    counts = Counter()
    for caption in progress(captions, desc="words", unit=" captions", leave=False):
        counts.update(WORD.findall(caption.lower()))
    words = [word for word, count in counts.most_common() if count >= MIN_COUNT]
    require(words, f"no word occurs {MIN_COUNT} times in the training captions: give more of them")
    return {word: i for i, word in enumerate(words, UNKNOWN + 1)}


# ----------------------------------------------------------------------------- the common space


class CommonSpace(nn.Module):
    """Features of photos, and captions -> unit vectors. Initialised as in the code of VSE++."""

    def __init__(self, channels, vocabulary, word_dim, dim):
        super().__init__()
        self.vocabulary = vocabulary
        self.image = nn.Linear(channels, dim)
        self.words = nn.Embedding(UNKNOWN + 1 + len(vocabulary), word_dim)
        self.gru = nn.GRU(word_dim, dim)
        nn.init.xavier_uniform_(self.image.weight)
        nn.init.zeros_(self.image.bias)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def encode_images(self, features):
        """(B, channels) -> (B, dim)"""
        return F.normalize(self.image(F.normalize(features)))

    def encode_captions(self, captions):
        """B strings -> (B, dim): the GRU's state after the last word of each"""
        ids = [torch.tensor(self.ids_of(caption)) for caption in captions]
        packed = pack_sequence(ids, enforce_sorted=False)  # so that padding is never computed
        packed = packed.to(self.words.weight.device)
        packed = packed._replace(data=self.words(packed.data))
        _, state = self.gru(packed)
        return F.normalize(state[-1])

    def ids_of(self, caption):
        words = WORD.findall(caption.lower())
        ids = [self.vocabulary.get(word, UNKNOWN) for word in words]
        return [START, *ids, END]


def vse_loss(images, captions, image_idx, negatives="hardest"):
    """The hinge loss on the hardest negative of the batch, in both directions [VSE++] -> scalar

        sum over pairs (i, c) of  max_c' [MARGIN - s(i, c) + s(i, c')]+
                                + max_i' [MARGIN - s(i, c) + s(i', c)]+

    images, captions: (B, dim) unit vectors, s their product.  image_idx: (B,), the image of each
    pair: its other captions are not negatives [ours: on COCO a batch rarely has any].
    negatives: "mean" takes the mean over c' and i' instead of the maximum.
    """
    similarity = images @ captions.T
    positive = similarity.diagonal()
    same_image = image_idx[:, None] == image_idx
    negative = similarity.masked_fill(same_image, -math.inf)
    i2t = (MARGIN - positive[:, None] + negative).clamp(min=0)
    t2i = (MARGIN - positive + negative).clamp(min=0)
    if negatives == "hardest":
        i2t, t2i = i2t.amax(1), t2i.amax(0)
    else:
        i2t, t2i = i2t.mean(1), t2i.mean(0)
    return i2t.sum() + t2i.sum()


def train_encoders(data, features, val_data, val_features, vocabulary, args, device, seed):
    """Adam: --epochs passes over all pairs at --lr, as many at a tenth of it -> CommonSpace

    features: (crops, N, channels): each pair uses one of its photo's crops, drawn anew in each
    epoch; left and right are swapped in captions of flipped ones [ours, not VSE++'s].
    val_features: (N, channels): the epoch with the largest sum of R@K is kept [VSE++ code].
    """
    torch.manual_seed(seed)
    model = CommonSpace(features.shape[2], vocabulary, args.word_dim, args.dim)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    all_captions = data.all_captions()
    image_of_caption = data.image_of_caption()
    best_recalls = -1.0
    bar = progress(range(2 * args.epochs), desc="retrieval", unit=" epochs")
    for epoch in bar:
        common.set_lr(optimizer, 1.0 if epoch < args.epochs else 0.1)
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(image_of_caption))
        for batch in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            crop = rng.integers(len(features), size=len(batch))
            image_idx = image_of_caption[batch]
            x = torch.from_numpy(features[crop, image_idx])
            image_idx = torch.from_numpy(image_idx).to(device)
            images = model.encode_images(x.to(device))
            captions = [all_captions[i] for i in batch]
            for n in np.flatnonzero(crop % 2):
                captions[n] = common.swap_left_right(captions[n])
            captions = model.encode_captions(captions)
            loss = vse_loss(images, captions, image_idx, args.negatives)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        require(loss.isfinite(), f"the loss is not finite in epoch {epoch + 1}: try a lower --lr")
        similarity = compare(model, val_data, val_features)
        scores = fold_scores(similarity, val_data.image_of_caption())
        recalls = sum(scores[name] for name in scores if "R@" in name)
        bar.set_postfix(loss=f"{loss.item() / len(batch):.3f}", recalls=f"{recalls:.1f}")
        if recalls > best_recalls:
            best_recalls = recalls
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return model


# ---------------------------------------------------------------------------------------- scores


@torch.no_grad()
def compare(model, data, features):
    """The similarity of each image with each caption -> (N, M) on the CPU"""
    features = torch.from_numpy(features).to(model.image.weight.device)
    images = model.encode_images(features)
    columns = []
    captions = data.all_captions()
    parts = [captions[n : n + 256] for n in range(0, len(captions), 256)]
    for part in progress(parts, desc="captions", unit=" batches", leave=False):
        columns.append((images @ model.encode_captions(part).T).cpu())
    return torch.cat(columns, 1)


def fold_scores(similarity, image_of_caption, folds=1):
    """The images, in their order, in folds of equal size -> {"image to text R@1": mean, ...}

    R@K in percent, Med r: see mmcontrastive.py.  similarity: (N, M).  image_of_caption: (M,).
    """
    image_of_caption = torch.from_numpy(image_of_caption)
    size = len(similarity) // folds
    scores_of_folds = []
    for first in range(0, folds * size, size):
        inside = (image_of_caption >= first) & (image_of_caption < first + size)
        fold = similarity[first : first + size, inside]
        i2t, t2i = retrieval_ranks(fold, image_of_caption[inside] - first)
        scores = {}
        for direction, ranks in ("image to text", i2t), ("text to image", t2i):
            for name, score in recall(ranks).items():
                scores[f"{direction} {name}"] = score
            scores[f"{direction} Med r"] = median_rank(ranks)
        scores_of_folds.append(scores)
    return eval_linear.over_runs(scores_of_folds)["mean"]


def draw_retrieved(data, similarity, path):
    """For a caption of each of five images, draw the eight nearest photos, its own in a frame"""
    images = range(min(5, len(data)))
    captions = np.searchsorted(data.image_of_caption(), images)  # the first of each
    texts = [data.captions_of(i)[0] for i in images]
    similarity = similarity[:, captions].T
    scores, nearest = similarity.topk(min(8, len(data)))
    scores, nearest = scores.tolist(), nearest.tolist()
    pictures.draw_rows(texts, data.images, nearest, scores, path, framed=images)
    print_main(f"the photos nearest to some captions are in {path}")


def report(runs, args):
    """runs: {"trained", "random", "chance": [fold_scores, ...]}: print them, write result.json"""
    content = {"args": vars(args), "std": {}, "runs": runs}
    for name, scores in runs.items():
        results = eval_linear.over_runs(scores)
        content[name] = results["mean"]
        content["std"][name] = results["std"]
        print_main(f"{name:8} {common.format_scores(results['mean'])}")
        if args.runs > 1:
            print_main(f"{'':8} deviation: {common.format_scores(results['std'])}")
    common.write_json(f"{args.output}/result.json", content)
    scores = [f"{content[name]['text to image R@10']:.1f} {IN_WORDS[name]}" for name in runs]
    print_main(f"retrieval on {args.data}, text to image R@10: {', '.join(scores)}")


if __name__ == "__main__":
    common.run(main, get_args)
