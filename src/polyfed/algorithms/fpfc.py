"""FPFC: clients fuse into clusters that the method finds itself. Yu et al., "Clustered Federated Learning based on
Nonconvex Pairwise Fusion" (arXiv 2211.04218), Algorithm 2; equations (1) to (6).

Stored per pair i < j: delta_ij = w_i - w_j + v_ij / rho and the factor c_ij of rule (6). Both theta_ij = c delta and
the dual v_ij = rho (1 - c) delta follow from them, so only one vector per pair is kept. For many clients the server is
that of `devicedual`.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import embedding_bag

from polyfed.algorithms import devicedual
from polyfed.algorithms.devicedual import Fusion
from polyfed.algorithms.partial import assemble, part
from polyfed.core.algorithm import Algorithm, Down, Server, mean
from polyfed.core.settings import setting
from polyfed.core.solvers import local_sgd

BLOCK = 1 << 18  # numbers per block of pair vectors, so that a block stays in the cache
AXES = {  # of both solvers' states; pairs in a list are no [n, n]
    **dict.fromkeys(("centre", "settings"), "shared"),
    **dict.fromkeys(("w", "Q", "groups"), "each"),
    **dict.fromkeys(("G",), "pairs"),
    **dict.fromkeys(("c", "row", "delta", "Om", "B", "f", "working"), "free"),
}
MOST_PAIRED = 200  # clients up to which solver "auto" keeps a vector per pair


def shrinkage(t: Tensor, lam: float, rho: float, a: float, xi: float, penalty: str) -> Tensor:
    """c(t) of rule (6): theta = c(||delta||) delta is the proximal step of the penalty, for norms t = ||delta||.

    penalty: "scad" is the smoothed SCAD (3), exact for rho > 1/(a-1); "l1" the group norm lam ||theta||.
    """
    if lam == 0:
        return torch.ones_like(t)
    safe = t.clamp(min=torch.finfo(t.dtype).tiny)
    soft = 1 - lam / (rho * safe)
    if penalty == "l1":
        return soft.clamp(min=0)
    k = 1 / ((a - 1) * rho)
    fused = torch.full_like(t, xi * rho / (lam + xi * rho))
    tapered = (1 - a * lam * k / safe) / (1 - k)
    c = torch.where(t <= xi + lam / rho, fused, soft)
    c = torch.where(t > lam + lam / rho, tapered, c)
    return torch.where(t > a * lam, torch.ones_like(t), c)


def pair_index(i: Tensor, j: Tensor, n: int) -> Tensor:
    """Position of the pair (i, j), i < j, in the list of all pairs in row order."""
    return i * (2 * n - i - 1) // 2 + j - i - 1


def _no_vectors(like: Tensor, pairs: int) -> dict[str, Tensor]:
    """`delta` [k, q], the vectors of the pairs that have one, and `row` [pairs], where: -1 for an idle pair.

    A pair is idle when it was free at its last two updates: v_ij = 0 and theta_ij = w_i - w_j, which needs no memory.
    On the meta device, where a run's memory is estimated, no pair is idle.
    """
    row = torch.full((pairs,), -1, dtype=torch.int64, device=like.device)
    return {"delta": like.new_empty(pairs if like.is_meta else 0, len(like)), "row": row}


def _unused(delta: Tensor, row: Tensor) -> Tensor:
    """Rows of `delta` that no pair has."""
    taken = torch.zeros(len(delta), dtype=torch.bool, device=delta.device)
    taken[row[row >= 0]] = True
    return (~taken).nonzero()[:, 0]


def _room(delta: Tensor, spare: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(vectors, unused rows) with at least `count` of the latter."""
    if count <= len(spare):
        return delta, spare
    more = delta.new_zeros(max(count - len(spare), len(delta) // 2), delta.shape[1])
    rows = torch.arange(len(delta), len(delta) + len(more), device=spare.device)
    return torch.cat([delta, more]), torch.cat([spare, rows])


def _compact(delta: Tensor, row: Tensor) -> Tensor:
    """The vectors without unused rows, once they are more than half; `row` follows, in place."""
    held = (row >= 0).nonzero()[:, 0]
    if 2 * len(held) >= len(delta):
        return delta
    delta = delta.index_select(0, row[held])
    row[held] = torch.arange(len(held), device=row.device)
    return delta


class Window(NamedTuple):
    """Bounds on lambda for a proposed grouping, see `lambda_window`.

    necessary, sufficient: below the one, the groups' models are not stationary; from the other on, they are
    unbiased: above it, the penalty pulls the groups' models towards each other
    excluded: below it, one common model is not stationary, as a common start needs
    """

    necessary: float
    sufficient: float
    unbiased: float
    excluded: float

    def lines(self) -> list[str]:
        """Each bound with its meaning."""
        held = [
            f"lam >= {self.necessary:.4g} is necessary for the groups' models to be stationary",
            f"lam >= {self.sufficient:.4g} is sufficient for it",
        ]
        if self.excluded == inf:
            return [*held, "one group: nothing bounds lam from above"]
        free = f"lam < {self.unbiased:.4g} leaves them unbiased: the penalty is flat at the distance of the closest two"
        if not self.unbiased:
            free = "no lam leaves them unbiased: this penalty pulls at every distance"
        return [*held, free, f"lam < {self.excluded:.4g} excludes one common model, where all clients start alike"]


def lambda_window(gradients: Tensor, merged: Tensor, models: Tensor, groups: Tensor, a: float = 3.7) -> Window:
    """For which lambda a proposed grouping is a stationary point of (1).

    With alpha_G the minimiser of sum_{i in G} f_i and g = |G|, among m clients:

        necessary    lam >= m/(g-1) max_i ||grad f_i(alpha_G)||                 (a client's pairs can hold its gradient)
        sufficient   lam >= m/g max_{i,j in G} ||grad f_i - grad f_j||           (v_ij = (m/g) (grad f_j - grad f_i))
        unbiased     a lam < min_{G,H} ||alpha_G - alpha_H||
        excluded     lam < m/(m-g) ||mean_{i in G} grad f_i(alpha_all)||         for some G

    The first two take the groups' models to be unbiased. They coincide for groups of two.

    gradients: [m, p] grad f_i at the model of i's own group     merged: [m, p] grad f_i at the common minimiser
    models: [m, p] alpha of i's own group     groups: [m] labels     a: shape of SCAD, infinite for the group norm
    A bound that does not apply (one group only) is infinite; that of single clients is 0.
    """
    m, labels = len(groups), groups.unique()
    members = [(groups == k).nonzero()[:, 0] for k in labels]
    necessary = sufficient = 0.0
    excluded = 0.0 if len(labels) > 1 else inf
    for at in members:
        own, g = gradients[at], len(at)
        if g > 1:
            necessary = max(necessary, m / (g - 1) * float(own.norm(dim=1).max()))
            sufficient = max(sufficient, m / g * float(torch.pdist(own).max()))
        if g < m:
            excluded = max(excluded, m / (m - g) * float(merged[at].mean(0).norm()))
    apart = torch.pdist(models[torch.stack([at[0] for at in members])])
    return Window(necessary, sufficient, float(apart.min()) / a if len(apart) else inf, excluded)


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

    Parameters
    ----------
    lr : float
        Step size of the local solve.
    lam : float
        Strength of fusion. From a common start useful values lie far below those for a warm start.
    rho : float
        Penalty parameter of ADMM; above 1/(a-1), or rule (6) is not the proximal step.
    a : float
        Shape of SCAD: differences beyond a lam are not penalised any further.
    xi : float
        Width of SCAD's smoothed tip; below lam.
    nu : float or None
        Distance below which two clients share a cluster; None: 0.1.
    penalty : str
        "scad" or "l1" (the group norm; FPFC-l1 in the paper).
    merge : bool
        Clients deploy their cluster's model; False: their own.
    shared_layers : str
        Layers that all clients have in common, names separated by spaces ("body", "head", beginnings of parameter
        names): trained without the pull to zeta, averaged over the round's participants, weighted by samples, and sent
        to the next ones. Only the others are fused, paired and clustered. A robust rule acts on their mean.
    solver : str
        "pairs" as above; "device-dual" for many clients: one dual per client and n x n coefficients, the same objective
        (1) by Douglas-Rachford steps (`devicedual`); "auto": pairs up to 200 clients, device-dual above.

    Notes
    -----
    A warm start, `fit(..., start=run)`: from another FPFC run w and v are kept, whatever the lam; from the models of
    another method, such as Local, theta_ij = w_i - w_j and v = 0, so that zeta_i = w_i (theta = 0 would pull every
    client to the mean). From a common start the two coincide.

    The solvers have the same fixed points and reach them in different ways. From a common start the range of useful lam
    ends lower with device-dual, where too large a lam gives the right clusters and poor models: choose lam by the
    validation metric, or on a path. Its messages, in place of zeta, are as large. It needs replies in the round they
    were asked for: an asynchronous schedule is refused, and needs solver "pairs".

    Which lam a grouping allows can be worked out: `polyfed tune fpfc --window` says it before a run, for the groups the
    data name; `polyfed.WindowAdvice(every=200)`, a callback of `fit`, during one, for those found so far.

    The server sees every client's model: the method cannot be combined with secure aggregation. Memory on the server:
    n (n-1) / 2 vectors of p numbers with pairs, 2 n vectors and n x n coefficients with device-dual; `plan` says how
    much.
    """

    lr: float = setting(0.1, source="paper")
    lam: float = setting(0.6, ge=0, source="code")
    rho: float = setting(1.0, gt=0, source="paper")
    a: float = setting(3.7, source="paper")
    xi: float = setting(1e-4, ge=0, source="paper")
    nu: float | None = setting(None, ge=0, source="code")
    penalty: Literal["scad", "l1"] = setting("scad", source="paper")
    merge: bool = setting(True, source="paper")
    shared_layers: str = setting("", source="paper")
    solver: Literal["auto", "pairs", "device-dual"] = setting("auto", source="ours")

    sources = "paper: lr, rho, a, xi, penalty, merge, shared_layers; code: lam, nu; ours: solver"
    traffic = "1 down, 1 up"
    certificates = (
        "tests/certificates/test_fpfc.py::test_rule_6_is_the_proximal_step: brute-force minimisation",
        "tests/certificates/test_fpfc.py::test_dual_only_storage_is_the_plain_double_loop: identity with (theta, v)",
        "tests/certificates/test_fpfc.py::test_without_fusion_clients_decouple: closed form at lam = 0",
        "tests/certificates/test_fpfc.py::test_stationarity_of_objective_1: the optimality conditions of (1)",
        "tests/certificates/test_fpfc.py::test_asynchronous_training_ends_stationary: the same, replies late",
        "tests/certificates/test_asynchronous.py::test_one_client_in_flight_is_the_synchronous_method: identity",
        "tests/certificates/test_fpfc.py::test_s1_finds_its_four_clusters: planted clusters, ARI 1",
        "tests/certificates/test_fpfc.py::test_with_all_layers_shared_it_is_fedavg: identity",
        "tests/certificates/test_fpfc.py::test_two_legs_are_one: a path continued with the same lam, bit for bit",
        "tests/certificates/test_devicedual.py::test_same_minimum_as_pairs: both solvers end in one minimum of (1)",
        "tests/certificates/test_devicedual.py::test_fixed_points_minimise_objective_1: closed form, device-dual",
        "tests/certificates/test_devicedual.py::test_coefficients_are_the_explicit_vectors: identity, device-dual",
    )
    citation = """@article{yu2022fpfc,
  title   = {Clustered Federated Learning based on Nonconvex Pairwise Fusion},
  author  = {Yu, Xue and Liu, Ziyi and Wang, Wu and Sun, Yifan},
  journal = {arXiv:2211.04218},
  year    = {2022}
}"""

    def __post_init__(self):
        super().__post_init__()
        if self.penalty == "scad":
            self.require(self.a > 1, "a", "a number above 1")
            self.require(self.rho > 1 / (self.a - 1), "rho", f"a number above 1/(a-1) = {1 / (self.a - 1):.4g}")
            self.require(self.lam == 0 or self.lam > self.xi, "lam", f"0, or a number above xi = {self.xi:g}")
        if self.solver == "device-dual":
            self.require(self.xi > 0, "xi", "a number above 0 with solver device-dual")

    def plan(self, task, n):
        """What a run with n clients is going to do: the solver, why, and the server's memory at its peak."""
        own = self._own(task, task.w0)
        return self._plan(n, len(own), own.element_size())

    def _plan(self, n, q, itemsize):
        pairs, why = n * (n - 1) // 2, self._why(n)
        if self._is_dual(n):
            solver, size = "device-dual", devicedual.memory(n, q, itemsize=itemsize)
        else:  # c, the two clients and a vector of every pair, two where it sets out from models; the clients' models
            solver, size = "pairs", pairs * (itemsize * (2 * q + 1) + 16) + 2 * itemsize * n * q
        return f"solver {solver} ({why}), server memory up to {size / 1e9:.2g} GB"

    def _why(self, n):
        if self.solver != "auto":
            return "as asked for"
        return f"{n:,} clients, {'more than' if self._is_dual(n) else 'up to'} {MOST_PAIRED}"

    def _is_dual(self, n):
        return self.solver == "device-dual" or (self.solver == "auto" and n > MOST_PAIRED)

    def in_step(self, n, t=0):
        if self._is_dual(n):
            return f'with solver device-dual ({self._why(n)}; solver "pairs" can) needs replies in their round'
        return None

    @property
    def _nu(self):
        return 0.1 if self.nu is None else self.nu

    @property
    def _fusion(self):
        return Fusion(self.lam, self.rho, self.a, self.xi, self.penalty, delta=self._nu / 2)

    def _start_dual(self, w, n):
        """The device-dual state from a common model [q] or from the clients' [n, q]."""
        self.require(self.xi > 0, "xi", "a number above 0 with solver device-dual")
        return {**devicedual.start(w, n, self._fusion), "settings": self._settings(w)}

    def _settings(self, like):
        """[6]: what the nodes and weights of a device-dual state were worked out for."""
        lam, rho, a, xi, penalty, delta = self._fusion
        values = [lam, rho, a, xi, penalty == "l1", delta]
        return torch.tensor(values, dtype=torch.float64, device=like.device)

    def _dual(self, server):
        """A device-dual state with nodes and weights for the present settings, where a path has changed them."""
        mine = self._settings(server["G"])
        if torch.equal(server["settings"], mine):
            return server
        return {**devicedual.reweigh(server, self._fusion), "settings": mine}

    def init_server(self, task, w0, n):
        own = self._own(task, w0)
        if self._is_dual(n):
            state = self._start_dual(own, n)
        else:
            pairs = n * (n - 1) // 2
            state = {"w": own.expand(n, -1).clone(), "c": w0.new_ones(pairs), **_no_vectors(own, pairs)}
        common = {}
        if self.shared_layers:
            shared = part(task.layout, self.shared_layers)
            common = {"common": w0[shared.nonzero()[:, 0].to(w0.device)], "shared": shared.to(w0.device)}
        parts = {axes: {k: t for k, t in state.items() if AXES[k] == axes} for axes in Server._fields}
        return Server(**parts | {"shared": parts["shared"] | common})

    def admit(self, task, server, samples):
        from polyfed.algorithms.joining import Joining

        return Joining(self, task, server, samples)

    def init_client(self, task, w0):
        return {"w": self._own(task, w0)}

    def _own(self, task, w0):
        """w0 without the shared layers."""
        return w0[(~part(task.layout, self.shared_layers)).nonzero()[:, 0].to(w0.device)] if self.shared_layers else w0

    def warm_start(self, task, models, samples):
        """theta_ij = w_i - w_j, v = 0, the shared layers averaged."""
        n, state = len(models), {}
        if self.shared_layers:
            shared = part(task.layout, self.shared_layers).to(models.device)
            state = {"common": mean(models[:, shared], samples), "shared": shared}
            models = models[:, ~shared]
        if self._is_dual(n):
            state |= self._start_dual(models, n)
        else:
            pairs = n * (n - 1) // 2
            state |= {"w": models.clone(), "c": models.new_ones(pairs), **_no_vectors(models[0], pairs)}
        return state, {"w": models.clone()}

    def downlink(self, server, round):
        """zeta_i; with theta - v/rho = (2c - 1) delta the pairs' part is one weighted sum per client.

        An idle pair, free with a dual that was and is zero, adds w_j + (w_i - w_j): taken as w_i, so that what a far
        client sends cannot even cost the others their last digits.
        """
        common = {"common": server["common"]} if self.shared_layers else {}
        if not server["w"].shape[1]:
            return Down(shared=common)
        if "G" in server:
            return Down(shared=common, each={"zeta": devicedual.messages(self._dual(server), round.ids)})
        w, n, i = server["w"], round.n, round.ids[:, None]
        if n == 1:  # no pairs, and a sum over none is not one to torch
            return Down(shared=common, each={"zeta": w[round.ids]})
        j = torch.arange(n - 1, device=w.device).expand(len(i), -1)
        j = j + (j >= i)  # all clients but i
        pair = pair_index(torch.minimum(i, j), torch.maximum(i, j), n)
        row = server["row"][pair]
        busy = (row >= 0).to(w.dtype) / n
        weight = torch.where(i < j, 2 * server["c"][pair] - 1, 1 - 2 * server["c"][pair]) * busy
        zeta = w[round.ids] * (1 - busy.sum(1, keepdim=True))
        zeta += embedding_bag(j, w, per_sample_weights=busy, mode="sum")
        if len(server["delta"]):
            zeta += embedding_bag(row.clamp(min=0), server["delta"], per_sample_weights=weight, mode="sum")
        return Down(shared=common, each={"zeta": zeta})

    def local_update(self, task, client, down, data, round):
        if self.shared_layers:
            return self._with_shared(task, client["w"], down, data)
        zeta = down["zeta"]
        w = local_sgd(task, client["w"], data, self.lr, correct=lambda w, g: g + self.rho * (w - zeta))  # (5)
        return {"w": w}, {"w": w}

    def _with_shared(self, task, own, down, data):
        """(5) on a client's own layers, from its last; plain SGD on the shared ones, from the common."""
        common = down["common"]
        shared = part(task.layout, self.shared_layers).to(common.device)
        rho = self.rho * (~shared).to(common.dtype)
        zeta = assemble(shared, common, down.get("zeta", own))
        w = assemble(shared, common, own)
        w = local_sgd(task, w, data, self.lr, correct=lambda w, g: g + rho * (w - zeta))
        return {"w": w[:, ~shared]}, {"w": w[:, ~shared], "common": w[:, shared]}

    def aggregate(self, server, up, round):
        """The participants' part of the state, in place."""
        state = self._aggregate_dual(server, up, round) if "G" in server else self._aggregate_pairs(server, up, round)
        if self.shared_layers:
            state |= {"common": up.mean("common", round.samples), "shared": server["shared"]}
        return state

    def _aggregate_dual(self, server, up, round):
        """P_i and the Gram matrix, and one majorisation step; every fifth round while it would cost the cube of n."""
        server = self._dual(server)
        refresh = round.n <= 1000 or len(server["f"]) <= round.n // 2 or round.t % 5 == 4
        return {**devicedual.update(server, round.ids, up["w"], self._fusion, refresh)}

    def _aggregate_pairs(self, server, up, round):
        """The pairs with at least one participant, each of them once; an idle pair gives its vector's place back."""
        n, ids = round.n, round.ids
        w = server["w"].index_copy(0, ids, up["w"])
        i, j = torch.triu_indices(n, n, 1, device=w.device)
        active = torch.zeros(n, dtype=torch.bool, device=w.device).index_fill(0, ids, True)
        changed = (active[i] | active[j]).nonzero()[:, 0]
        delta, c, row = server["delta"], server["c"], server["row"]
        spare = _unused(delta, row)
        for at in changed.split(BLOCK // max(1, w.shape[1]) or 1):
            before, mine = c[at], row[at]
            new = w.index_select(0, i[at]).sub_(w.index_select(0, j[at]))
            held = (mine >= 0).nonzero()[:, 0]
            v = delta.index_select(0, mine[held]).mul_((1 - before[held])[:, None])  # v_ij / rho
            new = new.add_(v) if len(held) == len(at) else new.index_add_(0, held, v)
            c[at] = now = self._shrinkage(new.norm(dim=1))  # (6)
            busy = (before != 1) | (now != 1)
            row[at] = mine.masked_fill(~busy, -1)
            entering = at[busy & (mine < 0)]
            delta, spare = _room(delta, spare, len(entering))
            row[entering], spare = spare[: len(entering)], spare[len(entering) :]
            delta.index_copy_(0, row[at[busy]], new[busy] if not busy.all() else new)
        return {"w": w, "delta": _compact(delta, row), "c": c, "row": row}

    def _shrinkage(self, t):
        return shrinkage(t, self.lam, self.rho, self.a, self.xi, self.penalty)

    def clusters(self, server):
        """[n] labels: connected components of ||theta_ij|| <= nu, numbered by their first client."""
        if "G" in server:
            return devicedual.clusters(self._dual(server), self._nu)
        n = len(server["w"])
        w, c, row = server["w"], server["c"], server["row"]
        held = row >= 0
        theta = torch.pdist(w)
        theta[held] = c[held] * server["delta"].norm(dim=1)[row[held]]
        never = (~held & (theta == 0)).cpu().numpy()  # pairs not updated yet
        theta = theta.cpu().numpy()
        i, j = torch.triu_indices(n, n, 1).numpy()
        near = (theta <= self._nu) & ~never
        graph = coo_matrix((near[near], (i[near], j[near])), shape=(n, n))
        return torch.as_tensor(connected_components(graph, directed=False)[1], device=server["w"].device).long()

    def cluster_models(self, server):
        """[n, q]: for every client the model of its cluster (without shared layers), the mean weighted by samples."""
        group, w = self.clusters(server), server["w"]
        weight = server["known"].clamp(min=1)[:, None]
        total = torch.zeros_like(w).index_add_(0, group, w * weight)
        mass = w.new_zeros(len(w), 1).index_add_(0, group, weight)
        return (total / mass.clamp(min=1))[group]

    def deployment(self, server, round):
        common = {k: server[k] for k in ("common", "shared") if k in server}
        return Down(common, {"w": self.cluster_models(server)[round.ids]} if self.merge else {})

    def personal(self, client, down):
        w = down["w"] if self.merge else client["w"]
        return assemble(down["shared"][0], down["common"], w) if self.shared_layers else w

    def report(self, server):
        w = server["w"]
        found = {"clusters": self.clusters(server), "plan": self._plan(len(w), w.shape[1], w.element_size())}
        return found | ({"nodes": len(server["f"])} if "G" in server else {})
