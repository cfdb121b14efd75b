"""The model of a run file, built on the CPU from its seed.

What: `build_model` makes a causal language model from a folder or from a kind of model with fields; `model_config` is
the part of it that needs no weights.
Why on the CPU: fresh weights are then the same for every device and every number of ranks.
Cost: host memory for one copy of the weights, until they are moved to the device.
Not covered: models that do not fit in host memory, quantized weights, code that comes with the weights.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from lowtide.config.model_sizes import size_mistake
from lowtide.config.run import NUM_BYTE_TOKENS, RunConfig
from lowtide.engines.tiers.host_limit import host_limit
from lowtide.errors import ConfigError, did_you_mean
from lowtide.units import format_bytes


def build_model(run: RunConfig) -> torch.nn.Module:
    """The model in training mode, in the dtype of its weights. Raises `ConfigError` with the place of the mistake."""
    config = model_config(run)
    dtype = getattr(torch, run.model.dtype)
    if run.model.path is None:
        _check_weights_fit(run, config, dtype)
    torch.manual_seed(run.model.seed)
    if run.model.path is not None:
        return _from_folder(run, run.model.path, config, dtype).train()
    return fresh_model(run, config, dtype).train()


def model_config(run: RunConfig) -> PretrainedConfig:
    """What the model is like, checked against the text. Raises `ConfigError` with the place of the mistake."""
    if run.model.path is not None:
        config = _config_from_folder(run, run.model.path)
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
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # the library checks its own fields, with whatever exception its authors chose
        raise _refused(run, type(config), error) from None


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


def _from_folder(run: RunConfig, path: Path, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(path, config=config, local_files_only=True, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _not_loaded(run, path, error) from None


def _config_from_folder(run: RunConfig, path: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _not_loaded(run, path, error) from None


def _not_loaded(run: RunConfig, path: Path, error: Exception) -> ConfigError:
    return run.mistake("model.path", f"'model.path': no model can be loaded from {path}: {_first_line(error)}")


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
            raise ConfigError(f"{run.model.key_places.get(key, 'model')}: unknown key 'model.{key}'{hint}")
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
    vocab_size = config.get_text_config().vocab_size
    if vocab_size < NUM_BYTE_TOKENS:
        run.fail(
            "model.vocab_size",
            f"'model.vocab_size' is {vocab_size}, but the text is made of bytes; expected at least {NUM_BYTE_TOKENS}",
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and run.data.sequence_length > longest:
        run.fail(
            "data.sequence_length",
            f"'data.sequence_length' is {run.data.sequence_length}, but the model has {longest} positions; "
            "lower it or raise 'model.max_position_embeddings'",
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
