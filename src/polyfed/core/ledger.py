"""The ledger: every message weighed. Bytes, exchanges and seconds, per client, direction and round."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyfed.core.messages import Down, State, size

if TYPE_CHECKING:
    import pandas as pd


def row_bytes(state: State) -> int:
    """Bytes of one client's part of tensors [s, ...]."""
    return sum(t[0].numel() * t.element_size() if len(t) else 0 for t in state.values())


def down_bytes(down: Down) -> int:
    """Bytes that one client receives: shared tensors are sent to every client, `each` tensors one row."""
    return size(down.shared) + row_bytes(down.each)


# staleness: rounds from the message to its reply, 0 in synchronous training; steps: batches trained on, in all local
# solves of the round; seconds: of computing, measured
COLUMNS = ("round", "client", "exchanges", "down_bytes", "up_bytes", "staleness", "steps", "seconds")


class Ledger:
    """Bytes, steps and seconds of each client in each round it took part in; `COLUMNS` names the columns."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._bytes = [0, 0]  # down and up so far

    def record(
        self,
        t: int,
        ids: np.ndarray,
        exchanges: np.ndarray,
        down: np.ndarray,
        up: np.ndarray,
        staleness: np.ndarray,
        seconds: np.ndarray,
        steps: np.ndarray | int = 0,
    ) -> None:
        """Round t: each of `ids` received `down` bytes and sent `up` bytes in `exchanges` round trips."""
        rows = np.empty((len(ids), len(COLUMNS)))
        for k, column in enumerate((t, ids, exchanges, down, up, staleness, steps, seconds)):
            rows[:, k] = column
        self._append(rows)

    def _append(self, rows: np.ndarray) -> None:
        self._rows.append(rows)
        self._bytes = [so_far + int(rows[:, k].sum()) for so_far, k in zip(self._bytes, (3, 4), strict=True)]

    def array(self) -> np.ndarray:
        """[rows, 8] float64, in the order of COLUMNS (bytes are exact below 2^53)."""
        if len(self._rows) > 1:
            self._rows = [np.concatenate(self._rows)]
        return self._rows[0] if self._rows else np.zeros((0, len(COLUMNS)))

    def frame(self) -> "pd.DataFrame":
        """The ledger as a table; bytes are integers."""
        import pandas as pd  # here, because it is slow to import

        named = zip(COLUMNS, self.array().T, strict=True)
        return pd.DataFrame({name: a if name == "seconds" else a.astype(np.int64) for name, a in named})

    def by_client(self, n: int) -> dict[str, np.ndarray]:
        """Per client [n]: "rounds" it took part in, "down_bytes", "up_bytes"."""
        a = self.array()
        who = a[:, 1].astype(np.int64)
        return {
            name: np.bincount(who, weights, n).astype(np.int64)
            for name, weights in (("rounds", None), ("down_bytes", a[:, 3]), ("up_bytes", a[:, 4]))
        }

    def totals(self) -> tuple[int, int]:
        """(bytes down, bytes up) so far."""
        return self._bytes[0], self._bytes[1]

    def tensor(self) -> Tensor:
        return torch.as_tensor(self.array().copy())

    def restore(self, rows: Tensor) -> None:
        self._rows, self._bytes = [], [0, 0]
        self._append(rows.numpy())
