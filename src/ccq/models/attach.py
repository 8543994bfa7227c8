"""The read step for models that were trained without one: this library's own, and transformers' Gated DeltaNet models.

Legend: B rows, N sequences, T tokens, H heads of keys, D key size per head.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ccq.files import write_bytes_atomically
from ccq.models.cache import read_safetensors
from ccq.models.configuration import BACKBONES, CCQConfig
from ccq.models.intervention import read_steps
from ccq.models.modeling import CCQPreTrainedModel, make_read
from ccq.nn.read import CurvatureConditionedQuery, PackableKeyStatistics, ReadStep, StaticKeyStatistics
from ccq.ops.query import PackedKeyStatistics, l2_normalize

try:
    from transformers.integrations.accelerate import force_accelerate_hooks
except ImportError:  # old releases, whose layers are refused below
    force_accelerate_hooks = None

ModelT = TypeVar("ModelT", bound=nn.Module)

TRAIN = ("all", "gates")
GATES_FORMAT = "ccq-gates/1"

# The oldest release whose layers `_ReadBeforeRule` has been seen to equal; before 5.15 they are built in another way.
_OLDEST_TRANSFORMERS = (5, 16)
# The layers that are swapped, and no classes derived from them, which may compute something else.
_MIXERS = {
    f"transformers.models.{family}.modeling_{family}.{name}GatedDeltaNet"
    for family, name in (("qwen3_next", "Qwen3Next"), ("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
}
_ACCEPTED = (
    f"a CCQForCausalLM or CCQModel with one of the backbones {', '.join(b for b in BACKBONES if b != 'transformer')}, "
    "or a transformers model of the families Qwen3-Next and Qwen3.5 (dense or mixture of experts)"
)
# What a cache layer of transformers consists of; spelled out, because torch.compile cannot copy an object.
_LAYER_FIELDS = (
    "conv_states recurrent_states is_conv_states_initialized is_recurrent_states_initialized has_previous_state "
    "conv_kernel_size device dtype record_past"
).split()
# Layer and name of a parameter of a read step, in a state dict of any model that has one.
_GATE_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?read\.(gate_\w+)$")


def attach(model: ModelT, *, train: str = "all", gates: str | os.PathLike[str] | None = None) -> ModelT:
    """Add the read step to the linear-attention layers of a trained model, in place.

    The gate is `scale * sigmoid(..)` with scale = 0 (`CurvatureConditionedQuery`, gate "attached"), and queries keep
    their length: at first nothing changes, bit for bit. The existing weights stay where they are, under their names;
    each layer gains `read.gate_weight`, `read.gate_bias` and `read.gate_scale`. A cache that was filled before has no
    statistics and cannot be continued.

    Args:
        model: with its weights loaded, before torch.compile or a distributed wrapper. A model of this library, GLA,
            GLA-Hedgehog, Gated DeltaNet or Mamba2, becomes one of arm BACKBONE+ccq. Of transformers' models those of
            the families Qwen3-Next and Qwen3.5, whose Gated DeltaNet layers are swapped; where several heads of values
            share one of keys, statistics and gate belong to the head of keys.
        train: "all" leaves it to `requires_grad` as it is. "gates" trains the read steps only; their parameters are
            then float32, because single updates would be lost in half precision. Otherwise they have the dtype of the
            layer.
        gates: a file of `save_gates`, or a folder of `save_pretrained`, to start from in place of scale = 0. The
            parameters are those of the file, in its dtype.

    Returns:
        The same object.

    Raises:
        TypeError: the model is of another family, or none of its layers is linear attention.
        ValueError: it has a read step already; its backbone is softmax attention; `gates` does not fit it.
        ImportError: the installed transformers is too old for its Gated DeltaNet models.
    """
    if train not in TRAIN:
        raise ValueError(f"train must be one of {', '.join(map(repr, TRAIN))}; got {train!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be {_ACCEPTED}; got {type(model).__name__}")
    if read_steps(model):
        raise ValueError("the model has a read step already; there is nothing to attach")
    stored = None if gates is None else read_gates(gates)
    if isinstance(model, CCQPreTrainedModel):
        _attach_to_own(model)
    else:
        _attach_to_transformers(model)
    if stored is not None:
        try:
            _load_gates(model, stored, gates)
        except ValueError:
            detach(model)
            raise
    if train == "gates":
        model.requires_grad_(False)
        for read in read_steps(model):
            if stored is None:
                read.to(torch.promote_types(next(read.parameters()).dtype, torch.float32))
            read.requires_grad_(True)
    return model


def detach(model: ModelT) -> ModelT:
    """The inverse of `attach`, in place: the model as it was, with the weights that it has now and without gates."""
    if not _is_attached(model):
        raise ValueError("the model has no attached read step to detach; one that it was trained with belongs to it")
    mixers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "read", None), ReadStep)]
    for mixer in mixers:
        del mixer.read
        if isinstance(mixer, _ReadBeforeRule):
            _change_class(mixer, mixer._plain)
        else:
            mixer.read = None
    if isinstance(model, CCQPreTrainedModel):
        plain = CCQConfig(arm=model.config.backbone)
        for name in ("arm", "gate", "centred", "keep_length"):
            setattr(model.config, name, getattr(plain, name))
    return model


def save_gates(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the parameters of the attached read steps to one safetensors file, whole or not at all; `attach(model,
    gates=path)` gives them to the same backbone again, bit for bit.
    """
    if not _is_attached(model):
        raise ValueError("the model has no attached read step whose gates could be saved; see ccq.attach")
    tensors = {
        f"layers.{layer}.read.{name}": x.detach().contiguous() for (layer, name), x in _gate_parameters(model).items()
    }
    write_bytes_atomically(path, safetensors.torch.save(tensors, {"format": GATES_FORMAT}))


