"""downstream/retrieval.py: VSE++ loss, captions' vectors, folds, and the whole script.

Its ranks and their shares are those of mmcontrastive.py: test_mmcontrastive.py.
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU, FeaturesAsGiven, captioned, in_two_processes
from conftest import refusal, result, run_here
from PIL import Image

import common
from downstream import retrieval

# The flags of a run of a second or two.
TINY = [
    *("--weights", "random", "--arch", "resnet18", "--image-size", 32, "--workers", 0),
    *("--epochs", 2, "--dim", 16, "--word-dim", 8),
]


def command(*flags):
    return ["downstream.retrieval", *TINY, *flags]


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
    owners = torch.arange(11).repeat_interleave(torch.tensor([2, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1]))
    similarity = torch.rand(11, 17)
    parts = []
    for first in (0, 5):
        columns = [m for m, owner in enumerate(owners) if first <= owner < first + 5]
        part = similarity[first : first + 5, columns]
        parts.append(retrieval.fold_scores(part, owners[columns] - first, 1))
    scores = retrieval.fold_scores(similarity, owners, 2)
    expected = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    assert scores == pytest.approx(expected, abs=1e-4)
    assert scores != pytest.approx(retrieval.fold_scores(similarity, owners, 1), abs=1e-4)


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
    flags = *TINY, "--data", path, "--output", tmp_path
    args = retrieval.get_args(list(map(str, flags)))
    data = retrieval.captioned_images(args, "x", 100)
    assert len(data) == 5
    data, features = retrieval.image_features(FeaturesAsGiven(3), data, args, ALONE)
    assert len(data) == len(features) == 4 and len(data.captions) == 8
    reds = (features[:, 0] * common.IMAGENET_STD[0] + common.IMAGENET_MEAN[0]) * 255 / 40
    for n, red in enumerate(reds.round().astype(int)):
        assert data.captions_of(n) == [f"photo {red}", f"number {red}"]
    assert data.image_of_caption().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(retrieval.captioned_images(args, "x", 3)) == 3


def test_what_the_features_tell_is_found(tmp_path):
    """Features that name shape and colour find pairs of them that training has not seen."""
    pairs = [(shape, colour) for shape in "abcdef" for colour in "uvwxyz"]
    texts = [[f"one {colour} {shape}", f"the {shape} is {colour}"] for shape, colour in pairs]
    one_hot = np.eye(6, dtype=np.float32)
    x = np.stack([[*one_hot[n // 6], *one_hot[n % 6]] for n in range(36)])
    unseen = np.arange(0, 36, 7)  # each shape and each colour once
    seen = np.setdiff1d(np.arange(36), unseen)
    train, test = captioned(*[texts[n] for n in seen]), captioned(*[texts[n] for n in unseen])
    flags = [*map(str, TINY), "--output", str(tmp_path), "--lr", "0.01", "--epochs", "40"]
    args = retrieval.get_args([*flags, "--negatives", "hardest"])
    vocabulary = retrieval.count_words(train.captions)
    model = retrieval.train_encoders(train, x[seen], vocabulary, args, CPU, 0)
    owners = torch.from_numpy(test.image_of_caption())
    for features, low, high in ((x[unseen], 80, 100), (0 * x[unseen], 0, 0)):
        scores = retrieval.fold_scores(retrieval.compare(model, test, features), owners, 1)
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
    assert "24 training images, 12 test images, " in printed
    assert Image.open(folder / "retrieval.png").size == (8 * 136 + 8, 5 * 176 + 8)


def test_refusals(coco_folder, tmp_path):
    data = "--data", "coco", "--root", coco_folder, "--output", tmp_path
    for flags, words in (
        (("--folds", 13), "--folds 13: there are 12 test images"),
        (("--weights", "none.pth"), "none.pth"),
        (("--root", "none"), "none/annotations/captions_train2017.json"),
        (("--data", "none"), "--data none is unknown"),
    ):
        assert words in refusal(command(*data, *flags))
