"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1."""

from dataclasses import dataclass

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Needs


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Federated dynamic regularisation: exact under drift, with one vector each way.

        w_i = argmin_w f_i(w) - <g_i, w> + alpha/2 ||w - x||^2, by local SGD from x         (1)
        g_i <- g_i - alpha (w_i - x)                                                       (2)
        h   <- h - (alpha/n) sum_S (w_i - x),     x <- mean_S w_i - h / alpha              (3)

    All duals start at zero, and g_i -> grad f_i(x*). The clients count equally, whatever their number of samples.
    """

    linear_claims = "its exact optimum"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    alpha: float = setting(
        0.1,
        gt=0,
        source="FedSLR's comparison",
        doc="Strength of the regulariser. The smaller, the longer the server's steps; it adds to the local curvature.",
    )

    needs = Needs(synchronous=True)

    def init_server(self, task, w0, n):
        return {"w": w0, "h": zeros_like(w0)}

    def init_client(self, task, w0):
        return {"g": zeros_like(w0)}

    def local_update(self, task, client, down, data, round):
        x, gi = down["w"], client["g"]
        w = local_sgd(task, x, data, self.lr, pull=(self.alpha, x), minus=gi)  # (1)
        return {"g": gi.sub(w - x, alpha=self.alpha)}, {"w": w}  # (2)

    def conserved(self, server, clients):
        return {"h = mean g_i": server["h"] - clients["g"].mean(0)}

    def aggregate(self, server, up, round):  # (3)
        w = up.mean("w")
        h = server["h"] - self.alpha * len(round.ids) / round.n * (w - server["w"])
        return {"w": w - h / self.alpha, "h": h}
