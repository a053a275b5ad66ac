"""Read, check and complete the connectors' settings."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ucm.background import Later, call_later, wait_for_all
from ucm.clock import SYSTEM
from ucm.config.document import FILE_KEY, INLINE, Document, expand, read_document
from ucm.config.problems import NO_VALUE, Place, RefusedValueError, found_or_problems, unknown, wrong
from ucm.config.settings import ConnectorConfig, StoreSettings, format_size
from ucm.config.upstream import translate
from ucm.errors import ConfigError
from ucm.logger import get_logger
from ucm.store.config import DRAM, LOCAL, OURS, POSIX, pipeline_parts
from ucm.store.memory.directory import check_apart
from ucm.store.posix.paths import distrust, group_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from ucm.clock import Clock

Model = TypeVar("Model", bound=BaseModel)

#: The problem and the remedy for each kind of error, with placeholders for the error's values.
_WORDS = {
    "bool_type": ("neither true nor false", "write true or false"),
    "dict_type": ("not a mapping", "write {{name: value, …}}"),
    "finite_number": ("not a finite number", "write a finite number"),
    "float_type": ("not a number", "write a number"),
    "greater_than": ("{gt} or less", "write more than {gt}"),
    "greater_than_equal": ("less than {ge}", "write {ge} or more"),
    "int_type": ("not a whole number", "write a whole number"),
    "invalid_key": ("a name is expected, not a number", "write a setting's name"),
    "less_than_equal": ("more than {le}", "write {le} or less"),
    "literal_error": ("not one of the possible values", "write {expected}"),
    "model_type": ("not a mapping", "write {{name: value, …}}"),
    "string_too_short": ("empty", "write a text, or leave the setting out"),
    "string_type": ("not a text", "write it in quotes"),
    "tuple_type": ("not a list", "write [first, second, …]"),
}
#: The notices that this process has logged; each is logged once, even if several connectors read the configuration.
_said: set[str] = set()
#: Directories that did not answer when they were checked: this process asks them no more, and starts beside them.
_silent: set[Path] = set()


def make_silent_directories() -> None:
    """Create the directories that did not answer, in a thread that may wait until they do."""
    for path in _silent.copy():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def load_connector_config(extra_config: Mapping[str, Any], *, clock: Clock = SYSTEM) -> ConnectorConfig:
    """Return a connector's settings, with every directory absolute, created and writable.

    A directory that does not answer within the store's ``stuck_seconds`` causes a warning. The engine starts; the
    threads that open the store wait for the directory.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``: settings in our format or UCM's, or ``UCM_CONFIG_FILE``
            with the path of a YAML file that contains them, or both; the inline ones take precedence.
        clock: Time and threads.

    Raises:
        ConfigError: With everything that is wrong, each with its place and what to do.
    """
    config, notices = check_connector_config(extra_config, clock=clock)
    for line in notices:
        if line not in _said:
            _said.add(line)
            get_logger(__name__).info("[UCM.Connector] %s", line)
    return config


def check_connector_config(
    extra_config: Mapping[str, Any], *, make: bool = True, clock: Clock = SYSTEM
) -> tuple[ConnectorConfig, tuple[str, ...]]:
    """Do the same as ``load_connector_config``, but return the notices instead of logging them.

    Args:
        extra_config: As above.
        make: Whether to create missing directories. If not, the check is whether they could be created, and a
            directory that does not answer is an error.
        clock: As above.

    Raises:
        ConfigError: With everything that is wrong.
    """
    check = _Check(extra_config, make=make, clock=clock)
    store = check.store()
    # If the store is invalid, an empty one takes its place, so that the problems of the other settings are found, too.
    settings = {**check.out.settings, "store": store or StoreSettings(pipeline="Empty")}
    config = found_or_problems(check.validated(ConnectorConfig, settings), check.out.problems)
    return config, (*_whence(check.document), *check.out.notices)


def read_store_settings(file: Path) -> StoreSettings:
    """Return the store's settings in a connector's file, with absolute paths, without touching what they name.

    Raises:
        ConfigError: With everything that is wrong in the file.
    """
    check = _Check({FILE_KEY: str(file)}, make=None)
    return found_or_problems(check.store(), check.out.problems)


class _Check:
    """The check of a connector's settings.

    Args:
        extra_config: See `load_connector_config`.
        make: Whether to create missing directories; see `check_connector_config`. None: nothing is looked at.
        clock: Time and threads.
    """

    def __init__(self, extra_config: Mapping[str, Any], *, make: bool | None, clock: Clock = SYSTEM) -> None:
        self.document = read_document(extra_config)
        self.out = translate(self.document, ConnectorConfig.model_fields)
        self._make, self._clock = make, clock

    def validated(self, model: type[Model], settings: Mapping[str, Any], *path: str) -> Model | None:
        """Return settings as a model; if they are invalid, note the problems and return None."""
        try:
            return model.model_validate(settings)
        except ValidationError as error:
            self.out.problems += [self._problem(details, model, path) for details in error.errors()]
            return None

    def _problem(self, details: ErrorDetails, model: type[BaseModel], path: tuple[str, ...]) -> ConfigError:
        kind, context = details["type"], details.get("ctx", {})
        whole = (*path, *details["loc"])
        place, value = self.out.origin(whole, details["input"])
        if whole[:2] == ("store", "tiers"):
            value = NO_VALUE  # it may be a server's password, put there by mistake
        elif isinstance(value, dict) and "tiers" in value:
            value = {**value, "tiers": "…"}
        if kind == "extra_forbidden":
            return unknown(place, value, model.model_fields)
        ours = context.get("error")
        if isinstance(ours, RefusedValueError):
            return wrong(place, ours.what, ours.fix, value)
        what, fix = _WORDS.get(kind, (details["msg"], "see docs/configuration.md"))
        return wrong(place, what.format_map(context), fix.format_map(context), value)

    def store(self) -> StoreSettings | None:
        """Return the store's settings and check its directories; if anything is wrong, note it and return None."""
        out = self.out
        if "store" not in out.settings:
            if not out.problems:
                out.problems.append(_no_store(out.top))
            return None
        store = self.validated(StoreSettings, out.settings["store"], "store")
        if store is None:
            return None
        self._tier_options(store)
        found: StoreSettings = store.model_copy(update=self._media(store))
        keyed: StoreSettings = found.model_copy(update=self._key(found))
        return keyed

    def _tier_options(self, store: StoreSettings) -> None:
        """Check the options of the tiers that have options, and for an engine what they need; note the problems."""
        for name in pipeline_parts(store.pipeline):
            if name not in store.tiers and (name in LOCAL or name not in OURS):
                continue  # saves its import
            from ucm.store.factory import back_end_class, is_tier  # noqa: PLC0415 - most configurations need none of it

            try:
                back_end = back_end_class(name)
                if not is_tier(back_end):
                    continue
                options = self.validated(back_end.Options, store.tiers.get(name, {}), "store", "tiers", name)
                if options is not None and self._make is not None:
                    options.require_packages(name)
            except ConfigError as error:
                place, _ = self.out.origin(("store", "tiers", name))
                self.out.problems.append(wrong(place, error.what, error.fix))

    def _key(self, store: StoreSettings) -> dict[str, str]:
        """Return the setting that names the authentication key, with an absolute path; note why it cannot be used.

        Unlike a directory, the key is needed at once, because the names of all blocks depend on it.
        """
        written = store.authentication_key_file
        if written is None:
            return {}
        place, _ = self.out.origin(("store", "authentication_key_file"))
        try:
            found = {"authentication_key_file": str(Path.cwd() / expand(written, place))}
            if self._make is not None:
                self._read_key(store.model_copy(update=found))
        except ConfigError as error:
            self.out.problems.append(wrong(place, error.what, error.fix, written))
            return {}
        return found

    def _read_key(self, store: StoreSettings) -> None:
        from ucm.store.factory import authenticator_of  # noqa: PLC0415 - most configurations need none of it

        read = partial(authenticator_of, store.as_store_config(), of_tool=not self._make)
        found = call_later(read, "ucm-key", clock=self._clock)
        if not found.wait(store.stuck_seconds):
            what = f"the key's file has not answered for {store.stuck_seconds:.1f} s"
            fix = "check that its server runs and can be reached, or keep the key on a disk of this host"
            raise ConfigError(what, fix=fix)
        found.result()

    def _media(self, store: StoreSettings) -> dict[str, Any]:
        """Check the directories; return the settings that name them, with absolute paths, and note the problems.

        Each is checked in a thread, which may block for ever if the directory's server is gone.
        """
        out, make = self.out, self._make
        named: list[tuple[str, Place, str]] = []
        if store.parts & POSIX:
            place, value = out.origin(("store", "directories"), out.settings["store"]["directories"])
            of_each = [place if isinstance(value, str) else place.inside(at) for at in range(len(store.directories))]
            named += [("directories", *one) for one in zip(of_each, store.directories, strict=True)]
        # The store creates the default directory and checks its owner.
        if store.parts & DRAM and "dram_directory" in store.model_fields_set:
            named.append(("dram_directory", out.origin(("store", "dram_directory"))[0], store.dram_directory))
        paths: list[tuple[str, Path]] = []
        looks: list[tuple[Place, str, Path, Later[ConfigError | None]]] = []
        for name, place, one in named:
            try:
                path = Path.cwd() / expand(one, place)
            except ConfigError as error:
                out.problems.append(error)
                continue
            paths.append((name, path))
            if path not in _silent and make is not None:
                look = partial(directory_problem, path, place, one, store.trusted_group, make=make)
                looks.append((place, one, path, call_later(look, "ucm-look", clock=self._clock)))
        wait_for_all([look for *_, look in looks], store.stuck_seconds, clock=self._clock)
        problems = [
            look.result() if look.done() else _no_answer(place, one, path, store.stuck_seconds, make=bool(make))
            for place, one, path, look in looks
        ]
        out.problems += [problem for problem in problems if problem is not None]
        answers = len(paths) == len(named) and not any(problems) and _silent.isdisjoint(path for _, path in paths)
        if answers and make is not None:
            self._together(store, paths)
        posix, dram = ([str(path) for name, path in paths if name == of] for of in ("directories", "dram_directory"))
        return ({"directories": tuple(posix)} if posix else {}) | ({"dram_directory": dram[0]} if dram else {})

    def _together(self, store: StoreSettings, paths: list[tuple[str, Path]]) -> None:
        """Check that directories lie apart, and that capacities fit, unless the media stop answering meanwhile."""
        out = self.out
        posix = [path for name, path in paths if name == "directories"]
        dram = [dict(paths).get("dram_directory") or Path(store.dram_directory)] if store.parts & DRAM else []

        def check() -> Iterator[ConfigError | None]:
            for name, directories in (("posix_capacity", posix), ("dram_capacity", dram)):
                capacity = getattr(store, name)
                if directories and capacity is not None:
                    place, written = out.origin(("store", name), out.settings["store"][name])
                    yield capacity_problem(capacity, directories, place, written)
            try:
                if posix:
                    check_apart([str(path) for path in posix], str(dram[0]) if dram else None)
            except ConfigError as error:
                place, _ = out.origin(("store", error.where.rpartition(" ")[2]))
                yield wrong(place, error.what, error.fix)

        found = call_later(lambda: list(check()), "ucm-look", clock=self._clock)
        if found.wait(store.stuck_seconds):
            out.problems += [problem for problem in found.result() if problem is not None]


