"""TAMUNA: Condat, Agarsky, Malinovsky, Richtarik (arXiv 2302.09832), Algorithm 1."""

from dataclasses import dataclass

from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, by_settings
from polyfed_exact.loop import PLAIN, Masked, wider


@dataclass(frozen=True)
class TAMUNA(Masked):
    """Scaffnew with a cohort S of c clients, drawn uniformly, and numbers that s of them send.

        x_i = zbar, tau ~ Geo(p) times  x_i <- x_i - lr (grad f_i(x_i) - h_i)
        zbar <- (1/s) sum_S q_i x_i,    h_i <- h_i + (p chi/lr) q_i (zbar - x_i) for i in S, the others keep theirs

    q_i in {0, 1}^d are masks with s ones per coordinate among the cohort. For 0 < lr < 2/L and chi at most
    n (s - 1)/(s (n - 1)) the factor per local step is max{(1 - lr mu)^2, (1 - lr L)^2, 1 - p^2 chi (s - 1)/(n - 1)},
    whatever c is. One vector goes down before training and the numbers that a client has sent, of the new zbar, after.
    """

    @by_settings
    def needs(self):
        return Needs(exchanges=2, plain_sgd=PLAIN, uniform="its rate is proven for cohorts of at least two")

    def downlink(self, server, round):
        slots = self.slots(server, round)
        if round.phase:
            z = wider(server["w"].expand(len(slots), -1))
            return Down(each={"z": z.gather(1, self.places(slots, len(server["w"]), round))})
        return Down(shared={"w": server["w"]}, each={"at": slots})

    def local_update(self, task, client, down, data, round):
        at = client["at"] if round.phase else down["at"]
        places = self.places(at, task.p, round)
        if round.phase:
            gap = down["z"] - wider(client["x"]).gather(1, places)
            return {"h": self.dual(client, gap, places, data, round)}, {}
        x = local_sgd(task, down["w"], self.work(data, round), self.lr, minus=client["h"])
        return {"x": x, "at": at}, {"x": wider(x).gather(1, places)}

    @classmethod
    def theory(
        cls, smoothness: float, convexity: float, clients: int, cohort: int | None = None, keep: float = 1.0
    ) -> "TAMUNA":
        """The paper's: lr = 1/L, p = min(1, sqrt(n/(s kappa))), chi at its bound. cohort: c, None: all; keep: s/c"""
        return cls._proven(smoothness, convexity, clients, clients if cohort is None else cohort, keep)
