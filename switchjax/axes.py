"""Names of the mesh axes, and the legend of array dims for the whole package.

*axis* is an axis of the device mesh; *dim* is a dim of an array. Array names carry their dims
as a suffix, one letter each; einsum strings use the same letters in lower case.

    B batch rows          L decoder length      S encoder length     D model width
    F feed-forward width  H heads               K width of a head    V vocabulary
    N stacked periods     E experts             C slots of an expert in one group
    G groups              T tokens of a group   Q choices of a token (top-k)
    R rows of an exchange buffer (G * C)     X Switch layers of the model, encoder first
    P peers: devices of the expert axis      n lanes: the experts that a device sends to
    M tokens of a continuation               W beams of a prompt

A capital is the whole dim; inside `shard_map` a lower-case letter is this device's part of it:
`x_gTD` holds my groups, `w_in_eDf` my experts and my slice of their hidden dim.
"""

DATA = "data"
EXPERT = "expert"
MODEL = "model"

# Devices are laid out with the last axis closest together: `model` inside a node, `data` across.
AXES = (DATA, EXPERT, MODEL)

# Tokens are split over both axes: the devices of an expert group hold different tokens.
TOKENS = (DATA, EXPERT)