def _no_store(top: Place) -> ConfigError:
    """Return the error for a missing store; its remedy depends on whether the settings are in a file."""
    if top.source != INLINE:
        return wrong(top, "no store is configured", "add store: {directories: /path}")
    fix = f'name a file with the settings, {{"{FILE_KEY}": "./ucm_config.yaml"}}, or write {{"store": {{"directories": '
    return wrong(top, "no store is configured", f'{fix}"/path"}}}}')


def _no_answer(place: Place, written: str, path: Path, seconds: float, *, make: bool) -> ConfigError | None:
    """Return the error for a directory that has not answered; if an engine starts, log a warning instead."""
    what = f"{path} has not answered for {seconds:.1f} s"
    if not make:
        fix = "check that its server runs and can be reached, or name another directory"
        return wrong(place, what, fix, written)
    _silent.add(path)
    get_logger(__name__).warning(
        "[UCM.Connector] %s: %s: the engine starts, and neither loads nor saves there until it does", place, what
    )
    return None


def _whence(document: Document) -> list[str]:
    """Return notices about the origin of the settings."""
    if document.file is None:
        return []
    said = [f"settings come from {document.file} ({FILE_KEY})"]
    if document.overridden:
        said.append(f"{', '.join(sorted(document.overridden))}: {INLINE} wins over {document.file}")
    return said


