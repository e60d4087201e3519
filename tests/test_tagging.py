"""downstream/tagging.py: PMI, loss and mIOU@K against loops, sources of tags, the script."""

import json
import math
from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU, captioned, files_in, refusal, result, run_here
from PIL import Image
from scipy import sparse
from sklearn.metrics import jaccard_score

import common
import eval_linear
import shapes
from downstream import tagging

RANDOM = "--weights", "random", "--arch", "resnet18"
TINY = "--image-size", 32, "--workers", 0, "--hidden", 64, "--epochs", 2


@pytest.fixture
def tags():
    """40 images with some of 12 tags, at least one each -> sparse (40, 12)"""
    rng = np.random.default_rng(0)
    dense = (rng.random((40, 12)) < 0.3).astype(np.float32)
    dense[np.arange(40), np.arange(40) % 12] = 1
    return sparse.csr_array(dense)


# ------------------------------------------------------------------------------------ equations


def tags_with_a_hub():
    """Tag 0 is at 21 images with one of tags 1 to 6, tags 7 to 11 at others -> (200, 12)

    Tag k from 1 to 6 is at k images. The matrix of the PMI has a large negative eigenvalue.
    """
    dense, row = np.zeros((200, 12), np.float32), 0
    for k in range(1, 7):
        dense[row : row + k, [0, k]] = 1
        row += k
    dense[row:, 7:] = np.random.default_rng(0).random((200 - row, 5)) < 0.3
    dense[np.arange(row, 200), 7 + np.arange(200 - row) % 5] = 1
    return dense


@pytest.mark.parametrize("dim", (7, 4096))
def test_tag_vectors(dim):
    """PMI counted in loops, and numpy's SVD of it cut to `dim`; cosines do not depend on signs."""
    dense = tags_with_a_hub()
    images = [set(np.flatnonzero(row)) for row in dense]
    pmi = np.zeros((12, 12))
    for a in range(12):
        for b in range(12):
            p_a = sum(a in image for image in images) / 200
            p_b = sum(b in image for image in images) / 200
            p_ab = sum(a in image and b in image for image in images) / 200
            if p_ab > 0:
                pmi[a, b] = max(0, math.log(p_ab / (p_a * p_b)))
    u, s, _ = np.linalg.svd(pmi)
    wanted = u[:, :dim] * np.sqrt(s[:dim])
    wanted /= np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), 1e-3)  # some are 0
    found = tagging.tag_vectors(sparse.csr_array(dense), dim, CPU).numpy()
    assert found.shape == (12, min(dim, 12))
    assert np.linalg.eigvalsh(pmi).min() < -2  # among the seven largest without signs
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-4)


def test_tags_of_the_same_images_are_near():
    """Tags that are never apart have one vector, those that never meet are orthogonal."""
    dense = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)
    vectors = tagging.tag_vectors(sparse.csr_array(dense), 4096, CPU)
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    torch.testing.assert_close(vectors @ vectors.T, torch.tensor(wanted).float())


def test_a_tag_of_all_images():
    """Its PMI is 0 with every tag: the vector is 0, not NaN."""
    dense = np.array([[1, 1, 0], [1, 0, 1], [1, 1, 0]], np.float32)
    vectors = tagging.tag_vectors(sparse.csr_array(dense), 4096, CPU)
    assert vectors[0].abs().max() < 1e-3 and vectors.isfinite().all()


def test_cosine_loss_and_its_target(tags):
    """1 - cos between the output and the mean of the vectors of the image's tags"""
    rng = np.random.default_rng(1)
    vectors, output = rng.normal(size=(12, 5)), rng.normal(size=(40, 5))
    losses = []
    for row, present in zip(output, tags.toarray()):
        own = [vectors[k] for k in range(12) if present[k]]
        mean = [sum(vector[d] for vector in own) / len(own) for d in range(5)]
        dot = sum(a * b for a, b in zip(row, mean))
        lengths = math.sqrt(sum(a * a for a in row)) * math.sqrt(sum(b * b for b in mean))
        losses.append(1 - dot / lengths)
    target = tagging.mean_vectors(tags, torch.from_numpy(vectors))
    np.testing.assert_allclose(target[-1], mean, atol=1e-12)
    loss = tagging.cosine_loss(torch.from_numpy(output), target)
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-12)


