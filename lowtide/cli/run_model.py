"""The model of a run file, built on the CPU from its seed.

What: `build_model` makes a causal language model from a folder or from a kind of model with fields; `model_config` is
the part of it that needs no weights.
Why on the CPU: fresh weights are then the same for every device and every number of ranks.
Cost: host memory for one copy of the weights, until they are moved to the device.
Not covered: models that do not fit in host memory, quantized weights, code that comes with the weights.

Sizes of a model that cannot be: widths below 1, heads that do not divide, more experts for a token than there are.

Why: the model library builds most of them without a word, and a plan for a model that cannot be trained is a wrong
answer. Not covered: what the library refuses itself; how a width fits the device.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lowtide.config.run import NUM_BYTE_TOKENS, RunConfig
from lowtide.engines.tiers.host_limit import host_limit
from lowtide.errors import ConfigError, did_you_mean
from lowtide.units import format_bytes

_AT_LEAST_1 = re.compile(
    r"hidden_size|n_embd|d_model|embedding_size|vocab_size|max_position_embeddings|n_positions|n_ctx|kv_lora_rank|q_lora_rank"
    r"|(\w+_)?intermediate_size|n_inner|ffn_dim|num_attention_heads|n_head|num_key_value_heads|(\w+_)?head_dim"
    r"|num_experts_per_tok|n_group|topk_group"
)
_HEADS, _WIDTHS = ("num_attention_heads", "n_head"), ("hidden_size", "n_embd", "d_model")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def size_mistake(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key of a model's config whose value cannot be, and what is wrong with it; None where all can."""
    sizes = {key: value for key, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}
    for key, value in sizes.items():
        if value < 1 and _AT_LEAST_1.fullmatch(key):
            return key, f"must be at least 1, not {value}"
    heads, width, experts = (_first(names, sizes) for names in (_HEADS, _WIDTHS, _EXPERTS))
    has_head_dim = any(key.endswith("head_dim") for key in sizes)
    if heads and width and not has_head_dim and sizes[width] % sizes[heads]:
        return heads, f"is {sizes[heads]}, which does not divide '{width}' of {sizes[width]}"
    shared = sizes.get("num_key_value_heads")
    if heads and shared and sizes[heads] % shared:
        return "num_key_value_heads", f"is {shared}, which does not divide '{heads}' of {sizes[heads]}"
    chosen = sizes.get("num_experts_per_tok", 0)
    if experts and 0 < sizes[experts] < chosen:
        return "num_experts_per_tok", f"is {chosen}, and there are {sizes[experts]} experts ('{experts}')"
    groups = sizes.get("n_group")
    if groups and experts and sizes[experts] % groups:
        return "n_group", f"is {groups}, which does not divide '{experts}' of {sizes[experts]}"
    if groups and sizes.get("topk_group", 0) > groups:
        return "topk_group", f"is {sizes['topk_group']}, and there are {groups} groups ('n_group')"
    return None


def _first(names: tuple[str, ...], sizes: Mapping[str, int]) -> str | None:
    return next((name for name in names if name in sizes), None)


def build_model(run: RunConfig) -> torch.nn.Module:
    """The model in training mode, in the dtype of its weights. Raises `ConfigError` with the place of the mistake."""
    config = model_config(run)
    if (vocab_size := config.get_text_config().vocab_size) < NUM_BYTE_TOKENS:
        run.fail(
            "model.vocab_size",
            f"'model.vocab_size' is {vocab_size}, but the text is made of bytes; expected at least {NUM_BYTE_TOKENS}",
        )
    dtype = getattr(torch, run.model.dtype)
    if run.model.path is None:
        _check_weights_fit(run, config, dtype)
    torch.manual_seed(run.model.seed)
    if run.model.path is not None:
        read = functools.partial(AutoModelForCausalLM.from_pretrained, config=config, dtype=dtype)
        return _with_lora(run, _from_folder(run, run.model.path, read)).train()
    return fresh_model(run, config, dtype).train()


def model_config(run: RunConfig) -> PretrainedConfig:
    """What the model is like. Raises `ConfigError` with the place of the mistake."""
    if run.model.path is not None:
        config = _from_folder(run, run.model.path, AutoConfig.from_pretrained)
    else:
        assert run.model.model_type is not None
        config = _config_from_fields(run, run.model.model_type)
    if (mistake := size_mistake({**config.get_text_config().to_dict(), **run.model.fields})) is not None:
        run.fail(f"model.{mistake[0]}", f"'model.{mistake[0]}' {mistake[1]}")
    _check_text_fits(run, config)
    config.use_cache = False  # a cache of keys and values is for generating; in training it only costs memory
    return config


