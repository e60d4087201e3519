"""mmcontrastive.py against the paper written out in loops, piece by piece, and as it is used.

Also tools/backtranslate.py, whose file it reads. downstream/search.py: test_search.py.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from conftest import CPU, OWN, TINY, captioned, checkpoint_in, files_in, in_two_processes, metrics
from conftest import photos_at, refusal, result, run_here
from PIL import Image
from scipy.stats import rankdata
from torch import nn

import common
import mmcontrastive
from extras import nouns
from tools import backtranslate


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


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
    """Means over the batch.  given: {name: the keys in its queue}, and the tags in theirs"""
    sums = dict.fromkeys(("ii", "tag", "cc", "ic", "ci"), 0.0)
    queries, keys, given = [
        {name: rows.tolist() for name, rows in table.items()} for table in (queries, keys, given)
    ]
    for n, own_tags in enumerate(tags.tolist()):
        q = {name: rows[n] for name, rows in queries.items()}
        k = {name: rows[n] for name, rows in keys.items()}
        own, others = k["image_intra"], given["image_intra"]
        sums["ii"] -= log_p(q["image_intra"], own, own, others, tau)  # Eq. 3
        if any(own_tags):
            query, theirs = q["image_intra"], given["tags"]
            sums["tag"] += eq5(query, own, others, tau, own_tags, theirs, epsilon)
        if captioned[n]:
            own, others = k["caption_intra"], given["caption_intra"]
            sums["cc"] -= log_p(q["caption_intra"], own, own, others, tau)  # Eq. 8
            own, others = k["caption_inter"], given["caption_inter"]
            sums["ic"] += eq11(q["image_inter"], own, others, margin)
            own, others = k["image_inter"], given["image_inter"]
            sums["ci"] += eq11(q["caption_inter"], own, others, margin)  # Eq. 14
    return {name: total / len(tags) for name, total in sums.items()}


TAU, MARGIN, EPSILON = 0.07, 0.2, 2
DIMS = {"image_intra": 5, "caption_intra": 4, "image_inter": 6, "caption_inter": 6}


def units(*shape):
    """Random vectors of length one in float64"""
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def queue_with(rows, valid, size):
    """A queue that has been given `rows`; its other slots hold what would be near to everything"""
    queue = mmcontrastive.Queue(size, rows.size(1)).double()
    queue.keys += 3
    for n in range(len(rows)):
        queue.enqueue(rows[n : n + 1], valid[n : n + 1], iteration=n + 1)
    return queue


def random_batch(filled, size=12, batch=6):
    """Six photos, some without tags or captions; queues of 12 keys that were `given` so many"""
    b = SimpleNamespace(captioned=torch.tensor([1, 0, 1, 1, 0, 1]).bool())
    b.queries = {name: units(batch, dim) for name, dim in DIMS.items()}
    b.keys = {name: units(batch, dim) for name, dim in DIMS.items()}
    b.tags = torch.rand(batch, 5) < 0.7
    b.tags[[1, 4]] = False
    rows = {name: units(filled, dim) for name, dim in DIMS.items()}
    rows["tags"] = (torch.rand(filled, 5) < 0.7).double()
    rows["tags"][::3] = 0
    b.given, b.queues = {}, {}
    for name in rows:
        valid = torch.ones(filled).bool()
        if name.startswith("caption"):
            valid[1::4] = False
        b.given[name] = rows[name][valid]
        b.queues[name] = queue_with(rows[name], valid, size)
    b.queues["tags"].float()
    return b


@pytest.mark.parametrize("filled", (0, 1, 7, 12))
def test_losses_are_those_of_the_paper(filled):
    """Eqs. 3, 5, 8, 11, 14, the queues empty, partly filled and full; gradients are finite."""
    b = random_batch(filled)
    for query in b.queries.values():
        query.requires_grad_()
    batch = b.queries, b.keys, b.queues, b.tags, b.captioned
    args = SimpleNamespace(temperature=TAU, tag_threshold=EPSILON)
    found = mmcontrastive.contrastive_losses(*batch, args)
    tags = b.tags.double()
    wanted = literal_losses(b.queries, b.keys, b.given, tags, b.captioned, TAU, MARGIN, EPSILON)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].item() == pytest.approx(value, abs=1e-12)
    if filled > 1:
        assert min(wanted.values()) > 0.1 and abs(wanted["tag"] - wanted["ii"]) > 0.01
    sum(found.values()).backward()
    for name, query in b.queries.items():
        assert query.grad.isfinite().all()
        assert (query.grad.abs().amax() > 1e-3) == bool(filled)
        assert name == "image_intra" or not query.grad[~b.captioned].any()


BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 24, "vocab_size": 30, "pad_token_id": 0}
LAMBDAS = dict.fromkeys(("lambda_ii", "lambda_tag", "lambda_cc", "lambda_ic", "lambda_ci"), 1.0)


def tiny_model(bn_group=8):
    """Three tags, K = 16, spaces of 6 (intra) and 4 (inter) dimensions, no dropout"""
    import transformers

    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**BERT, **dropout)
    sizes = {"mlp_hidden": 16, "intra_dim": 6, "inter_dim": 4}
    args = SimpleNamespace(arch="resnet18", **sizes, **LAMBDAS)
    encoders = mmcontrastive.build_encoders(args, config)
    return mmcontrastive.MultimodalContrastive(encoders, 16, num_tags=3, bn_group=bn_group)


def tiny_batch(step=0):
    """Eight photos -> images, captions (2, B, T), tags, captioned"""
    torch.manual_seed(100 + step)
    images, tokens = torch.randn(8, 3, 64, 64), torch.randint(30, (8, 5))
    visible = torch.rand(8, 5) < 0.7
    visible[:, 0] = True
    captions = torch.stack([tokens, visible])
    return images, captions, torch.rand(8, 3) < 0.5, torch.rand(8) < 0.6


def by_hand(encoders, photos, captions):
    """Features, linear, ReLU, linear, and to length one -> {name: vectors}"""
    features = {
        "image": encoders["image"].trunk[0](photos).mean((2, 3)),
        "caption": encoders["caption"].trunk(captions),
    }
    vectors = {}
    for modality, feature in features.items():
        for name, (first, _, last) in encoders[modality].mlps.items():
            hidden = (feature @ first.weight.T + first.bias).clamp(min=0)
            output = hidden @ last.weight.T + last.bias
            vectors[name] = output / output.pow(2).sum(1, keepdim=True).sqrt()
    return vectors


@torch.no_grad()
@pytest.mark.parametrize("training, bn_group", ((False, 2), (True, 8)))
def test_queries_and_keys_are_those_of_their_equations(training, bn_group):
    """Which encoder, modality and MLP each comes from; keys stand in the order of the photos."""
    model = tiny_model(bn_group).train(training)
    for parameter in model.queries.parameters():
        parameter += 0.01 * torch.randn_like(parameter)
    photos, captions, _, _ = tiny_batch()
    queries = by_hand(model.queries, photos, captions)  # Eqs. 1, 6, 9, 12
    sizes = {"image_intra": 6, "caption_intra": 6, "image_inter": 4, "caption_inter": 4}
    assert {name: query.size(1) for name, query in queries.items()} == sizes
    close(model(photos, captions), queries, 1e-4)
    keys = by_hand(model.keys, photos, captions)  # Eqs. 2, 7, 13, 10
    for seed in (0, 1):
        close(model.encode_keys(photos, [captions], seed), keys, 1e-4)


@torch.no_grad()
def test_groups_have_batch_statistics_of_their_own():
    """Shuffled batch norm: each photo's query and key are those of its group of two, alone."""
    model, plain, (photos, _, _, _) = tiny_model(bn_group=2), tiny_model(), tiny_batch()
    order = np.random.default_rng(5).permutation(8).tolist()
    keys, whole = model.encode_keys(photos, [None], 5), plain.keys["image"](photos)
    for start in range(0, 8, 2):
        group = order[start : start + 2]
        close({name: keys[name][group] for name in keys}, plain.keys["image"](photos[group]), 1e-5)
    queries = model(photos, None)
    for start in range(0, 8, 2):  # the queries' groups are not drawn [public code of MoCo]
        alone = plain.queries["image"](photos[start : start + 2])
        close({name: queries[name][start : start + 2] for name in queries}, alone, 1e-5)
    assert (keys["image_intra"] - whole["image_intra"]).abs().max() > 0.01
    running = dict(model.queries.named_buffers()), dict(plain.queries.named_buffers())
    assert running[0].keys() == running[1].keys()  # checkpoints are the same with and without


