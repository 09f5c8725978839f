"""check_method: the README's method passes every row, wrong versions fail at the row that says why, and an author's
mistake is one line that names the file and the line."""

import importlib.util
from pathlib import Path

import pytest
from wrong import WRONG, Base

import polyfed as pf
from polyfed.base.errors import ConfigError, MethodError
from polyfed.core import worker
from polyfed.core.algorithm import REGISTRY
from polyfed_testing import stage
from polyfed_testing.rows import ROWS
from polyfed_testing.table import REMEDIES, NotConformant, check_method

FILE = Path(__file__).parents[2] / "examples" / "own_method.py"


def named(row) -> str:
    return row.__name__.replace("_", " ")


def test_the_methods_of_the_readme_pass_every_row():
    spec = importlib.util.spec_from_file_location("polyfed_user_momentum", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = check_method(module.Momentum())
    assert [row.name for row in found] == [named(r) for r in ROWS]
    assert {row.outcome for row in found} == {"passed", "its clients keep no model of their own", "it states none"}


def test_every_row_has_a_wrong_version():
    assert {row for _, row in WRONG} == set(ROWS)


@pytest.mark.parametrize(("method", "row"), WRONG, ids=[f"{type(m).__name__}-{r.__name__}" for m, r in WRONG])
def test_a_wrong_version_is_caught_by_a_named_row(method, row, monkeypatch):
    if method.name == "sendswhatitkeeps":  # a method alone cannot break this row: the worker copies what it keeps
        check_method(method, rows=named(row))
        monkeypatch.setattr(worker, "_apart", lambda private, message: private)
        monkeypatch.setattr(stage, "_ONCE", {})  # without the honest run
    with pytest.raises(NotConformant, match=f"{method.name}: {named(row)}: ") as error:
        check_method(method, rows=named(row))
    assert "\n" not in str(error.value)


def test_every_row_is_run_and_each_broken_one_has_a_remedy(cli, tmp_path):
    assert REMEDIES.keys() == {named(row) for row in ROWS}
    file = tmp_path / "drawn.py"
    text = FILE.read_text().replace('- down["w"]}', '- down["w"] + 0.01 * torch.randn_like(down["w"])}')
    file.write_text(text.replace("from dataclasses", "import torch\nfrom dataclasses").replace("Momentum", "Drawn"))
    said = cli("check", file, "--row", "bits")
    said.line(2)
    broken = ("same seed same bits", "a stopped run resumes to the same bits")
    assert [line.split(": ")[1:3] for line in said.out.splitlines()] == [["BROKEN", name] for name in broken]
    assert all(line.endswith(REMEDIES[name]) for line, name in zip(said.out.splitlines(), broken, strict=True))


def trained(task, down, data):
    return pf.local_sgd(task, down["w"], data, 0.1)


class Unwritten(pf.Algorithm):
    """lr"""


MISTAKES = [  # a function of the method, spoilt, and what is said of it
    (
        "downlink", lambda self, server, round: {"w": server["w"]},
        r"downlink of Spoilt returned {'w': a tensor of shape \[63\]}, expected Down\(shared=",
    ),
    (
        "local_update", lambda self, task, client, down, data, round: None,
        r"local_update of Spoilt returned None, expected \(private tensors, uplink\)",
    ),
    (
        "local_update", lambda self, task, client, down, data, round: ({}, {"w": trained(task, down, data).mean(0)}),
        r"local_update of Spoilt returned .*63\]}\), expected .* of \d rows",
    ),
    (
        "local_update", lambda self, task, client, down, data, round: ({"c": down["w"]}, {"w": down["w"]}),
        r"returned \('c'\), expected private tensors that init_client makes: none",
    ),
    (
        "aggregate", lambda self, server, up, round: {"v": up.mean("w")},
        r"aggregate of Spoilt returned {'v': .*}, expected the whole next state, with w",
    ),
    (
        "aggregate", lambda self, server, up, round: server.update(w=up.mean("w")),
        r"aggregate of Spoilt returned None, expected a dict of tensors",
    ),
    (
        "init_server", lambda self, task, w0, n: w0,
        r"init_server of Spoilt returned a tensor .*, expected a dict of tensors",
    ),
    (
        "init_client", lambda self, task, w0: w0,
        r"init_client of Spoilt returned a tensor .*, expected a dict of tensors",
    ),
    (
        "personal", lambda self, task, client, down: down["w"][0],
        r"personal of Spoilt returned a tensor of shape \[63\], expected a tensor of .*6, 63\]",
    ),
    (
        "local_update", lambda self, task, client, down, data, round: ({}, {"w": down["w"] / data.lenght}),
        r"failed with AttributeError: .*'lenght'",
    ),
    (
        "local_update", lambda self, task, client, down, data, round: pf.local_sgd(task, down["w"], data, 1, pull=0.1),
        r"line \d+: pull of local_sgd: found 0.1, expected \(a number or a tensor, a tensor\) or none",
    ),
    ("aggregate", lambda self, server, up, round: 1 / round.t, r"failed with ZeroDivisionError: division by zero"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "function", "line"), MISTAKES)
def test_an_authors_mistake_names_its_file_and_line(where, function, line):
    spoilt = type("Spoilt", (Base,), {where: function, "__module__": __name__}, abstract=True)
    with pytest.raises(MethodError, match=line) as error:
        check_method(spoilt(), "never picked")
    file, _, rest = str(error.value).partition(", line ")
    assert file == __file__
    assert int(rest.split(":")[0]) == function.__code__.co_firstlineno
    assert "\n" not in str(error.value)


def test_a_method_that_is_not_written_says_what_it_lacks():
    with pytest.raises(MethodError, match=r"Unwritten has no local_update\(self, task, client, down, data, round\)"):
        check_method(Unwritten(), "never picked")


def test_a_function_that_takes_too_little_is_refused_where_it_is_written():
    """In a line with its place, and not as a bug of ours in the middle of a run."""
    with pytest.raises(
        MethodError,
        match=r"test_testing.py, line \d+: personal of Hasty takes \(client, down\), expected \(task, client, down\)",
    ):

        class Hasty(Base):
            def personal(self, client, down):
                return down["w"]

    assert "hasty" not in REGISTRY


def test_a_constructor_of_its_own_is_refused_where_it_is_defined():
    with pytest.raises(MethodError, match=r"line \d+: Own has an __init__ of its own, expected a frozen dataclass"):

        class Own(pf.FedAvg):
            def __init__(self, a):
                pass


def test_rows_that_are_none_are_refused():
    for rows in (3, "no such row"):
        with pytest.raises(ConfigError, match=r"^rows: found"):
            check_method(pf.FedAvg(), rows)


def test_a_mistake_of_ours_is_not_an_authors(monkeypatch):
    def broken(*given, **settings):
        raise KeyError("ours")

    monkeypatch.setattr("polyfed_testing.stage.fit", broken)
    with pytest.raises(KeyError):
        check_method(Base(), "seed")


# ties between absent clients go by their order
ORDERLESS = [row for row in ROWS if row.__name__ != "relabelling_the_clients_relabels_the_result"]


@pytest.mark.parametrize("row", ORDERLESS, ids=lambda row: row.__name__)
def test_cfl_with_absent_clients_holds_to_the_table(row):
    row(pf.CFL(eps1=10.0, eps2=0.01, absent="zero"))
