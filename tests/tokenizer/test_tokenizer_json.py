"""tokenizer.json files that the `tokenizers` library writes here, loaded by us and by that library."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Regex as OracleRegex
from tokenizers import Tokenizer as OracleTokenizer

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import EncodingRules, tokenizer_from_json, tokenizer_json
from tinyllm.tokenizer.pretokenize import GPT4O_WORD, LLAMA_BPE_WORD, QWEN2_WORD

CORPUS = [
    "the cat's hat isn't  there, 2024!\n\n  it's the   other one: café, naïve, Ångström\r\n\tif (x == 12345):"
] * 3
GPT2_SPELLED = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(use_regex: bool = False, prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex)


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(OracleRegex(pattern), "isolated"), byte_level()])


def smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)])


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, nfc: bool = False, whole_alphabet: bool = True
) -> dict[str, Any]:
    """What the library writes for a small vocabulary with special and added tokens."""
    tokenizer = OracleTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_end|>", "<|im"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<é>", normalized=False)])
    return json.loads(tokenizer.to_str())


def with_model(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**data, "model": {**data["model"], **changes}}


def with_strange_word(data: dict[str, Any]) -> dict[str, Any]:
    """A word that no merges reach, which `ignore_merges` finds all the same; it takes the place of the last merge's."""
    *merges, last = data["model"]["merges"]
    vocab = {"Ġqxz" if token == "".join(last) else token: i for token, i in data["model"]["vocab"].items()}
    return with_model(data, vocab=vocab, merges=merges, ignore_merges=True)


GPT2 = trained(byte_level(use_regex=True))
FILES: dict[str, tuple[dict[str, Any], str, EncodingRules]] = {
    "gpt2": (GPT2, "gpt2", EncodingRules()),
    "gpt2 spelled": (trained(split_then_bytes(GPT2_SPELLED)), "gpt2", EncodingRules()),
    "gpt2 with a blank first": (
        trained(byte_level(use_regex=True, prefix_space=True)),
        "gpt2",
        EncodingRules(prefix_space=True),
    ),
    "no words": (trained(byte_level()), "whole-text", EncodingRules()),
    "smollm": (trained(smollm()), "smollm", EncodingRules()),
    "smollm, bytes missing": (trained(smollm(), whole_alphabet=False), "smollm", EncodingRules()),
    "llama-bpe": (
        with_strange_word(trained(split_then_bytes(LLAMA_BPE_WORD))),
        "llama-bpe",
        EncodingRules(whole_words=True),
    ),
    "gpt-4o": (trained(split_then_bytes(GPT4O_WORD)), "gpt-4o", EncodingRules()),
    "qwen2": (trained(split_then_bytes(QWEN2_WORD), nfc=True), "qwen2", EncodingRules(nfc=True)),
}
LOADED = {name: tokenizer_from_json(json.dumps(data)) for name, (data, _, _) in FILES.items()}
ORACLES = {name: OracleTokenizer.from_str(json.dumps(data)) for name, (data, _, _) in FILES.items()}

PLAIN_PIECES = ["the", " cat", "'s", "'S", "  ", "\n\n", " 12345", "e\u0301", "A\u030a", "\u212b", "\u0958", " qxz"]
MARKED_PIECES = ["<|im_end|>", "<s>", "<think>", "<é>", "<e\u0301>", "<|im", "_end|>", ":\r\n", "\t("]
PIECES = st.sampled_from(PLAIN_PIECES + MARKED_PIECES)
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=4), max_size=15).map("".join)
every_file = pytest.mark.parametrize("name", FILES)


@every_file
def test_rules_and_names(name: str):
    _, pre_tokenizer, rules = FILES[name]
    assert (LOADED[name].pre_tokenizer, LOADED[name].rules) == (pre_tokenizer, rules)
    assert LOADED[name].special_tokens.keys() == {"<s>", "<|im_end|>", "<|im"}
    assert LOADED[name].added_tokens.keys() == {"<think>", "<é>"}
    assert LOADED[name].vocab_size == ORACLES[name].get_vocab_size()


@every_file
@given(TEXTS)
@example("<|im<think>\u0301e\u0301 qxz")
@example("<s> <s>\n<s>")
@example("<s><s>")
def test_same_ids_as_the_tokenizers_library(name: str, text: str):
    assert LOADED[name].encode(text, parse_special=True) == ORACLES[name].encode(text).ids


@every_file
@settings(max_examples=50)
@given(TEXTS)
def test_words_joined_are_the_prepared_text(name: str, text: str):
    words = LOADED[name].encode_words(text)
    joined = "".join(word.text for word in words)
    if FILES[name][2] in (EncodingRules(), EncodingRules(whole_words=True)):
        assert joined == text
    assert (
        LOADED[name].decode_bytes(i for word in words for i in word.token_ids) in joined.encode() or "missing" in name
    )


