"""Scafflix: Yi, Condat, Richtarik, TMLR 2025, Algorithm 1, with one step length for all."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed_exact.loop import ByClient, Random, checked_for, conditioning, of_clients


@dataclass(frozen=True)
class Scafflix(Random):
    """Scaffnew on FLIX's problem, whose models are mixed with the clients' own optima x_i*, found first.

        min_x mean_i f_i(y_i),   y_i = alpha x + (1 - alpha) x_i*,   which client i deploys
        xh_i <- x_i - (lr/alpha)(grad f_i(y_i) - h_i),  that is  y_i <- y_i - lr (grad f_i(y_i) - h_i)
        with probability p:  x_i <- z = sum_j alpha_j^2 xh_j / sum_j alpha_j^2,   h_i <- h_i + (p alpha/lr)(z - xh_i)

    A list has an alpha_i for each client. With alpha 1 it is Scaffnew, for alpha to 0 all models
    tend to the clients' own. sum_i alpha_i h_i = 0. For lr <= 1/L the factor per step is 1 - min(lr mu, p^2).
    """

    alpha: ByClient = setting(
        0.5, gt=0, le=1, source="paper", doc="Share of the common model in a client's: one for all, or a list."
    )
    own_steps: int = setting(
        100, ge=1, source="ours", doc="Local steps of length lr before the first round, towards a client's own optimum."
    )

    def __post_init__(self):
        super().__post_init__()
        self.require(np.min(self.alpha) > 0, "alpha", "numbers above 0")

    def init_server(self, task, w0, n):
        checked_for(self, "alpha", n)
        return super().init_server(task, w0, n)

    def init_client(self, task, w0):
        return {"x": w0, "h": zeros_like(w0), "own": w0, "alpha": w0.new_ones(1)}

    def local_update(self, task, client, down, data, round):
        x, h, own = client["x"], client["h"], client["own"]
        alpha = of_clients(self.alpha, round)[:, None]
        a = x.new_tensor(alpha)
        if round.phase:
            return {"x": down["z"], "h": h + self.chance(data) * a / self.lr * (down["z"] - x)}, {}
        if round.t == 0 and alpha.min() < 1:
            own = local_sgd(task, x, data.again("own", steps=self.own_steps), self.lr)
        start = x.lerp(own, 1 - a)
        x = x + (local_sgd(task, start, self.work(data, round), self.lr, minus=h) - start) / a
        share = alpha**2 / np.square(self.alpha).mean()  # of the mean over all clients
        return {"x": x, "own": own, "alpha": a}, {"x": x.new_tensor(share) * x}

    def personal(self, task, client, down):
        return down["w"].lerp(client["own"], 1 - client["alpha"])

    def conserved(self, server, clients):
        return {"sum alpha_i h_i = 0": (clients["alpha"] * clients["h"]).sum(0)}

    @classmethod
    def theory(cls, smoothness: float, convexity: float, alpha: ByClient = 0.5) -> "Scafflix":
        """The paper's, for one step length: lr = 1/L and p = 1/sqrt(kappa)."""
        kappa = conditioning(smoothness, convexity)
        return cls(1 / smoothness, 1 / sqrt(kappa), alpha)
