"""`ccq bench operator` on a GPU: the read step of this library beside what a user would compose.

Three functions compute the same thing: "triton" and "torch" are the backends of `curvature_conditioned_query`,
"composed" is flash-linear-attention's linear attention with PyTorch around it. All are measured in one process and in
turn, round by round, after a warm-up of their own, so that clocks and whatever else the machine does meet all of them
alike.

Device time is that of CUDA graph replays between two events. Replays follow each other, so where q and k fit into the
card's L2 cache (one row) part of them is read from there, as after the layer that produced them. Eager wall time is
that of one call from an idle card until the card is idle again; it holds what the processor needs to launch. "forward"
runs without autograd, "forward_backward" with it, and gives the gradients of q, k and the gate.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.bench.machine import environment, gpu_environment
from ccq.bench.measure import (
    WARMUP,
    Card,
    Measurement,
    brief,
    device_timer,
    mebibytes,
    milliseconds,
    rounds,
    run_afresh,
    wall_timer,
    wrapped,
)
from ccq.bench.operator import SCHEMA, Shape
from ccq.ops.query import curvature_conditioned_query, l2_normalize

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PASSES = ("forward", "forward_backward")
LONG_TOKENS = (8192, 131_072)
FLOOR_CHUNK = 128
FLOOR_TILE = 64


class Inputs(NamedTuple):
    """What every function is given."""

    q: Tensor
    k: Tensor
    gate: Tensor
    gradient: Tensor
    """Of the query that comes out."""

    @classmethod
    def draw(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Normal queries; normal keys with a common mean that carries half of them; gates in (0, 1)."""
        random = torch.Generator(device).manual_seed(0)
        rows, tokens, heads, size = shape

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=random, dtype=dtype, device=device)

        k = normal(rows, tokens, heads, size).add_(normal(rows, 1, heads, size))
        gate = torch.rand(rows, tokens, heads, generator=random, device=device)
        q, gradient = normal(rows, tokens, heads, size), normal(rows, tokens, heads, size)
        return cls(q.requires_grad_(), k.requires_grad_(), gate.requires_grad_(), gradient)


class Candidate(NamedTuple):
    """One function, in two forms."""

    query: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(q, k, gate) -> the corrected query: what is timed."""
    correction: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(q, k, gate) -> the correction before the gate: what is compared."""

    def run(self, name: str, inputs: Inputs) -> Any:
        """One pass, by its name."""
        q, k, gate, gradient = inputs
        if name == "forward":
            with torch.no_grad():
                return self.query(q, k, gate)
        # Leaves of their own: autograd ties a leaf to the stream that first used it, a graph is captured on another.
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, gate))
        return torch.autograd.grad(self.query(*leaves), leaves, gradient)


def composed_read_step(
    q: Tensor, k: Tensor, gate: Tensor, linear_attention: Callable[..., tuple[Tensor, Any]]
) -> tuple[Tensor, Tensor]:
    """The read step from a library's causal linear attention o_i = sum over j <= i of (q_i . k_j) v_j.

    With the normalised keys as values too, o is M q; a cumulative sum gives the running mean; both over t is the
    covariance times q (paper, equations 8 and 9). q, k [B, T, H, D], gate [B, T, H]. Returns the query in the dtype of
    q and the correction in float32 (float64 for float64 input).
    """
    query, key = l2_normalize(q), l2_normalize(k)
    kept = query.dtype
    count = torch.arange(1, q.shape[1] + 1, dtype=kept, device=q.device).view(1, -1, 1, 1)
    low_query, low_key = query.to(q.dtype), key.to(k.dtype)
    moment_times_query, _ = linear_attention(low_query, low_key, low_key, scale=1.0, normalize=False)
    mean = key.cumsum(1) / count
    correction = moment_times_query.to(kept) / count - mean * (mean * query).sum(-1, keepdim=True)
    return (query - gate.to(kept).unsqueeze(-1) * correction).to(q.dtype), correction


def _of_this_library(backend: str) -> Candidate:
    def correction(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
        found = curvature_conditioned_query(q, k, gate, return_correction=True, backend=backend).correction
        assert found is not None
        return found

    return Candidate(lambda q, k, gate: curvature_conditioned_query(q, k, gate, backend=backend).query, correction)


def candidates(notes: list[str]) -> dict[str, Candidate]:
    """The functions that can be measured here; `notes` receives why one cannot."""
    found = {"triton": _of_this_library("triton"), "torch": _of_this_library("torch")}
    try:
        linear_attention = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError) as error:  # without Triton the package is there, but empty
        notes.append(f"composed: left out, flash-linear-attention cannot be used here ({brief(error)})")
    else:
        found["composed"] = Candidate(
            lambda q, k, gate: composed_read_step(q, k, gate, linear_attention)[0],
            lambda q, k, gate: composed_read_step(q, k, gate, linear_attention)[1],
        )
    return found


