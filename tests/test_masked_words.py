"""downstream/masked_words.py: words of a caption predicted by a model of icmlm.py, and drawn."""

import numpy as np
import pytest
import torch
from conftest import CPU, checkpoint_in, refusal, run_here
from PIL import Image

import common
import icmlm
import language
import shapes
from downstream import masked_words

both_heads = pytest.mark.parametrize("head", icmlm.HEADS)
ONLY = "these words of the caption can be masked:"


def run(*flags):
    """-> the lines that it prints"""
    return run_here(["downstream.masked_words", *flags]).splitlines()


@pytest.fixture(scope="module")
def trained(coco_folder, tiny_lm, tmp_path_factory):
    """{head: the folder of a run of two iterations on 24 scenes}"""
    folders = {}
    for head in icmlm.HEADS:
        folders[head] = tmp_path_factory.mktemp(head)
        flags = ["--data", "coco", "--root", coco_folder, "--lm", tiny_lm, "--head", head]
        flags += ["--arch", "resnet18", "--image-size", 64, "--batch-size", 8, "--workers", 0]
        flags += ["--layers", 2, "--heads", 3, "--iters", 2, "--output", folders[head]]
        run_here(["icmlm.py", *flags, "--amp", "off"])
    return folders


@pytest.fixture
def example(trained, coco_folder):
    """-> the first photo, a caption of it, the words of that one that can be masked"""
    concepts = checkpoint_in(trained["tfm"])["concepts"]
    for caption in shapes.describe(0, shapes.objects_of(0)):
        words = [word for word in dict.fromkeys(language.words_of(caption)) if word in concepts]
        if len(words) > 1:
            return coco_folder / "train2017" / f"{0:012d}.jpg", caption, words


# ------------------------------------------------------------------------- which word, and where


@pytest.fixture(scope="module")
def tokenizer():
    return language.train_wordpiece(2 * ["the red dog runs", "a cat is blue", "dogs shirt t"])


def positions_in(caption, tokenizer):
    concepts = dict.fromkeys(["dog", "red", "surfboard", "shirt"], "nouns")
    return masked_words.maskable_words(tokenizer, concepts, caption)[1]


def test_words_that_can_be_masked(tokenizer):
    """Where one stands first by itself, not as a part of another word; the others are refused"""
    captions = {"the red dog": 3, "dogs, dog": 3, "a dog, a dog": 2, "red-dog DOG.": 4}
    for caption, position in captions.items():
        positions = positions_in(caption, tokenizer)
        assert masked_words.given_words(positions, ["Dog"]) == {"dog": position}
    for caption, word, possible in [
        ("the red dog runs", "cat", "red, dog"),
        ("red dogs", "dog", "red"),
        ("a surfboard", "surfboard", "none"),
        ("the dog runs", "runs", "dog"),
        ("a red t-shirt", "shirt", "red"),
        ("red red dog", "the", "red, dog"),  # each is named once
    ]:
        with pytest.raises(SystemExit, match=f'"{word}": it must be one token.*{ONLY} {possible}$'):
            masked_words.given_words(positions_in(caption, tokenizer), [word])


# ------------------------------------------------------------------------- predictions and pictures


def five_best(tokenizer, logits):
    """'red 81.2%, blue 3.4%, ...'"""
    p = logits.double().softmax(0)
    best = p.argsort(descending=True)[:5].tolist()
    return ", ".join(f"{tokenizer.decode([token])} {100 * p[token]:.1f}%" for token in best)


@both_heads
@torch.no_grad()
def test_own_photo(head, trained, example, tiny_lm, tmp_path, monkeypatch):
    """Five guesses with the photo and by the language model alone, and where the head looks, for
    each word as for this word alone
    """
    (photo, caption, several), drawn = example, []
    word, draw = several[0], masked_words.draw_attention
    monkeypatch.setattr(masked_words, "draw_attention", lambda *a: drawn.append(a) or draw(*a))
    weights = trained[head] / "checkpoint.pth"
    flags = photo, "--caption", caption, "--weights", weights, "--output", tmp_path
    masked, with_photo, without, path = run(*flags, "--word", word)

    model, lm, tokenizer, _, _ = masked_words.load_icmlm(weights, None, CPU)
    kept = checkpoint_in(trained[head])["model"]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    inputs = tokenizer(caption.replace(word, "[MASK]", 1), return_tensors="pt")
    tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    mask_pos = (tokens == tokenizer.mask_token_id).nonzero()[0, 1:]
    images, whole = common.ImageFiles([str(photo)]), lambda *size: common.centre_crop(1.0, *size)
    [pixels] = common.read_crops(images, 0, [whole], 64)
    images = common.augment(torch.from_numpy(pixels)[None])
    token_features = lm.encode(tokens, mask)
    logits, _ = model(images, token_features, mask, mask_pos)
    features = model.backbone(images)
    maps = masked_words.attention_maps(model.head, features, token_features, mask, mask_pos)
    assert masked == f"{tokenizer.decode(tokens[0])}  ({word})"
    assert with_photo == f"with the photo: {five_best(tokenizer, logits[0])}"
    _, pretrained = language.language_model(str(tiny_lm), CPU)
    by_text = pretrained(**inputs).logits[0, int(mask_pos)]
    assert without == f"without it: {five_best(tokenizer, by_text)}"
    assert with_photo.split(": ")[1] != without.split(": ")[1]
    picture = tmp_path / f"1_{photo.stem}_{word}.png"
    assert path == f"the attention is in {picture}"
    [(_, text, [(named, attention)], _)] = drawn
    assert (text, named) == (caption, word) and attention.shape == (2, 2)
    torch.testing.assert_close(attention, maps[0])
    with Image.open(picture) as image:
        assert 350 < image.width < 600 and len(image.getcolors(1 << 20)) > 1000

    *lines, _ = run(*flags, "--word", *several)
    assert lines[:3] == [masked, with_photo, without] and len(lines) == 3 * len(several)
    maps = dict(drawn[1][2])
    assert list(maps) == several
    torch.testing.assert_close(maps[word], attention)


