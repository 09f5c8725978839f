"""FedEx-LoRA: Singhal, Ponkshe, Vepakomma, ACL 2025."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import mean
from polyfed_adapters.lora import Merging, known, means, missed


@dataclass(frozen=True)
class FedExLoRA(Merging):
    """Factors are averaged as in FedIT; the difference to the exact mean of the updates goes into the weights.

        (A_i, B_i, h_i) <- local SGD on f_i from (A, B, h), R frozen
        A <- sum_i p_i A_i,   B <- sum_i p_i B_i,   h <- sum_i p_i h_i              p_i = n_i / sum_j n_j
        R <- R + sum_i p_i B_i A_i - (sum_i p_i B_i)(sum_i p_i A_i)

    The model's weights are W0 + c (R + B A).

    Notes
    -----
    A round raises the rank of R by at most (clients - 1) r. All of R goes down, as two factors where these are fewer
    numbers, so that a client need not have been in the rounds before; the paper's server sends each round's residual,
    and its p_i are equal. `aggregation_error` of the history is the length of the last round's residual over that of
    the mean of the updates: what FedIT's means would have missed.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(True, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")  # pyrefly: ignore[bad-override]

    name = "fedex-lora"

    def init_server(self, task, w0, n):
        return super().init_server(task, w0, n) | {"error": w0.new_zeros(())}

    def local_update(self, task, client, down, data, round):
        w, _, trained = self.received(task, down)
        w = local_sgd(task, w, data, self.lr, only=trained.to(w))
        return {}, {"w": split(trained, w)[0]}

    def aggregate(self, server, up, round):
        own, trained, weights = self.uploaded(server, up, round)
        w = assemble(trained, mean(up["w"], weights), split(trained, server["w"])[1])
        own -= w  # sum_i p_i (B_i - B)(A_i - A) is the mean of products less the product of means
        more = means(known(server), own, weights)
        return self.merged(server, w, more) | {"error": missed(known(server), w, more)}

    def describe(self, server):
        return super().describe(server)._replace(findings={"aggregation_error": server["error"]})
