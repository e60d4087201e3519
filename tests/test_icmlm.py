"""icmlm.py against the paper written out slowly, its triplets one by one, and as a user runs it.

In many tests the backbone is `FeaturesAsGiven`: images are the features that the heads see.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ALONE,
    CPU,
    OWN,
    TINY,
    FeaturesAsGiven,
    captioned,
    checkpoint_in,
    kill_at,
    metrics,
    refusal,
    result,
    run_here,
)
from PIL import Image
from torch import nn

import common
import icmlm
import language
from downstream.masked_words import attention_maps

HEADS = icmlm.HEADS
both_heads = pytest.mark.parametrize("head", HEADS)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def float64(monkeypatch):
    """What is computed by .float(), against half precision, is computed in float64 here."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_weights(module, scale):
    """Every parameter random, the gains of norms around 1: whatever is forgotten shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter)
    return module


# ------------------------------------------------------------------- the frozen language model

WORDS = "a the dog cat red blue surf left right on of is runs grass t shirt - , . 1".split()
PIECES = "##board ##s ##dog ##cat ##red ##c ##a ##t".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES]
SENTENCES = ["the red dog runs on grass", "a cat is on the left of a surfboard", "a red shirt"]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 64}
DISTILLED = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
CONFIGS = {"Bert": SIZES, "Roberta": SIZES, "DistilBert": DISTILLED}
KINDS = "Bert", "Roberta"


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """{kind: the folder of a language model of this kind with random weights}"""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer({word: n for n, word in enumerate(VOCABULARY)})
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names)
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in CONFIGS}
    for kind, folder in folders.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")
        config = config(vocab_size=len(VOCABULARY), pad_token_id=0, **CONFIGS[kind])
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
        random_weights(model, 0.3).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def load(name):
    """-> tokenizer, model as icmlm.py gets them"""
    return language.language_model(str(name), CPU)


@pytest.fixture(scope="module")
def tokenizer(lms):
    return load(lms["Bert"])[0]


def batch_of(tokenizer, sentences):
    """-> tokens (B, T), attention mask (B, T); the sentences differ in length"""
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    assert not mask.all()
    return inputs["input_ids"], mask


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_mlm_head(kind, lms):
    """Sec. 3.2: W is the last layer before any head, without a look at the padding; given it, the
    pretrained token classification layer says what the model says. V are the input embeddings."""
    tokenizer, model = load(lms[kind])
    tokens, mask = batch_of(tokenizer, SENTENCES)
    expected = model(input_ids=tokens, attention_mask=mask.long()).logits
    lm = icmlm.FrozenLanguageModel(model.requires_grad_(True), "off")
    features = lm.encode(tokens, mask)
    assert lm.width == features.size(2) == 16
    assert not features.requires_grad and not features.is_inference()  # it can be trained on
    for row, visible, encoded in zip(tokens, mask, features):
        alone = model(input_ids=row[visible][None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(encoded[visible], alone, rtol=0, atol=1e-5)
    for position in range(tokens.size(1)):
        logits = lm.mlm_head(features[:, position])
        torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=2e-5)
    assert expected.std(-1).min() > 0.05  # the logits differ, so that equal ones say something
    [table] = [v for name, v in model.state_dict().items() if "word_embeddings.weight" in name]
    assert torch.equal(lm.token_embeddings, table)


def test_other_language_models_are_refused(lms):
    """Their token classification layer has another name."""
    with pytest.raises(SystemExit, match="is a DistilBertForMaskedLM: give a BERT or a RoBERTa"):
        icmlm.FrozenLanguageModel(load(lms["DistilBert"])[1], "off")


@pytest.mark.parametrize("amp", ("bf16", "fp16"))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_once_as_at_each_use(kind, amp, lms):
    """W has the same bits as with float32 weights, which autocast rounds whenever they are used.
    The classification layer and V stay in float32, for validation."""
    tokenizer, model = load(lms[kind])
    tokens, mask = batch_of(tokenizer, SENTENCES)
    with torch.no_grad(), common.autocast(CPU, amp):
        inputs = {"input_ids": tokens, "attention_mask": mask.long()}
        expected = model.base_model(**inputs).last_hidden_state.float()
    states = torch.randn(2, 16)
    logits = icmlm.FrozenLanguageModel(load(lms[kind])[1], "off").mlm_head(states)
    lm = icmlm.FrozenLanguageModel(model, amp)
    assert {parameter.dtype for parameter in lm.encoder.parameters()} > {torch.float32}
    assert torch.equal(lm.encode(tokens, mask), expected)
    assert torch.equal(lm.mlm_head(states), logits)
    assert lm.token_embeddings.dtype == torch.float32


@both_heads
def test_training_leaves_the_language_model_as_it_is(head, lms):
    """Every weight of the head has a gradient; none of the others, that no checkpoint holds."""
    tokenizer, pretrained = load(lms["Bert"])
    before = copy.deepcopy(pretrained.state_dict())
    lm = icmlm.FrozenLanguageModel(pretrained, "off")
    model = build_model(head, lm=lm, dropout=0.1).train()
    names = {name for name, _ in model.named_parameters()}
    assert names and names == model.state_dict().keys()
    frozen = {id(parameter) for parameter in pretrained.parameters()}
    assert not frozen & {id(parameter) for parameter in model.parameters()}

    tokens, mask = batch_of(tokenizer, SENTENCES)
    token_features, mask_pos = lm.encode(tokens, mask), torch.tensor([2, 3, 1])
    logits, _ = model(torch.randn(3, 5, 2, 2), token_features, mask, mask_pos)
    F.cross_entropy(logits, torch.tensor([7, 8, 9])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), 0.05).step()
    assert all(parameter.grad is None for parameter in pretrained.parameters())
    assert not pretrained.training and not lm.mlm_head.training
    for name, value in pretrained.state_dict().items():
        assert torch.equal(value, before[name])


# -------------------------------------------------------------------------- heads, written out

ATTENTION_WIDTH = 7
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
STUB = SimpleNamespace(width=6, token_embeddings=TABLE, mlm_head=lambda states: 2 * states)


def build_model(head, lm=STUB, num_tags=0, layers=1, heads=1, dropout=0.0):
    """ICMLM of five channels without a backbone"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(5))
        patch.setattr(icmlm, "ATTENTION_WIDTH", ATTENTION_WIDTH)
        patch.setattr(icmlm, "DROPOUT", dropout)
        return icmlm.ICMLM("stub", head, lm, num_tags, layers, heads)


