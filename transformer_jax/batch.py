"""What a model is fed: one pytree for language models, encoders and encoder-decoders."""

import jax
from flax import struct


@struct.dataclass
class Batch:
    """A batch of B rows. Absent parts are None and not in the program.

    tokens_BT: int32 inputs. targets_BT: int32, *already shifted*: targets[:, t] is what
    position t must predict. weights_BT: float32, 0 where a position does not count.
    source_BS, source_lengths_B: the encoder's side. lengths_B: real tokens in a row
    (None: all). positions_BT, source_positions_BS: integers for the position scheme
    (None: 0, 1, 2, …). segments_BT, source_segments_BS: packed documents see only
    their own segment.
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    weights_BT: jax.Array
    lengths_B: jax.Array | None = None
    positions_BT: jax.Array | None = None
    segments_BT: jax.Array | None = None
    source_BS: jax.Array | None = None
    source_lengths_B: jax.Array | None = None
    source_positions_BS: jax.Array | None = None
    source_segments_BS: jax.Array | None = None
