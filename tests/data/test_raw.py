"""A column of texts: tokens and masks go in, at one place and at sites, and raw texts come out as answers."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError
from polyfed.studies.predict import Predictor

WORDS = ("pain", "fever", "none", "severe", "mild", "old")
LENGTH = 5

MODEL = """
import torch


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(8, 3), torch.nn.Linear(3, 2)

    def forward(self, x):
        mask = x[:, 1, :, None].to(self.head.weight.dtype)
        return self.head((self.embedding(x[:, 0]) * mask).sum(1) / mask.sum(1).clamp(min=1))
"""


def frame(n, seed):
    rng = np.random.default_rng(seed)
    notes = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(n)]
    return pd.DataFrame({"id": [f"{seed}-{k}" for k in range(n)], "note": notes, "ill": ["severe" in t for t in notes]})


def write(place):
    place.mkdir()
    for seed, name in enumerate(("bern", "oslo")):
        frame(40, seed).to_csv(place / f"{name}.csv", index=False)
    return place


def test_the_text_alone_goes_in_cut_and_masked(tokenizer):
    data = pd.DataFrame({"age": [3, 4], "note": ["pain fever", " ".join(WORDS)], "ill": [0, 1]})
    fed = pf.data.from_frames(
        {"bern": data}, "ill", text="note", tokenizer=str(tokenizer), length=LENGTH, test_fraction=0.0
    )
    assert fed.input_shape == (2, LENGTH)
    assert fed.train.x.tolist() == [[[2, 3, 0, 0, 0], [1, 1, 0, 0, 0]], [[2, 3, 4, 5, 6], [1] * LENGTH]]


def test_raw_texts_are_answered_by_an_export(tokenizer, tmp_path, cli):
    write(tmp_path / "data")
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "study.toml").write_text(
        f'rounds = 60\nseeds = 1\n[data]\nname = "./data"\n[columns]\ntarget = "ill"\ntext = "note"\n'
        f'length = {LENGTH}\ntokenizer = "{tokenizer}"\n[model]\nfile = "net.py"\n'
        '[algorithm]\nname = "fedavg"\nlr = 1.0\n'
    )
    cli("run", "study.toml", "--out", "run").done()
    new = frame(30, 7)
    new[["note"]].to_csv(tmp_path / "new.csv", index=False)
    assert cli("export", "run", "--client", "oslo").status == 0
    cli("predict", "oslo.safetensors", "new.csv", "--out", "answers.csv").done()
    found = pd.read_csv(tmp_path / "answers.csv")
    assert len(found) == 30
    heard = [" ".join(t.split()[:LENGTH]) for t in new.note]  # longer ones are cut
    right = (found.prediction.astype(str) == [str("severe" in t) for t in heard]).mean()
    assert right > 0.9
    tokenizer.with_name("other.json").write_text(tokenizer.read_text() + "\n")
    facts = json.loads((tmp_path / "oslo.json").read_text())
    facts["preparation"]["raw"]["tokenizer"] = str(tokenizer.with_name("other.json"))
    (tmp_path / "oslo.json").write_text(json.dumps(facts))
    said = cli("predict", "oslo.safetensors", "new.csv")
    assert said.status != 0
    assert "found digest" in said.err


def test_what_does_not_fit_is_said(tokenizer, tmp_path):
    data = {"bern": frame(9, 0)}
    for more, error, says in (
        ({"text": "note"}, ConfigError, "found None, expected one with a column text"),
        ({"text": "notes", "tokenizer": str(tokenizer)}, DataError, "no column 'notes', which columns.text names"),
        ({"text": "note", "tokenizer": "nowhere.json"}, DataError, r"nowhere\.json: cannot be read"),
        ({"text": "note", "tokenizer": __file__}, DataError, r"not a tokenizer\.json"),
    ):
        with pytest.raises(error, match=says):
            pf.data.from_frames(data, "ill", **more)


def test_sites_read_texts_with_their_own_tokenizer(tokenizer, tmp_path):
    """And say none of them; other columns they do not even name."""
    hospitals, place = pytest.importorskip("hospitals"), tmp_path / "at-oslo"
    tiny("bert", 8, hidden_size=8, num_hidden_layers=1, intermediate_size=8).save_pretrained(place)
    shutil.copy(tokenizer, place)
    file = tmp_path / "study.toml"
    file.write_text(
        f'rounds = 2\nbatch-size = 8\n[data]\n[columns]\ntarget = "ill"\ntext = "note"\nlength = {LENGTH}\n'
        'tokenizer = "at-oslo/tokenizer.json"\n[model]\nbackbone = "at-oslo"\nadapter = "lora:r=2,targets=query"\n'
        '[algorithm]\nname = "fedavg"\nlr = 0.1\n'
    )
    sites = hospitals.Sites(tmp_path, write(tmp_path / "data"), names=("bern", "oslo"))
    for name in sites.names:
        sites.member(name).backbone = place
    there = hospitals.at_sites(file, sites)
    here = hospitals.on_one_machine(file, tmp_path / "data")
    assert torch.equal(here.server["w"], there.server["w"])
    model = Predictor.open(tmp_path / "vaults" / "oslo" / "model.safetensors")
    assert len(model.predict(frame(3, 9))) == 3
    assert not any("id" in line.split() or "severe" in line for line in sites.lines)
    assert str(place) not in (tmp_path / "run" / "federation.json").read_text()


def paint(place, labels=("dark", "light"), n=12):
    """Folders of images, LABEL/IMAGE, of unlike sizes: those of the second label are brighter."""
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    rng = np.random.default_rng(len(place.name))
    for k, label in enumerate(labels):
        (place / label).mkdir(parents=True)
        for i in range(n):
            shape = (int(rng.integers(9, 14)), 10, 3)
            image = pillow.fromarray(rng.integers(120 * k, 120 * k + 100, shape).astype(np.uint8))
            image.save(place / label / f"{i}.{'png' if i % 2 else 'jpg'}")
    return place


def test_folders_of_images_are_clients_and_raw_images_are_answered(tmp_path, cli):
    for name in ("bern", "oslo"):
        paint(tmp_path / "data" / name)
    new = paint(tmp_path / "new", labels=("any",)) / "any"
    (tmp_path / "study.toml").write_text(
        'rounds = 20\nseeds = 1\n[data]\nname = "./data"\n[columns]\nsize = 8\npixels = "half"\n'
        '[model]\nname = "linear"\n[algorithm]\nname = "fedavg"\nlr = 0.05\n'
    )
    cli("run", "study.toml", "--out", "run").done()
    run = pf.Run.open(tmp_path / "run")
    assert run.outline.input_shape == (3, 8, 8)
    assert run.history.query("split == 'test'").accuracy.iloc[-1] == 1
    assert cli("export", "run", "--client", "oslo").status == 0
    cli("predict", "oslo.safetensors", new, "--out", "answers.csv").done()
    assert set(pd.read_csv(tmp_path / "answers.csv").prediction) == {"dark"}
    (new / "text.png").write_text("no image")
    said = cli("predict", "oslo.safetensors", new)
    assert said.status != 0
    assert "text.png: not an image, expected JPEG or PNG" in said.err


def test_a_column_names_images_from_its_file_s_folder(tmp_path):
    """And pixels are those of the image, channels first, scaled."""
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    (tmp_path / "scans").mkdir()
    pillow.fromarray(pixels).save(tmp_path / "scans" / "a.png")
    (tmp_path / "bern.csv").write_text("scan,age,ill\nscans/a.png,3,0\nscans/a.png,4,1\n")
    for scale, expected in (("unit", pixels / 255), ("half", pixels / 127.5 - 1)):
        fed = pf.data.load(tmp_path / "bern.csv", image="scan", size=4, pixels=scale).partition(
            "iid", 1, test_fraction=0.0
        )
        np.testing.assert_allclose(fed.train.x[0], np.moveaxis(expected, -1, 0), atol=1e-6)
