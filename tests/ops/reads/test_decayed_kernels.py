"""The Triton kernels of ccq-decay and mesa against their recurrences in float64, on a GPU or in Triton's interpreter.

Chunks are made small, so that short input already has many. The correction is compared where it is, not in the query.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers import assert_close, relative_error
from torch import Tensor, library

from ccq.ops.query import l2_normalize
from ccq.ops.reads import DecayedKeyStatistics, DecayedSecondMoment, decay_query, mesa_query

pytest.importorskip("triton")

from ccq.ops.reads.decay.operator import decay_read
from ccq.ops.reads.decayed import kernels
from ccq.ops.reads.mesa.operator import mesa_read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"decay": 3e-6, "mesa": 1e-5}
"""Relative error allowed to sums in float32, and to systems that are solved with them."""
FLOOR = 1e-6
"""Absolute error allowed where the exact value is zero."""
KINDS = {"decay": DecayedKeyStatistics, "mesa": DecayedSecondMoment}
MASK = torch.tensor([[0] * 3 + [1] * 15 + [0], [0] * 18 + [1]])
CONFIGURATION = kernels.configuration


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "configuration", lambda *which: CONFIGURATION(*which)._replace(chunk=16))


class Case(NamedTuple):
    """Input of one of the two read steps, with the state of earlier keys."""

    name: str
    tensors: dict[str, Tensor]
    """q, k, log_decay, and gate or ridge"""
    state: tuple[Tensor, ...] | None

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """Queries and keys in the dtype, everything else as sums are kept."""
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = {n: x.to(device, dtype if n in ("q", "k") else kept) for n, x in self.tensors.items()}
        return self._replace(tensors=tensors, state=self.state and tuple(x.to(device, kept) for x in self.state))

    def replace(self, **tensors: Tensor) -> Case:
        return self._replace(tensors=self.tensors | tensors)

    def call(self, **options: Any) -> Any:
        read = decay_query if self.name == "decay" else mesa_query
        state = None if self.state is None else KINDS[self.name](*self.state)
        return read(**self.tensors, statistics=state, **options)


def make_case(
    name: str, rows: int, tokens: int, heads: int, size: int, *, sequences: int | None = None, seen: int = 9,
    parts: int = 3, slow: float = 1.0,
) -> Case:  # fmt: skip
    """Random float64 input whose keys share a mean; decays down to e^-slow in each of `parts` of a head."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def tensors(rows: int, tokens: int) -> dict[str, Tensor]:
        shape = (rows, tokens, heads)
        uniform = torch.rand(*shape, parts + 1, generator=random, dtype=torch.float64)
        found = {"q": 2 * normal(*shape, size), "k": normal(*shape, size) + 0.5, "log_decay": -slow * uniform[..., 1:]}
        return found if name == "mesa" else found | {"gate": 0.1 + 0.9 * uniform[..., 0]}

    own = {"ridge": 0.25 + normal(heads, size).abs()} if name == "mesa" else {}
    state = None
    if seen:
        before = Case(name, tensors(rows if sequences is None else sequences, seen) | own, None)
        state = tuple(before.call(backend="reference").statistics)
    return Case(name, tensors(rows, tokens) | own, state)


