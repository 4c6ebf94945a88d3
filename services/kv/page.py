"""GET /kv/ui: the page that shows the cache, from `services/ui/`.

It is static and holds nothing secret: its script asks the other routes of /kv/ and, where they want one, the
user for a key. The page may load nothing from elsewhere, and nowhere may it be framed.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.auth import UI_PATH, shows_cache
from services.config import FrontendConfig
from services.errors import ApiError

FOLDER: Final = Path(__file__).parent.parent / "ui"

CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # kept, but asked for again: it belongs to this server's version
}


@dataclass(frozen=True)
class Asset:
    """One file of the page, as it is sent."""

    body: bytes
    content_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


class UiRoutes:
    """The page and its files."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._assets = read_assets()

    def routes(self) -> list[Route]:
        return [Route(UI_PATH, self.page), Route(UI_PATH + "/{file}", self.file)]

    @functools.cached_property
    def _shown(self) -> bool:
        return shows_cache(self._config)

    async def page(self, request: Request) -> Response:
        return self._send(request, "index.html")

    async def file(self, request: Request) -> Response:
        return self._send(request, request.path_params["file"])

    def _send(self, request: Request, name: str) -> Response:
        """Raises ApiError 403 where nobody may see the cache, 404 for what is no file of the page."""
        if not self._shown:
            message = (
                f"without keys the cache is shown on loopback addresses only, and this frontend listens on "
                f"{self._config.host}: set admin_keys or api_keys, or host to 127.0.0.1"
            )
            raise ApiError(403, message, code="forbidden")
        asset = self._assets.get(name)
        if asset is None:
            raise ApiError(404, "the page has no such file", code="not_found")
        headers = {**HEADERS, "etag": asset.etag}
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers={**headers, "content-type": asset.content_type})


def read_assets() -> dict[str, Asset]:
    """Name → content; a few files, read once."""
    paths = (path for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES)
    return {path.name: Asset(path.read_bytes(), CONTENT_TYPES[path.suffix]) for path in paths}
