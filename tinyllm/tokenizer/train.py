"""Learn the merges of byte-pair encoding from a text.

The text is cut into words as `encode` cuts it, each word starts as its bytes, and then, again and again, the pair of
neighbours that occurs most often becomes one new token everywhere. Where several pairs occur equally often a rule has to
decide, and another rule gives another vocabulary; so the rule has a name:

- ``first``: the pair met first in the text, as its words stand at that moment;
- ``smallest``: the pair with the smallest ids, left then right. This one does not depend on the order of the text.

Pairs that overlap are all counted (aaa holds two pairs aa), but only one of them can be merged, the left one.

Source: Sennrich et al. 2016 (arXiv 1508.07909), algorithm 1, on bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tinyllm.errors import TokenizerError, brief
from tinyllm.tokenizer.bpe import Tokenizer, check_text, merge_word
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.tokenizer.pretokenize import check_pre_tokenizer, split_words

NUM_BYTES = 256  # ids 0 to 255 are the bytes themselves, the first merge makes 256
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Merge:
    """One step of the training: `pair` occurred `count` times and became the token `new_id`."""

    pair: Pair
    count: int
    new_id: int


def train(
    text: str,
    vocab_size: int,
    pre_tokenizer: str = "gpt2",
    ties: Literal["first", "smallest"] = "first",
    special_tokens: Iterable[str] = (),
) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids: 256 bytes, then merges, then the special tokens.

    There are fewer ids where the text has no pair of neighbours left. Equal arguments give equal tokenizers.

    Raises TokenizerError for a `vocab_size` too small for the bytes and the special tokens, for special tokens that are
    no texts, and as `iter_merges` does.

    >>> tokenizer = train("low lower lowest low", 300, special_tokens=["<end>"])
    >>> tokenizer.vocab_size  # 256 + 7 + 1: after seven merges each word is one token
    264
    >>> [tokenizer.token_text(token_id) for token_id in tokenizer.encode("low lowest<end>", parse_special=True)]
    ['low', ' lowest', '<end>']
    """
    special = _as_list(special_tokens)
    if not _is_count(vocab_size) or vocab_size < NUM_BYTES + len(special):
        raise TokenizerError(
            f"vocab_size is {brief(vocab_size)}; expected an int of {NUM_BYTES + len(special)} or more"
        )
    merges = iter_merges(text, vocab_size - NUM_BYTES - len(special), pre_tokenizer, ties)
    return tokenizer_from_merges(merges, pre_tokenizer, special)


def iter_merges(
    text: str, num_merges: int, pre_tokenizer: str = "gpt2", ties: Literal["first", "smallest"] = "first"
) -> Iterator[Merge]:
    """The merges in their order, each as soon as it is learnt; fewer than `num_merges` where no pair is left.

    Raises TokenizerError for a text that `encode` would refuse, a `num_merges` that is no count, an unknown tie rule or
    pre-tokenizer; all of it at the call, before the first merge.

    >>> for merge in iter_merges("aaabdaaabac", 3):
    ...     print(merge)
    Merge(pair=(97, 97), count=4, new_id=256)
    Merge(pair=(256, 97), count=2, new_id=257)
    Merge(pair=(257, 98), count=2, new_id=258)
    """
    check_text(text)
    check_pre_tokenizer(pre_tokenizer)
    if not _is_count(num_merges):
        raise TokenizerError(f"num_merges is {brief(num_merges)}; expected an int of 0 or more")
    if ties not in ("first", "smallest"):
        raise TokenizerError(f"tie rule {brief(ties)} is not supported; expected first or smallest")
    return _learn(Corpus(split_words(text, pre_tokenizer)), num_merges, ties)


def tokenizer_from_merges(
    merges: Iterable[Merge], pre_tokenizer: str = "gpt2", special_tokens: Iterable[str] = ()
) -> Tokenizer:
    """The tokenizer that these merges make; the special tokens get the last ids.

    Raises TokenizerError where a special token is no text, or one of the merged ones, too.

    >>> tokenizer = tokenizer_from_merges(iter_merges("aaabdaaabac", 3))
    >>> tokenizer.encode("aaabdaaabac")
    [258, 100, 258, 97, 99]
    """
    spellings = list(BYTE_TO_CHAR)
    pairs = []
    for merge in merges:
        left, right = (spellings[token_id] for token_id in merge.pair)
        pairs.append((left, right))
        spellings.append(left + right)
    special = _as_list(special_tokens)
    return Tokenizer([*spellings, *special], pairs, special, pre_tokenizer)


class Corpus:
    """The distinct words as they stand, how often each occurs, and the counts of all pairs."""

    def __init__(self, words: Iterable[str]) -> None:
        times = Counter(words)  # in the order in which the words are met, which the rule `first` relies on
        self.words = [list(word.encode()) for word in times]
        self.times = list(times.values())
        self.counts: Counter[Pair] = Counter()
        self.words_with: defaultdict[Pair, set[int]] = defaultdict(set)  # may name words that have lost the pair
        for index in range(len(self.words)):
            self._count(index, +1)

    def merge(self, pair: Pair, new_id: int) -> None:
        """Replace `pair` in every word and correct the counts, of its neighbours too."""
        for index in self.words_with.pop(pair):
            self._count(index, -1)
            self.words[index] = merge_word(self.words[index], {pair: 0}, [new_id])
            self._count(index, +1)

    def first_of(self, pairs: set[Pair]) -> Pair:
        """The one of `pairs` that is met first."""
        return next(pair for word in self.words for pair in pairwise(word) if pair in pairs)

    def _count(self, index: int, sign: int) -> None:
        for pair in pairwise(self.words[index]):
            self.counts[pair] += sign * self.times[index]
            if sign > 0:
                self.words_with[pair].add(index)
            elif not self.counts[pair]:
                del self.counts[pair]


def _learn(corpus: Corpus, num_merges: int, ties: str) -> Iterator[Merge]:
    for new_id in range(NUM_BYTES, NUM_BYTES + num_merges):
        if not corpus.counts:
            return
        count = max(corpus.counts.values())
        best = {pair for pair, times in corpus.counts.items() if times == count}
        pair = corpus.first_of(best) if ties == "first" and len(best) > 1 else min(best)
        corpus.merge(pair, new_id)
        yield Merge(pair, count, new_id)


def _as_list(special_tokens: Iterable[str]) -> list[str]:
    """A list of texts; one text alone is no list of its characters."""
    is_list = isinstance(special_tokens, Iterable) and not isinstance(special_tokens, str)
    special = list(special_tokens) if is_list else [None]
    if not all(isinstance(token, str) for token in special):
        raise TokenizerError(
            f"special_tokens is {brief(special if is_list else special_tokens)}; expected a list of strings"
        )
    return [token for token in special if isinstance(token, str)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
