"""Backends: implementations of attention and of the movement of keys and values, by name.

`register_backend` adds one. "xla" serves every cache; the package registers "mosaic_gpu" and "mosaic_tpu",
the kernels of `pallas_kernels`, and a cascade of each. `choose_backend` picks one for a call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from kvcache_jax.arrays.masked_updates import run_if

XLA, MOSAIC_GPU, MOSAIC_TPU = "xla", "mosaic_gpu", "mosaic_tpu"
MOVES = "copy_blocks", "read_blocks", "write_blocks"
"""What a backend may have for whole blocks."""
MAX_DECODE_QUERIES = 8
"""Most new tokens of a row that are decoded; where a step has room for more, rows are prefilled."""


class TargetDevice(NamedTuple):
    """The device that a program is for.

    Attributes:
      platform: "cpu", "cuda", "tpu" or another of jax's; "gpu" reads "cuda".
      kind: Its name, such as "NVIDIA H200".
      compute_capability: Such as "9.0"; None where that is not known, as on all that are no GPUs.
    """

    platform: str
    kind: str
    compute_capability: str | None = None


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of attention and of the movement of keys and values.

    XLA does whatever is None, and all gradients. The functions are traced as parts of the caller's program,
    and where `CacheConfig.head_axis` splits the heads, for each device's own heads. Below, `pool` is a
    `KVPool`, of plain keys and values `arrays["k"]` and `arrays["v"]`
    `[num_layers * num_blocks, num_kv_heads, block_size, head_dim]`; `group` the `LayerGroup`, static, with
    the layers' kind (`group.kind.is_plain` where nothing else is stored); `layer` i32[], the index in the
    group.

    Attributes:
      name: For `CacheConfig(implementation=name)`.
      supports: `(pool, group, group_size, device) -> str | None`: None if the backend serves such a cache on
        the `TargetDevice`, with `group_size` query heads per key/value head (1 where not known); else the
        reason, the rest of a sentence.
      decode: `(q, pool, block_table, plan, group, *, layer, scale, soft_cap, sink_logits) -> (out, lse)` for
        steps of at most 8 new tokens a row, and packed ones: q `[r, t, num_kv_heads, group_size, head_dim]`
        of the `AttentionPlan`'s rows, sink_logits f32`[num_kv_heads, group_size]` or None, out like q, in its
        dtype or float32, lse f32`[r, t, num_kv_heads, group_size]`; 0 and -inf for a query that sees nothing.
        Slots that no query sees may hold NaN.
      prefill: Like `decode`, for steps with more tokens.
      write: `(pool, new, slots, group, *, layer) -> pool` stores new tokens as the kind's `encode` returned
        them, by name and in the arrays' dtypes, plain "k" and "v" `[n, num_kv_heads, head_dim]`, at slots
        i32[n], `block_id * block_size + offset`; those at `num_blocks * block_size` nowhere.
      copy_blocks: `(pool, src, dst, num_copies, group) -> pool` copies whole blocks i32[n] of all layers, for
        entries below `num_copies`; all sources as they were before any block is overwritten.
      plan: `(plan, pool, block_table, group, *, num_queries) -> tuple of pytrees`, computed once per step and
        handed to all its layers as `plan.work`, for `num_queries` tokens a row. `pool` has shapes alone,
        those on one device. `plan.work` is () where the step was planned by another backend.
      load: `() -> None`, imports modules for the others; called by `init`, before anything is traced.
      code: `(device) -> str | None`, a digest of the sources that run on the `TargetDevice`, None where none
        do; imports none of them. `implementation=None` picks the backend where a verdict on it passed.
      read_blocks: `(pool, block_ids, group) -> arrays` reads whole blocks i32[n] of all layers, by name
        `[n, num_layers, *shape]`; zeros for ids that are no blocks. Asked, as `write_blocks` is,
        for plain "k" and "v" alone.
      write_blocks: `(pool, arrays, block_ids, group) -> pool` writes such arrays into blocks, all different;
        ids that are no blocks nowhere.
      platform: The one platform on which attention is the backend's, XLA's on others and in exports; or None.

    Example:
      >>> import kvcache_jax as kv
      >>> def only_cpus(pool, group, group_size, device):
      ...     return None if device.platform == "cpu" else f"it is for CPUs, and this is {device.kind}"
      >>> kv.backends.register_backend(kv.backends.Backend("XLA on CPUs", only_cpus))
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], implementation="XLA on CPUs")
    """

    name: str
    supports: Callable[..., str | None]
    decode: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    prefill: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    write: Callable[..., Any] | None = None
    copy_blocks: Callable[..., Any] | None = None
    plan: Callable[..., tuple[Any, ...]] | None = None
    load: Callable[[], None] | None = None
    code: Callable[[TargetDevice], str | None] | None = None
    read_blocks: Callable[..., Any] | None = None
    write_blocks: Callable[..., Any] | None = None
    platform: str | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}, expected a str by which configs name the backend")
        for part in dataclasses.fields(self)[1:-1]:
            function = getattr(self, part.name)
            if not callable(function) and (function is not None or part.name == "supports"):
                raise TypeError(f"{part.name} of backend {self.name!r} is {function!r}, expected a function")

    def attend(self, num_queries: int) -> Callable[..., tuple[jax.Array, jax.Array]] | None:
        """Returns the function for steps with room for so many tokens a row; None for XLA's."""
        return self.decode if num_queries <= MAX_DECODE_QUERIES else self.prefill

    def run(self, own: Callable[..., Any], by_xla: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `own`, or `by_xla` in a program that is not for the backend's platform."""
        if self.platform is None:
            return own(*arguments)
        # Of jax it needs what has no public name, so that only those with a verdict depend on it.
        from kvcache_jax.arrays.lowering_choice import on_platform

        return on_platform(self.platform, own, by_xla, *arguments)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("decode", "prefill", "write", *MOVES)}
        own = ", ".join(name for name, function in parts.items() if function)
        of_xla = ", ".join(name for name, function in parts.items() if not function)
        return f"{self.name}: {own or 'nothing'}" + (f"; xla: {of_xla}" if of_xla else "")


