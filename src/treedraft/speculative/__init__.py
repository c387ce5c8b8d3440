"""The mathematics of tree speculation: pure functions over tensors. No model, no pool, no request, no config.

noise    the Gumbel noise of a request at a position
tree     the candidates of the draft levels, and the frontier that grows them
select   the pool's best candidates, as a tree to verify
verify   the walk down the verified tree
sampling a node's logits to its token
"""
