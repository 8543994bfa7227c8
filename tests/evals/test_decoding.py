"""Greedy answers against one prompt at a time, a whole text in every call; no state, no batch, no shared beginnings."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ccq.evals import decoding
from ccq.evals.decoding import Answer, _trunk, greedy_answers
from ccq.evals.harness import LoadedModel
from ccq.models import CCQCache, CCQForCausalLM
from ccq.processes import Processes

BEGINNING = [int(x) for x in torch.randint(1, 257, (70,), generator=torch.Generator().manual_seed(0))]


def departing(place: int, *tokens: int) -> list[int]:
    """The common text with two tokens put in, as a needle is put into a haystack."""
    return [*BEGINNING[:place], *tokens, *BEGINNING[place:]]


PROMPTS = [
    departing(20, 200, 7),
    departing(60, 3, 9),
    departing(41, 8, 8),
    departing(60, 3, 4),
    [5, *BEGINNING],
    departing(60, 3, 9),
    BEGINNING[:9],
    [17],
]


@torch.inference_mode()
def one_by_one(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    return [one_by_one(loaded.model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(("batch_size", "prefill_tokens"), [(1, 1000), (4, 1000), (3, 16), (8, 1)])
def test_answers_do_not_depend_on_batches_and_pieces(
    loaded: LoadedModel, expected: list[list[int]], batch_size: int, prefill_tokens: int
) -> None:
    assert len({tuple(answer) for answer in expected}) > 4, "the answers must tell the prompts apart"
    answers = greedy_answers(
        loaded.model, PROMPTS, max_new_tokens=12, batch_size=batch_size, prefill_tokens=prefill_tokens
    )
    assert [answer.tokens for answer in answers] == expected


class CallsAgain:
    """In the place of `GraphRecorder`, without a GPU: it replays by calling again, and what it replays leaves its
    results where the recording left them.
    """

    made = 0

    def __init__(self, device: torch.device) -> None:
        type(self).made += 1

    def run(self, work: Callable[[], None], *, may_wait: bool) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_replayed_steps_give_the_same_answers(
    loaded: LoadedModel, expected: list[list[int]], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recording serves all full batches, whatever was read before it and in between."""
    monkeypatch.setattr(decoding, "GraphRecorder", CallsAgain)
    monkeypatch.setattr(decoding, "_can_be_recorded", lambda cache: isinstance(cache, CCQCache))
    CallsAgain.made = 0
    answers = greedy_answers(loaded.model, PROMPTS, max_new_tokens=12, batch_size=batch_size)
    assert [answer.tokens for answer in answers] == expected
    assert CallsAgain.made == isinstance(loaded.model, CCQForCausalLM)


