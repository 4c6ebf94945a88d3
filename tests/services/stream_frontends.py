"""Frontends without sockets, for resumable streams: real journals, real routes, and a model that is a table.

`Frontend.die` does what SIGKILL does: nothing is closed in order, the kernel drops the lock.
"""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

from kvmanager.protocol import TokenLogprobs
from services.api.call import Identity
from services.api.completions import ROUTE, CompletionsRoute
from services.api.generation import Generation
from services.backend import Backend
from services.config import FrontendConfig
from services.context import Context
from services.streams.file_journal import FileJournal, FileJournals
from services.streams.journal import StreamSpec
from services.streams.registry import Streams
from services.streams.run import StreamRun
from tests.services.fake_stack import served_model

Plan = Callable[[int], Sequence[int]]
"""Choice → all its tokens; the last one is what ends it."""

TTL = 1000.0


class TableBackend(Mock):
    """Generates what the plan says, as far as `step` is called."""

    plan: Plan
    live: list[Generation]

    def submit(self, generation: Generation) -> None:
        self.live.append(generation)

    def cancel(self, generation: Generation) -> None:
        if generation in self.live:
            self.live.remove(generation)

    def step(self, tokens: int) -> None:
        """`tokens` more for every choice that has not ended."""
        for generation in list(self.live):
            for choice in generation.choices:
                if not choice.closed:
                    self._advance(generation, choice.output, choice, tokens)
            if generation.done:
                self.live.remove(generation)
            generation.signal.wake()

    def _advance(self, generation: Generation, output: Any, choice: Any, tokens: int) -> None:
        plan = self.plan(output.index)
        at = len(output.token_ids)
        new = plan[at : at + tokens]
        output.token_ids.extend(new)
        if generation.request.sampling.logprobs is not None:
            output.logprobs.extend(TokenLogprobs(-1.0 - token, 1, ()) for token in new)
        if at + len(new) == len(plan):
            output.finish_reason = "stop"
        if (stop := choice.advance()) is not None:
            output.finish_reason, output.stop_reason = "stop", stop


class Frontend:
    """One process; `folder` is the pool directory that it shares with others."""

    def __init__(self, folder: str, plan: Plan, max_bytes: int = 1 << 20) -> None:
        config = FrontendConfig(request_log=False, pool_directory=folder)
        self.backend = TableBackend(spec=Backend)
        self.backend.plan, self.backend.live = plan, []
        context = Context(config, served_model(), self.backend, Mock())
        self.streams = Streams(context, FileJournals(folder, 100, max_bytes, TTL))
        self.route = CompletionsRoute(context, self.streams)

    async def begin(self, body: dict[str, Any]) -> str:
        """A new stream of that request; its id."""
        identity = Identity.new("cmpl", "")
        spec = StreamSpec(
            identity.id,
            ROUTE,
            "",
            "",
            served_model().name,
            identity.created,
            json.dumps({"prompt": "", **body}).encode(),
            (tuple(served_model().tokenizer.encode("Once", False)),),
        )
        call, renderer = self.route.rebuild(spec)
        journal = await self.streams._journals.create(spec)
        await self.streams._start(call, renderer, journal, "", adopted=False)
        return spec.id

    def run(self, stream_id: str) -> StreamRun | None:
        return self.streams.running(stream_id)

    async def step(self, tokens: int) -> None:
        self.backend.step(tokens)
        await settle()

    async def die(self) -> None:
        for run in list(self.streams._runs.values()):
            assert run._task is not None
            run._task.cancel()
            await asyncio.gather(run._task, return_exceptions=True)
            journal = run._journal
            assert isinstance(journal, FileJournal)
            if journal._fd >= 0:
                os.close(journal._fd)
                os.close(journal._lock._fd)
        self.streams._runs.clear()


async def settle() -> None:
    """Let every task do what it can do now."""
    for _ in range(12):
        await asyncio.sleep(0)
