"""The child process of ``ucm doctor`` that loads vLLM's plugins: ``python -m ucm.doctor.plugin_run PLAN RESULT``.

It does what a vLLM process does before it creates an engine, imports the shadowed modules, and reports which of the
overlay's functions have been replaced by then.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

from ucm.engine_process import run_plan
from ucm.overlay.activation import boots, check_feature
from ucm.overlay.finder import state


def replaced() -> list[str]:
    """Load the plugins, and return the functions that are replaced."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - in a process made for it
    from vllm.plugins import load_general_plugins  # noqa: PLC0415

    getattr(current_platform, "pre_register_and_update", lambda: None)()
    load_general_plugins()
    manifests = [state(boot.DIRECTORY).manifest for boot in boots()]
    for name in [name for manifest in manifests for name in manifest.modules]:
        with suppress(ImportError):  # some modules need another platform
            importlib.import_module(name)
    groups = {group for manifest in manifests for group in manifest.needs}
    return [str(replacement) for replacement in check_feature(groups)]


if __name__ == "__main__":
    run_plan(lambda _, tell: tell(replaced()))
