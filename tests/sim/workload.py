"""What a seed means: how large everything is, how often something dies, and which requests come."""

from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvmanager.protocol import BeamParams, Clear, Evict, SamplingParams
from kvmanager.state import Policy
from tests.sim.model import BLOCK_SIZE, MAX_MODEL_LEN, VOCABULARY
from tests.sim.runner import Capacity

if TYPE_CHECKING:
    from tests.sim.frontend import Frontend

NUM_STEMS: Final = 3  # beginnings that prompts share
BEAM_SHARE: Final = 0.12
EARLY_STOPPING: Final[tuple[bool | Literal["never"], ...]] = (False, True, "never")
SALTS: Final = ("", "", "", "red", "blue")
FAULT_RATES: Final = (0.0, 0.004, 0.015, 0.03)
FAULTS: Final = (
    *("manager",) * 5,
    *("runner",) * 3,
    *("frontend",) * 2,
    *("stall",) * 2,
    *("break",) * 2,
    *("drain",) * 3,
    "report",
)
"""What may go wrong, each as often as it is here. A nap submits everything again, which hides much."""
MIN_SEATS: Final = 4  # the smallest runner takes the widest request


class Shape(NamedTuple):
    """One seed's world. Rates are per turn of any process."""

    num_blocks: int
    num_slots: int  # of the disk tier; 0: there is none
    capacities: tuple[Capacity, ...]
    num_frontends: int
    max_live: int  # requests of all frontends
    fault_rate: float
    faults: tuple[str, ...]
    cancel_rate: float
    pin_rate: float
    command_rate: float


def shape(seed: int, random: Random) -> Shape:
    """Neighbouring seeds differ in how much dies, so that any stretch of them has something of everything."""
    capacities = []
    for _ in range(random.randint(1, 3)):
        seats = random.choice((MIN_SEATS, 6, 12))
        capacities.append(Capacity(seats, max(seats, random.choice((5, 12, 40)))))
    return Shape(
        num_blocks=random.choice((24, 32, 48, 96)),
        num_slots=random.choice((0, 10, 200)),
        capacities=tuple(capacities),
        num_frontends=random.randint(1, 3),
        max_live=random.choice((4, 8, 16, 24)),
        faults=FAULTS if seed // len(FAULT_RATES) % 3 else (*FAULTS, "nap"),
        fault_rate=FAULT_RATES[seed % len(FAULT_RATES)],
        cancel_rate=random.choice((0.0, 0.002, 0.01)),
        pin_rate=random.choice((0.0, 0.01)),
        command_rate=random.choice((0.0, 0.004)),
    )


class Workload:
    """Makes requests; those of one seed share the beginnings of their prompts."""

    def __init__(self, random: Random, shape: Shape) -> None:
        self._random = random
        self._shape = shape
        self._usable = shape.num_blocks  # beside all that may be pinned
        if shape.pin_rate:
            self._usable -= int(Policy.pin_budget * shape.num_blocks)
        self._stems = [
            [random.randrange(VOCABULARY) for _ in range(MAX_MODEL_LEN // 2)] for _ in range(NUM_STEMS)
        ]
        self._count = 0
        self.salts: dict[str, str] = {}  # by request

    def submit(self, frontend: "Frontend") -> None:
        random = self._random
        stem = random.choice(self._stems)
        prompt = stem[: random.randrange(len(stem))] + [
            random.randrange(VOCABULARY) for _ in range(random.randint(1, 6))
        ]
        num_choices = random.choice((1, 1, 1, 2, 3, MIN_SEATS))
        longest = max(1, self._usable // num_choices * BLOCK_SIZE - len(prompt))
        max_tokens = min(random.randint(1, 30), longest, MAX_MODEL_LEN - len(prompt))
        never_fits = random.random() < 0.005
        if never_fits:
            max_tokens = MAX_MODEL_LEN
        beam = None
        if random.random() < BEAM_SHARE and not never_fits:
            penalty, stopping = random.choice((0.0, 1.0, 2.0)), random.choice(EARLY_STOPPING)
            beam = BeamParams(num_choices, penalty, stopping)
        self._count += 1
        request_id = f"r{self._count}"
        salt = self.salts[request_id] = random.choice(SALTS)
        frontend.submit(
            request_id,
            prompt,
            SamplingParams(
                max_tokens, random.randrange(1 << 40), ignore_eos=random.random() < 0.5, beam=beam
            ),
            num_choices,
            priority=random.choice((0, 0, 0, -1, 1)),
            cache_salt=salt,
            read_cache=random.random() < 0.9,
            never_fits=never_fits,
        )

    def control(self, frontend: "Frontend") -> None:
        """A pin or a command, as often as either shall be."""
        pins = self._random.random() * (self._shape.pin_rate + self._shape.command_rate)
        (self.pin if pins < self._shape.pin_rate else self.command)(frontend)

    def pin(self, frontend: "Frontend") -> None:
        """A beginning that prompts share, under a name of this frontend's; sometimes one is let go of."""
        random = self._random
        name = f"{frontend.name} {random.randrange(3)}"
        if random.random() < 0.3:
            frontend.unpin(name)
            return
        stem = random.choice(self._stems)
        tokens = tuple(stem[: random.randint(1, len(stem))])
        frontend.pin(name, tokens, random.choice(SALTS), random.choice((0.5, 5.0, 500.0)))

    def command(self, frontend: "Frontend") -> None:
        """Evict something of what prompts share, or everything; or clear, by force or if nobody uses it."""
        random = self._random
        tokens = tuple(random.choice(self._stems)[: random.choice((0, 2, 8, 16))])
        if random.random() < 0.3:
            force = not self._shape.pin_rate and random.random() < 0.7  # it ends pins, which are to stay
            frontend.command(Clear(0, force))
        else:
            frontend.command(Evict(0, tokens, random.choice(SALTS), all_salts=random.random() < 0.3))

    def disturb(self, frontend: "Frontend") -> None:
        """A client goes away, or has seen a stop string."""
        requests = list(frontend.expected)
        if requests:
            request = self._random.choice(requests)
            if request.started and request.sampling.beam is None and self._random.random() < 0.5:
                frontend.stop(request, self._random.randrange(len(request.outputs)))
            else:
                frontend.cancel(request)