def run(
    case: Case, *, device: str = "cpu", want: tuple[str, ...] = ("query", "state"), **options: Any
) -> dict[str, Tensor]:
    """Correction, state, and the gradients of a random linear function of what is wanted; all on the CPU."""
    kept = torch.promote_types(case.tensors["q"].dtype, torch.float32)
    case = case.to(case.tensors["q"].dtype, device)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.tensors.items()}
    state = None if case.state is None else tuple(x.detach().clone().requires_grad_() for x in case.state)
    placed = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    result = Case(case.name, leaves, state).call(query_dtype=kept, **placed)
    correction = result.correction
    if correction is None:
        # Of the loop, whose query says the same.
        q = leaves["q"]
        before = l2_normalize(q) if options.get("normalize", True) in (True, "queries") else q
        real = options.get("mask", torch.ones(q.shape[:2])).bool()[..., None, None]
        gate = leaves["gate"].unsqueeze(-1).detach() if case.name == "decay" else 1.0
        correction = torch.where(real, before - result.query, 0) / gate
    fields = result.statistics._asdict()
    outputs = {"query": result.query, "correction": correction, **fields}
    chosen = [n for n in outputs if n in want or ("state" in want and n in fields)]
    random, loss = torch.Generator().manual_seed(1), torch.zeros((), dtype=torch.float64, device=device)
    for name in outputs:
        weight = torch.randn(outputs[name].shape, generator=random, dtype=torch.float64).to(device)
        # A second moment is symmetric, so only the symmetric part of its gradient has a meaning.
        weight = weight + weight.mT if name == "second_moment" else weight
        loss = loss + (outputs[name] * weight).sum() if name in chosen else loss
    inputs = leaves | dict(zip(fields, state or (), strict=False))
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    del outputs["query"]
    for name, x, gradient in zip(inputs, inputs.values(), gradients, strict=True):
        gradient = torch.zeros_like(x) if gradient is None else gradient
        outputs[f"d_{name}"] = (gradient + gradient.mT) / 2 if name == "second_moment" else gradient
    return {name: x.detach().cpu() for name, x in outputs.items()}


def check(case: Case, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the kernels in float32, compared with the recurrence in float64 on the same numbers."""
    given = case.to(torch.float32)
    actual = run(given, device=DEVICE, backend="triton", **options)
    expected = run(given.to(torch.float64), backend="reference", **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert_close(name, actual[name], value, TOLERANCE[case.name], floor=FLOOR)
    return actual


def yardstick(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """A plain low-precision routine: operands rounded to `dtype`, float32 sums, the correction rounded at the end."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    leaves = {name: x.requires_grad_() for name, x in case.to(dtype).tensors.items()}
    unit = {name: rounded(l2_normalize(leaves[name])) for name in ("q", "k")}
    found = Case(case.name, leaves | unit, None).call(normalize=False, backend="torch")
    correction = rounded(found.correction)
    random = torch.Generator().manual_seed(1)
    dy = rounded(torch.randn(correction.shape, generator=random, dtype=torch.float64))
    if case.name == "decay":
        loss = (rounded(unit["q"] - leaves["gate"].unsqueeze(-1) * correction) * dy).sum()
    else:
        # The gradient of a solution x of A x = q is that of u . (q - A x), with A u = dy: both are operands.
        adjoint = Case("mesa", leaves | unit | {"q": dy}, None).call(normalize=False, backend="torch").query
        x, u = (rounded(y.detach()) for y in (found.query, adjoint))
        total = leaves["log_decay"].mean(-1).double().cumsum(1).transpose(1, 2)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril().float()
        scores = decay * torch.einsum("bihd,bjhd->bhij", x, unit["k"])
        pushed = torch.einsum("bhij,bjhd->bihd", scores, unit["k"])
        loss = (u * (unit["q"] - pushed - leaves["ridge"] * x)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"correction": correction.detach(), **{f"d_{n}": x for n, x in zip(leaves, gradients, strict=True)}}


def common_mean(case: Case) -> Case:
    """Keys of which 95 % are one direction, so that sums nearly cancel."""
    mean = torch.nn.functional.normalize(case.tensors["k"][:1, :1], dim=-1)
    noise = torch.nn.functional.normalize(case.tensors["k"], dim=-1)
    return case.replace(k=0.95**0.5 * mean + 0.05**0.5 * noise)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("name", KINDS)
def test_any_length(name: str, tokens: int) -> None:
    check(make_case(name, 1, tokens, 1, 16))


@pytest.mark.parametrize(("name", "rows", "heads", "size"), [("mesa", 2, 2, 5), ("decay", 1, 1, 48)])
def test_any_size_from_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, heads: int, size: int
) -> None:  # fmt: skip
    # Less than a power of two, and full parts of the columns before one that is empty.
    monkeypatch.setattr(kernels, "PART", 16)
    check(make_case(name, rows, 18, heads, size, seen=0, parts=1))


