"""polyfed export: one client's model as a safetensors file, with a small JSON file that says what it is."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def export(
    run: Annotated[Path | None, Argument(help="Folder of a run.", show_default=False)] = None,
    client: Annotated[str | None, Option(help="The client's name, or its number from 0.", show_default=False)] = None,
    vault: Annotated[
        Path | None, Option(help="At a site, in place of RUN: the folder of its private state.", metavar="DIR")
    ] = None,
    out: Annotated[
        Path | None, Option(help="File to write. Default: <client>.safetensors here.", metavar="FILE.safetensors")
    ] = None,
    factorised: Annotated[
        bool, Option("--factorised", help="Write low-rank layers as two factors and a sparse part (FedSLR).")
    ] = False,
) -> int:
    """Export one client's model: FILE.safetensors (named tensors) and FILE.json (model, shapes, origin).

    [dim]polyfed export runs/a/runs/ditto-seed0 --client cleveland[/dim]

    polyfed.models.factorised.load(FILE, model, sparse) turns a factorised file back into a module. The command prints
    size and speed of each form: dense; "merged", where layers with a sparse part are dense again; "beside", where that
    part is a sparse matrix, which is slower than dense for convolutions and small layers.
    """
    import json

    from polyfed.base.errors import ConfigError
    from polyfed.cli.screen import stdout
    from polyfed.face import Run
    from polyfed.studies.export import from_vault

    if vault is not None:
        if run is not None or client is not None or factorised:
            raise ConfigError("--vault: found RUN, --client or --factorised too, expected --out at most")
        path, about = from_vault(vault, out)
    elif run is None or client is None:
        raise ConfigError("export: expected RUN and --client NAME, or --vault DIR")
    else:
        path, about = Run.open(run).export(client, out, factorised)
    stdout.print(f"{path} and {about}", soft_wrap=True)
    if not factorised:
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
