"""A method goes by its paper's name in lower case, hyphens where the paper has them."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.base.errors import ConfigError
from polyfed.core.algorithm import decayed

METHODS = [*shipped().values()]


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_a_hyphen_is_all_that_a_name_adds_to_the_class(cls):
    assert cls.name.replace("-", "") == cls.__name__.lower()


def test_a_name_of_ours_is_refused_before_ours_are_loaded_and_ours_stay():
    code = (
        "import polyfed as pf\n"
        "for name in ('FedAvg', 'Commonest'):\n"
        "    try: type(name, (pf.Algorithm,), {})\n"
        "    except pf.errors.ConfigError as e: print(e)\n"
        "print(pf.FedAvg.__module__, pf.Ditto().name)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(",")[0] for line in said[:2]] == [
        "algorithm.name: found 'fedavg' twice", "algorithm.name: found 'commonest' twice",
    ]  # fmt: skip
    assert said[2] == "polyfed.algorithms.fedavg ditto"


class Steady(pf.Algorithm, abstract=True):
    """Gradient steps without a setting `lr`."""

    def local_update(self, task, client, down, data, round):
        return {}, {"w": pf.local_sgd(task, down["w"], data, 0.1)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}


def test_a_method_needs_no_lr():
    """Also where step sizes decay: it has none that could."""
    fed, net = pf.data.load("digits").partition(pf.data.IID(), clients=3, seed=0), torch.nn.Linear(64, 10)
    plain, decaying = (
        pf.fit(net, fed, Steady(), rounds=2, lr_schedule=s).personal for s in ("constant", "exponential:0.5")
    )
    assert torch.equal(plain, decaying)


def test_a_decaying_step_size_scales_lr_and_what_says_that_it_is_one():
    @dataclass(frozen=True)
    class Stepping(Steady, abstract=True):
        lr: float = 0.5
        eta: float = pf.setting(0.25, step_size=True)
        server_lr: float = pf.setting(1.0)

    assert decayed(Stepping(), 0.5) == Stepping(lr=0.25, eta=0.125)
    with pytest.raises(ConfigError, match=r"^algorithm.eta of Stepping: found -1.0, expected a number of at least 0$"):
        Stepping(eta=-1.0)
