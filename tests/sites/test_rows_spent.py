"""A row is the same row in every version of its file, and what is counted or spent is counted and spent for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from direct import raw
from hospitals import ALL, OPEN
from test_one_field import NAMES, private, run

from polyfed_privacy.ledger import Ledger
from polyfed_sites.policy import Policy
from polyfed_sites.rows import Book
from polyfed_sites.running import LEDGER
from polyfed_sites.site import Site

ROWS = 60


def written(folder, change=lambda lines: lines, end="\n"):
    folder.mkdir(exist_ok=True)
    for k, name in enumerate(NAMES):
        rng = np.random.default_rng(k)
        cells = [f"{rng.normal(60, 9):.1f},{rng.normal():.2f},{'ill' if i % 2 else 'well'}" for i in range(ROWS)]
        (folder / f"{name}.csv").write_bytes(end.join(["age,mark,outcome", *change(cells), ""]).encode())
    return folder


def more(lines):
    """A monthly export: ten new patients."""
    return [*lines, *(f"{30 + i}.5,{i}.25,{'ill' if i % 2 else 'well'}" for i in range(10))]


VERSIONS = {
    "an empty last line": lambda place: written(place, lambda lines: [*lines, ""]),
    "another order": lambda place: written(place, lambda lines: lines[::-1]),
    "CRLF": lambda place: written(place, end="\r\n"),
    "a trailing zero": lambda place: written(place, lambda lines: [line.replace(",", "0,", 1) for line in lines]),
    "ten new patients": lambda place: written(place, more),
    "columns in another order": lambda place: swapped(written(place)),
}


def swapped(folder):
    for path in folder.iterdir():
        lines = [line.split(",") for line in path.read_text().splitlines()]
        path.write_text("\n".join(",".join([b, a, c]) for a, b, c in lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "change",
    [pytest.param(made, id=name, marks=pytest.mark.daily if "new" in name else ()) for name, made in VERSIONS.items()],
)
def test_no_version_of_a_file_has_a_new_budget_for_its_old_rows(change, tmp_path):
    policy, data = Policy(epsilon=1.0), written(tmp_path / "data")
    assert run(tmp_path / "run", data, policy, private(epsilon=1.0))[2] == ""
    ledger = tmp_path / "run" / "vaults" / LEDGER
    booked = ledger.read_text()
    change(data)
    (tmp_path / "run" / "vaults" / "oslo").rename(tmp_path / "run" / "vaults" / "first")
    (tmp_path / "run" / "vaults" / "bern").rename(tmp_path / "run" / "vaults" / "second")
    (tmp_path / "run" / "run").rename(tmp_path / "out")
    server, _, end = run(tmp_path / "run", data, policy, private(epsilon=1.0))
    assert "oslo: client 'oslo': its privacy budget of epsilon 1 at delta 1e-05 is spent (epsilon 1 so far)" in end
    assert "train" not in {m.head["kind"] for m in server.asked()}
    assert ledger.read_text() == booked


def test_what_an_older_version_has_booked_counts_for_every_row(tmp_path):
    book = Book(tmp_path, "bern")
    rows = book.keep(np.arange(30, dtype=np.uint64))
    others = book.keep(np.arange(20, 50, dtype=np.uint64))
    assert book.heaviest({rows: 0.5, others: 0.25}, rows) == 0.75
    assert book.heaviest({rows: 0.5}, book.keep(np.arange(30, 40, dtype=np.uint64))) == 0
    assert book.heaviest({"a digest of bytes": 0.5}, rows) == 0.5
    assert Ledger(tmp_path / LEDGER, book.heaviest).spent("bern", rows) == 0


def test_a_cut_may_change_where_no_sum_is_then_of_a_few_rows(tmp_path):
    """Whatever sums are subtracted from each other: in all 2^n sets made of those that are answered, none is small."""
    book, rng = Book(tmp_path, "bern"), np.random.default_rng(0)
    rows, allowed = rng.integers(0, 2**63, size=120, dtype=np.uint64), []
    for k in range(40):
        part = rng.permutation(120)[: 96 - k % 5]
        name = book.keep(rows[part])
        if book.differs([name], 5):
            book.note("train", f"cut {k}", name)
            allowed.append(np.isin(np.arange(120), part))
    assert 1 < len(allowed) < 8
    _, sizes = np.unique(np.array(allowed), axis=1, return_counts=True)
    assert sizes.min() >= 5
    assert book.differs([book.keep(rows[allowed[0]])], 5), "asked again"


def joined(site, asked, **more):
    return raw(site.answer(asked.saying(**more).pack())).head


def test_parts_that_differ_by_a_few_rows_are_refused_by_the_key_and_those_asked_before_are_not(tmp_path):
    data = written(tmp_path / "data")
    server, _, end = run(tmp_path / "run", data, Policy())
    assert not end
    asked, vault = server.first("join"), tmp_path / "run" / "vaults"
    site = Site("oslo", data / "oslo.csv", vault / "again", ALL)
    nested = [joined(site, asked, test=(12 - k) / ROWS) for k in range(1, 5)]
    assert [m["kind"] for m in nested] == ["failed"] * 4
    said = "oslo: is asked for parts that differ from earlier ones by too few rows (with [data] seed = 3, test"
    assert nested[0]["error"].startswith(said)
    assert "its policy has least-count = 5" in nested[0]["error"]
    assert joined(site, asked)["kind"] == "joined", "the site stays up"
    written(data, lambda lines: lines[:-1])
    assert joined(Site("oslo", data / "oslo.csv", vault / "less", ALL), asked)["error"].startswith(said)
    written(data, more)
    grown = joined(Site("oslo", data / "oslo.csv", vault / "more", ALL), asked)
    assert grown["counts"] == {"train": 58, "test": 12, "validation": None}, "few new ones are trained on"


LIMITS = {
    "most_joins": (3, "join 4 on the same rows"),
    "most_agreements": (2, "3 agreements on the same rows"),
    "most_cells": (9, "10 sums, counts and scores on the same rows"),
}


@pytest.mark.parametrize(("key", "case"), LIMITS.items(), ids=LIMITS)
def test_joins_agreements_and_cells_are_counted_over_versions_and_vaults(key, case, tmp_path):
    """Terms that differ in a learning rate; a version with an empty line or in another order counts on."""
    data, (most, line) = written(tmp_path / "data"), case
    server, _, _ = run(tmp_path / "run", data, OPEN, **{"evaluate-every": 1})
    policy, said = Policy(**{key: most}), []
    for k in range(6):
        written(data, lambda lines, k=k: [*lines, ""] if k % 2 else lines[::-1])
        site = Site("oslo", data / "oslo.csv", tmp_path / "counted" / f"vault{k}", ALL, policy=policy)
        joined_for = server.first("join").head | {"algorithm": {"name": "fedavg", "lr": 0.1 + k}}
        begin = server.first("begin").saying(joined={k: v for k, v in joined_for.items() if k != "format"})
        said.append(raw(site.answer(begin.pack())).head)
        for asked in server.asked() if said[-1]["kind"] == "begun" else []:
            if asked.head["kind"] == "evaluate" and asked.head["base"] == [-1, -1]:
                said.append(raw(site.answer(asked.pack())).head)
    errors = [head.get("error") for head in said if head["kind"] == "failed"]
    assert errors
    assert errors[0] == f"oslo: is asked for {line}; its policy has {key.replace('_', '-')} = {most}"


def test_sites_that_begin_at_once_in_one_folder_have_one_key_and_count_on(tmp_path):
    """Their vaults lie side by side: nobody's draft is in another's way, and no count is lost."""
    data, begin = written(tmp_path / "data") / "oslo.csv", threading.Barrier(8)

    def site(k):
        begin.wait()
        book = Book(tmp_path / "vaults", "oslo")
        rows, counts = book.keep(np.array([*book.identify(data, None).values()], dtype=np.uint64)), []
        for i in range(5):
            book.spend("join", f"{k} {i}", rows, counts.append)
        return book.key(), counts

    with ThreadPoolExecutor(8) as pool:
        keys, counts = zip(*pool.map(site, range(8)), strict=True)
    assert len(set(keys)) == 1
    assert sorted(n for some in counts for n in some) == [*range(1, 41)]
    assert not [*(tmp_path / "vaults" / "rows").glob(".*")]
