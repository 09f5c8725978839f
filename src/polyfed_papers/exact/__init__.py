"""The exact methods beside each other: problems on which the question is fair."""

import numpy as np

from polyfed import Federation
from polyfed_papers.fedcet import Problem, zeros

CLIENTS, DIM = 10, 20


def quadratics(seed: int, kappa: float, rotated: bool) -> Problem:
    """f_i(x) = x' H_i x / 2 - b_i' x with spectra from 1/kappa to 1, b_i normal.

    The clients share their eigenvectors, and so the weak direction, and the inner eigenvalues up to a factor of two; or
    each has all eigenvalues on axes of its own (rotated), and the mean is far better conditioned than any of them.
    """
    rng = np.random.default_rng([seed, int(kappa), rotated])
    spectrum = np.exp(np.linspace(-np.log(kappa), 0, DIM))
    axes = np.linalg.qr(rng.normal(size=(CLIENTS, DIM, DIM)))[0]
    data, H, b = [], [], rng.normal(size=(CLIENTS, DIM))
    for i in range(CLIENTS):
        values = spectrum.copy()
        if not rotated:
            values[1:-1] = (values[1:-1] * rng.uniform(0.5, 1, DIM - 2)).clip(1 / kappa)
        Q = axes[i if rotated else 0]
        X = np.sqrt(DIM * values / 2)[:, None] * Q.T  # the mean squared error over DIM rows has Hessian 2 X'X / DIM
        H.append(2 * X.T @ X / DIM)
        data.append((X, X @ np.linalg.solve(H[i], b[i])))
    federation = Federation.from_arrays(data, test=data)
    return Problem(federation, zeros(DIM, 1, bias=False), "mse", 0.0, np.linalg.solve(sum(H), b.sum(0)), 1.0, 1 / kappa)
