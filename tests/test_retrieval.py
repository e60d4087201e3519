"""downstream/retrieval.py: VSE++ loss, captions' vectors, crops, epochs, folds, the whole script.

Its ranks and their shares are those of mmcontrastive.py: test_mmcontrastive.py.
"""

import copy
import json
import math

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU, FeaturesAsGiven, captioned, in_two_processes
from conftest import photos_at, refusal, result, run_here
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
    for i, image in enumerate(images):
        positive = float(image @ captions[i])
        others = [j for j in range(len(images)) if image_idx[j] != image_idx[i]]
        i2t = [max(0.0, 0.2 - positive + float(image @ captions[j])) for j in others]
        t2i = [max(0.0, 0.2 - positive + float(images[j] @ captions[i])) for j in others]
        for hinges in (i2t, t2i):
            hardest = negatives == "hardest"
            total += max(hinges, default=0.0) if hardest else sum(hinges) / len(images)
    return total


@pytest.mark.parametrize("negatives", ("hardest", "mean"))
@pytest.mark.parametrize("image_idx", ([0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 0, 1], [7] * 6))
def test_vse_loss(image_idx, negatives):
    image_idx = torch.tensor(image_idx)
    images, captions = torch.randn(2, 6, 4, dtype=torch.float64)
    captions = captions + images  # some pairs beyond the margin, others not
    images, captions = [torch.nn.functional.normalize(x) for x in (images, captions)]
    images.requires_grad_()
    loss = retrieval.vse_loss(images, captions, image_idx, negatives)
    expected = literal_loss(images.detach(), captions, image_idx, negatives)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert (loss > 0) == (len(set(image_idx.tolist())) > 1)
    loss.backward()
    assert images.grad.isfinite().all()


def test_unit_vectors():
    """A caption's is what the GRU gives when it reads it alone, word by word, without padding;

    an image's does not depend on the length of its features.
    """
    torch.manual_seed(0)
    words = {"a": 3, "red": 4, "circle": 5, "floats": 6}
    model = retrieval.CommonSpace(6, words, word_dim=5, dim=7)
    captions = ["a circle", "a red, red circle floats", "", "A very red circle"]
    vectors = model.encode_captions(captions)
    for caption, vector in zip(captions, vectors):
        state = torch.zeros(1, 7)
        for i in model.ids_of(caption):
            _, state = model.gru(model.words(torch.tensor([i])), state)
        torch.testing.assert_close(vector, state[0] / state.norm())
    assert (vectors[1] - vectors[3]).norm() > 1e-3
    features = torch.randn(4, 6)
    torch.nn.init.normal_(model.image.bias)
    vectors = model.encode_images(features)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(vectors, model.encode_images(5 * features))
    assert model.image.weight.abs().max() <= math.sqrt(6 / (6 + 7))
    assert model.words.weight.abs().max() <= 0.1


def test_words():
    """Words seen four times are kept; others are unknown."""
    captions = ["A T-shirt, a dog's 2 balls."] * 3 + ["a DOG'S ball"]
    words = retrieval.WORD.findall(captions[0])
    assert words == ["A", "T-shirt", "a", "dog's", "2", "balls"]
    with pytest.raises(SystemExit, match="no word occurs 4 times in the training captions"):
        retrieval.count_words(captions[:1])
    vocabulary = retrieval.count_words(captions)
    assert vocabulary == {"a": 3, "dog's": 4}
    assert retrieval.CommonSpace(6, vocabulary, 5, 7).ids_of("A dog's life") == [0, 3, 4, 2, 1]


def test_folds():
    """The mean over parts that are searched one by one; what does not fill a part is left out."""
    owners = np.arange(11).repeat([2, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1])
    similarity = torch.rand(11, 17)
    parts = []
    for first in (0, 5):
        columns = [m for m, owner in enumerate(owners) if first <= owner < first + 5]
        part = similarity[first : first + 5, columns]
        parts.append(retrieval.fold_scores(part, owners[columns] - first))
    scores = retrieval.fold_scores(similarity, owners, 2)
    expected = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    assert scores == pytest.approx(expected, abs=1e-4)
    assert scores != pytest.approx(retrieval.fold_scores(similarity, owners), abs=1e-4)


