"""downstream/retrieval.py: VSE++ loss, captions' vectors, folds, and the whole script.

Its ranks and their shares are those of mmcontrastive.py: test_mmcontrastive.py.
"""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from conftest import (
    ALONE,
    CPU,
    FeaturesAsGiven,
    captioned,
    in_two_processes,
    interrupted,
    refusal,
    result,
    run_here,
)
from PIL import Image

import common
import pictures
from downstream import retrieval

# The flags of a run of a second or two.
TINY = [
    *("--weights", "random", "--arch", "resnet18", "--image-size", 32, "--workers", 0),
    *("--epochs", 2, "--dim", 16, "--word-dim", 8),
]


def command(*flags):
    return ["downstream.retrieval", *TINY, *flags]


# ------------------------------------------------------------------------------------- the model


def literal_loss(images, captions, owners, negatives):
    """VSE++ in loops; pairs of the same image are no negatives."""
    total = 0.0
    for i, image in enumerate(images):
        right = float(image @ captions[i])
        others = [j for j in range(len(images)) if owners[j] != owners[i]]
        for wrong in (
            [float(image @ captions[j]) for j in others],
            [float(images[j] @ captions[i]) for j in others],
        ):
            hinges = [max(0.0, 0.2 - right + similarity) for similarity in wrong]
            if negatives == "hardest":
                total += max(hinges, default=0.0)
            else:
                total += sum(hinges) / len(images)
    return total


@pytest.mark.parametrize("negatives", ("hardest", "mean"))
@pytest.mark.parametrize("owners", ([0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 0, 1], [7] * 6))
def test_vse_loss(owners, negatives):
    owners = torch.tensor(owners)
    images, captions = torch.randn(2, 6, 4, dtype=torch.float64)
    captions = captions + images  # some pairs beyond the margin, others not
    images, captions = [torch.nn.functional.normalize(x) for x in (images, captions)]
    images.requires_grad_()
    found = retrieval.vse_loss(images, captions, owners, negatives)
    wanted = literal_loss(images.detach(), captions, owners, negatives)
    assert found.item() == pytest.approx(wanted, abs=1e-12)
    assert (found > 0) == (len(set(owners.tolist())) > 1)
    found.backward()
    assert images.grad.isfinite().all()


def test_a_pair_beyond_the_margin_costs_nothing():
    eye, owners = torch.eye(5), torch.arange(5)
    assert retrieval.vse_loss(eye, eye, owners) == 0
    swapped = eye[[1, 0, 2, 3, 4]]
    assert retrieval.vse_loss(eye, swapped, owners).item() == pytest.approx(4 * (0.2 + 1))


def common_space(vocabulary=None):
    torch.manual_seed(0)
    words = {"a": 3, "red": 4, "circle": 5, "floats": 6}
    return retrieval.CommonSpace(6, vocabulary or words, word_dim=5, dim=7)


def test_longer_captions_do_not_change_a_captions_vector():
    """Each is what the GRU gives when it reads the caption alone, word by word."""
    model = common_space()
    captions = ["a circle", "a red, red circle floats", "", "A very red circle"]
    found = model.encode_captions(captions)
    for caption, vector in zip(captions, found):
        state = torch.zeros(1, 7)
        for number in model.ids_of(caption):
            _, state = model.gru(model.words(torch.tensor([number])), state)
        torch.testing.assert_close(vector, state[0] / state.norm())
    torch.testing.assert_close(found[[0]], model.encode_captions(captions[:1]))
    assert (found[1] - found[3]).norm() > 1e-3


def test_images_get_unit_vectors_whatever_the_length_of_their_features():
    model, features = common_space(), torch.randn(4, 6)
    torch.nn.init.normal_(model.image.bias)
    found = model.encode_images(features)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(found, model.encode_images(5 * features))
    assert model.image.weight.abs().max() <= math.sqrt(6 / (6 + 7))
    assert model.words.weight.abs().max() <= 0.1


def test_words():
    """Words seen four times are kept; others are unknown."""
    captions = ["A T-shirt, a dog's 2 balls."] * 3 + ["a DOG'S ball"]
    words = retrieval.WORD.findall(captions[0])
    assert words == ["A", "T-shirt", "a", "dog's", "2", "balls"]
    vocabulary = retrieval.count_words(captions)
    assert vocabulary == {"a": 3, "dog's": 4}
    assert common_space(vocabulary).ids_of("A dog's life") == [0, 3, 4, 2, 1]


# ---------------------------------------------------------------------------------------- scores


