"""polyfed export: one client's model as a safetensors file, with a small JSON file that says what it is."""

import json
from pathlib import Path
from typing import Any

from polyfed import report
from polyfed.base.errors import ConfigError
from polyfed.base.plugins import sibling
from polyfed.cli.screen import say, stderr
from polyfed.face import Run
from polyfed_export.commands import Export
from polyfed_export.export import from_vault


def export(o: Export) -> None:
    if (o.run / "vault.json").is_file():  # a site's
        if o.client is not None:
            raise ConfigError(f"--client: for the folder of a run; {o.run} is the vault of one site")
        if o.form not in ("dense", "onnx"):
            raise ConfigError(f"--form: found {o.form!r}, expected dense or onnx for the vault {o.run}")
        onnx = o.form == "onnx" and sibling("polyfed_export.onnx", "--form onnx:")
        written = (onnx.onnx_from_vault(o.run, o.out),) if onnx else from_vault(o.run, o.out)
        say(" and ".join(map(str, written)))
        return
    run = Run.open(_deployed(o.run))
    if o.client is None:
        raise ConfigError(f"--client: missing; {o.run} is a run, with the clients {', '.join(run.outline.names)}")
    if o.form == "peft":
        say(str(run.peft(o.client, o.out)))
    elif o.form == "onnx":
        say(str(run.onnx(o.client, o.out)))
        if "preparation" not in run.outline.meta:
            say(
                "its input is a prepared one: the data were not CSV files, whose preparation would be part of the graph"
            )
    else:
        path, about = run.export(o.client, o.out, o.form)
        say(f"{path} and {about}")
        if o.form == "factorised":
            _measured(path, json.loads(about.read_text("utf-8"))["measured"])


def _measured(path: Path, measured: dict[str, Any]) -> None:
    if "missing" in measured:
        say(f"not measured: {measured['missing']}")
        return
    say(f"{measured['samples']} samples, one thread; the file has {path.stat().st_size:,} bytes")
    for form, row in measured["forms"].items():
        best = "  fastest" if form == measured["fastest"] else ""
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
