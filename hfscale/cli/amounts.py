"""Parse amounts on the command line: bytes, with GB unlike GiB, and tokens, in powers of two."""

import re

from ..config.memory import byte_count
from ..errors import ConfigError

_TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def bytes_of(text: str, flag: str) -> int:
    """Parse a size, in the units of :class:`hfscale.MemoryConfig`: ``"60GB"`` and ``"60G"`` -> 60,000,000,000."""
    found = byte_count(text)
    if not found:
        raise ConfigError(
            f"{flag} {text} is no size: write a positive number and KiB, MiB or GiB (2^10, 2^20, 2^30), or KB, MB "
            "or GB (10^3, 10^6, 10^9), as 60GiB"
        )
    return found


def tokens_of(text: str, flag: str) -> int:
    """Parse a number of tokens: ``"4M"`` -> 4,194,304."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower())
    count = 0.0 if found is None else float(found[1]) * _TOKENS[found[2]]
    if not count or not count.is_integer():
        raise ConfigError(
            f"{flag} {text} is no number of tokens: use a whole number of at least 1, alone or with K, M or G "
            "(2^10, 2^20, 2^30), as 4194304 or 4M"
        )
    return int(count)


def gigabytes_of(text: str, flag: str) -> float:
    """Parse a size in units of 10^9 bytes: ``"80"`` and ``"80GB"`` -> 80, ``"80GiB"`` -> 85.899."""
    alone = text.strip()
    return bytes_of(f"{alone}GB" if alone[-1:].isdigit() else alone, flag) / 1e9
