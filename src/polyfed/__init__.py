"""polyfed: federated learning when one model does not fit all.

The public names are those that are imported below, for type checkers and editors. They are loaded when first used, so
that `polyfed --help` does not wait for torch.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from polyfed import algorithms as algorithms
    from polyfed import data as data
    from polyfed import models as models
    from polyfed import report as report
    from polyfed import threats as threats
    from polyfed.algorithms import APFL as APFL
    from polyfed.algorithms import CFL as CFL
    from polyfed.algorithms import FPFC as FPFC
    from polyfed.algorithms import GPGD as GPGD
    from polyfed.algorithms import IFCA as IFCA
    from polyfed.algorithms import LPGD as LPGD
    from polyfed.algorithms import PACFL as PACFL
    from polyfed.algorithms import Ditto as Ditto
    from polyfed.algorithms import FedACS as FedACS
    from polyfed.algorithms import FedAdagrad as FedAdagrad
    from polyfed.algorithms import FedAdam as FedAdam
    from polyfed.algorithms import FedAMP as FedAMP
    from polyfed.algorithms import FedAsync as FedAsync
    from polyfed.algorithms import FedAvg as FedAvg
    from polyfed.algorithms import FedAvgFT as FedAvgFT
    from polyfed.algorithms import FedAvgM as FedAvgM
    from polyfed.algorithms import FedBABU as FedBABU
    from polyfed.algorithms import FedBuff as FedBuff
    from polyfed.algorithms import FedCET as FedCET
    from polyfed.algorithms import FedDyn as FedDyn
    from polyfed.algorithms import FedLin as FedLin
    from polyfed.algorithms import FedPer as FedPer
    from polyfed.algorithms import FedProx as FedProx
    from polyfed.algorithms import FedRep as FedRep
    from polyfed.algorithms import FedSLR as FedSLR
    from polyfed.algorithms import FedSpa as FedSpa
    from polyfed.algorithms import FedTrack as FedTrack
    from polyfed.algorithms import FedYogi as FedYogi
    from polyfed.algorithms import HeurFedAMP as HeurFedAMP
    from polyfed.algorithms import HypCluster as HypCluster
    from polyfed.algorithms import LGFedAvg as LGFedAvg
    from polyfed.algorithms import Local as Local
    from polyfed.algorithms import PerFedAvg as PerFedAvg
    from polyfed.algorithms import PFedMe as PFedMe
    from polyfed.algorithms import Recalibrated as Recalibrated
    from polyfed.algorithms import Scaffold as Scaffold
    from polyfed.base import errors as errors
    from polyfed.base.settings import setting as setting
    from polyfed.compute.solvers import local_sgd as local_sgd
    from polyfed.compute.task import Task as Task
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
    from polyfed.face import tune as tune
    from polyfed.games.result import Coalitions as Coalitions
    from polyfed.games.run import coalitions as coalitions
    from polyfed.metrics.metric import Metric as Metric
    from polyfed.runs.result import Result as Result
    from polyfed.runs.trainer import Trainer as Trainer
    from polyfed.runs.trainer import prepare as prepare
    from polyfed.runs.training import Training as Training
    from polyfed.runs.watching import Progress as Progress
    from polyfed.studies.admit import Admission as Admission
    from polyfed.studies.admit import admit as admit
    from polyfed.studies.compare import Comparison as Comparison
    from polyfed.studies.predict import Predictor as Predictor
    from polyfed.studies.tune import Tuned as Tuned
    from polyfed.studies.window import WindowAdvice as WindowAdvice
    from polyfed.studies.window import window_for as window_for
    from polyfed.yardsticks import Commonest as Commonest
    from polyfed.yardsticks import OwnLinear as OwnLinear
    from polyfed.yardsticks import OwnTrees as OwnTrees
    from polyfed.yardsticks import PooledOracle as PooledOracle

__version__ = "0.1.0"
_HOMES = {  # name -> the module that has it, from the imports above
    alias.name: node.module
    for node in _ast.walk(_ast.parse(_Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, _ast.ImportFrom) and str(node.module).startswith("polyfed")
    for alias in node.names
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyfed' has no attribute {name!r}")
    if _HOMES[name] in ("polyfed", "polyfed.base"):  # a module itself
        return _import_module(f"{_HOMES[name]}.{name}")
    if _HOMES[name] == "polyfed.core.algorithm":  # so that a class of one's own cannot take a name of ours first
        _import_module("polyfed.algorithms")
        _import_module("polyfed.yardsticks")
    return getattr(_import_module(str(_HOMES[name])), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
