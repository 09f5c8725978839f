"""polyfed compare: several methods on the same data, seeds and starts."""

from typing import Annotated, Any

from typer import Argument

from polyfed.cli import complete
from polyfed.cli import options as o

SEEDS = 5


@o.shared()
def compare(
    methods: Annotated[
        list[str],
        Argument(help="Names, with settings where wanted: ditto:lam=0.1,lr=0.05", autocompletion=complete.methods),
    ],
    **given: Any,
) -> int:
    """Compare methods on the same partition, test samples and start, over several seeds (default: 5).

    Yardsticks, which send nothing, are named like methods: own-trees, own-linear, commonest, pooled-oracle.

    [dim]polyfed compare local fedavg ditto:lam=0.1 ditto:lam=1 --data digits --clients 10 --rounds 50
    polyfed compare local fedavg recalibrated own-trees pooled-oracle[/dim]
    """
    typed = o.collect(given)
    from polyfed.cli.execute import execute
    from polyfed.runs.config import defaults_for, resolve

    found = resolve(None, typed, methods, defaults_for(None, typed) | {"seeds": SEEDS})
    return execute(found, given["out"], given["force"], given["quiet"])
