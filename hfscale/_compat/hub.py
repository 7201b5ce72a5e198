"""Connections to the Hugging Face Hub."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

_SECONDS = 3.0


def hub_is_away() -> bool:
    """Return whether the Hub cannot be reached. The Hub's own client would retry for half a minute to find out."""
    place = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or getproxies():  # only the client can tell, or a proxy
        return False
    try:
        socket.create_connection((place.hostname or "", place.port or 443), _SECONDS).close()
    except OSError:
        return True
    return False
