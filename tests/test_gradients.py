"""What the steps of each training are given: the gradients of whose loss, at which rate.

The scripts' own `main` trains for a few iterations on 24 scenes. For gradients, one loss is kept:
the others are taken away where they are made.
"""

import importlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torchvision
from conftest import metrics
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common
import icmlm
import mmcontrastive
import virtex


@pytest.fixture
def steps():
    """A list, to which each step of an optimizer adds: names of the trained model's parameters
    (`names`) and of those with a gradient (`trained`), the other networks' parameters (`frozen`),
    rates of the groups, rates of `dropout` that is on, weights `before` and `after` the step.
    """
    called, rows = {}, []

    def call(module, inputs):
        called[id(module)] = module

    def weights_in(optimizer):
        return [weight for group in optimizer.param_groups for weight in group["params"]]

    def begin(optimizer, *_):
        weights = weights_in(optimizer)
        model = next(x for x in called.values() if {*weights} <= {*x.parameters()})
        own = dict(model.named_parameters())
        of_all = {weight for module in called.values() for weight in module.parameters()}
        trained = {name for name, x in own.items() if x.grad is not None and x.grad.any()}
        assert {own[name] for name in trained} <= {*weights}, "not in the optimizer"
        modules = [module for module in model.modules() if module.training]
        dropout = {x.p for x in modules if isinstance(x, nn.Dropout)}
        dropout |= {x.dropout for x in modules if isinstance(x, nn.MultiheadAttention)}
        step = SimpleNamespace(
            names=own.keys(),
            trained=trained,
            frozen=of_all - {*own.values()},
            rates=[group["lr"] for group in optimizer.param_groups],
            dropout=dropout,
            before=torch.cat([weight.detach().flatten() for weight in weights]),
        )
        rows.append(step)

    def end(optimizer, *_):
        after = [weight.detach().flatten() for weight in weights_in(optimizer)]
        rows[-1].after = torch.cat(after)

    hooks = [register_module_forward_pre_hook(call), register_optimizer_step_pre_hook(begin)]
    hooks.append(register_optimizer_step_post_hook(end))
    yield rows
    for hook in hooks:
        hook.remove()


