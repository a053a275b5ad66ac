"""Find the rotary embedding of an attention layer in the model, and check it."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Any

from ucm.errors import SparseMethodError
from ucm.rotary import Rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: vLLM's class of rotary embeddings whose angles are multiples of the position.
PLAIN = "RotaryEmbedding"
#: The models' attribute for it, in the module that contains the attention layer.
ATTRIBUTE = "rotary_emb"
#: A norm of queries or keys between the calls of the rotary embedding and of the attention.
NORM_BEHIND = re.compile(rf"\.{ATTRIBUTE}\((?:(?!\.attn\().)*?\b(?:q|k|query|key)\w*norm\w*\(", re.DOTALL)
#: The positions at which a table is compared with its formula, and the largest deviation by rounding.
CHECKED, TOLERANCE = 2048, 2**-6
ELSEWHERE = "serve this model without this method"


class Rotaries:
    """The rotary embeddings of a worker's model; layers that share one get the same object.

    Args:
        runner: vLLM's model runner, by a weak reference; its model is loaded before a layer is asked for.
        model_config: vLLM's ``ModelConfig``.
    """

    def __init__(self, runner: Callable[[], Any], model_config: Any) -> None:
        self._runner, self._config = runner, model_config
        self._by_layer: dict[str, Rotary] = {}
        self._by_module: dict[int, Rotary] = {}

    def of(self, layer_name: str, layer: Any) -> Rotary:
        """Return the rotary embedding of a layer.

        Args:
            layer_name: Its prefix in the model.
            layer: vLLM's ``Attention``.

        Raises:
            SparseMethodError: If there is none, it is not a plain one, or its table is shorter than the longest
                context.
        """
        found = self._by_layer.get(layer_name)
        if found is None:
            owner = _owner(self._runner(), layer)
            module: Any = getattr(owner, ATTRIBUTE, None)
            _require_plain(layer_name, owner, module, self._config)
            if id(module) not in self._by_module:
                table = module.cos_sin_cache
                frequencies = _frequencies(module, table, f"layer {layer_name}")
                applied = _as_applied(module, table, self._config)
                self._by_module[id(module)] = Rotary(applied, frequencies, module.is_neox_style)
            found = self._by_layer[layer_name] = self._by_module[id(module)]
        return found


def _require_plain(layer_name: str, owner: Any, module: Any, model_config: Any) -> None:
    where = f"layer {layer_name}"
    if module is None:
        raise SparseMethodError("no rotary embedding was found for the layer", where=where, fix=ELSEWHERE)
    kind = type(module).__name__
    table = getattr(module, "cos_sin_cache", None)
    if kind != PLAIN or table is None:
        raise SparseMethodError(
            f"the layer's rotary embedding is a {kind}; only a plain one, whose angles are multiples of the position, "
            "can be turned to other angles",
            where=where,
            fix="serve this model without this method, or with its plain rotary embedding (no rope_scaling, or "
            "rope_parameters of the rope_type default, in --hf-overrides)",
        )
    if NORM_BEHIND.search(_source(owner)):
        raise SparseMethodError(
            "the layer normalises its keys after their rotation, which then cannot be undone",
            where=where,
            fix=ELSEWHERE,
        )
    longest = int(model_config.max_model_len)
    if table.shape[0] < longest:
        raise SparseMethodError(
            f"the rotary embedding's table has {table.shape[0]} positions, and a context may have {longest}",
            where=f"{where}, max_model_len",
            fix=f"start vLLM with --hf-overrides '{_overrides(model_config, longest)}'",
        )


def _owner(runner: Any, layer: Any) -> Any:
    """Return the module that has the attention layer as a child; names of layers and of modules may differ."""
    model = getattr(runner, "model", None)
    get_model = getattr(runner, "get_model", None)
    if get_model is not None:  # returns the model without the wrapper for graph capture
        model = get_model()
    if model is None:
        return None
    return next((module for module in model.modules() if any(child is layer for child in module.children())), None)


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(type(owner).forward)
    except (OSError, TypeError):
        return ""


def _as_applied(module: Any, table: Tensor, model_config: Any) -> Tensor:
    """Return the table in the dtype of the multiplication: that of queries and keys, except in FlashInfer's kernel."""
    return table if getattr(module, "use_flashinfer", False) else table.to(model_config.dtype)


def _frequencies(module: Any, table: Tensor, where: str) -> Tensor:
    """Return radians per position, by the formula of plain rotary embedding.

    Raises:
        SparseMethodError: If the table differs from this formula.
    """
    import torch  # noqa: PLC0415 - vLLM brings it

    exponents = torch.arange(0, table.shape[1], 2, dtype=torch.float32) / table.shape[1]
    frequencies: Tensor = 1.0 / module.base**exponents
    angles = torch.arange(min(CHECKED, table.shape[0]))[:, None] * frequencies
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1)
    off = float((table[: len(wanted)].float().cpu() - wanted).abs().max())
    if not off < TOLERANCE:
        raise SparseMethodError(
            f"the rotary embedding's table is not that of its base, {module.base}: it is off by {off:.3g}",
            where=where,
            fix=ELSEWHERE,
        )
    return frequencies.to(table.device)


def _overrides(model_config: Any, longest: int) -> str:
    """Return the value of ``--hf-overrides`` that lengthens the table."""
    own: dict[str, Any] = {"max_position_embeddings": longest}
    whole = getattr(model_config, "hf_config", None)
    text = getattr(model_config, "hf_text_config", whole)
    return json.dumps(own if text is whole else {"text_config": own})
