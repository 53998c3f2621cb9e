"""Where a training run left off: saved every so often, and continued by the same run alone."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class TrainingError(ValueError):
    """A training that cannot start as it was asked for; says what to do."""


class SavingError(RuntimeError):
    """What was computed cannot be written; says what is left."""


class Checkpoints:
    """The last two states of a run in a folder, beside the settings that made them. A context manager.

    Args:
      folder: Made where it is missing.
      settings: What the run depends on. Name -> what JSON can hold, or else has a `str`.
      is_resumed: The folder must be there, and is not made.

    Raises:
      TrainingError: it is not.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, is_resumed: bool = False):
        if is_resumed and not folder.is_dir():
            raise _no_state(folder)
        self.folder = folder
        self.settings = json.loads(json.dumps(settings, default=str))
        # Not in the background: the next update is given the buffers that are being saved.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def require_none(self) -> None:
        """Raises:
        TrainingError: a run left a state here, which a new one would be mixed up with.
        """
        step = self._manager.latest_step()
        if step is not None:
            raise TrainingError(
                f"{self.folder} holds the state of a run at step {step}, expected none: "
                "continue that run with --resume, choose another folder with --state, or delete this one"
            )

    def restore(self, like: Any) -> tuple[int, Any]:
        """The last state, and the steps that it has behind it.

        Args:
          like: A state of the same structure, shapes and dtypes.

        Raises:
          TrainingError: there is none, it was made with other settings, or it is broken.
        """
        step = self._manager.latest_step()
        if step is None:
            raise _no_state(self.folder)
        stored = self._read(step, "settings", ocp.args.JsonRestore())
        if not isinstance(stored, dict):
            raise self._broken(step, "settings", f"they are {stored!r}")
        for name in sorted(stored.keys() | self.settings.keys()):
            was, now = stored.get(name), self.settings.get(name)
            if was != now:
                raise TrainingError(
                    f"the run in {self.folder} has {name} = {was}, got {now}: resume with the settings that "
                    "it was started with, or start anew with another --state"
                )
        leaves, structure = jax.tree.flatten(like)
        leaves = self._read(step, "state", ocp.args.StandardRestore(leaves))
        # In numpy, tied to no device like a new state: the programs of one serve the other.
        return step, jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])

    def _read(self, step: int, item: str, how: ocp.args.CheckpointArgs) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # Orbax raises all kinds, bare ones among them
            raise self._broken(step, item, _reason(error)) from error

    def _broken(self, step: int, item: str, reason: str) -> TrainingError:
        return TrainingError(
            f"the {item} in {self.folder}, step {step}, cannot be read ({reason}): delete the folder and "
            "start without --resume"
        )

    def save(self, step: int, state: Any) -> None:
        """Keeps a pytree of arrays; it is whole on disk when this returns.

        Raises:
          SavingError: it cannot be written; states that were kept before are still there.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(jax.tree.leaves(state)), settings=ocp.args.JsonSave(self.settings)
        )
        try:
            self._manager.save(step, args=arguments)
        except Exception as error:  # of all kinds, as in `_read`
            raise SavingError(
                f"step {step} cannot be saved in {self.folder} ({_reason(error)}): make room, and continue "
                "with --resume if a state was saved before"
            ) from error

    def clear(self) -> None:
        """Deletes the states: their run has ended."""
        for step in self._manager.all_steps():
            self._manager.delete(step)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _no_state(folder: Path) -> TrainingError:
    return TrainingError(f"{folder} has no state to resume from: start without --resume")
