"""polyfed admit: clients that were not there in training, taken into a finished run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from polyfed.cli import options as o

if TYPE_CHECKING:
    from polyfed.data.federation import Federation
    from polyfed.experiment.admit import Admission
    from polyfed.experiment.build import Parts
    from polyfed.experiment.run import Run
    from polyfed.report import Table

MANY = 6  # newcomers with a column of their own
LINES = 12  # exchanges that the table shows


def admit(
    run: Annotated[Path, Argument(help="Folder of a run.", show_default=False)],
    data: Annotated[
        Path, Option(help="A CSV or npz file per newcomer: one file, or a folder of them.", show_default=False)
    ],
    exchanges: Annotated[int, Option(help="Rounds that every new client takes part in.", metavar="N")] = 10,
    start: Annotated[
        str, Option(help="offered: the best of the method's models (such as a cluster's); common: the initial model.")
    ] = "offered",
    target: Annotated[str | None, Option(help="Target column of CSV files; else the last.", metavar="COLUMN")] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the results; else runs/<time>-admit-<run>.", rich_help_panel=o.WHERE)
    ] = None,
) -> int:
    """Add new clients to a finished run by the method's own rule, and report each one's model after every exchange.

    The run and its clients stay as they are. A file's name is the client's; inputs are not rescaled.

    [dim]polyfed admit runs/a/runs/ditto-seed0 --data oslo.csv --exchanges 20[/dim]
    """
    from polyfed.cli.console import show_table, stdout
    from polyfed.cli.folders import claimed
    from polyfed.core.errors import ConfigError
    from polyfed.experiment.admit import admit

    if start not in ("offered", "common"):
        raise ConfigError(f"start: found {start!r}, expected offered or common")
    parts, last = _parts(run)
    newcomers = _newcomers(parts, data, target)
    with claimed(out, f"admit-{run.resolve().name}") as folder:
        found = admit(_reopened(run, parts, last), newcomers, exchanges, start=start)
        found.save(folder)
    stdout.print()
    show_table(admission_table(found))
    stdout.print(f"\nmodels, table and figure: {folder}", soft_wrap=True, markup=False)
    return 0


def _parts(run: Path) -> tuple["Parts", Path]:
    """What the run was made of, and its checkpoints' folder."""
    from polyfed.cli.folders import config_of
    from polyfed.core.checkpoint import checkpoints
    from polyfed.core.errors import ConfigError, RunError
    from polyfed.experiment.build import Parts
    from polyfed.experiment.config import resolve

    config = config_of(run)
    if config.name == "comparison.toml":
        some = sorted(p for p in (run / "runs").glob("*-seed*"))
        raise ConfigError(
            f"{run}: is a comparison; admit to one of its runs" + (f", such as {some[0]}" if some else "")
        )
    if not checkpoints(run / "checkpoint"):
        raise RunError(f"{run}: has no model yet; finish it with: polyfed resume {run}")
    return Parts(resolve(config)), run / "checkpoint"


def _newcomers(parts: "Parts", data: Path, target: str | None) -> "Federation":
    """Their files, read as the run's data are typed."""
    from polyfed.core.errors import DataError
    from polyfed.data.federation import Federation
    from polyfed.data.readers import client_files
    from polyfed.experiment.admit import fits

    e = parts.experiment
    old = parts.federation(e.seeds[0])
    if not data.exists():
        raise DataError(f"--data {data}: there is no such file or folder")
    new = Federation.from_files(
        client_files(data) if data.is_dir() else [data],
        target or e.data.options.get("target"),
        "regression" if old.classes is None else "classification",
        classes=old.classes,
        test_fraction=e.data.test_fraction,
        seed=e.seeds[0],
    )
    fits(old, new)
    return new


def _reopened(folder: Path, parts: "Parts", saved: Path) -> "Run":
    """The run as its last checkpoint has it; nothing is written to its folder."""
    from polyfed.core import checkpoint
    from polyfed.core.errors import RunError
    from polyfed.experiment.fit import digest, fit

    e = parts.experiment
    seed = e.seeds[0]
    federation = parts.federation(seed)
    tensors, meta, _ = checkpoint.load(saved)
    if meta["fingerprint"]["data"] != digest(federation):
        raise RunError(f"{folder}: its data are not the ones it was trained on")
    arguments: dict[str, Any] = parts.arguments() | {"rounds": 0, "evaluate_every": 0}
    run = fit(parts.model(seed), federation, e.methods[0].algorithm, seed=seed, **arguments)
    device = run.loop.task.device
    # newcomers need the server's state only: the clients' private rows stay where they are
    run.loop.server = {k[7:]: v.to(device, copy=True) for k, v in tensors.items() if k.startswith("server.")}
    run.loop.t = meta["t"]
    return run


def admission_table(found: "Admission") -> "Table":
    """The metric after each exchange: every newcomer (where they are few), their mean, and what they reach alone."""
    from polyfed.report import Table, words
    from polyfed.report.table import Cell

    scale, history = words.Scale(found.metric), found.history.to_dict("records")
    each = found.names if 1 < len(found.names) <= MANY else ()
    own = {(r["exchange"], r["client"]): r for r in found.table.to_dict("records")}
    last = len(history) - 1
    step = -(-last // LINES) or 1
    rows = []
    for k in [*range(0, last, step), last]:
        row = history[k]
        texts = [
            str(k), *(scale.number(own[k, name][found.metric]) for name in each),
            scale.number(row[found.metric]), scale.number(row["alone"]),
            words.size(row["down_bytes"]), words.size(row["up_bytes"]),
        ]  # fmt: skip
        rows.append(tuple(Cell(text) for text in texts))
    sign = 1 if found.metric == "accuracy" else -1
    better = sum(sign * (own[last, n][found.metric] - own[last, n]["alone"]) > 0 for n in found.names)
    notes = [
        "alone: as many rounds of the same local training without anybody",
        f"better off than alone after {words.count(last, 'exchange')}: {better} of {len(found.names)}",
    ]
    if found.clusters is not None:
        places = [f"{n}: {'with none' if c < 0 else c}" for n, c in zip(found.names, found.clusters, strict=True)]
        notes.append(f"cluster of the run: {', '.join(places[:20])}{', ...' if len(places) > 20 else ''}")
    columns = ("exchange", *each, found.label if len(each) < 2 else "mean", "alone", "down", "up")
    return Table(f"Newcomers to {found.label}, {found.split} {scale.header}", columns, tuple(rows), tuple(notes))
