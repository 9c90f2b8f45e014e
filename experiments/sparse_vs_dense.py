"""A Switch model against its dense twin: same steps, data and FLOPs a token, three seeds.

Claim: at every seed the Switch model ends with the lower held-out cross-entropy. At capacity
factor 1 its experts compute exactly the dense twin's feed-forward FLOPs.
Command: python experiments/sparse_vs_dense.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.presets import PRESETS
from switchjax.train import train

TINY = replace(PRESETS["tiny"], mesh="single", eval_batches=16)
SWITCH = replace(TINY.model, d_model=64, d_ff=256, d_kv=8, capacity_factor=1.0)
MODELS = {"switch": SWITCH, "dense": replace(SWITCH, moe_every=0)}

if __name__ == "__main__":
    table = []
    for seed in range(3):
        for name, model in MODELS.items():
            out = f"runs/sparse_vs_dense/{name}-{seed}"
            result = train(replace(TINY, model=model, seed=seed, steps=400, out=out))
            table.append(f"seed {seed}  {name:6}  {result.evaluation['ce']:.3f}")
    print("held-out cross-entropy, nats a target", *table, sep="\n")
