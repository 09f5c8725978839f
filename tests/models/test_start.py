"""The start belongs to the seed where a class or a function makes the model; else it is the model's present weights."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError


class Net(nn.Sequential):
    def __init__(self, hidden: int = 3):
        super().__init__(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))


MAKERS = {"class": Net, "function": lambda: Net(), "of the seed": lambda seed: Net(), "of one": lambda s, h=3: Net(h)}


@pytest.fixture
def sites():
    rng = torch.Generator().manual_seed(1)
    rows = [(torch.randn(12, 2, generator=rng), torch.arange(12) % 2) for _ in range(3)]
    return pf.Federation.from_arrays(rows, test_fraction=0.25)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_call_gives_the_same_bits_and_draws_nothing_of_the_programs(make, sites):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = pf.fit(make, sites, pf.FedAvg(lr=0.1), rounds=2, seed=4)
    assert torch.equal(torch.rand(3), expected), "torch's own generator has moved"
    two, other = (pf.fit(make, sites, pf.FedAvg(lr=0.1), rounds=2, seed=s) for s in (4, 5))
    torch.manual_seed(4)
    assert torch.equal(one.common, two.common)
    assert not torch.equal(one.common, other.common)
    there = pf.fit(Net(), sites, pf.FedAvg(lr=0.1), rounds=2, seed=4)
    assert torch.equal(one.common, there.common), "what torch.manual_seed(seed) draws"


def test_every_door_draws_the_same_start(sites, tmp_path):
    fit = pf.fit(Net, sites, pf.FedAvg(lr=0.1), rounds=1, seed=1, out=tmp_path / "run")
    compared = pf.compare(Net, sites, [pf.FedAvg(lr=0.1)], seeds=[1], rounds=1)
    assert torch.equal(compared.results[0].run.common, fit.common)
    again = pf.Run.open(tmp_path / "run", sites, Net).resume(rounds=3)
    assert torch.equal(again.common, pf.fit(Net, sites, pf.FedAvg(lr=0.1), rounds=3, seed=1).common)


def test_a_run_says_where_it_starts(sites, tmp_path):
    drawn = pf.fit(Net, sites, pf.FedAvg(lr=0.1), rounds=1, seed=3, out=tmp_path / "drawn")
    own = pf.fit(Net(), sites, pf.FedAvg(lr=0.1), rounds=1, out=tmp_path / "own")
    for run, name, words in (drawn, "drawn", "drawn under seed 3"), (own, "own", "the model's present weights"):
        assert words in (tmp_path / name / "log.txt").read_text().splitlines()[0]
        assert (
            ("present weights" in repr(run)) == (name == "own") == ("present weights" in repr(pf.Run.open(run.folder)))
        )


def test_a_function_without_a_signature_gets_the_seed(sites):
    models = {4: Net(2), 5: Net(6)}
    run = pf.fit(models.__getitem__, sites, pf.FedAvg(lr=0.1), rounds=1, seed=5)
    assert run.common.numel() == sum(q.numel() for q in models[5].parameters())


@pytest.mark.parametrize("wrong", [lambda: 3, lambda a, b: Net(), int, "net"], ids=["number", "two", "int", "text"])
def test_what_makes_no_model_is_refused(wrong, sites):
    with pytest.raises(ConfigError, match="model"):
        pf.fit(wrong, sites, pf.FedAvg(lr=0.1), rounds=1)
