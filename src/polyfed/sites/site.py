"""A site from the first message to the last: it says what its file is like, makes its part of the settled experiment
out of nothing but messages and its own file, trains and evaluates, and keeps its model.

Asked again, a site answers the same bits again. What goes wrong comes back as Failed: the part of the error that is for
others (see `PolyfedError.outside`); the site's screen has all of it.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.checkpoint import reason
from polyfed.base.errors import DataError, PolyfedError, Refusal, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute import evaluation
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.compiled import path_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Round, State, decayed
from polyfed.core.algorithm import check as check_algorithm
from polyfed.core.messages import Form
from polyfed.core.rows import MemoryRows
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, Worker
from polyfed.data.preparation import Preparation
from polyfed.data.said import Column, Csv, Dropped, Strict
from polyfed.data.schema import Cut, File, Settled, settle
from polyfed.engines.local import pick_device
from polyfed.runs.folder import version_of
from polyfed.runs.rehearsal import Forms, forms
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trained import raw
from polyfed.sites import message as m
from polyfed.sites.agreed import OURS, Experiment, digest, experiment, unlike, versions
from polyfed.sites.consent import RAW, Consent, words
from polyfed.sites.message import Message, misfit, request
from polyfed.sites.vault import START, Vault, Version
from polyfed.studies.export import write_model

WAYS = 255  # thresholds at a time in the server's search for a median
QUESTIONS = 12  # different ones about sums: the search for medians, means and deviations
FIRST = 1 << 24  # bytes of tensors in a message before the model is known
BEGUN = "begin.message"  # in the vault: what the run began with here
ASKED = {"pooled": "for sums", "labels": "for labels", "begin": "to begin"}


class Begun(NamedTuple):
    """A site's part of a settled experiment. forms: of what may leave     most: bytes of tensors in a message to it"""

    head: m.Begin
    experiment: Experiment
    client: "Client"
    forms: Forms
    preparation: Preparation | None
    most: int


