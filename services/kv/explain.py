"""POST /kv/explain and /kv/plan: what a request would find, and what admission would do with it."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmanager.protocol import (
    MAX_CHOICES,
    BlocksPage,
    BlocksQuery,
    ExplainQuery,
    Explanation,
    PlanAnswer,
    PlanQuery,
)
from services.api.call import fit
from services.api.completions import DEFAULT_MAX_TOKENS
from services.api.openai_types import ChatMessage
from services.api.validation import decode_request
from services.auth import observer
from services.context import Context
from services.errors import invalid
from services.kv import answers
from services.kv.advice import advise, difference
from services.kv.ask import ask, ref, reply
from services.kv.collect import Collector
from services.kv.prompt import check_prompt, prompt_tokens
from services.kv.types import PlanRequest, PromptRequest

MAX_PRIORITY: Final = (1 << 31) - 1
MAX_SEARCHED: Final = 1 << 14  # blocks of a pool in which other salts are looked for
LONGEST_SYSTEM_PROMPT: Final = 1 << 15  # tokens; what differs later is not looked for in it

_explain = msgspec.json.Decoder(PromptRequest)
_plan = msgspec.json.Decoder(PlanRequest)


class ExplainRoutes:
    """Both."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._context = context
        self._backend = context.backend
        self._collector = collector

    def routes(self) -> list[Route]:
        return [
            Route("/kv/explain", self.explain, methods=["POST"]),
            Route("/kv/plan", self.plan, methods=["POST"]),
        ]

    async def explain(self, request: Request) -> Response:
        tenant = observer(request, self._context.config).tenant
        body = await decode_request(request, _explain, self._context.config)
        check_prompt(body)
        tokens = await prompt_tokens(self._context.model, body)
        salt = body.cache_salt or ""
        explanation = await self._explanation(tokens, salt, tenant)
        unsalted, elsewhere = 0, False
        if explanation.reason == "never_seen" and not explanation.num_cached_tokens:
            if salt:
                unsalted = (await self._explanation(tokens, "", tenant)).num_cached_tokens
            elsewhere = not unsalted and await self._elsewhere(tokens, explanation, tenant)
        found = difference(explanation, tokens, self._text)
        advice = advise(
            explanation,
            found,
            tokens,
            self._text,
            salt=salt,
            unsalted_tokens=unsalted,
            elsewhere=elsewhere,
            in_system_prompt=found is not None and self._in_system_prompt(body, tokens[: found.token]),
        )
        return reply(explain_answer(explanation, found, advice))

    async def plan(self, request: Request) -> Response:
        tenant = observer(request, self._context.config).tenant
        body = await decode_request(request, _plan, self._context.config)
        check_plan(body)
        model = self._context.model
        tokens = await prompt_tokens(model, body)
        field, default = ("prompt", DEFAULT_MAX_TOKENS) if body.messages is None else ("messages", 1 << 40)
        query = partial(
            PlanQuery,
            token_ids=tokens,
            max_tokens=fit(model, len(tokens), body.max_tokens, default, field),
            num_choices=body.n or 1,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=tenant,
        )
        return reply(plan_answer(await ask(self._backend, query, PlanAnswer), len(tokens)))

    async def _explanation(self, tokens: tuple[int, ...], salt: str, tenant: str) -> Explanation:
        query = partial(ExplainQuery, token_ids=tokens, cache_salt=salt, tenant=tenant)
        return await ask(self._backend, query, Explanation)

    async def _elsewhere(self, tokens: tuple[int, ...], explanation: Explanation, tenant: str) -> bool:
        """Whether the first block is cached under another salt; not looked for in a large pool."""
        first = array("I", tokens[: explanation.block_size]).tobytes()
        if len(tokens) <= explanation.block_size:
            return False
        page = await ask(self._backend, partial(BlocksQuery, limit=1, tenant=tenant), BlocksPage)
        if page.num_blocks > MAX_SEARCHED:
            return False
        contents = (await self._collector.collect(tenant, boot_id=explanation.at.boot_id)).contents
        rows = zip(contents.tokens, contents.parents, contents.blocks, strict=True)
        return any(own == first and parent == contents.root and blocks for own, parent, blocks in rows)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._context.model.tokenizer.decode(tokens, skip_special_tokens=False)

    def _in_system_prompt(self, body: PromptRequest, before: tuple[int, ...]) -> bool:
        """Whether what comes `before` the difference ends before the system prompt does."""
        first = body.messages[0] if body.messages and len(before) <= LONGEST_SYSTEM_PROMPT else None
        return (
            first is not None
            and first.role in ("system", "developer")
            and not _all_there(first, self._text(before))
        )


