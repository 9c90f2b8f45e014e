"""Switch Transformer training in JAX and Flax on a named device mesh."""

__version__ = "0.1.0"
