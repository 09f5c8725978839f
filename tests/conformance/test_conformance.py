"""The conformance table of `polyfed_testing` on every method and variant, and what only the package can know of its own
methods: the traffic that their papers state, images, kills, and what a class says of itself."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from halfway import killed
from instances import METHODS, federation, half_without_the_kernel, loop, train
from traffic import stated

import certificates
import polyfed as pf
import polyfed.algorithms
from polyfed.cli.describe import citation
from polyfed.core.schedule import Uniform
from polyfed_testing.rows import NEW, OLD, ROWS, moved_bytes
from polyfed_testing.stage import ROUNDS, N, Wire, private

PLAIN = [name for name in METHODS if "(" not in name]
each_name = pytest.mark.parametrize("name", METHODS)
each_class = pytest.mark.parametrize("cls", sorted({type(m) for m in METHODS.values()}, key=lambda c: c.name))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@each_name
def test_row(name, row):
    with half_without_the_kernel(name):  # the rows of a method share runs
        if why := row(METHODS[name]):
            pytest.skip(why)


# what an author's method need not hold to, or what the table has no time for


@pytest.mark.parametrize("name", PLAIN)
def test_chunks_of_images_do_not_change_the_models(name):
    """Convolutions are computed client by client, where the table's network is computed for a whole chunk."""
    settings = {"dtype": torch.float64, "batch_size": None, "local_epochs": 1, "rounds": 2, "evaluate_every": 0}
    together, alone = (train(METHODS[name], kind="cnn", chunk=chunk, **settings).personal for chunk in (N, 1))
    assert (alone - together).abs().max() <= 1e-10


@each_name
def test_what_is_sent_is_what_the_paper_says(name):
    method = METHODS[name]
    for schedule in (Uniform(), Uniform(0.5)):
        one = loop(method, schedule=schedule)
        wire = Wire(one)
        for _ in range(ROUNDS):
            one.step()
        sums, trips = moved_bytes(wire.record)
        unit, told = 4 * one.task.p, stated(method, one.task.layout)
        whole = 4 * len(one.task.layout.entries) if told.whole else 0
        met = np.cumsum(trips > 0, axis=0) > 1
        for t in range(ROUNDS):
            for way, units in enumerate((told.down, told.up)):
                times = 1 + told.before if t == 0 else 1
                here = trips[t] > (t == 0 and method.needs.everyone_first)  # not those of its first exchange alone
                extra = sums[t][here, way] - times * round(units * unit, 6)
                if way == 1 and told.signature:
                    extra = extra[met[t][here]]
                assert (extra >= -whole).all()
                more = round(told.merged * unit) if way == 0 and t else 0
                assert (extra <= times * 4 * told.numbers + whole + more).all()


@each_name
def test_what_a_newcomer_is_billed_is_what_the_method_states(name):
    """Each exchange as in training. A method whose model is there at entry has no exchanges: only downloads."""
    method, exchanges = METHODS[name], 3
    run = train(method, federation().reorder(OLD), dtype=torch.float64, evaluate_every=0)
    table = pf.admit(run, federation().reorder(NEW[:1]), exchanges).table
    entry, end = table.iloc[0], table.iloc[-1]
    unit, told = 8 * run.trained.task.p, stated(method, run.trained.task.layout, 8, len(OLD) + 1)
    assert entry["up_bytes"] == 0
    assert entry["down_bytes"] % unit == 0
    moved = [end[k] - entry[k] for k in ("down_bytes", "up_bytes")]
    if moved == [0, 0] and told.down:
        assert entry["down_bytes"] == told.entry * unit
        return
    whole = len(run.trained.task.layout.entries)  # entries of a layer
    numbers = 8 * exchanges * max(whole, told.numbers)
    first = 8 * 36 * 3 * method.basis if isinstance(method, pf.PACFL) else unit
    signature = first if told.signature else 0
    more = exchanges * told.merged * unit
    assert -numbers <= moved[0] - exchanges * told.down * unit <= numbers + more or told.less_down
    assert abs(moved[1] - exchanges * told.up * unit - signature) <= numbers


