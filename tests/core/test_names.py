"""A method goes by its paper's name in lower case, hyphens where the paper has them."""

import pytest

import polyfed.algorithms
from polyfed.base.errors import ConfigError
from polyfed.core.algorithm import REGISTRY, make

METHODS = [cls for cls in REGISTRY.values() if cls.__module__.startswith(f"{polyfed.algorithms.__name__}.")]


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_a_hyphen_is_all_that_a_name_adds_to_the_class(cls):
    assert cls.name.replace("-", "") == cls.__name__.lower()


@pytest.mark.parametrize("name", ["per-fedavg", "fedavg-ft", "lg-fedavg"])
def test_a_name_without_its_hyphen_is_refused_and_told_the_right_one(name):
    with pytest.raises(ConfigError, match=rf"unknown '{name.replace('-', '')}' \(did you mean '{name}'"):
        make(name.replace("-", ""))
