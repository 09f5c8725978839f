"""HetLoRA: Cho, Liu, Xu, Fahrezi, Joshi, EMNLP 2024, Algorithm 1."""

from dataclasses import dataclass

import torch

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import mean
from polyfed_adapters.lora import Ranked, below, known, places, ranks


@dataclass(frozen=True)
class HetLoRA(Ranked):
    """Client i trains the first r_i rows of A and columns of B, and gives up those that shrink.

        (A_i, B_i, h_i) <- local SGD on f_i + lam sum_l ||tail of B_i|| ||tail of A_i||     tail: from gamma r_i on
        r_i <- gamma r_i  for a layer where that product is less than before
        (A, B, h) <- sum_i s_i (A_i, B_i, h_i) / sum_i s_i,   padded with zeros      s_i = ||all B_i A_i||_F

    Client i deploys the first r_i rows of A and columns of B.

    Notes
    -----
    Ranks are kept per layer and are at least 1. Messages are padded to the adapter's rank, and billed so.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    least: int | None = setting(
        None, ge=1, source="ours", doc="Least first rank; clients draw theirs up to the adapter's. Default: all that."
    )
    lam: float = setting(0.01, ge=0, source="ours", doc="Weight of the penalty on the tails.")
    gamma: float = setting(0.99, gt=0, le=1, source="ours", doc="Where the tail begins; 1: there is none.")

    adapter_train = "factors"

    def init_client(self, task, w0):
        return {"rank": w0.new_tensor([place.r for place in places(task.layout, self).values()])}

    def local_update(self, task, client, down, data, round):
        layers = places(task.layout, self).values()
        rank = torch.minimum(client["rank"], ranks(layers, down["draw"], self.least))
        less = (self.gamma * rank).floor().clamp(min=1)
        keep, body = below(layers, rank, task.p), below(layers, less, task.p)
        start = keep * down["w"]

        def penalised(w, g):
            """The gradient with that of lam ||B_t|| ||A_t||, which is lam ||A_t|| B_t / ||B_t|| for B."""
            tails, g = w * (keep - body), g.clone()
            for place in layers:
                A, B = place.part(tails, "A"), place.part(tails, "B")
                a, b = (torch.linalg.matrix_norm(part)[:, None, None] for part in (A, B))
                tiny = torch.finfo(w.dtype).tiny
                place.part(g, "A").add_(self.lam * b / a.clamp(min=tiny) * A)
                place.part(g, "B").add_(self.lam * a / b.clamp(min=tiny) * B)
            return g

        correct = penalised if self.lam and self.gamma < 1 else None
        w = local_sgd(task, start, data, self.lr, only=keep, correct=correct)
        before, after = (self._tails(layers, v * (keep - body)) for v in (start, w))
        rank = torch.where(after < before, less, rank)
        return {"rank": rank}, {"w": below(layers, rank, task.p) * w}

    def _tails(self, layers, w):
        """[s, layers]: ||B|| ||A|| of every layer."""
        norm = torch.linalg.matrix_norm
        return torch.stack([norm(place.part(w, "B")) * norm(place.part(w, "A")) for place in layers], 1)

    def aggregate(self, server, up, round):
        squares = torch.zeros_like(round.samples)
        for place in known(server).values():
            A, B = place.part(up["w"], "A"), place.part(up["w"], "B")
            squares = squares + ((B.mT @ B) * (A @ A.mT)).sum((1, 2))
        weights = squares.clamp(min=0).sqrt()
        return server | {"w": mean(up["w"], weights if weights.any() else None)}

    def personal(self, task, client, down):
        layers = places(task.layout, self).values()
        rank = torch.minimum(client["rank"], ranks(layers, down["draw"], self.least))
        return below(layers, rank, task.p) * down["w"]
