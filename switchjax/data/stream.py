"""The endless stream of training batches, its order and its position.

Decides order, epochs and who gets which rows. Knows nothing of what an example is made of.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from switchjax.batch import Batch
from switchjax.data.examples import Example, Examples, to_batch
from switchjax.errors import UserError

# One thread prepares batches ahead: making one is pure Python and numpy, which threads share.
_PREFETCH = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class TrainStream:
    """Batches without end; every epoch is another order and other random choices.

    A process gets its own `rows` of each batch, so that all together are the batch of a single
    process, in its order. The position counts batches handed out, not those prepared ahead, and
    so means the same for any number of processes.
    """

    def __init__(
        self,
        examples: Examples,
        indices: Integer[np.ndarray, "N"],
        *,
        batch_size: int,
        seed: int,
        identity: Mapping[str, str | int | float],
        rows: Sequence[int] | None = None,
    ):
        """Streams `examples[indices]`, `batch_size` rows over all processes.

        Args:
            identity: names what else the stream depends on; it is saved with the position.
            rows: those of this process, of `range(batch_size)`; None = all.

        Raises:
            UserError: there are fewer examples than `batch_size`.
        """
        mine = range(batch_size) if rows is None else rows
        if len(indices) < batch_size:
            raise UserError(
                f"data: the text is too short for one batch: {len(indices)} training examples, "
                f"data.batch_size {batch_size}"
            )
        if seed < 0:
            raise UserError(f"run.seed must be 0 or more, got {seed}")
        self._identity = dict(
            identity, seed=seed, batch_size=batch_size, train_examples=len(indices)
        )

        def example(place: int, rng: np.random.Generator) -> Example:
            return examples.example(int(indices[place]), rng)

        # Not `seed` itself: grain shuffles epoch e with seed + e, so neighbouring seeds would
        # see the same orders one epoch apart.
        shuffle_seed, example_seed = map(int, np.random.SeedSequence(seed).generate_state(2))
        stream: Any = (  # grain allows for missing elements: there are none
            grain.MapDataset.range(len(indices))
            .shuffle(seed=shuffle_seed)
            .repeat()
            .random_map(example, seed=example_seed)  # by place in the stream, epoch included
        )

        def batch(step: int) -> Batch:
            return to_batch([stream[step * batch_size + row] for row in mine], mine)

        steps = grain.MapDataset.range(sys.maxsize // batch_size).map(batch)  # without end
        self._iterator = steps.to_iter_dataset(_PREFETCH).__iter__()

    def __iter__(self) -> "TrainStream":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position and what it is a position in; plain values for JSON."""
        return {"step": self._iterator.get_state()["next_index"], "stream": dict(self._identity)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, whatever the number of processes then and now.

        Raises:
            UserError: it is a position in another stream (other text, seed or data settings).
        """
        saved, here = state["stream"], self._identity
        changed = [
            f"{key} {saved.get(key)} is now {here.get(key)}"
            for key in sorted(saved.keys() | here.keys())
            if saved.get(key) != here.get(key)
        ]
        if changed:
            raise UserError(f"data: not the stream that was saved: {', '.join(changed)}")
        self._iterator.set_state({"next_index": state["step"]})

    def close(self) -> None:
        """Ends the thread that prepares batches."""
        self._iterator.close()
