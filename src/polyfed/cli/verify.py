"""polyfed verify: train a run again and see whether the same numbers come out."""

from polyfed.base import plugins
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.cli.commands import Verify
from polyfed.cli.screen import say
from polyfed.data.datasets import default_dir
from polyfed.runs.ownership import config_of
from polyfed.studies import verify as again


def verify(o: Verify) -> int:
    run, only = o.run, o.only
    equal = True

    def tell(name: str, verdict: again.Verdict) -> None:
        nonlocal equal
        equal = equal and (verdict.equal or verdict.rounded)
        say(f"{name}: {verdict}")
        for part, text in verdict.parts.items():
            say(f"  {part:<8} {text}")
        for part, (then, now) in verdict.versions.items():
            say(f"  {part}: {then} in the run, {now} here")

    if run.is_file():
        record = plugins.sibling("polyfed_papers.recipes.record", f"{run}: the record of a recipe")
        record.verify(run, only, o.data_dir or default_dir(), tell)
        return 0 if equal else 1
    if o.data_dir is not None:
        raise ConfigError(f"--data-dir: has no effect on a run, which names its data; {run} is no record")
    folders = [run]
    if config_of(run).name == "comparison.toml":
        folders = sorted(p.parent for p in (run / "runs").glob("*/config.toml"))
        names = [p.name for p in folders]
        if not folders:
            raise RunError(f"{run}: a comparison without runs")
        if only is not None and only not in names:
            raise ConfigError(f"--run: found {only!r}{closest(only, names)}, expected one of {', '.join(names)}")
        folders = [p for p in folders if only in (None, p.name)]
    elif only is not None:
        raise ConfigError(f"--run: {run} is a run, not a comparison; leave it out")
    for folder in folders:
        tell(str(folder), again.verify(folder))
    return 0 if equal else 1
