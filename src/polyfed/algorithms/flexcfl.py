"""FlexCFL (FedGroup): Duan et al., IEEE TPDS 33 (2022)."""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.clusters import Clustered, kmeans
from polyfed.algorithms._shared.lowrank import spectral
from polyfed.algorithms._shared.similarity import similarity
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Server


def decomposed(D, k):
    """[m, k] cosines between updates D: [m, p] and their k first singular directions (EDC), by the Gram matrix."""
    length = D.double().norm(dim=1).clamp(min=torch.finfo(D.dtype).tiny)
    values, U = spectral(D.double() @ D.double().T)
    return (U * values.clamp(min=0).sqrt()).flip(1)[:, :k] / length[:, None]


@dataclass(frozen=True)
class FlexCFL(Clustered):
    """Static groups by decomposed cosine similarity of first updates, then FedAvg in each.

        D_i = local SGD from the common start on f_i, less the start; once, at a client's first contact
        V = the k first singular directions of the D_i,  E_ij = cos(D_i, v_j);   groups = k-means on the rows of E
        w_g = start + o_g,  o_g = mean of the D_i in g           a later client joins argmax_g cos(D_i, o_g)
        w_g <- sum_{i in g} n_i w_i / sum_{i in g} n_i,   w_i = local SGD from w_g on f_i
        w_g <- w_g + between sum_{l != g} w_l / ||w_l||

    Notes
    -----
    The groups are those of the first round's clients; the paper pretrains 20 k clients for them. Fewer clients than k
    make fewer groups, and a later client whose update is at an obtuse angle to all of them makes the next one. k-means
    starts from the rows that are farthest apart. After the last line the released code divides w_g by the sum of its
    weights, 1 + between sum_{l != g} 1 / ||w_l||. Migration of clients whose labels change is left out.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    k: int = setting(3, ge=1, le=10000, source="paper", doc="Number of groups, 3 to 5 in the paper.")
    between: float = setting(0.0, ge=0, source="paper", doc="Step of each group towards the others' directions.")
    first_epochs: int = setting(1, ge=1, source="ours", doc="Passes over the local data for the first update.")

    needs = Needs(exchanges=2, unmet_first=True)

    def init_server(self, task, w0, n):
        """direction: [k, p] of each group, zeros where it has no client yet."""
        w = w0.expand(self.k, -1)
        each = {"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)}
        return Server({"w": w.clone(), "start": w0, "direction": torch.zeros_like(w)}, each)

    def downlink(self, server, round):
        if round.phase == 0:
            return Down()
        return Down(each={"w": server["w"][server["cluster"][round.ids]]})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            start = task.w0.expand(len(round.ids), -1)
            return {}, {"dw": local_sgd(task, start, data.again("first", epochs=self.first_epochs), self.lr) - start}
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        if round.phase == 0:
            return self._place(server, up["dw"], round.ids)
        w = up.mean("w", round.samples, within=server["cluster"][round.ids], out=server["w"].clone())
        if self.between:
            made = server["direction"].any(1, keepdim=True).to(w)
            unit = made * w / w.norm(dim=1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
            w = w + self.between * made * (unit.sum(0) - unit)
        return server | {"w": w}

    def _place(self, server, D, ids):
        """Put the clients that have sent their first update into groups."""
        direction, w = server["direction"].clone(), server["w"].clone()
        empty = ~direction.any(1)
        if empty.all():
            rows = decomposed(D, self.k)
            label = kmeans(rows, rows[:0], self.k, 100)[1]
        else:
            label = similarity(torch.cat([D, direction]))[: len(D), len(D) :].argmax(1).to(D.device)
        for g in label.unique().tolist():
            if empty[g]:
                direction[g] = D[label == g].mean(0)
                w[g] = server["start"] + direction[g]
        return server | {"w": w, "direction": direction, "cluster": server["cluster"].index_copy(0, ids, label)}
