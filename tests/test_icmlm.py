"""icmlm.py, piece by piece, against the paper written out slowly: heads, the frozen language model, triplets, scores, recipes.

Everything here runs in this process on tiny sizes; the script as a user starts it is tested elsewhere. In most tests
the backbone is `FeaturesAsGiven`: what is passed as images are the features, so that a test decides what the heads see.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FeaturesAsGiven
from PIL import Image
from torch import nn

import common
import icmlm
import language
import shapes

CPU = torch.device("cpu")
ALONE = common.World(0, 1, CPU)


@pytest.fixture(autouse=True)
def same_weights():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def float64(monkeypatch):
    """Softmax and log-sum-exp are computed by .float(), against bf16: here it leaves double as it is."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(torch.float32))


# ------------------------------------------------------------------------------------------ tiny language models

WORDS = ["a", "the", "dog", "cat", "red", "blue", "surf", "left", "right", "on", "of", "is", "runs", "grass", "t", "shirt", "-", ",", ".", "1"]
PIECES = ["##board", "##s", "##dog", "##cat", "##red", "##c", "##a", "##t"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES]
SENTENCES = ["the red dog runs on grass", "a cat is on the left of a surfboard", "the dog is blue", "a red shirt"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
KINDS = {  # of ELECTRA and ALBERT the embeddings are narrower than the layers
    "Bert": SIZES,
    "Roberta": SIZES,
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 64},
    "Electra": {**SIZES, "embedding_size": 8},
    "Albert": {**SIZES, "embedding_size": 8},
}


def random_weights(model, scale=0.3):
    """Every parameter random, so that a bias or a norm that is forgotten shows; the gains of norms stay around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def lm_folder(tmp_path_factory):
    """-> function kind -> the folder of a masked language model of that kind with a WordPiece tokenizer"""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            pieces = BertWordPieceTokenizer(vocab={word: n for n, word in enumerate(VOCABULARY)})
            names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
            transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names).save_pretrained(folder)
            config = getattr(transformers, f"{kind}Config")(vocab_size=len(VOCABULARY), pad_token_id=0, **KINDS[kind])
            torch.manual_seed(0)
            random_weights(getattr(transformers, f"{kind}ForMaskedLM")(config)).save_pretrained(folder)
            made[kind] = str(folder)
        return made[kind]

    return make


def load(folder, **kwargs):
    """-> tokenizer, model as icmlm.py gets them"""
    return language.language_model(SimpleNamespace(lm=folder), None, None, CPU, **kwargs)


@pytest.fixture(scope="module")
def tokenizer(lm_folder):
    return load(lm_folder("Bert"))[0]


def batch_of(tokenizer, sentences=SENTENCES):
    """-> tokens (B, T), visible (B, T); the sentences differ in length"""
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    visible = inputs["attention_mask"].bool()
    assert not visible.all() and visible.any(1).all()
    return inputs["input_ids"], visible


# ------------------------------------------------------------------------------------------ the frozen language model


@pytest.mark.parametrize("kind", KINDS)
def test_read_is_the_last_hidden_state(kind, lm_folder):
    """Sec. 3.2: W = psi(t_1 ... t_T), the last layer before any head; padding is hidden from it."""
    tokenizer, model = load(lm_folder(kind))
    lm = icmlm.FrozenLanguageModel(model, "off")
    tokens, visible = batch_of(tokenizer)
    words = lm.read(tokens, visible)
    assert lm.width == words.size(2) == 16 and lm.vocabulary.shape == (len(VOCABULARY), KINDS[kind].get("embedding_size", 16))
    for row, mask, found in zip(tokens, visible, words):
        with torch.no_grad():
            alone = model(input_ids=row[mask][None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(found[mask], alone, rtol=0, atol=1e-5)


def test_read_builds_no_graph_and_can_be_saved_for_backward(lm_folder):
    """DESIGN 7: the language model runs in inference mode, whatever its parameters want; a head can train on what it read."""
    tokenizer, model = load(lm_folder("Bert"))
    model.requires_grad_(True)
    modes = []
    model.bert.encoder.register_forward_hook(lambda *_: modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())))
    words = icmlm.FrozenLanguageModel(model, "off").read(*batch_of(tokenizer))
    assert modes == [(True, False)]
    assert not words.requires_grad and words.grad_fn is None and not words.is_inference()
    head = nn.Linear(16, 3)
    head(words).sum().backward()
    torch.testing.assert_close(head.weight.grad[0], words.sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_score_of_tfm_is_the_pretrained_token_classification_layer(kind, lm_folder):
    """Sec. 3.2: given its own hidden states, `score` says what the whole masked language model says, which stays as it was."""
    tokenizer, model = load(lm_folder(kind))
    tokens, visible = batch_of(tokenizer)
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=visible.long()).logits
        names, base = list(model.state_dict()), model.base_model
        lm = icmlm.FrozenLanguageModel(model, "off")
        words = lm.read(tokens, visible)
        for position in range(tokens.size(1)):
            torch.testing.assert_close(lm.score(words[:, position], "tfm"), expected[:, position], rtol=0, atol=2e-5)
        assert torch.equal(model(input_ids=tokens, attention_mask=visible.long()).logits, expected)
    assert list(model.state_dict()) == names and model.base_model is base
    assert expected.std(-1).min() > 0.05  # the logits differ, so that equal ones say something


@pytest.mark.parametrize("kind", KINDS)
def test_score_of_att_fc_is_equation_6(kind, lm_folder):
    """Eq. 6: v_k = fc(x)^T V_k, one dot product after the other, V the input embeddings (of their own width)."""
    _, model = load(lm_folder(kind))
    lm = icmlm.FrozenLanguageModel(model, "off")
    table = next(value for name, value in model.state_dict().items() if name.endswith("word_embeddings.weight")).double()
    found = random_tensor(3, lm.vocabulary.size(1)).to(torch.float32)
    logits = lm.score(found, "att-fc")
    assert logits.shape == (3, len(VOCABULARY))
    for row, scores in zip(found.tolist(), logits.tolist()):
        expected = [sum(a * b for a, b in zip(row, vector)) for vector in table.tolist()]
        assert scores == pytest.approx(expected, abs=1e-5)


def test_an_encoder_alone_is_refused_by_what_it_lacks(lm_folder, tmp_path):
    """tfm needs the pretrained token classification layer: a saved encoder is named with its missing weights; clusters need none."""
    tokenizer, model = load(lm_folder("Bert"))
    model.base_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        load(str(tmp_path))
    message = str(stopped.value)
    assert str(tmp_path) in message and "not a whole masked language model" in message and "cls.predictions" in message and "\n" not in message
    _, encoder = load(str(tmp_path), masked_words=False)
    for name, value in model.base_model.state_dict().items():
        assert torch.equal(value, encoder.base_model.state_dict()[name])


@pytest.mark.parametrize("head", ("tfm", "att-fc"))
def test_training_leaves_the_language_model_as_it_is(head, lm_folder):
    """Sec. 3.2: BERT is frozen: steps of the optimiser change the head and nothing of the language model."""
    tokenizer, model = load(lm_folder("Bert"))
    before, lm = copy.deepcopy(model.state_dict()), icmlm.FrozenLanguageModel(model, "off")
    ours = build_model(head, channels=5, width=16, vocabulary_width=16, dropout=0.1).train()
    assert not {id(parameter) for parameter in ours.parameters()} & {id(parameter) for parameter in model.parameters()}
    optimizer, (tokens, visible), losses = torch.optim.SGD(ours.parameters(), 0.05), batch_of(tokenizer), []
    for _ in range(8):
        found, _ = ours(random_tensor(4, 5, 2, 2).to(torch.float32), lm.read(tokens, visible), visible, torch.tensor([2, 3, 1, 2]))
        losses.append(F.cross_entropy(lm.score(found, head), torch.tensor([7, 8, 9, 10])))
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in ours.head.parameters())
        optimizer.step()
    assert losses[-1] < losses[0]
    assert not model.training and not lm.classifier.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ the heads, written out


def build_model(head, channels=5, width=6, vocabulary_width=4, num_tags=0, layers=1, heads=1, attention_width=7, dropout=0.0):
    """ICMLM without a backbone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(channels))
        return icmlm.ICMLM("stub", head, width, vocabulary_width, num_tags, layers, heads, attention_width, dropout)


