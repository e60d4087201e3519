"""Multimodal contrastive training: a backbone learned by telling photos and captions apart.

Yuan, Lin, Kuen, Zhang, Wang, Maire, Kale, Faieta. Multimodal Contrastive Training for Visual
Representation Learning. CVPR 2021.

Two views of a photo should be more similar than views of different photos (Eq. 3, as in MoCo-v2),
and so should two wordings of a caption (Eq. 8), a photo and its caption (Eqs. 11, 14), and photos
with common tags (Eq. 5). A query is compared with the key of its own photo and with a queue of
earlier keys, which momentum encoders have made. Similarity within a modality and between the two
is measured in different spaces, each with MLPs of its own [Sec. 3.2]. Tags are those of the data,
or the nouns of the captions (--tags nouns [Sec. 4.4]): the demo has these, so no label is read.

    laptop        python mmcontrastive.py
    own photos    python mmcontrastive.py --data photos.jsonl
    MoCo-v2       python mmcontrastive.py --data coco --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 \\
                      --lambda-tag 0
    for COCO      python mmcontrastive.py --data coco --backtranslate   (once: views of captions)
    one GPU       python mmcontrastive.py --data coco --batch-size 128
    eight GPUs    torchrun --nproc_per_node=8 mmcontrastive.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d \\
                      --rdzv-endpoint=HOST:29400 mmcontrastive.py --data coco   (shared --output)
    search        python mmcontrastive.py --search "a dog in the snow" "two children" \\
                      --root photos --weights runs/mmcontrastive/checkpoint.pth

What to expect: the losses start near 0 and rise while the queues fill, because only what has been
filled in counts: `ii` and `cc` towards ln(K + 1), `ic` and `ci` towards K times the margin. Then
they fall, `cc` within the first hundreds of iterations and the others slowly. A run ends with
retrieval, from photos to captions and back (Tab. 7), beside that of random similarities.

When it is stuck on few photos: --queue of 8 to 16 batches, --lambda-ic and --lambda-ci at 25 to
100 / K, --momentum near to 1, but no nearer than the run is long, and a caption encoder that knows
words (--lm, or --lm scratch --lm-iters N): docs/troubleshooting.md.
"""

import copy
import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import common
import language
from common import check, count, dim, fail, non_negative, positive, progress, proper_share, say

try:
    import eval_linear
except ModuleNotFoundError:  # copied without it: no probe at the end
    eval_linear = None

LOSSES = "ii", "tag", "cc", "ic", "ci"

# fmt: off
RECIPES = {  #           demo        small       paper
    "arch":             ("resnet18", "resnet18", "resnet50"),           # Sec. 4.1
    "image_size":       (64,         112,        224),                  # Sec. 4.1
    "crop_min":         (0.8,        0.2,        0.2),                  # Sec. 4.1: MoCo-v2
    "colour_jitter":    (0.25,       0.4,        1.0),                  # Sec. 4.1: MoCo-v2
    "greyscale":        (0.0,        0.0,        0.2),                  # Sec. 4.1: MoCo-v2
    "blur":             (0.0,        0.0,        0.5),                  # Sec. 4.1: MoCo-v2
    "caption_views":    ("sibling",  "sibling",  "backtranslation"),    # Sec. 4.1
    "lm":               ("scratch",  "scratch",  "bert-base-uncased"),  # Sec. 4.1
    "lm_iters":         (0,          2000,       0),                    # ours
    "lm_layers":        (2,          4,          12),                   # Sec. 4.1: BERT base
    "lm_width":         (128,        256,        768),                  # Sec. 4.1: BERT base
    "dropout":          (0.0,        0.1,        0.1),                  # BERT
    "mlp_hidden":       (512,        1024,       2048),                 # Sec. 4.1
    "queue":            (512,        512,        32_768),               # Sec. 4.1
    "momentum":         (0.995,      0.998,      0.999),                # Sec. 4.1
    "bn_splits":        (1,          4,          8),                    # MoCo: 8 GPUs
    "tags":             ("nouns",    "annotated", "annotated"),         # Sec. 4.1; nouns: Sec. 4.4
    "tag_threshold":    (3,          2,          2),                    # Sec. 4.1
    "lambda_tag":       (1.0,        1.0,        1.0),                  # Sec. 4.1
    "lambda_ic":        (0.05,       0.2,        1e-4),                 # Sec. 4.1
    "lambda_ci":        (0.05,       0.2,        1e-4),                 # Sec. 4.1
    "batch_size":       (64,         64,         512),                  # Sec. 4.1
    "iters":            (600,        None,       None),
    "epochs":           (None,       15.0,       200.0),                # Sec. 4.1
    "optimizer":        ("adamw",    "adamw",    "sgd"),                # Sec. 4.1
    "lr":               (1e-3,       1e-3,       0.03),                 # Sec. 4.1
    "text_lr":          (1e-3,       3e-4,       4e-5),                 # Sec. 4.1
    "warmup":           (0.1,        0.1,        0.0),
    "weight_decay":     (1e-2,       1e-2,       1e-4),                 # Sec. 4.1
    "log_every":        (10,         20,         20),
    "checkpoint_every": (200,        500,        2000),
    "probe_images":     (2000,       10_000,     10_000),
}
# fmt: on


