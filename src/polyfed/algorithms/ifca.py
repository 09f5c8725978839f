"""IFCA and HypCluster: k models, and every client trains the one that fits its training data best.
Ghosh et al., NeurIPS 2020, Algorithm 1; Mansour et al. (arXiv 2002.10619), section 4.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.algorithm import KNOWN, Algorithm, Down, Server
from polyfed.core.errors import ConfigError
from polyfed.core.newcomer import Newcomer
from polyfed.core.randomness import generator, key_of, mix
from polyfed.core.settings import setting
from polyfed.core.solvers import local_sgd


class Clustered(Algorithm, abstract=True):
    """A method with one model per cluster, kept by the server.

    Its state has "w": [c, p] the models and "cluster": [n] each client's.
    """

    def labels(self, server):
        """[n] each client's cluster; for one that the server has not met, the cluster with the most samples."""
        samples, cluster = server["known"], server["cluster"]
        mass = samples.new_zeros(len(server["w"])).index_add_(0, cluster, samples)
        return torch.where(samples > 0, cluster, mass.argmax())

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]}, each={"cluster": self.labels(server)[round.ids]})

    def personal(self, client, down):
        w, at = down["w"], down["cluster"]
        return w[:, 0] if w.shape[1] == 1 else w[torch.arange(len(at), device=at.device), at]

    def report(self, server):
        return {"clusters": self.labels(server)}


def starts(task, w0: Tensor, k: int, seed: int, scale: float | None) -> Tensor:
    """[k, p] starting models: w0 first, the others drawn with keys of (seed, their index).

    scale: None draws them as the model's modules draw their own parameters; a number is w0 + scale * N(0, I).
    Raises ConfigError when a module has parameters and no `reset_parameters`.
    """
    rows = [w0]
    for j in range(1, k):
        if scale is not None:
            noise = torch.from_numpy(generator(seed, "start", j).standard_normal(len(w0)))
            rows.append(w0 + scale * noise.to(w0))
            continue
        model = copy.deepcopy(task.model).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(mix(seed, key_of("start"), j)) % 2**63)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
                elif any(q.requires_grad for q in module.parameters(recurse=False)):
                    raise ConfigError(
                        f"algorithm.init_scale: is none, and {type(module).__name__} has no reset_parameters to draw "
                        "the other starting models; give a number s for w0 + s N(0, I)"
                    )
        rows.append(task.layout.flatten(model).to(w0))
    return torch.stack(rows)


def losses(task, w: Tensor, data) -> Tensor:
    """[s, c]: the loss of each of `w: [s, c, p]` on all of a client's training samples."""
    everything = data.whole()
    return torch.stack([task.loss_of(w[:, j], everything) for j in range(w.shape[1])], 1)


class Choosing(Newcomer):
    """A newcomer to frozen models: it downloads all of them and deploys the one with the least training loss."""

    def __init__(self, algorithm, task, server, samples):
        super().__init__(algorithm, task, server, samples)
        self.trains = False

    def offered(self):
        return self.before["w"]

    def enter(self, choice, samples):
        found = {"cluster": choice, KNOWN: samples}
        self.rows = {name: torch.full_like(t, found[name]) for name, t in self.rows.items()}
        return {}