def random_tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def padded_batch():
    """Features of a 2 x 3 grid, captions of 5, 2 and 4 tokens whose padding is not zero, and a masked token in each."""
    words, visible = random_tensor(3, 5, 6), torch.arange(5) < torch.tensor([[5], [2], [4]])
    return random_tensor(3, 5, 2, 3) + 0.3, torch.where(visible[..., None], words, 30.0), visible, torch.tensor([3, 0, 2])


def plain(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def in_reading_order(features):
    """(C, h, w) -> X, one vector for each place, row by row"""
    return [features[:, i, j] for i in range(features.shape[1]) for j in range(features.shape[2])]


def slow_layer_norm(vector, w, name):
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return np.array([(value - mean) / math.sqrt(variance + 1e-5) for value in vector]) * w[f"{name}.weight"] + w[f"{name}.bias"]


def slow_linear(vector, w, name):
    return np.array([sum(a * b for a, b in zip(row, vector)) for row in w[f"{name}.weight"]]) + w.get(f"{name}.bias", 0)


def relu(vector):
    return np.array([max(value, 0.0) for value in vector])


def slow_softmax(scores):
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def slow_att(w, features, words, heads, attention_width):
    """Eqs. 3 and 4, the averaging layer and Eq. 5 -> p, pooled x"""
    x, s = in_reading_order(features), []
    for place in x:
        of_heads = []
        for h in range(heads):
            name = f"head.att.{h}"
            x_tilde = relu(slow_layer_norm(slow_linear(place, w, f"{name}.sigma_x"), w, f"{name}.norm_x"))
            scores = []
            for word in words:
                w_tilde = relu(slow_layer_norm(slow_linear(word, w, f"{name}.sigma_w"), w, f"{name}.norm_w"))
                scores.append(sum(a * b for a, b in zip(x_tilde, w_tilde)) / math.sqrt(attention_width))  # Eq. 3
            of_heads.append(math.log(sum(math.exp(score) for score in scores)))  # Eq. 4
        s.append(sum(a * b for a, b in zip(of_heads, w["head.average.weight"][0])) + w["head.average.bias"][0])
    p = slow_softmax(s)
    return p, sum(weight * place for weight, place in zip(p, x))  # Eq. 5


@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_att_fc_is_equations_3_to_6(heads, layers, float64):
    """Eqs. 3-6 in loops: where the text says to look, what is seen there, its way through fc; padding is no text."""
    model = random_weights(build_model("att-fc", heads=heads, layers=layers).double(), 0.7)
    features, words, visible, position = padded_batch()
    with torch.no_grad():
        found, tags, maps = model(features, words, visible, position, maps=True)
    w, names = plain(model), set(model.state_dict())
    assert tags is None and not any(name.endswith(("sigma_x.bias", "sigma_w.bias")) for name in names)
    for i in range(3):
        p, x = slow_att(w, features[i].numpy(), words[i, visible[i]].numpy(), heads, 7)
        assert maps[i].flatten().tolist() == pytest.approx(p, abs=1e-12) and max(p) > 1.2 / 6
        for n in range(layers):
            x = relu(slow_layer_norm(slow_linear(x, w, f"head.fc.{n}.0"), w, f"head.fc.{n}.1"))
        assert found[i].tolist() == pytest.approx(x.tolist(), abs=1e-10)
    assert maps.shape == (3, 2, 3) and found.shape == (3, 4)


def test_averaging_layer_begins_as_the_mean_of_the_heads(float64):
    """Sec. 3.2: s = [s^1 ... s^H] Sigma_h + b_h, learned; before training the plain mean."""
    model = build_model("att-fc", heads=4).double()
    features, words, visible, position = padded_batch()
    x = features.flatten(2).transpose(1, 2)
    with torch.no_grad():
        p = model.head(x, words, visible, position)[1]
        mean = sum(head(x, words, visible) for head in model.head.att) / 4
    torch.testing.assert_close(p, mean.softmax(1), rtol=0, atol=1e-12)
    assert model.head.average.weight.requires_grad and model.head.average.weight.shape == (1, 4)
    assert len({round(head.sigma_x.weight.sum().item(), 9) for head in model.head.att}) == 4  # the heads differ


def slow_encoder_layer(z, w, name, heads):
    """Eqs. 13-15, residual, layer norm and feed-forward -> the new Z, and of each head softmax(K Q^T / sqrt(D))"""
    width, outputs, attention = len(z[0]), [], []
    for h in range(heads):
        rows = slice(h * width, (h + 1) * width)  # a head is as wide as the model
        part = lambda kind: {"p.weight": w[f"{name}.{kind}.weight"][rows], "p.bias": w[f"{name}.{kind}.bias"][rows]}
        keys, queries, values = ([slow_linear(vector, part(kind), "p") for vector in z] for kind in ("key", "query", "value"))  # Eq. 13
        table = [slow_softmax([sum(a * b for a, b in zip(key, query)) / math.sqrt(width) for query in queries]) for key in keys]
        outputs.append([sum(weight * value for weight, value in zip(row, values)) for row in table])  # Eq. 14
        attention.append(table)
    result = []
    for s, vector in enumerate(z):
        merged = slow_linear(np.concatenate([output[s] for output in outputs]), w, f"{name}.merge")  # Eq. 15
        vector = slow_layer_norm(vector + merged, w, f"{name}.norm1")
        inner = slow_linear(relu(slow_linear(vector, w, f"{name}.linear1")), w, f"{name}.linear2")
        result.append(slow_layer_norm(vector + inner, w, f"{name}.norm2"))
    return result, attention


@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_tfm_is_equations_13_to_15(heads, layers, float64):
    """App. E in loops: Z = [X; W] through each layer, the masked place is read; the map is its row of the last softmax over the photo."""
    model = random_weights(build_model("tfm", heads=heads, layers=layers).double(), 0.4).eval()
    features, words, visible, position = padded_batch()
    with torch.no_grad():
        found, _, maps = model(features, words, visible, position, maps=True)
        torch.testing.assert_close(found, model(features, words, visible, position)[0], rtol=0, atol=0)
    w = plain(model)
    for i in range(3):
        z = [slow_linear(place, w, "head.project") for place in in_reading_order(features[i].numpy())] + list(words[i, visible[i]].numpy())
        for n in range(layers):
            z, attention = slow_encoder_layer(z, w, f"head.layers.{n}", heads)
        masked = 6 + int(position[i])
        assert found[i].tolist() == pytest.approx(z[masked].tolist(), abs=1e-10)
        row = [sum(table[masked][place] for table in attention) / heads for place in range(6)]
        assert maps[i].flatten().tolist() == pytest.approx([value / sum(row) for value in row], abs=1e-10)
        assert sum(row) < 0.99  # the text has its share, so that renormalising says something
    assert maps.shape == (3, 2, 3) and found.shape == (3, 6)


@pytest.mark.parametrize("head", ("tfm", "att-fc"))
def test_padding_changes_nothing(head, float64):
    """What stands in the padding, and how much of it there is, has no influence: neither on what is found nor on a gradient."""
    model = random_weights(build_model(head, heads=2, layers=2).double()).eval()
    features, words, visible, position = padded_batch()
    features.requires_grad_()

    def results(*batch):
        found, _, maps = model(features, *batch, maps=True)
        return found, maps, *torch.autograd.grad(found.square().sum(), features)

    expected = results(words, visible, position)
    garbage = torch.where(visible[..., None], words, -1e3)
    wider = torch.cat([garbage, torch.full((3, 4, 6), 1e3)], 1), torch.cat([visible, torch.zeros(3, 4, dtype=torch.bool)], 1)
    for other in (results(garbage, visible, position), results(*wider, position)):
        for one, two in zip(expected, other):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    told = words - 2 * visible[..., None] * words  # whereas the words change where it looks
    assert (results(told, visible, position)[1] - expected[1]).abs().amax((1, 2)).min() > 1e-3


def test_only_tfm_names_the_word_from_the_text():
    """Sec. 3.2: in att-fc the text says where to look and no more: in a photo that is the same everywhere it changes nothing."""
    features, words, visible, position = (value.float() if value.is_floating_point() else value for value in padded_batch())
    features, other = features[:, :, :1, :1].expand(3, 5, 2, 3), words + visible[..., None] * torch.randn(3, 5, 6)
    for head, differs in (("att-fc", False), ("tfm", True)):
        model = random_weights(build_model(head)).eval()
        one, two = (model(features, text, visible, position)[0] for text in (words, other))
        assert torch.allclose(one, two, atol=1e-5) is not differs


def test_dropout_is_in_tfm_after_attention_and_feed_forward():
    """App. E: dropout in training, none in evaluation: at p = 1 nothing but the two norms is left of a layer."""
    layer, z, seen = random_weights(icmlm.EncoderLayer(6, 2, 1.0)), torch.randn(2, 4, 6), torch.ones(2, 4, dtype=torch.bool)
    torch.testing.assert_close(layer.train()(z, seen), layer.norm2(layer.norm1(z)))
    assert not torch.allclose(layer.eval()(z, seen), layer.norm2(layer.norm1(z)))


def test_half_precision_keeps_the_heads_finite():
    """Under bf16 both heads give what they give in float32, to the precision of bf16, and a gradient for every parameter."""
    features, words, visible, position = (value.float() if value.is_floating_point() else value for value in padded_batch())
    for head in ("tfm", "att-fc"):
        model = random_weights(build_model(head, num_tags=3, heads=2)).eval()
        exact = model(features, words, visible, position, maps=True)
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(features, words, visible, position, maps=True)
        for one, two in zip(exact, rough):
            assert (one - two.float()).abs().max() < 0.1 * one.abs().max()
        (rough[0].float().square().sum() + rough[1].float().square().sum()).backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_tag_head_reads_the_features():
    """Fig. 2, module 5: tag logits from the features alone; with no tags there is no head."""
    model = random_weights(build_model("tfm", num_tags=9, channels=5))
    features, words, visible, position = (value.float() if value.is_floating_point() else value for value in padded_batch())
    tags = model(features, words, visible, position)[1]
    assert tags.shape == (3, 9) and torch.equal(tags, model(features, words + 1, visible, position + 1)[1])
    assert not torch.allclose(tags, model(features + 1, words, visible, position)[1])
    assert build_model("tfm").tags is None


# ------------------------------------------------------------------------------------------ triplets


def captioned(*images):
    """CaptionData of images with these captions."""
    data = common.CaptionData(common.ImageFiles())
    for n, captions in enumerate(images):
        data.add(f"{n}.jpg", captions)
    return data


def triplets_in(folder, train, val, tokenizer, *flags):
    """-> concepts, train, val of a run in `folder`"""
    args = icmlm.get_args(["--amp", "off", *map(str, flags)])
    return icmlm.cached_triplets(args, train, val, tokenizer, SimpleNamespace(folder=folder))


def written_out(triplets, tokenizer):
    """Triplets as (image, caption with the masked word in brackets)"""
    rows = []
    for n in range(len(triplets)):
        image, tokens, position = triplets[n]
        names = tokenizer.convert_ids_to_tokens(tokens)
        names[position] = f"<{names[position]}>"
        rows.append((image, " ".join(names[1:-1])))
    return rows


def test_triplets_are_photo_caption_and_one_masked_word(tokenizer, tmp_path):
    """Sec. 4, Datasets: each concept of each caption, without captions repeated for an image or outside 3 to 25 tokens."""
    longest = "the dog is on" + 21 * " the"  # 25 tokens
    train = captioned(
        ["a red dog", "a red dog", "the cat"],  # repeated; two tokens
        [],
        [longest, longest + " a", "a red dog", "cat on surfboards"],  # 25 and 26; the same as another image's; 3 words of 5 tokens
    )
    val = captioned(["no concept, 1 1 1"], ["the cat is red"])
    concepts, train, val = triplets_in(tmp_path, train, val, tokenizer, "--pos", "nn+adj")
    assert concepts["dog"] == concepts["cat"] == "nouns" and concepts["red"] == "adjectives" and "the" not in concepts
    expected = [(0, "a <red> dog"), (0, "a red <dog>"), (2, longest.replace("dog", "<dog>"))]
    expected += [(2, "a <red> dog"), (2, "a red <dog>"), (2, "<cat> on surf ##board ##s")]
    assert written_out(train, tokenizer) == expected
    assert written_out(val, tokenizer)[-2:] == [(1, "the <cat> is red"), (1, "the cat is <red>")]
    names = list(concepts)
    for image, words in enumerate(({"red", "dog"}, set(), {"red", "dog", "cat", "surfboards"})):
        assert {names[k] for k in np.flatnonzero(train.tags.toarray()[image])} == words


def test_tokens_at_the_limits(tokenizer, tmp_path):
    """Sec. 4: captions of 3 and of 25 tokens of the language model stay, of 2 and 26 go; pieces count, [CLS] and [SEP] do not."""
    of_length = lambda n: " ".join(["dog", *(n - 1) * ["the"]])
    board = "dog" + 8 * " surfboards"  # 9 words of 25 tokens
    train = captioned([of_length(n) for n in (2, 3, 25, 26)], [board, board + " the"])
    _, train, _ = triplets_in(tmp_path, train, captioned(["the dog is red"]), tokenizer)
    assert [(image, len(row.split())) for image, row in written_out(train, tokenizer)] == [(0, 3), (0, 25), (1, 25)]


def test_only_whole_words_of_one_token_are_masked(tokenizer):
    """DESIGN 5.3: neither a word of several tokens nor a piece that looks like a concept; words beside punctuation are whole."""
    maskable = icmlm.maskable_tokens(tokenizer, ["dog", "surfboard", "surf", "shirt", "t", "cat", "zebra", "red", "surfdog"])
    assert {tokenizer.convert_ids_to_tokens(token): word for token, word in maskable.items()} == {w: w for w in ("dog", "surf", "shirt", "t", "cat", "red")}
    data = captioned(["surf surfboard surfdog dogs dog", "zebra t-shirt, cat."], ["Red RED surfs"])
    arrays = icmlm.find_triplets(data, tokenizer, maskable)
    triplets = icmlm.Triplets(data.images, None, *(arrays[name] for name in icmlm.Triplets.PARTS))
    assert written_out(triplets, tokenizer) == [
        (0, "<surf> surf ##board surf ##dog dog ##s dog"), (0, "surf surf ##board surf ##dog dog ##s <dog>"),
        (0, "[UNK] <t> - shirt , cat ."), (0, "[UNK] t - <shirt> , cat ."), (0, "[UNK] t - shirt , <cat> ."),
        (1, "<red> red surf ##s"), (1, "red <red> surf ##s"),
    ]  # fmt: skip


def test_a_piece_with_the_id_of_a_concept_is_not_a_word():
    """DESIGN 5.3: in vocabularies whose pieces and words share ids, a piece within a longer word is not masked."""

    class Pieces:
        """Of "dogcat" the tokens are those of dog and of cat, and both belong to one word."""

        def __call__(self, captions):
            ids = [[2, *(5 + "dog cat".split().index(piece) for word in caption.split() for piece in word.replace("dogcat", "dog+cat").split("+"))] for caption in captions]
            words = [[None, *(n for n, word in enumerate(caption.split()) for _ in range(1 + (word == "dogcat")))] for caption in captions]
            return type("Encoded", (dict,), {"word_ids": lambda self, n: words[n]})(input_ids=ids)

    data = captioned(["dogcat dog", "cat dogcat"])
    arrays = icmlm.find_triplets(data, Pieces(), {5: "dog", 6: "cat", 2: "a special token"})
    assert list(zip(arrays["caption"], arrays["position"])) == [(0, 3), (1, 1)]


def test_many_captions_in_the_order_of_their_images(tokenizer):
    """Triplets are found in batches of a thousand captions: the indices go on across them, sorted by image."""
    rng = np.random.default_rng(0)
    words = np.array(["dog", "cat", "red", "the", "runs"])
    data = captioned(*([" ".join(rng.choice(words, rng.integers(3, 8))) for _ in range(rng.integers(0, 4))] for _ in range(1500)))
    arrays = icmlm.find_triplets(data, tokenizer, icmlm.maskable_tokens(tokenizer, ["dog", "red"]))
    triplets = icmlm.Triplets(data.images, None, *(arrays[name] for name in icmlm.Triplets.PARTS))
    assert len(data.captions) > 2000
    expected = []
    for image in range(len(data)):
        for caption in data.captions_of(image):
            for m, word in enumerate(caption.split()):
                if word in ("dog", "red"):
                    expected.append((image, " ".join(f"<{w}>" if n == m else w for n, w in enumerate(caption.split()))))
    assert written_out(triplets, tokenizer) == expected
    assert (np.diff(triplets.image[triplets.caption]) >= 0).all()


def test_triplets_are_arrays_of_numbers(tokenizer, tmp_path):
    """DESIGN 4: millions of triplets: numpy arrays of integers, shared with the workers, and 8 bytes for each triplet."""
    for triplets in triplets_in(tmp_path, captioned(SENTENCES), captioned(SENTENCES), tokenizer)[1:]:
        for name in icmlm.Triplets.PARTS:
            assert type(getattr(triplets, name)) is np.ndarray and np.issubdtype(getattr(triplets, name).dtype, np.integer)
        assert triplets.caption.itemsize + triplets.position.itemsize == 8 and triplets.tokens.itemsize == 4
        _, tokens, position = triplets[0]
        tokens[position] = 0
        assert triplets[0][1][position] != 0  # what is given out is a copy


def test_a_split_without_a_word_to_mask_ends_the_program(tokenizer, tmp_path):
    """DESIGN 8: one line that names the split and what it needs."""
    with pytest.raises(SystemExit, match="no caption of the split holds a word to mask: val needs"):
        triplets_in(tmp_path, captioned(SENTENCES), captioned(["1 1 1 1"]), tokenizer)


def test_triplets_are_found_again(tokenizer, tmp_path, monkeypatch):
    """The second start of a run reads triplets.npz; with anything that they are made of changed, they are made anew."""
    train, val = captioned(SENTENCES[:2], SENTENCES[2:]), captioned(SENTENCES)
    built = []
    count = language.count_concepts
    monkeypatch.setattr(language, "count_concepts", lambda *args: built.append(args) or count(*args))
    first = triplets_in(tmp_path, train, val, tokenizer)
    again = triplets_in(tmp_path, train, val, tokenizer, "--lr", 1, "--iters", 9, "--workers", 1)
    assert len(built) == 1 and (tmp_path / "concepts.json").exists()
    assert list(first[0].items()) == list(again[0].items())
    for one, other in zip(first[1:], again[1:]):
        assert (one.tags.toarray() == other.tags.toarray()).all() and one.images is other.images
        assert all((getattr(one, name) == getattr(other, name)).all() for name in icmlm.Triplets.PARTS)
    assert len(triplets_in(tmp_path, train, val, tokenizer, "--num-concepts", 2)[0]) == 2
    assert set(triplets_in(tmp_path, train, val, tokenizer, "--pos", "nn")[0].values()) == {"nouns"}
    assert len(built) == 3
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["surfboard"])
    for n, changed in enumerate([(captioned(SENTENCES), val, tokenizer), (train, captioned(SENTENCES, ["a red dog"]), tokenizer), (train, val, longer)]):
        for parts in ((train, val, tokenizer), changed):
            triplets_in(tmp_path, *parts)
        assert len(built) == 5 + 2 * n
    assert any("surfboard" in row for _, row in written_out(triplets_in(tmp_path, train, val, longer)[2], longer))


