"""Settings: a dataclass per process, each field from a flag, else `PAGEKEEPER_…` in the environment, else
its default.

A field is declared with `setting(...)`; `load(...)` reads it. A value that is not allowed is refused with
its name, the value and what is allowed. `docs/settings.md` lists every field (a test compares the two).
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Config = TypeVar("Config")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class SettingError(ValueError):
    """A value that is not allowed; the message names the setting, the value and what is allowed."""


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[Any] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a field. `parse` defaults to the type of `default`; `choices`, `minimum` and `maximum` bound
    its values.
    """
    parse = parse or (parse_bool if isinstance(default, bool) else type(default))
    metadata: dict[str, Any] = {"help": help, "unit": unit, "parse": parse, "choices": tuple(choices)}
    metadata |= {"minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: "dataclasses.Field[Any]") -> str:
    return "--" + field.name.replace("_", "-")


def env_name(field: "dataclasses.Field[Any]") -> str:
    return "PAGEKEEPER_" + field.name.upper()


def allowed(field: "dataclasses.Field[Any]") -> str:
    """The allowed values, in words."""
    meta = field.metadata
    if meta["choices"]:
        return "one of " + ", ".join(str(choice) for choice in meta["choices"])
    bounds = []
    if meta["minimum"] is not None:
        bounds.append(f"at least {meta['minimum']}")
    if meta["maximum"] is not None:
        bounds.append(f"at most {meta['maximum']}")
    kind = {parse_bytes: "a size such as 512M or 2G", parse_bool: "true or false", int: "a whole number"}
    kind.update({float: "a number", str: "text"})
    words = kind.get(meta["parse"], meta["parse"].__name__.replace("parse_", "").replace("_", " "))
    return " ".join([words, *([" and ".join(bounds)] if bounds else [])])


def read(field: "dataclasses.Field[Any]", text: str, source: str) -> Any:
    """Parse and check one value; SettingError names `source`, the value and what is allowed."""
    meta = field.metadata
    try:
        value = meta["parse"](text)
    except (ValueError, OverflowError):  # the latter: a size that is infinite, such as 1e999
        raise SettingError(f"{source}={text!r} is not allowed; want {allowed(field)}") from None
    low, high = meta["minimum"], meta["maximum"]
    wrong = meta["choices"] and value not in meta["choices"]
    wrong = wrong or (low is not None and not value >= low) or (high is not None and not value <= high)
    if wrong:
        raise SettingError(f"{source}={text!r} is not allowed; want {allowed(field)}")
    return value


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """One flag per field of `config`, with its unit, default and environment variable in the help."""
    for field in dataclasses.fields(config):
        meta = field.metadata
        unit = f" ({meta['unit']})" if meta["unit"] else ""
        default = field.default if field.default not in ("", None) else "none"
        text = f"{meta['help']}{unit}; {allowed(field)} [default: {default}; env: {env_name(field)}]"
        switch = isinstance(field.default, bool)
        flag_options: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        parser.add_argument(
            flag_name(field), dest=field.name, metavar="VALUE", help=text.replace("%", "%%"), **flag_options
        )


def resolve(config: type[Config], given: Mapping[str, str | None], environ: Mapping[str, str]) -> Config:
    """Build `config` from flag texts (`None`: not given) and the environment. Raises SettingError."""
    values = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        text = given.get(field.name)
        if text is not None:
            values[field.name] = read(field, text, flag_name(field))
        elif environ.get(env_name(field), "") != "":
            values[field.name] = read(field, environ[env_name(field)], env_name(field))
    return config(**values)


def load(config: type[Config], prog: str, argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read a process's settings; on a wrong one print one line and exit with status 2, as argparse does."""
    parser = argparse.ArgumentParser(prog=prog, description=config.__doc__, allow_abbrev=False)
    add_flags(parser, config)
    given = vars(parser.parse_args(argv))
    try:
        return resolve(config, given, environ)
    except SettingError as error:
        parser.error(str(error))


def to_argv(config: Any) -> list[str]:
    """The flags that reproduce `config`: what the supervisor passes to the processes that it starts."""
    argv = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            argv.append(f"{flag_name(field)}={str(value).lower() if isinstance(value, bool) else value}")
    return argv


def parse_bool(text: str) -> bool:
    """Raises ValueError unless `text` is a usual word for yes or no."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def parse_bytes(text: str) -> int:
    """`512M`, `2G`, `2GiB`, `1048576` → bytes (powers of 1024). Raises ValueError."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    suffix = digits[-1:] if digits[-1:].isalpha() else ""
    return int(float(digits.removesuffix(suffix)) * _UNITS[suffix]) if suffix in _UNITS else int("")
