"""tp.py against the paper written out slowly, its labels one by one, and as a user runs it."""

import itertools
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import CPU, TINY, captioned, checkpoint_in, metrics, photos_at, result, run_here
from scipy import sparse
from sklearn.cluster import KMeans
from sklearn.metrics import average_precision_score
from torch import nn

import common
import language
import shapes
import tp


def arguments(flags=""):
    return tp.get_args(["--amp", "off", *flags.split()])


def labels_in(folder, train, val, flags=""):
    """What tp.py makes of these captions and tags -> .names, .train, .val"""
    names, labels, val_labels = tp.make_labels(arguments(flags), train, val, folder, CPU)
    return SimpleNamespace(names=names, train=labels, val=val_labels)


def centred(images, n, size):
    """The central square of photo n, as validation sees it -> (1, 3, size, size)"""
    [pixels] = common.read_crops(images[n], [common.centre_crop], size)
    return common.augment(torch.from_numpy(pixels)[None])


def words(labels, rows):
    """Each image's labels by their names"""
    return [{labels.names[k] for k in np.flatnonzero(row)} for row in rows.toarray()]


@pytest.fixture(scope="module")
def captions(coco_folder):
    """Those that tiny_lm has read, without repetitions"""
    return list(dict.fromkeys(common.caption_data("coco", coco_folder, "train2017").all_captions()))


@torch.no_grad()
def literal_vectors(folder, captions):
    """psi(c)_[CLS]: each caption alone through BERT, the last layer, before the pooler"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, vectors = transformers.BertForMaskedLM.from_pretrained(folder).eval(), []
    for caption in captions:
        inputs = tokenizer(caption, return_tensors="pt")
        assert inputs["input_ids"][0, 0] == tokenizer.cls_token_id
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        vectors.append(hidden[0, 0].numpy())
    return np.stack(vectors)


def test_clusters_are_equation_1(tiny_lm, captions, tmp_path):
    """A caption's label is the centre nearest to its [CLS] vector; an image has all its captions'.

    A cluster is called by the three captions nearest to its centre.
    """
    rng = np.random.default_rng(0)
    some = [rng.choice(captions, rng.integers(1, 4), replace=False).tolist() for _ in range(26)]
    train, val = captioned(*some[:20]), captioned(*some[20:])
    labels = labels_in(tmp_path, train, val, f"--labels cluster --lm {tiny_lm} --num-labels 5")
    vectors = literal_vectors(tiny_lm, train.all_captions()).astype(np.float16)
    centres = tp.train_kmeans(vectors, 5, seed=0)
    distances = torch.cdist(torch.from_numpy(literal_vectors(tiny_lm, captions)), centres)
    found = {c: (row.argmin().item(), row.min().item()) for c, row in zip(captions, distances)}
    for data, rows in ((train, labels.train), (val, labels.val)):
        expected = [{found[c][0] for c in data.captions_of(i)} for i in range(len(data))]
        assert [set(np.flatnonzero(row)) for row in rows.toarray()] == expected
        assert set(rows.data) == {1} and max(map(len, expected)) > 1
    for k, name in enumerate(labels.names):
        members = {c: found[c][1] for c in train.all_captions() if found[c][0] == k}
        nearest = pytest.approx(sorted(members.values())[:3], abs=0.01)
        assert [members[c] for c in name.split(" | ")] == nearest
    assert not (tmp_path / "caption_vectors.npy").exists()


@pytest.mark.parametrize("passes", (1, 3, 50))
def test_kmeans_is_lloyds_algorithm(passes):
    """scikit-learn's, from some of the vectors; 50 passes are more than it needs."""
    vectors = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float16)
    start = tp.train_kmeans(vectors, 6, seed=0, passes=0).double().numpy()
    assert all((row == vectors).all(1).any() for row in start)
    theirs = KMeans(6, init=start, n_init=1, max_iter=passes, tol=0).fit(vectors.astype(float))
    found = tp.train_kmeans(vectors, 6, seed=0, passes=passes)
    np.testing.assert_allclose(found, theirs.cluster_centers_, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_loss_of_topics(dtype):
    """Sec. 4: binary cross-entropy with the probabilities, summed over topics, mean over images"""
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(5, 4, generator=generator)).to(dtype)
    targets = torch.rand(5, 4, generator=generator).softmax(1)
    chances = logits.float().sigmoid()
    entropies = nn.functional.binary_cross_entropy(chances, targets, reduction="sum")
    loss = tp.label_loss(logits, targets, "lda")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(entropies.item() / 5, rel=1e-5)
    assert tp.label_loss(0 * logits, targets, "lda").item() == pytest.approx(0.7 * 4, rel=0.02)
    equation_2 = language.tag_loss(logits, targets)  # written out in test_language.py
    assert torch.equal(tp.label_loss(logits, targets, "postag"), equation_2)


