"""The report of many clients: quantiles in place of a row for each."""

import numpy as np
import pytest
from torch import nn

import polyfed as pf
from polyfed.report import page, read
from polyfed.report.tables import QUANTILES, quantile_table
from polyfed.runs import folder


def test_a_crowd_is_reported_by_quantiles_and_written_without_single_samples(tmp_path, monkeypatch):
    for module in (page, folder):
        monkeypatch.setattr(module, "CROWD", 11)
    x = np.random.default_rng(0).standard_normal((60, 2))
    fed = pf.Federation.from_flat(x, np.arange(60) % 2, np.arange(0, 61, 5))
    run = pf.fit(nn.Linear(2, 2), fed, pf.FedAvg(lr=0.1), pf.Training(rounds=2), out=tmp_path / "r")
    assert not (tmp_path / "r/scores.safetensors").exists()
    assert "single samples are not written" in (tmp_path / "r/log.txt").read_text()
    written = page.write_report(tmp_path / "r").read_text()
    assert "client-3" not in written
    rows = {
        row[1].text: [cell.values["value"] for cell in row[3:]] for row in quantile_table(read(tmp_path / "r")).rows
    }
    losses = run.clients["test_loss"]
    assert rows["test loss"] == pytest.approx([losses.mean(), *np.percentile(losses, QUANTILES)])
    again = pf.Run.open(tmp_path / "r", federation=fed, model=nn.Linear(2, 2))
    assert again.outline.names == fed.names
