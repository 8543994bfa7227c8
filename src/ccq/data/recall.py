"""Multi-query associative recall, and what all synthetic tasks have in common: only a memory can solve them.

A row states pairs, KEY VALUE KEY VALUE ..., and then shows some of the keys again at places of its own; at each the
token to predict is the key's value. Every row draws its own pairs, so nothing can be learned by heart. From S. Arora,
S. Eyuboglu, A. Timalsina, I. Johnson, M. Poli, J. Zou, A. Rudra and C. Ré, Zoology: Measuring and improving recall in
efficient language models, arXiv:2312.04927.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.loader import IGNORE_INDEX, TokenBatch

BLANK = 0
"""Token of every place that holds neither a pair nor a question."""


class RecallTask(Protocol):
    """A synthetic task: rows of tokens in which every answer follows from the tokens before it and from nothing else.

    An answer is never asked before all that it follows from has been read. Where a row asks for several tokens in a
    row, the right ones stand in the input (teacher forcing), and every one counts as an answer.
    """

    FIXED: ClassVar[tuple[str, ...]]
    """Options that give token ids their meaning. Tasks that agree in them can be put to the same model."""

    @property
    def length(self) -> int:
        """Tokens T of a row."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def answers(self) -> int:
        """Answers in a row."""
        ...

    @property
    def chance(self) -> float:
        """How often an answer is right, on average over a row's answers, without what the task is about: of the best
        player who sees the row but cannot tell its keys apart, or, where there are no keys, of one who does not count.
        """
        ...

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """The rows of a step: a pure function of its arguments; row b does not depend on `batch_size`.

        Args:
            seed, step: each in 0 ... 2**64 - 1; every pair has its own random numbers.
            batch_size: rows B.

        Returns:
            inputs int64 [B, T], and targets int64 [B, T]: the answer where one is asked, else `IGNORE_INDEX`.
        """
        ...


@dataclass(frozen=True)
class AssociativeRecall:
    """Pairs of a key and a value are stated at the start of a row; some of the keys come again later, and each is
    answered by its value.

    Token ids: `BLANK`, then the keys, the values, the fillers. Pairs that are not asked are distractors.

    Attributes:
        length: tokens T of a row.
        pairs: stated at the start of a row; more pairs need more memory.
        queries: different keys asked, at most `pairs`.
        keys, values: how many there are. Those of a row differ, so that only the key tells which value is asked.
        power: a question comes g places after the last pair with a chance proportional to g ** (power - 1): 1 spreads
            them evenly, near 0 most of them come early.
        fillers: if above 0, blanks are random ones of so many tokens, which must be ignored; 0 leaves them blank.
    """

    length: int
    pairs: int
    queries: int
    keys: int = 4096
    values: int = 4096
    power: float = 0.01
    fillers: int = 0

    FIXED: ClassVar[tuple[str, ...]] = ("keys", "values", "fillers")

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.pairs or self.fillers < 0:
            raise ValueError(
                "needed are at least 1 pair and query, no more queries than pairs, and no fewer than 0 fillers; got "
                f"{self.pairs}, {self.queries} and {self.fillers}"
            )
        if self.pairs > self.keys:
            raise ValueError(f"{self.pairs} pairs need as many different keys, got {self.keys}")
        if self.pairs > self.values:
            raise ValueError(f"{self.pairs} pairs need as many different values, got {self.values}")
        if self.length < 2 * self.pairs + self.queries:
            raise ValueError(
                f"length {self.length} is too short for {self.pairs} pairs and {self.queries} queries; give at least "
                f"{2 * self.pairs + self.queries}"
            )
        if not 0 < self.power <= 1:
            raise ValueError(f"power is {self.power}; give a number above 0 and at most 1")

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return 1 + self.keys + self.values + self.fillers

    @property
    def answers(self) -> int:
        """One a query."""
        return self.queries

    @property
    def chance(self) -> float:
        """Of the value of any pair: answers stand in the targets alone, so none is known to be given already."""
        return 1 / self.pairs

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """See `RecallTask.batch`."""
        places = self.length - 2 * self.pairs
        for_keys, for_values, for_order, for_places, for_fillers = uniform_rows(
            (self.keys, self.values, self.pairs, places, self.length if self.fillers else 0),
            seed=seed,
            step=step,
            batch_size=batch_size,
        )

        keys = 1 + smallest(for_keys, self.pairs)
        values = 1 + self.keys + smallest(for_values, self.pairs)
        asked = smallest(for_order, self.queries)
        # The first of exponential clocks of these rates: weighted draws without replacement (P. Efraimidis and
        # P. Spirakis, Weighted random sampling with a reservoir, 2006).
        rates = np.arange(1, places + 1) ** (self.power - 1)
        where = 2 * self.pairs + smallest(-np.log1p(-for_places) / rates, self.queries)

        row = np.arange(batch_size)[:, None]
        inputs = np.full((batch_size, self.length), BLANK, dtype=np.int64)
        if self.fillers:
            inputs[:] = 1 + self.keys + self.values + (for_fillers * self.fillers).astype(np.int64)
        inputs[:, 0 : 2 * self.pairs : 2] = keys
        inputs[:, 1 : 2 * self.pairs : 2] = values
        inputs[row, where] = keys[row, asked]
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[row, where] = values[row, asked]
        return TokenBatch(torch.from_numpy(inputs), torch.from_numpy(targets))


def uniform_rows(parts: Sequence[int], *, seed: int, step: int, batch_size: int) -> list[NDArray[np.float64]]:
    """For each of the parts [B, part] uniform numbers in [0, 1). They belong to seed, step and row: row b has the same
    ones in a larger batch.

    Raises:
        ValueError: seed or step is not in 0 ... 2**64 - 1.
    """
    for name, given in (("seed", seed), ("step", step)):
        if not 0 <= given < 2**64:
            raise ValueError(f"{name} is {given}; give a number from 0 to 2**64 - 1")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    return np.split(generator.random((batch_size, sum(parts))), np.cumsum(parts)[:-1], axis=1)


def smallest(numbers: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Places of the `count` smallest numbers of each row, in rising order of the numbers: [B, count]."""
    places = np.argpartition(numbers, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(numbers, places, axis=1), axis=1)
    return np.take_along_axis(places, order, axis=1)
