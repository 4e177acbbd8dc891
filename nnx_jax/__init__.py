"""nnx_jax: a JAX-native SPMD trainer."""
