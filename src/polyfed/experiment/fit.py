"""fit: one model, one federation, one method -> a Run. The only place where the parts are put together."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from polyfed.core import checkpoint
from polyfed.core.algorithm import KNOWN, Algorithm
from polyfed.core.algorithm import check as check_algorithm
from polyfed.core.augment import Augmentation, augmentation
from polyfed.core.batches import Work
from polyfed.core.errors import ConfigError, Diverged, RunError
from polyfed.core.metric import mean_of
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule, Uniform
from polyfed.core.scores import Metrics, metrics_of
from polyfed.core.settings import COUNTED, Limits, checked
from polyfed.core.split import Split
from polyfed.core.task import Loss, Task
from polyfed.core.worker import Plan
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, check_rows, make_plan, make_rows, pick_device
from polyfed.experiment.folder import RunFolder, fingerprint, versions
from polyfed.experiment.rehearsal import adds_up, check_robust
from polyfed.experiment.run import Run, splits
from polyfed.experiment.steps import LocalSteps, local_steps_of, recorded
from polyfed.experiment.stop import interruptible
from polyfed.experiment.watching import watchers
from polyfed.threats import Attack, Forging, Rule, summary


class Progress(NamedTuple):
    """What a callback receives after every round.

    round: rounds done     rounds: rounds in all     records: this round's evaluations (empty when none was due)
    """

    round: int
    rounds: int
    records: list[dict[str, Any]]
    run: Run


Callback = Callable[[Progress], Any]
COUNT = Annotated[int, Limits(ge=1, le=COUNTED)]


@checked
def fit(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    *,
    rounds: Annotated[int, Limits(ge=0, le=COUNTED)],
    loss: Loss = "cross-entropy",
    fraction: Annotated[float, Limits(gt=0, le=1)] = 1.0,
    local_epochs: COUNT = 1,
    local_steps: LocalSteps | None = None,
    batch_size: COUNT | None = 32,
    augment: str | Augmentation | None = None,
    metrics: Metrics | None = None,
    seed: Annotated[int, Limits(ge=0)] = 0,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    chunk: COUNT | None = None,
    workers: Annotated[int, Limits(ge=1, le=1024)] | None = None,
    weight_decay: Annotated[float, Limits(ge=0, le=COUNTED)] = 0.0,
    lr_decay: Annotated[float, Limits(gt=0, le=1)] = 1.0,
    lr_decay_every: COUNT = 1,
    schedule: Schedule | None = None,
    attack: Attack | None = None,
    robust: Rule | None = None,
    evaluate_every: Annotated[int, Limits(ge=0, le=COUNTED)] = 1,
    start: Run | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: COUNT | None = None,
    callbacks: Sequence[Callback] = (),
    describe: dict[str, Any] | None = None,
) -> Run:
    """Train `model` over `federation` with `algorithm`.

    model: its present parameters are the common start
    rounds: communication rounds
    loss: "cross-entropy", "mse", or a callable (output, target) -> mean loss
    fraction: share of the clients that take part in a round, drawn without replacement; `schedule` replaces it
    local_epochs: passes over a client's data per round; `local_steps` replaces it: a number, a function of t, an
        expression in the round k, from 1, such as "ceil(k/20)" or "uniform(1, 10)" (drawn for every client and round),
        or a number per client: a list in the order of the federation, or {name: number}
    batch_size: samples per local step; None: all of a client's samples
    augment: what the images of every training batch go through, drawn anew per sample: "flip+crop:4" (mirror with
        probability 1/2, cut out after padding by 4), "flip+crop:4,p=0.5" (crop with probability 1/2), or a callable
        (x [N, ...], draws) -> [N, ...] whose random numbers come from `draws.uniform()`, [N] each
    metrics: what clients' models are judged by, the first leads: "auc,brier", or a list of names, `polyfed.Metric`s and
        functions (output, target) -> number, higher is better. Default: accuracy for classes, RMSE for numbers; the
        loss is always recorded. See `polyfed.core.scores` for the names; those of scikit-learn's scorers do too
    seed: decides every draw
    device: "auto", "cpu" or "cuda"     dtype: precision of all arithmetic; None keeps the model's
    chunk, workers: override the plan (clients per call, threads)
    weight_decay: adds weight_decay/2 ||w||^2 to every client's loss
    lr_decay: local step sizes are multiplied by it every `lr_decay_every` rounds
    attack: what some of the clients do to the others, such as `threats.SignFlip(ratio=0.4)`; they are left out of every
        metric (NaN per client)
    robust: what the server takes in place of the mean, such as `threats.Median()`, for methods that take a mean
    evaluate_every: rounds between evaluations; the last round is always evaluated, 0: only the last
    start: a run on the same clients and model to start from. Of the same method (its settings may differ) its whole
        state is taken over and `rounds` more are counted on from its last; of another one its clients' models, for
        methods that can start from them, with one upload of each billed as round -1
    out: run folder, not a used one; without it nothing is written
    resume: continue from the checkpoint in `out`, if there is one
    checkpoint_every: rounds between checkpoints; None: every ten seconds, and at the end
    callbacks: called with a `Progress` after every round; one that returns True ends the run. In a notebook a call
        without any shows its progress
    describe: further tables for config.toml, such as {"data": {...}, "model": {...}}

    Returns a Run. Raises ConfigError, ModelError or DataError before training when something does not fit, Diverged
    when a value stops being finite, RunError when a folder cannot be read or written. All have a one-line message.
    Ctrl-C ends the run after the round it is in, saved and resumable; the Run's status is then "interrupted".
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: found {model!r}, expected a torch.nn.Module; polyfed.models.build makes one by name")
    if not isinstance(federation, Federation):
        found = type(federation).__name__
        raise ConfigError(
            f"federation: found a {found}, expected a polyfed.Federation, such as Federation.from_arrays makes"
        )
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm: found {algorithm!r}, expected a method such as polyfed.FedAvg(lr=0.1)")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype: found {dtype}, expected one of floating point, such as torch.float32")
    keys = client_keys(federation.names)
    attackers = np.zeros(federation.n, dtype=bool)
    if attack is not None:
        attackers = attack.attackers(seed, keys)
        if attackers.all() or (attack.ratio > 0 and not attackers.any()):
            who = "all, and no client is left to measure" if attackers.all() else "none of them"
            raise ConfigError(f"attack.ratio: found {attack.ratio:g}, which of {federation.n} clients is {who}")
        federation = attack.poison(federation, seed)
    task = Task(
        model, loss, weight_decay=weight_decay, device=pick_device(device), dtype=dtype, metrics=metrics_of(metrics)
    )
    check_algorithm(algorithm, task.dtype)
    if len(federation.train.x) == 0:
        raise ConfigError("federation: no client has a training sample")
    task.check(federation.train, federation.classes, type(model).__name__)
    schedule = schedule or Uniform(fraction)
    steps, augmented = local_steps_of(local_steps, federation.names), augmentation(augment, federation.input_shape)
    work = Work(local_epochs, steps, batch_size, augmented)
    defence = None if robust is None else check_robust(algorithm, robust, model, loss, federation, work, schedule)
    cohort = schedule.size(federation.n) if isinstance(schedule, Uniform) else federation.n
    plan = make_plan(task, cohort, work.per_step(federation.train.counts), chunk, workers)
    store = RunFolder(Path(out), checkpoint_every) if out is not None else None
    with store.locked() if store is not None else contextlib.nullcontext():
        saved = None
        if store is not None and not resume:
            store.refuse_used()
        if store is not None and resume and checkpoint.checkpoints(store.path / "checkpoint"):
            saved = checkpoint.load(store.path / "checkpoint", partial(check_rows, store.path))
            plan = Plan(**saved[1]["fingerprint"]["plan"]) if chunk is None and workers is None else plan
        if store is not None and saved is None:
            store.forget_rows()  # of a run that was killed before its first checkpoint
        data = {name: task.place(split) for name, split in splits(federation).items()}
        engine = LocalEngine(task, data["train"], keys, work, seed, plan)
        forge = None if attack is None else Forging(attack, keys, seed)
        added = robust is None and adds_up(algorithm, cohort * task.p)
        place = store.path if store else None
        rows = make_rows(algorithm, task, federation.n, cohort, place, saved and saved[0], added)
        loop = Loop(
            task, data["train"], federation.names, algorithm, schedule, engine, rows, seed, lr_decay, lr_decay_every,
            forge, robust,
        )  # fmt: skip
        if start is not None:
            _set_out(loop, start)
        first = loop.t
        settings: dict[str, Any] = {
            "rounds": first + rounds,
            "fraction": fraction,
            "schedule": None if isinstance(schedule, Uniform) else _in_short(repr(schedule)),
            "local-epochs": None if steps is not None else local_epochs,
            "local-steps": recorded(steps),
            "batch-size": batch_size if batch_size is not None else "full",
            "augment": augment if augment is None or isinstance(augment, str) else "function",
            "seed": seed,
            "metrics": [m.name for m in task.scores] if metrics is not None else None,
            "loss": loss if isinstance(loss, str) else getattr(loss, "__name__", "callable"),
            "weight-decay": weight_decay,
            "lr-decay": lr_decay,
            "lr-decay-every": lr_decay_every,
            "attack": summary(attack),
            "robust": summary(robust),
            "dtype": str(task.dtype).removeprefix("torch."),
            "evaluate-every": evaluate_every,
            "start": None if start is None else {"algorithm": start.loop.algorithm.name, "rounds": start.loop.t},
            "algorithm": {"name": algorithm.name} | {_kebab(k): v for k, v in dataclasses.asdict(algorithm).items()},
            "model": {"name": type(model).__name__, "parameters": task.p},
            "data": {"clients": federation.n, "digest": digest(federation)},
            "plan": dataclasses.asdict(plan),
            "versions": versions(),
        }
        for key, value in (describe or {}).items():
            known = settings.get(key)
            settings[key] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
        run = Run(loop, federation, settings, folder=store.path if store else None)
        if saved is not None and store is not None:
            _continue(run, store, *saved)
        if store is not None:
            store.begin(run, fresh=saved is None)
            if run.plan:
                store.log(run.plan)
            if defence:
                store.log(defence)
        return _train(
            run, first, first + rounds, data, evaluate_every, store, callbacks or watchers(), engine, attackers
        )


