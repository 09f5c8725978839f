"""FFA-LoRA: Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down
from polyfed_adapters.lora import known, noted, places, without


@dataclass(frozen=True)
class FFALoRA(Algorithm):
    """Only B is trained and sent, so that the mean of the updates B_i A is the update of the mean.

        (B_i, h_i) <- local SGD on f_i from (B, h), A as it was drawn
        (B, h) <- sum_i n_i (B_i, h_i) / sum_i n_i            h: all else that is trained, such as the head

    Notes
    -----
    A follows from the run's seed and the layer's name: it is the same everywhere and never sent. FedAvg on the adapter
    `lora:r=8` is this with an orthonormal A.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(True, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")

    name = "ffa-lora"
    adapter_train = "factors"

    def init_server(self, task, w0, n):
        return {"w": w0, **noted(places(task.layout, self))}

    def downlink(self, server, round):
        trained = without(known(server).values(), len(server["w"]), "A")
        return Down(shared={"w": split(trained, server["w"])[0]})

    def local_update(self, task, client, down, data, round):
        trained, w = self._received(task, down)
        w = local_sgd(task, w, data, self.lr, only=trained.to(w))
        return {}, {"w": split(trained, w)[0]}

    def aggregate(self, server, up, round):
        trained = without(known(server).values(), len(server["w"]), "A")
        mean = up.mean("w", round.samples if self.weighted else None)
        return server | {"w": assemble(trained, mean, split(trained, server["w"])[1])}

    def personal(self, task, client, down):
        return self._received(task, down)[1]

    def _received(self, task, down):
        trained = without(places(task.layout, self).values(), task.p, "A")
        return trained, assemble(trained, down["w"], split(trained, task.w0)[1].expand(len(down["w"]), -1))
