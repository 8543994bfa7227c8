"""The kernels inside the chunks of gated linear attention on a GPU: the same tests that the interpreter runs elsewhere,
and the sizes of models.
"""

from __future__ import annotations

import pytest
import torch
from tests.ops.gla.test_kernels import check

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 300])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str)
def test_every_size_and_length(dtype: torch.dtype, tolerance: float, size: int, tokens: int) -> None:
    check(tokens, size, dtype, tolerance)


@pytest.mark.parametrize("decay", [0.0, 1.0, 30.0, 1000.0])
def test_every_decay(decay: float) -> None:
    check(300, 64, torch.bfloat16, 4e-3, decay=decay)


def test_packed_documents() -> None:
    check(300, 64, torch.bfloat16, 4e-3, boundaries=[0, 5, 5, 130, 131, 300])
