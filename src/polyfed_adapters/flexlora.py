"""FlexLoRA: Bai, Chen, Qian, Yao, Li, NeurIPS 2024."""

from dataclasses import dataclass

import torch

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import mean
from polyfed_adapters.lora import Ranked, below, known, means, places, ranks


@dataclass(frozen=True)
class FlexLoRA(Ranked):
    """Client i trains factors of its own rank r_i, and takes the first r_i of the mean's singular vectors.

        (A_i, B_i, h_i) <- local SGD on f_i from the first r_i rows of A and columns of B
        U S V' = sum_i p_i B_i A_i,   B <- U sqrt(S),   A <- sqrt(S) V',   h <- sum_i p_i h_i    p_i = n_i / sum_j n_j

    Client i deploys the first r_i of them. The adapter's rank is the largest.

    Notes
    -----
    The decomposition is exact and never makes the full matrix: QR of the stacked factors, SVD of what is between. c is
    that of the adapter's rank for every client. Messages are padded to the largest rank, and billed so.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    least: int | None = setting(
        None,
        ge=1,
        source="ours",
        doc="Least rank; clients draw theirs from it to the adapter's. Default: all have that.",
    )
    weighted: bool = setting(True, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")

    adapter_train = "factors"

    def local_update(self, task, client, down, data, round):
        keep = self._keep(task, down)
        return {}, {"w": local_sgd(task, keep * down["w"], data, self.lr, only=keep)}

    def aggregate(self, server, up, round):
        own, weights = up["w"], round.samples if self.weighted else torch.ones_like(round.samples)
        w, layers = mean(own, weights), known(server)
        for name, (left, right) in means(layers, own, weights).items():
            place = layers[name]
            q = min(place.r, len(right))
            place.part(w, "A").zero_()[:q] = right[:q]
            place.part(w, "B").zero_()[:, :q] = left[:, :q]
        return server | {"w": w}

    def personal(self, task, client, down):
        return self._keep(task, down) * down["w"]

    def _keep(self, task, down):
        """[s, p], 1 inside the clients' ranks and 0 beyond."""
        layers = places(task.layout, self).values()
        return below(layers, ranks(layers, down["draw"], self.least), task.p)
