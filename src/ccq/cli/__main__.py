"""`python -m ccq.cli`, which torchrun starts."""

import sys

from ccq.cli import main

if __name__ == "__main__":
    sys.exit(main())
