"""The command that this package adds to polyfed; what it does is in command.py."""

from polyfed.cli.options import Experiment, argument, every, option

AGAINST = ("fpfc", "ifca", "fedacs")  # what coalitions are held against unless methods are named


class Coalitions(Experiment, takes=every("engine", "workers", "address", "track"), module="command"):
    """Train the coalitions of the clients and report who gains from whom, and which coalitions would hold.

    Every client's score in every coalition, what each other client is worth to it (Shapley value, leave-one-out), the
    coalition it would choose by validation data, and stable partitions. polyfed resume continues.

    [dim]polyfed coalitions --seeds 10
    polyfed coalitions ditto --data digits --partition dirichlet:0.3 --clients 6 --against fpfc:lam=0.3[/dim]
    """

    method: str = argument("What coalitions train with: name, or name:key=value.", "fedavg")
    against: list[str] | None = option(
        "Method whose clusters or mixing weights are held against the coalitions; repeatable, or none. "
        f"Default: {', '.join(AGAINST)}.",
        None,
        "NAME",
    )
    samples: int | None = option(
        "Sample coalitions: how often each client joins each other. Default: all coalitions up to 8 clients, else 10.",
        None,
        "N",
    )
