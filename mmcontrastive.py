"""Multimodal contrastive training: a backbone learned by matching photos and captions.

Yuan, Lin, Kuen, Zhang, Wang, Maire, Kale, Faieta. Multimodal Contrastive Training for Visual
Representation Learning. CVPR 2021.

Two views of a photo should be more similar than views of different photos (Eq. 3, as in MoCo), and
so should two paraphrases of a caption (Eq. 8), a photo and its caption (Eqs. 11, 14), and photos
with common tags (Eq. 5). A query is compared with its own key and with a queue of earlier keys,
which momentum encoders have computed. Similarities within a modality and between modalities are
measured in separate spaces, each with its own MLPs [Sec. 3.2].

    laptop        python mmcontrastive.py
    own photos    python mmcontrastive.py --data photos.jsonl
    MoCo          python mmcontrastive.py --data coco --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 \\
                      --lambda-tag 0
    for COCO      python tools/backtranslate.py --data coco \\
                      --output runs/mmcontrastive-coco/backtranslations.jsonl   (once)
    one GPU       python mmcontrastive.py --data coco --accumulate 8
    eight GPUs    torchrun --nproc_per_node=8 mmcontrastive.py --data coco
    search        python -m downstream.search "a dog in the snow" "two children" --root photos

Where the paper is:

    Eqs. 1, 6, 9, 12, queries                MultimodalContrastive.forward
    Eqs. 2, 7, 10, 13, keys                  MultimodalContrastive.encode_keys
    momentum encoders, queues [Sec. 3.1]     update_momentum, Queue
    Eqs. 3, 8, two views                     contrastive_losses
    Eqs. 4, 5, common tags                   tag_loss; extras/nouns.py
    Eqs. 11, 14, between the modalities      ranking_loss
    Eq. 15, the weighted sum of the losses   main
    views of photos and captions [Sec. 4.1]  TwoViews
    retrieval without fine-tuning [Tab. 7]   validate

What to expect: the losses start near 0 and rise while the queues fill, because empty slots are left
out: `ii` and `cc` towards ln(K + 1), `ic` and `ci` towards K times the margin. Then they fall.
Validation measures retrieval in both directions (Tab. 7). If photos are few, read
docs/mmcontrastive.md, because some settings only work together. A finished run is in
docs/logs/mmcontrastive.
"""

import copy
import json
import math
import os
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate

import common
from common import fail, print_main

