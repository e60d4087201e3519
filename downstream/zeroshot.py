"""Zero-shot classification: attributes lead from photos to classes that no photo was trained on.

Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. ECCV 2020,
App. C, Tab. 6.

Every class has a vector of attributes: for a bird the colour of its bill, for an animal whether it
swims. A bilinear function of frozen features and attributes says how well a photo and a class go
together (Eq. 9). It is learned from photos of the seen classes (Eqs. 11, 12). Test photos are of
seen and of unseen classes, and one of all classes is predicted for each (Eq. 10).

    built-in scenes    python -m downstream.zeroshot
    CUB-200-2011       python -m downstream.zeroshot --weights FILE --data cub --root FOLDER
    AWA2               python -m downstream.zeroshot --weights FILE --data awa2 --root FOLDER

FOLDER holds the published archives, unpacked: the photos, and the proposed splits of Xian et al.
(Zero-shot learning: a comprehensive evaluation of the good, the bad and the ugly. PAMI 2018):

    CUB_200_2011/images/<class>/*.jpg                      for --data cub
    Animals_with_Attributes2/JPEGImages/<class>/*.jpg      for --data awa2
    xlsa17/data/{CUB,AWA2}/att_splits.mat and res101.mat   of the latter only the file names

In the built-in scenes a class is a shape in a colour, as "red star"; two colours of each shape are
unseen. (The backbone may have met them in its own training.)

VGG-16 is measured after each of its last three convolutions as in the paper, a ResNet at its end.
App. C does not tell how the function is trained: the table below does. Scores are means over
--runs. "top-1" is the share of all test photos that are right; Tab. 6 does not say whether it is
that or a mean over classes. "seen" and "unseen" are means over the classes of each kind, and the
harmonic mean is of these two [Xian et al.]. unseen.png shows predictions for unseen classes.
"""

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common
import eval_linear
from common import check, say

DEFAULTS = {"runs": 5, "epochs": 100, "batch_size": 256}  # runs: Tab. 6; ours: as in `layers`
RATES = 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0  # learning rates [ours; the range is App. F.2's]
LAYOUTS = {  # the folders of the splits and of the photos
    "cub": ("xlsa17/data/CUB", "CUB_200_2011/images"),
    "awa2": ("xlsa17/data/AWA2", "Animals_with_Attributes2/JPEGImages"),
}
SCENES = {"train": 2700, "val": 1000}  # of shapes, those with one object among the first so many
TRAIN, SEEN, UNSEEN = range(3)  # parts of the data: training, and test images of both kinds
LOCATIONS = "trainval_loc", "test_seen_loc", "test_unseen_loc"  # their names in att_splits.mat


def get_args(argv=None):
    parser = eval_linear.flag_parser("zeroshot", __doc__, ("shapes", *LAYOUTS))
    add = parser.add_argument
    add("--epochs", type=common.count, help="passes over the training images")
    add("--batch-size", type=common.dim, help="images per iteration")
    parser.set_defaults(**DEFAULTS)
    args = eval_linear.parse(parser, argv)
    if (args.train_split, args.val_split) != ("train", "val"):
        parser.error("--train-split and --val-split do not go with zeroshot: leave them out")
    return args


def main(args):
    world = common.start()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    arch = eval_linear.load_backbone(args.weights, args.arch, args.seed).arch
    check(arch != "vgg16" or args.image_size >= 48, "VGG-16 needs --image-size 48 or more")
    data = shape_pairs() if args.data == "shapes" else published_data(args.data, args.root)
    train, seen, unseen = np.bincount(data.parts)
    say(f"{train} images to learn from; to test, {seen} of seen and {unseen} of unseen classes")

    results = {} if args.weights == "random" else {"trained": []}
    for name in (*results, "random"):
        weights, results[name] = args.weights if name == "trained" else "random", []
        for seed in range(args.seed, args.seed + args.runs):
            if weights == "random" or not results[name]:  # an initialisation for each run
                layers, kept = layer_features(weights, arch, seed, data, args, world)
            scores = {}
            for layer, x in layers.items():
                predicted = predict_classes(x, kept, args, world.device, seed)
                for metric, score in accuracies(predicted, kept).items():
                    scores[f"{layer} {metric}".strip()] = score
                if name == next(iter(results)) and seed == args.seed:  # the last layer at the end
                    draw_predictions(f"{args.output}/unseen.png", kept, predicted)
            results[name].append(scores)
    common.end_processes(world)
    if world.is_main:
        report(results, args, len(data.names))


