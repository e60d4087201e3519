"""What a backbone is worth: labelled images, features of a frozen backbone, one linear SVM per class.

    labelled images    LabelData, label_data (shapes, coco, voc07, folder), label_from_tags
    the probe          extract_features, svm_probe, probe_scores
    in a training run  probe_data, select_probe and keep_best (early stopping), final_probe

The training scripts end with it; eval_linear.py is the same by itself, with more protocols.
"""

import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

import common
from common import ImageFiles, fail, progress, say

# ------------------------------------------------------------------------------------------ labelled images


class LabelData(NamedTuple):
    """Images with class labels, for probes. labels: (N, classes) int8 with 1 yes, 0 no, -1 "difficult" (VOC)."""

    images: object
    labels: np.ndarray
    names: list

    def select(self, keep):
        return LabelData(type(self.images)(self.images[i] for i in keep), self.labels[keep], self.names)


def label_data(name, root=None, split="train"):
    """Load one split of a labelled data set -> LabelData. name: "shapes", "coco", "voc07" or "folder"."""
    if name == "shapes":
        data = label_from_tags(common.built_in_shapes(split))
    elif name == "coco":
        present, names, paths = common.coco_instances(root or "datasets/coco", split)
        data = LabelData(ImageFiles(paths[i] for i in present), multi_hot(present.values(), len(names)), names)
    elif name == "voc07":
        data = voc07_labels(root or "datasets/voc07", split)
    elif name == "folder":
        data = folder_labels(root or "datasets/folder", split)
    else:
        fail(f"the labelled data set {name} is unknown: give shapes, coco, voc07 or folder")
    if isinstance(data.images, ImageFiles):
        data.images.check()
    return data


def multi_hot(groups, size):
    labels = np.zeros((len(groups), size), np.int8)
    for row, group in zip(labels, groups):
        row[list(group)] = 1
    return labels


def label_from_tags(data):
    return LabelData(data.images, multi_hot([data.tags_of(i) for i in range(len(data))], len(data.tag_names)), data.tag_names)


def voc07_labels(root, split):
    """PASCAL VOC: ImageSets/Main/{class}_{split}.txt with 1, -1 and 0 for "difficult"; JPEGImages/{image}.jpg."""
    for folder in (root, os.path.join(root, "VOC2007"), os.path.join(root, "VOCdevkit", "VOC2007")):
        if os.path.isdir(os.path.join(folder, "ImageSets", "Main")):
            break
    else:
        fail(f"{root} holds no VOCdevkit/VOC2007/ImageSets/Main: give --root the folder that holds VOCdevkit")
    lists = sorted(Path(folder, "ImageSets", "Main").glob(f"*_{split}.txt"))
    if not lists:
        fail(f"{folder}/ImageSets/Main holds no <class>_{split}.txt: is the split {split} part of this download?")
    labels, ids = [], None
    for path in lists:
        rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
        for n, row in enumerate(rows, 1):
            if len(row) != 2 or row[1] not in ("1", "-1", "0"):
                fail(f"{path}, line {n}: expected an image name and 1, -1 or 0")
        if ids is None:
            ids = [row[0] for row in rows]
        if ids != [row[0] for row in rows]:
            fail(f"{path} lists other images than {lists[0]}")
        labels.append([{"1": 1, "-1": 0, "0": -1}[row[1]] for row in rows])
    images = ImageFiles(os.path.join(folder, "JPEGImages", f"{i}.jpg") for i in ids)
    return LabelData(images, np.array(labels, np.int8).T, [path.name[: -len(f"_{split}.txt")] for path in lists])


def folder_labels(root, split):
    """{split}/<class>/<image>: the layout of ImageNet, Places, iNaturalist and torchvision's ImageFolder."""
    if not os.path.isdir(os.path.join(root, split)):
        fail(f"{root}/{split} not found: an image folder holds {split}/<class>/<image>; name the splits with --train-split and --val-split")
    names = sorted(entry.name for entry in os.scandir(os.path.join(root, split)) if entry.is_dir())
    images, classes = ImageFiles(), []
    for k, name in enumerate(progress(names, desc="image folder", unit=" classes", leave=False)):
        for path in sorted(Path(root, split, name).rglob("*")):
            if path.suffix.lower() in Image.registered_extensions():
                images.append(str(path))
                classes.append([k])
    if not classes:
        fail(f"{root}/{split} holds no image: expected {split}/<class>/<image>")
    return LabelData(images, multi_hot(classes, len(names)), names)


# ------------------------------------------------------------------------------------------ the probe

@torch.no_grad()
def extract_features(backbone, data, size, device, amp="off", workers=0, desc="features"):
    """Global average pooled features of a LabelData in eval mode -> (N, channels) float32, (N, classes) labels.

    Images that cannot be decoded are named and left out.
    """
    training, features, readable = backbone.training, [], []
    loader = DataLoader(common.CropView(data.images, size), 64, num_workers=workers, worker_init_fn=common.ignore_signals)
    backbone.eval()
    for pixels, good in progress(loader, desc=desc, unit=" batches", leave=False):
        with common.autocast(device, amp):
            features.append(backbone(common.augment(pixels.to(device))).float().mean((2, 3)).cpu())
        readable.append(good)
    backbone.train(training)
    readable = torch.cat(readable).numpy()
    if not readable.any():
        fail(f"none of the {len(readable)} images can be decoded, the first is {data.images[0]}")
    for i in np.flatnonzero(~readable):
        say(f"cannot decode {data.images[i]}: left out of the probe")
    return torch.cat(features).numpy()[readable], data.labels[readable]


