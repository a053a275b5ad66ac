"""Conformance suites for stores, tiers and sparse methods of your own; they need pytest.

Derive one class in the tests of your back end::

    from ucm.api import StoreConfig
    from ucm.testing import StoreConformance

    class TestMyTier(StoreConformance):
        @pytest.fixture
        def config(self, tmp_path):
            name = "my_package.tiers:MyTier"
            return StoreConfig(pipeline=name, tiers={name: {"path": str(tmp_path)}})

or of your method. `SparseMethodConformance` checks what the class declares, `SparseAttentionConformance` also its
attention on a layer of the installed vLLM::

    from ucm.testing import SparseAttentionConformance

    class TestMyMethod(SparseAttentionConformance):
        @pytest.fixture
        def method(self):
            return MyMethod

        @pytest.fixture
        def options(self):
            return {"budget": 64}
"""

from ucm.testing.conformance import StoreConformance
from ucm.testing.sparse import SparseAttentionConformance, SparseMethodConformance

__all__ = ["SparseAttentionConformance", "SparseMethodConformance", "StoreConformance"]
