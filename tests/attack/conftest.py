"""How many attacks are tried: few in `make test`, many in `make attack`."""

import os


def count(quick: int, long: int) -> int:
    return long if os.environ.get("DDC_ATTACK") else quick
