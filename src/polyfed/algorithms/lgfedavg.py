"""LG-FedAvg: Liang et al. (arXiv 2001.01523), Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.parts import Partial, assemble, part, some, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Server


@dataclass(frozen=True)
class LGFedAvg(Partial):
    """Lower layers stay with the client, the top layers are shared: the mirror image of FedPer.

        (B_i, h_i) <- local SGD on f_i from (B_i, h)        h <- mean_S h_i

    Client i deploys its own body with the common head.

    Notes
    -----
    The paper starts from a model trained by FedAvg. From a random start, later comparisons find it no better than
    training alone.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    top: str = setting(
        "head", source="ours", doc='The layers that are shared: "head" is the last one; or names, separated by spaces.'
    )
    weighted: bool = setting(False, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")
    deployed: Literal["after", "before"] = setting(
        "after",
        source="paper",
        doc='The top layers as they are "after" or "before" the last averaging: before it, a client of the last round '
        "has those that it has just trained, any other those that were common until then, as scored in FPFC's released "
        "code.",
    )

    name = "lg-fedavg"

    def init_server(self, task, w0, n):
        w = split(some(self.shared(task.layout), self, task.layout), w0)[0]
        if self.deployed == "after":
            return Server({"w": w})
        return Server({"w": w, "before": w.clone()}, {"fresh": torch.zeros(n, dtype=torch.bool, device=w0.device)})

    def init_client(self, task, w0):
        state = super().init_client(task, w0)
        return state | ({} if self.deployed == "after" else {"trained": w0[self.shared(task.layout)]})

    def shared(self, layout):
        return part(layout, self.top)

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)

    def downlink(self, server, round):
        return Down({"w": server["w"]})

    def local_update(self, task, client, down, data, round):
        own, up = super().local_update(task, client, down, data, round)
        return own | ({} if self.deployed == "after" else {"trained": up["w"].clone()}), up

    def aggregate(self, server, up, round):
        w = up.mean("w", round.samples if self.weighted else None)
        if self.deployed == "after":
            return {"w": w}
        fresh = torch.zeros_like(server["fresh"]).index_fill(0, round.ids, True)
        return {"w": w, "before": server["w"], "fresh": fresh}

    def deployment(self, server, round):
        if self.deployed == "after":
            return super().deployment(server, round)
        return Down({"w": server["before"]}, {"fresh": server["fresh"][round.ids]})

    def personal(self, task, client, down):
        common = down["w"]
        if self.deployed == "before":
            common = torch.where(down["fresh"][:, None], client["trained"], common)
        return assemble(self.shared(task.layout), common, client["own"])
