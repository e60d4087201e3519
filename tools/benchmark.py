"""How close each method's training step comes to its floor: a forward and backward pass of the bare
backbone (for mmcontrastive.py two forward passes and one backward pass of the backbone and of BERT)

    python tools/benchmark.py                                     # ResNet-50, 224 px, batch 16
    python tools/benchmark.py --methods virtex --batch-size 64
    python tools/benchmark.py --data coco --root FOLDER           # also the whole loop, from files
                   (icmlm.py and mmcontrastive.py download BERT: to avoid it, name other --methods)

Floors and steps are measured in one run, in turns, in the same precision and memory format, on data
that is already on the device. On a shared machine only the ratios are meaningful. With --data,
unknown flags (say --workers) go to the scripts. To compare two versions, run both in turns:

    for n in 1 2 3; do python tools/benchmark.py; (cd ../before; python tools/benchmark.py); done
"""

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import common
import icmlm
import mmcontrastive
import tp
import virtex
from common import fail, progress

BERT_BASE = BertConfig()
STEPS = 5  # per turn of a method: VirTex's look-ahead updates its slow weights every 5 steps
DECODING = 5.0  # seconds of decoding to measure its speed


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to measure")
    add("--arch", choices=common.BACKBONES, default="resnet50", help="the backbone")
    add("--hidden", type=common.count, default=1024, help="H of VirTex's heads")
    add("--image-size", type=common.count, default=224, help="side of the images")
    add("--batch-size", type=common.count, default=16, help="images per step")
    add("--rounds", type=common.count, default=4, help=f"timed rounds of {STEPS} steps each")
    add("--amp", choices=("bf16", "off"), help="precision; default bf16 if supported")
    add("--compile", action="store_true", help="torch.compile: slower to start, faster on GPUs")
    add("--data", help="coco, vg or a .jsonl: also measure the whole loop of the scripts")
    args, args.script_flags = parser.parse_known_args(argv)
    if args.script_flags and not args.data:
        parser.error(f"unknown flags {args.script_flags}: only with --data they go to the scripts")
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    sizes = f"{args.image_size} px, batch {args.batch_size}, {args.amp}"
    print(f"{name}; torch {torch.__version__}; {args.arch}, {sizes}")

    steps = {"bare backbone": bare_backbone(args, device)}
    if "mmcontrastive" in args.methods:
        steps["contrastive floor"] = contrastive_floor(args, device)
    for method in args.methods:
        script, make_step = METHODS[method]
        script_args = script.get_args(script_flags(method, args))
        steps[method] = make_step(script_args, device)
    speeds = measure(steps, args.batch_size, args.rounds, device)
    for name, speed in speeds.items():
        floor = "contrastive floor" if name == "mmcontrastive" else "bare backbone"
        ratio = f"{100 * speed / speeds[floor]:.1f}% of the {floor}" if name in METHODS else ""
        print_speed(name, speed, ratio)

    if args.data:
        print_speed("decoding", decoding_speed(script_args), "on one core")
        for method in args.methods:
            speed, wait = whole_loop(method, args)
            ratio = f"{100 * speed / speeds[method]:.1f}% of its step"
            print_speed(f"{method}, loop", speed, f"{ratio}, {100 * wait:.1f}% waiting for data")


def print_speed(name, speed, comment):
    print(f"{name:20} {speed:8.1f} images/s   {comment}".rstrip(), flush=True)


def script_flags(method, args):
    """The script's flags, for the single step and for the whole loop"""
    flags = ["--recipe", "paper", "--arch", args.arch, "--image-size", args.image_size]
    flags += ["--batch-size", args.batch_size, "--amp", args.amp, "--lr", 1e-3]
    if args.compile:
        flags.append("--compile")
    if args.data:
        flags += ["--data", args.data, *args.script_flags]
    if method == "virtex":
        flags += ["--hidden", args.hidden, "--text-lr", 1e-3]
    if method == "mmcontrastive":  # BERT-base's size without a download; no tags
        flags += ["--lm", "scratch", "--caption-views", "sibling", "--text-lr", 1e-3]
        flags += ["--bn-splits", 4, "--lambda-tag", 0]
    return [str(word) for word in flags]


