"""What bitsandbytes recommends as it is imported is left out; what else it says is not."""

import logging

import pytest

import hfscale._compat.bitsandbytes  # noqa: F401


def test_only_recommendations_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.warning(
        "Failed to load CPU gemm_4bit_forward: %s. Please make sure you already `pip install kernels`",
        "none",
    )
    log.warning("slow")
    log.error("broken")
    assert [record.message for record in caplog.records] == ["slow", "broken"]
