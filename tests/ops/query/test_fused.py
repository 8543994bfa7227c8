"""The Triton kernels against the recurrence in float64, on a GPU or in Triton's interpreter.

Blocks, chunks and tiles are made small, so that short input already has many of each.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import assert_close, relative_error
from tests.ops.query.test_curvature_conditioned_query import (
    MASKS,
    Case,
    make_case,
    run,
    spread_keys,
    yardstick,
)
from torch import Tensor, library

from ccq.ops.query import (
    KeyStatistics,
    curvature_conditioned_query,
    curvature_conditioned_query_and_keys,
    fused,
    l2_normalize,
)

pytest.importorskip("triton")

from ccq.ops.query import kernels, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 3e-6
"""Relative error allowed to sums in float32."""
FLOOR = 1e-6
"""Absolute error allowed where the exact value is zero."""
CONFIGURATION = kernels.configuration
SMALL = dict(block=32, group=16, chunk=64, tile=16, part=16, scan_group=16, row_rows=8)
SMALLER = SMALL | {"block": 16, "chunk": 32}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cut everything small; a test may call the fixture's value to choose other sizes."""

    def choose(**sizes: int) -> None:
        monkeypatch.setattr(kernels, "configuration", lambda *which: CONFIGURATION(*which)._replace(**sizes))

    choose(**SMALL)
    return choose


