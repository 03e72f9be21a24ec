"""`python -m mrl`; import-safe, because processes that torch spawns import this module again."""

import sys

from mrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
