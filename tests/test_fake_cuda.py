"""The training loops of all scripts on fake CUDA tensors, which need no GPU.

Fake tensors have shapes, dtypes and devices, but no numbers (torch's FakeTensorMode). The scripts'
own `main` trains with them for a few steps: augmentation, forward pass in bf16, loss, clipping,
optimizer, look-ahead, momentum update, queues. Tensors of two devices in one operation raise an
error, and so does whatever makes the host wait for the GPU.

Not here: numbers, backward passes (which need a driver; gradients are zeros), kernels, --compile,
several processes, and what transformers asks the GPU about masks (it knows fake tensors and does
not ask them). Validation, checkpoints and the lines of metrics.jsonl may wait.
"""

import importlib

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import eval_linear
import icmlm
import language
import tp
import virtex

GPU = torch.device("cuda", 0)
STEPS = 5
aten = torch.ops.aten


class Waits(RuntimeError):
    """The host would wait for the GPU."""


class EnoughSteps(Exception):
    pass


class Watch(TorchDispatchMode):
    """Sees each operation before FakeTensorMode, which refuses those of two devices and those whose
    result's shape depends on numbers. It refuses the others that make the host wait.

    The first step may wait: constants are copied to the GPU, the progress bar shows a loss.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.strict, self.precisions = 0, False, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, func.overloadpacket
        if operation is aten._local_scalar_dense:  # item(), bool(), float()...
            return self.read(func, args[0])
        if self.strict and operation in (aten._to_copy, aten.copy_):
            check_copy(func, args, kwargs)
        if self.strict and operation in (aten.index, aten.index_put, aten.index_put_):
            check_indices(func, *args[:2])
        if self.strict and operation is aten.convolution:
            self.precisions.add(args[0].dtype)
        if operation.__name__.startswith("_fused_"):  # optimizers: they have no fake kernels
            places = {x.device for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
            assert places == {GPU}, f"{func} on {places}"
            return None
        return func(*args, **kwargs)

    def read(self, func, x):
        if self.strict and x.device == GPU:
            raise Waits(f"{func} reads a number from the GPU")
        unknown = isinstance(x, FakeTensor) and x.constant is None
        return 1 if unknown else func(x)


def check_copy(func, args, kwargs):
    """Copies between host and GPU wait, but those to the GPU that are told not to."""
    given = dict(zip(("first", "second", "non_blocking"), args)) | kwargs
    source = target = args[0].device
    if func.overloadpacket is aten.copy_:
        source = given["second"].device
    elif "device" in given:
        target = torch.device(given["device"])
    to_gpu_at_once = target.type == "cuda" and given.get("non_blocking")
    if source.type != target.type and not to_gpu_at_once:
        raise Waits(f"{func} copies from {source.type} to {target.type}")


def check_indices(func, x, indices):
    """Indices on the host are copied; those in a mask are counted."""
    for index in indices:
        if index is not None and x.device == GPU:
            if index.device != GPU or index.dtype == torch.bool:
                raise Waits(f"{func} with {index.dtype} on {index.device}")


def convert(module, function, recurse=True):
    """nn.Module._apply for fake tensors, which it cannot replace: their places get new ones."""
    new = {}  # id of a tensor: the tensor, lest its id be given again, and the one in its place
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is not None and id(old) not in new:
                    tensor = function(old.detach())
                    if isinstance(old, torch.nn.Parameter):
                        tensor = torch.nn.Parameter(tensor, old.requires_grad)
                    new[id(old)] = old, tensor
                table[name] = None if old is None else new[id(old)][1]
    return module


def copied(x, memo):
    """copy.deepcopy of a fake tensor: torch's would copy the FakeTensorMode, too."""
    copy = x.detach().clone()
    return torch.nn.Parameter(copy, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copy


# -------------------------------------------------------------------------------- on no GPU at all


@pytest.fixture
def watch(monkeypatch):
    """A GPU without memory, which the scripts find, and on which five steps are enough"""
    mode, real_loader = Watch(), common.loader

    def backward(loss, *_, **__):
        """Gradients of zeros for the parameters that the loss depends on"""
        mode.steps += 1
        mode.strict = mode.steps > 1
        if mode.steps == STEPS:
            raise EnoughSteps
        for parameter in parameters_behind(loss):
            parameter.grad = torch.zeros_like(parameter)

    def loader(dataset, batch_size, workers, collate=None, device=None, sampler=None):
        """Batches are made on the host, of numbers."""
        with unset_fake_temporarily():
            batches = iter(real_loader(dataset, batch_size, 0, collate, sampler=sampler))
        while True:
            with unset_fake_temporarily():
                batch = next(batches)
            yield batch

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr(torch.nn.Module, "_apply", convert)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", copied)
    monkeypatch.setattr(common, "loader", loader)
    monkeypatch.setattr(common, "start", lambda: common.World(0, 1, GPU))
    # Autocast is off without a GPU: it asks these.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    common.colour_constants.cache_clear()
    yield mode
    common.colour_constants.cache_clear()  # what it holds is fake


def parameters_behind(loss):
    """What backward() would give gradients to"""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def train(watch, command):
    """Run the script's main until it has made enough steps; its models are made of fake tensors."""
    script, *flags = map(str, command)
    module = importlib.import_module(script.removesuffix(".py"))
    args = module.get_args(flags)
    with FakeTensorMode(allow_non_fake_inputs=True), watch, pytest.raises(EnoughSteps):
        module.main(args)


LONG = "--iters", 100, "--log-every", 100, "--amp", "bf16"


@pytest.fixture
def trains(watch, tiny, tmp_path):
    """-> function (script, *flags): trains, and did it in bf16"""

    def check(script, *flags):
        train(watch, tiny(script, tmp_path, *LONG, *flags))
        assert watch.precisions == {torch.bfloat16}

    return check


# --------------------------------------------------------------------------------- what is refused

WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "cpu without blocking": lambda x: x.to("cpu", non_blocking=True),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "boolean mask": lambda x: x[x > 0],
    "boolean mask, written": lambda x: x.__setitem__(x > 0, x),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "a list as index": lambda x: x[[0, 1]],
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "a constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "to the GPU": lambda x: x + torch.zeros(3).to(x.device),
    "copied into": lambda x: x.copy_(torch.zeros(3)),
    "copied out": lambda x: torch.zeros(3).copy_(x),
}
MIXING = {
    "a tensor of the host": lambda x: x + torch.zeros(3),
    "a layer of the host": lambda x: torch.nn.Linear(3, 3)(x),
}
HARMLESS = {
    "to the GPU without blocking": lambda x: x + torch.zeros(3).to(x.device, non_blocking=True),
    "a number of the host": lambda x: x * torch.tensor(2.0) + torch.tensor(1.0).item(),
    "made on the GPU": lambda x: x + torch.arange(3, device=x.device),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
}


