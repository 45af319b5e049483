"""State dicts: what one must agree with before it is loaded, and conversion between precisions.

May import everything below the optimizer; never writes into one.
"""
