"""What went wrong for users of other engines with GGUF and safetensors files: every public case has its test.

`CASES` says where; the cases that no other file has are here.
"""

import ast
from pathlib import Path

import gguf
import numpy as np
import pytest

from tinyllm.errors import ModelFileError
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.load import load_weights

HERE = Path(__file__).parent
GGUF = HERE.parent / "data" / "gguf"
CASES = {
    "case-083 quantised weights have their blocks' values": [
        "test_dequantize.test_golden",
        "test_reports.test_gguf_gives_the_golden_logits",
    ],
    "case-084 a file cut short is refused before anything is computed": [
        "test_reports.test_a_gguf_cut_anywhere_is_refused",
        "test_gguf.test_every_prefix_of_a_file_is_refused",
    ],
    "case-085 nested arrays and unknown types": ["test_gguf.test_message_names_the_fault"],
    "case-086 q and k rows are reordered by their own heads": [
        "test_names.test_gguf_equals_its_hf_twin",
        "test_reports.test_gguf_gives_the_golden_logits",
    ],
    "case-087 no head_count_kv means as many as heads": ["test_reports.test_absent_kv_heads_are_as_many_as_heads"],
    "case-088 alignment is a power of two": [
        "test_gguf.test_message_names_the_fault",
        "test_gguf.test_more_broken_headers",
    ],
    "case-089 no allocation by a count in the file": ["test_gguf.test_hostile_headers_under_a_time_and_a_memory_limit"],
    "case-090 offsets and dimensions that wrap round": ["test_gguf.test_message_names_the_fault"],
    "case-091 a tensor that the index omits": ["test_hf_folder.test_message_names_the_fault"],
    "case-092 shards outside the folder": ["test_hf_folder.test_message_names_the_fault"],
    "case-093 an index without, or with an odd weight_map, a shard that is not there": [
        "test_hf_folder.test_message_names_the_fault"
    ],
    "case-094 an index that names the wrong shard": ["test_hf_folder.test_message_names_the_fault"],
    "case-095 no code from the folder runs": [
        "test_hf_folder.test_hostile_folders_and_files_under_a_time_and_a_memory_limit",
        "test_hf_folder.test_the_pickle_of_these_tests_would_have_worked",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_test(case):
    for place in CASES[case]:
        module, _, name = place.partition(".")
        tree = ast.parse((HERE / f"{module}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


@pytest.mark.parametrize("path", sorted(GGUF.glob("*.gguf")), ids=lambda path: path.stem)
def test_gguf_gives_the_golden_logits(path, check_golden):
    check_golden(*load_weights(path), path.with_suffix(".npz"))


@pytest.mark.parametrize("part", [0.999, 0.5, 0.1, 0.01])
def test_a_gguf_cut_anywhere_is_refused(part, tmp_path, one_line):
    whole = (GGUF / "llama_f32.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ModelFileError) as error:
        load_weights(path)
    one_line(error.value)


def test_absent_kv_heads_are_as_many_as_heads(tmp_path, check_golden):
    """The golden's model with its two key/value heads written out twice, and no key that counts them."""
    source = read_gguf(GGUF / "llama_f32.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in source.metadata.items():
        if key.startswith("llama.") and key != "llama.attention.head_count_kv":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name in source.tensors:
        tensor = source.read(name)
        if "attn_k." in name or "attn_v." in name:
            tensor = tensor.view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, parameters = load_weights(tmp_path / "model.gguf")
    assert config.num_kv_heads == config.num_heads == 4
    check_golden(config, parameters, GGUF / "llama_f32.npz")
