"""mmcontrastive.py, piece by piece, against the paper written out slowly: losses, queues, momentum encoders, views, retrieval.

Everything here runs in this process on tiny sizes, but for one pair of gloo processes that do what one process does; the
script as a user starts it is tested elsewhere.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from PIL import Image
from torch import nn

import common
import mmcontrastive

CPU = torch.device("cpu")
ALONE = common.World(0, 1, CPU)


@pytest.fixture(autouse=True)
def same_weights():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


def units(*shape):
    """Random vectors of length one."""
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


# ------------------------------------------------------------------------------------------ the paper, in loops


def eq3(query, own, others, tau):
    """Eqs. 3 and 8 for one query: lists of floats."""
    total = math.exp(dot(query, own) / tau) + sum(math.exp(dot(query, other) / tau) for other in others)
    return -math.log(math.exp(dot(query, own) / tau) / total)


def eq5(query, own, others, tags, other_tags, tau, epsilon):
    """Eq. 5, the positives as in Eq. 4 and the own key."""
    total = math.exp(dot(query, own) / tau) + sum(math.exp(dot(query, other) / tau) for other in others)
    positives = [own] + [other for other, theirs in zip(others, other_tags) if dot(tags, theirs) > epsilon]
    return -sum(math.log(math.exp(dot(query, positive) / tau) / total) for positive in positives) / len(positives)


def eq11(query, own, others, alpha):
    """Eqs. 11 and 14."""
    return sum(max(alpha - dot(query, own) + dot(query, other), 0) for other in others)


def literal_losses(queries, keys, others, tags, other_tags, captioned, args):
    """Eqs. 3, 5, 8, 11, 14, each a mean over the batch. others: {name: list of the keys that its queue has been given}"""
    sums, size = dict.fromkeys(queries, 0.0), len(tags)
    if other_tags is not None:
        sums["tag"] = 0.0
    for n in range(size):
        for name in queries:
            query, own, queue = queries[name][n].tolist(), keys[name][n].tolist(), [key.tolist() for key in others[name]]
            if name == "ii":
                sums["ii"] += eq3(query, own, queue, args.temperature) / size
                if other_tags is not None and any(tags[n].tolist()):
                    theirs = [row.tolist() for row in other_tags]
                    sums["tag"] += eq5(query, own, queue, tags[n].tolist(), theirs, args.temperature, args.tag_threshold) / size
            elif captioned[n]:
                sums[name] += (eq3(query, own, queue, args.temperature) if name == "cc" else eq11(query, own, queue, args.margin)) / size
    return sums


# ------------------------------------------------------------------------------------------ losses

ARGS = SimpleNamespace(temperature=0.07, margin=0.2, tag_threshold=2)
DIMS = {"ii": 5, "cc": 4, "ic": 6, "ci": 6}


def queue_with(keys, size):
    """A queue of K = size that has been given `keys`; what was never filled holds rubbish, which must not count."""
    queue = mmcontrastive.Queue(size, keys.size(1)).double()
    queue.keys += 3
    for key in keys:
        queue.enqueue(key[None], torch.ones(1, dtype=torch.bool))
    return queue


def random_batch(filled, size=12, batch=6, tags=5):
    """-> queries, keys, queues and what they were given, tags, captioned: some without tags, some without a caption"""
    queries, keys = ({name: units(batch, dim) for name, dim in DIMS.items()} for _ in range(2))
    others = {name: units(filled, dim) for name, dim in DIMS.items()}
    other_tags, own_tags = ((torch.rand(n, tags) < 0.7).double() for n in (filled, batch))
    own_tags[[1, 4]] = 0
    other_tags[::3] = 0
    queues = {name: queue_with(rows, size) for name, rows in {**others, "tag": other_tags}.items()}
    captioned = torch.tensor([True, False, True, True, False, True])
    return queries, keys, queues, others, own_tags, other_tags, captioned


@pytest.mark.parametrize("filled", (0, 1, 7, 12), ids="{} of 12 filled".format)
def test_the_losses_are_those_of_the_paper(filled):
    """Eqs. 3, 5, 8, 11, 14 in loops; queues empty, half filled and full; photos without tags and without captions."""
    queries, keys, queues, others, tags, other_tags, captioned = random_batch(filled)
    found = mmcontrastive.contrastive_losses(queries, keys, queues, tags, captioned, ARGS)
    wanted = literal_losses(queries, keys, others, tags, other_tags, captioned, ARGS)
    assert found.keys() == wanted.keys() == {"ii", "tag", "cc", "ic", "ci"}
    for name in wanted:
        assert found[name].item() == pytest.approx(wanted[name], abs=1e-12)
    if filled > 1:
        assert all(wanted[name] > 0.1 for name in wanted) and abs(wanted["tag"] - wanted["ii"]) > 0.01


def test_losses_without_their_data_are_not_there():
    """Without a caption encoder two losses are left, without a queue of tags one; without any caption in a batch its losses are 0."""
    queries, keys, queues, _, tags, _, captioned = random_batch(7)
    photos = {"ii": queries["ii"]}
    assert mmcontrastive.contrastive_losses(photos, keys, queues, tags, captioned, ARGS).keys() == {"ii", "tag"}
    del queues["tag"]
    assert mmcontrastive.contrastive_losses(photos, keys, queues, tags[:, :0], captioned, ARGS).keys() == {"ii"}
    losses = mmcontrastive.contrastive_losses(queries, keys, queues, tags, torch.zeros(6, dtype=torch.bool), ARGS)
    assert losses["cc"] == losses["ic"] == losses["ci"] == 0 < losses["ii"]


def test_without_other_positives_eq5_is_eq3():
    """Sec. 3.1: J_tag degenerates to J_ii when P holds the own key alone."""
    queries, keys, queues, _, tags, _, captioned = random_batch(12)
    tags[[1, 4], 0] = 1  # all have some
    losses = lambda threshold: mmcontrastive.contrastive_losses(queries, keys, queues, tags, captioned, SimpleNamespace(**{**vars(ARGS), "tag_threshold": threshold}))
    alone, several = losses(5), losses(0)
    assert alone["tag"].item() == pytest.approx(alone["ii"].item(), abs=1e-12)
    assert abs(several["tag"] - several["ii"]) > 0.01


def test_gradients_reach_the_queries_alone():
    """Finite where the queue is empty or half filled, none into keys and queues."""
    for filled in (0, 7):
        queries, keys, queues, _, tags, _, captioned = random_batch(filled)
        for query in queries.values():
            query.requires_grad_()
        sum(mmcontrastive.contrastive_losses(queries, keys, queues, tags, captioned, ARGS).values()).backward()
        for name, query in queries.items():
            assert query.grad.isfinite().all() and (query.grad.abs().amax() > 1e-3) == bool(filled)
            assert name == "ii" or not query.grad[~captioned].any()
            assert not keys[name].requires_grad and not queues[name].keys.requires_grad


# ------------------------------------------------------------------------------------------ queues


def test_the_queue_holds_the_last_keys():
    """First in, first out, in the order of the keys, while missing ones leave no gap; K is no multiple of the batch."""
    generator = torch.Generator().manual_seed(1)
    queue, given = mmcontrastive.Queue(7, 2), []
    for step in range(12):
        keys, valid = torch.rand(3, 2, generator=generator), torch.rand(3, generator=generator) < (0 if step == 4 else 0.7)
        given += keys[valid].tolist()
        queue.enqueue(keys, valid)
        assert queue.total == len(given) and queue.filled.sum() == min(len(given), 7)
        for n, key in list(enumerate(given))[-7:]:
            assert queue.filled[n % 7] and queue.keys[n % 7].tolist() == key
    assert len(given) > 20 and len(given) % 7 and len(given) % 3


def test_the_whole_batch_may_be_as_large_as_the_queue():
    queue = mmcontrastive.Queue(4, 1)
    for first in (0, 4):
        queue.enqueue(torch.arange(first, first + 4.0)[:, None], torch.tensor([True, first > 0, True, True]))
    assert queue.keys.flatten().tolist() == [5, 6, 7, 4] and queue.total == 7


# ------------------------------------------------------------------------------------------ encoders


class TinyBackbone(nn.Module):
    """Convolution, batch norm, ReLU: enough for statistics to matter."""

    channels = 8

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, images):
        return self.layers(images)


class TinyReader(nn.Module):
    """The mean of the visible tokens' vectors."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, tokens, visible):
        return (self.words(tokens) * visible[..., None]).sum(1) / visible.sum(1, keepdim=True)


