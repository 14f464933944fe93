"""Text to token ids and back: plain Python, no torch.

Reading order: pretokenize.py (text -> words), byte_alphabet.py (how files spell bytes), bpe.py (words -> ids -> text),
gguf_vocab.py (the vocabulary of a model file).
"""

from tinyllm.tokenizer.bpe import EncodedWord, Tokenizer
from tinyllm.tokenizer.gguf_vocab import tokenizer_from_gguf
from tinyllm.tokenizer.pretokenize import split_words

__all__ = ["EncodedWord", "Tokenizer", "split_words", "tokenizer_from_gguf"]
