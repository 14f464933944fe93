"""The tracer: what one prompt does to every dimension.

``python -m tinyllm.trace "prompt"`` prints it; ``with trace() as t: llm.generate("prompt")`` keeps it in `t`.
"""

from tinyllm.trace.context import Trace
from tinyllm.trace.ledger import Ledger, LedgerError
from tinyllm.trace.recorder import Call, Recorder, TraceError, Value

trace = Trace

__all__ = ["Call", "Ledger", "LedgerError", "Recorder", "Trace", "TraceError", "Value", "trace"]
