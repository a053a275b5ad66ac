"""Translate the configuration files of the original UCM into our names, and keep the place of each setting.

UCM is https://github.com/ModelEngine-Group/unified-cache-management; the keys are those of the examples that it ships.
A key is mapped, or has no effect for a reason that is logged once, or is refused with what to write instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ucm.config.document import FILE_KEY, INLINE
from ucm.config.problems import NO_VALUE, Place, RefusedValueError, unknown, wrong

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.config.document import Document
    from ucm.errors import ConfigError

#: What becomes of a key: it has no effect, for a reason; a function translates it; or it is a mapping with such keys.
#: Keys are regular expressions; one in brackets is not proposed in place of an unknown key.
Rule: TypeAlias = "str | Callable[[Translation, Place, Any], None] | Mapping[str, Rule]"

CONNECTORS, NAME, CONFIG = "ucm_connectors", "ucm_connector_name", "ucm_connector_config"
PIPELINE_NAME, PIPELINE = "UcmPipelineStore", "store_pipeline"
#: The key of the sparse method, and UCM's name for blending in it.
SPARSE, BLEND = "ucm_sparse_config", "Blend"
#: Each ``ucm_connector_name`` of a store with one tier.
STORE_NAMES = {"UcmNfsStore": "Posix", "UcmPosixStore": "Posix"}
PIPELINES = ("Cache|Posix", "Dram", "Empty", "Posix")
#: Each ``store_pipeline`` that we do not have, and the alternative.
PIPELINES_NOT_IN_THIS_VERSION = {
    "Cache|Compress|Posix": "use 'Cache|Posix': blocks are stored as they are",
    "Cache|Ds3fs": "use 'Cache|Posix' on the mount",
    "Mooncake|Posix": "engines lend no memory here: use 'Posix|Mooncake' in our format, as docs/store.md says",
}


@dataclass
class Translation:
    """Settings in our names.

    Attributes:
        top: The place reported for a field that was not written.
        settings: The settings, not yet validated field by field.
        origins: The place and the original value of each setting that had another name or place, by path.
        notices: Settings that are recognised but have no effect, one sentence each.
        problems: Settings that are not recognised.
    """

    top: Place
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[str, ...], tuple[Place, object]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, path: tuple[str, ...], value: object, place: Place, written: object) -> None:
        """Set one of our fields, and record where it was written."""
        target = self.settings
        for step in path[:-1]:
            target = target.setdefault(step, {})
        target[path[-1]] = value
        self.origins[path] = (place, written)

    def origin(self, path: tuple[str | int, ...], found: object = NO_VALUE) -> tuple[Place, object]:
        """Return where one of our fields was written, and its original value.

        Args:
            path: The field, or an element of it.
            found: Its current value, if known.
        """
        for length in range(len(path), 0, -1):
            place, written = self.origins.get(tuple(map(str, path[:length])), (None, None))
            if place is not None:
                rest = path[length:]
                return place.inside(*rest), found if rest else written
        return self.top.inside(*path), NO_VALUE

    def without_effect(self, place: Place, reason: str) -> None:
        """Note a key that is recognised but has no effect."""
        self.notices.append(f"{place} has no effect here: {reason}")

    def apply(self, rules: Mapping[str, Rule], place: Place, key: str, value: object) -> None:
        """Translate one key by the rule for it."""
        rule = next((rule for name, rule in rules.items() if re.fullmatch(name, key)), None)
        if rule is None:
            self.problems.append(unknown(place, value, filter(str.isidentifier, rules)))
        elif isinstance(rule, str):
            self.without_effect(place, rule)
        elif not isinstance(rule, Mapping):
            try:
                rule(self, place, value)
            except RefusedValueError as error:
                self.problems.append(wrong(place, error.what, error.fix, value))
        elif isinstance(value, dict):
            for name, one in value.items():
                self.apply(rule, place.inside(str(name)), str(name), one)
        else:
            self.problems.append(
                wrong(place, "not a mapping", f"write {{{next(filter(str.isidentifier, rule))}: …}}", value)
            )


def translate(document: Document, own: Iterable[str]) -> Translation:
    """Translate a document's settings into our names."""
    out, ours = Translation(Place(str(document.file or INLINE))), dict.fromkeys(own, _own)
    rules = {**ours, **TOP, **({} if document.file else {FILE_KEY: _own})}
    # Of two keys that set the same, the one that is not ours is refused.
    for key in sorted(document.settings, key=lambda key: rules.get(key) is not _own):
        out.apply(rules, document.place(key), key, document.settings[key])
    return out


