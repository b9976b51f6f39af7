"""Settings that the compiled core cannot count in are refused by name when the configuration is made."""

from __future__ import annotations

from typing import Any

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.errors import BadRequestError


@pytest.mark.parametrize("field", ["refinement_threshold", "pruning_threshold", "retrieval_max", "filter_stride"])
def test_a_setting_over_its_bound_is_refused_by_name(field: str) -> None:
    settings: dict[str, Any] = {field: 2**31 - 1}
    with pytest.raises(BadRequestError, match=field):
        IndexConfig(**settings)


def test_the_highest_settings_are_taken() -> None:
    SarpParameters(
        IndexConfig(
            refinement_threshold=2**31 - 2, pruning_threshold=2**31 - 2, retrieval_max=2**31 - 2, filter_stride=64
        )
    )
