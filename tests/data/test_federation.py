"""Federations from arrays, data sets and files: what is accepted, what is refused and in which words."""

import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.base.errors import ConfigError
from polyfed.data import Federation, load


def pair(n=10, d=3, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), np.arange(n) % classes


def test_arrays_tensors_and_lists_are_the_same():
    x, y = pair()
    kinds = [(x, y), (torch.tensor(x), torch.tensor(y)), (x.tolist(), y.tolist())]
    fed = Federation.from_arrays(kinds, test_fraction=0.0)
    for i in range(3):
        xi, yi = fed.train.client(i)
        torch.testing.assert_close(xi, torch.tensor(x))
        assert yi.tolist() == y.tolist()
    assert fed.classes == 2
    assert fed.names == ("client-0", "client-1", "client-2")
    assert fed.input_shape == (3,)
    assert fed.outputs == 2
    assert len(fed.test.y) == 0


def test_integer_targets_are_classes_floats_are_regression():
    x, y = pair(classes=4)
    assert Federation.from_arrays([(x, y)]).classes == 4
    assert Federation.from_arrays([(x, y)], classes=7).classes == 7
    regression = Federation.from_arrays([(x, y.astype(float))])
    assert regression.classes is None
    assert regression.train.y.is_floating_point()
    assert regression.outputs == 1
    wide = Federation.from_arrays([(x, np.zeros((10, 3)))])
    assert wide.outputs == 3
    cast = Federation.from_arrays([(x, y.astype(float))], classes=4)
    assert cast.train.y.dtype == torch.int64
    assert Federation.from_arrays([(x, y[:, None])]).train.y.dim() == 1


def test_integer_inputs_become_floats_unscaled_unless_they_are_tokens():
    tokens, y = np.arange(20).reshape(10, 2), np.arange(10) % 2
    fed = Federation.from_arrays([(tokens.astype(np.uint8), y)], test_fraction=0.0)
    assert fed.train.x.dtype == torch.float32
    assert fed.train.x.max() == 19
    kept = Federation.from_arrays([(tokens, y)], integer_inputs=True)
    assert kept.train.x.dtype == torch.int64


def test_integers_stay_integers_and_bytes_become_floats():
    tokens, y = np.arange(20).reshape(10, 2), np.arange(10) % 2
    for given_as in (tokens, tokens.astype(np.int16), torch.tensor(tokens), tokens.tolist()):
        assert Federation.from_arrays([(given_as, y)]).train.x.dtype == torch.int64
    for given_as in (tokens.astype(np.uint8), tokens > 3, torch.tensor(tokens).to(torch.uint8)):
        assert Federation.from_arrays([(given_as, y)]).train.x.dtype == torch.float32
    assert Federation.from_arrays([(tokens, y)], integer_inputs=False).train.x.dtype == torch.float32


@pytest.mark.parametrize("labels", [[1, 2], [1, 2, 3], [-1, 1]])
def test_labels_counted_otherwise_are_numbered_from_zero_and_it_is_said(labels):
    x, k = np.zeros((12, 2)), np.arange(12) % len(labels)
    y = np.array(labels)[k]
    fed = Federation.from_arrays([(x, y), (x, y)], test=[(x[:4], y[:4]), None])
    assert fed.classes == len(labels)
    assert fed.train.client(1)[1].tolist() == k.tolist()
    assert fed.test.client(0)[1].tolist() == k[:4].tolist()
    assert fed.meta["labels"] == labels
    assert any("numbered 0 to" in note for note in fed.notes)


def test_labels_from_zero_are_left_alone():
    x, y = pair(classes=4)
    fed = Federation.from_arrays([(x, y)])
    assert "labels" not in fed.meta
    assert fed.notes == ()


def test_an_empty_class_is_noted():
    x, y = np.zeros((9, 2)), np.arange(9) % 3
    fed = Federation.from_arrays([(x, np.where(y == 1, 3, y))])
    assert fed.classes == 4
    assert any("no training sample has label 1, of 4 classes" in note for note in fed.notes)


