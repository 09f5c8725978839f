"""Sites in this process, with which every message is exchanged as bytes: what a network would carry, without one. And
messages as a program that is wrong may send them: a head is any table."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polyfed.base.errors import RunError
from polyfed_sites.wire import FORMAT, pack, size, unpack

MOST = 1 << 30


class Raw(NamedTuple):
    """A message that was not checked."""

    head: dict[str, Any]
    tensors: dict[str, Tensor] = {}  # noqa: RUF012  (never written to)

    def pack(self) -> bytes:
        return pack({"format": FORMAT} | self.head, self.tensors)

    def saying(self, **more: Any) -> "Raw":
        """The same with other words in its head."""
        return self._replace(head=self.head | more)


def raw(data: bytes) -> Raw:
    return Raw(*unpack(data, MOST, "the other side"))


class Direct:
    """names: of the sites     answer: (a site's name, a message) -> its answer     moved: bytes of tensors so far, down
    and up"""

    def __init__(self, names: Sequence[str], answer: Callable[[str, bytes], bytes], most: int = 1 << 24):
        self.names, self.answer, self.most, self.moved = names, answer, most, [0, 0]
        self._asked: dict[str, bytes] = {}

    def sites(self) -> Sequence[str]:
        return self.names

    def push(self, messages) -> None:
        self._asked |= {name: message.pack() for name, message in messages.items()}
        self.moved[0] += sum(size(message.tensors) for message in messages.values())

    def pull(self, names, enough=None, seconds=None) -> dict[str, bytes | str]:
        some = [name for name in names if name in self._asked][:enough]
        found = {name: self.answer(name, self._asked.pop(name)) for name in some}
        for data in found.values():
            try:
                self.moved[1] += size(raw(data).tensors)
            except RunError:
                continue
        return found

    def close(self) -> None:
        self._asked.clear()
