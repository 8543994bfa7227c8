"""The needle generator: pairs hidden in real text, for training and for evaluation.

A statement is the three tokens `<|remember|> KEY VALUE`, put between two tokens of the text; a question is `<|recall|>
KEY`, answered by VALUE. Every window draws its own text, keys, values and places, so a model can answer only from what
the window says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccq.data.tokenizer import NeedleVocabulary

STATEMENT_TOKENS = 3
QUESTION_TOKENS = 2
ANSWER_TOKENS = 1


class _Stream(IntEnum):
    """Keeps the random numbers of training and of evaluation apart under the same seed."""

    TRAINING = 0
    EVALUATION = 1


class _Kind(IntEnum):
    TEXT = 0
    MARKER = 1
    KEY = 2
    STATED_VALUE = 3
    ANSWER = 4


_STATEMENT_KINDS = np.array([_Kind.MARKER, _Kind.KEY, _Kind.STATED_VALUE], dtype=np.int64)
_QUESTION_KINDS = np.array([_Kind.MARKER, _Kind.KEY, _Kind.ANSWER], dtype=np.int64)


@dataclass(frozen=True)
class NeedleBatch:
    """Training windows: text with statements, then one answered question for every statement.

    Attributes:
        tokens: int64 [B, L].
        answer: bool [B, L-1] over prediction positions (position i predicts token i + 1): the target is the VALUE of a
            question.
        text: bool [B, L-1]: the target is a token of the text, `<|remember|>` or `<|recall|>`. In neither mask are the
            KEY and the VALUE of a statement and the KEY of a question, which are drawn at random and which nothing
            predicts.
    """

    tokens: Tensor
    answer: Tensor
    text: Tensor

    @property
    def inputs(self) -> Tensor:
        """int64 [B, L-1]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        """int64 [B, L-1]."""
        return self.tokens[:, 1:]


@dataclass(frozen=True)
class NeedleWindows:
    """Evaluation windows of one length, each asking for exactly one of its statements.

    One question a window makes the answers independent samples, so that binomial intervals are exact.

    Attributes:
        tokens: int64 [W, L]; each row ends in `<|recall|> KEY`, and the next token should be the answer.
        answers: int64 [W], the VALUE stated for that KEY.
        depths: float64 [W] in [0, 1): the share of the window's text that stands before the asked statement, counted as
            (text tokens before it) / (text tokens + 1); 0 is the very start and the end lies next to the question.
        depth_bins: the number of equal bins of [0, 1) over which depths are spread evenly.
    """

    tokens: Tensor
    answers: Tensor
    depths: Tensor
    depth_bins: int

    @property
    def length(self) -> int:
        """L, in tokens."""
        return self.tokens.shape[1]


def training_batch(
    tokens: NDArray[Any],
    *,
    seed: int,
    step: int,
    batch_size: int,
    length: int,
    vocabulary: NeedleVocabulary,
    needles: int = 4,
) -> NeedleBatch:
    """Training windows of step `step`: a pure function of its arguments, so a resumed run sees the same data.

    A window is text of `length - 6 * needles` tokens from a uniformly drawn place of the stream, with `needles`
    statements (different keys, different values) at different, uniformly drawn places, then all questions with their
    answers in random order. Row b depends on seed, step and b, not on `batch_size`.

    Args:
        tokens: integer [tokens], the training stream.
        seed, step: each in 0 ... 2**64 - 1; every pair has its own random numbers.
        batch_size: rows B.
        length: tokens L of a window, at least 7 * needles.
        vocabulary: ids of the needle tokens.
        needles: statements in a window.

    Raises:
        ValueError: the length cannot hold the needles, there are too few keys or values, or the stream is shorter than
            the window's text.
        TypeError: the stream is not a one-dimensional integer array.
    """
    tail = needles * (QUESTION_TOKENS + ANSWER_TOKENS)
    text_tokens = _check(tokens, length, needles, tail, vocabulary)
    _check_positive("batch_size", batch_size)
    # Row after row is filled from one sequence of numbers, so a row is the same in a larger batch.
    uniform = _generator(_Stream.TRAINING, seed, step).random((batch_size, 1 + 3 * needles))
    start, places, keys, values = np.split(uniform, 1 + needles * np.arange(3), axis=1)
    statements = _draw_statements(keys, values, vocabulary)
    context, context_kinds = _place(
        _draw_texts(start, tokens, text_tokens), _draw_distinct(places, text_tokens + 1), statements
    )
    # Statements are numbered as their places were drawn, so asking by number is a random order in the text.
    questions = statements.copy()
    questions[:, :, 0] = vocabulary.recall
    rows = np.concatenate([context, questions.reshape(batch_size, tail)], axis=1)
    question_kinds = np.broadcast_to(np.tile(_QUESTION_KINDS, needles), (batch_size, tail))
    kinds = np.concatenate([context_kinds, question_kinds], axis=1)
    target_kinds = torch.from_numpy(kinds[:, 1:])
    return NeedleBatch(
        tokens=torch.from_numpy(rows),
        answer=target_kinds == _Kind.ANSWER,
        text=(target_kinds == _Kind.TEXT) | (target_kinds == _Kind.MARKER),
    )


