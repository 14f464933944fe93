"""Complete two prompts on the default model: copy this file and change it."""

from tinyllm import LLM, SamplingParams

llm = LLM()  # SmolLM2-135M-Instruct; LLM("path/to/model.gguf") takes another file
prompts = ["The capital of France is", "Once upon a time"]
params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24)

for answer in llm.generate(prompts, params):
    print(f"{answer.prompt!r} -> {answer.text!r} ({answer.finish_reason}, seed {answer.seed})")
