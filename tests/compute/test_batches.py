"""Which samples a client sees: every one once per epoch, whoever else is in the call."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import batches, split_of

import polyfed as pf
from polyfed.base.errors import ConfigError

SIZES = (10, 3, 8, 17)
SPLIT = split_of(*SIZES)


def seen(data, s: int) -> list[list[list[int]]]:
    """Per client and step, the rows of the split that carry weight. Checks weights, sizes and live on the way."""
    found: list[list[list[int]]] = [[] for _ in range(s)]
    row_of = {tuple(x.tolist()): i for i, x in enumerate(data.split.x)}
    for batch in data:
        assert batch.rows == len(batch.y) <= s
        for i in range(batch.rows):
            if batch.live is not None and float(batch.live[i]) != 1:
                continue
            b = batch.x.shape[1]
            weight = torch.full((b,), 1 / b).double() if batch.weight is None else batch.weight[i].double()
            real = int((weight > 0).sum())
            assert float(weight.sum()) == pytest.approx(1)
            assert torch.allclose(weight[:real], torch.full((real,), 1 / real).double())
            assert batch.sizes is None or batch.sizes[i] == real
            rows = [row_of[tuple(x.tolist())] for x in batch.x[i, :real]]
            assert batch.y[i, :real].tolist() == data.split.y[rows].tolist()
            found[i].append(rows)
    return found


@pytest.mark.parametrize("batch_size", [1, 4, 7, 100, None])
def test_every_epoch_sees_every_sample_exactly_once(batch_size):
    data = batches(SPLIT, epochs=2, batch_size=batch_size)
    for i, steps in enumerate(seen(data, len(SIZES))):
        n, start = SIZES[i], int(SPLIT.offsets[i])
        per_epoch = 1 if batch_size is None else -(-n // batch_size)
        assert len(steps) == 2 * per_epoch == int(data.steps[i])
        for epoch in (steps[:per_epoch], steps[per_epoch:]):
            assert sorted(row for step in epoch for row in step) == list(range(start, start + n))


def test_local_steps_cross_epochs_and_may_depend_on_the_round():
    steps = seen(batches(SPLIT, steps=5, batch_size=4), len(SIZES))
    assert [len(s) for s in steps] == [5] * len(SIZES)
    for own, n in zip(steps, SIZES, strict=True):
        first = [row for step in own[: -(-n // 4)] for row in step]
        assert len(set(first)) == len(first)
    assert [len(step) for step in steps[1]] == [3] * 5  # all it has, every step
    assert sorted(steps[2][0] + steps[2][1]) == sorted(steps[2][2] + steps[2][3])
    for t in (0, 3):
        assert batches(SPLIT, round=t, steps=lambda t: 2 + t, batch_size=4).steps.tolist() == [2 + t] * len(SIZES)


def test_who_else_is_in_the_call_does_not_matter():
    together = seen(batches(SPLIT, epochs=2, batch_size=4), len(SIZES))
    for clients in ([0], [1], [2], [3], [2, 0], range(4)):
        found = seen(batches(SPLIT, clients, epochs=2, batch_size=4), len(clients))
        assert found == [together[i] for i in clients]


def test_rounds_seeds_epochs_and_purposes_have_their_own_order():
    def order(purpose=None, **key):
        data = batches(SPLIT, epochs=2, batch_size=4, **key)
        return seen(data.again(purpose) if purpose else data, 4)[3]

    base, again = order(), order("personal")
    assert base[:5] != base[5:]
    assert base not in (order(round=1), order(seed=1), again)
    assert sorted(r for step in again[:5] for r in step) == sorted(r for step in base[:5] for r in step)


@pytest.mark.parametrize("clients", [[3, 0, 2, 1], [0, 1, 2, 3], [1, 3, 0, 2]])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_rows_reach_to_the_last_client_at_work(clients, batch_size):
    data = batches(SPLIT, clients, epochs=2, batch_size=batch_size)
    for k, batch in enumerate(data):
        at_work = np.flatnonzero(data.steps.numpy() > k)
        assert batch.rows == at_work[-1] + 1
        live = np.ones(batch.rows) if batch.live is None else batch.live[:, 0].numpy()
        assert np.flatnonzero(live).tolist() == at_work.tolist()


COUNTS = [1, 10, 4, 7, 2, 9]


def federation() -> pf.Federation:
    rng = np.random.default_rng(1)
    clients = [(rng.normal(size=(8 + i, 4)), rng.normal(size=(8 + i, 1))) for i in range(6)]
    return pf.Federation.from_arrays(clients, test_fraction=0.0)


def run(algorithm, steps, fed=None, **settings):
    model = torch.nn.Linear(4, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    given = {"rounds": 3, "batch_size": None, "loss": "mse", "device": "cpu", "evaluate_every": 0} | settings
    return pf.fit(model, fed or federation(), algorithm, local_steps=steps, **given)


def test_uneven_steps_follow_the_client_who_ends_where_so_many_steps_of_everybody_end():
    fed, order = federation(), [4, 0, 5, 2, 1, 3]
    first = run(pf.Local(lr=0.1), COUNTS)
    steps = dict(zip(reversed(fed.names), reversed(COUNTS), strict=True))
    assert torch.equal(run(pf.Local(lr=0.1), steps).personal, first.personal)
    assert first.settings.table()["local-steps"] == dict(zip(fed.names, COUNTS, strict=True))
    ordered = run(pf.Local(lr=0.1), steps, fed.reorder(order)).personal
    torch.testing.assert_close(ordered, first.personal[order], rtol=1e-12, atol=1e-12)
    for i, count in enumerate(COUNTS):
        equal = run(pf.Local(lr=0.1), count).personal[i]
        torch.testing.assert_close(first.personal[i], equal, rtol=1e-12, atol=1e-12)


PAPERS = pf.FedCET(lr="paper", smoothness=10.0, convexity=0.1)


@pytest.mark.parametrize(
    ("steps", "words", "method"),
    [
        (0, "at least 1", pf.FedAvg()),
        ([1, 2], "found 2 numbers, expected one for each of 6 clients", pf.FedAvg()),
        ([1, 2, 3, 4, 5, 0], "'client-5': found 0", pf.FedAvg()),
        ({"client-0": 1}, "no number for client 'client-1'", pf.FedAvg()),
        ({f"client-{i}": 1 for i in (0, 1, 2, 3, 4, 6)}, "no client 'client-6'", pf.FedAvg()),
        (2.5, "found 2.5", pf.FedAvg()),
        ("uniform(0, 3)", "found 'uniform", pf.FedAvg()),
        (COUNTS, "FedCET", PAPERS),
        *((lambda t, given=given: given, r"found .* expected an integer of at least 1", pf.FedAvg())
          for given in (0, -1, 1.5, "a", True, 2**70)),
    ],
)  # fmt: skip
def test_what_is_no_number_of_steps_is_refused(steps, words, method):
    with pytest.raises(ConfigError, match=words):
        run(method, steps)
    run(method, [2] * 6, rounds=1)


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("chunk", [1, 3])
def test_every_step_of_every_local_solve_is_counted(batch_size, chunk):
    """Clients of 10, 4 and 1 samples: 3, 1 and 1 batches of 4 a pass, one full batch; FedRep passes 10 + 2 times."""
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (10, 4, 1)]
    fed = pf.Federation.from_arrays(pairs, pairs)
    passes = {pf.Local(): 2, pf.Ditto(personal_epochs=5): 7, pf.FedRep(head_epochs=10, body_epochs=2): 12}
    how = {"loss": "mse", "local_epochs": 2, "batch_size": batch_size, "chunk": chunk, "workers": 1}
    for method, times in passes.items():
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        expected = [times * n for n in ([3, 1, 1] if batch_size else [1, 1, 1])]
        assert pf.fit(model, fed, method, rounds=2, **how).ledger["steps"].tolist() == 2 * expected, method


def test_the_batches_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch):
    whole = [seen(batches(SPLIT, epochs=3, batch_size=b), len(SIZES)) for b in (1, 4)]
    monkeypatch.setattr("polyfed.compute.batches.BLOCK", 1)
    assert [seen(batches(SPLIT, epochs=3, batch_size=b), len(SIZES)) for b in (1, 4)] == whole


@pytest.mark.parametrize("work", [{"epochs": 10**6, "batch_size": 1}, {"steps": 10**9, "batch_size": None}])
def test_a_million_epochs_are_drawn_as_they_are_needed(work, monkeypatch):
    monkeypatch.setattr("polyfed.compute.batches.BLOCK", 1 << 12)
    tracemalloc.start()
    for _ in zip(range(3), batches(SPLIT, **work), strict=False):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_class_counts_are_sums_of_weights_over_their_mean():
    split = split_of(*SIZES)
    expected = [torch.bincount(split.client(i)[1], minlength=3).tolist() for i in (2, 0)]
    assert batches(split, [2, 0]).counts(3).tolist() == expected
    weight = torch.rand(len(split.x), generator=torch.Generator().manual_seed(0)) + 0.1
    heavy = replace(split, weight=weight)
    for row, i in zip(batches(heavy, [2, 0]).counts(3), (2, 0), strict=True):
        u, y = weight[split.rows(i)].double(), split.client(i)[1]
        assert torch.allclose(row, torch.stack([u[y == c].sum() for c in range(3)]) / u.mean(), atol=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_samples_set_apart_are_the_same_in_every_round_and_of_every_chunk(share):
    split = split_of(10, 1, 8, 17)
    for i, n in enumerate((10, 1, 8, 17)):
        found = [batches(split, some, round=t, epochs=1).apart(share) for some, t in (([i], 0), ([3, 2, 1, 0], 5))]
        rows = [[part.split.client(0 if part.split.n == 1 else 3 - i)[0] for part in parts] for parts in found]
        assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))
        rest, own = ({tuple(x.tolist()) for x in part} for part in rows[0])
        assert rest | own == {tuple(x.tolist()) for x in split.client(i)[0]}
        assert len(own) == (n if n == 1 else min(n - 1, max(1, n - round((1 - share) * n))))
        assert n == 1 or not rest & own
