"""Discrete Gaussian noise: its distribution, and that no draw is used twice."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from polyfed_privacy.noise import Gaussian, Stream, keyed, new_secret

N = 100_000


def test_low_bits_of_wide_noise_are_even():
    """A bucket's places are not seen in the result."""
    drawn = Gaussian(2.0**20 + 0.7).draw(keyed(b"\x03" * 32, ["bits"]), N)
    share = [((drawn >> k) & 1).mean() for k in range(11)]
    assert np.abs(np.array(share) - 0.5).max() < 4 * 0.5 / N**0.5


def test_a_draw_is_a_function_of_secret_context_and_digest_alone():
    secret, gaussian = new_secret(), Gaussian(100.0)
    parts = ["run 1", 3, 0, b"digest"]
    np.random.seed(0)
    first = gaussian.draw(keyed(secret, parts), 100)
    np.random.seed(1)
    assert (gaussian.draw(keyed(secret, parts), 100) == first).all()
    digests = (["run 1", 3, 0, b"Digest"], ["run 1", 3, 1, b"digest"], ["run 2", 3, 0, b"digest"])
    for other in (*digests, ["run 13", 0, b"digest"]):
        assert (gaussian.draw(keyed(secret, other), 100) != first).mean() > 0.9
    assert (gaussian.draw(keyed(new_secret(), parts), 100) != first).mean() > 0.9


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_no_noise_is_no_mechanism(sigma):
    with pytest.raises(ValueError, match="sigma"):
        Gaussian(sigma)


class Chosen:
    """A stream whose words are chosen: those of a bucket, then its place and the acceptance; low halves when asked."""

    def __init__(self, bucket: list[int], place: int = 0, accepted: int = 0):
        self.rest = [[b >> 64 for b in bucket], [place] * len(bucket), [accepted >> 64] * len(bucket)]
        self.low = bucket[0] & 2**64 - 1, accepted & 2**64 - 1

    def take(self, n: int) -> np.ndarray:
        if n == 1:  # a comparison that 64 bits do not decide
            return np.array([self.low[not self.rest]], dtype=np.uint64)
        return np.array(self.rest.pop(0), dtype=np.uint64)


def drawn(gaussian: Gaussian, u: int, place: int = 0, accepted: int = 0) -> int | None:
    """The proposal of a bucket's 128-bit word; None where it is not taken."""
    x, taken = gaussian._tried(Chosen([u, u], place, accepted), 2)
    return int(x[0]) if taken[0] else None


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.5, 40.0])
def test_every_magnitude_up_to_thirteen_deviations_has_its_probability_to_thirty_digits(sigma):
    """Words just below and just above what the definition says, summed with 60 digits far beyond the table's end."""
    with localcontext() as context:
        context.prec = 60
        weights = [(-(Decimal(k) ** 2) / (2 * Decimal(sigma) ** 2)).exp() for k in range(int(40 * sigma) + 40)]
        total, below = sum(weights), Decimal(0)
        edges = []
        for w in weights[: int(13 * sigma) + 1]:
            below += w
            edges.append(int(below / total * 2**128))
    gaussian, near = Gaussian(sigma), 2**128 // 10**30
    for k, edge in enumerate(edges):
        if 2**128 - edge > 2 * near:  # what lies beyond weighs less than 1e-30
            assert drawn(gaussian, edge - near) <= k, k
            assert drawn(gaussian, edge + near) > k, k
    assert drawn(gaussian, 2**128 - 1) >= 13 * sigma - 1


@pytest.mark.parametrize("sigma", [1500.0, 6000.25, 2.0**21 + 0.3])
def test_in_a_wide_bucket_a_place_is_kept_as_the_definition_says(sigma):
    gaussian = Gaussian(sigma)
    width = gaussian.width
    for u in (0, 2**127, 2**128 - 2**80, 2**128 - 1):
        start = drawn(gaussian, u)
        assert start % width == 0
        for place in {1, width // 2, width - 1}:
            with localcontext() as context:
                context.prec = 60
                loss = Decimal(place) * (2 * start + place) / (2 * Decimal(sigma) ** 2)
                limit = int((-loss).exp() * 2**128)
            assert drawn(gaussian, u, place, limit - 2**40) == start + place
            for more in (2**40, 2**90, 2**128 - 1 - limit):
                assert more > 2**128 - 1 - limit or drawn(gaussian, u, place, limit + more) is None
    assert drawn(gaussian, 2**128 - 1) >= 12.9 * sigma


def test_both_signs_are_drawn_and_a_negative_zero_is_none():
    gaussian, minus = Gaussian(2.0), 1 << 63
    assert drawn(gaussian, 0) == 0
    assert drawn(gaussian, 0, minus) is None
    assert drawn(gaussian, 2**127) == -drawn(gaussian, 2**127, minus)


def test_the_parts_of_a_key_do_not_run_into_each_other_and_each_of_them_counts():
    secret = new_secret()
    given = [["a", "bc"], ["ab", "c"], ["abc"], ["a", "b", "c"], ["", "abc"], ["a", "bc", ""], [b"a", 1], [b"a", 11]]
    keys = [keyed(secret, parts) for parts in given]
    assert len(set(keys)) == len(given)
    assert {len(key) for key in keys} == {32}
    assert keyed(secret, ["x"]) != keyed(secret[:-1] + bytes([secret[-1] ^ 1]), ["x"])


def test_two_keys_have_unrelated_streams_that_do_not_repeat_and_a_secret_is_32_bytes_that_are_never_the_same():
    stream = Stream(bytes(32))
    drawn = np.concatenate([stream.take(1000), stream.take(1000), Stream(bytes(31) + b"\x01").take(1000)])
    assert len(np.unique(drawn)) == 3000
    made = {new_secret() for _ in range(20)}
    assert len(made) == 20
    assert {len(s) for s in made} == {32}
    assert all(len({s[k] for s in made}) > 2 for k in range(32))
