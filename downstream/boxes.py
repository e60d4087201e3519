"""Images with boxes: VOC, COCO, LVIS and the built-in scenes in one form, and their scores.

For detection.py. The form is that of COCO's json: what pycocotools scores.
"""

import argparse
import contextlib
import io
import json
import os
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch

import common
from common import ImageFiles, check, fail

SCORES = "AP", "AP50", "AP75"


class BoxData:
    """Images with boxes, in the form of COCO's json, into which every source is brought.

    content: {"images", "annotations", "categories"}.  images: ImageFiles or shapes.ShapeImages, in
    the same order.  source, path: where they are from.  at: names the entry that is read, see
    common.reading.  names: {category id: name}.  masks: whether there are polygons.  objects: JSON
    for each image, [[class from 1, x, y, w, h, polygons], ...], without crowds and empty boxes.
    """

    def __init__(self, content, images, source, path=None, at=argparse.Namespace()):
        self.content, self.images, self.source, self.path = content, images, source, path
        self.ids = [image["id"] for image in content["images"]]
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.names = {category["id"]: category["name"] for category in categories}
        self.masks = any(row.get("segmentation") for row in content["annotations"])
        classes = {category: k for k, category in enumerate(self.names, 1)}
        objects = {image: [] for image in self.ids}
        for at.entry, image in enumerate(content["images"]):
            if self.masks and not {"height", "width"} <= image.keys():
                raise ValueError("an image without height or width, which masks want")
        for at.entry, row in enumerate(content["annotations"]):
            row.setdefault("iscrowd", 0)
            if not {"id", "area"} <= row.keys() or self.masks and not row["segmentation"]:
                raise ValueError("no id, area or segmentation")  # the scores will want them
            x, y, w, h = map(float, row["bbox"])
            if row["iscrowd"] and not row.get("difficult"):
                continue  # difficult objects of VOC are trained on [Detectron2]
            polygons = row["segmentation"] if self.masks else []
            if not isinstance(polygons, list):
                raise ValueError("the segmentation of one object must be a list of polygons")
            polygons = [p for p in polygons if len(p) >= 6 and len(p) % 2 == 0]
            if min(w, h) > 0.01 and bool(polygons) == self.masks:
                objects[row["image_id"]].append([classes[row["category_id"]], x, y, w, h, polygons])
        self.objects = common.PackedStrings(map(json.dumps, objects.values()))

    def __len__(self):
        return len(self.images)

    def objects_of(self, i):
        return json.loads(self.objects[i])

    def digest(self):
        """A checksum of classes and objects"""
        return zlib.crc32(json.dumps(self.names).encode(), self.objects.digest())


def load(name, root, split):
    """One split of "shapes", "voc", "coco" or "lvis" -> BoxData"""
    if name == "shapes":
        return shapes_objects(split)
    root = root or f"datasets/{name}"
    data = voc_objects(root, split) if name == "voc" else coco_objects(name, root, split)
    check(len(data), f"--data {name}: the split {split} holds no image")
    data.images.check_files()
    return data


COCO = "COCO's or LVIS's json: images, categories, annotations with id, bbox, area, segmentation"
VOC = "a VOCdevkit with VOC2007/, VOC2012/; splits as 2007_test, 2007_trainval+2012_trainval"


def coco_objects(name, root, split):
    """annotations/instances_{split}.json or lvis_v1_{split}.json, images beside it"""
    file = f"lvis_v1_{split}.json" if name == "lvis" else f"instances_{split}.json"
    path = os.path.join(root, "annotations", file)
    with common.reading(path, COCO) as at:
        content = json.loads(Path(path).read_bytes())
        if name == "lvis":  # of both of COCO's folders: .../train2017/000000391895.jpg
            files = [image["coco_url"].split("/")[-2:] for image in content["images"]]
        else:
            files = [(split, image["file_name"]) for image in content["images"]]
        images = ImageFiles(os.path.join(root, *file) for file in files)
        return BoxData(content, images, name, path, at)


def voc_objects(root, split):
    """Annotations/*.xml of the images in ImageSets/Main/{list}.txt, of one year or several

    A difficult object becomes a crowd, which pycocotools ignores: see plain_iou.
    """
    images, rows = ImageFiles(), []
    for part in split.split("+"):
        year, _, listed = part.partition("_")
        folder = Path(root, f"VOC{year}")
        path = folder / "ImageSets" / "Main" / f"{listed}.txt"
        with common.reading(path, VOC):
            names = path.read_text().split()
        for name in common.progress(names, desc=part, unit=" files", leave=False):
            images.append(str(folder / "JPEGImages" / f"{name}.jpg"))
            path = folder / "Annotations" / f"{name}.xml"
            with common.reading(path, "VOC's annotation of a photo") as at:
                found = ElementTree.parse(path).getroot().findall("object")
                for at.entry, element in enumerate(found):
                    # From 1 on: in annotation ids pycocotools takes 0 for no match.
                    row = {"id": len(rows) + 1, "image_id": len(images)}
                    rows.append(row | voc_object(element))
    classes = sorted({row["category_id"] for row in rows})
    content = {"images": [{"id": n + 1} for n in range(len(images))], "annotations": rows}
    content["categories"] = [{"id": name, "name": name} for name in classes]
    return BoxData(content, images, "voc")


def voc_object(element):
    """An <object> of VOC -> what COCO's json says of it"""
    left, top, right, bottom = (
        float(element.find(f"bndbox/{edge}").text) for edge in ("xmin", "ymin", "xmax", "ymax")
    )
    box = [left - 1, top - 1, right - left + 1, bottom - top + 1]  # pixels count from 1
    difficult = int(element.findtext("difficult", "0"))
    row = {"category_id": element.find("name").text, "bbox": box, "area": box[2] * box[3]}
    return {**row, "iscrowd": difficult, "difficult": difficult}


