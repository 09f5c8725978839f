"""serve: the server's side of a run whose clients are at sites of their own. It holds no sample and no private row.

It reads an experiment file, asks the sites what their files are like, settles what must be the same for all, and trains
as any run does. A run that was stopped goes on with `resume`: sites are asked to join again.
"""

import dataclasses
import hashlib
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_list, is_mapping, table_in
from polyfed.core.algorithm import Algorithm
from polyfed.core.engine import Engine
from polyfed.core.messages import Form, State
from polyfed.core.schedule import Arrivals, Asynchronous, Delays, Timed
from polyfed.data.federation import Outline
from polyfed.data.moments import deviation, ordered
from polyfed.data.preparation import Preparation
from polyfed.data.schema import Settled, settle, with_statistics
from polyfed.models import default
from polyfed.runs.build import make_model
from polyfed.runs.config import Experiment, Method, model_table, resolve
from polyfed.runs.folder import RunFolder
from polyfed.runs.rehearsal import forms
from polyfed.runs.result import Result
from polyfed.runs.trainer import Trainer, prepare
from polyfed.runs.training import Training
from polyfed.runs.watching import Callback
from polyfed.runs.weights import weights_of
from polyfed.sites.engine import LARGE, Asking, RemoteEngine, Transport, is_count
from polyfed.sites.member import FIRST, WAYS, digest, versions
from polyfed.sites.message import Message, fits

CARD = "sites.json"  # in the run's folder: what sites know the run by
SLACK = 1 << 16  # bytes that a wrong reply may have more, so that the tensor at fault is named
ROWS = 1 << 27  # of one site, from which its number of them is not believed: the server makes a label for each
PAUSE = 0.2  # seconds between looks at who is connected
HERE = (  # settings that are the server's alone
    "rounds", "seeds", "engine", "address", "workers", "chunk", "schedule", "fraction", "robust", "attack",
    "class-weights", "local-steps", "portable", "evaluate-every", "checkpoint-every",
)  # fmt: skip


