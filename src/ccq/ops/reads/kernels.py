"""What the Triton kernels of several read steps share: blocks of tokens of one head, unit rows, and running sums.

Legend: N sequences, H heads, D key size (BD the next power of two), BT rows a block, W columns of a running sum.

A running sum over the tokens of a sequence is made in three launches: a kernel sums each block, the scan of the read
step's own kernels adds those up to the sum before each block, and whoever needs the sum at every token makes it inside
its block on the chip. Nothing of one row a token is written. Addresses are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query import kernels
from ccq.ops.query.kernels import _scan_vectors_kernel, _sequence
from ccq.ops.query.reference import NORM_EPSILON

ELEMENTS = 1024
"""Of a block, for each warp: 32 numbers a thread."""


@triton.jit
def locate(begin, end, owner, block_start, H: tl.constexpr, BT: tl.constexpr):
    """Of this program: its block, the sequence that has it, its head, its first vector among all B * T * H, its place
    in the sequence, and how many rows are left there.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    return block, n, h, (first + start) * H + h, start, length - start


@triton.jit
def unit_rows(x, NORMALIZE: tl.constexpr, EPS: tl.constexpr):
    """Rows in float32, normalised or not, and their reciprocal lengths (1 if not)."""
    b_x = x.to(tl.float32)
    b_r = tl.full((x.shape[0],), 1.0, tl.float32)
    if NORMALIZE:
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)
        b_x *= b_r[:, None]
    return b_x, b_r


@triton.jit
def rounded(x):
    """The nearest float32 with the mantissa of tf32, for products in that: their units cut operands off by themselves,
    which makes every product too small.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def through_norm(gradient, unit, reciprocal, NORMALIZE: tl.constexpr):
    """The gradient in x of unit = x * reciprocal."""
    if NORMALIZE:
        gradient = (gradient - unit * tl.sum(gradient * unit, 1)[:, None]) * reciprocal[:, None]
    return gradient


@triton.jit
def reciprocal_count(count, n, start, left, BT: tl.constexpr):
    """1 / t for the rows of a block; 1 past the last."""
    row = tl.arange(0, BT)
    return 1.0 / tl.where(row < left, tl.load(count + n) + start + row + 1, 1).to(tl.float32)


@triton.jit
def suffix_sums(x, after):
    """The sums from each row on, `after` added."""
    return after + (tl.sum(x, 0) - tl.cumsum(x, 0) + x)


class BlockLaunch:
    """Kernels over the blocks of k [B, T, H, D], one program for each block and head. Blocks of None are those of the
    read step's own kernels.
    """

    def __init__(
        self, k: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, block: int | None = None
    ) -> None:
        rows, tokens, self.heads, self.size = k.shape
        config = kernels.configuration(k.dtype, self.size, k.device)
        config = config._replace(block=block or config.block)
        edges = None if boundaries is None else list(boundaries)
        self.plan = kernels.make_plan(rows, tokens, mask, edges, config, k.device)
        self.blocks, self.device = self.plan.owner.shape[0], k.device
        width = max(16, triton.next_power_of_2(self.size))
        self.shape = {"H": self.heads, "D": self.size, "BD": width, "BT": config.block, "EPS": NORM_EPSILON}
        self.warps = max(1, min(16, config.block * width // ELEMENTS))

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel that takes the plan behind its own arguments."""
        plan = self.plan
        sequences = (plan.begin, plan.end, plan.owner, plan.block_start)
        kernel[(self.blocks * self.heads,)](*arguments, *sequences, **self.shape, **constants, num_warps=self.warps)

    def empty(self, *columns: int) -> Tensor:
        """[blocks, H, *columns] float32."""
        return torch.empty((self.blocks, self.heads, *columns), dtype=torch.float32, device=self.device)

    def scan(self, sums: Tensor, initial: Tensor, *, reverse: bool) -> Tensor:
        """Turns sums of blocks [blocks, H, ...] into those before (reverse: behind) each block, in place, and returns
        the last; `initial` [N, H, ...] is what they start from.
        """
        final = torch.empty_like(initial)
        width, columns = 32, initial.shape[2:].numel()
        _scan_vectors_kernel[(initial.shape[0] * self.heads, triton.cdiv(columns, width))](
            sums,
            initial,
            final,
            self.plan.block_start,
            H=self.heads,
            D=columns,
            BV=width,
            STEP=64,
            REVERSE=reverse,
            INITIAL=True,
        )
        return final
