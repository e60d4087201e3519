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
import transformers
from conftest import CPU, captioned, checkpoint_in, files_in, metrics, photos_at, refusal, result
from conftest import one_split
from conftest import run_here
from PIL import Image
from scipy.stats import rankdata

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


TAU, MARGIN = 0.07, 0.2


def log_p(query, key, own, others):
    """The logarithm in Eqs. 3, 5 and 8, of one key among the own one and those of the queue"""
    total = sum(math.exp(dot(query, other) / TAU) for other in [own, *others])
    return math.log(math.exp(dot(query, key) / TAU) / total)


def eq5(query, own, others, tags, other_tags, epsilon):
    """Eq. 5; its positives are the own key and those of Eq. 4"""
    positives = [own]
    for key, theirs in zip(others, other_tags):
        if dot(tags, theirs) > epsilon:
            positives.append(key)
    return -sum(log_p(query, key, own, others) for key in positives) / len(positives)


def eq11(query, own, others):
    """Eqs. 11 and 14"""
    return sum(max(MARGIN - dot(query, own) + dot(query, key), 0) for key in others)


def literal_losses(queries, keys, given, tags, captioned, epsilon):
    """Means over the batch.  given: {name: the keys in its queue}, and the tags in theirs"""
    sums = dict.fromkeys(("ii", "tag", "cc", "ic", "ci"), 0.0)
    queries, keys, given = [
        {name: rows.tolist() for name, rows in table.items()} for table in (queries, keys, given)
    ]
    for n, own_tags in enumerate(tags.tolist()):
        q = {name: rows[n] for name, rows in queries.items()}
        k = {name: rows[n] for name, rows in keys.items()}
        own, others = k["image_intra"], given["image_intra"]
        sums["ii"] -= log_p(q["image_intra"], own, own, others)  # Eq. 3
        if any(own_tags):
            query, theirs = q["image_intra"], given["tags"]
            sums["tag"] += eq5(query, own, others, own_tags, theirs, epsilon)
        if captioned[n]:
            own, others = k["caption_intra"], given["caption_intra"]
            sums["cc"] -= log_p(q["caption_intra"], own, own, others)  # Eq. 8
            own, others = k["caption_inter"], given["caption_inter"]
            sums["ic"] += eq11(q["image_inter"], own, others)
            own, others = k["image_inter"], given["image_inter"]
            sums["ci"] += eq11(q["caption_inter"], own, others)  # Eq. 14
    return {name: total / len(tags) for name, total in sums.items()}


@pytest.mark.parametrize("filled", (0, 1, 7, 12))
def test_losses_are_those_of_the_paper(filled):
    """Eqs. 3, 5, 8, 11, 14 of six photos, some without tags or captions; the queues of 12 keys are
    empty, partly filled and full; gradients are finite."""
    dims = {"image_intra": 5, "caption_intra": 4, "image_inter": 6, "caption_inter": 6}
    vectors = lambda rows: {name: torch.randn(rows, dim).double() / 4 for name, dim in dims.items()}
    queries, keys, rows = vectors(6), vectors(6), vectors(filled)
    captioned, tags = torch.tensor([1, 0, 1, 1, 0, 1]).bool(), torch.rand(6, 5) < 0.7
    tags[[1, 4]] = False
    rows["tags"] = (torch.rand(filled, 5) < 0.7).double()
    rows["tags"][::3] = 0
    given, queues = {}, {}
    for name, row in rows.items():
        valid = torch.ones(filled).bool()
        if name.startswith("caption"):
            valid[1::4] = False
        given[name] = row[valid]
        queues[name] = mmcontrastive.Queue(12, row.size(1)).double()
        queues[name].keys += 3  # its empty slots hold what would be near to everything
        queues[name].enqueue(row, valid, iteration=1)
    queues["tags"].float()
    for query in queries.values():
        query.requires_grad_()
    args = SimpleNamespace(temperature=TAU, tag_threshold=2)
    args.lambda_ii = args.lambda_tag = args.lambda_cc = args.lambda_ic = 1.0
    given_keys = {**keys, "tags": tags, "captioned": captioned}
    found = mmcontrastive.contrastive_losses(queries, given_keys, queues, args)
    wanted = literal_losses(queries, keys, given, tags.double(), captioned, epsilon=2)
    assert {name: loss.item() for name, loss in found.items()} == pytest.approx(wanted, abs=1e-12)
    if filled > 1:
        assert min(wanted.values()) > 0.1 and abs(wanted["tag"] - wanted["ii"]) > 0.01
    sum(found.values()).backward()
    for name, query in queries.items():
        assert query.grad.isfinite().all()
        assert (query.grad.abs().amax() > 1e-3) == bool(filled)
        assert name == "image_intra" or not query.grad[~captioned].any()


