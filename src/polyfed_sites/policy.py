"""A site's policy: what it answers at most, whatever a server asks and an operator agrees to. It is read from a file at
the site (`policy.toml`) and held to at every request.

The thresholds are those of statistical disclosure control: no category, class or sum of fewer than `least_count` rows
leaves, no step of training is made from fewer than `least_batch`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch

from polyfed.base.arithmetic import OWN, affine, arithmetic, condition
from polyfed.base.columns import DROP_ROWS, ENCODING, RENAME, Repairs, conditions, together
from polyfed.base.errors import Forbidden
from polyfed.base.randomness import client_keys
from polyfed.base.settings import kebab, setting
from polyfed.base.typed import norm
from polyfed.base.values import COUNTED, Words
from polyfed.compute.batches import Work
from polyfed.core.messages import State
from polyfed.runs.config import Where, read_table, read_toml
from polyfed.runs.privacy import Privacy
from polyfed.runs.steps import local_steps_of
from polyfed.runs.training import Table
from polyfed_sites.agreed import Experiment
from polyfed_sites.keys import DIGITS, full_fingerprint
from polyfed_sites.wire import Join, Joined

FILE = "policy.toml"
TRUST = ("own", "shared", "server")  # whose noise it is, from nobody that has to be trusted on
NAMES = Annotated[list[str], Words("a list of names")]


def _count(default: int, least: int, doc: str) -> int:
    """A setting that is a number of something."""
    return setting(default, ge=least, le=COUNTED, doc=doc)


@dataclass(frozen=True)
class Policy(Table):
    """What a site answers at most."""

    table: ClassVar[str] = ""

    least_rows: int = _count(20, 1, "Fewest training rows with which the site takes part.")
    least_batch: int = _count(8, 1, "Fewest rows in a local step; a site with fewer rows uses all of them in each.")
    least_count: int = _count(
        5, 1, "Fewest rows of a category, class, sum, evaluated part or unit of a layer (k of disclosure control)."
    )
    most_steps: int = _count(10_000, 1, "Most local steps in a round.")
    most_rounds: int = _count(100, 0, "Most rounds of a run.")
    most_evaluations: int = _count(250, 0, "Most evaluations of a run; each part of the rows counts as one.")
    most_runs: int = _count(20, 1, "Most runs on the same file, counted over the vaults that lie in one folder.")
    most_joins: int = _count(50, 1, "Most terms for which the site looks at a row, over all versions of its file.")
    most_agreements: int = _count(
        20, 1, "Most terms under which a row is summed or trained on, over all versions of its file."
    )
    most_cells: int = _count(20_000, 0, "Most sums, counts and scores about a row, over all versions of its file.")
    separable: bool = setting(
        False,
        doc="Allow as many exchanges in steps on parts of the rows as there are rows: a server that sends the same "
        "model in all of them, and knows the seed, can then solve for every row.",
    )
    methods: NAMES | None = setting(None, doc="Methods that are allowed. Default: all.")
    models: NAMES | None = setting(None, doc="Models that are allowed. Default: all.")
    most_parameters: int = _count(10**7, 1, "Most numbers of a model, those of a backbone of the site's own apart.")
    columns: NAMES | None = setting(
        None, doc="Columns that are used; no server learns that there are others. Default: all of the file."
    )
    sums: Literal["open", "secure"] = setting(
        "open", doc="secure: no run whose server could read this site's own replies, but for sums over sites."
    )
    least_sites: int = _count(
        3, 3, "Fewest sites in a secure sum that this site helps to open, of those with pinned keys."
    )
    peers: NAMES | None = setting(
        None,
        doc="Pinned keys of other sites, by the twelve digits or more that the text names them by. Default: those that "
        "an operator has read; with --yes policy none, and no secure sums.",
    )
    absent: int = _count(0, 0, "Most sites of a cohort that may be missing in a secure sum that this site opens.")
    epsilon: float | None = setting(
        None,
        gt=0,
        le=1000,
        doc="Privacy budget of the file, for all runs whose vaults lie in one folder; runs without one are refused.",
    )
    delta: float = setting(1e-5, gt=0, lt=1, doc="Largest delta of a run, where the policy has an epsilon.")
    unit: Literal["row", "site"] = setting("row", doc="What epsilon has to protect: a row, or all rows of the site.")
    noise: Literal["own", "shared", "server"] = setting(
        "shared",
        doc="Whose noise counts for epsilon. own: this site's alone; shared: also what sites add together; "
        "server: also the server's, which then reads replies without noise.",
    )
    pooled: Literal["none", "sums", "medians"] = setting(
        "sums",
        doc="What --allow pooled lets leave: nothing, sums of columns, or also the counts that a search for medians "
        "takes, from which a whole column can be read.",
    )
    audit: Literal["none", "counts", "quantiles"] = setting(
        "none",
        doc="What the audit between sites is told of each column: nothing; rows, gaps and rows of each value; or also "
        "quantiles in two digits, none with fewer than least-count rows beyond it.",
    )
    digits: int = setting(
        4,
        ge=1,
        le=17,
        doc="Significant digits of scores that leave; 17: all. They leave in steps of what least-count rows change.",
    )
    tls_ends_at: str | None = setting(
        None,
        doc="Who may end TLS beside the federation's server, as proxies do: whom the authorities in this PEM file, or "
        "those of this machine (system), have certified; messages stay signed from end to end. Default: nobody.",
    )
    clip: float | None = setting(
        None,
        gt=0,
        le=COUNTED,
        doc="Longest change that leaves, as a multiple of the norm of what was received, or of 1 where that is less; a "
        "longer one is scaled down, and the numbers are then not those of one machine. Default: no limit.",
    )

    def forbid(self, key: str, what: str) -> NoReturn:
        """Raise the error for something that is asked for, beyond the setting `key`."""
        value = getattr(self, key)
        raise Forbidden(f"is asked for {what}; its policy has {kebab(key)} = {_said(value)}", key)

    def least(self, key: str, value: int, what: str) -> None:
        """Refuse a number below the setting `key`."""
        if value < getattr(self, key):
            self.forbid(key, what)

    def most(self, key: str, value: float, what: str) -> None:
        """Refuse a number above the setting `key`."""
        if value > getattr(self, key):
            self.forbid(key, what)

    def sized(self, copies: int = 1) -> Callable[[int], None]:
        """Refuses a model, of which a method has `copies`, of more numbers than `most_parameters`."""
        return lambda n: self.most("most_parameters", n * copies, f"a model of {n * copies:,} numbers or more")

    def among(self, key: str, names: Iterable[str | None], what: str) -> None:
        """Refuse a name that the list `key` has not."""
        allowed = getattr(self, key)
        for name in names:
            if allowed is not None and name is not None and name not in allowed:
                self.forbid(key, f"{what} {name!r}")

    def batch(self, size: int | None, rows: int) -> None:
        """Refuse steps of fewer rows than `least_batch`, or than there are. size: of a batch; None: all rows"""
        if size is not None and size < min(self.least_batch, rows):
            self.forbid("least_batch", f"steps of {size} row{'s' * (size > 1)}")

    def summing(self, what: str) -> None:
        """Refuse sums, or the counts of a search for medians."""
        if self.pooled == "none":
            self.forbid("pooled", "sums of columns")
        if what == "counts" and self.pooled == "sums":
            then = 'columns.missing = "mean" fills gaps from sums alone'
            self.forbid("pooled", f"counts of values, from which a column can be read ({then})")

    def counts(self, found: Mapping[str, int], what: str = "values that [columns] does not list, of column") -> None:
        """Refuse to say what fewer than `least_count` rows have. found: the fewest rows of a value, by column"""
        for name, rows in found.items():
            self.least("least_count", rows, f"{what} {name!r}, some of too few rows")

    def terms(
        self, join: Join, e: Experiment, about: Joined, rarest: Mapping[str, int], scores: bool, read: bool = True
    ) -> None:
        """Refuse the terms of an experiment; its scores leave if `scores`, and an operator has read it if `read`."""
        t, c, counts = e.training, join.columns, about.counts
        self.least("least_rows", counts.train, f"training on {counts.train} rows")
        self.batch(t.batch_size, counts.train)
        work = Work(t.epochs, local_steps_of(join.steps, [about.site]), t.batch_size)
        self.steps(work, counts.train, 0, about.site, t.seed)
        self.most("most_rounds", join.rounds, f"{join.rounds} rounds")
        exchanges, size = allowance(join.rounds) * max(map(e.method.needs.phases, range(3))), t.batch_size
        if size is not None and size < counts.train <= exchanges and not self.separable:
            parts = f"{join.rounds} rounds in steps of {size} of {counts.train} rows"
            self.forbid(
                "separable",
                f"{parts}, from which every row could be solved for (not so with batch-size = full)",
            )
        self._privacy(join, t.privacy)
        self._hiding(join, t.privacy, about.site, read)
        self.most("most_evaluations", join.evaluations, f"{join.evaluations} evaluations")
        self.among("methods", [e.method.name], "the method")
        self.among("models", [str(e.model["name"])], "the model")
        repairs = together(c.site, about.site)
        named = [*c.outcome, c.weights, c.raw, *c.numbers, *c.categories, *_read_by(repairs)]
        self.among("columns", named, "the column")
        self.counts(rarest)
        for name, how in repairs.items():
            if self.least_count == 1 or not isinstance(how, str) or name in (ENCODING, DROP_ROWS):
                continue
            if not (affine(how, name) or (read and len(arithmetic(how, name).names) > 1)):
                self.forbid("least_count", f"arithmetic that tells single values of {name!r} from others")
        for part, rows in counts.model_dump(exclude_none=True, exclude={"train"}).items():
            if scores and rows:
                self.least("least_count", rows, f"scores on {rows} rows for {part}")

    def _privacy(self, join: Join, p: Privacy | None) -> None:
        """Refuse what a server could read or find out beyond `sums`, `least_sites` and `epsilon`."""
        if p is None or p.sums == "open":
            if self.sums == "secure":
                self.forbid("sums", "replies that the server can read (privacy.sums = open)")
        else:
            self.least("least_sites", join.cohort, f"sums over {join.cohort} sites")
        if p is not None and self.clip is not None:
            self.forbid("clip", "integers to sum, whose changes [privacy] clips, if anything does")
        if self.epsilon is not None:
            if p is None or p.epsilon is None:
                self.forbid("epsilon", "a run whose models no epsilon bounds")
            self.most("epsilon", p.epsilon, f"epsilon {p.epsilon:g}")
            self.most("delta", p.delta, f"epsilon at delta {p.delta:g}")
            if p.unit != self.unit == "site":
                self.forbid("unit", "epsilon of one row (privacy.unit = row)")
            if TRUST.index(p.noise) > TRUST.index(self.noise):
                self.forbid(
                    "noise",
                    f"noise of the {'server' if p.noise == 'server' else 'sites together'} (privacy.noise = {p.noise})",
                )

    def _hiding(self, join: Join, p: Privacy | None, site: str, read: bool) -> None:
        """Refuse sums that are hidden by keys which nobody has looked at, or by too few of those that somebody has."""
        if p is None or p.sums == "open":
            return
        marks = {name: full_fingerprint(key) for name, key in join.keys.items() if name != site}
        pins = [pin.lower() for pin in self.peers or () if len(pin) >= DIGITS]
        if self.peers is None and not read:
            named = ", ".join(f'"{m[:DIGITS]}"' for m in marks.values())
            self.forbid("peers", f"sums hidden by keys that nobody here has pinned (peers = [{named}] would do)")
        pinned = [name for name, m in marks.items() if self.peers is None or any(m.startswith(pin) for pin in pins)]
        others = len(marks) - len(pinned)
        unpinned = f"of whom {others} have keys that are not pinned"
        self.least("least_sites", join.cohort - others, f"sums over {join.cohort} sites, {unpinned}")
        missing = min(self.absent, p.absent)  # as a sum with less noise than planned is not opened
        if others and p.epsilon is not None and p.noise == "shared" and p.absent < others + missing:
            noise = f"noise that {join.cohort} sites share, {unpinned}, with privacy.absent = {p.absent}"
            self.forbid("peers", f"{noise} ({others + self.absent} or more would do)")

    def steps(self, work: Work, rows: int, t: int, site: str, seed: int) -> None:
        """Refuse more local steps in round `t` than `most_steps`."""
        steps = int(work.taken(np.array([rows]), t, client_keys([site]), seed)[0])
        self.most("most_steps", steps, f"{steps} local steps")

    def rounded(self, metrics: Mapping[str, float], rows: int = 0) -> dict[str, float]:
        """Scores as they may leave: in steps of what `least_count` of the rows can change, and so many digits."""

        def stepped(value: float) -> float:
            if self.least_count == 1 or not rows or not math.isfinite(value):
                return value
            step = self.least_count / rows * 2.0 ** math.ceil(math.log2(max(1.0, abs(value))))
            whole = 1.0 if abs(value) <= 1 else math.inf  # the nearest step to an accuracy of 1 may be above it
            return min(max(round(value / step) * step, -whole), whole)

        return {name: float(f"{stepped(value):.{self.digits}g}") for name, value in metrics.items()}

    def clipped(self, sent: State, received: State) -> State:
        """What is sent, each tensor's change from the one received, or else from 0, no longer than `clip` allows."""
        if self.clip is None:
            return sent
        longest = self.clip * max(1.0, sum(norm(t.double()) ** 2 for t in received.values()) ** 0.5)
        left: State = {}
        for name, t in sent.items():
            left[name] = t
            if t.is_floating_point():
                before = received.get(name)
                centre = torch.zeros_like(t) if before is None or before.shape != t.shape else before.to(t.dtype)
                length = norm((t - centre).double())
                left[name] = t if length <= longest else centre + (t - centre) * (longest / length)
        return left

    def words(self) -> str:
        """The settings in one line, for the operator's text."""
        return ", ".join(f"{key} {_said(value)}" for key, value in self.dump().items())


def _read_by(repairs: Repairs) -> set[str]:
    """The columns of a file that its repairs read beside those that they repair."""
    formulas = [
        arithmetic(how, name)
        for name, how in repairs.items()
        if isinstance(how, str) and name not in (ENCODING, DROP_ROWS)
    ]
    formulas += [condition(text) for text in conditions(repairs.get(DROP_ROWS, ()))]
    return {*repairs.get(RENAME, ()), *(name for f in formulas for name in f.names)} - {OWN}


def _said(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value).lower()


def allowance(n: int) -> int:
    """How many different questions a site answers of `n` that were agreed to: a round that loses a site is repeated."""
    return n + 10 + n // 10


def read(path: Path) -> Policy:
    """The policy in a file. Raises ConfigError, in one line that names the key."""
    return read_table(Policy, read_toml(path), Where(path, {}, {}))