def svm_probe(train_x, train_y, test_x, test_y, names, seed=0):
    """One linear SVM per class on l2-normalised features [VirTex App. A.1] -> {class: average precision in percent}

    Squared hinge, positives weighted 2, C in {0.01, 0.1, 1, 10} by 3-fold cross-validation. train_y, test_y:
    (N, classes) with 1, 0 and -1 for VOC's "difficult": negatives in training, left out in testing [official code].
    A class with fewer than three examples on one side cannot be cross-validated and takes C = 1; one without any
    example on one side, in training or testing, has no score and is left out.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import average_precision_score
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import LinearSVC

    train_x, test_x = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (train_x.astype(np.float64), test_x.astype(np.float64)))

    def average_precision(k):
        target, counted = train_y[:, k] == 1, test_y[:, k] >= 0
        truth = test_y[counted, k] == 1
        if not (0 < target.sum() < len(target) and truth.any()):
            return None

        def svm(cost):
            return LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000, tol=1e-4, dual=True, random_state=seed)

        y, cost = target.astype(int), 1.0
        if min(y.sum(), len(y) - y.sum()) >= 3:
            cost = max((0.01, 0.1, 1.0, 10.0), key=lambda c: cross_val_score(svm(c), train_x, y, cv=3, scoring="average_precision").mean())
        return 100 * average_precision_score(truth, svm(cost).fit(train_x, y).decision_function(test_x[counted]))

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:  # liblinear works outside the interpreter's lock
        warnings.simplefilter("ignore", ConvergenceWarning)  # 2000 iterations are the protocol, converged or not
        scores = list(progress(pool.map(average_precision, range(len(names))), total=len(names), desc="SVMs", unit=" classes", leave=False))
    return {name: score for name, score in zip(names, scores) if score is not None}


def probe_data(args, train, val):
    """The labelled images a training script probes on -> (name, train LabelData, test LabelData) or None.

    `--probe-data` when given, otherwise the tags of its own captioned data.
    """
    if args.probe_data:
        name = args.probe_data
        fit, test = (label_data(name, args.probe_root, split) for split in common.LABEL_SPLITS[name])
    elif train.tag_names and val.tag_names == train.tag_names:
        name, fit, test = os.path.basename(args.data), label_from_tags(train), label_from_tags(val)
    elif args.probe_every:
        fail(f"--probe-every needs labels and {args.data} has no tags: add --probe-data and --probe-root")
    else:
        return None
    keep = np.sort(np.random.default_rng(args.seed).permutation(len(fit.images))[: args.probe_images])
    fit = fit.select(keep)
    if not ((fit.labels == 1).any(0) & (fit.labels != 1).any(0) & (test.labels == 1).any(0)).any():
        (fail if args.probe_every else say)(f"no class of {name} has examples in both splits: nothing to probe on")
        return None
    return name, fit, test


def probe_scores(backbone, fit, test, args, device, desc, seed=0):
    """SVMs trained on the features of `fit` and tested on `test` (LabelData) -> {class: average precision, "mAP": their mean}"""
    (fit_x, fit_y), (test_x, test_y) = (
        extract_features(backbone, data, args.image_size, device, args.amp, args.workers, desc) for data in (fit, test)
    )
    scores = svm_probe(fit_x, fit_y, test_x, test_y, fit.names, seed)
    return {**scores, "mAP": float(np.mean(list(scores.values()))) if scores else math.nan}


def select_probe(backbone, labelled, args, device):
    """The probe for early stopping [VirTex Sec. 3]: never on test images, but on a fifth of the probe's training images."""
    _, fit, _ = labelled
    order = np.random.default_rng(args.seed).permutation(len(fit.images))
    held_out = len(order) // 5
    return probe_scores(backbone, fit.select(order[held_out:]), fit.select(order[:held_out]), args, device, "early stopping")["mAP"]


def keep_best(run, iteration, backbone, labelled, best, device):
    """Early stopping: probe, and keep the backbone as backbone_best.pth when it is better than `best`

    -> the best so far, {"iteration", "score"} (None at first)
    """
    score = select_probe(backbone, labelled, run.args, device)
    say(f"iteration {iteration}: probe on held-out training images {score:.2f} mAP")
    if best is None or score > best["score"]:
        best = {"iteration": iteration, "score": score}
        run.save_weights("backbone_best.pth", backbone.state_dict())
    return best


def final_probe(run, backbone, labelled, best, device):
    """{"probe": ...} of result.json: the trained backbone, the same at random initialisation, and the best of early stopping.

    Without labels nothing, and the command that measures.
    """
    if not labelled:
        say(f"no labels to probe on: measure with python eval_linear.py --weights {run.folder}/backbone.pth --data folder --root FOLDER")
        return {}
    args, (name, fit, test) = run.args, labelled

    def score(backbone, which):
        return round(probe_scores(backbone, fit, test, args, device, f"features, {which}")["mAP"], 2)

    torch.manual_seed(args.seed)
    other = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    result = {"data": name, "metric": "mAP", "trained": score(backbone, "trained"), "random": score(other, "random")}
    if best:
        other.load_state_dict(common.read_checkpoint(run.folder / "backbone_best.pth"))
        result["best"] = {**best, "trained": score(other, "best")}
    say("linear probe on {data}: {trained:.1f} mAP trained, {random:.1f} mAP at random initialisation".format(**result))
    return {"probe": result}