def test_which_losses_there_are():
    """Those whose weight is not 0, each with its spaces; ii is logged beside tag."""
    lambdas = {"lambda_ii": 0, "lambda_tag": 0, "lambda_cc": 0, "lambda_ic": 0}
    wanted = {
        "lambda_ii": ({"image_intra"}, {"ii"}),
        "lambda_tag": ({"image_intra"}, {"ii", "tag"}),
        "lambda_cc": ({"caption_intra"}, {"cc"}),
        "lambda_ic": ({"image_inter", "caption_inter"}, {"ic", "ci"}),
    }
    for name, (spaces, losses) in wanted.items():
        args = SimpleNamespace(arch="resnet18", mlp_hidden=16, intra_dim=6, inter_dim=4)
        args.temperature, args.tag_threshold = TAU, 0
        for other in lambdas:
            setattr(args, other, float(other == name))
        encoders = mmcontrastive.build_encoders(args, small_config())
        num_tags = 3 if name == "lambda_tag" else 0
        model = mmcontrastive.MultimodalContrastive(encoders, 16, num_tags)
        assert model.queues.keys() - {"tags"} == spaces
        vectors = {space: torch.randn(8, 6 if "intra" in space else 4) for space in spaces}
        given = {"tags": torch.ones(8, num_tags).bool(), "captioned": torch.ones(8).bool()}
        found = mmcontrastive.contrastive_losses(vectors, vectors | given, model.queues, args)
        assert found.keys() == losses


def small_config():
    bert = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(**bert, **dropout, intermediate_size=24)


def tiny_model(bn_group=8):
    """K = 16, spaces of 6 (intra) and 4 (inter) dimensions, no dropout"""
    torch.manual_seed(0)
    config = small_config()
    args = SimpleNamespace(arch="resnet18", mlp_hidden=16, intra_dim=6, inter_dim=4)
    args.lambda_ii = args.lambda_cc = args.lambda_ic = 1.0
    encoders = mmcontrastive.build_encoders(args, config, bn_group)
    return mmcontrastive.MultimodalContrastive(encoders, 16, num_tags=3)


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
    photos, visible = torch.randn(8, 3, 64, 64), torch.rand(8, 5) < 0.7
    visible[:, 0] = True
    captions = torch.stack([torch.randint(30, (8, 5)), visible])
    queries = by_hand(model.queries, photos, captions)  # Eqs. 1, 6, 9, 12
    sizes = {"image_intra": 6, "caption_intra": 6, "image_inter": 4, "caption_inter": 4}
    assert {name: query.size(1) for name, query in queries.items()} == sizes
    close(model(photos, captions), queries, 1e-4)
    keys = by_hand(model.keys, photos, captions)  # Eqs. 2, 7, 13, 10
    for seed in (0, 1):
        close(model.encode_keys(photos, [captions], seed), keys, 1e-4)


@torch.no_grad()
def test_captions_do_not_attend_to_padding():
    """BERT's pooled output of each caption is what it gives for that caption alone."""
    trunk = mmcontrastive.CaptionTrunk(small_config()).eval()
    tokens, lengths = torch.randint(1, 30, (3, 6)), (6, 2, 4)
    visible = torch.arange(6) < torch.tensor(lengths)[:, None]
    vectors = trunk(torch.stack([tokens, visible.long()]))
    for row, length, vector in zip(tokens, lengths, vectors):
        alone = trunk.bert(input_ids=row[None, :length]).pooler_output[0]
        close(vector, alone)


@pytest.mark.parametrize(
    "queue, photos, size", [(64, 1000, 64), (70, 1000, 64), (1000, 37, 32), (8, 8, 8)]
)
def test_queues_fit_the_data(queue, photos, size, capsys):
    """A multiple of the batch, and at most one key per photo; another size is said."""
    args = SimpleNamespace(queue=queue, batch_size=8)
    assert mmcontrastive.fit_queue(args, photos) == size
    said = f"queues of {size} keys instead of {queue}" in capsys.readouterr().out
    assert said == (size != queue)


