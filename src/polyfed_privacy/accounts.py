"""Accounts of differential privacy: what releases cost, and how much noise a budget asks for.

Everything is counted in zero-concentrated differential privacy (Bun, Steinke 2016), which discrete Gaussian noise
satisfies as it is (Canonne, Kamath, Steinke 2020): a release of sensitivity D under noise sigma costs rho = D^2 / (2
sigma^2), and costs add up. Epsilon is read off at the end, by the conversion of Canonne, Kamath, Steinke (Proposition
12), which is that of Renyi accounts. For continuous noise the exact epsilon is some 10 % smaller; of discrete noise in
many dimensions this is what is proven.
"""

import math
from importlib import import_module
from typing import Any

import numpy as np


def epsilon_of(rho: float, delta: float) -> float:
    """min over alpha > 1 of alpha rho + log(1 - 1/alpha) - log(alpha delta) / (alpha - 1), at least 0."""
    if rho <= 0:
        return 0.0

    def bound(t: float) -> float:  # t = log(alpha - 1)
        a = math.exp(t)
        return (1 + a) * rho - math.log1p(1 / a) - (math.log(delta) + math.log1p(a)) / a

    minimize_scalar: Any = import_module("scipy.optimize").minimize_scalar  # slow to import
    near = math.log(max(1e-6, math.sqrt(math.log(1 / delta) / rho)))  # 0 at delta = 1
    least = minimize_scalar(bound, bounds=(near - 6, near + 6), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(least.fun))


def rho_of(epsilon: float, delta: float) -> float:
    """The largest rho with at most this epsilon: the inverse of `epsilon_of`."""
    low, high = 0.0, 1.0
    while epsilon_of(high, delta) < epsilon:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if epsilon_of(middle, delta) <= epsilon:
            low = middle
        else:
            high = middle
    return low * (1 - 1e-9)  # what sums of costs may round to


def cost(sensitivity: float, sigma: float) -> float:
    """rho of one release of integers that one unit moves by `sensitivity` at most, under noise sigma on each."""
    return sensitivity**2 / (2 * sigma**2)


def shared_cost(sensitivity: float, sigma: float, sites: int, d: int) -> float:
    """rho of one release of d numbers whose noise is the sum of several sites' discrete Gaussians, which is nearly one.

    Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation"
    (ICML 2021), Theorem 1. sites: those whose noise is unknown to whoever reads the sum
    """
    tau = 10 * sum(math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, sites))
    gaussian = sensitivity / (math.sqrt(sites) * sigma)
    root = min(math.sqrt(gaussian**2 + tau * d / 2), gaussian + tau * math.sqrt(d))
    return root**2 / 2


def multiplier(epsilon: float, delta: float, releases: float) -> float:
    """sigma / sensitivity with which so many releases cost epsilon at delta in all."""
    rho = rho_of(epsilon, delta)
    return math.sqrt(releases / (2 * rho)) if rho else math.inf


def lower_bound(right: int, guesses: int, canaries: int, delta: float, level: float = 0.05) -> float:
    """The largest epsilon that is ruled out by `right` of `guesses` at `canaries` coins; 0 where none is.

    level: probability with which a right claim is found wrong, at most
    """
    if _chance(right, guesses, canaries, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if _chance(right, guesses, canaries, middle, delta) <= level:
            low = middle
        else:
            high = middle
    return low


def _chance(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Most probable that so many guesses are right under (epsilon, delta): Steinke et al., Theorem 5.2."""
    p = 1 / (1 + np.exp(-epsilon))
    binom: Any = import_module("scipy.stats").binom  # slow to import
    beyond = binom.sf(np.arange(-1, right), guesses, p)  # P(at least 0, 1, ..., right)
    i = np.arange(1, right + 1)
    more = float(((beyond[right - i] - beyond[right]) / i).max(initial=0.0))
    return float(beyond[right]) + 2 * canaries * delta * more
