"""RaggedDTensor, the DTensor that users see, its placement, and the operations it is right under.

May import `transport`, whose axes its collectives run along. Knows no bucket and no module; an
operation that is not listed here raises and never answers from this rank's piece.
"""
