"""LoCoDL: Condat, Maranjyan, Richtarik, ICLR 2025, Algorithm 1."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from torch import Tensor, zeros_like

from polyfed.base.randomness import generator_key
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down
from polyfed_exact.loop import Random, conditioning, keyed, keys_of
from polyfed_exact.unbiased import COMPRESSORS


@dataclass(frozen=True)
class LoCoDL(Random):
    """Local steps and any unbiased compression C of one vector up; y and v are known to all.

        xh_i <- x_i - lr (grad f_i(x_i) - m x_i - u_i),   yh <- y - lr (m y - v)
        with probability p:  d_i = C_i(xh_i - yh) up,   D = 1/(2n) sum_j d_j down
            x_i <- (1 - rho) xh_i + rho (yh + D),   y <- yh + rho D
            u_i <- u_i + p chi/(lr (1 + 2 omega)) (D - d_i),   v <- v + p chi/(lr (1 + 2 omega)) D

    m/2 |x|^2 of every f_i is the common term's; rho = chi = 1/(1 + omega/n). mean u_i + v = 0. y is deployed.
    For 0 < lr < 2/L the factor per step is max{(1 - lr mu')^2, (1 - lr L)^2, 1 - p^2 chi/(1 + 2 omega)}, mu' the least
    curvature that is left to f_i and to the common term.
    """

    compressor: str = setting(
        "rand",
        source="paper",
        doc='"rand": a share `keep` of the entries, drawn anew, without positions; "natural": each entry to a power of '
        "two, in 2 bytes. A biased one, such as top-k, is refused.",
    )
    keep: float = setting(0.5, gt=0, le=1, source="ours", doc='Share of the entries that "rand" sends. 1: all.')
    m: float = setting(0.01, gt=0, source="ours", doc="Curvature that the common term has of every f_i; theory: mu/2.")

    def __post_init__(self):
        super().__post_init__()
        self.require(self.compressor in COMPRESSORS, "compressor", f"an unbiased one: {' or '.join(COMPRESSORS)}")

    @property
    def omega(self) -> float:
        """The relative variance of the compressor."""
        return COMPRESSORS[self.compressor].omega(self.keep)

    def init_server(self, task, w0, n):
        return keyed(w0, v=zeros_like(w0), D=zeros_like(w0))

    def init_client(self, task, w0):
        return {"x": w0, "u": zeros_like(w0), "y": w0, "v": zeros_like(w0), "d": zeros_like(w0)}

    def downlink(self, server, round):
        return Down(shared={"D": server["D"]} if round.phase else {})

    def local_update(self, task, client, down, data, round):
        rho, step = self._lengths(round.n, self.chance(data))
        if round.phase:
            D, y = down["D"], client["y"]
            x = (1 - rho) * client["x"] + rho * (y + D)
            return {
                "x": x, "y": y + rho * D, "u": client["u"] + step * (D - client["d"]), "v": client["v"] + step * D,
            }, {}  # fmt: skip
        work, keys = self.work(data, round), data.again("locodl").order_keys()
        pull = (-self.m, zeros_like(client["x"]))
        x = local_sgd(task, client["x"], work, self.lr, pull=pull, minus=client["u"])
        y = self._common(client["y"], client["v"], work.total)
        compress = COMPRESSORS[self.compressor]
        d = compress.pack(x - y, self.keep, keys)
        kept = compress.unpack(d, task.p, self.keep, keys).to(x.dtype)
        about = x.new_tensor([work.total, self.chance(data)]).expand(len(x), 2)
        return {"x": x, "y": y, "d": kept}, d | {"about": about}

    def aggregate(self, server, up, round):
        if round.phase:
            return server
        keys = generator_key(round.seed, "locodl", round.t, keys_of(server, round))
        keys = np.stack(np.broadcast_arrays(*keys), -1)
        d = COMPRESSORS[self.compressor].unpack({"d": up["d"]}, len(server["w"]), self.keep, keys)
        D, (steps, p) = d.to(server["w"].dtype).mean(0) / 2, up.mean("about").tolist()
        rho, step = self._lengths(round.n, p)
        y = self._common(server["w"], server["v"], int(steps + 0.5))
        return server | {"D": D, "w": y + rho * D, "v": server["v"] + step * D}

    def _lengths(self, n: int, p: float) -> tuple[float, float]:
        """rho = chi, and p chi / (lr (1 + 2 omega))."""
        rho = 1 / (1 + self.omega / n)
        return rho, p * rho / (self.lr * (1 + 2 * self.omega))

    def _common(self, y: Tensor, v: Tensor, steps: int) -> Tensor:
        """Some steps y <- y - lr (m y - v)."""
        return (1 - self.lr * self.m) ** steps * (y - v / self.m) + v / self.m

    def conserved(self, server, clients):
        return {"mean u_i + v = 0": clients["u"].mean(0) + clients["v"][0]}

    @classmethod
    def theory(cls, smoothness: float, convexity: float, clients: int, keep: float = 1.0) -> "LoCoDL":
        """With "rand": lr = 1/L, m = mu/2, p = min(1, sqrt((1 + omega)(1 + omega/n) mu/(2L)))."""
        omega, kappa = cls(keep=keep).omega, 2 * conditioning(smoothness, convexity, clients=clients)
        p = min(1, sqrt((1 + omega) * (1 + omega / clients) / kappa))
        return cls(1 / smoothness, p, keep=keep, m=convexity / 2)
