"""What the tests share: the path of the scripts, the folder of the real data, small data sets in genuine layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common
import shapes

torch.set_num_threads(1)  # pictures of 32 pixels are not worth a second thread: waiting for it costs more than the work


class FeaturesAsGiven(torch.nn.Module):
    """In place of the backbone: images in, the same out."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, images):
        return images


@pytest.fixture
def real_data():
    """The folder with coco-mini, flickr8k and flowers, named by the environment variable CAPTION_DATA."""
    folder = os.environ.get("CAPTION_DATA")
    if not folder:
        pytest.skip("CAPTION_DATA is not set: it names the folder that holds coco-mini, flickr8k and flowers")
    return Path(folder)


def run_script(*command, **environment):
    """Run one of the scripts as a user would -> the finished process, its output as text."""
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def begun_with_other_data(folder):
    """Turn an ended run into one that was killed, and began with other captions or tags -> its checkpoint's path and bytes"""
    path = folder / "checkpoint.pth"
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "data": [number + 1 for number in checkpoint["data"]]}, path)
    (folder / "result.json").unlink()
    return path, path.read_bytes()


@pytest.fixture
def no_training(monkeypatch):
    """For commands that must be refused: should one be accepted the test fails here, instead of training for minutes."""

    def accepted(*_):
        raise AssertionError("the command was accepted, and training would begin")

    monkeypatch.setattr(common, "InfiniteSampler", accepted)


@pytest.fixture(scope="session")
def coco_folder(tmp_path_factory):
    """24 training and 12 validation scenes of the built-in data as JPEG files in COCO's layout, with instances."""
    root = tmp_path_factory.mktemp("coco")
    (root / "annotations").mkdir()
    for split, first, count in (("train2017", 0, 24), ("val2017", 1000, 12)):
        (root / split).mkdir()
        images, captions, instances = [], [], []
        for scene in range(first, first + count):
            name = f"{scene:012d}.jpg"
            shapes.draw_scene(scene).save(root / split / name)
            images.append({"id": scene, "file_name": name, "height": 96, "width": 96})
            captions += [{"id": len(captions) + n, "image_id": scene, "caption": c} for n, c in enumerate(shapes.describe_scene(scene))]
            instances += [{"id": n, "image_id": scene, "category_id": 10 * shapes.SHAPES.index(o.shape)} for n, o in enumerate(shapes.shapes_scene(scene))]
        categories = [{"id": 10 * k, "name": name} for k, name in enumerate(shapes.SHAPES)]
        write = lambda kind, content: (root / "annotations" / f"{kind}_{split}.json").write_text(json.dumps(content))
        write("captions", {"images": images, "annotations": captions})
        write("instances", {"images": images, "annotations": instances, "categories": categories})
    return root


@pytest.fixture(scope="session")
def tiny_lm(coco_folder, tmp_path_factory):
    """The folder of a BERT of one layer and 32 dimensions that has read the captions of `coco_folder` for a second."""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    captions = list(common.caption_data("coco", str(coco_folder), "train2017").captions)
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(captions, vocab_size=1000, min_frequency=2, show_progress=False)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    inputs, optimizer = tokenizer(captions, padding=True, return_tensors="pt"), torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        masked = (torch.rand(inputs["input_ids"].shape) < 0.15) & (inputs["input_ids"] > 4)
        labels = inputs["input_ids"].masked_fill(~masked, -100)
        optimizer.zero_grad()
        loss = model(inputs["input_ids"].masked_fill(masked, tokenizer.mask_token_id), inputs["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("lm")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
