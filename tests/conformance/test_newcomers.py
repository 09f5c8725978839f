"""Every method takes newcomers in: the run stays as it is, newcomers do not see each other, bytes are as stated."""

import pytest
import torch
from instances import METHODS, federation, steps, train
from traffic import stated

import polyfed as pf

OLD, NEW = [0, 1, 2, 3], [4, 5]
EXCHANGES = 3
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def trained(method, **settings):
    return train(method, federation().reorder(OLD), dtype=torch.float64, evaluate_every=0, **settings)


@each_method
def test_the_run_stays_as_it_is_bit_for_bit(method):
    run = trained(method)
    state, meta = run.trained.state()
    before = {k: v.clone() for k, v in state.items()}
    found = pf.admit(run, federation().reorder(NEW), EXCHANGES)
    after, still = run.trained.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert meta == still
    assert len(found.table) == (EXCHANGES + 1) * len(NEW)
    assert found.personal.shape == (len(NEW), run.trained.task.p)
    assert torch.isfinite(found.personal).all()
    assert (found.clusters is None) == (run.clusters is None)
    if found.clusters is not None and run.clusters is not None:
        assert set(found.clusters.tolist()) <= {-1, *run.clusters.tolist()}


@each_method
def test_newcomers_do_not_see_each_other(method):
    run, new = trained(method), federation().reorder(NEW)
    both = pf.admit(run, new, EXCHANGES)
    for at in range(len(NEW)):
        alone = pf.admit(run, new.reorder([at]), EXCHANGES)
        assert (alone.personal[0] - both.personal[at]).abs().max() <= 1e-10
        if both.clusters is not None:
            assert alone.clusters == both.clusters[at]


@each_method
def test_what_is_billed_is_what_the_method_states(method):
    """Each exchange as in training. A method whose model is there at entry has no exchanges: only downloads."""
    run = trained(method)
    last = pf.admit(run, federation().reorder(NEW[:1]), EXCHANGES).table
    entry, end = last.iloc[0], last.iloc[-1]
    unit, told = 8 * run.trained.task.p, stated(method, run.trained.task.layout, 8)
    assert entry["up_bytes"] == 0
    assert entry["down_bytes"] % unit == 0
    moved = [end[k] - entry[k] for k in ("down_bytes", "up_bytes")]
    if moved == [0, 0] and told.down:
        assert entry["down_bytes"] == told.entry * unit
        return
    numbers = (
        8 * EXCHANGES * len(run.trained.task.layout.entries)
    )  # single numbers beside a vector, whole entries of a layer
    signature = 8 * 36 * 3 * method.basis if told.signature else 0
    assert abs(moved[0] - EXCHANGES * told.down * unit) <= numbers or told.less_down
    assert abs(moved[1] - EXCHANGES * told.up * unit - signature) <= numbers


def test_the_amount_of_work_is_the_runs():
    """Local, admitted, is Local."""
    method = METHODS["local"]
    found = pf.admit(trained(method), federation().reorder(NEW), EXCHANGES)
    run = train(method, federation().reorder(NEW), dtype=torch.float64, rounds=EXCHANGES)
    assert steps(method) is None
    assert (found.personal - run.personal).abs().max() <= 1e-12
    assert found.table["alone"].tolist() == found.table[found.metric.name].tolist()
