"""All fuzzers at length, with new inputs: what `make fuzz` runs."""

import many
import pytest


@pytest.mark.long
def test_no_input_ends_in_a_traceback_or_hangs(capsys):
    failed = many.main([])
    assert not failed, capsys.readouterr().out
