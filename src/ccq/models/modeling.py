"""Causal language models of one mixer a block, in the Hugging Face way: training, prefill and decode are one call, with
or without a cache.

tokens -> embedding -> num_layers x block(norm, mixer, norm, SwiGLU) -> norm -> head. Parameter names follow
flash-linear-attention's models.

Legend: B rows, N sequences (N = B without cu_seqlens), T tokens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils import logging as transformers_logging

from ccq.models.cache import CACHE_NAME, CCQCache
from ccq.models.configuration import CCQConfig
from ccq.models.intervention import GateValues, ReadIntervention, read_intervention, read_steps, set_read
from ccq.nn.mixers import GatedDeltaNet, GatedLinearAttention, Mamba2, SoftmaxAttention
from ccq.nn.mixers.common import LayerState
from ccq.nn.mlp import SwiGLU
from ccq.nn.norm import ResidualRMSNorm
from ccq.nn.projection import is_exactly
from ccq.nn.read import GatedReadStep, ReadStep
from ccq.nn.reads import READS
from ccq.ops.checks import needs_gradient, values_can_be_read

# What transformers' callers pass to any model, and a loss function may take.
_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
_IGNORED_LABEL = -100
_SERIAL_ROWS = 16
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class CCQModelOutput(BaseModelOutputWithPast):
    """last_hidden_state [B, T, hidden]; cache; hidden_states where asked for."""

    if CACHE_NAME != "cache":

        @property
        def cache(self) -> CCQCache | None:
            return self.past_key_values


class CCQCausalLMOutput(CausalLMOutputWithPast):
    """loss where labels were given; logits [B, T, vocab], or of the kept positions; cache; hidden_states where asked
    for.
    """

    if CACHE_NAME != "cache":

        @property
        def cache(self) -> CCQCache | None:
            return self.past_key_values


def _gla(config: CCQConfig, read: ReadStep | None) -> nn.Module:
    return GatedLinearAttention(
        *_sizes(config),
        read=read,
        short_convolution=config.short_convolution,
        gate_logit_normalizer=config.gate_logit_normalizer,
        feature_map="hedgehog" if config.backbone == "gla-hedgehog" else None,
        norm_eps=config.norm_eps,
    )


def _gated_deltanet(config: CCQConfig, read: ReadStep | None) -> nn.Module:
    assert config.short_convolution is not None
    return GatedDeltaNet(
        *_sizes(config),
        read=read,
        conv_size=config.short_convolution,
        max_a=config.max_a,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        norm_eps=config.norm_eps,
    )


def _mamba2(config: CCQConfig, read: ReadStep | None) -> nn.Module:
    assert config.short_convolution is not None
    return Mamba2(
        *_sizes(config),
        read=read,
        num_groups=config.num_groups,
        conv_size=config.short_convolution,
        min_a=config.min_a,
        max_a=config.max_a,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        norm_eps=config.norm_eps,
    )


def _transformer(config: CCQConfig, read: ReadStep | None) -> nn.Module:
    return SoftmaxAttention(*_sizes(config), read=read, num_kv_heads=config.num_kv_heads, rope_base=config.rope_base)


MIXERS: dict[str, Callable[[CCQConfig, ReadStep | None], nn.Module]] = {
    "gla": _gla,
    "gla-hedgehog": _gla,
    "gated-deltanet": _gated_deltanet,
    "mamba2": _mamba2,
    "transformer": _transformer,
}
"""The mixer of every backbone of `ccq.models.BACKBONES`."""


def _sizes(config: CCQConfig) -> tuple[int, int, int, int]:
    return config.hidden_size, config.num_heads, config.head_dim, config.value_head_dim


def make_read(config: CCQConfig, layer: int) -> ReadStep | None:
    """The read step of layer number `layer`, or None for a backbone as it is."""
    if config.read is None:
        return None
    kind = READS[config.read]
    assert kind.make is not None
    # The heads of Mamba2 share keys and queries in groups, and so the statistics.
    heads = config.num_groups if config.backbone == "mamba2" else config.num_heads
    options = {name: getattr(config, name) for name in kind.takes}
    if isinstance(options.get("gate"), list):
        options["gate"] = options["gate"][layer]
    return kind.make(heads, config.head_dim, **options, **(config.read_options or {}))


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)) unless the blocks have none."""

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = ResidualRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = MIXERS[config.backbone](config, make_read(config, layer))
        self.mlp_norm = self.mlp = None
        if config.intermediate_size is not None:
            self.mlp_norm = ResidualRMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, state: LayerState | None, mask: Tensor | None, cu_seqlens: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, LayerState | None]:
        # The state of softmax attention holds every key and value, and is made only where it is kept.
        options = {"return_state": keep_state} if isinstance(self.attn, SoftmaxAttention) else {}
        normed, x = self.attn_norm(x)
        branch, state = self.attn(normed, state=state, mask=mask, cu_seqlens=cu_seqlens, **options)
        if self.mlp is not None and self.mlp_norm is not None:
            normed, x = self.mlp_norm(x, branch)
            # Whoever watches or replaces the MLP finds what it puts out by itself.
            x = self.mlp.add_to(x, normed) if is_exactly(self.mlp, SwiGLU) else x + self.mlp(normed)
        else:
            x = x + branch
        # What a compiled block puts out has a gradient, if only of zeros, which is carried back through the rule.
        return x, state if keep_state else None


