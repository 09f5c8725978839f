"""Tiny ImageNet: its folder in miniature, and an npz."""

import numpy as np
import pytest
from PIL import Image

from polyfed.data import load
from polyfed_papers.images import read_folder

WNIDS = ("n02", "n01", "n03")  # wnids.txt is not in alphabetic order
COLOURS = {"n01": (200, 30, 40), "n02": (10, 180, 20), "n03": (90, 90, 90)}


def jpeg(path, colour, mode="RGB", size=(64, 64), form="JPEG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if mode == "RGB" else colour[0]).save(path, form, quality=95)


@pytest.fixture
def root(tmp_path):
    """Four training images a class, two of validation; class n03 is stored in grey."""
    folder = tmp_path / "tiny-imagenet-200"
    lines = []
    for wnid in WNIDS:
        mode = "L" if wnid == "n03" else "RGB"
        for k in range(4):
            jpeg(folder / "train" / wnid / "images" / f"{wnid}_{k}.JPEG", COLOURS[wnid], mode)
    for k, wnid in enumerate(("n03", "n01", "n02", "n02", "n01", "n03")):
        jpeg(folder / "val" / "images" / f"val_{k}.JPEG", COLOURS[wnid])
        lines.append(f"val_{k}.JPEG\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return tmp_path


def test_the_folder(root):
    x, y, x_val, y_val = read_folder(root / "tiny-imagenet-200")
    assert (x.shape, x.dtype) == ((12, 3, 64, 64), np.uint8)
    assert y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert y_val.tolist() == [2, 0, 1, 1, 0, 2]
    for images, labels in ((x, y), (x_val, y_val)):
        for image, label in zip(images, labels, strict=True):
            colour = np.array(COLOURS[f"n0{label + 1}"])[:, None, None]
            assert np.abs(image.astype(int) - colour).max() <= 4  # what JPEG loses on one colour


def test_it_is_a_data_set_like_the_others(root):
    data = load("tiny-imagenet", root, normalise=True)
    assert data.classes == 200
    assert any("validation images are the test set" in note for note in data.notes)
    assert any("subset of 12 + 6" in note for note in data.notes)
    fed = data.partition("iid", clients=2, test_samples=2)
    assert fed.input_shape == (3, 64, 64)
    green = fed.train.x[fed.train.y == 1][0].mean((1, 2))
    np.testing.assert_allclose(green, (np.array(COLOURS["n02"]) / 255 - 0.5) / 0.5, atol=0.04)


def test_an_npz_holds_the_same(root):
    x, y, x_val, y_val = read_folder(root / "tiny-imagenet-200")
    images, images_val = np.moveaxis(x, 1, -1), np.moveaxis(x_val, 1, -1)
    np.savez(root / "tiny-imagenet-small.npz", x_train=images, y_train=y, x_test=images_val, y_test=y_val)
    data = load("tiny-imagenet", root)
    assert np.array_equal(data.x, x)
    assert data.y_test is not None
    assert data.y_test.tolist() == y_val.tolist()


def test_what_is_damaged_is_named(root, refused):
    folder = root / "tiny-imagenet-200"
    image = folder / "train" / "n01" / "images" / "n01_2.JPEG"
    good = image.read_bytes()
    jpeg(image, (1, 2, 3), size=(64, 32))
    with refused(image, "64 x 32", "64 x 64"):
        read_folder(folder)
    jpeg(image, (1, 2, 3), form="PNG")
    with refused(image, "not a JPEG"):
        read_folder(folder)
    image.write_bytes(good[: len(good) // 2])
    with refused(image):
        read_folder(folder)
    image.write_bytes(good)
    (folder / "val" / "images" / "val_3.JPEG").unlink()
    with refused("val_3.JPEG", "No such file"):
        read_folder(folder)
    with open(folder / "val" / "val_annotations.txt", "a") as f:
        f.write("val_9.JPEG\tn99\t0\t0\t1\t1\n")
    with refused("val_annotations.txt, line 7", "'n99'"):
        read_folder(folder)
    (folder / "val" / "val_annotations.txt").unlink()
    with refused("val_annotations.txt", "cannot be read"):
        load("tiny-imagenet", root)
