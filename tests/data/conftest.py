"""What the tests of data share."""

import pytest


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
