"""Parts of a recipe; its `Bench` keeps what is finished in a folder, so that a second call goes on from there."""

import dataclasses
import json
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from html import escape
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pandas as pd
import tomli_w

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import kebab
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.engines.local import pick_device
from polyfed.metrics.metric import mean_of
from polyfed.report import page
from polyfed.report.style import save, write_atomically
from polyfed.report.table import Table
from polyfed.runs import schema
from polyfed.runs.config import of_earlier
from polyfed.runs.ownership import unsealed
from polyfed.runs.result import Result
from polyfed.runs.stop import interruptions
from polyfed.runs.trainer import fit
from polyfed.studies.compare import Comparison, compare, config_of
from polyfed.studies.jobs import Done, Watch, beforehand, whole
from polyfed_papers.recipes.said import Claim, Setting, claims_table, settings_table
from polyfed_tuning.ladder import At, Ladder, climb, middle
from polyfed_tuning.tune import tune
from polyfed_tuning.tuned import Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Size = Literal["small", "middle", "heads", "paper"]
SIZES: tuple[Size, ...] = ("small", "paper")  # that every recipe has


@dataclass
class Outcome:
    """Outcome of a recipe; figures and captions are by file name without ending."""

    tables: list[Table] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: "Outcome") -> "Outcome":
        parts = (getattr(self, f.name) | getattr(other, f.name) if f.name in ("figures", "captions")
                 else getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))  # fmt: skip
        return Outcome(*parts)


@dataclass(frozen=True)
class Recipe:
    """An experiment of a paper."""

    name: str  # paper/experiment
    title: str  # in the paper
    run: Callable[["Bench"], Outcome]
    settings: Callable[[Size], Sequence[Setting]]
    minutes: Mapping[Size, float]  # about, on two cores (small) and on `machine` (paper)
    machine: str = "two cores"
    data: tuple[str, ...] = ()  # data sets from a data folder; none where everything ships with polyfed
    seeds: int | Sequence[int] = 3  # their number, or the seeds, where others have been looked at before
    also: tuple[str, ...] = ()  # other full names, such as those of a paper's tables that are one experiment
    order: int = 0
    between: tuple[Size, ...] = ()  # further sizes, whose time a `Pilot` estimates before it starts
    recorded: bool = True  # a record has all that it reads of its runs, every test sample's scores aside
    scored: bool = False  # it reads these, and the record has each test sample's part of the leading metric
    joins: bool = False  # a user's own methods can be added

    def outcome(self, bench: "Bench") -> Outcome:
        """Run it and return what it finds, with how its settings were chosen."""
        result = self.run(bench)
        return replace(result, notes=[*result.notes, *bench.tuning()])

    @property
    def counted(self) -> list[int]:
        """The seeds that count, unless others are asked for."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return ("small", *self.between, "paper")

    @property
    def about(self) -> str:
        """The question it answers: the function's docstring."""
        return " ".join((self.run.__doc__ or "").split())


RECIPES: dict[str, Recipe] = {}


def recipe(
    name: str,
    title: str,
    *,
    minutes: tuple[float, float],
    settings: Sequence[Setting] | Callable[[Size], Sequence[Setting]],
    **more: Any,
) -> Callable[[Callable[["Bench"], Outcome]], Callable[["Bench"], Outcome]]:
    """Register the function below as a `Recipe`; minutes are for (small, paper), and `more` are its other fields."""

    def add(run: Callable[[Bench], Outcome]) -> Callable[[Bench], Outcome]:
        other = RECIPES.get(name)
        if other is not None and other.run.__module__ != run.__module__:
            where = " and ".join(f"{r.__qualname__} of {r.__module__}" for r in (other.run, run))
            raise ConfigError(f"recipe: found {name!r} twice, {where}, expected one name for each")
        times = dict(zip(SIZES, minutes, strict=True))
        stated = settings if callable(settings) else lambda _: settings
        RECIPES[name] = Recipe(name, title, run, stated, times, order=len(RECIPES), **more)
        return run

    return add


