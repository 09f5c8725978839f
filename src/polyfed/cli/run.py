"""polyfed run: one experiment, from a file, from options, or the built-in one."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polyfed.cli import complete
from polyfed.cli import options as o
from polyfed.cli.portable import asked_by


def run(
    experiment: Annotated[
        Path | None, Argument(help="Experiment file (TOML); a run's config.toml is one.", metavar="[FILE.toml]")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        Option(
            help="Run just this method, name or name:key=value; repeatable.",
            metavar="NAME",
            autocompletion=complete.methods,
        ),
    ] = None,
    set: o.Set = None,
    data: o.Data = None,
    data_dir: o.DataDir = None,
    target: o.Target = None,
    standardise: o.Standardise = None,
    drop: o.Drop = None,
    partition: o.Partition = None,
    clients: o.Clients = None,
    model: o.Model = None,
    rounds: o.Rounds = None,
    fraction: o.Fraction = None,
    local_epochs: o.Epochs = None,
    local_steps: o.Steps = None,
    batch_size: o.Batch = None,
    lr: o.Lr = None,
    optimizer: o.Optimizer = None,
    metrics: o.Metrics = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    device: o.Device = None,
    engine: o.Engine = None,
    workers: o.Workers = None,
    address: o.Address = None,
    dtype: o.Dtype = None,
    portable: o.Portable = False,
    out: o.Out = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> int:
    """Run an experiment and report it.

    Without arguments: heart disease in four hospitals; own, common and personalised models beside what costs
    nothing (the commonest class, own trees) and what nobody can have (everybody's data); ten seeds.

    [dim]polyfed run experiment.toml --set algorithm.lr=0.05 --seeds 5
    polyfed run --data fashion-mnist --data-dir DIR --partition dirichlet:0.5 --clients 20 --rounds 5[/dim]
    """
    given = o.collect(locals() | {"portable": portable or (experiment is not None and asked_by(experiment))})
    from polyfed.cli.execute import execute
    from polyfed.experiment.config import defaults_for, resolve

    found = resolve(experiment, given, algorithm or (), defaults_for(experiment, given))
    return execute(found, out, force, quiet)
