"""APPLE: Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.parts import without_statistics
from polyfed.base.settings import setting
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait, Server


@dataclass(frozen=True)
class APPLE(Algorithm):
    """Adaptive personalised cross-silo learning: client i deploys sum_j p_ij c_j, and trains its c_i and its p_i.

        g = grad f_i(w_i),   w_i = sum_j p_ij c_j                                  on one batch, both steps from there
        c_i <- c_i - lr p_ii g
        p_ij <- p_ij - weight_lr (<g, c_j> + 2 lambda(t) mu (p_ij - p0_j)),   p0_j = n_j / sum n, where p_i starts
        lambda(t) = 1e-3^(t / fade), or (cos(pi t / fade) + 1) / 2;   0 from t = fade

    Notes
    -----
    The server keeps the weights p_i, which travel with the core models, n numbers each way; in the paper a client keeps
    its own. For p0 all clients tell their numbers of samples before the first round. A client downloads the core models
    of all others, which the paper limits for large federations.
    """

    lr: float = setting(0.01, source="code", doc="Step size of the core models.")
    weight_lr: float = setting(
        0.001, step_size=True, source="code", doc="Step size of the weights p; 0 leaves them at p0."
    )
    mu: float = setting(0.1, ge=0, source="code", doc="Pull of the weights towards p0.")
    fade: int = setting(
        16, ge=0, source="code", doc="Rounds in which that pull fades: a tenth of the run's in the code."
    )
    form: Literal["exponential", "cosine"] = setting("exponential", source="code", doc="How it fades.")

    needs = Needs(first=2, everyone_first=True, plain_sgd="it steps a core model and weights itself")

    def init_server(self, task, w0, n):
        without_statistics(task, self.name)  # which it mixes by weights whose sum it learns
        return Server(
            each={"core": w0.expand(n, -1).clone()}, pairs={"p": torch.eye(n, dtype=w0.dtype, device=w0.device)}
        )

    def _tells(self, round):
        """True in the exchange in which clients only tell their numbers of samples."""
        return round.t == 0 == round.phase

    def downlink(self, server, round):
        if self._tells(round):
            return Down()
        samples = server["known"]
        each = {"p": server["p"][round.ids], "at": round.ids}
        return Down({"core": server["core"], "p0": samples / samples.sum()}, each)

    def local_update(self, task, client, down, data, round):
        if self._tells(round):
            return {}, {}
        core, p0, p, at = down["core"], down["p0"], down["p"].clone(), down["at"][:, None]
        begin = core[torch.arange(len(core), device=core.device), down["at"]]
        own, strength = begin.clone(), 2 * self.mu * self._fading(round.t)
        for batch in data:
            m, live = batch.rows, 1.0 if batch.live is None else batch.live
            share = p[:m].gather(1, at[:m])
            w = (p[:m, None] @ core[:m])[:, 0] + share * (own[:m] - begin[:m])
            g = task.gradient(w, batch, need_loss=False)[0]
            slope = (core[:m] @ g[:, :, None])[:, :, 0].scatter(1, at[:m], (g * own[:m]).sum(1, keepdim=True))
            own[:m] -= self.lr * live * share * g
            p[:m] -= self.weight_lr * live * (slope + strength * (p[:m] - p0[:m]))
        return {}, {"core": own, "p": p}

    def _fading(self, t):
        """lambda(t)"""
        if t >= self.fade:
            return 0.0
        return 1e-3 ** (t / self.fade) if self.form == "exponential" else (math.cos(math.pi * t / self.fade) + 1) / 2

    def aggregate(self, server, up, round):
        if self._tells(round):
            samples = server["known"].index_copy(0, round.ids, round.samples)
            p = server["p"].index_copy(0, round.ids, (samples / samples.sum()).expand(len(round.ids), -1))
            return server | {"p": p}
        return {name: server[name].index_copy(0, round.ids, up[name]) for name in ("core", "p")}

    def deployment(self, server, round):
        return Down(each={"w": server["p"][round.ids] @ server["core"]})

    def describe(self, server):
        return Portrait(findings={"mixing": server["p"]})
