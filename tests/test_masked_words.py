"""downstream/masked_words.py: words of a caption predicted by a model of icmlm.py, and drawn."""

import numpy as np
import pytest
import torch
from conftest import CPU, TINY, checkpoint_in, run_here
from PIL import Image

import common
import eval_linear
import icmlm
import language
import shapes
from downstream import masked_words

ONLY = "these words of the caption can be masked:"


def run(*flags):
    """-> the lines that it prints"""
    return run_here(["downstream.masked_words", *flags]).splitlines()


@pytest.fixture(scope="module")
def trained(coco_folder, tiny_lm, tmp_path_factory):
    """{head: the folder of a run of two iterations on 24 scenes}"""
    folders = {head: tmp_path_factory.mktemp(head) for head in icmlm.HEADS}
    for head, folder in folders.items():
        flags = ["--data", "coco", "--root", coco_folder, "--lm", tiny_lm, "--head", head, *TINY]
        flags += ["--image-size", 64, "--layers", 2, "--heads", 3, "--iters", 2]
        run_here(["icmlm.py", *flags, "--output", folder])
    return folders


@pytest.fixture
def example(trained, coco_folder):
    """-> the first photo, a caption of it, the words of that one that can be masked"""
    concepts = checkpoint_in(trained["tfm"])["concepts"]
    for caption in shapes.describe(shapes.objects_of(0)):
        words = [word for word in dict.fromkeys(language.words_of(caption)) if word in concepts]
        if len(words) > 1:
            return coco_folder / "train2017" / f"{0:012d}.jpg", caption, words


def test_words_that_can_be_masked():
    """Where one stands first; the others are refused (what counts as a word: test_icmlm.py)"""
    tokenizer = language.train_wordpiece(2 * ["the red dog runs", "a cat is blue"])
    concepts = dict.fromkeys(["dog", "red", "surfboard"], "nouns")
    for caption, word, expected in [
        ("the red dog", "Dog", 3),
        ("a dog, a dog", "Dog", 2),
        ("the red dog runs", "cat", "red, dog"),
        ("a surfboard", "surfboard", "none"),
        ("the dog runs", "runs", "dog"),
        ("red red dog", "the", "red, dog"),  # each is named once
    ]:
        _, positions = masked_words.maskable_words(tokenizer, concepts, caption)
        if isinstance(expected, int):
            assert masked_words.given_words(positions, [word]) == {"dog": expected}
            continue
        message = f'"{word}": it must be one token.*{ONLY} {expected}$'
        with pytest.raises(SystemExit, match=message):
            masked_words.given_words(positions, [word])


@pytest.mark.parametrize("head", icmlm.HEADS)
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
    pixels, _ = eval_linear.CentreCrops(common.image_files([str(photo)]), 64, side_fraction=1.0)[0]
    images = common.augment(torch.from_numpy(pixels)[None])
    text = lm.encode(tokens, mask), mask, mask_pos
    logits, _ = model(images, *text)
    maps = masked_words.attention_maps(model.head, model.backbone(images), *text)

    def five_best(logits):  # red 81.2%, blue 3.4%, ...
        p = logits.double().softmax(0)
        best = p.argsort(descending=True)[:5].tolist()
        return ", ".join(f"{tokenizer.decode([token])} {100 * p[token]:.1f}%" for token in best)

    assert masked == f"{tokenizer.decode(tokens[0])}  ({word})"
    assert with_photo == f"with the photo: {five_best(logits[0])}"
    _, pretrained = language.language_model(str(tiny_lm), CPU)
    by_text = pretrained(**inputs).logits[0, int(mask_pos)]
    assert without == f"without it: {five_best(by_text)}"
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


def test_photos_of_the_validation_split(few_scenes, tmp_path):
    """Figs. 4, 5: each word of their captions that can be masked, and what it is. Of the built-in
    scenes the small BERT lies beside the checkpoint; at last the attention inside the boxes."""
    few_scenes(20, 4)
    flags = ["--iters", 1, "--lm-iters", 2, "--image-size", 48, "--batch-size", 4, "--workers", 0]
    run_here(["icmlm.py", *flags, "--keep-every", 1, "--output", tmp_path / "run"])
    weights, folder = tmp_path / "run" / "model_1.pth", tmp_path / "pictures"
    *lines, last = run("--photos", 2, "--weights", weights, "--output", folder)
    masked = [line for line in lines if "[MASK]" in line]
    pictures = sorted(folder.iterdir())
    assert len(pictures) == 2 and len(masked) == sum("with the photo:" in line for line in lines)
    for picture in pictures:
        _, _, *words = picture.stem.split("_")
        assert words and all(any(line.endswith(f"({word})") for line in masked) for word in words)
    assert last.startswith("attention inside the masked object's box: ") and "its area: " in last


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
            left, top, right, bottom = objects[-1].box
            pixels = np.kron(attention, np.ones(600 // np.array(attention.shape)))  # enlarged
            place = (np.arange(600) + 0.5) / 600
            rows, columns = (top < place) & (place < bottom), (left < place) & (place < right)
            fraction = pixels[rows][:, columns].sum() / pixels.sum()
            expected.append((fraction, (2 * objects[-1].radius) ** 2))
    inside, area = masked_words.attention_inside_boxes([*looked, (0, "left", looked[0][2])])
    assert 60 < len(expected) < 90
    assert inside == pytest.approx([inside for inside, _ in expected], abs=0.005)
    assert np.mean(inside) == pytest.approx(np.mean(expected, 0)[0], abs=0.001)
    assert area == pytest.approx([area for _, area in expected])
    assert masked_words.attention_inside_boxes([(0, "left", looked[0][2])]) == ([], [])
