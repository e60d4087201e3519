"""mmcontrastive.py against the paper written out in loops, piece by piece, and as it is used."""

import json
import math
import shutil
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from conftest import (
    ALONE,
    CPU,
    OWN,
    TINY,
    checkpoint_in,
    files_in,
    finished,
    fork,
    in_two_processes,
    interrupted,
    metrics,
    refusal,
    result,
    run_here,
    run_script,
)
from PIL import Image
from torch import nn

import common
import language
import mmcontrastive


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


# ------------------------------------------------------------------- the losses, written in loops


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def log_p(query, key, own, others, tau):
    """The logarithm in Eqs. 3, 5 and 8, of one key among the own one and those of the queue"""
    total = sum(math.exp(dot(query, other) / tau) for other in [own, *others])
    return math.log(math.exp(dot(query, key) / tau) / total)


def eq5(query, own, others, tau, tags, other_tags, epsilon):
    """Eq. 5; its positives are the own key and those of Eq. 4"""
    positives = [own]
    for key, theirs in zip(others, other_tags):
        if dot(tags, theirs) > epsilon:
            positives.append(key)
    return -sum(log_p(query, key, own, others, tau) for key in positives) / len(positives)


def eq11(query, own, others, margin):
    """Eqs. 11 and 14"""
    return sum(max(margin - dot(query, own) + dot(query, key), 0) for key in others)


def literal_losses(queries, keys, given, tags, captioned, tau, margin, epsilon):
    """Means over the batch.  given: {loss: the keys in its queue}, and the tags in theirs"""
    sums, other_tags = dict.fromkeys(mmcontrastive.LOSSES, 0.0), given["tag"].tolist()
    for n, own_tags in enumerate(tags.tolist()):
        rows = {}
        for name, query in queries.items():
            rows[name] = query[n].tolist(), keys[name][n].tolist(), given[name].tolist()
        query, own, others = rows["ii"]
        sums["ii"] -= log_p(query, own, own, others, tau)  # Eq. 3
        if any(own_tags):
            sums["tag"] += eq5(query, own, others, tau, own_tags, other_tags, epsilon)
        if captioned[n]:
            query, own, others = rows["cc"]
            sums["cc"] -= log_p(query, own, own, others, tau)  # Eq. 8
            sums["ic"] += eq11(*rows["ic"], margin)
            sums["ci"] += eq11(*rows["ci"], margin)
    return {name: total / len(tags) for name, total in sums.items()}


TAU, MARGIN, EPSILON = 0.07, 0.2, 2
DIMS = {"ii": 5, "cc": 4, "ic": 6, "ci": 6}


def units(*shape):
    """Random vectors of length one in float64"""
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def queue_with(rows, size):
    """A queue that has been given `rows`; its other slots hold what would be near to everything"""
    queue = mmcontrastive.Queue(size, rows.size(1)).double()
    queue.keys += 3
    for row in rows:
        queue.enqueue(row[None], torch.ones(1, dtype=torch.bool))
    return queue


def tag_lists(dense):
    """(N, tags) of zeros and ones -> (N, T), the numbers of each row's tags from 1, then zeros"""
    rows = [1 + row.nonzero().flatten() for row in dense]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def dense_tags(lists, number):
    """The other way round"""
    return torch.zeros(len(lists), 1 + number).scatter_(1, lists, 1)[:, 1:]


def tag_queue_with(dense, size):
    """likewise: a queue of photos with these rows of zeros and ones"""
    queue = mmcontrastive.TagQueue(size, dense.size(1), most=dense.size(1)).double()
    queue.keys += torch.arange(dense.size(1)) + 1  # all tags, where nothing was filled in
    for row in queue.padded(tag_lists(dense)) if len(dense) else ():
        queue.enqueue(row[None], torch.ones(1, dtype=torch.bool))
    return queue


def random_batch(filled, size=12, batch=6):
    """Six photos, some without tags or captions; queues of 12 keys that were `given` so many"""
    b = SimpleNamespace(captioned=torch.tensor([1, 0, 1, 1, 0, 1]).bool())
    b.queries = {name: units(batch, dim) for name, dim in DIMS.items()}
    b.keys = {name: units(batch, dim) for name, dim in DIMS.items()}
    b.given = {name: units(filled, dim) for name, dim in DIMS.items()}
    b.tags = (torch.rand(batch, 5) < 0.7).double()
    b.tags[[1, 4]] = 0
    b.given["tag"] = (torch.rand(filled, 5) < 0.7).double()
    b.given["tag"][::3] = 0
    b.queues = {name: queue_with(b.given[name], size) for name in DIMS}
    b.queues["tag"] = tag_queue_with(b.given["tag"], size)
    return b


def losses_of(b):
    batch = b.queries, b.keys, b.queues, tag_lists(b.tags), b.captioned
    return mmcontrastive.contrastive_losses(*batch, TAU, MARGIN, EPSILON)


@pytest.mark.parametrize("filled", (0, 1, 7, 12))
def test_losses_are_those_of_the_paper(filled):
    """Eqs. 3, 5, 8, 11, 14, the queues empty, partly filled and full; gradients are finite."""
    b = random_batch(filled)
    for query in b.queries.values():
        query.requires_grad_()
    found = losses_of(b)
    batch = b.queries, b.keys, b.given, b.tags, b.captioned
    wanted = literal_losses(*batch, TAU, MARGIN, EPSILON)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].item() == pytest.approx(value, abs=1e-12)
    if filled > 1:
        assert min(wanted.values()) > 0.1 and abs(wanted["tag"] - wanted["ii"]) > 0.01
    sum(found.values()).backward()
    for name, query in b.queries.items():
        assert query.grad.isfinite().all()
        assert (query.grad.abs().amax() > 1e-3) == bool(filled)
        assert name == "ii" or not query.grad[~b.captioned].any()


def test_losses_whose_data_are_missing():
    """No caption in the batch: three losses are 0. No caption encoder, no queue of tags: fewer."""
    b = random_batch(7)
    b.captioned[:] = False
    losses = losses_of(b)
    assert losses["cc"] == losses["ic"] == losses["ci"] == 0 < losses["ii"]
    b.queries = {"ii": b.queries["ii"]}
    assert losses_of(b).keys() == {"ii", "tag"}
    del b.queues["tag"]
    assert losses_of(b).keys() == {"ii"}


# ----------------------------------------------------------------------------------------- queues


@pytest.mark.parametrize("batch", (3, 7))
def test_queue_holds_the_last_keys(batch):
    """First in, first out; invalid keys leave no gap; K = 7 is one batch, or no multiple of it."""
    queue, given = mmcontrastive.Queue(7, 2), []
    for step in range(12):
        keys, valid = torch.rand(batch, 2), torch.rand(batch) < 0.7
        valid &= torch.tensor(step != 4)
        given += keys[valid].tolist()
        queue.enqueue(keys, valid)
        assert queue.total == len(given) and queue.filled.sum() == min(len(given), 7)
        for n in range(max(0, len(given) - 7), len(given)):
            assert queue.filled[n % 7] and queue.keys[n % 7].tolist() == given[n]


