"""One token at a time: the kernels of the decode step, with new and with overwritten statistics, against the recurrence
in float64.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.query.test_curvature_conditioned_query import Case, make_case
from torch import Tensor, library

from ccq.ops.query import (
    KeyStatistics,
    LinearGate,
    PackedKeyStatistics,
    curvature_conditioned_query,
    fused,
    update_and_read_,
)

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3}
FLOOR = 1e-6


def on_device(statistics: KeyStatistics, device: str = DEVICE) -> KeyStatistics:
    return KeyStatistics(*(x.clone().to(device) for x in statistics))


class Step(NamedTuple):
    query: Tensor
    correction: Tensor
    statistics: KeyStatistics
    """After the token; kept."""


def steps(case: Case, in_place: bool, **options: Any) -> list[Step]:
    """The results of one call a token."""
    statistics, results = on_device(case.statistics), []
    packed = PackedKeyStatistics(*(x.clone() for x in PackedKeyStatistics.of(statistics)))
    for i in range(case.q.shape[1]):
        q, k, gate = (x[:, i : i + 1].to(DEVICE) for x in case[:3])
        options |= {"return_correction": True, "backend": "triton"}
        if in_place:
            places = [x.data_ptr() for x in packed]
            query, correction, last = update_and_read_(q, k, gate, packed, **options)
            assert last is packed and [x.data_ptr() for x in last] == places
            statistics = KeyStatistics(*(x.clone() for x in packed.unpacked()))
        else:
            query, correction, statistics = curvature_conditioned_query(q, k, gate, statistics=statistics, **options)
        assert correction is not None
        results.append(Step(query, correction, statistics))
    return results


def check(case: Case, in_place: bool, **options: Any) -> None:
    dtype = case.q.dtype
    exact = case.to(torch.float64)
    results = steps(case, in_place, **options)
    expected = curvature_conditioned_query(
        *exact[:3], statistics=exact.statistics, return_correction=True, backend="reference", **options
    )
    query = torch.cat([result.query for result in results], 1)
    correction = torch.cat([result.correction for result in results], 1)
    last = results[-1].statistics
    assert query.dtype == dtype and correction.dtype == torch.float32
    assert_close("query", query.cpu(), expected.query, TOLERANCE[dtype])
    assert_close("correction", correction.cpu(), expected.correction, TOLERANCE[torch.float32], floor=FLOOR)
    assert_close("second moment", last.second_moment.cpu(), expected.statistics.second_moment, TOLERANCE[torch.float32])
    assert_close("total", last.total.cpu(), expected.statistics.total, TOLERANCE[torch.float32])
    assert torch.equal(last.count.cpu(), expected.statistics.count)
    assert torch.equal(last.second_moment, last.second_moment.mT)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 16, 24, 33, 40, 71, 96, 256])
def test_steps_equal_the_recurrence(size: int, in_place: bool) -> None:
    check(make_case(2, 3, 2, size).to(torch.float32), in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_query_can_come_back_in_float32(in_place: bool) -> None:
    case = make_case(2, 3, 2, 24).to(torch.float16)
    exact = case.to(torch.float64)
    expected = curvature_conditioned_query(*exact[:3], statistics=exact.statistics, backend="reference").query
    found = torch.cat([result.query for result in steps(case, in_place, query_dtype=torch.float32)], 1)
    assert found.dtype == torch.float32
    assert_close("query", found.cpu(), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("centred", "normalize"), [(False, True), (True, False), (False, False), (True, "keys"), (True, "queries")]
)
def test_uncentred_and_raw(centred: bool, normalize: bool | str, in_place: bool) -> None:
    check(make_case(2, 3, 2, 24).to(torch.float32), in_place, centred=centred, normalize=normalize)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sequence_from_its_first_token(in_place: bool) -> None:
    check(make_case(2, 20, 2, 16, seen=0).to(torch.float32), in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_float16(in_place: bool) -> None:
    check(make_case(2, 3, 2, 40).to(torch.float16), in_place)


def test_each_sequence_has_its_own_count() -> None:
    case = make_case(3, 3, 2, 16).to(torch.float32)
    check(case._replace(statistics=case.statistics._replace(count=torch.tensor([9, 20, 700]))), True)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sequence_does_not_depend_on_its_neighbours(in_place: bool) -> None:
    case = make_case(3, 2, 2, 40).to(torch.float32)
    together = steps(case, in_place)[-1]
    statistics = KeyStatistics(*(x[1:2] for x in case.statistics))
    alone = steps(Case(*(x[1:2] for x in case[:3]), statistics), in_place)[-1]
    assert torch.equal(together.query[1:2], alone.query)
    assert torch.equal(together.statistics.second_moment[1:2], alone.statistics.second_moment)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "inputs"), [(16, 32), (40, 70)])
def test_a_gate_that_the_kernel_computes(size: int, inputs: int, dtype: torch.dtype, scaled: bool) -> None:
    """Every sequence and head with its own."""
    case = make_case(2, 1, 2, size).to(dtype)
    x, weight = torch.randn(2, 1, inputs).to(dtype), (torch.randn(2, inputs) * inputs**-0.5).to(dtype)
    bias, scale = torch.randn(2), torch.randn(2) if scaled else None
    gate = torch.sigmoid(x.double() @ weight.double().T + bias.double())
    exact = case.to(torch.float64)
    expected = curvature_conditioned_query(
        *exact[:2], gate if scale is None else scale.double() * gate, statistics=exact.statistics, backend="reference"
    ).query
    linear = LinearGate(*(None if y is None else y.to(DEVICE) for y in (x, weight, bias, scale)))
    for backend in ("triton", "torch"):
        statistics = PackedKeyStatistics.of(on_device(case.statistics))
        q, k = (y.to(DEVICE) for y in case[:2])
        found = update_and_read_(q, k, linear, statistics, query_dtype=torch.float32, backend=backend)
        # From PyTorch the product is rounded before the bias is added.
        limit = 1e-3 if backend == "torch" and dtype == torch.float16 else 3e-6
        assert_close(backend, found.query.cpu(), expected, limit)


@pytest.mark.parametrize("in_place", [False, True])
def test_views_and_a_number_as_gate(in_place: bool) -> None:
    packed = torch.randn(2, 1, 2, 48, device=DEVICE)
    q, k, _ = packed.split(16, dim=-1)
    statistics = on_device(make_case(2, 1, 2, 16).to(torch.float32).statistics)
    expected = curvature_conditioned_query(
        q.double().cpu(),
        k.double().cpu(),
        0.3,
        statistics=KeyStatistics(*(x.double().cpu() for x in statistics[:2]), statistics.count.cpu()),
        backend="reference",
    )
    if in_place:
        packed = PackedKeyStatistics.of(statistics)
        query, correction, _ = update_and_read_(q, k, 0.3, packed, backend="triton")
        last = packed.unpacked()
    else:
        query, correction, last = curvature_conditioned_query(q, k, 0.3, statistics=statistics, backend="triton")
    assert correction is None
    assert_close("query", query.cpu(), expected.query, 3e-6)
    assert_close("second moment", last.second_moment.cpu(), expected.statistics[0], 3e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_in_place_without_triton(backend: str) -> None:
    case = make_case(2, 1, 2, 5)
    statistics = PackedKeyStatistics.of(on_device(case.statistics, "cpu"))
    addresses = [x.data_ptr() for x in statistics]
    actual = update_and_read_(*case[:3], statistics, return_correction=True, backend=backend)
    expected = curvature_conditioned_query(
        *case[:3], statistics=case.statistics, return_correction=True, backend="reference"
    )
    assert actual.correction is not None and expected.correction is not None
    assert_close("correction", actual.correction, expected.correction, 1e-12)
    assert [x.data_ptr() for x in statistics] == addresses
    for name, new, want in zip(KeyStatistics._fields, statistics.unpacked(), expected.statistics, strict=True):
        assert_close(name, new, want, 1e-12)


def test_no_sequences() -> None:
    case = make_case(0, 1, 2, 16).to(torch.float32)
    for in_place in (False, True):
        (result,) = steps(case, in_place)
        assert result.query.shape == (0, 1, 2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 2}, r"q must have shape \[N, 1, H, D\], got \[2, 2, 3, 16\]"),
        ({"requires_grad": True}, "knows no gradients.*torch.no_grad"),
        ({"strided": True}, r"statistics.triangle must be contiguous.*strides \(816, 272, 2\)"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_input_is_named(change: dict[str, Any], message: str) -> None:
    q = torch.randn(2, change.get("tokens", 1), 3, 16, requires_grad="requires_grad" in change)
    statistics = PackedKeyStatistics.of(KeyStatistics.zeros(2, 3, 16, dtype=q.dtype, device=q.device))
    if "strided" in change:
        statistics = statistics._replace(triangle=torch.zeros(2, 3, 272)[..., ::2])
    with pytest.raises(ValueError, match=message):
        update_and_read_(q, q.detach(), 0.1, statistics, backend=change.get("backend", "auto"))


def test_other_statistics_are_named() -> None:
    q, statistics = torch.randn(2, 1, 3, 16), KeyStatistics.zeros(2, 3, 16, dtype=torch.float32, device="cpu")
    packed = PackedKeyStatistics.of(statistics)
    with pytest.raises(TypeError, match=r"must be a PackedKeyStatistics, made of KeyStatistics by \.of\(\); got KeyS"):
        update_and_read_(q, q, 0.1, statistics)
    with pytest.raises(TypeError, match=r"must be a KeyStatistics, as an earlier call returned it; got PackedKeyS"):
        curvature_conditioned_query(q, q, 0.1, statistics=packed)
    short = packed._replace(triangle=packed.triangle[..., :-1].contiguous())
    with pytest.raises(ValueError, match=r"statistics.triangle must have shape .*136.*135"):
        update_and_read_(q, q, 0.1, short)
    with pytest.raises(TypeError, match=r"statistics\.count must be int64, got"):
        update_and_read_(q, q, 0.1, packed._replace(count=packed.count.float()))


def test_other_gates_are_named() -> None:
    q = torch.randn(2, 1, 3, 16)
    packed = PackedKeyStatistics.of(KeyStatistics.zeros(2, 3, 16, dtype=torch.float32, device="cpu"))
    gate = LinearGate(torch.randn(2, 1, 48), torch.randn(3, 48), torch.randn(3), None)
    for name, wrong in (
        ("inputs", torch.randn(1, 1, 48)),
        ("weight", torch.randn(3, 47)),
        ("bias", torch.randn(4)),
        ("scale", torch.randn(1)),
    ):
        with pytest.raises(ValueError, match=f"gate.{name} must have shape"):
            update_and_read_(q, q, gate._replace(**{name: wrong}), packed)
    with pytest.raises(TypeError, match=r"gate\.bias must be a floating-point tensor, got"):
        update_and_read_(q, q, gate._replace(bias=torch.ones(3, dtype=torch.int64)), packed)
    learned = gate._replace(bias=gate.bias.requires_grad_())
    with pytest.raises(ValueError, match="knows no gradients"):
        update_and_read_(q, q, learned, packed)


def operator_inputs(in_place: bool) -> list[Tensor | None]:
    """With a linear gate where that is possible."""
    case = make_case(2, 1, 2, 24).to(torch.float32)
    if in_place:
        gate = (torch.randn(2, 1, 48), torch.randn(2, 48), torch.randn(2), None)
        given = (*case[:2], *gate, *PackedKeyStatistics.of(case.statistics))
    else:
        given = (*case[:3], *case.statistics)
    return [None if x is None else x.to(DEVICE) for x in given]


@pytest.mark.parametrize("correction", [True, False])
def test_the_operators_keep_their_promises(correction: bool) -> None:
    for operator in (fused.read_token, fused.read_token_):
        inputs = operator_inputs(operator is fused.read_token_)
        library.opcheck(operator.overload, (*inputs, True, True, True, correction, correction))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_in_place_compiles_without_a_break_and_agrees() -> None:
    q, k, *gate, triangle, total, count = operator_inputs(True)
    fields = (triangle, total, count)

    def decode(q: Tensor, k: Tensor, gate: list[Tensor], *fields: Tensor) -> Tensor:
        return update_and_read_(q, k, LinearGate(*gate), PackedKeyStatistics(*fields), backend="triton").query + 1

    results = []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        own = [x.clone() for x in fields]
        results.append((function(q, k, gate, *own), *own))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)
    assert not torch.equal(results[0][1], fields[0])


def test_all_is_loaded_before_any_of_it_is_overwritten() -> None:
    """Where several threads load one number, a barrier stands in front of the first store. For all sizes, because the
    compiler lays small ones out in other ways.
    """
    script = Path(__file__).with_name("compile_overwriting.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 5 * (2 * 2 + 2 + 1)
    for kernel, size, order in found:
        # A single thread counts the token.
        order = order.removesuffix("LS") if kernel == "_triangle_kernel" else order
        assert re.fullmatch("[LB]+B[SB]+", order), (kernel, size, order)
