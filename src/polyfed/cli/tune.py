"""polyfed tune: one setting of a method by validation data, and the chosen model trained on."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from polyfed.cli import options as o
from polyfed.cli.portable import pin
from polyfed.runs.training import Search

if TYPE_CHECKING:
    from polyfed.report import Table
    from polyfed.runs.build import Parts
    from polyfed.runs.config import Settings as Training
    from polyfed.studies.tune import Tuned

TUNING = "Tuning"
USUAL = {"rounds": 1000, "seeds": 1, "data": {"validation-fraction": 0.2}}
Setting = Annotated[str | None, o.option(Search, "setting", TUNING, "NAME")]
Regime = Annotated[str | None, o.option(Search, "regime", TUNING)]
Grid = Annotated[str | None, o.option(Search, "grid", TUNING)]
CheckEvery = Annotated[str | None, o.option(Search, "check_every", TUNING, "N")]
Tolerance = Annotated[str | None, o.option(Search, "tolerance", TUNING, "X")]
Patience = Annotated[str | None, o.option(Search, "patience", TUNING, "N")]
Extend = Annotated[str | None, o.option(Search, "extend", TUNING, "N")]
Choose = Annotated[str | None, o.option(Search, "choose", TUNING)]
TrainOn = Annotated[str | None, o.option(Search, "train_on", TUNING, "N")]


@o.shared("seeds", *o.ON_RAY)
def tune(
    method: Annotated[str, Argument(help="A method, with settings where wanted: fpfc:nu=0.5")] = "fpfc",
    setting: Setting = None,
    regime: Regime = None,
    grid: Grid = None,
    cold_grid: Annotated[
        str | None, Option(help="Values for the cold start, where they differ.", rich_help_panel=TUNING)
    ] = None,
    check_every: CheckEvery = None,
    tolerance: Tolerance = None,
    patience: Patience = None,
    whole: Annotated[
        bool, Option("--whole", help="Continue a warm path after validation has dropped.", rich_help_panel=TUNING)
    ] = False,
    extend: Extend = None,
    choose: Choose = None,
    train_on: TrainOn = None,
    window: Annotated[
        bool,
        Option(
            "--window",
            help="First print the range of lam compatible with the cluster labels in the data.",
            rich_help_panel=TUNING,
        ),
    ] = False,
    scale: Annotated[
        str | None, Option(help="Scale of a synthetic data set: small or full.", rich_help_panel=o.DATA)
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Optional: the same command with the same --out continues anyway.", hidden=True)
    ] = False,
    **given: Any,
) -> int:
    """Choose lam, or another numeric setting, on validation data, then train the chosen model further.

    --rounds is the maximum per value (default: 1000). The same command with the same --out continues an interrupted
    search.

    [dim]polyfed tune --data fpfc-s1 --scale small --batch-size full --local-steps 10 --fraction 0.3[/dim]
    [dim]polyfed tune fedacs --setting quantile --grid 0.5,0.67,0.75 --data fpfc-s1 --scale small[/dim]
    """
    typed = locals() | given
    table = o.collect(given)
    if scale is not None:
        table.setdefault("data", {}).setdefault("options", {})["scale"] = scale
    from polyfed.base.errors import ConfigError
    from polyfed.cli.folders import is_search
    from polyfed.runs.build import Parts
    from polyfed.runs.config import defaults_for, merge, resolve
    from polyfed.studies.grids import default_setting

    found = resolve(None, table, [method], merge(defaults_for(None, table), USUAL))
    if not found.single:
        raise ConfigError(f"seeds: found {len(found.seeds)}, expected one: tune works under one seed")
    typed |= {
        "setting": setting or default_setting(found.methods[0].algorithm), "rounds": found.settings.rounds,
        "grid": _grids(grid, cold_grid) or None, "stop_at_drop": not whole,
    }  # fmt: skip
    search = o.read(Search, typed)
    if found.settings.portable:
        pin()
    out, force = given["out"], given["force"]
    resume = resume or (out is not None and not force and is_search(out))
    return _execute(Parts(found), search, window, out, force, given["quiet"], resume)


def _grids(grid: str | None, cold: str | None) -> dict[str, Any]:
    from polyfed.base.settings import split, value_of

    typed = {"warm": grid, "cold": cold or grid}
    return {name: [value_of(v, "--grid") for v in split(text)] for name, text in typed.items() if text is not None}


def _execute(
    parts: "Parts", search: Search, window: bool, out: Path | None, force: bool, quiet: bool, resume: bool
) -> int:
    """Tune in a new folder, or go on in that of the same search; show the path and report the final run."""
    from polyfed.base.errors import ConfigError
    from polyfed.cli.console import show_table, stderr, stdout
    from polyfed.cli.folders import claimed
    from polyfed.runs import ownership as files
    from polyfed.runs import stop

    experiment, since = parts.experiment, stop.interruptions()
    parts.check()
    if resume and out is None:
        raise ConfigError("--resume: needs --out with the folder of the search")
    with claimed(out, f"tune-{experiment.name}", force, resume) as folder:
        tuned = _tuned(parts, search, window, folder, quiet, resume)
        if tuned.rows:
            stdout.print()
            show_table(tune_table(tuned))
        if tuned.status == "interrupted":
            how = f"continue with the same command and --out {folder}{files.where_old(folder)}"
            stderr.print(f"polyfed: interrupted; {how}", soft_wrap=True, markup=False)
            return stop.status(since)
        files.forget_old(folder)
        return _say_found(tuned, folder)


def _tuned(parts: "Parts", search: Search, window: bool, folder: Path, quiet: bool, resume: bool) -> "Tuned":
    from polyfed.cli.console import Show
    from polyfed.runs.config import Method
    from polyfed.studies.tune import tune

    experiment = parts.experiment
    seed, method = experiment.seeds[0], experiment.methods[0]
    model, federation, training = parts.model(seed), parts.federation(seed), parts.training(seed)
    if window:
        _say_window(model, federation, method.algorithm, training)
    with Show(False, quiet) as show:
        return tune(
            model,
            federation,
            method.algorithm,
            training,
            search,
            seed=seed,
            out=folder,
            watch=_shown(show, seed, str(search.setting)),
            describe=lambda a: parts.describe(Method(a, method.file, method.label)),
            resume=resume,
        )


def _say_found(tuned: "Tuned", folder: Path) -> int:
    from polyfed.cli.console import results, stderr, stdout
    from polyfed.report import read, write_report

    if not any(row["best"] for row in tuned.rows):
        stderr.print(f"polyfed: every value of {tuned.setting} diverged; a smaller lr may help", markup=False)
        return 1
    if not (folder / "summary.json").exists():
        stdout.print(f"\ntable and figure: {folder}", soft_wrap=True, markup=False)
        return 0
    results(read(folder), write_report(folder))
    return 0


def _say_window(model: Any, federation: Any, method: Any, training: "Training") -> None:
    from polyfed.algorithms.fpfc import FPFC
    from polyfed.base.errors import ConfigError
    from polyfed.cli.console import stdout
    from polyfed.studies.window import window_for

    if not isinstance(method, FPFC):
        raise ConfigError(f"--window: found method {method.name}, expected fpfc")
    if federation.clusters is None:
        raise ConfigError("--window: these data name no clusters")
    loss, decay = training.loss, training.weight_decay
    assert loss is not None  # `Parts` leaves nothing open
    bounds = window_for(model, federation, federation.clusters, loss, method=method, weight_decay=decay)
    stdout.print("For the clusters that the data name, from their training samples:")
    for line in bounds.lines():
        stdout.print(f"- {line}", markup=False)


def _shown(show: Any, seed: int, setting: str) -> Any:
    """A watch of `tune` on the progress display."""
    from polyfed.cli.console import stderr
    from polyfed.studies.jobs import Done
    from polyfed.studies.tune import Watch

    class Shown(Watch):
        def begin(self, regime: str, value: float, done: int, total: int) -> None:
            self.label = f"{regime}, {setting} {value:g}"
            show.start(total, done)
            show.begin(self.label, seed)

        def callbacks(self) -> Sequence[Any]:
            return show.callbacks()

        def end(self, row: Mapping[str, Any]) -> None:
            if show.live or show.quiet:
                show.end(Done(self.label, seed, "finished"), False)
                return
            groups = "" if row["clusters"] is None else f", clusters {row['clusters']}"
            text = f"{row['regime']}, {setting} {row[setting]:g}: validation {row['validation']:.4g}{groups}"
            stderr.print(f"{text}, rounds {row['rounds']} ({row['ended']}, {row['seconds']:.1f} s)", soft_wrap=True)

    return Shown()


def tune_table(tuned: "Tuned") -> "Table":
    """The whole search as a table, the chosen row marked, and what each regime cost."""
    from polyfed.report import Table, words
    from polyfed.report.table import Cell

    scale, ari = words.Scale(tuned.metric), any("ari" in row for row in tuned.rows)
    columns = ["start<", tuned.setting, f"validation {scale.header}", "clusters", *(["ARI"] if ari else [])]
    rows = []
    for row in tuned.rows:
        mark = "best" if row["best"] else ""
        texts = [
            row["regime"], f"{row[tuned.setting]:g}", scale.number(row["validation"]),
            "–" if row["clusters"] is None else str(row["clusters"]), *([f"{row['ari']:.2f}"] if ari else []),
            str(row["rounds"]), words.size(row["bytes"]), words.duration(row["seconds"]), row["ended"],
        ]  # fmt: skip
        rows.append(tuple(Cell(text, mark=mark) for text in texts))
    notes = [
        f"{name}: {words.count(int(c['rounds']), 'round')}, {words.size(c['bytes'])}, {words.duration(c['seconds'])}"
        for name, c in tuned.costs.items()
    ]
    for name in tuned.costs:
        tried = [row for row in tuned.rows if row["regime"] == name]
        best = next((row for row in tried if row["best"]), None)
        if best and len(tried) > 1 and best[tuned.setting] == max(row[tuned.setting] for row in tried):
            notes.append(f"the best {tuned.setting} is the last of the {name} grid: larger values may be better still")
    finite = [row for row in tuned.rows if math.isfinite(row["validation"]) and row["ended"] != "interrupted"]
    if finite:
        first = max(finite, key=lambda row: tuned.metric.merit(row["validation"]))
        if first["clusters"] is not None and first["clusters"] > tuned.best["clusters"]:
            notes.append(
                f"{first['regime']}, {tuned.setting} {first[tuned.setting]:g} is best on validation, with "
                f"{first['clusters']} clusters; the chosen one is within one standard error of it, with fewer"
            )
    columns += ["rounds", "bytes", "time", "ended by<"]
    return Table(f"Validation, {tuned.setting} by {tuned.setting}", tuple(columns), tuple(rows), tuple(notes))