def _in_short(text: str, most: int = 1000) -> str:
    """A text that says in one line what it is, and by its digest whether it is the same."""
    if len(text) <= most:
        return text
    return f"{text[:100]}... (blake2b {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"


def _set_out(loop: Loop, start: Run) -> None:
    """Give a fresh loop the state of another run, or its clients' models."""
    before, task, everyone = start.loop, loop.task, torch.arange(loop.n, device=loop.task.device)
    if list(before.names) != list(loop.names) or before.task.layout.entries != task.layout.entries:
        raise ConfigError("start: the run is of other clients or another model")
    if type(before.algorithm) is type(loop.algorithm):
        shapes = [
            {k: None if k in loop.free else t.shape for k, t in x.server.items()} | dict.fromkeys(x.rows.names())
            for x in (before, loop)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"start: the state of the run is of another form than that of {loop.algorithm}")
        loop.t, loop.clock = before.t, before.clock
        loop.server = {k: v.to(task.device, copy=True) for k, v in before.server.items()}
        loop.flights = [dataclasses.replace(f) for f in before.flights]
        for at in everyone.split(64):
            rows = {k: before.rows.read(k, at.to(before.task.device)).to(task.device) for k in before.rows.names()}
            loop.rows.scatter(at, rows)
        return
    models = start.personal.to(task.device, task.dtype)
    server, rows = loop.algorithm.warm_start(task, models, loop.samples)
    loop.server = server | {KNOWN: loop.samples.clone()}
    loop.rows.scatter(everyone, rows)
    zero = np.zeros(loop.n)
    size = np.full(loop.n, models[0].numel() * models.element_size())
    loop.ledger.record(-1, np.arange(loop.n), zero, zero, size, zero, zero)


