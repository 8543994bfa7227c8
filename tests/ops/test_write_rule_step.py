"""One token of a write rule by its kernel, against the recurrences in float64, on a GPU or in Triton's interpreter; and
when the write rules take it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures import fla_stand_in
from tests.ops.fixtures.write_rules import Inputs, WriteRuleBattery
from tests.ops.gated_delta_rule import test_gated_delta_rule
from tests.ops.gla import test_gla
from tests.ops.ssd import test_ssd
from torch import Tensor, library

from ccq.ops import write_rule_step as module
from ccq.ops.write_rule import WriteRuleResult

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES: dict[str, WriteRuleBattery] = {
    "gla": test_gla.TestGatedLinearAttention(),
    "gated delta rule": test_gated_delta_rule.TestGatedDeltaRule(),
    "ssd": test_ssd.TestStateSpaceDuality(),
    "ssd in groups": test_ssd.TestSharedKeys(),
}
GATES = ("log_decay", "beta")
SINGLE = 1e-6
"""Relative error allowed to a state, and to an output before it is rounded."""

by_rule = pytest.mark.parametrize("rule", RULES)
by_backend = pytest.mark.parametrize("backend", ["auto", "fla"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used on a CPU as it is on a GPU."""

    def is_chosen(q: Tensor, *others: Tensor) -> bool:
        return not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)))

    if DEVICE == "cpu":
        monkeypatch.setattr(module, "is_chosen", is_chosen)


