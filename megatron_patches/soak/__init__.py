"""A long soak: one training, broken at random again and again, that must end like an unbroken one.

`campaign` is the loop; `faults` and `damage` break things; `promises` are what docs/reliability.md
says and this package checks; `journal` keeps what happened; `table` tells it.
"""
