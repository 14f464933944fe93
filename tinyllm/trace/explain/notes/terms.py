"""All terms of the trace, and the other forms in which it prints some."""

from tinyllm.trace.explain.notes.cost_terms import COST_TERMS
from tinyllm.trace.explain.notes.engine_terms import ENGINE_TERMS
from tinyllm.trace.explain.notes.note import Term
from tinyllm.trace.explain.notes.row_terms import ROW_TERMS

TERMS: dict[str, Term] = {**COST_TERMS, **ENGINE_TERMS, **ROW_TERMS}

SPELLINGS: dict[str, str] = {  # other forms of a term that the trace prints
    "m": "memory-bound",
    "c": "compute-bound",
    "FLOPs": "FLOP",
    "MFLOP": "FLOP",
    "GFLOP": "FLOP",
    "bytes": "BYTE",
    "reads": "BYTE",
    "writes": "BYTE",
    "read": "BYTE",
    "write": "BYTE",
    "intensity": "F/B",
    "causal": "causal-exact",
    "exact": "causal-exact",
    "budget": "token budget",
    "preempted": "preempt",
    "null": "null block",
    "steps": "step",
    "A": "request",
    "B": "request",
    "C": "request",
    "requests": "request",
    "contiguous": "not contiguous",
    "run total": "total",
    "cache": "pool",
    "free": "block map",
    "held": "block map",
    "view": "view of",
    "roofline": "ridge",
    "bfloat16": "float32",
    "dtype": "float32",
    "hit": "prefix hit",
}
