"""Eight simulated devices for every test, set before JAX starts."""

import os

import jax

# In the environment too, for the processes that tests start: XLA's plugin for CUDA, which compiles
# for absent GPUs, must not look for GPUs here.
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8
