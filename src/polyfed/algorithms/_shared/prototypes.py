"""Prototypes: a vector of features for every class, as a server makes them of its clients' class means."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task
from polyfed.compute.terms import IMPOSSIBLE, members
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait, State
from polyfed.core.uplinks import Uplinks

DISCLOSED = {
    "prototypes": "the sum or mean of the features of each class over this site's samples",
    "mass": "how many samples of each class this site has, or which classes",
}


def unseen(task: Task, w0: Tensor) -> State:
    """The server's state before the first round: no class has a prototype."""
    return {"prototypes": w0.new_zeros(task.classes, task.width), "seen": w0.new_zeros(task.classes)}


def sent(means: Tensor, mass: Tensor) -> State:
    """A client's uplink for weighted means of its class means [s, C, d]. mass: [s, C] weights, 0 for an absent class"""
    mass = mass.to(means)
    return {"prototypes": mass[..., None] * means, "mass": mass}


def renewed(server: State, up: Uplinks) -> State:
    """The means of the uplinks; a class of which no client has a sample keeps its prototype."""
    total, mass = up.sum("prototypes"), up.sum("mass")
    new = total / torch.where(mass == 0, 1, mass)[:, None]
    M = torch.where((mass == 0)[:, None], server["prototypes"], new)
    return {"prototypes": M, "seen": torch.maximum(server["seen"], (mass != 0).to(mass))}


def pairs(up: Uplinks) -> tuple[Tensor, Tensor, Tensor]:
    """A row for each client and class that it has: (means [k, d], classes [k], shares of mass [k])."""
    mass = up["mass"]
    client, c = mass.nonzero(as_tuple=True)
    weight = mass[client, c]
    return up["prototypes"][client, c] / weight[:, None], c, weight / weight.sum()


def nearest(task: Task, w: Tensor, M: Tensor, present: Tensor) -> Tensor:
    """A copy of `w: [s, p]` whose last layer takes the class of the nearest prototype: logits -||f - M_c||^2."""
    w = w.clone()
    weight, bias = task.layout.head(w)
    weight.copy_(2 * M * present[..., None])
    bias.copy_(torch.where(present > 0, -M.square().sum(2), IMPOSSIBLE))
    return w


@dataclass(frozen=True)
class Pulled(Algorithm, abstract=True):
    """Base: models stay with the clients, pulled to common prototypes; a subclass says the server's part."""

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
        M, present = down["prototypes"], down["seen"]

        def by_means(features, outputs, batch, rows):
            share = members(batch.y, len(present[0])).to(features)
            mass = batch.mean(share)
            gap = batch.mean(share[..., None] * (features[:, :, None] - M[rows][:, None]))
            gap = gap / torch.where(mass == 0, 1, mass)[..., None]
            return self.lam * (present[rows] * gap.square().sum(2)).sum(1)

        toward = (self.lam / task.width * present, M) if self.lam and self.pull == "code" else None
        also = by_means if self.lam and self.pull == "paper" else None
        w = local_sgd(task, client["w"], data, self.lr, toward=toward, also=also)
        counts = data.counts(task.classes)
        return {"w": w}, sent(task.class_means(w, data), counts if self.weighted else counts > 0)

    def personal(self, task, client, down):
        return client["w"] if self.deployed == "head" else nearest(task, client["w"], down["prototypes"], down["seen"])

    def describe(self, server):
        return Portrait()
