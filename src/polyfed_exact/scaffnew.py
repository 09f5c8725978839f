"""Scaffnew, ProxSkip for federated learning: Mishchenko et al., ICML 2022, Algorithm 2."""

from dataclasses import dataclass
from math import sqrt

from polyfed_exact.loop import Random, conditioning


@dataclass(frozen=True)
class Scaffnew(Random):
    """Scaffnew: an exchange after each local step with probability p, and sqrt(kappa) log(1/eps) of them in all.

        xh_i <- x_i - lr (grad f_i(x_i) - h_i)
        with probability p:  x_i <- z = mean_j xh_j,   h_i <- h_i + (p/lr)(z - xh_i);   else x_i <- xh_i

    One coin is tossed for all clients, so a round has tau ~ Geo(p) local steps. For lr <= 1/L and all clients
    sum_i |x_i - x*|^2 + (lr/p)^2 sum_i |h_i - grad f_i(x*)|^2 falls by 1 - min(lr mu, p^2) per step, in expectation.
    """

    @classmethod
    def theory(cls, smoothness: float, convexity: float) -> "Scaffnew":
        """The paper's: lr = 1/L and p = 1/sqrt(kappa)."""
        kappa = conditioning(smoothness, convexity)
        return cls(1 / smoothness, 1 / sqrt(kappa))
