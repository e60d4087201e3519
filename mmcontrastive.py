"""Multimodal contrastive training: a backbone learned by matching photos and captions.

Yuan, Lin, Kuen, Zhang, Wang, Maire, Kale, Faieta. Multimodal Contrastive Training for Visual
Representation Learning. CVPR 2021.

Two views of a photo should be more similar than views of different photos (Eq. 3, as in MoCo-v2),
and so should two paraphrases of a caption (Eq. 8), a photo and its caption (Eqs. 11, 14), and
photos with common tags (Eq. 5). A query is compared with its own key and with a queue of earlier
keys; momentum encoders compute the keys. Similarities within a modality and between modalities are
measured in separate spaces, each with its own MLPs [Sec. 3.2].

    laptop        python mmcontrastive.py
    own photos    python mmcontrastive.py --data photos.jsonl
    MoCo-v2       python mmcontrastive.py --data coco --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 \\
                      --lambda-tag 0
    for COCO      python tools/backtranslate.py --data coco \\
                      --output runs/mmcontrastive-coco/backtranslations.jsonl   (once)
    one GPU       python mmcontrastive.py --data coco --accumulate 8
    eight GPUs    torchrun --nproc_per_node=8 mmcontrastive.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 mmcontrastive.py --data coco   (shared --output)
    search        python -m downstream.search "a dog in the snow" "two children" --root photos

Where the paper is:

    Eqs. 1, 6, 9, 12, queries                MultimodalContrastive.forward
    Eqs. 2, 7, 10, 13, keys                  MultimodalContrastive.encode_keys
    momentum encoders, queues [Sec. 3.1]     update_momentum, Queue
    Eqs. 3, 4, 5, 8, the losses              contrastive_losses, log_probabilities
    Eqs. 11, 14, between the modalities      ranking_loss
    Eq. 15, their weighted sum               main
    views of photos and captions [Sec. 4.1]  make_sample, caption_views
    retrieval without fine-tuning [Tab. 7]   validate

What to expect: the losses start near 0 and rise while the queues fill, because empty slots do not
count: `ii` and `cc` towards ln(K + 1), `ic` and `ci` towards K times the margin. Then they fall. A
run ends with retrieval scores from photos to captions and back (Tab. 7). See docs/logs.

If training stalls on few photos, use a --queue of 8 to 16 batches, --lambda-ic and --lambda-ci from
25 / K to 100 / K, --momentum m close to 1 but with 1 / (1 - m) well below the number of iterations,
and a pretrained caption encoder (--lm, or --lm scratch --lm-iters N): docs/mmcontrastive.md.
"""

import copy
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
import language
from common import error_context, fraction, positive, positive_int, print_main, progress, require

eval_linear = common.import_if_there("eval_linear")  # the probe at the end

