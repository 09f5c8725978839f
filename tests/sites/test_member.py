"""A federation of sites that each have their own file only: the same numbers as one machine with all files."""

import numpy as np
import pytest
from hospitals import Sites, at_sites, experiment, folder, on_one_machine, same

FEDAVG = 'name = "fedavg"\nlr = 0.1'
METHODS = {
    "fedavg": FEDAVG,
    "fpfc": 'name = "fpfc"\nlam = 0.05',
    "fedslr": 'name = "fedslr"\nlam = 0.02',
    "ditto": 'name = "ditto"\nlr = 0.1',
}


@pytest.mark.parametrize(
    ("method", "standardise", "regression"),
    [
        ("fedavg", "pooled", False), ("fedavg", "client", True), ("fedavg", "none", False), ("fpfc", "client", False),
        ("fedslr", "pooled", True), ("ditto", "client", False), ("ditto", "pooled", True),
    ],
)  # fmt: skip
def test_sites_with_their_own_files_give_the_bits_of_one_machine_with_all(method, standardise, regression, tmp_path):
    data = folder(tmp_path / "data", regression)
    columns = f'[columns]\nstandardise = "{standardise}"'
    file = experiment(tmp_path / "study.toml", METHODS[method], columns)
    here, sites = on_one_machine(file, data), Sites(tmp_path, data)
    there = at_sites(file, sites)
    same(here, there, sites)
    assert np.allclose(here.final["test"]["loss"], there.final["test"]["loss"], rtol=0, atol=1e-6)
    assert (here.parameters == there.parameters).all()
