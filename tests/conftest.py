"""Eight simulated devices for every test, set before JAX starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8
