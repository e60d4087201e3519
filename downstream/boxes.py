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
from PIL import ExifTags, Image, ImageOps

import common
from common import fail, print_main
from downstream import pictures, tasks
from extras import shapes

SCORES = "AP", "AP50", "AP75"


class BoxData:
    """Photos with boxes

    content: {"images", "annotations", "categories"} as in COCO's files, which pycocotools scores.
    source: "shapes", "voc", "coco" or "lvis".  images: (N,) of paths or scenes.  ids, sizes: of
    images.  categories: {id: name}, in the order of the classes, which is that of their names,
    because ids may differ between splits.  mirrored: see common.mirrored.  masks: whether there are
    any.  objects: JSON for each photo, [[class from 1, x, y, w, h, segmentation], ...], without
    COCO's crowds.
    """

    def __init__(self, content, source):
        self.content = content
        self.source = source
        self.open = shapes.draw if source == "shapes" else common.open_photo
        images, rows = content["images"], content["annotations"]
        paths = [image["path"] for image in images]
        self.images = np.array(paths, object if source == "shapes" else common.STRINGS)
        self.ids = [image["id"] for image in images]
        self.sizes = [(image["width"], image["height"]) for image in images]
        categories = sorted((str(row["name"]), row["id"]) for row in content["categories"])
        self.categories = {number: name for name, number in categories}
        self.names = list(self.categories.values())
        self.mirrored = torch.from_numpy(common.mirrored(self.names))
        self.masks = any(row["segmentation"] and not row["iscrowd"] for row in rows)
        class_of = {number: k for k, number in enumerate(self.categories, 1)}
        objects = {number: [] for number in self.ids}
        for row in rows:
            if source == "voc" or not row["iscrowd"]:  # VOC's are only difficult [Detectron2]
                found = [class_of[row["category_id"]], *row["bbox"], row["segmentation"]]
                objects[row["image_id"]].append(found)
        self.objects = np.array([json.dumps(found) for found in objects.values()], common.STRINGS)

    def __len__(self):
        return len(self.images)

    def objects_of(self, i):
        return json.loads(self.objects[i])


def load(source, root, split):
    """One split of "shapes", "voc", "coco" or "lvis" -> BoxData"""
    root = root or f"datasets/{source}"
    name = f"{root}, {split}"
    if source == "shapes":
        return BoxData(scenes(split), source)
    if source == "voc":
        content = voc(root, split)
    else:
        kind, where = ("lvis", "coco_url") if source == "lvis" else ("instances", "file_name")
        name = f"{root}/annotations/{kind}_{split}.json"
        content = tasks.read_coco(name)
        for image in content["images"]:
            image["path"] = f"{root}/{split}/{image[where]}"
            if source == "lvis":  # in both folders of COCO: .../train2017/000000391895.jpg
                image["path"] = "/".join([root, *image[where].split("/")[-2:]])
    # Label Studio writes a photo once for each annotator.
    for part, key in ("images", "id"), ("images", "path"), ("categories", "id"):
        for value, times in Counter(row[key] for row in content[part]).most_common(1):
            if times > 1:
                fail(f"{name}: {times} of the {part} have the {key} {value}: list it once, with "
                     "all of its objects")
    if source == "lvis":
        negatives = [image.get("neg_category_ids") for image in content["images"]]
        if None in negatives or not any(negatives):
            fail(f"{name} lacks neg_category_ids, the classes known not to be in a photo. Without "
                 "them LVIS's score misses most wrong detections: use --data coco")
        for category in content["categories"]:
            category.setdefault("frequency", "f")  # for scores that we do not print
    return BoxData(complete(content, source, name), source)


