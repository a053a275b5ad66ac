"""The conformance suite of the store, for those who write a back end of their own; it needs pytest.

A back end's own tests have one class::

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
