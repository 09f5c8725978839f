"""serve: the server's side of a run whose clients are at sites of their own. It holds no sample and no private row.

It reads an experiment file, asks the sites what their files are like, settles what must be the same for all, and trains
as any run does. A run that was stopped goes on with `resume`: sites are asked to join again.
"""

import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.base import checkpoint
from polyfed.base.checkpoint import reason
from polyfed.base.columns import for_site
from polyfed.base.errors import ConfigError, DataError, PolyfedError, RunError, printable
from polyfed.base.part import CHECK, Audit
from polyfed.base.settings import is_list, is_mapping, table_in
from polyfed.core.algorithm import Algorithm
from polyfed.core.engine import Engine
from polyfed.core.messages import Form
from polyfed.core.schedule import Arrivals, Asynchronous, Delays, Timed, Uniform
from polyfed.core.uplinks import Wanted
from polyfed.data.federation import Outline
from polyfed.data.preparation import Preparation, Settled
from polyfed.data.prepare import uneven
from polyfed.data.said import Csv, Npz
from polyfed.data.schema import settle
from polyfed.data.tables import check_sites, repairs_said
from polyfed.metrics.scores import LOSS
from polyfed.models import default
from polyfed.runs.build import backed, make_model
from polyfed.runs.config import Experiment, Method, model_table, resolve
from polyfed.runs.folder import RunFolder
from polyfed.runs.rehearsal import Forms, forms
from polyfed.runs.result import Result
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trainer import Trainer, prepare
from polyfed.runs.training import Settings, Training
from polyfed.runs.watching import Callback
from polyfed.runs.weights import weights_of
from polyfed_audit.coding import facts
from polyfed_audit.findings import flags
from polyfed_sites import wire as m
from polyfed_sites.agreed import digest, frozen, unlike, versions
from polyfed_sites.asking import Asking, Transport
from polyfed_sites.engine import RemoteEngine
from polyfed_sites.pooled import Pooling
from polyfed_sites.sums import OPENED, Opener, fewest, refuse_rows
from polyfed_sites.wire import FIRST, Message

CARD = "sites.json"  # in the run's folder: what sites know the run by
SLACK = 1 << 16  # bytes that a wrong reply may have more, so that the tensor at fault is named
FAREWELL = 5.0  # seconds for sites to hear that a run is refused
FROZEN = 32  # bytes beside the name of a frozen tensor in a reply
HERE = (  # settings that are the server's alone
    "rounds", "seeds", "engine", "workers", "chunk", "schedule", "fraction", "robust", "attack",
    "class-weights", "local-steps", "portable", "evaluate-every", "checkpoint-every", "track",
    "stop",
)  # fmt: skip


def serve(
    experiment: Path,
    transport: Transport,
    out: Path,
    *,
    sites: Sequence[str] | int | None = None,  # who takes part, or how many; None: whoever is there with the first
    resume: bool = False,
    wait: float | None = None,  # seconds for replies; None: for ever
    quorum: int | None = None,  # replies with which a round goes on once `wait` is over; None: all
    most_share: float = 1.0,  # of all training rows, that one site may have
    say: Callable[[str], None] = lambda _: None,
    callbacks: Sequence[Callback] = (),
    trained: Callable[[Result], None] = lambda _: None,  # called with the whole run, before sites hear that it is over
) -> Result:
    """Train with sites that are reached through a transport, which whoever made it closes.

    Returns what the server knows: its state, metrics as far as sites say them, and the ledger. Raises ConfigError,
    DataError or RunError, before the first round where possible, in a line that names the site at fault.
    """
    if isinstance(sites, Sequence) and len(set(sites)) < len(sites):
        twice = next(name for k, name in enumerate(sites) if name in sites[:k])
        raise ConfigError(f"sites: found {twice!r} twice, expected each once")
    server = Server(resolve(experiment), transport, RunFolder(Path(out)), wait, quorum, say)
    if not resume:
        server.store.refuse_used()
    with server.refusing(resume):
        server.join(sites, most_share)
        server.audit()
        server.settle()
        trainer = server.begin()
    run = trainer.run(out, resume, callbacks)
    at_sites = run.trained.engine
    trained(run)
    if run.status == "finished" and isinstance(at_sites, RemoteEngine):
        missing = at_sites.end(run.trained.deployment())
        for name, why in missing.items():
            say(f"{name}: {why} at the end; its model is not made; go on with --resume")
        if not missing:
            server.store.write(CARD, json.dumps({"run": server.run, "sites": server.names, "over": True}))
    return run


