"""PEFT is imported without what bitsandbytes recommends meanwhile, and loggers stay as they were."""

import logging

import pytest

from hfscale._host.bitsandbytes import quiet_import


def test_only_recommendations_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quiet_import():
        log.warning("pip install another package")
        log.error("broken")
    log.warning("used")
    assert [record.message for record in caplog.records] == ["broken", "used"]
