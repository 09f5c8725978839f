"""polyfed run: one experiment, from a file, from options, or the built-in one."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from polyfed.cli import complete
from polyfed.cli import options as o
from polyfed.cli.portable import asked_by


@o.shared()
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
    **given: Any,
) -> int:
    """Run an experiment and report it.

    Without arguments: heart disease in four hospitals; own, common and personalised models beside what costs
    nothing (the commonest class, own trees) and what nobody can have (everybody's data); ten seeds.

    [dim]polyfed run experiment.toml --set algorithm.lr=0.05 --seeds 5
    polyfed run --data fashion-mnist --data-dir DIR --partition dirichlet:0.5 --clients 20 --rounds 5[/dim]
    """
    typed = o.collect(given | {"portable": given["portable"] or (experiment is not None and asked_by(experiment))})
    from polyfed.cli.execute import execute
    from polyfed.runs.config import defaults_for, resolve

    found = resolve(experiment, typed, algorithm or (), defaults_for(experiment, typed))
    return execute(found, given["out"], given["force"], given["quiet"])
