"""polyfed compare: several methods on the same data, seeds and starts."""

from typing import Annotated

from typer import Argument

from polyfed.cli import complete
from polyfed.cli import options as o

SEEDS = 5


def compare(
    methods: Annotated[
        list[str],
        Argument(help="Names, with settings where wanted: ditto:lam=0.1,lr=0.05", autocompletion=complete.methods),
    ],
    set: o.Set = None,
    data: o.Data = None,
    data_dir: o.DataDir = None,
    target: o.Target = None,
    standardise: o.Standardise = None,
    drop: o.Drop = None,
    partition: o.Partition = None,
    clients: o.Clients = None,
    model: o.Model = None,
    rounds: o.Rounds = None,
    fraction: o.Fraction = None,
    local_epochs: o.Epochs = None,
    local_steps: o.Steps = None,
    batch_size: o.Batch = None,
    lr: o.Lr = None,
    optimizer: o.Optimizer = None,
    metrics: o.Metrics = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    device: o.Device = None,
    engine: o.Engine = None,
    workers: o.Workers = None,
    address: o.Address = None,
    dtype: o.Dtype = None,
    portable: o.Portable = False,
    out: o.Out = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> int:
    """Compare methods on the same partition, test samples and start, over several seeds (default: 5).

    Yardsticks, which send nothing, are named like methods: own-trees, own-linear, commonest, pooled-oracle.

    [dim]polyfed compare local fedavg ditto:lam=0.1 ditto:lam=1 --data digits --clients 10 --rounds 50
    polyfed compare local fedavg recalibrated own-trees pooled-oracle[/dim]
    """
    given = o.collect(locals())
    from polyfed.cli.execute import execute
    from polyfed.experiment.config import defaults_for, resolve

    found = resolve(None, given, methods, defaults_for(None, given) | {"seeds": SEEDS})
    return execute(found, out, force, quiet)