def test_four_rotations():
    """RotNet: block k is the images turned by k quarters, counter-clockwise, with the label k."""
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    turned, targets = tp.four_rotations(images)
    assert turned.shape == (8, 3, 4, 4) and targets.shape == (8, 4)
    for k in range(4):
        assert torch.equal(turned[2 * k : 2 * k + 2], images.rot90(k, (2, 3)))
        assert targets[2 * k : 2 * k + 2].tolist() == 2 * [[float(j == k) for j in range(4)]]


def test_postag_labels(tmp_path, capsys):
    """Sec. 3.1: the words in any of an image's captions that are among the K most frequent."""
    twice = ["a dog runs", "a dog runs", "the Red dog sleeps"]
    train = captioned(twice, ["one red t-shirt here", "a DOG runs"], ["black cat"])
    val = captioned(["A purple zebra runs", "red red red"], ["the purple zebra"], ["dog runs"])
    labels = labels_in(tmp_path, train, val)
    assert labels.names[:3] == ["dog", "red", "runs"]
    first, second = {"dog", "runs", "red", "sleeps"}, {"red", "t-shirt", "dog", "runs"}
    assert words(labels, labels.train) == [first, second, set()]
    assert words(labels, labels.val) == [{"runs", "red"}, set(), set()]
    assert labels.train.dtype == np.float32 and set(labels.train.data) == {1}
    concepts = json.loads((tmp_path / "concepts.json").read_text())
    assert concepts["nouns"]["dog"] == 3 and concepts["adjectives"]["red"] == 2
    assert "2 of 6 captions are left out" in capsys.readouterr().out

    fewer = labels_in(tmp_path, train, val, "--num-labels 2")
    assert words(fewer, fewer.train) == [{"dog", "red"}, {"dog", "red"}, set()]


ANIMAL, STREET = ["the dog runs over grass", "brown dog"], ["a bus on the street", "cars of blue"]


def test_topics_are_probabilities(tmp_path):
    """Sec. 4: a document is all captions of an image, without stop words; targets sum to one."""
    captions = [ANIMAL if n % 2 else STREET for n in range(40)]
    train = captioned(*captions, ["this is the one and only"])
    val = captioned(["dog on the grass"], ["a purple zebra yawns"], ["bus in the street"])
    labels = labels_in(tmp_path, train, val, "--labels lda --num-labels 2")
    rows, val_rows = labels.train.toarray(), labels.val.toarray()
    np.testing.assert_allclose(rows.sum(1), [1] * 40 + [0], atol=1e-6)
    np.testing.assert_allclose(val_rows.sum(1), [1, 0, 1], atol=1e-6)
    dog, bus = rows[1].argmax(), rows[0].argmax()
    assert rows[1:40:2, dog].min() > 0.7 and rows[:40:2, bus].min() > 0.7
    assert val_rows[0, dog] > 0.6 and val_rows[2, bus] > 0.6
    topics = [name.split(", ") for name in labels.names]
    assert {"dog", "grass"} < set(topics[dog]) and {"bus", "street"} < set(topics[bus])
    assert [len(topic) for topic in topics] == [5, 5] and not {"the", "on"} & set(topics[dog])