def tiny_model(num_tags=3, size=12, unified=False):
    torch.manual_seed(0)
    spaces = {"intra": 6, "inter": 6 if unified else 4}
    photos = nn.Sequential(TinyBackbone(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoders = {name: mmcontrastive.Encoder(trunk, 8, spaces, 16, unified) for name, trunk in (("image", photos), ("caption", TinyReader()))}
    return mmcontrastive.MultimodalContrastive(encoders, num_tags, size)


def tiny_batch(step=0, batch=8):
    """-> photos, (tokens, visible), tags, captioned"""
    generator = torch.Generator().manual_seed(step)
    visible = torch.rand(batch, 5, generator=generator) < 0.7
    visible[:, 0] = True
    photos, tokens = torch.randn(batch, 3, 9, 9, generator=generator), torch.randint(20, (batch, 5), generator=generator)
    return photos, (tokens, visible), (torch.rand(batch, 3, generator=generator) < 0.5).float(), torch.rand(batch, generator=generator) < 0.6


KINDS = {"ii": ("image", "intra"), "ic": ("caption", "inter"), "cc": ("caption", "intra"), "ci": ("image", "inter")}  # of the keys: Eqs. 2, 10, 7, 13


def by_hand(encoder, space, features):
    """Linear, ReLU, linear, and to length one, with the encoder's weights for that space."""
    first, _, last = encoder.mlps[space]
    vectors = (features @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias
    return vectors / vectors.pow(2).sum(1, keepdim=True).sqrt()


def test_queries_and_keys_are_those_of_their_equations():
    """Eqs. 1, 6, 9, 12 by the query encoders, 2, 7, 10, 13 by the momentum encoders: which MLP, which modality, length one."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.keys.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    photos, captions, _, _ = tiny_batch()
    queries, keys = model(photos, captions), model.encode_keys(photos, captions, ALONE, np.random.default_rng(0), 1)
    for found, encoders, kinds in (
        (queries, model.queries, {"ii": ("image", "intra"), "ic": ("image", "inter"), "cc": ("caption", "intra"), "ci": ("caption", "inter")}),
        (keys, model.keys, KINDS),
    ):
        features = {"image": encoders["image"].trunk[0](photos).mean((2, 3)), "caption": encoders["caption"].trunk(*captions)}
        assert found.keys() == kinds.keys()
        for name, (modality, space) in kinds.items():
            torch.testing.assert_close(found[name], by_hand(encoders[modality], space, features[modality]), rtol=0, atol=1e-5)
            assert found[name].shape == (8, {"intra": 6, "inter": 4}[space])
    assert model(photos).keys() == {"ii", "ic"} and model.encode_keys(photos, None, ALONE, np.random.default_rng(0), 1).keys() == {"ii", "ci"}


def test_distinct_and_unified_mlps():
    """Sec. 4.4: two MLPs per encoder, or one for both spaces; the momentum copy is of the same kind."""
    numbers = {}
    for unified in (False, True):
        model = tiny_model(unified=unified)
        for encoders in (model.queries, model.keys):
            for encoder in encoders.values():
                assert (encoder.mlps["intra"] is encoder.mlps["inter"]) == unified
        numbers[unified] = sum(p.numel() for p in model.queries.parameters())
        assert [p.shape for p in model.queries.parameters()] == [p.shape for p in model.keys.parameters()]
        assert all(a is not b for a, b in zip(model.queries.parameters(), model.keys.parameters()))
    assert numbers[False] - numbers[True] == 2 * (8 * 16 + 16) + 2 * (16 * (4 - 6 + 6) + 4 - 6 + 6)


@pytest.mark.parametrize("m", (0.0, 0.3, 0.999, 1.0))
def test_momentum_update(m):
    """Sec. 3.1: theta_k <- m theta_k + (1 - m) theta_q, MLPs included; the query encoders stay as they are."""
    model = tiny_model(unified=True).double()
    with torch.no_grad():
        for parameter in model.queries.parameters():
            parameter += torch.randn_like(parameter)
    before, queries = ([p.detach().clone() for p in part.parameters()] for part in (model.keys, model.queries))
    mmcontrastive.update_momentum(model.queries, model.keys, m)
    for key, old, query, now in zip(model.keys.parameters(), before, queries, model.queries.parameters()):
        torch.testing.assert_close(key.detach(), m * old + (1 - m) * query, rtol=0, atol=1e-14)
        assert torch.equal(now, query) and (m == 1) == torch.equal(key, old)


def test_a_step_moves_the_query_encoders_alone():
    """No gradient reaches a momentum encoder or a queue; all query encoders get one."""
    model = tiny_model()
    for step in (0, 1):
        photos, captions, tags, captioned = tiny_batch(step)
        queries, keys = model(photos, captions), model.encode_keys(photos + 0.1 * torch.randn_like(photos), captions, ALONE, np.random.default_rng(0), 2)
        losses = mmcontrastive.contrastive_losses(queries, keys, model.queues, tags, captioned, ARGS)
        if step:
            sum(losses.values()).backward()
        model.enqueue(keys, tags, captioned, ALONE)
    assert all(p.grad is None and not p.requires_grad for p in model.keys.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.queries.parameters())
    assert not any(buffer.requires_grad for buffer in model.queues.buffers())
    assert model.queues["ii"].total == model.queues["ci"].total == model.queues["tag"].total == 16
    assert model.queues["cc"].total == model.queues["ic"].total == sum(tiny_batch(step)[3].sum() for step in (0, 1)) < 16


def test_keys_are_in_the_order_of_the_photos():
    """Whatever the permutation: without batch statistics nothing shows it, and one group has those of the whole batch."""
    model = tiny_model()
    photos, captions, _, _ = tiny_batch()
    for training, splits in ((False, 1), (False, 4), (True, 1)):
        model.train(training)
        plain = {(modality, space): vector for modality, inputs in (("image", (photos,)), ("caption", captions)) for space, vector in model.keys[modality](*inputs).items()}
        for seed in range(3):
            keys = model.encode_keys(photos, captions, ALONE, np.random.default_rng(seed), splits)
            for name, kind in KINDS.items():
                torch.testing.assert_close(keys[name], plain[kind], rtol=0, atol=1e-5)


def test_groups_have_batch_statistics_of_their_own():
    """Shuffled batch norm: photo by photo, as if its group of the permutation were the whole batch."""
    model = tiny_model()
    photos, _, _, _ = tiny_batch()
    order = np.random.default_rng(5).permutation(8)
    assert order.tolist() != list(range(8))
    keys = model.encode_keys(photos, None, ALONE, np.random.default_rng(5), 4)
    whole = model.keys["image"](photos)
    for name, space in (("ii", "intra"), ("ci", "inter")):
        for n in range(8):
            place = order.tolist().index(n)
            group = order[place // 2 * 2 : place // 2 * 2 + 2].tolist()
            alone = model.keys["image"](photos[group])[space][group.index(n)]
            torch.testing.assert_close(keys[name][n], alone, rtol=0, atol=1e-5)
        assert (keys[name] - whole[space]).abs().max() > 0.01


def rounds(model, world, splits):
    """Three batches through the momentum encoders and into the queues, of which each process has its share -> the keys"""
    found = []
    for step in range(3):
        photos, captions, tags, captioned = tiny_batch(step)
        mine = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
        share = photos[mine], tuple(part[mine] for part in captions)
        keys = model.encode_keys(*share, world, np.random.default_rng([7, step]), splits)
        model.enqueue(keys, tags[mine], captioned[mine], world)
        found.append(keys)
    return found


TWO = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
import common
from test_mmcontrastive import rounds, tiny_model

world, model = common.start_processes(), tiny_model()
keys = rounds(model, world, 2)
torch.save([keys, model.queues.state_dict()], sys.argv[1] + str(world.rank))
common.end_processes(world)
"""


def test_two_processes_hold_what_one_does(tmp_path):
    """encode_keys and enqueue over two gloo processes: the keys of the whole batch and the same queues on both, equal to those of
    one process with --bn-splits 2. K = 12 is no multiple of the batch of 8, and captions are missing."""
    (tmp_path / "two.py").write_text(TWO)
    process = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "two.py", tmp_path / "rank")
    assert process.returncode == 0, process.stderr[-3000:]
    model = tiny_model()
    keys = rounds(model, ALONE, 2)
    one, (first, second) = [keys, model.queues.state_dict()], (torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close([first[0], dict(first[1])], [one[0], dict(one[1])], rtol=0, atol=1e-6)
    assert one[1]["ii.total"] == 24 and one[1]["ic.total"] == sum(tiny_batch(step)[3].sum() for step in range(3)) < 24
    # The queues hold the last keys and tags of all batches, in their order.
    for name in (*KINDS, "tag"):
        batches = [(tiny_batch(step)[2] if name == "tag" else keys[step][name], tiny_batch(step)[3]) for step in range(3)]
        given = torch.cat([rows[captioned] if name in ("cc", "ic") else rows for rows, captioned in batches])
        for n in range(max(0, len(given) - 12), len(given)):
            assert torch.equal(one[1][f"{name}.keys"][n % 12], given[n])


@pytest.mark.parametrize("kind", ("Bert", "Roberta", "DistilBert", "Electra"))
def test_the_caption_trunk_is_the_pooled_output(kind):
    """Sec. 4.1: the pooler's output, or the first token's where there is none; padding is hidden."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if kind == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, pad_token_id=0, **sizes)
    trunk = mmcontrastive.CaptionTrunk(config).eval()
    tokens = torch.randint(2, 30, (3, 7))
    lengths = (7, 4, 1)
    visible = torch.arange(7) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        found = trunk(tokens.masked_fill(~visible, 0), visible)
        for row, length, vector in zip(tokens, lengths, found):
            output = trunk.bert(input_ids=row[None, :length])
            alone = output.pooler_output[0] if kind in ("Bert", "Roberta") else output.last_hidden_state[0, 0]
            torch.testing.assert_close(vector, alone, rtol=0, atol=1e-5)
    assert found.shape == (3, 16)


def test_the_caption_trunk_computes_in_single_precision_whatever_it_was_saved_in():
    """A model that was published in half precision says so in its architecture; trained, it needs all its digits."""
    import transformers

    config = transformers.BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, dtype=torch.float16)
    assert {p.dtype for p in mmcontrastive.CaptionTrunk(config).parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------ views


def gaussian(image, sigma, y, x):
    """One blurred pixel of an image (h, w) of plain numbers."""
    weights = {(v, u): math.exp(-((v - y) ** 2 + (u - x) ** 2) / (2 * sigma**2)) for v in range(len(image)) for u in range(len(image[0]))}
    return sum(weight * image[v][u] for (v, u), weight in weights.items()) / sum(weights.values())


def test_blur_is_a_gaussian_convolution():
    """Each image by its own sigma; nothing is darker at the border; sigma 0 changes nothing."""
    images, sigma = torch.rand(4, 3, 13, 17), torch.tensor([0.4, 1.1, 2.0, 0.0])
    blurred = mmcontrastive.blur(images, sigma)
    for n in range(3):
        for channel, y, x in ((0, 6, 8), (2, 5, 9), (1, 7, 7)):
            assert blurred[n, channel, y, x].item() == pytest.approx(gaussian(images[n, channel].tolist(), sigma[n].item(), y, x), abs=1e-5)
    assert torch.equal(blurred[3], images[3])
    assert (blurred[2] - images[2]).abs().max() > 0.1 and blurred.is_contiguous(memory_format=torch.channels_last)
    flat = torch.full((3, 3, 13, 17), 0.3)
    torch.testing.assert_close(mmcontrastive.blur(flat, sigma[:3]), flat, rtol=0, atol=1e-6)


def view_args(**flags):
    defaults = {"seed": 0, "image_size": 24, "crop_min": 1.0, "colour_jitter": 0.0, "greyscale": 0.0, "blur": 0.0, "caption_views": "sibling"}
    return SimpleNamespace(**{**defaults, **flags})


@pytest.fixture
def photos(tmp_path):
    """Two photos that differ from their mirror images: with three captions and a tag, and with nothing."""
    data = common.CaptionData(common.ImageFiles(), ["dog", "tree", "sky"])
    for n, (captions, tags) in enumerate([(["the dog left of a bright tree", "a tree right of it", "a dog"], [0, 2]), ([], [])]):
        pixels = np.random.default_rng(n).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        data.add(str(tmp_path / f"{n}.png"), captions, tags)
    return data


def test_left_and_right_follow_the_photo_that_a_caption_meets(photos):
    """The query photo meets the key's caption, the key photo the query's (Eqs. 9 to 13): so do mirrored photos and their words."""
    view, straight, seen = mmcontrastive.TwoViews(photos, view_args(caption_views="same")), np.array(Image.open(photos.images[0])), set()
    wording = {"the dog {} of a bright tree": "left", "a tree {} of it": "right"}
    for epoch in range(40):
        sample = view[epoch, 0]
        mirrored = [np.array_equal(image, straight[:, ::-1]) for image in sample["images"]]
        assert all(flip or np.array_equal(image, straight) for flip, image in zip(mirrored, sample["images"]))
        for caption, flip in zip(sample["captions"], (mirrored[1], mirrored[0])):  # query caption: key photo; key caption: query photo
            for words, side in wording.items():
                if caption.startswith(words[:6]):
                    assert caption == words.format({"left": "right", "right": "left"}[side] if flip else side)
                    seen.add((words, *mirrored))
    assert len(seen) == 8
    nothing = view[0, 1]
    assert nothing["captions"] == ["", ""] and not nothing["captioned"] and not nothing["tags"].any()
    assert sample["captioned"] and sample["tags"].tolist() == [1, 0, 1]


def test_caption_views(photos):
    """The same caption twice, two different ones of the photo, or a caption and its round trip through either language."""
    captions, rng = list(photos.captions), np.random.default_rng(0)
    trips = [common.PackedStrings(f"{language} {caption}" for caption in captions) for language in ("fr", "de")]
    pairs = lambda name, trips=None: {tuple(mmcontrastive.TwoViews(photos, view_args(caption_views=name), trips).caption_views(0, rng)) for _ in range(120)}
    assert pairs("same") == {(caption, caption) for caption in captions}
    assert pairs("sibling") == {(one, other) for one in captions for other in captions if one != other}
    assert pairs("backtranslation", trips) == {(caption, f"{language} {caption}") for caption in captions for language in ("fr", "de")}
    single = photos.select([0, 1], captions_per_image=1)
    view = mmcontrastive.TwoViews(single, view_args())
    assert view.caption_views(0, rng) == 2 * [single.captions[0]] and view.caption_views(1, rng) == []


def test_photo_views(photos):
    """Two crops of their own; greyscale views lose all colour; sigma as MoCo-v2's at 224 pixels; a share of 0 and of 1 are none and all."""
    plain = mmcontrastive.TwoViews(photos, view_args(crop_min=0.2, colour_jitter=1.0))
    samples = [plain[epoch, 0] for epoch in range(30)]
    assert not any(np.array_equal(*sample["images"]) for sample in samples)
    assert all((sample["jitter"][:, 2] > 0).all() and not sample["blur"].any() for sample in samples)
    assert sum(not np.array_equal(*sample["jitter"]) for sample in samples) > 20
    again = plain[7, 0]
    assert all(np.array_equal(a, b) for a, b in zip(again["images"], samples[7]["images"])) and again["captions"] == samples[7]["captions"]

    grey = mmcontrastive.TwoViews(photos, view_args(colour_jitter=1.0, greyscale=1.0, blur=1.0))
    batch = mmcontrastive.collate([grey[epoch, 0] for epoch in range(30)], None)
    mean, std = (torch.tensor(value)[:, None, None] for value in (common.IMAGENET_MEAN, common.IMAGENET_STD))
    pixels = common.augment(batch["images"][:, 0], batch["jitter"][:, 0]) * std + mean
    assert (pixels.amax(1) - pixels.amin(1)).max() < 1e-5 and pixels.std() > 0.1
    assert (batch["blur"] > 0.1 * 24 / 224).all() and (batch["blur"] < 2 * 24 / 224).all() and batch["blur"].std() > 0.02

    some = mmcontrastive.TwoViews(photos, view_args(greyscale=0.2, blur=0.5))
    batch = mmcontrastive.collate([some[epoch, 0] for epoch in range(150)], None)
    assert 0.12 < (batch["jitter"][..., 2] == 0).float().mean() < 0.28 and 0.4 < (batch["blur"] > 0).float().mean() < 0.6


class Letters:
    """A tokenizer: a letter is a token, 99 comes first."""

    def __call__(self, captions, padding, truncation, max_length, return_tensors):
        rows = [[99, *map(ord, caption)][:max_length] for caption in captions]
        longest = max(map(len, rows))
        grid = torch.tensor([row + (longest - len(row)) * [0] for row in rows])
        return {"input_ids": grid, "attention_mask": (grid > 0).long()}


def test_batches(photos):
    """What the loop gets: both views of photos and captions, tags, who has a caption; also where the data know no tags at all."""
    view = mmcontrastive.TwoViews(photos, view_args())
    samples = [view[0, 0], view[0, 1]]
    batch = mmcontrastive.collate(samples, Letters())
    assert batch["images"].shape == (2, 2, 24, 24, 3) and batch["images"].dtype == torch.uint8
    assert batch["jitter"].shape == (2, 2, 4) and batch["blur"].shape == (2, 2) and batch["unreadable"] == []
    assert batch["tags"].tolist() == [[1, 0, 1], [0, 0, 0]] and batch["captioned"].tolist() == [True, False]
    for n in (0, 1):
        for row, visible, sample in zip(batch[f"tokens{n}"], batch[f"visible{n}"], samples):
            assert row[visible].tolist() == [99, *map(ord, sample["captions"][n])] and visible.sum() == len(sample["captions"][n]) + 1
    photos.tag_names, photos.tags, photos.first_tag = None, photos.tags[:0], photos.first_tag[:1] * 3
    bare = mmcontrastive.collate([view[0, 0], view[0, 1]], None)
    assert bare["tags"].shape == (2, 0) and "tokens0" not in bare


# ------------------------------------------------------------------------------------------ retrieval


def literal_scores(similarity, image_of_caption):
    """Ranks by sorting, one query at a time; equal similarities share the mean of their places."""
    def rank(right, wrong):
        places = [place for place, value in enumerate(sorted([right, *wrong], reverse=True), 1) if value == right]
        return sum(places) / len(places)

    to_text, to_image = [], []
    for i, row in enumerate(similarity):
        own = [value for value, image in zip(row, image_of_caption) if image == i]
        to_text.append(rank(max(own), [value for value, image in zip(row, image_of_caption) if image != i]))
    for c, image in enumerate(image_of_caption):
        column = [row[c] for row in similarity]
        to_image.append(rank(column[image], column[:image] + column[image + 1 :]))
    return {
        way: {**{f"R@{k}": 100 * sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 5, 10)}, "median rank": float(np.median(ranks))}
        for way, ranks in (("image to text", to_text), ("text to image", to_image))
    }


def assert_same_scores(found, wanted):
    assert found.keys() == wanted.keys() == {"image to text", "text to image"}
    for way in wanted:
        assert found[way] == pytest.approx(wanted[way], abs=1e-4)


@pytest.mark.parametrize("levels", (1000, 6), ids=("hardly any ties", "many ties"))
def test_retrieval_scores_are_those_of_a_sort(levels):
    """Tab. 7: R@K and median rank both ways, images with one to four captions, tied or not."""
    generator = torch.Generator().manual_seed(levels)
    image_of_caption = torch.tensor([0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 13])
    similarity = torch.randint(levels, (14, 24), generator=generator).float()
    similarity[image_of_caption, torch.arange(24)] += 0.35 * levels // 1  # better than chance
    found = mmcontrastive.retrieval_scores(similarity, image_of_caption)
    assert_same_scores(found, literal_scores(similarity.tolist(), image_of_caption.tolist()))
    assert 0 < found["text to image"]["R@1"] < found["text to image"]["R@5"] < 100


def test_retrieval_at_its_ends():
    """Perfect vectors are found at once; a model that finds everything alike, or not a number, gets no credit."""
    image_of_caption = torch.arange(20).repeat_interleave(5)
    perfect = (image_of_caption == torch.arange(20)[:, None]).float()
    best = {"R@1": 100.0, "R@5": 100.0, "R@10": 100.0, "median rank": 1.0}
    assert_same_scores(mmcontrastive.retrieval_scores(perfect, image_of_caption), {"image to text": best, "text to image": best})
    nothing = {"R@1": 0.0, "R@5": 0.0, "R@10": 0.0}
    for value in (0.7, math.nan):
        alike = mmcontrastive.retrieval_scores(torch.full((20, 100), value), image_of_caption)
        assert_same_scores(alike, {"image to text": {**nothing, "median rank": 1 + 95 / 2}, "text to image": {**nothing, "median rank": 1 + 19 / 2}})


def test_random_vectors_score_what_chance_gives():
    """text to image R@k = k / N; image to text 1 - C(M - c, k) / C(M, k): the baseline of Tab. 7."""
    N, c, runs = 100, 5, 60
    image_of_caption, generator, found = torch.arange(N).repeat_interleave(c), torch.Generator().manual_seed(0), []
    for _ in range(runs):
        found.append(mmcontrastive.retrieval_scores(torch.rand(N, c * N, generator=generator), image_of_caption))
    mean = lambda way, name: sum(scores[way][name] for scores in found) / runs
    for k in (1, 5, 10):
        text, image = k / N, 1 - math.comb(c * N - c, k) / math.comb(c * N, k)
        assert mean("text to image", f"R@{k}") == pytest.approx(100 * text, abs=400 * math.sqrt(text * (1 - text) / (runs * c * N)))
        assert mean("image to text", f"R@{k}") == pytest.approx(100 * image, abs=400 * math.sqrt(image * (1 - image) / (runs * N)))
    assert mean("text to image", "median rank") == pytest.approx(N / 2, abs=2)


# ------------------------------------------------------------------------------------------ files


def test_round_trips_of_a_killed_run(tmp_path):
    """Whole lines count, half a last one does not; anything else is named with its line."""
    path = tmp_path / "trips.jsonl"
    row = lambda n: {"caption": f"caption {n}", "fr": f"français {n}", "de": f"deutsch {n}"}
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in range(3)) + json.dumps(row(3))[:20])
    assert mmcontrastive.read_round_trips(path) == {f"caption {n}": row(n) for n in range(3)}
    french, german = mmcontrastive.read_backtranslations(path, ["caption 2", "caption 0", "caption 2"])
    assert list(french) == ["français 2", "français 0", "français 2"] and list(german) == ["deutsch 2", "deutsch 0", "deutsch 2"]
    path.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1)))  # by hand: whole, but for the end of the line
    assert len(mmcontrastive.read_round_trips(path)) == 2
    with pytest.raises(SystemExit, match="1 of 2 captions have no round trip in .*trips.jsonl: write them with the same command and --backtranslate"):
        mmcontrastive.read_backtranslations(path, ["caption 1", "caption 3"])
    for bad in (b"{}\n", b"nonsense\n", b'["caption", "fr", "de"]\n', b'{"caption": "a", "fr": "b", "de": 3}\n', b"\xff\xfe\n"):
        path.write_bytes(json.dumps(row(0)).encode() + b"\n" + bad + json.dumps(row(1)).encode() + b"\n")
        with pytest.raises(SystemExit, match="trips.jsonl, line 2: expected"):
            mmcontrastive.read_round_trips(path)
    assert mmcontrastive.read_round_trips(tmp_path / "none.jsonl") == {}


