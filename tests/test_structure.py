"""The house: who may import whom, where a few words may stand, and how long things may get."""

import ast
import re
from pathlib import Path

import pytest

from switchjax.mesh import mesh_names, read_mesh

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "switchjax"
FILES = sorted(PACKAGE.rglob("*.py"))

# DESIGN, section 4: a module imports only from rows above its own. A folder stands for all in it.
ROWS = (
    (
        "arguments",
        "axes",
        "batch",
        "config",
        "distributed_config",
        "errors",
        "generate_config",
        "presets",
    ),
    ("cluster", "ending", "layout", "mesh", "processes", "remat", "scaling", "zero"),
    ("moe.grouped", "moe.pieces", "moe.products", "moe.routing", "moe.varying", "nn"),
    ("moe.dispatch",),
    ("moe.experts", "moe.hot"),
    ("moe.layer",),
    ("model",),
    (
        "data",
        "expert_cache",
        "expert_load",
        "loss",
        "metrics",
        "offload",
        "optim",
        "runlog",
        "sampling",
        "update",
    ),
    ("checkpoint", "saved_steps", "state", "tensor_files", "weights"),
    ("beam", "decode", "setup", "step"),
    ("evaluate", "generate", "interop", "invariance", "reporting", "stopping"),
    ("train", "verify"),
    ("plan",),
    ("cli",),
)
# Within a row: these may be imported by their neighbours.
NEIGHBOURS = {
    "arguments": {"errors"},
    "presets": {"config"},
    "config": {"errors"},
    "distributed_config": {"config"},
    "ending": {"processes"},
    "cluster": {"ending", "processes"},
    "generate_config": {"config", "errors"},
    "layout": {"mesh"},
    "zero": {"layout"},
    "moe.dispatch": {"moe.dispatch"},
    "moe.grouped": {"moe.pieces", "moe.products", "moe.varying"},
    "nn": {"nn"},
    "data": {"data"},
    "runlog": {"expert_load"},
    "update": {"offload", "optim"},
    "checkpoint": {"saved_steps"},
    "state": {"saved_steps"},
    "weights": {"saved_steps", "tensor_files"},
    "beam": {"decode"},
    "interop": {"interop"},
    "plan": {"plan"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def place_of(module: str) -> tuple[int, str]:
    """Row of a module, and the entry of the table that it belongs to."""
    for row, entries in enumerate(ROWS):
        for entry in entries:
            if module == entry or module.startswith(f"{entry}."):
                return row, entry
    raise AssertionError(f"{module} has no row in the table")


def imported_modules(path: Path) -> set[str]:
    """Modules of this package, wherever in the file they are imported."""
    known = {module_of(p) for p in FILES}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {n.name for n in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                is_module = whole.removeprefix("switchjax.") in known
                found.add(whole if is_module else node.module)
    return {n.removeprefix("switchjax.") for n in found if n.startswith("switchjax.")}


PACKAGES = {"", "moe", "moe.dispatch", "nn", "data", "plan", "interop"}  # __init__ files
MODULES = [path for path in FILES if path.name != "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_modules_import_only_from_rows_above(path):
    row, entry = place_of(module_of(path))
    for other in imported_modules(path):
        other_row, other_entry = place_of(other)
        allowed = other_row < row or other_entry in NEIGHBOURS.get(entry, ())
        assert allowed, f"{module_of(path)} must not import {other}"


def test_packages_import_nothing():
    """What `import switchjax.moe` runs is the file that is imported, and no other."""
    inits = [path for path in FILES if path.name == "__init__.py"]
    assert {module_of(p).removeprefix("__init__") for p in inits} == PACKAGES
    for path in inits:
        assert not imported_modules(path), path


def code_of(path: Path) -> str:
    """The file's code, without comments and docstrings."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(path.read_text())))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        # `nn/init.py` names the type of a spec that it is handed, and makes none.
        (r"\bPartitionSpec\b|\bP\(", {"layout"}),
        (r"\bimport .*\bP\b", {"layout", "nn.init"}),
        (r"\bshard_map\(", {"moe.hot", "moe.layer", "zero"}),
        (r"\ball_to_all\(", {"moe.dispatch.wire"}),
        (r"\bpsum_scatter\(", {"moe.dispatch.wire", "zero"}),
        (r"\bragged_all_to_all\(", {"moe.dispatch.ragged"}),
        (r"\ball_gather\(", {"moe.dispatch.wire", "moe.dispatch.ragged", "zero"}),
        (r"\bppermute\(", set()),
        (r"\bjax\.(local_)?devices\b|\bdevice_count\b", {"mesh"}),
        (r"\bcheck_vma\b|\bcheck_rep\b", set()),
        (r"\bnnx\.(jit|grad|scan|vmap|Optimizer|Rngs|with_partitioning)\b|\bsow\b", set()),
        (r"\blogical_axis_rules\b|\bwith_sharding_constraint\b", set()),
        (r"\bargparse\b|\btyro\b|\bsys\.argv\b", {"arguments", "cli"}),
        (r"\bset_mesh\(", {"train", "evaluate", "generate", "verify", "plan.absent"}),
    ],
)
def test_words_stand_only_in_their_place(pattern, places):
    found = {module_of(path) for path in FILES if re.search(pattern, code_of(path))}
    assert found == places


def test_specs_in_nn_are_types_alone():
    tree = ast.parse((PACKAGE / "nn" / "init.py").read_text())
    arguments = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)]
    typed = sum(isinstance(node, ast.Name) and node.id == "P" for node in arguments)
    used = sum(isinstance(node, ast.Name) and node.id == "P" for node in ast.walk(tree))
    assert typed == used > 0


def test_names_say_something():
    for path in FILES:
        assert path.stem not in {"utils", "util", "common", "helpers", "helper", "lib", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 80, node.name


@pytest.mark.parametrize(
    "mesh_name", [name for name in mesh_names() if read_mesh(name).num_devices <= 16]
)
def test_every_mesh_of_one_machine_has_an_experiment(mesh_name):
    """At most 30 lines: the claim, the command, what to expect, and the config."""
    path = ROOT / "experiments" / f"{mesh_name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 30
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree)
    assert f"python experiments/{mesh_name}.py" in docstring
    assert mesh_name in text.replace(docstring, "")
    names = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets}
    assert "CONFIG" in names


def test_experiments_do_not_import_each_other():
    names = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    for path in (ROOT / "experiments").glob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        imports += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        assert not {i.split(".")[-1] for i in imports if "switchjax" not in i} & names, path


def test_public_names_have_a_docstring():
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module_of(path)}.{node.name}"


def test_ci_runs_the_test_command_of_the_readme():
    command = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "'.[test]'" in line
    )
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readme_has_a_line_for_every_module():
    readme = (ROOT / "README.md").read_text()
    listed = {"data", "interop", "moe", "nn", "plan"}
    for path in FILES:
        name = path.relative_to(PACKAGE)
        if path.name != "__init__.py" and name.parts[0] not in listed:
            assert f"\n  {path.name} " in readme, name
