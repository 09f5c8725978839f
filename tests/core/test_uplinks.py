"""Means over clients are what numpy's average is, in every form in which a method may ask for one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.messages import Round, mean
from polyfed.core.uplinks import Tally, Uplinks

GROUPS = 3


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.integers(-9, 9), min_size=1, max_size=6),
    weights=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    groups=st.lists(st.integers(0, GROUPS - 1), min_size=6, max_size=6),
    power=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_weights_times_a_constant_give_the_same_mean(values, weights, groups, power, dtype):
    m = len(values)
    rows = torch.tensor(values, dtype=dtype)[:, None] * torch.tensor([1.0, -2.0], dtype=dtype)
    w, group = torch.tensor(weights[:m], dtype=dtype), torch.tensor(groups[:m])
    scaled = w * 10.0**power
    round = Round(0, m, 0, torch.arange(m), scaled, torch.zeros(m, dtype=torch.long))
    tally = Tally(round, {}, {"x": {"plain", "weighted"}})  # added up, as where no rows are kept
    tally.add(tally.reduce({"x": rows}, torch.arange(m)), torch.arange(m))
    kept = Uplinks({"x": rows}, round)
    for weighted in (False, True):
        expected = np.average(rows.double(), axis=0, weights=w if weighted else None)
        by = scaled if weighted else None
        for found in (mean(rows, by), kept.mean("x", by), tally.uplinks().mean("x", by)):
            assert found.dtype == dtype
            assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        out = torch.full((GROUPS, 2), 99.0, dtype=dtype)
        found = kept.mean("x", by, within=group, out=out.clone())
        for g in range(GROUPS):
            mine = group == g
            some = (
                np.average(rows[mine].double(), axis=0, weights=w[mine] if weighted else None) if mine.any() else out[g]
            )
            assert found[g].tolist() == pytest.approx(some, rel=1e-5, abs=1e-5)