def some_data(captions, tags):
    data = common.CaptionData(common.ImageFiles(), ["dog", "cat"])
    for n, (own_captions, own_tags) in enumerate(zip(captions, tags)):
        data.add(f"{n}.jpg", own_captions, own_tags)
    return data


def test_who_takes_part(capsys):
    """Sec. 3.2, end: photos without captions stay while a loss is left for them; Eq. 5 needs a tag somewhere."""
    ALL = dict.fromkeys(mmcontrastive.LOSSES, 1.0)
    usable = lambda data, require_tags=False, **weights: mmcontrastive.usable(data, SimpleNamespace(require_tags=require_tags), {**ALL, **weights})
    mixed, untagged, silent = some_data([["a dog"], [], ["a cat"]], [[0], [1], []]), some_data([["a"], []], [[], []]), some_data([[], []], [[0], []])
    data, tag = usable(mixed)
    assert len(data) == 3 and tag == 1
    data, tag = usable(untagged)
    assert len(data) == 2 and tag == 0 and "no photo has tags" in capsys.readouterr().out
    data, tag = usable(mixed, ii=0.0, tag=0.0)
    assert list(data.images) == ["0.jpg", "2.jpg"] and list(data.captions) == ["a dog", "a cat"] and "1 photos without a caption are left out" in capsys.readouterr().out
    assert len(usable(mixed, ii=0.0)[0]) == 3  # Eq. 5 is left
    assert len(usable(silent, cc=0.0, ic=0.0, ci=0.0)[0]) == 2
    for data, flags, message in (
        (silent, {}, "no photo has a caption"),
        (untagged, {"require_tags": True}, "--lambda-tag wants tags"),
        (untagged, {"ii": 0.0, "ic": 0.0, "ci": 0.0}, "--lambda-tag wants tags"),
    ):
        with pytest.raises(SystemExit, match=message):
            usable(data, **flags)


def test_the_sampled_flags_are_the_papers():
    """Sec. 4.1 on real data: what the paper states, and the learning rates that belong to its batch."""
    args = mmcontrastive.get_args(["--data", "coco"])
    wanted = dict(arch="resnet50", image_size=224, lm="bert-base-uncased", mlp_hidden=2048, intra_dim=128, inter_dim=1024, temperature=0.07, momentum=0.999,
        queue=32768, lambda_ii=1, lambda_tag=1, lambda_cc=1, lambda_ic=1e-4, lambda_ci=1e-4, tag_threshold=2, margin=0.2, weight_decay=1e-4, batch_size=512,
        lr=0.03, text_lr=4e-5, caption_views="backtranslation", bn_splits=8, greyscale=0.2, blur=0.5, crop_min=0.2)  # fmt: skip
    assert {name: getattr(args, name) for name in wanted} == wanted
    assert args.epochs == 200 and args.iters is None
    assert mmcontrastive.get_args(["--data", "coco", "--iters", "5"]).epochs is None
