"""polyfed: federated learning when one model does not fit all.

Names are loaded when first used, so that `polyfed --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed import algorithms, data, models, report, threats
    from polyfed.core.algorithm import Algorithm, Down, Personal
    from polyfed.core.schedule import Asynchronous, Availability, Bernoulli, Delays, Timed, Uniform
    from polyfed.core.solvers import local_sgd
    from polyfed.core.task import Task
    from polyfed.data.federation import Federation
    from polyfed.experiment.admit import Admission, admit
    from polyfed.experiment.compare import Comparison, compare
    from polyfed.experiment.fit import fit
    from polyfed.experiment.run import Run
    from polyfed.experiment.tune import Tuned, tune
    from polyfed.experiment.window import WindowAdvice, window_for

__version__ = "0.1.0"
__all__ = [
    "Admission",
    "Algorithm",
    "Asynchronous",
    "Availability",
    "Bernoulli",
    "Comparison",
    "Delays",
    "Down",
    "Federation",
    "Personal",
    "Run",
    "Task",
    "Timed",
    "Tuned",
    "Uniform",
    "WindowAdvice",
    "admit",
    "algorithms",
    "compare",
    "data",
    "fit",
    "local_sgd",
    "models",
    "report",
    "threats",
    "tune",
    "window_for",
]

HOMES = {
    "Admission": "experiment.admit",
    "Algorithm": "core.algorithm",
    "Asynchronous": "core.schedule",
    "Availability": "core.schedule",
    "Bernoulli": "core.schedule",
    "Comparison": "experiment.compare",
    "Delays": "core.schedule",
    "Down": "core.algorithm",
    "Federation": "data.federation",
    "Personal": "core.algorithm",
    "Run": "experiment.run",
    "Task": "core.task",
    "Timed": "core.schedule",
    "Uniform": "core.schedule",
    "admit": "experiment.admit",
    "compare": "experiment.compare",
    "Tuned": "experiment.tune",
    "fit": "experiment.fit",
    "local_sgd": "core.solvers",
    "tune": "experiment.tune",
    "WindowAdvice": "experiment.window",
    "window_for": "experiment.window",
}
FOLDERS = ("algorithms", "data", "models", "report", "threats")


def __getattr__(name: str) -> Any:
    """The public names, and every method as `polyfed.<Name>`."""
    if name in FOLDERS:
        return import_module(f"polyfed.{name}")
    if name in HOMES:
        return getattr(import_module(f"polyfed.{HOMES[name]}"), name)
    if not name.startswith("_"):
        algorithms = import_module("polyfed.algorithms")
        if name in algorithms.__all__:
            return getattr(algorithms, name)
    raise AttributeError(f"module 'polyfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *import_module("polyfed.algorithms").__all__})
