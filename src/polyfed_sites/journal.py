"""Files that grow by lines of JSON, each on the disk before what it is about leaves; a kill may cut the last one."""

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyfed.base.errors import Refusal


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Inside, a file that cannot be written is refused by its name here, and by none elsewhere."""
    try:
        yield
    except OSError as e:
        raise Refusal(f"{path}: cannot be written ({e.strerror})", "its vault cannot be written") from None


def append(path: Path, *entries: Any) -> None:
    """Write lines, for this user only. Raises Refusal where that fails: then nothing leaves."""
    with writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 1))
            torn = f.read() not in (b"", b"\n")  # by a kill
            f.write(b"\n" * torn + "".join(f"{json.dumps(entry)}\n" for entry in entries).encode())
            f.flush()
            os.fsync(f.fileno())


def lines(path: Path) -> Iterator[Any]:
    """What a file's lines hold, without those that were cut off; nothing where there is no file."""
    return _read(path.read_bytes() if path.is_file() else b"")


def _read(data: bytes) -> Iterator[Any]:
    for line in data.splitlines():
        with suppress(ValueError):
            yield json.loads(line)


class Pairs:
    """The lines of a file that are a name and something, as they come, whoever writes them."""

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def new(self) -> Iterator[tuple[str, Any]]:
        """Those that have come since the last call."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as f:
            f.seek(self._at)
            whole = f.read()
        self._at += (end := whole.rfind(b"\n") + 1)
        for entry in _read(whole[:end]):
            match entry:
                case [name, what]:
                    yield str(name), what
                case _:
                    pass


def pairs(path: Path) -> Iterator[tuple[str, Any]]:
    """All of them."""
    return Pairs(path).new()