# fmt: off
RECIPES = {  #           demo        small       paper
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.1
    "image_size":       (48,         112,        224),                  # Sec. 4.1
    "crop_min":         (1.0,        0.2,        0.2),                  # Sec. 4.1: MoCo-v2
    "colour_jitter":    (0.0,        0.4,        1.0),                  # Sec. 4.1: MoCo-v2
    "greyscale":        (0.0,        0.0,        0.2),                  # Sec. 4.1: MoCo-v2
    "blur":             (0.0,        0.0,        0.5),                  # Sec. 4.1: MoCo-v2
    "caption_views":    ("sibling",  "sibling",  "backtranslation"),    # Sec. 4.1
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 4.1
    "lm_iters":         (0,          2000,       0),                    # ours
    "lm_layers":        (2,          4,          None),                 # of scratch; None: as
    "lm_width":         (128,        256,        None),                 # bert-base-uncased
    "dropout":          (0.0,        0.1,        0.1),                  # of scratch; BERT: 0.1
    "mlp_hidden":       (512,        1024,       2048),                 # Sec. 4.1
    "queue":            (256,        512,        32_768),               # Sec. 4.1
    "momentum":         (0.993,      0.998,      0.999),                # Sec. 4.1
    "bn_splits":        (1,          4,          8),                    # MoCo: 8 GPUs
    "tags":             ("nouns",    "annotated", "annotated"),         # Sec. 4.1; nouns: Sec. 4.4
    "tag_threshold":    (1,          2,          2),                    # Sec. 4.1
    "lambda_ii":        (0.2,        1.0,        1.0),                  # Sec. 4.1
    "lambda_tag":       (2.0,        None,       None),                 # Sec. 4.1; None: 1 or 0
    "lambda_ic":        (0.2,        0.2,        1e-4),                 # Sec. 4.1
    "lambda_ci":        (0.2,        0.2,        1e-4),                 # Sec. 4.1
    "batch_size":       (32,         64,         512),                  # Sec. 4.1
    "iters":            (440,        None,       None),
    "epochs":           (None,       15.0,       200.0),                # Sec. 4.1
    "optimizer":        ("adamw",    "adamw",    "sgd"),                # Sec. 4.1
    "lr":               (1e-3,       1e-3,       0.03),                 # Sec. 4.1
    "text_lr":          (5e-4,       3e-4,       4e-5),                 # Sec. 4.1
    "warmup":           (0.05,       0.1,        0.0),
    "weight_decay":     (1e-2,       1e-2,       1e-4),                 # Sec. 4.1
    "log_every":        (10,         20,         20),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
# fmt: on
MARGIN = 0.2  # alpha of Eqs. 11, 14 [Sec. 4.1]
RETRIEVAL_IMAGES = 1000  # of the validation split [Tab. 7]
MAX_TOKENS = 64  # longer captions are truncated [ours]
NUM_NOUNS = 1000  # used as tags with --tags nouns [ours]
CAPTION_VIEWS = "same", "sibling", "backtranslation"


def get_args(argv=None):
    # fmt: off
    recipe = common.choose_recipe(RECIPES, argv)
    parser = common.flag_parser("mmcontrastive", __doc__, recipe)

    add = parser.add_argument_group("views of photos and captions [Sec. 4.1]").add_argument
    add("--moco-v1", action="store_true", help="MoCo v1's colour jitter on every photo, no blur")
    add("--caption-views", choices=CAPTION_VIEWS,
        help="one caption twice (dropout differs), two of a photo, or one and its back-translation")
    add("--backtranslations", help="file of tools/backtranslate.py (default: in --output)")

    add = parser.add_argument_group("model [Sec. 4.1]").add_argument
    add("--init", help="start from a backbone, a checkpoint.pth with its heads, or imagenet")
    add("--lm", help="caption encoder: BERT from the hub or a folder; scratch: random weights")
    add("--lm-iters", type=int,
        help="iterations of masked language modelling that --lm scratch gets first; 0: none")
    add("--mlp-hidden", type=int, help="hidden width of the MLPs; 0: linear, as in MoCo v1")
    add("--intra-dim", type=int, default=128,
        help="width of the intra-modal spaces; 0: one MLP for both, of --inter-dim [Sec. 4.4]")
    add("--inter-dim", type=positive_int, default=1024, help="width of the common space [Sec. 4.4]")
    add("--queue", type=positive_int, help="K, keys to compare with; lower it for few photos")
    add("--momentum", type=fraction, help="m of the momentum encoders; lower for short runs")
    add("--bn-splits", type=positive_int,
        help="groups of shuffled batch norm; with 1, batch statistics give the key away [MoCo]")

    add = parser.add_argument_group("losses and their weights [Sec. 4.1]").add_argument
    add("--lambda-ii", type=float, help="Eq. 3, photo to photo")
    add("--lambda-tag", type=float,
        help="Eq. 5, photos with common tags; without a default: 1 if there are tags, else 0")
    add("--lambda-cc", type=float, default=1.0, help="Eq. 8, caption to caption")
    add("--lambda-ic", type=float, help="Eq. 11, photo to captions; raise it for short queues")
    add("--lambda-ci", type=float, help="Eq. 14, caption to photos; raise it for short queues")
    add("--temperature", type=positive, default=0.07, help="tau of Eqs. 3, 5, 8")
    add("--tags", choices=("annotated", "nouns", "nouns-spacy"),
        help="for Eq. 5: from --data, or the captions' nouns found by TextBlob or spaCy [Sec. 4.4]")
    add("--tag-threshold", type=float, help="epsilon of Eq. 4; 0 if photos have few tags")
    add("--steps", type=fraction, nargs="+",
        help="divide lr by 10 after these fractions of training, no cosine; MoCo v1: 0.6 0.8")
    add("--text-lr", type=positive, help="learning rate of the caption encoder (default "
        f"{recipe['text_lr']:g}, scaled as --lr); 4e-5 suits a pretrained BERT")
    # fmt: on

    args = common.parse(parser, argv)
    batch_scale = args.batch_size / recipe["batch_size"]  # linear scaling with the batch
    args.lr = args.lr or batch_scale * recipe["lr"]
    args.text_lr = args.text_lr or batch_scale * recipe["text_lr"]
    if bool(args.lambda_ic) != bool(args.lambda_ci):  # one alone leaves its keys untrained
        parser.error("--lambda-ic and --lambda-ci go together: give both, or 0 for both")
    if args.moco_v1:
        args.blur = 0.0
    parts = int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate
    groups = max(args.bn_splits, parts)
    if groups % parts or args.batch_size % groups or args.batch_size < 2 * groups:
        parser.error(f"--batch-size {args.batch_size} cannot be split into --bn-splits {groups} "
                     f"groups of two or more in {parts} parts (processes, accumulate)")  # fmt: skip
    return args


def main(args):
    world = common.init_distributed()
    device = world.device
    args.amp = common.choose_amp(device, args.amp)

    # Data: some photos may have no captions or no tags [Sec. 3.2, end].
    train = common.caption_data(args.data, args.root, args.train_split)
    val = common.caption_data(args.data, args.root, args.val_split)
    same_tags = args.tags == "annotated" and args.lambda_tag != 0
    probe = eval_linear and eval_linear.Probe(args, train, val, same_tags)
    if args.tags != "annotated" and args.lambda_tag != 0:
        train = tagged_by_nouns(train, "spacy" if args.tags == "nouns-spacy" else "textblob")
    args.lambda_tag = tag_weight(train, args.lambda_tag)
    train = usable_photos(train, args)
    translations = read_backtranslations(train, args)
    queue_size = fit_queue(args.queue, len(train), args.batch_size)
    run = common.Run(args, "mmcontrastive", world, train)
    tokenizer, bert_config, pretrained = load_caption_model(args, train, run)
    iters = args.iters or math.ceil(args.epochs * len(train) / args.batch_size)
    sizes = f"{len(train)} photos ({len(val)} for validation), {sum(train.num_captions)} captions"
    lrs = f"lr {args.lr:g}, text lr {args.text_lr:g}"
    print_main(f"{sizes}, {len(train.tag_names or ())} tags; {iters} iterations at {lrs}")

    # Encoders, momentum encoders, queues, optimizer: restored from a checkpoint if there is one.
    torch.manual_seed(args.seed)
    encoders = build_encoders(args, bert_config)
    if pretrained:
        load_pretrained(encoders["caption"].trunk.bert, pretrained)
    run.initialize(encoders, encoders["image"].trunk[0], prefix="queries.")
    num_tags = len(train.tag_names) if args.lambda_tag else 0
    bn_group = args.batch_size // max(args.bn_splits, args.accumulate * world.size)
    model = MultimodalContrastive(encoders, queue_size, num_tags, bn_group)
    model.to(device, memory_format=torch.channels_last)
    backbone = model.queries["image"].trunk[0]
    rates = {"image": args.lr, "caption": args.text_lr}
    groups = [{"params": encoders[name].parameters(), "lr": rates[name]} for name in encoders]
    optimizer = common.build_optimizer(args.optimizer, groups, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(make_sample, train, translations, args), len(train))
    for iteration, micro_batches in run.steps(samples, partial(collate, tokenizer), iters):
        lr_scale = common.lr_factor(iteration - 1, iters, args.warmup, args.steps)
        common.set_lr(optimizer, lr_scale)
        optimizer.zero_grad()
        update_momentum(model.queries, model.keys, args.momentum)

        # The keys of all micro-batches at once: they need no gradient, and shuffled batch norm sees
        # the whole batch. (From here on dropout continues from the last micro-batch's seed.)
        batches = list(micro_batches)
        tags = torch.cat([batch["tags"] for batch in batches])  # (B, num_tags) of 0 and 1
        captioned = torch.cat([batch["captioned"] for batch in batches])  # (B,)
        images_k = torch.cat([augment_view(batch["k"], args) for batch in batches])  # (B, 3, h, w)
        captions_k = [batch["k"].get("captions") for batch in batches]
        with common.autocast(device, args.amp):  # {"image_intra": (B, 128), ...}
            keys = model.encode_keys(images_k, captions_k, (args.seed, iteration), world)

        for n, batch in enumerate(batches):
            parallel.require_backward_grad_sync = n + 1 == args.accumulate  # DDP: one all-reduce
            images_q = augment_view(batch["q"], args)
            captions_q = batch["q"].get("captions")  # tokens and attention mask (B, T), or None
            with common.autocast(device, args.amp):
                queries = parallel(images_q, captions_q)
            own_keys = {}
            for name, key in keys.items():
                own_keys[name] = key.chunk(args.accumulate)[n]
            losses = contrastive_losses(
                queries,
                own_keys,
                model.queues,
                batch["tags"],
                batch["captioned"],
                temperature=args.temperature,
                threshold=args.tag_threshold,
            )
            # Eq. 15: lambda_ii J_ii + lambda_tag J_tag + ...
            loss = sum(getattr(args, f"lambda_{name}") * losses[name] for name in losses)
            scaler.scale(loss / args.accumulate).backward()
            run.log(loss=loss, **losses)
        scaler.step(optimizer)
        scaler.update()
        model.enqueue(keys, tags, captioned, iteration, world)
        run.log(lr=args.lr * lr_scale, text_lr=args.text_lr * lr_scale)

    # The backbone is the result; the probe evaluates it.
    if world.is_main:
        common.save_weights(run.folder / "backbone.pth", backbone)
        result = validate(model.queries, val, tokenizer, args, device) if args.lambda_ic else {}
        run.finish(probe, backbone, **result)


# -------------------------------------------------- photos, tags, captions that the losses can use


def tagged_by_nouns(data, tagger):
    """-> CaptionData whose tags are the most frequent nouns of its captions [Sec. 4.4]"""
    concepts = language.count_concepts(data.all_captions(), tagger)
    nouns = language.top_concepts(concepts, "nn", NUM_NOUNS)
    sides = "left", "right"  # wrong in a flipped photo
    nouns = [noun for noun in nouns if noun not in sides]
    labels = language.concept_labels(data, nouns)
    tags = [[nouns[k] for k in row] for row in np.split(labels.indices, labels.indptr[1:-1])]
    return replace(data, tags=common.join_lines(tags), tag_names=nouns)


def tag_weight(data, requested):
    """lambda_tag as requested; by default 1 if photos have tags, otherwise 0 [Sec. 4.1]"""
    tagged = any(data.tags)
    if requested is None and not tagged:
        print_main("no photo has tags: the loss of Eq. 5 is left out (see --tags nouns)")
        return 0.0
    source = 'annotations/instances_{split}.json for coco, "tags" in a .jsonl, or --tags nouns'
    require(tagged or not requested, f"--lambda-tag needs tags and no photo has any: {source}")
    return 1.0 if requested is None else requested


def uses_captions(args):
    return args.lambda_cc > 0 or args.lambda_ic > 0


def usable_photos(data, args):
    """-> CaptionData; only Eqs. 3 and 5 can use photos without a caption [Sec. 3.2, end]"""
    trained = args.lambda_ii or args.lambda_tag or args.lambda_ic
    require(trained, "--lambda-ii, --lambda-tag, --lambda-ic are 0: nothing trains the backbone")
    possible = any(data.num_captions) or not uses_captions(args)
    hint = "with --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 photos are enough (MoCo-v2)"
    require(possible, f"no photo has a caption: {hint}")
    return data if args.lambda_ii or args.lambda_tag else data.captioned()


def fit_queue(requested, num_photos, batch_size):
    """K: a multiple of the batch, at most one key per photo

    With K close to the number of photos N, many queries have an older key of their own photo among
    the negatives: a fraction (K / N)^2 / 2 of them, 4% on COCO, half at K = N.
    """
    size = min(requested, num_photos) // batch_size * batch_size
    require(size, f"--queue {requested} or {num_photos} photos are fewer than a batch of "
                  f"{batch_size}: lower --batch-size")  # fmt: skip
    if size != requested:
        print_main(f"queues of {size} keys instead of {requested}: a multiple of the batch, at "
                   "most one per photo; raise --lambda-ic, --lambda-ci as 1 / K")  # fmt: skip
    return size


def read_backtranslations(data, args):
    """CaptionData with back-translations as its captions: [via French, via German]

    [] if they are not used.
    """
    if args.caption_views != "backtranslation" or not uses_captions(args):
        return []
    path = args.backtranslations or Path(args.output, "backtranslations.jsonl")
    hint = f"tools/backtranslate.py writes {path}; --caption-views sibling needs none"
    with error_context(hint), open(path, encoding="utf-8") as file:
        rows = {row["caption"]: row for row in map(json.loads, file)}
    captions = data.all_captions()
    missing = sum(caption not in rows for caption in captions)
    require(not missing, f"{missing} of {len(captions)} captions have no back-translation: {hint}")
    translations = []
    for by in ("fr", "de"):
        translated = []
        for i in range(len(data)):
            translated.append([rows[c][by].strip() or c for c in data.captions_of(i)])
        translations.append(data.with_captions(translated))
    return translations


# ------------------------------------------------------------------------------------- two views


def make_sample(data, translations, args, index, rng):
    """Two views of a photo and of one of its captions: "q" for the queries and "k" for the keys"""
    crop = partial(common.random_crop, rng, args.crop_min)
    images = common.read_crops(data.images[index], [crop, crop], args.image_size)
    draw = moco_v1_jitter if args.moco_v1 else common.colour_jitter
    jitter = np.stack([draw(rng, args.colour_jitter) for _ in images])
    jitter[rng.random(2) < args.greyscale, 2:] = 0  # grey: saturation 0, so no hue to rotate
    blurred = rng.random(2) < args.blur
    sigma = np.where(blurred, rng.uniform(0.1, 2.0, 2), 0)  # MoCo-v2's, at 224 pixels
    sigma = (sigma * args.image_size / 224).astype(np.float32)
    flipped = rng.random(2) < 0.5

    # Caption n is compared with photo 1 - n (Eqs. 9 to 13), so its left and right are swapped if
    # that photo is flipped. [ours: the captions of Eq. 8 then disagree in half of the samples]
    captions = caption_views(data, index, args.caption_views, translations, rng)
    views = []
    for n in (0, 1):
        image = images[n][:, ::-1] if flipped[n] else images[n]
        caption = common.swap_left_right(captions[n]) if flipped[1 - n] else captions[n]
        views.append({"image": image, "jitter": jitter[n], "sigma": sigma[n], "caption": caption})
    tags = np.zeros(len(data.tag_names or ()), bool)
    tags[data.tags_of(index)] = True
    captioned = data.num_captions[index] > 0
    return {"q": views[0], "k": views[1], "tags": tags, "captioned": captioned}


def moco_v1_jitter(rng, strength):
    """Like common.colour_jitter, but all four vary by up to 0.4, on every photo [MoCo v1's code]"""
    limits = 0.4 * strength
    return rng.uniform(common.NO_JITTER - limits, common.NO_JITTER + limits).astype(np.float32)


def caption_views(data, index, kind, translations, rng):
    """Two views of one of the photo's captions [Sec. 3.1]; two empty strings if it has none

    kind: --caption-views. With back-translation, the first view is the caption itself. [ours]
    """
    captions = data.captions_of(index)
    if not captions:
        return "", ""
    n = rng.integers(len(captions))
    caption = captions[n]
    siblings = captions[:n] + captions[n + 1 :]
    if kind == "sibling" and siblings:
        return caption, siblings[rng.integers(len(siblings))]
    if translations:
        translated = translations[rng.integers(len(translations))]
        return caption, translated.captions_of(index)[n]
    return caption, caption


def collate(tokenizer, samples):
    """-> tags (B, num_tags), captioned (B,), and the views "q" and "k": image uint8
    (B, size, size, 3), jitter (B, 4), sigma (B,) in pixels

    With a tokenizer each view also has captions: tokens and attention mask (B, T).
    """
    batch = {name: common.stack(samples, name) for name in ("tags", "captioned")}
    for name in ("q", "k"):
        views = [sample[name] for sample in samples]
        batch[name] = {part: common.stack(views, part) for part in ("image", "jitter", "sigma")}
        if tokenizer:
            batch[name]["captions"] = tokenize(tokenizer, [view["caption"] for view in views])
    return batch


def tokenize(tokenizer, captions):
    """-> tokens (B, T), attention mask (B, T): False at padding"""
    encoded = tokenizer(
        captions, return_tensors="pt", padding=True, truncation=True, max_length=MAX_TOKENS
    )
    return [encoded["input_ids"], encoded["attention_mask"].bool()]


def augment_view(view, args):
    """-> images (B, 3, size, size)

    The blur runs in the precision of --amp: the first convolution would round its output anyway.
    """
    images = common.augment(view["image"], view["jitter"])
    if args.blur == 0:
        return images
    with common.autocast(images.device, args.amp):
        return blur(images, view["sigma"])


def blur(images, sigma):
    """Gaussian blur of each image (B, 3, size, size) by its sigma (B,) in pixels; 0 for none

    Two matrix products, over rows and columns. The weights sum to one, so pixels may already be
    normalised. [MoCo-v2]
    """
    pixels = torch.arange(images.size(-1), device=images.device, dtype=torch.float32)
    distance = pixels[:, None] - pixels
    sigma = sigma.clamp(min=1e-3)[:, None, None]
    weights = (-0.5 * (distance / sigma) ** 2).softmax(-1)[:, None]  # (B, 1, size, size)
    blurred = weights @ images.contiguous() @ weights.mT
    return blurred.contiguous(memory_format=torch.channels_last)


# -------------------------------------------------------------------------------------- encoders


def build_encoders(args, bert_config=None):
    """-> {"image": Encoder, "caption": Encoder (if there is a bert_config)}

    Spaces that no loss uses have no MLP. The paper writes Phi_ik in both Eq. 7 and Eq. 10 for two
    MLPs that it calls distinct: caption_intra and caption_inter of the momentum encoder.
    """
    unified = not args.intra_dim
    intra_dim = args.intra_dim or args.inter_dim
    image_dims = {}
    caption_dims = {}
    if args.lambda_ii or args.lambda_tag:
        image_dims["image_intra"] = intra_dim  # Eqs. 1, 2
    if args.lambda_cc:
        caption_dims["caption_intra"] = intra_dim  # Eqs. 6, 7
    if args.lambda_ic:
        image_dims["image_inter"] = args.inter_dim  # Eqs. 9, 13
        caption_dims["caption_inter"] = args.inter_dim  # Eqs. 12, 10
    encoders = nn.ModuleDict()
    backbone = common.build_backbone(args.arch)
    trunk = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    width = backbone.channels
    encoders["image"] = Encoder(trunk, width, image_dims, args.mlp_hidden, unified)
    if bert_config:
        trunk = CaptionTrunk(bert_config)
        width = bert_config.hidden_size
        encoders["caption"] = Encoder(trunk, width, caption_dims, args.mlp_hidden, unified)
    return encoders


class Encoder(nn.Module):
    """A trunk, and a 2-layer MLP for each space -> {name: (B, dim), of unit length} [Sec. 4.1]

    dims: {name: dim} of the spaces.  unified: all spaces share one MLP [Sec. 4.4]
    """

    def __init__(self, trunk, width, dims, hidden, unified=False):
        super().__init__()
        self.trunk = trunk
        if unified:
            mlps = dict.fromkeys(dims, build_mlp(width, hidden, max(dims.values())))
        else:
            mlps = {name: build_mlp(width, hidden, dim) for name, dim in dims.items()}
        self.mlps = nn.ModuleDict(mlps)

    def forward(self, *inputs):
        features = self.trunk(*inputs)  # (B, width)
        return {name: F.normalize(mlp(features).float(), dim=1) for name, mlp in self.mlps.items()}


def build_mlp(width, hidden, dim):
    if not hidden:
        return nn.Sequential(nn.Linear(width, dim))
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class CaptionTrunk(nn.Module):
    """The pooled output of a BERT-like model, or its first token's if it has no pooler

    tokens, attention mask (B, T) -> (B, d)
    """

    def __init__(self, config):
        super().__init__()
        bert = language.quiet_transformers().AutoModel.from_config(config)
        self.bert = bert.float()  # some are published in half precision

    def forward(self, tokens, attention_mask):
        mask = language.attention_mask(self.bert, attention_mask)
        output = self.bert(input_ids=tokens, attention_mask=mask)
        pooled = output.get("pooler_output")
        return output.last_hidden_state[:, 0] if pooled is None else pooled


def load_caption_model(args, train, run):
    """-> tokenizer, configuration of BERT, source of its initial weights (None: random)

    Tokenizer and configuration are kept in --output/caption_model.
    """
    if not uses_captions(args):
        return None, None, None
    folder = run.folder / "caption_model"
    pretrained = args.lm
    if args.lm == "scratch":
        pretrained = run.folder / "language_model" if args.lm_iters else None
    if "model" in run.saved:
        pretrained = None  # the checkpoint has the weights
    if run.world.is_main and not run.iteration:
        captions = train.all_captions()
        if pretrained and args.lm == "scratch":
            language.scratch_language_model(
                pretrained,
                captions,
                args.lm_iters,
                args.seed,
                run.world.device,
                args.amp,
                layers=args.lm_layers or 12,
                width=args.lm_width or 768,
            )
        if "model" in run.saved:
            initial = Path(args.init).parent
            tokenizer, config = read_caption_model(initial / "caption_model")
        elif pretrained:
            tokenizer, config = read_caption_model(pretrained)
        else:
            tokenizer, config = small_bert(args, captions)
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
    common.barrier(run.world)
    tokenizer, config = read_caption_model(folder)
    if args.lm == "scratch":
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    return tokenizer, config, pretrained


def small_bert(args, captions):
    """--lm scratch --lm-iters 0 -> tokenizer, configuration"""
    if not args.lm_layers:  # "Ours (scratch)" of Tab. 1
        return read_caption_model("bert-base-uncased")
    tokenizer = language.train_wordpiece(captions)
    # With BERT's 0.02, all captions start with nearly the same vector. [ours]
    std = args.lm_width**-0.5
    config = language.bert_config(tokenizer, args.lm_layers, args.lm_width, initializer_range=std)
    return tokenizer, config


def read_caption_model(name):
    """name: on the hub, or a folder -> tokenizer, configuration"""
    transformers = language.quiet_transformers()
    with error_context(f"--lm {name}: give a BERT of the hub, its folder, or scratch"):
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    return tokenizer, config


def load_pretrained(bert, name):
    """Start from the weights of `name`. A missing pooler is randomly initialised."""
    load = language.quiet_transformers().AutoModel.from_pretrained
    with error_context(f"--lm {name}: give a BERT of the hub, its folder, or scratch"):
        pretrained, report = load(name, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        print_main(f"{name} lacks {', '.join(missing[:3])}: randomly initialised")
    bert.load_state_dict(pretrained.state_dict())


# ---------------------------------------------------------- queries, momentum encoders and queues


class MultimodalContrastive(nn.Module):
    """Encoders of photos and captions, their momentum copies, and the queues of keys (Fig. 2).

    A vector is named by its modality and its space:

                         query     key
        image_intra      Eq. 1     Eq. 2
        caption_intra    Eq. 6     Eq. 7
        image_inter      Eq. 9     Eq. 13
        caption_inter    Eq. 12    Eq. 10

    encoders: of build_encoders.  queue_size: K.  num_tags: 0 without Eq. 5.  bn_group: number of
    images normalised together (None: all of a process)
    """

    def __init__(self, encoders, queue_size, num_tags, bn_group=None):
        super().__init__()
        if bn_group:
            convert_split_batchnorm(encoders, bn_group)
        self.queries = encoders
        self.keys = copy.deepcopy(encoders).requires_grad_(False)
        self.queues = nn.ModuleDict()
        for encoder in encoders.values():
            for name, mlp in encoder.mlps.items():
                self.queues[name] = Queue(queue_size, mlp[-1].out_features)
        if num_tags:  # floats 0 and 1: 10 MB for COCO, but 5 GB for Stock's 18,157 tags
            self.queues["tags"] = Queue(queue_size, num_tags)

    def forward(self, images, captions):
        """-> queries {name: (B, dim)}

        images (B, 3, h, w).  captions: tokens, attention mask (B, T), or None
        """
        queries = self.queries["image"](images)
        if captions:
            queries |= self.queries["caption"](*captions)
        return queries

    @torch.no_grad()
    def encode_keys(self, images, captions, seed, world):
        """-> keys {name: (B, dim)} of the photos and captions of this process

        Shuffled batch norm [MoCo]: keys are normalised in other groups than their queries. In the
        same group, its statistics would give the key away.  seed: of the order, shared by all
        processes.  captions: for each micro-batch, tokens and attention mask (B, T), or None
        """
        images = common.gather(images, world)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(images)))
        order = order.to(images.device, non_blocking=True)
        shuffled = images[order.chunk(world.size)[world.rank]]
        keys = self.keys["image"](shuffled.contiguous(memory_format=torch.channels_last))
        unshuffle = order.argsort().chunk(world.size)[world.rank]
        keys = {name: common.gather(key, world)[unshuffle] for name, key in keys.items()}
        if captions[0]:
            encoded = [self.keys["caption"](*inputs) for inputs in captions]
            keys |= {name: torch.cat([key[name] for key in encoded]) for name in encoded[0]}
        return keys

    @torch.no_grad()
    def enqueue(self, keys, tags, captioned, iteration, world):
        """Put the keys of all processes over the oldest ones.  keys: {name: (B, dim)}, tags (B, T)

        A photo without a caption (captioned (B,) is False) leaves an invalid caption key: dropping
        it would synchronise the device.
        """
        rows = {**keys, "tags": tags}
        captioned = common.gather(captioned, world)
        always = torch.ones_like(captioned)
        for name, queue in self.queues.items():
            valid = captioned if name.startswith("caption") else always
            queue.enqueue(common.gather(rows[name], world), valid, iteration)


