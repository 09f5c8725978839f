"""CompressedScaffnew: Condat, Agarsky, Richtarik (arXiv 2210.13277), Algorithm 1."""

from dataclasses import dataclass

from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down
from polyfed_exact.loop import Masked, wider


@dataclass(frozen=True)
class CompressedScaffnew(Masked):
    """Scaffnew in which every number goes up from s of the n clients alone.

        xh_i <- x_i - lr (grad f_i(x_i) - h_i)
        with probability p:  z = (1/s) sum_j q_j xh_j,   h_i <- h_i + (p chi/lr) q_i (z - xh_i),   x_i <- z

    q_i in {0, 1}^d are masks with s ones per coordinate among all clients, drawn anew. For 0 < lr < 2/L the factor per
    step is max{(1 - lr mu)^2, (1 - lr L)^2, 1 - p^2 chi (s - 1)/(n - 1)}. It pays from some thirty clients on.
    """

    def downlink(self, server, round):
        if round.phase:
            return Down(shared={"z": server["w"]})
        return Down(each={"at": self.slots(server, round)})

    def local_update(self, task, client, down, data, round):
        at = client["at"] if round.phase else down["at"]
        places, x = self.places(at, task.p, round), client["x"]
        if round.phase:
            gap = wider(down["z"] - x).gather(1, places)
            return {"x": down["z"], "h": self.dual(client, gap, places, data, round)}, {}
        x = local_sgd(task, x, self.work(data, round), self.lr, minus=client["h"])
        return {"x": x, "at": at}, {"x": wider(x).gather(1, places)}

    @classmethod
    def theory(cls, smoothness: float, convexity: float, clients: int, keep: float = 1.0) -> "CompressedScaffnew":
        """The paper's: lr = 1/L, p = min(1, sqrt(n/(s kappa))), chi at its bound. keep: s/n"""
        return cls._proven(smoothness, convexity, clients, clients, keep)
