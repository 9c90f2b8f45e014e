"""Data parallelism alone.

Claim: the losses of experiments/single.py to five digits, step for step.
Command: python experiments/data8.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="data8", out="runs/data8")

if __name__ == "__main__":
    main(CONFIG)
