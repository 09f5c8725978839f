"""The intercepts, and slopes, that fit outputs to targets best: each client its own, all of them at once."""

import numpy as np


def fitted(
    z: list[np.ndarray], y: list[np.ndarray], u: list[np.ndarray], slope: bool
) -> list[tuple[float, np.ndarray]]:
    """Each client's (a, c) of a z + c, with a = 1 unless `slope`. z: [b, k]; y: [b, ...] or classes; u: [b] weights"""
    if not z or y[0].dtype.kind == "f":
        return [_line(*of, slope) for of in zip(z, y, u, strict=True)]
    counts = np.array([len(v) for v in u])
    zs, ys, us = map(_stacked, (z, y, u))
    a, c = _newton(zs, ys, us, counts, slope)
    if (flat := a < 0).any():
        a[flat], c[flat] = 0, _newton(0 * zs[flat], ys[flat], us[flat], counts[flat], False)[1]
    return list(zip(a.tolist(), c, strict=True))


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    """[s, b, ...]: arrays of unlike length in one, with zeros behind the shorter ones."""
    stacked = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
    for into, row in zip(stacked, rows, strict=True):
        into[: len(row)] = row
    return stacked


def _line(z: np.ndarray, y: np.ndarray, u: np.ndarray, slope: bool) -> tuple[float, np.ndarray]:
    """(a, c) by least squares."""
    y = y.reshape(z.shape)
    centred, weight = z - np.average(z, 0, u), 2 / z.shape[1] * u[:, None]
    above, below = (weight * centred * y).sum() + 1, (weight * centred * centred).sum() + 1
    a = max(0.0, above / below) if slope else 1.0
    return a, np.average(y - a * z, 0, u)


def _newton(
    z: np.ndarray, y: np.ndarray, u: np.ndarray, counts: np.ndarray, scale: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The minima over c, and over a where `scale`, of the convex mean_j u_j loss(a z_j + c, y_j) + (a - 1)^2/(2 b).

    Returns a: [s], c: [s, k]. z: [s, b, k]; y, u: [s, b], where u is 0 there is no sample; counts: [s] samples.
    """
    s, _, k = z.shape
    v = u / u.sum(1, keepdims=True)  # a sum with v: a mean over samples
    picked = (np.take_along_axis(z, y[:, :, None], 2)[:, :, 0] * v).sum(1)
    share = np.maximum([np.bincount(*of, minlength=k) for of in zip(y, u, strict=True)], 0.5)
    share, z = share / share.sum(1, keepdims=True), np.ascontiguousarray(z.swapaxes(1, 2))
    theta = np.append(np.zeros((s, k)), np.ones((s, 1)), 1)  # c, a

    def value(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = theta[:, k:, None] * z + theta[:, :k, None]
        top = logits.max(1)
        e = np.exp(logits - top[:, None])
        total = e.sum(1)
        f = ((np.log(total) + top) * v).sum(1) - (share * theta[:, :k]).sum(1)
        return f - theta[:, k] * picked + (theta[:, k] - 1) ** 2 / (2 * counts), e / total[:, None]

    f, p = value(theta)
    g, H, there = np.zeros((s, k + 1)), np.tile(np.eye(k + 1), (s, 1, 1)), np.zeros(s, dtype=bool)
    for _ in range(100):
        weighted = p * v[:, None]
        mean = weighted.sum(2)
        g[:, :k] = mean - share
        # c + t is c for every t: the sum of c stays zero
        H[:, :k, :k] = mean[:, None] * np.eye(k) - weighted @ p.swapaxes(1, 2) + 1 / k
        if scale:
            pz = (p * z).sum(1)
            g[:, k] = (pz * v).sum(1) - picked + (theta[:, k] - 1) / counts
            H[:, :k, k] = H[:, k, :k] = (weighted * (z - pz[:, None])).sum(2)
            H[:, k, k] = (((p * z * z).sum(1) - pz**2) * v).sum(1) + 1 / counts
        step = _newton_step(g, H)
        step[there] = 0
        near = (g * step).sum(1)  # twice the gain that is left
        new, q = value(theta - step)
        while (far := (near > 1e-9) & (new > f) & (np.abs(step).max(1) > 1e-9)).any():
            step[far] /= 2  # farther away, a whole step may go too far
            new, q = value(theta - step)
        theta, f, p = theta - step, new, q
        there |= near < 1e-20
        if there.all():
            break
    return theta[:, k], theta[:, :k]


def _newton_step(g: np.ndarray, H: np.ndarray) -> np.ndarray:
    """[s, q] solutions of H step = g, without a step in directions that have no curvature. g: [s, q], H: [s, q, q]"""
    curvature, V = np.linalg.eigh(H)
    curvature[curvature <= 1e-15 * g.shape[1] * curvature[:, -1:]] = np.inf
    return (V @ ((V.swapaxes(1, 2) @ g[:, :, None]) / curvature[:, :, None]))[:, :, 0]