def report(results, args, num_classes):
    """results: {"trained" or "random": [{metric: percent} of each run]}; writes result.json"""
    found, guess = {}, 100 / num_classes
    for name, runs in results.items():
        found[name] = eval_linear.over_runs(runs)
        for metric, mean in found[name]["mean"].items():
            say(f"{name:8} {metric:18} {mean:6.2f} ± {found[name]['std'][metric]:.2f}")
    common.write_json(f"{args.output}/result.json", {"args": vars(args), "guess": guess, **found})
    metric = [name for name in found["random"]["mean"] if "top-1" in name][-1]  # of the last layer
    words = eval_linear.IN_WORDS
    scores = ", ".join(f"{found[name]['mean'][metric]:.1f} {words[name]}" for name in results)
    say(f"zero-shot on {args.data}: {metric} {scores}, {guess:.1f} by guessing among "
        f"{num_classes} classes")  # fmt: skip


# ------------------------------------------------------------------------------------------ data


class ZeroShotData(NamedTuple):
    """Images of seen and unseen classes, and the attributes of all classes."""

    images: object  # common.ImageFiles or shapes.ShapeImages
    classes: np.ndarray  # (N,) from 0
    parts: np.ndarray  # (N,) TRAIN, SEEN or UNSEEN
    attributes: np.ndarray  # (classes, n)
    names: list

    def select(self, keep):
        """The images with these indices."""
        images = type(self.images)(self.images[i] for i in keep)
        return self._replace(images=images, classes=self.classes[keep], parts=self.parts[keep])


def shape_pairs():
    """The built-in scenes with one object: its shape and colour are the attributes [ours]"""
    import shapes

    colours = list(shapes.COLOURS)
    pairs = list(itertools.product(range(len(shapes.SHAPES)), range(len(colours))))
    images, classes, parts = shapes.ShapeImages(), [], []
    for split, number in SCENES.items():
        for scene in shapes.SPLITS[split][:number]:
            first, *others = shapes.objects_of(scene)
            pair = shapes.SHAPES.index(first.shape), colours.index(first.colour)
            part = TRAIN if split == "train" else SEEN
            if sum(pair) % 4 == 0:  # two pairs of each shape, and of each colour
                part = UNSEEN
            if not others and (split == "val" or part == TRAIN):
                images.append(scene)
                classes.append(pairs.index(pair))
                parts.append(part)
    shape, colour = np.eye(len(shapes.SHAPES)), np.eye(len(colours))
    attributes = np.array([[*shape[s], *colour[c]] for s, c in pairs])
    names = [f"{colours[c]} {shapes.SHAPES[s]}" for s, c in pairs]
    return ZeroShotData(images, np.array(classes), np.array(parts), attributes, names)


def published_data(name, root=None):
    """ "cub" or "awa2", with the proposed splits of Xian et al. -> ZeroShotData"""
    root, (splits, photos) = Path(root or f"datasets/{name}"), LAYOUTS[name]
    expected = f"the proposed splits of Xian et al., xlsa17.zip unpacked in {root}"
    path = root / splits / "res101.mat"
    with common.reading(path, expected):
        # Paths on the machine of its authors, ending in <class>/<photo>.
        files, labels = read_mat(path, "image_files", "labels")
        tails = ["/".join(file.split("/")[-2:]) for file in files]
        images = common.ImageFiles(f"{root / photos}/{tail}" for tail in tails)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} image_files, but {len(labels)} labels")
    path = root / splits / "att_splits.mat"
    with common.reading(path, expected):
        names, attributes, *locations = read_mat(path, "allclasses_names", "att", *LOCATIONS)
        if attributes.shape[1:] != (len(names),) or not np.isfinite(attributes).all():
            raise ValueError(f"att must have {len(names)} columns, a class each, of finite numbers")
        classes, parts = from_one(labels, "labels", len(names)), np.full(len(images), -1)
        for part, key in enumerate(LOCATIONS):
            parts[from_one(locations[part], key, len(images))] = part
        if (parts >= 0).sum() != sum(map(len, locations)):
            raise ValueError("an image is in two splits")
        trained, seen, unseen = [set(classes[parts == part]) for part in range(3)]
        if not (trained and seen and unseen) or trained & unseen or not seen <= trained:
            raise ValueError("its unseen classes must have no training images, its seen ones some")
    images.check_files(f"unpack the photos, too: {root / photos}/<class>/*.jpg")
    data = ZeroShotData(images, classes, parts, attributes.T, names.tolist())
    return data.select(np.flatnonzero(parts >= 0))


def read_mat(path, *names):
    """These variables of a MATLAB file; columns and cell arrays of strings become (N,) -> list"""
    from scipy.io import loadmat

    content = loadmat(str(path), squeeze_me=True, variable_names=names)
    return [np.atleast_1d(content[name]) for name in names]


def from_one(numbers, name, size):
    """MATLAB's indices, from 1 to size -> indices from 0"""
    numbers = numbers.astype(np.int64)
    if len(numbers) and not 1 <= numbers.min() <= numbers.max() <= size:
        raise ValueError(f"{name} holds {numbers.min()} to {numbers.max()}, not 1 to {size}")
    return numbers - 1


# ------------------------------------------------------------------------------ the bilinear score


