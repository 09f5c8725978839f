"""A server and two sites: texts, a backbone at each site, and an adapter for each of them."""

import shutil

import pytest
import torch
from hospitals import Sites, at_sites
from tiny import notes, tokenizer_of_words

from polyfed.studies.predict import Predictor

NAMES = ("bern", "oslo")
WIDTH, LAYERS, RANK, TARGETS, CLASSES, ROUNDS = 16, 2, 4, 2, 2, 2
SENT = 4 * (LAYERS * TARGETS * RANK * WIDTH + (WIDTH + 1) * CLASSES)  # bytes: B of every target, and the head

STUDY = f"""
rounds = {ROUNDS}
batch-size = 16
[data]
[columns]
target = "ill"
labels = ["no", "yes"]
text = "note"
length = 6
tokenizer = "bert/tokenizer.json"
[model]
backbone = "bert"
adapter = "lora:r={RANK},targets=query+value"
[algorithm]
name = "ditto"
lr = 0.1
"""


def bert(place):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=WIDTH
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(place)
    tokenizer_of_words(place)


class Backed(Sites):
    """Each site has the backbone in a folder of its own."""

    def member(self, name):
        found = super().member(name)
        found.backbone = self.place / name / "bert"
        return found


def test_only_adapters_travel_and_terms_and_ledger_say_how_many_bytes(tmp_path):
    bert(tmp_path / "server" / "bert")
    (tmp_path / "server" / "study.toml").write_text(STUDY)
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(NAMES):
        shutil.copytree(tmp_path / "server" / "bert", tmp_path / name / "bert")
        notes(120, seed).to_csv(tmp_path / "data" / f"{name}.csv", index=False)
    sites = Backed(tmp_path, tmp_path / "data", names=NAMES)
    book = at_sites(tmp_path / "server" / "study.toml", sites).ledger
    assert len(book) == 2 * ROUNDS
    assert (book.up_bytes == SENT).all()
    assert (book.down_bytes == SENT).all()
    for name in NAMES:
        terms = next(line for line in sites.lines if line.startswith(f"What leaves the site {name!r}"))
        assert f"w: float32 [{SENT // 4}], {SENT:,} bytes" in terms
        assert "on the backbone bert" in terms
        assert not any(word in terms for word in ("fever", "severe"))
        assert len(Predictor.open(tmp_path / "vaults" / name / "model.safetensors").predict(notes(3, 9))) == 3