@both_heads
def test_photos_of_the_validation_split(head, trained, tmp_path):
    """Figs. 4, 5: each word of their captions that can be masked, and what it is"""
    weights = trained[head] / "checkpoint.pth"
    lines = run("--photos", 2, "--weights", weights, "--output", tmp_path)
    pictures = sorted(tmp_path.iterdir())
    masked = [line for line in lines if "[MASK]" in line]
    assert len(pictures) == 2 and len(masked) == sum("with the photo:" in line for line in lines)
    for picture in pictures:
        _, _, *words = picture.stem.split("_")
        assert words and all(any(line.endswith(f"({word})") for line in masked) for word in words)
    assert not any("box" in line for line in lines)


def test_refused(trained, example, tmp_path):
    """One line each, and no picture"""
    folder, (photo, caption, words) = trained["tfm"], example
    foreign, missing = tmp_path / "virtex.pth", tmp_path / "none.jpg"
    torch.save({"script": "virtex", "model": {}}, foreign)
    long = 30 * f"{words[0]} red square "

    def message(photo, caption, word, weights=folder / "checkpoint.pth"):
        flags = "--caption", caption, "--word", word, "--weights", weights
        return refusal(["downstream.masked_words", photo, *flags, "--output", tmp_path / "x"])

    assert f"{ONLY} {', '.join(words)}" in message(photo, caption, "surfboard")
    assert "tokens, --lm reads 64" in message(photo, long, words[0])
    assert "1 of 1 images are missing" in message(missing, caption, words[0])
    for weights in (folder / "backbone.pth", foreign):
        refused = message(photo, caption, words[0], weights)
        assert "is no checkpoint.pth or model_N.pth of icmlm.py" in refused
    for flags in ([photo], [], [photo, "--photos", 1], ["--caption", caption]):
        assert "or --photos N" in refusal(["downstream.masked_words", *flags])
    assert not list(tmp_path.glob("x/*"))


# ---------------------------------------------------------------------------- the built-in scenes


def test_built_in_scenes(few_scenes, tmp_path):
    """The small BERT lies beside the checkpoint; at last the attention inside the boxes."""
    few_scenes(20, 12)
    flags = ["--iters", 1, "--lm-iters", 2, "--image-size", 64, "--batch-size", 4, "--workers", 0]
    run_here(["icmlm.py", *flags, "--keep-every", 1, "--output", tmp_path / "run"])
    weights = tmp_path / "run" / "model_1.pth"
    *_, line = run("--photos", 9, "--weights", weights, "--output", tmp_path / "pictures")
    assert line.startswith("attention inside the masked object's box: ") and "its area: " in line


def pixel_count(attention, box, side=600):
    """How much of a map is inside a box, by the pixels of its enlargement"""
    height, width = (side // cells for cells in attention.shape)
    pixels = attention.repeat(height, 0).repeat(width, 1) / (height * width)
    (left, top, right, bottom), place = box, (np.arange(side) + 0.5) / side
    columns, rows = (left < place) & (place < right), (top < place) & (place < bottom)
    return pixels[rows][:, columns].sum()


def test_attention_inside_boxes():
    """Of the object that a word names by its shape or colour; words that name two do not count."""
    rng, looked, expected = np.random.default_rng(0), [], []
    for scene in range(90):
        objects = shapes.objects_of(scene)
        word = objects[-1][scene % 2]
        attention = rng.random(rng.integers(1, 7, 2)) ** 3
        attention /= attention.sum()
        looked.append((scene, word, attention))
        if sum(word in o for o in objects) == 1:
            inside, area = pixel_count(attention, objects[-1].box), (2 * objects[-1].radius) ** 2
            expected.append((inside, area))
    inside, area = masked_words.attention_inside_boxes([*looked, (0, "left", looked[0][2])])
    assert 60 < len(expected) < 90
    assert inside == pytest.approx([inside for inside, _ in expected], abs=0.005)
    assert np.mean(inside) == pytest.approx(np.mean(expected, 0)[0], abs=0.001)
    assert area == pytest.approx([area for _, area in expected])
    assert masked_words.attention_inside_boxes([(0, "left", looked[0][2])]) == ([], [])