def evaluation_windows(
    tokens: NDArray[Any],
    *,
    seed: int,
    length: int,
    windows: int,
    vocabulary: NeedleVocabulary,
    needles: int = 4,
    depth_bins: int = 5,
) -> NeedleWindows:
    """Evaluation windows of one length: a pure function of its arguments, the same for every model.

    The asked statement of window w stands at a place drawn uniformly in depth bin w mod `depth_bins`, the other
    statements at different places drawn uniformly. Window w does not depend on `windows`.

    Args:
        tokens: integer [tokens], the held-out stream.
        seed: in 0 ... 2**64 - 1; seed and length together choose the random numbers.
        length: tokens L of a window, the final `<|recall|> KEY` included.
        windows: rows W, at least `depth_bins`; bins differ by one window at most.
        vocabulary: ids of the needle tokens.
        needles: statements in a window, one of which is asked.
        depth_bins: see `NeedleWindows`.

    Raises:
        ValueError: the length cannot hold the needles or the depth bins, there are too few keys, values or windows, or
            the stream is shorter than the window's text.
        TypeError: the stream is not a one-dimensional integer array.
    """
    text_tokens = _check(tokens, length, needles, QUESTION_TOKENS, vocabulary)
    _check_positive("depth_bins", depth_bins)
    if windows < depth_bins:
        raise ValueError(f"windows is {windows}; give at least one for each of the {depth_bins} depth bins")
    all_places = text_tokens + 1
    if all_places < depth_bins:
        raise ValueError(
            f"length {length} leaves {all_places} places for {depth_bins} depth bins; "
            f"give a length of at least {length + depth_bins - all_places}, or fewer bins"
        )
    # The places of a stratum have stratum / depth_bins <= place / all_places < (stratum + 1) / depth_bins.
    stratum = np.arange(windows)[:, None] % depth_bins
    first, end = (-(-edge * all_places // depth_bins) for edge in (stratum, stratum + 1))
    uniform = _generator(_Stream.EVALUATION, seed, length).random((windows, 1 + 3 * needles))
    start, asked, others, keys, values = np.split(uniform, [1, 2, 1 + needles, 1 + 2 * needles], axis=1)
    asked_place = first + _scaled(asked, end - first)
    places = _draw_distinct(others, all_places, taken=asked_place)
    statements = _draw_statements(keys, values, vocabulary)
    context, _ = _place(_draw_texts(start, tokens, text_tokens), places, statements)
    question = np.stack([np.full(windows, vocabulary.recall), statements[:, 0, 1]], axis=1)
    return NeedleWindows(
        tokens=torch.from_numpy(np.concatenate([context, question], axis=1)),
        answers=torch.from_numpy(statements[:, 0, 2].copy()),
        depths=torch.from_numpy(asked_place[:, 0] / all_places),
        depth_bins=depth_bins,
    )


def _generator(stream: _Stream, seed: int, number: int) -> np.random.Generator:
    """Philox with (seed, number) as its key and the stream in the counter: no two of them share random numbers."""
    for name, given in (("seed", seed), ("step or length", number)):
        if not 0 <= given < 2**64:
            raise ValueError(f"{name} is {given}; give a number from 0 to 2**64 - 1")
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=np.array([seed, number], dtype=np.uint64)))


