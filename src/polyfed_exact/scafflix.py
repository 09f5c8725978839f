"""Scafflix: Yi, Condat, Richtarik, TMLR 2025, Algorithm 1, with one step length and one alpha for all."""

from dataclasses import dataclass
from math import sqrt

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed_exact.loop import Random, conditioning


@dataclass(frozen=True)
class Scafflix(Random):
    """Scaffnew on FLIX's problem, whose models are mixed with the clients' own optima x_i*, found first.

        min_x mean_i f_i(y_i),   y_i = alpha x + (1 - alpha) x_i*,   which client i deploys
        xh_i <- x_i - (lr/alpha)(grad f_i(y_i) - h_i),  that is  y_i <- y_i - lr (grad f_i(y_i) - h_i)
        with probability p:  x_i <- z = mean_j xh_j,   h_i <- h_i + (p alpha/lr)(z - xh_i)

    alpha 1 is Scaffnew, and for alpha to 0 all models tend to the clients' own. sum_i h_i = 0. For lr <= 1/L the factor
    per step is 1 - min(lr mu, p^2).
    """

    alpha: float = setting(0.5, gt=0, le=1, source="paper", doc="Share of the common model in a client's.")
    own_steps: int = setting(
        100, ge=1, source="ours", doc="Local steps of length lr before the first round, towards a client's own optimum."
    )

    def init_client(self, task, w0):
        return {"x": w0, "h": zeros_like(w0), "own": w0}

    def local_update(self, task, client, down, data, round):
        x, h, own, a = client["x"], client["h"], client["own"], self.alpha
        if round.phase:
            return {"x": down["z"], "h": h + self.chance(data) * a / self.lr * (down["z"] - x)}, {}
        if round.t == 0 and a < 1:
            own = local_sgd(task, x, data.again("own", steps=self.own_steps), self.lr)
        start = x.lerp(own, 1 - a)
        x = x + (local_sgd(task, start, self.work(data, round), self.lr, minus=h) - start) / a
        return {"x": x, "own": own}, {"x": x}

    def personal(self, task, client, down):
        return down["w"].lerp(client["own"], 1 - self.alpha)

    @classmethod
    def theory(cls, smoothness: float, convexity: float, alpha: float = 0.5) -> "Scafflix":
        """The paper's, for one step length: lr = 1/L and p = 1/sqrt(kappa)."""
        return cls(1 / smoothness, 1 / sqrt(conditioning(smoothness, convexity)), alpha)
