"""An annotated file as text, and as a page of HTML."""

import html
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinyllm.shapes import WORDS
from tinyllm.trace.annotate.files import find_source
from tinyllm.trace.annotate.notes import MARK, Notes, notes_of
from tinyllm.trace.annotate.runs import Run
from tinyllm.trace.explain.sources import show_path, source_lines
from tinyllm.trace.reading import PACKAGE
from tinyllm.trace.text import WIDTH


def annotate(path: str | Path, runs: Sequence[Run], layer: int = 1) -> list[str]:
    """The file's lines with the tracer's between them. Of a function that ran several times the first call in `layer`
    is shown, or the first of all: layer 0 has no residual yet, so layer 1 shows more.

    Raises ConfigError for a file that is no tensor module.
    """
    file = find_source(path)
    notes = notes_of(file, runs, layer)
    below = _by_line(notes)
    lines = [f"{MARK} {text}".rstrip() for text in _head(file, runs, notes)]
    for number, line in enumerate(source_lines(file), 1):
        lines += [line, *below.get(number, [])]
    return lines


def _by_line(notes: Sequence[Notes]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line, text in (item for group in notes for item in group.texts()):
        found.setdefault(line, []).append(text)
    return found


HINTS = {
    "layers/attention/sdpa.py": "This run has another attention body; add --attention sdpa.",
    "layers/attention/reference.py": "This run has another attention body; leave --attention out.",
    "sampler/processors.py": "Greedy requests need none of it; add --temperature 0.8.",
    "sampler/noise.py": "Greedy requests need none of it; add --temperature 0.8.",
}
"""How to run a file that these steps did not come to."""


def _head(file: Path, runs: Sequence[Run], notes: Sequence[Notes]) -> Iterator[str]:
    """What the page is, what the runs were, and the symbols that it uses."""
    models = ", ".join(dict.fromkeys(run.model for run in runs)) or "no model"
    yield from textwrap.wrap(f"{show_path(file)}, with shapes from a run of {models}.", WIDTH - 3)
    yield f"Lines that begin with {MARK} are the tracer's: a name, its dimensions, its shape in each step."
    for run in runs:
        yield from textwrap.wrap(run.title, WIDTH - 3, initial_indent=f"{run.label:8} ", subsequent_indent=" " * 9)
    used = {word for group in notes for note in group.notes for word in note.words or ()}
    if not any(note.shapes for group in notes for note in group.notes):
        yield f"No line of it made a tensor. {HINTS.get(file.relative_to(PACKAGE).as_posix(), '')}".rstrip()
    known = [WORDS[name] for name in WORDS if name in {word.partition("+")[0] for word in used}]
    width = max((len(word.name) for word in known), default=0)
    for word in known:
        left = f"  {word.symbol:6} {word.name:{width}}  "
        yield from textwrap.wrap(word.meaning, WIDTH - 3, initial_indent=left, subsequent_indent=" " * len(left))


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --number: #6b6b6b; --made: #00527a; --band: #eaf3f8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181a; --text: #e6e6e6; --number: #9a9a9a; --made: #8fd0f5; --band: #1d2a33; }
}
body { background: var(--back); color: var(--text); margin: 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; tab-size: 4; }
h1 + pre { white-space: pre-wrap; }
pre a { color: var(--number); text-decoration: none; user-select: none; }
pre a:target { outline: 2px solid var(--made); }
pre b { color: var(--made); background: var(--band); font-weight: 600; }
@media (max-width: 600px) { body { margin: .6rem; } pre { font-size: 11px; } }
"""


def annotate_html(path: str | Path, runs: Sequence[Run], layer: int = 1) -> str:
    """The same as one page that needs nothing else: no script, no font, no other file. ``#L12`` leads to line 12."""
    file = find_source(path)
    name = html.escape(show_path(file))
    notes = notes_of(file, runs, layer)
    below, lines = _by_line(notes), source_lines(file)
    width = len(str(len(lines)))
    rows: list[str] = []
    for number, line in enumerate(lines, 1):
        rows.append(
            f'<a id="L{number}" href="#L{number}">{number:{width}}</a>  {html.escape(line, quote=False)}'.rstrip()
        )
        rows += [f"{'':{width}}  <b>{html.escape(text, quote=False)}</b>" for text in below.get(number, [])]
    head = html.escape("\n".join(_head(file, runs, notes)), quote=False)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} with the shapes of a run</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        f"<pre>{head}</pre>\n<pre>" + "\n".join(rows) + "</pre>\n</body>\n</html>\n"
    )
