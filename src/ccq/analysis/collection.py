"""What keys and queries a model makes of a text, gathered by hooks that change nothing.

From this library's models, and from any causal language model of transformers whose layers project their keys with a
module named `k_proj`.

Legend: T tokens, H heads of keys, D key size per head, G queries that share a head of keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ccq.models.cache import CACHE_NAME
from ccq.models.modeling import CCQPreTrainedModel
from ccq.models.observation import observe_reads
from ccq.nn.mixers import AttentionState, GatedDeltaNet, GatedLinearAttention, Mamba2
from ccq.ops.checks import accumulation_dtype


class ReadValues(NamedTuple):
    """What the read step of a layer did."""

    query: Tensor
    """[T, H, D], before the correction, in the scale in which the read step takes it."""
    gate: Tensor
    """[T, H], lambda."""
    correction: Tensor
    """[T, H, D], before the gate: the query changes by -gate * correction."""


class LayerValues(NamedTuple):
    """Keys and queries of one layer, as they are, not normalised; float32, or float64 from a model in float64."""

    name: str
    """Of the layer's attention in the model, such as "model.layers.3.attn"."""
    projected_keys: Tensor
    """[T, H, D], the output of the key projection, which is what the paper looked at."""
    memory_keys: Tensor | None
    """[T, H, D], as they enter the memory: behind the convolution and the feature map of a linear attention, behind
    norm and rotation in the cache of a softmax attention. None where the layer does not keep the keys of all tokens.
    """
    queries: Tensor | None
    """[T, H, G, D] in the space of `met_keys`; None where `q_proj` puts out more than queries."""
    met_keys: Tensor
    """[T, H, D], the keys that the queries meet: the memory keys of this library's linear attentions, the projected
    ones of softmax attention, whose rotated queries are kept nowhere.
    """
    read: ReadValues | None
    """None without a read step, or with its correction off."""


@torch.no_grad()
def collect(model: nn.Module, tokens: Tensor) -> list[LayerValues]:
    """The keys and queries of every layer for one sequence, tokens [T] int64.

    Args:
        model: a model of this library, or a causal language model of transformers with modules named `k_proj`.

    Raises:
        ValueError: as `check_model`, before anything is run.
    """
    check_model(model, len(tokens))
    if isinstance(model, CCQPreTrainedModel):
        return _collect_own(model, tokens)
    return _collect_any(model, tokens)


def check_model(model: Any, tokens: int) -> None:
    """Whether keys can be collected from a model for a text of so many tokens.

    Raises:
        ValueError: no layer projects its keys in a way known here, or the model's table of positions is shorter.
    """
    if isinstance(model, CCQPreTrainedModel):
        return
    if not _key_projections(model):
        raise ValueError(_no_keys(model))
    known = _position_limit(model)
    if known is not None and tokens > known:
        raise ValueError(
            f"{type(model).__name__} knows {known:,} positions, but a text has {tokens:,} tokens; give a shorter one "
            "(fewer sentences: --fillers)"
        )


def _collect_own(model: CCQPreTrainedModel, tokens: Tensor) -> list[LayerValues]:
    mixers: dict[str, Any] = {name: module.attn for name, module in model.named_modules() if hasattr(module, "attn")}
    with _outputs_kept(model) as kept, observe_reads(model) as observed:
        cache = _run(model, tokens)
    seen = {id(read): calls for read, calls in zip(model.read_steps(), observed, strict=True)}
    values = []
    for (name, mixer), layer in zip(mixers.items(), cache.layers, strict=True):
        read = None
        if calls := seen.get(id(getattr(mixer, "read", None))):
            read = ReadValues(*(_wide(x) for x in calls[0][:3]))
        if isinstance(mixer, Mamba2):
            value_size, key_size, _ = mixer.sizes
            groups = (mixer.num_groups, -1)
            # Of (gate, values, keys, queries, steps), and behind the convolution of (values, keys, queries).
            before = kept[mixer.in_proj][:, 2 * value_size : 2 * value_size + key_size].unflatten(-1, groups)
            _, keys, queries = kept[mixer.conv1d].split(mixer.sizes, -1)
            values.append(_layer(name, before, keys.unflatten(-1, groups), queries.unflatten(-1, groups), read))
        elif isinstance(mixer, (GatedDeltaNet, GatedLinearAttention)):
            before = kept[mixer.k_proj].unflatten(-1, (mixer.num_heads, -1))
            keys, queries = (_last(kept, mixer, side).unflatten(-1, (mixer.num_heads, -1)) for side in "kq")
            values.append(_layer(name, before, keys, queries, read))
        else:
            before, queries = (kept[x].unflatten(-1, (-1, mixer.head_dim)) for x in (mixer.k_proj, mixer.q_proj))
            state = layer.state
            assert isinstance(state, AttentionState)
            values.append(
                LayerValues(f"{name}.attn", before, _wide(state.keys), _grouped(queries, before), before, None)
            )
    return values


