"""Zero-shot classification: attributes link photos to classes without any training photos.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020,
App. C, Tab. 6.

Every class has a vector of attributes, such as the colour of a bird's bill. A bilinear function of
frozen features and attributes scores how well a photo and a class match (Eq. 9). It is learned from
photos of the seen classes (Eqs. 11, 12). Test photos are of seen and of unseen classes, and each
gets the best-scoring of all classes (Eq. 10).

    built-in scenes    python -m downstream.zeroshot
    CUB-200-2011       python -m downstream.zeroshot --weights FILE --data cub --root FOLDER
    AWA2               python -m downstream.zeroshot --weights FILE --data awa2 --root FOLDER

FOLDER holds the published archives, unpacked: photos, and the proposed splits of Xian et al. 2018:

    CUB_200_2011/images/<class>/*.jpg                      for --data cub
    Animals_with_Attributes2/JPEGImages/<class>/*.jpg      for --data awa2
    xlsa17/data/{CUB,AWA2}/att_splits.mat and res101.mat   the latter for labels, file names

In the built-in scenes a class is a colour and a shape, say "red star"; two colours of each shape
are unseen. VGG-16 is measured after each of its last three convolutions as in the paper, a ResNet
after its last. "top-1" is the accuracy over all test photos, although Tab. 6 may be a mean over
classes. "seen" and "unseen" are means over the classes of each kind [Xian et al.].
"""

import argparse
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
import eval_linear
from common import fail, number, print_main
from downstream import pictures, tasks
from extras import layers, shapes

RATES = 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0  # learning rates [ours; the range is App. F.2's]
LAYOUTS = {  # the folders of the splits and of the photos
    "cub": ("xlsa17/data/CUB", "CUB_200_2011/images"),
    "awa2": ("xlsa17/data/AWA2", "Animals_with_Attributes2/JPEGImages"),
}
SCENES = {"train": 2700, "val": 1000}  # shapes: of this many scenes, those with one object
TRAIN, SEEN, UNSEEN = range(3)  # parts of the data: training photos, and test photos of both kinds
LOCATIONS = "trainval_loc", "test_seen_loc", "test_unseen_loc"  # their names in att_splits.mat


def get_args(argv=None):
    parser = common.Parser(__doc__)
    tasks.add_flags(parser, ("shapes", *LAYOUTS))
    add = parser.add_argument_group("bilinear function").add_argument
    add("--epochs", type=number("int > 0"), default=100, help="passes over the training photos")
    add("--batch-size", type=number("int > 0"), default=256, help="photos per iteration")
    add("--runs", type=number("int > 0"), default=5, help="seeds to average over [Tab. 6]")
    args = parser.parse_args(argv)
    if args.train_split or args.val_split:
        parser.error("zeroshot has splits of its own: leave out --train-split and --val-split")
    tasks.fill_defaults(parser, args, "zeroshot")
    return args


def main(args):
    device = tasks.begin(args)
    data = shape_pairs() if args.data == "shapes" else published_data(args.data, args.root)
    train, seen, unseen = np.bincount(data.parts)
    print_main(f"{train} training photos, {seen} + {unseen} test photos of seen + unseen classes")

    runs = defaultdict(list)
    for name, seeds, backbone in tasks.backbones(args, device):
        features, readable = layer_features(backbone, data, args, device)
        for seed in seeds:
            run = argparse.Namespace(**{**vars(args), "seed": seed})
            scores = {}
            for layer, x in features.items():
                predicted = predict_classes(x, readable, run, device)
                for metric, score in accuracies(predicted, readable).items():
                    scores[f"{layer} {metric}".strip()] = score
            runs[name].append(scores)
    metric = [name for name in scores if "top-1" in name][-1]  # of the last layer
    runs["guessing"] = [{metric: 100 / len(data.names)}]
    in_words = {**tasks.IN_WORDS, "guessing": f"by guessing among {len(data.names)} classes"}
    tasks.report(runs, args, "zero-shot on", metric, in_words)


@dataclass
class ZeroShotData(eval_linear.LabelData):
    """Photos of seen and unseen classes, one label each"""

    parts: np.ndarray = None  # (N,) TRAIN, SEEN or UNSEEN
    attributes: np.ndarray = None  # (classes, n), of all classes

    def select(self, keep):
        images, labels, parts = self.images[keep], self.labels[keep], self.parts[keep]
        return replace(self, images=images, labels=labels, parts=parts)


def shape_pairs():
    """The built-in scenes with one object: its shape and colour are the attributes [ours]"""
    colours = list(shapes.COLOURS)
    pairs = list(itertools.product(shapes.SHAPES, colours))
    scenes, labels, parts = [], [], []
    for split, num_scenes in SCENES.items():
        for scene in shapes.SPLITS[split][:num_scenes]:
            first, *others = shapes.objects_of(scene)
            place = shapes.SHAPES.index(first.shape) + colours.index(first.colour)
            unseen = place % 4 == 0  # two pairs of each shape, and of each colour
            if others or (unseen and split == "train"):
                continue
            scenes.append(scene)
            labels.append(pairs.index((first.shape, first.colour)))
            parts.append(UNSEEN if unseen else TRAIN if split == "train" else SEEN)
    words = [*shapes.SHAPES, *colours]
    attributes = np.array([[float(word in pair) for word in words] for pair in pairs])
    names = [f"{colour} {shape}" for shape, colour in pairs]
    images = np.array(scenes, object)
    labels, parts = np.array(labels), np.array(parts)
    return ZeroShotData(images, labels, names, shapes.draw, parts, attributes)


