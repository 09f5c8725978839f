"""audit: try to break a private run's promise, with canaries. Steinke, Nasr, Jagielski, "Privacy Auditing with One (1)
Training Run" (NeurIPS 2023).

Rows are made whose gradients have directions of their own, and each is put in or left out by a fair coin. The run's
privacy trains on them, by the code that trains on patients; whoever guesses the coins from the model more often than
epsilon allows has shown that epsilon is wrong.
"""

import secrets
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from polyfed.algorithms.fedavg import FedAvg
from polyfed.base.errors import ConfigError
from polyfed.data.federation import Federation
from polyfed.privacy.accounts import lower_bound
from polyfed.privacy.settings import Privacy
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training

CANARIES, SITES = 2000, 4
LENGTH, TARGET = 1e3, 1e6  # of a canary: its gradient is far beyond any clip, whatever the model


class Audit(NamedTuple):
    """What an audit has found. claim: the run's epsilon     bound: what it is at least, at 95 % confidence

    right, guesses: of the coins that the auditor was most certain of
    """

    claim: float
    bound: float
    right: int
    guesses: int

    @property
    def broken(self) -> bool:
        """True where the run is less private than it claims."""
        return self.bound > self.claim


def audit(privacy: Privacy, rounds: int, canaries: int = CANARIES) -> Audit:
    """Train on canaries under a run's privacy, and guess which of them were there.

    Parameters
    ----------
    privacy : Privacy
        The run's settings, of a row.
    rounds : int
        Rounds.
    canaries : int
        Rows, each there or not.

    Returns
    -------
    Audit
        The bound and the claim.

    Raises
    ------
    ConfigError
        There is no epsilon, or its unit is a site.
    """
    if privacy.epsilon is None or privacy.unit == "site":
        raise ConfigError("audit: for runs with privacy.epsilon and unit = row, whose rows canaries can be")
    coins = np.array([secrets.randbits(1) for _ in range(canaries)])
    rows = np.eye(canaries) * LENGTH * coins[:, None]
    sites = [(x.astype(np.float64), np.full(len(x), TARGET)) for x in np.array_split(rows, SITES)]
    federation = Federation.from_arrays(sites, test_fraction=0)
    net = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(net.weight)
    how = Training(
        rounds=rounds, batch_size=None, local_steps=1, evaluate_every=0, privacy=privacy, dtype=torch.float64
    )
    trainer = prepare(net, federation, FedAvg(lr=1.0), how)
    assert trainer.private is not None
    claim = float(trainer.private.table()["epsilon-of-the-run"])
    models = [torch.zeros(canaries, dtype=torch.float64)]
    trainer.run(callbacks=[lambda progress: models.append(progress.run.server["w"].clone())])
    score = _scores(np.stack([w.numpy() for w in models]))
    guesses = min(canaries, max(200, int(60 * claim)))
    certain = np.argsort(-np.abs(score), kind="stable")[:guesses]
    right = int(((score > 0)[certain] == (coins[certain] == 1)).sum())
    return Audit(claim, lower_bound(right, guesses, canaries, privacy.delta), right, guesses)


def _scores(models: np.ndarray) -> np.ndarray:
    """How certain it is of each canary that it was there: [rounds + 1, m] models -> [m], above 0 where it was.

    Every round's moves count by how little they vary, so that a round without noise decides.
    """
    moves = np.diff(models, axis=0)
    moves = moves - np.median(moves, axis=1, keepdims=True)
    spread = np.median(np.abs(moves), axis=1, keepdims=True)
    return (moves / np.maximum(spread, 1e-100) ** 2).sum(0)