def _layer(name: str, before: Tensor, keys: Tensor, queries: Tensor, read: ReadValues | None) -> LayerValues:
    return LayerValues(f"{name}.attn", before, keys, queries.unsqueeze(2), keys, read)


def _last(kept: dict[nn.Module, Tensor], mixer: Any, side: str) -> Tensor:
    """The keys ("k") or queries ("q") [T, H * D] that leave the last module on their way."""
    way = (f"feature_map_{side}", f"{side}_conv1d", f"{side}_proj")
    return next(kept[module].flatten(1) for name in way if (module := getattr(mixer, name, None)) in kept)


def _key_projections(model: Any) -> dict[str, Any]:
    """The modules that hold a `k_proj`, by name."""
    return {
        name.removesuffix(".k_proj"): model.get_submodule(name.rpartition(".")[0])
        for name, _ in model.named_modules()
        if name.endswith(".k_proj")
    }


def _no_keys(model: Any) -> str:
    return (
        f"{type(model).__name__} has no layer with a module k_proj, so its keys cannot be told apart; models that "
        "project queries, keys and values in one are not supported"
    )


def _position_limit(model: Any) -> int | None:
    """How many positions a model has, where each has its row in a table, learned (GPT-Neo, OPT) or not (GPT-J); None
    where they are computed, so that a longer text is no error.
    """
    known: int | None = getattr(model.config, "max_position_embeddings", None)
    if known is None:
        return None
    for name, table in (*model.named_parameters(), *model.named_buffers()):
        # Some tables begin with rows for padding; a shorter one is that of an image or a sound.
        if re.search(r"\b(wpe\.weight|embed_positions|embed_positions\.weight)$", name) and len(table) >= known:
            return known
    return None


def _collect_any(model: Any, tokens: Tensor) -> list[LayerValues]:
    with _outputs_kept(model) as kept:
        cache = _run(model, tokens)
    values = []
    for number, (name, attention) in enumerate(_key_projections(model).items()):
        if attention.k_proj not in kept:  # such as that of an image encoder, of which a text makes no use
            continue
        size = getattr(attention, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
        keys = kept[attention.k_proj].unflatten(-1, (-1, size))
        queries = kept.get(attention.q_proj) if hasattr(attention, "q_proj") else None
        if queries is not None and queries.shape[-1] != model.config.num_attention_heads * size:
            queries = None
        if queries is not None:
            queries = _grouped(queries.unflatten(-1, (-1, size)), keys)
        memory = _cached_keys(cache, getattr(attention, "layer_idx", number), keys.shape)
        values.append(LayerValues(name, keys, memory, queries, keys, None))
    if not values:
        raise ValueError(_no_keys(model))
    return values


def _cached_keys(cache: Any, layer: int, shape: Sequence[int]) -> Tensor | None:
    """The keys of all T tokens [T, H, D] in a transformers cache; None where it has none, or not all."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
    if not isinstance(keys, Tensor) or keys.shape != (1, shape[1], shape[0], shape[2]):
        return None
    return _wide(keys).transpose(0, 1)


def _run(model: Any, tokens: Tensor) -> Any:
    """Run the model without its head and return its cache."""
    return getattr(model.base_model(input_ids=tokens.unsqueeze(0), use_cache=True), CACHE_NAME, None)


def _grouped(queries: Tensor, keys: Tensor) -> Tensor:
    """[T, H * G, D] -> [T, H, G, D]; query head i reads key head i // G."""
    return queries.unflatten(1, (keys.shape[1], -1))


def _wide(x: Tensor) -> Tensor:
    """[1, ...] -> [...] in the accumulation dtype."""
    return x[0].detach().to(accumulation_dtype(x.dtype))


_KEPT = ("in_proj", "conv1d", "k_proj", "q_proj", "k_conv1d", "q_conv1d", "feature_map_k", "feature_map_q")


@contextmanager
def _outputs_kept(model: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside the block, what the modules on the way of keys and queries put out, [T, ...], at their last call."""
    kept: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        kept[module] = _wide(output if isinstance(output, Tensor) else output[0])

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _KEPT:
                hooks.callback(module.register_forward_hook(keep).remove)
        yield kept
