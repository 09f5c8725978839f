"""The settings under which FPFC is proven to converge."""

from math import ceil, inf, log
from typing import Any

from polyfed.algorithms.fpfc.method import FPFC
from polyfed.base.errors import ConfigError


def proven(smoothness: float, lam: float, shrink: float = 0.1, **settings: Any) -> tuple[FPFC, int]:
    """FPFC's rho and step, and a number of local steps, for which Lemma 2 and Theorem 2 hold (Remark 4).

    rho is just above max(3 L_f, 2 lam/xi, 2/(a-1)), (13) by Remark 4's example; lr = 1/(L_f + rho). The local problem
    f_i + rho/2 ||w - zeta_i||^2 is then (rho - L_f)-strongly convex and (rho + L_f)-smooth: every gradient step
    multiplies the distance to its solution by at most 2 L_f / (rho + L_f) <= 1/2, which gives Theorem 1's count of
    steps.

    Parameters
    ----------
    smoothness, lam : float
        L_f, a Lipschitz constant of every client's gradient; and lam as in `FPFC`, where it is above xi.
    shrink : float
        Share of the distance to the local solution that T steps may leave, between 0 and 1.
    **settings
        Others of `FPFC`, such as xi: with a small one rho is large, and convergence slow.

    Returns
    -------
    FPFC, int
        The method, and T, for `fit(..., local_steps=T, batch_size=None)`.
    """
    if not 0 < smoothness < inf:
        raise ConfigError(f"smoothness: found {smoothness:g}, expected a finite number above 0")
    if not 0 < shrink < 1:
        raise ConfigError(f"shrink: found {shrink:g}, expected a number between 0 and 1")
    if own := sorted({"rho", "lr"} & set(settings)):
        raise ConfigError(f"{', '.join(own)}: found among the settings, but it is chosen here")
    any_rho = FPFC(lam=lam, rho=1e9, **settings)
    if any_rho.least_rho == inf:
        raise ConfigError(f"penalty: {any_rho.theory()}")
    rho = 1.001 * max(3 * smoothness, any_rho.least_rho)
    steps = ceil(log(shrink) / log(2 * smoothness / (smoothness + rho)))
    return FPFC(lam=lam, rho=rho, lr=1 / (smoothness + rho), **settings), steps