# SplitBatchNorm can only replace the batch norm of torchvision's ResNets.
ARCHS = [name for name in common.BACKBONES if "resnet" in name]
TAGS = "annotated", "nouns", "nouns-spacy"
CAPTION_VIEWS = "same", "sibling", "backtranslation"  # sibling: another caption [ours]
# Each flag: its values in the recipes demo, small [ours] and paper; what may be given; help. Round
# brackets say what None stands for.
FLAGS = {
    # name                demo        small        paper                what may be given; help
    # Data
    "data":              ("shapes",   "shapes",    "shapes",            str,
        "shapes (built in), coco, vg, the path of a .jsonl file, or a folder of shards"),
    "recipe":            (None,       None,        None,                common.RECIPES,
        "which column of this table the defaults come from (demo for shapes, small for a "
        ".jsonl, else paper)"),
    "root":              (None,       None,        None,                str,
        "folder of the data (datasets/NAME; for a .jsonl, its own folder)"),
    "train_split":       (None,       None,        None,                str,
        "split for training (train2017 for coco, else train)"),
    "val_split":         (None,       None,        None,                str,
        "split for validation (val2017 for coco, else val)"),
    "tags":              ("nouns",    "annotated", "annotated",         TAGS,
        "tags of --data, or nouns of the captions [Sec. 4.1, 4.4]"),
    "workers":           (None,       None,        None,                "int >= 0",
        "processes that load photos (a share of the cores); raise it if data_wait exceeds 0.05"),
    # Views of photos and captions
    "image_size":        (48,         112,         224,                 "int > 0",
        "side of the crops in pixels; the cost grows with its square [Sec. 4.1]"),
    "crop_min":          (1.0,        0.2,         0.2,                 "> 0, <= 1",
        "smallest crop, as a fraction of the photo's area [Sec. 4.1: MoCo-v2]"),
    "colour_jitter":     (0.0,        0.4,         1.0,                 ">= 0",
        "strength of the colour jitter; lower it if captions name colours [Sec. 4.1: MoCo-v2]"),
    "greyscale":         (0.0,        0.0,         0.2,                 ">= 0, <= 1",
        "probability of turning a view grey [Sec. 4.1: MoCo-v2]"),
    "blur":              (0.0,        0.0,         0.5,                 ">= 0, <= 1",
        "probability of blurring a view [Sec. 4.1: MoCo-v2]"),
    "moco_v1":           (False,      False,       False,               bool,
        "use MoCo v1's colour jitter; give --blur 0, too"),
    "caption_views":     ("sibling",  "sibling",   "backtranslation",   CAPTION_VIEWS,
        "second view of a caption: itself, another caption of the photo, or a back-translation "
        "[Sec. 4.1]"),
    "backtranslations":  (None,       None,        None,                str,
        "file that tools/backtranslate.py wrote (in --output)"),
    # Model
    "arch":              ("resnet18", "resnet18",  "resnet50",          ARCHS,
        "architecture of the backbone; resnet18 suits few photos or a CPU [Sec. 4.1]"),
    "init":              (None,       None,        None,                str,
        "weights that the backbone starts from: imagenet, or a file with a backbone"),
    "lm":                ("scratch",  "scratch",   "bert-base-uncased", str,
        "caption encoder: a BERT from the hub or a folder, or scratch: random weights [Sec. "
        "4.1: BERT-base; uncased: ours]"),
    "lm_iters":          (0,          2000,        0,                   "int >= 0",
        "iterations of training --lm scratch on the captions alone, before all else [ours]"),
    "lm_layers":         (2,          4,           None,                "int > 0",
        "layers of --lm scratch (BERT-base's)"),
    "lm_width":          (128,        256,         None,                "int > 0",
        "width of --lm scratch (BERT-base's)"),
    "dropout":           (0.0,        0.1,         0.1,                 ">= 0, < 1",
        "dropout in --lm scratch [BERT]"),
    "mlp_hidden":        (512,        1024,        2048,                "int >= 0",
        "hidden width of the MLPs; 0: linear [Sec. 4.1]"),
    "intra_dim":         (128,        128,         128,                 "int >= 0",
        "width of a modality's own space [Sec. 4.1]; 0: one space for all [Sec. 4.4]"),
    "inter_dim":         (1024,       1024,        1024,                "int > 0",
        "width of the common space [Sec. 4.1]"),
    "queue":             (256,        512,         32_768,              "int > 0",
        "K, the keys in a queue; lower it for few photos [Sec. 4.1]"),
    "momentum":          (0.993,      0.998,       0.999,               ">= 0, < 1",
        "m of Sec. 3.1; lower it for short runs [Sec. 4.1]"),
    "bn_splits":         (1,          4,           8,                   "int > 0",
        "groups of a batch with their own batch-norm statistics; with 1 a query can recognise "
        "its key [Sec. 4.1: 8 GPUs]"),
    # Losses
    "lambda_ii":         (0.2,        1.0,         1.0,                 ">= 0",
        "weight of Eq. 3, photo to photo [Sec. 4.1]"),
    "lambda_tag":        (2.0,        1.0,         1.0,                 ">= 0",
        "weight of Eq. 5, photos with common tags [Sec. 4.1]"),
    "lambda_cc":         (1.0,        1.0,         1.0,                 ">= 0",
        "weight of Eq. 8, caption to caption [Sec. 4.1]"),
    "lambda_ic":         (0.2,        0.02,        1e-4,                ">= 0",
        "weight of Eq. 11; raise it for short queues [Sec. 4.1]"),
    "lambda_ci":         (0.2,        0.02,        1e-4,                ">= 0",
        "weight of Eq. 14; raise it for short queues [Sec. 4.1]"),
    "temperature":       (0.07,       0.07,        0.07,                "> 0",
        "tau of Eqs. 3, 5 and 8 [Sec. 4.1]"),
    "tag_threshold":     (1,          2,           2,                   ">= 0",
        "epsilon of Eq. 4; 0 suits few tags [Sec. 4.1]"),
    # Optimisation
    "batch_size":        (32,         64,          512,                 "int > 0",
        "photos per iteration, over all processes [Sec. 4.1]"),
    "iters":             (440,        None,        None,                "int > 0",
        "training iterations; raise them with the data"),
    "epochs":            (None,       15.0,        200.0,               "> 0",
        "passes over the photos, instead of --iters [Sec. 4.1]"),
    "optimizer":         ("AdamW",    "AdamW",     "SGD",               common.OPTIMIZERS,
        "how the weights are updated [Sec. 4.1]"),
    "lr":                (1e-3,       1e-3,        0.03,                "> 0",
        "peak learning rate of the image encoder; lower it if the loss is not finite [Sec. 4.1]"),
    "head_lr":           (None,       None,        None,                "> 0",
        "peak learning rate of the layers above the backbone, which start anew (that of --lr)"),
    "text_lr":           (5e-4,       3e-4,        4e-5,                ">= 0",
        "peak learning rate of the caption encoder; 4e-5 suits a pretrained BERT [Sec. 4.1]"),
    "warmup":            (0.05,       0.1,         0.0,                 ">= 0, < 1",
        "length of the learning rate's warm-up, as a fraction of training [ours]"),
    "weight_decay":      (0.01,       0.01,        1e-4,                ">= 0",
        "weight decay; raise it if photos are few [Sec. 4.1]"),
    # Run
    "output":            (None,       None,        None,                str,
        "folder for results, and for resuming (runs/SCRIPT, or runs/SCRIPT-DATA)"),
    "seed":              (0,          0,           0,                   "int >= 0",
        "seed of all random numbers"),
    "amp":               (None,       None,        None,                common.PRECISIONS,
        "mixed precision (bf16 if the device supports it, else off)"),
    "accumulate":        (1,          1,           1,                   "int > 0",
        "split each batch into this many micro-batches, if memory is short"),
    "log_every":         (10,         20,          20,                  "int > 0",
        "iterations between lines of metrics.jsonl"),
    "validate_every":    (1000,       None,        5000,                "int > 0",
        "iterations between validations (2,000, or a fifth of a shorter run)"),
    "checkpoint_every":  (200,        500,         2000,                "int > 0",
        "iterations between saves of checkpoint.pth; each validation saves, too"),
    "save_minutes":      (2.0,        2.0,         10.0,                "> 0",
        "minutes after which checkpoint.pth is saved in any case"),
    "keep_every":        (None,       None,        None,                "int > 0",
        "also keep a model_N.pth every N iterations, to choose the best later"),
}
MARGIN = 0.2  # alpha of Eqs. 11, 14 [Sec. 4.1]
RETRIEVAL_IMAGES = 1000  # of the validation split [Sec. 4.4, Tab. 7], drawn at random [ours]
MAX_TOKENS = 64  # longer captions are truncated [ours]