@pytest.fixture
def calls(kernel: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call of the kernel, whether it is in place."""
    found: list[bool] = []
    inner = module.write_token

    def write_token(*arguments: Any, in_place: bool) -> WriteRuleResult:
        found.append(in_place)
        return inner(*arguments, in_place=in_place)

    monkeypatch.setattr(module, "write_token", write_token)
    return found


def make(rule: str, rows: int, tokens: int, dtype: torch.dtype, *, half_gates: bool = False, **sizes: int) -> Inputs:
    """Inputs in `dtype`, the state and, unless they are asked for in half precision, the gates in float32."""
    wide = ("state",) if half_gates else ("state", *GATES)
    inputs = RULES[rule].inputs(rows, tokens, **sizes)
    return {name: x.to(torch.float32 if name in wide else dtype).to(DEVICE) for name, x in inputs.items()}


def exactly(rule: str, inputs: Inputs, **options: Any) -> WriteRuleResult:
    """The recurrence in float64."""
    double = {name: x.double().cpu() for name, x in inputs.items()}
    return type(RULES[rule]).rule(**double, backend="reference", **options)


def call(rule: str, inputs: Inputs, **options: Any) -> WriteRuleResult:
    return type(RULES[rule]).rule(**inputs, **options)


def arguments(inputs: Inputs, state: Tensor, scale: float = 0.3) -> tuple[Any, ...]:
    """Of the function and the operators, for one token."""
    return *(inputs[name] for name in ("q", "k", "v", "log_decay")), inputs.get("beta"), state, scale


def token(inputs: Inputs, i: int) -> Inputs:
    return {name: x if name == "state" else x[:, i : i + 1] for name, x in inputs.items()}


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(
    ("rows", "size", "value_size", "half_gates"),
    [(3, 5, 6, False), (1, 48, 80, False), (3, 48, 80, True), (1, 16, 16, True), (1, 256, 40, False), (3, 1, 1, False)],
)
@by_dtype
@by_rule
def test_tokens_equal_the_recurrence(
    rule: str, dtype: torch.dtype, rows: int, size: int, value_size: int, half_gates: bool
) -> None:
    """Several, one after the other: the state is float32 all the way, and an output is rounded once."""
    inputs = make(rule, rows, 3, dtype, half_gates=half_gates, size=size, value_size=value_size)
    expected, before = exactly(rule, inputs, scale=0.3), inputs["state"].clone()
    anew, in_place = inputs["state"], inputs["state"].clone()
    eps = torch.finfo(dtype).eps
    for i in range(3):
        given = anew.clone()
        found = module.write_token(*arguments(token(inputs, i), anew), in_place=False)
        there = module.write_token(*arguments(token(inputs, i), in_place), in_place=True)
        assert there.state is in_place and found.state is not anew and torch.equal(anew, given)
        assert torch.equal(there.output, found.output) and torch.equal(there.state, found.state)
        assert found.output.dtype == dtype and found.state.dtype == torch.float32
        anew = found.state
        assert_close(f"output {i}", found.output.cpu(), expected.output[:, i : i + 1], eps / 2 + SINGLE)
    assert_close("state", anew.cpu(), expected.state, SINGLE)
    assert not torch.equal(in_place, before)


@by_rule
def test_a_sequence_does_not_depend_on_its_neighbours(rule: str) -> None:
    inputs = make(rule, 3, 1, torch.float32, size=12, value_size=20)
    together = module.write_token(*arguments(inputs, inputs["state"]), in_place=False)
    for n in range(3):
        one = {name: x[n : n + 1] for name, x in inputs.items()}
        alone = module.write_token(*arguments(one, one["state"]), in_place=False)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[n : n + 1], part)


@by_rule
def test_strided_tensors(rule: str) -> None:
    inputs = make(rule, 3, 1, torch.float32, size=12, value_size=20)
    strided = {name: torch.stack((x, x), -1)[..., 0] for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    plain = module.write_token(*arguments(inputs, inputs["state"]), in_place=False)
    for state in (strided["state"], inputs["state"]):
        for a, b in zip(module.write_token(*arguments(strided, state), in_place=False), plain, strict=True):
            assert torch.equal(a, b)


@by_rule
def test_the_strongest_decay_forgets_all(rule: str) -> None:
    inputs = make(rule, 2, 1, torch.float32, size=12, value_size=20)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -1e30)
    found = module.write_token(*arguments(inputs, inputs["state"]), in_place=False)
    again = module.write_token(*arguments(inputs, torch.zeros_like(inputs["state"])), in_place=False)
    assert torch.equal(found.state, again.state) and torch.equal(found.output, again.output)


# When it is used.


@pytest.mark.parametrize("installed", [True, False])
def test_the_kernel_is_used_where_it_can_run(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(module, "TRITON_INSTALLED", installed)

    def chosen(size: int = 64, value_size: int = 64, rows: int = 2, device: str = "cuda", dtype: Any = None) -> bool:
        q = torch.empty(rows, 1, 2, size, dtype=dtype or torch.bfloat16, device=device)
        return module.is_chosen(q, q, torch.empty(rows, 1, 2, value_size, dtype=q.dtype, device=device))

    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert chosen(dtype=dtype) == installed
        assert chosen(module.MAX_SIZE, 5) == chosen(1, 700) == installed
        assert not chosen(dtype=torch.float64) and not chosen(device="cpu") and not chosen(module.MAX_SIZE + 1)
        assert not chosen(rows=0) and not chosen(value_size=0) and not chosen(size=0)


def test_the_kernel_is_not_used_where_a_gradient_is_wanted() -> None:
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(2, 1, 2, 64, device="cuda") for _ in range(3)]
        for wanted in tensors:
            wanted.requires_grad_()
            assert not module.is_chosen(*tensors)
            with torch.no_grad():
                assert module.is_chosen(*tensors)
            wanted.requires_grad_(False)
        assert module.is_chosen(*tensors)


def test_what_can_be_overwritten() -> None:
    state = torch.randn(2, 3, 4, 4)
    assert not module.can_overwrite(state)
    with torch.no_grad():
        assert module.can_overwrite(state)
        assert not module.can_overwrite(None)
        assert not module.can_overwrite(state.mT) and not module.can_overwrite(state[:, :1].expand(2, 3, 4, 4))
        assert not module.can_overwrite(state.requires_grad_())


@by_backend
@by_rule
def test_one_token_without_gradients_is_the_kernel(
    rule: str, backend: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fla_stand_in.install(monkeypatch)
    inputs = make(rule, 3, 1, torch.float32)
    expected, before = exactly(rule, inputs), inputs["state"].clone()

    def check(in_place: bool, **options: Any) -> None:
        result = call(rule, inputs, backend=backend, **options)
        assert calls.pop() == in_place and not calls
        assert (result.state is inputs["state"]) == in_place
        assert_close("output", result.output.cpu(), expected.output, SINGLE)
        assert_close("state", result.state.cpu(), expected.state, SINGLE)

    check(False)
    # While gradients are recorded, a state may be wanted later though it has none itself.
    check(False, overwrite_state=True)
    with torch.no_grad():
        check(False)
        assert torch.equal(inputs["state"], before)
        check(True, overwrite_state=True)
        assert not torch.equal(inputs["state"], before)
        inputs["state"] = before.mT.contiguous().mT
        check(False, overwrite_state=True)
        assert torch.equal(inputs["state"], before)
        inputs["state"] = before.clone()
    with torch.inference_mode():
        check(True, overwrite_state=True)


@by_backend
@by_rule
def test_one_token_with_a_gradient_is_the_recurrence_in_pytorch(
    rule: str, backend: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wanted in any of the arguments, and the gradients of all."""
    fla_stand_in.install(monkeypatch)
    inputs = make(rule, 3, 1, torch.float32)
    for name, x in inputs.items():
        wanted = {**inputs, name: x.clone().requires_grad_()}
        call(rule, wanted, backend=backend, overwrite_state=True).output.sum().backward()
        assert wanted[name].grad is not None and wanted[name].grad.any()
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    double = {name: x.double().cpu().requires_grad_() for name, x in inputs.items()}
    results = []
    for found in (call(rule, leaves, backend=backend, overwrite_state=True), exactly(rule, double)):
        tensors = leaves if found.output.dtype == torch.float32 else double
        loss = found.output.square().sum() + found.state.square().sum()
        results.append(torch.autograd.grad(loss, list(tensors.values())))
    for name, actual, value in zip(inputs, *results, strict=True):
        assert_close(name, actual.cpu(), value, 2e-6)
    assert calls == []


@by_backend
@by_rule
@torch.no_grad()
def test_packed_documents_and_more_tokens_are_not_its_business(
    rule: str, backend: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fla_stand_in.install(monkeypatch)
    for tokens, options in ((1, {"cu_seqlens": torch.tensor([0, 1], device=DEVICE)}), (2, {}), (0, {})):
        inputs = make(rule, 1, tokens, torch.float32)
        before = inputs["state"].clone()
        found = call(rule, inputs, backend=backend, overwrite_state=True, **options)
        assert torch.equal(inputs["state"], before)
        expected = exactly(rule, inputs)
        assert_close("output", found.output.cpu(), expected.output, 2e-6)
        assert_close("state", found.state.cpu(), expected.state, 2e-6)
    assert calls == []


@pytest.mark.parametrize("backend", ["torch", "reference"])
@by_rule
@torch.no_grad()
def test_a_backend_asked_for_by_name_stays(rule: str, backend: str, calls: list[bool]) -> None:
    inputs = make(rule, 3, 1, torch.float32)
    before = inputs["state"].clone()
    call(rule, inputs, backend=backend, overwrite_state=True)
    assert calls == [] and torch.equal(inputs["state"], before)


@by_rule
@torch.no_grad()
def test_without_a_state_a_sequence_begins(rule: str, calls: list[bool]) -> None:
    inputs = make(rule, 3, 1, torch.float32)
    expected = exactly(rule, {**inputs, "state": torch.zeros_like(inputs["state"])})
    del inputs["state"]
    found = call(rule, inputs, overwrite_state=True)
    assert calls == [False]
    assert_close("output", found.output.cpu(), expected.output, SINGLE)
    assert_close("state", found.state.cpu(), expected.state, SINGLE)


@pytest.mark.parametrize("overwrite", [False, True])
@by_rule
@torch.no_grad()
def test_padding_writes_nothing(rule: str, overwrite: bool, calls: list[bool]) -> None:
    """Whatever stands in it; the other rows are read as without a mask."""
    inputs = make(rule, 3, 1, torch.float32)
    before, clean = inputs["state"].clone(), exactly(rule, inputs)
    for name in ("q", "k", "v"):
        inputs[name][1] = float("nan")
    inputs["log_decay"][1] = -7
    mask = torch.tensor([[1], [0], [1]], device=DEVICE)
    output, state = call(rule, inputs, mask=mask, overwrite_state=overwrite)
    assert calls == [overwrite]
    assert torch.equal(state[1], before[1]) and not output[1].any()
    for n in (0, 2):
        assert_close(f"output {n}", output[n].cpu(), clean.output[n], SINGLE)
        assert_close(f"state {n}", state[n].cpu(), clean.state[n], SINGLE)


# The operators.


@by_rule
def test_the_operators_keep_their_promises(rule: str) -> None:
    inputs = make(rule, 3, 1, torch.float32)
    for operator in (torch.ops.ccq.write_token, torch.ops.ccq.write_token_):
        library.opcheck(operator.default, arguments(inputs, inputs["state"].clone()), atol=1e-6, rtol=1e-6)


@by_rule
def test_a_gradient_asked_of_the_operator_is_refused(rule: str) -> None:
    inputs = make(rule, 3, 1, torch.float32)
    inputs["v"].requires_grad_()
    found = module.write_token(*arguments(inputs, inputs["state"]), in_place=False)
    with pytest.raises(RuntimeError, match="ccq::write_token has no derivative"):
        (found.output.sum() + inputs["v"].sum()).backward()


@by_rule
def test_autograd_learns_that_the_state_is_another(rule: str) -> None:
    inputs = make(rule, 3, 1, torch.float32)
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    product = (inputs["state"] * factor).sum()
    with torch.no_grad():
        module.write_token(*arguments(inputs, inputs["state"]), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    inputs["v"].requires_grad_()
    before = inputs["state"].clone()
    with pytest.raises(RuntimeError, match=r"ccq::write_token_ .*no_grad"):
        module.write_token(*arguments(inputs, inputs["state"]), in_place=True)
    assert torch.equal(inputs["state"], before)


@pytest.mark.usefixtures("kernel")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@by_rule
@torch.no_grad()
def test_in_place_compiles_without_a_break_and_agrees(rule: str) -> None:
    torch._dynamo.reset()
    inputs = make(rule, 3, 2, torch.float32)
    names = list(inputs)

    def decode(*values: Tensor) -> tuple[Tensor, Tensor]:
        output, state = call(rule, dict(zip(names, values, strict=True)), overwrite_state=True)
        return 2 * output, state

    results = []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        state = inputs["state"].clone()
        address, outputs = state.data_ptr(), []
        for i in range(2):
            output, state = function(*(token({**inputs, "state": state}, i).values()))
            assert state.data_ptr() == address
            outputs.append(output)
        results.append((*outputs, state))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)
    assert not torch.equal(results[1][-1], inputs["state"])