class Queue(nn.Module):
    """The last K keys, first in, first out. Invalid keys and empty slots do not count."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("valid", torch.zeros(size, dtype=torch.bool))

    def enqueue(self, keys, valid, iteration):
        """keys (B, dim), valid (B,): of iteration 1, 2, ...; K is a multiple of B"""
        start = (iteration - 1) * len(keys) % len(self.keys)
        slots = slice(start, start + len(keys))
        self.keys[slots] = keys
        self.valid[slots] = valid


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm with separate statistics for every `group` images of a training batch

    As if each group were on its own GPU [MoCo]; other layers run once for the whole batch.
    """

    def __init__(self, channels, group):
        super().__init__(channels)
        self.group = group

    def forward(self, x):
        norm = super().forward
        if not self.training or len(x) <= self.group:
            return norm(x)
        groups = x.split(self.group)
        if torch.is_grad_enabled():
            return torch.cat([norm(group) for group in groups])
        for group in groups:  # of keys: in place is faster, and nothing else needs x
            group.copy_(norm(group))
        return x


def convert_split_batchnorm(model, group):
    """Replace each batch norm of a model by a SplitBatchNorm with its weights and statistics."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                split = SplitBatchNorm(child.num_features, group)
                split.load_state_dict(child.state_dict())
                setattr(parent, name, split)


@torch.no_grad()
def update_momentum(queries, keys, m):
    """theta_k <- m theta_k + (1 - m) theta_q, MLPs included [Sec. 3.1]"""
    torch._foreach_lerp_(list(keys.parameters()), list(queries.parameters()), 1 - m)


# ---------------------------------------------------------------------------------------- losses


def contrastive_losses(queries, keys, queues, tags, captioned, temperature, threshold):
    """Means over the batch -> {"ii", "tag", "cc", "ic", "ci": scalar}, for spaces in use

    queries, keys: {name: (B, dim)}, row i from the same photo and caption.  queues: {name:
    Queue}.  tags (B, T), captioned (B,).  A photo without tags adds 0 to Eq. 5, one without a
    caption to Eqs. 8, 11 and 14 [Sec. 3.2, end].
    """
    losses = {}
    if "image_intra" in queries:
        query = queries["image_intra"]
        log_p = log_probabilities(query, "image_intra", keys, queues, temperature)
        losses["ii"] = -log_p[:, 0].mean()  # Eq. 3
        if "tags" in queues:
            common_tags = tags.float() @ queues["tags"].keys.T  # (B, K): t_p . t_j
            others = (common_tags > threshold) & queues["tags"].valid
            own = torch.ones_like(others[:, :1])
            positives = torch.cat([own, others], 1)  # Eq. 4
            loss = -log_p.masked_fill(~positives, 0).sum(1) / positives.sum(1)  # Eq. 5
            losses["tag"] = (loss * tags.any(1)).mean()
    if "caption_intra" in queries:
        query = queries["caption_intra"]
        log_p = log_probabilities(query, "caption_intra", keys, queues, temperature)
        losses["cc"] = (-log_p[:, 0] * captioned).mean()  # Eq. 8
    if "image_inter" in queries:
        loss = ranking_loss(queries["image_inter"], "caption_inter", keys, queues)  # Eq. 11
        losses["ic"] = (loss * captioned).mean()
        loss = ranking_loss(queries["caption_inter"], "image_inter", keys, queues)  # Eq. 14
        losses["ci"] = (loss * captioned).mean()
    return losses


def log_probabilities(query, key_space, keys, queues, temperature):
    """The logarithms in Eqs. 3, 5 and 8 -> (B, 1 + K): of the own key, then of the queue's keys"""
    positive, negatives = similarities(query, keys[key_space], queues[key_space])
    logits = torch.cat([positive, negatives], 1) / temperature
    return logits.log_softmax(1)