def measure(steps, batch_size, rounds, device):
    """{name: generator} -> {name: images per second}. They take turns; the median of all rounds."""
    seconds = {name: [] for name in steps}
    for n in progress(range(rounds + 1), desc="rounds", leave=False):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                next(step)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if n > 0:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / STEPS)
    return {name: batch_size / statistics.median(taken) for name, taken in seconds.items()}


# ------------------------------------------ floors and steps: generators, one step at each next()


def random_photos(args, device):
    """-> uint8 images (B, size, size, 3), jitter (B, 4)"""
    size = args.image_size
    rng = np.random.default_rng(0)
    images = torch.randint(0, 256, (args.batch_size, size, size, 3), dtype=torch.uint8)
    jitter = np.stack([common.colour_jitter(rng, 1.0) for _ in range(args.batch_size)])
    return images.to(device), torch.from_numpy(jitter).to(device)


def random_captions(args, device, length=16):
    """-> (2, B, T), tokens and attention mask. COCO's have about 12, and two special ones."""
    tokens = torch.randint(1000, 10_000, (args.batch_size, length))
    lengths = torch.randint(10, length + 1, (args.batch_size, 1))
    return torch.stack([tokens, torch.arange(length) < lengths]).to(device)


def bare_backbone(args, device):
    """Forward and backward pass of the backbone; gradients are reset in each step"""
    backbone = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    if args.compile:
        backbone.compile()
    images = common.augment(*random_photos(args, device))
    while True:
        backbone.zero_grad()
        with common.autocast(device, args.amp):
            features = backbone(images)
        features.backward(torch.ones_like(features))
        yield


def virtex_step(args, device):
    """Bicaptioning, a vocabulary of 10,000 tokens"""
    sizes = 10_000, args.hidden, args.layers, args.dropout
    model = virtex.VirTex(common.build_backbone(args.arch), *sizes)
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, virtex.parameter_groups(model, args.text_lr))
    slow_model = copy.deepcopy(model)
    if args.compile:
        model.visual["cnn"].compile()
        for head in model.children():
            head.compile(dynamic=True)
    photos, jitter = random_photos(args, device)
    tokens, mask = random_captions(args, device)
    tokens = tokens * mask  # 0 is padding; random tokens need not be reversed
    batch = {"tokens": tokens, "backward_tokens": tokens, "places": mask[:, 1:].flatten().nonzero()[:, 0]}
    for iteration in itertools.count(1):
        optimizer.zero_grad()
        images = common.augment(photos, jitter)
        with common.autocast(device, args.amp):
            totals = model(images, batch)
        sum(total / number for total, number in totals.values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if iteration % virtex.LOOKAHEAD_K == 0:
            virtex.look_ahead(slow_model, model, args.lookahead_alpha)
        yield


def tp_step(args, device):
    """TP-Postag, 5,000 labels"""
    model = tp.TagPredictor(args.arch, args.num_labels)
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, model.parameters())
    if args.compile:
        model.compile()
    photos, jitter = random_photos(args, device)
    targets = torch.zeros(args.batch_size, args.num_labels, device=device)
    targets[:, :15] = 1
    while True:
        optimizer.zero_grad()
        images = common.augment(photos, jitter)
        with common.autocast(device, args.amp):
            logits = model(images)
        tp.label_loss(logits, targets, args.labels).backward()
        optimizer.step()
        yield


def icmlm_step(args, device):
    """ICMLM-tfm with a frozen BERT-base; its weights are random, which costs the same"""
    lm = icmlm.LanguageModel(BertForMaskedLM(BERT_BASE).to(device), args.amp)
    model = icmlm.ICMLM(args, BERT_BASE.hidden_size, args.num_concepts)
    model.to(device, memory_format=torch.channels_last)
    optimizer = common.build_optimizer(args, model.parameters())
    if args.compile:
        model.backbone.compile()
    photos, jitter = random_photos(args, device)
    tokens, mask = random_captions(args, device)
    mask = mask.bool()
    mask_pos = torch.full((args.batch_size,), 5, device=device)
    target = tokens[:, 5].clone()
    tokens[:, 5] = 103  # [MASK]
    tags = torch.zeros(args.batch_size, args.num_concepts, device=device)
    tags[:, :15] = 1
    while True:
        optimizer.zero_grad()
        images = common.augment(photos, jitter)
        with common.autocast(device, args.amp):
            vector, tag_logits = model(images, lm(tokens, mask), mask, mask_pos)
            logits = lm.mlm_head(vector)  # tfm's
        loss = F.cross_entropy(logits.float(), target)
        loss = loss + args.lambda_tp * icmlm.tag_loss(tag_logits, tags)  # Eq. 8
        loss.backward()
        optimizer.step()
        yield


