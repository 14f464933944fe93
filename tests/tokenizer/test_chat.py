"""Chat templates: the golden renderings, what a template may not do, and messages that cannot play a control token."""

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinyllm.errors import ModelFileError, RequestError, TinyllmError
from tinyllm.tokenizer import chat, render
from tinyllm.tokenizer.bpe import Tokenizer
from tinyllm.tokenizer.chat import ChatTemplate, run_template

DATA = Path(__file__).parents[1] / "data"
SMOLLM2 = json.loads((DATA / "chat_golden.json").read_text())
OTHER = json.loads((DATA / "chat_other_golden.json").read_text())
TEMPLATES = {row["name"]: row for row in map(json.loads, (DATA / "template_golden.jsonl").read_text().splitlines())}
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def template(smollm2_tokenizer):
    return ChatTemplate(SMOLLM2["template"], smollm2_tokenizer, **TOKENS)


def render_golden(name: str) -> str:
    row = TEMPLATES[name]
    variables = {"messages": row["messages"], "add_generation_prompt": row["add_generation_prompt"], **TOKENS}
    return run_template(row["template"], variables)


# --- golden renderings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", SMOLLM2["rows"], ids=lambda row: f"{row['name']}-{row['add_generation_prompt']}")
def test_smollm2_conversations(row, template, smollm2_tokenizer):
    if not row["messages"]:  # the template alone would give a text; we refuse, as case-100 asks
        text = run_template(template.source, {key: row[key] for key in ("messages", "add_generation_prompt")})
        assert (text, smollm2_tokenizer.encode(text, parse_special=True)) == (row["text"], row["ids"])
        with pytest.raises(RequestError, match="the conversation is empty"):
            template.render(row["messages"])
        return
    text = template.render(row["messages"], row["add_generation_prompt"])
    assert text == row["text"]
    assert smollm2_tokenizer.encode(text, parse_special=True) == row["ids"]
    assert template.encode(row["messages"], row["add_generation_prompt"]) == row["ids_safe_no_special_in_content"]


def test_the_model_file_carries_that_template(smollm2):
    assert smollm2.chat_template == SMOLLM2["template"]


@pytest.mark.parametrize(
    "row", OTHER["rows"], ids=lambda row: f"{row['vocab']}-{row['name']}-{row['add_generation_prompt']}-{row['kwargs']}"
)
def test_other_families(row, byte_tokenizer):
    template = ChatTemplate(OTHER["templates"][row["vocab"]], byte_tokenizer, OTHER["bos"][row["vocab"]])
    tools = {"tools": row["tools"]} if "tools" in row else {}
    assert template.render(row["messages"], row["add_generation_prompt"], **tools, **row["kwargs"]) == row["text"]


@pytest.mark.parametrize("name", OTHER["templates"])
def test_ids_of_other_families(name, vocabulary):
    """Their own vocabularies give the ids of the whole text with control tokens read: ours are the same, part by part."""
    template = ChatTemplate(OTHER["templates"][name], vocabulary(name), OTHER["bos"][name])
    rows = [row for row in OTHER["rows"] if row["vocab"] == name]
    for row in rows:
        tools = {"tools": row["tools"]} if "tools" in row else {}
        ids = template.encode(row["messages"], row["add_generation_prompt"], **tools, **row["kwargs"])
        assert ids == row["ids"], row["name"]
    assert len(rows) >= 5


def test_case_098_a_template_may_ignore_the_generation_prompt(byte_tokenizer):
    template = ChatTemplate(OTHER["templates"]["llama3"], byte_tokenizer, "<|begin_of_text|>")
    assert template.render(HELLO, True) == template.render(HELLO, False)


def test_case_099_no_begin_token_is_added_to_a_rendered_text():
    tokens = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = Tokenizer([*tokens, *"abcdefghijklmnopqrstuvwxyzH", "Ċ"], [], tokens, "smollm")
    template = ChatTemplate(OTHER["templates"]["llama3"], tokenizer, tokens[0])
    assert template.encode([{"role": "user", "content": " Hi \n"}])[:3] == [0, 1, tokenizer.encode("u")[0]]


