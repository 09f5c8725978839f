"""CFL: Sattler, Müller, Samek (arXiv 1910.01991), Algorithms 1 and 3 and the parameter tree of section V."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import Clustered
from polyfed.algorithms._shared.similarity import similarity
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Portrait, Server, by_settings, mean
from polyfed.core.newcomer import Newcomer


def bipartition(S: Tensor, method: str = "single") -> Tensor:
    """[m] bool: the two parts of m clients with similarities S: [m, m]."""
    from scipy.cluster.hierarchy import cut_tree, linkage  # slow to import
    from scipy.spatial.distance import squareform

    # "single" is exact: no bipartition has a smaller largest similarity across; "complete" is not
    distance = squareform(1 - S.cpu().numpy(), checks=False)
    return torch.from_numpy(cut_tree(linkage(distance, method), 2)[:, 0] == 1).to(S.device)


class Sorted(Newcomer):
    """A newcomer, which goes down the frozen tree of splits and makes none."""

    def keep(self, after):
        if len(after["w"]) == len(self.before["w"]):
            super().keep(after)


@dataclass(frozen=True)
class CFL(Clustered):
    """Clustered federated learning by bipartition: FedAvg in every cluster, split where its clients disagree.

        D_i = local SGD from w_c on f_i, less w_c          w_c <- w_c + sum_{i in c} n_i D_i / sum_{i in c} n_i
        split c when ||mean D_i|| < eps1 and max ||D_i|| > eps2, into the parts with the smallest largest
        a_ij = cos(D_i, D_j) across, a_cross; but only if gamma_max < sqrt((1 - a_cross) / 2)

    The parts go on from the model of c, each with the mean of its own updates of that round.

    Notes
    -----
    The paper asks all clients in every round. Here the cluster's participants alone decide a split, never old or
    missing updates. The others stay where they are in the tree of splits: when next asked, a client trains from the
    model at which its cluster was split, and its update only decides which part it belongs to (the paper's rule for
    newcomers, with the mean direction of each part in place of its most similar member). With `absent="zero"` absent
    members of a cluster count as updates of zero, which are similar to no other: where that leaves a tie, the order of
    the clients decides their side.
    """

    linear_claims = "its cosines between updates, and so its clusters,"
    linear_only = True

    lr: float = setting(0.1, source="code", doc="Step size of local SGD.")
    eps1: float = setting(
        0.4,
        ge=0,
        source="code",
        doc="Thresholds of ||mean D_i|| and of max ||D_i||, on the scale of the problem: eps1 about a tenth of max "
        "||D_i|| in the first rounds, eps2 from eps1 to 10 eps1.",
    )
    eps2: float = setting(
        1.6,
        ge=0,
        source="code",
        doc="Thresholds of ||mean D_i|| and of max ||D_i||, on the scale of the problem: eps1 about a tenth of max "
        "||D_i|| in the first rounds, eps2 from eps1 to 10 eps1.",
    )
    gamma_max: float | None = setting(
        0.5,
        ge=0,
        lt=1,
        source="ours",
        doc="Bound on the relative distance between a client's update and its group's, in [0, 1); a split whose "
        "groups are not farther apart than that explains is not made. None: no such test, as in the released "
        "code.",
    )
    linkage: Literal["single", "complete"] = setting(
        "single",
        source="paper",
        doc='"single": the optimal bipartition of the paper; "complete": the released code\'s.',
    )
    min_size: int = setting(
        2, ge=2, source="ours", doc="Participants a cluster must have to be split; 3 in the released code."
    )
    first_round: int = setting(
        0, ge=0, source="ours", doc="First round, from 0, in which a split is made; 21 in the released code."
    )
    weighted: bool = setting(True, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")
    absent: Literal["wait", "zero"] = setting(
        "wait",
        source="ours",
        doc='"wait": members of a cluster that do not take part count for nothing; "zero": in norms, cosines, splits '
        "and means their update is zero, and all are sorted by a split, as in FPFC's released code; all clients are "
        "then asked for their number of samples before the first round.",
    )

    @by_settings
    def needs(self):
        return Needs(first=2, everyone_first=True) if self.absent == "zero" else Needs()

    def admit(self, task, server, samples):
        return Sorted(self, task, server, samples)

    def init_server(self, task, w0, n):
        """The tree of splits and every client's node."""
        tree = {"w": w0[None], "child": torch.full((1,), -1, device=w0.device), "direction": torch.zeros_like(w0)[None]}
        # of each node: a model, its first child (the second comes next) or -1, the mean direction of its clients
        return Server(free=tree, each={"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)})

    def labels(self, server):
        return server["cluster"]

    def _counts(self, round):
        """True in the exchange that only tells the server everyone's number of samples."""
        return self.absent == "zero" and round.t == 0 == round.phase

    def downlink(self, server, round):
        if self._counts(round):
            return Down()
        return Down(each={"w": server["w"][server["cluster"][round.ids]]})

    def local_update(self, task, client, down, data, round):
        if self._counts(round):
            return {}, {}
        return {}, {"dw": local_sgd(task, down["w"], data, self.lr).sub_(down["w"])}

    def aggregate(self, server, up, round):
        if self._counts(round):
            return server
        updates, who, samples = up["dw"], round.ids, round.samples
        if self.absent == "zero":
            updates = updates.new_zeros(round.n, updates.shape[1]).index_copy_(0, who, updates)
            samples = server["known"].index_copy(0, who, samples)
            who = samples.nonzero()[:, 0]  # all but who was not reached
            updates, samples = updates[who], samples[who]
        tree = {key: server[key] for key in ("w", "child", "direction")}
        node = server["cluster"].clone()
        here = node[who]
        for c in here.unique().tolist():
            rows = (here == c).nonzero()[:, 0]
            ids, weights = who[rows], samples[rows] if self.weighted else None
            D = updates if len(rows) == len(here) else updates[rows]
            first, step = int(tree["child"][c]), mean(D, weights)
            if first >= 0:  # split while these were absent
                node[ids] = first + self._side(D, tree["direction"][first : first + 2])
            elif (parts := self._parts(D, step, round.t)) is not None:
                node[ids] = len(tree["w"]) + parts.long()
                tree = self._split(tree, c, D, weights, parts)
            else:
                w = tree["w"].clone()
                w[c] += step
                tree["w"] = w
        return {**tree, "cluster": node}

    def _parts(self, D, step, t):
        """[m] bool: the parts of a cluster with updates D: [m, p] and their mean; None: no split."""
        if len(D) < self.min_size or t < self.first_round or step.double().norm() >= self.eps1:
            return None
        if torch.linalg.vector_norm(D, dim=1).max() <= self.eps2:
            return None
        S = similarity(D)
        parts = bipartition(S, self.linkage)
        across = float(S[parts][:, ~parts].max())
        separated = self.gamma_max is None or self.gamma_max < np.sqrt(max(0.0, 1 - across) / 2)
        return parts if separated else None

    def _split(self, tree, c, D, weights, parts):
        """The tree with two children below node c, the clients with parts = False first."""
        child = tree["child"].clone()
        child[c] = len(child)
        w, direction = [], []
        for part in (~parts, parts):
            w.append(tree["w"][c] + mean(D[part], None if weights is None else weights[part]))
            length = torch.linalg.vector_norm(D[part], dim=1, keepdim=True)
            direction.append((D[part] / length.clamp(min=torch.finfo(D.dtype).tiny)).mean(0))
        return {
            "w": torch.cat([tree["w"], torch.stack(w)]),
            "child": torch.cat([child, child.new_full((2,), -1)]),
            "direction": torch.cat([tree["direction"], torch.stack(direction)]),
        }

    def _side(self, D, directions):
        """[m] 0 or 1: the direction closer to each update."""
        return similarity(torch.cat([D, directions]))[: len(D), len(D) :].argmax(1)

    def describe(self, server):
        return Portrait(clusters=server["cluster"].unique(return_inverse=True)[1])
