"""Retrieval: photos found by captions and captions by photos, on a frozen backbone.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021.
[Sec. 4.2, Tab. 4; Sec. 4.3, Tab. 6]

The frozen backbone describes each photo once. A linear layer on these features and a GRU that
reads the captions are trained from scratch to give a photo and its captions similar vectors, by
the protocol of VSE++ (Faghri et al., BMVC 2018).

    laptop        python virtex.py, then python -m downstream.retrieval
    own photos    python -m downstream.retrieval --data photos.jsonl --weights FILE
    COCO          python -m downstream.retrieval --data coco --weights FILE
                  ... --test-images 5000 --folds 5: the mean of five times 1,000 photos
    eight GPUs    torchrun --nproc_per_node=8 -m downstream.retrieval ... (they extract features)

Scores: R@K, the percentage of queries whose match is among the first K; Med r, its median rank;
a photo's match is the best of its captions. Beside them: a random backbone, and chance.

What to expect: the loss per pair falls from 0.4 (twice the margin, all vectors alike) to below 0.1
with --negatives mean. With the hardest ones, the paper's, it must fall below 0.4: if it does not,
they are too hard for this backbone. On shapes, in three minutes, R@10 comes to 96 (random: 40).
The same command goes on in --output, which keeps features and the state after each epoch.
"""

import math
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import common
import eval_linear
import pictures
from common import check, count, progress, say
from mmcontrastive import recall, retrieval_ranks

# fmt: off
RECIPES = {  #        demo    small   paper: Sec. 4.2, after VSE++
    "train_images":  (2000,   None,   None),       # all
    "negatives":     ("mean", "mean", "hardest"),  # see "What to expect"
    "epochs":        (8,      3,      15),         # at each of the two learning rates
    "lr":            (1e-3,   1e-3,   2e-4),       # first; in the second half a tenth of it
    "dim":           (256,    256,    1024),
    "word_dim":      (128,    128,    300),
}
# fmt: on
BATCH_SIZE = 128  # pairs of a photo and a caption [Sec. 4.2]
MARGIN, MAX_NORM = 0.2, 2.0  # of the loss, and of the gradient [VSE++ code]
MIN_COUNT = 4  # how often a word must occur in the training captions to be kept [VSE++ code]
WORD = re.compile(r"\w+(?:['’-]\w+)*")  # t-shirt and can't are one, punctuation is none [ours]
START, END, UNKNOWN = range(3)  # before and after each caption, and for words that are not kept
WAYS = "image to text", "text to image"
IN_WORDS = {**eval_linear.IN_WORDS, "chance": "by chance"}


def get_args(argv=None):
    parser = eval_linear.flag_parser("retrieval", __doc__)
    add = parser.add_argument
    add("--recipe", choices=common.RECIPES, help="demo (shapes), small (.jsonl) or paper")
    add("--train-images", type=count, help="at most, drawn once; fewer for a quick look")
    add("--test-images", type=count, default=1000, help="at most, drawn once [Sec. 4.2]")
    add("--folds", type=count, default=1, help="parts of the test images; scores are their mean")
    add("--epochs", type=count, help="at --lr, and as many at a tenth of it")
    add("--negatives", choices=("hardest", "mean"), help="mean if the loss stays at 0.4")
    add("--lr", type=common.positive, help="learning rate of Adam")
    add("--dim", type=common.dim, help="of the common space")
    add("--word-dim", type=common.dim, help="of a word's embedding")
    parser.set_defaults(**common.choose_recipe(RECIPES, argv))
    return eval_linear.parse(parser, argv)


