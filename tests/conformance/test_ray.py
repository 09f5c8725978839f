"""Every method with its clients on two Ray actors: what one machine computes."""

from functools import partial

import numpy as np
import pytest
import torch
from instances import BATCH, METHODS, federation, kind_of, loop, model, steps

from polyfed.compute.batches import Work
from polyfed.compute.compiled import path_of
from polyfed.compute.task import Task
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.core.worker import Plan
from polyfed_testing.stage import NAMES

ray = pytest.importorskip("ray", reason="needs the extra [ray]")
engine_module = pytest.importorskip("polyfed_ray.engine")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    engine_module.IDLE.clear()
    ray.shutdown()


FEW = ("fedavg", "scaffold", "ditto", "fedcet", "fpfc", "ifca", "fedslr", "fedbuff")  # one of each kind of state
NAMED = [pytest.param(m, id=name, marks=[] if name in FEW else pytest.mark.long) for name, m in METHODS.items()]


@pytest.mark.parametrize("method", NAMED)
def test_actors_compute_what_one_machine_does(method):
    """Server, private rows and models: the same bits where rows travel, the same to rounding where sums do."""
    fed, half, task = federation(), Uniform(0.5), partial(Task, model(kind_of(method)), device="cpu")
    work = Work(epochs=2, steps=steps(method), batch_size=BATCH)
    plan = Plan(1, 1, "cpu", path_of(task().net, work, fed.train))
    engine = engine_module.RayEngine(task, {"train": fed.train}, NAMES, method, work, 3, plan, workers=2)
    there = Loop(task(), fed.train.counts, NAMES, method, half, engine, 3)
    here = loop(method, schedule=half, chunk=1)
    try:
        for _ in range(2):
            here.step(), there.step()
        rows = there.engine.save()
        models = there.personal(np.arange(len(NAMES)))
    finally:
        engine.close()
    summed = {name for name, words in there.used.items() if words <= {"mean", "sum"}}
    state = [(k, t, there.server[k]) for k, t in here.server.items()]
    state += [(k, t, rows[k]) for k, t in here.engine.rows.tensors.items()]
    for name, mine, yours in [*state, ("models", here.personal(np.arange(len(NAMES))), models)]:
        if summed:
            assert torch.allclose(mine.double(), yours.double(), rtol=1e-4, atol=1e-5), name
        else:
            assert torch.equal(mine, yours), name
    assert there.ledger.totals() == here.ledger.totals()
