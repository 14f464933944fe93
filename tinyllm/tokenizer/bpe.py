r"""Byte-pair encoding: text -> words -> bytes -> merged tokens, and back.

A word starts as its UTF-8 bytes, one token each. Then the pair of neighbours whose merge stands earliest in the list of
merges becomes one token, again and again, until no neighbours have a merge. Every token is a string of bytes, so every
list of ids decodes to bytes; whether these are valid UTF-8 is another matter, and a token may hold a part of a character.

Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units" (arXiv 1508.07909); bytes
instead of characters: Radford et al. 2019 (GPT-2).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from unicodedata import normalize

from tinyllm.errors import TokenizerError, brief
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR, spell_bytes, unspell_bytes
from tinyllm.tokenizer.pretokenize import check_pre_tokenizer, split_words

MAX_CACHED_WORDS = 2**16
MAX_CACHED_WORD_LENGTH = 32  # longer words are rare, and a cache of them could grow without bound
MAX_SPECIAL_TOKENS = 2**16  # each is a branch of one pattern; real vocabularies have a few hundred, or a few thousand
GONE = -1  # no token id: marks the place of a token that was merged into its left neighbour


@dataclass(frozen=True, slots=True)
class EncodedWord:
    """One word of a text and the ids that it became; no ids where the vocabulary lacks all its bytes."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodingRules:
    """What some vocabularies do besides cutting and merging; all of it is off by default.

    `nfc` brings the text between special tokens into Unicode's composed form (NFC) first, so that an é of two
    characters gets the ids of the é of one; decoding gives the composed form back. `prefix_space` puts a blank before
    each such text that starts with none. `whole_words` looks for the whole word in the vocabulary before it merges, as
    the vocabularies made for tiktoken expect.
    """

    nfc: bool = False
    prefix_space: bool = False
    whole_words: bool = False

    def prepare(self, text: str) -> str:
        r"""The text that is cut into words, for a text between special tokens.

        >>> EncodingRules(nfc=True, prefix_space=True).prepare("e\u0301")
        ' é'
        """
        text = normalize("NFC", text) if self.nfc else text
        return f" {text}" if self.prefix_space and text and text[0] != " " else text


