"""How close each method's training step comes to its floor: forward and backward of the bare backbone.

    python tests/benchmark.py                                          # VirTex, ResNet-50, batch 16, 224 px
    python tests/benchmark.py --batch-size 64
    python tests/benchmark.py --data coco --root FOLDER --train-split train2017    # and the whole loop, from JPEG files

Everything is measured in one run, in turns, in the same precision and memory format, on data already on the device; only
the ratios mean something on a machine that others use too. A further method joins with an entry in METHODS.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import virtex


def bare_backbone(args, device):
    """-> function that does one forward and backward of the backbone, gradients made anew"""
    backbone = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    if args.compile:
        backbone.compile()
    images = torch.randint(0, 256, (args.batch_size, args.image_size, args.image_size, 3), dtype=torch.uint8, device=device)
    pixels = common.augment(images)

    def step():
        backbone.zero_grad()
        with common.autocast(device, args.amp):
            features = backbone(pixels)
        features.backward(torch.ones_like(features))

    return step


def virtex_step(args, device):
    """-> function that does one whole step of virtex.py, from uint8 images and tokens on the device"""
    model = virtex.VirTex(args.arch, 10_000, args.hidden).to(device, memory_format=torch.channels_last)
    if args.compile:
        model.visual["cnn"].compile()
    optimizer = torch.optim.SGD(virtex.parameter_groups(model, 0.2, 1e-3, 1e-4), momentum=0.9, fused=True)
    lookahead = virtex.LookAhead(optimizer, 5, 0.5)
    samples = []
    for i in range(args.batch_size):
        rng = common.sample_rng(0, 0, i)
        length = int(rng.integers(10, 17))  # COCO's captions: about 12 tokens and the two ends
        tokens = [virtex.SOS, *rng.integers(4, 10_000, length - 2).tolist(), virtex.EOS]
        image = rng.integers(0, 256, (args.image_size, args.image_size, 3), dtype="uint8")
        samples.append({"image": image, "jitter": common.draw_colour_jitter(rng), "tokens": tokens, "unreadable": [], "task": "bicaptioning"})
    batch = virtex.collate(samples)
    batch.pop("unreadable")
    batch = {key: value.to(device) for key, value in batch.items()}

    def step():
        inputs = dict(batch)
        images = common.augment(inputs.pop("images"), inputs.pop("jitter"))
        with common.autocast(device, args.amp):
            loss = sum(model(images, **inputs).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        lookahead.step()

    return step


def virtex_loop(args):
    """Images per second and the share of time spent waiting for data, of virtex.py itself on --data."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data", args.data, "--arch", args.arch, "--hidden", args.hidden, "--image-size", args.image_size, "--amp", args.amp]
        flags += ["--batch-size", args.batch_size, "--iters", args.steps + 10, "--log-every", 10, "--output", folder, "--workers", args.workers]
        flags += ["--root", args.root] if args.root else []
        flags += ["--train-split", args.train_split] if args.train_split else []
        return flags


METHODS = {"virtex": virtex_step}


def measure(steps, args, device):
    """Seconds per step of each function, the median over rounds in which they take turns."""
    seconds = {name: [] for name in steps}
    for n in range(args.steps + 2):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if n >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
