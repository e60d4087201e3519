"""virtex.py, piece by piece, against the paper written out slowly and against torch's own modules.

Everything here runs in this process on tiny sizes; the script as a user starts it is tested elsewhere. In most tests
the backbone is `FeaturesAsGiven`: what is passed as images are the features, so that a test decides what the heads see.
"""

import copy
import io
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from conftest import FeaturesAsGiven
from PIL import Image
from torch import nn

import common
import language
import shapes
import virtex
from virtex import EOS, MASK, SOS, UNKNOWN

# Three captions of different length, so that a batch of them is padded; an unknown token within the first.
CAPTIONS = [[SOS, 5, UNKNOWN, 7, EOS], [SOS, 9, 4, 6, 4, 8, EOS], [SOS, 10, EOS]]
MASKED = [[SOS, 5, UNKNOWN, MASK, EOS], [SOS, MASK, 4, 11, MASK, 8, EOS], [SOS, MASK, EOS]]


def build_model(channels, *args, **kwargs):
    """VirTex without a backbone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda arch: FeaturesAsGiven(channels))
        return virtex.VirTex("stub", *args, **kwargs)


def randomise(module, scale=0.5):
    """Every parameter random, so that a bias or a norm that is forgotten shows; the gains of norms around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name and "weight" in name))
    return module


def tiny_model(vocab_size=12, channels=5, **kwargs):
    """Two layers of two heads per direction in float64, all parameters random, no dropout."""
    size = {"hidden": 8, "layers": 2, "heads": 2, "feedforward": 12, "max_length": 10, **kwargs}
    return randomise(build_model(channels, vocab_size, **size).double()).eval()


def random_features(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def batch_of(captions, task="bicaptioning", masked=None):
    """What `collate` makes of these captions, less images and colours: the arguments of the model."""
    samples = [
        {"image": np.zeros((1, 1, 3), np.uint8), "jitter": np.zeros(4, np.float32), "tokens": tokens, "unreadable": [], "task": task}
        for tokens in captions
    ]
    for sample, row in zip(samples, masked or ()):
        sample["masked"] = row
    batch = virtex.collate(samples)
    return {key: value for key, value in batch.items() if key not in ("images", "jitter", "unreadable")}


def logits_of(head, projected, tokens):
    return head.output(head(tokens, head.memory(projected))[0])


# ------------------------------------------------------------------------------------------ Eq. 1, written out


def slow_layer_norm(vector, w, name, eps):
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return (vector - mean) / math.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def slow_attention(x, memory, w, name, heads, causal):
    """Vaswani et al.: softmax(q k / sqrt(d)) v for one head, one query and one key after the other."""
    hidden, width = len(x[0]), len(x[0]) // heads
    (w_q, w_k, w_v), (b_q, b_k, b_v) = w[f"{name}.in_proj_weight"].reshape(3, hidden, hidden), w[f"{name}.in_proj_bias"].reshape(3, hidden)
    attended = np.zeros((len(x), hidden))
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        for t in range(len(x)):
            seen = memory[: t + 1] if causal else memory
            query = w_q[rows] @ x[t] + b_q[rows]
            scores = [query @ (w_k[rows] @ vector + b_k[rows]) / math.sqrt(width) for vector in seen]
            total = sum(math.exp(score) for score in scores)
            attended[t, rows] = sum(math.exp(score) / total * (w_v[rows] @ vector + b_v[rows]) for score, vector in zip(scores, seen))
    return [w[f"{name}.out_proj.weight"] @ vector + w[f"{name}.out_proj.bias"] for vector in attended]


def slow_feed_forward(vector, w, name):
    inner = w[f"{name}.linear1.weight"] @ vector + w[f"{name}.linear1.bias"]
    gelu = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in inner])
    return w[f"{name}.linear2.weight"] @ gelu + w[f"{name}.linear2.bias"]


def slow_log_p(w, direction, features, tokens, layers=2, heads=2):
    """Sec. 3, Textual Head -> [log p(tokens[t] | tokens[:t], I) for t = 1 ...]; `direction` has its own layers only."""
    _, height, width = features.shape
    image = [
        w["textual.visual_projection.weight"] @ features[:, i, j] + w["textual.visual_projection.bias"]
        for i in range(height)
        for j in range(width)
    ]
    words, positions, x = w["textual.embedding.words.weight"], w["textual.embedding.positions.weight"], []
    for t, token in enumerate(tokens[:-1]):
        vector = slow_layer_norm(words[token] + positions[t], w, "textual.embedding.layer_norm", eps=1e-8)
        x.append(vector if token != UNKNOWN else 0 * vector)  # [official code]
    for n in range(layers):
        name = f"{direction}.transformer.layers.{n}"
        a = slow_attention(x, x, w, f"{name}.self_attn", heads, causal=True)
        x = [slow_layer_norm(x[t] + a[t], w, f"{name}.norm1", eps=1e-5) for t in range(len(x))]
        a = slow_attention(x, image, w, f"{name}.multihead_attn", heads, causal=False)
        x = [slow_layer_norm(x[t] + a[t], w, f"{name}.norm2", eps=1e-5) for t in range(len(x))]
        x = [slow_layer_norm(vector + slow_feed_forward(vector, w, name), w, f"{name}.norm3", eps=1e-5) for vector in x]
    log_p = []
    for vector, target in zip(x, tokens[1:]):
        scores = [words[v] @ vector + w["textual.output.bias"][v] for v in range(len(words))]
        log_p.append(scores[target] - math.log(sum(math.exp(score) for score in scores)))
    return log_p


