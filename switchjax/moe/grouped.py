import jax, jax.numpy as jnp


def run_starts(sizes_e, block):
    p = (sizes_e + block - 1) // block * block
    return (jnp.cumsum(p) - p).astype(jnp.int32)


def padded_rows(n, e, block):
    return (n + e * block) // block * block


def block_rows(n, e):
    return 8


def grouped_ffn(x_ND, sizes_e, w_in, w_gate, w_out, keep, block):
    N = x_ND.shape[0]
    s = run_starts(sizes_e, block)
    r = jnp.arange(N)[None] - s[:, None]
    inside = (r >= 0) & (r < sizes_e[:, None])
    x = jnp.where(inside[..., None], x_ND[None], 0)
    h = jnp.einsum("end,edf->enf", x, w_in)
    h = jax.nn.relu(h) if w_gate is None else h * jax.nn.gelu(jnp.einsum("end,edf->enf", x, w_gate))
    if keep is not None:
        h = h * keep[None]
    y = jnp.einsum("enf,efd->end", h, w_out)
    return jnp.where(inside[..., None], y, 0).sum(0)
