"""PACFL: Vahidian et al., AAAI 2023, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import Clustered
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Portrait, Server, by_settings
from polyfed.core.newcomer import Newcomer

DISCLOSED = {"signature": "for each class the first directions of the site's samples, to compare it with others"}
REDUCE = {"average": Tensor.mean, "weighted": Tensor.mean, "single": Tensor.amin, "complete": Tensor.amax}


def signature(x: Tensor, y: Tensor, classes: int, basis: int) -> Tensor:
    """[d, classes * basis] float64: per class the first left singular vectors of its samples, or zeros, as columns."""
    out = x.new_zeros(x.shape[1], classes, basis, dtype=torch.float64)
    for c in y.unique().tolist():
        _, size, V = torch.linalg.svd(x[y == c].double(), full_matrices=False)
        kept = int((size[:basis] > _noise(x, V) * size[0]).sum())
        out[:, c, :kept] = V[:kept].T
    return out.flatten(1)


def orthonormal(U: Tensor) -> Tensor:
    """[..., d, r] float64: an orthonormal basis of the columns of U: [..., d, k], filled up with zero columns."""
    Q, size, _ = torch.linalg.svd(U.double(), full_matrices=False)
    return Q * (size > _noise(U, U) * size[..., :1])[..., None, :]


def _noise(like: Tensor, shape: Tensor) -> float:
    """The share of the largest singular value below which others are rounding."""
    return torch.finfo(like.dtype).eps * max(shape.shape[-2:])


def principal_angles(A: Tensor, B: Tensor) -> Tensor:
    """[..., min(r, q)] degrees, ascending, between the spans of orthonormal A: [..., d, r] and B: [..., d, q].

    Zero columns do not count; where a subspace has fewer dimensions, the angles that do not exist are NaN.
    """
    cosines = torch.linalg.svdvals(A.mT @ B).clamp(0, 1)
    dims = torch.minimum((A != 0).any(-2).sum(-1), (B != 0).any(-2).sum(-1))
    exists = torch.arange(cosines.shape[-1], device=A.device) < dims[..., None]
    return torch.where(exists, cosines.acos().rad2deg(), torch.nan)


class Placed(Newcomer):
    """A newcomer sends its signature, then trains its cluster's frozen model, or a model of its own cluster."""

    def __init__(self, algorithm, task, server, samples):
        super().__init__(algorithm, task, server, samples)
        self.founded, self.signature = server["w"][:0], None

    @property
    def server(self):
        state = super().server
        state["w"] = torch.cat([state["w"], self.founded])
        if "signature" in state:
            own = torch.zeros_like(state["signature"][:1]) if self.signature is None else self.signature
            state["signature"] = torch.cat([state["signature"], own])
        return state

    def keep(self, after):
        super().keep(after)
        self.founded = after["w"][len(self.before["w"]) :]
        if "signature" in after:
            self.signature = after["signature"][self.n :]


