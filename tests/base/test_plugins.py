"""Installed packages that add to polyfed: the one of docs/packages.md, put on sys.path as pip would leave it."""

import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from acme import changed, forget, install

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.base.plugins import SIBLINGS
from polyfed.base.registry import Registry
from polyfed.core.algorithm import REGISTRY

NAMES = ["--algorithm", "halfway", "--data", "moons", "--model", "tanh", "--metrics", "hits"]
RUN = ["run", *NAMES, "--partition", "iid", "--clients", 4, "--rounds", 2]


def test_a_package_runs_resumes_verifies_and_is_listed(cli, put, tmp_path, undrawn):
    put()
    assert cli(*RUN, "--out", "a", "-q").status == 0
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert (config["packages"], config["versions"]["acme-fed"]) == (["acme-fed"], "1.0")
    said = cli("verify", "a").done()
    assert "comes out again, bit for bit" in said.out
    assert cli("run", "a/config.toml", "--rounds", 3, "--out", "b", "-q").status == 0
    assert tomllib.loads((tmp_path / "b/config.toml").read_text())["packages"] == ["acme-fed"]
    assert cli("resume", "a", "-q").status == 0
    assert type(pf.Run.open(tmp_path / "a").algorithm) is REGISTRY["halfway"]
    for command in (["algorithms"], ["data", "list"]):
        said = cli(*command).done()
        assert said.out.count("(acme-fed 1.0)") == 1
    assert "acme-fed 1.0" in cli("algorithms", "halfway").out
    assert "halfway: " in cli("check", "halfway", "--row", "resume").out


def test_a_run_is_refused_in_one_line_without_its_package_and_goes_on_with_it(cli, put, tmp_path, monkeypatch, undrawn):
    with monkeypatch.context() as inner:
        inner.syspath_prepend(str(install(tmp_path / "site")))
        assert cli(*RUN, "--out", "a", "--set", "checkpoint-every=1", "-q").status == 0
        text = (tmp_path / "a/config.toml").read_text()
        assert cli("compare", "halfway", "local", *RUN[3:], "--seeds", 1, "--out", "c", "-q").status == 0
    forget()
    for command in (["resume", "a"], ["verify", "a"], ["run", "a/config.toml", "--out", "b"], ["resume", "c"]):
        cli(*command).line((1, 2), "packages: needs the package acme-fed, which is not installed")
    assert (tmp_path / "a/config.toml").read_text() == text
    put(version="1.1", name="newer")
    assert cli("run", "a/config.toml", "--out", "b", "-q").status == 0
    said = cli("verify", "a")
    assert "acme-fed: 1.0 in the run, 1.1 here" in said.out


def test_recipes_of_packages_are_found_beside_the_papers(cli, put):
    pytest.importorskip("polyfed_papers")
    put()
    said = cli("reproduce").done()
    assert "acme/moons" in said.out
    assert "fpfc/table1" in said.out
    assert "(acme-fed 1.0)" in " ".join(said.out.split())
    said = cli("reproduce", "acme/moons", "--seeds", 1, "-q").done()
    assert "Both were trained." in said.out


BROKEN = {
    "a module that does not import": changed(__init__=("import numpy as np", "import a_library_that_is_not_there")),
    "a module that exits": changed(__init__=("HITS =", "raise SystemExit(3)\nHITS =")),
    "something else than a method": changed(pyproject=("acme_fed:Halfway", "acme_fed:tanh")),
    "a class of another name": changed(__init__=("class Halfway", 'class Half'), pyproject=(":Halfway", ":Half")),
    "a method that polyfed has": changed(__init__=("HITS =", "class FedAvg(pf.Algorithm): pass\nHITS =")),
}  # fmt: skip


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_one_line_that_names_it_and_breaks_nothing_else(cli, put, files):
    put(files)
    cli("run", "--algorithm", "halfway", "--data", "digits").line(2, "acme-fed 1.0")
    said = cli("algorithms").done()
    assert "acme-fed 1.0" in said.out
    assert cli("run", "--algorithm", "fedavg", "--data", "digits", "--clients", 2, "--rounds", 1, "-q").status == 0


def test_a_name_is_polyfeds_or_one_packages(cli, put):
    put(changed(pyproject=('halfway = "acme_fed:Halfway"', 'fedavg = "acme_fed:Halfway"')))
    said = cli("algorithms").done()
    assert "'fedavg' of acme-fed 1.0 is refused; polyfed has one of this name" in " ".join(said.out.split())
    forget()
    put(name="one")
    put(changed("acme-too"), name="two")
    said = cli("run", "--data", "moons")
    assert said.err.strip() == (
        "polyfed: data.name: moons: found in two packages, acme-fed 1.0 and acme-too 1.0; uninstall one of them"
    )


