"""pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1."""

from dataclasses import dataclass

import torch

from polyfed.base.settings import setting
from polyfed.compute.steps import affine
from polyfed.core.algorithm import Needs, Personal


@dataclass(frozen=True)
class PFedMe(Personal):
    """Personalisation by Moreau envelopes.

        min_w  mean_i F_i(w),    F_i(w) = min_theta f_i(theta) + lam/2 ||theta - w||^2
        theta_i ~ argmin f_i(theta; batch) + lam/2 ||theta - w_i||^2       inner_steps steps on one batch, from w_i
        w_i <- w_i - lr lam (w_i - theta_i)                                at every local step
        w   <- (1 - beta) w + beta mean_S w_i

    Client i deploys its last theta_i, which never leaves it.

    Notes
    -----
    Absent clients do not train: w_i and theta_i are those of the picked alone, and an absent client deploys the theta_i
    of its last participation. In the paper all clients train in every round and the server averages some of them.
    """

    lr: float = setting(
        0.01,
        source="ours",
        doc="Step size on the envelope, below 1 / lam: at 1 / lam w_i is theta_i itself, beyond it overshoots.",
    )
    lam: float = setting(15.0, gt=0, source="paper", doc="Pull of the personal model towards the common one.")
    personal_lr: float = setting(
        0.05, step_size=True, source="ours", doc="Step size of the inner solves; below 2 / (smoothness + lam)."
    )
    inner_steps: int = setting(5, ge=1, source="paper", doc="Gradient steps per inner solve.")
    beta: float = setting(1.0, ge=0, source="paper", doc="Weight of the new mean; above 1 extrapolates.")

    needs = Needs(plain_sgd="its inner solves and its steps on the envelope are its own")

    def __post_init__(self):
        super().__post_init__()
        self.require(self.lr * self.lam < 1, "lr", f"a number below 1 / lam = {1 / self.lam:.4g}")

    def init_server(self, task, w0, n):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        w, theta = down["w"].clone(), down["w"].clone()
        for batch in data:
            m = batch.rows
            near, pull = w[:m].clone(), affine(task.net, w[:m], self.personal_lr, pull=(self.lam, w[:m])).summed()
            task.descend_(near, batch, self.personal_lr, pull, self.inner_steps)
            theta[:m] = near if batch.live is None else torch.where(batch.live > 0, near, theta[:m])
            w[:m].lerp_(near, self.lr * self.lam)  # of a client that has finished, near is w
            if task.net.statistics is not None:
                w[:m].index_copy_(1, task.net.statistics, near.index_select(1, task.net.statistics))
        return {"w": theta}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": (1 - self.beta) * server["w"] + self.beta * up.mean("w")}
