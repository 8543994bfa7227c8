"""What a model remembers between calls, as a `transformers` cache: to continue, to branch, to search, to keep on disk.

Legend: N sequences (rows of a batch, or documents of a packed row).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ccq.files import write_bytes_atomically
from ccq.models.configuration import NOT_IN_A_CALL, CCQConfig, own_fields
from ccq.nn.mixers.common import (
    AttentionState,
    LayerState,
    MixerState,
    OverwritableState,
    map_state,
    state_from_tensors,
    state_tensors,
)
from ccq.nn.read import PackableKeyStatistics, StaticKeyStatistics
from ccq.ops.query import PackedKeyStatistics

if TYPE_CHECKING:
    from ccq.models.modeling import CCQPreTrainedModel

STATE_FORMAT = "ccq-state/3"

CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What the installed transformers calls a cache in arguments and outputs; the second is its older name."""


class StateLayer:
    """The state of one layer, with the methods that `transformers.Cache` calls on its layers.

    Not transformers' own LinearAttentionLayer, which holds pairs of one convolution state and one recurrent state:
    it cannot repeat or select sequences, loses the addresses when it reorders, resets no counter, and lets a state of
    one sequence spread over a batch.

    Without gradients a state is overwritten in place, so that its addresses stay and a CUDA graph can replay a step;
    while gradients are recorded it is replaced, so that they reach back through it. So is, whatever comes behind it,
    one that gradients reach back through, and one that a call had while they were recorded: the backward pass still
    needs its values, and computes blocks again from those without gradients too (activation checkpointing).
    """

    # Transformers asks for these.
    supports_early_init = False
    is_sliding = False
    is_croppable = False

    def __init__(self) -> None:
        self.state: LayerState | None = None
        self._is_recorded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayer:
        """Gradients reach back through the copy as well, which torch's own refuses."""
        copied = StateLayer()
        if self.state is not None:
            copied._keep(map_state(self.state, torch.clone))  # type: ignore[type-var]
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'empty' if self.state is None else type(self.state).__name__})"

    @property
    def is_compileable(self) -> bool:
        """Whether the addresses stay: those of softmax attention do not, because its state grows."""
        return not isinstance(self.state, AttentionState)

    @property
    def batch_size(self) -> int:
        """N; there is no such attribute before the first call."""
        if self.state is None:
            raise AttributeError("an empty layer has no batch size")
        return next(iter(state_tensors(self.state).values())).shape[0]

    def lend(self) -> LayerState | None:
        """The state for a mixer's next call, which may overwrite it."""
        self._leave_inference_mode()
        if torch.is_grad_enabled():
            self._is_recorded = True
        if self._is_recorded or not isinstance(self.state, MixerState):
            return self.state
        memory, statistics, convolution = self.state
        if isinstance(statistics, PackedKeyStatistics):
            statistics = StaticKeyStatistics(*statistics)
        return OverwritableState(memory, statistics, convolution)

    def update(self, new: LayerState) -> None:
        """Take over the state after a call, packed where its read step can take it so."""
        if isinstance(new, MixerState) and isinstance(new.statistics, PackableKeyStatistics):
            new = new._replace(statistics=new.statistics.packed())
        if self.state is None:
            self._adopt(new)
            return
        before, after = state_tensors(self.state), state_tensors(new)
        if self._is_recorded or _any_gradients(before, after) or [*before] != [*after]:
            self._adopt(new)
        elif all(x.shape == after[name].shape for name, x in before.items()):
            if any(x.dtype != after[name].dtype for name, x in before.items()):
                self._adopt(new)
                return
            for name, x in before.items():
                if x is not after[name]:
                    x.copy_(after[name])
        elif isinstance(new, AttentionState) and new.count.shape == before["count"].shape:
            self._adopt(new)
        else:
            shapes = [{name: list(x.shape) for name, x in tensors.items()} for tensors in (before, after)]
            raise ValueError(
                f"a state of other sequences cannot take the place of this one: shapes {shapes[0]} here, {shapes[1]} "
                "given; reset the cache or make a new one"
            )

    def reset(self) -> None:
        """Forget every sequence. Fixed-size states keep their addresses."""
        if isinstance(self.state, AttentionState):
            self.state = None
        else:
            self._leave_inference_mode()
            self._change(lambda x: x.zero_() if self._can_overwrite(x) else torch.zeros_like(x))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was: [N] int64."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times in a row."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The sequences `indices` [M] int64 (or a mask [N] bool), in this order; in place where M = N."""

        def select(x: Tensor) -> Tensor:
            chosen = x[indices.to(x.device)]
            return x.copy_(chosen) if chosen.shape == x.shape and self._can_overwrite(x) else chosen

        self._leave_inference_mode()
        self._change(select)

    def crop(self, *_: Any) -> None:
        """Refused: what a fixed-size memory has read cannot be taken out of it again."""
        raise NotImplementedError(
            "a cache of this model cannot be cropped: its memory does not keep single tokens. Copy it "
            "(copy.deepcopy) before the tokens that may have to be undone, or read the text again"
        )

    def get_seq_length(self) -> int:
        """Not known to a layer."""
        raise NotImplementedError("the cache counts the positions, not its layers: call CCQCache.get_seq_length()")

    def get_max_length(self) -> int:
        """-1: a state takes any number of tokens."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases of transformers

    def _can_overwrite(self, x: Tensor) -> bool:
        return not (x.requires_grad or self._is_recorded)

    def _leave_inference_mode(self) -> None:
        """Outside of that mode nothing can be written into what was made in it."""
        if self.state is None or torch.compiler.is_compiling():
            return
        if any(_is_closed(x) for x in state_tensors(self.state).values()):
            self._change(torch.clone)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self._keep(map_state(self.state, change))  # type: ignore[type-var]

    def _adopt(self, new: LayerState) -> None:
        """Tensors of one's own in place of `new`, parts of which may be views of larger ones."""
        if isinstance(new, MixerState):
            new = map_state(new, lambda x: x if x.requires_grad else x.clone(memory_format=torch.contiguous_format))
        self._keep(new)

    def _keep(self, state: LayerState) -> None:
        if isinstance(state, MixerState) and not torch.compiler.is_compiling():
            for x in state_tensors(state).values():
                torch._dynamo.mark_static_address(x)
        self.state = state
        self._is_recorded = False


