"""Facts of accelerators: complete, in XLA's words, and refused where they are none."""

from pathlib import Path

import pytest
from builders import sizes

from switchjax.errors import UserError
from switchjax.plan import hardware
from switchjax.plan.hardware import hardware_names, read_hardware, whole_nodes


def test_every_file_is_complete():
    names = hardware_names()
    assert {"a100", "h100", "h200", "b200", "v5e", "v5p", "v6e"} <= set(names)
    for name in names:
        card = read_hardware(name)
        assert card.between.bandwidth < card.inside.bandwidth < card.memory_bandwidth
        assert card.peak["float32"] < card.peak["bfloat16"] == card.peak["float16"]
        assert 16e9 < card.memory < 200e9
        assert (card.kind == "gpu") == (card.gpu is not None)


def test_what_xla_is_told():
    text = read_hardware("h200").target_config()
    for fact in (
        'name: "NVIDIA H200"',
        "core_count: 132",
        "memory_bandwidth: 4800000000000",
        "device_memory_size: 151397597184",
        "cuda_compute_capability { major: 9 minor: 0 }",
        "shared_memory_per_block_optin: 232448",
    ):
        assert fact in text
    assert "{ major: 8 minor: 0 }" in read_hardware("a100").target_config()


def test_nodes():
    h200 = read_hardware("h200")
    assert whole_nodes(h200, sizes(2, 8, 1)) == (2, 8)
    assert whole_nodes(h200, sizes(1, 4, 1)) == (1, 4)
    with pytest.raises(UserError, match="8 devices a node must divide its 12 devices"):
        whole_nodes(h200, sizes(3, 4, 1))


@pytest.fixture
def own(tmp_path):
    """A file of one's own, with one line of it replaced."""
    text = (Path(hardware.__file__).parent / "accelerators" / "h200.toml").read_text()

    def write(old="", new=""):
        assert old in text
        path = tmp_path / "mine.toml"
        path.write_text(text.replace(old, new, 1))
        return str(path)

    return write


def test_a_file_of_ones_own(own):
    changed = read_hardware(own("between] # nodes\nbandwidth = 50e9", "between]\nbandwidth = 25e9"))
    assert changed.between.bandwidth == 25e9
    assert changed.gpu == read_hardware("h200").gpu


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("memory_bandwidth = 4.8e12", "", "missing memory_bandwidth"),
        ("devices_per_node = 8", "devices_per_node = 0", "devices_per_node must be positive"),
        ("cores = 132", "kernels = 132", r"\[gpu\] unknown kernels"),
        ('kind = "gpu"', 'kind = "tpu"', "kind must be \"gpu\", with a section .* got 'tpu'"),
        ("float32 = 67e12", "", r"\[peak\] must have float32 and bfloat16"),
        ("[inside]", "[outside]", "missing bandwidth, latency"),
        ('kind = "gpu"', "kind = ", "hardware file .*mine.toml: "),
    ],
)
def test_a_file_that_is_none(own, old, new, answer):
    with pytest.raises(UserError, match=answer):
        read_hardware(own(old, new))


def test_unknown_hardware(tmp_path):
    with pytest.raises(UserError, match="no hardware 'h20'; did you mean h200\\? there are a100"):
        read_hardware("h20")
    with pytest.raises(UserError, match="none.toml: No such file"):
        read_hardware(str(tmp_path / "none.toml"))