def test_labels_go_with_their_photos(tmp_path):
    """In a flipped photo left and right change places; a bad photo's place takes the next one."""
    for n in (0, 1, 3):
        shapes.draw(n).save(tmp_path / f"{n}.png")
    (tmp_path / "2.png").write_bytes(b"no photo")
    images = photos_at(*(tmp_path / f"{n}.png" for n in range(4)))
    rows = np.array([1, 2, 3])  # 0 has no label
    labels = np.array([[0, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0.25, 0.75]], np.float32)
    permutation, seen = language.flip_permutation(["dog", "left", "right"]), set()
    flags = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0)
    make = partial(tp.make_sample, images, rows, flags)
    samples = common.Samples(make, 3)
    for epoch, index in itertools.product((None, *range(8)), range(3)):
        sample = samples[index if epoch is None else (0, epoch, index)]
        batch = tp.collate(sparse.csr_array(labels), permutation, [sample])
        photo, flipped = (1, 3, 3)[index], sample["flipped"]
        dog, left, right = labels[photo].tolist()
        expected = [dog, right, left] if flipped else [dog, left, right]
        assert batch["targets"].tolist() == [expected]
        pixels, whole = common.augment(batch["images"]), centred(images, photo, 16)
        assert torch.equal(pixels, whole.flip(3) if flipped else whole)
        seen.add((epoch is None, photo, flipped))
    training = {(False, photo, flipped) for photo in (1, 3) for flipped in (False, True)}
    assert seen == training | {(True, 1, False), (True, 3, False)}


def expected_scores(scores, right):
    """scores (N, K), right (N, K) bool; mAP over the labels that occur"""
    ranked = np.take_along_axis(right, (-scores).argsort(1), 1)
    columns = zip(right.T, scores.T)
    precisions = [average_precision_score(y, score) for y, score in columns if y.any()]
    rows = {"top1": ranked[:, 0], "top5": ranked[:, :5].any(1), "mAP": precisions}
    return {name: 100 * np.mean(row) for name, row in rows.items()}


