"""A site's policy, every threshold from both sides: what is asked for up to it is allowed, and nothing beyond."""

from base64 import b64encode
from dataclasses import replace
from inspect import signature

import pytest
import torch
from hospitals import CLIENT, OPEN, listened, tables

import polyfed as pf
from polyfed.base.errors import Forbidden
from polyfed.runs.privacy import Privacy
from polyfed_sites.keys import full_fingerprint
from polyfed_sites.policy import Policy


@pytest.fixture(scope="module")
def agreed_to(tmp_path_factory):
    """What a site holds its policy against, of a run of FedAvg in steps of 8 on 48 rows."""
    kept, place = [], tmp_path_factory.mktemp("terms")
    with pytest.MonkeyPatch.context() as patch:
        terms = signature(Policy.terms)
        patch.setattr(Policy, "terms", lambda *given, **named: kept.append(terms.bind(*given, **named).arguments))
        row = lambda _, i, k: f"{i},{i % 7},{'ill' if i % 2 else 'well'}"  # noqa: E731
        listened(place / "run", tables(place / "data", "age,pressure,outcome", row), OPEN, CLIENT)
    found = {name: value for name, value in kept[0].items() if name != "self"}
    assert (found["e"].training.batch_size, found["about"].counts.train, found["about"].counts.test) == (8, 48, 12)
    return found | {"scores": True, "read": True}


def refused(policy, terms, join=None, training=None, method=None, counts=None, **more):
    """The setting by which a policy refuses terms, "" where it takes them; given is what differs."""
    old, e, about = (terms[name] for name in ("join", "e", "about"))
    e = e._replace(training=replace(e.training, **(training or {})), method=method or e.method)
    about = about.model_copy(update={"counts": about.counts.model_copy(update={"test": 99} | (counts or {}))})
    try:
        policy.terms(**(terms | {"join": old.model_copy(update=join or {}), "e": e, "about": about} | more))
    except Forbidden as error:
        return error.key
    return ""


def private(**given):
    return {"privacy": Privacy(**({"sums": "secure", "epsilon": 2.0, "clip": 1.0} | given))}


BORDERS = {  # key -> what is asked for with a value v of it, and values of v: allowed up to here, refused from here
    "least_rows": ("below", lambda v: {"counts": {"train": v}, "training": {"batch_size": None}}),
    "least_batch": ("below", lambda v: {"training": {"batch_size": v}, "join": {"rounds": 1}}),
    "most_rounds": ("above", lambda v: {"join": {"rounds": v}, "training": {"batch_size": None}}),
    "most_evaluations": ("above", lambda v: {"join": {"evaluations": v}}),
    "most_steps": ("above", lambda v: {"join": {"steps": v}, "training": {"local_epochs": None}}),
    "least_count of a value": ("below", lambda v: {"rarest": {"age": 99, "pressure": v}}),
    "least_count of test": ("below", lambda v: {"counts": {"test": v}}),
    "least_count of validation": ("below", lambda v: {"counts": {"validation": v}}),
    "least_sites": ("below", lambda v: {"join": {"cohort": v}, "training": private()}),
    "epsilon": ("above", lambda v: {"training": private(epsilon=v)}),
    "delta": ("above", lambda v: {"training": private(delta=v / 100)}),
}  # fmt: skip


@pytest.mark.parametrize("case", BORDERS)
def test_a_threshold_is_allowed_itself_and_not_one_beyond(case, agreed_to):
    key, (side, asked) = case.split()[0], BORDERS[case]
    other = {"join": {"cohort": 9}} if key in ("epsilon", "delta") else {}
    for border in (3, 7, 20):
        policy = replace(OPEN, **{key: {"epsilon": float(border), "delta": border / 100}.get(key, border)})
        policy = replace(policy, epsilon=3.0) if key == "delta" else policy
        step = 1 if side == "above" else -1
        for v, said in ((border - step, ""), (border, ""), (border + step, key), (border + 9 * step, key)):
            if v > 0:
                assert refused(policy, agreed_to, **(other | asked(v))) == said, f"{v} where {border} is allowed"


def test_scores_on_no_rows_are_none_and_those_that_stay_may_be_of_few(agreed_to):
    policy = replace(OPEN, least_count=10)
    for part in ("test", "validation"):
        assert refused(policy, agreed_to, counts={part: 3}) == "least_count"
        assert refused(policy, agreed_to, counts={part: 3}, scores=False) == ""
        assert refused(policy, agreed_to, counts={part: 0}) == ""


