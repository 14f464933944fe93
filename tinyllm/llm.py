"""Text in, text out."""

import contextlib
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    finish_reason: str  # "stop", "length" or "error"
    seed: int  # given or drawn: it reproduces a sampled answer


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer. `text` may be empty, where a character or a stop string could still come of it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None but in the last piece


class LLM:
    """A loaded model with an engine around it.

    model None is the default model (SmolLM2-135M-Instruct), a path another GGUF file or Hugging Face folder; a
    LoadedModel is used as it is.
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
        self._answers: dict[Request, _Answer] = {}  # of the requests under way
        self._lock = threading.RLock()  # one step at a time; re-entrant, as the collector may close a stream in a step

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or several; they run together and come back in the order given.

        Threads and open streams share the engine: each of them makes steps for all. params is one SamplingParams for
        all prompts, or one for each. Control tokens written in a prompt's text stay text unless parse_special is set.
        Raises RequestError or TokenizerError before anything runs.
        """
        requests = self.make_requests(prompts, params, parse_special)
        for _ in self.run(requests):
            pass
        return [self.completion(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, parse_special: bool = False
    ) -> Generator[Piece, None, None]:
        """Complete one prompt piece by piece; the pieces joined are what `generate` gives.

        No piece holds a part of a character, or text that a stop string takes back later. Closing the generator gives
        the request up. Raises RequestError or TokenizerError here, before anything runs.
        """
        (request,) = self.make_requests([_as_one_prompt(prompt)], params, parse_special)
        self.engine.scheduler.check_request(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[Piece, None, None]:
        answer = self._answers[request] = _Answer(self.tokenizer, request)
        with contextlib.closing(self.run([request])) as steps:
            for _ in steps:
                with self._lock:
                    piece = answer.take()
                if piece.token_ids or piece.finish_reason:  # not while the prompt is computed
                    yield piece
        if not answer.is_taken:  # the last step was made by another thread or stream
            yield answer.take()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answer a conversation: dicts with role and content, the last one usually the user's.

        `variables` go to the model's chat template. For an answer piece by piece: ``stream(encode_chat(messages))``.
        Raises what `encode_chat` and `generate` raise.
        """
        return self.generate([self.encode_chat(messages, **variables)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt of a conversation; control tokens written in a message stay text.

        Raises RequestError for what is no conversation, one that the template refuses, and a model without template;
        ModelFileError for a template that is broken or hostile.
        """
        loaded = self.loaded
        if loaded.chat_template is None:
            raise RequestError("this model has no chat template; use generate, or a model that was tuned for chat")
        template = ChatTemplate(loaded.chat_template, self.tokenizer, **loaded.template_tokens)
        return template.encode(messages, **variables)

    def run(self, requests: Sequence[Request]) -> Generator[StepOutput, None, None]:
        """Run requests to their end, and hand out each step; whoever stops listening gives the requests up.

        Raises RequestError before anything runs.
        """
        for request in requests:
            self.engine.scheduler.check_request(request)
        try:
            with self._lock:
                for request in requests:
                    self.engine.add_request(request)
                    self._answers.setdefault(request, _Answer(self.tokenizer, request))
            while output := self._step(requests):
                yield output
        finally:
            with self._lock:
                for request in requests:
                    self.engine.scheduler.abort(request)
                    self._answers.pop(request, None)

    def _step(self, requests: Sequence[Request]) -> StepOutput | None:
        """One step for all that is under way, unless `requests` have ended; ends those whose text holds a stop string."""
        with self._lock:
            if all(request.status.is_finished for request in requests):
                return None
            output = self.engine.step()
            for entry in output.schedule.scheduled:
                answer = self._answers.get(entry.request)
                if answer is not None and answer.read():
                    self.engine.scheduler.abort(entry.request, RequestStatus.STOPPED)
            return output

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        parse_special: bool = False,
    ) -> list[Request]:
        """Encode the prompts and pair each with its parameters; nothing is queued yet.

        Where the model's file says that prompts begin with a begin token, a text gets one, and so has two where it
        starts with one itself and parse_special is set. Token ids are taken as they are.
        """
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
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(_known_ids(token_ids, self.tokenizer))


class _Answer:
    """The text of one request as its tokens come in: a function of the tokens alone, however they are read."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        params = request.params
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

    def read(self) -> bool:
        """Take the new tokens in; whether the text holds a stop string."""
        start = self._request.num_prompt_tokens + self._num_read
        for token_id in self._request.token_ids[start:]:
            self._num_read += 1
            if self._is_hidden(token_id):
                continue
            piece = self._detokenizer.push(_known_ids([token_id], self._tokenizer))
            self._pieces.append(self._finder.push(piece))
        return self._finder.matched is not None

    def _is_hidden(self, token_id: int) -> bool:
        """The token that stopped the request is no part of its text, as a stop string is none."""
        request = self._request
        is_last = self._num_read == request.num_tokens - request.num_prompt_tokens
        return is_last and token_id == request.stop_token_id and not request.params.include_stop_str_in_output

    def text(self) -> str:
        """The text since the last call, to its very end."""
        self._pieces += self._finder.push(self._detokenizer.flush()), self._finder.flush()
        return self._take_text()

    def take(self) -> Piece:
        """What has come since the last call."""
        self.read()
        self.is_taken = self.finish_reason is not None
        text = self.text() if self.is_taken else self._take_text()
        start, self._num_taken = self._request.num_prompt_tokens + self._num_taken, self._num_read
        return Piece(text, tuple(self._request.token_ids[start:]), self.finish_reason)

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
        num_blocks = 1 + -(-max(max_model_len, DEFAULT_POOL_TOKENS) // block_size)
    return replace(cache, num_blocks=num_blocks)


def _as_one_prompt(prompt: Any) -> Prompt:
    """The prompt itself; a list of several is a RequestError."""
    is_text_or_ids = isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Integral) for item in prompt)
    )
    if not is_text_or_ids or isinstance(prompt, BYTES):
        raise RequestError(f"{brief(prompt)} is not one prompt; expected a text or a list of token ids")
    return prompt


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