def three_batches():
    """Momentum encoders and queues meet three batches, of which each process has its share"""
    common.init_distributed()
    rank, world_size = common.rank(), common.world_size()
    model, found = tiny_model(bn_group=4), []
    for step in range(3):
        photos, captions, tags, captioned = tiny_batch(step)
        mine = torch.arange(8).chunk(world_size)[rank]
        keys = model.encode_keys(photos[mine], [captions[:, mine]], (7, step))
        model.enqueue(keys, tags[mine], captioned[mine], step + 1)
        found += [common.gather(keys[name]) for name in DIMS]
    common.end_distributed()
    return [x.tolist() for x in (*found, *model.queues.state_dict().values())]


def test_two_processes_hold_what_one_does():
    """The keys of the whole batch, and the same queues as one process with --bn-splits 2 has"""
    wanted = three_batches()
    for found in in_two_processes(three_batches):
        for x, y in zip(found, wanted, strict=True):
            close(torch.tensor(x), torch.tensor(y))


def test_blur_is_a_gaussian_convolution():
    """torchvision's, each image by its own sigma; at the border nothing gets darker."""
    images, sigma = torch.rand(4, 3, 41, 41), torch.tensor([0.4, 1.1, 2.0, 0.0])
    blurred = mmcontrastive.blur(images, sigma)
    inside = ..., slice(12, -12), slice(12, -12)
    for image, found, width in zip(images[:3], blurred, sigma.tolist()):
        close(found[inside], TF.gaussian_blur(image, 23, width)[inside])
        assert (found - image).abs().max() > 0.05
    assert torch.equal(blurred[3], images[3])
    flat = torch.full((4, 3, 41, 41), 0.3)
    close(mmcontrastive.blur(flat, sigma), flat, 1e-6)