def get_args(argv=None):
    # fmt: off
    parser = common.flag_parser("mmcontrastive", __doc__)

    add = parser.add_argument_group("views of photos and captions [Sec. 4.1]").add_argument
    add("--greyscale", type=common.share, help="share of views without colours")
    add("--blur", type=common.share, help="share of views that are blurred")
    add("--caption-views", choices=("same", "sibling", "backtranslation"),
        help="a caption twice (dropout differs), two of a photo, or one and its back-translation")
    add("--backtranslations", help="what --backtranslate wrote (default: its file in --output)")

    add = parser.add_argument_group("model [Sec. 4.1]").add_argument
    add("--lm", help="caption encoder: a BERT of the hub or in a folder, or scratch: a small one")
    add("--lm-iters", type=common.natural,
        help="iterations in which --lm scratch first learns the captions' masked words; 0: none")
    add("--lm-layers", type=dim, help="of --lm scratch; fewer for few captions")
    add("--lm-width", type=dim, help="of --lm scratch; a head is 64 wide")
    add("--dropout", type=proper_share, help="of --lm scratch; --caption-views same needs it")
    add("--mlp-hidden", type=dim, help="hidden layer of the MLPs")
    add("--intra-dim", type=dim, default=128, help="of the spaces within a modality [Sec. 4.4]")
    add("--inter-dim", type=dim, default=1024, help="of the space of both [Sec. 4.4]")
    add("--unified-mlp", action="store_true", help="one MLP for both spaces: worse [Sec. 4.4]")
    add("--queue", type=count, help="K, keys to compare with; fewer on fewer photos")
    add("--momentum", type=common.share, help="m of the momentum encoders; lower for short runs")
    add("--bn-splits", type=count, help="groups of shuffled batch norm; 1 opens a shortcut [MoCo]")

    add = parser.add_argument_group("losses and their weights [Sec. 4.1]").add_argument
    add("--lambda-ii", type=non_negative, default=1.0, help="Eq. 3, photo to photo")
    add("--lambda-tag", type=non_negative, help="Eq. 5, photos with common tags; 0 if they mislead")
    add("--lambda-cc", type=non_negative, default=1.0, help="Eq. 8, caption to caption")
    add("--lambda-ic", type=non_negative, help="Eq. 11, photo to captions; more for short queues")
    add("--lambda-ci", type=non_negative, help="Eq. 14, caption to photos; more for short queues")
    add("--temperature", type=positive, default=0.07, help="tau of Eqs. 3, 5, 8")
    add("--margin", type=non_negative, default=0.2, help="alpha of Eqs. 11, 14")
    add("--tags", choices=("annotated", "nouns"),
        help="of Eq. 5: those of --data, or the nouns of the captions [Sec. 4.4]")
    add("--tag-threshold", type=non_negative, help="epsilon of Eq. 4; 0 for few tags")

    add = parser.add_argument_group("optimisation of both encoders [Sec. 4.1]").add_argument
    add("--optimizer", choices=common.OPTIMIZERS, help="adamw or radam at about 1e-3 in short runs")
    add("--text-lr", type=positive, help="of the caption encoder; 4e-5 suits a pretrained BERT")

    use = parser.add_argument_group("retrieval and other uses")
    add = use.add_argument
    add("--retrieval-images", type=count, default=1000, help="of the validation split [Tab. 7]")
    add("--weights", help="a checkpoint.pth of this script, for --search")
    add("--translator", default="Helsinki-NLP/opus-mt-{}-{}",
        help="MarianMT models of the hub or folders; {} and {} stand for languages [Sec. 4.1]")
    add = use.add_mutually_exclusive_group().add_argument
    add("--search", nargs="+", metavar="TEXT",
        help="draw the ten nearest photos, of --root or the validation split, in search.png")
    add("--backtranslate", action="store_true",
        help="translate the training captions to French and German and back")
    # fmt: on

    recipe = common.choose_recipe(RECIPES, argv)
    args = common.parse(parser, argv, recipe, scaled=("lr", "text_lr"))
    # A recipe's weight of Eq. 5 is dropped where no photo has tags; one that the user gives is not.
    args.tags_required = common.look(argv, "--lambda-tag").lambda_tag is not None
    if not args.backtranslations:
        args.backtranslations = os.path.join(args.output, "backtranslations.jsonl")
    if not (args.lambda_ii or args.lambda_tag or args.lambda_ic):
        parser.error("give --lambda-ii, --lambda-tag or --lambda-ic: no other trains the backbone")
    if bool(args.lambda_ic) != bool(args.lambda_ci):  # keys in a space that nothing trains
        parser.error("--lambda-ic and --lambda-ci go together: give both, or 0 for both")
    if args.unified_mlp and args.intra_dim != args.inter_dim:
        parser.error("--unified-mlp has one width: --intra-dim and --inter-dim must be equal")
    if args.lm_width % 64:
        parser.error(f"--lm-width {args.lm_width} must be a multiple of 64: a head is 64 wide")
    equal_views = args.caption_views == "same" and args.lm == "scratch" and not args.dropout
    if equal_views and args.lambda_cc:
        parser.error("--caption-views same needs --dropout above 0, or both views are equal")
    if args.queue < args.batch_size:
        parser.error(f"--queue {args.queue} must hold at least one batch of {args.batch_size}")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    groups = max(args.bn_splits, processes)
    if groups % processes or args.batch_size % groups or args.batch_size < 2 * groups:
        parser.error(f"--batch-size {args.batch_size} cannot be split into --bn-splits {groups} "
                     f"groups of two or more over {processes} processes")  # fmt: skip
    if common.look(argv, "--tags").tags == "nouns" and not args.lambda_tag:
        parser.error("--tags nouns is for Eq. 5: give --lambda-tag, too")
    if bool(args.search) != bool(args.weights):
        parser.error("--weights FILE goes with --search TEXT...")
    if args.backtranslate and "RANK" in os.environ:
        parser.error("--backtranslate is one process's work: start it without torchrun")
    if args.translator.count("{}") != 2:
        parser.error(f"--translator {args.translator} must hold {{}} twice: from and to a language")
    return args


