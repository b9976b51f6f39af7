"""Settings of all tests: how long hypothesis searches, and no blocking call on an event loop.

HYPOTHESIS_PROFILE=thorough searches for minutes instead of seconds; quick searches for seconds and does not shrink what
it finds, which can take minutes. A failure prints a blob that repeats it: put it above the test as
@reproduce_failure(...).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, Phase, settings

_ALWAYS = settings(
    deadline=None,  # a helper thread on a busy machine may take its time
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("fast", _ALWAYS, max_examples=60, stateful_step_count=30)
settings.register_profile("quick", settings.get_profile("fast"), phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.register_profile("thorough", _ALWAYS, max_examples=500, stateful_step_count=60)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Our code must not block an event loop: a call that would fails the test. Helper threads may wait for the disk."""
    with blockbuster_ctx(scanned_modules=["sarp_cluster", "shard", "router", "coordinator"]) as detector:
        yield detector
