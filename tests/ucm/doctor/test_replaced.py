"""The doctor's findings about overlay functions that other packages' plugins replace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.doctor.site import write_plugin

if TYPE_CHECKING:
    from tests.ucm.doctor.site import Site

CHECK = "replaced functions"


def test_no_other_plug_in(site: Site) -> None:
    found = site.ask().finding(CHECK)
    assert (found["status"], found["what"]) == ("ok", "no other package provides vLLM plugins")


def test_a_plug_in_that_replaces_nothing(site: Site) -> None:
    write_plugin(site, "import vllm.v1.core.sched.scheduler")
    found = site.ask().finding(CHECK)
    assert (found["status"], found["details"]) == ("ok", ["plug-in: intruder (vllm-intruder 1.2)"])


def test_a_plug_in_that_replaces_a_function(site: Site) -> None:
    name = "vllm.v1.core.sched.scheduler"
    write_plugin(site, f"import {name} as m; m.changed = register")
    answer = site.ask()
    found = answer.finding(CHECK)
    assert (answer.code, found["status"]) == (0, "warning")
    assert found["what"] == "1 of the overlay's functions are replaced: features that need them will be refused"
    file = site.packages.resolve() / "intruder.py"
    assert found["details"][1:] == [f"{name}.changed is replaced by intruder.register (vllm-intruder 1.2, {file})"]


def test_a_plug_in_that_fails(site: Site) -> None:
    write_plugin(site, "raise OSError('no device')")
    found = site.ask().finding(CHECK)
    assert (found["status"], found["details"][-1]) == ("warning", "OSError: no device")
