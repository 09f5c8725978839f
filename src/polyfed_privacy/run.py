"""What `prepare` asks of this package for a run with [privacy]: its settings, its plan, and its door."""

import dataclasses
from functools import partial
from pathlib import Path

import torch

from polyfed.base.errors import ConfigError, RunError
from polyfed.core.algorithm import Algorithm
from polyfed.data.federation import Federation, Outline
from polyfed.runs.folder import RunFolder
from polyfed.runs.ownership import flush, put, write_private
from polyfed.runs.trainer import Trainer
from polyfed.runs.training import Training
from polyfed_privacy.guard import Guard
from polyfed_privacy.ledger import Ledger
from polyfed_privacy.noise import new_secret
from polyfed_privacy.plan import planned
from polyfed_privacy.planned import Planned
from polyfed_privacy.quantile import Following


def settled(training: Training, federation: Federation, started: bool) -> Training:
    """The settings of a run with [privacy]. Raises ConfigError for what it excludes. started: from another run"""
    t, p = training, training.privacy
    assert p is not None
    for key, given in (("robust", t.robust), ("attack", t.attack), ("engine", t.engine != "local" or None)):
        if given is not None:
            raise ConfigError(f"{key}: not with [privacy], under which the server has sums alone; leave it out")
    if started:
        raise ConfigError("start: not with [privacy], which does not know what the other run has spent")
    packed = federation.meta.get("preparation", {}).get("raw", {}).get("pack", False)
    if packed and p.epsilon is not None and p.unit == "row":
        raise ConfigError("columns.pack: found true, expected false: epsilon is of one row, and a text is in several")
    return dataclasses.replace(t, dtype=torch.float64) if p.epsilon is not None and t.dtype is None else t


def guarded(trainer: Trainer) -> Trainer:
    """The trainer with its plan in config.toml, and with what makes its door. Raises ConfigError as `planned` does."""
    t, p, how = trainer, trainer.training.privacy, trainer.training
    if p is None or not isinstance(t.algorithm, Algorithm):
        return t
    plan = planned(
        t.algorithm, t.task, t.federation, p, t.work, t.schedule, how.rounds, t.sums, t.cohort, how.step_sizes
    )
    here = not isinstance(t.federation, Outline)
    about = {"privacy-plan": plan.table() or None, "privacy-says": plan.lines(here)}
    return dataclasses.replace(t, describe={**t.describe, **about}, door=partial(door, plan) if plan.guards else None)


def door(plan: Planned, trainer: Trainer, store: RunFolder | None, fresh: bool) -> Guard:
    """What the messages of a run pass through. fresh: whether its folder is new"""
    p, fed = plan.privacy, trainer.federation
    train, about, elsewhere = fed.train, fed.describe(), isinstance(fed, Outline)
    own = None if p.ledger is None else Path(p.ledger).expanduser()
    here = None if store is None or elsewhere else store.path  # a site has its own
    ledger = Ledger(own if own is not None else here and here / "privacy.ledger")
    data = f"{about.get('dataset') or 'arrays'} {about.get('options') or ''}".strip()
    draws = not elsewhere or p.noise == "server"  # elsewhere sites have secrets of their own
    secret = secret_of(store.path, fresh) if store is not None and draws else new_secret()
    guard = Guard(plan, fed.names, train.counts, secret, ledger, data, train, trainer.training.step_sizes.at)
    if p.quantile is not None:
        guard.following = Following(float(p.clip or 0), p.quantile, here and here / "clips.jsonl")
    return guard


def secret_of(folder: Path, fresh: bool) -> bytes:
    """The secret of a run's noise, made with the run and kept for its user alone. fresh: make it"""
    path = folder / "noise.key"
    try:
        if fresh and not path.exists():
            put(path, lambda draft: write_private(draft, new_secret().hex()))
            flush(folder)
        secret = bytes.fromhex(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise RunError(f"{path}: found no secret of 32 bytes; a private run does not go on without its own") from None
    if len(secret) != 32:
        raise RunError(f"{path}: found {len(secret)} bytes, expected the 32 that the run began with")
    return secret
