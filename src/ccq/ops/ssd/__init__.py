"""State-space duality: linear attention whose state forgets by one factor per head and token, the rule of Mamba2."""

from __future__ import annotations

from torch import Tensor

from ccq.ops import flash_linear_attention, write_rule_step
from ccq.ops.checks import check_backend
from ccq.ops.layout import ChunkLayout
from ccq.ops.ssd.chunked import chunk_length, chunked_state_space_duality
from ccq.ops.ssd.fused import RULE, fused_state_space_duality
from ccq.ops.ssd.reference import state_space_duality_reference
from ccq.ops.write_rule import WriteRuleResult, check_gate, check_write_arguments

__all__ = ["chunked_state_space_duality", "state_space_duality", "state_space_duality_reference"]

BACKENDS = ("auto", "reference", "torch", "fla")
"""Accepted backends. "auto" is "fla" on a GPU where flash-linear-attention is installed and takes the input (float16 or
bfloat16, D and V multiples of 16, D up to 256; on Hopper cards with Triton 3.7.1 or newer), "torch" otherwise; but
for one token without gradients on a GPU with triton, in any dtype but float64, a kernel of the recurrence."""


def state_space_duality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    overwrite_state: bool = False,
    backend: str = "auto",
) -> WriteRuleResult:
    """Write keys and values into a state that decays by one factor per head, and read it with the queries.

        S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

    (Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality", arXiv:2405.21060.) In Mamba2's words q is C, k is B, v is dt * x, log_decay is dt * A, and scale is 1: the
    step size dt belongs to the values, because it differs between heads that share their keys. A decay that does not
    depend on the token makes it the retention of Sun et al. (arXiv:2307.08621).

    Args:
        q, k: [B, T, G, D], float64, float32, float16 or bfloat16. Head h of the H heads of v reads group h // (H / G);
            G = H gives every head queries and keys of its own.
        v: [B, T, H, V], the dtype of q; G divides H.
        log_decay: [B, T, H], natural logarithm of the decay, finite and at most 0; the dtype of q or the dtype of the
            state.
        scale: factor of the output, D**-0.5 by default.
        state: [N, H, D, V], the memory to begin with, float32 (float64 for float64 input); zeros by default.
        cu_seqlens: [N + 1] integers, B = 1: the row holds N documents, and cu_seqlens is where each begins and, last,
            where the row ends. Each document has a state of its own. Documents may be empty. Without it every row is
            a sequence, N = B.
        mask: [B, T], 1 = real token, 0 = padding, on the left, the right or both sides. Padding writes nothing,
            decays nothing, has output 0 and no gradient.
        overwrite_state: the caller has no more use for `state`. On a GPU, where one token is read without gradients,
            the new state then takes its place in memory and is returned as the same tensor; elsewhere nothing changes.
        backend: "reference" (token by token), "torch" (in chunks), "fla" (flash-linear-attention's kernels, on a GPU:
            in chunks from two tokens or packed documents on; one token is a kernel of the recurrence, or, where a
            gradient is wanted, the recurrence in PyTorch), or "auto", see `BACKENDS`.

    Returns:
        WriteRuleResult: output [B, T, H, V] in the dtype of v, state [N, H, D, V] after the last token. Sums and
        states are float32 (float64 for float64 input); "fla" rounds what it multiplies, the states of its chunks
        included, to the dtype of q. Both are differentiable in every tensor argument.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape, dtype, device or backend name; on a CPU also for
        log_decay that is not finite or above 0, and a mask with holes; backend "fla" was asked for and does not take
        the input.
        ImportError, RuntimeError: backend "fla" was asked for and its package is missing or refused, or the tensors
        are on a CPU.
    """
    check_backend(backend, BACKENDS)
    given = state
    sequences, state = check_write_arguments(q, k, v, state, cu_seqlens, mask, grouped=True)
    check_gate("log_decay", log_decay, tuple(v.shape[:3]), q, highest=0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sequences.mask is not None:
        padding = ~sequences.mask.unsqueeze(-1)
        q, k, v = (x.masked_fill(padding.unsqueeze(-1), 0) for x in (q, k, v))
        log_decay = log_decay.masked_fill(padding, 0)

    if backend == "fla":
        flash_linear_attention.check_usable(RULE, q, v)
    one = q.shape[1] == 1 and sequences.boundaries is None
    if one and backend in ("auto", "fla") and write_rule_step.is_chosen(q, k, v, log_decay, state):
        in_place = overwrite_state and write_rule_step.can_overwrite(given)
        return write_rule_step.write_token(q, k, v, log_decay, None, state, scale, in_place=in_place)
    if backend == "auto":
        backend = "fla" if flash_linear_attention.is_chosen(RULE, q, v) else "torch"
    if backend == "reference":
        return state_space_duality_reference(q, k, v, log_decay, state, scale, sequences.boundaries)
    if backend == "fla" and q.numel() and v.numel() and not one:
        return fused_state_space_duality(q, k, v, log_decay, given, scale, sequences.boundaries)
    layout = ChunkLayout.of(q, sequences.boundaries, chunk_length(q.shape[-1]))
    return chunked_state_space_duality(q, k, v, log_decay, state, scale, layout)