class Site:
    """One site and its data.

    data, vault: its CSV or npz file, and the folder of its private state of one run     say: takes lines for the
    operator's log: no path, no cell of the file, no value of a column     show: takes lines for the operator's eyes
    alone, which may have all of these; None: as `say`
    """

    def __init__(
        self,
        name: str,
        data: Path,
        vault: Path,
        consent: Consent,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[str], None] | None = None,
    ):
        self.name, self.data, self.vault, self.consent, self.say = name, Path(data), Path(vault), consent, say
        self.show = show or say
        self.finished = False
        self._joined: m.Join | None = None  # what was consented to
        self._refused: m.Join | None = None
        self._asked: set[bytes] = set()  # questions about sums
        self._file: File | None = None  # as it was consented to, and what it says of itself
        self._about: m.Joined | None = None
        self._begun: Begun | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a message. An error is one too."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._answer(data).pack()
        except PolyfedError as e:
            whole, outside = str(e), e.outside if isinstance(e, Refusal) else f"{e.outside}; the site's screen says why"
        except Exception as e:  # a bug; the server hears no more of it than that
            whole = f"this is a bug in polyfed: {type(e).__name__}: {reason(e)}"
            outside = f"a bug in polyfed ({type(e).__name__}); the site's screen says more"
        finally:
            torch.set_num_threads(threads)
        self.show(f"{self.name}: {whole}")
        self.say(outside := f"{self.name}: {outside}")
        return Message(m.Failed(error=outside[: m.LINE])).pack()

    def _answer(self, data: bytes) -> Message[Strict]:
        try:
            asked, tensors = request(data, FIRST if self._begun is None else self._begun.most, "the server")
        except RunError as e:
            raise Refusal(str(e)) from None  # it is about the server's own words
        self._permit(asked)
        match asked:
            case m.Join():
                return self._join()
            case m.Pooled():
                return self._pooled(asked, tensors, data)
            case m.Labels():
                return self._labels(asked)
            case m.Begin():
                return self._begin(asked, data)
            case m.Train():
                return self._train(asked, tensors)
            case m.Evaluate():
                return self._evaluate(asked, tensors)
            case m.End():
                return self._end(asked, tensors)

    def _permit(self, asked: m.Request) -> None:
        """Raise Refusal for what this site does not do. Every request passes here before it is answered."""
        if isinstance(asked, m.Turn):
            if asked.run != (run := self._going().head.run):
                then = "give each run a vault of its own"
                raise self._of_vault(f"is the vault of run {run!r}, and the server asks for run {asked.run!r}; {then}")
        elif isinstance(asked, m.Join):
            self._agree(asked)
        else:
            what = ASKED[asked.kind]
            if asked.kind in RAW:
                self.consent.check({asked.kind: RAW[asked.kind]})
            self._agree(asked.joined)
            if asked.kind in RAW and asked.kind not in asked.joined.needs:
                raise Refusal(f"is asked {what}, which it has not joined for")
            if (p := asked.settled.preparation) is not None:
                for column in (*(i.name for i in p.inputs), p.target):
                    if isinstance(self._columns.get(column), Dropped):
                        raise Refusal(f"is asked {what} with column {column!r}, which it was told is dropped")

    # before the first round

    def _agree(self, join: m.Join) -> None:
        """Read the file and ask the operator, unless this is what was agreed to."""
        if join == self._joined:
            return
        mine = versions(sorted(join.versions))
        if why := unlike(mine, join.versions, "the server"):
            raise Refusal(why)
        file, cpu, ours = self._read(join), torch.backends.cpu.get_cpu_capability(), {of: mine[of] for of in OURS}
        counts = m.Counts(**file.counts)
        about = m.Joined(site=self.name, versions=ours, cpu=cpu, file=file.schema(), counts=counts)
        self._ask(join, file, about)
        self._joined, self._file, self._about = join, file, about

    def _read(self, join: m.Join) -> File:
        return File(self.data, self.name, join.columns, Cut(join.cut, join.test, join.validation))

    def _ask(self, join: m.Join, file: File, about: m.Joined) -> None:
        """Show what would leave. Raises Refusal where it may not."""
        needs = {key: RAW[key] for key in join.needs if key != "pooled" or file.sheet is not None}
        try:
            alone = settle({self.name: about.file}, file.columns)
        except DataError:  # of one class only, say; what it comes to with the others is known at "begin"
            alone = Settled((8,), 2, 2)
        t, method, _, model = experiment(join, alone)
        task = t.task(model, "mse" if alone.classes is None else "cross-entropy", "cpu", metrics=())
        up = forms(method, task, alone.inputs, alone.classes, alone.outputs).up
        discloses = method.needs.discloses
        needs |= {name: discloses[name] for tensors in up.values() for name in tensors if name in discloses}
        title = f"{method.name}, {join.experiment}; shapes as of this site's own columns"
        self.show(text := words(title, about, up, needs, self.consent, discloses))
        self.say(f"{self.name}: has been shown what would leave it for {method.name}")
        self.consent.check(needs)
        if join != self._refused and self.consent.ask is not None and not self.consent.ask(text):
            self._refused = join  # asked again, the answer is the same
        if join == self._refused:
            raise Refusal("its operator did not consent, so nothing was sent")

    @property
    def _own(self) -> File:
        assert self._file is not None, "it has joined"
        return self._file

    @property
    def _columns(self) -> Mapping[str, Dropped | Column]:
        return self._about.file.columns if self._about is not None and isinstance(self._about.file, Csv) else {}

    def _join(self) -> Message[m.Joined]:
        assert self._about is not None
        return Message(self._about)

    def _pooled(self, asked: m.Pooled, tensors: State, data: bytes) -> Message[m.Sums]:
        if (blank := asked.settled.preparation) is None:
            raise Refusal("is asked for sums of a file that has none")
        if asked.what == "counts":
            some = tuple(i for i in blank.inputs if i.values is not None or i.name in asked.columns)
            blank = blank.with_inputs(some)
            for i in some:
                known = self._columns.get(i.name)
                if i.values is None and not i.gap and not (isinstance(known, Column) and known.gaps):
                    raise Refusal(f"is asked to count values of {i.name!r}, a column without gaps")
        self._asked.add(hashlib.sha256(data).digest())
        if len(self._asked) > QUESTIONS or len(tensors.get("at", ())) > 2 * WAYS:
            raise Refusal("is asked for more sums than medians, means and deviations take")
        numbers = sum(i.values is None for i in blank.inputs)
        if wrong := misfit(tensors, _asking(asked.what, numbers, numbers + (blank.labels is None))):
            raise Refusal(wrong)
        found = self._own.sums(blank, asked.what, {name: t.numpy() for name, t in tensors.items()})
        return Message(m.Sums(), {name: torch.as_tensor(np.asarray(a)) for name, a in found.items()})

    def _labels(self, asked: m.Labels) -> Message[m.Labelled]:
        return Message(m.Labelled(rows=self._own.labels(asked.settled)))

    def _begin(self, asked: m.Begin, data: bytes) -> Message[m.Begun]:
        self._begun = begun = self._begins(asked, Vault(self.vault, asked.run, self.name))
        begun.client.vault.keep(BEGUN, data)
        sent = {name for tensors in begun.forms.up.values() for name in tensors}
        self.say(
            f"{self.name}: begins {begun.client.algorithm.name} with {begun.client.task.p:,} parameters; "
            f"what is sent: {', '.join(sorted(sent)) or 'nothing'}, {begun.forms.largest:,} bytes at most"
        )
        return Message(m.Begun(w0=digest(begun.client.task.w0)))

    def _begins(self, head: m.Begin, vault: Vault) -> Begun:
        """The client of the settled experiment, with this site's data."""
        settled, file, preparation = head.settled, self._own, None
        t, method, table, model = whole = experiment(head.joined, settled, head.loss)
        task = t.task(model, t.loss or head.loss, pick_device(t.device), class_weights=head.weights)
        check_algorithm(method, task.dtype)
        if settled.preparation is not None:
            preparation, data = file.fitted(settled)
        else:
            data = file.prepared(settled)
        check(task, data["train"], settled.classes, str(table["name"]))
        placed = {key: task.place(split) for key, split in data.items()}
        vault.same("data", _digest_of(placed), "its data have changed since the run began; restore the file as it was")
        work = Work(
            t.epochs, local_steps_of(head.steps, [self.name]), t.batch_size, augmentation(t.augment, settled.inputs)
        )
        client = Client(self.name, task, placed, method, work, t.seed, vault)
        found = forms(method, task, settled.inputs, settled.classes, settled.outputs)
        return Begun(head, whole, client, found, preparation, 2 * max(found.down, 8 * task.p) + FIRST)

    # rounds

    def _going(self) -> Begun:
        """What has begun here, by the vault's word after the site was stopped."""
        if self._begun is None:
            path = self.vault / BEGUN
            if not path.is_file():
                raise self._of_vault("has no run; start the server again, so that this site joins")
            head = request(path.read_bytes(), FIRST, str(path)).head
            if not isinstance(head, m.Begin):
                raise RunError(f"{path}: found a message of kind {head.kind!r}, expected begin")
            self._joined, self._file = head.joined, self._read(head.joined)
            self._begun = self._begins(head, Vault(self.vault, head.run, self.name))
        return self._begun

    def _of_vault(self, line: str) -> Refusal:
        return Refusal(f"{self.vault} {line}", f"its vault {line}")

    def _train(self, asked: m.Train, tensors: State) -> Message[m.Exchanged]:
        begun = self._going()
        reply = begun.client.train(asked, tensors)
        expected = begun.forms.of(begun.client.algorithm.needs.phases(asked.t), asked.phase)
        if isinstance(reply.head, m.Trained) and (wrong := misfit(reply.tensors, expected)):
            raise Refusal(wrong)
        return reply

    def _evaluate(self, asked: m.Evaluate, tensors: State) -> Message[m.Measured]:
        client = self._going().client
        found = client.evaluate(asked, tensors).head
        line = {"round": asked.round, "split": asked.split, **(found.metrics or {})}
        client.vault.add("metrics.jsonl", json.dumps({k: None if v != v else v for k, v in line.items()}))
        if self.consent.metrics == "none":
            return Message(m.Measured(metrics=None, parameters=found.parameters))
        return Message(found.model_copy(update={"aggregate": self.consent.metrics == "aggregate"}))

    def _end(self, asked: m.End, tensors: State) -> Message[m.Stored]:
        begun = self._going()
        w, _ = begun.client.personal(asked.base, tensors)
        _export(begun, w[0], self.vault / "model.safetensors")
        begun.client.vault.keep("report.md", begun.client.report().encode())
        self.finished = True
        self.say(f"{self.name}: the run is over; this site's model is model.safetensors in its vault")
        return Message(m.Stored())


