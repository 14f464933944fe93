"""The whole loop: schedule, lay flat, run the model, sample, update."""

import contextlib
from dataclasses import dataclass

from torch import Tensor

from tinyllm.batch import FlatBatch, SamplingBatch, build_batch, build_sampling_batch
from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.errors import RequestError, brief
from tinyllm.kv_cache import KVCache
from tinyllm.model import Decoder
from tinyllm.request import Request
from tinyllm.sampler.sample import sample
from tinyllm.scheduler import Schedule, Scheduler
from tinyllm.shapes import checking


@dataclass(frozen=True)
class StepOutput:
    """What one step did: the decision, its tensors, and the token (or None) of each scheduled request."""

    schedule: Schedule
    batch: FlatBatch
    logits: Tensor  # a row for each scheduled request, a score for each token id
    sampled_token_ids: tuple[int | None, ...]
    finished: tuple[Request, ...]  # by this step's token; not those that a caller ends for their text


class Engine:
    """Runs requests to their end, many at a time, one step after the other.

    check_shapes False switches the shape checks off around the model and the sampler (for the fast backends).
    """

    def __init__(self, model: Decoder, cache: CacheConfig, scheduler: SchedulerConfig, check_shapes: bool = True):
        self.model = model
        self.cache_config = cache
        self.check_shapes = check_shapes
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.kv_cache = KVCache(model.config, cache, weight.dtype, weight.device)
        self.scheduler = Scheduler(scheduler, cache)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished_requests

    def add_request(self, request: Request) -> None:
        """Queue a request; it joins the next step that has room, whatever runs already.

        Stop strings are not looked for here, as an engine knows no text: LLM's generate, stream and run do that.
        RequestError where it could never run, was queued before, or has the id of one that still runs.
        """
        self.check_request(request)
        self.scheduler.add_request(request)

    def check_request(self, request: Request) -> None:
        """RequestError where a request could never run."""
        if not isinstance(request, Request):
            raise RequestError(f"{brief(request)} is no Request; LLM.make_requests makes them of prompts")
        vocab_size = self.model.config.vocab_size
        if unknown := [token_id for token_id in request.prompt_token_ids if token_id >= vocab_size]:
            raise RequestError(
                f"request {request.request_id}: prompt token id {unknown[0]} is outside the vocabulary of {vocab_size}"
            )
        self.scheduler.check_request(request)

    def abort(self, request_id: str) -> bool:
        """Give a request up and free its blocks; False where none of this id waits or runs."""
        return self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached keys and values; False, and nothing is done, while a request holds blocks."""
        return self.scheduler.reset_prefix_cache()

    def step(self) -> StepOutput:
        """Compute some tokens of some requests; each request whose tokens are all computed gets one more.

        Raises RequestError where no request waits or runs.

        Where it fails or is interrupted, nothing counts as computed: all requests start over and keep their tokens.
        """
        if not self.has_unfinished_requests:
            raise RequestError("no request waits or runs; expected add_request before step")
        try:
            schedule = self.scheduler.schedule()
            batch, logits, sampled = self._run(schedule)
            tokens = [None if token_id is None else [token_id] for token_id in sampled]
            finished = self.scheduler.update(schedule, tokens)
        except BaseException:
            self.scheduler.recover()
            raise
        return StepOutput(schedule, batch, logits, sampled, tuple(finished))

    def _run(self, schedule: Schedule) -> tuple[FlatBatch, Tensor, tuple[int | None, ...]]:
        """Batch, logits, and each request's token id (None where its row is not valid)."""
        batch = self.build_batch(schedule)
        sampling = self._build_sampling_batch(schedule)
        with contextlib.nullcontext() if self.check_shapes else checking(False):
            logits = self.model(batch, self.kv_cache)
            token_ids, is_valid = sample(logits, sampling)
        rows = zip(token_ids.tolist(), is_valid.tolist(), strict=True)
        return batch, logits, tuple(token_id if valid else None for token_id, valid in rows)

    def build_batch(self, schedule: Schedule) -> FlatBatch:
        """The tensors of a step, which follow from its schedule alone."""
        entries = schedule.scheduled
        return build_batch(
            [entry.token_ids for entry in entries],
            [entry.num_computed_tokens for entry in entries],
            [entry.block_ids for entry in entries],
            self.cache_config.block_size,
            self.device,
        )

    def _build_sampling_batch(self, schedule: Schedule) -> SamplingBatch:
        requests = [entry.request for entry in schedule.scheduled]
        return build_sampling_batch(
            [request.params for request in requests],
            [request.seed for request in requests],
            [entry.seq_len for entry in schedule.scheduled],  # the position of the token to be sampled
            self.model.config.vocab_size,
            self.device,
            [request.banned_ids for request in requests],
        )