def test_nearest_tags():
    """By cosine, the nearest first; the length of the output does not matter."""
    vectors = torch.eye(3)
    features = np.array([[1, 3, 2], [60, -10, 20]], np.float32)
    found = tagging.nearest_tags(torch.nn.Identity(), features, vectors)
    assert found.tolist() == [[1, 2, 0], [0, 2, 1]]


def test_miou(tags):
    """|pred & gt| / |pred | gt|, the mean over images, as scikit-learn's Jaccard score"""
    rng = np.random.default_rng(2)
    ranked = np.array([rng.permutation(12) for _ in range(40)])
    found = tagging.miou_at_cuts(ranked, tags)
    assert list(found) == ["mIOU@5", "mIOU@10", "mIOU@15", "mIOU@20"]
    for k in (5, 10, 15):
        predicted = np.zeros((40, 12), int)
        np.put_along_axis(predicted, ranked[:, :k], 1, 1)
        truth = tags.toarray().astype(int)
        wanted = 100 * jaccard_score(truth, predicted, average="samples")
        assert found[f"mIOU@{k}"] == pytest.approx(wanted)


@pytest.mark.parametrize("size", (3, 30))
def test_baselines(size):
    """The same tags for every image, and the score of somebody who knows the tags."""
    rng = np.random.default_rng(3)
    tags = sparse.csr_array((rng.random((50, size)) < 0.4).astype(np.float32))
    others = tagging.baselines(tags)
    first = np.tile(np.arange(size), (50, 1))
    assert others["most frequent tags"] == [tagging.miou_at_cuts(first, tags)]
    knows = np.argsort(-tags.toarray(), 1, kind="stable")
    assert others["upper bound"][0] == pytest.approx(tagging.miou_at_cuts(knows, tags))


def test_mlp_learns(tags):
    """Tags that features tell are found, and more of them than the most frequent ones."""
    rng = np.random.default_rng(4)
    order = rng.integers(0, 40, 400)
    features = (tags @ rng.normal(size=(12, 20))).astype(np.float32)
    features = 1e-2 * features + 5  # their scale must not matter
    args = Namespace(hidden=64, epochs=20, batch_size=32, lr=1e-2)
    vectors = tagging.tag_vectors(tags, 4096, CPU)
    mlp = tagging.train_mlp(features[order], tags[order], vectors, args, seed=0)
    found = tagging.miou_at_cuts(tagging.nearest_tags(mlp, features, vectors), tags)
    others = tagging.baselines(tags)
    bound, frequent = (others[name][0]["mIOU@5"] for name in ("upper bound", "most frequent tags"))
    assert found["mIOU@5"] > frequent + 0.8 * (bound - frequent)


# --------------------------------------------------------------------------------- images, tags


def options(**given):
    default = {"data": "shapes", "root": None, "train_split": "train", "val_split": "val"}
    default |= {"tags": None, "num_tags": 1000, "fraction": 1.0, "seed": 0}
    return Namespace(**{**default, **given})


def test_scene_tags():
    scene = next(n for n in range(100) if len(shapes.objects_of(n)) == 1)
    [o] = shapes.objects_of(scene)
    words = tagging.scene_tags(scene)
    looks = {o.shape, o.colour, o.size, o.fill, f"{o.colour} {o.shape}"}
    assert looks < set(words) and len(words) == 6


def test_tags_of_a_jsonl(tmp_path):
    """The most frequent ones in this order; images that have none of them are left out."""
    rows = [["b", "a"], ["b", "c"], [], ["b", "a"], ["c"], ["d"]]
    lines = []
    for n, row in enumerate(rows):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{n}.jpg")
        split = "train" if n < 4 else "val"
        lines.append(json.dumps({"image": f"{n}.jpg", "tags": row, "split": split}))
    path = tmp_path / "photos.jsonl"
    path.write_text("\n".join(lines))
    train, val = tagging.tagged_images(options(data=str(path)))
    assert train.names == val.names == ["b", "a", "c"]
    assert [image[-5:] for image in train.images] == ["0.jpg", "1.jpg", "3.jpg"]
    assert train.labels.toarray().tolist() == [[1, 1, 0], [1, 0, 1], [1, 1, 0]]
    assert [image[-5:] for image in val.images] == ["4.jpg"]
    few, _ = tagging.tagged_images(options(data=str(path), num_tags=2, val_split="train"))
    assert few.names == ["b", "a"] and few.labels.toarray().tolist() == [[1, 1], [1, 0], [1, 1]]


