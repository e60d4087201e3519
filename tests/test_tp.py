"""tp.py against the paper written out slowly, its labels one by one, and as a user runs it."""

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import CPU, captioned, checkpoint_in, metrics, photos_at, result, run_here
from conftest import one_split
from scipy import sparse
from sklearn.cluster import KMeans
from sklearn.metrics import average_precision_score
from torch import nn

import common
import tp
from downstream.pictures import photo_files
from eval_linear import CentralSquares
from extras import shapes


def labels_in(folder, train, val, flags=""):
    """What tp.py makes of these captions and tags -> .names, .train, .val"""
    args = tp.get_args(f"--output {folder} --amp off {flags}".split())
    tp.make_labels(args, (train, val), CPU)
    names = json.loads((folder / "labels.json").read_text())
    rows = [sparse.load_npz(folder / name) for name in ("labels.npz", "val_labels.npz")]
    for data, labels in zip((train, val), rows):
        assert labels.dtype == np.float32 and labels.shape == (len(data), len(names))
    return SimpleNamespace(names=names, train=rows[0], val=rows[1])


def words(labels, rows):
    """Each photo's labels by their names"""
    return [{labels.names[k] for k in np.flatnonzero(row)} for row in rows.toarray()]


def test_words_of():
    """Letters of any script in lower case, joined by hyphens or apostrophes; no possessive 's."""
    assert tp.words_of("A T-shirt, 3 well-known DOGS'") == ["a", "t-shirt", "well-known", "dogs"]
    assert tp.words_of("café_2x - non- stop; naïve") == ["café", "non", "stop", "naïve"]
    assert tp.words_of("the Dog's can't man’s") == ["the", "dog", "can't", "man"]
    assert tp.words_of("MOM'S, a man 's black-and-white") == ["mom", "a", "man", "black-and-white"]
    assert tp.words_of("12 ... - _") == []


@pytest.mark.parametrize(
    "tagged, nouns, adjectives, verbs",
    [
        # The part that a word is given most often, which may be none; the count is of all.
        ("run/v run/n fast/- fast/a run/v fast/- dog/n dog/n run/-", "dog:2", "", "run:4"),
        # Auxiliaries are none where they are verbs; words that begin alike stay.
        ("is/v has/v can/n can/v can/n being/v island/n hash/v", "can:3 island:1", "", "hash:1"),
        # Two letters or more; hyphens may join parts, apostrophes not.
        ("x/n can't/v o'clock/n t-shirt/n ox/a", "t-shirt:1", "ox:1", ""),
        # By frequency, then by the alphabet.
        ("tree/n cat/n bat/n cat/n tree/n bat/n cat/n", "cat:3 bat:2 tree:2", "", ""),
    ],
)
def test_count_concepts(tagged, nouns, adjectives, verbs, monkeypatch):
    """ICMLM Sec. 3.1, of captions that a tagger gave as "word/n word/a word/v word/-"."""
    parts = {"n": "nouns", "a": "adjectives", "v": "verbs", "-": None}
    words = [(token[:-2], parts[token[-1]]) for token in tagged.split()]
    monkeypatch.setattr(tp, "count_tags", lambda *_: Counter(words))
    found = []
    for concepts in tp.count_concepts([], "textblob").values():
        found.append(" ".join(f"{word}:{count}" for word, count in concepts.items()))
    assert found == [nouns, adjectives, verbs]


def test_count_concepts_on_all_cores(monkeypatch):
    """Parts of the captions, in other processes: the same words, counts and order"""
    captions = [text for n in range(500) for text in shapes.describe(shapes.objects_of(n))]
    counts = tp.count_concepts(captions, "textblob")
    monkeypatch.setattr(common, "on_all_cores", lambda function, items, desc: [function(items)])
    assert json.dumps(counts) == json.dumps(tp.count_concepts(captions, "textblob"))


def test_tag_loss_is_equation_2():
    """-sum_k y_k log p_k with y normalised to sum to one, mean over the images that have labels"""
    present = [{0, 3, 6}, {2}, {1, 2, 3, 4, 5}, set(range(7)), set()]
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels, total = torch.tensor([[float(k in row) for k in range(7)] for row in present]), 0.0
    for scores, row in zip(logits.softmax(1).tolist(), present):
        total -= sum(1 / len(row) * math.log(scores[k]) for k in row)
    assert tp.tag_loss(logits, labels).item() == pytest.approx(total / 4, rel=1e-6)
    assert tp.tag_loss(logits, 0 * labels).item() == 0
    half = logits.bfloat16()  # summed in float32
    assert torch.equal(tp.tag_loss(half, labels), tp.tag_loss(half.float(), labels))


