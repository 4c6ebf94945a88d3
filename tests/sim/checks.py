"""Who may write a block, what a started sequence finds in its table, and what the findable blocks hold."""

from array import array
from typing import TYPE_CHECKING, Final

from kvmanager.pool.block_pool import ANYBODY, QUARANTINED, RESERVED, SEALED, BlockPool, BlockRecord
from kvmanager.pool.hashing import salt_digest, token_array
from kvmanager.protocol import Directives
from kvmanager.records import unpack
from kvmanager.restore import DAMAGED
from kvmanager.scheduling.clients import owner_tag
from tests.sim.manager import Disk, Manager
from tests.sim.model import BLOCK_SIZE, chain

if TYPE_CHECKING:
    from tests.sim.runner import Runner

DAMAGED_TAG: Final = owner_tag(DAMAGED)


def check_write(manager: Manager | None, disk: Disk, runner: "Runner", block: int) -> None:
    """Whoever writes a block owns it, in the manager's eyes and in the records."""
    pool = manager.core.state.pool if manager else None
    if pool is not None:
        state, tag = pool.state[block], pool.record(block).owner_tag
        ours = state in (RESERVED, QUARANTINED) and tag in (runner.tag, DAMAGED_TAG)
        assert ours, f"{runner.name} writes block {block}, which is state {state}, not its own"
        return
    record = unpack(disk.records[block], BLOCK_SIZE)
    assert record is None or (record.state == RESERVED and record.owner_tag == runner.tag), (
        f"{runner.name} writes block {block}, whose record is {record}"
    )


def check_starts(cells: list[list[int]], disk: Disk, directives: Directives, salts: dict[str, str]) -> None:
    """Cached blocks hold the very tokens, under the request's salt, in the generation named."""
    for start in directives.starts:
        salt = salt_digest(salts[start.request_id])
        for sequence in start.sequences:
            tokens = (*start.prompt_token_ids, *sequence.output_token_ids)[: sequence.num_cached_tokens]
            right = chain(tokens)
            for index in range(len(tokens) // BLOCK_SIZE):
                block, generation = sequence.block_table[index]
                part = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
                assert cells[block] == right[part], f"start {start.start_id}: block {block} holds others"
                record = kept(disk, block, generation)
                packed = token_array(tokens[part]).tobytes()
                assert record is None or record[:2] == (SEALED, generation), f"{start}: {record}"
                assert record is None or (record.salt, record.tokens) == (salt, packed), f"{start}: {record}"
            tail = right[len(tokens) // BLOCK_SIZE * BLOCK_SIZE :]
            assert (sequence.copy_from is None) == (not tail), start
            if sequence.copy_from is not None:
                block, generation = sequence.copy_from
                record = kept(disk, block, generation)
                assert cells[block][: len(tail)] == tail, (
                    f"start {start.start_id}: source {block} holds others"
                )
                assert record is None or record[:2] == (SEALED, generation), f"{start}: {record}"
                assert record is None or record.salt == salt, f"{start}: {record}"


def kept(disk: Disk, block: int, generation: int) -> BlockRecord | None:
    """The record of a block to read, unless a forced Clear came meanwhile: then nobody else may have it."""
    record = unpack(disk.records[block], BLOCK_SIZE)
    unfound = record is not None and record[:3] == (RESERVED, generation, ANYBODY)
    return None if unfound else record


class Contents:
    """Knows for every hash that was ever sealed what its block's cells must be."""

    def __init__(self, cells: list[list[int]]) -> None:
        self._cells = cells
        self._right: dict[bytes, list[int]] = {}

    def check(self, pool: BlockPool, blocks: set[int]) -> None:
        """No findable block among `blocks` holds other tokens than those of its hash's whole chain."""
        for block in sorted(blocks):
            if pool.block_hash[block] and block not in pool.unfound:
                right = self._of(pool, pool.block_hash[block], block)
                held = self._cells[block][: len(right)]
                assert held == right, f"block {block} is findable and holds other tokens"

    def _of(self, pool: BlockPool, digest: bytes, block: int) -> list[int]:
        known = self._right.get(digest)
        if known is None:
            parent = pool.parent_hash[block]
            before = 0
            if parent != pool.root:
                above = pool.index.find(parent)
                assert above is not None or parent in self._right, f"block {block} was sealed under no parent"
                before = (self._right[parent] if above is None else self._of(pool, parent, above))[-1]
            known = self._right[digest] = chain(array("I", pool.tokens[block]), before)
        return known
