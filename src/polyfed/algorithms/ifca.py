"""IFCA: Ghosh et al., NeurIPS 2020, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.clusters import Alternating, losses, starts
from polyfed.base.settings import setting
from polyfed.compute.gradients import passed, statistics_
from polyfed.core.algorithm import Needs, by_settings


@dataclass(frozen=True)
class IFCA(Alternating):
    """Iterative federated clustering: a client picks one of k models by its training loss, and trains that one.

        j_i = argmin_j F_i(theta_j)                           on all of client i's training samples
        model averaging      w_i = local SGD from theta_{j_i} on F_i,   theta_j <- mean of the w_i with j_i = j
        gradient averaging   g_i = grad F_i(theta_{j_i}) on one batch,  theta_j <- theta_j - (lr/|S|) sum_{j_i = j} g_i

    A model that no client picks stays as it is. A client deploys the model that it picked last; one that was never
    asked, the model with the most samples.

    Notes
    -----
    The paper restarts whole runs and keeps the one with the least training loss after it. `restarts` compares starts
    before any training, which costs one exchange; for the paper's way, compare runs of several seeds.
    """

    averaging: Literal["model", "gradient", "shrinking"] = setting(
        "model",
        source="paper",
        doc='"model", "gradient" or "shrinking". Under gradient averaging a client takes one step a round, on one '
        "batch (all its samples with full batches), and sends the model after it, which tells the server the gradient. "
        "Shrinking is a fault of FPFC's released code: theta_j <- (1/|S|) sum_{j_i = j} w_i, so that a model that k of "
        "30 pick shrinks by k/30, and one that no client picks is zero.",
    )
    restarts: int = setting(
        1,
        ge=1,
        le=10000,
        source="ours",
        doc="Sets of k starts, those of seed, seed + 1, ...: above 1, an exchange before the first one sends all of "
        "them to the first round's participants, and the set in which their best models have the least mean "
        "training loss is trained (weighted by samples if `weighted`).",
    )

    @by_settings
    def needs(self):
        why = "under gradient averaging a client sends one gradient step"
        sgd = why if self.averaging == "gradient" else ""
        return Needs(first=2 if self.restarts > 1 else 1, plain_sgd=sgd, clients=self.k)

    def _compares(self, t, phase=0):
        """True in the exchange that compares starts."""
        return self.restarts > 1 and t == phase == 0

    def init_server(self, task, w0, n):
        server = super().init_server(task, w0, n)
        if self.restarts == 1:
            return server
        sets = [starts(task, w0, self.k, self.seed + r, self.init_scale) for r in range(self.restarts)]
        w = torch.cat(sets)
        return server._replace(free={"starts": torch.where(server.shared["own"], w, w0) if self.shared_layers else w})

    def downlink(self, server, round):
        every = self._compares(round.t, round.phase)
        return super().downlink(server | {"w": server["starts"]} if every else server, round)

    def local_update(self, task, client, down, data, round):
        if not self._compares(round.t, round.phase):
            return super().local_update(task, client, down, data, round)
        loss = losses(task, self._received(task, down), data)
        return {}, {"loss": loss.unflatten(1, (self.restarts, self.k)).amin(2)}

    def aggregate(self, server, up, round):
        if not self._compares(round.t, round.phase):
            return super().aggregate(server, up, round)
        best = int(up.mean("loss", round.samples if self.weighted else None).argmin())
        w = server["starts"].unflatten(0, (self.restarts, self.k))[best]
        return server | {"w": w, "starts": server["starts"][:0]}

    def _train(self, task, w, data):
        if self.averaging != "gradient":
            return super()._train(task, w, data)
        g, _, moves = passed(task.net, w, next(iter(data)))
        return statistics_(task.net, w - self.lr * g, w, moves)

    def _next(self, w, new, share):
        if self.averaging == "model":
            return new
        # divided by |S|, not by the cluster's size
        return share * new if self.averaging == "shrinking" else w + share * (new - w)
