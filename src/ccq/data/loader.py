"""Windows of a token stream in an order that is a pure function of the seed.

Sample i is window P(i mod n) of the stream's n windows, where P is a pseudo-random permutation keyed by the seed and by
the epoch i // n. It is computed for one index at a time, so nothing is shuffled in memory, and a run goes on at any i
as fast as it starts. The samples of an optimizer step are dealt to the processes by i mod processes; the step holds the
same windows for any number of processes, of micro-batches and of background workers.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ccq.data.shards import TokenStream

IGNORE_INDEX = -100
"""Target that no loss counts; the default of `torch.nn.functional.cross_entropy`."""

_ROUNDS = 16
"""With 8, some orders of five or six windows are 15 % likelier than others; with 16 no test sees a difference."""


@dataclass(frozen=True)
class TokenBatch:
    """Windows as a model takes them: each token and the one that follows it.

    Attributes:
        inputs: int64 [B, T]; of packed documents [1, B * T], window after window.
        targets: int64, as inputs: the token after each input, already shifted. A model that shifts its `labels` itself
            must not get them as such. Of packed documents, `IGNORE_INDEX` where the next token starts another document.
        cu_seqlens: of packed documents, int32 [N + 1], else None: where sequences start in the row, and its length at
            the end. A sequence is a document, or what a window holds of it. Not padded: N varies from batch to batch.
        positions: of packed documents, int64 [1, B * T], else None: the place of each token in its sequence, from 0.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None

    @property
    def target_tokens(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        cu_seqlens, positions = (
            None if tensor is None else tensor.to(device, non_blocking=True)
            for tensor in (self.cu_seqlens, self.positions)
        )
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (self.inputs, self.targets))
        return TokenBatch(inputs, targets, cu_seqlens, positions)


class TokenWindows:
    """The windows of a stream in the order of the text. Window w reads tokens w T ... (w + 1) T, both included.

    Each has T inputs and T targets; neighbours share one token, which is the last target of one and the first input of
    the other, so that every token but the first is a target once. The last tokens, too few for a window, are not used.

    Args:
        stream: see `ccq.data.shards`.
        length: T.

    Raises:
        ValueError: the stream is too short for one window.
    """

    def __init__(self, stream: TokenStream, length: int) -> None:
        if length < 1:
            raise ValueError(f"length is {length}; give at least 1 token")
        self.stream, self.length = stream, length
        if not len(self):
            raise ValueError(
                f"a window of {length:,} tokens and the one after them needs {length + 1:,} tokens, but the stream has "
                f"{stream.tokens:,}; give shorter windows or prepare more text"
            )

    def __len__(self) -> int:
        return max(self.stream.tokens - 1, 0) // self.length

    def batch(self, windows: Sequence[int], *, pack_documents: bool = False) -> TokenBatch:
        """The windows of these numbers, one a row [B, T]; with `pack_documents` one after the other in one row.

        Raises:
            IndexError: a window does not exist.
        """
        for window in windows:
            if not 0 <= window < len(self):
                raise IndexError(f"window {window} does not exist; there are {len(self):,}, counted from 0")
        starts = [window * self.length for window in windows]
        tokens = np.empty((len(starts), self.length + 1), np.int64)
        for number, start in enumerate(starts):
            tokens[number] = self.stream.read(start, start + self.length + 1)
        targets = tokens[:, 1:].copy()
        if not pack_documents:
            return TokenBatch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets))
        boundaries = []
        for row, start in enumerate(starts):
            # Places 0 ... T of the window at which a document starts; T is the last target.
            places = self.stream.document_starts(start, start + self.length + 1) - start
            targets[row, places[places > 0] - 1] = IGNORE_INDEX
            inside = places[(places > 0) & (places < self.length)]
            boundaries.append(row * self.length + np.concatenate([np.zeros(1, np.int64), inside]))
        total = len(starts) * self.length
        cu_seqlens = np.concatenate([*boundaries, np.array([total])])
        positions = np.arange(total) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        return TokenBatch(
            torch.from_numpy(tokens[:, :-1].reshape(1, total)),
            torch.from_numpy(targets.reshape(1, total)),
            torch.from_numpy(cu_seqlens.astype(np.int32)),
            torch.from_numpy(positions[None]),
        )