@pytest.fixture
def two_photos(tmp_path):
    """One with three captions and two tags, and one with nothing; unlike their flipped images"""
    captions = ["the dog left of a bright tree", "a tree right of it", "a dog"]
    paths = tmp_path / "0.png", tmp_path / "1.png"
    for n, path in enumerate(paths):
        pixels = np.random.default_rng(n).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    tags = {"tags": [[0, 2], []], "tag_names": ["dog", "tree", "sky"]}
    return captioned(captions, [], images=photos_at(*paths), **tags)


def samples_of(data, translations=(), **flags):
    """The samples of a run with these flags; without any nothing but flipping is random"""
    plain = {"colour_jitter": 0.0, "greyscale": 0.0, "blur": 0.0, "moco_v1": False}
    plain |= {"image_size": 24, "crop_min": 1.0, "caption_views": "sibling"}
    return mmcontrastive.TwoViews(data, translations, SimpleNamespace(**plain | flags))


def test_left_and_right_follow_the_photo_that_a_caption_meets(two_photos):
    """The query photo meets the key's caption, the key photo the query's (Eqs. 9 to 13)."""
    data = captioned(["a dog left of a tree"], images=two_photos.images[[0]])
    samples, straight = samples_of(data), np.array(Image.open(data.images[0]))
    captions = {False: "a dog left of a tree", True: "a dog right of a tree"}
    seen = set()
    for epoch in range(40):
        sample = samples[0, epoch, 0]
        flipped = [np.array_equal(image, straight[:, ::-1]) for image in sample["images"]]
        for image, mirrored in zip(sample["images"], flipped):
            assert mirrored or np.array_equal(image, straight)
        assert sample["captions"] == [captions[flipped[1]], captions[flipped[0]]]
        seen.add(tuple(flipped))
    assert len(seen) == 4