REFUSED = {**WAITING, **MIXING}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_refused(watch, operation):
    """What waits for the GPU, or mixes it with the host"""
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        x = torch.ones(3, device=GPU)
        watch.strict = True
        with pytest.raises(RuntimeError):
            operation(x)


@pytest.mark.parametrize("operation", HARMLESS.values(), ids=HARMLESS)
def test_accepted(watch, operation):
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        x = torch.ones(3, device=GPU)
        watch.strict = True
        assert operation(x).device == GPU


@pytest.mark.parametrize("name", ["item", "a tensor of the host"])
def test_refused_in_a_script(watch, tiny, tmp_path, monkeypatch, name):
    """A loss that does such a thing ends the run of a script."""
    fault, loss = REFUSED[name], tp.label_loss

    def faulty(logits, targets, labels):
        fault(logits[0, :3].float())
        return loss(logits, targets, labels)

    monkeypatch.setattr(tp, "label_loss", faulty)
    with pytest.raises(RuntimeError) as refused:
        train(watch, tiny("tp", tmp_path, *LONG))
    assert "faulty" in [entry.name for entry in refused.traceback]


def test_logging_waits(watch, tiny, tmp_path):
    """Losses are read when a line of metrics.jsonl is due, and not before."""
    with pytest.raises(RuntimeError) as refused:
        train(watch, tiny("tp", tmp_path, *LONG, "--log-every", 3))
    assert "write_metrics" in [entry.name for entry in refused.traceback]
    assert watch.steps == 3


# -------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("task", virtex.TASKS)
def test_virtex(trains, task):
    trains("virtex", "--task", task, "--lookahead-k", 2, "--layers", 2)


@pytest.mark.parametrize("optimizer", common.OPTIMIZERS)
def test_optimizers(trains, optimizer):
    trains("virtex", "--optimizer", optimizer)


@pytest.mark.parametrize("arch", common.BACKBONES)
def test_backbones(trains, arch):
    trains("virtex", "--arch", arch)


def tags_for_clusters(train, val, *_, **__):
    return tp.instance_labels(train, val)


