"""downstream/retrieval.py: VSE++ loss, captions' vectors, crops, epochs, folds, the whole script.

Its ranks and their shares are those of mmcontrastive.py: test_mmcontrastive.py.
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU, FeaturesAsGiven, captioned, in_two_processes, result, run_here
from PIL import Image

import common
from downstream import retrieval

# The flags of a run of a second or two.
TINY = [
    *("--weights", "random", "--arch", "resnet18", "--image-size", 32, "--workers", 0),
    *("--epochs", 2, "--dim", 16, "--word-dim", 8),
]


def tiny_args(folder, *flags):
    return retrieval.get_args(list(map(str, (*TINY, "--output", folder, *flags))))


def literal_loss(images, captions, image_idx, negatives):
    """VSE++ in loops; pairs of the same image are no negatives."""
    total = 0.0
    for i in range(len(images)):
        positive = float(images[i] @ captions[i])
        others = [j for j in range(len(images)) if image_idx[j] != image_idx[i]]
        i2t = [max(0.0, 0.2 - positive + float(images[i] @ captions[j])) for j in others]
        t2i = [max(0.0, 0.2 - positive + float(images[j] @ captions[i])) for j in others]
        for hinges in (i2t, t2i):
            hardest = negatives == "hardest"
            total += max(hinges, default=0.0) if hardest else sum(hinges) / len(images)
    return total


@pytest.mark.parametrize("negatives", ("hardest", "mean"))
def test_vse_loss(negatives):
    for image_idx in [0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 0, 1], [7] * 6:
        images, captions = torch.randn(2, 6, 4, dtype=torch.float64)
        captions = captions + images  # some pairs beyond the margin, others not
        images, captions = [torch.nn.functional.normalize(x) for x in (images, captions)]
        images.requires_grad_()
        loss = retrieval.vse_loss(images, captions, torch.tensor(image_idx), negatives)
        expected = literal_loss(images.detach(), captions, image_idx, negatives)
        assert loss.item() == pytest.approx(expected, abs=1e-12)
        assert (loss > 0) == (len(set(image_idx)) > 1)
        loss.backward()
        assert images.grad.isfinite().all()


def test_unit_vectors():
    """What the GRU gives when it reads a caption alone, word by word; lengths do not matter."""
    words = {"a": 3, "red": 4, "circle": 5, "floats": 6}
    model = retrieval.CommonSpace(6, words, word_dim=5, dim=7)
    captions = ["a circle", "a red, red circle floats", "", "A very red circle"]
    for caption, vector in zip(captions, model.encode_captions(captions)):
        state = torch.zeros(1, 7)
        for i in model.ids_of(caption):
            _, state = model.gru(model.words(torch.tensor([i])), state)
        torch.testing.assert_close(vector, state[0] / state.norm())
    features = torch.randn(4, 6)
    torch.nn.init.normal_(model.image.bias)
    vectors = model.encode_images(features)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(vectors, model.encode_images(5 * features))
    assert model.image.weight.abs().max() <= math.sqrt(6 / (6 + 7))
    assert model.words.weight.abs().max() <= 0.1


def test_folds():
    """The mean over parts that are searched one by one; what does not fill a part is left out."""
    owners = np.arange(11).repeat([2, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1])
    similarity = torch.rand(11, 17)
    first = retrieval.fold_scores(similarity[:5, :9], owners[:9])
    second = retrieval.fold_scores(similarity[5:10, 9:16], owners[9:16] - 5)
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    assert retrieval.fold_scores(similarity, owners, 2) == pytest.approx(expected, abs=1e-4)


def test_captions_stay_with_their_photos(tmp_path):
    """Where a photo has no captions or cannot be decoded"""
    rows = []
    for n in range(6):
        Image.new("RGB", (16, 16), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
        rows.append({"image": f"{n}.png", "captions": [f"photo {n}", f"number {n}"], "split": "x"})
    rows[2]["captions"] = []
    (tmp_path / "4.png").write_bytes(b"no photo")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = tiny_args(tmp_path, "--data", tmp_path / "a.jsonl")
    given = retrieval.captioned_images(args, "x", 100)
    data, features = retrieval.image_features(FeaturesAsGiven(3), given, args, ALONE)
    cropped, of_crops = retrieval.crop_features(FeaturesAsGiven(3), given, args, ALONE)
    assert of_crops.shape == (args.crops, 4, 3) and list(cropped.captions) == list(data.captions)
    for x in (features, *of_crops):
        reds = (x[:, 0] * common.IMAGENET_STD[0] + common.IMAGENET_MEAN[0]) * 255 / 40
        captions = [[f"photo {n}", f"number {n}"] for n in reds.round().astype(int)]
        assert [data.captions_of(n) for n in range(len(data))] == captions
    assert data.image_of_caption().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(retrieval.captioned_images(args, "x", 3)) == 3


def test_epochs(tmp_path, monkeypatch):
    """Each draws crops anew, flipped ones with flipped words; the first of the best is kept."""
    drawn, states, scores = [], [], iter((-1, 1, 1, -1))

    def encode_captions(model, captions):
        drawn[-1].append(captions)
        return torch.randn(8, 16)

    def encode_images(model, features):
        drawn.append([features.tolist()])
        return model.image(features)

    def compare(model, data, features):
        states.append(model.image.weight.clone())
        return next(scores) * torch.eye(8)

    monkeypatch.setattr(retrieval.CommonSpace, "encode_captions", encode_captions)
    monkeypatch.setattr(retrieval.CommonSpace, "encode_images", encode_images)
    monkeypatch.setattr(retrieval, "compare", compare)
    data = captioned(*[[f"left {n}"] for n in range(8)])
    features = np.stack(np.mgrid[:3, :8], 2).astype(np.float32)  # [crop, photo] of 3 crops each
    args = tiny_args(tmp_path)
    model = retrieval.train_encoders(data, features, data, features[0], {"left": 3}, args, CPU, 0)
    crops = set()  # of the photos, in each of the four epochs, which have one batch
    for pairs, captions in drawn:
        words = ["right" if crop == 1 else "left" for crop, _ in pairs]
        assert captions == [f"{word} {photo:.0f}" for word, (_, photo) in zip(words, pairs)]
        crops.add(tuple(crop for crop, _ in sorted(pairs, key=lambda pair: pair[1])))
    assert len(crops) == 4 and {*sum(crops, ())} == {0, 1, 2}
    assert [torch.equal(model.image.weight, x) for x in states] == [False, True, False, False]


def command(coco_folder, *flags):
    return ["downstream.retrieval", *TINY, "--data", "coco", "--root", coco_folder, *flags]


def test_script(coco_folder, tmp_path):
    """Two seeds: what two processes print and write."""
    weights = tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--weights", weights, "--runs", 2, "--output", tmp_path
    printed, _ = in_two_processes(run_here, command(coco_folder, *flags))
    content, last = result(tmp_path), "text to image R@10"
    for name, runs in content["runs"].items():
        assert len(runs) == 2 and len(content[name]) == 8
        for score, mean in content[name].items():
            values = [scores[score] for scores in runs]
            assert mean == pytest.approx(np.mean(values))
            assert content["std"][name][score] == pytest.approx(np.std(values, ddof=1))
    start = f"\nretrieval on coco, {last}: {content['trained'][last]:.1f} trained, "
    assert start in printed and printed.endswith(f", {content['chance'][last]:.1f} by chance\n")
    assert "21 training, 3 validation and 12 test images, " in printed
    assert Image.open(tmp_path / "retrieval.png").size == (8 * 136 + 8, 5 * 176 + 8)
