"""Facts that hold for every door through which data come in: a folder of CSV files, frames, data sets of dicts with
named classes, arrays, and sites that say no more than their schema."""

import unicodedata

import numpy as np
import pandas as pd
import pytest
import torch
from doors import settled, written

import polyfed as pf
from polyfed.base.errors import DataError

N = 12
ROWS = np.random.default_rng(0).normal(size=(3, N, 2)).round(3)
NAMES = ("north", "south", "west")


def frames(labels, **columns):
    """A frame per site: two inputs, further columns, and the labels last. labels: per site, of N rows or less"""
    return {
        name: pd.DataFrame(
            {"a": ROWS[k, : len(y), 0], "b": ROWS[k, : len(y), 1], **{c: v[k] for c, v in columns.items()}, "y": y}
        )
        for k, (name, y) in enumerate(zip(NAMES, labels, strict=False))
    }


class Dataset:
    """Stands for a data set of Hugging Face's library with a ClassLabel."""

    def __init__(self, frame, names):
        self.frame, self.features = frame, {"y": type("ClassLabel", (), {"names": names})()}

    def to_pandas(self):
        return self.frame

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, k):
        row = self.frame.iloc[k]
        return {"x": [float(row["a"]), float(row["b"])], "y": int(row["y"])}


def class_of(fed):
    return [str(v) for v in fed.meta.get("labels") or fed.meta["preparation"]["labels"]]


def by_name(fed):
    """The named label of every row of every site, in no order."""
    labels = [[*fed.train.client(i)[1].tolist(), *fed.test.client(i)[1].tolist()] for i in range(fed.n)]
    return [sorted(class_of(fed)[k] for k in own) for own in labels]


def coded(y, names):
    return [list(names).index(v) for v in y]


Y = [["well", "ill", "ill"] * 4, ["ill", "well"] * 6, ["well", "well", "ill"] * 4]


def doors(tmp_path, y, orders):
    """The same named classes through every door that knows an order. orders: per site"""
    made = frames(y)
    ordered = {
        n: f.assign(y=pd.Categorical(f.y, o, ordered=True)) for (n, f), o in zip(made.items(), orders, strict=True)
    }
    sets = [Dataset(f.assign(y=coded(f.y, o)), list(o)) for f, o in zip(made.values(), orders, strict=True)]
    torches = [torch.utils.data.Subset(Pairs(ROWS[k], coded(y[k], o), o), range(N)) for k, o in enumerate(orders)]
    yield "frames", pf.data.from_frames(ordered, "y")
    yield "named data sets as frames", pf.data.from_frames(dict(zip(made, sets, strict=True)), "y")
    yield "named data sets by item", pf.Federation.from_datasets(sets, input="x", target="y", names=NAMES)
    yield "torch data sets", pf.Federation.from_datasets(torches, names=NAMES)
    arrays = [(ROWS[k], f["y"]) for k, f in enumerate(ordered.values())]
    yield "arrays", pf.Federation.from_arrays(arrays, names=NAMES)


class Pairs(torch.utils.data.Dataset):
    """A torch data set that names its classes, as those of torchvision do."""

    def __init__(self, x, y, classes):
        self.x, self.y, self.classes = torch.tensor(x), y, list(classes)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        return self.x[k], self.y[k]


FIRST, LAST, MORE = ("well", "ill"), ("ill", "well"), ("well", "dying", "ill")


@pytest.mark.parametrize(
    ("orders", "second", "expected", "said"),
    [
        ([FIRST] * 3, Y[1], FIRST, ["well, ill"]),
        ([LAST] * 3, Y[1], LAST, ["ill, well"]),
        ([FIRST, LAST, FIRST], Y[1], LAST, ["different orders", "orders differ"]),
        ([LAST, FIRST, LAST], Y[1], LAST, ["different orders", "orders differ"]),
        ([FIRST, MORE, FIRST], ["dying", "well"] * 6, MORE, [""]),
    ],
)
def test_the_order_of_classes_is_kept_and_said_at_every_door(tmp_path, orders, second, expected, said):
    """Where sites order them differently they match by name; who knows fewer keeps the order of the others."""
    y = [Y[0], second, Y[2]]
    for door, fed in doors(tmp_path, y, orders):
        assert tuple(class_of(fed)) == expected, door
        assert by_name(fed) == [sorted(v) for v in y], door
        assert any(words in note for note in fed.notes for words in said), door


