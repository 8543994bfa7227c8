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

from ccq.data.loader import IGNORE_INDEX, TokenBatch
from ccq.data.recall import chance_among, smallest, uniform_rows

STATE, ASK = 0, 1
"""Tokens in front of a statement and of a question."""
_MARKS = 2


@dataclass(frozen=True)
class HiddenStatements:
    """Statements of a key and a value are hidden among fillers; at the end of the row some of the keys are asked, and
    each is answered by its value.

    Token ids: `STATE`, `ASK`, then the keys, the values, the fillers. A statement is `STATE` KEY VALUE, a question
    `ASK` KEY, answered by the VALUE stated for that KEY. Statements stand among random fillers at uniformly drawn
    places; all questions come behind the last filler, in random order.

    Attributes:
        length: tokens T of a row, the last answer left out: it is predicted and never read.
        needles: different keys that are stated; those that are not asked are distractors.
        queries: keys asked, at most `needles`.
        statements: how often each asked key is stated; a distractor is stated once. Above 1 the asked key is a frequent
            one, and so are the directions of memory that it lies in.
        values_differ: every statement of a key has a value of its own, and the answer is all of them in the order in
            which they stand; otherwise a key is stated with the same value again.
        value_tokens: tokens of a value, each drawn by itself.
        keys, values, fillers: how many there are. Keys of a row differ; values may repeat. One filler makes a haystack
            that says nothing, many make one that must be told from the needles.
        depth: the part of the haystack in which the asked statements stand, as shares: (0.0, 0.2) is the first fifth,
            far from the questions.
    """

    length: int
    needles: int = 1
    queries: int = 1
    statements: int = 1
    values_differ: bool = False
    value_tokens: int = 1
    keys: int = 64
    values: int = 64
    fillers: int = 64
    depth: tuple[float, float] = (0.0, 1.0)

    FIXED: ClassVar[tuple[str, ...]] = ("keys", "values", "fillers")

    def __post_init__(self) -> None:
        for name in ("needles", "queries", "statements", "value_tokens", "keys", "values", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.queries > self.needles:
            raise ValueError(
                f"no more keys can be asked than are stated: got {self.queries} queries and {self.needles} needles"
            )
        if self.needles > self.keys:
            raise ValueError(f"{self.needles} needles need as many different keys, got {self.keys}")
        if self._fillers_in_row < 0:
            raise ValueError(
                f"length {self.length} is too short for {self._stated} statements and {self.queries} queries; give at "
                f"least {self.length - self._fillers_in_row}"
            )
        start, end = self.depth
        if not 0 <= start < end <= 1:
            raise ValueError(f"depth must be two rising shares in 0 ... 1, got {start} and {end}")
        first, last = self._asked_slots
        asked = self.queries * self.statements
        if last - first < asked:
            raise ValueError(
                f"depth {start} to {end} has {max(last - first, 0)} places for {asked} asked statements; widen it, or "
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
        """Of a token of any statement's value."""
        shown = self.needles - self.queries + self.queries * (self.statements if self.values_differ else 1)
        return chance_among(shown, self.values)

    def batch(self, *, seed: int, step: int, batch_size: int) -> TokenBatch:
        """See `RecallTask.batch`."""
        asked, stated = self.queries * self.statements, self._stated
        others = self.needles - self.queries
        slots = stated + self._fillers_in_row
        first, last = self._asked_slots
        body = self.length + 1 - self._tail
        different = self.statements if self.values_differ else 1
        for_keys, for_values, for_asked, for_others, for_fillers = uniform_rows(
            (self.keys, (self.queries * different + others) * self.value_tokens, last - first, slots, body),
            seed=seed,
            step=step,
            batch_size=batch_size,
        )
        keys = _MARKS + smallest(for_keys, self.needles)
        values = _MARKS + self.keys + (for_values * self.values).astype(np.int64)
        values = values.reshape(batch_size, -1, self.value_tokens)
        asked_values = values[:, : self.queries * different].reshape(batch_size, self.queries, different, -1)
        again = np.repeat(asked_values, self.statements // different, axis=2)

        # A slot holds a filler or a whole statement. Those of a key are in rising order, as its values are.
        asked_slots = first + smallest(for_asked, asked)
        asked_slots = np.sort(asked_slots.reshape(batch_size, self.queries, self.statements), axis=2)
        taken = asked_slots.reshape(batch_size, asked)
        np.put_along_axis(for_others, taken, np.inf, axis=1)
        places = np.concatenate([taken, smallest(for_others, others)], axis=1)
        starts = places + (1 + self.value_tokens) * places.argsort(axis=1).argsort(axis=1)

        said = np.empty((batch_size, stated, 2 + self.value_tokens), dtype=np.int64)
        said[:, :, 0] = STATE
        said[:, :asked, 1] = np.repeat(keys[:, : self.queries], self.statements, axis=1)
        said[:, asked:, 1] = keys[:, self.queries :]
        said[:, :asked, 2:] = again.reshape(batch_size, asked, -1)
        said[:, asked:, 2:] = values[:, self.queries * different :]

        row = np.arange(batch_size)[:, None, None]
        tokens = np.empty((batch_size, self.length + 1), dtype=np.int64)
        tokens[:, :body] = _MARKS + self.keys + self.values + (for_fillers * self.fillers).astype(np.int64)
        tokens[row, starts[:, :, None] + np.arange(2 + self.value_tokens)] = said
        questions = tokens[:, body:].reshape(batch_size, self.queries, 2 + self._answer_tokens)
        questions[:, :, 0] = ASK
        questions[:, :, 1] = keys[:, : self.queries]
        questions[:, :, 2:] = asked_values.reshape(batch_size, self.queries, -1)
        tokens[:, body:] = questions.reshape(batch_size, self._tail)

        is_answer = np.zeros(self.length + 1, dtype=bool)
        is_answer[body:].reshape(self.queries, -1)[:, 2:] = True
        targets = np.where(is_answer[1:], tokens[:, 1:], IGNORE_INDEX)
        return TokenBatch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets))

    @property
    def _stated(self) -> int:
        return self.queries * self.statements + self.needles - self.queries

    @property
    def _answer_tokens(self) -> int:
        """Of one question."""
        return self.value_tokens * (self.statements if self.values_differ else 1)

    @property
    def _tail(self) -> int:
        """Tokens of the questions and their answers."""
        return self.queries * (2 + self._answer_tokens)

    @property
    def _fillers_in_row(self) -> int:
        return self.length + 1 - self._tail - self._stated * (2 + self.value_tokens)

    @property
    def _asked_slots(self) -> tuple[int, int]:
        """The first slot in which an asked statement may stand, and the one behind the last."""
        slots = self._stated + self._fillers_in_row
        # Rounded, so that 0.7 of ten slots is seven of them.
        start, end = (round(share * slots, 6) for share in self.depth)
        return math.ceil(start), math.floor(end)
