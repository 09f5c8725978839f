"""Six messy hospitals from folder to report, regression and prediction, without Python: see docs/howto/hospitals.md.

Every number is held against scikit-learn or statsmodels on the rows before their faults."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import six_hospitals as six
import statsmodels.api as sm
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

import polyfed as pf

EXPERIMENT = f"""
rounds = 10
local-steps = 5
batch-size = "full"
metrics = "auc"
seed = 0

[data]
name = "./hospitals"

[model]
name = "linear"
{six.REPAIRS}
[algorithm]
name = "fedavg"
lr = 0.1
"""
NUMBERS = ["age", "glucose", "crea", "crp", "temp"]
READ = ("--encoding", "latin-1", "--target", "outcome")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The folder of a module, and its rows after the repairs."""
    folder = tmp_path_factory.mktemp("six")
    return folder, six.repaired(six.write(folder / "hospitals"))


def flags(text):
    return {line[2:].split(":")[0]: line for line in text.splitlines() if line.startswith("! ")}


def test_the_audit_finds_each_hospitals_fault_and_nothing_else(cli, rows, tmp_path, monkeypatch):
    folder, _ = rows
    monkeypatch.chdir(folder)
    said = cli("data", "inspect", "hospitals")  # which reads on by a guess, and lists what else there is
    assert '[columns.site.koeln] encoding = "cp1252"' in said.err
    assert "hospitals/wien.csv" in said.err
    said = cli("data", "inspect", "hospitals", *READ)
    found = flags(said.out)
    assert found.keys() == {"bern", "graz", "koeln", "lyon", "oslo"}
    for site, fault in {
        "bern": 'crea is -9 in 20 of 260 rows, far from all its others; a code for a gap? gaps = ["-9"]',
        "graz": '[columns.site.graz] temp = "°F -> °C"',
        "koeln": "120 of 120 rows, which no other site writes",
        "lyon": "18.6 times that of other sites (5.8), as mg/dl in place of mmol/l would; "
        '[columns.site.lyon] glucose = "mg/dl -> mmol/l"',
        "oslo": 'rows repeat patients; group = "patient"',
    }.items():
        assert fault in found[site]
    assert said.status == 1  # and of the sixth's, limits of detection and rows without a target:
    assert "13 of 990 rows have none; leave them out, as missing-target" in said.err
    assert "('<5' in hospitals/wien.csv, line 16)" in said.err


def test_from_six_messy_files_to_report_regression_and_prediction(cli, rows, monkeypatch):
    folder, clean = rows
    monkeypatch.chdir(folder)
    (folder / "six.toml").write_text(EXPERIMENT)
    said = cli("data", "inspect", "six.toml", "--out", "six.svg").done()
    assert flags(said.out) == {}
    assert (folder / "six-columns.svg").is_file()
    assert cli("run", "six.toml", "--out", "answer", "--quiet").status == 0
    assert (folder / "answer" / "report.html").is_file()

    # what the model was given is scikit-learn's scaling of the clean rows
    run = pf.Run.open(folder / "answer")
    names, split = list(clean), run.federation.meta["split_indices"]
    every = pd.concat(clean.values(), ignore_index=True)
    train = np.concatenate(split["train"])
    filled = every[NUMBERS].fillna(every[NUMBERS].iloc[train].median())
    scaled = StandardScaler().fit(filled.iloc[train])
    hot = np.stack([every["crea"].isna(), every["sex"] == "f", every["sex"] == "m"], 1)
    wanted = np.concatenate([scaled.transform(filled), hot], 1)
    assert run.federation.train.x.numpy() == pytest.approx(wanted[train], abs=2e-3)  # of files rounded to two digits
    whose = every["patient"].to_numpy()
    for i in range(6):
        assert not set(whose[split["train"][i]]) & set(whose[split["test"][i]])

    # predictions of raw files, in °F, in German, in mg/dl, score as the report says
    clients = pd.read_csv(folder / "answer" / "clients.csv").set_index("client")
    starts = dict(zip(names, np.cumsum([0, *map(len, clean.values())]), strict=False))
    for site in ("graz", "koeln", "lyon"):
        assert cli("export", "answer", "--client", site).status == 0
        assert cli("predict", f"{site}.safetensors", f"hospitals/{site}.csv", "--out", "p.csv").status == 0
        p, at = pd.read_csv(folder / "p.csv"), split["test"][names.index(site)] - starts[site]
        ill = clean[site]["outcome"].to_numpy() == "ill"
        auc = roc_auc_score(ill[at], p["probability_ill"].to_numpy()[at])
        assert auc == pytest.approx(clients.loc[site, "test_auc"], abs=1e-6)
        only = json.loads((folder / f"{site}.json").read_text())["preparation"]["repairs"]
        assert list(only) == [site]

    # the regression over all sites is that of statsmodels on the pooled clean rows
    assert cli("regress", "six.toml", "--drop", "crea", "--out", "fit.csv").status == 0
    table = pd.read_csv(folder / "fit.csv").set_index("coefficient")
    x = every[["age", "glucose", "crp", "temp"]].assign(**{"sex=m": (every["sex"] == "m").astype(float)})
    if "intercept" not in table.index:  # one for each site
        site = np.repeat(names, [len(f) for f in clean.values()])
        x = x.assign(**{name: (site == name).astype(float) for name in names[1:]})
    fitted = sm.Logit((every["outcome"] == "ill").astype(float), sm.add_constant(x)).fit(disp=0)
    for name in ("age", "glucose", "crp", "temp", "sex=m"):
        estimate = float(re.sub("−", "-", str(table.loc[name, "estimate"])))
        assert estimate == pytest.approx(fitted.params[name], rel=0.02)
