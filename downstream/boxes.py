"""Images with boxes: VOC, COCO, LVIS and the built-in scenes in one form, and their scores.

For detection.py. The form is COCO's JSON format, which pycocotools scores.
"""

import contextlib
import io
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch

import common
from common import image_files, require

SCORES = "AP", "AP50", "AP75"


class BoxData:
    """Images with boxes in COCO's JSON format, to which every source is converted.

    content: {"images", "annotations", "categories"}.  images: keys for common.open_image, in order.
    source, path: where they are from.  names: {category id: name}.  masks: whether there are
    polygons.  objects: JSON for each image, [[class from 1, x, y, w, h, polygons], ...], without
    COCO's crowds and without empty boxes.
    """

    def __init__(self, content, images, source, path=None):
        self.content = content
        self.images = images
        self.source = source
        self.path = path
        self.ids = [image["id"] for image in content["images"]]
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.names = {category["id"]: category["name"] for category in categories}
        self.masks = any(row.get("segmentation") for row in content["annotations"])
        class_of = {category: k for k, category in enumerate(self.names, 1)}
        objects = {image: [] for image in self.ids}
        for row in content["annotations"]:
            crowd = row.setdefault("iscrowd", 0)
            if crowd and not row.get("difficult"):
                continue  # difficult objects of VOC are trained on [Detectron2]
            x, y, w, h = map(float, row["bbox"])
            polygons = row["segmentation"] if self.masks else []
            polygons = [p for p in polygons if len(p) >= 6 and len(p) % 2 == 0]
            if min(w, h) > 0.01 and bool(polygons) == self.masks:
                label = class_of[row["category_id"]]
                objects[row["image_id"]].append([label, x, y, w, h, polygons])
        self.objects = np.array(list(map(json.dumps, objects.values())), common.STRINGS)

    def __len__(self):
        return len(self.images)

    def objects_of(self, i):
        return json.loads(self.objects[i])


# --------------------------------------------------------------------------------------- reading


def load(name, root, split):
    """One split of "shapes", "voc", "coco" or "lvis" -> BoxData"""
    if name == "shapes":
        return shapes_objects(split)
    root = root or f"datasets/{name}"
    data = voc_objects(root, split) if name == "voc" else coco_objects(name, root, split)
    require(len(data), f"--data {name}: the split {split} holds no image")
    return data


def coco_objects(name, root, split):
    """annotations/instances_{split}.json or lvis_{split}.json, images in folders beside it"""
    kind = "lvis" if name == "lvis" else "instances"
    path = Path(root, "annotations", f"{kind}_{split}.json")
    paths = []
    with common.error_context(f"{path} should be COCO's or LVIS's JSON file of boxes"):
        content = json.loads(path.read_bytes())
        for image in content["images"]:
            if name == "lvis":  # in both folders of COCO: .../train2017/000000391895.jpg
                folder, file = image["coco_url"].split("/")[-2:]
            else:
                folder, file = split, image["file_name"]
            paths.append(os.path.join(root, folder, file))
        return BoxData(content, image_files(paths), name, str(path))


def voc_objects(root, split):
    """Annotations/*.xml of the images in ImageSets/Main/{list}.txt, of one year or several

    A difficult object becomes a crowd, which pycocotools ignores: see plain_iou.
    """
    photos = []
    rows = []
    for part in split.split("+"):
        year, _, image_set = part.partition("_")
        folder = Path(root, f"VOC{year}")
        path = folder / "ImageSets" / "Main" / f"{image_set}.txt"
        with common.error_context("splits are named like 2007_test or 2007_trainval+2012_trainval"):
            names = path.read_text().split()
        for name in common.progress(names, desc=part, unit=" files", leave=False):
            photos.append(str(folder / "JPEGImages" / f"{name}.jpg"))
            path = folder / "Annotations" / f"{name}.xml"
            with common.error_context(f"{path} should be VOC's annotation of a photo"):
                for element in ElementTree.parse(path).getroot().findall("object"):
                    # Counted from 1: to pycocotools annotation id 0 means no match.
                    ids = {"id": len(rows) + 1, "image_id": len(photos)}
                    rows.append({**ids, **voc_object(element)})
    classes = sorted({row["category_id"] for row in rows})
    content = {
        "images": [{"id": n + 1} for n in range(len(photos))],
        "annotations": rows,
        "categories": [{"id": name, "name": name} for name in classes],
    }
    return BoxData(content, image_files(photos), "voc")


