"""Steps of the default model that hold a decoding request, a whole prompt and a chunk of one: no row feels the others."""

import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.request import Request
from tinyllm.shapes import checking

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
DECODING = [504, 3575, 282, 4649, 314]
WHOLE = [1604, 803, 24, 81, 28, 278, 727, 472]
CHUNKED = [49, 33059, 40061, 3365, 2828, 81, 4161, 335, *DECODING, *WHOLE[:5]]


@pytest.mark.parametrize(("body", "block_size"), [("reference", 4), ("sdpa", 16)])
def test_prefill_chunk_and_decode_in_one_step_equal_single_runs(
    body, block_size, smollm2, smollm2_sdpa, make_engine, run_engine, make_requests
):
    decoder = {"reference": smollm2, "sdpa": smollm2_sdpa}[body].decoder
    engine = make_engine(decoder, block_size, budget=14, max_model_len=64, check_shapes=body == "reference")
    requests = make_requests([DECODING, WHOLE, CHUNKED], PARAMS)
    rows: dict[Request, list[torch.Tensor]] = {request: [] for request in requests}

    def step() -> dict[str, int]:
        output = engine.step()
        for entry, row in zip(output.schedule.scheduled, output.logits, strict=True):
            if entry.samples:
                rows[entry.request].append(row)
        return {entry.request.request_id: entry.query_len for entry in output.schedule.scheduled}

    engine.add_request(requests[0])
    assert step() == {"0": 5}
    for request in requests[1:]:
        engine.add_request(request)
    assert step() == {"0": 1, "1": 8, "2": 5}, "a decode, a whole prefill and the first chunk of one"
    assert step() == {"0": 1, "1": 1, "2": 12}, "two decodes and a chunk behind cached tokens"
    assert step() == {"0": 1, "1": 1, "2": 1}, "its last chunk is a single token"
    while engine.has_unfinished_requests:
        step()
    with checking(False):
        for request in requests:
            (alone,) = run_engine(
                make_engine(decoder, max_model_len=64, check_shapes=False),
                make_requests([request.prompt_token_ids], PARAMS),
            )
            assert request.output_token_ids == alone.token_ids
            torch.testing.assert_close(torch.stack(rows[request]), alone.logits, atol=2e-4, rtol=0)
