"""polyfed export: one client's model as a safetensors file, with a small JSON file that says what it is."""

import json

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Export
from polyfed.cli.screen import stdout
from polyfed.face import Run
from polyfed.studies.export import from_vault


def export(o: Export) -> int:
    """Write a client's model, and say how big and how fast its forms are where it is factorised."""
    if o.vault is not None:
        if o.run is not None or o.client is not None or o.factorised:
            raise ConfigError("--vault: found RUN, --client or --factorised too, expected --out at most")
        path, about = from_vault(o.vault, o.out)
    elif o.run is None or o.client is None:
        raise ConfigError("export: expected RUN and --client NAME, or --vault DIR")
    else:
        path, about = Run.open(o.run).export(o.client, o.out, o.factorised)
    stdout.print(f"{path} and {about}", soft_wrap=True)
    if not o.factorised:
        return 0
    found = json.loads(about.read_text())["measured"]
    if "missing" in found:
        stdout.print(f"not measured: {found['missing']}", soft_wrap=True, markup=False)
        return 0
    stdout.print(f"{found['samples']} samples, one thread; the file has {path.stat().st_size:,} bytes", soft_wrap=True)
    for form, row in found["forms"].items():
        stdout.print(
            f"{form:<7} {row['bytes']:>12,} bytes  {row['ms']:8.3f} ms  outputs differ by {row['difference']:.0e}"
            f"{'  fastest' if form == found['fastest'] else ''}",
            soft_wrap=True,
        )
    return 0
