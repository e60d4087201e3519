"""Linear layers trained on random crops: the protocols sgd-virtex and layers of eval_linear.py

    sgd-virtex   one on the pooled features of the last maps [VirTex Sec. 4.1, App. A.1]
    layers       one on each of VGG-16's last three convolutions [ICMLM Sec. 4]

The paper refers to DeeperCluster's code for `layers`. All processes train, the first one scores.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

import common
from common import fail, print_main, progress

# Where the last three convolutions of VGG-16 end, after batch norm and ReLU: indices in `features`
CONVOLUTIONS = {"C-11": 36, "C-12": 39, "C-13": 42}
DECAY = 1e-5  # for CONVOLUTIONS: of the weights and of the learning rates [DeeperCluster's code]
RESUME_CAN_CHANGE = "weights", "data", "root", "runs", "output", "workers"


class Probe(nn.Module):
    """uint8 (B, size, size, 3), jitter (B, 4) or None -> [logits (B, classes) of each layer]"""

    def __init__(self, backbone, num_classes, new_layer, args):
        """new_layer(width, classes) -> linear layer"""
        super().__init__()
        self.backbone = backbone  # frozen and in eval mode
        self.amp = args.amp
        self.vgg = args.protocol == "layers"
        self.names = list(CONVOLUTIONS) if self.vgg else [""]  # of the layers
        side = args.image_size // 16 // 3 if self.vgg else 1  # of the pooled maps
        width = backbone.channels * side**2
        self.layers = nn.ModuleList(new_layer(width, num_classes) for _ in self.names)

    def forward(self, images, jitter=None):
        if self.vgg:
            features = convolutions(self.backbone, images, self.amp, jitter)
        else:
            features = [pooled(self.backbone, images, self.amp)]
        return [layer(x) for layer, x in zip(self.layers, features)]


def pooled(backbone, images, amp):
    """uint8 (B, size, size, 3) -> average-pooled features (B, channels)"""
    with torch.no_grad(), common.autocast(images.device, amp):
        maps = backbone(common.augment(images))
    return F.avg_pool2d(maps.float(), maps.shape[2:]).flatten(1)


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
    batches = common.train_batches(LabelledPhotos(data, args), collate, args, device, done)
    bar = progress(range(done + 1, iters + 1), initial=done, total=iters, desc=args.protocol)
    for iteration in bar:
        batch = next(batches)
        for group, lr in zip(optimizer.param_groups, args.lr):
            if decay:
                group["lr"] = lr / math.sqrt(1 + lr * decay * (iteration - 1))
            else:
                group["lr"] = lr * common.lr_factor(iteration - 1, iters, steps=args.steps)
        outputs = ddp(batch["images"], batch["jitter"])
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
        return {**self.photo(index, rng), "labels": self.data.labels[index]}


def collate(samples):
    """-> images uint8 (B, size, size, 3), jitter (B, 4), labels (B,) or (B, classes)"""
    return {
        "images": common.stack(samples, "image"),
        "jitter": common.stack(samples, "jitter"),
        "labels": common.stack(samples, "labels"),
    }


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
