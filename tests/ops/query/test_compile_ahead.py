"""The kernels of the backward pass are compiled while the forward pass runs: the right ones, where that can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ccq.ops.query import KeyStatistics, curvature_conditioned_query_and_keys, fused

pytest.importorskip("triton")

from ccq.ops.query import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKWARD = {"_covariance_kernel", "_key_gradients_kernel", "_scan_gradients_kernel", "_scan_moments_kernel"}


@pytest.mark.skipif(
    not kernels.triton.__version__.startswith(kernels.GLUON_RELEASE), reason="kernels for another release of Triton"
)
def test_a_backward_pass_finds_its_kernels_compiled() -> None:
    """But for the last one where no gradient reaches the keys from elsewhere, which is not what training does."""
    script = Path(__file__).with_name("compile_ahead.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_ALWAYS_COMPILE"] = "1"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert [(each["size"], each["beside"]) for each in found] == [(256, True), (64, True), (128, False)]
    for each in found:
        assert set(each["ahead"]) >= BACKWARD
        assert each["later"] == ([] if each["beside"] else ["_key_gradients_kernel"])


def test_where_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert fused._compiles_ahead(torch.zeros(2))
    captures = True
    assert not fused._compiles_ahead(torch.zeros(2))
    captures = False
    monkeypatch.undo()
    assert not fused._compiles_ahead(torch.zeros(2))
    with torch._subclasses.FakeTensorMode():
        assert not fused._compiles_ahead(torch.empty(2, device="cuda"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is to be compiled ahead, where that can be."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fused, "_compiles_ahead", lambda q: True)
    monkeypatch.setattr(kernels, "compile_backward_ahead", lambda *given, **options: found.append((given, options)))
    return found


def test_what_is_compiled_ahead(asked: list[tuple[Any, ...]]) -> None:
    q, k, gate = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 2, 16), torch.rand(1, 6, 2)
    q, k, gate = (x.to(DEVICE) for x in (q, k, gate))
    mask, edges = torch.tensor([[0, 0, 1, 1, 1, 1]]).to(DEVICE), torch.tensor([0, 4, 6]).to(DEVICE)
    state = KeyStatistics.zeros(1, 2, 16, dtype=q.dtype, device=q.device)
    learned = state._replace(total=state.total.clone().requires_grad_())

    def read(**options: Any) -> None:
        curvature_conditioned_query_and_keys(q, k, gate, backend="triton", **options)

    read()
    assert asked == [], "nobody wants a gradient"
    k.requires_grad_()
    described = (q.shape, q.dtype, q.device, gate.dtype, q.dtype)
    plain = {"padded": False, "unit_queries": True, "unit_keys": True, "centred": True, "state_gradients": False}
    for options, changes in (
        ({}, {"full": True, "has_moment": False}),
        ({"mask": mask}, {"full": False, "padded": True, "has_moment": False}),
        ({"cu_seqlens": edges}, {"full": False, "has_moment": False}),
        ({"statistics": state, "normalize": "keys"}, {"full": True, "has_moment": True, "unit_queries": False}),
        ({"statistics": learned, "centred": False}, {"has_moment": True, "centred": False, "state_gradients": True}),
    ):
        read(**options)
        assert asked.pop() == (described, {"full": True, **plain, **changes})
    assert asked == []


def test_a_pass_waits_for_what_is_under_way_and_compiles_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "copies_apart", lambda *_: False)
    monkeypatch.setattr(kernels, "_compiled_variants", set())
    monkeypatch.setattr(kernels, "_under_way", {})
    monkeypatch.setattr(kernels.Launcher, "_compile", lambda self, _: compiled.append(self.place.type == "meta"))
    q = torch.zeros(1, 64, 2, 16)
    config = kernels.configuration(q.dtype, 16, q.device)
    plan = kernels.make_plan(1, 64, None, None, config, q.device)
    held, here = (kernels.Launcher(x, plan, config, True, True, True) for x in (q.to("meta"), q))
    assert held.compiled(lambda: pytest.fail("launched"), "backward") is None
    (thread,) = kernels._under_way.values()
    assert held.compiled(lambda: pytest.fail("launched"), "backward") is None and len(kernels._under_way) == 1
    assert here.compiled(lambda: "launched", "backward") == "launched"
    assert not thread.is_alive() and kernels._under_way == {} and compiled == [True]
    assert here.compiled(lambda: "again", "backward") == "again" and compiled == [True]
    assert here.compiled(lambda: "other", "forward") == "other" and compiled == [True, False]
