"""HAR, LEAF's two, Digit-5 and Office-Caltech10, from files in their authors' forms, in miniature."""

import hashlib

import numpy as np
import pytest
from authors import five, har, leaf, office, speeches, written, zipped
from scipy.io import savemat

from polyfed.base.errors import DataError
from polyfed.data import load
from polyfed_papers import natural

# people


def test_a_person_of_har_is_a_client_with_lines_of_both_parts(tmp_path):
    har(tmp_path)
    data = load("har", tmp_path)
    assert data.group_names == ("person-01", "person-02", "person-03")
    assert np.array(data.groups).tolist() == [0, 0, 1, 1, 2]
    assert data.y.tolist() == [0, 5, 2, 3, 1]
    np.testing.assert_allclose(data.x, np.array([0, 0.1, 0.3, 0.4, 0.2])[:, None] + np.zeros(561), rtol=1e-6)
    fed = data.partition()
    assert fed.classes == 6
    assert (fed.train.counts + fed.test.counts).tolist() == [2, 2, 1]


def test_hars_zip_is_read_as_it_is_and_its_checksum_compared(tmp_path, monkeypatch):
    folder, path = har(tmp_path / "made"), tmp_path / "har" / "UCI HAR Dataset.zip"
    path.parent.mkdir()
    zipped(folder, path)
    data = load("har", tmp_path)
    assert np.array_equal(data.x, load("har", tmp_path / "made").x)
    assert "UCI HAR Dataset.zip is not the published file (its SHA-256 differs)" in data.notes
    monkeypatch.setattr(natural, "HAR_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    assert not any("differs" in note for note in load("har", tmp_path).notes)


LABELS, ROWS = "train/y_train.txt", "train/X_train.txt"


@pytest.mark.parametrize(("file", "text", "words"), [
    (LABELS, "1\n7\n2\n", ["labels from 1 to 7", "1 to 6"]), (LABELS, "1\n2\n", ["train", "[3, 2, 3] lines"]),
    (LABELS, "1\n2 3\n4\n", [LABELS, "cannot be read"]), (ROWS, "1 2 3\n", [ROWS, "[1, 3]", "561 a line"]),
    (ROWS, None, [ROWS, "No such file"]),
])  # fmt: skip
def test_what_is_wrong_with_har_is_named(file, text, words, tmp_path, refused):
    folder = har(tmp_path)
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    with refused(folder, *words):
        load("har", tmp_path)
    path = tmp_path / "UCI HAR Dataset.zip"
    zipped(folder, path)
    path.write_bytes(path.read_bytes()[:-40])
    with refused(path, "not a zip"):
        load("har", tmp_path)


# writers and roles


def test_a_writer_of_femnist_is_a_client(tmp_path):
    folder = tmp_path / "femnist" / "data" / "all_data"
    leaf(folder / "all_data_0.json", {"f0_01": written(0, 61, 7), "f0_02": written(35)})
    leaf(folder / "all_data_1.json", {"f1_09": written(36, 10)})
    data = load("femnist", tmp_path)
    assert data.group_names == ("f0_01", "f0_02", "f1_09")
    assert np.array(data.groups).tolist() == [0, 0, 0, 1, 2, 2]
    assert (data.y.tolist(), data.x.shape) == ([0, 61, 7, 35, 36, 10], (6, 1, 28, 28))
    np.testing.assert_allclose(data.x[:, 0, 5, 5], data.y / 100, rtol=1e-6)
    assert load("femnist", tmp_path, flat=True).partition().input_shape == (784,)
    few = load("femnist", tmp_path, samples=2)
    assert np.bincount(np.array(few.groups)).tolist() == [2, 1, 2]
    np.testing.assert_allclose(few.x[:, 0, 5, 5], few.y / 100, rtol=1e-6)


def test_leafs_split_by_sample_is_kept_and_that_by_user_makes_more_clients(tmp_path):
    folder = tmp_path / "femnist" / "data"
    leaf(folder / "all_data" / "all_data_0.json", {"none": written(1)})  # an earlier step, which is not read
    leaf(folder / "train" / "a_train_9.json", {"f0": written(1, 2), "f1": written(3)})
    leaf(folder / "test" / "a_test_9.json", {"f1": written(4, 5), "f0": written(6)})
    fed = load("femnist", tmp_path).partition()
    assert fed.meta["test"] == "given"
    assert [fed.test.client(i)[1].tolist() for i in range(2)] == [[6], [4, 5]]
    leaf(folder / "test" / "a_test_9.json", {"f2": written(4, 5, 6)})
    data = load("femnist", tmp_path)
    assert data.group_names == ("f0", "f1", "f2")
    assert data.x_test is None
    assert any("split is by user" in note for note in data.notes)


def test_leafs_own_list_of_checksums_is_held_to(tmp_path):
    path = leaf(tmp_path / "femnist/data/all_data/all_data_0.json", {"f0": written(1, 2)})
    assert any("no checksum is published" in note for note in load("femnist", tmp_path).notes)
    listed = tmp_path / "femnist/meta/dir-checksum.md5"
    listed.parent.mkdir()
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    listed.write_text(f"{md5}  data/all_data/all_data_0.json\n")
    assert not any("checksum" in note for note in load("femnist", tmp_path).notes)
    listed.write_text(f"{md5[::-1]}  data/all_data/all_data_0.json\n")
    differs = "not the files that dir-checksum.md5 lists (their MD5 differs): all_data_0.json"
    assert differs in load("femnist", tmp_path).notes


def test_a_role_of_shakespeare_is_a_client_and_letters_are_numbers(tmp_path):
    """LEAF's alphabet begins with the line's end and the blank; a bar is not in it."""
    text = "".join(natural.LETTERS)
    assert len(text) == len(set(text)) == 80
    role = [text, "\n" + " " * 79, "|" + text[1:], text], ["}", " ", "a", "é"]
    leaf(tmp_path / "shakespeare" / "all_data.json", {"THE_TEMPEST_ARIEL": role, "MUTE": ([], [])})
    data = load("shakespeare", tmp_path)
    assert data.group_names == ("THE_TEMPEST_ARIEL",)
    assert (data.x.tolist(), data.y.tolist()) == ([list(range(80)), [0] + [1] * 79], [79, 1])
    assert any(note.startswith("2 samples with characters") for note in data.notes)


def test_the_last_samples_of_a_role_are_held_out(tmp_path):
    x = [natural.LETTERS[k:] + natural.LETTERS[:k] for k in range(10)]
    leaf(tmp_path / "shakespeare/data/all_data/all_data.json", {"R": (x, list(natural.LETTERS[:10]))})
    fed = load("shakespeare", tmp_path).partition()
    assert (fed.train.y.tolist(), fed.test.y.tolist()) == (list(range(8)), [8, 9])


def test_a_speaker_of_the_plays_is_a_client_and_the_next_letter_the_label(tmp_path):
    """Of 200 speeches with 25 characters and a line's end between them; one with two characters is no client."""
    speeches(tmp_path, ("All", "First Citizen"))
    data = load("tiny-shakespeare", tmp_path)
    assert (data.group_names, data.x.shape) == (("All", "First Citizen"), (2 * (200 * 26 - 1 - 20), 20))
    letters = [natural.LETTERS[k] for k in (*data.x[0], data.y[0])]
    assert "".join(letters) == "0 Speak, speak. resol"
    few = load("tiny-shakespeare", tmp_path, samples=30).partition()
    assert few.train.counts.tolist() == [24, 24]
    (tmp_path / "input.txt").write_text("no speech")
    with pytest.raises(DataError, match="no speaker with 5000 characters"):
        load("tiny-shakespeare", tmp_path)


def grey(value, pixels=784):
    return {"f0": ([[value] * pixels], [1])}


LEAF = [  # users, a change of the file's text, and what is said of it
    ({"f0": written(1, 62)}, str, ["'f0'", "labels from 0 to 61"]), (grey(0.5, 783), str, ["'f0'", "784 pixels"]),
    (grey(255.0), str, ["'f0'", "from 0 to 1"]),
    (grey(0.5), lambda t: t.replace('"num_samples": [1]', '"num_samples": [2]'), ["'f0'", "num_samples says 2"]),
    (grey(0.5), lambda t: t.replace('"user_data": {"f0"', '"user_data": {"f1"'), ["user 'f0'", "KeyError"]),
    (grey(0.5), lambda t: t[: len(t) // 2], ["expected JSON with LEAF's users"]),
    (grey(0.5), lambda t: "[1, 2]", ["expected JSON with LEAF's users"]),
]  # fmt: skip


@pytest.mark.parametrize(("users", "change", "words"), LEAF)
def test_what_is_wrong_with_a_file_of_leaf_is_named(users, change, words, tmp_path, refused):
    path = leaf(tmp_path / "femnist/data/all_data/all_data_0.json", users)
    path.write_text(change(path.read_text()))
    with refused(path, *words):
        load("femnist", tmp_path)


def test_what_is_wrong_with_leafs_folders_is_named(tmp_path, refused):
    with refused("femnist", "all_data_*.json", tmp_path, "preprocess.sh"):
        load("femnist", tmp_path)
    for k in (0, 1):
        leaf(tmp_path / f"femnist/data/all_data/all_data_{k}.json", {"f0": written(1)})
    with refused("all_data_1.json", "'f0' is there twice"):
        load("femnist", tmp_path)
    leaf(tmp_path / "shakespeare/all_data.json", {"R": (["too short"], ["a"])})
    with refused("all_data.json", "'R'", "80 characters"):
        load("shakespeare", tmp_path)


# sources


def test_a_source_of_digit_five_is_a_client_or_several(tmp_path):
    five(tmp_path / "Digit-Five")
    data = load("digit-5", tmp_path)
    assert data.group_names == ("mnist", "mnistm", "svhn", "usps", "syn")
    assert (data.x.shape, data.y.tolist()) == ((20, 3, 28, 28), [0, 1, 2, 3] * 5)
    assert data.x[:, :, 1, 26].tolist() == [[60 * k + i] * 3 for i in range(5) for k in range(4)]
    assert not data.x[:, :, 26, 1].any()
    assert data.y_test.tolist() == [0, 1] * 5
    fed = data.partition()
    assert (fed.meta["test"], fed.clusters.tolist()) == ("given", [0, 1, 2, 3, 4])
    two = load("digit-5", tmp_path, clients=2, samples=1)
    assert two.group_names[:3] == ("mnist-0", "mnist-1", "mnistm-0")
    assert np.array(two.group_clusters).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(two.y) == 10
    assert len(np.unique(two.x[:, 0, 0, 26])) == 10  # no image twice
    assert load("digit-5", tmp_path, clients=2, seed=1, samples=1).x.tolist() != two.x.tolist()


def test_checksums_of_svhn_and_counts_of_all_are_compared(tmp_path, monkeypatch):
    root = five(tmp_path / "digit-5")
    notes = load("digit-5", tmp_path).notes
    assert "svhn_train_32x32.mat is not the published file (its MD5 differs)" in notes
    assert "usps: 4 images of 7438 in dataset 0 0; not comparable with the full set" in notes
    for file in natural.MD5:
        monkeypatch.setitem(natural.MD5, file, hashlib.md5((root / file).read_bytes()).hexdigest())
    assert not any("differs" in note for note in load("digit-5", tmp_path).notes)


SVHN = "svhn_train_32x32.mat"


@pytest.mark.parametrize(("table", "words"), [
    ({"X": np.zeros((30, 30, 3, 2)), "y": np.ones((2, 1))}, ["[2, 3, 30, 30]", "28 or 32"]),
    ({"X": np.zeros((32, 32, 3, 2)), "y": np.array([[1], [11]])}, ["2 labels from 0 to 10"]),
    ({"x": np.zeros(2)}, ["'X' is missing; it has x"]), (None, ["not a readable MATLAB file"]),
])  # fmt: skip
def test_what_is_wrong_with_digit_five_is_named(table, words, tmp_path, refused):
    root = five(tmp_path)
    good = (root / SVHN).read_bytes()
    (root / SVHN).write_bytes(good[: len(good) // 2]) if table is None else savemat(root / SVHN, table)
    with refused(root / SVHN, *words):
        load("digit-5", tmp_path)
    with refused("samples: found 3, expected at most 2 for 2 clients of mnist"):
        load("digit-5", tmp_path, clients=2, samples=3)
    (root / SVHN).write_bytes(good)
    (root / "syn_number.mat").unlink()
    with refused("digit-5", "syn_number.mat", tmp_path, "POLYFED_DATA"):
        load("digit-5", tmp_path)


@pytest.mark.parametrize("inside", ["", "images"])
def test_a_source_of_office_caltech_is_a_client(tmp_path, inside):
    office(tmp_path / "office_caltech_10", inside)
    data = load("office-caltech10", tmp_path, size=8)
    assert data.group_names == ("amazon", "caltech", "dslr", "webcam")
    assert (data.x.shape, data.y.tolist()) == ((44, 3, 8, 8), [0, *range(10)] * 4)
    np.testing.assert_allclose(data.x[:, 0, 3, 3] * 255, 20 * data.y, atol=1e-4)
    np.testing.assert_allclose(data.x[:, 2, 3, 3] * 255, 50 * np.array(data.groups), atol=1e-4)
    assert any("not the 2533 published images" in note for note in data.notes)


def test_published_features_of_office_caltech(tmp_path):
    for k, stem in enumerate(("amazon", "Caltech10", "dslr", "webcam")):
        rows = np.random.default_rng(k).normal(size=(20, 800))
        savemat(tmp_path / f"{stem}_SURF_L10.mat", {"fts": rows, "labels": 1 + np.arange(20)[:, None] % 10})
    fed = load("office-caltech10", tmp_path, features="surf").partition()
    assert fed.input_shape == (800,)
    assert sorted(fed.train.client(1)[1].tolist() + fed.test.client(1)[1].tolist()) == sorted([*range(10)] * 2)
    assert abs(float(fed.train.x.double().mean(0).abs().max())) < 1e-6


def test_what_is_wrong_with_office_caltech_is_named(tmp_path, refused):
    with refused("office-caltech10", "folder amazon", tmp_path, "POLYFED_DATA"):
        load("office-caltech10", tmp_path)
    with refused("office-caltech10", "amazon_SURF_L10.mat", tmp_path):
        load("office-caltech10", tmp_path, features="surf")
    office(tmp_path)
    image = tmp_path / "dslr/kind-3/frame_0.png"
    good = image.read_bytes()
    for bad in (good[:30], good.replace(b"IDAT", b"\x01\x02\x03\x04")):
        image.write_bytes(bad)
        with refused(image):
            load("office-caltech10", tmp_path)
    image.unlink()
    (tmp_path / "dslr/kind-3").rmdir()
    with refused(tmp_path / "dslr", "the same ten"):
        load("office-caltech10", tmp_path)
