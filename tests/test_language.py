"""language.py: words and concepts, the labels of tag prediction (Eq. 2), language models."""

import json
import math
import multiprocessing
import os
import sys

import numpy as np
import pytest
import torch
from conftest import CPU, captioned
from scipy import sparse
from torch import nn

import common
import language


# ------------------------------------------------------------------------------------- concepts


@pytest.mark.parametrize(
    "caption, words",
    [
        ("A T-shirt, 3 well-known DOGS'", ["a", "t-shirt", "well-known", "dogs"]),
        ("café_2x - non- stop; naïve", ["café", "x", "non", "stop", "naïve"]),
        ("the Dog's can't man’s", ["the", "dog", "can't", "man"]),
        ("12 ... - _", []),
    ],
)
def test_words_of(caption, words):
    """Letters of any script in lower case, joined by hyphens or apostrophes; no possessive 's."""
    assert language.words_of(caption) == words


def test_textblob():
    """ICMLM Sec. 3.1: nouns, adjectives and verbs; every word of words_of has its tag or None."""
    [tagged] = language.tag_words(["A black dog runs on the t-shirt!"], "textblob")
    assert [word for word, _ in tagged] == ["a", "black", "dog", "runs", "on", "the", "t-shirt"]
    expected = [None, "adjectives", "nouns", "verbs", None, None]
    assert [part for _, part in tagged][:6] == expected


def test_spacy(monkeypatch):
    """NOUN, ADJ and VERB of its pipeline, on the words of words_of, hyphens and all; not AUX."""
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    pipeline, asked = spacy.blank("en"), []
    ruler = pipeline.add_pipe("attribute_ruler")
    parts = {"t-shirt": "NOUN", "red": "ADJ", "runs": "VERB", "is": "AUX", "the": "DET"}
    for word, part in parts.items():
        ruler.add([[{"LOWER": word}]], {"POS": part})
    monkeypatch.setattr(spacy, "load", lambda name, **_: asked.append(name) or pipeline)
    tagged = list(language.tag_words(["The T-shirt is red!", "runs"], "spacy"))
    first = [("the", None), ("t-shirt", "nouns"), ("is", None), ("red", "adjectives")]
    assert tagged == [first, [("runs", "verbs")]] and asked == ["en_core_web_sm"]