def test_ages_are_not_taken_for_classes(refused, tmp_path):
    x, ages = np.zeros((60, 2)), np.arange(60) + 20
    with refused("60 different integers from 20 to 79", "task='regression'", "task='classification'"):
        Federation.from_arrays([(x, ages)])
    numbers = Federation.from_arrays([(x, ages)], task="regression", test_fraction=0.0)
    assert numbers.classes is None
    assert numbers.train.y.tolist() == ages.tolist()
    assert Federation.from_arrays([(x, ages)], task="classification").classes == 80
    assert Federation.from_arrays([(x, ages)], classes=80).classes == 80
    many = Federation.from_arrays([(x, np.arange(60) % 30)])
    assert many.classes == 30
    assert any("30 classes" in note and "task='regression'" in note for note in many.notes)
    write_csv(tmp_path / "a.csv", [f"1,{k % 7},{k + 20}" for k in range(60)])
    with refused("60 different integers"):
        Federation.from_folder(tmp_path)
    assert Federation.from_folder(tmp_path, task="regression").classes is None
    assert Federation.from_folder(tmp_path, task="classification").classes == 80


def test_floats_are_labels_where_the_task_says_so(refused):
    x, y = pair(classes=3)
    fed = Federation.from_arrays([(x, y.astype(float))], task="classification")
    assert fed.classes == 3
    assert fed.train.y.dtype == torch.int64
    with refused("'client-0'", "label 0.5", "integers are expected"):
        Federation.from_arrays([(x, y / 2)], task="classification")
    with refused("task: found 'guess'"):
        Federation.from_arrays([(x, y)], task="guess")
    with refused("classes: found 3", "regression"):
        Federation.from_arrays([(x, y)], classes=3, task="regression")


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_labels_beyond_64_bits_are_named_as_they_are(refused, kind):
    x, y = pair()
    huge = y.astype(np.uint64)
    huge[3] = 2**63
    with refused("'client-0'", "9223372036854775808", "below 2^63"):
        Federation.from_arrays([(x, kind(huge))])
    with refused("1000000000001 classes"):
        Federation.from_arrays([(x, y * 10**12)], task="classification")


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    fraction=st.floats(0, 0.99),
    validation=st.floats(0, 0.99),
    seed=st.integers(0, 9),
)
def test_held_out_samples_are_a_true_split(sizes, fraction, validation, seed):
    start = np.cumsum([0, *sizes])
    data = [(np.arange(a, b, dtype=float)[:, None], np.zeros(b - a)) for a, b in pairwise(start)]
    options = {"test_fraction": fraction, "validation_fraction": validation, "seed": seed}
    fed = Federation.from_arrays(data, **options)
    again = Federation.from_arrays(data[::-1], names=[f"client-{i}" for i in range(len(data))][::-1], **options)
    for i, size in enumerate(sizes):
        splits = [fed.train, fed.test] + ([] if fed.validation is None else [fed.validation])
        values = torch.cat([s.client(i)[0][:, 0] for s in splits])
        assert sorted(values.tolist()) == data[i][0][:, 0].tolist()
        assert fed.train.counts[i] >= 1
        if fraction and size > 1:
            wished = min(max(1, round(size * fraction)), size - 1)
            assert fed.test.counts[i] == wished
        # keyed by the name, not by the position
        assert torch.equal(fed.train.client(i)[0], again.train.client(len(sizes) - 1 - i)[0])


def test_given_test_and_validation_are_kept():
    x, y = pair()
    fed = Federation.from_arrays([(x, y), (x, y)], test=[(x[:3], y[:3]), None], validation=[None, (x[:2], y[:2])])
    assert fed.train.counts.tolist() == [10, 10]
    assert fed.test.counts.tolist() == [3, 0]
    assert fed.validation is not None
    assert fed.validation.counts.tolist() == [0, 2]


