"""Arguments of public calls, and functions of the user's: what is wrong with them is said in one line."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.arguments import answer, checked
from polyfed.base.errors import ConfigError

X = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
FED = pf.Federation.from_arrays([(X, [0, 1] * 3), (X + 1, [1, 0] * 3)], test=[(X, [0, 1] * 3), (X, [1, 0] * 3)])


@checked
def call(a: int, b: float = 1.0, *rest: str, names: tuple[str, ...] = (), **more: bool):
    return a, b, rest, names, more


@checked
@dataclass
class Thing:
    a: int

    def times(self, b: int) -> int:
        return self.a * b

    @classmethod
    def of(cls, text: str) -> "Thing":
        return cls(len(text))


def test_an_argument_is_taken_as_a_setting_is():
    """An integer is a number, numpy's are Python's, a list is a tuple; by position and by name."""
    found = call(np.int64(2), 3, "x", names=["a"], d=True)
    assert found == (2, 3.0, ("x",), ("a",), {"d": True})
    assert [type(v) for v in found[:2]] == [int, float]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: call("x"), "a of call: found 'x', expected an integer"),
        (lambda: call(1, b=np.nan), "b of call: found nan, expected a finite number"),
        (lambda: call(1, 1.0, 3), "rest of call: found 3, expected text"),
        (lambda: call(1, names="ab"), "names of call: found 'ab', expected a list of texts"),
        (lambda: call(1, other=3), "more of call: found 3, expected true or false"),
        (lambda: Thing(None), "a of Thing: found None, expected an integer"),
        (lambda: Thing(1).times("x"), "b of Thing.times: found 'x', expected an integer"),
        (lambda: Thing.of(3), "text of Thing.of: found 3, expected text"),
        (lambda: pf.Run.open([1]), "folder of Run.open: found [1], expected a path"),
        (lambda: pf.Run.open("1" * 400), "expected a path whose names have at most 255 bytes"),
        (lambda: pf.compare(torch.nn.Linear(2, 2), FED, [3]), "algorithms of compare.*a method such as"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_found_and_expected(wrong, said):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        wrong()


def test_a_wrong_signature_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing 1 required"):
        call()


def test_lists_and_tables_stay_the_callers_own():
    """A run's records are a list that its session goes on to fill."""

    @checked
    def same(values: list[int], table: dict[str, int]):
        return values, table

    values, table = [1], {"a": 1}
    assert all(a is b for a, b in zip(same(values, table), (values, table), strict=True))


def test_what_is_like_a_list_is_one():
    assert FED.reorder(np.array([1, 0])).names == FED.reorder(torch.tensor([1, 0])).names == ("client-1", "client-0")


def broken(*_):
    return {}["k"]


@pytest.mark.parametrize(
    "settings",
    [
        {"augment": broken},
        {"local_steps": broken},
        {"metrics": broken},
        {"metrics": [pf.Metric("mine", compute=broken)]},
        {"metrics": [pf.Metric("mine", compute=broken, kind="two classes", per="sample")]},
    ],
)
def test_a_users_function_that_fails_is_named(settings):
    with pytest.raises(ConfigError, match=r"broken \(test_arguments.py, line \d+\) failed: KeyError: 'k'"):
        pf.fit(torch.nn.Linear(2, 2), FED, pf.FedAvg(0.1), rounds=1, **settings)


def test_a_users_function_that_gives_something_else_is_named():
    with pytest.raises(ConfigError, match=r"model: <lambda> .* gave something else: found 3, expected a torch"):
        pf.compare(lambda seed: 3, FED, [pf.FedAvg(0.1)], rounds=1)
    with pytest.raises(ConfigError, match="lr: it says so"):
        answer("f", lambda: (_ for _ in ()).throw(ConfigError("lr: it says so")))
