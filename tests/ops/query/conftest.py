"""Triton's kernels run on a GPU where there is one, and in Triton's interpreter elsewhere.

The interpreter has to be asked for before triton is imported, which the library does at the first call of a kernel.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
