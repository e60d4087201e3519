"""icmlm.py against the paper written out slowly, its triplets one by one, and as a user runs it.

In many tests the backbone is `FeaturesAsGiven`: images are the features that the heads see.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import CPU, FeaturesAsGiven, captioned, metrics, photos_at, result, run_here
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from torch import nn

import common
import icmlm
from downstream.masked_words import attention_maps
from extras import small_bert

both_heads = pytest.mark.parametrize("head", icmlm.HEADS)
KINDS = "Bert", "Roberta"


def random_weights(module, scale):
    """Every parameter random, the gains of norms around 1: whatever is forgotten shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter)
    return module


WORDS = "a the dog cat red blue surf left right on of is runs grass t shirt - , . 1".split()
PIECES = "##board ##s ##dog ##cat ##red ##c ##a ##t".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES]
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SENTENCES = ["the red dog runs on grass", "a cat is on the left of a surfboard", "a red shirt"]

SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}


def wordpiece(words):
    pieces = BertWordPieceTokenizer({word: n for n, word in enumerate(words)})._tokenizer
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **SPECIAL)


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """{kind: the folder of a language model of this kind with random weights}"""
    tokenizer = wordpiece(VOCABULARY)
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(pad_token_id=0, **SIZES)
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
        random_weights(model, 0.3).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def pretrained(folder):
    return transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(lms):
    return transformers.AutoTokenizer.from_pretrained(lms["Bert"])


