"""Federations from arrays, data sets and files: what is accepted, what is refused and in which words."""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.base.errors import ConfigError
from polyfed.data import Federation, load


def pair(n=10, d=3, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), np.arange(n) % classes


X, Y = pair()


def test_arrays_tensors_and_lists_are_the_same():
    kinds = [(X, Y), (torch.tensor(X), torch.tensor(Y)), (X.tolist(), Y.tolist())]
    fed = Federation.from_arrays(kinds, test_fraction=0.0)
    for i in range(3):
        x, y = fed.train.client(i)
        torch.testing.assert_close(x, torch.tensor(X))
        assert y.tolist() == Y.tolist()
    assert (fed.classes, fed.outputs, fed.input_shape) == (2, 2, (3,))
    assert fed.names == ("client-0", "client-1", "client-2")
    assert len(fed.test.y) == 0


def test_integer_targets_are_classes_floats_are_regression():
    x, y = pair(classes=4)
    fed = Federation.from_arrays([(x, y)])
    assert (fed.classes, fed.notes) == (4, ())
    assert "labels" not in fed.meta
    assert Federation.from_arrays([(x, y)], classes=7).classes == 7
    regression = Federation.from_arrays([(x, y.astype(float))])
    assert (regression.classes, regression.outputs) == (None, 1)
    assert regression.train.y.is_floating_point()
    assert Federation.from_arrays([(x, np.zeros((10, 3)))]).outputs == 3
    for told in ({"classes": 4}, {"task": "classification"}):
        fed = Federation.from_arrays([(x, y.astype(float))], **told)
        assert (fed.classes, fed.train.y.dtype) == (4, torch.int64)
    assert Federation.from_arrays([(x, y[:, None])]).train.y.dim() == 1
    gap = Federation.from_arrays([(x, np.where(y == 1, 4, y))])
    assert gap.classes == 5
    assert any("no training sample has label 1, of 5 classes" in note for note in gap.notes)


def test_integers_stay_integers_and_bytes_become_floats_of_the_same_value():
    tokens, y = np.arange(20).reshape(10, 2), np.arange(10) % 2
    for given_as in (tokens, tokens.astype(np.int16), torch.tensor(tokens), tokens.tolist()):
        assert Federation.from_arrays([(given_as, y)]).train.x.dtype == torch.int64
    for given_as in (tokens.astype(np.uint8), tokens > 3, torch.tensor(tokens).to(torch.uint8)):
        assert Federation.from_arrays([(given_as, y)]).train.x.dtype == torch.float32
    assert Federation.from_arrays([(tokens.astype(np.uint8), y)], test_fraction=0.0).train.x.max() == 19
    for integer in (True, False):
        kept = Federation.from_arrays([(tokens.astype(np.uint8 if integer else int), y)], integer_inputs=integer)
        assert kept.train.x.dtype == (torch.int64 if integer else torch.float32)


@pytest.mark.parametrize("labels", [[1, 2], [1, 2, 3], [-1, 1]])
def test_labels_counted_otherwise_are_numbered_from_zero_and_it_is_said(labels):
    x, k = np.zeros((12, 2)), np.arange(12) % len(labels)
    y = np.array(labels)[k]
    fed = Federation.from_arrays([(x, y), (x, y)], test=[(x[:4], y[:4]), None])
    assert (fed.classes, fed.train.client(1)[1].tolist()) == (len(labels), k.tolist())
    assert (fed.test.client(0)[1].tolist(), fed.meta["labels"]) == (k[:4].tolist(), labels)
    assert any("numbered 0 to" in note for note in fed.notes)


def test_ages_are_not_taken_for_classes(refused, tmp_path):
    x, ages = np.zeros((60, 2)), np.arange(60) + 20
    write_csv(tmp_path / "a.csv", [f"1,{k % 7},{k + 20}" for k in range(60)])
    for make in (partial(Federation.from_arrays, [(x, ages)]), partial(Federation.from_folder, tmp_path)):
        with refused("60 different integers from 20 to 79", "task='regression'", "task='classification'"):
            make()
        assert make(task="regression").classes is None
        assert make(task="classification").classes == 80
    numbers = Federation.from_arrays([(x, ages)], task="regression", test_fraction=0.0)
    assert numbers.train.y.tolist() == ages.tolist()
    assert Federation.from_arrays([(x, ages)], classes=80).classes == 80
    many = Federation.from_arrays([(x, np.arange(60) % 30)])
    assert many.classes == 30
    assert any("30 classes" in note and "task='regression'" in note for note in many.notes)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_labels_beyond_64_bits_are_named_as_they_are(refused, kind):
    with refused("'client-0'", "9223372036854775808", "below 2^63"):
        Federation.from_arrays([(X, kind(np.array([0, 2**63] * 5, np.uint64)))])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9))
