"""Data, expert and tensor parallelism together: the default mesh.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/data2_expert2_model2.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="data2_expert2_model2", out="runs/data2_expert2_model2")

if __name__ == "__main__":
    main(CONFIG)
