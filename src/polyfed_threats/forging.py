"""Forging: attackers put something else in the place of their uplinks, after they have trained honestly."""

from typing import Any

import numpy as np
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.base.randomness import generator
from polyfed.core.algorithm import Round, State
from polyfed_threats.aggregation import Rule
from polyfed_threats.attacks import Attack


@checked
class Forging:
    """Forge the uplinks of attackers by keyed draws; the event loop calls it with the uplinks of some clients.

    Clients keep honest private states; only what they send is forged, and bytes stay what they were.

    Parameters
    ----------
    attack : Attack or None
        None: no client attacks.
    keys : array
        [n] client keys.
    seed : int
        Of the attackers and of what they draw.
    """

    def __init__(self, attack: Attack | None, keys: np.ndarray, seed: int):
        self.attack, self.keys, self.seed = attack, keys, seed
        self.attackers = np.zeros(len(keys), dtype=bool) if attack is None else attack.attackers(seed, keys)

    def __call__(self, up: State, received: State, round: Round) -> State:
        """The uplinks that the clients `round.ids` send; up, received: [s, ...]."""
        ids = round.ids.cpu().numpy()
        rows = np.flatnonzero(self.attackers[ids])
        if self.attack is None or not len(rows) or not up:
            return up
        names = self.attack.attacked(up)
        floats = [name for name, t in up.items() if t.is_floating_point()]
        back = [name for name in floats if name not in names] if names and self.attack.others == "received" else []
        up = up | {name: up[name].clone() for name in (*names, *back)}
        for name in back:
            sent = _received(name, up[name], received)
            if sent is not None:
                up[name][rows] = sent[rows]
        for row in rows.tolist():
            rng = generator(self.seed, f"attack {round.phase}", round.t, int(self.keys[ids[row]]))
            for name in names:
                sent = _received(name, up[name], received)
                up[name][row] = self.attack.forge(up[name][row], None if sent is None else sent[row], rng)
        return up


def _received(name: str, value: Tensor, down: State) -> Tensor | None:
    """The tensor of the same name and shape as an uplink tensor [s, ...] in its clients' downlink, or None."""
    return down[name] if name in down and down[name].shape == value.shape else None


@checked
def summary(part: Attack | Rule | None) -> dict[str, Any] | None:
    """An attack or rule as a table of settings, for config.toml.

    Parameters
    ----------
    part : Attack, Rule or None
        What has the settings.

    Returns
    -------
    dict or None
        Its name and settings; None for None.
    """
    return None if part is None else part.dump()
