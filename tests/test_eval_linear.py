"""eval_linear.py: labelled images, each protocol on small images, and the probe."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
import transformers
from conftest import CPU, REAL, in_two_processes, result, run_here
from PIL import Image
from torch import nn

import common
import eval_linear
import shapes
import sources
import svm


@pytest.fixture(scope="module", autouse=True)
def real_resnet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "resnet18", REAL["resnet18"])
        yield


def command(output, root, flags="", data="folder"):
    """eval_linear.py on small images; the weights are random unless the flags name others."""
    words = ["eval_linear.py", "--output", output, "--data", data, "--root", root]
    arch = "vgg16_bn" if "layers" in flags else "resnet18"
    weights = [] if "--weights" in flags else ["--weights", "random", "--arch", arch]
    return [*words, "--image-size", 32, "--workers", 0, *weights, *flags.split()]


def evaluate(output, *given, **kwargs):
    """Run the command -> {class or metric: mean score}"""
    run_here(command(output, *given, **kwargs))
    return result(output)["mean"]


VOC = "VOCdevkit/VOC2007"
VOC_CLASSES = "bird", "cat", "cow"


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    """VOC07's genuine layout; random labels, in testing no cow -> its folder, {split: labels}"""
    root, rng, labels = tmp_path_factory.mktemp("voc"), np.random.default_rng(0), {}
    photos, lists = root / VOC / "JPEGImages", root / VOC / "ImageSets" / "Main"
    photos.mkdir(parents=True)
    lists.mkdir(parents=True)
    for split, first, count in (("trainval", 0, 48), ("test", 48, 32)):
        labels[split] = rng.integers(-1, 2, (count, 3)).clip(max=(1, 1, split == "trainval"))
        for n, row in enumerate(labels[split], first):
            shapes.draw(n, 48).save(photos / f"{n:06d}.jpg")
            for name, label in zip(VOC_CLASSES, row):
                with open(lists / f"{name}_{split}.txt", "a") as file:
                    file.write(f"{n:06d} {label:2d}\n")
    return root, labels


@pytest.mark.parametrize("inside", ("", "VOCdevkit", VOC))
def test_voc07_labels(voc, inside):
    """--root may be any of the three folders. 1, -1 and 0 become 1, 0 and -1."""
    root, labels = voc
    for split, first in (("trainval", 0), ("test", 48)):
        data = eval_linear.label_data("voc07", root / inside, split)
        assert tuple(data.names) == VOC_CLASSES
        assert np.array_equal(data.labels, np.choose(labels[split] + 1, [0, -1, 1]))
        for n, path in enumerate(data.images, first):
            assert path == str(root / VOC / "JPEGImages" / f"{n:06d}.jpg")