def are_gates(names: Iterable[str]) -> bool:
    """Whether gates of a read step are among the parameters of these names."""
    return any(_GATE_NAME.search(name) for name in names)


def has_gates_file(folder: Path) -> bool:
    """Whether a file of `save_gates`, of any name, lies in the folder of a model."""
    for path in folder.glob("*.safetensors"):
        with _opened(path) as file:
            if (file.metadata() or {}).get("format") == GATES_FORMAT:
                return True
    return False


def _is_attached(model: nn.Module) -> bool:
    reads = read_steps(model)
    return bool(reads) and all(getattr(read, "gate", None) == "attached" for read in reads)


def _attach_to_own(model: CCQPreTrainedModel) -> None:
    config = model.config
    if config.backbone == "transformer":
        raise ValueError(
            "arm 'transformer' has no memory that a changed query could read: its scores are not linear in the query; "
            f"accepted: {_ACCEPTED}"
        )
    changes = {
        "arm": f"{config.backbone}+ccq",
        "gate": "attached",
        "centred": True,
        # Gated DeltaNet reads unit queries in any case.
        "keep_length": config.backbone != "gated-deltanet",
    }
    changed = copy.copy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    mixers = [block.attn for block in model.base_model.layers]
    reads = [_beside(mixer, make_read(changed, layer)) for layer, mixer in enumerate(mixers)]
    for mixer, read in zip(mixers, reads, strict=True):
        mixer.read = read
    for name, value in changes.items():
        setattr(config, name, value)


def _attach_to_transformers(model: nn.Module) -> None:
    mixers: list[Any] = [m for m in model.modules() if f"{type(m).__module__}.{type(m).__qualname__}" in _MIXERS]
    if not mixers:
        raise TypeError(f"model must be {_ACCEPTED}; got {type(model).__name__} without such a layer")
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _OLDEST_TRANSFORMERS:
        raise ImportError(
            f"attaching to {type(model).__name__} needs transformers {'.'.join(map(str, _OLDEST_TRANSFORMERS))} or "
            f"newer, found {transformers.__version__}; install a newer release"
        )
    reads = [_beside(m, CurvatureConditionedQuery(m.num_k_heads, m.head_k_dim, gate="attached")) for m in mixers]
    for mixer, read in zip(mixers, reads, strict=True):
        mixer.read = read
        _change_class(mixer, _with_read(mixer.__class__))


