"""A site's policy: what it forbids is refused by its key, and what attacks that work without one get with the default;
test_attack.py has more of them."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from direct import raw
from hospitals import ALL, FEDAVG, OPEN, Sites, at_sites, experiment, listened, on_one_machine, same, tables

from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.runs.config import Where, read_table
from polyfed_sites.consent import Consent
from polyfed_sites.policy import Policy, read
from polyfed_sites.site import Site

NAMES = ("bern", "oslo")
CLIENT = '[columns]\nstandardise = "client"\ndrop = ["ssn"]'
POOLED = '[columns]\ndrop = ["ssn"]'
DEFAULT = Policy()


@pytest.fixture
def data(tmp_path):
    """60 patients at each site: whole ages, a pressure with gaps at oslo alone, a number that names them."""

    def row(rng, i, k):
        age = rng.integers(20, 90)
        pressure = "" if k and i % 9 == 0 else f"{rng.normal(130, 15):.2f}"
        return f"{age},{pressure},{100_000 + 7 * i + k},{'ill' if age + rng.normal(0, 9) > 60 else 'well'}"

    return tables(tmp_path / "data", "age,pressure,ssn,outcome", row)


def run(tmp_path, data, policy, columns, out="run", consent=ALL, hands=(), **top):
    """(what passed in a run, the sites, how it ended)"""
    return listened(tmp_path / out, data, policy, columns, FEDAVG, consent, hands, **top)


def test_runs_that_the_default_policy_allows_have_the_bits_of_one_machine(data, tmp_path):
    """Also with gaps that are filled with the mean of all sites: of sums alone."""
    file = experiment(tmp_path / "study.toml", 'name = "scaffold"', POOLED)
    sites = Sites(tmp_path, data, names=NAMES, policy=DEFAULT)
    same(on_one_machine(file, data), at_sites(file, sites), sites)
    fill = sites.members["oslo"].state.preparation.at("oslo").fill[1]
    known = [float(c) for name in NAMES for c in training(sites, name, 1) if c]
    assert fill == pytest.approx(np.mean(known), rel=1e-12)


def test_medians_that_policies_keep_are_refused_once_by_column_and_the_sites_end(data, tmp_path):
    asked = POOLED + '\nmissing = "median"'
    heard, sites, end = run(tmp_path, data, DEFAULT, asked)
    who = ", ".join(NAMES)
    assert f"of values of pressure, and the policies of {who} let none out" in end
    assert end.count("pressure") == 1
    assert {m.head["kind"] for m in heard.asked()} == {"join", "over"}, "no site is asked for what it refuses"
    assert all(site.finished and site.ended for site in sites.members.values())
    _, sites, end = run(tmp_path, data, Policy(pooled="medians"), asked, "median")
    assert not end
    assert not any(site.ended for site in sites.members.values())


def training(sites, name, column):
    file = sites.members[name].state.joined.file
    cells = [line.split(",")[column] for line in sites.data[name].read_text().splitlines()[1:]]
    return [cells[k] for k in file.rows["train"]]


def test_no_sum_of_a_column_that_few_rows_have_leaves(data, tmp_path):
    """oslo has a pressure of three patients alone."""
    lines = [line.split(",") for line in (data / "oslo.csv").read_text().splitlines()]
    some = [line if k in (0, 1, 2, 3) else [line[0], "", *line[2:]] for k, line in enumerate(lines)]
    (data / "oslo.csv").write_text("\n".join(",".join(line) for line in some) + "\n")
    heard, _, end = run(tmp_path, data, DEFAULT, POOLED)
    assert "oslo: is asked for sums of column 'pressure', some of too few rows; its policy has least-count = 5" in end
    assert not any(m.tensors for m in heard.said())


def numbers_said(heard):
    said = "".join(str(m.head) for m in heard.said() if m.head["kind"] != "failed")
    return sum(str(100_001 + 7 * i) in said for i in range(60))


def test_values_that_few_rows_have_stay_at_the_site_whatever_the_task(data, tmp_path):
    asked = '[columns]\ntarget = "ssn"\ntask = "classification"\nstandardise = "client"'
    short = {"rounds": 1, "evaluate-every": 0}
    assert numbers_said(run(tmp_path, data, OPEN, asked, "open", **short)[0]) == 60, "the attack works"
    heard, _, end = run(tmp_path, data, DEFAULT, asked, "default", **short)
    assert numbers_said(heard) == 0
    assert (
        "values that [columns] does not list, of column 'ssn', some of too few rows; its policy has least-count" in end
    )


def test_a_column_that_is_not_listed_is_not_there(data, tmp_path):
    """Neither its values nor its name leave; who names it is told that it is not allowed."""
    listed = Policy(columns=["age", "pressure", "outcome"], pooled="none")
    heard, _, end = run(tmp_path, data, listed, '[columns]\nstandardise = "client"')
    assert not end
    assert not any("ssn" in str(m.head) for m in heard.said())
    heard, _, end = run(tmp_path, data, listed, '[columns]\ntarget = "ssn"\nstandardise = "client"', "named")
    assert "is asked for the column 'ssn'; its policy has columns = age, pressure, outcome" in end
    assert {m.head["kind"] for m in heard.said()} == {"failed", "stored"}


@pytest.mark.parametrize("policy", [OPEN, DEFAULT])
def test_after_the_last_round_nothing_new_is_answered(data, tmp_path, policy):
    """Not one of 300 evaluations and 50 trainings, also after a restart."""
    heard, sites, end = run(tmp_path, data, policy, CLIENT, **{"evaluate-every": 1})
    assert not end
    p = sites.members["oslo"].state.client.task.p
    chosen = [{"w": torch.full((p,), k / 10)} for k in range(300)]

    def answered(kind, site, n):
        asked = [m for m in heard.asked() if m.head["kind"] == kind][-1]
        return sum("error" not in raw(site.answer(asked._replace(tensors=c).pack())).head for c in chosen[:n])

    again = Site("oslo", data / "oslo.csv", tmp_path / "run" / "vaults" / "oslo", ALL, policy=policy)
    for site in (sites.members["oslo"], again):
        assert answered("evaluate", site, 300) == 0
        assert answered("train", site, 50) == 0
        assert raw(site.answer(heard.first("end").pack())).head["kind"] == "stored"
    lines = tmp_path / "run" / "vaults" / "oslo" / "answered.jsonl"
    lines.write_text("".join(line for line in lines.read_text().splitlines(keepends=True) if "ended" not in line))
    again = Site("oslo", data / "oslo.csv", tmp_path / "run" / "vaults" / "oslo", ALL, policy=policy)
    assert answered("evaluate", again, 300) <= 2
    assert answered("train", again, 50) <= 10


REFUSED = {
    "least_rows": (50, CLIENT, {}, "training on 48 rows"),
    "most_rounds": (2, CLIENT, {}, "3 rounds"),
    "most_evaluations": (2, CLIENT, {}, "5 evaluations"),
    "most_steps": (11, CLIENT, {}, "12 local steps"),
    "methods": (["scaffold"], CLIENT, {}, "the method 'fedavg'"),
    "models": (["mlp"], CLIENT, {}, "the model 'linear'"),
    "pooled": ("none", POOLED, {}, "sums of columns"),
    "least_count": (13, CLIENT, {}, "scores on 12 rows for test"),
    "separable": (
        False,
        CLIENT,
        {"rounds": 35, "local-steps": 1, "local-epochs": "none"},
        "35 rounds in steps of 8 of 48 rows, from which every row could be solved for (not so with batch-size = full)",
    ),
}


@pytest.mark.parametrize(("key", "case"), REFUSED.items(), ids=REFUSED)
def test_what_a_policy_forbids_is_refused_by_its_name_at_both_ends(key, case, data, tmp_path):
    value, columns, top, what = case
    heard, sites, end = run(tmp_path, data, Policy(**{key: value}), columns, **top)
    shown = value[0] if isinstance(value, list) else "false" if value is False else value
    line = f"oslo: is asked for {what}; its policy has {key.replace('_', '-')} = {shown}"
    assert line in end
    assert end.count("\n") == 0
    assert line in sites.log
    assert not any(m.tensors for m in heard.said())


def test_runs_on_one_file_are_counted_over_the_vaults_of_a_folder(data, tmp_path):
    policy = Policy(most_runs=2)
    for k in range(3):
        sites = Sites(tmp_path, data, names=NAMES, policy=policy)
        sites.members = {
            name: Site(name, data / f"{name}.csv", tmp_path / name / str(k), ALL, policy=policy) for name in NAMES
        }
        file = experiment(tmp_path / "study.toml", FEDAVG, CLIENT, rounds=1)
        if k < 2:
            at_sites(file, sites, out=f"run{k}")
    with pytest.raises(PolyfedError, match="is asked for run 3 on the same file; its policy has most-runs = 2"):
        at_sites(file, sites, out="run2")


def test_scores_leave_with_the_digits_of_the_policy_and_seconds_by_tenths(data, tmp_path):
    heard, _, _ = run(tmp_path, data, Policy(digits=2), CLIENT)
    losses = [m.head["metrics"]["loss"] for m in heard.said() if m.head["kind"] == "measured"]
    assert losses
    assert all(value == float(f"{value:.2g}") for value in losses)
    seconds = [m.head["seconds"] for m in heard.said() if m.head["kind"] == "trained"]
    assert all(value > 0 and value == round(value, 1) for value in seconds)


def test_the_change_that_leaves_is_clipped_about_what_was_received(data, tmp_path):
    heard = run(tmp_path, data, Policy(clip=0.01), CLIENT, rounds=1)[0]
    (asked,), (cut,) = (
        [m for m in of if m.head["kind"] in ("train", "trained")] for of in (heard.asked(), heard.said())
    )
    longest = 0.01 * max(1.0, float(asked.tensors["w"].norm()))
    assert float((cut.tensors["w"] - asked.tensors["w"]).norm()) == pytest.approx(longest, rel=1e-5)


def test_a_policys_file_is_read_as_any_settings_are(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('least-rows = 30\npooled = "none"\nmethods = ["fedavg"]\n')
    assert read(path) == Policy(least_rows=30, pooled="none", methods=["fedavg"])
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    stricter = page.split("```toml\n")[1].split("```")[0]
    assert read_table(Policy, tomllib.loads(stricter), Where(None, {}, {})).least_rows == 100
    for text, said in (
        ("least-rwos = 1", "least-rwos: unknown key (did you mean 'least-rows'?)"),
        ("least-rows = 0", "least-rows: found 0, expected an integer of at least 1"),
        ('pooled = "all"', "pooled: found 'all', expected none, sums or medians"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            read(path)
        assert said in str(error.value)
        assert str(error.value).startswith(f"{path}: ")


# consent


def texts(sites):
    return [line for line in sites.lines if line.startswith("What leaves the site 'oslo'")]


def agreed(sites):
    return texts(sites)[-1].rsplit(" ", 1)[1]


def test_a_digest_is_agreed_to_and_nothing_else(data, tmp_path):
    """Once, over restarts too; longer training, other data or another policy is another digest."""
    _, sites, _ = run(tmp_path, data, DEFAULT, CLIENT, "look")
    yes = agreed(sites)
    one = Consent(ALL.allow, agreed=frozenset({yes}))
    for out, policy, top in (
        ("rounds", DEFAULT, {"rounds": 4}),
        ("steps", DEFAULT, {"local-epochs": 3}),
        ("batch", DEFAULT, {"batch-size": 16}),
        ("evaluations", DEFAULT, {"evaluate-every": 3}),
        ("policy", Policy(digits=5), {}),
    ):
        _, sites, end = run(tmp_path, data, policy, CLIENT, out, one, **top)
        assert f"oslo: its operator has agreed to {yes}, and the terms are {agreed(sites)}; read them" in end, out
        assert agreed(sites) != yes
    for what in ("rounds of 2 passes over the training rows, in steps of 8 rows", "model linear; at most 3 rounds"):
        assert what in texts(sites)[-1]
    _, _, end = run(tmp_path, data, DEFAULT, CLIENT, "other", Consent(ALL.allow, agreed=frozenset({"0" * 16})))
    assert f"agree with --yes {yes}" in end
    path = data / "oslo.csv"
    path.write_text(path.read_text() + "30,120,1,well\n")
    _, sites, end = run(tmp_path, data, DEFAULT, CLIENT, "more rows", one)
    assert f"oslo: its operator has agreed to {yes}, and the terms are {agreed(sites)}" in end


def test_an_operator_is_asked_once_over_restarts_and_anew_when_a_run_gets_longer(data, tmp_path):
    shown = []
    asking = Consent(ALL.allow, ask=lambda text: not shown.append(text))
    top = {"class-weights": "balanced", "seed": 2**63 - 1}  # labels and sums are asked for too; the largest seed
    for _ in range(2):
        sites = Sites(tmp_path, data, asking, NAMES, DEFAULT)
        at_sites(experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=1, **top), sites, resume=True)
    assert sorted(text.split("'")[1] for text in shown) == sorted(NAMES), "one question at each site"
    sites = Sites(tmp_path, data, asking, NAMES, DEFAULT)
    there = at_sites(experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=2, **top), sites, resume=True)
    assert there.rounds == 2
    assert len(shown) == 4
    assert "at most 2 rounds" in shown[-1]


def test_a_rounded_score_stays_within_its_range():  # also of 24 rows, which are no multiple of 5
    assert all(abs(Policy(least_count=5).rounded({"r2": v}, n)["r2"]) <= 1 for n in range(5, 200) for v in (-1.0, 1.0))
