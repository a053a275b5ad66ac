"""Translate the original UCM's configuration into our names, and keep the place of each setting."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ucm.config import upstream_keys as keys
from ucm.config.document import FILE_KEY
from ucm.config.problems import Place, unknown
from ucm.config.translation import Translation
from ucm.config.upstream_store import translate_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucm.config.document import Document

CONNECTORS, NAME, CONFIG = "ucm_connectors", "ucm_connector_name", "ucm_connector_config"
MODULE = "ucm_connector_module_path"
#: The key of the sparse method, and UCM's name for blending in it.
SPARSE, BLEND = "ucm_sparse_config", "Blend"
#: In UCM's older files, the keys of the only connector are at the top level.
_ONE_CONNECTOR = (NAME, CONFIG, MODULE)


def translate(document: Document, own: Iterable[str]) -> Translation:
    """Translate a document's settings into our names.

    Args:
        document: The settings in our format, UCM's, or a mixture.
        own: The names of our top-level settings.
    """
    ours = frozenset(own)
    out = Translation()
    for key, value in document.settings.items():
        place = document.place(key)
        rival = next((name for name in _SAME_THING.get(key, ()) if name in document.settings), None)
        if rival is not None:
            out.refuse(place, f"sets the same as {rival}", "keep one of the two", value)
        elif key == SPARSE and isinstance(value, dict) and BLEND in value:
            _blend(out, place, value)
        elif key in ours:
            out.put((key,), value, place, value)
        elif key in _READERS:
            _READERS[key](out, place, value)
        elif key in keys.TOP_LEVEL_WITHOUT_EFFECT:
            out.without_effect(place, keys.TOP_LEVEL_WITHOUT_EFFECT[key])
        elif key in keys.MODES_NOT_IN_THIS_VERSION:
            _mode(out, place, key, value)
        elif key not in _ONE_CONNECTOR:
            known = {*ours, *_READERS, *keys.TOP_LEVEL_WITHOUT_EFFECT, *keys.MODES_NOT_IN_THIS_VERSION}
            known |= {FILE_KEY} if document.file is None else set()
            out.problems.append(unknown(place, value, known))
    older = {key: document.settings[key] for key in _ONE_CONNECTOR if key in document.settings}
    if older and not {"store", CONNECTORS} & document.settings.keys():
        translate_store(out, Place(document.place(next(iter(older))).source), older)
    return out


def _use_layerwise(out: Translation, place: Place, value: object) -> None:
    if isinstance(value, bool):
        out.put(("connector",), "layerwise" if value else "direct", place, value)
    else:
        out.refuse(place, "neither true nor false", "write true or false", value)


def _enable_metrics(out: Translation, place: Place, value: object) -> None:
    out.put(("metrics",), value, place, value)


def _load_tokens_threshold(out: Translation, place: Place, value: object) -> None:
    # UCM loads hits of more than this many tokens; we load hits of at least this many.
    at_least = value + 1 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value
    out.put(("min_hit_tokens",), at_least, place, value)


def _sparse_method(out: Translation, place: Place, value: object) -> None:
    out.put(("ucm_sparse_config",), {value: {}} if isinstance(value, str) else value, place, value)


def _blend(out: Translation, place: Place, value: dict[str, object]) -> None:
    """Translate UCM's blending, which selects tokens by their deviation in one layer."""
    place, options = place.inside(BLEND), value[BLEND]
    if len(value) > 1 or not isinstance(options, dict):
        out.refuse(
            place,
            "must be a mapping, and cannot be combined with a sparse method",
            f"write {{{BLEND}: {{…}}}} alone",
            value,
        )
        return
    out.put(("blend", "select"), "deviation", place, options)
    for key, written in options.items():
        at = place.inside(str(key))
        if key == "chunk_end_token_id":
            out.put(("blend", "chunk_end_token_ids"), written, at, written)
        elif key == "compute_meta":
            _check_layer(out, at, written)
        else:
            out.problems.append(unknown(at, written, ("chunk_end_token_id", "compute_meta")))


def _check_layer(out: Translation, place: Place, value: object) -> None:
    items = list(value.items()) if isinstance(value, dict) else []
    numbers = re.findall(r"\d+", str(items[0][0])) if len(items) == 1 else []
    told = items[0][1] if numbers else None
    if not isinstance(told, dict) or set(told) != {"ratio"}:
        fix = "write {model.layers.1.self_attn.attn: {ratio: 0.2}}"
        out.refuse(place, "must be one layer with the ratio to compute after it", fix, value)
        return
    out.put(("blend", "check_layer"), int(numbers[0]), place.inside(str(items[0][0])), value)
    out.put(("blend", "ratio"), told["ratio"], place.inside(str(items[0][0]), "ratio"), told["ratio"])


def _mode(out: Translation, place: Place, key: str, value: object) -> None:
    if value is False:
        out.without_effect(place, "this mode is not in this version")
    else:
        out.refuse(place, f"{key} is not in this version", keys.MODES_NOT_IN_THIS_VERSION[key], value)


def _connectors(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, list) or len(value) != 1:
        number = f"{len(value)} connectors" if isinstance(value, list) else "not a list"
        out.refuse(place, f"{number}, where one is expected", f"write a list of one: [{{{NAME}: …}}]", value)
    else:
        _connector(out, place.inside(0), value[0])


def _connector(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, dict):
        out.refuse(place, "not a mapping", f"write {{{NAME}: …, {CONFIG}: {{…}}}}", value)
        return
    for key in value.keys() - {NAME, CONFIG, MODULE}:
        out.problems.append(unknown(place.inside(str(key)), value[key], (NAME, CONFIG, MODULE)))
    translate_store(out, place, value)


_READERS: dict[str, Callable[[Translation, Place, object], None]] = {
    CONNECTORS: _connectors,
    "enable_metrics": _enable_metrics,
    "load_tokens_threshold": _load_tokens_threshold,
    "ucm_sparse_method": _sparse_method,
    "use_layerwise": _use_layerwise,
}

#: Keys of UCM that must not be combined with another of the same meaning.
_SAME_THING = {
    CONNECTORS: ("store",),
    NAME: ("store", CONNECTORS),
    CONFIG: ("store", CONNECTORS),
    "enable_metrics": ("metrics",),
    "load_tokens_threshold": ("min_hit_tokens",),
    "ucm_sparse_method": ("ucm_sparse_config",),
    "use_layerwise": ("connector",),
}
