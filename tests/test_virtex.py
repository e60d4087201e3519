"""virtex.py against the paper written out slowly, against torch's own modules, and as it is used.

In most tests the backbone is `FeaturesAsGiven`: what is passed as images are the features.
"""

import itertools
import json
import math

import numpy as np
import pytest
import sentencepiece
import torch
import torchvision
from conftest import CPU, ROOT, FeaturesAsGiven, captioned, checkpoint_in, metrics, one_split
from conftest import photos_at, random_weights, result, run_here
from PIL import Image
from torch import nn

import common
import virtex
from extras import shapes
from virtex import EOS, MASK, PAD, SOS, UNK

ZERO_FLAGS = ROOT / "runs/eval_linear/shapes-svm-virtex/result.json"

# Different lengths (a batch is padded); unknown tokens, at one of which the first is truncated.
CAPTIONS = [[SOS, 5, UNK], [SOS, 5, UNK, 7, EOS], [SOS, 9, 4, 6, 4, 8, EOS], [SOS, 10, EOS]]
MASKED = [[SOS, 5, MASK], [SOS, 5, UNK, MASK, EOS], [SOS, MASK, 4, 11, MASK, 8, EOS]]
MASKED += [[SOS, MASK, EOS]]
HIDDEN, LAYERS = 128, 2  # the smallest width with several heads


def tiny_model(task="bicaptioning", max_length=10):
    """Two layers per direction in float64, all random, no dropout; counts what it classifies"""
    torch.manual_seed(0)
    sizes = 12, HIDDEN, LAYERS
    model = virtex.MODELS[task][0](FeaturesAsGiven(5), *sizes, max_length=max_length, task=task)
    model.rows = []
    output = model.textual.output if hasattr(model, "text_losses") else model.textual["output"]
    output.register_forward_hook(lambda *passed: model.rows.append(len(passed[-1])))
    return random_weights(model.double(), 0.125).eval()


