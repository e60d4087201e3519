"""Linear layers of eval_linear.py and downstream/, trained on features or on random crops"""

import copy
import hashlib
import math
import os
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import fail, print_main, progress

# Resuming may change these: photos and weights are compared by their content.
RESUME_CAN_CHANGE = "given", "weights", "data", "root", "runs", "output", "workers"


def path_of(run):
    """The file in --output for the linear layers of an eval_linear.Run"""
    name = "-".join(run.source.split(os.sep)[-2:])  # of many files, this is run and backbone.pth
    number = zlib.crc32(os.fsencode(run.source))
    return Path(run.args.output, f"{run.args.protocol}-{name}-{number:08x}-{run.args.seed}.pth")


def linear_layer(width, num_classes):
    """Weights N(0, 0.01), bias 0 [VirTex App. A.1]; for the other protocols, too [ours]"""
    layer = nn.Linear(width, num_classes)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


def train_linear(x, y, rows, trials, lr_factor, args, width=None, loss_fn=F.cross_entropy):
    """-> one linear layer for each (learning rate, weight decay) in `trials`, on the same batches

    x: features (N, D).  y: classes (N,).  rows: those to train on; x may fill the memory, so it is
    not copied.  lr_factor(fraction of training): a factor of the learning rates.  width: outputs of
    a layer, by default one per class.  loss_fn(outputs (B, width), classes (B,))
    """
    width = width or int(y.max()) + 1
    layers = [linear_layer(x.shape[1], width).to(x.device) for _ in trials]
    groups = []
    for layer, (lr, weight_decay) in zip(layers, trials):
        groups.append({"params": layer.parameters(), "lr": lr, "weight_decay": weight_decay})
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    rng = np.random.default_rng(args.seed)
    for epoch in progress(range(args.epochs), desc="linear layers", unit=" epochs", leave=False):
        order = torch.from_numpy(rng.permutation(rows)).to(x.device)
        batches = order.split(args.batch_size)
        for n, batch in enumerate(batches):
            done = (epoch + n / len(batches)) / args.epochs
            common.set_lr(optimizer, lr_factor(done))
            features, classes = x[batch], y[batch]
            losses = [loss_fn(layer(features), classes) for layer in layers]
            optimizer.zero_grad()
            sum(losses).backward()  # the layers share no parameters: each is trained on its own
            optimizer.step()
    return layers


@torch.no_grad()
def predict(layer, x):
    """Features (N, D) -> logits (N, classes) on the CPU, in parts that fit on a GPU"""
    device = layer.weight.device
    logits = [layer(part.to(device)).cpu() for part in x.split(2**16)]
    return torch.cat(logits)


class Probe(nn.Module):
    """uint8 (B, size, size, 3), jitter (B, 4) or None -> [logits (B, classes) of each layer]

    features_of(images, jitter) -> [features (B, width) of each layer], without gradients.
    widths: of each layer
    """

    def __init__(self, features_of, widths, num_classes):
        super().__init__()
        self.features_of = features_of
        self.layers = nn.ModuleList(linear_layer(width, num_classes) for width in widths)

    def forward(self, images, jitter=None):
        features = self.features_of(images, jitter=jitter)
        return [layer(x) for layer, x in zip(self.layers, features)]


