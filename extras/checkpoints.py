"""Weights for --init and eval_linear.py: our checkpoints, files of other authors, and CLIP"""

import argparse
import re

import torch
from torch import nn

import common
from common import fail, print_main

torch.serialization.add_safe_globals([argparse.Namespace])  # DINO's checkpoints hold one
MIDDLE = "layer2.0.conv1.weight", "features.7.weight"  # what each ResNet, each VGG has
CLASSIFIER = re.compile(r"(fc|classifier|head|projection_head|prototypes|projector)\b")


def of_script(script, path):
    """-> the content of a checkpoint that this script has written"""
    content = common.read_checkpoint(path)
    if content.get("script") != script:
        fail(f"{path} is not a checkpoint.pth or model_N.pth of {script}.py")
    return content


def load_backbone(path, arch=None):
    """A file of ours, VirTex, MoCo, SwAV, VICReg, DINO, Lightning, torchvision... -> backbone

    The architecture is recognised by names and shapes, and must be `arch` if that is given. Of
    several backbones the first counts: MoCo's queries. Under its prefix no key may be missing, and
    only those of a classifier may be left over; keys under other prefixes (text) are ignored.
    """
    content = common.read_checkpoint(path)
    for key in ("model", "state_dict", "model_state_dict", "teacher"):
        if isinstance(content.get(key), dict):
            others = [name for name, x in content.items() if isinstance(x, dict) and name != key]
            for name in others:
                if any(f"{tensor}".endswith(MIDDLE) for tensor in content[name]):
                    print_main(f"{path}: loaded {key}, not {name}")
            content = content[key]
    content = {str(key).replace("_orig_mod.", ""): value for key, value in content.items()}
    prefixes = [key.removesuffix(end) for key in content for end in MIDDLE if key.endswith(end)]
    if not prefixes:
        fail(f"{path} holds no ResNet or VGG; its first keys are {list(content)[:5]}")
    if len(prefixes) > 1:
        print_main(f"{path}: loaded {prefixes[0]}, not {', '.join(prefixes[1:])}")
    state = {}
    for key, value in content.items():
        name = key.removeprefix(prefixes[0])
        if torch.is_tensor(value) and key == prefixes[0] + name and not CLASSIFIER.match(name):
            state[name] = value
    differing = {}  # names of each architecture
    for candidate in common.BACKBONES:
        with torch.device("meta"):  # shapes without memory
            expected = common.build_backbone(candidate).state_dict()
        differing[candidate] = sorted({name for name, _ in shapes(state) ^ shapes(expected)})
    found = min(differing, key=lambda candidate: len(differing[candidate]))
    if differing[found]:
        fail(f"{path} is not torchvision's {found}, the closest: {differing[found][:5]} differ")
    if arch not in (None, found):
        fail(f"{path} is a {found}, not --arch {arch}")
    backbone = common.build_backbone(found)
    backbone.load_state_dict(state, strict=False)  # but for num_batches_tracked: see `shapes`
    return backbone


def shapes(state):
    """-> {(name, shape)}; files from before PyTorch 0.4.1 have no num_batches_tracked"""
    return {(name, x.shape) for name, x in state.items() if "num_batches_tracked" not in name}


class ClipEncoder(nn.Module):
    """CLIP's image encoder from the hub or a folder, to compare with: (B, 3, h, w), normalised by
    common.augment -> pooled features (B, channels, 1, 1)
    """

    arch = "clip"

    def __init__(self, name):
        super().__init__()
        from transformers import CLIPVisionModel, image_utils

        self.encoder = CLIPVisionModel.from_pretrained(name)
        self.channels = self.encoder.config.hidden_size
        clips = [image_utils.OPENAI_CLIP_MEAN, image_utils.OPENAI_CLIP_STD]
        constants = torch.stack([common.MEAN, common.STD, *map(torch.tensor, clips)])
        self.register_buffer("constants", constants[..., None, None])

    def forward(self, images):
        mean, std, clip_mean, clip_std = self.constants
        pixels = (images * std + mean - clip_mean) / clip_std
        output = self.encoder(pixels, interpolate_pos_encoding=True)
        return output.pooler_output[..., None, None]