# ------------------------------------------------------------------------------------------ samples and batches

LEFT_RIGHT = ["a dog left of the cat", "a cat right of the dog", "the red dog"]


@pytest.fixture
def photos(tmp_path):
    """Four photos: red left, blue right; the second has no caption and the third cannot be decoded -> CaptionData"""
    data = common.CaptionData(common.ImageFiles())
    for n, captions in enumerate((LEFT_RIGHT[:2], [], LEFT_RIGHT[1:], LEFT_RIGHT[::2])):
        pixels = np.zeros((40, 40, 3), np.uint8)
        pixels[:, :20, 0] = pixels[:, 20:, 2] = 200 + n
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        data.add(str(tmp_path / f"{n}.png"), captions)
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:60])
    return data


CONCEPTS = ["dog", "cat", "left", "right", "red"]


def view_of(data, tokenizer, *flags, **kwargs):
    """-> the triplets of `data` as they are trained on"""
    arrays = icmlm.find_triplets(data, tokenizer, icmlm.maskable_tokens(tokenizer, CONCEPTS))
    triplets = icmlm.Triplets(data.images, language.concept_labels(data, CONCEPTS), *(arrays[name] for name in icmlm.Triplets.PARTS))
    args = icmlm.get_args(["--image-size", "16", "--colour-jitter", "0", "--crop-min", "1", *flags])
    return icmlm.TripletView(triplets, tokenizer, args, **kwargs)


