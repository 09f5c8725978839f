"""FedAvg-FT: FedAvg followed by fine-tuning. Collins et al., "FedAvg with Fine Tuning", NeurIPS 2022."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Personal


@dataclass(frozen=True)
class FedAvgFT(Personal):
    """Federated averaging with local fine-tuning, the simplest personalisation.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i
        v_i = finetune_epochs of SGD from w on f_i; client i deploys v_i, which never leaves it

    Notes
    -----
    A client fine-tunes the model it receives whenever it takes part: v_i belongs to the common model of its last
    participation, one round before the server's latest at best. Until then it deploys the initial model.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    finetune_epochs: int = setting(1, ge=0, source="ours", doc="Passes over the local data, from the common model.")
    finetune_lr: float = setting(0.1, step_size=True, source="ours", doc="Step size of fine-tuning.")
    finetune_from: int = setting(0, ge=0, source="ours", doc="First round of fine-tuning; w is deployed before.")
    weighted: bool = setting(True, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")

    name = "fedavg-ft"

    def init_server(self, task, w0, n):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        w = local_sgd(task, down["w"], data, self.lr)
        if round.t < self.finetune_from:
            return {"w": down["w"]}, {"w": w}
        again = data.again("finetune", epochs=self.finetune_epochs)
        return {"w": local_sgd(task, down["w"], again, self.finetune_lr)}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples if self.weighted else None)}