def test_nfc_is_the_vocabularys():
    ids = [LOADED["qwen2"].encode(text) for text in ("é", "e\u0301", "\u00c5", "\u212b")]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert LOADED["qwen2"].decode(LOADED["qwen2"].encode("e\u0301")) == "é"
    assert LOADED["llama-bpe"].decode(LOADED["llama-bpe"].encode("e\u0301")) == "e\u0301"


def test_a_whole_word_needs_no_merges():
    assert [LOADED["llama-bpe"].token_text(i) for i in LOADED["llama-bpe"].encode("a qxz")] == ["a", " qxz"]


def test_older_files_do_not_say_that_bytes_are_cut_into_words():
    older = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    text = json.dumps({**GPT2, "pre_tokenizer": older})
    assert OracleTokenizer.from_str(text).encode("the cat").ids == tokenizer_from_json(text).encode("the cat")
    assert tokenizer_from_json(text).pre_tokenizer == "gpt2"


def test_merges_as_strings_or_pairs():
    pairs = GPT2["model"]["merges"]
    assert isinstance(pairs[0], list)
    strings = with_model(GPT2, merges=[" ".join(pair) for pair in pairs])
    text = " ".join(CORPUS)
    assert tokenizer_from_json(json.dumps(strings)).encode(text) == LOADED["gpt2"].encode(text)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_from_a_path(tmp_path: Path, mark: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(mark + json.dumps(GPT2, ensure_ascii=False), "utf-8")
    for source in (path, str(path)):
        assert tokenizer_from_json(source).encode("the cat") == LOADED["gpt2"].encode("the cat")


def error_of(source: Path | str | dict[str, Any]) -> str:
    with pytest.raises(TokenizerError) as error:
        tokenizer_from_json(json.dumps(source) if isinstance(source, dict) else source)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NO_CUT = {**BYTES, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
ADDED = {"id": 340, "content": "<x>", "special": False}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is a NoneType; expected a JSON object"),
        ({"decoder": None}, "decoder None is not supported; expected ByteLevel"),
        ({"decoder": {"type": "Metaspace"}}, "decoder 'Metaspace' is not supported"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer 'NFKC' is not supported; expected NFC or none"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
            "normalizer 'Lowercase' is not supported",
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": [None]}}, "normalizer None is not supported"),
        ({"normalizer": {"type": "Sequence"}}, "normalizers is a NoneType; expected a list"),
        ({"pre_tokenizer": None}, "pre-tokenizer None is not supported"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer 'Metaspace' is not supported"),
        (sequence(), "do not end in one ByteLevel"),
        (sequence(SPLIT), "do not end in one ByteLevel"),
        (sequence(NO_CUT, SPLIT), "do not end in one ByteLevel"),
        (sequence(NO_CUT, NO_CUT), "do not end in one ByteLevel"),
        (sequence(SPLIT, NO_CUT), r"patterns ('\\p{N}',) are none of ours (smollm, gpt2"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "add_prefix_space is None; expected true or false"),
        (sequence(SPLIT, {**NO_CUT, "add_prefix_space": True}), "add_prefix_space after another cut"),
        (sequence({**SPLIT, "behavior": "Removed"}, NO_CUT), "'Split' is not supported as the file sets it"),
        (sequence({**SPLIT, "invert": True}, NO_CUT), "'Split' is not supported as the file sets it"),
        (sequence({**SPLIT, "pattern": {"String": " "}}, NO_CUT), "'Split' is not supported as the file sets it"),
        (sequence({"type": "Digits", "individual_digits": False}, BYTES), "'Digits' is not supported as the file"),
        (sequence(sequence(BYTES)["pre_tokenizer"]), "pre-tokenizer 'Sequence' is not supported"),
        ({"added_tokens": {}}, "added_tokens is a dict; expected a list"),
        ({"added_tokens": ["<x>"]}, "added_tokens holds '<x>'; expected an object"),
        ({"added_tokens": [{**ADDED, "id": True}]}, "expected an object with an id and a content"),
        ({"added_tokens": [{**ADDED, "single_word": True}]}, "added token '<x>' sets single_word"),
        ({"added_tokens": [{**ADDED, "lstrip": True}]}, "added token '<x>' sets lstrip"),
        ({"added_tokens": [{**ADDED, "rstrip": True}]}, "added token '<x>' sets rstrip, which is not supported"),
        ({"added_tokens": [{**ADDED, "content": "a"}]}, "added token 'a' has the ids 65 and 340; expected one"),
        ({"added_tokens": [{**ADDED, "id": 999}]}, "ids have gaps or repeat; expected 0, 1, 2, ... once each"),
        ({"added_tokens": [{**ADDED, "id": 5}]}, "ids have gaps or repeat"),
        ({"normalizer": {"type": "NFC"}, "added_tokens": [{**ADDED, "normalized": True}]}, "sets normalized"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str):
    assert message in error_of({**GPT2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "Unigram"}, "tokenizer model 'Unigram' is not supported; expected BPE on bytes"),
        ({"byte_fallback": True}, "model.byte_fallback True is not supported"),
        ({"continuing_subword_prefix": "##"}, "model.continuing_subword_prefix '##' is not supported"),
        ({"dropout": 0.1}, "model.dropout 0.1 is not supported"),
        ({"end_of_word_suffix": "</w>"}, "model.end_of_word_suffix '</w>' is not supported"),
        ({"vocab": []}, "vocab is a list; expected a JSON object"),
        ({"vocab": {"a": "0"}}, "ids have gaps or repeat"),
        ({"vocab": {"a": -1}}, "ids have gaps or repeat"),
        ({"merges": None}, "merges is a NoneType; expected a list"),
        ({"merges": ["ab"]}, "model.merges holds 'ab'; expected"),
        ({"merges": ["a  b"]}, "model.merges holds 'a  b'; expected"),
        ({"merges": [["a", "b", "c"]]}, "model.merges holds ['a', 'b', 'c']; expected"),
        ({"merges": [["a", 3]]}, "model.merges holds ['a', 3]; expected"),
        ({"merges": ["q q"]}, "merge 0 ('q' + 'q') needs 'qq', which is no ordinary token"),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], message: str):
    assert message in error_of(with_model(GPT2, **changes))


def test_a_file_without_a_models_name_or_with_normalized_tokens_loads():
    """GPT-2's own file: its special token is marked as normalized, which means nothing where no text is normalised."""
    model = {key: value for key, value in GPT2["model"].items() if key != "type"}
    added = [{**token, "normalized": True} for token in GPT2["added_tokens"]]
    tokenizer = tokenizer_from_json(json.dumps({**GPT2, "model": model, "added_tokens": added}))
    text = "the cat<|im_end|><think>"
    assert tokenizer.encode(text, parse_special=True) == LOADED["gpt2"].encode(text, parse_special=True)


def test_an_unknown_token_is_no_matter_where_every_byte_has_one():
    unknown = with_model(GPT2, unk_token="<s>")
    assert tokenizer_from_json(json.dumps(unknown)).encode("\x04") == LOADED["gpt2"].encode("\x04")
    few_bytes = FILES["smollm, bytes missing"][0]
    assert "some byte has no token" in error_of(with_model(few_bytes, unk_token="<s>"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "tokenizer.json: is no JSON: Expecting value: line 1 column 1 (char 0); fetch it again"),
        (b'{"model":', "tokenizer.json: is no JSON: Expecting value: line 1 column 10 (char 9); fetch it again"),
        (b"[1]", "tokenizer.json: holds a list; expected a JSON object"),
        (b"\xff\xfe", "tokenizer.json: is no UTF-8 text; fetch it again"),
        (b"[" * 100_000, "tokenizer.json: is nested too deeply; expected a JSON object; fetch it again"),
        (b"1" * 5000, "tokenizer.json: holds a number of thousands of digits; expected a usable one; fetch it again"),
        (b'{"model": {}}', "pre-tokenizer None is not supported"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str):
    folder = tmp_path / ("long" * 20)  # the message has the whole path
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    found = error_of(path)
    assert message in found
    assert str(path) in found or not message.startswith("tokenizer.json")


def test_files_that_cannot_be_read(tmp_path: Path):
    assert "absent.json: cannot be read: No such file or directory; expected a JSON" in error_of(
        tmp_path / "absent.json"
    )
    assert "cannot be read: " in error_of(tmp_path)
    assert "cannot be read: embedded null byte; expected a JSON file" in error_of("a\x00b")
    assert "cannot be read: " in error_of("[1]\n" * 9999)
    assert "the tokenizer's source is empty; expected the path of a JSON file, or its text" in error_of("")
    for source in (None, b"{}", 7):
        message = f"the tokenizer's source is a {type(source).__name__}; expected the path of a JSON file"
        assert message in error_of(source)  # pyright: ignore[reportArgumentType]


def test_a_file_that_is_too_long_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_json, "MAX_JSON_SIZE", 1000)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": [' + "[]," * 1000)
    assert error_of(path) == f"{path}: is longer than 1000 characters; expected less"
    assert error_of(path.read_text()) == "the text: is longer than 1000 characters; expected less"


def test_a_broken_text_is_not_to_be_fetched():
    assert error_of("{") == (
        "the text: is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "id", "content"]), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_any_edit_of_a_file_works_or_is_refused(examples: int):
    settings(max_examples=examples)(check_an_edited_file)()


@given(st.data())
def check_an_edited_file(data: st.DataObject):
    """One value anywhere in a sound file becomes something else."""
    edited = json.loads(json.dumps(FILES[data.draw(st.sampled_from(["smollm", "qwen2"]))][0]))
    node = edited
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not (isinstance(node[key], dict | list) and node[key] and data.draw(st.integers(0, 3))):
            break
        node = node[key]
    node[key] = data.draw(JUNK)
    try:
        tokenizer = tokenizer_from_json(json.dumps(edited))
    except TokenizerError as error:
        assert str(error).isprintable()
        event("refused")
        return
    event("works")
    tokenizer.decode(tokenizer.encode("the cat's <s> é", parse_special=True))