def test_median_rank():
    """floor(median of ranks from 0) + 1"""
    for ranks, wanted in (
        ([0, 0, 1, 1], 1),
        ([0, 1, 2, 3], 2),
        ([3, 2, 0, 3], 3),
        ([1, 1, 1, 0], 2),
    ):
        similarity = torch.eye(4)
        for m, rank in enumerate(ranks):
            others = [n for n in range(4) if n != m]
            similarity[others[:rank], m] = 2.0
        found = retrieval.fold_scores(similarity, torch.arange(4), 1)
        assert found["text to image Med r"] == wanted
        assert found["text to image R@1"] == 25 * ranks.count(0)


def test_folds():
    """The mean over parts that are searched one by one; what does not fill a part is left out."""
    owners = torch.arange(11).repeat_interleave(torch.tensor([2, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1]))
    similarity = torch.rand(11, 17)
    parts = []
    for first in (0, 5):
        columns = [m for m, owner in enumerate(owners) if first <= owner < first + 5]
        part = similarity[first : first + 5, columns]
        parts.append(retrieval.fold_scores(part, owners[columns] - first, 1))
    found = retrieval.fold_scores(similarity, owners, 2)
    wanted = {score: (parts[0][score] + parts[1][score]) / 2 for score in parts[0]}
    assert found == pytest.approx(wanted, abs=1e-4)
    assert found != pytest.approx(retrieval.fold_scores(similarity, owners, 1), abs=1e-4)


# ---------------------------------------------------------------------------------------- images


