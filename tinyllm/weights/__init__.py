"""Model files to named parameters: headers read strictly, blocks dequantised, every shape checked.

Reading order: gguf.py, dequantize.py and gguf_config.py (the single-file format), safetensors.py and hf_folder.py (Hugging
Face's folders), names.py (which tensors become which parameter), load.py (all of it), default.py and hub.py (where a model
may come from).
"""
