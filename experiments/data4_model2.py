"""Data and tensor parallelism.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/data4_model2.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="data4_model2", out="runs/data4_model2")

if __name__ == "__main__":
    main(CONFIG)
