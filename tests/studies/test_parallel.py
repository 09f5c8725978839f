"""Tasks side by side, and comparisons whose runs are."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base import system
from polyfed.base.errors import DataError, RunError
from polyfed.runs import stop
from polyfed.studies import parallel
from polyfed.studies.compare import Comparison
from polyfed.studies.parallel import side_by_side

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
SETTINGS = {"rounds": 20, "local_steps": 2, "batch_size": 8, "evaluate_every": 10}


def federation(seed: int, d: int = 6, m: int = 24) -> pf.Federation:
    rng = np.random.default_rng(seed)
    pairs = [(rng.standard_normal((m, d)).astype("float32"), rng.integers(0, 3, m)) for _ in range(8)]
    return pf.Federation.from_arrays(pairs[:4], pairs[4:])


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


@pytest.fixture
def three(monkeypatch):
    """Room for three processes, whatever the machine."""
    monkeypatch.setattr(parallel, "room", lambda device="cpu": 3)


def normalised(seed: int) -> nn.Module:
    """One whose gradients come from autograd."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))


def compared(out, model=linear, **more):
    methods = {"local": pf.Local(0.1), "fedavg": pf.FedAvg(0.1), "wild": pf.FedAvg(3e38), "ditto": pf.Ditto(0.1)}
    given = {"seeds": 2, "keep": False, "report": False, "describe": lambda label: {"made": {"pid": os.getpid()}}}
    return pf.compare(model, federation, methods, out=out, **{**given, **SETTINGS, **more})


def processes(out) -> list[int]:
    return [tomllib.loads(p.read_text())["made"]["pid"] for p in sorted(out.glob("runs/*/config.toml"))]


def test_tasks_overlap_in_processes_of_their_own(tmp_path):
    def meet(me: int, other: int) -> int:
        (tmp_path / str(me)).touch()
        deadline = time.monotonic() + 30
        while not (tmp_path / str(other)).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / str(other)).exists()  # one after another, the first would never see the second
        return os.getpid()

    found = dict(side_by_side([lambda: meet(0, 1), lambda: meet(1, 0)], 2))
    assert len({found[0], found[1], os.getpid()}) == 3


def test_a_process_goes_on_with_the_next_task():
    assert len({process for _, process in side_by_side([os.getpid] * 7, 1)} - {os.getpid()}) == 1


def test_a_process_that_is_killed_while_it_waits_is_one_line(tmp_path):
    def task() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))

    def begin(which: int) -> None:
        if which == 1:
            os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)

    tasks = side_by_side([task] * 2, 1, begin)
    assert next(tasks) == (0, None)  # what it did before is told
    with pytest.raises(RunError, match=r"^a worker process was killed \(signal 9\)"):
        next(tasks)


def test_a_process_has_its_next_task_before_the_last_result_is_told(tmp_path):
    told = []
    for which, _ in side_by_side([os.getpid] * 3, 1, lambda which: told.append(f"begin {which}")):
        told.append(f"end {which}")
    assert told == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "end 2"]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_no_process_is_left_where_nobody_asks_for_the_rest(handler):
    """Nor where it does not see that it is interrupted, which comes as it begins to wait for its next task."""
    tasks = side_by_side([lambda: (signal.signal(signal.SIGINT, handler), os.getpid())[1]] * 3, 1)
    _, process = next(tasks)
    tasks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_a_task_raises_is_raised_and_the_others_are_stopped(tmp_path):
    def wrong() -> None:
        while not (tmp_path / "slow").exists():
            time.sleep(0.01)
        raise DataError("hospital.npz: found 3 columns, expected 4")

    def slow() -> None:
        (tmp_path / "slow").touch()
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(DataError, match=r"^hospital.npz: found 3 columns, expected 4$"):
        list(side_by_side([wrong, slow], 2))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("kind", [RunError, ValueError, KeyboardInterrupt])