def ranking_loss(query, key_space, keys, queues):
    """Eq. 11, Eq. 14: the sum over the queue of [alpha - q . k+ + q . k]_+ -> (B,)"""
    positive, negatives = similarities(query, keys[key_space], queues[key_space])
    return (MARGIN - positive + negatives).clamp(min=0).sum(1)


def similarities(query, key, queue):
    """q . k+ with the own key -> (B, 1); q . k with the queue's -> (B, K), -inf where invalid"""
    # On CPUs (keys query^T)^T takes two thirds of the time of query keys^T.
    positive = (query * key).sum(1, keepdim=True)
    negatives = (queue.keys @ query.T).T
    return positive, negatives.masked_fill(~queue.valid, -math.inf)


# ------------------------------------------------------------------------------------- retrieval


@torch.no_grad()
def encode_images(encoder, images, size, workers, device, amp):
    """Central squares embedded in the common space -> (M, inter_dim) on the CPU, and the indices
    of the M images that can be decoded"""
    make_sample = partial(central_square, images, size)
    samples = common.Samples(make_sample, len(images))  # replace unreadable photos by the next
    vectors = {}
    for batch in common.validation_batches(samples, workers, None, device):
        with common.autocast(device, amp):
            output = encoder(common.augment(batch["image"]))
        vectors |= zip(batch["index"].tolist(), output["image_inter"].cpu())
    readable = sorted(vectors)
    return torch.stack([vectors[i] for i in readable]), readable


