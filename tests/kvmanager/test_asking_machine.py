"""Random histories in which everything is asked: explain and plan say what a submit then does, a follower
ends equal to the cache, commands forget what they should and harm nobody, and tenants see their own only.
"""

import random
from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvmanager.pool.block_pool import CACHED, FREE, SEALED
from kvmanager.pool.hashing import tenant_bytes
from kvmanager.protocol import (
    FLAG_OTHER,
    BlockRef,
    Clear,
    Cleared,
    Directives,
    Evict,
    HoldersQuery,
    PlanAnswer,
    Rejected,
    Start,
    Submit,
    own_number,
)
from kvmanager.scheduling.requests import RequestState
from tests.kvmanager.asking import EVERY_KIND, TENANTS, Asker, Follower, text, truth
from tests.kvmanager.fake_clients import BLOCK_SIZE, FakeFrontend, FakeRunner, submission
from tests.kvmanager.test_core_machine import PROMPTS
from tests.kvmanager.test_tiering_machine import TieringMachine

SALTS = st.sampled_from(["", "", "a"])
OWNERS = st.sampled_from(["", "", *TENANTS])


class AskingMachine(TieringMachine):
    """All that may happen with a tier, and questions and commands of an admin and two tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = Follower(self.step_a_runner)
        self.seen: Counter[str] = Counter()  # kinds of answers

    def step_a_runner(self) -> None:
        """Something to happen between two pages."""
        for runner in self.world.of_kind(FakeRunner)[:1]:
            runner.step()

    def asker(self, index: int) -> Asker | None:
        """A frontend with a session that holds."""
        self.frontend = self.pick(FakeFrontend, index)
        if self.frontend is None or not self.frontend.send(None):
            return None
        return Asker(self.world, self.frontend)

    def request(self, prompt: list[int], salt: str, tenant: str, **more: Any) -> Submit:
        self.count += 1
        made = submission(f"r{self.count}", prompt, salt=salt, arrival=self.world.now, **more)
        return msgspec.structs.replace(made, tenant=tenant)

    def start_of(self, submit: Submit) -> tuple[FakeRunner, Start] | None:
        """Where it was started just now, if it was."""
        for runner in self.world.of_kind(FakeRunner):
            for message in runner.inbox:
                for start in message.starts if isinstance(message, Directives) else ():
                    if start.request_id == submit.request_id:
                        return runner, start
        return None

    # --- what would happen ------------------------------------------------------------------------------

    @rule(index=st.integers(0, 3), prompt=PROMPTS, salt=SALTS, tenant=OWNERS)
    def explain(self, index: int, prompt: list[int], salt: str, tenant: str) -> None:
        asker = self.asker(index)
        if asker is None:
            return
        asker.between = self.step_a_runner
        said = asker.explain(prompt, salt, tenant, part=index * 3)
        assert said == asker.explain(prompt, salt, tenant)
        self.seen[said.reason] += 1
        self.seen["from the tier"] += said.tier_blocks > 0
        submit = self.request(prompt, salt, tenant, max_tokens=2)
        self.frontend.submit(submit)
        started = self.start_of(submit)
        full = len(said.blocks) + said.tier_blocks
        assert said.num_cached_tokens < len(prompt)
        assert (said.reason == "hit") == (said.num_cached_tokens == len(prompt) - 1)
        assert (said.eviction is not None) == (said.reason in ("evicted", "other_layout"))
        assert 0 <= said.num_cached_tokens - full * BLOCK_SIZE <= BLOCK_SIZE
        if said.sibling is not None:
            shared, begins = said.sibling.num_shared, full * BLOCK_SIZE
            assert said.sibling.token_ids[:shared] == tuple(prompt[begins : begins + shared])
        if started is not None:
            assert not said.tier_blocks
            assert started[1].sequences[0].num_cached_tokens == said.num_cached_tokens
            assert said.reason != "being_computed"

    @rule(
        index=st.integers(0, 3),
        prompt=PROMPTS,
        salt=SALTS,
        tenant=OWNERS,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 1),
    )
    def plan(
        self, index: int, prompt: list[int], salt: str, tenant: str, n: int, max_tokens: int, priority: int
    ) -> None:
        asker = self.asker(index)
        if asker is None:
            return
        said = asker.plan(
            prompt, max_tokens, num_choices=n, priority=priority, cache_salt=salt, tenant=tenant
        )
        self.seen[said.outcome] += 1
        self.seen["evicts"] += bool(said.evict)
        self.seen["preempts"] += bool(said.preempt)
        pool = self.world.core.state.pool
        assert pool is not None
        free, evictable = pool.counts[FREE], list(pool.evictable())
        submit = self.request(prompt, salt, tenant, max_tokens=max_tokens, n=n, priority=priority)
        preempted = self.preempting()
        self.frontend.submit(submit)
        started = self.start_of(submit)
        assert (started is not None) == (said.outcome == "start"), said
        if started is not None:
            self.compare_start(said, *started, tenant, free, evictable)
        rejected = [m for m in self.frontend.inbox if isinstance(m, Rejected)]
        assert (submit.request_id in [m.request_id for m in rejected]) == (said.outcome == "refuse"), said
        known = self.world.core.state.clients[self.frontend.session[1]].requests.get(submit.request_id)
        if said.outcome.startswith("wait"):
            assert known is not None
            assert known.state is RequestState.WAITING
            assert (known.awaited is not None) == (said.outcome == "wait_for_prefix")
            assert (known.copies_until is not None) == (said.outcome == "wait_for_tier")
            assert known.waited_for == said.waits_for
        new = self.preempting() - preempted
        if not tenant and said.outcome in ("wait_for_room", "wait_for_prefix", "start"):
            assert new <= set(said.preempt) | self.relieved(), (new, said)

    def preempting(self) -> set[str]:
        told = {
            start_id
            for runner in self.world.core.state.runners
            for start_id, active in runner.active.items()
            if active.state.name == "PREEMPTING"
        }
        return {a.request.submit.request_id for a in self.world.core.state.actives() if a.start_id in told}

    def relieved(self) -> set[str]:
        """Whoever gives way to those that run, which is not the plan's affair."""
        state = self.world.core.state
        assert state.pool is not None
        return self.preempting() if not state.pool.available else set()

    def compare_start(
        self, said: PlanAnswer, runner: FakeRunner, start: Start, tenant: str, free: int, evictable: list[int]
    ) -> None:
        (sequence,) = start.sequences
        reused = len(said.reuse)
        assert runner.name == said.runner or (tenant and not said.runner)
        assert self.told(sequence.block_table[:reused], tenant) == said.reuse
        source = () if sequence.copy_from is None else (sequence.copy_from,)
        assert self.told(source, tenant) == (() if said.copy_from is None else (said.copy_from,))
        assert sequence.num_cached_tokens == said.num_cached_tokens
        fresh = [block for block, _ in sequence.block_table[reused:]]
        assert len(fresh) == said.allocate
        if not tenant:
            assert fresh[free:] == [block for block, _ in said.evict]
        assert set(fresh[free:]) <= set(evictable)

    def told(self, blocks: tuple[BlockRef, ...], tenant: str) -> tuple[BlockRef, ...]:
        """As a plan names them: to a tenant by their content."""
        pool = self.world.core.state.pool
        assert pool is not None
        return tuple((own_number(pool.block_hash[b]), 0) for b, _ in blocks) if tenant else blocks

    # --- what is there ----------------------------------------------------------------------------------

    @rule(index=st.integers(0, 3), limit=st.integers(1, 9), page=st.integers(1, 9))
    def follow(self, index: int, limit: int, page: int) -> None:
        asker = self.asker(index)
        if asker is not None:
            self.follower.follow(asker, limit, page)
            assert self.follower.found == truth(self.world.core.state)

    @rule(index=st.integers(0, 3), limit=st.integers(1, 5))
    def requests(self, index: int, limit: int) -> None:
        """Pages of any length give each request once."""
        asker = self.asker(index)
        if asker is None:
            return
        found = asker.requests(limit)
        assert found == asker.requests()
        ids = [info.request_id for info in found if info.state not in ("ended", "cancelling")]
        assert len(ids) == len(set(ids))
        assert set(ids) >= {
            request_id
            for client in self.world.core.state.clients.values()
            for request_id in getattr(client, "requests", ())
        }
        for info in found:
            (one,) = (i for i in asker.requests(request_id=info.request_id) if i.attempt == info.attempt)
            assert [len(sequence.block_table) for sequence in one.sequences] == [
                sequence.num_blocks for sequence in info.sequences
            ]

    @rule(index=st.integers(0, 3), limit=st.integers(1, 9))
    def audit(self, index: int, limit: int) -> None:
        asker = self.asker(index)
        if asker is not None:
            assert asker.audit(limit) == []

    # --- rights -----------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 3), tenant=st.sampled_from(TENANTS), prompt=PROMPTS)
    def rights(self, index: int, tenant: str, prompt: list[int]) -> None:
        """A tenant's answers are those of a cache in which only its own things are."""
        asker = self.asker(index)
        if asker is None:
            return
        prefix = tenant_bytes(tenant)
        ids = {
            r.submit.request_id
            for client in self.world.core.state.clients.values()
            for r in getattr(client, "requests", {}).values()
            if r.submit.tenant == tenant
        }
        for tier in ("pool", "disk"):
            for page in asker.blocks(5, tenant, tier):
                for place, (salt, digest, flag) in enumerate(
                    zip(page.salts, page.hashes, page.flags, strict=True)
                ):
                    assert salt.startswith(prefix) if digest else not salt or salt.startswith(prefix)
                    if flag & FLAG_OTHER:
                        columns = (page.states, page.ref_counts, page.num_tokens, page.ages, page.hits)
                        assert not any(column[place] for column in columns)
                        assert not any((page.tokens[place], page.parents[place], page.generations[place]))
        boot = self.world.core.state.boot_id
        own = self.world.core.state.at(tenant).sequence
        told = asker.events(boot, max(own - 60, 0), tenant=tenant)
        if not told.gap:  # its ring is small here, and others filled it between two looks
            assert [event.sequence for event in told.events] == [*range(max(own - 60, 0) + 1, own + 1)]
        for event in told.events:
            assert event.salt.startswith(prefix)
            assert not event.request_id or self.owner_of(event.request_id).startswith(tenant)
        infos = asker.requests(tenant=tenant)
        assert {i.request_id for i in infos if i.state not in ("ended", "cancelling")} == ids
        holders = asker.ask(HoldersQuery(9, tenant))
        assert not holders.processes
        assert {holder.kind for holder in holders.holders} <= {"sequence", "pin"}
        assert all(self.owner_of(holder.name).startswith(tenant) for holder in holders.holders)
        said = asker.explain(prompt, tenant=tenant)
        names = {said.computed_by, said.eviction.request_id if said.eviction else ""} - {""}
        assert all(self.owner_of(name).startswith(tenant) for name in names)

    def owner_of(self, request_id: str) -> str:
        """Tenant and salt under which it was ever submitted."""
        (found,) = {salt for (_, name), (salt, _) in self.world.salts.items() if name == request_id}
        return found

    # --- commands ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.core.state.pool.may_evict)
    @rule(index=st.integers(0, 3), prompt=PROMPTS, salt=SALTS, tenant=OWNERS)
    def evict(self, index: int, prompt: list[int], salt: str, tenant: str) -> None:
        """What begins as far as the last full block; what is in use stays."""
        asker, pool = self.asker(index), self.world.core.state.pool
        if asker is None or pool is None or not pool.may_evict:
            return
        length = len(prompt) // BLOCK_SIZE * BLOCK_SIZE or len(prompt)
        least = max(length - BLOCK_SIZE, 0)  # blocks that end there or before are not of it
        before = {
            block: known
            for block, known in self.world.content.items()
            if pool.state[block] in (CACHED, SEALED)
        }
        states, hashes = pool.state[:], list(pool.block_hash)
        self.world.commanded = True
        done: Cleared = asker.ask(Evict(1, tuple(prompt), salt, tenant=tenant), part=1 + index * 3)
        self.seen["evicted by a command"] += bool(done.evicted)
        self.seen["not evicted, as in use"] += bool(done.in_use)
        self.world.forget()
        for block, (owner, tokens) in before.items():
            if owner != tenant + salt or len(tokens) <= least or tokens[:length] != tuple(prompt[:length]):
                assert pool.block_hash[block] or self.needed(hashes[block]), (block, owner, tokens)
            elif states[block] == CACHED and self.reachable(before, owner, tokens, length):
                assert not pool.block_hash[block], (block, owner, tokens)

    def needed(self, digest: bytes) -> bool:
        """Whether the room was needed for a request that could start by now."""
        pool = self.world.core.state.pool
        assert pool is not None
        removal = pool.log.removal(digest)
        return removal is None or removal.cause == "capacity"

    def reachable(self, content: Any, owner: str, tokens: tuple[int, ...], length: int) -> bool:
        """Whether every block between the evicted prefix and this one is there."""
        there = set(content.values())
        end = length // BLOCK_SIZE * BLOCK_SIZE
        return all(
            (owner, tokens[:at]) in there for at in range(end, len(tokens), BLOCK_SIZE) if at >= length
        )

    @rule(index=st.integers(0, 3), tenant=OWNERS, force=st.booleans())
    def clear(self, index: int, tenant: str, force: bool) -> None:
        asker, state = self.asker(index), self.world.core.state
        if asker is None or state.pool is None:
            return
        self.world.commanded = True
        prefix = tenant_bytes(tenant)
        done: Cleared = asker.ask(Clear(1, force, tenant))
        self.world.forget()
        outcome = done.code or ("some" if done.evicted else "none")
        self.seen[f"cleared{' by force' * force} {outcome}"] += 1
        if done.code == "not_ready":
            assert not state.pool.may_evict
            return
        left = [known for known in truth(state).values() if known[2].startswith(prefix)]
        if done.code:
            assert not force
            assert done.in_use
            assert done.blockers
            return
        assert not done.more
        assert not left or (done.in_use and not force)


AskingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAskingMachine = AskingMachine.TestCase


def walk(seed: int, events: int) -> AskingMachine:
    """A long random history in which much is running, found and evicted, and that is asked all the time."""
    chance = random.Random(seed)
    machine = AskingMachine()
    machine.begin(chance.choice([9, 16, 40]), chance.choice([2, 40, 40]), "promote")
    world = machine.world
    for event in range(events):
        dice, index = chance.random(), chance.randrange(2)
        salt, tenant = chance.choice(["", "", "", "a"]), chance.choice(["", "", "", *TENANTS])
        frontend = machine.pick(FakeFrontend, index)
        if dice < 0.45:
            for runner in world.of_kind(FakeRunner):
                runner.step(chance.randrange(2))
        elif dice < 0.55:
            more = {"n": chance.choice([1, 1, 2]), "priority": chance.randrange(2)}
            submit = machine.request(text(chance), salt, tenant, max_tokens=chance.randrange(1, 20), **more)
            frontend.submit(submit)
        elif dice < 0.65:
            machine.explain(index, text(chance), salt, tenant)
        elif dice < 0.75:
            machine.plan(
                index,
                text(chance),
                salt,
                tenant,
                chance.choice([1, 1, 2]),
                chance.randrange(1, 20),
                event % 2,
            )
        elif dice < 0.78:
            machine.follow(index, chance.randrange(1, 9), chance.randrange(1, 9))
        elif dice < 0.80:
            machine.rights(index, chance.choice(TENANTS), text(chance))
            machine.requests(index, chance.randrange(1, 5))
        elif dice < 0.82:
            machine.evict(index, text(chance)[: chance.choice([2, 4, 8])], salt, tenant)
        elif dice < 0.84:
            machine.clear(index, tenant, chance.random() < 0.5)
        elif dice < 0.95 and world.copies:
            machine.end_copy(chance.randrange(20), chance.random() < 0.9)
        elif dice < 0.953:
            victim = chance.choice([frontend, *world.of_kind(FakeRunner)])
            world.kill(victim)
            world.add(type(victim))
        elif dice < 0.955:
            world.cut_short(chance.randrange(3))
        else:
            frontend.read()
        world.check()
    return machine


def test_long_random_histories_with_every_kind_of_answer() -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        machine = walk(seed, 600)
        machine.follow(0, 9, 9)
        machine.world.finish()
        seen += machine.seen
    assert not EVERY_KIND - set(seen), seen
