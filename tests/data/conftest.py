"""What the tests of data share: the check that an error is one line."""

from contextlib import contextmanager

import pytest

from polyfed.base.errors import DataError


@pytest.fixture(scope="session")
def refused():
    """A context: the block must raise DataError, in one line that holds every given word."""

    @contextmanager
    def check(*words):
        with pytest.raises(DataError) as caught:
            yield
        line = str(caught.value)
        assert "\n" not in line
        assert line
        for word in words:
            assert str(word) in line, line

    return check
