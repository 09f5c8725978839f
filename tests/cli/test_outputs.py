"""What a command is given to write, or to read, by name: an output is never an input, and no name is a bug."""

import json
import os

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("undrawn")

LONG = "x" * 3000


@pytest.fixture
def sites(tmp_path):
    """Two sites with a file each (h), and rows to predict."""
    rng = np.random.default_rng(0)
    (tmp_path / "h").mkdir()
    for name in ("h/east.csv", "h/west.csv", "rows.csv"):
        rows = "".join(f"{a:.3f},{b:.3f},{int(a + c > 0)}\n" for a, b, c in rng.normal(size=(30, 3)))
        (tmp_path / name).write_text(f"age,dose,y\n{rows}")
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".polyfed"}


def test_an_output_that_is_an_input_is_refused_by_whatever_name(cli, sites):
    """Links, hard links, another way to the same file, a file of a run's or of a vault's own."""
    assert cli("run", "--data", "h", "--algorithm", "fedavg", "--rounds", 1, "--out", "r", "-q").status == 0
    assert cli("export", "r", "--client", "east", "--out", "m.safetensors").status == 0
    for link, to in (("soft.csv", "rows.csv"), ("m.csv", "m.json"), ("soft.svg", "h/east.csv")):
        (sites / link).symlink_to(to)
    os.link(sites / "h/west.csv", sites / "hard.csv")
    (sites / "v").mkdir()
    for ending in ("json", "safetensors"):
        (sites / f"v/model.{ending}").write_bytes((sites / f"m.{ending}").read_bytes())
    (sites / "v/vault.json").write_text("{}")
    before = contents(sites)
    of_rows = ("predict", "m.safetensors", "rows.csv")
    for words, out in (
        (of_rows, "m.safetensors"),
        (of_rows, "m.csv"),
        (of_rows, "h/../rows.csv"),
        (of_rows, "soft.csv"),
        (("predict", "r", "rows.csv", "--client", "east"), "r/clients.csv"),
        (("regress", "h", "--target", "y"), "h/east.csv"),
        (("regress", "h", "--target", "y"), "hard.csv"),
        (("regress", "h", "--target", "y"), "h/coefficients.csv"),  # it would be a third site
        (("data", "inspect", "h"), "soft.svg"),
        (("report", "r"), "r/config.toml"),
        (("export", "r", "--client", "west"), "r/models/common.safetensors"),
        (("export", "v"), "v/model.safetensors"),
        (("leave", "r", "--client", "west", "--force", "-q"), "r"),
    ):
        cli(*words, "--out", out).line(2, f"polyfed: out: {out} ")
        assert contents(sites) == before, (words, out)
    for words, out in (
        (of_rows, "found.csv"),
        (of_rows, "/dev/null"),
        (("regress", "h", "--target", "y"), "h/page.html"),
        (("report", "r"), "r/report.html"),
    ):
        for _ in range(2):  # a result may be written again
            assert cli(*words, "--out", out).status == 0, (words, out)
    after = contents(sites)
    assert {p for p in before if after[p] != before[p]} <= {sites / "r/report.html"}
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize(
    "words",
    [
        ("report", LONG), ("resume", LONG), ("verify", LONG), ("predict", LONG, "x.csv"), ("export", LONG),
        ("data", "inspect", "h", "--out", f"{LONG}.svg"), ("regress", "h", "--out", f"{LONG}.csv"),
        ("regress", "h", "--target", "y", "--out", "rows.csv/t.html"),
    ],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_short_line(cli, sites, words):
    said = cli(*words, *(("--client", "x") if words[0] == "export" else ()))
    assert said.status
    assert said.err.count("\n") == 1, said.err[-300:]
    assert "bug" not in said.err
    assert any(why in said.err for why in ("file name too long", "not a directory", "at most 255 bytes"))
    assert len(said.err) < 300


def test_the_model_of_a_comparison_is_that_of_its_answer(cli, sites):
    """By name commonest comes first, by accuracy on these rows it is last."""
    words = ("commonest", "local", "fedavg", "--data", "h", "--rounds", 20, "--seeds", 2, "--out", "c", "-q")
    assert cli("compare", *words).status == 0
    said = cli("export", "c", "--client", "east", "--out", "m.safetensors").done()
    assert said.err.startswith("the model of fedavg, which leads in the answer, trained under seed 0: ")
    assert json.loads((sites / "m.json").read_text())["algorithm"]["name"] == "fedavg"
