"""Small models of transformers with random weights, and a tokenizer of words: skipped where not installed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torch import nn

KINDS = ("bert", "llama", "vit")
WORDS = ("pain", "fever", "none", "severe", "mild", "old")


def tiny(kind: str, words: int, **sizes: int) -> nn.Module:
    """BERT or Llama of so many words, or a ViT on 8 x 8 images in patches of 4. sizes: in place of two layers of 16"""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24} | sizes
    if kind == "vit":
        return transformers.ViTModel(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, vocab_size=words, max_position_embeddings=16))
    return transformers.LlamaModel(transformers.LlamaConfig(**small, vocab_size=words, pad_token_id=0))


def tokenizer_of_words(folder: Path, padded: int = 0) -> Path:
    """A tokenizer.json of WORDS from number 2 on."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: k + 2 for k, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if padded:
        made.enable_padding(length=padded)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def notes(n: int, seed: int) -> pd.DataFrame:
    """Texts of one to six WORDS; ill are those with a severe in it."""
    rng = np.random.default_rng(seed)
    found = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(n)]
    return pd.DataFrame({"note": found, "ill": ["yes" if "severe" in t else "no" for t in found]})
