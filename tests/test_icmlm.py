"""icmlm.py against the paper written out slowly, its triplets one by one, and as a user runs it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import CPU, FeaturesAsGiven, captioned, kill_at, metrics, one_split, photos_at
from conftest import random_weights, refusal, result, run_here
from PIL import Image
from test_language import byte_level, metaspace
from tokenizers import BertWordPieceTokenizer
from torch import nn

import common
import icmlm
import tp
from downstream.masked_words import attention_maps
from extras import small_bert

WORDS = "a the dog cat red blue surf left right on of is runs grass t shirt - , . 1".split()
PIECES = "##board ##s ##dog ##cat ##red ##c ##a ##t".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES]
SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}


def wordpiece(words, lowercase=True):
    pieces = BertWordPieceTokenizer({word: n for n, word in enumerate(words)}, lowercase=lowercase)
    special = {f"{x}_token": f"[{x.upper()}]" for x in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **special)


TOKENIZER = wordpiece(VOCABULARY)


def language_model(kind, folder):
    """Save one of this kind with random weights in the folder -> the model"""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(pad_token_id=0, **SIZES)
    model = random_weights(getattr(transformers, f"{kind}ForMaskedLM")(config), 0.3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind, amp", (("Bert", "off"), ("Bert", "fp16"), ("Roberta", "bf16")))
def test_frozen_language_model(kind, amp, tmp_path):
    """Sec. 3.2: W is the last layer before any head, without the padding; given it, the pretrained
    token classification layer says what the model says. V are the input embeddings."""
    model = language_model(kind, tmp_path)
    tokenizer, lm = icmlm.load_language_model(str(tmp_path), CPU, amp)
    sentences = ["the red dog runs on grass", "a cat is left of a surfboard", "a red shirt"]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    exact, logits = model.base_model(**inputs).last_hidden_state, model(**inputs).logits
    for row, visible, encoded in zip(tokens, mask, exact):
        alone = model(row[visible][None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(encoded[visible], alone, rtol=0, atol=1e-5)
    with torch.no_grad(), common.autocast(CPU, amp):
        expected = model.base_model(**inputs).last_hidden_state.float()
        features = lm(tokens, mask)
    assert torch.equal(features, expected) and features.size(2) == 16
    assert not features.requires_grad and not features.is_inference()  # it can be trained on
    torch.testing.assert_close(lm.mlm_head(exact), logits, rtol=0, atol=2e-5)
    assert logits.std(-1).min() > 0.05  # they differ, so that equal ones say something
    [table] = [v for name, v in model.state_dict().items() if "word_embeddings.weight" in name]
    assert torch.equal(lm.token_embeddings, table) and table.dtype == torch.float32


def test_no_language_model(tmp_path, monkeypatch):
    """A head of another kind; a small BERT that diverges"""
    config = transformers.DistilBertConfig(vocab_size=99, n_layers=1, n_heads=2, dim=16)
    transformers.DistilBertForMaskedLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="is a DistilBertForMaskedLM, not a BERT or RoBERTa"):
        icmlm.load_language_model(str(tmp_path), CPU, "off")
    monkeypatch.setattr(small_bert, "LR", math.inf)
    with pytest.raises(SystemExit, match="the small BERT is not finite: try another --seed"):
        small_bert.train(tmp_path / "lm", ["a dog"], 3, 0, CPU, "off", layers=1, width=64)
    assert not (tmp_path / "lm").exists()


REPORT = 5 * "the lungs are clear and wide. "  # 30 words


@pytest.mark.parametrize("script, flags", ((icmlm, ""), (tp, "--labels cluster"), (tp, "")))
def test_long_captions(script, flags, tmp_path, monkeypatch):
    """None is of 3 to 25 words: that is said before a language model is trained."""
    monkeypatch.setattr(small_bert, "train_tokenizer", None)
    data = captioned([REPORT], [REPORT])
    monkeypatch.setattr(common, "caption_data", lambda *_: [data, data])
    message = refusal([f"{script.__name__}.py", "--output", tmp_path, *flags.split()])
    assert "raise --max-words" in message


def test_max_words(tmp_path):
    """If it is raised, the small BERT reads that many tokens, and long captions are kept."""
    report = 3 * REPORT
    data = captioned([report], [report])
    args = icmlm.get_args(["--output", str(tmp_path), "--lm-iters", "1", "--max-words", "105"])
    args.amp = "off"
    folder = tmp_path / "language_model"
    small_bert.make_language_model(folder, args, data, CPU)
    tokenizer, lm = icmlm.load_language_model(str(folder), CPU, "off")
    tokens = tokenizer(report, return_tensors="pt")["input_ids"]
    assert tokens.shape == (1, 107) and lm(tokens, tokens > 0).isfinite().all()
    icmlm.make_triplets(args, [data, data], tokenizer)
    _, samples, _ = icmlm.load_triplets(args, [data, data], tokenizer)
    assert len(samples) == 2 * 45  # of both photos: lungs, clear, wide


def linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def layer_norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def written_att_fc(w, x, words, position, heads, layers):
    """Weights, X (places, d_x), W (T, d_w) without padding -> fc(x^), attention"""
    s = w["head.b_h"]
    for h in range(heads):
        name = f"head.att.{h}"
        seen = layer_norm(x @ w[f"{name}.sigma_x.weight"].T, w, f"{name}.norm_x").relu()
        read = layer_norm(words @ w[f"{name}.sigma_w.weight"].T, w, f"{name}.norm_w").relu()
        scores = seen @ read.T / math.sqrt(7)  # Eq. 3
        s = s + w["head.sigma_h"][h] * scores.exp().sum(1).log()  # Eq. 4
    p = s.softmax(0)
    x = p @ x  # Eq. 5
    for n in range(layers):
        x = layer_norm(linear(x, w, f"head.fc.{3 * n}"), w, f"head.fc.{3 * n + 1}").relu()
    return x, p


def written_tfm(w, x, words, position, heads, layers):
    """-> what the masked place gives; how it looks at the photo, as a fraction of all places"""
    z = torch.cat([linear(x, w, "head.project"), words])
    width = z.size(1)  # a head is as wide as the model
    for name in (f"head.layers.{n}" for n in range(layers)):
        keys = linear(z, w, f"{name}.key").split(width, 1)  # Eq. 13
        queries = linear(z, w, f"{name}.query").split(width, 1)
        values = linear(z, w, f"{name}.value").split(width, 1)
        attention = [(k @ q.T / math.sqrt(width)).softmax(1) for k, q in zip(keys, queries)]
        outputs = [weights @ v for weights, v in zip(attention, values)]  # Eq. 14
        merged = linear(torch.cat(outputs, 1), w, f"{name}.out_proj")  # Eq. 15
        z = layer_norm(z + merged, w, f"{name}.norm1")
        inner = linear(linear(z, w, f"{name}.linear1").relu(), w, f"{name}.linear2")
        z = layer_norm(z + inner, w, f"{name}.norm2")
    masked = len(x) + position
    p = sum(attention)[masked, : len(x)] / heads
    assert p.sum() < 0.99  # the text has its part, so that dividing by the sum says something
    return z[masked], p / p.sum()


@pytest.mark.parametrize("head, written", (("att-fc", written_att_fc), ("tfm", written_tfm)))
@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_heads_are_their_equations(head, written, heads, layers, monkeypatch):
    """att-fc: Eqs. 3-5, tfm: Eqs. 13-15, where padding is cut off; the maps are their weights."""
    # att-fc uses float() against half precision; here it would lose digits.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(5))
    monkeypatch.setattr(icmlm, "ATTENTION_WIDTH", 7)
    torch.manual_seed(1)
    args = SimpleNamespace(arch="", head=head, layers=layers, heads=heads, lambda_tp=1)
    model = icmlm.ICMLM(args, 6, 3).double()
    if head == "att-fc":  # Sec. 3.2: it begins as the mean of its heads
        assert model.head.sigma_h.tolist() == pytest.approx(heads * [1 / heads])
        assert model.head.b_h.tolist() == [0]
    w = random_weights(model, 0.5).eval().state_dict()
    mask, mask_pos = torch.arange(5) < torch.tensor([[5], [2], [4]]), torch.tensor([3, 0, 2])
    token_features = torch.randn(3, 5, 6, dtype=torch.float64)
    token_features[~mask] = 30  # what pads them is not zero
    features = torch.randn(3, 5, 2, 3, dtype=torch.float64) + 0.3
    with torch.no_grad():
        vectors, _ = model(features, token_features, mask, mask_pos)
        maps = attention_maps(model.head, features, token_features, mask, mask_pos)
    for i in range(3):
        x, words = features[i].flatten(1).T, token_features[i, mask[i]]  # places row by row
        expected, p = written(w, x, words, mask_pos[i], heads, layers)
        torch.testing.assert_close(vectors[i], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(maps[i], p.view(2, 3), rtol=0, atol=1e-10)
        assert p.max() > 1.1 / 6  # not even


@torch.no_grad()
def test_dropout_of_tfm():
    """As in BERT: a tenth of what either part adds to the residual path"""
    torch.manual_seed(0)
    layer = random_weights(icmlm.EncoderLayer(8, heads=1), 0.3).train()
    z, mask = torch.randn(2, 5, 8), torch.ones(2, 5).bool()
    torch.manual_seed(1)
    found = layer(z, mask)
    torch.manual_seed(1)
    attention = (layer.key(z) @ layer.query(z).mT / math.sqrt(8)).softmax(2)
    merged = layer.out_proj(attention @ layer.value(z))
    expected = layer.norm1(z + F.dropout(merged, 0.1))
    inner = layer.linear2(layer.linear1(expected).relu())
    expected = layer.norm2(expected + F.dropout(inner, 0.1))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, layer.eval()(z, mask))


@pytest.mark.parametrize("amp", ("off", "bf16"))
def test_eq4_is_computed_in_float32(amp, monkeypatch):
    """Where the product of Eq. 4 is made, neither TF32 nor half precision is in force; afterwards
    the settings are as before."""
    torch.manual_seed(0)
    head = icmlm.AttentionHead(5, 6)
    x, w, mask = torch.randn(2, 9, 5), torch.randn(2, 4, 6), torch.ones(2, 4).bool()
    before, found, matmul = torch.get_float32_matmul_precision(), [], torch.Tensor.__matmul__

    def watched(a, b):
        product = matmul(a, b)
        half = torch.is_autocast_enabled("cpu")
        found.append((torch.get_float32_matmul_precision(), half, product.dtype))
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    torch.set_float32_matmul_precision("high")  # as common.init_distributed does
    with common.autocast(CPU, amp):
        scores = head(x, w, mask)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.is_autocast_enabled("cpu") == (amp == "bf16")
    torch.set_float32_matmul_precision(before)
    assert found == [("highest", False, torch.float32)] and scores.dtype == torch.float32


def test_another_language_model_in_the_same_folder(tiny, tmp_path, capsys):
    """--lm FOLDER was trained again: the run that read it is not resumed with another."""
    folder = tmp_path / "lm"
    captions = ["a red circle on the left", "the blue star is large", "a moon stands"]
    small_bert.train(folder, 9 * captions, 2, 0, CPU, "off", layers=1, width=64)
    assert not capsys.readouterr().err  # no line of a bar without a terminal
    command = tiny("icmlm", tmp_path / "run", "--iters", 2, "--lm", folder)
    run_here(command)
    small_bert.train(folder, 9 * captions, 2, 1, CPU, "off", layers=1, width=64)
    assert "holds a run with another" in refusal(command)


def test_validates_while_it_trains(tiny, tmp_path):
    """result.json is written by each validation: a killed run has its last one."""
    command = tiny("icmlm", tmp_path, "--iters", 5, "--validate-every", 2)
    kill_at(3, command)
    rows = {row["iteration"]: row for row in metrics(tmp_path)}
    content = result(tmp_path)
    assert content["validation"] == {
        "mlm": rows[2]["validation_mlm"],
        "tp": rows[2]["validation_tp"],
    }
    assert content["masked_words"]["triplets"] > 0 and "validation_mlm" not in rows[3]


def written_out(captions, triplets):
    """(photo, caption with the masked word in brackets) of each triplet"""
    rows = []
    for photo, n, mask_pos, _ in triplets.tolist():
        names = TOKENIZER.convert_ids_to_tokens(TOKENIZER(captions[photo][n])["input_ids"])
        names[mask_pos] = f"<{names[mask_pos]}>"
        rows.append((photo, " ".join(names[1:-1])))
    return rows


def test_triplets_are_photo_caption_and_masked_word(tmp_path, capsys):
    """Sec. 4, Datasets: each concept of each caption of 3 to 25 tokens that is not repeated. A run
    that resumes reads what was found."""
    longest, pieces = "the dog is on" + 21 * " the", "cat" + 8 * " surfboards"  # 25 tokens
    of_third = longest, f"{longest} a", "a red dog", pieces, f"{pieces} a"
    data = captioned(["a red dog", "a red dog", "the cat"], [], of_third)  # the first is repeated
    val, none = captioned(["1 1 1"], ["the cat is red"]), captioned(["1 1 1 1"], ["1 1 1"])
    expected = [(0, "a <red> dog"), (0, "a red <dog>"), (2, longest.replace("dog", "<dog>"))]
    expected += [(2, "a <red> dog"), (2, "a red <dog>"), (2, "<cat>" + 8 * " surf ##board ##s")]
    args = icmlm.get_args(["--pos", "nn+adj", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="no caption has one of the words"):
        icmlm.make_triplets(args, [data, none], TOKENIZER)
    icmlm.make_triplets(args, [data, val], TOKENIZER)
    for second in (val, none):
        concepts, *found = icmlm.load_triplets(args, [data, second], TOKENIZER)
        rows = [written_out(x.data.captions, x.triplets) for x in found]
        assert rows == [expected, [(1, "the <cat> is red"), (1, "the cat is <red>")]]
    assert concepts == {"surfboards": "nouns", "dog": "nouns", "cat": "nouns", "red": "adjectives"}
    args.num_concepts = 3
    assert len(icmlm.load_triplets(args, [data, val], TOKENIZER)[0]) == 3
    assert "which words are nouns" not in capsys.readouterr().out
    args.pos = "nn"
    icmlm.make_triplets(args, [data, val], TOKENIZER)
    assert "TextBlob says which words are nouns, and" in capsys.readouterr().out


def test_only_whole_words_of_one_token_are_masked():
    """Neither a word of several tokens nor a piece of one, nor a part of a hyphenated word, whose
    tag is the whole word; punctuation beside it does not matter."""
    words = "dog surfboard surf shirt t cat zebra red surfdog".split()
    data = captioned(["surf surfboard surfdog dogs dog"], ["zebra t-shirt, Cat.", "red-dog shirt-"])
    triplets = icmlm.find_triplets(data, words, TOKENIZER)
    assert written_out(data.captions, triplets) == [
        (0, "<surf> surf ##board surf ##dog dog ##s dog"),
        (0, "surf surf ##board surf ##dog dog ##s <dog>"),
        (1, "[UNK] t - shirt , <cat> ."),
        (1, "red - dog <shirt> -"),
    ]
    assert triplets[:, 3].tolist() == [2, 0, 5, 3]
    # Words that share a token are each their own concept: the rarer does not rename the other.
    tokenizer = small_bert.train_tokenizer(2 * ["a cafe and a café"])
    data = captioned(["a café"], ["a cafe"])
    assert tokenizer("a café")["input_ids"] == tokenizer("a cafe")["input_ids"]
    triplets = icmlm.find_triplets(data, ["cafe", "café"], tokenizer)
    assert triplets.tolist() == [[0, 0, 2, 1], [1, 0, 2, 0]]


@pytest.mark.parametrize("kind, trim", ((byte_level, True), (byte_level, False), (metaspace, None)))
def test_spaces_before_words(kind, trim, capsys):
    """Whether or not the span of a token holds the space before its word, the word is found."""
    captions = ["dogs run in the snow", "a red dog runs", "the snow, red dogs"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=kind(50 * captions, trim), unk_token="<unk>", mask_token="<mask>"
    )
    [(start, _)] = [
        span for span in tokenizer(captions[0], return_offsets_mapping=True)["offset_mapping"]
        if captions[0][slice(*span)].strip() == "snow"
    ]
    assert captions[0][start] == ("s" if trim else " ")
    concepts = ["snow", "dogs", "red"]
    triplets = icmlm.find_triplets(captioned(captions), concepts, tokenizer)
    masked = []
    for _, n, t, concept in triplets.tolist():
        [token] = tokenizer.convert_ids_to_tokens([tokenizer(captions[n])["input_ids"][t]])
        assert token.lstrip("▁Ġ") == concepts[concept]
        masked.append((n, concepts[concept]))
    expected = {(0, "dogs"), (0, "snow"), (1, "red"), (2, "snow"), (2, "red"), (2, "dogs")}
    assert {*masked} == expected and len(masked) == len(expected)
    assert not capsys.readouterr().out


def test_few_words_are_single_tokens(capsys):
    """Fewer than half of the words to mask: it is said with both numbers."""
    words = ["surfboard", "dog"]
    both = "surfboard surfboard dog dog"
    icmlm.find_triplets(captioned([both]), words, TOKENIZER)
    assert not capsys.readouterr().out
    icmlm.find_triplets(captioned([both, "a surfboard"]), words, TOKENIZER)
    assert capsys.readouterr().out.startswith("only 2 of 5 words to mask are single tokens")


def test_triplets_on_all_cores(monkeypatch):
    """Photos with and without captions, in other processes: the same triplets in the same order"""
    rows = [["a dog", "a red dog left of the cat"], [], ["the cat"], ["a bird", "dog dog"]]
    data = captioned(*600 * rows)
    triplets = icmlm.find_triplets(data, CONCEPTS, TOKENIZER)
    assert triplets[-1, 0] == len(data) - 1
    monkeypatch.setattr(common, "on_all_cores", lambda function, items, desc: [function(items)])
    assert np.array_equal(triplets, icmlm.find_triplets(data, CONCEPTS, TOKENIZER))


PARTS = {"dog": "nouns", "cat": "nouns"} | dict.fromkeys(("left", "right", "red"), "adjectives")
CONCEPTS = list(PARTS)


def samples_of(tokenizer, folder):
    """-> MaskedWords of four photos, red on the left and blue on the right; one has no caption"""
    paths = [folder / f"{n}.png" for n in range(4)]
    for n, path in enumerate(paths):
        pixels = np.zeros((40, 40, 3), np.uint8)
        pixels[:, :20, 0] = pixels[:, 20:, 2] = 200 + 10 * n
        Image.fromarray(pixels).save(path)
    left, right, red = "a dog left of the cat", "a cat right of the dog", "the red dog"
    data = captioned([left, right], [], [right, red], [left, red], images=photos_at(*paths))
    found = icmlm.find_triplets(data, CONCEPTS, tokenizer)
    args = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0, seed=0)
    return icmlm.MaskedWords(data, found, PARTS, tokenizer, args)


def test_samples_and_batches(tmp_path):
    """[MASK] takes the place of the target; in a flipped photo left and right change places, in
    the caption and in the tags. Rows of a batch are as long as the longest."""
    samples = samples_of(TOKENIZER, tmp_path)
    numbers = list(range(len(samples)))
    rows = [samples[n] for n in numbers]  # of validation, then of six epochs
    rows += [samples[0, epoch, n] for epoch in range(6) for n in numbers]
    batch, seen = icmlm.collate([row.copy() for row in rows]), set()
    for i, (number, row) in enumerate(zip(7 * numbers, rows)):
        photo, n, position, concept = samples.triplets[number].tolist()
        captions, blue_left = samples.data.captions[photo], bool(row["image"][8, 2, 2] > 100)
        assert i >= len(samples) or not blue_left
        assert row["image"].max() == 200 + 10 * photo
        flip = {"left": "right", "right": "left"} if blue_left else {}
        words = [flip.get(word, word) for word in f"[CLS] {captions[n]} [SEP]".split()]
        target, words[position] = words[position], "[MASK]"
        assert target == flip.get(CONCEPTS[concept], CONCEPTS[concept])
        seen.add((blue_left, target))
        expected = {"mask_pos": position, "concept": concept}
        expected["target"] = TOKENIZER.convert_tokens_to_ids(target)
        assert {name: batch[name][i].item() for name in expected} == expected
        tokens = TOKENIZER.convert_ids_to_tokens(batch["tokens"][i].tolist())
        assert tokens == words + (len(tokens) - len(words)) * ["[PAD]"]
        assert batch["attention_mask"][i].tolist() == [token != "[PAD]" for token in tokens]
        tags = {CONCEPTS[k] for k in batch["tags"][i].nonzero().flatten().tolist()}
        assert tags == {flip.get(word, word) for word in " ".join(captions).split()} & set(CONCEPTS)
    assert batch["attention_mask"].any(0).all()
    assert seen == {(flipped, word) for flipped in (False, True) for word in CONCEPTS}


def test_no_swap_by_pieces(tmp_path):
    """If "right" is several tokens, the target in a flipped photo is still a word."""
    words = [word for word in VOCABULARY if word != "right"]
    tokenizer = wordpiece([*words, "r", "##i", "##g", "##h"])
    samples = samples_of(tokenizer, tmp_path)
    for n, (photo, *_, concept) in enumerate(samples.triplets.tolist()):
        for sample in (samples[0, epoch, n] for epoch in range(6)):
            assert sample["target"] == tokenizer.convert_tokens_to_ids(CONCEPTS[concept])
            if photo == 3:  # of the left alone; its tags are swapped nevertheless
                blue_left = sample["image"][8, 2, 2] > 100
                assert sample["tags"][2:4].tolist() == ([0, 1] if blue_left else [1, 0])


def test_no_swap_that_moves_words(tmp_path):
    """To a cased BERT, the capitals of signs are two and three tokens, so that a swap, which has as
    many in all, would move the word between them."""
    pieces = "LE ##FT R ##I ##GHT".split()
    tokenizer = wordpiece([*VOCABULARY, *pieces], lowercase=False)
    Image.new("RGB", (40, 40)).save(tmp_path / "0.png")
    caption = "a LEFT red dog RIGHT the cat"
    data = captioned([caption], images=photos_at(tmp_path / "0.png"))
    triplets = icmlm.find_triplets(data, CONCEPTS, tokenizer)
    args = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0, seed=0)
    samples, swapped = icmlm.MaskedWords(data, triplets, PARTS, tokenizer, args), set()
    for n, (*_, concept) in enumerate(triplets.tolist()):
        for epoch in range(8):
            sample = samples[0, epoch, n]
            assert sample["target"] == tokenizer.convert_tokens_to_ids(CONCEPTS[concept])
            tokens = sample["tokens"].tolist()
            tokens[sample["mask_pos"]] = sample["target"]
            swapped.add(tokenizer.decode(tokens[1:-1]) != caption)
    assert len(triplets) == 3 and swapped == {False}


@torch.no_grad()
def test_accuracies_written_out(tmp_path):
    """Tab. 1: top-1 and top-5, by part of speech, counted triplet by triplet; each caption also
    beside the photo of another one: what the head knows without seeing."""
    language_model("Bert", tmp_path)
    lm = icmlm.load_language_model(str(tmp_path), CPU, "off")[1]
    for n, word in enumerate("red on of cat a dog".split()):  # it knows how often some words are
        lm.mlm_head.predictions.bias[TOKENIZER.convert_tokens_to_ids(word)] += 4 + n
    samples, losses = samples_of(TOKENIZER, tmp_path), []
    ranks = {"all": [], "nouns": [], "adjectives": []}
    for sample in (samples[n] for n in range(len(samples))):
        tokens, target = sample["tokens"][None], sample["target"]
        logits = lm.mlm_head(lm(tokens, tokens > 0)[:, sample["mask_pos"]])[0].tolist()
        losses.append(math.log(sum(map(math.exp, logits))) - logits[target])  # Eqs. 6, 7
        for part in ("all", PARTS[TOKENIZER.decode([target])]):
            ranks[part].append(sum(value > logits[target] for value in logits))
    percent = lambda part, limit: 100 * np.mean([rank < limit for rank in ranks[part]])
    expected = {"top1": percent("all", 1), "top5": percent("all", 5)}
    expected |= {f"{part} top1": percent(part, 1) for part in ("adjectives", "nouns")}
    assert 0 < expected["top1"] < expected["top5"] < 100
    seen = []

    class Head(nn.Module):
        def forward(self, features, token_features, mask, mask_pos):
            seen.append(features.mean((1, 2, 3)))
            return token_features[torch.arange(len(features)), mask_pos]

        def scores(self, vector, lm):
            return lm.mlm_head(vector)

    args = icmlm.get_args("--data x.jsonl --workers 0 --amp off".split())
    model = nn.Module()
    model.backbone, model.head = FeaturesAsGiven(3), Head()
    model.tags = lambda features: features.new_zeros(len(features), len(CONCEPTS))
    results = icmlm.validate(model, lm, samples, args, CPU, None)
    loss = {"mlm": np.mean(losses), "tp": math.log(len(CONCEPTS))}  # Eq. 2 with equal logits
    assert results["validation"] == pytest.approx(loss, abs=1e-4)
    names = "with the photo", "with another photo", "language model alone"
    expected = dict.fromkeys(names, pytest.approx(expected, abs=0.01))
    assert results["masked_words"] == {"triplets": len(samples), **expected}
    own, other = seen
    assert len(own) == len(samples) and len(own.unique()) == 3
    assert torch.equal(own, other.roll(-1)) and (own != other).float().mean() > 0.5


def test_ties_and_nan():
    """A constant predictor gets no credit, and one that has diverged neither."""
    logits, target = torch.zeros(4, 101), torch.full((4,), 3)
    logits[1] = torch.arange(101)
    logits[2], logits[3, 3] = math.nan, math.nan
    assert icmlm.target_ranks(logits, target).tolist() == [100, 97, 100, 100]


@pytest.mark.parametrize("init, head, frozen", ((1, 1, 50_000), (0, 1, 0), (1, 0, 0)))
def test_how_long_the_backbone_is_frozen(init, head, frozen):
    """App. F.1. In tfm, or in a backbone that sees nothing yet, there is nothing to warm up."""
    flags = init * ["--init", "x.pth"] + head * ["--head", "att-fc"]
    args = icmlm.get_args(["--data", "coco", "--arch", "vgg16_bn", *flags])
    assert args.warmup_attention * args.iters == frozen


@pytest.mark.parametrize("head", icmlm.HEADS)
def test_the_first_step_written_out(head, tiny, tmp_path, monkeypatch):
    """Eqs. 2, 7 and 8 in loops over the batch, from the weights that the seed gives"""
    monkeypatch.setattr(icmlm, "DROPOUT", 0.0)
    command = tiny("icmlm", tmp_path, *f"--head {head} --lambda-tp 0.3 --iters 1 --seed 3".split())
    run_here(command)
    args = icmlm.get_args(command[1:])
    tokenizer, lm = icmlm.load_language_model(args.lm, CPU, "off")
    data = [one_split("coco", args.root, f"{split}2017") for split in ("train", "val")]
    concepts, triplets, _ = icmlm.load_triplets(args, data, tokenizer)  # those of the run
    torch.manual_seed(3)
    model = icmlm.ICMLM(args, lm.token_embeddings.size(1), len(concepts))
    assert not any(weight.requires_grad for weight in lm.parameters())
    order = np.random.default_rng([3, 0]).permutation(len(triplets))[:8]
    batch = icmlm.collate([triplets[3, 0, int(n)] for n in order])
    images, mask = common.augment(batch["image"], batch["jitter"]), batch["attention_mask"]
    with torch.no_grad():
        vectors, tag_logits = model(images, lm(batch["tokens"], mask), mask, batch["mask_pos"])
        V = lm.encoder.embeddings.word_embeddings.weight  # Eq. 6
        logits = lm.mlm_head(vectors) if head == "tfm" else torch.einsum("bd, kd", vectors, V)
    mlm, tp = 0.0, 0.0
    for target, tags, *logits in zip(batch["target"], batch["tags"], logits, tag_logits):
        scores, tag_scores = (row.double().log_softmax(0) for row in logits)
        mlm -= scores[target].item() / 8  # Eq. 7
        for k in tags.nonzero().flatten():
            tp -= tag_scores[k].item() / tags.sum().item() / 8  # Eq. 2
    [logged] = metrics(tmp_path)
    expected = {"mlm": mlm, "tp": tp, "loss": mlm + 0.3 * tp}  # Eq. 8
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_without_lambda_tags_do_not_train_the_backbone(tiny, tmp_path):
    """--lambda-tp 0: l_tp is still measured, by a head on detached features [App. B]."""
    flags = "--iters 4 --seed 1 --lambda-tp".split()
    for weight in (0, 1e-30):
        run_here(tiny("icmlm", tmp_path / str(weight), *flags, weight))
    without, tiny_weight = (metrics(tmp_path / name) for name in ("0", "1e-30"))
    assert [row["mlm"] for row in without] == [row["loss"] for row in without]
    assert [row["mlm"] for row in without] == [row["mlm"] for row in tiny_weight]
    assert without[-1]["tp"] < without[0]["tp"] == tiny_weight[0]["tp"]
    assert result(tmp_path / "0")["validation"].keys() == {"mlm", "tp"}


def test_warm_up_of_the_attention(tiny, tmp_path):
    """As long as it lasts, the backbone is that of --init, with its batch statistics."""
    init = tmp_path / "init.pth"
    common.save_weights(init, common.build_backbone("resnet18"))
    flags = "--head att-fc --heads 2 --warmup-attention 0.5 --iters 8 --keep-every 4".split()
    flags += ["--steps", 0.5, 0.75]
    run_here(tiny("icmlm", tmp_path, *flags, "--validate-every", 6, "--init", init))
    given, ended = (torch.load(x, weights_only=True) for x in (init, tmp_path / "backbone.pth"))
    model = torch.load(tmp_path / "model_4.pth", weights_only=True)["model"]
    assert (model["head.att.1.norm_w.weight"] != 1).any()  # the attention is trained
    for name, value in given.items():
        assert torch.equal(value, model[f"backbone.{name}"])
        assert "num_batches" in name or not torch.equal(value, ended[name])
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows if "validation_mlm" in row] == [6, 8]
    assert [row["lr"] for row in rows] == pytest.approx(4 * [5e-2] + 2 * [5e-3] + 2 * [5e-4])


def test_learns(easy_scenes, tmp_path):
    """An eighth of the demo, on easier scenes: the photo tells words that the text does not"""
    flags = ["--iters", 80, "--lm-iters", 40, "--image-size", 32, "--seed", 2]  # 1 comes later
    flags += ["--proxy-triplets", 500]
    run_here(["icmlm.py", *flags, "--output", tmp_path])
    words = result(tmp_path)["masked_words"]
    top1 = words["with the photo"]["top1"]
    assert top1 > words["with another photo"]["top1"] + 3
    assert top1 > words["language model alone"]["top1"] + 6
