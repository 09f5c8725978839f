"""FedPAC: Xu, Tong, Huang, ICLR 2023."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import assemble, part, some, split
from polyfed.algorithms._shared.prototypes import DISCLOSED, renewed, sent, unseen
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait, Server

MOMENTS = {"moments": "class means times class shares, and the variance of features"}


@dataclass(frozen=True)
class FedPAC(Algorithm):
    """A body in common, class centres M_c in common, and for every client a mixture of all heads.

        h_i <- head_epochs of SGD on f_i(B, h_i), the body B frozen
        B_i <- body_epochs of SGD on f_i + lam mean_j ||f_j - M_y||^2, the head frozen
        B   <- sum_S n_i B_i / sum_S n_i        M_c <- sum_S n_ic m_ic / sum_S n_ic,  m_ic mean features after training
        h_i <- sum_j a_j h_j,   a = argmin over the simplex of  sum_j a_j^2 v_j + ||sum_j a_j (H_i - H_j)||^2
               H_ic = (n_ic / n_i) m_ic,   v_i = (mean_j ||f_j||^2 - ||H_i||^2) / n_i

    H and v are of the received body, before training. Client i deploys the common body with its mixed head.

    Notes
    -----
    A class without a centre pulls at nothing; in the released code the client's own old centre does. The matrix of the
    mixture is a Gram matrix and needs no repair of eigenvalues. A client that was absent keeps its head.
    """

    lr: float = setting(0.01, source="code", doc="Step size for the body.")
    head_lr: float = setting(0.1, step_size=True, source="code", doc="Step size for the head.")
    head_epochs: int | None = setting(
        1, ge=0, source="paper", doc="Passes over the local data for the head, each round; None: the run's local work."
    )
    body_epochs: int | None = setting(
        5, ge=0, source="paper", doc="Passes over the local data for the body, each round; None: the run's local work."
    )
    lam: float = setting(1.0, ge=0, source="paper", doc="Pull of features to the centres of their classes.")
    distance: Literal["mean", "sum"] = setting(
        "mean", source="code", doc='Squares of the pull, "mean" over the d features as released, or their "sum".'
    )
    least: float = setting(1e-3, ge=0, lt=1, source="code", doc="Shares of heads below this count as 0.")

    needs = Needs(discloses=DISCLOSED | MOMENTS)

    def init_server(self, task, w0, n):
        centres = unseen(task, w0)
        common, head = split(some(part(task.layout, "body"), self, task.layout), w0)
        return Server({"w": common, **centres}, {"head": head.expand(n, -1).clone()})

    def downlink(self, server, round):
        shared = {name: server[name] for name in ("w", "prototypes", "seen")}
        return Down(shared=shared, each={"head": server["head"][round.ids]})

    def local_update(self, task, client, down, data, round):
        body, w, counts = part(task.layout, "body"), self.personal(task, client, down), data.counts(task.classes)
        share = (counts / counts.sum(1, keepdim=True)).to(w)
        batch = task.net.cast(data.whole(), w)
        H = share[..., None] * task.class_means(w, data)
        v = (batch.mean(task.features(w, batch.x).square().sum(2)) - H.square().sum((1, 2))) / data.samples.to(w)
        only, strength = body.to(w), self.lam * down["seen"] / (task.width if self.distance == "mean" else 1)
        w = local_sgd(task, w, data.again("head", epochs=self.head_epochs), self.head_lr, only=1 - only)
        then = data.again("body", epochs=self.body_epochs)
        w = local_sgd(task, w, then, self.lr, only=only, toward=(strength, down["prototypes"]) if self.lam else None)
        common, head = split(body, w)
        moments = torch.cat([H.flatten(1), v[:, None]], 1)
        return {}, {"w": common, "head": head, "moments": moments} | sent(task.class_means(w, data), counts)

    def aggregate(self, server, up, round):
        mixture = mixtures(up["moments"][:, :-1], up["moments"][:, -1], self.least)
        head = server["head"].index_copy(0, round.ids, mixture @ up["head"])
        return {**server, "w": up.mean("w", round.samples), "head": head, **renewed(server, up)}

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]}, each={"head": server["head"][round.ids]})

    def personal(self, task, client, down):
        return assemble(part(task.layout, "body"), down["w"], down["head"])

    def describe(self, server):
        return Portrait()


def mixtures(H: Tensor, v: Tensor, least: float) -> Tensor:
    """[m, m]: in row i the shares of all heads for client i. H: [m, q], v: [m]"""
    from scipy.optimize import nnls  # slow to import

    points, spread, shares = H.double().cpu().numpy(), v.double().cpu().numpy().clip(1e-12), []  # else singular
    for mine in points:
        # min a'Qa over the simplex: a is y / sum y for the y >= 0 that minimises y'Qy / 2 - sum y
        away = points - mine
        root = np.linalg.cholesky(np.diag(spread) + away @ away.T).T
        y = nnls(root, np.linalg.solve(root.T, np.ones(len(points))))[0]
        a = y / y.sum()
        a = np.where(a < min(least, a.max()), 0, a)
        shares.append(a / a.sum())
    return torch.as_tensor(np.array(shares)).to(H)
