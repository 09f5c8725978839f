"""polyfed export: one client's model as a safetensors file, with a small JSON file that says what it is."""

import json

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Export
from polyfed.cli.screen import say
from polyfed.face import Run
from polyfed.studies.export import from_vault


def export(o: Export) -> None:
    if o.vault is not None:
        if o.run is not None or o.client is not None or o.factorised:
            raise ConfigError("--vault: found RUN, --client or --factorised too, expected --out at most")
        path, about = from_vault(o.vault, o.out)
    elif o.run is None or o.client is None:
        raise ConfigError("export: expected RUN and --client NAME, or --vault DIR")
    else:
        path, about = Run.open(o.run).export(o.client, o.out, o.factorised)
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
