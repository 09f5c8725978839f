"""What the tests of data share."""

import pytest
from tiny import tokenizer_of_words


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer.json that knows a few words and pads, which is not what it is asked for."""
    return tokenizer_of_words(tmp_path_factory.mktemp("words"), padded=9)
