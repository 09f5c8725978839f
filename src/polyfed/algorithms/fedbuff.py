"""FedBuff: asynchronous updates, gathered in a buffer. Nguyen et al., AISTATS 2022, Algorithm 1, without privacy."""

from dataclasses import dataclass

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down


@dataclass(frozen=True)
class FedBuff(Algorithm):
    """Buffered asynchronous aggregation; run it with an asynchronous schedule.

        d_i = local SGD from the w_tau it was sent, minus w_tau
        buffer <- buffer + d_i / sqrt(1 + staleness)        staleness: server updates since w_tau was sent
        once `buffer` replies are in:  w <- w + server_lr buffer / size,   buffer <- 0

    Nguyen et al. (2022), Algorithm 1, without privacy.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    server_lr: float = setting(1.0, ge=0, source="ours", doc="Step size of the server.")
    buffer: int = setting(5, ge=1, source="ours", doc="Replies per update of the common model (K; 10 in the paper).")

    def init_server(self, task, w0, n):
        return {"w": w0, "sum": zeros_like(w0), "held": w0.new_tensor(0.0), "version": w0.new_tensor(0.0)}

    def downlink(self, server, round):
        return Down(shared={"w": server["w"], "version": server["version"]})

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        return {}, {"dw": local_sgd(task, x, data, self.lr) - x, "version": down["version"]}

    def aggregate(self, server, up, round):
        w, total, held, version = server["w"], server["sum"], server["held"], server["version"]
        total = total + up.sum("dw", 1 / (1 + version - up["version"]).sqrt())
        held = held + len(round.ids)
        if held >= self.buffer:
            w, version = w + self.server_lr * total / held, version + 1
            total, held = zeros_like(total), held * 0
        return {"w": w, "sum": total, "held": held, "version": version}
