"""downstream/boxes.py on small files in the official layouts: a perfect detector scores 100."""

import argparse
import json

import numpy as np
import pytest
import torch
from conftest import CPU
from PIL import Image

import eval_linear
from downstream import boxes, detection

mask = pytest.importorskip("pycocotools.mask")
COLOURS = {"cup": (250, 0, 0), "dog": (0, 250, 0)}
WIDTH, HEIGHT = 90, 70
STORED = {  # how a photo is stored that EXIF turns
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
OBJECTS = [  # of three photos: class, x, y, w, h
    [("cup", 8, 4, 20, 32), ("dog", 50, 30, 36, 24)],
    [("dog", 2, 40, 40, 20)],
    [("cup", 60, 6, 12, 40)],
]


def draw(path, objects, orientation=1, how={"quality": 95, "subsampling": 0}):
    """A grey photo on which each object is a rectangle of its class's colour"""
    pixels = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    for name, x, y, w, h in objects:
        pixels[y : y + h, x : x + w] = COLOURS[name]
    photo = Image.fromarray(pixels)
    if orientation > 1:
        photo = photo.transpose(STORED[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    photo.save(path, exif=exif, **how)


class Perfect(torch.nn.Module):
    """It looks for rectangles of these colours, one of each, in place of a detector."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def forward(self, batch):
        outputs = []
        for sample in batch["samples"]:
            pixels = sample["image"].permute(1, 2, 0).int()
            masks, labels = [], []
            for name, colour in COLOURS.items():
                found = (pixels - torch.tensor(colour)).abs().sum(2) < 150
                if found.any():
                    masks.append(found)
                    labels.append(1 + self.data.names.index(name))
            rows = [torch.nonzero(found) for found in masks]
            corners = [[*(row.amin(0).flip(0)), *(row.amax(0).flip(0) + 1)] for row in rows]
            outputs.append({
                "boxes": torch.tensor(corners), "labels": torch.tensor(labels),
                "scores": torch.full((len(labels),), 0.9),
                "masks": torch.stack(masks)[:, None].float(),
            })
        return outputs


def score(data, folder):
    """Of the perfect detector, by the script's own evaluation"""
    args = argparse.Namespace(workers=0, amp="off", output=str(folder))
    return detection.evaluate(data, Perfect(data), args, CPU)


def voc_layout(root, year, swapped=False, name="00000{}"):
    """VOC{year}, its test split; a photo also has a difficult dog, which nobody finds."""
    folder = root / f"VOC{year}"
    for part in "Annotations", "ImageSets/Main":
        (folder / part).mkdir(parents=True)
    names = [name.format(n) for n in range(len(OBJECTS))]
    for photo, objects in zip(names, OBJECTS):
        draw(folder / "JPEGImages" / f"{photo}.jpg", objects)
        found = [(*o, 0) for o in objects] + [("dog", 70, 1, 9, 9, 1)] * (objects is OBJECTS[0])
        xml = f"<annotation><folder>VOC{year}</folder><filename>{photo}.jpg</filename>"
        xml += f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        for label, x, y, w, h, difficult in found:
            edges = {"xmin": x + 1, "ymin": y + 1, "xmax": x + w, "ymax": y + h}
            if swapped:
                edges = dict(zip(edges, [x + w, y + 1, x + 1, y + h]))
            box = "".join(f"<{k}>{v}</{k}>" for k, v in sorted(edges.items()))  # 2012: xmax first
            xml += f"<object><name>{label}</name><pose>Left</pose><truncated>0</truncated>"
            xml += f"<difficult>{difficult}</difficult><bndbox>{box}</bndbox>"
            xml += f"<part><name>head</name><bndbox>{box}</bndbox></part></object>"
        (folder / "Annotations" / f"{photo}.xml").write_text(f"{xml}</annotation>")
    (folder / "ImageSets/Main/test.txt").write_text("\n".join(names) + "\n")
    return folder


def coco_layout(root, kind="instances", split="val2017", masks=True, ids=(3, 18), **changes):
    """A file in the format of COCO, or of LVIS, and its three photos -> its content

    changes: functions that change a part of the content
    """
    names = dict(zip(ids, COLOURS))
    number_of = {name: number for number, name in names.items()}
    content = {
        "info": {"year": 2017},
        "licenses": [{"id": 1}],
        "images": [],
        "annotations": [],
        "categories": [{"id": n, "name": name, "supercategory": "x"} for n, name in names.items()],
    }
    for n, objects in enumerate(OBJECTS):
        file = f"{n:012}.jpg"
        draw(root / "val2017" / file, objects)
        url = f"http://images.cocodataset.org/val2017/{file}"
        image = {"license": 1, "file_name": file, "coco_url": url, "height": HEIGHT, "id": 100 + n}
        content["images"].append({**image, "width": WIDTH, "date_captured": "2013"})
        for name, x, y, w, h in objects:
            row = {"image_id": 100 + n, "category_id": number_of[name], "bbox": [x, y, w, h]}
            row |= {"area": w * h, "iscrowd": 0, "id": 900 + len(content["annotations"])}
            polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
            content["annotations"].append({**row, "segmentation": [polygon] if masks else []})
    for part, change in changes.items():
        change(content[part])
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"{kind}_{split}.json").write_text(json.dumps(content))
    return content


BOXES = pytest.approx(dict.fromkeys(boxes.SCORES, 100.0))
MASKS = pytest.approx(dict.fromkeys([*boxes.SCORES, *(f"mask {x}" for x in boxes.SCORES)], 100.0))


@pytest.mark.parametrize("year, swapped", [("2007", False), ("2012", False), ("2012", True)])
def test_voc(tmp_path, capsys, year, swapped):
    """Pixels count from 1, and the last is of the box; difficult objects are learned, not scored;
    corners that are swapped are put in order.
    """
    voc_layout(tmp_path, year, swapped=swapped, name="photo {}.a")
    data = boxes.load("voc", str(tmp_path), f"{year}_test")
    said = capsys.readouterr().out
    assert "1 of 5 annotations are difficult: learned, but not scored" in said
    assert ("5 of 5 annotations have swapped corners: put in order" in said) == swapped
    expected = [[1, 8, 4, 20, 32, []], [2, 50, 30, 36, 24, []], [2, 70, 1, 9, 9, []]]
    assert data.objects_of(0) == expected and data.names == ["cup", "dog"] and not data.masks
    assert score(data, tmp_path) == BOXES


def test_two_years_of_voc(tmp_path):
    voc_layout(tmp_path, "2007")
    voc_layout(tmp_path, "2012")
    data = boxes.load("voc", str(tmp_path), "2007_test+2012_test")
    assert data.images[3] == str(tmp_path / "VOC2012" / "JPEGImages" / "000000.jpg")
    assert len(data) == 6 and score(data, tmp_path) == BOXES


def add_crowd(rows):
    whole = {"counts": [0, WIDTH * HEIGHT], "size": [HEIGHT, WIDTH]}
    crowd = {"id": 1, "image_id": 101, "category_id": 18, "bbox": [0, 0, WIDTH, HEIGHT]}
    rows.append({**crowd, "area": WIDTH * HEIGHT, "iscrowd": 1, "segmentation": whole})


def test_coco(tmp_path, capsys):
    coco_layout(tmp_path, annotations=add_crowd)
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = "1 of 5 annotations are crowds (iscrowd 1): not learned and not scored"
    assert said in capsys.readouterr().out
    assert score(data, tmp_path) == MASKS


@pytest.mark.parametrize("version", ["v0.5", "v1"])
def test_lvis(tmp_path, version):
    """Detections of a class that is not known to be absent, or is not annotated exhaustively, do
    not count; those of a negative class do.
    """
    pytest.importorskip("faster_coco_eval")

    def images(rows):
        for image in rows:
            image |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}
            image["file_name"] = f"COCO_val2014_{image['file_name']}"
            if version == "v1":
                del image["file_name"]
        rows[1]["neg_category_ids"] = [3]
        rows[2]["not_exhaustive_category_ids"] = [3]

    def categories(rows):
        for row in rows:
            row |= {"synset": "cup.n.01", "synonyms": ["cup"], "image_count": 2, "frequency": "r"}

    def annotations(rows):
        for row in rows:
            del row["iscrowd"]

    split = f"{version}_val"
    more = {"images": images, "categories": categories, "annotations": annotations}
    coco_layout(tmp_path, "lvis", split, **more)
    data = boxes.load("lvis", str(tmp_path), split)
    assert score(data, tmp_path) == MASKS
    results = json.loads((tmp_path / "detections.json").read_text())
    nothing = mask.encode(np.zeros((HEIGHT, WIDTH), np.uint8, order="F"))
    wrong = {"bbox": [0, 0, 9, 9], "score": 0.99, "category_id": 3}
    wrong["segmentation"] = {**nothing, "counts": nothing["counts"].decode()}
    for image, category, right in (102, 3, True), (102, 18, True), (101, 3, False):
        more = [*results, {**wrong, "image_id": image, "category_id": category}]
        assert (boxes.score(data, more, range(3)) == MASKS) == right

    def empty(rows):
        for image in rows:
            image["neg_category_ids"] = []

    for more in {}, {"images": empty}:  # no lists of negatives
        coco_layout(tmp_path, "lvis", split, **more)
        with pytest.raises(SystemExit, match="lacks neg_category_ids"):
            boxes.load("lvis", str(tmp_path), split)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_turned_photos(tmp_path, capsys, format):
    """Boxes are of photos as EXIF turns them; those that are annotated as stored are left out."""
    content = coco_layout(tmp_path)
    how = {"format": format} | ({"quality": 95, "subsampling": 0} if format == "JPEG" else {})
    rows, images = content["annotations"], []
    content["annotations"] = []
    for n, orientation in enumerate([1, *STORED]):
        draw(tmp_path / "val2017" / f"{n}.jpg", OBJECTS[0], orientation, how)
        size = {"width": WIDTH, "height": HEIGHT}
        images.append({"id": n, "file_name": f"{n}.jpg", **size})
        content["annotations"] += [{**row, "image_id": n} for row in rows[:2]]
    content["images"] = images
    file = tmp_path / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps(content))
    data = boxes.load("coco", str(tmp_path), "val2017")
    assert "EXIF turns or mirrors 7 photos, whose boxes are taken as" in capsys.readouterr().out
    assert len(data) == 8 and score(data, tmp_path) == MASKS

    for image in images:
        del image["width"]
    file.write_text(json.dumps(content))
    assert score(boxes.load("coco", str(tmp_path), "val2017"), tmp_path) == MASKS

    for image in images:
        image |= {"width": HEIGHT, "height": WIDTH} if image["id"] >= 4 else size
    images[1]["width"] = 64
    file.write_text(json.dumps(content))
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = "5 of 8 photos are left out, which cannot be opened, or whose annotated width and height"
    assert said in capsys.readouterr().out
    assert data.ids == [0, 2, 3] and score(data, tmp_path) == MASKS


