"""The models of the Switch Transformer paper, as released, and small ones for a laptop.

The table of model sizes counts 7 B parameters for switch-base, where 7.4 B are meant: the last
digit is cut. The others agree within 5 %.

Source: Switch Transformer, arXiv:2101.03961, table 9; relu sizes as the authors released them.
"""

from dataclasses import replace

from switchjax.config import DataConfig, ModelConfig, OptimConfig, RunConfig

# T5's vocabulary of 32 000 pieces and 100 sentinels, rounded up to a multiple of 128.
_VOCAB_SIZE = 32128

_T5_BASE = ModelConfig(
    vocab_size=_VOCAB_SIZE,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    d_kv=64,
    num_layers=12,
    moe_every=0,
    dropout=0.1,
    remat="full",
)
_T5_BASE_GEGLU = replace(_T5_BASE, d_ff=2048, activation="geglu")
_SWITCH_LARGE = replace(
    _T5_BASE_GEGLU,
    d_model=1024,
    d_ff=2816,
    num_heads=16,
    num_layers=24,
    moe_every=2,
    num_experts=128,
)

_MODELS = {
    "t5-base": _T5_BASE,
    **{
        f"switch-base-{num_experts}": replace(_T5_BASE, moe_every=2, num_experts=num_experts)
        for num_experts in (8, 16, 32, 64, 128, 256)
    },
    "t5-base-geglu": _T5_BASE_GEGLU,
    "switch-base": replace(_T5_BASE_GEGLU, moe_every=2, num_experts=128),
    "switch-large": _SWITCH_LARGE,
    # The paper's table prints 64 experts; only 128 give its 395 B parameters.
    "switch-xxl": replace(_SWITCH_LARGE, d_model=4096, d_ff=10240, num_heads=64),
    "switch-c": replace(
        _T5_BASE,
        d_model=2080,
        d_ff=6144,
        num_heads=32,
        num_layers=15,
        moe_every=1,
        num_experts=2048,
    ),
}


def _pretraining(name: str, model: ModelConfig) -> RunConfig:
    """The paper's recipe: span corruption at 512 tokens, Adafactor with T5's schedule."""
    return RunConfig(
        model=model,
        data=DataConfig(batch_size=128, sequence_length=512),
        optim=OptimConfig(
            optimizer="adafactor", learning_rate=1e-2, warmup_steps=10_000, clip_norm=None
        ),
        steps=100_000,
        eval_every=1000,
        checkpoint_every=1000,
        out=f"runs/{name}",
    )


# A run of minutes: weights start larger and the balance loss weighs more than in the paper, since
# a few hundred steps must do; found by trial.
_TINY = RunConfig(
    model=ModelConfig(init_scale=1.0),
    optim=OptimConfig(
        optimizer="adafactor", learning_rate=3e-2, warmup_steps=100, balance_coefficient=5e-2
    ),
    steps=300,
    out="runs/tiny",
)

PRESETS: dict[str, RunConfig] = {
    "tiny": _TINY,
    "tiny-dense": replace(_TINY, model=replace(_TINY.model, moe_every=0), out="runs/tiny-dense"),
    **{name: _pretraining(name, model) for name, model in _MODELS.items()},
}
