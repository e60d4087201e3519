"""Multimodal contrastive training: a backbone learned by telling photos, captions, and which belong together.

Yuan, Lin, Kuen, Zhang, Wang, Maire, Kale, Faieta. Multimodal Contrastive Training for Visual Representation Learning.
CVPR 2021.

Two views of a photo shall be closer to each other than to other photos (Eq. 3, MoCo-v2), two wordings of a caption than to
other captions (Eq. 8), and a photo to its caption than to others', both ways (Eqs. 11, 14); photos that share tags count
as views of each other (Eq. 5). The others come from queues that momentum encoders have filled. Closeness within a modality
and between the two is measured in different spaces, by MLPs of their own [Sec. 3.2].

    laptop        python mmcontrastive.py
    own photos    python mmcontrastive.py --data photos.jsonl ...            (the README has a command for small data)
    MoCo-v2       python mmcontrastive.py --data coco --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --lambda-tag 0
    round trips   python mmcontrastive.py --data coco --backtranslate         (once, on a GPU; the paper's views of captions)
    one GPU       python mmcontrastive.py --data coco --batch-size 128
    eight GPUs    torchrun --nproc_per_node=8 mmcontrastive.py --data coco
    two nodes     torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 mmcontrastive.py --data coco
                  (with --output on a file system that both see)
    search        python mmcontrastive.py --search "a dog in the snow" "two children" --root photos --weights runs/mmcontrastive/checkpoint.pth

What to expect: the losses start near 0 and rise while the queues fill, because only what has been filled in counts: `ii` and
`cc` towards ln(K + 1), `ic` and `ci` towards K times the margin. Then they fall, `cc` within the first hundreds of
iterations and the others slowly. A run ends with retrieval, from photos to captions and back (Tab. 7), beside that of
random vectors.

Ours: words left and right in a caption follow the photo's view that it is compared with; `--lm scratch` reads with a
WordPiece vocabulary of its own, the paper's with BERT's; MoCo-v2 is what this paper calls so (tau 0.07, batch 512).
"""

import argparse
import copy
import functools
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import common
import language
import probe
from common import fail, progress, say

DEFAULTS = {
    #                    on shapes     on real data (the paper's)
    "arch":             ("resnet18",   "resnet50"),           # Sec. 4.1
    "image_size":       (64,           224),                  # Sec. 4.1
    "crop_min":         (0.7,          0.2),                  # Sec. 4.1: MoCo-v2
    "colour_jitter":    (0.25,         1.0),                  # Sec. 4.1: MoCo-v2; the captions of shapes name exact colours
    "greyscale":        (0.0,          0.2),                  # Sec. 4.1: MoCo-v2
    "caption_views":    ("sibling",    "backtranslation"),    # Sec. 4.1
    "lm":               ("scratch",    "bert-base-uncased"),  # Sec. 4.1
    "lm_layers":        (2,            12),                   # Sec. 4.1: BERT base
    "lm_width":         (128,          768),                  # Sec. 4.1: BERT base
    "dropout":          (0.0,          0.1),                  # BERT; on shapes siblings differ enough
    "mlp_hidden":       (512,          2048),                 # Sec. 4.1
    "queue":            (512,          32_768),               # Sec. 4.1
    "momentum":         (0.995,        0.999),                # Sec. 4.1
    "bn_splits":        (4,            8),                    # MoCo: 8 GPUs
    "lambda_tag":       (0.0,          1.0),                  # Sec. 4.1; on shapes the tags are what is probed
    "lambda_ic":        (0.2,          1e-4),                 # Sec. 4.1; a sum over K keys, so that a smaller K wants more
    "lambda_ci":        (0.2,          1e-4),                 # Sec. 4.1
    "batch_size":       (32,           512),                  # Sec. 4.1
    "iters":            (900,          None),
    "epochs":           (None,         200.0),                # Sec. 4.1
    "optimizer":        ("radam",      "sgd"),                # Sec. 4.1; RAdam leaves plateaus on which a short run of SGD stays
    "lr":               (1e-3,         0.03),                 # Sec. 4.1
    "text_lr":          (1e-3,         4e-5),                 # Sec. 4.1
    "log_every":        (10,           20),
    "checkpoint_every": (200,          2000),
    "probe_images":     (2000,         10_000),
}  # fmt: skip

LOSSES = ("ii", "tag", "cc", "ic", "ci")


