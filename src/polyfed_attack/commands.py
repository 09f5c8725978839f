"""The command that this package adds to polyfed; what it does is in `command`."""

from pathlib import Path

from polyfed.cli.options import Command, argument, option


class Attack(Command, module="command"):
    """Attack a site's own file under its own policy, as a server that means harm would; nothing leaves this machine.

    Prints what each attack has read, and which key of the policy has stopped it.

    [dim]polyfed attack bern.csv --policy policy.toml --allow pooled[/dim]
    """

    data: Path = argument("The site's own CSV file; its last column is the target.", ..., "FILE")
    policy: Path | None = option("The site's policy. Default: the default one.", None, "FILE")
    allow: list[str] | None = option("As polyfed client takes it.", None, "A,B,...")