def train(probe, data, run, scores, learning_rate, decay=0.0):
    """SGD with momentum 0.9 in all processes; the same command resumes after the last whole epoch

    data: eval_linear.LabelData.  run: eval_linear.Run.  scores() -> a text, printed every ten
    epochs.  learning_rate(peak, iteration, iterations), iterations counted from 0.  decay: of the
    weights
    """
    args = copy.copy(run.args)
    args.crop_min = 0.08  # of the area: both public codes; VirTex App. A.1 still has 20%
    args.colour_jitter = run.protocol.colour_jitter
    args.accumulate = 1
    if args.batch_size % common.world_size():
        fail(f"--batch-size {args.batch_size} cannot be divided by the number of processes")
    groups = [{"params": layer.parameters()} for layer in probe.to(run.device).layers]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay)

    # Resumed where an earlier run stopped, if all that it learned from is the same.
    settings = {name: x for name, x in vars(args).items() if name not in RESUME_CAN_CHANGE}
    settings["photos"] = common.fingerprint(data.images, data.labels.tolist())
    settings["backbone"] = hash_of_weights(run.backbone)
    path = path_of(run)
    saved = common.read_checkpoint(path) if path.exists() else {}
    done = 0
    if saved and saved["settings"] == settings:
        done = saved["iteration"]
        probe.layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print_main(f"{path}: resuming from iteration {done}")
    elif saved:
        print_main(f"{path} is of other flags, photos or weights: it is trained anew")

    common.check_shared(args.output, done)
    ddp = common.data_parallel(probe)
    iters = math.ceil(args.epochs * len(data) / args.batch_size)
    epoch_iters = math.ceil(len(data) / args.batch_size)
    batches = common.train_batches(LabelledPhotos(data, args), None, args, run.device, done)
    for iteration in progress(range(done + 1, iters + 1), initial=done, total=iters):
        batch = next(batches)
        for group, peak in zip(optimizer.param_groups, args.lr):
            group["lr"] = learning_rate(peak, iteration - 1, iters)
        outputs = ddp(batch["image"], batch["jitter"])
        losses = [classification_loss(logits, batch["labels"]) for logits in outputs]
        optimizer.zero_grad()
        sum(losses).backward()  # the layers share no parameters: each is trained on its own
        optimizer.step()
        if common.is_main() and (iteration % epoch_iters == 0 or iteration == iters):
            state = {"model": probe.layers.state_dict(), "optimizer": optimizer.state_dict()}
            common.save(path, {**state, "settings": settings, "iteration": iteration})
        if common.is_main() and iteration % (10 * epoch_iters) == 0 and iteration < iters:
            print_main(f"epoch {iteration // epoch_iters}: {scores()}")


def hash_of_weights(module):
    """Of their values, whatever file they come from -> 16 hex digits"""
    digest = hashlib.blake2b(digest_size=8)
    for value in module.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()


class LabelledPhotos(common.Photos):
    """Random crops with their labels, of which left and right are swapped if a photo is mirrored"""

    def __init__(self, data, args):
        super().__init__(data, args)
        self.mirrored = common.mirrored(data.names)

    def sample(self, index, rng):
        """-> image uint8 (size, size, 3), jitter (4,), labels () or (classes,)"""
        sample, flipped = self.photo(index, rng)
        labels = self.data.labels[index]
        if flipped:
            labels = labels[self.mirrored] if np.ndim(labels) else self.mirrored[labels]
        return sample | {"labels": labels}


def classification_loss(logits, labels):
    """Softmax cross-entropy; with several labels per photo, binary cross-entropy per class

    The latter is summed over classes, without "difficult" labels [DeeperCluster's code].
    logits: (B, classes).  labels: as in eval_linear.LabelData -> scalar
    """
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels)
    targets = (labels == 1).float()
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (losses * (labels >= 0)).sum(1).mean()


# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}
DECAY = 1e-5  # of the weights and of the learning rates [DeeperCluster's code]


def vgg_probe(run):
    """-> Probe of CONVOLUTIONS, for eval_linear.Run"""
    side = run.args.image_size // 16 // 3  # of the pooled maps
    widths = [run.backbone.channels * side**2] * len(CONVOLUTIONS)
    return Probe(partial(convolutions, run.backbone, amp=run.args.amp), widths, len(run.names))


def learning_rate(peak, iteration, iters):
    """Falls slowly from its peak [DeeperCluster's code]"""
    return peak / math.sqrt(1 + peak * DECAY * iteration)


def convolutions(backbone, images, amp="off", jitter=None):
    """uint8 (B, size, size, 3) -> for each of CONVOLUTIONS its maps, average-pooled 3x3

    At 224 pixels (B, 512 * 4 * 4): the "roughly 9K" of ICMLM App. C. [DeeperCluster's code]
    Its code also frames the photo with one pixel of zeros, which moves features as much as a shift
    of the photo by a pixel. Here is no frame. [ours]
    """
    features = []
    maps = common.augment(images, jitter)
    with torch.no_grad(), common.autocast(images.device, amp):
        for n, module in enumerate(backbone.features):
            maps = module(maps)
            if n in CONVOLUTIONS.values():
                features.append(F.avg_pool2d(maps.float(), 3, stride=3).flatten(1))
    return features
