"""Discrete Gaussian noise: its distribution, and that no draw is used twice."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chi2

from polyfed.privacy.noise import Gaussian, Stream, keyed, new_secret

N = 100_000


def weights(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Integers and their probabilities, by the definition."""
    x = np.arange(-math.ceil(12 * sigma), math.ceil(12 * sigma) + 1)
    p = np.exp(-(x.astype(float) ** 2) / (2 * sigma**2))
    return x, p / p.sum()


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0, 50.0, 1024.0, 1500.0, 6000.0])
def test_counts_are_those_of_the_distribution(sigma):
    """A chi-square test at one in ten thousand, in cells that expect at least 50 draws."""
    drawn = Gaussian(sigma).draw(keyed(b"\x01" * 32, ["chi", sigma]), N)
    x, p = weights(sigma)
    edges = [0, *(np.flatnonzero(np.diff(np.floor(p.cumsum() * min(200, N / 50)))) + 1).tolist(), len(x)]
    expected = np.array([p[a:b].sum() for a, b in pairwise(edges)]) * N
    index = np.searchsorted(x[np.array(edges[1:-1], dtype=int)], drawn, side="right")
    observed = np.bincount(index, minlength=len(expected))
    keep = expected > 5
    statistic = ((observed - expected) ** 2 / expected)[keep].sum()
    assert statistic < chi2.isf(1e-4, keep.sum() - 1)


@pytest.mark.parametrize("sigma", [0.5, 3.0, 900.0, 5000.5, 2.0**30 + 0.25])
def test_moments(sigma):
    drawn = Gaussian(sigma).draw(keyed(b"\x02" * 32, ["moments", sigma]), N).astype(float)
    x, p = weights(sigma) if sigma < 1e4 else (sigma * np.linspace(-12, 12, 100_001), None)
    p = np.exp(-(x**2) / (2 * sigma**2)) if p is None else p
    second, fourth, eighth = (float((p * (x / sigma) ** k).sum() / p.sum()) for k in (2, 4, 8))
    assert abs(drawn.mean() / sigma) < 4 * (second / N) ** 0.5
    assert abs((drawn / sigma).var() - second) < 4 * ((fourth - second**2) / N) ** 0.5
    assert abs(((drawn / sigma) ** 4).mean() - fourth) < 4 * ((eighth - fourth**2) / N) ** 0.5


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
    others = [
        ["run 1", 3, 0, b"Digest"],
        ["run 1", 3, 1, b"digest"],
        ["run 2", 3, 0, b"digest"],
        ["run 13", 0, b"digest"],
    ]
    for other in others:
        assert (gaussian.draw(keyed(secret, other), 100) != first).mean() > 0.9
    assert (gaussian.draw(keyed(new_secret(), parts), 100) != first).mean() > 0.9


def test_a_stream_does_not_repeat():
    stream = Stream(bytes(32))
    assert not np.intersect1d(stream.take(1000), stream.take(1000)).size


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_no_noise_is_no_mechanism(sigma):
    with pytest.raises(ValueError, match="sigma"):
        Gaussian(sigma)
