"""FedRoD: Chen, Chao, ICLR 2022, with linear heads."""

from dataclasses import dataclass

from polyfed.algorithms._shared.margins import decay, shifted, undo
from polyfed.base.settings import setting
from polyfed.compute.steps import affine
from polyfed.core.algorithm import Algorithm, Needs


@dataclass(frozen=True)
class FedRoD(Algorithm):
    """Body B and generic head h by balanced softmax, averaged; a personal head p_i on top, which stays.

        (B_i, h_i) by local SGD from (B, h) on CE(h(f) + gamma log n_i, y),   f = B(x), n_i the client's class counts
        p_i by local SGD on CE(h(f) + p_i(f), y), h and f as they are         same batches, same weights
        (B, h) <- sum_i n_i (B_i, h_i) / sum_i n_i

    Client i deploys B with the head h + p_i, which are linear: their sum is one head.

    Notes
    -----
    (B, h) alone is the generic model, for clients that never trained. A class without samples at a client is masked in
    its balanced loss. The variant that makes p_i from the class shares by a common network is left out.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    personal_lr: float = setting(
        0.1, step_size=True, source="ours", doc="Step size of the personal head; 0 keeps none."
    )
    gamma: float = setting(
        1.0, ge=0, source="paper", doc="Power of the class counts in the balanced loss; 0: not balanced."
    )

    needs = Needs(plain_sgd="it steps two heads on one body itself")

    def init_server(self, task, w0, n):
        assert task.classes > 0  # which refuses a model or loss without classes
        return {"w": w0}

    def init_client(self, task, w0):
        return {"head": w0.new_zeros(int(task.layout.mask("head").sum()))}

    def local_update(self, task, client, down, data, round):
        x, own, at = down["w"], client["head"].clone(), self._head(task, down["w"])
        margin = self.gamma * data.counts(task.classes).log() if self.gamma else x.new_zeros(len(x), task.classes)
        w = shifted(task, x, margin)
        drift = affine(task.net, w, self.lr, minus=decay(task, x, margin)).summed()
        for batch in data:
            m, live = batch.rows, 1.0 if batch.live is None else batch.live
            both = undo(task, w[:m].clone(), margin[:m], x[:m])
            generic = both.index_select(1, at)
            both.index_add_(1, at, own[:m])
            slope = task.gradient(both, batch, need_loss=False)[0].index_select(1, at) - task.net.weight_decay * generic
            task.descend_(w[:m], batch, self.lr, drift.first(m))
            own[:m] -= self.personal_lr * live * slope
        return {"head": own}, {"w": undo(task, w, margin, x)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}

    def personal(self, task, client, down):
        return down["w"].index_add(1, self._head(task, down["w"]), client["head"])

    def _head(self, task, w):
        """Places of the last layer's numbers in w: [s, p]."""
        return task.layout.mask("head").nonzero()[:, 0].to(w.device)
