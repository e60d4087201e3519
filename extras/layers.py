"""Linear layers by SGD: four protocols of eval_linear.py

    on features that were extracted once, by one process:
    sgd-mct        one learning rate, in three steps [contrastive paper Sec. 4.2]
    logreg-icmlm   the best of 25 learning rates and weight decays [ICMLM App. F.2]

    on random crops, by all processes, of which the first one scores:
    sgd-virtex     one layer on the pooled last maps [VirTex Sec. 4.1, App. A.1]
    layers         one on each of VGG-16's last three convolutions [ICMLM Sec. 4], as the code of
                   DeeperCluster has it, to which the paper refers
"""

import hashlib
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import fail, print_main, progress

# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}
DECAY = 1e-5  # for CONVOLUTIONS: of the weights and of the learning rates [DeeperCluster's code]
RESUME_CAN_CHANGE = "weights", "data", "root", "runs", "output", "workers"


# -------------------------------------------------------------------------- trained on features


def sgd_mct(x, y, args, device):
    """lr / 5 after epochs 30, 40, 50 of 60 [contrastive paper Sec. 4.2] -> linear layer

    x: features (N, D).  y: classes (N,)
    """

    def lr_factor(fraction):
        return 0.2 ** sum(fraction >= epoch / 60 for epoch in (30, 40, 50))

    x, y = x.to(device), y.to(device)
    trials = [(args.lr[0], 0.0)]  # no weight decay
    [layer] = train_linear(x, y, np.arange(len(x)), trials, lr_factor, args)
    return layer