def test_words_as_tags(tmp_path):
    """Words of concepts.json that occur in an image's captions, as whole words"""
    path = tmp_path / "concepts.json"
    content = {"nouns": {"dog": 9, "cat": 2}, "adjectives": {"red": 3}, "verbs": {"runs": 1}}
    path.write_text(json.dumps(content))
    data = captioned(["A Dog runs.", "the dog's red ball"], ["two cats"], [])
    words = tagging.tag_words(data, "coco", path)
    assert list(map(sorted, words)) == [["dog", "red", "runs"], [], []]


# ------------------------------------------------------------------------------------ the script


def command(folder, coco_folder, *flags):
    data = "--data", "coco", "--root", coco_folder, "--output", folder
    return ["downstream.tagging", *data, *TINY, *RANDOM, *flags]


def test_script(coco_folder, tmp_path):
    """Two runs on 24 photos with TP's words as tags: the files, and the mean of the runs"""
    output = tmp_path / "out"
    words = {"nouns": {name: 1 for name in shapes.SHAPES}, "verbs": {}}
    concepts = tmp_path / "concepts.json"
    concepts.write_text(json.dumps({**words, "adjectives": {name: 1 for name in shapes.COLOURS}}))
    weights = tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--runs", 2, "--tags", concepts, "--weights", weights
    printed = run_here(command(output, coco_folder, *flags))
    assert files_in(output) == {"result.json", "tagging.png"}
    found = result(output)
    assert [len(found["runs"][name]) for name in ("trained", "random")] == [2, 2]
    wanted = np.mean([scores["mIOU@5"] for scores in found["runs"]["random"]])
    assert found["random"]["mIOU@5"] == pytest.approx(wanted)
    assert found["args"]["tags"] == str(concepts) and found["std"]["random"]["mIOU@5"] > 0
    last = printed.splitlines()[-1]
    assert last.startswith("tagging of coco: mIOU@5 ") and "at random initialisation" in last
    assert "24 training and 12 validation images" in printed


def test_real_photos(real_data, tmp_path):
    """COCO's categories on coco-mini: 32 photos are too few to learn from."""
    printed = run_here(command(tmp_path, real_data / "coco-mini"))
    assert "tagging of coco" in printed
    scores = result(tmp_path)
    assert "trained" not in scores  # --weights random
    for name in ("random", "most frequent tags"):
        for cut, bound in scores["upper bound"].items():
            assert 0 <= scores[name][cut] <= bound
    assert 5 < scores["most frequent tags"]["mIOU@5"] < scores["upper bound"]["mIOU@5"]


REFUSED = [
    ("--data nonsense", "--data nonsense is unknown"),
    ("--tags none.json", "none.json not found"),
    ("--tags README.md", "README.md: Expecting value"),
    ("--weights none.pth", "none.pth not found"),
]


@pytest.mark.parametrize("flags, words", REFUSED)
def test_refusals(flags, words, coco_folder, tmp_path):
    assert words in refusal(command(tmp_path, coco_folder, *flags.split()))


def test_no_tags(coco_folder, tmp_path):
    """Photos with captions alone; a file of words that no caption holds."""
    photos = sorted((coco_folder / "train2017").iterdir())
    path, concepts = tmp_path / "photos.jsonl", tmp_path / "concepts.json"
    path.write_text("\n".join(json.dumps({"image": str(photo)}) for photo in photos))
    start = ["downstream.tagging", "--data", path, "--output", tmp_path / "out", *RANDOM, *TINY]
    assert "photos.jsonl has no tags: give --tags" in refusal(start)
    concepts.write_text(json.dumps({"nouns": {"dog": 1}}))
    assert "no caption holds a word of" in refusal([*start, "--tags", concepts])


def test_a_photo_that_cannot_be_decoded(tmp_path):
    """It is left out, and tags stay with their images."""
    images = common.ImageFiles()
    for n in range(3):
        path = tmp_path / f"{n}.png"
        Image.new("RGB", (32, 32), (80 * n, 0, 0)).save(path)
        images.append(str(path))
    (tmp_path / "1.png").write_text("no photo")
    tags = sparse.csr_array(np.eye(3, dtype=np.float32))
    data = eval_linear.LabelData(images, tags, list("abc"))
    backbone = common.build_backbone("resnet18")
    found, features = tagging.frozen_features(backbone, data, 32, ALONE, "off", 0)
    assert [image[-5:] for image in found.images] == ["0.png", "2.png"]
    assert found.labels.toarray().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert features.shape == (2, 512)
