"""Who calls, and who may see the cache."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmanager.protocol import Pin, PinsQuery, Unpin
from kvmanager.settings import SettingError
from services.auth import Principal, is_loopback, principals, shows_cache, tenant_of, without_keys
from services.config import FrontendConfig, Keys, read_keys
from services.openapi_operations import OPERATIONS
from tests.services.fake_stack import Stack, says

TENANT = "dab6248be8cb99116b1ca8a4e4d90329"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(host="0.0.0.0", api_keys="user", admin_keys="root", tenant_keys="acme, other") as stack:
        yield stack


def ask(
    stack: Stack, key: str, path: str = "/kv/pins", method: str = "GET", **options: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, stack.url + path, headers=headers, timeout=20, **options)


def test_every_key_may_use_the_api_and_a_tenants_has_a_cache_of_its_own(stack: Stack) -> None:
    stack.manager.script = says(" a")
    stack.manager.submits.clear()
    for key in ("user", "root", "acme", "other"):
        for path, body in (
            ("/v1/completions", {"prompt": "Hi", "cache_salt": "s"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            assert ask(stack, key, path, "POST", json=body).status_code == 200
    sent = [(submit.tenant, submit.cache_salt) for submit in stack.manager.submits]
    tenants = ["", "", tenant_of(b"acme"), tenant_of(b"other")]
    assert sent == [pair for tenant in tenants for pair in ((tenant, "s"), (tenant, ""))]
    assert len({*tenants}) == 3


def test_a_resubmit_keeps_its_tenant(stack: Stack) -> None:
    stack.manager.script = says(" a b c")
    stack.manager.submits.clear()
    stack.manager.hold_at = 1
    try:
        headers = {"authorization": "Bearer acme"}
        body = {"prompt": "Hi", "stream": True}
        with httpx.stream(
            "POST", f"{stack.url}/v1/completions", json=body, headers=headers, timeout=20
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            stack.do(stack.manager.lose_runner)
            stack.go_on()
            assert [*lines][-2] == "data: [DONE]"
    finally:
        stack.manager.hold_at = None
        stack.go_on()
    assert [(s.attempt, s.tenant) for s in stack.manager.submits] == [
        (0, tenant_of(b"acme")),
        (1, tenant_of(b"acme")),
    ]


def test_a_tenants_pins_are_its_own(stack: Stack) -> None:
    stack.manager.pin_messages.clear()
    for key in ("root", "acme"):
        ask(stack, key)
        ask(stack, key, method="DELETE", params={"name": "p"})
        ask(stack, key, method="POST", json={"name": "p", "prompt": "Hi"})
    kinds = [(type(message), message.tenant) for message in stack.manager.pin_messages]
    assert kinds == [(kind, of) for of in ("", tenant_of(b"acme")) for kind in (PinsQuery, Unpin, Pin)]


def test_a_plain_key_does_not_see_the_cache_once_there_are_others(stack: Stack) -> None:
    answer = ask(stack, "user")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert "needs an admin's or a tenant's key" in answer.text
    assert [ask(stack, key).status_code for key in ("root", "acme", "wrong")] == [200, 200, 401]
    assert httpx.get(f"{stack.url}/kv/pins", timeout=20).status_code == 401


def test_who_is_who() -> None:
    user, admin = principals(Keys((b"u",), (b"a",), ()))
    assert (user[1].kind, admin[1]) == ("user", Principal("admin"))
    assert principals(Keys((b"u",), (), ())) == [(b"u", Principal("admin"))]
    ((_, tenant),) = principals(Keys((), (), (b"key",)))
    assert tenant == Principal("tenant", TENANT)
    assert tenant_of(b"key2") != TENANT


def test_which_addresses_are_this_machines() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert is_loopback(host)
        assert without_keys(FrontendConfig(host=host)).kind == "admin"
        assert shows_cache(FrontendConfig(host=host))
    for host in ("0.0.0.0", "::", "", "192.168.1.4", "example.org"):
        assert not is_loopback(host)
        assert without_keys(FrontendConfig(host=host, api_keys=" , ")).kind == "user"
        assert not shows_cache(FrontendConfig(host=host))
        assert shows_cache(FrontendConfig(host=host, tenant_keys="k"))


def test_a_key_has_one_meaning(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("same\n")
    with pytest.raises(SettingError, match="both in admin_keys and in tenant_keys"):
        read_keys(FrontendConfig(admin_keys="same", tenant_keys_file=str(tmp_path / "keys")))
    with pytest.raises(SettingError, match=r"--admin-keys-file=.* cannot be read"):
        read_keys(FrontendConfig(admin_keys_file=str(tmp_path / "none")))


def test_without_keys_other_sites_pages_and_names_are_refused() -> None:
    with Stack(cors_origins="https://ok.example") as stack:
        own = stack.url.removeprefix("http://")
        for headers, status in (
            ({}, 200),
            ({"origin": stack.url}, 200),
            ({"origin": "https://ok.example"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null", "authorization": "Bearer anything"}, 403),
            ({"host": own.replace("127.0.0.1", "localhost")}, 200),
            ({"host": own.replace("127.0.0.1", "LocalHost")}, 200),
            ({"host": own.replace("127.0.0.1", "[::1]")}, 200),
            ({"host": "rebound.example"}, 403),
            ({"host": "[", "authorization": "Bearer anything"}, 403),
        ):
            answer = httpx.get(f"{stack.url}/kv/pins", headers=headers, timeout=20)
            assert answer.status_code == status, headers


def test_without_keys_the_cache_is_shown_on_loopback_addresses_only() -> None:
    """Whatever the route; and nothing reaches the manager."""
    with Stack(host="0.0.0.0") as stack:
        for operation in OPERATIONS:
            if operation.tag == "cache" and not operation.path.startswith("/kv/ui"):
                path = operation.path.replace("{id}", "1")
                answer = httpx.request(operation.method, stack.url + path, timeout=20)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
                assert "set admin_keys or api_keys, or host to 127.0.0.1" in answer.text
        assert stack.manager.cache.questions == []