def _train(
    run: Run,
    first: int,
    rounds: int,
    data: dict[str, Split],
    every: int,
    store: RunFolder | None,
    callbacks: Sequence[Callback],
    engine: LocalEngine,
    attackers: np.ndarray,
) -> Run:
    loop = run.loop
    watched = {name: split for name, split in data.items() if name != "train"} or data

    def due(t: int) -> bool:
        return t == rounds or (every > 0 and t % every == 0)

    def evaluate(splits: dict[str, Split]) -> list[dict[str, Any]]:
        records = []
        for name, split in splits.items():
            run.final[name] = {k: np.where(attackers, np.nan, v) for k, v in loop.evaluate(split).items()}
            records.append(_record(run, name))
        if records:
            records[0] |= _grouping(run)
        return records

    def tell(records: list[dict[str, Any]]) -> bool:
        run.records += records
        if store is not None and records:
            store.record(run, records)
        said = [callback(Progress(loop.t, rounds, records, run)) for callback in callbacks]
        return any(isinstance(answer, bool | np.bool_) and answer for answer in said)

    threads, begun = torch.get_num_threads(), loop.t
    all_of_them = {**watched, **data}  # in this order, whatever was evaluated before
    torch.set_num_threads(1)
    try:
        with interruptible(terminable=store is not None) as interrupted:
            if loop.t == first and not run.records and every > 0:
                run.ended = tell(evaluate(watched))
            while loop.t < rounds and not run.ended and not interrupted.is_set():
                start = time.perf_counter()
                loop.step()
                run.seconds += time.perf_counter() - start
                run.ended = tell(evaluate(watched) if due(loop.t) else [])
                if store is not None and loop.t < rounds:
                    store.checkpoint(run)
        evaluate(all_of_them)
    except Diverged as e:
        run.status = "diverged"
        saved = ""
        if store is not None:
            store.checkpoint(run, force=True)
            evaluate(all_of_them)
            store.finish(run)
            found = checkpoint.checkpoints(store.path / "checkpoint")
            saved = f"; the last finite state is {found[-1]}" if found else ""
        raise Diverged(f"{e}{saved}") from e
    except RunError:  # what could not be written now cannot be written again
        raise
    except Exception as e:
        if store is not None and loop.whole and loop.t > begun:
            store.rescue(run, e)
        raise
    finally:
        engine.close()
        torch.set_num_threads(threads)
    run.status = "finished" if loop.t >= rounds or run.ended else "interrupted"
    if store is not None:
        store.finish(run)
    return run


