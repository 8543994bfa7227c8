"""Read steps as modules: what all share, the gate, and the Curvature-Conditioned Query with its key statistics.

`ccq.nn.reads` has the others.

Legend: B rows, N sequences, T tokens, H heads, D key size per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ccq.ops.checks import accumulation_dtype
from ccq.ops.l2_norm import l2_norm
from ccq.ops.layout import positions
from ccq.ops.query import (
    KeyStatistics,
    LinearGate,
    PackedKeyStatistics,
    curvature_conditioned_query_and_keys,
    l2_normalize,
    update_and_read_,
)
from ccq.ops.thin_linear import thin_linear, thin_linear_and_input

GATE_FORMS = ("presplit", "head", "attached")
Normalized = bool | Literal["keys"]
"""Which are unit vectors already: queries and keys (True), keys only, or none (False)."""
# lambda at the start of training: second and first version of arXiv:2606.01294.
_INITIAL_GATE = {"presplit": 0.01, "attached": 0.01, "head": 0.1}


class ReadResult(NamedTuple):
    """What a read step hands to the write rule and to its own next call."""

    query: Tensor
    """[B, T, H, D], in the dtype of q. A `QueryInParts` from the read step that has the memory read twice."""
    statistics: Any
    """The state of the read step, a NamedTuple of tensors of its kind, with the sequences in dimension 0; None while
    the correction is switched off, and of a read step without one.
    """
    keys: Tensor | None = None
    """[B, T, H, D], the keys for the write rule, where they go through the read step: the same numbers as k. The
    gradient that reaches them is added to the read step's own in its kernel. None: k itself."""


class QueryInParts(NamedTuple):
    """A query whose two parts read the memory one after the other: o = S kept - S removed."""

    kept: Tensor
    """[B, T, H, D]"""
    removed: Tensor
    """[B, T, H, D], same dtype"""


class PackableKeyStatistics(KeyStatistics):
    """Key statistics of a read step that takes them as `PackedKeyStatistics` too, which is how a cache keeps them."""

    __slots__ = ()

    def packed(self) -> PackedKeyStatistics:
        return PackedKeyStatistics.of(self)


class StaticKeyStatistics(PackedKeyStatistics):
    """Packed key statistics whose owner, such as a cache, lets them be overwritten.

    A read step that is given them for one token, without a mask and without gradients, updates them in place and
    returns them, instead of new ones: nothing is copied, and the addresses stay. Not those that gradients reach back
    through: the backward pass still needs their values.
    """

    __slots__ = ()


class ReadObservation(NamedTuple):
    """What an observer is shown at every call; detached from the graph."""

    query: Tensor
    """[B, T, H, D], the query before the correction, in the scale in which the operator reads it."""
    gate: Tensor
    """[B, T, H], lambda."""
    correction: Tensor
    """[B, T, H, D] float32 (float64 for float64 input): Sigma q before the gate; the query changes by -gate *
    correction.
    """
    mask: Tensor | None
    """[B, T] as it was passed in: which tokens are real."""

    @property
    def relative_size(self) -> Tensor:
        """[B, T, H] float32: |lambda Sigma q| / |q|, by how much of itself the query changes."""
        change = (self.gate.float() * self.correction.float().norm(dim=-1)).abs()
        return change / self.query.float().norm(dim=-1).clamp(min=1e-12)