def test_more_chunks_than_a_scan_takes_at_once() -> None:
    tokens = 16 * kernels.STEP + 1
    check(make_case("decay", 1, tokens, 1, 5, slow=0.05))


@pytest.mark.parametrize("want", [("query",), ("state",), ("query", "correction")])
@pytest.mark.parametrize("name", KINDS)
def test_every_gradient_from_every_output(name: str, want: tuple[str, ...]) -> None:
    case = make_case(name, 1, 20, 1, 5).to(torch.float32)
    actual = run(case, device=DEVICE, backend="triton", want=want)
    # The loop has no correction of its own, so the chunked form, which is tested against it, stands for it.
    expected = run(case.to(torch.float64), backend="torch" if "correction" in want else "reference", want=want)
    for field, value in expected.items():
        assert_close(field, actual[field], value, TOLERANCE[name], floor=FLOOR)


@pytest.mark.parametrize(("name", "normalize"), [("decay", "keys"), ("decay", False), ("mesa", "queries")])
def test_queries_and_keys_as_they_are(name: str, normalize: bool | str) -> None:
    case = make_case(name, 1, 20, 1, 16)
    check(case.replace(k=case.tensors["k"] / 4, q=case.tensors["q"] / 4), normalize=normalize)


@pytest.mark.parametrize("name", KINDS)
def test_padding_is_exact_and_nothing_in_it_spreads(name: str) -> None:
    case = make_case(name, *MASK.shape, 1, 5).to(torch.float32)
    actual = check(case, mask=MASK)
    real = MASK.bool()
    for gradient in ("d_q", "d_k", "d_log_decay", *(("d_gate",) if name == "decay" else ())):
        assert not actual[gradient][~real].any(), gradient
    query = case.to(torch.float32, DEVICE).call(mask=MASK.to(DEVICE), backend="triton").query.cpu()
    assert_close("padded query", query[~real], l2_normalize(case.tensors["q"])[~real], 1e-6)
    dirty = case.replace(**{n: case.tensors[n].masked_fill(~real[..., None, None], float("nan")) for n in ("q", "k")})
    found = run(dirty, device=DEVICE, backend="triton", mask=MASK)
    for field, value in actual.items():
        assert torch.equal(found[field], value), field


@pytest.mark.parametrize("boundaries", [[0, 0, 5, 5, 23, 24, 24], [0], [0, 0]])
@pytest.mark.parametrize("name", KINDS)
def test_packed_documents(name: str, boundaries: list[int]) -> None:
    case = make_case(name, 1, boundaries[-1], 1, 5, sequences=len(boundaries) - 1)
    check(case, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(0, 5, 1, 16), (2, 0, 1, 16)])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_in_gives_nothing_out_and_the_state_back(name: str, shape: tuple[int, ...]) -> None:
    case = make_case(name, *shape).to(torch.float32)
    assert case.state is not None
    found = run(case, device=DEVICE, backend="triton")
    assert found["correction"].shape == shape
    for field, value in zip(KINDS[name]._fields, case.state, strict=True):
        assert torch.equal(found[field], value)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_through_the_state_equal_those_of_the_whole(name: str) -> None:
    case = make_case(name, 1, 24, 1, 5, seen=0).to(torch.float32)
    weight = torch.randn(1, 24, 1, 5, dtype=torch.float64)
    pieces = tuple(n for n in case.tensors if n != "ridge")

    def gradients(case: Case, cuts: list[int], backend: str, device: str) -> dict[str, Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in case.tensors.items()}
        state, parts = None, []
        for start, end in itertools.pairwise(cuts):
            part = {n: (x[:, start:end] if n in pieces else x).to(device) for n, x in leaves.items()}
            result = Case(name, part, state).call(backend=backend)
            state = tuple(result.statistics)
            parts.append(result.query.cpu().double())
        found = torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    exact = gradients(case.to(torch.float64), [0, 24], "reference", "cpu")
    for field, value in gradients(case, [0, 1, 19, 24], "triton", DEVICE).items():
        assert_close(field, value, exact[field], TOLERANCE[name])


