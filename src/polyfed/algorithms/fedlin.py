"""FedLin: Mitra et al., NeurIPS 2021, Algorithm 1."""

from dataclasses import dataclass

from torch import zeros_like

from polyfed.algorithms._shared.topk import dense, misplaced, top_k
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs


@dataclass(frozen=True)
class FedLin(Algorithm):
    """FedTrack with a step size per client, lr / tau_i, and with top-k sparsified gradients.

        exchange 1    h_i = C_up(rho_i + grad f_i(x)),        rho_i <- rho_i + grad f_i(x) - h_i
                      g = C_down(e + mean_S h_i),             e <- e + mean_S h_i - g
        exchange 2    x_i <- x_i - lr/tau_i (grad f_i(x_i) - grad f_i(x) + g), tau_i steps from x;   x <- mean_S x_i

    C keeps the entries of largest magnitude, sent as values and positions; the models go dense. Sparsified on the
    server the convergence stays exact; sparsified at the clients it stops at a distance that grows with their
    differences.

    Notes
    -----
    The theory assumes full participation; otherwise both means run over the round's participants.
    """

    linear_claims = "its linear rate and its exact optimum"
    linear_only = True

    lr: float = setting(
        0.5,
        source="ours",
        doc="Step of a whole round; a client that takes tau_i local steps makes them lr / tau_i long.",
    )
    keep_up: float | None = setting(
        None,
        gt=0,
        le=1,
        source="paper",
        doc="Share of the gradient's entries that a client sends up, in (0, 1]; None: all of them, without positions.",
    )
    keep_down: float | None = setting(
        None,
        gt=0,
        le=1,
        source="paper",
        doc="Share of the mean gradient's entries that the server sends down, in (0, 1]; None: all of them, likewise.",
    )

    needs = Needs(
        exchanges=2, plain_sgd="its steps of lr / tau_i are alike in length only where a step is lr times the direction"
    )

    def init_server(self, task, w0, n):
        return {"w": w0, "g": zeros_like(w0), "e": zeros_like(w0)}

    def init_client(self, task, w0):
        return {"x": w0, "g": zeros_like(w0), "rho": zeros_like(w0)}

    def downlink(self, server, round):
        if round.phase == 0:
            return Down(shared={"w": server["w"]})
        if self.keep_down is None:
            return Down(shared={"g": server["g"]})
        return Down(shared={name: t[0] for name, t in top_k(server["g"][None], self.keep_down).items()})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            g = task.gradient(down["w"], data.whole(), need_loss=False)[0]
            state = {"x": down["w"], "g": g}
            if self.keep_up is None:
                return state, {"h": g}
            h = top_k(client["rho"] + g, self.keep_up)
            return state | {"rho": client["rho"] + g - dense(h, task.p)}, h
        gi, g = client["g"], down["g"] if self.keep_down is None else dense(down, task.p)
        lr = self.lr / data.steps[:, None].to(g.dtype)
        return {}, {"w": local_sgd(task, client["x"], data, lr, shift=g, minus=gi)}

    def accepts(self, task, up):
        return misplaced(up.get("at"), task.p)

    def aggregate(self, server, up, round):
        if round.phase == 1:
            return server | {"w": up.mean("w")}
        h = up.mean("h") if self.keep_up is None else dense(up, len(server["w"])).mean(0)
        whole = server["e"] + h
        g = whole if self.keep_down is None else dense(top_k(whole[None], self.keep_down), len(whole))[0]
        return server | {"g": g, "e": whole - g}
