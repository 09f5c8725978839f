"""APFL: Deng et al., "Adaptive Personalized Federated Learning" (arXiv 2003.13461), Algorithm 1, equation (10)."""

from dataclasses import dataclass

import torch

from polyfed.base.settings import setting
from polyfed.compute.gradients import passed, statistics_
from polyfed.core.algorithm import Algorithm, Needs


@dataclass(frozen=True)
class APFL(Algorithm):
    """A personal model v_i, trained so that its mixture with the common model fits the client.

        w_i <- w_i - lr grad f_i(w_i),  from w                                      w <- mean_S w_i
        v_i <- v_i - lr alpha_i grad f_i(m_i),  m_i = alpha_i v_i + (1 - alpha_i) w_i       same batch, old w_i
        alpha_i <- clip( alpha_i - lr <v_i - w_i, grad f_i(m_i)>, 0, 1 )                    adaptive only      (10)

    Client i deploys alpha_i v_i + (1 - alpha_i) w; v_i and alpha_i never leave it.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of all three.")
    alpha: float = setting(
        0.5,
        ge=0,
        le=1,
        source="FedSLR's comparison",
        doc="Share of the personal model in the mixture: 0 is FedAvg, 1 is Local. The start value when adaptive.",
    )
    adaptive: bool = setting(
        False, source="FedSLR's comparison", doc="Learn every client's own share, at every local step."
    )

    needs = Needs(plain_sgd="it mixes the gradient steps of two models itself")

    def init_client(self, task, w0):
        return {"v": w0, "alpha": w0.new_full((1,), self.alpha)}

    def local_update(self, task, client, down, data, round):
        w, v, alpha = down["w"].clone(), client["v"].clone(), client["alpha"].clone()
        for batch in data:
            m, live = batch.rows, 1.0 if batch.live is None else batch.live
            wm, vm, a = w[:m], v[:m], alpha[:m]
            gm, _, moves = passed(task.net, torch.lerp(wm, vm, a), batch)
            slope = ((vm - wm) * gm).sum(1, keepdim=True) if self.adaptive else 0.0  # (10)
            task.descend_(wm, batch, self.lr)
            before = vm.clone()
            statistics_(task.net, vm.addcmul_(gm, live * a, value=-self.lr), before, moves, live)
            if self.adaptive:
                a.sub_(self.lr * slope * live).clamp_(0, 1)
        return {"v": v, "alpha": alpha}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}

    def personal(self, task, client, down):
        alpha = client["alpha"]
        return alpha * client["v"] + (1 - alpha) * down["w"]