def _serves_all(pool: Any, group: Any, group_size: int, device: TargetDevice) -> None:
    return None


_backends: dict[str, Backend] = {XLA: Backend(XLA, _serves_all)}


def register_backend(backend: Backend) -> None:
    """Makes a backend known by its name.

    Configs name it, so that they stay hashable and can be exported; a program that loads an exported config
    registers the same name first.

    Args:
      backend: See `Backend`.

    Raises:
      TypeError: it is something else.
      ValueError: the name is taken.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend is a {type(backend).__name__}, expected a kvcache_jax.backends.Backend")
    if _backends.get(backend.name, backend) is not backend:
        raise ValueError(
            f"there is a backend {backend.name!r} already, expected a new name: compiled programs go by it"
        )
    _backends[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """Lists the names that `CacheConfig(implementation=)` takes."""
    return tuple(_backends)


def get_backend(name: str) -> Backend:
    """Returns the backend of that name."""
    return _backends[name]


def codes_for(device: TargetDevice) -> dict[str, str]:
    """Returns the digests of the backends that run on the device and say what their sources are, by name."""
    codes = {name: backend.code(device) for name, backend in _backends.items() if backend.code}
    return {name: code for name, code in codes.items() if code is not None}


def require_name(value: Any) -> None:
    """Refuses anything but None or a backend's name."""
    if value is not None and not (isinstance(value, str) and value in backend_names()):
        raise ValueError(
            f"implementation is {value!r}, expected None or one of {', '.join(backend_names())}; register "
            "others first, with kvcache_jax.backends.register_backend"
        )


def target_device() -> TargetDevice:
    """Describes the device that the program being traced is for: the mesh's, the default, or jax's first."""
    on_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if on_mesh is None or on_mesh.platform is None:
        default = jax.config.jax_default_device
        if default is None or isinstance(default, str):
            default = jax.local_devices(backend=default)[0]
        return _described(default)
    described = _described(on_mesh)
    if described.compute_capability is None and described.platform == "cuda":
        # A mesh knows its devices' name alone. Of machines without one, the backends go by it.
        same_kind = (device for device in jax.local_devices() if device.device_kind == described.kind)
        return _described(next(same_kind, on_mesh))
    return described


def by_platform(*, cpu: int, accelerator: int) -> int:
    """Returns a batch size, or a choice, for the target.

    CPUs want batches that fit their caches and no vain work, accelerators few launches and waits.
    """
    return cpu if target_device().platform == "cpu" else accelerator


def run_if_due[T](is_due: jax.Array, fn: Callable[[T], T], state: T) -> T:
    """Runs `fn(state)`, which changes nothing but where it `is_due` bool[]; on CPUs only there.

    Not on accelerators: a GPU's host would wait for the answer.
    """
    return run_if(is_due, fn, state) if by_platform(cpu=True, accelerator=False) else fn(state)


def computed_once[T](values: T) -> T:
    """Returns `values`, small arrays with many readers, such that CPUs compute them once.

    XLA fuses them into each reader, and computes and compiles them there again. On accelerators too, but what
    they compute apart is a launch.
    """
    return lax.optimization_barrier(values) if by_platform(cpu=True, accelerator=False) else values


def _described(device: Any) -> TargetDevice:
    platform = "cuda" if device.platform == "gpu" else device.platform
    return TargetDevice(platform, device.device_kind, getattr(device, "compute_capability", None))
