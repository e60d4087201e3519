"""Photos with boxes for detection.py: VOC, COCO, LVIS and the built-in scenes; scores; a picture"""

import contextlib
import io
import json
from collections import Counter
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

import common
from common import fail
from downstream import pictures
from extras import shapes, sources

SCORES = "AP", "AP50", "AP75"


class BoxData:
    """Photos with boxes in COCO's JSON format, which pycocotools scores; VOC is converted to it.

    content: {"images", "annotations", "categories"}.  images: (N,) of paths, or of what `open`
    takes instead.  source, path: where they are from.  names: {category id: name}.  masks: whether
    there are any.  objects: JSON for each photo, [[class from 1, x, y, w, h, segmentation], ...],
    without COCO's crowds and without empty boxes.
    """

    def __init__(self, content, images, source, path=None, open=Image.open):
        from pycocotools.coco import COCO

        self.content = content
        self.images = images
        self.source = source
        self.open = open
        self.ids = [image["id"] for image in content["images"]]
        self.sizes = [(image.get("width"), image.get("height")) for image in content["images"]]
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.names = {category["id"]: category["name"] for category in categories}
        class_of = {category: k for k, category in enumerate(self.names, 1)}
        objects = {image: [] for image in self.ids}
        coco = COCO()
        coco.imgs = {image["id"]: image for image in content["images"]}
        for number, row in enumerate(content["annotations"], 1):
            name = row.get("id", number)
            try:
                complete(row, number, coco)
                of_image, label = objects[row["image_id"]], class_of[row["category_id"]]
            except Exception as error:  # pycocotools raises several kinds
                fail(f"{path}, annotation {name}: {error!r} (a KeyError names an id or a field "
                     "that the file does not have)")
            crowd = row["iscrowd"] and source != "voc"  # those are only difficult [Detectron2]
            if not crowd and min(row["bbox"][2:]) > 0.01:
                of_image.append([label, *row["bbox"], row["segmentation"]])

        rows = content["annotations"]
        self.masks = any(row["segmentation"] and not row["iscrowd"] for row in rows)
        if self.masks:
            content["annotations"] = [row for row in rows if row["segmentation"]]
            objects = {image: [o for o in objects[image] if o[-1]] for image in objects}
        left_out = len(rows) - len(content["annotations"])
        if left_out:
            common.print_main(f"{path}: {left_out} annotations have no mask, and are left out")
        self.objects = np.array([json.dumps(found) for found in objects.values()], common.STRINGS)

    def __len__(self):
        return len(self.images)

    def objects_of(self, i):
        return json.loads(self.objects[i])


def load(name, root, split):
    """One split of "shapes", "voc", "coco" or "lvis" -> BoxData"""
    if name == "shapes":
        return shapes_objects(split)
    root = root or f"datasets/{name}"
    if name == "voc":
        return voc_objects(root, split)
    kind = "lvis" if name == "lvis" else "instances"
    path = f"{root}/annotations/{kind}_{split}.json"
    content = common.read_json(path)
    paths = []
    for image in content["images"]:
        file = f"{split}/{image.get('file_name')}"
        if name == "lvis":  # in both folders of COCO: .../train2017/000000391895.jpg
            file = "/".join(image["coco_url"].split("/")[-2:])
        paths.append(f"{root}/{file}")
    return BoxData(content, pictures.photo_files(paths).images, name, path)


def complete(row, number, coco):
    """Add to an annotation what people's own COCO files may lack. Its number becomes its id."""
    _, _, width, height = row["bbox"] = [float(value) for value in row["bbox"]]
    found = row.get("segmentation") or []
    if isinstance(found, list):  # of polygons; otherwise run lengths
        found = [polygon for polygon in found if len(polygon) >= 6 and len(polygon) % 2 == 0]
    # Ids count from 1, because pycocotools takes 0 for no match.
    row |= {"id": number, "iscrowd": row.get("iscrowd") or 0, "segmentation": found}
    if row.get("area") is None:
        row["area"] = int(coco.annToMask(row).sum()) if found else width * height


