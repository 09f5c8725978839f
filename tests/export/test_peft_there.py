"""Adapters of the command line in the hands of transformers and peft: the same logits of a client's model."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import notes, tokenizer_of_words

import polyfed as pf

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
T = 5
SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
X = torch.tensor([[[2, 3, 4, 5, 6], [1, 1, 1, 1, 1]], [[7, 2, 0, 0, 0], [1, 1, 0, 0, 0]]])


def run(place, cli, model, columns):
    tokenizer_of_words(place / "there")
    (place / "data").mkdir()
    for seed, name in enumerate(("bern", "oslo")):
        notes(24, seed).to_csv(place / "data" / f"{name}.csv", index=False)
    (place / "study.toml").write_text(
        f'rounds = 2\nbatch-size = 8\nseeds = 1\n[data]\nname = "./data"\n[columns]\ntext = "note"\nlength = {T}\n'
        f'tokenizer = "there/tokenizer.json"\n{columns}[model]\nbackbone = "there"\n{model}'
        '[algorithm]\nname = "ditto"\nlr = 0.5\n'
    )
    cli("run", "study.toml", "--out", "run").done()
    for form in ("merged", "peft"):
        cli("export", "run", "--client", "oslo", "--form", form).done()
    return pf.Run.open(place / "run").model("oslo").eval()


def near(found, expected, begun):
    """Equal, and not what training began with."""
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(begun, expected, rtol=0, atol=1e-3)


def test_a_bert_with_a_head(tmp_path, cli):
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "there")
    model = run(tmp_path, cli, 'adapter = "lora:r=4,targets=query+value"\n', 'target = "ill"\n')
    tensors = load_file(tmp_path / "oslo.safetensors")
    base = transformers.BertModel.from_pretrained(tmp_path / "there", add_pooling_layer=False).eval()
    own = {key.removeprefix("base."): t for key, t in tensors.items() if key.startswith("base.")}

    def logits(base):
        states = base(input_ids=X[:, 0], attention_mask=X[:, 1]).last_hidden_state
        mask = X[:, 1, :, None].float()
        mean = (states * mask).sum(1) / mask.sum(1)
        return mean @ tensors["head.weight"].T + tensors["head.bias"]

    with torch.no_grad():
        expected, begun = model(X), logits(base)
        assert not base.load_state_dict(own, strict=False).unexpected_keys
        near(logits(base), expected, begun)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = pf.models.build("transformers", (2, T), 2, backbone=str(tmp_path / "there"))
    opened = peft.PeftModel.from_pretrained(plain, str(tmp_path / "oslo-peft")).eval()
    with torch.no_grad():
        near(opened(X), expected, begun)


def test_a_llama_with_its_own_head(tmp_path, cli):
    """Opened on the class of transformers itself, which knows nothing of ours."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=16)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "there")
    words = 'pool = "words"\nadapter = "lora:r=4,targets=q_proj+v_proj+down_proj"\n'
    model = run(tmp_path, cli, words, 'task = "next-token"\npack = true\nend = "[PAD]"\n')
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "there").eval()
    given = {"input_ids": X[:, 0], "attention_mask": X[:, 1]}
    with torch.no_grad():
        expected, begun = model(X), plain(**given).logits
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tensors = load_file(tmp_path / "oslo.safetensors")
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "there").eval()
    other.load_state_dict({key.removeprefix("base."): t for key, t in tensors.items()})
    opened = peft.PeftModel.from_pretrained(plain, str(tmp_path / "oslo-peft")).eval()
    with torch.no_grad():
        near(other(**given).logits, expected, begun)
        near(opened(**given).logits, expected, begun)
