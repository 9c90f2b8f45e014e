"""Eight simulated devices for every test, set before JAX starts."""

import os

import jax
import pytest

# In the environment too, for the processes that tests start: XLA's plugin for CUDA, which compiles
# for absent GPUs, must not look for GPUs here.
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each compiled program takes hundreds of memory maps, of which Linux gives a process 65530."""
    yield
    jax.clear_caches()
