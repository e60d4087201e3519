"""downstream/search.py: photos found by a text, by vectors made one by one"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CPU, NEEDS_PICTURES, photos_at, refusal, result, run_here
from conftest import one_split
from PIL import Image
from sklearn.metrics import average_precision_score
from test_mmcontrastive import assert_same_scores, literal_scores

import common
import eval_linear
import mmcontrastive
from downstream import pictures, search


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """The folder of a short run on 24 scenes"""
    folder = tmp_path_factory.mktemp("trained")
    run_here(tiny("mmcontrastive", folder, "--iters", 5))
    return folder


@torch.no_grad()
def vectors_of(folder, data, captions):
    """Photos and captions in their common space, one at a time"""
    encoders, tokenizer, flags = search.load_encoders(folder / "checkpoint.pth")
    photos, texts = [], []
    for n in range(len(data)):
        [pixels] = common.read_crops(data, n, [common.centre_crop], flags.image_size)
        image = common.augment(torch.tensor(pixels[None]))
        photos.append(encoders["image"](image)["image_inter"])
    for caption in captions:
        tokens = torch.tensor([tokenizer(caption)["input_ids"]])
        texts.append(encoders["caption"]((tokens, torch.ones_like(tokens)))["caption_inter"])
    return torch.cat(photos), torch.cat(texts)


def test_retrieval_of_the_validation_split(trained, coco_folder):
    """Tab. 7, from vectors of the checkpoint's encoders made one by one; its baseline is chance."""
    encoders, tokenizer, flags = search.load_encoders(trained / "checkpoint.pth")
    val = one_split("coco", str(coco_folder), "val2017")
    paths = [*val.images]
    paths[5] = "no photo"
    broken = dataclasses.replace(val, images=photos_at(*paths))
    rest, found = val.select([n for n in range(12) if n != 5]), result(trained)["retrieval"]
    without = mmcontrastive.validate(encoders, broken, tokenizer, flags, CPU)["retrieval"]
    for data, scores in ((val, found), (rest, without)):
        assert (scores["images"], scores["captions"]) == (len(data), 5 * len(data))
        photos, captions = vectors_of(trained, data, data.all_captions())
        owners = np.repeat(range(len(data)), 5)
        wanted = literal_scores((photos @ captions.T).tolist(), owners)
        assert_same_scores(scores["trained"], wanted)
    chance = found["random"]["text to image"]["R@5"]
    assert chance == pytest.approx(100 * 5 / 12, abs=20) and found["trained"] != found["random"]


@NEEDS_PICTURES
def test_search(trained, coco_folder, tmp_path):
    """The nearest photos of a folder to each text; others' files and broken photos do not count."""
    texts, folder = ["a red circle", "two blue squares left of a star"], tmp_path / "photos"
    shutil.copytree(coco_folder / "val2017", folder / "deep" / "er")
    paths = sorted(map(str, folder.rglob("*.jpg")))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (folder / "notes.txt").write_text("no photo")
    flags = "--weights", trained / "checkpoint.pth", "--output", tmp_path, "--amp", "off"
    command = ["downstream.search", *texts, "--root", folder, *flags, "--workers", 0]
    lines = run_here(command).splitlines()
    photos, captions = vectors_of(trained, pictures.photo_files(paths), texts)
    order = (captions @ photos.T).argsort(1, descending=True)[:, :10].tolist()
    broken = folder / "broken.jpg"
    broken = f"{broken} (it is not an image that PIL can read)"
    wanted = [f"{trained / 'checkpoint.pth'}: trained on coco"]
    left_out = "1 files are left out, because their names are not those of photos, for example "
    wanted.append(f"{left_out}{folder / 'notes.txt'}")
    wanted.append(f"cannot decode {broken}: the next photo is used")
    for text, row in zip(texts, order):
        wanted.append(f"{text}: {', '.join(paths[n] for n in row[:3])}, ...")
    path = tmp_path / "search.png"
    assert lines == [*wanted, f"the ten nearest of 12 photos to each text are in {path}"]
    assert Image.open(path).size == (8 + 10 * 136, 8 + 2 * 176)


@NEEDS_PICTURES
def test_classification_by_names(trained, coco_folder, tmp_path):
    """The cosine of each photo with the caption of each class ranks the photos."""
    weights, photos = trained / "checkpoint.pth", ("--data", "coco", "--root", coco_folder)
    flags = "--prompt", "one {}", "--amp", "off", "--output", tmp_path
    run_here(["downstream.classify", "--weights", weights, *photos, *flags])
    data = eval_linear.label_data("coco", str(coco_folder), "val2017")
    photos, texts = vectors_of(trained, data, [f"one {name}" for name in data.names])
    scored = [k for k, column in enumerate(data.labels.T) if 0 < column.mean() < 1]
    precisions = [average_precision_score(data.labels[:, k], photos @ texts[k]) for k in scored]
    scores = result(tmp_path)
    assert scores["zero-shot"] == pytest.approx(100 * np.mean(precisions), abs=1e-3)
    assert scores["guessing"] == pytest.approx(100 * data.labels[:, scored].mean())
    assert (tmp_path / "classify.png").stat().st_size > 10_000


def test_default_weights(tmp_path, monkeypatch):
    """If only photos were trained on, the message names their run."""
    monkeypatch.chdir(tmp_path)
    weights = Path("runs/mmcontrastive-photos/checkpoint.pth")
    weights.parent.mkdir(parents=True)
    weights.touch()
    assert f"give --weights one of {weights}" in refusal(["downstream.search", "a dog"])


