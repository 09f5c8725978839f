"""Writes run folders as the experiment does, from given numbers, so that the report is tested on files alone."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w


def write_run(
    folder: Path, values: Sequence[float | None], *, algorithm: str = "fedavg", seed: int = 0, metric: str = "accuracy",
    names: Sequence[str] | None = None, samples: Sequence[int] | None = None, test: Sequence[int] | None = None,
    classes: int | None = 4, clusters: Sequence[int] | None = None, report: dict[str, Any] | None = None,
    notes: Sequence[str] = (), status: str = "finished", rounds: int = 20, settings: dict[str, Any] | None = None,
    digest: str | None = None, summary: bool = True, deploys: str | None = None, steps: float | None = None,
) -> Path:  # fmt: skip
    """A run folder whose clients end at `values` of the metric (None: no test samples). Returns the folder."""
    n = len(values)
    names = list(names or [f"client-{i}" for i in range(n)])
    samples = list(samples or [100 + 10 * i for i in range(n)])
    test = list(test or [0 if v is None else 50 for v in values])
    rng, holdings, labels = np.random.default_rng(len(algorithm)), np.random.default_rng(7), [None] * n
    if classes is not None:
        labels = [holdings.multinomial(s, holdings.dirichlet([2.0] * classes)).tolist() for s in samples]
    folder.mkdir(parents=True, exist_ok=True)
    known = [v for v in values if v is not None]
    mean, higher = float(np.mean(known)), metric == "accuracy"
    worst, best = (min(known), max(known)) if higher else (max(known), min(known))
    total = 0 if algorithm == "local" else 10**6 * n
    config = {
        "rounds": rounds, "fraction": 1.0, "batch-size": 32, "seed": seed,
        "algorithm": {"name": algorithm, "lr": 0.1, **(settings or {})},
        "data": {"name": "made", "clients": n, **({"digest": digest} if digest else {})},
        "model": {"name": "MLP"}, "versions": {"polyfed": "0.1.0", "torch": "2.4"},
    }  # fmt: skip
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    clients = [
        {"name": name, "train": m, "validation": 0, "test": k, "labels": label}
        for name, m, k, label in zip(names, samples, test, labels, strict=True)
    ]
    federation = {
        "dataset": "made", "partition": "dirichlet:0.5", "seed": seed, "classes": classes, "clients": clients,
        "clusters": None if clusters is None else list(clusters), "notes": list(notes),
    }  # fmt: skip
    (folder / "federation.json").write_text(json.dumps(federation))
    start = 0.25 if higher else 3 * mean
    lines = []
    for t in range(0, rounds + 1, max(1, rounds // 10)):
        part = t / rounds
        now = mean + (start - mean) * np.exp(-5 * part) + (rng.normal(0, 0.004) if 0 < t < rounds else 0)
        lines.append(
            {
                "round": t, "split": "test", "loss": 2 - part, metric: now, "std": 0.05, "worst": worst,
                "down_bytes": int(total / 2 * part), "up_bytes": int(total / 2 * part), "seconds": 3.0 * part,
            }
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if not summary:
        return folder
    found = (report or {}).get("clusters", [""] * n)
    true = clusters if clusters is not None else [""] * n
    columns = ["client", "train_samples", "validation_samples", "test_samples", "cluster", "assigned", "test_loss"]
    columns += [f"test_{metric}", f"train_{metric}", "rounds", "down_bytes", "up_bytes"]
    half = total // n // 2
    rows = [
        [names[i], samples[i], 0, test[i], true[i], found[i], 1.0, "" if v is None else v, v or 0, rounds, half, half]
        for i, v in enumerate(values)
    ]
    with (folder / "clients.csv").open("w", newline="") as f:
        csv.writer(f).writerows([columns, *rows])
    ledger = [[t, i, 1, half // rounds, half // rounds] for t in range(rounds) for i in range(n)]
    with (folder / "ledger.csv").open("w", newline="") as f:
        csv.writer(f).writerows([["round", "client", "exchanges", "down_bytes", "up_bytes"], *ledger])
    (folder / "report.json").write_text(json.dumps(report or {}))
    final = {"mean": mean, "std": float(np.std(known)), "worst": worst, "best": best}
    told = {
        "status": status, "algorithm": algorithm, "seed": seed, "rounds": rounds, "metric": metric,
        "higher_is_better": higher, "final": {"test": final}, "down_bytes": total // 2, "up_bytes": total // 2,
        "seconds": 3.0, "parameters": 1234,
        "deploys": deploys or ("common" if algorithm in ("fedavg", "fedprox", "scaffold") else "personal"),
        "steps": steps,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(told))
    return folder


def write_comparison(folder: Path, methods: dict[str, Sequence[Sequence[float | None]]], **common: Any) -> Path:
    """A comparison folder. methods: {label: one list of client values per seed}; the algorithm is the label's head."""
    for label, seeds in methods.items():
        for seed, values in enumerate(seeds):
            own = {key: value(seed) if callable(value) else value for key, value in common.items()}
            for key in ("report", "steps"):
                own[key] = own.get(key, {}).get(label)
            write_run(folder / "runs" / f"{label}-seed{seed}", values, algorithm=label.split("-")[0], seed=seed, **own)
    (folder / "comparison.toml").write_text("")
    return folder


def noisy(centre: Sequence[float], seeds: int, spread: float, key: int) -> list[list[float]]:
    """Values around `centre` for every seed."""
    rng = np.random.default_rng(key)
    return [(np.asarray(centre) + rng.normal(0, spread, len(centre))).tolist() for _ in range(seeds)]
