"""Files that grow by lines of JSON, each on the disk before what it is about leaves; a kill may cut the last one."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyfed.base.errors import Refusal


def append(path: Path, *entries: Any) -> None:
    """Write lines, for this user only. Raises Refusal where that fails: then nothing leaves."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 1))
            torn = f.read() not in (b"", b"\n")  # by a kill
            f.write(b"\n" * torn + "".join(f"{json.dumps(entry)}\n" for entry in entries).encode())
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise Refusal(f"{path}: cannot be written ({e.strerror})", "its vault cannot be written") from None


def lines(path: Path) -> Iterator[Any]:
    """What a file's lines hold, without those that were cut off; nothing where there is no file."""
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            yield json.loads(line)


def pairs(path: Path) -> Iterator[tuple[str, Any]]:
    """The lines that are a name and something."""
    for entry in lines(path):
        match entry:
            case [name, what]:
                yield str(name), what
            case _:
                pass
