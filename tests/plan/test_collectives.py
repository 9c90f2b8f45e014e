"""The reader of compiled programs: every notation, and programs whose bytes are known."""

import builders
import jax
import jax.numpy as jnp
import pytest
from jax import Array, P, lax

from switchjax.axes import AXES
from switchjax.mesh import make_submesh
from switchjax.plan.collectives import Collective, bytes_by_kind_and_axes, collectives
from switchjax.plan.groups import axes_of, replica_groups
from switchjax.plan.hlo import array_types, in_scope, parse, tuple_items
from switchjax.plan.schedule import overlapped_share, overlaps

CUBE = builders.sizes(2, 2, 2)
EVERY_AXES = [
    ("data",),
    ("expert",),
    ("model",),
    ("data", "expert"),
    ("data", "model"),
    ("expert", "model"),
    ("data", "expert", "model"),
]


def program(*lines: str) -> str:
    """A program of one computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule written\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def only(text: str, shape=CUBE) -> Collective:
    (found,) = collectives(text, shape)
    return found


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2,'c'=1] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}", [[3, 0], [1, 2]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("@mesh<a=2,b=2> {a}", [[0, 2], [1, 3]]),
    ],
)
def test_notations_of_groups(notation, groups):
    found = replica_groups(f", channel_id=1, replica_groups={notation}, dimensions={{0}}", 4)
    assert [list(group) for group in found] == groups


def test_groups_that_cannot_be_read_are_an_error():
    with pytest.raises(ValueError, match="no replica groups"):
        replica_groups(", channel_id=1, replica_groups=<8 devices>", 8)
    with pytest.raises(ValueError, match="device 8 is not one of mesh test"):
        axes_of([[0, 8]], CUBE)


def test_axes_are_those_along_which_members_differ():
    assert axes_of([[0, 4], [1, 5]], CUBE) == ("data",)
    assert axes_of([[0, 1], [2, 3]], CUBE) == ("model",)
    assert axes_of([[0, 3], [1, 2]], CUBE) == ("expert", "model")
    wide = builders.sizes(2, 8, 1)
    assert axes_of([range(8), range(8, 16)], wide) == ("expert",)
    assert axes_of([range(16)], wide) == ("data", "expert")


def test_a_group_may_be_a_part_of_an_axis():
    text = program(
        "%p = f32[8]{0} parameter(0)",
        "%x = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
    )
    found = only(text, builders.sizes(1, 8, 1))
    assert (found.axes, found.group_size) == (("expert",), 2)


# Arrays of 64 float32 on a device; pairs of `expert`. Wire bytes are those of the definitions.
WRITTEN = {
    "all-to-all": ("f32[64]{0} all-to-all(%p)", 256, 128),
    "tupled all-to-all": ("(f32[32]{0}, f32[32]{0}) all-to-all(%p, %p)", 256, 128),
    "all-to-all-start": ("((f32[64]{0}), f32[64]{0}) all-to-all-start(%p)", 256, 128),
    "ragged-all-to-all": (
        "f32[80]{0} ragged-all-to-all(%p, %out, %n, %n, %n, %n)",
        256,
        256,
    ),
    "ragged-all-to-all-start": (
        "((f32[64]{0}, f32[80]{0}, s32[2]{0}, s32[2]{0}, s32[2]{0}, s32[2]{0}), f32[80]{0}) "
        "ragged-all-to-all-start(%p, %out, %n, %n, %n, %n)",
        256,
        256,
    ),
    "all-gather": ("f32[128]{0} all-gather(%p)", 512, 256),
    "all-gather-start": ("(f32[64]{0}, f32[128]{0}) all-gather-start(%p)", 512, 256),
    "several all-gather-start": (
        "((f32[32]{0}, bf16[64]{0}), (f32[64]{0}, bf16[128]{0})) all-gather-start(%p, %q)",
        512,
        256,
    ),
    "reduce-scatter": ("f32[32]{0} reduce-scatter(%p)", 256, 128),
    "reduce-scatter-start": ("((f32[64]{0}), f32[32]{0}) reduce-scatter-start(%p)", 256, 128),
    "all-reduce": ("f32[64]{0} all-reduce(%p)", 256, 256),
    "all-reduce-start": ("f32[64]{0} all-reduce-start(%p)", 256, 256),
    "several all-reduce-start": (
        "(f32[32]{0}, bf16[64]{0:T(8,128)(2,1)}) all-reduce-start(%p, %q)",
        256,
        256,
    ),
    "wrapped all-reduce-start": ("((f32[64]{0}), f32[64]{0}) all-reduce-start(%p)", 256, 256),
    "collective-broadcast": ("f32[64]{0} collective-broadcast(%p)", 256, 256),
    "float8": ("f8e4m3fn[256]{0} all-to-all(%p)", 256, 128),
    "int4": ("s4[512]{0} all-to-all(%p)", 256, 128),
    "pred": ("pred[256]{0} all-to-all(%p)", 256, 128),
}


@pytest.mark.parametrize("instruction", WRITTEN)
def test_bytes_of_each_kind(instruction):
    call, size, wire = WRITTEN[instruction]
    text = program(
        "%p = f32[64]{0} parameter(0)",
        f"ROOT %x.1 = {call}, channel_id=1, replica_groups={{{{0,2}},{{1,3}},{{4,6}},{{5,7}}}}, "
        'use_global_device_ids=true, metadata={op_name="jit(f)/shard_map/dispatch/(all-to-all(" '
        'source_file="/a/b.py" source_line=7}, backend_config={"is_sync":false}',
    )
    found = only(text)
    assert found.kind in instruction or instruction in ("float8", "int4", "pred")
    assert (found.axes, found.group_size) == (("expert",), 2)
    assert (found.bytes, found.wire_bytes) == (size, wire)
    assert (found.runs, found.conditional) == (1, False)
    assert (found.phase, found.source) == ("dispatch", "/a/b.py:7")


def test_types():
    found = only(
        program(
            "%p = f32[64]{0} parameter(0)",
            "%x = (f32[3]{0}, /*index=1*/bf16[5,2]{1,0}, f32[]) all-reduce(%p, %p, %p), "
            "replica_groups={}, to_apply=%add",
        )
    )
    assert (found.dtypes, found.elements, found.bytes) == (("f32", "bf16"), 14, 36)
    assert found.axes == AXES and found.wire_bytes == 2 * 36 * 7 / 8
    nested = "((f32[2]{0}, s32[]), bf16[3,4]{1,0:T(8,128)(2,1)}, u32[])"
    assert tuple_items(nested) == ["(f32[2]{0}, s32[])", "bf16[3,4]{1,0:T(8,128)(2,1)}", "u32[]"]
    assert [a.shape for a in array_types(nested)] == [(2,), (), (3, 4), ()]


@pytest.mark.parametrize("form", ["f32[64]{0} collective-permute", "start"])
def test_permutes(form):
    if form == "start":
        form = "(f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start"
    line = f"%x = {form}(%p), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}},{{2,2}}}}"
    found = only(program("%p = f32[64]{0} parameter(0)", line))
    assert (found.kind, found.axes, found.group_size) == ("collective-permute", ("model",), 2)
    assert found.bytes == found.wire_bytes == 256


def test_what_stays_at_home_is_left_out():
    text = program(
        "%p = f32[64]{0} parameter(0)",
        "%a = f32[64]{0} all-to-all(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "%b = f32[64]{0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}",
        "%c = f32[64]{0} all-reduce(%b), replica_groups=mesh['a'=1,'b'=8] {'a'}",
        '%d = f32[64]{0} fusion(%c), metadata={op_name="all-reduce(%p), replica_groups={{0,1}}"}',
    )
    assert collectives(text, CUBE) == []


def test_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_f {\n}")
    with pytest.raises(ValueError, match="not an instruction"):
        parse("ENTRY %main (p: f32[]) -> f32[] {\n  nonsense\n}")
    with pytest.raises(ValueError, match="ends inside"):
        parse("ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n")


def test_scopes_are_found_under_transforms():
    assert in_scope("jit(f)/experts/dot", "experts")
    assert in_scope("jit(f)/transpose(jvp(experts))/dot", "experts")
    assert in_scope("jit(f)/cond/branch_1_fun/fallback/all_gather", "fallback")
    assert not in_scope("jit(f)/my_experts/dot", "experts")
    assert not in_scope("jit(experts_of)/dot", "experts")


def nested_program(trip_count: str) -> str:
    """A loop, and in its body a branch, an async computation and a loop of three."""
    groups = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    return f"""HloModule written, is_scheduled=true