def test_captions_stay_with_their_photos(tmp_path):
    """Photos without captions and those that cannot be decoded are left out."""
    rows = []
    for n in range(6):
        Image.new("RGB", (16, 16), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
        rows.append({"image": f"{n}.png", "captions": [f"photo {n}", f"number {n}"], "split": "x"})
    rows[2]["captions"] = []
    (tmp_path / "4.png").write_bytes(b"no photo")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(tmp_path / "a.jsonl")
    args = retrieval.get_args([*map(str, TINY), "--data", path, "--output", str(tmp_path)])
    data = retrieval.captioned_images(args, "x", 100)
    assert len(data) == 5
    backbone = FeaturesAsGiven(3)
    data, features = retrieval.describe(backbone, data, "x_train", args, ALONE)
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
    told = [[*np.eye(6)["abcdef".index(a)], *np.eye(6)["uvwxyz".index(b)]] for a, b in pairs]
    told = np.array(told, np.float32)
    unseen = np.arange(0, 36, 7)  # each shape and each colour once
    seen = np.setdiff1d(np.arange(36), unseen)
    train, test = captioned(*[texts[n] for n in seen]), captioned(*[texts[n] for n in unseen])
    flags = [*map(str, TINY), "--output", str(tmp_path), "--lr", "0.01", "--epochs", "40"]
    flags += ["--negatives", "hardest"]
    args, owners = retrieval.get_args(flags), torch.from_numpy(test.image_of_caption())
    vocabulary = retrieval.count_words(train.captions)
    model = retrieval.train_encoders(train, told[seen], vocabulary, args, CPU, 0, "told")
    for features, low, high in ((told[unseen], 80, 100), (0 * told[unseen], 0, 0)):
        found = retrieval.fold_scores(retrieval.compare(model, test, features), owners, 1)
        assert low <= found["text to image R@1"] <= high


def test_the_right_photo_gets_a_frame(coco_folder, tmp_path):
    data = common.caption_data("coco", str(coco_folder), "val2017")
    nearest, scores = [[3, 0, 1], [2, 5, 4]], [[0.9, 0.8, 0.7]] * 2
    path = tmp_path / "a.png"
    pictures.draw_rows(["one", "two"], data.images, nearest, scores, path, framed=[1, 0])
    pixels = np.asarray(Image.open(path)).astype(int)
    green = np.argwhere((pixels == (0, 128, 0)).all(2))
    (top, left), (bottom, right) = green.min(0), green.max(0)
    assert 270 < left < 280 < 408 <= right < 420 and top < 30 and 150 < bottom < 170  # row one


# ------------------------------------------------------------------------------------ the script


@pytest.fixture(scope="module")
def run(coco_folder, tmp_path_factory):
    """A run of two seeds by two processes -> its folder and what it printed"""
    folder = tmp_path_factory.mktemp("retrieval")
    data = "--data", "coco", "--root", coco_folder, "--output", folder
    weights = common.build_backbone("resnet18").state_dict()
    torch.save(weights, folder / "backbone.pth")
    flags = *TINY[4:], "--weights", folder / "backbone.pth", "--runs", 2, *data
    printed, _ = in_two_processes(run_here, ["downstream.retrieval", *flags])
    return folder, printed, flags


def test_script(run):
    folder, output, _ = run
    content = result(folder)
    for name in ("trained", "random", "chance"):
        assert len(content["runs"][name]) == 2 and len(content[name]) == 8
        for score, mean in content[name].items():
            values = [found[score] for found in content["runs"][name]]
            assert mean == pytest.approx(statistics.mean(values))
            assert content["std"][name][score] == pytest.approx(statistics.stdev(values))
    assert content["runs"]["trained"] != content["runs"]["random"]
    last = "text to image R@10"
    trained, chance = f"{content['trained'][last]:.1f} trained", f"{content['chance'][last]:.1f} by"
    line = output.splitlines()[-1]
    assert line.startswith(f"retrieval on coco, {last}: {trained}, ") and chance in line
    assert "24 training images, 12 test images, " in output
    assert Image.open(folder / "retrieval.png").size == (8 * 136 + 8, 5 * 176 + 8)


def test_one_process_finds_the_same_and_what_is_done_is_kept(run, tmp_path):
    """The same command in the same folder trains nothing again; a fresh folder gives the same."""
    folder, _, flags = run
    before = result(folder)["runs"]
    output = run_here(["downstream.retrieval", *flags])
    assert output.count("going on after epoch 4") == 4
    assert result(folder)["runs"] == before
    run_here(["downstream.retrieval", *flags, "--output", tmp_path])
    for name, runs in result(tmp_path)["runs"].items():
        for found, wanted in zip(runs, before[name]):
            assert found == pytest.approx(wanted, abs=9)  # features differ in their last bits


def test_a_stopped_run_goes_on_with_equal_bits(coco_folder, tmp_path):
    data = "--data", "coco", "--root", coco_folder
    run_here(command(*data, "--output", tmp_path / "whole"))
    with interrupted(retrieval, "vse_loss", call=3):  # an epoch has one batch
        run_here(command(*data, "--output", tmp_path / "stopped"))
    output = run_here(command(*data, "--output", tmp_path / "stopped"))
    assert "going on after epoch 2" in output
    [whole], [stopped] = [list((tmp_path / x).glob("random_0_*.pth")) for x in ("whole", "stopped")]
    whole, stopped = [torch.load(path, weights_only=True) for path in (whole, stopped)]
    assert whole["epoch"] == stopped["epoch"] == 4
    for name, value in whole["model"].items():
        assert torch.equal(value, stopped["model"][name])
    assert result(tmp_path / "whole")["runs"] == result(tmp_path / "stopped")["runs"]


def test_refusals(coco_folder, tmp_path):
    data = "--data", "coco", "--root", coco_folder, "--output", tmp_path
    for flags, words in (
        (("--folds", 13), "--folds 13: there are 12 test images only"),
        (("--weights", "none.pth"), "none.pth not found"),
        (("--root", "none"), "captions_train2017.json not found"),
        (("--data", "none"), "--data none is unknown"),
    ):
        assert words in refusal(command(*data, *flags))
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    path = tmp_path / "a.jsonl"
    for row, words in (
        ({"tags": ["red"]}, "no image of the split train has a caption"),
        ({"captions": ["red, red, red"]}, "no word occurs 4 times in the training captions"),
    ):
        lines = [{"image": "a.png", "split": split, **row} for split in ("train", "val")]
        path.write_text("\n".join(map(json.dumps, lines)))
        assert words in refusal(command("--data", path, "--output", tmp_path))


def test_a_damaged_state_is_refused(coco_folder, tmp_path):
    flags = "--data", "coco", "--root", coco_folder, "--output", tmp_path, "--epochs", 1
    run_here(command(*flags))
    [path] = tmp_path.glob("random_0_*.pth")
    path.write_bytes(path.read_bytes()[:1000])
    assert "what this command wrote: delete it" in refusal(command(*flags))


def test_flickr8k(real_data, tmp_path):
    flags = "--data", "coco", "--root", real_data / "flickr8k", "--output", tmp_path
    splits = "--train-split", "train", "--val-split", "val"
    numbers = "--train-images", 60, "--test-images", 40, "--folds", 2
    output = run_here(command(*flags, *splits, *numbers))
    assert "60 training images, 40 test images" in output
    assert 0 < result(tmp_path)["random"]["image to text R@10"] < 100
