"""What an installed package holds."""

import subprocess
import sys
import zipfile
from pathlib import Path

from switchjax.mesh import mesh_names
from switchjax.plan.hardware import hardware_names

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_meshes(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        facts = {name for name in names if name.endswith(".toml")}
        assert facts == {
            *(f"switchjax/meshes/{name}.toml" for name in mesh_names()),
            *(f"switchjax/plan/accelerators/{name}.toml" for name in hardware_names()),
        }
        modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("switchjax/**/*.py")}
        assert modules == {name for name in names if name.endswith(".py")}
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert b"switchjax = switchjax.cli:main" in archive.read(entry)

    # An installed package finds its own meshes, not those of a checkout.
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    program = (
        "import switchjax.mesh as mesh; print(mesh.__file__, mesh.read_mesh('data4_expert2').sizes)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split(maxsplit=1)[0] == str(installed / "switchjax" / "mesh.py")
    assert ended.stdout.endswith("(4, 2, 1)\n")
