"""The loop of exact methods with one vector each way, and what several of them draw. Each file has its own box."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from torch import Tensor, zeros_like

from polyfed.base.errors import ConfigError
from polyfed.base.randomness import generator, key_of, mix, uniform
from polyfed.base.settings import setting
from polyfed.base.values import Limits
from polyfed.compute.batches import Batches
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs, Round, Server, State, by_settings
from polyfed.core.newcomer import Newcomer

ByClient = float | tuple[Annotated[float, Limits(ge=0, le=1)], ...]
UNLIKE = 5  # local steps of all clients where their epochs have unlike numbers of them
PLAIN = "its control variates are in units of gradient steps of length lr"


def conditioning(smoothness: float, convexity: float, **counts: int) -> float:
    """L / mu of losses that are L-smooth and mu-strongly convex. Raises ConfigError unless 0 < mu <= L, counts >= 1."""
    for name in counts:
        if counts[name] < 1:
            raise ConfigError(f"theory: found {name} = {counts[name]}, expected at least 1")
    if not 0 < convexity <= smoothness < math.inf:
        raise ConfigError(f"theory: found L = {smoothness:g} and mu = {convexity:g}, expected 0 < mu <= L")
    return smoothness / convexity


def checked_for(method: Algorithm, name: str, n: int) -> None:
    """Raise ConfigError for a list that has not one number for each client."""
    given = getattr(method, name)
    method.require(not isinstance(given, tuple) or len(given) == n, name, f"one number, or one for each of {n} clients")


def of_clients(given: float | tuple[float, ...], round: Round) -> np.ndarray:
    """[s] a setting at the clients of a call: one number for all, or one for each of the federation's."""
    if not isinstance(given, tuple):
        return np.full(len(round.ids), given)
    return np.array(given)[round.ids.cpu().numpy()]


def geometric(p: float, seed: int, t: int) -> int:
    """Local steps of round t, the same for all clients: more than m of them with probability (1 - p)^m."""
    u = float(uniform(seed, key_of("local steps"), t))
    return 1 if p == 1 else 1 + int(math.log1p(-u) / math.log1p(-p))


@dataclass(frozen=True)
class OneVector(Algorithm, abstract=True):
    """The loop, with weights rho and sigma: one vector up and one down per exchange.

        tau local steps    x_i <- x_i - lr (grad f_i(x_i) - h_i)                    x_i up
        exchange           h_i <- h_i + (sigma/lr)(z - x_i),   x_i <- x_i + rho (z - x_i),   z = mean x_i down

    sum_i h_i = 0 throughout, and in the fixed point x_i = x*, h_i = grad f_i(x*), whatever tau, rho and sigma are.

        Scaffnew  tau ~ Geo(p), rho = 1, sigma = p         LED              rho = 1, sigma = 1/tau
        FedCET    rho = sigma = c a, d_i = -h_i            Exact Diffusion  tau = 1, rho = sigma = 1/2
        SCAFFOLD  option II, all clients: rho = 1, sigma = 1/tau, h_i = c_i - c

    Theory: strongly convex losses, full batches, all clients. Where clients' epochs have unlike numbers of steps, all
    take 5.
    """

    linear_claims = "its linear rate and its exact optimum"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Length gamma of a local step.")

    @by_settings
    def needs(self):
        return Needs(exchanges=2, plain_sgd=PLAIN, everyone="its rate is proven for all clients")

    @classmethod
    def theory(cls, smoothness: float, convexity: float, *more: Any, **settings: Any) -> Self:
        """The settings for which the method's linear rate is proven, for strongly convex losses and full batches.

        Parameters
        ----------
        smoothness, convexity : float
            L and mu of every client's loss.
        *more, **settings
            What else they depend on: the number of clients, of a cohort, the share that is sent.

        Returns
        -------
        OneVector
            The method with these settings.

        Raises
        ------
        ConfigError
            Not 0 < mu <= L.
        """
        raise NotImplementedError

    def init_client(self, task, w0):
        return {"x": w0, "h": zeros_like(w0)}

    def admit(self, task, server, samples):
        """A newcomer deploys the common model, to which all x_i tend."""
        newcomer = Newcomer(self, task, server, samples)
        newcomer.trains = False
        return newcomer

    def downlink(self, server, round):
        return Down(shared={"z": server["w"]} if round.phase else {})

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]})

    def weights(self, data: Batches) -> tuple[float, float]:
        """rho and sigma."""
        return 1.0, self.chance(data)

    def work(self, data: Batches, round: Round) -> Batches:
        """The local steps of this round, the same number at all clients."""
        return data if data.equal_steps else data.again("batches", steps=UNLIKE)

    def local_update(self, task, client, down, data, round):
        x, h = client["x"], client["h"]
        if round.phase:
            rho, sigma = self.weights(data)
            return {"x": x.lerp(down["z"], rho), "h": h + sigma / self.lr * (down["z"] - x)}, {}
        x = local_sgd(task, x, self.work(data, round), self.lr, minus=h)
        return {"x": x}, {"x": x}

    def aggregate(self, server, up, round):
        return server if round.phase else {"w": up.mean("x")}

    def conserved(self, server, clients):
        return {"sum h_i = 0": clients["h"].sum(0)}

    def chance(self, data: Batches) -> float:
        """One over the run's local steps; where clients' numbers of them differ, over `UNLIKE`."""
        return 1 / (data.total if data.equal_steps else UNLIKE)


