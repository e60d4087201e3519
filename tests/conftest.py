"""What the tests share: tiny runs of the scripts, small data sets in genuine layouts, real data."""

import contextlib
import gc
import importlib.util
import io
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

# The suite sees no GPU, so that it is the same on every machine. test_gpu.py gives its processes
# what was visible; workers of pytest-xdist inherit the note of it.
os.environ.setdefault("GPUS_BEFORE_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import pytest
import torch
import torchvision
from tqdm import tqdm

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))
import common
from extras import shapes

torch.set_num_threads(1)  # pictures of 32 pixels are not worth a second thread
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
NEEDS_PICTURES = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"

# The flags of a run of a second or two on 24 scenes, beside those that all scripts share.
TINY = [
    *("--arch", "resnet18", "--image-size", 32, "--batch-size", 8, "--workers", 0),
    *("--log-every", 1, "--lr", 0.05, "--amp", "off"),
]
OWN = {
    "virtex": ["--hidden", 64, "--text-lr", 0.05],
    "tp": [],
    "icmlm": ["--image-size", 64],
    "mmcontrastive": [
        *("--mlp-hidden", 32, "--intra-dim", 16, "--inter-dim", 24, "--queue", 16),
        *("--bn-splits", 2),
        *("--caption-views", "sibling", "--lambda-ic", 0.1, "--lambda-ci", 0.05),
        *("--momentum", 0.9, "--text-lr", 0.05),
    ],
}
SCRIPTS = tuple(OWN)


