"""polyfed: federated learning when one model does not fit all.

The public names are those that are imported below, for type checkers and editors: what a program types, and every
method and yardstick, as `polyfed.FedAvg`. What comes back from a call has its name in its room, such as
`polyfed.runs.result.Result`. They are loaded when first used, so that `polyfed --help` does not wait for torch.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from polyfed.base.lazy import homes as _homes

if _TYPE_CHECKING:
    import polyfed_threats as _threats
    from polyfed import algorithms as algorithms
    from polyfed import data as data
    from polyfed import models as models
    from polyfed import report as report
    from polyfed.algorithms import *  # noqa: F403
    from polyfed.base import errors as errors
    from polyfed.base.settings import setting as setting
    from polyfed.compute.solvers import local_sgd as local_sgd
    from polyfed.compute.task import Task as Task
    from polyfed.compute.terms import Distillation as Distillation
    from polyfed.core.algorithm import Algorithm as Algorithm
    from polyfed.core.algorithm import Down as Down
    from polyfed.core.algorithm import Needs as Needs
    from polyfed.core.algorithm import Personal as Personal
    from polyfed.core.algorithm import Portrait as Portrait
    from polyfed.core.algorithm import Round as Round
    from polyfed.core.algorithm import Server as Server
    from polyfed.core.algorithm import mean as mean
    from polyfed.core.schedule import Asynchronous as Asynchronous
    from polyfed.core.schedule import Availability as Availability
    from polyfed.core.schedule import Bernoulli as Bernoulli
    from polyfed.core.schedule import Delays as Delays
    from polyfed.core.schedule import Schedule as Schedule
    from polyfed.core.schedule import Timed as Timed
    from polyfed.core.schedule import Uniform as Uniform
    from polyfed.core.uplinks import Uplinks as Uplinks
    from polyfed.data.federation import Federation as Federation
    from polyfed.face import Run as Run
    from polyfed.face import compare as compare
    from polyfed.face import fit as fit
    from polyfed.metrics.metric import Metric as Metric
    from polyfed.runs.released import released as released
    from polyfed.runs.training import Training as Training
    from polyfed.runs.watching import Progress as Progress
    from polyfed.studies.predict import Predictor as Predictor
    from polyfed.yardsticks import *  # noqa: F403
    from polyfed_estimators.estimators import FederatedClassifier as FederatedClassifier
    from polyfed_estimators.estimators import FederatedRegressor as FederatedRegressor
    from polyfed_games.result import Coalitions as Coalitions
    from polyfed_games.run import coalitions as coalitions
    from polyfed_members.admit import admit as admit
    from polyfed_tuning.tune import tune as tune

    threats = _threats

__version__ = "0.1.0"
_ROOMS = ("polyfed.algorithms", "polyfed.yardsticks")  # of methods, and of what they are measured by
_HOMES = _homes(__file__) | {"threats": "polyfed_threats"}
__all__ = sorted(_HOMES)
_METHODS = {
    name: room for room in _ROOMS for name in _homes(_Path(__file__).with_name(room.rpartition(".")[2]) / "__init__.py")
}


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name) or _METHODS.get(name)
    if home is None:
        raise AttributeError(f"module 'polyfed' has no attribute {name!r}")
    if home in ("polyfed", "polyfed.base"):  # a module itself
        return _import_module(f"{home}.{name}")
    if home == "polyfed.core.algorithm":  # so that a class of one's own cannot take a name of ours first
        for room in _ROOMS:
            _import_module(room)
    if not home.startswith("polyfed."):  # a package beside the core
        module = _import_module("polyfed.base.plugins").sibling(home, f"polyfed.{name}")
        return module if home == f"polyfed_{name}" else getattr(module, name)
    return getattr(_import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, *_METHODS, "__version__"]