@dataclass(frozen=True)
class Random(OneVector, abstract=True):
    """The loop with rounds of Geo(p) steps."""

    p: float | None = setting(
        None,
        gt=0,
        le=1,
        source="paper",
        doc="Probability of an exchange after a local step: a round has a random number of them, 1/p on average, the "
        "same for all clients. None: 1 over the run's local steps (5 where clients' epochs differ).",
    )

    def chance(self, data):
        return super().chance(data) if self.p is None else self.p

    def work(self, data, round):
        return data.again("batches", steps=geometric(self.chance(data), round.seed, round.t))


@dataclass(frozen=True)
class Masked(Random, abstract=True):
    """The loop in which each number of x_i is sent by s of the c clients of a round, by masks that both sides draw.

    Clients take slots 0 to c - 1 in an order drawn anew, and coordinates one of their own; the k-th coordinate is sent
    by the slots k s, ..., k s + s - 1 modulo c: s d/c numbers per client, rounded up, without positions.
    """

    keep: float = setting(
        1.0,
        gt=0,
        le=1,
        source="ours",
        doc="Share s/c of the numbers that a client sends, at least those of two clients for each. 1: all of them.",
    )
    chi: float | None = setting(
        None,
        gt=0,
        source="paper",
        doc="Length of the dual step. None: its bound n (s - 1) / (s (n - 1)), beyond which nothing is proven.",
    )

    def init_client(self, task, w0):
        return {**super().init_client(task, w0), "at": w0.new_zeros(2, dtype=torch.int32)}

    def init_server(self, task, w0, n):
        return keyed(w0)

    @classmethod
    def _proven(cls, smoothness: float, convexity: float, clients: int, cohort: int, keep: float) -> Self:
        """The papers': lr = 1/L, p = min(1, sqrt(n/(s kappa))), chi at its bound."""
        s, kappa = cls(keep=keep).senders(cohort), conditioning(smoothness, convexity, clients=clients)
        if not min(2, clients) <= cohort <= clients:
            raise ConfigError(f"theory: found a cohort of {cohort}, expected at least 2 and at most {clients} clients")
        return cls(1 / smoothness, min(1, math.sqrt(clients / (s * kappa))), keep)

    def senders(self, c: int) -> int:
        """s, the clients of c that send each number."""
        return min(c, max(2, round(self.keep * c)))

    def slots(self, server: State, round: Round) -> Tensor:
        """[m, 2] the slot of each client of the round, and their number."""
        draws = mix(round.seed, key_of("slots"), round.t, keys_of(server, round))
        slot = torch.from_numpy(draws.argsort().argsort())
        return torch.stack([slot, torch.full_like(slot, len(slot))], 1).to(torch.int32).to(round.ids.device)

    def places(self, slots: Tensor, d: int, round: Round) -> Tensor:
        """[m, k] the coordinates that each slot sends; d where it has one less."""
        c = int(slots[0, 1])
        s = self.senders(c)
        flat = slots[:, :1].long() + c * torch.arange(math.ceil(s * d / c), device=slots.device)
        order = torch.from_numpy(generator(round.seed, "mask", round.t).permutation(d)).to(slots.device)
        return torch.cat([order, order.new_full((c,), d)])[flat // s]

    def dual(self, client: State, gap: Tensor, places: Tensor, data: Batches, round: Round) -> Tensor:
        """h_i + (p chi/lr) q_i (z - x_i), where the gap [m, k] is z - x_i at the places."""
        n, s = round.n, self.senders(int(client["at"][0, 1]))
        bound = n * (s - 1) / (s * (n - 1)) if n > 1 else 1.0
        step = self.chance(data) * (bound if self.chi is None else self.chi) / self.lr
        return wider(client["h"]).scatter_add_(1, places, step * gap)[:, :-1]

    def aggregate(self, server, up, round):
        if round.phase:
            return server
        slots, d = self.slots(server, round), len(server["w"])
        places = self.places(slots, d, round)
        total = server["w"].new_zeros(d + 1).index_add_(0, places.flatten(), up["x"].flatten())
        return server | {"w": total[:-1] / self.senders(len(slots))}


def keyed(w0: Tensor, **more: Tensor) -> Server:
    """A server's state with the keys of the clients' names."""
    return Server({"w": w0, **more}, drawn={"key": lambda of: torch.from_numpy(of.astype("int64")).to(w0.device)})


def keys_of(server: State, round: Round) -> np.ndarray:
    """[m] uint64 keys of the clients of a round."""
    return server["key"][round.ids].cpu().numpy().view("uint64")


def wider(v: Tensor) -> Tensor:
    """[m, d] with a column of zeros behind it, of which place d is one."""
    return torch.cat([v, v.new_zeros(len(v), 1)], 1)
