"""FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding up Federated Averaging via Extrapolation", ICLR 2023."""

from dataclasses import dataclass

import torch

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down


@dataclass(frozen=True)
class FedExP(Algorithm):
    """Extrapolation: the step along the mean move is as long as projections onto convex sets would have it.

        D_i = w_i - x,   w_i = local SGD from x on f_i,   D = mean_S D_i
        x <- x + max(1, sum_S ||D_i||^2 / (2 |S| (||D||^2 + eps))) D

    Notes
    -----
    The released code weighs both means by the numbers of samples, and has eps |S| in the place of eps.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    eps: float = setting(1e-3, ge=0, source="code", doc="Keeps the step bounded where the mean move vanishes.")
    weighted: bool = setting(False, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")
    averaged: bool = setting(
        True,
        source="paper",
        doc="Deploy the mean of the last two common models, which smooths their oscillation. False: the last one, as "
        "other methods do.",
    )

    def init_server(self, task, w0, n):
        return {"w": w0, "before": w0.clone()}

    def downlink(self, server, round):
        return Down({"w": server["w"]})

    def local_update(self, task, client, down, data, round):
        dw = local_sgd(task, down["w"], data, self.lr).sub_(down["w"])
        return {}, {"dw": dw, "square": dw.square().sum(1, keepdim=True)}

    def aggregate(self, server, up, round):
        weights = round.samples if self.weighted else None
        dw, square = up.mean("dw", weights), up.mean("square", weights)
        length = (dw.square().sum() + self.eps).clamp(min=torch.finfo(dw.dtype).tiny)  # eps may be 0
        step = (square / (2 * length)).clamp(min=1)
        return {"w": server["w"] + step * dw, "before": server["w"]}

    def deployment(self, server, round):
        return Down({"w": (server["w"] + server["before"]) / 2 if self.averaged else server["w"]})