def shapes_objects(split, side=96):
    """The built-in scenes, which are drawn at 96 px; of the validation split the first 500"""
    import shapes

    check(split in shapes.SPLITS, f'--data shapes has the splits "train" and "val", not "{split}"')
    scenes = shapes.SPLITS[split][: 500 if split == "val" else None]
    rows = []
    for scene in scenes:
        for found in shapes.objects_of(scene):
            left, top, _, _ = (side * edge for edge in found.box)
            width = 2 * side * found.radius
            row = {"bbox": [left, top, width, width], "area": width**2}
            row |= {"id": len(rows) + 1, "category_id": shapes.SHAPES.index(found.shape)}
            rows.append({**row, "image_id": scene})
    content = {"images": [{"id": scene} for scene in scenes], "annotations": rows}
    content["categories"] = [{"id": k, "name": name} for k, name in enumerate(shapes.SHAPES)]
    return BoxData(content, shapes.ShapeImages(scenes), "shapes")


def training_rows(data, seed):
    """The images with objects, on LVIS some of them several times -> list of indices"""
    rows = [i for i in range(len(data)) if data.objects_of(i)]
    check(rows, "the training split holds no image with objects: check --train-split")
    return repeated(rows, data, seed) if data.source == "lvis" else rows


def repeated(rows, data, seed, threshold=0.001):
    """LVIS's class resampling [VirTex App. A.3]: an image comes max(1, sqrt(threshold / f)) times

    f: the share of the images that show its rarest class. Fractions are drawn, once [ours].
    """
    present = [{found[0] for found in data.objects_of(i)} for i in rows]
    images = Counter(label for labels in present for label in labels)
    f = np.array([min(images[label] for label in labels) for labels in present]) / len(data)
    times = np.maximum(1, np.sqrt(threshold / f)) + np.random.default_rng(seed).random(len(rows))
    return np.repeat(rows, times.astype(int)).tolist()


def read_photo(images, i):
    """-> PIL image, not turned by its EXIF tag: boxes are those of the pixels as they are stored"""
    try:
        return images.open(i).convert("RGB")
    except Exception as error:  # PIL and its formats raise a dozen kinds
        raise common.Unreadable(images[i]) from error


def sample(data, rows, index, rng):
    """One image with its objects, mirrored at random; without them if rng is None

    -> {"image": uint8 (3, H, W), "target": torchvision's, image_id counts the images of data}
    """
    from pycocotools import mask

    i = rows[index]
    pixels, target = np.asarray(read_photo(data.images, i)), {"image_id": torch.tensor(i)}
    if rng is not None:
        (height, width, _), objects = pixels.shape, data.objects_of(i)
        step = rng.choice((1, -1))
        pixels = pixels[:, ::step]
        boxes = torch.tensor([found[1:5] for found in objects])
        boxes[:, 2:] += boxes[:, :2]
        if step < 0:
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        target |= {"boxes": boxes, "labels": torch.tensor([found[0] for found in objects])}
        if data.masks:
            parts = [mask.frPyObjects(found[5], height, width) for found in objects]
            masks = np.stack([mask.decode(mask.merge(part))[:, ::step] for part in parts])
            target["masks"] = torch.from_numpy(masks)
    return {"image": torch.from_numpy(pixels.transpose(2, 0, 1).copy()), "target": target}


def collate(samples):
    """-> lists, for images differ in size"""
    unreadable = [path for sample in samples for path in sample["unreadable"]]
    images, targets = [s["image"] for s in samples], [s["target"] for s in samples]
    return {"images": images, "targets": targets, "unreadable": unreadable}


# ---------------------------------------------------------------------------------------- scores


def score(val, found):
    """Rows of detect -> {"AP", "AP50", "AP75"} in percent, with masks also {"mask AP", ...}"""
    scores = dict(zip(SCORES, average_precision(val, found, "bbox")))
    if val.masks:
        scores |= zip([f"mask {name}" for name in SCORES], average_precision(val, found, "segm"))
    return scores


def lvis_package():
    try:
        from lvis import LVIS, LVISEval, LVISResults
    except ImportError:
        fail("LVIS is scored by its own package: pip install lvis")
    return LVIS, LVISEval, LVISResults


def average_precision(val, found, kind):
    """kind: "bbox" or "segm" -> AP, AP50, AP75 in percent, by pycocotools or, for LVIS, lvis"""
    if not found:
        return 0.0, 0.0, 0.0
    found = [dict(row) for row in found]  # both write into them
    if val.source == "lvis":
        LVIS, LVISEval, LVISResults = lvis_package()
        np.float = float  # which lvis 0.5.3 still calls it; numpy 1.24 has dropped the name
        truth = LVIS(val.path)
        evaluation = LVISEval(truth, LVISResults(truth, found, max_dets=300), kind)
        evaluation.run()
        return [100 * float(evaluation.get_results()[name]) for name in SCORES]

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = val.content
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found), kind)
        if val.source == "voc":
            evaluation.computeIoU = partial(plain_iou, evaluation)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * float(value) for value in evaluation.stats[:3]]


def plain_iou(evaluation, image, category):
    """COCOeval.computeIoU, -> (detections, objects), with crowds measured like other objects

    So any number of detections may match a difficult object without being counted, as a crowd in
    COCO's code, but must overlap it as much as VOC's own code wants.
    """
    from pycocotools import mask

    rows = sorted(evaluation._dts[image, category], key=lambda row: -row["score"])
    found = [row["bbox"] for row in rows[: evaluation.params.maxDets[-1]]]
    objects = [row["bbox"] for row in evaluation._gts[image, category]]
    return mask.iou(found, objects, [0] * len(objects))