def test_caption_views(two_photos):
    """The same caption twice, two of the photo, or one and its back-translation by either way."""
    captions, rng = two_photos.all_captions(), np.random.default_rng(0)
    both = [[f"{by} {caption}" for caption in captions] for by in ("fr", "de")]
    translations = [common.Lists([["of another photo"] * 3, own], common.STRINGS) for own in both]

    def pairs(kind, data=two_photos, index=0, given=()):
        samples = samples_of(data, given, caption_views=kind)
        return {tuple(samples.two_captions(index, rng)) for _ in range(120)}

    assert pairs("same") == {(caption, caption) for caption in captions}
    assert pairs("sibling") == {(a, b) for a in captions for b in captions if a != b}
    translated = {(caption, f"{by} {caption}") for caption in captions for by in ("fr", "de")}
    second = two_photos.select([0, 0]), 1
    assert pairs("backtranslation", *second, translations) == translated
    assert pairs("sibling", captioned(["a dog"])) == {("a dog", "a dog")}
    assert pairs("sibling", index=1) == {("", "")}


def rank(right, wrong):
    """Equal similarities share the mean of their places."""
    return rankdata([-right, *(-value for value in wrong)])[0]


def literal_scores(similarity, image_of_caption):
    """Tab. 7: an image's rank is that of its best caption"""
    owners, to_text, to_image = np.array(image_of_caption), [], []
    similarity = np.array(similarity)
    for i, row in enumerate(similarity):
        to_text.append(rank(row[owners == i].max(), row[owners != i]))
    for column, image in zip(similarity.T, owners):
        to_image.append(rank(column[image], np.delete(column, image)))
    scores = {}
    for way, ranks in (("image to text", to_text), ("text to image", to_image)):
        scores[way] = {f"R@{k}": 100 * np.mean(np.array(ranks) <= k) for k in (1, 5, 10)}
        scores[way]["median rank"] = math.floor(np.median(ranks))
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
    similarity[owners[0]] = math.nan  # comes last
    rank = mmcontrastive.retrieval_scores(similarity[:, :1], owners[:1])["text to image"]
    assert rank["median rank"] == 14


def photos_without(coco_folder, tmp_path, captions_in=("train", "val")):
    """The scenes in a .jsonl, some without captions, some without tags -> its path"""
    rows = []
    for split in ("train", "val"):
        data = common.caption_data("coco", str(coco_folder), f"{split}2017")
        for n, image in enumerate(data.images):
            row = {"image": image, "split": split}
            if n % 3 and split in captions_in:
                row["captions"] = data.captions[n][: 1 + n % 4]
            if n % 4:
                row["tags"] = [data.tag_names[tag] for tag in data.tags[n]]
            rows.append(row)
    path = tmp_path / "photos.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_step_written_out(coco_folder, tmp_path, monkeypatch):
    """From the state after three steps to the losses, keys and queues of the fourth"""
    run, path = tmp_path / "run", photos_without(coco_folder, tmp_path)
    command = ["mmcontrastive.py", "--data", path, "--recipe", "paper", "--output", run]
    command += [*TINY, *OWN["mmcontrastive"], "--seed", 3, "--iters", 4, "--tag-threshold", 0]
    command += ["--lambda-tag", 0.3, "--lambda-cc", 0.7, "--queue", 24, "--lm", "scratch"]
    for name, value in (("lm_layers", 1), ("lm_width", 64)):
        monkeypatch.setitem(mmcontrastive.RECIPES, name, (value, value, value))
    run_here([*command, "--keep-every", 3])
    old = torch.load(run / "model_3.pth", weights_only=True)["model"]
    new, row = checkpoint_in(run)["model"], metrics(run)[-1]
    args = mmcontrastive.get_args(list(map(str, command[1:])))
    train = common.caption_data(args.data, None, "train")
    tokenizer, config = mmcontrastive.read_caption_model(run / "caption_model")
    encoders = mmcontrastive.build_encoders(args, config)
    num_tags = len(train.tag_names)
    bn_group = mmcontrastive.batchnorm_group(args)
    model = mmcontrastive.MultimodalContrastive(encoders, 24, num_tags, bn_group)
    model.load_state_dict(old)
    model.to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for name, key in model.keys.named_parameters():
            query = old[f"queries.{name}"]
            key.copy_(0.9 * old[f"keys.{name}"] + (1 - 0.9) * query)
            torch.testing.assert_close(new[f"keys.{name}"], key.detach(), rtol=1e-5, atol=1e-7)
            assert not torch.equal(new[f"queries.{name}"], query)

    samples = mmcontrastive.TwoViews(train, [], args)
    order = np.random.default_rng([3, 1]).permutation(24)  # of epoch 1: three batches are one
    batch = mmcontrastive.collate(tokenizer, [samples[3, 1, int(n)] for n in order[:8]])
    tags, captioned = batch["tags"], batch["captioned"]
    assert not captioned.all() and not tags.any(1).all()
    args.amp = "off"
    torch.manual_seed((3 << 40) + 4)  # dropout
    with torch.no_grad():
        images_q, images_k = [mmcontrastive.augment_view(batch, n, args) for n in (0, 1)]
        keys = model.encode_keys(images_k, [batch["captions_k"]], (3, 4))
        queries = model(images_q, batch["captions_q"])

    given = {name: queue.keys[queue.valid] for name, queue in model.queues.items()}
    assert [len(given[name]) for name in ("tags", "image_inter", "caption_inter")] == [24, 24, 16]
    wanted = literal_losses(queries, keys, given, tags.float(), captioned, 0.07, 0.2, 0)
    for name, value in wanted.items():
        assert row[name] == pytest.approx(value, rel=1e-3)
    total = wanted["ii"] + 0.3 * wanted["tag"] + 0.7 * wanted["cc"]
    total += 0.1 * wanted["ic"] + 0.05 * wanted["ci"]  # Eq. 15
    assert row["loss"] == pytest.approx(total, rel=1e-3)
    # 24 photos were there before: the oldest give way.
    for name, key in {**keys, "tags": tags.float()}.items():
        close(new[f"queues.{name}.keys"][:8], key, 1e-4)
        close(new[f"queues.{name}.keys"][8:], old[f"queues.{name}.keys"][8:], 0)
        valid = captioned if name.startswith("caption") else torch.ones(8).bool()
        assert torch.equal(new[f"queues.{name}.valid"][:8], valid)


