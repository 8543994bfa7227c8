"""The examples of docs/models.md run as they stand, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.filterwarnings("ignore")  # of libraries that the Trainer uses
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    for block in blocks:
        if "lm_eval" not in block:  # tests/models/test_lm_eval.py does that
            exec(block, found)
    # The padded row goes on as the short prompt alone does.
    alone = found["model"].eval()
    assert found["answer"].shape == (2, 5 + 8)
    assert torch.isfinite(alone(found["short"]).logits).all()