def test_a_folder_without_photos(trained, tmp_path):
    flags = "--weights", trained / "checkpoint.pth", "--root", tmp_path, "--output", tmp_path
    assert "there is no photo in the folder" in refusal(["downstream.search", "a dog", *flags])


def test_words_that_the_model_does_not_know(trained, coco_folder, tmp_path, capsys):
    """They are named, said from 5% on, and refused from half on; underscores are spaces."""
    weights = "--weights", trained / "checkpoint.pth", "--output", tmp_path, "--workers", 0
    search_for = ["downstream.search", *weights, "--root", coco_folder / "val2017"]
    known = run_here([*search_for, "a red circle"])
    assert "unknown" not in known and "does not know" not in known
    some = run_here([*search_for, "a small red circle left of a blue square", "a red жук"])
    assert "the model does not know every word of a red жук (1 of 2)" in some
    assert "% of the captions' tokens are unknown to the model, which cannot" in some
    wrong = refusal([*search_for, "жук на траве"])
    assert "100% of the captions' tokens are unknown to the model" in wrong

    for n, name in enumerate(("red_circle", "blue_square", "жук")):
        (tmp_path / "labelled" / "val" / name).mkdir(parents=True)
        photo = sorted((coco_folder / "val2017").iterdir())[n]
        shutil.copy(photo, tmp_path / "labelled" / "val" / name)
    classify = "downstream.classify", *weights, "--data", "folder", "--root", tmp_path / "labelled"
    lines = run_here(classify).splitlines()
    assert "the model does not know every word of a photo of a жук (1 of 3)" in lines
    shutil.rmtree(tmp_path / "labelled" / "val" / "red_circle")
    for name in ("n01", "тр"):
        shutil.copytree(tmp_path / "labelled/val/blue_square", tmp_path / "labelled/val" / name)
    shutil.rmtree(tmp_path / "labelled" / "val" / "blue_square")
    wrong = refusal([*classify, "--prompt", "{}"])
    assert "tokens are unknown to the model: it has learned" in wrong


def test_texts_that_are_not_read_as_they_are(trained, tmp_path):
    texts = ["a blue ring", "A blue  ring", 40 * "red circle "]
    flags = "--weights", trained / "checkpoint.pth", "--output", tmp_path
    lines = run_here(["downstream.search", *texts, *flags]).splitlines()
    assert "the model cannot tell apart a blue ring, A blue  ring (2 of 3)" in lines
    assert f"the model reads only 62 tokens of {texts[2]} (1 of 3)" in lines


def test_names_of_classes(trained, coco_folder, tmp_path):
    """Underscores and capitals within a word are spaces; a prompt has to be known, too."""
    for photo, name in zip(sorted((coco_folder / "val2017").iterdir()), ("BlueStar", "blue_Star")):
        (tmp_path / "val" / name).mkdir(parents=True)
        shutil.copy(photo, tmp_path / "val" / name)
    flags = "--weights", trained / "checkpoint.pth", "--output", tmp_path, "--workers", 0
    classify = "downstream.classify", "--data", "folder", "--root", tmp_path, *flags
    lines = run_here(classify).splitlines()
    assert "2 classes, the first: a photo of a Blue Star, a photo of a blue Star" in lines
    same = "the model cannot tell apart a photo of a Blue Star, a photo of a blue Star (2 of 2)"
    assert same in lines
    wrong = refusal([*classify, "--prompt", "это жук и {}"])
    assert "% of the captions' tokens are unknown to the model: it has learned" in wrong


def test_no_photo_can_be_decoded(trained, tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(b"<html>")
    for workers in 0, 2:
        flags = "--weights", trained / "checkpoint.pth", "--workers", workers
        command = ["downstream.search", "a star", "--root", tmp_path, *flags]
        wrong = refusal([*command, "--output", tmp_path / "out"])
        assert "a thousand samples in a row cannot be decoded: see above" in wrong


def test_a_checkpoint_without_its_folder(trained, tmp_path):
    shutil.copy(trained / "checkpoint.pth", tmp_path)
    flags = "--weights", tmp_path / "checkpoint.pth", "--output", tmp_path
    wrong = refusal(["downstream.search", "a star", *flags])
    assert f"there is no folder {tmp_path}/caption_model, which training writes: copy it" in wrong


@NEEDS_PICTURES
def test_letters_of_other_languages(monkeypatch, tmp_path):
    """They come from a font that has them, inside the width; it is said once if none has them."""
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", list)  # matplotlib's own is left
    monkeypatch.setattr(pictures, "letters_of_fonts", pictures.letters_of_fonts.__wrapped__)
    monkeypatch.setattr(common, "report_once", (said := set()).add)

    def drawn(text):
        pixels = np.full((100, 100, 3), 255, np.uint8)
        pictures.draw_rows(tmp_path / "x.png", [("", [(pixels, text)])], side=100)
        with Image.open(tmp_path / "x.png") as image:
            ink = np.asarray(image.convert("L")) < 128
        return np.flatnonzero(ink.any(0)), ink.tobytes()

    boxes = {drawn(text)[1] for text in ("猫猫猫", "犬犬犬")}
    others = {drawn(text)[1] for text in ("кот", "вот", "قطة")}
    assert len(boxes) == 1 and len(others) == 3 and not boxes & others
    for text in ("кот", "a cat ", "猫"):
        columns, _ = drawn(9 * text)
        assert 8 <= columns.min() and columns.max() <= 108 and np.ptp(columns) > 50
    assert said == {pictures.NO_FONT}
    assert drawn("$x$ $y$")[1] != drawn("x y")[1], "dollars are no formula"