def test_a_task_that_is_interrupted_while_it_says_why_it_failed_prints_nothing(kind, capfd):
    """One that fails beside it makes the parent interrupt it, at any point of what it does last."""

    class Late(kind):
        def __str__(self):
            signal.raise_signal(signal.SIGINT)
            return "the reason"

    def task():
        raise Late

    raised = KeyboardInterrupt if kind is KeyboardInterrupt else (RunError, RuntimeError)
    with pytest.raises(raised):
        list(side_by_side([task], 2))
    assert capfd.readouterr().err == ""


def test_values_come_back_with_their_number_and_faults_in_a_line():
    found = dict(side_by_side([lambda k=k: [k, {"square": k * k}] for k in range(5)], 2))
    assert found == {k: [k, {"square": k * k}] for k in range(5)}
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*ZeroDivisionError"):
        list(side_by_side([lambda: 1 / 0], 1))
    with pytest.raises(RunError, match=r"^a worker process was killed \(signal 9\); the machine may be out of memory$"):
        list(side_by_side([lambda: os.kill(os.getpid(), signal.SIGKILL)], 1))


def test_tasks_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    assert system.cores() == 7
    assert [cores for _, cores in sorted(side_by_side([system.cores] * 3, 2))] == [3, 3, 3]
    assert [cores for _, cores in side_by_side([system.cores], 8)] == [7]
    assert system.cores() == 7


def test_a_task_has_no_room_for_more_nor_has_an_accelerator():
    assert list(side_by_side([lambda: parallel.room()], 1)) == [(0, 1)]
    assert parallel.room("cuda") == 1


@pytest.mark.parametrize("model", [linear, normalised])
def test_side_by_side_changes_no_bit(tmp_path, three, monkeypatch, model):
    together = compared(tmp_path / "a", model, workers=1)
    monkeypatch.setattr(parallel, "room", lambda device="cpu": 1)
    alone = compared(tmp_path / "b", model, workers=1)
    assert len(set(processes(tmp_path / "b"))) == 1
    assert len(set(processes(tmp_path / "a"))) == 4  # this one, and three for all seeds
    for x, y in zip(together.results, alone.results, strict=True):
        assert (x.label, x.seed, x.status) == (y.label, y.seed, y.status)
        assert x.message.replace("/a/", "/b/") == y.message
    finished = {f"{r.label}-seed{r.seed}" for r in alone.results if r.status == "finished"}
    assert len(finished) == 6
    for name in finished:
        a, b = (sorted((tmp_path / x / "runs" / name / "models").iterdir()) for x in "ab")
        assert [p.read_bytes() for p in a] == [p.read_bytes() for p in b]
    seconds = ["seconds", "compute_seconds"]
    a, b = (f.clients.drop(columns=seconds, errors="ignore") for f in (together, alone))
    assert a.columns.tolist() == b.columns.tolist()
    assert a["test_accuracy"].tolist() == b["test_accuracy"].tolist()
    assert together.table["down_bytes"].equals(alone.table["down_bytes"])


def test_methods_of_a_seed_have_one_start_even_if_it_is_not_seeded(tmp_path, three):
    methods = {"a": pf.FedAvg(0.1), "b": pf.FedAvg(0.1), "c": pf.FedAvg(0.1)}
    settings = {"keep": False, "report": False, **SETTINGS, "rounds": 2}
    pf.compare(lambda seed: nn.Linear(6, 3), federation, methods, seeds=2, out=tmp_path, **settings)
    for seed in range(2):
        found = [(tmp_path / f"runs/{m}-seed{seed}/models/common.safetensors").read_bytes() for m in methods]
        assert len(set(found)) == 1
    assert found[0] != (tmp_path / "runs/a-seed0/models/common.safetensors").read_bytes()


def test_a_finished_comparison_is_read_back(tmp_path, three):
    """And shows how large the runs are that are still to come: none of them stays in this process."""
    compared(tmp_path, seeds=1)
    before = processes(tmp_path)
    assert os.getpid() in before
    again = compared(tmp_path, seeds=1, resume=True)
    assert again.status == "finished"
    assert processes(tmp_path) == before
    compared(tmp_path, resume=True)
    assert os.getpid() not in processes(tmp_path)[1::2]  # of the second seed