def test_a_model_that_cannot_be_recorded_decodes_eagerly(
    loaded: LoadedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(CallsAgain):
        def run(self, work: Callable[[], None], *, may_wait: bool) -> None:
            work()
            if not may_wait:
                raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(decoding, "GraphRecorder", Refuses)
    monkeypatch.setattr(decoding, "_can_be_recorded", lambda cache: isinstance(cache, CCQCache))
    CallsAgain.made = Refuses.made = 0
    answers = greedy_answers(loaded.model, PROMPTS, max_new_tokens=12, batch_size=2)
    assert [answer.tokens for answer in answers] == expected
    assert Refuses.made == isinstance(loaded.model, CCQForCausalLM)


def test_common_beginnings_are_read_once(loaded: LoadedModel) -> None:
    # 72 tokens each; the others leave the first after 20, 41 and 61 of them.
    family = [PROMPTS[i] for i in (1, 0, 2, 3)]
    answers = greedy_answers(loaded.model, family, max_new_tokens=1, batch_size=1)
    # The first is read but for its last token, whose logits begin its own answer.
    trunk = 71
    own = sum(72 - shared for shared in (71, 20, 41, 61))
    assert sum(answer.read for answer in answers) == trunk + own


def test_an_answer_ends_at_an_end_token_or_when_it_is_enough(loaded: LoadedModel, expected: list[list[int]]) -> None:
    end = frozenset({expected[0][3], expected[4][6]})
    asked: list[int] = []

    def is_enough(number: int, tokens: list[int]) -> bool:
        asked.append(number)
        return number in (1, 6) and len(tokens) == 5

    answers = greedy_answers(
        loaded.model, PROMPTS, max_new_tokens=12, batch_size=4, end_tokens=end, is_enough=is_enough
    )
    for number, (answer, full) in enumerate(zip(answers, expected, strict=True)):
        stop = next((i for i, token in enumerate(full) if token in end), len(full))
        assert answer.tokens == full[: min(stop, 5) if number in (1, 6) else stop]
    assert set(asked) <= set(range(len(PROMPTS)))


class Sums:
    """A cache that cannot be copied to several rows."""

    def __init__(self) -> None:
        self.sums = torch.zeros(1)


def adder(tokens: torch.Tensor, *, use_cache: bool, cache_params: Sums | None = None) -> Any:
    assert use_cache
    cache = cache_params or Sums()
    cache.sums = cache.sums + tokens.sum(dim=1)
    logits = torch.nn.functional.one_hot(cache.sums.long() % 11, 11).float()[:, None]
    return SimpleNamespace(logits=logits, cache_params=copy.copy(cache))


@dataclass(frozen=True)
class Thread(Processes):
    """Threads in the place of processes, which meet when all have made their part."""

    barrier_of_all: threading.Barrier | None = None
    made: list[Any] = field(default_factory=list)

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        assert self.barrier_of_all is not None
        self.made[self.rank] = make()
        self.barrier_of_all.wait(60)
        return list(self.made)


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_several_processes_give_and_count_what_one_does(loaded: LoadedModel, count: int, batch_size: int) -> None:
    for model, prompts in ((loaded.model, PROMPTS), (adder, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 7]])):

        def ask(group: Processes, model: Any = model, prompts: Any = prompts) -> list[Answer]:
            return greedy_answers(model, prompts, max_new_tokens=4, batch_size=batch_size, processes=group)

        barrier, made = threading.Barrier(count), [None] * count
        groups = [Thread(rank, count, barrier_of_all=barrier, made=made) for rank in range(count)]
        with ThreadPoolExecutor(count) as threads:
            found = list(threads.map(ask, groups))
        assert found == [ask(Processes())] * count


def test_a_cache_that_cannot_be_copied_to_rows_is_done_without() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 4]]
    answers = greedy_answers(adder, prompts, max_new_tokens=3, batch_size=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        total, tokens = sum(prompt), []
        for _ in range(3):
            tokens.append(total % 11)
            total += tokens[-1]
        assert answer.tokens == tokens


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12))
def test_the_trunk_shares_the_most(rows: list[list[int]]) -> None:
    def shared(a: list[int], b: list[int]) -> int:
        length = min(len(a), len(b))
        return next((i for i in range(length) if a[i] != b[i]), length)

    trunk, found = _trunk([np.array(row) for row in rows])
    assert found.tolist() == [shared(rows[trunk], row) for row in rows]
    assert found.sum() == max(sum(shared(a, b) for b in rows) for a in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, "a prompt is empty"),
        ({"batch_size": 0}, "batch_size is 0; give at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give at least 1"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0; give at least 1"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": [[1]], "max_new_tokens": 1, "batch_size": 1} | changes
    with pytest.raises(ValueError, match=message):
        greedy_answers(lambda tokens, use_cache: None, **arguments)


def test_models_that_diverged_or_give_no_cache_are_named() -> None:
    def diverged(tokens: torch.Tensor, *, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.full((1, 1, 3), torch.nan), cache=object())

    with pytest.raises(ValueError, match="NaN logits; was its training stable"):
        greedy_answers(diverged, [[1]], max_new_tokens=1, batch_size=1)

    def forgetful(tokens: torch.Tensor, *, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, 1, 3))

    with pytest.raises(ValueError, match="gives back no cache"):
        greedy_answers(forgetful, [[1]], max_new_tokens=1, batch_size=1)