def test_a_site_with_fewer_rows_than_a_least_batch_uses_all_of_them(agreed_to):
    policy = replace(OPEN, least_batch=30)
    for size, rows, said in ((29, 48, "least_batch"), (30, 48, ""), (20, 20, ""), (25, 20, ""), (19, 20, "least_batch"),
                             (None, 5, "")):  # fmt: skip
        counts, training = {"train": rows}, {"batch_size": size}
        assert refused(policy, agreed_to, counts=counts, training=training, join={"rounds": 1}) == said, (size, rows)


def answers(rounds, method):
    """Different questions in steps that a site answers: a lost round is repeated, 10 and a tenth of them."""
    return (rounds + 10 + rounds // 10) * max(method.needs.phases(t) for t in range(rounds + 3))


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.Scaffold(), pf.FedTrack(), pf.FlexCFL(), pf.FedCET()])
@pytest.mark.parametrize("rows", [30, 48, 51, 200])
def test_fewer_sums_of_parts_leave_than_there_are_rows_whatever_the_method(method, rows, agreed_to):
    """A method of two exchanges in a round asks twice as often. As many as rows would be as many equations."""
    policy = replace(OPEN, separable=False, most_rounds=10**6)
    allowed = [
        rounds for rounds in range(1, 2 * rows)
        if not refused(policy, agreed_to, counts={"train": rows}, join={"rounds": rounds}, method=method)
    ]  # fmt: skip
    assert allowed == [rounds for rounds in range(1, 2 * rows) if answers(rounds, method) < rows]
    for given in ({"training": {"batch_size": None}}, {"training": {"batch_size": rows}}):
        given = given | {"counts": {"train": rows}, "join": {"rounds": 9 * rows}}
        assert refused(policy, agreed_to, method=method, **given) == "", "all rows in each step are one sum"


@pytest.mark.parametrize("key", ["methods", "models", "columns"])
def test_a_list_of_names_allows_these_alone(key, agreed_to):
    every = {"methods": ["fedavg"], "models": ["linear"], "columns": ["outcome", "age", "pressure"]}[key]
    assert refused(replace(OPEN, **{key: [*every, "another"]}), agreed_to) == ""
    assert refused(replace(OPEN, **{key: ["another"]}), agreed_to) == ("" if key == "columns" else key), "none is named"
    named = (
        {"target": "height"}, {"weights": "height"}, {"numbers": ["height"]}, {"categories": ["height"]},
        {"image": "height"}, {"text": "height", "tokenizer": "t.json"}, {"time": "height", "event": "outcome"},
        {"time": "outcome", "event": "height"},
    )  # fmt: skip
    for given in named if key == "columns" else ():
        columns = replace(
            agreed_to["join"].columns, standardise="none", task="survival" if "time" in given else "auto", **given
        )
        assert refused(replace(OPEN, columns=every), agreed_to, join={"columns": columns}) == "columns", given


TRUST = ("own", "shared", "server")  # by how many have to be trusted


def test_privacy_is_what_the_policy_asks_for_or_the_run_is_refused(agreed_to):
    cohort = {"join": {"cohort": 5}}
    for policy, given, said in (
        ({"sums": "secure"}, {}, "sums"),
        ({"sums": "secure"}, {"training": private(sums="open", noise="server")}, "sums"),
        ({"sums": "secure"}, {"training": {"privacy": Privacy(sums="secure")}}, ""),
        ({"epsilon": 3.0}, {}, "epsilon"),
        ({"epsilon": 3.0}, {"training": {"privacy": Privacy(sums="secure")}}, "epsilon"),
        ({"epsilon": 3.0}, {"training": private(epsilon=3.0)}, ""),
        ({"epsilon": 3.0}, {"training": private(sums="open", noise="server", epsilon=3.01)}, "epsilon"),
        ({"epsilon": 3.0, "unit": "site"}, {"training": private()}, "unit"),
        ({"epsilon": 3.0, "unit": "site"}, {"training": private(unit="site")}, ""),
        ({"epsilon": 3.0, "unit": "row"}, {"training": private(unit="site")}, ""),
        *(
            (
                {"epsilon": 3.0, "noise": allowed},
                {"training": private(noise=noise, unit="row")},
                "noise" if TRUST.index(noise) > TRUST.index(allowed) else "",
            )
            for allowed in TRUST
            for noise in TRUST
        ),
        ({"clip": 3.0}, {}, ""),
        ({"clip": 3.0}, {"training": private()}, "clip"),
        ({"least_sites": 6}, {"training": private()}, "least_sites"),
        ({"least_sites": 6}, {}, ""),
    ):
        assert refused(replace(OPEN, **policy), agreed_to, **(cohort | given)) == said, (policy, given)


