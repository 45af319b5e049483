"""Where states and weights live, and in what: numbers, 8-bit codes, master copies.

May import `parameters`. Allocates and converts; never communicates, and knows no update rule.
"""
