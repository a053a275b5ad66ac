"""The conformance suite for store back ends; it needs pytest.

Derive one class in the tests of your back end::

    from ucm.api import StoreConfig
    from ucm.testing import StoreConformance

    class TestMyTier(StoreConformance):
        @pytest.fixture
        def config(self, tmp_path):
            name = "my_package.tiers:MyTier"
            return StoreConfig(pipeline=name, tiers={name: {"path": str(tmp_path)}})
"""

from ucm.testing.conformance import StoreConformance

__all__ = ["StoreConformance"]
