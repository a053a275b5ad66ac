"""Translate the store of UCM's configuration files: ``ucm_connector_name`` and ``ucm_connector_config``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.config import upstream_keys as keys
from ucm.config.problems import NO_VALUE, Place, unknown
from ucm.config.store_settings import ONLY_WITH
from ucm.store.config import pipeline_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucm.config.translation import Translation

GIB = 1 << 30


def translate_store(out: Translation, place: Place, connector: Mapping[str, Any]) -> None:
    """Translate one connector of UCM into our ``store``.

    Args:
        out: Collects the result.
        place: The connector's place.
        connector: Its ``ucm_connector_name``, ``ucm_connector_config`` and ``ucm_connector_module_path``.
    """
    within = place.inside("ucm_connector_config")
    config = connector.get("ucm_connector_config", {})
    if not isinstance(config, dict):
        out.refuse(within, "not a mapping", "write {storage_backends: …}", config)
        return
    for key in ("ucm_connector_name", "ucm_connector_module_path"):
        if not isinstance(connector.get(key, ""), str):
            out.refuse(place.inside(key), "not a text", "write a name", connector[key])
            return
    out.origins[("store",)] = (within, NO_VALUE)
    if "ucm_connector_module_path" in connector:
        _custom(out, place, connector)
    elif _pipeline(out, place, connector, config):
        for key, value in config.items():
            _store_key(out, within.inside(str(key)), str(key), value)


def _custom(out: Translation, place: Place, connector: Mapping[str, Any]) -> None:
    """Translate a store of the user's own, which has its own settings."""
    module = connector["ucm_connector_module_path"]
    where = place.inside("ucm_connector_module_path")
    out.put(("store", "pipeline"), f"{module}:{connector.get('ucm_connector_name', '')}", where, module)
    config = connector.get("ucm_connector_config", {})
    out.put(("store", "options"), config, place.inside("ucm_connector_config"), config)


def _pipeline(out: Translation, place: Place, connector: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Set the pipeline; return False if the store is unclear or not ours."""
    name_place = place.inside("ucm_connector_name")
    name = connector.get("ucm_connector_name", NO_VALUE)
    if name in keys.STORE_NAMES:
        out.put(("store", "pipeline"), keys.STORE_NAMES[name], name_place, name)
        return True
    if name != keys.PIPELINE_NAME:
        known = ", ".join([keys.PIPELINE_NAME, *keys.STORE_NAMES])
        what = "a store without a name" if name is NO_VALUE else f"there is no store {name!r} in this version"
        out.refuse(name_place, what, f"use one of {known}, or name the module of your own class", name)
        return False
    pipeline = config.get("store_pipeline", "Cache|Posix")
    pipeline_place = place.inside("ucm_connector_config", "store_pipeline")
    if not isinstance(pipeline, str):
        out.refuse(pipeline_place, "not a text", "write it in quotes", pipeline)
        return False
    if pipeline in keys.PIPELINES:
        out.notices.append(f"{pipeline_place}: {pipeline!r} is called {keys.PIPELINES[pipeline]!r} here")
        pipeline = keys.PIPELINES[pipeline]
    ours = ("Cache|Posix", "Dram", "Empty", "Posix")
    if pipeline not in ours:
        fix = keys.PIPELINES_NOT_IN_THIS_VERSION.get(pipeline, f"use one of {', '.join(ours)}")
        out.refuse(pipeline_place, "this pipeline is not in this version", fix, pipeline)
        return False
    out.put(("store", "pipeline"), pipeline, pipeline_place, config.get("store_pipeline", NO_VALUE))
    return True


def _store_key(out: Translation, place: Place, key: str, value: object) -> None:
    if key in _READERS:
        field, read = _READERS[key]
        pipeline = out.settings["store"]["pipeline"]
        if not ONLY_WITH[field] & set(pipeline_parts(pipeline)):
            out.without_effect(place, f"it does not apply to the store {pipeline!r}")
            return
        found = read(out, place, value)
        if found is not NO_VALUE:
            out.put(("store", field), found, place, value)
    elif key == "store_health":
        _health(out, place, value)
    elif key in keys.STORE_WITHOUT_EFFECT:
        out.without_effect(place, keys.STORE_WITHOUT_EFFECT[key])
    elif other := keys.other_store(key):
        out.without_effect(place, f"it belongs to the {other} store")
    elif key != "store_pipeline":
        known = {"store_pipeline", "store_health", *_READERS, *keys.STORE_WITHOUT_EFFECT}
        out.problems.append(unknown(place, value, known))


def _health(out: Translation, place: Place, value: object) -> None:
    if not isinstance(value, dict):
        out.refuse(place, "not a mapping", "write {enabled: …}", value)
        return
    for key, one in value.items():
        within = place.inside(str(key))
        if key in keys.HEALTH_RENAMED:
            out.put(("store", keys.HEALTH_RENAMED[key]), one, within, one)
        elif key in keys.HEALTH_WITHOUT_EFFECT:
            out.without_effect(within, keys.HEALTH_WITHOUT_EFFECT[key])
        else:
            out.problems.append(unknown(within, one, {*keys.HEALTH_WITHOUT_EFFECT, *keys.HEALTH_RENAMED}))


def _as_it_is(_out: Translation, _place: Place, value: object) -> object:
    return value


def _directories(out: Translation, place: Place, value: object) -> object:
    """Accept directories separated by colons, as in UCM, and a list."""
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        out.refuse(place, "neither a path nor paths", "write '/a', '/a:/b' or a list of paths", value)
        return NO_VALUE
    found = [part for part in parts if part]
    if not found:
        out.refuse(place, "names no directory", "name one", value)
        return NO_VALUE
    return found


def _size(unit: int) -> Callable[[Translation, Place, object], object]:
    """Return a reader of a capacity in a unit; 0 means the default."""

    def read(out: Translation, place: Place, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            out.refuse(place, "not a number of 0 or more", "write a number; 0 is the same as none at all", value)
            return NO_VALUE
        return int(value * unit) or None

    return read


_READERS: dict[str, tuple[str, Callable[[Translation, Place, object], object]]] = {
    "backends": ("directories", _directories),
    "cache_buffer_capacity_gb": ("dram_capacity", _size(GIB)),
    "capacity": ("dram_capacity", _size(1)),
    "io_direct": ("direct_io", _as_it_is),
    "max_cache_size": ("dram_capacity", _size(1)),
    "posix_capacity_gb": ("posix_capacity", _size(GIB)),
    "storageCapacity": ("posix_capacity", _size(1)),
    "storage_backends": ("directories", _directories),
    "transferIoDirect": ("direct_io", _as_it_is),
    "transfer_io_direct": ("direct_io", _as_it_is),
    "useDirect": ("direct_io", _as_it_is),
    "use_direct": ("direct_io", _as_it_is),
}