def test_tag_heads():
    """ICMLM Sec. 4.3: for a ResNet the mean over the grid, then an MLP of two layers."""
    features = torch.randn(3, 6, 2, 5)
    head = tp.tag_head("resnet50", 6, 4)
    first, last = [module for module in head if isinstance(module, nn.Linear)]
    hidden = (features.mean((2, 3)) @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(head(features), hidden @ last.weight.T + last.bias)
    head, x = tp.tag_head("vgg16_bn", 6, 4).eval(), features
    convolutions = [module for module in head if isinstance(module, nn.Conv2d)]
    norms = [module for module in head if isinstance(module, nn.BatchNorm2d)]
    assert len(convolutions) == 4
    for convolution, norm in zip(convolutions, norms, strict=True):
        x = norm(convolution(x)).clamp(min=0)
        assert x.shape == features.shape
    torch.testing.assert_close(head(features), head[-1](x.mean((2, 3))))
    # App. F.1: RotNet's VGG-16 has the fully connected layers of VGG-16, at 7 x 7 places.
    with torch.device("meta"):
        rotations = tp.TagPredictor("vgg16_bn", 4, "rotation").head
        words = tp.TagPredictor("vgg16_bn", 4, "postag").head
    linear = [module for module in rotations.modules() if isinstance(module, nn.Linear)]
    sizes = [(module.in_features, module.out_features) for module in linear]
    assert sizes == [(512 * 7 * 7, 4096), (4096, 4096), (4096, 4)]
    assert [type(module) for module in words] == [type(module) for module in head]


@pytest.mark.parametrize(
    "flags, number",
    [
        ("--data coco", 5000),  # Sec. 4.3
        ("--data coco --arch vgg16_bn", 1000),  # Sec. 4.2, Tab. 2
        ("--data coco --labels cluster", 1000),  # Tab. 2
        ("--data coco --labels lda --arch vgg16_bn", 40),  # Sec. 4.2
        ("--data coco --labels lda --num-labels 100", 100),
    ],
)
def test_how_many_labels(flags, number):
    assert tp.get_args(flags.split()).num_labels == number


@torch.no_grad()
def test_clusters_are_equation_1(tiny_lm, coco_folder, tmp_path, monkeypatch):
    """A caption's label is the centre nearest to its [CLS] vector, the mean of its cluster.
    A photo has the labels of all its captions; a cluster is called by the nearest of them.
    """
    captions = one_split("coco", str(coco_folder), "train2017").all_captions()
    captions = list(dict.fromkeys(captions))
    rng = np.random.default_rng(0)
    some = [rng.choice(captions, rng.integers(1, 4), replace=False).tolist() for _ in range(26)]
    train, val = captioned(*some[:20]), captioned(*some[20:])
    # psi(c)_[CLS]: each caption alone through BERT, the last layer, before the pooler
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm)
    model, vectors = transformers.BertForMaskedLM.from_pretrained(tiny_lm).eval(), {}
    for caption in captions:
        inputs = tokenizer(caption, return_tensors="pt")
        assert inputs["input_ids"][0, 0] == tokenizer.cls_token_id
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        vectors[caption] = hidden[0, 0].numpy()
    embed, mean = tp.embed_captions, np.mean(list(vectors.values()), 0)

    def spread(*given):
        """Those of random weights lie too close together for k-means in float32."""
        found, expected = embed(*given), np.stack([vectors[caption] for caption in given[2]])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        return 50 * (expected - mean)

    monkeypatch.setattr(tp, "embed_captions", spread)
    labels = labels_in(tmp_path, train, val, f"--labels cluster --lm {tiny_lm} --num-labels 5")
    vectors = {caption: 50 * (vector - mean) for caption, vector in vectors.items()}
    # The centres: K-means has converged, so that each is the mean of those that it is nearest to.
    kmeans = KMeans(5, init="random", n_init=1, max_iter=20, random_state=0)
    centres = kmeans.fit(np.stack([vectors[c] for c in train.all_captions()])).cluster_centers_
    found = {}
    for caption in captions:
        distances = [sum((vectors[caption] - centre) ** 2) for centre in centres]
        found[caption] = int(np.argmin(distances)), min(distances)
    for data, rows in ((train, labels.train), (val, labels.val)):
        expected = [{found[caption][0] for caption in row} for row in data.captions]
        assert [set(np.flatnonzero(row)) for row in rows.toarray()] == expected
        assert set(rows.data) == {1} and max(map(len, expected)) > 1
    for k, name in enumerate(labels.names):
        nearest = min(found[c][1] for c in train.all_captions() if found[c][0] == k)
        assert found[name] == (k, pytest.approx(nearest, abs=1e-3))