def get_args(argv=None):
    parser = common.flag_parser("mmcontrastive", __doc__, DEFAULTS)

    views = parser.add_argument_group("views of photos and captions")
    views.add_argument("--crop-min", type=float, help="smallest part of a photo that a crop may show; raise it when captions speak of the whole [Sec. 4.1]")
    views.add_argument("--colour-jitter", type=float, help="strength of the colour jitter; lower it when captions name exact colours [Sec. 4.1]")
    views.add_argument("--greyscale", type=float, help="share of views without colours [Sec. 4.1]")
    views.add_argument("--blur", type=float, default=0.5, help="share of views that are blurred [Sec. 4.1]")
    views.add_argument("--caption-views", choices=("same", "sibling", "backtranslation"), help="the same caption twice (dropout differs), another of the photo, or a round trip through another language [Sec. 4.1]")
    views.add_argument("--backtranslations", metavar="FILE", help="round trips, written by --backtranslate (default OUTPUT/backtranslations.jsonl)")

    model = parser.add_argument_group("model")
    model.add_argument("--arch", choices=sorted(common.BACKBONES), help="resnet50 for the paper's numbers, resnet18 for small data or a CPU [Sec. 4.1]")
    model.add_argument("--lm", help="caption encoder: a BERT-like model of the hub, a local folder, or scratch: a random BERT ('Ours (scratch)' of Tab. 1)")
    model.add_argument("--lm-layers", type=int, help="of --lm scratch; fewer for few captions [Sec. 4.1]")
    model.add_argument("--lm-width", type=int, help="of --lm scratch; a head is 64 wide [Sec. 4.1]")
    model.add_argument("--dropout", type=float, help="of --lm scratch; with --caption-views same it is all that differs [BERT]")
    model.add_argument("--mlp-hidden", type=int, help="hidden layer of the MLPs [Sec. 4.1]")
    model.add_argument("--intra-dim", type=int, default=128, help="width of the spaces within a modality [Sec. 4.1, 4.4]")
    model.add_argument("--inter-dim", type=int, default=1024, help="width of the space that photos and captions share [Sec. 4.1, 4.4]")
    model.add_argument("--unified-mlp", action="store_true", help="one MLP per encoder for both spaces, whose widths must be equal; an ablation, worse [Sec. 4.4]")
    model.add_argument("--queue", type=int, help="K, keys to compare with; fewer on fewer photos [Sec. 4.1]")
    model.add_argument("--momentum", type=float, help="m of the momentum encoders; lower it for short runs: 0.995 for a thousand iterations, 0.998 for five [Sec. 4.1]")
    model.add_argument("--bn-splits", type=int, help="groups with batch statistics of their own, over all processes, into which the momentum encoder's batch is drawn; 1 opens a shortcut [MoCo]")

    losses = parser.add_argument_group("losses")
    losses.add_argument("--lambda-ii", type=float, default=1.0, help="weight of Eq. 3, photo to photo [Sec. 4.1]")
    losses.add_argument("--lambda-tag", type=float, help="weight of Eq. 5, photos that share tags; takes no part where there are none [Sec. 4.1]")
    losses.add_argument("--lambda-cc", type=float, default=1.0, help="weight of Eq. 8, caption to caption [Sec. 4.1]")
    losses.add_argument("--lambda-ic", type=float, help="weight of Eq. 11, photo to captions; raise it as you lower --queue [Sec. 4.1]")
    losses.add_argument("--lambda-ci", type=float, help="weight of Eq. 14, caption to photos; raise it as you lower --queue [Sec. 4.1]")
    losses.add_argument("--temperature", type=float, default=0.07, help="tau of Eqs. 3, 5, 8 [Sec. 4.1]")
    losses.add_argument("--margin", type=float, default=0.2, help="alpha of Eqs. 11, 14 [Sec. 4.1]")
    losses.add_argument("--tag-threshold", type=float, default=2, help="epsilon of Eq. 4: photos with more than this many common tags belong together [Sec. 4.1]")

    optim = parser.add_argument_group("optimisation")
    optim.add_argument("--batch-size", type=int, help="photos per iteration over all processes [Sec. 4.1]")
    optim.add_argument("--iters", type=int, help="length in iterations; short runs want some thousands")
    optim.add_argument("--epochs", type=float, help="length in passes over the photos, instead of --iters [Sec. 4.1]")
    optim.add_argument("--optimizer", choices=("sgd", "radam"), help="radam, with its own --lr and --text-lr of about 1e-3, for short runs on small data [Sec. 4.1]")
    optim.add_argument("--lr", type=float, help="initial, for the photo encoder; cosine [Sec. 4.1]")
    optim.add_argument("--text-lr", type=float, help="initial, for the caption encoder; 4e-5 suits a pretrained BERT [Sec. 4.1]")
    optim.add_argument("--warmup", type=float, default=0.0, help="share of the run in which the learning rates rise [ours]")
    optim.add_argument("--weight-decay", type=float, default=1e-4, help="of everything [Sec. 4.1]")

    use = parser.add_argument_group("retrieval, and other uses")
    use.add_argument("--retrieval-images", type=int, default=1000, help="photos of the validation split to retrieve among, drawn once [Sec. 4.4, Tab. 7]")
    use.add_argument("--weights", help="a checkpoint.pth of this script")
    use.add_argument("--search", nargs="+", metavar="TEXT", help="find the ten photos nearest to each text, below --root or else in the validation split; a picture goes to OUTPUT/search.png")
    use.add_argument("--backtranslate", action="store_true", help="translate all training captions to French and German and back; what is done already is kept")
    use.add_argument("--translator", default="Helsinki-NLP/opus-mt-{}-{}", help="MarianMT models of the hub or local folders, a pattern for the two languages [Sec. 4.1]")

    args = parser.parse_args(argv)
    given = {flag for flag, value in vars(args).items() if value is not None}
    args = common.fill_defaults(args, DEFAULTS, scaled=("lr", "text_lr"))
    if "iters" in given:
        args.epochs = None
    weights = {name: getattr(args, f"lambda_{name}") for name in LOSSES}
    if not all(0 <= weight < math.inf for weight in weights.values()) or not (args.lambda_ii or args.lambda_tag or args.lambda_ic):
        fail("no --lambda-* may be below 0, and the photo encoder learns nothing without --lambda-ii, --lambda-tag or --lambda-ic")
    if bool(args.lambda_ic) != bool(args.lambda_ci):
        fail("--lambda-ic and --lambda-ci: one alone would compare with a space that nothing trains; give both, or 0 for both")
    if args.unified_mlp and args.intra_dim != args.inter_dim:
        fail(f"--unified-mlp has one width for both spaces: --intra-dim {args.intra_dim} and --inter-dim {args.inter_dim} must be equal [Sec. 4.4: 128, 1024 or 1152]")
    if not 0 < args.crop_min <= 1 or not all(0 <= share <= 1 for share in (args.colour_jitter, args.greyscale, args.blur, args.momentum)):
        fail("--crop-min must be in (0, 1]; --colour-jitter, --greyscale, --blur and --momentum in [0, 1]")
    if not 0 <= args.dropout < 1 or args.caption_views == "same" and args.lm == "scratch" and args.lambda_cc and not args.dropout:
        fail("--dropout must be in [0, 1), and above 0 with --caption-views same, whose views are alike without it")
    if args.lm_width % 64 or min(args.lm_layers, args.lm_width, args.mlp_hidden, args.intra_dim, args.inter_dim, args.bn_splits, args.retrieval_images) < 1:
        fail("--lm-width must be a multiple of 64; --lm-layers, --mlp-hidden, --intra-dim, --inter-dim, --bn-splits and --retrieval-images at least 1")
    if args.optimizer != DEFAULTS["optimizer"][args.data != "shapes"] and not {"lr", "text_lr"} <= given:
        fail(f"--optimizer {args.optimizer} needs its --lr and --text-lr: the defaults belong to the other")
    if not args.lr > 0 or not args.text_lr > 0 or not args.weight_decay >= 0 or not 0 <= args.warmup < 1:
        fail("--lr and --text-lr must be above 0, --weight-decay at least 0, --warmup in [0, 1)")
    if not args.temperature > 0 or not args.margin >= 0 or not args.tag_threshold >= 0:
        fail("--temperature must be above 0, --margin and --tag-threshold at least 0")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    groups = max(args.bn_splits, processes)
    if groups % processes or args.batch_size % groups or args.batch_size < 2 * groups:
        fail(f"--batch-size {args.batch_size} cannot be split into --bn-splits {groups} groups of two or more over {processes} processes")
    if args.queue < args.batch_size:
        fail(f"--queue {args.queue} must hold at least one batch of {args.batch_size}")
    if args.search and args.backtranslate:
        fail("give --search or --backtranslate, not both")
    if bool(args.search) != bool(args.weights):
        fail("--weights FILE goes with --search TEXT..." if args.weights else "--search needs --weights FILE")
    if args.translator.count("{}") != 2:
        fail(f"--translator {args.translator} must hold {{}} twice, for the language from and the language to")
    args.require_tags = "lambda_tag" in given and args.lambda_tag > 0  # otherwise they take part where they are
    args.backtranslations = args.backtranslations or os.path.join(args.output, "backtranslations.jsonl")
    return args


