"""The tracer: what one prompt does to every dimension.

``python -m tinyllm.trace "prompt"`` prints it; ``with trace() as recorder:`` records the calls made in a block.
"""

from tinyllm.trace.ledger import Ledger, LedgerError
from tinyllm.trace.recorder import Call, Recorder, TraceError, Value

trace = Recorder

__all__ = ["Call", "Ledger", "LedgerError", "Recorder", "TraceError", "Value", "trace"]
