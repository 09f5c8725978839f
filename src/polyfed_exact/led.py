"""LED, Local Exact-Diffusion, on a star: Alghunaim (arXiv 2302.00620), Algorithm 1; of one step, Exact Diffusion."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed_exact.loop import OneVector, conditioning


@dataclass(frozen=True)
class LED(OneVector):
    """LED with the server's mean in the place of the neighbours': a fixed number tau of local steps.

        tau times from x_i   phi_i <- phi_i - lr grad f_i(phi_i) - (1/tau) y_i
        exchange             x_i <- sum_j W_ij phi_j,   y_i <- y_i + phi_i - x_i,   W = (1 - mixing) I + mixing J

    J has all entries 1/n, and y_i = -lr tau h_i. With all clients, mixing 1 is SCAFFOLD's option II in one vector each
    way; tau = 1 and mixing 1/2 is Exact Diffusion (Yuan et al., 2019), which is NIDS.
    """

    mixing: float = setting(1.0, gt=0, le=1, source="paper", doc="Share of the way to the mean that an exchange goes.")

    def weights(self, data):
        return self.mixing, self.mixing * self.chance(data)

    @classmethod
    def theory(cls, smoothness: float, convexity: float, tau: int = 1) -> "LED":
        """lr = 1/L of one step, as Exact Diffusion; else 1/(81 tau L), by SCAFFOLD's Theorem 3, as mu <= L."""
        conditioning(smoothness, convexity, tau=tau)
        return cls(1 / smoothness if tau == 1 else 1 / (81 * tau * smoothness))