def _own(out: Translation, place: Place, value: object) -> None:
    out.put((place.path,), value, place, value)


def _to(path: str, convert: Callable[[Any], object] = lambda value: value) -> Rule:
    """Return the rule for a key that sets our field of a path to what a function makes of its value."""

    def rule(out: Translation, place: Place, value: object) -> None:
        _not_set_by(out, path)
        found = convert(value)
        if found is None:
            out.without_effect(place, "it is the default")
        else:
            out.put(tuple(path.split(".")), found, place, value)

    return rule


def _not_set_by(out: Translation, ours: str) -> None:
    if ours in out.settings:
        raise RefusedValueError(f"sets the same as {ours}", "keep one of the two")


def _refused(fix: str) -> Rule:
    """Return the rule for a key that is refused unless it is false, with what to write in its place."""

    def rule(out: Translation, place: Place, value: object) -> None:
        if value is not False:
            raise RefusedValueError(f"{place.path} is not in this version", fix)
        out.without_effect(place, "it is not in this version")

    return rule


def _layerwise(value: Any) -> object:
    if not isinstance(value, bool):
        raise RefusedValueError("neither true nor false", "write true or false")
    return "layerwise" if value else "direct"


def _one_more(value: Any) -> object:
    """UCM loads hits of more than this many tokens; we load hits of at least this many."""
    return value + 1 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


def _directories(value: Any) -> object:
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


def _gib(value: Any) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RefusedValueError("not a number of 0 or more", "write a number of GiB; 0 is the same as none at all")
    return int(value * (1 << 30)) or None


def _pipeline(value: Any) -> object:
    if value in PIPELINES:
        return value
    known = PIPELINES_NOT_IN_THIS_VERSION.get(value) if isinstance(value, str) else None
    raise RefusedValueError("this pipeline is not in this version", known or f"use one of {', '.join(PIPELINES)}")


def _named(value: Any) -> object:
    if isinstance(value, str) and value in STORE_NAMES:
        return STORE_NAMES[value]
    what = "a store without a name" if value is NO_VALUE else f"there is no store {value!r} in this version"
    raise RefusedValueError(what, f"use one of {', '.join([PIPELINE_NAME, *STORE_NAMES])}")


def _connectors(out: Translation, place: Place, value: Any) -> None:
    """Translate the only one of UCM's connectors into our ``store``."""
    _not_set_by(out, "store")
    if not isinstance(value, list) or len(value) != 1:
        number = f"{len(value)} connectors" if isinstance(value, list) else "not a list"
        raise RefusedValueError(f"{number}, where one is expected", f"write a list of one: [{{{NAME}: …}}]")
    out.apply({CONNECTORS: _connector}, place.inside(0), CONNECTORS, value[0])


def _connector(out: Translation, place: Place, value: Any) -> None:
    if not isinstance(value, dict):
        raise RefusedValueError("not a mapping", f"write {{{NAME}: …, {CONFIG}: {{…}}}}")
    name, config, within = value.get(NAME, NO_VALUE), value.get(CONFIG, {}), place.inside(CONFIG)
    out.origins["store",] = (within, NO_VALUE)
    before = len(out.problems)
    if not isinstance(config, dict):
        out.problems.append(
            wrong(
                within,
                "not a mapping",
                f"write {{{'storage_backends' if name != PIPELINE_NAME else PIPELINE}: …}}",
                config,
            )
        )
    elif name != PIPELINE_NAME:
        out.apply({NAME: _to("store.pipeline", _named)}, place.inside(NAME), NAME, name)
    else:
        config = {PIPELINE: "Cache|Posix", **config}
        out.apply({PIPELINE: _to("store.pipeline", _pipeline)}, within.inside(PIPELINE), PIPELINE, config.pop(PIPELINE))
    if len(out.problems) == before:  # the keys of a store that is not ours are none of ours
        out.apply({CONFIG: STORE}, within, CONFIG, config)
    for key in value.keys() - {NAME, CONFIG}:
        out.apply(CONNECTOR, place.inside(str(key)), str(key), value[key])


def _sparse(out: Translation, place: Place, value: Any) -> None:
    """Translate UCM's blending; it selects tokens by their deviation in one layer, where ours asks the question."""
    if not isinstance(value, dict) or BLEND not in value:
        _own(out, place, value)
        return
    _not_set_by(out, "blend")
    place, options = place.inside(BLEND), value[BLEND]
    if len(value) > 1 or not isinstance(options, dict):
        what = "Blend must be a mapping, and cannot be combined with a sparse method"
        raise RefusedValueError(what, f"write {{{BLEND}: {{…}}}} alone")
    out.put(("blend", "select"), "question", place, options)
    out.apply({BLEND: BLENDING}, place, BLEND, options)


