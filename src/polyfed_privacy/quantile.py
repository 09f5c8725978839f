"""A clip that follows a quantile of what sites send: Andrew et al., "Differentially Private Learning with Adaptive
Clipping" (NeurIPS 2021).

Beside its change a site sends b_i - 1/2, where b_i = 1 if the change was no longer than the clip. With the noisy share
b of such sites the clip of the next round is

    C <- C exp(-eta (b - gamma)),

and noise of the changes is raised to z_d = (z^-2 - (2 sigma_b)^-2)^(-1/2), so that both cost what z alone does.
"""

import json
import math
from pathlib import Path

from polyfed.base.errors import RunError

ETA, SHARE = 0.2, 20.0  # of the paper: its eta, and cohort over sigma_b
INSIDE = ("clip quantile", "plain")  # key of the sum of bits


class Following:
    """The clip of every round.

    clip: of the first     gamma: the quantile     path: where the clips are kept for a run that goes on; None: nowhere
    """

    def __init__(self, clip: float, gamma: float, path: Path | None):
        self.gamma, self.path, self.clips = gamma, path, {0: clip}
        for line in path.read_text("utf-8").splitlines() if path is not None and path.is_file() else ():
            try:
                t, value = json.loads(line)
                self.clips[int(t)] = float(value)
            except (ValueError, TypeError):
                raise RunError(f"{path}: found a line that is no clip of a round; restore it") from None

    def at(self, t: int) -> float:
        """The clip of round t."""
        return self.clips[t]

    def sigma(self, z: float, cohort: int) -> float:
        """Deviation of the noise in the sum of bits. z: noise over sensitivity of the whole release"""
        return max(cohort / SHARE, z)

    def multiplier(self, z: float, cohort: int) -> float:
        """Noise over sensitivity of the changes alone."""
        return (z**-2 - (2 * self.sigma(z, cohort)) ** -2) ** -0.5

    def move(self, t: int, total: float, cohort: int) -> None:
        """Take the noisy sum of b_i - 1/2 in round t, which decides the clip of the next."""
        share = total / cohort + 0.5
        self.clips[t + 1] = self.clips[t] * math.exp(-ETA * (share - self.gamma))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8", newline="\n") as f:
                f.write(json.dumps([t + 1, self.clips[t + 1]]) + "\n")
