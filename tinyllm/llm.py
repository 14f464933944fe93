"""Text in, text out."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.engine import Engine, StepOutput
from tinyllm.errors import ConfigError, RequestError, brief
from tinyllm.layers.attention.backends import FAST_BACKENDS
from tinyllm.request import Request, SamplingParams
from tinyllm.weights.load import LoadedModel, load_model

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_POOL_TOKENS = 8192
DEFAULT_MAX_NUM_SEQS = 128

Prompt = str | Sequence[int]  # text, or token ids
BYTES = (bytes, bytearray, memoryview)  # sequences of ints that nobody means as token ids


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. `text` leaves special tokens out; `token_ids` holds all of them, the end token too."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "error"
    seed: int  # given or drawn: it reproduces a sampled answer


class LLM:
    """A loaded model with an engine around it.

    model None is the default model (SmolLM2-135M-Instruct), a path another GGUF file; a LoadedModel is used as it is.
    attention is ``reference`` (six readable steps) or ``sdpa``; check_shapes None checks all but the fast backends.
    Raises ModelFileError, ConfigError or TokenizerError, one line each, where the model or a setting cannot work.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        dtype: str = "float32",
        attention: str = "reference",
        check_shapes: bool | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int | None = None,
    ):
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, attention=attention)
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        if check_shapes is None:
            check_shapes = loaded.attention not in FAST_BACKENDS
        limits = _limits(loaded.config.max_positions, max_model_len, max_num_batched_tokens, max_num_seqs)
        cache = _pool(limits.max_model_len, block_size, num_blocks)
        self.engine = Engine(loaded.decoder, cache, limits, check_shapes)
        self._num_requests = 0
        self._lock = threading.Lock()  # an engine makes one step at a time

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or several; they run together and come back in the order given. Threads take turns.

        params is one SamplingParams for all prompts, or one for each. Control tokens written in a prompt's text stay
        text unless parse_special is set. Raises RequestError or TokenizerError before anything runs.
        """
        requests = self.make_requests(prompts, params, parse_special)
        with self._lock:
            for _ in self.run(requests):
                pass
        return [self.completion(request) for request in requests]

    def run(self, requests: Sequence[Request]) -> Iterator[StepOutput]:
        """Run requests to their end, and hand out each step; whoever stops listening gives the requests up.

        Raises RequestError before anything runs.
        """
        for request in requests:
            self.engine.scheduler.check_request(request)
        try:
            for request in requests:
                self.engine.add_request(request)
            while not all(request.status.is_finished for request in requests):
                yield self.engine.step()
        finally:
            for request in requests:
                self.engine.scheduler.abort(request)

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
    ) -> list[Request]:
        """Encode the prompts and pair each with its parameters; nothing is queued yet."""
        prompt_list = _as_prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params_list = [params or SamplingParams()] * len(prompt_list)
        elif isinstance(params, Sequence) and all(isinstance(item, SamplingParams) for item in params):
            params_list = list(params)
        else:
            raise RequestError(
                f"params is a {type(params).__name__}; expected SamplingParams, or a list with one for each prompt"
            )
        if len(params_list) != len(prompt_list):
            raise RequestError(
                f"{len(prompt_list)} prompts came with {len(params_list)} sampling parameters; give one for each"
            )
        return [
            self._make_request(prompt, prompt_params, parse_special)
            for prompt, prompt_params in zip(prompt_list, params_list, strict=True)
        ]

    def _make_request(self, prompt: Prompt, params: SamplingParams, parse_special: bool) -> Request:
        if isinstance(prompt, str):
            text, token_ids = prompt, self.loaded.encode_prompt(prompt, parse_special)
        else:
            text, token_ids = None, _as_token_ids(prompt, self.loaded.config.vocab_size)
        request = Request(str(self._num_requests), token_ids, params, self.loaded.config.eos_token_ids, text)
        self._num_requests += 1
        return request

    def completion(self, request: Request) -> Completion:
        """What a finished request gave."""
        prompt_ids, output_ids = request.prompt_token_ids, request.output_token_ids
        return Completion(
            prompt=self._decode(prompt_ids) if request.prompt is None else request.prompt,
            prompt_token_ids=tuple(prompt_ids),
            text=self._decode(output_ids, skip_special=True),
            token_ids=tuple(output_ids),
            finish_reason=request.finish_reason or "",
            seed=request.seed,
        )

    def _decode(self, token_ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of the ids; rows that only pad the embedding table have none."""
        known = (token_id for token_id in token_ids if token_id < self.tokenizer.vocab_size)
        return self.tokenizer.decode(known, skip_special=skip_special)


def _limits(
    max_positions: int, max_model_len: int | None, max_num_batched_tokens: int, max_num_seqs: int | None
) -> SchedulerConfig:
    """The limits of a step; what is None follows from the model and from the token budget."""
    if max_model_len is None:
        max_model_len = min(max_positions, DEFAULT_MAX_MODEL_LEN)
    limits = SchedulerConfig(max_model_len, max_num_batched_tokens, max_num_seqs=1)
    if max_model_len > max_positions:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model was made for at most {max_positions} positions"
        )
    if max_num_seqs is None:
        max_num_seqs = min(DEFAULT_MAX_NUM_SEQS, max_num_batched_tokens)
    return replace(limits, max_num_seqs=max_num_seqs)


def _pool(max_model_len: int, block_size: int, num_blocks: int | None) -> CacheConfig:
    """The KV pool; num_blocks None makes it hold max_model_len tokens, and never less than DEFAULT_POOL_TOKENS."""
    cache = CacheConfig(block_size)
    if num_blocks is None:
        num_blocks = 1 + -(-max(max_model_len, DEFAULT_POOL_TOKENS) // block_size)
    return replace(cache, num_blocks=num_blocks)


def _as_prompt_list(prompts: Any) -> list[Any]:
    """One text or one list of ids is a single prompt; any other list is a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise RequestError(
            f"a {type(prompts).__name__} is no prompt; expected a text, a list of token ids, or a list of those"
        )
    return [prompts] if prompts and all(isinstance(item, Integral) for item in prompts) else list(prompts)


def _as_token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Plain ints of the vocabulary; numpy's whole numbers are welcome, anything else is a RequestError."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
        raise RequestError(f"a {type(prompt).__name__} is no prompt; expected a text or a list of token ids")
    for token_id in prompt:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise RequestError(
                f"prompt token id {brief(token_id)} is a {type(token_id).__name__}; expected a whole number"
            )
        if int(token_id) not in range(vocab_size):
            raise RequestError(f"prompt token id {brief(token_id)} is outside the vocabulary of {vocab_size}")
    return [int(token_id) for token_id in prompt]
