"""Settings of an index from a command line."""

from __future__ import annotations

import pytest

from sarp_cluster.config import IndexConfig, read_index_config
from sarp_cluster.errors import BadRequestError


def test_settings_are_read_by_their_types() -> None:
    assert read_index_config([]) == IndexConfig()
    texts = ["retrieval_max=none", "refine=false", "reclaim_ratio=2.5", "strategy=stepwise", "pruning_threshold=7"]
    wanted = IndexConfig(retrieval_max=None, refine=False, reclaim_ratio=2.5, strategy="stepwise", pruning_threshold=7)
    assert read_index_config(texts) == wanted
    assert read_index_config(["retrieval_max=5", "retrieval_max=4"]).retrieval_max == 4


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("retrieval_max", "retrieval_max"),
        ("=3", "index"),
        ("unheard_of=3", "unheard_of"),
        ("retrieval_max=many", "retrieval_max"),
        ("retrieval_max=0", "retrieval_max"),
        ("pruning_threshold=none", "pruning_threshold"),
        ("strategy=other", "strategy"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_index_config([text])
    assert caught.value.field == field
    assert field in str(caught.value)