def test_broken_photos(tmp_path, capsys):
    """One cannot be opened, one not be decoded: neither is scored, and both are counted."""
    coco_layout(tmp_path)
    for n, kept in (1, 200), (2, 900):
        file = tmp_path / "val2017" / f"{n:012}.jpg"
        file.write_bytes(file.read_bytes()[:kept])
    data = boxes.load("coco", str(tmp_path), "val2017")
    assert "1 of 3 photos are left out, which cannot be opened, or" in capsys.readouterr().out
    assert len(data) == 2 and score(data, tmp_path) == MASKS
    said = capsys.readouterr().out
    assert "000000000002.jpg (" in said and "): left out of the score" in said
    assert "next photo" not in said
    assert "1 of 2 photos cannot be decoded: left out of the score" in said


def test_odd_boxes(tmp_path, capsys):
    """Corners in another order are put in order; what has no area, or no mask, is left out."""

    def change(rows):
        x, y, w, h = rows[0]["bbox"]
        rows[0]["bbox"] = [x + w, y + h, -w, -h]
        rows.append({**rows[1], "bbox": [9, 9, 20, 0]})
        rows.append({**rows[1], "segmentation": [[1, 2, 3, 4]]})
        rows.append({**rows[1], "bbox": [60, 30, 80, 50]})

    coco_layout(tmp_path, annotations=change)
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = capsys.readouterr().out
    for line in (
        "1 of 7 annotations have swapped corners: put in order",
        "1 of 7 annotations have a box without area: left out",
        "1 of 7 annotations have a polygon without three corners: left out",
        "1 of 7 annotations have no mask: left out",
        "1 of 7 annotations leave their photo",
    ):
        assert line in said
    assert [found[1:5] for found in data.objects_of(0)][0] == [8, 4, 20, 32]
    assert len(data.objects_of(0)) == len(data.content["annotations"]) - 2 == 3


