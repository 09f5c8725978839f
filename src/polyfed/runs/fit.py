"""fit: one model, one federation, one method -> a Result."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from torch import nn

from polyfed.base.arguments import checked
from polyfed.base.settings import parameters, settings_of
from polyfed.core.algorithm import Contender
from polyfed.data.federation import Federation
from polyfed.runs.result import Result
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training, training_of
from polyfed.runs.watching import Callback, watchers


@checked
def fit(
    model: nn.Module,
    federation: Federation,
    algorithm: Contender,
    training: Training | None = None,
    *,
    start: Result | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    describe: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Train a model over a federation with a method.

    Parameters
    ----------
    model : nn.Module
        Its present parameters are the common start.
    federation : Federation
        The clients and their data.
    algorithm : Algorithm or Yardstick
        The method, such as ``polyfed.FedAvg(lr=0.1)``.
    training : Training, optional
        How to train; ``settings`` override it.
    start : Result, optional
        A run on the same clients and model to start from. If it is of the same method (settings may differ), its whole
        state is kept and ``rounds`` more are added to its own. If it is of another method, its clients' models are the
        start, for methods that allow it, and one upload of each is billed as round -1.
    out : path, optional
        Run folder, new or empty; without it nothing is written.
    resume : bool
        Continue from the checkpoint in ``out``, if there is one.
    callbacks : sequence of callables
        Called with a `Progress` after every round; one that returns True ends the run. In a notebook a call without
        any shows its progress.
    describe : mapping, optional
        Further tables for config.toml, such as ``{"data": {...}, "model": {...}}``.
    **settings
        The settings of `Training` by keyword: ``rounds=50, local_epochs=2, ...``.

    Returns
    -------
    Result
        The trained state and everything that was measured on the way; of `polyfed.fit` a `Run`.

    Raises
    ------
    ConfigError, ModelError, DataError
        Before training, when something does not fit.
    Diverged
        When a value is no longer finite.
    RunError
        When a folder cannot be read or written.

    Notes
    -----
    All errors have a one-line message. Ctrl-C ends the run after the round it is in, saved and resumable; the Result's
    status is then "interrupted".
    """
    trainer = prepare(model, federation, algorithm, training_of(training, settings), start=start, describe=describe)
    return trainer.run(out, resume, callbacks or watchers())


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function with the settings of a run in the place of its `**settings`."""
    own = inspect.signature(function)
    *known, _ = own.parameters.values()
    kind, taken = inspect.Parameter.KEYWORD_ONLY, set(own.parameters)
    more = [inspect.Parameter(s.name, kind, default=s.default) for s in settings_of(Training) if s.name not in taken]
    return own.replace(parameters=[*known, *more])


SETTINGS = "    **settings\n        The settings of `Training` by keyword: ``rounds=50, local_epochs=2, ...``.\n"
# what help and completion show
fit.__signature__ = _signature(fit)  # pyright: ignore[reportFunctionMemberAccess]
fit.__doc__ = str(fit.__doc__).replace(SETTINGS, indent(f"{parameters(Training)}\n", "    "))
