"""virtex.py against the paper written out slowly, against torch's own modules, and as it is used.

In most tests the backbone is `FeaturesAsGiven`: what is passed as images are the features.
"""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, FeaturesAsGiven, captioned, metrics, result, run_here
from PIL import Image
from torch import nn

import common
import virtex
from extras import shapes
from virtex import EOS, MASK, PAD, SOS, UNK

ZERO_FLAGS = ROOT / "runs/eval_linear/result.json"

# Different lengths (a batch is padded); unknown tokens, at one of which the first is truncated.
CAPTIONS = [[SOS, 5, UNK], [SOS, 5, UNK, 7, EOS], [SOS, 9, 4, 6, 4, 8, EOS], [SOS, 10, EOS]]
MASKED = [[SOS, 5, MASK], [SOS, 5, UNK, MASK, EOS], [SOS, MASK, 4, 11, MASK, 8, EOS]]
MASKED += [[SOS, MASK, EOS]]
HIDDEN, LAYERS = 128, 2  # the smallest width with several heads


def build_model(channels, *args, **kwargs):
    """VirTex without a backbone"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "build_backbone", lambda *_: FeaturesAsGiven(channels))
        return virtex.VirTex("stub", *args, **kwargs)


def randomise(module):
    """Every parameter random, the gains of norms around 1: whatever is forgotten shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gain = "norm" in name and "weight" in name
            parameter.copy_(0.125 * torch.randn(parameter.shape, generator=generator) + gain)
    return module


def tiny_model(vocab_size=12, channels=5, task="bicaptioning", max_length=10):
    """Two layers per direction in float64, all random, no dropout; counts what it classifies"""
    model = build_model(channels, vocab_size, HIDDEN, LAYERS, max_length=max_length, task=task)
    model.rows = []
    output = model.textual.output if hasattr(model.textual, "project") else model.textual["output"]
    output.register_forward_hook(lambda *passed: model.rows.append(len(passed[-1])))
    return randomise(model.double()).eval()