def test_loss_is_equation_1():
    """Eq. 1: -log p of each token given those before it (forward) or behind it (backward), two means, summed."""
    model, features = tiny_model(), random_features(3, 5, 2, 3)
    losses = model(features, **batch_of(CAPTIONS))
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    forward = [p for row, tokens in zip(features.numpy(), CAPTIONS) for p in slow_log_p(w, "textual", row, tokens)]
    backward = [p for row, tokens in zip(features.numpy(), CAPTIONS) for p in slow_log_p(w, "backward_textual", row, tokens[::-1])]
    assert len(forward) == len(backward) == 4 + 6 + 2  # every token but the one that the direction starts from
    assert losses["forward"].item() == pytest.approx(-np.mean(forward), abs=1e-10)
    assert losses["backward"].item() == pytest.approx(-np.mean(backward), abs=1e-10)
    assert sum(losses.values()).item() == pytest.approx(-np.mean(forward) - np.mean(backward), abs=1e-10)


def test_captioning_is_the_forward_half_of_equation_1():
    """Sec. 4.2, forward captioning: the backward Transformer is removed and nothing else changes."""
    both, one = tiny_model(), tiny_model(task="captioning")
    state = {name: value for name, value in both.state_dict().items() if not name.startswith("backward_")}
    one.load_state_dict(state)  # strict: no backward Transformer is left
    features = random_features(3, 5, 2, 3)
    losses = one(features, **batch_of(CAPTIONS, "captioning"))
    assert list(losses) == ["forward"]
    assert torch.equal(losses["forward"], both(features, **batch_of(CAPTIONS))["forward"])


# ------------------------------------------------------------------------------------------ decoder


def one_layer(dropout):
    """-> a decoder layer of width 16 with 4 heads, and what makes the keys and values of image vectors for it"""
    head = virtex.TextualHead(16, 12, 16, 1, heads=4, feedforward=24, dropout=dropout, max_length=10).double()
    return head.transformer["layers"][0], lambda image: head.memory(image)[0]


@pytest.mark.parametrize("causal", (True, False))
def test_decoder_layer_is_torch_s(causal):
    """Sec. 3: the decoder layer of Vaswani et al. with GELU, under the parameter names of torch's."""
    reference = randomise(nn.TransformerDecoderLayer(16, 4, 24, activation="gelu", batch_first=True).double()).eval()
    layer, memory = one_layer(dropout=0.1)
    layer.eval().load_state_dict(reference.state_dict())  # strict
    x, image, hidden_keys = random_features(2, 5, 16), random_features(2, 6, 16) + 1, torch.arange(5) >= torch.tensor([[5], [3]])
    if causal:
        ours, _ = layer(x, memory(image))
        theirs = reference(x, image, tgt_mask=torch.ones(5, 5).triu(1).bool())
    else:
        ours, _ = layer(x, memory(image), causal=False, mask=~hidden_keys[:, None, None])
        theirs = reference(x, image, tgt_key_padding_mask=hidden_keys)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_dropout_follows_each_operation():
    """Sec. 3: attention, attention over the image and feed-forward are "each followed by dropout": at p = 1 none is left."""
    (layer, memory), x = one_layer(dropout=1.0), random_features(2, 5, 16)
    randomise(layer)
    layer.self_attn.dropout = layer.multihead_attn.dropout = 0.0  # that of the attention weights is not meant here
    torch.testing.assert_close(layer.train()(x, memory(x))[0], layer.norm3(layer.norm2(layer.norm1(x))), rtol=0, atol=1e-12)
    assert not torch.allclose(layer.eval()(x, memory(x))[0], layer.norm3(layer.norm2(layer.norm1(x))))


@pytest.mark.parametrize("direction", ("textual", "backward_textual"))
def test_predictions_are_causal(direction):
    """Sec. 3: a prediction depends on past tokens only, on all of them, and on the image."""
    model, tokens = tiny_model(), torch.tensor([[1, 5, 7, 9, 4, 6, 8]])
    head, features = getattr(model, direction), random_features(1, 5, 2, 3)
    before = logits_of(head, model.textual.project(features), tokens)
    for t in range(7):
        changed = tokens.clone()
        changed[0, t] = 11
        difference = (logits_of(head, model.textual.project(features), changed) - before).abs().amax(2)[0]
        assert (difference[:t] < 1e-12).all() and (difference[t:] > 1e-4).all()
    assert ((logits_of(head, model.textual.project(features + 1), tokens) - before).abs().amax(2) > 1e-4).all()


def test_image_vectors_are_in_reading_order():
    """Sec. 3: one vector for each place of the grid, row by row: the attention maps are drawn over the photo in this order."""
    head, features = tiny_model().textual, random_features(1, 5, 2, 3)
    for n, (i, j) in enumerate(((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))):
        torch.testing.assert_close(head.project(features)[:, n], head.visual_projection(features[:, :, i, j]))


def test_directions_share_all_but_their_layers():
    """Sec. 3: one token embedding, reused at both output layers, and one projection; independent Transformer layers."""
    model = build_model(5, 12, hidden=64)
    forward, backward = model.textual, model.backward_textual
    assert forward.output.weight is forward.embedding.words.weight
    assert forward.output is backward.output and forward.embedding is backward.embedding
    assert forward.visual_projection is backward.visual_projection
    both = zip(forward.transformer.parameters(), backward.transformer.parameters())
    assert all(one is not other for one, other in both)


def test_sizes_follow_the_width():
    """Sec. 3, Model Size: A = H / 64 and F = 4 H."""
    layers = build_model(5, 12, hidden=192, layers=3).backward_textual.transformer["layers"]
    assert [(layer.self_attn.heads, layer.multihead_attn.heads, layer.linear1.out_features) for layer in layers] == 3 * [(3, 3, 768)]