def logreg_icmlm(x, y, args, device):
    """The best of 25 pairs of lr and weight decay on held-out photos [ICMLM App. F.2]

    [ours: a fifth is held out, the trials are random where the paper uses Optuna] -> linear layer
    """
    rng = np.random.default_rng(args.seed)
    rates = 10 ** rng.uniform(-1, 2, 25)
    decays = rng.uniform(0, 1e-5, 25)
    trials = list(zip(rates.tolist(), decays.tolist()))
    order = rng.permutation(len(x))
    held_out, rest = np.split(order, [len(order) // 5 or 1])

    device_x, device_y = x.to(device), y.to(device)
    cosine = partial(common.lr_factor, total=1)
    layers = train_linear(device_x, device_y, rest, trials, cosine, args)
    found = [predict(layer, x[held_out]).argmax(1) for layer in layers]
    accuracies = [(classes == y[held_out]).double().mean().item() for classes in found]
    best = trials[np.argmax(accuracies)]
    print_main(f"chosen: learning rate {best[0]:.3g}, weight decay {best[1]:.2g}")
    [layer] = train_linear(device_x, device_y, np.arange(len(x)), [best], cosine, args)
    return layer


def train_linear(x, y, rows, trials, lr_factor, args, width=None, loss_fn=F.cross_entropy):
    """One linear layer for each (learning rate, weight decay) in `trials`, on the same batches

    x: features (N, D).  y: classes (N,).  rows: of those to train on; x may fill the memory, so it
    is not copied.  lr_factor(fraction of training): of the learning rates.  width: outputs of a
    layer, by default one per class.  loss_fn(outputs (B, width), classes (B,))
    """
    width = width or int(y.max()) + 1
    layers = [linear_layer(x.shape[1], width).to(x.device) for _ in trials]
    groups = [
        {"params": layer.parameters(), "lr": lr, "weight_decay": weight_decay}
        for layer, (lr, weight_decay) in zip(layers, trials)
    ]
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


def linear_layer(width, num_classes):
    """Weights N(0, 0.01), bias 0 [VirTex App. A.1], elsewhere [ours]"""
    layer = nn.Linear(width, num_classes)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def predict(layer, x):
    """Features (N, D) -> logits (N, classes) on the CPU, in parts that fit on a GPU"""
    device = layer.weight.device
    logits = [layer(part.to(device)).cpu() for part in x.split(2**16)]
    return torch.cat(logits)


# ----------------------------------------------------------------------------- trained on crops


class Probe(nn.Module):
    """uint8 (B, size, size, 3), jitter (B, 4) or None -> [logits (B, classes) of each layer]

    pooled: that of eval_linear.py
    """

    def __init__(self, backbone, num_classes, args, pooled):
        super().__init__()
        self.backbone = backbone  # frozen and in eval mode
        self.pooled = pooled
        self.amp = args.amp
        self.vgg = args.protocol == "layers"
        self.names = list(CONVOLUTIONS) if self.vgg else [""]  # of the layers
        side = args.image_size // 16 // 3 if self.vgg else 1  # of the pooled maps
        width = backbone.channels * side**2
        self.layers = nn.ModuleList(linear_layer(width, num_classes) for _ in self.names)

    def forward(self, images, jitter=None):
        if self.vgg:
            features = convolutions(self.backbone, images, self.amp, jitter)
        else:
            features = [self.pooled(self.backbone, images, self.amp)]
        return [layer(x) for layer, x in zip(self.layers, features)]


def convolutions(backbone, images, amp="off", jitter=None):
    """uint8 (B, size, size, 3) -> for each of CONVOLUTIONS its maps, average-pooled 3x3

    At 224 pixels (B, 512 * 4 * 4): the "roughly 9K" of ICMLM App. C. [DeeperCluster's code]
    """
    features = []
    maps = common.augment(images, jitter)
    with torch.no_grad(), common.autocast(images.device, amp):
        for n, module in enumerate(backbone.features):
            maps = module(maps)
            if n in CONVOLUTIONS.values():
                features.append(F.avg_pool2d(maps.float(), 3, stride=3).flatten(1))
    return features


def train(probe, data, path, args, device, score):
    """SGD with momentum 0.9, in all processes

    data: eval_linear.LabelData.  path: where the layers are saved after each epoch, from which the
    same command resumes.  args: those of eval_linear.py.  score() -> {metric: percent}, printed
    every ten epochs
    """
    if args.batch_size % common.world_size():
        fail(f"--batch-size {args.batch_size} cannot be divided by the number of processes")
    decay = DECAY if args.protocol == "layers" else 0.0
    groups = [
        {"params": layer.parameters(), "lr": lr} for layer, lr in zip(probe.layers, args.lr)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay)

    # Resumed where an earlier run stopped, if all that it learned from is the same.
    settings = {
        name: value for name, value in vars(args).items() if name not in RESUME_CAN_CHANGE
    }
    settings["photos"] = common.fingerprint(data.images, data.labels.tolist())
    settings["backbone"] = hash_of_weights(probe.backbone)
    saved = common.read_checkpoint(path) if path.exists() else {}
    done = 0
    if saved and saved["settings"] == settings:
        done = saved["iteration"]
        probe.layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print_main(f"{path}: resuming from iteration {done}")
    elif saved:
        print_main(f"{path} is of other flags, photos or weights: it is trained anew")
    ddp = common.data_parallel(probe)

    iters = math.ceil(args.epochs * len(data) / args.batch_size)
    epoch = math.ceil(len(data) / args.batch_size)  # in iterations
    args.accumulate = 1  # for train_batches
    batches = common.train_batches(LabelledPhotos(data, args), None, args, device, done)
    bar = progress(range(done + 1, iters + 1), initial=done, total=iters, desc=args.protocol)
    for iteration in bar:
        batch = next(batches)
        for group, lr in zip(optimizer.param_groups, args.lr):
            if decay:
                group["lr"] = lr / math.sqrt(1 + lr * decay * (iteration - 1))
            else:
                group["lr"] = lr * common.lr_factor(iteration - 1, iters, steps=args.steps)
        outputs = ddp(batch["image"], batch["jitter"])
        losses = [classification_loss(logits, batch["labels"]) for logits in outputs]
        optimizer.zero_grad()
        sum(losses).backward()  # the layers share no parameters: each is trained on its own
        optimizer.step()
        if common.is_main() and (iteration % epoch == 0 or iteration == iters):
            parts = {"model": probe.layers.state_dict(), "optimizer": optimizer.state_dict()}
            common.save(path, parts | {"settings": settings, "iteration": iteration})
        if common.is_main() and iteration % (10 * epoch) == 0 and iteration < iters:
            scores = [f"{metric} {percent:.2f}" for metric, percent in score().items()]
            print_main(f"epoch {iteration // epoch}: {', '.join(scores)}")


def hash_of_weights(module):
    """Of their values, whatever file they come from -> 16 hex digits"""
    digest = hashlib.blake2b(digest_size=8)
    for value in module.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()


class LabelledPhotos(common.Photos):
    """Random crops with their labels"""

    def sample(self, index, rng):
        """-> image uint8 (size, size, 3), jitter (4,), labels () or (classes,)"""
        return self.photo(index, rng)[0] | {"labels": self.data.labels[index]}


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
