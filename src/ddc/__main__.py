"""`python -m ddc`: the command `ddc`."""

import sys

from ddc.cli import main

sys.exit(main())
