"""What a server may choose is a closed list: each field is bounded by somebody, and changed alone it is refused, or has
the same bytes, or is another release, counted and with other noise."""

from pathlib import Path
from typing import Annotated

import pytest
from direct import raw
from hospitals import ALL, at_sites
from pydantic import Field
from secured import SECURE, Secured, folder
from test_one_field import data, private, run, step
from test_private_sites import study

import chosen
from polyfed.base.settings import kebab, settings_of
from polyfed_sites import wire as m
from polyfed_sites.policy import Policy
from polyfed_sites.site import Site

assert data
PRIVATE = Policy(epsilon=1.0, most_joins=10**6, most_agreements=10**6)
TELLING = Policy(audit="quantiles", most_joins=10**6, most_agreements=10**6)


def test_every_field_of_the_wire_has_an_entry_and_one_without_is_found(monkeypatch):
    found = dict(chosen.walked())
    assert [key for key, entry in found.items() if entry is None] == []
    assert {*chosen.FIELDS} <= {*found}, "no entry for a field that is not there"
    assert len(found) > 80

    class Planted(m.Turn):
        kind: Annotated[str, Field()] = "planted"
        secretly: int = 0

    monkeypatch.setattr(chosen.m, "Request", m.Request | Planted)
    assert [key for key, entry in chosen.walked() if entry is None] == ["Planted.secretly"]


def test_every_bound_that_is_a_key_is_one_of_the_policy():
    keys = {kebab(s.name) for s in settings_of(Policy)}
    words = {"text", "protocol", "terms", "--allow", "as Join"}
    for key, entry in chosen.walked():
        for word in entry.bound.split(" (")[0].split(", "):
            assert word in keys | words, (key, word)


def others(value):
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return [*value, *value[:1]] or ["x"]
        case dict():
            return {**value, "x": "y"}
        case _:
            return 1


def counted(place: Path) -> int:
    """Lines of all that a site has written down of what it was asked."""
    names = ("rows/asked.jsonl", "privacy.ledger", "*/answered.jsonl", "*/sums.jsonl")
    return sum(len(path.read_text().split()) for name in names for path in place.glob(name))


def asked_twice(server, place, data, kind, change, policy=PRIVATE):
    """(the first answer, the second, lines that the second is counted by) of a site that has answered all before."""
    site, whole = Site("oslo", data / "oslo.csv", place / "oslo", ALL, policy=policy), []
    for earlier in server.asked():
        whole.append(site.answer(earlier.pack()))
        if earlier.head["kind"] == kind:
            before = counted(place)
            second = site.answer(change(earlier).pack())
            return earlier, raw(whole[-1]), raw(second), counted(place) - before, site
    raise AssertionError(kind)


def changes(head):
    """Every field of a question changed alone, those of the terms inside it too."""
    for name, value in head.items():
        if name not in ("kind", "format"):
            yield name, lambda q, n=name, v=value: q.saying(**{n: others(v)})
    for name, value in (head.get("joined") or {}).items():
        if name != "kind":
            yield f"joined.{name}", lambda q, n=name, v=value: q.saying(joined={**q.head["joined"], n: others(v)})


def heads(*kinds):
    """The questions of a run, as a first look at what there is to change."""
    join = [name for name in m.Join.model_fields if name != "kind"]
    for cls in kinds:
        kind = cls.model_fields["kind"].default
        yield from ((kind, name) for name in cls.model_fields if name != "kind")
        yield from ((kind, f"joined.{name}") for name in join if "joined" in cls.model_fields)


def end_of(where, first, second, lines):
    """How a question that was asked again with one field changed has ended: refused, the same bytes, or counted."""
    assert first.head["kind"] != "failed", where
    if second.head["kind"] == "failed":
        assert second.head["error"].startswith(("oslo: ", "the server: ")), where
        assert "bug" not in second.head["error"], where
        return "refused"
    if second.head | {"seconds": 0} == first.head | {"seconds": 0} and all(
        second.tensors[n].equal(t) for n, t in first.tensors.items()
    ):
        return "the same bytes"
    assert lines > 0, where
    return "counted"


