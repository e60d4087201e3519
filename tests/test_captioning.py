"""downstream/captioning.py: beam search and attention written out, official checkpoints, use."""

import json
import sys
from unittest.mock import MagicMock

import pytest
import torch
import torchvision
from conftest import NEEDS_PICTURES, WIDTH, checkpoint_in, random_weights, refusal, result, run_here
from conftest import one_split
from test_virtex import OfficialHead, captions_of, logits_of, random_features, tiny_model
from torch import nn

import virtex
from downstream import captioning
from virtex import EOS, PAD, SOS, UNK


def slow_beam_search(head, image_features, beams, max_length):
    """One photo, one hypothesis after the other: the best of all that grew by a token or ended"""
    hypotheses = [(0.0, [SOS])]
    for step in range(max_length - 1):
        grown = []
        for score, row in hypotheses:
            if row[-1] == EOS:
                grown.append((score, row))
                continue
            logits = logits_of(head, image_features, torch.tensor([row]))[0, -1]
            log_p = logits.log_softmax(-1).tolist()
            new = [(score + p, [*row, k]) for k, p in enumerate(log_p) if k != row[-1]]
            grown += sorted(new, reverse=True)[: 2 if step else None]  # [official code]
        hypotheses = sorted(grown, reverse=True)[:beams]
    return hypotheses[0]


@torch.no_grad()
def test_beam_search_written_out():
    """What ended keeps its score, log p of Eq. 1, and its place. One beam is greedy decoding."""
    head, features = tiny_model("captioning", max_length=9).textual, random_features(20, 5, 2, 2)
    random_weights(head, 0.3)  # what it says differs
    image_features = head.project(3 * features)
    for beams in (1, 2, 4):
        tokens, scores = captioning.beam_search(head, image_features, beams)
        lengths = set()
        for i, caption in enumerate(tokens.tolist()):
            score, row = slow_beam_search(head, image_features[i : i + 1], beams, max_length=9)
            assert caption == row + [PAD] * (len(caption) - len(row))
            assert scores[i].item() == pytest.approx(score, abs=1e-5)
            lengths.add(len(row))
    assert len(lengths) > 2, "too easy to mean anything"


@torch.no_grad()
def test_word_attention_is_that_of_torch():
    """Sec. 4.4: the last layer's over the image, the mean over heads and over a word's tokens"""
    head, tokens = tiny_model().textual, torch.tensor([SOS, 4, 9, 6, 7, 10])
    image_features = head.project(random_features(1, 5, 3, 3))
    first, last = head.transformer.layers
    future = torch.ones(6, 6).triu(1).bool()
    x = first(head.embedding(tokens[None]), image_features, tgt_mask=future)
    x = last.norm1(x + last.self_attn(x, x, x, attn_mask=future)[0])
    _, [weights] = last.multihead_attn(x, image_features, image_features)
    pieces = ["▁a", "▁sur", "f", "board", "▁rider"]
    words = captioning.word_attention(head, image_features, tokens, pieces)
    assert [word for word, _ in words] == ["a", "surfboard", "rider"]
    for (_, found), rows in zip(words, ([0], [1, 2, 3], [4])):  # row t predicts token t + 1
        torch.testing.assert_close(found, weights[rows].mean(0).view(3, 3))


@torch.no_grad()
def test_official_checkpoint_gives_the_official_logits(tmp_path):
    """To 1e-5, in both directions; without the backward one it is a model of forward captioning."""
    tokenizer_path = tmp_path / "tokenizer.model"
    tokenizer_path.write_bytes(virtex.train_tokenizer([*captions_of(range(200))], 150))
    torch.manual_seed(0)
    resnet, sizes = torchvision.models.resnet18(), (WIDTH, 150, 12)
    textual, backward = OfficialHead(*sizes), OfficialHead(*sizes)
    for module in ("visual_projection", "embedding", "output"):
        setattr(backward, module, getattr(textual, module))
    heads = {"textual": textual, "backward_textual": backward}
    official = nn.ModuleDict({"visual": nn.ModuleDict({"cnn": resnet}), **heads})
    textual.embedding.words.weight *= 0.1  # logits as large as a trained model's
    for parameter in official.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    cnn, images = nn.Sequential(*list(resnet.children())[:-2]), torch.randn(2, 3, 64, 64)
    for module in cnn.modules():
        module.momentum = 1.0  # the batch norms take on the statistics of these images
    cnn(images)
    features, state = cnn.eval()(images), official.eval().state_dict()
    tokens = [[SOS, 20, UNK, 60, 100, EOS, 0, 0], [SOS, 7, 149, 8, 30, 31, 32, EOS]]
    tokens, path = torch.tensor(tokens), tmp_path / "official.pth"
    for directions in (("textual", "backward_textual"), ("textual",)):
        torch.save({"model": state, "iteration": 500_000}, path)
        model, tokenizer, image_size = captioning.load_virtex(path, tokenizer_path)
        assert not model.training and image_size == 224 and tokenizer.get_piece_size() == 150
        assert model.textual.embedding.positions.num_embeddings == 12
        assert bool(model.backward_textual) == (len(directions) == 2)
        image_features = model.textual.project(model.visual["cnn"](images))
        for direction in directions:
            ours = logits_of(getattr(model, direction), image_features, tokens)
            expected = official[direction](features, tokens)
            assert expected.std() > 0.1
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        state = {k: v for k, v in state.items() if not k.startswith("backward_")}