@dataclass(frozen=True)
class Alternating(Clustered, abstract=True):
    """What IFCA and HypCluster share: k starts, the choice by training loss, training of the chosen model."""

    lr: float = setting(0.1, source="ours")
    k: int = setting(2, ge=1, le=10000, source="of the problem")
    weighted: bool = setting(False, source="paper")
    shared_layers: str | tuple[str, ...] = setting("", source="paper")
    init_scale: float | None = setting(None, gt=0, source="ours")
    seed: int = setting(0, ge=0, source="ours")

    traffic = "2 down, 1 up (k models down; one number more up, the cluster)"

    def init_server(self, task, w0, n):
        w = starts(task, w0, self.k, self.seed, self.init_scale)
        each = {"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)}
        if not self.shared_layers:
            return Server({"w": w}, each)
        own = self._own(task).to(w0.device)
        return Server({"w": torch.where(own, w, w0), "own": own}, each)

    def _own(self, task):
        """[p] bool: True where the clusters have parameters of their own."""
        try:
            names = self.shared_layers
            return ~task.layout.mask(*(names.split() if isinstance(names, str) else names))
        except KeyError as e:
            raise ConfigError(f"algorithm.shared_layers of {type(self).__name__}: {e.args[0]}") from None

    def admit(self, task, server, samples):
        return Choosing(self, task, server, samples)

    def downlink(self, server, round):
        w = server["w"]
        if not self.shared_layers:
            return Down(shared={"w": w})
        return Down(shared={"own": w[:, server["own"]], "common": w[0, ~server["own"]]})

    def _received(self, task, down):
        """[s, k, p] the models of one downlink."""
        if not self.shared_layers:
            return down["w"]
        own = self._own(task).to(down["own"].device)
        w = down["own"].new_empty(*down["own"].shape[:2], task.p)
        w[..., own], w[..., ~own] = down["own"], down["common"][:, None]
        return w

    def local_update(self, task, client, down, data, round):
        w = self._received(task, down)
        j = losses(task, w, data).argmin(1)
        return {}, {"w": self._train(task, w[torch.arange(len(j)), j], data), "cluster": j.int()}

    def _train(self, task, w, data):
        return local_sgd(task, w, data, self.lr)

    def aggregate(self, server, up, round):
        cluster, weights = up["cluster"].long(), round.samples if self.weighted else None
        w = self._models(server["w"], up, cluster, weights)
        if self.shared_layers:
            w = torch.where(server["own"], w, up.mean("w", weights))
        return server | {"w": w, "cluster": server["cluster"].index_copy(0, round.ids, cluster)}

    def _models(self, w, up, cluster, weights):
        """[k, p]: every cluster's next model."""
        return up.mean("w", weights, within=cluster, out=w)


@dataclass(frozen=True)
class IFCA(Alternating):
    """Iterative federated clustering: a client picks one of k models by its training loss, and trains that one.

        j_i = argmin_j F_i(theta_j)                           on all of client i's training samples
        model averaging      w_i = local SGD from theta_{j_i} on F_i,   theta_j <- mean of the w_i with j_i = j
        gradient averaging   g_i = grad F_i(theta_{j_i}) on one batch,  theta_j <- theta_j - (lr/|S|) sum_{j_i = j} g_i

    A model that nobody picks stays as it is. A client deploys the model that it picked last; one that was never asked,
    the model of the cluster with the most samples.

    Parameters
    ----------
    lr : float
        Step size.
    k : int
        Number of clusters, which the method does not find itself.
    weighted : bool
        Weigh clients by their number of samples; False: plain mean, as in the paper.
    shared_layers : str or tuple of str
        Layers that all clusters have in common, averaged over all participants and sent once ("body", "head", names);
        a text has its names separated by spaces.
    init_scale : float or None
        The first start is the common one. None: the others are drawn as its modules draw theirs; a number s:
        w0 + s N(0, I).
    seed : int
        Seed of the k initial models; whether the clusters are found depends on them.
    averaging : str
        "model" or "gradient". Under gradient averaging a client takes one step a round, on one batch (all its samples
        with full batches), and sends the model after it, which tells the server the gradient.
    restarts : int
        Sets of k starts, those of seed, seed + 1, ...: above 1, an exchange before the first one sends all of them to
        the first round's participants, and the set in which their best models have the least mean training loss is
        trained (weighted by samples if `weighted`).

    Notes
    -----
    The paper restarts whole runs and keeps the one with the least training loss after it. `restarts` compares starts
    before any training, which costs one exchange; for the paper's way, compare runs of several seeds.
    """

    averaging: Literal["model", "gradient"] = setting("model", source="paper")
    restarts: int = setting(1, ge=1, le=10000, source="ours")

    sources = "paper: weighted, shared_layers, averaging; of the problem: k; ours: lr, init_scale, seed, restarts"
    certificates = (
        "tests/certificates/test_ifca.py::test_planted_clusters_and_their_means: clusters and models in closed form",
        "tests/certificates/test_ifca.py::test_one_cluster_is_fedavg: identity at k = 1, both kinds of averaging",
        "tests/certificates/test_ifca.py::test_a_round_by_hand: Algorithm 1 in numpy, several rounds",
        "tests/certificates/test_ifca.py::test_clusters_are_chosen_by_training_loss: misleading test data",
        "tests/certificates/test_ifca.py::test_the_start_nearest_to_the_clients_is_kept: the planted one, and numpy",
    )
    citation = """@inproceedings{ghosh2020efficient,
  title     = {An Efficient Framework for Clustered Federated Learning},
  author    = {Ghosh, Avishek and Chung, Jichan and Yin, Dong and Ramchandran, Kannan},
  booktitle = {NeurIPS},
  year      = {2020}
}"""

    def phases(self, t):
        return 2 if self._compares(t) else 1

    def _compares(self, t, phase=0):
        """Whether this exchange is the one that compares starts."""
        return self.restarts > 1 and t == phase == 0

    def init_server(self, task, w0, n):
        server = super().init_server(task, w0, n)
        if self.restarts == 1:
            return server
        sets = [starts(task, w0, self.k, self.seed + r, self.init_scale) for r in range(self.restarts)]
        w = torch.cat(sets)
        return server._replace(free={"starts": torch.where(server.shared["own"], w, w0) if self.shared_layers else w})

    def downlink(self, server, round):
        every = self._compares(round.t, round.phase)
        return super().downlink(server | {"w": server["starts"]} if every else server, round)

    def local_update(self, task, client, down, data, round):
        if not self._compares(round.t, round.phase):
            return super().local_update(task, client, down, data, round)
        loss = losses(task, self._received(task, down), data)
        return {}, {"loss": loss.unflatten(1, (self.restarts, self.k)).amin(2)}

    def aggregate(self, server, up, round):
        if not self._compares(round.t, round.phase):
            return super().aggregate(server, up, round)
        best = int(up.mean("loss", round.samples if self.weighted else None).argmin())
        w = server["starts"].unflatten(0, (self.restarts, self.k))[best]
        return server | {"w": w, "starts": server["starts"][:0]}

    def _train(self, task, w, data):
        if self.averaging == "model":
            return super()._train(task, w, data)
        return w - self.lr * task.gradient(w, next(iter(data)), need_loss=False)[0]

    def _models(self, w, up, cluster, weights):
        new = super()._models(w, up, cluster, weights)
        if self.averaging == "model":
            return new
        mass = torch.ones_like(cluster, dtype=w.dtype) if weights is None else weights.to(w.dtype)
        share = torch.zeros_like(w[:, 0]).index_add_(0, cluster, mass / mass.sum())
        return w + share[:, None] * (new - w)  # divided by |S|, not by the cluster's size


@dataclass(frozen=True)
class HypCluster(Alternating):
    """HypCluster: k hypotheses; a client picks the one with the least training loss and trains it.

        j_i = argmin_j F_i(h_j),   w_i = local SGD from h_{j_i},   h_j <- sum_{j_i = j} n_i w_i / sum_{j_i = j} n_i

    The same alternation as IFCA with model averaging, published at the same time; its means are weighted by samples.

    Parameters
    ----------
    lr : float
        Step size of local SGD.
    k : int
        Number of hypotheses.
    weighted : bool
        Weigh clients by their number of samples, as in the paper; False: plain mean.
    shared_layers : str or tuple of str
        Layers that all hypotheses have in common, averaged over all participants and sent once; a text has its names
        separated by spaces.
    init_scale : float or None
        The first start is the common one. None: the others are drawn as its modules draw theirs; a number s:
        w0 + s N(0, I).
    seed : int
        Seed of the k initial models.
    """

    shared_layers: str | tuple[str, ...] = setting("", source="ours")
    weighted: bool = setting(True, source="paper")

    certificates = (
        "tests/certificates/test_ifca.py::test_planted_clusters_and_their_means: clusters and models in closed form",
        "tests/certificates/test_ifca.py::test_one_cluster_is_fedavg: identity at k = 1",
        "tests/certificates/test_ifca.py::test_hypcluster_is_weighted_ifca: identity with IFCA",
    )
    citation = """@article{mansour2020three,
  title   = {Three Approaches for Personalization with Applications to Federated Learning},
  author  = {Mansour, Yishay and Mohri, Mehryar and Ro, Jae and Suresh, Ananda Theertha},
  journal = {arXiv:2002.10619},
  year    = {2020}
}"""
