"""FedAvg with momentum on the server: all that a new method takes.
Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution" (arXiv 1909.06335), section 4.3.
"""

from dataclasses import dataclass

from polyfed import Algorithm, local_sgd, setting


@dataclass(frozen=True)
class Momentum(Algorithm):
    """The server moves along a running sum of the clients' mean update.

        d = sum_i n_i (w_i - w) / sum_i n_i        v <- momentum v + d        w <- w + v

    With momentum = 0 it is FedAvg.
    """

    lr: float = setting(0.1, doc="Step size of local SGD.")
    momentum: float = setting(0.9, ge=0, doc="What is kept of the last move.")

    def init_server(self, task, w0, n):
        return {"w": w0, "v": w0 * 0}

    def local_update(self, task, client, down, data, round):
        return {}, {"dw": local_sgd(task, down["w"], data, self.lr) - down["w"]}

    def aggregate(self, server, up, round):
        v = self.momentum * server["v"] + up.mean("dw", round.samples)
        return {"w": server["w"] + v, "v": v}
