"""Texts as a model's inputs: token ids, and a mask that says which of them are there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.checkpoint import reason
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError

Array = np.ndarray


@dataclass(frozen=True)
class Text:
    """A column of texts. length: tokens of each     tokenizer: a tokenizer.json here     digest: of that file"""

    column: str
    length: int
    tokenizer: str
    digest: str

    @classmethod
    def of(cls, columns: Columns) -> "Text | None":
        """What a table [columns] says of texts. Raises DataError where the tokenizer cannot be read."""
        if columns.text is None or columns.tokenizer is None:
            return None
        path = Path(columns.tokenizer).expanduser().resolve()
        return cls(columns.text, columns.length, str(path), _read(path)[1])

    def at(self, tokenizer: str | None) -> "Text":
        """The same with the tokenizer in another place."""
        return self if tokenizer is None else replace(self, tokenizer=tokenizer)

    def tokens(self, texts: Sequence[str]) -> Array:
        """Ids and masks, [N, 2, length] int64. Raises DataError for another tokenizer than the digest's."""
        found, digest = _read(Path(self.tokenizer).expanduser().resolve())
        if digest != self.digest:
            raise DataError(f"columns.tokenizer: {self.tokenizer}: found digest {digest}, expected {self.digest}")
        out = np.zeros((len(texts), 2, self.length), dtype=np.int64)
        for row, encoded in zip(out, found.encode_batch_fast([*texts]), strict=True):
            ids = encoded.ids[: self.length]
            row[0, : len(ids)], row[1, : len(ids)] = ids, 1
        return out


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
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("columns.text: tokenizers is not installed; pip install 'polyfed[transformers]'") from None
    maker: Any = Tokenizer
    try:
        data = path.read_bytes()
        found = maker.from_str(data.decode())
    except Exception as e:  # the library has errors of its own
        raise DataError(f"columns.tokenizer: {path}: not a tokenizer.json ({reason(e)})") from None
    found.no_padding()
    found.no_truncation()
    return found, hashlib.sha256(data).hexdigest()[:16]
