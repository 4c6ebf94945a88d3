"""The ASGI application of one frontend: routes, middleware, and the backend's life."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from kvmanager.client import AsyncManagerClient, socket_endpoint
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import PROTOCOL_VERSION, FrontendHello
from services.api.chat import ChatRoute
from services.api.completions import CompletionsRoute
from services.api.models import ModelsRoute
from services.api.tokens import TokensRoute
from services.auth import ApiKeys
from services.backend import Backend
from services.config import FrontendConfig, redis_url, split_list
from services.context import Context, ServedModel
from services.errors import ApiError
from services.handlers import on_api_error, on_http_exception, on_pagekeeper_error, on_unexpected
from services.health import HealthRoute
from services.kv.page import UiRoutes
from services.kv.routes import introspection_routes
from services.metrics import Metrics
from services.openapi import openapi_route
from services.request_id import HEADER, RequestIds
from services.streams.file_journal import FileJournals
from services.streams.journal import Journals
from services.streams.redis_journal import RedisJournals
from services.streams.registry import Streams
from services.streams.route import StreamsRoute
from services.streams.tail import STREAM_ID
from services.text.chat_template import ChatTemplate
from services.text.model_files import model_facts
from services.text.tokenizer import load_tokenizer
from services.tracker import Tracker


def load_model(config: FrontendConfig) -> ServedModel:
    """Read what the frontend needs of the model. Raises ModelError (a ValueError) or OSError."""
    path = Path(config.model)
    facts, tokenizer = model_facts(path), load_tokenizer(path)
    template = tokenizer.chat_template
    return ServedModel(
        name=config.served_model_name or facts.name,
        max_model_len=min(config.max_model_len or facts.max_model_len, facts.max_model_len),
        created=int(time.time()),
        eos_token_ids=tuple({*facts.eos_token_ids, *tokenizer.eos_token_ids}),
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, tokenizer.named_tokens),
    )


def make_app(
    config: FrontendConfig, model: ServedModel, name: str, on_fatal: Callable[[PagekeeperError], None]
) -> Starlette:
    """The application. Its sockets are opened when it starts, in the event loop, and unlinked when it
    stops.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client = make_client(config, name)  # first: it holds the lock that makes the name ours
        metrics = Metrics(Path(config.pool_directory), name, model.name)
        tracker = Tracker(config.manager_timeout_seconds, config.max_requests)
        backend = Backend(client, socket_endpoint(config.pool_directory, name), tracker, metrics, on_fatal)
        context = Context(config, model, backend, metrics)
        streams = Streams(context, make_journals(config))
        app.router.routes.extend(make_routes(context, streams))
        backend.start()
        streams.start()
        try:
            yield
        finally:
            await streams.stop()
            await backend.stop()
            metrics.close()

    app = Starlette(
        middleware=make_middleware(config),
        exception_handlers={
            ApiError: on_api_error,
            PagekeeperError: on_pagekeeper_error,
            HTTPException: on_http_exception,
            Exception: on_unexpected,
        },
        lifespan=lifespan,
    )
    app.state.request_log = config.request_log
    app.state.stopping = lambda: False  # whoever serves the app says when it is
    return app


def make_client(config: FrontendConfig, name: str) -> AsyncManagerClient:
    """The connection to the manager. Raises PagekeeperError if another process has this name."""
    endpoint = socket_endpoint(config.pool_directory, name)
    hello = FrontendHello(PROTOCOL_VERSION, name, lock=name, token_endpoint=endpoint)
    return AsyncManagerClient(config.manager, hello, config.pool_directory)


def make_middleware(config: FrontendConfig) -> list[Middleware]:
    """From the outside in. CORS is outside the keys: a browser's preflight carries none."""
    origins = split_list(config.cors_origins)
    middleware = [Middleware(RequestIds)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=[HEADER, STREAM_ID.decode()],
            )
        )
    middleware.append(Middleware(ApiKeys, config=config))
    return middleware


def make_journals(config: FrontendConfig) -> Journals:
    """Where resumable streams are kept. Raises ValueError for a Redis URL that is none."""
    limits = (config.max_streams, config.stream_bytes, config.stream_ttl_seconds)
    if url := redis_url(config, os.environ):
        return RedisJournals(url, *limits)
    return FileJournals(config.pool_directory, *limits)


def make_routes(context: Context, streams: Streams) -> list[Route]:
    """Every endpoint."""
    models, tokens, health = ModelsRoute(context), TokensRoute(context), HealthRoute(context)
    chat, completions = ChatRoute(context, streams), CompletionsRoute(context, streams)
    return [
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.one),
        Route("/v1/completions", completions.answer, methods=["POST"]),
        Route("/v1/chat/completions", chat.answer, methods=["POST"]),
        *StreamsRoute(context.config, streams).routes(),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        *introspection_routes(context),
        *UiRoutes(context.config).routes(),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/metrics", health.metrics),
        openapi_route(),
    ]