def main(args):
    world = common.start()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    names = ["random"] if args.weights == "random" else ["trained", "random"]
    train = captioned_images(args, args.train_split, args.train_images)
    test = captioned_images(args, args.val_split, args.test_images)
    check(args.folds <= len(test), f"--folds {args.folds}: there are {len(test)} test images only")
    vocabulary = count_words(train.captions)
    say(f"{len(train)} training images, {len(test)} test images, {len(vocabulary)} words")

    runs = {name: [] for name in (*names, "chance")}
    for seed in range(args.seed, args.seed + args.runs):
        for name in names:
            weights = args.weights if name == "trained" else "random"
            backbone = eval_linear.load_backbone(weights, backbone.arch, seed)
            backbone.to(world.device, memory_format=torch.channels_last).eval()
            fit = describe(backbone, train, f"{name}_train", args, world)
            found, features = describe(backbone, test, f"{name}_test", args, world)
            if not world.is_main:
                continue
            model = train_encoders(*fit, vocabulary, args, world.device, seed, name)
            similarity = compare(model, found, features)
            owners = torch.from_numpy(found.image_of_caption())
            runs[name].append(fold_scores(similarity, owners, args.folds))
            if seed == args.seed and name == names[0]:
                draw_retrieved(found, similarity, f"{args.output}/retrieval.png")
        if world.is_main:
            chance = torch.rand_like(similarity)  # as seeded before the last training
            runs["chance"].append(fold_scores(chance, owners, args.folds))
    common.end_processes(world)
    if world.is_main:
        report(runs, args)


# ------------------------------------------------------------------------------ photos, captions


def captioned_images(args, split, number):
    """At most `number` images of a split that have captions, drawn -> CaptionData"""
    data = common.caption_data(args.data, args.root, split)
    captioned = np.flatnonzero(data.captioned())
    check(len(captioned), f"--data {args.data}: no image of the split {split} has a caption")
    return data.select(np.random.default_rng(args.seed).permutation(captioned)[:number].tolist())


def describe(backbone, data, name, args, world):
    """-> CaptionData of the images that can be decoded, and their features (N, channels)

    (None, None) on all processes but the first.
    """
    images = eval_linear.LabelData(data.images, np.arange(len(data)), None)  # labels: which it is
    path = Path(args.output, f"features_{name}.npy")
    how = args.image_size, *eval_linear.EXTRACTED["sgd-mct"], args.amp, args.workers, world
    features, readable = eval_linear.kept_features(path, backbone, images, *how)
    if not world.is_main:
        return None, None
    return data.select(readable.tolist()), features


def count_words(captions):
    """The words that occur at least MIN_COUNT times, the most frequent first -> {word: id}"""
    captions = progress(captions, desc="words", unit=" captions", leave=False)
    counts = Counter(word for caption in captions for word in WORD.findall(caption.lower()))
    kept = [word for word, number in counts.most_common() if number >= MIN_COUNT]
    check(kept, f"no word occurs {MIN_COUNT} times in the training captions: give more of them")
    return {word: number for number, word in enumerate(kept, UNKNOWN + 1)}


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
        packed = pack_sequence(ids, enforce_sorted=False).to(self.words.weight.device)
        packed = packed._replace(data=self.words(packed.data))  # padding is never computed
        _, state = self.gru(packed)
        return F.normalize(state[-1])

    def ids_of(self, caption):
        known = [self.vocabulary.get(word, UNKNOWN) for word in WORD.findall(caption.lower())]
        return [START, *known, END]


def vse_loss(images, captions, owners, negatives="hardest"):
    """The hinge loss on the hardest negative of the batch, in both directions [VSE++] -> scalar

        sum over pairs (i, c) of  max_c' [MARGIN - s(i, c) + s(i, c')]+
                                + max_i' [MARGIN - s(i, c) + s(i', c)]+

    images, captions: (B, dim) unit vectors, s their product.  owners: (B,) number of each pair's
    image, whose other captions are no negatives [ours: they are rarely in one batch of COCO's].
    negatives: "mean" puts the mean over c' and i' in the place of the maximum.
    """
    similarity = images @ captions.T
    right = similarity.diagonal()
    negative = similarity.masked_fill(owners[:, None] == owners, -math.inf)
    to_text = (MARGIN - right[:, None] + negative).clamp(min=0)
    to_image = (MARGIN - right + negative).clamp(min=0)
    if negatives == "hardest":
        return to_text.amax(1).sum() + to_image.amax(0).sum()
    return to_text.mean(1).sum() + to_image.mean(0).sum()


