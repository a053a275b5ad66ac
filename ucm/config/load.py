"""From what was written to settings that can be relied on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ucm.config.document import FILE_KEY, INLINE, Document, expand, read_document
from ucm.config.media import capacity_problem, directory_problem
from ucm.config.metrics_file import read_log_interval
from ucm.config.problems import Place, raise_for, wrong
from ucm.config.settings import ConnectorConfig
from ucm.config.store_settings import WITH_DRAM, WITH_POSIX, StoreSettings
from ucm.config.upstream import translate
from ucm.config.validation import problems_of
from ucm.errors import ConfigError
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.config.translation import Translation

Model = TypeVar("Model", bound=BaseModel)

#: What this process has said already; each is said once, however many connectors read the configuration.
_said: set[str] = set()


def load_connector_config(extra_config: Mapping[str, Any]) -> ConnectorConfig:
    """The settings of a connector, with every directory absolute, made, and writable.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``: settings in our format or UCM's, or ``UCM_CONFIG_FILE``
            with the path of a YAML file that holds them, or both, where those that stand here win.

    Raises:
        ConfigError: With everything that is wrong, each with its place and what to do.
    """
    config, notices = check_connector_config(extra_config)
    for line in notices:
        if line not in _said:
            _said.add(line)
            get_logger().info("[UCM.Connector] %s", line)
    return config


def check_connector_config(
    extra_config: Mapping[str, Any], *, make: bool = True
) -> tuple[ConnectorConfig, tuple[str, ...]]:
    """The same, with what there is to say about the settings instead of a log of it.

    Args:
        extra_config: As above.
        make: Whether directories that are not there are made; if not, it is seen whether they could be.

    Raises:
        ConfigError: With everything that is wrong.
    """
    document = read_document(extra_config)
    out = translate(document, ConnectorConfig.model_fields)
    top = Place(str(document.file or INLINE))
    _read_metrics_file(out)
    store = _store(out, top, make=make)
    # Settings beside a store that is wrong are checked beside one that is not, so that all is told at once.
    settings = {**out.settings, "store": store or StoreSettings(pipeline="Empty")}
    config = _validated(ConnectorConfig, settings, (), out, top)
    raise_for(out.problems)
    if config is None:
        raise AssertionError("settings are valid, or there is a problem")
    return config, (*_whence(document), *out.notices)


def _validated(
    model: type[Model], settings: Mapping[str, Any], path: tuple[str, ...], out: Translation, top: Place
) -> Model | None:
    """Settings as a model; None if they are wrong, which is noted."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        out.problems += problems_of(error, model, path, out, top)
        return None


def _store(out: Translation, top: Place, *, make: bool) -> StoreSettings | None:
    """The store's settings, its directories looked at; None if they are wrong, which is noted."""
    if "store" not in out.settings:
        if not out.problems:
            out.problems.append(_no_store(top))
        return None
    written = out.settings.get("store", {})
    store = _validated(StoreSettings, written, ("store",), out, top)
    if store is None:
        partly = _as_far_as_right(written)
        if partly is not None:
            _look_at_media(partly, written, out, top, make=make)
        return None
    return store.model_copy(update=_look_at_media(store, written, out, top, make=make))


def _no_store(top: Place) -> ConfigError:
    """No store is configured, in a file or inline, where the name of a file would do as well."""
    if top.source != INLINE:
        return wrong(top, "no store is configured", "add store: {directories: /path}")
    fix = f'name a file with the settings, {{"{FILE_KEY}": "./ucm_config.yaml"}}, or write {{"store": {{"directories": '
    return wrong(top, "no store is configured", f'{fix}"/path"}}}}')


def _as_far_as_right(written: object) -> StoreSettings | None:
    """Settings without those that are wrong, so that the directories among them are looked at all the same."""
    try:
        return StoreSettings.model_validate(written)
    except ValidationError as error:
        wrong = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
    if not isinstance(written, dict) or "pipeline" in wrong:
        return None
    right = {name: value for name, value in written.items() if str(name) not in wrong}
    return _as_far_as_right(right) if len(right) < len(written) else None


def _look_at_media(
    store: StoreSettings, written: dict[str, Any], out: Translation, top: Place, *, make: bool
) -> dict[str, Any]:
    """What becomes of the settings that name directories; what is wrong with those is noted."""
    changed: dict[str, Any] = {}
    if store.pipeline in WITH_POSIX:
        place, value = out.origin(("store", "directories"), top, written["directories"])
        changed["directories"] = tuple(
            _directory(out, directory, place if isinstance(value, str) else place.inside(index), make=make)
            for index, directory in enumerate(store.directories)
        )
        _check_capacity(out, top, "posix_capacity", store.posix_capacity, changed["directories"])
    if store.pipeline in WITH_DRAM:
        if "dram_directory" in store.model_fields_set:  # the usual one is made, and its owner checked, by the store
            place, _ = out.origin(("store", "dram_directory"), top)
            changed["dram_directory"] = _directory(out, store.dram_directory, place, make=make)
        directory = changed.get("dram_directory", store.dram_directory)
        _check_capacity(out, top, "dram_capacity", store.dram_capacity, (directory,))
    return changed


def _directory(out: Translation, written: str, place: Place, *, make: bool) -> str:
    """A directory's absolute path; what is wrong with it is noted."""
    try:
        directory = Path.cwd() / expand(written, place)
    except ConfigError as error:
        out.problems.append(error)
        return ""
    problem = directory_problem(directory, place, written, make=make)
    if problem is None:
        return str(directory)
    out.problems.append(problem)
    return ""


def _check_capacity(
    out: Translation, top: Place, name: str, capacity: int | None, directories: tuple[str, ...]
) -> None:
    if capacity is None or not all(directories):
        return
    place, written = out.origin(("store", name), top, out.settings["store"][name])
    problem = capacity_problem(capacity, [Path(one) for one in directories], place, written)
    if problem is not None:
        out.problems.append(problem)


def _read_metrics_file(out: Translation) -> None:
    """Take from UCM's metrics file what means something here."""
    path = out.settings.get("metrics_config_path")
    if not isinstance(path, str):
        return
    place, _ = out.origins[("metrics_config_path",)]
    try:
        interval = read_log_interval(Path.cwd() / expand(path, place), out)
    except ConfigError as error:
        out.problems.append(error)
        return
    if interval is not None:
        out.settings.setdefault("metrics_log_interval", interval)


def _whence(document: Document) -> list[str]:
    """What there is to say about where the settings come from."""
    if document.file is None:
        return []
    said = [f"settings come from {document.file} ({FILE_KEY})"]
    if document.overridden:
        said.append(f"{', '.join(sorted(document.overridden))}: {INLINE} wins over {document.file}")
    return said