def test_held_out_samples_are_a_true_split(sizes, fraction, validation, seed):
    data = [(np.arange(a, b, dtype=float)[:, None], np.zeros(b - a)) for a, b in pairwise(np.cumsum([0, *sizes]))]
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
    fed = Federation.from_arrays([(X, Y), (X, Y)], test=[(X[:3], Y[:3]), None], validation=[None, (X[:2], Y[:2])])
    assert (fed.train.counts.tolist(), fed.test.counts.tolist()) == ([10, 10], [3, 0])
    assert fed.validation.counts.tolist() == [0, 2]


def holed(*values):
    x = X.copy()
    x[2 : 2 + len(values), 1] = values
    return x


CAT, RAGGED = (X, ["cat"] * 10), ([[1.0], [1.0, 2.0]], [0, 1])


@pytest.mark.parametrize(
    ("words", "parts", "given"),
    [
        (("'b'", "train", "1 of 30", "NaN"), [(X, Y), (holed(np.nan), Y)], {}),
        (("'a'", "test", "2 of 30"), [(X, Y)], {"test": [(holed(np.nan, np.inf), Y)]}),
        (("'a'", "targets", "NaN"), [(X, np.full(10, np.nan))], {}),
        (("'b'", "no training samples"), [(X, Y), (X[:0], Y[:0])], {}),
        (("'b'", "label 5", "0 to 1"), [(X, Y), (X, Y * 5)], {"classes": 2}),
        (("'a'", "label -1", "0 to 1"), [(X, np.where(Y > 0, 1, -1))], {"classes": 2}),
        (("'a'", "label -1", "0 to 2"), [(X, np.arange(10) % 4 - 1)], {}),
        (("'a'", "test", "label 3", "0 to 1"), [(X, Y)], {"test": [(X, Y * 3)]}),
        (("label 0", "two classes"), [(X, Y * 0)], {}),
        (("'a'", "distinct"), [(X, Y), (X, Y)], {"names": ["a", "a"]}),
        (("'b'", "[2]", "[3]", "'a'"), [(X, Y), (X[:, :2], Y)], {}),
        (("'a'", "10 against 9"), [(X, Y[:9])], {}),
        (("'a'", "dtype object"), [(X.astype(object), Y)], {}),
        (("'a'", "'cat'", "expected at least two classes"), [CAT], {}),
        (("'a'", "ragged"), [RAGGED], {}),
        (("'a'", "label 0.5", "not an integer"), [(X, Y / 2)], {"classes": 2}),
        (("label 1e+300", "out of range"), [(X, Y * 1e300)], {"task": "classification"}),
        (("NaN or infinite",), [(X, np.where(Y, np.inf, 0))], {"task": "classification"}),
        (("'a'", "label 0.5", "integers are expected"), [(X, Y / 2)], {"task": "classification"}),
        (("'b'", "floats", "'a'", "integers"), [(X, Y), (X, Y * 1.5)], {}),
        (("'a'", "[10]", "[samples, features, ...]"), [(X[:, 0], Y)], {}),
        (("'a'", "[10, 2]", "one integer per sample"), [(X, np.eye(2, dtype=int)[Y])], {}),
        (("'a'", "pair"), [X], {}),
        (("found no client, expected at least one",), [], {}),
        (("names: found 2 for 1",), [(X, Y)], {"names": ["a", "b"]}),
        (("test: found 2 entries for 1",), [(X, Y)], {"test": [(X, Y), (X, Y)]}),
        (("clusters", "1 integers"), [(X, Y)], {"clusters": [0, 1]}),
        (("classes: found 1",), [(X, Y)], {"classes": 1}),
        (("classes: found 3", "regression"), [(X, Y)], {"classes": 3, "task": "regression"}),
        (("1000000000001 classes",), [(X, Y * 10**12)], {"task": "classification"}),
        (("task: found 'guess'",), [(X, Y)], {"task": "guess"}),
        (("test fraction", "1.0"), [(X, Y)], {"test_fraction": 1.0}),
        (("seed", "-1"), [(X, Y)], {"seed": -1}),
    ],
)
def test_every_fault_is_one_line_that_names_the_client(refused, words, parts, given):
    with refused(*words):
        Federation.from_arrays(parts, **{"names": ["a", "b"][: len(parts)], **given})


