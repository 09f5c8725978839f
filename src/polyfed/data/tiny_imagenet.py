"""The folder tiny-imagenet-200, as its zip unpacks: 200 classes of 500 training and 50 validation images, JPEG.

Labels of its official test images were never published: the validation images are the test set everywhere.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from polyfed.base.errors import DataError

SIDE = 64


def read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x [N, 3, 64, 64] uint8, y [N] int64, x_val, y_val), grey images as RGB; classes are sorted by their wnids."""
    # wnids.txt: a class a line; train/CLASS/images/*.JPEG; val/images/*.JPEG
    # val/val_annotations.txt: file, class and a box, with tabs between
    classes = sorted(line.strip() for line in _lines(folder / "wnids.txt") if line.strip())
    number = {wnid: k for k, wnid in enumerate(classes)}
    train = [(path, number[w]) for w in classes for path in sorted((folder / "train" / w / "images").glob("*.JPEG"))]
    annotations, validation = folder / "val" / "val_annotations.txt", []
    for k, line in enumerate(_lines(annotations), start=1):
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid not in number:
            raise DataError(f"{annotations}, line {k}: class {wnid!r} is not in wnids.txt")
        validation.append((folder / "val" / "images" / file, number[wnid]))
    if not train or not validation:
        raise DataError(f"{folder}: no images in train/CLASS/images, or none listed in val/val_annotations.txt")
    with ThreadPoolExecutor(4) as pool:
        x, x_val = (_decoded([path for path, _ in part], pool) for part in (train, validation))
    y, y_val = (np.array([label for _, label in part], dtype=np.int64) for part in (train, validation))
    return x, y, x_val, y_val


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None


def _decoded(paths: list[Path], pool: ThreadPoolExecutor) -> np.ndarray:
    out = np.empty((len(paths), 3, SIDE, SIDE), dtype=np.uint8)
    for k, image in enumerate(pool.map(_image, paths)):
        out[k] = image
    return out


def _image(path: Path) -> np.ndarray:
    """[3, 64, 64] uint8. Only the JPEG decoder is ever tried, and only after the size was seen."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("tiny-imagenet: its folder of JPEG files needs pillow (pip install pillow)") from None
    try:
        with Image.open(path, formats=["JPEG"]) as image:
            if image.size != (SIDE, SIDE):
                raise DataError(
                    f"{path}: found an image of {image.size[0]} x {image.size[1]}, expected {SIDE} x {SIDE}"
                )
            return np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
    except UnidentifiedImageError:
        raise DataError(f"{path}: not a JPEG file") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror or str(e).splitlines()[0]})") from None
