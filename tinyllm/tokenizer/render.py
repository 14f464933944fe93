"""Renders one chat template as a program of its own: whatever the template does, its process can be stopped.

A template comes with a model file and is code. Jinja's sandbox keeps it from Python's internals and from files, but not
from working for ever or asking for all memory, in a single operation even: ``9**(9**9)``. Nothing inside a process
stops that, so the operating system does. chat.py starts this file by its path, and it imports nothing of ours, which
keeps the start at a tenth of a second.

Reads ``{"template": ..., "variables": {...}}`` as JSON and writes ``{"text": ...}``, ``{"raised": message}`` where the
template refused the messages, or ``{"broken": message}`` where the template itself is to blame.

What it does not stop: on systems without the ``resource`` module (Windows) only the wall clock of chat.py limits it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
MAX_MEMORY = 2**29  # bytes of address space
MAX_OUTPUT = 2**22  # characters; a context of a million tokens
MAX_MESSAGE = 1000


class RaisedError(TemplateError):
    """The template called ``raise_exception``: it does not take these messages."""


class Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model wrote, for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own name and type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The template's text, with what Hugging Face's templates may expect: see the names below.

    Raises jinja2's errors, RaisedError, and whatever else the template's operations raise; ValueError for an output
    of more than MAX_OUTPUT characters.

    >>> render("{% for m in messages %}\\n[{{ m.role }}]\\n{% endfor %}", {"messages": [{"role": "user"}]})
    '[user]\\n'
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    filters: dict[str, Callable[..., Any]] = environment.filters
    filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals
    names.update(raise_exception=_raise, strftime_now=lambda pattern: datetime.now().strftime(pattern))
    pieces, length = [], 0
    for piece in environment.from_string(template).generate(variables):
        length += len(piece)
        if length > MAX_OUTPUT:
            raise ValueError(f"the text is longer than {MAX_OUTPUT} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise RaisedError(str(message))


def _limit_process() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415 (only on Unix)

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def answer(template: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """What the program writes."""
    try:
        return {"text": render(template, variables)}
    except RaisedError as error:
        return {"raised": str(error)[:MAX_MESSAGE]}
    except TemplateSyntaxError as error:
        return {"broken": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"broken": f"it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template's operation may raise anything
        message = str(error)  # a sentence says enough; a bare word, as of a KeyError, needs its class
        return {"broken": (message if " " in message else f"{type(error).__name__}: {message}")[:MAX_MESSAGE]}


def main() -> None:
    """One request from stdin, one answer to stdout."""
    request = json.load(sys.stdin.buffer)
    _limit_process()
    json.dump(answer(request["template"], request["variables"]), sys.stdout)


if __name__ == "__main__":
    main()
