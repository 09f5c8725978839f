"""Federations of many clients, given end to end: the bits of the other door, memory, and what is refused."""

import gc
import tracemalloc
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed import FedAvg, Training, fit
from polyfed.base.errors import DataError
from polyfed.base.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.data import Federation, flat
from polyfed.data.flat import permutations
from polyfed.runs.schema import About


def rows(n: int, most: int = 11, d: int = 3):
    rng = np.random.default_rng(n)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, most + 1, n))])
    x = rng.standard_normal((offsets[-1], d)).astype(np.float32)
    return x, np.arange(offsets[-1]) % 3, offsets


def parts(x, y, offsets):
    return [(x[a:b], y[a:b]) for a, b in pairwise(offsets)]


def same(a: Federation, b: Federation) -> None:
    for one, other in ((a.train, b.train), (a.test, b.test), (a.validation, b.validation)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.x, other.x)
            assert torch.equal(one.y, other.y)
            assert one.offsets.tolist() == other.offsets.tolist()
            assert (one.weight is None) == (other.weight is None)
            assert one.weight is None or torch.equal(one.weight, other.weight)
    assert (a.names, a.notes, a.classes) == (b.names, b.notes, b.classes)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32])
def test_orders_of_all_clients_at_once_are_those_of_numpy(seed):
    keys = client_keys([f"client-{i}" for i in range(40)])
    for n in (1, 2, 3, 5, 17, 64):
        each = [np.random.default_rng([seed, 11, int(key)]).permutation(n) for key in keys]
        assert permutations(seed, 11, keys, n).tolist() == np.stack(each).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"validation_fraction": 0.3, "seed": 5}, {"test_fraction": 0}, {"split": "stratified"}]
)
def test_both_doors_give_the_same_bits(options):
    x, y, offsets = rows(30, 90)
    same(Federation.from_flat(x, y, offsets, **options), Federation.from_arrays(parts(x, y, offsets), **options))


def test_ten_thousand_clients_by_both_doors_are_the_same():
    x, y, offsets = rows(10_000)
    same(Federation.from_flat(x, y, offsets), Federation.from_arrays(parts(x, y, offsets)))


def test_test_rows_weights_and_sites_in_any_order_are_those_of_the_other_door():
    x, y, offsets = rows(12)
    weights = np.arange(1.0, len(x) + 1)
    a = Federation.from_flat(x, y, offsets, test=(x[:5], y[:5], [0] * 12 + [5]), weights=weights)
    test = [None] * 11 + [(x[:5], y[:5])]
    each = [weights[i:j] for i, j in pairwise(offsets)]
    same(a, Federation.from_arrays(parts(x, y, offsets), test, weights=each))
    sites = np.repeat([f"s{i:02d}" for i in range(12)], np.diff(offsets))
    order = np.random.default_rng(0).permutation(len(x))
    order = order[np.argsort(sites[order] != "s03", kind="stable")]
    mixed = Federation.from_flat(x[order], y[order], sites=sites[order])
    inside = [np.flatnonzero(sites[order] == f"s{i:02d}") for i in range(12)]
    pairs = [(x[order][at], y[order][at]) for at in inside]
    same(mixed, Federation.from_arrays(pairs, names=[f"s{i:02d}" for i in range(12)]))


def test_the_arrays_that_were_given_stay_the_user_s():
    x, y, offsets = rows(12)
    before = x.copy()
    fed = Federation.from_flat(x, y, offsets, test=(x, y, offsets))
    x += 1
    assert torch.equal(fed.train.x, torch.from_numpy(before))


class Calls(TorchDispatchMode):
    count = floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        self.floats += out.numel() if not func.is_view and getattr(out, "dtype", None) == torch.float32 else 0
        return out


