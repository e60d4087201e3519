"""How close each method's training step comes to its floor: forward and backward of the bare backbone (in
mmcontrastive.py two forwards and one backward, of the backbone and of BERT).

    python tests/benchmark.py                                          # every method, ResNet-50, batch 16, 224 px
    python tests/benchmark.py --methods virtex --batch-size 64
    python tests/benchmark.py --data coco --root FOLDER --train-split train2017    # and the whole loop, from JPEG files
    python tests/benchmark.py --methods svm --arch resnet18            # the probe's SVMs beside scikit-learn's, some minutes

Everything is measured in one run, in turns, in the same precision and memory format, on data already on the device; only
the ratios mean something on a machine that others use too. A further method joins with an entry in METHODS.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import icmlm
import mmcontrastive
import probe
import tp
import virtex
from common import progress


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
    optimizer = common.sgd(virtex.parameter_groups(model, 0.2, 1e-3, 1e-4), 0.2, 1e-4)
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


def random_photos(args, device):
    """-> uint8 images and their colour jitter, on the device"""
    rng = common.sample_rng(0, 0, 0)
    images = torch.from_numpy(rng.integers(0, 256, (args.batch_size, args.image_size, args.image_size, 3), dtype="uint8"))
    jitter = torch.stack([torch.from_numpy(common.draw_colour_jitter(rng)) for _ in range(args.batch_size)])
    return images.to(device), jitter.to(device)


def random_captions(args, device, length=16):
    """-> tokens (B, T), visible (B, T): COCO's captions have about 12 tokens and the two ends"""
    visible = torch.arange(length) < torch.randint(10, length + 1, (args.batch_size, 1))
    return torch.randint(1000, 30_000, (args.batch_size, length), device=device), visible.to(device)


def tp_step(args, device):
    """-> function that does one whole step of tp.py, TP-Postag with 5,000 labels"""
    model = tp.TagPredictor(args.arch, 5000).to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    optimizer = common.sgd(model.parameters(), 0.03, 1e-4)
    images, jitter = random_photos(args, device)
    labels = (torch.rand(args.batch_size, 5000, device=device) < 0.003).float()  # 15 words of a photo's captions are labels
    labels[:, 0] = 1

    def step():
        with common.autocast(device, args.amp):
            logits = model(common.augment(images, jitter))
        loss = tp.label_loss(logits, labels, "postag")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def icmlm_step(args, device):
    """-> function that does one whole step of icmlm.py, tfm beside a frozen BERT-base (of random weights: they cost the same)"""
    lm = icmlm.FrozenLanguageModel(BertForMaskedLM(BertConfig()).to(device).eval().requires_grad_(False), args.amp)
    model = icmlm.ICMLM(args.arch, "tfm", lm.width, lm.vocabulary.size(1), num_tags=5000, layers=1, heads=1, attention_width=512, dropout=0.1)
    model.to(device, memory_format=torch.channels_last).train()
    if args.compile:
        model.backbone.compile()
    optimizer = common.sgd(model.parameters(), 0.03, 1e-4)
    images, jitter = random_photos(args, device)
    labels = torch.zeros(args.batch_size, 5000, device=device)
    labels[:, :15] = 1
    tokens, visible = random_captions(args, device)
    position = torch.full((args.batch_size,), 5, device=device)
    target, tokens[:, 5] = tokens[:, 5].clone(), 103  # [MASK]

    def step():
        words = lm.read(tokens, visible)
        with common.autocast(device, args.amp):
            found, tags = model(common.augment(images, jitter), words, visible, position)
            logits = lm.score(found, "tfm")
        loss = torch.nn.functional.cross_entropy(logits.float(), target) + 0.1 * common.tag_loss(tags, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def mmcontrastive_step(args, device):
    """-> function that does one whole step of mmcontrastive.py without tags, BERT-base beside the backbone, queues full"""
    flags = mmcontrastive.get_args(["--data", "coco", "--arch", args.arch, "--batch-size", str(args.batch_size), "--bn-splits", "4"])
    model = mmcontrastive.build_model(flags, BertConfig(), 0, flags.queue).to(device, memory_format=torch.channels_last)
    for queue in model.queues.values():
        queue.total += flags.queue
    if args.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    optimizer = common.sgd(model.queries.parameters(), 0.03, 1e-4)
    views = [(*random_photos(args, device), torch.ones(args.batch_size, device=device), random_captions(args, device)) for _ in range(2)]
    captioned, tags, world = torch.ones(args.batch_size, dtype=torch.bool, device=device), torch.zeros(args.batch_size, 0, device=device), common.World(0, 1, device)
    rng = np.random.default_rng(0)

    def step():
        photos = [mmcontrastive.blur(common.augment(images, jitter), sigma) for images, jitter, sigma, _ in views]
        mmcontrastive.update_momentum(model.queries, model.keys, flags.momentum)
        with common.autocast(device, args.amp):
            queries = model(photos[0], views[0][3])
            keys = model.encode_keys(photos[1], views[1][3], world, rng, flags.bn_splits)
        losses = mmcontrastive.contrastive_losses(queries, keys, model.queues, tags, captioned, flags)
        loss = sum(getattr(flags, f"lambda_{name}") * value for name, value in losses.items())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.enqueue(keys, tags, captioned, world)

    return step


def contrastive_floor(args, device):
    """-> function that does what no contrastive method can do without: two forwards and one backward of backbone and BERT-base"""
    photo_step, pixels = bare_backbone(args, device), common.augment(random_photos(args, device)[0])
    bert, key_bert = (BertModel(BertConfig()).to(device) for _ in range(2))
    key_backbone = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    if args.compile:
        key_backbone.compile()
    tokens, visible = random_captions(args, device)

    def step():
        photo_step()
        bert.zero_grad()
        with common.autocast(device, args.amp):
            with torch.no_grad():
                key_backbone(pixels)
                key_bert(tokens, visible[:, None, None])
            pooled = bert(tokens, visible[:, None, None]).pooler_output
        pooled.backward(torch.ones_like(pooled))

    return step


METHODS = {"virtex": virtex_step, "tp": tp_step, "icmlm": icmlm_step, "mmcontrastive": mmcontrastive_step}
FLOORS = {"mmcontrastive": contrastive_floor}  # of the others the bare backbone


def measure(steps, rounds, device):
    """Seconds per step of each function: they take turns, five steps each (one update of the slow weights), median of `rounds`."""
    seconds = {name: [] for name in steps}
    for n in progress(range(rounds + 1), desc="rounds", leave=False):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(5):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if n:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / 5)
    return {name: statistics.median(values) for name, values in seconds.items()}