@pytest.mark.parametrize("tagger", ("spacy", "textblob"))
def test_a_tagger_that_is_not_installed(tagger, monkeypatch):
    """One line says how to install it."""
    for module in (tagger, f"{tagger}.en.taggers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=rf"^error: .*python -m pip install {tagger}"):
        list(language.tag_words(["a dog runs"], tagger))


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


@pytest.mark.parametrize(
    "pos, number, words",
    [
        ("nn", 2, "man dog"),
        ("nn+adj", 10, "man red dog big hat"),
        ("nn+adj+vb", 4, "man red dog runs"),
        ("nn+adj+vb", 10, "man red dog runs big hat sits"),
    ],
)
def test_top_concepts(pos, number, words):
    """ICMLM Tab. 4: the K most frequent of the chosen parts; ties in the order of the alphabet."""
    nouns, adjectives = {"man": 9, "dog": 5, "hat": 2}, {"red": 7, "big": 2}
    concepts = {"nouns": nouns, "adjectives": adjectives, "verbs": {"runs": 5, "sits": 1}}
    assert language.top_concepts(concepts, pos, number) == words.split()


def reversed_parts(captions):
    return os.getpid(), captions[::-1]


def test_for_parts():
    """All captions in their order, the first part in this process and the others in others."""
    captions = common.PackedStrings(map(str, range(23)))
    found = list(language.for_parts(reversed_parts, captions, "test", size=5))
    expected = [[str(i) for i in range(n, min(n + 5, 23))][::-1] for n in range(0, 23, 5)]
    assert [part for _, part in found] == expected
    assert [process == os.getpid() for process, _ in found] == [True] + 4 * [False]
    assert list(language.for_parts(reversed_parts, captions, "test")) == [
        (os.getpid(), list(map(str, reversed(range(23)))))
    ]
    assert list(language.for_parts(reversed_parts, common.PackedStrings(), "test")) == []
    assert not multiprocessing.active_children()


def test_captions_in_parts_give_the_same(monkeypatch):
    """Concepts and filtered captions do not depend on how the captions are shared out."""
    words = "dog runs the red a quickly ball of sits on white".split()
    rng = np.random.default_rng(0)
    draw = lambda: " ".join(rng.choice(words, rng.integers(1, 6)))
    data = captioned(*[[draw() for _ in range(3)] for _ in range(40)])
    whole = language.count_concepts(data.captions), language.filter_captions(data, str.split)
    parts = language.for_parts
    monkeypatch.setattr(language, "for_parts", lambda *given: parts(*given, size=7))
    again = language.count_concepts(data.captions), language.filter_captions(data, str.split)
    assert json.dumps(whole[0]) == json.dumps(again[0]) and whole[0]["nouns"]
    assert list(whole[1].captions) == list(again[1].captions)
    assert 0 < len(whole[1].captions) < 120


def test_filter_captions(capsys):
    """ICMLM Sec. 4, Datasets: an image's repetitions and captions outside 3 to 25 tokens go."""
    two, three, longest, longer = (" ".join(["dog"] * count) for count in (2, 3, 25, 26))
    data = captioned([three, three, longest, longer, two], [three, "", longest], [])
    data.tag_names = ["x"]
    kept = language.filter_captions(data, language.words_of)
    assert [kept.captions_of(i) for i in range(3)] == [[three, longest], [three, longest], []]
    assert list(kept.images) == list(data.images) and kept.tag_names == ["x"]
    left_out = "4 captions; left out: 1 repeated for their image, 3 of fewer than 3 or more than 25"
    assert left_out in capsys.readouterr().out


# -------------------------------------------------------------------------------- tag prediction


def test_concept_labels():
    """ICMLM Sec. 3.1: y_k = 1 when word k is in a caption of the image, in whatever case."""
    data = captioned(["a dog runs", "the Red dog"], [], ["a t-shirt", "hotdog"])
    labels = language.concept_labels(data, ["red", "dog", "t-shirt"])
    assert labels.toarray().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    arrays = language.sparse_parts("train", labels)  # to a file and back
    again = language.sparse_from("train", arrays, 3)
    assert again.shape == labels.shape and again.dtype == np.float32 and (again != labels).nnz == 0


def test_label_rows():
    """The labels left and right, and only they, change places in mirrored photos. [ours]"""
    names = ["dog", "left", "leftover", "right"]
    rows = np.array([[1, 1, 0, 0], [1, 0, 1, 1], [0.3, 0.7, 0, 0]], np.float32)
    labels, swap = sparse.csr_array(rows), language.left_right_swap(names)
    found = language.label_rows(labels, [2, 0, 1, 2, 0], [True, True, True, False, False], swap)
    mirrored = [[0.3, 0, 0, 0.7], [1, 0, 0, 1], [1, 1, 1, 0]]
    assert torch.equal(found, torch.tensor([*mirrored, *rows[[2, 0]].tolist()]))
    assert torch.equal(language.label_rows(labels, [1, 0]), torch.tensor(rows[[1, 0]]))
    assert (labels.toarray() == rows).all()  # the labels themselves are not touched
    assert language.left_right_swap(["left", "dog", "bright"]).tolist() == [0, 1, 2]


def test_tag_loss_is_equation_2():
    """-sum_k y_k log p_k with y normalised to sum to one, mean over images; several labels each."""
    present = [{0, 3, 6}, {2}, {1, 2, 3, 4, 5}, set(range(7)), set()]
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels, total = torch.tensor([[float(k in row) for k in range(7)] for row in present]), 0.0
    for scores, row in zip(logits.tolist(), present):
        exponentials = [math.exp(score) for score in scores]
        for k in row:
            total -= 1 / len(row) * math.log(exponentials[k] / sum(exponentials))
    assert language.tag_loss(logits, labels).item() == pytest.approx(total / 5, rel=1e-6)
    four = torch.tensor([[1.0] * 4 + [0.0] * 96])  # ln K when nothing is known, ln 4 at best
    for scores, expected in ((0 * four, math.log(100)), (1000 * four, math.log(4))):
        assert language.tag_loss(scores, four).item() == pytest.approx(expected, abs=1e-5)


def test_tag_loss_in_half_precision():
    """Over 10K labels it is summed in float32."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 10_000, generator=generator).bfloat16(), torch.zeros(2, 10_000)
    labels[:, 50:60] = 1
    loss = language.tag_loss(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(language.tag_loss(logits.float(), labels).item(), rel=1e-6)


def of_kind(head, kind):
    return [module for module in head if isinstance(module, kind)]


def test_tag_head_of_a_resnet():
    """ICMLM Sec. 4.3: the mean over the grid, then an MLP of two layers."""
    head, features = language.tag_head("resnet50", 6, 4), torch.randn(3, 6, 2, 5)
    first, last = of_kind(head, nn.Linear)
    hidden = (features.mean((2, 3)) @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(head(features), hidden @ last.weight.T + last.bias)


def test_tag_head_of_vgg16():
    """ICMLM Sec. 4, Networks: four convolutions that keep the grid, its mean and a linear layer."""
    head, features = language.tag_head("vgg16", 6, 4).eval(), torch.randn(3, 6, 2, 3)
    convolutions, norms = of_kind(head, nn.Conv2d), of_kind(head, nn.BatchNorm2d)
    [last] = of_kind(head, nn.Linear)
    assert len(convolutions) == 4
    x = features
    for convolution, norm in zip(convolutions, norms, strict=True):
        x = norm(convolution(x)).clamp(min=0)
        assert x.shape == features.shape
    torch.testing.assert_close(head(features), x.mean((2, 3)) @ last.weight.T + last.bias)


# ------------------------------------------------------------------------------- language models

RHYMES = ["a red dog runs fast", "two men ride a bike", "the cat sits on its mat", "one bird sings"]


@pytest.fixture(scope="module")
def scratch():
    """-> (tokenizer, model), trained on four captions until it knows them"""
    captions = common.PackedStrings(5 * RHYMES)
    tokenizer, model = language.train_language_model(captions, 60, 0, CPU, "off", batch_size=16)
    return tokenizer, model.eval()


def load(name, captions=(), folder=None, cache=None, iters=2, seed=0, masked_words=True, sizes=()):
    scratch = common.PackedStrings(captions), folder, cache, iters, seed, "off", *sizes
    return language.language_model(str(name), CPU, scratch, masked_words)


def test_scratch_learns(scratch):
    """It names a masked word from the words around it, and from [CLS] the tokens of a caption."""
    tokenizer, model = scratch
    masked = tokenizer([RHYMES[0].replace("dog", "[MASK]")], return_tensors="pt")
    place = masked["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    assert tokenizer.decode(model(**masked).logits[0, place].argmax()) == "dog"
    for caption in RHYMES:
        inputs = tokenizer([caption], return_tensors="pt")
        words = set(inputs["input_ids"][0].tolist()) - set(tokenizer.all_special_ids)
        assert set(model(**inputs).logits[0, 0].topk(len(words)).indices.tolist()) == words


def test_scratch_is_trained_once(tmp_path, monkeypatch):
    """The same seed gives the same weights; all runs find it, until it is made of other things."""
    trained, train = [], language.train_language_model

    def watched(*args):
        trained.append(args)
        return train(*args)

    monkeypatch.setattr(language, "train_language_model", watched)

    def weights(cache, captions=RHYMES, run="run", **more):
        torch.manual_seed(len(trained))
        folder = tmp_path / run
        tokenizer, model = load("scratch", captions, folder, tmp_path / cache, **more)
        state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        return len(trained), tokenizer.get_vocab(), state

    first, shared = weights("one"), weights("one", run="another")
    again, kept = weights("two", run="third"), weights("three")  # kept: the run's own copy
    assert [found[0] for found in (first, shared, again, kept)] == [1, 1, 2, 2]
    assert first[1:] == shared[1:] == again[1:] == kept[1:]
    made_of, states = {}, {first[2]}
    for change in ({"seed": 1}, {"iters": 3}, {"captions": RHYMES[1:]}, {"sizes": (1, 64)}):
        made_of |= change
        before, (number, _, state) = len(trained), weights("one", **made_of)
        assert number == before + 1 and state not in states
        states.add(state)
    assert weights("one", **made_of)[0] == 6 and weights("one", run="other")[0] == 6
    assert not list(tmp_path.glob("*/*.tmp"))


def test_tokenizer(scratch):
    """[CLS] stands before each caption and [SEP] behind it, as BERT has them; lower case."""
    tokenizer, _ = scratch
    rows = tokenizer(["A red dog", "two men ride a bike"], padding=True)["input_ids"]
    words = [" ".join(tokenizer.convert_ids_to_tokens(row)) for row in rows]
    short = "[CLS] a red dog [SEP] [PAD] [PAD]"
    assert words == [short, "[CLS] two men ride a bike [SEP]"]
    letters = [f"##{letter}" for letter in sorted(set("".join(RHYMES)) - {" "})]
    numbers = tokenizer.convert_tokens_to_ids(letters)
    assert numbers == list(range(5, 5 + len(letters)))  # numbered alike every time


def test_mask_tokens_is_bert_s(scratch):
    """15% of the tokens are chosen; of these 80% become [MASK], 10% any token, 10% stay."""
    tokenizer, _ = scratch
    tokens = torch.full((400, 52), tokenizer.convert_tokens_to_ids("dog"))
    special = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]"])
    tokens[:, [0, 50, 51]] = torch.tensor(special)
    torch.manual_seed(0)
    masked, chosen = language.mask_tokens(tokens, tokenizer)
    assert not chosen[:, [0, 50, 51]].any() and torch.equal(masked[~chosen], tokens[~chosen])
    found = masked[chosen]
    is_mask, is_kept = found == tokenizer.mask_token_id, found == tokens[chosen]
    any_token = 0.1 / len(tokenizer)  # may be the mask, or the token itself
    assert len(found) / (400 * 49) == pytest.approx(0.15, abs=0.01)
    assert is_mask.float().mean().item() == pytest.approx(0.8 + any_token, abs=0.03)
    assert is_kept.float().mean().item() == pytest.approx(0.1 + any_token, abs=0.03)
    assert len(found[~is_mask & ~is_kept].unique()) > len(tokenizer) / 2


def test_token_sets(scratch):
    """1 where a token occurs, however often; special tokens and padding do not count."""
    tokenizer, _ = scratch
    tokens = tokenizer(["a dog, a dog", "red"], padding=True, return_tensors="pt")["input_ids"]
    sets = language.token_sets(tokens, tokenizer)
    for row, caption in zip(sets, (["a", "dog", ","], ["red"])):
        words = set(tokenizer.convert_tokens_to_ids(caption)) - set(tokenizer.all_special_ids)
        assert set(row.nonzero().flatten().tolist()) == words and row.max() == 1


def test_language_models_are_frozen(tiny_lm):
    """ICMLM Sec. 3.1: psi is pretrained and stays as it is, in eval mode."""
    _, model = load(tiny_lm)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("attention", ("sdpa", "eager"))
def test_attention_mask(tiny_lm, attention):
    """Padding changes nothing, with fused attention and without."""
    tokenizer, model = load(tiny_lm)
    model.set_attn_implementation(attention)
    captions = ["a circle", "a large red circle floats above a small star"]
    inputs = tokenizer(captions, padding=True, return_tensors="pt")
    visible = inputs["attention_mask"].bool()
    mask = language.attention_mask(model, visible)
    together = model.bert(inputs["input_ids"], attention_mask=mask).last_hidden_state
    assert mask.dim() == (4 if attention == "sdpa" else 2) and not visible.all()
    for caption, row, shown in zip(captions, together, visible):
        alone = model.bert(**tokenizer([caption], return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(row[shown], alone, rtol=0, atol=1e-5)


def test_an_encoder_alone(tiny_lm, tmp_path):
    """Without an output layer it is refused where words are predicted, and has the same encoder."""
    tokenizer, model = load(tiny_lm)
    model.bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        SystemExit, match="is not a whole masked language model: it lacks .'cls.pred"
    ):
        load(tmp_path)
    _, encoder = load(tmp_path, masked_words=False)
    for name, value in model.bert.state_dict().items():
        assert torch.equal(value, encoder.bert.state_dict()[name])


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing", ": no such folder"),
        ("empty", " cannot be loaded"),
        ("no-weights", " cannot be loaded"),
        ("no-organisation-here/no-model-here", " cannot be loaded"),
    ],
)
def test_a_language_model_that_is_not_there(name, message, tiny_lm, tmp_path, monkeypatch):
    """One line names it and says what to give instead."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-weights").mkdir()
    for path in tiny_lm.glob("*.json"):
        (tmp_path / "no-weights" / path.name).write_bytes(path.read_bytes())
    name = name if "/" in name else tmp_path / name
    with pytest.raises(SystemExit, match=rf"^error: --lm {name}{message}.*\Z"):
        load(name)
    with pytest.raises(SystemExit, match=rf"^error: --translator {name}{message}.*\Z"):
        with language.loading(name, "--translator"):
            raise OSError("several\nlines")
