"""A federation of sites that each have their own file only: the same numbers as one machine with all files."""

import numpy as np
import pandas as pd
import pytest
from direct import Direct, Raw
from hospitals import CLIENT, FEDAVG, POOLED, Between, Sites, at_sites, experiment, folder, on_one_machine, same, study

from polyfed.base.errors import RunError
from polyfed.core.schedule import Replay
from polyfed.face import Run
from polyfed_sites.wire import Train

METHODS = {
    "fedavg": FEDAVG,
    "fpfc": 'name = "fpfc"\nlam = 0.05',
    "fedslr": 'name = "fedslr"\nlam = 0.02',
    "ditto": 'name = "ditto"\nlr = 0.1',
}


@pytest.mark.parametrize(
    ("method", "standardise", "regression"),
    [
        ("fedavg", "none", False), ("fpfc", "client", False), ("fedslr", "pooled", True), ("ditto", "pooled", False),
    ],
)  # fmt: skip
def test_sites_with_their_own_files_give_the_bits_of_one_machine_with_all(method, standardise, regression, tmp_path):
    data = folder(tmp_path / "data", regression)
    columns = f'[columns]\nstandardise = "{standardise}"'
    steps = {"lr-schedule": "exponential:0.5,2,warmup=2"}  # every round another step size, which sites are told
    file = experiment(tmp_path / "study.toml", METHODS[method], columns, **steps)
    here, sites = on_one_machine(file, data), Sites(tmp_path, data)
    there = at_sites(file, sites)
    same(here, there, sites)
    assert np.allclose(here.final["test"]["loss"], there.final["test"]["loss"], rtol=0, atol=1e-6)
    assert (here.parameters == there.parameters).all()


@pytest.mark.parametrize("alike", [False, True])
def test_weights_of_rows_stay_at_their_site_and_count_there(alike, tmp_path):
    """Of unit, which is 7 everywhere, or else another number in some rows of riga."""
    data = folder(tmp_path / "data")
    if not alike:
        lines = (data / "riga.csv").read_text().replace(",7,none", ",2.5,none")
        (data / "riga.csv").write_text(lines)
    weights = POOLED + '\nweights = "unit"'
    file = experiment(tmp_path / "study.toml", METHODS["ditto"], weights)
    here, sites = on_one_machine(file, data), Sites(tmp_path, data)
    there = at_sites(file, sites)
    same(here, there, sites)
    without = POOLED + '\ndrop = ["unit"]'
    plain = on_one_machine(experiment(tmp_path / "plain.toml", METHODS["ditto"], without), data)
    assert np.array_equal(plain.personal.numpy(), here.personal.numpy()) == alike


class Scrambled(Direct):
    """Replies come one by one, in an order that no schedule knows."""

    def __init__(self, *given):
        super().__init__(*given)
        self.rng = np.random.default_rng(5)

    def pull(self, names, enough=None, seconds=None):
        some = [*names] if enough is None else [str(name) for name in self.rng.permutation(names)]
        return super().pull(some, enough, seconds)


@pytest.mark.parametrize("method", ["fedavg", "fedbuff", "fedasync", "ditto", "fpfc"])
def test_replies_taken_as_they_come_are_replayed_to_the_bit(method, tmp_path):
    """By the order in the ledger, on one machine; evaluations in between take the place of messages under way."""
    columns = f'{CLIENT}\n[schedule]\nname = "asynchronous"'
    file, data, sites = study(tmp_path, f'name = "{method}"', columns, rounds=9, **{"evaluate-every": 4})
    there = at_sites(file, sites, sites.direct(Scrambled))
    assert len(there.ledger) == 9
    assert there.ledger["staleness"].max() > 0, "no reply was late"
    found = Replay.of(there.ledger)
    plain = experiment(tmp_path / "plain.toml", f'name = "{method}"', CLIENT, rounds=9)
    same(on_one_machine(plain, data, schedule=found), there, sites)


class Silent(Direct):
    """One site answers nothing in one round; the time is over at once."""

    lost, at = "oslo", 1

    def push(self, messages):
        super().push(messages)
        for name, message in messages.items():
            if name == self.lost and isinstance(message.head, Train) and message.head.t == self.at:
                del self._asked[name]


def test_a_round_goes_on_with_a_quorum_and_the_site_comes_back(tmp_path):
    file, data, sites = study(tmp_path, 'name = "scaffold"')
    there = at_sites(file, sites, sites.direct(Silent), wait=0.0, quorum=2)
    missed = there.ledger[there.ledger["seconds"] == 0]
    assert missed[["round", "client", "up_bytes"]].to_numpy().tolist() == [[1, 1, 0]]
    assert "round 1: oslo is missing: no answer within 0 s" in sites.lines
    assert "oslo is missing" in (tmp_path / "run" / "log.txt").read_text()
    same(on_one_machine(file, data, schedule=Replay.of(there.ledger)), there, sites)


def test_without_a_quorum_the_run_ends_saved_and_goes_on(tmp_path):
    file, data, sites = study(tmp_path)

    def refuse(name, question, reply):
        late = name == "riga" and question.head.get("t") == 2
        return Raw({"kind": "failed", "error": "riga: the disk is full"}) if late else reply

    with pytest.raises(RunError, match=r"round 2: 2 of 3 sites have answered, expected 3 \(riga: the disk is full\)$"):
        at_sites(file, sites, Between(sites, refuse))
    there = at_sites(file, sites, resume=True)
    assert there.rounds == 3
    same(on_one_machine(file, data), there, sites)


def test_a_site_has_its_model_its_predictions_and_its_report_from_its_vault_alone(tmp_path, cli):
    data = folder(tmp_path / "data", regression=True)
    file, sites = experiment(tmp_path / "study.toml", FEDAVG, POOLED), Sites(tmp_path, data)
    here = on_one_machine(file, data)
    there = at_sites(file, sites)
    cli("export", tmp_path / "vaults" / "riga", "--out", "mine.safetensors").done()
    cli("predict", "mine.safetensors", data / "riga.csv", "--out", "answers.csv").done()
    frame = pd.read_csv(data / "riga.csv").drop(columns="outcome")
    assert np.allclose(pd.read_csv("answers.csv")["prediction"], here.predict("riga", frame)["prediction"], atol=1e-6)
    report = (tmp_path / "vaults" / "riga" / "report.md").read_text()
    assert "| round | rows of | loss | rmse |" in report
    assert f"| 3 | test | {there.final['test']['loss'][2]:.4g} |" in report
    cli("export", tmp_path / "run", "--client", "riga").line(1, "its models are at its sites")
    assert "its data are at its sites: bern, oslo, riga" in cli("resume", tmp_path / "run").err
    assert cli("export", tmp_path / "vaults").status == 1
    opened = Run.open(tmp_path / "run")
    assert opened.rounds == 3
    assert opened.final["test"]["loss"].tolist() == there.final["test"]["loss"].tolist()
    assert opened.report().is_file()