def is_over(folder: Path) -> bool:
    """Whether a folder's run is over, also for its sites."""
    try:
        return table_in((folder / CARD).read_bytes()).get("over") is True
    except (OSError, ValueError):
        return False


class Server:
    """One run's server, step by step, as `serve` takes the steps."""

    def __init__(
        self,
        experiment: Experiment,
        transport: Transport,
        store: RunFolder,
        wait: float | None,
        quorum: int | None,
        say: Callable[[str], None],
    ):
        self.experiment = dataclasses.replace(experiment, model=backed(experiment.model))
        self.method, self.algorithm = _only(self.experiment)
        if quorum is not None and (why := self.algorithm.needs.everyone):
            raise ConfigError(f"quorum: found {quorum}, expected none with {self.algorithm.name}: {why}")
        self.transport, self.store, self.wait, self.quorum, self.say = transport, store, wait, quorum, say
        self.asking = Asking(transport, wait, say)
        privacy = self.experiment.settings.privacy
        self.secure = None if privacy is None or privacy.sums == "open" else privacy  # the server then sees sums alone
        self.billed: np.ndarray | None = None
        self.audited = Audit()
        self.names: list[str] = []
        self.classes: list[int] | None = None  # training rows of each class, where no site's own are known

    @contextmanager
    def refusing(self, resume: bool) -> Generator[None]:
        """Sites that have been asked hear that a new run has ended where it is refused inside."""
        try:
            yield
        except PolyfedError:
            if self.names and not resume:
                self.asking.ask({name: Message(m.Over()) for name in self.names})
                self.transport.pull(self.names, seconds=FAREWELL)
            raise

    def join(self, sites: Sequence[str] | int | None, most_share: float = 1.0) -> None:
        """Wait for the sites, and ask them what their files are like. most_share: as for `serve`"""
        self.transport.most = FIRST
        # in the order that their files would have in a folder
        self.names = sorted(self.asking.connected(sites), key=lambda name: f"{name}.csv")
        self.run = self.transport.run = _card(self.store, self.experiment.name, self.names)
        check_sites(self.experiment.columns, self.names)
        self.heads = _joins(self.experiment, self.method, self.names, self._register())
        messages = {name: Message(head) for name, head in self.heads.items()}
        replies = self.asking.all(messages, "joining", m.Joined, _wrong_join)
        self.said = {name: reply.head for name, reply in replies.items()}
        self.peers = {name: about.peer for name, about in self.said.items() if about.peer is not None}
        for name, about in self.said.items():
            if about.removed:
                self.say(f"{name}: drop-rows leaves out {about.removed:,} rows")
        rows = {name: about.counts.train for name, about in self.said.items()}
        for name, n in rows.items():
            if n > most_share * sum(rows.values()):
                share = f"{n:,} training rows, {n / sum(rows.values()):.1%} of all"
                raise DataError(f"{name}: says that it has {share}, expected at most {most_share:.1%}")
        mine = torch.backends.cpu.get_cpu_capability()
        for name, about in self.said.items():
            if about.cpu != mine:
                there = f"{name} computes with {about.cpu[:20]}, the server with {mine}"
                self.say(f"{there}: last digits may differ between them")

    def audit(self) -> None:
        """Hold sites against each other that answer an audit, where two or more do."""
        messages = {n: Message(m.Audit(joined=self.heads[n])) for n, about in self.said.items() if about.audit}
        if len(messages) < 2 or self.secure is not None:
            return
        replies = self.asking.all(messages, "the audit", m.Audited, self._wrong_audit)
        columns = dict.fromkeys(name for reply in replies.values() for name in reply.head.columns)
        parts = {c: {s: r.head.columns[c] for s, r in replies.items() if c in r.head.columns} for c in columns}
        outcome = {about.file.target for about in self.said.values() if isinstance(about.file, Csv)}
        known = [fact for name in outcome & parts.keys() for fact in facts(name, parts[name])]
        self.audited = Audit(parts, flags(parts, self.experiment.columns, [*outcome]), known)
        for line in self.audited.lines:
            self.say(printable(line))

    def _wrong_audit(self, name: str, reply: Message[m.Audited]) -> str:
        rows = sum(self.said[name].counts.model_dump(exclude_none=True).values())
        right = all(p.rows == rows and p.gaps <= rows for p in reply.head.columns.values())
        return "" if right else "its audit is damaged"

    def _register(self) -> Mapping[str, str]:
        """The sites' public keys, where sums are secure."""
        if self.secure is None:
            return {}
        cohort = _cohort(self.experiment.settings, self.names)
        if cohort < (least := fewest(self.secure, cohort)):
            raise ConfigError(f"privacy.threshold: found {least}, and {cohort} sites take part in a round")
        keys = self.transport.register()
        return {name: keys[name] for name in self.names}

    def _opener(self) -> Opener | None:
        if self.secure is None:
            return None
        return Opener(self.asking, self.heads[self.names[0]], self.secure, self.store.path / OPENED)

    def settle(self) -> None:
        """What must be the same for all."""
        needs, columns = self.heads[self.names[0]].needs, self.experiment.columns
        if columns.missing is None and "pooled" in needs and isinstance(self.said[self.names[0]].file, Csv):
            columns = dataclasses.replace(columns, missing="mean")  # medians take counts of single values
            self.experiment = dataclasses.replace(self.experiment, columns=columns)
        self.settled = settle({name: about.file for name, about in self.said.items()}, columns)
        opener = self._opener()
        if "pooled" in needs and (blank := self.settled.preparation) is not None:
            self._check_medians(blank)
            pooling = Pooling(self.asking, self.heads, self.settled, blank, self.said, self.peers, opener)
            self.settled, self.billed = pooling.statistics()
        self.federation = _outline(self.experiment, self.said, self.settled, self.audited)
        for note in (n for n in self.federation.notes[: -len(self.audited.lines) - 1] if n.startswith(CHECK)):
            self.say(printable(note))
        if "labels" in needs:
            messages = {
                name: Message(m.Labels(joined=head, peers=self.peers, settled=self.settled))
                for name, head in self.heads.items()
            }
            what = "numbers of rows of each class"
            if opener is not None:
                self.classes = [int(n) for n in opener.ask(messages, self.settled.classes or 0, what)]
                return
            replies = self.asking.all(messages, what, m.Labelled, self._wrong_labels)
            labels = [reply.head.rows for reply in replies.values()]
            self.federation = dataclasses.replace(self.federation, labels=labels)

    def _check_medians(self, blank: Preparation) -> None:
        """Raise ConfigError where medians are asked for of columns of which a policy lets no counts out."""
        keep = [name for name, about in self.said.items() if about.pooled != "medians"]
        files = [about.file.used for about in self.said.values() if isinstance(about.file, Csv)]
        gaps = [i.name for i in blank.inputs if i.values is None and any(f[i.name].some for f in files if i.name in f)]
        if gaps and keep and blank.missing == "median":
            why = (
                f"which takes counts of values of {', '.join(gaps)}, and the policies of {', '.join(keep)} let none out"
            )
            raise ConfigError(f'columns.missing: found "median", {why}; expected "mean", or pooled = "medians" in them')

    def _wrong_labels(self, name: str, reply: Message[m.Labelled]) -> str:
        rows, train = reply.head.rows, self.said[name].counts.train
        right = len(rows) == self.settled.classes and sum(rows) == train
        return "" if right else "its numbers of rows by class are damaged"

    def begin(self) -> Trainer:
        """Have all sites make their part of the settled experiment. Returns what trains with them."""
        e, settings = _settings(self.experiment, self.federation)
        s, run, loss = self.settled, self.run, settings.loss
        if self.classes is not None and all(self.classes):  # "balanced", from counts of all sites together
            balanced = [sum(self.classes) / (len(self.classes) * n) for n in self.classes]
            settings = dataclasses.replace(settings, class_weights=balanced)
        weights = weights_of(settings.class_weights, loss, self.federation.describe())
        model = make_model(e.model, s.inputs, s.outputs, settings.seed)
        about = _describe(e, self.method, self.names)
        trainer = prepare(model, self.federation, self.algorithm, settings, describe=about)
        sent = forms(self.algorithm, trainer.task, s.inputs, s.classes, s.outputs)
        start, fixed = digest(trainer.task.w0), frozen(trainer.task)
        self.transport.most = 2 * sent.largest + SLACK + sum(len(name) + FROZEN for name in fixed)
        messages = {
            name: Message(m.Begin(joined=join, peers=self.peers, settled=s, run=run, loss=str(loss), weights=weights))
            for name, join in self.heads.items()
        }

        def same(name: str, reply: Message[m.Begun]) -> str:
            if reply.head.w0 != start:
                return "starts from another model than the server"
            has = reply.head.frozen
            other = [key for key in sorted({*has, *fixed}) if has.get(key) != fixed.get(key)]
            return f"its frozen {other[0]} is not that of the server's model" if other else ""

        self.asking.all(messages, "beginning", m.Begun, same)
        each = ", ".join(f"{name} ({about.counts.train:,} rows)" for name, about in self.said.items())
        self.say(f"{len(self.names)} sites have joined: {each}")
        return dataclasses.replace(trainer, elsewhere=partial(self._engine, run, settings, sent), billed=self.billed)

    def _engine(self, run: str, settings: Training, sent: Forms, t: Trainer) -> Engine:
        def expected(round: int, phase: int) -> Mapping[str, Form]:
            return sent.of(self.algorithm.needs.phases(round), phase)

        def wanted(round: int, phase: int) -> Wanted:
            return t.sums.get((self.algorithm.needs.phases(round), phase), {})

        summed = t.door is not None or self.secure is not None
        return RemoteEngine(
            self.names, self.federation.train.counts, self.transport, t.work, settings.seed, settings.step_sizes,
            run=run, expected=expected, accepts=partial(self.algorithm.accepts, t.task),
            metrics=[LOSS, *t.task.scores], seconds=self.wait, quorum=self.quorum,
            say=self._note, log=self.store.log, sums=wanted if summed else None,
            opener=self._opener() if summed else None,
        )  # fmt: skip

    def _note(self, line: str) -> None:
        self.store.log(line)
        self.say(line)


