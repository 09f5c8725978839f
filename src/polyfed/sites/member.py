"""A site from the first message to the last: it says what its file is like, makes its part of the settled experiment
out of nothing but messages and its own file, answers, and keeps its model.

    {"do": "join", ...}    what kind of experiment it is -> the schema of the file, after the operator's consent
    {"do": "pooled", ...}  -> sums over its training rows, if they are allowed
    {"do": "begin", ...}   the settled experiment -> a digest of the start vector
    {"do": "train" | "evaluate", ...}  as in `Site`
    {"do": "end", ...}     the last message, by which the site makes its own model

"pooled" and "begin" say under "joined" what the site has joined for: one that was started again then joins anew.
What goes wrong comes back as {"error": one line}, without paths and cells of the file; the site's screen has them.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.base import plugins
from polyfed.base.checkpoint import reason
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError, PolyfedError, RunError
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.core.algorithm import check as check_algorithm
from polyfed.data.schema import Cut, File, Settled, settle
from polyfed.engines.local import pick_device
from polyfed.models import default_for
from polyfed.runs.build import make_model
from polyfed.runs.check import Where, read_table
from polyfed.runs.config import TABLES, model_of
from polyfed.runs.folder import version_of
from polyfed.runs.rehearsal import Forms, forms
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trained import raw
from polyfed.runs.training import Settings
from polyfed.sites.consent import RAW, Consent, words
from polyfed.sites.message import Message, fits, pack, unpack
from polyfed.sites.site import Site, version
from polyfed.sites.vault import Vault
from polyfed.studies.export import write_model

WAYS = 255  # thresholds at a time in the server's search for a median
QUESTIONS = 12  # different ones about sums: the search for medians, means and deviations
FIRST = 1 << 24  # bytes of tensors in a message before the model is known
BEGUN = "begin.message"  # in the vault: what the run began with here
NOWHERE = Where(None, {}, {})


class Member:
    """One site and its data.

    Parameters
    ----------
    name : str
        The site's, as the server knows it.
    data : Path
        Its CSV or npz file.
    vault : Path
        Folder of its private state of one run.
    consent : Consent
        What its operator allows.
    say : callable
        Takes lines for the operator's log: no path, no cell of the file, no value of a column.
    show : callable or None
        Takes lines for the operator's eyes alone, which may have all of these; None: as `say`.
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
        self._joined: dict[str, Any] = {}  # the server's first message, once it was consented to
        self._refused: dict[str, Any] = {}
        self._asked: set[bytes] = set()  # questions about sums
        self._file: File | None = None  # as it was consented to, and what it says of itself
        self._schema: dict[str, Any] = {}
        self._columns: Sequence[str] = ()  # of the file, for errors
        self._begun: Begun | None = None

    def answer(self, message: bytes) -> bytes:
        """The answer to a message. An error is one too."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            most = FIRST if self._begun is None else self._begun.most
            return pack(self._answer(unpack(message, most, "the server")))
        except PolyfedError as e:
            self.show(str(e))
            self.say(outside := self._outside(e))
            return pack(Message({"error": outside}))
        except Exception as e:  # a bug; the server hears no more of it than that
            self.show(f"this is a bug in polyfed: {type(e).__name__}: {reason(e)}")
            self.say(outside := f"{self.name}: a bug in polyfed ({type(e).__name__}); the site's screen says more")
            return pack(Message({"error": outside}))
        finally:
            torch.set_num_threads(threads)

    def _outside(self, e: PolyfedError) -> str:
        """An error as the server may know it."""
        if isinstance(e, DataError) and not str(e).startswith("the server:"):
            column = re.search(r"column '([^']+)'", str(e))
            where = f", column {column[1]!r}" if column and column[1] in self._columns else ""
            return f"{self.name}: its file does not fit{where}; the site's screen says why"
        text = str(e).replace(str(self.vault), "its vault").replace(str(self.data), "its file")
        return text if self.name in text else f"{self.name}: {text}"

    def _answer(self, message: Message) -> Message:
        try:
            do = message.head["do"]
            if do == "join":
                return self._join(message.head)
            if do == "pooled":
                return self._pooled(message)
            if do == "begin":
                return self._begin(message)
            if do in ("train", "evaluate", "end"):
                return self._go_on(do, message)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise RunError(f"{self.name}: the message is damaged ({type(e).__name__}: {e})") from None
        raise RunError(f"{self.name}: found a message that asks for {do!r}, which this version does not know")

    # before the first round

    def _join(self, head: Mapping[str, Any]) -> Message:
        _same_versions(head["versions"], self.name)
        if head != self._joined:
            file = File(self.data, self.name, _columns(head), Cut(**head["cut"]))
            self._columns = () if file.sheet is None else [*file.sheet.columns]
            schema = file.schema()
            self._ask(head, file, schema)
            self._joined, self._file, self._schema = dict(head), file, schema
        assert self._file is not None
        said = {"site": self.name, "versions": versions(), "cpu": torch.backends.cpu.get_cpu_capability()}
        return Message(said | {"schema": self._schema, "counts": self._file.counts})

    def _ask(self, head: Mapping[str, Any], file: File, schema: Mapping[str, Any]) -> None:
        """Show what would leave. Raises RunError where it may not."""
        needs = {key: RAW[key] for key in head["needs"] if key != "pooled" or file.sheet is not None}
        method = _method(head)
        discloses = method.needs.discloses
        try:
            alone = settle({self.name: schema}, file.columns)
        except DataError:  # of one class only, say; what it comes to with the others is known at "begin"
            alone = Settled((8,), 2, 2)
        about = f"{method.name}, {head['experiment']}; shapes as of this site's own columns"
        up = _forms(head, method, alone).up
        needs |= {name: discloses[name] for tensors in up.values() for name in tensors if name in discloses}
        text = words(self.name, about, schema, file.counts, up, needs, self.consent, discloses)
        self.show(text)
        self.say(f"{self.name}: has been shown what would leave it for {method.name}")
        self.consent.check(needs, self.name)
        if head != self._refused and self.consent.ask is not None and not self.consent.ask(text):
            self._refused = dict(head)  # asked again, the answer is the same
        if head == self._refused:
            raise RunError(f"{self.name}: its operator did not consent, so nothing was sent")

    def _consented(self, head: Mapping[str, Any], what: str, needs: str = "") -> tuple[File, Settled]:
        """The file, and what is settled of the columns that the operator was shown; needs: what is made of samples."""
        if "joined" not in head:
            raise RunError(f"{self.name}: is asked {what} before it has joined")
        if head["joined"] != self._joined:
            self._join(head["joined"])
        if needs and needs not in self._joined["needs"]:
            raise RunError(f"{self.name}: is asked {what}, which it has not joined for")
        settled = Settled.read(head["settled"])
        if (p := settled.preparation) is not None:
            for column in (*(i.name for i in p.inputs), p.target):
                if self._schema["columns"].get(column, {}).get("dropped"):
                    raise RunError(f"{self.name}: is asked {what} with column {column!r}, which it was told is dropped")
        assert self._file is not None
        return self._file, settled

    def _pooled(self, message: Message) -> Message:
        what, given = str(message.head["what"]), {k: t.numpy() for k, t in message.tensors.items()}
        self.consent.check({"pooled": RAW["pooled"]}, self.name)
        file, settled = self._consented(message.head, "for sums", "pooled")
        if (blank := settled.preparation) is None:
            raise RunError(f"{self.name}: is asked for sums of a file that has none")
        if what == "counts":
            columns = message.head["columns"]
            blank = blank.with_inputs(tuple(i for i in blank.inputs if i.values is not None or i.name in columns))
            for i in blank.inputs:
                if i.values is None and not i.gap and not self._schema["columns"][i.name]["gaps"]:
                    raise RunError(f"{self.name}: is asked to count values of {i.name!r}, a column without gaps")
        self._asked.add(hashlib.sha256(pack(message)).digest())
        if len(self._asked) > QUESTIONS or len(given.get("at", ())) > 2 * WAYS:
            raise RunError(f"{self.name}: is asked for more sums than medians, means and deviations take")
        found = file.sums(blank, what, given)
        return Message({}, {name: torch.as_tensor(np.asarray(a)) for name, a in found.items()})

    def _begin(self, message: Message) -> Message:
        head = message.head
        if head.get("labels"):
            self.consent.check({"labels": RAW["labels"]}, self.name)
            file, settled = self._consented(head, "for labels", "labels")
            return Message({"labels": file.labels(settled)})
        file, settled = self._consented(head, "to begin")
        joined = self._joined
        model = {"name": default_for(settled.inputs)} | joined["model"]
        training = {"loss": head["training"]["loss"]} | joined["training"]
        for what, found, said in (
            ("method", head["algorithm"], joined["algorithm"]),
            ("model", head["model"], model),
            ("training", head["training"], training),
        ):
            if found != said:
                raise RunError(f"{self.name}: is asked to begin with another {what} than the one it has joined for")
        vault = Vault(self.vault, str(head["run"]), self.name)
        self._begun = Begun(self.name, file, settled, head, vault)
        vault.keep(BEGUN, pack(message))
        sent = {name for tensors in self._begun.forms.up.values() for name in tensors}
        self.say(
            f"{self.name}: begins {self._begun.site.algorithm.name} with {self._begun.site.task.p:,} parameters; "
            f"what is sent: {', '.join(sorted(sent)) or 'nothing'}, {self._begun.forms.largest:,} bytes at most"
        )
        return Message({"w0": digest(self._begun.site.task.w0)})

    # rounds

    def _go_on(self, do: str, message: Message) -> Message:
        begun = self._begun or self._reopened()
        if message.head["run"] != begun.vault.run:
            raise RunError(
                f"{self.name}: {self.vault} is the vault of run {begun.vault.run!r}, and the server asks for run "
                f"{str(message.head['run'])!r}; give each run a vault of its own"
            )
        if do == "end":
            return self._end(message, begun)
        reply = begun.site.answer(message)
        if do == "evaluate":
            return self._measured(message, reply, begun)
        if not reply.head.get("diverged"):
            fits(reply, begun.expected(int(message.head["t"]), int(message.head["phase"])), self.name)
        return reply

    def _measured(self, message: Message, reply: Message, begun: "Begun") -> Message:
        metrics = reply.head["metrics"]
        line = {"round": message.head.get("round"), "split": message.head["split"], **metrics}
        begun.vault.add("metrics.jsonl", json.dumps({k: None if v != v else v for k, v in line.items()}))
        if self.consent.metrics == "none":
            return Message({"metrics": None, "parameters": reply.head["parameters"]})
        return Message(reply.head | {"aggregate": self.consent.metrics == "aggregate"})

    def _end(self, message: Message, begun: "Begun") -> Message:
        w, _ = begun.site.personal(version(message.head["base"]), message.tensors)
        begun.export(w[0], self.vault / "model.safetensors")
        begun.vault.keep("report.md", begun.report().encode())
        self.finished = True
        self.say(f"{self.name}: the run is over; this site's model is model.safetensors in its vault")
        return Message({"stored": True})

    def _reopened(self) -> "Begun":
        """What the vault says that has begun here, after the site was stopped."""
        path = self.vault / BEGUN
        if not path.is_file():
            raise RunError(f"{self.name}: {self.vault} has no run; start the server again, so that this site joins")
        head = unpack(path.read_bytes(), FIRST, str(path)).head
        joined = self._joined = head["joined"]
        self._file = file = File(self.data, self.name, _columns(joined), Cut(**joined["cut"]))
        self._columns, self._schema = () if file.sheet is None else [*file.sheet.columns], file.schema()
        vault = Vault(self.vault, str(head["run"]), self.name)
        self._begun = Begun(self.name, file, Settled.read(head["settled"]), head, vault)
        return self._begun


class Begun:
    """A site's part of a settled experiment.

    head: of the message "begin"
    """

    def __init__(self, name: str, file: File, settled: Settled, head: Mapping[str, Any], vault: Vault):
        self.settled, self.vault, self.head = settled, vault, head
        t, method, model = _training(head), _method(head), _model(head, settled)
        assert t.loss is not None, "the server has settled it"
        task = t.task(model, t.loss, pick_device(t.device), class_weights=head["weights"])
        check_algorithm(method, task.dtype)
        if settled.preparation is not None:
            self.preparation, data = file.fitted(settled)
        else:
            self.preparation, data = None, file.prepared(settled)
        check(task, data["train"], settled.classes, str(head["model"].get("name")))
        placed = {key: task.place(split) for key, split in data.items()}
        vault.same("data", _digest_of(placed), "its data have changed since the run began; restore the file as it was")
        steps = local_steps_of(head["steps"], [name])
        work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, settled.inputs))
        self.site = Site(name, task, placed, method, work, t.seed, vault)
        self.forms = forms(method, task, settled.inputs, settled.classes, settled.outputs)
        self.most = 2 * max(self.forms.down, 8 * task.p) + FIRST

    def expected(self, t: int, phase: int) -> Mapping[str, Any]:
        """What may leave in one exchange."""
        return self.forms.of(self.site.algorithm.needs.phases(t), phase)

    def export(self, w: torch.Tensor, path: Path) -> None:
        """Write the site's model, with what `polyfed predict` needs beside it."""
        task, head, preparation = self.site.task, self.head, self.preparation
        facts = {
            "client": self.site.name,
            "shared_by_all_clients": False,
            "model": head["model"],
            "classes": self.settled.classes,
            "inputs": list(self.settled.inputs),
            "outputs": self.settled.outputs,
            "loss": head["training"]["loss"],
            "dtype": str(task.dtype).removeprefix("torch."),
            "algorithm": head["algorithm"],
            "data": {"name": "this site's"},
            "seed": head["training"]["seed"],
            "run": self.vault.run,
            "polyfed": version_of("polyfed"),
        }
        if preparation is not None:
            facts["preparation"] = preparation.only(self.site.name).dump()
        write_model(path, task.layout.named(w) | task.fixed, facts)

    def report(self) -> str:
        """The site's own numbers, round by round: those of the model that it would have deployed then."""
        found = {(r["round"], r["split"]): r for r in self.vault.lines("metrics.jsonl")}  # the last word on each
        names = list(dict.fromkeys(key for r in found.values() for key in r if key not in ("round", "split")))
        counts = ", ".join(f"{len(split.x)} {key}" for key, split in self.site.data.items())
        rows = [
            [str(t), split, *("" if r.get(key) is None else f"{r[key]:.4g}" for key in names)]
            for (t, split), r in sorted(found.items())
        ]
        table = [["round", "rows of", *names], ["---"] * (2 + len(names)), *rows]
        head = f"# {self.site.name}: {self.site.algorithm.name}, run {self.vault.run}\n\nRows: {counts}.\n\n"
        return head + "".join(f"| {' | '.join(row)} |\n" for row in table)


