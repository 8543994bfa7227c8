"""The operators of the short convolution; the layer around them is tested in tests/nn/test_conv.py."""

from __future__ import annotations

import pytest
import torch
from tests.ops.fixtures import fla_stand_in
from torch import library

from ccq.ops import short_convolution as module


@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 7]])
@pytest.mark.parametrize("extras", [False, True])
def test_the_operators_keep_their_promises(
    monkeypatch: pytest.MonkeyPatch, extras: bool, boundaries: list[int] | None
) -> None:
    fla_stand_in.install(monkeypatch)
    rows, sequences = (2, 2) if boundaries is None else (1, 3)
    x, weight = torch.randn(rows, 7, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True) if extras else None
    state = torch.randn(sequences, 3, 5, requires_grad=True) if extras else None
    library.opcheck(module.forward.overload, (x, weight, bias, state, boundaries), atol=1e-5, rtol=1e-5)
    given = [None if t is None else t.detach() for t in (x, weight, bias, state)]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, (torch.randn_like(x), *given, boundaries), test_utils=checks)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel_size", "expected"),
    [
        ("cuda", torch.bfloat16, 4, True),
        ("cuda", torch.float16, 2, True),
        ("cuda", torch.bfloat16, 1, False),
        ("cuda", torch.bfloat16, 5, False),
        ("cuda", torch.float32, 4, False),
        ("cpu", torch.bfloat16, 4, False),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
def test_the_kernel_is_used_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, kernel_size: int, expected: bool, usable: bool
) -> None:
    monkeypatch.setattr(module, "reason_against", lambda *_: "" if usable else "it rains")
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 6, dtype=dtype, device=device)
        assert module.is_chosen(x, kernel_size) == (expected and usable)
        assert not module.is_chosen(torch.empty(2, 0, 6, dtype=dtype, device=device), kernel_size)
