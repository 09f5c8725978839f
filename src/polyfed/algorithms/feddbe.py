"""FedDBE: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023."""

from dataclasses import dataclass
from typing import Any

import torch

from polyfed.base.settings import setting
from polyfed.compute.gradients import passed, statistics_
from polyfed.core.algorithm import Algorithm, Down, Needs, by_settings


@dataclass(frozen=True)
class FedDBE(Algorithm):
    """Domain bias eliminator: features f, outputs h(f + mu_i), and a running mean m of the batches' mean features.

        m_i  = m after local SGD of every client from the common start          once; mbar = sum_i n_i m_i / sum_i n_i
        (w_i, mu_i) <- local SGD from (w, mu_i) on f_i + kappa/2 ||m - mbar||^2 / d,      m <- (1 - a) m + a batch mean
        w <- sum_i n_i w_i / sum_i n_i                                          mu_i, at first 0, stays

    Client i deploys w with mu_i, which is a shift of the last layer's bias by W mu_i.

    Notes
    -----
    In every solve m begins at 0, and its gradient is that of the latest batch. The initial training, whose models are
    dropped, is an exchange of its own with all clients; with kappa = 0 there is none. mbar is sent with every model.
    """

    lr: float = setting(0.005, source="code", doc="Step size of local SGD.")
    kappa: float = setting(1.0, ge=0, source="ours", doc="Pull of the mean features to mbar; 0 in PFLlib's flags.")
    momentum: float = setting(0.1, gt=0, le=1, source="code", doc="Share a of the latest batch in the running mean.")

    @by_settings
    def needs(self):
        disclosed = {"mean": "the mean features of this site's samples"}
        initial: dict[str, Any] = {"first": 2, "everyone_first": True, "discloses": disclosed} if self.kappa else {}
        return Needs(plain_sgd="it steps the personal mean itself", **initial)

    def init_server(self, task, w0, n):
        return {"w": w0, "mean": w0.new_zeros(task.width)}

    def init_client(self, task, w0):
        return {"mu": w0.new_zeros(task.width)}

    def downlink(self, server, round):
        if self._initial(round):
            return Down()
        return Down(shared={"w": server["w"]} | ({"mean": server["mean"]} if self.kappa else {}))

    def _initial(self, round):
        return round.t == 0 and round.phase == 0 and self.kappa > 0

    def local_update(self, task, client, down, data, round):
        if self._initial(round):
            start = task.w0.expand(len(round.ids), -1)
            return {}, {"mean": self._trained(task, start, client["mu"], data.again("initial"))[2]}
        w, mu, _ = self._trained(task, down["w"], client["mu"], data, down.get("mean"))
        return {"mu": mu}, {"w": w}

    def _trained(self, task, x, start, data, target=None):
        """(w, mu, m) after local steps; without a target mu stays and nothing pulls."""
        w, mu, running = x.clone(), start.clone(), torch.zeros_like(start)
        for batch in data:
            m, live = batch.rows, 1.0 if batch.live is None else batch.live
            latest = running[:m].clone()

            def pull(features, outputs, batch, rows, latest=latest):
                mean = (1 - self.momentum) * running[rows] + self.momentum * batch.mean(features)
                latest[rows] = mean.detach()
                return mean.sum(1) * 0 if target is None else self.kappa / 2 * (mean - target[rows]).square().mean(1)

            at = self.personal(task, {"mu": mu[:m]}, {"w": w[:m]})
            g, _, moves = passed(task.net, at, batch, also=pull if self.kappa else None)
            g += task.net.weight_decay * (w[:m] - at)
            weight, bias = task.layout.head(g)
            W, back = task.layout.head(w[:m])[0], (bias - task.net.weight_decay * task.layout.head(w[:m])[1])[..., None]
            weight += back * mu[:m, None]
            slope = (W.mT @ back)[..., 0] + task.net.weight_decay * mu[:m]
            running[:m] += live * (latest - running[:m])
            mu[:m] -= self.lr * live * slope * (target is not None or not self.kappa)
            w[:m] = statistics_(task.net, w[:m] - self.lr * live * g, w[:m], moves, live)
        return w, mu, running

    def aggregate(self, server, up, round):
        return server | {name: up.mean(name, round.samples) for name in up}

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]})

    def personal(self, task, client, down):
        w = down["w"].clone()
        weight, bias = task.layout.head(w)
        bias += (weight @ client["mu"][..., None])[..., 0]
        return w
