"""One field changed, and nothing else: what a server may choose is refused by its name, or is another release."""

import json
import time

import numpy as np
import pytest
from direct import raw
from hospitals import ALL, Sites, listened, tables

from polyfed_sites.policy import Policy
from polyfed_sites.site import Site

NAMES = ("bern", "oslo")
CLIENT = '[columns]\nstandardise = "client"\n'
FULL = {"batch-size": "full", "local-steps": 1, "local-epochs": "none", "rounds": 1, "evaluate-every": 0}


@pytest.fixture
def data(tmp_path):
    """60 patients at each site, with ages and a mark that one patient alone has."""

    def row(rng, i, k):
        age = rng.normal(60, 9)
        return f"{age:.1f},{rng.normal() + 40 * (i == 7):.2f},{'ill' if age > 60 else 'well'}"

    return tables(tmp_path / "data", "age,mark,outcome", row)


def run(place, data, policy, tables=CLIENT, **top):
    """(what passed in a run, the sites, how it ended)"""
    return listened(place, data, policy, tables, 'name = "fedavg"\nlr = 1.0', **FULL | top)


PRIVATE = '[privacy]\nepsilon = {epsilon}\ndelta = {delta}\nclip = 1.0\nnoise = "{noise}"\n'


def private(**how):
    return CLIENT + PRIVATE.format(**{"epsilon": 1.0, "delta": 1e-5, "noise": "own"} | how)


def step(asked, reply, rows):
    """What a site has added to the model that it received."""
    ((name, words),) = reply.tensors.items()
    return words.double() / 2.0**30 / (rows if name == "w.weighted" else 1) - asked.tensors["w"]


def test_the_operator_reads_what_a_policy_without_epsilon_protects_from(data, tmp_path):
    _, sites, _ = run(tmp_path / "run", data, Policy())
    assert any("models up for the purpose can read rows" in line for line in sites.lines)
    _, sites, end = run(tmp_path / "private", data, Policy(epsilon=1.0), private())
    assert not end
    assert not any("makes models up" in line for line in sites.lines)


@pytest.mark.parametrize("hidden", [[4] * 100_000, [30_000, 3_000], [20_000, 40_000]])
def test_a_model_beyond_the_policy_is_refused_before_it_is_built(hidden, data, tmp_path):
    sites = Sites(tmp_path, data, names=NAMES, policy=Policy())
    server, _, _ = run(tmp_path / "run", data, Policy())
    asked = server.first("join")
    start = time.process_time()
    said = raw(sites.answer("oslo", asked.saying(model={"name": "mlp", "hidden": hidden}).pack())).head["error"]
    assert time.process_time() - start < 5
    assert "oslo: is asked for a model of " in said
    assert "its policy has most-parameters = 10000000" in said
    assert not any("What leaves the site" in line for line in sites.lines), "refused before anybody is asked"
    assert raw(sites.answer("oslo", asked.pack())).head["kind"] == "joined", "the site stays up"


# joining


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """(the folder, what passed in a run, its sites) of 60 patients, one of whom has a word that no other has."""
    place = tmp_path_factory.mktemp("joined")

    def row(rng, i, k):
        age = 20 + 60 * rng.random()
        name, outcome = "Jane Doe" if i == 7 else f"P{i}", "ill" if age > 50 else "well"
        return f"{i},{name},{'' if i % 9 == 4 else f'{age:.1f}'},{'AB'[i % 2]},{outcome}"

    patients = tables(place / "patients", "id,name,age,ward,outcome", row)
    server, sites, end = run(place / "run", patients, Policy(), DROPPED)
    assert not end
    return patients, server, sites


DROPPED = '[columns]\nstandardise = "client"\ndrop = ["id", "name"]\n'


def told(site, asked, columns):
    """All that a site says of its file, or why it does not; the more of the question is not in it."""
    head = raw(site.answer(asked.saying(columns=asked.head["columns"] | columns).pack())).head
    return json.dumps(head["file"] if head["kind"] == "joined" else head["error"].partition("; its policy")[0])


def questions(text, column):
    """Ways of asking whether a text is in a column; each has an answer of its own for a site that tells."""
    return [
        {"gaps": [text]},
        {"categories": {column: [text, "other"]}},
        {"site": {"oslo": {column: {text: ""}}}},
        {"site": {"oslo": {column: {text: "another"}}}},
        {"target": column, "labels": [text, "other"], "task": "classification"},
        {"target": column, "gaps": [text], "missing_target": "drop"},
    ]


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize(("there", "absent", "column"), [("Jane Doe", "John Roe", "name"), (None, "19.9", "age")])
def test_joining_tells_of_no_text_that_few_rows_hold_whether_it_is_there(k, there, absent, column, joined, tmp_path):
    """With Jane Doe in the question and with a name that nobody has a site says the same of its file."""
    patients, server, _ = joined
    ages = [line.split(",")[2] for line in (patients / "oslo.csv").read_text().splitlines()[1:]]
    there = there or next(a for a in ages if a and ages.count(a) == 1)
    site = Site("oslo", patients / "oslo.csv", tmp_path / "v" / "oslo", ALL, policy=Policy())
    asked, open_ = server.first("join"), {"drop": ["id"]}
    mine, other = (told(site, asked, questions(text, column)[k] | open_) for text in (there, absent))
    assert mine == other.replace(absent, there)


@pytest.mark.parametrize("repair", ["1 / (x - 59.8)", "x * x", "(x + 1e16) - 1e16"])
def test_arithmetic_that_tells_values_apart_is_refused_by_the_key(repair, joined):
    _, server, sites = joined
    columns = server.first("join").head["columns"]
    question = server.first("join").saying(columns=columns | {"site": {"oslo": {"age": repair}}})
    said = "is asked for arithmetic that tells single values of 'age' from others; its policy has least-count = 5"
    assert said in sites.error("oslo", question)


def test_counts_at_joining_are_of_training_rows_in_steps_of_least_count(joined):
    _, server, sites = joined
    said = raw(sites.answer("oslo", server.first("join").pack())).head
    age = said["file"]["columns"]["age"]
    assert age["cells"] == said["counts"]["train"] == 48
    assert age["gaps"] == 5, "of 5 or 6 training rows"
    assert age["numbers"] % 5 == 0 or age["numbers"] == age["cells"] - age["gaps"]
    assert "gaps = " not in "\n".join(sites.lines)
    columns = server.first("join").head["columns"] | {"gaps": ["59.8"], "categories": {"ward": ["A", "B"]}}
    sites.answer("oslo", server.first("join").saying(columns=columns).pack())
    text = [line for line in sites.lines if "What leaves the site" in line][-1]
    assert 'gaps = ["59.8"]' in text
    assert 'categories = {"ward": ["A", "B"]}' in text


def test_scores_leave_in_steps_of_what_least_count_rows_change():
    """An accuracy of 126 rows is one of 26 numbers, and a loss is known to a share of it."""
    scores = {Policy().rounded({"accuracy": k / 126}, 126)["accuracy"] for k in range(127)}
    assert len(scores) == 26
    assert all(abs(Policy().rounded({"a": k / 126}, 126)["a"] - k / 126) <= 2.5 / 126 + 1e-4 for k in range(127))
    large = {Policy().rounded({"loss": v}, 126)["loss"] for v in np.linspace(64, 128, 5000)}
    assert len(large) <= 27
    assert Policy(least_count=1).rounded({"a": 1 / 3}, 126)["a"] == 0.3333