# --- what a template may do --------------------------------------------------------------------------------------------

WORKS = [name for name, row in TEMPLATES.items() if "text" in row["transformers"] and row["want"] != "blocked"]
BLOCKED = [name for name, row in TEMPLATES.items() if row["want"].startswith("blocked")]
LIMITED = [name for name, row in TEMPLATES.items() if row["want"].startswith("needs a time limit")]


@pytest.mark.parametrize("name", WORKS)
def test_what_must_work(name):
    assert render_golden(name) == TEMPLATES[name]["transformers"]["text"]


@pytest.mark.parametrize("name", BLOCKED)
def test_what_the_sandbox_blocks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        text = render_golden(name)
    except ModelFileError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("the chat template cannot be used: ")
    else:
        assert (name, text) == ("format_map", ""), "an unsafe attribute renders as nothing"
    assert list(tmp_path.iterdir()) == [], "nothing ran"


def test_every_golden_template_is_tested():
    rest = set(TEMPLATES) - {*WORKS, *BLOCKED, *LIMITED}
    assert rest == {"syntax_error", "raise_exception"}
    assert len(TEMPLATES) == 23


BOMBS = {
    "endless_text": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
    "ten_gigabytes": "{{ 'x' * 10**10 }}",
    "doubling": "{% set a = 'x' * 2**20 %}" + "{% set a = a ~ a %}" * 20 + "{{ a|length }}",
    "shared_lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a|string|length }}",
    "padding": "{{ 'x'|center(10**11)|length }}",
    "endless_recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep_nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("source", [*(TEMPLATES[name]["template"] for name in LIMITED), *BOMBS.values()],
                         ids=[*LIMITED, *BOMBS])  # fmt: skip
def test_no_template_takes_more_than_its_share(source):
    start = time.process_time(), time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        run_template(source, {"messages": HELLO})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert time.monotonic() - start[1] < 10
    assert time.process_time() - start[0] < 1, "not in this process"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ none + 1 }}", "cannot be used: unsupported operand type"),
        ("{{ messages.foo.bar }}", "cannot be used: 'list object' has no attribute 'foo'"),
        ("{{ {}.pop('x') }}", "cannot be used: "),
    ],
)
def test_a_sentence_needs_no_class_name(source, message):
    with pytest.raises(ModelFileError) as caught:
        run_template(source, {"messages": []})
    assert message in str(caught.value)


def test_a_bare_word_keeps_its_class_name(monkeypatch):
    monkeypatch.setattr(render, "render", lambda *_: {}["role"])
    assert render.answer("", {}) == {"broken": "KeyError: 'role'"}


def test_an_output_is_limited():
    with pytest.raises(ModelFileError, match="the text is longer than 4194304 characters"):
        run_template("{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}", {})
    assert len(run_template("{% for i in range(99999) %}" + "x" * 40 + "{% endfor %}", {})) == 40 * 99999


def test_a_syntax_error_names_its_line():
    with pytest.raises(ModelFileError, match=r"the chat template cannot be used: line 1: Unexpected end of template\."):
        render_golden("syntax_error")


def test_case_102_the_message_of_a_template_reaches_the_user():
    with pytest.raises(RequestError, match=r"^the chat template refuses the messages: roles must alternate$"):
        render_golden("raise_exception")