def fitting(images, name):
    """-> the images whose size in the file is that of the photo as EXIF turns it, as boxes must be

    images: as in COCO's files, with a "path"; without "width" and "height" they get the photo's.
    name: for the lines that are printed
    """
    fit, others, turned = [], [], 0
    for image in common.progress(images, desc="sizes of photos", leave=False):
        given = [float(image.get(side) or 0) for side in ("width", "height")]
        try:
            with Image.open(image["path"]) as photo:  # it reads the first bytes only
                orientation = Image.Image.getexif(photo).get(ExifTags.Base.Orientation, 1)
                size = list(photo.size)
        except Exception:  # PIL's decoders raise a dozen kinds
            others.append(image["path"])
            continue
        if orientation >= 5 and photo.format != "TIFF":  # PIL itself turns those
            size.reverse()
        if given == size or 0 in given:
            image["width"], image["height"] = size
            turned += orientation > 1
            fit.append(image)
        else:
            others.append(image["path"])
    if turned:
        print_main(f"{name}: EXIF turns or mirrors {turned} photos, whose boxes are taken as those "
                   "of the turned photo")
    if others:
        print_main(f"{name}: {len(others)} of {len(images)} photos are left out, which cannot be "
                   "opened, or whose annotated width and height are not those of the photo as "
                   f"EXIF turns it: {others[0]}")
    return fit


def complete(content, source, name):
    """-> content with all that pycocotools needs. What is odd or left out is counted."""
    images = content["images"]
    pictures.photo_files([image["path"] for image in images])  # it fails if some are missing
    images = fitting(images, name)
    photos = {image["id"]: image for image in images}
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    ids = {title: number for number, title in reversed(names.items())}  # the first of each name
    if len(ids) < len(names):
        print_main(f"{name}: {len(names) - len(ids)} of {len(names)} categories have the name of "
                   "an earlier one: their objects are of that one")
    rows, counts, total = [], Counter(), len(content["annotations"])
    for number, row in enumerate(content["annotations"], 1):
        if row["image_id"] not in photos:
            counts["are of none of the photos that are read: left out"] += 1
            continue
        photo = photos[row["image_id"]]
        x, y, width, height = map(float, row["bbox"])
        counts["have swapped corners: put in order"] += width < 0 or height < 0
        x, width = min(x, x + width), abs(width)
        y, height = min(y, y + height), abs(height)
        if source == "voc":  # which counts pixels from 1; the last one belongs to the box
            x, y, width, height = x - 1, y - 1, width + 1, height + 1
        found = row.get("segmentation") or []
        if isinstance(found, list):  # of polygons; otherwise run lengths
            polygons = [part for part in found if len(part) >= 6 and len(part) % 2 == 0]
            counts["have a polygon without three corners: left out"] += polygons != found
            found = polygons
        elif found["size"] != [photo["height"], photo["width"]]:
            counts["have a mask of another size than their photo: left out"] += 1
            found = []
        # Ids count from 1, because pycocotools takes 0 for no match. It needs an area, for scores
        # of small and of large objects, which we do not print.
        row |= {"id": number, "category_id": ids[names[row["category_id"]]]}
        row |= {"bbox": [x, y, width, height], "area": width * height}
        row |= {"segmentation": found, "iscrowd": int(row.get("iscrowd") or 0)}
        empty = not min(width, height) > 0.01  # or NaN
        beyond = max(-x, -y, x + width - photo["width"], y + height - photo["height"])
        counts["have a box without area: left out"] += empty
        counts["leave their photo (a box is x, y, width, height)"] += beyond > 1
        counts["are smaller than a pixel (boxes are in pixels)"] += max(width, height) < 1
        if not empty:
            rows.append(row)
    kind = "difficult: learned, but" if source == "voc" else "crowds (iscrowd 1): not learned and"
    counts[f"are {kind} not scored"] = sum(row["iscrowd"] for row in rows)
    if any(row["segmentation"] and not row["iscrowd"] for row in rows):
        counts["have no mask: left out"] = sum(not row["segmentation"] for row in rows)
        rows = [row for row in rows if row["segmentation"]]
    for what, count in counts.items():
        if count:
            print_main(f"{name}: {count} of {total} annotations {what}")
    if all(row["iscrowd"] for row in rows):
        fail(f"{name} has no object to score. Tools write iscrowd 1 for painted masks, too: if "
             "yours are objects, set it to 0")
    categories = [row for row in content["categories"] if row["id"] in ids.values()]
    return {**content, "images": images, "annotations": rows, "categories": categories}