class TokenLoader:
    """Endless training batches: shuffled windows, dealt to processes, one tuple of micro-batches an optimizer step.

    Args:
        stream: what to read, such as `TokenFolder.train`.
        length: input tokens T of a window.
        batch_size: windows of an optimizer step, over all processes.
        rows: windows of a micro-batch B.
        seed: chooses the order, 0 ... 2**63 - 1.
        process, processes: which of how many processes this is; sample i goes to process i mod processes.
        pack_documents: whether sequences restart at each document (see `TokenBatch`).
        workers: background processes that read ahead; 0 reads when asked.

    Raises:
        ValueError: `batch_size` is no multiple of `processes * rows`, or the stream is too short for one window.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        length: int = 4096,
        batch_size: int,
        rows: int,
        seed: int = 0,
        process: int = 0,
        processes: int = 1,
        pack_documents: bool = False,
        workers: int = 0,
    ) -> None:
        self._windows = TokenWindows(stream, length)
        if min(batch_size, rows, processes) < 1 or not 0 <= process < processes or workers < 0:
            raise ValueError(
                f"batch_size, rows and processes must be at least 1, process one of 0 ... processes - 1, and workers "
                f"not negative; got {batch_size}, {rows}, {processes}, {process} and {workers}"
            )
        check_micro_batches(batch_size, rows, processes)
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed}; give a number from 0 to 2**63 - 1")
        self._batch_size, self._rows, self._seed = batch_size, rows, seed
        self._process, self._processes = process, processes
        self._pack_documents, self._workers = pack_documents, workers
        self._next_sample = 0

    @property
    def windows(self) -> int:
        """Windows of the stream: samples of one epoch."""
        return len(self._windows)

    @property
    def epoch(self) -> float:
        """How often the stream has been read, counting the step given out last."""
        return self._next_sample / self.windows

    def state_dict(self) -> dict[str, Any]:
        """Where the next step starts, as JSON: the same on every process."""
        return {
            "seed": self._seed,
            "next_sample": self._next_sample,
            "length": self._windows.length,
            "data": self._windows.stream.sha256,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any number of processes; takes effect on the next `iter`.

        Raises:
            ValueError: the state is of other data, another seed or another window length.
        """
        for name, own in self.state_dict().items():
            if name != "next_sample" and state[name] != own:
                raise ValueError(
                    f"the saved data order has {name} {state[name]!r}, this loader {own!r}; go on with the same data, "
                    "seed and window length, or start anew"
                )
        self._next_sample = int(state["next_sample"])

    def __iter__(self) -> Iterator[tuple[TokenBatch, ...]]:
        """Steps from the current state on; each is this process's micro-batches in order."""
        samples = _Samples(self._next_sample + self._process, self._processes, self._rows)
        # Started anew: the parent may hold a GPU and threads, and where a server forks them its end is theirs.
        batches = DataLoader(
            _ShuffledWindows(self._windows, self._seed, self._pack_documents),
            batch_size=None,
            sampler=samples,
            num_workers=self._workers,
            worker_init_fn=_begin_worker if self._workers else None,
            multiprocessing_context="spawn" if self._workers else None,
        )
        step: list[TokenBatch] = []
        for batch in batches:
            step.append(batch)
            if len(step) * self._rows * self._processes == self._batch_size:
                self._next_sample += self._batch_size
                yield tuple(step)
                step = []


def _begin_worker(worker: int) -> None:
    """A signal to the whole group of processes, as Ctrl-C is one, must reach who can save, and not end a worker that is
    still read from. Workers end with the process that reads from them.

    They end without the interpreter's farewell: it stops the thread that still sends what nobody wants any more, and
    where that is inside torch the process aborts.
    """
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)
    atexit.register(os._exit, 0)


class _Samples(Sampler[list[int]]):
    """Sample numbers of micro-batch after micro-batch of one process, without end."""

    def __init__(self, first: int, stride: int, rows: int) -> None:
        self._first, self._stride, self._rows = first, stride, rows

    def __iter__(self) -> Iterator[list[int]]:
        sample = self._first
        while True:
            yield list(range(sample, sample + self._stride * self._rows, self._stride))
            sample += self._stride * self._rows


class _ShuffledWindows(Dataset[TokenBatch]):
    """Micro-batches by their sample numbers."""

    def __init__(self, windows: TokenWindows, seed: int, pack_documents: bool) -> None:
        self._windows, self._seed, self._pack_documents = windows, seed, pack_documents

    def __getitem__(self, samples: Sequence[int]) -> TokenBatch:
        windows = [window_of_sample(sample, len(self._windows), self._seed) for sample in samples]
        return self._windows.batch(windows, pack_documents=self._pack_documents)


def window_of_sample(sample: int, windows: int, seed: int) -> int:
    """The window that a sample reads: each of the `windows` once in every epoch, in an order of its own."""
    epoch, index = divmod(sample, windows)
    return permute(index, windows, _round_keys(seed, epoch))


def permute(index: int, size: int, keys: Sequence[int]) -> int:
    """Image of `index` under a pseudo-random permutation of 0 ... size - 1.

    A generalised Feistel network on Z_a x Z_b with a b just above `size`, walked until the image is inside: J. Black
    and P. Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002. Fewer than a of the a b points lie outside, so a
    second walk is rare.

    Args:
        index: 0 ... size - 1.
        size: at least 1.
        keys: one 64-bit key a round.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = index % a, index // a
        for number, key in enumerate(keys):
            modulus = b if number % 2 else a
            left, right = right, (left + _mix(right ^ key)) % modulus
        # After an even number of rounds the halves are on their own sides again.
        index = right * a + left
        if index < size:
            return index


def _mix(value: int) -> int:
    """64 bits to 64 bits, every input bit reaching every output bit: the finaliser of splitmix64 (G. Steele, D. Lea and
    C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_128(f"{seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(np.frombuffer(digest, "<u8").tolist())


def check_micro_batches(batch_size: int, rows: int, processes: int) -> None:
    """Every process must get whole micro-batches of `rows` windows out of a step of `batch_size`.

    Raises:
        ValueError: with the numbers that would do.
    """
    if batch_size % (processes * rows):
        raise ValueError(
            f"a step of {batch_size} windows cannot be dealt to {processes} processes in micro-batches of {rows}; "
            f"give a batch size that is a multiple of {processes * rows}{_other_rows(batch_size, processes)}"
        )


def _other_rows(batch_size: int, processes: int) -> str:
    """The micro-batches that would fit, in words."""
    if batch_size % processes:
        return ""
    share = batch_size // processes
    divisors = [rows for rows in range(1, share + 1) if share % rows == 0]
    return f", or one of these for rows: {', '.join(map(str, divisors))}"