def mmcontrastive_step(args, device):
    """BERT-base beside the backbone, full queues, no tags"""
    bn_group = mmcontrastive.batchnorm_group(args)
    encoders = mmcontrastive.build_encoders(args, BERT_BASE, bn_group)
    model = mmcontrastive.MultimodalContrastive(encoders, args.queue, 0)
    model.to(device, memory_format=torch.channels_last)
    for queue in model.queues.values():
        queue.valid.fill_(True)
    optimizer = common.build_optimizer(args, model.queries.parameters())
    if args.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    views = [random_photos(args, device) for _ in range(2)]
    batch = {name: torch.stack(pair, 1) for name, pair in zip(("images", "jitter"), zip(*views))}
    batch["sigma"] = torch.ones(args.batch_size, 2, device=device)
    captions_q, captions_k = random_captions(args, device), random_captions(args, device)
    tags = torch.zeros(args.batch_size, 0, device=device)
    captioned = torch.ones(args.batch_size, dtype=torch.bool, device=device)
    while True:
        optimizer.zero_grad()
        mmcontrastive.update_momentum(model.queries, model.keys, args.momentum)
        images_k = mmcontrastive.augment_view(batch, 1, args)
        images_q = mmcontrastive.augment_view(batch, 0, args)
        with common.autocast(device, args.amp):
            keys = model.encode_keys(images_k, [captions_k], 0)
            queries = model(images_q, captions_q)
        keys |= {"tags": tags, "captioned": captioned}
        losses = mmcontrastive.contrastive_losses(queries, keys, model.queues, args)
        loss = sum(getattr(args, f"lambda_{name}") * losses[name] for name in losses)  # Eq. 15
        loss.backward()
        optimizer.step()
        model.enqueue(keys, 1)
        yield


def contrastive_floor(args, device):
    """What every contrastive method needs: two forward passes and one backward pass"""
    backbone = bare_backbone(args, device)
    images = common.augment(*random_photos(args, device))
    captions = random_captions(args, device)
    key_backbone = common.build_backbone(args.arch).to(device, memory_format=torch.channels_last)
    bert = mmcontrastive.CaptionTrunk(BERT_BASE).to(device)
    key_bert = mmcontrastive.CaptionTrunk(BERT_BASE).to(device)
    if args.compile:
        key_backbone.compile()
    while True:
        next(backbone)
        bert.zero_grad()
        with common.autocast(device, args.amp):
            with torch.no_grad():
                key_backbone(images)
                key_bert(captions)
            pooled = bert(captions)
        pooled.backward(torch.ones_like(pooled))
        yield


METHODS = {
    "virtex": (virtex, virtex_step),
    "tp": (tp, tp_step),
    "icmlm": (icmlm, icmlm_step),
    "mmcontrastive": (mmcontrastive, mmcontrastive_step),
}


# ------------------------------------------------------------------------------------ from files


def decoding_speed(args):
    """-> images per second that one core decodes, crops and resizes"""
    data = common.caption_data(args.data, args.root, args.train_split)
    crop = partial(common.random_crop, np.random.default_rng(0), 0.2)
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < DECODING:
        common.read_crops(data, count % len(data), [crop], args.image_size)
        count += 1
    return count / (time.perf_counter() - start)


def whole_loop(method, args):
    """Run the script on --data until it has logged three times

    -> images per second, and the fraction of the time spent waiting for data
    """
    command = [sys.executable, str(REPO / f"{method}.py"), *script_flags(method, args)]
    command += ["--iters", "10000000", "--checkpoint-every", "10000000", "--log-every", "10"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        process = subprocess.Popen([*command, "--output", folder])
        try:
            while len(rows) < 3:  # the first two include the start-up
                time.sleep(0.5)
                if process.poll() is not None:
                    fail(f"{method}.py ended with an error, see above")
                rows = metrics.read_text().splitlines() if metrics.exists() else []
        finally:
            process.kill()
            process.wait()
            print(file=sys.stderr)  # the script's progress bar leaves its line unfinished
    last = json.loads(rows[2])
    return last["images_per_s"], last["data_wait"]


if __name__ == "__main__":
    main(get_args())
