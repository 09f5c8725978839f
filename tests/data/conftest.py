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
            yield caught
        line = str(caught.value)
        assert "\n" not in line
        assert line
        for word in words:
            assert str(word) in line, line

    return check


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer.json that knows a few words and pads, which is not what it is asked for."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = ("pain", "fever", "none", "severe", "mild", "old")
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: k + 2 for k, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=9)
    place = tmp_path_factory.mktemp("words")
    made.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"