@pytest.mark.parametrize("labels", tp.LABELS)
def test_tp(trains, monkeypatch, labels):
    """Clusters are made before training starts, here of tags."""
    monkeypatch.setitem(tp.MADE_BY, "cluster", (tags_for_clusters, tp.MADE_BY["cluster"][1]))
    trains("tp", "--labels", labels)


@pytest.mark.parametrize("labels", ["postag", "rotation"])
def test_tp_vgg16(trains, labels):
    """With its heads of four convolutions and of fully connected layers"""
    trains("tp", "--labels", labels, "--arch", "vgg16")


@pytest.fixture
def fake_lm(monkeypatch, tiny_lm):
    """ICMLM's language model: its tokenizer is real, its weights are fake."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm)
    config = transformers.BertConfig.from_pretrained(tiny_lm)

    def language_model(name, device, scratch):
        model = transformers.BertForMaskedLM(config)
        return tokenizer, model.to(device).eval().requires_grad_(False)

    monkeypatch.setattr(language, "language_model", language_model)


@pytest.mark.parametrize("arch, weight", [("resnet18", 0), ("resnet18", 1), ("vgg16", 1)])
@pytest.mark.parametrize("head", icmlm.HEADS)
def test_icmlm(trains, fake_lm, arch, weight, head):
    trains("icmlm", "--arch", arch, "--head", head, "--lambda-tp", weight, "--heads", 2)


def test_icmlm_warmup(trains, fake_lm):
    """The backbone is frozen for three steps."""
    trains("icmlm", "--head", "att-fc", "--iters", 12, "--warmup-attention", 0.25)


LOSSES = {
    "ii": ("--lambda-tag", 0, "--lambda-cc", 0, "--lambda-ic", 0, "--lambda-ci", 0),
    "tag": ("--lambda-ii", 0, "--lambda-cc", 0, "--lambda-ic", 0, "--lambda-ci", 0),
    "ii cc": ("--lambda-tag", 0, "--lambda-ic", 0, "--lambda-ci", 0),
    "ic ci": ("--lambda-ii", 0, "--lambda-tag", 0, "--lambda-cc", 0),
    "all": (),
    "all in groups": ("--bn-splits", 4),
}


@pytest.mark.parametrize("flags", LOSSES.values(), ids=LOSSES)
def test_mmcontrastive(trains, flags):
    """With blur and greyscale. The script refuses cc alone, and ic without ci."""
    trains("mmcontrastive", "--bn-splits", 1, "--blur", 0.5, "--greyscale", 0.5, *flags)


# ---------------------------------------------------------------------------------- eval_linear.py


@pytest.fixture
def photos(coco_folder, tmp_path):
    """The scenes as an image folder of two classes, and a place for results"""
    for split, part in (("train2017", "train"), ("val2017", "val")):
        for n, path in enumerate(sorted((coco_folder / split).iterdir())):
            place = tmp_path / part / str(n % 2) / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
    return ["--root", tmp_path, "--output", tmp_path / "output"]


SHORT = "--batch-size", 4, "--amp", "bf16"  # six steps per epoch, which may begin by waiting
PROTOCOLS = {
    "sgd-virtex": ("--arch", "resnet18", "--image-size", 32),
    "layers": ("--arch", "vgg16", "--image-size", 48),
    "sgd-mct": ("--arch", "resnet18"),
    "logreg-icmlm": ("--arch", "resnet18"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_linear(watch, photos, monkeypatch, protocol):
    """Extracting features waits by its nature: the linear layers are given some."""
    monkeypatch.setattr(eval_linear, "checksum", lambda *_: 0)
    features = np.random.default_rng(0).random((24, 8), np.float32)
    given = features, np.array(12 * [0, 1])
    monkeypatch.setattr(eval_linear, "kept_features", lambda *_: given)
    monkeypatch.setattr(eval_linear, "warn_of_memory", lambda *_: None)  # asks the driver
    flags = "--data", "folder", "--weights", "random", "--protocol", protocol
    train(watch, ["eval_linear", *flags, *SHORT, *photos, *PROTOCOLS[protocol]])


def test_linear_with_several_labels(watch, coco_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_linear, "checksum", lambda *_: 0)
    flags = "--data", "coco", "--root", coco_folder, "--weights", "random", "--protocol", "layers"
    train(watch, ["eval_linear", *flags, *SHORT, "--output", tmp_path, *PROTOCOLS["layers"]])
