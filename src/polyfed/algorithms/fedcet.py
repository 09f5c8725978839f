"""FedCET: Liu, Wang (arXiv 2503.15804), Algorithms 1, 2, in the (d, x) form of Lemma 1."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd, sgd_with_curvature
from polyfed.core.algorithm import Down, Needs, Personal, Portrait, Server
from polyfed.core.newcomer import Newcomer


@cache
def paper_step(smoothness: float, convexity: float, tau: int) -> float:
    """The step size of Algorithm 1: the largest `a`, growing from a0, for which both of its conditions hold."""
    L, mu = smoothness, convexity
    k = (1 + 2 / tau) ** (2 * tau - 2)

    def slack(a: float) -> float:
        first = 1 - tau * mu * a + tau * L**2 * (tau * a - 2 / mu) * k * a
        second = (1 - tau * L * a) * tau * mu + tau**3 * L**4 * (tau * a - 2 / mu) * k * a**2  # divided by a
        return min(first, second)

    # the first root of the two polynomials; the paper's search with increment h stops within h below it
    low = 0.999 * min(1 / (2 * tau * L), mu**2 / (2 * tau * k * L**3), mu / (5 * tau * k * L**2))
    high = low
    while slack(high) > 0:
        low, high = high, high + 0.001 * low
    brentq: Any = import_module("scipy.optimize").brentq  # slow to import
    root, _ = brentq(slack, low, high, xtol=1e-15 * high, full_output=True)
    return float(root)


def exchange_weight(tau: Tensor, spread: float | Tensor = 0.0) -> Tensor:
    """The default c a: 7/8 of the bound 4/(tau + 2), less where only some clients take part, and at most 1/2."""
    width = tau + 2
    # spread: 1/m - 1/n for m of n clients, the variance of a mean over them; by benchmarks/fedcet_weight.py
    return (3.5 / (width * (1 + 2 * width * spread))).clamp(max=0.5)


@dataclass(frozen=True)
class FedCET(Personal):
    """Exact linear convergence under drift: one vector up and one down per round, no decaying step.

        tau local steps      x_i <- x_i - a (grad f_i(x_i) + d_i)          z_i: the last of them, uploaded
        exchange             d_i <- d_i + c (z_i - zbar),   x_i <- z_i - c a (z_i - zbar)

    with zbar the mean over the participants; sum_i d_i = 0 throughout, and d_i -> -grad f_i(x*). Before the first round
    is the paper's start: two steps with d_i = 0 and an exchange.

    Notes
    -----
    The theory needs strongly convex losses, full-batch gradients and full participation; everything else runs outside
    of it. The adaptive step needs gradients without jumps: across the kink of a ReLU the measured smoothness grows as
    the step shrinks, without end.

    An exchange adds c (z_i - zbar) to d_i, and the next tau steps move x_i by -tau a times that. For small a L the
    roots of this recursion leave the unit circle unless c a (tau + 2) < 4, whatever a is. Below, a larger c a is
    faster; but the mean of m of n clients has a variance of 1/m - 1/n of theirs, which a large c a blows up. The
    default weighs both. c must be the same for all clients of a round, or sum_i d_i = 0 breaks; where their numbers of
    steps differ, c a is that of 5 steps, and a client of more steps makes them 7 / (tau_i + 2) as long.

    The server keeps every client's last smoothness and forgets 2 % of it whenever that client has measured again, with
    full batches between successive steps; a client of one step takes a second gradient behind it.

    Where all Hessians are equal the mean of the x_i converges as gradient descent on f does, and the clients'
    differences at a rate of their own: under "paper", on the problem of Figure 1, the mean by 0.886 a round, which the
    figure shows, but every single x_i by 0.938.
    """

    linear_claims = "its linear rate and its exact optimum"
    linear_only = True

    lr: float | Literal["adaptive", "paper"] = setting(
        "adaptive",
        gt=0,
        source="ours",
        doc='a. "adaptive": no constant needed, every client measures the smoothness it meets and uploads it as one '
        'number; "paper": Algorithm 1, from `smoothness` and `convexity`; or a number.',
    )
    weight: float | None = setting(
        None,
        gt=0,
        lt=4 / 3,
        source="ours",
        doc="c a, the share of the way to the mean that an exchange goes. None: `exchange_weight`, that is min(1/2, "
        '3.5/(tau + 2)) where all take part; under "paper" the paper\'s bound, c = mu / (2 mu a + 8).',
    )
    smoothness: float | None = setting(
        None,
        gt=0,
        source="of the problem",
        doc='L, the largest curvature of the clients\' losses; needed by "paper" only.',
    )
    convexity: float | None = setting(
        None,
        ge=0,
        source="of the problem",
        doc='mu, the smallest curvature of the clients\' losses; needed by "paper" only.',
    )
    first_lr: float = setting(1e-3, gt=0, source="ours", doc="First guess of the adaptive step.")
    safety: float = setting(1.0, gt=0, source="ours", doc="The adaptive step is at most safety / (tau L).")

    needs = Needs(
        exchanges=2, first=4, plain_sgd="its exchange takes z_i for the end of tau gradient steps of length a"
    )

    def __post_init__(self):
        super().__post_init__()
        for key in ("smoothness", "convexity") if self.lr == "paper" else ():
            self.require(bool(getattr(self, key)), key, "a number above 0, for lr = 'paper'")

    def init_server(self, task, w0, n):
        if self.lr != "adaptive":
            return {"w": w0}
        return Server({"w": w0, "a": w0.new_tensor(self.first_lr)}, each={"smoothness": w0.new_zeros(n)})

    def init_client(self, task, w0):
        return {"w": w0, "d": zeros_like(w0), "a": w0.new_tensor(0.0)}

    def admit(self, task, server, samples):
        """A newcomer deploys the common model, to which all x_i tend."""
        newcomer = Newcomer(self, task, server, samples)
        newcomer.trains = False
        return newcomer

    def downlink(self, server, round):
        if round.phase % 2:
            m = len(round.ids)
            some = {"spread": server["w"].new_tensor(1 / m - 1 / round.n)} if m < round.n else {}
            return Down(shared={"zbar": server["w"], **some})
        return Down(shared={"a": server["a"]} if self.lr == "adaptive" else {})

    def local_update(self, task, client, down, data, round):
        if round.phase % 2:
            return self._exchange(client, down, data), {}
        d, a = client["d"], self._step(client, down, data)
        share = self._shares(client, data)[1]
        work = data.again("start", steps=2) if round.t == 0 and round.phase == 0 else data
        if self.lr == "adaptive":
            z, ratio = sgd_with_curvature(task, client["w"], work, (share * a)[:, None], shift=d)
            up = {"z": z, "smoothness": ratio * share * data.steps}
        else:
            z = local_sgd(task, client["w"], work, (share * a)[:, None], shift=d)
            up = {"z": z}
        return {"w": z, "a": a}, up

    def _exchange(self, client, down, data):
        z, a = client["w"], client["a"][:, None]
        gap, (ca, share) = z - down["zbar"], self._shares(client, data, down.get("spread", 0.0))
        x, d = torch.addcmul(z, (ca * share)[:, None], gap, value=-1), torch.addcmul(client["d"], ca[:, None] / a, gap)
        return {"w": x, "d": d}

    def _step(self, client, down, data):
        """[s] step sizes a, the same for all clients."""
        if self.lr == "adaptive":
            return down["a"]
        if self.lr == "paper":
            self.require(data.equal_steps, "lr", "local_steps or full batches with it: one tau for all")
            return torch.full_like(client["a"], paper_step(self.smoothness, self.convexity, int(data.steps.max())))
        return torch.full_like(client["a"], float(self.lr))

    def _shares(self, client, data, spread=0.0):
        """[s] c a, the same for all clients, and [s] the part of a that each client takes."""
        a, one = client["a"], torch.ones_like(client["a"])
        if self.weight is not None:
            return self.weight * one, one
        if self.lr == "paper":
            mu = float(self.convexity or 0)
            return mu * a / (2 * mu * a + 8), one
        tau = data.steps.to(a.dtype)
        if data.equal_steps:
            return exchange_weight(tau, spread), one
        return exchange_weight(5 * one, spread), (7 / (tau + 2)).clamp(max=1)

    def conserved(self, server, clients):
        return {"sum d_i = 0": clients["d"].sum(0)}

    def aggregate(self, server, up, round):
        if round.phase % 2:
            return server
        state = {"w": up.mean("z")}
        if self.lr == "adaptive":
            L, new = server["smoothness"].clone(), up["smoothness"]  # tau L of every client
            L[round.ids] = torch.where(new > 0, torch.maximum(0.98 * L[round.ids], new), L[round.ids])
            state |= {"a": torch.minimum(self.safety / L.max(), 2 * server["a"]), "smoothness": L}
        return state

    def describe(self, server):
        rule = {"step_rule": self.lr if isinstance(self.lr, str) else "fixed"}
        step = {"step": server["a"]} if self.lr == "adaptive" else {}
        return Portrait(common=server["w"], findings=rule | step)