class ReadStep(nn.Module):
    """What changes the query before a linear backbone reads its memory with it.

    `enabled = False` switches the correction off: no state is kept, and the query is normalised as the model was
    trained with. `intervene` changes the correction in other ways.
    `observer`, if set, is called with a `ReadObservation` at every call; of a changed correction it sees what is
    carried out.

    keep_length
        False returns the query of unit length that is then corrected. True keeps the length of q: |q| times that.
    """

    keeps_statistics: ClassVar[bool] = True
    """Whether it has a state."""
    has_correction: ClassVar[bool] = True
    """Whether it changes the query beyond its length."""
    given: ClassVar[tuple[str, ...]] = ("factors",)
    """Buffers of numbers that no training changes, in the dtype in which they were given."""
    factors: Tensor | None
    """[H], by what the correction of each head is multiplied; None for 1. No part of the state dict."""

    def __init__(self, num_heads: int, head_dim: int, *, keep_length: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.keep_length = keep_length
        self.enabled = True
        self.observer: Callable[[ReadObservation], None] | None = None
        self.register_buffer("factors", None, persistent=False)

    def intervene(self, *, enabled: bool = True, factors: Tensor | None = None) -> None:
        """Change the correction from now on; whatever an earlier call changed, and is not named, is as it was trained.

        enabled: False switches it off. factors: [H], by what the correction of each head is multiplied. For any factor
        the query is q - factor (q - y), with the query q before the correction and y as the read step has it.
        """
        self.enabled = enabled
        self.factors = factors

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Numbers that were given keep their digits where a model changes its dtype."""
        given = {name: getattr(self, name) for name in self.given}
        super()._apply(fn, recurse)
        for name, before in given.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    @property
    def is_changed(self) -> bool:
        """Whether it does anything else than what was trained."""
        return not self.enabled or self.factors is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether its state says how many tokens a sequence has had, `count` [N]."""
        return (
            self.keeps_statistics and "count" in self.initial_statistics(1, dtype=torch.float32, device="meta")._fields
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor | None = None,
        log_decay: Tensor | None = None,
        statistics: Any = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        normalized: Normalized = False,
    ) -> ReadResult:
        """q, k [B, T, H, D], presplit_query [B, T, H * D] -> the query for the write rule, the state after the last
        token, and the keys for the write rule where they are not k itself.

        presplit_query is the query before the head split, for a gate; None where that is q with its heads side by side.
        log_decay, [B, T, H] or [B, T, H, X], is the backbone's own of each head or of the X parts of each head; read
        steps that forget as the memory does need it. statistics is the state that the call before returned; mask [B, T]
        and cu_seqlens [N + 1] are those of `ccq.ops.query.curvature_conditioned_query`. `normalized` says that
        both are unit vectors already (True), or "keys" are (Gated DeltaNet): they are not normalised again.
        """
        raise NotImplementedError

    def initial_statistics(self, sequences: int, *, dtype: torch.dtype, device: torch.device | str) -> Any:
        """The state of N sequences before their first token, for input of `dtype`."""
        return KeyStatistics.zeros(sequences, self.num_heads, self.head_dim, dtype=dtype, device=torch.device(device))

    @property
    def state_bytes(self) -> int:
        """The size of what is kept of one sequence, for a model in float32 or half precision."""
        if not self.keeps_statistics:
            return 0
        state = self.initial_statistics(1, dtype=torch.float32, device="meta")
        kept = state.packed() if isinstance(state, PackableKeyStatistics) else state
        return sum(x.numel() * x.element_size() for x in kept)

    @property
    def operations_per_token(self) -> int:
        """Multiplications and additions of one token with the state and the gate, in the form of one token at a
        time.
        """
        return 0

    def _takes_query(self, normalized: Normalized) -> bool:
        """Whether the operators take the query as it is."""
        return normalized is True or self.keep_length

    def _query_before(self, q: Tensor, normalized: Normalized) -> Tensor:
        """The query before the correction."""
        return q if self._takes_query(normalized) else l2_norm(q)

    def _normalize(self, normalized: Normalized) -> bool | str:
        """The argument `normalize` of the operators."""
        if normalized == "keys":
            return False if self.keep_length else "queries"
        return False if normalized else "keys" if self.keep_length else True

    def _multiplied(self, gate: Tensor | float, q: Tensor) -> Tensor | float:
        """The gate, [B, T, H] or one number, with the factor of each head."""
        if self.factors is None:
            return gate
        factors = self.factors.to(accumulation_dtype(q.dtype))
        return gate * factors if isinstance(gate, Tensor) else (gate * factors).expand(q.shape[:3])

    def _multiplied_query(
        self,
        query: Tensor,
        q: Tensor,
        gate: Tensor | float,
        correction: Tensor,
        mask: Tensor | None,
        normalized: Normalized,
    ) -> Tensor:
        """`query`, of a read step that is not linear in its gate, with its distance to the query before, gate *
        correction, multiplied by the factor of each head.
        """
        if self.factors is None:
            return query
        strength = self._multiplied(gate, q)
        assert isinstance(strength, Tensor)
        strength, real = strength.unsqueeze(-1), None
        if mask is not None:
            # Emptied before anything is computed, as in the operators; padding stays as they return it.
            real = mask.to(torch.bool)[..., None, None]
            q, strength = torch.where(real, q, 0), torch.where(real, strength, 0)
        # From the query before it is rounded, as inside the operators.
        before = q if self._takes_query(normalized) else l2_normalize(q)
        changed = (before - strength * correction).to(query.dtype)
        return changed if real is None else torch.where(real, changed, query)

    def _observe(
        self, q: Tensor, gate: Tensor | float, correction: Tensor, mask: Tensor | None, normalized: Normalized
    ) -> None:
        if self.observer is None:
            return
        seen = q if self._takes_query(normalized) else l2_normalize(q)
        gate = gate if isinstance(gate, Tensor) else seen.new_full(q.shape[:3], gate)
        self.observer(ReadObservation(seen.detach(), gate.detach(), correction.detach(), mask))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, keep_length={self.keep_length}"


class GatedReadStep(ReadStep):
    """A read step whose correction has a strength lambda, from a gate.

    gate
        "presplit": sigmoid(linear(query before the head split)), one value per token and head; weight zero, bias
        logit(0.01): the second version of the paper. The paper leaves open which tensor that is; here it is the one
        that is about to be split, behind the short convolution and its SiLU where there is one.

        "head": sigmoid(linear(unit query of the head)), weight zero, bias logit(0.1): the first version of the paper.

        "attached": scale * sigmoid(as "presplit"), with a learned scale per head that starts at 0, so that attaching
        the read step to a trained model changes nothing at first.

        A number, or one for each head: a fixed lambda. It owns no parameters and leaves nothing in the state dict. Any
        finite number will do.

    The parameters are set to constants and draw from no random stream, so that a model with a read step starts from
    the same weights as one without.
    """

    given = ("factors", "fixed", "table")
    fixed: Tensor | None
    """[H] float32: lambda of each head, where `gate` has one for each. No part of the state dict."""
    table: Tensor | None
    """[S, H]: lambda of the token at position p of its sequence is row p modulo S; None for the gate's own. No part of
    the state dict."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        keep_length: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, keep_length=keep_length)
        self.gate = check_gate(gate, num_heads)
        self.register_buffer("fixed", None, persistent=False)
        self.register_buffer("table", None, persistent=False)
        if isinstance(self.gate, tuple):
            self.fixed = torch.empty(num_heads, dtype=torch.float32)
        if isinstance(self.gate, str):
            inputs = head_dim if self.gate == "head" else num_heads * head_dim
            self.gate_weight = nn.Parameter(torch.empty(num_heads, inputs))
            self.gate_bias = nn.Parameter(torch.empty(num_heads))
            # Weight decay alone would move lambda from 0.01 to nearly 0.5.
            self.gate_bias._no_weight_decay = True  # type: ignore[attr-defined]
        if self.gate == "attached":
            self.gate_scale = nn.Parameter(torch.empty(num_heads))
        # Not that of a subclass, which may have parameters that are not there yet.
        GatedReadStep.reset_parameters(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The constants that the gate starts from."""
        self.restore_fixed_gate()
        if not isinstance(self.gate, str):
            return
        start = _INITIAL_GATE[self.gate]
        self.gate_weight.zero_()
        self.gate_bias.fill_(math.log(start / (1 - start)))
        if self.gate == "attached":
            self.gate_scale.zero_()

    @torch.no_grad()
    def restore_fixed_gate(self) -> None:
        """Fill the numbers of a fixed lambda in, which no file of weights holds."""
        if self.fixed is not None:
            self.fixed.copy_(torch.tensor(self.gate, dtype=torch.float32))

    def gate_and_query(
        self, q: Tensor, presplit_query: Tensor | None = None, *, normalized: Normalized = False
    ) -> tuple[Tensor | float, Tensor]:
        """lambda [B, T, H] in float32 (float64 for float64 input), or the fixed number; and q for all that follows, the
        same numbers: a gate that has read them adds the gradient from there to its own.
        """
        dtype = accumulation_dtype(q.dtype)
        if self.fixed is not None:
            return self.fixed.to(dtype).expand(q.shape[:3]), q
        if isinstance(self.gate, float):
            return self.gate, q
        with torch.autocast(q.device.type, enabled=False):
            if self.gate == "head":
                weight, bias = self.gate_weight.to(dtype), self.gate_bias.to(dtype)
                unit = q.to(dtype) if normalized is True else l2_normalize(q)
                return torch.sigmoid(torch.einsum("bthd,hd->bth", unit, weight) + bias), q
            if presplit_query is None:
                gate, flat = thin_linear_and_input(q.flatten(2), self.gate_weight, self.gate_bias, sigmoid=True)
                q = flat.view(q.shape)
            else:
                inputs = self._gate_inputs(q, presplit_query)
                gate = thin_linear(inputs, self.gate_weight, self.gate_bias, sigmoid=True)
            return self.gate_scale.to(dtype) * gate if self.gate == "attached" else gate, q

    def _gate_inputs(self, q: Tensor, presplit_query: Tensor | None) -> Tensor:
        """[B, T, H * D], of a gate that is a linear map of the query before the head split."""
        shape = (*q.shape[:2], self.num_heads * self.head_dim)
        if presplit_query is None:
            return q.reshape(shape)
        if presplit_query.shape != shape:
            raise ValueError(
                f"presplit_query must have shape [B, T, H * D] = {list(shape)}, got {list(presplit_query.shape)}"
            )
        return presplit_query

    def configured_gate(self, observed: float) -> float:
        """The `gate` of a configuration that fixes lambda at what an observer sees as `observed`."""
        return observed

    def intervene(self, *, enabled: bool = True, factors: Tensor | None = None, table: Tensor | None = None) -> None:
        """As `ReadStep.intervene`. table: [S, H], in place of the gate: lambda of the token at position p of its
        sequence is row p modulo S. More than one row need a state that counts tokens.
        """
        if table is not None and len(table) > 1 and not self.counts_tokens:
            raise ValueError(f"the state of {type(self).__name__} counts no tokens, so lambda cannot go by position")
        super().intervene(enabled=enabled, factors=factors)
        self.table = table

    @property
    def is_changed(self) -> bool:
        return super().is_changed or self.table is not None

    def _strength(
        self,
        q: Tensor,
        presplit_query: Tensor | None,
        *,
        statistics: Any,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        normalized: Normalized,
    ) -> tuple[Tensor | float, Tensor]:
        """lambda before the factors of the heads, the gate's or the table's, and q as in `gate_and_query`."""
        if self.table is None:
            return self.gate_and_query(q, presplit_query, normalized=normalized)
        table = self.table.to(accumulation_dtype(q.dtype))
        if len(table) == 1:
            return table.expand(q.shape[:3]), q
        position = positions(q, None if statistics is None else statistics.count, mask=mask, cu_seqlens=cu_seqlens)
        return table[position % len(table)], q

    @property
    def products(self) -> int:
        """Products of a D x D matrix with a vector for one token."""
        return 1

    @property
    def operations_per_token(self) -> int:
        # Every product, and the sum of k k^T.
        operations = (2 + 2 * self.products) * self.num_heads * self.head_dim**2
        return operations + (2 * self.gate_weight.numel() if isinstance(self.gate, str) else 0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate!r}"


class CurvatureConditionedQuery(GatedReadStep):
    """y = q - lambda Sigma q: Sigma the covariance of the keys seen so far (arXiv:2606.01294), lambda from a gate.

    gate, keep_length
        See `GatedReadStep` and `ReadStep`. The paper's form does not keep the length.
    centred
        False reads with the second moment in place of the covariance.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        centred: bool = True,
        keep_length: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, gate=gate, keep_length=keep_length)
        self.centred = centred

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor | None = None,
        log_decay: Tensor | None = None,
        statistics: KeyStatistics | PackedKeyStatistics | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        normalized: Normalized = False,
    ) -> ReadResult:
        """As `ReadStep.forward`; the state is the key statistics, packed or not. With `normalized`, as with
        `keep_length`, lambda = 0 gives q bit for bit.
        """
        if not self.enabled:
            return ReadResult(self._query_before(q, normalized), None)
        options: dict[str, Any] = {
            "normalize": self._normalize(normalized),
            "centred": self.centred,
            "return_correction": self.observer is not None,
        }
        overwrites = (
            isinstance(statistics, StaticKeyStatistics)
            and q.shape[1] == 1
            and mask is None
            and cu_seqlens is None
            and not torch.is_grad_enabled()
            and not any(field.requires_grad for field in statistics)
        )
        linear = self._linear_gate(q, presplit_query) if overwrites else None
        lam: Any = linear
        if linear is None:
            strength, q = self._strength(
                q, presplit_query, statistics=statistics, mask=mask, cu_seqlens=cu_seqlens, normalized=normalized
            )
            lam = self._multiplied(strength, q)
        if overwrites:
            query, correction, last = update_and_read_(q, k, lam, cast(PackedKeyStatistics, statistics), **options)
            result = ReadResult(query, last)
        else:
            if isinstance(statistics, PackedKeyStatistics):
                statistics = statistics.unpacked()
            options |= {"statistics": statistics, "cu_seqlens": cu_seqlens, "mask": mask}
            (query, correction, new), keys = curvature_conditioned_query_and_keys(q, k, lam, **options)
            result = ReadResult(query, PackableKeyStatistics(*new), keys)
        if correction is not None:
            self._observe(q, lam, correction, mask, normalized)
        return result

    def _linear_gate(self, q: Tensor, presplit_query: Tensor | None) -> LinearGate | None:
        """The gate, for the kernel that reads to compute it; None where lambda is anything else than `gate_and_query`
        has it for a linear form, or somebody asks to see it.
        """
        decides = getattr(self.gate_and_query, "__func__", None) is GatedReadStep.gate_and_query
        if not decides or self.gate not in ("presplit", "attached"):
            return None
        if self.factors is not None or self.table is not None or self.observer is not None:
            return None
        scale = self.gate_scale if self.gate == "attached" else None
        return LinearGate(self._gate_inputs(q, presplit_query), self.gate_weight, self.gate_bias, scale)

    def initial_statistics(
        self, sequences: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> PackableKeyStatistics:
        return PackableKeyStatistics(*super().initial_statistics(sequences, dtype=dtype, device=device))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, centred={self.centred}"


def check_gate(gate: str | float | Sequence[float], num_heads: int) -> str | float | tuple[float, ...]:
    """The form of a gate: one of `GATE_FORMS`, a finite number for a fixed lambda, or one for each head."""
    if isinstance(gate, str) and gate in GATE_FORMS:
        return gate
    if _is_finite(gate):
        return float(gate)  # type: ignore[arg-type]
    if isinstance(gate, (list, tuple)) and len(gate) == num_heads and all(map(_is_finite, gate)):
        return tuple(map(float, gate))
    raise ValueError(
        f"gate must be one of {', '.join(map(repr, GATE_FORMS))}, a finite number for a fixed lambda, or a list of "
        f"{num_heads} such numbers, one a head (in a configuration such a list for each layer); got {gate!r}"
    )


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