def central_square(images, size, index, rng):
    [image] = common.read_crops(images[index], [common.centre_crop], size)
    return {"image": image, "index": index}


@torch.no_grad()
def encode_captions(encoder, tokenizer, captions, device, amp, batch_size=256):
    """Captions embedded in the common space -> (N, inter_dim) on the CPU"""
    vectors = []
    starts = range(0, len(captions), batch_size)
    for start in progress(starts, desc="captions", unit=" batches", leave=False):
        tokens, mask = tokenize(tokenizer, captions[start : start + batch_size])
        with common.autocast(device, amp):
            output = encoder(tokens.to(device), mask.to(device))
        vectors.append(output["caption_inter"].cpu())
    return torch.cat(vectors)


def validate(encoders, val, tokenizer, args, device):
    """Retrieval among validation photos [Tab. 7]; {} if none has a caption

    -> {"retrieval": {"images": N, "captions": M, "trained": scores, "random": scores of random
    similarities}}
    """
    captioned = np.flatnonzero(val.num_captions)
    if not len(captioned):
        return {}
    chosen = np.random.default_rng(args.seed).permutation(captioned)[:RETRIEVAL_IMAGES]
    val = val.select(np.sort(chosen))
    encoders.eval()
    images, readable = encode_images(
        encoders["image"],
        val.images,
        args.image_size,
        args.workers,
        device,
        args.amp,
    )
    val = val.select(readable)
    captions = val.all_captions()
    captions = encode_captions(encoders["caption"], tokenizer, captions, device, args.amp)
    generator = torch.Generator().manual_seed(args.seed)
    chance = torch.rand(len(images), len(captions), generator=generator)
    result = {"images": len(images), "captions": len(captions)}
    for name, similarity in (("trained", images @ captions.T), ("random", chance)):
        scores = retrieval_scores(similarity, torch.from_numpy(val.image_of_caption()))
        ways = [f"{way} {common.format_scores(scores[way])}" for way in scores]
        print_main(f"retrieval among {len(images)} photos, {name}: {'; '.join(ways)}")
        result[name] = scores
    return {"retrieval": result}


