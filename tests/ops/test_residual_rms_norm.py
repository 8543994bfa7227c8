"""The norm of the residual stream and of what is added to it, in PyTorch and by its kernels, against its formula in
float64, on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor, library
from torch.utils.checkpoint import checkpoint

from ccq.ops import residual_rms_norm as module
from ccq.ops.residual_rms_norm import residual_rms_norm

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 0.05  # large enough to be seen
Results = dict[str, Tensor | None]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
by_use = pytest.mark.parametrize("used", ["both", "y", "z"])
with_and_without = pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])


class Dtypes(NamedTuple):
    stream: torch.dtype = F32
    branch: torch.dtype | None = None
    norm: torch.dtype | None = None
    """Of y under autocast to it; None for no autocast."""
    weight: torch.dtype = F32


PLAIN = Dtypes()


class Inputs(NamedTuple):
    x: Tensor
    branch: Tensor | None
    weight: Tensor
    dy: Tensor
    dz: Tensor


def draw(*shape: int, dtypes: Dtypes = PLAIN) -> Inputs:
    """As they arrive. The gradient from elsewhere is about as large as that through the norm."""
    x, branch, dy, dz = (torch.randn(shape, dtype=F64) for _ in range(4))
    return Inputs(
        (2 * x).to(dtypes.stream),
        None if dtypes.branch is None else branch.to(dtypes.branch),
        torch.randn(shape[-1], dtype=F64).to(dtypes.weight),
        dy.to(dtypes.norm or dtypes.stream),
        (dz / 2).to(dtypes.stream),
    )


def by_hand(z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def formula(inputs: Inputs, used: str = "both") -> dict[str, Tensor]:
    """In float64, of the rounded sum, which gives its gradient to both of its parts."""
    x, branch, weight, dy, dz = inputs
    total = x if branch is None else (x.double() + branch.double()).to(x.dtype)
    z, weight = (each.detach().double().requires_grad_() for each in (total, weight))
    y = by_hand(z, weight, EPS)
    d_z, d_weight = torch.autograd.grad(y, (z, weight), dy.double() * (used != "z"))
    d_z = d_z + dz.double() * (used != "y")
    return {"y": y.detach(), "z": z.detach(), "x": d_z, "branch": d_z, "weight": d_weight}


def differentiate(
    inputs: Inputs, norm: torch.dtype | None = None, used: str = "both", call: Callable[..., Any] = residual_rms_norm
) -> Results:
    """Outputs and gradients, under autocast to `norm` where there is one."""
    named = {"x": inputs.x, "branch": inputs.branch, "weight": inputs.weight}
    leaves = {name: each.detach().to(DEVICE).requires_grad_() for name, each in named.items() if each is not None}
    with torch.autocast(DEVICE, norm, enabled=norm is not None):
        y, z = call(leaves["x"], leaves["weight"], EPS, branch=leaves.get("branch"))
    dy, dz = inputs.dy.to(DEVICE), inputs.dz.to(DEVICE)
    outputs, gradients = {"both": ((y, z), (dy, dz)), "y": (y, dy), "z": (z, dz)}[used]
    found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=used == "z")
    results = {"y": y.detach(), "z": z.detach(), **dict(zip(leaves, found, strict=True))}
    return {name: None if each is None else each.cpu() for name, each in results.items()}


def assert_rounded_once(name: str, actual: Tensor, exact: Tensor) -> None:
    """Every value by itself; 1e-6 is for float32 in between."""
    kind = torch.finfo(actual.dtype)
    allowed = (kind.eps / 2 + 1e-6) * exact.abs() + kind.smallest_normal * kind.eps
    beyond = (actual.double() - exact).abs() > allowed
    assert not beyond.any(), f"{name}: {int(beyond.sum())} of {beyond.numel()} values are further off than by rounding"


def check(
    inputs: Inputs, norm: torch.dtype | None = None, used: str = "both", call: Callable[..., Any] = residual_rms_norm
) -> None:
    found, exact = differentiate(inputs, norm, used, call), formula(inputs, used)
    y, z = found["y"], found["z"]
    assert y is not None and z is not None
    assert y.dtype == (norm or inputs.x.dtype) and z.dtype == inputs.x.dtype
    assert torch.equal(z.double(), exact["z"])
    assert_rounded_once("y", y, exact["y"])
    for name in ("x", "branch", "weight"):
        leaf, gradient = getattr(inputs, name), found.get(name)
        if leaf is None or (used == "z" and name == "weight"):
            assert gradient is None
            continue
        assert gradient is not None and gradient.dtype == leaf.dtype
        # Along a short z the two parts of its gradient nearly cancel.
        assert_close(name, gradient, exact[name], torch.finfo(leaf.dtype).eps / 2 + 2e-6, floor=1e-5)
        if used == "z":
            assert torch.equal(gradient, inputs.dz.to(leaf.dtype))


@contextmanager
def choosing_kernels(programs: int) -> Iterator[None]:
    """On a CPU and in any dtype, with at most so many programs in the backward pass."""
    from ccq.ops.residual_rms_norm import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_chosen", lambda x, branch: True)
        patch.setattr(kernels, "PROGRAMS", programs)
        yield


@pytest.fixture
def kernels() -> Iterator[None]:
    """The kernels are used, and a program takes several vectors."""
    with choosing_kernels(3):
        yield


@with_and_without
def test_in_float64_it_is_the_formula(added: bool) -> None:
    inputs = draw(2, 5, 7, dtypes=Dtypes(F64, F64 if added else None, None, F64))
    x, branch, weight, *_ = inputs
    for name, value in differentiate(inputs).items():
        assert value is not None and value.dtype == F64
        assert_close(name, value, formula(inputs)[name], 1e-14)
    leaves = [each.requires_grad_() for each in (x, weight, branch) if each is not None]

    def both(x: Tensor, weight: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, z = residual_rms_norm(x, weight, EPS, branch=branch)
        return y, 1 * z  # gradcheck takes no input for an output

    assert torch.autograd.gradcheck(both, leaves)


def test_without_a_branch_the_stream_comes_back_itself() -> None:
    x, _, weight, *_ = draw(3, 8)
    for autocast in (False, True):
        with torch.autocast("cpu", BF16, enabled=autocast):
            assert residual_rms_norm(x, weight, EPS)[1] is x


@by_use
@with_and_without
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_composed_from_torch_it_rounds_once(dtype: torch.dtype, added: bool, used: str) -> None:
    check(draw(4, 6, 96, dtypes=Dtypes(dtype, dtype if added else None, None, dtype)), used=used)


@by_use
@pytest.mark.parametrize("branch", [None, BF16, F32], ids=str)
def test_under_autocast_the_norm_is_rounded_and_the_stream_is_not(branch: torch.dtype | None, used: str) -> None:
    check(draw(4, 6, 96, dtypes=Dtypes(F32, branch, BF16)), BF16, used)


@pytest.mark.parametrize("autocast", [None, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_the_norm_has_the_dtype_that_linear_maps_compute_in(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """Under autocast, too, they leave float64 as it is."""
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        expected = F.linear(x, torch.eye(8, dtype=dtype)).dtype
        for branch in (None, x):
            y, z = residual_rms_norm(x, weight, EPS, branch=branch)
            assert (y.dtype, z.dtype) == (expected, dtype)
            F.linear(y, torch.eye(8, dtype=dtype))


def test_composed_the_sum_is_in_the_wider_dtype() -> None:
    x, branch, weight, *_ = draw(3, 8, dtypes=Dtypes(BF16, F32))
    y, z = residual_rms_norm(x, weight, EPS, branch=branch)
    assert branch is not None and y.dtype == z.dtype == F32
    assert torch.equal(z, x.float() + branch)
    assert_close("y", y, by_hand(z.double(), weight.double(), EPS), 1e-6)


@by_use
@with_and_without
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(2, 5, 96), (10, 130), (1, 64), (1, 1, 33), (4, 1), (2, 2048)], ids=str)
def test_the_kernels_are_the_formula(shape: tuple[int, ...], added: bool, used: str) -> None:
    check(draw(*shape, dtypes=Dtypes(F32, F32 if added else None)), used=used)


@by_use
@pytest.mark.usefixtures("kernels", "gpu_rounding")
@pytest.mark.parametrize(
    "dtypes",
    [
        Dtypes(F32, None, BF16),
        Dtypes(F32, BF16, BF16),
        Dtypes(F32, F32, BF16),
        Dtypes(F32, F16, F16),
        Dtypes(F32, BF16, F16),
        Dtypes(F32, BF16),
        Dtypes(BF16, None, None, BF16),
        Dtypes(BF16, BF16, None, BF16),
        Dtypes(BF16, BF16, F16),
        Dtypes(F16, None),
        Dtypes(F16, F16),
        Dtypes(F16, F16, BF16, F16),
        Dtypes(F16, F16, None, F16),
    ],
    ids=lambda dtypes: "-".join(str(each).removeprefix("torch.") for each in dtypes),
)
def test_every_dtype_is_rounded_once(dtypes: Dtypes, used: str) -> None:
    """Stream, branch, norm and weight: sums and norms are float32, and each output is rounded for itself."""
    for shape in ((2, 5, 96), (7, 130), (1, 20)):
        check(draw(*shape, dtypes=dtypes), dtypes.norm, used)


@given(
    vectors=st.integers(1, 30),
    size=st.integers(1, 300),
    added=st.booleans(),
    programs=st.sampled_from([1, 4, 528]),
    used=st.sampled_from(["both", "y", "z"]),
)
def test_any_sizes(vectors: int, size: int, added: bool, programs: int, used: str) -> None:
    with choosing_kernels(programs):
        check(draw(vectors, size, dtypes=Dtypes(F32, F32 if added else None)), used=used)


@given(
    power=st.integers(-12, 12),
    vectors=st.integers(1, 9),
    size=st.integers(1, 200),
    added=st.booleans(),
    programs=st.sampled_from([2, 528]),
)
def test_the_norm_does_not_see_a_scale(power: int, vectors: int, size: int, added: bool, programs: int) -> None:
    """Powers of two, and of four for what is added to the squares, change no bit of y and of the weight's gradient; the
    gradient of the stream is divided by them.
    """
    x, branch, weight, dy, _ = draw(vectors, size, dtypes=Dtypes(F32, F32 if added else None))
    results = []
    for scale in (1.0, 2.0**power):
        leaves = [(scale * x).to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_()]
        with choosing_kernels(programs):
            y, z = residual_rms_norm(
                *leaves, EPS * scale**2, branch=None if branch is None else (scale * branch).to(DEVICE)
            )
            d_x, d_weight = torch.autograd.grad(y, leaves, dy.to(DEVICE))
        results.append((y.detach(), z.detach() / scale, d_x * scale, d_weight))
    for plain, scaled in zip(*results, strict=True):
        assert torch.equal(plain, scaled)


@given(vectors=st.integers(2, 12), size=st.integers(1, 150), added=st.booleans(), programs=st.integers(1, 13))
def test_a_vector_does_not_see_the_others(vectors: int, size: int, added: bool, programs: int) -> None:
    """Bit for bit, whatever they hold and wherever it stands among them."""
    x, branch, weight, dy, dz = draw(vectors, size, dtypes=Dtypes(F32, F32 if added else None))
    real = torch.randperm(vectors)[: vectors // 2 + 1]
    spoilt = torch.full_like(x, float("nan"))
    spoilt[real] = x[real]
    with choosing_kernels(programs):
        among = differentiate(Inputs(spoilt, branch, weight, dy, dz))
        alone = differentiate(Inputs(x[real], None if branch is None else branch[real], weight, dy[real], dz[real]))
    for name in ("y", "z", "x", *(("branch",) if added else ())):
        ours, theirs = among[name], alone[name]
        assert ours is not None and theirs is not None
        assert torch.equal(ours[real], theirs) and not theirs.isnan().any(), name


@with_and_without
def test_the_number_of_programs_changes_nothing_but_the_order_of_a_sum(added: bool) -> None:
    inputs = draw(20, 70, dtypes=Dtypes(F32, F32 if added else None))
    exact, first = formula(inputs)["weight"], None
    for programs in (1, 3, 7, 20, 528):
        with choosing_kernels(programs):
            found = differentiate(inputs)
        weight = found.pop("weight")
        assert weight is not None
        assert_close(f"{programs} programs", weight, exact, 1e-6)
        first = first or found
        for name, value in found.items():
            assert value is not None and torch.equal(value, first[name]), name


@with_and_without
@pytest.mark.usefixtures("kernels")
def test_strided_and_expanded_tensors(added: bool) -> None:
    plain = draw(4, 6, 40, dtypes=Dtypes(F32, F32 if added else None))
    x, branch, weight, dy, dz = plain
    strided = Inputs(
        x.transpose(0, 1).contiguous().transpose(0, 1),
        None if branch is None else branch[:1, :1].expand(4, 6, 40),
        torch.stack((weight, weight), 1)[:, 0],
        torch.stack((dy, dy), 2)[:, :, 1],
        dz[:, :1].expand(4, 6, 40),
    )
    assert not any(each.is_contiguous() for each in strided if each is not None)
    check(strided)
    # Rows with gaps, which stay as they are when the vectors are listed.
    dz = torch.stack((dz, dz), 2)[:, :, 1]
    check(Inputs(torch.stack((x, x), 3)[..., 0], branch, weight, dy.transpose(0, 1).contiguous().transpose(0, 1), dz))


@with_and_without
@pytest.mark.parametrize("fused", [False, True], ids=["composed", "kernels"])
def test_squares_do_not_overflow_and_nothing_is_divided_by_zero(fused: bool, added: bool) -> None:
    """Squares of float16 end at 256; a vector of zeros has the gradient of one that is very short."""
    x, _, weight, dy, _ = draw(3, 96, dtypes=Dtypes(F16, None, None, F16))
    x, eps = 2000 * x, 1e-6
    x[1] = 0
    branch = torch.zeros_like(x) if added else None
    leaves = [each.to(DEVICE).requires_grad_() for each in (x, weight)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_chosen", lambda x, branch: fused)
        y, _ = residual_rms_norm(*leaves, eps, branch=None if branch is None else branch.to(DEVICE))
        d_x, _ = torch.autograd.grad(y, leaves, dy.to(DEVICE))
    assert_close("y", y.cpu(), by_hand(x.double(), weight.double(), eps), torch.finfo(F16).eps)
    assert not y[1].any()
    assert_close("x", d_x[1].cpu(), (dy * weight)[1].double() / eps**0.5, 2 * torch.finfo(F16).eps)


@with_and_without
@pytest.mark.usefixtures("kernels")
def test_the_gradients_of_the_stream_meet_in_the_operator(added: bool) -> None:
    """So that there is no sum of them outside, and no copy of the stream."""
    inputs = draw(2, 9, 24)
    x, weight = inputs.x.to(DEVICE).requires_grad_(), inputs.weight.to(DEVICE)
    y, z = residual_rms_norm(x, weight, EPS, branch=torch.ones_like(x) if added else None)
    (operator,), (same,) = ([each for each, _ in out.grad_fn.next_functions] for out in (y, z))
    assert operator is same and type(operator).__name__ == f"ccq_{'add_' * added}rms_normBackward"
    assert added or z.data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wanted", ["x", "branch", "weight"])
def test_one_gradient_alone(wanted: str) -> None:
    """Of a stream, a branch or a weight that learns beside others that do not."""
    inputs = draw(5, 24, dtypes=Dtypes(F32, F32))
    for drawn in (inputs, inputs._replace(branch=None)):
        x, branch, weight, dy, dz = (None if each is None else each.detach().to(DEVICE) for each in drawn)
        leaf = {"x": x, "branch": branch, "weight": weight}[wanted]
        if leaf is None:
            continue
        y, z = residual_rms_norm(x, weight, EPS, branch=branch)
        assert not y.requires_grad and not z.requires_grad
        leaf.requires_grad_()
        y, z = residual_rms_norm(x, weight, EPS, branch=branch)
        outputs, gradients = ((y,), (dy,)) if wanted == "weight" else ((y, z), (dy, dz))
        (found,) = torch.autograd.grad(outputs, leaf, gradients)
        assert_close(wanted, found.cpu(), formula(drawn)[wanted], 2e-6)


@with_and_without
@pytest.mark.usefixtures("kernels")
def test_without_gradients_nothing_is_recorded(added: bool) -> None:
    inputs = draw(5, 24, dtypes=Dtypes(F32, F32 if added else None))
    exact = formula(inputs)
    x, branch, weight, *_ = (None if each is None else each.to(DEVICE).requires_grad_() for each in inputs)
    assert x is not None and weight is not None
    with torch.no_grad():
        y, z = residual_rms_norm(x, weight, EPS, branch=branch)
    assert not y.requires_grad and y.grad_fn is None and z.grad_fn is None
    assert_close("y", y.cpu(), exact["y"], 2e-6)
    assert torch.equal(z.cpu().double(), exact["z"])


@with_and_without
@pytest.mark.usefixtures("kernels")
def test_under_activation_checkpointing(added: bool) -> None:
    """Recomputed in the backward pass, they give the gradients of the formula too."""
    inputs = draw(4, 24, dtypes=Dtypes(F32, F32 if added else None))
    leaves = [each.to(DEVICE).requires_grad_() for each in (inputs.x, inputs.weight, inputs.branch) if each is not None]
    dy, dz = inputs.dy.to(DEVICE), inputs.dz.to(DEVICE)

    def loss(x: Tensor, weight: Tensor, branch: Tensor | None = None) -> Tensor:
        y, z = residual_rms_norm(x, weight, EPS, branch=branch)
        return (y * dy).sum() + (z * dz).sum()

    found = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    exact = formula(inputs)
    for name, gradient in zip(("x", "weight", "branch"), found, strict=False):
        assert_close(name, gradient.cpu(), exact[name], 2e-6)


@with_and_without
@pytest.mark.usefixtures("kernels")
def test_a_gradient_of_a_gradient_is_refused(added: bool) -> None:
    x, branch, weight, *_ = draw(3, 24, dtypes=Dtypes(F32, F32 if added else None))
    x, weight = x.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_()
    y, z = residual_rms_norm(x, weight, EPS, branch=None if branch is None else branch.to(DEVICE))
    for loss in (y.sum(), y.sum() + z.square().sum()):
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"ccq::{'add_' * added}rms_norm has no derivative"):
            first.sum().backward()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtypes", [Dtypes(F32, F32), Dtypes(F32, BF16, BF16), Dtypes(BF16, BF16)], ids=str)
def test_the_operators_keep_their_promises(dtypes: Dtypes) -> None:
    x, branch, weight, dy, dz = (each.to(DEVICE) for each in draw(7, 24, dtypes=dtypes) if each is not None)
    leaves = [each.clone().requires_grad_() for each in (x, branch, weight)]
    close = {"atol": 1e-6, "rtol": 1e-6}
    library.opcheck(module.forward.overload, (leaves[0], leaves[2], EPS, dy.dtype), **close)
    library.opcheck(module.add_forward.overload, (*leaves, EPS, dy.dtype), **close)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    _, reciprocal = module.forward(x, weight, EPS, dy.dtype)
    for beside in (None, dz):
        library.opcheck(module.backward.overload, (dy, x, weight, reciprocal, beside), test_utils=checks)
        for kind in (None, F16):
            arguments = (dy, beside, x, weight, reciprocal, kind)
            library.opcheck(module.add_backward.overload, arguments, test_utils=checks)


def compiled() -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(residual_rms_norm, fullgraph=True, backend="aot_eager")


@with_and_without
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("norm", [None, BF16], ids=str)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_compiles_without_a_break_and_agrees(norm: torch.dtype | None, added: bool) -> None:
    """The operators, as other code may call them in a compiled graph."""
    inputs = draw(2, 9, 24, dtypes=Dtypes(F32, (norm or F32) if added else None, norm))
    eager = differentiate(inputs, norm)
    in_a_graph = differentiate(inputs, norm, call=compiled())
    for name, value in eager.items():
        other = in_a_graph[name]
        assert value is not None and other is not None and other.dtype == value.dtype
        assert torch.equal(other, value), name


@with_and_without
@pytest.mark.parametrize("norm", [None, BF16], ids=str)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_composed_it_compiles_without_a_break_and_agrees(norm: torch.dtype | None, added: bool) -> None:
    inputs = draw(2, 9, 24, dtypes=Dtypes(F32, (norm or F32) if added else None, norm))
    check(inputs, norm, call=compiled())


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """Which torch.autocast would not switch on without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("device", "stream", "branch", "norm", "size", "expected"),
    [
        ("cuda", F32, None, BF16, 2048, True),
        ("cuda", F32, BF16, BF16, 100, True),
        ("cuda", F32, F32, F16, 16_384, True),
        ("cuda", F32, F32, F16, 16_385, False),
        ("cuda", BF16, None, None, 64, True),
        ("cuda", F16, F16, None, 64, True),
        ("cuda", BF16, F16, None, 64, False),  # PyTorch adds them in float32
        ("cuda", BF16, F32, None, 64, False),
        ("cuda", F32, None, None, 64, False),
        ("cuda", F64, None, BF16, 64, False),
        ("cuda", F64, None, None, 64, False),
        ("cpu", BF16, BF16, None, 64, False),
    ],
)
def test_the_kernels_are_used_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    stream: torch.dtype,
    branch: torch.dtype | None,
    norm: torch.dtype | None,
    size: int,
    expected: bool,
    installed: bool,
) -> None:
    monkeypatch.setattr(module, "TRITON_INSTALLED", installed)
    torch.set_autocast_enabled("cuda", norm is not None)
    torch.set_autocast_dtype("cuda", norm or F16)
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        x, nothing = (torch.empty(rows, 3, size, dtype=stream, device=device) for rows in (2, 0))
        added, no_more = (torch.empty(rows, 3, size, dtype=branch or stream, device=device) for rows in (2, 0))
        assert module.is_chosen(x, None if branch is None else added) == (expected and installed)
        assert not module.is_chosen(nothing, None if branch is None else no_more)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not module.is_chosen(x, None if branch is None else added)


def test_shapes_without_numbers() -> None:
    """On a device for which there is no autocast."""
    x = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16)
    y, z = residual_rms_norm(x, torch.empty(8, device="meta", dtype=torch.bfloat16), 1e-5, branch=x)
    assert y.shape == z.shape == x.shape and y.dtype == z.dtype == torch.bfloat16