def as_words(tokenizer, tokens):
    return tokenizer.convert_ids_to_tokens(tokens)[1:-1]


def test_a_sample_has_one_word_masked_and_left_is_right_when_mirrored(tokenizer, photos):
    """Sec. 3.2: [MASK] takes the word's place and the word is the target; left and right change places in a mirrored photo, as the target too."""
    view, seen = view_of(photos, tokenizer), set()
    exchange = {"left": "right", "right": "left"}
    for n in range(len(view.triplets)):
        image, tokens, position = view.triplets[n]
        if image == 2:
            continue
        for epoch in range(6):
            sample = view[epoch, n]
            mirrored = bool(sample["image"][8, 2, 2] > 100)  # blue is on the left
            assert mirrored == sample["mirrored"] and sample["image"][8, 13, 2 if not mirrored else 0] > 100
            words = [exchange.get(word, word) if mirrored else word for word in as_words(tokenizer, tokens)]
            assert tokenizer.convert_ids_to_tokens(sample["target"]) == words[position - 1]
            words[position - 1] = "[MASK]"
            assert as_words(tokenizer, sample["tokens"]) == words
            assert sample["position"] == position and sample["index"] == image and sample["unreadable"] == []
            seen.add((mirrored, tokenizer.convert_ids_to_tokens(sample["target"])))
    assert seen == {(flip, word) for flip in (False, True) for word in CONCEPTS}