@pytest.mark.parametrize("name", KINDS)
def test_views_and_expanded_tensors_are_read_right(name: str) -> None:
    case = make_case(name, 2, 20, 1, 16, parts=1)
    q, k, _ = torch.randn(2, 20, 1, 48, dtype=torch.float64).split(16, dim=-1)
    decay = case.tensors["log_decay"][..., :1].expand(2, 20, 1, 4)
    case = case.replace(q=q, k=k.flip(1).transpose(0, 1).contiguous().transpose(0, 1), log_decay=decay)
    assert not any(case.tensors[x].is_contiguous() for x in ("q", "k", "log_decay"))
    given = case.to(torch.float32)
    results = []
    for backend, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
        leaves = {n: x.to(device, dtype).requires_grad_() for n, x in given.tensors.items()}
        # The gradient of a sum arrives expanded, with strides of zero.
        query = Case(name, leaves, None).call(backend=backend).query
        results.append([query, *torch.autograd.grad(query.sum(), list(leaves.values()))])
    for actual, expected in zip(*reversed(results), strict=True):
        assert_close("values", actual.cpu(), expected, 1e-5, floor=FLOOR)


def test_strong_and_mixed_decays_are_as_exact_as_weak_ones() -> None:
    """Decays whose sum over a chunk has no float32 digits left for the small ones at its end."""
    case = make_case("decay", 1, 40, 1, 5, parts=1)
    decay = torch.full_like(case.tensors["log_decay"], -0.03)
    decay[:, 3:13] = -3000.0
    decay[:, 20] = -30.0
    check(case.replace(log_decay=decay), want=("query",))


@pytest.mark.parametrize("name", KINDS)
def test_equal_keys_and_zero_keys(name: str) -> None:
    case = make_case(name, 1, 20, 1, 5, seen=0)
    for k in (case.tensors["k"][:, :1].expand(1, 20, 1, 5), torch.zeros(1, 20, 1, 5)):
        found = run(case.replace(k=k).to(torch.float32), device=DEVICE, backend="triton")
        assert all(torch.isfinite(value).all() for value in found.values())
        if name == "decay":
            assert found["correction"].abs().max() <= 20 * torch.finfo(torch.float32).eps


def test_a_gate_of_zero_changes_no_bit() -> None:
    case = make_case("decay", 1, 20, 1, 16).to(torch.float16, DEVICE)
    case = case.replace(gate=torch.zeros_like(case.tensors["gate"]))
    assert torch.equal(case.call(normalize="keys", backend="triton").query, case.tensors["q"])


