"""Settings: what is not allowed is refused by name, and never as a traceback."""

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.settings import SettingError, resolve


@pytest.mark.parametrize(
    "text", ["", " ", "G", "x", "1X", "-1", "0", "nan", "inf", "1e999", "1e999G", "9" * 5000]
)
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"--pool-bytes=.* is not allowed; want a size"):
        resolve(ManagerConfig, {"pool_bytes": text}, {})


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("1.5K", 1536), ("2GiB", 2 << 30), (" 4m ", 4 << 20)])
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert resolve(ManagerConfig, {"pool_bytes": text}, {}).pool_bytes == size