def test_validation_samples_are_not_mirrored(tokenizer, photos):
    """The chosen triplets in their order, the central crop, the caption as it stands."""
    view = view_of(photos, tokenizer, training=False, chosen=np.array([1, 4, 5]))
    assert len(view) == 3
    for k, n in enumerate((1, 4, 5)):
        sample, (image, tokens, position) = view[k], view.triplets[n]
        assert not sample["mirrored"] and sample["image"][8, 2, 0] > 100 and sample["index"] == image
        assert sample["target"] == tokens[position] and sample["tokens"][position] == tokenizer.mask_token_id
        assert (np.delete(sample["tokens"].numpy(), position) == np.delete(tokens, position)).all()


def test_left_and_right_of_a_byte_level_vocabulary(photos):
    """RoBERTa's tokens of words within a sentence begin with a space: these are the ones that change places."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator([*LEFT_RIGHT, *LEFT_RIGHT, "left right"], vocab_size=400, min_frequency=1, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    names = {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    view = view_of(photos, transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names))
    (left,), (right,) = (pieces.encode(f" {word}", add_special_tokens=False).ids for word in ("left", "right"))
    mirrored = 0
    for n in range(len(view.triplets)):
        image, tokens, position = view.triplets[n]
        for epoch in range(4 if image != 2 else 0):
            sample = view[epoch, n]
            whole = sample["tokens"].tolist()
            whole[position] = sample["target"]
            exchange = {left: right, right: left} if sample["mirrored"] else {}
            assert whole == [exchange.get(token, token) for token in tokens.tolist()]
            mirrored += sample["mirrored"]
    assert mirrored > 3


def test_a_photo_that_cannot_be_decoded_takes_its_captions_along(tokenizer, photos):
    """DESIGN 8: another photo takes its place with a caption and a word of its own, never with the caption of the bad one."""
    view = view_of(photos, tokenizer)
    bad = [n for n in range(len(view.triplets)) if view.triplets[n][0] == 2]
    assert bad
    for n in bad:
        sample = view[3, n]
        assert sample["index"] == 3 and sample["unreadable"] == [2] and sample["image"].max() == 203
        _, tokens, position = view.triplets[int(np.flatnonzero(view.image_of_triplet == 3)[0])]
        exchange = {"left": "right", "right": "left"} if sample["mirrored"] else {}
        words = [exchange.get(word, word) for word in as_words(tokenizer, tokens)]
        assert tokenizer.convert_ids_to_tokens(sample["target"]) == words[position - 1]
        words[position - 1] = "[MASK]"
        assert as_words(tokenizer, sample["tokens"]) == words and sample["position"] == position


def test_the_photo_that_takes_the_place_has_captions(tokenizer, photos):
    """The last photo is bad as well: the search goes on from the first; a photo without captions is passed over."""
    path = photos.images[3]
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(photos.images[2])
    with open(path, "r+b") as file:
        file.truncate(60)
    view = view_of(photos, tokenizer)
    n = int(np.flatnonzero(view.image_of_triplet == 3)[0])
    assert (view[0, n]["index"], view[0, n]["unreadable"]) == (0, [3])
    with open(photos.images[0], "r+b") as file:  # then photo 0, too: photo 1 is whole but has nothing to mask
        file.truncate(60)
    sample = view_of(photos, tokenizer)[0, 0]
    assert sample["index"] == 2 and sample["unreadable"] == [0]


def test_collate_pads_and_marks_what_is_visible(tokenizer, photos):
    """Batches: rows as long as the longest, padding marked, the tags of each photo, left and right exchanged in those of mirrored ones."""
    view = view_of(photos, tokenizer)
    rows = [n for n in range(len(view.triplets)) if view.triplets[n][0] != 2]
    samples = [view[epoch, n] for n in rows for epoch in range(3)]
    batch = icmlm.collate(samples, view.triplets.tags, language.mirrored_labels(CONCEPTS), padding=0)
    longest = max(len(sample["tokens"]) for sample in samples)
    assert batch["tokens"].shape == batch["visible"].shape == (len(samples), longest) and batch["visible"].dtype == torch.bool
    assert batch["images"].shape == (len(samples), 16, 16, 3) and batch["jitter"].shape == (len(samples), 4) and batch["unreadable"] == []
    lengths = set()
    for i, sample in enumerate(samples):
        length = len(sample["tokens"])
        lengths.add(length)
        assert batch["tokens"][i].tolist() == sample["tokens"].tolist() + (longest - length) * [0]
        assert batch["visible"][i].tolist() == length * [True] + (longest - length) * [False]
        assert (batch["position"][i], batch["target"][i]) == (sample["position"], sample["target"])
        assert batch["tokens"][i, batch["position"][i]] == tokenizer.mask_token_id
        words = {word for caption in photos.captions_of(sample["index"]) for word in caption.split()} & set(CONCEPTS)
        if sample["mirrored"]:
            words = {{"left": "right", "right": "left"}.get(word, word) for word in words}
        assert {CONCEPTS[k] for k in batch["tags"][i].nonzero().flatten().tolist()} == words
    assert len(lengths) > 1 and len({sample["mirrored"] for sample in samples}) == 2


# ------------------------------------------------------------------------------------------ where it looks


def scene_with(count, first=0):
    """The first scene from `first` on of `count` objects that share no shape and no colour."""
    scene = first
    while True:
        objects = shapes.shapes_scene(scene)
        if len(objects) == count == len({o.shape for o in objects}) == len({o.colour for o in objects}):
            return scene
        scene += 1


def test_attention_inside_boxes_on_a_fine_grid():
    """The share of a map inside the box of the object that the word names, against a grid of 800 x 800 points."""
    rng, scenes, masked, maps, expected, areas = np.random.default_rng(0), [], [], [], [], []
    for n in range(6):
        scenes.append(scene_with(2, 100 * n))
        named = shapes.shapes_scene(scenes[-1])[n % 2]
        masked.append(named.shape if n < 3 else named.colour)
        attention = rng.random((2, 3)) ** 3
        maps.append(attention / attention.sum())
        left, top, right, bottom = named.box
        inside = 0.0
        points = (np.arange(800) + 0.5) / 800
        for y in points[(points > top) & (points < bottom)]:
            row = maps[-1][int(y * 2)] * 6  # the density: a cell has a sixth of the area
            inside += sum(row[int(x * 3)] for x in points[(points > left) & (points < right)]) / 800**2
        expected.append(inside)
        areas.append((right - left) * (bottom - top))
    for n in range(6):
        one = icmlm.attention_inside_boxes(scenes[n : n + 1], masked[n : n + 1], np.stack(maps[n : n + 1]))
        assert one["inside"] == pytest.approx(100 * expected[n], abs=0.5) and one["area"] == pytest.approx(100 * areas[n])
    found = icmlm.attention_inside_boxes(scenes, masked, np.stack(maps))
    assert found == {"inside": pytest.approx(100 * np.mean(expected), abs=0.5), "area": pytest.approx(100 * np.mean(areas)), "words": 6}


def test_attention_uniform_and_on_the_object():
    """A map that is the same everywhere has the box's part of the area inside; one on the object's own cell has all of it."""
    scene = scene_with(3)
    objects = shapes.shapes_scene(scene)
    for o in objects:
        for size in ((1, 1), (3, 3), (7, 5)):
            found = icmlm.attention_inside_boxes([scene], [o.shape], np.full((1, *size), 1 / (size[0] * size[1])))
            assert found["inside"] == pytest.approx(found["area"]) == pytest.approx(100 * (2 * o.radius) ** 2)
        here = np.zeros((1, 40, 40))
        here[0, int(o.y * 40), int(o.x * 40)] = 1
        assert icmlm.attention_inside_boxes([scene], [o.colour], here)["inside"] == pytest.approx(100)
        elsewhere = [other for other in objects if other is not o]
        assert icmlm.attention_inside_boxes([scene], [elsewhere[0].shape], here)["inside"] == pytest.approx(0, abs=1e-9)


def test_words_that_name_two_objects_or_none_are_left_out():
    """Only a word for exactly one object says where to look: neither one of two red ones nor "left"."""
    scene, word = 0, None
    while word is None:
        objects = shapes.shapes_scene(scene)
        colours = [o.colour for o in objects]
        word = next((colour for colour in colours if colours.count(colour) == 2), None)
        scene += word is None
    single = scene_with(1)
    (o,) = shapes.shapes_scene(single)
    found = icmlm.attention_inside_boxes([scene, single, single, single], [word, o.shape, "left", o.size], np.full((4, 2, 2), 0.25))
    assert found["words"] == 1 and found["area"] == pytest.approx(100 * (2 * o.radius) ** 2)


# ------------------------------------------------------------------------------------------ the scores of a run


@pytest.fixture
def scored(tokenizer, lm_folder, photos):
    """-> function (score a model) of the triplets of three readable photos with the language model, and what it scores"""
    for n in (1, 2):
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(photos.images[n])
    view = view_of(photos, tokenizer)
    model = load(lm_folder("Bert"))[1]
    for word, often in {"dog": 10, "the": 9, "a": 8, "on": 7, "of": 6, "cat": 5, "red": 4}.items():  # so that it knows a little
        model.cls.predictions.bias[tokenizer.convert_tokens_to_ids(word)] += often
    lm = icmlm.FrozenLanguageModel(model, "off")
    parts = dict(zip(CONCEPTS, ("nouns", "nouns", "adjectives", "adjectives", "adjectives")))

    def score(model, *flags):
        args = icmlm.get_args(["--data", "x.jsonl", "--image-size", "32", "--workers", "0", "--amp", "off", *flags])
        return icmlm.validate(model, lm, view.triplets, parts, tokenizer, args, CPU)["masked_words"]

    return score, view.triplets, lm, parts


class Says(nn.Module):
    """A model that finds what a test wants: found(features, words, position), the features being the photos."""

    def __init__(self, found):
        super().__init__()
        self.backbone, self.found = FeaturesAsGiven(3), found

    def fill_in(self, features, words, visible, position, maps=False):
        return self.found(features, words, position), torch.full((len(features), 1, 1), 1.0) if maps else None


def test_masked_words_found(scored, tokenizer):
    """Tab. 1: top-1 and top-5 of each masked word, by part of speech, with the photo and by the language model alone, counted one by one."""
    score, triplets, lm, parts = scored
    ranks, of_part = [], []
    for n in range(len(triplets)):
        _, tokens, position = triplets[n]
        target, tokens = int(tokens[position]), torch.from_numpy(tokens)[None].long()
        tokens[0, position] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = lm.score(lm.read(tokens, torch.ones_like(tokens).bool())[:, position], "tfm")[0].tolist()
        ranks.append(sum(value > logits[target] for value in logits))
        of_part.append(parts[tokenizer.convert_ids_to_tokens(target)])
    share = lambda limit, part=None: 100 * np.mean([rank < limit for rank, p in zip(ranks, of_part) if part in (None, p)])
    alone = {"top1": share(1), "top5": share(5), "adjectives top1": share(1, "adjectives"), "nouns top1": share(1, "nouns")}
    assert share(1) < share(5) < 100 and share(5) > 0

    def at_the_mask(features, words, position):
        return words[torch.arange(len(words)), position]

    result = score(Says(at_the_mask).train())
    assert result["triplets"] == len(triplets)
    assert result["with the photo"] == result["with another photo"] == pytest.approx(alone) == result["language model alone"]
    other = score(Says(lambda features, words, position: torch.full((len(words), 16), 0.3)))
    assert other["language model alone"] == pytest.approx(alone) and other["with the photo"] != pytest.approx(alone)


def test_masked_words_of_att_fc_are_scored_by_equation_6(scored, tokenizer):
    """With a photo by v_k = fc(x) . V_k; the language model alone always by its own layer; --proxy-triplets many, drawn by the seed."""
    score, triplets, lm, _ = scored
    dog = tokenizer.convert_tokens_to_ids("dog")
    found = 50 * lm.vocabulary[dog] - 50 * lm.vocabulary.mean(0)
    assert int((lm.vocabulary @ found).argmax()) == dog
    model, targets = Says(lambda features, words, position: found.repeat(len(words), 1)), [triplets[n][1][triplets[n][2]] for n in range(len(triplets))]
    tfm, att = (score(model, "--head", head) for head in ("tfm", "att-fc"))
    assert att["with the photo"]["top1"] == att["with another photo"]["top1"] == pytest.approx(100 * np.mean([target == dog for target in targets]))
    assert att["language model alone"] == tfm["language model alone"]
    few = [score(model, "--head", "att-fc", "--proxy-triplets", "5", "--seed", seed) for seed in "001"]
    assert few[0] == few[1] and few[0]["triplets"] == 5


def test_another_photo_is_another_photo(scored):
    """What the head knows of captions without seeing: the photo beside each caption is that of another image."""
    score, triplets, _, _ = scored
    seen = []
    score(Says(lambda features, words, position: seen.append(features.mean((1, 2, 3))) or torch.zeros(len(words), 16)))
    own, other = torch.cat(seen[::2]), torch.cat(seen[1::2])
    assert len(own) == len(triplets) and len(own.unique()) == 3
    assert (own != other).all()


# ------------------------------------------------------------------------------------------ --word


@pytest.mark.parametrize(
    "caption, word, message",
    [
        ("the red dog runs", "cat", '"cat" is not a word of the caption; these words of the caption can be masked: red, dog'),
        ("the red dog", "do", '"do" is not a word of the caption'),
        ("a red dogs", "dog", '"dog" is not a word of the caption; these words of the caption can be masked: red'),  # only a piece: dog ##s
        ("dog on a surfboard", "surfboard", '"surfboard" is 2 tokens of the language model, surf ##board, and only one can be masked'),
        ("the dog runs", "runs", '"runs" is not among the 3 concepts that were trained'),
        ("the cat is blue", "blue", "these words of the caption can be masked: none"),
        ("red red dog", "the", "these words of the caption can be masked: red, dog"),  # each named once
    ],
)
def test_words_that_cannot_be_masked(caption, word, message, tokenizer):
    """`--explain`: why a word cannot be filled in, and which ones can, in one line."""
    with pytest.raises(SystemExit) as stopped:
        icmlm.word_position(tokenizer, tokenizer(caption, return_tensors="pt"), word, {"dog": "nouns", "red": "adjectives", "surfboard": "nouns"})
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize("caption, word, position", [("the red dog", "dog", 3), ("dogs, dog", "dog", 4), ("a dog, a dog", "Dog", 2), ("surfdog dog.", "dog", 3)])
def test_where_a_word_stands(caption, word, position, tokenizer):
    """The first time it stands by itself, not where it is part of another word."""
    assert icmlm.word_position(tokenizer, tokenizer(caption, return_tensors="pt"), word, {"dog": "nouns"}) == position


# ------------------------------------------------------------------------------------------ recipes

RESNET = {
    "image_size": 224, "layers": 1, "heads": 1, "lambda_tp": 0.1, "num_concepts": 5000, "batch_size": 512, "iters": 500_000,
    "warmup_attention": 0.0, "optimizer": "sgd", "lr": 3e-2, "weight_decay": 1e-4, "steps": [], "lm": "bert-base-uncased", "pos": "nn+adj+vb",
}  # fmt: skip
VGG = {
    "image_size": 224, "layers": 1, "heads": 12, "lambda_tp": 1.0, "num_concepts": 1000, "batch_size": 896, "iters": 200_000,
    "warmup_attention": 0.0, "optimizer": "radam", "lr": 1e-4, "weight_decay": 1e-3, "steps": [0.8, 0.9], "lm": "bert-base-uncased",
}  # fmt: skip


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], RESNET),
        (["--arch", "resnet50", "--head", "att-fc"], RESNET),
        (["--arch", "vgg16", "--head", "tfm"], VGG),
        (["--arch", "vgg16", "--head", "att-fc", "--init", "x.pth"], {**VGG, "warmup_attention": 50_000 / 200_000}),
        (["--arch", "vgg16", "--head", "att-fc"], VGG),  # nothing to attend to in a backbone that sees nothing yet
        (["--arch", "vgg16", "--init", "x.pth"], VGG),
        (["--arch", "vgg16", "--warmup-attention", "0.5"], {**VGG, "warmup_attention": 0.5}),  # the user's flags win
        (["--arch", "vgg16", "--head", "att-fc", "--init", "x.pth", "--warmup-attention", "0"], VGG),
        (["--batch-size", "128"], {**RESNET, "batch_size": 128, "lr": 3e-2 / 4}),  # linearly with the batch
        (["--arch", "vgg16", "--batch-size", "1792"], {**VGG, "batch_size": 1792, "lr": 2e-4}),
        (["--batch-size", "128", "--lr", "0.5", "--lambda-tp", "0", "--iters", "7"], {**RESNET, "batch_size": 128, "lr": 0.5, "lambda_tp": 0, "iters": 7}),
        (["--arch", "vgg16", "--steps"], {**VGG, "steps": []}),
        (["--arch", "vgg16", "--steps", "0.5"], {**VGG, "steps": [0.5]}),
        (["--arch", "vgg16", "--heads", "2", "--optimizer", "sgd", "--lr", "0.1"], {**VGG, "heads": 2, "optimizer": "sgd", "lr": 0.1, "steps": []}),
    ],
)
def test_recipes_of_the_paper(flags, expected):
    """Sec. 4, 4.3, App. B and F.1: every number, for each backbone and head; what the user gives wins."""
    for data in ("coco", "vg"):
        args = icmlm.get_args(["--data", data, *flags])
        assert {flag: getattr(args, flag) for flag in expected} == {**expected, "lr": pytest.approx(expected["lr"])}
    assert args.arch == ("vgg16" if "vgg16" in flags else "resnet50")


def test_learning_rates_of_the_paper():
    """App. F.1: a cosine over 500K iterations; RAdam's falls to a tenth after 160K and 180K of 200K (80% and 90%)."""
    args = icmlm.get_args(["--data", "coco"])
    for iteration, factor in ((0, 1), (250_000, 0.5), (125_000, 0.5 * (1 + math.cos(math.pi / 4))), (500_000, 0)):
        assert common.learning_rate_factor(args, iteration, args.iters) == pytest.approx(factor)
    args = icmlm.get_args(["--data", "coco", "--arch", "vgg16"])
    for iteration, factor in ((0, 1), (159_999, 1), (160_000, 0.1), (179_999, 0.1), (180_000, 0.01), (199_999, 0.01)):
        assert common.learning_rate_factor(args, iteration, args.iters) == pytest.approx(factor)


