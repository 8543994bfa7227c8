"""Greedy answers to long prompts: prompts are read in pieces, what several of them begin with is read once, and rows of
a batch have equal lengths, so that nothing is padded. On a GPU the tokens of an answer are replayed from a CUDA graph,
because the processor takes longer to launch the kernels of one token than the GPU to run them. Several processes divide
the batches.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.cuda_graphs import GraphRecorder
from ccq.evals.perplexity import evaluation_mode
from ccq.models.cache import CCQCache
from ccq.processes import Processes

PREFILL_TOKENS = 32_768
"""Tokens of one call, over all rows: bounds the memory that a prompt of any length takes beside the model's state."""
_CACHES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True)
class Answer:
    """One prompt's answer.

    Attributes:
        tokens: the answer, without the token that ended it.
        read: how many tokens were read for it, its share of a common beginning included.
    """

    tokens: list[int]
    read: float


def greedy_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    end_tokens: frozenset[int] = frozenset(),
    is_enough: Callable[[int, list[int]], bool] = lambda number, tokens: False,
    on_answers: Callable[[int], None] = lambda count: None,
    prefill_tokens: int = PREFILL_TOKENS,
    processes: Processes | None = None,
) -> list[Answer]:
    """The most likely token, again and again, after each prompt.

    An answer does not depend on the prompts beside it but for rounding. Where the model's cache can be copied to
    several rows, prompts are read along a trunk: one of them, whose state is copied where others leave it. Every token
    of a prompt passes through the model exactly once, whether in the trunk or behind it.

    Several processes take the batches in turn, so the answers are those of one process bit for bit. Each of them reads
    the trunk for itself, in the same pieces; `Answer.read` counts it once.

    Args:
        model: a causal LM of transformers, this library's among them.
        prompts: token ids, each at least one.
        max_new_tokens: the most tokens of an answer.
        batch_size: rows of a call.
        end_tokens: end an answer and are not part of it.
        is_enough: told a prompt's number and its answer so far, ends it there.
        on_answers: told how many answers a batch has given.
        prefill_tokens: tokens of one call, over all rows.
        processes: with the same model, all of which call this; None for this one alone.

    Raises:
        ValueError: a prompt is empty, a number is not positive, the model gives NaN, or it gives back no cache.
    """
    for name, given in (
        ("max_new_tokens", max_new_tokens),
        ("batch_size", batch_size),
        ("prefill_tokens", prefill_tokens),
    ):
        if given < 1:
            raise ValueError(f"{name} is {given}; give at least 1")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty; give at least one token")
    rows = [np.array(prompt, dtype=np.int64) for prompt in prompts]
    group = processes or Processes()

    def own_answers() -> dict[int, Answer]:
        reader, answers = _Reader(model, prefill_tokens), dict[int, Answer]()
        steps = _Steps(reader, batch_size)
        with evaluation_mode(model) as device:
            trunk, shared = _trunk(rows)
            batches = _batches(rows, shared, batch_size)
            stem = _Stem(reader, torch.from_numpy(rows[trunk][None]).to(device))
            own = range(group.rank, len(batches), group.count)
            for place in range(own[-1] + 1 if own else 0):
                common, numbers = batches[place]
                if place not in own:
                    stem.follow(common, len(numbers))
                    continue
                batch = torch.from_numpy(np.stack([rows[number] for number in numbers])).to(device)
                before, cache = reader.read, stem.branch(common, len(batch))
                logits, cache = reader(batch if cache is None else batch[:, common:], cache)
                read = (reader.read - before) / len(batch)
                found = _decode(
                    steps.behind(cache, len(batch)),
                    logits,
                    numbers,
                    max_new_tokens=max_new_tokens,
                    end_tokens=end_tokens,
                    is_enough=is_enough,
                )
                answers |= {number: Answer(tokens, read) for number, tokens in zip(numbers, found, strict=True)}
                on_answers(len(batch))
        return answers

    answers = {number: answer for found in group.gather(own_answers) for number, answer in found.items()}
    return [answers[number] for number in range(len(prompts))]


