"""A causal language model of linear-attention mixers: training, prefill and decode are one call, with or without a
state.

tokens -> embedding -> num_layers x block(norm, mixer, norm, SwiGLU) -> norm -> head. Parameter names follow
flash-linear-attention's models.

Legend: B rows, N sequences (N = B without cu_seqlens), T tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ccq.files import write_bytes_atomically, write_json_atomically
from ccq.models.configuration import ModelConfig
from ccq.nn.mixers import GatedDeltaNet, GatedLinearAttention, MixerState
from ccq.nn.mlp import SwiGLU
from ccq.nn.read import CurvatureConditionedQuery
from ccq.ops.checks import check_mask, values_can_be_read
from ccq.ops.query import KeyStatistics

STATE_FORMAT = "ccq-state/1"
MODEL_FORMAT = "ccq-model/1"


class ModelState(NamedTuple):
    """What a model remembers of N sequences."""

    layers: tuple[MixerState, ...]

    def repeat(self, n: int) -> ModelState:
        """Every sequence n times in a row: sequence i becomes i * n ... i * n + n - 1 (for beams and samples)."""
        return self._map(lambda x: x.repeat_interleave(n, 0))

    def select(self, indices: Tensor) -> ModelState:
        """The sequences `indices` [M] int64, in this order, each as often as it is named: the surgery of a beam
        search.
        """
        return self._map(lambda x: x.index_select(0, indices.to(x.device)))

    @property
    def state_bytes(self) -> int:
        """The size of all tensors for all N sequences."""
        return sum(x.numel() * x.element_size() for x in _state_tensors(self).values())

    def _map(self, change: Callable[[Tensor], Tensor]) -> ModelState:
        return _state_from_tensors({name: change(x) for name, x in _state_tensors(self).items()})


class ModelOutput(NamedTuple):
    logits: Tensor
    """[B, T, vocab], or [B, 1, vocab] with `last_logits_only`."""
    state: ModelState


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = _make_mixer(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, *, state: MixerState | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, MixerState]:
        mixed, state = self.attn(self.attn_norm(x), state=state, mask=mask, cu_seqlens=cu_seqlens)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class Backbone(nn.Module):
    """Embedding, blocks and last norm: everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class CausalLanguageModel(nn.Module):
    """A language model of one arm, with an untied head.

    Linear layers and embeddings start from a normal distribution with standard deviation `initializer_range`, biases
    from 0. A read step draws no random numbers: models of one seed that differ only in it share all other weights bit
    for bit.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        *,
        state: ModelState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_logits_only: bool = False,
    ) -> ModelOutput:
        """tokens [B, T] int64 -> logits of the next token and the state after the last one.

        mask [B, T]: 1 = real token; padding on the left, the right or both. cu_seqlens [N + 1]: boundaries of
        documents packed into one row. state continues N sequences. `last_logits_only` computes the head at the last
        position of each row only.
        """
        self._check_tokens(tokens)
        layers = self.model.layers
        if state is not None and len(state.layers) != len(layers):
            raise ValueError(f"state has {len(state.layers)} layers, but the model has {len(layers)}")
        x = self.model.embeddings(tokens)
        states = []
        for i, layer in enumerate(layers):
            x, after = layer(x, state=None if state is None else state.layers[i], mask=mask, cu_seqlens=cu_seqlens)
            states.append(after)
        if last_logits_only:
            x = x[:, -1:]
        return ModelOutput(self.lm_head(self.model.norm(x)), ModelState(tuple(states)))

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            dtype = str(tokens.dtype).removeprefix("torch.")
            raise ValueError(f"tokens must be an int64 tensor of shape [B, T], got {list(tokens.shape)} {dtype}")
        if values_can_be_read(tokens) and tokens.numel():
            low, high = (int(x) for x in torch.aminmax(tokens))
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens must be in 0 ... {self.config.vocab_size - 1}, got values from {low} to {high}"
                )

    def read_steps(self) -> list[CurvatureConditionedQuery]:
        """The read steps, from the first layer to the last; empty for an arm without."""
        return [module for module in self.modules() if isinstance(module, CurvatureConditionedQuery)]

    def set_read(self, mode: str) -> None:
        """Switch the correction "on" or "off". Off keeps the query normalisation the model was trained with, and
        keeps no statistics.
        """
        if mode not in ("on", "off"):
            raise ValueError(f'mode must be "on" or "off", got {mode!r}')
        reads = self.read_steps()
        if not reads:
            raise ValueError(f"arm {self.config.arm!r} has no read step to switch {mode}")
        for read in reads:
            read.enabled = mode == "on"

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def read_parameter_count(self) -> int:
        """How many of the parameters belong to the read steps."""
        return sum(parameter.numel() for read in self.read_steps() for parameter in read.parameters())


def _make_mixer(config: ModelConfig) -> GatedLinearAttention | GatedDeltaNet:
    read = None
    if config.read == "ccq":
        read = CurvatureConditionedQuery(
            config.num_heads, config.head_dim, gate=config.gate, centred=config.centred, keep_length=config.keep_length
        )
    sizes = (config.hidden_size, config.num_heads, config.head_dim, config.value_head_dim)
    if config.backbone == "gla":
        return GatedLinearAttention(
            *sizes,
            read=read,
            short_convolution=config.short_convolution,
            gate_logit_normalizer=config.gate_logit_normalizer,
            norm_eps=config.norm_eps,
        )
    assert config.short_convolution is not None
    return GatedDeltaNet(
        *sizes,
        read=read,
        conv_size=config.short_convolution,
        max_a=config.max_a,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        norm_eps=config.norm_eps,
    )


@torch.no_grad()
def generate(model: CausalLanguageModel, tokens: Tensor, *, max_new_tokens: int, mask: Tensor | None = None) -> Tensor:
    """Greedy continuation: tokens [B, T] -> the next tokens [B, max_new_tokens].

    Prompts of different lengths are padded on the left: mask [B, T], 1 = real token. A row's continuation does not
    depend on the other rows.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must have shape [B, T] with at least one token, got {list(tokens.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if mask is not None and not check_mask(mask, tokens.shape[0], tokens.shape[1], tokens)[:, -1].all():
        raise ValueError("mask must end with a real token in every row: pad prompts on the left")
    new: list[Tensor] = []
    state = None
    for _ in range(max_new_tokens):
        output = model(tokens, state=state, mask=mask, last_logits_only=True)
        tokens, state, mask = output.logits.argmax(-1), output.state, None
        new.append(tokens)
    return torch.cat(new, 1) if new else tokens[:, :0]


def save_state(state: ModelState, path: str | os.PathLike[str]) -> None:
    """Write a state to one safetensors file, whole or not at all."""
    tensors = {name: x.detach().contiguous() for name, x in _state_tensors(state).items()}
    metadata = {"format": STATE_FORMAT, "layers": str(len(state.layers))}
    write_bytes_atomically(path, safetensors.torch.save(tensors, metadata))


def load_state(path: str | os.PathLike[str]) -> ModelState:
    """Read what `save_state` wrote, bit for bit, to the CPU."""
    tensors, metadata = _read_safetensors(path, STATE_FORMAT, "a model state written by save_state")
    try:
        state = _state_from_tensors(tensors)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]} of a model state; write it again with save_state") from None
    if str(len(state.layers)) != metadata.get("layers"):
        raise ValueError(
            f"{path} holds {len(state.layers)} of {metadata.get('layers')} layers; write it again with save_state"
        )
    return state