def test_loss_of_topics():
    """Sec. 4: binary cross-entropy with the probabilities, summed over topics, mean over images"""
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(5, 4, generator=generator)).bfloat16()  # summed in float32
    targets = torch.rand(5, 4, generator=generator).softmax(1)
    chances = logits.float().sigmoid()
    entropies = -targets * chances.log() - (1 - targets) * (1 - chances).log()
    loss = tp.label_loss(logits, targets, "lda")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(entropies.sum().item() / 5, rel=1e-5)
    assert torch.equal(tp.label_loss(logits, targets, "postag"), tp.tag_loss(logits, targets))


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
    assert set(labels.train.data) == {1}
    concepts = json.loads((tmp_path / "concepts.json").read_text())
    assert concepts["nouns"]["dog"] == 3 and concepts["adjectives"]["red"] == 2
    assert "2 of 6 captions are left out" in capsys.readouterr().out
    fewer = labels_in(tmp_path, train, val, "--num-labels 2")
    assert words(fewer, fewer.train) == [{"dog", "red"}, {"dog", "red"}, set()]
    assert "are nouns" not in capsys.readouterr().out
    labels_in(tmp_path, train, val, "--pos nn")
    assert "TextBlob says which words are nouns, and" in capsys.readouterr().out


def test_topics_are_probabilities(tmp_path):
    """Sec. 4: a document is all captions of an image, without stop words; targets sum to one."""
    animal, street = ["the dog runs over grass", "brown dog"], ["a bus on the street", "blue cars"]
    train = captioned(*[street, animal] * 20, ["this is the one and only"])
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


def test_topics_keep_what_is_seen(tmp_path):
    """scikit-learn's English stop words take the fire of a fire hydrant, and front, side and top"""
    seen = "fire front side top".split()
    train = captioned(*20 * [["the fire on the side of it", "top in front of them"]])
    labels = labels_in(tmp_path, train, train, "--labels lda --num-labels 1")
    assert sorted(labels.names[0].split(", ")) == seen


def test_labels_go_with_their_photos(tmp_path):
    """In a flipped photo left and right change places; a bad photo's place takes the next one."""
    for n in (0, 1, 3):
        shapes.draw(n).save(tmp_path / f"{n}.png")
    (tmp_path / "2.png").write_bytes(b"no photo")
    images = photos_at(*(tmp_path / f"{n}.png" for n in range(4)))
    four = captioned([], [], [], [], images=images)
    rows = np.array([[0, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0.25, 0.75]], np.float32)
    data, labels = tp.labelled(four, sparse.csr_array(rows))
    assert len(data) == 3  # 0 has no label
    flags, seen = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0), set()
    photos = tp.LabelledPhotos(data, labels, ["dog", "left", "right"], flags)
    for epoch, index in itertools.product((None, *range(8)), range(3)):
        sample = photos[index if epoch is None else (0, epoch, index)]
        photo = (1, 3, 3)[index]
        [whole] = common.read_crops(four, photo, [common.centre_crop], 16)
        flipped = not np.array_equal(sample["image"], whole)
        assert np.array_equal(sample["image"], whole[:, ::-1] if flipped else whole)
        dog, left, right = rows[photo].tolist()
        expected = [dog, right, left] if flipped else [dog, left, right]
        assert sample["targets"].tolist() == expected
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
    assert tp.tag_scores(scores, targets, "postag") == pytest.approx(expected, abs=0.0051)
    topics = rng.dirichlet([0.3] * 9, 30).astype(np.float32)
    topics[:2, 0] = 0.1, 0.0999
    expected = expected_scores(scores, topics >= np.float32(0.1))
    assert tp.tag_scores(scores, topics, "lda") == pytest.approx(expected, abs=0.0051)
    assert tp.tag_scores(np.eye(4)[[0, 1, 2, 2]], np.eye(4), "rotation") == {"top1": 75.0}