def retrieval_scores(similarity, image_of_caption):
    """-> {"image to text", "text to image": {"R@1", "R@5", "R@10": percent, "median rank"}}

    similarity: (N images, M captions).  image_of_caption: (M,).  [Sec. 4.2, Cross-modal Retrieval]
    """
    i2t, t2i = retrieval_ranks(similarity, image_of_caption)
    return {"image to text": rank_scores(i2t), "text to image": rank_scores(t2i)}


def rank_scores(ranks):
    return {**recall(ranks), "median rank": median_rank(ranks)}


def retrieval_ranks(similarity, image_of_caption):
    """Ranks of each image's best caption (N,) and of each caption's image (M,), counted from 0

    similarity: (N images, M captions).  image_of_caption: (M,).  Equal similarities share the mean
    of their ranks: a model that embeds everything alike gets no credit.
    """
    similarity = similarity.nan_to_num(-math.inf)  # NaN embeddings come last
    image = torch.arange(len(similarity), device=similarity.device)
    own = image_of_caption == image[:, None]
    best = similarity.masked_fill(~own, -math.inf).amax(1, keepdim=True)
    ties = (similarity == best) & ~own
    i2t = (similarity > best).sum(1) + ties.sum(1) / 2
    target = similarity.gather(0, image_of_caption[None])
    ties = (similarity == target).sum(0) - 1  # without the target itself
    t2i = (similarity > target).sum(0) + ties / 2
    return i2t, t2i


def recall(ranks):
    """Ranks counted from 0 -> {"R@1", "R@5", "R@10": percent of them within the first K}"""
    recalls = {}
    for k in (1, 5, 10):
        recalls[f"R@{k}"] = 100 * (ranks <= k - 1).float().mean().item()
    return recalls


def median_rank(ranks):
    """Ranks counted from 0 -> floor(median) + 1 [VSE++ code]"""
    return math.floor(np.median(ranks.numpy())) + 1


if __name__ == "__main__":
    common.run(main, get_args)