def main(args):
    world = common.start()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.search:
        return search(args, device)
    subset, cache = (args.fraction, args.captions_per_image, args.seed), args.cache
    train = common.caption_data(args.data, args.root, args.train_split, *subset, cache=cache)
    if args.backtranslate:
        return backtranslate(args, train.captions, device)

    # Data: photos, captions and tags, as far as they are there, and the losses that they allow.
    val = common.caption_data(args.data, args.root, args.val_split, cache=cache)
    lambdas = {name: getattr(args, f"lambda_{name}") for name in LOSSES}
    uses_captions = lambdas["cc"] > 0 or lambdas["ic"] > 0
    translations = read_backtranslations(args, train.captions) if uses_captions else []
    run = common.Run(args, "mmcontrastive", world, train, val, *translations)
    probe = eval_linear and eval_linear.Probe(args, train, val)
    with common.main_first(world):
        train, lambdas["tag"] = photos_with_losses(train, lambdas, args)
        queue_sizes = fit_queues(args.queue, train, uses_captions, args.batch_size)
        tokenizer = config = pretrained = None
        if uses_captions:
            tokenizer, config, pretrained = load_caption_model(args, train, run, device)
    iters = args.iters or math.ceil(args.epochs * len(train) / args.batch_size)
    say(f"{len(train)} photos ({len(val)} for validation), {len(train.captions)} captions, "
        f"{len(train.tags)} tags; {iters} iterations")  # fmt: skip

    # Encoders, momentum encoders, queues, optimizer, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = build_model(args, config, lambdas, train, queue_sizes, world)
    if pretrained:
        load_pretrained(model, pretrained)
    model.to(device, memory_format=torch.channels_last)
    lr = {"image": args.lr, "caption": args.text_lr}
    groups = [{"params": model.queries[m].parameters(), "lr": lr[m]} for m in model.queries]
    optimizer = common.build_optimizer(args.optimizer, groups, args.lr, args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    parallel = common.data_parallel(model, world).train()

    samples = common.Samples(partial(sample, train, translations, args), len(train), args.seed)
    constants = args.temperature, args.margin, args.tag_threshold
    together = partial(collate, tokenizer)
    for iteration, batch in run.steps(samples, together, iters, probe, model.backbone):
        factor = common.lr_factor(iteration - 1, iters, args.warmup)
        common.set_lr(optimizer, factor)
        tags, captioned = batch["tags"], batch["captioned"]
        images_q, captions_q = view(batch["q"], args.amp)
        images_k, captions_k = view(batch["k"], args.amp)
        update_momentum(model.queries, model.keys, args.momentum)
        with common.autocast(device, args.amp):
            queries = parallel(images_q, captions_q)
            all_keys = model.encode_keys(images_k, captions_k, (args.seed, iteration), world)
        keys = {name: key.chunk(world.size)[world.rank] for name, key in all_keys.items()}
        losses = contrastive_losses(queries, keys, model.queues, tags, captioned, *constants)
        loss = sum(lambdas[name] * losses[name] for name in losses)  # Eq. 15
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.enqueue(all_keys, tags, captioned, world)
        run.log(loss=loss, **losses, lr=args.lr * factor, text_lr=args.text_lr * factor)

    # The backbone is the result; the probe says what it is worth.
    if world.is_main:
        run.save_weights("backbone.pth", model.backbone)
        result = validate(model.queries, val, tokenizer, args, device) if lambdas["ic"] else {}
        tags_seen = lambdas["tag"] > 0 and args.tags == "annotated"
        run.finish(probe, model.backbone, tags_seen, **result)


# ------------------------------------------------------------- photos, and the losses they allow


def photos_with_losses(train, lambdas, args):
    """The photos that a loss can use, with the tags of --tags, and the weight of Eq. 5

    It is 0 if no photo has tags. Without a caption Eqs. 3 and 5 can use a photo [Sec. 3.2, end].
    """
    weight = lambdas["tag"]
    if weight and args.tags == "nouns":
        train = tagged_by_nouns(train, args.cache)
    if weight and not len(train.tags):
        source = 'annotations/instances_{split}.json for coco, "tags" in a .jsonl, or --tags nouns'
        if args.tags == "nouns":
            source = "--tags nouns has found no noun in the captions"
        possible = (lambdas["ii"] or lambdas["ic"]) and not args.tags_required
        check(possible, f"--lambda-tag wants tags and no photo has any: {source}")
        say("no photo has tags: the loss of Eq. 5 is left out")
        weight = 0.0
    captioned = train.captioned()
    if lambdas["ii"] or weight or captioned.all():
        return train, weight
    say(f"{(~captioned).sum()} photos without a caption are left out: no loss is left for them")
    return train.select(np.flatnonzero(captioned)), weight


def tagged_by_nouns(data, cache, number=1000):
    """The tags are the most frequent nouns of the captions [Sec. 4.4; their number is ours]

    They are kept in the folder `cache` for the other processes and the next run.
    """

    def build():
        nouns = language.top_concepts(language.count_concepts(data.captions), "nn", number)
        rows = language.concept_labels(data, nouns)
        return {"nouns": np.array(nouns), "tags": rows.indices, "first_tag": rows.indptr}

    def use(arrays):
        tagged = copy.copy(data)  # photos and captions are shared
        tagged.tag_names = arrays["nouns"].tolist()
        tagged.tags, tagged.first_tag = arrays["tags"], arrays["first_tag"]
        return tagged

    return common.cached(cache, "nouns", [data.digest(), number, "lists"], build, use)


def fit_queues(wanted, train, uses_captions, batch_size):
    """K of the queues of each modality: a multiple of the batch, at most as many as there are keys

    -> {"image": K, "caption": K, if captions are used}
    """
    available, sizes = {"image": len(train)}, {}
    if uses_captions:
        available["caption"] = int(train.captioned().sum())
        hint = "with --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 photos are enough (MoCo-v2)"
        check(available["caption"], f"no photo has a caption: {hint}")
    hint = "; raise --lambda-ic and --lambda-ci in proportion" if uses_captions else ""
    for modality, number in available.items():
        size = sizes[modality] = min(wanted, number) // batch_size * batch_size
        keys = f"{number} photos" + (" with a caption" if modality == "caption" else "")
        check(size, f"{keys} are fewer than a batch of {batch_size}: lower --batch-size")
        if size != wanted:
            say(f"queues of {size} {modality} keys instead of {wanted}: a multiple of the batch, "
                f"at most {keys}" + hint)  # fmt: skip
    return sizes


# ------------------------------------------------------------------------------------- two views

MAX_TOKENS = 64  # of a caption; what is behind is cut off [ours]


def sample(data, translations, args, index, rng):
    """Two views of a photo and of one of its captions: "q" for the queries and "k" for the keys"""
    crop = common.random_crop(rng, (args.crop_min, 1.0))
    images = common.read_crops(data.images, index, [crop, crop], args.image_size)
    jitter = np.stack([common.colour_jitter(rng, args.colour_jitter) for _ in images])
    jitter[rng.random(2) < args.greyscale, 2:] = 0  # no saturation, and no hue to turn
    blurred = rng.random(2) < args.blur
    sigma = np.where(blurred, rng.uniform(0.1, 2.0, 2), 0)  # MoCo-v2's, at 224 pixels
    sigma = (sigma * args.image_size / 224).astype(np.float32)
    mirrored_q, mirrored_k = rng.random(2) < 0.5
    image_q = images[0][:, ::-1] if mirrored_q else images[0]
    image_k = images[1][:, ::-1] if mirrored_k else images[1]

    # A photo's query meets the key of its caption, and the other way round (Eqs. 9 to 13): left
    # and right in a caption follow the photo that it meets. [ours]
    caption_q, caption_k = caption_views(data, index, args.caption_views, translations, rng)
    if mirrored_k:
        caption_q = language.swap_left_right(caption_q)
    if mirrored_q:
        caption_k = language.swap_left_right(caption_k)
    return {
        "q": {"image": image_q, "jitter": jitter[0], "sigma": sigma[0], "caption": caption_q},
        "k": {"image": image_k, "jitter": jitter[1], "sigma": sigma[1], "caption": caption_k},
        "captioned": data.first_caption[index + 1] > data.first_caption[index],
        "tags": 1 + torch.tensor(data.tags_of(index), dtype=torch.long),
    }


def caption_views(data, index, kind, translations, rng):
    """Two views of one of the photo's captions [Sec. 3.1]; two empty strings if it has none

    kind: --caption-views. Of a caption and its back-translation one view is the caption. [ours]
    """
    captions = data.captions_of(index)
    if not captions:
        return "", ""
    n = rng.integers(len(captions))
    caption, siblings = captions[n], captions[:n] + captions[n + 1 :]
    if kind == "sibling" and siblings:
        return caption, siblings[rng.integers(len(siblings))]
    if translations:
        translated = translations[rng.integers(len(translations))]
        return caption, translated[data.first_caption[index] + n]
    return caption, caption


def collate(tokenizer, samples):
    """-> tags (B, T), captioned (B,), the list of unreadable images, and the views "q" and "k":
    image uint8 (B, size, size, 3), jitter (B, 4), sigma (B,) in pixels

    tags: numbers from 1 of each photo's tags, with zeros behind them where others have more.
    With a tokenizer each view also has captions: tokens and visible (B, T).
    """
    batch = {"unreadable": [path for sample in samples for path in sample["unreadable"]]}
    batch["tags"] = pad_sequence([sample["tags"] for sample in samples], batch_first=True)
    batch["captioned"] = common.stack(samples, "captioned")
    for name in ("q", "k"):
        views = [sample[name] for sample in samples]
        batch[name] = {part: common.stack(views, part) for part in ("image", "jitter", "sigma")}
        if tokenizer:
            batch[name]["captions"] = tokenise(tokenizer, [view["caption"] for view in views])
    return batch


def tokenise(tokenizer, captions):
    """-> tokens (B, T), visible (B, T): True where there is no padding"""
    settings = {"padding": True, "truncation": True, "max_length": MAX_TOKENS}
    encoded = tokenizer(captions, return_tensors="pt", **settings)
    return [encoded["input_ids"], encoded["attention_mask"].bool()]


def view(batch, amp="off"):
    """A view on the device -> images (B, 3, h, w) in the precision of --amp, whose convolutions
    would round them anyway; captions: tokens, visible (B, T), or None
    """
    images = common.augment(batch["image"], batch["jitter"])
    with common.autocast(images.device, amp):
        images = blur(images, batch["sigma"])
    return images, batch.get("captions")


def blur(images, sigma):
    """Gaussian blur of each image (B, 3, h, w) by its own sigma (B,) in pixels; 0 for none

    A matrix of weights for the rows and one for the columns of each image. They sum to one, up to
    the border: it does not matter that the images are normalised already. [MoCo-v2]
    """
    sigma, (height, width) = sigma.clamp(min=1e-3)[:, None, None], images.shape[2:]

    def weights(side):  # (B, 1, side, side): of all pixels, for each blurred pixel
        place = torch.arange(side, device=sigma.device, dtype=torch.float32)
        distance = place[:, None] - place
        return (-0.5 * (distance / sigma) ** 2).softmax(-1)[:, None]

    blurred = weights(height) @ images.contiguous() @ weights(width).mT
    return blurred.contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------- encoders and momentum

# Which encoder, and which of its MLPs, makes the queries and the keys of each loss. A loss is named
# by its query first: "ic" has photos as queries, so its keys and its queue are captions.
# The paper writes Phi_ik in Eq. 7 and again in Eq. 10, for two MLPs which it calls distinct: they
# are the caption encoder's "intra" and "inter". Its symbols in Eqs. 2 and 13 clash likewise.
QUERIES = {
    "ii": ("image", "intra"),  # Eq. 1
    "cc": ("caption", "intra"),  # Eq. 6
    "ic": ("image", "inter"),  # Eq. 9
    "ci": ("caption", "inter"),  # Eq. 12
}
KEYS = {
    "ii": ("image", "intra"),  # Eq. 2
    "cc": ("caption", "intra"),  # Eq. 7
    "ic": ("caption", "inter"),  # Eq. 10
    "ci": ("image", "inter"),  # Eq. 13
}


def build_model(args, config, lambdas, train, queue_sizes, world):
    """config: of the captions' BERT, or None.  lambdas: {loss: weight}; of 0: it is left out"""
    tag_sizes = None
    if lambdas["tag"]:
        tag_sizes = len(train.tag_names), int(np.diff(train.first_tag).max())
    dims = {"intra": args.intra_dim, "inter": args.inter_dim}
    needed = [name for name in LOSSES if lambdas[name]]
    encoders = build_encoders(args.arch, config, needed, dims, args.mlp_hidden, args.unified_mlp)
    groups = max(1, args.bn_splits // world.size)  # on this process
    return MultimodalContrastive(encoders, tag_sizes, queue_sizes, groups)


def by_loss(table, outputs):
    """{modality: {space: x}} -> {loss: x}, for the losses whose x is there"""
    found = {}
    for loss, (modality, space) in table.items():
        if modality in outputs and space in outputs[modality]:
            found[loss] = outputs[modality][space]
    return found


def build_encoders(arch, config, losses, dims, hidden, unified=False):
    """-> {"image": Encoder} and, with the configuration of its BERT, "caption"

    losses: those whose spaces are needed.  dims: {"intra": 128, "inter": 1024}
    """
    spaces = {"image": {}, "caption": {}}
    for loss, (modality, space) in QUERIES.items():
        if loss in losses or (loss == "ii" and "tag" in losses):  # Eqs. 3 and 5 share queries
            spaces[modality][space] = dims[space]
    backbone = common.build_backbone(arch)
    trunk = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoders = {"image": Encoder(trunk, backbone.channels, spaces["image"], hidden, unified)}
    if config:
        trunk, width = CaptionTrunk(config), config.hidden_size
        encoders["caption"] = Encoder(trunk, width, spaces["caption"], hidden, unified)
    return nn.ModuleDict(encoders)


def load_caption_model(args, train, run, device):
    """-> the caption encoder's tokenizer, its configuration, and the name or folder of weights that
    it starts from, or None

    Tokenizer and configuration are kept in the output folder, for --search and for going on.
    """
    folder, pretrained = run.folder / "caption_model", args.lm
    if run.checkpoint:  # it has the weights
        return *read_caption_model(folder), None
    if args.lm == "scratch":
        single = int((np.diff(train.first_caption) == 1).sum())
        if args.caption_views == "sibling" and single and args.lambda_cc and not args.dropout:
            say(f"{single} photos have one caption, whose two views are equal: for them Eq. 8 "
                "teaches little without --dropout")  # fmt: skip
        own, settings = run.folder / "language_model", (args.lm_iters, args.seed, args.amp)
        made = device, train.captions, own, args.cache, *settings, args.lm_layers, args.lm_width
        pretrained = language.scratch_language_model(*made) if args.lm_iters else None
    if run.world.is_main:
        if pretrained:
            tokenizer, config = read_caption_model(pretrained)
        else:
            tokenizer = language.train_wordpiece(train.captions)
            # With BERT's 0.02 all captions have the same vector at first: nothing to tell. [ours]
            spread = {"initializer_range": args.lm_width**-0.5}
            config = language.bert_config(tokenizer, args.lm_layers, args.lm_width, **spread)
        if args.lm == "scratch":
            config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
    return *read_caption_model(folder), pretrained


def read_caption_model(name):
    """name: of the hub, or a folder -> tokenizer, configuration"""
    transformers = language.quiet_transformers()
    with language.loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name)
    padded = tokenizer.pad_token is not None
    check(padded, "the tokenizer of --lm has no token for padding: give a BERT-like model")
    return tokenizer, config


def load_pretrained(model, name):
    """Start both caption encoders from the weights of `name`. A pooler that it lacks is random."""
    with language.loading(name):
        read = language.quiet_transformers().AutoModel.from_pretrained
        pretrained, report = read(name, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        say(f"{name} lacks {', '.join(missing[:3])}: random at first")
    for encoders in (model.queries, model.keys):
        encoders["caption"].trunk.bert.load_state_dict(pretrained.state_dict())


class CaptionTrunk(nn.Module):
    """A BERT-like model's pooled output, of the first token. tokens, visible (B, T) -> (B, d)"""

    def __init__(self, config):
        super().__init__()
        bert = language.quiet_transformers().AutoModel.from_config(config)
        self.bert = bert.float()  # some are published in half precision

    def forward(self, tokens, visible):
        mask = language.attention_mask(self.bert, visible)
        output = self.bert(input_ids=tokens, attention_mask=mask)
        pooled = output.get("pooler_output")
        return output.last_hidden_state[:, 0] if pooled is None else pooled


class Encoder(nn.Module):
    """A trunk, and for each space a 2-layer MLP: "intra", within the modality, "inter", of both

    -> {space: (B, dim), of length one} [Sec. 4.1].  unified: one MLP for both spaces [Sec. 4.4].
    """

    def __init__(self, trunk, width, dims, hidden, unified=False):
        super().__init__()
        self.trunk, self.mlps = trunk, nn.ModuleDict()
        for space, out in dims.items():
            if not unified or not self.mlps:
                mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))
            self.mlps[space] = mlp

    def forward(self, *inputs):
        features = self.trunk(*inputs)
        return {name: F.normalize(mlp(features).float(), dim=1) for name, mlp in self.mlps.items()}