def voc(root, split):
    """Annotations/*.xml of the photos in ImageSets/Main/{list}.txt, of one year or several

    -> content as in COCO's files, but with VOC's counting of pixels. A difficult object becomes a
    crowd, which pycocotools ignores (see plain_iou).
    """
    images, rows = [], []
    for part in split.split("+"):
        year, _, image_set = part.partition("_")
        folder = Path(root, f"VOC{year}")
        photo_list = folder / "ImageSets" / "Main" / f"{image_set}.txt"
        if not photo_list.is_file():
            fail(f"there is no {photo_list}: a split is 2007_test or 2007_trainval+2012_trainval")
        names = map(str.strip, photo_list.read_text("utf-8-sig").splitlines())
        for name in filter(None, names):
            file = folder / "Annotations" / f"{name}.xml"
            image = {"id": len(images) + 1, "path": f"{folder}/JPEGImages/{name}.jpg"}
            images.append(image)
            try:
                tree = ElementTree.parse(file)
                image |= {side: tree.findtext(f"size/{side}") for side in ("width", "height")}
                for found in tree.iterfind("object"):
                    edges = {edge.tag: float(edge.text) for edge in found.find("bndbox")}
                    left, top = edges["xmin"], edges["ymin"]
                    rows.append({
                        "image_id": image["id"],
                        "category_id": found.find("name").text.strip(),
                        "bbox": [left, top, edges["xmax"] - left, edges["ymax"] - top],
                        "iscrowd": int(found.findtext("difficult") or 0),
                    })
            except Exception as error:  # no file, no XML, or no name, box or number in it
                fail(f"{file} cannot be read ({error!r}): each photo needs an XML, and each object "
                     "in it a name and a box")
    names = dict.fromkeys(row["category_id"] for row in rows)
    categories = [{"id": name, "name": name} for name in names]
    return {"images": images, "annotations": rows, "categories": categories}


def scenes(split):
    """The built-in scenes, drawn at 96 px; only the first 500 of the validation split -> content"""
    numbers = shapes.SPLITS.get(split) or fail(f"--data shapes has no split {split}")
    numbers = numbers[:500] if split == "val" else numbers
    rows = []
    for n in numbers:
        for o in shapes.objects_of(n):
            left, top, _, _ = o.box
            side = 2 * 96 * o.radius
            row = {"image_id": n, "category_id": shapes.SHAPES.index(o.shape)}
            row |= {"bbox": [96 * left, 96 * top, side, side], "segmentation": []}
            rows.append({**row, "id": len(rows) + 1, "area": side**2, "iscrowd": 0})
    images = [{"id": n, "path": n, "width": 96, "height": 96} for n in numbers]
    categories = [{"id": k, "name": name} for k, name in enumerate(shapes.SHAPES)]
    return {"images": images, "annotations": rows, "categories": categories}


