"""extras/: shards and their index, odd pixels, Visual Genome, checkpoints of other authors"""

import argparse
import gzip
import io
import itertools
import json
import lzma
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import OWN, TINY, in_two_processes, kill_at, refusal, run_here
from conftest import one_split
from PIL import Image

import common
import eval_linear
from extras import checkpoints, nouns, shapes, shards
from tools import make_shards


def encoded(colour, mode="RGB", kind="JPEG"):
    file = io.BytesIO()
    Image.new(mode, (16, 12), colour).save(file, kind)
    return file.getvalue()


RED = encoded("red")


def write_tar(path, files):
    """files: {name: bytes}"""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    """Three shards of two photos"""
    for n in range(3):
        tagged = {"captions": [f"photo {n}", " ä  b\n", ""], "tags": ["dog", f"t{n}", "dog"]}
        files = {f"{n}a.json": json.dumps(tagged).encode(), f"{n}b.json": b'{"captions": []}'}
        files |= {f"{n}{x}.png": encoded(40 * n + 20 * k, "L", "PNG") for k, x in enumerate("ab")}
        write_tar(tmp_path / f"{n:02d}.tar", dict(sorted(files.items())))
    return tmp_path


def index_command(folder, *patterns):
    paths = [f"{folder}/{pattern}" for pattern in patterns]
    command = ["tools.make_shards", "--index-only", *paths, "--output", folder]
    return [*command, "--splits", "train", "val"]


def index(folder, *patterns):
    """tools/make_shards.py --index-only -> CaptionData of train and val"""
    run_here(index_command(folder, *patterns))
    return [one_split(str(folder), split=split) for split in ("train", "val")]


def test_what_shards_hold(folder):
    """Photos with their captions and tags; one shard is held out; splits have the same tags."""
    train, val = index(folder, "00.tar", "01.tar", "02.tar")
    assert (len(train), len(val)) == (4, 2)
    for data in (train, val):
        for i in range(len(data)):
            n, rest = divmod(int(np.asarray(data.open(data.images[i]))[0, 0]), 40)
            tags = set(data.tags[i])
            expected = ([], set()) if rest else ([f"photo {n}", "ä b"], {"dog", f"t{n}"})
            assert (data.captions[i], tags) == expected
            assert len(data.tags[i]) == len(tags)
    assert train.tag_names == val.tag_names and set(val.tag_names) == {"dog", "t0", "t1", "t2"}
    # Like other captioned photos, they can be selected and have other captions.
    rows = common.lists([["one"], [], ["two", "three"], []])
    kept = replace(train, captions=rows).captioned()
    assert kept.all_captions() == ["one", "two", "three"]
    assert sorted(train.all_captions()) == sorted(sum(train.captions, []))
    assert val.select([1]).all_captions() == val.captions[1]
    for data, rows in ((train.select([3, 0]), [3, 0]), (kept, [0, 2])):
        assert list(data.images) == [train.images[row] for row in rows]
        assert list(data.tags) == [train.tags[row] for row in rows]
        assert data.open is shards.open_in_shard
    assert train.select([3, 0]).captions[1] == train.captions[0]


def test_layouts_of_others(tmp_path):
    """img2dataset: captions in KEY.txt or KEY.json; other files, folders, odd names, macOS"""
    files = {
        "0.jpg": RED, "0.txt": b" a&amp;b cafe\xcc\x81 \n\nb\n", "0.json": b'{"caption": "b"}',
        "._0.jpg": b"\0\5\x16\7", "._b": b"AppleDouble", "caf\udce9\t.jpg": RED,
        "b/1.seg.png": b"no photo of ours", "b/1.JPEG": RED, "b/1.cls": b"7", "2.txt": b"lost",
        "3.jpg": RED, "3.json": b'{"caption": "a cat"}',
        "./x/ä b: 4.jpg": RED, "./x/ä b: 4.json": b'{"caption": null}',
    }
    folder = tmp_path / "photos in May, 1 + 2"
    folder.mkdir()
    for shard in "a at 3: b.tar", "b.tar":
        write_tar(folder / shard, files)
    printed = run_here(index_command(folder, "*.tar"))
    for split in "train", "val":
        data = one_split(str(folder), split=split)
        assert list(data.captions) == [["a&b caf\xe9", "b"], [], [], ["a cat"], []]
        assert {data.open(data.images[i]).size for i in range(5)} == {(16, 12)}
        assert data.tag_names == []
    assert "a at 3: b.tar: 2: ValueError: 0 photos among 2.txt; left out: 1\n" in printed
    assert "train: 3 photos have no caption in a KEY.txt or KEY.json\n" in printed


