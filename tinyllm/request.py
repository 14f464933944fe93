"""One request: its prompt, its sampling parameters, and how far the engine has come with it. Plain Python.

There is no prefill or decode state. `num_computed_tokens` against `num_tokens` says everything: a step computes some of
the difference, and once it is zero the last row's logits give one more token.
"""

import enum
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self

from tinyllm.errors import RequestError, brief

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
MAX_N = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names, ranges and order of use are vLLM's.

    temperature 0 (the default) is greedy and ignores the truncations; a value between 0 and 0.01 is raised to 0.01.
    top_k 0 or -1 and top_p 1 and min_p 0 are off. seed None draws a fresh seed, which the result records.
    max_tokens None means: until max_model_len. stop is a text or several that end the answer, which is cut before the
    earliest of them, or behind it where include_stop_str_in_output is set. No end token, stop id or stop string
    counts within the first min_tokens tokens. n asks for several answers to one prompt; number i draws with seed + i.
    skip_reading_prefix_cache computes the whole prompt, whatever is cached. Raises RequestError, one line, for any value
    out of range.

    >>> SamplingParams(temperature=0.7, top_p=0.9).top_p
    0.9
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    tinyllm.errors.RequestError: top_p is 0; expected a number above 0 and up to 1 (1 switches it off)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    n: int = 1
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        _require(_is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE,
                 "temperature", self.temperature, f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}")  # fmt: skip
        _require(
            _is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "a whole number (0 or -1 switches it off)"
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1,
                 "top_p", self.top_p, "a number above 0 and up to 1 (1 switches it off)")  # fmt: skip
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 (off) to 1")
        _require(self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
                 "seed", self.seed, "a 64-bit whole number or None")  # fmt: skip
        _require(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
                 "max_tokens", self.max_tokens, "a whole number of at least 1, or None for as many as fit")  # fmt: skip
        ids = self.stop_token_ids
        _require(isinstance(ids, Sequence) and not isinstance(ids, str | bytes) and all(_is_int(i) and i >= 0 for i in ids),
                 "stop_token_ids", ids, "a list of token ids")  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(isinstance(stop, Sequence) and not isinstance(stop, bytes) and all(isinstance(s, str) and s for s in stop),
                 "stop", self.stop, "a text or a list of texts, none of them empty")  # fmt: skip
        _require(isinstance(self.include_stop_str_in_output, bool),
                 "include_stop_str_in_output", self.include_stop_str_in_output, "True or False")  # fmt: skip
        most = "" if self.max_tokens is None else f" up to max_tokens, which is {self.max_tokens}"
        _require(_is_int(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
                 "min_tokens", self.min_tokens, f"a whole number from 0{most}")  # fmt: skip
        _require(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"a whole number from 1 to {MAX_N}")
        _require(self.n == 1 or self.temperature > 0, "n", self.n, "1 at temperature 0, where all answers are the same")
        _require(isinstance(self.skip_reading_prefix_cache, bool),
                 "skip_reading_prefix_cache", self.skip_reading_prefix_cache, "True or False")  # fmt: skip
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "stop", tuple(stop))
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)

    def split(self) -> list[Self]:
        """Parameters of n answers, one each; number i draws with seed + i, round the 64 bits.

        >>> [params.seed for params in SamplingParams(temperature=1, seed=7, n=3).split()]
        [7, 8, 9]
        """
        if self.n == 1:
            return [self]
        seed = draw_seed() if self.seed is None else self.seed
        return [replace(self, n=1, seed=(seed + i + 2**63) % 2**64 - 2**63) for i in range(self.n)]

    @property
    def is_greedy(self) -> bool:
        """Whether every token is simply the one with the largest logit."""
        return self.temperature == 0


def draw_seed() -> int:
    """A fresh seed, from the system's randomness: short enough to type, and exact in any reader of JSON."""
    return secrets.randbits(32)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {brief(value)}; expected {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


class RequestStatus(enum.Enum):
    """Where a request stands; the last four are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    STOPPED = "stop"  # an end token, one of its stop_token_ids or a stop string
    LENGTH_CAPPED = "length"  # max_tokens or max_model_len
    FAILED = "error"  # its logits held nothing that could be sampled
    ABORTED = "abort"  # the caller gave it up

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be computed for the request."""
        return self not in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    token_ids grows by one sampled token a step; block_ids are the KV blocks it holds, in order of position, and
    block_hashes those of the blocks that its tokens have filled. A smaller priority goes first (under the policy
    "priority"), then the earlier arrival_time, then the smaller request_id. Requests with different cache_salt share
    nothing. Raises RequestError where a field cannot be.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    prompt: str | None = None  # the text that it came from
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    cache_salt: str | None = None
    num_computed_tokens: int = field(init=False, default=0)
    block_ids: list[int] = field(init=False, default_factory=list)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    num_cached_tokens: int | None = field(init=False, default=None)  # found in the cache when it first started
    token_ids: list[int] = field(init=False)
    seed: int = field(init=False)
    stop_token_id: int | None = field(init=False, default=None)  # the token that stopped it
    num_preemptions: int = field(init=False, default=0)  # and failed steps, after which it started over, too

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError(f"request {self.request_id}: the prompt is empty; expected at least one token")
        _require(isinstance(self.request_id, str), "request id", self.request_id, "a text")
        name = f"request {self.request_id}: "
        _require(isinstance(self.params, SamplingParams), name + "params", self.params, "SamplingParams")
        for token_id in self.prompt_token_ids:
            _require(isinstance(token_id, Integral) and not isinstance(token_id, bool) and token_id >= 0,
                     name + "prompt token id", token_id, "a whole number of at least 0")  # fmt: skip
        _require(_is_int(self.priority), name + "priority", self.priority, "a whole number (the smaller goes first)")
        _require(_is_number(self.arrival_time), name + "arrival_time", self.arrival_time, "a number of seconds")
        _require(self.cache_salt is None or isinstance(self.cache_salt, str),
                 name + "cache_salt", self.cache_salt, "a text or None")  # fmt: skip
        self.prompt_token_ids = tuple(map(int, self.prompt_token_ids))
        self.token_ids = list(self.prompt_token_ids)
        self.seed = draw_seed() if self.params.seed is None else self.params.seed

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token id that ends the request."""
        return (*(() if self.params.ignore_eos else self.eos_token_ids), *self.params.stop_token_ids)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Token ids that must not be sampled next: before min_tokens tokens none that would end the request."""
        return self.stop_ids if self.num_output_tokens < self.params.min_tokens else ()

    @property
    def urgency(self) -> tuple[int, float, str]:
        """What the policy "priority" orders by, the smallest first."""
        return self.priority, self.arrival_time, self.request_id

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Real tokens so far: prompt and sampled ones."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``error`` or ``abort``; None while it runs."""
        return self.status.value if self.status.is_finished else None
