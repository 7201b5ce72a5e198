"""Constants of time that no data sheet has: fitted once on public runs, in a committed file.

``constants.json`` is written by ``scripts/bench/fit_planner.py`` from the runs of 1B and 3B models of the Ultra-Scale
Playbook's sweep (Tazi et al. 2025; nanotron on H100). Fractions are of what the data file of the machine says, so that
they carry over to other machines; seconds are of the host, and ``hfscale calibrate`` measures them.
"""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ...errors import ConfigError

CONSTANTS = Path(__file__).parent / "constants.json"


@dataclass(frozen=True)
class Constants:
    """What a stack makes of a machine.

    Attributes:
        products: fraction of the peak that matrix products reach.
        attention: likewise the attention kernel.
        memory: fraction of the memory's bandwidth.
        elementwise: bytes moved between the products, over those that :mod:`.layer_time` counts.
        loss_bytes: bytes moved for every logit, forward and backward.
        link: fraction of the link's bandwidth that collectives within a layer reach where nothing hides them.
        far_nic: fraction of the network's bandwidth that they reach where tensor ranks are on several nodes.
        far_latency: seconds per tensor rank that a layer waits besides, there.
        data_link: fraction of the link's bandwidth that collectives of gradients reach within a node.
        nic: fraction of the network's bandwidth.
        spread: by how much more a collective of gradients takes for every doubling of the nodes.
        hidden: seconds of gradients' all-reduce that a second of backward pass hides.
        hidden_shards: likewise where gradients are scattered and weights gathered again (ZeRO).
        latency: seconds per data rank of a step's all-reduces.
        latency_shards: likewise of its scatters and gathers.
        layer_host: seconds that the host needs to launch a layer's forward and backward pass.
        ends_host: likewise embedding, and head and loss, on the stages that have them.
        hop: seconds of handing over between two stages, forward and backward.
        step: seconds of a step's own: reading a batch, clipping, logging.
        update_bytes: bytes that the optimizer moves for every weight.
        sharpness: of the maximum of host and device; larger is sharper.
    """

    products: float
    attention: float
    memory: float
    elementwise: float
    loss_bytes: float
    link: float
    far_nic: float
    far_latency: float
    data_link: float
    nic: float
    spread: float
    hidden: float
    hidden_shards: float
    latency: float
    latency_shards: float
    layer_host: float
    ends_host: float
    hop: float
    step: float
    update_bytes: float
    sharpness: float


@cache
def fitted() -> Constants:
    """The constants of the committed file."""
    return read_constants(CONSTANTS)


def read_constants(path: Path) -> Constants:
    """Constants of a file, under ``"time"`` in it.

    Raises:
        ConfigError: some are missing.
    """
    found = json.loads(path.read_text()).get("time", {})
    missing = [field.name for field in fields(Constants) if field.name not in found]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    return Constants(**{field.name: float(found[field.name]) for field in fields(Constants)})