def test_names_without_an_order_are_classes_by_the_alphabet_at_every_door(tmp_path):
    made = frames(Y)
    feds = [
        pf.data.from_frames(made, "y"),
        pf.Federation.from_folder(written(tmp_path / "d", made), target="y"),
        pf.Federation.from_arrays([(ROWS[k], y) for k, y in enumerate(Y)], names=NAMES),
        pf.Federation.from_arrays([(ROWS[k], np.array(y, dtype=object)) for k, y in enumerate(Y)], names=NAMES),
    ]
    for k, name in enumerate(NAMES):
        np.savez(tmp_path / f"{name}.npz", x=ROWS[k], y=np.array(Y[k]))
    feds.append(pf.Federation.from_folder(tmp_path))
    for fed in feds:
        assert class_of(fed) == ["ill", "well"]
        assert by_name(fed) == [sorted(y) for y in Y]
    assert settled(tmp_path / "d", target="y")[0].preparation.labels == ("ill", "well")


def test_names_and_numbers_do_not_mix(refused):
    with refused("client 'south'", "numbers", "'north'", "names"):
        pf.Federation.from_arrays([(ROWS[0], Y[0]), (ROWS[1], [0, 1] * 6)], names=NAMES[:2])
    with refused("client 'north'", "None", "a name for every sample"):
        pf.Federation.from_arrays([(ROWS[0], [None, *Y[0][1:]]), (ROWS[1], Y[1])], names=NAMES[:2])


@pytest.mark.parametrize(
    ("odd", "one", "other"),
    [(0, "0 1", "0.0 01"), (1, "1 2", "1.00 +2"), (2, "-1 1", "-1.0 +1.0"), (0, "0.0 1.0", "0 1"), (2, "0 1", "0.0 1")],
)
def test_labels_that_are_alike_as_numbers_are_alike_everywhere(tmp_path, odd, one, other):
    """Whichever site writes them otherwise, by every door, and where rows without a target are dropped."""
    made = frames([(other if k == odd else one).split() * 6 for k in range(3)])
    folder = written(tmp_path / "d", made)
    typed = {name: pd.read_csv(folder / f"{name}.csv") for name in made}
    feds = [pf.Federation.from_folder(folder, target="y"), *(pf.data.from_frames(m, "y") for m in (made, typed))]
    for frame in typed.values():
        frame["y"] = frame["y"].astype(float)
        frame.loc[0, "y"] = np.nan
    gone = {"target": "y", "missing_target": "drop"}
    feds += [pf.data.from_frames(typed, **gone), pf.Federation.from_folder(written(tmp_path / "g", typed), **gone)]
    for fed in feds:
        assert (fed.classes, fed.loss) == (2, "cross-entropy")
        assert class_of(fed) == [str(int(float(v))) for v in one.split()]
        assert fed.aim.startswith("target y, 2 classes")
    assert settled(folder, target="y")[0].classes == 2
    assert settled(folder, target="y")[0].notes == feds[0].notes


@pytest.mark.parametrize("odd", range(3))
def test_arrays_and_files_of_arrays_take_whole_floats_for_labels_where_a_client_has_integers(tmp_path, odd, refused):
    parts = [(ROWS[k], np.array([0, 1] * 6, dtype=float if k == odd else int)) for k in range(3)]
    for k, name in enumerate(NAMES):
        np.savez(tmp_path / f"{name}.npz", x=parts[k][0], y=parts[k][1])
    texts = [(x, [str(v) for v in y]) if k == odd else (x, y) for k, (x, y) in enumerate(parts)]
    arrays = [pf.Federation.from_arrays(given) for given in (parts, texts)]
    for fed in (*arrays, pf.Federation.from_folder(tmp_path), pf.data.load(tmp_path).partition(seed=0)):
        assert (fed.classes, fed.loss) == (2, "cross-entropy")
    parts[odd] = (parts[odd][0], parts[odd][1] + 0.5)
    with refused("targets are", "integers", "floats"):
        pf.Federation.from_arrays(parts)


