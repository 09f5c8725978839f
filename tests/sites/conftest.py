"""What tests of secure sums begin with."""

import pytest


@pytest.fixture
def data(tmp_path):
    """The folder of four hospitals' files."""
    from secured import folder

    return folder(tmp_path / "data")