def _only(e: Experiment) -> tuple[Method, Algorithm]:
    """The one method of an experiment, which sites can run, and its hyper-parameters."""
    if not e.single:
        raise ConfigError(f"{e.name}: found {len(e.methods)} methods and {len(e.seeds)} seeds, expected one of each")
    method, s = e.methods[0], e.settings
    if s.portable:
        raise ConfigError("portable: not with sites, whose processors are their own; leave it out")
    if not isinstance(method.algorithm, Algorithm):
        raise ConfigError(f"algorithm.name: {method.algorithm.name} is a yardstick, which needs no sites")
    if s.privacy is not None:
        refuse_rows(method.algorithm)
        if s.privacy.unit == "row" and s.privacy.epsilon is not None and s.privacy.per == "run":
            raise ConfigError("privacy.per: found run, expected experiment: at sites the budget is that of their data")
        if s.privacy.quantile is not None:
            raise ConfigError("privacy.quantile: not with sites, which keep the clip that they agree to; leave it out")
    if s.attack is not None:
        raise ConfigError("attack: not with sites, who are themselves; leave it out")
    for what, file in (("algorithm.file", method.file), ("model.file", e.model.file)):
        if file is not None:
            raise ConfigError(f"{what}: not with sites, which run what they have installed; make a package of it")
    return method, method.algorithm