MOCO_V2 = "--lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --lambda-tag 0".split()


def test_moco_v2_reads_no_captions(tiny, tmp_path):
    """No caption encoder is built or written, no language model looked for; one loss is left."""
    flags = "--iters", 3, "--lm", "no/such/folder", "--caption-views", "backtranslation"
    output = run_here(tiny("mmcontrastive", tmp_path, *flags, *MOCO_V2))
    state = checkpoint_in(tmp_path)["model"]
    queues = {name.split(".")[1] for name in state if name.startswith("queues.")}
    assert "caption_model" not in files_in(tmp_path) and queues == {"image_intra"}
    assert not any("caption" in name or "inter" in name for name in state)
    for name, value in torch.load(tmp_path / "backbone.pth", weights_only=True).items():
        assert torch.equal(value, state[f"queries.image.trunk.0.{name}"])
    for row in metrics(tmp_path):
        assert row["loss"] == row["ii"] and not row.keys() & {"tag", "cc", "ic", "ci"}
    assert "retrieval among" not in output


@pytest.fixture(scope="module")
def translators(tiny_lm, tmp_path_factory):
    """The pattern of the folders of four MarianMT models of one layer, with random weights"""
    import transformers

    folder = tmp_path_factory.mktemp("marian")
    tokenizer, _ = mmcontrastive.read_caption_model(tiny_lm)
    pad, end = tokenizer.pad_token_id, tokenizer.sep_token_id
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "max_position_embeddings": 160}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
    config = transformers.MarianConfig(**sizes, **tokens, forced_eos_token_id=end, init_std=0.5)
    for n, pair in enumerate(("en-fr", "fr-en", "en-de", "de-en")):
        torch.manual_seed(n)
        transformers.MarianMTModel(config).save_pretrained(folder / pair)
        tokenizer.save_pretrained(folder / pair)
    return str(folder / "{}-{}")


