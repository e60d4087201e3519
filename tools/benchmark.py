"""How close each method's training step comes to its floor: a forward and backward pass of the bare
backbone (for mmcontrastive.py also of BERT, and a forward pass of momentum copies of both)

    python tools/benchmark.py                                     # ResNet-50, 224 px, batch 16
    python tools/benchmark.py --hidden 2048 --batch-size 256

Floors and steps take turns, in the same precision and memory format, on random data that are on the
device already. On a shared machine only the ratios are meaningful. How many photos a core decodes
and crops, beside another checkout of this repository:

    python tools/benchmark.py --loader datasets/coco/val2017 --baseline ../before
"""

import copy
import importlib.util
import io
import itertools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import BertConfig, BertForMaskedLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import number
import icmlm
import mmcontrastive
import tp
import virtex
from tools.make_shards import photo_file

BERT_BASE = BertConfig()  # random weights of its size cost as much as pretrained ones
STEPS = 5  # per turn of a method: VirTex's look-ahead updates its slow weights every 5 steps


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--arch", choices=common.BACKBONES, default="resnet50", help="backbone of all methods")
    add("--hidden", type=number("int > 0"), default=1024, help="width H of VirTex's heads")
    add("--image-size", type=number("int > 0"), default=224, help="side of the photos in pixels")
    add("--batch-size", type=number("int > 0"), default=16, help="number of photos in a step")
    add("--rounds", type=number("int > 0"), default=4, help=f"rounds of {STEPS} steps to time")
    add("--amp", choices=("bf16", "off"), help="precision (default bf16 if the device supports it)")
    add("--loader", metavar="FOLDER", help="measure decoding and cropping of the JPEGs in it")
    add("--baseline", metavar="FOLDER", help="another checkout, for --loader")
    return parser.parse_args(argv)


def main(args):
    if args.loader:
        torch.set_num_threads(1)  # as in a worker
        steps, photos = loader_steps(args)
        print(f"{photos} photos, crops of {args.image_size} px; per second and core")
        measure(steps, photos, args.rounds, 1, time.process_time)
        return
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {args.arch}, {args.image_size} px, batch "
          f"{args.batch_size}, {args.amp}")
    batch = random_batch(args, device)
    steps = {
        "bare backbone": floor(args, batch, device),
        "contrastive floor": floor(args, batch, device, contrastive=True),
    }
    steps |= {method: training_step(method, args, batch, device) for method in METHODS}
    measure(steps, args.batch_size, args.rounds, STEPS, time.perf_counter)


