"""core/settings: what a declared setting takes, what its error says, and whose name is whose."""

from __future__ import annotations  # so that every type here is text until it is looked up

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, setting, settings_of
from polyfed.base.text import parse, split, value_of
from polyfed.base.values import Limits, Words, words
from polyfed.core.algorithm import Algorithm
from polyfed.core.schedule import SCHEDULES


@dataclass(frozen=True)
class Recipe(Configured):
    table: ClassVar[str] = "recipe"
    lam: float = setting(0.1, ge=0, source="paper", doc="How strong.")
    share: float = setting(0.2, ge=0, lt=0.5)
    steps: int = setting(1, ge=1, decides=False)
    order: Literal["first", "hf"] = "first"
    option: Literal[1, 2] = 2
    warm: bool = False
    rate: float | Literal["auto"] = setting("auto", gt=0)
    layers: tuple[str, ...] = ()
    widths: tuple[int, ...] | None = None
    note: str = ""


WRONG = [
    ("lam", -1, "recipe.lam of Recipe: found -1, expected a number of at least 0"),
    ("lam", "big", "found 'big', expected a number of at least 0"),
    ("lam", True, "found True, expected a number of at least 0"),
    ("lam", None, "found None, expected a number"),
    ("lam", float("nan"), "found nan, expected a finite number of at least 0"),
    ("lam", float("inf"), "found inf, expected a finite number of at least 0"),
    ("lam", 10**400, "found 1000"),
    ("lam", 10**5000, "found an int too long to print, expected a number"),
    ("share", 0.5, "found 0.5, expected a number from 0 to below 0.5"),
    ("steps", 0, "found 0, expected an integer of at least 1"),
    ("steps", 1.0, "found 1.0, expected an integer of at least 1"),
    ("steps", 2**63, "found 9223372036854775808, expected an integer of at least 1, below 2^63"),
    ("order", "frist", "found 'frist' (did you mean 'first'?), expected first or hf"),
    ("option", True, "found True, expected 1 or 2"),
    ("option", 3, "found 3, expected 1 or 2"),
    ("warm", 1, "found 1, expected true or false"),
    ("rate", "atuo", "found 'atuo' (did you mean 'auto'?), expected a number above 0 or auto"),
    ("rate", 0.0, "found 0.0, expected a number above 0 or auto"),
    ("layers", "head", "found 'head', expected a list of texts"),
    ("layers", ["head", 1], "found ['head', 1], expected a list of texts"),
    ("widths", [1, 2.5], "found [1, 2.5], expected a list of integers or none"),
    ("note", "a\0b", "none of them NUL"),
    ("note", "x" * 5000, "at most 4000 characters"),
]