def _is_closed(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


def _any_gradients(*states: dict[str, Tensor]) -> bool:
    return any(x.requires_grad for state in states for x in state.values())


class CCQCache(Cache):
    """The states of all layers.

    A call with a cache continues its sequences and leaves their new states in it. To branch, copy it first:
    `copy.deepcopy(cache)`, or `batch_repeat_interleave` for several continuations in one batch.
    """

    def __init__(self, config: CCQConfig, *, static: bool = False) -> None:
        """`static` tells `generate` that it may compile the model around this cache; the addresses stay in any case."""
        super().__init__(layers=[StateLayer() for _ in range(config.num_layers)])
        self.static = static
        # A tensor, so that neither a compiled step nor a CUDA graph depends on its value.
        self.positions: Tensor | None = None

    @property
    def is_compileable(self) -> bool:
        return self.static and all(layer.is_compileable for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """N, or -1 before the first call."""
        return getattr(self.layers[0], "batch_size", -1)

    @property
    def state_bytes(self) -> int:
        """The size of the states of all N sequences."""
        return sum(
            x.numel() * x.element_size()
            for layer in self.layers
            if layer.state is not None
            for x in state_tensors(layer.state).values()
        )

    def advance(self, positions: int, device: torch.device) -> None:
        """Count the positions of a call, padding included."""
        if self.positions is None:
            self.positions = torch.zeros((), dtype=torch.int64, device=device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.positions)
        elif _is_closed(self.positions):
            self.positions = self.positions.clone()
        self.positions.add_(positions)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions have been read, padding included; the same for every layer."""
        return 0 if self.positions is None else int(self.positions)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases of transformers

    def reset(self) -> None:
        """Forget every sequence."""
        super().reset()
        if self.positions is not None:
            self.positions = self.positions.clone() if _is_closed(self.positions) else self.positions
            self.positions.zero_()


def save_state(cache: CCQCache, path: str | os.PathLike[str], model: CCQPreTrainedModel) -> None:
    """Write what `model` has read into `cache` to one safetensors file, whole or not at all."""
    if any(layer.state is None for layer in cache.layers):
        raise ValueError("the cache is empty: let the model read something with it first")
    tensors = {
        f"layers.{i}.{name}": x.detach().contiguous()
        for i, layer in enumerate(cache.layers)
        for name, x in state_tensors(layer.state).items()
    }
    metadata = {
        "format": STATE_FORMAT,
        "layers": str(len(cache.layers)),
        "positions": str(cache.get_seq_length()),
        "model": fingerprint(model),
    }
    write_bytes_atomically(path, safetensors.torch.save(tensors, metadata))


def load_state(path: str | os.PathLike[str], model: CCQPreTrainedModel) -> CCQCache:
    """Read what `save_state` wrote, bit for bit, to the devices of `model`, which must be the one that made it."""
    tensors, metadata = read_safetensors(path, STATE_FORMAT, "a model state written by save_state")
    if metadata.get("model") != fingerprint(model):
        raise ValueError(
            f"{path} was made by another model (or by this one in another precision than float32 and bfloat16), whose "
            "memory means nothing to this one; read the text again"
        )
    again = "write it again with save_state"
    cache = CCQCache(model.config)
    found = {name.split(".")[1] for name in tensors}
    if len(found) != len(cache.layers) or metadata.get("layers") != str(len(cache.layers)):
        raise ValueError(f"{path} holds {len(found)} of {len(cache.layers)} layers; {again}")
    blocks = model.base_model.layers
    for i, (layer, block) in enumerate(zip(cache.layers, blocks, strict=True)):
        device, prefix = next(block.parameters()).device, f"layers.{i}."
        own = {name.removeprefix(prefix): x.to(device) for name, x in tensors.items() if name.startswith(prefix)}
        try:
            layer.update(state_from_tensors(own))
        except KeyError as error:
            raise ValueError(f"{path} lacks {prefix}{error.args[0]} of a model state; {again}") from None
    cache.advance(int(metadata["positions"]), next(model.parameters()).device)
    return cache


def fingerprint(model: nn.Module) -> str:
    """A hash that differs between models: of 64 values spread over every weight, and, of this library's models, of the
    configuration as far as a call depends on it. The values are rounded to bfloat16: a model in float32 and its copy in
    bfloat16 have the same hash, one that has been in float16 may have another.
    """
    parts = []
    for parameter in model.parameters():
        values = parameter.detach().flatten()
        spread = torch.linspace(0, max(len(values) - 1, 0), min(64, len(values)), dtype=torch.float64)
        parts.append(values[spread.long().to(values.device)].to("cpu", torch.bfloat16))
    found = hashlib.sha256(torch.cat(parts).view(torch.int16).numpy().tobytes())
    config = getattr(model, "config", None)
    if isinstance(config, CCQConfig):
        fields = {name: getattr(config, name) for name in own_fields() if name not in NOT_IN_A_CALL}
        found.update(json.dumps(fields, sort_keys=True).encode())
    return found.hexdigest()


def read_safetensors(
    path: str | os.PathLike[str], expected: str, what: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and metadata of a file whose metadata names the format `expected`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file; expected {what}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or is not a safetensors file ({error}); expected {what}") from error
    if metadata.get("format") != expected:
        raise ValueError(f"{path} is not {what}: its format is {metadata.get('format')!r}, accepted: {expected!r}")
    return tensors, metadata