class Tokenizer:
    """A byte-level BPE vocabulary.

    `tokens[i]` spells token i in the byte alphabet (byte_alphabet.py); in ASCII text only the blank and the control
    characters look different there. `merges` are pairs of such spellings, the first one has the highest priority.
    `special_tokens` (control tokens such as ``<|im_end|>``) and `added_tokens` (such as ``<think>``) name those tokens
    that are plain text and never come from merges: a special one is found in a text only where the caller allows it, an
    added one always. Both are attributes too, dicts of text to id.

    Raises TokenizerError for a token that is listed twice or holds a surrogate, a merge of or into something that is no
    ordinary token, a special or added token that is not in `tokens`, more than 65536 of them, and an unknown
    pre-tokenizer. A merge that is listed twice counts at its first place.

    >>> tokenizer = Tokenizer(["h", "u", "g", "ug", "hug", "<end>"], [("u", "g"), ("h", "ug")], ["<end>"], "smollm")
    >>> tokenizer.encode("hugug")
    [4, 3]
    >>> tokenizer.encode("hug<end>", parse_special=True)
    [4, 5]
    >>> tokenizer.decode([4, 3, 5]), tokenizer.decode([4, 3, 5], skip_special=True)
    ('hugug<end>', 'hugug')
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Iterable[tuple[str, str]],
        special_tokens: Iterable[str],
        pre_tokenizer: str,
        added_tokens: Iterable[str] = (),
        rules: EncodingRules = EncodingRules(),
    ) -> None:
        check_pre_tokenizer(pre_tokenizer)
        self.pre_tokenizer = pre_tokenizer
        self.rules = rules
        self.tokens, self.merges = tuple(tokens), tuple(merges)
        token_ids = _number_tokens(tokens)
        self.special_tokens = _pick_tokens(special_tokens, token_ids)
        self.added_tokens = _pick_tokens(added_tokens, token_ids)
        if both := self.special_tokens.keys() & self.added_tokens.keys():
            raise TokenizerError(f"token {brief(min(both))} is both special and added; expected one of the two")
        self._special_ids = frozenset(self.special_tokens.values())
        if len(self.special_tokens) + len(self.added_tokens) > MAX_SPECIAL_TOKENS:
            num_special = len(self.special_tokens) + len(self.added_tokens)
            raise TokenizerError(
                f"the vocabulary has {num_special} special tokens; expected at most {MAX_SPECIAL_TOKENS}"
            )
        self._literal_ids = {**self.special_tokens, **self.added_tokens}
        self._token_bytes = [_bytes_of(token, token in self._literal_ids) for token in tokens]
        ordinary = {token: token_id for token, token_id in token_ids.items() if token not in self._literal_ids}
        self._byte_ids = [ordinary.get(char) for char in BYTE_TO_CHAR]
        self._ranks, self._merged_ids = _rank_merges(self.merges, ordinary)
        self._whole_words = ordinary if rules.whole_words else {}
        self._added_pattern = _compile_literals(self.added_tokens)
        self._literal_pattern = _compile_literals(self._literal_ids)
        self._word_cache: dict[str, tuple[int, ...]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids; they run from 0 to vocab_size - 1."""
        return len(self._token_bytes)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        Where `parse_special` is False the text of a special token is text like any other, so a user's message cannot
        end its own turn. A byte that no token spells is dropped before merging, as Hugging Face's tokenizers does; its
        neighbours may then merge.

        Raises TokenizerError where `text` is no str or holds a surrogate, which UTF-8 cannot express.
        """
        return [token_id for word in self.encode_words(text, parse_special) for token_id in word.token_ids]

    def encode_words(self, text: str, parse_special: bool = False) -> list[EncodedWord]:
        """`encode` before the words are joined; their texts joined are `text`, as the vocabulary's rules prepare it.

        >>> Tokenizer(["h", "i", "Ġ", "hi"], [("h", "i")], [], "smollm").encode_words("hi hi")
        [EncodedWord(text='hi', token_ids=(3,)), EncodedWord(text=' hi', token_ids=(2, 3))]
        """
        check_text(text)
        pattern = self._literal_pattern if parse_special else self._added_pattern
        words = []
        # `split` alternates: text, special or added token, text, ..., text.
        for index, part in enumerate(pattern.split(text) if pattern else [text]):
            if index % 2:
                words.append(EncodedWord(part, (self._literal_ids[part],)))
            else:
                pieces = split_words(self.rules.prepare(part), self.pre_tokenizer)
                words += [EncodedWord(word, self._encode_word(word)) for word in pieces]
        return words

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `token_ids`, U+FFFD for what is not UTF-8; `skip_special` leaves the special tokens out.

        Raises TokenizerError for an id that is no int of this vocabulary.
        """
        return self.decode_bytes(token_ids, skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of `token_ids`, whether they are UTF-8 or not. Raises as `decode` does."""
        pieces = []
        for token_id in _iterate(token_ids):
            piece = self.token_bytes(token_id)  # before the test, so that it refuses what is no id
            if not (skip_special and token_id in self._special_ids):
                pieces.append(piece)
        return b"".join(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. Raises TokenizerError for an id that is no int of this vocabulary."""
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise TokenizerError(
                f"token id {brief(token_id)} is of type {type(token_id).__name__}; expected an int (a tensor's tolist())"
            )
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {brief(token_id)} is outside the vocabulary; expected 0 to {self.vocab_size - 1}"
            )
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        r"""One token on one printable line, for people to read (it cannot be parsed back).

        ``\xe2`` stands for a byte that is not UTF-8 on its own, ``\u00a0`` for a character that does not print.
        Raises TokenizerError for an id that is no int of this vocabulary.

        >>> tokenizer = Tokenizer(["ĠFrance", "Ċ", "â"], [], [], "smollm")
        >>> [tokenizer.token_text(token_id) for token_id in range(3)]
        [' France', '\\n', '\\xe2']
        """
        text = self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")
        return "".join(char if char.isprintable() else _escape(char) for char in text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        token_ids = self._word_cache.get(word)
        if token_ids is None:
            token_ids = self._merge_bytes(word.encode())
            if len(word) <= MAX_CACHED_WORD_LENGTH:
                if len(self._word_cache) >= MAX_CACHED_WORDS:
                    self._word_cache.clear()
                self._word_cache[word] = token_ids
        return token_ids

    def _merge_bytes(self, word: bytes) -> tuple[int, ...]:
        whole_id = self._whole_words.get(spell_bytes(word)) if self._whole_words else None
        if whole_id is not None:
            return (whole_id,)
        byte_ids = [self._byte_ids[byte] for byte in word]
        known_ids = [byte_id for byte_id in byte_ids if byte_id is not None]
        return tuple(merge_word(known_ids, self._ranks, self._merged_ids))


def merge_word(token_ids: Sequence[int], ranks: Mapping[tuple[int, int], int], merged_ids: Sequence[int]) -> list[int]:
    """Merge neighbours until none of them has a merge: always the lowest rank, the leftmost where ranks are equal.

    `ranks` gives the rank of a pair of neighbours, `merged_ids[rank]` the token that they become. A heap keeps the pairs
    in order and a doubly linked list the neighbours, so n tokens take O(n log n) steps; looking through the whole word
    for each merge would take O(n * n), minutes for one long line.

    >>> merge_word([7, 7, 7, 8], {(7, 7): 1, (7, 8): 0}, [12, 11])  # rank 0 goes first, though it stands last
    [11, 12]
    """
    ids = [*token_ids, GONE]  # closes the list to a ring (index -1 is this GONE), so that no border needs a test
    left_of = list(range(-1, len(ids) - 1))
    right_of = [*range(1, len(ids)), 0]
    heap = [(ranks[pair], left) for left, pair in enumerate(pairwise(ids)) if pair in ranks]
    heapify(heap)
    while heap:
        rank, left = heappop(heap)
        right = right_of[left]
        if ranks.get((ids[left], ids[right])) != rank:
            continue  # an earlier merge took one of the two; subtle: a GONE one fails the same test
        ids[left], ids[right] = merged_ids[rank], GONE
        right_of[left] = right_of[right]
        left_of[right_of[right]] = left
        for start in (left_of[left], left):
            new_rank = ranks.get((ids[start], ids[right_of[start]]))
            if new_rank is not None:
                heappush(heap, (new_rank, start))
    return [token_id for token_id in ids if token_id != GONE]


def _number_tokens(tokens: Sequence[str]) -> dict[str, int]:
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(token_ids) != len(tokens):
        first_id, token = next((i, token) for i, token in enumerate(tokens) if token_ids[token] != i)
        raise TokenizerError(
            f"token {brief(token)} is listed twice, as {first_id} and {token_ids[token]}; expected one id each"
        )
    return token_ids


def _pick_tokens(texts: Iterable[str], token_ids: Mapping[str, int]) -> dict[str, int]:
    picked = {}
    for text in texts:
        if text == "" or text not in token_ids:
            raise TokenizerError(f"special or added token {brief(text)} is empty or not in the vocabulary")
        picked[text] = token_ids[text]
    return picked


def _rank_merges(
    merges: Iterable[tuple[str, str]], ordinary: Mapping[str, int]
) -> tuple[dict[tuple[int, int], int], list[int]]:
    ranks: dict[tuple[int, int], int] = {}
    merged_ids = []
    for rank, (left, right) in enumerate(merges):
        try:
            pair = ordinary[left], ordinary[right]
            merged_ids.append(ordinary[left + right])
        except KeyError as error:
            raise TokenizerError(
                f"merge {rank} ({brief(left)} + {brief(right)}) needs {brief(error.args[0])}, which is no ordinary token"
            ) from None
        ranks.setdefault(pair, rank)
    return ranks, merged_ids


def _bytes_of(token: str, is_literal: bool) -> bytes:
    try:
        return token.encode("utf-8", "surrogateescape") if is_literal else unspell_bytes(token)
    except UnicodeEncodeError:
        raise TokenizerError(f"token {brief(token)} holds a surrogate; expected text or escaped bytes") from None


def _compile_literals(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of `texts`, the longest at each place; its group makes `split` return the matches."""
    literals = sorted(texts, key=len, reverse=True)  # an alternation takes its first fit, not its longest
    return re.compile(f"({'|'.join(map(re.escape, literals))})") if literals else None


def check_text(text: str) -> None:
    """Raise TokenizerError where `text` is no str or holds a surrogate, which UTF-8 cannot express."""
    if not isinstance(text, str):
        raise TokenizerError(f"cannot encode a {type(text).__name__}; expected a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = ord(text[error.start])
        raise TokenizerError(
            f"text holds the lone surrogate U+{code_point:04X} at position {error.start}, which is no character; remove it"
        ) from None


def _iterate(token_ids: Iterable[int]) -> Iterator[int]:
    try:
        return iter(token_ids)
    except TypeError:
        raise TokenizerError(f"token_ids is a {type(token_ids).__name__}; expected a list of ints") from None


def _escape(char: str) -> str:
    short = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}
    return short.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")
