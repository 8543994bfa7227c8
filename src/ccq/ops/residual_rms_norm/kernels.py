"""The norm of the residual stream in Triton.

Legend: T vectors of size E (BE the next power of two), P programs of the backward pass.

With z = x, or x + branch, r = rsqrt(mean(z^2) + eps) and n = r z: y = n * weight. Backward, with g = dy * weight:
dz = r (g - n mean(g n)) and what reaches z elsewhere; dweight = sum of dy * n, of which each program adds up its own
vectors in a fixed order; the sums of the programs are added outside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow

WARPS = 8
PROGRAMS = 528
"""P: four for each processor of an H200; half as many take a quarter longer, more are no faster."""


@triton.jit
def _forward_kernel(
    x,
    branch,
    weight,
    y,
    total,
    reciprocal,
    eps,
    E: tl.constexpr,
    BE: tl.constexpr,
    BRANCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    vector = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BE)
    at, fits = vector * E + column, column < E
    b_z = tl.load(x + at, mask=fits, other=0.0).to(tl.float32)
    if BRANCH:
        b_z += tl.load(branch + at, mask=fits, other=0.0).to(tl.float32)
        # The norm, too, is of the rounded sum.
        b_z = b_z.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, b_z.to(total.dtype.element_ty), mask=fits)
    b_r = tl.rsqrt(tl.sum(b_z * b_z, 0) / E + eps)
    tl.store(reciprocal + vector, b_r)
    b_w = tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)
    tl.store(y + at, (b_z * b_r * b_w).to(y.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["vectors"])
def _backward_kernel(
    dy,
    z,
    weight,
    reciprocal,
    beside,
    d_z,
    d_branch,
    d_weight,
    vectors,
    E: tl.constexpr,
    BE: tl.constexpr,
    BESIDE: tl.constexpr,
    BRANCH: tl.constexpr,
):
    """d_weight [P, E]. d_branch is d_z in another dtype."""
    column = tl.arange(0, BE)
    fits = column < E
    b_w = tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)
    b_dw = tl.zeros((BE,), tl.float32)
    for vector in range(tl.program_id(0), vectors, tl.num_programs(0)):
        at = tl.cast(vector, tl.int64) * E + column
        b_r = tl.load(reciprocal + vector)
        b_n = tl.load(z + at, mask=fits, other=0.0).to(tl.float32) * b_r
        b_dy = tl.load(dy + at, mask=fits, other=0.0).to(tl.float32)
        b_dw += b_dy * b_n
        b_g = b_dy * b_w
        b_dz = b_r * (b_g - b_n * (tl.sum(b_g * b_n, 0) / E))
        if BESIDE:
            b_dz += tl.load(beside + at, mask=fits, other=0.0).to(tl.float32)
        tl.store(d_z + at, b_dz.to(d_z.dtype.element_ty), mask=fits)
        if BRANCH:
            tl.store(d_branch + at, b_dz.to(d_branch.dtype.element_ty), mask=fits)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * E + column, b_dw, mask=fits)


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch [T, E], contiguous: y in `dtype`, z (x itself without a branch), r [T] float32."""
    vectors, size = x.shape
    y, reciprocal = torch.empty_like(x, dtype=dtype), x.new_empty(vectors, dtype=torch.float32)
    total = x if branch is None else torch.empty_like(x)
    # A pointer that a kernel does not use must still be one.
    _forward_kernel[(vectors,)](
        x, x if branch is None else branch, weight, y, total, reciprocal, eps,
        E=size, BE=triton.next_power_of_2(size), BRANCH=branch is not None, num_warps=WARPS,
        **early_launch(x.device),
    )  # fmt: skip
    return y, total, reciprocal


def backward(
    dy: Tensor, z: Tensor, weight: Tensor, reciprocal: Tensor, beside: Tensor | None, branch: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dz in the dtype of z, the same in the dtype `branch` (dz itself for None), and dweight."""
    vectors, size = z.shape
    programs = min(PROGRAMS, vectors)
    d_z = torch.empty_like(z)
    d_branch = d_z if branch is None else torch.empty_like(z, dtype=branch)
    d_weight = z.new_empty((programs, size), dtype=torch.float32)
    _backward_kernel[(programs,)](
        dy, z, weight, reciprocal, z if beside is None else beside, d_z, d_branch, d_weight, vectors,
        E=size, BE=triton.next_power_of_2(size), BESIDE=beside is not None, BRANCH=branch is not None,
        num_warps=WARPS,
    )  # fmt: skip
    return d_z, d_branch, d_weight.sum(0).to(weight.dtype)
