"""Settings: which layer wins, and what is said when one is wrong."""

import pytest
import tomli_w

from polyfed.base.errors import ConfigError
from polyfed.cli import call
from polyfed.runs.config import resolve

pytestmark = pytest.mark.usefixtures("undrawn")

FILE = """
rounds = 7
fraction = 0.5
[algorithm]
name = "ditto"
lr = 0.2
lam = 0.3
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "x.toml").write_text(text)
        return tmp_path / "x.toml"

    return write


def test_command_line_beats_file_beats_default(file):
    found = resolve(file(FILE), {"rounds": 3, "algorithm": {"lr": 0.4}}, defaults={"rounds": 1, "seeds": 2})
    assert (found.settings.rounds, found.settings.fraction, found.settings.seeds) == (3, 0.5, 2)
    method = found.methods[0].algorithm
    assert (method.lr, method.lam, method.personal_epochs) == (0.4, 0.3, 1)
    found = resolve(file("local-steps = 5\n"), {"local-epochs": 2}).settings
    assert (found.local_epochs, found.local_steps) == (2, None)
    each = file("[local-steps]\ncleveland = 5\nva = 2\n")
    for given, steps in (({}, {"cleveland": 5, "va": 2}), ({"local-steps": 3}, 3), ({"local-steps": [1, 2]}, [1, 2])):
        assert resolve(each, given).settings.local_steps == steps


def test_a_shared_setting_reaches_every_method_that_has_it():
    found = resolve(None, {"algorithm": {"lr": 0.3, "lam": 2.0}}, ["local", "fedavg", "ditto", "fpfc:lam=0.1"])
    local, fedavg, ditto, fpfc = (m.algorithm for m in found.methods)
    assert {local.lr, fedavg.lr, ditto.lr, fpfc.lr} == {0.3}
    assert (ditto.lam, fpfc.lam) == (2.0, 0.1)


def test_one_method_twice_is_told_apart_by_what_differs():
    found = resolve(None, {}, ["fedacs", "ditto:lam=0.1", "ditto:lam=1", "fedacs:quantile=none"])
    labels = ["fedacs-quantile=0.75", "ditto-lam=0.1", "ditto-lam=1", "fedacs-quantile=none"]
    assert [m.label for m in found.methods] == labels


def test_a_name_on_the_command_line_selects_from_the_file(file):
    tables = [("fedavg", ""), ("ditto", "lam = 1.0"), ("ditto", "lam = 2.0")]
    path = file("".join(f"[[algorithms]]\nname = '{name}'\n{rest}\n" for name, rest in tables))
    for asked, labels in ((["ditto"], ["ditto-lam=1", "ditto-lam=2"]), (["local", "fedavg"], ["local", "fedavg"])):
        assert [m.label for m in resolve(path, {}, asked).methods] == labels
    assert resolve(path, {}, ["ditto:lam=3"]).methods[0].algorithm.lam == 3.0


def test_a_resolved_experiment_reads_back_as_itself(file):
    more = {"augment": "flip+crop:1,p=0.5", "model": {"name": "mlp", "hidden": [8, 4]}}
    first = resolve(None, {"seeds": [2, 4], "batch-size": "full"} | more)
    second = resolve(file(tomli_w.dumps(first.toml())))
    for part in ("settings", "data", "model", "methods"):
        assert getattr(first, part) == getattr(second, part)


FILES = {
    "experiment.toml": FILE,
    "bad.toml": "rounds = = 3\n",
    "steps.toml": 'local-steps = "ceil(k/2)"\n',
    "typo.toml": '[data]\npartitoin = "iid"\n',
    "deep.toml": f"x = {'[' * 5000}{']' * 5000}\n",
    "nul.toml": '[model]\nfile = "a\\u0000.py"\nname = "N"\n',
    "attack.toml": '[attack]\nname = "sign-flip"\ntensors = 0\n',
    "broken.py": "x = 1\ny = 1 / 0\n",
    "leaves.py": 'raise SystemExit("bye")\n',
}
WRONG = [  # (command, exit status, what the one line must name)
    (["run", "missing.toml"], 2, ["missing.toml", "no such file"]),
    (["run", "."], 2, ["directory", "--data ."]),
    (["run", "bad.toml"], 2, ["bad.toml", "not valid TOML", "line 1"]),
    (["run", "experiment.toml", "--set", "roudns=3"], 2, ["roudns", "'rounds'"]),
    (["run", "typo.toml"], 2, ["typo.toml: data.partitoin", "'partition'"]),
    (["run", "--rounds", "ten"], 2, ["rounds", "'ten'", "an integer of at least 0"]),
    (["run", "--set", "rounds=-1"], 2, ["rounds", "-1", "at least 0"]),
    (["run", "--seeds", "999999999"], 2, ["seeds", "999999999", "from 1 to 10000"]),
    (["run", "--set", f"rounds={10**30}"], 2, ["rounds", "1000000000", "below 2^63"]),
    (["run", "--set", "rounds=2000000000"], 2, ["rounds", "2000000000", "at most 1000000000"]),
    (["run", "--set", f"workers={10**30}"], 2, ["workers", "below 2^63"]),
    (["run", "--set", "workers=100000"], 2, ["workers", "from 1 to 1024"]),
    (["run", "--set", f"batch-size={2**63}"], 2, ["batch-size", "below 2^63"]),
    (["run", "--set", f"local-steps={2**63}"], 2, ["local-steps", "below 2^63"]),
    (["run", "--set", "weight-decay=inf"], 2, ["weight-decay", "inf", "a finite number"]),
    (["run", "--set", f"rounds={'9' * 5000}"], 2, ["rounds", "at most 4000 characters"]),
    (["run", "--set", f"rounds={'[' * 2000}"], 2, ["rounds", "nested brackets"]),
    (["run", "--set", "data.dir=a\0b"], 2, ["data.dir", "NUL"]),
    (["run", "deep.toml"], 2, ["deep.toml", "not valid TOML"]),
    (["run", "nul.toml"], 2, ["nul.toml: model.file", "NUL"]),
    (["run", "--algorithm", "fedavg:lr=1e308"], 2, ["algorithm.lr of FedAvg", "1e+308", "at most 3.4e+38"]),
    (["run", "--algorithm", "ditto", "--set", "algorithm.name=fedavg"], 2, ["algorithm.name", "'fedavg'", "ditto"]),
    (["run", "--set", "attack.name=sign-flip", "--set", "attack.scale='9**9**9'"], 2, ["attack.scale of SignFlip"]),
    (["run", "attack.toml"], 2, ["attack.toml: attack.tensors of SignFlip", "found 0", "a list"]),
    (["run", "--set", "robust.name=krum", "--set", "robust.share=false"], 2, ["robust.share of Krum", "a number"]),
    (["run", "--set", "robust.name=medien"], 2, ["robust.name", "'medien'", "'median'"]),
    (["run", "--set", "schedule.name=bernoulli", "--set", "schedule.probability=2"], 2, ["schedule.probability of"]),
    (["run", "--set", "schedule.name=uniform", "--set", "schedule.fraction=0.5"], 2, ["schedule.fraction", "fraction"]),
    (["run", "--set", "schedule.name=uniform", "--set", "schedule.delays=uniform:5,1"], 2, ["high of Delays", "low"]),
    (["run", "--set", "model.name=linear", "--set", "model.bias=nonsense"], 2, ["model.bias of linear", "'nonsense'"]),
    (["run", "--set", "data.options.standardise=all"], 2, ["standardise of heart-disease", "pooled, client or none"]),
    (["run", "--set", "rounds=true"], 2, ["rounds", "True", "an integer"]),
    (["run", "--fraction", "0"], 2, ["fraction", "0", "above 0 and at most 1"]),
    (["run", "--fraction", "1.5"], 2, ["fraction", "1.5", "at most 1"]),
    (["run", "--batch-size", "half"], 2, ["batch-size", "'half'", "full"]),
    (["run", "--local-steps", "0"], 2, ["local-steps", "0", "at least 1"]),
    (["run", "--local-steps", "ten"], 2, ["local-steps", "ten", "one number per client"]),
    (["run", "steps.toml"], 2, ["steps.toml: local-steps", "ceil(k/2)", "one number per client"]),
    (["run", "--set", "local-steps=[1, 2]"], 2, ["2 numbers", "4 clients"]),
    (["run", "--set", "augment=mirror"], 2, ["augment", "'mirror'", "flip+crop:4"]),
    (["run", "--set", "augment=flip"], 2, ["augment", "images", "[10]"]),
    (["run", "--seeds", "0"], 2, ["seeds", "from 1 to 10000"]),
    (["run", "--dtype", "float16"], 2, ["dtype", "'float16'", "float32, float64 or none"]),
    (["run", "--device", "gpu"], 2, ["device", "'gpu'", "cpu"]),
    (["run", "--set", "rounds"], 2, ["--set", "key=value"]),
    (["run", "--set", "loss=hinge"], 2, ["loss", "'hinge'", "cross-entropy"]),
    (["run", "--data", "fashion-mnit"], 2, ["fashion-mnit", "'fashion-mnist'"]),
    (["run", "--data", "nowhere/at/all"], 1, ["nowhere/at/all"]),
    (["run", "--data", "digits", "--partition", "dirichle:1"], 2, ["data.partition", "'dirichlet'"]),
    (["run", "--data", "digits", "--clients", "0"], 2, ["data.clients", "at least 1"]),
    (["run", "--clients", "7"], 1, ["4 natural clients", "7"]),
    (["run", "--set", "data.options.standardize=client"], 2, ["standardize", "'standardise'"]),
    (["run", "--model", "cn"], 2, ["'cn'", "'cnn'"]),
    (["run", "--set", "model.hiden=3"], 2, ["hiden"]),
    (["run", "--algorithm", "fedavgg"], 2, ["'fedavgg'", "'fedavg'"]),
    (["run", "--algorithm", "ditto:lamb=1"], 2, ["algorithm.lamb", "'lam'"]),
    (["run", "--algorithm", "ditto:lam"], 2, ["ditto:lam", "key=value"]),
    (["run", "--algorithm", "ditto:lam=-1"], 2, ["algorithm.lam of Ditto", "-1", "at least 0"]),
    (["run", "--algorithm", "ditto:lam=big"], 2, ["algorithm.lam", "'big'", "a number"]),
    (["run", "--set", "algorithm.momentum=1"], 2, ["algorithm.momentum", "local, fedavg, recalibrated, ditto"]),
    (["run", "experiment.toml", "--set", "algorithm.file=broken.py"], 2, ["broken.py, line 2", "ZeroDivisionError"]),
    (["run", "--set", "model.file=broken.py"], 2, ["broken.py, line 2"]),
    (["run", "--set", "model.file=none.py", "--set", "model.name=Net"], 2, ["none.py"]),
    (["run", "--set", "model.file=leaves.py", "--set", "model.name=Net"], 2, ["leaves.py, line 1", "SystemExit: bye"]),
    (["run", "--roundz", "3"], 2, ["--roundz", "--rounds"]),
    (["runn"], 2, ["runn"]),
    (["compare"], 2, ["methods"]),
    (["compare", "ditto", "ditto"], 2, ["ditto", "twice"]),
    (["algorithms", "fpf"], 2, ["'fpf'", "'fpfc'"]),
    (["resume", "nowhere"], 1, ["nowhere", "no such folder"]),
    (["resume", "."], 1, ["config.toml"]),
    (["resume", "bad.toml"], 1, ["bad.toml: a file", "the folder of a run"]),
    (["report", "nowhere"], 1, ["nowhere"]),
    (["export", "nowhere", "--client", "0"], 1, ["nowhere"]),
    (["data", "inspect", "heart-disease", "--out", "x.jpg"], 2, ["x.jpg", ".svg"]),
    (["run", "experiment.toml", "--out", "bad.toml"], 2, ["bad.toml", "a folder"]),
    (["run", "experiment.toml", "--out", "."], 2, ["not empty"]),
]


@pytest.mark.parametrize(("words", "status", "named"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_what_is_wrong_is_said_in_one_line(cli, tmp_path, words, status, named):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    said = cli(*words)
    said.line(status, "polyfed: ")
    for word in named:
        assert word.casefold() in said.err.casefold()  # typer has changed how it writes an argument
    assert not (tmp_path / "runs").exists()


def test_a_run_from_python_is_not_repeated_on_other_data(file):
    path = file('rounds = 1\n[data]\nclients = 3\ndigest = "0"\n[algorithm]\nname = "fedavg"\n')
    with pytest.raises(ConfigError, match="started from Python"):
        resolve(path)


def test_an_unexpected_error_is_one_line_without_traceback(cli, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr("polyfed.cli.run.resolve", broken)
    said = cli("run")
    said.line(1)
    for word in ("RuntimeError: boom", "this is a bug in polyfed; please report it", "--debug"):
        assert word in said.err
    with pytest.raises(RuntimeError):
        call(["run"], debug=True)
