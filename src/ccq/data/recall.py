"""Multi-query associative recall: a synthetic task that only a memory can solve.

A row states pairs, KEY VALUE KEY VALUE ..., and then shows some of the keys again at places of its own; at each the
token to predict is the key's value. Every row draws its own pairs, so nothing can be learned by heart. From S. Arora,
S. Eyuboglu, A. Timalsina, I. Johnson, M. Poli, J. Zou, A. Rudra and C. Ré, Zoology: Measuring and improving recall in
efficient language models, arXiv:2312.04927.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.loader import IGNORE_INDEX, TokenBatch

BLANK = 0
"""Token of every place that holds neither a pair nor a question."""


@dataclass(frozen=True)
class AssociativeRecall:
    """The task and how hard it is. Token ids: `BLANK`, then the keys, the values, the fillers.

    Attributes:
        length: tokens T of a row.
        pairs: stated at the start of a row; more pairs need more memory.
        queries: different keys asked, at most `pairs`.
        keys, values: how many there are. Keys of a row differ; values may repeat, and guessing is right once in
            `values` times.
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

    def __post_init__(self) -> None:
        if min(self.pairs, self.queries, self.values) < 1 or self.queries > self.pairs or self.fillers < 0:
            raise ValueError(
                "needed are at least 1 pair, query and value, no more queries than pairs, and no fewer than 0 fillers; "
                f"got {self.pairs}, {self.queries}, {self.values} and {self.fillers}"
            )
        if self.pairs > self.keys:
            raise ValueError(f"{self.pairs} pairs need as many different keys, got {self.keys}")
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

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """The rows of a step: a pure function of its arguments; row b does not depend on `batch_size`.

        Args:
            seed, step: each in 0 ... 2**64 - 1; every pair has its own random numbers.
            batch_size: rows B.

        Returns:
            inputs int64 [B, T], and targets int64 [B, T]: the value where a key is asked, else `IGNORE_INDEX`.
        """
        for name, given in (("seed", seed), ("step", step)):
            if not 0 <= given < 2**64:
                raise ValueError(f"{name} is {given}; give a number from 0 to 2**64 - 1")
        places = self.length - 2 * self.pairs
        parts = (self.keys, self.pairs, self.pairs, places, self.length if self.fillers else 0)
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        uniform = generator.random((batch_size, sum(parts)))
        for_keys, for_values, for_order, for_places, for_fillers = np.split(uniform, np.cumsum(parts)[:-1], axis=1)

        keys = 1 + _smallest(for_keys, self.pairs)
        values = 1 + self.keys + (for_values * self.values).astype(np.int64)
        asked = _smallest(for_order, self.queries)
        # The first of exponential clocks of these rates: weighted draws without replacement (P. Efraimidis and
        # P. Spirakis, Weighted random sampling with a reservoir, 2006).
        rates = np.arange(1, places + 1) ** (self.power - 1)
        where = 2 * self.pairs + _smallest(-np.log1p(-for_places) / rates, self.queries)

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


def _smallest(numbers: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Places of the `count` smallest numbers of each row, in rising order of the numbers: [B, count]."""
    places = np.argpartition(numbers, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(numbers, places, axis=1), axis=1)
    return np.take_along_axis(places, order, axis=1)
