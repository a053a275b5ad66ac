"""The skeleton of a project with its own registry: one rule, its seam, and the packaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from transforms.ascend.registry import REGISTRY as ASCEND_RULES
from transforms.engine.errors import OverlayError
from transforms.engine.governance import QUESTIONS
from transforms.engine.registry import Package
from transforms.engine.transform import Seam
from transforms.pipeline.pages import TEMPLATES, templates
from transforms.pipeline.product import compose
from transforms.registry import REGISTRY as VLLM_RULES

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.registry import Registry

#: The files of the project and their templates.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{module}/__init__.py": "__init__.py",
    "{module}/hooks.py": "hooks.py",
    "{module}/rules.py": "rules.py",
    "{module}/cases/first.py": "case.py",
}
#: A function that every supported vLLM has.
PLACE = "vllm/v1/core/sched/scheduler.py:Scheduler.add_request"


@dataclass(frozen=True)
class Known:
    """A package that this one has a registry of: rules for it share its `Package`, so that one build can have both.

    Attributes:
        registry: The registry.
        module: The module that defines the package.
        constant: Its name there.
        place: A function in it to hook.
    """

    registry: Registry
    module: str
    constant: str
    place: str


KNOWN = (
    Known(VLLM_RULES, "transforms.registry", "VLLM", PLACE),
    Known(
        ASCEND_RULES,
        "transforms.ascend.registry",
        "VLLM_ASCEND",
        "vllm_ascend/worker/worker.py:NPUWorker.init_device",
    ),
)


class ProjectError(OverlayError):
    """The project cannot be created."""


@dataclass(frozen=True)
class Skeleton:
    """A project to create.

    Attributes:
        owner: The maintainer of its rules: one lower-case word.
        release: A release of the package to change; empty: the newest reviewed one of a package that has any.
        place: The function that its first rule hooks, ``path:qualified name``; empty: one of a package that we know.
        project: The name of the package on an index; default: its import name.
    """

    owner: str
    release: str = ""
    place: str = ""
    project: str = ""

    @property
    def known(self) -> Known | None:
        """What is known of its package; None if nothing is."""
        name = self.place.partition("/")[0]
        wanted = self.project or ("" if self.place else KNOWN[0].registry.package.project)
        packages = [(known, known.registry.package) for known in KNOWN]
        return next((known for known, one in packages if name in {"", one.name} and wanted in {"", one.project}), None)

    @property
    def hooked(self) -> str:
        """The function that its first rule hooks."""
        return self.place or (self.known.place if self.known else "")

    @property
    def tried(self) -> str:
        """The release with which it begins."""
        reviewed = compose(self.known.registry).reviewed() if self.known else []
        return self.release or (reviewed[-1] if reviewed else "")

    def __post_init__(self) -> None:
        path, _, scope = self.hooked.partition(":")
        problems = {
            "an owner is one lower-case word": self.owner.isidentifier() and self.owner == self.owner.lower(),
            "a release is a version": _is_version(self.tried),
            "a place is `package/module.py:Class.function`": path.endswith(".py")
            and "/" in path
            and bool(scope)
            and all(name.isidentifier() for name in scope.split(".")),
        }
        for problem, is_right in problems.items():
            if not is_right:
                where = f"{self.owner}, {self.tried or 'no release'}, {self.hooked or 'no place'}"
                raise ProjectError(problem, where=where, fix="see `init --help`")

    def write(self, directory: Path) -> list[Path]:
        """Write the project; replace no existing file.

        Returns:
            The files.

        Raises:
            ProjectError: If the directory is not empty.
        """
        if directory.exists() and any(directory.iterdir()):
            raise ProjectError("the directory is not empty", where=str(directory), fix="name another one")
        path, _, scope = self.hooked.partition(":")
        name = path.partition("/")[0]
        module, function = f"{self.owner}_overlay", scope.rpartition(".")[2]
        own = Package(name, self.project or name, self.project or name, f"the authors of {self.project or name}")
        package = self.known.registry.package if self.known else own
        context = {
            "owner": self.owner,
            "title": self.owner.capitalize(),
            "project": module.replace("_", "-"),
            "module": module,
            "distribution": f"{self.owner}-{package.project}-overlay",
            "package": package,
            "known": self.known,
            "process": "WORKER" if "worker" in path else "ENGINE_CORE",
            "release": self.tried,
            "path": path,
            "scope": scope,
            "hook": f"{function.strip('_')}_begins",
            "argument": "self" if "." in scope else "",
            "questions": QUESTIONS,
            "alias": Seam(f"{module}.hooks").alias,
        }
        environment = templates(TEMPLATES / "project", trim_blocks=False)
        written = []
        for target, template in FILES.items():
            file = directory / target.format(module=module)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(environment.get_template(f"{template}.j2").render(context), encoding="utf-8")
            written.append(file)
        return written


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False
