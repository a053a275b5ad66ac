"""A connector that loads wrong values, for a test of the tests: they must notice."""

from __future__ import annotations

from typing import Any

from ucm.integration.vllm.ucm_connector import UCMDirectConnector


class WrongValuesConnector(UCMDirectConnector):
    """UCM's connector; after each load, the keys and values of one layer have the other sign in all blocks."""

    LAYER = 12

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._wrong = list(kv_caches.values())[self.LAYER]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What releases from 0.30.0 on ask."""
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            self._wrong.neg_()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """What earlier releases ask."""
        sent, loaded = super().get_finished(finished_req_ids)
        if loaded:
            self._wrong.neg_()
        return sent, loaded