def test_twenty_thousand_clients_take_no_generator_and_no_tensor_each(monkeypatch):
    x, y, offsets = rows(20_000, d=20)
    made: list[int] = []
    with Calls() as few:
        Federation.from_flat(x[: offsets[20]], y[: offsets[20]], offsets[:21])
    generator = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *a: made.append(1) or generator(*a))
    tracemalloc.start()
    with Calls() as many:
        Federation.from_flat(x, y, offsets)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert many.count == few.count
    assert len(made) < 10
    assert many.floats < 1.01 * x.size  # the copy: finite numbers are seen to be so by their sum
    assert most < 2 * (x.nbytes + y.nbytes)  # of names, places and orders; of torch's there is a copy of the samples


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 6, 4, 10], ("fall from 6 to 4", "client 1")),
        ([0, 5, 11], ("0 to 11", "expected 0 to 10")),
        ([1, 5, 10], ("1 to 10",)),
        (np.array([0.0, 5.0, 10.0]), ("float64", "integers")),
        ([0, 10, 10], ("'client-1' has no training samples",)),
    ],
)
def test_offsets_that_fit_no_clients_are_refused(refused, offsets, words):
    with refused(*words):
        Federation.from_flat(np.zeros((10, 2)), np.arange(10) % 2, offsets)


NO_ARRAYS = [
    3,
    "word",
    b"x",
    object(),
    [[1], [1, 2]],
    np.zeros(()),
    [None] * 10,
    np.full(10, np.nan),
    iter([1]),
    range(9),
]


@pytest.mark.parametrize("wrong", NO_ARRAYS, ids=lambda of: type(of).__name__)
def test_what_is_no_array_is_refused_in_every_place(wrong):
    x, y, offsets = np.random.default_rng(0).normal(size=(10, 2)), np.arange(10) % 2, [0, 4, 10]
    for k in range(3):
        given = [wrong if k == at else of for at, of in enumerate((x, y, offsets))]
        for part in ("test", "validation"):
            with pytest.raises(DataError):
                Federation.from_flat(x, y, offsets, **{part: tuple(given)})
        for key in ("offsets", "sites"):
            with pytest.raises(DataError):
                Federation.from_flat(*given[:2], **{key: given[2] if k == 2 or key == "offsets" else ["a"] * 10})


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA, pd.NaT], ids=str)
def test_a_row_without_a_site_is_named(refused, gap):
    with refused("sites: found none in row 2"):
        Federation.from_flat(np.zeros((4, 2)), np.arange(4) % 2, sites=["a", "b", gap, "a"])
    with refused("sites: found none in row 2"):
        Federation.from_flat(np.zeros((4, 2)), np.arange(4) % 2, sites=np.ma.array(list("abca"), mask=[0, 0, 1, 0]))


def test_more_clients_than_fit_are_refused_with_the_number_that_would(monkeypatch):
    monkeypatch.setattr(flat, "memory", lambda: 10_000)
    with pytest.raises(DataError, match=r"100 clients take .* free; 3\d would fit"):
        Federation.from_flat(np.zeros((100, 2)), np.arange(100) % 2, np.arange(101))


def test_clients_are_described_and_read_in_few_bytes_and_no_pass_of_the_collector():
    fed, passes = Federation.from_flat(*rows(3_000)), list[str]()
    gc.callbacks.append(lambda phase, _: passes.append(phase))
    about = fed.describe()
    gc.callbacks.pop()
    assert (passes[2:], gc.isenabled()) == ([], True)  # one as it goes on again
    clients = [[*row.values()][:4] + row["labels"] for row in about["clients"]]
    assert clients == fed.summary().to_numpy().tolist()
    tracemalloc.start()
    read = About.model_validate(about)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert read.written() == about
    assert size < 250 * fed.n


class Largest(TorchDispatchMode):
    numbers = 0  # of any tensor that is made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.name.endswith("_"):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_no_tensor_of_a_round_grows_with_the_clients(monkeypatch):
    x, y, offsets = rows(3_000)
    made, step = Largest(), Loop.step

    def watched(self):
        with made:
            return step(self)

    monkeypatch.setattr(Loop, "step", watched)
    once = Training(rounds=2, fraction=0.001, local_steps=1, local_epochs=None)
    run = fit(torch.nn.Linear(3, 3), Federation.from_flat(x, y, offsets), FedAvg(lr=0.1), once)
    assert 0 < made.numbers < 3_000
    assert run.kept.server["known"].nonzero().flatten().tolist() == np.unique(run.ledger["client"]).tolist()
