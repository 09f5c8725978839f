"""One model per cluster: what the clustered methods share, and the alternation that two of them are."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyfed.algorithms._shared.parts import assemble, part
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import generator, key_of, mix
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import KNOWN, Algorithm, Down, Needs, Portrait, Server, by_settings
from polyfed.core.newcomer import Newcomer


def components(n: int, i: Tensor, j: Tensor) -> Tensor:
    """[n] labels of the connected components of n nodes with edges between i and j, numbered by their first node."""
    from scipy.sparse import coo_matrix  # slow to import
    from scipy.sparse.csgraph import connected_components

    edges = coo_matrix((np.ones(len(i), dtype=bool), (i.cpu().numpy(), j.cpu().numpy())), shape=(n, n))
    return torch.as_tensor(connected_components(edges, directed=False)[1], device=i.device).long()


class Clustered(Algorithm, abstract=True):
    """A method with one model per cluster; the server has "w": [c, p] the models, and "cluster": [n] each client's."""

    def labels(self, server):
        """[n] each client's cluster; the one with the most samples for a client that the server has not met."""
        samples, cluster = server["known"], server["cluster"]
        mass = samples.new_zeros(len(server["w"])).index_add_(0, cluster, samples)
        return torch.where(samples > 0, cluster, mass.argmax())

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]}, each={"cluster": self.labels(server)[round.ids]})

    def personal(self, task, client, down):
        w, at = down["w"], down["cluster"]
        return w[:, 0] if w.shape[1] == 1 else w[torch.arange(len(at), device=at.device), at]

    def describe(self, server):
        return Portrait(clusters=self.labels(server))


def starts(task, w0: Tensor, k: int, seed: int, scale: float | None) -> Tensor:
    """[k, p] starting models: w0 first, the others drawn with keys of (seed, index). Raises ConfigError for none."""
    rows = w0.new_empty(k, len(w0))  # on the meta device, torch.stack imports torch's compiler: seconds
    rows[0] = w0
    for j in range(1, k):
        rows[j] = start(task, w0, j, seed, scale)
    return rows


def start(task, w0: Tensor, key: int, seed: int, scale: float | None) -> Tensor:
    """[p] a starting model, drawn with (seed, key). Raises ConfigError where the modules cannot draw."""
    # scale: a number draws w0 + scale * N(0, I); None draws as the model's modules do, in float32 whatever the
    # precision of the run, so that both have the same starts
    if scale is not None:
        noise = torch.from_numpy(generator(seed, "start", key).standard_normal(len(w0)))
        return w0 + scale * noise.to(w0)
    model = copy.deepcopy(task.model).cpu().float()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(mix(seed, key_of("start"), key)) % 2**63)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif any(q.requires_grad for q in module.parameters(recurse=False)):
                raise ConfigError(
                    f"algorithm.init_scale: is none, and {type(module).__name__} has no reset_parameters to draw "
                    "the other starting models; give a number s for w0 + s N(0, I)"
                )
    return task.layout.flatten(model).to(w0)


def losses(task, w: Tensor, data) -> Tensor:
    """[s, c]: the loss of each of `w: [s, c, p]` on all of a client's training samples."""
    return task.loss_of(w, data.whole())


