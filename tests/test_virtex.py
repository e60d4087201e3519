"""virtex.py against the paper written out slowly, against torch's own modules, and as it is used.

In most tests the backbone is `FeaturesAsGiven`: what is passed as images are the features, so that
a test decides what the heads see.
"""

import copy
import io
import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
import torchvision
from conftest import (
    CPU,
    FeaturesAsGiven,
    checkpoint_in,
    metrics,
    refusal,
    result,
    run_here,
)
from PIL import Image
from torch import nn

import common
import language
import pictures
import shapes
import virtex
from virtex import EOS, MASK, SOS, UNKNOWN

# Captions of different length, so that a batch of them is padded; an unknown token in the first.
CAPTIONS = [[SOS, 5, UNKNOWN, 7, EOS], [SOS, 9, 4, 6, 4, 8, EOS], [SOS, 10, EOS]]
MASKED = [[SOS, 5, UNKNOWN, MASK, EOS], [SOS, MASK, 4, 11, MASK, 8, EOS], [SOS, MASK, EOS]]
HIDDEN, HEADS, LAYERS = 128, 2, 2  # the smallest width with several heads


def build_model(channels, *args, **kwargs):
    """VirTex without a backbone"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(channels))
        return virtex.VirTex("stub", *args, **kwargs)


def randomise(module):
    """Every parameter random, the gains of norms around 1: whatever is forgotten shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gain = "norm" in name and "weight" in name
            parameter.copy_(0.125 * torch.randn(parameter.shape, generator=generator) + gain)
    return module


def tiny_model(vocab_size=12, channels=5, task="bicaptioning"):
    """Two layers per direction in float64, all parameters random, no dropout"""
    model = build_model(channels, vocab_size, HIDDEN, LAYERS, max_length=10, task=task)
    return randomise(model.double()).eval()


def random_features(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def batch_of(captions, task="bicaptioning", masked=None):
    """What `collate` makes of these captions, less images and colours: the model's arguments"""
    photo = {"image": np.zeros((1, 1, 3), np.uint8), "jitter": np.zeros(4, np.float32)}
    samples = []
    for n, tokens in enumerate(captions):
        row = masked[n] if masked else None
        sample = {"tokens": tokens, "masked": row, "task": task, "unreadable": []}
        samples.append({**photo, **sample})
    batch = virtex.collate(samples)
    return {name: v for name, v in batch.items() if name not in ("images", "jitter", "unreadable")}


def logits_of(head, projected, tokens):
    return head.output(head(tokens, head.memory(projected))[0])


# --------------------------------------------------------------------------- Eq. 1, written out


def linear(vector, w, name):
    return w[f"{name}.weight"] @ vector + w[f"{name}.bias"]


def layer_norm(vector, w, name, eps=1e-5):
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return (vector - mean) / math.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x, memory, w, name, causal):
    """Vaswani et al.: softmax(q k / sqrt(d)) v, one head, one query and one key at a time"""
    width = HIDDEN // HEADS
    matrices = w[f"{name}.in_proj_weight"].reshape(3, HEADS, width, HIDDEN)
    biases = w[f"{name}.in_proj_bias"].reshape(3, HEADS, width)
    attended = np.zeros((len(x), HEADS, width))
    for head in range(HEADS):
        (w_q, w_k, w_v), (b_q, b_k, b_v) = matrices[:, head], biases[:, head]
        for t, vector in enumerate(x):
            query, seen = w_q @ vector + b_q, memory[: t + 1] if causal else memory
            scores = [math.exp(query @ (w_k @ m + b_k) / math.sqrt(width)) for m in seen]
            for score, m in zip(scores, seen):
                attended[t, head] += score / sum(scores) * (w_v @ m + b_v)
    return [linear(row.flatten(), w, f"{name}.out_proj") for row in attended]


def feed_forward(vector, w, name):
    inner = linear(vector, w, f"{name}.linear1")
    gelu = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in inner])
    return linear(gelu, w, f"{name}.linear2")


def slow_log_p(w, direction, features, tokens):
    """Sec. 3, Textual Head -> [log p(tokens[t] | tokens[:t], I) for t = 1, 2, ...]

    Unknown tokens are no targets [official code].
    """
    places = itertools.product(*map(range, features.shape[1:]))
    image = [linear(features[:, i, j], w, "textual.visual_projection") for i, j in places]
    words = w["textual.embedding.words.weight"]
    positions = w["textual.embedding.positions.weight"]
    x = []
    for t, token in enumerate(tokens[:-1]):
        summed = words[token] + positions[t]
        vector = layer_norm(summed, w, "textual.embedding.layer_norm", eps=1e-8)
        x.append(vector if token != UNKNOWN else 0 * vector)  # [official code]
    for n in range(LAYERS):  # all that is the direction's own
        name = f"{direction}.transformer.layers.{n}"
        a = attention(x, x, w, f"{name}.self_attn", causal=True)
        x = [layer_norm(x[t] + a[t], w, f"{name}.norm1") for t in range(len(x))]
        a = attention(x, image, w, f"{name}.multihead_attn", causal=False)
        x = [layer_norm(x[t] + a[t], w, f"{name}.norm2") for t in range(len(x))]
        x = [layer_norm(u + feed_forward(u, w, name), w, f"{name}.norm3") for u in x]
    log_p = []
    for vector, target in zip(x, tokens[1:]):
        scores = words @ vector + w["textual.output.bias"]
        if target != UNKNOWN:
            log_p.append(scores[target] - math.log(sum(map(math.exp, scores))))
    return log_p


