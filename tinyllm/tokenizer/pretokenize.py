r"""Pre-tokenization: cut a text into words before any merging.

Merges never cross the border of a word. That keeps a token from holding the end of one word and the start of the next,
and it lets equal words share their ids. How a text is cut belongs to the vocabulary: the merges were learnt on words cut
in that way, so another cut gives ids that the model has hardly ever seen.

A pre-tokenizer is a list of patterns, applied one after the other: each cuts every piece of the one before. A pattern
sees one piece only, so its lookahead ends there. This is subtle and shows before digits: in "a  5" GPT-2's pattern alone
leaves one blank for the 5, whereas with the digit cut away first both blanks stay together.
"""

import regex

from tinyllm.errors import TokenizerError, brief

# No pattern may hold a capturing group (see `_compile`).
# \p{L} is any letter, \p{N} any number sign: also ², ½ and Ⅷ. Combining marks are neither, so they end a word.
DIGIT = r"\p{N}"
GPT2_WORD = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)",  # English endings: 's 't 're ...
        r" ?\p{L}+",  # letters, with the one blank before them
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",  # punctuation and the rest
        r"\s+(?!\S)",  # white space, but it leaves its last character to the word that follows
        r"\s+",
    )
)
LLAMA_BPE_WORD = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # the endings in capitals too
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with any one sign before them: a blank, a tab, a bracket
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation takes the line ends after it along
        r"\s*[\r\n]+",  # blank lines and their indentation are one word
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_WORD = LLAMA_BPE_WORD.replace(r"\p{N}{1,3}", r"\p{N}")  # the same, each number sign alone
# Letters that know no case, and marks, are in both of these.
CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O_WORD = "|".join(
    (
        # A word starts where a capital follows a small letter, marks continue it, and an ending belongs to it.
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}*{SMALL}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}+{SMALL}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The names are those of GGUF files (gpt-2 is what they call gpt2), but for `whole-text`, which cuts nothing.
PATTERNS: dict[str, tuple[str, ...]] = {
    "smollm": (DIGIT, GPT2_WORD),
    "gpt2": (GPT2_WORD,),
    "gpt-2": (GPT2_WORD,),
    "llama-bpe": (LLAMA_BPE_WORD,),
    "qwen2": (QWEN2_WORD,),
    "gpt-4o": (GPT4O_WORD,),
    "whole-text": (),
}


def _compile(pattern: str) -> regex.Pattern[str]:
    return regex.compile(f"({pattern})")  # the group makes `split` return the matches between the gaps


_COMPILED = {name: tuple(_compile(pattern) for pattern in patterns) for name, patterns in PATTERNS.items()}


def check_pre_tokenizer(name: str) -> None:
    """Raise TokenizerError, with the list of supported names, where `name` is none of them."""
    if not isinstance(name, str) or name not in _COMPILED:
        raise TokenizerError(f"pre-tokenizer {brief(name)} is not supported; expected {', '.join(_COMPILED)}")


def split_words(text: str, pre_tokenizer: str) -> list[str]:
    r"""Cut `text` into words; joined, they are the text again. No word is empty.

    Raises TokenizerError for an unknown `pre_tokenizer`.

    >>> split_words("It's  on 24 pages.\n", "smollm")
    ['It', "'s", ' ', ' on', ' ', '2', '4', ' pages', '.', '\n']
    >>> split_words("a  5", "smollm")
    ['a', '  ', '5']
    >>> split_words("a  2024\n\n", "gpt2"), split_words("a  2024\n\n", "llama-bpe")
    (['a', ' ', ' 2024', '\n\n'], ['a', ' ', ' ', '202', '4', '\n\n'])
    """
    check_pre_tokenizer(pre_tokenizer)
    words = [text] if text else []
    for pattern in _COMPILED[pre_tokenizer]:
        words = [part for word in words for part in pattern.split(word) if part]
    return words