def serve(
    experiment: Path,
    transport: Transport,
    out: Path,
    *,
    sites: Sequence[str] | None = None,
    resume: bool = False,
    wait: float | None = None,
    quorum: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train with sites that are reached through a transport.

    Parameters
    ----------
    experiment : Path
        Experiment file, as `polyfed run` takes it; its [data] says how files are divided, and not where they are.
    transport : Transport
        Carries messages; whoever made it closes it.
    out : Path
        Run folder, new or empty.
    sites : sequence of str or None
        Who takes part; all of them must join. None: those that are connected when the first one is.
    resume : bool
        Continue the run in `out`.
    wait : float or None
        Seconds that replies are waited for, see `quorum`. None: for ever.
    quorum : int or None
        How many replies are enough for a round to go on once `wait` is over. None: all that were asked for.
    say : callable
        Takes lines for the operator.
    callbacks : sequence of callable
        As for `fit`.

    Returns
    -------
    Result
        What the server knows: its state, metrics as far as sites say them, and the ledger.

    Raises
    ------
    ConfigError, DataError, RunError
        In one line, before the first round where possible; it names the site at fault.
    """
    e = resolve(experiment)
    method, algorithm = _only(e)
    store = RunFolder(Path(out))
    if not resume:
        store.refuse_used()
    asking = Asking(transport, wait, say)
    if sites is not None and len(set(sites)) < len(sites):
        twice = next(name for k, name in enumerate(sites) if name in sites[:k])
        raise ConfigError(f"sites: found {twice!r} twice, expected each once")
    transport.most = FIRST
    names = _connected(transport, sites, say)
    head = _experiment(e, method, names)
    said = _all(asking, {name: Message({"do": "join"} | head) for name in names}, "joining", _wrong_join)
    mine = torch.backends.cpu.get_cpu_capability()
    for name, m in said.items():
        if m.head.get("cpu") != mine:
            say(
                f"{name} computes with {str(m.head.get('cpu'))[:20]}, the server with {mine}: last digits may differ "
                "between them"
            )
    schemas = {name: m.head["schema"] for name, m in said.items()}
    settled = settle(schemas, e.columns)
    counts = {name: m.head["counts"] for name, m in said.items()}
    billed = None
    if "pooled" in head["needs"] and settled.preparation is not None:
        settled, billed = _pooled(asking, head, settled.preparation, settled, schemas, counts)
    run_id = _card(store)
    begin = {"do": "begin", "run": run_id, "settled": settled.dump(), "n": len(names), "joined": head}
    federation = _outline(e, names, counts, settled)
    if "labels" in head["needs"]:
        asked = {name: Message(begin | {"labels": True}) for name in names}
        wrong = partial(_wrong_labels, settled.classes or 0, counts)
        labels = _all(asking, asked, "numbers of rows of each class", wrong)
        federation = dataclasses.replace(federation, labels=[labels[name].head["labels"] for name in names])
    e, settings = _settings(e, federation)
    weights = weights_of(settings.class_weights, settings.loss, federation.describe())
    model = make_model(e.model, settled.inputs, settled.outputs, settings.seed)
    trainer = prepare(model, federation, algorithm, settings, describe=_describe(e, method, names))
    begin |= {"weights": weights, "model": model_table(e.model), "algorithm": head["algorithm"]}
    begin |= {"training": head["training"] | {"loss": settings.loss}}
    forms_ = forms(algorithm, trainer.task, settled.inputs, settled.classes, settled.outputs)
    transport.most = 2 * forms_.largest + SLACK
    start = digest(trainer.task.w0)

    def same(name: str, reply: Message) -> str | None:
        found = reply.head.get("w0", "")
        return None if found == start else found and f"{name}: starts from another model than the server"

    steps = {name: _steps(settings, k, name) for k, name in enumerate(names)}
    _all(asking, {name: Message(begin | {"steps": steps[name]}) for name in names}, "beginning", same)
    say(f"{len(names)} sites have joined: {', '.join(names)}")

    def expected(t: int, phase: int) -> Mapping[str, Any]:
        return forms_.of(algorithm.needs.phases(t), phase)

    def engine(t: Trainer) -> Engine:
        return RemoteEngine(
            names, federation.train.counts, transport, t.work, settings.seed, settings.step_sizes, run=run_id,
            expected=expected, accepts=partial(algorithm.accepts, t.task),
            metrics=["loss", *(m.name for m in t.task.scores)], seconds=wait, quorum=quorum,
            say=partial(_told, store, say),
        )  # fmt: skip

    trainer = dataclasses.replace(trainer, elsewhere=engine, billed=billed)
    run = trainer.run(out, resume, callbacks)
    at_sites = run.trained.engine
    if run.status == "finished" and isinstance(at_sites, RemoteEngine):
        for name, why in at_sites.end(run.trained.deployment()).items():
            say(f"{name}: {why} at the end; its model is not made; go on with --resume")
    return run


def _only(e: Experiment) -> tuple[Method, Algorithm]:
    """The one method of an experiment, which sites can run, and its hyper-parameters."""
    if not e.single:
        raise ConfigError(f"{e.name}: found {len(e.methods)} methods and {len(e.seeds)} seeds, expected one of each")
    method, s = e.methods[0], e.settings
    if s.portable:
        raise ConfigError("portable: not with sites, whose processors are their own; leave it out")
    if not isinstance(method.algorithm, Algorithm):
        raise ConfigError(f"algorithm.name: {method.algorithm.name} is a yardstick, which needs no sites")
    if s.attack is not None:
        raise ConfigError("attack: not with sites, who are themselves; leave it out")
    for what, found in (("algorithm.file", method.file), ("model.file", e.model.file)):
        if found is not None:
            raise ConfigError(f"{what}: not with sites, which run what they have installed; make a package of it")
    return method, method.algorithm


def _connected(transport: Transport, sites: Sequence[str] | None, say: Callable[[str], None]) -> list[str]:
    """Who takes part, in the order that their files would have in a folder."""
    told = None
    while True:
        there = [*transport.sites()]
        missing = [name for name in sites or () if name not in there]
        if not missing and there:
            return sorted(sites or there, key=lambda name: f"{name}.csv")
        if missing != told:
            say(f"waiting for {', '.join(missing) or 'sites'}")
            told = missing
        time.sleep(PAUSE)


def _experiment(e: Experiment, method: Method, names: Sequence[str]) -> dict[str, Any]:
    """What sites are told when they are asked to join."""
    s, d = e.settings, e.data
    training = {k: v for k, v in s.dump().items() if k not in HERE} | {"seed": e.seeds[0]}
    validation = 0.0 if d.validation_fraction is None else d.validation_fraction
    needs = ["labels"] if s.class_weights == "balanced" else []
    needs += ["pooled"] if e.columns.standardise in (None, "pooled") else []
    return {
        "versions": versions(e.packages()),
        "experiment": e.name,
        "training": training,
        "algorithm": method.table(),
        "model": model_table(e.model),  # without a name where it is the default for what will be settled
        "columns": e.columns.given,
        "cut": {"seed": e.seeds[0] if d.seed is None else d.seed, "test": d.test_fraction, "validation": validation},
        "needs": needs,
        "sites": len(names),
    }


def _all(
    asking: Asking, messages: Mapping[str, Message], what: str, wrong: Callable[[str, Message], str | None]
) -> dict[str, Message]:
    """The answers of all. Raises RunError, with every site that has refused."""
    asking.ask(messages)
    found, _ = asking.answers(messages, what, wrong)
    return {name: found[name] for name in messages}


def _wrong_join(name: str, reply: Message) -> str | None:
    head = reply.head
    if "schema" not in head:
        return ""
    if head.get("site") != name:
        return f"{name}: calls itself {head.get('site')!r}"
    for package, version in versions().items():
        if head["versions"].get(package) != version:
            return f"{name}: has {package} {head['versions'].get(package)}, the server has {version}; install the same"
    counts: Any = head["counts"]
    if not counts.keys() >= {"train", "test"} or not all(is_count(n, ROWS) for n in counts.values()):
        return f"{name}: its numbers of rows are damaged, or {ROWS:,} and more"
    if not _sound(head["schema"]):
        return f"{name}: its schema holds a number that is none of a file"
    return None if counts["train"] else f"{name}: has no training rows"


def _sound(said: Any) -> bool:
    """Whether all numbers in what a site says can be reckoned with."""
    if is_mapping(said):
        return all(_sound(value) for value in said.values())
    if is_list(said):
        return all(_sound(value) for value in said)
    return math.isfinite(said) if isinstance(said, float) else not isinstance(said, int) or abs(said) < LARGE


def _wrong_labels(classes: int, counts: Mapping[str, Mapping[str, int]], name: str, reply: Message) -> str | None:
    if "labels" not in reply.head:
        return ""
    found: Any = reply.head["labels"]
    right = is_list(found) and len(found) == classes and all(is_count(k, ROWS) for k in found)
    return (
        None if right and sum(found) == counts[name]["train"] else f"{name}: its numbers of rows by class are damaged"
    )


def _pooled(
    asking: Asking,
    joined: Mapping[str, Any],
    blank: Preparation,
    settled: Settled,
    schemas: Mapping[str, Any],
    counts: Mapping[str, Mapping[str, int]],
) -> tuple[Settled, np.ndarray]:
    """What is settled with everybody's medians, means and deviations; and [3, n] messages, bytes down and bytes up.

    The sums are those of `moments` and `median` over the sites' rows in their order, to the bit.
    """
    names, bill = [*schemas], np.zeros((3, len(schemas)))
    numbers = [i.name for i in blank.inputs if i.values is None]
    gaps = [name for name in numbers if any(int(s["columns"][name]["gaps"]) for s in schemas.values())]
    inputs = tuple(dataclasses.replace(i, gap=i.gap or i.name in gaps) for i in blank.inputs)  # also those of test rows
    about = dataclasses.replace(settled, preparation=blank.with_inputs(inputs)).dump()
    columns = len(numbers) + (blank.labels is None)

    def ask(what: str, tensors: State, shapes: Mapping[str, tuple[int, ...]], **more: Any) -> list[State]:
        message = Message({"do": "pooled", "what": what, "joined": joined, "settled": about} | more, tensors)
        dtype = torch.int64 if what == "counts" else torch.float64
        expected = {key: Form(dtype, shape, math.prod(shape)) for key, shape in shapes.items()}

        def wrong(name: str, reply: Message) -> str | None:
            fits(reply, expected, name)
            least = -math.inf if what == "sums" else 0
            most = counts[name]["train"] if what == "counts" else math.inf
            right = all(bool(((t >= least) & (t <= most)).all()) for t in reply.tensors.values())
            return None if right else f"{name}: its sums are damaged"

        found = _all(asking, dict.fromkeys(names, message), "pooled sums", wrong)
        bill.__iadd__(np.array([[1, message.bytes, reply.bytes] for reply in found.values()]).T)
        return [found[name].tensors for name in names]

    fill, n = np.zeros(len(numbers)), sum(of["train"] for of in counts.values())
    if gaps:

        def count(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            shapes = {"n": (len(gaps),), "counts": at.shape}
            found = ask("counts", {"at": torch.as_tensor(at)}, shapes, columns=gaps)
            there, most = (torch.stack([s[key] for s in found]).sum(0).numpy() for key in ("n", "counts"))
            return there, most

        fill[[numbers.index(name) for name in gaps]] = _medians(count, len(gaps))
    sums = [s["sums"].numpy() for s in ask("sums", {"fill": torch.as_tensor(fill)}, {"sums": (columns,)})]
    mean = sum(sums, start=np.zeros(len(sums[0]))) / n
    given = {"fill": torch.as_tensor(fill), "mean": torch.as_tensor(mean)}
    squares = [s["squares"].numpy() for s in ask("squares", given, {"squares": (columns,)})]
    scale = deviation(mean, sum(squares, start=np.zeros(len(mean))) / n)
    without = [k for k, name in enumerate(numbers) if name not in gaps]
    fill[without] = mean[without]  # new rows may have gaps where no file has one
    return with_statistics(settled, fill, mean, scale), bill


def _medians(count: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], columns: int) -> np.ndarray:
    """The medians of columns, as `moments.median` finds them, with `WAYS` thresholds at a time.

    count: thresholds [k, columns] -> how many values there are [columns], and how many are at most each [k, columns]
    """
    low = [[-(1 << 63)] * columns for _ in range(2)]  # for each of the two middle ranks; Python's integers do not wrap
    high = [[(1 << 63) - 1] * columns for _ in range(2)]
    there = np.zeros(columns, dtype=np.int64)
    while any(a < b for lows, highs in zip(low, high, strict=True) for a, b in zip(lows, highs, strict=True)):
        at = [
            [a + (b - a) * j // (WAYS + 1) for a, b in zip(low[r], high[r], strict=True)]
            for r in range(2)
            for j in range(WAYS)
        ]
        there, found = count(np.array(at, dtype=np.int64))
        for r in range(2):
            for c in range(columns):
                rank = (int(there[c]) - 1) // 2 if r == 0 else int(there[c]) // 2
                for j in range(WAYS):
                    k = r * WAYS + j
                    if found[k, c] > rank:
                        high[r][c] = min(high[r][c], at[k][c])
                        break
                    low[r][c] = max(low[r][c], min(at[k][c] + 1, high[r][c]))
    middle = [ordered(np.array(lows, dtype=np.int64).view(np.float64)).view(np.float64) for lows in low]
    return np.where(there > 0, middle[0] + (middle[1] - middle[0]) / 2, 0.0)


def _card(store: RunFolder) -> str:
    """What sites know the run of a folder by; a new word for a new run."""
    path = store.path / CARD
    try:
        if path.is_file():
            return str(table_in(path.read_bytes())["run"])
        store.path.mkdir(parents=True, exist_ok=True)
        found = uuid.uuid4().hex[:12]
        store.write(CARD, json.dumps({"run": found}))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunError(f"{path}: cannot be read or written ({reason(e)})") from None
    return found


def _outline(e: Experiment, names: Sequence[str], counts: Mapping[str, Mapping[str, int]], settled: Settled) -> Outline:
    """The sites as a federation without samples."""
    parts = [key for key in ("train", "validation", "test") if any(key in of for of in counts.values())]
    sizes = {key: [int(counts[name].get(key, 0)) for name in names] for key in parts}
    prepared = {} if settled.preparation is None else {
        "preparation": settled.preparation.dump(), "inputs": settled.preparation.names
    }  # fmt: skip
    meta = {
        "dataset": e.name,
        "partition": "natural",
        "test": f"own:{e.data.test_fraction:g}",
        "seed": e.seeds[0] if e.data.seed is None else e.data.seed,
        "notes": [*settled.notes, "every client's samples are at its own site"],
        **prepared,
    }
    about = {"clients": [settled.classes, *names], "preparation": settled.dump(), "train": sizes}
    mark = " ".join(f"{key}:{_short(value)}" for key, value in about.items())
    return Outline.of(
        names, sizes, settled.inputs, settled.outputs, settled.classes, settled.integers, meta=meta, digest=mark
    )


def _settings(e: Experiment, federation: Outline) -> tuple[Experiment, Training]:
    """The experiment with nothing left open, and how its run trains."""
    model = e.model if e.model.name is not None else dataclasses.replace(e.model, name=default(federation))
    loss = e.settings.loss or ("mse" if federation.classes is None else "cross-entropy")
    schedule = e.settings.schedule_for(federation.names)
    if isinstance(schedule, Timed) or (isinstance(schedule, Asynchronous) and schedule.delays != Delays()):
        raise ConfigError("schedule.delays: found some, expected none: real sites take the time they take")
    settings = dataclasses.replace(
        e.settings, loss=loss, seed=e.seeds[0], seeds=None, engine="local", address=None,
        schedule=Arrivals(schedule.concurrency) if isinstance(schedule, Asynchronous) else e.settings.schedule,
    )  # fmt: skip
    return dataclasses.replace(e, model=model, settings=settings), settings


def _describe(e: Experiment, method: Method, names: Sequence[str]) -> dict[str, Any]:
    """What config.toml says beyond what `prepare` knows."""
    data = {key: value for key, value in e.data.dump().items() if key not in ("name", "dir", "partition", "clients")}
    tables = {"data": data | {"sites": [*names]}, "model": model_table(e.model), "algorithm": method.table()}
    tables |= {"columns": found} if (found := e.columns.dump()) else {}
    return tables | ({"schedule": {**asked}} if is_mapping(asked := e.settings.schedule) else {})


def _steps(settings: Training, k: int, name: str) -> int | str | None:
    """The local steps of one site, which hears nothing of others'."""
    given: Any = settings.local_steps
    return given[name] if is_mapping(given) else int(given[k]) if is_list(given) else given


def _told(store: RunFolder, say: Callable[[str], None], line: str) -> None:
    store.log(line)
    say(line)


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