class MultimodalContrastive(nn.Module):
    """Encoders of photos and captions, their momentum copies, and the queues of keys (Fig. 2).

    encoders: of build_encoders.  tag_sizes: how many tags there are, and how many a photo has at
    most; None without Eq. 5.  queue_sizes: {modality: K}.  groups: of batch norm
    """

    def __init__(self, encoders, tag_sizes, queue_sizes, groups=1):
        super().__init__()
        self.queries = nn.ModuleDict(encoders)
        if groups > 1:
            divide_batch_norms(self.queries, groups)
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)
        self.queues = nn.ModuleDict()
        mlps = {modality: encoder.mlps for modality, encoder in encoders.items()}
        for loss, mlp in by_loss(KEYS, mlps).items():
            self.queues[loss] = Queue(queue_sizes[KEYS[loss][0]], mlp[-1].out_features)
        if tag_sizes:
            self.queues["tag"] = TagQueue(queue_sizes["image"], *tag_sizes)

    @property
    def backbone(self):
        return self.queries["image"].trunk[0]

    def forward(self, images, captions):
        """images (B, 3, h, w), captions: tokens and visible, or None -> queries {loss: (B, dim)}"""
        outputs = {"image": self.queries["image"](images)}
        if captions:
            outputs["caption"] = self.queries["caption"](*captions)
        return by_loss(QUERIES, outputs)

    @torch.no_grad()
    def encode_keys(self, images, captions, seed, world):
        """The keys of the batches of all processes, on each of them -> {loss: (size * B, dim)}

        Shuffled batch norm [MoCo]: the images are drawn into other groups than those of the
        queries, or a query would find its key by the statistics of the group that both are in.
        seed: of the order, the same on all processes.
        """
        images = gather(images, world)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(images)))
        order = order.to(images.device, non_blocking=True)
        share = images[order.chunk(world.size)[world.rank]]
        keys = self.keys["image"](share.contiguous(memory_format=torch.channels_last))
        unshuffle = order.argsort()
        outputs = {"image": {space: gather(x, world)[unshuffle] for space, x in keys.items()}}
        if captions:
            keys = self.keys["caption"](*captions)
            outputs["caption"] = {space: gather(x, world) for space, x in keys.items()}
        return by_loss(KEYS, outputs)

    @torch.no_grad()
    def enqueue(self, keys, tags, captioned, world):
        """keys: of all processes; tags (B, T), captioned (B,): of this process.

        Photos without a caption add no caption key.
        """
        captioned = gather(captioned, world)
        all_valid = torch.ones_like(captioned)
        for loss, key in keys.items():
            modality, _ = KEYS[loss]
            self.queues[loss].enqueue(key, captioned if modality == "caption" else all_valid)
        if "tag" in self.queues:
            tags = self.queues["tag"].padded(tags)
            self.queues["tag"].enqueue(gather(tags, world), all_valid)


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm with statistics of its own in each of `groups` parts of a training batch

    As if each part were on a GPU of its own [MoCo]; all other layers run once for the whole batch.
    """

    def __init__(self, channels, groups):
        super().__init__(channels)
        self.groups = groups

    def forward(self, x):
        norm = super().forward
        if not self.training:
            return norm(x)
        parts = x.chunk(self.groups)
        if torch.is_grad_enabled():
            return torch.cat([norm(part) for part in parts])
        for part in parts:  # of keys: the convolution's output is not needed again
            part.copy_(norm(part))
        return x


def divide_batch_norms(model, groups):
    """Put a GroupedBatchNorm in the place of each batch norm of a new model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, GroupedBatchNorm(child.num_features, groups))


