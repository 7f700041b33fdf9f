"""Geometry of a model from its Hugging Face ``config.json``: which layers store K and V, and how much.

Plain JSON; transformers is not needed, nor the weights. What a config leaves to its model's code (windows of every
second layer, say) is written down here for the models that do so; a field that is missing or not understood is an
error that names it, because a guess would be a plan for another model.

Layers without K and V by position (recurrent ones, MLPs) are counted in :attr:`ModelGeometry.notes` and store nothing.

Sources of the rules: the configuration classes of transformers 5.24, file ``configuration_<model_type>.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from kvport.arguments import INT32_MAX, show
from kvport.errors import LayoutError, Unsupported
from kvport.files import parse_json, reading
from kvport.formats import DTYPES, CacheFormat
from kvport.layout import DEFAULT_PAGE_SIZE, MOST_LAYERS, CacheLayout, LayerSpec

Config = Mapping[str, Any]

#: Where multimodal configs keep the language model's own.
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_query_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "hidden_dim")
_KV_HEADS: Final = ("num_key_value_heads", "multi_query_group_num", "num_key_value_heads_per_layer")
_DTYPE: Final = ("dtype", "torch_dtype")
_JSON_DTYPES: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_FULL, _WINDOW, _CHUNK, _STATE, _NONE = "full", "window", "chunk", "state", "none"
_HYBRID, _HYBRID_WINDOW = "hybrid", "hybrid window"  # K and V beside a recurrent state
_WINDOWED: Final = (_WINDOW, _HYBRID_WINDOW)
_STORED: Final = (_FULL, _WINDOW, _CHUNK, _HYBRID, _HYBRID_WINDOW)
#: What the names in ``layer_types`` and ``layers_block_type`` store.
_KINDS: Final = {
    "full_attention": _FULL,
    "attention": _FULL,
    "deepseek_sparse_attention": _FULL,  # beside the keys of an indexer, as indexed_attention
    "indexed_attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _CHUNK,
    "hybrid": _HYBRID,
    "hybrid_sliding": _HYBRID_WINDOW,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "recurrent": _STATE,
    "moe": _NONE,
    "mlp": _NONE,
}
#: NVIDIA's Nemotron-H writes its layers as one string.
_LETTERS: Final = {"M": _STATE, "*": _FULL, "-": _NONE, "E": _NONE}

#: Every layer has the window where there is one.
_ALL_WINDOWED: Final = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
#: Every n-th layer is full, the others have the window; a ``sliding_window_pattern`` in the config goes first.
_EVERY_NTH_FULL: Final = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
    "gemma3": 6,
    "gemma4_text": 6,
}
#: Windows count only where ``use_sliding_window`` says so, from layer ``max_window_layers`` on.
_LATE_WINDOWED: Final = ("qwen2", "qwen3", "qwen3_moe")
#: Models whose default head_dim is not hidden size / heads: without the field there is no telling.
_OWN_HEAD_DIM: Final = re.compile(r"gemma.*|gpt_oss|qwen3|qwen3_next")
#: Layers that keep K and V more than once.
_TWICE: Final = ("longcat_flash",)
_NO_KV: Final = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "bert", "roberta")
#: Fields of a recurrent part. In a config that does not list its layers they leave open which ones are attention.
_RECURRENT_FIELDS: Final = (
    "mamba_",
    "ssm_",
    "rwkv",
    "linear_num_",
    "linear_conv",
    "conv_L_cache",
    "state_size",
    "lru_",
)


@dataclass(frozen=True)
class ModelGeometry:
    """The layers of a model that take part in a KV cache.

    ``layers``: their geometry, in order; ``model_layers``: the model's number of each. ``dtype`` is the model's float
    dtype. ``notes`` say in words what the config left open or what a KV cache does not hold.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    model_layers: tuple[int, ...]
    dtype: torch.dtype
    notes: tuple[str, ...] = ()

    def layout(self, format: str | CacheFormat, page_size: int = DEFAULT_PAGE_SIZE) -> CacheLayout:
        """The cache layout of this model in a format. Raises :class:`LayoutError` where the format does not fit."""
        return CacheLayout(self.layers, CacheFormat.parse(format), page_size, self.dtype)

    def split(self, devices: int) -> ModelGeometry:
        """One device's share under tensor parallelism over ``devices``: whole KV heads, never a part of a head.

        With more devices than KV heads each head is kept by several of them; a latent (MLA) vector is kept by all.
        Raises :class:`LayoutError` where heads do not divide.
        """
        if devices < 1:
            raise LayoutError(f"a model is split over 1 or more devices, got {devices}")
        shares = []
        for number, spec in zip(self.model_layers, self.layers, strict=True):
            whole = spec.kv_heads % devices == 0
            if spec.query_heads % devices or not (spec.latent or whole or devices % spec.kv_heads == 0):
                raise LayoutError(
                    f"layer {number} has {spec.query_heads} query and {spec.kv_heads} KV heads, which cannot be split "
                    f"over {devices} devices; use a divisor of both, or a multiple of the KV heads that divides the "
                    "query heads"
                )
            kv_heads = spec.kv_heads // devices if whole else 1
            shares.append(replace(spec, query_heads=spec.query_heads // devices, kv_heads=kv_heads))
        return replace(self, layers=tuple(shares))


def read_model_config(source: str | os.PathLike[str] | Config, *, windows: bool = True) -> ModelGeometry:
    """Read a ``config.json`` (a path, a folder that holds one, or its content).

    ``windows=False`` plans sliding-window layers as full ones, for engines that keep them in full. Raises
    :class:`LayoutError` naming the field that is missing or cannot be, :class:`Unsupported` for a model whose state is
    not K and V by position.
    """
    top = _load(source)
    try:
        return _read(top, windows)
    except LayoutError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        # A list where a number belongs, say: there are more ways to be malformed than rules to read.
        raise LayoutError(f"a field of the config is of another kind than its model's code reads: {error}") from error


def _read(top: Config, windows: bool) -> ModelGeometry:
    config = _text_config(top)
    model = str(config.get("model_type") or top.get("model_type") or "")
    _refuse_foreign(model, top, config)
    count = _layer_count(config, model)
    kinds = _kinds(config, model, count)
    notes = _notes(kinds, config)
    if not windows:
        kinds = [_FULL if kind in _WINDOWED else kind for kind in kinds]
    stored = [number for number, kind in enumerate(kinds) if kind in _STORED]
    if not stored:
        raise Unsupported(f"none of the {count} layers of {model or 'this model'} stores K and V")
    specs = [_spec(config, model, number, kinds[number], notes) for number in stored]
    specs = _share(config, model, count, kinds, stored, specs)
    return ModelGeometry(model, tuple(specs), tuple(stored), _dtype(top, config, notes), tuple(dict.fromkeys(notes)))


def _load(source: str | os.PathLike[str] | Config) -> Config:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        with reading(path, "model config", "give a Hugging Face config.json or the folder that holds it"):
            content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{path} holds a {type(content).__name__}, not the fields of a model")
    return content


def _text_config(top: Config) -> Config:
    """The language model's own config: of a multimodal model, the nested one."""
    for name in _NESTED:
        if isinstance(nested := top.get(name), dict):
            return _text_config(nested)
    return top


def _refuse_foreign(model: str, top: Config, config: Config) -> None:
    if top.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise Unsupported(
            f"{model or 'this model'} is an encoder-decoder (is_encoder_decoder): its cross-attention K and V do not "
            "grow with the text"
        )
    for field in ("cross_attention_layers", "add_cross_attention"):
        if config.get(field):
            raise Unsupported(f"{model or 'this model'} has cross-attention ({field}), which a plan does not cover")
    if config.get("n_recurrent_layers"):
        raise Unsupported(f"{model or 'this model'} runs layers in loops (n_recurrent_layers), each with K and V anew")
    if model in _NO_KV:
        raise Unsupported(f"models of type {model} keep no K and V by position: there is no KV cache to plan")


# -- which layers ------------------------------------------------------------------------------------------------------


def _layer_count(config: Config, model: str) -> int:
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(field) and not any(config.get(name) for name in _LAYERS):
            return len(config[field])
    count = _count(config, *_LAYERS, model=model) * (2 if model in _TWICE else 1)
    if count > MOST_LAYERS:
        raise LayoutError(f"the config says {count} layers; more than {MOST_LAYERS} cannot be meant")
    return count


def _kinds(config: Config, model: str, count: int) -> list[str]:
    """What each layer stores."""
    listed = _listed_kinds(config, model, count)
    if listed is not None:
        if len(listed) != count:
            raise LayoutError(f"the config lists {len(listed)} layers and says it has {count}")
        return listed
    if model == "falcon_h1":
        return [_HYBRID] * count
    if recurrent := sorted(f for f in config if f.startswith(_RECURRENT_FIELDS) and config[f]):
        raise Unsupported(
            f"{model or 'this model'} has a recurrent part ({', '.join(recurrent)}) and no list of its layers; add "
            "'layer_types' to the config, one of full_attention, linear_attention, mamba, ... for each layer"
        )
    return _window_kinds(config, model, count)


def _listed_kinds(config: Config, model: str, count: int) -> list[str] | None:
    """From a field that lists the layers, in one of the ways that models have; None where there is none."""
    for field in ("layer_types", "layers_block_type"):
        if config.get(field):
            return [_named_kind(field, number, name) for number, name in enumerate(config[field])]
    if pattern := config.get("hybrid_override_pattern"):
        if unknown := sorted(set(pattern) - set(_LETTERS)):
            raise LayoutError(f"hybrid_override_pattern has {unknown}; known letters: {', '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in pattern]
    if types := config.get("attn_type_list"):  # MiniMax
        return [_FULL if int(t) == 1 else _STATE for t in types]
    if blocks := config.get("block_types") or config.get("_block_types"):  # RecurrentGemma: local attention
        kinds = {"attention": _WINDOW, "recurrent": _STATE}
        if unknown := sorted(set(blocks) - set(kinds)):
            raise LayoutError(f"block_types has {unknown}; known types: {', '.join(kinds)}")
        return [kinds[blocks[number % len(blocks)]] for number in range(count)]
    attention = _attention_layers(config, count)
    return None if attention is None else [_FULL if n in attention else _STATE for n in range(count)]


def _attention_layers(config: Config, count: int) -> set[int] | None:
    """The attention layers of hybrids that give them by number."""
    for field in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(field) is not None:
            return {int(n) for n in config[field]}
    if full := (config.get("linear_attn_config") or {}).get("full_attn_layers"):  # Kimi Linear counts from 1
        return {int(n) - 1 for n in full}
    if period := config.get("attn_layer_period"):  # Jamba
        return {n for n in range(count) if n % period == config.get("attn_layer_offset", 0)}
    if interval := config.get("full_attention_interval"):  # Qwen3-Next
        return {n for n in range(count) if (n + 1) % interval == 0}
    return None


def _named_kind(field: str, number: int, name: object) -> str:
    if name not in _KINDS:
        raise Unsupported(
            f"{field} says layer {number} is {name!r}, whose state kvport does not know; known: {', '.join(_KINDS)}"
        )
    return _KINDS[str(name)]


def _window_kinds(config: Config, model: str, count: int) -> list[str]:
    """Full or windowed layers of a model that does not list them."""
    if config.get("use_sliding_window") is False:
        return [_FULL] * count
    if (pattern := config.get("sliding_window_pattern")) or model in _EVERY_NTH_FULL:
        pattern = pattern or _EVERY_NTH_FULL[model]
        if config.get("sliding_window", 0) is None:
            return [_FULL] * count
        if isinstance(pattern, str):  # EXAONE: "LLLG", local and global
            return [_WINDOW if pattern[n % len(pattern)] == "L" else _FULL for n in range(count)]
        kinds = [_FULL if (n + 1) % pattern == 0 else _WINDOW for n in range(count)]
        return [*kinds[:-1], _FULL] if model == "gemma4_text" else kinds
    if model in _ALL_WINDOWED:
        if "sliding_window" not in config:
            raise _missing(model, "sliding_window", "write null there for a model without a window")
        return [_FULL if config["sliding_window"] is None else _WINDOW] * count
    if config.get("sliding_window") is None:
        return [_CHUNK if config.get("attention_chunk_size") else _FULL] * count
    if model in _LATE_WINDOWED and config.get("use_sliding_window"):
        first = _count(config, "max_window_layers", model=model, least=0)
        return [_FULL if n < first else _WINDOW for n in range(count)]
    raise _missing(
        model,
        "layer_types",
        f"it has sliding_window {config['sliding_window']}, and which layers use it is not written down; add the list "
        "(sliding_attention or full_attention for each layer)",
    )


def _missing(model: str, field: str, advice: str) -> LayoutError:
    return LayoutError(f"the config of {model or 'this model'} has no field {field!r}: {advice}")


def _notes(kinds: Sequence[str], config: Config) -> list[str]:
    notes = []
    if recurrent := sum(kind in (_STATE, _HYBRID, _HYBRID_WINDOW) for kind in kinds):
        notes.append(f"{recurrent} layers keep a recurrent state of constant size, which is not counted")
    if chunked := kinds.count(_CHUNK):
        notes.append(f"{chunked} layers attend in chunks; kvport keeps all their tokens")
    if config.get("index_head_dim") or config.get("index_n_heads"):
        notes.append("the keys of the sparse-attention indexer (index_head_dim) are not counted")
    return notes


# -- their shape -------------------------------------------------------------------------------------------------------


def _spec(config: Config, model: str, number: int, kind: str, notes: list[str]) -> LayerSpec:
    """Heads and dims of one layer."""
    own = _own_fields(config, model, number, kind)
    query_heads = _count(own, *_HEADS, model=model, layer=number)
    window = None
    if kind in _WINDOWED:
        local = "block_types" in own or "_block_types" in own
        fields = ["attention_window_size"] if local else ["sliding_window", "sliding_window_size"]
        window = _count(own, *fields, model=model, layer=number)
    if own.get("kv_lora_rank"):
        latent = _count(own, "kv_lora_rank", model=model)
        rope = _count(own, "qk_rope_head_dim", model=model)
        return LayerSpec(1, query_heads, latent + rope, latent, window=window, latent=True)
    kv_heads = _kv_heads(own, model, number, query_heads, notes)
    key_dim = _head_dim(own, model, number, query_heads)
    value_dim = _count(own, "v_head_dim", model=model) if own.get("v_head_dim") else key_dim
    try:
        return LayerSpec(kv_heads, query_heads, key_dim, value_dim, window=window)
    except LayoutError as error:
        raise LayoutError(f"layer {number} of {model or 'this model'}: {error}") from error


def _own_fields(config: Config, model: str, number: int, kind: str) -> Config:
    """The config as layer ``number`` sees it: per-layer overrides applied."""
    own: dict[str, Any] = dict(config)
    if kind in _WINDOWED:  # heads of sliding layers that differ from the others'
        own.update({name.removeprefix("swa_"): value for name, value in config.items() if name.startswith("swa_")})
    overrides = {int(layer): fields for layer, fields in (config.get("per_layer_config") or {}).items()}  # "05"
    own.update(overrides.get(number) or {})
    if model.startswith("gemma4") and kind == _FULL and not overrides:
        if "global_head_dim" not in config:
            raise _missing(model, "global_head_dim", "its full-attention layers have a head_dim of their own")
        own["head_dim"] = config["global_head_dim"]
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    attention = config.get("attn_config")
    if isinstance(attention, dict) and attention.get("kv_n_heads"):  # MPT and its kin
        own["num_key_value_heads"] = attention["kv_n_heads"]
    return own


def _kv_heads(config: Config, model: str, number: int, query_heads: int, notes: list[str]) -> int:
    for field in _KV_HEADS:
        if config.get(field) is not None and not (field == "multi_query_group_num" and not _multi_query(config)):
            return _count(config, field, model=model, layer=number)
    if isinstance(config.get("num_kv_heads"), list):  # OpenELM
        return _count(config, "num_kv_heads", model=model, layer=number)
    if _multi_query(config) and not config.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        return 1
    if config.get("num_kv_heads") is not None:
        return _count(config, "num_kv_heads", model=model, layer=number)
    if config.get("n_head_kv") is not None:
        return _count(config, "n_head_kv", model=model, layer=number)
    notes.append(
        f"no num_key_value_heads in the config: every one of the {query_heads} query heads has its own K and V"
    )
    return query_heads


def _multi_query(config: Config) -> bool:
    return bool(config.get("multi_query") or config.get("multi_query_attention"))


def _head_dim(config: Config, model: str, number: int, query_heads: int) -> int:
    for field in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(field) is not None:
            return _count(config, field, model=model, layer=number)
    if _OWN_HEAD_DIM.fullmatch(model):
        raise _missing(model, "head_dim", "models of this family do not derive it from the hidden size")
    hidden = _count(config, *_HIDDEN, model=model)
    if hidden % query_heads:
        raise LayoutError(
            f"the config has no head_dim, and {hidden} hidden channels do not divide into {query_heads} heads; add "
            "head_dim to it"
        )
    return hidden // query_heads


def _share(
    config: Config, model: str, count: int, kinds: Sequence[str], stored: Sequence[int], specs: Sequence[LayerSpec]
) -> list[LayerSpec]:
    """Gemma 3n and 4: the last layers read the K and V of the last layer of their kind that has its own."""
    if model.startswith("gemma3n") and "num_kv_shared_layers" not in config:
        raise _missing(model, "num_kv_shared_layers", "it says how many of the last layers store no K and V")
    shared = config.get("num_kv_shared_layers") or 0
    if not shared:
        return list(specs)
    first = count - _count(config, "num_kv_shared_layers", model=model)
    result = list(specs)
    for index, number in enumerate(stored):
        if number < first:
            continue
        owners = [n for n in stored if n < first and kinds[n] == kinds[number]]
        if not owners:
            raise LayoutError(
                f"layer {number} shares K and V (num_kv_shared_layers {shared}), but no earlier layer of its kind "
                "stores any"
            )
        result[index] = replace(specs[index], shares=stored.index(owners[-1]))
    return result


def _dtype(top: Config, config: Config, notes: list[str]) -> torch.dtype:
    for place in (config, top):
        for field in _DTYPE:
            name = place.get(field)
            if name in (None, "auto"):
                continue
            name = str(name).removeprefix("torch.")
            if name not in _JSON_DTYPES:
                raise LayoutError(f"{field} of the config is {name!r}; kvport knows {', '.join(_JSON_DTYPES)}")
            return DTYPES[_JSON_DTYPES[name]]
    notes.append("no dtype in the config: bfloat16 is assumed")
    return torch.bfloat16


def _count(config: Config, *fields: str, model: str, layer: int | None = None, least: int = 1) -> int:
    """The first of ``fields`` that is there, as a whole number; an entry of a list where it is one by layer."""
    for field in fields:
        value = config.get(field)
        if value is None:
            continue
        if isinstance(value, list) and layer is not None:
            if layer >= len(value):
                raise LayoutError(f"{field} of the config lists {len(value)} layers and has none for layer {layer}")
            value = value[layer]
        if type(value) is not int or not least <= value <= INT32_MAX:
            raise LayoutError(
                f"{field} of the config is {show(value)}; it must be a whole number >= {least}, and below 2**31"
            )
        return value
    names = fields[0] if len(fields) == 1 else f"{fields[0]} (or {', '.join(fields[1:])})"
    raise LayoutError(f"the config of {model or 'this model'} has no {names}, which says how large its K and V are")
