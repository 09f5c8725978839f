"""A message as Flower carries it: pieces, each named by its digest, and a tree of their names."""

import hashlib
from collections.abc import Iterable
from typing import Any

from polyfed_sites import flower_api as flwr

PIECE = 5 << 20  # bytes


def cut(data: bytes) -> tuple[Any, dict[str, bytes]]:
    """The tree of names, and the pieces."""
    whole = memoryview(data)
    parts = [flwr.ArrayChunk(whole[i : i + PIECE]).deflate() for i in range(0, max(1, len(data)), PIECE)]
    ids = [hashlib.sha256(part).hexdigest() for part in parts]
    rest = [flwr.ObjectTree(object_id=i) for i in ids[1:]]
    return flwr.ObjectTree(object_id=ids[0], children=rest), dict(zip(ids, parts, strict=True))


def names(tree: Any) -> list[str]:
    """The pieces' names in their order."""
    return [tree.object_id, *(child.object_id for child in tree.children)]


def joined(parts: Iterable[bytes]) -> bytes:
    """What was cut. Raises ValueError for what is no piece."""
    return b"".join(flwr.ArrayChunk.inflate(part).data for part in parts)
