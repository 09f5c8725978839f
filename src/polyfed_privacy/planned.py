"""What a private run will do, fixed before its first round: noise, releases, and what leaves for whom."""

import math
from dataclasses import dataclass, field
from typing import Any

from polyfed.runs.privacy import Privacy
from polyfed_privacy.accounts import epsilon_of, multiplier
from polyfed_privacy.ledger import Budget

PLACES = 30  # binary places of noisy sums


@dataclass(frozen=True)
class Planned:
    """A private run before its first round."""

    privacy: Privacy
    sends: bool = True  # False for a method that sends nothing
    rounds: int = 0  # that the noise is made for
    releases: float = 0.0  # that one unit takes part in, at most
    numbers: int = 0  # in a client's messages of one exchange
    rate: float = 0.0  # row unit, noise once for all sites: how far an uplink moves by a gradient
    home: frozenset[str] = field(default_factory=frozenset)  # row unit: solves that nothing sent depends on, kept plain
    cohort: int = 0  # sites in a round
    kinds: frozenset[str] = field(default_factory=frozenset[str])  # of the sums: "plain", "weighted"

    @property
    def private(self) -> bool:
        """True where there is noise."""
        return self.privacy.epsilon is not None and self.sends

    @property
    def guards(self) -> bool:
        """True where messages pass through a door."""
        return self.sends and (self.private or self.privacy.sums == "secure")

    @property
    def budget(self) -> Budget:
        """Of the whole experiment."""
        assert self.privacy.epsilon is not None
        return Budget(self.privacy.epsilon, self.privacy.delta)

    @property
    def limit(self) -> float:
        """rho that the run's ledger holds: that of the experiment where the ledger is its own, else the run's part."""
        rho = self.budget.rho
        return rho if self.privacy.ledger is not None else rho / self.privacy.runs

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity."""
        return multiplier(self.budget.epsilon, self.budget.delta, self.releases * self.privacy.runs)

    def table(self) -> dict[str, Any]:
        """As config.toml has it beside the settings; part of what must not change when a run is continued."""
        if not self.private:
            return {}
        z = self.multiplier
        return {
            "rounds": self.rounds,
            "releases": self.releases,
            "noise-multiplier": z,
            "epsilon-of-the-run": epsilon_of(self.releases / (2 * z * z), self.privacy.delta),
        }

    def lines(self, simulated: bool = True) -> list[str]:
        """The plan in words. simulated: whether everything is on this machine"""
        p = self.privacy
        if not self.sends:
            return ["Nothing leaves the sites: there is nothing to protect."]
        lines: list[str] = []
        if p.sums == "secure":
            lines.append(
                f"Secure sums: the server has sums over at least {p.threshold} sites. "
                + (
                    "In a simulation the numbers are those of real sites, and nothing is protected: everything is on "
                    "this machine."
                    if simulated
                    else "Numbers of rows, columns and their values are not hidden."
                )
            )
        if not self.private:
            return [*lines, "No differential privacy: nothing bounds what the models say about a patient."]
        return [*lines, *self._noise()]

    def _noise(self) -> list[str]:
        """The differential privacy of the run in words: of what, how much, whom it trusts, and what it leaves out."""
        p, found = self.privacy, list[str]()
        z, unit = self.multiplier, "row" if p.unit == "row" else "site"
        run = epsilon_of(self.releases / (2 * z * z), p.delta)
        found.append(
            f"Differential privacy of one {unit} (zero-out): epsilon {p.epsilon:g} at delta {p.delta:g} for each site"
            + (f", shared by {p.runs} runs; each run spends {run:.3g} of its own." if p.runs > 1 else ".")
        )
        found.append(
            f"{self.releases:g} releases of each {unit} in {self.rounds} rounds, noise {z:.4g} times the largest "
            f"change by one {unit} (clip {p.clip:g})."
        )
        found.append(TRUST[p.noise].format(stay=_stay(p.absent)))
        assert p.clip is not None
        if p.quantile is not None:
            found.append(f"The clip follows the {p.quantile:g} quantile of what sites send, which the noise pays for.")
        if unit == "site":
            ratio = z * math.sqrt(self.numbers) / max(1, self.cohort)
            found.append(
                f"The noise in a round's mean is {ratio:.3g} times as long as the longest change that a site may send"
                + (": a model of any use is not to be had so." if ratio > 3 else ".")
            )
        found.append(
            "Not covered: how columns were prepared (means, deviations, categories), numbers of rows, and every "
            "metric, which are taken from the rows as they are. A personal model is made of its own site's rows "
            "without noise: nothing protects them but that it stays there."
        )
        return found


TRUST = {
    "shared": "Noise is shared by the sites under secure sums: the server is trusted with nothing, as long as {stay}.",
    "own": "Each site adds all noise that is needed: nobody else is trusted.",
    "server": "The server adds the noise: it is trusted with every reply, and so is whoever reads its memory.",
}


def _stay(absent: int) -> str:
    if not absent:
        return "no site leaves a round that has begun, and none colludes with it"
    return f"at most {absent} {'site leaves' if absent == 1 else 'sites leave'} a round or collude with it"
