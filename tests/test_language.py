"""language.py: words and concepts, the labels of tag prediction (Eq. 2), language models."""

import math

import pytest
import torch
from torch import nn

import language


@pytest.mark.parametrize(
    "caption, words",
    [
        ("A T-shirt, 3 well-known DOGS'", ["a", "t-shirt", "well-known", "dogs"]),
        ("café_2x - non- stop; naïve", ["café", "non", "stop", "naïve"]),
        ("the Dog's can't man’s", ["the", "dog", "can't", "man"]),
        ("MOM'S, a man 's black-and-white", ["mom", "a", "man", "black-and-white"]),
        ("12 ... - _", []),
    ],
)
def test_words_of(caption, words):
    """Letters of any script in lower case, joined by hyphens or apostrophes; no possessive 's."""
    assert language.words_of(caption) == words
    spans = language.word_spans(caption)
    assert [word for word, _, _ in spans] == words
    assert [caption[first:last].lower() for _, first, last in spans] == words


@pytest.mark.parametrize(
    "tagged, nouns, adjectives, verbs",
    [
        # The part that a word is given most often, which may be none; the count is of all.
        ("run/v run/n fast/- fast/a run/v fast/- dog/n dog/n run/-", "dog:2", "", "run:4"),
        # Auxiliaries are none where they are verbs; words that begin alike stay.
        ("is/v has/v can/n can/v can/n being/v island/n hash/v", "can:3 island:1", "", "hash:1"),
        # Two letters or more; hyphens may join parts, apostrophes not.
        ("x/n can't/v o'clock/n t-shirt/n ox/a", "t-shirt:1", "ox:1", ""),
        # By frequency, then by the alphabet.
        ("tree/n cat/n bat/n cat/n tree/n bat/n cat/n", "cat:3 bat:2 tree:2", "", ""),
    ],
)
def test_count_concepts(tagged, nouns, adjectives, verbs, monkeypatch):
    """ICMLM Sec. 3.1, of captions that a tagger gave as "word/n word/a word/v word/-"."""
    parts = {"n": "nouns", "a": "adjectives", "v": "verbs", "-": None}
    words = [(token[:-2], parts[token[-1]]) for token in tagged.split()]
    monkeypatch.setattr(language, "tag_words", lambda *_: iter([words[:3], words[3:]]))
    found = []
    for concepts in language.count_concepts(["", ""]).values():
        found.append(" ".join(f"{word}:{count}" for word, count in concepts.items()))
    assert found == [nouns, adjectives, verbs]


def test_tag_loss_is_equation_2():
    """-sum_k y_k log p_k with y normalised to sum to one, mean over the images that have labels"""
    present = [{0, 3, 6}, {2}, {1, 2, 3, 4, 5}, set(range(7)), set()]
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels, total = torch.tensor([[float(k in row) for k in range(7)] for row in present]), 0.0
    for scores, row in zip(logits.softmax(1).tolist(), present):
        total -= sum(1 / len(row) * math.log(scores[k]) for k in row)
    assert language.tag_loss(logits, labels).item() == pytest.approx(total / 4, rel=1e-6)
    four = torch.tensor([[1.0] * 4 + [0.0] * 96])  # ln K when nothing is known, ln 4 at best
    for scores, expected in ((0 * four, math.log(100)), (1000 * four, math.log(4))):
        assert language.tag_loss(scores, four).item() == pytest.approx(expected, abs=1e-5)
    two = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert language.tag_loss(*two).item() == pytest.approx(math.log(2))  # not half of it
    assert language.tag_loss(two[0], 0 * two[1]).item() == 0
    half = logits.bfloat16()  # summed in float32
    loss = language.tag_loss(half, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(language.tag_loss(half.float(), labels).item(), rel=1e-6)


def test_tag_heads():
    """ICMLM Sec. 4.3: for a ResNet the mean over the grid, then an MLP of two layers."""
    features = torch.randn(3, 6, 2, 5)
    head = language.tag_head("resnet50", 6, 4)
    first, last = [module for module in head if isinstance(module, nn.Linear)]
    hidden = (features.mean((2, 3)) @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(head(features), hidden @ last.weight.T + last.bias)

    head, x = language.tag_head("vgg16_bn", 6, 4).eval(), features
    convolutions = [module for module in head if isinstance(module, nn.Conv2d)]
    norms = [module for module in head if isinstance(module, nn.BatchNorm2d)]
    assert len(convolutions) == 4
    for convolution, norm in zip(convolutions, norms, strict=True):
        x = norm(convolution(x)).clamp(min=0)
        assert x.shape == features.shape
    torch.testing.assert_close(head(features), head[-1](x.mean((2, 3))))