def test_common_tags_are_those_of_dense_rows():
    """t_p . t_j of Eq. 4 by matrix product: equal numbers, from less memory than rows of 18,157"""
    dense = (torch.rand(40, 300) < 0.05).float()
    dense[::7] = 0
    queue, tags = mmcontrastive.TagQueue(24, 300, most=40), tag_lists(dense)
    queue.enqueue(queue.padded(tags[:16]), torch.ones(16, dtype=torch.bool))
    queue.enqueue(queue.padded(tags[16:32]), torch.arange(16) < 12)
    held = torch.cat([dense[24:28], dense[4:24]])
    found = queue.common_tags(tags[24:])
    assert torch.equal(found, dense[24:] @ held.T) and found.max() > 8
    again = mmcontrastive.TagQueue(24, 300, most=40)
    again.load_state_dict(queue.state_dict())
    assert torch.equal(again.common_tags(tags[24:]), found)


# --------------------------------------------------------------------------------------- encoders


BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 24, "vocab_size": 30, "pad_token_id": 0}


def tiny_model(unified=False, groups=1):
    """Three tags, K = 12, spaces of 6 (intra) and 4 (inter) dimensions, no dropout"""
    import transformers

    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**BERT, **dropout)
    dims = {"intra": 6, "inter": 6 if unified else 4}
    losses = mmcontrastive.LOSSES
    encoders = mmcontrastive.build_encoders("resnet18", config, losses, dims, 16, unified)
    sizes = {"image": 12, "caption": 12}
    return mmcontrastive.MultimodalContrastive(encoders, (3, 3), sizes, groups)


def randomise_queries(model):
    """Part the query encoders from the momentum encoders."""
    with torch.no_grad():
        for parameter in model.queries.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return model


def tiny_batch(step=0):
    """Eight photos -> images, (tokens, visible), tags, captioned"""
    torch.manual_seed(100 + step)
    images, tokens = torch.randn(8, 3, 64, 64), torch.randint(30, (8, 5))
    visible = torch.rand(8, 5) < 0.7
    visible[:, 0] = True
    tags = tag_lists(torch.rand(8, 3) < 0.5)
    return images, (tokens, visible), tags, torch.rand(8) < 0.6


def by_hand(encoders, photos, captions):
    """Features, linear, ReLU, linear, and to length one -> {(modality, space): vectors}"""
    features = {
        "image": encoders["image"].trunk[0](photos).mean((2, 3)),
        "caption": encoders["caption"].trunk(*captions),
    }
    vectors = {}
    for modality, feature in features.items():
        for space in ("intra", "inter"):
            first, _, last = encoders[modality].mlps[space]
            hidden = (feature @ first.weight.T + first.bias).clamp(min=0)
            output = hidden @ last.weight.T + last.bias
            vectors[modality, space] = output / output.pow(2).sum(1, keepdim=True).sqrt()
    return vectors


@torch.no_grad()
@pytest.mark.parametrize("training, groups", ((False, 4), (True, 1)))
def test_queries_and_keys_are_those_of_their_equations(training, groups):
    """Which encoder, modality and MLP each comes from; keys stand in the order of the photos."""
    model = randomise_queries(tiny_model(groups=groups)).train(training)
    photos, captions, _, _ = tiny_batch()
    query, key = by_hand(model.queries, photos, captions), by_hand(model.keys, photos, captions)
    wanted_queries = {
        "ii": query["image", "intra"],  # Eq. 1
        "cc": query["caption", "intra"],  # Eq. 6
        "ic": query["image", "inter"],  # Eq. 9
        "ci": query["caption", "inter"],  # Eq. 12
    }
    wanted_keys = {
        "ii": key["image", "intra"],  # Eq. 2
        "cc": key["caption", "intra"],  # Eq. 7
        "ic": key["caption", "inter"],  # Eq. 10
        "ci": key["image", "inter"],  # Eq. 13
    }
    close(model(photos, captions), wanted_queries, 1e-4)
    for seed in (0, 1):
        close(model.encode_keys(photos, captions, seed, ALONE), wanted_keys, 1e-4)


@torch.no_grad()
def test_groups_have_batch_statistics_of_their_own():
    """Shuffled batch norm: each photo's query and key are those of its group of two, alone."""
    model, plain, (photos, _, _, _) = tiny_model(groups=4), tiny_model(), tiny_batch()
    order = np.random.default_rng(5).permutation(8).tolist()
    keys, whole = model.encode_keys(photos, None, 5, ALONE), plain.keys["image"](photos)
    for start in range(0, 8, 2):
        group = order[start : start + 2]
        alone = plain.keys["image"](photos[group])
        close(keys["ii"][group], alone["intra"], 1e-5)
        close(keys["ci"][group], alone["inter"], 1e-5)
    with torch.enable_grad():
        queries = model(photos, None)
    for start in range(0, 8, 2):  # the queries' groups are not drawn [public code of MoCo]
        alone = plain.queries["image"](photos[start : start + 2])
        close(queries["ii"][start : start + 2], alone["intra"], 1e-5)
    assert (keys["ii"] - whole["intra"]).abs().max() > 0.01
    running = dict(model.queries.named_buffers()), dict(plain.queries.named_buffers())
    assert running[0].keys() == running[1].keys()  # checkpoints are the same with and without


@pytest.mark.parametrize("m", (0.0, 0.3, 0.999, 1.0))
def test_momentum_update(m):
    """Sec. 3.1: theta_k <- m theta_k + (1 - m) theta_q; theta_q stays as it is."""
    model = randomise_queries(tiny_model(unified=True).double())
    queries = [p.detach().clone() for p in model.queries.parameters()]
    before = [p.detach().clone() for p in model.keys.parameters()]
    mmcontrastive.update_momentum(model.queries, model.keys, m)
    close(list(model.queries.parameters()), queries, 0)
    wanted = [m * key + (1 - m) * query for key, query in zip(before, queries)]
    close(list(model.keys.parameters()), wanted, 1e-14)


def three_batches(model, world):
    """Momentum encoders and queues meet three batches, of which each process has its share

    -> the keys of each batch
    """
    found = []
    for step in range(3):
        photos, captions, tags, captioned = tiny_batch(step)
        mine = torch.arange(8).chunk(world.size)[world.rank]
        share = [part[mine] for part in captions]
        keys = model.encode_keys(photos[mine], share, (7, step), world)
        widest = int((tags[mine] > 0).sum(1).max())  # each process pads to its own
        model.enqueue(keys, tags[mine, :widest], captioned[mine], world)
        found.append(keys)
    return found