@pytest.mark.parametrize(
    ("kinds", "policy", "tables", "top", "census"),
    [
        ((m.Join, m.Begin, m.Train, m.Evaluate, m.End), PRIVATE, private(), {}, (45, 2)),
        ((m.Pooled, m.Labels, m.Audit), TELLING, "", {"class-weights": "balanced"}, (50, 1)),
    ],
    ids=["training", "before it"],
)
def test_a_question_with_one_field_changed_is_refused_or_the_same_or_another_release(
    kinds, policy, tables, top, census, data, tmp_path
):
    """All pairs; the census of how they end is the page's."""
    server, _, end = run(tmp_path / "run", data, policy, tables, rounds=2, **top)
    assert not end
    ended = {"refused": 0, "the same bytes": 0, "counted": 0}
    for k, (kind, name) in enumerate(heads(*kinds)):
        place = tmp_path / str(k)

        def change(q, name=name):
            return dict(changes(q.head))[name](q)

        asked, first, second, lines, site = asked_twice(server, place, data, kind, change, policy)
        where = (kind, name, second.head)
        ended[how := end_of(where, first, second, lines)] += 1
        if how == "counted" and kind == "train":
            gap = step(asked, first, 48) - step(asked, second, 48)
            assert gap.abs().min() > 1e-6, where
        assert raw(site.answer(asked.pack())).head["kind"] == first.head["kind"], f"{where}: the site stays up"
    assert sum(ended.values()) > census[0]
    assert min(ended.values()) > census[1]


def test_a_sum_is_opened_for_no_question_but_the_one_that_was_answered(tmp_path):
    """Every field of a question that opens, changed alone while a run goes on: nothing else is opened."""
    sites, ended = Secured(tmp_path, folder(tmp_path / "data")), []
    answer = sites.answer

    def twice(name, message):
        question, first = raw(message), answer(name, message)
        if name == "oslo" and question.head["kind"] == "open":
            for field, change in changes(question.head):
                second = raw(answer(name, change(question).pack()))
                ended.append(end_of((field, second.head), raw(first), second, 0))
            assert answer(name, message) == first, "the site stays up"
        return first

    sites.answer = twice
    assert at_sites(study(tmp_path, SECURE), sites).status == "finished"
    assert {*ended} <= {"refused", "the same bytes"}
    assert len(ended) >= len(m.Open.model_fields) - 1


CONTEXTS = ("unchanged", "round", "vault", "agreement", "file version")


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_same_question_in_another_context_has_other_noise(context, data, tmp_path):
    server, _, end = run(tmp_path / "run", data, PRIVATE, private(), rounds=2)
    assert not end
    begin, train = server.first("begin"), server.first("train")
    sites = [Site("oslo", data / "oslo.csv", tmp_path / "a" / "oslo", ALL, policy=PRIVATE)]
    found = []
    for k in range(2):
        if k and context == "vault":
            sites.append(Site("oslo", data / "oslo.csv", tmp_path / "b" / "oslo", ALL, policy=PRIVATE))
        if k and context == "file version":
            path = data / "oslo.csv"
            path.write_text(
                path.read_text() + "".join(f"{40 + i}.5,{i}.0,{'ill' if i % 2 else 'well'}\n" for i in range(10))
            )
            sites.append(Site("oslo", path, tmp_path / "c" / "oslo", ALL, policy=PRIVATE))
        if k and context == "agreement":
            begin = begin.saying(joined=begin.head["joined"] | {"experiment": "another"})
        assert raw(sites[-1].answer(begin.pack())).head["kind"] == "begun"
        found.append(raw(sites[-1].answer(train.saying(t=k if context == "round" else 0).pack())))
    words = [next(iter(answer.tensors.values())) for answer in found]
    if context == "unchanged":
        assert words[0].equal(words[1])
    else:
        assert not words[0].eq(words[1]).any()
