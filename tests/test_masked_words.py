"""downstream/masked_words.py: words of a caption predicted by a model of icmlm.py, and drawn."""

import numpy as np
import pytest
import torch
import transformers
from conftest import CPU, NEEDS_PICTURES, checkpoint_in, refusal, run_here
from PIL import Image

import common
import eval_linear
import icmlm
from downstream import masked_words
from downstream.pictures import draw_attention, photo_files
from extras import shapes


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """{head: the folder of a run of two iterations on 24 scenes}"""
    folders = {head: tmp_path_factory.mktemp(head) for head in icmlm.HEADS}
    for head, folder in folders.items():
        flags = "--head", head, "--layers", 2, "--heads", 3, "--iters", 2
        run_here(tiny("icmlm", folder, *flags))
        content = checkpoint_in(folder)
        for name, value in content["model"].items():
            if name.startswith("head."):  # so that the photo changes what the model says
                value += 0.2 * torch.randn(value.shape, generator=torch.manual_seed(0))
        torch.save(content, folder / "checkpoint.pth")
    return folders


@pytest.fixture
def example(trained, coco_folder):
    """-> the first photo, a caption of it, the words of that one that can be masked"""
    concepts = checkpoint_in(trained["tfm"])["concepts"]
    for caption in shapes.describe(shapes.objects_of(0)):
        words = [word for word in dict.fromkeys(icmlm.words_of(caption)) if word in concepts]
        if len(words) > 1:
            return coco_folder / "train2017" / f"{0:012d}.jpg", caption, words


@NEEDS_PICTURES
@pytest.mark.parametrize("head", icmlm.HEADS)
@torch.no_grad()
def test_own_photo(head, trained, example, tiny_lm, tmp_path, monkeypatch):
    """Three guesses with the photo and by the language model alone, and where the head looks"""
    (photo, caption, several), drawn = example, []
    word, draw = several[0], masked_words.draw_attention
    monkeypatch.setattr(masked_words, "draw_attention", lambda *a: drawn.append(a) or draw(*a))
    weights = trained[head] / "checkpoint.pth"
    flags = photo, "--caption", caption, "--weights", weights, "--output", tmp_path, "--word", word
    printed = run_here(["downstream.masked_words", *flags])
    said, whole, head_line, row, path = printed.splitlines()
    model, lm, tokenizer, _, _ = masked_words.load_icmlm(weights, None, CPU)
    kept = checkpoint_in(trained[head])["model"]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    inputs = tokenizer(caption.replace(word, "[MASK]", 1), return_tensors="pt")
    tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    mask_pos = (tokens == tokenizer.mask_token_id).nonzero()[0, 1:]
    pixels, _ = eval_linear.CentralSquares(photo_files([str(photo)]), 64, side_fraction=1.0)[0]
    images = common.augment(torch.from_numpy(pixels)[None])
    text = lm(tokens, mask), mask, mask_pos
    vector, _ = model(images, *text)
    logits = lm.mlm_head(vector) if head == "tfm" else vector @ lm.token_embeddings.T
    maps = masked_words.attention_maps(model.head, model.backbone(images), *text)

    def three_best(logits):  # red 81.2%, blue 3.4%, ...
        p = logits.double().softmax(0)
        best = p.argsort(descending=True)[:3].tolist()
        return ", ".join(f"{tokenizer.decode([token])} {100 * p[token]:.1f}%" for token in best)

    assert said == f"{weights}: trained on coco"
    pretrained = transformers.AutoModelForMaskedLM.from_pretrained(tiny_lm).eval()
    by_text = pretrained(**inputs).logits[0, int(mask_pos)]
    with_photo, without = three_best(logits[0]), three_best(by_text)
    assert whole == caption and with_photo != without
    columns = [head_line.index("with the photo"), head_line.index("without it")]
    assert [row.index(with_photo), row.index(without, columns[1])] == columns
    assert row.split("  ")[0] == word
    picture = tmp_path / f"1_{photo.stem}.png"
    assert path == f"the attention is in {picture}"
    [(_, text, [(named, attention)], _)] = drawn
    best = with_photo.split(",")[0]
    assert (text, named) == (caption, f"{word}: {best}") and attention.shape == (2, 2)
    torch.testing.assert_close(attention, maps[0])
    with Image.open(picture) as image:
        assert 350 < image.width < 600 and len(image.getcolors(1 << 20)) > 1000


@NEEDS_PICTURES
def test_the_photo_stays_where_the_head_does_not_look(tmp_path):
    """In front of it lies orange, the more, the more attention; elsewhere it is not darkened."""
    attention = torch.zeros(8, 8)
    attention[0, 0] = 0.25
    photo = Image.new("RGB", (64, 64), (0, 90, 200))
    draw_attention(photo, "a dog", [("dog", attention)], tmp_path / "x.png", side=64)
    with Image.open(tmp_path / "x.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    plain = (pixels == (0, 90, 200)).all(2)
    rows, columns = np.flatnonzero(plain.any(1)), np.flatnonzero(plain.any(0))
    top, left, right = rows.min(), columns.min(), columns.max() - 63
    assert plain[top : top + 64, left : left + 64].all()
    assert plain[top + 32 : top + 64, right : right + 64].all()
    red, green, blue = pixels[top, right].tolist()
    assert red > 150 and blue < 90 and green > 90


def test_a_caption_of_another_language(trained, example, tmp_path):
    """Its tokens are all unknown, which is said before a word is missed."""
    flags = "--caption", "жук на траве", "--word", "жук", "--output", tmp_path
    command = ["downstream.masked_words", example[0], *flags]
    wrong = refusal([*command, "--weights", trained["tfm"] / "checkpoint.pth"])
    assert "100% of the captions' tokens are unknown to the language model" in wrong


def test_attention_inside_boxes():
    """Of the object that a word names; all of a map inside its box, or none"""
    scene = next(n for n in range(99) if len(shapes.objects_of(n)) == 1)
    [named] = shapes.objects_of(scene)
    left, top, right, bottom = named.box
    place = (torch.arange(200) + 0.5) / 200
    rows, columns = (top < place) & (place < bottom), (left < place) & (place < right)
    inside = (rows[:, None] & columns).float()
    looked = [(scene, named.shape, x / x.sum()) for x in (inside, 1 - inside)]
    shares, areas = masked_words.attention_inside_boxes([*looked, (scene, "left", inside)])
    assert shares == pytest.approx([1, 0], abs=0.02)
    assert areas == pytest.approx([(right - left) * (bottom - top)] * 2, abs=1e-3)
