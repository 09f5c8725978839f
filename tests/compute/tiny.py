"""Small models of transformers with random weights: skipped where it is not installed."""

import pytest
from torch import nn

KINDS = ("bert", "llama", "vit")


def tiny(kind: str, words: int, **sizes: int) -> nn.Module:
    """BERT or Llama of so many words, or a ViT on 8 x 8 images in patches of 4. sizes: in place of two layers of 16"""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24} | sizes
    if kind == "vit":
        return transformers.ViTModel(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, vocab_size=words, max_position_embeddings=16))
    return transformers.LlamaModel(transformers.LlamaConfig(**small, vocab_size=words, pad_token_id=0))