@pytest.mark.parametrize("steps", [1, 3])
def test_a_few_steps_of_the_solver_are_those_of_the_chunked_form(steps: int) -> None:
    case = make_case("mesa", 1, 20, 1, 16).to(torch.float32)
    found = case.to(torch.float32, DEVICE).call(steps=steps, backend="triton")
    expected = case.to(torch.float64).call(steps=steps, backend="torch")
    assert relative_error(expected.query, case.to(torch.float64).call(backend="reference").query) > 1e-2
    assert_close("query", found.query.cpu(), expected.query, 1e-5)


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("decay", torch.float16), *(("mesa", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))],
)
def test_errs_at_most_twice_the_yardstick(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """In chunks of the size that users get, for keys of nearly one direction: solved queries are nearly orthogonal to
    it, so that forms of both cancel.
    """
    monkeypatch.setattr(kernels, "configuration", CONFIGURATION)
    case = common_mean(make_case(name, 1, 130, 1, 64, seen=0, slow=0.1))
    given = case.to(dtype)
    actual = run(given, device=DEVICE, backend="triton", want=("query",))
    exact = run(given.to(torch.float64), backend="reference", want=("query",))
    assert actual["d_q"].dtype == actual["d_k"].dtype == dtype
    assert actual["correction"].dtype == actual["second_moment"].dtype == torch.float32
    for field, value in yardstick(case, dtype).items():
        error, yard = relative_error(actual[field], exact[field]), relative_error(value, exact[field])
        print(f"{field}: {error:.2e} against {yard:.2e}")
        # Where rounding is all that is left of float32, twice that of another order of sums is too narrow.
        limit = max(2 * yard, 5e-6 if dtype == torch.float32 else 0.0)
        assert error <= limit, f"{field}: {error:.2e} against {yard:.2e}"


def test_float16_takes_keys_and_states_of_any_size() -> None:
    """Sums of long keys pass what float16 holds; the systems are scaled before they are solved in it."""
    case = make_case("mesa", 1, 40, 1, 16, seen=0, slow=0.1)
    case = case.replace(k=300 * case.tensors["k"], ridge=300**2 * case.tensors["ridge"]).to(torch.float16)
    options: dict[str, Any] = {"normalize": "queries", "query_dtype": torch.float32}
    found = case.to(torch.float16, DEVICE).call(backend="triton", **options)
    expected = case.to(torch.float64).call(backend="reference", normalize="queries")
    assert expected.statistics.second_moment.max() > 10 * torch.finfo(torch.float16).max
    assert_close("query", found.query.cpu(), expected.query, 2e-3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("name", KINDS)
def test_compiles_without_a_break_and_agrees(name: str) -> None:
    case = make_case(name, 1, 9, 1, 16).to(torch.float32, DEVICE)

    def read(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = dict(zip(case.tensors, tensors, strict=True))
        result = Case(name, leaves, case.state).call(backend="triton")
        return result.query * 2, result.correction, *result.statistics

    results = []
    for function in (read, torch.compile(read, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().requires_grad_() for x in case.tensors.values()]
        outputs = function(*inputs)
        loss = sum(x.square().sum() for x in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("kind", ["state", "packed", "padded"])
@pytest.mark.parametrize("name", KINDS)
def test_the_operators_keep_their_promises(name: str, kind: str) -> None:
    sequences = 3 if kind == "packed" else 1
    case = make_case(name, 1, 9, 1, 16, sequences=sequences, parts=1).to(torch.float32, DEVICE)
    assert case.state is not None
    mask = torch.arange(9, device=DEVICE)[None] > 2 if kind == "padded" else None
    boundaries = [0, 3, 3, 9] if kind == "packed" else None
    x = {n: t.requires_grad_(kind == "state") for n, t in case.tensors.items()}
    state = [t.requires_grad_(kind == "state") for t in case.state]
    decay = x["log_decay"].squeeze(-1).detach().requires_grad_(kind == "state")
    checks = ("test_schema", "test_faketensor") if kind != "state" else None
    options = {"atol": 1e-6, "rtol": 1e-6} | ({"test_utils": checks} if checks else {})
    if name == "decay":
        arguments = (x["q"], x["k"], x["gate"], decay, *state, mask, boundaries, True, True, kind == "state", True)
        library.opcheck(decay_read.overload, arguments, **options)
    else:
        arguments = (x["q"], x["k"], x["ridge"], decay, *state, mask, boundaries, 30, True, True, False)
        library.opcheck(mesa_read.overload, arguments, **options)


def test_what_the_kernels_do_not_take_is_named() -> None:
    for name in KINDS:
        case = make_case(name, 1, 3, 1, 16, seen=0)
        with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got float64.*backend='torch'"):
            case.call(backend="triton")
        with pytest.raises(ValueError, match=r"D up to 128, got 129.*backend='torch'"):
            make_case(name, 1, 3, 1, 129, seen=0).to(torch.float32).call(backend="triton")
        other = case._replace(state=make_case(name, 2, 3, 1, 16).state).to(torch.float32)
        with pytest.raises(ValueError, match="belongs to 2 sequences, but the input has 1"):
            other.call(backend="triton")


def test_kernels_fit_a_processor() -> None:
    """They compile for sm_90 and take no more shared memory than a block may have there, 227 KiB."""
    script = Path(__file__).with_name("compile_decayed_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "9", "0", "bf16", "64"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 9
    for kernel, *_, memory in found:
        assert 0 < memory <= 227 * 1024, f"{kernel} takes {memory} bytes"
