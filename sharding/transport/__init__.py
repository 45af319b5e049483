"""What moves between ranks, and how: collectives, the exchange of units, and checks of agreement.

Executes plans of `planning`, the only other folder it imports. Knows no parameter, no module and no
optimizer; never decides what moves or where to.
"""
