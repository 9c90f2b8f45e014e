"""Data and expert parallelism on 16 devices: one expert a device.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/data2_expert8.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="data2_expert8", out="runs/data2_expert8")

if __name__ == "__main__":
    main(CONFIG)