def padded_batch(dtype=torch.float64):
    """Features of 2 x 3 places, captions of 5, 2 and 4 tokens; what pads them is not zero"""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    token_features = torch.where(mask[..., None], normal(3, 5, 6), 30.0)
    return normal(3, 5, 2, 3) + 0.3, token_features, mask, torch.tensor([3, 0, 2])


def in_reading_order(features):
    """(C, h, w) -> X, one vector for each place, row by row"""
    _, height, width = features.shape
    return [features[:, i, j].numpy() for i in range(height) for j in range(width)]


def linear(vector, w, name):
    return w[f"{name}.weight"] @ vector + w.get(f"{name}.bias", 0)


def layer_norm(vector, w, name):
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return (vector - mean) / math.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def relu(vector):
    return np.maximum(vector, 0.0)


def softmax(scores):
    return np.exp(scores) / sum(np.exp(scores))


def slow_match(place, words, w, name):
    """One head of att: how well a place of the photo matches the caption"""
    x = relu(layer_norm(linear(place, w, f"{name}.sigma_x"), w, f"{name}.norm_x"))
    total = 0.0
    for word in words:
        read = relu(layer_norm(linear(word, w, f"{name}.sigma_w"), w, f"{name}.norm_w"))
        total += math.exp(x @ read / math.sqrt(ATTENTION_WIDTH))  # Eq. 3
    return math.log(total)  # Eq. 4


def slow_att_fc(w, photo, words, heads, layers):
    """-> logits, attention"""
    s = []
    for place in photo:
        of_heads = [slow_match(place, words, w, f"head.att.{h}") for h in range(heads)]
        s.append(w["head.sigma_h"] @ of_heads + w["head.b_h"][0])
    p = softmax(s)
    x = p @ np.stack(photo)  # Eq. 5
    for n in range(layers):
        x = relu(layer_norm(linear(x, w, f"head.fc.{n}.0"), w, f"head.fc.{n}.1"))
    return [x @ vector for vector in TABLE.numpy()], p  # Eq. 6


def slow_encoder_layer(z, w, name, heads):
    """-> the new Z; of each head softmax(K Q^T / sqrt(D))"""
    width, outputs, attention = len(z[0]), [], []
    for h in range(heads):
        rows = slice(h * width, (h + 1) * width)  # a head is as wide as the model
        parts = []
        for kind in ("key", "query", "value"):
            matrix, bias = w[f"{name}.{kind}.weight"][rows], w[f"{name}.{kind}.bias"][rows]
            parts.append([matrix @ vector + bias for vector in z])  # Eq. 13
        keys, queries, values = parts
        scores = [[key @ query / math.sqrt(width) for query in queries] for key in keys]
        attention.append([softmax(row) for row in scores])
        outputs.append([row @ np.stack(values) for row in attention[-1]])  # Eq. 14
    new = []
    for s, vector in enumerate(z):
        of_heads = np.concatenate([output[s] for output in outputs])
        merged = linear(of_heads, w, f"{name}.out_proj")  # Eq. 15
        vector = layer_norm(vector + merged, w, f"{name}.norm1")
        inner = linear(relu(linear(vector, w, f"{name}.linear1")), w, f"{name}.linear2")
        new.append(layer_norm(vector + inner, w, f"{name}.norm2"))
    return new, attention