@torch.no_grad()
def update_momentum(queries, keys, m):
    """theta_k <- m theta_k + (1 - m) theta_q, MLPs included [Sec. 3.1]"""
    torch._foreach_lerp_(list(keys.parameters()), list(queries.parameters()), 1 - m)


def gather(x, world):
    """(B, ...) of each process -> (size * B, ...), in the order of the processes"""
    if world.size == 1:
        return x
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class Queue(nn.Module):
    """The last K keys, first in first out. Slots that were never filled do not count [ours]."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("total", torch.zeros((), dtype=torch.long))

    @property
    def filled(self):
        """(K,) bool"""
        return torch.arange(len(self.keys), device=self.keys.device) < self.total

    def enqueue(self, keys, valid):
        """Put the keys (B, dim) that are `valid` (B,) over the oldest. B <= K

        Boolean indexing would make the CPU wait for the GPU. So all rows are written, the valid
        ones first, and the invalid ones write back the old keys.
        """
        number, place = valid.sum(), torch.arange(len(keys), device=keys.device)
        valid_first = (~valid).byte().argsort(stable=True)
        slots = (self.total + place) % len(self.keys)
        new = keys[valid_first].to(self.keys.dtype)
        self.keys[slots] = torch.where((place < number)[:, None], new, self.keys[slots])
        self.total += number


class TagQueue(Queue):
    """The tags of the photos whose keys the other queues hold, as lists: see `collate`

    A row of zeros and ones for each photo would take 4.8 GB for Stock's 18,157 tags and K = 65,536.
    """

    def __init__(self, size, num_tags, most):
        """most: tags of a photo"""
        super().__init__(size, most)
        self.num_tags, self.keys = num_tags, self.keys.long()

    def padded(self, tags):
        """(B, T) -> (B, most)"""
        return F.pad(tags, (0, self.keys.size(1) - tags.size(1)))

    def common_tags(self, tags):
        """t_p . t_j of Eq. 4: how many of its tags (B, T) each photo shares with each key -> (B, K)

        Rows of a (tags, B) table of zeros and ones, added up over the tags of each key.
        """
        table = torch.zeros(1 + self.num_tags, len(tags), device=tags.device)
        table.scatter_(0, tags.T, 1)
        return F.embedding_bag(self.keys, table, mode="sum", padding_idx=0).T


# ---------------------------------------------------------------------------------------- losses


def contrastive_losses(queries, keys, queues, tags, captioned, temperature, margin, threshold):
    """Eqs. 3, 5, 8, 11, 14, each a mean over the batch -> {loss: scalar}, those with a query

    queries, keys: {loss: (B, dim)}, row by row of the same photos and captions.  queues: {loss:
    Queue}.  tags (B, T), captioned (B,), see collate: without tags Eq. 5 is 0, without a caption
    Eqs. 8, 11 and 14 [Sec. 3.2, end].
    """
    losses = {}
    if "ii" in queries:
        log_p = log_probabilities(queries["ii"], keys["ii"], queues["ii"], temperature)
        losses["ii"] = -log_p[:, 0].mean()  # Eq. 3
        if "tag" in queues:
            own = torch.ones_like(captioned)[:, None]
            others = queues["tag"].common_tags(tags) > threshold  # t_p . t_j > epsilon
            positive = torch.cat([own, others & queues["tag"].filled], 1)  # Eq. 4
            loss = -log_p.masked_fill(~positive, 0).sum(1) / positive.sum(1)  # Eq. 5
            losses["tag"] = (loss * tags.any(1)).mean()
    if "cc" in queries:
        log_p = log_probabilities(queries["cc"], keys["cc"], queues["cc"], temperature)
        losses["cc"] = (-log_p[:, 0] * captioned).mean()  # Eq. 8
    for name in ("ic", "ci"):  # Eq. 11 and Eq. 14
        if name in queries:
            loss = ranking_loss(queries[name], keys[name], queues[name], margin)
            losses[name] = (loss * captioned).mean()
    return losses


def similarities(query, key, queue):
    """q . k+ with the own key -> (B, 1), and q . k with those of the queue -> (B, K)"""
    # On CPUs (keys query^T)^T takes two thirds of the time of query keys^T.
    return (query * key).sum(1, keepdim=True), (queue.keys @ query.T).T


def log_probabilities(query, key, queue, temperature):
    """The logarithms in Eqs. 3, 5 and 8 -> (B, 1 + K): of the own key, then of the queue's"""
    own, others = similarities(query, key, queue)
    others = others.masked_fill(~queue.filled, -math.inf)
    logits = torch.cat([own, others], 1) / temperature
    return logits.log_softmax(1)


