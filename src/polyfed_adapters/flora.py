"""FLoRA: Wang et al., NeurIPS 2024."""

from dataclasses import dataclass

import numpy as np
import torch

from polyfed.algorithms._shared.parts import split
from polyfed.base.randomness import generator, key_of
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import mean
from polyfed_adapters.lora import Merging, known, means


@dataclass(frozen=True)
class FLoRA(Merging):
    """New factors in every round, whose exact mean is merged into the weights at its end.

        A drawn anew, B = 0        (A_i, B_i, h_i) <- local SGD on f_i from (A, B, h), R frozen
        R <- R + [p_1 B_1 ... p_n B_n] [A_1; ...; A_n],   h <- sum_i p_i h_i              p_i = n_i / sum_j n_j

    The model's weights are W0 + c R.

    Notes
    -----
    A is drawn from `seed`, the round and the layer's name, the same at every client, and does not travel. All of R goes
    down, as two factors where these are fewer numbers, so that a client need not have been in the rounds before; after
    one round that is the paper's stack, of clients x r (m + k) numbers.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(True, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")  # pyrefly: ignore[bad-override]
    seed: int = setting(0, ge=0, source="ours", doc="Seed of the draws of A.")

    made = "ABR"

    def local_update(self, task, client, down, data, round):
        w, layers, trained = self.received(task, down)
        w = w.clone()
        for name, place in layers.items():
            draws = generator(self.seed, "flora", round.t, key_of(name)).uniform(-1, 1, (place.r, place.k))
            place.part(w, "A").copy_(torch.as_tensor(draws / np.sqrt(place.k)))
        w = local_sgd(task, w, data, self.lr, only=trained.to(w))
        return {}, {"w": split(trained, w)[0]}

    def aggregate(self, server, up, round):
        layers, (own, _, weights) = known(server), self.uploaded(server, up, round)
        w = mean(own, weights)
        for place in layers.values():
            for part in ("A", "B", "R"):
                w[place.span(part)] = server["w"][place.span(part)]
        return self.merged(server, w, means(layers, own, weights))
