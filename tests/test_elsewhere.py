"""Backbones taken to other libraries, as docs/running.md says, and brought from them"""

import argparse
import ast
import pathlib
import re

import numpy as np
import pytest
import torch
import torchvision
import transformers
from conftest import ROOT, finished, run_script
from safetensors.torch import save_file

import common
import eval_linear

PAGE = (ROOT / "docs/running.md").read_text()
SECTION = PAGE.split("## Using the backbone elsewhere\n")[1].split("\n## ")[0]
FIRST, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
RUNS = {"virtex-photos": "resnet18", "vgg": "vgg16_bn", "convnext": "convnext_tiny"}


def packages(code):
    """The names of the packages that the code imports"""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return names


def statistics(net):
    """The network in eval mode, with random statistics, so that none can be forgotten"""
    for name, buffer in net.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    return net.eval()


def trunk(resnet):
    """-> the part of torchvision's ResNet that gives the last feature maps"""
    return torch.nn.Sequential(*list(resnet.children())[:-2])


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: "-".join(packages(code)))
def test_the_page(code, tmp_path, monkeypatch, real_models):
    """Each block on the page gives the features of our backbone."""
    for package in packages(code):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for name, arch in RUNS.items():
        if f"runs/{name}/backbone.pth" in FIRST + code:
            backbone = statistics(common.build_backbone(arch))
            folder = tmp_path / "runs" / name
            folder.mkdir(parents=True)
            common.save_weights(folder / "backbone.pth", backbone)
            flags = {"script": "virtex", "arch": arch, "image_size": 112}
            common.save(folder / "args.json", flags)
    found = {}
    exec(FIRST + code, found)
    maps = backbone(found["images"])  # of the last one that the block reads
    assert "maps" in found or "features" in found
    if "maps" in found:
        torch.testing.assert_close(found["maps"], maps, rtol=1e-4, atol=1e-4)
    if "features" in found:
        features = torch.as_tensor(found["features"]).flatten(1)
        torch.testing.assert_close(features, maps.mean((2, 3)), rtol=1e-4, atol=1e-4)


def of_torchvision(folder):
    """Beside the weights lie flags with a path, and scores of NumPy, as other scripts save"""
    net = statistics(torchvision.models.resnet18())
    flags = argparse.Namespace(lr=0.1, output=pathlib.Path("x"))
    beside = {"args": flags, "best_accuracy": np.float64(3.5), "history": np.arange(3.0)}
    torch.save({"model": net.state_dict(), **beside}, folder / "model.pth")
    return "model.pth", trunk(net)


def of_safetensors(folder):
    net = statistics(torchvision.models.convnext_tiny())
    save_file(net.state_dict(), folder / "model.safetensors")
    return "model.safetensors", net.features


def of_lightly(folder):
    """Its examples have an encoder and its momentum copy, of which the first counts."""
    net = statistics(torchvision.models.resnet18())
    parts = torch.nn.Sequential(*list(net.children())[:-1])
    copied = torch.nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
    model = torch.nn.ModuleDict({"backbone": parts, "backbone_momentum": copied})
    torch.save({"state_dict": model.state_dict()}, folder / "last.ckpt")
    return "last.ckpt", trunk(net)


def of_transformers(folder):
    sizes = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    net = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    statistics(net).save_pretrained(folder)
    return "model.safetensors", lambda images: net.resnet(images).last_hidden_state


def of_transformers_50(folder):
    net = statistics(transformers.ResNetModel(transformers.ResNetConfig()))
    net.save_pretrained(folder)
    return "model.safetensors", lambda images: net(images).last_hidden_state


def of_timm(folder):
    net = statistics(pytest.importorskip("timm").create_model("vgg16_bn"))
    torch.save(net.state_dict(), folder / "vgg.pth")
    return "vgg.pth", net.forward_features


LIBRARIES = of_torchvision, of_safetensors, of_lightly, of_transformers, of_transformers_50, of_timm


@torch.no_grad()
@pytest.mark.parametrize("library", LIBRARIES)
def test_files_of_libraries(library, tmp_path, monkeypatch, real_models):
    """Their features are ours, also beside an args.json of a run of ours, and for --init."""
    name, features = library(tmp_path)
    flags = {"script": "virtex", "arch": "resnet18", "image_size": 48}
    common.save(tmp_path / "args.json", flags)
    path = f"{tmp_path}/{name}"
    backbone = eval_linear.load_backbone(path, None, 0).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(backbone(images), features(images), rtol=1e-4, atol=1e-4)
    assert eval_linear.trained_with(path, "image_size") is None
    args = argparse.Namespace(init=path, output=tmp_path, arch=backbone.arch, recipe="paper")
    state = common.read_init(args)
    assert all(torch.equal(x, state[key]) for key, x in backbone.state_dict().items())


def test_names_of_another_library(tmp_path):
    """timm's ConvNeXt is no ResNet, but has stages, too."""
    torch.save({"stem.0.weight": torch.zeros(1), "stages.0.downsample": 1}, tmp_path / "x.pth")
    with pytest.raises(SystemExit, match="names of torchvision; .* are \\['stem.0.weight', 'stag"):
        eval_linear.load_backbone(f"{tmp_path}/x.pth", None, 0)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16}


def test_clip_and_what_is_none(tmp_path, capfd):
    """A whole CLIP is read without a report of its text encoder; a SigLIP and nothing are named."""
    vision, text = {**SMALL, "image_size": 32, "patch_size": 8}, {**SMALL, "vocab_size": 100}
    for name in "CLIP", "Siglip":
        config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text)
        getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / name)
    capfd.readouterr()
    code = f"import eval_linear; eval_linear.load_backbone('clip:{tmp_path}/CLIP', None, 0)"
    process = finished(run_script("-c", code))
    assert not process.stdout and not process.stderr
    with pytest.raises(SystemExit, match="Siglip is a siglip, not a CLIP"):
        eval_linear.load_backbone(f"clip:{tmp_path}/Siglip", None, 0)
    with pytest.raises(SystemExit, match=f"clip:{tmp_path} cannot be read: give a folder with"):
        eval_linear.load_backbone(f"clip:{tmp_path}", None, 0)
