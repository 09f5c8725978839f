"""Columns that go in alone: texts, as token ids and a mask that says which of them are there; and files of images."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.checkpoint import reason
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError

Array = np.ndarray
DECODED = ("JPEG", "PNG")
PIXELS = {  # means and deviations of pixels in [0, 1], by what models were trained with
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Text:
    """A column of texts. length: tokens of each     tokenizer: a tokenizer.json here     digest: of that file"""

    column: str
    length: int
    tokenizer: str
    digest: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a text: ids and mask."""
        return (2, self.length)

    def __str__(self) -> str:
        return f"{self.column} goes in alone, as {self.length} tokens; longer texts are cut"

    def elsewhere(self) -> "Text":
        """The same without the folder that its tokenizer is in here."""
        return replace(self, tokenizer=Path(self.tokenizer).name)

    def at(self, columns: Columns) -> "Text":
        """The same with the tokenizer that a site has."""
        return self if columns.tokenizer is None else replace(self, tokenizer=columns.tokenizer)

    def codes(self, texts: Sequence[str], folder: Path) -> Array:
        """Ids and masks, [N, 2, length] int64. Raises DataError for another tokenizer than the digest's."""
        found, digest = _read(Path(self.tokenizer).expanduser().resolve())
        if digest != self.digest:
            raise DataError(f"columns.tokenizer: {self.tokenizer}: found digest {digest}, expected {self.digest}")
        out = np.zeros((len(texts), 2, self.length), dtype=np.int64)
        for row, encoded in zip(out, found.encode_batch_fast([*texts]), strict=True):
            ids = encoded.ids[: self.length]
            row[0, : len(ids)], row[1, : len(ids)] = ids, 1
        return out


@dataclass(frozen=True)
class Images:
    """A column of files of images, named from the folder of the table. size: of each side     pixels: of `PIXELS`"""

    column: str
    size: int
    pixels: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image: channels, height, width."""
        return (3, self.size, self.size)

    def __str__(self) -> str:
        return f"{self.column} goes in alone, as images of {self.size} x {self.size} pixels"

    def elsewhere(self) -> "Images":
        """The same: it has nothing that is of one machine."""
        return self

    def at(self, columns: Columns) -> "Images":
        """The same at a site."""
        return self

    def codes(self, files: Sequence[str], folder: Path) -> Array:
        """Pixels, [N, 3, size, size] float32. Raises DataError, with the file, for what is no JPEG or PNG."""
        if self.pixels not in PIXELS:
            raise DataError(f"columns.pixels: found {self.pixels!r}, expected {', '.join(PIXELS)}")
        mean, deviation = (np.array(v, dtype=np.float32)[:, None, None] for v in PIXELS[self.pixels])
        out = np.empty((len(files), *self.shape), dtype=np.float32)
        for k, file in enumerate(files):
            out[k] = (_image(folder / file, self.size) - mean) / deviation
        return out


def raw_of(columns: Columns) -> Text | Images | None:
    """What a table [columns] says of texts or images. Raises DataError where the tokenizer cannot be read."""
    if columns.image is not None:
        return Images(columns.image, columns.size, columns.pixels)
    if columns.text is None or columns.tokenizer is None:
        return None
    path = Path(columns.tokenizer).expanduser().resolve()
    return Text(columns.text, columns.length, str(path), _read(path)[1])


def encoder(tokenizer: str | Path) -> Callable[[Sequence[str]], list[list[int]]]:
    """(texts) -> the ids of each, by a tokenizer.json. Raises DataError where it cannot be read."""
    found = _read(Path(tokenizer).expanduser().resolve())[0]
    return lambda texts: [encoded.ids for encoded in found.encode_batch_fast([*texts])]


def _image(path: Path, size: int) -> Array:
    """[3, size, size] float32 in [0, 1]."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("columns.image: pillow is not installed; pip install pillow") from None
    try:
        with Image.open(path, formats=DECODED) as image:
            small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.moveaxis(np.asarray(small, dtype=np.float32) / 255, -1, 0)
    except UnidentifiedImageError:
        raise DataError(f"{path}: not an image, expected {' or '.join(DECODED)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:  # a broken PNG is bad syntax
        raise DataError(f"{path}: cannot be read ({reason(e)})") from None


def _read(path: Path) -> tuple[Any, str]:
    try:
        about = path.stat()
    except OSError as e:
        raise DataError(f"columns.tokenizer: {path}: cannot be read ({reason(e)})") from None
    return _loaded(path, about.st_mtime_ns, about.st_size)


@lru_cache(8)
def _loaded(path: Path, changed: int, size: int) -> tuple[Any, str]:
    """The tokenizer, which neither pads nor cuts, and the digest of its file."""
    try:
        maker: Any = import_module("tokenizers").Tokenizer
    except ImportError:
        raise DataError("columns.text: tokenizers is not installed; pip install 'polyfed[transformers]'") from None
    try:
        data = path.read_bytes()
        found = maker.from_str(data.decode())
    except Exception as e:  # the library has errors of its own
        raise DataError(f"columns.tokenizer: {path}: not a tokenizer.json ({reason(e)})") from None
    found.no_padding()
    found.no_truncation()
    return found, hashlib.sha256(data).hexdigest()[:16]
