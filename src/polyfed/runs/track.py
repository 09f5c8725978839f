"""Tracking: a run's settings and evaluations as they come, written for the viewer of another tool.

A tracker is a context manager that opens a run of that tool, gives what logs a step's numbers, and closes it.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_mapping
from polyfed.runs.result import Result
from polyfed.runs.watching import Callback, Progress

PROJECT = "polyfed"  # experiment of MLflow, project of Weights & Biases
OF_THE_RUN = ("down_bytes", "up_bytes", "seconds", "virtual_time", "clusters")  # the same in the records of all splits
Log = Callable[[Mapping[str, float], int], None]  # numbers by name, and the round that they are of


def tracked(tool: str | None, run: Result) -> AbstractContextManager[tuple[Callback, ...]]:
    """The callbacks that write to a tool what a run evaluates, while the context lasts; none where `tool` is None."""
    return nullcontext(()) if tool is None else _tracked(tool, run)


@contextmanager
def _tracked(tool: str, run: Result) -> Generator[tuple[Callback, ...]]:
    place = run.folder
    name = f"{run.settings.method}-seed{run.settings.seed}" if place is None else place.name
    several = place is not None and place.parent.name == "runs" and (place.parents[1] / "comparison.toml").exists()
    group = place.parents[1].name if place is not None and several else name
    with ExitStack() as stack:
        with _said(tool):
            log = stack.enter_context(TRACKERS[tool](name, group, _flat(run.settings.toml()), place))

        def callback(step: Progress) -> None:
            if step.records:
                with _said(tool):
                    log(_numbers(step), step.round)

        yield (callback,)


@contextmanager
def _said(tool: str) -> Generator[None]:
    """An error of the tool, in one line."""
    try:
        yield
    except Exception as e:
        line = " ".join(str(e).split())[:200]
        raise RunError(f"track: {tool} refuses what is written to it ({type(e).__name__}: {line})") from e


def check_tracker(tool: str | None) -> None:
    """Raise ConfigError for a tool that is not installed."""
    if tool is not None and find_spec(tool) is None:
        raise ConfigError(f"track: {tool} is not installed; pip install 'polyfed[{tool}]'")


@contextmanager
def _tensorboard(name: str, group: str, settings: Mapping[str, str], place: Path | None) -> Generator[Log]:
    made: Any = import_module("torch.utils.tensorboard")
    folder = Path("tensorboard", name) if place is None else place / "tensorboard"
    with made.SummaryWriter(str(folder)) as writer:
        rows = [f"| {key} | {value} |" for key, value in settings.items()]
        writer.add_text("settings", "\n".join(["| setting | value |", "| :-- | :-- |", *rows]))

        def log(values: Mapping[str, float], round: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, round)
            writer.flush()

        yield log


@contextmanager
def _mlflow(name: str, group: str, settings: Mapping[str, str], place: Path | None) -> Generator[Log]:
    client: Any = import_module("mlflow").MlflowClient()
    existing = client.get_experiment_by_name(PROJECT)
    experiment = client.create_experiment(PROJECT) if existing is None else existing.experiment_id
    run = client.create_run(experiment, run_name=name, tags={"group": group}).info.run_id
    status = "FAILED"
    try:
        for key, value in settings.items():
            client.log_param(run, key, value)

        def log(values: Mapping[str, float], round: int) -> None:
            for key, value in values.items():
                client.log_metric(run, key, value, step=round)

        yield log
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


@contextmanager
def _wandb(name: str, group: str, settings: Mapping[str, str], place: Path | None) -> Generator[Log]:
    wandb: Any = import_module("wandb")
    with wandb.init(
        project=PROJECT, name=name, group=group, config=dict(settings), dir=place, reinit="create_new"
    ) as run:
        yield lambda values, round: run.log(dict(values), step=round)


TRACKERS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "wandb": _wandb}


def _numbers(step: Progress) -> dict[str, float]:
    """The finite numbers of a round's evaluations: test/accuracy, test/worst, up_bytes."""
    numbers = {
        key if key in OF_THE_RUN else f"{record.split}/{key}": float(value)
        for record in step.records
        for key, value in record.table().items()
        if key != "round" and isinstance(value, int | float)
    }
    return {key: value for key, value in numbers.items() if isfinite(value)}


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by their full names, as texts: algorithm.lr."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if is_mapping(value) else {f"{before}{key}": str(value)}
    return flat
