"""Before the first round: what does not fit is refused in one line, and nothing leaves that was not allowed."""

import json

import numpy as np
import pytest
from direct import raw
from hospitals import (
    ALL,
    CLIENT,
    FEDAVG,
    NAMES,
    OPEN,
    POOLED,
    Between,
    Sites,
    at_sites,
    experiment,
    on_one_machine,
    same,
    study,
)

from polyfed.base.errors import ConfigError, PolyfedError, Refusal
from polyfed_sites.consent import Consent
from polyfed_sites.site import Site
from polyfed_sites.wire import FORMAT


def changed(data, name, change):
    path = data / f"{name}.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join(change(k, row)) for k, row in enumerate(lines)) + "\n")


MISMATCHES = {
    "a column more": (
        lambda k, row: [*row[:2], "height" if k == 0 else f"{160 + k % 9}", *row[2:]], "",
        "site 'bern', site 'oslo': no column 'height', which site 'riga' has",
    ),
    "names of people": (
        lambda k, row: [*row[:3], "pain" if k == 0 else f"person {k}", row[4]], "",
        r"site 'riga': column 'pain' holds texts that are all distinct, so they may identify rows and are not sent",
    ),
    "a gap where none may be": (
        lambda k, row: ["" if k == 2 else row[0], *row[1:]], 'drop = ["pressure"]\nmissing = "refuse"',
        r"site 'riga', column 'age': found 'an empty cell', a gap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "columns", "said"), MISMATCHES.values(), ids=MISMATCHES)
def test_files_that_do_not_fit_are_refused_naming_site_and_column(change, columns, said, tmp_path):
    file, data, sites = study(tmp_path, columns=f"{CLIENT}\n{columns}")
    changed(data, "riga", change)
    with pytest.raises(PolyfedError, match=said) as error:
        at_sites(file, sites)
    assert str(tmp_path) not in str(error.value)
    assert not [*(tmp_path / "vaults").glob("[!r]*/*")], "no vault, but what was asked of the rows"


def arrays(place, of):
    """A folder of npz files of six samples; of: a site's name -> its inputs"""
    place.mkdir(exist_ok=True)
    for name in NAMES:
        np.savez(place / f"{name}.npz", x=of(name), y=np.arange(6) % 2)
    return place


def test_other_kinds_of_files_are_refused(tmp_path):
    file, data, sites = study(tmp_path, columns="")
    arrays(data, lambda name: np.zeros((6, 3 if name == "oslo" else 4), np.float32))
    (data / "riga.csv").unlink()
    sites.data = {name: data / f"{name}.{'npz' if name == 'riga' else 'csv'}" for name in NAMES}
    with pytest.raises(PolyfedError, match="site 'riga': has an npz file, site 'bern' has a CSV file"):
        at_sites(file, sites)
    sites = Sites(tmp_path, data)
    sites.data = {name: data / f"{name}.npz" for name in NAMES}
    with pytest.raises(PolyfedError, match=r"site 'oslo': inputs are of shape \[3\] per sample, those of 'bern' \[4\]"):
        at_sites(file, sites)


def test_arrays_and_their_own_test_samples(tmp_path):
    rng, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    for k, name in enumerate(NAMES):
        x, y = rng.integers(0, 256, (12 + k, 4, 4)).astype(np.uint8), rng.integers(1, 4, 12 + k)
        np.savez(data / f"{name}.npz", x=x, y=np.r_[1, 2, 3, y[3:]], x_test=x[:5], y_test=y[:5])
    file, sites = experiment(tmp_path / "study.toml", FEDAVG, "validation-fraction = 0.2"), Sites(tmp_path, data)
    here, there = on_one_machine(file, data), at_sites(file, sites)
    same(here, there, sites)
    assert np.allclose(here.final["test"]["loss"], there.final["test"]["loss"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scope", ["client", "pooled"])
def test_arrays_at_sites_are_not_standardised(tmp_path, scope):
    data = arrays(tmp_path / "data", lambda name: np.eye(6, 4, dtype=np.float32))
    file = experiment(tmp_path / "study.toml", FEDAVG, f'[columns]\nstandardise = "{scope}"')
    with pytest.raises(PolyfedError, match=f"columns.standardise: found '{scope}', expected none for npz files"):
        at_sites(file, Sites(tmp_path, data))
    assert not [*(tmp_path / "vaults").glob("[!r]*/*")], "no vault, but what was asked of the rows"


def test_another_name_or_version_of_torch_polyfed_or_its_messages_is_refused_at_either_end(tmp_path):
    """That of messages before the head is read: it may have other fields in another version."""
    file, data, sites = study(tmp_path)
    then = f"found messages of format {FORMAT + 1}, expected {FORMAT}; install the same version of polyfed at the"

    def other(name, question, reply=None):
        message = reply or question
        return message.saying(format=FORMAT + 1, more=1) if name == "riga" else message

    def old(**versions):
        return lambda name, question: question.saying(versions=question.head.get("versions", {}) | versions)

    for wire, said in (
        (Between(sites, asked=other), rf"\(riga: the server: {then} server and at every site\)"),
        (Between(sites, other), rf"\(riga: {then} server and at every site\)"),
        (Between(sites, asked=old(polyfed="0.9")), r"\(bern: has polyfed \S+, the server has 0\.9; install the same"),
        (Between(sites, asked=old(torch="1.0")), r"\(bern: has torch .*, the server has 1.0; install the same; oslo"),
    ):
        with pytest.raises(PolyfedError, match=said):
            at_sites(file, sites, wire)
    sites.members["riga"] = Site("rome", data / "riga.csv", tmp_path / "v", ALL, policy=OPEN)
    with pytest.raises(PolyfedError, match=r"\(riga: calls itself 'rome'\)"):
        at_sites(file, sites)


def test_a_method_and_a_model_of_a_package_run_where_every_site_has_its_version(tmp_path, put):
    """The same bits as on one machine; another version, or none, is refused naming site, package and versions."""
    file, data, sites = study(tmp_path, 'name = "halfway"', f'{CLIENT}\n[model]\nname = "tanh"', metrics="hits")
    put()
    same(on_one_machine(file, data), at_sites(file, sites), sites)

    def other(name, question):
        if question.head["kind"] == "over":
            return question
        versions = question.head["versions"]
        assert versions.keys() == {"polyfed", "torch", "acme-fed"}
        return question.saying(versions=versions | ({"acme-fed": "0.9"} if name == "riga" else {"other": "2.0"}))

    again, said = Sites(tmp_path, data), r"riga: has acme-fed 1\.0, the server has 0\.9; install the same"
    with pytest.raises(PolyfedError, match=said) as refused:
        at_sites(file, again, Between(again, asked=other), out="again")
    assert "oslo: other is not installed, the server has 2.0; install the same" in str(refused.value)


@pytest.mark.parametrize(
    ("method", "data", "top", "said"),
    [
        ('name = "own-trees"', "", {}, "own-trees is a yardstick"),
        (FEDAVG, "", {"seeds": 3}, "found 1 methods and 3 seeds, expected one of each"),
        (FEDAVG, '[schedule]\nname = "asynchronous"\ndelays = "uniform:0,1"', {}, "real sites take the time they take"),
        (FEDAVG, "", {"portable": True}, "portable: not with sites"),
        (FEDAVG, '[attack]\nname = "sign-flip"', {}, "attack: not with sites"),
    ],
)
def test_experiments_that_sites_cannot_run_are_refused(method, data, top, said, tmp_path):
    file, _, sites = study(tmp_path, method, f"{CLIENT}\n{data}", **top)
    with pytest.raises(ConfigError, match=said):
        at_sites(file, sites)


# consent


@pytest.mark.parametrize(
    ("method", "columns", "top", "what"),
    [
        (FEDAVG, "", {}, "pooled"),
        ('name = "pacfl"', CLIENT, {}, "signature"),
        (FEDAVG, CLIENT, {"class-weights": "balanced"}, "labels"),
    ],
)
def test_what_is_made_of_samples_needs_to_be_allowed(method, columns, top, what, tmp_path):
    file, data, sites = study(tmp_path, method, columns, **top)
    sites.consent["oslo"] = Consent(ALL.allow - {what})
    with pytest.raises(PolyfedError, match=rf"oslo: '{what}' is made of samples \(.*not allowed here; --allow {what}"):
        at_sites(file, sites)
    text = next(line for line in sites.lines if line.startswith("What leaves the site 'oslo'"))
    assert "MADE OF SAMPLES" in text
    assert f"not allowed, so the site does not join: {what}" in text
    sites.consent["oslo"] = Consent(frozenset({what}))
    again = Sites(tmp_path, data, Consent(frozenset({what})))
    same(on_one_machine(file, data), at_sites(file, again, resume=True), again)


def test_nothing_leaves_a_site_whose_operator_says_no(tmp_path):
    file, _, sites = study(tmp_path, 'name = "scaffold"')
    shown, wire = [], Between(sites)
    sites.consent["bern"] = Consent(ask=lambda text: bool(shown.append(text)))
    with pytest.raises(PolyfedError, match=r"\(bern: its operator did not consent, so nothing was sent\)"):
        at_sites(file, sites, wire)
    assert {m.head["kind"] for m in wire.said("bern")} == {"failed", "stored"}
    assert not any(m.tensors for m in wire.said("bern"))
    words = ("train 17, test 4", "values of pain: mild, severe", "dw: float32 [12], 48 bytes: the change of the model")
    assert all(word in shown[0] for word in words)


def test_metrics_leave_as_the_operators_say(tmp_path):
    file, data, sites = study(tmp_path)
    own = at_sites(file, Sites(tmp_path / "own", data)).final["train"]["loss"]
    sites.consent |= {"bern": Consent(metrics="none"), "oslo": Consent(metrics="own")}
    sites.consent["riga"] = Consent(metrics="aggregate")
    found = at_sites(file, sites).final["train"]["loss"]
    assert np.isnan(found[[0, 2]]).all(), "one site alone is no aggregate"
    assert found[1] == own[1]
    lines = [json.loads(line) for line in (tmp_path / "vaults" / "bern" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] == own[0] or lines[-1]["split"] != "train"
    again = Sites(tmp_path / "again", data)
    again.consent |= {name: Consent(metrics="aggregate") for name in ("bern", "riga")}
    found = at_sites(file, again).final["train"]["loss"]
    assert found[0] == found[2] == pytest.approx((own[0] + own[2]) / 2, abs=1e-12)


def test_a_server_cannot_search_a_file_by_asking_for_sums(tmp_path):
    """What medians, means and deviations take, and no more; the same questions again are answered again."""
    file, data, sites = study(tmp_path, columns=f'{POOLED}\nmissing = "median"')
    wire = Between(sites)
    at_sites(file, sites, wire)
    asked = [m for m in wire.asked() if m.head["kind"] == "pooled"]
    assert len(asked) <= 12
    assert not any(sites.error("oslo", m) for m in asked)
    first, at = asked[0], asked[0].tensors["at"]
    refused = [sites.error("oslo", first._replace(tensors={"at": at + k + 1})) for k in range(9)]
    sites.members.pop("oslo")
    for error in (refused[-1], sites.error("oslo", first._replace(tensors={"at": at + 9}))):
        assert "is asked for more sums than it has agreed to" in error, "also when it was started again"
    fresh = Sites(tmp_path / "fresh", data)
    fresh.members["oslo"] = Site("oslo", data / "oslo.csv", tmp_path / "v", ALL, policy=OPEN)
    assert "more sums" in fresh.error("oslo", first._replace(tensors={"at": at.repeat(2, 1)}))


# consent binds what comes after it


@pytest.fixture
def heard(tmp_path):
    """(a new site for oslo's file, what oslo was sent in a run): its column age is dropped, and never has a gap."""

    def make(columns="", consent=ALL, **top):
        file, data, sites = study(tmp_path, columns=f'{POOLED}\nmissing = "median"\n{columns}', **top)
        wire = Between(sites)
        at_sites(file, sites, wire)
        return Site("oslo", data / "oslo.csv", tmp_path / "v", consent, policy=OPEN), wire.asked()

    return make


def said(member, message):
    return raw(member.answer(message.pack())).head.get("error", "")


def first(messages, **head):
    return next(m for m in messages if m.head.items() >= head.items())


def test_a_site_whose_operator_says_no_answers_nothing_that_follows(heard):
    member, sent = heard(consent=Consent(ALL.allow, ask=lambda text: False), **{"class-weights": "balanced"})
    for message in sent:
        assert said(member, message)
    assert "did not consent" in said(member, first(sent, kind="pooled"))
    assert "did not consent" in said(member, first(sent, kind="labels"))


def test_sums_and_labels_need_to_have_been_in_the_text_and_values_are_counted_in_columns_with_gaps_alone(heard):
    member, sent = heard(**{"class-weights": "balanced"})
    counts = first(sent, kind="pooled", what="counts")
    for message in (counts, first(sent, kind="labels")):
        joined = message.head["joined"] | {"needs": []}
        assert "which it has not joined for" in said(member, message.saying(joined=joined))
    assert not said(member, counts)
    assert "asked to count values of 'age', a column without gaps" in said(member, counts.saying(columns=["age"]))


def test_nothing_is_made_of_a_column_that_is_dropped(heard):
    member, sent = heard('drop = ["age"]')
    for message in (first(sent, kind="pooled", what="sums"), first(sent, kind="begin")):
        preparation = message.head["settled"]["preparation"] | {"sites": {}}
        inputs = [{"name": "age", "values": None, "gap": False}, *preparation["inputs"]]
        settled = message.head["settled"] | {"preparation": preparation | {"inputs": inputs}}
        error = said(member, message.saying(settled=settled))
        assert "with column 'age', which it was told is dropped" in error


def test_a_run_begins_with_what_was_consented_to(heard):
    """Other terms are asked about anew, and there is no place for them but where the operator reads them."""
    shown = []
    site, sent = heard(consent=Consent(ALL.allow, ask=lambda text: not shown.append(text) and len(shown) == 1))
    assert not said(site, first(sent, kind="join"))
    begin = first(sent, kind="begin")
    for other in (
        {"algorithm": {"name": "scaffold"}},
        {"model": {"name": "mlp", "hidden": [64]}},
        {"training": begin.head["joined"]["training"] | {"local-epochs": 9}},
    ):
        assert "did not consent" in said(site, begin.saying(joined=begin.head["joined"] | other))
        (key,) = other
        assert f"it has {key}, which this version does not know" in said(site, begin.saying(**other))
    assert len(shown) == 4
    assert not said(site, begin)


def test_the_text_has_the_shapes_of_a_model_that_is_left_open(tmp_path):
    """It is the default for the site's own samples: for images, the lenet."""
    rng = np.random.default_rng(0)
    sites = Sites(tmp_path, arrays(tmp_path / "data", lambda name: rng.normal(size=(6, 12, 12)).astype(np.float32)))
    run = at_sites(experiment(tmp_path / "study.toml", FEDAVG, rounds=1, **{"evaluate-every": 0}), sites)
    shown = next(line for line in sites.lines if line.startswith("What leaves the site 'riga'"))
    assert f"w: float32 [{run.trained.task.p}]" in shown


def test_another_backbone_at_one_site_is_refused_by_its_name(tmp_path):
    """A frozen tensor of riga's is another; its start, which is what it trains, is the server's."""
    model = '[model]\nname = "mlp"\nhidden = [5]\nadapter = "lora:r=2"'
    file, _, sites = study(tmp_path, columns=f"{CLIENT}\n{model}")

    def said(name, question, reply):
        if name == "riga" and reply.head["kind"] == "begun":
            reply.head["frozen"]["1.base.weight"] = "0" * 16
        return reply

    with pytest.raises(PolyfedError, match=r"riga: its frozen 1\.base\.weight is not that of the server's model"):
        at_sites(file, sites, Between(sites, said))


def test_a_dry_run_answers_nothing_also_where_the_site_would_not_join(heard):
    """A refusal would end the run for the others, which wait until this site's operator has read the text."""
    shown = []
    site, sent = heard(consent=Consent(ask=lambda text: bool(shown.append(text)), dry=True))
    for message in sent:
        with pytest.raises(Refusal, match=r"not allowed here; --allow pooled|--dry-run takes a new one"):
            site.answer(message.pack())
    assert not shown
    assert not (site.vault / "vault.json").exists()