def test_run_lengths_of_another_size(tmp_path, capsys):
    """A mask whose height and width are swapped, say, would be learned in the wrong place."""

    def change(rows):
        for row in rows:
            counts = [100, 200, WIDTH * HEIGHT - 300]
            row["segmentation"] = {"size": [HEIGHT, WIDTH], "counts": counts}
        rows[0]["segmentation"] = {"size": [WIDTH, HEIGHT], "counts": counts}

    coco_layout(tmp_path, annotations=change)
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = "1 of 4 annotations have a mask of another size than their photo: left out"
    assert said in capsys.readouterr().out
    assert len(data.content["annotations"]) == 3


def test_strays_and_fractions(tmp_path, capsys):
    """Counted: annotations without a photo, boxes in fractions of the photo; these are scored."""

    def change(rows):
        rows.append({**rows[1], "image_id": "100"})
        x, y, w, h = map(float, rows[0]["bbox"])
        rows[0]["bbox"] = [x / WIDTH, y / HEIGHT, w / WIDTH, h / HEIGHT]

    coco_layout(tmp_path, masks=False, annotations=change)
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = capsys.readouterr().out
    assert "1 of 5 annotations are smaller than a pixel" in said
    assert "1 of 5 annotations are of none of the photos that are read: left out" in said
    results = [{"image_id": row["image_id"], "bbox": row["bbox"], "score": 1.0,
                "category_id": row["category_id"]} for row in data.content["annotations"]]
    assert boxes.score(data, results, range(len(data))) == BOXES


