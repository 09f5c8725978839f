"""Columns that go in alone: texts, as token ids and a mask that says which of them are there; and files of images."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.checkpoint import reason
from polyfed.base.columns import NEXT, Columns
from polyfed.base.errors import ConfigError, DataError, closest
from polyfed.compute.losses import IGNORED

Array = np.ndarray
DECODED = ("JPEG", "PNG")
PIXELS = {  # means and deviations of pixels in [0, 1], by what models were trained with
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Text:
    """A column of texts."""

    column: str
    length: int  # tokens of each
    tokenizer: str  # a tokenizer.json of this machine
    digest: str  # of that file
    following: bool = False  # each token is asked for the next one, as in a language model
    pack: bool = False
    end: int | None = None  # token that closes a text
    words: int = 0  # ids that the tokenizer has

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a text: ids and mask."""
        return (2, self.length)

    def __str__(self) -> str:
        if self.pack:
            return f"{self.column} goes in alone, its texts packed into rows of {self.length} tokens"
        return f"{self.column} goes in alone, as {self.length} tokens; longer texts are cut"

    def codes(self, texts: Sequence[str], folder: Path) -> Array:
        """Ids and masks, [N, 2, length] int64. Raises DataError for another tokenizer than the digest's."""
        out = np.zeros((len(texts), 2, self.length), dtype=np.int64)
        for row, encoded in zip(out, self._own.encode_batch_fast([*texts]), strict=True):
            ids = encoded.ids[: self.length]
            row[0, : len(ids)], row[1, : len(ids)] = ids, 1
        return out

    def ids(self, texts: Sequence[str], at: Callable[[int], str]) -> list[Array]:
        """The ids of each text, closed; `at` says where a text is. Raises DataError for a text without tokens."""
        return closed([e.ids for e in self._own.encode_batch_fast([*texts])], self.end, at)

    def word(self, id: int) -> str:
        """A token as the tokenizer spells it."""
        return str(self._own.id_to_token(id))

    @property
    def _own(self) -> Any:
        tokenizer, digest = _read(Path(self.tokenizer).expanduser().resolve())
        if digest != self.digest:
            raise DataError(f"columns.tokenizer: {self.tokenizer}: found digest {digest}, expected {self.digest}")
        return tokenizer


@dataclass(frozen=True)
class Images:
    """A column of image files, named from the folder of the table."""

    column: str
    size: int  # of each side
    pixels: str  # of `PIXELS`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image: channels, height, width."""
        return (3, self.size, self.size)

    def __str__(self) -> str:
        return f"{self.column} goes in alone, as images of {self.size} x {self.size} pixels"

    def codes(self, files: Sequence[str], folder: Path) -> Array:
        """Pixels, [N, 3, size, size] float32. Raises DataError, with the file, for what is no JPEG or PNG."""
        if self.pixels not in PIXELS:
            raise DataError(f"columns.pixels: found {self.pixels!r}, expected {', '.join(PIXELS)}")
        mean, deviation = (np.array(v, dtype=np.float32)[:, None, None] for v in PIXELS[self.pixels])
        out = np.empty((len(files), *self.shape), dtype=np.float32)
        for k, file in enumerate(files):
            out[k] = (_image(folder / file, self.size) - mean) / deviation
        return out


def read_by(raw: Text | Images | None, tokenizer: str | None = None) -> Text | Images | None:
    """The same with the tokenizer of another place; None: without the folder that it is in here."""
    return replace(raw, tokenizer=tokenizer or Path(raw.tokenizer).name) if isinstance(raw, Text) else raw


def raw_of(columns: Columns) -> Text | Images | None:
    """Texts or images of a table [columns]. Raises DataError where the tokenizer cannot be read."""
    if columns.image is not None:
        return Images(columns.image, columns.size, columns.pixels)
    if columns.text is None or columns.tokenizer is None:
        return None
    path = Path(columns.tokenizer).expanduser().resolve()
    tokenizer, digest = _read(path)
    plain = Text(columns.text, columns.length, str(path), digest)
    if columns.task != NEXT:
        return plain
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    if columns.end is not None and columns.end not in vocabulary:
        raise ConfigError(
            f"columns.end: found {columns.end!r}, expected a token of {path}{closest(columns.end, vocabulary)}"
        )
    end = None if columns.end is None else vocabulary[columns.end]
    return replace(plain, following=True, pack=columns.pack, end=end, words=words(path))


def encoder(tokenizer: str | Path) -> Callable[[Sequence[str]], list[list[int]]]:
    """(texts) -> the ids of each, by a tokenizer.json. Raises DataError where it cannot be read."""
    loaded = _read(Path(tokenizer).expanduser().resolve())[0]
    return lambda texts: [encoded.ids for encoded in loaded.encode_batch_fast([*texts])]


def words(tokenizer: str | Path) -> int:
    """The ids that a tokenizer.json has, from 0."""
    return max(_read(Path(tokenizer).expanduser().resolve())[0].get_vocab().values()) + 1


def closed(ids: Sequence[Sequence[int]], end: int | None, at: Callable[[int], str]) -> list[Array]:
    """The ids of each text, closed by `end`; `at` says where a text is. Raises DataError for a text without tokens."""
    arrays = [np.asarray(of, dtype=np.int64).reshape(-1) for of in ids]
    empty = next((k for k, of in enumerate(arrays) if not len(of)), None)
    if empty is not None:
        raise DataError(f"{at(empty)} has no token")
    return arrays if end is None else [np.append(of, end) for of in arrays]


def following(texts: Sequence[Array], length: int, pack: bool) -> tuple[Array, Array]:
    """Ids and mask [N, 2, length], and the next token of each [N, length], both int64; -100 where there is none.

    Packed texts follow each other and are cut into rows; else each is a row, cut or padded.
    """
    follows = [np.append(ids[1:], IGNORED) for ids in texts]
    if pack and texts:
        stream = np.concatenate(texts), np.concatenate(follows)
        pieces = [tuple(t[k : k + length] for t in stream) for k in range(0, len(stream[0]), length)]
    else:
        pieces = [(ids[:length], after[:length]) for ids, after in zip(texts, follows, strict=True)]
    x = np.zeros((len(pieces), 2, length), dtype=np.int64)
    y = np.full((len(pieces), length), IGNORED, dtype=np.int64)
    for row, target, (ids, after) in zip(x, y, pieces, strict=True):
        row[0, : len(ids)], row[1, : len(ids)], target[: len(ids)] = ids, 1, after
    return x, y


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
        tokenizer = maker.from_str(data.decode())
    except Exception as e:  # the library has errors of its own
        raise DataError(f"columns.tokenizer: {path}: not a tokenizer.json ({reason(e)})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, hashlib.sha256(data).hexdigest()[:16]
