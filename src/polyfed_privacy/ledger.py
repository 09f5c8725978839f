"""The ledger of what a site's data have been spent on: over runs, flushed before anything leaves, refused once spent.

A release is one (site, data, context, digest of the request). Asked again it is the same message, with the same noise,
and costs nothing more; another digest is another release.
"""

import json
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.base.errors import RunError
from polyfed.base.system import alone
from polyfed.core.engine import Silent
from polyfed_privacy.accounts import epsilon_of, rho_of


class Budget(NamedTuple):
    """What may be spent: epsilon at delta."""

    epsilon: float
    delta: float

    @property
    def rho(self) -> float:
        """In zCDP."""
        return rho_of(self.epsilon, self.delta)


class Entry(NamedTuple):
    """One release of one site's data. rho: its cost"""

    site: str
    data: str
    context: str
    digest: str
    rho: float


class Spent(Silent):
    """A site's budget does not hold another release; what was trained before is whole."""

    outside = "its privacy budget is spent"


class Ledger:
    """A file of releases, a line each, that is only ever appended to; without a path, in memory.

    heaviest: where data are sets of rows, (rho by set, a set) -> the most that has been spent of one of its rows
    """

    def __init__(self, path: Path | None = None, heaviest: Callable[[Mapping[str, float], str], float] | None = None):
        self.path, self.heaviest = path, heaviest
        self._lock = threading.Lock()
        self._known: set[tuple[str, str, str, str]] = set()
        self._total: dict[tuple[str, str], float] = {}
        self._rounds: dict[tuple[str, str, str], set[str]] = {}
        self._read = 0
        with self._file():
            pass

    def spent(self, site: str, data: str) -> float:
        """rho of all releases of a site's data, or of that of its rows of which most has been spent."""
        if self.heaviest is None:
            return self._total.get((site, data), 0.0)
        return self.heaviest({of: rho for (name, of), rho in self._total.items() if name == site}, data)

    def rounds(self, site: str, data: str, run: str) -> int:
        """Rounds of a run in which a site's data were released."""
        return len(self._rounds.get((site, data, run), ()))

    def book(self, entries: Iterable[Entry], budget: Budget, limit: float | None = None) -> None:
        """Book releases that are about to leave, of which those booked before cost nothing; then they are on disk.

        limit: rho of the budget, where it has been worked out. Raises Spent, with none booked, where the budget of a
        site does not hold them, and RunError where the file cannot be written.
        """
        most = budget.rho if limit is None else limit
        with self._lock, self._file() as file:
            new = [e for e in entries if e[:4] not in self._known]
            total: dict[tuple[str, str], float] = {}
            for e in new:
                key = e.site, e.data
                total[key] = total.get(key, self.spent(*key)) + e.rho
                if total[key] > most * (1 + 1e-9):
                    raise Spent(
                        f"client {e.site!r}: its privacy budget of epsilon {budget.epsilon:g} at delta "
                        f"{budget.delta:g} is spent (epsilon {epsilon_of(self.spent(*key), budget.delta):.3g} so far)"
                    )
            if file is not None and new:
                self._append(file, new)
            for e in new:
                self._add(e)

    def _add(self, e: Entry) -> None:
        if e[:4] not in self._known:
            self._known.add(e[:4])
            self._total[e.site, e.data] = self.spent(e.site, e.data) + e.rho
            run, _, exchange = e.context.partition(" ")
            self._rounds.setdefault((e.site, e.data, run), set()).add(exchange.partition(".")[0])

    def _append(self, file: int, new: list[Entry]) -> None:
        try:
            os.lseek(file, self._read, os.SEEK_SET)
            os.ftruncate(file, self._read)  # a line that a kill has cut: nothing of it had left
            text = "".join(json.dumps(e._asdict()) + "\n" for e in new).encode()
            while text:
                written = os.write(file, text)
                text, self._read = text[written:], self._read + written
            os.fsync(file)
        except OSError as error:
            raise RunError(f"cannot write the ledger {self.path}: {error.strerror}; nothing has left") from None

    @contextmanager
    def _file(self) -> Generator[int | None]:
        """The file, locked and read to its end; None for a ledger in memory."""
        if self.path is None:
            yield None
            return
        try:
            file = alone(self.path)
        except OSError as e:
            raise RunError(f"cannot open the ledger {self.path}: {e.strerror}") from None
        try:
            self._catch_up(file)
            yield file
        finally:
            os.close(file)

    def _catch_up(self, file: int) -> None:
        """Take in what others have appended."""
        size = os.fstat(file).st_size
        if size < self._read:
            raise RunError(f"{self.path}: the ledger is shorter than it was; restore it")
        os.lseek(file, self._read, os.SEEK_SET)
        text = b""
        while more := os.read(file, 1 << 20):
            text += more
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                fields: dict[str, Any] = json.loads(line)
                entry = Entry(**fields)
                if not entry.rho >= 0:
                    raise ValueError
            except (ValueError, TypeError):
                raise RunError(f"{self.path}: found a line that is no release; restore the ledger") from None
            self._add(entry)
        self._read += len(whole)