def _record(run: Run, split: str) -> dict[str, Any]:
    """One line of the history: the mean over clients of every metric, its spread, and the cost so far.

    pooled: the leading metric over all samples, whoever has them, where it is a mean over samples
    """
    metrics, metric = run.final[split], run.metric
    values = np.where(np.isfinite(metrics[metric.name]), metrics[metric.name], np.nan)
    down, up = run.loop.ledger.totals()
    known = values[~np.isnan(values)] if not np.isnan(values).all() else np.array([np.nan])
    seen = np.where(np.isnan(values), 0, splits(run.federation)[split].counts)
    pooled = float(np.nansum(seen * values) / seen.sum()) if seen.any() else float("nan")
    worst = known[metric.merit(known).argmin()]
    return {
        "round": run.loop.t,
        "split": split,
        **{name: mean_of(v) for name, v in metrics.items()},
        "std": float(known.std()),
        "worst": float(worst),
        **({"pooled": pooled} if metric.pooled else {}),
        "down_bytes": down,
        "up_bytes": up,
        "seconds": run.seconds,
        **({"virtual_time": run.loop.clock} if run.loop.clock else {}),
    }


def _grouping(run: Run) -> dict[str, Any]:
    """Number of clusters that the method sees now and, where it has changed, the label of every client."""
    found = run.loop.algorithm.report(run.loop.server).get("clusters")
    if found is None:
        return {}
    before = next((r["assigned"] for r in reversed(run.records) if "assigned" in r), None)
    labels = np.asarray(found).tolist()
    return {"clusters": len(set(labels))} | ({"assigned": labels} if labels != before else {})


