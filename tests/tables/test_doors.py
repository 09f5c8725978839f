"""The same table by every door gives the same federation; which rows are for testing; what is refused."""

import sqlite3

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.prepare import held_out
from polyfed.data.repairs import plain


def visits(n=90, seed=0):
    rng = np.random.default_rng(seed)
    made = {
        "hospital": rng.choice([1, 2, 10], n), "age": pd.array(rng.integers(2**53, 2**53 + 90, n), dtype="Int64"),
        "crp": rng.lognormal(size=n).round(3), "beds": pd.array(rng.integers(0, 9, n), dtype="Int64"),
        "ward": rng.choice(["icu", "Ärzte", "ent"], n), "stage": pd.Categorical(rng.choice(["low", "mid", "high"], n)),
        "smoker": pd.array(rng.random(n) < 0.5, dtype="boolean"), "seen": pd.Timestamp("2024-01-01"),
        "died": rng.choice(["yes", "no"], n), "part": rng.choice(["train", "Test", "val"], n, p=[0.6, 0.2, 0.2]),
    }  # fmt: skip
    table = pd.DataFrame(made).assign(seen=lambda t: t.seen + pd.to_timedelta(t.beds.to_numpy(int), "D"))
    for name in ("age", "crp", "beds", "ward", "stage", "smoker", "seen"):
        table.loc[rng.random(n) < 0.1, name] = None
    return table


HOW = {"drop": ["seen", "age", "part"], "target": "died", "seed": 1, "validation_fraction": 0.2}


def doors(table, folder):
    """(name, federation) by every door."""
    table.to_csv(folder / "t.csv", index=False)
    table.to_parquet(folder / "t.parquet")
    table.to_excel(folder / "t.xlsx", index=False)
    polars = pl.from_pandas(table)
    polars.write_parquet(folder / "polars.parquet")
    texts = table.assign(smoker=table.smoker.map({True: "True", False: "False"}))  # SQLite has no booleans
    with sqlite3.connect(folder / "t.db") as database:
        texts.to_sql("visits", database, index=False)
    how = {k: v for k, v in HOW.items() if k not in ("seed", "validation_fraction")}
    cut = {k: v for k, v in HOW.items() if k in ("seed", "validation_fraction")}
    for name in ("t.csv", "t.parquet", "t.xlsx", "polars.parquet"):
        yield name, pf.data.load(folder / name, by="hospital", **how).partition(**cut)
    url = f"sqlite:///{folder / 't.db'}"
    yield "sql", pf.data.load(url, query="select * from visits", by="hospital", **how).partition(**cut)
    for name, one in {"pandas": table, "polars": polars, "lazy": polars.lazy(), "arrow": pa.table(polars)}.items():
        yield name, pf.data.from_frames(one, site="hospital", **HOW)
    each = {str(k): polars.filter(pl.col("hospital") == k).drop("hospital") for k in (1, 2, 10)}
    yield "one each", pf.data.from_frames(each, **HOW)
    for k, (name, rows) in enumerate(each.items()):
        (rows.write_parquet if k else rows.write_csv)(folder / "mixed" / f"{name}.{'parquet' if k else 'csv'}")
    mixed = pf.Federation.from_folder(folder / "mixed", **HOW)
    yield "a mixed folder", mixed.reorder([mixed.names.index(n) for n in ("1", "2", "10")])


@pytest.mark.parametrize("seed", range(2))
def test_the_same_table_by_every_door_is_the_same_federation(tmp_path, seed):
    (tmp_path / "mixed").mkdir()
    (_, first), *others = doors(visits(seed=seed), tmp_path)
    assert first.names == ("1", "2", "10")
    for name, fed in others:
        assert fed.names == first.names, name
        for part in ("train", "validation", "test"):
            one, two = getattr(first, part), getattr(fed, part)
            assert torch.equal(one.x, two.x), (name, part)
            assert torch.equal(one.y, two.y), (name, part)


