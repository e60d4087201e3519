"""downstream/tagging.py: PMI, loss and mIOU@K against loops, sources of tags, the script."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import CPU, files_in, result, run_here
from scipy import sparse
from sklearn.metrics import jaccard_score
from sklearn.metrics.pairwise import paired_cosine_distances

import common
from downstream import tagging
from extras import shapes

TINY = "--image-size", 32, "--workers", 0, "--hidden", 64, "--epochs", 2


def tags_with_a_hub():
    """Tag 0 is at 21 images with one of tags 1 to 6, tags 7 to 11 at others, one at least

    -> (200, 12) of 0 and 1
    """
    dense, row = np.zeros((200, 12), np.float32), 0
    for k in range(1, 7):
        dense[row : row + k, [0, k]] = 1
        row += k
    dense[row:, 7:] = np.random.default_rng(0).random((200 - row, 5)) < 0.3
    dense[np.arange(row, 200), 7 + np.arange(200 - row) % 5] = 1
    return dense


TAGS = tags_with_a_hub()


@pytest.mark.parametrize("dim", (7, 4096))
def test_tag_vectors(dim):
    """PMI counted in loops, and numpy's SVD of it cut to `dim`; cosines do not depend on signs."""
    images = [set(np.flatnonzero(row)) for row in TAGS]
    pmi = np.zeros((12, 12))
    for a in range(12):
        for b in range(12):
            p_a = sum(a in image for image in images) / 200
            p_b = sum(b in image for image in images) / 200
            p_ab = sum(a in image and b in image for image in images) / 200
            if p_ab > 0:
                pmi[a, b] = max(0, math.log(p_ab / (p_a * p_b)))
    u, s, _ = np.linalg.svd(pmi)
    expected = u[:, :dim] * np.sqrt(s[:dim])
    expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-3)  # some are 0
    vectors = tagging.tag_vectors(sparse.csr_array(TAGS), dim, CPU).numpy()
    assert vectors.shape == (12, min(dim, 12))
    assert np.linalg.eigvalsh(pmi).min() < -2  # among the seven largest without signs
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=1e-4)


def test_cosine_loss_and_its_target():
    """1 - cos between the output and the mean of the vectors of the image's tags"""
    rng = np.random.default_rng(1)
    vectors, output = rng.normal(size=(12, 5)), rng.normal(size=(200, 5))
    means = [vectors[row > 0].mean(0) for row in TAGS]
    target = tagging.mean_vectors(sparse.csr_array(TAGS), torch.from_numpy(vectors))
    np.testing.assert_allclose(target, means, atol=1e-12)
    loss = tagging.cosine_loss(torch.from_numpy(output), target)
    expected = np.mean(paired_cosine_distances(output, means))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_miou():
    """|pred & gt| / |pred | gt|, the mean over images, as scikit-learn's Jaccard score"""
    rng = np.random.default_rng(2)
    ranked = np.array([rng.permutation(12) for _ in range(200)])
    scores = tagging.miou_at_cuts(ranked, sparse.csr_array(TAGS))
    assert list(scores) == ["mIOU@5", "mIOU@10", "mIOU@15", "mIOU@20"]
    for k in (5, 10, 15):
        predicted = np.zeros((200, 12), int)
        np.put_along_axis(predicted, ranked[:, :k], 1, 1)
        expected = 100 * jaccard_score(TAGS.astype(int), predicted, average="samples")
        assert scores[f"mIOU@{k}"] == pytest.approx(expected)


def test_script(coco_folder, tmp_path):
    """Two runs on 24 photos with TP's words as tags. (Means over runs: test_retrieval.py)"""
    output, concepts, weights = (tmp_path / x for x in ("out", "concepts.json", "backbone.pth"))
    words = {"nouns": dict.fromkeys(shapes.SHAPES, 1), "verbs": {}}
    concepts.write_text(json.dumps({**words, "adjectives": dict.fromkeys(shapes.COLOURS, 1)}))
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--data", "coco", "--root", coco_folder, "--output", output, *TINY, "--runs", 2
    printed = run_here(["downstream.tagging", *flags, "--tags", concepts, "--weights", weights])
    assert files_in(output) == {"result.json"}
    content = result(output)
    assert [len(content["runs"][name]) for name in ("trained", "random")] == [2, 2]
    assert content["args"]["tags"] == str(concepts) and content["std"]["random"]["mIOU@5"] > 0
    last = printed.splitlines()[-1]
    assert last.startswith("tagging of coco: mIOU@5 ") and "at random initialisation" in last
    assert "24 training and 12 validation photos" in printed


def test_nearest_tags():
    """By cosine, the nearest first; the length of the output does not matter."""
    features = torch.tensor([[1.0, 3, 2], [60, -10, 20]])
    ranked = tagging.nearest_tags(torch.nn.Identity(), features, torch.eye(3))
    assert ranked.tolist() == [[1, 2, 0], [0, 2, 1]]
