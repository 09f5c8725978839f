"""q-FedAvg: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2.
AFL: Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019. TERM: Li, Beirami, Sanjabi, Smith, "Tilted
Empirical Risk Minimization", ICLR 2021."""

from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.parts import without_statistics
from polyfed.algorithms._shared.similarity import simplex
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Needs, Server, by_settings

LEAST = 1e-10  # of a loss, whose logarithm is taken


@dataclass(frozen=True)
class QFedAvg(Algorithm):
    """Fair averaging: min_x sum_i F_i(x)^(q+1) / (q+1); the higher a client's loss, the more it counts.

        dw_i = x - w_i,   w_i = local SGD from x on F_i;   F_i = the loss at x on all of the client's training samples
        x <- x - sum_S F_i^q dw_i / sum_S (F_i^q + q F_i^(q-1) ||dw_i||^2 / lr)                   q-FedAvg, L = 1/lr
        x <- x - sum_S l_i dw_i,   l_i proportional to n_i exp(q F_i)                             TERM, tilt q
        l <- projection of l + q F onto the simplex;  x <- x - sum_S l_i dw_i / sum_S l_i         AFL, step size q

    Notes
    -----
    Clients count the same in q-FedAvg and in the start of AFL, whatever their number of samples. AFL moves the cohort's
    weights alone, by q F_i each however many take part, and their projection keeps their sum.
    """

    name = "q-fedavg"

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    q: float = setting(
        1.0, ge=0, source="ours", doc="Strength of fairness; 0 is FedAvg: with plain mean, but for TERM."
    )
    form: Literal["q", "term", "afl"] = setting("q", source="paper", doc='"q" of q-FedAvg, "term" or "afl".')

    @by_settings
    def needs(self):
        why = "1 / lr times the move of plain SGD stands for a gradient"
        return Needs(plain_sgd=why if self.form == "q" else "")

    def init_server(self, task, w0, n):
        without_statistics(task, self.name)  # which it moves by powers of losses
        return Server({"w": w0}, {"weight": w0.new_ones(n)} if self.form == "afl" else {})

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        loss = task.loss_of(x, data.whole()).clamp(min=LEAST)
        dw = x - local_sgd(task, x, data, self.lr)
        square = dw.square().sum(1) / (loss * self.lr) if self.lr else torch.zeros_like(loss)
        return {}, {"dw": dw, "loss": loss[:, None], "square": square[:, None]}

    def aggregate(self, server, up, round):
        loss, w = up["loss"][:, 0].clamp(min=LEAST), server["w"]
        if self.form == "afl":
            old, n = server["weight"][round.ids], len(server["weight"])  # n times the weights, which add up to 1
            new = simplex((old + n * self.q * loss) / old.sum())
            weight = server["weight"].index_copy(0, round.ids, new * old.sum())
            return server | {"w": w - new @ up["dw"], "weight": weight}
        if self.form == "term":
            return {"w": w - (round.samples.log() + self.q * loss).softmax(0) @ up["dw"]}
        r = (self.q * (loss.log() - loss.log().max())).exp()  # F^q over its largest, which cancels
        return {"w": w - r @ up["dw"] / (r * (1 + self.q * up["square"][:, 0].clamp(min=0))).sum()}