def write_folder(root, count=4):
    """{train,val}/{blue,red}/<n>.png: noise around the colour -> root"""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, colour in (("blue", (50, 50, 200)), ("red", (200, 50, 50))):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                noise = rng.normal(colour, 40, (40, 40, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noise).save(root / split / name / f"{n}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """16 blue and 16 red images for training, and as many for testing"""
    return write_folder(tmp_path_factory.mktemp("folder"), 16)


LAYERS = "layers --batch-size 16 --image-size 48"


@pytest.mark.parametrize(
    "flags, metrics",
    [
        ("svm-virtex", "mAP,blue,red"),
        ("svm-icmlm", "mAP,blue,red"),
        ("knn", "top-1"),
        ("sgd-virtex --batch-size 16 --epochs 12", "top-1"),
        ("sgd-mct --epochs 12", "top-1"),
        ("logreg-icmlm --epochs 30", "top-1"),
        (f"{LAYERS} --epochs 8 --lr 0.3 0.3 0.6", "C-11 top-1,C-12 top-1,C-13 top-1"),
    ],
)
def test_what_is_separable_is_learned(flags, metrics, folder, tmp_path, real_models, monkeypatch):
    """Red against blue. The backbone is in eval mode and frozen, and so are its statistics."""
    backbone = common.build_backbone("vgg16_bn" if "layers" in flags else "resnet18")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(eval_linear, "load_backbone", lambda *_: backbone)
    mean = evaluate(tmp_path, folder, f"--protocol {flags}")
    assert mean.keys() == set(metrics.split(",")) and min(mean.values()) > 80
    assert "layers" in flags or min(mean.values()) > 95
    assert not backbone.training
    assert all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize("several", [False, True])
def test_nearest_neighbours_written_out(several):
    """The 20 nearest by cosine vote with exp(cosine / 0.07) for each of their labels."""
    rng = np.random.default_rng(0)
    x, test_x = rng.normal(size=(40, 5)).astype("f"), rng.normal(size=(9, 5)).astype("f")
    y = rng.integers(3, size=40) if not several else rng.integers(-1, 2, (40, 3)).astype(np.int8)
    test_y = y[:9]
    votes = np.zeros((9, 3))
    for i, query in enumerate(test_x):
        cosines = x @ query / np.linalg.norm(x, axis=1) / np.linalg.norm(query)
        for n in np.argsort(-cosines)[:20]:
            for c in range(3):
                has = y[n, c] == 1 if several else y[n] == c
                votes[i, c] += math.exp(cosines[n] / 0.07) * has
    scores = eval_linear.knn(x, y, test_x, test_y, list("abc"), None, CPU, 0)
    if several:
        literal = svm.average_precisions(votes, test_y, list("abc"))
        assert scores["mAP"] == pytest.approx(np.mean(list(literal.values())))
    else:
        assert scores["top-1"] == pytest.approx(100 * np.mean(votes.argmax(1) == test_y))


def cosine(lr, steps):
    return [lr * (1 + math.cos(math.pi * n / steps)) / 2 for n in range(steps)]


SECOND = 5 / math.sqrt(1 + 5e-5), 5 / math.sqrt(1 + 5e-5), 10 / math.sqrt(1 + 10e-5)
SCHEDULES = [  # learning rates per iteration, weight decay; strength of colour jitter, if augmented
    # VirTex App. A.1: batch 256, lr 0.3, 100 epochs: 8 images make 4 iterations.
    ("sgd-virtex --train-images 8", cosine(0.3, 4), 0, {0.0}),
    ("sgd-virtex --batch-size 16 --epochs 1", cosine(0.3 / 16, 2), 0, {0.0}),
    # Contrastive paper Sec. 4.2: lr 30, divided by 5 at epochs 30, 40 and 50 of 60.
    ("sgd-mct", [30.0] * 30 + [6.0] * 10 + [1.2] * 10 + [0.24] * 10, 0, set()),
    ("sgd-mct --epochs 6 --lr 2", [2.0] * 3 + [0.4, 0.08, 0.016], 0, set()),
    # DeeperCluster's: rates fall as 1 / sqrt(1 + lr * decay * t); on ImageNet all start at 0.02.
    (f"{LAYERS} --epochs 1 --lr 5 5 10", [(5, 5, 10), SECOND], 1e-5, {1.0}),
    ("layers --image-size 48 --epochs 1", [(0.02, 0.02, 0.02)], 1e-5, {1.0}),
]


@pytest.mark.parametrize("flags, rates, weight_decay, jitter", SCHEDULES)
def test_schedules(flags, rates, weight_decay, jitter, folder, tmp_path, monkeypatch):
    """Momentum 0.9; crops of 8-100% of the area [public codes]"""
    steps, crops, jitters = [], set(), set()
    step, crop, colour_jitter = torch.optim.SGD.step, common.random_crop, common.colour_jitter

    def recorded(self):
        for group in self.param_groups:
            assert (group["momentum"], group["weight_decay"]) == (0.9, weight_decay)
        steps.append([group["lr"] for group in self.param_groups])
        step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    recorded_crop = lambda rng, s, *size: crops.add(s) or crop(rng, s, *size)
    recorded_jitter = lambda rng, s: jitters.add(s) or colour_jitter(rng, s)
    monkeypatch.setattr(common, "random_crop", recorded_crop)
    monkeypatch.setattr(common, "colour_jitter", recorded_jitter)
    evaluate(tmp_path, folder, f"--protocol {flags}")
    assert steps == [pytest.approx(row) for row in np.reshape(rates, (len(rates), -1)).tolist()]
    assert jitters == jitter and crops == ({0.08} if jitter else set())


def test_costs(folder, tmp_path, monkeypatch):
    """svm-virtex: four. svm-icmlm: 40, drawn by the seed, log-uniform between 1e-5 and 1e5."""
    asked = []
    recorded = lambda x, y, costs: asked.append(costs) or np.zeros((len(costs), y.shape[1]))
    monkeypatch.setattr(svm, "cross_validate", recorded)
    evaluate(tmp_path, folder)
    evaluate(tmp_path, folder, "--protocol svm-icmlm --runs 2")
    four, first, second = asked
    assert four == (0.01, 0.1, 1.0, 10.0) and not set(first) & set(second)  # [VirTex App. A.1]
    for costs in (first, second):
        powers = np.log10(costs)
        assert len(costs) == 40 and (np.diff(powers) > 0).all() and abs(powers).max() <= 5
        assert np.histogram(powers, 5, (-5, 5))[0].min() >= 3


def test_linear_layers_are_trained_apart():
    """Beside another that diverges a layer is what it is alone; each has its own weight decay."""
    rng, some = np.random.default_rng(0), np.arange(30)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)

    def train(trials, x=x, rows=np.arange(40), **kwargs):
        torch.manual_seed(0)
        given = x, y, rows, trials, lambda fraction: 1 - fraction, 4, 16, CPU, 0
        return eval_linear.train_linear(*given, **kwargs)[0].weight

    trial, decaying = (0.5, 0.0), (0.5, 0.1)
    assert torch.equal(train([trial]), train([trial, (1e30, 1e-5)]))
    assert not torch.allclose(train([trial]), train([decaying]))
    normalized = train([trial], eval_linear.l2_normalize(x[:30]), some)
    torch.testing.assert_close(train([trial], x, some, normalize=True), normalized)
    [layer] = eval_linear.LinearLayers([400], 50)  # N(0, 0.01) and bias 0 [VirTex App. A.1]
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(layer.weight.mean()) < 1e-3 and not layer.bias.any()


def test_logreg_searches_on_held_out_images(monkeypatch):
    """25 trials on four fifths, batches of 1024; the best for the other fifth is trained on all."""
    rng, calls = np.random.default_rng(0), []
    y = rng.integers(0, 2, 50)
    x = (7 * np.eye(2)[y] + rng.normal(size=(50, 2))).astype(np.float32)

    def trained(x, y, rows, trials, factor, epochs, batch_size, device, seed, normalize):
        calls.append((rows, trials, [factor(fraction) for fraction in (0, 0.5, 1)]))
        assert normalize and (epochs, batch_size) == (100, 1024)
        signs = [-1] * len(trials)
        signs[17 % len(trials)] = 1  # only trial 17 knows the classes, and the one of the end
        return [partial(predicted, sign) for sign in signs]

    def predicted(sign, x):
        assert np.linalg.norm(x, axis=1) == pytest.approx(1, abs=1e-5)
        return sign * x

    monkeypatch.setattr(eval_linear, "train_linear", trained)
    monkeypatch.setattr(common, "save_weights", lambda path, layer: None)
    flags = command("out", "photos", "--protocol logreg-icmlm")[1:]
    args = eval_linear.get_args(list(map(str, flags)))
    assert eval_linear.logreg_icmlm(x, y, x, y, "ab", args, CPU, 3) == {"top-1": 100}
    (fit, trials, factors), (everything, final, _) = calls
    assert len(trials) == 25 and final == [trials[17]] and factors == pytest.approx([1, 0.5, 0])
    assert len(set(fit)) == 40 and len(set(everything)) == 50
    rates, decays = np.array(trials).T  # log-uniform and uniform [ICMLM App. F.2]
    assert 0.1 <= rates.min() < 1 and 10 < rates.max() <= 100
    assert 0 <= decays.min() < 3e-6 and 7e-6 < decays.max() <= 1e-5


def test_layers_are_the_last_three_convolutions():
    """C-11, C-12 and C-13 of torchvision's VGG-16, after ReLU, averaged over 3x3 places"""
    torch.manual_seed(0)
    backbone = common.build_backbone("vgg16_bn").eval()
    theirs = torchvision.models.vgg16_bn().eval().features
    theirs.load_state_dict(backbone.features.state_dict())
    convolutions = [n for n, module in enumerate(theirs) if isinstance(module, nn.Conv2d)]
    images = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    jitter = torch.tensor([[1.3, 0.7, 1.2, 0.05], [0.8, 1.1, 0.9, -0.1]])
    features = eval_linear.convolution_features(backbone, images, CPU, jitter=jitter)
    for found, n in zip(features, convolutions[-3:], strict=True):
        with torch.no_grad():
            maps = theirs[: n + 3](common.augment(images, jitter))  # and batch norm and ReLU
        cells = maps[..., :6, :6].reshape(2, 512, 2, 3, 2, 3).mean((3, 5))
        torch.testing.assert_close(found, cells.flatten(1))


def test_classification_loss():
    """Binary cross-entropy summed over classes, mean over images; difficult ones do not count."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4, 5)), rng.integers(-1, 2, (4, 5))
    p = 1 / (1 + np.exp(-logits))
    expected = -(np.log(p[labels == 1]).sum() + np.log(1 - p[labels == 0]).sum()) / 4
    given = torch.from_numpy(logits), torch.from_numpy(labels)
    assert eval_linear.classification_loss(*given, True).item() == pytest.approx(expected)


def test_pooling_in_2x2_parts():
    """ICMLM App. F.2 [Goyal et al. 2019]: 7x7 maps in four parts of 6x6 places"""
    images = torch.randint(0, 256, (1, 7, 7, 3), dtype=torch.uint8)
    expected = []
    for channel in common.augment(images)[0]:
        for rows in (channel[:6], channel[1:]):
            expected += [rows[:, :6].mean(), rows[:, 1:].mean()]
    found = eval_linear.pooled(nn.Identity(), images, CPU, grid_size=2)
    torch.testing.assert_close(found[0], torch.stack(expected))


def test_what_cannot_be_decoded_and_two_processes(tmp_path):
    """A broken photo and a broken link are left out, by name."""

    def extract():
        world = common.init_distributed()
        torch.manual_seed(0)
        backbone = common.build_backbone("resnet18")
        images = eval_linear.label_data("folder", tmp_path, "train").images
        args = SimpleNamespace(image_size=32, workers=0, output=tmp_path, amp="off")
        features, readable = eval_linear.extract_features(backbone, images, args, world)
        common.end_distributed(world)
        return None if features is None else np.array(features), readable

    blue = tmp_path / "train" / "blue"
    write_folder(tmp_path, 9)
    (blue / "3.png").write_text("no picture")
    (blue / "link.png").symlink_to(tmp_path / "nowhere.png")
    output = run_here(command(tmp_path, tmp_path))
    for name in ("3.png", "link.png"):
        assert f"cannot decode {blue}/{name}: left out" in output
    features, readable = extract()
    assert len(features) == 17 and readable.tolist() == [0, 1, 2, *range(4, 9), *range(10, 19)]
    (first, rows), (second, same_rows) = in_two_processes(extract)
    assert second is None and np.array_equal(rows, readable) and np.array_equal(rows, same_rows)
    np.testing.assert_allclose(first, features, rtol=1e-4, atol=1e-5)
    flags = "--protocol sgd-virtex --batch-size 16 --epochs 9"
    output, _ = in_two_processes(run_here, command(tmp_path, tmp_path, flags))
    assert output.count("epoch 5.1: top-1") == 1 and result(tmp_path)["mean"]["top-1"] > 95
    for image in (tmp_path / "train").rglob("*.png"):
        image.write_text("no picture")
    with pytest.raises(common.Unreadable, match="none of the 19 images can be decoded"):
        extract()


@pytest.fixture
def captioned(coco_folder):
    """Training and validation CaptionData, with tags"""
    return [common.caption_data("coco", coco_folder, split) for split in ("train2017", "val2017")]


def build_probe(data, output=None, trained_on_tags=False, **flags):
    args = {"probe_data": None, "probe_root": None, "probe_images": None, "output": output}
    args |= {"data": "own/photos.jsonl", "seed": 3, "arch": "resnet18"}
    args |= {"image_size": 32, "amp": "off", "workers": 0}
    return eval_linear.Probe(SimpleNamespace(**args | flags), *data, trained_on_tags)


def test_nothing_to_probe_on(captioned, tmp_path, capsys):
    """That is said, with the command that measures."""
    train, val = captioned
    assert build_probe([train.select([0]), val]).final(None, tmp_path, CPU) == {}
    output = capsys.readouterr().out
    assert f"python eval_linear.py --weights {tmp_path}/backbone.pth --image-size 32" in output
    assert "no class of photos.jsonl has examples in both splits" in output


def test_final_probe(captioned, coco_folder, tmp_path, capsys):
    """What svm-virtex measures, of the trained backbone and of a random one"""
    trained = common.build_backbone("resnet18")
    common.save_weights(tmp_path / "backbone.pth", trained)
    flags = "--arch resnet18 --seed 3"
    one, other = [
        round(evaluate(tmp_path, coco_folder, f"--weights {file} {flags}", "coco")["mAP"], 2)
        for file in (tmp_path / "backbone.pth", "random")
    ]
    assert one != other
    expected = {"data": "photos.jsonl", "metric": "mAP", "trained": one, "random": other}
    probe = build_probe(captioned, tmp_path, trained_on_tags=True)
    assert probe.final(trained, tmp_path, CPU) == {"probe": expected}
    assert trained.training and not trained.bn1.num_batches_tracked
    line = f"{one:.1f} mAP trained, {other:.1f} mAP at random initialisation"
    name = "photos.jsonl (trained on the same tags)"
    assert f"linear probe on {name}: {line}\n" in capsys.readouterr().out


def test_weights_of_others(tmp_path, monkeypatch):
    """imagenet: torchvision's file, where its download would be; clip:FOLDER, normalised as CLIP"""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    taken = sources.read_init("imagenet", "virtex", "resnet18")["backbone"]
    assert taken.keys() < state.keys() and all(torch.equal(taken[k], state[k]) for k in taken)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"image_size": 32, "patch_size": 8, "intermediate_size": 16}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "clip")
    encoder = eval_linear.load_backbone(f"clip:{tmp_path}/clip", None, 0).eval()
    photos = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])  # OpenAI's
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    expected = model(((photos / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output
    found = encoder(common.augment(photos)).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
