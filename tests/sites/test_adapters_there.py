"""Three processes over TLS, a server and two sites: texts, a backbone at each site, and an adapter for each of them."""

import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from demo import free_port

from polyfed.studies.predict import Predictor

POLYFED = [sys.executable, "-c", "from polyfed.cli import main; main()"]
WORDS = ("pain", "fever", "none", "severe", "mild", "old")
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
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=WIDTH
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(place)
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: k + 2 for k, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(place / "tokenizer.json"))


def notes(n, seed):
    rng = np.random.default_rng(seed)
    found = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(n)]
    return pd.DataFrame({"note": found, "ill": ["yes" if "severe" in t else "no" for t in found]})


@pytest.mark.long
def test_only_adapters_travel_and_terms_and_ledger_say_how_many_bytes(tmp_path):
    pytest.importorskip("flwr", reason="flwr is not installed")
    server, folders = tmp_path / "server", {name: tmp_path / name for name in ("bern", "oslo")}
    bert(server / "bert")
    (server / "study.toml").write_text(STUDY)

    def start(where, *words, log=None):
        said = subprocess.DEVNULL if log is None else (tmp_path / log).open("w")
        return subprocess.Popen([*POLYFED, *words], cwd=where, stdout=said, stderr=subprocess.STDOUT)

    assert start(server, "keys", "init", f"127.0.0.1:{free_port()}").wait() == 0
    for seed, (name, folder) in enumerate(folders.items()):
        assert start(server, "keys", "add", name).wait() == 0
        folder.mkdir()
        shutil.copy(server / f"{name}.key", folder)
        shutil.copytree(server / "bert", folder / "bert")
        notes(120, seed).to_csv(folder / f"{name}.csv", index=False)
    running = [start(server, "server", "study.toml", "--sites", "bern,oslo", "--out", "run", log="server.txt")]
    try:
        for name, folder in folders.items():
            own = ("--key", f"{name}.key", "--data", f"{name}.csv", "--vault", "vault", "--backbone", "bert")
            running.append(start(folder, "client", *own, "--yes", "policy", log=f"{name}.txt"))
        ended = [p.wait(500) for p in running]
    finally:
        for p in running:
            p.kill()
    assert ended == [0, 0, 0], (tmp_path / "server.txt").read_text()
    book = pd.read_csv(server / "run" / "ledger.csv")
    assert len(book) == 2 * ROUNDS
    assert (book.up_bytes == SENT).all()
    assert (book.down_bytes == SENT).all()
    for name, folder in folders.items():
        terms = (tmp_path / f"{name}.txt").read_text()
        assert f"w: float32 [{SENT // 4}], {SENT:,} bytes" in terms
        assert "on the backbone bert" in terms
        assert not any(word in terms for word in ("fever", "severe"))
        (model,) = folder.glob("vault/model.safetensors")
        assert len(Predictor.open(model).predict(notes(3, 9))) == 3