def test_loss_is_equation_1():
    """-log p of each token given those before it (forward) or behind it (backward), two means.

    Here each caption is alone, and in the model it is padded: padding changes nothing.
    """
    model, features = tiny_model(), random_features(3, 5, 2, 3)
    losses = model(features, **batch_of(CAPTIONS))
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    forward, backward = [], []
    for image, tokens in zip(features.numpy(), CAPTIONS):
        forward += slow_log_p(w, "textual", image, tokens)
        backward += slow_log_p(w, "backward_textual", image, tokens[::-1])
    assert len(forward) == len(backward) == 3 + 6 + 2
    assert losses["forward"].item() == pytest.approx(-np.mean(forward), abs=1e-10)
    assert losses["backward"].item() == pytest.approx(-np.mean(backward), abs=1e-10)


def test_captioning_is_the_forward_half_of_equation_1():
    """Sec. 4.2: the backward Transformer is removed and nothing else changes."""
    both, one = tiny_model(), tiny_model(task="captioning")
    state = both.state_dict()
    one.load_state_dict({k: v for k, v in state.items() if not k.startswith("backward_")})
    features = random_features(3, 5, 2, 3)
    losses = one(features, **batch_of(CAPTIONS, "captioning"))
    assert list(losses) == ["forward"]
    assert torch.equal(losses["forward"], both(features, **batch_of(CAPTIONS))["forward"])


def test_a_caption_cut_off_at_an_unknown_token():
    """Forward it is no target; backward it is where the reading begins: 1 target and 2."""
    model, features = tiny_model(), random_features(1, 5, 2, 3)
    losses = model(features, **batch_of([[SOS, 5, UNKNOWN]]))
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, head, tokens in (
        ("forward", "textual", [SOS, 5, UNKNOWN]),
        ("backward", "backward_textual", [UNKNOWN, 5, SOS]),
    ):
        log_p = slow_log_p(w, head, features[0].numpy(), tokens)
        assert len(log_p) == (1 if name == "forward" else 2)
        assert losses[name].item() == pytest.approx(-np.mean(log_p), abs=1e-10)


@pytest.mark.parametrize("task, rows", (("bicaptioning", 22), ("captioning", 11), ("masked_lm", 4)))
def test_only_predicted_positions_reach_the_vocabulary(task, rows):
    """Padding costs nothing: 3 + 6 + 2 known tokens in each direction, or 4 [MASK]ed ones."""
    model, seen = tiny_model(task=task), []
    model.textual.output.register_forward_hook(lambda *passed: seen.append(len(passed[-1])))
    masked = MASKED if task == "masked_lm" else None
    model(random_features(3, 5, 2, 3), **batch_of(CAPTIONS, task, masked))
    assert sum(seen) == rows


# --------------------------------------------------------------------------------------- decoder


def torch_layer():
    """A and F are 2 and 512 at H = 128 [Sec. 3: H / 64 and 4 H]."""
    sizes = {"nhead": 2, "dim_feedforward": 512, "activation": "gelu", "batch_first": True}
    return randomise(nn.TransformerDecoderLayer(128, **sizes).double()).eval()


@pytest.mark.parametrize("causal", (True, False))
def test_decoder_layer_is_torch_s(causal):
    """Sec. 3: that of Vaswani et al. with GELU, under the parameter names of torch's"""
    reference, layer = torch_layer(), virtex.DecoderLayer(128, dropout=0.1).double().eval()
    layer.load_state_dict(reference.state_dict())
    x, image = random_features(2, 5, 128), random_features(2, 6, 128) + 1
    memory = layer.multihead_attn.key_value(image)
    if causal:
        ours, _ = layer(x, memory)
        theirs = reference(x, image, tgt_mask=torch.ones(5, 5).triu(1).bool())
    else:
        padding = torch.arange(5) >= torch.tensor([[5], [3]])
        ours, _ = layer(x, memory, causal=False, mask=~padding[:, None, None])
        theirs = reference(x, image, tgt_key_padding_mask=padding)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_dropout_follows_each_operation():
    """Sec. 3: both attentions and feed-forward "each followed by dropout"; at p = 1 none is left"""
    layer, x = randomise(virtex.DecoderLayer(128, dropout=1.0)).double(), random_features(2, 5, 128)
    layer.self_attn.dropout = layer.multihead_attn.dropout = 0.0  # of their weights: another one
    memory = layer.multihead_attn.key_value(x)
    norms_alone = layer.norm3(layer.norm2(layer.norm1(x)))
    torch.testing.assert_close(layer.train()(x, memory)[0], norms_alone, rtol=0, atol=1e-12)
    assert not torch.allclose(layer.eval()(x, memory)[0], norms_alone)


@pytest.mark.parametrize("direction", ("textual", "backward_textual"))
def test_predictions_are_causal(direction):
    """Sec. 3: a prediction depends on past tokens only, on all of them, and on the image."""
    model, tokens = tiny_model(), torch.tensor([[1, 5, 7, 9, 4, 6, 8]])
    head, features = getattr(model, direction), random_features(1, 5, 2, 3)
    projected = head.project(features)
    before = logits_of(head, projected, tokens)
    for t in range(7):
        changed = tokens.clone()
        changed[0, t] = 11
        difference = (logits_of(head, projected, changed) - before).abs().amax(2)[0]
        assert (difference[:t] < 1e-12).all() and (difference[t:] > 1e-4).all()
    after = logits_of(head, head.project(features + 1), tokens)
    assert ((after - before).abs().amax(2) > 1e-4).all()


