"""Small experiments for the command line."""

import pytest

SMALL = """
rounds = 4
local-steps = 2
batch-size = 8
evaluate-every = 2
[data]
name = "heart-disease"
[model]
name = "linear"
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path
