"""Fixed point: exact sums in any order; what does not fit is refused."""

import re

import pytest
import torch

from polyfed_privacy.fixed import PLACES, OutOfRange, decode, encode, largest, narrow, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_is_half_a_step_off_at_most(dtype):
    x = torch.randn(4, 1000, dtype=dtype)
    places = PLACES[dtype]
    back = decode(encode(x, places, 4), places, torch.float64)
    assert (back - x.double()).abs().max() <= 2.0 ** (-places - 1)


def test_sums_do_not_depend_on_their_order_and_wrap_nowhere():
    x = torch.randn(9, 500) * 1e3
    words = encode(x, 24, 9)
    exact = sum(words.tolist()[i][0] for i in range(9))
    assert torch.equal(words.sum(0), words[torch.randperm(9)].sum(0))
    assert int(words.sum(0)[0]) == exact


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e9])
def test_what_does_not_fit_is_refused_with_the_number(value):
    x = torch.zeros(3, 5)
    x[1, 2] = value
    with pytest.raises(OutOfRange, match=re.escape(f"found {value:.6g}, expected numbers between")) as e:
        encode(x, 32, 3)
    assert e.value.row == 1


@pytest.mark.parametrize("total", [1.0, 488.0, 1e6])
def test_a_number_is_taken_up_to_the_largest_and_not_beyond(total):
    most = largest(24, total)
    for share, fits in ((0.999, True), (1.0, True), (1.001, False), (3.0, False)):
        for sign in (1, -1):
            x = torch.tensor([[0.5, sign * share * most]], dtype=torch.float64)
            if fits:
                assert int(encode(x, 24, total)[0, 1].abs()) * total <= 2**62
            else:
                with pytest.raises(OutOfRange):
                    encode(x, 24, total)


def test_the_lattice_is_as_fine_as_the_floats_are_about_one():
    for dtype, step in ((torch.float32, 1.2e-7), (torch.float64, 1e-12)):
        assert 2.0 ** -PLACES[dtype] <= step
        assert largest(PLACES[dtype], 1000) > 1000


def test_numbers_of_two_words_are_rounded_to_the_nearest():
    steps = [0.25, 0.75, 1.0, -0.25, -0.75, 2.0**60 + 0.75, -(2.0**70)]
    assert narrow(wide([k * 2.0**-64 for k in steps])) == [float(round(k)) * 2.0**-64 for k in steps]