def published_data(name, root=None):
    """ "cub" or "awa2", with the proposed splits of Xian et al. -> ZeroShotData"""
    root = Path(root or f"datasets/{name}")
    splits, photos = LAYOUTS[name]
    res101 = read_mat(root / splits / "res101.mat")
    att_splits = read_mat(root / splits / "att_splits.mat")
    paths = []
    for file in res101["image_files"]:  # a path on its authors' machine: .../<class>/<photo>
        folder, photo = file.split("/")[-2:]
        paths.append(str(root / photos / folder / photo))
    parts = np.full(len(paths), -1)
    for part, location in enumerate(LOCATIONS):
        parts[att_splits[location].astype(int) - 1] = part
    images = pictures.photo_files(paths).images
    labels = res101["labels"].astype(int) - 1  # MATLAB counts from 1
    names, attributes = att_splits["allclasses_names"].tolist(), att_splits["att"].T
    data = ZeroShotData(images, labels, names, parts=parts, attributes=attributes)
    return data.select(np.flatnonzero(parts >= 0))


def read_mat(path):
    """A MATLAB file -> {variable: array}; columns and cell arrays of strings become (N,)"""
    from scipy.io import loadmat

    if not path.is_file():
        fail(f"there is no {path}: --root is the folder where you unpacked xlsa17.zip")
    variables = "image_files", "labels", "allclasses_names", "att", *LOCATIONS
    content = loadmat(str(path), squeeze_me=True, variable_names=variables)
    return {name: np.atleast_1d(value) for name, value in content.items()}


def layer_features(backbone, data, args, device):
    """-> {name: (M, D), l2-normalised [ours]}, and `data` of the M photos that can be decoded

    After C-11, C-12 and C-13 of VGG-16, each pooled to about 9K numbers [App. C]; of a ResNet
    after the last convolution, named "".
    """
    names, function = [""], eval_linear.pooled
    if backbone.arch == "vgg16_bn":
        names = layers.CONVOLUTIONS
        function = lambda trunk, images, amp: torch.cat(layers.convolutions(trunk, images, amp), 1)
    data, features = tasks.central_features(backbone, data, args, device, function)
    parts = features.chunk(len(names), 1)
    return {name: F.normalize(part) for name, part in zip(names, parts)}, data


def predict_classes(x, data, args, device):
    """Learn Σ and b from the training photos [Eq. 11] -> a class (N,) for every photo [Eq. 10]

    x: (N, D), the features of the photos of `data`. SGD with momentum 0.9 and a cosine schedule [as
    App. F.2]; the learning rate is the best of RATES on a fifth of the training photos [ours].
    """
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    train = rng.permutation(np.flatnonzero(data.parts == TRAIN))
    seen = np.unique(data.labels[data.parts != UNSEEN])
    labels = np.searchsorted(seen, data.labels)  # (N,), valid where the class is seen
    attributes = F.normalize(torch.from_numpy(data.attributes).float())  # [Xian et al.]
    seen_attributes = attributes[seen].to(device)
    train_x, train_y = x.to(device), torch.from_numpy(labels).to(device)

    def loss_fn(mapped, targets):  # mapped: Σx + b (N, n); Eq. 9: f(x, a) = a'(Σx + b)
        # Eq. 12 is a softmax, [ours] over the seen classes; Eq. 11 its negative logarithm.
        return F.cross_entropy(mapped @ seen_attributes.T, targets)

    def learn(rows, rates):
        trials = [(rate, layers.DECAY) for rate in rates]  # the decay [ours]
        given = train_x, train_y, rows, trials, partial(common.lr_factor, total=1), args
        return layers.train_linear(*given, width=attributes.shape[1], loss_fn=loss_fn)

    def predict(layer, rows):
        scores = layers.predict(layer, x[rows]) @ attributes.T  # Eq. 9, (rows, classes)
        return scores.argmax(1).numpy()  # Eq. 10, among all classes

    held_out, rest = np.split(train, [len(train) // 5])
    targets = data.labels[held_out]
    scores = [(predict(layer, held_out) == targets).mean() for layer in learn(rest, RATES)]
    [layer] = learn(train, [RATES[np.argmax(scores)]])
    return predict(layer, np.arange(len(x)))


def accuracies(predicted, data):
    """-> {"top-1": of the test photos, "seen", "unseen": means over classes, "harmonic mean"}

    predicted: (N,) classes.  In percent.
    """
    correct = predicted == data.labels
    scores = {"top-1": 100 * float(correct[data.parts != TRAIN].mean())}
    for name, part in ("seen", SEEN), ("unseen", UNSEEN):
        tested = data.parts == part
        classes = np.unique(data.labels[tested])
        per_class = [correct[tested & (data.labels == k)].mean() for k in classes]
        scores[name] = 100 * float(np.mean(per_class))
    a, b = scores["seen"], scores["unseen"]
    scores["harmonic mean"] = 2 * a * b / (a + b) if a + b else 0.0  # [Xian et al.]
    return scores


if __name__ == "__main__":
    main(get_args())
