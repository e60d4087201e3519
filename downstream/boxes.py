"""Photos with boxes: VOC, COCO, LVIS and the built-in scenes in one form; scores and pictures.

For detection.py. The form is COCO's JSON format, which pycocotools scores.
"""

import contextlib
import io
import json
from collections import Counter
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image, ImageDraw

import common
from common import fail
from downstream.pictures import photo_files
from extras import shapes

SCORES = "AP", "AP50", "AP75"


class BoxData:
    """Photos with boxes in COCO's JSON format, to which every source is converted.

    content: {"images", "annotations", "categories"}.  images: (N,) of paths, or of what `open`
    takes instead.  source, path: where they are from.  names: {category id: name}.  masks: whether
    there are polygons.  objects: JSON for each photo, [[class from 1, x, y, w, h, polygons], ...],
    without COCO's crowds and without empty boxes.
    """

    def __init__(self, content, images, source, path=None, open=Image.open):
        self.content = content
        self.images = images
        self.source = source
        self.path = path
        self.open = open
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
    if name == "voc":
        content, paths = voc_objects(root, split)
        return BoxData(content, photo_files(paths).images, name)
    kind = "lvis" if name == "lvis" else "instances"
    path = f"{root}/annotations/{kind}_{split}.json"
    content = common.read_json(path)
    paths = []
    for image in content["images"]:
        file = f"{split}/{image.get('file_name')}"
        if name == "lvis":  # in both folders of COCO: .../train2017/000000391895.jpg
            file = "/".join(image["coco_url"].split("/")[-2:])
        paths.append(f"{root}/{file}")
    return BoxData(content, photo_files(paths).images, name, path)


def voc_objects(root, split):
    """Annotations/*.xml of the photos in ImageSets/Main/{list}.txt, of one year or several

    A difficult object becomes a crowd, which pycocotools ignores: see plain_iou.
    -> {"images", "annotations", "categories"}, paths
    """
    paths, rows = [], []
    for part in split.split("+"):
        year, _, image_set = part.partition("_")
        folder = Path(root, f"VOC{year}")
        photo_list = folder / "ImageSets" / "Main" / f"{image_set}.txt"
        if not photo_list.is_file():
            fail(f"there is no {photo_list}: a split is 2007_test or 2007_trainval+2012_trainval")
        for name in photo_list.read_text().split():
            paths.append(str(folder / "JPEGImages" / f"{name}.jpg"))
            tree = ElementTree.parse(folder / "Annotations" / f"{name}.xml")
            for element in tree.getroot().findall("object"):
                # Counted from 1: to pycocotools annotation id 0 means no match.
                ids = {"id": len(rows) + 1, "image_id": len(paths)}
                rows.append({**ids, **voc_object(element)})
    classes = sorted({row["category_id"] for row in rows})
    content = {
        "images": [{"id": n + 1} for n in range(len(paths))],
        "annotations": rows,
        "categories": [{"id": name, "name": name} for name in classes],
    }
    return content, paths


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
    scenes = shapes.SPLITS.get(split) or fail(f"--data shapes has no split {split}")
    scenes = scenes[:500] if split == "val" else scenes
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
    images = np.array(scenes, object)  # of int
    return BoxData(content, images, "shapes", open=partial(shapes.draw, side=side))


# --------------------------------------------------------------------------------------- samples


def training_rows(data, seed):
    """The photos with objects, on LVIS some of them repeated -> list of indices"""
    rows = [i for i in range(len(data)) if data.objects_of(i)]
    if not rows:
        fail("the training split holds no photo with objects: see --train-split")
    return repeat_rare(rows, data, seed) if data.source == "lvis" else rows


def repeat_rare(rows, data, seed, threshold=0.001):
    """LVIS's class resampling [VirTex App. A.3]: a photo appears max(1, sqrt(threshold / f)) times

    f: the fraction of photos with its rarest class. Fractions are rounded at random, once [ours].
    """
    labels_of = [{found[0] for found in data.objects_of(i)} for i in rows]
    num_images = Counter(label for labels in labels_of for label in labels)
    f = np.array([min(num_images[label] for label in labels) for labels in labels_of]) / len(data)
    repeats = np.maximum(1, np.sqrt(threshold / f))
    repeats += np.random.default_rng(seed).random(len(rows))
    return np.repeat(rows, repeats.astype(int)).tolist()


class BoxPhotos(common.Photos):
    """Whole photos, in training with their objects and flipped at random

    A sample is {"image": uint8 (3, H, W), "image_id": index into data}, and as torchvision has
    them, boxes, labels and masks.
    """

    def __init__(self, data, rows):
        """rows: indices into data"""
        self.data = data
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def sample(self, index, rng):
        i = self.rows[index]
        try:  # EXIF rotation is ignored: boxes refer to the pixels as stored
            photo = self.data.open(self.data.images[i]).convert("RGB")
        except Exception as error:  # PIL's decoders raise a dozen kinds
            raise common.Unreadable(str(self.data.images[i])) from error
        image = torch.from_numpy(np.array(photo)).permute(2, 0, 1).contiguous()
        sample = {"image": image, "image_id": torch.tensor(i)}
        if rng is not None:
            flipped = bool(rng.integers(2))
            sample |= make_target(self.data, i, image, flipped)
            sample["image"] = image.flip(2) if flipped else image
        return sample


def make_target(data, i, image, flipped):
    """The objects of a photo -> boxes (N, 4) as corners, labels (N,), masks (N, H, W) if any"""
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


class Samples(list):
    """The samples of a batch, which cannot be stacked, because photos differ in size"""

    def to(self, device, **kwargs):
        return [{name: x.to(device, **kwargs) for name, x in sample.items()} for sample in self]


def collate(samples):
    return {"samples": Samples(samples)}


# ---------------------------------------------------------------------------------------- scores


def result_rows(val, i, output):
    """The detections of one photo (see detection.Detector) -> rows of COCO's results format"""
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


# -------------------------------------------------------------------------------------- pictures


def draw(val, results, path, side=320):
    """Draw eight validation photos, resized to squares, with the detections that score above 0.5"""
    from pycocotools import mask

    photos = BoxPhotos(val, range(len(val)))
    sheet = Image.new("RGB", (4 * side, 2 * side))
    for n in range(min(8, len(val))):
        sample = photos[n]
        photo = Image.fromarray(sample["image"].permute(1, 2, 0).numpy())
        scale = side / np.array(photo.size)
        photo = photo.resize((side, side))
        canvas = ImageDraw.Draw(photo)
        image_id = val.ids[sample["image_id"]]
        for row in results:
            if row["image_id"] != image_id or row["score"] <= 0.5:
                continue
            if val.masks:
                half = Image.fromarray(128 * mask.decode(row["segmentation"]))
                photo.paste("red", mask=half.resize((side, side)))
            x, y, w, h = row["bbox"] * np.tile(scale, 2)
            canvas.rectangle((x, y, x + w, y + h), outline="yellow", width=2)
            label = f"{val.names[row['category_id']]} {row['score']:.2f}"
            style = {"fill": "yellow", "font_size": 15, "stroke_width": 2, "stroke_fill": "black"}
            canvas.text((x + 4, y + 4), label, **style)
        sheet.paste(photo, (n % 4 * side, n // 4 * side))
    sheet.save(path)