def test_keys_without_a_photo_or_with_two(folder):
    """They are counted. As WebDataset reads names, the suffix begins at the first dot.

    Hidden files are left out, as everywhere else; ./KEY.jpg and ../KEY.jpg are not hidden.
    """
    files = {"a.jpg": RED, "b.1.jpg": RED, "b.2.JPG": RED, "d.PGM": RED}
    files |= {"e.jp2": RED, "e.png": RED, "f.TXT": b"a", "f.jpg": RED, "f.txt": b"b"}
    files |= {"g.jpg": RED, "g.json": b'["a fern"]'}
    files |= {"./h.jpg": RED, "../i.jpg": RED, ".j.jpg": RED, "x/._k.jpg": RED, ".x/l.jpg": RED}
    files |= {"./x/.y/m.jpg": RED, "x.y/n.jpg": RED}
    write_tar(folder / "03.tar", files)
    photos, faults = make_shards.read_shard(folder / "03.tar")
    names = [place.split("\t")[1] for place, *_ in photos]
    assert names == ["a.jpg", "d.PGM", "./h.jpg", "../i.jpg", "x.y/n.jpg"]
    assert faults == [
        "b: ValueError: 0 photos among b.1.jpg, b.2.JPG",
        "e: ValueError: 2 photos among e.jp2, e.png",
        "f: ValueError: 1 photos among f.TXT, f.jpg, f.txt",
        "g: ValueError: g.json is not an object with captions",
    ]


def test_compressed_shards(folder):
    plain = (folder / "00.tar").read_bytes()
    for name, pack in ("x.tar.gz", gzip.compress), ("y.tar.xz", lzma.compress):
        (folder / name).write_bytes(pack(plain))
    assert "uncompressed" in refusal(index_command(folder, "x.tar.gz", "y.tar.xz"))


def test_which_captions_are_read(tmp_path):
    """Of three places, the first with a caption; others are said. "captions" are read as they are,
    also from a .jsonl; KEY.txt and "caption", of other tools, are cleaned.

    A line break in "caption" is no second caption, and a list has several; KEY.txt may be either
    written out by img2dataset, or captions of its own, one a line.
    """
    html = "<i>Rosa</i> &amp; thorn"
    files = {
        "a.json": b'{"captions": ["a fern"], "caption": "a moss"}',
        "b.json": b'{"captions": [], "caption": "a moss"}', "b.txt": b"<p></p>\n",
        "c.json": b'{"caption": "Red collar\\nwith bell"}', "c.txt": b"Red collar\nwith bell",
        "d.json": b'{"captions": ["a fern"]}', "d.txt": b"a tree\n",
        "e.json": b'{"caption": ["a red dog", "a\\ndog"]}',
        "f.json": b'{"caption": ["a fern"]}', "f.txt": b"['a fern']",
        "g.json": b'{"caption": "a fern by a moss"}', "g.txt": b"a fern\na moss",
        "h.json": b'{"caption": ["a fern", 3]}',
        "i.json": json.dumps({"captions": [html]}).encode(),
        "j.txt": html.encode(),
        "k.json": json.dumps({"caption": html}).encode(),
        **{f"{x}.jpg": RED for x in "abcdefghijkl"},
    }
    for shard in "0.tar", "1.tar":
        write_tar(tmp_path / shard, dict(sorted(files.items())))
    printed = run_here(index_command(tmp_path, "*.tar"))
    expected = [
        ["a fern"], ["a moss"], ["Red collar with bell"], ["a fern"], ["a red dog", "a dog"],
        ["a fern"], ["a fern", "a moss"], [html], ["Rosa & thorn"], ["Rosa & thorn"], [],
    ]
    assert list(one_split(str(tmp_path)).captions) == expected
    ours, other = '"captions" of KEY.json', '"caption" of KEY.json'
    for line in (
        f"1 photos have captions from {ours}, not those of {other}",
        f"4 photos have captions from {other}",
        f"1 photos have captions from {ours}, not those of KEY.txt",
        f"1 photos have captions from KEY.txt, not those of {other}",
        "1 photos have captions from KEY.txt, which lost HTML",
        f"1 photos have captions from {other}, which lost HTML",
        "1 photos have no caption in a KEY.txt or KEY.json",
        "11 photos, 12 captions, 0 tags",
    ):
        assert f"train: {line}\n" in printed
    assert "h: ValueError: ['a fern', 3] is not a list of texts" in printed

    (tmp_path / "1.jpg").write_bytes(RED)
    row = {"image": "1.jpg", "captions": [html], "split": "train"}
    (tmp_path / "photos.jsonl").write_text(json.dumps(row))
    flags = "--data", tmp_path / "photos.jsonl", "--splits", "train", "--output", tmp_path / "out"
    run_here(["tools.make_shards", *flags])
    assert list(one_split(str(tmp_path / "out")).captions) == [[html]]


