"""The ledger: nothing leaves that is not on disk, and nothing once the budget is spent."""

import json

import numpy as np
import pytest

from polyfed.base.errors import RunError
from polyfed_privacy.accounts import rho_of
from polyfed_privacy.ledger import Budget, Entry, Ledger, Spent

BUDGET = Budget(2.0, 1e-5)
PART = rho_of(2.0, 1e-5) / 4  # four releases


def entry(k: int, site: str = "bern", rho: float = PART, digest: str = "a") -> Entry:
    return Entry(site, "hospitals", f"run {k}.0", digest, rho)


def test_it_is_over_runs_and_on_disk_before_book_returns_and_a_spent_budget_is_refused_by_name(tmp_path):
    path = tmp_path / "sub" / "ledger"
    first = Ledger(path)
    assert path.stat().st_mode & 0o777 == 0o600, "for its user alone"
    first.book([entry(0), entry(1)], BUDGET)
    assert len(path.read_text().splitlines()) == 2
    second = Ledger(path)
    second.book([entry(2)], BUDGET)
    first.book([entry(3)], BUDGET)
    spent, said = (
        path.read_bytes(),
        r"client 'bern': its privacy budget of epsilon 2 at delta 1e-05 is spent \(epsilon 2",
    )
    for ledger in (first, Ledger(path)):
        with pytest.raises(Spent, match=said):
            ledger.book([entry(4)], BUDGET)
        ledger.book([entry(k) for k in range(4)], BUDGET)  # the same messages are answered again
        assert ledger.spent("bern", "hospitals") == pytest.approx(4 * PART)
    assert path.read_bytes() == spent
    first.book([entry(4, site="oslo")], BUDGET)


def test_the_same_message_again_costs_nothing_and_another_request_does(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for _ in range(10):
        ledger.book([entry(0)], BUDGET)
    assert ledger.spent("bern", "hospitals") == PART
    ledger.book([entry(0, digest="b")], BUDGET)
    assert ledger.spent("bern", "hospitals") == 2 * PART


def test_all_sites_of_a_message_are_booked_or_none(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    with pytest.raises(Spent, match="'oslo'"):
        ledger.book([entry(0), entry(0, site="oslo", rho=5 * PART)], BUDGET)
    assert ledger.spent("bern", "hospitals") == 0
    assert not (tmp_path / "ledger").read_text()


def test_a_line_that_a_kill_has_cut_is_no_release(tmp_path):
    """It was cut before it was flushed, and nothing of it had left."""
    path = tmp_path / "ledger"
    Ledger(path).book([entry(0)], BUDGET)
    with path.open("a") as f:
        f.write(json.dumps(entry(1)._asdict())[:-7])
    ledger = Ledger(path)
    assert ledger.spent("bern", "hospitals") == PART
    with path.open("a") as f:
        f.write(json.dumps(entry(1, site="bern" * 99)._asdict())[:-7])  # longer than what comes in its place
    ledger.book([entry(1)], BUDGET)
    assert Ledger(path).spent("bern", "hospitals") == 2 * PART


@pytest.mark.parametrize(
    "line", ["{}\n", "nonsense\n", '{"site": "a", "data": "b", "context": "c", "digest": "d", "rho": -1}\n']
)
def test_a_damaged_ledger_is_refused_and_not_forgotten(tmp_path, line):
    path = tmp_path / "ledger"
    Ledger(path).book([entry(0)], BUDGET)
    path.write_text(line + path.read_text())
    with pytest.raises(RunError, match="no release"):
        Ledger(path)


def test_an_older_ledger_put_back_is_noticed(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.book([entry(0)], BUDGET)
    before = path.read_text()
    ledger.book([entry(1)], BUDGET)
    path.write_text(before)
    with pytest.raises(RunError, match="shorter than it was"):
        ledger.book([entry(2)], BUDGET)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("limit", [None, 0.02])
def test_releases_that_come_to_the_budget_are_booked_and_not_a_ten_thousandth_more(at_once, limit):
    """However it is cut into releases, and whether they come together or one by one."""
    most = rho_of(2.0, 1e-5) if limit is None else limit
    for parts in (np.ones(1), np.ones(7), np.random.default_rng(0).random(40) + 0.01):
        for share, fits in ((1.0, True), (1.0001, False), (1.05, False), (3.0, False)):
            ledger, left = Ledger(), False
            entries = [entry(k, rho=share * most * p / parts.sum()) for k, p in enumerate(parts)]
            for some in [entries] if at_once else [[e] for e in entries]:
                try:
                    ledger.book(some, BUDGET, limit)
                except Spent:
                    left = True
            assert left != fits, f"{share} of the budget in {len(parts)} releases"
            assert ledger.spent("bern", "hospitals") <= most * (1 + 1e-8)


def test_a_release_is_another_one_if_any_part_of_it_differs_and_each_site_has_its_own_data():
    one = entry(0)
    for part, other in {"site": "oslo", "data": "other rows", "context": "run 0.1", "digest": "b"}.items():
        ledger, another = Ledger(), one._replace(**{part: other})
        ledger.book([one], BUDGET)
        ledger.book([another, another, one], BUDGET)
        own = part in ("site", "data")
        assert ledger.spent(one.site, one.data) == (PART if own else 2 * PART), part
        assert ledger.spent(another.site, another.data) == (PART if own else 2 * PART), part


def test_rounds_are_counted_once_whatever_their_exchanges_and_for_each_run_by_itself():
    ledger = Ledger()
    ledger.book(
        [Entry("bern", "d", f"run {t}.{phase}", "a", PART / 99) for t in (0, 1, 11) for phase in (0, 1)], BUDGET
    )
    ledger.book([Entry("bern", "d", "other 0.0", "a", PART / 99)], BUDGET)
    assert [ledger.rounds("bern", "d", run) for run in ("run", "other", "ru")] == [3, 1, 0]
    assert [ledger.rounds(*of, "run") for of in (("oslo", "d"), ("bern", "e"))] == [0, 0]
