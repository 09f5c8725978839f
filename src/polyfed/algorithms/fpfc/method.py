"""FPFC: Yu et al. (arXiv 2211.04218), Algorithm 2; equations (1) to (6)."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch

from polyfed.algorithms._shared.parts import assemble, part, split
from polyfed.algorithms.fpfc import servers
from polyfed.algorithms.fpfc.newcomer import Joining
from polyfed.algorithms.fpfc.penalty import Fusion
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Portrait, by_settings, mean


@dataclass(frozen=True)
class FPFC(Algorithm):
    """Fusion penalised federated clustering: one model per cluster, the clusters found in training.

        min sum_i f_i(w_i) + 1/(2n) sum_{i,j} g(||w_i - w_j||)                                          (1)
        g: SCAD, smoothed below xi                                                                      (2), (3)
        device   w_i <- w_i - lr (grad f_i(w_i) + rho (w_i - zeta_i)), from its own last w_i            (5)
        server   delta = w_i - w_j + v_ij / rho,  theta_ij = c(||delta||) delta                         (6)
                 v_ij <- v_ij + rho (w_i - w_j - theta_ij)        for pairs with at least one participant
                 zeta_i = (1/n) sum_j (w_j + theta_ij - v_ij / rho)

    Clusters are the connected components of ||theta_ij|| <= nu; a cluster's model is the mean of its clients' models,
    weighted by samples (Remark 2).

    Notes
    -----
    A warm start, `fit(..., start=run)`, from another FPFC run keeps w and v, whatever the lam; from the models of
    another method, such as Local, theta_ij = w_i - w_j and v = 0, so that zeta_i = w_i (theta = 0 would pull every
    client to the mean). From a common start the two coincide.

    Both solvers have the same fixed points and reach them differently. From a common start, too large a lam with
    device-dual gives the right clusters and poor models, and the range of useful lam ends lower: choose lam by the
    validation metric, or on a path. Its messages, in place of zeta, are as large. It needs replies in their round: an
    asynchronous schedule needs solver "pairs".

    For the range of lam that a grouping allows, run `polyfed tune fpfc --window` before a run, for the groups the data
    name, or add `polyfed.WindowAdvice(every=200)`, a callback of `fit`, for those found so far. The paper's convergence
    theorem asks for a larger rho than its experiments have; `polyfed.algorithms.fpfc.proven` chooses it.

    The server's memory is n (n-1) / 2 vectors of p numbers with pairs, and 2 n vectors and n x n coefficients with
    device-dual; `plan` says how much.
    """

    linear_claims = "its distances between models, and so its clusters,"
    linear_only = True

    lr: float = setting(0.1, source="paper", doc="Step size of the local solve.")
    lam: float = setting(
        0.6,
        ge=0,
        source="code",
        tune=True,
        doc="Strength of fusion. From a common start useful values lie far below those for a warm start.",
    )
    rho: float = setting(
        1.0, gt=0, source="paper", doc="Penalty parameter of ADMM; above 1/(a-1), or rule (6) is not the proximal step."
    )
    a: float = setting(
        3.7, source="paper", doc="Shape of SCAD: differences beyond a lam are not penalised any further."
    )
    xi: float = setting(1e-4, ge=0, source="paper", doc="Width of SCAD's smoothed tip; below lam.")
    nu: float | None = setting(
        None, ge=0, source="code", doc="Distance below which two clients share a cluster; None: 0.1."
    )
    penalty: Literal["scad", "l1"] = setting(
        "scad", source="paper", doc='"scad" or "l1" (the group norm; FPFC-l1 in the paper).'
    )
    merge: bool = setting(True, source="paper", doc="Clients deploy their cluster's model; False: their own.")
    shared_layers: str = setting(
        "",
        source="paper",
        doc='Layers that all clients have in common, names separated by spaces ("body", "head", beginnings of '
        "parameter names): trained without the pull to zeta, averaged over the round's participants, weighted "
        "by samples, and sent to the next ones. Only the others are fused, paired and clustered. A robust rule "
        "acts on their mean.",
    )
    solver: Literal["auto", "pairs", "device-dual"] = setting(
        "auto",
        source="ours",
        doc='"pairs" as above; "device-dual" for many clients: one dual per client and n x n coefficients, the same '
        'objective (1) by Douglas-Rachford steps (`devicedual`); "auto": pairs up to 200 clients, device-dual '
        "above.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.penalty == "scad":
            self.require(self.a > 1, "a", "a number above 1")
            self.require(self.rho > 1 / (self.a - 1), "rho", f"a number above 1/(a-1) = {1 / (self.a - 1):.4g}")
            self.require(self.lam == 0 or self.lam > self.xi, "lam", f"0, or a number above xi = {self.xi:g}")
        servers.of(self, 0)

    @by_settings
    def needs(self):
        return servers.needs(self)

    @property
    def within(self):
        """The distance nu."""
        return 0.1 if self.nu is None else self.nu

    @property
    def fusion(self):
        return Fusion(self.lam, self.rho, self.a, self.xi, self.penalty, delta=self.within / 2)

    @property
    def least_rho(self):
        """max(2 lam/xi, 2/(a-1)): the bound of (13) on rho for Theorem 2, beside 3 L_f (by Remark 4's example)."""
        if self.penalty != "scad" or (self.lam and not self.xi):
            return inf
        return max(2 * self.lam / self.xi if self.lam else 0.0, 2 / (self.a - 1))

    def theory(self):
        """Check condition (13), under which training is proven to converge; it is not necessary."""
        if self.least_rho == inf:
            return "no rho meets condition (13), sufficient for convergence: it needs smoothed SCAD"
        met = "meets" if self.rho > self.least_rho else "does not meet"
        return (
            f"rho = {self.rho:g} {met} condition (13), sufficient for convergence: above {self.least_rho:.4g} and 3 L_f"
        )

    def _start(self, task, w, n, samples=None):
        """The server's tensors from the common start [p] or from the clients' models [n, p] and their own layers."""
        common, own = split(part(task.layout, self.shared_layers), w)
        state = servers.of(self, n).start(own, n, self.fusion)
        if self.shared_layers:
            state |= {"common": common if samples is None else mean(common, samples)}
        return state, own

    def init_server(self, task, w0, n):
        return servers.by_axes(self._start(task, w0, n)[0])

    def warm_start(self, task, models, samples):
        """The server's tensors with theta_ij = w_i - w_j, v = 0, the shared layers averaged."""
        state, own = self._start(task, models, len(models), samples)
        return state, {"w": own}

    def init_client(self, task, w0):
        return {"w": self._own(task, w0)}

    def _own(self, task, w):
        """w without the shared layers."""
        return split(part(task.layout, self.shared_layers), w)[1]

    def admit(self, task, server, samples):
        return Joining(self, task, server, samples)

    def downlink(self, server, round):
        common = {"common": server["common"]} if self.shared_layers else {}
        if not server["w"].shape[1]:  # all layers are shared
            return Down(common)
        solver = servers.of(self, round.n)
        return Down(common, {"zeta": solver.messages(solver.current(server, self.fusion), round.ids)})

    def local_update(self, task, client, down, data, round):
        """(5) on a client's own layers, from its last; plain SGD on the shared ones, from the common."""
        own = client["w"]
        if not self.shared_layers:
            w = local_sgd(task, own, data, self.lr, pull=(self.rho, down["zeta"]))
            return {"w": w}, {"w": w}
        shared = part(task.layout, self.shared_layers).to(own.device)
        rho = self.rho * (~shared).to(own.dtype)
        zeta, w = (assemble(shared, down["common"], x) for x in (down.get("zeta", own), own))
        w = local_sgd(task, w, data, self.lr, pull=(rho, zeta))
        common, own = split(shared, w)
        return {"w": own}, {"w": own, "common": common}

    def aggregate(self, server, up, round):
        """Renew the participants' part of the state, in place."""
        solver = servers.of(self, round.n)
        state = solver.advance(solver.current(server, self.fusion), round.ids, up["w"], self.fusion, round.t)
        if not self.shared_layers:
            return state
        return state | {"common": up.mean("common", round.samples)}

    def clusters(self, server):
        """[n] labels: clients within nu of one another, in a chain, numbered by their first client."""
        solver = servers.of(self, len(server["w"]))
        return solver.clusters(solver.current(server, self.fusion), self.within)

    def cluster_models(self, server):
        """[n, q]: for every client the model of its cluster (without shared layers), the mean weighted by samples."""
        group, w = self.clusters(server), server["w"]
        weight = server["known"].clamp(min=1)[:, None]
        total = torch.zeros_like(w).index_add_(0, group, w * weight)
        mass = w.new_zeros(len(w), 1).index_add_(0, group, weight)
        return (total / mass.clamp(min=1))[group]

    def deployment(self, server, round):
        common = {"common": server["common"]} if self.shared_layers else {}
        return Down(common, {"w": self.cluster_models(server)[round.ids]} if self.merge else {})

    def personal(self, task, client, down):
        w = down["w"] if self.merge else client["w"]
        return assemble(part(task.layout, self.shared_layers), down["common"], w) if self.shared_layers else w

    def describe(self, server):
        w = server["w"]
        plan = {"plan": f"{servers.plan(self, len(w), w)}; {self.theory()}"}
        return Portrait(clusters=self.clusters(server), findings=plan | servers.of(self, len(w)).report(server))