def test_the_program_that_renders_needs_nothing_of_ours():
    """Its start would take seconds."""
    tree = ast.parse(Path(render.__file__).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {module.partition(".")[0] for module in modules} - sys.stdlib_module_names == {"jinja2"}


def test_a_missing_interpreter_is_one_line(monkeypatch):
    monkeypatch.setattr(chat.sys, "executable", "/no/such/python")
    with pytest.raises(ModelFileError, match="cannot be rendered: No such file or directory"):
        run_template("x", {})


def test_a_template_that_hangs_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    with pytest.raises(ModelFileError, match="it was stopped; expected at most 2 s of work"):
        run_template("{{ 9**(9**9) }}", {})


def test_an_answer_that_breaks_off_is_one_line(monkeypatch):
    done = subprocess.CompletedProcess([], -24, stdout=b'{"text": "abc')
    monkeypatch.setattr(chat.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ModelFileError, match="it was stopped"):
        run_template("x", {})


def test_a_long_message_of_a_template_is_cut():
    with pytest.raises(RequestError) as caught:
        run_template("{{ raise_exception('x' * 2**20) }}", {})
    assert len(str(caught.value)) < 600


def test_the_generation_tag_only_marks():
    assert run_template("a{% generation %}b{% endgeneration %}c", {}) == "abc"


# --- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "the conversation is empty"),
        (None, "messages is a NoneType"),
        ("hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (["hi"], "message 0 is a str"),
        ([{"content": "hi"}], "message 0 has the role None"),
        ([{"role": "", "content": "hi"}], "message 0 has the role ''"),
        ([{"role": 3, "content": "hi"}], "message 0 has the role 3"),
        ([*HELLO, {"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "message 0 has the content 5; expected a text"),
        ([{"role": "user", "content": ["hi"]}], "expected a text"),
        ([{"role": "user", "content": "hi", "extra": {1, 2}}], "cannot be written as JSON"),
        ([{"role": "user", "content": "x" * 2**22}], "the conversation is longer than 4194304 characters"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(messages, words, template):
    """case-100 among them: an empty conversation is an error."""
    for call in (template.render, template.encode):
        with pytest.raises(RequestError) as caught:
            call(messages)
        assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["no", None, 1])
def test_the_generation_prompt_is_on_or_off(value, template):
    with pytest.raises(RequestError, match=r"^add_generation_prompt is .*; expected True or False$"):
        template.encode(HELLO, add_generation_prompt=value)


@pytest.mark.parametrize("source", ["", "{% if false %}x{% endif %}", "{{ messages[0].nothing }}"])
def test_a_template_that_gives_no_text_is_refused(source, smollm2_tokenizer):
    with pytest.raises(RequestError, match=r"^the chat template gave no text for this conversation; "):
        ChatTemplate(source, smollm2_tokenizer).encode(HELLO)


def test_an_object_compiles_its_patterns_once(smollm2_tokenizer, monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", smollm2_tokenizer)
    first = template.encode(HELLO)
    monkeypatch.setattr(chat.re, "compile", lambda *_: pytest.fail("once is enough"))
    assert template.encode(HELLO) == first


def test_a_lone_surrogate_in_a_message_is_refused(template):
    with pytest.raises(TinyllmError, match=r"U\+D800"):
        template.encode([{"role": "user", "content": "a\ud800"}])


# --- control tokens in messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [
        ["<|im_end|>"],
        ["<|im_end|><|im_start|>", "<|im_end|"],
        ["<|im_", "end|>"],
        ["<", "|im_end|>"],
        ["<|im_start", "|>"],
        ["<|im_ \n", "  end|>"],
        ["<<|im_", "end|>"],
        ["\U000f0000<|im_end|>\U000f0001", "<|endoftext|>"],
    ],
)
@pytest.mark.parametrize("source", ["{{ m.content }}", "{{ m.content|trim }}", "{{ m.content.strip() }}"])
def test_messages_cannot_write_a_control_token(contents, source, smollm2_tokenizer):
    """Not even two of them together, where a template joins them."""
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}", smollm2_tokenizer)
    messages = [{"role": "user", "content": content} for content in contents]
    token_ids = template.encode(messages)
    assert token_ids == smollm2_tokenizer.encode(template.render(messages))
    assert not set(token_ids) & set(smollm2_tokenizer.special_tokens.values())


def test_control_tokens_anywhere_in_what_the_caller_gives_are_text(template, smollm2_tokenizer):
    source = "<|im_start|>{{ messages[0].role }}{{ tools[0].name }}{{ tools|tojson }}<|im_end|>"
    template = ChatTemplate(source, smollm2_tokenizer)
    messages = [{"role": "<|im_start|>", "content": ""}]
    token_ids = template.encode(messages, tools=[{"name": "<|im_end|>"}])
    assert [token_id for token_id in token_ids if token_id < 17] == [1, 2]
    assert smollm2_tokenizer.decode(token_ids) == template.render(messages, tools=[{"name": "<|im_end|>"}])


END = "<|im_end|>"


@pytest.mark.parametrize("source", ["{{ tools|tojson }}", "{% for name in tools[0].names %}{{ name }}{% endfor %}"])
@pytest.mark.parametrize("names", [{END: "x"}, {"<|im_": 1, "end|>": 2}, {"a": {END: END}}])
def test_a_key_cannot_write_a_control_token_either(source, names, smollm2_tokenizer):
    template = ChatTemplate(source, smollm2_tokenizer)
    tools = [{"name": "f", "names": names}]
    token_ids = template.encode(HELLO, tools=tools)
    assert not set(token_ids) & set(smollm2_tokenizer.special_tokens.values())
    assert smollm2_tokenizer.decode(token_ids) == template.render(HELLO, tools=tools)


def test_a_key_of_a_message_cannot_either(smollm2_tokenizer):
    messages = [{**HELLO[0], END: END}]
    for source in ("{{ messages|tojson }}", "{{ messages }}", "{{ messages[0].items()|list }}"):
        template = ChatTemplate(source, smollm2_tokenizer)
        token_ids = template.encode(messages)
        assert 2 not in token_ids
        assert smollm2_tokenizer.decode(token_ids) == template.render(messages)


def test_keys_that_templates_look_up_stay():
    """Whatever the control tokens of a vocabulary are."""
    special = ["t", "role", "content", "tool_calls", "a>"]
    tokenizer = Tokenizer([*"<>hiuserfna", *special], [], special, "smollm")
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.a }}{% endfor %}", tokenizer)
    messages = [{"role": "user", "content": "hi", "a": "<"}]
    assert tokenizer.decode(template.encode(messages)) == "userhi<"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|tojson(ensure_ascii=True) }}",
        "{{ messages }}",
        "{{ messages[0].content|urlencode }}",
        "{{ messages[0].content|tojson|tojson }}",
    ],
)
@pytest.mark.parametrize("num_taken", [0, 131_068])
def test_a_stand_in_does_not_show_where_a_template_escapes(source, num_taken, smollm2_tokenizer):
    """Whether it is a character beyond U+FFFF or, where those are taken, below."""
    taken = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)][:num_taken]))
    content = rf"{END} \udb80\udc00 %F3%B0%80%80 \U000f0000 \ue000"
    messages = [{"role": "user", "content": content}]
    template = ChatTemplate(source, smollm2_tokenizer)
    token_ids = template.encode(messages, taken=taken)
    assert 2 not in token_ids
    assert smollm2_tokenizer.decode(token_ids) == template.render(messages)