def measure(steps, photos, rounds, repeat, clock):
    """Print photos per second of each step, and how many percent of its floor, or of the first row

    steps: {name: generator, which handles so many photos at each next()}, which take turns
    """
    seconds = {name: [] for name in steps}
    for _ in common.progress(range(1 + rounds), desc="rounds", leave=False):
        for name, step in steps.items():
            start = clock()
            for _ in range(repeat):
                next(step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append((clock() - start) / repeat)
    for name, times in seconds.items():
        below = "contrastive floor" if name == "mmcontrastive" else next(iter(steps))
        times, before = times[1:], seconds[below][1:]  # the first round warms up
        ratios = [100 * y / x for x, y in zip(times, before)]
        share = 100 * statistics.median(before) / statistics.median(times)
        print(f"{name:30} {photos / statistics.median(times):8.1f} images/s   {share:.1f}% of the "
              f"{below} ({min(ratios):.1f} to {max(ratios):.1f})")


def random_batch(args, device):
    """What the methods read of a batch: photos in two views, a caption, and 15 of 5,000 labels"""
    size, number = args.image_size, args.batch_size
    lengths = torch.randint(10, 17, (number, 1))  # COCO's captions have 12, and two special tokens
    mask = torch.arange(16) < lengths
    tokens = torch.randint(1000, 10_000, mask.shape) * mask  # 0 is padding
    batch = {
        "images": torch.randint(0, 256, (number, 2, size, size, 3), dtype=torch.uint8),
        "jitter": torch.rand(number, 2, 4),
        "sigma": torch.ones(number, 2),
        "tokens": tokens,
        "backward_tokens": tokens,  # random tokens need not be reversed
        "places": mask[:, 1:].flatten().nonzero()[:, 0],
        "mask_pos": torch.full((number,), 5),
        "captions": torch.stack([tokens, mask]),
        "captioned": torch.ones(number, dtype=torch.bool),
        "labels": (torch.arange(5000) < 15).float().repeat(number, 1),
    }
    return {name: x.to(device) for name, x in batch.items()}


def floor(args, batch, device, contrastive=False):
    """A generator: the passes of a floor at each next(); gradients are reset in each"""
    inputs = common.augment(batch["images"][:, 0]), batch["captions"]
    networks = nn.ModuleList([common.build_backbone(args.arch)])
    if contrastive:
        networks.append(mmcontrastive.CaptionTrunk(BERT_BASE))
    networks.to(device, memory_format=torch.channels_last)
    keys = copy.deepcopy(networks) if contrastive else []
    while True:
        networks.zero_grad()
        with common.autocast(device, args.amp):
            with torch.no_grad():
                for network, x in zip(keys, inputs):
                    network(x)
            outputs = [network(x) for network, x in zip(networks, inputs)]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        yield


# ------------------------------------------------------------------------------- training steps


def training_step(method, args, batch, device):
    """A generator: one step of the script at each next(), with the settings of the paper"""
    script, losses_of, more = METHODS[method]
    flags = f"--recipe paper --arch {args.arch} --image-size {args.image_size} --lr 1e-3"
    flags += f" --batch-size {args.batch_size} --amp {args.amp} {more.format(args.hidden)}"
    script_args = script.get_args(flags.split())
    losses = losses_of(script_args, batch, device)
    model, groups = next(losses)  # the model comes first, then the losses of the steps
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(script_args, groups)
    for loss in losses:
        loss.backward()
        if method == "virtex":
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def virtex_losses(args, batch, device):
    backbone = common.build_backbone(args.arch)
    model = virtex.VirTex(backbone, 10_000, args.hidden, args.layers, args.dropout)
    yield model, virtex.parameter_groups(model, args.text_lr)
    slow_model = copy.deepcopy(model)
    for iteration in itertools.count(1):
        images = common.augment(batch["images"][:, 0], batch["jitter"][:, 0])
        with common.autocast(device, args.amp):
            sums = model(images, batch)
        yield sum(total / number for total, number in sums.values())
        if iteration % virtex.LOOKAHEAD_K == 0:  # after the step
            virtex.look_ahead(slow_model, model, args.lookahead_alpha)


def tp_losses(args, batch, device):
    model = tp.TagPredictor(args.arch, args.num_labels)
    yield model, model.parameters()
    while True:
        images = common.augment(batch["images"][:, 0], batch["jitter"][:, 0])
        with common.autocast(device, args.amp):
            logits = model(images)
        yield tp.label_loss(logits, batch["labels"], args.labels)


def icmlm_losses(args, batch, device):
    lm = icmlm.LanguageModel(BertForMaskedLM(BERT_BASE).to(device), args.amp)
    model = icmlm.ICMLM(args, BERT_BASE.hidden_size, args.num_concepts)
    yield model, model.parameters()
    mask = batch["captions"][1].bool()
    while True:
        images = common.augment(batch["images"][:, 0], batch["jitter"][:, 0])
        with common.autocast(device, args.amp):
            W = lm(batch["tokens"], mask)
            vector, tag_logits = model(images, W, mask, batch["mask_pos"])
            logits = model.head.scores(vector, lm)
        mlm = F.cross_entropy(logits.float(), batch["tokens"][:, 5])
        yield mlm + args.lambda_tp * icmlm.tag_loss(tag_logits, batch["labels"])


def mmcontrastive_losses(args, batch, device):
    encoders = mmcontrastive.build_encoders(args, BERT_BASE, mmcontrastive.batchnorm_group(args))
    model = mmcontrastive.MultimodalContrastive(encoders, args.queue, num_tags=0)
    yield model, encoders.parameters()
    for queue in model.queues.values():
        queue.valid.fill_(True)
    while True:
        mmcontrastive.update_momentum(model.queries, model.keys, args.momentum)
        images_k = mmcontrastive.augment_view(batch, 1, args)
        images_q = mmcontrastive.augment_view(batch, 0, args)
        with common.autocast(device, args.amp):
            keys = model.encode_keys(images_k, [batch["captions"]], 0)
            queries = model(images_q, batch["captions"])
        keys["captioned"] = batch["captioned"]
        losses = mmcontrastive.contrastive_losses(queries, keys, model.queues, args)
        yield sum(vars(args)[f"lambda_{name}"] * losses[name] for name in losses)
        model.enqueue(keys, 1)  # after the step


METHODS = {
    "virtex": (virtex, virtex_losses, "--hidden {}"),
    "tp": (tp, tp_losses, ""),
    "icmlm": (icmlm, icmlm_losses, ""),
    "mmcontrastive": (mmcontrastive, mmcontrastive_losses, "--bn-splits 4"),
}


# ------------------------------------------------------------------------------ files to crops


def loader_steps(args):
    """-> {name: generator}, number of photos.  This code and --baseline's, on the same crops

    From bytes in memory to uint8 crops with jitter and flips, in one thread.
    """
    paths = sorted(Path(args.loader).rglob("*.jpg"))
    files = {
        "files as they are": [path.read_bytes() for path in paths],
        "shrunk to 256 px": [photo_file(common.open_photo, 256, path)[1] for path in paths],
    }
    codes = {"this code": common}
    if args.baseline:
        spec = importlib.util.spec_from_file_location("baseline", f"{args.baseline}/common.py")
        codes = {"baseline": importlib.util.module_from_spec(spec)} | codes
        spec.loader.exec_module(codes["baseline"])
    steps = {f"{kind}, {name}": crop_all(code, contents, args.image_size)
             for kind, contents in files.items() for name, code in codes.items()}
    return steps, len(paths)


def crop_all(code, contents, size):
    """A generator: a crop of each of the photos at each next()"""
    data = SimpleNamespace(images=contents, open=lambda content: Image.open(io.BytesIO(content)))
    photos = code.Photos(data, SimpleNamespace(image_size=size, crop_min=0.2, colour_jitter=1.0))
    for turn in itertools.count():
        for index in range(len(contents)):
            photos.photo(index, np.random.default_rng([turn, index]))
        yield


if __name__ == "__main__":
    main(get_args())