def test_captions_stay_with_their_photos(tmp_path):
    """Photos without captions and those that cannot be decoded are left out."""
    rows = []
    for n in range(6):
        Image.new("RGB", (16, 16), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
        rows.append({"image": f"{n}.png", "captions": [f"photo {n}", f"number {n}"], "split": "x"})
    rows[2]["captions"] = []
    (tmp_path / "4.png").write_bytes(b"no photo")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = tiny_args(tmp_path, "--data", path)
    captions = retrieval.captioned_images(args, "x", 100)
    assert len(captions) == 5
    backbone = FeaturesAsGiven(3)
    data, features = retrieval.image_features(backbone, captions, args, ALONE)
    cropped, of_crops = retrieval.crop_features(backbone, captions, args, ALONE)
    assert of_crops.shape == (args.crops, 4, 3) and list(cropped.images) == list(data.images)
    assert len(data) == len(features) == 4 and list(cropped.captions) == list(data.captions)
    for x in (features, *of_crops):
        reds = (x[:, 0] * common.IMAGENET_STD[0] + common.IMAGENET_MEAN[0]) * 255 / 40
        for n, red in enumerate(reds.round().astype(int)):
            assert data.captions_of(n) == [f"photo {red}", f"number {red}"]
    assert data.image_of_caption().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(retrieval.captioned_images(args, "x", 3)) == 3


def test_random_crops(tmp_path):
    """Each is another part of its photo, every second one flipped, always the same."""
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    images = photos_at(tmp_path / "ramp.png", "none.png")
    crops = retrieval.RandomCrops(images, tiny_args(tmp_path))
    opened = [np.asarray(crops.open(n)) for n in range(0, 60, 2)]
    assert len({crop.tobytes() for crop in opened}) > 20
    assert [bool(crop[0, 0, 0] > crop[0, -1, 0]) for crop in opened] == 15 * [False, True]
    assert (opened[1] == np.asarray(crops.open(2))).all() and crops[2] == images[0]


def test_epochs(tmp_path, monkeypatch):
    """Each draws crops anew, flipped ones with flipped words; the first of the best is kept."""
    drawn, states = [], []
    encode = retrieval.CommonSpace.encode_captions

    def encode_captions(model, captions):
        drawn.append(captions)
        return encode(model, captions)

    def encode_images(model, features):
        drawn.append(features.tolist())
        return torch.nn.functional.normalize(model.image(features))

    def compare(model, data, features):
        states.append(copy.deepcopy(model.state_dict()))
        return torch.eye(8) if len(states) in (2, 3) else -torch.eye(8)

    monkeypatch.setattr(retrieval.CommonSpace, "encode_captions", encode_captions)
    monkeypatch.setattr(retrieval.CommonSpace, "encode_images", encode_images)
    monkeypatch.setattr(retrieval, "compare", compare)
    data = captioned(*[[f"left {n}"] for n in range(8)])
    features = np.stack(np.mgrid[:3, :8], 2).astype(np.float32)  # [crop, photo] of 3 crops each
    args = tiny_args(tmp_path)
    model = retrieval.train_encoders(data, features, data, features[0], {"left": 3}, args, CPU, 0)
    crops = []  # of the photos, in each of the four epochs, which have one batch
    for pairs, captions in zip(drawn[::2], drawn[1::2]):
        for (crop, photo), caption in zip(pairs, captions):
            assert caption == f"{'right' if crop == 1 else 'left'} {photo:.0f}"
        crops.append([crop for crop, _ in sorted(pairs, key=lambda pair: pair[1])])
    assert len(set(map(tuple, crops))) == len(states) == 4 and {*sum(crops, [])} == {0, 1, 2}
    kept = [all(map(torch.equal, model.state_dict().values(), s.values())) for s in states]
    assert kept == [False, True, False, False]


def test_what_the_features_tell_is_found(tmp_path):
    """Features that name shape and colour find pairs of them that training has not seen."""
    pairs = [(shape, colour) for shape in "abcdef" for colour in "uvwxyz"]
    texts = [[f"one {colour} {shape}", f"the {shape} is {colour}"] for shape, colour in pairs]
    one_hot = np.eye(6, dtype=np.float32)
    x = np.stack([[*one_hot[n // 6], *one_hot[n % 6]] for n in range(36)])
    unseen = np.arange(0, 36, 7)  # each shape and each colour once
    seen = np.setdiff1d(np.arange(36), unseen)
    train, test = captioned(*[texts[n] for n in seen]), captioned(*[texts[n] for n in unseen])
    args = tiny_args(tmp_path, "--lr", 0.01, "--epochs", 40, "--negatives", "hardest")
    vocabulary = retrieval.count_words(train.captions)
    model = retrieval.train_encoders(train, x[None, seen], train, x[seen], vocabulary, args, CPU, 0)
    for features, low, high in ((x[unseen], 80, 100), (0 * x[unseen], 0, 0)):
        similarity = retrieval.compare(model, test, features)
        scores = retrieval.fold_scores(similarity, test.image_of_caption())
        assert low <= scores["text to image R@1"] <= high


def test_script(coco_folder, tmp_path):
    """Two seeds: what two processes print and write."""
    weights, folder = tmp_path / "backbone.pth", tmp_path / "two"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = *TINY[4:], "--weights", weights, "--runs", 2, "--data", "coco", "--root", coco_folder
    start = "downstream.retrieval", *flags, "--output"
    printed, _ = in_two_processes(run_here, [*start, folder])
    content = result(folder)
    for name, runs in content["runs"].items():
        assert len(runs) == 2 and len(content[name]) == 8
        for score, mean in content[name].items():
            values = [scores[score] for scores in runs]
            assert mean == pytest.approx(np.mean(values))
            assert content["std"][name][score] == pytest.approx(np.std(values, ddof=1))
    last = "text to image R@10"
    trained, chance = f"{content['trained'][last]:.1f} trained", f"{content['chance'][last]:.1f} by"
    line = printed.splitlines()[-1]
    assert line.startswith(f"retrieval on coco, {last}: {trained}, ") and chance in line
    assert "21 training, 3 validation and 12 test images, " in printed
    assert Image.open(folder / "retrieval.png").size == (8 * 136 + 8, 5 * 176 + 8)


def test_refusals(coco_folder, tmp_path):
    data = "--data", "coco", "--root", coco_folder, "--output", tmp_path
    for flags, words in (
        (("--folds", 13), "--folds 13: there are 12 test images"),
        (("--weights", "none.pth"), "none.pth"),
        (("--root", "none"), "none/annotations/captions_train2017.json"),
        (("--data", "none"), "--data none is unknown"),
    ):
        assert words in refusal(["downstream.retrieval", *TINY, *data, *flags])