def main(args):
    world = common.start_processes()
    device, args.amp = world.device, common.choose_amp(world.device, args.amp)
    if args.search:
        return search(args, device)
    if args.backtranslate:
        return backtranslate(args, device)
    run = common.Run(args, "mmcontrastive", world)
    checkpoint = run.begin()

    # Data: photos, and what is there of captions and tags.
    train, val = (
        common.caption_data(args.data, args.root, args.train_split, args.fraction, args.captions_per_image, args.seed),
        common.caption_data(args.data, args.root, args.val_split),
    )
    weights = {name: getattr(args, f"lambda_{name}") for name in LOSSES}
    reads = bool(weights["cc"] or weights["ic"])
    round_trips = read_backtranslations(args.backtranslations, train.captions) if reads and args.caption_views == "backtranslation" else []
    run.same_data(checkpoint, train, val, *round_trips)
    labelled = probe.probe_data(args, train, val)
    train, weights["tag"] = usable(train, args, weights)
    photos = (np.diff(train.first_caption) > 0).sum() if reads else len(train)
    size = min(args.queue, photos) // args.batch_size * args.batch_size
    kind = "photos with captions" if reads else "photos"
    if not size:
        fail(f"{photos} {kind} are fewer than a batch of {args.batch_size}: lower --batch-size")
    if size != args.queue:
        say(f"queues of {size} keys instead of {args.queue}: a multiple of the batch, and no more than there are {kind}" + reads * " (--lambda-ic and --lambda-ci weight sums over them)")
    tokenizer, config = None, None
    if reads:
        with common.main_first(world):
            if world.is_main and not checkpoint:
                keep_caption_model(args, train.captions, run.folder / "caption_model")
            tokenizer, config = read_caption_model(run.folder / "caption_model")
    iters = math.ceil(args.epochs * len(train) / args.batch_size) if args.epochs else args.iters
    say(f"{len(train)} photos with {len(train.captions)} captions and {len(train.tags)} tags; {iters} iterations of {args.batch_size}, {iters * args.batch_size / len(train):.1f} epochs")
    if reads and args.lm == "scratch" and args.caption_views == "sibling" and not args.dropout and (single := int((np.diff(train.first_caption) == 1).sum())):
        say(f"{single} photos have one caption, whose two views are alike: for them Eq. 8 teaches little without --dropout")

    # Encoders and queues, optimiser, and where an earlier run stopped.
    torch.manual_seed(args.seed)
    model = build_model(args, config, len(train.tag_names) if weights["tag"] else 0, size)
    if reads and args.lm != "scratch" and not checkpoint:
        load_pretrained(model, args.lm)
    model.to(device, memory_format=torch.channels_last)
    groups = [{"params": model.queries[name].parameters(), "max_lr": lr} for name, lr in (("image", args.lr), ("caption", args.text_lr)) if name in model.queries]
    optimizer = common.build_optimizer(args, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start, best = run.restore(checkpoint, parts)
    checkpoint = None
    if args.compile:
        model.queries["image"].trunk.compile()
        model.keys["image"].trunk.compile()
    parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if world.size > 1 else model

    view = TwoViews(train, args, round_trips)
    sampler = common.InfiniteSampler(len(train), args.batch_size, world, args.seed, start)
    loader = common.make_loader(view, sampler, args.batch_size // world.size, args.workers, functools.partial(collate, tokenizer=tokenizer), device)
    feed = common.Feed(loader, device, run, train.images)

    parallel.train()
    bar = progress(total=iters, initial=start, unit=" its", desc="mmcontrastive")
    with common.StopSignals() as stop:
        for iteration, batch in zip(range(start + 1, iters + 1), feed):
            factor = common.warmup_cosine(iteration - 1, iters, args.warmup * iters)
            for group in optimizer.param_groups:
                group["lr"] = group["max_lr"] * factor
            # Dropout, too, is a function of the seed, the iteration and the rank: a resumed run draws the same.
            torch.manual_seed((args.seed << 40) + iteration * world.size + world.rank)

            photos = [blur(common.augment(images, jitter), sigma) for images, jitter, sigma in zip(*(batch[part].unbind(1) for part in ("images", "jitter", "blur")))]
            captions = [(batch[f"tokens{n}"], batch[f"visible{n}"]) for n in (0, 1)] if reads else (None, None)
            update_momentum(model.queries, model.keys, args.momentum)
            with common.autocast(device, args.amp):
                queries = parallel(photos[0], captions[0])
                keys = model.encode_keys(photos[1], captions[1], world, np.random.default_rng([args.seed, iteration]), args.bn_splits)
            mine = slice(world.rank * len(batch["tags"]), (world.rank + 1) * len(batch["tags"]))
            positives = {name: key[mine] for name, key in keys.items()}
            losses = contrastive_losses(queries, positives, model.queues, batch["tags"], batch["captioned"], args)
            loss = sum(weights[name] * losses[name] for name in losses)  # Eq. 15
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            model.enqueue(keys, batch["tags"], batch["captioned"], world)
            bar.update()

            stopping = common.any_process(world, bool(stop.number))
            saving = stopping or iteration % args.checkpoint_every == 0 or iteration == iters
            if saving or iteration % args.log_every == 0:  # the only places that wait for the device
                terms = common.average(world, torch.stack([term.detach() for term in (loss, *losses.values())])).tolist()
                run.check_finite(iteration, {"loss": terms[0]})
                bar.set_postfix({name: f"{term:.2f}" for name, term in zip(losses, terms[1:])})
            if iteration % args.log_every == 0:
                run.log(iteration, feed, loss=terms[0], **dict(zip(losses, terms[1:])), lr=args.lr * factor, text_lr=args.text_lr * factor)
            if args.probe_every and iteration % args.probe_every == 0 and world.is_main:
                best = probe.keep_best(run, iteration, model.backbone, labelled, best, device)
            if saving:
                run.save(iteration, **{name: part.state_dict() for name, part in parts.items()}, best=best)
            if stopping:
                bar.close()
                say(f"stopped after iteration {iteration}: checkpoint written, the same command goes on from there")
                sys.exit(128 + stop.number)
    bar.close()

    # The backbone is the result; the probe says what it is worth.
    common.end_processes(world)
    if not world.is_main:
        return
    run.save_weights("backbone.pth", model.backbone.state_dict())
    result = {}
    if weights["ic"] and len(val.captions):
        result["retrieval"] = validate(model, val, tokenizer, args, device)
        for name, scores in result["retrieval"].items():
            if name not in ("images", "captions"):
                say(f"retrieval among {result['retrieval']['images']} photos, {name}: " + "; ".join(f"{way} " + ", ".join(f"{k} {v:.1f}" for k, v in part.items()) for way, part in scores.items()))
    run.finish(**result, **probe.final_probe(run, model.backbone, labelled, best, device))


def usable(train, args, weights):
    """The photos that take part in some loss [Sec. 3.2, end], and the weight of Eq. 5: 0 without tags. Ends the program when
    a loss that was asked for has no data."""
    captioned = np.diff(train.first_caption) > 0
    if (weights["cc"] or weights["ic"]) and not captioned.any():
        fail("no photo has a caption: with --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 photos are enough (MoCo-v2)")
    if weights["tag"] and not len(train.tags):
        if args.require_tags or not (weights["ii"] or weights["ic"]):
            fail('--lambda-tag wants tags and no photo has any: annotations/instances_{split}.json for coco, "tags" in a .jsonl')
        say("no photo has tags: the loss of Eq. 5 takes no part")
        weights = {**weights, "tag": 0.0}
    if not (weights["ii"] or weights["tag"]) and not captioned.all():
        say(f"{(~captioned).sum()} photos without a caption are left out: no loss is left for them")
        train = train.select(np.flatnonzero(captioned))
    return train, weights["tag"]


# ------------------------------------------------------------------------------------------ the caption encoder's files

MAX_TOKENS = 64  # of a caption; what is behind is cut off [ours]


def keep_caption_model(args, captions, folder):
    """Tokenizer and architecture of the caption encoder, in the output folder: --search and a run that goes on read them there."""
    transformers = language.quiet_transformers()
    if args.lm == "scratch":
        tokenizer = language.train_wordpiece(captions)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=args.lm_width, num_hidden_layers=args.lm_layers, num_attention_heads=args.lm_width // 64,
            intermediate_size=4 * args.lm_width, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
            hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
            # BERT's 0.02 gives all captions the same vector, up to dropout, and a contrast of nothing teaches nothing. [ours]
            initializer_range=args.lm_width**-0.5,
        )  # fmt: skip
    else:
        with language.loading(args.lm):
            tokenizer, config = transformers.AutoTokenizer.from_pretrained(args.lm), transformers.AutoConfig.from_pretrained(args.lm)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def read_caption_model(folder):
    """-> tokenizer, architecture"""
    transformers = language.quiet_transformers()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data workers tokenise
    with language.loading(folder):
        tokenizer, config = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoConfig.from_pretrained(folder)
    if tokenizer.pad_token is None:
        fail("the tokenizer of --lm has no token for padding: give a BERT-like model")
    return tokenizer, config


def load_pretrained(model, name):
    """Start both caption encoders from the weights of `name`. Not all models have a trained pooler: it then starts at random."""
    with language.loading(name):
        pretrained, loading = language.quiet_transformers().AutoModel.from_pretrained(name, output_loading_info=True)
    if loading["missing_keys"]:
        say(f"--lm {name} lacks {', '.join(sorted(loading['missing_keys'])[:3])}: random at first")
    for encoders in (model.queries, model.keys):
        encoders["caption"].trunk.bert.load_state_dict(pretrained.state_dict())


# ------------------------------------------------------------------------------------------ samples and batches


class TwoViews(Dataset):
    """A photo seen twice and two views of one of its captions.

    The query of a photo meets the key of its caption and the other way round (Eqs. 9 to 13), so the words left and right
    follow the view of the photo that a caption is compared with; two views of a caption may then differ in them. [ours]
    """

    def __init__(self, data, args, round_trips=None):
        self.data, self.args, self.round_trips = data, args, round_trips

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        (epoch, index), args, data = key, self.args, self.data
        rng = common.sample_rng(args.seed, epoch, index)
        images, index, unreadable = common.read_crops(data.images, index, 2 * [common.random_crop(rng, (args.crop_min, 1.0))], args.image_size)
        jitter = np.stack([common.draw_colour_jitter(rng, args.colour_jitter) for _ in images])
        jitter[rng.random(2) < args.greyscale, 2:] = 0  # no saturation, and no hue to turn
        sigma = np.where(rng.random(2) < args.blur, rng.uniform(0.1, 2.0, 2), 0) * args.image_size / 224  # MoCo-v2's at 224 pixels
        mirrored = rng.random(2) < 0.5
        captions = self.caption_views(index, rng)
        if captions:
            captions = [language.swap_left_right(caption) if flip else caption for caption, flip in zip(captions, mirrored[::-1])]
        tags = np.zeros(len(data.tag_names or ()), np.float32)
        tags[data.tags_of(index)] = 1
        return {
            "images": [image[:, ::-1] if flip else image for image, flip in zip(images, mirrored)], "jitter": jitter, "blur": sigma.astype(np.float32),
            "captions": captions or ["", ""], "captioned": bool(captions), "tags": tags, "unreadable": unreadable,
        }  # fmt: skip

    def caption_views(self, index, rng):
        """Two views of one of the photo's captions [Sec. 3.1]; of a round trip one view is the caption itself [ours]"""
        first, last = self.data.first_caption[index], self.data.first_caption[index + 1]
        if first == last:
            return []
        n = rng.integers(first, last)
        captions = self.data.captions
        if self.args.caption_views == "sibling" and last - first > 1:
            other = rng.integers(first, last - 1)
            return [captions[n], captions[other + (other >= n)]]
        if self.round_trips:
            return [captions[n], self.round_trips[rng.integers(len(self.round_trips))][n]]
        return [captions[n], captions[n]]


def collate(samples, tokenizer):
    """-> images uint8 (B, 2, size, size, 3), jitter (B, 2, 4), blur (B, 2): sigma in pixels, tags (B, tags), captioned (B,), the
    list of unreadable images; with a tokenizer also tokens and visible of both views, (B, T) each"""
    stack = lambda name: torch.from_numpy(np.stack([np.asarray(sample[name]) for sample in samples]))
    batch = {name: stack(name) for name in ("images", "jitter", "blur", "tags")}
    batch["captioned"] = torch.tensor([sample["captioned"] for sample in samples])
    batch["unreadable"] = sorted({index for sample in samples for index in sample["unreadable"]})
    for n in (0, 1) if tokenizer else ():
        batch[f"tokens{n}"], batch[f"visible{n}"] = tokenise(tokenizer, [sample["captions"][n] for sample in samples])
    return batch


def tokenise(tokenizer, captions):
    """-> tokens (B, T), visible (B, T): no padding"""
    encoded = tokenizer(captions, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"].bool()


def blur(images, sigma):
    """Gaussian blur of each image (B, 3, h, w) by its own sigma (B,), in pixels; 0 leaves it as it is [MoCo-v2]

    As matrices (h, h) and (w, w) beside each image: their rows sum to one up to the border, and a blurred normalised
    image is a normalised blurred one.
    """

    def kernel(side):
        place = torch.arange(side, device=images.device, dtype=torch.float32)
        return (-0.5 * ((place[:, None] - place) / sigma.clamp(min=1e-3)[:, None, None]) ** 2).softmax(-1)[:, None]

    blurred = kernel(images.size(2)) @ images.contiguous() @ kernel(images.size(3)).mT
    return blurred.contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------ encoders


class CaptionTrunk(nn.Module):
    """A BERT-like model's pooled output, of the first token. tokens, visible (B, T) -> (B, d)"""

    def __init__(self, config):
        super().__init__()
        self.bert = language.quiet_transformers().AutoModel.from_config(config).float()  # some are published in half precision

    def forward(self, tokens, visible):
        output = self.bert(input_ids=tokens, attention_mask=language.attention_mask(self.bert, visible))
        pooled = output.get("pooler_output")
        return output.last_hidden_state[:, 0] if pooled is None else pooled


class Encoder(nn.Module):
    """A trunk, and an MLP into each space: `intra` its modality and `inter` both -> {space: (B, dim), l2-normalised} [Sec. 4.1]"""

    def __init__(self, trunk, width, spaces, hidden, unified):
        super().__init__()
        mlp = lambda dim: nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.trunk, self.mlps = trunk, nn.ModuleDict({space: mlp(dim) for space, dim in spaces.items()})
        if unified:
            self.mlps = nn.ModuleDict(dict.fromkeys(spaces, mlp(*set(spaces.values()))))

    def forward(self, *inputs):
        features = self.trunk(*inputs)
        return {space: F.normalize(mlp(features).float(), dim=1) for space, mlp in self.mlps.items()}


class MultimodalContrastive(nn.Module):
    """Encoders of photos and of captions, their momentum copies, and the queues of keys (Fig. 2).

    encoders: {"image": Encoder} and, where captions are read, "caption".  num_tags: 0 without Eq. 5.  size: K
    """

    def __init__(self, encoders, num_tags, size):
        super().__init__()
        self.queries, self.keys = nn.ModuleDict(encoders), copy.deepcopy(nn.ModuleDict(encoders)).requires_grad_(False)
        dims = {(name, space): mlp[-1].out_features for name, encoder in encoders.items() for space, mlp in encoder.mlps.items()}
        # Of what modality the keys of each loss are, and in which space.
        kinds = {"ii": ("image", "intra"), "cc": ("caption", "intra"), "ic": ("caption", "inter"), "ci": ("image", "inter")}
        self.queues = nn.ModuleDict({name: Queue(size, dims[kind]) for name, kind in kinds.items() if kind in dims})
        if num_tags:
            self.queues["tag"] = Queue(size, num_tags)

    @property
    def backbone(self):
        return self.queries["image"].trunk[0]

    def forward(self, photos, captions=None):
        """photos (B, 3, h, w), captions (tokens, visible) or None -> queries {"ii", "ic", "cc", "ci": (B, dim)}: Eqs. 1, 9, 6, 12"""
        image = self.queries["image"](photos)
        caption = self.queries["caption"](*captions) if captions else {}
        return named(ii=image.get("intra"), ic=image.get("inter"), cc=caption.get("intra"), ci=caption.get("inter"))

    @torch.no_grad()
    def encode_keys(self, photos, captions, world, rng, splits):
        """The keys of the whole batch, of all processes, on each of them: {"ii", "ci", "cc", "ic"}: Eqs. 2, 13, 7, 10

        Shuffled batch norm [MoCo]: the batch is drawn anew into `splits` groups that have batch statistics of their own, or
        a query would find its key by statistics that both have seen. rng: the same on all processes.
        """
        photos = gather(photos, world)
        order = torch.from_numpy(rng.permutation(len(photos))).to(photos.device, non_blocking=True)
        shares = order.chunk(world.size)[world.rank].chunk(max(1, splits // world.size))
        groups = [self.keys["image"](photos[share].contiguous(memory_format=torch.channels_last)) for share in shares]
        back = order.argsort()
        image = {space: gather(torch.cat([group[space] for group in groups]), world)[back] for space in groups[0]}
        caption = self.keys["caption"](*captions) if captions else {}
        caption = {space: gather(vectors, world) for space, vectors in caption.items()}
        return named(ii=image.get("intra"), ci=image.get("inter"), cc=caption.get("intra"), ic=caption.get("inter"))

    @torch.no_grad()
    def enqueue(self, keys, tags, captioned, world):
        """keys: of the whole batch; tags (b, tags), captioned (b,): of this process. A caption that is not there leaves no key."""
        captioned = gather(captioned, world)
        for name, key in keys.items():
            self.queues[name].enqueue(key, captioned if name in ("cc", "ic") else torch.ones_like(captioned))
        if "tag" in self.queues:
            self.queues["tag"].enqueue(gather(tags, world), torch.ones_like(captioned))


def named(**vectors):
    return {name: vector for name, vector in vectors.items() if vector is not None}


def gather(x, world):
    """(b, ...) of each process -> (size * b, ...), in the order of the processes"""
    if world.size == 1:
        return x
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def build_model(args, config, num_tags, size):
    """config: of the caption encoder, None without one"""
    def spaces(intra, inter):
        return {space: dim for space, dim, used in (("intra", args.intra_dim, intra), ("inter", args.inter_dim, inter)) if used}

    backbone = common.build_backbone(args.arch)
    photos = nn.Sequential(backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoders = {"image": Encoder(photos, backbone.channels, spaces(args.lambda_ii or num_tags, args.lambda_ic), args.mlp_hidden, args.unified_mlp)}
    if config:
        encoders["caption"] = Encoder(CaptionTrunk(config), config.hidden_size, spaces(args.lambda_cc, args.lambda_ic), args.mlp_hidden, args.unified_mlp)
    return MultimodalContrastive(encoders, num_tags, size)


@torch.no_grad()
def update_momentum(queries, keys, m):
    """theta_k <- m theta_k + (1 - m) theta_q, MLPs included [Sec. 3.1]"""
    torch._foreach_lerp_(list(keys.parameters()), list(queries.parameters()), 1 - m)


class Queue(nn.Module):
    """The last K keys, first in first out. Slots that were never filled count for nothing [ours]."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("total", torch.zeros((), dtype=torch.long))

    @property
    def filled(self):
        """(K,) bool"""
        return torch.arange(len(self.keys), device=self.keys.device) < self.total

    def enqueue(self, keys, valid):
        """Put the keys (B, dim) that are `valid` (B,) over the oldest. B <= K. The host does not learn how many: it would have to wait."""
        number = torch.arange(len(keys), device=keys.device)
        front = (~valid).byte().argsort(stable=True)  # the valid ones first, in their order
        place = (self.total + number) % len(self.keys)
        self.keys[place] = torch.where((number < valid.sum())[:, None], keys[front].to(self.keys.dtype), self.keys[place])
        self.total += valid.sum()


# ------------------------------------------------------------------------------------------ losses


def contrastive_losses(queries, keys, queues, tags, captioned, args):
    """Eqs. 3, 5, 8, 11 and 14, each a mean over the batch -> {"ii", "tag", "cc", "ic", "ci"}, those that there are vectors for

    queries, keys: {name: (B, dim)}; keys are those of the same photos and captions.  tags (B, tags), captioned (B,). What a
    photo has no data for it adds nothing to: without tags Eq. 5, without a caption Eqs. 8, 11, 14 [Sec. 3.2, end].
    """
    losses = {}
    if "ii" in queries:
        log_p = log_probabilities(queries["ii"], keys["ii"], queues["ii"], args.temperature)
        losses["ii"] = -log_p[:, 0].mean()  # Eq. 3
        if "tag" in queues:
            losses["tag"] = (tag_loss(log_p, tags, queues["tag"], args.tag_threshold) * tags.any(1)).mean()
    if "cc" in queries:
        losses["cc"] = (-log_probabilities(queries["cc"], keys["cc"], queues["cc"], args.temperature)[:, 0] * captioned).mean()  # Eq. 8
    for name in ("ic", "ci"):
        if name in queries:
            losses[name] = (ranking_loss(queries[name], keys[name], queues[name], args.margin) * captioned).mean()
    return losses


def log_probabilities(query, key, queue, temperature):
    """log softmax of Eqs. 3, 5 and 8 -> (B, 1 + K): the own key first, then the queue; -inf where the queue is not yet filled"""
    own, others = (query * key).sum(1, keepdim=True), query @ queue.keys.T
    return torch.cat([own, others.masked_fill(~queue.filled, -math.inf)], 1).div(temperature).log_softmax(1)


def tag_loss(log_p, tags, queue, threshold):
    """Eq. 5: the mean over the positives P of Eq. 4, the own key and those with more than `threshold` tags in common -> (B,)"""
    positive = torch.cat([torch.ones_like(tags[:, :1], dtype=torch.bool), (tags @ queue.keys.T > threshold) & queue.filled], 1)
    return -log_p.masked_fill(~positive, 0).sum(1) / positive.sum(1)


def ranking_loss(query, key, queue, margin):
    """Eqs. 11 and 14: sum over the queue of [margin - own + other]_+ -> (B,)"""
    own, others = (query * key).sum(1, keepdim=True), query @ queue.keys.T
    return (margin - own + others).clamp(min=0).masked_fill(~queue.filled, 0).sum(1)


# ------------------------------------------------------------------------------------------ retrieval


@torch.no_grad()
def encode_photos(model, images, args, device):
    """Each photo by its central square, in the space that photos and captions share -> (N, inter_dim), on the CPU

    Photos that cannot be decoded are named and get the vector 0: they are near to nothing.
    """
    loader = DataLoader(common.CropView(images, args.image_size, part=1.0), 64, num_workers=args.workers, worker_init_fn=common.ignore_signals)
    vectors, readable = [], []
    for pixels, good in progress(loader, desc="photos", unit=" batches", leave=False):
        with common.autocast(device, args.amp):
            vectors.append(model.queries["image"](common.augment(pixels.to(device)))["inter"].cpu())
        readable.append(good)
    readable = torch.cat(readable)
    for n in (~readable).nonzero().flatten().tolist():
        say(f"cannot decode {images[n]}: left out")
    return torch.cat(vectors) * readable[:, None]


@torch.no_grad()
def encode_captions(model, tokenizer, captions, args, device, batch_size=256):
    """-> (N, inter_dim), on the CPU"""
    vectors = []
    for first in progress(range(0, len(captions), batch_size), desc="captions", unit=" batches", leave=False):
        tokens, visible = tokenise(tokenizer, [captions[n] for n in range(first, min(first + batch_size, len(captions)))])
        with common.autocast(device, args.amp):
            vectors.append(model.queries["caption"](tokens.to(device), visible.to(device))["inter"].cpu())
    return torch.cat(vectors)


def validate(model, val, tokenizer, args, device):
    """Retrieval on the validation split [Tab. 7] -> {"images": N, "captions": M, "trained": scores, "random": scores of random vectors}"""
    captioned = np.flatnonzero(np.diff(val.first_caption) > 0)
    drawn = np.random.default_rng(args.seed).permutation(captioned)[: args.retrieval_images]
    val = val.select(np.sort(drawn))
    image_of_caption = torch.from_numpy(np.repeat(np.arange(len(val)), np.diff(val.first_caption)))
    model.eval()
    photos, captions = encode_photos(model, val.images, args, device), encode_captions(model, tokenizer, val.captions, args, device)
    model.train()
    draw = torch.Generator().manual_seed(args.seed)
    return {
        "images": len(photos), "captions": len(captions), "trained": retrieval_scores(photos @ captions.T, image_of_caption),
        "random": retrieval_scores(torch.rand(len(photos), len(captions), generator=draw), image_of_caption),
    }  # fmt: skip


def retrieval_scores(similarity, image_of_caption):
    """-> {"image to text", "text to image": {"R@1", "R@5", "R@10": percent, "median rank"}} [Sec. 4.2, Cross-modal Retrieval]

    similarity (N images, M captions), image_of_caption (M,). An image's rank is that of its best caption. Equal
    similarities share the ranks between them: a model that finds everything alike gets no credit.
    """
    similarity = similarity.nan_to_num(-math.inf)  # vectors that are no numbers are near to nothing
    own = image_of_caption == torch.arange(len(similarity))[:, None]
    best = similarity.masked_fill(~own, -math.inf).amax(1, keepdim=True)
    to_text = 1 + ((similarity > best) & ~own).sum(1) + ((similarity == best) & ~own).sum(1) / 2
    right = similarity[image_of_caption, torch.arange(similarity.size(1))]
    to_image = 1 + (similarity > right).sum(0) + ((similarity == right).sum(0) - 1) / 2

    def scores(ranks):
        return {**{f"R@{k}": 100 * (ranks <= k).float().mean().item() for k in (1, 5, 10)}, "median rank": float(np.median(ranks.numpy()))}

    return {"image to text": scores(to_text), "text to image": scores(to_image)}


# ------------------------------------------------------------------------------------------ for people


def search(args, device):
    """`--search`: one row of ten photos for each text, the nearest first, in OUTPUT/search.png"""
    content = common.read_checkpoint(args.weights)
    if not isinstance(content, dict) or content.get("script") != "mmcontrastive":
        fail(f"{args.weights} is no checkpoint.pth of mmcontrastive.py (a backbone alone cannot read)")
    trained = argparse.Namespace(**content["args"])
    if not trained.lambda_ic:
        fail(f"{args.weights} was trained without --lambda-ic: photos and captions share no space in it")
    tokenizer, config = read_caption_model(Path(args.weights).parent / "caption_model")
    queues = {key: value.shape for key, value in content["model"].items() if key.startswith("queues.") and key.endswith(".keys")}
    num_tags = queues["queues.tag.keys"][1] if "queues.tag.keys" in queues else 0
    model = build_model(trained, config, num_tags, queues["queues.ic.keys"][0])
    model.load_state_dict(content["model"])
    model.to(device, memory_format=torch.channels_last).eval()
    if args.root:
        paths = sorted(str(path) for path in Path(args.root).rglob("*") if path.suffix.lower() in Image.registered_extensions())
        images = common.ImageFiles(paths)
        if not paths:
            fail(f"--root {args.root} holds no photo")
    else:
        images = common.caption_data(trained.data, trained.root, trained.val_split).images
    trained.workers, trained.amp = args.workers, args.amp
    photos = encode_photos(model, images, trained, device)
    readable = photos.any(1)
    if not readable.any():
        fail(f"none of the {len(images)} photos can be decoded")
    images, photos = type(images)(images[n] for n in readable.nonzero().flatten().tolist()), photos[readable]
    similarity = encode_captions(model, tokenizer, args.search, trained, device) @ photos.T
    nearest = similarity.topk(min(10, len(images)))
    path = Path(args.output, "search.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(text, [((images, n), f"{score:.2f}") for score, n in zip(*row)]) for text, *row in zip(args.search, nearest.values.tolist(), nearest.indices.tolist())]
    draw_rows(rows, path)
    if args.root:
        for text, places in zip(args.search, nearest.indices.tolist()):
            say(f"{text}: " + ", ".join(images[n] for n in places[:3]) + ", ...")
    say(f"the ten nearest of {len(images)} photos to each text are in {path}")


def draw_rows(rows, path, side=128):
    """rows: [(text, [((images, index), note), ...]), ...] -> one picture"""
    font, height = ImageFont.load_default(15), side + 48
    sheet = Image.new("RGB", (max(len(photos) for _, photos in rows) * (side + 8) + 8, len(rows) * height + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for y, (text, photos) in zip(range(8, len(rows) * height, height), rows):
        draw.text((8, y), text, "black", font)
        for x, (photo, note) in zip(range(8, sheet.width, side + 8), photos):
            pixels, _, _ = common.read_crop(*photo, common.centre_crop(1.0), side)
            sheet.paste(Image.fromarray(pixels), (x, y + 22))
            draw.text((x + side / 2, y + 22 + side), note, "grey", font, anchor="ma")
    sheet.save(path)


PIVOTS = ("fr", "de")


@torch.no_grad()
def backtranslate(args, device, batch_size=64):
    """`--backtranslate`: every training caption to French and to German and back [Sec. 4.1], a line for each in the file

    {"caption", "fr", "de"}. A batch is written as soon as it is done; started again, it goes on from there.
    """
    if "RANK" in os.environ:
        fail("--backtranslate is one process's work: start it without torchrun")
    data = common.caption_data(args.data, args.root, args.train_split, args.fraction, args.captions_per_image, args.seed)
    path = Path(args.backtranslations)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_round_trips(path)
    common.write_file(path, lambda file: file.writelines(f"{json.dumps(row)}\n".encode() for row in done.values()))  # without half a line
    wanted = [caption for caption in dict.fromkeys(data.captions) if caption not in done]
    wanted.sort(key=len)  # captions of a batch are padded to the longest
    say(f"{len(done)} captions are in {path} already, {len(wanted)} to translate")
    if not wanted:
        return
    translators = {pair: translator(args.translator.format(*pair), device, args.amp) for pivot in PIVOTS for pair in (("en", pivot), (pivot, "en"))}
    for first in progress(range(0, len(wanted), batch_size), desc="round trips", unit=" batches"):
        batch = wanted[first : first + batch_size]
        trips = {pivot: translators[pivot, "en"](translators["en", pivot](batch)) for pivot in PIVOTS}
        common.append_line(path, "\n".join(json.dumps(dict(zip(("caption", *trips), row))) for row in zip(batch, *trips.values())))
    say(f"{path} is complete")


def translator(name, device, amp):
    """-> function [text, ...] -> [translation, ...]"""
    transformers = language.quiet_transformers()
    with language.loading(name, "--translator"):
        tokenizer, model = transformers.AutoTokenizer.from_pretrained(name), transformers.AutoModelForSeq2SeqLM.from_pretrained(name)
    model.to(device).eval()

    def translate(texts):
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
        with common.autocast(device, amp):
            tokens = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=2 * MAX_TOKENS)
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    return translate


def read_round_trips(path):
    """-> {caption: {"caption", "fr", "de"}} of the file; half a last line, of a killed run, is left out"""
    rows = {}
    if os.path.isfile(path):
        with open(path, "rb") as file:
            for n, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError):
                    if not line.endswith(b"\n"):
                        break
                    row = None
                if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("caption", *PIVOTS)):
                    fail(f'{path}, line {n}: expected {{"caption", {", ".join(map(json.dumps, PIVOTS))}}} with a text each')
                rows[row["caption"]] = row
    return rows


def read_backtranslations(path, captions):
    """-> for each language the round trips of all captions, packed in their order"""
    rows = read_round_trips(path)
    missing = sum(caption not in rows for caption in captions)
    if missing:
        fail(f"{missing} of {len(captions)} captions have no round trip in {path}: write them with the same command and --backtranslate, or take --caption-views sibling")
    return [common.PackedStrings(rows[caption][pivot] for caption in captions) for pivot in PIVOTS]


if __name__ == "__main__":
    common.run(main, get_args)