@pytest.mark.parametrize(("key", "value", "line"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_what_is_wrong_is_said_in_one_line(key, value, line):
    with pytest.raises(ConfigError) as caught:
        Recipe(**{key: value})
    assert line in str(caught.value)
    assert caught.value.key == key


def test_values_become_what_their_type_says():
    given = {"lam": np.int64(1), "share": np.float32(0.25), "steps": np.int64(3), "rate": 2, "warm": np.bool_(True)}
    r = Recipe(**given, layers=["a"], widths=[np.int64(4)])
    assert dataclasses.asdict(r) | {"rate": 2.0} == dataclasses.asdict(
        Recipe(1.0, 0.25, 3, warm=True, rate=2.0, layers=("a",), widths=(4,))
    )
    assert [type(v) for v in (r.lam, r.share, r.steps, r.rate, r.warm)] == [float, float, int, float, bool]
    assert type(r.layers) is tuple


def test_settings_are_listed_with_all_that_is_known_of_them():
    found = settings_of(Recipe)
    assert [s.name for s in found] == [f.name for f in dataclasses.fields(Recipe)]
    assert found[0][1:] == ("a number of at least 0", 0.1, "How strong.", "paper", True)
    assert [s.name for s in found if not s.decides] == ["steps"]
    assert words(Annotated[int, Limits(ge=1, le=5)] | Literal["full"] | None) == "an integer from 1 to 5, full or none"
    assert words(Annotated[str, Words("an expression in k")]) == "an expression in k"


@dataclass(frozen=True)
class Written(Configured):
    """Says what it is.

        x <- x - lr g

    And why.

    Notes
    -----
    It has notes.
    """

    lr: Annotated[float, Limits(ge=0)] = setting(0.1, doc="Step size.")
    order: Literal["first", 2] | None = setting(None, doc="How exact it is. " * 10)
    names: tuple[str, ...] = ()


def test_help_says_what_the_fields_say():
    """As a section of numpydoc in its place, each meaning once, in the words of the field; one by hand stays."""
    doc = inspect.getdoc(Written)
    assert doc == inspect.getdoc(Written()) == Written.__doc__
    assert doc.startswith(
        "Says what it is.\n\n    x <- x - lr g\n\nAnd why.\n\nParameters\n----------\nlr : float\n    Step size."
    )
    assert '\norder : "first" or 2 or None\n    How exact' in doc
    assert doc.endswith("\nnames : tuple[str, ...]\n\nNotes\n-----\nIt has notes.")
    assert max(map(len, doc.splitlines())) <= 120

    @dataclass(frozen=True)
    class ByHand(Configured):
        """Says what it is.

        Parameters
        ----------
        lr : float
            As its author has it.
        """

        lr: float = setting(0.1, doc="Step size.")

    assert str(ByHand.__doc__).endswith("\n    As its author has it.")


def test_types_given_as_text_are_checked_in_a_method_too():
    """`from __future__ import annotations` in the author's file does not switch the check off."""

    @dataclass(frozen=True)
    class Textual(Algorithm, abstract=True):
        lr: float = 0.1
        k: int = 2

    for wrong in ({"lr": "abc"}, {"k": 2.5}, {"lr": -1}):
        with pytest.raises(ConfigError, match=r"algorithm\.(lr|k) of Textual: found"):
            Textual(**wrong)


def test_a_bound_of_its_own_and_one_of_its_name_both_hold():
    """A name's bound is not in the place of the field's, nor the other way round, also where an integer's is a half."""

    @dataclass(frozen=True)
    class Bounded(Algorithm, abstract=True):
        local_epochs: int = setting(3, ge=1.5)
        lr: float = setting(0.1, lt=1)

    assert Bounded(2) == Bounded(np.int64(2), 0.1)
    for wrong, expected in (((1,), "an integer of at least 1.5"), ((2, -1), "a number from 0 to below 1")):
        with pytest.raises(ConfigError, match=f"expected {expected}$"):
            Bounded(*wrong)


def test_a_post_init_without_super_is_checked_before_training():
    @dataclass(frozen=True)
    class Careless(pf.FedAvg, abstract=True):
        def __post_init__(self):
            pass

    x, y = torch.randn(8, 3), torch.arange(8) % 2
    fed = pf.Federation.from_arrays([(x.numpy(), y.numpy())])
    with pytest.raises(ConfigError, match=r"algorithm\.lr of Careless: found 'a'"):
        pf.fit(torch.nn.Linear(3, 2), fed, Careless("a"), rounds=1)


def test_a_file_executed_anew_replaces_its_own():
    registry: Registry = Registry("thing.name")
    first, second = (type("Mine", (), {"__module__": __name__}) for _ in range(2))
    registry.add("mine", first)
    assert registry.add("mine", second) is registry["mine"] is second
    with pytest.raises(ConfigError, match="expected one name for each"):
        registry.add("mine", Algorithm)
    with pytest.raises(ConfigError, match=r"thing.name: unknown 'mien' \(did you mean 'mine'\?\); known: mine"):
        registry.find("mien")


def test_a_missing_setting_is_named():
    with pytest.raises(ConfigError, match=r"schedule\.probability: is missing; bernoulli needs a number above 0"):
        SCHEDULES.make("bernoulli", {})


def test_the_one_grammar():
    assert parse("ditto:lam=0.1,personal-epochs=2", "m") == ("ditto", [], {"lam": "0.1", "personal_epochs": "2"})
    assert parse("uniform:0,20", "m") == ("uniform", ["0", "20"], {})
    assert parse('x:a=[1, 2],b="p,q"', "m") == ("x", [], {"a": "[1, 2]", "b": '"p,q"'})
    assert split("0, 0.5,1") == ["0", "0.5", "1"]
    for wrong in ("ditto:lam=1,lam=2", "ditto:lam=1,2", "ditto:=1"):
        with pytest.raises(ConfigError, match="expected name:key=value"):
            parse(wrong, "m")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".25", 0.25), ("-.5e-3", -0.0005), ("5.", 5.0), ("1.e3", 1000.0), ("[.1, 2.,3]", [0.1, 2.0, 3]),
        ("127.0.0.1", "127.0.0.1"), ("./x.5", "./x.5"), ("v.5", "v.5"), (".5.6", ".5.6"), ("'.5'", ".5"),
        ("..5", "..5"),
    ],
)  # fmt: skip
def test_a_number_may_begin_or_end_with_its_point(text, value):
    """As people type them; what is no number stays text."""
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)
