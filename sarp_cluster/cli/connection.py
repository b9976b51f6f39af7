"""Which cluster a command talks to, and as whom."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path
from typing import Final

from sarp_cluster.client import AsyncClient
from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire.node import read_private

URL_DEFAULT: Final = "http://127.0.0.1:7100"


def add_connection_arguments(
    parser: argparse._ActionsContainer, *, url_default: str | None = URL_DEFAULT, url_help: str = ""
) -> None:
    """Add --url and who asks."""
    parser.add_argument(
        "--url",
        metavar="URL",
        default=url_default and os.environ.get("SARP_URL", url_default),
        help=url_help
        or "routers, divided by commas: http://HOST:PORT or sarp://HOST:PORT, with TLS https:// or sarps:// "
        f"(default: $SARP_URL, or {URL_DEFAULT})",
    )
    parser.add_argument(
        "--credential-file",
        type=Path,
        metavar="FILE",
        help="a file with nothing but the token, for its owner only (default: $SARP_CREDENTIAL, or none)",
    )
    parser.add_argument("--tenant", default="", metavar="NAME", help="for a credential with several")
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificates to trust with https (default: the system's)"
    )
    parser.add_argument("--direct", action="store_true", help="send matches and changes straight to the shards")


def client_of(arguments: argparse.Namespace) -> AsyncClient:
    """A client for the parsed options."""
    token = os.environ.get("SARP_CREDENTIAL", "")
    if arguments.credential_file is not None:
        token = read_private(arguments.credential_file, "--credential-file").decode().strip()
    tls = None
    if arguments.ca is not None:
        try:
            tls = ssl.create_default_context(cafile=str(arguments.ca))
        except OSError as error:
            raise BadRequestError(f"--ca: {arguments.ca}: {error}", field="ca") from error
    return AsyncClient(arguments.url, credential=token, tenant=arguments.tenant, direct=arguments.direct, tls=tls)
