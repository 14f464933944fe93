"""Text to token ids and back: plain Python, no torch.

Reading order: pretokenize.py (text -> words), byte_alphabet.py (how files spell bytes), bpe.py (words -> ids -> text),
train.py (text -> merges), gguf_vocab.py and tokenizer_json.py (the vocabularies of model files), vocab_file.py (our own),
detokenize.py (ids -> text as they come), chat.py and render.py (messages -> ids).
"""

from tinyllm.tokenizer.bpe import EncodedWord, EncodingRules, Tokenizer
from tinyllm.tokenizer.chat import ChatTemplate
from tinyllm.tokenizer.detokenize import Detokenizer, StopFinder
from tinyllm.tokenizer.gguf_vocab import tokenizer_from_gguf
from tinyllm.tokenizer.pretokenize import split_words
from tinyllm.tokenizer.tokenizer_json import tokenizer_from_json
from tinyllm.tokenizer.train import Merge, iter_merges, tokenizer_from_merges, train
from tinyllm.tokenizer.vocab_file import load_tokenizer, save_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "EncodedWord",
    "EncodingRules",
    "Merge",
    "StopFinder",
    "Tokenizer",
    "iter_merges",
    "load_tokenizer",
    "save_tokenizer",
    "split_words",
    "tokenizer_from_gguf",
    "tokenizer_from_json",
    "tokenizer_from_merges",
    "train",
]