%rare (a: f32[64]) -> f32[64] {{
  %a = f32[64]{{0}} parameter(0)
  ROOT %gathered = f32[64]{{0}} all-gather(%a), {groups}, dimensions={{0}}
}}

%usual (b: f32[64]) -> f32[64] {{
  ROOT %b = f32[64]{{0}} parameter(0)
}}

%wrapped (c: f32[64]) -> f32[64] {{
  %c = f32[64]{{0}} parameter(0)
  ROOT %exchange = f32[64]{{0}} all-to-all(%c), {groups}, dimensions={{0}}
}}, execution_thread="parallel"

%inner (d: f32[64]) -> f32[64] {{
  %d = f32[64]{{0}} parameter(0)
  ROOT %sum = f32[64]{{0}} all-reduce(%d), {groups}, to_apply=%add
}}

%outer (e: f32[64]) -> f32[64] {{
  %e = f32[64]{{0}} parameter(0)
  %start = ((f32[64]{{0}}), f32[64]{{0}}, u32[]) async-start(%e), calls=%wrapped
  %done = f32[64]{{0}} async-done(%start)
  %branch = f32[64]{{0}} conditional(%i, %e, %e), branch_computations={{%usual, %rare}}
  ROOT %loop = f32[64]{{0}} while(%e), condition=%go_on, body=%inner, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}

%go_on (f: f32[64]) -> pred[] {{
  ROOT %f = pred[] parameter(0)
}}

ENTRY %main (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %loop.1 = f32[64]{{0}} while(%p), condition=%go_on, body=%outer{trip_count}
}}
"""  # noqa: E501


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%usual, %rare}", "true_computation=%rare, false_computation=%usual"],
)
def test_runs_multiply_through_loops_and_branches_are_marked(branches):
    text = nested_program(', backend_config={"known_trip_count":{"n":"5"}}')
    text = text.replace("branch_computations={%usual, %rare}", branches)
    found = {c.kind: (c.runs, c.conditional) for c in collectives(text, CUBE)}
    assert found == {
        "all-to-all": (5, False),
        "all-gather": (5, True),
        "all-reduce": (15, False),
    }
    assert bytes_by_kind_and_axes(collectives(text, CUBE)) == {
        ("all-to-all", ("model",)): 5 * 128,
        ("all-gather", ("model",)): 5 * 128,
        ("all-reduce", ("model",)): 15 * 256,
    }


def test_a_loop_of_unknown_length_has_no_total():
    found = collectives(nested_program(""), CUBE)
    assert [c.runs for c in found] == [None, None, None]
    with pytest.raises(ValueError, match="all-to-all .*did not know"):
        bytes_by_kind_and_axes(found)


SCHEDULED = """HloModule written, is_scheduled=true

