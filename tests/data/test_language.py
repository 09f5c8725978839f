"""Language models from a file: rows of a column of texts, here and at sites, and answers for new ones."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import WORDS

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.prepare import Cut
from polyfed.data.schema import File
from polyfed.studies.predict import Predictor

T, END = 4, "[PAD]"

MODEL = """
import torch
from tiny import WORDS


class Next(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(outputs, 8), torch.nn.Linear(8, outputs)

    def forward(self, x):
        return self.head(self.embedding(x[:, 0]))
"""


def texts(n, seed):
    """Each word is followed by the next of WORDS, and old by pain."""
    rng = np.random.default_rng(seed)
    return [" ".join(WORDS[(s + k) % 6] for k in range(rng.integers(2, 10))) for s in rng.integers(0, 6, n)]


def write(place):
    place.mkdir()
    for seed, name in enumerate(("bern", "oslo")):
        rows = texts(30, seed)
        pd.DataFrame({"id": range(30), "note": rows, "age": range(30)}).to_csv(place / f"{name}.csv", index=False)
    return place


def study(tokenizer, model, data='name = "./data"\n', columns="", algorithm='name = "fedavg"\nlr = 2.0\n', rounds=40):
    return (
        f'rounds = {rounds}\nbatch-size = 8\nloss = "tokens"\nmetrics = ["perplexity"]\n[data]\n{data}[columns]\n'
        f'task = "next-token"\ntext = "note"\nlength = {T}\ntokenizer = "{tokenizer}"\n{columns}[model]\n{model}'
        f"[algorithm]\n{algorithm}"
    )


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_a_folder_are_those_of_the_same_texts_in_python(tokenizer, tmp_path, pack):
    place = write(tmp_path / "data")
    more = {"pack": True, "end": END} if pack else {}
    data = pf.data.load(place, text="note", tokenizer=str(tokenizer), task="next-token", length=T, **more)
    held = {"test_fraction": 0.25, "validation_fraction": 0.2}
    found = data.partition("natural", **held)
    given = {name: pd.read_csv(place / f"{name}.csv") for name in ("bern", "oslo")}
    how = {"column": "note", "length": T, "pack": pack, "end": 0 if pack else None}
    same = pf.data.from_texts(given, tokenizer, **how, **held)
    for split in ("train", "validation", "test"):
        mine, other = getattr(found, split), getattr(same, split)
        assert torch.equal(mine.x, other.x)
        assert torch.equal(mine.y, other.y)
        assert mine.offsets.tolist() == other.offsets.tolist()
    assert found.outputs == found.tokens == same.tokens == 8
    assert found.loss == "tokens"


def test_a_model_of_one_s_own_learns_from_a_file_and_answers_for_new_texts(tokenizer, tmp_path, cli):
    """The next word follows from the word, so that the least perplexity is 1."""
    write(tmp_path / "data")
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "study.toml").write_text("seeds = 1\n" + study(tokenizer, 'file = "net.py"\n'))
    cli("run", "study.toml", "--out", "run").done()
    run = pf.Run.open(tmp_path / "run")
    found = run.history.query("split == 'test'").perplexity
    assert found.iloc[0] > 4
    assert found.iloc[-1] < 1.1
    assert run.outline.outputs == 8
    assert cli("export", "run", "--client", "oslo").status == 0
    rows = ["pain fever", "mild", "old pain fever none severe mild", "pain pain"]
    pd.DataFrame({"note": rows}).to_csv(tmp_path / "new.csv", index=False)
    for model in (("oslo.safetensors",), ("run", "--client", "oslo")):
        cli("predict", model[0], "new.csv", *model[1:], "--out", "answers.csv").done()
        answers = pd.read_csv(tmp_path / "answers.csv", keep_default_na=False)
        assert answers.prediction.tolist() == ["none", "old", "severe", "fever"]  # of the third, the first four words
        assert answers.tokens.tolist() == [2, 1, 4, 2]
        scores = pd.to_numeric(answers.perplexity, errors="coerce").tolist()
        assert scores[0] < 1.1
        assert np.isnan(scores[1])  # nothing follows its only word
        assert scores[3] > 20


def test_newcomers_texts_are_made_into_rows_too(tokenizer, tmp_path, cli):
    write(tmp_path / "data")
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "study.toml").write_text(
        "seeds = 1\n" + study(tokenizer, 'file = "net.py"\n', columns=f'pack = true\nend = "{END}"\n', rounds=3)
    )
    assert cli("run", "study.toml", "--out", "run").status == 0
    privacy = '[privacy]\nepsilon = 5.0\nclip = 1.0\nnoise = "own"\n[data]'
    (tmp_path / "private.toml").write_text((tmp_path / "study.toml").read_text().replace("[data]", privacy, 1))
    assert "columns.pack: found true, expected false" in cli("run", "private.toml", "--out", "private").err
    pytest.importorskip("polyfed_members")
    pd.DataFrame({"note": texts(20, 7)}).to_csv(tmp_path / "riga.csv", index=False)
    cli("admit", "run", "--data", "riga.csv", "--exchanges", 1, "--out", "admitted").done()
    found = pd.read_csv(tmp_path / "admitted" / "admission.csv")
    assert found.perplexity.iloc[0] < found.alone.iloc[0]  # it begins with what the others have learnt


def llama(place, tokenizer):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    shutil.copy(tokenizer, place)
    return place


def test_sites_make_the_rows_of_their_texts_and_say_none(tokenizer, tmp_path):
    hospitals, place = pytest.importorskip("hospitals"), llama(tmp_path / "llama", tokenizer)
    file = tmp_path / "study.toml"
    model = 'backbone = "llama"\npool = "words"\nadapter = "lora:r=2,targets=q_proj"\n'
    file.write_text(study("llama/tokenizer.json", model, data="", columns=f'pack = true\nend = "{END}"\n', rounds=2))
    sites = hospitals.Sites(tmp_path, write(tmp_path / "data"), names=("bern", "oslo"))
    for name in sites.names:
        sites.member(name).backbone = place
    known = Columns(text="note", tokenizer=str(place / "tokenizer.json"), task="next-token", length=T)
    there = hospitals.at_sites(file, sites)
    here = hospitals.on_one_machine(file, tmp_path / "data")
    assert torch.equal(here.server["w"], there.server["w"])
    model = Predictor.open(tmp_path / "vaults" / "oslo" / "model.safetensors")
    answers = model.predict(pd.DataFrame({"note": ["pain fever"]}))
    assert answers.columns.tolist() == ["row", "prediction", "perplexity", "tokens"]
    said = File(tmp_path / "data" / "oslo.csv", "oslo", known, Cut(0, 0.2, 0.0)).schema().model_dump_json()
    assert not any(word in line for word in ("pain", "fever", "severe", "mild") for line in (*sites.lines, said))


def test_what_does_not_fit_is_said(tokenizer, tmp_path):
    frame = pd.DataFrame({"note": ["pain", "fever none"]})
    known = {"text": "note", "tokenizer": str(tokenizer), "task": "next-token"}
    for more, error, says in (
        ({"pack": True}, ConfigError, "columns.end.*: found None, expected the token that closes a text"),
        ({"end": "[PAT]"}, ConfigError, r"columns.end: found '\[PAT\]', expected a token of .*did you mean '\[PAD\]'"),
        ({"task": "auto", "pack": True, "end": END}, ConfigError, "columns.pack.*: found True, expected false"),
        ({"length": 1}, ConfigError, "columns.length.*: found 1, expected 2 or more"),
        ({"target": "note"}, ConfigError, "columns.target.*: found 'note', expected none"),
        ({"text": None, "tokenizer": None}, ConfigError, "columns.text.*: found None, expected a column of texts"),
        ({"text": "nose"}, DataError, "no column 'nose', which columns.text names"),
    ):
        with pytest.raises(error, match=says):
            pf.data.from_frames({"bern": frame}, **{**known, **more})
    with pytest.raises(DataError, match="column 'note' has no token"):
        pf.data.from_frames({"bern": pd.DataFrame({"note": ["pain", ""]})}, **known)