def train_encoders(data, features, vocabulary, args, device, seed, name):
    """Adam: --epochs passes over all pairs at --lr, as many at a tenth of it -> CommonSpace

    The last state is taken [ours; VSE++'s code takes the best on validation images].
    """
    torch.manual_seed(seed)
    model = CommonSpace(features.shape[1], vocabulary, args.word_dim, args.dim).to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    flags = args.negatives, args.epochs, args.lr, args.dim, args.word_dim
    made_of = data.digest(), zlib.crc32(features), flags
    path = Path(args.output, f"{name}_{seed}_{zlib.crc32(repr(made_of).encode())}.pth")
    state, first = eval_linear.earlier_state(path), 0
    if state:
        first = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        say(f"{path}: going on after epoch {first}")

    features, owners = torch.from_numpy(features).to(device), data.image_of_caption()
    iters = math.ceil(len(owners) / BATCH_SIZE)
    bar = progress(initial=first * iters, total=2 * args.epochs * iters, desc=name, unit=" its")
    for epoch in range(first, 2 * args.epochs):
        common.set_lr(optimizer, 1.0 if epoch < args.epochs else 0.1)
        order = np.random.default_rng([seed, epoch]).permutation(len(owners))
        for pairs in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            photos = torch.from_numpy(owners[pairs]).to(device)
            images = model.encode_images(features[photos])
            captions = model.encode_captions([data.captions[pair] for pair in pairs])
            loss = vse_loss(images, captions, photos, args.negatives)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            bar.update()
        bar.set_postfix(loss=f"{loss.item() / len(pairs):.3f}")
        check(loss.isfinite(), f"the loss is not finite in epoch {epoch + 1}: try a lower --lr")
        state = {"epoch": epoch + 1, "model": model.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        common.write_file(path, lambda file: torch.save(state, file))
    bar.close()
    return model


# ---------------------------------------------------------------------------------------- scores


@torch.no_grad()
def compare(model, data, features):
    """The similarity of each image with each caption -> (N, M) on the CPU"""
    images = model.encode_images(torch.from_numpy(features).to(model.image.weight.device))
    parts, columns = torch.arange(len(data.captions)).split(256), []
    for part in progress(parts, desc="captions", unit=" batches", leave=False):
        captions = model.encode_captions([data.captions[n] for n in part])
        columns.append((images @ captions.T).cpu())
    return torch.cat(columns, 1)


def fold_scores(similarity, owners, folds):
    """The images, as they come, in folds of the same size -> {"image to text R@1": mean, ...}

    R@K in percent; Med r = floor(median of ranks from 0) + 1 [VSE++ code].
    similarity: (N, M).  owners: (M,).
    """
    size, found = len(similarity) // folds, []
    for first in range(0, folds * size, size):
        inside = (owners >= first) & (owners < first + size)
        part = similarity[first : first + size, inside]
        scores = {}
        for way, ranks in zip(WAYS, retrieval_ranks(part, owners[inside] - first)):
            scores |= {f"{way} {name}": score for name, score in recall(ranks).items()}
            scores[f"{way} Med r"] = math.floor(np.median(ranks.numpy())) + 1
        found.append(scores)
    return {name: float(np.mean([scores[name] for scores in found])) for name in found[0]}


def draw_retrieved(data, similarity, path):
    """A picture: the eight photos nearest to a caption of five images each, its own in a frame"""
    own = range(min(5, len(data)))
    captions = data.first_caption[: len(own)].tolist()
    texts = [data.captions[n] for n in captions]
    scores, nearest = similarity[:, captions].T.topk(min(8, len(data)))
    pictures.draw_rows(texts, data.images, nearest.tolist(), scores.tolist(), path, own)
    say(f"the photos nearest to some captions are in {path}")


def report(runs, args):
    """runs: {"trained", "random", "chance": [fold_scores, ...]}: print them, write result.json"""
    content = {"args": vars(args), "std": {}, "runs": runs}
    for name, scores in runs.items():
        both = eval_linear.over_runs(scores)
        content[name], content["std"][name] = both["mean"], both["std"]
        say(f"{name:8} {common.in_words(both['mean'], 1)}")
        if args.runs > 1:
            say(f"{'':8} deviation: {common.in_words(both['std'], 1)}")
    common.write_json(f"{args.output}/result.json", content)
    scores = [f"{content[name]['text to image R@10']:.1f} {IN_WORDS[name]}" for name in runs]
    say(f"retrieval on {args.data}, text to image R@10: {', '.join(scores)}")


if __name__ == "__main__":
    common.run(main, get_args)