def training_rows(data, seed):
    """The photos with objects -> list of indices

    On LVIS a photo appears max(1, sqrt(0.001 / f)) times [VirTex App. A.3], where f is the fraction
    of photos with its rarest class. Fractions are rounded at random, once [ours].
    """
    rows = [i for i in range(len(data)) if data.objects_of(i)]
    if len(rows) < len(data):
        print_main(f"{len(data) - len(rows)} photos without objects are not trained on")
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

    def __getitem__(self, key):
        """In validation None stands for a photo that cannot be decoded."""
        if isinstance(key, tuple):
            return super().__getitem__(key)
        try:
            return self.sample(key, None)
        except common.Unreadable as error:
            common.report_once(f"cannot decode {error}: left out of the score")

    def sample(self, index, rng):
        i = self.rows[index]
        try:
            photo = self.data.open(self.data.images[i])
            photo = ImageOps.exif_transpose(common.to_rgb(photo))
            if photo.size != self.data.sizes[i]:
                raise ValueError(f"its size is {photo.size}, not {self.data.sizes[i]}")
        except Exception as error:  # PIL's decoders raise a dozen kinds
            raise common.Unreadable(f"{self.data.images[i]} ({error})") from error
        image = torch.from_numpy(np.array(photo)).permute(2, 0, 1).contiguous()
        sample = {"image": image, "image_id": torch.tensor(i)}
        if rng is not None:
            flipped = bool(rng.integers(2))
            sample |= make_target(self.data, i, flipped)
            sample["image"] = image.flip(2) if flipped else image
        return sample


def make_target(data, i, flipped):
    """The objects of a photo -> boxes (N, 4) as corners, labels (N,), masks (N, H, W) if any"""
    from pycocotools.coco import COCO

    width, height = data.sizes[i]
    objects = data.objects_of(i)
    labels = torch.tensor([found[0] for found in objects])
    boxes = torch.tensor([found[1:5] for found in objects])
    boxes[:, 2:] += boxes[:, :2]
    if flipped:
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        labels = 1 + data.mirrored[labels - 1]
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
    return {"samples": Samples(filter(None, samples))}


def score(val, results, photos):
    """-> {"AP", "AP50", "AP75"} in percent, with masks also {"mask AP", ...}

    results: detections in COCO's format.  photos: indices of those that count
    """
    scores = average_precision(val, results, photos, "bbox")
    if val.masks:
        masks = average_precision(val, results, photos, "segm")
        scores |= {f"mask {name}": value for name, value in masks.items()}
    return scores


def average_precision(val, results, photos, kind):
    """kind: "bbox" or "segm" -> {"AP", "AP50", "AP75"}, those of LVIS by faster-coco-eval"""
    if not results:
        return dict.fromkeys(SCORES, 0.0)
    if val.source == "lvis":
        from faster_coco_eval import COCO, COCOeval_faster

        COCOeval = partial(COCOeval_faster, lvis_style=True)
    else:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

    results = [dict(row) for row in results]  # both packages write into the rows
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = val.content
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        evaluation.params.imgIds = [val.ids[i] for i in photos]
        if val.source == "lvis":
            evaluation.params.maxDets = [300]
        if val.source == "voc":
            evaluation.params.recThrs = np.linspace(0, 1, 11)  # VOC07's, as Detectron2 on 2007_test
            evaluation.computeIoU = partial(plain_iou, evaluation)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: 100 * float(value) for name, value in zip(SCORES, evaluation.stats)}


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


def draw(val, results, path):
    """Draw eight validation photos with detections that score above 0.5."""
    figure = pictures.new_figure(path, 1400, 700)
    if not figure:
        return
    from matplotlib.patches import Rectangle
    from pycocotools import mask

    figure.set_layout_engine("constrained")
    samples = BoxPhotos(val, range(min(8, len(val))))
    for n in samples.rows:
        sample = samples[n]
        if sample is None:
            continue
        pixels = sample["image"].permute(1, 2, 0).numpy()
        image_id = val.ids[sample["image_id"]]
        axes = figure.add_subplot(2, 4, n + 1)
        axes.axis("off")
        for row in [row for row in results if row["image_id"] == image_id and row["score"] > 0.5]:
            if val.masks:
                pixels[mask.decode(row["segmentation"]) > 0, 0] = 255  # red
            x, y, width, height = row["bbox"]
            axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="yellow"))
            name = f"{val.categories[row['category_id']]} {row['score']:.2f}"
            style = {"family": pictures.fonts_for(name), "parse_math": False, "clip_on": True}
            axes.text(x, y, name, color="yellow", va="top", **style)
        axes.imshow(pixels)
    figure.savefig(path)
