"""The driver that Triton wants to see in a back end."""

from __future__ import annotations

from triton.backends.driver import DriverBase

Driver = type(
    "Driver",
    (DriverBase,),
    {**dict.fromkeys(DriverBase.__abstractmethods__), "is_active": staticmethod(lambda: True)},
)
