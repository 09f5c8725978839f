"""FedAsync: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization" (arXiv 1903.03934), Algorithm 1."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedAsync(Algorithm):
    """Asynchronous federated optimisation, for asynchronous schedules: stale replies move the common model less.

        w_i ~ argmin_w f_i(w) + mu/2 ||w - w_tau||^2, by local SGD from the w_tau it was sent
        w <- (1 - alpha_t) w + alpha_t w_i,   alpha_t = alpha (t - tau + 1)^-staleness

    The moves of replies that arrive together are averaged.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    alpha: float = setting(0.6, gt=0, le=1, source="paper", doc="Weight of a fresh reply, in (0, 1].")
    staleness: float = setting(0.5, ge=0, source="paper", doc="Exponent of the polynomial discount; 0: none.")
    mu: float = setting(0.005, ge=0, source="paper", doc="Strength of the proximal term.")

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        return {}, {"w": local_sgd(task, x, data, self.lr, pull=(self.mu, x))}

    def aggregate(self, server, up, round):
        w = server["w"]
        alpha = self.alpha * (round.t - round.sent + 1).to(w.dtype) ** -self.staleness
        return {"w": w + alpha.mean() * (up.mean("w", alpha) - w)}
