"""FedAvg: local SGD from the common model, then the mean. McMahan et al., AISTATS 2017, Algorithm 1."""

from dataclasses import dataclass
from typing import Any

import torch

from polyfed.base.plugins import sibling
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Server, State, mean


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: one common model.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i

    McMahan et al. (2017), Algorithm 1.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(
        True, source="paper", doc="Weigh clients by their number of samples, as in the paper; False: plain mean."
    )
    aggregation_error: bool = setting(
        False,
        source="ours",
        doc="Record in the history what the means of LoRA factors miss of the mean of their products, over that. It "
        "takes every client's upload to the server, where the sum is enough without.",
    )

    linear_claims = "its means"

    def init_server(self, task, w0, n) -> State | Server:
        lora = self._lora() if self.aggregation_error else None
        error = lora.noted(lora.places(task.layout, self)) | {"error": w0.new_zeros(())} if lora else {}
        return {"w": w0, **error}

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        new = server | {"w": up.mean("w", round.samples if self.weighted else None)}
        if self.aggregation_error:  # sum_i p_i (B_i - B)(A_i - A) is the mean of products less the product of means
            p = round.samples if self.weighted else torch.ones_like(round.samples)
            own, w = up["w"], mean(up["w"], p)
            lora, layers = self._lora(), self._lora().known(server)
            new["error"] = lora.missed(layers, w, lora.means(layers, own - w, p))
        return new

    def _lora(self) -> Any:
        return sibling("polyfed_adapters.lora", "algorithm.aggregation-error")

    def describe(self, server):
        error = {"aggregation_error": server["error"]} if self.aggregation_error else {}
        return super().describe(server)._replace(findings=error)
