"""Amounts on a command line: bytes, where GB and GiB differ, and tokens, which come in powers of two."""

import re

from ..errors import ConfigError
from ..memory_config import byte_count

_TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def bytes_of(text: str, flag: str) -> int:
    """``"60GiB"`` -> 64,424,509,440, ``"60GB"`` and ``"60G"`` -> 60,000,000,000: as in :class:`hfscale.MemoryConfig`.

    Raises:
        ConfigError: it is no positive number with a unit.
    """
    found = byte_count(text)
    if not found:
        raise ConfigError(
            f"{flag} {text} is no size: write a positive number and KiB, MiB or GiB (2^10, 2^20, 2^30), or KB, MB or "
            "GB (10^3, 10^6, 10^9), as 60GiB"
        )
    return found


def tokens_of(text: str, flag: str) -> int:
    """``"4M"`` -> 4,194,304.

    Raises:
        ConfigError: it is no positive number, alone or with K, M or G.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower())
    count = 0 if found is None else int(float(found[1]) * _TOKENS[found[2]])
    if not count:
        raise ConfigError(
            f"{flag} {text} is no number of tokens: write a positive number, alone or with K, M or G (2^10, 2^20, "
            "2^30), as 4194304 or 4M"
        )
    return count
