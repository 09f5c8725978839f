"""jobs: runs of comparisons and coalitions, trained one after another or side by side, or read back where finished."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd
from torch import nn

from polyfed.base.errors import Diverged, RunError
from polyfed.core.algorithm import Contender
from polyfed.core.worker import Plan
from polyfed.data.federation import Federation
from polyfed.runs.folder import summary
from polyfed.runs.numbers import Numbers
from polyfed.runs.result import Result
from polyfed.runs.schema import Planned, Summary, config
from polyfed.runs.trainer import fit
from polyfed.runs.training import Training
from polyfed.runs.watching import Callback
from polyfed.studies import parallel


@dataclass(frozen=True, eq=False)
class Done:
    """A job that is over."""

    label: str
    seed: int
    status: str  # finished, diverged or interrupted
    summary: Summary | None = None  # from summary.json of its folder
    clients: pd.DataFrame | None = None  # from clients.csv
    message: str = ""  # the reason for not finishing
    folder: Path | None = None
    run: Result | None = None  # unless it was read back or not kept


class Trained(Protocol):
    """Anything that says how it ended: a run, a comparison, a search."""

    @property
    def status(self) -> str: ...


F = TypeVar("F", bound=Trained)


def whole(run: F) -> F:
    """Return what was trained to its end. Raises KeyboardInterrupt where Ctrl-C cut it short."""
    if run.status == "interrupted":
        raise KeyboardInterrupt
    return run


class Watch:
    """Hooks into a comparison. Override what you need."""

    def start(self, total: int) -> None:
        """A comparison of `total` runs starts."""

    def begin(self, label: str, seed: int) -> None:
        """A run starts; others may not be over."""

    def callbacks(self) -> Sequence[Callback]:
        """Passed on to `fit` for every run that is trained in this process."""
        return ()

    def end(self, result: Done, resumed: bool) -> None:
        """A run is over, or `resumed`: finished earlier and read back."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run, trained by `train`."""

    label: str
    seed: int
    place: Path | None
    train: Callable[[Sequence[Callback]], Result]

    def here(self, callbacks: Sequence[Callback]) -> Done:
        """Train it in this process."""
        told = partial(Done, self.label, self.seed, folder=self.place)
        try:
            run = self.train(callbacks)
        except Diverged as e:
            return told("diverged", message=str(e))
        except KeyboardInterrupt:
            return told("interrupted")
        return told(run.status, summary=summary(run), clients=run.clients, run=run)

    def apart(self) -> tuple[str, str]:
        """Train it in a process of its own: what its folder does not hold, (status, message)."""
        try:
            run = whole(self.train(()))  # Ctrl-C stops the others too
        except Diverged as e:
            return "diverged", str(e)
        return run.status, ""

    def told(self, status: str, message: str) -> Done:
        """Read what `apart` left."""
        done = read_result(self.place, self.label, self.seed) if status == "finished" and self.place else None
        return done or Done(self.label, self.seed, status, message=message, folder=self.place)


def job_of(
    folder: Path | None,
    label: str,
    seed: int,
    parts: Callable[[], tuple[nn.Module, Federation]],
    method: Contender,
    training: Training,
    resume: bool,
    callbacks: Sequence[Callback] = (),
    describe: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> Job:
    """A run of a method on the model and data of `parts`, in its place among the `runs` of a folder."""
    place = None if folder is None else folder / "runs" / f"{label}-seed{seed}"

    def train(more: Sequence[Callback]) -> Result:
        model, federation = parts()
        how = replace(training, seed=seed)
        return fit(
            model, federation, method, how, out=place, resume=resume, callbacks=(*callbacks, *more), describe=describe()
        )

    return Job(label, seed, place, train)


def execute(
    jobs: Sequence[Job], watch: Watch, resume: bool = False, rounds: int | None = None, keep: bool = False,
    alone: bool = False,
) -> Iterator[tuple[Job, Done]]:  # fmt: skip
    """Every job, trained or (with `resume`) read back, as they end; they train side by side unless `alone`.

    Ctrl-C raises KeyboardInterrupt once the jobs in hand have finished their rounds and are yielded.
    """

    def begin(job: Job) -> None:
        watch.begin(job.label, job.seed)

    def end(job: Job, done: Done, resumed: bool = False) -> tuple[Job, Done]:
        done = done if keep else replace(done, run=None)
        watch.end(done, resumed)
        return job, done

    def abreast(plan: Plan | Planned | None) -> int:
        """How many may run at a time after one of this plan: a process per core where two threads are too many."""
        return 1 if plan is None or plan.workers > 1 or alone or keep else parallel.room(plan.device)

    watch.start(len(jobs))
    todo, places = list[Job](), list[Path]()
    for job in jobs:
        before = read_result(job.place, job.label, job.seed, rounds) if resume and job.place is not None else None
        if before is None:
            todo.append(job)
        else:
            places += [] if job.place is None else [job.place]
            yield end(job, before, resumed=True)
    plans = (config(place).plan for place in places if todo and not (alone or keep))
    room = next((wide for plan in plans if (wide := abreast(plan)) > 1), 1)
    while todo and room == 1:  # until a run shows that the others are small
        job = todo.pop(0)
        begin(job)
        done = job.here(watch.callbacks())
        yield end(job, done)
        if done.status == "interrupted":
            raise KeyboardInterrupt
        room = 1 if done.run is None else abreast(done.run.trained.engine.plan)
    tasks = [job.apart for job in todo]
    for k, told in parallel.side_by_side(tasks, room, lambda k: begin(todo[k])):
        yield end(todo[k], todo[k].told(*told))


def beforehand(tasks: Sequence[tuple[str, int, Callable[[], Any]]], device: str, watch: Watch) -> bool:
    """Compute tasks (label, seed, task) side by side for what they keep; False where there is no room for that."""
    room = parallel.room(device)
    if min(room, len(tasks)) == 1:
        return False

    def apart(task: Callable[[], Any]) -> None:
        task()

    watch.start(len(tasks))
    kept = [partial(apart, task) for _, _, task in tasks]
    for k, _ in parallel.side_by_side(kept, room, lambda k: watch.begin(*tasks[k][:2])):
        watch.end(Done(*tasks[k][:2], "finished"), resumed=False)
    return True


def read_result(place: Path, name: str, seed: int, rounds: int | None = None) -> Done | None:
    """The result of a run folder whose run is over, or None when it has to be (re)started or continued."""
    try:
        run = Numbers.of(place)
    except RunError:
        return None
    ended = run.summary
    if ended.status == "diverged":
        return Done(name, seed, "diverged", ended, None, f"diverged after round {ended.rounds}", place)
    all_done = ended.deploys == "yardstick" or ended.unsent_bytes is not None  # without rounds, or stopped early
    short = rounds is not None and ended.rounds < rounds and not all_done
    return None if ended.status != "finished" or short else Done(name, seed, "finished", ended, run.clients, "", place)