def check(case: Case, tolerance: float = TOLERANCE, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the kernels in float32, compared with the recurrence in float64 on the same numbers."""
    given = case.to(torch.float32)
    actual = run(given, backend="triton", device=DEVICE, **options)
    expected = run(given.to(torch.float64), backend="reference", **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "count":
            assert torch.equal(actual[name], value)
        else:
            assert actual[name].dtype == torch.float32
            assert_close(name, actual[name], value, tolerance, floor=FLOOR)
    return actual


def call(case: Case, **options: Any) -> tuple[Tensor, Tensor, KeyStatistics]:
    """Query, correction and statistics without gradients."""
    case = case.to(torch.float32)
    statistics = KeyStatistics(*(x.to(DEVICE) for x in case.statistics))
    q, k, gate = (x.to(DEVICE) for x in case[:3])
    result = curvature_conditioned_query(
        q, k, gate, statistics=statistics, return_correction=True, backend="triton", **options
    )
    assert result.correction is not None
    return result.query.cpu(), result.correction.cpu(), KeyStatistics(*(x.cpu() for x in result.statistics))


@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 33, 65, 100])
def test_any_length(tokens: int) -> None:
    check(make_case(1, tokens, 1, 16))


@pytest.mark.parametrize(("heads", "size"), [(2, 8), (2, 24), (1, 40), (1, 64), (1, 96)])
def test_any_size(heads: int, size: int) -> None:
    check(make_case(2 if heads == 2 else 1, 35, heads, size))


@pytest.mark.parametrize("seen", [0, 9])
def test_sizes_of_the_table(seen: int, small_blocks: Callable[..., None]) -> None:
    small_blocks()
    check(make_case(1, 70, 1, 16, seen=seen))


@pytest.mark.parametrize("documents", [None, [0, 320, 321, 321, 330]])
def test_long_sequences_are_scanned_in_segments(documents: list[int] | None, small_blocks: Callable[..., None]) -> None:
    small_blocks(**SMALL | {"chunk": 32})
    sequences = 1 if documents is None else len(documents) - 1
    case = make_case(1, 330, 1, 16, sequences=sequences)
    config = kernels.configuration(torch.float32, 16, torch.device(DEVICE))
    plan = kernels.make_plan(1, 330, None, documents, config, torch.device(DEVICE))
    launch = kernels.Launcher(case.q.to(DEVICE), plan, config, True, True, True)
    assert launch.segments > 1 and launch.per_segment > 1
    check(case, **({} if documents is None else {"cu_seqlens": torch.tensor(documents)}))


@pytest.mark.parametrize(
    "want",
    [("query",), ("correction",), ("second_moment",), ("total",), ("query", "correction")],
)
def test_every_gradient_from_every_output(want: tuple[str, ...]) -> None:
    check(make_case(1, 35, 1, 16), want=want)


@pytest.mark.parametrize(
    ("centred", "normalize"), [(False, True), (True, False), (False, False), (True, "keys"), (True, "queries")]
)
def test_uncentred_and_raw(centred: bool, normalize: bool | str) -> None:
    check(make_case(1, 35, 1, 16), centred=centred, normalize=normalize)


def passes_over_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each pass that copies rows into blocks will add "copy", and each that only sums them "sum"."""
    passes: list[str] = []
    launch = kernels.Launcher.run

    def note(self: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel is kernels._to_blocks_kernel and not self.compile_only:
            passes.append("copy" if constants["COPY"] else "sum")
        launch(self, kernel, grid, *arguments, **constants)

    monkeypatch.setattr(kernels.Launcher, "run", note)
    return passes


def off_the_grid(x: Tensor) -> Tensor:
    """The same numbers at an address that 16 does not divide."""
    moved = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert moved.is_contiguous() and moved.data_ptr() % 16
    return moved


def everything(case: Case, **options: Any) -> list[Tensor]:
    """Outputs, and the gradients of a fixed function of all of them, flat; inputs stay at their addresses."""
    leaves = [x.detach().requires_grad_() for x in (*case[:3], *case.statistics[:2])]
    result = curvature_conditioned_query(
        *leaves[:3], statistics=KeyStatistics(*leaves[3:], case.statistics.count), return_correction=True,
        backend="triton", **options,
    )  # fmt: skip
    outputs = [result.query, result.correction, *result.statistics[:2]]
    random = torch.Generator(DEVICE).manual_seed(1)
    loss = sum(
        (x.flatten().double() * torch.randn(x.numel(), generator=random, dtype=torch.float64, device=DEVICE)).sum()
        for x in outputs
    )
    return [x.detach().flatten() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(("size", "centred", "normalize"), [(16, True, "queries"), (32, False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_keys_are_read_where_they_are_as_from_a_copy(
    dtype: torch.dtype, size: int, centred: bool, normalize: bool | str, small_blocks: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    small_blocks(**SMALLER)
    passes = passes_over_rows(monkeypatch)
    rows, tokens = 2, 48
    case = make_case(rows, tokens, 2, size).to(dtype)
    case = Case(*(x.to(DEVICE) for x in case[:3]), KeyStatistics(*(x.to(DEVICE) for x in case.statistics)))
    options = {"centred": centred, "normalize": normalize}
    expected = everything(case, **options)
    # Forward the sums of blocks alone, backward nothing.
    assert passes == ["sum"]
    packed = case._replace(**{name: getattr(case, name).flatten(0, 1)[None] for name in ("q", "k", "gate")})
    boundaries = torch.arange(rows + 1, device=DEVICE) * tokens
    # The queries and their gradient are copied as well.
    ways: list[tuple[int, Case, dict[str, Tensor]]] = [
        (4, packed, {"cu_seqlens": boundaries}),
        (4, case, {"mask": torch.ones(rows, tokens, device=DEVICE)}),
    ]
    if DEVICE == "cpu":  # a GPU loads fewer numbers at once from such addresses, and so adds up in another order
        ways.append((2, case._replace(k=off_the_grid(case.k)), {}))
    for copying, given, more in ways:
        passes.clear()
        found = everything(given, **options, **more)
        assert passes == ["copy"] * copying
        for x, right in zip(found, expected, strict=True):
            assert right.any() and torch.equal(x, right)


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(
    ("size", "normalize"), [(16, "queries"), (32, False), (64, "queries"), (128, False), (256, "queries")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_unit_keys_are_read_where_they_are(
    dtype: torch.dtype, size: int, normalize: str | bool, small_blocks: Callable[..., None]
) -> None:
    small_blocks(**SMALLER | {"tile": min(size, 64), "part": min(size, 64)})
    case = make_case(2, 48, 2, size)
    given = case._replace(k=l2_normalize(case.k)).to(dtype)
    config = kernels.configuration(dtype, size, torch.device(DEVICE))
    plan = kernels.make_plan(2, 48, None, None, config, torch.device(DEVICE))
    assert kernels.Launcher(given.q, plan, config, bool(normalize), False, True).is_aligned(given.k)
    actual = run(given, backend="triton", device=DEVICE, normalize=normalize)
    exact = run(given.to(torch.float64), backend="reference", normalize=normalize)
    assert torch.equal(actual.pop("count"), exact.pop("count"))
    assert actual.keys() == exact.keys()
    allowed = TOLERANCE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for name, value in actual.items():
        assert_close(name, value, exact[name], allowed, floor=FLOOR)


@pytest.mark.parametrize(
    ("kind", "normalize"), [*((kind, True) for kind in MASKS), ("both", False), ("both", "keys"), ("both", "queries")]
)
def test_padding_is_exact(kind: str, normalize: bool | str) -> None:
    mask = torch.tensor(MASKS[kind])
    case = make_case(2, 70, 1, 16)
    real = mask.bool()
    actual = check(case, mask=mask, normalize=normalize)
    padded = l2_normalize(case.q) if normalize in (True, "queries") else case.q
    assert_close("padded query", actual["query"][~real], padded[~real], TOLERANCE, floor=FLOOR)
    for name in ("correction", "d_q", "d_k", "d_gate"):
        assert not actual[name][~real].any(), name


def test_nothing_in_the_padding_spreads() -> None:
    mask = torch.tensor(MASKS["both"])
    case = make_case(2, 70, 1, 16).to(torch.float32)
    padding = mask[:, :, None, None] == 0
    nan = float("nan")
    dirty = case._replace(
        q=case.q.masked_fill(padding, nan),
        k=case.k.masked_fill(padding, nan),
        gate=case.gate.masked_fill(padding[..., 0], nan) if DEVICE == "cuda" else case.gate,
    )
    clean = run(case, backend="triton", device=DEVICE, mask=mask)
    found = run(dirty, backend="triton", device=DEVICE, mask=mask)
    for name, value in clean.items():
        real = mask.bool() if name == "query" else slice(None)
        assert torch.equal(found[name][real], value[real]), name


@pytest.mark.parametrize("boundaries", [[0, 0, 5, 5, 40, 41, 41], [0], [0, 0], [0, 1]])
def test_packed_documents(boundaries: list[int]) -> None:
    check(
        make_case(1, boundaries[-1], 1, 16, sequences=len(boundaries) - 1),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
    )


@pytest.mark.parametrize("shape", [(0, 5, 1, 16), (2, 0, 1, 16), (0, 0, 1, 16)])
def test_nothing_in_gives_nothing_out_and_the_state_back(shape: tuple[int, ...]) -> None:
    case = make_case(*shape).to(torch.float32)
    found = run(case, backend="triton", device=DEVICE)
    assert found["query"].shape == shape
    for name, field in zip(("second_moment", "total", "count"), case.statistics, strict=True):
        assert torch.equal(found[name], field)
    assert found["d_second_moment"].shape == case.statistics.second_moment.shape


@pytest.mark.parametrize("cut", [1, 16, 31, 39])
def test_split_prefill(cut: int) -> None:
    case = make_case(1, 40, 1, 16).to(torch.float32)
    exact = case.to(torch.float64)
    whole = curvature_conditioned_query(
        *exact[:3], statistics=exact.statistics, return_correction=True, backend="reference"
    )
    statistics, parts = case.statistics, []
    for part in (slice(0, cut), slice(cut, 40)):
        _, correction, statistics = call(Case(*(x[:, part] for x in case[:3]), statistics))
        parts.append(correction)
    assert_close("correction", torch.cat(parts, 1), whole.correction, TOLERANCE)
    assert_close("second moment", statistics.second_moment, whole.statistics.second_moment, TOLERANCE)
    assert_close("total", statistics.total, whole.statistics.total, TOLERANCE)
    assert torch.equal(statistics.count, whole.statistics.count)


def test_gradients_through_the_state_equal_those_of_the_whole() -> None:
    case = make_case(1, 40, 1, 16).to(torch.float32)
    weight = torch.randn(1, 40, 1, 16, dtype=torch.float64)

    def gradients(case: Case, cuts: list[int], backend: str, device: str) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in case[:3]]
        statistics, parts = None, []
        for start, end in itertools.pairwise(cuts):
            pieces = (x[:, start:end].to(device) for x in inputs)
            result = curvature_conditioned_query(*pieces, statistics=statistics, backend=backend)
            statistics = result.statistics
            parts.append(result.query.cpu().double())
        return torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), inputs)

    exact = gradients(case.to(torch.float64), [0, 40], "reference", "cpu")
    for name, whole, cut in zip("qkg", exact, gradients(case, [0, 1, 4, 23, 40], "triton", DEVICE), strict=True):
        assert_close(f"gradient of {name}", cut, whole, TOLERANCE)


def test_views_and_expanded_tensors_are_read_right() -> None:
    packed = torch.randn(2, 20, 1, 3 * 16)
    q, k, _ = packed.split(16, dim=-1)
    gate = torch.rand(2, 1, 1).expand(2, 20, 1)
    transposed = torch.randn(2, 1, 20, 16).transpose(1, 2)
    expanded = torch.randn(2, 1, 1, 16).expand(2, 20, 1, 16)
    for a, b in ((q, transposed), (expanded, k), (q, expanded)):
        results = []
        for backend, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
            inputs = [x.detach().to(device, dtype).requires_grad_() for x in (a, b, gate)]
            result = curvature_conditioned_query(*inputs, return_correction=True, backend=backend)
            # The gradient of a sum arrives expanded, with strides of zero.
            gradients = torch.autograd.grad(result.query.sum(), inputs)
            results.append([x.detach().cpu() for x in (result.correction, *gradients)])
        for name, expected, actual in zip(("correction", "d_q", "d_k", "d_gate"), *results, strict=True):
            assert_close(name, actual, expected, 1e-5, floor=FLOOR)


def test_equal_keys_have_no_covariance() -> None:
    case = make_case(1, 90, 1, 16, seen=0)
    _, correction, _ = call(case._replace(k=case.k[:, :1].expand_as(case.k)))
    assert correction.abs().max() <= 50 * torch.finfo(torch.float32).eps


def test_zero_keys_change_nothing() -> None:
    case = make_case(1, 40, 1, 16, seen=0)
    found = run(case._replace(k=torch.zeros_like(case.k)).to(torch.float32), backend="triton", device=DEVICE)
    assert_close("query", found["query"], l2_normalize(case.q), TOLERANCE)
    assert not found["correction"].any()
    assert all(torch.isfinite(value).all() for value in found.values())


def test_gate_of_zero_returns_the_normalised_query() -> None:
    case = make_case(1, 40, 1, 16)
    case = case._replace(gate=torch.zeros_like(case.gate))
    query, correction, _ = call(case)
    assert_close("query", query, l2_normalize(case.q), TOLERANCE)
    assert correction.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_type_of_the_gate_is_free_and_its_gradient_has_it(dtype: torch.dtype) -> None:
    case = make_case(1, 20, 1, 16)
    case = case.to(torch.float32)._replace(gate=case.gate.to(dtype))
    actual = run(case, backend="triton", device=DEVICE)
    expected = run(case.to(torch.float64), backend="reference")
    assert actual["d_gate"].dtype == dtype
    assert_close("query", actual["query"], expected["query"], TOLERANCE)
    assert_close("d_gate", actual["d_gate"], expected["d_gate"], max(TOLERANCE, torch.finfo(dtype).eps))


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("kind", ["flat", "common mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errs_at_most_twice_the_yardstick(dtype: torch.dtype, kind: str) -> None:
    case = spread_keys(kind, make_case(1, 65, 1, 32, seen=0))
    given, want = case.to(dtype), ("query", "correction")
    actual = run(given, backend="triton", device=DEVICE, want=want)
    exact = run(given.to(torch.float64), backend="reference", want=want)
    assert actual["query"].dtype == actual["d_q"].dtype == actual["d_k"].dtype == dtype
    assert actual["correction"].dtype == actual["second_moment"].dtype == torch.float32
    for name, value in yardstick(case, dtype).items():
        error, yard = relative_error(actual[name], exact[name]), relative_error(value, exact[name])
        assert error <= 2 * yard, f"{name}: {error:.2e} against {yard:.2e}"


def test_the_query_can_come_back_in_float32() -> None:
    case = make_case(2, 40, 1, 16).to(torch.float16)
    mask = torch.arange(40).expand(2, 40) < torch.tensor([[40], [33]])
    leaves = [x.to(DEVICE).requires_grad_() for x in case[:3]]
    statistics = KeyStatistics(*(x.to(DEVICE) for x in case.statistics))
    given = {"statistics": statistics, "mask": mask.to(DEVICE), "query_dtype": torch.float32}
    query = curvature_conditioned_query(*leaves, backend="triton", **given).query
    assert query.dtype == torch.float32
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    statistics = KeyStatistics(*(x.double() if x.is_floating_point() else x for x in case.statistics))
    expected = curvature_conditioned_query(*exact, statistics=statistics, mask=mask, backend="reference").query
    # Rounding the query itself to float16 would cost 2e-4.
    assert_close("query", query.cpu(), expected, 1e-5)
    random = torch.randn(query.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(query, leaves, random.to(DEVICE))
    for name, found, right in zip("qkg", gradients, torch.autograd.grad(expected, exact, random.double()), strict=True):
        assert_close(f"d_{name}", found.cpu(), right, 2e-3)


def test_autocast_around_the_call_rounds_nothing() -> None:
    case = make_case(1, 35, 1, 16).to(torch.float32)
    plain = run(case, backend="triton", device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = run(case, backend="triton", device=DEVICE)
    for name, value in plain.items():
        assert torch.equal(rounded[name], value), name


@pytest.mark.parametrize("read", [curvature_conditioned_query, curvature_conditioned_query_and_keys])
def test_nothing_large_but_the_inputs_is_kept_for_the_backward_pass(read: Callable[..., Any]) -> None:
    case = make_case(1, 64, 1, 64, seen=0).to(torch.float32)
    q, k, gate = (x.to(DEVICE).requires_grad_() for x in case[:3])
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        read(q, k, gate, backend="triton")
    beyond = [size for pointer, size in kept.items() if pointer not in {x.data_ptr() for x in (q, k, gate)}]
    # The statistics at the start, the totals before each block, and a few numbers a token.
    assert sum(beyond) <= 64 * 64 + 5 * 64 + 5 * 64
    assert sum(kept.values()) - sum(beyond) == 2 * 64 * 64 + 64


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("tokens", [1, 35])
def test_compiles_without_a_break_and_agrees(tokens: int, gradient: bool) -> None:
    case = make_case(1, tokens, 1, 16).to(torch.float32)
    statistics = KeyStatistics(*(x.to(DEVICE) for x in case.statistics))

    def read(q: Tensor, k: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        result = curvature_conditioned_query(
            q, k, gate, statistics=statistics, return_correction=True, backend="triton"
        )
        return result.query * 2, result.correction, *result.statistics

    results = []
    for function in (read, torch.compile(read, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().to(DEVICE).requires_grad_(gradient) for x in case[:3]]
        outputs = function(*inputs)
        if gradient:
            loss = outputs[0].square().sum() + outputs[1].sum() + outputs[2].sum()
            outputs = (*outputs, *torch.autograd.grad(loss, inputs))
        results.append(outputs)
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


def weights_for(case: Case, dtype: torch.dtype, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """What the query and the keys are multiplied by in a loss; rounding to `dtype` changes nothing where strength, that
    of the query, is a power of two.
    """
    random = torch.Generator().manual_seed(2)
    w_query, w_keys = (torch.randn(case.q.shape, generator=random).to(dtype).double() for _ in range(2))
    return strength * w_query, w_keys


def with_keys(
    case: Case, dtype: torch.dtype, used: tuple[str, ...], strength: float = 1.0, **options: Any
) -> dict[str, Tensor]:
    """Query and gradients by the kernels, of a loss of the query, of the keys that come back, or of both."""
    leaves = [x.to(DEVICE).requires_grad_() for x in case[:3]]
    statistics = KeyStatistics(*(x.to(DEVICE) for x in case.statistics))
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    result, keys = curvature_conditioned_query_and_keys(*leaves, statistics=statistics, backend="triton", **options)
    assert torch.equal(keys, leaves[1]) and keys is not leaves[1]
    terms = zip((result.query, keys), weights_for(case, dtype, strength), strict=True)
    losses = dict(zip(("query", "keys"), ((x.cpu().double() * weight).sum() for x, weight in terms), strict=True))
    gradients = torch.autograd.grad(sum(losses[name] for name in used), leaves, allow_unused=True)
    found = zip(("d_q", "d_k", "d_gate"), gradients, strict=True)
    return {"query": result.query.detach().cpu()} | {name: x.cpu() for name, x in found if x is not None}


def used_twice(case: Case, dtype: torch.dtype, strength: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """The same by the recurrence in float64, where k is used twice and autograd adds."""
    case = case.to(torch.float64)
    leaves = [x.clone().requires_grad_() for x in case[:3]]
    query = curvature_conditioned_query(*leaves, statistics=case.statistics, backend="reference", **options).query
    w_query, w_keys = weights_for(case, dtype, strength)
    gradients = torch.autograd.grad((query * w_query).sum() + (leaves[1] * w_keys).sum(), leaves)
    return {"query": query.detach()} | dict(zip(("d_q", "d_k", "d_gate"), gradients, strict=True))


def additions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each launch of `_key_gradients_kernel` will add whether it adds a gradient from elsewhere."""
    launches: list[bool] = []
    launch = kernels.Launcher.run

    def note(self: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel is kernels._key_gradients_kernel and not self.compile_only:
            launches.append(constants["BESIDE"])
        launch(self, kernel, grid, *arguments, **constants)

    monkeypatch.setattr(kernels.Launcher, "run", note)
    return launches


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("normalize", [True, "queries", False])
@pytest.mark.parametrize("kind", ["dense", "packed", "padded"])
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_adds_what_reaches_the_keys(
    dtype: torch.dtype, size: int, kind: str, normalize: bool | str, small_blocks: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    small_blocks(**SMALLER | {"tile": 64, "part": 64})
    # Full blocks, whose keys are read where they are, unless they are packed or padded.
    rows, tokens = (1, 50) if kind == "packed" else (2, 48)
    case = make_case(rows, tokens, 128 // size or 1, size, sequences=4 if kind == "packed" else None)
    if normalize is not True:
        case = case._replace(k=l2_normalize(case.k))
    case = case.to(dtype)
    mask = torch.arange(tokens)[None] >= torch.tensor([[3], [0]])
    mask[1, 40:] = False
    options: dict[str, Any] = {"normalize": normalize}
    options |= {"packed": {"cu_seqlens": torch.tensor([0, 0, 33, 34, 50])}, "padded": {"mask": mask}}.get(kind, {})
    # So that neither share of the gradient hides behind the other.
    w_keys = weights_for(case, dtype)[1]
    share = used_twice(case, dtype, **options)["d_k"] - w_keys
    strength = 2.0 ** torch.log2(w_keys.norm() / share.norm()).round().item()
    launches = additions(monkeypatch)
    actual = with_keys(case, dtype, ("query", "keys"), strength, **options)
    assert launches == [kind != "padded"]
    expected = used_twice(case, dtype, strength, **options)
    tolerance = TOLERANCE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for name, value in expected.items():
        assert_close(name, actual[name], value, tolerance, floor=FLOOR)
    assert actual["d_k"].dtype == dtype
    if kind == "padded":
        assert torch.equal(actual["d_k"][~mask], w_keys[~mask].to(dtype))


@pytest.mark.parametrize("kind", ["dense", "padded"])
def test_only_one_of_query_and_keys_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(2, 35, 1, 16).to(torch.float32)
    options = {"mask": torch.arange(35).expand(2, 35) > 2} if kind == "padded" else {}
    launches = additions(monkeypatch)
    alone = with_keys(case, torch.float32, ("query",), **options)
    assert launches == [False]
    leaves = [x.to(DEVICE).requires_grad_() for x in case[:3]]
    statistics = KeyStatistics(*(x.to(DEVICE) for x in case.statistics))
    placed = {name: x.to(DEVICE) for name, x in options.items()}
    query = curvature_conditioned_query(*leaves, statistics=statistics, backend="triton", **placed).query
    weight = weights_for(case, torch.float32)[0].float().to(DEVICE)
    gradients = torch.autograd.grad(query, leaves, weight)
    expected = dict(zip(("query", "d_q", "d_k", "d_gate"), (query.detach(), *gradients), strict=True))
    assert alone.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(alone[name], value.cpu()), name
    launches.clear()
    keys_only = with_keys(case, torch.float32, ("keys",), **options)
    assert launches == []
    assert keys_only.keys() == {"query", "d_k"}
    assert torch.equal(keys_only["d_k"], weights_for(case, torch.float32)[1].float())


def test_what_reaches_the_keys_may_have_any_strides() -> None:
    packed = torch.randn(2, 20, 2, 3 * 16, dtype=torch.float64)
    k = packed.split(16, dim=-1)[1].float()
    for loss in (lambda keys: keys.sum(), lambda keys: (keys.transpose(1, 2) * k.transpose(1, 2).to(keys)).sum()):
        found = []
        for backend, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
            leaf = packed.float().to(device, dtype).requires_grad_()
            q, k_in, _ = leaf.split(16, dim=-1)
            result, keys = curvature_conditioned_query_and_keys(q, k_in, 0.5, backend=backend)
            found.append(torch.autograd.grad(result.query.square().sum() + loss(keys), leaf)[0])
        assert_close("gradient", found[1].cpu(), found[0], 1e-5)


def test_keys_that_need_no_gradient_come_back_themselves() -> None:
    q, k, gate = (x.float().to(DEVICE) for x in make_case(1, 5, 1, 16)[:3])
    read = curvature_conditioned_query_and_keys
    leaf = k.clone().requires_grad_()
    assert read(q.requires_grad_(), k, gate, backend="triton")[1] is k
    assert read(q, leaf, gate, backend="torch")[1] is leaf
    assert read(q, leaf, gate, backend="reference")[1] is leaf
    with torch.no_grad():
        assert read(q, leaf, gate, backend="triton")[1] is leaf
        token = leaf[:, :1]
        assert read(q[:, :1], token, gate[:, :1], backend="triton")[1] is token


def test_derivatives_of_derivatives_are_refused_with_keys_too() -> None:
    q, k, gate = (x.float().to(DEVICE) for x in make_case(1, 5, 1, 16)[:3])
    leaf = k.clone().requires_grad_()
    for used in ((True, True), (True, False), (False, True)):
        result, keys = curvature_conditioned_query_and_keys(q, leaf, gate, backend="triton")
        loss = sum(x.square().sum() for x, use in zip((result.query, keys), used, strict=True) if use)
        (d_k,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="ccq::read_step has no derivative"):
            d_k.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own
def test_forward_mode_is_refused_with_keys_too() -> None:
    q, k, gate = (x.float().to(DEVICE) for x in make_case(1, 5, 1, 16)[:3])

    k.requires_grad_()

    def read(q: Tensor) -> Tensor:
        return curvature_conditioned_query_and_keys(q, k, gate, backend="triton")[0].query

    with pytest.raises(RuntimeError, match="ccq::read_step has no derivative"):
        torch.func.jvp(read, (q,), (q,))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_keys_compile_without_a_break() -> None:
    case = make_case(1, 35, 1, 16).to(torch.float32)

    def read(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
        result, keys = curvature_conditioned_query_and_keys(q, k, gate, backend="triton")
        return result.query.square().sum() + keys.sin().sum()

    results = []
    for function in (read, torch.compile(read, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().to(DEVICE).requires_grad_() for x in case[:3]]
        loss = function(*inputs)
        results.append((loss, *torch.autograd.grad(loss, inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert_close("compiled", compiled, eager, 1e-6)


def operator_inputs(tokens: int, *, sequences: int = 1, gradient: bool = False) -> list[Tensor]:
    case = make_case(1, tokens, 1, 16, sequences=sequences).to(torch.float32)
    inputs = [x.to(DEVICE) for x in (*case[:3], *case.statistics)]
    return [x.requires_grad_(gradient and x.is_floating_point()) for x in inputs]


@pytest.mark.parametrize("kind", ["dense", "packed", "padded", "one token"])
def test_without_statistics_it_starts_at_nothing_and_keeps_no_zeros(kind: str) -> None:
    rows, tokens = (1, 70) if kind == "packed" else (2, 1 if kind == "one token" else 70)
    case = make_case(rows, tokens, 2, 16)
    options: dict[str, Any] = {
        "dense": {},
        "one token": {},
        "packed": {"cu_seqlens": torch.tensor([0, 0, 3, 70])},
        "padded": {"mask": torch.arange(70)[None].repeat(2, 1) >= torch.tensor([[4], [0]])},
    }[kind]
    sequences = 3 if kind == "packed" else rows
    kept: list[Tensor] = []
    found = []
    for backend, device, dtype in (("triton", DEVICE, torch.float32), ("reference", "cpu", torch.float64)):
        leaves = [x.to(device, dtype).requires_grad_() for x in case[:3]]
        placed = {name: x.to(device) for name, x in options.items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            result = curvature_conditioned_query(*leaves, backend=backend, return_correction=True, **placed)
        if backend == "triton":
            assert kept and not any(x.shape == (sequences, 2, 16, 16) for x in kept)
        outputs = (result.query, result.correction, *result.statistics[:2])
        weights = [
            torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).to(device, dtype) for x in outputs
        ]
        loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
        found.append((*outputs, result.statistics.count, *torch.autograd.grad(loss, leaves)))
        with torch.no_grad():
            again = curvature_conditioned_query(*leaves, backend=backend, **placed)
            assert_close("query without gradients", again.query, result.query.detach(), TOLERANCE)
    for actual, expected in zip(*found, strict=True):
        assert_close("values", actual, expected, TOLERANCE, floor=FLOOR)


@pytest.mark.parametrize("correction", [True, False])
def test_the_operator_keeps_its_promises(correction: bool) -> None:
    library.opcheck(
        fused.read_step.overload,
        (*operator_inputs(17, gradient=True), None, None, True, True, True, correction, False),
        atol=1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 20]])
def test_the_operator_keeps_its_promises_with_padding_and_packing(boundaries: list[int] | None) -> None:
    mask = None if boundaries else torch.arange(20, device=DEVICE)[None] > 2
    inputs = operator_inputs(20, sequences=1 if boundaries is None else 3)
    checks = ("test_schema", "test_faketensor")
    for statistics in (inputs[3:], [None] * 3):
        arguments = (*inputs[:3], *statistics, mask, boundaries, True, True, True, True, True)
        library.opcheck(fused.read_step.overload, arguments, test_utils=checks)


@pytest.mark.parametrize("correction", [True, False])
def test_the_backward_operator_keeps_its_promises(correction: bool) -> None:
    q, k, gate, second_moment, total, count = operator_inputs(17)
    _, r, _, last_total, _, *saved = fused.read_step(
        q, k, gate, second_moment, total, count, None, None, True, True, True, correction, False
    )
    states = (torch.ones_like(second_moment), torch.ones_like(total))
    arguments = (q, k, gate, second_moment, count, r, last_total, *saved, torch.ones_like(q))
    options = (None, None, True, True, True, correction)
    library.opcheck(
        fused.read_step_backward.overload,
        (*arguments, *((torch.ones_like(q), *states, torch.ones_like(k)) if correction else (None,) * 4), *options),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_what_the_kernels_do_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 3, 1, 16, device=DEVICE)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got float64.*backend='torch'"):
        curvature_conditioned_query(q.double(), q.double(), 0.1, backend="triton")
    wide = torch.randn(1, 3, 1, 257, device=DEVICE)
    with pytest.raises(ValueError, match=r"D up to 256, got 257.*backend='torch'"):
        curvature_conditioned_query(wide, wide, 0.1, backend="triton")
    monkeypatch.setattr(step, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs tensors on a GPU, got cpu.*TRITON_INTERPRET=1"):
        curvature_conditioned_query(q.cpu(), q.cpu(), 0.1, backend="triton")
    monkeypatch.setattr(fused, "TRITON_INSTALLED", False)
    with pytest.raises(ImportError, match=r"needs the package triton.*\[gpu\]"):
        curvature_conditioned_query(q, q, 0.1, backend="triton")


@pytest.mark.parametrize(
    ("device", "dtype", "size", "expected"),
    [
        ("cuda", torch.bfloat16, 256, "fused"),
        ("cuda", torch.float32, 17, "fused"),
        ("cuda", torch.float64, 64, "chunked"),
        ("cuda", torch.float32, 257, "chunked"),
        ("cpu", torch.float32, 64, "chunked"),
    ],
)
def test_auto_takes_the_kernels_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, size: int, expected: str
) -> None:
    import ccq.ops.query as module

    taken: list[str] = []

    def note(name: str) -> Callable[..., tuple[Any, ...]]:
        def implementation(q: Tensor, k: Tensor, gate: Tensor, statistics: KeyStatistics, **_: Any) -> tuple[Any, ...]:
            taken.append(name)
            return (q, None, statistics, k) if name == "fused" else (q, None, statistics)

        return implementation

    monkeypatch.setattr(module, "fused_curvature_conditioned_query", note("fused"))
    monkeypatch.setattr(module, "chunked_curvature_conditioned_query", note("chunked"))
    # A fake tensor of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 3, 1, size, dtype=dtype, device=device)
        curvature_conditioned_query(q, q, 0.1)
    assert taken == [expected]


def test_importing_the_read_step_does_not_import_triton() -> None:
    code = "import sys, ccq.ops.query; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
