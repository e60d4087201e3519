"""Weights for --init and eval_linear.py: our checkpoints, files of other authors, and CLIP"""

import os
import re
import zipfile

import torch
from safetensors.torch import load_file  # it comes with transformers
from torch import nn

import common
from common import fail, print_main

# What each ResNet, each VGG, each ConvNeXt has
MIDDLE = "layer2.0.conv1.weight", "features.7.weight", "features.7.0.block.0.weight"
CLASSIFIER = re.compile(r"(fc|classifier|head|pre_logits|projection_head|prototypes|projector)\b")
# Lightly numbers a ResNet's parts, as torch.nn.Sequential(*list(resnet.children())[:-1]) does
LIGHTLY = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
TRANSFORMERS = {  # its names in a ResNet, and torchvision's
    "embedder.embedder.convolution": "conv1",
    "embedder.embedder.normalization": "bn1",
    "shortcut.convolution": "downsample.0",
    "shortcut.normalization": "downsample.1",
}
TRANSFORMERS |= {f"encoder.stages.{n}.layers": f"layer{n + 1}" for n in range(4)}
TRANSFORMERS |= {f"layer.{n}.convolution": f"conv{n + 1}" for n in range(3)}
TRANSFORMERS |= {f"layer.{n}.normalization": f"bn{n + 1}" for n in range(3)}


def of_script(script, path):
    """-> the content of a checkpoint that this script has written"""
    content = common.read_checkpoint(path)
    if content.get("script") != script:
        fail(f"{path} is not a checkpoint.pth or model_N.pth of {script}.py")
    return content


class Ignored:
    """What stands for other objects in a file: flags of other authors, numbers of NumPy..."""

    def __init__(self, *given):
        pass

    def __setstate__(self, state):
        pass


def read_others(path):
    """A file with more than torch.load allows, or .safetensors -> its dict. No code is run."""
    try:
        if f"{path}".endswith(".safetensors"):
            return load_file(path)
        others = []  # names of classes and functions
        if zipfile.is_zipfile(path):
            others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Ignored, name) for name in others]):
            return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # from zipfile, pickle or torch; or it holds no dict
        fail(f"{path} is cut off, or holds more than tensors and numbers ({type(error).__name__}). "
             "Training and torch.save(model.state_dict(), FILE) write files that can be read")


def load_backbone(path, arch=None):
    """A file of ours, VirTex, MoCo, SwAV, VICReg, DINO, Lightly, torchvision, timm... -> backbone

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
    content = torchvision_names(content)
    prefixes = [key.removesuffix(end) for key in content for end in MIDDLE if key.endswith(end)]
    if not prefixes:
        fail(f"{path} holds no ResNet, VGG or ConvNeXt with the names of torchvision; its first "
             f"keys are {list(content)[:5]}")
    if len(prefixes) > 1:
        print_main(f"{path}: loaded {prefixes[0]}, not {', '.join(prefixes[1:])}")
    state = {}
    for key, value in content.items():
        name = key.removeprefix(prefixes[0])
        if torch.is_tensor(value) and key == prefixes[0] + name and not CLASSIFIER.match(name):
            state[name] = value
    differing = {}  # names of each architecture
    for candidate in common.BACKBONES:
        rows = compared(common.shapes(state)) ^ compared(common.backbone_shapes(candidate))
        differing[candidate] = sorted({name for name, _ in rows})
    found = min(differing, key=lambda candidate: len(differing[candidate]))
    if differing[found]:
        fail(f"{path} is not torchvision's {found}, the closest: {differing[found][:5]} differ")
    if arch not in (None, found):
        fail(f"{path} is a {found}, not --arch {arch}")
    backbone = common.build_backbone(found)
    backbone.load_state_dict(state, strict=False)  # but for num_batches_tracked: see `compared`
    return backbone


def torchvision_names(content):
    """{name: tensor} -> the same, with torchvision's names for a ResNet of others"""
    content = {str(key).replace("_orig_mod.", ""): value for key, value in content.items()}
    numbered = [key.removesuffix("5.0.conv1.weight") for key in content
                if re.search(r"\b5\.0\.conv1\.weight$", key)]
    renamed = {}
    for key, value in content.items():
        for prefix in numbered:
            number, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and number in LIGHTLY:
                key = f"{prefix}{LIGHTLY[number]}.{rest}"
        for theirs, name in TRANSFORMERS.items():
            key = key.replace(theirs, name)
        renamed[key] = value
    return renamed


def compared(shapes):
    """-> {(name, shape)}; files from before PyTorch 0.4.1 have no num_batches_tracked"""
    return {row for row in shapes.items() if "num_batches_tracked" not in row[0]}


class ClipEncoder(nn.Module):
    """CLIP's image encoder from the hub or a folder, to compare with: (B, 3, h, w), normalised by
    common.augment -> pooled features (B, channels, 1, 1)
    """

    arch = "clip"

    def __init__(self, name):
        super().__init__()
        import huggingface_hub  # only here, because they take seconds
        from transformers import image_utils

        transformers = common.import_transformers()
        try:
            if not os.path.isdir(name):  # this asks once; transformers would ask for a minute
                huggingface_hub.snapshot_download(name, allow_patterns="config.json")
            kind = transformers.AutoConfig.from_pretrained(name).model_type
            if kind not in ("clip", "clip_vision_model"):
                fail(f"clip:{name} is a {kind}, not a CLIP")
            self.encoder = transformers.CLIPVisionModel.from_pretrained(name)
        except (OSError, ValueError):
            fail(f"clip:{name} cannot be read: give a folder with a CLIP, or one of the hub "
                 "(huggingface.co) if you are online")
        self.channels = self.encoder.config.hidden_size
        clips = [image_utils.OPENAI_CLIP_MEAN, image_utils.OPENAI_CLIP_STD]
        constants = torch.stack([common.MEAN, common.STD, *map(torch.tensor, clips)])
        self.register_buffer("constants", constants[..., None, None])

    def forward(self, images):
        mean, std, clip_mean, clip_std = self.constants
        pixels = (images * std + mean - clip_mean) / clip_std
        output = self.encoder(pixels, interpolate_pos_encoding=True)
        return output.pooler_output[..., None, None]
