"""Chat templates: messages become one text, and that text the ids in which no message can play a control token.

A template is a small Jinja program that comes with the model. It is rendered by render.py in a process of its own. The
text that it gives mixes the template's own control tokens with the messages' words, and an encoder can no longer tell
them apart. So every control token that stands in a message is disguised before rendering: its first character becomes
one that occurs nowhere else. In the rendered text only the template's own control tokens are left to be found; then the
disguise is taken off, and the rest is encoded as plain text. A template that prints JSON, a Python dict or a URL may
have escaped the stand-in, so its escaped spellings are taken off as well. What else a template does with a control
token in a message sees the stand-in: it does not find the token with ``in`` or ``split``, nor escape it for HTML.

Source: the conventions of Hugging Face's ``apply_chat_template``.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tinyllm.errors import ModelFileError, RequestError, brief
from tinyllm.tokenizer import render
from tinyllm.tokenizer.bpe import Tokenizer
from tinyllm.tokenizer.detokenize import begun_length

MAX_SECONDS = 20  # of the wall clock; render.CPU_SECONDS of work come first unless the machine is very busy
PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))  # without a meaning
# Such a character, as it is or as JSON, Python's repr and a URL spell it: see `_spellings`.
STAND_IN = re.compile(
    r"[\ue000-\uf8ff\U000f0000-\U0010fffd]"
    r"|\\ud[89ab]..\\ud[c-f]..|\\u[ef][0-9a-f]{3}|\\U00[01][0-9a-f]{5}"
    r"|%F[0-4](?:%[89AB][0-9A-F]){3}|%E[EF](?:%[89AB][0-9A-F]){2}"
)
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")  # looked up, whatever the control tokens are


class ChatTemplate:
    """A template and the tokenizer that it was made for; one object serves any number of conversations.

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
        self._special = sorted(tokenizer.special_tokens, key=len, reverse=True)

    @cached_property
    def _choice(self) -> str:
        return "|".join(map(re.escape, self._special)) or r"(?!)"  # the first that fits counts; (?!) never fits

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({self._choice})")

    @cached_property
    def _start_pattern(self) -> re.Pattern[str]:
        """Fits the first character of every control token, of overlapping ones, too."""
        return re.compile(f"(?={self._choice})(?s:.)")

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of the conversation, as the model's authors meant it.

        `add_generation_prompt` asks for the header of the answer, where the template has one; other `variables` reach
        the template as they are (tools, enable_thinking).

        Raises RequestError for what are no messages, too long ones and those that the template refuses, ModelFileError
        for a template that is broken, forbidden or takes too much time, memory or text.
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
        template's. Raises as `render` does, RequestError where the template gives no text, and TokenizerError for what
        the vocabulary cannot encode.
        """
        check_messages(messages)
        given = _as_json({"messages": list(messages), **variables})
        stand_ins = self._choose_stand_ins(given)
        text = self._render(self._disguise(given, stand_ins), add_generation_prompt)
        if not text:
            raise RequestError("the chat template gave no text for this conversation; use generate, or another model")
        original = _originals(stand_ins)
        token_ids: list[int] = []
        # `split` alternates: text, control token, text, ..., text.
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                token_ids.append(self._tokenizer.special_tokens[part])
            else:
                token_ids += self._tokenizer.encode(STAND_IN.sub(lambda match: original.get(match[0], match[0]), part))
        return token_ids

    def _render(self, given: Mapping[str, Any], add_generation_prompt: bool) -> str:
        if not isinstance(add_generation_prompt, bool):
            raise RequestError(f"add_generation_prompt is {brief(add_generation_prompt)}; expected True or False")
        return run_template(self.source, {**self._tokens, **given, "add_generation_prompt": add_generation_prompt})

    def _choose_stand_ins(self, given: Any) -> dict[str, str]:
        """For each first character of a control token one that neither the messages nor the template hold.

        RequestError where not enough private-use characters are left.
        """
        text = json.dumps(given, ensure_ascii=False)
        in_messages = STAND_IN.findall(text.replace(r"\\", "\\"))  # as they are spelled before JSON doubles backslashes
        taken = {*in_messages, *STAND_IN.findall(self.source), *"".join(self._special)}
        free = (char for char in map(chr, chain(*PRIVATE_USE)) if taken.isdisjoint(_spellings(char)))
        starts = sorted({token[0] for token in self._special})
        stand_ins = dict(zip(starts, free, strict=False))
        if len(stand_ins) < len(starts):
            raise RequestError(
                "the conversation holds all private-use characters (U+E000 to U+F8FF, and from U+F0000 on) but "
                f"{len(stand_ins)}; expected {len(starts)} unused ones, which stand for its control tokens: remove some"
            )
        return stand_ins

    def _disguise(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """`value` with the first character of every control token in its texts and keys replaced."""
        if isinstance(value, str):
            return self._disguise_text(value, stand_ins)
        if isinstance(value, dict):
            return {self._disguise_key(key, stand_ins): self._disguise(item, stand_ins) for key, item in value.items()}
        return [self._disguise(item, stand_ins) for item in value] if isinstance(value, list) else value

    def _disguise_key(self, key: str, stand_ins: Mapping[str, str]) -> str:
        """A key that a template looks up stays as it is. One that holds a control token is none, nor is one that could
        begin a token, unless it is a plain name.
        """
        is_name = key.isidentifier() and not self._special_pattern.search(key)
        return key if is_name or key in MESSAGE_KEYS else self._disguise_text(key, stand_ins)

    def _disguise_text(self, text: str, stand_ins: Mapping[str, str]) -> str:
        disguised = self._start_pattern.sub(lambda match: stand_ins[match[0]], text)
        # A token that only begins at the end, too: the next message could hold the rest of it.
        for end in (len(disguised), len(disguised.rstrip())):  # templates like to trim
            while length := begun_length(disguised[:end], self._special):
                start = end - length
                disguised = disguised[:start] + stand_ins[disguised[start]] + disguised[start + 1 :]
        return disguised


def _spellings(char: str) -> tuple[str, str, str, str]:
    """A character as it is, and as JSON, Python's repr and a URL spell it."""
    return char, json.dumps(char)[1:-1], repr(char)[1:-1], quote(char)


def _originals(stand_ins: Mapping[str, str]) -> dict[str, str]:
    """What each spelling of a stand-in stands for, in the same spelling."""
    pairs = ((_spellings(stand_in), _spellings(char)) for char, stand_in in stand_ins.items())
    return {spelled: original for both in pairs for spelled, original in zip(*both, strict=True)}


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
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the messages cannot be written as JSON: {' '.join(str(error).split())}") from None
    if len(text) > render.MAX_OUTPUT:
        raise RequestError(f"the conversation is longer than {render.MAX_OUTPUT} characters, as JSON; shorten it")
    return json.loads(text)


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
