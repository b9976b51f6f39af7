"""The options of `sarp replay`, and the settings of an index they stand for."""

from __future__ import annotations

import argparse
from pathlib import Path

from sarp_cluster.config import IndexConfig
from sarp_cluster.replay.replay import WORKERS_DEFAULT

_DEFAULTS = IndexConfig()


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the traces and all options to `parser`."""
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="trace files: token traces (.ktrc.zst) or lines of block IDs (.jsonl.gz) of coding agents or Mooncake",
    )
    _add_run_arguments(parser.add_argument_group("what is replayed, and how it is shown"))
    _add_index_arguments(
        parser.add_argument_group("the index (SARP's parameters; none can make an answer wrong, only shorter)")
    )


def index_config(arguments: argparse.Namespace) -> IndexConfig:
    """The settings that the parsed options stand for. Raises BadRequestError for those that do not go together."""
    return IndexConfig(
        segment_blocks=arguments.segment_blocks,
        base_points=arguments.base_points,
        refinement_threshold=arguments.refinement_threshold,
        pruning_threshold=arguments.pruning_threshold,
        retrieval_max=arguments.retrieval_max,
        filter_bits=arguments.filter,
        refine=arguments.refine,
        filter=arguments.use_filter,
        prune=arguments.prune,
        strategy=arguments.strategy,
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store-dir",
        type=Path,
        metavar="DIR",
        help="where the stores go and stay, one directory a trace; one that is there is reopened and replayed upon, "
        "and the report says so (default: a temporary one, removed afterwards)",
    )
    group.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens a block, the unit of reuse; must divide the native size of a trace of block IDs "
        "(default: 16 for tokens, 64 for coding agents, 512 for Mooncake)",
    )
    group.add_argument(
        "--limit", type=positive, metavar="N", help="replay only the first N requests of each trace (default: all)"
    )
    group.add_argument(
        "--in-flight",
        type=positive,
        default=1,
        metavar="N",
        help="requests at work at the same time; those of one session keep their order (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        type=positive,
        default=WORKERS_DEFAULT,
        metavar="N",
        help="serving instances that hold the blocks; session i stays with instance i mod N (default: %(default)s)",
    )
    group.add_argument(
        "--durable",
        action="store_true",
        help="wait for each insert to be synced to the disk before the next request of its session; with several in "
        "flight, inserts share syncs (default: synced in the background)",
    )
    group.add_argument(
        "--no-oracle",
        dest="oracle",
        action="store_false",
        help="do not compare each answer with the exact one: less memory, and truer times with several in flight",
    )
    group.add_argument(
        "--no-candidates",
        dest="candidates",
        action="store_false",
        help="do not count the candidates of each match, which costs a second, unmeasured routing",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object a trace, on a line of its own, instead of the table"
    )


def _add_index_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy",
        choices=("wave", "stepwise"),
        default=_DEFAULTS.strategy,
        help="how a match reads: all its segments at once, or the paper's way, window by window (default: %(default)s)",
    )
    group.add_argument(
        "-S",
        "--segment-blocks",
        type=positive,
        default=_DEFAULTS.segment_blocks,
        metavar="N",
        help="S: consecutive blocks that share one record on disk: 4, 8, 16, 32 or 64; more means fewer reads and less "
        "memory, and more copying where sequences part (default: %(default)s)",
    )
    group.add_argument(
        "-R",
        "--base-points",
        type=positive,
        default=_DEFAULTS.base_points,
        metavar="N",
        help="R: routing points a segment has at first, evenly spaced, where a query finds it (default: %(default)s)",
    )
    group.add_argument(
        "--tau",
        "--refinement-threshold",
        dest="refinement_threshold",
        type=positive,
        default=_DEFAULTS.refinement_threshold,
        metavar="N",
        help="τ: segments under one routing key before more routing points are made there (default: %(default)s)",
    )
    group.add_argument(
        "--pruning-threshold",
        type=positive,
        default=_DEFAULTS.pruning_threshold,
        metavar="N",
        help="a later routing point is left out while at most N segments share the one before (default: %(default)s)",
    )
    group.add_argument(
        "--retrieval-max",
        type=positive_or_none,
        default=_DEFAULTS.retrieval_max,
        metavar="N",
        help='candidates a match may retrieve in a window, or "none" for no cap: then nothing is lost, and a match may '
        "read more (default: %(default)s)",
    )
    group.add_argument(
        "--filter",
        type=int,
        choices=(64, 128),
        default=_DEFAULTS.filter_bits,
        help="bits of a candidate's fingerprint, which tells how far it may match before it is read: 128 looks at each "
        "of the next 16 blocks, 64 (the paper's) at each second one (default: %(default)s)",
    )
    group.add_argument(
        "--no-filter",
        dest="use_filter",
        action="store_false",
        help="choose candidates without looking at fingerprints (the paper's ablation)",
    )
    group.add_argument(
        "--no-refine",
        dest="refine",
        action="store_false",
        help="never make more routing points, however many segments share one (the paper's ablation)",
    )
    group.add_argument(
        "--no-prune",
        dest="prune",
        action="store_false",
        help="keep every base routing point, even where the one before it suffices (the paper's ablation)",
    )


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def positive_or_none(text: str) -> int | None:
    """A whole number above 0, or None for the word "none", for argparse."""
    return None if text.lower() == "none" else positive(text)