def ranking_loss(query, key, queue, margin):
    """Eq. 11, Eq. 14: the sum over the queue of [alpha - q . k+ + q . k]_+ -> (B,)"""
    own, others = similarities(query, key, queue)
    hinge = (margin - own + others).clamp(min=0)
    return hinge.masked_fill(~queue.filled, 0).sum(1)


# ------------------------------------------------------------------------------------- retrieval


@torch.no_grad()
def encode_images(encoder, images, size, workers, device, amp):
    """The central square of each image, in the common space -> (N, inter_dim) on the CPU

    An image that cannot be decoded is named and gets the vector 0, which is near to nothing.
    """
    crops = common.loader(common.CropView(images, size, part=1.0), 64, workers, device=device)
    vectors, readable = [], []
    for pixels, good in progress(crops, desc="photos", unit=" batches", leave=False):
        with common.autocast(device, amp):
            output = encoder(common.augment(pixels.to(device)))
        vectors.append(output["inter"].cpu())
        readable.append(good)
    readable = torch.cat(readable)
    for n in (~readable).nonzero().flatten().tolist():
        say(f"cannot decode {images[n]}: left out")
    return torch.cat(vectors) * readable[:, None]


@torch.no_grad()
def encode_captions(encoder, tokenizer, captions, device, amp, batch_size=256):
    """Each caption in the common space -> (N, inter_dim) on the CPU"""
    vectors, starts = [], range(0, len(captions), batch_size)
    for start in progress(starts, desc="captions", unit=" batches", leave=False):
        end = min(start + batch_size, len(captions))
        tokens, visible = tokenise(tokenizer, [captions[n] for n in range(start, end)])
        with common.autocast(device, amp):
            output = encoder(tokens.to(device), visible.to(device))
        vectors.append(output["inter"].cpu())
    return torch.cat(vectors)


