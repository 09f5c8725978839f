"""verify: a run trained again from its folder alone, and compared with what the folder holds, bit for bit."""

import contextlib
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.base.settings import is_table
from polyfed.base.typed import norm
from polyfed.core.rounds import part
from polyfed.runs.build import Parts
from polyfed.runs.config import resolve
from polyfed.runs.folder import client_model
from polyfed.runs.numbers import Numbers
from polyfed.runs.ownership import unsealed, write_private
from polyfed.runs.trainer import fit
from polyfed.studies.jobs import whole

PROCESSOR = ("cpu-capability", "mkl-cbwr", "kernel", "platform")  # versions that are the processor's, or chosen by it
LIBRARIES = ("torch", "numpy", "sums", "kernel-version")  # whose versions round differently
UNSAID = {"sums": "by chunk", "kernel-version": "not said"}  # of runs that were made before they said it


class Difference(NamedTuple):
    """Difference of a part of two runs."""

    text: str  # about the first number that differs
    by: float  # largest relative difference of a number; infinity for anything else


Differs = Callable[[Numbers, Numbers], Difference | None]  # how a run differs from the same made again


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison of two runs."""

    parts: dict[str, str]  # "equal" or the difference, for the server's state, the clients' models and the history
    versions: dict[str, tuple[str, str]]  # (in the run, here) of those that differ
    by: float = 0.0  # largest relative difference of any number
    digits: float = 0.0  # largest that counts as rounding, on another processor or with other libraries

    @property
    def equal(self) -> bool:
        return all(text == "equal" for text in self.parts.values())

    @property
    def rounded(self) -> bool:
        """True where the runs were made with different instructions or libraries, and differ as rounding does."""
        return not self.equal and self.by <= self.digits and bool(self._others())

    def _others(self) -> list[str]:
        """Versions that differ and round differently."""
        instructions = ["processor instructions"] * any(key in self.versions for key in PROCESSOR)
        libraries = [key for key in LIBRARIES if key in self.versions]
        return instructions + [f"versions of {' and '.join(libraries)}"] * bool(libraries)

    def __str__(self) -> str:
        if self.equal:
            return "comes out again, bit for bit"
        if self.rounded:
            same = f"the same to {self.by:.0e}, relative" if self.by else "the same numbers, in other bits"
            return f"comes out again: {same}; it was made with other {' and '.join(self._others())}"
        return "does not come out again"


def verify(folder: Path) -> Verdict:
    """Train the run of `folder` again in a temporary folder and compare; `folder` must describe the run whole."""
    config = unsealed(folder / "config.toml")
    if "start" in config:
        raise ConfigError(f"{folder}: the run started from another run, which its folder does not hold")
    experiment = resolve(folder / "config.toml")
    run = Numbers.of(folder)
    if run.status in ("interrupted", "unfinished"):
        raise RunError(f"{folder}: the run is not finished; finish it with: polyfed resume {folder}")
    parts, plan, seed = Parts(experiment), config.get("plan", {}), experiment.seeds[0]
    given: dict[str, Any] = {k: plan[k] for k in ("chunk", "workers") if k in plan} | {
        "checkpoint_every": None,
        "track": None,
    }
    if run.status == "finished":
        given["rounds"] = run.summary.rounds
    training = replace(parts.training(seed), **given)
    method = experiment.methods[0]
    with tempfile.TemporaryDirectory() as name:
        again = Path(name)
        if experiment.settings.privacy is not None and "privacy-plan" in config:
            _bring_secret(folder, again)
        with contextlib.suppress(Diverged):
            whole(fit(parts.model(seed), parts.federation(seed), method.algorithm, training, out=again))
        return compared(folder, again, config, WHOLE)


def _bring_secret(folder: Path, again: Path) -> None:
    """A private run comes out again with its own noise alone."""
    try:
        write_private(again / "noise.key", (folder / "noise.key").read_text("utf-8"))
    except OSError:
        raise RunError(
            f"{folder}: its noise.key is not here; without it a private run cannot be trained again, and verify can "
            "say nothing of it"
        ) from None


def compared(folder: Path, again: Path, config: dict[str, Any], parts: Mapping[str, Differs]) -> Verdict:
    """Compare two run folders part by part; `config` is that of the first one."""
    first, second = Numbers.of(folder), Numbers.of(again)
    before, now = first.summary.digest, second.summary.digest or {}
    texts: dict[str, str] = {}
    worst = 0.0
    for name, differs in parts.items():
        same = before is None or before.get(name) == now.get(name)  # a recorded run may have none
        difference = differs(first, second)
        worst = max(worst, 0.0 if difference is None else difference.by)
        texts[name] = difference.text if difference else "equal" if same else "differs from its digest in summary.json"
    dtype = torch.float64 if config.get("dtype") == "float64" else torch.float32
    return Verdict(texts, _versions(config, again), worst, torch.finfo(dtype).eps ** 0.5)  # half of its digits


def _versions(config: dict[str, Any], again: Path) -> dict[str, tuple[str, str]]:
    """Those that a run's config.toml names and that differ in that of the run made again."""
    named = UNSAID | config.get("versions", {})
    last = {k.partition("-from-round-")[0]: v for k, v in named.items()}
    here = tomllib.loads((again / "config.toml").read_text("utf-8"))["versions"]
    changed = {k: (then, here.get(k, "unknown")) for k, then in last.items()}
    return {k: v for k, v in changed.items() if v[0] != v[1]}