class Client:
    """One client's numbers in a run.

    data: its samples by split, of which "train" is trained on     vault: where its private tensors are kept
    """

    def __init__(
        self,
        name: str,
        task: Task,
        data: Mapping[str, Split],
        algorithm: Algorithm,
        work: Work,
        seed: int,
        vault: Vault,
    ):
        self.name, self.task, self.data, self.algorithm, self.vault = name, task, data, algorithm, vault
        self.device = task.device
        plan = Plan(1, 1, str(self.device), path_of(task, work, data["train"]))
        self.worker = Worker(task, data["train"], client_keys([name]), work, seed, plan)
        self.start = algorithm.init_client(task, task.w0)
        self._here = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._counts = torch.as_tensor(data["train"].counts, dtype=task.dtype, device=self.device)

    def state(self, version: Version) -> State:
        """The private tensors of a version."""
        return self.vault.load(version, self.start)

    def train(self, asked: m.Train, tensors: State) -> Message[m.Exchanged]:
        """One exchange: the uplink that answers these downlinks. The private tensors that come of it are kept."""
        t, phase, begun = asked.t, asked.phase, time.perf_counter()
        round = Round(t, asked.n, phase, self._here, self._counts, torch.full_like(self._here, t))
        rows, down = self._rows(asked.base), self._one(tensors)
        tally = Tally(round, down)
        reply, private = self.worker.run(decayed(self.algorithm, asked.scale), rows, down, round, tally)
        if reply.bad is not None:
            return Message(m.Diverged(t=t, phase=phase))
        for at, mine in private:
            rows.scatter(self._here[at], mine)
        up = tally.uplinks()
        found = {name: up[name][0] for name in up}
        self.vault.save((t, phase), rows.snapshot(), asked.keep)
        seconds = time.perf_counter() - begun
        return Message(m.Trained(t=t, phase=phase, steps=int(reply.steps[0]), seconds=seconds), found)

    def evaluate(self, asked: m.Evaluate, tensors: State) -> Message[m.Measured]:
        """How good the model is that this client would deploy."""
        if asked.split not in self.data:
            raise Refusal(f"has no rows for {asked.split}")
        w, parameters = self.personal(asked.base, tensors)
        found = evaluation.metrics(self.task, w, self.data[asked.split], np.arange(1))
        metrics = {name: float(values[0]) for name, values in found.items()}
        return Message(m.Measured(metrics=metrics, parameters=parameters))

    def personal(self, base: Version, tensors: State) -> tuple[Tensor, int]:
        """[1, p]: the model that it would deploy, and how many numbers describe it. tensors: what it received"""
        mine, down = self._rows(base).gather(self._here), self._one(tensors)
        w = self.algorithm.personal(self.task, mine, down)
        found = self.algorithm.parameters(self.task, mine, down)
        return w, self.task.p if found is None else int(torch.as_tensor(found).reshape(-1)[0])

    def report(self) -> str:
        """The client's own numbers, round by round: those of the model that it would have deployed then."""
        found = {(r["round"], r["split"]): r for r in self.vault.lines("metrics.jsonl")}  # the last word on each
        names = list(dict.fromkeys(key for r in found.values() for key in r if key not in ("round", "split")))
        counts = ", ".join(f"{len(split.x)} {key}" for key, split in self.data.items())
        rows = [
            [str(t), split, *("" if r.get(key) is None else f"{r[key]:.4g}" for key in names)]
            for (t, split), r in sorted(found.items())
        ]
        table = [["round", "rows of", *names], ["---"] * (2 + len(names)), *rows]
        head = f"# {self.name}: {self.algorithm.name}, run {self.vault.run}\n\nRows: {counts}.\n\n"
        return head + "".join(f"| {' | '.join(row)} |\n" for row in table)

    def _rows(self, base: Version) -> MemoryRows:
        saved = None if base == START else self.state(base)
        rows = MemoryRows(1, self.start)
        if saved is not None:
            rows.restore(saved)
        return rows

    def _one(self, tensors: State) -> State:
        """Messages with the clients' axis in front."""
        return {name: t.to(self.device)[None] for name, t in tensors.items()}


