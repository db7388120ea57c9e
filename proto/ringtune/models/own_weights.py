"""The weights of a block that train with ``adapter.config = "full"``, and that the scores of subnets look at.

These are the weights that are divided among the subnets of a block: rows of query, key, value and of the feed-forward
part, columns of both ways out. Norms and the biases of both ways out belong to no subnet and stay frozen.

Source: D2FT, section III-A.
"""

from __future__ import annotations

from ringtune.models.family import Config, Family, Shapes


def own_weights(family: Family, config: Config) -> Shapes:
    """The shapes of a block's own weights that may train, by their names inside the block.

    Example: ten tensors with 1,772,160 weights of a BERT of width 384 and inner width 1,536.

    Args:
        family: of the model.
        config: from ``read_config``.
    """
    return {name: shape for name, shape in family.block_shapes(config).items() if name in family.subnet_weights}