def test_brackets_in_folders(tmp_path):
    """In the paths of --output, of --index-only, and of the message that names the latter."""
    folder = tmp_path / "roll [3]" / "x[a-b]"
    (tmp_path / "1.jpg").write_bytes(RED)
    (tmp_path / "a.jsonl").write_text('{"image": "1.jpg", "captions": ["a"], "split": "train"}')
    flags = "--data", tmp_path / "a.jsonl", "--splits", "train", "--output", folder
    run_here(["tools.make_shards", *flags])
    assert list(one_split(str(folder)).captions) == [["a"]]
    assert "holds shards of train: delete them or" in refusal(["tools.make_shards", *flags])
    (folder / "train.index").unlink()
    line = refusal(["virtex.py", "--data", folder, "--output", tmp_path / "run"])
    pattern = line.split("--index-only ")[1].strip("'").replace("*", "{split}-*")
    flags = "--index-only", pattern, "--splits", "train", "--output", folder
    run_here(["tools.make_shards", *flags])
    assert list(one_split(str(folder)).captions) == [["a"]]


def test_all_splits_are_read_before_the_first_is_written(tmp_path):
    (tmp_path / "1.jpg").write_bytes(RED)
    (tmp_path / "a.jsonl").write_text('{"image": "1.jpg", "split": "train"}')
    command = ["tools.make_shards", "--data", tmp_path / "a.jsonl", "--output", tmp_path / "out"]
    assert "no photo belongs to the split val" in refusal(command)
    assert not list((tmp_path / "out").iterdir())


def test_wrong_shards(folder):
    """What is broken is named, the rest is kept. One line: nothing to keep, moved, an old index"""
    assert "there is no" in refusal(index_command(folder, "*.tar", "03.tar"))
    for message, kept, text in (
        ("ValueError: the files of a are not adjacent", 0, {"a.txt": b"late"}),
        ("b: JSONDecodeError: Expecting ", 1, {"b.json": b"{"}),
        ("b: ValueError: 'dog' is not a list of texts", 1, {"b.json": b'{"captions": "dog"}'}),
        ("b: ValueError: [None] is not a list of texts", 1, {"b.json": b'{"tags": [null]}'}),
        ("b: UnicodeDecodeError: 'utf-8' codec can't", 1, {"b.txt": b"caf\xe9" * 999}),
    ):
        write_tar(folder / "03.tar", {"a.jpg": RED, "b.jpg": RED, **text})
        photos, [fault] = make_shards.read_shard(folder / "03.tar")
        assert fault.startswith(message) and len(fault) < 120 and len(photos) == kept
    start = (content := (folder / "03.tar").read_bytes()).index(b"b.jpg")
    cut = content[: start + 600], "ReadError: unexpected end of data"
    damaged = content[:start] + b"x" * 2048, f"ValueError: it breaks off at byte {start}"
    for content, message in cut, damaged:
        (folder / "03.tar").write_bytes(content)
        lines = run_here(index_command(folder, "*.tar")).splitlines()
        fault = f"{folder}/03.tar: {message}; left out: 1"
        assert {fault, "train: 5 photos, 4 captions, 4 tags"} <= {*lines}
    for name in ("03.tar", "04.tar"):
        write_tar(folder / name, {"a.txt": b"a dog"})
    line = refusal(index_command(folder, "03.tar", "04.tar"))
    assert "train can be read, see above. Expected: uncompressed tar files with KEY.jpg" in line
    index(folder, "0?.tar")
    train = ["virtex.py", "--data", folder, "--output", folder / "run", "--train-split"]
    assert "The folder's splits: train, val" in refusal([*train, "train2017"])
    write_tar(folder / "02.tar", {"a.txt": b"another dog", "a.jpg": RED})
    assert "02.tar is missing, or was written after it was indexed" in refusal([*train, "val"])
    for file in folder.glob("*.tar"):
        file.rename(file.with_suffix(".moved"))
    assert "was it moved or changed?" in refusal([*train, "train"])