def test_cells_are_as_pandas_writes_them(tmp_path):
    """Long whole numbers with gaps, short floats, dates, booleans and texts, cell by cell."""
    table = visits().assign(short=np.float32(0.1))
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet", index=False)
    wanted, found = (plain(tmp_path / f"t.{end}", Columns()).columns for end in ("csv", "parquet"))
    assert wanted == found


def test_a_categorical_keeps_its_order(tmp_path):
    grades = pd.CategoricalDtype(["well", "ill"], ordered=True)
    died = pd.Categorical(visits().died.map({"yes": "ill", "no": "well"}), dtype=grades)
    table = visits().drop(columns=["seen", "part"]).assign(died=died)
    table.to_parquet(tmp_path / "t.parquet")
    enum = pl.from_pandas(table.astype({"died": str})).with_columns(pl.col("died").cast(pl.Enum(["well", "ill"])))
    enum.write_parquet(tmp_path / "enum.parquet")
    unmarked = enum.to_arrow()  # as polars 1 gives it
    field = unmarked.schema.field("died").with_type(pa.dictionary(pa.uint32(), pa.string()))
    texts = unmarked.column("died").cast(pa.string()).combine_chunks()
    place = unmarked.column_names.index("died")
    unmarked = unmarked.set_column(place, field, texts.dictionary_encode().cast(field.type))
    read = pa.parquet.read_table(tmp_path / "enum.parquet")
    for one in (table, enum, pd.read_parquet(tmp_path / "t.parquet"), read, unmarked):
        made = pf.data.from_frames(one, "died", site="hospital", drop=["age"])
        assert made.meta["preparation"]["labels"] == ["well", "ill"]
    read = pf.data.load(tmp_path / "t.parquet", by="hospital", target="died", drop=["age"]).partition()
    assert read.meta["preparation"]["labels"] == ["well", "ill"]


def test_a_given_split_is_kept_and_its_words_are_read():
    table = visits()
    how = {"target": "died", "drop": ["seen", "age"], "split": "part"}
    made = pf.data.from_frames(table, site="hospital", **how)
    for k, site in enumerate(made.names):
        said = table.part[table.hospital == int(site)].value_counts()
        assert [getattr(made, s).counts[k] for s in ("train", "validation", "test")] == [
            *said[["train", "val", "Test"]]
        ]
    assert made.meta["test"] == "given"
    with pytest.raises(DataError, match=r"line \d+, column 'part': found 'fold 3', expected train, validation, test"):
        pf.data.from_frames(table.assign(part="fold 3"), site="hospital", **how)
    with pytest.raises(DataError, match="rows of one beds are in several parts of part"):
        pf.data.from_frames(table.assign(beds=1), site="hospital", group="beds", **how)


