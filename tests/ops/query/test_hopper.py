"""What can be known without a card of the kernels that have a warp for copies alone."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from ccq.ops.query import kernels

pytestmark = pytest.mark.skipif(
    not kernels.triton.__version__.startswith(kernels.GLUON_RELEASE),
    reason="the kernels are written for another release of Triton",
)

PROCESSORS = 132


def test_kernels_fit_the_card() -> None:
    script = Path(__file__).with_name("compile_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    names = collections.Counter(each["kernel"] for each in found)
    # With keys that are copied or read where they are: forward and backward, and the gradients of the keys without and
    # with one from elsewhere.
    assert names == {"_covariance_kernel": 4, "_key_gradients_kernel": 4}
    for each in found:
        # From the CUDA C++ programming guide, and its cache of instructions as measured (docs/kernels.md).
        assert each["shared"] <= 227 * 1024, each
        assert each["instructions"] <= 128 * 1024, each
        assert each["local"] <= 160, each


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Any:
    hopper = kernels._hopper()
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS)
    )
    hopper._schedule.cache_clear()
    yield hopper._schedule
    hopper._schedule.cache_clear()


@pytest.mark.parametrize("shape", [(1, 128, 1), (3, 384, 2), (1, 4096, 6), (8, 4096, 6), (5, 1152, 7)], ids=str)
def test_every_item_is_taken_once_and_work_is_even(shape: tuple[int, int, int], schedule: Any) -> None:
    sequences, tokens, heads = shape
    order, items, programs = schedule(*shape, torch.device("cpu"))
    assert items == sequences * tokens // 128 * heads
    assert programs == min(items, PROCESSORS)
    assert sorted(order.tolist()) == list(range(items))
    # Tiles that an item reads: its own two, those before it in its chunk, and four of the state.
    tiles = [6 + (item // heads % (tokens // 128)) % 2 * 2 for item in order.tolist()]
    loads = [sum(tiles[program::programs]) for program in range(programs)]
    # No program has more than one item more than another, nor are the heavy ones all in the same hands.
    assert max(loads) - min(loads) <= 8 + 2


def test_other_calls_are_left_to_the_kernels_that_take_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    config = kernels.configuration(torch.bfloat16, 256, torch.device("cpu"))

    def chosen(
        tokens: int = 256, size: int = 256, dtype: torch.dtype = torch.bfloat16, centred: bool = True,
        is_cuda: bool = True, **changes: Any,
    ) -> bool:  # fmt: skip
        shape = (2, tokens, 3, size)
        # The plan says which card it is, of input that may be on the meta device.
        q, begin = torch.empty(shape, dtype=dtype, device="meta"), SimpleNamespace(is_cuda=is_cuda, device="cuda")
        plan = kernels.make_plan(2, tokens, None, None, config, torch.device("cpu"))._replace(begin=begin)
        return kernels.copies_apart(q, plan._replace(**changes), config, centred)

    assert chosen()
    assert chosen(tokens=384)
    assert not chosen(tokens=320)
    assert not chosen(tokens=0)
    assert not chosen(size=128)
    assert not chosen(dtype=torch.float16)
    assert not chosen(centred=False)
    assert not chosen(is_cuda=False)
    assert not chosen(full=False)
    for name, value in (
        (("triton", "__version__"), "3.8.0"),
        (("torch", "cuda", "get_device_capability"), lambda _: (10, 0)),
        (("interpreted",), lambda: True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(".".join((kernels.__name__, *name)), value)
            assert not chosen(), name