def test_a_run_that_is_interrupted_ends_the_comparison(tmp_path, three):
    """Also one that is told alone: those beside it save, no further one is begun, and resuming finishes them all."""
    here = os.getpid()

    def press(label):
        if label == "fedavg" and os.getpid() != here:
            signal.raise_signal(signal.SIGINT)
        return {"made": {"pid": os.getpid()}}

    found = compared(tmp_path, rounds=400, describe=press)
    assert found.status == "interrupted"
    assert {p.name for p in (tmp_path / "runs").iterdir()} <= {"local-seed0", "wild-seed0", "ditto-seed0"}
    again = compared(tmp_path, rounds=400, resume=True)
    assert again.status == "finished"
    assert len(again.results) == 8


@pytest.mark.parametrize(
    "more", [{"keep": True}, {"callbacks": [lambda progress: None]}, {"workers": 2}], ids=["kept", "watched", "large"]
)
def test_runs_that_are_kept_watched_or_large_stay_in_this_process(tmp_path, three, more):
    compared(tmp_path, **more)
    assert set(processes(tmp_path)) == {os.getpid()}


@dataclass(frozen=True)
class Waiting(pf.FedAvg):
    """FedAvg that waits in round 25 to be interrupted, unless the file `passed` is there. lr, weighted, passed"""

    passed: str = pf.setting("passed", source="ours")

    def local_update(self, task, client, down, data, round):
        while round.t == 25 and not Path(self.passed).exists() and not stop.interruptions():
            time.sleep(0.01)
        return super().local_update(task, client, down, data, round)


def waiting(out: Path) -> Comparison:
    """Two methods by two seeds, side by side; of the four, two wait."""
    parallel.room = lambda device="cpu": 3
    methods = {"b": pf.Ditto(0.1), "a": Waiting(0.1, passed=str(out.parent / "passed"))}  # the first is alone
    settings = {"rounds": 60, "batch_size": 8, "checkpoint_every": 20, "evaluate_every": 0}
    how = {"seeds": 2, "keep": False, "report": False, "resume": True}
    return pf.compare(linear, federation(0), methods, out=out, **how, **settings)


def started(out: Path) -> Any:
    """`waiting` in a process of its own, whose exit status is 0 where it was interrupted."""

    def compared():
        stop._answered.clear()  # signals of this process's other tests
        exit(waiting(out).status != "interrupted")

    process = multiprocessing.get_context("fork").Process(target=compared)
    process.start()
    return process


def living() -> dict[int, int]:
    """Processes that have not ended, and their parents."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = int(parent)
    return found


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


THREADED = """
import torch
from polyfed.studies.parallel import side_by_side
torch.set_num_threads(2)
x = torch.ones(600, 600)
def product():
    return float((x @ x).exp_().clamp_(max=1).sum())
product()
assert [v for _, v in side_by_side([product] * 3, 2)] == [360000.0] * 3
print("done")
"""


def test_tasks_do_not_wait_for_threads_that_the_parent_had():
    environment = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS")}
    command = [sys.executable, "-c", THREADED]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120).stdout == "done\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    (root / "passed").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "room", None)  # to be put back
        assert waiting(root / "out").status == "finished"
    return root / "out"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_stopped_in_the_middle_it_goes_on_to_the_same_bits(tmp_path, three, whole, how, request):
    out = tmp_path / "out"
    process = started(out)
    request.addfinalizer(process.kill)
    until(lambda: all(any(out.glob(f"runs/a-seed{i}/checkpoint/round-*")) for i in range(2)))
    tasks = {pid for pid, parent in living().items() if parent == process.pid}
    os.kill(process.pid, how)
    process.join(120)
    assert process.exitcode == (0 if how == signal.SIGINT else -how)
    until(lambda: tasks.isdisjoint(living()))  # no task outlives its parent: each ends its round and saves
    assert all(json.loads((out / f"runs/a-seed{i}/summary.json").read_text())["rounds"] <= 26 for i in range(2))
    (tmp_path / "passed").touch()
    assert waiting(out).status == "finished"
    for folder in (whole / "runs").iterdir():
        for path in (folder / "models").iterdir():
            assert path.read_bytes() == (out / "runs" / folder.name / "models" / path.name).read_bytes()
