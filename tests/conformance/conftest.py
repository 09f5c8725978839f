import pytest
from halfway import in_files

from polyfed.experiment import fit


@pytest.fixture
def files(monkeypatch):
    """Every run keeps its private rows in files."""
    monkeypatch.setattr(fit, "make_rows", in_files)
