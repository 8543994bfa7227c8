"""Aggregation: the answer is not stated anywhere; it follows from how often words stand in the whole row.

The two kinds of RULER (arXiv:2404.06654), frequent words and common words, with single tokens in place of words. A
memory that only looks up what follows a key cannot answer, and one that forgets counts the last part of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.loader import IGNORE_INDEX, TokenBatch
from ccq.data.recall import smallest, uniform_rows

ASK = 0
"""Token behind the last word; the answers follow."""
_MARKS = 1


@dataclass(frozen=True)
class FrequentWords:
    """The most frequent words of a row are asked at its end, the most frequent one first.

    Token ids: `ASK`, then the words. The word of rank r = 1, 2, ... stands in the row in proportion to
    r ** -steepness (Zipf's law), rounded so that the counts fill the row; all orders of a row's words are equally
    likely.

    Attributes:
        length: tokens T of a row, the last answer left out.
        words: different words in a row.
        top: words asked.
        steepness: how much more frequent each rank is than the next; near 0 they are hard to tell apart.
        vocabulary: words there are; every row draws its own.
    """

    length: int
    words: int
    top: int = 1
    steepness: float = 1.0
    vocabulary: int = 64

    FIXED: ClassVar[tuple[str, ...]] = ("vocabulary",)

    def __post_init__(self) -> None:
        if not 1 <= self.top < self.words <= self.vocabulary:
            raise ValueError(
                "needed are at least 1 top word, more words than those, and no more words than the vocabulary has; got "
                f"{self.top}, {self.words} and {self.vocabulary}"
            )
        if not 0 < self.steepness < math.inf:
            raise ValueError(f"steepness must be a finite number above 0, got {self.steepness}")
        if self.length < self.top + self.words:
            raise ValueError(
                f"length {self.length} is too short for {self.words} words and {self.top} answers; give at least "
                f"{self.top + self.words}"
            )
        counts = self.counts
        if counts[-1] < 1 or (np.diff(counts[: self.top + 1]) >= 0).any():
            raise ValueError(
                f"with length {self.length} and steepness {self.steepness} the words would stand "
                f"{', '.join(map(str, counts))} times; every word must stand at least once and each of the first "
                f"{self.top} ranks more often than the next: change length, words or steepness"
            )

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How often the word of each rank stands in a row: [words], by largest remainders."""
        tokens = self.length - self.top
        shares = np.arange(1, self.words + 1) ** -self.steepness
        exact = tokens * shares / shares.sum()
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: tokens - counts.sum()]] += 1
        return counts

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return _MARKS + self.vocabulary

    @property
    def answers(self) -> int:
        """One a top word."""
        return self.top

    @property
    def chance(self) -> float:
        """How often the word at a drawn place of the row is right, places of words that are answered already left out:
        what a memory has that keeps some word of the row and does not count.
        """
        counts = self.counts[: self.top]
        left = self.length - self.top - np.cumsum([0, *counts[:-1]])
        return float(np.mean(counts / left))

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """See `RecallTask.batch`."""
        for_words, for_order = uniform_rows(
            (self.vocabulary, self.length - self.top), seed=seed, step=step, batch_size=batch_size
        )
        words = _MARKS + smallest(for_words, self.words)
        listed = np.repeat(words, self.counts, axis=1)
        text = np.take_along_axis(listed, for_order.argsort(axis=1), axis=1)
        return _asked(text, words[:, : self.top])


@dataclass(frozen=True)
class CommonWords:
    """The words that are common in a row are asked at its end, in the order in which they first stand in it.

    Token ids: `ASK`, then the words. Common words stand in the row `often` times each, all others `seldom` times; all
    orders are equally likely.

    Attributes:
        length: tokens T of a row, the last answer left out. Other words fill it, the last of them perhaps less often
            than `seldom`.
        common: words that are asked.
        often, seldom: how often a word stands; the nearer, the harder.
        vocabulary: words there are; every row draws its own.
    """

    length: int
    common: int = 1
    often: int = 6
    seldom: int = 1
    vocabulary: int = 64

    FIXED: ClassVar[tuple[str, ...]] = ("vocabulary",)

    def __post_init__(self) -> None:
        if self.common < 1 or not 1 <= self.seldom < self.often:
            raise ValueError(
                "needed are at least 1 common word, and often above seldom above 0; got "
                f"{self.common}, {self.often} and {self.seldom}"
            )
        if self._rest < 1:
            raise ValueError(
                f"length {self.length} leaves no room for other words beside {self.common} that stand {self.often} "
                f"times; give at least {self.length + 1 - self._rest}"
            )
        if self.common + self._others > self.vocabulary:
            raise ValueError(
                f"a row of {self.length} has {self.common + self._others} different words, the vocabulary only "
                f"{self.vocabulary}; give a larger vocabulary or seldom, or a shorter length"
            )

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return _MARKS + self.vocabulary

    @property
    def answers(self) -> int:
        """One a common word."""
        return self.common

    @property
    def chance(self) -> float:
        """Of the best player who knows in which order the words of the row first stand, and does not count. The answers
        follow that order, so the likeliest word is the first of the row, and behind an answer the next new one.

        In a random order the next new word is each of those that are still to come with a chance proportional to how
        often it stands.
        """
        others = self._others - 1  # that stand `seldom` times; the last one perhaps less often
        last = self._rest - self.seldom * others
        # The share of rows in which so many of the others, and the last one or not, came before the latest answer.
        share = np.zeros((others + 1, 2))
        share[0, 0] = 1.0
        right = 0.0
        for answered in range(self.common):
            # Tokens of words that are still to come: common ones, and all.
            wanted = self.often * (self.common - answered)
            left = wanted + self.seldom * np.arange(others, -1, -1)[:, None] + last * np.array([1, 0])
            right += float((share * wanted / left).sum())
            # Where it is another word, the one behind that is the next, until it is a common one.
            for came in range(others + 1):
                if came > 0:
                    share[came] += share[came - 1] * self.seldom * (others - came + 1) / left[came - 1]
                share[came, 1] += share[came, 0] * last / left[came, 0]
            share *= wanted / left
        return right / self.common

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """See `RecallTask.batch`."""
        tokens = self.length - self.common
        for_words, for_order = uniform_rows((self.vocabulary, tokens), seed=seed, step=step, batch_size=batch_size)
        words = _MARKS + smallest(for_words, self.common + self._others)
        counts = np.full(self.common + self._others, self.seldom)
        counts[: self.common] = self.often
        counts[-1] = self._rest - self.seldom * (self._others - 1)
        listed = np.repeat(words, counts, axis=1)
        order = for_order.argsort(axis=1)
        text = np.take_along_axis(listed, order, axis=1)
        places = order.argsort(axis=1)[:, : self.common * self.often]
        first = places.reshape(batch_size, self.common, self.often).min(axis=2)
        return _asked(text, np.take_along_axis(words, first.argsort(axis=1), axis=1))

    @property
    def _rest(self) -> int:
        """Tokens that are left for the other words."""
        return self.length - self.common - self.common * self.often

    @property
    def _others(self) -> int:
        return math.ceil(self._rest / self.seldom)


def _asked(text: NDArray[np.int64], answers: NDArray[np.int64]) -> TokenBatch:
    """The text [B, W], `ASK`, and the answers [B, A], as inputs and targets [B, W + A]."""
    rows = len(text)
    tokens = np.concatenate([text, np.full((rows, 1), ASK), answers], axis=1)
    targets = np.full((rows, tokens.shape[1] - 1), IGNORE_INDEX)
    targets[:, -answers.shape[1] :] = answers
    return TokenBatch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets))