@dataclass(frozen=True)
class PACFL(Clustered):
    """Principal angles between the clients' data decide the clusters; then FedAvg in every cluster.

        U_i = per class the first `basis` left singular vectors of client i's samples (features x samples), sent once
        A_ij = smallest principal angle between span U_i and span U_j, or the sum of all           degrees
        clusters = agglomerative clustering of A, cut at `threshold`
        w_c <- sum_{i in c} n_i w_i / sum_{i in c} n_i,   w_i = local SGD from w_c on f_i

    Notes
    -----
    A client that is first picked later sends its signature then, unless `everyone_first`. It joins the nearest cluster
    (in the sense of `linkage`) within the threshold; the others found new clusters, which begin at the common start.
    Clients already placed stay where they are. The signature is sent as `basis` vectors of the input's dimension per
    class, zeros where a client has no samples. It is computed from raw inputs, and tells the server a good deal about
    them.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    basis: int = setting(
        3,
        ge=1,
        le=10000,
        source="paper",
        doc="Singular vectors per class, 3 to 5 in the paper. Classes and vectors together should stay well below "
        "the dimension of the input, or any two subspaces intersect and every smallest angle is zero.",
    )
    threshold: float = setting(
        10.0,
        ge=0,
        source="ours",
        doc="Angle in degrees at which the dendrogram is cut; it decides the number of clusters, and must be tuned "
        "to the data (`report` gives all angles).",
    )
    angle: Literal["smallest", "sum", "entries"] = setting(
        "smallest",
        source="paper",
        doc='"smallest" or "sum" of the principal angles; "entries": the smallest entry of arccos(U_i\' U_j), as '
        "released, which is no angle between subspaces and depends on the arbitrary signs of singular vectors.",
    )
    linkage: Literal["average", "weighted", "single", "complete"] = setting(
        "average",
        source="code",
        doc='"average", "single", "complete", or "weighted" (the released code\'s average of two rows, regardless of '
        "sizes).",
    )
    everyone_first: bool = setting(
        False,
        source="ours",
        doc="Ask all clients for their signatures before the first round, and cluster them at once, as in the paper.",
    )
    deployed: Literal["cluster", "own"] = setting(
        "cluster",
        source="paper",
        doc='"cluster": the cluster\'s model; "own": what the client made of it in its last local training, the common '
        "start before the first, as scored in FPFC's released code.",
    )

    @by_settings
    def needs(self):
        """Signatures from those who have not sent theirs, then a round of FedAvg."""
        return Needs(exchanges=2, unmet_first=True, everyone_first=self.everyone_first, discloses=DISCLOSED)

    def init_client(self, task, w0):
        return {"w": w0} if self.deployed == "own" else {}

    def init_server(self, task, w0, n):
        return Server(
            {"start": w0},
            each={"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)},
            pairs={"angles": w0.new_zeros(n, n)},
            free={"w": w0[None]},
        )

    def admit(self, task, server, samples):
        return Placed(self, task, server, samples)

    def downlink(self, server, round):
        if round.phase == 0:
            return Down()
        return Down(each={"w": server["w"][server["cluster"][round.ids]]})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            return {}, {"signature": self._signatures(task, data.whole())}
        w = local_sgd(task, down["w"], data, self.lr)
        return {"w": w} if self.deployed == "own" else {}, {"w": w}

    def _signatures(self, task, batch):
        """[s, d, classes * basis]; a regression is one class."""
        x, y = batch.x.flatten(2), batch.y
        labelled = not y.is_floating_point() and y.dim() == 2
        classes = task.outputs(task.w0, batch.x[0, :1]).shape[-1] if labelled else 1
        sizes = batch.sizes or [x.shape[1]] * len(x)
        signatures = []
        for i, b in enumerate(sizes):
            label = y[i, :b] if labelled else torch.zeros(b, dtype=torch.long, device=x.device)
            signatures.append(signature(x[i, :b].to(task.dtype), label, classes, self.basis))
        return torch.stack(signatures).to(task.dtype)

    def aggregate(self, server, up, round):
        if round.phase == 0:
            return self._place(server, up["signature"], round)
        cluster = server["cluster"][round.ids]
        return server | {"w": up.mean("w", round.samples, within=cluster, out=server["w"])}  # in place

    def _place(self, server, signatures, round):
        """Put the clients whose signature is new into clusters."""
        w, n = server["w"], round.n
        before = server["known"] > 0
        rows = (~before[round.ids]).nonzero()[:, 0]
        if not len(rows):
            return server
        new = round.ids[rows]
        kept = server.get("signature", signatures.new_zeros(n, *signatures.shape[1:]))
        kept = kept.index_copy(0, new, signatures[rows])
        placed = before.index_fill(0, new, True)
        angles, cluster = self._angles(server["angles"], kept, new, placed), server["cluster"].clone()
        if not before.any():
            w = w[:0]
        near = torch.full((len(new), len(w)), torch.inf, dtype=angles.dtype, device=w.device)
        for c in range(len(w)):
            near[:, c] = REDUCE[self.linkage](angles[new][:, before & (cluster == c)], 1)
        joins = (near <= self.threshold).any(1)
        if joins.any():
            cluster[new[joins]] = near[joins].argmin(1)
        founders = new[~joins]
        if len(founders):
            label = self._clusters(angles[founders][:, founders])
            cluster[founders] = len(w) + label
            w = torch.cat([w, server["start"].expand(int(label.max()) + 1, -1)])
        return server | {"w": w, "signature": kept, "angles": angles, "cluster": cluster}

    def _angles(self, angles, signatures, new, placed):
        """[n, n] the angles, those between `new` and all clients seen filled in."""
        angles, others = angles.clone(), placed.nonzero()[:, 0]
        U = signatures[others].double()
        if self.angle != "entries":
            U = orthonormal(signatures[others])
        for i in new.tolist():
            mine = U[others == i][0]
            if self.angle == "entries":
                real = (mine != 0).any(0)[:, None] & (U != 0).any(1)[:, None, :]
                entry = (mine.T @ U).clamp(-1, 1).acos().rad2deg()
                row = torch.where(real, entry, torch.inf).flatten(1).amin(1).clamp(max=180)
            else:
                between = principal_angles(mine, U)
                row = between[:, 0].nan_to_num(90) if self.angle == "smallest" else between.nansum(1)
            row = row.to(angles.dtype)
            angles[i, others], angles[others, i] = row, row
            angles[i, i] = 0
        return angles

    def _clusters(self, angles):
        """[m] labels from 0 of the agglomerative clustering of angles: [m, m]."""
        if len(angles) == 1:
            return torch.zeros(1, dtype=torch.long, device=angles.device)
        from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
        from scipy.spatial.distance import squareform

        tree = linkage(squareform(angles.double().cpu().numpy(), checks=False), self.linkage)
        labels = torch.from_numpy(fcluster(tree, self.threshold, "distance")).to(angles.device)
        return labels.unique(return_inverse=True)[1]

    def deployment(self, server, round):
        return Down() if self.deployed == "own" else super().deployment(server, round)

    def personal(self, task, client, down):
        return client["w"] if self.deployed == "own" else super().personal(task, client, down)

    def describe(self, server):
        return Portrait(clusters=self.labels(server), findings={"angles": server["angles"]})
