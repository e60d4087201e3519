"""Backbones taken to other libraries, as docs/running.md says, and brought from them"""

import argparse
import ast
import json
import pathlib
import re

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, random_weights

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


def with_statistics(arch):
    """A backbone in eval mode, with random statistics, so that none can be forgotten"""
    backbone = common.build_backbone(arch)
    for name, buffer in backbone.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    return backbone.eval()


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: "-".join(packages(code)))
def test_the_page(code, tmp_path, monkeypatch, real_models):
    """Each block on the page gives the features of our backbone."""
    for package in packages(code):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for name, arch in RUNS.items():
        if f"runs/{name}/backbone.pth" in FIRST + code:
            backbone = with_statistics(arch)
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