def _joins(e: Experiment, method: Method, names: Sequence[str], register: Mapping[str, str]) -> dict[str, m.Join]:
    """What each site is told when it is asked to join."""
    s, d = e.settings, e.data
    seed, validation = e.seeds[0], 0.0 if d.validation_fraction is None else d.validation_fraction
    local_steps_of(s.local_steps, names)  # raises for a list of another length
    given = {"columns.by": e.columns.by, "columns.query": e.columns.query, "columns.test-file": e.columns.test_file}
    if elsewhere := [k for k, v in (given | {"data.global-file": d.global_file}).items() if v is not None]:
        raise ConfigError(f"{elsewhere[0]}: not with sites, each of which has its own table; split can name a column")
    needs: list[m.Made] = []
    if s.class_weights == "balanced":
        needs.append("labels")
    if e.columns.standardise in (None, "pooled") and e.columns.raw is None:
        needs.append("pooled")
    parts, model = 2 + (validation > 0), model_table(e.model)
    if "backbone" in model:  # sites have it in a place of their own
        model["backbone"] = Path(model["backbone"]).name
    tokenizer = None if e.columns.tokenizer is None else Path(e.columns.tokenizer).name
    return {
        name: m.Join(
            versions=versions(e.packages()),
            experiment=e.name,
            training={k: v for k, v in s.dump().items() if k not in HERE} | {"seed": seed},
            algorithm=method.table(),
            model=model,  # without a name where it is the default for what will be settled
            columns=dataclasses.replace(e.columns, tokenizer=tokenizer, site=for_site(e.columns.site, name)),
            cut=seed if d.seed is None else d.seed,
            test=d.test_fraction,
            validation=validation,
            needs=needs,
            rounds=s.rounds,
            evaluations=(_evaluated(s.rounds, s.evaluate_every) + (s.stop is not None)) * (parts - 1) + 1,
            steps=_steps(s, k, name),
            keys=dict(register),
            cohort=_cohort(s, names),
        )
        for k, name in enumerate(names)
    }


def _cohort(s: Settings, names: Sequence[str]) -> int:
    schedule = s.schedule_for(names)
    return schedule.size(len(names)) if isinstance(schedule, Uniform) else len(names)


