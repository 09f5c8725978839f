"""FedDPA: Yang, Long, Shen, Jiang, Blumenstein, "Dual-Personalizing Adapter for Federated Foundation Models", NeurIPS
2024; its form FedDPA-T, which trains both adapters in every round."""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Portrait
from polyfed_adapters.lora import below, places, without


@dataclass(frozen=True)
class FedDPA(Algorithm):
    """A global adapter (A, B), which is averaged, and beside it each client's local one, which stays.

        from the second round on, (A, B, h) frozen:
        (A_i, B_i, h_i) <- local SGD on f_i of W0 + c ((1 - lam) B A + lam B_i A_i), head (1 - lam) h + lam h_i
        (A, B, h)_i <- local SGD on f_i of W0 + c B A, head h
        (A, B, h) <- mean_S (A, B, h)_i                              h: all else that is trained, such as the head

    Client i deploys the mixture of the first line. The first half of the adapter's rank is the global one's.

    Notes
    -----
    The paper weighs the adapters anew for every input, by its likeness to five training inputs; here lam is fixed, so
    that a client deploys one adapter of the whole rank. Its language models have no head.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of both local solves.")
    lam: float = setting(0.5, ge=0, le=1, source="code", doc="Weight of the local adapter; 0 is FedAvg of the global.")

    adapter_train = "factors"

    def init_server(self, task, w0, n):
        return {"w": split(self._parts(task)[0], w0)[0]}

    def init_client(self, task, w0):
        return {"own": split(self._parts(task)[1], w0)[0]}

    def local_update(self, task, client, down, data, round):
        common, own, linear = self._parts(task)
        w, v, mixed = self._mixed(task, client, down)
        if self.lam and round.t:
            by = self.lam ** linear.to(w)  # steps are of B_i and h_i, which `mixed` has times lam
            new = local_sgd(task, mixed, data.again("local"), self.lr, only=own.to(w), correct=lambda _, g: by * by * g)
            v = v + (new - mixed) / by
        w = local_sgd(task, w, data, self.lr, only=common.to(w))
        return {"own": split(own, v)[0]}, {"w": split(common, w)[0]}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}

    def personal(self, task, client, down):
        return self._mixed(task, client, down)[2]

    def describe(self, server):
        return Portrait()  # what is shared alone is half of a model

    def _parts(self, task):
        """[p] bool: the global adapter, the local one, both with the head; and what the weights are linear in."""
        layers = places(task.layout, self).values()
        if any(place.r < 2 for place in layers):
            raise ModelError("model: found updates of rank 1, expected 2 or more for feddpa, half for each adapter")
        half = below(layers, torch.tensor([[place.r // 2 for place in layers]]), task.p)[0].bool()
        return half, without(layers, task.p, "AB") | ~half, without(layers, task.p, "A")

    def _mixed(self, task, client, down):
        """[s, p]: the global adapter alone, the local one alone, and both as they are deployed."""
        common, own, linear = self._parts(task)
        w, v = (
            assemble(part, t, t.new_zeros(len(t), task.p - t.shape[1]))
            for part, t in ((common, down["w"]), (own, client["own"]))
        )
        share = linear.to(w)
        return w, v, (1 - self.lam) ** share * w + self.lam**share * v
