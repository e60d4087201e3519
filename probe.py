"""What a backbone is worth: labelled images, features of a frozen backbone, one linear SVM per class.

    labelled images    LabelData, label_data (shapes, coco, voc07, folder), label_from_tags
    features           pooled, describe_images, extract_features
    SVMs               svm_probe; liblinear_svms, and torch_svms with solve_svms: all classes, costs and folds at once
    in a training run  probe_data, probe_scores, select_probe and keep_best (early stopping), final_probe

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
import torch.distributed as dist
import torch.nn.functional as F
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
    names = sorted(entry.name for entry in os.scandir(os.path.join(root, split)) if entry.is_dir() and not entry.name.startswith("."))  # .ipynb_checkpoints is no class
    images, classes = ImageFiles(), []
    for k, name in enumerate(progress(names, desc="image folder", unit=" classes", leave=False)):
        for path in sorted(Path(root, split, name).rglob("*")):
            if path.suffix.lower() in Image.registered_extensions():
                images.append(str(path))
                classes.append([k])
    if not classes:
        fail(f"{root}/{split} holds no image: expected {split}/<class>/<image>")
    return LabelData(images, multi_hot(classes, len(names)), names)


# ------------------------------------------------------------------------------------------ features


def pooled(backbone, images, device, amp="off", cells=1):
    """uint8 images (B, size, size, 3) -> average over each of cells x cells parts of the maps, (B, channels * cells^2) float32"""
    with torch.no_grad(), common.autocast(device, amp):
        maps = backbone(common.augment(images.to(device, non_blocking=True)))
    return F.adaptive_avg_pool2d(maps.float(), cells).flatten(1)


def describe_images(describe, data, size, workers=0, desc="features", part=224 / 256, world=None):
    """describe(uint8 images (B, size, size, 3)) -> (B, D) of the central square of every image of a LabelData.

    -> (N, D) float32, (N, classes) labels on the first process, in the order of `data`; (None, None) on the others, which
    have done their shares. part: see CropView. Images that cannot be decoded are named and left out.
    """
    rank, processes, count = *((world.rank, world.size) if world else (0, 1)), len(data.images)
    share = [i % count for i in range(rank, math.ceil(count / processes) * processes, processes)]  # alike in length: the last may repeat
    loader = DataLoader(common.CropView(data.images, size, part), 64, sampler=share, num_workers=workers, worker_init_fn=common.ignore_signals)
    rows = []
    for images, good in progress(loader, desc=desc, unit=" batches", leave=False):
        rows.append(torch.cat([describe(images).float().cpu(), good[:, None].float()], 1))
    rows = torch.cat(rows)
    if processes > 1:
        parts = [torch.empty_like(rows) for _ in range(processes)] if rank == 0 else None
        dist.gather(rows, parts)
        if rank:
            return None, None
        rows = torch.stack(parts, 1).flatten(0, 1)[:count]
    rows, readable = rows[:, :-1].numpy(), rows[:, -1].numpy() > 0
    if not readable.any():
        fail(f"none of the {count} images can be decoded, the first is {data.images[0]}")
    for i in np.flatnonzero(~readable):
        say(f"cannot decode {data.images[i]}: left out of the probe")
    return rows[readable], data.labels[readable]


def extract_features(backbone, data, size, device, amp="off", workers=0, desc="features", part=224 / 256, cells=1, world=None):
    """Pooled features of a LabelData in eval mode -> what describe_images gives"""
    training = backbone.training
    backbone.eval()
    features, labels = describe_images(lambda images: pooled(backbone, images, device, amp, cells), data, size, workers, desc, part, world)
    backbone.train(training)
    if features is not None and not np.isfinite(features).all():
        fail("the features are not finite: has the training of the backbone diverged? With --amp fp16 try --amp off", everywhere=False)
    return features, labels


# ------------------------------------------------------------------------------------------ support vector machines

COSTS = (0.01, 0.1, 1.0, 10.0)  # [VirTex App. A.1]
CHUNK = 2**25  # numbers in a matrix of images x SVMs that are solved together: 256 MB


def svm_probe(train_x, train_y, test_x, test_y, names, seed=0, costs=COSTS, solver="torch", device="cpu"):
    """One linear SVM per class [VirTex App. A.1] on l2-normalised features [official code] -> {class: average precision in percent}

    Squared hinge, positives weighted 2, C out of `costs` (rising) by the average precision of 3-fold cross-validation. train_y, test_y:
    (N, classes) with 1, 0 and -1 for VOC's "difficult": negatives in training, left out in testing [official code].
    A class with fewer than three examples on one side cannot be cross-validated and takes C = 1; one without any
    example on one side, in training or testing, has no score and is left out.
    solver: "torch" for all SVMs at once on `device`, "liblinear" for scikit-learn's LinearSVC one by one.
    """
    train_x, test_x = unit_length(train_x.astype(np.float64)), unit_length(test_x.astype(np.float64))
    positive = train_y == 1
    kept = np.flatnonzero(positive.any(0) & ~positive.all(0) & (test_y == 1).any(0))
    if not len(kept):
        return {}
    positive, names = positive[:, kept], [names[k] for k in kept]
    if solver == "torch":
        decisions = torch_svms(train_x, positive, test_x, costs, device)
    else:
        decisions = liblinear_svms(train_x, positive, test_x, costs, seed)
    return average_precisions(decisions, test_y[:, kept], names)


def unit_length(x):
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def average_precisions(decisions, labels, names):
    """(N, classes) decision values and labels, -1 not counted -> {class: average precision in percent}, of classes with a positive

    Average precision is the area under all steps of the curve, not VOC07's mean over eleven recalls.
    """
    from sklearn.metrics import average_precision_score

    counted = labels >= 0
    return {
        name: 100 * float(average_precision_score(labels[counted[:, k], k], decisions[counted[:, k], k]))
        for k, name in enumerate(names) if (labels[:, k] == 1).any()
    }  # fmt: skip


def can_cross_validate(positive):
    """(N, classes) -> (classes,): three examples or more on both sides, one for each fold"""
    return np.minimum(positive.sum(0), (~positive).sum(0)) >= 3


def liblinear_svms(train_x, positive, test_x, costs, seed):
    """(N, D) float64 features, (N, classes) bool, (T, D) -> (T, classes) decision values, by scikit-learn's LinearSVC"""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import LinearSVC

    def svm(cost):
        return LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000, tol=1e-4, dual=True, random_state=seed)

    def decide(y, validated):
        cost = max(costs, key=lambda c: cross_val_score(svm(c), train_x, y, cv=3, scoring="average_precision").mean()) if validated else 1.0
        return svm(cost).fit(train_x, y).decision_function(test_x)

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:  # liblinear works outside the interpreter's lock
        warnings.simplefilter("ignore", ConvergenceWarning)  # 2000 iterations are the protocol, converged or not
        decisions = pool.map(decide, positive.T.astype(int), can_cross_validate(positive))
        return np.stack(list(progress(decisions, total=positive.shape[1], desc="SVMs", unit=" classes", leave=False)), 1)