def _summary(run: Numbers, again: Numbers) -> Difference | None:
    """Differences of the numbers of the summary of `run`, seconds and digests aside."""

    def flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
        parts = (flat(v, f"{name}{k} ") if is_table(v) else {f"{name}{k}": v} for k, v in value.items())
        return {k: v for part in parts for k, v in part.items()}

    a, b = (
        flat({k: v for k, v in r.summary.written().items() if k not in ("seconds", "digest")}) for r in (run, again)
    )
    return _first(("differs", k, a[k], b.get(k)) for k in a)  # an older run lacks what has come since


def _clients(run: Numbers, again: Numbers) -> Difference | None:
    """Differences of the columns of `run`."""
    a, b = (pd.DataFrame() if r.clients is None else r.clients for r in (run, again))
    pairs: list[tuple[str, str, Any, Any]] = []
    for column in a.columns:
        x, y = (f[column].tolist() if column in f else [] for f in (a, b))
        if len(x) != len(y):
            return Difference(f"differs in its {column}: {len(x)} in the run, {len(y)} here", torch.inf)
        both = zip(a["client"], x, y, strict=True)
        pairs += [("differs", f"{column} of client {name!r}", one, other) for name, one, other in both]
    return _first(pairs)


def _first(pairs: Iterable[tuple[str, str, Any, Any]]) -> Difference | None:
    """The first of (how it is said, what, then, now) that differ, and by how much any of them does at most."""
    differences = [(text, place, _relative(x, y)) for text, place, x, y in pairs if x != y and not (x != x and y != y)]
    if not differences:
        return None
    text, place, by = differences[0]
    return Difference(
        f"{text} ({place}{f' by {by:.1e}, relative' if by < torch.inf else ''})", max(d for *_, d in differences)
    )


def _relative(x: Any, y: Any) -> float:
    """The relative difference of two numbers; infinity of other things."""
    numbers = isinstance(x, int | float) and isinstance(y, int | float)
    gap = abs(x - y) / max(abs(x), abs(y)) if numbers else torch.inf
    return gap if gap == gap else torch.inf


def _server(run: Numbers, again: Numbers) -> Difference | None:
    a, b = (part(checkpoint.load(r.folder / "checkpoint")[0], "server.") for r in (run, again))
    return _apart(a, b)


def _models(run: Numbers, again: Numbers) -> Difference | None:
    differences: list[Difference] = []
    for i, name in enumerate(run.about.names):
        a, b = client_model(run.folder, i, name), client_model(again.folder, i, name)
        if a is None or b is None:
            return None if a is b else Difference("are missing on one side", torch.inf)
        if difference := _apart(a[0], b[0]):
            differences.append(Difference(f"{difference.text} (client {name!r})", difference.by))
    return max(differences, key=lambda d: d.by, default=None)


def _history(run: Numbers, again: Numbers) -> Difference | None:
    a, b = run.records, again.records
    first = _first(
        (f"differs from round {one.round} on", f"{one.split} {key}", value, other.table().get(key))
        for one, other in zip(a, b, strict=False)
        for key, value in one.table().items()
        if key != "seconds"
    )
    if len(a) != len(b):
        return Difference(
            first.text if first else f"differs: {len(a)} evaluations in the run, {len(b)} here", torch.inf
        )
    return first


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> Difference | None:
    """Difference of two sets of tensors."""
    if {k: t.shape for k, t in a.items()} != {k: t.shape for k, t in b.items()}:
        return Difference("differs in form", torch.inf)
    worst = 0.0
    for k, t in a.items():
        if not torch.equal(t, b[k]) and not (t.isnan() == b[k].isnan()).all():
            return Difference("differs in what is finite", torch.inf)
        x, y = t.double().nan_to_num(), b[k].double().nan_to_num()
        worst = max(worst, norm(x - y) / max(norm(x), norm(y), 1e-300))
    return Difference(f"differs by {worst:.1e}, relative", worst) if worst else None


def _unseen(run: Numbers, again: Numbers) -> Difference | None:
    """Left to the digest."""
    return None


WHOLE: dict[str, Differs] = {"server": _server, "models": _models, "history": _history}
RECORDED: dict[str, Differs] = {  # of a run whose checkpoint and models are not there
    "server": _unseen,
    "models": _unseen,
    "history": _history,
    "summary": _summary,
    "clients": _clients,
}