def test_image_vectors_are_in_reading_order():
    """One vector for each place of the grid, row by row, as attention maps are drawn"""
    head, features = tiny_model().textual, random_features(1, 5, 2, 3)
    for n, (i, j) in enumerate(itertools.product(range(2), range(3))):
        expected = head.visual_projection(features[:, :, i, j])
        torch.testing.assert_close(head.project(features)[:, n], expected)


def test_directions_share_all_but_their_layers():
    """Sec. 3: one embedding, reused at both output layers, one projection, two Transformers"""
    model = build_model(5, 12, hidden=64)
    forward, backward = model.textual, model.backward_textual
    assert forward.output.weight is forward.embedding.words.weight
    assert forward.output is backward.output and forward.embedding is backward.embedding
    assert forward.visual_projection is backward.visual_projection
    own = set(forward.transformer.parameters())
    assert own and own.isdisjoint(backward.transformer.parameters())


def test_initialisation():
    """N(0, 0.02) for matrices and embeddings, 0 for padding and biases, neutral norms [official]"""
    model = build_model(64, 200, hidden=64, layers=2)
    assert not model.textual.embedding.words.weight[UNKNOWN].any()
    for name, value in model.named_parameters():
        if "norm" in name:
            assert (value == float(name.endswith("weight"))).all(), name
        elif "bias" in name:
            assert not value.any(), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(value.mean().item()) < 0.003, name


def test_loss_at_the_start_at_the_paper_s_sizes():
    """The docstring's "near 12.5" per direction: above ln 10000, for the output layer is tied.

    The features are as large as a new ResNet-50's on photos: 0.9, and 1.55 root mean square.
    """
    torch.manual_seed(0)
    model, rng = build_model(2048, 10_000, hidden=2048), np.random.default_rng(0)
    lengths = rng.integers(9, 15, 8)
    captions = [[SOS, *rng.integers(4, 10_000, length).tolist(), EOS] for length in lengths]
    with torch.no_grad():
        losses = model(2.2 * torch.randn(8, 2048, 7, 7).relu(), **batch_of(captions))
    assert all(math.log(10_000) < loss.item() < 14 for loss in losses.values())