def no_metrics(monkeypatch):
    """-> what stands for CIDEr, SPICE and their tokenizer: the score is always 0.123"""
    fake = MagicMock(__spec__=True)
    fake.tokenize = lambda all: {n: [row["caption"] for row in rows] for n, rows in all.items()}
    fake.compute_score.return_value = 0.123, None
    fake.Cider = fake.Spice = fake.PTBTokenizer = lambda: fake
    for name in ("", ".cider.cider", ".spice.spice", ".tokenizer.ptbtokenizer"):
        monkeypatch.setitem(sys.modules, f"pycocoevalcap{name}", fake)
    monkeypatch.setattr("shutil.which", lambda name: "java")
    return fake


def test_what_spice_lacks(monkeypatch, capsys):
    """It does not cost CIDEr."""
    row = {"image": "1.jpg", "caption": "a dog", "references": ["the dog", "dogs"]}
    fake = no_metrics(monkeypatch)
    fake.Spice = MagicMock(side_effect=OSError("no CoreNLP"))
    assert captioning.score([row, row]) == {"CIDEr": pytest.approx(12.3)}
    assert "SPICE was not measured: no CoreNLP" in capsys.readouterr().out
    truth, written = dict.fromkeys(range(2), row["references"]), dict.fromkeys(range(2), ["a dog"])
    fake.compute_score.assert_called_with(truth, written)


def test_cider_of_few_photos(monkeypatch, capsys):
    """Of one it is left out, of fewer than a hundred it is doubted."""
    row = {"image": "1.jpg", "caption": "a dog", "references": ["the dog", "dogs"]}
    no_metrics(monkeypatch)
    assert captioning.score([row]).keys() == {"SPICE"}
    assert "CIDEr is left out: of one photo it is 0" in capsys.readouterr().out
    for number, doubted in (99, True), (100, False):
        assert captioning.score(number * [row]).keys() == {"CIDEr", "SPICE"}
        printed = capsys.readouterr().out
        assert ("CIDEr of fewer than 100 photos means little" in printed) == doubted


@NEEDS_PICTURES
def test_caption_and_evaluate(tiny, coco_folder, tmp_path, monkeypatch):
    """By a model_N.pth of --keep-every: a line and a picture for each photo, or the metrics."""
    run_here(tiny("virtex", tmp_path, "--iters", 20, "--keep-every", 10, "--crop-min", 0.9))
    trained = checkpoint_in(tmp_path)["model"]
    model, _, image_size = captioning.load_virtex(tmp_path / "model_20.pth")
    state = model.state_dict()
    assert image_size == 32 and all(torch.equal(x, trained[key]) for key, x in state.items())
    output = tmp_path / "use"
    command = "downstream.captioning", "--weights", tmp_path / "model_10.pth", "--output", output
    photos, broken = sorted((coco_folder / "val2017").iterdir()), tmp_path / "broken.jpg"
    broken.write_bytes(photos[0].read_bytes()[:300])
    lines = run_here([*command, photos[0], broken, photos[1]]).splitlines()
    pictures = [output / f"1_{photos[0].stem}.png", output / f"3_{photos[1].stem}.png"]
    assert sorted(output.iterdir()) == pictures
    evaluate = [*command, "--evaluate", "--data", "coco", "--root", coco_folder]
    fake = no_metrics(monkeypatch)
    assert run_here(evaluate).count(" 12.3 on 12 images") == 2
    scores = result(output)
    assert scores["CIDEr"] == scores["SPICE"] == pytest.approx(12.3)
    written = json.loads((output / "captions.json").read_text())["captions"]
    assert [row["image"] for row in written] == list(map(str, photos))
    captions = [row["caption"] for row in written]
    data = one_split("coco", str(coco_folder), "val2017")
    truth = dict(enumerate(data.captions))
    fake.compute_score.assert_called_with(truth, {n: [text] for n, text in enumerate(captions)})
    assert lines == [
        f"{tmp_path / 'model_10.pth'}: trained on coco",
        f"cannot decode {broken} (Truncated File Read): left out",
        f"{photos[0]}: {captions[0]}  ({pictures[0]})",
        f"{photos[1]}: {captions[1]}  ({pictures[1]})",
    ]
    assert "give either photos or --evaluate" in refusal([*evaluate, photos[0]])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt-get install default-jre-headless" in refusal(evaluate)