def case(about: str, run: Callable[..., Outcome], *arguments: Any) -> Callable[["Bench"], Outcome]:
    """A recipe that calls `run` with the bench and these arguments, and asks the question `about`."""

    @wraps(run)
    def one(bench: Bench) -> Outcome:
        return run(bench, *arguments)

    one.__doc__ = about
    return one


class Bench:
    """Place of a recipe's runs: size, seeds, folder, and memory of what is done."""

    def __init__(
        self,
        folder: Path,
        scale: Size = "small",
        seeds: int | Sequence[int] = 3,
        data_dir: str | Path | None = None,
        device: str = "auto",
        watch: Watch | None = None,
        rehearse: bool = False,  # one round a run, to see that all is in place; the figures mean nothing
        record: Path | None = None,  # that the folder was made from, see record.py
        portable: bool = False,  # one worker, so that no machine's cores decide the order of sums
        joining: Sequence[str] = (),  # a user's own methods, beside the recipe's
    ):
        self.folder, self.data_dir, self.device, self.rehearse = folder, data_dir, device, rehearse
        self.record, self.portable, self.joining = record, portable, joining
        self.where: dict[str, Any] = {"device": device} | ({"workers": 1} if portable else {})
        self.scale: Size = scale
        self.seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
        self.watch = watch or Watch()
        self.choices: dict[str, tuple[int, int]] = {}  # key -> trials, edges left

    @property
    def small(self) -> bool:
        return self.scale == "small"

    def pick(self, small: Any, paper: Any, middle: Any = None, heads: Any = None) -> Any:
        """The value for this size; a size in between has the paper's unless it has one of its own."""
        value = {"small": small, "middle": middle, "heads": heads}.get(self.scale)
        return paper if value is None else value

    def wants(self, part: str) -> bool:
        """Whether anything by this name, or below it, is wanted; a recipe may leave out the others."""
        return True

    def under(self, seeds: Sequence[int]) -> "Bench":
        """The same bench with other seeds."""
        other = copy(self)
        other.seeds = list(seeds)
        return other

    def rounds(self, *sizes: int) -> int:
        """Rounds for this size, of those that `pick` takes, one in a rehearsal."""
        count = self.pick(*sizes)
        return min(count, 1) if self.rehearse else count

    def compare(
        self,
        key: str,
        model: Any,
        federation: Any,
        algorithms: Mapping[str, Algorithm] | Callable[[int], Mapping[str, Algorithm]],
        *,
        seeds: Sequence[int] | None = None,
        **settings: Any,
    ) -> Comparison:
        """`polyfed.compare` in the folder `key`; finished runs are read back. Ctrl-C ends the recipe, resumable."""
        if callable(algorithms):
            parts = self.each(
                key, lambda s: self.compare(f"{key}/seed{s}", model, federation, algorithms(s), seeds=[s], **settings)
            )
            return joined(parts)
        which = list(self.seeds if seeds is None else seeds)
        config = self.check(key, algorithms, which, settings)
        found = compare(
            model, federation, algorithms, seeds=which, out=self.folder / key, resume=True, keep=False,
            watch=self.watch, config=config, report=False, **(self.where | settings),
        )  # fmt: skip
        return whole(found)

    def check(
        self, key: str, algorithms: Mapping[str, Algorithm], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Refuse a folder `key` whose comparison.toml is of another experiment."""
        settings = {**self.where, **settings}
        plain = {kebab(k): v for k, v in settings.items() if isinstance(v, int | float | str)}
        config = config_of(algorithms, list(seeds), plain) | {"traced": _traced(settings)}
        same_experiment(self.folder / key, config, self.record)
        return config

    def fit(self, model: Any, federation: Any, method: Algorithm, *, rounds: int, **settings: Any) -> Result:
        """`polyfed.fit` on this bench's device. Ctrl-C ends the recipe."""
        return whole(fit(model, federation, method, rounds=rounds, **self.where, **settings))

    def tune(self, model: Any, federation: Any, method: Algorithm, *, rounds: int, **settings: Any) -> Tuned:
        """`polyfed.tune` on this bench's device. Ctrl-C ends the recipe."""
        return whole(tune(model, federation, method, rounds=rounds, **self.where, **settings))

    def choose(self, key: str, score: Callable[[At], float], ladders: Sequence[Ladder], *trials: int) -> At:
        """The values that validation prefers, by `climb` on seeds that do not count; all trials are kept."""
        # trials: how many, and how many if the choice is at an edge by those before
        base = re.sub(r"-choice\d+$", "", key)

        def tried(at: At) -> float:
            return self.trial(f"{base}-at-{'-'.join(map(str, at))}", lambda: score(at))

        def search(count: int) -> dict[str, Any]:
            way = climb(tried, ladders, count)
            return {"best": way.best, "trials": len(way.tried), "edges": way.edges}

        kept: dict[str, Any] = {}
        for count in (1,) if self.rehearse else trials:
            kept = self.once(f"{base}-choice{count}" if kept else key, partial(search, count))
            if not kept["edges"]:
                break
        self.choices[key] = kept["trials"], kept["edges"]
        return tuple(kept["best"])

    def trial(self, key: str, compute: Callable[[], float]) -> float:
        """A trial's score, kept by itself and in no record."""
        return self.once(f"trials/{key}", compute)

    def tuning(self) -> list[str]:
        """Trials of every choice, and how many ended at an edge, in a line; none where nothing was chosen."""
        if not self.choices:
            return []
        counts = sorted({trials for trials, _ in self.choices.values()})
        left = [key for key, (_, edges) in self.choices.items() if edges]
        named = f" ({', '.join(left)})" if left else ""
        each = " or ".join(map(str, counts))
        return [f"tuned by validation: {len(self.choices)} choices of {each} trials; edges left: {len(left)}{named}"]

    def each(self, key: str, compute: Callable[[int], T]) -> list[T]:
        """compute(seed) for every seed, as `all_of` does it; `key` names it in the progress display."""
        return self.all_of([(key, seed, partial(compute, seed)) for seed in self.seeds])

    # what takes long must be kept in the folder, by `once` or `compare`: here it is then only read
    def all_of(self, tasks: Sequence[tuple[str, int, Callable[[], T]]]) -> list[T]:
        """Results of the tasks (label, seed, task), computed side by side beforehand where there is room."""
        watch, self.watch = self.watch, Watch()  # silent where what was computed apart is only read
        try:
            if not beforehand(tasks, pick_device(self.device).type, watch):
                self.watch = watch
            return [task() for _, _, task in tasks]
        finally:
            self.watch = watch

    def by_seed(self, key: str, compute: Callable[[int], Any]) -> list[Any]:
        """compute(seed), JSON-able, for every seed, each once."""
        return self.each(key, lambda seed: self.once(f"{key}-seed{seed}", lambda: compute(seed)))

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """A JSON-able value that is computed once and kept in the folder; not if Ctrl-C cut a run in it short."""
        path = self.folder / "kept" / f"{key}.json"
        if path.exists():
            try:
                return json.loads(path.read_text("utf-8"))
            except ValueError:
                raise RunError(f"{path}: damaged; delete it to compute it again") from None
        before = interruptions()
        value = compute()
        if interruptions() > before:
            raise KeyboardInterrupt
        write_atomically(path, json.dumps(value, indent=1, default=_jsonable).encode())
        return json.loads(path.read_text("utf-8"))


class Pilot(Bench):
    """A bench that trains three rounds of one method of each kind under one seed, to estimate the time of all."""

    seconds = 0.0  # of training alone, all rounds and seeds; evaluations come on top
    count = 1  # seeds that are meant

    def compare(self, key, model, federation, algorithms, *, seeds=None, **settings):
        methods = algorithms(self.seeds[0]) if callable(algorithms) else algorithms
        short = settings | {"rounds": 3, "evaluate_every": 3 if settings.get("evaluate_every") else 0}
        known: dict[type[Algorithm], tuple[float, Done]] = {}
        for label, method in methods.items():
            if type(method) not in known:
                ends: list[float] = []
                short["callbacks"] = (*settings.get("callbacks", ()), lambda _, ends=ends: ends.append(perf_counter()))
                place = f"{key}-{label}"
                found = super().compare(place, model, federation, {label: method}, seeds=self.seeds[:1], **short)
                taken = ends[1] - ends[0] if len(ends) > 1 else 0.0  # the first round has what is done once
                known[type(method)] = taken, found.results[0]
            self.seconds += known[type(method)][0] * settings["rounds"] * len(seeds or range(self.count))
        return Comparison([replace(known[type(m)][1], label=label) for label, m in methods.items()])

    def fit(self, model, federation, method, *, rounds, **settings):
        ends: list[float] = []
        run = super().fit(
            model, federation, method, rounds=min(rounds, 3), callbacks=[lambda _: ends.append(perf_counter())],
            **settings,
        )  # fmt: skip
        self.seconds += (ends[1] - ends[0] if len(ends) > 1 else 0.0) * rounds
        return run

    def tune(self, model, federation, method, *, rounds, **settings):
        short = min(rounds, 3)
        found = super().tune(model, federation, method, rounds=short, **settings)
        self.seconds += sum(row["seconds"] for row in found.rows) * rounds / short
        return found

    def choose(self, key, score, ladders, *trials):
        before = self.seconds
        score(at := middle(ladders))
        self.seconds = before + (self.seconds - before) * trials[0]
        return at

    def all_of(self, tasks):
        return [task() for _, _, task in tasks]  # in this process, which counts their seconds

    def each(self, key, compute):
        before = self.seconds
        found = [compute(seed) for seed in self.seeds]
        self.seconds = before + (self.seconds - before) * self.count
        return found


def estimate(r: Recipe, scale: Size, seeds: Sequence[int], data_dir: str | Path | None, device: str) -> float:
    """Minutes that a recipe takes here, from three rounds of every kind of method."""
    with tempfile.TemporaryDirectory() as folder:
        pilot = Pilot(Path(folder), scale, seeds[:1], data_dir, device)
        pilot.count = len(seeds)
        r.run(pilot)
    return pilot.seconds / 60


def _traced(settings: Mapping[str, Any]) -> list[str]:
    """The settings that TOML cannot hold, as text, so that a changed one is noticed."""
    odd = (f"{k}={v!r}" for k, v in settings.items() if not isinstance(v, int | float | str | None))
    return sorted(re.sub(r" at 0x[0-9a-f]+", "", text) for text in odd)


def same_experiment(place: Path, config: Mapping[str, Any], record: Path | None = None) -> None:
    """Refuse to mix runs of two versions of a recipe in one folder or record; more seeds and other devices are fine."""
    path = place / "comparison.toml"
    if not path.exists():
        return
    before, config = _plain(unsealed(path)), _plain(tomllib.loads(tomli_w.dumps(dict(config))))
    for key in sorted({*before, *config} - {"seeds", "device"}):
        if before.get(key) != config.get(key):
            if record is not None:
                raise ConfigError(f"{record}: holds runs with another {key} than this version of the recipe has")
            raise ConfigError(f"{place}: holds runs with another {key}; start again with --force or another --out")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without the settings of methods that are at their defaults: runs may be older than a setting."""
    methods = []
    for given in config.get("algorithms", []):
        name = given.get("name", "")
        fields = dataclasses.fields(REGISTRY.find(name)) if REGISTRY.knows(name) else ()
        usual = {kebab(f.name): list(f.default) if isinstance(f.default, tuple) else f.default for f in fields}
        methods.append({k: v for k, v in given.items() if k not in usual or v != usual[k]})
    return of_earlier(config) | {"algorithms": methods}


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def joined(parts: Iterable[Comparison]) -> Comparison:
    """Several comparisons as one."""
    return Comparison([r for part in parts for r in part.results])


# ---- reading results ------------------------------------------------------------------------------------------------


def metric_of(found: Comparison, label: str, column: str | None = None) -> np.ndarray:
    """[seeds] the mean over clients of a column of clients.csv, the metric that leads by default; NaN if diverged."""
    name = column or f"{found.split}_{found.metric}"
    columns = (_column(r, name) for r in found.results if r.label == label)
    return np.array([np.nan if c is None else mean_of(c) for c in columns], dtype=float)


def _column(result: Done, name: str) -> np.ndarray | None:
    """A column of clients.csv as numbers; None where there is none, or nothing in it."""
    if result.clients is None or name not in result.clients.columns:
        return None
    values = np.array([np.nan if pd.isna(v) else float(v) for v in result.clients[name].tolist()])
    return None if np.isnan(values).all() else values


def grouping_of(found: Comparison, label: str) -> tuple[np.ndarray, np.ndarray]:
    """([seeds] number of groups found, [seeds] adjusted Rand index against the true ones); NaN where there is none."""
    from sklearn.metrics import adjusted_rand_score

    numbers, scores = [], []
    for r in (r for r in found.results if r.label == label):
        assigned, true = _column(r, "assigned"), _column(r, "cluster")
        numbers.append(np.nan if assigned is None else len(np.unique(assigned)))
        scores.append(np.nan if assigned is None or true is None else adjusted_rand_score(true, assigned))
    return np.array(numbers, dtype=float), np.array(scores, dtype=float)


def curves(found: Comparison, split: str | None = None) -> pd.DataFrame:
    """The evaluated rounds of all runs: label, seed, and the columns of `Run.history`, read from the run folders."""
    split, parts = split or found.split, []
    for r in found.results:
        if r.folder is None or not (r.folder / "metrics.jsonl").exists():
            continue
        frame = pd.DataFrame([row.table() for row in schema.metrics(r.folder) if row.split == split])
        parts.append(frame.assign(label=r.label, seed=r.seed))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def write(r: Recipe, bench: Bench, outcome: Outcome) -> Path:
    """Write outcome.md and page.html, a CSV per table, an SVG and a PDF per figure. Returns the first."""
    write_atomically(bench.folder / "page.html", _page(r, bench, outcome).encode())
    lines = [f"# {r.name}: {r.title}", "", r.about, "", f"Size: {bench.scale}; seeds: {bench.seeds}.", ""]
    for k, table in enumerate(outcome.tables, 1):
        write_atomically(bench.folder / f"table{k}-{_slug(table.title)}.csv", table.to("csv").encode())
        lines += [table.to("markdown"), ""]
    for name, figure in outcome.figures.items():
        for form in ("svg", "pdf"):
            save(figure, bench.folder / f"{name}.{form}")
        lines += [f"![{name}]({name}.svg)", ""]
    if outcome.claims:
        lines += [claims_table(outcome.claims).to("markdown"), ""]
    lines += [settings_table(r.settings(bench.scale)).to("markdown"), ""]
    lines += [f"- {note}" for note in outcome.notes]
    write_atomically(bench.folder / "outcome.md", "\n".join(lines).encode() + b"\n")
    return bench.folder / "outcome.md"


def _page(r: Recipe, bench: Bench, outcome: Outcome) -> str:
    """The outcome as a page that opens offline."""
    tables = [*outcome.tables, *([claims_table(outcome.claims)] if outcome.claims else [])]
    figures = "".join(
        page.figure(page.Drawing(name, drawn, outcome.captions.get(name, name), ""))
        for name, drawn in outcome.figures.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in outcome.notes)
    sections = [
        ("", "".join(page.table(t, _slug(t.title)) for t in tables[:1])),
        ("Figures", f'<div class="figures">{figures}</div>' if figures else ""),
        ("Tables", "".join(page.table(t, _slug(t.title)) for t in tables[1:])),
        ("Notes", f'<ul class="notes">{notes}</ul>' if notes else ""),
        ("Settings", page.table(settings_table(r.settings(bench.scale)), "settings")),
    ]
    size = f"size {bench.scale} · seeds {', '.join(map(str, bench.seeds))}"
    return page.page(f"{r.name}: {r.title}", size, f"<p>{escape(r.about)}</p>", sections, f"polyfed reproduce {r.name}")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
