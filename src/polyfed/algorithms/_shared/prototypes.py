"""Prototypes: a vector of features for every class, as a server makes them of its clients' class means."""

import torch
from torch import Tensor

from polyfed.compute.task import Task
from polyfed.core.algorithm import State
from polyfed.core.uplinks import Uplinks

DISCLOSED = {
    "prototypes": "the sum or mean of the features of each class over this site's samples",
    "mass": "how many samples of each class this site has, or which classes",
}


def unseen(task: Task, w0: Tensor) -> State:
    """Before the first round: no class has a prototype."""
    return {"prototypes": w0.new_zeros(task.classes, task.width), "seen": w0.new_zeros(task.classes)}


def sent(means: Tensor, mass: Tensor) -> State:
    """A client's part in weighted means of its class means [s, C, d]. mass: [s, C] weights, 0 for an absent class"""
    mass = mass.to(means)
    return {"prototypes": mass[..., None] * means, "mass": mass}


def renewed(server: State, up: Uplinks) -> State:
    """The means of what was sent; a class of which no client has a sample keeps its prototype."""
    total, mass = up.sum("prototypes"), up.sum("mass")
    new = total / torch.where(mass == 0, 1, mass)[:, None]
    M = torch.where((mass == 0)[:, None], server["prototypes"], new)
    return {"prototypes": M, "seen": torch.maximum(server["seen"], (mass != 0).to(mass))}


def pairs(up: Uplinks) -> tuple[Tensor, Tensor, Tensor]:
    """What was sent, a row for each client and class that it has: (means [k, d], classes [k], shares of mass [k])."""
    mass = up["mass"]
    client, c = mass.nonzero(as_tuple=True)
    weight = mass[client, c]
    return up["prototypes"][client, c] / weight[:, None], c, weight / weight.sum()


def nearest(task: Task, w: Tensor, M: Tensor, seen: Tensor) -> Tensor:
    """A copy of `w: [s, p]` whose last layer takes the class with the nearest prototype: logits -||f - M_c||^2.

    M: [s, C, d]     seen: [s, C], 0 for a class without one, which is never taken
    """
    w = w.clone()
    weight, bias = task.layout.head(w)
    weight.copy_(2 * M * seen[..., None])
    bias.copy_(torch.where(seen > 0, -M.square().sum(2), -1e4))
    return w
