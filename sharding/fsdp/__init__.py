"""The FSDP core: flat buffers, buckets, the hooks around forward and backward, `fully_shard`.

May import all other folders of this package, in which nothing imports it. Runs layouts that
`planning` made; no optimizer is known here but by the structure it declares.
"""
