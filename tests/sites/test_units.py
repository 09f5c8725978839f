"""Units of a model that few rows tell apart stay at a site; ordinary training keeps its bits."""

import re
from functools import partial

import demo
import numpy as np
import pytest
import torch
from direct import raw
from hospitals import OPEN, Between, Sites, at_sites, experiment, on_one_machine, same, tables
from test_policy import CLIENT, DEFAULT, NAMES, data  # noqa: F401  (a fixture)

from polyfed_sites import units
from polyfed_sites.site import Site

LEAST, ROWS = 5, 400
NETWORK = '\n[model]\nname = "mlp"\nhidden = [5]'


def bucketed(*columns):
    """[buckets, units] of what each of ROWS rows adds, each row in a bucket of its own kind."""
    rows = torch.arange(ROWS) % units.buckets(LEAST)
    t = torch.stack(columns, 1).double()
    return torch.zeros(units.buckets(LEAST), len(columns), dtype=torch.float64).index_add_(0, rows, t)


@pytest.fixture
def dense():
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(0))


def of(n, start=0):
    return ((torch.arange(ROWS) >= start) & (torch.arange(ROWS) < start + n)).double()


@pytest.mark.parametrize(("n", "back"), [(0, False), (1, True), (4, True), (6, False), (200, False)])
def test_a_unit_that_few_rows_reach_is_kept_back_and_one_that_none_reaches_is_not(n, back, dense):
    alone, differs = units.few(bucketed(of(n)), bucketed(dense)[:, :0], LEAST, 1e-7)
    assert (alone.tolist(), differs.tolist()) == ([back], [False])


@pytest.mark.parametrize(("n", "back"), [(0, False), (1, True), (4, True), (8, False)])
@pytest.mark.parametrize("scale", [1.0, -3.7, 1e-4])
def test_two_units_that_differ_by_few_rows_do_not_both_leave(n, back, scale, dense):
    """Whatever factor lies between them, in one answer and over two."""
    one, other = dense, scale * (dense + 2 * of(n, 7))
    assert units.few(bucketed(one, other), bucketed(one)[:, :0], LEAST, 1e-7)[1].tolist() == [False, back]
    assert units.few(bucketed(other), bucketed(one), LEAST, 1e-7)[1].tolist() == [back]


@pytest.mark.parametrize(
    "model", ["", '[model]\nname = "mlp"\nhidden = [8]', '[model]\nname = "mlp"\nhidden = [6, 6]\nactivation = "tanh"']
)
def test_ordinary_training_under_the_default_policy_keeps_the_bits_of_one_machine(model, tmp_path, monkeypatch):
    """On 200 patients of eight columns at each site, in the buckets of one key; by some a unit of few stays back."""
    monkeypatch.setattr("polyfed_sites.rows.new_secret", lambda: bytes(range(32)))

    def row(rng, i, k):
        x = rng.normal(size=8)
        return ",".join(f"{v:.3f}" for v in x) + f",{'ill' if x[:3].sum() > 0 else 'well'}"

    tables(tmp_path / "data", ",".join("abcdefgh") + ",outcome", row, 250)
    file = experiment(tmp_path / "study.toml", 'name = "fedavg"\nlr = 0.1', CLIENT.partition("drop")[0] + model)
    sites = Sites(tmp_path, tmp_path / "data", names=NAMES, policy=DEFAULT)
    same(on_one_machine(file, tmp_path / "data"), at_sites(file, sites), sites)


@pytest.mark.parametrize("key", range(2))
def test_of_the_four_hospitals_the_smallest_alone_keeps_units_back(key, tmp_path, monkeypatch):
    """Of 64 units in ten rounds, as the page for security officers says; by two of the 20 secrets that it names."""
    monkeypatch.setattr("polyfed_sites.rows.new_secret", partial(np.random.default_rng(1000 + key).bytes, 32))
    names = tuple(demo.hospitals(tmp_path / "data"))
    top = {"rounds": 10, "local-epochs": 5, "batch-size": "full", "seed": 0, "evaluate-every": 10}
    columns = f"test-fraction = 0.34\n{CLIENT.partition('drop')[0]}" + 'target = "disease"\nlabels = ["0", "1"]'
    model = '\n[model]\nname = "mlp"\nhidden = [64]'
    file = experiment(tmp_path / "study.toml", 'name = "fedavg"\nlr = 0.1', columns + model, **top)
    sites = Sites(tmp_path, tmp_path / "data", names=names, policy=DEFAULT)
    at_sites(file, sites)
    assert [len(sites.members[name].state.client.data["train"].x) for name in names] == [200, 172, 30, 86]
    kept = [re.match(r"(\w+): .* keeps back units of the model \((\d+) of layer 1\)", line) for line in sites.log]
    assert {found[1] for found in kept if found} == {"switzerland"}
    assert 0.8 < sum(int(found[2]) for found in kept if found) / (10 * 64) < 1


def test_what_is_kept_back_is_as_it_was_received_and_the_same_when_asked_again(data, tmp_path):  # noqa: F811
    """Five units in one direction, three rows between two of them: none of the layer's weights moves."""
    file = experiment(tmp_path / "study.toml", 'name = "fedavg"\nlr = 0.1', CLIENT + NETWORK, rounds=1)
    sites = Sites(tmp_path, data, names=NAMES, policy=DEFAULT)
    heard = Between(sites)
    at_sites(file, sites, heard)
    asked, begin = heard.first("train"), heard.first("begin")
    for policy, moved in ((DEFAULT, False), (OPEN, True)):
        vault = tmp_path / str(moved) / "oslo"
        site = Site("oslo", data / "oslo.csv", vault, sites.consent["oslo"], sites.noted, policy=policy)
        assert raw(site.answer(begin.pack())).head["kind"] == "begun"
        client = site.state.client
        values = np.sort(client.data["train"].x[:, 0].numpy())
        first, bias, *_ = client.task.layout.views(w := asked.tensors["w"].clone())
        first[:], bias[:] = 0, torch.tensor([9.0, 9.0, 9.0, -values[20], -values[23]])
        first[:, 0] = 1
        question = asked._replace(tensors={"w": w}).pack()
        answers = [site.answer(question)]
        site = Site("oslo", data / "oslo.csv", vault, sites.consent["oslo"], policy=policy)
        answers.append(site.answer(question))
        assert raw(answers[0]).tensors["w"].equal(raw(answers[1]).tensors["w"])
        change = client.task.layout.views(raw(answers[0]).tensors["w"] - w)
        assert [bool(t.any()) for t in change] == [moved, moved, moved, True]
    assert any("keeps back units of the model (5 of layer 1)" in line for line in sites.log)
