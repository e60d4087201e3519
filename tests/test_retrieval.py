"""downstream/retrieval.py: VSE++ loss, captions' vectors, crops, epochs, folds, the whole script.

Its ranks are those of mmcontrastive.retrieval_scores: test_mmcontrastive.py.
"""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import captioned, one_split, result, run_here

import common
from downstream import retrieval


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


def test_script(coco_folder, tmp_path):
    """Two seeds: what it prints and writes"""
    weights = tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--data coco --arch resnet18 --image-size 32 --workers 0 --epochs 2 --dim 16".split()
    flags += "--word-dim", 8, "--runs", 2, "--root", coco_folder, "--output", tmp_path
    command = ["downstream.retrieval", *flags, "--weights", weights]
    printed = run_here(command)
    content, last = result(tmp_path), "text to image R@10"
    for name, runs in content["runs"].items():
        assert len(runs) == 2 and len(content[name]) == 8
        for score, mean in content[name].items():
            values = [scores[score] for scores in runs]
            assert mean == pytest.approx(np.mean(values))
            assert content["std"][name][score] == pytest.approx(np.std(values, ddof=1))
    start = f"\nretrieval on coco: {last} {content['trained'][last]:.1f} trained, "
    assert start in printed and printed.endswith(f", {content['chance'][last]:.1f} by chance\n")
    assert "21 training, 3 validation and 12 test photos, " in printed


def test_random_crops(coco_folder):
    """A crop of each photo, then a flipped one of each; the seed draws them."""
    photos = one_split("coco", str(coco_folder), "val2017").select(np.arange(3))
    args = retrieval.get_args(["--image-size", "32"])
    crops = retrieval.RandomCrops(photos, args)
    assert len(crops) == 3 * args.crops
    for i in range(6):
        crop = partial(common.random_crop, np.random.default_rng([args.seed, i]), args.crop_min)
        [expected] = common.read_crops(photos, i % 3, [crop], 32)
        pixels, readable = crops[i]
        assert readable and np.array_equal(pixels, expected[:, ::-1] if i >= 3 else expected)


def test_captions_follow_their_crops(monkeypatch):
    """Odd crops are flipped: left and right change places in their captions, and in no other."""
    data, val = captioned(["left of it"], ["it is right"]), captioned(["above it"])
    of_photos = {0: ("left of it", "right of it"), 1: ("it is right", "it is left")}
    features = torch.tensor([[[1.0, crop, photo] for photo in (0, 1)] for crop in range(4)])
    rows, seen = [], set()
    encode_images = retrieval.CommonSpace.encode_images
    encode_captions = retrieval.CommonSpace.encode_captions

    def images_seen(model, features):
        rows.extend(features.tolist())
        return encode_images(model, features)

    def captions_seen(model, captions):
        for caption in captions:
            _, crop, photo = rows.pop(0)
            seen.add((crop, photo, caption))
        return encode_captions(model, captions)

    monkeypatch.setattr(retrieval.CommonSpace, "encode_images", images_seen)
    monkeypatch.setattr(retrieval.CommonSpace, "encode_captions", captions_seen)
    args = SimpleNamespace(word_dim=4, dim=4, lr=1e-3, epochs=10, negatives="mean")
    words = {word: n for n, word in enumerate("left right of it is".split(), 3)}
    given = data, features, val, torch.tensor([[1.0, 9, 9]]), words, args, torch.device("cpu")
    retrieval.train_encoders(*given, seed=0)
    expected = {(n, photo, of_photos[photo][n % 2]) for n in range(4) for photo in (0, 1)}
    assert seen == expected | {(9, 9, "above it")}


def test_captions_of_another_language(coco_folder, tmp_path):
    """The test captions have no word of the training captions."""
    texts = {"train2017": "a red circle", "val2017": "жук на траве"}
    lines = []
    for folder, caption in texts.items():
        for photo in sorted((coco_folder / folder).iterdir()):
            row = {"image": str(photo), "captions": [caption], "split": folder[:-4]}
            lines.append(json.dumps(row))
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    flags = "--data", tmp_path / "photos.jsonl", "--output", tmp_path, "--workers", 0
    small = "--epochs 1 --crops 1 --dim 16 --word-dim 16 --image-size 32".split()
    command = "downstream.retrieval", *flags, *small, "--weights", "random", "--arch", "resnet18"
    assert "words, which lack 36 of the test captions' 36" in run_here(command)


def test_folds():
    """The mean over parts that are searched one by one; what does not fill a part is left out."""
    owners = np.arange(11).repeat([2, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1])
    similarity = torch.rand(11, 17, generator=torch.Generator().manual_seed(0))
    first = retrieval.fold_scores(similarity[:5, :9], owners[:9])
    second = retrieval.fold_scores(similarity[5:10, 9:16], owners[9:16] - 5)
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    assert retrieval.fold_scores(similarity, owners, 2) == pytest.approx(expected, abs=1e-4)
