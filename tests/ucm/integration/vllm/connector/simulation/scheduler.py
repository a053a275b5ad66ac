"""A miniature of vLLM's scheduler: chunked prefill, preemption, asynchronous scheduling, drafts, load failures."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from tests.ucm.integration.vllm.connector.simulation.pool import Blocks, Pool
from tests.ucm.integration.vllm.connector.simulation.step import Round, Step, Work, output_of
from tests.ucm.integration.vllm.connector.simulation.truth import END

if TYPE_CHECKING:
    from tests.ucm.integration.vllm.connector.simulation.request import Request
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from ucm.integration.vllm.connector.prefix_cache import PrefixCacheScheduler


class Scheduler:
    """Schedules steps.

    Args:
        pool: The KV-cache manager.
        prefix_cache: The connector's scheduler side.
        setting: The engine's settings.
    """

    def __init__(self, pool: Pool, prefix_cache: PrefixCacheScheduler, setting: Setting) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.recovered = 0
        self.preempted = 0
        self._setting = setting
        self._chunk = setting.chunk or setting.budget
        self._asynchronous = setting.asynchronous
        self._between_steps = setting.between_steps
        #: Requests aborted during their load; their blocks are freed when the load has ended.
        self._dying: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.requests or self._dying)

    # A step

    def schedule(self) -> Step:
        step = Round(self._setting.budget)
        self._schedule_running(step)
        if not step.preempts:
            self._schedule_waiting(step)
        output = output_of(step)
        scheduled = Step(self.prefix_cache.plan(output), step.work, dict(output.num_scheduled_tokens))
        for found in step.work:
            self._advance(self.requests[found.request_id], found)
        return scheduled

    def update(self, step: Step, sampled: dict[str, list[int]], invalid: set[int], loaded: set[str]) -> None:
        """Process the output of a step.

        Args:
            step: The step.
            sampled: The sampled tokens, by request.
            invalid: Blocks that failed to load on any rank.
            loaded: Requests whose loads have ended on every rank.
        """
        for loading in self.waiting if invalid else ():
            if loading.status == "loading":
                self._cut_back(loading, invalid)
        for found in step.work:
            request = self.requests.get(found.request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= found.count
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= found.count
            tokens = sampled.get(request.request_id, [])
            if found.drafts and tokens and not stale:
                rejected = found.drafts - (len(tokens) - 1)
                request.num_computed_tokens -= rejected
                if self._asynchronous:
                    request.num_output_placeholders -= rejected
            self._append(request, tokens, stale=stale)
        for request_id in sorted(loaded):
            self._end_load(request_id)

    def finish(self, request: Request) -> None:
        """End a request that has finished or was aborted."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        loading = request.status == "loading"
        request.status = "finished"
        self.prefix_cache.finished(request)
        del self.requests[request.request_id]
        if loading and self._setting.background:
            self._dying[request.request_id] = request
        else:
            self.pool.free(request)

    def draft(self, drafts: dict[str, list[int]]) -> None:
        """Set the draft tokens for the next step."""
        for request_id, tokens in drafts.items():
            request = self.requests.get(request_id)
            if request is not None and request.status == "running":
                request.spec_token_ids = tokens

    # Its parts

    def _schedule_running(self, step: Round) -> None:
        index = 0
        while index < len(self.running) and step.budget:
            request = self.running[index]
            count = min(self._wanted(request), step.budget, self._chunk)
            if count <= 0:
                index += 1
                continue
            blocks = None
            while blocks is None and request in self.running:
                blocks = self.pool.grow(
                    request, request.num_computed_tokens, count, self._setting.drafts, certain=self._certain(request)
                )
                if blocks is None:
                    self._preempt(self.running.pop())
                    step.preempts = True
            if blocks is None:
                break
            step.grown[request.request_id] = blocks
            step.take(self._work(request, count))
            index += 1

    def _schedule_waiting(self, step: Round) -> None:
        skipped: list[Request] = []
        # Requests with blocks come first: otherwise they might wait for one that waits for their blocks.
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.request_id not in self.pool.of))
        while self.waiting and step.budget and len(self.running) < self._setting.running:
            request = self.waiting.popleft()
            if request.status == "loading" or request.num_stale_output_tokens:
                skipped.append(request)
                continue
            verdict = self._admit(request, min(step.budget, self._chunk))
            if verdict == "no room":
                self.waiting.appendleft(request)
                break
            if verdict == "later" or request.status == "loading":
                skipped.append(request)
                continue
            self.running.append(request)
            request.status = "running"
            (step.resumed if request.num_preemptions else step.admitted).add(request.request_id)
            count = min(request.num_tokens - request.num_computed_tokens, step.budget, self._chunk)
            step.take(self._work(request, count, begins=True))
        self.waiting.extendleft(reversed(skipped))

    def _wanted(self, request: Request) -> int:
        placeholders = request.num_output_placeholders
        if (
            placeholders
            and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0
        return request.num_tokens_with_spec + placeholders - request.num_computed_tokens

    def _certain(self, request: Request) -> int:
        """Return the computed tokens that no rejected draft can remove."""
        in_flight = request.num_in_flight_tokens if self._asynchronous and self._setting.drafts else 0
        return request.num_computed_tokens - in_flight

    def _admit(self, request: Request, most: int) -> Literal["no room", "later", "yes"]:
        external, had, computed = 0, self.pool.of.get(request.request_id), request.num_computed_tokens
        if had is None:
            local, had = self.pool.cached_prefix(request)
            found = self.prefix_cache.matched_tokens(request, local)
            if found is None:
                return "later"
            external, computed = found, local + found
        waits = external > 0 and self._between_steps
        if waits and self._setting.reserves and not self.pool.fits(request, had, self._reserved()):
            return "no room"
        count = 0 if waits else min(request.num_tokens - computed, most)
        if request.request_id in self.pool.of:
            there_is_room = self.pool.grow(request, computed, count) is not None
        else:
            there_is_room = self.pool.admit(request, had, computed, count, caches=not waits)
        if not there_is_room:
            return "no room"
        blocks = Blocks(tuple(list(row) for row in self.pool.of[request.request_id]))
        self.prefix_cache.allocated(request, blocks, external)
        request.num_computed_tokens = computed
        if waits:
            request.status = "loading"
        return "yes"

    def _reserved(self) -> int:
        """Return the blocks that partly allocated requests still need: otherwise they might deadlock."""
        holding = [r for r in self.requests.values() if r.status != "running" and r.request_id in self.pool.of]
        return sum(self.pool.still_needed(request) for request in holding)

    def _end_load(self, request_id: str) -> None:
        request = self._dying.pop(request_id, None)
        if request is not None:
            self.pool.free(request)
            return
        request = self.requests.get(request_id)
        if request is None:
            assert not self._setting.background, "a load ended that nobody waits for"
            return
        assert request.status == "loading"
        request.status = "waiting"
        if request.num_computed_tokens:
            self.pool.cache(request, request.num_computed_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        else:
            self.pool.free(request)

    def _preempt(self, request: Request) -> None:
        self.pool.free(request)
        request.status = "preempted"
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.preempted += 1
        self.waiting.appendleft(request)

    def _work(self, request: Request, count: int, *, begins: bool = False) -> Work:
        start = request.num_computed_tokens
        drafts = max(0, start + count - request.num_tokens - request.num_output_placeholders)
        known = request.all_token_ids + request.spec_token_ids[:drafts]
        request.spec_token_ids = []
        blocks = [list(row) for row in self.pool.of[request.request_id]]
        return Work(
            request.request_id, start, count, drafts, known if begins or not self._asynchronous else None, blocks
        )

    def _advance(self, request: Request, work: Work) -> None:
        request.num_computed_tokens += work.count
        request.num_in_flight_tokens += work.count
        prefilling = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        if self._asynchronous and not prefilling:
            request.num_output_placeholders += 1 + work.drafts
            request.spec_token_ids = [-1] * self._setting.drafts

    def _append(self, request: Request, tokens: list[int], *, stale: bool) -> None:
        for number, token in enumerate(tokens, 1):
            request.output.append(token)
            if token == END or len(request.output) >= request.max_tokens:
                if self._asynchronous and not stale:
                    request.num_output_placeholders -= number
                self.finish(request)
                return
        if self._asynchronous and not stale:
            request.num_output_placeholders -= len(tokens)
        if request.status == "running" and tokens:
            self.pool.cache(request, request.num_computed_tokens - request.num_output_placeholders)

    def _cut_back(self, request: Request, invalid: set[int]) -> None:
        """Reduce the computed tokens to those before failed blocks, like vLLM."""
        size = self.pool.groups.groups[0].block_size
        (blocks,) = self.pool.of[request.request_id]
        bad = [
            place for place, block in enumerate(blocks[: -(-request.num_computed_tokens // size)]) if block in invalid
        ]
        if bad:
            request.num_computed_tokens = bad[0] * size
            self.recovered += 1