def validate(encoders, val, tokenizer, args, device):
    """Retrieval among validation photos [Tab. 7]; {} if they have no captions

    -> {"retrieval": {"images": N, "captions": M, "trained": scores, "random": scores of random
    similarities}}
    """
    captioned = np.flatnonzero(val.captioned())
    if not len(captioned):
        return {}
    drawn = np.random.default_rng(args.seed).permutation(captioned)[: args.retrieval_images]
    val = val.select(np.sort(drawn))
    image_of_caption = torch.from_numpy(val.image_of_caption())
    encoders.eval()
    size, workers = args.image_size, args.workers
    images = encode_images(encoders["image"], val.images, size, workers, device, args.amp)
    captions = encode_captions(encoders["caption"], tokenizer, val.captions, device, args.amp)
    draw = torch.Generator().manual_seed(args.seed)
    chance = torch.rand(len(images), len(captions), generator=draw)
    result = {"images": len(images), "captions": len(captions)}
    for name, similarity in (("trained", images @ captions.T), ("random", chance)):
        result[name] = retrieval_scores(similarity, image_of_caption)
        say(f"retrieval among {len(images)} photos, {name}: {format_scores(result[name])}")
    return {"retrieval": result}


def retrieval_scores(similarity, image_of_caption):
    """-> {"image to text", "text to image": {"R@1", "R@5", "R@10": percent, "median rank"}}

    similarity: (N images, M captions).  image_of_caption: (M,).  [Sec. 4.2, Cross-modal Retrieval]
    """
    to_text, to_image = retrieval_ranks(similarity, image_of_caption)
    return {"image to text": rank_scores(to_text), "text to image": rank_scores(to_image)}


def rank_scores(ranks):
    return {**recall(ranks), "median rank": 1 + float(np.median(ranks.numpy()))}


def retrieval_ranks(similarity, image_of_caption):
    """Ranks of each image's best caption (N,) and of each caption's image (M,), counted from 0

    similarity: (N images, M captions).  image_of_caption: (M,).  Equal similarities share the mean
    of their ranks: a model that finds everything alike gets no credit.
    """
    similarity = similarity.nan_to_num(-math.inf)  # vectors that are no numbers are near to nothing
    owners = torch.arange(len(similarity), device=similarity.device)
    own = image_of_caption == owners[:, None]
    best = similarity.masked_fill(~own, -math.inf).amax(1, keepdim=True)
    equal = (similarity == best) & ~own
    to_text = (similarity > best).sum(1) + equal.sum(1) / 2
    right = similarity.gather(0, image_of_caption[None])
    equal = (similarity == right).sum(0) - 1  # without the right one itself
    to_image = (similarity > right).sum(0) + equal / 2
    return to_text, to_image


def recall(ranks):
    """Ranks counted from 0 -> {"R@1", "R@5", "R@10": percent of them within the first K}"""
    return {f"R@{k}": 100 * (ranks <= k - 1).float().mean().item() for k in (1, 5, 10)}


