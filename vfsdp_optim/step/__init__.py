"""What `step()` is made of: finite checks, long runs of parameters, units that travel to owners.

May import `parameters`, `states` and `algorithm`; knows no particular algorithm. All that a step
sends goes through here.
"""