@pytest.mark.parametrize("labels", tp.LABELS)
def test_every_label_set_learns(labels, tiny, coco_folder, tmp_path):
    """24 pictures by heart: the loss falls (rotations are slow), and validation knows its scores.
    downstream.labels prints the ten most likely labels, of a model_N.pth alone.
    """
    flags = ["--labels", labels, "--iters", 50, "--keep-every", 50, "--crop-min", 0.9]
    flags += ["--colour-jitter", 0, *(["--num-labels", 12] if labels in ("cluster", "lda") else [])]
    output = run_here(tiny("tp", tmp_path, *flags, "--lm", "scratch", "--lm-iters", 3))
    losses, rotation = [row["loss"] for row in metrics(tmp_path)], labels == "rotation"
    assert np.mean(losses[-6:]) < np.mean(losses[:6]) - (0.05 if rotation else 0.2)
    content, scores = result(tmp_path), ["loss", "top1", "top5", "mAP"]
    assert list(content["validation"]) == scores[: 2 if rotation else 4]
    shown = " ".join(f"{score:.2f}" for score in content["validation"].values())
    assert f"this model {shown}" in " ".join(output.split())
    assert list(content["label_frequencies"]) == scores[1 : 2 if rotation else 4]

    photo, names = next((coco_folder / "val2017").iterdir()), checkpoint_in(tmp_path)["names"]
    output = run_here(["downstream.labels", "--weights", tmp_path / "model_50.pth", photo])
    assert f": trained on coco\n{photo}\n" in output
    assert sum(name in output for name in names) >= 4
    kept = torch.load(tmp_path / "model_50.pth", weights_only=True)
    model = tp.TagPredictor(kept["args"]["arch"], len(names), labels).eval()
    model.load_state_dict(kept["model"])
    squares = CentralSquares(photo_files([photo]), kept["args"]["image_size"], side_fraction=1.0)
    logits = model(common.augment(torch.from_numpy(squares[0][0])[None]))[0]
    best = (logits.sigmoid() if labels == "lda" else logits.softmax(0)).topk(min(10, len(names)))
    shares = zip(best.values.tolist(), best.indices.tolist())
    lines = [f"  {100 * share:5.1f}%  {names[k]}" for share, k in shares]
    assert output.splitlines()[2:] == lines


def test_validation_written_out(tiny, coco_folder, tmp_path, monkeypatch):
    """Some validation photos, each with its own labels; beside the frequencies in training"""
    monkeypatch.setattr(tp, "VAL_IMAGES", 9)
    command = tiny("tp", tmp_path, "--labels", "instances", "--iters", 2)
    run_here(command)
    args, state = tp.get_args(command[1:]), checkpoint_in(tmp_path)["model"]
    model = tp.TagPredictor(args.arch, len(shapes.SHAPES), args.labels).eval()
    model.load_state_dict(state)
    tags, rows = {}, []
    for split in "train", "val":
        data = one_split("coco", str(coco_folder), f"{split}2017", True)
        tags[split] = np.array([[name in row for name in data.tag_names] for row in data.tags])
    chosen = np.random.default_rng(0).permutation(len(data))[:9]
    for n in chosen:
        [pixels] = common.read_crops(data, n, [common.centre_crop], 32)
        rows.append(model(common.augment(torch.from_numpy(pixels)[None]))[0].detach())
    logits, right = torch.stack(rows), tags["val"][chosen]
    expected = expected_scores(logits.numpy(), right)
    expected["loss"] = tp.tag_loss(logits, torch.tensor(right).float()).item()
    assert result(tmp_path)["validation"] == pytest.approx(expected, abs=0.0051)
    frequencies = np.tile(tags["train"].mean(0), (9, 1))
    expected = expected_scores(frequencies, right)
    assert result(tmp_path)["label_frequencies"] == pytest.approx(expected, abs=0.0051)


def test_learns(easy_scenes, tmp_path):
    """A ninth of the demo, on easier scenes"""
    run_here(["tp.py", "--iters", 60, "--image-size", 32, "--output", tmp_path])
    scores = result(tmp_path)
    assert scores["validation"]["mAP"] > scores["label_frequencies"]["mAP"] + 15