def _beside(mixer: nn.Module, read: ReadStep | None) -> ReadStep:
    """`read` on the device and in the dtype of the mixer's weights."""
    assert read is not None
    like = next(p for p in mixer.parameters() if p.is_floating_point())
    if like.is_meta:
        raise ValueError(
            "the weights of the model are not on a device (they are on 'meta'): load them first, without offloading"
        )
    return read.to(like.device, like.dtype).train(mixer.training)


def _gate_parameters(model: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The parameters of the read steps, by number of the layer and name."""
    matches = ((_GATE_NAME.search(name), parameter) for name, parameter in model.named_parameters())
    return {(int(match[1]), match[2]): parameter for match, parameter in matches if match is not None}


def read_gates(path: str | os.PathLike[str]) -> dict[tuple[int, str], Tensor]:
    """The gates in a file of `save_gates` or in a model's folder, by number of the layer and name.

    Raises:
        FileNotFoundError, ValueError: there are none, the file is something else, or files of the folder disagree.
    """
    if Path(path).is_dir():
        found = _gates_in_folder(Path(path))
    else:
        expected = "a file written by save_gates, or a folder of save_pretrained"
        named, _ = read_safetensors(path, GATES_FORMAT, expected)
        found = {(int(match[1]), match[2]): x for name, x in named.items() if (match := _GATE_NAME.search(name))}
    if not found:
        raise ValueError(f"{path} holds no gates of a read step; save them with save_gates or save_pretrained")
    return found


def _gates_in_folder(folder: Path) -> dict[tuple[int, str], Tensor]:
    """Those of all its files, which may hold the same ones twice, but none with two values."""
    found: dict[tuple[int, str], tuple[Path, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                match = _GATE_NAME.search(name)
                if match is None:
                    continue
                layer, x = int(match[1]), file.get_tensor(name)
                other, known = found.setdefault((layer, match[2]), (path, x))
                if known.dtype != x.dtype or not torch.equal(known, x):
                    raise ValueError(
                        f"{other} and {path.name} hold different values of {match[2]} of layer {layer}; name the file "
                        "of save_gates that is meant, or move the other one out of the folder"
                    )
    return {key: x for key, (_, x) in found.items()}


def _opened(path: Path) -> Any:
    """The file for `with`."""
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or is not a safetensors file ({error}); write it again, or move it out of the folder"
        ) from error


@torch.no_grad()
def _load_gates(model: nn.Module, stored: dict[tuple[int, str], Tensor], path: Any) -> None:
    own = _gate_parameters(model)
    wrong = [f"missing {name} of layer {layer}" for layer, name in sorted(own.keys() - stored.keys())]
    wrong += [f"unexpected {name} of layer {layer}" for layer, name in sorted(stored.keys() - own.keys())]
    wrong += [
        f"{name} of layer {layer} has shape {list(stored[layer, name].shape)}, the model asks for {list(x.shape)}"
        for (layer, name), x in sorted(own.items(), key=lambda item: item[0])
        if (layer, name) in stored and stored[layer, name].shape != x.shape
    ]
    if wrong:
        raise ValueError(f"the gates in {path} do not fit the model: {'; '.join(wrong)}")
    for key, parameter in own.items():
        parameter.data = stored[key].to(parameter.device)


class _StatisticsLayer(LinearAttentionLayer):
    """transformers' cache layer of linear attention, with the key statistics of a read step beside its own states.

    transformers' layer cannot repeat or select sequences, and loses the addresses of its states when it reorders them;
    this one does not.
    """

    statistics: PackedKeyStatistics | None = None

    @classmethod
    def of(cls, cache: Cache, index: int, rows: int) -> _StatisticsLayer:
        """The layer `index` of a cache, for a call with this many rows; transformers' own is replaced by one that has
        its states.
        """
        layer = cache.layers[index]
        if not isinstance(layer, LinearAttentionLayer):
            raise TypeError(
                f"layer {index} of the cache must be a LinearAttentionLayer, got {type(layer).__name__}; make the "
                "cache with the configuration of the model: DynamicCache(config=model.config)"
            )
        if not isinstance(layer, cls):
            plain, layer = layer, cls(number_of_states=layer.number_of_states)
            for name in _LAYER_FIELDS:
                setattr(layer, name, getattr(plain, name))
            cache.layers[index] = layer
        # A state of one sequence would spread over all of a larger batch.
        kept = layer.conv_states[0]
        if kept is not None and kept.shape[0] != rows:
            raise ValueError(
                f"the cache belongs to {kept.shape[0]} sequences, but the input has {rows}; repeat or select its "
                "sequences first, or make a new one"
            )
        return layer

    def lend(self, needed: bool) -> StaticKeyStatistics | None:
        """The statistics for the next call, which may overwrite them."""
        if not needed or not self.has_previous_state[0]:
            return None
        if self.statistics is None:
            raise ValueError(
                "the cache has no key statistics, because it was filled before the read step was attached or while its "
                "correction was off; continue it with the correction off, or start again from the first token, with a "
                "new cache"
            )
        return StaticKeyStatistics(*self.statistics)

    def keep(self, new: PackableKeyStatistics | PackedKeyStatistics | None) -> None:
        """Take over the statistics after a call: in place, except while gradients are recorded."""
        old = self.statistics
        if isinstance(new, PackableKeyStatistics):
            new = new.packed()
        if new is None or old is None or any(x.requires_grad for x in (*new, *old)):
            self.statistics = None if new is None else PackedKeyStatistics(*map(_with_static_address, new))
            return
        for x, y in zip(old, new, strict=True):
            if x is not y:
                x.copy_(y)

    def reset(self) -> None:
        super().reset()
        for x in self.statistics or ():
            x.zero_()

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
            return x.copy_(chosen) if chosen.shape == x.shape and not chosen.requires_grad else chosen

        self._change(select)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a fixed-size memory has read cannot be taken out of it again."""
        raise NotImplementedError(
            "a cache with key statistics cannot be cropped: single tokens cannot be taken out of them. Copy it "
            "(copy.deepcopy) before the tokens that may have to be undone, or read the text again"
        )

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, x in states.items():
                states[i] = None if x is None else _with_static_address(change(x))
        if self.statistics is not None:
            self.statistics = PackedKeyStatistics(*(_with_static_address(change(x)) for x in self.statistics))


def _with_static_address(x: Tensor) -> Tensor:
    """x, which a CUDA graph may count on staying where it is."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


class _ReadBeforeRule:
    """The forward pass of transformers' Gated DeltaNet layers, in the same operations, with the read step between the
    convolution and the rule. Mixed into the class of a layer by `_with_read`.

    The rule normalises q and k inside, which would undo a change of the length of q: here it is done before.
    """

    _plain: type[nn.Module]
    """The class of the layer as it was."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache_params: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        """hidden_states [B, T, hidden], attention_mask [B, T] (1 = real token) -> [B, T, hidden]. `cache_params` is
        the older name of `cache`; others: cu_seq_lens_q [N + 1] and seq_idx [B, T] of packed documents.
        """
        library = self._library()
        cache = cache_params if cache is None else cache
        layer = None if cache is None else _StatisticsLayer.of(cache, self.layer_idx, len(hidden_states))
        memory = layer.recurrent_states[0] if layer is not None and layer.has_previous_state[0] else None
        statistics = None if layer is None else layer.lend(self.read.enabled)

        x = library.apply_mask_to_padding_states(hidden_states, attention_mask)
        mixed, z, b, a = self._project(x)
        mixed = self._convolve(mixed.transpose(1, 2), layer, others).transpose(1, 2)
        presplit_query, k, v = mixed.split((self.key_dim, self.key_dim, self.value_dim), -1)
        k, v = k.unflatten(-1, (-1, self.head_k_dim)), v.unflatten(-1, (-1, self.head_v_dim))
        cu_seqlens = others.pop("cu_seq_lens_q", None)
        # As the rule does it, to the bit: in float32, and of rows that lie one behind the other.
        q = presplit_query.unflatten(-1, (-1, self.head_k_dim))
        q, k = (l2_normalize(y.float().contiguous()) for y in (q, k))
        found = self.read(
            q,
            k,
            presplit_query=presplit_query,
            statistics=statistics,
            mask=attention_mask,
            cu_seqlens=cu_seqlens,
            normalized=True,
        )
        q, k = found.query, k if found.keys is None else found.keys
        # On a GPU the rule is a kernel that takes q, k and v of one dtype, elsewhere PyTorch in float32.
        shared, dtype = self.num_v_heads // self.num_k_heads, v.dtype if v.is_cuda else q.dtype
        one_token = memory is not None and x.shape[1] == 1
        rule = library.torch_recurrent_gated_delta_rule if one_token else library.torch_chunk_gated_delta_rule
        output, memory = rule(
            q.to(dtype).repeat_interleave(shared, 2),
            k.to(dtype).repeat_interleave(shared, 2),
            v,
            g=-self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias),
            beta=b.sigmoid(),
            initial_state=memory,
            output_final_state=layer is not None,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=cu_seqlens,
            **others,
        )
        if layer is not None:
            layer.update_recurrent_state(memory)
            layer.keep(found.statistics)
        output = self.norm(output.to(v.dtype).flatten(0, 2), z.flatten(0, 2)).view(z.shape)
        return self.out_proj(output.flatten(2))

    if force_accelerate_hooks is not None:
        # Its weights are used without a call of the module.
        forward = force_accelerate_hooks("conv1d")(forward)

    def _library(self: Any) -> Any:
        """The module of transformers that the layer comes from, for the functions that its own forward pass calls."""
        return sys.modules[self._plain.__module__]

    def _project(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x -> q, k and v side by side [B, T, channels], output gate [B, T, heads, V], and what beta and decay are made
        of [B, T, heads].
        """
        if hasattr(self, "in_proj_qkvz"):  # Qwen3-Next
            q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
            return torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), -1), z, b, a
        z = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim))
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)

    def _convolve(self: Any, mixed: Tensor, layer: _StatisticsLayer | None, others: dict[str, Any]) -> Tensor:
        """[B, channels, T] -> [B, channels, T], behind the inputs of the call before."""
        weight, bias, tokens = self.conv1d.weight.squeeze(1), self.conv1d.bias, mixed.shape[-1]
        if layer is not None and layer.has_previous_state[0] and tokens == 1 and not layer.record_past:
            return self._library().causal_conv1d_update(mixed, layer.conv_states[0], weight, bias, self.activation)
        if layer is not None:
            mixed = layer.update_conv_state(mixed, conv_kernel_size=self.conv_kernel_size)
        mixed = self._library().causal_conv1d_fn(mixed, weight, bias, activation=self.activation, **others)
        return mixed[..., -tokens:]


@functools.cache
def _with_read(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of transformers' layers with the forward pass of `_ReadBeforeRule`."""
    return type(f"{kind.__name__}WithRead", (_ReadBeforeRule, kind), {"__module__": __name__, "_plain": kind})


def __getattr__(name: str) -> Any:
    """The classes made by `_with_read`, for pickle, which looks for a class in its module."""
    for path in _MIXERS:
        module, _, plain = path.rpartition(".")
        if name == f"{plain}WithRead":
            return _with_read(getattr(importlib.import_module(module), plain))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _change_class(module: Any, kind: type[nn.Module]) -> None:
    """Swap a layer for one of another class that has its parameters, buffers and hooks; the object stays."""
    module.__class__ = kind
    if "_old_forward" in vars(module):  # accelerate calls this between its hooks
        module._old_forward = kind.forward.__get__(module)
