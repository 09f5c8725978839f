"""What is no input and no patient of its own: numbers of rows, columns that tell the outcome, copied rows, and splits
that hold out what was not asked; by every door."""

import numpy as np
import pandas as pd
import pytest
import torch
from doors import settled, written

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError
from polyfed.base.part import CHECK
from polyfed.data.prepare import Cut
from polyfed.data.schema import File
from polyfed.runs.watching import noted


def sites(sizes=(60, 80, 50), seed=0):
    """Three sites whose outcome hangs on age and cholesterol, and that have no fault."""
    rng, found = np.random.default_rng(seed), {}
    for name, n in zip(("north", "south", "west"), sizes, strict=True):
        t = pd.DataFrame({"age": rng.integers(30, 90, n), "chol": rng.normal(5.5, 1, n).round(4)})
        t["sex"] = rng.choice(["m", "f"], n)
        t["outcome"] = np.where((t.age - 60) / 10 + t.chol - 5.5 + rng.logistic(size=n) > 0, "ill", "well")
        found[name] = t
    return found


def each(frames, make):
    """The frames with one more column. make: of a site's frame, its position and a generator"""
    rng = np.random.default_rng(5)
    return {k: v.assign(new=make(v, i, rng)) for i, (k, v) in enumerate(frames.items())}


def doors(frames, tmp_path, **columns):
    """(inputs, notes) of frames, of the folder with their files, and of what sites with these files settle."""
    columns = {"target": "outcome"} | columns
    folder = written(tmp_path, frames)
    for fed in (pf.data.from_frames(frames, **columns), pf.Federation.from_folder(folder, **columns)):
        yield fed.meta["inputs"], fed.notes
    agreed, _ = settled(folder, **columns)
    yield agreed.preparation.names, agreed.notes