def whole_loop(method, args):
    """-> images per second and share of the time spent waiting for data of the script itself, fed from the files of --data"""
    script = Path(__file__).resolve().parent.parent / f"{method}.py"
    with tempfile.TemporaryDirectory() as folder:
        flags = {"data": args.data, "root": args.root, "train-split": args.train_split, "val-split": args.train_split, "arch": args.arch,
                 "hidden": args.hidden if method == "virtex" else None, "image-size": args.image_size, "batch-size": args.batch_size, "amp": args.amp, "workers": args.workers,
                 "iters": 10_000_000, "log-every": 10, "checkpoint-every": 10_000_000, "output": folder}  # fmt: skip
        command = [sys.executable, script, *(word for flag, value in flags.items() if value is not None for word in (f"--{flag}", value))]
        process = subprocess.Popen([str(word) for word in command + ["--compile"] * args.compile])
        metrics = Path(folder, "metrics.jsonl")
        while process.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < 3):
            time.sleep(0.5)
        process.kill()
        process.wait()
        last = json.loads(metrics.read_text().splitlines()[2])  # the first two hold the start
        return last["images_per_s"], last["data_wait"]


def svm_speed(args, device):
    """Seconds and mAP of each solver of the probe: 2000 built-in scenes seen by a random backbone, 8 classes, 4 costs, 3 folds"""
    torch.manual_seed(0)
    backbone = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    train, test = (probe.label_data("shapes", None, split) for split in ("train", "val"))
    features = [probe.extract_features(backbone, data, 64, device) for data in (train.select(range(2000)), test)]
    results = {}
    for solver in ("torch", "liblinear"):
        start = time.perf_counter()
        scores = probe.svm_probe(*features[0], *features[1], train.names, solver=solver, device=device)
        results[solver] = time.perf_counter() - start
        print(f"SVMs, {solver:10} {results[solver]:8.1f} s          {probe.with_mean(scores)['mAP']:8.3f} mAP")
    print(f"{results['liblinear'] / results['torch']:.1f} times as fast on {len(features[0][0])} x {features[0][0].shape[1]} features")


def decoding_speed(args):
    """-> images per second that one core decodes, crops and resizes"""
    data = common.caption_data(args.data, args.root, args.train_split)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 5:
        rng = common.sample_rng(0, 0, count)
        common.read_crop(data.images, count % len(data), common.random_crop(rng), args.image_size)
        count += 1
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.help_formatter({}))
    parser.add_argument("--methods", nargs="+", choices=(*sorted(METHODS), "svm"), default=sorted(METHODS))
    parser.add_argument("--arch", default="resnet50", choices=sorted(common.BACKBONES))
    parser.add_argument("--hidden", type=int, default=1024, help="H of VirTex's heads")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds of five steps each")
    parser.add_argument("--amp", choices=("bf16", "fp16", "off"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data", help="also time the whole loop on this data set")
    parser.add_argument("--root")
    parser.add_argument("--train-split", default="train2017")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count()))
    args = parser.parse_args()
    device = common.start_processes().device
    args.amp = common.choose_amp(device, args.amp)

    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {args.arch}, {args.image_size} px, batch {args.batch_size}, {args.amp}")
    if "svm" in args.methods:
        svm_speed(args, device)
        args.methods.remove("svm")
    if not args.methods:
        return
    steps = {"bare backbone": bare_backbone(args, device)}
    for method in args.methods:
        floor = {f"{method}, floor": FLOORS[method](args, device)} if method in FLOORS else {}
        steps |= {**floor, method: METHODS[method](args, device)}
    seconds = measure(steps, args.rounds, device)
    for name, value in seconds.items():
        floor = f"{name}, floor" if name in FLOORS else "bare backbone"
        print(f"{name:20} {args.batch_size / value:8.1f} images/s   {100 * seconds[floor] / value:5.1f}% of the {floor}")
    if args.data:
        print(f"decoding             {decoding_speed(args):8.1f} images/s and core")
        for method in args.methods:
            speed, wait = whole_loop(method, args)
            print(f"{method + ', loop':20} {speed:8.1f} images/s   {100 * speed * seconds[method] / args.batch_size:5.1f}% of its step, {100 * wait:.1f}% waiting for data")


if __name__ == "__main__":
    main()
