"""FedTrack: FedLin (Mitra et al., NeurIPS 2021) without compression, with one step size for all."""

from dataclasses import dataclass

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs


@dataclass(frozen=True)
class FedTrack(Algorithm):
    """Gradient tracking: local steps corrected by fresh full-batch gradients, linearly convergent under drift.

        exchange 1    g_i = grad f_i(x),   g = mean_S g_i
        exchange 2    x_i <- x_i - lr (grad f_i(x_i) - g_i + g), from x;   x <- mean_S x_i

    SCAFFOLD with option I, with controls that are not one round old.

    Notes
    -----
    The theory assumes full participation; otherwise both means run over the round's participants.
    """

    linear_claims = "its linear rate and its exact optimum"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Local step size.")

    needs = Needs(exchanges=2, plain_sgd="its linear rate is that of gradient steps with a tracked gradient")

    def init_server(self, task, w0, n):
        return {"w": w0, "g": zeros_like(w0)}

    def init_client(self, task, w0):
        return {"x": w0, "g": zeros_like(w0)}

    def downlink(self, server, round):
        return Down(shared={"w": server["w"]} if round.phase == 0 else {"g": server["g"]})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            g = task.gradient(down["w"], data.whole(), need_loss=False)[0]
            return {"x": down["w"], "g": g}, {"g": g}
        gi, g = client["g"], down["g"]
        w = local_sgd(task, client["x"], data, self.lr, shift=g, minus=gi)
        return {}, {"w": w}

    def aggregate(self, server, up, round):
        return server | {name: up.mean(name) for name in up}