def slow_tfm(w, photo, words, position, heads, layers):
    """-> what the masked place gives; how it looks at the photo, as a fraction of all places"""
    z = [linear(place, w, "head.project") for place in photo] + words
    for n in range(layers):
        z, attention = slow_encoder_layer(z, w, f"head.layers.{n}", heads)
    masked = len(photo) + position
    row = [sum(table[masked][m] for table in attention) / heads for m in range(len(photo))]
    assert sum(row) < 0.99  # the text has its part, so that dividing by the sum says something
    return 2 * z[masked], [value / sum(row) for value in row]


@both_heads
@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_heads_are_their_equations(head, heads, layers, float64):
    """att-fc: Eqs. 3-6, tfm: Eqs. 13-15, where padding is cut off; the maps are their weights."""
    model = build_model(head, heads=heads, layers=layers).double()
    random_weights(model, 0.5).eval()
    features, token_features, mask, mask_pos = padded_batch()
    with torch.no_grad():
        logits, _ = model(features, token_features, mask, mask_pos)
        maps = attention_maps(model.head, features, token_features, mask, mask_pos)
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    assert "head.att.0.sigma_x.bias" not in w and "head.att.0.sigma_w.bias" not in w
    for i in range(3):
        photo, words = in_reading_order(features[i]), list(token_features[i, mask[i]].numpy())
        if head == "tfm":
            expected, p = slow_tfm(w, photo, words, int(mask_pos[i]), heads, layers)
        else:
            expected, p = slow_att_fc(w, photo, words, heads, layers)
        assert logits[i].tolist() == pytest.approx(list(expected), abs=1e-10)
        assert maps[i].flatten().tolist() == pytest.approx(p, abs=1e-10)
        assert max(p) > 1.1 / 6  # not even
    assert maps.shape == (3, 2, 3)


def test_averaging_begins_as_the_mean_of_the_heads():
    """Sec. 3.2: the layer that weighs the heads of att is learned from there."""
    head = build_model("att-fc", heads=4).head
    assert head.sigma_h.tolist() == 4 * [0.25] and head.b_h.tolist() == [0]


def test_dropout_follows_attention_and_feed_forward(monkeypatch):
    """App. E: with all dropped nothing but the two norms is left of a layer in training."""
    monkeypatch.setattr(icmlm, "DROPOUT", 1.0)
    layer = random_weights(icmlm.EncoderLayer(6, 2), 0.3)
    z, mask = torch.randn(2, 4, 6), torch.ones(2, 4, dtype=torch.bool)
    training, evaluation = layer.train()(z, mask), layer.eval()(z, mask)
    torch.testing.assert_close(training, layer.norm2(layer.norm1(z)))
    assert not torch.allclose(training, evaluation)


