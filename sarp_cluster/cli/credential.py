"""`sarp credential`: a new token, and its entry for the file of credentials."""

from __future__ import annotations

import argparse
from pathlib import Path

from sarp_cluster.cli.terminal import Commands, whole_file
from sarp_cluster.wire.auth import (
    DEFAULT_TENANT,
    Credential,
    CredentialFile,
    digest,
    make_token,
    read_credentials,
)
from sarp_cluster.wire.codec import JSON, encode
from sarp_cluster.wire.node import read_private
from sarp_cluster.wire.operations import SCOPES


def add_command(commands: Commands) -> None:
    """Add it."""
    parser = commands.add_parser(
        "credential",
        help="make a credential: a token for whoever asks, a digest for the nodes",
        description="Make a token of 256 random bits. It is printed once and kept nowhere; the entry for the nodes' "
        "--credentials file has its digest only. With --append the entry is added to that file.",
    )
    parser.add_argument("name", metavar="NAME", help="for logs, and for the workers that it will own")
    parser.add_argument("--scope", action="append", required=True, choices=SCOPES[:3], help="may be repeated")
    parser.add_argument(
        "--tenant", action="append", metavar="NAME", help=f"may be repeated (default: {DEFAULT_TENANT})"
    )
    parser.add_argument(
        "--append", type=Path, metavar="FILE", help="add the entry to this file, which only its owner may read"
    )
    parser.set_defaults(run=credential_command)


def credential_command(arguments: argparse.Namespace) -> None:
    """Make one, and print or add it."""
    token = make_token()
    made = Credential(
        name=arguments.name,
        sha256=digest(token),
        tenants=arguments.tenant or [DEFAULT_TENANT],
        scopes=list(dict.fromkeys(arguments.scope)),
    )
    known = []
    path = arguments.append
    if path is not None and path.exists():
        known = read_credentials(read_private(path, "--append"))
    # As nodes will read it: what they would refuse is refused here.
    raw = encode(CredentialFile(credentials=[*known, made]), JSON)
    read_credentials(raw)
    print(f"token: {token}")
    if path is None:
        print(f"entry: {encode(made, JSON).decode()}")
        return
    with whole_file(path) as file:
        file.write(raw + b"\n")
    print(f"added to {path}; nodes read it when they start")