def test_tags_that_are_not_given(tmp_path):
    """A line without "tags" says nothing of them, in shards as in the .jsonl."""
    lines = []
    for n, row in enumerate([{"tags": ["dog"]}, {"tags": []}, {}, {"tags": None}]):
        (tmp_path / f"{n}.jpg").write_bytes(RED)
        lines.append(json.dumps({"image": f"{n}.jpg", "split": "train", **row}))
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    data = "--data", tmp_path / "photos.jsonl", "--splits", "train", "--output", tmp_path
    run_here(["tools.make_shards", *data])
    for name in "photos.jsonl", "":
        data = one_split(f"{tmp_path}/{name}")
        assert data.tagged.tolist() == [True, True, False, False]
        assert data.select([2, 0]).tagged.tolist() == [False, True]
        assert len(eval_linear.label_data(f"{tmp_path}/{name}", None, "train")) == 2


def test_training_on_shards(few_scenes, tmp_path):
    """Made by tools/make_shards.py: killed and started again, a run ends with the same bits."""
    few_scenes(60, 12)
    data = tmp_path / "shards"
    run_here(["tools.make_shards", "--output", data, "--per-shard", 25])
    assert len([*data.glob("train-*.tar")]) == 3
    made, scenes = one_split(str(data)), one_split("shapes")
    assert list(made.captions) == list(scenes.captions)
    [one], [other] = (common.read_crops(d, 7, [common.centre_crop], 64) for d in (made, scenes))
    assert np.abs(one.astype(int) - other).mean() < 5  # JPEG
    flags = [*TINY, *OWN["virtex"], "--batch-size", 4, "--checkpoint-every", 2, "--iters", 6]
    train = ["virtex.py", "--data", data, *flags, "--output"]
    run_here([*train, tmp_path / "whole"])
    kill_at(5, [*train, tmp_path / "stopped"])
    assert "4 of 6 iterations are done" in run_here([*train, tmp_path / "stopped"])
    one, other = (tmp_path / name / "backbone.pth" for name in ("whole", "stopped"))
    assert one.read_bytes() == other.read_bytes()
    in_two_processes(run_here, [*train, tmp_path / "two"])


