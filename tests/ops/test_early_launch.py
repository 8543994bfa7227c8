"""Where kernels start early, and that none of them touches memory before it waits for the one before."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from ccq.ops import early_launch as module

OPS = Path(module.__file__).parent


def kernels_that_start_early() -> list[tuple[str, ast.FunctionDef]]:
    trees = [(path.parent.name, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(OPS.rglob("*.py"))]
    functions = [(room, node) for room, tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        (f"{room}/{node.name}", node)
        for room, node in functions
        if "EARLY" in [argument.arg for argument in node.args.args] and node.name != "follow"
    ]


def test_they_wait_before_anything_else() -> None:
    kernels = kernels_that_start_early()
    assert len(kernels) >= 10
    for name, kernel in kernels:
        first = kernel.body[0 if ast.get_docstring(kernel) is None else 1]
        assert ast.unparse(first) == "follow(EARLY)", name


@pytest.mark.parametrize(
    ("device", "capability", "driver", "hip", "expected"),
    [
        ("cuda:0", (9, 0), 12_030, None, True),
        ("cuda", (10, 0), 13_000, None, True),
        ("cuda:0", (8, 9), 13_000, None, False),
        ("cuda:0", (9, 0), 12_020, None, False),
        ("cuda:0", (9, 4), 13_000, "6.4", False),
        ("cpu", (9, 0), 13_000, None, False),
    ],
)
def test_where_kernels_start_early(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    driver: int,
    hip: str | None,
    expected: bool,
) -> None:
    module._is_known.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(module, "_driver_version", lambda: driver)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = module.early_launch(torch.device(device))
    module._is_known.cache_clear()
    assert found == ({"EARLY": True, "launch_pdl": True} if expected else {"EARLY": False})


def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, found: Any) -> int:
            found._obj.value = 12_080
            return 0

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert module._driver_version() == 12_080
    for broken in (absent, lambda name: object()):
        monkeypatch.setattr(ctypes, "CDLL", broken)
        assert module._driver_version() == 0
