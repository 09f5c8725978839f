"""polyfed export: one client's model as a safetensors file, with a small JSON file that says what it is."""

import json
from pathlib import Path

from polyfed import report
from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Export
from polyfed.cli.screen import say, stderr
from polyfed.face import Run
from polyfed.studies.export import from_vault
from polyfed.studies.onnx import onnx_from_vault


def export(o: Export) -> None:
    forms = [f"--{name}" for name in ("factorised", "merged", "peft", "onnx") if getattr(o, name)]
    if len(forms) > 1:
        raise ConfigError(f"{forms[-1]}: found {forms[0]} too, expected one of them")
    if o.onnx:
        _onnx(o)
        return
    if o.vault is not None:
        if o.run is not None or o.client is not None or o.factorised or o.merged or o.peft:
            raise ConfigError("--vault: found RUN, --client or another form too, expected --out at most")
        path, about = from_vault(o.vault, o.out)
    elif o.run is None or o.client is None:
        raise ConfigError("export: expected RUN and --client NAME, or --vault DIR")
    elif o.peft:
        say(f"{Run.open(_deployed(o.run)).peft(o.client, o.out)}")
        return
    else:
        path, about = Run.open(_deployed(o.run)).export(o.client, o.out, o.factorised, o.merged)
    say(f"{path} and {about}")
    if not o.factorised:
        return
    found = json.loads(about.read_text())["measured"]
    if "missing" in found:
        say(f"not measured: {found['missing']}")
        return
    say(f"{found['samples']} samples, one thread; the file has {path.stat().st_size:,} bytes")
    for form, row in found["forms"].items():
        best = "  fastest" if form == found["fastest"] else ""
        price = f"{row['bytes']:>12,} bytes  {row['ms']:8.3f} ms"
        say(f"{form:<7} {price}  outputs differ by {row['difference']:.0e}{best}")


def _deployed(folder: Path) -> Path:
    """A run; of a comparison that of the method in the lead of its answer, under the first seed."""
    if not (folder / "comparison.toml").exists():
        return folder
    study = report.read(folder)
    lead = study.verdicts.lead
    if lead is None:
        return folder
    run = study.of(lead[0])[0]
    say(f"the model of {lead[0]}, which leads in the answer, trained under seed {run.seed}: {run.folder}", stderr)
    return run.folder


def _onnx(o: Export) -> None:
    if o.vault is not None and o.run is None and o.client is None:
        say(str(onnx_from_vault(o.vault, o.out)))
        return
    if o.vault is not None or o.run is None or o.client is None:
        raise ConfigError("export: expected RUN and --client NAME, or --vault DIR")
    run = Run.open(_deployed(o.run))
    say(str(run.onnx(o.client, o.out)))
    if "preparation" not in run.outline.meta:
        say("its input is a prepared one: the data were not CSV files, whose preparation would be part of the graph")
