"""Needles in a haystack of tokens: statements hidden among fillers, and questions at the end.

The kinds of C.-P. Hsieh, S. Sun, S. Kriman, S. Acharya, D. Rekesh, F. Jia, Y. Zhang and B. Ginsburg, RULER: What's the
real context size of your long-context language models?, arXiv:2404.06654, with single tokens in place of words: one
needle, several keys, several values, several queries. `ccq.data.needles` hides statements in real text instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.loader import IGNORE_INDEX, TokenBatch
from ccq.data.recall import smallest, uniform_rows

STATE, ASK = 0, 1
"""Tokens in front of a statement and of a question."""
_MARKS = 2


@dataclass(frozen=True)
class HiddenStatements:
    """Statements of a key and a value are hidden among fillers; at the end of the row some of the keys are asked, and
    each is answered by its value.

    Token ids: `STATE`, `ASK`, then the keys, the values, the fillers. A statement is `STATE` KEY VALUE, a question
    `ASK` KEY, answered by the VALUE stated for that KEY. Statements stand among random fillers at uniformly drawn
    places; all questions come behind the last filler, in random order. Only the key tells which value is asked: values
    of a row differ, and each key that may be asked is asked as often as the others, wherever it stands.

    Attributes:
        length: tokens T of a row, the last answer left out: it is predicted and never read.
        needles: different keys that are stated; those that are not asked are distractors.
        queries: keys asked, at most `needles`.
        statements: how often keys are stated. The keys are divided evenly between the entries: (1, 4) states one half
            of them once and the other half four times. A key that is stated again and again is a frequent one, and so
            are the directions of memory that it lies in.
        asked_statements: one of the entries of `statements`: only keys that are stated so often are asked, and the rows
            stay as they are; None asks all alike.
        values_differ: every statement of a key has a value of its own, and the answer is all of them in the order in
            which they stand; otherwise a key is stated with the same value again.
        value_tokens: tokens of a value. The first ones of a row differ, the others are drawn by themselves.
        keys, values, fillers: how many there are. One filler makes a haystack that says nothing, many make one that
            must be told from the needles.
        depth: the part of the haystack in which the statements stand, as shares: (0.0, 0.2) is the first fifth, far
            from the questions.
    """

    length: int
    needles: int = 1
    queries: int = 1
    statements: tuple[int, ...] = (1,)
    asked_statements: int | None = None
    values_differ: bool = False
    value_tokens: int = 1
    keys: int = 64
    values: int = 64
    fillers: int = 64
    depth: tuple[float, float] = (0.0, 1.0)

    FIXED: ClassVar[tuple[str, ...]] = ("keys", "values", "fillers")

    def __post_init__(self) -> None:
        for name in ("needles", "queries", "value_tokens", "keys", "values", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        listed = ", ".join(map(str, self.statements))
        if not self.statements or min(self.statements) < 1 or len(set(self.statements)) < len(self.statements):
            raise ValueError(f"statements must be different numbers of at least 1, got {listed or 'none'}")
        if self.needles % len(self.statements):
            raise ValueError(
                f"{self.needles} needles cannot be divided evenly between statements {listed}; give a multiple of "
                f"{len(self.statements)}"
            )
        if self.asked_statements not in (None, *self.statements):
            raise ValueError(f"asked_statements must be one of {listed}, got {self.asked_statements}")
        if self.values_differ and len(self.statements) > 1:
            raise ValueError(
                f"with values_differ the answers would have different lengths; give statements one entry, got {listed}"
            )
        if self.queries > len(self._may_be_asked):
            raise ValueError(
                f"no more keys can be asked than are stated: got {self.queries} queries and {len(self._may_be_asked)} "
                "needles that may be asked"
            )
        if self.needles > self.keys:
            raise ValueError(f"{self.needles} needles need as many different keys, got {self.keys}")
        if self._row_values > self.values:
            raise ValueError(f"a row has {self._row_values} different values, got {self.values}; give more values")
        if self._fillers_in_row < 0:
            raise ValueError(
                f"length {self.length} is too short for {self._stated} statements and {self.queries} queries; give at "
                f"least {self.length - self._fillers_in_row}"
            )
        start, end = self.depth
        if not 0 <= start < end <= 1:
            raise ValueError(f"depth must be two rising shares in 0 ... 1, got {start} and {end}")
        first, last = self._statement_slots
        if last - first < self._stated:
            raise ValueError(
                f"depth {start} to {end} has {max(last - first, 0)} places for {self._stated} statements; widen it, or "
                "give a longer row"
            )

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return _MARKS + self.keys + self.values + self.fillers

    @property
    def answers(self) -> int:
        """The tokens of all values that are asked for."""
        return self.queries * self._answer_tokens

    @property
    def chance(self) -> float:
        """Of the best player who sees the row but cannot tell its keys apart.

        Before the first token of a value, each key that may be asked and is not answered yet is as likely as the
        others. That holds for `values_differ`, too: of N statements in random order, n of each key, the one behind the
        last answer is right in n / N of all rows. The first token tells the value, so its other tokens are certain.
        """
        keys = len(self._may_be_asked)
        first = sum(1 / (keys - answered) for answered in range(self.queries)) / self.queries
        return (first + self.value_tokens - 1) / self.value_tokens

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """See `RecallTask.batch`."""
        stated, count = self._stated, self._row_values
        first, last = self._statement_slots
        body = self.length + 1 - self._tail
        may_be_asked = self._may_be_asked
        for_keys, for_values, for_endings, for_asked, for_slots, for_fillers = uniform_rows(
            (self.keys, self.values, count * (self.value_tokens - 1), len(may_be_asked), last - first, body),
            seed=seed,
            step=step,
            batch_size=batch_size,
        )
        row = np.arange(batch_size)[:, None]
        keys = _MARKS + smallest(for_keys, self.needles)
        values = np.empty((batch_size, count, self.value_tokens), dtype=np.int64)
        values[:, :, 0] = smallest(for_values, count)
        values[:, :, 1:] = (for_endings * self.values).reshape(batch_size, count, -1)
        values += _MARKS + self.keys
        asked = may_be_asked[smallest(for_asked, self.queries)]

        # The statements of a key follow one another in `said`. A slot holds a filler or a whole statement; those of
        # a key are in rising order, as its values are.
        of_key = np.repeat(np.arange(self.needles), self._times)
        said = np.empty((batch_size, stated, 2 + self.value_tokens), dtype=np.int64)
        said[:, :, 0] = STATE
        said[:, :, 1] = keys[:, of_key]
        said[:, :, 2:] = values if self.values_differ else values[:, of_key]
        slots = first + smallest(for_slots, stated)
        if self.values_differ:
            slots = np.sort(slots.reshape(batch_size, self.needles, -1), axis=2).reshape(batch_size, stated)
        starts = slots + (1 + self.value_tokens) * slots.argsort(axis=1).argsort(axis=1)

        tokens = np.empty((batch_size, self.length + 1), dtype=np.int64)
        tokens[:, :body] = _MARKS + self.keys + self.values + (for_fillers * self.fillers).astype(np.int64)
        tokens[row[:, :, None], starts[:, :, None] + np.arange(2 + self.value_tokens)] = said
        questions = tokens[:, body:].reshape(batch_size, self.queries, 2 + self._answer_tokens)
        questions[:, :, 0] = ASK
        questions[:, :, 1] = keys[row, asked]
        questions[:, :, 2:] = values.reshape(batch_size, self.needles, -1)[row, asked]
        tokens[:, body:] = questions.reshape(batch_size, self._tail)

        is_answer = np.zeros(self.length + 1, dtype=bool)
        is_answer[body:].reshape(self.queries, -1)[:, 2:] = True
        targets = np.where(is_answer[1:], tokens[:, 1:], IGNORE_INDEX)
        return TokenBatch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets))

    @property
    def _times(self) -> NDArray[np.int64]:
        """How often each key is stated: [needles]. Keys are drawn, so their order says nothing."""
        return np.repeat(self.statements, self.needles // len(self.statements))

    @property
    def _may_be_asked(self) -> NDArray[np.int64]:
        """Places in `_times` of the keys that may be asked."""
        if self.asked_statements is None:
            return np.arange(self.needles)
        return np.flatnonzero(self._times == self.asked_statements)

    @property
    def _stated(self) -> int:
        return int(self._times.sum())

    @property
    def _row_values(self) -> int:
        """Different values of a row."""
        return self._stated if self.values_differ else self.needles

    @property
    def _answer_tokens(self) -> int:
        """Of one question."""
        return self.value_tokens * (self.statements[0] if self.values_differ else 1)

    @property
    def _tail(self) -> int:
        """Tokens of the questions and their answers."""
        return self.queries * (2 + self._answer_tokens)

    @property
    def _fillers_in_row(self) -> int:
        return self.length + 1 - self._tail - self._stated * (2 + self.value_tokens)

    @property
    def _statement_slots(self) -> tuple[int, int]:
        """The first slot in which a statement may stand, and the one behind the last."""
        slots = self._stated + self._fillers_in_row
        # Rounded, so that 0.7 of ten slots is seven of them.
        start, end = (round(share * slots, 6) for share in self.depth)
        return math.ceil(start), math.floor(end)
