"""StoCFL: Zeng et al., "Stochastic Clustered Federated Learning" (arXiv 2303.00897)."""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.similarity import similarity
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait, Server


@dataclass(frozen=True)
class StoCFL(Algorithm):
    """Bottom-up clusters under any participation: a model theta_k per cluster, held near a common model omega.

        psi_i = anchor - local SGD from anchor on f_i,   anchor the common start; once, at a client's first contact
        while cos(Psi_k, Psi_l) >= tau for some clusters, the most similar two become one,   Psi_k = mean_{i in k} psi_i
        theta_k <- mean of theta_i = local SGD from theta_k on f_i + mu/2 ||theta - omega||^2
        omega <- mean_S of local SGD from omega on f_i

    A client deploys its cluster's model; one that never took part, omega.

    Notes
    -----
    A new client is a cluster of its own, whose model is omega. When two become one, the model of the one with more
    clients stays, or with more samples; no cluster is split. The paper compares the clusters that a round's clients
    belong to; here all that the server has met, as it holds every psi. The released code takes Psi_k over the members
    in the present cohort alone.
    """

    lr: float = setting(0.1, source="code", doc="Step size of all local solves.")
    tau: float = setting(
        0.5, source="ours", doc="Cosine from which clusters merge; of the problem, 0.2 to 0.65 in the code."
    )
    mu: float = setting(0.05, ge=0, source="code", doc="Pull of the cluster's model towards the common one.")
    anchor_epochs: int = setting(20, ge=1, source="code", doc="Passes over the local data from the anchor.")

    needs = Needs(exchanges=2, unmet_first=True)

    def init_server(self, task, w0, n):
        """w: [n, p] the models of clusters, which have the name of one of their clients; psi: of clients."""
        w, psi = w0.expand(n, -1).clone(), w0.new_zeros(n, len(w0))
        return Server({"common": w0}, {"cluster": torch.arange(n, device=w0.device), "w": w, "psi": psi})

    def downlink(self, server, round):
        if round.phase == 0:
            return Down()
        return Down({"common": server["common"]}, {"w": server["w"][server["cluster"][round.ids]]})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            anchor = task.w0.expand(len(round.ids), -1)
            first = data.again("anchor", epochs=self.anchor_epochs)
            return {}, {"psi": anchor - local_sgd(task, anchor, first, self.lr)}
        theta = local_sgd(task, down["w"], data, self.lr, pull=(self.mu, down["common"]))
        return {}, {"w": theta, "common": local_sgd(task, down["common"], data, self.lr)}

    def aggregate(self, server, up, round):
        if round.phase == 0:
            psi = server["psi"].index_copy(0, round.ids, up["psi"])
            w = server["w"].index_copy(0, round.ids, server["common"].expand(len(round.ids), -1))
            samples = server["known"].index_copy(0, round.ids, round.samples)
            return server | {"psi": psi, "w": w, "cluster": self._merged(psi, server["cluster"], samples)}
        w = up.mean("w", within=server["cluster"][round.ids], out=server["w"].clone())
        return server | {"w": w, "common": up.mean("common")}

    def _merged(self, psi, cluster, samples):
        """[n] clusters after all merges, of the clients with samples."""
        cluster, met = cluster.clone(), samples > 0
        names = cluster[met].unique()
        member = ((cluster == names[:, None]) & met).double()
        sums = member @ psi.double()  # their cosines are those of the means
        while len(names) > 1:
            cosine = similarity(sums).fill_diagonal_(-torch.inf)
            if cosine.max() < self.tau:
                break
            pair = list(divmod(int(cosine.argmax()), len(names)))
            size = [(float(member[k].sum()), float(member[k] @ samples.double())) for k in pair]
            stays, goes = pair if size[0] >= size[1] else pair[::-1]
            cluster[met & (cluster == names[goes])] = names[stays]
            member[stays] += member[goes]
            sums[stays] += sums[goes]
            left = torch.arange(len(names), device=names.device) != goes
            names, member, sums = names[left], member[left], sums[left]
        return cluster

    def deployment(self, server, round):
        own = server["w"][server["cluster"][round.ids]]
        return Down(each={"w": torch.where((server["known"] > 0)[round.ids, None], own, server["common"])})

    def describe(self, server):
        return Portrait(common=server["common"], clusters=server["cluster"].unique(return_inverse=True)[1])
