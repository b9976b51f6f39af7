"""`python -m sarp_cluster.cli` is `sarp`."""

import sys

from sarp_cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
