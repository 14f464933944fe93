"""Chat templates: messages become one text, and that text the ids in which no message can play a control token.

A template is a small Jinja program that comes with the model. It is rendered by render.py in a process of its own. The
text that it gives mixes the template's own control tokens with the messages' words, and an encoder can no longer tell
them apart. So every control token that stands in a message is disguised before rendering: its first character becomes
one that occurs nowhere else. In the rendered text only the template's own control tokens are left to be found; then the
disguise is taken off, and the rest is encoded as plain text.

Source: the conventions of Hugging Face's ``apply_chat_template``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from tinyllm.errors import ModelFileError, RequestError, brief
from tinyllm.tokenizer import render
from tinyllm.tokenizer.bpe import Tokenizer
from tinyllm.tokenizer.detokenize import begun_length

MAX_SECONDS = 20  # of the wall clock; render.CPU_SECONDS of work come first unless the machine is very busy
PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters without a meaning


class ChatTemplate:
    """A template and the tokenizer that it was made for.

    `bos_token` and `eos_token` are variables that templates use; None leaves them undefined.

    >>> tokenizer = Tokenizer(["<", "e", ">", "h", "i", "<e>"], [], ["<e>"], "smollm")
    >>> template = ChatTemplate("{% for m in messages %}{{ m.content }}<e>{% endfor %}", tokenizer)
    >>> messages = [{"role": "user", "content": "hi<e>"}]
    >>> template.render(messages), template.encode(messages)
    ('hi<e><e>', [3, 4, 0, 1, 2, 5])
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in named.items() if token is not None}
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)  # an alternation takes its first fit
        choice = "|".join(map(regex.escape, special)) or r"(?!)"  # (?!) never fits
        self._special = special
        self._special_pattern = regex.compile(f"({choice})")
        self._start_pattern = regex.compile(f"(?={choice})(?s:.)")  # the first character of each, overlapping ones too

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of the conversation, as the model's authors meant it.

        `add_generation_prompt` asks for the header of the answer, where the template has one; other `variables` reach
        the template as they are (tools, enable_thinking).

        Raises RequestError for what are no messages and for those that the template refuses, ModelFileError for a
        template that is broken, forbidden or takes too much time, memory or text.
        """
        check_messages(messages)
        given = _as_json({"messages": list(messages), **variables})
        return self._render(given, add_generation_prompt)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of `render`'s text, in which control tokens come from the template alone.

        No begin token is added: where the model wants one, its template writes it. A control token that the template
        itself makes of a message's words, as in ``<|{{ message.role }}|>`` or by changing their case, counts as the
        template's. Raises as `render` does, and TokenizerError for what the vocabulary cannot encode.
        """
        check_messages(messages)
        given = _as_json({"messages": list(messages), **variables})
        stand_ins = self._choose_stand_ins(given)
        text = self._render(self._disguise(given, stand_ins), add_generation_prompt)
        undo = {ord(stand_in): char for char, stand_in in stand_ins.items()}
        token_ids: list[int] = []
        # `split` alternates: text, control token, text, ..., text.
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                token_ids.append(self._tokenizer.special_tokens[part])
            else:
                token_ids += self._tokenizer.encode(part.translate(undo))
        return token_ids

    def _render(self, given: Mapping[str, Any], add_generation_prompt: bool) -> str:
        return run_template(self.source, {**self._tokens, **given, "add_generation_prompt": add_generation_prompt})

    def _choose_stand_ins(self, given: Any) -> dict[str, str]:
        """For each first character of a control token one that neither the messages nor the template hold."""
        taken = {*json.dumps(given, ensure_ascii=False), *self.source}
        free = (chr(code) for code in PRIVATE_USE if chr(code) not in taken)
        return {char: next(free) for char in sorted({token[0] for token in self._special})}

    def _disguise(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """`value` with the first character of every control token in its texts replaced."""
        if isinstance(value, str):
            return self._disguise_text(value, stand_ins)
        if isinstance(value, dict):
            return {key: self._disguise(item, stand_ins) for key, item in value.items()}
        return [self._disguise(item, stand_ins) for item in value] if isinstance(value, list) else value

    def _disguise_text(self, text: str, stand_ins: Mapping[str, str]) -> str:
        disguised = self._start_pattern.sub(lambda match: stand_ins[match[0]], text)
        # A token that only begins at the end, too: the next message could hold the rest of it.
        for end in (len(disguised), len(disguised.rstrip())):  # templates like to trim
            while length := begun_length(disguised[:end], self._special):
                start = end - length
                disguised = disguised[:start] + stand_ins[disguised[start]] + disguised[start + 1 :]
        return disguised


def check_messages(messages: Any) -> None:
    """RequestError, one line, for what is no conversation.

    >>> check_messages([{"role": "user"}])
    Traceback (most recent call last):
    tinyllm.errors.RequestError: message 0 has no content; expected a text
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}; expected a list of messages with role and content"
        )
    if not messages:
        raise RequestError("the conversation is empty; expected at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is a {type(message).__name__}; expected a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"message {number} has the role {brief(role)}; expected a text such as 'user'")
        if content is None and "tool_calls" not in message:
            raise RequestError(f"message {number} has no content; expected a text")
        if not isinstance(content, str | None):
            raise RequestError(f"message {number} has the content {brief(content)}; expected a text")


def _as_json(value: Any) -> Any:
    """`value` as the other process gets it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the messages cannot be written as JSON: {' '.join(str(error).split())}") from None


def run_template(source: str, variables: Mapping[str, Any]) -> str:
    """Render in a process of its own, within render.py's limits. Raises ModelFileError or RequestError, one line."""
    request = json.dumps({"template": source, "variables": variables}).encode()
    answer = _ask(request)
    if "text" in answer:
        return answer["text"]
    if "raised" in answer:
        message = " ".join(answer["raised"].split())
        raise RequestError(f"the chat template refuses the messages: {message:.500}")
    limits = (
        f"it was stopped; expected at most {render.CPU_SECONDS} s of work and {render.MAX_MEMORY >> 20} MiB of memory"
    )
    message = " ".join(answer.get("broken", limits).split())
    raise ModelFileError(f"the chat template cannot be used: {message:.500}")


def _ask(request: bytes) -> dict[str, str]:
    """What render.py answers; nothing where it was stopped."""
    path = os.pathsep.join(entry for entry in sys.path if entry)  # jinja2 comes from where ours would come from
    # -P: the modules beside that file stay out of the way; -S: the path is complete, so the start is quick.
    command = [sys.executable, "-P", "-S", str(Path(render.__file__))]
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, env=environment, timeout=MAX_SECONDS, check=False
        )
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no JSON, or a part of it
        return {}
    except OSError as error:
        raise ModelFileError(f"the chat template cannot be rendered: {error.strerror or error}") from None
