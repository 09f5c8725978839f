"""The local engine: how it plans, what it refuses, and that each client runs exactly once."""

import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed import native
from polyfed.algorithms.ditto import Ditto
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.base.errors import ConfigError, RunError
from polyfed.compute.batches import PADDING, Work
from polyfed.compute.task import Task
from polyfed.core import worker
from polyfed.core.messages import Round
from polyfed.core.rows import MappedRows, MemoryRows
from polyfed.core.worker import SMALL, Plan, Stopwatch, Worker, chunks
from polyfed.engines import local
from polyfed.engines.local import CACHE, ROOM, WORTH, make_plan, make_rows, pick_device
from polyfed.runs.trainer import prepare

SIZES = (5, 40, 12, 30, 13, 31)


def federation() -> pf.Federation:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(m, 6)).astype(np.float32), np.arange(m) % 3) for m in SIZES]
    return pf.Federation.from_arrays(data, test_fraction=0)


def chain(width: int) -> Task:
    return Task(nn.Linear(width, 10), device="cpu")


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x)


class Spread(Module):
    """Makes 1000 activations of each."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.inner(x)[:, None].expand(-1, 1000, -1).tanh()).mean(1)


# the plan


@pytest.mark.parametrize("cohort", [1, 2, 7, 100])
@pytest.mark.parametrize("width", [4, 784, 20_000])
@pytest.mark.parametrize(("path", "room"), [("closed form", CACHE), ("native", ROOM)])
def test_a_chunks_models_fit_their_room(cohort, width, path, room):
    """A core's cache; the kernel takes one client after another. Threads have no part in it."""
    task = chain(width)
    plan = make_plan(task, cohort, 1000, path=path)
    bytes_each = task.p * 4
    assert make_plan(task, cohort, 1000).path == ("closed form" if native.kernel() is None else "native")
    assert plan.chunk == 1 or plan.chunk * bytes_each <= room
    assert plan.workers <= cohort
    assert plan.chunk == max(1, min(cohort, room // bytes_each))
    assert {make_plan(task, cohort, 1000, path=path, workers=w).chunk for w in (1, 2, 4, 8)} == {plan.chunk}


class There(Task):
    """Says of itself that it is on an accelerator."""

    device = property(lambda task: torch.device("cuda", 0), lambda task, given: None)


@pytest.mark.parametrize("samples", [0, 10_000])
def test_on_an_accelerator_models_and_activations_fit_the_memory(samples, monkeypatch):
    """The cohort where it fits; of less memory less, but one client, by what vectors and samples take."""
    task = There(Module(), device="cpu")
    task.net.vectorised, task.net.sample_bytes = True, samples
    each, chunks = task.p * 4 + 32 * samples, []  # the model and what a step of 32 samples keeps
    for clients in (1, 8, 64, 1024):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, held=clients * each: (held, 0))
        plan = make_plan(task, 50, 20, most=32)
        assert plan.workers == 1
        assert plan.chunk == 1 or plan.chunk * each <= clients * each
        chunks.append(plan.chunk)
    assert chunks == sorted(chunks)
    assert chunks[0] == 1
    assert chunks[-1] == 50


def test_the_plan_can_be_overridden():
    plan = make_plan(chain(4), 10, 32, chunk=3, workers=5)
    assert (plan.chunk, plan.workers) == (3, 5)
    with pytest.raises(ConfigError, match="chunk: found 0, expected at least 1"):
        make_plan(chain(4), 10, 32, chunk=0)


def test_more_workers_than_the_machine_has_cores_are_not_planned(monkeypatch):
    for cores in (1, 3):
        monkeypatch.setattr(local, "cores", lambda n=cores: n)
        assert make_plan(chain(784), 100, 32).workers == cores
    assert make_plan(chain(784), 2, 1000).workers == 2


def test_a_thread_must_be_worth_it(monkeypatch):
    monkeypatch.setattr(local, "cores", lambda: 8)
    small, large = (make_plan(chain(4), 100, batch).workers for batch in (32, 1000))
    assert (small, large) == (1, 100 * 1000 * 50 // WORTH)  # 4 x 10 weights and 10 biases
    assert make_plan(chain(4), 100, 32, workers=5).workers == 5
    assert make_plan(Task(Module(), device="cpu"), 100, 32).workers == 8  # what its steps cost is not known


def test_devices():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="device: found 'quantum', expected auto, cpu or cuda"):
        pick_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda was asked for"):
            pick_device("cuda")


# where private rows live, and what does not fit


def bytes_of(task: Task, algorithm, n: int, cohort: int) -> tuple[int, int]:
    """(what must be in memory, the private rows): Ditto keeps one vector on either side."""
    assert isinstance(algorithm, Ditto)
    w = task.p * 4
    return 2 * w + cohort * 6 * w, n * w


def test_rows_are_in_memory_when_they_fit_and_mapped_when_not(monkeypatch, tmp_path):
    task, n, cohort = chain(50), 1000, 2
    needed, rows = bytes_of(task, Ditto(), n, cohort)
    monkeypatch.setattr(local, "memory", lambda: 2 * (needed + rows))
    assert isinstance(make_rows(Ditto(), task, n, cohort, tmp_path), MemoryRows)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(local, "memory", lambda: needed + rows // 2)
    assert isinstance(make_rows(Ditto(), task, n, cohort, tmp_path), MappedRows)
    with pytest.raises(RunError, match=r"ditto keeps .* GB of private client state .* give the run a folder") as said:
        make_rows(Ditto(), task, n, cohort, None)
    most = int(str(said.value).partition(" of memory are free, for ")[2].partition(" of 1,000 clients")[0])
    assert isinstance(make_rows(Ditto(), task, most, cohort, None), MemoryRows)
    with pytest.raises(RunError):
        make_rows(Ditto(), task, most + 1, cohort, None)


def test_what_cannot_fit_is_refused_with_the_estimate(monkeypatch, tmp_path):
    task = chain(50)
    needed, _ = bytes_of(task, Ditto(), 1000, 2)
    monkeypatch.setattr(local, "memory", lambda: needed - 1)
    with pytest.raises(RunError, match=r"ditto with 1000 clients and 510 parameters does not fit.*GB.*GB.*GB"):
        make_rows(Ditto(), task, 1000, 2, tmp_path)
    monkeypatch.undo()  # FPFC's pairs for 3000 clients and a million parameters are 18 TB, of which nothing is taken
    with pytest.raises(RunError, match="fpfc with 3000 clients and 1,000,010 parameters does not fit"):
        make_rows(FPFC(), Task(nn.Linear(100_000, 10), device="cpu"), 3000, 10, None)


WIDE = """
from pathlib import Path
import numpy as np
import polyfed as pf
from torch import nn
from polyfed.models import adapted
from polyfed.runs.trainer import prepare

def layer():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(*(layer() for _ in range(4))), nn.Linear(256, 2)
    def forward(self, x):
        return self.head(self.body(x).mean(1))

def peak():  # of this program: getrusage's begins with what the process that started it has taken
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])

rng = np.random.default_rng(0)
data = [(rng.normal(size=(64, 128, 256)).astype(np.float32), np.arange(64) % 2) for _ in range(2)]
fed = pf.Federation.from_arrays(data, test_fraction=0.5)
how = pf.Training(rounds=1, batch_size=32, workers=1, device="cpu")
trainer = prepare(adapted(Deep(), "lora:r=8"), fed, pf.FedAvg(), how)
before = peak()
trainer.run()
taken = 1024 * (peak() - before)
print(trainer.memory.base, sum(q.nbytes for q in trainer.task.model.parameters() if not q.requires_grad))
print(trainer.memory.more, taken)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is counted as on Linux")
def test_the_memory_planned_for_an_adapter_is_that_taken():
    """Hundreds of megabytes, nearly all of them activations, to a factor of two; the frozen part is counted once."""
    done = subprocess.run([sys.executable, "-c", WIDE], check=True, capture_output=True, text=True)
    base, frozen, planned, taken = map(int, done.stdout.split())
    assert base == frozen == 4 * 4 * (2 * 1024 * 256 + (1 + 8) * (1024 + 256))
    assert taken / 2 < planned < 2 * taken


def test_prepare_refuses_steps_that_do_not_fit(monkeypatch):
    """A module's activations, which no vector of it shows, beside its frozen part."""
    monkeypatch.setattr(local, "memory", lambda: 100_000)
    model, training = Spread(), pf.Training(rounds=1, batch_size=8, device="cpu")
    model.head.requires_grad_(False)
    with pytest.raises(RunError, match=r"fedavg .* does not fit: the frozen part .*, local steps .*, .* free"):
        prepare(model, federation(), FedAvg(), training)
    monkeypatch.setattr(local, "memory", lambda: 100_000_000)
    assert prepare(model, federation(), FedAvg(), training).memory is not None


# who runs when


@dataclass(frozen=True)
class Spy(FedAvg, abstract=True):
    """FedAvg that writes down who was in each of its calls, and looks at all of their samples at once if it is to."""

    calls: list = field(default_factory=list)
    looks: bool = False

    def local_update(self, task, client, down, data, round):
        self.calls.append((round.ids.tolist(), data.samples.tolist(), data.steps.tolist()))
        if self.looks:
            data.again("look").whole()
        return super().local_update(task, client, down, data, round)


def spied(model: nn.Module, spy: Spy, **settings) -> pf.Run:
    prepared = prepare(model, federation(), spy, pf.Training(**settings))
    spy.calls.clear()
    return prepared.run()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_every_client_runs_once_with_others_like_it(chunk, batch_size, workers):
    spy = Spy(looks=batch_size is None)
    settings = {"rounds": 1, "batch_size": batch_size, "chunk": chunk, "workers": workers, "device": "cpu"}
    run = spied(nn.Linear(6, 1000), spy, **settings)
    assert max(SIZES) * len(SIZES) * run.trained.task.p > SMALL
    assert sorted(i for ids, _, _ in spy.calls for i in ids) == list(range(len(SIZES)))
    for ids, samples, steps in spy.calls:
        assert len(ids) <= chunk
        assert samples == [SIZES[i] for i in ids]
        assert steps == sorted(steps, reverse=True)
        if batch_size is None:
            assert max(samples) <= PADDING * min(samples), "padding costs more than it saves"


@pytest.mark.skipif(native.kernel() is None, reason="the kernel is not built here")
@pytest.mark.parametrize("workers", [1, 2])
def test_full_batches_that_are_never_padded_share_a_call_however_unlike(workers, monkeypatch):
    """The kernel takes samples where they lie: a call shows it, then each worker that is worth it makes one."""
    monkeypatch.setattr(worker, "WORTH", 1)
    spy = Spy()
    settings = {"rounds": 2, "batch_size": None, "chunk": 100, "device": "cpu"}
    model = nn.Linear(6, 1000)
    run = spied(model, spy, **settings, workers=workers)
    assert max(SIZES) * len(SIZES) * run.trained.task.p > SMALL
    for calls in (spy.calls[: workers + 1], spy.calls[workers + 1 :]):
        assert len(calls) == workers + 1
        assert sorted(i for ids, _, _ in calls for i in ids) == list(range(len(SIZES)))
    one = pf.fit(model, federation(), Spy(), **(settings | {"chunk": 1}), workers=1)
    assert torch.allclose(run.server["w"], one.server["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(native.kernel() is None, reason="the kernel is not built here")
def test_chunks_of_the_kernel_take_equally_long():
    """The clients, in one order for any number of parts, are cut by their work: nobody waits for the largest."""
    for batch, sizes in ((None, np.array([20, 60, 20, 20])), (20, np.array([20, 60, 20, 20]))):
        found = chunks(Work(1, None, batch), sizes, np.arange(4, dtype=np.uint64), 0, 0, 100, parts=2)
        assert sorted(sizes[some].sum() for some in found) == [60, 60]
    sizes = np.array([10 * 2**k for k in range(8)] * 2)
    found = chunks(Work(1, None, 10), sizes, np.arange(16, dtype=np.uint64), 0, 0, 100, parts=2)
    assert sorted(np.concatenate(found).tolist()) == list(range(16))
    assert abs(sizes[found[0]].sum() - sizes[found[1]].sum()) <= 20  # of 5100
    for parts in (1, 3, 4, 8, 16):
        other = chunks(Work(1, None, 10), sizes, np.arange(16, dtype=np.uint64), 0, 0, 100, parts=parts)
        assert np.concatenate(other).tolist() == np.concatenate(found).tolist()


class Full(FedAvg, abstract=True):
    """FedAvg on an accelerator whose memory holds so many clients at once."""

    holds = 2

    def local_update(self, task, client, down, data, round):
        if len(round.ids) > self.holds:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().local_update(task, client, down, data, round)


def test_what_does_not_fit_an_accelerators_memory_is_done_in_halves(caplog):
    """With the same numbers, and a line each time that the chunks get smaller, for good."""
    settings = {"rounds": 3, "batch_size": 8, "chunk": 6, "workers": 1, "dtype": torch.float64, "device": "cpu"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
    expected = pf.fit(model, federation(), FedAvg(), **settings)
    assert not caplog.records
    found = pf.fit(model, federation(), Full(), **settings)
    said = [record.message for record in caplog.records]
    assert said == [f"{n} clients at once do not fit the memory of cpu: now {-(-n // 2)}" for n in (6, 3)]
    torch.testing.assert_close(found.personal, expected.personal, rtol=0, atol=1e-12)
    assert found.ledger.drop(columns="seconds").equals(expected.ledger.drop(columns="seconds"))


def test_one_client_that_does_not_fit_is_an_error_of_one_line():
    class Fuller(Full, abstract=True):
        holds = 0

    with pytest.raises(RunError, match="one client's step does not fit the memory of cpu; lower batch_size"):
        pf.fit(nn.Linear(6, 3), federation(), Fuller(), rounds=1, workers=1, device="cpu")


def test_a_devices_seconds_are_its_own_and_waited_for_once(monkeypatch):
    """Two events in its queue, around what is asked of it; nobody waits for them before the seconds are wanted."""
    queue = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = 1500.0 * len(queue)
            queue.append("event")

        def synchronize(self):
            queue.append("waited for")

        def elapsed_time(self, other):
            assert queue[-1] == "waited for"
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = chunk(There(nn.Linear(6, 3)), lambda *asked: queue.append("work"))
    assert queue == ["event", "work", "event"]
    assert watch.seconds() == 3.0
    assert queue[3:] == ["waited for"]


def chunk(task: Task, local_update) -> Stopwatch:
    """What a chunk of one client, whose training is this function, took."""

    class Method:
        def local_update(self, *asked):
            local_update(*asked)
            return {}, {}

    split, one = federation().train, torch.ones(1)
    round = Round(0, 6, 0, one.long(), one, one.long())
    worker = Worker(task, split, np.arange(6, dtype=np.uint64), Work(), 0, Plan(1, 1, "cuda", "vectorised"))
    return worker._chunk(Method(), MemoryRows(6, {}), {}, round, one.long(), np.array([1]))[2]


@pytest.mark.parametrize("on", [False, True])
def test_tf32_is_for_local_training_on_an_accelerator_and_asked_for(on, monkeypatch):
    """torch's own setting of it, which differs between products and convolutions, holds before and after."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Stopwatch(torch.device("cpu")))
    monkeypatch.setattr(Stopwatch, "record", lambda watch: None, raising=False)
    before, seen = flags(), []
    chunk(There(nn.Linear(6, 3), tf32=on), lambda *asked: seen.append(flags()))
    chunk(Task(nn.Linear(6, 3), tf32=on), lambda *asked: seen.append(flags()))
    assert seen == [(on, on), before]
    assert flags() == before


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_small_full_batches_share_a_call_however_unlike(chunk):
    spy = Spy()
    run = spied(nn.Linear(6, 3), spy, rounds=1, batch_size=None, chunk=chunk, workers=1, device="cpu")
    assert max(SIZES) * len(SIZES) * run.trained.task.p < SMALL
    assert len(spy.calls) == -(-len(SIZES) // chunk)


def test_an_error_in_a_worker_thread_is_the_callers_error():
    class Broken(FedAvg, abstract=True):
        def local_update(self, task, client, down, data, round):
            raise ZeroDivisionError("from the method")

    with pytest.raises(ZeroDivisionError, match="from the method"):
        pf.fit(nn.Linear(6, 3), federation(), Broken(), rounds=1, chunk=2, workers=2, device="cpu")
