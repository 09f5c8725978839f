"""polyfed tune: one setting of a method by validation data, and the chosen model trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed import report
from polyfed.algorithms.fpfc import FPFC
from polyfed.base import plugins
from polyfed.base.errors import ConfigError
from polyfed.base.settings import split, value_of
from polyfed.cli.console import Show, results, show_table
from polyfed.cli.folders import claimed, is_search
from polyfed.cli.given import collect, read
from polyfed.cli.run import prepared
from polyfed.cli.screen import interrupted, say, stderr, stdout
from polyfed.report import Table, words
from polyfed.report.table import Cell
from polyfed.runs import stop
from polyfed.runs.build import Parts
from polyfed.runs.config import Method, defaults_for, merge, resolve
from polyfed.runs.config import Settings as Training
from polyfed_tuning import tune as study
from polyfed_tuning.commands import Tune
from polyfed_tuning.grids import default_setting
from polyfed_tuning.search import Search
from polyfed_tuning.tune import Watch
from polyfed_tuning.tuned import Tuned

USUAL = {"rounds": 1000, "seeds": 1, "data": {"validation-fraction": 0.2}}


def tune(o: Tune) -> int:
    table = collect(o)
    if o.scale is not None:
        table.setdefault("data", {}).setdefault("options", {})["scale"] = o.scale
    resolved = resolve(None, table, [o.method], merge(defaults_for(None, table), USUAL))
    if not resolved.single:
        raise ConfigError(f"seeds: found {len(resolved.seeds)}, expected one: tune works under one seed")
    typed = vars(o) | {
        "setting": o.setting or default_setting(resolved.methods[0].algorithm), "rounds": resolved.settings.rounds,
        "grid": _grids(o.grid, o.cold_grid) or None, "stop_at_drop": not o.whole,
    }  # fmt: skip
    search, parts = read(Search, typed), prepared(resolved)
    experiment, since = parts.experiment, stop.interruptions()
    resume = o.resume or (o.out is not None and not o.force and is_search(o.out))
    with claimed(o.out, f"tune-{experiment.name}", o.force, resume) as folder:
        tuned = _tuned(parts, search, o, folder, resume)
        if tuned.rows:
            stdout.print()
            show_table(tune_table(tuned))
        if tuned.status == "interrupted":
            return interrupted(f"continue with the same command and --out {folder}", since)
        if not any(row["best"] for row in tuned.rows):
            say(f"polyfed: every value of {tuned.setting} diverged; a smaller lr may help", stderr)
            return 1
        if (folder / "summary.json").exists():
            results(report.read(folder), report.write_report(folder))
        else:
            say(f"\ntable and figure: {folder}")
    return 0


def _grids(grid: str | None, cold: str | None) -> dict[str, Any]:
    typed = {"warm": grid, "cold": cold or grid}
    return {name: [value_of(v, "--grid") for v in split(text)] for name, text in typed.items() if text is not None}


def _tuned(parts: Parts, search: Search, o: Tune, folder: Path, resume: bool) -> Tuned:
    experiment = parts.experiment
    seed, method = experiment.seeds[0], experiment.methods[0]
    model, federation, training = parts.model(seed), parts.federation(seed), parts.training(seed)
    if o.window:
        _say_window(model, federation, method.algorithm, training)
    with Show(False, o.quiet) as show:
        return study.tune(
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


def _say_window(model: Any, federation: Any, method: Any, training: Training) -> None:
    if not isinstance(method, FPFC):
        raise ConfigError(f"--window: found method {method.name}, expected fpfc")
    if federation.clusters is None:
        raise ConfigError("--window: these data name no clusters")
    loss, decay = training.loss, training.weight_decay
    assert loss is not None  # `Parts` leaves nothing open
    papers = plugins.sibling("polyfed_papers.window", "--window")
    bounds = papers.window_for(model, federation, federation.clusters, loss, method=method, weight_decay=decay)
    say("For the clusters that the data name, from their training samples:")
    for line in bounds.lines():
        say(f"- {line}")


def _shown(show: Any, seed: int, setting: str) -> Any:
    """A watch of `tune` on the progress display."""

    class Shown(Watch):
        def begin(self, regime: str, value: float, done: int, total: int) -> None:
            self.label = f"{regime}, {setting} {value:g}"
            show.start(total, done)
            show.begin(self.label, seed)

        def callbacks(self) -> Sequence[Any]:
            return show.callbacks()

        def end(self, row: Mapping[str, Any]) -> None:
            show.over(self.label, seed)
            if show.live or show.quiet:
                return
            groups = "" if row["clusters"] is None else f", clusters {row['clusters']}"
            text = f"{row['regime']}, {setting} {row[setting]:g}: validation {row['validation']:.4g}{groups}"
            say(f"{text}, rounds {row['rounds']} ({row['ended']}, {row['seconds']:.1f} s)", stderr)

    return Shown()


def tune_table(tuned: Tuned) -> Table:
    """The whole search as a table, the chosen row marked, and what each regime cost."""
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
    if tuned.edges:
        notes.append(f"the best {tuned.setting} is at an end of the values: more --extend may find a better one")
    columns += ["rounds", "bytes", "time", "ended by<"]
    return Table(f"Validation, {tuned.setting} by {tuned.setting}", tuple(columns), tuple(rows), tuple(notes))