# ------------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("task", ("bicaptioning", "masked_lm"))
def test_padding_changes_nothing(task):
    """Sec. 3: a caption's loss is the same alone, beside longer ones, and padded further than any of them."""
    model, features, masked = tiny_model(task=task), random_features(3, 5, 2, 3), MASKED if task == "masked_lm" else None
    together = batch_of(CAPTIONS, task, masked)
    losses = model(features, **together)

    longest = [SOS, *7 * [6], EOS]  # a fourth caption pads the three to nine tokens, and is then cut off
    wider = batch_of([*CAPTIONS, longest], task, masked and [*masked, longest])
    positions = 3 * (9 if masked else 8)  # a captioner predicts the next token: nothing behind the last
    wider = {key: value[value < positions] if key == "predicted" else value[:3] for key, value in wider.items()}
    for name, loss in model(features, **wider).items():
        assert loss.item() == pytest.approx(losses[name].item(), abs=1e-6)

    total, count = dict.fromkeys(losses, 0.0), 0
    for i in range(3):
        alone = batch_of(CAPTIONS[i : i + 1], task, masked and masked[i : i + 1])
        count += len(alone["predicted"])
        for name, loss in model(features[i : i + 1], **alone).items():
            total[name] += loss.item() * len(alone["predicted"])
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(total[name] / count, abs=1e-6)


