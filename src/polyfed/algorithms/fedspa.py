"""FedSpa: Huang et al. (arXiv 2201.11380), Algorithm 1."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from polyfed.algorithms._shared.bits import largest, pack, positions, unpack
from polyfed.algorithms._shared.lowrank import sheets
from polyfed.base.settings import setting
from polyfed.compute.layout import Layout
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Server


def erdos_renyi_kernel(layout: Layout, density: float) -> list[tuple[slice, int]]:
    """The place of each layer of two or more axes, and the number of its entries to keep.

    A layer's density is proportional to (sum of its axes) / (product of its axes), at most 1; `density` is that of the
    whole vector, in which biases and norms are dense.
    """
    spans = [sheet.span for sheet in sheets(layout).values()]
    shapes = [e.shape for e in layout.entries if len(e.shape) >= 2]
    sizes = [math.prod(shape) for shape in shapes]
    budget = density * layout.p - (layout.p - sum(sizes))
    full: set[int] = set()
    while True:
        rest = [k for k in range(len(shapes)) if k not in full]
        room = budget - sum(sizes[k] for k in full)
        scale = room / sum(sum(shapes[k]) for k in rest) if rest else 0.0
        over = {k for k in rest if scale * sum(shapes[k]) >= sizes[k]}
        if not over:
            break
        full |= over
    kept = [sizes[k] if k in full else max(1, round(scale * sum(shapes[k]))) for k in range(len(shapes))]
    return list(zip(spans, kept, strict=True))


@dataclass(frozen=True)
class FedSpa(Algorithm):
    """Personal sparse masks m_i of fixed density over one common dense model x.

        w_i <- w_i - lr m_i * grad f_i(w_i),  from m_i * x                      only kept entries travel
        x   <- x - mean_S (m_i * x - w_i),    zero where a client has no entry
        m_i <- next mask                      "dst": per layer, the share a_t of the kept entries with the smallest
                                              magnitude goes, as many with the largest gradient come;
                                              "rsm": random, drawn once
        a_t =  prune/2 (1 + cos(pi t / search_rounds)),  0 from then on

    Layers share the density by the Erdos-Renyi kernel rule; biases and norms are dense. Client i deploys m_i * x.

    Notes
    -----
    Every client's first round uses one mask that both sides can make, the largest of the initial weights. A new mask
    goes up with the change, one bit per parameter; the paper's figures leave it out.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    density: float = setting(
        0.5,
        gt=0,
        le=1,
        source="FedSLR's comparison",
        doc="Share of the parameters that a client keeps, trains and exchanges; 1 is FedAvg with equal weights.",
    )
    search: Literal["dst", "rsm"] = setting("dst", source="paper", doc='"dst" or "rsm".')
    prune: float = setting(
        0.5, ge=0, le=1, source="paper", doc="Share of a layer's kept entries that the first search replaces."
    )
    search_rounds: int = setting(100, ge=1, source="ours", doc="Rounds until the search has come to rest.")

    def first_mask(self, task):
        """[p] bool: the largest initial weights of each layer, and all biases and norms."""
        mask = torch.ones(task.p, dtype=torch.bool, device=task.device)
        for span, k in erdos_renyi_kernel(task.layout, self.density):
            mask[span] = largest(task.w0[None, span], k)[0]
        return mask

    def init_server(self, task, w0, n):
        mask = pack(self.first_mask(task)[None]).to(w0.device)
        return Server({"w": w0}, each={"mask": mask.expand(n, -1).clone()})

    def init_client(self, task, w0):
        return {"mask": self.first_mask(task), "drawn": torch.tensor(False, device=w0.device)}

    def downlink(self, server, round):
        w, ids = server["w"], round.ids
        kept = positions(unpack(server["mask"][ids], len(w)))
        return Down(each={"w": w.expand(len(ids), -1).gather(1, kept)})

    def local_update(self, task, client, down, data, round):
        mask = client["mask"]
        kept = positions(mask)
        start = down["w"].new_zeros(mask.shape).scatter_(1, kept, down["w"])
        w = local_sgd(task, start, data, self.lr, only=mask.to(start.dtype))
        new = self._searched(task, w, mask, data, round.t) if self.search == "dst" else self._drawn(task, client, data)
        change = down["w"] - w.gather(1, kept)
        return {"mask": new, "drawn": torch.ones_like(client["drawn"])}, {"dw": change, "mask": pack(new)}

    def _searched(self, task, w, mask, data, t):
        share = self.prune / 2 * (1 + math.cos(math.pi * min(t / self.search_rounds, 1)))
        g = task.gradient(w, data.whole(), need_loss=False)[0]
        new = mask.clone()
        for span, k in erdos_renyi_kernel(task.layout, self.density):
            if leaving := int(share * k):
                staying = largest(w[:, span], k - leaving, mask[:, span])
                new[:, span] = staying | largest(g[:, span], leaving, ~staying)
        return new

    def _drawn(self, task, client, data):
        new = client["mask"].clone()
        keys = next(iter(data.again("mask", steps=1))).seed()
        for i in (~client["drawn"]).nonzero()[:, 0].tolist():
            generator = torch.Generator().manual_seed(int(keys[i]) % 2**63)
            score = torch.rand(1, task.p, generator=generator, dtype=torch.float32).to(new.device)
            for span, k in erdos_renyi_kernel(task.layout, self.density):
                new[i, span] = largest(score[:, span], k)[0]
        return new

    def accepts(self, task, up):
        mask = unpack(up["mask"][None], task.p)[0]
        rest = mask.clone()
        for span, k in erdos_renyi_kernel(task.layout, self.density):
            if (kept := int(mask[span].sum())) != k:
                return f"its mask keeps {kept} entries of a layer, expected {k}"
            rest[span] = True
        return "" if rest.all() else "its mask lacks biases or norms"

    def parameters(self, task, client, down):
        return client["mask"].sum(1)

    def aggregate(self, server, up, round):
        w, s = server["w"], len(round.ids)
        kept = positions(unpack(server["mask"][round.ids], len(w)))
        change = torch.zeros_like(w).index_add_(0, kept.flatten(), up["dw"].flatten())
        return {"w": w - change / s, "mask": server["mask"].index_copy(0, round.ids, up["mask"])}

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]})

    def personal(self, task, client, down):
        return down["w"] * client["mask"]