def _evaluated(rounds: int, every: int | None) -> int:
    """How many rounds are evaluated at most: the first model, every so many, the last."""
    return rounds + 1 if every is None else 1 + (rounds // every + (rounds % every > 0) if every else 0)


def _wrong_join(name: str, reply: Message[m.Joined]) -> str:
    about = reply.head
    if about.site != name:
        return f"calls itself {about.site!r}"
    if why := unlike(about.versions, versions(), "the server"):
        return why
    return "" if about.counts.train else "has no training rows"


def _card(store: RunFolder, name: str, names: Sequence[str]) -> str:
    """What sites know the run of a folder by; a new word for a new run. Raises RunError for a run of other sites."""
    word = f"{re.sub('[^A-Za-z0-9_-]', '-', name)[:40]}-{uuid.uuid4().hex[:12]}"
    path, says = store.path / CARD, {"run": word, "sites": [*names]}
    try:
        if path.is_file():
            says |= table_in(path.read_bytes())
        before = ", ".join(map(str, says["sites"]))
        store.path.mkdir(parents=True, exist_ok=True)
        if before != ", ".join(names) and checkpoint.checkpoints(store.path / "checkpoint"):
            raise RunError(f"cannot resume {store.path}: its sites are {before}, found {', '.join(names)}")
        store.write(CARD, json.dumps(says | {"sites": [*names]}))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunError(f"{path}: cannot be read or written ({reason(e)})") from None
    return str(says["run"])


def _outline(e: Experiment, said: Mapping[str, m.Joined], settled: Settled, audit: Audit) -> Outline:
    """The sites as a federation without samples."""
    names, counts = [*said], {name: about.counts.model_dump(exclude_none=True) for name, about in said.items()}
    parts = [key for key in ("train", "validation", "test") if any(key in of for of in counts.values())]
    sizes = {key: [int(counts[name].get(key, 0)) for name in names] for key in parts}
    own = not any(isinstance(about.file, Npz) and about.file.given for about in said.values())
    rows, held = [sum(of) for of in zip(*sizes.values(), strict=True)], sizes.get("test", [0] * len(names))
    prepared = {} if settled.preparation is None else {
        "preparation": settled.preparation.dump(), "inputs": settled.preparation.names
    }  # fmt: skip
    meta = {
        "dataset": e.name,
        "partition": "natural",
        "test": f"own:{e.data.test_fraction:g}",
        "seed": e.seeds[0] if e.data.seed is None else e.data.seed,
        "notes": [
            *settled.notes,
            *uneven(names, rows, held, e.data.test_fraction if own else 0.0, "test"),
            *starmap(repairs_said, e.columns.site.items()),
            *map(printable, audit.lines),
            "every client's samples are at its own site",
        ],
        "audit": audit.kept,
        **prepared,
    }
    about = {"clients": [settled.classes, *names], "preparation": settled.dump(), "train": sizes}
    short = {
        key: hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest() for key, value in about.items()
    }
    mark = " ".join(f"{key}:{digits}" for key, digits in short.items())
    return Outline.of(names, sizes, settled, meta=meta, digest=mark)


def _settings(e: Experiment, federation: Outline) -> tuple[Experiment, Training]:
    """The experiment with nothing left open, and how its run trains."""
    model = e.model if e.model.name is not None else dataclasses.replace(e.model, name=default(federation))
    loss = e.settings.loss or federation.loss
    schedule = e.settings.schedule_for(federation.names)
    if isinstance(schedule, Timed) or (isinstance(schedule, Asynchronous) and schedule.delays != Delays()):
        raise ConfigError("schedule.delays: found some, expected none: real sites take the time they take")
    settings = dataclasses.replace(
        e.settings, loss=loss, seed=e.seeds[0], seeds=None, engine="local",
        schedule=Arrivals(schedule.concurrency) if isinstance(schedule, Asynchronous) else e.settings.schedule,
    )  # fmt: skip
    return dataclasses.replace(e, model=model, settings=settings), settings


def _describe(e: Experiment, method: Method, names: Sequence[str]) -> dict[str, Any]:
    """What config.toml says beyond what `prepare` knows."""
    data = {key: value for key, value in e.data.dump().items() if key not in ("name", "dir", "partition", "clients")}
    tables = {"data": data | {"sites": [*names]}, "model": model_table(e.model), "algorithm": method.table()}
    tables |= {"columns": found} if (found := e.columns.dump()) else {}
    return tables | ({"schedule": {**asked}} if is_mapping(asked := e.settings.schedule) else {})


def _steps(settings: Settings, k: int, name: str) -> int | None:
    """The local steps of one site, which hears nothing of others'."""
    given: Any = settings.local_steps
    return given[name] if is_mapping(given) else int(given[k]) if is_list(given) else given