%gemm (a: bf16[8,16], b: bf16[16,4]) -> f32[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/experts/dot_general"}
}

ENTRY %main (p: bf16[64]) -> bf16[64] {
  %p = bf16[64]{0} parameter(0)
  %x = bf16[8,16]{1,0} parameter(1)
  %y = bf16[16,4]{1,0} parameter(2)
  %first = ((bf16[64]{0}), bf16[64]{0}) all-to-all-start(%p), replica_groups={{0,1},{2,3}}, backend_config={"is_sync":false}
  %h = f32[8,4]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  %h.1 = (f32[8,4]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/attention/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %first.1 = bf16[64]{0} all-to-all-done(%first)
  %second = ((bf16[32]{0}), bf16[32]{0}) all-to-all-start(%p), replica_groups={{0,1},{2,3}}, backend_config={"is_sync":false}
  %second.1 = bf16[32]{0} all-to-all-done(%second)
  %h.2 = f32[8,4]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  %third = ((bf16[32]{0}), bf16[32]{0}) all-to-all-start(%p), replica_groups={{0,1},{2,3}}, backend_config={"is_sync":true}
  %h.3 = f32[8,4]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  ROOT %third.1 = bf16[32]{0} all-to-all-done(%third)
}
"""  # noqa: E501


def test_matmuls_between_start_and_done():
    """8·16·4 multiply-adds in each; half of the bytes have an expert's under way."""
    found = overlaps(SCHEDULED, builders.sizes(2, 1, 2))
    flops = [(o.matmul_flops, o.expert_flops) for o in found]
    assert flops == [(2 * 1024, 1024), (0, 0), (0, 0)]
    assert overlapped_share(found) == 0.5


def test_matmuls_while_a_wrapped_collective_is_under_way():
    call = "%start = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(%e), calls=%wrapped\n"
    gemm = SCHEDULED[SCHEDULED.index("%gemm") : SCHEDULED.index("ENTRY")]
    matmul = "  %h = f32[8,4]{1,0} fusion(%e, %e), kind=kCustom, calls=%gemm\n"
    text = nested_program(', backend_config={"known_trip_count":{"n":"5"}}')
    text = text.replace(call, call + matmul).replace("%rare (", gemm + "%rare (")
    (found,) = overlaps(text, CUBE)
    assert (found.expert_flops, found.collective.runs) == (1024, 5)


def compiled(function, shape: tuple[int, ...], *more: jax.ShapeDtypeStruct) -> list[Collective]:
    """What `function` sends, given an array of this shape on each of the 8 devices."""
    mesh = make_submesh(CUBE)
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, P(AXES))
        x = jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), jnp.float32, sharding=sharding)
        specs = (P(AXES), *(P() for _ in more))
        mapped = jax.shard_map(function, in_specs=specs, out_specs=P(AXES), check_vma=False)
        text = jax.jit(mapped).lower(x, *more).compile().as_text()
    return collectives(text, CUBE)


