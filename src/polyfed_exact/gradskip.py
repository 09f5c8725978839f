"""GradSkip: Maranjyan, Safaryan, Richtarik (arXiv 2210.16402), Algorithm 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from polyfed.base.randomness import uniform
from polyfed.base.settings import setting
from polyfed.compute.batches import Each
from polyfed_exact.loop import ByClient, Random, checked_for, conditioning, geometric, of_clients


@dataclass(frozen=True, eq=False)
class Until(Each):
    """Local steps that differ between the clients of one call."""

    steps: np.ndarray
    equal = False

    def __call__(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        return self.steps


@dataclass(frozen=True)
class GradSkip(Random):
    """Scaffnew in which a client of good conditioning ends its local work early.

        eta_i = 1 with probability q_i:   xh_i <- x_i - lr (grad f_i(x_i) - h_i),   hh_i <- h_i
        else                              xh_i <- x_i,                              hh_i <- grad f_i(x_i)
        with probability p:  x_i <- z = mean_j (xh_j - (lr/p) hh_j),   h_i <- hh_i + (p/lr)(z - xh_i)
        else                 x_i <- xh_i,   h_i <- hh_i

    After its first eta_i = 0 a client stands still until the exchange and needs no gradient. sum_i h_i = 0 after an
    exchange. q_i = 1 is Scaffnew. For lr <= min_i p^2 / (L_i (1 - q_i (1 - p^2))) the factor per step is
    1 - min{lr mu, 1 - max_i q_i (1 - p^2)}.
    """

    q: ByClient = setting(
        1.0, ge=0, le=1, source="ours", doc="Probability that a client goes on: one for all, or a list of one for each."
    )

    def init_server(self, task, w0, n):
        checked_for(self, "q", n)
        return super().init_server(task, w0, n)

    def local_update(self, task, client, down, data, round):
        if round.phase:
            return super().local_update(task, client, down, data, round)
        x, h, p = client["x"], client["h"].clone(), self.chance(data)
        q, u = of_clients(self.q, round), uniform(*data.again("own steps").order_keys().T)
        with np.errstate(divide="ignore"):
            own = np.where(q < 1, 1 + np.floor(np.log1p(-u) / np.log(q)), np.inf)
        tau = geometric(p, round.seed, round.t)
        goes = torch.as_tensor(own, device=x.device)[:, None]
        for k, batch in enumerate(data.again("batches", steps=Until(np.minimum(tau, own).astype(int))), 1):
            m, live = batch.rows, torch.ones_like(goes[:1]) if batch.live is None else batch.live
            g = task.gradient(x[:m], batch, need_loss=False)[0]
            on = (k < goes[:m]) & (live > 0)
            x = torch.cat([torch.where(on, x[:m] - self.lr * (g - h[:m]), x[:m]), x[m:]])
            h[:m] = torch.where((k == goes[:m]) & (live > 0), g, h[:m])
        return {"x": x, "h": h}, {"v": x - self.lr / p * h}

    def aggregate(self, server, up, round):
        return server if round.phase else {"w": up.mean("v")}

    @classmethod
    def theory(cls, smoothness: float, convexity: float, each: Sequence[float] = ()) -> "GradSkip":
        """The paper's: lr = 1/L, p = 1/sqrt(kappa), q_i = (1 - 1/kappa_i)/(1 - 1/kappa). each: L_i, by default all L"""
        kappa = conditioning(smoothness, convexity)
        q = tuple((1 - 1 / conditioning(own, convexity)) / (1 - 1 / kappa) for own in each) if kappa > 1 else 1.0
        return cls(1 / smoothness, 1 / sqrt(kappa), q or 1.0)