def kmeans(points: Tensor, centres: Tensor, k: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's iterations: ([k, p] or fewer centres, [m] labels) of `points: [m, p]`, from centres [c, p]."""
    # the point farthest from all centres (from the mean, where there are none) is the next: no draw, and no order of
    # the points matters
    for _ in range(min(k - len(centres), len(points))):
        far = distances(points, centres if len(centres) else points.mean(0, keepdim=True)).amin(1).argmax()
        centres = torch.cat([centres, points[far][None]])
    label = distances(points, centres).argmin(1)
    for _ in range(iterations):
        for j in label.unique().tolist():
            centres = centres.index_copy(0, label.new_tensor([j]), points[label == j].mean(0, keepdim=True))
        label = distances(points, centres).argmin(1)
    return centres, label


def distances(points: Tensor, centres: Tensor) -> Tensor:
    """[m, c] squared distances, from differences: those of near points are not lost in the points' lengths."""
    return torch.stack([(points - c).square().sum(1) for c in centres], 1)


class Choosing(Newcomer):
    """A newcomer to frozen models: it downloads all of them and deploys the one with the least training loss."""

    def __init__(self, algorithm, task, server, samples):
        super().__init__(algorithm, task, server, samples)
        self.trains = False

    def offered(self):
        return self.before["w"]

    def enter(self, choice, samples):
        values = {"cluster": choice, KNOWN: samples}
        self.rows = {name: torch.full_like(t, values[name]) if name in values else t for name, t in self.rows.items()}
        mine = self.algorithm.init_client(self.task, self.task.w0)
        return {name: torch.full_like(t, values[name]) for name, t in mine.items()}


@dataclass(frozen=True)
class Alternating(Clustered, abstract=True):
    """The common part of IFCA and HypCluster: k starts, the choice by training loss, training of the chosen model.

    With `one_hot` client i sends d_i = e_{j_i} (w_i - theta_{j_i})' and e_{j_i}, which is zero but for the place of its
    choice: sums give every cluster's mean, and the server does not learn the choices.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    k: int = setting(
        2,
        ge=1,
        le=10000,
        source="of the problem",
        doc="Number of clusters, at most that of clients, which the method does not find.",
    )
    weighted: bool = setting(
        False, source="paper", doc="Weigh clients by their number of samples; False: plain mean, as in the paper."
    )
    shared_layers: str | tuple[str, ...] = setting(
        "",
        source="paper",
        doc='Layers that all clusters have in common, averaged over all participants and sent once ("body", "head", '
        "names); a text has its names separated by spaces.",
    )
    init_scale: float | None = setting(
        None,
        gt=0,
        source="ours",
        doc="The first start is the common one. None: the others are drawn as its modules draw theirs; a number s: "
        "w0 + s N(0, I).",
    )
    seed: int = setting(
        0, ge=0, source="ours", doc="Seed of the k initial models; whether the clusters are found depends on them."
    )

    one_hot: bool = setting(
        False,
        source="ours",
        doc="Send the change of all k models, zero but for the chosen one, so that sums are all that the server needs "
        "(secure sums) and it does not learn who is where; k times the bytes up.",
    )

    @by_settings
    def needs(self):
        return Needs(clients=self.k)

    def init_client(self, task, w0):
        return {"cluster": torch.tensor(-1, device=w0.device)} if self.one_hot else {}

    def init_server(self, task, w0, n):
        w = starts(task, w0, self.k, self.seed, self.init_scale)
        where = torch.zeros(1 if self.one_hot else n, dtype=torch.long, device=w0.device)
        shared, each = ({"w": w, "most": where}, {}) if self.one_hot else ({"w": w}, {"cluster": where})
        if not self.shared_layers:
            return Server(shared, each)
        own = self._own(task).to(w0.device)
        return Server(shared | {"w": torch.where(own, w, w0), "own": own}, each)

    def deployment(self, server, round):
        if self.one_hot:
            return Down(shared={"w": server["w"], "most": server["most"]})
        return super().deployment(server, round)

    def personal(self, task, client, down):
        if self.one_hot:  # a client that was never asked takes the model of the most samples in the last round
            at = client["cluster"]
            down = down | {"cluster": torch.where(at < 0, down["most"][:, 0], at)}
        return super().personal(task, client, down)

    def describe(self, server):
        return Portrait() if self.one_hot else super().describe(server)

    def _own(self, task):
        """[p] bool: True where the clusters have parameters of their own."""
        return ~part(task.layout, self.shared_layers, f"algorithm.shared_layers of {type(self).__name__}")

    def admit(self, task, server, samples):
        return Choosing(self, task, server, samples)

    def downlink(self, server, round):
        w = server["w"]
        if not self.shared_layers:
            return Down(shared={"w": w})
        return Down(shared={"own": w[:, server["own"]], "common": w[0, ~server["own"]]})

    def _received(self, task, down):
        """[s, k, p] the models of a downlink."""
        if not self.shared_layers:
            return down["w"]
        return assemble(~self._own(task).to(down["own"].device), down["common"][:, None], down["own"])

    def local_update(self, task, client, down, data, round):
        w = self._received(task, down)
        j = losses(task, w, data).argmin(1)
        chosen = w[torch.arange(len(j)), j]
        new = self._train(task, chosen, data)
        if not self.one_hot:
            return {}, {"w": new, "cluster": j.int()}
        members = one_hot(j, self.k).to(new.dtype)
        return {"cluster": j}, {"dw": members[:, :, None] * (new - chosen)[:, None], "members": members}

    def _train(self, task, w, data):
        return local_sgd(task, w, data, self.lr)

    def accepts(self, task, up):
        cluster = int(up.get("cluster", 0))
        return "" if 0 <= cluster < self.k else f"found cluster {cluster}, expected 0 to {self.k - 1}"

    def aggregate(self, server, up, round):
        weights, w = round.samples if self.weighted else None, server["w"]
        if self.one_hot:
            move, share = up.mean("dw", weights), up.mean("members", weights)
            mass = torch.ones_like(round.samples) if weights is None else weights
            least = mass[mass > 0].amin() / mass.sum() / 2  # below it none has chosen the model; sums are rounded
            new = torch.where((share > least)[:, None], w + move / share.clamp(min=least)[:, None], w)
            common, update = w[0] + move.sum(0), {"most": share.argmax()[None]}
        else:
            cluster = up["cluster"].long()
            new = up.mean("w", weights, within=cluster, out=w.clone())
            mass = torch.ones_like(cluster, dtype=w.dtype) if weights is None else weights.to(w.dtype)
            share = torch.zeros_like(w[:, 0]).index_add_(0, cluster, mass / mass.sum())
            common = up.mean("w", weights) if self.shared_layers else w[0]
            update = {"cluster": server["cluster"].index_copy(0, round.ids, cluster)}
        new = self._next(w, new, share[:, None])
        if self.shared_layers:
            new = torch.where(server["own"], new, common)
        return server | update | {"w": new}

    def _next(self, w, new, share):
        """[k, p]: every cluster's next model, from `new`, the mean over its share [k, 1] of clients."""
        return new
