"""What only some runs need: Visual Genome, shards, checkpoints of other authors, --init.

common.py imports this file only when it needs it.
"""

import argparse
import functools
import io
import os
import re
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import common
from common import CaptionData, error_context, image_files, join_lines, progress, require


def caption_data(name, root, split):
    """One split of "vg" or of a folder of shards -> CaptionData"""
    if name == "vg":
        return vg_data(root or "datasets/vg", split)
    require(os.path.isdir(name), f"--data {name} is unknown: give {common.DATA}")
    return shard_data(name, split)


# ---------------------------------------------------------------------------------- visual genome

VG = (
    "expected: a folder --root with region_descriptions.json, image_data.json, VG_100K/ and "
    "VG_100K_2/; the splits are train and val"
)


def vg_data(root, split):
    """Visual Genome: each region's phrase is a caption of its image. A fixed 103K / 5K split."""
    import ijson  # reads the list of 700 MB entry by entry

    files = {}
    with error_context(VG), open(os.path.join(root, "image_data.json"), "rb") as file:
        for image in ijson.items(file, "item"):
            files[image["image_id"]] = image["url"].split("/")[-2:]
    ids = np.random.default_rng(0).permutation(sorted(files)).tolist()  # a fixed split
    num_val = min(5000, len(ids) // 10)
    splits = {"train": set(ids[num_val:]), "val": set(ids[:num_val])}
    keep = splits.get(split, ())

    captions = {}
    with error_context(VG), open(os.path.join(root, "region_descriptions.json"), "rb") as file:
        for image in progress(ijson.items(file, "item"), desc="captions", total=len(files)):
            if image["id"] in keep:
                path = os.path.join(root, *files[image["id"]])
                captions[path] = [region["phrase"] for region in image["regions"]]
    no_tags = join_lines([] for _ in captions)
    return CaptionData(image_files(list(captions)), join_lines(captions.values()), no_tags)


# ----------------------------------------------------------------------------------------- shards


def shard_data(folder, split):
    """What save_index wrote -> CaptionData

    The arrays stay in the file, which is memory-mapped: millions of photos take no memory of their
    own, and all processes share the mapping.
    """
    path = Path(folder, f"{split}.index")
    with error_context("tools/make_shards.py writes it; for your own photos give a photos.jsonl"):
        index = torch.load(path, mmap=True, weights_only=True)
        tag_names = index.pop("tag_names")
        arrays = {name: tensor.numpy() for name, tensor in index.items()}
        columns = {}
        for name in ("image", "caption", "tag"):
            ends = arrays[f"{name}_ends"]
            columns[f"{name}s"] = MappedStrings(arrays[f"{name}_bytes"], ends[:-1], ends[1:])
        data = CaptionData(**columns, tag_names=tag_names)
        data.num_captions = arrays["num_captions"]  # counting them would read all captions
        return data


def save_index(folder, split, data):
    """Save CaptionData in one file.  data.images: see open_in_shard"""
    index = {"tag_names": data.tag_names, "num_captions": torch.from_numpy(data.num_captions)}
    columns = {"image": data.images, "caption": data.captions, "tag": data.tags}
    for name, strings in columns.items():
        encoded = [string.encode() for string in strings]
        content = np.frombuffer(bytearray().join(encoded), np.uint8)
        index[f"{name}_bytes"] = torch.from_numpy(content)
        index[f"{name}_ends"] = torch.tensor([0, *map(len, encoded)]).cumsum(0)
    common.save(Path(folder, f"{split}.index"), index)


def open_in_shard(place):
    """place: SHARD.tar, KEY.jpg, OFFSET, SIZE, tab-separated -> PIL image, not yet decoded"""
    shard, _, offset, size = place.split("\t")
    content = os.pread(open_shard(shard).fileno(), int(size), int(offset))
    return Image.open(io.BytesIO(content))


@functools.lru_cache(128)
def open_shard(path):
    return open(path, "rb")


def block_sampler(size, batch_size, world, seed, start=0, block=512, window=64):
    """Like common.infinite_sampler, but reads neighbouring samples of a shard together

    Each epoch cuts the samples into blocks, at different places. Each process gets blocks of
    its own in random order, and shuffles the samples of `window` blocks at a time. Samples that
    do not fill a block on every process are left out of the epoch. The order depends only on
    seed, epoch and number of processes, so a resumed run goes on with the very next sample.
    """
    block = max(1, min(block, size // (8 * world.size)))
    blocks_per_rank = size // block // world.size
    require(blocks_per_rank, f"{size} samples are fewer than the processes: start fewer")
    position = start * (batch_size // world.size)
    while True:
        epoch, done = divmod(position, blocks_per_rank * block)
        rng = np.random.default_rng([seed, epoch])
        first = rng.integers(size)
        blocks = rng.permutation(size // block)
        blocks = blocks[world.rank * blocks_per_rank :][:blocks_per_rank]

        step, skipped = divmod(done, window * block)
        chosen = blocks[step * window :][:window]
        samples = (first + chosen[:, None] * block + np.arange(block)) % size
        rng = np.random.default_rng([seed, epoch, world.rank, step])
        for index in rng.permutation(samples.ravel())[skipped:]:
            yield seed, epoch, int(index)
            position += 1


class MappedStrings:
    """Strings in a file that is mapped into memory: string i is content[starts[i] : ends[i]].

    Indexed like an array of strings, by a number or by an array of them.
    """

    sampler = staticmethod(block_sampler)  # of Run.steps, in place of infinite_sampler

    def __init__(self, content, starts, ends):
        self.content = content
        self.starts = starts
        self.ends = ends

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, key):
        if np.ndim(key):
            return MappedStrings(self.content, self.starts[key], self.ends[key])
        return bytes(self.content[self.starts[key] : self.ends[key]]).decode()


# ---------------------------------------------------------- checkpoints of other authors, --init

PREFIXES = (  # of the backbone's keys: the first that fits counts
    "queries.image.trunk.0.",  # mmcontrastive.py
    "module.encoder_q.",  # MoCo
    "encoder_q.",
    "module.backbone.",  # DINO
    "backbone.",  # tp.py, icmlm.py
    "module.",  # SwAV
    "visual.cnn.",  # VirTex, virtex.py
    "",
)
torch.serialization.add_safe_globals([argparse.Namespace])  # DINO's checkpoints hold one
CLASSIFIER = re.compile(r"(fc|classifier|head|projection_head|prototypes|projector)\b")


def backbone_weights(content, path):
    """The ResNet or VGG-16 in a checkpoint of ours, VirTex, MoCo, SwAV, VICReg, DINO, torchvision

    content: from read_checkpoint(path) -> (arch, state dict). The architecture is recognised by
    names and shapes. Under the backbone's prefix no key may be missing, and the only further ones
    are a classifier or projection head; keys under other prefixes (text, queues) are ignored.
    """
    for key in ("model", "state_dict", "teacher"):
        if isinstance(content.get(key), dict):
            content = content[key]
    firsts = "conv1.weight", "features.0.weight"  # of ResNet and VGG
    prefixes = [prefix for prefix in PREFIXES if any(prefix + key in content for key in firsts)]
    require(prefixes, f"{path} holds no ResNet or VGG; its first keys are {list(content)[:5]}")
    state = {}
    for key, value in content.items():
        name = str(key).removeprefix(prefixes[0])
        if torch.is_tensor(value) and key == prefixes[0] + name and not CLASSIFIER.match(name):
            state[name] = value
    for name in [name for name in state if name.endswith("running_mean")]:  # before PyTorch 0.4.1
        state.setdefault(name.replace("running_mean", "num_batches_tracked"), torch.tensor(0))

    shape_of = {name: value.shape for name, value in state.items()}
    differences = {}
    for arch in common.BACKBONES:
        with torch.device("meta"):  # shapes without memory
            expected = common.build_backbone(arch).state_dict()
        expected = {name: value.shape for name, value in expected.items()}
        differences[arch] = sorted({name for name, _ in shape_of.items() ^ expected.items()})
    arch = min(differences, key=lambda arch: len(differences[arch]))
    names = differences[arch]
    require(not names, f"{path} is no {arch} of torchvision, the closest: {names[:5]} differ")
    return arch, state


def load_backbone(weights, arch):
    """weights: "imagenet" or a file -> backbone.  arch: which it must be; None: it is recognised"""
    if weights == "imagenet":
        with error_context("imagenet stands for torchvision's weights, which are downloaded once"):
            return common.build_backbone(arch, weights="IMAGENET1K_V1")
    found, state = backbone_weights(common.read_checkpoint(weights), weights)
    require(arch in (None, found), f"{weights} is a {found}, not --arch {arch}")
    backbone = common.build_backbone(found)
    backbone.load_state_dict(state)
    return backbone


def read_init(init, script, arch):
    """--init -> the content of a checkpoint of this script, or {"backbone": state dict}"""
    content = {} if init == "imagenet" else common.read_checkpoint(init)
    if content.get("script") != script:
        return {"backbone": load_backbone(init, arch).state_dict()}
    found = content["args"]["arch"]
    require(found == arch, f"{init} is a {found}, not --arch {arch}")
    return content


def initialize(init, model, backbone, prefix="", anew=()):
    """Take over a backbone, or all tensors that fit of a model of the same script.  init: read_init

    prefix: of the model's tensors in checkpoints.  anew: prefix of those not to take over
    """
    if "backbone" in init:
        backbone.load_state_dict(init["backbone"])
        common.print_main("--init: the backbone is taken over")
        return
    state = model.state_dict()
    taken = {}
    for name, value in state.items():
        saved = init["model"].get(prefix + name)
        if saved is not None and saved.shape == value.shape and not name.startswith(anew):
            taken[name] = saved
    model.load_state_dict(taken, strict=False)
    new = [name for name in state if name not in taken]
    taken_over = f"{len(taken)} of {len(state)} tensors are taken over"
    common.print_main(f"--init: {taken_over}, {len(new)} are new {new[:3]}")


class ClipEncoder(torch.nn.Module):
    """CLIP's image encoder from the hub or a folder, to compare with: --weights clip:NAME

    (B, 3, h, w), normalised as by common.augment -> pooled features (B, channels, 1, 1)
    """

    def __init__(self, name):
        super().__init__()
        from transformers import CLIPVisionModel, image_utils

        with error_context(f"clip:{name} needs a CLIP model, from the hub or a folder"):
            self.encoder = CLIPVisionModel.from_pretrained(name)
        self.channels = self.encoder.config.hidden_size
        clips = [image_utils.OPENAI_CLIP_MEAN, image_utils.OPENAI_CLIP_STD]
        statistics = torch.tensor([common.MEAN, common.STD, *clips])
        self.register_buffer("statistics", statistics[..., None, None])

    def forward(self, images):
        mean, std, clip_mean, clip_std = self.statistics
        pixels = (images * std + mean - clip_mean) / clip_std
        return self.encoder(pixels, interpolate_pos_encoding=True).pooler_output[..., None, None]
