"""Methods as their authors' released code runs them: its local optimiser, decay, batches and epochs beside its own
settings, in one table. `released` gives a row, `as_released` puts it into a run (docs/released.md).
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import polyfed.algorithms  # noqa: F401  (registers the methods)
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, closest
from polyfed.base.settings import kebab
from polyfed.base.values import shown
from polyfed.core.algorithm import REGISTRY, Contender
from polyfed.runs.training import Training


class Released(NamedTuple):
    """A row: the method's settings, the run's, where they were read, and what of that code is not in them."""

    method: dict[str, Any]
    training: dict[str, Any]
    source: str
    apart: str

    def words(self) -> str:
        """In a paragraph."""
        given = ", ".join(f"{kebab(k)} {v:.4g}" if isinstance(v, float) else f"{kebab(k)} {v}"
                          for k, v in (self.method | self.training).items())  # fmt: skip
        return f"{given}. Read in {self.source}. Not taken over: {self.apart}."


def _momentum(momentum: float, **more: Any) -> dict[str, Any]:
    return {"optimizer": f"momentum:{momentum}", **more}


RELEASED = {
    "apfl": Released({"lr": 0.1, "alpha": 0.5},
        {"batch_size": 50, "local_epochs": 1, "weight_decay": 1e-4, "lr_schedule": f"exponential:{1 / 1.01}"},
        "MLOPTPSU/FedTorch: README.md (lr, alpha, batch), run_mpi.py (the others)",
        "outputs mixed in place of parameters, with the new common model; decay of v_i, not of the mixture; drop-out"),
    "ditto": Released({"lr": 0.05, "lam": 1.0, "personal_epochs": 0}, {"batch_size": 16, "local_steps": 2},
        "litian96/ditto: run_fashion_clean_ditto_lam1.sh, flearn/trainers_MTL/ditto.py",
        "a plain mean over clients that are drawn by their numbers of samples"),
    "fedala": Released({"lr": 0.005, "eta": 1.0, "share": 0.8, "settled": 0.1},
        {"batch_size": 10, "local_epochs": 1},
        "TsingZ0/FedALA: system/main.py, system/flcore/clients/clientALA.py; settled in a copy's system/utils/ALA.py",
        "samples in a fixed order, without the last batch where it is short"),
    "fedbn": Released({"lr": 0.01}, {"batch_size": 32, "local_epochs": 1},
        "med-air/FedBN: federated/fed_digits.py",
        "BatchNorm's statistics, which a model of polyfed.models.with_statistics has"),
    "fedntd": Released({"lr": 0.01, "beta": 1.0, "tau": 1.0},
        _momentum(0.9, weight_decay=1e-5, batch_size=50, local_epochs=5, lr_schedule="exponential:0.99"),
        "Lee-Gihun/FedNTD: config/fedntd.json, algorithms/BaseServer.py",
        "10 of 100 clients a round"),
    "fedpac": Released({"lr": 0.01, "head_lr": 0.1, "head_epochs": 1, "body_epochs": 5, "lam": 1.0},
        _momentum(0.5, weight_decay=5e-4, batch_size=50),
        "JianXu95/FedPAC: options.py, methods/fedpac.py",
        "the client's own centre of a class that has no common one"),
    "fedproto": Released({"lr": 0.01, "lam": 1.0, "pull": "code"}, _momentum(0.5, batch_size=4, local_epochs=1),
        "yuetan031/FedProto: lib/update.py; batch, lr and lam in a copy's lib/options.py",
        "class means of the features seen on the way; no last batch that is short"),
    "fedrep": Released({"lr": 0.01, "head_epochs": 10, "body_epochs": 1},
        _momentum(0.5, weight_decay=1e-4, batch_size=10),
        "copies of lgcollins/FedRep, whose own was not at hand: scripts/FedRep_cifar10_2shards.sh, models/Update.py",
        "no decay of biases; a last solve of the heads of all clients"),
    "moon": Released({"lr": 0.01, "mu": 5.0, "tau": 0.5},
        _momentum(0.9, weight_decay=1e-5, batch_size=64, local_epochs=10),
        "QinbinLi/MOON: README.md (CIFAR-10: lr, mu, epochs), main.py (the others)",
        "a projection head of two layers; a random network as the last model at first contact"),
    "pfedme": Released({"lr": 0.005, "personal_lr": 0.09, "lam": 15.0, "inner_steps": 5, "beta": 1.0},
        {"batch_size": 20, "local_steps": 20, "weight_decay": 1e-3},
        "CharlieDinh/pFedMe: main.py, FLAlgorithms/users/userpFedMe.py; the decay (mu) in copies of its optimiser",
        "theta_i goes on from the last batch's; absent clients train too; means weighted by samples"),
}  # fmt: skip


@checked
def released(name: str) -> tuple[Contender, Training]:
    """A method and its run's settings as the authors' code has them.

    Parameters
    ----------
    name : str
        The method's, such as "moon".

    Returns
    -------
    tuple
        Algorithm and Training, for ``pf.fit(model, federation, *pf.released("moon"), rounds=50)``.

    Raises
    ------
    ConfigError
        There are none of this name.
    """
    row = _row(name)
    return REGISTRY.find(name)(**row.method), Training(**row.training)


def _row(name: str) -> Released:
    if name not in RELEASED:
        raise ConfigError(f"as-released: found no settings for {shown(name)}{closest(name, [*RELEASED])}; "
                          f"known: {', '.join(RELEASED)}")  # fmt: skip
    return RELEASED[name]


def as_released(algorithm: Contender, training: Training) -> tuple[Contender, Training]:
    """Put in what `training.as_released` asks for. A method's own setting that is not at its default stays.

    Raises ConfigError where a setting of the run is given that the released code has otherwise.
    """
    if not training.as_released:
        return algorithm, training
    row = _row(algorithm.name)
    usual = {f.name: f.default for of in (algorithm, training) for f in fields(of)}
    plain: dict[str, Any] = {
        "local_steps": None,
        "local_epochs": None,
        "weight_decay": 0.0,
        "lr_schedule": "constant",
        "optimizer": "sgd",
    }
    for key, value in (plain | row.training).items():
        if (given := getattr(training, key)) not in (usual[key], value):
            theirs = "none" if value is None else shown(value)
            clash = f"found {shown(given)}, where the released code of {algorithm.name} has {theirs}"
            raise ConfigError(f"{kebab(key)}: {clash}; leave it out, or as-released")
    own = {k: v for k, v in row.method.items() if getattr(algorithm, k) == usual[k]}
    return replace(algorithm, **own), replace(training, **row.training)


def each_as_released(methods: Mapping[str, Contender], how: Training) -> dict[str, tuple[Contender, Training]]:
    """`as_released` of several methods by their labels; one without such settings is trained by the run's own."""
    some = any(a.name in RELEASED for a in methods.values())
    plain = replace(how, as_released=False)
    return {k: as_released(a, how if a.name in RELEASED or not some else plain) for k, a in methods.items()}
