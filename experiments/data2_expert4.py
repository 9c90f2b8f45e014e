"""Data and expert parallelism: two experts a device.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/data2_expert4.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="data2_expert4", out="runs/data2_expert4")

if __name__ == "__main__":
    main(CONFIG)
