"""How close each method's training step comes to its floor: one forward and backward pass of the
bare backbone (for mmcontrastive.py two forward and one backward pass, of the backbone and of BERT).

    python tools/benchmark.py                                     # ResNet-50, 224 px, batch 16
    python tools/benchmark.py --methods virtex --batch-size 64
    python tools/benchmark.py --data coco --root FOLDER           # the whole loop, too, from files
                                         (icmlm's downloads its BERT: else name --methods without)
    python tools/benchmark.py --methods svm --arch resnet18       # the probe's SVMs, some minutes

Floors and steps are measured in one run, in turns, in the same precision and memory format, on data
that is already on the device. On a machine that others use, too, only the ratios mean something.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.model_selection import GridSearchCV
from sklearn.svm import LinearSVC
from torch import nn
from transformers import BertConfig, BertForMaskedLM

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import common
import eval_linear
import icmlm
import language
import mmcontrastive
import tp
import virtex
from common import check, count, natural, progress

BERT_BASE = BertConfig()
STEPS = 5  # of each method in its turn: VirTex updates its slow weights once in five
DECODING = 5.0  # seconds for which photos are decoded


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add, methods = parser.add_argument, list(METHODS)
    add("--methods", nargs="+", choices=(*methods, "svm"), default=methods, help="to measure")
    add("--arch", choices=common.BACKBONES, default="resnet50", help="the backbone")
    add("--hidden", type=count, default=1024, help="H of VirTex's heads")
    add("--image-size", type=common.image_side, default=224, help="side of the images")
    add("--batch-size", type=count, default=16, help="images per step")
    add("--rounds", type=count, default=4, help=f"timed rounds of {STEPS} steps each")
    add("--amp", choices=("bf16", "fp16", "off"), help="default bf16 where the device has it")
    add("--compile", action="store_true", help="torch.compile, as in the scripts")
    add("--data", help="coco, vg or a .jsonl: also measure the whole loop of the scripts")
    add("--root", help="folder of --data")
    add("--train-split", help="split of --data")
    add("--workers", type=natural, help="processes that decode (default: as of the scripts)")
    parser.set_defaults(train_split=common.choose_recipe({}, argv)["train_split"])
    return parser.parse_args(argv)


def main(args):
    device = common.start().device
    args.amp = common.choose_amp(device, args.amp)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    sizes = f"{args.image_size} px, batch {args.batch_size}, {args.amp}"
    print(f"{name}; torch {torch.__version__}; {args.arch}, {sizes}")
    if "svm" in args.methods:
        compare_svms(args.arch, device)
    methods = [method for method in args.methods if method != "svm"]
    if not methods:
        return

    steps, floor_of = {"bare backbone": bare_backbone(args, device)}, {}
    for method in methods:
        script, make_step = METHODS[method]
        flags = script.get_args(script_flags(method, args))
        floor_of[method] = "bare backbone"
        if method == "mmcontrastive":
            floor_of[method] = "contrastive floor"
            steps["contrastive floor"] = contrastive_floor(args, device)
        steps[method] = make_step(flags, device)
    speeds = measure(steps, args.batch_size, args.rounds, device)
    for name, speed in speeds.items():
        floor = floor_of.get(name)
        share = f"{100 * speed / speeds[floor]:.1f}% of the {floor}" if floor else ""
        print_speed(name, speed, share)

    if args.data:
        decoded = decoding_speed(args.data, args.root, args.train_split, args.image_size)
        print_speed("decoding", decoded, "on one core")
        for method in methods:
            speed, wait = whole_loop(method, args)
            share = f"{100 * speed / speeds[method]:.1f}% of its step"
            print_speed(f"{method}, loop", speed, f"{share}, {100 * wait:.1f}% waiting for data")


def print_speed(name, speed, comment):
    print(f"{name:20} {speed:8.1f} images/s   {comment}".rstrip(), flush=True)


def script_flags(method, args):
    """The flags of the script, for its step and for the whole loop"""
    flags = ["--recipe", "paper", "--arch", args.arch, "--image-size", args.image_size]
    flags += ["--batch-size", args.batch_size, "--amp", args.amp, "--lr", 1e-3]
    if args.compile:
        flags.append("--compile")
    if method == "virtex":
        flags += ["--hidden", args.hidden, "--text-lr", 1e-3]
    if method == "mmcontrastive":  # of BERT-base's size without a download, no tags
        flags += ["--lm", "scratch", "--caption-views", "sibling", "--text-lr", 1e-3]
        flags += ["--bn-splits", 4, "--lambda-tag", 0]
    return [str(word) for word in flags]


def measure(steps, batch_size, rounds, device):
    """{name: generator} -> {name: images per second}. They take turns; the median of the rounds."""
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


def random_batch(flags, device, length=16):
    """-> uint8 images (B, size, size, 3) and jitter (B, 4); tokens (B, T) and visible (B, T)

    COCO's captions have about 12 tokens and the two ends.
    """
    size, number, rng = flags.image_size, flags.batch_size, np.random.default_rng(0)
    images = torch.randint(0, 256, (number, size, size, 3), dtype=torch.uint8)
    jitter = np.stack([common.colour_jitter(rng) for _ in range(number)])
    tokens = torch.randint(1000, 10_000, (number, length))
    visible = torch.arange(length) < torch.randint(10, length + 1, (number, 1))
    photos, captions = (images, torch.from_numpy(jitter)), (tokens, visible)
    return [x.to(device) for x in photos], [x.to(device) for x in captions]


def updater(model, parameters, flags, device):
    """-> the optimizer, and a function of the loss: what follows it in a step"""
    settings = flags.lr, flags.weight_decay
    optimizer = common.build_optimizer(flags.optimizer, parameters, *settings)
    scaler = torch.amp.GradScaler(device.type, enabled=flags.amp == "fp16")

    def update(loss):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if "clip" in flags:  # VirTex's
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        scaler.step(optimizer)
        scaler.update()

    return optimizer, update


def bare_backbone(flags, device):
    """Forward and backward of the backbone, gradients made anew"""
    backbone = common.build_backbone(flags.arch).to(device, memory_format=torch.channels_last)
    if flags.compile:
        backbone.compile()
    photos, _ = random_batch(flags, device)
    images = common.augment(*photos)
    while True:
        backbone.zero_grad()
        with common.autocast(device, flags.amp):
            features = backbone(images)
        features.backward(torch.ones_like(features))
        yield


def virtex_step(flags, device):
    """Bicaptioning, a vocabulary of 10,000 tokens"""
    sizes = flags.hidden, flags.layers, flags.dropout, flags.max_length
    model = virtex.VirTex(flags.arch, flags.vocab_size, *sizes)
    model.to(device, memory_format=torch.channels_last)
    groups = virtex.parameter_groups(model, flags.lr, flags.text_lr, flags.weight_decay)
    optimizer, update = updater(model, groups, flags, device)
    lookahead = virtex.LookAhead(optimizer, flags.lookahead_k, flags.lookahead_alpha)
    if flags.compile:
        virtex.compile_parts(model)
    photos, (tokens, visible) = random_batch(flags, device)
    tokens = tokens * visible  # 0 is padding; random tokens are as good to read backward
    batch = {"tokens": tokens, "backward_tokens": tokens}
    batch["predicted"] = batch["backward_predicted"] = virtex.places(visible[:, 1:])
    while True:
        images = common.augment(*photos)
        with common.autocast(device, flags.amp):
            losses = model(images, **batch)
        update(sum(losses.values()))
        lookahead.step()
        yield


def tp_step(flags, device):
    """TP-Postag, 5,000 labels"""
    model = tp.TagPredictor(flags.arch, flags.num_labels)
    model.to(device, memory_format=torch.channels_last)
    _, update = updater(model, model.parameters(), flags, device)
    if flags.compile:
        model.compile()
    photos, _ = random_batch(flags, device)
    targets = torch.zeros(flags.batch_size, flags.num_labels, device=device)
    targets[:, :15] = 1
    while True:
        images = common.augment(*photos)
        with common.autocast(device, flags.amp):
            logits = model(images)
        update(tp.label_loss(logits, targets, flags.labels))
        yield


def icmlm_step(flags, device):
    """ICMLM-tfm beside a frozen BERT-base, of random weights: they cost the same"""
    bert = BertForMaskedLM(BERT_BASE).to(device).eval().requires_grad_(False)
    lm = icmlm.FrozenLanguageModel(bert, flags.amp)
    model = icmlm.build_model(flags, lm, flags.num_concepts)
    model.to(device, memory_format=torch.channels_last)
    _, update = updater(model, model.parameters(), flags, device)
    if flags.compile:
        model.backbone.compile()
    photos, (tokens, visible) = random_batch(flags, device)
    position = torch.full((flags.batch_size,), 5, device=device)
    target, tokens[:, 5] = tokens[:, 5].clone(), 103  # [MASK]
    tags = torch.zeros(flags.batch_size, flags.num_concepts, device=device)
    tags[:, :15] = 1
    while True:
        images, words = common.augment(*photos), lm.read(tokens, visible)
        with common.autocast(device, flags.amp):
            logits, tag_logits = model(images, words, visible, position)
        loss = F.cross_entropy(logits.float(), target)
        update(loss + flags.lambda_tp * language.tag_loss(tag_logits, tags))  # Eq. 8
        yield


def mmcontrastive_step(flags, device):
    """Without tags; BERT-base beside the backbone, queues full"""
    weights = {name: getattr(flags, f"lambda_{name}") for name in ("ii", "cc", "ic", "ci")}
    dims = {"intra": flags.intra_dim, "inter": flags.inter_dim}
    sizes = BERT_BASE, weights, dims, flags.mlp_hidden
    encoders = mmcontrastive.build_encoders(flags.arch, *sizes)
    queues = {"image": flags.queue, "caption": flags.queue}
    model = mmcontrastive.MultimodalContrastive(encoders, None, queues, flags.bn_splits)
    model.to(device, memory_format=torch.channels_last)
    for queue in model.queues.values():
        queue.total += flags.queue
    _, update = updater(model, model.queries.parameters(), flags, device)
    if flags.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    batch, sigma = {}, torch.ones(flags.batch_size, device=device)
    for name in ("q", "k"):
        (image, jitter), captions = random_batch(flags, device)
        batch[name] = {"image": image, "jitter": jitter, "sigma": sigma, "captions": captions}
    tags = torch.zeros(flags.batch_size, 0, device=device)
    captioned = torch.ones(flags.batch_size, dtype=torch.bool, device=device)
    constants = flags.temperature, flags.margin, flags.tag_threshold
    alone = common.World(0, 1, device)
    while True:
        images_q, captions_q = mmcontrastive.view(batch["q"], flags.amp)
        images_k, captions_k = mmcontrastive.view(batch["k"], flags.amp)
        mmcontrastive.update_momentum(model.queries, model.keys, flags.momentum)
        with common.autocast(device, flags.amp):
            queries = model(images_q, captions_q)
            keys = model.encode_keys(images_k, captions_k, 0, alone)
        compared = queries, keys, model.queues, tags, captioned
        losses = mmcontrastive.contrastive_losses(*compared, *constants)
        update(sum(weights[name] * losses[name] for name in losses))  # Eq. 15
        model.enqueue(keys, tags, captioned, alone)
        yield


def contrastive_floor(flags, device):
    """What no contrastive method can do without: two forward passes, one backward pass"""
    backbone = bare_backbone(flags, device)
    photos, captions = random_batch(flags, device)
    images = common.augment(*photos)
    key_backbone = common.build_backbone(flags.arch).to(device, memory_format=torch.channels_last)
    bert, key_bert = (mmcontrastive.CaptionTrunk(BERT_BASE).to(device) for _ in range(2))
    if flags.compile:
        key_backbone.compile()
    while True:
        next(backbone)
        bert.zero_grad()
        with common.autocast(device, flags.amp):
            with torch.no_grad():
                key_backbone(images)
                key_bert(*captions)
            pooled = bert(*captions)
        pooled.backward(torch.ones_like(pooled))
        yield


METHODS = {
    "virtex": (virtex, virtex_step),
    "tp": (tp, tp_step),
    "icmlm": (icmlm, icmlm_step),
    "mmcontrastive": (mmcontrastive, mmcontrastive_step),
}


# ------------------------------------------------------------------- from files; the probe's SVMs


def decoding_speed(data, root, split, size):
    """-> images per second that one core decodes, crops and resizes"""
    images = common.caption_data(data, root, split).images
    rng, start, number = np.random.default_rng(0), time.perf_counter(), 0
    while time.perf_counter() - start < DECODING:
        common.read_crops(images, number % len(images), [common.random_crop(rng)], size)
        number += 1
    return number / (time.perf_counter() - start)


def whole_loop(method, args):
    """Run the script on --data until it has logged three times

    -> images per second, and the share of the time that it waits for data
    """
    flags = {"data": args.data, "root": args.root, "workers": args.workers}
    flags |= {"train-split": args.train_split, "val-split": args.train_split}
    flags |= {"iters": 10_000_000, "checkpoint-every": 10_000_000, "log-every": 10}
    command = [sys.executable, REPO / f"{method}.py", *script_flags(method, args)]
    for flag, value in flags.items():
        command += [f"--{flag}", value] if value is not None else []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        process = subprocess.Popen([str(word) for word in (*command, "--output", metrics.parent)])
        try:
            while len(rows) < 3:  # the first two hold the start
                time.sleep(0.5)
                check(process.poll() is None, f"{method}.py ended with an error, see above")
                rows = metrics.read_text().splitlines() if metrics.exists() else []
        finally:
            process.kill()
            process.wait()
            print(file=sys.stderr)  # its bar has left the line open
    last = json.loads(rows[2])
    return last["images_per_s"], last["data_wait"]


def compare_svms(arch, device):
    """Seconds and mAP of ours and of scikit-learn's: 2000 scenes, a random backbone, 8 classes"""
    alone = common.World(0, 1, device)
    backbone = eval_linear.load_backbone("random", arch, seed=0)
    backbone.to(device, memory_format=torch.channels_last)
    train, test = (eval_linear.label_data("shapes", split=split) for split in ("train", "val"))
    problem = []
    for data in (train.select(range(2000)), test):
        features, readable = eval_linear.extract_features(backbone, data.images, 64, alone)
        problem += features, data.labels[readable]
    problem.append(train.names)
    print(f"SVMs on {len(problem[0])} x {problem[0].shape[1]} features")
    solvers = {
        "ours": lambda: eval_linear.svm_probe(*problem, device=device),
        "LinearSVC, dual": lambda: linear_svc(*problem, dual=True),
        "LinearSVC, primal": lambda: linear_svc(*problem, dual=False),
    }
    for name, solve in solvers.items():
        start = time.perf_counter()
        score = eval_linear.mean_of(solve())
        print(f"{name:20} {time.perf_counter() - start:8.1f} s   {score:8.3f} mAP", flush=True)


def linear_svc(train_x, train_y, test_x, test_y, names, dual):
    """What eval_linear.svm_probe gives, by LIBLINEAR, class by class. Every class has examples."""
    train_x, test_x = (eval_linear.unit_length(x.astype(np.float64)) for x in (train_x, test_x))
    svm = LinearSVC(class_weight={True: 2, False: 1}, dual=dual, max_iter=2000, random_state=0)
    how = {"scoring": "average_precision", "cv": 3, "n_jobs": torch.get_num_threads()}
    search = GridSearchCV(svm, {"C": eval_linear.COSTS}, **how)
    decisions = [search.fit(train_x, y).decision_function(test_x) for y in (train_y == 1).T]
    return eval_linear.average_precisions(np.stack(decisions, 1), test_y, names)


if __name__ == "__main__":
    common.run(main, get_args)
