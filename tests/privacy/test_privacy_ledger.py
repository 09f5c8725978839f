"""The ledger: nothing leaves that is not on disk, and nothing once the budget is spent."""

import json

import pytest

from polyfed.base.errors import RunError
from polyfed.privacy.accounts import rho_of
from polyfed.privacy.ledger import Budget, Entry, Ledger, Spent

BUDGET = Budget(2.0, 1e-5)
PART = rho_of(2.0, 1e-5) / 4  # four releases


def entry(k: int, site: str = "bern", rho: float = PART, digest: str = "a") -> Entry:
    return Entry(site, "hospitals", f"run {k}.0", digest, rho)


def test_a_spent_budget_is_refused_by_name(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for k in range(4):
        ledger.book([entry(k)], BUDGET)
    with pytest.raises(
        Spent, match=r"client 'bern': its privacy budget of epsilon 2 at delta 1e-05 is spent \(epsilon 2"
    ):
        ledger.book([entry(4)], BUDGET)
    ledger.book([entry(4, site="oslo")], BUDGET)


def test_it_is_over_runs_and_on_disk_before_book_returns(tmp_path):
    first = Ledger(tmp_path / "ledger")
    first.book([entry(0), entry(1)], BUDGET)
    assert len((tmp_path / "ledger").read_text().splitlines()) == 2
    second = Ledger(tmp_path / "ledger")
    second.book([entry(2)], BUDGET)
    first.book([entry(3)], BUDGET)
    with pytest.raises(Spent):
        first.book([entry(4)], BUDGET)
    assert Ledger(tmp_path / "ledger").spent("bern", "hospitals") == pytest.approx(4 * PART)


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


def test_it_is_for_its_user_alone(tmp_path):
    Ledger(tmp_path / "sub" / "ledger")
    assert (tmp_path / "sub" / "ledger").stat().st_mode & 0o777 == 0o600