def test_backtranslate_and_train_on_it(tiny, translators, coco_folder, tmp_path):
    """Killed half-way and started again it has every caption once, both ways; training reads it."""
    path = tmp_path / "run" / "backtranslations.jsonl"
    command = tiny("mmcontrastive", path.parent, "--caption-views", "backtranslation", "--iters", 3)
    data = common.caption_data("coco", str(coco_folder), "train2017")
    captions = data.all_captions()
    first = sorted(set(captions))[:70]
    done = [{"caption": caption, "fr": "not made", "de": "again"} for caption in first]
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in done))
    assert "captions have no back-translation: tools/backtranslate.py writes" in refusal(command)
    with open(path, "a") as file:
        file.write('{"caption": "half a li')

    flags = "--data", "coco", "--root", coco_folder, "--output", path
    run_here(["tools.backtranslate", *flags, "--translator", translators])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[:70] == done and len(rows) == len(set(captions))
    there, back = [
        backtranslate.Translator(translators.format(*pair), CPU, "off")
        for pair in (("en", "fr"), ("fr", "en"))
    ]
    equal = []
    for row in rows[-4:]:  # in a padded batch a close decision may round to another word
        [alone] = back(there([row["caption"]]))
        equal.append(row["fr"][:20] == alone[:20])
    assert sum(equal) >= 3 and any(row["fr"] != row["de"] for row in rows[70:])
    by_caption = {row["caption"]: row for row in rows}
    args = mmcontrastive.get_args([*map(str, command[1:]), "--backtranslations", str(path)])
    for by, found in zip(("fr", "de"), mmcontrastive.read_backtranslations(args, data)):
        for translated, row in zip(found, data.captions, strict=True):
            assert translated == [by_caption[caption][by] or caption for caption in row]
    run_here(command)
    assert len(metrics(path.parent)) == 3


def test_nouns_as_tags(tmp_path):
    """Words that are nouns more often than not, by frequency; a resumed run reads them again."""
    data = captioned(
        ["the dog runs left of a tree", "a dog's tree, dogs run"], ["a dog leaves"], []
    )
    args = SimpleNamespace(output=tmp_path, tags="nouns")
    tagged = nouns.tagged(args, data)
    assert tagged.tag_names == ["dog", "tree", "dogs"]
    assert list(tagged.tags) == [[0, 1, 2], [0], []]
    (tmp_path / "checkpoint.pth").touch()
    (tmp_path / "nouns.json").write_text('["runs"]')
    assert list(nouns.tagged(args, data).tags) == [[0], [], []]


def test_photos_without_captions(tiny, coco_folder, tmp_path):
    """Some in training; if none in validation has one, retrieval is not measured."""
    path = photos_without(coco_folder, tmp_path, captions_in=("train",))
    flags = "--data", path, "--lambda-tag", 0, "--iters", 2
    output = run_here(tiny("mmcontrastive", tmp_path / "run", *flags))
    assert "no validation photo has a caption: retrieval is not measured" in output
    assert result(tmp_path / "run") == {} and "tag" not in metrics(tmp_path / "run")[-1]
    output = run_here(tiny("mmcontrastive", tmp_path / "two", *flags, "--lambda-ii", 0))
    assert "8 of 24 photos have no caption: left out" in output


def test_init(tiny, tmp_path):
    """A kept model brings BERT and its tokenizer; one of MoCo-v2 has none, so --lm is read."""
    for name, flags in (("bert", ()), ("moco", MOCO_V2)):
        run_here(tiny("mmcontrastive", tmp_path / name, "--iters", 1, "--keep-every", 1, *flags))
    for name, lm in (("bert", "no/such/model"), ("moco", None)):
        flags = ["--lr", 0, "--text-lr", 0, "--iters", 1, "--init", tmp_path / name / "model_1.pth"]
        flags += ["--lm", lm] if lm else []
        run_here(tiny("mmcontrastive", tmp_path / f"{name}-2", *flags))
        first = torch.load(tmp_path / name / "model_1.pth", weights_only=True)["model"]
        second = checkpoint_in(tmp_path / f"{name}-2")["model"]
        for key in first:
            if key.startswith("queries.") and key.endswith(("weight", "bias")):
                assert torch.equal(first[key], second[key])
    assert refusal(
        tiny("mmcontrastive", tmp_path / "third", *flags, "--lm", "/no/model")
    ).startswith("error: --lm /no/model: give a BERT")


def test_learns(easy_scenes, tmp_path):
    """A sixth of the demo, on easier scenes: photos are found by captions."""
    flags = "--iters", 70, "--image-size", 32, "--queue", 128, "--momentum", 0.98
    run_here(["mmcontrastive.py", *flags, "--output", tmp_path])
    scores = result(tmp_path)["retrieval"]
    trained, chance = [scores[name]["text to image"]["R@10"] for name in ("trained", "random")]
    assert trained > chance + 5
