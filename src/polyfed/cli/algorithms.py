"""polyfed algorithms: list the methods, or show one in full: equations, settings, messages, certificates, citation."""

from typing import Annotated

from typer import Argument

from polyfed.cli import complete


def algorithms(
    name: Annotated[str | None, Argument(help="A method.", show_default=False, autocompletion=complete.methods)] = None,
) -> int:
    """List the methods, or describe one.

    [dim]polyfed algorithms fpfc[/dim]
    """
    from polyfed.cli.describe import overview, portrait
    from polyfed.cli.screen import stdout

    stdout.print(overview() if name is None else portrait(name))
    return 0
