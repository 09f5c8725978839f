"""FedBABU: Oh, Kim, Yun, ICLR 2022, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

from polyfed.algorithms._shared.parts import assemble, part, some, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Personal


@dataclass(frozen=True)
class FedBABU(Personal):
    """Body aggregation, body update: a common body learnt under one frozen random head, then personal fine-tuning.

        B_i <- local SGD on f_i(B_i, h_0) from B, the head h_0 frozen at the common start
        B   <- sum_i n_i B_i / sum_i n_i
        w_i <- finetune_epochs of SGD on f_i from (B, h_0), which client i deploys

    Notes
    -----
    The paper fine-tunes once, after the last round. Here a client fine-tunes the body it receives whenever it takes
    part, and keeps the result: w_i belongs to the common body of its last participation, one round before the server's
    latest at best. Until then it deploys the initial model. `finetune_from` is the paper's way, where it is the last.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of both solves.")
    finetune_epochs: int = setting(1, ge=0, source="ours", doc="Passes over the local data for the personal model.")
    finetune_from: int = setting(0, ge=0, source="ours", doc="First round of fine-tuning; (B, h_0) is deployed before.")
    tune: Literal["all", "head", "body"] = setting("all", source="paper", doc='Fine-tuned: "all", "head" or "body".')
    head: str = setting(
        "head", source="paper", doc='The frozen layers: "head" is the last one; or names, separated by spaces.'
    )

    def init_server(self, task, w0, n):
        return {"w": w0, "shared": some(~part(task.layout, self.head), self, task.layout).to(w0.device)}

    def downlink(self, server, round):
        return Down(shared={"w": split(server["shared"], server["w"])[0]})

    def local_update(self, task, client, down, data, round):
        body, w = ~part(task.layout, self.head), down["w"]
        start = assemble(body, w, split(body, task.w0)[1].expand(len(w), -1))
        train = body.to(start)
        w = local_sgd(task, start, data, self.lr, only=train)
        if round.t < self.finetune_from:
            return {"w": start}, {"w": split(body, w)[0]}
        tuned = {"all": train * 0 + 1, "body": train, "head": 1 - train}[self.tune]
        again = data.again("finetune", epochs=self.finetune_epochs)
        own = local_sgd(task, start, again, self.lr, only=tuned)
        return {"w": own}, {"w": split(body, w)[0]}

    def aggregate(self, server, up, round):
        shared = server["shared"]
        return server | {"w": assemble(shared, up.mean("w", round.samples), split(shared, server["w"])[1])}