@pytest.mark.parametrize("axes", EVERY_AXES, ids="+".join)
def test_compiled_collectives_on_every_axis(axes):
    """One of each kind, 8 · 6 float32 going in, over groups of n devices."""
    n, size = 2 ** len(axes), 8 * 6 * 4

    def send(x_86: Array) -> Array:
        x_86 = jnp.sin(lax.all_to_all(x_86, axes, 0, 0, tiled=True))
        x_86 = jnp.sin(lax.psum(x_86, axes))
        gathered = jnp.sin(lax.all_gather(x_86, axes, tiled=True))
        x_86 = jnp.sin(lax.psum_scatter(gathered, axes, tiled=True))
        return lax.ppermute(x_86, axes, [(i, (i + 1) % n) for i in range(n)])

    found = {c.kind: c for c in compiled(send, (8, 6))}
    assert {c.axes for c in found.values()} == {axes}
    assert {c.group_size for c in found.values()} == {n}
    assert {c.runs for c in found.values()} == {1}
    away = (n - 1) / n
    assert {kind: (c.bytes, c.wire_bytes) for kind, c in found.items()} == {
        "all-to-all": (size, size * away),
        "all-reduce": (size, 2 * size * away),
        "all-gather": (n * size, n * size * away),
        "reduce-scatter": (n * size, n * size * away),
        "collective-permute": (size, size),
    }
    assert all(__file__ in c.source for c in found.values())


def test_a_scan_counts_as_often_as_it_runs():
    def send(x_86: Array) -> Array:
        def layer(x_86: Array, _: None) -> tuple[Array, None]:
            with jax.named_scope("dispatch"):
                x_86 = lax.all_to_all(x_86, "expert", 0, 0, tiled=True)

            def inner(x_86: Array, _: None) -> tuple[Array, None]:
                return jnp.sin(lax.psum(x_86, "model")), None

            return lax.scan(inner, x_86, length=3)[0], None

        return lax.scan(layer, x_86, length=5)[0]

    found = compiled(send, (8, 6))
    assert {(c.kind, c.axes, c.runs, c.phase) for c in found} == {
        ("all-to-all", ("expert",), 5, "dispatch"),
        ("all-reduce", ("model",), 15, ""),
    }
    assert bytes_by_kind_and_axes(found) == {
        ("all-to-all", ("expert",)): 5 * 192 / 2,
        ("all-reduce", ("model",)): 15 * 192,
    }


def test_a_branch_is_marked_and_a_fallback_can_be_left_out():
    def send(x_86: Array, crowded: Array) -> Array:
        def usual(x_86: Array) -> Array:
            return lax.all_to_all(x_86, "expert", 0, 0, tiled=True)

        @jax.named_scope("fallback")
        def exact(x_86: Array) -> Array:
            return lax.all_gather(x_86, "expert").sum(axis=0)

        return lax.psum(lax.cond(crowded, exact, usual, x_86), "data")

    found = compiled(send, (8, 6), jax.ShapeDtypeStruct((), bool))
    assert {(c.kind, c.conditional) for c in found} == {
        ("all-to-all", True),
        ("all-gather", True),
        ("all-reduce", False),
    }
    kept = [c for c in found if not in_scope(c.op_name, "fallback")]
    assert {c.kind for c in kept} == {"all-to-all", "all-reduce"}


def test_a_loop_that_ends_by_its_values_has_no_total():
    def send(x_86: Array) -> Array:
        def body(x_86: Array) -> Array:
            return lax.psum(x_86, "model") / 3

        return lax.while_loop(lambda x_86: lax.psum(x_86.sum(), AXES) > 1, body, x_86)

    found = compiled(send, (8, 6))
    assert {c.kind for c in found} == {"all-reduce"}
    assert {c.runs for c in found} == {None}
