"""FedCET's exchange weight: contraction per round of its iteration on quadratics, for c a from .1 to .9 of 4/(tau + 2).

    python benchmarks/fedcet_weight.py

Models and duals are linear in each other where f_i(x) = x' H_i x / 2, so the rate is the iteration's own, in numpy
alone. H_i: least squares of fedcet/equal-bytes, the same with a spectrum forty times wider, the hospitals' logistic
regression at its optimum, equal Hessians. Participation: all, half, a fifth (two at least). Every cell: the rate at the
best of the steps, and at 1/(tau L), which is what the adaptive rule takes; above 1 it diverges.
"""

import numpy as np
import torch

from polyfed.algorithms.fedcet import exchange_weight
from polyfed.data.synthetic import least_squares
from polyfed_papers.fedcet import hospitals

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)


def hessians() -> dict[str, np.ndarray]:
    """name -> [n, p, p]"""
    found = {}
    for name, curvature in (("least squares", 0.3), ("wide", 1.0)):
        train = least_squares(10, 50, 20, curvature=curvature, seed=0).train
        inputs = [train.client(i)[0].numpy() for i in range(10)]
        found[name] = np.stack([2 * x.T @ x / len(x) for x in inputs])
    problem = hospitals(0)
    w, bias = problem.optimum[:-2].reshape(2, -1), problem.optimum[-2:]
    margin = np.r_[w[1] - w[0], bias[1] - bias[0]]
    logistic = []
    for i in range(4):
        x = problem.federation.train.client(i)[0].numpy().astype(float)
        x = np.c_[x, np.ones(len(x))]
        p = 1 / (1 + np.exp(-x @ margin))
        # of both classes' weights only the difference counts: 2 p (1 - p) x x' along it, and the l2 term
        logistic.append(2 * (x.T * (p * (1 - p))) @ x / len(x) + problem.convexity * np.eye(x.shape[1]))
    found["logistic"] = np.stack(logistic)
    found["equal"] = np.stack([np.diag(np.linspace(0.1, 1, 10))] * 10)
    return found


def rate(H: np.ndarray, a: float, weight: float, tau: int, m: int, rounds: int = 240) -> float:
    """Mean factor per round of ||(x - x*, a (d - d*))||, over the last two thirds of the rounds."""
    n, p = H.shape[:2]
    rng, log = np.random.default_rng(0), 0.0
    w, V = np.linalg.eigh(H)
    q = (1 - a * w) ** tau
    Q, R = ((V * v[:, None, :]) @ V.transpose(0, 2, 1) for v in (q, (1 - q) / (a * w)))
    x, u = rng.normal(size=(2, n, p))  # u = a d
    for t in range(rounds):
        u -= u.mean(0)
        ids = np.sort(rng.permutation(n)[:m])
        z = np.einsum("ijk,ik->ij", Q[ids], x[ids]) - np.einsum("ijk,ik->ij", R[ids], u[ids])
        gap = z - z.mean(0)
        x[ids] = z - weight * gap
        u[ids] += weight * gap
        size = np.sqrt((x**2).sum() + (u**2).sum())
        log += np.log(size) if t >= rounds // 3 else 0.0
        x, u = x / size, u / size
    return float(np.exp(log / (rounds - rounds // 3)))


def main() -> None:
    for name, H in hessians().items():
        n, L = len(H), np.linalg.eigvalsh(H).max()
        print(f"\n{name}: {n} clients, {H.shape[1]} parameters\n")
        print("| tau | clients | " + " | ".join(f"{s:g}" for s in SHARES) + " | default |")
        print("|--:|--:|" + "--:|" * (len(SHARES) + 1))
        for tau in (1, 2, 5, 10, 20):
            steps = np.unique(np.r_[0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 1.9, 0.5 / tau, 1 / tau]) / L
            for m in sorted({n, n // 2, max(2, n // 5)}, reverse=True):
                default = exchange_weight(torch.tensor(float(tau), dtype=torch.float64), 1 / m - 1 / n)
                cells = []
                for weight in (*(4 * s / (tau + 2) for s in SHARES), float(default)):
                    best = min(rate(H, a, weight, tau, m) for a in steps)
                    cells.append(f"{best:.3f}, {rate(H, 1 / (tau * L), weight, tau, m):.3f}")
                print(f"| {tau} | {m} of {n} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
