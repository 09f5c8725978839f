"""What clients keep after an exchange, for those who look on."""

import torch
from torch import Tensor

from polyfed.engines.local import LocalEngine


def private_rows(engine: LocalEngine, ids: Tensor) -> dict[str, Tensor]:
    """Private rows that the last exchange made: [m, ...] each, of the clients `ids: [m]`."""
    if not engine._new:
        return {}
    place = {int(i): k for k, i in enumerate(torch.cat([round.ids for round, _ in engine._new]))}
    at = [place[int(i)] for i in ids]
    return {name: torch.cat([rows[name] for _, rows in engine._new])[at] for name in engine._new[0][1]}