def test_photos_of_the_retrieval(coco_folder, monkeypatch):
    """Tab. 7: among 1,000 photos of the validation split, or all; here five, by the seed"""
    assert mmcontrastive.RETRIEVAL_IMAGES == 1000
    monkeypatch.setattr(mmcontrastive, "RETRIEVAL_IMAGES", 5)
    data = one_split("coco", str(coco_folder), "val2017")
    one, other = [mmcontrastive.retrieval_photos(data, seed) for seed in (0, 1)]
    assert len(one) == len(other) == 5 and list(one.images) != list(other.images)


@torch.no_grad()
def test_groups_have_batch_statistics_of_their_own():
    """Shuffled batch norm: each photo's query and key are those of its group of two, alone."""
    model, plain, photos = tiny_model(bn_group=2), tiny_model(), torch.randn(8, 3, 64, 64)
    order = np.random.default_rng(5).permutation(8).tolist()
    keys, whole = model.encode_keys(photos, [None], 5), plain.keys["image"](photos)
    queries = model(photos, None)
    for start in range(0, 8, 2):
        group = order[start : start + 2]
        close({name: keys[name][group] for name in keys}, plain.keys["image"](photos[group]))
        group = [start, start + 1]  # the queries' groups are not drawn [public code of MoCo]
        alone = plain.queries["image"](photos[group])
        close({name: queries[name][group] for name in queries}, alone)
    assert (keys["image_intra"] - whole["image_intra"]).abs().max() > 0.01


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


def samples_of(data, translations=(), **flags):
    """The samples of a run with these flags; without any nothing but flipping is random"""
    plain = {"colour_jitter": 0.0, "greyscale": 0.0, "blur": 0.0, "moco_v1": False}
    plain |= {"image_size": 24, "crop_min": 1.0, "caption_views": "sibling"}
    return mmcontrastive.TwoViews(data, translations, SimpleNamespace(**plain | flags))


@pytest.mark.parametrize("moco_v1", (False, True))
def test_two_views(moco_v1, tmp_path):
    """Two crops with colours of their own; a fifth is grey, half are blurred [MoCo-v2's code]"""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "0.png")
    data = captioned(["a dog"], images=photos_at(tmp_path / "0.png"))
    changed = {"crop_min": 0.2, "colour_jitter": 1.0, "greyscale": 0.2, "blur": 0.5}
    photos = samples_of(data, **changed, moco_v1=moco_v1)
    samples = [photos[0, epoch, 0] for epoch in range(400)]
    names = "images", "jitter", "sigma"
    views, jitter, sigma = (np.stack([sample[name] for sample in samples]) for name in names)
    assert (views[:, 0] != views[:, 1]).any((1, 2, 3)).all()
    grey, blurred = jitter[:, :, 2] == 0, sigma > 0
    assert (0.14 < grey.mean(0)).all() and (grey.mean(0) < 0.26).all()
    assert (jitter[grey][:, 3] == 0).all()
    assert (0.42 < blurred.mean(0)).all() and (blurred.mean(0) < 0.58).all()
    assert sigma[blurred].min() < 0.3 * 24 / 224 and 1.8 * 24 / 224 < sigma.max() < 2 * 24 / 224
    same = (jitter == common.NO_JITTER).all(2)  # v1 jitters each photo, v2 four fifths
    assert same.mean() == 0 if moco_v1 else 0.12 < same.mean() < 0.2
    hue = 0.4 if moco_v1 else 0.1
    assert 0.9 * hue < np.abs(jitter[:, :, 3]).max() <= hue
    assert (jitter[:, 0] != jitter[:, 1]).any(1).mean() > 0.9


