"""The history of a run: one record for every evaluated round and split."""

from typing import Any

import numpy as np

from polyfed.metrics.metric import having, mean_of
from polyfed.runs.result import Result, splits


def record(run: Result, split: str) -> dict[str, Any]:
    """One line of the history: the mean over clients of every metric, its spread, and the cost so far.

    pooled: the leading metric over all samples, whoever has them, where it is a mean over samples
    """
    metrics, metric = run.final[split], run.metric
    values = having(metric, metrics)
    down, up = run.trained.ledger.totals()
    known = values[~np.isnan(values)] if not np.isnan(values).all() else np.array([np.nan])
    seen = np.where(np.isnan(values), 0, splits(run.federation)[split].counts)
    pooled = float(np.nansum(seen * values) / seen.sum()) if seen.any() else float("nan")
    worst = known[metric.merit(known).argmin()]
    return {
        "round": run.rounds,
        "split": split,
        **{name: mean_of(v) for name, v in metrics.items()},
        "std": float(known.std()),
        "worst": float(worst),
        **({"pooled": pooled} if metric.pooled else {}),
        "down_bytes": down,
        "up_bytes": up,
        "seconds": run.seconds,
        **({"virtual_time": run.trained.clock} if run.trained.clock else {}),
    }


def grouping(run: Result) -> dict[str, Any]:
    """Number of clusters that the method sees now and, where it has changed, the label of every client."""
    found = run.trained.algorithm.describe(run.server).clusters
    if found is None:
        return {}
    before = next((r["assigned"] for r in reversed(run.records) if "assigned" in r), None)
    labels = np.asarray(found).tolist()
    return {"clusters": len(set(labels))} | ({"assigned": labels} if labels != before else {})