NUMBERS = {
    "from 1": lambda v, i, rng: range(1, 1 + len(v)),
    "shuffled": lambda v, i, rng: rng.permutation(len(v)),
    "of all sites": lambda v, i, rng: np.arange(len(v)) + 1000 * i,
    "as floats": lambda v, i, rng: np.arange(len(v)) + 1.0,
    "with zeros before": lambda v, i, rng: [f"{k:05d}" for k in range(len(v))],
    "five digits": lambda v, i, rng: rng.permutation(np.arange(10_000, 99_999))[: len(v)],
    "random": lambda v, i, rng: rng.permutation(10**7)[: len(v)],
    "beyond 2^53": lambda v, i, rng: [str(10**17 + k) for k in range(len(v))],
    "texts": lambda v, i, rng: [f"P-{k:x}q" for k in rng.permutation(10**6)[: len(v)]],
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_what_numbers_or_names_the_rows_is_no_input_and_said(tmp_path, kind):
    for inputs, notes in doors(each(sites(), NUMBERS[kind]), tmp_path):
        assert not any(name.startswith("new") for name in inputs)
        (said,) = (note for note in notes if "left out" in note)
        assert said.startswith(f"{CHECK}new ")


def test_it_goes_in_where_it_is_asked_for_or_is_the_target(tmp_path):
    numbered = each(sites(), NUMBERS["from 1"])
    for inputs, notes in doors(numbered, tmp_path, numbers=["new"]):
        assert "new" in inputs
        assert not any("left out" in note for note in notes)
    for inputs, _ in doors(numbered, tmp_path, target="new", task="regression"):
        assert "age" in inputs


MEASURED = {
    "floats": lambda v, i, rng: rng.normal(size=len(v)),
    "one tie at one site": lambda v, i, rng: [*range(len(v) - 1), 0] if i == 1 else range(len(v)),
    "a wide count": lambda v, i, rng: rng.permutation(np.exp(np.linspace(2, 10, len(v))).astype(int)),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_measurements_stay(tmp_path, kind):
    for inputs, _ in doors(each(sites(), MEASURED[kind]), tmp_path):
        assert "new" in inputs


@pytest.mark.parametrize("seed", range(3))
def test_ages_that_differ_at_small_sites_stay(tmp_path, seed):
    """Nine different ages of sixty at each of three sites are no rarity (chance .17), nor are twelve."""
    frames = sites((9, 12, 9), seed)
    rng = np.random.default_rng(seed)
    frames = {k: v.assign(age=rng.permutation(np.arange(30, 90))[: len(v)]) for k, v in frames.items()}
    for inputs, _ in doors(frames, tmp_path):
        assert "age" in inputs


def test_numbers_of_rows_are_seen_at_small_sites(tmp_path):
    for inputs, _ in doors(each(sites((9, 12, 4)), NUMBERS["from 1"]), tmp_path):
        assert "new" not in inputs


def told(frames, **columns):
    return [note for note in pf.data.from_frames(frames, "outcome", **columns).notes if " alone predicts " in note]


LEAKS = {
    "a value": lambda v, i, rng: np.where(v.outcome == "ill", "died", rng.choice(["home", "other"], len(v))),
    "one value of many": lambda v, i, rng: np.where((v.outcome == "ill") & (rng.random(len(v)) < 0.5), "icu", "ward"),
    "a number": lambda v, i, rng: (v.outcome == "ill") + 0.1 * rng.normal(size=len(v)),
    "a number, reversed": lambda v, i, rng: -3.0 * (v.outcome == "ill") + rng.normal(size=len(v)) / 10,
    "a flag": lambda v, i, rng: (v.outcome == "ill") * 1,
    "a date of death": lambda v, i, rng: np.where(v.outcome == "ill", rng.normal(size=len(v)), np.nan),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_column_that_predicts_the_outcome_alone_is_named(leak, tmp_path):
    frames = each(sites(), LEAKS[leak])
    (said,) = told(frames)
    assert said.startswith(CHECK)
    assert "new alone predicts outcome" in said
    assert said in pf.Federation.from_folder(written(tmp_path, frames), target="outcome").notes


@pytest.mark.parametrize("seed", range(6))
def test_clean_columns_and_few_rows_tell_nothing(seed):
    """Also a rare value that one class has by chance, and a site whose six rows are in order by chance."""
    frames = each(
        sites(seed=seed), lambda v, i, rng: np.where(np.arange(len(v)) < 2, "rare", rng.choice(["a", "b"], len(v)))
    )
    assert told(frames) == []
    ordered = {"outcome": ["ill", "ill", "well", "well", "ill", "well"], "chol": [1.5, 2.25, 5.5, 6.5, 3.125, 7.5]}
    assert told({k: v.assign(**ordered) for k, v in sites((6, 6, 6), seed).items()}) == []


def test_a_good_predictor_is_no_leak():
    """AUC .95 or so, as the best of real predictors have it."""
    assert told(each(sites(), lambda v, i, rng: 2.3 * (v.outcome == "ill") + rng.normal(size=len(v)))) == []


def twice(frames):
    return [note for note in pf.data.from_frames(frames, "outcome").notes if note.endswith(" twice?")]


def test_rows_of_one_site_at_another_are_counted():
    found = sites()
    (said,) = twice({**found, "north (1)": found["north"]})
    assert said.startswith(f"{CHECK}north (1): 60 of 60 rows are at north too")
    mixed = found["north"].sample(frac=1, random_state=1).iloc[:20, ::-1]
    mixed["chol"] = mixed.chol.map("{:.6f}".format)
    (said,) = twice({**found, "copy": mixed})
    assert "copy: 20 of 20 rows are at north too" in said
    part = pd.concat([found["west"], found["south"].head(15)])
    (said,) = twice({**found, "west": part})
    assert "15 of 65 rows are at south too" in said
    numbered = {**found, "again": found["north"]}
    (said,) = twice({k: v.assign(pid=np.arange(len(v)) + 1000 * i) for i, (k, v) in enumerate(numbered.items())})
    assert "60 of 60" in said  # their numbers are no inputs


@pytest.mark.parametrize("seed", range(6))
def test_like_sites_share_no_more_rows_than_chance_has_it(seed):
    """Rows of three small columns repeat within and between sites, and real ones hardly ever."""
    assert twice(sites(seed=seed)) == []
    assert twice({k: v[["age", "sex", "outcome"]] for k, v in sites(seed=seed).items()}) == []
    coarse = {k: v.assign(old=v.age > 60)[["old", "sex", "outcome"]].astype(str) for k, v in sites(seed=seed).items()}
    assert twice(coarse) == []


def grouped(spelling):
    """Every patient has two rows; spelling: of a number, by whether it is the first of them"""
    frames = {}
    for name, v in sites().items():
        n = len(v) // 2
        table = v.iloc[np.repeat(np.arange(n), 2)].reset_index(drop=True)
        table.insert(0, "pid", [spelling(j // 2 + 1, j % 2) for j in range(2 * n)])
        table["mark"] = np.repeat(np.arange(n), 2) * 1.0
        frames[name] = table
    return frames


@pytest.mark.parametrize(
    "spelling",
    [
        lambda i, odd: f"{i:05d}" if odd else str(i),
        lambda i, odd: f"{i}.0" if odd else str(i),
        lambda i, odd: f"+{i}" if odd else f"{i}",
        lambda i, odd: str(10**17 + i) if odd else f"{10**17 + i}.0",
    ],
)
def test_groups_that_are_equal_as_numbers_are_one(tmp_path, spelling):
    frames = grouped(spelling)
    how = {"target": "outcome", "group": "pid"}
    for way, given in ((pf.data.from_frames, frames), (pf.Federation.from_folder, written(tmp_path, frames))):
        fed = way(given, **how, test_fraction=0.3, standardise="none")
        mark = fed.meta["inputs"].index("mark")
        for i in range(3):
            train, test = (set(part.client(i)[0][:, mark].tolist()) for part in (fed.train, fed.test))
            assert not train & test
    file = File(tmp_path / "north.csv", "north", Columns(**how), Cut(0, 0.3, 0.2))
    marks = [set(frames["north"].mark[rows]) for rows in file.rows.values()]
    assert not any(a & b for k, a in enumerate(marks) for b in marks[:k])


def test_a_split_that_groups_make_impossible_is_refused():
    frames = {k: v.assign(pid="1.23457E+17") for k, v in sites().items()}
    with pytest.raises(DataError, match=r"test fraction: 0.2 .* cannot be held out .*north 0 of 60"):
        pf.data.from_frames(frames, "outcome", group="pid")
    assert len(pf.data.from_frames(frames, "outcome", group="pid", test_fraction=0.0).test.x) == 0


def test_a_split_that_holds_out_what_was_not_asked_is_said():
    def said_of(fed):
        (said,) = (note for note in fed.notes if "test fraction" in note)
        assert said.startswith(CHECK)
        return said

    frames = {k: v.assign(pid=np.arange(len(v)) if k != "west" else 7) for k, v in sites().items()}
    said = said_of(pf.data.from_frames(frames, "outcome", group="pid"))
    assert "west 0 of 50" in said
    assert "north" not in said
    halves = {k: v.assign(pid=np.arange(len(v)) % 2) for k, v in sites().items()}
    assert "north 30 of 60" in said_of(pf.data.from_frames(halves, "outcome", group="pid"))
    pairs = [(np.eye(10)[:k], np.arange(k) % 2) for k in (1, 2, 10)]
    said = said_of(pf.Federation.from_arrays(pairs, classes=2))
    assert "client-0 0 of 1, client-1 1 of 2" in said
    assert "client-2" not in said
    assert not any(CHECK in n for n in pf.data.from_frames(sites(), "outcome").notes)


def test_training_scores_lead_nothing(tmp_path):
    fed = pf.data.from_frames(sites(), "outcome", test_fraction=0.0)

    def model(_):
        return torch.nn.Linear(len(fed.meta["inputs"]), 2)

    methods = {"fedavg": pf.FedAvg(0.1), "local": pf.Local(0.1)}
    found = pf.compare(model, fed, methods, seeds=2, rounds=2, out=tmp_path / "c")
    study = pf.report.read(tmp_path / "c")
    answer = pf.report.answer(study)
    assert "train accuracy" not in answer
    assert "held out" in answer.partition(".")[0]
    assert study.verdicts.lead is None
    assert "accuracy" not in found.table
    assert "best" not in [cell.mark for row in pf.report.compare_table(study).rows for cell in row]
    seen = []
    told = pf.fit(model(0), fed, pf.FedAvg(0.1), rounds=1, callbacks=(seen.append,))
    assert "train accuracy" not in repr(told)
    assert {noted(step).rpartition(" ")[0] for step in seen if step.records} == {"train loss"}