def test_left_and_right_follow_the_photo_that_a_caption_meets(tmp_path):
    """The query photo meets the key's caption, the key photo the query's (Eqs. 9 to 13)."""
    straight, path = torch.randint(255, (24, 24, 3)).byte().numpy(), tmp_path / "0.png"
    Image.fromarray(straight).save(path)
    tags = {"tags": [["dog", "sky"]], "tag_names": ["dog", "tree", "sky"]}
    data = captioned(["a dog left of a tree"], images=photos_at(path), **tags)
    captions = {False: "a dog left of a tree", True: "a dog right of a tree"}
    seen = set()
    for epoch in range(40):
        sample = samples_of(data)[0, epoch, 0]
        flipped = [np.array_equal(image, straight[:, ::-1]) for image in sample["images"]]
        for image, mirrored in zip(sample["images"], flipped):
            assert mirrored or np.array_equal(image, straight)
        assert sample["captions"] == [captions[flipped[1]], captions[flipped[0]]]
        assert sample["captioned"] and sample["tags"].tolist() == [True, False, True]
        seen.add(tuple(flipped))
    assert len(seen) == 4


def test_caption_views():
    """The same caption twice, two of the photo, or one and its back-translation by either way."""
    captions, rng = ["the dog left of a tree", "a tree", "a dog"], np.random.default_rng(0)
    data = captioned(captions, [])
    both = [[f"{by} {caption}" for caption in captions] for by in ("fr", "de")]
    translations = [common.lists([["of another photo"] * 3, own]) for own in both]

    def pairs(kind, data=data, index=0, given=()):
        samples = samples_of(data, given, caption_views=kind)
        return {tuple(samples.two_captions(index, rng)) for _ in range(120)}

    assert pairs("same") == {(caption, caption) for caption in captions}
    assert pairs("sibling") == {(a, b) for a in captions for b in captions if a != b}
    translated = {(caption, f"{by} {caption}") for caption in captions for by in ("fr", "de")}
    assert pairs("backtranslation", data.select([0, 0]), 1, translations) == translated
    assert pairs("sibling", captioned(["a dog"])) == {("a dog", "a dog")}
    assert pairs("sibling", index=1) == {("", "")}


def literal_scores(similarity, image_of_caption):
    """Tab. 7: an image's rank is that of its best caption; equals share the mean of their places"""
    rank = lambda right, wrong: rankdata([-right, *-wrong])[0]
    similarity, owners, scores = np.array(similarity), np.array(image_of_caption), {}
    to_text = [rank(row[owners == i].max(), row[owners != i]) for i, row in enumerate(similarity)]
    to_image = [rank(row[i], np.delete(row, i)) for row, i in zip(similarity.T, owners)]
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
        data = one_split("coco", str(coco_folder), f"{split}2017", tags=True)
        for n, image in enumerate(data.images):
            row = {"image": image, "split": split}
            if n % 3 and split in captions_in:
                row["captions"] = data.captions[n][: 1 + n % 4]
            if n % 4:
                row["tags"] = data.tags[n]
            rows.append(row)
    path = tmp_path / "photos.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_step_written_out(tiny, coco_folder, tmp_path):
    """From the state after three steps to the losses, keys and queues of the fourth"""
    run, path = tmp_path / "run", photos_without(coco_folder, tmp_path)
    flags = "--recipe paper --seed 3 --iters 4 --keep-every 3 --queue 24 --tag-threshold 0"
    flags += " --lambda-tag 0.3 --lambda-cc 0.7"
    command = tiny("mmcontrastive", run, "--data", path, *flags.split())
    run_here(command)
    old = torch.load(run / "model_3.pth", weights_only=True)["model"]
    new, row = checkpoint_in(run)["model"], metrics(run)[-1]
    args = mmcontrastive.get_args(command[1:])
    train = one_split(args.data, None, "train")
    tokenizer, config = common.load_lm_tokenizer(run / "caption_model")
    encoders = mmcontrastive.build_encoders(args, config, bn_group=4)
    model = mmcontrastive.MultimodalContrastive(encoders, 24, len(train.tag_names))
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
    wanted = literal_losses(queries, keys, given, tags.float(), captioned, epsilon=0)
    wanted["loss"] = wanted["ii"] + 0.3 * wanted["tag"] + 0.7 * wanted["cc"]
    wanted["loss"] += 0.1 * wanted["ic"] + 0.05 * wanted["ci"]  # Eq. 15
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)
    # 24 photos were there before: the oldest give way.
    for name, key in {**keys, "tags": tags.float()}.items():
        close(new[f"queues.{name}.keys"][:8], key, 1e-4)
        close(new[f"queues.{name}.keys"][8:], old[f"queues.{name}.keys"][8:], 0)
        valid = captioned if name.startswith("caption") else torch.ones(8).bool()
        assert torch.equal(new[f"queues.{name}.valid"][:8], valid)