def test_every_fault_is_one_line_that_names_the_client(refused):
    x, y = pair()
    bad = x.copy()
    bad[2, 1] = np.nan
    with refused("'b'", "train", "1 of 30", "NaN"):
        Federation.from_arrays([(x, y), (bad, y)], names=["a", "b"])
    bad[3, 1] = np.inf
    with refused("'a'", "test", "2 of 30"):
        Federation.from_arrays([(x, y)], test=[(bad, y)], names=["a"])
    with refused("'a'", "targets", "NaN"):
        Federation.from_arrays([(x, np.full(10, np.nan))], names=["a"])
    with refused("'b'", "no training samples"):
        Federation.from_arrays([(x, y), (x[:0], y[:0])], names=["a", "b"])
    with refused("'b'", "label 5", "0 to 1"):
        Federation.from_arrays([(x, y), (x, y * 5)], names=["a", "b"], classes=2)
    with refused("'a'", "label -1", "0 to 1"):
        Federation.from_arrays([(x, np.where(y > 0, 1, -1))], names=["a"], classes=2)
    with refused("'a'", "label -1", "0 to 2"):
        Federation.from_arrays([(x, np.arange(10) % 4 - 1)], names=["a"])
    with refused("'a'", "test", "label 3", "0 to 1"):
        Federation.from_arrays([(x, y)], test=[(x, y * 3)], names=["a"])
    with refused("label 0", "two classes"):
        Federation.from_arrays([(x, y * 0)])
    with refused("'a'", "distinct"):
        Federation.from_arrays([(x, y), (x, y)], names=["a", "a"])
    with refused("'b'", "[2]", "[3]", "'a'"):
        Federation.from_arrays([(x, y), (x[:, :2], y)], names=["a", "b"])
    with refused("'a'", "10 against 9"):
        Federation.from_arrays([(x, y[:9])], names=["a"])
    with refused("'a'", "dtype object"):
        Federation.from_arrays([(x.astype(object), y)], names=["a"])
    with refused("'a'", "'cat'", "expected at least two classes"):
        Federation.from_arrays([(x, ["cat"] * 10)], names=["a"])
    with refused("'a'", "ragged"):
        Federation.from_arrays([([[1.0], [1.0, 2.0]], [0, 1])], names=["a"])
    with refused("'a'", "label 0.5", "not an integer"):
        Federation.from_arrays([(x, y / 2)], names=["a"], classes=2)
    with refused("'b'", "floats", "'a'", "integers"):
        Federation.from_arrays([(x, y), (x, y * 1.5)], names=["a", "b"])
    with refused("'a'", "[10]", "[samples, features, ...]"):
        Federation.from_arrays([(x[:, 0], y)], names=["a"])
    with refused("'a'", "[10, 2]", "one integer per sample"):
        Federation.from_arrays([(x, np.eye(2, dtype=int)[y])], names=["a"])
    with refused("'a'", "pair"):
        Federation.from_arrays([x], names=["a"])  # pyright: ignore[reportArgumentType]
    with refused("found no client, expected at least one"):
        Federation.from_arrays([])
    with refused("names: found 2 for 1"):
        Federation.from_arrays([(x, y)], names=["a", "b"])
    with refused("test: found 2 entries for 1"):
        Federation.from_arrays([(x, y)], test=[(x, y), (x, y)])
    with refused("clusters", "1 integers"):
        Federation.from_arrays([(x, y)], clusters=[0, 1])
    with refused("classes: found 1"):
        Federation.from_arrays([(x, y)], classes=1)
    with refused("test fraction", "1.0"):
        Federation.from_arrays([(x, y)], test_fraction=1.0)
    with refused("seed", "-1"):
        Federation.from_arrays([(x, y)], seed=-1)


