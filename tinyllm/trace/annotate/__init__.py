"""A source file of the model with the shapes that a run gave it: ``--annotate FILE``.

Under each line that makes a tensor stands what it was, prefill and decode side by side. The source stays as it is: a
line that begins with ``#|`` is the tracer's, and without these the file is back.
"""

from tinyllm.trace.annotate.files import annotatable, find_source
from tinyllm.trace.annotate.notes import MARK
from tinyllm.trace.annotate.render import annotate, annotate_html
from tinyllm.trace.annotate.runs import Run, record_calls

__all__ = [
    "MARK",
    "Run",
    "annotatable",
    "annotate",
    "annotate_html",
    "find_source",
    "record_calls",
]