def _continue(run: Run, store: RunFolder, tensors: dict[str, Any], meta: dict[str, Any], warnings: list[str]) -> None:
    """Restore a checkpoint into a fresh run, after checking that it belongs to the same experiment."""
    for line in warnings:
        store.log(line)
    now = fingerprint(run)
    for key, then in meta["fingerprint"].items():
        if now.get(key) != then:
            raise RunError(f"cannot resume {store.path}: {_changed(key, now.get(key), then)}")
    run.loop.restore(tensors, meta)
    if run.loop.t > run.settings["rounds"]:
        done, asked = run.loop.t, run.settings["rounds"]
        raise RunError(f"cannot resume {store.path}: it has {done} rounds already, more than rounds = {asked}")
    checkpoint.forget(store.path / "checkpoint", len(warnings))
    run.records, run.seconds, run.ended = meta["records"], meta["seconds"], meta.get("ended", False)
    before = store.versions_before(meta)
    if run.ended or run.loop.t >= run.settings["rounds"]:
        run.settings["versions"] = before or run.settings["versions"]
        return
    run.settings["versions"] = _versions_since(before, run.settings["versions"], run.loop.t)
    for key in [k for k in run.settings["versions"] if before and k not in before]:
        name = key.partition("-from-round-")[0]
        was = [v for k, v in before.items() if k.partition("-from-round-")[0] == name][-1:]
        store.log(f"{name} {run.settings['versions'][key]} from round {run.loop.t}, before {', '.join(was) or 'none'}")


def _changed(key: str, now: Any, then: Any) -> str:
    """What differs between a run and its continuation."""
    if key == "data":
        a, b = ({k: v for k, _, v in (part.partition(":") for part in str(d).split())} for d in (then, now))
        if "train" not in a:
            return "it was begun by an older version of polyfed, which looked at other parts of the data"
        return f"the data have changed since it began ({', '.join(k for k in a | b if a.get(k) != b.get(k))})"
    if key == "fixed":
        return "the model's frozen parameters or buffers are not those it began with"
    return f"{key} is {now!r} here and was {then!r} in the checkpoint"


def _versions_since(before: dict[str, str], now: dict[str, str], t: int) -> dict[str, str]:
    """The versions that a run began with, and those it went on with: torch, torch-from-round-40."""
    if not before:
        return now
    last = {k.partition("-from-round-")[0]: v for k, v in before.items()}
    return before | {f"{k}-from-round-{t}": v for k, v in now.items() if last.get(k) != v}


def digest(federation: Federation) -> str:
    """A short fingerprint of every part of the data, to tell whether a run is resumed on what it began with."""
    about = federation.describe()
    found = {
        "clients": _short([about["classes"], *federation.names]),
        "preparation": _short([about.get(k) for k in ("dataset", "partition", "test", "options", "preparation")]),
    }
    for name, split in splits(federation).items():
        whole = hashlib.blake2b(split.offsets.tobytes(), digest_size=8)
        for t in (split.x, split.y):
            whole.update(f"{t.dtype} {list(t.shape)}".encode())
            whole.update(np.ascontiguousarray(t.cpu().numpy()).reshape(-1).view(np.uint8).data)
        found[name] = whole.hexdigest()
    return " ".join(f"{part}:{value}" for part, value in found.items())


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def _kebab(name: str) -> str:
    return name.replace("_", "-")