def fresh_model(run: RunConfig, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A model with fresh weights. Under `FakeTensorMode` its weights have no bytes."""
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # the library checks its own fields, with whatever exception its authors chose
        raise _refused(run, type(config), error) from None
    return _with_lora(run, model)


def _with_lora(run: RunConfig, model: Any) -> Any:
    """The model with adapters, and all else frozen, if the run says so."""
    if run.model.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=run.model.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name of transformers that will go
        return get_peft_model(model, adapters)


def _check_weights_fit(run: RunConfig, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Without it, a field with a few digits too many fills the machine's memory, and the kernel ends the process."""
    try:
        with torch.device("meta"):
            model = fresh_model(run, config, dtype)
    except ConfigError:
        return  # not every model can be built without memory; and a wrong field is said where it is built with it
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    limit = host_limit()
    if limit.limit_bytes is not None and weights_bytes > limit.limit_bytes:
        run.fail(
            "model",
            f"'model': its weights are {format_bytes(weights_bytes)}, and {format_bytes(limit.limit_bytes)} of main "
            f"memory are free ({limit.source}); make the model smaller, or plan it without weights: lowtide plan",
        )


def _from_folder(run: RunConfig, path: Path, read: Callable[..., Any]) -> Any:
    """What `read` makes of a folder. Raises `ConfigError` where that cannot be."""
    try:
        return read(path, local_files_only=True)
    except (OSError, ValueError) as error:
        if path.exists():
            what = f"'model.path': no model can be loaded from {path}: {_first_line(error)}"
        else:
            what = f"{path} is no file and no folder, and not in the cache of Hugging Face on this machine (nothing is "
            what += "downloaded); give the path of its config.json"
        raise run.mistake("model.path", what) from None


def _config_from_fields(run: RunConfig, kind: str) -> PretrainedConfig:
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING.keys()) or "; see the model_type in the config.json of your model"
        run.fail("model.model_type", f"unknown model_type '{kind}'{hint}")
    config_class = CONFIG_MAPPING[kind]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        run.fail(
            "model.model_type", f"model_type '{kind}' has no causal language model; choose one that has, such as llama"
        )
    known = _field_names(config_class)
    for key in run.model.fields:
        if key not in known:
            hint = did_you_mean(key, known) or f"; it is not a field of {config_class.__name__}"
            raise ConfigError(f"{run.model.locations.keys.get(key, 'model')}: unknown key 'model.{key}'{hint}")
    # bytes have no special tokens, and the defaults may lie outside a vocabulary of 256
    absent = {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in known}
    fields = absent | {"vocab_size": NUM_BYTE_TOKENS} | dict(run.model.fields)
    try:
        return config_class(**fields)
    except Exception as error:
        raise _refused(run, config_class, error) from None


def _refused(run: RunConfig, config_class: type, error: Exception) -> ConfigError:
    return run.mistake("model", f"'model': {config_class.__name__} refuses these fields: {_first_line(error)}")


_READS_CONFIG = re.compile(r"""\bconfig\.([a-z]\w*)|\bgetattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")


def _field_names(config_class: type[PretrainedConfig]) -> list[str]:
    """What a config class declares and what its model reads; the class would keep any other key too, without a word.

    The second part matters: Qwen3-MoE, for one, reads a `head_dim` that its config class does not declare.
    """
    parameters = inspect.signature(config_class).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    names += getattr(config_class, "attribute_map", {})
    source = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__module__])
    names += [declared or looked_up for declared, looked_up in _READS_CONFIG.findall(source)]
    return sorted({name for name in names if not callable(getattr(config_class, name, None))})


def _check_text_fits(run: RunConfig, config: Any) -> None:
    longest = most_positions(run, config)
    if longest is not None and run.data.sequence_length > longest:
        run.fail(
            "data.sequence_length",
            f"'data.sequence_length' is {run.data.sequence_length}, but the model has {longest} positions; "
            "lower it or raise 'model.max_position_embeddings'",
        )


def most_positions(run: RunConfig, config: Any) -> int | None:
    """Tokens of the longest sequence that the model takes. None: any number, as with the rotary positions of a model
    from a folder, whose memory and time can be asked for lengths that it was not trained for."""
    text = config.get_text_config()
    if run.model.path is not None and getattr(text, "rope_parameters", None):
        return None
    return getattr(text, "max_position_embeddings", None)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