def torch_svms(train_x, positive, test_x, costs, device="cpu"):
    """What liblinear_svms gives, up to its tolerance, in a fraction of the time: the SVMs of all classes and folds are solved together."""
    from sklearn.metrics import average_precision_score
    from sklearn.model_selection import StratifiedKFold

    # The bias is the weight of a constant feature and regularised like the others, as in LIBLINEAR.
    train, test = (torch.from_numpy(np.pad(x, ((0, 0), (0, 1)), constant_values=1)).to(device) for x in (train_x, test_x))
    basis = principal_axes(train)
    train, test, side = train @ basis, test @ basis, torch.from_numpy(positive).to(device)
    chosen = np.ones(positive.shape[1])
    validated = np.flatnonzero(can_cross_validate(positive))
    for classes in np.array_split(validated, 1 + 3 * len(train) * len(validated) // CHUNK):
        # One column per class and fold: images that the fold holds out cost nothing.
        folds = [(k, held) for k in classes for _, held in StratifiedKFold(3).split(train_x, positive[:, k])]
        mask = torch.ones(len(train), len(folds), dtype=torch.float64, device=device)
        for column, (_, held) in enumerate(folds):
            mask[held, column] = 0
        w, scores = None, []
        for cost in progress(costs, desc="cross-validation", unit=" costs", leave=False):
            w = solve_svms(train, side[:, classes.repeat(3)], cost * mask, start=w)  # near the solution of the cost before
            decisions = (train @ w).cpu().numpy()
            precisions = [average_precision_score(positive[held, k], decisions[held, column]) for column, (k, held) in enumerate(folds)]
            scores.append(np.reshape(precisions, (-1, 3)).mean(1))
        chosen[classes] = np.array(costs)[np.argmax(scores, 0)]
    costs = torch.from_numpy(chosen).to(device).expand(len(train), -1)
    return (test @ solve_svms(train, side, costs)).cpu().numpy()


def principal_axes(x):
    """(N, D) -> (D, at most min(N, D)) orthonormal, the eigenvectors of x'x. SVMs are the same in these coordinates."""
    if len(x) >= x.shape[1]:
        return torch.linalg.eigh(x.T @ x)[1]
    values, vectors = torch.linalg.eigh(x @ x.T)  # the smaller matrix has the same eigenvalues
    values, vectors = values[values > 1e-12 * values[-1]], vectors[:, values > 1e-12 * values[-1]]
    return x.T @ vectors / values.sqrt()


def solve_svms(x, positive, costs, start=None, tolerance=1e-5):
    """Each column of w (D, M) minimises w'w / 2 + sum_i c_i max(0, 1 - s_i w'x_i)^2, s_i = 1 or -1, c_i doubled for positives.

    x: (N, D) float64 in its principal axes. positive: (N, M) bool. costs: (N, M), 0 leaves an example out. start: (D, M).
    Newton's method with conjugate gradients [Lin, Weng, Keerthi 2008; LIBLINEAR's primal solver], all columns at once: the
    work is products of x with matrices. A column is ready when its gradient is `tolerance` of that at w = 0.
    """
    s, c = 2.0 * positive - 1, costs * (1.0 + positive)
    w = torch.zeros(x.shape[1], s.shape[1], dtype=x.dtype, device=x.device) if start is None else start.clone()
    goal, spread = tolerance * (2 * x.T @ (c * s)).norm(dim=0), x.square().mean(0)[:, None]
    left, slack = torch.arange(s.shape[1], device=x.device), 1 - s * (x @ w)
    for _ in range(1000):
        gradient = w[:, left] - 2 * x.T @ (c * s * slack.clamp(min=0))
        going = gradient.norm(dim=0) > goal[left]
        if not going.any():
            break
        left, (s, c, slack, gradient) = left[going], (matrix[:, going] for matrix in (s, c, slack, gradient))
        # The Hessian I + x' diag(curvature) x has nearly the axes of x'x: its diagonal is a preconditioner good for any C.
        curvature = 2 * c * (slack > 0)
        step, change = conjugate_gradients(x, curvature, -gradient, 1 + spread * curvature.sum(0))
        change *= s

        old, before, slope = w[:, left], svm_loss(w[:, left], slack, c) * (1 + 1e-12), (gradient * step).sum(0)
        t = torch.ones_like(slope)
        while (high := (svm_loss(old + t * step, slack - t * change, c) > before + 1e-4 * t * slope) & (t > 1e-9)).any():
            t = torch.where(high, t / 2, t)
        w[:, left], slack = old + t * step, slack - t * change
    return w


def svm_loss(w, slack, costs):
    """w (D, M), slack 1 - s w'x and costs (N, M) -> (M,)"""
    return w.square().sum(0) / 2 + (costs * slack.clamp(min=0).square()).sum(0)


def conjugate_gradients(x, curvature, target, diagonal, steps=200):
    """Per column: step with (I + x' diag(curvature) x) step = target, up to a tenth of its norm -> step (D, M), x @ step"""
    step, change, rest, tiny = torch.zeros_like(target), torch.zeros_like(curvature), target.clone(), torch.finfo(x.dtype).tiny
    direction = rest / diagonal
    inner = (rest * direction).sum(0)
    for _ in range(steps):
        moved = x @ direction
        image = direction + x.T @ (curvature * moved)
        length = inner / (direction * image).sum(0).clamp(min=tiny)
        step += length * direction
        change += length * moved
        rest -= length * image
        if (rest.norm(dim=0) <= 0.1 * target.norm(dim=0)).all():
            break
        scaled, before = rest / diagonal, inner
        inner = (rest * scaled).sum(0)
        direction = scaled + inner / before.clamp(min=tiny) * direction
    return step, change


# ------------------------------------------------------------------------------------------ the probe


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


def probe_scores(backbone, fit, test, args, device, desc):
    """SVMs trained on the features of `fit` and tested on `test` (LabelData) -> {class: average precision, "mAP": their mean}"""
    fit_xy, test_xy = (extract_features(backbone, data, args.image_size, device, args.amp, args.workers, desc) for data in (fit, test))
    return with_mean(svm_probe(*fit_xy, *test_xy, fit.names, device=device))


def with_mean(scores):
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
        say(f"no labels to probe on: measure with python eval_linear.py --weights {run.folder}/backbone.pth --image-size {run.args.image_size} --data folder --root FOLDER")
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