def test_classes_are_matched_by_name(tmp_path):
    """Ids may differ between splits; detections have those of the validation split."""
    coco_layout(tmp_path, split="train2017")
    coco_layout(tmp_path, ids=(18, 3))
    train = boxes.load("coco", str(tmp_path), "val2017")
    (tmp_path / "train2017").symlink_to(tmp_path / "val2017")
    other = boxes.load("coco", str(tmp_path), "train2017")
    assert train.names == other.names == ["cup", "dog"]
    assert train.objects_of(0) == other.objects_of(0)
    assert score(train, tmp_path) == MASKS and score(other, tmp_path) == MASKS


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("images", lambda rows: rows[1].update(id=100), "2 of the images have the id 100"),
        (
            "images",
            lambda rows: rows[1].update(file_name=rows[0]["file_name"]),
            "2 of the images have the path .*000000000000.jpg: list it once, with all of its",
        ),
        (
            "annotations",
            lambda rows: [row.update(iscrowd=1) for row in rows],
            "has no object to score. Tools write iscrowd 1 for painted masks, too",
        ),
    ],
)
def test_refusals(tmp_path, part, change, message):
    coco_layout(tmp_path, **{part: change})
    with pytest.raises(SystemExit, match=message):
        boxes.load("coco", str(tmp_path), "val2017")