def test_summary_counts_every_label():
    fed = Federation.from_arrays([pair(10), pair(20, classes=3)], names=["a", "b"], clusters=[0, 1], test_fraction=0.0)
    table = fed.summary()
    assert isinstance(table, pd.DataFrame)
    assert ",".join(table.columns) == "client,train,validation,test,cluster,class_0,class_1,class_2"
    assert table.loc[:, "class_0":].to_numpy().tolist() == [[5, 5, 0], [7, 7, 6]]
    assert table["train"].tolist() == [10, 20]


def test_describe_is_plain_json():
    fed = Federation.from_arrays([pair(10), pair(20)], clusters=np.array([0, 1]), validation_fraction=0.5)
    found = json.loads(json.dumps(fed.describe()))
    assert set(found) >= {"dataset", "partition", "seed", "classes", "clients", "clusters", "notes"}
    assert found["clients"][1]["name"] == "client-1"
    assert sum(found["clients"][1]["labels"]) == found["clients"][1]["train"] == 8
    assert found["clients"][1]["validation"] == 8
    assert found["clusters"] == [0, 1]
    regression = Federation.from_arrays([(np.zeros((4, 1)), np.zeros(4))])
    assert json.loads(json.dumps(regression.describe()))["clients"][0]["labels"] is None


def test_with_validation_moves_training_samples(refused):
    fed = Federation.from_arrays([pair(10), pair(1)], test_fraction=0.0)
    cut = fed.with_validation(0.3, seed=1)
    assert cut.validation is not None
    assert cut.train.counts.tolist() == [7, 1]
    assert cut.validation.counts.tolist() == [3, 0]
    with refused("validation split already"):
        cut.with_validation(0.1)
    with refused("validation fraction"):
        fed.with_validation(1.5)


def test_reorder_takes_everything_along():
    fed = Federation.from_arrays([pair(10, seed=i) for i in range(3)], clusters=[0, 1, 2], names=list("abc"))
    back = fed.reorder([2, 0])
    assert back.names == ("c", "a")
    assert back.clusters is not None
    assert back.clusters.tolist() == [2, 0]
    assert torch.equal(back.test.client(0)[0], fed.test.client(2)[0])


def test_from_torch_datasets(refused):
    x, y = pair(6)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.tensor(x[i]), int(y[i])

    tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    fed = Federation.from_datasets([Items(), tensors], test_fraction=0.0)
    assert torch.equal(fed.train.client(0)[0], fed.train.client(1)[0])
    assert fed.train.y.tolist() == [*y, *y]

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return "no pair at all"

    with refused("'b'", "train", "item 0"):
        Federation.from_datasets([tensors, Broken()], names=["a", "b"])
    with refused("found no client, expected at least one"):
        Federation.from_datasets([])


# folders


def write_csv(path, rows, header="a,b,target"):
    path.write_text("\n".join([header, *rows]) + "\n")


def test_folder_of_csv_files(tmp_path):
    write_csv(tmp_path / "north.csv", ["1,2,0", "3,4,1", "5,6,1"])
    write_csv(tmp_path / "south.csv", ["7,8.5,1", "9,1e1,0"])
    fed = Federation.from_folder(tmp_path, test_fraction=0.0, standardise="none")
    assert fed.names == ("north", "south")
    assert fed.classes == 2
    assert fed.train.client(1)[0].tolist() == [[7, 8.5], [9, 10]]
    other = Federation.from_folder(tmp_path, target="b", test_fraction=0.0, standardise="none")
    assert other.classes is None
    assert other.train.client(0)[1].tolist() == [2, 4, 6]
    numbers = Federation.from_folder(tmp_path, task="regression")
    assert numbers.classes is None
    assert numbers.meta["dataset"] == tmp_path.name


