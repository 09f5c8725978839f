"""Models of texts and images as ONNX: onnxruntime gives, for what is prepared, what the run's model gives."""

import numpy as np
import pytest
import torch
from tiny import WORDS, notes, tokenizer_of_words
from torch import nn

import polyfed as pf
from polyfed_adapters.backbone import transformers as folder_of

pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
T = 5


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        mask = x[:, 1, :, None].to(self.head.weight.dtype)
        return self.head((self.embedding(x[:, 0]) * mask).sum(1) / mask.sum(1).clamp(min=1))


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.head(self.embedding(x[:, 0]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(tokenizer_of_words(tmp_path_factory.mktemp("words")))


def prepared(rows):
    """What a tokenizer would give: ids and masks, cut and padded."""
    ids = [[WORDS.index(w) + 2 for w in t.split()][:T] for t in rows.note]
    masks = [[1] * len(own) + [0] * (T - len(own)) for own in ids]
    return {
        "input_ids": np.array([own + [0] * (T - len(own)) for own in ids]),
        "attention_mask": np.array(masks),
    }


def bert(place):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(place)
    base = folder_of((2, T), 2, backbone=str(place))
    return pf.models.adapted(base, "lora:r=4,targets=query+value")


@pytest.mark.parametrize("make", [lambda place: Words(), bert], ids=["own", "bert"])
def test_a_model_of_texts_takes_ids_and_masks(tokenizer, tmp_path, make):
    fed = pf.data.from_frames(
        {name: notes(40, k) for k, name in enumerate(("bern", "oslo"))},
        "ill", text="note", tokenizer=tokenizer, length=T,
    )  # fmt: skip
    run = pf.fit(make(tmp_path / "bert"), fed, pf.Ditto(0.5), rounds=3, batch_size=8)
    session = runtime.InferenceSession(str(run.onnx("oslo", tmp_path / "oslo.onnx")))
    for n in (1, 7):  # of any number of rows
        rows = notes(n, 9)
        expected = run.predict("oslo", rows)
        answers, p = session.run(["prediction", "probabilities"], prepared(rows))
        assert answers.tolist() == expected.prediction.tolist()
        assert p == pytest.approx(expected.filter(like="probability_").to_numpy(), abs=1e-6)
    assert np.ptp(p[:, 0]) > 1e-3  # it is no constant


def test_a_language_model_gives_logits(tokenizer, tmp_path):
    frames = {name: notes(40, k) for k, name in enumerate(("bern", "oslo"))}
    fed = pf.data.from_frames(frames, task="next-token", text="note", tokenizer=tokenizer, length=T)
    run = pf.fit(Next(), fed, pf.FedAvg(1.0), rounds=2)
    session = runtime.InferenceSession(str(run.onnx("oslo", tmp_path / "oslo.onnx")))
    given = prepared(notes(7, 9))
    x = torch.tensor(np.stack([given["input_ids"], given["attention_mask"]], 1))
    with torch.no_grad():
        expected = run.model("oslo")(x)
    needed = {i.name: given[i.name] for i in session.get_inputs()}
    assert session.run(["logits"], needed)[0] == pytest.approx(expected.numpy(), abs=1e-6)


def test_a_model_of_images_takes_pixels(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    rng = np.random.default_rng(0)
    for name in ("bern", "oslo"):
        (tmp_path / "data" / name / "a").mkdir(parents=True)
        (tmp_path / "data" / name / "b").mkdir()
        for k in range(12):
            image = rng.integers(0, 256, (6, 6, 3)).astype(np.uint8)
            pillow.fromarray(image).save(tmp_path / "data" / name / "ab"[k % 2] / f"{k}.png")
    fed = pf.data.load(tmp_path / "data", size=6).partition("natural")
    run = pf.fit(pf.models.build("linear", (3, 6, 6), 2), fed, pf.FedAvg(0.05), rounds=2)
    session = runtime.InferenceSession(str(run.onnx("oslo", tmp_path / "oslo.onnx")))
    x, _ = fed.test.client(1)
    with torch.no_grad():
        expected = run.model("oslo")(x).double().softmax(1)
    p = session.run(["probabilities"], {"pixel_values": x.numpy()})[0]
    assert p == pytest.approx(expected.numpy(), abs=1e-6)
