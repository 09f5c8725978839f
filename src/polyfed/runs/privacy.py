"""[privacy]: the settings of secure sums and of differential privacy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from polyfed.base.errors import ConfigError, closest
from polyfed.base.settings import Configured, kebab, setting, types_of
from polyfed.base.values import none_of


@dataclass(frozen=True)
class Privacy(Configured):
    """Settings of a run's privacy; without `epsilon` there are secure sums and no differential privacy."""

    table: ClassVar[str] = "privacy"

    sums: Literal["open", "secure"] = setting(
        "open", doc="secure: the server has the sum over the sites alone. A simulation computes the same numbers."
    )
    threshold: int = setting(3, ge=2, le=10_000, doc="Least sites whose sum is opened.")
    unit: Literal["row", "site"] = setting("row", doc="What epsilon protects: one row of one site, or a whole site.")
    epsilon: float | None = setting(None, gt=0, le=1000, doc="Budget of every site; the noise follows from it.")
    delta: float = setting(1e-5, gt=0, lt=1, doc="Probability with which epsilon may fail.")
    clip: float | None = setting(
        None, gt=0, le=1e9, doc="Longest gradient of a row, or change that a site sends; longer ones are scaled down."
    )
    quantile: float | None = setting(
        None, gt=0, lt=1, doc="unit = site, in simulation: the clip follows this quantile of what sites send."
    )
    noise: Literal["shared", "own", "server"] = setting(
        "shared",
        doc="shared: the sites' noise adds up to what is needed (secure sums); own: each site's alone is enough; "
        "server: the server adds it, and is trusted with every reply.",
    )
    absent: int = setting(
        0, ge=0, le=10_000, doc="Sites that may be absent or collude without the noise falling short."
    )
    per: Literal["experiment", "run"] = setting(
        "experiment", doc="What epsilon is for: all runs of the experiment together, or each one, in a simulation."
    )
    runs: int = setting(1, ge=1, le=10**6, doc="Runs that share epsilon; an experiment fills it in.")
    ledger: str | None = setting(
        None, decides=False, doc="File of what has been spent, for several experiments. Default: one in the run folder."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.epsilon is None or self.clip is not None, "clip", "a number, where epsilon is given")
        for key in ("clip", "unit", "delta", "noise", "absent", "per", "ledger") if self.epsilon is None else ():
            self.require(getattr(self, key) == getattr(Privacy, key), "epsilon", f"a number, where {key} is given")
        needs = self.epsilon is not None and self.noise == "shared"
        self.require(not needs or self.sums == "secure", "sums", "secure, or noise = own or server")
        moving = self.quantile is None or (self.unit == "site" and self.epsilon is not None)
        self.require(moving, "unit", "site and an epsilon, where quantile is given")
        self.require(self.noise != "own" or self.unit == "row", "noise", "shared or server for unit = site")

    def dump(self) -> dict[str, Any]:
        """The table as a file has it; what is not set is left out."""
        return {kebab(key): value for key in types_of(Privacy) if (value := getattr(self, key)) is not None}

    def shared(self, runs: int) -> "Privacy":
        """The settings of each of the runs of an experiment, which share the budget unless it is of one run."""
        return self if self.per == "run" else replace(self, runs=max(1, runs))


def refuse_private(privacy: Privacy | None, analysis: str) -> None:
    """Raise ConfigError for an analysis that trains again and again on the same rows, which no budget is kept for."""
    if privacy is not None:
        raise ConfigError(
            f"privacy: not with {analysis}, which trains cohorts that differ by one site, or many runs that no budget "
            "is kept for; leave it out"
        )


def privacy_of(table: Mapping[str, Any]) -> Privacy:
    """Read a table [privacy], whose keys are in kebab-case or have underscores."""
    types, given = types_of(Privacy), {str(key).replace("-", "_"): value for key, value in table.items()}
    for key in given:
        if key not in types:
            keys = [kebab(name) for name in types]
            raise ConfigError(
                f"privacy.{kebab(key)}: unknown key{closest(kebab(key), keys)}; known: {', '.join(sorted(keys))}"
            )
    return Privacy(**{key: none_of(value, types[key]) for key, value in given.items()})
