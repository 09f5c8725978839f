"""The same bits from any number of threads: every method, by the kernel and by torch.

The cohort is cut as if each sample were worth a thread, so that cuts for 2, 4 and 8 threads differ."""

import ctypes

import pytest
import torch
from instances import METHODS

import polyfed as pf
from polyfed.core import worker
from polyfed.core.algorithm import Algorithm
from polyfed.engines import local
from polyfed.runs.result import Result
from polyfed_testing.stage import private, train

PLAIN = [name for name in METHODS if "(" not in name]
WORKS = {
    "batches": ((2, 8), {"batch_size": 4, "local_epochs": 1}),
    "full": ((4,), {"batch_size": None, "local_steps": 2}),
}


def numbers(run: Result) -> dict[str, bytes]:
    """All that a run gives, as bytes: the server's state, private tensors, the models, and every client's scores."""
    tensors = run.server | {f"private {k}": t for k, t in private(run).items()} | {"models": run.personal}
    scores = {f"{split} {m}": v.tobytes() for split, found in run.final.items() for m, v in found.items()}
    return {k: t.detach().contiguous().numpy().tobytes() for k, t in tensors.items()} | scores


def differing(method: Algorithm, workers: tuple[int, ...], **how) -> list[str]:
    """What differs from a run on one thread, and on how many threads it does."""
    one = numbers(train(method, workers=1, **how))
    many = {w: numbers(train(method, workers=w, **how)) for w in workers}
    return [f"{key} ({w} threads)" for w, found in many.items() for key in one if one[key] != found[key]]


@pytest.fixture
def cut(monkeypatch):
    """Every sample is worth a thread."""
    monkeypatch.setattr(worker, "WORTH", 1)
    monkeypatch.setattr(local, "SCORED", 1)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", PLAIN)
def test_the_number_of_threads_changes_no_bit(name, work, cut):
    workers, how = WORKS[work]
    assert differing(METHODS[name], workers, rounds=2, **how) == []


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedacs"])
def test_nor_does_it_without_the_kernel(name, cut, monkeypatch):
    monkeypatch.setenv("POLYFED_NATIVE", "0")
    assert differing(METHODS[name], (2, 3, 8), rounds=2, **WORKS["batches"][1]) == []


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_where_chunks_are_cut_changes_no_bit_either_of_what_the_kernel_takes(name, cut):
    """Its clients are taken one by one, and their uplinks are added in one order."""
    if worker.PATH != train(METHODS[name], rounds=1).trained.engine.plan.path:
        pytest.skip("the kernel is not built here")
    models = [train(METHODS[name], rounds=2, chunk=chunk, workers=2, batch_size=4).personal for chunk in (1, 2, 3, 100)]
    assert all(torch.equal(m, models[0]) for m in models)


def test_a_worker_s_thread_has_one_thread_of_openmp_from_its_first_product_on():
    """OpenMP's own number is that of the cores until torch is asked; a product before that has other bits, at times."""
    if not hasattr(ctypes.CDLL(None), "omp_get_max_threads"):
        pytest.skip("OpenMP's functions are not seen in this process")
    found = train(METHODS["fedavg"], rounds=1, workers=3).trained.engine.worker
    mine = worker.Worker(found.task, found.train, found.keys, found.work, 0, found.plan)  # its threads ran nothing yet
    assert mine.map(lambda _: ctypes.CDLL(None).omp_get_max_threads(), range(6)) == [1] * 6
    mine.close()


def test_the_threads_of_torch_change_no_bit():
    """What a run trains, evaluates and writes is made on one thread, whatever torch is set to."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            net = torch.nn.Sequential(torch.nn.Linear(8, 700), torch.nn.ReLU(), torch.nn.Linear(700, 4))
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
            run = train(pf.FedAvg(), net=net, rounds=2)
            found.append(numbers(run))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
