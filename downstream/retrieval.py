"""Retrieval: photos found by captions and captions by photos, on a frozen backbone.

Yuan et al. Multimodal Contrastive Training for Visual Representation Learning. CVPR 2021.
[Sec. 4.2, Tab. 4; Sec. 4.3, Tab. 6]

Features of random crops and flips of each training photo are extracted once. A linear layer on
these features and a GRU that reads the captions are trained from scratch to give a photo and its
captions similar vectors, by the protocol of VSE++ (Faghri et al., BMVC 2018). A tenth of the
training photos, at most 5,000, is held out to choose the best epoch.

    laptop        python virtex.py, then python -m downstream.retrieval
    own photos    python -m downstream.retrieval --data photos.jsonl --weights FILE
    COCO          python -m downstream.retrieval --data coco --weights FILE
                  ... --test-images 5000 --folds 5: the mean of five folds of 1,000 photos

Scores: R@K, the percentage of queries whose match is among the first K; the match's median rank,
"Med r". A photo's match is the best of its captions. A random backbone and chance are scored, too.

What to expect: the loss per pair starts at 0.4 (twice the margin, all vectors alike). If it stays
there with the paper's hardest negatives, they are too hard for this backbone: --negatives mean.
"""

import copy
import math
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import regex
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import common
import eval_linear
import mmcontrastive
from common import fail, print_main, progress
from downstream import tasks

FLAGS = {  # see common.Parser; paper: Sec. 4.2, after VSE++
    # name            demo     small    paper       what may be given; help
    "recipe":        (None,    None,    None,       common.RECIPES,
        "where the defaults come from (demo for shapes, small for a .jsonl, else paper)"),
    "train_images":  (2000,    None,    None,       "int > 0",
        "train on at most this many photos (all)"),
    "test_images":   (1000,    1000,    1000,       "int > 0",
        "test on this many photos"),
    "folds":         (1,       1,       1,          "int > 0",
        "average over this many parts of them"),
    "epochs":        (8,       3,       15,         "int > 0",
        "epochs at --lr, and as many at a tenth of it"),
    "negatives":     ("mean",  "mean",  "hardest",  ("hardest", "mean"),
        "the captions of other photos that count; take mean if the loss stays at 0.4"),
    "lr":            (1e-3,    1e-3,    2e-4,       "> 0",
        "learning rate of Adam"),
    "crops":         (2,       4,       10,         "int > 0",
        "stored random crops of each photo; VSE++ draws new ones each epoch [ours]"),
    "crop_min":      (0.8,     0.2,     0.08,       "> 0, <= 1",
        "smallest crop, as a fraction of the photo's area [VSE++ code]"),
    "dim":           (256,     256,     1024,       "int > 0",
        "dimension of the common space"),
    "word_dim":      (128,     128,     300,        "int > 0",
        "dimension of the word embeddings"),
    "runs":          (1,       1,       1,          "int > 0",
        "number of seeds to average over"),
}
BATCH_SIZE = 128  # pairs of a photo and a caption [Sec. 4.2]
HELD_OUT = 5000  # photos at most: 113K of COCO's 118K are trained on, as in the paper
MARGIN = 0.2  # of the loss [VSE++ code]
MAX_NORM = 2.0  # of the gradient [VSE++ code]
MIN_COUNT = 4  # how often a word must occur in the training captions to be kept [VSE++ code]
# t-shirt and can't are single words [ours]
WORD = regex.compile(r"[\w\p{M}]+(?:['’-][\w\p{M}]+)*")
START, END, UNKNOWN = range(3)  # before and after each caption, and for words that are not kept
IN_WORDS = {**tasks.IN_WORDS, "chance": "by chance"}


def get_args(argv=None):
    parser = common.Parser(__doc__, FLAGS)
    tasks.add_flags(parser)
    args = parser.parse_args(argv)
    by_data = "small" if args.data.endswith(".jsonl") else "paper"
    args.recipe = args.recipe or ("demo" if args.data == "shapes" else by_data)
    recipe = {name: row[common.RECIPES.index(args.recipe)] for name, row in FLAGS.items()}
    tasks.fill_defaults(parser, args, "retrieval", **recipe)
    return args


def main(args):
    device = tasks.begin(args)
    train = captioned_photos(args, args.train_split, args.train_images)
    held_out = min(HELD_OUT, math.ceil(len(train) / 10))
    val = train.select(np.arange(held_out))
    train = train.select(np.arange(held_out, len(train)))
    test = captioned_photos(args, args.val_split, args.test_images)
    eval_linear.report_shared(train, test)
    frequencies = Counter(words_of(train.all_captions())).most_common()
    kept = [word for word, count in frequencies if count >= MIN_COUNT]
    vocabulary = {word: i for i, word in enumerate(kept, UNKNOWN + 1)}
    words = words_of(test.all_captions())
    unknown = sum(word not in vocabulary for word in words)
    counts = f"{len(train)} training, {len(val)} validation and {len(test)} test photos"
    print_main(f"{counts}, {len(vocabulary)} words, which lack {unknown} of the test captions' "
               f"{len(words)}")

    runs = defaultdict(list)
    for name, seeds, backbone in tasks.backbones(args, device):
        train_x = None  # or the memory holds two backbones' features: 9 GB each on COCO
        train_data, train_x = crop_features(backbone, train, args, device)
        val_data, val_x = tasks.central_features(backbone, val, args, device)
        test_data, test_x = tasks.central_features(backbone, test, args, device)
        given = train_data, train_x, val_data, val_x, vocabulary, args, device
        owners = image_of_caption(test_data)
        for seed in seeds:
            model = train_encoders(*given, seed)
            similarity = compare(model, test_data, test_x)  # (N photos, M captions)
            runs[name].append(fold_scores(similarity, owners, args.folds))
    for _ in runs["random"]:
        chance = torch.rand_like(similarity)
        runs["chance"].append(fold_scores(chance, owners, args.folds))
    tasks.report(runs, args, "retrieval on", "text to image R@10", IN_WORDS)


