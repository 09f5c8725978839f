"""RoLoRA: Chen et al., NeurIPS 2025, Algorithm 1."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Needs
from polyfed_adapters.lora import known, noted, places, without


@dataclass(frozen=True)
class RoLoRA(Algorithm):
    """The factors take turns, so that every mean is exact and both are learnt; h is all else that is trained.

        odd rounds:   (B_i, h_i) <- local SGD on f_i, A frozen        (B, h) <- sum_i n_i (B_i, h_i) / sum_i n_i
        even rounds:  (A_i, h_i) <- local SGD on f_i, B frozen        (A, h) <- sum_i n_i (A_i, h_i) / sum_i n_i

    Half of the factors goes up. Both come down, since a client that was not in the last round lacks its half.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(True, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")

    adapter_train = "factors"
    needs = Needs(synchronous="averages B in one round and A in the next")

    def init_server(self, task, w0, n):
        return {"w": w0, **noted(places(task.layout, self))}

    def local_update(self, task, client, down, data, round):
        trained = self._trained(places(task.layout, self), task.p, round)
        w = local_sgd(task, down["w"], data, self.lr, only=trained.to(down["w"]))
        return {}, {"w": split(trained, w)[0]}

    def aggregate(self, server, up, round):
        trained = self._trained(known(server), len(server["w"]), round)
        mean = up.mean("w", round.samples if self.weighted else None)
        return server | {"w": assemble(trained, mean, split(trained, server["w"])[1])}

    def _trained(self, layers, p, round):
        """[p] bool; rounds are counted from 0 here."""
        return without(layers.values(), p, "B" if round.t % 2 else "A")
