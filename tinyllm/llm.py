"""Text in, text out."""

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.engine import Engine, StepOutput
from tinyllm.errors import ConfigError, ModelFileError, RequestError, brief
from tinyllm.layers.attention.backends import FAST_BACKENDS
from tinyllm.request import Request, RequestStatus, SamplingParams
from tinyllm.tokenizer.bpe import Tokenizer
from tinyllm.tokenizer.chat import ChatTemplate
from tinyllm.tokenizer.detokenize import Detokenizer, StopFinder
from tinyllm.weights.load import LoadedModel, load_model

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_POOL_TOKENS = 8192
DEFAULT_MAX_NUM_SEQS = 128

Prompt = str | Sequence[int]  # text, or token ids
BYTES = (bytes, bytearray, memoryview)  # sequences of ints that nobody means as token ids


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. `token_ids` holds every token; `text` leaves out the special ones and the one that stopped it."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length", "abort" or "error"
    seed: int  # given or drawn: it reproduces a sampled answer
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer. `text` may be empty, where a character or a stop string could still come of it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None but in the last piece
    index: int = 0  # which of the answers, in the order of `generate`'s list


class LLM:
    """A loaded model with an engine around it.

    model None is the default model (SmolLM2-135M-Instruct), a path another GGUF file or Hugging Face folder; a
    LoadedModel is used as it is.
    attention is ``reference`` (six readable steps) or ``sdpa``; check_shapes None checks all but the fast backends. The
    other settings are those of CacheConfig and SchedulerConfig; what is None follows from the model.
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
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        policy: str = "fcfs",
    ):
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, attention=attention)
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        if check_shapes is None:
            check_shapes = loaded.attention not in FAST_BACKENDS
        limits = replace(
            _limits(loaded.config.max_positions, max_model_len, max_num_batched_tokens, max_num_seqs),
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=policy,
        )
        cache = _pool(limits.max_model_len, block_size, num_blocks)
        cache = replace(cache, enable_prefix_caching=enable_prefix_caching)
        self.engine = Engine(loaded.decoder, cache, limits, check_shapes)
        self._request_ids = map(str, itertools.count())
        self._answers: dict[Request, _Answer] = {}  # of the requests under way
        self._given_up: list[Request] = []  # to be aborted once the step under way is over
        self._is_in_step = False
        self._lock = threading.RLock()  # one step at a time; re-entrant, as the collector may close a stream in a step

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several; they run together and come back in the order given, n answers for each.

        Threads and open streams share the engine: each of them makes steps for all. params is one SamplingParams for
        all prompts, or one for each, and so is priority (the smaller goes first, under the policy "priority"). Prompts
        share cached blocks only with those of the same cache_salt. Control tokens written in a prompt's text stay text
        unless parse_special is set. Raises RequestError or TokenizerError before anything runs.
        """
        requests = self.make_requests(prompts, params, parse_special, priority, cache_salt)
        for _ in self.run(requests):
            pass
        return [self.completion(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> Generator[Piece, None, None]:
        """Complete one prompt, or several at once, piece by piece; takes what `generate` takes.

        A piece's index says to which answer of `generate`'s list it belongs; the pieces of one index joined are that
        answer. No piece holds a part of a character, or text that a stop string takes back later. Closing the generator
        gives the requests up. Raises RequestError or TokenizerError here, before anything runs.
        """
        requests = self.make_requests(prompts, params, parse_special, priority, cache_salt)
        for request in requests:
            self.engine.check_request(request)
        return self._stream(requests)

    def _stream(self, requests: Sequence[Request]) -> Generator[Piece, None, None]:
        answers = [_Answer(self.tokenizer, request, index) for index, request in enumerate(requests)]
        self._answers |= dict(zip(requests, answers, strict=True))
        with contextlib.closing(self.run(requests)) as steps:
            for _ in steps:
                with self._lock:
                    pieces = [answer.take() for answer in answers if answer.has_news]
                answers = [answer for answer in answers if not answer.is_taken]
                for piece in pieces:
                    if piece.token_ids or piece.finish_reason:  # not while the prompt is computed
                        yield piece
        for answer in answers:  # whose last step was made by another thread or stream
            yield answer.take()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answer a conversation: dicts with role and content, the last one usually the user's.

        `variables` go to the model's chat template. For an answer piece by piece: ``stream(encode_chat(messages))``; for
        n answers: ``generate([encode_chat(messages)], params)``. Raises what `encode_chat` and `generate` raise.
        """
        if params is not None and params.n > 1:
            raise RequestError(
                f"n is {params.n}; chat gives one answer: call generate([llm.encode_chat(messages)], params)"
            )
        return self.generate([self.encode_chat(messages, **variables)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt of a conversation; control tokens written in a message stay text.

        Raises RequestError for what is no conversation, one that the template refuses, and a model without template;
        ModelFileError for a template that is broken or hostile.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template; use generate, or a model that was tuned for chat")
        return self._chat_template.encode(messages, **variables)

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        loaded = self.loaded
        source = loaded.chat_template
        return None if source is None else ChatTemplate(source, self.tokenizer, **loaded.template_tokens)

    def run(self, requests: Sequence[Request]) -> Generator[StepOutput, None, None]:
        """Run requests to their end, and hand out each step; whoever stops listening gives the requests up.

        Raises RequestError before anything runs.
        """
        for request in requests:
            self.engine.check_request(request)
        added: list[Request] = []
        try:
            with self._lock:
                for request in requests:
                    self.engine.add_request(request)
                    added.append(request)
                    self._answers.setdefault(request, _Answer(self.tokenizer, request))
            while output := self._step(added):
                yield output
        finally:
            self._give_up(added)

    def _step(self, requests: Sequence[Request]) -> StepOutput | None:
        """One step for all that is under way, unless `requests` have ended; ends those whose text holds a stop string."""
        with self._lock:
            if all(request.status.is_finished for request in requests):
                return None
            self._is_in_step = True
            try:
                output = self.engine.step()
            finally:
                self._is_in_step = False
                self._give_up([])
            for entry in output.schedule.scheduled:
                answer = self._answers.get(entry.request)
                if answer is not None and answer.read():
                    self.engine.scheduler.abort(entry.request, RequestStatus.STOPPED)
            return output

    def _give_up(self, requests: Sequence[Request]) -> None:
        """Abort what has not ended. In the middle of a step, where the collector may close a stream, only note it."""
        with self._lock:
            self._given_up += reversed(requests)  # the first one is popped first: it stands in front of the queue
            while self._given_up and not self._is_in_step:
                request = self._given_up.pop()
                self.engine.scheduler.abort(request)
                self._answers.pop(request, None)

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Encode the prompts and pair each with its parameters; nothing is queued yet. n answers are n requests.

        Where the model's file says that prompts begin with a begin token, a text gets one, and so has two where it
        starts with one itself and parse_special is set. Token ids are taken as they are.
        """
        prompt_list = _as_prompt_list(prompts)
        params_list = _one_for_each(
            SamplingParams() if params is None else params, prompt_list, "params", SamplingParams
        )
        priorities = _one_for_each(priority, prompt_list, "priority", int)
        encoded = [self._encode(prompt, parse_special) for prompt in prompt_list]
        return [
            Request(next(self._request_ids), token_ids, answer_params, self.loaded.config.eos_token_ids, text,
                    priority=prompt_priority, cache_salt=cache_salt)
            for (text, token_ids), prompt_params, prompt_priority in zip(encoded, params_list, priorities, strict=True)
            for answer_params in prompt_params.split()
        ]  # fmt: skip

    def _encode(self, prompt: Prompt, parse_special: bool) -> tuple[str | None, list[int]]:
        """(the prompt's text where it is one, its token ids)."""
        if isinstance(prompt, str):
            return prompt, self.loaded.encode_prompt(prompt, parse_special)
        return None, _as_token_ids(prompt, self.loaded.config.vocab_size)

    def completion(self, request: Request) -> Completion:
        """What a finished request gave."""
        prompt_ids = request.prompt_token_ids
        answer = _Answer(self.tokenizer, request)
        answer.read()
        return Completion(
            prompt=self._decode(prompt_ids) if request.prompt is None else request.prompt,
            prompt_token_ids=tuple(prompt_ids),
            text=answer.text(),
            token_ids=tuple(request.output_token_ids),
            finish_reason=answer.finish_reason or "",
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(_known_ids(token_ids, self.tokenizer))


class _Answer:
    """The text of one request as its tokens come in: a function of the tokens alone, however they are read."""

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int = 0):
        params = request.params
        self._index = index
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids=_known_ids(request.prompt_token_ids, tokenizer))
        self._finder = StopFinder(params.stop, params.include_stop_str_in_output)
        self._num_read = 0
        self._pieces: list[str] = []  # not yet taken
        self._num_taken = 0
        self.is_taken = False  # to the end

    @property
    def finish_reason(self) -> str | None:
        """A stop string goes before the request's own reason: the token that completed it may be the last one, too."""
        return self._request.finish_reason if self._finder.matched is None else RequestStatus.STOPPED.value

    @property
    def has_news(self) -> bool:
        """Whether `take` would give anything."""
        return self._request.num_output_tokens > self._num_taken or self.finish_reason is not None

    def read(self) -> bool:
        """Take the new tokens in; whether the text holds a stop string."""
        start = self._request.num_prompt_tokens + self._num_read
        for token_id in self._request.token_ids[start:]:
            self._num_read += 1
            if self._is_hidden(token_id):
                continue
            piece = self._detokenizer.push(_known_ids([token_id], self._tokenizer))
            self._pieces.append(self._finder.push(piece, self._may_stop))
        return self._finder.matched is not None

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string may end in the token read last."""
        return self._num_read > self._request.params.min_tokens

    def _is_hidden(self, token_id: int) -> bool:
        """The token that stopped the request is no part of its text, as a stop string is none."""
        request = self._request
        is_last = self._num_read == request.num_tokens - request.num_prompt_tokens
        return is_last and token_id == request.stop_token_id and not request.params.include_stop_str_in_output

    def text(self) -> str:
        """The text since the last call, to its very end."""
        self._pieces += self._finder.push(self._detokenizer.flush(), self._may_stop), self._finder.flush()
        return self._take_text()

    def take(self) -> Piece:
        """What has come since the last call."""
        self.read()
        self.is_taken = self.finish_reason is not None
        text = self.text() if self.is_taken else self._take_text()
        start, self._num_taken = self._request.num_prompt_tokens + self._num_taken, self._num_read
        return Piece(text, tuple(self._request.token_ids[start:]), self.finish_reason, self._index)

    def _take_text(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


def how_far(requests: Sequence[Request]) -> str:
    """What has been computed of these requests, in a few words.

    >>> how_far([Request("0", [5, 6, 7], SamplingParams())])
    'computed 0 of 3 prompt tokens, sampled 0 tokens'
    """
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    num_computed = sum(min(request.num_computed_tokens, request.num_prompt_tokens) for request in requests)
    num_sampled = sum(request.num_tokens - request.num_prompt_tokens for request in requests)
    return f"computed {num_computed:,} of {num_prompt_tokens:,} prompt tokens, sampled {num_sampled:,} tokens"


def check_finish_reasons(reasons: Iterable[str | None]) -> None:
    """ModelFileError where a request ended because its logits held nothing that could be sampled."""
    if "error" in reasons:
        raise ModelFileError("no token could be sampled: the model's logits are not finite; its weights may be damaged")


def _known_ids(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Those that have text; rows that only pad the embedding table have none."""
    return [token_id for token_id in token_ids if token_id < tokenizer.vocab_size]


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
        num_blocks = 1 + cache.count_blocks(max(max_model_len, DEFAULT_POOL_TOKENS))
    return replace(cache, num_blocks=num_blocks)


def _one_for_each(value: Any, prompts: Sequence[Any], name: str, kind: type) -> list[Any]:
    """A list with one value for each prompt, of one for all or of such a list; RequestError for anything else."""
    if isinstance(value, kind):
        return [value] * len(prompts)
    if not isinstance(value, Sequence) or isinstance(value, BYTES) or not all(isinstance(v, kind) for v in value):
        raise RequestError(f"{name} is {brief(value)}; expected {kind.__name__}, or a list with one for each prompt")
    if len(value) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts came with {len(value)} {name}; expected one for each")
    return list(value)


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