def floor_bytes(shape: Shape, element: int) -> dict[str, int]:
    """Bytes that must move at least, by pass, with `element` bytes a number.

    Forward reads q and k, writes y, and writes and reads the chunk states once:

        3 B T H D element + 2 B H ceil(T / 128) S element

    S is half a symmetric D x D state in tiles of 64, n (n + 1) / 2 tiles with n = ceil(D / 64). Backward reads q, k and
    dy, writes dq and dk, and writes and reads both the states and their gradients once:

        5 B T H D element + 4 B H ceil(T / 128) S element

    "forward_backward" is the sum. States are counted in the dtype of the input; gates and vectors a chunk are left out
    (less than 2 %). Chunks of 128 are a choice, not a bound: longer ones move fewer states and multiply more.
    """
    rows, tokens, heads, size = shape
    tile = min(FLOOR_TILE, size)
    tiles = -(-size // tile)
    states = rows * heads * -(-tokens // FLOOR_CHUNK) * (tiles * (tiles + 1) // 2) * tile**2 * element
    sequence = rows * tokens * heads * size * element
    forward = 3 * sequence + 2 * states
    return {"forward": forward, "forward_backward": forward + 5 * sequence + 4 * states}


def _memory(card: Card, candidate: Candidate, inputs: Inputs) -> dict[str, dict[str, int]]:
    """Bytes above the inputs (q, k, gate and the gradient of the query), by pass.

    "kept_bytes" is everything that lives between forward and backward; "output_bytes" of it are the query itself.
    """
    q, k, gate, gradient = inputs
    card.synchronize()
    card.reset_peak()
    before = card.allocated()
    candidate.run("forward", inputs)
    card.synchronize()
    forward = card.peak() - before
    card.reset_peak()
    before = card.allocated()
    query = candidate.query(q, k, gate)
    kept = card.allocated() - before
    gradients = torch.autograd.grad(query, (q, k, gate), gradient)
    card.synchronize()
    both = {"peak_bytes": card.peak() - before, "kept_bytes": kept, "output_bytes": query.nbytes}
    del gradients
    return {"forward": {"peak_bytes": forward}, "forward_backward": both}


def _exact_correction(inputs: Inputs) -> Tensor:
    """The correction by the chunked PyTorch form in float64."""
    with torch.no_grad():
        return _of_this_library("torch").correction(inputs.q.double(), inputs.k.double(), inputs.gate)


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


class OperatorMeasurement(Measurement):
    """One run of the benchmark."""

    def __init__(self, figures: dict[str, Any], *, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(figures, **settings)
        self.dtype = dtype
        self.candidates: dict[str, Candidate] = {}

    def first_call(self, shape: Shape, dtype: str) -> None:
        """Forward + backward in a fresh process with empty caches."""
        try:
            found = time_first_call(shape, dtype, limit=max(self.limit, 120.0))
        except RuntimeError as error:
            self.note(f"first call: not measured ({error})")
        else:
            self.figures["first_call"] = found
            self.say(
                f"first forward + backward, fresh process, empty caches: {found['first_call_seconds']:.1f} s "
                f"(next {1000 * found['second_call_seconds']:.1f} ms)"
            )
        self.save(self.figures)

    def copy(self) -> None:
        self.figures["copy_bytes_per_second"] = self.card.copy_bytes_per_second()
        self.card.release()
        self.say(f"copy on the device: {self.figures['copy_bytes_per_second'] / 1e12:.2f} TB/s (read + written)")
        self.save(self.figures)

    def shape(self, shape: Shape) -> None:
        """Error, memory, device time and eager wall time at one shape."""
        inputs = Inputs.draw(shape, self.dtype, self.card.device)
        rows: dict[str, dict[str, Any]] = {}
        passes = floor_bytes(shape, self.dtype.itemsize)
        self.say("")
        self.say(f"B {shape.rows}, T {shape.tokens}, H {shape.heads}, D {shape.size}; floor {self._floor(passes)} ms")
        self.say(f"  {'error and memory':<20}{'error':>10}{'peak f, f+b MiB':>20}{'kept MiB':>12}")
        exact = _exact_correction(inputs)
        for name, candidate in self.candidates.items():
            try:
                for one in PASSES:  # compiles, and allocates what libraries keep
                    candidate.run(one, inputs)
                with torch.no_grad():
                    error = _relative_error(candidate.correction(inputs.q, inputs.k, inputs.gate), exact)
                memory = _memory(self.card, candidate, inputs)
            except Exception as failure:  # whatever one function raises must not cost the rows of the others
                self.note(f"{name}, B {shape.rows}: left out ({brief(failure)})")
                continue
            rows[name] = {"function": name, **shape._asdict(), "correction_error": error}
            for one, bytes_moved in passes.items():
                rows[name][one] = {
                    "floor_bytes": bytes_moved,
                    "floor_ms": 1000 * bytes_moved / self.figures["copy_bytes_per_second"],
                    **memory[one],
                }
            self.figures["functions"].append(rows[name])
            peaks = ", ".join(f"{mebibytes(memory[one]['peak_bytes'])}" for one in PASSES)
            kept = mebibytes(memory["forward_backward"]["kept_bytes"])
            self.say(f"  {name:<20}{error:>10.1e}{peaks:>20}{kept:>12}")
        del exact
        self.card.release()
        self.save(self.figures)

        self.say(f"  {'device ms':<10}{'forward':>24}{'forward + backward':>26}  share of floor")
        timers = self._timers({name: inputs for name in rows}, shape)
        for (name, one), found in rounds(timers, self.repeats, self.limit).items():
            part = rows[name][one]
            part["device"] = found
            part["floor_share"] = part["floor_ms"] / found["median_ms"]
        for name, row in rows.items():
            shares = ", ".join(f"{row[one]['floor_share']:.0%}" for one in PASSES if "floor_share" in row[one])
            self._say_times(name, [row[one].get("device") for one in PASSES], shares)
        del timers
        self.card.release()
        self.save(self.figures)

        self.say(f"  {'eager ms':<10}{'forward':>24}{'forward + backward':>26}")
        wall = {
            (name, one): wall_timer(self.card, lambda name=name, one=one: self.candidates[name].run(one, inputs))  # type: ignore[misc]
            for name in rows
            for one in PASSES
        }
        for (name, one), found in rounds(wall, self.repeats, self.limit).items():
            rows[name][one]["wall"] = found
        for name, row in rows.items():
            self._say_times(name, [row[one]["wall"] for one in PASSES], "")
        self.save(self.figures)

    def _floor(self, passes: Mapping[str, int]) -> str:
        return ", ".join(f"{1000 * moved / self.figures['copy_bytes_per_second']:.3f}" for moved in passes.values())

    def _timers(self, inputs: Mapping[str, Inputs], shape: Shape) -> dict[tuple[str, str], Callable[[], float]]:
        """Device timers by function and pass; a function that cannot be captured gets a note instead."""
        timers = {}
        for name, given in inputs.items():
            for one in PASSES:
                candidate = self.candidates[name]
                try:
                    timers[name, one] = device_timer(
                        self.card,
                        lambda candidate=candidate, one=one, given=given: candidate.run(one, given),  # type: ignore[misc]
                    )
                except Exception as failure:  # as above
                    self.note(f"{name}, {one}, B {shape.rows}, T {shape.tokens}: no device time ({brief(failure)})")
        return timers

    def _say_times(self, name: str, times: Sequence[dict[str, Any] | None], end: str) -> None:
        cells = []
        for found in times:
            names = ("median_ms", "lower_quartile_ms", "upper_quartile_ms")
            middle, low, high = ("-", "", "") if found is None else (milliseconds(found[one]) for one in names)
            cells.append(f"{middle} ({low}-{high})" if low else middle)
        forward, both = cells
        self.say(f"  {name:<10}{forward:>24}{both:>26}  {end}".rstrip())

    def long(self, heads: int, size: int) -> None:
        """Device time per token as the sequence grows, batch 1, one function after the other, its lengths in turn."""
        self.say("")
        self.say(
            f"  {'ns a token':<12}{'pass':<18}" + "".join(f"{f'T {tokens}':>12}" for tokens in LONG_TOKENS) + "   ratio"
        )
        for name in self.candidates:
            timers: dict[tuple[int, str], Callable[[], float]] = {}
            alive = []  # a graph reads the memory of its inputs, but does not own it
            for tokens in LONG_TOKENS:
                shape = Shape(1, tokens, heads, size)
                try:
                    given = Inputs.draw(shape, self.dtype, self.card.device)
                except torch.OutOfMemoryError as failure:
                    self.note(f"{name}, T {tokens}: left out ({brief(failure)})")
                    continue
                alive.append(given)
                for (_, one), timer in self._timers({name: given}, shape).items():
                    timers[tokens, one] = timer
            times = rounds(timers, self.repeats, self.limit)
            for one in PASSES:
                nanoseconds = {}
                for tokens in LONG_TOKENS:
                    if (tokens, one) in times:
                        nanoseconds[tokens] = 1e6 * times[tokens, one]["median_ms"] / tokens
                        self.figures["long"].append(
                            {
                                "function": name,
                                "pass": one,
                                "tokens": tokens,
                                "nanoseconds_per_token": nanoseconds[tokens],
                                "device": times[tokens, one],
                            }
                        )
                cells = "".join(f"{nanoseconds[t]:>12.2f}" if t in nanoseconds else f"{'-':>12}" for t in LONG_TOKENS)
                both = [nanoseconds[t] for t in LONG_TOKENS if t in nanoseconds]
                ratio = f"{both[-1] / both[0]:>8.2f}" if len(both) == len(LONG_TOKENS) else ""
                self.say(f"  {name:<12}{one:<18}{cells}{ratio}")
            del timers, alive
            self.card.release()
            self.save(self.figures)


def time_first_call(shape: Shape, dtype: str, *, limit: float) -> dict[str, float]:
    """Seconds of forward + backward of the Triton backend in a fresh process that finds no compiled kernel.

    "first_call_seconds" begins with the inputs on the card and holds importing Triton, compiling and running;
    "second_call_seconds" is the same again; "process_seconds" adds Python, torch and CUDA. RuntimeError if it fails or
    takes more than `limit` seconds.
    """
    code = f"from ccq.bench.gpu import print_first_call; print_first_call({tuple(shape)!r}, {dtype!r})"
    return run_afresh(code, limit)


def print_first_call(
    shape: tuple[int, int, int, int], dtype: str, backend: str = "triton", device: str = "cuda"
) -> None:
    """What `time_first_call` runs in the fresh process."""
    inputs = Inputs.draw(Shape(*shape), DTYPES[dtype], torch.device(device))
    candidate = _of_this_library(backend)
    seconds = []
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        candidate.run("forward_backward", inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"first_call_seconds": seconds[0], "second_call_seconds": seconds[1]}))


def bench_operator_on_gpu(
    *,
    rows: Sequence[int],
    tokens: int,
    heads: int,
    size: int,
    dtype: str,
    repeats: int,
    limit: float,
    long: bool,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
    card: Card | None = None,
) -> dict[str, Any]:
    """Measure everything, part by part, with what is needed to measure it again, for benchmarks/results.

    Args:
        rows: batch sizes B, each measured with T = `tokens`, H = `heads`, D = `size`.
        dtype: a name of DTYPES; gates are float32.
        repeats: rounds of every timing; `limit` seconds end a timing early (after at least three rounds).
        long: also measure the time per token at LONG_TOKENS.
        say, save: called with each line for the reader, and with the figures after every part.
        card: the GPU; None takes the current one.

    Raises:
        ValueError: for an unknown dtype, or without a GPU.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; accepted on a GPU: {', '.join(DTYPES)}")
    if card is None:
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but torch finds no GPU; use --device cpu")
        card = Card()
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": {
            "rows": list(rows),
            "tokens": tokens,
            "heads": heads,
            "size": size,
            "dtype": dtype,
            "repeats": repeats,
            "warmup": WARMUP,
            "limit_seconds": limit,
            "long_tokens": list(LONG_TOKENS) if long else [],
            "floor": {"chunk": FLOOR_CHUNK, "tile": FLOOR_TILE},
        },
        "environment": environment(threads=torch.get_num_threads(), device="cuda"),
        "gpu": gpu_environment(),
        "first_call": None,
        "copy_bytes_per_second": None,
        "functions": [],
        "long": [],
        "notes": [],
    }
    run = OperatorMeasurement(figures, card=card, dtype=DTYPES[dtype], repeats=repeats, limit=limit, say=say, save=save)
    say(f"{figures['gpu']['card']}, torch {figures['environment']['torch']}, {dtype}")
    save(figures)  # a place that cannot be written is known before minutes are spent
    run.first_call(Shape(rows[0], tokens, heads, size), dtype)
    run.copy()
    known = len(figures["notes"])
    run.candidates = candidates(figures["notes"])
    for text in figures["notes"][known:]:
        say(wrapped(f"note: {text}"))
    for count in rows:
        run.shape(Shape(count, tokens, heads, size))
    if long:
        run.long(heads, size)
    return figures
