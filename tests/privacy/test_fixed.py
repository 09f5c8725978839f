"""Fixed point: exact sums in any order; what does not fit is refused."""

import re

import pytest
import torch

from polyfed.privacy.fixed import PLACES, OutOfRange, decode, encode, largest


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


def test_masks_modulo_2_to_the_64_change_no_bit():
    words, mask = encode(torch.randn(2, 100), 24, 2), torch.randint(-(2**63), 2**63 - 1, (100,))
    assert torch.equal((words[0] + mask) + (words[1] - mask), words.sum(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e9])
def test_what_does_not_fit_is_refused_with_the_number(value):
    x = torch.zeros(3, 5)
    x[1, 2] = value
    with pytest.raises(OutOfRange, match=re.escape(f"found {value:.6g}, expected numbers between")) as e:
        encode(x, 32, 3)
    assert e.value.row == 1


def test_the_largest_numbers_of_all_clients_fit_in_the_sum():
    most = largest(24, 488.0)
    assert int(encode(torch.full((1, 1), most, dtype=torch.float64), 24, 488).item()) * 488 < 2**63