def test_a_newcomers_amount_of_work_is_the_runs():
    run, new = train(METHODS["local"], federation().reorder(OLD), dtype=torch.float64), federation().reorder(NEW)
    found = pf.admit(run, new, ROUNDS)
    alone = train(METHODS["local"], new, dtype=torch.float64)
    assert (found.personal - alone.personal).abs().max() <= 1e-12
    assert found.table["alone"].tolist() == found.table[found.metric.name].tolist()


# killed and resumed

KILLS = [("after", t) for t in range(ROUNDS + 1)] + [("draft", 2), ("rename", 1), ("rename", ROUNDS)]
EVERY = ("fedavg", "scaffold", "ditto", "fedcet", "fpfc", "ifca", "fedslr")  # one of each kind of state
DEATHS = [(m, *kill) for m in EVERY for kill in (KILLS if m == "fedcet" else KILLS[2:5])]
MORE = [(m, *kill) for m in METHODS for kill in ((("after", 2), ("rename", ROUNDS)) if m not in EVERY else KILLS)]


@pytest.fixture(scope="module")
def graves(tmp_path_factory):
    """The folders of killed runs of one method of each kind of state, {(method, when, round): path}."""
    return killed(tmp_path_factory.mktemp("killed"), DEATHS, "memory")


@pytest.fixture(scope="module")
def more_graves(tmp_path_factory):
    """The folders of killed runs of all other methods."""
    return killed(tmp_path_factory.mktemp("killed"), MORE, "memory")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function: the run of a method that nobody kills."""
    root, runs = tmp_path_factory.mktemp("undisturbed"), {}

    def of(name: str) -> pf.Run:
        if name not in runs:
            runs[name] = train(METHODS[name], out=root / str(len(runs)), checkpoint_every=1)
        return runs[name]

    return of


def lines(run: pf.Run) -> list[dict]:
    assert run.folder is not None
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert (np.diff([record["seconds"] for record in records]) >= 0).all()
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def resumes(name: str, folder: Path, expected: pf.Run) -> None:
    assert not (folder / "summary.json").exists()
    run = train(METHODS[name], out=folder, checkpoint_every=1, resume=True)
    assert run.status == "finished"
    for kind, a, b in (("server", run.server, expected.server), ("client", private(run), private(expected))):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), f"{kind} {key}"
    assert torch.equal(run.personal, expected.personal)
    assert run.ledger.drop(columns="seconds").equals(expected.ledger.drop(columns="seconds"))
    assert lines(run) == lines(expected)
    assert run.clients.equals(expected.clients)


def ids(deaths: list[tuple[str, str, int]]) -> list[str]:
    return [f"{m}-{when}-{t}" for m, when, t in deaths]


@pytest.mark.parametrize(("name", "when", "t"), DEATHS, ids=ids(DEATHS))
def test_kill_minus_nine_then_resume_gives_the_same_bits(name, when, t, graves, undisturbed):
    resumes(name, graves[name, when, t], undisturbed(name))


@pytest.mark.long
@pytest.mark.parametrize(("name", "when", "t"), MORE, ids=ids(MORE))
def test_kill_minus_nine_of_every_method(name, when, t, more_graves, undisturbed):
    resumes(name, more_graves[name, when, t], undisturbed(name))


# what a class says about itself


@each_class
def test_the_docstring_documents_every_field(cls):
    doc = inspect.getdoc(cls)
    assert doc is not None
    assert len(doc.splitlines()[0]) > 10
    assert "Parameters\n----------\n" in doc, "no Parameters section"
    section = re.split(r"\n\n\w[\w ]*\n-{3,}\n", doc.split("Parameters\n----------\n")[1])[0]
    documented = [
        n.strip() for line in re.findall(r"^(\w[\w, ]*) : .*\n {4}\S", section, re.M) for n in line.split(",")
    ]
    assert documented == [f.name for f in dataclasses.fields(cls)]


@each_class
def test_the_citation_is_bibtex(cls):
    entry = citation(cls)
    assert re.match(r"@\w+\{[\w:-]+,\n", entry), entry
    assert entry.count("{") == entry.count("}")
    assert "title" in entry


def test_every_method_has_a_certificate_and_the_wheel_says_which():
    """They are the tests' marks, written down by `python tools/certificates.py`."""
    assert certificates.FILE.read_text() == certificates.text(), "run python tools/certificates.py"
    assert {*polyfed.algorithms.__all__} <= {*certificates.marked(certificates.ROOT)}