def test_copies_of_files(tmp_path):
    """Files are copied, of any format, with EXIF and 16 bits; broken ones are named."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGB", (200, 100), "red").save(tmp_path / "a.jpg", exif=exif)
    pixels = np.linspace(20_000, 30_000, 10_000).astype(np.uint16).reshape(100, 100)
    Image.fromarray(pixels).save(tmp_path / "b.png")
    (tmp_path / "c.jpg").write_bytes(RED[:300])
    frames = [Image.new("RGB", (16, 12), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "d.jpg", "MPO", save_all=True, append_images=frames[1:])
    Image.fromarray(pixels).save(tmp_path / "e.TIF")
    frames[0].save(tmp_path / "f.webp")
    rows = [{"image": name, "split": "train"} for name in ("a.jpg", "b.png", "c.jpg", "d.jpg")]
    rows += [{"image": name, "split": "val"} for name in ("e.TIF", "f.webp")]
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = "--data", tmp_path / "photos.jsonl", "--output", tmp_path / "shards"
    assert f"cannot decode {tmp_path}/c.jpg" in run_here(["tools.make_shards", *flags])
    copied = []
    for split in "train", "val":
        data = one_split(str(tmp_path / "shards"), split=split)
        copied += [data.open(place).fp.getvalue() for place in data.images]
    names = "a.jpg", "b.png", "d.jpg", "e.TIF", "f.webp"
    assert copied == [(tmp_path / name).read_bytes() for name in names]


def test_smaller_photos(tmp_path):
    """--size: the shorter side; upright; like PIL's; smaller and broken files as without it."""
    picture = shapes.draw(33, 400).crop((0, 0, 400, 300))
    picture.save(tmp_path / "a.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 270 degrees
    stored = picture.transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "b.jpg", quality=95, exif=turned)
    alpha = picture.copy()
    alpha.putalpha(0)  # white
    alpha.save(tmp_path / "c.png")
    picture.resize((160, 90)).save(tmp_path / "d.jpg", exif=turned)
    (tmp_path / "e.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:3000])
    names = "a.png", "b.jpg", "c.png", "d.jpg", "e.jpg"
    rows = [{"image": name, "split": "train"} for name in names]
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = "--data", tmp_path / "photos.jsonl", "--splits", "train", "--size", 100
    printed = run_here(["tools.make_shards", *flags, "--output", tmp_path / "shards"])
    assert f"cannot decode {tmp_path}/e.jpg" in printed
    data = one_split(str(tmp_path / "shards"))
    a, b, c, d = (data.open(place) for place in data.images)
    assert a.size == b.size == c.size == (133, 100)
    expected = np.asarray(picture.resize((133, 100), Image.BICUBIC), float)
    for image in a, b:
        assert image.format == "JPEG" and not image.getexif()
        assert np.abs(np.asarray(image) - expected).mean() < 3
    assert (np.asarray(c) == 255).all()
    assert d.fp.getvalue() == (tmp_path / "d.jpg").read_bytes()


def test_visual_genome(tmp_path):
    """Each phrase is a caption of its photo; the splits are fixed; others are refused."""
    images, regions = [], []
    for k in range(1, 41):
        path = tmp_path / f"VG_100K{'_2' if k % 2 else ''}/{k}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(RED)
        images.append({"image_id": k, "url": f"https://cs.stanford.edu{path}"})
        phrases = [{"phrase": f' region {n} of\n[{k}], "é" '} for n in range(k % 3 + 1)]
        regions.append({"id": k, "regions": [*phrases, {"phrase": " "}]})
    (tmp_path / "image_data.json").write_text(json.dumps(images))
    (tmp_path / "region_descriptions.json").write_text(json.dumps(regions))
    seen = {}
    for split in "train", "val":
        data = one_split("vg", str(tmp_path), split)
        seen[split] = [int(Path(path).stem) for path in data.images]
        assert data.tag_names == []
        for k, captions in zip(seen[split], data.captions):
            assert captions == [f'region {n} of [{k}], "é"' for n in range(k % 3 + 1)]
    assert sorted(seen["train"] + seen["val"]) == list(range(1, 41))
    assert seen["val"] == [5, 12, 25, 28]  # since the first version
    (tmp_path / "image_data.json").unlink()
    vg = ["virtex.py", "--data", "vg", "--root", tmp_path, "--output", tmp_path]
    assert "image_data.json" in refusal(vg)


# Source: the key under which the weights are, the backbone's prefix, what else is there.
OTHERS = {
    "torchvision": (None, "", "fc.weight fc.bias"),
    "virtex": ("model", "visual.cnn.", "textual.output.weight backward_textual.output.bias"),
    "tp": ("model", "backbone.", "head.2.weight"),
    "mmcontrastive": ("model", "queries.image.trunk.0.", "keys.image.trunk.0.conv1.weight"),
    "MoCo v2": ("state_dict", "module.encoder_q.", "module.encoder_q.fc.2.bias module.encoder_k.x"),
    "SwAV": (None, "module.", "module.projection_head.0.weight module.prototypes.weight"),
    "DINO": ("teacher", "backbone.", "head.mlp.0.weight head.last_layer.weight_v"),
    "Lightning": ("state_dict", "model.backbone.", "model.head.weight"),
    "compiled": ("model_state_dict", "_orig_mod.net.", "_orig_mod.head.weight"),
    "open_clip": ("state_dict", "module.visual.trunk.", "module.text.ln_final.weight"),
}


@pytest.mark.parametrize("key, prefix, more", OTHERS.values(), ids=OTHERS)
def test_checkpoints_of_others(key, prefix, more, tmp_path):
    """The backbone in them is found: its tensors, none of the heads. A message names the rest."""
    state = common.build_backbone("resnet18").state_dict()
    content = {prefix + name: x for name, x in state.items()}
    if prefix == "module.":  # files from before PyTorch 0.4.1
        content = {name: x for name, x in content.items() if "num_batches" not in name}
    content |= {name: torch.zeros(2) for name in more.split()} | {"a number": 1}
    if key:
        content = {key: content, "epoch": 1, "args": argparse.Namespace(lr=0.1), "student": {}}
    torch.save(content, tmp_path / "x.pth")
    loaded = checkpoints.load_backbone(tmp_path / "x.pth")
    assert loaded.arch == "resnet18"
    assert all(torch.equal(x, state[name]) for name, x in loaded.state_dict().items())
    torch.save(state | {"layer4.9.conv1.weight": torch.zeros(2)}, tmp_path / "x.pth")
    message = r"is not torchvision's resnet18, .*\['layer4.9.conv1.weight'\] differ"
    with pytest.raises(SystemExit, match=message):
        checkpoints.load_backbone(tmp_path / "x.pth")


def test_two_backbones_in_a_file(tmp_path, capsys):
    """timm's file has averaged weights, too; the line says which ones are loaded."""
    state = common.build_backbone("resnet18").state_dict()
    average = {f"module.{name}": 2 * x for name, x in state.items()}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    content = {"state_dict_ema": average, "optimizer": optimizer, "state_dict": state}
    torch.save(content, tmp_path / "x.pth")
    loaded = checkpoints.load_backbone(tmp_path / "x.pth").state_dict()
    assert torch.equal(loaded["conv1.weight"], state["conv1.weight"])
    assert capsys.readouterr().out == (
        f"{tmp_path}/x.pth: loaded state_dict, not state_dict_ema\n"
    )


@pytest.mark.parametrize("save", (torch.save, torch.jit.save))
def test_what_is_no_state_dict(save, tmp_path):
    """A whole module and TorchScript: how to save them instead"""
    module = torch.nn.Linear(2, 2)
    save(module if save is torch.save else torch.jit.script(module), str(tmp_path / "x.pth"))
    with pytest.raises(SystemExit, match=r"torch.save\(model.state_dict\(\), FILE\)"):
        checkpoints.load_backbone(tmp_path / "x.pth")


@pytest.mark.parametrize("spacy", (None, MagicMock(load=MagicMock(side_effect=OSError("E050")))))
def test_spacy_or_its_model_is_missing(spacy, monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    with pytest.raises(SystemExit, match="python -m spacy download en_core_web_sm"):
        next(nouns.tag_by_spacy([["a", "dog"]]))


def test_nouns_of_spacy(monkeypatch, tmp_path):
    """Words of two letters or more that are nouns more often than not, the most frequent first"""
    kinds = {"a": ["NOUN"], "dog": ["NOUN"], "left": ["NOUN"], "runs": ["VERB", "VERB", "NOUN"]}
    kinds |= {"rex": ["PROPN"], "park": ["NOUN", "NOUN", "VERB"], "big": ["ADJ"]}
    kinds = {word: itertools.cycle(tags) for word, tags in kinds.items()}

    def pipe(documents):
        for words in documents:
            yield [SimpleNamespace(text=word, pos_=next(kinds[word])) for word in words]

    documents = SimpleNamespace(Doc=lambda vocab, words: words)
    nlp = SimpleNamespace(vocab=None, pipe=pipe)
    spacy = SimpleNamespace(tokens=documents, load=lambda *given, **more: nlp)
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    captions = ["A big dog runs left.", "Rex runs, a dog runs", "park, park, park", "park dog park"]
    nouns.find_nouns(captions, "nouns-spacy", f"{tmp_path}/nouns.json")
    assert json.loads((tmp_path / "nouns.json").read_text()) == ["park", "dog", "left", "rex"]


def test_a_folder_without_an_index(tmp_path):
    """--data FOLDER says which tool makes what it needs."""
    (tmp_path / "1.jpg").write_bytes(RED)
    line = refusal(["virtex.py", "--data", tmp_path, "--output", tmp_path / "run"])
    assert f"KEY.jpg with captions in KEY.txt: python tools/to_jsonl.py {tmp_path}. " in line
    assert f"python tools/make_shards.py --index-only '{tmp_path}/*.tar'" in line
