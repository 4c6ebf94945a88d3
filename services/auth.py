"""Who calls: `Authorization: Bearer <key>`, compared in constant time; and who may see the cache.

An API key may use the API; an admin's key also sees and commands the whole cache (`/kv/…`); a tenant's key
has a cache of its own, and sees that alone. While there are API keys only, they are admins' keys. Without any
key whoever reaches a loopback address is an admin; on another address the cache is shown to nobody.
"""

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.config import FrontendConfig, Keys, read_keys, split_list
from services.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""What load balancers, scrapers and tools ask without a key."""

METRICS_PATH: Final = "/metrics"
"""They count what all do: where there are tenants, for an admin's key only."""

UI_PATH: Final = "/kv/ui"
"""The page holds nothing secret, and asks for the key itself."""


@dataclass(frozen=True)
class Principal:
    """Who calls. `tenant` is 32 hex digits, of a tenant only; `why` a "user" may not see the cache; `keyed`:
    it sent a key.
    """

    kind: Literal["admin", "tenant", "user"]
    tenant: str = ""
    why: str = ""
    keyed: bool = True


USER: Final = Principal(
    "user", why="this key may use the API, not see the cache: that needs an admin's or a tenant's key"
)


def tenant_of(key: bytes) -> str:
    """What stands for a tenant's key everywhere else."""
    return hashlib.sha256(b"pagekeeper tenant" + key).digest()[:16].hex()


class ApiKeys:
    """ASGI middleware: puts the Principal into `scope["state"]`, or answers 401."""

    def __init__(self, app: ASGIApp, config: FrontendConfig) -> None:
        self._app = app
        keys = read_keys(config)
        self._known = [(hashlib.sha256(key).digest(), principal) for key, principal in principals(keys)]
        self._nobody = without_keys(config)
        self._guarded = bool(keys.tenant)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = self._find(Headers(scope=scope).get("authorization", "")) if self._known else self._nobody
            guarded = self._guarded and scope["path"] == METRICS_PATH
            if guarded and found is not None and found.kind != "admin":
                text = f"{METRICS_PATH} is for admin keys only, as this server has tenants"
                await ApiError(403, text, code="forbidden").response()(scope, receive, send)
                return
            if found is None and (guarded or not is_open(scope["path"])):
                await _refusal(Headers(scope=scope).get("authorization", "")).response()(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = found or USER
        await self._app(scope, receive, send)

    def _find(self, header: str) -> Principal | None:
        """Every key is looked at, so that the time tells nothing of which one came close."""
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = [who for digest, who in self._known if hmac.compare_digest(given, digest)]
        return found[0] if found and scheme.lower() == "bearer" else None


def principals(keys: Keys) -> list[tuple[bytes, Principal]]:
    """Who each key is."""
    plain = USER if keys.admin or keys.tenant else Principal("admin")
    return [
        *((key, plain) for key in keys.api),
        *((key, Principal("admin")) for key in keys.admin),
        *((key, Principal("tenant", tenant_of(key))) for key in keys.tenant),
    ]


def without_keys(config: FrontendConfig) -> Principal:
    """Who everyone is where no keys are set."""
    if is_loopback(config.host):
        return Principal("admin", keyed=False)
    return Principal(
        "user",
        keyed=False,
        why=f"without keys the cache is shown on loopback addresses only, and this frontend listens on "
        f"{config.host}: set admin_keys or api_keys, or host to 127.0.0.1",
    )


def shows_cache(config: FrontendConfig) -> bool:
    """Whether anybody at all may see the cache here."""
    return bool(read_keys(config)) or is_loopback(config.host)


def caller(request: Request) -> Principal:
    """Who calls."""
    principal: Principal = request.state.principal
    return principal


def tenant(request: Request) -> str:
    """Whose cache a request uses; "" is that of all who are no tenants."""
    return caller(request).tenant


def observer(request: Request, config: FrontendConfig) -> Principal:
    """Who calls, if it may see the cache. Raises ApiError 403."""
    principal = caller(request)
    if principal.kind == "user":
        raise ApiError(403, principal.why, code="forbidden")
    if not principal.keyed:
        _check_site(request, config)
    return principal


def admin(request: Request, config: FrontendConfig) -> Principal:
    """Who calls, if it may see all of the cache. Raises ApiError 403."""
    principal = observer(request, config)
    if principal.kind != "admin":
        raise ApiError(403, f"{request.url.path} is for admin keys only", code="forbidden")
    return principal


def _check_site(request: Request, config: FrontendConfig) -> None:
    """Without keys, a page of another site must not lead a browser of this machine here."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    allowed = {*split_list(config.cors_origins), f"http://{host}", f"https://{host}"}
    if origin is not None and origin not in allowed and "*" not in allowed:
        raise ApiError(
            403, f"pages of {origin[:200]} may not see the cache: see cors_origins", code="forbidden"
        )
    name = re.sub(r":\d*$", "", host).strip("[]")
    if not is_loopback(name):
        message = f"without keys the cache is shown to this machine only, and {name[:200]!r} is not its name"
        raise ApiError(403, f"{message}: use 127.0.0.1, or set admin_keys", code="forbidden")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_open(path: str) -> bool:
    """Whether a path is served without a key."""
    return path in OPEN_PATHS or path == UI_PATH or path.startswith(UI_PATH + "/")


def _refusal(header: str) -> ApiError:
    message = (
        "the API key is not one of this server's"
        if header
        else "an API key is needed: send the header `Authorization: Bearer <key>`"
    )
    return ApiError(
        401, message, code="invalid_api_key", headers={"www-authenticate": 'Bearer realm="pagekeeper"'}
    )