def random_features(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def losses_of(model, features, captions, task="bicaptioning", masked=None):
    """The means of the losses of these captions, batched as in training"""
    texts = [*zip(captions, masked or captions)] if task == "masked_lm" else captions
    batch = virtex.MODELS[task][1].collate_text(None, texts)
    return {name: total / n for name, (total, n) in model(features, batch).items()}


def logits_of(head, image_features, tokens):
    return head.output(head(tokens, image_features))


class OfficialHead(nn.Module):
    """Sec. 3, Textual Head: torch's own decoder under the names of github.com/kdexd/virtex

    A and F are H / 64 and 4 H; unknown tokens are zeros [official code].
    """

    def __init__(self, channels=5, vocab_size=12, max_length=10):
        super().__init__()
        self.visual_projection = nn.Linear(channels, HIDDEN)
        self.embedding = nn.Module()
        self.embedding.words = nn.Embedding(vocab_size, HIDDEN, padding_idx=0)
        self.embedding.positions = nn.Embedding(max_length, HIDDEN)
        self.embedding.layer_norm = nn.LayerNorm(HIDDEN, eps=1e-8)
        layer = nn.TransformerDecoderLayer(HIDDEN, 2, 512, activation="gelu", batch_first=True)
        self.transformer = nn.TransformerDecoder(layer, LAYERS)
        self.output = nn.Linear(HIDDEN, vocab_size)
        self.output.weight = self.embedding.words.weight

    def forward(self, features, tokens):
        image = self.visual_projection(features.flatten(2).permute(0, 2, 1))
        positions = self.embedding.positions(torch.arange(tokens.size(1)))
        x = self.embedding.layer_norm(self.embedding.words(tokens) + positions)
        x = x * (tokens != UNK).unsqueeze(-1)
        future = torch.ones(tokens.size(1), tokens.size(1)).triu(1).bool()
        return self.output(self.transformer(x, image, tgt_mask=future))


def slow_log_p(head, image, tokens):
    """One caption -> log p(tokens[t] | tokens[:t], I), t = 1, 2 ... but of unknown tokens"""
    official, tokens = OfficialHead().double().eval(), torch.tensor(tokens)
    official.load_state_dict(head.state_dict())
    log_p = official(image[None], tokens[None, :-1])[0].log_softmax(-1)
    return [log_p[t, target].item() for t, target in enumerate(tokens[1:]) if target != UNK]


def test_loss_is_equation_1():
    """-log p of each token given those before it, in both directions; here without padding."""
    model, features = tiny_model(), random_features(4, 5, 2, 3)
    losses = losses_of(model, features, CAPTIONS)
    forward, backward = [], []
    for image, tokens in zip(features, CAPTIONS):
        forward += slow_log_p(model.textual, image, tokens)
        backward += slow_log_p(model.backward_textual, image, tokens[::-1])
    assert [len(forward), len(backward)] == [12, 13] and model.rows == [14, 14]  # no padding
    assert losses["forward"].item() == pytest.approx(-np.mean(forward), abs=1e-10)
    assert losses["backward"].item() == pytest.approx(-np.mean(backward), abs=1e-10)

    state = {k: v for k, v in model.state_dict().items() if not k.startswith("backward_")}
    captioner = tiny_model(task="captioning")
    captioner.load_state_dict(state)
    half = losses_of(captioner, features, CAPTIONS, "captioning")
    assert half == {"forward": losses["forward"]} and captioner.rows == [14]


def test_words_from_the_image_alone():
    """lambda_words * -log p(c_t | I), of known tokens, whatever their order"""
    model, features = tiny_model(), random_features(4, 5, 2, 3)
    eq1, model.lambda_words = losses_of(model, features, CAPTIONS), 0.5
    losses, log_p = losses_of(model, features, CAPTIONS), []
    for image, tokens in zip(features, CAPTIONS):
        vectors = model.textual.visual_projection(image.flatten(1).T)  # of six places
        p = model.textual.output(sum(vectors) / 6).softmax(0)
        log_p += [math.log(p[token].item()) for token in tokens[1:] if token != UNK]
    assert losses.pop("words").item() == pytest.approx(0.5 * -np.mean(log_p), abs=1e-10)
    assert losses == eq1


def test_weights_at_the_start():
    """Sec. 3: the directions share all but their Transformers, which start alike [official code].
    N(0, 0.02) [official code], biases 0 [ours]
    """
    model = virtex.VirTex(FeaturesAsGiven(64), 200, hidden=64, layers=2)
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
    model = virtex.MODELS[task][0](FeaturesAsGiven(5), 12, hidden=64, layers=2, task=task)
    model.visual["cnn"].weight = nn.Parameter(torch.zeros(3))
    backbone, no_decay = set(model.visual.parameters()), set()
    for head in (head for head in model.children() if isinstance(head, virtex.TextualHead)):
        for module in (*head.embedding.modules(), *head.transformer.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, nn.LayerNorm) or "bias" in name:
                    no_decay.add(parameter)
    decay = set(model.parameters()) - backbone - no_decay
    groups = virtex.parameter_groups(model, text_lr=1e-3)
    groups = torch.optim.SGD(groups, lr=0.2, weight_decay=1e-4).param_groups
    expected = [(backbone, 0.2, 1e-4), (decay, 1e-3, 1e-4), (no_decay, 1e-3, 0.0)]
    found = [(set(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    assert found == expected
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert bool(no_decay) == ("classification" not in task)


@torch.no_grad()
def test_loss_at_the_start():
    """As the docstring says, at the paper's size but with small photos of noise: the backbone
    that starts with identities has larger features, and so a higher loss.
    """
    torch.manual_seed(0)
    backbone = common.build_backbone("resnet50", zero_init_residual=True)
    model = virtex.VirTex(backbone, 10_000, 2048)  # with dropout, as in training
    frequencies = 1 / torch.arange(1.0, 9997)
    words = 4 + torch.multinomial(frequencies, 4 * 12, replacement=True).view(4, 12)
    batch = virtex.CaptionedPhotos.collate_text(None, [[SOS, *row, EOS] for row in words.tolist()])
    images = torch.randn(4, 3, 64, 64)

    def loss():
        total, number = model(images, batch)["forward"]
        return total / number

    assert 14 < loss() < 16
    for module in backbone.modules():
        if isinstance(module, torchvision.models.resnet.Bottleneck):
            nn.init.ones_(module.bn3.weight)
    assert 10.5 < loss() < 13.5


def captions_of(scenes):
    for scene in scenes:
        yield from shapes.describe(shapes.objects_of(scene))


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of 150 tokens from captions of the built-in data, as a file"""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(virtex.train_tokenizer([*captions_of(range(200))], 150))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))


def test_a_step_is_clipped(tiny, tmp_path, monkeypatch):
    """All weights, at a norm of 10; the loss is both directions', of a part of the photos."""
    norms, clip = [], nn.utils.clip_grad_norm_

    def record(weights, norm):
        norms.append((len(weights), norm))
        return clip(weights, norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", record)
    printed = run_here(tiny("virtex", tmp_path, "--iters", 2, "--fraction", 0.5))
    assert printed.startswith("12 photos to learn from, 12 to check; ")
    for row in metrics(tmp_path):
        assert row["loss"] == pytest.approx(row["forward"] + row["backward"], rel=1e-5)
    assert norms == 2 * [(len(checkpoint_in(tmp_path)["optimizer"]["state"]), 10.0)]


def test_subset(coco_folder):
    """Fig. 4: --fraction, --captions-per-image: the right counts; the seed alone decides which."""

    def rows(fraction, number=None, seed=0):
        data = virtex.subset(full, fraction, number, seed)
        return {data.images[i]: (data.captions[i], data.tags[i]) for i in range(len(data))}

    full = one_split("coco", str(coco_folder), "train2017")
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
    Image.fromarray(half).save(tmp_path / "photo.png")
    data = captioned(["Left of the bright circle"], images=photos_at(tmp_path / "photo.png"))
    args = virtex.get_args(["--crop-min", "1", "--image-size", "32"])
    photos = virtex.CaptionedPhotos(data, tokenizer, args)
    for seed in range(60):
        sample = photos.sample(0, np.random.default_rng(seed))
        image, words = sample["image"].float(), tokenizer.decode(sample["text"])
        white_on_the_left = image[:, :16].mean() > image[:, 16:].mean()
        side = "left" if white_on_the_left else "right"
        assert words == f"{side} of the bright circle"
        flipped += not white_on_the_left
    assert 15 < flipped < 45


def test_each_epoch_reads_one_of_a_photo_s_captions(tokenizer, coco_folder):
    """Any of them, drawn anew; in validation always the same"""
    captions = ["a circle", "a square", "a star"]
    data = captioned(captions, images=photos_at(next((coco_folder / "val2017").iterdir())))
    photos = virtex.CaptionedPhotos(data, tokenizer, virtex.get_args([]))
    read = [tokenizer.decode(photos[0, epoch, 0]["text"]) for epoch in range(60)]
    assert min(read.count(caption) for caption in captions) > 10
    assert {tokenizer.decode(photos[0]["text"]) for _ in range(9)} == {captions[0]}


def test_long_captions_are_truncated_before_they_are_reversed(tokenizer, coco_folder):
    """Of a long caption both directions see the first 30 tokens; a short one keeps its [EOS]."""
    long, paths = " ".join(captions_of([0])), sorted((coco_folder / "val2017").iterdir())
    rows = [long, "another"], ["another", "a circle"]  # validation takes index % 2
    data = captioned(*rows, images=photos_at(*paths[:2]))
    photos = virtex.CaptionedPhotos(data, tokenizer, virtex.get_args([]))
    whole, rows = [SOS, *tokenizer.encode(long), EOS], [photos[n]["text"] for n in (0, 1)]
    cut, short = rows
    assert len(whole) > 31 and cut == whole[:30]
    assert short == [SOS, *tokenizer.encode("a circle"), EOS]
    batch = photos.collate_text(rows)
    padding = [PAD] * (30 - len(short))
    assert batch["tokens"].tolist() == [cut, short + padding]
    assert batch["backward_tokens"].tolist() == [cut[::-1], short[::-1] + padding]
    assert batch["places"].tolist() == [*range(29), *range(29, 29 + len(short) - 1)]


def test_captions_that_are_cut_are_counted(tokenizer_path, capsys, tmp_path):
    """One line at the start, if they are more than 1%"""
    args = virtex.get_args(["--output", str(tmp_path)])
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    for caption, said in ("a circle", False), (40 * "a circle ", True):
        virtex.load_tokenizer(args, captioned(["a circle"], [caption]))
        assert ("50% of the captions are cut at 28 tokens" in capsys.readouterr().out) == said


def test_tokens(tokenizer):
    """Ids of the official model; no caption can spell special ones; what was clean stays whole."""
    ids = [tokenizer.piece_to_id(piece) for piece in ("[SOS]", "[EOS]", "[MASK]")]
    assert ids == [1, 2, 3] == [SOS, EOS, MASK]
    assert tokenizer.unk_id() == UNK == PAD == 0 == tokenizer.encode("犬")[-1]
    assert not {SOS, EOS, MASK} & set(tokenizer.encode("a [SOS] circle [EOS] and a [MASK]"))
    for caption in map(virtex.normalise, (*captions_of(range(200, 260)), "A Rêd CIRCLE")):
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
    loss = losses_of(model, features, CAPTIONS, "masked_lm", MASKED)["masked_lm"]
    terms, head = [], model.textual
    for i, (tokens, masked) in enumerate(zip(CAPTIONS, MASKED)):
        image_features = head.project(features[i : i + 1])
        vectors = head.transformer(head.embedding(torch.tensor([masked])), image_features)
        log_p = head.output(vectors).log_softmax(-1)[0]
        places = [t for t, token in enumerate(masked) if token == MASK and tokens[t] != UNK]
        terms += [-log_p[t, tokens[t]].item() for t in places]
    assert model.rows[0] == 5 and len(terms) == 4
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-10)
    loss = losses_of(model, features[:1], [[SOS, 5]], "masked_lm", [[SOS, 9]])["masked_lm"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_token_classification_written_out():
    """Sec. 4.2: a linear layer on the grid's mean; each of K words is 1/K of the target."""
    model, features = tiny_model(task="token_classification"), random_features(6, 5, 2, 3)
    captions = [*CAPTIONS, [SOS, UNK, EOS], [SOS, 4, 11, MASK]]
    loss = losses_of(model, features, captions, "token_classification")["token_classification"]
    output, total = model.textual["output"], 0.0
    for grid, caption in zip(features, captions):
        pooled = sum(grid[:, i, j] for i in range(2) for j in range(3)) / 6
        log_p = (output.weight @ pooled + output.bias).log_softmax(0)
        words = set(caption) - {UNK, SOS, EOS, MASK}
        total -= sum(log_p[word].item() / len(words) for word in words)
    assert loss.item() == pytest.approx(total / 6, abs=1e-6)


def test_tags_follow_the_special_tokens(tokenizer, coco_folder):
    """The tags of a photo are 4, 5, 6...; photos without tags are left out."""
    paths = photos_at(*sorted((coco_folder / "val2017").iterdir())[:3])
    tags = {"tags": [["dog", "cat"], [], ["cow"]], "tag_names": ["cat", "cow", "dog"]}
    data = captioned(["a"], ["b"], ["c"], images=paths, **tags)
    photos = virtex.TaggedPhotos(data, tokenizer, virtex.get_args([]))
    assert [photos[n]["text"] for n in range(len(photos))] == [[6, 4], [5]]
    assert photos.num_outputs == 7


@pytest.mark.parametrize("task", ("captioning", "token_classification"))
def test_what_a_model_is_for(task, tiny, tmp_path):
    """Only a model that writes captions names the program for them in its last line."""
    output = run_here(tiny("virtex", tmp_path, "--iters", 1, "--task", task))
    assert ("python -m downstream.captioning" in output) == (task == "captioning")


def test_tags_are_mirrored_with_the_photo(tokenizer, coco_folder):
    path = next((coco_folder / "val2017").iterdir())
    names = ["turn_left", "cat", "turn_right"]
    data = captioned(["a"], images=photos_at(path), tags=[["turn_left", "cat"]], tag_names=names)
    photos = virtex.TaggedPhotos(data, tokenizer, virtex.get_args([]))
    seen = [photos.sample(0, np.random.default_rng(n))["text"] for n in range(20)]
    assert seen.count([4, 5]) + seen.count([6, 5]) == 20 and 5 < seen.count([6, 5]) < 15


def test_validation_is_the_mean_over_tokens(tokenizer, coco_folder):
    """Of all photos, each alone, without dropout; unknown tokens do not count."""
    data = one_split("coco", str(coco_folder), "val2017").select(range(5))
    data.captions = common.lists([["a circle 犬"], ["a"], ["犬"], ["a large red square"], ["a star"]])
    args = virtex.get_args("--image-size 32 --workers 0 --amp off".split())
    photos = virtex.CaptionedPhotos(data, tokenizer, args)
    sizes = photos.num_outputs, 64, 1, 0.5
    model = random_weights(virtex.VirTex(FeaturesAsGiven(3), *sizes), 0.1).train()
    found = virtex.validate(model, photos, args, CPU)["validation"]
    model.eval()
    terms = {"forward": [], "backward": []}
    for photo in (photos[n] for n in range(5)):
        image = common.augment(photo["image"][None])
        for name, tokens in ("forward", photo["text"]), ("backward", photo["text"][::-1]):
            head = model.textual if name == "forward" else model.backward_textual
            logits = logits_of(head, head.project(image), torch.tensor([tokens[:-1]]))
            log_p = logits[0].log_softmax(-1)
            terms[name] += [-log_p[t, x].item() for t, x in enumerate(tokens[1:]) if x != UNK]
    assert found == {name: pytest.approx(np.mean(row), rel=1e-5) for name, row in terms.items()}


@pytest.mark.parametrize("task", virtex.TASKS)
def test_every_task_learns_its_captions(task, tiny, tmp_path):
    """24 pictures by heart: the loss falls by half a nat, and validation knows its terms."""
    flags = "--iters", 90, "--crop-min", 0.9, "--no-zero-residual"  # slower at first
    run_here(tiny("virtex", tmp_path, "--task", task, *flags))
    rows = metrics(tmp_path)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
    terms = result(tmp_path)["validation"].keys()
    assert terms and terms < rows[0].keys()


def test_a_network_without_batch_norm(tiny, few_scenes, tmp_path):
    """Our ConvNeXt [ours] trains, has torchvision's names, and is measured by eval_linear.py."""
    run_here(tiny("virtex", tmp_path / "run", "--arch", "convnext_tiny", "--iters", 1))
    weights = tmp_path / "run/backbone.pth"
    names = torch.load(weights, weights_only=True).keys()
    assert "features.0.0.weight" in names and not any("classifier" in name for name in names)
    few_scenes(60, 30)
    flags = "--workers", 0, "--output", tmp_path / "probe"
    assert "mAP" in run_here(["eval_linear.py", "--weights", weights, *flags])


@pytest.mark.skipif(not ZERO_FLAGS.exists(), reason="README's first command, as .ci/run does")
def test_learns_on_shapes():
    """README's first command: twenty points of mAP between the two lines of its table"""
    backbones = json.loads(ZERO_FLAGS.read_text())["backbones"]
    trained, random = (backbones[x]["mean"]["mAP"] for x in ("runs/virtex/backbone.pth", "random"))
    assert trained > random + 20
