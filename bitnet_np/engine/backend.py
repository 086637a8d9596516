"""The protocols of a backend: what a forward pass asks of a CPU or a GPU,
and what a KV cache asks of its memory.

The module kernels/cpu.py is one backend, and a GPU's is another. contract/ is a backend in plain NumPy that
defines each result to the bit. `Wrapped` is a backend with some operations replaced: to count them
(metrics.py), or to compute with a mistake in them (judge/).

An `Array` is NumPy's or the device's own. Nothing is checked here:
the callers of a backend check their arguments.
"""

from collections.abc import Callable
from inspect import isfunction
from typing import Any, Protocol, TypeVar

from numpy.typing import DTypeLike, NDArray

from ..base.errors import OptionError, shown
from ..base.tensor_types import TensorType

Array = Any
Record = TypeVar("Record")

Packed = tuple[Array, Any, int]
"""Codes, scale and width of a ternary matrix."""
InBlocks = tuple[Array, TensorType]
"""A matrix in blocks: their bytes, and their type."""


class Storage(Protocol):
    """The memory that keys and values lie in: arrays [L, B, S, G, K],
    with position p of slot b at [:, b, p]."""

    most_positions: int | None  # that a slot can hold; None: as many as there is memory for

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> tuple[Array, Array]:
        """Keys and values, all zero. Raises CapacityError when there is not enough memory."""

    def write(
        self,
        layer: int,
        keys: Array,
        values: Array,
        slot: Array,
        position: Array,
        k: Array,
        v: Array,
        /,
    ) -> None:
        """Write new rows k and v [R, G, K] of one layer to their slots [R] and positions [R] in keys and
        values [B, S, G, K].

        If the arrays are float16, k and v are rounded. Raises NonFiniteError for numbers that float16 cannot
        hold, at the latest when logits are checked.
        """

    def readable(self, array: Array, /) -> Array:
        """Keys or values [B, S, G, K] as a backend's attention reads them: float32,
        or float16's bits as int16."""

    def erasing(self, array: Array, slot: int, start: int, end: int, /) -> Callable[[], None]:
        """What sets positions start..end of a slot to zero when it is called: on the CPU a function of C,
        which no interrupt cuts."""

    def carry(self, source: Array, slot: int, out: Array, target: int, length: int, /) -> None:
        """Copy the first positions of a slot to another slot, of the same array or of one with another S."""


