"""Random tables by every door: one federation, or a refusal by each; and what a workbook or a table may hide."""

import datetime
import os
import sqlite3
from decimal import Decimal

import numpy as np
import openpyxl
import pandas as pd
import polars as pl
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import PolyfedError

DAY = datetime.datetime(2024, 1, 1)
KINDS = {
    "int": lambda r, n: r.integers(-5, 6, n).tolist(),
    "long": lambda r, n: (2**53 + r.integers(0, 12, n)).tolist(),
    "float": lambda r, n: [float(f"{v:.6g}") for v in r.normal(size=n) * 10.0 ** r.integers(-12, 13)],
    "short": lambda r, n: r.normal(size=n).astype(np.float32).tolist(),
    "bool": lambda r, n: (r.random(n) < 0.5).tolist(),
    "text": lambda r, n: r.choice(["a", "B", " b ", "Ärzte", "A\u0308rzte", "日本", "x,y", 'q"q', "a\nb"], n).tolist(),
    "codes": lambda r, n: r.choice(["01", "1", "1.0", "2", "007"], n).tolist(),
    "truth": lambda r, n: r.choice(["true", "TRUE", "False"], n).tolist(),
    "gaps": lambda r, n: r.choice(["NA", "n/a", "-", "1", "2"], n).tolist(),
    "date": lambda r, n: [(DAY + datetime.timedelta(int(k))).date() for k in r.integers(0, 9, n)],
    "time": lambda r, n: [DAY + datetime.timedelta(hours=int(k)) for k in r.integers(0, 90, n)],
    "decimal": lambda r, n: [Decimal(int(k)).scaleb(-3) for k in r.integers(0, 9999, n)],
    "constant": lambda r, n: [3] * n,
    "none": lambda r, n: [None] * n,
}
DTYPES = {"int": "Int64", "long": "Int64", "bool": "boolean", "short": "Float32", "float": "float64"}


def columns_of(seed):
    """Lists of Python's values by the column's name."""
    r = np.random.default_rng(seed)
    n, made = int(r.integers(16, 40)), {}
    rare = np.array([0.2 if kind in ("date", "time") else 1 for kind in KINDS])  # which are refused
    for kind in r.choice([*KINDS], int(r.integers(1, 4)), replace=False, p=rare / rare.sum()):
        values = KINDS[kind](r, n)
        made[str(kind)] = [None if r.random() < 0.15 else v for v in values] if r.random() < 0.5 else values
    return {"site": [*"aaaabbbb", *r.choice(["a", "b"], n - 8)], **made, "y": [["yes", "no"][k % 2] for k in range(n)]}


def doors(columns, folder):
    """(name, a call that gives the federation) by every door that holds such values."""
    table = pd.DataFrame({k: pd.Series(v, dtype=DTYPES.get(k, object)) for k, v in columns.items()})
    table.to_csv(folder / "t.csv", index=False)
    table.to_parquet(folder / "t.parquet")
    frame = pl.from_pandas(table)
    files = {"csv": "t.csv", "parquet": "t.parquet"}
    if "short" not in columns:  # which others keep as a long one
        table.to_excel(folder / "t.xlsx", index=False)
        with sqlite3.connect(folder / "t.db") as database:
            known = (int, float, str, type(None))
            rows = zip(*([v if type(v) in known else str(v) for v in c] for c in columns.values()), strict=True)
            database.execute(f"create table t ({', '.join(columns)})")
            database.executemany(f"insert into t values ({', '.join('?' * len(columns))})", rows)
        files |= {"xlsx": "t.xlsx", "sql": f"sqlite:///{folder / 't.db'}"}
    for name, file in files.items():
        how = {"query": "select * from t"} if name == "sql" else {}
        place = file if name == "sql" else folder / file
        yield name, lambda p=place, h=how: pf.data.load(p, by="site", target="y", **h).partition(seed=1)
    for name, one in {"pandas": table, "polars": frame, "arrow": frame.to_arrow()}.items():
        yield name, lambda one=one: pf.data.from_frames(one, "y", site="site", seed=1)


def outcome(call):
    """The federation, or the words of its refusal."""
    try:
        return call()
    except PolyfedError as e:
        return str(e)