def save_three_batches(folder):
    world = common.start()
    model = tiny_model(groups=2 // world.size)
    keys = three_batches(model, world)
    torch.save([keys, dict(model.queues.state_dict())], folder / f"{world.rank} of {world.size}")
    common.end_processes(world)


def test_two_processes_hold_what_one_does(tmp_path):
    """The keys of the whole batch, and the same queues as one process with --bn-splits 2 has"""
    in_two_processes(save_three_batches, tmp_path)
    model = tiny_model(groups=2)
    keys = three_batches(model, ALONE)
    wanted = [keys, dict(model.queues.state_dict())]
    for name in ("0 of 2", "1 of 2"):
        close(torch.load(tmp_path / name, weights_only=True), wanted)
    assert model.queues["ii"].total == 24 > model.queues["ic"].total > 12


@pytest.mark.parametrize("kind", ("Bert", "Roberta", "DistilBert", "Electra"))
def test_caption_trunk_is_the_pooled_output(kind):
    """Sec. 4.1: the pooler's, or the first token's where there is none; padding is hidden.

    It computes in single precision, although the model was published in half.
    """
    import transformers

    config = getattr(transformers, f"{kind}Config")(**BERT, dtype=torch.float16)
    trunk = mmcontrastive.CaptionTrunk(config).eval()
    tokens, lengths = torch.randint(2, 30, (3, 7)), torch.tensor([7, 4, 1])
    visible = torch.arange(7) < lengths[:, None]
    with torch.no_grad():
        found = trunk(tokens.masked_fill(~visible, 0), visible)
        for row, length, vector in zip(tokens, lengths, found):
            output = trunk.bert(input_ids=row[None, :length])
            pooled = kind in ("Bert", "Roberta")
            close(vector, output.pooler_output[0] if pooled else output.last_hidden_state[0, 0])
    assert {p.dtype for p in trunk.parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------ views


def test_blur_is_a_gaussian_convolution():
    """torchvision's, each image by its own sigma; at the border nothing gets darker."""
    images, sigma = torch.rand(4, 3, 41, 37), torch.tensor([0.4, 1.1, 2.0, 0.0])
    blurred = mmcontrastive.blur(images, sigma)
    inside = ..., slice(12, -12), slice(12, -12)
    for image, found, width in zip(images[:3], blurred, sigma.tolist()):
        close(found[inside], TF.gaussian_blur(image, 23, width)[inside])
        assert (found - image).abs().max() > 0.05
    assert torch.equal(blurred[3], images[3])
    flat = torch.full((4, 3, 41, 37), 0.3)
    close(mmcontrastive.blur(flat, sigma), flat, 1e-6)


def test_blur_in_bf16():
    """About a grey level is lost, which the convolution behind it rounds away anyway."""
    photo = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    batch = {"image": photo, "jitter": torch.from_numpy(np.stack([common.NO_JITTER] * 3))}
    batch["sigma"] = torch.tensor([0.0, 0.7, 2.0])
    exact, _ = mmcontrastive.view(batch)
    rounded, _ = mmcontrastive.view(batch, "bf16")
    assert exact.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    assert torch.equal(rounded[0], exact[0].bfloat16())
    assert 0 < (rounded - exact).abs().max() < 0.02  # a grey level is 0.017


@pytest.fixture
def two_photos(tmp_path):
    """One with three captions and two tags, and one with nothing; unlike their mirror images"""
    data = common.CaptionData(common.ImageFiles(), ["dog", "tree", "sky"])
    captions = ["the dog left of a bright tree", "a tree right of it", "a dog"]
    for n, row in enumerate(((captions, [0, 2]), ([], []))):
        pixels = np.random.default_rng(n).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        data.add(str(tmp_path / f"{n}.png"), *row)
    return data


def samples_of(data, **flags):
    """The samples of a run with these flags; without any nothing but mirroring is random"""
    plain = {"colour_jitter": 0.0, "greyscale": 0.0, "blur": 0.0, "caption_views": "sibling"}
    args = SimpleNamespace(**{"image_size": 24, "crop_min": 1.0, **plain, **flags})
    return common.Samples(partial(mmcontrastive.sample, data, [], args), len(data))


def test_left_and_right_follow_the_photo_that_a_caption_meets(two_photos):
    """The query photo meets the key's caption, the key photo the query's (Eqs. 9 to 13)."""
    data = common.CaptionData(common.ImageFiles(), ["dog"])
    data.add(two_photos.images[0], ["a dog left of a tree"])
    samples, straight = samples_of(data), np.array(Image.open(data.images[0]))
    captions = {False: "a dog left of a tree", True: "a dog right of a tree"}
    seen = set()
    for epoch in range(40):
        q, k = samples[epoch, 0]["q"], samples[epoch, 0]["k"]
        mirrored_q = np.array_equal(q["image"], straight[:, ::-1])
        mirrored_k = np.array_equal(k["image"], straight[:, ::-1])
        assert mirrored_q or np.array_equal(q["image"], straight)
        assert (q["caption"], k["caption"]) == (captions[mirrored_k], captions[mirrored_q])
        seen.add((mirrored_q, mirrored_k))
    assert len(seen) == 4


def test_caption_views(two_photos):
    """The same caption twice, two of the photo, or one and its back-translation by either way."""
    captions, rng = list(two_photos.captions), np.random.default_rng(0)
    translations = []
    for by in ("fr", "de"):
        before = 3 * ["of another photo"]
        own = [f"{by} {caption}" for caption in captions]
        translations.append(common.PackedStrings([*before, *own]))

    def pairs(kind, data=two_photos, index=0, given=()):
        views = partial(mmcontrastive.caption_views, data, index, kind, given, rng)
        return {views() for _ in range(120)}

    assert pairs("same") == {(caption, caption) for caption in captions}
    assert pairs("sibling") == {(a, b) for a in captions for b in captions if a != b}
    translated = {(caption, f"{by} {caption}") for caption in captions for by in ("fr", "de")}
    second = two_photos.select([0, 0]), 1
    assert pairs("backtranslation", *second, translations) == translated
    one = two_photos.select([0], captions_per_image=1)
    assert pairs("sibling", one) == {(one.captions[0], one.captions[0])}
    assert pairs("sibling", index=1) == {("", "")}


def test_photo_views(two_photos):
    """Two crops and colours of their own, which depend on seed, epoch and index alone."""
    samples = samples_of(two_photos, crop_min=0.2, colour_jitter=1.0)
    drawn = [samples[epoch, 0] for epoch in range(30)]
    assert not any(np.array_equal(s["q"]["image"], s["k"]["image"]) for s in drawn)
    assert sum(np.array_equal(s["q"]["jitter"], s["k"]["jitter"]) for s in drawn) < 10
    assert all(s["q"]["jitter"][2] > 0 and s["q"]["sigma"] == 0 for s in drawn)
    for name in ("q", "k"):
        again = samples[7, 0][name]
        assert all(np.array_equal(again[part], drawn[7][name][part]) for part in again)


def batch_of(samples, number):
    return mmcontrastive.collate(None, [samples[epoch, 0] for epoch in range(number)])


@pytest.mark.parametrize("name", ("q", "k"))
def test_greyscale_and_blur(name, two_photos):
    """All views at a share of 1, some between; sigma is MoCo-v2's, whose images have 224 pixels."""
    batch = batch_of(samples_of(two_photos, colour_jitter=1.0, greyscale=1.0, blur=1.0), 40)
    mean, std = torch.tensor([common.IMAGENET_MEAN, common.IMAGENET_STD])[..., None, None]
    images = common.augment(batch[name]["image"], batch[name]["jitter"]) * std + mean
    assert (images.amax(1) - images.amin(1)).max() < 1e-5 and images.std() > 0.1
    sigma = batch[name]["sigma"] * 224 / 24
    assert 0.1 < sigma.min() < 0.5 and 1.6 < sigma.max() < 2

    batch = batch_of(samples_of(two_photos, greyscale=0.2, blur=0.5), 250)
    assert 0.12 < (batch[name]["jitter"][:, 2] == 0).float().mean() < 0.28
    assert 0.4 < (batch[name]["sigma"] > 0).float().mean() < 0.6


def test_batches(two_photos, tiny_lm):
    """Both views of photos and captions, tags, and which photos have captions"""
    tokenizer, _ = mmcontrastive.read_caption_model(tiny_lm)
    samples = samples_of(two_photos, colour_jitter=1.0, blur=1.0)
    rows = [samples[0, 0], samples[0, 1]]
    batch = mmcontrastive.collate(tokenizer, rows)
    assert batch["tags"].tolist() == [[1, 3], [0, 0]]
    assert batch["captioned"].tolist() == [True, False] and batch["unreadable"] == []
    for name in ("q", "k"):
        images, (tokens, visible) = mmcontrastive.view(batch[name])
        for n, row in enumerate(rows):
            parts = [row[name][part][None].copy() for part in ("image", "jitter", "sigma")]
            image, jitter, sigma = map(torch.from_numpy, parts)
            close(images[n], mmcontrastive.blur(common.augment(image, jitter), sigma)[0])
            assert tokens[n][visible[n]].tolist() == tokenizer(row[name]["caption"])["input_ids"]
    assert rows[0]["q"]["caption"] != rows[0]["k"]["caption"]
    two_photos.tag_names = None
    del two_photos.tags[:]
    two_photos.first_tag[1] = two_photos.first_tag[2] = 0
    batch = batch_of(samples_of(two_photos), 2)
    assert batch["tags"].shape == (2, 0) and mmcontrastive.view(batch["q"])[1] is None


# -------------------------------------------------------------------------------------- retrieval


def mean_rank(right, wrong):
    """By sorting; equal similarities share the mean of their places"""
    order = sorted([right, *wrong], reverse=True)
    places = [place for place, value in enumerate(order, 1) if value == right]
    return sum(places) / len(places)


def literal_scores(similarity, image_of_caption):
    """Tab. 7: an image's rank is that of its best caption"""
    to_text, to_image = [], []
    for i, row in enumerate(similarity):
        own = [value for value, image in zip(row, image_of_caption) if image == i]
        others = [value for value, image in zip(row, image_of_caption) if image != i]
        to_text.append(mean_rank(max(own), others))
    for column, image in zip(zip(*similarity), image_of_caption):
        to_image.append(mean_rank(column[image], column[:image] + column[image + 1 :]))
    scores = {}
    for way, ranks in (("image to text", to_text), ("text to image", to_image)):
        found = {f"R@{k}": 100 * sum(r <= k for r in ranks) / len(ranks) for k in (1, 5, 10)}
        scores[way] = {**found, "median rank": np.median(ranks)}
    return scores


def assert_same_scores(found, wanted):
    assert found.keys() == wanted.keys()
    for way, scores in wanted.items():
        assert found[way] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("levels", (1000, 6), ids=("few ties", "many ties"))
def test_retrieval_scores_are_those_of_a_sort(levels):
    """R@K and median rank both ways; images with one to four captions"""
    owners = torch.arange(14).repeat_interleave(torch.tensor([1, 3, 2, 1, 4, 1, 2] * 2))
    similarity = torch.randint(levels, (14, 28)).float()
    similarity[owners, torch.arange(28)] += 0.35 * levels // 1  # better than chance
    found = mmcontrastive.retrieval_scores(similarity, owners)
    assert_same_scores(found, literal_scores(similarity.tolist(), owners.tolist()))
    assert 0 < found["text to image"]["R@1"] < found["text to image"]["R@5"] < 100


def test_useless_vectors_get_no_credit():
    """Everything alike, or not a number: the ranks are those in the middle."""
    owners, alike = torch.arange(20).repeat_interleave(5), torch.full((20, 100), 0.7)
    scores = mmcontrastive.retrieval_scores(alike, owners)
    assert_same_scores(scores, literal_scores(alike.tolist(), owners.tolist()))
    assert scores["image to text"]["R@10"] == scores["text to image"]["R@10"] == 0
    assert mmcontrastive.retrieval_scores(alike * math.nan, owners) == scores


# ------------------------------------------------------------ photos, and the losses they allow


def some_data(*rows):
    """rows: (captions, tags) of each photo"""
    data = common.CaptionData(common.ImageFiles(), ["dog", "cat"])
    for n, (captions, tags) in enumerate(rows):
        data.add(f"{n}.jpg", captions, tags)
    return data


MIXED = (["a dog"], [0]), ([], [1]), (["a cat"], [])
ALL = dict.fromkeys(mmcontrastive.LOSSES, 1.0)
ANNOTATED = SimpleNamespace(tags="annotated", tags_required=False)
REQUIRED = SimpleNamespace(tags="annotated", tags_required=True)


def test_photos_without_captions(capsys):
    """Sec. 3.2, end: they stay while a loss within photos is left for them."""
    data = some_data(*MIXED)
    for off in ({}, {"ii": 0.0}, {"tag": 0.0}):
        assert mmcontrastive.photos_with_losses(data, ALL | off, ANNOTATED)[0] is data
    kept, _ = mmcontrastive.photos_with_losses(data, ALL | {"ii": 0.0, "tag": 0.0}, ANNOTATED)
    assert list(kept.images) == ["0.jpg", "2.jpg"] and list(kept.captions) == ["a dog", "a cat"]
    assert "1 photos without a caption are left out" in capsys.readouterr().out


def test_nouns_as_tags(tmp_path, monkeypatch):
    """Sec. 4.4: the most frequent nouns of the captions, in place of annotated tags; found once"""
    data = some_data((["a red dog runs", "the dog"], [1]), ([], [0]), (["a cat sees a dog"], []))
    for _ in range(2):
        tagged = mmcontrastive.tagged_by_nouns(data, tmp_path, 2)
        assert tagged.tag_names == ["dog", "cat"] and list(tagged.images) == list(data.images)
        assert [tagged.tags_of(i) for i in range(3)] == [[0], [], [0, 1]]
        assert list(tagged.captions) == list(data.captions)
        monkeypatch.setattr(mmcontrastive.language, "count_concepts", None)


def test_tag_loss_without_tags(capsys):
    """Eq. 5 is left out, with a line; not when the user asks for it or nothing else is left."""
    tagged, untagged = some_data(*MIXED), some_data((["a"], []), ([], []))
    assert mmcontrastive.photos_with_losses(tagged, ALL | {"tag": 0.3}, REQUIRED)[1] == 0.3
    assert mmcontrastive.photos_with_losses(untagged, ALL | {"tag": 0.0}, REQUIRED)[1] == 0
    assert capsys.readouterr().out == ""
    for off in ({}, {"ii": 0.0}, {"ic": 0.0, "ci": 0.0}):
        assert mmcontrastive.photos_with_losses(untagged, ALL | off, ANNOTATED)[1] == 0
        assert "no photo has tags: the loss of Eq. 5 is left out" in capsys.readouterr().out
    nothing_else = ALL | {"ii": 0.0, "ic": 0.0, "ci": 0.0}
    for weights, flags in ((ALL, REQUIRED), (nothing_else, ANNOTATED)):
        with pytest.raises(SystemExit, match="--lambda-tag wants tags and no photo has any"):
            mmcontrastive.photos_with_losses(untagged, weights, flags)


def test_queues_that_fit(capsys):
    """A multiple of the batch, and no more keys than there are photos, or captioned photos"""
    data = some_data(*MIXED)  # three photos, two of them with captions
    assert mmcontrastive.fit_queues(2, data, True, 2) == {"image": 2, "caption": 2}
    assert capsys.readouterr().out == ""
    assert mmcontrastive.fit_queues(50, data, False, 1) == {"image": 3}
    assert mmcontrastive.fit_queues(50, data, True, 1) == {"image": 3, "caption": 2}
    assert "queues of 2 caption keys instead of 50" in capsys.readouterr().out
    assert mmcontrastive.fit_queues(3, data, False, 2) == {"image": 2}
    with pytest.raises(SystemExit, match="2 photos with a caption are fewer than a batch of 3"):
        mmcontrastive.fit_queues(3, data, True, 3)


# --------------------------------------------------------------------------------------- training


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


EASY = [
    *("--image-size", 64, "--crop-min", 0.9, "--colour-jitter", 0, "--greyscale", 0, "--blur", 0),
    *("--caption-views", "same", "--queue", 8, "--momentum", 0.99, "--mlp-hidden", 64),
    *("--lr", 0.003, "--text-lr", 0.03, "--tag-threshold", 0, "--lambda-tag", 0.1),
    *("--lambda-ic", 1, "--lambda-ci", 0.9, "--iters", 50),
]


@pytest.fixture(scope="module")
def trained(coco_folder, tiny_lm, tmp_path_factory):
    """The folder of a run that has learned to tell 24 scenes apart: few keys, similar views"""
    folder = tmp_path_factory.mktemp("trained")
    data = "--data", "coco", "--root", coco_folder, "--output", folder
    run_here(["mmcontrastive.py", *data, *TINY, *OWN["mmcontrastive"], "--lm", tiny_lm, *EASY])
    return folder


def test_learns_to_tell_scenes_apart(trained):
    """The losses begin at 0, with empty queues, rise, and fall again: Eq. 3 well below chance.

    backbone.pth is the query encoder's.
    """
    rows = metrics(trained)
    losses = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    assert losses["ii"][0] == losses["cc"][0] == pytest.approx(0, abs=1e-6)
    assert losses["ic"][0] == 0 < losses["ic"][1]
    assert losses["ii"][-12:].mean() < math.log(9) - 0.3  # ln 9: all of the 9 keys are alike
    # The words of tiny_lm are numbered differently every time: measured were 0.56 and 0.70.
    assert losses["cc"][-12:].mean() < 0.85 * losses["cc"][1:6].mean()
    state = checkpoint_in(trained)["model"]
    for name, value in torch.load(trained / "backbone.pth", weights_only=True).items():
        assert torch.equal(value, state[f"queries.image.trunk.0.{name}"])


@torch.no_grad()
def vectors_of(folder, paths, captions):
    """Photos and captions in their common space, one at a time"""
    checkpoint = folder / "checkpoint.pth"
    encoders, tokenizer, flags = mmcontrastive.load_query_encoders(checkpoint)
    photos, texts, images = [], [], common.ImageFiles(paths)
    for n in range(len(images)):
        crops = [common.centre_crop(1.0)]
        [pixels] = common.read_crops(images, n, crops, flags["image_size"])
        photos.append(encoders["image"](common.augment(torch.tensor(pixels[None])))["inter"])
    for caption in captions:
        tokens = torch.tensor([tokenizer(caption)["input_ids"]])
        texts.append(encoders["caption"](tokens, torch.ones_like(tokens).bool())["inter"])
    return torch.cat(photos), torch.cat(texts)


def test_retrieval_of_the_validation_split(trained, coco_folder):
    """Tab. 7, from vectors of the checkpoint's encoders made one by one; its baseline is chance"""
    found = result(trained)["retrieval"]
    data = common.caption_data("coco", str(coco_folder), "val2017")
    photos, captions = vectors_of(trained, data.images, data.captions)
    owners = [n for n in range(12) for _ in range(5)]
    assert (found["images"], found["captions"]) == (12, 60)
    assert_same_scores(found["trained"], literal_scores((photos @ captions.T).tolist(), owners))
    chance = found["random"]["text to image"]["R@5"]
    assert chance == pytest.approx(100 * 5 / 12, abs=20) and found["trained"] != found["random"]


def test_a_step_written_out(coco_folder, tmp_path):
    """From the state after three steps to the losses, keys and queues of the fourth

    The data is a .jsonl in which captions, tags or both are missing on some lines.
    """
    run, path, rows = tmp_path / "run", tmp_path / "photos.jsonl", []
    for split in ("train", "val"):
        data = common.caption_data("coco", str(coco_folder), f"{split}2017")
        for n, image in enumerate(data.images):
            row = {"image": image, "split": split}
            if n % 3:
                row["captions"] = data.captions_of(n)[: 1 + n % 4]
            if n % 4:
                row["tags"] = [data.tag_names[tag] for tag in data.tags_of(n)]
            rows.append(row)
    write_rows(path, rows)
    command = ["mmcontrastive.py", "--data", path, "--recipe", "paper", "--output", run]
    command += [*TINY, *OWN["mmcontrastive"], "--seed", 3, "--iters", 4, "--tag-threshold", 0]
    command += ["--lambda-tag", 0.3, "--lambda-cc", 0.7, "--queue", 24, "--retrieval-images", 5]
    with interrupted(common, "append_line", call=4):
        run_here([*command, "--checkpoint-every", 3])
    old = checkpoint_in(run)["model"]
    run_here(command)
    new, row = checkpoint_in(run)["model"], metrics(run)[-1]
    args = mmcontrastive.get_args(list(map(str, command[1:])))

    train = common.caption_data(args.data, None, "train")
    tokenizer, config = mmcontrastive.read_caption_model(run / "caption_model")
    losses, dims = mmcontrastive.LOSSES, {"intra": 16, "inter": 24}
    encoders = mmcontrastive.build_encoders("resnet18", config, losses, dims, hidden=32)
    sizes = {"image": 24, "caption": 16}  # 16 of the 24 photos have a caption
    most = int(np.diff(train.first_tag).max())
    tag_sizes = len(train.tag_names), most
    model = mmcontrastive.MultimodalContrastive(encoders, tag_sizes, sizes, groups=2)
    model.load_state_dict(old)
    model.to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for name, key in model.keys.named_parameters():
            query = old[f"queries.{name}"]
            key.copy_(0.9 * old[f"keys.{name}"] + (1 - 0.9) * query)
            torch.testing.assert_close(new[f"keys.{name}"], key.detach(), rtol=1e-5, atol=1e-7)
            assert not torch.equal(new[f"queries.{name}"], query)

    make = partial(mmcontrastive.sample, train, [], args)
    samples = common.Samples(make, len(train), seed=3)
    order = np.random.default_rng([3, 1]).permutation(24)  # of epoch 1: three batches are one
    drawn = [samples[1, int(n)] for n in order[:8]]
    batch = mmcontrastive.collate(tokenizer, drawn)
    tags, captioned = batch["tags"], batch["captioned"]
    assert not captioned.all() and not tags.any(1).all()
    torch.manual_seed((3 << 40) + 4)  # dropout
    with torch.no_grad():
        queries = model(*mmcontrastive.view(batch["q"]))
        keys = model.encode_keys(*mmcontrastive.view(batch["k"]), (3, 4), ALONE)

    given = {name: old[f"queues.{name}.keys"] for name in (*keys, "tag")}
    assert all(old[f"queues.{name}.total"] >= 16 for name in given)  # the queues are full
    given["tag"] = dense_tags(given["tag"], len(train.tag_names))
    dense = dense_tags(tags, len(train.tag_names))
    wanted = literal_losses(queries, keys, given, dense, captioned, 0.07, 0.2, 0)
    for name, value in wanted.items():
        assert row[name] == pytest.approx(value, rel=1e-3)
    total = wanted["ii"] + 0.3 * wanted["tag"] + 0.7 * wanted["cc"]
    total += 0.1 * wanted["ic"] + 0.05 * wanted["ci"]  # Eq. 15
    assert row["loss"] == pytest.approx(total, rel=1e-3)

    # 24 photos and 16 captions were there before: the oldest give way.
    close(new["queues.ii.keys"][:8], keys["ii"], 1e-4)
    close(new["queues.ii.keys"][8:], old["queues.ii.keys"][8:], 0)
    close(dense_tags(new["queues.tag.keys"][:8], len(train.tag_names)), dense, 0)
    number = int(captioned.sum())
    close(new["queues.ic.keys"][:number], keys["ic"][captioned], 1e-4)
    assert new["queues.ic.total"] == 16 + number
    found = result(run)["retrieval"]
    assert found["images"] == 5 <= found["captions"] <= 20  # of the eight with captions


def queues_in(state):
    return {name.split(".")[1] for name in state if name.startswith("queues.")}


MOCO = ["--lambda-cc", 0, "--lambda-ic", 0, "--lambda-ci", 0, "--lambda-tag", 0]


def test_moco_v2_reads_no_captions(tiny, tmp_path):
    """No caption encoder is built or written, no language model looked for; one loss is left."""
    flags = ["--iters", 3, "--lm", "no/such/folder", "--caption-views", "backtranslation"]
    output = run_here(tiny("mmcontrastive", tmp_path, *MOCO, *flags))
    state = checkpoint_in(tmp_path)["model"]
    assert "caption_model" not in files_in(tmp_path)
    assert not any("caption" in name or "inter" in name for name in state)
    assert queues_in(state) == {"ii"}
    for row in metrics(tmp_path):
        assert row["loss"] == row["ii"] and not {"tag", "cc", "ic", "ci"} & row.keys()
    assert "retrieval among" not in output and "no photo has tags" not in output


def test_between_the_modalities_alone(tiny, tmp_path):
    """The baseline of Tab. 7: one MLP per encoder, two queues, two losses; counted in epochs"""
    flags = ["--lambda-ii", 0, "--lambda-cc", 0, "--lambda-tag", 0]
    output = run_here(tiny("mmcontrastive", tmp_path, *flags, "--epochs", 1.3))
    rows, state = metrics(tmp_path), checkpoint_in(tmp_path)["model"]
    assert len(rows) == 4
    for row in rows:
        assert not {"ii", "tag", "cc"} & row.keys()
        assert row["loss"] == pytest.approx(0.1 * row["ic"] + 0.05 * row["ci"], rel=1e-4)
    assert not any("intra" in name for name in state) and queues_in(state) == {"ic", "ci"}
    assert "retrieval among 12 photos, trained: image to text R@1" in output


def test_unified_mlps_on_vgg16(tiny, tmp_path):
    """Sec. 4.4: each encoder's two MLPs are one; Eq. 5 does without Eq. 3."""
    flags = ["--unified-mlp", "--inter-dim", 16, "--arch", "vgg16", "--lambda-ii", 0]
    flags += ["--iters", 2, "--lr", 0.001, "--lambda-tag", 1, "--retrieval-images", 3]
    run_here(tiny("mmcontrastive", tmp_path, *flags))
    state, row = checkpoint_in(tmp_path)["model"], metrics(tmp_path)[-1]
    intra = [name for name in state if ".mlps.intra." in name]
    assert len(intra) == 2 * 2 * 4  # queries and keys; photos and captions; tensors of an MLP
    for name in intra:
        assert torch.equal(state[name], state[name.replace("intra", "inter")])
    total = row["tag"] + row["cc"] + 0.1 * row["ic"] + 0.05 * row["ci"]
    assert row["loss"] == pytest.approx(total, rel=1e-4)
    assert result(tmp_path)["retrieval"]["images"] == 3


def test_pretrained_caption_encoder(tiny, tiny_lm, tmp_path):
    """--lm FOLDER: both encoders begin with its weights; m = 1 keeps the momentum encoder there.

    The run goes on elsewhere, without that folder, and with a flag that repeats its default.
    """
    from safetensors.torch import load_file

    lm, first, second = tmp_path / "lm", tmp_path / "first", tmp_path / "second"
    shutil.copytree(tiny_lm, lm)
    flags = ["--lm", lm, "--momentum", 1, "--iters", 4]
    with interrupted(common, "append_line", call=3):
        run_here(tiny("mmcontrastive", first, *flags, "--checkpoint-every", 2))
    state, given = checkpoint_in(first)["model"], load_file(lm / "model.safetensors")
    names = [name for name in given if name.startswith("bert.")]
    assert len(names) > 10
    assert all(torch.equal(state[f"keys.caption.trunk.{name}"], given[name]) for name in names)
    words = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(state[f"queries.caption.trunk.{words}"], given[words])
    assert not list((first / "caption_model").glob("*.safetensors"))

    shutil.rmtree(lm)
    first.rename(second)
    output = run_here(tiny("mmcontrastive", second, *flags, "--lambda-tag", 1))
    assert "going on from iteration 2" in output and len(metrics(second)) == 4


def test_caption_encoder_that_first_learns_masked_words(tiny, tmp_path):
    """--lm-iters: both encoders of both processes begin with a small BERT of the captions.

    It has the sizes of --lm scratch, and a run that goes on does not need it.
    """
    flags = ["--lm-iters", 3, "--momentum", 1, "--text-lr", 1e-9, "--dropout", 0.2, "--iters", 4]
    command = tiny("mmcontrastive", tmp_path, *flags, "--checkpoint-every", 2)
    in_two_processes(run_here, command)
    folder, state = tmp_path / "language_model", checkpoint_in(tmp_path)["model"]
    _, lm = language.language_model(str(folder), CPU)
    assert lm.config.num_hidden_layers == 1 and lm.config.hidden_size == 64
    for name, value in lm.bert.state_dict().items():
        assert torch.equal(state[f"keys.caption.trunk.bert.{name}"], value)
        close(state[f"queries.caption.trunk.bert.{name}"], value, 1e-6)
    config = json.loads((tmp_path / "caption_model" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.2

    shutil.rmtree(tmp_path)
    with interrupted(common, "append_line", call=3):
        output = run_here(command)
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path.parent / "cache")
    output = run_here(command)
    assert "going on from iteration 2" in output and "small BERT" not in output


# ----------------------------------------------------------------------------------------- search


def search(weights, output, *texts):
    """The command; flags may follow the texts"""
    files = "--weights", weights, "--output", output, "--amp", "off", "--workers", 0
    return ["mmcontrastive.py", *files, "--search", *texts]


def test_search(trained, coco_folder, tmp_path):
    """The nearest photos of a folder to each text, in a picture; others' files and broken photos
    are passed over."""
    texts, folder = ["a red circle", "two blue squares left of a star"], tmp_path / "photos"
    shutil.copytree(coco_folder / "val2017", folder / "deep" / "er")
    paths = sorted(map(str, folder.rglob("*.jpg")))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (folder / "notes.txt").write_text("no photo")
    command = search(trained / "checkpoint.pth", tmp_path, *texts, "--root", folder)
    lines = run_here(command).splitlines()

    photos, captions = vectors_of(trained, paths, texts)
    order = (captions @ photos.T).argsort(1, descending=True)[:, :10].tolist()
    wanted = [f"cannot decode {folder / 'broken.jpg'}: left out"]
    for text, row in zip(texts, order):
        wanted.append(f"{text}: {', '.join(paths[n] for n in row[:3])}, ...")
    path = tmp_path / "search.png"
    assert lines == [*wanted, f"the ten nearest of 12 photos to each text are in {path}"]

    thumbnails = [np.asarray(Image.open(path).resize((128, 128)), np.float32) for path in paths]
    picture = Image.open(path)
    assert picture.size == (8 + 10 * 136, 8 + 2 * 176)
    for row in (0, 1):
        for column, n in enumerate(order[row]):
            x, y = 8 + column * 136, 8 + row * 176 + 22  # below the text, without the scores
            found = np.asarray(picture.crop((x, y, x + 128, y + 128)), np.float32)
            apart = [np.abs(found - thumbnail).mean() for thumbnail in thumbnails]
            assert int(np.argmin(apart)) == n and apart[n] < 12


def test_search_refuses(trained, coco_folder, tmp_path):
    """What cannot be searched in or with: one line each, and no picture"""
    bad, none, found = tmp_path / "bad", tmp_path / "none", tmp_path / "found"
    bad.mkdir()
    (bad / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    own, content = trained / "checkpoint.pth", checkpoint_in(trained)
    torch.save({"script": "virtex", "model": {}}, tmp_path / "other.pth")
    content["args"]["lambda_ic"] = 0.0
    torch.save(content, tmp_path / "blind.pth")
    shutil.copy(own, tmp_path / "alone.pth")
    for weights, root, message in [
        (own, none, f"--root {none} holds no photo"),
        (own, bad, "none of the 1 photos can be decoded"),
        (trained / "backbone.pth", coco_folder, "is no checkpoint.pth of mmcontrastive.py"),
        (tmp_path / "other.pth", coco_folder, "is no checkpoint.pth of mmcontrastive.py"),
        (tmp_path / "blind.pth", coco_folder, "photos and captions share no space in it"),
        (tmp_path / "alone.pth", coco_folder, f"{tmp_path / 'caption_model'}: no such folder"),
    ]:
        assert message in refusal(search(weights, found, "a dog", "--root", root))
    assert not found.exists()
    assert "ten nearest of 12 photos" in run_here(search(own, found, "a dog"))  # of its val split


# ------------------------------------------------------------------------------- back-translation


@pytest.fixture(scope="module")
def translators(tiny_lm, tmp_path_factory):
    """The pattern of the folders of four MarianMT models of one layer, with random weights

    Their tokenizer is that of `tiny_lm`.
    """
    import transformers

    folder = tmp_path_factory.mktemp("marian")
    tokenizer, _ = mmcontrastive.read_caption_model(tiny_lm)
    pad, end = tokenizer.pad_token_id, tokenizer.sep_token_id
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
    tokens |= {"vocab_size": len(tokenizer), "forced_eos_token_id": end}
    sizes = {"d_model": 16, "max_position_embeddings": 160, "init_std": 0.5}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    for n, pair in enumerate(("en-fr", "fr-en", "en-de", "de-en")):
        torch.manual_seed(n)
        config = transformers.MarianConfig(**tokens, **sizes)
        transformers.MarianMTModel(config).save_pretrained(folder / pair)
        tokenizer.save_pretrained(folder / pair)
    return str(folder / "{}-{}")


def translated(pattern, text, *languages):
    """By MarianMT greedily, one caption at a time, from language to language"""
    import transformers

    for pair in zip(languages, languages[1:]):
        name = pattern.format(*pair)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.MarianMTModel.from_pretrained(name).eval()
        settings = {"num_beams": 1, "do_sample": False, "max_new_tokens": 128}
        inputs = tokenizer(text, truncation=True, return_tensors="pt")
        tokens = model.generate(**inputs, **settings)
        text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return text


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_backtranslate_and_train_on_it(tiny, translators, coco_folder, tmp_path, monkeypatch):
    """Killed half-way and started again it has every caption once, both ways; training reads it."""
    run = tmp_path / "run"
    path = run / "backtranslations.jsonl"
    flags = ["--caption-views", "backtranslation", "--iters", 3]
    command = tiny("mmcontrastive", run, *flags)
    write = [*command, "--backtranslate", "--translator", translators]
    assert "have no back-translation in" in refusal(command)

    process = fork(run_here, write)
    while not (path.exists() and path.stat().st_size):
        assert process.is_alive(), "it ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.join()
    captions = set(common.caption_data("coco", str(coco_folder), "train2017").captions)
    done = rows_of(path)
    assert 0 < len(done) < len(captions)
    done[0]["fr"] = "not made again"
    write_rows(path, done)
    with open(path, "a") as file:
        file.write('{"caption": "half a li')

    left = f"{len(done)} captions are in {path} already, {len(captions) - len(done)} to translate"
    assert left in run_here(write)
    rows = rows_of(path)
    assert rows[: len(done)] == done and len(rows) == len(captions)
    assert {row["caption"] for row in rows} == captions
    for pivot in ("fr", "de"):
        alone = [translated(translators, row["caption"], "en", pivot, "en") for row in rows[-6:]]
        equal = [row[pivot] == text for row, text in zip(rows[-6:], alone)]
        assert sum(equal) >= 4  # in a padded batch a close decision may round to another word
    assert any(row["fr"] != row["de"] for row in rows[1:])
    assert "0 to translate" in run_here(write) and rows_of(path) == rows
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        assert "start it without torchrun" in refusal(write)

    run_here(command)
    assert len(metrics(run)) == 3
    other = tmp_path / "other"
    run_here(tiny("mmcontrastive", other, *flags, "--backtranslations", path))
    assert [row["cc"] for row in metrics(other)] == [row["cc"] for row in metrics(run)]
    (run / "result.json").unlink()
    write_rows(path, [{**row, "fr": "another"} for row in rows])
    assert "holds a run on other captions" in refusal(command)


def row_of(n):
    return {"caption": f"caption {n}", "fr": f"français {n}", "de": f"deutsch {n}"}


@pytest.mark.parametrize("last", (json.dumps(row_of(2))[:20], json.dumps(row_of(3))))
def test_back_translations_of_a_killed_run(last, tmp_path):
    """Without a line's end at the end: half a line does not count, a whole one does."""
    path = tmp_path / "translations.jsonl"
    write_rows(path, map(row_of, range(3)))
    with open(path, "a") as file:
        file.write(last)
    number = 4 if last.endswith("}") else 3
    wanted = {f"caption {n}": row_of(n) for n in range(number)}
    assert mmcontrastive.read_translations(path) == wanted
    args = SimpleNamespace(caption_views="backtranslation", backtranslations=path)
    french, german = mmcontrastive.read_backtranslations(args, ["caption 2", "caption 0"])
    assert list(french) == ["français 2", "français 0"]
    assert list(german) == ["deutsch 2", "deutsch 0"]
    with pytest.raises(SystemExit, match="1 of 2 captions have no back-translation in"):
        mmcontrastive.read_backtranslations(args, ["caption 1", "caption 4"])
    assert mmcontrastive.read_translations(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize(
    "line",
    (b"{}", b"nonsense", b'["caption"]', b'{"caption": "a", "fr": "b", "de": 3}', b"\xff\xfe"),
)
def test_back_translations_that_are_none(line, tmp_path):
    path, good = tmp_path / "translations.jsonl", json.dumps(row_of(0)).encode()
    path.write_bytes(b"\n".join([good, line, good, b""]))
    with pytest.raises(SystemExit, match="translations.jsonl, line 2: expected"):
        mmcontrastive.read_translations(path)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("processes, batch_size, splits", ((16, 16, 16), (3, 24, 8)))
def test_groups_and_processes_that_do_not_fit(processes, batch_size, splits, monkeypatch):
    """Every process has as many groups of batch norm; with more processes than groups, one."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    message = f"--bn-splits {splits} groups of two or more over {processes} processes"
    assert message in refusal(["mmcontrastive.py", "--data", "coco", "--batch-size", batch_size])
    assert mmcontrastive.get_args(["--data", "coco", "--batch-size", "96", "--bn-splits", "6"])


def test_models_that_are_none(tiny, tiny_lm, tmp_path):
    """A folder without a model, a tokenizer without padding, translators that are not there"""
    empty, unpadded = tmp_path / "empty", tmp_path / "unpadded"
    empty.mkdir()
    tokenizer, config = mmcontrastive.read_caption_model(tiny_lm)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(unpadded)
    config.save_pretrained(unpadded)
    translator = ["--backtranslate", "--translator", f"{tmp_path}/{{}}-{{}}"]
    for flags, message in [
        (["--lm", empty], f"--lm {empty} cannot be loaded"),
        (["--lm", unpadded], "the tokenizer of --lm has no token for padding"),
        (translator, f"--translator {tmp_path}/en-fr: no such folder"),
    ]:
        assert message in refusal(tiny("mmcontrastive", tmp_path / "run", *flags))


# --------------------------------------------------------------------------------------- it learns


def test_learns_on_shapes(tmp_path):
    """A quarter of the run without flags, at 48 px: captions find photos and back; the backbone
    beats a random one.
    """
    flags = "--iters", 130, "--image-size", 48, "--probe-images", 1000
    finished(run_script("mmcontrastive.py", *flags, "--output", tmp_path))
    found, probe = result(tmp_path)["retrieval"], result(tmp_path)["probe"]
    for way, scores in found["trained"].items():
        assert scores["R@10"] > 10 * found["random"][way]["R@10"]
        assert scores["median rank"] < 100
    assert probe["trained"] > probe["random"] + 4
