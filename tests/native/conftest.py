import pytest


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """These tests are of the kernel, also where the others are run without it."""
    monkeypatch.delenv("POLYFED_NATIVE", raising=False)