@pytest.mark.parametrize("n", [2, 3])
def test_codes_beyond_2_53_stay_exact(tmp_path, n):
    codes = [str(900719925474099267 + k) for k in range(n)]
    y = [codes * (N // n)] * 3
    made = frames(y, ward=y)
    folder = written(tmp_path / "d", made)
    whole = {name: frame.astype({"y": "int64", "ward": "Int64"}) for name, frame in made.items()}
    for fed in (pf.Federation.from_folder(folder, target="y"), *(pf.data.from_frames(m, "y") for m in (made, whole))):
        assert class_of(fed) == codes
        assert by_name(fed) == [sorted(v) for v in y]
        assert fed.meta["inputs"][2:] == [f"ward={code}" for code in codes]
    assert settled(folder, target="y")[0].preparation.labels == tuple(codes)
    for labels in ([*map(int, codes)], codes):
        fed = pf.Federation.from_arrays([(ROWS[k], np.array(labels * (N // n))) for k in range(3)])
        assert by_name(fed) == [sorted(v) for v in y]


def test_a_number_with_a_fraction_at_one_site_makes_it_a_regression_of_all(tmp_path):
    made = frames([["1", "2"] * 6, ["1.0", "2.0"] * 6, ["1.5", "2.0"] * 6])
    folder = written(tmp_path / "d", made)
    for fed in (pf.data.from_frames(made, "y"), pf.Federation.from_folder(folder, target="y")):
        assert (fed.classes, fed.aim) == (None, "target y, a regression")
    assert settled(folder, target="y", standardise="client")[0].classes is None


def test_true_at_one_site_and_1_at_another_is_refused_with_what_to_do(tmp_path, refused):
    made = frames([["True", "False"] * 6, ["1", "0"] * 6, ["TRUE", "FALSE"] * 6])
    folder = written(tmp_path / "d", made)
    for way in (lambda: pf.data.from_frames(made, "y"), lambda: pf.data.load(folder, target="y")):
        with refused("'y'", "true or false"):
            way()


@pytest.mark.parametrize("odd", range(3))
def test_both_spellings_of_a_name_are_one(tmp_path, odd):
    """Of columns, categories, labels, sites, and of what is said about them."""

    def spelt(text, k):
        return unicodedata.normalize("NFD" if k == odd else "NFC", text)

    made = frames(Y)
    for k, frame in enumerate(made.values()):
        frame["y"] = [spelt({"ill": "übel", "well": "schön"}[v], k) for v in frame["y"]]
        frame[spelt("größe", k)] = [spelt(v, k) for v in ["hünenhaft", "klein", "möglich"] * 4]
    made = {spelt(name + "ü", k): frame for k, (name, frame) in enumerate(made.items())}
    folder = written(tmp_path / "d", made)
    told = {"target": "y", "labels": [spelt("übel", 1), spelt("schön", 0)], "drop": [spelt("größe", 0)]}
    for way in (lambda **o: pf.data.from_frames(made, **o), lambda **o: pf.Federation.from_folder(folder, **o)):
        fed = way(target="y")
        assert fed.meta["inputs"][2:] == ["größe=hünenhaft", "größe=klein", "größe=möglich"]
        assert class_of(fed) == ["schön", "übel"]
        assert sorted(fed.names) == ["northü", "southü", "westü"]
        assert way(**told).meta["inputs"] == ["a", "b"]
        assert fed.without([spelt("westü", 0)]).n == 2
        fitted = pf.fit(torch.nn.Linear(5, 2), fed, pf.FedAvg(lr=0.1), rounds=1)
        assert len(fitted.predict(spelt("westü", 0), next(iter(made.values())))) == N
    assert [*settled(folder, target="y")[0].preparation.names[2:]] == fed.meta["inputs"][2:]


LEFT = [
    *("._north.csv", ".~lock.north.csv#", "~$north.csv", "~$north.xlsx", "._south.xlsx", "Thumbs.db", "desktop.ini"),
    *(".DS_Store", ".#north.csv", ".north.csv.swp", "north.csv~", "~north.tmp"),
]
PLACES = ["__MACOSX", "@eaDir", "$RECYCLE.BIN", ".Spotlight-V100", "System Volume Information"]
APPLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(50)


def test_what_systems_leave_beside_files_blocks_no_folder(tmp_path, refused):
    folder = written(tmp_path / "d", frames(Y))
    before = pf.Federation.from_folder(folder, target="y")
    for name in (*LEFT, "Icon\r"):
        (folder / name).write_bytes(APPLE)
    for name in PLACES:
        (folder / name).mkdir()
        (folder / name / "._north.csv").write_bytes(APPLE)
    for way in (pf.Federation.from_folder, lambda f, **o: pf.data.load(f, **o).partition(seed=0)):
        fed = way(folder, target="y")
        assert fed.names == before.names
        assert fed.train.x.equal(before.train.x)
    with refused("._north.csv", "macOS", "no table"):
        pf.Federation.from_files([folder / "north.csv", folder / "._north.csv"])


def test_what_systems_leave_among_images_is_none(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name in NAMES[:2]:
        for label in ("ill", "well"):
            place = tmp_path / name / label
            place.mkdir(parents=True)
            for k in range(3):
                image.new("RGB", (4, 4), (10 * k, 0, 0)).save(place / f"{k}.png")
            for left in LEFT:
                (place / left).write_bytes(APPLE)
        (tmp_path / name / "__MACOSX").mkdir()
        (tmp_path / name / "__MACOSX" / "._0.png").write_bytes(APPLE)
    for left in LEFT:
        (tmp_path / left).write_bytes(APPLE)
    (tmp_path / "__MACOSX").mkdir()
    fed = pf.data.load(tmp_path, size=4).partition(seed=0)
    assert fed.names == NAMES[:2]
    assert len(fed.train.x) + len(fed.test.x) == 12
    assert class_of(fed) == ["ill", "well"]


@pytest.mark.parametrize("sep", [";", "\t", ",", "|"])
@pytest.mark.parametrize("line", ["sep={}\r\n", "SEP={}\n", '"sep={}"\n', "\ufeffsep={}\r\n"])
def test_excels_line_on_what_parts_the_cells_is_read(tmp_path, sep, line):
    made = frames(Y)
    plain = pf.data.from_frames(made, "y")
    for name, frame in made.items():
        text = frame.to_csv(index=False, sep=sep, decimal="," if sep == ";" else ".")
        (tmp_path / f"{name}.csv").write_text(line.format(sep) + text, encoding="utf-8", newline="")
    fed = pf.Federation.from_folder(tmp_path, target="y")
    assert fed.meta["inputs"] == plain.meta["inputs"]
    assert fed.train.x.equal(plain.train.x)
    (tmp_path / "west.csv").write_text(line.format(sep) + f"a{sep}b{sep}y\n1{sep}x{sep}ill\n1{sep}2{sep}\n", newline="")
    with pytest.raises(DataError, match=r"west\.csv, line 4, column 'y'"):
        pf.Federation.from_folder(tmp_path, target="y", drop=["b"])


HEADLESS = [
    {"age": range(46, 46 + N), "chol": [6.86, 5.5, 4.2] * 4, "sex": ["m", "f"] * 6, "y": ["well", "ill"] * 6},
    {"pid": [f"P{k:03d}" for k in range(N)], "at": ["2024-03-14"] * N, "age": range(46, 46 + N), "y": ["Xa", "Xb"] * 6},
    {"age": range(46, 46 + N), "chol": ["", 5.5, 4.2] * 4, "y": ["well", "ill"] * 6},
    {"age": range(46, 46 + N), "chol": ["NA", 5.5, 4.2] * 4, "y": ["well", "ill"] * 6},
    {"sex": ["m", "f"] * 6, "ward": ["icu", "surgery"] * 6, "y": ["well", "well", "ill"] * 4},
    {"age": [46, 46, *range(50, 48 + N)], "weight": [46, *range(70, 69 + N)], "y": ["well", "ill"] * 6},
    {"chol": ["6,86", "5,5", "4,2"] * 4, "age": range(46, 46 + N), "y": ["well", "ill"] * 6},
]


@pytest.mark.parametrize("columns", HEADLESS)
@pytest.mark.parametrize("sep", [",", ";", "\t"])
def test_a_missing_header_is_said_and_no_patient_stands_in_the_message(tmp_path, columns, sep):
    made = pd.DataFrame(columns)
    for name in NAMES:
        made.to_csv(tmp_path / f"{name}.csv", index=False, header=False, sep=sep)
    first = [*map(str, made.iloc[0])]
    read = {name: pd.read_csv(tmp_path / f"{name}.csv", sep=sep) for name in NAMES}
    told = {"target": "outcome"}
    doors = (pf.data.load, tmp_path, told), (pf.data.load, tmp_path, {}), (settled, tmp_path, told)
    for way, given, how in (*doors, (pf.data.from_frames, read, told)):
        with pytest.raises(DataError) as error:
            way(given, **how)
        line = str(error.value).replace(str(tmp_path), "")
        assert "names" in line
        assert "row of data" in line
        assert not {*filter(None, first)} & {*line.replace("row of data", "").split("'")}, line
        assert not [cell for cell in first if len(cell) > 1 and cell != "NA" and cell in line], line


@pytest.mark.parametrize("header", ["0 1 y", "1 2 y", "2019 2020 y", "0 z y", "id x y", "Na K y"])
@pytest.mark.parametrize("labels", [["y", "n"], ["ill", "well"], ["0", "1"]])
def test_names_that_are_numbers_or_values_are_names(tmp_path, header, labels):
    if header[0].isdigit() and labels == ["y", "n"]:
        return  # a column of numbers called 0 and a class called as its column
    header = header.split()
    made = {n: pd.DataFrame(dict(zip(header, [*ROWS[k].T, labels * 6], strict=True))) for k, n in enumerate(NAMES)}
    assert pf.Federation.from_folder(written(tmp_path / "d", made)).meta["inputs"] == header[:2]
    assert pf.data.from_frames(made).meta["inputs"] == header[:2]


NOTATIONS = [
    *("6'860", "6’860", "6.860,5", "6,860.5", "6\u00a0860", "6\u202f860,5"),
    *("\u22126.8", "–6.8", "5 %", "5\u00a0%", "€ 5", "7 mg"),
]


@pytest.mark.parametrize("cell", NOTATIONS)
@pytest.mark.parametrize("sep", [",", ";"])
@pytest.mark.parametrize("rest", [0, 3])
def test_another_notation_at_one_site_is_called_that(tmp_path, refused, cell, sep, rest):
    """Where only some cells of the site are in it, too, and no gaps are proposed."""
    odd = ["8"] * rest + [cell.replace("6", str(k % 7 + 1)) for k in range(rest, N)]
    made = frames(Y, chol=[[f"{k}.5" for k in range(N)], [f"{k}.25" for k in range(N)], odd])
    folder = written(tmp_path / "d", made, sep=sep)
    doors = (pf.data.load, folder), (settled, folder), (pf.data.from_frames, made)
    for way, given in doors:
        with refused("'chol'", "another notation", "west") as error:
            way(given, target="y")
        assert "gaps" not in str(error.value)


@pytest.mark.parametrize("cell", ["inf", "-inf", "#VALUE!", "#N/A", "#WERT!", "n.a.", "k.A.", "unbekannt"])
def test_texts_that_stand_for_gaps_are_named_with_the_setting_that_takes_them(tmp_path, refused, cell):
    made = frames(Y, chol=[["1.5", "2", cell, "4"] * 3, ["1", "2", "3"] * 4, ["5"] * N])
    folder = written(tmp_path / "d", made)
    for way, given in ((pf.data.load, folder), (pf.data.from_frames, made)):
        with refused("'chol'", f'gaps = ["{cell}"]', "north"):
            way(given, target="y")
        assert way(given, target="y", gaps=[cell])


@pytest.mark.parametrize("cell", [[1.0, 2.0], np.zeros(3), (1, 2), {"a": 1}, {1, 2}, b"x", torch.zeros(2)])
def test_a_cell_that_is_no_cell_is_named_by_site_and_column(refused, cell):
    made = frames(Y)
    made["south"]["emb"] = [cell] * N
    for name in ("north", "west"):
        made[name]["emb"] = 1.0
    with refused("'south'", "'emb'", type(cell).__name__):
        pf.data.from_frames(made, "y")
    fed = pf.data.from_frames(made, "y", drop=["emb"])
    assert fed.meta["inputs"] == ["a", "b"]
    fitted = pf.fit(torch.nn.Linear(2, 2), fed, pf.FedAvg(lr=0.1), rounds=1)
    assert len(fitted.predict("south", made["south"])) == N
