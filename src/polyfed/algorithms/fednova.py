"""FedNova: Wang et al., NeurIPS 2020."""

from dataclasses import dataclass
from typing import Literal

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Needs


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Normalised averaging: clients that take more steps do not count more.

        d_i = (x - w_i) / a_i,   w_i = local SGD from x on f_i + mu/2 ||w - x||^2, tau_i steps
        a_i = sum_k (1 - lr mu)^(tau_i - k) over k = 1, ..., tau_i, which is tau_i without mu
        x <- x - (sum_i p_i a_i) sum_i p_i d_i                p_i = n_i / sum_j n_j over the cohort

    Notes
    -----
    d_i is lr times the paper's, so that a decaying lr is each round's own. There is no momentum at clients or server.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    mu: float = setting(0.0, ge=0, source="paper", doc="Strength of a proximal term, as in FedProx.")

    effective: Literal["norm", "steps"] = setting(
        "norm",
        source="paper",
        doc='What multiplies the mean move: "norm", sum_i p_i a_i; "steps", sum_i p_i tau_i, as in the released code. '
        "They differ only with mu.",
    )

    needs = Needs(plain_sgd="it knows how far the steps of plain SGD add up")

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        steps = data.steps[:, None].to(x.dtype)
        w = local_sgd(task, x, data, self.lr, pull=(self.mu, x) if self.mu else None)
        kept = self.lr * self.mu
        a = (1 - (1 - kept) ** steps) / kept if kept else steps
        return {}, {"d": (x - w) / a, "steps": steps if self.effective == "steps" else a.expand_as(steps)}

    def aggregate(self, server, up, round):
        steps, d = (up.mean(name, round.samples) for name in ("steps", "d"))
        return {"w": server["w"] - steps * d}