def _batches(
    rows: Sequence[NDArray[np.int64]], shared: NDArray[np.int64], batch_size: int
) -> list[tuple[int, list[int]]]:
    """Numbers of rows of one length, with what all of them share with the trunk; that never decreases."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number in np.argsort(shared, kind="stable"):
        by_length[len(rows[number])].append(int(number))
    batches = []
    for length, numbers in by_length.items():
        for start in range(0, len(numbers), batch_size):
            chosen = numbers[start : start + batch_size]
            # At least one token is left, whose logits begin the answer.
            batches.append((min(int(shared[chosen[0]]), length - 1), chosen))
    return sorted(batches)


class _Reader:
    """Reads tokens in pieces, into a cache; `read` counts those of prompts."""

    def __init__(self, model: Any, prefill_tokens: int) -> None:
        self.model, self.prefill_tokens, self.read = model, prefill_tokens, 0
        forward = getattr(model, "forward", model)
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
        self.cache_name = ""

    def __call__(self, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits [B, vocabulary] after the last of `tokens` [B, T], and the cache."""
        self.read += tokens.numel()
        logits = None
        for piece in tokens.split(max(1, self.prefill_tokens // len(tokens)), dim=1):
            logits, cache = self.step(piece, cache)
        assert logits is not None
        return logits, cache

    def step(self, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """The same in one call."""
        given = {} if cache is None else {self.cache_name: cache}
        output = self.model(tokens, use_cache=True, **self.options, **given)
        if not self.cache_name:
            self.cache_name = next((name for name in _CACHES if getattr(output, name, None) is not None), "")
            if not self.cache_name:
                raise ValueError(
                    f"{type(self.model).__name__} gives back no cache ({', '.join(_CACHES)}), without which answers "
                    "cannot be generated; is use_cache switched off in its configuration?"
                )
        return output.logits[:, -1], getattr(output, self.cache_name)


class _Steps:
    """Calls that read one token of every row behind a prompt. For full batches they are replayed where that is
    possible: with this library's states, whose addresses stay, on a GPU.
    """

    def __init__(self, reader: _Reader, full: int) -> None:
        self.reader, self.full = reader, full
        self.recorded: _RecordedStep | None = None
        self.may_record = True

    def behind(self, cache: Any, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """tokens [rows, 1] -> logits [rows, vocabulary], each call going on where the one before ended."""
        if rows == self.full and self.recorded is None and self.may_record and _can_be_recorded(cache):
            try:
                self.recorded = _RecordedStep(self.reader, cache, rows)
            except RuntimeError:  # part of the model waits for the GPU, as write rules composed from PyTorch may
                self.may_record = False
        if rows == self.full and self.recorded is not None:
            self.recorded.go_on(cache)
            return self.recorded

        def step(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            logits, cache = self.reader.step(tokens, cache)
            return logits

        return step


def _can_be_recorded(cache: Any) -> bool:
    return (
        isinstance(cache, CCQCache)
        and cache.positions is not None
        and cache.positions.is_cuda
        and all(layer.is_compileable for layer in cache.layers)
    )


class _RecordedStep:
    """A step on a state of its own, recorded as a CUDA graph."""

    def __init__(self, reader: _Reader, cache: CCQCache, rows: int) -> None:
        assert cache.positions is not None
        device = cache.positions.device
        self.cache = copy.deepcopy(cache)
        self.tokens = torch.zeros((rows, 1), dtype=torch.int64, device=device)

        def step() -> None:
            self.logits, _ = reader.step(self.tokens, self.cache)

        recorder = GraphRecorder(device)
        for may_wait in (True, False):
            recorder.run(step, may_wait=may_wait)
        self.replay = recorder.record(step)

    def go_on(self, cache: CCQCache) -> None:
        """Take over what another cache has read."""
        for own, other in zip(self.cache.layers, cache.layers, strict=True):
            own.update(other.state)
        assert self.cache.positions is not None and cache.positions is not None
        self.cache.positions.copy_(cache.positions)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.replay()
        return self.logits


class _Stem:
    """The state of the model along one row [1, T], read only as far as needed."""

    def __init__(self, reader: _Reader, row: torch.Tensor) -> None:
        self.reader, self.row, self.position, self.cache = reader, row, 0, None
        self.can_branch: bool | None = None
        """Whether the model's cache can be copied to several rows; None as long as that is not known."""

    def branch(self, position: int, rows: int) -> Any:
        """A cache of `rows` copies of what the row holds before `position`, which never decreases; None for nothing,
        or where the model's cache cannot be copied.
        """
        if position == 0 or self.can_branch is False:
            return None
        self._advance(position)
        copied: Any = copy.deepcopy(self.cache)
        if rows > 1:
            try:
                copied.batch_repeat_interleave(rows)
            except (AttributeError, NotImplementedError):
                self.can_branch = False
                return None
            self.can_branch = True
        return copied

    def follow(self, position: int, rows: int) -> None:
        """Come to the same state as by `branch`, for a batch of another process."""
        if self.can_branch:
            self._advance(position)
        else:
            self.branch(position, rows)

    def _advance(self, position: int) -> None:
        if position > self.position:
            _, self.cache = self.reader(self.row[:, self.position : position], self.cache)
            self.position = position


def _trunk(rows: Sequence[NDArray[np.int64]]) -> tuple[int, NDArray[np.int64]]:
    """The row [of N] that shares the longest beginnings with the others, summed, and the lengths of those [N].

    In lexicographic order, what two rows share is the least that neighbours between them share.
    """
    # Big-endian bytes compare as the numbers do.
    order = sorted(range(len(rows)), key=[row.astype(">i8").tobytes() for row in rows].__getitem__)
    neighbours = np.array([_shared(rows[a], rows[b]) for a, b in itertools.pairwise(order)], dtype=np.int64)
    best, best_shared = 0, np.full(len(rows), -1)
    for place, row in enumerate(order):
        shared = np.full(len(rows), len(rows[row]))
        shared[order[place + 1 :]] = np.minimum.accumulate(neighbours[place:])
        shared[order[:place]] = np.minimum.accumulate(neighbours[:place][::-1])[::-1]
        if shared.sum() > best_shared.sum():
            best, best_shared = row, shared
    return best, best_shared


def _shared(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two rows begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _decode(
    step: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    numbers: Sequence[int],
    *,
    max_new_tokens: int,
    end_tokens: frozenset[int],
    is_enough: Callable[[int, list[int]], bool],
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in numbers]
    waiting = set(range(len(numbers)))
    for number in range(max_new_tokens):
        if logits.isnan().any():
            raise ValueError("the model gives NaN logits; was its training stable, and does its dtype suit it?")
        best = logits.argmax(dim=-1)
        tokens = best.tolist()
        for row in sorted(waiting):
            if tokens[row] not in end_tokens:
                answers[row].append(tokens[row])
            if tokens[row] in end_tokens or is_enough(numbers[row], answers[row]):
                waiting.remove(row)
        if not waiting or number == max_new_tokens - 1:
            break
        logits = step(best[:, None])
    return answers
