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
import torchvision
from conftest import (
    CPU,
    OWN,
    TINY,
    FeaturesAsGiven,
    captioned,
    checkpoint_in,
    finished,
    kill_at,
    metrics,
    refusal,
    result,
    run_here,
    run_script,
)
from PIL import Image
from torch import nn

import common
import icmlm
import language
import pictures
import shapes

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
NARROW = {**SIZES, "embedding_size": 8}  # than the layers, as of ELECTRA and ALBERT
DISTILLED = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
KINDS = {"Bert": SIZES, "Roberta": SIZES, "DistilBert": DISTILLED}
KINDS |= {"Electra": NARROW, "Albert": NARROW}


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """{kind: the folder of a language model of this kind with random weights}"""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer({word: n for n, word in enumerate(VOCABULARY)})
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names)
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")
        config = config(vocab_size=len(VOCABULARY), pad_token_id=0, **KINDS[kind])
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
    """-> tokens (B, T), visible (B, T); the sentences differ in length"""
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    visible = inputs["attention_mask"].bool()
    assert not visible.all()
    return inputs["input_ids"], visible


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_read_and_classify(kind, lms):
    """Sec. 3.2: W is the last layer before any head, without a look at the padding; given it, the
    pretrained token classification layer says what the model says. V are the input embeddings."""
    tokenizer, model = load(lms[kind])
    tokens, visible = batch_of(tokenizer, SENTENCES)
    expected = model(input_ids=tokens, attention_mask=visible.long()).logits
    names, encoder = list(model.state_dict()), model.base_model
    lm = icmlm.FrozenLanguageModel(model, "off")
    words = lm.read(tokens, visible)
    assert lm.width == words.size(2) == 16
    for row, mask, found in zip(tokens, visible, words):
        alone = model(input_ids=row[mask][None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(found[mask], alone, rtol=0, atol=1e-5)
    for position in range(tokens.size(1)):
        found = lm.classify(words[:, position])
        torch.testing.assert_close(found, expected[:, position], rtol=0, atol=2e-5)
    assert expected.std(-1).min() > 0.05  # the logits differ, so that equal ones say something
    assert torch.equal(model(input_ids=tokens, attention_mask=visible.long()).logits, expected)
    assert list(model.state_dict()) == names and model.base_model is encoder
    [table] = [model.state_dict()[name] for name in names if "word_embeddings.weight" in name]
    assert torch.equal(lm.vocabulary, table)
    assert table.size(1) == KINDS[kind].get("embedding_size", 16)


def test_read_builds_no_graph(lms):
    """Whatever its parameters want; what it gives can be trained on."""
    tokenizer, model = load(lms["Bert"])
    lm = icmlm.FrozenLanguageModel(model.requires_grad_(True), "off")
    words = lm.read(*batch_of(tokenizer, SENTENCES))
    assert not words.requires_grad and not words.is_inference()


@pytest.mark.parametrize("amp", ("bf16", "fp16"))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_once_as_at_each_use(kind, amp, lms):
    """W has the same bits as with float32 weights, which autocast rounds whenever they are used."""
    tokenizer, model = load(lms[kind])
    tokens, visible = batch_of(tokenizer, SENTENCES)
    with torch.no_grad(), common.autocast(CPU, amp):
        inputs = {"input_ids": tokens, "attention_mask": visible.long()}
        expected = model.base_model(**inputs).last_hidden_state.float()
    states = torch.randn(2, 16)
    logits = icmlm.FrozenLanguageModel(load(lms[kind])[1], "off").classify(states)
    lm = icmlm.FrozenLanguageModel(model, amp)
    assert {parameter.dtype for parameter in lm.encoder.parameters()} > {torch.float32}
    assert torch.equal(lm.read(tokens, visible), expected)
    assert torch.equal(lm.classify(states), logits)  # in float32


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

    tokens, visible = batch_of(tokenizer, SENTENCES)
    words, position = lm.read(tokens, visible), torch.tensor([2, 3, 1])
    logits, _ = model(torch.randn(3, 5, 2, 2), words, visible, position)
    F.cross_entropy(logits, torch.tensor([7, 8, 9])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), 0.05).step()
    assert all(parameter.grad is None for parameter in pretrained.parameters())
    assert not pretrained.training and not lm.classifier.training
    for name, value in pretrained.state_dict().items():
        assert torch.equal(value, before[name])


# -------------------------------------------------------------------------- heads, written out

ATTENTION_WIDTH = 7
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
STUB = SimpleNamespace(width=6, vocabulary=TABLE, classify=lambda states: 2 * states)


def build_model(head, lm=STUB, num_tags=0, layers=1, heads=1, dropout=0.0):
    """ICMLM of five channels without a backbone"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(5))
        sizes = layers, heads, ATTENTION_WIDTH, dropout
        return icmlm.ICMLM("stub", head, lm, num_tags, *sizes)


def padded_batch(dtype=torch.float64):
    """Features of 2 x 3 places, captions of 5, 2 and 4 tokens and what is not zero behind them"""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)
    visible = torch.arange(5) < torch.tensor([[5], [2], [4]])
    words = torch.where(visible[..., None], normal(3, 5, 6), 30.0)
    return normal(3, 5, 2, 3) + 0.3, words, visible, torch.tensor([3, 0, 2])


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
    return np.array([max(value, 0.0) for value in vector])


def softmax(scores):
    total = sum(math.exp(score) for score in scores)
    return np.array([math.exp(score) / total for score in scores])


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
        s.append(w["head.average.weight"][0] @ of_heads + w["head.average.bias"][0])
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
        merged = linear(of_heads, w, f"{name}.merge")  # Eq. 15
        vector = layer_norm(vector + merged, w, f"{name}.norm1")
        inner = linear(relu(linear(vector, w, f"{name}.linear1")), w, f"{name}.linear2")
        new.append(layer_norm(vector + inner, w, f"{name}.norm2"))
    return new, attention


def slow_tfm(w, photo, words, position, heads, layers):
    """-> what the masked place gives; how it looks at the photo, as a share of all places"""
    z = [linear(place, w, "head.project") for place in photo] + words
    for n in range(layers):
        z, attention = slow_encoder_layer(z, w, f"head.layers.{n}", heads)
    masked = len(photo) + position
    row = [sum(table[masked][m] for table in attention) / heads for m in range(len(photo))]
    assert sum(row) < 0.99  # the text has its share, so that dividing by the sum says something
    return 2 * z[masked], [value / sum(row) for value in row]


@both_heads
@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_heads_are_their_equations(head, heads, layers, float64):
    """att-fc: Eqs. 3-6, tfm: Eqs. 13-15, where padding is cut off; the maps are their weights."""
    model = build_model(head, heads=heads, layers=layers).double()
    random_weights(model, 0.5).eval()
    features, words, visible, position = padded_batch()
    with torch.no_grad():
        logits, maps = model.predict(features, words, visible, position, need_weights=True)
        assert torch.equal(model(features, words, visible, position)[0], logits)
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    assert "head.att.0.sigma_x.bias" not in w and "head.att.0.sigma_w.bias" not in w
    for i in range(3):
        photo, read = in_reading_order(features[i]), list(words[i, visible[i]].numpy())
        if head == "tfm":
            expected, p = slow_tfm(w, photo, read, int(position[i]), heads, layers)
        else:
            expected, p = slow_att_fc(w, photo, read, heads, layers)
        assert logits[i].tolist() == pytest.approx(list(expected), abs=1e-10)
        assert maps[i].flatten().tolist() == pytest.approx(p, abs=1e-10)
        assert max(p) > 1.1 / 6  # not even
    assert maps.shape == (3, 2, 3)


def test_averaging_begins_as_the_mean_of_the_heads():
    """Sec. 3.2: the layer that weighs the heads of att is learned from there."""
    average = build_model("att-fc", heads=4).head.average
    assert average.weight.tolist() == [4 * [0.25]] and average.bias.tolist() == [0]


@both_heads
def test_padding_changes_nothing(head, float64):
    """What stands in it, and how much there is: neither of the results nor of a gradient."""
    model = random_weights(build_model(head, heads=2, layers=2).double(), 0.5).eval()
    features, words, visible, position = padded_batch()
    features.requires_grad_()

    def results(words, visible):
        logits, maps = model.predict(features, words, visible, position, need_weights=True)
        [gradient] = torch.autograd.grad(logits.square().sum(), features)
        return logits, maps, gradient

    expected = results(words, visible)
    other = torch.where(visible[..., None], words, -1e3)
    wider = torch.cat([other, torch.full((3, 4, 6), 1e3)], 1)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    for found in (results(other, visible), results(wider, torch.cat([visible, hidden], 1))):
        for one, two in zip(expected, found):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    _, maps, _ = results(-words, visible)  # whereas the words say where to look
    assert (maps - expected[1]).abs().amax((1, 2)).min() > 1e-3


@both_heads
def test_only_tfm_names_the_word_from_the_text(head):
    """Sec. 3.2: in a photo that is the same everywhere, the text of att-fc changes nothing."""
    features, words, visible, position = padded_batch()
    model = random_weights(build_model(head).double(), 0.3).eval()
    features = features[:, :, :1, :1].expand(3, 5, 2, 3)
    one, two = (model(features, text, visible, position)[0] for text in (words, -words))
    assert torch.allclose(one, two, atol=1e-5) == (head == "att-fc")


def test_dropout_follows_attention_and_feed_forward():
    """App. E: with all dropped nothing but the two norms is left of a layer in training."""
    layer = random_weights(icmlm.EncoderLayer(6, 2, dropout=1.0), 0.3)
    z, visible = torch.randn(2, 4, 6), torch.ones(2, 4, dtype=torch.bool)
    training, evaluation = layer.train()(z, visible)[0], layer.eval()(z, visible)[0]
    torch.testing.assert_close(training, layer.norm2(layer.norm1(z)))
    assert not torch.allclose(training, evaluation)


@both_heads
def test_heads_in_half_precision(head):
    """Under bf16 they give what they give in float32, to its digits, and all gradients."""
    model = random_weights(build_model(head, num_tags=3, heads=2).float(), 0.3).eval()
    batch = padded_batch(torch.float32)
    exact = *model(*batch), model.predict(*batch, need_weights=True)[1]
    with torch.autocast("cpu", torch.bfloat16):
        rough = *model(*batch), model.predict(*batch, need_weights=True)[1]
    for one, two in zip(exact, rough):
        assert (one - two.float()).abs().max() < 0.1 * one.abs().max()
    sum(part.float().square().sum() for part in rough).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_tag_head_reads_the_features():
    """Fig. 2, module 5: tags are predicted from the photo alone."""
    model = random_weights(build_model("tfm", num_tags=9).double(), 0.3)
    features, words, visible, position = padded_batch()
    _, tags = model(features, words, visible, position)
    assert tags.shape == (3, 9)
    assert torch.equal(model(features, -words, visible, position)[1], tags)
    assert not torch.allclose(model(features + 1, words, visible, position)[1], tags)


# ------------------------------------------------------------------------------------ triplets


NEW_RUN = SimpleNamespace(checkpoint=None, folder=None, world=SimpleNamespace(is_main=False))


def triplets_in(folder, train, val, tokenizer, flags=""):
    """-> concepts, train, val of a run in `folder`"""
    args = icmlm.get_args([*flags.split(), "--cache", str(folder)])
    return icmlm.load_triplets(args, train, val, tokenizer, NEW_RUN)


def triplets_of(data, tokenizer, words, tags=None):
    """The triplets of data without looking for concepts"""
    arrays = icmlm.find_triplets(data, tokenizer, icmlm.maskable_tokens(tokenizer, words))
    return icmlm.Triplets(data.images, tags, **arrays)


def written_out(triplets, tokenizer):
    """(image, caption with the masked word in brackets) of each triplet"""
    rows = []
    for n in range(len(triplets)):
        image, tokens, position = triplets[n]
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
    assert written_out(val, tokenizer) == [(1, "the <cat> is red"), (1, "the cat is <red>")]
    for row, words in zip(train.tags.toarray(), ("red dog", "", "red dog cat surfboards")):
        assert {list(concepts)[k] for k in np.flatnonzero(row)} == set(words.split())


def test_only_whole_words_of_one_token_are_masked(tokenizer):
    """Neither a word of several tokens nor a piece of one; punctuation beside it does not matter"""
    words = "dog surfboard surf shirt t cat zebra red surfdog".split()
    maskable = icmlm.maskable_tokens(tokenizer, words)
    assert list(maskable.values()) == "dog surf shirt t cat red".split()
    assert tokenizer.convert_ids_to_tokens(list(maskable)) == list(maskable.values())
    data = captioned(["surf surfboard surfdog dogs dog"], ["zebra t-shirt, Cat."])
    assert written_out(triplets_of(data, tokenizer, words), tokenizer) == [
        (0, "<surf> surf ##board surf ##dog dog ##s dog"),
        (0, "surf surf ##board surf ##dog dog ##s <dog>"),
        (1, "[UNK] <t> - shirt , cat ."),
        (1, "[UNK] t - <shirt> , cat ."),
        (1, "[UNK] t - shirt , <cat> ."),
    ]


class Encoded(dict):
    word_ids = lambda self, n: self["words"][n]


def test_a_piece_with_the_id_of_a_concept_is_not_a_word():
    """In vocabularies whose words and pieces share ids; here "dogcat" is the pieces 5 and 6."""
    ids, words = [[2, 5, 6, 5], [2, 6, 5, 6]], [[None, 0, 0, 1], [None, 0, 1, 1]]
    tokenizer = lambda captions: Encoded(input_ids=ids, words=words)
    maskable, data = {5: "dog", 6: "cat", 2: "special"}, captioned(["dogcat dog", "cat dogcat"])
    found = icmlm.find_triplets(data, tokenizer, maskable)
    assert found["caption"].tolist() == [0, 1] and found["position"].tolist() == [3, 1]


def test_many_captions_in_the_order_of_their_images(tokenizer):
    """They are read in parts, here of a thousand. Numbers, few bytes each: VG has 13 million."""
    images, expected = [], []
    for n in range(1500):
        blues = [k * "blue " for k in range(n % 4)]
        images.append([f"a {blue}dog" for blue in blues])
        expected += [(n, f"a {blue}<dog>") for blue in blues]
    triplets = triplets_of(captioned(*images), tokenizer, ["dog", "red"])
    assert len(expected) > 2000 and written_out(triplets, tokenizer) == expected
    assert triplets.caption.itemsize + triplets.position.itemsize == 8
    assert triplets.tokens.itemsize == 4
    _, tokens, position = triplets[0]
    tokens[position] = 0
    assert triplets[0][1][position] != 0  # what is given out is a copy


def test_a_split_without_a_word_to_mask(tokenizer, tmp_path):
    train, val = captioned(SENTENCES), captioned(["1 1 1 1"])
    with pytest.raises(SystemExit, match="the split holds a word to mask: val needs captions of 3"):
        triplets_in(tmp_path, train, val, tokenizer)


def test_triplets_are_found_once(tokenizer, tmp_path, monkeypatch):
    """As long as data, concepts and language model are the same; whatever else the run changes"""
    built, count = [], language.count_concepts
    monkeypatch.setattr(language, "count_concepts", lambda *a: built.append(a) or count(*a))
    train, val = captioned(SENTENCES), captioned(SENTENCES, ["a red dog"])
    start = train, val, tokenizer
    first = triplets_in(tmp_path, *start)
    again = triplets_in(tmp_path, *start, "--lr 1 --iters 9 --workers 1")
    assert len(built) == 1 and first[0] == again[0]
    for one, other in zip(first[1:], again[1:]):
        assert written_out(one, tokenizer) == written_out(other, tokenizer)
        assert (one.tags.toarray() == other.tags.toarray()).all() and one.images is other.images
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["surfboard"])
    changed = [(*start, "--num-concepts 2"), (*start, "--pos nn"), (val, val, tokenizer)]
    sizes = []
    for other in (*changed, (train, train, tokenizer), (train, val, more)):
        sizes.append(len(triplets_in(tmp_path, *other)[0]))
        triplets_in(tmp_path, *start)
        assert len(built) == 1 + len(sizes)
    assert sizes[0] == 2 < sizes[1] < len(first[0])


# ------------------------------------------------------------------------- samples and batches

LEFT_RIGHT = ["a dog left of the cat", "a cat right of the dog", "the red dog"]
CONCEPTS = ["dog", "cat", "left", "right", "red"]
MIRROR = {"left": "right", "right": "left"}
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


def expected_words(triplet, mirrored, tokenizer):
    """-> the words of the caption as it is read with the photo, the one that is masked"""
    _, tokens, position = triplet
    words = tokenizer.convert_ids_to_tokens(tokens)
    if mirrored:
        words = [MIRROR.get(word, word) for word in words]
    return [*words[:position], "[MASK]", *words[position + 1 :]], words[position]


def test_sample(tokenizer, photos):
    """[MASK] takes the place of the target; left and right change places in a mirrored photo."""
    triplets, samples, _ = samples_of(photos, tokenizer)
    seen = set()
    for n in range(len(triplets)):
        for key in (n, *((epoch, n) for epoch in range(6))):
            sample = samples[key]
            blue_left = bool(sample["image"][8, 2, 2] > 100)
            assert sample["mirrored"] == blue_left and not (blue_left and key == n)
            words = tokenizer.convert_ids_to_tokens(sample["tokens"])
            target = tokenizer.convert_ids_to_tokens(sample["target"])
            assert (words, target) == expected_words(triplets[n], blue_left, tokenizer)
            assert words[sample["position"]] == "[MASK]"
            assert sample["index"] == triplets[n][0]
            assert sample["image"].max() == 200 + 10 * sample["index"]
            seen.add((blue_left, target))
    assert seen == {(mirrored, word) for mirrored in (False, True) for word in CONCEPTS}


def test_words_of_a_byte_level_vocabulary():
    """Of RoBERTa's tokens those are words that begin with a space."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator([*LEFT_RIGHT, "left right"], 400, 1, special_tokens=["<unk>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer)
    maskable = icmlm.maskable_tokens(tokenizer, ["left", "right"])
    assert [tokenizer.decode([token]) for token in maskable] == [" left", " right"]
    assert list(maskable.values()) == ["left", "right"]


def test_collate(tokenizer, photos):
    """Rows as long as the longest; the tags of each photo, mirrored as it is"""
    triplets, samples, together = samples_of(photos, tokenizer)
    rows = [samples[epoch, n] for n in range(len(triplets)) for epoch in range(3)]
    batch = together(rows)
    lengths = [len(row["tokens"]) for row in rows]
    assert len(set(lengths)) > 1 and {row["mirrored"] for row in rows} == {False, True}
    assert batch["images"].shape == (len(rows), 16, 16, 3)
    assert batch["jitter"].shape == (len(rows), 4)
    for i, (row, length) in enumerate(zip(rows, lengths)):
        padding = max(lengths) - length
        assert batch["tokens"][i].tolist() == [*row["tokens"], *(padding * [0])]
        assert batch["visible"][i].tolist() == length * [True] + padding * [False]
        for name in ("index", "position", "target"):
            assert batch[name][i] == row[name]
        words = " ".join(photos.captions_of(row["index"])).split()
        if row["mirrored"]:
            words = [MIRROR.get(word, word) for word in words]
        found = {CONCEPTS[k] for k in batch["tags"][i].nonzero().flatten().tolist()}
        assert found == set(words) & set(CONCEPTS)


# ----------------------------------------------------------------------- masked token prediction


class Says(nn.Module):
    """In place of the model: function (features, words, position) -> logits; it looks evenly."""

    def __init__(self, logits):
        super().__init__()
        self.backbone, self.logits = FeaturesAsGiven(3), logits
        self.tags = lambda features: features.new_zeros(len(features), len(CONCEPTS))

    def predict(self, features, words, visible, position, need_weights=False):
        attention = torch.full((len(features), 2, 3), 1 / 6) if need_weights else None
        return self.logits(features, words, position), attention


@pytest.fixture
def knowing_lm(lms, tokenizer):
    """A language model that knows a little: how often some words are"""
    model = load(lms["Bert"])[1]
    for n, word in enumerate("red on of cat a dog".split()):
        model.cls.predictions.bias[tokenizer.convert_tokens_to_ids(word)] += 4 + n
    return icmlm.FrozenLanguageModel(model, "off")


def validate(logits, lm, triplets, tokenizer, flags="--data x.jsonl"):
    parts = "nouns", "nouns", "adjectives", "adjectives", "adjectives"
    args = icmlm.get_args([*flags.split(), "--image-size", "32", "--workers", "0", "--amp", "off"])
    concepts = dict(zip(CONCEPTS, parts))
    return icmlm.validate(Says(logits).train(), lm, triplets, concepts, tokenizer, args, CPU)


def test_ranks_of_ties_and_nans():
    """Equal logits share the mean of their places, so that a constant is no hit; NaN comes last."""
    nan = math.nan
    logits = [[1, 3, 2], [1, 1, 0], [0, 0, 0], [nan, nan, nan], [nan, 0, 1], [5, nan, 1]]
    ranks = icmlm.ranks(torch.tensor(logits), torch.tensor([2, 0, 1, 0, 0, 0]))
    assert ranks.tolist() == [1, 0.5, 1, 3, 3, 0]
    scores = icmlm.accuracies(ranks.numpy(), np.array(["noun"] * 6))
    assert scores["top1"] == pytest.approx(100 / 6)


@torch.no_grad()
def test_accuracies_written_out(knowing_lm, tokenizer, photos):
    """Tab. 1: top-1 and top-5, by part of speech, counted triplet by triplet"""
    triplets, _, _ = samples_of(photos, tokenizer)
    ranks, losses = {"all": [], "nouns": [], "adjectives": []}, []
    for n in range(len(triplets)):
        _, tokens, position = triplets[n]
        target, tokens[position] = int(tokens[position]), tokenizer.mask_token_id
        row = torch.from_numpy(tokens)[None].long()
        logits = knowing_lm.classify(knowing_lm.read(row, row > 0)[:, position])[0].tolist()
        rank = sum(value > logits[target] for value in logits)
        losses.append(math.log(sum(map(math.exp, logits))) - logits[target])  # Eqs. 6, 7
        noun = tokenizer.decode([target]) in ("dog", "cat")
        for part in ("all", "nouns" if noun else "adjectives"):
            ranks[part].append(rank)
    share = lambda part, limit: 100 * np.mean([rank < limit for rank in ranks[part]])
    expected = {"top1": share("all", 1), "top5": share("all", 5)}
    expected |= {f"{part} top1": share(part, 1) for part in ("adjectives", "nouns")}
    assert 0 < expected["top1"] < expected["top5"] < 100
    at_the_mask = lambda _, words, m: knowing_lm.classify(words[torch.arange(len(words)), m])
    result = validate(at_the_mask, knowing_lm, triplets, tokenizer)
    evenly = {"tp": pytest.approx(math.log(len(CONCEPTS)))}  # Eq. 2 with equal logits
    assert result["validation_loss"] == {"mlm": pytest.approx(np.mean(losses)), **evenly}
    found = result["masked_words"]
    expected = dict.fromkeys(icmlm.PREDICTED, pytest.approx(expected))
    assert found == {"triplets": len(triplets), **expected}


def test_another_photo(knowing_lm, tokenizer, photos):
    """What the head knows without seeing: each caption beside the photo of another one"""
    triplets, _, _ = samples_of(photos, tokenizer)
    seen = []

    def logits(features, words, _):
        seen.append(features.mean((1, 2, 3)))
        return torch.zeros(len(words), len(VOCABULARY))

    found = validate(logits, knowing_lm, triplets, tokenizer)["masked_words"]
    assert found["with the photo"] == found["with another photo"] != found["language model alone"]
    own, other = seen
    assert len(own) == len(triplets) and len(own.unique()) == 3 and (own != other).all()
    few = "--data x.jsonl --proxy-triplets 5"
    assert validate(logits, knowing_lm, triplets, tokenizer, few)["masked_words"]["triplets"] == 5


def test_the_next_sample_of_another_photo():
    """Itself, if there is none"""
    assert icmlm.another_photo([4, 4]) == [0, 1]
    assert icmlm.another_photo([4, 4, 5, 5, 4]) == [2, 2, 4, 4, 2]


def pixel_count(attention, box, side=600):
    """How much of a map is inside a box, by the pixels of its enlargement"""
    height, width = (side // cells for cells in attention.shape)
    pixels = attention.repeat(height, 0).repeat(width, 1) / (height * width)
    (left, top, right, bottom), place = box, (np.arange(side) + 0.5) / side
    columns, rows = (left < place) & (place < right), (top < place) & (place < bottom)
    return pixels[rows][:, columns].sum()


def test_attention_inside_boxes():
    """Of the object that a word names by its shape or colour; words that name two do not count."""
    rng, scenes, words, maps, expected = np.random.default_rng(0), [], [], [], []
    for scene in range(90):
        objects = shapes.objects_of(scene)
        word = objects[-1][scene % 2]
        attention = rng.random(rng.integers(1, 7, 2)) ** 3
        attention /= attention.sum()
        found = icmlm.attention_inside_boxes([scene], [word], [attention])
        scenes, words, maps = [*scenes, scene], [*words, word], [*maps, attention]
        if sum(word in o for o in objects) > 1:
            assert found is None
            continue
        inside, area = pixel_count(attention, objects[-1].box), (2 * objects[-1].radius) ** 2
        expected.append((100 * inside, 100 * area))
        assert found["inside"] == pytest.approx(100 * inside, abs=0.5)
        assert found["area"] == pytest.approx(100 * area)
    found = icmlm.attention_inside_boxes([*scenes, 0], [*words, "left"], [*maps, maps[0]])
    inside, area = np.mean(expected, 0)
    assert found["inside"] == pytest.approx(inside, abs=0.1)
    assert found["area"] == pytest.approx(area) and found["words"] == len(expected)
    assert 60 < len(expected) < 90


def test_validation_on_shapes_says_where_it_looks(knowing_lm, tokenizer):
    """For the scene and the word of each triplet; here the model looks evenly."""
    data, areas = common.CaptionData(shapes.ShapeImages()), []
    for scene in range(80):
        objects = shapes.objects_of(scene)
        colour = objects[0].colour
        if len(objects) == 1 and colour in ("red", "blue"):
            data.add(scene, [f"the {colour} dog"])
            areas += [100 * (2 * objects[0].radius) ** 2] * (colour == "red")
    triplets, _, _ = samples_of(data, tokenizer)
    logits = lambda features, words, _: torch.zeros(len(words), len(VOCABULARY))
    found = validate(logits, knowing_lm, triplets, tokenizer, "--data shapes")["attention"]
    assert found["words"] == len(areas) > 2 and len(data) > len(areas)
    assert found["inside"] == pytest.approx(np.mean(areas), rel=1e-5)
    assert found["area"] == pytest.approx(np.mean(areas))


# --------------------------------------------------------------------------- recipes of App. F.1

COSINE = {0: 3e-2, 125_000: 1.5e-2 * (1 + math.sqrt(0.5)), 250_000: 1.5e-2, 500_000: 0}
STEPS = {0: 1e-4, 159_999: 1e-4, 160_000: 1e-5, 179_999: 1e-5, 180_000: 1e-6, 200_000: 1e-6}
VGG, WARM = "--arch vgg16", "--arch vgg16 --head att-fc --init x.pth"


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
        ("--arch vgg16 --init x.pth", torch.optim.RAdam, STEPS, 0),
        ("--arch vgg16 --head att-fc", torch.optim.RAdam, STEPS, 0),
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
    """Over all that --arch decides; another batch scales its learning rate."""
    args = arguments(f"{VGG} --lr 0.7 --iters 3 --steps 0.3 0.6 --heads 2 --lambda-tp 0")
    values = args.lr, args.iters, args.steps, args.heads, args.lambda_tp
    assert values == (0.7, 3, [0.3, 0.6], 2, 0)
    assert arguments("--batch-size 128").lr == pytest.approx(3e-2 / 4)
    assert arguments(f"{VGG} --batch-size 1792").lr == pytest.approx(2e-4)
    assert not arguments(f"{VGG} --optimizer sgd --lr 0.1").steps
    args = icmlm.get_args([])  # whereas without any flag nothing is downloaded
    assert (args.data, args.arch, args.lm) == ("shapes", "resnet18", "scratch")


# ------------------------------------------------------------------------------ as a user runs it

MORE = {
    "tfm": ["--dropout", 0],
    "att-fc": ["--head", "att-fc", "--heads", 3, "--optimizer", "radam", "--lr", 2e-3],
}


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
def test_the_first_step_written_out(head, tiny, tiny_lm, coco_folder, tmp_path):
    """Eqs. 2, 7 and 8 in loops over the batch, from the weights that the seed gives"""
    flags = ["--head", head, "--lambda-tp", 0.3, "--dropout", 0, "--iters", 1, "--seed", 3]
    command = tiny("icmlm", tmp_path, *flags)
    with torch.enable_grad():
        run_here(command)
    args, (tokenizer, pretrained) = icmlm.get_args(command[1:]), load(tiny_lm)
    lm = icmlm.FrozenLanguageModel(pretrained, "off")
    root, splits = str(coco_folder), ("train2017", "val2017")
    data = [common.caption_data("coco", root, split) for split in splits]
    concepts, triplets, _ = icmlm.load_triplets(args, *data, tokenizer, NEW_RUN)
    torch.manual_seed(3)
    model = icmlm.build_model(args, lm, len(concepts)).to(memory_format=torch.channels_last)
    samples, together = icmlm.triplet_samples(triplets, tokenizer, concepts, args)
    order = np.random.default_rng([3, 0]).permutation(len(triplets))[:8]
    batch = together([samples[0, int(n)] for n in order])
    images = common.augment(batch["images"], batch["jitter"])
    words = lm.read(batch["tokens"], batch["visible"])
    both = model(images, words, batch["visible"], batch["position"])
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
    flags = "--lambda-tp", 0, "--epochs", 0.05, "--cache", tmp_path
    output = run_here(tiny("icmlm", tmp_path, *flags))
    rows = metrics(tmp_path)
    assert all("tp" not in row and row["loss"] == row["mlm"] for row in rows)
    assert not any(name.startswith("tags.") for name in checkpoint_in(tmp_path)["model"])
    with np.load(*tmp_path.glob("triplets-*.npz")) as arrays:
        size = len(arrays["train_caption"])
    assert len(rows) == math.ceil(0.05 * size / 8) > 1
    assert f"24 photos (12 for validation), {size} triplets of " in output
    top1 = result(tmp_path)["masked_words"]["with the photo"]["top1"]
    assert f"masked token prediction, with the photo: top1 {top1:.1f}, top5" in output


def test_a_language_model_from_scratch(tiny, coco_folder, tmp_path):
    """It is kept in the output folder, found there when the run goes on, and by --explain."""
    command = tiny("icmlm", tmp_path, "--iters", 2, "--lm", "scratch", "--lm-iters", 4)
    run_here(command)
    weights = tmp_path / "language_model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    (tmp_path / "result.json").unlink()
    assert "going on from iteration 2" in run_here(command)
    assert weights.stat().st_mtime_ns == before
    model, lm, *_ = icmlm.load_icmlm(tmp_path / "checkpoint.pth", None, "off", CPU)
    assert checkpoint_in(tmp_path)["model"].keys() == model.state_dict().keys()
    _, pretrained = load(tmp_path / "language_model")
    assert torch.equal(lm.vocabulary, pretrained.get_input_embeddings().weight)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_language_model_in_half_precision(dtype, tiny, tiny_lm, tmp_path):
    """Stored so, it computes in float32: a whole run ends with its scores."""
    tokenizer, model = load(tiny_lm)
    for part in (tokenizer, model.to(dtype)):
        part.save_pretrained(tmp_path / "lm")
    assert {p.dtype for p in load(tmp_path / "lm")[1].parameters()} == {torch.float32}
    run_here(tiny("icmlm", tmp_path / "run", "--iters", 2, "--lm", tmp_path / "lm"))
    assert "masked_words" in result(tmp_path / "run")


def test_killed_around_the_switch_of_the_warm_up(tiny, trained, tmp_path):
    """SIGKILL before and behind it: the same bits. Before it the backbone is that of --init,
    with its batch statistics; the probe does not move them either."""
    init = trained["tfm"] / "backbone.pth"
    flags = ["--head", "att-fc", "--heads", 2, "--init", init, "--warmup-attention", 0.5]
    flags += ["--iters", 8, "--checkpoint-every", 2, "--probe-every", 3]
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
    assert "going on from iteration 6" in run_here(command)
    for name in ("backbone.pth", "backbone_best.pth", "result.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    for one, other in zip(metrics(whole), metrics(killed), strict=True):
        assert (one["iteration"], one["loss"]) == (other["iteration"], other["loss"])
    ended = torch.load(killed / "backbone.pth", weights_only=True)
    for name, value in given.items():
        assert "num_batches" in name or not torch.equal(value, ended[name])


def test_vgg16_with_several_heads(tiny, tmp_path):
    """The paper's other backbone: twelve heads, lambda 1, a learning rate that falls in steps"""
    flags = ["--arch", "vgg16", "--head", "att-fc", "--image-size", 32, "--iters", 5]
    run_here(tiny("icmlm", tmp_path, *flags, "--lr", 1e-3, "--proxy-triplets", 5))
    rows, model = metrics(tmp_path), checkpoint_in(tmp_path)["model"]
    for row in rows:
        assert row["loss"] == pytest.approx(row["mlm"] + row["tp"], rel=1e-4)
    assert [row["lr"] for row in rows] == pytest.approx([*(4 * [1e-3]), 1e-4])
    assert sum(name.endswith("sigma_x.weight") for name in model) == 12
    state = torch.load(tmp_path / "backbone.pth", weights_only=True)
    wrong = torchvision.models.vgg16_bn().load_state_dict(state, strict=False)
    assert {key.split(".")[0] for key in wrong.missing_keys} == {"classifier"}
    assert not wrong.unexpected_keys


def test_a_wrong_init_is_refused_before_a_language_model_is_made(tiny, trained, tmp_path):
    flags = "--init", trained["tfm"] / "backbone.pth", "--arch", "resnet50", "--lm", "/no/model"
    message = refusal(tiny("icmlm", tmp_path, *flags))
    assert "backbone.pth is a resnet18, not --arch resnet50" in message


def test_flickr8k(real_data, tiny_lm, tmp_path):
    """Concepts of real captions: nouns and adjectives are told apart, and both are masked."""
    tokenizer, root = load(tiny_lm)[0], str(real_data / "flickr8k")
    train, val = (common.caption_data("coco", root, split, 0.1) for split in ("train", "val"))
    concepts, _, triplets = triplets_in(tmp_path, train, val, tokenizer)
    assert concepts["dog"] == "nouns" and concepts["red"] == "adjectives"
    rows = " ".join(row for _, row in written_out(triplets, tokenizer))
    assert "the" not in concepts and "<red>" in rows


# ------------------------------------------------------------------------------------ --explain

ONLY = "these words of the caption can be masked:"


@pytest.mark.parametrize(
    "caption, word, message",
    [
        ("the red dog runs", "cat", f'"cat" is not a word of the caption; {ONLY} red, dog'),
        ("the red dog", "do", '"do" is not a word of the caption'),
        ("a red dogs", "dog", f'"dog" is not a word of the caption; {ONLY} red'),
        ("a surfboard", "surfboard", "is 2 tokens of the language model, surf ##board, and only"),
        ("the dog runs", "runs", '"runs" is not among the words that were trained'),
        ("the cat is blue", "blue", f"{ONLY} none"),
        ("red red dog", "the", f"{ONLY} red, dog"),  # each is named once
    ],
)
def test_words_that_cannot_be_masked(caption, word, message, tokenizer):
    encoded = tokenizer(caption, return_tensors="pt")
    maskable = icmlm.maskable_tokens(tokenizer, ["dog", "red", "surfboard"])
    with pytest.raises(SystemExit) as stopped:
        icmlm.find_word(tokenizer, encoded, word, maskable)
    assert message in str(stopped.value)


def test_where_a_word_stands(tokenizer):
    """Where it stands first by itself, not as a part of another word"""
    captions = {"the red dog": 3, "dogs, dog": 4, "a dog, a dog": 2, "surfdog dog.": 3}
    for caption, position in captions.items():
        encoded = tokenizer(caption, return_tensors="pt")
        maskable = icmlm.maskable_tokens(tokenizer, ["dog"])
        assert icmlm.find_word(tokenizer, encoded, "Dog", maskable) == position


@pytest.fixture
def example(trained, coco_folder):
    """-> the first photo, a caption of it, the words of that one that can be masked"""
    concepts = checkpoint_in(trained["tfm"])["concepts"]
    for caption in shapes.describe(0, shapes.objects_of(0)):
        found = dict.fromkeys(language.words_of(caption))
        words = [word for word in found if word in concepts]
        if len(words) > 1:
            return coco_folder / "train2017" / f"{0:012d}.jpg", caption, words


def explain(photo, caption, words, weights, output, *flags):
    use = "--explain", photo, "--caption", caption, "--word", *words, "--weights", weights
    return ["icmlm.py", *use, "--output", output, "--amp", "off", *flags]


def five_best(tokenizer, logits):
    """'red 81.2%, blue 3.4%, ...'"""
    p = softmax(logits.double().tolist())
    best = sorted(range(len(p)), key=lambda token: -p[token])[:5]
    return ", ".join(f"{tokenizer.decode([token])} {100 * p[token]:.1f}%" for token in best)


@both_heads
@torch.no_grad()
def test_explain(head, trained, example, tiny_lm, tmp_path, monkeypatch):
    """Five guesses with the photo and by the language model alone, and where the head looks, for
    each word as for this word alone
    """
    folder, (photo, caption, several), drawn = trained[head], example, []
    word = several[0]
    draw = pictures.draw_attention
    monkeypatch.setattr(pictures, "draw_attention", lambda *a: drawn.append(a) or draw(*a))
    weights = folder / "checkpoint.pth"
    use = explain(photo, caption, [word], weights, tmp_path)
    masked, seen, alone, path = run_here(use).splitlines()

    model, lm, tokenizer, *_ = icmlm.load_icmlm(folder / "checkpoint.pth", None, "off", CPU)
    kept, (_, pretrained) = checkpoint_in(folder)["model"], load(tiny_lm)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    inputs = tokenizer(caption.replace(word, "[MASK]", 1), return_tensors="pt")
    tokens, visible = inputs["input_ids"], inputs["attention_mask"].bool()
    position = (tokens == tokenizer.mask_token_id).nonzero()[0, 1:]
    images, whole = common.ImageFiles([str(photo)]), common.centre_crop(1.0)
    [pixels] = common.read_crops(images, 0, [whole], 64)
    features = model.backbone(common.augment(torch.from_numpy(pixels)[None]))
    words = lm.read(tokens, visible)
    logits, maps = model.predict(features, words, visible, position, need_weights=True)
    assert masked == f"{tokenizer.decode(tokens[0])}  ({word})"
    assert seen == f"with the photo: {five_best(tokenizer, logits[0])}"
    by_text = pretrained(**inputs).logits[0, int(position)]
    assert alone == f"without it: {five_best(tokenizer, by_text)}"
    assert seen.split(": ")[1] != alone.split(": ")[1]
    picture = tmp_path / "explained" / f"{photo.stem}_{word}.png"
    assert path == f"the attention is in {picture}"
    [(_, text, [(named, attention)], _)] = drawn
    assert (text, named) == (caption, word) and attention.shape == (2, 2)
    torch.testing.assert_close(attention, maps[0])
    with Image.open(picture) as image:
        assert 350 < image.width < 600 and len(image.getcolors(1 << 20)) > 1000

    *lines, _ = run_here(explain(photo, caption, several, weights, tmp_path)).splitlines()
    assert lines[:3] == [masked, seen, alone] and len(lines) == 3 * len(several)
    maps = dict(drawn[1][2])
    assert list(maps) == several
    torch.testing.assert_close(maps[word], attention)


@both_heads
def test_explain_split(head, trained, tmp_path):
    """Figs. 4, 5: photos of the validation split, each word that can be masked, and what it is"""
    use = "--explain-split", 2, "--weights", trained[head] / "checkpoint.pth"
    lines = run_here(["icmlm.py", *use, "--output", tmp_path, "--workers", 0]).splitlines()
    pictures = sorted((tmp_path / "explained").iterdir())
    masked = [line for line in lines if "[MASK]" in line]
    assert len(pictures) == 2 and len(masked) == sum("with the photo:" in line for line in lines)
    for picture in pictures:
        _, _, *words = picture.stem.split("_")
        assert words and all(any(line.endswith(f"({word})") for line in masked) for word in words)


def test_explain_refuses(trained, example, lms, tmp_path):
    """One line each, and no picture"""
    folder, (photo, caption, words) = trained["tfm"], example
    listed = ", ".join(words)
    checkpoint, backbone = folder / "checkpoint.pth", folder / "backbone.pth"
    broken, foreign = tmp_path / "broken.jpg", tmp_path / "virtex.pth"
    broken.write_bytes(photo.read_bytes()[:300])
    torch.save({"script": "virtex", "model": {}}, foreign)
    no_checkpoint, long = "is no checkpoint.pth of icmlm.py", 30 * f"{words[0]} red square "
    for arguments, message in [
        ((photo, caption, ["surfboard"], checkpoint), f"{ONLY} {listed}"),
        ((photo, long, words, checkpoint), "tokens, more than the 64 of the language model"),
        ((broken, caption, words, checkpoint), "broken.jpg cannot be decoded"),
        ((tmp_path / "none.jpg", caption, words, checkpoint), "none.jpg: check the path"),
        ((photo, caption, words, backbone), no_checkpoint),
        ((photo, caption, words, foreign), no_checkpoint),
    ]:  # fmt: skip
        assert message in refusal(explain(*arguments, tmp_path))
    for head in HEADS:
        use = explain(photo, caption, words, trained[head] / "checkpoint.pth", tmp_path)
        assert "and the --lm that it was trained with" in refusal([*use, "--lm", lms["Bert"]])
    assert not (tmp_path / "explained").exists()


def test_learns_on_shapes(tmp_path):
    """Half the run without flags, at 64 px: the photo tells words that the text does not."""
    flags = ["--iters", 150, "--lm-iters", 200, "--image-size", 64, "--fraction", 0.5]
    flags += ["--probe-images", 1000, "--proxy-triplets", 3000]
    finished(run_script("icmlm.py", *flags, "--output", tmp_path))
    found = result(tmp_path)
    top1 = {name: found["masked_words"][name]["top1"] for name in icmlm.PREDICTED}
    assert top1["with the photo"] > top1["with another photo"] + 6
    assert top1["with the photo"] > top1["language model alone"] + 6
    assert found["probe"]["trained"] > found["probe"]["random"] + 3
    assert found["attention"]["words"] > 1000 and 0 < found["attention"]["inside"] < 100
