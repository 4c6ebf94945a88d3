"""After a restart of the manager: those who live through it say what they hold, before anything is decided.

Runners go on meanwhile with the credits that they have, and re-assert what they run
(`RunnerHello.holdings`); frontends claim what may run (`Submit.claim`, then `Claimed`). Once everybody has
spoken, or after a time, each start that both name is taken over, and goes on where it is. All else is
submitted again, and its runner drops it.
"""

from collections.abc import Iterable

from kvmanager.protocol import Holdings, Submit
from kvmanager.scheduling.clients import Client, Frontend, Runner

MAX_CLAIMS = 1 << 14  # of all frontends; of more, nothing is taken over


class RollCall:
    """Who has yet to speak, and what the others have said. It is over `wait` seconds after the first look at
    the latest: reading the records, before that, may take as long.
    """

    __slots__ = ("_absent", "_until", "_wait", "claims", "holdings")

    def __init__(self, survivors: Iterable[str], wait: float) -> None:
        self._absent = set(survivors)  # locks
        self._wait = wait
        self._until: float | None = None
        self.holdings: dict[Runner, Holdings] = {}
        self.claims: dict[tuple[str, str], tuple[Frontend, Submit]] = {}
        """By token endpoint and request_id."""

    def is_over(self, now: float) -> bool:
        if self._until is None:
            self._until = now + self._wait
        return not self._absent or now >= self._until

    def spoke(self, lock: str) -> None:
        """Nothing more comes from the process with this lock: it has said all, or is gone."""
        self._absent.discard(lock)

    def claim(self, frontend: Frontend, submit: Submit) -> bool:
        """False if there is no room for one more."""
        if len(self.claims) >= MAX_CLAIMS:
            return False
        self.claims[frontend.hello.token_endpoint, submit.request_id] = frontend, submit
        return True

    def withdraw(self, frontend: Frontend, request_id: str) -> None:
        """The frontend wants it no more, or anew."""
        self.claims.pop((frontend.hello.token_endpoint, request_id), None)

    def leave(self, client: Client) -> None:
        """Its session is over, and with it what it has said; it may say so again."""
        if isinstance(client, Runner):
            self.holdings.pop(client, None)
        else:
            kept = {key: claim for key, claim in self.claims.items() if claim[0] is not client}
            self.claims = kept