def _layer(out: Translation, place: Place, value: Any) -> None:
    layer, told = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if not isinstance(told, dict) or set(told) != {"ratio"}:
        fix = "write {model.layers.1.self_attn.attn: {ratio: 0.2}}"
        raise RefusedValueError("must be one layer with the ratio to compute after it", fix)
    place = place.inside(str(layer))
    out.without_effect(place, "the question selects the tokens, not what a layer computes")
    out.put(("blend", "ratio"), told["ratio"], place.inside("ratio"), told["ratio"])


_NO_TIMEOUT = "a transfer ends when the medium answers; requests are recomputed meanwhile, not failed"
_LIST = f"write {CONNECTORS}: [{{{NAME}: …, {CONFIG}: {{…}}}}]"
#: The top-level keys that are not ours as well.
TOP: dict[str, Rule] = {
    CONNECTORS: _connectors,
    SPARSE: _sparse,
    "enable_metrics": _to("metrics"),
    "load_tokens_threshold": _to("min_hit_tokens", _one_more),
    "use_layerwise": _to("connector", _layerwise),
    f"({NAME})": _refused(_LIST),
    f"({CONFIG})": _refused(_LIST),
    "(ucm_sparse_method)": _refused(f"write {SPARSE}: {{<method>: {{}}}}"),
    "(use_inference_duration_monitor)": _refused("vLLM's own request metrics show these durations"),
    "(use_lite)": _refused("to measure the share of hits alone, use `connector: mock` with `hit_ratio: 0`"),
    "enable_event_sync": "a save always waits for the step that computes its blocks",
    "enable_record_traces": "requests are not traced; ucm:queried_tokens_total and ucm:hit_tokens_total count them",
    "inference_duration_monitor_fake_hit_ratio": "there is no such monitor",
    "load_only_first_rank": "every rank loads what it needs itself",
    "metrics_config_path": "all metrics are exported as vLLM's are; metrics_log_interval is that of the log",
    "persist_token_threshold": "short requests are saved as well; min_hit_tokens is the shortest hit that is loaded",
    "timeout_ms": _NO_TIMEOUT,
    "wa_dump_block_wise": "every whole block is saved",
}
#: The keys of a connector; those without a rule are looked at first.
CONNECTOR: dict[str, Rule] = {
    NAME: "",
    CONFIG: "",
    "(ucm_connector_module_path)": _refused("write store: {pipeline: 'module:Class', options: {…}} in our format"),
}
#: The keys of ``ucm_connector_config``.
STORE: dict[str, Rule] = {
    PIPELINE: "the store's name says what it is",
    "cache_buffer_capacity_gb": _to("store.dram_capacity", _gib),
    "posix_capacity_gb": _to("store.posix_capacity", _gib),
    "storage_backends": _to("store.directories", _directories),
    "store_health": {
        "enabled|health_check_timeout_s|health_window_size": (
            "a directory that fails always rests for a while; store.failures_until_rest and store.rest_seconds say when"
        ),
        "failure_threshold": _to("store.failures_until_rest"),
        "health_check_interval_s": _to("store.rest_seconds"),
    },
    "kv_block_size": "the geometry of a block is read from the KV cache itself",
    "buffer_(number|size)|(running|waiting)_queue_depth": "store.save_queue says how many bytes may wait to be written",
    "cache_(io_aggregation|load_backend_only|sdma_direct)|use_gdr": "the device interface decides how to copy",
    "drampool_.*|(local|node|router|transport)_.*|(lookup|dump|load)_timeout_ms|max_io_entries|reconnect_interval_ms": (
        "it belongs to the pooled DRAM store"
    ),
    "posix_gc_.*": "when a capacity is set, the blocks unused for longest go as soon as it is reached",
    "posix_io_engine|io_direct": "there is one way to read and write, through the page cache",
    "shard_data_dir": "blocks always lie in subdirectories",
    "share_buffer_(capacity_gb|enable)": "all ranks of a host share the Dram tier",
    "stream_number|posix_.*_concurrency": "store.load_threads and store.save_threads say how many threads there are",
    "timeout_ms": _NO_TIMEOUT,
}
#: The keys of UCM's blending.
BLENDING: dict[str, Rule] = {"chunk_end_token_id": _to("blend.chunk_end_token_ids"), "compute_meta": _layer}