@pytest.mark.parametrize(
    ("option", "old", "new"),
    [
        ("--data", "x, y = make_moons", "x, y = 1 / 0, make_moons"),
        ("--model", "return nn.Sequential", "return 1 / 0 or nn.Sequential"),
        ("--model", "return nn.Sequential", "return str or nn.Sequential"),
    ],
)
def test_what_fails_in_a_package_is_its_own(cli, put, option, old, new):
    put(changed(__init__=(old, new)))
    said = cli(*RUN)
    said.line(1)
    assert "this is a bug" not in said.err
    assert f"{option.removeprefix('--')}.name: {'moons' if option == '--data' else 'tanh'}" in said.err


HIDDEN = """
import sys
sys.modules[sys.argv[1]] = None
from polyfed.cli import call
sys.exit(call(sys.argv[2:]))
"""


@pytest.mark.parametrize(("package", "command"), [(p, c) for p, brought in SIBLINGS.items() for c in brought])
def test_a_command_whose_package_is_hidden_names_it_and_help_goes_on(package, command):
    ran = [
        subprocess.run([sys.executable, "-c", HIDDEN, package, *words], capture_output=True, text=True)
        for words in ((*command.split(), "any", "--thing", "3"), (*command.split()[:-1], "--help"))
    ]
    assert (ran[0].returncode, ran[0].stderr.count("\n")) == (2, 1)
    assert ran[0].stderr.startswith(f"polyfed: polyfed {command} needs the package {package}")
    assert ran[1].returncode == 0
    assert f"Needs the package {package}" in " ".join(ran[1].stdout.split())


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("polyfed_ray", "run --data digits --clients 2 --rounds 1 --algorithm fedavg --seeds 1 --engine ray -q"),
        ("polyfed_papers", "data inspect mnist"),
        ("polyfed_export", "export . --form onnx"),
        ("polyfed_members", "check fedavg"),
        ("polyfed_threats", "run --data digits --rounds 1 --set robust.name=median"),
    ],
)
def test_what_a_command_asks_of_a_hidden_package_names_it(package, words, tmp_path):
    (tmp_path / "vault.json").touch()  # to export from
    command = [sys.executable, "-c", HIDDEN, package, *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) in ((1, 1), (2, 1))
    assert f"needs the package {package}" in ended.stderr


def test_a_public_name_whose_package_is_hidden_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "polyfed_games", None)
    monkeypatch.setitem(sys.modules, "polyfed_games.run", None)
    with pytest.raises(ConfigError, match="coalitions needs the package polyfed_games"):
        pf.coalitions(None)


def test_an_experiment_with_privacy_names_its_hidden_package_and_one_without_it_runs(cli, monkeypatch, undrawn):
    for name in ("polyfed_privacy", "polyfed_privacy.run"):
        monkeypatch.setitem(sys.modules, name, None)
    run = ["run", "--algorithm", "fedavg", "--data", "digits", "--clients", 2, "--rounds", 1, "-q"]
    cli(*run, "--set", "privacy.sums=secure").line(2, "polyfed: privacy: needs the package polyfed_privacy")
    assert cli(*run, "--out", "a").status == 0


def test_nobody_looks_for_packages_before_a_name_is_asked_for(cli, monkeypatch, undrawn):
    """Neither help nor a run of what polyfed has reads other packages' metadata."""
    monkeypatch.setattr("polyfed.base.plugins._installed", None)
    names = ["--algorithm", "fedavg", "--data", "digits", "--model", "linear", "--metrics", "auc"]
    for command in (["--help"], ["run", *names, "--clients", 2, "--rounds", 1, "-q"]):
        cli(*command).done()


def test_what_is_offered_is_imported_by_name_and_refused_in_one_line_where_its_package_is_missing(monkeypatch):
    things = Registry("thing")
    things.offer({"lazy": "lazy_one", "lora": "polyfed_adapters.lora"})
    monkeypatch.setitem(sys.modules, "polyfed_adapters", None)
    monkeypatch.delitem(sys.modules, "polyfed_adapters.lora", raising=False)
    monkeypatch.setitem(sys.modules, "lazy_one", SimpleNamespace(lazy=changed))
    assert [*things] == things.names() == ["lazy"]
    assert things.find("lazy") is changed
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^thing: lora needs the package polyfed_adapters[^\n]*$"):
            things.find("lora")
