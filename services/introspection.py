"""The cache can be asked: every route under /kv/ but the page."""

from starlette.routing import Route

from services.context import Context
from services.kv_collect import Collector
from services.kv_control import ControlRoutes
from services.kv_events import EventsRoute
from services.kv_explain import ExplainRoutes
from services.kv_pages import PagesRoutes
from services.kv_state import StateRoutes
from services.pins import PinsRoute


def introspection_routes(context: Context) -> list[Route]:
    """They share what is read of the cache."""
    collector = Collector(context.backend)
    return [
        *StateRoutes(context).routes(),
        *PagesRoutes(context, collector).routes(),
        *ExplainRoutes(context, collector).routes(),
        *EventsRoute(context, collector).routes(),
        *ControlRoutes(context).routes(),
        *PinsRoute(context).routes(),
    ]