class Backend(Protocol):
    """The operations of a forward pass. R rows are the tokens of all sequences end to end; model/records.py
    explains the other letters."""

    @property
    def device(self) -> str:
        """Where its arrays are: "cpu" or "cuda"."""

    @property
    def exact_only(self) -> bool:
        """Whether EXACT is the only dialect it computes."""

    @property
    def splits_rows(self) -> bool:
        """Whether rows may go through a layer in parts, each written in place."""

    @property
    def repeats(self) -> bool:
        """Whether a pass may be recorded and run again (repeats.py)."""

    # --- where arrays are ---

    def storage(self) -> Storage: ...
    def upload(self, array: NDArray, /) -> Array: ...
    # float32
    def empty(self, shape: tuple[int, ...], /) -> Array: ...
    # a dataclass of arrays, with its arrays uploaded
    def resident(self, record: Record, /) -> Record: ...
    def to_host(self, array: Array, /) -> NDArray: ...
    # until all operations called so far are done
    def wait(self) -> None: ...
    # "forward", "layer", or "kv_write" with its number of positions
    def mark(self, event: str, count: int = 1, /) -> None: ...

    # --- tables ---

    # [V, D], [R] -> [R, D]
    def embed(self, table: Array, tokens: Array, /) -> Array: ...
    # [V, bytes of a row], type, [R] -> [R, D]
    def embed_blocks(self, data: Array, kind: TensorType, tokens: Array, /) -> Array: ...
    # [R, M], [N, M] -> [R, N]
    def matmul(self, x: Array, table: Array, /) -> Array: ...
    # [R, M], [N, bytes of a row], type -> [R, N]
    def matmul_blocks(self, x: Array, data: Array, kind: TensorType, /) -> Array: ...
    # [R, M], up to three of [N, bytes of a row], type -> [R, N] each; x is rounded as there
    def matmuls_blocks_as_llama_cpp(self, x: Array, /, *matrices: InBlocks) -> list[Array]: ...

    # --- norms and ternary matrices ---

    # [R, D], [D] -> [R, D]
    def rms_norm(self, x: Array, gain: Array, eps: float, /) -> Array: ...
    # [R, D], [D], [D] -> [R, D]
    def layer_norm(self, x: Array, gain: Array, bias: Array | None, eps: float, /) -> Array: ...
    # [R, M] -> int8 [R, M], steps per unit [R]
    def quantize(self, x: Array, /) -> tuple[Array, Array]: ...
    # int8 [R, M], [R], packed [width, M], float32, width -> [R, width]
    def ternary_matmul(self, q: Array, scale: Array, codes: Array, w_scale: Any, width: int, /) -> Array: ...
    # int8 [R, M], [R], (codes, scale, width) each -> [R, width] each
    def ternary_matmuls(self, q: Array, scale: Array, /, *matrices: Packed) -> list[Array]: ...

    # --- positions and attention ---

    # float64 [R, J] -> cosines and sines [R, J]
    def rotations(self, angle: NDArray, /) -> tuple[Array, Array]: ...
    # [R, H, K], [R, J] x 2 -> [R, H, K]; pairs (i, i + J)
    def rope(self, x: Array, cos: Array, sin: Array, /) -> Array: ...
    # the same, pairs (2i, 2i + 1)
    def rope_adjacent(self, x: Array, cos: Array, sin: Array, /) -> Array: ...
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        slot: Array,
        position: Array,
        window: int | None = None,
        scale: Any = None,
        cap: Any = None,
        /,
    ) -> Array:
        """[R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]: row r attends to the keys 0..position[r] of
        slot[r], or the last `window`.

        scale: float32 that multiplies q . k, by default 1 / sqrt(K).
        cap: float32 that caps the scores softly.
        """

    def attend_float16(
        self,
        q: Array,
        k: Array,
        v: Array,
        slot: Array,
        position: Array,
        window: int | None = None,
        scale: Any = None,
        cap: Any = None,
        /,
    ) -> Array:
        """As `attend`, with probabilities rounded to float16."""

    def attend_masked(
        self,
        q: Array,
        k: Array,
        v: Array,
        slot: Array,
        position: Array,
        mask: Array,
        scale: Any = None,
        cap: Any = None,
        /,
    ) -> Array:
        """As `attend`, by an additive mask [1 or B, T, S]."""

    # --- rows ---

    # [R, D] x 2 -> [R, D]
    def add(self, a: Array, b: Array, /) -> Array: ...
    # [R, N], [N] -> [R, N]
    def add_bias(self, x: Array, bias: Array, /) -> Array: ...
    # [R, N], float32 -> [R, N]
    def scaled(self, x: Array, factor: Any, /) -> Array: ...
    # [..., M] -> [..., M]; kind: of cache_types.KINDS, but for float32
    def round_as(self, x: Array, kind: str, /) -> Array: ...
    # [R, D], [B] -> [B, D]
    def take(self, x: Array, rows: Array, /) -> Array: ...
    # [R, F] x 2 -> [R, F]
    def relu2_gate(self, gate: Array, up: Array, /) -> Array: ...
    def silu_gate(self, gate: Array, up: Array, /) -> Array: ...
    def gelu_gate(self, gate: Array, up: Array, /) -> Array: ...
    # [R, F] -> [R, F]
    def gelu(self, x: Array, /) -> Array: ...
    def gelu_tanh(self, x: Array, /) -> Array: ...
    # [R, V], float32 -> [R, V]
    def soft_cap(self, x: Array, cap: Any, /) -> Array: ...

    # --- experts ---

    # [R, E] -> int32 [R, k]
    def top_experts(self, logits: Array, k: int, /) -> Array: ...
    # [R, E], [R, k] -> [R, k]
    def expert_weights(self, logits: Array, experts: Array, normalized: bool, /) -> Array: ...
    # [R, k, D], [R, k] -> [R, D]
    def mix(self, y: Array, weights: Array, /) -> Array: ...
    # [R, D], [R, 1] -> [R, D]
    def sigmoid_gate(self, x: Array, gate: Array, /) -> Array: ...


OPERATIONS = tuple(name for name, member in vars(Backend).items() if isfunction(member) and name[0] != "_")
"""The names of all operations."""


def check_backend(name: str, backend: Any) -> None:
    """Raises OptionError unless the value is a Backend, which may be a module or an object.
    Its operations are not checked."""
    try:
        known = isinstance(backend.device, str) and {backend.exact_only, backend.splits_rows} <= {True, False}
    except Exception:  # it has not these attributes
        known = False
    if not known:
        raise OptionError(f"{name} is {shown(backend)}, expected a backend such as bitnet_np.contract")


class Wrapped:
    """A backend with some of its operations replaced."""

    def __init__(self, backend: Backend, **operations: Callable[..., Any]) -> None:
        unknown = operations.keys() - set(OPERATIONS)
        assert not unknown, f"no operations of a backend: {unknown}"
        self.device, self.exact_only = backend.device, backend.exact_only
        self.splits_rows = self.repeats = False  # calls may be counted, and a mistake may depend on all rows
        vars(self).update({name: getattr(backend, name) for name in OPERATIONS} | operations)

    def __getattr__(self, name: str) -> Any:  # for type checkers: every operation is in the instance
        raise AttributeError(name)
