"""A folder of images, LABEL/IMAGE, as a site's own: the bits of one machine, and nothing said of names."""

import shutil

import hospitals
import numpy as np
import pytest

from polyfed.base.columns import Columns
from polyfed.base.errors import DataError
from polyfed.data import schema
from polyfed.data.prepare import Cut
from polyfed.data.readers import digest
from polyfed.data.repairs import read
from polyfed.studies.predict import Predictor, predicted

pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
NAMES = ("bern", "oslo")
COLUMNS = '[columns]\nimage = "image"\ntarget = "label"\nlabels = ["dark", "light"]\nsize = 6\npixels = "half"\n'
ASKED = Columns(image="image", target="label", labels=["dark", "light"], size=6)
CUT = Cut(0, 0.2, 0.0)


def paint(place, labels=("dark", "light"), n=9):
    rng = np.random.default_rng(len(place.name) + n)
    for k, label in enumerate(labels):
        (place / label).mkdir(parents=True)
        for i in range(n):
            image = pillow.fromarray(rng.integers(120 * k, 120 * k + 100, (8, 9, 3)).astype(np.uint8))
            image.save(place / label / f"smith-{i}.png")
    return place


def scans(place):
    """Two sites, of which oslo has no image of the second class."""
    paint(place / "bern")
    paint(place / "oslo", ("dark",), 12)
    (place / "oslo" / "light").mkdir()
    return place


def at(path, asked=ASKED):
    return schema.File(path, "bern", asked, CUT)


def linked_folder(folder):
    shutil.rmtree(folder / "light")
    (folder / "light").symlink_to(paint(folder.parent / "others") / "light")


OTHER = "is a folder of images, and the experiment has not image"


def test_sites_train_on_folders_to_the_bit_and_name_no_file(tmp_path):
    file = hospitals.experiment(
        tmp_path / "study.toml", 'name = "fedavg"\nlr = 0.05', COLUMNS + '[model]\nname = "linear"'
    )
    data = scans(tmp_path / "data")
    sites = hospitals.Sites(tmp_path, data, names=NAMES)
    there = hospitals.at_sites(file, sites)
    hospitals.same(hospitals.on_one_machine(file, data), there, sites)
    said = at(data / "bern").schema().model_dump_json()
    assert not any(word in line for word in ("smith", ".png") for line in (*sites.lines, said))
    model = Predictor.open(tmp_path / "vaults" / "bern" / "model.safetensors")
    answers, _ = predicted(model, read(paint(tmp_path / "new", ("any",))))
    assert set(answers.prediction) == {"dark"}


def test_a_file_named_twice_in_a_table_is_not_said_either(tmp_path):
    (tmp_path / "bern.csv").write_text("image,label\nsmith.png,dark\nsmith.png,light\n7,dark\n7,light\n")
    assert "smith" not in at(tmp_path / "bern.csv").schema().model_dump_json()


def test_the_digest_is_of_names_and_contents(tmp_path):
    one, two = paint(tmp_path / "one"), tmp_path / "two"
    shutil.copytree(one, two)
    (two / ".hidden").mkdir()
    (two / ".hidden" / "a.png").write_text("not looked at")
    assert digest(one) == digest(two)
    (two / "dark" / "smith-0.png").rename(two / "light" / "smith-9.png")
    assert digest(one) != digest(two)


@pytest.mark.parametrize(
    ("spoil", "asked", "says"),
    [
        (lambda f: (f / "dark" / "x.png").symlink_to(paint(f.parent / "others") / "dark" / "smith-0.png"), ASKED,
         r"x\.png: is a link out of the folder of images"),
        (linked_folder, ASKED, r"smith-0\.png: is a link out of the folder of images"),
        (lambda f: (f / "dark").rename(f / "darc"), ASKED,
         r"found the label 'darc' \(did you mean 'dark'\?\), expected one of dark, light"),
        (str, Columns(image="image", target="label"), "names of folders, which are not said; expected labels in"),
        (str, Columns(image="scan", target="label"), OTHER), (str, Columns(), OTHER),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_such_folder_is_refused_before_anything_is_said(tmp_path, spoil, asked, says):
    folder = paint(tmp_path / "bern")
    spoil(folder)
    with pytest.raises(DataError, match=says) as error:
        at(folder, asked)
    assert not {"smith", "darc", str(tmp_path)} & {*error.value.outside.split()}