def agree(first, other, where):
    assert isinstance(first, str) == isinstance(other, str), (where, first, other)
    if isinstance(first, str):
        column, same = (words.partition("holds")[0].rpartition("column")[2] for words in (first, other))
        assert column == same, where
        return
    assert (first.names, first.meta["inputs"]) == (other.names, other.meta["inputs"]), where
    for part in ("train", "test"):
        assert torch.equal(getattr(first, part).x, getattr(other, part).x), where
        assert torch.equal(getattr(first, part).y, getattr(other, part).y), where


def test_random_tables_are_one_federation_by_every_door(tmp_path):
    (folder := tmp_path / "doors").mkdir()
    taken = 0
    for seed in range(6 * int(os.environ.get("POLYFED_FUZZ", "1"))):
        (_, call), *others = doors(columns := columns_of(seed), folder)
        first = outcome(call)
        taken += not isinstance(first, str)
        for name, other in others:
            found = outcome(other)
            if name == "xlsx" and "long" in columns:
                assert "a workbook keeps 15 digits" in found
            else:
                agree(first, found, (seed, name))
        (folder / "t.db").unlink(missing_ok=True)
    assert taken > 2


def workbook(path, change):
    book = openpyxl.Workbook()
    for row in (["site", "age", "y"], *(["ab"[k % 2], 30 + k % 7, "no" if k % 3 else "yes"] for k in range(40))):
        book.active.append(row)
    change(book, book.active)
    book.save(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda book, sheet: sheet.merge_cells("B3:B5"), "found the merged cells B3:B5"),
        (lambda book, sheet: sheet.merge_cells("A1:B1"), "found the merged cells A1:B1"),
        (lambda book, sheet: sheet.cell(4, 2, "=30+1"), "line 4, column 2: found the formula '=30+1' without"),
        (lambda book, sheet: sheet.cell(5, 2, 10**16), "line 5, column 'age': found 10000000000000000, and a workbook"),
        (lambda book, sheet: sheet.cell(1, 4, "age"), "two columns are called 'age'"),
        (lambda book, sheet: sheet.cell(9, 4, 1), "column 4 has no name"),
        (lambda book, sheet: book.create_sheet("more").cell(1, 1, "x"), "found sheets Sheet, more, expected one"),
        (lambda book, sheet: sheet.delete_rows(2, 99), "t.xlsx: found a header and no rows"),
        (lambda book, sheet: sheet.delete_rows(1, 99), "t.xlsx: found no cell"),
        (lambda book, sheet: sheet.insert_rows(1, 2), None),
        (lambda book, sheet: book.create_sheet("empty"), None),
    ],
)
def test_what_a_workbook_hides_is_said(tmp_path, change, said):
    workbook(tmp_path / "t.xlsx", change)
    found = outcome(lambda: pf.data.load(tmp_path / "t.xlsx", by="site", target="y").partition())
    if said is None:
        workbook(tmp_path / "plain.xlsx", lambda book, sheet: None)
        agree(found, pf.data.load(tmp_path / "plain.xlsx", by="site", target="y").partition(), "plain")
    else:
        assert said in found
        assert "\n" not in found


def test_names_of_columns_are_those_of_a_file(tmp_path):
    table = pd.DataFrame({" age ": range(20), "site": [*"ab"] * 10, "y": ["u", "u", "v", "v"] * 5}).set_index("site")
    table.to_csv(tmp_path / "t.csv")
    table.to_parquet(tmp_path / "t.parquet")
    first = pf.data.load(tmp_path / "t.csv", by="site", numbers=["age"], target="y").partition()
    agree(first, pf.data.load(tmp_path / "t.parquet", by="site", numbers=["age"], target="y").partition(), "parquet")
    table = table.reset_index()
    agree(first, pf.data.from_frames(table, "y", site="site", numbers=["age"]), "frame")
    for name, said in (("y", "two columns are called 'y'"), (" ", "a column has no name")):
        other = table.rename(columns={" age ": name})
        assert said in outcome(lambda other=other: pf.data.from_frames(other, "y", by="site"))
    empty = outcome(lambda: pf.data.from_frames(table[:0], "y", site="site"))
    assert empty == "rows: found a header and no rows"
