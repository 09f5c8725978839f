"""FedAdagrad, FedAdam, FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2. The
defaults are Flower's, which refers to that paper; the paper's own values were not checked."""

from dataclasses import dataclass

from torch import Tensor, full_like, sign, zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class Adaptive(Algorithm, abstract=True):
    """Base: all of Algorithm 2 but the second moment v."""

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    server_lr: float = setting(0.1, ge=0, source="ours", doc="Step size of the server.")
    beta1: float = setting(0.9, ge=0, lt=1, source="ours", doc="Memory of the move.")
    tau: float = setting(
        1e-3, gt=0, source="ours", doc="Degree of adaptivity: the smaller, the more alike are the steps of all numbers."
    )
    v0: float | None = setting(None, ge=0, source="ours", doc="Start of v. None: tau^2.")
    weighted: bool = setting(False, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")

    def second_moment(self, v: Tensor, d2: Tensor) -> Tensor:
        """v_t from v_{t-1} and D^2."""
        raise NotImplementedError

    def init_server(self, task, w0, n):
        return {"w": w0, "m": zeros_like(w0), "v": full_like(w0, self.tau**2 if self.v0 is None else self.v0)}

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        d = up.mean("w", round.samples if self.weighted else None) - server["w"]
        m = self.beta1 * server["m"] + (1 - self.beta1) * d
        v = self.second_moment(server["v"], d.square())
        return {"w": server["w"] + self.server_lr * m / (v.sqrt() + self.tau), "m": m, "v": v}


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Adagrad at the server.

        D = mean_S w_i - w,   w_i = local SGD from w on f_i
        m <- beta1 m + (1 - beta1) D,   v <- v + D^2,   w <- w + server_lr m / (sqrt(v) + tau)

    Notes
    -----
    FLamby's version: tau 1e-8, v0 0, beta1 0.9, weighted.
    """

    beta1: float = setting(0.0, ge=0, lt=1, source="ours", doc="Momentum.")

    def second_moment(self, v, d2):
        return v + d2


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam at the server, without bias correction.

        D = mean_S w_i - w,   w_i = local SGD from w on f_i
        m <- beta1 m + (1 - beta1) D,   v <- beta2 v + (1 - beta2) D^2,   w <- w + server_lr m / (sqrt(v) + tau)

    Notes
    -----
    FLamby's version: tau 1e-8, v0 0, beta2 0.999, weighted.
    """

    beta2: float = setting(0.99, ge=0, lt=1, source="ours", doc="Memory of D^2.")

    def second_moment(self, v, d2):
        return self.beta2 * v + (1 - self.beta2) * d2


@dataclass(frozen=True)
class FedYogi(Adaptive):
    """Yogi at the server: v moves towards D^2 by a step that does not grow with v.

        D = mean_S w_i - w,   w_i = local SGD from w on f_i
        m <- beta1 m + (1 - beta1) D,   v <- v - (1 - beta2) D^2 sign(v - D^2),   w <- w + server_lr m / (sqrt(v) + tau)

    Notes
    -----
    FLamby's version: tau 1e-8, v0 0, beta2 0.999, weighted.
    """

    beta2: float = setting(0.99, ge=0, lt=1, source="ours", doc="Memory of D^2.")

    def second_moment(self, v, d2):
        return v - (1 - self.beta2) * d2 * sign(v - d2)