def captioned_photos(args, split, max_photos):
    """At most `max_photos` random captioned photos of a split -> CaptionData"""
    [data] = common.caption_data(args.data, args.root, [split])
    data = data.captioned()
    order = np.random.default_rng(args.seed).permutation(len(data))
    return data.select(order[:max_photos])


def image_of_caption(data):
    """-> (M,), the photo's index of each of M captions"""
    return np.repeat(np.arange(len(data)), [*map(len, data.captions)])


class RandomCrops(eval_linear.CentralSquares):
    """A random crop of each of N photos, then another of each, flipped, and so on"""

    def __init__(self, data, args):
        super().__init__(data, args.image_size)
        self.args = args

    def __len__(self):
        return self.args.crops * len(self.data)

    def __getitem__(self, i):
        n, photo = divmod(i, len(self.data))
        rng = np.random.default_rng([self.args.seed, i])
        self.crop = partial(common.random_crop, rng, self.args.crop_min)
        image, readable = super().__getitem__(photo)
        return (image[:, ::-1].copy() if n % 2 else image), readable


def crop_features(backbone, data, args, device):
    """-> CaptionData of the photos that can be decoded; features (crops, N, channels) of their
    RandomCrops
    """
    features_of = partial(eval_linear.pooled, backbone, amp=args.amp)
    crops = RandomCrops(data, args)
    features, readable = eval_linear.run_over_photos(features_of, crops, args, device)
    readable = readable[: len(readable) // args.crops]  # of the first round; all are alike
    return data.select(readable), features.view(args.crops, len(readable), -1)


def words_of(captions):
    return WORD.findall("\n".join(captions).lower())


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
        ids = [self.vocabulary.get(word, UNKNOWN) for word in words_of([caption])]
        return [START, *ids, END]


def vse_loss(images, captions, image_idx, negatives="hardest"):
    """The hinge loss on the hardest negative of the batch, in both directions [VSE++] -> scalar

        sum over pairs (i, c) of  max_c' [MARGIN - s(i, c) + s(i, c')]+
                                + max_i' [MARGIN - s(i, c) + s(i', c)]+

    images, captions: (B, dim) unit vectors, s their product.  image_idx: (B,), the photo of each
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
    all_captions, owners = data.all_captions(), image_of_caption(data)
    best_recalls = -1.0
    bar = progress(range(2 * args.epochs), desc="retrieval", unit=" epochs")
    for epoch in bar:
        common.set_lr(optimizer, 1.0 if epoch < args.epochs else 0.1)
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(owners))
        for batch in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            crop = rng.integers(len(features), size=len(batch))
            images = model.encode_images(features[crop, owners[batch]].to(device))
            captions = [all_captions[i] for i in batch]
            for n in np.flatnonzero(crop % 2):
                captions[n] = common.swap_left_right(captions[n])
            captions = model.encode_captions(captions)
            image_idx = torch.from_numpy(owners[batch]).to(device)
            loss = vse_loss(images, captions, image_idx, args.negatives)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        if not loss.isfinite():
            fail(f"the loss is not finite in epoch {epoch + 1}: try a lower --lr")
        scores = fold_scores(compare(model, val_data, val_features), image_of_caption(val_data))
        recalls = sum(scores[name] for name in scores if "R@" in name)
        shown = {"loss": f"{loss.item() / len(batch):.3f}", "recalls": f"{recalls:.1f}"}
        bar.set_postfix(shown, refresh=False)
        if recalls > best_recalls:
            best_recalls = recalls
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return model


@torch.no_grad()
def compare(model, data, features):
    """The similarity of each photo with each caption -> (N, M) on the CPU"""
    images = model.encode_images(features.to(model.image.weight.device))
    columns = []
    captions = data.all_captions()
    for first in range(0, len(captions), 256):
        part = model.encode_captions(captions[first : first + 256])
        columns.append((images @ part.T).cpu())
    return torch.cat(columns, 1)


def fold_scores(similarity, image_of_caption, folds=1):
    """The photos, in their order, in folds of equal size -> {"image to text R@1": mean, ...}

    Scores are those of mmcontrastive.retrieval_scores.  similarity: (N, M).  image_of_caption: (M,)
    """
    size = len(similarity) // folds
    scores_of_folds = []
    for first in range(0, folds * size, size):
        inside = (image_of_caption >= first) & (image_of_caption < first + size)
        owners = torch.from_numpy(image_of_caption[inside] - first)
        fold = similarity[first : first + size, inside]
        of_ways = mmcontrastive.retrieval_scores(fold, owners)
        scores = {f"{way} {name}": x for way, found in of_ways.items() for name, x in found.items()}
        scores_of_folds.append(scores)
    return eval_linear.over_runs(scores_of_folds)["mean"]


if __name__ == "__main__":
    main(get_args())
