"""Runs one seed; a failure names it, with the last events and the command that replays it."""

import traceback
from collections import Counter

from tests.sim.world import World

EVENTS_SHOWN = 25
DETAIL_SHOWN = 300  # characters


class SimulationError(AssertionError):
    """Something that must hold does not, under the seed that the message names."""


def simulate(seed: int, num_messages: int, audit_every: int = 1, verbose: bool = False) -> Counter[str]:
    """Returns what has happened, by name. Raises SimulationError."""
    world = World(seed, audit_every, verbose)
    try:
        world.run(num_messages)
    except Exception as error:
        raise SimulationError(story(world, seed, num_messages, audit_every, error)) from error
    world.statistics["messages"] = world.messages
    return world.statistics


def story(world: World, seed: int, num_messages: int, audit_every: int, error: Exception) -> str:
    events = [
        f"{when:9.4f} {who:12} {what} {str(detail)[:DETAIL_SHOWN]}"
        for when, who, what, detail in list(world.events)[-EVENTS_SHOWN:]
    ]
    where = [
        f"  {frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    command = f"python -m tests.sim --seed {seed} --steps {num_messages} --audit-every {audit_every}"
    return "\n".join(
        (
            f"seed {seed} fails after {world.messages} messages: {type(error).__name__}: {error}",
            *where[-4:],
            "last events:",
            *events,
            f"again, with every event: {command} --verbose",
        )
    )