def test_moco_reads_no_captions(tiny, tmp_path):
    """No caption encoder is built or written, no language model looked for; one loss is left."""
    flags = "--lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --lambda-tag 0 --iters 3".split()
    flags += ["--lm", "no/such/folder", "--caption-views", "backtranslation"]
    printed = run_here(tiny("mmcontrastive", tmp_path, *flags))
    assert "downstream.search" not in printed and "validation after" not in printed
    state = checkpoint_in(tmp_path)["model"]
    queues = {name.split(".")[1] for name in state if name.startswith("queues.")}
    assert "caption_model" not in files_in(tmp_path) and queues == {"image_intra"}
    assert not any("caption" in name or "inter" in name for name in state)
    for name, value in torch.load(tmp_path / "backbone.pth", weights_only=True).items():
        assert torch.equal(value, state[f"queries.image.trunk.0.{name}"])
    for row in metrics(tmp_path):
        assert row["loss"] == row["ii"] and not row.keys() & {"tag", "cc", "ic", "ci"}
    assert result(tmp_path) == {"validation": {}}


def test_tags_that_a_loss_can_use(capsys):
    """Flips make turn_left wrong; with two tags a photo, none has more than two in common."""
    args = SimpleNamespace(lambda_tag=1.0, tags="annotated", tag_threshold=2, lambda_ii=1.0,
                           lambda_cc=0.0, lambda_ic=0.0)
    names = ["turn_left", "cat", "dog"]
    data = captioned([], [], tags=[["turn_left", "cat"], ["dog", "cat"]], tag_names=names)
    found, num_tags = mmcontrastive.usable_photos(args, data)
    assert (found.tag_names, num_tags, len(found)) == (["cat", "dog"], 2, 2)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1 tags are left out, because flips make them wrong: turn_left"
    assert second.startswith("no photo has more than 2 tags, so that Eq. 5 is the same as Eq. 3")
    args.tag_threshold = 1
    mmcontrastive.usable_photos(args, data.select([1]))
    assert "Eq. 5 is" not in capsys.readouterr().out


def marian_models(tiny_lm, folder):
    """Save four MarianMT models of one layer with random weights -> pattern of their folders."""
    tokenizer, _ = common.load_lm_tokenizer(tiny_lm)
    pad, end = tokenizer.pad_token_id, tokenizer.sep_token_id
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "max_position_embeddings": 160}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
    config = transformers.MarianConfig(**sizes, **tokens, forced_eos_token_id=end, init_std=0.5)
    for n, pair in enumerate(("en-fr", "fr-en", "en-de", "de-en")):
        torch.manual_seed(n)
        model = transformers.MarianMTModel(config)
        model.generation_config.max_length = 512  # as in those of the hub
        model.save_pretrained(folder / pair)
        tokenizer.save_pretrained(folder / pair)
    return str(folder / "{}-{}")


def test_backtranslate_and_train_on_it(tiny, tiny_lm, coco_folder, tmp_path, monkeypatch):
    """Killed half-way and started again it has every caption once, both ways; training reads it.

    Nothing is warned of at each batch.
    """
    monkeypatch.setattr(transformers.generation.utils.logger, "warning", pytest.fail)
    path = tmp_path / "run" / "backtranslations.jsonl"
    command = tiny("mmcontrastive", path.parent, "--caption-views", "backtranslation", "--iters", 3)
    data = one_split("coco", str(coco_folder), "train2017")
    captions = data.all_captions()
    first = sorted(set(captions))[:70]
    done = [{"caption": caption, "fr": "not made", "de": "again"} for caption in first]
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in done))
    assert "captions have no back-translation in" in refusal(command)
    with open(path, "a") as file:
        file.write('{"caption": "half a li')

    translators = marian_models(tiny_lm, tmp_path)
    flags = "--data", "coco", "--root", coco_folder, "--output", path
    run_here(["tools.backtranslate", *flags, "--translator", translators])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[:70] == done and len(rows) == len(set(captions))
    there = backtranslate.Translator(translators.format("en", "fr"), CPU, "off")
    back = backtranslate.Translator(translators.format("fr", "en"), CPU, "off")
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
    # What is learned from may not change under a run that resumes.
    assert "3 of 3 iterations are done" in run_here(command)
    rows[0]["fr"] = "made again, by another translator"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "holds a run with other data" in refusal(command)


