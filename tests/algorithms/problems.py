"""Problems whose solution is known without any federated code, in float64."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.core.schedule import Schedule


def pair_vectors(server: dict[str, Tensor]) -> Tensor:
    """[pairs, q] of FPFC's server: w_i - w_j + v_ij / rho, where an idle pair, which has v = 0, keeps no vector."""
    held, (i, j) = server["row"] >= 0, torch.triu_indices(*[len(server["w"])] * 2, 1)
    delta = server["w"][i] - server["w"][j]
    delta[held] = server["delta"][server["row"][held]]
    return delta


@dataclass(frozen=True)
class Given(Schedule):
    """The cohort of every round, in turn."""

    cohorts: tuple[tuple[int, ...], ...]

    def cohort(self, seed, t, keys):
        return np.array(self.cohorts[t % len(self.cohorts)])


class Point(nn.Module):
    """A model that ignores its input and returns its parameter: f_i(w) is whatever the loss makes of (w, target)."""

    def __init__(self, dim: int, start: float = 0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((dim,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def centres(points: np.ndarray) -> pf.Federation:
    """f_i(w) = 1/2 ||w - c_i||^2 for each row c_i of `points`, written as a least-squares problem with scaled axes."""
    points = np.asarray(points, dtype=np.float64)
    scale = np.sqrt(points.shape[1] / 2)
    data = [(scale * np.eye(points.shape[1]), scale * c) for c in points]
    return pf.Federation.from_arrays(data, test=data)


class LeastSquares:
    """f_i(w) = mean_j (x_ij . w - y_ij)^2, with unlike Hessians and unlike solutions: clients drift.

    The optimum of the plain mean of the f_i, and every Hessian, are computed with numpy alone."""

    def __init__(self, seed: int, clients: int = 10, dim: int = 8, spread: float = 1.0, curvature: float = 4.0):
        rng = np.random.default_rng(seed)
        self.data, self.H, self.b = [], [], []
        for _ in range(clients):
            n = int(rng.integers(3 * dim, 5 * dim))
            X = rng.normal(size=(n, dim)) * np.sqrt(rng.uniform(1, curvature, dim))
            y = X @ (spread * rng.normal(size=dim)) + 0.1 * rng.normal(size=n)
            self.data.append((X, y))
            self.H.append(2 * X.T @ X / n)
            self.b.append(2 * X.T @ y / n)
        self.dim, self.clients = dim, clients
        self.optimum = np.linalg.solve(sum(self.H), sum(self.b))
        self.smoothness = max(np.linalg.eigvalsh(H)[-1] for H in self.H)
        self.convexity = min(np.linalg.eigvalsh(H)[0] for H in self.H)
        self.federation = pf.Federation.from_arrays(self.data, test=self.data)

    def model(self) -> nn.Module:
        return zero_linear(self.dim)

    def gradient(self, i: int, w: np.ndarray) -> np.ndarray:
        return self.H[i] @ w - self.b[i]

    def fit(self, algorithm, rounds: int, steps: int = 5, **kwargs) -> pf.Run:
        settings = {"local_steps": steps, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
        return pf.fit(self.model(), self.federation, algorithm, rounds=rounds, **settings)

    def error(self, w: Tensor) -> float:
        """Distance of a vector, or of the farthest of several rows, to the optimum."""
        return float((w - torch.as_tensor(self.optimum)).norm(dim=-1).max())


def zero_linear(dim: int) -> nn.Module:
    """x -> w . x in float64, from w = 0."""
    linear = nn.Linear(dim, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    return linear


def fit_points(federation: pf.Federation, algorithm, rounds: int, dim: int, **kwargs) -> pf.Run:
    """Train on `centres` by full-batch steps from zero."""
    settings = {"local_steps": 1, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
    return pf.fit(zero_linear(dim), federation, algorithm, rounds=rounds, **settings)


def labelled(sizes=(24, 9, 30), seed: int = 0, dim: int = 4, classes: int = 3, absent: bool = True) -> pf.Federation:
    """Clients with other shares of the classes, the last client without the last class where `absent`."""
    rng = np.random.default_rng(seed)
    data = []
    for i, n in enumerate(sizes):
        y = rng.choice(classes, n, p=np.roll(np.arange(1, classes + 1) / (classes * (classes + 1) / 2), i))
        y[:classes] = range(classes)
        if absent and i == len(sizes) - 1:
            y[y == classes - 1] = 0
        data.append((rng.normal(size=(n, dim)) + y[:, None], y))
    return pf.Federation.from_arrays(data, test=data, classes=classes)


def balanced(clients: int = 3, each: int = 5, dim: int = 4, classes: int = 3, seed: int = 0) -> pf.Federation:
    """Clients that have as many samples of every class."""
    rng = np.random.default_rng(seed)
    y = np.arange(each * classes) % classes
    data = [(rng.normal(size=(len(y), dim)) + y[:, None] * (i + 1), y) for i in range(clients)]
    return pf.Federation.from_arrays(data, test=data, classes=classes)


def two_layers(dim: int = 4, outputs: int = 3, norm: bool = False) -> nn.Module:
    """A small network in float64, always with the same start."""
    torch.manual_seed(0)
    between = [nn.LayerNorm(5)] if norm else []
    return nn.Sequential(nn.Linear(dim, 5), *between, nn.Tanh(), nn.Linear(5, outputs)).double()


def fit_labels(
    federation: pf.Federation, algorithm, rounds: int = 3, model: nn.Module | None = None, **kwargs
) -> pf.Run:
    settings = {"local_steps": 2, "batch_size": None, "evaluate_every": 0} | kwargs
    return pf.fit(model or two_layers(), federation, algorithm, rounds=rounds, **settings)


def batches_of(
    federation: pf.Federation, t: int, batch_size: int, epochs: int = 1, purpose: str = "batches"
) -> list[list[np.ndarray]]:
    """Every client's batches in a round of a run with seed 0: which of its own samples each step is of."""
    everyone, keys = np.arange(federation.n), client_keys(federation.names)
    work = Work(epochs=epochs, batch_size=batch_size)
    found = [[] for _ in everyone]
    for batch in Batches(federation.train, everyone, keys, work, 0, t, purpose):
        assert batch.places is not None
        for i in range(batch.rows):
            if batch.live is None or batch.live[i]:
                b = None if batch.sizes is None else batch.sizes[i]
                found[i].append(batch.places[i, :b] - federation.train.offsets[i])
    return found


def expectation_maximisation(federation, parts, lr, rounds, responsibilities, by_class, batch_size, epochs):
    """FedEM, or FedRC where `by_class`, by torch's autograd, sample by sample: (weights [n, K], models as they end)."""
    K, C = len(parts), federation.classes
    pi, common = torch.full((federation.n, K), 1 / K).double(), torch.ones(K, C).double()
    parameters = [p for f in parts for p in f.parameters()]
    share = torch.as_tensor(federation.train.counts / federation.train.counts.sum())

    def losses(x, y):
        return torch.stack([nn.functional.cross_entropy(f(x), y, reduction="none") for f in parts])

    def shares(x, y, pi):
        with torch.no_grad():
            odds = pi[:, None] * (-losses(x, y)).exp() / (common[:, y] if by_class else 1)
        return odds / odds.sum(0)

    for t in range(rounds):
        start, total = [p.detach().clone() for p in parameters], [torch.zeros_like(p) for p in parameters]
        mass, batches = torch.zeros(K, C).double(), batches_of(federation, t, batch_size, epochs)
        for i in range(federation.n):
            x, y = federation.train.client(i)
            x = x.double()
            q = shares(x, y, pi[i])
            mass += torch.stack([q[:, y == c].sum(1) for c in range(C)], 1)
            pi[i] = q.mean(1)
            for at in batches[i]:
                now = q[:, at] if responsibilities == "fixed" else shares(x[at], y[at], pi[i])
                slope = torch.autograd.grad((now * losses(x[at], y[at])).sum(0).mean(), parameters)
                for p, g in zip(parameters, slope, strict=True):
                    p.data -= lr * g
            for s, p, begin in zip(total, parameters, start, strict=True):
                s += share[i] * p.detach()
                p.data.copy_(begin)
        for p, s in zip(parameters, total, strict=True):
            p.data.copy_(s)
        common = mass / mass.sum(1, keepdim=True)
    return pi, torch.cat([p.detach().reshape(-1) for p in parameters])
