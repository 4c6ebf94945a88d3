"""The cache can be asked: every route under /kv/ but the page."""

from starlette.routing import Route

from services.context import Context
from services.kv.collect import Collector
from services.kv.control import ControlRoutes
from services.kv.events import EventsRoute
from services.kv.explain import ExplainRoutes
from services.kv.pages import PagesRoutes
from services.kv.pins import PinsRoute
from services.kv.state import StateRoutes


def introspection_routes(context: Context) -> list[Route]:
    """They share what is read of the cache."""
    collector = Collector(context.backend)
    return [
        *StateRoutes(context, collector).routes(),
        *PagesRoutes(context, collector).routes(),
        *ExplainRoutes(context, collector).routes(),
        *EventsRoute(context, collector).routes(),
        *ControlRoutes(context).routes(),
        *PinsRoute(context).routes(),
    ]