def test_a_folder_is_what_the_command_line_makes_of_it(tmp_path):
    rows = [
        f"{'icu' if i % 3 else 'ward'},{i % 13 if i % 5 else ''},{'ill' if i % 2 else 'well'},x{i}" for i in range(20)
    ]
    write_csv(tmp_path / "north.csv", rows, "place,age,outcome,id")
    write_csv(tmp_path / "south.csv", [",".join(reversed(row.split(","))) for row in rows], "id,outcome,age,place")
    fed = Federation.from_folder(tmp_path, "outcome", drop=["id"], test_fraction=0.3, seed=2)
    same = load(tmp_path, target="outcome", drop=["id"]).partition(test_fraction=0.3, seed=2)
    assert fed.meta["inputs"] == ["age", "age missing", "place=icu", "place=ward"]
    assert fed.notes == same.notes
    for part in ("train", "test"):
        assert torch.equal(getattr(fed, part).x, getattr(same, part).x)
        assert torch.equal(getattr(fed, part).y, getattr(same, part).y)
    named = Federation.from_files(sorted(tmp_path.iterdir()), "outcome", drop=["id"], names=["a", "b"])
    assert named.names == ("a", "b")


def test_folder_of_npz_files_with_tests_of_their_own(tmp_path):
    x, y = pair()
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, x_test=x[:2], y_test=y[:2])
    fed = Federation.from_folder(tmp_path)
    assert fed.train.counts.tolist() == [10, 10]
    assert fed.test.counts.tolist() == [2, 2]


def test_uint8_images_in_files_become_floats_channels_first(tmp_path):
    images = np.full((4, 5, 6, 3), 255, np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=[0, 1, 0, 1])
    fed = Federation.from_folder(tmp_path, test_fraction=0.0)
    assert fed.input_shape == (3, 5, 6)
    assert fed.train.x.min() == 1.0


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (["1,2,0", "3,x,1"], "a,b,target", ("line 3", "'b'", "'x'")),
        (["1,2,0", "", "3,,1"], "a,b,target", ("line 4", "'b'", "''")),
        (["1,2,0", "3,1"], "a,b,target", ("line 3", "2 cells", "3")),
        (["1,2,0"], "1,2,3", ("header",)),
        (["1,2,0"], "a,a,b", ("'a'", "two columns")),
        (["nan,2,0", "1,1,1"], "a,b,target", ("line 2", "'a'", "'nan'")),
        (["1", "2"], "a", ("no column to learn from",)),
        ([], "a,b,target", ("'bad'", "no training samples")),
    ],
)
def test_faulty_csv_names_file_line_and_column(tmp_path, refused, rows, header, words):
    write_csv(tmp_path / "bad.csv", rows, header)
    with refused("bad", *words):
        Federation.from_folder(tmp_path, missing="refuse")


def test_faulty_folders(tmp_path, refused):
    with refused("nowhere", "no such folder"):
        Federation.from_folder(tmp_path / "nowhere")
    with refused(tmp_path, "no CSV or npz"):
        Federation.from_folder(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    with refused("empty.csv", "is empty"):
        Federation.from_folder(tmp_path)
    (tmp_path / "empty.csv").write_bytes(b"\xff\xfe\x00")
    with refused("empty.csv", "UTF-8"):
        Federation.from_folder(tmp_path)
    write_csv(tmp_path / "empty.csv", ["1,2,0", "1,3,1"])
    write_csv(tmp_path / "other.csv", ["1,2,0", "1,3,1"], "a,c,target")
    with refused("other.csv", "empty.csv", "'c'", "'b'"):
        Federation.from_folder(tmp_path)
    (tmp_path / "other.csv").unlink()
    with refused("empty.csv", "'score'", "a, b, target"):
        Federation.from_folder(tmp_path, target="score")
    with pytest.raises(ConfigError, match=r"task.*'guess'"):
        Federation.from_folder(tmp_path, task="guess")
    x, y = pair()
    (tmp_path / "empty.csv").unlink()
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x)
    with refused("a.npz", "y_test"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x, y_test=y)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    with refused("b.npz", "x_test"):
        Federation.from_folder(tmp_path)
