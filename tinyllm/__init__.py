"""tinyllm: an LLM inference engine whose every tensor says what its dimensions are.

Importing the package switches on the shape checks: jaxtyping's import hook wraps every function and dataclass of
`CHECKED_MODULES` and hands violations to `tinyllm.shapes.typechecker`. ``TINYLLM_CHECK=0`` in the environment wraps
nothing at all.
"""

import os

# OpenMP threads that spin while they wait make small products crawl where another process shares the cores. torch
# reads this once, when it is imported: import tinyllm first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from jaxtyping import install_import_hook

from tinyllm.shapes import ShapeError  # imported first: the hook below finds the typechecker in it

CHECKED_MODULES = ("tinyllm.batch", "tinyllm.kv_cache", "tinyllm.layers", "tinyllm.model", "tinyllm.sampler")

if os.environ.get("TINYLLM_CHECK", "1") != "0":
    install_import_hook(CHECKED_MODULES, "tinyllm.shapes.typechecker")

from tinyllm.config import CacheConfig, ModelConfig, SchedulerConfig
from tinyllm.errors import ConfigError, ModelFileError, RequestError, TinyllmError, TokenizerError
from tinyllm.llm import LLM, Completion, Piece
from tinyllm.request import Request, SamplingParams

__all__ = [
    "LLM",
    "CacheConfig",
    "Completion",
    "ConfigError",
    "ModelConfig",
    "ModelFileError",
    "Piece",
    "Request",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "ShapeError",
    "TinyllmError",
    "TokenizerError",
]