def layer_features(weights, arch, seed, data, args, world):
    """-> {name: (M, D) float32 of unit length [ours]}, and `data` of the M readable images

    After C-11, C-12 and C-13 of VGG-16, each pooled to about 9K numbers [App. C]; of a ResNet
    after the last convolution, named "". {} on all processes but the first.
    """
    backbone = eval_linear.load_backbone(weights, arch, seed)
    backbone.to(world.device, memory_format=torch.channels_last).eval()

    def describe(pixels):
        if arch != "vgg16":
            return eval_linear.pooled(backbone, pixels, world.device, args.amp)
        maps = eval_linear.convolution_features(backbone, pixels, world.device, args.amp)
        return torch.cat(maps, 1)

    how = data.images, args.image_size, world, args.workers
    features, readable = eval_linear.describe_images(describe, *how)
    if not world.is_main:
        return {}, data
    check(np.isfinite(features).all(), "the features are not finite: is --amp fp16 to blame?")
    names = eval_linear.CONVOLUTIONS if arch == "vgg16" else [""]
    parts = np.split(features, len(names), axis=1)
    layers = {name: eval_linear.unit_length(part) for name, part in zip(names, parts)}
    return layers, data.select(readable)


def compatibility(mapped, attributes):
    """Eq. 9: f(x, a) = a'(Σx + b); mapped: (N, n), Σx + b.  attributes: (classes, n)"""
    return mapped @ attributes.T


def predict_classes(x, data, args, device, seed):
    """Learn Σ and b from the training images [Eq. 11] -> a class (N,) for every image [Eq. 10]

    x: (N, D), the features of the images of `data`. SGD with momentum 0.9 and a learning rate that
    falls by a cosine [as App. F.2], the best on a fifth of the training images [ours].
    """
    torch.manual_seed(seed)
    train = np.random.default_rng(seed).permutation(np.flatnonzero(data.parts == TRAIN))
    seen = np.unique(data.classes[data.parts != UNSEEN])
    labels = np.searchsorted(seen, data.classes)  # (N,), right where the class is seen
    attributes = eval_linear.unit_length(data.attributes.astype(np.float32))  # [Xian et al.]
    of_seen = torch.from_numpy(attributes[seen]).to(device)
    cosine, width = functools.partial(common.lr_factor, total=1), attributes.shape[1]

    def loss(mapped, wanted):
        # Eq. 12 is a softmax, [ours] over the seen classes; Eq. 11 its negative logarithm.
        return F.cross_entropy(compatibility(mapped, of_seen), wanted)

    def learn(rows, rates):
        trials = [(rate, eval_linear.LAYERS_DECAY) for rate in rates]
        how = cosine, args.epochs, args.batch_size, device, seed, False, width, loss
        return eval_linear.train_linear(x, labels, rows, trials, *how)

    def predict(layer, rows):
        mapped = eval_linear.predict(layer, x[rows], device)
        return compatibility(mapped, attributes).argmax(1)  # Eq. 10, among all classes

    held, fit = np.split(train, [len(train) // 5])
    right = [(predict(layer, held) == data.classes[held]).mean() for layer in learn(fit, RATES)]
    [layer] = learn(train, [RATES[np.argmax(right)]])
    return predict(layer, np.arange(len(x)))


def accuracies(predicted, data):
    """-> {"top-1": share of the test images, "seen", "unseen": means over classes, "harmonic mean"}

    predicted: (N,) classes.  In percent.
    """
    right, scores = predicted == data.classes, {}
    scores["top-1"] = 100 * float(right[data.parts != TRAIN].mean())
    for name, part in ("seen", SEEN), ("unseen", UNSEEN):
        tested = data.parts == part
        each = [right[tested & (data.classes == k)].mean() for k in np.unique(data.classes[tested])]
        scores[name] = 100 * float(np.mean(each))
    a, b = scores["seen"], scores["unseen"]
    scores["harmonic mean"] = 2 * a * b / (a + b) if a + b else 0.0  # [Xian et al.]
    return scores


def draw_predictions(path, data, predicted, side=128, columns=6, rows=4):
    """Some test images of unseen classes, with the predicted class and below it the true one"""
    unseen = np.random.default_rng(0).permutation(np.flatnonzero(data.parts == UNSEEN))
    cell, font = side + 48, ImageFont.load_default(13)
    sheet = Image.new("RGB", (columns * cell, rows * cell), "white")
    draw = ImageDraw.Draw(sheet)
    for n, i in enumerate(unseen[: columns * rows]):
        x, y = n % columns * cell, n // columns * cell
        [pixels] = common.read_crops(data.images, i, [common.centre_crop(224 / 256)], side)
        sheet.paste(Image.fromarray(pixels), (x + 24, y))
        guess, truth = data.names[predicted[i]], data.names[data.classes[i]]
        words, colour = f"{guess[:22]}\nis {truth[:22]}", "green" if guess == truth else "red"
        draw.text((x + cell / 2, y + side + 3), words, colour, font, "ma", align="center")
    sheet.save(path)


if __name__ == "__main__":
    common.run(main, get_args)