class Narrow(torchvision.models.ResNet):
    """ResNet-18 with an eighth of the channels, built, run and saved in a tenth of the time"""

    shrink = 8

    def __init__(self, num_classes=1000, **kwargs):
        block = torchvision.models.resnet.BasicBlock
        super().__init__(block, [2, 2, 2, 2], num_classes, **kwargs)
        self.inplanes = 64 // self.shrink
        self.conv1 = torch.nn.Conv2d(3, self.inplanes, 7, 2, 3, bias=False)
        self.bn1 = self._norm_layer(self.inplanes)
        self.layer1 = self._make_layer(block, 64, 2)
        self.fc = torch.nn.Linear(512 // self.shrink, num_classes)

    def _make_layer(self, block, planes, *given, **more):
        return super()._make_layer(block, planes // self.shrink, *given, **more)


class Half(Narrow):
    """Wide enough to learn something"""

    shrink = 2


class NarrowVGG(torch.nn.Module):
    """VGG-16 with an eighth of the channels, but for the last three layers, which probes read"""

    def __init__(self, num_classes=1000):
        super().__init__()
        widths = [w if w == "M" else w // 8 for w in torchvision.models.vgg.cfgs["D"]]
        widths[-4:-1] = 512, 512, 512
        self.features = torchvision.models.vgg.make_layers(widths, batch_norm=True)
        self.avgpool = torch.nn.AdaptiveAvgPool2d(7)
        self.classifier = torch.nn.Linear(512 * 7 * 7, num_classes)


REAL = {name: getattr(torchvision.models, name) for name in ("resnet18", "vgg16_bn")}
WIDTH = 512 // 8
torchvision.models.resnet18 = Narrow
torchvision.models.vgg16_bn = NarrowVGG
common.BACKBONES["resnet18"] = WIDTH


def photos_at(*paths):
    """The images of CaptionData at these paths, whether or not they are there"""
    return np.array(list(map(str, paths)), common.STRINGS)


def captioned(*captions, images=None, tags=None, tag_names=()):
    """CaptionData of photos with these captions.  tags: names of each photo's"""
    if images is None:
        images = photos_at(*(f"{n}.jpg" for n in range(len(captions))))
    tags = common.lists(tags or [[]] * len(captions))
    tagged = np.full(len(captions), True)
    return common.CaptionData(images, common.lists(captions), tags, tagged, list(tag_names))


def one_split(name, root=None, split="train", tags=False):
    """One of the splits that common.caption_data reads -> CaptionData"""
    [data] = common.caption_data(name, root, [split], tags)
    return data


class FeaturesAsGiven(torch.nn.Module):
    """In place of the backbone: images in, the same out."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, images):
        return images


class Touch:
    def __reduce__(self):  # when it is unpickled, a file is created
        return os.mknod, ("ran",)


def random_weights(module, scale):
    """Every parameter random, the gains of norms around 1: whatever is forgotten shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter)
    return module


@pytest.fixture(scope="session")
def tiny(coco_folder, tiny_lm):
    """-> function (script, output, *flags) -> the command of a tiny run on 24 scenes"""

    def command(script, output, *flags):
        data = "--data", "coco", "--root", coco_folder, "--output", output
        lm = ["--lm", tiny_lm] if script in ("icmlm", "mmcontrastive") else []
        return [f"{script}.py", *map(str, (*data, *TINY, *OWN[script], *lm, *flags))]

    return command


def run_here(command):
    """Run a script in this process -> what it printed."""
    script, *flags = map(str, command)
    module = importlib.import_module(script.removesuffix(".py"))
    common.report_once.cache_clear()  # as in a process of its own
    with contextlib.redirect_stdout(io.StringIO()) as output:
        module.main(module.get_args(flags))
    return output.getvalue()


def refusal(command):
    """Run a script in this process: it must end with one line -> that line."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(errors):
        run_here(command)
    message = str(stopped.value)
    if message == "2":  # of common.Parser; argparse's own has the program's name before it
        message = errors.getvalue().splitlines()[-1]
        message = message[message.index("error: ") :]
    del stopped  # its traceback holds the run, and this frame
    gc.collect()
    assert message.startswith("error: ") and "\n" not in message, message
    return message


def run_script(*command, cwd=ROOT, **more):
    """Run a script as a user would -> the finished process, its output as text."""
    words = [sys.executable, *map(str, command)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=env)


def finished(process):
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process


def fork(function, *given):
    """Start the function in a copy of this process, where nothing has to be imported again."""

    def work():
        tqdm.set_lock(threading.RLock())  # ours is shared: who is killed would not give it back
        function(*given)

    process = FORK.Process(target=work)
    process.start()
    return process


def fork_and_read(function, *given, seconds=None):
    """Call the function in a fork -> its exit code, what it printed

    The exit code is None if the fork was killed after so many seconds.
    """
    with tempfile.TemporaryFile("w+", buffering=1, encoding="utf-8", errors="replace") as file:

        def work():
            for stream in (1, 2):  # also of libraries in C
                os.dup2(file.fileno(), stream)
            sys.stdout = sys.stderr = file
            function(*given)

        process = fork(work)
        process.join(seconds)
        code = process.exitcode
        process.kill()
        process.join()
        file.seek(0)
        return code, file.read()


def run_copy(folder, *command):
    """Run a script that was copied into a folder, in a fork -> its exit code, what it printed

    It finds our modules only as far as they stand in that folder, and imports them anew.
    """

    def work():
        ours = {path.stem for path in ROOT.iterdir()}
        for name in list(sys.modules):
            if name.split(".")[0] in ours:
                del sys.modules[name]
        elsewhere = [place for place in sys.path if Path(place).resolve() not in (ROOT, TESTS)]
        sys.path[:] = [str(folder), *elsewhere]
        os.chdir(folder)
        sys.argv = list(map(str, command))
        runpy.run_path(sys.argv[0], run_name="__main__")

    return fork_and_read(work)


def pytest_pyfunc_call(pyfuncitem):
    """Fake CUDA tests run in a fork: once autograd has threads for a GPU, no fork can train."""
    if pyfuncitem.module.__name__ != "test_fake_cuda":
        return None
    names = pyfuncitem._fixtureinfo.argnames
    process = fork(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    process.join()
    assert process.exitcode == 0, "see the traceback on standard error"
    return True


def run_until_killed(iteration, command, owner=common.Log, name="write"):
    """Run a script until SIGKILL ends this process, when it has logged this iteration.

    None: after the first call of another function, owner.name
    """
    write = getattr(owner, name)

    def write_and_die(*given):
        write(*given)
        if iteration in (None, given[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, write_and_die)
    run_here(command)


def kill_at(iteration, command, *function):
    """run_until_killed in a fork"""
    process = fork(run_until_killed, iteration, command, *function)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def compare_weights():
    """From now on scripts compare their weights at the end, if several processes have trained.

    -> the list of the models that are still to be compared
    """
    models, restore, end = [], common.restore, common.end_distributed

    def kept(args, checkpoint, iters, parts):
        models.append(parts["model"])
        return restore(args, checkpoint, iters, parts)

    def compared():
        for model in models if common.world_size() > 1 else ():
            state = model.state_dict()
            names = [name for name, _ in model.named_parameters()]
            names += [name for name in state if name.startswith("queues")]
            mine = torch.cat([state[name].detach().double().flatten() for name in names])
            for other in common.gather(mine[None]):
                assert torch.equal(mine, other)
        models.clear()
        end()

    common.restore, common.end_distributed = kept, compared
    return models


def in_two_processes(function, *given):
    """Call the function in two forks of this process, which gloo connects as those of torchrun

    -> what it gives in each. If it is a training script, the weights must be equal at the end.
    """
    results = FORK.SimpleQueue()

    def work(rank):
        os.environ.update(place, RANK=rank, LOCAL_RANK=rank)
        models = compare_weights()
        if rank == "1":  # the first process reads for both
            common.coco_photos = common.jsonl_photos = lambda *given: 1 / 0
        results.put((rank, function(*given)))
        assert not models, "the weights were not compared"

    with socket.create_server(("localhost", 0)) as free:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    place["WORLD_SIZE"] = "2"
    processes = [fork(work, rank) for rank in "01"]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return [result for _, result in sorted((results.get(), results.get()))]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def checkpoint_in(folder):
    return torch.load(folder / "checkpoint.pth", weights_only=True)


def files_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def no_training(monkeypatch):
    """For commands that must be refused: one that is accepted fails here, and does not train."""

    def accepted(*_):
        raise AssertionError("the command was accepted, and training would begin")

    monkeypatch.setattr(common, "infinite_sampler", accepted)


@pytest.fixture
def real_data():
    """The folder with coco-mini, flickr8k and flowers, named by CAPTION_DATA."""
    folder = os.environ.get("CAPTION_DATA")
    if not folder:
        pytest.skip("CAPTION_DATA is not set: the folder with coco-mini, flickr8k and flowers")
    return Path(folder)


@pytest.fixture
def few_scenes(monkeypatch):
    """-> function (train, val): --data shapes has no more scenes than these"""

    def limit(train, val):
        splits = {"train": range(train), "val": range(10**7, 10**7 + val)}
        monkeypatch.setattr(shapes, "SPLITS", splits)

    return limit


@pytest.fixture
def real_models(monkeypatch):
    """torchvision's: to learn something, and beside scripts in a Python of their own"""
    for name, build in REAL.items():
        monkeypatch.setattr(torchvision.models, name, build)
    monkeypatch.setitem(common.BACKBONES, "resnet18", 512)


@pytest.fixture
def easy_scenes(few_scenes, monkeypatch):
    """--data shapes has scenes of one large, solid, upright object, learned in seconds"""

    def objects_of(scene):
        rng = random.Random(scene)
        shape, colour = rng.choice(shapes.SHAPES), rng.choice(("red", "blue", "white", "black"))
        x, y = rng.uniform(0.4, 0.6), rng.uniform(0.4, 0.6)
        return [shapes.Shape(shape, colour, "large", "solid", x, y, radius=0.36, angle=0)]

    few_scenes(2000, 300)
    monkeypatch.setattr(shapes, "objects_of", objects_of)
    monkeypatch.setattr(torchvision.models, "resnet18", Half)
    monkeypatch.setitem(common.BACKBONES, "resnet18", 512 // Half.shrink)


@pytest.fixture(scope="session")
def coco_folder(tmp_path_factory):
    """24 training and 12 validation scenes as JPEG files in COCO's layout, with instances."""
    root = tmp_path_factory.mktemp("coco")
    (root / "annotations").mkdir()
    categories = [{"id": 10 * k, "name": name} for k, name in enumerate(shapes.SHAPES)]
    for split, first, count in (("train2017", 0, 24), ("val2017", 1000, 12)):
        (root / split).mkdir()
        images, captions, instances = [], [], []
        for scene in range(first, first + count):
            name, objects = f"{scene:012d}.jpg", shapes.objects_of(scene)
            shapes.draw(scene).save(root / split / name)
            images.append({"id": scene, "file_name": name, "height": 96, "width": 96})
            of = {"image_id": scene}
            captions += [{**of, "caption": caption} for caption in shapes.describe(objects)]
            numbers = [shapes.SHAPES.index(o.shape) for o in objects]
            instances += [{**of, "category_id": 10 * k} for k in numbers]
        for kind, rows in (("captions", captions), ("instances", instances)):
            rows = [{"id": n, **row} for n, row in enumerate(rows)]
            content = {"images": images, "annotations": rows, "categories": categories}
            (root / "annotations" / f"{kind}_{split}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def tiny_lm(coco_folder, tmp_path_factory):
    """The folder of a BERT of one layer and 64 dimensions that has read coco_folder's captions."""
    from extras import small_bert  # only here: it takes a second, and not every process needs it

    captions = one_split("coco", str(coco_folder), "train2017").all_captions()
    folder = tmp_path_factory.mktemp("lm")
    small_bert.train(folder, captions, 40, 0, CPU, "off", layers=1, width=64)
    return folder


if __name__ == "__main__":  # python tests/conftest.py virtex.py FLAGS: with the narrow networks
    print(run_here(sys.argv[1:]), end="")
