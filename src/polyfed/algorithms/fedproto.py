"""FedProto: clients exchange the mean features of each class, and nothing else.
Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.prototypes import DISCLOSED, nearest, renewed, sent, unseen
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.compute.terms import members
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Models that stay with the clients, pulled to common prototypes M_c, vectors of d features for every class c.

        w_i <- local SGD from the client's own w_i on f_i + lam R_i
        M_c <- mean over clients with class c of m_ic,     m_ic the mean features of w_i over their samples of c
        R_i = mean_j ||f_j - M_y||^2 / d  (code)   or   sum_c ||m_c - M_c||^2 over a batch's classes  (paper)

    Client i deploys its own body with the nearest prototype, or its own head.

    Notes
    -----
    A class without a prototype pulls at nothing. Here m_ic is taken of the trained model; the released code takes the
    features seen on the way, of weights that still move. Equation (6) of the paper divides twice, which shrinks M_c.
    """

    lr: float = setting(0.01, source="code", doc="Step size of local SGD.")
    lam: float = setting(1.0, ge=0, source="paper", doc="Pull of features to the prototypes; 0 trains alone.")
    pull: Literal["code", "paper"] = setting(
        "code", source="code", doc='"code": every sample to its class; "paper": the mean of each class in a batch.'
    )
    weighted: bool = setting(
        False, source="code", doc="Weigh clients by their samples of a class; False: plain mean of those that have any."
    )
    deployed: Literal["prototypes", "head"] = setting(
        "prototypes", source="paper", doc='"prototypes": the class of the nearest one; "head": the client\'s own.'
    )

    needs = Needs(discloses=DISCLOSED)

    def init_server(self, task, w0, n):
        return unseen(task, w0)

    def init_client(self, task, w0):
        return {"w": w0}

    def downlink(self, server, round):
        return Down(shared={"prototypes": server["prototypes"], "seen": server["seen"]})

    def local_update(self, task, client, down, data, round):
        M, seen = down["prototypes"], down["seen"]

        def by_means(features, outputs, batch, rows):
            share = members(batch.y, len(seen[0])).to(features)
            mass = batch.mean(share)
            gap = batch.mean(share[..., None] * (features[:, :, None] - M[rows][:, None]))
            gap = gap / torch.where(mass == 0, 1, mass)[..., None]
            return self.lam * (seen[rows] * gap.square().sum(2)).sum(1)

        toward = (self.lam / task.width * seen, M) if self.lam and self.pull == "code" else None
        also = by_means if self.lam and self.pull == "paper" else None
        w = local_sgd(task, client["w"], data, self.lr, toward=toward, also=also)
        counts = data.counts(task.classes)
        return {"w": w}, sent(task.class_means(w, data), counts if self.weighted else counts > 0)

    def aggregate(self, server, up, round):
        return renewed(server, up)

    def personal(self, task, client, down):
        return client["w"] if self.deployed == "head" else nearest(task, client["w"], down["prototypes"], down["seen"])

    def describe(self, server):
        return Portrait()
