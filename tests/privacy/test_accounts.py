"""Accounts of privacy, against the textbook and against dp-accounting."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from polyfed_privacy.accounts import cost, epsilon_of, multiplier, rho_of, shared_cost


def exact(eps: float, s: float) -> float:
    """delta of the Gaussian mechanism with noise s times the sensitivity (Balle, Wang 2018, Theorem 8)."""
    return norm.cdf(1 / (2 * s) - eps * s) - math.exp(eps) * norm.cdf(-1 / (2 * s) - eps * s)


def test_two_hundred_budgets_equal_dp_accounting():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    orders = [1 + math.exp(t) for t in np.linspace(-3, 9, 400)]
    grid = [(s, delta) for s in np.geomspace(0.4, 60, 50) for delta in (1e-4, 1e-5, 1e-6, 1e-9)]
    for s, delta in grid:
        accountant = RdpAccountant(orders)
        accountant.compose(accounting.GaussianDpEvent(s))
        theirs = accountant.get_epsilon(delta)
        assert epsilon_of(cost(1, s), delta) == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("sigma", "exactly"), [(14.0984, 2.0), (26.3795, 1.0), (4.2443, 8.0), (7.6450, 4.0)])
def test_fifty_releases_cost_a_little_more_than_continuous_noise_would(sigma, exactly):
    """What is proven for discrete noise is above the exact epsilon of continuous noise, by 12 % at most."""
    assert exact(exactly, sigma / 50**0.5) == pytest.approx(1e-5, rel=1e-3)
    rho = 50 * cost(1, sigma)
    assert exactly < epsilon_of(rho, 1e-5) < 1.12 * exactly
    if exactly == 2.0:  # Renyi accounts print 2.173 and zCDP's simple formula 2.53
        assert epsilon_of(rho, 1e-5) == pytest.approx(2.173, abs=1e-3)
        assert rho + 2 * math.sqrt(rho * math.log(1e5)) == pytest.approx(2.53, abs=0.01)


@pytest.mark.parametrize("eps", [0.01, 0.5, 1, 2, 8, 50])
@pytest.mark.parametrize("releases", [1, 50, 5000])
def test_the_noise_for_a_budget_spends_it(eps, releases):
    z = multiplier(eps, 1e-5, releases)
    assert eps * (1 - 1e-6) <= epsilon_of(releases * cost(1, z), 1e-5) <= eps


def test_accounts_add_up_and_halved_noise_costs_four_times():
    assert cost(1, 5) + cost(1, 12) == pytest.approx(cost(1, 1 / math.hypot(1 / 5, 1 / 12)))
    assert cost(3, 2) == 4 * cost(3, 4)
    assert epsilon_of(0, 1e-5) == 0
    assert rho_of(epsilon_of(0.3, 1e-6), 1e-6) == pytest.approx(0.3)


def convolved(sigma: float, sites: int) -> tuple[np.ndarray, int]:
    x = np.arange(-math.ceil(14 * sigma), math.ceil(14 * sigma) + 1)
    p = np.exp(-(x.astype(float) ** 2) / (2 * sigma**2))
    p, total = p / p.sum(), np.ones(1)
    for _ in range(sites):
        total = np.convolve(total, p)
    return total, len(x) // 2 * sites


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("sites", [2, 4])
def test_the_sum_of_the_sites_noise_costs_no_more_than_is_booked(sigma, sites):
    """Renyi divergence of order alpha, exactly, in one dimension: at most alpha rho."""
    p, _ = convolved(sigma, sites)
    rho = shared_cost(1, sigma, sites, 1)
    for alpha in (1.5, 2, 4, 8):
        a, b = p[1:], p[:-1]
        seen = (a > 1e-250) & (b > 1e-250)
        renyi = math.log(float((b[seen] * (a[seen] / b[seen]) ** alpha).sum())) / (alpha - 1)
        assert renyi <= alpha * rho * (1 + 1e-6)


def test_wide_noise_of_several_sites_costs_what_one_gaussian_does():
    assert shared_cost(7, 16, 4, 10**6) == pytest.approx(cost(7, 32), rel=1e-12)
    assert shared_cost(7, 16, 3, 10) > shared_cost(7, 16, 4, 10)
