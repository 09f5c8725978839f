"""What tests of secure sums begin with."""

import pytest
import secured


@pytest.fixture
def data(tmp_path):
    return secured.folder(tmp_path / "data")
