"""What lies where, and who computes what: decided here, from shapes and numbers of ranks alone.

Plans are frozen dataclasses of integers, the same on every rank. May import nothing of this package
but itself, and torch only for the modules that a structure is declared on; never communicates,
never allocates, never reads a device or data.
"""