def test_stratified_rows_have_each_class_in_every_part():
    table = visits(300).assign(died=lambda t: np.where(np.arange(300) % 20 == 0, "yes", "no"))
    how = {"site": "hospital", "target": "died", "drop": ["seen", "age", "part"], "split": "stratified"}
    made = pf.data.from_frames(table, **how)
    for k in range(made.n):
        train, test = made.train.client(k)[1], made.test.client(k)[1]
        for c in (0, 1):
            n = int((train == c).sum() + (test == c).sum())
            assert (test == c).sum() == max(1, round(n / 5))
    own = {"whose": np.repeat(np.arange(40), 2), "strata": np.repeat(np.arange(40) % 8 == 0, 2)}
    _, held = held_out(80, 0.2, np.random.default_rng(0), **own)
    assert sorted({*held}) == sorted(r for g in {*(held // 2)} for r in (2 * g, 2 * g + 1))
    assert own["strata"][held].sum() == 2
    with pytest.raises(DataError, match=r"client '1': .* the rows of one group are of several classes"):
        pf.data.from_frames(table.assign(beds=1), group="beds", **how)
    with pytest.raises(ConfigError, match="found stratified, expected a column or none for a regression"):
        pf.data.from_frames(visits().dropna(subset="crp"), **(how | {"target": "crp"}))


def test_one_file_tests_every_client_and_a_folder_each_its_own(tmp_path):
    table, tests = (visits(n, n).drop(columns=["seen", "age", "part"]).fillna({"beds": 3}) for n in (90, 30))
    tests.to_parquet(tmp_path / "all.parquet")
    made = pf.data.from_frames(table, "died", site="hospital", test_file=str(tmp_path / "all.parquet"))
    assert made.test.counts.tolist() == [30] * 3
    assert made.train.counts.tolist() == [*table.hospital.value_counts().sort_index()]
    assert torch.equal(made.test.client(0)[0], made.test.client(2)[0])
    (folder := tmp_path / "each").mkdir()
    for site, rows in tests.groupby("hospital"):
        rows.drop(columns="hospital").to_csv(folder / f"{site}.csv", index=False)
    own = pf.data.from_frames(table, "died", site="hospital", test_file=str(folder))
    assert own.test.counts.tolist() == [*tests.hospital.value_counts().sort_index()]
    (folder / "10.csv").unlink()
    with pytest.raises(DataError, match="found no table of 10, expected one of each site"):
        pf.data.from_frames(table, "died", site="hospital", test_file=str(folder))
    with pytest.raises(DataError, match="whose rows 1 trains on"):
        pf.data.from_frames(table, "died", site="hospital", group="beds", test_file=str(tmp_path / "all.parquet"))


def test_a_data_loader_stands_for_its_data_set():
    torch.manual_seed(0)
    sets = [TensorDataset(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(2)]
    one = pf.Federation.from_datasets([DataLoader(s, batch_size=4, shuffle=True) for s in sets])
    assert torch.equal(one.train.x, pf.Federation.from_datasets(sets).train.x)
    for loader, said in (
        (DataLoader(sets[0], sampler=SubsetRandomSampler([0, 1])), "has a sampler of its own"),
        (DataLoader(sets[0], batch_size=2, collate_fn=len), "has a collate_fn of its own"),
    ):
        with pytest.raises(DataError, match=f"client 'client-0', train: the DataLoader {said}"):
            pf.Federation.from_datasets([loader])


@pytest.mark.parametrize(
    ("url", "query", "said"),
    [
        ("sqlite:///missing.db", "select 1", "sqlite:///missing.db: no such file"),
        ("sqlite:///t.db", "select x from nothing", "the query cannot be answered"),
        ("sqlite:///t.db", None, "columns.query: found none, expected what to ask"),
        ("sqlite://u:secret@h/t.db", "select 1", "found a password in sqlite://u:\\*\\*\\*@h"),
        ("sqlite://u:$NOT_SET@h/t.db", "select 1", "found no variable NOT_SET in the environment"),
    ],
)
def test_databases_that_do_not_answer(tmp_path, monkeypatch, url, query, said):
    monkeypatch.chdir(tmp_path)
    sqlite3.connect("t.db").execute("create table t (a int)")
    with pytest.raises((DataError, ConfigError), match=said) as e:
        pf.data.load(url, query=query)
    assert "secret" not in str(e.value)
    assert "\n" not in str(e.value)


def test_files_that_are_no_tables_are_one_line(tmp_path):
    for name in ("a.parquet", "a.xlsx"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 and no more")
        with pytest.raises(DataError, match=f"{name}: not a readable"):
            pf.data.load(tmp_path / name)
    with pd.ExcelWriter(tmp_path / "two.xlsx") as book:
        for sheet in ("one", "two"):
            visits(5).to_excel(book, sheet_name=sheet)
    with pytest.raises(DataError, match="found sheets one, two, expected one sheet with a table"):
        pf.data.load(tmp_path / "two.xlsx")
    for name in "bc":
        visits().to_csv(tmp_path / f"{name}.csv")
    with pytest.raises(ConfigError, match=r"columns.by: found 2 files, expected one table"):
        pf.Federation.from_files([tmp_path / "b.csv", tmp_path / "c.csv"], by="hospital")
