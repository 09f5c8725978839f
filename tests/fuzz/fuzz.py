"""Shared by the fuzzers: hostile values, a tiny federation, and what counts as a pass.

`make fuzz` draws new inputs in every run, POLYFED_FUZZ times as many as the tests; one may take a minute then."""

import os
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.base.errors import PolyfedError

HOSTILE = st.one_of(
    st.sampled_from([0, -1, 1, 2, 10**9, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, True, False, None, "", "none"]),
    st.sampled_from(["a\0b", "\ud7ff", "9**9**9", "ceil(k/0)", "[[[[", "x" * 5000, "../..", "a,b=c:d", "=1", "\n"]),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e38, 1e308, np.inf, -np.inf, np.nan, 9**9 / 7]),
    st.sampled_from([[], [0], [1, "a"], [[]], {}, {"name": 3}, {"name": "x"}, {"": ""}, {"a": {"b": {"c": 1}}}]),
    st.sampled_from(["1" * 400, "κλειδί"]),
    st.text(max_size=12), st.integers(-(2**70), 2**70), st.floats(),
)  # fmt: skip
METHODS = [*shipped()]


MORE = int(os.environ.get("POLYFED_FUZZ", "0"))


def bounded(examples: int) -> Any:
    """The same examples in every run of the tests, however slow the machine."""
    often = {"max_examples": max(1, MORE) * examples, "derandomize": not MORE, "deadline": 60_000 if MORE else None}
    return settings(database=None, suppress_health_check=list(HealthCheck), **often)


def tiny() -> pf.Federation:
    """Three clients, 6 to 10 samples each."""
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(m, 3)).astype(np.float32), np.arange(m) % 2) for m in (6, 8, 10)]
    return pf.Federation.from_arrays(sites, test=sites)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def survives(given: Any, attempt: Any) -> str:
    """Run `attempt`: it "worked", or was "refused" in one line. Anything else fails, with the input printed."""
    try:
        attempt()
        return "worked"
    except PolyfedError as e:
        said = str(e)
    except Exception as e:
        raise AssertionError(f"{given!r} ended in {type(e).__name__}: {e}") from e
    assert len(said) < 2000, f"{given!r}: {len(said)} characters"
    return "refused"
