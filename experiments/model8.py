"""Tensor parallelism alone: one head a device.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/model8.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="model8", out="runs/model8")

if __name__ == "__main__":
    main(CONFIG)