def format_scores(scores):
    """ "image to text R@1 0.1, ..., median rank 646.5; text to image R@1 ..." """
    return "; ".join(f"{way} {common.in_words(values, 1)}" for way, values in scores.items())


# ---------------------------------------------------------------------------------------- search


def load_query_encoders(path):
    """A checkpoint.pth of this script -> encoders with their MLPs of the common space, in eval
    mode; tokenizer; the run's flags as a dict"""
    content = common.read_checkpoint(path)
    ours = isinstance(content, dict) and content.get("script") == "mmcontrastive"
    check(ours, f"{path} is no checkpoint.pth of mmcontrastive.py (a backbone alone cannot read)")
    with common.reading(path, common.CHECKPOINT):
        flags = content["args"]
        flags["image_size"] = common.image_side(flags["image_size"])
        problem = "was trained without --lambda-ic: photos and captions share no space in it"
        check(flags["lambda_ic"], f"{path} {problem}")
        tokenizer, config = read_caption_model(Path(path).parent / "caption_model")
        dims, hidden = {"inter": flags["inter_dim"]}, flags["mlp_hidden"]
        encoders = build_encoders(flags["arch"], config, ("ic", "ci"), dims, hidden)
        state = {}
        for key, value in content["model"].items():
            if key.startswith("queries.") and ".mlps.intra." not in key:
                state[key.removeprefix("queries.")] = value
        encoders.load_state_dict(state)
    return encoders.eval(), tokenizer, flags


def search(args, device):
    """`--search`: a row of ten photos for each text, the nearest first, in OUTPUT/search.png"""
    from pictures import draw_rows  # only here: trainings do without it

    encoders, tokenizer, flags = load_query_encoders(args.weights)
    encoders.to(device, memory_format=torch.channels_last)
    if args.root:
        paths, formats = sorted(Path(args.root).rglob("*")), Image.registered_extensions()
        images = common.ImageFiles(str(path) for path in paths if path.suffix.lower() in formats)
        check(len(images), f"--root {args.root} holds no photo")
    else:
        source = flags["data"], flags["root"], flags["val_split"]
        images = common.caption_data(*source, cache=args.cache).images
    size, workers = flags["image_size"], args.workers
    vectors = encode_images(encoders["image"], images, size, workers, device, args.amp)
    readable = vectors.any(1).nonzero().flatten().tolist()
    check(readable, f"none of the {len(images)} photos can be decoded")
    images, vectors = type(images)(images[n] for n in readable), vectors[readable]
    texts = encode_captions(encoders["caption"], tokenizer, args.search, device, args.amp)
    scores, nearest = (texts @ vectors.T).topk(min(10, len(images)))
    path = Path(args.output, "search.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_rows(args.search, images, nearest.tolist(), scores.tolist(), path)
    if args.root:
        for text, row in zip(args.search, nearest.tolist()):
            say(f"{text}: " + ", ".join(images[n] for n in row[:3]) + ", ...")
    say(f"the ten nearest of {len(images)} photos to each text are in {path}")


# ------------------------------------------------------------------------------ back-translation


@torch.no_grad()
def backtranslate(args, captions, device, batch_size=64):
    """`--backtranslate`: every caption to French and to German and back [Sec. 4.1]

    Writes lines {"caption", "fr", "de"}, a batch as soon as it is done: started again, it goes on.
    """
    path = Path(args.backtranslations)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_translations(path)
    lines = "".join(json.dumps(row) + "\n" for row in done.values())  # without half a line
    common.write_file(path, lambda file: file.write(lines.encode()))
    wanted = [caption for caption in dict.fromkeys(captions) if caption not in done]
    wanted.sort(key=len)  # captions of a batch are padded to the longest
    say(f"{len(done)} captions are in {path} already, {len(wanted)} to translate")
    if not wanted:
        return
    pairs = ("en", "fr"), ("fr", "en"), ("en", "de"), ("de", "en")
    models = [load_translator(args.translator.format(*pair), device, args.amp) for pair in pairs]
    to_french, from_french, to_german, from_german = models
    starts = range(0, len(wanted), batch_size)
    for start in progress(starts, desc="back-translation", unit=" batches"):
        batch = wanted[start : start + batch_size]
        french, german = from_french(to_french(batch)), from_german(to_german(batch))
        for caption, fr, de in zip(batch, french, german):
            common.append_line(path, json.dumps({"caption": caption, "fr": fr, "de": de}))
    say(f"{path} is complete")


def load_translator(name, device, amp):
    """-> function: list of texts -> list of their translations"""
    transformers = language.quiet_transformers()
    with language.loading(name, "--translator"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name)
    model.to(device).eval()
    settings = {"num_beams": 1, "do_sample": False, "max_new_tokens": 2 * MAX_TOKENS}

    def translate(texts):
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
        with common.autocast(device, amp):
            tokens = model.generate(**inputs, **settings)
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    return translate


def read_translations(path):
    """-> {caption: {"caption", "fr", "de"}}; half a last line, of a killed run, is left out"""
    if not os.path.isfile(path):
        return {}
    rows, lines = {}, Path(path).read_bytes().split(b"\n")
    for n, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            good = all(isinstance(row[key], str) for key in ("caption", "fr", "de"))
        except (ValueError, KeyError, TypeError):
            good = False
        if not good and n == len(lines):
            break
        check(good, f'{path}, line {n}: expected {{"caption", "fr", "de"}} with a text each')
        rows[row["caption"]] = row
    return rows


def read_backtranslations(args, captions):
    """The back-translations of all captions in their order, by French and by German

    [] if --caption-views is another.
    """
    if args.caption_views != "backtranslation":
        return []
    path = args.backtranslations
    rows = read_translations(path)
    missing = sum(caption not in rows for caption in captions)
    if missing:
        number = f"{missing} of {len(captions)} captions have no back-translation in {path}"
        fail(f"{number}: add --backtranslate to write them, or take --caption-views sibling")
    return [common.PackedStrings(rows[caption][by] for caption in captions) for by in ("fr", "de")]


if __name__ == "__main__":
    common.run(main, get_args)
