"""Eight simulated devices for every test, set before JAX starts; what meshes differ by, at last."""

import importlib.metadata
import os

import jax
import pytest

# Same operations, other code: XLA of jax 0.10 compiles in a third of the time with its older code
# generator. On newer ones, where the tests of equality on every mesh run too, programs are compiled
# as a user's are. In the environment, for the processes that tests start.
if importlib.metadata.version("jax").startswith("0.10."):
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()

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


# Of each quantity that meshes were compared in: largest deviation, its limit, where it was.
_DEVIATIONS = pytest.StashKey[dict[str, tuple[float, float, str]]]()


@pytest.fixture(scope="session")
def report_deviations(pytestconfig):
    """Takes a comparison's name and rows; the end of the test report has the largest of each."""
    largest = pytestconfig.stash.setdefault(_DEVIATIONS, {})

    def report(name, rows):
        for row in rows:
            if not row.deviation <= largest.get(row.name, (-1.0,))[0]:
                largest[row.name] = (row.deviation, row.limit, name)

    return report


def pytest_terminal_summary(terminalreporter, config):
    """The table of them, where meshes were compared."""
    largest = config.stash.get(_DEVIATIONS, {})
    if not largest:
        return
    terminalreporter.section("largest deviation between meshes")
    terminalreporter.write_line(f"{'quantity':26} {'largest':>8} {'limit':>8}  where")
    for name, (deviation, limit, where) in largest.items():
        terminalreporter.write_line(
            f"{name:26} {deviation:8.1e} {limit:8.1e}  {where if deviation else ''}".rstrip()
        )