def voc_objects(root, split):
    """Annotations/*.xml of the photos in ImageSets/Main/{list}.txt, of one year or several

    A difficult object becomes a crowd, which pycocotools ignores (see plain_iou). -> BoxData
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
                box = {edge.tag: float(edge.text) for edge in element.find("bndbox")}
                left, top = box["xmin"] - 1, box["ymin"] - 1  # VOC counts pixels from 1
                row = {"image_id": len(paths), "category_id": element.find("name").text}
                row["bbox"] = [left, top, box["xmax"] - left, box["ymax"] - top]
                row["iscrowd"] = int(element.findtext("difficult", "0"))
                rows.append(row)
    classes = sorted({row["category_id"] for row in rows})
    content = coco_format(range(1, len(paths) + 1), rows, {name: name for name in classes})
    return BoxData(content, pictures.photo_files(paths).images, "voc")


def shapes_objects(split, side=96):
    """The built-in scenes, drawn at 96 px; only the first 500 of the validation split"""
    scenes = shapes.SPLITS.get(split) or fail(f"--data shapes has no split {split}")
    scenes = scenes[:500] if split == "val" else scenes
    rows = []
    for scene in scenes:
        for o in shapes.objects_of(scene):
            left, top, _, _ = o.box
            box = [side * left, side * top, 2 * side * o.radius, 2 * side * o.radius]
            category = shapes.SHAPES.index(o.shape)
            rows.append({"image_id": scene, "category_id": category, "bbox": box})
    content = coco_format(scenes, rows, dict(enumerate(shapes.SHAPES)))
    return BoxData(content, np.array(scenes, object), "shapes", open=shapes.draw)


def coco_format(image_ids, annotations, names):
    images = [{"id": image_id} for image_id in image_ids]
    categories = [{"id": category, "name": name} for category, name in names.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def training_rows(data, seed):
    """The photos with objects -> list of indices

    On LVIS a photo appears max(1, sqrt(0.001 / f)) times [VirTex App. A.3], where f is the fraction
    of photos with its rarest class. Fractions are rounded at random, once [ours].
    """
    rows = [i for i in range(len(data)) if data.objects_of(i)]
    if not rows:
        fail("no photo of the training split has an object: see --train-split")
    if data.source != "lvis":
        return rows
    labels_of = [{found[0] for found in data.objects_of(i)} for i in rows]
    num_images = Counter(label for labels in labels_of for label in labels)
    f = np.array([min(num_images[label] for label in labels) for labels in labels_of]) / len(data)
    repeats = np.maximum(1, np.sqrt(0.001 / f))
    repeats += np.random.default_rng(seed).random(len(rows))
    return np.repeat(rows, repeats.astype(int)).tolist()


class BoxPhotos(common.Photos):
    """Whole photos, in training with their objects and flipped at random

    A sample is {"image": uint8 (3, H, W), "image_id": index into data}, and as torchvision has
    them, boxes, labels and masks.  rows: indices into data.
    """

    def __init__(self, data, rows):
        self.data = data
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def sample(self, index, rng):
        i = self.rows[index]
        try:  # boxes refer to the photo turned upright, and its size must fit, as in Detectron2
            photo = ImageOps.exif_transpose(sources.to_rgb(self.data.open(self.data.images[i])))
            if self.data.sizes[i] not in (photo.size, (None, None)):
                raise ValueError(f"{photo.size} upright, {self.data.sizes[i]} in the annotations")
        except Exception as error:  # PIL's decoders raise a dozen kinds
            raise common.Unreadable(f"{self.data.images[i]} ({error})") from error
        image = torch.from_numpy(np.array(photo)).permute(2, 0, 1).contiguous()
        sample = {"image": image, "image_id": torch.tensor(i)}
        if rng is not None:
            flipped = bool(rng.integers(2))
            sample |= make_target(self.data, i, image, flipped)
            sample["image"] = image.flip(2) if flipped else image
        return sample


def make_target(data, i, image, flipped):
    """The objects of a photo -> boxes (N, 4) as corners, labels (N,), masks (N, H, W) if any"""
    from pycocotools.coco import COCO

    _, height, width = image.shape
    objects = data.objects_of(i)
    labels = torch.tensor([found[0] for found in objects])
    boxes = torch.tensor([found[1:5] for found in objects])
    boxes[:, 2:] += boxes[:, :2]
    if flipped:
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    target = {"boxes": boxes, "labels": labels}
    if data.masks:
        coco = COCO()
        coco.imgs[i] = {"height": height, "width": width}
        masks = [coco.annToMask({"image_id": i, "segmentation": found[5]}) for found in objects]
        masks = torch.tensor(np.stack(masks))
        target["masks"] = masks.flip(2) if flipped else masks
    return target


class Samples(list):
    """The samples of a batch, which cannot be stacked, because photos differ in size"""

    def to(self, device, **kwargs):
        return [{name: x.to(device, **kwargs) for name, x in sample.items()} for sample in self]


def collate(samples):
    return {"samples": Samples(samples)}


def score(val, results):
    """Rows of evaluate -> {"AP", "AP50", "AP75"} in percent, with masks also {"mask AP", ...}"""
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
        LVIS._load_json = lambda self, content: content  # completed, not as in the file
        truth = LVIS(val.content)
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


def draw(val, results, path, side=320):
    """Draw eight validation photos, resized to squares, with detections that score above 0.5."""
    from pycocotools import mask

    samples = BoxPhotos(val, range(len(val)))
    photos = []
    for n in range(min(8, len(val))):
        sample = samples[n]
        pixels = sample["image"].permute(1, 2, 0).numpy()
        height, width, _ = pixels.shape
        scale = np.array([side / width, side / height] * 2)
        image_id = val.ids[sample["image_id"]]
        shown = [row for row in results if row["image_id"] == image_id and row["score"] > 0.5]
        for row in shown if val.masks else ():
            pixels[mask.decode(row["segmentation"]) > 0, 0] = 255  # red
        photo = Image.fromarray(pixels).resize((side, side))
        canvas = ImageDraw.Draw(photo)
        for row in shown:
            x, y, w, h = row["bbox"]
            corners = (scale * (x, y, x + w, y + h)).tolist()
            name = f" {val.names[row['category_id']]} {row['score']:.2f}"
            canvas.rectangle(corners, outline="yellow", width=2)
            canvas.text(corners[:2], name, "yellow")
        photos.append((np.asarray(photo), ""))
    pictures.draw_rows(path, [("", photos[:4]), ("", photos[4:])], below=0, side=side)
