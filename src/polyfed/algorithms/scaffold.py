"""SCAFFOLD: drift corrected by control variates. Karimireddy et al., ICML 2020, Algorithm 1, equations (3) to (5)."""

from dataclasses import dataclass
from typing import Literal

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs, by_settings


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """SCAFFOLD: every client removes its own drift c_i and adds the common one c.

        y <- y - lr (g_i(y) - c_i + c), from y = x                                  (3)
        c_i+ = g_i(x)                                  option I                     (4)
        c_i+ = c_i - c - (y - x) / (K lr)              option II                    (4)
        x <- x + server_lr mean_S(y_i - x),   c <- c + (1/n) sum_S(c_i+ - c_i)      (5)

    Karimireddy et al. (2020), Algorithm 1.
    """

    linear_claims = "its fixed point and its rate"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Local step size.")
    server_lr: float = setting(1.0, ge=0, source="paper", doc="Global step size.")
    option: Literal[1, 2] = setting(
        2,
        source="paper",
        doc="1: the new variate is the full-batch gradient at x (one more pass over the local data); 2: the mean of "
        "the gradients used, at no cost.",
    )

    @by_settings
    def needs(self):
        why = "under option 2 its variates are the mean gradients only of steps of length lr"
        return Needs(plain_sgd=why if self.option == 2 else "")

    def init_server(self, task, w0, n):
        return {"w": w0, "c": zeros_like(w0)}

    def init_client(self, task, w0):
        return {"c": zeros_like(w0)}

    def downlink(self, server, round):
        return Down(shared={"w": server["w"], "c": server["c"]})

    def local_update(self, task, client, down, data, round):
        x, c, ci = down["w"], down["c"], client["c"]
        dw = local_sgd(task, x, data, self.lr, shift=c, minus=ci).sub_(x)  # (3)
        if self.option == 1:
            dc = task.gradient(x, data.whole())[0] - ci  # (4), option I
        else:
            dc = (dw / (-self.lr * data.steps[:, None].to(x.dtype))).sub_(c)  # (4), option II
        return {"c": ci + dc}, {"dw": dw, "dc": dc}

    def conserved(self, server, clients):
        return {"c = mean c_i": server["c"] - clients["c"].mean(0)}

    def aggregate(self, server, up, round):  # (5)
        return {"w": server["w"] + self.server_lr * up.mean("dw"), "c": server["c"] + up.sum("dc") / round.n}