def test_scores():
    """top1, top5 and mAP over the labels that occur; some images have equal scores."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (30, 9)) + 0.01 * np.arange(9)
    targets = (rng.random((30, 9)) < 0.15).astype(np.float32)
    targets[:, 4] = 0
    expected = expected_scores(scores, targets > 0)
    assert 5 < expected["top1"] < 60 and expected["top1"] < expected["top5"] < 95
    assert tp.tag_scores(scores, targets, "postag") == pytest.approx(expected)
    topics = rng.dirichlet([0.3] * 9, 30).astype(np.float32)
    topics[:2, 0] = 0.1, 0.0999
    expected = expected_scores(scores, topics >= np.float32(0.1))
    assert tp.tag_scores(scores, topics, "lda") == pytest.approx(expected)
    assert tp.tag_scores(np.eye(4)[[0, 1, 2, 2]], np.eye(4), "rotation") == {"top1": 75.0}
    assert tp.tag_scores(scores, 0 * targets, "postag") == {"top1": 0.0, "top5": 0.0}


COSINE = {0: 3e-2, 25_000: 1.5e-2 * (1 + math.sqrt(0.5)), 50_000: 1.5e-2, 100_000: 0}
TP_VGG = {0: 1e-4, 79_999: 1e-4, 80_000: 1e-5, 89_999: 1e-5, 90_000: 1e-6, 100_000: 1e-6}
ROTNET = {0: 1e-3, 99_999: 1e-3, 100_000: 1e-4, 109_999: 1e-4, 110_000: 1e-5, 120_000: 1e-5}
VGG = "--arch vgg16_bn"


@pytest.mark.parametrize(
    "flags, arch, optimizer, decay, rates",
    [
        ("", "resnet50", torch.optim.SGD, 1e-4, COSINE),
        ("--labels cluster", "resnet50", torch.optim.SGD, 1e-4, COSINE),
        ("--arch resnet50 --labels rotation", "resnet50", torch.optim.SGD, 1e-4, COSINE),
        (VGG, "vgg16_bn", torch.optim.RAdam, 1e-3, TP_VGG),
        (f"{VGG} --labels=instances", "vgg16_bn", torch.optim.RAdam, 1e-3, TP_VGG),
        (f"{VGG} --labels rotation", "vgg16_bn", torch.optim.RAdam, 1e-5, ROTNET),
        ("--labels rotation", "vgg16_bn", torch.optim.RAdam, 1e-5, ROTNET),
    ],
)
def test_appendix_f1(flags, arch, optimizer, decay, rates):
    """The learning rates by iteration of runs on coco and vg, in batches of 128"""
    for data in ("coco", "vg"):
        args = arguments(f"--data {data} {flags}")
        assert (args.arch, args.batch_size, args.iters) == (arch, 128, max(rates))
        parameter = nn.Parameter(torch.zeros(1))
        built = common.build_optimizer(args.optimizer, [parameter], args.lr, args.weight_decay)
        [group] = built.param_groups
        assert isinstance(built, optimizer) and group["weight_decay"] == decay
        for iteration, rate in rates.items():
            factor = common.lr_factor(iteration, args.iters, args.warmup, args.steps)
            common.set_lr(built, factor)
            assert group["lr"] == pytest.approx(rate, rel=1e-9, abs=1e-15)


@pytest.fixture(scope="module", params=tp.LABELS)
def trained(request, coco_folder, tmp_path_factory):
    """A run of 50 iterations on 24 pictures, for each label set -> labels, folder, output"""
    folder = tmp_path_factory.mktemp(request.param)
    data = "--data", "coco", "--root", coco_folder, "--output", folder
    flags = ["--labels", request.param, "--iters", 50, "--log-every", 2, "--validate-every", 19]
    flags += ["--keep-every", 50, "--crop-min", 0.9, "--colour-jitter", 0]
    flags += ["--num-labels", 12] * (request.param in ("cluster", "lda"))
    output = run_here(["tp.py", *data, *TINY, *flags, "--lm", "scratch", "--lm-iters", 3])
    return SimpleNamespace(labels=request.param, folder=folder, output=output)


def test_every_label_set_learns(trained):
    """24 pictures by heart: the loss falls (rotations are slow); lr is that of each iteration."""
    rows = metrics(trained.folder)
    losses = [row["loss"] for row in rows]
    fall = 0.05 if trained.labels == "rotation" else 0.2
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - fall
    scores = ["loss", "top1"] if trained.labels == "rotation" else ["loss", "top1", "top5", "mAP"]
    for row in rows:
        cosine = math.cos(math.pi * (row["iteration"] - 1) / 50)
        assert row["lr"] == pytest.approx(0.05 * (1 + cosine) / 2, rel=1e-5)
        due = row["iteration"] in (19, 38)
        found = [name for name in row if name.startswith("validation_")]
        assert found == [f"validation_{name}" for name in scores if due]
    content = result(trained.folder)
    last = content["validation"]
    assert list(last) == scores and trained.output.count("validation: loss") == 3
    assert f"\nvalidation: loss {last['loss']:.2f}, top1 {last['top1']:.2f}" in trained.output
    assert ("label_frequencies" in content) == (trained.labels != "rotation")


def test_labels_of_photos(trained, coco_folder):
    """downstream.labels prints the ten most likely, of a model_N.pth alone."""
    photo = next((coco_folder / "val2017").iterdir())
    output = run_here(["downstream.labels", "--weights", trained.folder / "model_50.pth", photo])
    names = checkpoint_in(trained.folder)["names"]
    assert output.startswith(f"{photo}\n") and sum(name in output for name in names) >= 4


def test_learns(easy_scenes, tmp_path, monkeypatch):
    """A ninth of the demo, on easier scenes: words and shapes"""
    monkeypatch.setitem(tp.RECIPES, "probe_images", (500, 500, 500))
    run_here(["tp.py", "--iters", 60, "--image-size", 32, "--output", tmp_path])
    scores, probe = result(tmp_path), result(tmp_path)["probe"]
    assert scores["validation"]["mAP"] > scores["label_frequencies"]["mAP"] + 15
    assert probe["trained"] > probe["random"] + 8