@pytest.fixture
def train(coco_folder, tiny_lm, tmp_path, monkeypatch):
    """-> function (script, flags): train by the script's recipe, but a tiny network"""
    widths = [x if x == "M" else x // 8 for x in torchvision.models.vgg.cfgs["D"]]

    def vgg16_bn():
        model = nn.Module()
        model.features = torchvision.models.vgg.make_layers(widths, batch_norm=True)
        return model

    def vgg(features, num_classes):
        model = nn.Module()
        model.avgpool = nn.AdaptiveAvgPool2d(7)
        model.classifier = nn.Linear(64 * 7 * 7, num_classes)
        return model

    monkeypatch.setattr(torchvision.models, "vgg16_bn", vgg16_bn)
    monkeypatch.setattr(torchvision.models, "VGG", vgg)
    monkeypatch.setitem(common.BACKBONES, "vgg16_bn", 64)

    def train(script, flags):
        module = importlib.import_module(script)
        command = f"--data coco --root {coco_folder} --output {tmp_path} --log-every 1 --amp off"
        command += " --workers 0 --batch-size 8"
        if "--arch" not in flags:
            command += " --arch resnet18"
        command += f" --image-size {64 if script == 'icmlm' else 32}"  # attention needs places
        if script == "virtex":
            command += " --hidden 64"
        if script in ("icmlm", "mmcontrastive") or "cluster" in flags:
            command += f" --lm {tiny_lm}"
        if script == "mmcontrastive":
            command += " --caption-views sibling --queue 16 --mlp-hidden 32 --bn-splits 1"
        module.main(module.get_args(f"{command} {flags}".split()))

    return train


LOSSES = [  # script, flags, loss; what it trains, as beginnings of names
    # VirTex Sec. 3: phi_f and phi_b share the embedding of tokens, the output and the projection.
    ("virtex", "--recipe demo", "forward", "visual textual"),
    ("virtex", "--recipe demo", "backward", "visual textual.visual_projection textual.embedding "
     "textual.output backward_textual"),
    ("virtex", "--recipe demo --lambda-words 2", "words", "visual textual.visual_projection "
     "textual.embedding.words textual.output"),
    ("virtex", "--recipe demo --task captioning", "forward", "visual textual"),
    ("virtex", "--recipe demo --task masked_lm", "masked_lm", "visual textual"),
    *(("virtex", f"--recipe demo --task {task}_classification", f"{task}_classification",
       "visual textual") for task in ("token", "multilabel")),
    # ICMLM Sec. 3.1, App. F.1: the backbone and module tp, with labels of each kind
    ("tp", "--labels postag", "loss", "backbone head"),
    ("tp", "--labels cluster --num-labels 5", "loss", "backbone head"),
    ("tp", "--labels lda --num-labels 5", "loss", "backbone head"),
    ("tp", "--labels instances", "loss", "backbone head"),
    ("tp", "--labels rotation", "loss", "backbone head"),
    ("tp", "--labels rotation --arch vgg16_bn", "loss", "backbone head"),
    ("tp", "--labels postag --arch vgg16_bn", "loss", "backbone head"),
    # ICMLM Sec. 3.2, Eqs. 7, 8: the language model is frozen
    ("icmlm", "--head tfm", "mlm", "backbone head"),
    ("icmlm", "--head tfm", "tp", "backbone tags"),
    ("icmlm", "--head att-fc --heads 2 --layers 2", "mlm", "backbone head"),
    ("icmlm", "--head att-fc", "tp", "backbone tags"),
    ("icmlm", "--head tfm --lambda-tp 0", "tp", "tags"),
    # Contrastive paper, Eqs. 3, 5, 8, 11, 14: the encoder of the queries, not that of the keys
    ("mmcontrastive", "", "ii", "queries.image.trunk queries.image.mlps.image_intra"),
    ("mmcontrastive", "--tag-threshold 0", "tag",
     "queries.image.trunk queries.image.mlps.image_intra"),
    ("mmcontrastive", "", "cc", "queries.caption.trunk queries.caption.mlps.caption_intra"),
    ("mmcontrastive", "", "ic", "queries.image.trunk queries.image.mlps.image_inter"),
    ("mmcontrastive", "", "ci", "queries.caption.trunk queries.caption.mlps.caption_inter"),
]
# What is added to all scores of a softmax, or to a channel before its batch norm, has no gradient
# but rounding errors. (In VGG-16 the biases of convolutions and norms have the same kind of name.)
NO_EFFECT = r"head\.layers\.\d\.query\.bias|head\.b_h|self\.key\.bias|features\.\d+\.bias"


def keep_alone(script, loss, monkeypatch):
    """From now on the script computes this one of its losses, or has no gradient of the others."""

    def alone(owner, name):
        original = getattr(owner, name)
        kept = lambda *given: {loss: original(*given)[loss]}
        monkeypatch.setattr(owner, name, kept)

    def without_gradient(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: original(*given).detach())

    if script == "virtex":
        alone(virtex.VirTex, "forward")
        alone(virtex.Classifier, "forward")
    elif script == "mmcontrastive":
        alone(mmcontrastive, "contrastive_losses")
    elif loss == "mlm":
        without_gradient(icmlm, "tag_loss")
    elif loss == "tp":
        without_gradient(icmlm.Tfm, "scores")
        without_gradient(icmlm.AttFc, "scores")


def trained(steps):
    """-> names of the parameters with a gradient in one of the steps, those of all parameters"""
    for step in steps:
        assert all(weight.grad is None for weight in step.frozen)
    names = {name for name in steps[0].names if not re.search(NO_EFFECT, name)}
    return names & set.union(*(step.trained for step in steps)), names


@pytest.mark.parametrize("script, flags, loss, modules", LOSSES)
def test_what_each_loss_trains(script, flags, loss, modules, train, steps, monkeypatch):
    """Every parameter of these modules has a gradient, and no other has."""
    keep_alone(script, loss, monkeypatch)
    train(script, f"--iters 3 {flags}")
    found, names = trained(steps)
    assert found == {name for name in names if name.startswith(tuple(modules.split()))}
    assert len(steps) == 3 and found
    if script == "icmlm" or "cluster" in flags:
        assert steps[0].frozen  # the language model was seen


@pytest.mark.parametrize("loss, head", (("mlm", "head"), ("tp", "tags")))
def test_warm_up_of_the_attention(loss, head, train, steps, monkeypatch):
    """ICMLM App. F.1: the backbone is frozen for a part of training, here half of it."""
    keep_alone("icmlm", loss, monkeypatch)
    train("icmlm", "--head att-fc --warmup-attention 0.5 --iters 4")
    for part, modules in (steps[:2], (head,)), (steps[2:], (head, "backbone")):
        found, names = trained(part)
        assert found == {name for name in names if name.startswith(modules)} and len(part) == 2


def cosine(iters, warmup=0):
    """n / warmup, then a half of a cosine"""
    rising = [n / warmup for n in range(warmup)]
    turns = [math.pi * n / (iters - warmup) for n in range(iters - warmup)]
    return rising + [(1 + math.cos(turn)) / 2 for turn in turns]


STEPS = 8 * [1.0] + [0.1, 0.01]
MOCO = 6 * [1.0] + 2 * [0.1] + 2 * [0.01]
RISING = [0, 0.5, 1, (2 + math.sqrt(3)) / 4, 0.75, 0.5, 0.25, (2 - math.sqrt(3)) / 4]
RATES = [  # script, flags; peak rates, for a batch of so many photos; as a fraction of the peak
    # VirTex Sec. 3: warm-up for 10K of 500K iterations, then cosine decay
    ("virtex", "--iters 100", (0.2, 1e-3), 256, cosine(100, warmup=2)),
    # ICMLM App. F.1: ResNet-50, cosine; VGG-16, x 0.1 after 80K and 90K of 100K iterations; its
    # rotations, after 100K and 110K of 120K. ICMLM with VGG-16 as TP [ours], in 200K.
    ("tp", "--iters 10", (3e-2,), 128, cosine(10)),
    ("tp", "--iters 10 --arch vgg16_bn", (1e-4,), 128, STEPS),
    ("tp", "--iters 12 --arch vgg16_bn --labels rotation", (1e-3,), 128, 2 * [1.0] + STEPS),
    ("icmlm", "--iters 10", (3e-2,), 512, cosine(10)),
    ("icmlm", "--iters 10 --arch vgg16_bn --heads 1", (1e-4,), 896, STEPS),
    # Contrastive paper Sec. 4.1: cosine; MoCo v1's code: x 0.1 after 120 and 160 of 200 epochs
    ("mmcontrastive", "--iters 10", (0.03, 4e-5), 512, cosine(10)),
    ("mmcontrastive", "--iters 10 --steps 0.6 0.8", (0.03, 4e-5), 512, MOCO),
    # Warm-up [ours]
    ("tp", "--iters 8 --warmup 0.25", (3e-2,), 128, RISING),
    ("icmlm", "--iters 8 --warmup 0.25", (3e-2,), 512, RISING),
    ("mmcontrastive", "--iters 8 --warmup 0.25", (0.03, 4e-5), 512, RISING),
]
# Which of these rates the optimizer's groups have. The first group is the backbone.
GROUPS = {"virtex": (0, 1, 1), "tp": (0, 0), "icmlm": (0, 0, 0), "mmcontrastive": (0, 0, 1)}


@pytest.mark.parametrize("script, flags, peaks, batch_size, factors", RATES)
def test_rates_of_each_iteration(script, flags, peaks, batch_size, factors, train, steps, tmp_path):
    """Those in metrics.jsonl are the schedule's, and the optimizer's. The batch is of 8."""
    train(script, flags)
    scale = 8 / batch_size
    expected = [[factor * scale * peak for peak in peaks] for factor in factors]
    rows = [[row[name] for name in ("lr", "text_lr") if name in row] for row in metrics(tmp_path)]
    assert rows == [pytest.approx(row, rel=1e-6, abs=1e-12) for row in expected]
    for step, row in zip(steps, expected, strict=True):
        of_groups = [row[n] for n in GROUPS[script]]
        assert step.rates == pytest.approx(of_groups, rel=1e-6, abs=1e-12)


def test_look_ahead(train, steps):
    """VirTex Sec. 3: alpha 0.5, 5 steps; the slow weights start as the model's [Zhang 2019]."""
    train("virtex", "--iters 11")
    slow = steps[0].before
    for n in range(1, 11):
        expected = steps[n - 1].after
        if n in (5, 10):
            expected = slow = slow + 0.5 * (expected - slow)
        torch.testing.assert_close(steps[n].before, expected, rtol=1e-6, atol=1e-8)
        assert not torch.equal(steps[n].before, steps[n].after)


@pytest.mark.parametrize("script", ("virtex", "icmlm", "mmcontrastive"))
def test_dropout(script, train, steps):
    """A tenth, in the heads of VirTex [official code], in tfm and in a BERT that is trained"""
    train(script, "--iters 1")
    assert steps[0].dropout == {0.1}