@pytest.mark.parametrize("n", [3, 4, 7])
def test_only_sites_with_pinned_keys_count_in_a_secure_sum(n, agreed_to):
    """As many as least-sites, itself among them; without pins an operator has to have read the keys."""
    others = [f"ssh {b64encode(bytes([k] * 32)).decode()}" for k in range(n - 1)]
    keys = {f"site-{k}": key for k, key in enumerate(others)} | {agreed_to["about"].site: "ssh AAAA"}
    asked = {"join": {"cohort": n, "keys": keys}, "training": private(epsilon=None, clip=None)}
    for least in range(3, n + 1):
        for pinned in range(n):
            pins = [full_fingerprint(key)[:12] for key in others[:pinned]]
            policy = replace(OPEN, least_sites=least, peers=pins)
            said = "" if pinned + 1 >= least else "least_sites"
            assert refused(policy, agreed_to, **asked) == said, (least, pinned)
            shorter = replace(policy, peers=[pin[:11] for pin in pins])
            assert refused(shorter, agreed_to, **asked) == "least_sites", "eleven digits may be another's"
    for read, said in ((True, ""), (False, "peers")):
        assert refused(replace(OPEN, least_sites=3), agreed_to, **asked, read=read) == said


def test_no_change_leaves_that_is_longer_than_clip_times_what_was_received():
    """Or than clip, about a start at zero; tensor by tensor, and whole numbers as they are."""
    rng = torch.Generator().manual_seed(0)
    for clip in (0.1, 2.0):
        for size in (0.0, 0.3, 40.0):
            received = {k: size * torch.randn(9, generator=rng) for k in ("w", "b")}
            longest = clip * max(1.0, float(torch.cat([*received.values()]).double().norm()))
            for length in (0.5, 0.999, 1.001, 30.0):
                moves = {k: torch.randn(9, generator=rng) for k in ("w", "b", "c")}
                moves = {k: v * (longest * length / v.norm()) for k, v in moves.items()}
                sent = {k: received.get(k, torch.zeros(9)) + v for k, v in moves.items()} | {"n": torch.tensor([10**6])}
                left = Policy(clip=clip).clipped(sent, received)
                for k, move in moves.items():
                    change = left[k] - received.get(k, torch.zeros(9))
                    assert float(change.norm()) <= longest * (1 + 1e-5)
                    assert torch.allclose(change, move * min(1.0, 1 / length), atol=1e-5 * max(1, size))
                assert torch.equal(left["n"], sent["n"])


def test_scores_have_the_digits_of_the_policy_and_no_more():
    scores = {"a": 0.123456789123456789, "b": 98765.4321, "c": 0.0}
    for digits in (1, 4, 17):
        assert Policy(digits=digits).rounded(scores) == {k: float(f"{v:.{digits}g}") for k, v in scores.items()}


@pytest.mark.parametrize(
    ("repairs", "key", "where"),
    [
        ({"rename": {"diagnosis": "pressure"}}, "columns", {}),  # no way around the columns that a site lets out
        ({"pressure": "x + diagnosis"}, "columns", {}),
        ({"drop-rows": "diagnosis == 'x'"}, "columns", {}),
        ({"rename": {"age": "pressure", "pressure": "age"}, "missing": ["bmi"]}, "", {}),
        ({"pressure": "kPa -> mmHg", "age": "days -> years"}, "", {}),
        ({"pressure": "x ** 2"}, "least_count", {}),
        ({"bmi": "age / pressure ** 2"}, "", {}),
        ({"bmi": "age / pressure ** 2"}, "least_count", {"read": False}),
    ],
)
@pytest.mark.parametrize("site", ["its own", "*"])
def test_what_a_repair_reads_is_held_against_the_policy(site, repairs, key, where, agreed_to):
    policy = replace(OPEN, least_count=5, columns=["age", "pressure", "outcome"])
    name = agreed_to["about"].site if site != "*" else site
    columns = replace(agreed_to["join"].columns, target="outcome", site={name: repairs})
    assert refused(policy, agreed_to, join={"columns": columns}, **where) == key
