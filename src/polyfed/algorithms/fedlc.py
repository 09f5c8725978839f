"""FedLC: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022."""

from dataclasses import dataclass

from polyfed.algorithms._shared.margins import decay, shifted, undo
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedLC(Algorithm):
    """Logits calibration: in training every logit loses a margin, the larger the rarer its class is at the client.

        w_i = local SGD from w on the mean of CE(z - tau n_ic^(-1/4), y),   z the logits, n_ic samples of class c
        w <- sum_i n_i w_i / sum_i n_i

    Notes
    -----
    A class without samples at a client has an infinite margin, and is masked in its training. The margins are a shift
    of the last layer's bias, taken back before the model is sent.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    tau: float = setting(1.0, ge=0, source="ours", doc="Strength of the calibration; 0 is FedAvg.")

    def init_server(self, task, w0, n):
        assert task.classes > 0  # which refuses a model or loss without classes
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        margin = -self.tau * data.counts(task.classes).pow(-0.25) if self.tau else x.new_zeros(len(x), task.classes)
        w = local_sgd(task, shifted(task, x, margin), data, self.lr, minus=decay(task, x, margin))
        return {}, {"w": undo(task, w, margin, x)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
