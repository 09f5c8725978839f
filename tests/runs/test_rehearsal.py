"""What a rehearsal says of a method: where it says that secure aggregation is possible, masked uplinks do as well."""

import pytest
import torch
from torch import nn

from polyfed.algorithms import shipped
from polyfed.compute.task import Task
from polyfed.core.schedule import Uniform
from polyfed.core.uplinks import Uplinks
from polyfed.runs.rehearsal import counted, sums

METHODS = {name: cls() for name, cls in shipped().items()}


def masked(exchange, kinds):
    """The uplinks with numbers added that cancel in what the clients add up, and hide each one's own."""
    found, draw = {}, torch.Generator().manual_seed(1)
    for name, t in exchange.up.items():
        mask = torch.randn(t.shape, generator=draw, dtype=t.dtype)
        weights = exchange.round.samples if kinds[name] == {"weighted"} else torch.ones_like(exchange.round.samples)
        weights = weights.view(-1, *[1] * (t.dim() - 1))
        found[name] = t + (mask - mask.mean(0)) / weights
    return Uplinks(found, exchange.round)


@pytest.mark.parametrize("name", METHODS)
def test_where_secure_aggregation_is_possible_masks_that_cancel_change_nothing(name):
    method, sent = METHODS[name], counted(METHODS[name])
    if "secure aggregation is possible" not in sent.needs():
        return
    watched = pytest.importorskip("polyfed_testing.stage").watched
    for exchange in watched(method, Uniform(0.5), dtype=torch.float64)[1]:
        before = [{k: t.clone() for k, t in exchange.server.items()} for _ in range(2)]
        plain = method.aggregate(before[0], Uplinks(dict(exchange.up), exchange.round), exchange.round)
        hidden = method.aggregate(before[1], masked(exchange, sent.kinds), exchange.round)
        for key in plain:
            torch.testing.assert_close(hidden[key], plain[key], rtol=0, atol=1e-9)


def test_weights_of_the_servers_own_need_every_clients_uplink():
    for name, rows in (("fedasync", "w"), ("fedbuff", "dw, version")):
        assert counted(METHODS[name]).needs() == (
            f"The server needs every client's own {rows}: secure aggregation is not possible."
        )
        assert not streamed(name)
    assert streamed("fedavg")


def streamed(name: str) -> bool:
    return sums(METHODS[name], Task(nn.Linear(4, 3), device="cpu"), (4,), 3, 3)[1]