def save_model(model: CausalLanguageModel, folder: str | os.PathLike[str]) -> None:
    """Write config.json and model.safetensors into `folder`, which is made if need be; each file whole or not at
    all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().contiguous() for name, x in model.state_dict().items()}
    write_bytes_atomically(folder / "model.safetensors", safetensors.torch.save(tensors, {"format": MODEL_FORMAT}))
    write_json_atomically(folder / "config.json", model.config.to_dict())


def load_model(folder: str | os.PathLike[str]) -> CausalLanguageModel:
    """Read what `save_model` wrote, bit for bit and in the stored dtypes, to the CPU. The random streams are left as
    they were.
    """
    folder = Path(folder)
    path = folder / "config.json"
    try:
        config = ModelConfig.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no model: {path} does not exist; write one with save_model") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a model configuration: {error}") from error
    tensors, _ = _read_safetensors(folder / "model.safetensors", MODEL_FORMAT, "weights written by save_model")
    with torch.random.fork_rng(devices=[]):
        model = CausalLanguageModel(config)
    expected = model.state_dict()
    wrong = [f"missing {name}" for name in expected if name not in tensors]
    wrong += [f"unexpected {name}" for name in tensors if name not in expected]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)}, the configuration asks for {list(x.shape)}"
        for name, x in expected.items()
        if name in tensors and tensors[name].shape != x.shape
    ]
    if wrong:
        raise ValueError(f"{folder / 'model.safetensors'} does not fit {path}: {'; '.join(wrong)}")
    for name, parameter in model.named_parameters():
        # In place of load_state_dict, which would convert to float32 (or, assigning, drop the marks of the parameters).
        parameter.data = tensors[name]
    return model


def _read_safetensors(
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


def _state_tensors(state: ModelState) -> dict[str, Tensor]:
    """The tensors of a state under the names they have in a file."""
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(state.layers):
        tensors[f"layers.{i}.memory"] = layer.memory
        if layer.statistics is not None:
            for name, x in layer.statistics._asdict().items():
                tensors[f"layers.{i}.statistics.{name}"] = x
        for j, x in enumerate(layer.convolution or ()):
            tensors[f"layers.{i}.convolution.{j}"] = x
    return tensors


def _state_from_tensors(tensors: dict[str, Tensor]) -> ModelState:
    """The inverse of `_state_tensors`. Raises KeyError with the name of a tensor that is not there."""
    layers: list[MixerState] = []
    while any(name.startswith(f"layers.{len(layers)}.") for name in tensors):
        prefix = f"layers.{len(layers)}."
        statistics = None
        if any(name.startswith(f"{prefix}statistics.") for name in tensors):
            statistics = KeyStatistics(*(tensors[f"{prefix}statistics.{name}"] for name in KeyStatistics._fields))
        convolution = None
        if any(name.startswith(f"{prefix}convolution.") for name in tensors):
            convolution = tuple(tensors[f"{prefix}convolution.{j}"] for j in range(3))
        layers.append(MixerState(tensors[f"{prefix}memory"], statistics, convolution))
    return ModelState(tuple(layers))