@both_heads
def test_heads_in_half_precision(head):
    """Under bf16 they give what they give in float32, to its digits, and all gradients."""
    model = random_weights(build_model(head, num_tags=3, heads=2).float(), 0.3).eval()
    batch = padded_batch(torch.float32)
    exact = *model(*batch), attention_maps(model.head, *batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = *model(*batch), attention_maps(model.head, *batch)
    for one, two in zip(exact, rough):
        assert (one - two.float()).abs().max() < 0.1 * one.abs().max()
    sum(part.float().square().sum() for part in rough).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# ------------------------------------------------------------------------------------ triplets


def triplets_in(folder, train, val, tokenizer, flags="", checkpoint=None):
    """-> concepts, train, val of a run in `folder`"""
    run = SimpleNamespace(checkpoint=checkpoint, folder=folder, world=ALONE)
    return icmlm.load_triplets(icmlm.get_args(flags.split()), train, val, tokenizer, run)


def triplets_of(data, tokenizer, words, tags=None):
    """The triplets of data without looking for concepts"""
    return icmlm.Triplets(data.images, tags, **icmlm.find_triplets(data, tokenizer, words))


def parts_of(triplets, n):
    """-> index of the photo, the caption's tokens, mask position and concept of a triplet"""
    caption, mask_pos, concept = triplets.masked[n].tolist()
    first, end = triplets.token_offsets[caption : caption + 2]
    image_idx = int(triplets.image_idx[caption])
    return image_idx, triplets.tokens[first:end].tolist(), mask_pos, concept


def written_out(triplets, tokenizer):
    """(image, caption with the masked word in brackets) of each triplet"""
    rows = []
    for n in range(len(triplets)):
        image, tokens, position, _ = parts_of(triplets, n)
        names = tokenizer.convert_ids_to_tokens(tokens)
        names[position] = f"<{names[position]}>"
        rows.append((image, " ".join(names[1:-1])))
    return rows


def test_triplets_are_photo_caption_and_masked_word(tokenizer, tmp_path):
    """Sec. 4, Datasets: each concept of each caption of 3 to 25 tokens that is not repeated.

    Pieces count, [CLS] and [SEP] do not; a tag may be of several tokens."""
    longest, pieces = "the dog is on" + 21 * " the", "cat" + 8 * " surfboards"  # 25 tokens
    train = captioned(
        ["a red dog", "a red dog", "the cat"],  # repeated; of two tokens
        [],
        [longest, f"{longest} a", "a red dog", pieces, f"{pieces} a"],
    )
    val = captioned(["1 1 1"], ["the cat is red"])
    concepts, train, val = triplets_in(tmp_path, train, val, tokenizer, "--pos nn+adj")
    assert concepts["dog"] == concepts["cat"] == "nouns" and concepts["red"] == "adjectives"
    assert "the" not in concepts
    expected = [(0, "a <red> dog"), (0, "a red <dog>"), (2, longest.replace("dog", "<dog>"))]
    expected += [(2, "a <red> dog"), (2, "a red <dog>")]
    expected += [(2, "<cat>" + 8 * " surf ##board ##s")]
    assert written_out(train, tokenizer) == expected
    assert train.masked.itemsize == train.tokens.itemsize == 4  # VG has 13 million
    assert written_out(val, tokenizer) == [(1, "the <cat> is red"), (1, "the cat is <red>")]
    for row, words in zip(train.tags.toarray(), ("red dog", "", "red dog cat surfboards")):
        assert {list(concepts)[k] for k in np.flatnonzero(row)} == set(words.split())


def test_only_whole_words_of_one_token_are_masked(tokenizer):
    """Neither a word of several tokens nor a piece of one, nor a part of a hyphenated word, whose
    tag is the whole word; punctuation beside it does not matter."""
    words = "dog surfboard surf shirt t cat zebra red surfdog".split()
    data = captioned(["surf surfboard surfdog dogs dog"], ["zebra t-shirt, Cat.", "red-dog shirt-"])
    assert written_out(triplets_of(data, tokenizer, words), tokenizer) == [
        (0, "<surf> surf ##board surf ##dog dog ##s dog"),
        (0, "surf surf ##board surf ##dog dog ##s <dog>"),
        (1, "[UNK] t - shirt , <cat> ."),
        (1, "red - dog <shirt> -"),
    ]


def test_words_that_share_a_token():
    """Each is its own concept where it stands: the rarer one does not rename the other."""
    tokenizer = language.train_wordpiece(2 * ["a cafe and a café"])
    data = captioned(["a café"], ["a cafe"])
    triplets = triplets_of(data, tokenizer, ["cafe", "café"])
    rows = [parts_of(triplets, n) for n in range(2)]
    assert rows[0][1] == rows[1][1]  # the same tokens
    assert [concept for *_, concept in rows] == [1, 0]


@pytest.fixture(params=(False, True))
def byte_level(request):
    """A small tokenizer of RoBERTa's kind; in its tokens spaces may count for the offsets"""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    text = "Dog left right dog Left dog right Dog cat left Right".split()
    pieces = ByteLevelBPETokenizer(trim_offsets=request.param)
    pieces.train_from_iterator([*text, " ".join(text)] * 2, 400, 1, special_tokens=["<unk>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer)


def test_words_of_a_byte_level_vocabulary(byte_level):
    """RoBERTa's tokens differ at the start of a caption and by case; all are found, and flipped."""
    data = captioned(["Dog left dog", "dog Left"], ["left-dog dogs right"])
    triplets = triplets_of(data, byte_level, ["dog", "left", "right"])
    rows = [parts_of(triplets, n) for n in range(len(triplets))]
    masked = [byte_level.decode([tokens[position]]) for _, tokens, position, _ in rows]
    assert masked == ["Dog", " left", " dog", "dog", " Left", " right"]
    assert [concept for *_, concept in rows] == [0, 1, 0, 0, 1, 2]
    flipped = icmlm.left_right_tokens(byte_level)
    names = {byte_level.decode([a]): byte_level.decode([b]) for a, b in flipped.items()}
    assert names[" left"] == " right" and names[" right"] == names[" Right"] == " left"
    assert names["left"] == "right" and names[" Left"] == " right"


def test_a_split_without_a_word_to_mask(tokenizer, tmp_path):
    train, val = captioned(SENTENCES), captioned(["1 1 1 1"])
    with pytest.raises(SystemExit, match="the split holds a word to mask: val needs captions of 3"):
        triplets_in(tmp_path, train, val, tokenizer)


def test_triplets_are_used_again_only_when_a_run_resumes(tokenizer, tmp_path):
    """Otherwise they are found anew: data or flags may be others."""
    data, other = captioned(SENTENCES), captioned(["a red dog", "the blue dog"])
    first = triplets_in(tmp_path, data, data, tokenizer)
    again = triplets_in(tmp_path, data, data, tokenizer, "--num-concepts 2", checkpoint={})
    assert first[0] == again[0] and list(first[0]) == list(again[0])
    for one, two in zip(first[1:], again[1:]):
        assert written_out(one, tokenizer) == written_out(two, tokenizer)
        assert (one.tags.toarray() == two.tags.toarray()).all() and one.images is two.images
    assert len(triplets_in(tmp_path, data, data, tokenizer, "--num-concepts 2")[0]) == 2
    assert list(triplets_in(tmp_path, other, other, tokenizer)[0]) == ["dog", "blue", "red"]


# ------------------------------------------------------------------------- samples and batches

LEFT_RIGHT = ["a dog left of the cat", "a cat right of the dog", "the red dog"]
CONCEPTS = ["dog", "cat", "left", "right", "red"]
FLIP = {"left": "right", "right": "left"}
WHOLE = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0, seed=0)


@pytest.fixture
def photos(tmp_path):
    """Four photos, red on the left and blue on the right; the second has no caption"""
    data = common.CaptionData(common.ImageFiles())
    for n, captions in enumerate((LEFT_RIGHT[:2], [], LEFT_RIGHT[1:], LEFT_RIGHT[::2])):
        pixels = np.zeros((40, 40, 3), np.uint8)
        pixels[:, :20, 0] = pixels[:, 20:, 2] = 200 + 10 * n
        path = tmp_path / f"{n}.png"
        Image.fromarray(pixels).save(path)
        data.add(str(path), captions)
    return data


def samples_of(data, tokenizer):
    """-> the triplets of `data`, their samples, the function that makes batches"""
    tags = language.concept_labels(data, CONCEPTS)
    triplets = triplets_of(data, tokenizer, CONCEPTS, tags)
    return triplets, *icmlm.triplet_samples(triplets, tokenizer, CONCEPTS, WHOLE)


def test_samples_and_batches(tokenizer, photos):
    """[MASK] takes the place of the target; in a flipped photo left and right change places, in
    the caption and in the tags. Rows of a batch are as long as the longest."""
    triplets, samples, collate_fn = samples_of(photos, tokenizer)
    numbers = range(len(triplets))
    keys = [*numbers, *((epoch, n) for epoch in range(6) for n in numbers)]
    rows = [samples[key] for key in keys]
    batch, seen = collate_fn(rows), set()
    longest = max(len(row["tokens"]) for row in rows)
    assert batch["images"].shape == (len(rows), 16, 16, 3)
    assert batch["jitter"].shape == (len(rows), 4)
    for i, (key, row) in enumerate(zip(keys, rows)):
        training = isinstance(key, tuple)
        image_idx, tokens, position, concept = parts_of(triplets, key[1] if training else key)
        blue_left = bool(row["image"][8, 2, 2] > 100)
        assert row["flipped"] == blue_left and (training or not blue_left)
        assert row["image"].max() == 200 + 10 * image_idx
        flip = FLIP if blue_left else {}
        words = [flip.get(word, word) for word in tokenizer.convert_ids_to_tokens(tokens)]
        target, words[position] = words[position], "[MASK]"
        assert target == flip.get(CONCEPTS[concept], CONCEPTS[concept])
        seen.add((blue_left, target))
        expected = {"image_idx": image_idx, "mask_pos": position, "concept": concept}
        expected["target"] = tokenizer.convert_tokens_to_ids(target)
        assert {name: batch[name][i].item() for name in expected} == expected
        padding = longest - len(words)
        tokens = tokenizer.convert_ids_to_tokens(batch["tokens"][i].tolist())
        assert tokens == words + padding * ["[PAD]"]
        assert batch["attention_mask"][i].tolist() == len(words) * [True] + padding * [False]
        of_photo = " ".join(photos.captions_of(image_idx)).split()
        tags = {CONCEPTS[k] for k in batch["tags"][i].nonzero().flatten().tolist()}
        assert tags == {flip.get(word, word) for word in of_photo} & set(CONCEPTS)
    assert seen == {(flipped, word) for flipped in (False, True) for word in CONCEPTS}


# ----------------------------------------------------------------------- masked token prediction


class Says(nn.Module):
    """In place of the model: its head is a function (features, token features, mask, position)."""

    def __init__(self, head):
        super().__init__()
        self.backbone, self.head = FeaturesAsGiven(3), head
        self.tags = lambda features: features.new_zeros(len(features), len(CONCEPTS))


@pytest.fixture
def knowing_lm(lms, tokenizer):
    """A language model that knows a little: how often some words are"""
    model = load(lms["Bert"])[1]
    for n, word in enumerate("red on of cat a dog".split()):
        model.cls.predictions.bias[tokenizer.convert_tokens_to_ids(word)] += 4 + n
    return icmlm.FrozenLanguageModel(model, "off")


def validate(head, lm, triplets, tokenizer, **num_triplets):
    parts = "nouns", "nouns", "adjectives", "adjectives", "adjectives"
    flags = "--data x.jsonl --image-size 32 --workers 0 --amp off"
    concepts = dict(zip(CONCEPTS, parts))
    args, model = icmlm.get_args(flags.split()), Says(head).train()
    return icmlm.validate(model, lm, triplets, concepts, tokenizer, args, **num_triplets)


def test_ranks_of_ties_and_nans():
    """Equal logits share the mean of their ranks, so that a constant is no hit; NaN comes last."""
    nan = math.nan
    logits = [[1, 3, 2], [1, 1, 0], [0, 0, 0], [nan, nan, nan], [nan, 0, 1], [5, nan, 1]]
    ranks = icmlm.target_ranks(torch.tensor(logits), torch.tensor([2, 0, 1, 0, 0, 0]))
    assert ranks.tolist() == [1, 0.5, 1, 3, 3, 0]
    scores = icmlm.accuracies(ranks.numpy(), np.array(["noun"] * 6))
    assert scores["top1"] == pytest.approx(100 / 6)


@torch.no_grad()
def test_accuracies_written_out(knowing_lm, tokenizer, photos):
    """Tab. 1: top-1 and top-5, by part of speech, counted triplet by triplet"""
    triplets, _, _ = samples_of(photos, tokenizer)
    ranks, losses = {"all": [], "nouns": [], "adjectives": []}, []
    for n in range(len(triplets)):
        _, tokens, position, _ = parts_of(triplets, n)
        target, tokens[position] = tokens[position], tokenizer.mask_token_id
        row = torch.tensor([tokens])
        logits = knowing_lm.mlm_head(knowing_lm.encode(row, row > 0)[:, position])[0].tolist()
        rank = sum(value > logits[target] for value in logits)
        losses.append(math.log(sum(map(math.exp, logits))) - logits[target])  # Eqs. 6, 7
        noun = tokenizer.decode([target]) in ("dog", "cat")
        for part in ("all", "nouns" if noun else "adjectives"):
            ranks[part].append(rank)
    percent = lambda part, limit: 100 * np.mean([rank < limit for rank in ranks[part]])
    expected = {"top1": percent("all", 1), "top5": percent("all", 5)}
    expected |= {f"{part} top1": percent(part, 1) for part in ("adjectives", "nouns")}
    assert 0 < expected["top1"] < expected["top5"] < 100
    at_the_mask = lambda _, w, mask, pos: knowing_lm.mlm_head(w[torch.arange(len(w)), pos])
    results = validate(at_the_mask, knowing_lm, triplets, tokenizer)
    evenly = {"tp": pytest.approx(math.log(len(CONCEPTS)))}  # Eq. 2 with equal logits
    assert results["validation_loss"] == {"mlm": pytest.approx(np.mean(losses)), **evenly}
    names = "with the photo", "with another photo", "language model alone"
    expected = dict.fromkeys(names, pytest.approx(expected))
    assert results["masked_words"] == {"triplets": len(triplets), **expected}


def test_another_photo(knowing_lm, tokenizer, photos):
    """What the head knows without seeing: each caption beside the photo of another one"""
    triplets, _, _ = samples_of(photos, tokenizer)
    seen = []

    def head(features, *_):
        seen.append(features.mean((1, 2, 3)))
        return torch.zeros(len(features), len(VOCABULARY))

    for num_triplets, expected in ((None, len(triplets)), (5, 5)):
        results = validate(head, knowing_lm, triplets, tokenizer, num_triplets=num_triplets)
        scores = results["masked_words"]
        assert scores["triplets"] == expected
        assert scores["with the photo"] == scores["with another photo"]
        assert scores["with the photo"] != scores["language model alone"]
    own, other = seen[:2]
    assert len(own) == len(triplets) and len(own.unique()) == 3 and (own != other).all()
    assert icmlm.mismatched_index([4, 4]) == [0, 1]  # there is no other
    assert icmlm.mismatched_index([4, 4, 5, 5, 4]) == [2, 2, 4, 4, 2]


# --------------------------------------------------------------------------- recipes of App. F.1

COSINE = {0: 3e-2, 125_000: 1.5e-2 * (1 + math.sqrt(0.5)), 250_000: 1.5e-2, 500_000: 0}
STEPS = {0: 1e-4, 159_999: 1e-4, 160_000: 1e-5, 179_999: 1e-5, 180_000: 1e-6, 200_000: 1e-6}
VGG, WARM = "--arch vgg16_bn", "--arch vgg16_bn --head att-fc --init x.pth"


def arguments(flags):
    return icmlm.get_args(["--data", "coco", *flags.split()])


@pytest.mark.parametrize(
    "flags, optimizer, rates, warmup",
    [
        ("", torch.optim.SGD, COSINE, 0),
        ("--head att-fc --init x.pth", torch.optim.SGD, COSINE, 0),
        (VGG, torch.optim.RAdam, STEPS, 0),
        (WARM, torch.optim.RAdam, STEPS, 50_000),
        # In tfm, or in a backbone that sees nothing yet, there is nothing to warm up.
        ("--arch vgg16_bn --init x.pth", torch.optim.RAdam, STEPS, 0),
        ("--arch vgg16_bn --head att-fc", torch.optim.RAdam, STEPS, 0),
        (f"{VGG} --warmup-attention 0.5", torch.optim.RAdam, STEPS, 100_000),
        (f"{WARM} --warmup-attention 0", torch.optim.RAdam, STEPS, 0),
    ],
)
def test_appendix_f1(flags, optimizer, rates, warmup):
    """The learning rates by iteration, and for how many the backbone is frozen"""
    args = arguments(flags)
    assert args.iters == max(rates) and args.warmup_attention * args.iters == warmup
    parameter = nn.Parameter(torch.zeros(1))
    built = common.build_optimizer(args.optimizer, [parameter], args.lr, args.weight_decay)
    assert isinstance(built, optimizer)
    for iteration, rate in rates.items():
        factor = common.lr_factor(iteration, args.iters, args.warmup, args.steps)
        common.set_lr(built, factor)
        assert built.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-9, abs=1e-15)


def test_flags_that_are_given_win():
    """Over all that --arch decides; another batch scales the recipe's learning rate, not --lr."""
    args = arguments(f"{VGG} --lr 0.7 --batch-size 8 --iters 3 --heads 2 --lambda-tp 0")
    assert (args.lr, args.iters, args.heads, args.lambda_tp) == (0.7, 3, 2, 0)
    assert arguments("--batch-size 128").lr == pytest.approx(3e-2 / 4)
    assert arguments(f"{VGG} --batch-size 1792").lr == pytest.approx(2e-4)
    assert arguments("").proxy_triplets is None  # the paper's scores are of the whole split
    args = icmlm.get_args([])  # whereas without any flag nothing is downloaded
    assert (args.data, args.arch, args.lm) == ("shapes", "resnet18", "scratch")
    for recipe in ("demo", "small", "paper"):  # VGG-16 with one head is inferior [App. B]
        assert arguments(f"{VGG} --recipe {recipe}").heads == 12
        assert arguments(f"--recipe {recipe}").heads == 1


# ------------------------------------------------------------------------------ as a user runs it

MORE = {"tfm": [], "att-fc": ["--head", "att-fc", "--heads", 3, "--recipe", "demo", "--lr", 2e-3]}


@pytest.fixture(scope="module")
def trained(coco_folder, tiny_lm, tmp_path_factory):
    """{head: the folder of a run of 36 iterations on 24 scenes}"""
    folders = {head: tmp_path_factory.mktemp(head) for head in HEADS}
    for head, folder in folders.items():
        flags = ["--data", "coco", "--root", coco_folder, "--output", folder, *TINY]
        flags += [*OWN["icmlm"], "--lm", tiny_lm, "--iters", 36, "--lr", 0.1]
        flags += ["--crop-min", 0.9, "--colour-jitter", 0, "--num-concepts", 6]
        run_here(["icmlm.py", *flags, *MORE[head]])
    return folders


@both_heads
def test_both_heads_learn(head, trained):
    """24 pictures by heart: both losses of Eq. 8 fall."""
    rows = metrics(trained[head])
    for loss, fall in (("mlm", 0.25), ("tp", 0.05)):
        losses = [row[loss] for row in rows]
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - fall


@both_heads
@torch.no_grad()
def test_the_first_step_written_out(head, tiny, tiny_lm, coco_folder, tmp_path, monkeypatch):
    """Eqs. 2, 7 and 8 in loops over the batch, from the weights that the seed gives"""
    monkeypatch.setattr(icmlm, "DROPOUT", 0.0)
    command = tiny("icmlm", tmp_path, *f"--head {head} --lambda-tp 0.3 --iters 1 --seed 3".split())
    with torch.enable_grad():
        run_here(command)
    args, (tokenizer, pretrained) = icmlm.get_args(command[1:]), load(tiny_lm)
    lm = icmlm.FrozenLanguageModel(pretrained, "off")
    root, splits = str(coco_folder), ("train2017", "val2017")
    data = [common.caption_data("coco", root, split) for split in splits]
    concepts, triplets, _ = triplets_in(tmp_path, *data, tokenizer, "--data coco")
    torch.manual_seed(3)
    model = icmlm.ICMLM(args.arch, head, lm, len(concepts), args.layers, args.heads)
    model.to(memory_format=torch.channels_last)
    samples, collate_fn = icmlm.triplet_samples(triplets, tokenizer, concepts, args)
    order = np.random.default_rng([3, 0]).permutation(len(triplets))[:8]
    batch = collate_fn([samples[0, int(n)] for n in order])
    images = common.augment(batch["images"], batch["jitter"])
    token_features = lm.encode(batch["tokens"], batch["attention_mask"])
    both = model(images, token_features, batch["attention_mask"], batch["mask_pos"])
    mlm, tp = 0.0, 0.0
    for target, tags, *logits in zip(batch["target"], batch["tags"], *both):
        scores, tag_scores = (softmax(row.double().tolist()) for row in logits)
        mlm -= math.log(scores[target]) / 8  # Eq. 7
        for k in tags.nonzero().flatten():
            tp -= math.log(tag_scores[k]) / tags.sum().item() / 8  # Eq. 2
    [logged] = metrics(tmp_path)
    assert logged["mlm"] == pytest.approx(mlm, rel=1e-4)
    assert logged["tp"] == pytest.approx(tp, rel=1e-4)
    assert logged["loss"] == pytest.approx(mlm + 0.3 * tp, rel=1e-4)  # Eq. 8


def test_without_tag_prediction(tiny, tmp_path):
    """--lambda-tp 0: no tag head, one loss; --epochs counts passes over the triplets."""
    output = run_here(tiny("icmlm", tmp_path, "--lambda-tp", 0, "--epochs", 0.05))
    rows = metrics(tmp_path)
    assert all("tp" not in row and row["loss"] == row["mlm"] for row in rows)
    assert not any(name.startswith("tags.") for name in checkpoint_in(tmp_path)["model"])
    with np.load(tmp_path / "triplets.npz") as arrays:
        size = len(arrays["train_masked"])
    assert len(rows) == math.ceil(0.05 * size / 8) > 1
    assert f"24 photos (12 for validation), {size} triplets of " in output
    top1 = result(tmp_path)["masked_words"]["with the photo"]["top1"]
    assert f"masked token prediction, with the photo: top1 {top1:.1f}, top5" in output


def test_a_language_model_from_scratch(tiny, tmp_path):
    """It is kept in the output directory and used again when the run resumes."""
    command = tiny("icmlm", tmp_path, "--iters", 2, "--lm", "scratch", "--lm-iters", 4)
    run_here(command)
    weights = tmp_path / "language_model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert "resuming from iteration 2" in run_here(command)
    assert weights.stat().st_mtime_ns == before


def test_killed_around_the_switch_of_the_warm_up(tiny, trained, tmp_path):
    """SIGKILL before and after it: the same bits. Before it the backbone is that of --init, with
    its batch statistics."""
    init = trained["tfm"] / "backbone.pth"
    flags = ["--head", "att-fc", "--heads", 2, "--init", init, "--warmup-attention", 0.5]
    flags += ["--iters", 8, "--checkpoint-every", 2, "--validate-every", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(tiny("icmlm", whole, *flags))
    command = tiny("icmlm", killed, *flags)
    for iteration in (3, 5):
        kill_at(iteration, command)
    given, early = torch.load(init, weights_only=True), checkpoint_in(killed)
    model, name = early["model"], "head.att.1.norm_w.weight"
    assert early["iteration"] == 4 and (model[name] != 1).any()  # the attention is trained
    assert all(torch.equal(value, model[f"backbone.{name}"]) for name, value in given.items())
    kill_at(7, command)
    assert "resuming from iteration 6" in run_here(command)
    for name in ("backbone.pth", "result.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    for one, other in zip(metrics(whole), metrics(killed), strict=True):
        assert (one["iteration"], one["loss"]) == (other["iteration"], other["loss"])
        assert ("validation_mlm" in one) == (one["iteration"] in (3, 6))
    ended = torch.load(killed / "backbone.pth", weights_only=True)
    for name, value in given.items():
        assert "num_batches" in name or not torch.equal(value, ended[name])


def test_vgg16_with_several_heads(tiny, tmp_path):
    """The paper's other backbone: twelve heads, lambda 1, a learning rate that falls in steps"""
    flags = ["--arch", "vgg16_bn", "--head", "att-fc", "--image-size", 32, "--iters", 5]
    run_here(tiny("icmlm", tmp_path, *flags, "--lr", 1e-3))
    rows, model = metrics(tmp_path), checkpoint_in(tmp_path)["model"]
    for row in rows:
        assert row["loss"] == pytest.approx(row["mlm"] + row["tp"], rel=1e-4)
    assert [row["lr"] for row in rows] == pytest.approx([*(4 * [1e-3]), 1e-4])
    assert sum(name.endswith("sigma_x.weight") for name in model) == 12


def test_a_wrong_init_is_refused_before_a_language_model_is_made(tiny, trained, tmp_path):
    flags = "--init", trained["tfm"] / "backbone.pth", "--arch", "resnet50", "--lm", "/no/model"
    message = refusal(tiny("icmlm", tmp_path, *flags))
    assert "backbone.pth is no backbone.pth of a resnet50" in message


def test_learns_on_shapes(few_scenes, tmp_path, monkeypatch):
    """Half the run without flags, at 64 px: the photo tells words that the text does not."""
    few_scenes(10_000, 1000)
    monkeypatch.setitem(icmlm.RECIPES, "probe_images", 3 * (1000,))
    monkeypatch.setitem(icmlm.RECIPES, "proxy_triplets", 3 * (3000,))
    flags = ["--iters", 150, "--lm-iters", 200, "--image-size", 64, "--workers", 0]
    run_here(["icmlm.py", *flags, "--output", tmp_path])
    scores = result(tmp_path)
    words = scores["masked_words"]
    top1 = words["with the photo"]["top1"]
    assert top1 > words["with another photo"]["top1"] + 6
    assert top1 > words["language model alone"]["top1"] + 6
    assert scores["probe"]["trained"] > scores["probe"]["random"] + 3
