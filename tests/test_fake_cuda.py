"""The training loops of all scripts on fake CUDA tensors, which need no GPU.

Fake tensors have shapes, dtypes and devices, but no numbers (torch's FakeTensorMode). The scripts'
own `main` trains with them for a few steps: augmentation, forward pass in bf16, loss, clipping,
optimizer, look-ahead, momentum update, queues. Tensors of two devices in one operation raise an
error, and so does whatever makes the host wait for the GPU.

Not here: numbers, backward passes (which need a driver; gradients are zeros), kernels,
several processes, and what transformers asks the GPU about masks (it knows fake tensors and does
not ask them). Validation, checkpoints and the lines of metrics.jsonl may wait.
"""

import pytest
import torch
import transformers
from conftest import run_here
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import icmlm
import mmcontrastive
import virtex

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="asks for a driver")
GPU = torch.device("cuda", 0)
STEPS = 4
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
        self.begin()

    def begin(self):
        self.steps, self.strict, self.precisions = 0, False, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, func.overloadpacket
        if operation is aten._local_scalar_dense:  # item(), bool(), float()...
            if self.strict and args[0].device == GPU:
                raise Waits(f"{func} reads a number from the GPU")
            unknown = isinstance(args[0], FakeTensor) and args[0].constant is None
            return 1 if unknown else func(args[0])
        if self.strict and operation in (aten._to_copy, aten.copy_):
            check_copy(func, args, kwargs)
        if self.strict and operation in (aten.index, aten.index_put, aten.index_put_):
            for index in args[1]:  # on the host it is copied; those in a mask are counted
                wrong = index is not None and (index.device != GPU or index.dtype == torch.bool)
                if wrong and args[0].device == GPU:
                    raise Waits(f"{func} with {index.dtype} on {index.device}")
        if self.strict and operation is aten.convolution:
            self.precisions.add(args[0].dtype)
        if operation.__name__.startswith("_fused_"):  # optimizers: they have no fake kernels
            places = {x.device for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
            assert places == {GPU}, f"{func} on {places}"
            return None
        return func(*args, **kwargs)


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


def parameters_behind(loss):
    """What backward() would give gradients to"""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


@pytest.fixture
def watch(monkeypatch):
    """A GPU without memory, which the scripts find, and on which four steps are enough"""
    mode, real_loader = Watch(), common.DataLoader

    def backward(loss, *_, **__):
        """Gradients of zeros for the parameters that the loss depends on"""
        mode.steps += 1
        mode.strict = mode.steps > 1
        if mode.steps == STEPS:
            raise EnoughSteps
        for parameter in parameters_behind(loss):
            parameter.grad = torch.zeros_like(parameter)

    def loader(dataset, batch_size, sampler=None, collate_fn=None, **_):
        """Batches are made on the host, of numbers."""
        with unset_fake_temporarily():
            batches = iter(real_loader(dataset, batch_size, sampler=sampler, collate_fn=collate_fn))
        while True:
            with unset_fake_temporarily():
                batch = next(batches)
            yield batch

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr(torch.nn.Module, "_apply", convert)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", copied)
    monkeypatch.setattr(common, "DataLoader", loader)
    monkeypatch.setattr(common, "init_distributed", lambda: GPU)
    # Autocast is off without a GPU: it asks these.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    return mode


def train(watch, command):
    """Run the script's main until it has made enough steps; its models are made of fake tensors."""
    watch.begin()
    with FakeTensorMode(allow_non_fake_inputs=True), watch, pytest.raises(EnoughSteps):
        run_here(command)


LONG = "--iters", 100, "--log-every", 100, "--amp", "bf16"
REFUSED = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "cpu": lambda x: x.to("cpu", non_blocking=True),
    "boolean mask": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "a constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "copied out": lambda x: torch.zeros(3).copy_(x),
}


def test_what_is_refused(watch):
    """What makes the host wait for the GPU, or mixes their tensors"""
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        x = torch.ones(3, device=GPU)
        watch.strict = True
        for operation in REFUSED.values():
            with pytest.raises(RuntimeError):
                operation(x)
        accepted = x.masked_fill(x > 0, 0.0) * torch.tensor(2.0)
        accepted = accepted + torch.zeros(3).to(GPU, non_blocking=True)
        assert accepted.device == GPU


# Each command holds what no other does: a task, a loss, a head, an architecture, an optimizer.
TRAININGS = {
    "virtex": [
        "--layers 2 --lambda-words 2",
        "--task masked_lm --recipe demo",  # AdamW
        "--task token_classification",
    ],
    "tp": [
        "--labels lda",
        "--arch vgg16_bn",  # with its head of four convolutions, and RAdam
        "--labels rotation --arch vgg16_bn",
    ],
    "icmlm": [
        "--head tfm --lambda-tp 1 --arch vgg16_bn --heads 2",
        "--head att-fc --lambda-tp 1 --layers 2 --heads 2",
        "--head att-fc --lambda-tp 0 --iters 24 --warmup-attention 0.05",  # frozen for one step
    ],
    "mmcontrastive": [
        "--lm scratch --bn-splits 4",
        "--lm scratch --bn-splits 1 --lambda-tag 0",
        "--lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0",  # no captions
    ],
}


@pytest.mark.parametrize("script", TRAININGS)
def test_trainings(watch, tiny, tiny_lm, tmp_path, monkeypatch, script):
    """In bf16, with fake tensors as language models: only their tokenizers are real"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm)
    config = transformers.BertConfig.from_pretrained(tiny_lm)

    def language_model(name, device, amp):
        model = transformers.BertForMaskedLM(config).to(device).eval().requires_grad_(False)
        return tokenizer, icmlm.LanguageModel(model, amp)

    monkeypatch.setattr(icmlm, "load_language_model", language_model)
    monkeypatch.setattr(icmlm, "checksum", lambda lm: 0)  # which needs numbers
    monkeypatch.setattr(virtex, "LOOKAHEAD_K", 2)
    for name, value in (("greyscale", 0.5), ("blur", 0.5), ("lm_layers", 1), ("lm_width", 64)):
        rest = mmcontrastive.FLAGS[name][3:]  # what may be given; help
        monkeypatch.setitem(mmcontrastive.FLAGS, name, (value, value, value, *rest))
    for n, flags in enumerate(TRAININGS[script]):
        print(script, flags)  # shown if it fails
        train(watch, tiny(script, tmp_path / str(n), *LONG, *flags.split()))
        assert watch.precisions == {torch.bfloat16}
