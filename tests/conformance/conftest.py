import pytest
from halfway import in_files

from polyfed.runs import trainer


@pytest.fixture
def files(monkeypatch):
    """Every run keeps its private rows in files."""
    monkeypatch.setattr(trainer, "make_rows", in_files)
