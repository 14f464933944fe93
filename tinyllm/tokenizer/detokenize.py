r"""Token ids to text while they come in, and the stop strings that end such a text.

A token is a piece of bytes and may end inside a character, so it cannot be decoded on its own: the at most three
bytes that could still become a character wait for the next token. In the same way text that could be the start of a stop
string waits until it is known whether it is one.

Source: the Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts", which Python's codec follows; stop
strings as in vLLM's output processor.
"""

import codecs
from collections.abc import Iterable, Sequence

from tinyllm.tokenizer.bpe import Tokenizer


class Detokenizer:
    r"""Turns ids into text piece by piece; all pieces and the flush joined are `Tokenizer.decode` of all ids.

    `prompt_token_ids` stand before the text: where they end inside a character, the first ids may complete it.
    The work per id does not grow with the text.

    >>> tokenizer = Tokenizer(["Ã", "©", "!", "<end>"], [], ["<end>"], "smollm")  # é is the bytes c3 and a9
    >>> detokenizer = Detokenizer(tokenizer)
    >>> [detokenizer.push([token_id]) for token_id in (0, 1, 3, 2, 0)], detokenizer.flush()
    (['', 'é', '', '!', ''], '\ufffd')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, prompt_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(prompt_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids make certain. Raises TokenizerError for an id that is no int of the vocabulary."""
        return self._decoder.decode(self._tokenizer.decode_bytes(token_ids, self._skip_special))

    def flush(self) -> str:
        """The end: U+FFFD where the last character was cut, else nothing. The next push starts afresh."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Looks for stop strings in a text that comes in pieces, and lets through what none of them can take back.

    After a match `matched` is the stop string, and nothing more comes out. Of several matches in the text so far the
    earliest counts; at equal places the first of `stop`. The text ends before the match, or behind it where
    `include_stop` is set.

    >>> finder = StopFinder(["END", "o th"])
    >>> [finder.push(piece) for piece in ("one", " two", " thr", "ee")], finder.matched
    (['one', ' tw', '', ''], 'o th')
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Add a piece of text; returns the text that is certain now. No match ends in a piece that may not stop."""
        if self.matched is not None:
            return ""
        text, num_held = self._held + piece, len(self._held)
        places = ((text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self._stop)
        found = [(place, stop) for place, stop in places if place >= 0]
        if found and may_stop:
            start, self.matched = min(found, key=lambda match: match[0])  # the first of those at the same place
            self._held = ""
            return text[: start + len(self.matched) * self._include_stop]
        certain = len(text) - begun_length(text, self._stop)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The end: what was held back in vain."""
        held, self._held = self._held, ""
        return held


def begun_length(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `words` begins; a whole word does not count.

    >>> begun_length("a, b, <|im", ["<|im_end|>", ", b"])
    4
    """
    return max((_begun_length(text, word) for word in words), default=0)


def _begun_length(text: str, word: str) -> int:
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0:
        if word.startswith(text[start:]):
            return len(text) - start
        start = text.find(word[0], start + 1)
    return 0