def test_validates_while_it_trains(tiny, tmp_path):
    """metrics.jsonl has R@10 both ways at each validation; result.json is that of the last one."""
    output = run_here(tiny("mmcontrastive", tmp_path, "--iters", 5, "--validate-every", 2))
    rows = {row["iteration"]: row for row in metrics(tmp_path)}
    names = {"image_to_text_R@10", "text_to_image_R@10"}
    validated = {n for n, row in rows.items() if "validation_text_to_image_R@10" in row}
    assert validated == {2, 4, 5}
    content = result(tmp_path)
    assert content["validation"].keys() == names
    for name, score in content["validation"].items():
        assert score == rows[5][f"validation_{name}"]
    assert content["retrieval"]["trained"]["image to text"]["R@10"] == score_of(rows[5], "image")
    assert content["retrieval"]["trained"]["text to image"]["R@10"] == score_of(rows[5], "text")
    assert output.count("text to image, of 12 photos") == 3


def score_of(row, query):
    other = {"image": "text", "text": "image"}[query]
    return row[f"validation_{query}_to_{other}_R@10"]


def test_nouns_as_tags(tmp_path, capsys):
    """Words that are nouns more often than not, by frequency; a resumed run reads them again."""
    data = captioned(["a dog runs left of a tree", "a dog's tree, dogs run"], ["a dog leaves"], [])
    args = SimpleNamespace(output=tmp_path, tags="nouns")
    tagged = nouns.tagged(args, data)
    assert tagged.tag_names == ["dog", "tree", "dogs"]
    assert "TextBlob says which words are nouns, and" in capsys.readouterr().out
    assert list(tagged.tags) == [["dog", "tree", "dogs"], ["dog"], []]
    (tmp_path / "checkpoint.pth").touch()
    (tmp_path / "nouns.json").write_text('["runs"]')
    assert list(nouns.tagged(args, data).tags) == [["runs"], [], []]


def test_photos_without_captions(tiny, coco_folder, tmp_path):
    """Some in training; if none in validation has one, retrieval is not measured."""
    path = photos_without(coco_folder, tmp_path, captions_in=("train",))
    flags = "--data", path, "--lambda-tag", 0, "--iters", 2
    output = run_here(tiny("mmcontrastive", tmp_path / "run", *flags))
    assert output.count("no validation photo has a caption, so retrieval is not measured") == 1
    assert result(tmp_path / "run") == {"validation": {}}
    assert "tag" not in metrics(tmp_path / "run")[-1]
    output = run_here(tiny("mmcontrastive", tmp_path / "two", *flags, "--lambda-ii", 0))
    assert "8 of 24 photos have no caption: left out" in output


def test_what_is_left_out_is_said(tiny, coco_folder, tmp_path):
    """Eq. 5 of a .jsonl without tags, and the ends of captions of more than 64 tokens"""
    data = one_split("coco", str(coco_folder), "train2017")
    rows = [{"image": image, "captions": ["dog " * 70]} for image in data.images]
    path = tmp_path / "photos.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = "--data", path, "--recipe", "small", "--iters", 2, "--caption-views", "same"
    output = run_here(tiny("mmcontrastive", tmp_path / "run", *flags))
    assert "no photo has tags, so Eq. 5 is left out" in output
    # Two of the 24 photos are for validation: the first and the 21st.
    assert "22 of 22 captions are cut at 64 tokens" in output
    assert "tag" not in metrics(tmp_path / "run")[-1]


def test_learns(easy_scenes, tmp_path):
    """A sixth of the demo, on easier scenes: photos are found by captions."""
    flags = "--iters", 70, "--image-size", 32, "--queue", 128, "--momentum", 0.98
    run_here(["mmcontrastive.py", *flags, "--output", tmp_path])
    scores = result(tmp_path)["retrieval"]
    trained, chance = [scores[name]["text to image"]["R@10"] for name in ("trained", "random")]
    assert trained > chance + 5
