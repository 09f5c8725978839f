"""Problems whose model is a matrix, with what the nuclear norm's methods are held to, by numpy alone."""

import numpy as np
import torch
from torch import nn

import polyfed as pf


def shrink_singular(W, amount):
    U, S, Vh = np.linalg.svd(W, full_matrices=False)
    return U * np.maximum(S - amount, 0) @ Vh


def soft(W, amount):
    return np.sign(W) * np.maximum(np.abs(W) - amount, 0)


def matrix_model(out, inputs):
    linear = nn.Linear(inputs, out, bias=False, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    return linear


class MultiOutput:
    """f_i(W) = mean (X_i W' - Y_i)^2, W [16, 12], ten clients of unlike Hessians and solutions; largest Hessian 0.8."""

    out, inputs, clients, lam = 16, 12, 10, 0.02

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        common = rng.normal(size=(self.out, 2)) @ rng.normal(size=(2, self.inputs))
        X = [rng.normal(size=(30, self.inputs)) * rng.uniform(0.5, 1.5, self.inputs) for _ in range(self.clients)]
        scale = np.sqrt(0.8 / max(np.linalg.eigvalsh(self.hessian(x))[-1] for x in X))
        self.data = []
        for x in X:
            own = common + 0.5 * rng.normal(size=common.shape)
            self.data.append((scale * x, scale * x @ own.T + 0.1 * rng.normal(size=(30, self.out))))
        self.federation = pf.Federation.from_arrays(self.data, test=self.data)

    def hessian(self, x):
        return 2 * x.T @ x / (len(x) * self.out)

    def gradient(self, i, W):
        x, y = self.data[i]
        return 2 * (W @ x.T - y.T) @ x / (len(x) * self.out)

    def solution(self, lam=lam):
        """Accelerated proximal gradient on (1/n) sum f_i + lam ||W||_*, to a fixed point within 1e-12."""
        W = Z = np.zeros((self.out, self.inputs))
        k = 1.0
        for _ in range(20000):
            G = np.mean([self.gradient(i, Z) for i in range(self.clients)], axis=0)
            new = shrink_singular(Z - G, lam)  # step 1 < 1 / 0.8
            after = (1 + np.sqrt(1 + 4 * k * k)) / 2
            restart = ((Z - new) * (new - W)).sum() > 0
            Z, k = (new, 1.0) if restart else (new + (k - 1) / after * (new - W), after)
            if np.abs(new - W).max() < 1e-13:
                return new
            W = new
        raise AssertionError("the centralised solver did not converge")

    def fit(self, algorithm, rounds, steps=5, **kwargs):
        settings = {"local_steps": steps, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
        return pf.fit(matrix_model(self.out, self.inputs), self.federation, algorithm, rounds=rounds, **settings)


def matrix(run):
    return run.server["w"].view(MultiOutput.out, -1).numpy()