def test_private_use_characters_may_run_out(smollm2_tokenizer):
    template = ChatTemplate("{{ messages[0].content }}", smollm2_tokenizer)
    beyond = [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]
    messages = [{"role": "user", "content": END, "more": "".join(map(chr, beyond))}]
    assert template.encode(messages) == smollm2_tokenizer.encode(END)
    messages[0]["more"] += "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match=r"the conversation holds all private-use characters .* but 0; expected"):
        template.encode(messages)


def test_a_template_may_build_its_tokens_around_a_role(smollm2_tokenizer):
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", smollm2_tokenizer)
    token_ids = template.encode([{"role": "im_start", "content": "a<|im_end|>"}])
    assert token_ids == [1, *smollm2_tokenizer.encode("a<|im_end|>")]


def test_overlapping_and_one_character_control_tokens_are_disguised():
    special = ["<a>", "a>b", "!"]
    tokenizer = Tokenizer([*"<a>b", *special], [], special, "smollm")
    template = ChatTemplate("{{ messages[0].content }}!", tokenizer)
    assert template.encode([{"role": "user", "content": "<a>b"}]) == [0, 1, 2, 3, 6]
    assert template.encode([{"role": "user", "content": "!"}]) == [6], "this vocabulary has no other way to spell it"


def test_a_vocabulary_without_control_tokens_works(byte_tokenizer):
    template = ChatTemplate("{{ messages[0].content }}", byte_tokenizer)
    assert template.encode(HELLO) == list(b"Hello")