@pytest.mark.parametrize("amp", ("off", "bf16", "fp16"))
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_language_model(kind, amp, lms):
    """Sec. 3.2: W is the last layer before any head, without the padding; given it, the pretrained
    token classification layer says what the model says. V are the input embeddings."""
    model = pretrained(lms[kind])
    tokenizer, lm = icmlm.load_language_model(str(lms[kind]), CPU, amp)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    assert not mask.all()
    exact, logits = model.base_model(**inputs).last_hidden_state, model(**inputs).logits
    for row, visible, encoded in zip(tokens, mask, exact):
        alone = model(row[visible][None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(encoded[visible], alone, rtol=0, atol=1e-5)
    with torch.no_grad(), common.autocast(CPU, amp):
        expected = model.base_model(**inputs).last_hidden_state.float()
    features = lm.encode(tokens, mask)
    assert torch.equal(features, expected) and lm.width == features.size(2) == 16
    assert not features.requires_grad and not features.is_inference()  # it can be trained on
    half = {parameter.dtype for parameter in lm.encoder.parameters()} - {torch.float32}
    assert bool(half) == (amp != "off")
    for position in range(tokens.size(1)):
        given = lm.mlm_head(exact[:, position])
        torch.testing.assert_close(given, logits[:, position], rtol=0, atol=2e-5)
    assert logits.std(-1).min() > 0.05  # they differ, so that equal ones say something
    [table] = [v for name, v in model.state_dict().items() if "word_embeddings.weight" in name]
    assert torch.equal(lm.token_embeddings, table) and table.dtype == torch.float32


def test_no_language_model(lms, tokenizer, tmp_path):
    """Weights that are missing would be random, and frozen; other models have other heads."""
    config = transformers.DistilBertConfig(vocab_size=99, n_layers=1, n_heads=2, dim=16)
    others = {
        r"without \['cls": pretrained(lms["Bert"]).bert,
        "DistilBertForMaskedLM": transformers.DistilBertForMaskedLM(config),
    }
    for n, (lacks, model) in enumerate(others.items()):
        folder = str(tmp_path / str(n))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with pytest.raises(SystemExit, match=f"is not a BERT or RoBERTa with its head.*{lacks}"):
            icmlm.load_language_model(folder, CPU, "off")
    with pytest.raises(SystemExit, match="--lm /no/model: give a BERT"):
        icmlm.load_language_model("/no/model", CPU, "off")


def test_small_bert(tmp_path, monkeypatch):
    """It reads the captions in the order of training runs, and is not kept if it diverges."""
    captions = [f"a {word} on the grass" for word in "dog cat cow hen fox".split()]
    shuffled = itertools.islice(small_bert.shuffled_forever(captions, 3), 12)
    keys = itertools.islice(common.infinite_sampler(len(captions), 4, 3), 12)
    assert list(shuffled) == [captions[i] for *_, i in keys]
    monkeypatch.setattr(small_bert, "LR", math.inf)
    with pytest.raises(SystemExit, match="the small BERT is not finite: try another --seed"):
        small_bert.train(tmp_path / "lm", captions, 3, 0, CPU, "off", layers=1, width=64)
    assert not (tmp_path / "lm").exists()


ATTENTION_WIDTH = 7
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
STUB = SimpleNamespace(width=6, token_embeddings=TABLE, mlm_head=lambda states: 2 * states)


def build_model(head, num_tags=0, layers=1, heads=1):
    """ICMLM of five channels without a backbone and without dropout"""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(5))
        patch.setattr(icmlm, "ATTENTION_WIDTH", ATTENTION_WIDTH)
        patch.setattr(icmlm, "DROPOUT", 0.0)
        return icmlm.ICMLM("stub", head, STUB, num_tags, layers, heads)


def padded_batch(dtype=torch.float64):
    """Features of 2 x 3 places, captions of 5, 2 and 4 tokens; what pads them is not zero"""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    token_features = torch.where(mask[..., None], normal(3, 5, 6), 30.0)
    return normal(3, 5, 2, 3) + 0.3, token_features, mask, torch.tensor([3, 0, 2])


def linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def written_att_fc(w, x, words, position, heads, layers):
    """Weights, X (places, d_x), W (T, d_w) without padding -> logits, attention"""
    s = w["head.b_h"]
    for h in range(heads):
        name = f"head.att.{h}"
        seen = layer_norm(linear(x, w, f"{name}.sigma_x"), w, f"{name}.norm_x").relu()
        read = layer_norm(linear(words, w, f"{name}.sigma_w"), w, f"{name}.norm_w").relu()
        scores = seen @ read.T / math.sqrt(ATTENTION_WIDTH)  # Eq. 3
        s = s + w["head.sigma_h"][h] * scores.exp().sum(1).log()  # Eq. 4
    p = s.softmax(0)
    x = p @ x  # Eq. 5
    for n in range(layers):
        x = layer_norm(linear(x, w, f"head.fc.{n}.0"), w, f"head.fc.{n}.1").relu()
    return TABLE @ x, p  # Eq. 6


def written_layer(z, w, name, heads):
    """-> the new Z; the mean over the heads of softmax(K Q^T / sqrt(D))"""
    width = z.size(1)  # a head is as wide as the model
    keys = linear(z, w, f"{name}.key").split(width, 1)  # Eq. 13
    queries = linear(z, w, f"{name}.query").split(width, 1)
    values = linear(z, w, f"{name}.value").split(width, 1)
    attention, outputs = [], []
    for h in range(heads):
        attention.append((keys[h] @ queries[h].T / math.sqrt(width)).softmax(1))
        outputs.append(attention[h] @ values[h])  # Eq. 14
    merged = linear(torch.cat(outputs, 1), w, f"{name}.out_proj")  # Eq. 15
    z = layer_norm(z + merged, w, f"{name}.norm1")
    inner = linear(linear(z, w, f"{name}.linear1").relu(), w, f"{name}.linear2")
    return layer_norm(z + inner, w, f"{name}.norm2"), sum(attention) / heads


def written_tfm(w, x, words, position, heads, layers):
    """-> what the masked place gives; how it looks at the photo, as a fraction of all places"""
    z = torch.cat([linear(x, w, "head.project"), words])
    for n in range(layers):
        z, attention = written_layer(z, w, f"head.layers.{n}", heads)
    masked = len(x) + position
    p = attention[masked, : len(x)]
    assert p.sum() < 0.99  # the text has its part, so that dividing by the sum says something
    return 2 * z[masked], p / p.sum()


WRITTEN = {"att-fc": written_att_fc, "tfm": written_tfm}


@both_heads
@pytest.mark.parametrize("heads, layers", ((1, 1), (3, 2)))
def test_heads_are_their_equations(head, heads, layers, monkeypatch):
    """att-fc: Eqs. 3-6, tfm: Eqs. 13-15, where padding is cut off; the maps are their weights."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # against half precision
    model = build_model(head, heads=heads, layers=layers).double()
    w = random_weights(model, 0.5).eval().state_dict()
    assert "head.att.0.sigma_x.bias" not in w and "head.att.0.sigma_w.bias" not in w
    features, token_features, mask, mask_pos = padded_batch()
    with torch.no_grad():
        logits, _ = model(features, token_features, mask, mask_pos)
        maps = attention_maps(model.head, features, token_features, mask, mask_pos)
    assert maps.shape == (3, 2, 3)
    for i in range(3):
        x, words = features[i].flatten(1).T, token_features[i, mask[i]]  # places row by row
        expected, p = WRITTEN[head](w, x, words, mask_pos[i], heads, layers)
        torch.testing.assert_close(logits[i], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(maps[i].flatten(), p, rtol=0, atol=1e-10)
        assert p.max() > 1.1 / 6  # not even
    if head == "att-fc":  # Sec. 3.2: it begins as the mean of its heads
        begun = build_model(head, heads=4).head
        assert begun.sigma_h.tolist() == 4 * [0.25] and begun.b_h.tolist() == [0]


def written_out(captions, triplets, tokenizer):
    """(photo, caption with the masked word in brackets) of each triplet"""
    rows = []
    for photo, n, mask_pos, _ in triplets.tolist():
        names = tokenizer.convert_ids_to_tokens(tokenizer(captions[photo][n])["input_ids"])
        names[mask_pos] = f"<{names[mask_pos]}>"
        rows.append((photo, " ".join(names[1:-1])))
    return rows


def test_triplets_are_photo_caption_and_masked_word(tokenizer, tmp_path):
    """Sec. 4, Datasets: each concept of each caption of 3 to 25 tokens that is not repeated. A run
    that goes on reads what was found."""
    longest, pieces = "the dog is on" + 21 * " the", "cat" + 8 * " surfboards"  # 25 tokens
    of_third = longest, f"{longest} a", "a red dog", pieces, f"{pieces} a"
    data = captioned(["a red dog", "a red dog", "the cat"], [], of_third)  # the first is repeated
    val, none = captioned(["1 1 1"], ["the cat is red"]), captioned(["1 1 1 1"], ["1 1 1"])
    expected = [(0, "a <red> dog"), (0, "a red <dog>"), (2, longest.replace("dog", "<dog>"))]
    expected += [(2, "a <red> dog"), (2, "a red <dog>"), (2, "<cat>" + 8 * " surf ##board ##s")]
    args = icmlm.get_args(["--pos", "nn+adj", "--output", str(tmp_path)])
    for second in (val, none):
        concepts, *found = icmlm.load_triplets(args, [data, second], tokenizer)
        assert concepts["dog"] == concepts["cat"] == "nouns" and concepts["red"] == "adjectives"
        assert "the" not in concepts and len(concepts) == 4
        assert found[0].data.images is data.images
        assert found[0].triplets.itemsize == 4  # up to 13 million
        rows = [written_out(x.data.captions, x.triplets, tokenizer) for x in found]
        assert rows == [expected, [(1, "the <cat> is red"), (1, "the cat is <red>")]]
        (tmp_path / "checkpoint.pth").touch()
    (tmp_path / "checkpoint.pth").unlink()
    args.num_concepts = 3
    assert len(icmlm.load_triplets(args, [data, data], tokenizer)[0]) == 3
    with pytest.raises(SystemExit, match="no caption holds a word to mask"):
        icmlm.load_triplets(args, [data, none], tokenizer)


def test_only_whole_words_of_one_token_are_masked(tokenizer):
    """Neither a word of several tokens nor a piece of one, nor a part of a hyphenated word, whose
    tag is the whole word; punctuation beside it does not matter."""
    words = "dog surfboard surf shirt t cat zebra red surfdog".split()
    data = captioned(["surf surfboard surfdog dogs dog"], ["zebra t-shirt, Cat.", "red-dog shirt-"])
    triplets = icmlm.find_triplets(data, words, tokenizer)
    assert written_out(data.captions, triplets, tokenizer) == [
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


LEFT_RIGHT = ["a dog left of the cat", "a cat right of the dog", "the red dog"]
CONCEPTS = ["dog", "cat", "left", "right", "red"]
FLIP = {"left": "right", "right": "left"}
WHOLE = SimpleNamespace(image_size=16, crop_min=1.0, colour_jitter=0.0, seed=0)


@pytest.fixture
def photos(tmp_path):
    """Four photos, red on the left and blue on the right; the second has no caption"""
    paths = [tmp_path / f"{n}.png" for n in range(4)]
    for n, path in enumerate(paths):
        pixels = np.zeros((40, 40, 3), np.uint8)
        pixels[:, :20, 0] = pixels[:, 20:, 2] = 200 + 10 * n
        Image.fromarray(pixels).save(path)
    captions = LEFT_RIGHT[:2], [], LEFT_RIGHT[1:], LEFT_RIGHT[::2]
    return captioned(*captions, images=photos_at(*paths))


@pytest.fixture
def triplets(photos, tokenizer):
    parts = ["nouns", "nouns", "adjectives", "adjectives", "adjectives"]
    found = icmlm.find_triplets(photos, CONCEPTS, tokenizer)
    return icmlm.MaskedWords(photos, found, dict(zip(CONCEPTS, parts)), tokenizer, WHOLE)


def test_samples_and_batches(tokenizer, photos, triplets):
    """[MASK] takes the place of the target; in a flipped photo left and right change places, in
    the caption and in the tags. Rows of a batch are as long as the longest."""
    numbers = range(len(triplets))
    training = [(0, epoch, n) for epoch in range(6) for n in numbers]
    keys = [*numbers, *training]  # of validation, then of training
    rows = [triplets[key] for key in keys]
    batch, seen = icmlm.collate(rows), set()
    longest = max(len(row["tokens"]) for row in rows)
    for i, (key, row) in enumerate(zip(keys, rows)):
        training = isinstance(key, tuple)
        photo, n, position, concept = triplets.triplets[key[-1] if training else key].tolist()
        blue_left = bool(row["image"][8, 2, 2] > 100)
        assert row["flipped"] == blue_left and (training or not blue_left)
        assert row["image"].max() == 200 + 10 * photo
        flip = FLIP if blue_left else {}
        words = ["[CLS]", *photos.captions[photo][n].split(), "[SEP]"]
        words = [flip.get(word, word) for word in words]
        target, words[position] = words[position], "[MASK]"
        assert target == flip.get(CONCEPTS[concept], CONCEPTS[concept])
        seen.add((blue_left, target))
        expected = {"photo": photo, "mask_pos": position, "concept": concept}
        expected["target"] = tokenizer.convert_tokens_to_ids(target)
        assert {name: batch[name][i].item() for name in expected} == expected
        padding = longest - len(words)
        tokens = tokenizer.convert_ids_to_tokens(batch["tokens"][i].tolist())
        assert tokens == words + padding * ["[PAD]"]
        assert batch["attention_mask"][i].tolist() == len(words) * [True] + padding * [False]
        of_photo = " ".join(photos.captions[photo]).split()
        tags = {CONCEPTS[k] for k in batch["tags"][i].nonzero().flatten().tolist()}
        assert tags == {flip.get(word, word) for word in of_photo} & set(CONCEPTS)
    assert seen == {(flipped, word) for flipped in (False, True) for word in CONCEPTS}


def test_no_swap_by_pieces(photos):
    """If "right" is several tokens, the target in a flipped photo is still a word."""
    pieces = [word for word in VOCABULARY if word != "right"] + ["r", "##i", "##g", "##h"]
    tokenizer = wordpiece(pieces)
    concepts = dict.fromkeys(CONCEPTS, "nouns")
    found = icmlm.find_triplets(photos, concepts, tokenizer)
    words = icmlm.MaskedWords(photos, found, concepts, tokenizer, WHOLE)
    for n, (photo, *_, concept) in enumerate(found.tolist()):
        for sample in (words[0, epoch, n] for epoch in range(6)):
            assert sample["target"] == tokenizer.convert_tokens_to_ids(CONCEPTS[concept])
            if photo == 3:  # of the left alone; its tags are swapped nevertheless
                assert sample["tags"][2:4].tolist() == ([0, 1] if sample["flipped"] else [1, 0])


@torch.no_grad()
def test_accuracies_written_out(lms, tokenizer, triplets):
    """Tab. 1: top-1 and top-5, by part of speech, counted triplet by triplet; each caption also
    beside the photo of another one: what the head knows without seeing."""
    lm = icmlm.load_language_model(str(lms["Bert"]), CPU, "off")[1]
    for n, word in enumerate("red on of cat a dog".split()):  # it knows how often some words are
        lm.mlm_head.predictions.bias[tokenizer.convert_tokens_to_ids(word)] += 4 + n
    ranks, losses = {"all": [], "nouns": [], "adjectives": []}, []
    for n in range(len(triplets)):
        position, target = triplets[n]["mask_pos"], triplets[n]["target"]
        row = triplets[n]["tokens"][None]
        logits = lm.mlm_head(lm.encode(row, row > 0)[:, position])[0].tolist()
        rank = sum(value > logits[target] for value in logits)
        losses.append(math.log(sum(map(math.exp, logits))) - logits[target])  # Eqs. 6, 7
        noun = tokenizer.decode([target]) in ("dog", "cat")
        for part in ("all", "nouns" if noun else "adjectives"):
            ranks[part].append(rank)
    percent = lambda part, limit: 100 * np.mean([rank < limit for rank in ranks[part]])
    expected = {"top1": percent("all", 1), "top5": percent("all", 5)}
    expected |= {f"{part} top1": percent(part, 1) for part in ("adjectives", "nouns")}
    assert 0 < expected["top1"] < expected["top5"] < 100
    seen = []

    def head(features, token_features, mask, mask_pos):
        seen.append(features.mean((1, 2, 3)))
        return lm.mlm_head(token_features[torch.arange(len(features)), mask_pos])

    args = icmlm.get_args("--data x.jsonl --workers 0 --amp off".split())
    model = nn.Module()
    model.backbone, model.head = FeaturesAsGiven(3), head
    model.tags = lambda features: features.new_zeros(len(features), len(CONCEPTS))
    results = icmlm.validate(model, lm, triplets, args, CPU)
    evenly = {"tp": pytest.approx(math.log(len(CONCEPTS)), abs=1e-4)}  # Eq. 2 with equal logits
    assert results["validation_loss"] == {"mlm": pytest.approx(np.mean(losses), abs=1e-4), **evenly}
    names = "with the photo", "with another photo", "language model alone"
    expected = dict.fromkeys(names, pytest.approx(expected, abs=0.01))
    assert results["masked_words"] == {"triplets": len(triplets), **expected}
    own, other = seen
    assert len(own) == len(triplets) and len(own.unique()) == 3 and (own != other).all()


def test_ties_and_nan():
    """A constant predictor gets no credit, and one that has diverged neither."""
    target = torch.tensor([3, 3, 3, 3])
    logits = torch.zeros(4, 101)
    logits[1] = torch.arange(101)
    logits[2], logits[3, 3] = math.nan, math.nan
    assert icmlm.target_ranks(logits, target).tolist() == [100, 97, 100, 100]
    photos = torch.tensor([7, 7, 2, 7, 5, 7])
    assert icmlm.another_photo(photos).tolist() == [2, 2, 3, 4, 5, 2]


COSINE = {0: 3e-2, 125_000: 1.5e-2 * (1 + math.sqrt(0.5)), 250_000: 1.5e-2, 500_000: 0}
STEPS = {0: 1e-4, 159_999: 1e-4, 160_000: 1e-5, 179_999: 1e-5, 180_000: 1e-6, 200_000: 1e-6}
VGG, WARM = "--arch vgg16_bn", "--arch vgg16_bn --head att-fc --init x.pth"


def arguments(flags):
    return icmlm.get_args(["--data", "coco", *flags.split()])


@pytest.mark.parametrize(
    "flags, optimizer, rates, warmup",
    [
        ("", torch.optim.SGD, COSINE, 0),
        (VGG, torch.optim.RAdam, STEPS, 0),
        (WARM, torch.optim.RAdam, STEPS, 50_000),
        # In tfm, or in a backbone that sees nothing yet, there is nothing to warm up.
        ("--arch vgg16_bn --init x.pth", torch.optim.RAdam, STEPS, 0),
        ("--arch vgg16_bn --head att-fc", torch.optim.RAdam, STEPS, 0),
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


@both_heads
def test_the_first_step_written_out(head, tiny, tiny_lm, coco_folder, tmp_path, monkeypatch):
    """Eqs. 2, 7 and 8 in loops over the batch, from the weights that the seed gives"""
    monkeypatch.setattr(icmlm, "DROPOUT", 0.0)
    monkeypatch.setitem(icmlm.RECIPES, "proxy_triplets", (8, 8, 8))
    command = tiny("icmlm", tmp_path, *f"--head {head} --lambda-tp 0.3 --iters 1 --seed 3".split())
    run_here(command)
    args = icmlm.get_args(command[1:])
    tokenizer, lm = icmlm.load_language_model(str(tiny_lm), CPU, "off")
    root = str(coco_folder)
    data = [common.caption_data("coco", root, split) for split in ("train2017", "val2017")]
    concepts, triplets, _ = icmlm.load_triplets(args, data, tokenizer)  # those of the run
    torch.manual_seed(3)
    model = icmlm.ICMLM(args.arch, args.head, lm, len(concepts), args.layers, args.heads)
    model.to(memory_format=torch.channels_last)
    assert all(parameter.requires_grad for parameter in model.parameters())
    frozen = [*lm.encoder.parameters(), *lm.mlm_head.parameters()]
    assert not any(parameter.requires_grad for parameter in frozen)
    order = np.random.default_rng([3, 0]).permutation(len(triplets))[:8]
    batch = icmlm.collate([triplets[3, 0, int(n)] for n in order])
    images, mask = common.augment(batch["images"], batch["jitter"]), batch["attention_mask"]
    with torch.no_grad():
        both = model(images, lm.encode(batch["tokens"], mask), mask, batch["mask_pos"])
    mlm, tp = 0.0, 0.0
    for target, tags, *logits in zip(batch["target"], batch["tags"], *both):
        scores, tag_scores = (row.double().log_softmax(0) for row in logits)
        mlm -= scores[target].item() / 8  # Eq. 7
        for k in tags.nonzero().flatten():
            tp -= tag_scores[k].item() / tags.sum().item() / 8  # Eq. 2
    [logged] = metrics(tmp_path)
    assert logged["mlm"] == pytest.approx(mlm, rel=1e-4)
    assert logged["tp"] == pytest.approx(tp, rel=1e-4)
    assert logged["loss"] == pytest.approx(mlm + 0.3 * tp, rel=1e-4)  # Eq. 8


def test_warm_up_of_the_attention(tiny, tmp_path, monkeypatch):
    """As long as it lasts, the backbone is that of --init, with its batch statistics."""
    for name, value in (("steps", [0.5, 0.75]), ("proxy_triplets", 8)):
        monkeypatch.setitem(icmlm.RECIPES, name, 3 * (value,))
    init = tmp_path / "init.pth"
    common.save_weights(init, common.build_backbone("resnet18"))
    flags = "--head att-fc --heads 2 --warmup-attention 0.5 --iters 8 --image-size 32"
    flags = [*flags.split(), "--init", init, "--keep-every", 4, "--validate-every", 6]
    run_here(tiny("icmlm", tmp_path, *flags))
    given, ended = (torch.load(x, weights_only=True) for x in (init, tmp_path / "backbone.pth"))
    model = torch.load(tmp_path / "model_4.pth", weights_only=True)["model"]
    assert (model["head.att.1.norm_w.weight"] != 1).any()  # the attention is trained
    for name, value in given.items():
        assert torch.equal(value, model[f"backbone.{name}"])
        assert "num_batches" in name or not torch.equal(value, ended[name])
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows if "validation_mlm" in row] == [6]
    assert [row["lr"] for row in rows] == pytest.approx(4 * [5e-2] + 2 * [5e-3] + 2 * [5e-4])


def test_learns(easy_scenes, tmp_path, monkeypatch):
    """An eighth of the demo, on easier scenes: the photo tells words that the text does not"""
    monkeypatch.setitem(icmlm.RECIPES, "proxy_triplets", 3 * (500,))
    flags = ["--iters", 80, "--lm-iters", 40, "--image-size", 32]
    run_here(["icmlm.py", *flags, "--output", tmp_path])
    scores = result(tmp_path)
    words = scores["masked_words"]
    top1 = words["with the photo"]["top1"]
    assert top1 > words["with another photo"]["top1"] + 3
    assert top1 > words["language model alone"]["top1"] + 6
