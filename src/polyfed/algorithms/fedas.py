"""FedAS: Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024."""

from dataclasses import dataclass
from typing import Literal

from polyfed.algorithms._shared.parts import assemble, part, some, split
from polyfed.base.settings import setting
from polyfed.compute.batches import Batch
from polyfed.compute.solvers import local_sgd
from polyfed.compute.terms import members
from polyfed.core.algorithm import Algorithm, Portrait, mean


@dataclass(frozen=True)
class FedAS(Algorithm):
    """A shared body and personal heads; m_ic are the mean features of class c by the client's old body.

        B_i <- align_epochs of SGD from B on sum_c mean_{j of c} ||f_j - m_ic||^2 / d, over the classes of a batch
        (B_i, h_i) <- local SGD on f_i from (B_i, h_i)
        F_i = trace of the Fisher information of (B_i, h_i)        B <- sum_S F_i B_i / sum_S F_i

    Client i deploys the common body with its own head.

    Notes
    -----
    The alignment is a solve of its own, with the head frozen. The released code aligns the server's own body in place,
    so that the second client begins where the first one ended.
    """

    lr: float = setting(0.005, source="code", doc="Step size of local SGD.")
    align_lr: float = setting(0.01, step_size=True, source="code", doc="Step size of the alignment; 0: none.")
    align_epochs: int = setting(1, source="code", doc="Passes of the alignment.")
    fisher: Literal["sample", "batch"] = setting(
        "sample",
        source="paper",
        doc='F_i: "sample", the mean square of the samples\' gradients; "batch", the sum over a pass of the squares of '
        "the batches' gradients, as released, which depends on their size.",
    )

    def init_server(self, task, w0, n):
        assert task.width > 0  # which refuses a model whose last layer is not linear
        assert task.classes > 0  # and this a loss without classes
        return {"w": split(some(part(task.layout, "body"), self, task.layout), w0)[0]}

    def init_client(self, task, w0):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        body, old = part(task.layout, "body"), client["w"]
        w = self.personal(task, client, down)
        if self.align_lr and self.align_epochs:
            w = self._aligned(task, w, task.class_means(old, data), body, data.again("align", epochs=self.align_epochs))
        w = local_sgd(task, w, data, self.lr)
        return {"w": w}, {"w": split(body, w)[0], "fisher": self._fisher(task, w, data)}

    def _aligned(self, task, w, M, body, data):
        """w with its body aligned to the class means M: [s, C, d]."""

        def away(features, outputs, batch, rows):
            own = batch.y[..., None].expand(-1, -1, task.width)
            mass = batch.mean(members(batch.y, M.shape[1]).to(M)).gather(1, batch.y)
            return batch.mean((features - M[rows].gather(1, own)).square().mean(2) / mass.clamp(min=1e-30))

        start = w.clone()
        for view in task.layout.head(start):
            view.zero_()  # so that the body sees no other loss
        aligned = local_sgd(task, start, data, self.align_lr, only=body.to(w), also=away)
        return assemble(body, split(body, aligned)[0], split(body, w)[1])

    def _fisher(self, task, w, data):
        """[s] traces at w."""
        total = w.new_zeros(len(w))
        if self.fisher == "batch":
            for batch in data.again("fisher", epochs=1):
                m, live = batch.rows, 1.0 if batch.live is None else batch.live[:, 0]
                total[:m] += live * task.gradient(w[:m], batch, need_loss=False)[0].square().sum(1)
            return total
        every = data.whole()
        for k in range(every.x.shape[1]):
            g = task.gradient(w, Batch(every.x[:, k : k + 1], every.y[:, k : k + 1]), need_loss=False)[0]
            share = 1 / every.x.shape[1] if every.weight is None else every.weight[:, k].to(w)
            total += share * g.square().sum(1)
        return total

    def aggregate(self, server, up, round):
        return {"w": mean(up["w"], up["fisher"].clamp(min=1e-30))}

    def personal(self, task, client, down):
        body = part(task.layout, "body")
        return assemble(body, down["w"], split(body, client["w"])[1])

    def describe(self, server):
        return Portrait()