def _all_there(message: ChatMessage, text: str) -> bool:
    parts = message.content if isinstance(message.content, list) else []
    contents = [message.content] if isinstance(message.content, str) else [part.text or "" for part in parts]
    return all(content.strip() in text for content in contents)


def check_plan(body: PlanRequest) -> None:
    """What can be said without the model. Raises ApiError 400."""
    check_prompt(body)
    for name, value, low, high in (
        ("n", body.n, 1, MAX_CHOICES),
        ("priority", body.priority, -MAX_PRIORITY - 1, MAX_PRIORITY),
        ("max_tokens", body.max_tokens, 1, MAX_PRIORITY),
    ):
        if value is not None and not low <= value <= high:
            raise invalid(name, f"`{name}` is {value}; want {low} to {high}")


def explain_answer(
    explanation: Explanation, found: answers.Difference | None, advice: str
) -> answers.ExplainAnswer:
    eviction = explanation.eviction
    return answers.ExplainAnswer(
        boot_id=explanation.at.boot_id,
        sequence=explanation.at.sequence,
        num_tokens=explanation.num_tokens,
        cached_tokens=explanation.num_cached_tokens,
        block_size=explanation.block_size,
        reason=explanation.reason,
        blocks=explained_blocks(explanation),
        difference=found,
        eviction=None
        if eviction is None
        else answers.EvictionCard(round(eviction.seconds_ago, 3), eviction.cause, eviction.request_id),
        computed_by=explanation.computed_by,
        advice=advice,
    )


def explained_blocks(explanation: Explanation) -> list[answers.ExplainedBlock]:
    """The full ones (as many as are named), those of the tier, and the one of which a part is copied."""
    size, sibling = explanation.block_size, explanation.sibling
    blocks = [
        answers.ExplainedBlock(*block, "pool", index * size, size)
        for index, block in enumerate(explanation.blocks)
    ]
    first = len(blocks) + explanation.more_blocks
    for index in range(first, first + explanation.tier_blocks):
        blocks.append(answers.ExplainedBlock(None, None, "disk", index * size, size))
    if sibling is not None and sibling.num_shared:
        start = (first + explanation.tier_blocks) * size
        blocks.append(answers.ExplainedBlock(*sibling.block, "pool", start, sibling.num_shared))
    return blocks


def plan_answer(plan: PlanAnswer, num_tokens: int) -> answers.PlanCard:
    return answers.PlanCard(
        boot_id=plan.at.boot_id,
        sequence=plan.at.sequence,
        num_tokens=num_tokens,
        outcome=plan.outcome,
        message=plan.message,
        runner=plan.runner,
        reuse=[ref(block) for block in plan.reuse],
        copy_from=None if plan.copy_from is None else ref(plan.copy_from),
        copied_tokens=plan.num_copied_tokens,
        cached_tokens=plan.num_cached_tokens,
        promote=plan.promote,
        allocate=plan.allocate,
        allocate_at_most=plan.allocate_at_most,
        evict=[ref(block) for block in plan.evict],
        preempt=list(plan.preempt),
        waits_for=plan.waits_for,
        ahead=plan.ahead,
    )
