"""check_method: the README's method passes every row, and wrong versions of it fail at the row that says why."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.testing import ROWS, NotConformant, check_method

FILE = Path(__file__).parents[1] / "examples" / "own_method.py"


@pytest.fixture(scope="module")
def momentum():
    spec = importlib.util.spec_from_file_location("polyfed_user_momentum", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Momentum


def test_the_methods_of_the_readme_pass_every_row(momentum):
    found = check_method(momentum())
    assert [row.name for row in found] == [r.__name__[1:].replace("_", " ") for r in ROWS]
    assert {row.outcome for row in found} == {"passed", "its clients keep no model of their own", "it states none"}


@pytest.mark.parametrize(
    "method", [pf.Ditto(), pf.Scaffold(), pf.FPFC(0.05), pf.IFCA(), pf.FedSLR(), pf.Local()], ids=lambda m: m.name
)
def test_methods_of_each_kind_pass(method):
    assert len(check_method(method)) == len(ROWS)


@dataclass(frozen=True)
class Base(pf.Algorithm, abstract=True):
    """FedAvg, to be spoilt. lr"""

    lr: float = pf.setting(0.1, ge=0, source="ours")

    def local_update(self, task, client, down, data, round):
        return {}, {"w": pf.local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}


class WeighsByPosition(Base):
    """lr"""

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", 1.0 + round.ids.to(up["w"].dtype))}


class KeepsStateInItself(Base):
    """lr"""

    def aggregate(self, server, up, round):
        kept = self.__dict__.setdefault("kept", [])
        kept.append(up.mean("w", round.samples))
        return {"w": torch.stack(kept).mean(0)}


class DrawsUnkeyed(Base):
    """lr"""

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {}, {"w": w + 1e-3 * torch.randn_like(w)}


class SendsItsPrivateMemory(Base):
    """lr"""

    def init_client(self, task, w0):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {"w": w}, {"w": w}

    def downlink(self, server, round):
        self.__dict__["ids"] = round.ids
        return pf.Down(shared={"w": server["w"] + (1e-3 * len(self.__dict__.setdefault("seen", [])))})

    def aggregate(self, server, up, round):
        self.__dict__.setdefault("seen", []).append(0)
        return {"w": up.mean("w", round.samples)}


class HidesItsAxes(Base):
    """lr"""

    def init_server(self, task, w0, n):
        return {"w": w0, "all": w0.expand(n, -1).clone()}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w"), "all": server["all"].index_copy(0, round.ids, up["w"])}


class GoesThroughFloat32(Base):
    """lr"""

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples).float()}


class TakesTheSamplesAsTheyAre(Base):
    """lr"""

    def local_update(self, task, client, down, data, round):
        every, w = data.whole(), down["w"].clone()
        for _ in range(4):
            w -= self.lr * task.gradient(w, every._replace(weight=None, sizes=None))[0]
        return {}, {"w": w}


@pytest.mark.parametrize(
    ("method", "row"),
    [
        (WeighsByPosition(), "relabelling the clients relabels the result"),
        (DrawsUnkeyed(), "same seed same bits"),
        (KeepsStateInItself(), "same seed same bits"),
        (SendsItsPrivateMemory(), "the downlink is a function of the server state alone"),
        (HidesItsAxes(), "the server state says its axes"),
        (GoesThroughFloat32(), "numbers stay in the precision of the run"),
        (TakesTheSamplesAsTheyAre(), "a sample of weight two counts twice"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_wrong_version_is_caught_by_a_named_row(method, row):
    with pytest.raises(NotConformant, match=f"{method.name}: {row}: ") as error:
        check_method(method, rows=row)
    assert "\n" not in str(error.value)