def random_features(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def batch_of(captions, task="bicaptioning", masked=None):
    """What `collate` makes of these captions, less images and colours: the model's arguments"""
    photo = {"image": np.zeros((1, 1, 3), np.uint8), "jitter": np.zeros(4, np.float32)}
    samples = []
    for n, tokens in enumerate(captions):
        row = masked[n] if masked else None
        samples.append({**photo, "tokens": tokens, "masked": row})
    batch = virtex.collate(task, samples)
    return {name: value for name, value in batch.items() if name not in ("images", "jitter")}


def logits_of(head, image_features, tokens):
    return head.output(head(tokens, image_features))


def torch_layer():
    """A and F are 2 and 512 at H = 128 [Sec. 3: H / 64 and 4 H]."""
    layer = nn.TransformerDecoderLayer(
        128, nhead=2, dim_feedforward=512, activation="gelu", batch_first=True
    )
    return randomise(layer.double()).eval()


def slow_log_p(model, direction, features, tokens):
    """Sec. 3, Textual Head, one caption at a time -> log p(tokens[t] | tokens[:t], I), t = 1, 2 ...

    Unknown tokens are zeros [official code] and no targets [official code].
    """
    w, tokens = model.state_dict(), torch.tensor(tokens)
    words, read, targets = w["textual.embedding.words.weight"], tokens[:-1], tokens[1:]
    projection = w["textual.visual_projection.weight"], w["textual.visual_projection.bias"]
    image = F.linear(features.flatten(1).T, *projection)
    summed = words[read] + w["textual.embedding.positions.weight"][: len(read)]
    name = "textual.embedding.layer_norm"
    x = F.layer_norm(summed, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-8)
    x = x * (read != UNK)[:, None]
    future = torch.ones(len(read), len(read)).triu(1).bool()
    for layer in getattr(model, direction).transformer.layers:  # the direction's own
        reference = torch_layer()
        reference.load_state_dict(layer.state_dict())
        x = reference(x[None], image[None], tgt_mask=future)[0]
    log_p = F.linear(x, words, w["textual.output.bias"]).log_softmax(-1)
    return [log_p[t, target].item() for t, target in enumerate(targets) if target != UNK]


def test_loss_is_equation_1():
    """-log p of each token given those before it, in both directions; here without padding."""
    model, features = tiny_model(), random_features(4, 5, 2, 3)
    losses = model(features, **batch_of(CAPTIONS))
    forward, backward = [], []
    for image, tokens in zip(features, CAPTIONS):
        forward += slow_log_p(model, "textual", image, tokens)
        backward += slow_log_p(model, "backward_textual", image, tokens[::-1])
    assert [len(forward), len(backward)] == [12, 13] == model.rows
    assert losses["forward"].item() == pytest.approx(-np.mean(forward), abs=1e-10)
    assert losses["backward"].item() == pytest.approx(-np.mean(backward), abs=1e-10)

    state = {k: v for k, v in model.state_dict().items() if not k.startswith("backward_")}
    captioner = tiny_model(task="captioning")
    captioner.load_state_dict(state)
    half = captioner(features, **batch_of(CAPTIONS, "captioning"))
    assert half == {"forward": losses["forward"]} and captioner.rows == [12]


def test_weights_at_the_start():
    """Sec. 3: the directions share all but their Transformers, which start alike [official code].
    N(0, 0.02), biases 0 [official code]
    """
    model = build_model(64, 200, hidden=64, layers=2)
    forward, backward = model.textual, model.backward_textual
    assert forward.output.weight is forward.embedding.words.weight
    assert forward.output is backward.output and forward.embedding is backward.embedding
    assert forward.visual_projection is backward.visual_projection
    own = set(forward.transformer.parameters())
    assert own and own.isdisjoint(backward.transformer.parameters())
    pairs = zip(forward.transformer.parameters(), backward.transformer.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not forward.embedding.words.weight[PAD].any()
    for name, value in model.named_parameters():
        if "norm" in name:
            assert (value == float(name.endswith("weight"))).all(), name
        elif "bias" in name:
            assert not value.any(), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(value.mean().item()) < 0.003, name


@pytest.mark.parametrize("task", virtex.TASKS)
def test_parameter_groups(task):
    """Sec. 3: no weight decay on norms and biases in the Transformers; the backbone's own rate."""
    model = virtex.VirTex("resnet18", 12, hidden=64, layers=2, task=task)
    backbone, no_decay = set(model.visual.parameters()), set()
    for head in model.children():
        if isinstance(head, virtex.TextualHead):
            for module in (*head.embedding.modules(), *head.transformer.modules()):
                for name, parameter in module.named_parameters(recurse=False):
                    if isinstance(module, nn.LayerNorm) or "bias" in name:
                        no_decay.add(parameter)
    decay = set(model.parameters()) - backbone - no_decay
    groups = virtex.parameter_groups(model, lr=0.2, text_lr=1e-3, weight_decay=1e-4)
    expected = [(backbone, 0.2, 1e-4), (decay, 1e-3, 1e-4)]
    if task not in virtex.CLASSIFICATION:
        expected.append((no_decay, 1e-3, 0.0))
    found = [(set(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    assert found == expected
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_learning_rates_of_the_paper():
    """Sec. 3: 10K of 500K iterations of linear warm-up to 0.2 and 1e-3, then a cosine to zero"""
    args = virtex.get_args(["--data", "coco"])
    assert (args.batch_size, args.lookahead_k, args.lookahead_alpha) == (256, 5, 0.5)
    assert (args.optimizer, args.max_norm, args.vocab_size) == ("sgd", 10, 10_000)
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


def captions_of(scenes):
    for scene in scenes:
        yield from shapes.describe(shapes.objects_of(scene))


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of 150 tokens from captions of the built-in data, as a file"""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(virtex.train_tokenizer(map(virtex.clean, captions_of(range(200))), 150))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return virtex.read_tokenizer(tokenizer_path)


def one_photo(folder, pixels, *captions):
    """CaptionData of one photo, from an array, with these captions"""
    Image.fromarray(pixels).save(folder / "photo.png")
    return captioned(list(captions), images=[f"{folder}/photo.png"])


def test_subset(coco_folder):
    """Fig. 4: --fraction, --captions-per-image: the right counts; the seed alone decides which."""

    def rows(fraction, number=None, seed=0):
        data = virtex.subset(full, fraction, number, seed)
        return {data.images[i]: (data.captions[i], data.tags[i]) for i in range(len(data))}

    full = common.caption_data("coco", str(coco_folder), "train2017")
    every, half, two = rows(1.0), rows(0.5), rows(1.0, 2)
    assert list(every) == list(two) == list(full.images)
    assert len(half) == 12 and len(rows(0.001)) == 1 and rows(0.25).keys() < half.keys()
    assert half.items() < every.items() and half == rows(0.5) and half != rows(0.5, seed=1)
    assert two != rows(1.0, 2, seed=1)
    assert rows(0.5, 2).items() < two.items()
    for image, (captions, tags) in two.items():
        assert len(captions) == 2 and set(captions) < set(every[image][0])
        assert tags == every[image][1]


def test_flipped_photos_have_flipped_captions(tokenizer, tmp_path):
    """Sec. 3: half of the photos are flipped, and exactly these have left and right swapped."""
    half, flipped = np.zeros((32, 32, 3), np.uint8), 0
    half[:, :16] = 255  # white on the left
    data = one_photo(tmp_path, half, "Left of the bright circle")
    args = virtex.get_args(["--crop-min", "1", "--image-size", "32"])
    photos = virtex.CaptionedPhotos(data, tokenizer, args)
    for seed in range(60):
        sample = photos.sample(0, np.random.default_rng(seed))
        image, words = sample["image"], tokenizer.decode(sample["tokens"])
        white_on_the_left = image[:, :16].mean() > image[:, 16:].mean()
        side = "left" if white_on_the_left else "right"
        assert words == f"{side} of the bright circle"
        flipped += not white_on_the_left
    assert 15 < flipped < 45


def test_long_captions_are_truncated_before_they_are_reversed(tokenizer, tmp_path):
    """Of a long caption both directions see the first 30 tokens; a short one keeps its [EOS]."""
    long, photo = " ".join(captions_of([0])), np.zeros((9, 9, 3), np.uint8)
    args, whole = virtex.get_args([]), [SOS, *tokenizer.encode(long), EOS]
    assert len(whole) > 31
    rows = []
    for captions in ((long, "not the first"), ("a circle", "not the first")):
        data = one_photo(tmp_path, photo, *captions)
        rows.append(virtex.CaptionedPhotos(data, tokenizer, args)[0]["tokens"])
    cut, short = rows
    assert cut == whole[:30] and short == [SOS, *tokenizer.encode("a circle"), EOS]
    padding, batch = [PAD] * (30 - len(short)), batch_of(rows)
    assert batch["tokens"].tolist() == [cut, short + padding]
    assert batch["backward_tokens"].tolist() == [cut[::-1], short[::-1] + padding]


def test_tokens(tokenizer):
    """Ids of the official model; no caption can spell special ones; what was clean stays whole."""
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    assert ids == [1, 2, 3] == [SOS, EOS, MASK]
    assert tokenizer.unk_id() == UNK == PAD == 0 == tokenizer.encode("犬")[-1]
    assert not {SOS, EOS, MASK} & set(tokenizer.encode("a [SOS] circle [EOS] and a [MASK]"))
    for caption in map(virtex.clean, (*captions_of(range(200, 260)), "A Rêd CIRCLE")):
        assert tokenizer.decode(tokenizer.encode(caption)) == caption


def test_mask_tokens():
    """15% of the words, one at least: 85% [MASK], 10% any word, 5% kept [official code]"""
    tokens, rng = [SOS, *range(500, 520), EOS], np.random.default_rng(0)
    draws = np.array([virtex.mask_tokens(tokens, 1000, rng) for _ in range(4000)])
    different, chosen = draws != tokens, 3 * len(draws)
    assert MASK <= draws[different].min() and draws.max() < 1000
    assert (draws == MASK).sum() / chosen == pytest.approx(0.85, abs=0.015)
    assert (different & (draws > MASK)).sum() / chosen == pytest.approx(0.10, abs=0.015)
    assert different.sum(0)[1:-1] == pytest.approx(0.95 * chosen / 20, rel=0.2)  # all alike
    counts = {1: 1, 6: 1, 7: 2, 20: 3, 21: 4, 0: 0}
    for (length, count), end in itertools.product(counts.items(), ([EOS], [])):
        tokens, rng = [SOS, *range(10, 10 + length), *end], np.random.default_rng(0)
        draws = np.array([virtex.mask_tokens(tokens, 1000, rng) for _ in range(200)])
        assert (draws != tokens).sum(1).max() == count
        assert count != 1 or set(draws[draws != tokens].tolist()) == {MASK}  # never kept
        chosen = (draws != tokens).any(0)
        assert chosen.tolist() == [False, *length * [True], *len(end) * [False]]


def test_masked_lm_written_out():
    """Sec. 4.2: cross-entropy at [MASK]s of known words alone; where there are none, 0, not NaN"""
    model, features = tiny_model(task="masked_lm"), random_features(4, 5, 2, 3)
    loss = model(features, **batch_of(CAPTIONS, "masked_lm", MASKED))["masked_lm"]
    terms, head = [], model.textual
    for i, (tokens, masked) in enumerate(zip(CAPTIONS, MASKED)):
        image_features = head.project(features[i : i + 1])
        vectors = head(torch.tensor([masked]), image_features, causal=False)
        log_p = head.output(vectors).log_softmax(-1)[0]
        places = [t for t, token in enumerate(masked) if token == MASK and tokens[t] != UNK]
        terms += [-log_p[t, tokens[t]].item() for t in places]
    assert model.rows[0] == len(terms) == 4
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-10)
    loss = model(features[:1], **batch_of([[SOS, 5]], "masked_lm", [[SOS, 9]]))["masked_lm"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_token_classification_written_out():
    """Sec. 4.2: a linear layer on the grid's mean; each of K words is 1/K of the target."""
    model, features = tiny_model(task="token_classification"), random_features(6, 5, 2, 3)
    captions = [*CAPTIONS, [SOS, UNK, EOS], [SOS, 4, 11, MASK]]
    loss = model(features, **batch_of(captions, "token_classification"))["token_classification"]
    output, total = model.textual["output"], 0.0
    for grid, caption in zip(features, captions):
        pooled = sum(grid[:, i, j] for i in range(2) for j in range(3)) / 6
        log_p = (output.weight @ pooled + output.bias).log_softmax(0)
        words = set(caption) - {UNK, SOS, EOS, MASK}
        total -= sum(log_p[word].item() / len(words) for word in words)
    assert loss.item() == pytest.approx(total / 6, abs=1e-6)


@pytest.mark.parametrize("task", virtex.TASKS)
def test_every_task_learns_its_captions(task, tiny, tmp_path, monkeypatch):
    """24 pictures by heart: the loss falls by half a nat, and validation knows its terms."""
    monkeypatch.setitem(virtex.RECIPES, "zero_residual", 3 * (False,))  # slower at first
    flags = "--iters", 60, "--crop-min", 0.9, "--validate-every", 20
    run_here(tiny("virtex", tmp_path, "--task", task, *flags))
    rows = metrics(tmp_path)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
    factors = [common.lr_factor(n, 60, warmup=0.02) for n in range(60)]
    assert [row["lr"] / 0.05 for row in rows] == pytest.approx(factors, rel=1e-5)
    terms = result(tmp_path)["validation_loss"].keys()
    assert terms and terms < rows[0].keys()
    validated = {row["iteration"] for row in rows if any(f"validation_{t}" in row for t in terms)}
    assert validated == {20, 40} and {f"validation_{term}" for term in terms} < rows[19].keys()


@pytest.mark.skipif(not ZERO_FLAGS.exists(), reason="README's first command, as .ci/run does")
def test_learns_on_shapes():
    """README's first command: twenty points of mAP between the two lines of its table"""
    backbones = json.loads(ZERO_FLAGS.read_text())["backbones"]
    trained, random = (backbones[x]["mean"]["mAP"] for x in ("runs/virtex/backbone.pth", "random"))
    assert trained > random + 20