def get_args(argv=None):
    parser = common.Parser(__doc__, FLAGS)
    parser.add_argument("--steps", type=common.number(">= 0, < 1"), nargs="+",
        help="divide the rates by 10 after these fractions of training,\n"
        "instead of the cosine; MoCo v1: 0.6 0.8")
    args = parser.parse_args(argv)
    common.apply_recipe(args, "mmcontrastive", FLAGS)
    args.head_lr = args.head_lr or args.lr
    if bool(args.lambda_ic) != bool(args.lambda_ci):  # with one, its keys' encoder would not learn
        fail("--lambda-ic and --lambda-ci go together: give both, or 0 for both")
    return args


def main(args):
    device = common.init_distributed()
    args.amp = common.choose_amp(device, args.amp)
    init = common.read_init(args)  # a backbone's weights, or None

    # Data: photos, some of which may have no captions or no tags [Sec. 3.2, end].
    tags = args.lambda_tag and args.tags == "annotated"
    splits = [args.train_split, args.val_split] if args.lambda_ic else [args.train_split]
    train, *val = common.caption_data(args.data, args.root, splits, tags)
    train, num_tags = usable_photos(args, train)
    translations = read_backtranslations(args, train)
    val = retrieval_photos(val[0], args.seed) if val else train.select([])  # MoCo has no retrieval
    translated = common.fingerprint([], *[texts.joined for texts in translations])
    checkpoint = common.begin_run(args, train.checksum(), val.checksum(), translated)
    bn_group = batchnorm_group(args)
    queue_size = fit_queue(args, len(train))
    tokenizer, config, pretrained = load_caption_model(args, checkpoint, train, device)
    photos = TwoViews(train, translations, args)
    outputs = f"{num_tags:,} tags, queues of {queue_size:,} keys"
    iters, validate_every = common.plan_run(args, device, len(photos), len(val), outputs)

    # Model: from random weights, from --init, or from the checkpoint.
    torch.manual_seed(args.seed)
    encoders = build_encoders(args, config, bn_group)
    backbone = encoders["image"].trunk[0]
    if pretrained and not checkpoint:
        bert = common.load_lm(pretrained, "AutoModel")
        encoders["caption"].trunk.bert.load_state_dict(bert.state_dict())
    if init:
        backbone.load_state_dict(init)  # before the momentum encoders copy it
    model = MultimodalContrastive(encoders, queue_size, num_tags)
    model.to(device, memory_format=torch.channels_last)
    ddp = common.data_parallel(model).train()  # all processes get the first one's weights
    groups = [
        {"params": encoders["image"].trunk.parameters()},
        {"params": encoders["image"].mlps.parameters(), "lr": args.head_lr},
    ]
    if config:
        groups += [{"params": encoders["caption"].parameters(), "lr": args.text_lr}]
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = common.restore(args, checkpoint, iters, state)

    lambdas = {"ii": args.lambda_ii, "tag": args.lambda_tag, "cc": args.lambda_cc,
               "ic": args.lambda_ic, "ci": args.lambda_ci}
    batches = common.train_batches(photos, partial(collate, tokenizer), args, device, done)
    log = common.Log(args, done)
    bar = common.iterations(done, iters)
    for iteration in bar:
        # Learning rates: cosine [Sec. 4.1] or MoCo v1's steps; per iteration, not per epoch [ours]
        decay = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, decay)

        # Keys, by the momentum encoders [Sec. 3.1], of the whole batch at once: they need no
        # gradient, and shuffled batch norm needs all photos.
        update_momentum(model.queries, model.keys, args.momentum)
        micro_batches = []
        for part in range(args.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            log.waited += time.perf_counter() - started
            micro_batches.append(batch)
        images_k = torch.cat([augment_view(batch, 1, args) for batch in micro_batches])
        captions_k = [batch.get("captions_k") for batch in micro_batches]
        with common.autocast(device, args.amp):
            keys = model.encode_keys(images_k, captions_k, (args.seed, iteration))
        for name in "tags", "captioned":  # (B, num_tags), (B,); the others are (B, dim)
            keys[name] = torch.cat([batch[name] for batch in micro_batches])

        # Gradients: --accumulate micro-batches, averaged over all processes after the last one
        optimizer.zero_grad()
        for part in range(args.accumulate):
            batch = micro_batches[part]
            ddp.require_backward_grad_sync = part == args.accumulate - 1
            images = augment_view(batch, 0, args)  # (B, 3, h, w)
            with common.autocast(device, args.amp):
                queries = ddp(images, batch.get("captions_q"))
            part_keys = {name: key.chunk(args.accumulate)[part] for name, key in keys.items()}
            losses = contrastive_losses(queries, part_keys, model.queues, args)
            loss = sum(lambdas[name] * losses[name] for name in losses)  # Eq. 15
            scaler.scale(loss / args.accumulate).backward()
            log.add(loss=loss, **losses)

        # Step, after which the keys enter the queues
        scaler.step(optimizer)
        scaler.update()
        model.enqueue(keys, iteration)

        # Log, validate, save
        validating = iteration == iters or iteration % validate_every == 0
        if validating or iteration % args.log_every == 0:
            row = log.means() | {"lr": args.lr * decay, "text_lr": args.text_lr * decay}
            bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
            if validating and common.is_main():
                if len(val):
                    print_main(f"validation after {iteration:,} of {iters:,} iterations:")
                result = validate(model.queries, val, tokenizer, args, device)
                row |= {f"validation_{name}": x for name, x in result["validation"].items()}
                # Before the checkpoint, so that no finished run lacks its result
                common.save(f"{args.output}/result.json", result)
            log.write(iteration, row)
        common.save_if_due(args, iteration, state, validated=validating)

    common.end_run(args, backbone, 'search "TEXT"' if args.lambda_ic else None)


# ------------------------------------------------------------------ photos and captions, two views


def usable_photos(args, data):
    """-> CaptionData of the photos that a loss can use; the number of tags in Eq. 5. Photos without
    a caption are of use only to Eqs. 3 and 5 [Sec. 3.2, end].
    """
    num_tags = 0
    if args.lambda_tag:
        if args.tags != "annotated":
            data = common.extra("nouns").tagged(args, data)
        sides = [tag for tag in data.tag_names if common.swap_left_right(tag) != tag]
        if sides:
            print_main(f"{len(sides)} tags are left out, because flips make them wrong: {sides[0]}")
            names = [tag for tag in data.tag_names if tag not in sides]
            tags = common.lists([tag for tag in row if tag not in sides] for row in data.tags)
            data = replace(data, tags=tags, tag_names=names)  # [ours]
        most = max(map(len, data.tags))
        num_tags = len(data.tag_names) if most else 0
        if not most:
            print_main("no photo has tags, so Eq. 5 is left out; --tags nouns needs only captions")
        elif most <= args.tag_threshold:
            print_main(f"no photo has more than {most} tags, so that Eq. 5 is the same as Eq. 3: "
                       "lower --tag-threshold")
    if (args.lambda_cc or args.lambda_ic) and not any(data.captions):
        fail("no photo has a caption: with --lambda-cc 0 --lambda-ic 0 --lambda-ci 0, photos alone "
             "are enough, as in MoCo")
    if args.lambda_ii or num_tags:
        return data, num_tags
    if not args.lambda_ic:
        fail("--lambda-ii and --lambda-ic are 0 and Eq. 5 is left out: nothing trains the backbone")
    return data.captioned(), 0


def retrieval_photos(data, seed):
    """Validation photos that have a caption, RETRIEVAL_IMAGES at most -> CaptionData"""
    if not any(data.captions):
        print_main("no validation photo has a caption, so retrieval is not measured")
        return data.select([])
    data = data.captioned()
    chosen = np.random.default_rng(seed).permutation(len(data))[:RETRIEVAL_IMAGES]
    return data.select(np.sort(chosen))


def read_backtranslations(args, data):
    """-> two lists like data.captions, via French and via German; [] if they are not used"""
    if args.caption_views != "backtranslation" or not (args.lambda_cc or args.lambda_ic):
        return []
    path = args.backtranslations or f"{args.output}/backtranslations.jsonl"
    lines = open(path, "rb") if os.path.isfile(path) else []
    rows = {row["caption"]: row for row in map(json.loads, lines)}
    missing = {*data.all_captions()} - rows.keys()
    if missing:
        fail(f"{len(missing)} captions have no back-translation in {path}: "
             "tools/backtranslate.py writes them; --caption-views sibling needs none")
    translations = []
    for language in "fr", "de":
        texts = {text: common.one_line(row[language]) or text for text, row in rows.items()}
        translations.append(common.lists([texts[text] for text in x] for x in data.captions))
    return translations


def fit_queue(args, num_photos):
    """K: a multiple of the batch, at most one key per photo [ours]

    Early in an epoch, the queue may hold the query's own photo, from the epoch before, as a
    negative. Of N photos this happens to (K / N)^2 / 2 of the queries: 4% on COCO, half if K = N.
    """
    size = min(args.queue, num_photos) // args.batch_size * args.batch_size
    if not size:
        fail(f"--queue {args.queue} or {num_photos} photos are fewer than a batch of "
             f"{args.batch_size}: lower --batch-size")
    if size != args.queue:
        print_main(f"queues of {size} keys instead of {args.queue}: a multiple of the batch, at "
                   "most one per photo; with shorter queues, raise --lambda-ic and --lambda-ci")
    return size


class TwoViews(common.Photos):
    """Two views of a photo and of a caption, for a query and for a key; in validation the centre"""

    def __init__(self, data, translations, args):
        super().__init__(data, args)
        self.translations = translations

    def sample(self, index, rng):
        if rng is None:
            return self.photo(index, rng)[0] | {"index": index}
        args = self.args
        crop = partial(common.random_crop, rng, args.crop_min)
        crops = common.read_crops(self.data, index, [crop, crop], args.image_size)
        photo_q, photo_k = map(torch.from_numpy, crops)
        if args.moco_v1:  # all four, hue too, vary by up to 0.4 [MoCo v1's code]
            limits = 0.4 * args.colour_jitter
            jitter = rng.uniform(common.NO_JITTER - limits, common.NO_JITTER + limits, (2, 4))
        else:
            jitter = np.stack([common.colour_jitter(rng, args.colour_jitter) for _ in range(2)])
        grey = rng.random(2) < args.greyscale
        jitter[grey, 2:] = 0  # saturation 0, so that there is no hue to rotate
        blurred = rng.random(2) < args.blur
        sigma = blurred * rng.uniform(0.1, 2.0, 2) * args.image_size / 224  # MoCo-v2; scale [ours]
        flip_q, flip_k = rng.random(2) < 0.5
        caption_q, caption_k = self.two_captions(index, rng)
        # Left and right follow the photo that a caption is compared with: photo q meets caption k
        # (Eq. 11), photo k meets caption q (Eq. 14). [ours: those of Eq. 8 may then disagree]
        if flip_q:
            photo_q = photo_q.flip(1)
            caption_k = common.swap_left_right(caption_k)
        if flip_k:
            photo_k = photo_k.flip(1)
            caption_q = common.swap_left_right(caption_q)
        return {
            "images": torch.stack([photo_q, photo_k]),
            "jitter": jitter,
            "sigma": sigma,
            "captions": [caption_q, caption_k],
            "captioned": bool(caption_q),
            "tags": np.isin(self.data.tag_names, self.data.tags[index]),
        }

    def two_captions(self, index, rng):
        """-> a random caption, and its second view, which alone is translated [Sec. 3.1; ours]"""
        captions = self.data.captions[index]
        if not captions:
            return ["", ""]
        n = rng.integers(len(captions))
        first = second = captions.pop(n)
        if self.args.caption_views == "sibling" and captions:
            second = rng.choice(captions)
        elif self.translations:
            second = self.translations[rng.integers(2)][index][n]  # via French or German
        return [first, second]


def collate(tokenizer, samples):
    """-> images uint8 (B, 2, size, size, 3), jitter (B, 2, 4), sigma (B, 2), tags (B, num_tags),
    captioned (B,); with a tokenizer also captions_q and captions_k: see `tokenize`
    """
    batch = default_collate(samples)
    captions_q, captions_k = batch.pop("captions")
    if tokenizer:
        batch["captions_q"] = tokenize(tokenizer, captions_q)
        batch["captions_k"] = tokenize(tokenizer, captions_k)
    return batch


def tokenize(tokenizer, captions):
    """-> (2, B, T): the tokens, and their attention mask, 0 at padding"""
    encoded = tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
    return torch.stack([encoded["input_ids"], encoded["attention_mask"]])


def augment_view(batch, n, args):
    """View 0 (for queries) or 1 (for keys) of the photos -> (B, 3, size, size)"""
    images = common.augment(batch["images"][:, n], batch["jitter"][:, n].float())
    if args.blur == 0:
        return images
    with common.autocast(images.device, args.amp):  # as the first convolution rounds them anyway
        return blur(images, batch["sigma"][:, n].float())


def blur(images, sigma):
    """Gaussian blur of images (B, 3, size, size), by sigma (B,) pixels each; 0: none [MoCo-v2]"""
    x = torch.arange(images.size(-1), device=images.device)
    distances = (x[:, None] - x) / sigma.clamp(min=1e-3)[:, None, None]
    weights = (-0.5 * distances**2).softmax(-1)[:, None]  # (B, 1, size, size)
    blurred = weights @ images.contiguous() @ weights.mT  # over rows and columns
    return blurred.contiguous(memory_format=torch.channels_last)


# -------------------------------------------------------------------------------------- encoders


def build_encoders(args, bert_config=None, bn_group=math.inf):
    """-> {"image": Encoder, "caption": Encoder (if there is a bert_config)}

    A space exists if a loss with a weight above 0 needs it: see contrastive_losses. The paper
    writes Phi_ik in both Eq. 7 and Eq. 10 for two MLPs that it calls distinct: caption_intra and
    caption_inter of the momentum encoder.  bn_group: of SplitBatchNorm
    """
    image_dims, caption_dims = {}, {}
    if args.lambda_ii or args.lambda_tag:  # Eqs. 3, 5
        image_dims["image_intra"] = args.intra_dim  # Eqs. 1, 2
    if args.lambda_cc:  # Eq. 8
        caption_dims["caption_intra"] = args.intra_dim  # Eqs. 6, 7
    if args.lambda_ic:  # Eqs. 11, 14
        image_dims["image_inter"] = args.inter_dim  # Eqs. 9, 13
        caption_dims["caption_inter"] = args.inter_dim  # Eqs. 12, 10
    norm_layer = partial(SplitBatchNorm, group=bn_group)
    backbone = common.build_backbone(args.arch, norm_layer=norm_layer)
    trunk = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoders = {"image": Encoder(trunk, backbone.channels, image_dims, args)}
    if bert_config:
        trunk = CaptionTrunk(bert_config)
        encoders["caption"] = Encoder(trunk, bert_config.hidden_size, caption_dims, args)
    return nn.ModuleDict(encoders)


class Encoder(nn.Module):
    """A trunk, and a 2-layer MLP for each space -> {name: (B, dim), of unit length} [Sec. 4.1]

    dims: {name: dim} of the spaces, which share one MLP if args.intra_dim is 0 [Sec. 4.4]
    """

    def __init__(self, trunk, width, dims, args):
        super().__init__()
        self.trunk = trunk
        if args.intra_dim:
            mlps = {name: build_mlp(width, args.mlp_hidden, dim) for name, dim in dims.items()}
        else:  # one for all spaces
            mlps = dict.fromkeys(dims, build_mlp(width, args.mlp_hidden, args.inter_dim))
        self.mlps = nn.ModuleDict(mlps)

    def forward(self, inputs):
        features = self.trunk(inputs)  # (B, width)
        return {name: F.normalize(mlp(features).float(), dim=1) for name, mlp in self.mlps.items()}


def build_mlp(width, hidden, dim):
    first = [nn.Linear(width, hidden), nn.ReLU()] if hidden else []
    return nn.Sequential(*first, nn.Linear(hidden or width, dim))


class CaptionTrunk(nn.Module):
    """BERT's pooled output [Sec. 4.1], or else the first token's vector: `tokenize` -> (B, d)"""

    def __init__(self, config):
        super().__init__()
        from transformers import AutoModel

        self.bert = AutoModel.from_config(config).float()  # some are published in half precision

    def forward(self, captions):
        tokens, mask = captions
        if self.bert.config._attn_implementation == "sdpa":
            mask = mask.bool()[:, None, None]  # (B, T) would make transformers wait for the GPU
        output = self.bert(input_ids=tokens, attention_mask=mask)
        pooled = output.get("pooler_output")
        return output.last_hidden_state[:, 0] if pooled is None else pooled


def load_caption_model(args, checkpoint, train, device):
    """-> BERT's tokenizer, its configuration, and where its weights are (None: random)"""
    if not (args.lambda_cc or args.lambda_ic):
        return None, None, None
    folder = f"{args.output}/caption_model"
    captions = train.all_captions()
    if common.is_main() and not checkpoint:  # once, for all processes and a run that resumes
        if args.lm == "scratch" and (args.lm_layers or args.lm_width or args.lm_iters):
            common.extra("small_bert").make_caption_model(folder, args, captions, device)
        else:  # "Ours (scratch)" of Tab. 1 has BERT's configuration and tokenizer
            source = "bert-base-uncased" if args.lm == "scratch" else args.lm
            tokenizer, config = common.load_lm_tokenizer(source, model_max_length=MAX_TOKENS)
            common.check_tokenizer(tokenizer, captions, f"--lm {source}")
            tokenizer.save_pretrained(folder)
            config.save_pretrained(folder)
    common.barrier()
    tokenizer, config = common.load_lm_tokenizer(folder)
    some = captions[:: 1 + len(captions) // 10_000]  # all would take a minute
    rows = tokenizer(some, add_special_tokens=False)["input_ids"]
    longest = tokenizer.model_max_length
    cut = sum(len(row) > longest - 2 for row in rows)  # [CLS] and [SEP] are added
    if cut > 0.01 * len(some):
        print_main(f"{cut} of {len(some)} captions are cut at {longest} tokens")
    if args.lm != "scratch":
        return tokenizer, config, args.lm
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    return tokenizer, config, folder if args.lm_iters else None


# ---------------------------------------------------------- queries, momentum encoders and queues


class MultimodalContrastive(nn.Module):
    """Encoders of photos and captions, their momentum copies, and the queues of keys (Fig. 2).

    A vector is named by its modality and its space:

                         query     key
        image_intra      Eq. 1     Eq. 2
        caption_intra    Eq. 6     Eq. 7
        image_inter      Eq. 9     Eq. 13
        caption_inter    Eq. 12    Eq. 10

    encoders: of build_encoders.  queue_size: K.  num_tags: 0 without Eq. 5
    """

    def __init__(self, encoders, queue_size, num_tags):
        super().__init__()
        self.queries = encoders
        self.keys = copy.deepcopy(encoders).requires_grad_(False)
        self.queues = nn.ModuleDict()
        for encoder in encoders.values():
            for name, mlp in encoder.mlps.items():
                self.queues[name] = Queue(queue_size, mlp[-1].out_features)
        if num_tags:  # floats 0 and 1: 10 MB for COCO, but 5 GB for Stock's 18,157 tags
            self.queues["tags"] = Queue(queue_size, num_tags)

    def forward(self, images, captions):
        """images (B, 3, h, w), captions (2, B, T) or None -> queries {name: (B, dim)}"""
        queries = self.queries["image"](images)  # Eqs. 1, 9
        if captions is not None:
            queries |= self.queries["caption"](captions)  # Eqs. 6, 12
        return queries

    @torch.no_grad()
    def encode_keys(self, images, captions, seed):
        """-> keys {name: (B, dim)} of this process.  captions: (2, B, T) or None per micro-batch

        Shuffled batch norm [MoCo]: keys are normalised in other groups than their queries. In the
        same group, a query could recognise its key by the group's statistics. Dropout is on [ours].
        """
        shuffled, unshuffle = batch_shuffle(images, seed)
        keys = self.keys["image"](shuffled)  # Eqs. 2, 13
        keys = {name: common.gather(key)[unshuffle] for name, key in keys.items()}
        if captions[0] is not None:
            encoded = [self.keys["caption"](part) for part in captions]  # Eqs. 7, 10
            for name in encoded[0]:
                keys[name] = torch.cat([key[name] for key in encoded])
        return keys

    @torch.no_grad()
    def enqueue(self, keys, iteration):
        """Replace the oldest keys by those of all processes; keys without a caption are invalid."""
        captioned = common.gather(keys["captioned"])
        for name, queue in self.queues.items():
            valid = captioned if name.startswith("caption") else torch.ones_like(captioned)
            queue.enqueue(common.gather(keys[name]), valid, iteration)


def batch_shuffle(images, seed):
    """-> this process's part of all photos in random order; where the keys of its own photos are"""
    images = common.gather(images)
    order = np.random.default_rng(seed).permutation(len(images))
    order = torch.from_numpy(order).to(images.device, non_blocking=True)
    here = order.chunk(common.world_size())[common.rank()]
    unshuffle = order.argsort().chunk(common.world_size())[common.rank()]
    return images[here].contiguous(memory_format=torch.channels_last), unshuffle


class Queue(nn.Module):
    """The last K keys, first in, first out. Invalid keys and empty slots are left out [ours]."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("valid", torch.zeros(size, dtype=torch.bool))

    def enqueue(self, keys, valid, iteration):
        """keys (B, dim), valid (B,): of iteration 1, 2, ...; K is a multiple of B"""
        start = (iteration - 1) * len(keys) % len(self.keys)
        self.keys[start : start + len(keys)] = keys
        self.valid[start : start + len(keys)] = valid


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm that computes its statistics for each `group` images of a training batch, as if
    each group were on a GPU of its own [MoCo]; other layers run once for the whole batch. Every
    group updates the running statistics [ours]; MoCo saves only those of the first GPU.
    """

    def __init__(self, channels, group):
        super().__init__(channels)
        self.group = group

    def forward(self, x):
        if not self.training or len(x) <= self.group:
            return super().forward(x)
        groups = x.split(self.group)
        self.num_batches_tracked.add_(len(groups))  # one kernel launch, not one a group
        state = self.running_mean, self.running_var, self.weight, self.bias
        parts = [F.batch_norm(group, *state, True, self.momentum, self.eps) for group in groups]
        return torch.cat(parts)


def batchnorm_group(args):
    """How many photos share batch-norm statistics: a micro-batch, or less with --bn-splits"""
    micro_batches = args.accumulate * common.world_size()
    groups = max(args.bn_splits, micro_batches)
    size = args.batch_size // groups
    if groups % micro_batches or args.batch_size % groups or size < 2:
        fail(f"--batch-size {args.batch_size} cannot be split into --bn-splits {groups} groups of "
             f"2 or more in {micro_batches} parts: lower --bn-splits, --accumulate or the number "
             "of processes")
    return size


@torch.no_grad()
def update_momentum(queries, keys, m):
    """theta_k <- m theta_k + (1 - m) theta_q, MLPs included [Sec. 3.1]"""
    torch._foreach_lerp_([*keys.parameters()], [*queries.parameters()], 1 - m)


# ---------------------------------------------------------------------------------------- losses


def contrastive_losses(q, k, queues, args):
    """-> {"ii", "tag", "cc", "ic", "ci": scalar}, means over the batch [ours]. A loss of weight 0
    is left out (but ii is logged beside tag), and so is Eq. 5 if no photo has tags.
    q, k: {name: (B, dim)} of the same photos; k also has tags (B, num_tags) and captioned (B,).
    A photo without tags adds 0 to Eq. 5, one without a caption adds 0 to Eqs. 8, 11 and 14.
    """

    def similarities(query, key):
        """q . k+, then q . k for each key of the queue, -inf if it is invalid -> (B, 1 + K)"""
        positive = (q[query] * k[key]).sum(1, keepdim=True)
        negatives = q[query] @ queues[key].keys.T
        negatives = negatives.masked_fill(~queues[key].valid, -math.inf)
        return torch.cat([positive, negatives], 1)

    def log_probabilities(name):
        """The logarithms in Eqs. 3, 5 and 8, where query and key are of one modality"""
        return (similarities(name, name) / args.temperature).log_softmax(1)

    losses, captioned = {}, k["captioned"]
    if args.lambda_ii or args.lambda_tag:
        log_p = log_probabilities("image_intra")
        losses["ii"] = -log_p[:, 0].mean()  # Eq. 3
        if "tags" in queues:
            loss = tag_loss(log_p, k["tags"], queues["tags"], args.tag_threshold)
            losses["tag"] = (loss * k["tags"].any(1)).mean()  # Eq. 5
    if args.lambda_cc:
        log_p = log_probabilities("caption_intra")
        losses["cc"] = (-log_p[:, 0] * captioned).mean()  # Eq. 8
    if args.lambda_ic:  # and lambda_ci: get_args
        loss = ranking_loss(similarities("image_inter", "caption_inter"))
        losses["ic"] = (loss * captioned).mean()  # Eq. 11
        loss = ranking_loss(similarities("caption_inter", "image_inter"))
        losses["ci"] = (loss * captioned).mean()  # Eq. 14
    return losses


def tag_loss(log_p, tags, queue, threshold):
    """Eq. 5.  log_p (B, 1 + K), tags (B, num_tags) of 0 and 1, queue (K, num_tags) -> (B,)"""
    common_tags = tags.float() @ queue.keys.T  # (B, K): t_p . t_j
    in_queue = (common_tags > threshold) & queue.valid
    positives = F.pad(in_queue, (1, 0), value=True)  # Eq. 4, and the photo's own key
    return -log_p.masked_fill(~positives, 0).sum(1) / positives.sum(1)  # Eq. 5


def ranking_loss(similarities):
    """Eq. 11, Eq. 14: the sum over the queue of [alpha - q . k+ + q . k]_+ -> (B,)"""
    positive, negatives = similarities[:, :1], similarities[:, 1:]
    return (MARGIN - positive + negatives).clamp(min=0).sum(1)


# ------------------------------------------------------------------------------------- retrieval


@torch.no_grad()
def encode_images(encoder, data, args, device):
    """Photos in the common space -> (N, inter_dim) on the CPU; the indices of those N that could be
    decoded.  data: CaptionData or similar.  args: of the training run
    """
    vectors = {}
    for batch in common.load_batches(TwoViews(data, [], args), None, args, device):
        with common.autocast(device, args.amp):
            output = encoder(common.augment(batch["image"]))
        vectors |= zip(batch["index"].tolist(), output["image_inter"].cpu())
    return torch.stack([*vectors.values()]), [*vectors]


@torch.no_grad()
def encode_captions(encoder, tokenizer, captions, args, device):
    """M captions in the common space -> (M, inter_dim) on the CPU"""
    vectors = []
    for tokens in DataLoader(captions, 256, collate_fn=partial(tokenize, tokenizer)):
        with common.autocast(device, args.amp):
            output = encoder(tokens.to(device))
        vectors.append(output["caption_inter"].cpu())
    return torch.cat(vectors)


def validate(encoders, val, tokenizer, args, device):
    """Retrieval among validation photos [Tab. 7] -> content of result.json

    "validation": {"image_to_text_R@10": percent, "text_to_image_R@10"}, {} without photos;
    "retrieval": numbers of "images" (N) and "captions" (M), scores "trained", and "random" ones
    """
    if not len(val):
        return {"validation": {}}
    encoders.eval()
    images, readable = encode_images(encoders["image"], val, args, device)
    val = val.select(readable)
    captions = encode_captions(encoders["caption"], tokenizer, val.all_captions(), args, device)
    encoders.train()
    image_of_caption = torch.tensor([i for i, row in enumerate(val.captions) for _ in row])
    trained = images @ captions.T  # (N, M)
    chance = torch.rand(trained.shape, generator=torch.Generator().manual_seed(args.seed))
    result = {"images": len(images), "captions": len(captions)}
    for name, similarity in {"trained": trained, "random": chance}.items():
        result[name] = retrieval_scores(similarity, image_of_caption)
    for way in result["trained"]:
        rows = {"this model": result["trained"][way], "random": result["random"][way]}
        common.print_table(f"{way}, of {len(images):,} photos", rows)
    to_text, to_image = result["trained"]["image to text"], result["trained"]["text to image"]
    validation = {"image_to_text_R@10": to_text["R@10"], "text_to_image_R@10": to_image["R@10"]}
    return {"validation": validation, "retrieval": result}


def retrieval_scores(similarity, image_of_caption):
    """-> {"image to text", "text to image": {"R@1", "R@5", "R@10": percent, "median rank"}}

    similarity: (N images, M captions).  image_of_caption: (M,).  An image's rank is that of its
    best caption. Equal similarities share their mean rank, so that a model that embeds everything
    alike gets no credit [ours].
    """
    similarity = similarity.nan_to_num(-math.inf)  # NaN embeddings come last
    matching = image_of_caption == torch.arange(len(similarity))[:, None]  # (N, M)
    scores = {}
    for way, dim in {"image to text": 1, "text to image": 0}.items():
        best = similarity.masked_fill(~matching, -math.inf).amax(dim, keepdim=True)
        ties = (similarity == best) & ~matching
        ranks = (similarity > best).sum(dim) + ties.sum(dim) / 2  # counted from 0
        scores[way] = {f"R@{k}": 100 * (ranks <= k - 1).float().mean().item() for k in (1, 5, 10)}
        scores[way]["median rank"] = math.floor(np.median(ranks)) + 1  # [VSE++ code]
    return scores


if __name__ == "__main__":
    main(get_args())
