"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

from polyfed.base.settings import setting
from polyfed.compute.gradients import hvp, passed, statistics_
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Needs, Personal


@dataclass(frozen=True)
class PerFedAvg(Personal):
    """Meta-learning in a federation: min_w mean_i f_i( w - alpha grad f_i(w) ).

        u   = w_i - alpha grad f_i(w_i; D)
        w_i <- w_i - lr (I - alpha H_i(w_i; D'')) grad f_i(u; D'),  local steps from w        w <- mean_S w_i

    D, D' and D'' are independent batches. With v = grad f_i(u; D') the product with the Hessian H_i is left out
    ("first"), a difference of gradients [grad f_i(w_i + delta v; D'') - grad f_i(w_i - delta v; D'')] / (2 delta)
    ("hf"), or exact ("exact", by a second backward pass). Client i deploys w - alpha grad f_i(w), the gradient over all
    its training samples.

    Notes
    -----
    A local step takes two batches, with "hf" and "exact" three. A client with no more samples than a batch uses all of
    them in each, which makes its meta-gradient exact. The personal step is made from the common model that a client
    receives when it takes part, one round before the server's latest at best.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of the local steps (beta in the paper).")
    alpha: float = setting(
        0.01, ge=0, source="FedSLR's comparison", doc="Step size of the personal step; 0 is FedAvg with equal weights."
    )
    order: Literal["first", "hf", "exact"] = setting("first", source="paper", doc='"first", "hf" or "exact".')
    delta: float = setting(1e-3, gt=0, source="ours", doc='Length of the difference of "hf", relative to v.')
    start: Literal["common", "personal"] = setting(
        "common",
        source="paper",
        doc='"common": meta-gradient steps from the common model; "personal": plain SGD from w - alpha grad f_i(w), in '
        "the first round from w, as in FPFC's released code, where the personal model is what the next round trains.",
    )
    weighted: bool = setting(False, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")

    name = "per-fedavg"
    needs = Needs(plain_sgd="its meta-gradient steps are its own")

    def init_server(self, task, w0, n):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        own = down["w"].clone()
        task.descend_(own, data.whole(), self.alpha)
        if self.start == "personal":
            return {"w": own}, {"w": local_sgd(task, own if round.t else down["w"], data, self.lr)}
        w = down["w"].clone()
        for inner, outer, curve in zip(data, data.again("outer"), data.again("curvature"), strict=True):
            m = inner.rows
            step = self.meta_gradient(task, w[:m], inner, outer, curve)
            before, moves = w[:m].clone(), None if task.net.statistics is None else passed(task.net, w[:m], inner)[2]
            w[:m].sub_(step if inner.live is None else step * inner.live, alpha=self.lr)
            statistics_(task.net, w[:m], before, moves, inner.live)
        return {"w": own}, {"w": w}

    def meta_gradient(self, task, w, inner, outer, curve):
        """[s, p]: the gradient of f_i(w - alpha grad f_i(w)), from three batches."""
        u = w.clone()
        task.descend_(u, inner, self.alpha)
        v = task.gradient(u, outer, need_loss=False)[0]
        if self.order == "first":
            return v
        if self.order == "exact":
            return v - self.alpha * hvp(task.net, w, v, curve)
        ahead, behind = (task.gradient(w + d * v, curve, need_loss=False)[0] for d in (self.delta, -self.delta))
        return v - self.alpha * (ahead - behind) / (2 * self.delta)

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples if self.weighted else None)}
