"""One device, the reference.

Claim: every other mesh has these losses, to five digits, step for step.
Command: python experiments/single.py
Expect: @EXPECT@
"""

from dataclasses import replace

from switchjax.cli import main
from switchjax.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], mesh="single", out="runs/single")

if __name__ == "__main__":
    main(CONFIG)