def test_defaults_on_shapes():
    """Without a flag: the built-in data, a small backbone, a language model from scratch: nothing to download."""
    args = icmlm.get_args([])
    assert (args.data, args.arch, args.lm, args.head) == ("shapes", "resnet18", "scratch", "tfm")
    assert args.batch_size <= 64 and args.iters <= 2000 and args.image_size <= 96


# ------------------------------------------------------------------------------------------ warm-up of the attention


def test_a_frozen_backbone_does_not_move():
    """App. F.1: while the attention warms up, neither weights nor batch statistics of the backbone change; afterwards both do."""
    torch.manual_seed(0)
    model = icmlm.ICMLM("resnet18", "att-fc", 16, 16, 5, 1, 2, 8, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    images, words, visible, position = torch.randn(3, 3, 64, 64), torch.randn(3, 4, 16), torch.ones(3, 4, dtype=torch.bool), torch.tensor([0, 1, 2])

    def changed(frozen):
        parallel = icmlm.prepare(model, ALONE, frozen)
        before = copy.deepcopy(model.state_dict())
        for _ in range(2):
            found, tags = parallel(images, words, visible, position)
            optimizer.zero_grad()
            (found.square().sum() + tags.square().sum()).backward()
            optimizer.step()
        return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}

    moved = changed(frozen=True)
    assert moved and not any(name.startswith("backbone.") for name in moved)
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert {"head.att.0.sigma_x.weight", "head.att.1.sigma_w.weight", "head.fc.0.0.weight", "tags.2.weight"} <= moved
    assert model.head.training and not model.backbone.training
    moved = changed(frozen=False)
    assert moved == set(model.state_dict())
    assert all(module.training for module in model.modules())