def directory_problem(
    directory: Path, place: Place, written: object, trusted_group: str | int | None = None, *, make: bool = True
) -> ConfigError | None:
    """Return why a directory cannot be used, or None. Create it and a temporary file in it: permissions do not suffice.

    Args:
        directory: The directory; if created, only its owner has access.
        place: Its place in the settings.
        written: The directory as written there.
        trusted_group: As in ``StoreConfig``.
        make: Whether to create it. If not, a directory next to it, or next to its first missing parent, is created
            and deleted at once.
    """
    try:
        if make or directory.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            with tempfile.TemporaryDirectory(dir=_nearest(directory)):
                return None
    except FileExistsError:
        return wrong(place, f"{directory} is not a directory", "name a directory", written)
    except OSError as error:
        what = f"{directory} does not exist and cannot be created: {error.strerror or error}"
        return wrong(place, what, "create it, or name another directory", written)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
        reason = distrust(directory.stat(), group_id(trusted_group))
    except OSError as error:
        what = f"no file can be created in {directory}: {error.strerror or error}"
        return wrong(place, what, "let the user who runs vLLM write there, or name another directory", written)
    except ConfigError as error:
        return error
    if reason:
        fix = "make it this user's own with `chown` and `chmod go-w`, or name the group in trusted_group"
        return wrong(place, f"{directory} could be used to forge answers: {reason}", fix, written)
    return None


def capacity_problem(capacity: int, directories: Sequence[Path], place: Place, written: object) -> ConfigError | None:
    """Return the problem if the file systems of directories, existing or not, cannot hold their equal shares."""
    wanted: Counter[int] = Counter()
    total: dict[int, int] = {}
    for directory in directories:
        there = _nearest(directory)
        device = there.stat().st_dev
        wanted[device] += capacity // len(directories)
        total[device] = shutil.disk_usage(there).total
        if wanted[device] > total[device]:
            share = "" if len(directories) == 1 else ", in equal shares,"
            what = f"{format_size(capacity)}{share} are more than the file system of {there} has: "
            fix = "lower it, or add room (in a container, --shm-size sets that of /dev/shm)"
            return wrong(place, f"{what}{format_size(total[device])} in all", fix, written)
    return None


def _nearest(directory: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    return next(one for one in (directory, *directory.parents) if one.exists())