def _asking(what: str, numbers: int, columns: int) -> dict[str, Form]:
    """The forms of what comes with a question about sums. numbers: columns of inputs     columns: with the target"""
    if what == "counts":
        return {"at": Form(torch.int64, (None, numbers), 2 * WAYS * numbers)}
    fill = {"fill": Form(torch.float64, (numbers,), numbers)}
    return fill if what == "sums" else fill | {"mean": Form(torch.float64, (columns,), columns)}


def _export(begun: Begun, w: Tensor, path: Path) -> None:
    """Write the site's model, with what `polyfed predict` needs beside it."""
    head, client, task = begun.head, begun.client, begun.client.task
    facts: dict[str, Any] = {
        "client": client.name,
        "shared_by_all_clients": False,
        "model": begun.experiment.model,
        "classes": head.settled.classes,
        "inputs": list(head.settled.inputs),
        "outputs": head.settled.outputs,
        "loss": begun.experiment.training.loss,
        "dtype": str(task.dtype).removeprefix("torch."),
        "algorithm": head.joined.algorithm,
        "data": {"name": "this site's"},
        "seed": begun.experiment.training.seed,
        "run": head.run,
        "polyfed": version_of("polyfed"),
    }
    if begun.preparation is not None:
        facts["preparation"] = begun.preparation.only(client.name).dump()
    write_model(path, task.layout.named(w) | task.fixed, facts)


def _digest_of(data: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for key in sorted(data):
        for t in (data[key].x, data[key].y):
            found.update(f"{key} {t.dtype} {list(t.shape)}".encode() + raw(t))
    return found.hexdigest()