def test_a_list_is_no_file_of_coco(tmp_path):
    coco_layout(tmp_path)
    file = tmp_path / "annotations" / "instances_val2017.json"
    file.write_text("[]")
    with pytest.raises(SystemExit, match="_val2017.json has no annotations. Is it of a test split"):
        boxes.load("coco", str(tmp_path), "val2017")


def test_categories_of_one_name(tmp_path, capsys):
    """They are one class, as Roboflow's project of dogs has "dog" twice; a line says so."""

    def add(rows):
        rows.append({"id": 77, "name": "dog"})

    def use(rows):
        rows[2]["category_id"] = 77

    coco_layout(tmp_path, categories=add, annotations=use)
    data = boxes.load("coco", str(tmp_path), "val2017")
    said = "1 of 3 categories have the name of an earlier one: their objects are of that one"
    assert said in capsys.readouterr().out
    assert data.names == ["cup", "dog"] and score(data, tmp_path) == MASKS


def test_names_with_spaces_in_lists_of_classes(tmp_path):
    """For eval_linear.py --data voc07"""
    folder = voc_layout(tmp_path, "2007", name="photo {}")
    lists = folder / "ImageSets" / "Main"
    (lists / "cup_test.txt").write_text("photo 0  1\nphoto 1 -1\nphoto 2  0\n")
    (lists / "dog_test.txt").write_text("photo 2 -1\n\nphoto 1  1 \nphoto 0\t1\n")
    data = eval_linear.label_data("voc07", str(tmp_path), "test")
    assert data.names == ["cup", "dog"] and data.labels.tolist() == [[1, 1], [0, 1], [-1, 0]]
    assert data.images[2] == str(folder / "JPEGImages" / "photo 2.jpg")


def test_files_of_voc_that_are_missing(tmp_path):
    folder = voc_layout(tmp_path, "2012")
    file = folder / "Annotations" / "000001.xml"
    file.write_text(file.read_text().replace("<name>dog</name>", "", 1))
    with pytest.raises(SystemExit, match="000001.xml cannot be read .AttributeError"):
        boxes.load("voc", str(tmp_path), "2012_test")
    file.unlink()
    with pytest.raises(SystemExit, match="000001.xml cannot be read .FileNotFoundError"):
        boxes.load("voc", str(tmp_path), "2012_test")


def test_mirrored_sides(tmp_path):
    """In a mirrored photo the left cup becomes the right cup; boxes stay with their labels."""

    def name_sides(rows):
        rows[0]["name"], rows[1]["name"] = "left cup", "right cup"

    coco_layout(tmp_path, categories=name_sides)
    data = boxes.load("coco", str(tmp_path), "val2017")
    photos, seen = boxes.BoxPhotos(data, [0]), set()
    for seed in range(8):
        sample = photos.sample(0, np.random.default_rng(seed))
        for (x, y, right, bottom), label in zip(sample["boxes"].int(), sample["labels"].tolist()):
            red, green, _ = sample["image"][:, y:bottom, x:right].float().mean((1, 2))
            seen.add((label, bool(red > green), x.item()))
    assert seen == {(1, True, 8), (2, False, 50), (2, True, 62), (1, False, 4)}


def test_names_in_any_script(tmp_path, capsys):
    """Two Chinese names differ in the picture, or a line says that no font is there."""
    pytest.importorskip("matplotlib")
    pictures = []
    for name in "猫咪", "犬犬":
        coco_layout(tmp_path, masks=False, categories=lambda rows: rows[0].update(name=name))
        data = boxes.load("coco", str(tmp_path), "val2017")
        row = {"image_id": 100, "category_id": 3, "bbox": [8, 4, 20, 32], "score": 0.9}
        boxes.draw(data, [row], tmp_path / "drawn.png")
        pictures.append(np.asarray(Image.open(tmp_path / "drawn.png")))
    differ = (pictures[0] != pictures[1]).any()
    assert differ or "no font here has some letters" in capsys.readouterr().out
