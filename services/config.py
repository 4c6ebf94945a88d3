"""Settings of a frontend's process."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvmanager.client import default_pool_directory
from kvmanager.settings import SettingError, parse_bytes, setting


@dataclass(frozen=True)
class FrontendConfig:
    """A frontend: HTTP, tokenising, streaming. Holds nothing that another frontend would need."""

    model: str = setting("", "path of the model: a Hugging Face folder or a GGUF file")
    served_model_name: str = setting("", "the model's name in the API; none: its own")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "TCP port to listen on; 0: any free one", minimum=0, maximum=65535)
    reuse_port: bool = setting(False, "share the port with other frontends (SO_REUSEPORT)")
    name: str = setting("", "this process's name in the pool directory; none: frontend-<host>-<pid>")
    pool_directory: str = setting(default_pool_directory(), "where the pool, its locks and its sockets lie")
    manager: str = setting("", "ZeroMQ endpoint of the manager; none: a socket in the pool directory")
    max_model_len: int = setting(0, "longest prompt and output; 0: the model's own", unit="tokens", minimum=0)
    manager_timeout_seconds: float = setting(
        20.0, "how long a request waits for an absent manager before it gets 503", unit="seconds", minimum=0.1
    )
    max_requests: int = setting(2048, "requests that may be live in this process", unit="requests", minimum=1)
    max_body_bytes: int = setting(
        16 << 20, "longest request body; longer ones get 413", unit="bytes", parse=parse_bytes, minimum=1024
    )
    stuck_seconds: float = setting(
        10.0, "how long a runner may be silent until /ready no longer counts it", unit="seconds", minimum=0.1
    )
    keep_alive_seconds: float = setting(
        15.0, "silence in a stream after which a comment is sent", unit="seconds", minimum=0.01
    )
    client_timeout_seconds: float = setting(
        120.0,
        "how long a client may take to send a head, then a body, or not read what is sent",
        unit="seconds",
        minimum=0.1,
    )
    drain_seconds: float = setting(
        30.0, "how long running requests may go on after SIGTERM", unit="seconds", minimum=0.0, maximum=3600
    )
    api_keys: str = setting("", "keys that clients must send, separated by commas; none: no key is asked for")
    api_keys_file: str = setting("", "file with one API key per line, in addition to api_keys")
    admin_keys: str = setting("", "keys that may also see and command the whole cache (/kv/…), by commas")
    admin_keys_file: str = setting("", "file with one such key per line, in addition to admin_keys")
    tenant_keys: str = setting("", "keys with a cache of their own, of which alone they see, by commas")
    tenant_keys_file: str = setting("", "file with one such key per line, in addition to tenant_keys")
    redis_url: str = setting(
        "", "Redis that keeps resumable streams for all hosts, also from REDIS_URL; none: the pool directory"
    )
    stream_ttl_seconds: float = setting(
        300.0,
        "how long a resumable stream is kept after its end, or goes on without a reader",
        unit="seconds",
        minimum=1.0,
        maximum=86400.0,
    )
    stream_bytes: int = setting(
        1 << 20, "events kept of one resumable stream", unit="bytes", parse=parse_bytes, minimum=4096
    )
    max_streams: int = setting(
        1024, "resumable streams kept in the pool directory, or in Redis", unit="streams", minimum=1
    )
    cors_origins: str = setting("", "origins that browsers may call from, separated by commas; * for all")
    request_log: bool = setting(True, "log one line per request at its end")


def redis_url(config: FrontendConfig, environ: Mapping[str, str]) -> str:
    """Where Redis is; empty: there is none. REDIS_URL is what it is called on most platforms."""
    return config.redis_url or environ.get("REDIS_URL", "")


def split_list(text: str) -> list[str]:
    """The items of a comma-separated setting."""
    return [item.strip() for item in text.split(",") if item.strip()]


@dataclass(frozen=True)
class Keys:
    """All keys, from the settings and their files."""

    api: tuple[bytes, ...]
    admin: tuple[bytes, ...]
    tenant: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.api or self.admin or self.tenant)


def read_keys(config: FrontendConfig) -> Keys:
    """Raises SettingError if a file cannot be read or holds none, or one key has two meanings."""
    keys = Keys(
        api=_keys("--api-keys-file", config.api_keys, config.api_keys_file),
        admin=_keys("--admin-keys-file", config.admin_keys, config.admin_keys_file),
        tenant=_keys("--tenant-keys-file", config.tenant_keys, config.tenant_keys_file),
    )
    kinds = {"api_keys": set(keys.api), "admin_keys": set(keys.admin), "tenant_keys": set(keys.tenant)}
    for (one, first), (other, second) in itertools.combinations(kinds.items(), 2):
        if first & second:
            raise SettingError(f"a key is both in {one} and in {other} (or their files); want it in one")
    return keys


def _keys(flag: str, listed: str, file: str) -> tuple[bytes, ...]:
    keys = split_list(listed)
    if file:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{flag}={file!r} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise SettingError(f"{flag}={file!r} holds no key; want one per line")
        keys += found
    return tuple(key.encode() for key in keys)
