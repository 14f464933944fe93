"""What no source says by itself: reasons, pitfalls and the names that others use, for ``--explain``.

No shape stands here. Those in an explanation come from annotations, formulas and the run. vLLM's names are those of its
V1 engine and its Llama model, Hugging Face's those of transformers: its Llama model, generate and continuous batching.
"""
