"""Bytes are counted by hand here."""

import numpy as np
import torch

from polyfed.core.algorithm import Down
from polyfed.core.ledger import Ledger, down_bytes, row_bytes


def test_a_message_weighs_its_elements():
    up = {"w": torch.zeros(5, 7), "flag": torch.zeros(5, dtype=torch.bool), "id": torch.zeros(5, 2, dtype=torch.int64)}
    assert row_bytes(up) == 7 * 4 + 1 + 2 * 8
    down = Down(shared={"w": torch.zeros(7, dtype=torch.float64), "a": torch.zeros(())}, each={"u": torch.zeros(3, 2)})
    assert down_bytes(down) == 7 * 8 + 4 + 2 * 4
    assert row_bytes({}) == down_bytes(Down()) == 0


def ledger() -> Ledger:
    book = Ledger()
    zero, late = np.zeros(2), np.array([3])
    book.record(
        0, np.array([0, 2]), np.array([1, 1]), np.array([10, 10]), np.array([3, 4]), zero, np.array([0.5, 0.25])
    )
    book.record(1, np.array([2]), np.array([2]), np.array([20]), np.array([5]), late, np.array([0.125]))
    return book


def test_rows_totals_and_clients():
    book = ledger()
    frame = book.frame()
    assert frame["client"].tolist() == [0, 2, 2]
    assert frame["exchanges"].tolist() == [1, 1, 2]
    assert frame["staleness"].tolist() == [0, 0, 3]
    assert frame["down_bytes"].dtype == "int64"
    assert book.totals() == (40, 12)
    per = book.by_client(4)
    assert per["rounds"].tolist() == [1, 0, 2, 0]
    assert per["down_bytes"].tolist() == [10, 0, 30, 0]
    assert per["up_bytes"].tolist() == [3, 0, 9, 0]


def test_it_is_saved_and_continued():
    """Also by one that has been used: what it held is gone."""
    book, other = ledger(), ledger()
    other.restore(book.tensor())
    for b in (book, other):
        b.record(2, np.array([1]), np.array([1]), np.array([2**40]), np.array([1]), np.array([0]), np.array([0.0]))
    assert other.frame().equals(book.frame())
    assert other.totals() == (40 + 2**40, 13)
