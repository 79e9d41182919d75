"""Transformers as pure functions over pytrees, for experiments that can be trusted.

Shape letters, the same in array names, parameter names and einsum strings:

    B batch            T query length       S key length        D model width
    N query heads      K key/value heads    H width per head    F feed-forward width
    V vocabulary       P table positions    C position buckets  E experts
    L layers (stacked) R runs of a sweep    W beams of a row

The map, in the direction that imports point:

    errors, keys, config      what the user may get wrong; random keys by name; settings
    batch, data/              what a model is fed; tasks whose data lives on the device
    masks                     who may attend to whom, as a pytree evaluated on blocks
    numerics, rope_scaling, rope, positions, relative, norms, ffn, moe, scores, embedding
    dense, blockwise, banded, linear_attention      four ways to compute attention
    attention                 attend(): one function for self, cross, multi- and grouped-query
    ring                      the same for rows that are split over devices
    layers, encoder_decoder   layers and stacks: encoder, decoder, both
    importing                 parameters from the tensors of other libraries, and back
    samplers, cache, decode   from logits to ids; keys and values kept; generate and stream
    beam                      beam search, of one model or an ensemble
    exact                     the exact distribution over what a small model writes
    dependencies, meter       what an output depends on; what a function costs
    losses, optim, train      sums over tokens; optax chains; init_state, train_step, run
    topology, sharding        TPU slices that are not there; meshes by shape letter
    checkpoint, saver         Orbax with digests; which checkpoints stay
    collectives               what a compiled program says between devices
"""