def voc_object(element):
    """An <object> of VOC -> its row in COCO's JSON format, without ids"""
    edges = "xmin", "ymin", "xmax", "ymax"
    left, top, right, bottom = (float(element.find(f"bndbox/{edge}").text) for edge in edges)
    width, height = right - left + 1, bottom - top + 1
    difficult = int(element.findtext("difficult", "0"))
    return {
        "category_id": element.find("name").text,
        "bbox": [left - 1, top - 1, width, height],  # VOC counts pixels from 1
        "area": width * height,
        "iscrowd": difficult,
        "difficult": difficult,
    }


def shapes_objects(split, side=96):
    """The built-in scenes, drawn at 96 px; only the first 500 of the validation split"""
    import shapes

    require(split in shapes.SPLITS, "--data shapes has the splits train and val")
    scenes = shapes.SPLITS[split][: 500 if split == "val" else None]
    rows = []
    for scene in scenes:
        for o in shapes.objects_of(scene):
            left, top, _, _ = o.box
            width = 2 * side * o.radius
            row = {
                "id": len(rows) + 1,
                "image_id": scene,
                "category_id": shapes.SHAPES.index(o.shape),
                "bbox": [side * left, side * top, width, width],
                "area": width**2,
            }
            rows.append(row)
    content = {
        "images": [{"id": scene} for scene in scenes],
        "annotations": rows,
        "categories": [{"id": k, "name": name} for k, name in enumerate(shapes.SHAPES)],
    }
    return BoxData(content, np.array(scenes, object), "shapes")


# --------------------------------------------------------------------------------------- samples


def training_rows(data, seed):
    """The images with objects, on LVIS some of them repeated -> list of indices"""
    rows = [i for i in range(len(data)) if data.objects_of(i)]
    require(rows, "the training split holds no image with objects: check --train-split")
    return repeat_rare(rows, data, seed) if data.source == "lvis" else rows


def repeat_rare(rows, data, seed, threshold=0.001):
    """LVIS's class resampling [VirTex App. A.3]: an image appears max(1, sqrt(threshold / f)) times

    f: the fraction of images with its rarest class. Fractions are rounded at random, once [ours].
    """
    labels_of = [{found[0] for found in data.objects_of(i)} for i in rows]
    num_images = Counter(label for labels in labels_of for label in labels)
    f = np.array([min(num_images[label] for label in labels) for labels in labels_of]) / len(data)
    repeats = np.maximum(1, np.sqrt(threshold / f))
    repeats += np.random.default_rng(seed).random(len(rows))
    return np.repeat(rows, repeats.astype(int)).tolist()


def read_photo(images, i):
    """-> PIL image, EXIF rotation ignored: boxes refer to the pixels as stored"""
    try:
        return common.open_image(images[i]).convert("RGB")
    except Exception as error:  # PIL's decoders raise a dozen kinds
        raise common.Unreadable(str(images[i])) from error


def make_sample(data, rows, index, rng):
    """One image with its objects, flipped at random; the image alone, not flipped, if rng is None

    -> {"image": uint8 (3, H, W), "target": as torchvision's; image_id is an index into data}
    """
    i = rows[index]
    pixels = np.array(read_photo(data.images, i))
    image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    target = {"image_id": torch.tensor(i)}
    if rng is not None:
        flipped = bool(rng.integers(2))
        target |= make_target(data, i, image, flipped)
        image = image.flip(2) if flipped else image
    return {"image": image, "target": target}