def test_summary_counts_every_label():
    fed = Federation.from_arrays([pair(10), pair(20, classes=3)], names=["a", "b"], clusters=[0, 1], test_fraction=0.0)
    table = fed.summary()
    assert ",".join(table.columns) == "client,train,validation,test,cluster,class_0,class_1,class_2"
    assert table.loc[:, "class_0":].to_numpy().tolist() == [[5, 5, 0], [7, 7, 6]]
    assert table["train"].tolist() == [10, 20]


def test_describe_is_plain_json():
    fed = Federation.from_arrays([pair(10), pair(20)], clusters=np.array([0, 1]), validation_fraction=0.5)
    found = json.loads(json.dumps(fed.describe()))
    assert set(found) >= {"dataset", "partition", "seed", "classes", "clients", "clusters", "notes"}
    one = found["clients"][1]
    assert (one["name"], one["train"], sum(one["labels"]), one["validation"]) == ("client-1", 8, 8, 8)
    assert found["clusters"] == [0, 1]
    regression = Federation.from_arrays([(np.zeros((4, 1)), np.zeros(4))])
    assert json.loads(json.dumps(regression.describe()))["clients"][0]["labels"] is None


def test_with_validation_moves_training_samples(refused):
    fed = Federation.from_arrays([pair(10), pair(1)], test_fraction=0.0)
    cut = fed.with_validation(0.3, seed=1)
    assert cut.validation is not None
    assert (cut.train.counts.tolist(), cut.validation.counts.tolist()) == ([7, 1], [3, 0])
    with refused("validation split already"):
        cut.with_validation(0.1)
    with refused("validation fraction"):
        fed.with_validation(1.5)


def test_reorder_takes_everything_along():
    fed = Federation.from_arrays([pair(10, seed=i) for i in range(3)], clusters=[0, 1, 2], names=list("abc"))
    back = fed.reorder([2, 0])
    assert (back.names, back.clusters.tolist()) == (("c", "a"), [2, 0])
    assert torch.equal(back.test.client(0)[0], fed.test.client(2)[0])


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_from_torch_datasets(refused):
    x, y = torch.tensor(X), torch.tensor(Y)
    tensors = torch.utils.data.TensorDataset(x, y)
    fed = Federation.from_datasets([Items([*zip(x, Y.tolist(), strict=True)]), tensors], test_fraction=0.0)
    assert torch.equal(fed.train.client(0)[0], fed.train.client(1)[0])
    assert fed.train.y.tolist() == [*Y, *Y]
    with refused("'b'", "train", "item 0"):
        Federation.from_datasets([tensors, Items(["no pair at all"] * 6)], names=["a", "b"])
    with refused("found no client, expected at least one"):
        Federation.from_datasets([])


def write_csv(path, rows, header="a,b,target"):
    path.write_text("\n".join([header, *rows]) + "\n")


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
    for one, other in ((fed.train, same.train), (fed.test, same.test)):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
    named = Federation.from_files(sorted(tmp_path.iterdir()), "outcome", drop=["id"], names=["a", "b"])
    assert named.names == ("a", "b")


def test_uint8_images_in_files_become_floats_channels_first_and_tests_of_their_own_stay(tmp_path):
    images, y = np.full((4, 5, 6, 3), 255, np.uint8), [0, 1, 0, 1]
    np.savez(tmp_path / "a.npz", x=images, y=y, x_test=images[:2], y_test=y[:2])
    fed = Federation.from_folder(tmp_path)
    assert (fed.input_shape, fed.train.x.min()) == ((3, 5, 6), 1.0)
    assert (len(fed.train.y), len(fed.test.y)) == (4, 2)


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
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    with refused("nowhere", "no such folder"):
        Federation.from_folder(tmp_path / "nowhere")
    with refused(tmp_path, "no CSV or npz"):
        Federation.from_folder(tmp_path)
    for content, word in ((b"", "is empty"), (b"\xff\xfe\x00", "UTF-8")):
        one.write_bytes(content)
        with refused("one.csv", word):
            Federation.from_folder(tmp_path)
    write_csv(one, ["1,2,0", "1,3,1"])
    write_csv(two, ["1,2,0", "1,3,1"], "a,c,target")
    with refused("two.csv", "one.csv", "'c'", "'b'"):
        Federation.from_folder(tmp_path)
    two.unlink()
    with refused("one.csv", "'score'", "a, b, target"):
        Federation.from_folder(tmp_path, target="score")
    with pytest.raises(ConfigError, match=r"task.*'guess'"):
        Federation.from_folder(tmp_path, task="guess")
    one.unlink()
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_test=X)
    with refused("a.npz", "y_test"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_test=X, y_test=Y)
    np.savez(tmp_path / "b.npz", x=X, y=Y)
    with refused("b.npz", "x_test"):
        Federation.from_folder(tmp_path)