@pytest.mark.parametrize("task, rows", (("bicaptioning", 2 * 12), ("captioning", 12), ("masked_lm", 4)))
def test_only_predicted_positions_reach_the_vocabulary(task, rows):
    """DESIGN 5.1: padding costs nothing: 4 + 6 + 2 tokens to predict in each direction, or 4 [MASK]ed ones."""
    model, seen = tiny_model(task=task), []
    model.textual.output.register_forward_hook(lambda module, inputs, output: seen.append(output.numel() // 12))
    model(random_features(3, 5, 2, 3), **batch_of(CAPTIONS, task, MASKED if task == "masked_lm" else None))
    assert sum(seen) == rows


# ------------------------------------------------------------------------------------------ optimiser

LAYER = "transformer.layers.0."
DECAYED = {"textual.visual_projection.weight", "textual.visual_projection.bias", "textual.output.bias"}
DECAYED |= {"textual.embedding.words.weight", "textual.embedding.positions.weight"}
DECAYED |= {
    f"{head}.{LAYER}{name}.weight".replace("in_proj.", "in_proj_")
    for head in ("textual", "backward_textual")
    for name in ("self_attn.in_proj", "self_attn.out_proj", "multihead_attn.in_proj", "multihead_attn.out_proj", "linear1", "linear2")
}
PLAIN = {"textual.embedding.layer_norm.weight", "textual.embedding.layer_norm.bias"}
PLAIN |= {name.replace("weight", "bias") for name in DECAYED if LAYER in name}
PLAIN |= {f"{head}.{LAYER}norm{n}.{kind}" for head in ("textual", "backward_textual") for n in (1, 2, 3) for kind in ("weight", "bias")}


def named_groups(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


def test_parameter_groups_by_name():
    """Sec. 3, Training Details: no weight decay on norms and biases in the Transformers; the backbone has its own rate."""
    model = virtex.VirTex("resnet18", 12, hidden=64)
    groups = virtex.parameter_groups(model, lr=0.2, text_lr=1e-3, weight_decay=1e-4)
    backbone = {f"visual.cnn.{name}" for name, _ in common.build_backbone("resnet18").named_parameters()}
    assert named_groups(model, groups) == [backbone, DECAYED, PLAIN]
    assert [group["weight_decay"] for group in groups] == [1e-4, 1e-4, 0.0]
    assert [group["max_lr"] for group in groups] == [group["lr"] for group in groups] == [0.2, 1e-3, 1e-3]


@pytest.mark.parametrize("task", virtex.TASKS)
def test_every_parameter_is_in_one_group(task):
    """Sec. 3: everything is trained; the tied weight of embedding and output layer is stepped once."""
    model = virtex.VirTex("resnet18", 12, hidden=64, layers=2, task=task)
    grouped = [id(parameter) for group in virtex.parameter_groups(model, 0.2, 1e-3, 1e-4) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(parameter) for parameter in model.parameters()}


def test_learning_rates_of_the_paper():
    """Sec. 3: linear warm-up over 10K of 500K iterations to 0.2 and 1e-3, then a cosine to zero."""
    args = virtex.get_args(["--data", "coco"])
    assert (args.iters, args.batch_size, args.weight_decay, args.lookahead_k, args.lookahead_alpha) == (500_000, 256, 1e-4, 5, 0.5)
    model = virtex.VirTex("resnet18", 12, hidden=64)
    maxima = [group["max_lr"] for group in virtex.parameter_groups(model, args.lr, args.text_lr, args.weight_decay)]
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    for iteration, factor in ((0, 0), (1, 1e-4), (5000, 0.5), (10_000, 1), (132_500, quarter), (255_000, 0.5), (500_000, 0)):
        rates = [maximum * common.warmup_cosine(iteration, args.iters, args.warmup * args.iters) for maximum in maxima]
        assert rates == pytest.approx([0.2 * factor, 1e-3 * factor, 1e-3 * factor], rel=1e-12, abs=1e-15)


def toy_problem():
    """A parabola in two dimensions, SGD with momentum and look-ahead -> step(), the parameter, and all that has a state."""
    parameter = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)
    lookahead = virtex.LookAhead(optimizer, k=5, alpha=0.5)

    def step():
        optimizer.zero_grad()
        (parameter**2 * torch.tensor([1.0, 4.0])).sum().backward()
        optimizer.step()
        lookahead.step()

    return step, parameter, optimizer, lookahead


def test_lookahead_written_out():
    """Sec. 3; Zhang et al.: every 5 steps slow += 0.5 (fast - slow) and fast = slow; the momentum goes on."""
    for coordinate, (start, curvature) in enumerate(((3.0, 2.0), (-2.0, 8.0))):
        step, parameter, _, _ = toy_problem()
        fast = slow = start
        velocity = 0.0
        for n in range(1, 14):
            velocity = 0.9 * velocity + curvature * fast
            fast -= 0.05 * velocity
            if n % 5 == 0:
                slow += 0.5 * (fast - slow)
                fast = slow
            step()
            assert parameter[coordinate].item() == pytest.approx(fast, abs=1e-12)


def test_lookahead_resumes():
    """DESIGN 3: slow weights are part of the checkpoint: 7 steps, saved and loaded, and 6 more are 13 steps."""
    through, kept, _, _ = toy_problem()
    step, parameter, optimizer, lookahead = toy_problem()
    for _ in range(7):
        through(), step()
    file = io.BytesIO()
    torch.save((parameter.data, optimizer.state_dict(), lookahead.state_dict()), file)
    file.seek(0)
    step, parameter, optimizer, lookahead = toy_problem()
    values, *states = torch.load(file, weights_only=True)
    parameter.data.copy_(values)
    optimizer.load_state_dict(states[0])
    lookahead.load_state_dict(states[1])
    for _ in range(6):
        through(), step()
        assert torch.equal(parameter, kept)


# ------------------------------------------------------------------------------------------ beam search


def trimmed(row):
    """A list of tokens without the zeros behind [EOS]."""
    return row[: row.index(EOS) + 1] if EOS in row else row


def log_p_of(head, projected, tokens):
    """Sum of the log-probabilities of tokens[1:], in one pass over the whole caption."""
    log_p = logits_of(head, projected, torch.tensor([tokens[:-1]])).log_softmax(-1)[0]
    return sum(log_p[t, token].item() for t, token in enumerate(tokens[1:]))


def learned_captioner(vocab_size, longest):
    """A captioner that half knows two captions of each of eight photos: it is unsure, and what it says differs.

    Some captions are cut before their [EOS]. -> head, image vectors
    """
    model, features, rng = tiny_model(vocab_size, task="captioning"), random_features(8, 5, 2, 2), np.random.default_rng(0)
    words = [token for token in range(vocab_size) if token != EOS]
    captions = [[SOS, *rng.choice(words, rng.integers(2, longest)).tolist(), EOS][:longest] for _ in range(16)]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(120):
        optimizer.zero_grad()
        model(features.repeat(2, 1, 1, 1), **batch_of(captions, "captioning"))["forward"].backward()
        optimizer.step()
    return model.textual, model.textual.project(features).detach()


@pytest.fixture(scope="module")
def captioner():
    return learned_captioner(vocab_size=12, longest=9)


def test_beam_search_with_kept_keys(captioner):
    """DESIGN 5.1: keys and values are cached; the result is that of computing everything anew."""
    for beams in (1, 3, 5):
        tokens, scores = virtex.beam_search(*captioner, beams, max_length=9)
        again, scores_again = virtex.beam_search(*captioner, beams, max_length=9, cached=False)
        assert torch.equal(tokens, again)
        torch.testing.assert_close(scores, scores_again, rtol=0, atol=1e-5)


def test_beam_search_of_a_batch(captioner):
    """DESIGN 5.1: a photo's caption is the same alone and in a batch."""
    head, projected = captioner
    tokens, scores = virtex.beam_search(head, projected, 4, max_length=9)
    captions = [trimmed(row) for row in tokens.tolist()]
    assert len(set(map(len, captions))) > 2, "too easy to mean anything"
    for i in range(8):
        row, score = virtex.beam_search(head, projected[i : i + 1], 4, max_length=9)
        assert trimmed(row[0].tolist()) == captions[i]
        assert score.item() == pytest.approx(scores[i].item(), abs=1e-5)


def test_beam_search_scores_its_captions(captioner):
    """Eq. 1, first term: the score is the log-probability of the caption that is returned; zeros follow [EOS]."""
    head, projected = captioner
    tokens, scores = virtex.beam_search(head, projected, 4, max_length=9)
    for i, row in enumerate(tokens.tolist()):
        assert row[0] == SOS and not any(row[len(trimmed(row)) :])
        assert scores[i].item() == pytest.approx(log_p_of(head, projected[i : i + 1], trimmed(row)), abs=1e-5)


def slow_beam_search(head, projected, beams, max_length):
    """One photo, one hypothesis after the other: the best `beams` of all that grew by a token or had ended."""
    hypotheses = [(0.0, [SOS])]
    while any(row[-1] != EOS for _, row in hypotheses) and max(len(row) for _, row in hypotheses) < max_length:
        grown = [(score, row) for score, row in hypotheses if row[-1] == EOS]
        for score, row in hypotheses:
            if row[-1] != EOS:
                log_p = logits_of(head, projected, torch.tensor([row]))[0, -1].log_softmax(-1).tolist()
                grown += [(score + p, [*row, token]) for token, p in enumerate(log_p)]
        hypotheses = sorted(grown, reverse=True)[:beams]
    return hypotheses[0]


@pytest.mark.parametrize("beams", (1, 2, 4))
def test_beam_search_written_out(captioner, beams):
    """DESIGN 5.1: what ended keeps its score and its place among the beams. One beam is greedy decoding."""
    head, projected = captioner
    tokens, scores = virtex.beam_search(head, projected, beams, max_length=9)
    for i in range(8):
        score, row = slow_beam_search(head, projected[i : i + 1], beams, max_length=9)
        assert trimmed(tokens[i].tolist()) == row
        assert scores[i].item() == pytest.approx(score, abs=1e-5)


def test_beam_search_with_room_for_all_is_exhaustive():
    """With as many beams as there are captions of four tokens, the best of all 6^4 continuations is found."""
    head, projected = learned_captioner(vocab_size=6, longest=5)
    tokens, scores = virtex.beam_search(head, projected, beams=1 + 5 + 25 * 6, max_length=5)
    greedy, _ = virtex.beam_search(head, projected, beams=1, max_length=5)
    every = torch.tensor([[SOS, *rest] for rest in itertools.product(range(6), repeat=4)])
    for i in range(8):
        log_p = logits_of(head, projected[i : i + 1].expand(len(every), -1, -1), every[:, :-1]).log_softmax(-1)
        so_far = log_p.gather(2, every[:, 1:, None]).squeeze(2).cumsum(1)
        possible = {tuple(trimmed(row)): p[len(trimmed(row)) - 2] for row, p in zip(every.tolist(), so_far.tolist())}
        best = max(possible, key=possible.get)
        assert trimmed(tokens[i].tolist()) == list(best)
        assert scores[i].item() == pytest.approx(possible[best], abs=1e-5)
    assert len({len(trimmed(row)) for row in tokens.tolist()}) > 1 and not torch.equal(tokens, greedy), "too easy to mean anything"


# ------------------------------------------------------------------------------------------ tokens


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of 150 tokens from captions of the built-in data, as a file."""
    captions = [language.clean(caption) for scene in range(200) for caption in shapes.describe_scene(scene)]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(language.train_tokenizer(captions, 150))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return virtex.read_tokenizer(tokenizer_path)


def test_clean():
    """Sec. 3, Tokenization: lower case, compatibility characters decomposed, accents stripped."""
    assert language.clean("A Crème BRÛLÉE") == "a creme brulee"
    assert language.clean("e\u0301") == "e"  # an accent that is a character of its own
    assert language.clean("ﬁve ²⁄₃ ＡＢＣ…") == "five 2\u20443 abc..."


def test_clean_leaves_no_capital():
    """Sec. 3, Tokenization: "we lowercase", also what NFKD makes of a sign."""
    assert language.clean("Coke™ №5 at 20℃") == "coketm no5 at 20°c"


def test_swap_left_right():
    """Sec. 3: the words left and right are interchanged; parts of other words are not (the official code's "bleft")."""
    assert language.swap_left_right("left of the cat, right of the dog") == "right of the cat, left of the dog"
    assert language.swap_left_right("a left-hand glove. right!") == "a right-hand glove. left!"
    for caption in ("a bright and upright cat", "leftover pizza", "two lefts, no rights", "copyright"):
        assert language.swap_left_right(caption) == caption


def test_mirrored_photos_have_mirrored_captions(tokenizer):
    """Sec. 3: half of the photos are mirrored, and exactly these have left and right interchanged."""
    half = np.zeros((32, 32, 3), np.uint8)
    half[:, :16] = 255  # white on the left
    images = type("Photos", (), {"open": lambda self, i: Image.fromarray(half), "__len__": lambda self: 1})()
    data = SimpleNamespace(images=images, captions_of=lambda i: ["Left of the bright circle"])
    args = virtex.get_args(["--crop-min", "1", "--image-size", "32"])
    view, mirrored = virtex.CaptionView(data, tokenizer, args), 0
    for epoch in range(60):
        sample = view[epoch, 0]
        white_on_the_left = sample["image"][:, :16].mean() > sample["image"][:, 16:].mean()
        expected = "left of the bright circle" if white_on_the_left else "right of the bright circle"
        assert tokenizer.decode(sample["tokens"]) == expected
        mirrored += not white_on_the_left
    assert 15 < mirrored < 45


def test_special_tokens(tokenizer):
    """Sec. 3 and the official model: unknown (and padding) 0, [SOS] 1, [EOS] 2, [MASK] 3, and no caption can spell them."""
    assert [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")] == [1, 2, 3] == [SOS, EOS, MASK]
    assert tokenizer.unk_id() == UNKNOWN == 0 and tokenizer.encode("犬")[-1] == 0
    assert tokenizer.get_piece_size() == 150
    assert not {SOS, EOS, MASK} & set(tokenizer.encode("a [SOS] circle [EOS] and a [MASK]"))


def test_decode_inverts_encode(tokenizer):
    """Sec. 3: tokens lose nothing but case and accents."""
    for scene in range(200, 260):
        for caption in shapes.describe_scene(scene):
            assert tokenizer.decode(virtex.encode(tokenizer, caption, 100)) == language.clean(caption)
    assert tokenizer.decode(virtex.encode(tokenizer, "A Rêd CIRCLE", 100)) == "a red circle"


def test_two_captions_make_a_tokenizer(tmp_path):
    """DESIGN 5.1: a smaller corpus gets a smaller vocabulary without failing."""
    path, captions = tmp_path / "tokenizer.model", ["a dog runs on the grass.", "two dogs!"]
    path.write_bytes(language.train_tokenizer(iter(captions), 10_000))
    tokenizer = virtex.read_tokenizer(path)
    assert 4 < tokenizer.get_piece_size() < 200
    assert [tokenizer.decode(virtex.encode(tokenizer, caption, 30)) for caption in captions] == captions


def test_too_few_tokens_are_refused():
    """DESIGN 8: one line instead of SentencePiece's traceback when the vocabulary cannot hold the letters."""
    with pytest.raises(SystemExit, match="no tokenizer of 12 tokens"):
        language.train_tokenizer(["the quick brown fox jumps over the lazy dog"], 12)


def test_no_piece_mixes_letters_and_punctuation():
    """Sec. 3: "to prevent redundant tokens such as dog? and dog!"."""
    captions = 50 * ["a dog?", "the dog!", "dog's (dog), dog-dog", "dog; it's a 'dog'.", "no.dog"]
    tokenizer = virtex.sentencepiece.SentencePieceProcessor(model_proto=language.train_tokenizer(captions, 100))
    pieces = [tokenizer.id_to_piece(i).lstrip("▁") for i in range(MASK + 1, tokenizer.get_piece_size())]
    assert "dog" in pieces
    assert [piece for piece in pieces if any(map(str.isalpha, piece)) and not piece.isalpha()] == []


def test_long_captions_are_cut_before_they_are_reversed(tokenizer):
    """DESIGN 5.1: of a caption beyond 30 tokens both directions see the first 30; a shorter one keeps its [EOS]."""
    caption = " ".join(shapes.describe_scene(0))
    whole, cut = virtex.encode(tokenizer, caption, 1000), virtex.encode(tokenizer, caption, 30)
    assert len(whole) > 31 and whole[0] == SOS and whole[-1] == EOS
    assert cut == whole[:30]
    short = virtex.encode(tokenizer, "a circle", 30)
    assert short[0] == SOS and short[-1] == EOS and len(short) < 10
    batch = batch_of([cut, short])
    assert batch["tokens"].tolist() == [cut, short + [0] * (30 - len(short))]
    assert batch["backward_tokens"].tolist() == [cut[::-1], short[::-1] + [0] * (30 - len(short))]


# ------------------------------------------------------------------------------------------ the other tasks


def test_mask_tokens_statistics():
    """Sec. 4.2: 15% of the words (3 of 20); of these 85% become [MASK], 10% any word, 5% stay [official code]."""
    tokens, rng, draws = [SOS, *range(500, 520), EOS], np.random.default_rng(0), 4000
    changed = np.zeros(22, int)
    masks = words = 0
    for _ in range(draws):
        masked = virtex.mask_tokens(tokens, 1000, rng)
        different = [t for t in range(22) if masked[t] != tokens[t]]
        assert len(masked) == 22 and len(different) <= 3
        assert all(MASK <= masked[t] < 1000 for t in different)
        masks += sum(masked[t] == MASK for t in different)
        words += sum(masked[t] > MASK for t in different)
        changed[different] += 1
    assert masks / (3 * draws) == pytest.approx(0.85, abs=0.015)
    assert words / (3 * draws) == pytest.approx(0.10, abs=0.015)
    assert changed[0] == changed[-1] == 0  # [SOS] and [EOS]
    assert changed[1:-1] == pytest.approx(0.95 * 3 * draws / 20, rel=0.2)  # no place is preferred


@pytest.mark.parametrize("length, number", ((1, 1), (6, 1), (7, 2), (20, 3), (21, 4), (0, 0)))
def test_mask_tokens_rounds_up(length, number):
    """Sec. 4.2: 15% of the tokens, one at least; a caption that was cut has no [EOS] to spare."""
    for end in ([EOS], []):
        tokens, rng = [SOS, *range(10, 10 + length), *end], np.random.default_rng(0)
        draws = [virtex.mask_tokens(tokens, 1000, rng) for _ in range(200)]
        assert max(sum(m != t for m, t in zip(masked, tokens)) for masked in draws) == number
        assert all(masked[0] == SOS and masked[len(masked) - len(end) :] == end for masked in draws)
        assert all(any(masked[t] == MASK for masked in draws) for t in range(1, length + 1))


def test_masked_lm_written_out():
    """Sec. 4.2: one bidirectional Transformer; cross-entropy at [MASK]s alone, not where words were replaced or kept."""
    model, features = tiny_model(task="masked_lm"), random_features(3, 5, 2, 3)
    loss = model(features, **batch_of(CAPTIONS, "masked_lm", MASKED))["masked_lm"]
    terms, projected = [], model.textual.project(features)
    for i, (tokens, masked) in enumerate(zip(CAPTIONS, MASKED)):
        vectors, _ = model.textual(torch.tensor([masked]), model.textual.memory(projected[i : i + 1]), causal=False)
        log_p = model.textual.output(vectors).log_softmax(-1)[0]
        terms += [-log_p[t, token].item() for t, token in enumerate(tokens) if masked[t] == MASK]
    assert len(terms) == 4
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-6)


def test_masked_lm_reads_both_sides():
    """Sec. 4.2: a [MASK] at the start is predicted from what follows it, too."""
    model, features = tiny_model(task="masked_lm"), random_features(1, 5, 2, 3)
    one = model(features, **batch_of([[SOS, 5, 6, 7, EOS]], "masked_lm", [[SOS, MASK, 6, 7, EOS]]))["masked_lm"]
    other = model(features, **batch_of([[SOS, 5, 6, 7, EOS]], "masked_lm", [[SOS, MASK, 6, 8, EOS]]))["masked_lm"]
    assert abs(one - other).item() > 1e-4


def test_masked_lm_without_a_mask():
    """Sec. 4.2: when chance replaces no token of a batch by [MASK], the loss is zero and not NaN."""
    model = tiny_model(task="masked_lm")
    loss = model(random_features(1, 5, 2, 3), **batch_of([[SOS, 5, EOS]], "masked_lm", [[SOS, 9, EOS]]))["masked_lm"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_token_set_loss_written_out():
    """Sec. 4.2 and Tab. 1: each of a caption's K different words is 1/K of the target; special tokens are none of it."""
    captions = [*CAPTIONS, [SOS, UNKNOWN, EOS], [SOS, 4, 11, MASK]]
    logits, tokens = random_features(5, 12), virtex.pad(captions)
    total = 0.0
    for row, caption in zip(logits.tolist(), captions):
        words = {token for token in caption if token not in (UNKNOWN, SOS, EOS, MASK)}
        log_sum = math.log(sum(math.exp(score) for score in row))
        total += sum(-(row[word] - log_sum) / len(words) for word in words)
    assert virtex.token_set_loss(logits, tokens).item() == pytest.approx(total / 5, abs=1e-6)


def test_token_classification_pools_the_grid():
    """Sec. 4.2: the textual head is a linear layer, here on the mean of the 7x7 features."""
    model, features = randomise(build_model(5, 12, hidden=8, task="token_classification").double()), random_features(3, 5, 2, 3)
    loss = model(features, **batch_of(CAPTIONS, "token_classification"))["token_classification"]
    pooled = torch.stack([features[:, :, i, j] for i in range(2) for j in range(3)]).mean(0)
    logits = pooled @ model.textual["output"].weight.T + model.textual["output"].bias
    assert loss.item() == pytest.approx(virtex.token_set_loss(logits, virtex.pad(CAPTIONS)).item(), abs=1e-6)


# ------------------------------------------------------------------------------------------ initialisation


def test_initialisation():
    """DESIGN 5.1: N(0, 0.02) for every matrix and embedding, zero biases, neutral norms [official code]."""
    for name, value in build_model(64, 200, hidden=64, layers=2).named_parameters():
        if "norm" in name:
            assert (value == float(name.endswith("weight"))).all(), name
        elif "bias" in name:
            assert not value.any(), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1) and abs(value.mean().item()) < 0.003, name


def test_loss_at_the_start_at_the_paper_s_sizes():
    """The docstring's "near 12.5" per direction (H = 2048, 10K words): above ln 10000 = 9.2, for the output layer is tied.

    The features have the mean and the size of a new ResNet-50's on photos: 0.9, and 1.55 root mean square.
    """
    torch.manual_seed(0)
    model, rng = build_model(2048, 10_000, hidden=2048), np.random.default_rng(0)
    captions = [[SOS, *rng.integers(4, 10_000, rng.integers(9, 15)).tolist(), EOS] for _ in range(8)]
    with torch.no_grad():
        losses = model(2.2 * torch.randn(8, 2048, 7, 7).relu(), **batch_of(captions))
    assert all(math.log(10_000) < loss.item() < 14 for loss in losses.values())


# ------------------------------------------------------------------------------------------ checkpoints


class OfficialEmbedding(nn.Module):
    def __init__(self, vocab_size, hidden, max_length):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.positions = nn.Embedding(max_length, hidden)
        self.layer_norm = nn.LayerNorm(hidden, eps=1e-8)

    def forward(self, tokens):
        x = self.layer_norm(self.words(tokens) + self.positions(torch.arange(tokens.size(1))))
        return x * (tokens != 0).unsqueeze(-1)


class OfficialHead(nn.Module):
    """Torch's own decoder under the official names."""

    def __init__(self, channels, vocab_size, hidden, layers, heads, feedforward, max_length):
        super().__init__()
        self.visual_projection = nn.Linear(channels, hidden)
        self.embedding = OfficialEmbedding(vocab_size, hidden, max_length)
        layer = nn.TransformerDecoderLayer(hidden, heads, feedforward, activation="gelu", batch_first=True)
        self.transformer = nn.TransformerDecoder(layer, layers)
        self.output = nn.Linear(hidden, vocab_size)
        self.output.weight = self.embedding.words.weight

    def forward(self, features, tokens):
        image = self.visual_projection(features.flatten(2).permute(0, 2, 1))
        future = torch.ones(tokens.size(1), tokens.size(1)).triu(1).bool()
        return self.output(self.transformer(self.embedding(tokens), image, tgt_mask=future))


class OfficialVirTex(nn.Module):
    """`visual.cnn`, `textual`, `backward_textual` as in github.com/kdexd/virtex; the classifier of torchvision is still there."""

    def __init__(self, vocab_size, hidden=128, layers=2, feedforward=96, max_length=12):
        super().__init__()
        self.visual = nn.ModuleDict({"cnn": torchvision.models.resnet18()})
        self.textual = OfficialHead(512, vocab_size, hidden, layers, hidden // 64, feedforward, max_length)
        self.backward_textual = copy.deepcopy(self.textual)
        for module in ("visual_projection", "embedding", "output"):
            setattr(self.backward_textual, module, getattr(self.textual, module))
        with torch.no_grad():
            self.textual.embedding.words.weight *= 0.1  # logits of a trained model's size: the output layer is tied
            for parameter in self.parameters():
                parameter += 0.05 * torch.randn_like(parameter)

    def features(self, images):
        return nn.Sequential(*list(self.visual["cnn"].children())[:-2])(images)


def test_official_checkpoint_gives_the_official_logits(tokenizer_path, tokenizer, tmp_path):
    """DESIGN 5.1: a checkpoint with the official names gives the same logits to 1e-5, in both directions."""
    torch.manual_seed(0)
    official, images = OfficialVirTex(150), torch.randn(2, 3, 64, 64)
    for module in official.visual["cnn"].modules():
        module.momentum = 1.0  # the batch norms take on the statistics of these images
    official.features(images)
    official.eval()
    torch.save({"model": official.state_dict(), "iteration": 500_000}, tmp_path / "official.pth")
    model, loaded_tokenizer, image_size = virtex.load_virtex(tmp_path / "official.pth", tokenizer_path)
    assert not model.training and image_size == 224
    assert loaded_tokenizer.get_piece_size() == 150 and model.textual.embedding.positions.num_embeddings == 12

    tokens = torch.tensor([[SOS, 20, UNKNOWN, 60, 100, EOS, 0, 0], [SOS, 7, 149, 8, 30, 31, 32, EOS]])
    with torch.no_grad():
        projected = model.textual.project(model.visual["cnn"](images))
        for head, reference in ((model.textual, official.textual), (model.backward_textual, official.backward_textual)):
            expected = reference(official.features(images), tokens)
            assert expected.std() > 0.1
            torch.testing.assert_close(logits_of(head, projected, tokens), expected, rtol=0, atol=1e-5)


def test_captioning_checkpoint_has_one_direction(tokenizer_path, tmp_path):
    """DESIGN 5.1: a checkpoint without a backward head is that of forward captioning; all sizes are read off the weights."""
    state = {k: v for k, v in OfficialVirTex(150, layers=1).state_dict().items() if not k.startswith("backward_")}
    torch.save({"model": state}, tmp_path / "forward.pth")
    model, _, _ = virtex.load_virtex(tmp_path / "forward.pth", tokenizer_path)
    assert model.task == "captioning" and not hasattr(model, "backward_textual")
    assert len(model.textual.transformer["layers"]) == 1 and model.textual.transformer["layers"][0].linear1.out_features == 96


@pytest.fixture(scope="module")
def own_state():
    return virtex.VirTex("resnet18", 150, 64).state_dict()


def test_own_checkpoint_brings_its_tokenizer(own_state, tokenizer, tmp_path):
    """DESIGN 5.1: a checkpoint of ours needs no --tokenizer and says how large its photos were."""
    proto = torch.frombuffer(bytearray(tokenizer.serialized_model_proto()), dtype=torch.uint8)
    torch.save({"script": "virtex", "args": {"image_size": 64}, "model": own_state, "tokenizer": proto}, tmp_path / "own.pth")
    model, loaded, image_size = virtex.load_virtex(tmp_path / "own.pth")
    assert image_size == 64 and loaded.encode("a red circle") == tokenizer.encode("a red circle")
    assert all(torch.equal(value, own_state[name]) for name, value in model.state_dict().items())


def test_checkpoints_that_cannot_caption_are_refused(own_state, tokenizer_path, tmp_path):
    """DESIGN 8: another script's checkpoint is refused by name, as are a backbone, masked LM, and what does not fit."""
    path, backbone = tmp_path / "x.pth", common.build_backbone("resnet18").state_dict()
    short = {name: value for name, value in own_state.items() if name != "textual.transformer.layers.0.norm2.bias"}
    refused = (
        ({"script": "icmlm", "args": {}, "model": own_state}, tokenizer_path, r"x\.pth is a checkpoint of icmlm\.py"),
        (backbone, tokenizer_path, "a backbone alone cannot caption"),
        ({"model": {f"visual.cnn.{name}": value for name, value in backbone.items()}}, tokenizer_path, "a backbone alone cannot caption"),
        ({"script": "virtex", "args": {"task": "masked_lm"}, "model": own_state}, tokenizer_path, "no captioning model"),
        ({"model": own_state}, None, "add --tokenizer"),
        ({"model": short}, tokenizer_path, r"missing \['textual\.transformer\.layers\.0\.norm2\.bias'\]"),
        ({"model": {**own_state, "textual.extra": torch.zeros(1)}}, tokenizer_path, r"unexpected \['textual\.extra'\]"),
    )
    for content, tokenizer, message in refused:
        torch.save(content, path)
        with pytest.raises(SystemExit, match=message):
            virtex.load_virtex(path, tokenizer)


def test_tokenizers_that_do_not_belong_are_refused(own_state, tmp_path):
    """DESIGN 8: a tokenizer of another size, without the special tokens, or no tokenizer at all."""
    torch.save({"model": own_state}, tmp_path / "x.pth")
    other, bare, text = tmp_path / "other.model", tmp_path / "bare.model", tmp_path / "text.model"
    other.write_bytes(language.train_tokenizer(["a dog", "a cat"], 100))
    trainer, model = virtex.sentencepiece.SentencePieceTrainer, io.BytesIO()
    trainer.train(sentence_iterator=iter(["a dog"]), model_writer=model, vocab_size=20, model_type="bpe", hard_vocab_limit=False, minloglevel=2)
    bare.write_bytes(model.getvalue())
    text.write_text("a dog")
    refused = ((other, "do not belong together"), (bare, "must have"), (text, "not a SentencePiece model"), (tmp_path / "none", "not found"))
    for path, message in refused:
        with pytest.raises(SystemExit, match=message):
            virtex.load_virtex(tmp_path / "x.pth", path)


# ------------------------------------------------------------------------------------------ where words look


def test_word_attention_is_that_of_torch():
    """Sec. 4.4: the last layer's weights over the image, mean over heads as nn.MultiheadAttention gives them, per word."""
    model, tokens = tiny_model(), torch.tensor([SOS, 4, 9, 6, 7, 10, EOS])
    head, projected = model.textual, model.textual.project(random_features(1, 5, 3, 3)).detach()
    first, last = (nn.TransformerDecoderLayer(8, 2, 12, activation="gelu", batch_first=True).double().eval() for _ in range(2))
    for reference, layer in zip((first, last), head.transformer["layers"]):
        reference.load_state_dict(layer.state_dict())
    future = torch.ones(6, 6).triu(1).bool()
    with torch.no_grad():
        x = first(head.embedding(tokens[None, :-1]), projected, tgt_mask=future)
        x = last.norm1(x + last.self_attn(x, x, x, attn_mask=future)[0])
        weights = last.multihead_attn(x, projected, projected, need_weights=True)[1][0]  # (tokens, 9), mean over heads

    words = virtex.word_attention(head, projected, tokens, ["▁a", "▁sur", "f", "board", "▁rider"])
    assert [word for word, _ in words] == ["a", "surfboard", "rider"]
    for (_, attention), rows in zip(words, ([0], [1, 2, 3], [4])):  # row t predicts token t + 1
        mean = sum(weights[t] for t in rows) / len(rows)
        torch.testing.assert_close(attention, mean.view(3, 3), rtol=0, atol=1e-10)


def test_word_attention_of_a_lone_space_piece():
    """Sec. 4.4: SentencePiece may write a word as "▁" and its letters: one word, the mean of all its maps."""
    model, tokens = tiny_model(), torch.tensor([SOS, 4, 9, 6])  # cut: no [EOS]
    projected = model.textual.project(random_features(1, 5, 2, 2)).detach()
    assert [word for word, _ in virtex.word_attention(model.textual, projected, tokens, ["▁", "a", "b"])] == ["ab"]
    assert virtex.word_attention(model.textual, projected, tokens[:2], []) == []  # [SOS] [EOS]: nothing was said


def test_captioned_photo_shows_each_word_s_own_map(tokenizer, tmp_path, monkeypatch):
    """Sec. 4.4: a word is drawn with its own map, also when the caption holds an unknown token before it."""
    model, said, drawn = tiny_model(150, channels=3, task="captioning").float(), tokenizer.encode("a red square"), {}
    row = torch.tensor([SOS, UNKNOWN, *said, EOS])
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "photo.png")
    monkeypatch.setattr(virtex, "load_virtex", lambda *_: (model, tokenizer, 8))
    monkeypatch.setattr(virtex, "beam_search", lambda *_: (row[None], None))
    monkeypatch.setattr(common, "draw_attention", lambda image, caption, words, path: drawn.update(words))
    args = SimpleNamespace(weights="", tokenizer="", caption=[str(tmp_path / "photo.png")], output=str(tmp_path), beams=5)
    virtex.caption_photos(args, torch.device("cpu"))

    pixels, _ = common.CropView(common.ImageFiles(args.caption), 8, part=1.0)[0]
    projected = model.textual.project(common.augment(torch.from_numpy(pixels[None])))
    expected = dict(virtex.word_attention(model.textual, projected, row, ["▁?", *map(tokenizer.id_to_piece, said)]))
    for word in ("a", "red", "square"):
        torch.testing.assert_close(drawn[word], expected[word])