def _scaled(uniform: NDArray[np.float64], count: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Integers in 0 ... count - 1 from numbers in [0, 1); the bias is below count / 2**53."""
    return (uniform * count).astype(np.int64)


def _draw_distinct(
    uniform: NDArray[np.float64], population: int, taken: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Extend each row of `taken` [B, K] (none by default) to different integers in 0 ... population - 1: [B, K + n].

    `uniform` [B, n] gives, for each draw, the position among the integers still free.
    """
    drawn = np.empty((len(uniform), 0), dtype=np.int64) if taken is None else taken
    for column in uniform.T:
        choice = _scaled(column, population - drawn.shape[1])
        for smaller in np.sort(drawn, axis=1).T:
            choice += choice >= smaller
        drawn = np.column_stack([drawn, choice])
    return drawn


def _draw_statements(
    keys: NDArray[np.float64], values: NDArray[np.float64], vocabulary: NeedleVocabulary
) -> NDArray[np.int64]:
    """[B, needles, 3] of `<|remember|> KEY VALUE`, keys and values without replacement and in random order."""
    statements = np.empty((*keys.shape, STATEMENT_TOKENS), dtype=np.int64)
    statements[:, :, 0] = vocabulary.remember
    statements[:, :, 1] = np.array(vocabulary.keys)[_draw_distinct(keys, len(vocabulary.keys))]
    statements[:, :, 2] = np.array(vocabulary.values)[_draw_distinct(values, len(vocabulary.values))]
    return statements


def _draw_texts(start: NDArray[np.float64], tokens: NDArray[Any], text_tokens: int) -> NDArray[np.int64]:
    """[B, text_tokens] from uniformly drawn places of the stream; `start` is [B, 1]."""
    where = _scaled(start, len(tokens) - text_tokens + 1) + np.arange(text_tokens)
    return tokens[where].astype(np.int64)


def _place(
    texts: NDArray[np.int64], places: NDArray[np.int64], statements: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put statement i of each row before its text token `places[row, i]`; the tokens and their kinds, each [B, C]."""
    rows, needles = places.shape
    ranks = places.argsort(axis=1).argsort(axis=1)
    where = (places + STATEMENT_TOKENS * ranks)[:, :, None] + np.arange(STATEMENT_TOKENS)
    row = np.arange(rows)[:, None, None]
    context = np.empty((rows, texts.shape[1] + STATEMENT_TOKENS * needles), dtype=np.int64)
    kinds = np.full_like(context, _Kind.TEXT)
    kinds[row, where] = _STATEMENT_KINDS
    context[row, where] = statements
    context[kinds == _Kind.TEXT] = texts.ravel()
    return context, kinds


def _check(tokens: NDArray[Any], length: int, needles: int, tail: int, vocabulary: NeedleVocabulary) -> int:
    """Check what both generators share; returns how many tokens of text a window holds."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise TypeError(f"tokens is {found}; give a one-dimensional integer numpy array, such as TokenizedCorpus.train")
    _check_positive("needles", needles)
    for name, ids in (("keys", vocabulary.keys), ("values", vocabulary.values)):
        if needles > len(ids):
            raise ValueError(
                f"needles is {needles}, but the vocabulary has {len(ids)} {name}; ask for at most {len(ids)} needles"
            )
    text_tokens = length - STATEMENT_TOKENS * needles - tail
    if text_tokens < needles:
        shortest = length - text_tokens + needles
        raise ValueError(
            f"length {length} is too short for {needles} needles; give at least {shortest} tokens "
            f"({STATEMENT_TOKENS * needles} for statements, {tail} for questions, {needles} of text), or fewer needles"
        )
    if len(tokens) < text_tokens:
        raise ValueError(
            f"the token stream has {len(tokens)} tokens, but a window of length {length} needs {text_tokens} tokens "
            "of text; give a larger corpus or a shorter length"
        )
    return text_tokens


def _check_positive(name: str, given: int) -> None:
    if given < 1:
        raise ValueError(f"{name} is {given}; give at least 1")
