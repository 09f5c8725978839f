import pytest
from halfway import in_files

from polyfed.runs import trainer


@pytest.fixture
def files(monkeypatch):
    monkeypatch.setattr(trainer, "make_rows", in_files)
