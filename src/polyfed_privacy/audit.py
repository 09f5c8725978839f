"""audit: try to break a private run's promise, with canaries. Steinke, Nasr, Jagielski, "Privacy Auditing with One (1)
Training Run" (NeurIPS 2023).
"""

import math
import secrets
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from polyfed.algorithms.fedavg import FedAvg
from polyfed.base.errors import ConfigError
from polyfed.data.federation import Federation
from polyfed.runs.privacy import Privacy
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training
from polyfed_privacy.accounts import lower_bound, rho_of

CANARIES, SITES = 2000, 4
LENGTH, TARGET = 1e3, 1e6  # of a canary: its gradient is far beyond any clip, whatever the model


class Audit(NamedTuple):
    """Findings of an audit."""

    claim: float  # the run's epsilon
    bound: float  # the least epsilon, at 95 % confidence
    right: int  # of the guesses
    guesses: int  # of the coins that the auditor was most certain of
    auc: float  # of telling all canaries that were there from those that were not
    best: float  # the AUC that the claim allows with noise of this size
    moves: int  # numbers that are noise alone
    second: float  # their variance over that of the claim
    fourth: float  # their fourth moment over their squared variance, 3 for a Gaussian

    @property
    def short(self) -> bool:
        """True where the noise is less than the claim needs, or no Gaussian, by four standard errors."""
        return self.second < 1 - 4 * math.sqrt(2 / self.moves) or abs(self.fourth - 3) > 4 * math.sqrt(24 / self.moves)

    @property
    def broken(self) -> bool:
        """True where the run is less private than it claims."""
        return self.bound > self.claim or self.short


def audit(privacy: Privacy, rounds: int, canaries: int = CANARIES) -> Audit:
    """Train on canaries under a run's privacy, each there or not by a fair coin, and guess the coins."""
    if privacy.epsilon is None or privacy.unit == "site":
        raise ConfigError("audit: for runs with privacy.epsilon and unit = row, whose rows canaries can be")
    # Rows whose gradients have directions of their own, trained on by the code that trains on patients: guessing their
    # coins from the model more often than epsilon allows shows that epsilon is wrong.
    canaries = min(canaries, math.ceil(1 / privacy.delta) - 1)  # of more rows than that, delta would allow one to leave
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
    claim = float(trainer.describe["privacy-plan"]["epsilon-of-the-run"])
    models = [torch.zeros(canaries, dtype=torch.float64)]
    trainer.run(callbacks=[lambda progress: models.append(progress.run.server["w"].clone())])
    moves = np.diff(np.stack([w.numpy() for w in models]), axis=0)
    score, there = _scores(moves), coins == 1
    guesses = min(canaries, max(200, int(60 * claim)))
    certain = np.argsort(-np.abs(score), kind="stable")[:guesses]
    right = int(((score > 0)[certain] == there[certain]).sum())
    rho = rho_of(claim, privacy.delta)
    several = {"shared": SITES / (SITES - privacy.absent), "own": SITES, "server": 1}[privacy.noise]
    sigma = float(privacy.clip or 0) * math.sqrt(several * rounds / (2 * rho)) / canaries
    # without a canary a round moves a model by noise alone; noise a bit too small shows in its moments alone
    noise = moves[:, ~there].ravel() / sigma
    second = float((noise**2).mean())
    return Audit(
        claim=claim,
        bound=lower_bound(right, guesses, canaries, privacy.delta),
        right=right,
        guesses=guesses,
        auc=_auc(score, there),
        best=NormalDist().cdf(math.sqrt(rho / several)),
        moves=noise.size,
        second=second,
        fourth=float((noise**4).mean()) / max(second**2, 1e-300),
    )


def _auc(score: np.ndarray, there: np.ndarray) -> float:
    """The share of pairs of a canary that was there and one that was not which scores order rightly."""
    ranks = np.empty(len(score))
    ranks[np.argsort(score, kind="stable")] = np.arange(1, len(score) + 1)
    some = int(there.sum())
    return float(ranks[there].sum() - some * (some + 1) / 2) / max(1, some * (len(score) - some))


def _scores(moves: np.ndarray) -> np.ndarray:
    """Certainty that each canary was there, from [rounds, m] moves: [m], above 0 where it was."""
    moves = moves - np.median(moves, axis=1, keepdims=True)
    spread = np.median(np.abs(moves), axis=1, keepdims=True)
    # rounds weigh by how little their moves vary: one without noise decides
    return (moves / np.maximum(spread, 1e-100) ** 2).sum(0)