class CCQPreTrainedModel(PreTrainedModel):
    """What the model with and without head share: weights, files, and the switch of the read steps."""

    config: CCQConfig
    config_class = CCQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - transformers' own form
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # Its memory cannot be rolled back, so transformers refuses the decoding methods that need that.
    _is_stateful = True

    def __init__(self, config: CCQConfig, *args: Any, **kwargs: Any) -> None:
        config.check()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings from a normal distribution with standard deviation `initializer_range`, biases
        0, norms 1, everything else as its module sets it. Loaded weights stay as they are.

        A read step draws no random numbers: models of one seed that differ only in it share all other weights bit for
        bit.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
            return
        if isinstance(module, GatedReadStep):
            module.restore_fixed_gate()
        own = list(module.parameters(recurse=False))
        reset = getattr(module, "reset_parameters", None)
        if own and reset is not None and not any(getattr(p, "_is_hf_initialized", False) for p in own):
            reset()

    def post_init(self) -> None:
        super().post_init()
        self._marked = [name for name, p in self.named_parameters() if getattr(p, "_no_weight_decay", False)]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own, but strict: weights that are missing, unexpected or of another shape are an error that
        names them. `ignore_mismatched_sizes=True` lets other shapes pass.
        """
        with_info = kwargs.pop("output_loading_info", False)
        tolerant = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        wrong = [f"missing {name}" for name in sorted(info["missing_keys"])]
        wrong += [f"unexpected {name}" for name in sorted(info["unexpected_keys"])]
        if not tolerant:
            wrong += [
                f"{name} has shape {list(found)}, the configuration asks for {list(asked)}"
                for name, found, asked in sorted(info["mismatched_keys"])
            ]
        if wrong:
            raise ValueError(
                f"the weights in {pretrained_model_name_or_path} do not fit its configuration, arm "
                f"{model.config.arm!r}: {'; '.join(wrong)}. Load them with the configuration they were saved with"
            )
        # Loading puts new parameters in place, without the marks of the old ones.
        parameters = dict(model.named_parameters())
        for name in model._marked:
            parameters[name]._no_weight_decay = True
        return (model, info) if with_info else model

    def read_steps(self) -> list[ReadStep]:
        """The read steps, from the first layer to the last; empty for an arm without."""
        return read_steps(self)

    def set_read(
        self, intervention: str | ReadIntervention, *, gate_values: GateValues | None = None
    ) -> ReadIntervention:
        """`ccq.models.set_read` of this model: change what the read steps do, until the next call of this."""
        return set_read(self, intervention, gate_values=gate_values)

    @property
    def read_intervention(self) -> ReadIntervention | None:
        """What the last `set_read` did; None without a read step."""
        return read_intervention(self)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def read_parameter_count(self) -> int:
        """How many of the parameters belong to the read steps."""
        return sum(parameter.numel() for read in self.read_steps() for parameter in read.parameters())


class CCQModel(CCQPreTrainedModel):
    """Embedding, blocks and last norm: everything below the head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: CCQConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: CCQCache | None = None,
        past_key_values: CCQCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> CCQModelOutput:
        """See `CCQForCausalLM.forward`. hidden_states are the embeddings and the output of each block, the last one
        behind the last norm.
        """
        _refuse_others(others)
        x = self._embed(input_ids, inputs_embeds)
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument; give one of them")
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = CCQCache(self.config)
        if cache is not None:
            _check_cache(cache, len(self.layers))
        mask = None if attention_mask is None else _own_columns(attention_mask, x, cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        hidden_states = []
        for i, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden_states.append(x)
            state = None if cache is None else cache.layers[i].lend()
            x, state = layer(x, state, mask, cu_seqlens, cache is not None)
            if cache is not None:
                cache.layers[i].update(state)
        x = self.norm(x)
        if cache is not None:
            cache.advance(x.shape[1], x.device)
        return CCQModelOutput(
            last_hidden_state=x,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            **{CACHE_NAME: cache},
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
            dtype = str(input_ids.dtype).removeprefix("torch.")
            raise ValueError(f"input_ids must be an int64 tensor of shape [B, T], got {list(input_ids.shape)} {dtype}")
        if values_can_be_read(input_ids) and input_ids.numel():
            low, high = (int(x) for x in torch.aminmax(input_ids))
            if low < 0 or high >= self.embeddings.num_embeddings:
                raise ValueError(
                    f"input_ids must be in 0 ... {self.embeddings.num_embeddings - 1}, got values from {low} to {high}"
                )
        if _can_gather(self.embeddings, input_ids):
            return self.embeddings.weight[input_ids]
        return self.embeddings(input_ids)


def _can_gather(embeddings: nn.Embedding, tokens: Tensor) -> bool:
    """Whether an indexing kernel may copy the rows: up to 16, torch's kernel for embeddings copies one after the other,
    7.7 us for the 8 of a decoding step on an H200.
    """
    few = tokens.is_cuda and tokens.numel() <= _SERIAL_ROWS and not needs_gradient(embeddings.weight)
    return few and is_exactly(embeddings, nn.Embedding) and embeddings.max_norm is None


class CCQForCausalLM(CCQPreTrainedModel, GenerationMixin):
    """A language model of one arm."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: CCQConfig) -> None:
        super().__init__(config)
        self.model = CCQModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        rows = self.model.embeddings.weight.shape
        if self.config.tie_word_embeddings and value.weight.shape != rows:
            raise ValueError(
                f"the head is tied to embeddings of shape {list(rows)}, so it cannot have shape "
                f"{list(value.weight.shape)}; resize both with resize_token_embeddings, or do not tie them"
            )
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: CCQCache | None = None,
        past_key_values: CCQCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> CCQCausalLMOutput:
        """Tokens -> logits of the next ones, the loss if there are labels, and the cache after the last token.

        Args:
            input_ids: [B, T] int64; or inputs_embeds [B, T, hidden] in their place.
            attention_mask: [B, T], 1 = real token, 0 = padding on the left, the right or both; or [B, P + T] with the
                P positions that the cache has read already, of which nothing is used.
            cache: from an earlier call, continued and overwritten; `past_key_values` is its older name.
            labels: [B, T], shifted inside; -100 is ignored. The first token of a packed document has nothing that
                could predict it and is ignored too.
            use_cache: make a cache if none is given. None takes the configuration's value, but False in training.
            logits_to_keep: compute the head at the last positions only; 0 for all, or their indices.
            cu_seqlens: [N + 1] boundaries of documents packed into one row, B = 1; they do not see each other. The
                cache then has N sequences.
            others: for the loss: num_items_in_batch (divide the sum of losses by it), ignore_index, shift_labels.
        """
        for_loss = {name: others.pop(name) for name in _LOSS_ARGUMENTS if name in others}
        output: CCQModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            return_dict=True,
            **others,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if cu_seqlens is not None:
                starts = cu_seqlens[:-1].to(torch.int64)
                labels = labels.index_fill(1, starts[starts < labels.shape[1]], _IGNORED_LABEL)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss)
        return CCQCausalLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_NAME: output.cache}
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` is to start with this library's cache; cache_implementation "static" lets it compile the step."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ValueError(
                "attention_mask must end with a real token in every row: pad prompts on the left "
                "(tokenizer.padding_side = 'left')"
            )
        if model_kwargs.get(CACHE_NAME) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            return
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(f'cache_implementation must be "dynamic" or "static" for this model, got {asked!r}')
        if asked == "static" and self.config.backbone == "transformer":
            raise ValueError(
                'the state of backbone "transformer" grows with every token, so cache_implementation="static" does not '
                "fit it; leave it out"
            )
        model_kwargs[CACHE_NAME] = CCQCache(self.config, static=asked == "static")

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """`generate` would make square masks for a static cache; this model takes them as they are, [B, T]."""
        return attention_mask

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        new = kwargs.get("next_sequence_length")
        if new is not None and new < 1:
            raise ValueError(
                f"the cache has read {kwargs[CACHE_NAME].get_seq_length()} positions and input_ids has "
                f"{input_ids.shape[1]}: give the whole text, of which the cache has read the first part, or only the "
                "new tokens with an attention_mask [B, positions read + new tokens]"
            )
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if new == 1 and not kwargs.get("is_first_iteration") and inputs.get(CACHE_NAME) is not None:
            # A generated token is real; what was padding before it is past.
            inputs["attention_mask"] = None
        return inputs


def _refuse_others(others: dict[str, Any]) -> None:
    """Arguments that callers of transformers' models may pass must not be lost in silence."""
    for name, value in others.items():
        if value is None or value is False:
            continue
        if name == "position_ids":
            raise TypeError(
                "position_ids are not taken: positions follow from attention_mask, or from cu_seqlens (boundaries "
                "[N + 1]) for documents packed into one row"
            )
        raise TypeError(f"forward got an argument that this model does not take: {name}")


def _check_cache(cache: CCQCache, layers: int) -> None:
    if not isinstance(cache, CCQCache):
        raise TypeError(
            f"cache must be a CCQCache, got {type(cache).__name__}; make one with CCQCache(model.config), or give none"
        )
    if len(cache.layers) != layers:
        raise ValueError(f"cache has {len(cache.layers)} layers, but the model has {layers}")


def _own_columns(attention_mask: Tensor, x: Tensor, cache: CCQCache | None) -> Tensor | None:
    """The part of the mask [B, T] that belongs to the tokens of this call; None where all are known to be real."""
    rows, tokens = x.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask must have shape [B, T] = {[rows, tokens]}, or [B, positions read + T]; got "
            f"{list(attention_mask.shape)}"
        )
    before = attention_mask.shape[1] - tokens
    if before and values_can_be_read(x):
        read = 0 if cache is None else cache.get_seq_length()
        if before != read:
            raise ValueError(
                f"attention_mask has {before} columns in front of the {tokens} tokens, but the cache has read {read} "
                "positions"
            )
    mask = attention_mask[:, before:]
    return None if values_can_be_read(mask) and mask.all() else mask


def save_model(model: CCQPreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder)`, each file whole or not at all. `options` are save_pretrained's."""
    with _no_progress_bars():
        written = write_whole(folder, partial(model.save_pretrained, **options))
    remove_other_weights(folder, written)


def remove_other_weights(folder: str | os.PathLike[str], written: set[str]) -> None:
    """Remove the weights of an earlier model, which in other shards would be taken for those of the files `written`."""
    for path in weight_files(folder):
        if path.name not in written:
            path.unlink()


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files in which transformers keeps weights, and their index. Others, such as those of gates, may lie beside
    them under any name.
    """
    return sorted(path for path in Path(folder).iterdir() if _WEIGHTS.fullmatch(path.name))


def write_whole(folder: str | os.PathLike[str], write: Callable[[Path], Any]) -> set[str]:
    """Let `write` fill a folder of its own, then move its files into `folder`, which is made if need be. A kill leaves
    of each file the old one or the new one. Returns the names.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        write(staging)
        paths = sorted(staging.iterdir())
        for path in paths:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        for path in paths:
            os.replace(path, folder / path.name)
        return {path.name for path in paths}
    finally:
        shutil.rmtree(staging)


def load_model(folder: str | os.PathLike[str], **options: Any) -> CCQForCausalLM:
    """`CCQForCausalLM.from_pretrained(folder)`, from this disk only, without a progress bar, and with the random
    streams left as they were. `options` are from_pretrained's, such as dtype and device_map.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no model: {path} does not exist; write one with save_model")
    try:
        values = json.loads(path.read_text())
        if values.pop("model_type", "ccq") != "ccq":
            raise ValueError("it belongs to a model of another library")
        CCQConfig.from_dict(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a model configuration: {error}") from error
    with _no_progress_bars(), torch.random.fork_rng(devices=[]):
        model: CCQForCausalLM = CCQForCausalLM.from_pretrained(folder, local_files_only=True, **options)
        return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
