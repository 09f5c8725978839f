"""Runs that end halfway and go on: how they are ended, where their private rows lie, and when two runs are the same."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import torch
from instances import METHODS, train

from polyfed.core import rows

STATEFUL = ("ditto", "scaffold", "fedcet", "fpfc", "local")
ROUNDS = 4


class Crash(BaseException):  # an exception would save the last round
    """Ends a run at once; nothing is written after it."""


def crash_after(t: int):
    def watch(progress):
        if progress.round == t:
            raise Crash

    return watch


def in_files(algorithm, task, n, cohort, folder, *_):
    """In place of the engine's `make_rows`: private rows in files whatever the machine's memory."""
    return rows.MappedRows(n, algorithm.init_client(task, task.w0), folder / "rows")


def half(name: str, **settings):
    return train(METHODS[name], fraction=0.5, rounds=ROUNDS, **settings)


def rows_of(run) -> dict[str, torch.Tensor]:
    everyone = torch.arange(run.trained.n)
    return {name: run.trained.engine.rows.read(name, everyone) for name in run.trained.engine.rows.names()}


def same(a, b) -> bool:
    parts = ((a.server, b.server), (rows_of(a), rows_of(b)), ({"p": a.personal}, {"p": b.personal}))
    books = [run.ledger.drop(columns="seconds") for run in (a, b)]
    return books[0].equals(books[1]) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in parts
    )


def killed(root: Path, deaths: list[tuple[str, str, int]], where: str) -> dict[tuple[str, str, int], Path]:
    """The folders of runs that were killed, by (method, when, round), as `victim.py` names the moments.

    Ditto is killed at each moment by itself. The other methods run once, are copied at their moments and killed at the
    last, which takes a fifth of the time and leaves the same."""
    graves = {death: root / str(i) for i, death in enumerate(deaths)}
    runs: dict[object, tuple] = {}
    for (method, when, t), folder in graves.items():
        run = runs.setdefault((method, when, t) if method == "ditto" else method, (method, where, []))
        run[2].append((when, t, str(folder)))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "victim.py")],
        input=json.dumps(list(runs.values())),
        capture_output=True,
        text=True,
        check=True,
        timeout=3600,  # of a loaded machine: 300 s once ended it, and every row was an error of its set-up
    )
    assert all(end == signal.SIGKILL for end in json.loads(done.stdout)), "a child was to be killed and was not"
    assert all(folder.is_dir() for folder in graves.values()), "a run did not come to one of its moments"
    return graves
