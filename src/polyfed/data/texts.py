"""Texts for a language model: rows of token ids, each asked for the next token."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.arguments import answer, checked
from polyfed.base.errors import DataError
from polyfed.data.csv_files import sheet_of
from polyfed.data.federation import Federation
from polyfed.data.intake import names_of
from polyfed.data.prepare import Cut, check_fraction
from polyfed.data.raw import closed, encoder, following, words

Array = np.ndarray
Ids = Sequence[Sequence[int]]


@checked
def from_texts(
    texts: Mapping[str, Any],
    tokenizer: str | Path | Callable[[list[str]], Ids],
    *,
    length: int = 128,
    column: str = "text",
    pack: bool = False,
    end: int | None = None,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> Federation:
    """A federation for a causal language model: the targets of a row of tokens are the tokens that follow.

    For the loss "tokens" and the metric "perplexity", which ignore the target -100, at a text's end and in padding.

    Parameters
    ----------
    texts : mapping
        Each client's name and its texts: a list, or a column of a DataFrame or a Hugging Face data set.
    tokenizer : str, Path or callable
        A tokenizer.json, or (texts) -> the ids of each.
    length : int
        Number T of tokens in a row.
    column : str
        Column of texts in tables.
    pack : bool
        Put a client's texts one after the other, each closed by `end`, and cut them into full rows, so that no step
        is spent on padding. Attention reaches over the texts in a row; no token is asked for across their border.
    end : int or None
        Id of the token that closes a text, which is asked for, too. Packing needs one.
    test_fraction, validation_fraction : float
        Share of each client's texts that is held out, keyed by (seed, client name), as in `Federation.from_arrays`.
    seed : int
        Seed of the held-out texts.

    Returns
    -------
    Federation
        x: [N, 2, T] int64 ids and mask, 1 for tokens and 0 for padding; y: [N, T] int64 ids, or -100.
    """
    if length < 2:
        raise DataError(f"length: found {length}, expected at least 2 tokens")
    if pack and end is None:
        raise DataError("end: found none, expected the id of the token that closes a text, for pack=True")
    for key, share in (("test_fraction", test_fraction), ("validation_fraction", validation_fraction)):
        check_fraction(share, key)
    who = names_of([*texts], len(texts))
    if not who:
        raise DataError("texts: found none, expected some for each client")
    encode = encoder(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    each = [(given, f"client {name!r}") for name, given in zip(who, texts.values(), strict=True)]
    coded = [_coded(_texts(given, column, where), encode, end, where) for given, where in each]
    cut, notes = Cut(seed, test_fraction, validation_fraction).each(who, [np.arange(len(of)) for of in coded])

    def part(name: str) -> list[tuple[Array, Array] | None]:
        pairs = zip(coded, cut.get(name, [()] * len(who)), strict=True)
        return [following([ids[k] for k in rows], length, pack) if len(rows) else None for ids, rows in pairs]

    n_words = words(tokenizer) if isinstance(tokenizer, str | Path) else None
    meta = {"length": length, "packed": pack, "notes": notes}
    return Federation.from_arrays(
        part("train"), part("test"), part("validation"), who, n_words, meta=meta, task="tokens", integer_inputs=True
    )


def _texts(given: Any, column: str, where: str) -> list[str]:
    if isinstance(given, list | tuple):
        texts: list[Any] = [*given]
    else:
        (sheet := sheet_of(given, where)).need(column)
        texts = [*sheet.columns[column]]
    odd = next((t for t in texts if not isinstance(t, str)), None)
    if odd is not None or not texts:
        kind = "no texts" if odd is None else f"a {type(odd).__name__}"
        raise DataError(f"{where}: found {kind}, expected texts")
    return texts


def _coded(texts: list[str], encode: Callable[[list[str]], Ids], end: int | None, where: str) -> list[Array]:
    """The ids of each text, closed."""
    made = answer("tokenizer", encode, texts)
    try:
        ids = closed(made, end, lambda k: f"{where}: text {k + 1}")
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"tokenizer: made a {type(made).__name__}, expected a list of ids for each text") from None
    if len(ids) != len(texts):
        raise DataError(f"tokenizer: found ids of {len(ids)} texts, expected {len(texts)}")
    return ids