def make_target(data, i, image, flipped):
    """The objects of an image -> boxes (N, 4) as corners, labels (N,), masks (N, H, W) if any"""
    from pycocotools import mask

    _, height, width = image.shape
    objects = data.objects_of(i)
    labels = torch.tensor([found[0] for found in objects])
    boxes = torch.tensor([found[1:5] for found in objects])
    boxes[:, 2:] += boxes[:, :2]
    if flipped:
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    target = {"boxes": boxes, "labels": labels}
    if data.masks:
        parts = [mask.frPyObjects(found[5], height, width) for found in objects]
        masks = torch.tensor(np.stack([mask.decode(mask.merge(part)) for part in parts]))
        target["masks"] = masks.flip(2) if flipped else masks
    return target


def collate_fn(samples):
    """-> lists, because images differ in size"""
    images = [sample["image"] for sample in samples]
    targets = [sample["target"] for sample in samples]
    return {"images": images, "targets": targets}


# ---------------------------------------------------------------------------------------- scores


def result_rows(val, i, output):
    """The detections of one image (see detection.Detector) -> rows of COCO's results format"""
    from pycocotools import mask

    category_ids = list(val.names)
    output = {name: values.float().cpu().numpy() for name, values in output.items()}
    rows = []
    for n, (left, top, right, bottom) in enumerate(output["boxes"].tolist()):
        row = {
            "image_id": val.ids[i],
            "category_id": category_ids[int(output["labels"][n]) - 1],
            "bbox": [left, top, right - left, bottom - top],
            "score": float(output["scores"][n]),
        }
        if val.masks:
            rle = mask.encode(np.asfortranarray(output["masks"][n, 0] > 0.5))
            row["segmentation"] = {**rle, "counts": rle["counts"].decode()}
        rows.append(row)
    return rows


def score(val, results):
    """Rows of detect -> {"AP", "AP50", "AP75"} in percent, with masks also {"mask AP", ...}"""
    scores = dict(zip(SCORES, average_precision(val, results, "bbox")))
    if val.masks:
        masks = average_precision(val, results, "segm")
        scores |= {f"mask {name}": value for name, value in zip(SCORES, masks)}
    return scores


def average_precision(val, results, kind):
    """kind: "bbox" or "segm" -> AP, AP50, AP75 in percent, by pycocotools or, for LVIS, lvis"""
    if not results:
        return 0.0, 0.0, 0.0
    results = [dict(row) for row in results]  # both packages write into the rows
    if val.source == "lvis":
        from lvis import LVIS, LVISEval, LVISResults

        np.float = float  # for lvis 0.5.3: numpy 1.24 dropped it
        truth = LVIS(val.path)
        evaluation = LVISEval(truth, LVISResults(truth, results, max_dets=300), kind)
        evaluation.run()
        return [100 * float(evaluation.get_results()[name]) for name in SCORES]

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = val.content
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        if val.source == "voc":
            evaluation.params.recThrs = np.linspace(0, 1, 11)  # VOC07's, as Detectron2 on 2007_test
            evaluation.computeIoU = partial(plain_iou, evaluation)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * float(value) for value in evaluation.stats[:3]]


def plain_iou(evaluation, image, category):
    """COCOeval.computeIoU -> (detections, objects), but with plain IoU for crowds as well

    Any number of detections may match a difficult object without being counted, as with a crowd in
    COCO's code, but each must overlap it as much as in VOC's own code.
    """
    from pycocotools import mask

    rows = sorted(evaluation._dts[image, category], key=lambda row: -row["score"])
    detections = [row["bbox"] for row in rows[: evaluation.params.maxDets[-1]]]
    objects = [row["bbox"] for row in evaluation._gts[image, category]]
    return mask.iou(detections, objects, [0] * len(objects))