# ------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("task", virtex.TASKS)
def test_parameter_groups(task):
    """Sec. 3: no weight decay on norms and biases in the Transformers; the backbone's own rate.

    Each parameter is in one group, once; the weight of embedding and output layer, too.
    """
    model = virtex.VirTex("resnet18", 12, hidden=64, layers=2, task=task)
    backbone, plain = set(model.visual.parameters()), set()
    for head in model.children():
        if isinstance(head, virtex.TextualHead):
            for module in (*head.embedding.modules(), *head.transformer.modules()):
                for name, parameter in module.named_parameters(recurse=False):
                    if isinstance(module, nn.LayerNorm) or "bias" in name:
                        plain.add(parameter)
    decayed = set(model.parameters()) - backbone - plain
    groups = virtex.parameter_groups(model, lr=0.2, text_lr=1e-3, weight_decay=1e-4)
    expected = [(backbone, 0.2, 1e-4), (decayed, 1e-3, 1e-4)]
    if task != "token_classification":
        expected.append((plain, 1e-3, 0.0))
    found = [(set(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    assert found == expected
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_learning_rates_of_the_paper():
    """Sec. 3: 10K of 500K iterations of linear warm-up to 0.2 and 1e-3, then a cosine to zero"""
    args = virtex.get_args(["--data", "coco"])
    assert (args.batch_size, args.lookahead_k, args.lookahead_alpha) == (256, 5, 0.5)
    model = virtex.VirTex("resnet18", 12, hidden=64)
    groups = virtex.parameter_groups(model, args.lr, args.text_lr, args.weight_decay)
    optimizer = common.build_optimizer("sgd", groups, args.lr, args.weight_decay)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    factors = {0: 0, 1: 1e-4, 5000: 0.5, 10_000: 1, 132_500: quarter, 255_000: 0.5, 500_000: 0}
    for iteration, factor in factors.items():
        common.set_lr(optimizer, common.lr_factor(iteration, args.iters, args.warmup))
        rates = [group["lr"] for group in optimizer.param_groups]
        expected = [0.2 * factor, 1e-3 * factor, 1e-3 * factor]
        assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_lookahead_written_out():
    """Every 5 steps slow += 0.5 (fast - slow) and fast = slow; the momentum goes on."""
    parameter = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)
    lookahead = virtex.LookAhead(optimizer, k=5, alpha=0.5)
    fast = slow = 3.0
    velocity = 0.0
    for n in range(1, 14):
        velocity = 0.9 * velocity + 2 * fast  # the slope of a parabola
        fast -= 0.05 * velocity
        if n % 5 == 0:
            slow += 0.5 * (fast - slow)
            fast = slow
        optimizer.zero_grad()
        (parameter**2).backward()
        optimizer.step()
        lookahead.step()
        assert parameter.item() == pytest.approx(fast, abs=1e-12)


# ----------------------------------------------------------------------------------- beam search


def trimmed(row):
    """A list of tokens without the zeros behind [EOS]"""
    return row[: row.index(EOS) + 1] if EOS in row else row


def learned_captioner(vocab_size, longest):
    """A captioner that half knows two captions of each of eight photos: what it says differs.

    Some captions are cut before their [EOS]. -> head, image vectors
    """
    model, features = tiny_model(vocab_size, task="captioning"), random_features(8, 5, 2, 2)
    rng = np.random.default_rng(0)
    words = [token for token in range(vocab_size) if token != EOS]
    captions = []
    for length in rng.integers(2, longest, 16):
        captions.append([SOS, *rng.choice(words, length).tolist(), EOS][:longest])
    batch = batch_of(captions, "captioning")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(features.repeat(2, 1, 1, 1), **batch)["forward"].backward()
        optimizer.step()
    return model.textual, model.textual.project(features).detach()


def slow_beam_search(head, projected, beams, max_length):
    """One photo, one hypothesis after the other: the best of all that grew by a token or ended"""
    hypotheses = [(0.0, [SOS])]
    for _ in range(max_length - 1):
        grown = []
        for score, row in hypotheses:
            if row[-1] == EOS:
                grown.append((score, row))
                continue
            log_p = logits_of(head, projected, torch.tensor([row]))[0, -1].log_softmax(-1)
            grown += [(score + p, [*row, token]) for token, p in enumerate(log_p.tolist())]
        hypotheses = sorted(grown, reverse=True)[:beams]
    return hypotheses[0]


def test_beam_search_written_out():
    """What ended keeps its score, log p of Eq. 1, and its place. One beam is greedy decoding.

    The same for a photo alone and in a batch, with kept keys and values and without.
    """
    head, projected = learned_captioner(vocab_size=12, longest=9)
    for beams in (1, 2, 4):
        tokens, scores = virtex.beam_search(head, projected, beams, max_length=9)
        again, _ = virtex.beam_search(head, projected, beams, max_length=9, cached=False)
        assert torch.equal(tokens, again)
        captions = [trimmed(row) for row in tokens.tolist()]
        for i, caption in enumerate(captions):
            score, row = slow_beam_search(head, projected[i : i + 1], beams, max_length=9)
            assert caption == row and not tokens[i, len(row) :].any()
            assert scores[i].item() == pytest.approx(score, abs=1e-5)
    assert len(set(map(len, captions))) > 2, "too easy to mean anything"


def test_beam_search_with_room_for_all_is_exhaustive():
    """With as many beams as captions of four tokens, the best of all 6^4 continuations is found."""
    head, projected = learned_captioner(vocab_size=6, longest=5)
    tokens, scores = virtex.beam_search(head, projected, beams=1 + 5 + 25 * 6, max_length=5)
    every = torch.tensor([[SOS, *rest] for rest in itertools.product(range(6), repeat=4)])
    for i, found in enumerate(tokens.tolist()):
        image = projected[i : i + 1].expand(len(every), -1, -1)
        log_p = logits_of(head, image, every[:, :-1]).log_softmax(-1)
        so_far = log_p.gather(2, every[:, 1:, None]).squeeze(2).cumsum(1)
        possible = {}
        for row, p in zip(every.tolist(), so_far.tolist()):
            possible[tuple(trimmed(row))] = p[len(trimmed(row)) - 2]
        best = max(possible, key=possible.get)
        assert trimmed(found) == list(best)
        assert scores[i].item() == pytest.approx(possible[best], abs=1e-5)
    greedy, _ = virtex.beam_search(head, projected, beams=1, max_length=5)
    assert not torch.equal(tokens, greedy), "too easy to mean anything"


# ---------------------------------------------------------------------------- captions to tokens


def captions_of(scenes):
    for scene in scenes:
        yield from shapes.describe(scene, shapes.objects_of(scene))


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of 150 tokens from captions of the built-in data, as a file"""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(virtex.train_tokenizer(map(virtex.clean, captions_of(range(200))), 150))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return virtex.read_tokenizer(tokenizer_path)


def one_photo(pixels, *captions):
    """In place of a CaptionData: one photo, from an array, with these captions"""
    images = SimpleNamespace(open=lambda i: Image.fromarray(pixels))
    return SimpleNamespace(images=images, captions_of=lambda i: list(captions))


def test_clean():
    """Sec. 3: lower case, also of what NFKD makes of a sign; accents stripped"""
    assert virtex.clean("A Crème BRÛLÉE") == "a creme brulee"
    assert virtex.clean("e\u0301") == "e"  # an accent that is a character of its own
    assert virtex.clean("ﬁve ²⁄₃ ＡＢＣ…") == "five 2\u20443 abc..."
    assert virtex.clean("Coke™ №5 at 20℃") == "coketm no5 at 20°c"


def test_swap_left_right():
    """Sec. 3: whole words alone (the official code writes "bleft" for bright)"""
    swap = language.swap_left_right
    assert swap("Left of the cat, right of the dog") == "right of the cat, left of the dog"
    assert swap("a left-hand glove. right!") == "a right-hand glove. left!"
    for caption in ("bright, upright", "leftover pizza", "two lefts, no rights", "copyright"):
        assert swap(caption) == caption


def test_mirrored_photos_have_mirrored_captions(tokenizer):
    """Sec. 3: half of the photos are mirrored, and exactly these have left and right swapped."""
    half = np.zeros((32, 32, 3), np.uint8)
    half[:, :16] = 255  # white on the left
    data, mirrored = one_photo(half, "Left of the bright circle"), 0
    args = virtex.get_args(["--crop-min", "1", "--image-size", "32"])
    for seed in range(60):
        sample = virtex.sample(data, tokenizer, args, 0, np.random.default_rng(seed))
        image, words = sample["image"], tokenizer.decode(sample["tokens"])
        white_on_the_left = image[:, :16].mean() > image[:, 16:].mean()
        side = "left" if white_on_the_left else "right"
        assert words == f"{side} of the bright circle"
        mirrored += not white_on_the_left
    assert 15 < mirrored < 45


def test_long_captions_are_cut_before_they_are_reversed(tokenizer):
    """Of a long caption both directions see the first 30 tokens; a short one keeps its [EOS]."""
    long, photo = " ".join(captions_of([0])), np.zeros((9, 9, 3), np.uint8)
    args, whole = virtex.get_args([]), [SOS, *tokenizer.encode(long), EOS]
    assert len(whole) > 31
    rows = []
    for captions in ((long, "not the first"), ("a circle", "not the first")):
        sample = virtex.sample(one_photo(photo, *captions), tokenizer, args, 0, None)
        rows.append(sample["tokens"])
    cut, short = rows
    assert cut == whole[:30] and short == [SOS, *tokenizer.encode("a circle"), EOS]
    padding, batch = [0] * (30 - len(short)), batch_of(rows)
    assert batch["tokens"].tolist() == [cut, short + padding]
    assert batch["backward_tokens"].tolist() == [cut[::-1], short[::-1] + padding]


def test_special_tokens(tokenizer):
    """Unknown (and padding) 0, [SOS] 1, [EOS] 2, [MASK] 3 [official]; no caption can spell them."""
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    assert ids == [1, 2, 3] == [SOS, EOS, MASK]
    assert tokenizer.unk_id() == UNKNOWN == 0 and tokenizer.encode("犬")[-1] == 0
    assert tokenizer.get_piece_size() == 150
    assert not {SOS, EOS, MASK} & set(tokenizer.encode("a [SOS] circle [EOS] and a [MASK]"))


def test_decode_inverts_encode(tokenizer):
    """Tokens lose nothing of what `clean` leaves, also of captions that were not trained on."""
    for caption in map(virtex.clean, (*captions_of(range(200, 260)), "A Rêd CIRCLE")):
        assert tokenizer.decode(tokenizer.encode(caption)) == caption


def test_two_captions_make_a_tokenizer(tmp_path):
    """A smaller corpus gets a smaller vocabulary; one too small for the letters is refused."""
    path, captions = tmp_path / "tokenizer.model", ["a dog runs on the grass.", "two dogs!"]
    path.write_bytes(virtex.train_tokenizer(iter(captions), 10_000))
    tokenizer = virtex.read_tokenizer(path)
    assert 4 < tokenizer.get_piece_size() < 200
    assert tokenizer.decode([tokenizer.encode(caption) for caption in captions]) == captions
    with pytest.raises(SystemExit, match="no tokenizer of 12 tokens"):
        virtex.train_tokenizer(["the quick brown fox jumps over the lazy dog"], 12)


def test_no_piece_mixes_letters_and_punctuation():
    """Sec. 3: "to prevent redundant tokens such as dog? and dog!" """
    captions = 50 * ["a dog?", "the dog!", "dog's (dog), dog-dog", "dog; it's a 'dog'.", "no.dog"]
    proto = virtex.train_tokenizer(captions, 100)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ids = range(MASK + 1, tokenizer.get_piece_size())
    pieces = [tokenizer.id_to_piece(i).lstrip("▁") for i in ids]
    assert "dog" in pieces
    assert all(piece.isalpha() or not any(map(str.isalpha, piece)) for piece in pieces)


# ------------------------------------------------------------------------------- the other tasks


def test_mask_tokens_statistics():
    """15% of the words (3 of 20): of these 85% [MASK], 10% any word, 5% kept [official code]"""
    tokens, rng = [SOS, *range(500, 520), EOS], np.random.default_rng(0)
    draws = np.array([virtex.mask_tokens(tokens, 1000, rng) for _ in range(4000)])
    different, chosen = draws != tokens, 3 * len(draws)
    assert different.sum(1).max() == 3
    assert MASK <= draws[different].min() and draws.max() < 1000
    assert (draws == MASK).sum() / chosen == pytest.approx(0.85, abs=0.015)
    assert (different & (draws > MASK)).sum() / chosen == pytest.approx(0.10, abs=0.015)
    places = different.sum(0)
    assert places[0] == places[-1] == 0  # [SOS] and [EOS]
    assert places[1:-1] == pytest.approx(0.95 * chosen / 20, rel=0.2)  # all places alike


@pytest.mark.parametrize("length, number", ((1, 1), (6, 1), (7, 2), (20, 3), (21, 4), (0, 0)))
def test_mask_tokens_rounds_up(length, number):
    """One at least; every word can be chosen, the last one of a cut caption, too."""
    for end in ([EOS], []):
        tokens, rng = [SOS, *range(10, 10 + length), *end], np.random.default_rng(0)
        draws = np.array([virtex.mask_tokens(tokens, 1000, rng) for _ in range(200)])
        assert (draws != tokens).sum(1).max() == number
        chosen = (draws == MASK).any(0)
        assert chosen.tolist() == [False, *length * [True], *len(end) * [False]]


def test_masked_lm_written_out():
    """Sec. 4.2: cross-entropy at [MASK]s alone, not where words were replaced or kept.

    Here each caption is alone, and in the model it is padded: padding changes nothing.
    """
    model, features = tiny_model(task="masked_lm"), random_features(3, 5, 2, 3)
    loss = model(features, **batch_of(CAPTIONS, "masked_lm", MASKED))["masked_lm"]
    terms, head = [], model.textual
    for i, (tokens, masked) in enumerate(zip(CAPTIONS, MASKED)):
        memory = head.memory(head.project(features[i : i + 1]))
        vectors, _ = head(torch.tensor([masked]), memory, causal=False)
        log_p = head.output(vectors).log_softmax(-1)[0]
        terms += [-log_p[t, tokens[t]].item() for t in range(len(tokens)) if masked[t] == MASK]
    assert len(terms) == 4
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-10)


def test_masked_lm_without_a_mask():
    """When chance replaces no token of a batch by [MASK], the loss is zero and not NaN."""
    model, batch = tiny_model(task="masked_lm"), batch_of([[SOS, 5]], "masked_lm", [[SOS, 9]])
    loss = model(random_features(1, 5, 2, 3), **batch)["masked_lm"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_token_classification_written_out():
    """Sec. 4.2, Tab. 1: a linear layer on the mean of the grid; each of a caption's K different
    words is 1/K of the target, and special tokens are none of it."""
    model, features = tiny_model(task="token_classification"), random_features(5, 5, 2, 3)
    captions = [*CAPTIONS, [SOS, UNKNOWN, EOS], [SOS, 4, 11, MASK]]
    loss = model(features, **batch_of(captions, "token_classification"))["token_classification"]
    output, total = model.textual["output"], 0.0
    for grid, caption in zip(features, captions):
        pooled = sum(grid[:, i, j] for i in range(2) for j in range(3)) / 6
        log_p = (output.weight @ pooled + output.bias).log_softmax(0)
        words = set(caption) - {UNKNOWN, SOS, EOS, MASK}
        total -= sum(log_p[word].item() / len(words) for word in words)
    assert loss.item() == pytest.approx(total / 5, abs=1e-6)


def test_validation_is_a_mean_over_tokens(tokenizer):
    """Over all batches together, of each photo's first caption"""
    data = common.CaptionData(shapes.ShapeImages())
    for scene in range(70):  # more than a batch of 64
        data.add(scene, list(captions_of([scene])))
    flags = "--image-size 8 --max-length 9 --amp off --workers 0".split()
    args, model = virtex.get_args(flags), tiny_model(150, channels=3).float()
    validation = virtex.validate(model, data, tokenizer, args, CPU)
    total, number = 0.0, 0
    for i in range(70):
        [image] = common.read_crops(data.images, i, [common.centre_crop(1.0)], 8)
        tokens = [SOS, *tokenizer.encode(data.captions_of(i)[0]), EOS][:9]
        with torch.no_grad():
            losses = model(common.augment(torch.tensor(image)[None]), **batch_of([tokens]))
        total += (len(tokens) - 1) * losses["backward"].item()
        number += len(tokens) - 1
    assert validation["backward"] == pytest.approx(total / number, rel=1e-5)


# ----------------------------------------------------------------------------------- checkpoints


class OfficialEmbedding(nn.Module):
    def __init__(self, vocab_size, hidden, max_length):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.positions = nn.Embedding(max_length, hidden)
        self.layer_norm = nn.LayerNorm(hidden, eps=1e-8)

    def forward(self, tokens):
        positions = self.positions(torch.arange(tokens.size(1)))
        return self.layer_norm(self.words(tokens) + positions) * (tokens != 0).unsqueeze(-1)


class OfficialHead(nn.Module):
    """torch's own decoder under the official names"""

    def __init__(self, channels, vocab_size, hidden=128, layers=2, max_length=12):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = OfficialEmbedding(vocab_size, hidden, max_length)
        sizes = {"nhead": hidden // 64, "dim_feedforward": 4 * hidden}
        layer = nn.TransformerDecoderLayer(hidden, **sizes, activation="gelu", batch_first=True)
        self.transformer = nn.TransformerDecoder(layer, layers)
        self.output = nn.Linear(hidden, vocab_size)
        self.output.weight = self.embedding.words.weight

    def forward(self, features, tokens):
        image = self.visual_projection(features.flatten(2).permute(0, 2, 1))
        future = torch.ones(tokens.size(1), tokens.size(1)).triu(1).bool()
        return self.output(self.transformer(self.embedding(tokens), image, tgt_mask=future))


class OfficialVirTex(nn.Module):
    """The modules of github.com/kdexd/virtex; torchvision's classifier is still there."""

    def __init__(self):
        super().__init__()
        self.visual = nn.ModuleDict({"cnn": torchvision.models.resnet18()})
        self.textual = OfficialHead(512, 150)
        self.backward_textual = copy.deepcopy(self.textual)
        for module in ("visual_projection", "embedding", "output"):
            setattr(self.backward_textual, module, getattr(self.textual, module))
        with torch.no_grad():
            self.textual.embedding.words.weight *= 0.1  # logits as large as a trained model's
            for parameter in self.parameters():
                parameter += 0.05 * torch.randn_like(parameter)

    def features(self, images):
        return nn.Sequential(*list(self.visual["cnn"].children())[:-2])(images)


@torch.no_grad()
def test_official_checkpoint_gives_the_official_logits(tokenizer_path, tmp_path):
    """To 1e-5, in both directions; without the backward one it is a model of forward captioning."""
    torch.manual_seed(0)
    official, images = OfficialVirTex(), torch.randn(2, 3, 64, 64)
    for module in official.visual["cnn"].modules():
        module.momentum = 1.0  # the batch norms take on the statistics of these images
    official.features(images)
    features, state = official.eval().features(images), official.state_dict()
    tokens = [[SOS, 20, UNKNOWN, 60, 100, EOS, 0, 0], [SOS, 7, 149, 8, 30, 31, 32, EOS]]
    tokens, path = torch.tensor(tokens), tmp_path / "official.pth"
    for directions in (("textual", "backward_textual"), ("textual",)):
        torch.save({"model": state, "iteration": 500_000}, path)
        model, tokenizer, image_size = virtex.load_virtex(path, tokenizer_path)
        assert not model.training and image_size == 224 and tokenizer.get_piece_size() == 150
        assert model.textual.embedding.positions.num_embeddings == 12
        assert hasattr(model, "backward_textual") == (len(directions) == 2)
        projected = model.textual.project(model.visual["cnn"](images))
        for direction in directions:
            ours = logits_of(getattr(model, direction), projected, tokens)
            expected = getattr(official, direction)(features, tokens)
            assert expected.std() > 0.1
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        state = {k: v for k, v in state.items() if not k.startswith("backward_")}


@pytest.fixture(scope="module")
def own_state():
    return virtex.VirTex("resnet18", 150, 64).state_dict()


def test_checkpoints_that_cannot_caption_are_refused(own_state, tokenizer_path, tmp_path):
    """A backbone, masked LM, and weights of which some are missing or left"""
    path, backbone = tmp_path / "x.pth", common.build_backbone("resnet18").state_dict()
    alone = {f"visual.cnn.{name}": value for name, value in backbone.items()}
    norm = "textual.transformer.layers.0.norm2.bias"
    short = {name: value for name, value in own_state.items() if name != norm}
    more = {**own_state, "textual.extra": torch.zeros(1)}
    masked_lm = {"args": {"task": "masked_lm"}, "model": own_state}
    refused = (
        (backbone, "a backbone alone cannot caption"),
        ({"model": alone}, "a backbone alone cannot caption"),
        (masked_lm, "holds no captioning model"),
        ({"model": short}, f'Missing .*"{norm}"'),
        ({"model": more}, 'Unexpected .*"textual.extra"'),
    )
    for content, message in refused:
        torch.save(content, path)
        with pytest.raises(SystemExit, match=message):
            virtex.load_virtex(path, tokenizer_path)


def test_tokenizers_that_do_not_belong_are_refused(own_state, tmp_path):
    """One of another size, one without the special tokens, and none at all"""
    torch.save({"model": own_state}, tmp_path / "x.pth")
    other, bare, text = (tmp_path / f"{name}.model" for name in ("other", "bare", "text"))
    other.write_bytes(virtex.train_tokenizer(["a dog", "a cat"], 100))
    model, sizes = io.BytesIO(), {"vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2}
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(["a dog"]), model_writer=model, model_type="bpe", **sizes)
    bare.write_bytes(model.getvalue())
    text.write_text("a dog")
    refused = (
        (other, f"the tokenizer has .* and {tmp_path}/x.pth 150"),
        (bare, "must have"),
        (text, "Expected: a SentencePiece model"),
        (None, "holds no tokenizer: add --tokenizer FILE"),
    )
    for path, message in refused:
        with pytest.raises(SystemExit, match=message):
            virtex.load_virtex(tmp_path / "x.pth", path)


# ------------------------------------------------------------------------------ where words look


@torch.no_grad()
def test_word_attention_is_that_of_torch():
    """Sec. 4.4: the last layer's over the image, the mean over heads and over a word's tokens"""
    model, tokens = tiny_model(), torch.tensor([SOS, 4, 9, 6, 7, 10, EOS])
    head, projected = model.textual, model.textual.project(random_features(1, 5, 3, 3))
    first, last = torch_layer(), torch_layer()
    for reference, layer in zip((first, last), head.transformer["layers"]):
        reference.load_state_dict(layer.state_dict())
    future = torch.ones(6, 6).triu(1).bool()
    x = first(head.embedding(tokens[None, :-1]), projected, tgt_mask=future)
    x = last.norm1(x + last.self_attn(x, x, x, attn_mask=future)[0])
    _, [weights] = last.multihead_attn(x, projected, projected, need_weights=True)

    pieces = ["▁a", "▁sur", "f", "board", "▁rider"]
    words = virtex.word_attention(head, projected, tokens, pieces)
    assert [word for word, _ in words] == ["a", "surfboard", "rider"]
    for (_, found), rows in zip(words, ([0], [1, 2, 3], [4])):  # row t predicts token t + 1
        mean = sum(weights[t] for t in rows) / len(rows)
        torch.testing.assert_close(found, mean.view(3, 3), rtol=0, atol=1e-10)

    # SentencePiece may write a word as "▁" and its letters: one word. No word, no map.
    [(word, _)] = virtex.word_attention(head, projected, tokens[:4], ["▁", "a", "b"])
    assert word == "ab"
    assert virtex.word_attention(head, projected, tokens[:2], []) == []


def test_captioned_photo_shows_each_word_s_own_map(tokenizer, tmp_path, monkeypatch):
    """A word is drawn with its own map, also behind a token that the caption does not print."""
    model, said = tiny_model(150, channels=3).float(), tokenizer.encode("a red square")
    row, drawn = torch.tensor([SOS, UNKNOWN, *said, EOS]), []
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    monkeypatch.setattr(virtex, "load_virtex", lambda *_: (model, tokenizer, 8))
    monkeypatch.setattr(virtex, "beam_search", lambda *_: (row[None], None))
    monkeypatch.setattr(pictures, "draw_attention", lambda *passed: drawn.append(passed))
    photo, output = str(tmp_path / "photo.png"), str(tmp_path)
    flags = ["--caption", photo, "--weights", "x.pth", "--output", output, "--workers", "0"]
    virtex.caption_photos(virtex.get_args(flags), CPU)

    [(_, caption, words, _)] = drawn
    assert caption == "a red square"
    projected = model.textual.project(common.augment(torch.tensor(pixels)[None]))
    pieces = ["▁?", *map(tokenizer.id_to_piece, said)]
    expected = dict(virtex.word_attention(model.textual, projected, row, pieces))
    for word in caption.split():
        torch.testing.assert_close(dict(words)[word], expected[word])


# ------------------------------------------------------------------------------- as a user runs it


@pytest.mark.parametrize("task", virtex.TASKS)
def test_every_task_learns_its_captions(task, tiny, tmp_path):
    """24 pictures by heart: the loss falls by 1.5 nats or more, and validation knows its terms."""
    run_here(tiny("virtex", tmp_path, "--task", task, "--iters", 60, "--crop-min", 0.9))
    rows = metrics(tmp_path)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.5
    factors = [common.lr_factor(n, 60, warmup=0.02) for n in range(60)]
    assert [row["lr"] / 0.05 for row in rows] == pytest.approx(factors, rel=1e-5)
    terms = result(tmp_path)["validation_loss"].keys()
    assert terms and terms < rows[0].keys()


def test_gradients_are_clipped(tiny, tmp_path):
    """--clip bounds the norm of all gradients together: next to zero, nothing moves."""
    run_here(tiny("virtex", tmp_path, "--iters", 3, "--clip", 1e-15, "--weight-decay", 0))
    trained = checkpoint_in(tmp_path)["model"]
    torch.manual_seed(0)
    model = virtex.VirTex("resnet18", len(trained["textual.output.bias"]), 64)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.data, rtol=0, atol=1e-15)


class FakeMetric:
    """In place of CIDEr, SPICE and their tokenizer: keeps what is compared."""

    compared = []

    def method(self):
        return "fake"

    def tokenize(self, captions):
        return {n: [row["caption"] for row in rows] for n, rows in captions.items()}

    def compute_score(self, truth, written):
        self.compared.append((truth, written))
        return 0.123, None


def replace_metrics(patch, module):
    """In place of the optional package pycocoevalcap; None: it is not installed."""
    for name in ("cider.cider", "spice.spice", "tokenizer.ptbtokenizer"):
        patch.setitem(sys.modules, f"pycocoevalcap.{name}", module)


FAKE = SimpleNamespace(Cider=FakeMetric, Spice=FakeMetric, PTBTokenizer=FakeMetric)


def test_caption_and_evaluate(tiny, coco_folder, tmp_path, monkeypatch):
    """--caption prints a line and draws a picture per photo, with the checkpoint alone.

    --evaluate writes the same captions, of the validation split, and compares them with its own.
    """
    run_here(tiny("virtex", tmp_path, "--iters", 30, "--probe-every", 15, "--crop-min", 0.9))
    assert result(tmp_path)["probe"]["best"]["iteration"] in (15, 30)
    common.load_backbone(tmp_path / "backbone_best.pth", "resnet18")

    model, _, size = virtex.load_virtex(tmp_path / "checkpoint.pth")
    trained = checkpoint_in(tmp_path)["model"]
    assert size == 32
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())

    use = "virtex.py", "--weights", tmp_path / "checkpoint.pth", "--output", tmp_path / "use"
    photos, broken = sorted((coco_folder / "val2017").iterdir()), tmp_path / "broken.jpg"
    broken.write_bytes(photos[0].read_bytes()[:300])
    lines = run_here([*use, "--caption", photos[0], broken, photos[1]]).splitlines()
    pictures = tmp_path / "use" / "captions"
    names = [f"1_{photos[0].stem}.png", f"3_{photos[1].stem}.png"]
    assert sorted(path.name for path in pictures.iterdir()) == names

    replace_metrics(monkeypatch, FAKE)
    monkeypatch.setattr("shutil.which", lambda name: "java")
    output = run_here([*use, "--evaluate", "--data", "coco", "--root", coco_folder])
    assert output.count("fake 12.3 on 12 images") == 2
    written = json.loads((tmp_path / "use" / "captions_val2017.json").read_text())
    assert [row["image"] for row in written] == list(map(str, photos))
    truth, captions = FakeMetric.compared[0]
    data = common.caption_data("coco", str(coco_folder), "val2017")
    assert truth == {n: data.captions_of(n) for n in range(12)}
    assert captions == {n: [row["caption"]] for n, row in enumerate(written)}
    assert lines == [
        f"{photos[0]}: {captions[0][0]}  ({pictures / names[0]})",
        f"{broken}: cannot be decoded, is it a photo?",
        f"{photos[1]}: {captions[1][0]}  ({pictures / names[1]})",
    ]


def test_evaluate_says_what_it_needs(monkeypatch):
    """Without pycocoevalcap, and without Java"""
    command = ["virtex.py", "--evaluate", "--weights", "x.pth"]
    replace_metrics(monkeypatch, None)
    assert "python -m pip install pycocoevalcap" in refusal(command)
    replace_metrics(monkeypatch, FAKE)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt install default-jre" in refusal(command)


def test_learns_on_shapes(few_scenes, tmp_path):
    """A sixth of the run without flags, at 48 px and its learning rates"""
    few_scenes(5000, 500)
    flags = "--iters", 210, "--batch-size", 32, "--lr", 1e-3, "--text-lr", 1e-3
    run_here(["virtex.py", *flags, "--image-size", 48, "--output", tmp_path])
    probe = result(tmp_path)["probe"]
    assert probe["trained"] > probe["random"] + 3