def versions(added: Iterable[str] = ()) -> dict[str, str]:
    """Of what must be the same at server and sites. added: packages of the method, the model and the metrics"""
    known = plugins.versions()
    found = {package: version_of(package) for package in ("polyfed", "torch")}
    return found | {package: known.get(package, "not installed") for package in added}


def digest(w: torch.Tensor) -> str:
    """sha256 of a vector."""
    return hashlib.sha256(raw(w)).hexdigest()


def _same_versions(there: Mapping[str, str], name: str) -> None:
    for package, mine in versions(there.keys() - versions()).items():
        if there.get(package) != mine:
            has = f"has {package} {mine}" if mine != "not installed" else f"{package} is not installed"
            raise RunError(f"{name}: {has}, the server has {there.get(package)}; install the same")


def _columns(head: Mapping[str, Any]) -> Columns:
    return Columns(**head["columns"])


def _training(head: Mapping[str, Any]) -> Settings:
    return read_table(Settings, head["training"], NOWHERE, TABLES)


def _method(head: Mapping[str, Any]) -> Algorithm:
    table = {key.replace("-", "_"): value for key, value in head["algorithm"].items()}
    return REGISTRY.make(table.pop("name"), table)


def _model(head: Mapping[str, Any], settled: Settled) -> torch.nn.Module:
    table = model_of({"name": default_for(settled.inputs)} | head["model"], NOWHERE)
    if table.file is not None:
        raise RunError("the model is in a file, which a site does not run; name one of polyfed's own")
    return make_model(table, settled.inputs, settled.outputs, head["training"]["seed"])


def _forms(head: Mapping[str, Any], method: Algorithm, settled: Settled) -> Forms:
    """What the method sends on a file like this one."""
    t = _training(head)
    task = t.task(_model(head, settled), "mse" if settled.classes is None else "cross-entropy", "cpu", metrics=())
    return forms(method, task, settled.inputs, settled.classes, settled.outputs)


def _digest_of(data: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for key in sorted(data):
        for t in (data[key].x, data[key].y):
            found.update(f"{key} {t.dtype} {list(t.shape)}".encode() + raw(t))
    return found.hexdigest()
