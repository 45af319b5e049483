"""Parameters as users give them, and how each lies on this rank and on all others.

May import `sharding` alone; never reads or writes the values of a parameter.
"""
