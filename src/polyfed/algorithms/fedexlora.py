"""FedEx-LoRA: the mean of the factors, and what it lacks as a residual in the frozen weights.
Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models", ACL 2025.
"""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.lora import Merging, known, mean_of_products, without
from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import mean


@dataclass(frozen=True)
class FedExLoRA(Merging):
    """Factors are averaged as in FedIT; the difference to the exact mean of the updates goes into the weights.

        (A_i, B_i, h_i) <- local SGD on f_i from (A, B, h), R frozen
        A <- sum_i p_i A_i,   B <- sum_i p_i B_i,   h <- sum_i p_i h_i              p_i = n_i / sum_j n_j
        R <- R + sum_i p_i B_i A_i - (sum_i p_i B_i)(sum_i p_i A_i)

    The model's weights are W0 + c (R + B A).

    Notes
    -----
    A round raises the rank of R by at most (clients - 1) r. It goes down as two factors where these are fewer numbers
    than the matrix, all of it, so that a client need not have been in the rounds before. The paper's server sends each
    round's residual, and its p_i are equal.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(True, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")

    name = "fedex-lora"

    def local_update(self, task, client, down, data, round):
        w, _, trained = self.received(task, down)
        w = local_sgd(task, w, data, self.lr, only=trained.to(w))
        return {}, {"w": split(trained, w)[0]}

    def aggregate(self, server, up, round):
        layers, p = known(server), len(server["w"])
        trained = without(layers.values(), p, "R")
        weights = round.samples if self.weighted else torch.ones_like(round.samples)
        own = assemble(trained, up["w"], up["w"].new_zeros(len(up["w"]), p - up["w"].shape[1]))
        w = assemble(trained, mean(up["w"], weights), split(trained, server["w"])[1])
        own -= w  # sum_i p_i (B_i - B)(A_i - A) is the mean of products less the product of means
        more = {
            name: mean_of_products(place.part(own, "B"), place.part(own, "A"), weights)
            for name, place in layers.items()
        }
        return self.merged(server, w, more)
