"""The routes under /kv/ on the real core of the manager, in one process: no sockets, no model, no clock."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware

from kvmanager.protocol import Answer, Start, StatsQuery
from kvmanager.state import Policy
from services.auth import ApiKeys
from services.config import FrontendConfig
from services.context import Context
from services.errors import ApiError
from services.handlers import on_api_error
from services.kv.collect import Collector
from services.kv.events import Follower
from services.kv.routes import introspection_routes
from tests.kvmanager.fake_clients import FakeFrontend, FakeRunner, submission
from tests.kvmanager.world import World

MAX_MODEL_LEN = 1000


class Tokenizer:
    """Token 7 is the text `<7>`."""

    vocab_size = 1000

    def token_bytes(self, token: int) -> bytes:
        return b"<%d>" % token

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode()


class KvWorld(World):
    """One frontend, one runner, and who asks by key: "root" is an admin, "a" and "b" are tenants."""

    def __init__(self, num_blocks: int = 24) -> None:
        self.starts: list[Start] = []
        super().__init__(num_blocks, Policy(50, 0.05, 1e9, 100.0, pin_budget=0.4, tenant_pin_budget=0.2))
        self.runner: FakeRunner = self.add(FakeRunner)
        self.asker: FakeFrontend = self.add(FakeFrontend)
        config = FrontendConfig(admin_keys="root", tenant_keys="a,b", request_log=False)
        model = SimpleNamespace(
            tokenizer=Tokenizer(),
            max_model_len=MAX_MODEL_LEN,
            check_name=lambda name: None,
            chat_template=None,
        )
        self.backend = SimpleNamespace(ask=self.ask, stats=lambda timeout: self.ask(StatsQuery, timeout))
        self.context = cast(Context, SimpleNamespace(config=config, model=model, backend=self.backend))
        self.app = Starlette(
            routes=introspection_routes(self.context),
            middleware=[Middleware(ApiKeys, config=config)],
            exception_handlers={ApiError: on_api_error},
        )
        self.app.state.request_log = False

    def check_start(self, start: Start) -> None:
        """It is kept; the naive model of the other tests knows no tenants."""
        self.starts.append(start)

    def run(self, prompt: Sequence[int], tenant: str = "", steps: int = 20, **fields: Any) -> str:
        """Submit a request and let the runner step; returns its id."""
        self.names += 1
        name = fields.pop("name", f"request-{self.names}")
        message = submission(name, list(prompt), arrival=self.now, **fields)
        values = {field: getattr(message, field) for field in message.__struct_fields__}
        self.asker.submit(type(message)(**{**values, "tenant": tenant}))
        for _ in range(steps):
            self.runner.step()
        return cast(str, name)

    async def ask(self, message: Callable[[int], Any], timeout: float) -> Answer | None:
        """As a frontend's backend."""
        self.asker.read()
        self.asker.send(message(77))
        answers = [each for each in self.asker.inbox if isinstance(each, Answer)]
        for answer in answers:
            self.asker.inbox.remove(answer)
        assert len(answers) == 1
        return answers[0]

    # --- as a client of HTTP ------------------------------------------------------------------------------

    def http(self, key: str, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                headers = {"authorization": f"Bearer {key}"}
                return await client.request(method, f"/kv/{path}", headers=headers, **options)

        return asyncio.run(send())

    def get(self, key: str, path: str, **params: Any) -> Any:
        answer = self.http(key, "GET", path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, key: str, path: str, **body: Any) -> Any:
        answer = self.http(key, "POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, tenant: str, since: Any = None) -> bytes:
        """A snapshot and all events, or those since a place."""

        async def read() -> bytes:
            follower = Follower(self.context, Collector(cast(Any, self.backend)), tenant)
            follower.at = since or self.core.state.at(tenant)
            pieces = []
            async for piece in follower.events(since is None):
                pieces.append(piece)
                if not piece:
                    break
            return b"".join(pieces)

        return asyncio.run(read())
