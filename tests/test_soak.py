"""Hundreds of requests through one engine whose pool is too small for them: right tokens, an empty pool, no leak."""

import gc
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.engine import Engine
from tinyllm.request import Request
from tinyllm.shapes import checking

pytestmark = pytest.mark.long

MAX_MODEL_LEN = 64
ROUND = 100  # after so many requests the engine is empty for a moment, and memory is measured


def make_request(index: int, rng: random.Random, vocab_size: int, longest: int, most_tokens: int) -> Request:
    """A prompt of any length, which half of the time begins as others do."""
    beginning = [7, 8, 9] * 16 if rng.random() < 0.5 else []
    prompt = [*beginning[: rng.randrange(longest)], *(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 8)))]
    temperature = rng.choice([0.0, 0.0, 0.8])
    params = SamplingParams(
        temperature=temperature, seed=index, max_tokens=rng.randint(1, most_tokens), ignore_eos=True
    )
    return Request(f"{index:0>500}", prompt[:longest], params)  # long: whoever keeps no more than ids shows as well


@dataclass
class Soak:
    """Requests that arrive while others run."""

    engine: Engine
    rng: random.Random
    num_preemptions: int = 0
    num_ended: int = 0

    def run(self, requests: Iterator[Request], most_at_once: int) -> Iterator[Request]:
        """Hand out each request when it ends; nobody but the caller keeps it."""
        num_missing = most_at_once
        while num_missing or self.engine.has_unfinished_requests:
            for _ in range(min(num_missing, self.rng.randint(0, 4))):
                if (request := next(requests, None)) is None:
                    num_missing = 0
                    break
                self.engine.add_request(request)
                num_missing -= 1
            if not self.engine.has_unfinished_requests:
                continue
            output = self.engine.step()
            assert 0 < output.schedule.num_tokens <= self.engine.scheduler.config.max_num_batched_tokens
            self.num_preemptions += len(output.schedule.preempted)
            for request in output.finished:
                self.num_ended += 1
                num_missing += 1
                yield request
        pool = self.engine.scheduler.pool
        assert pool.num_used_blocks == 0 and not any(pool.ref_counts)
        assert sorted(pool.free_queue) == list(range(1, pool.num_blocks))


def outputs_alone(engine: Engine, request: Request) -> list[int]:
    """The tokens that the same request gets with nobody beside it and nothing cached."""
    alone = Request("alone", request.prompt_token_ids, request.params)
    engine.add_request(alone)
    while engine.has_unfinished_requests:
        engine.step()
    return alone.output_token_ids


@contextmanager
def one_thread():
    """Threads only slow a tiny model down."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def live_bytes() -> tuple[int, int]:
    """(bytes of Python objects since tracemalloc was started, bytes of all tensors that can be reached)."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return tracemalloc.get_traced_memory()[0], sum(storages.values())


def test_five_hundred_requests_on_a_tiny_model_leave_nothing_behind(tiny_model, make_engine):
    engine = make_engine(
        tiny_model(attention="sdpa"), 4, 48, MAX_MODEL_LEN, max_num_seqs=12, num_blocks=25, check_shapes=False
    )
    alone = make_engine(tiny_model(), 16, 64, MAX_MODEL_LEN, check_shapes=False, enable_prefix_caching=False)
    rng, sizes = random.Random(3), []
    soak = Soak(engine, rng)
    with one_thread(), checking(False):
        tracemalloc.start()
        try:
            for first in range(0, 500, ROUND):
                requests = (make_request(first + i, rng, 256, 48, 14) for i in range(ROUND))
                for request in soak.run(requests, most_at_once=16):
                    assert request.finish_reason == "length"
                    assert request.output_token_ids == outputs_alone(alone, request), request.request_id
                del requests, request
                sizes.append(live_bytes())
        finally:
            tracemalloc.stop()
    assert soak.num_ended == 500 and soak.num_preemptions > 50
    assert engine.scheduler.prefix_cache_stats.num_hit_tokens > 0
    python_growth, tensor_growth = (last - first for first, last in zip(sizes[0], sizes[-1], strict=True))
    assert python_growth < 60_000, f"Python objects: {sizes}"
    assert tensor_growth < 60_000, f"tensors: {sizes}"


def test_sixty_requests_on_the_default_model(smollm2_sdpa, make_engine):
    decoder = smollm2_sdpa.decoder
    engine = make_engine(decoder, 4, 64, max_model_len=32, max_num_seqs=8, num_blocks=13, check_shapes=False)
    alone = make_engine(decoder, 16, 64, max_model_len=32, check_shapes=False, enable_prefix_caching=False)
    rng = random.Random(5)
    soak = Soak(engine, rng)
    requests = (make_request(i, rng, decoder.config.vocab_size, 24, 6) for i in range(60))
    with checking(False):
        for request in soak.run(requests, most_at_once=10):
            assert request.output_token_ids == outputs_alone(alone, request), request.request_id
    assert soak.num_ended == 60 and soak.num_preemptions > 5
