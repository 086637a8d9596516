"""The protocols of a backend: what a forward pass asks of a CPU or a GPU, and what a KV cache asks of its memory.

The module kernels/cpu.py is one backend, and a GPU's is another. contract/ is a backend in plain NumPy that defines each result to the bit.
`Wrapped` is a backend with some operations replaced: to count them (metrics.py), or to compute with a mistake in them (judge/).

An `Array` is NumPy's or the device's own. Nothing is checked here: the callers of a backend check their arguments.
"""

from collections.abc import Callable
from inspect import isfunction
from typing import Any, Protocol, TypeVar

from numpy.typing import DTypeLike, NDArray

from ..base.errors import OptionError, shown
from ..base.tensor_types import TensorType

Array = Any
Record = TypeVar("Record")


class Storage(Protocol):
    """The memory that keys and values lie in: arrays [L, B, S, G, K], with position p of slot b at [:, b, p]."""

    most_positions: int | None  # that a slot can hold; None: as many as there is memory for

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> tuple[Array, Array]:
        """Keys and values, all zero. Raises CapacityError when there is not enough memory."""

    def write(self, layer: int, keys: Array, values: Array, slot: Array, position: Array, k: Array, v: Array, /) -> None:
        """Write new rows k and v [R, G, K] of one layer to their slots [R] and positions [R] in keys and values [B, S, G, K].

        If the arrays are float16, k and v are rounded. Raises NonFiniteError for numbers that float16 cannot hold, at the latest when
        logits are checked.
        """

    def readable(self, array: Array, /) -> Array:
        """Keys or values [B, S, G, K] as a backend's attention reads them: float32, or float16's bits as int16."""

    def erasing(self, array: Array, slot: int, start: int, end: int, /) -> Callable[[], None]:
        """What sets positions start..end of a slot to zero when it is called: on the CPU a function of C, which no interrupt cuts."""

    def carry(self, source: Array, slot: int, out: Array, target: int, length: int, /) -> None:
        """Copy the first positions of a slot to another slot, of the same array or of one with another S."""


class Backend(Protocol):
    """The operations of a forward pass. R rows are the tokens of all sequences end to end; model/records.py explains the other letters."""

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
    def empty(self, shape: tuple[int, ...], /) -> Array: ...  # float32
    def resident(self, record: Record, /) -> Record: ...  # a dataclass of arrays, with its arrays uploaded
    def to_host(self, array: Array, /) -> NDArray: ...
    def wait(self) -> None: ...  # until all operations called so far are done
    def mark(self, event: str, count: int = 1, /) -> None: ...  # "forward", "layer", or "kv_write" with its number of positions

    # --- tables ---

    def embed(self, table: Array, tokens: Array, /) -> Array: ...  # [V, D], [R] -> [R, D]
    def embed_blocks(self, data: Array, kind: TensorType, tokens: Array, /) -> Array: ...  # [V, bytes of a row], type, [R] -> [R, D]
    def matmul(self, x: Array, table: Array, /) -> Array: ...  # [R, M], [N, M] -> [R, N]
    def matmul_blocks(self, x: Array, data: Array, kind: TensorType, /) -> Array: ...  # [R, M], [N, bytes of a row], type -> [R, N]
    def matmuls_blocks_as_llama_cpp(self, x: Array, /, *matrices: tuple[Array, TensorType]) -> list[Array]: ...  # up to three, x as there

    # --- norms and ternary matrices ---

    def rms_norm(self, x: Array, gain: Array, eps: float, /) -> Array: ...  # [R, D], [D] -> [R, D]
    def layer_norm(self, x: Array, gain: Array, bias: Array | None, eps: float, /) -> Array: ...  # [R, D], [D], [D] -> [R, D]
    def quantize(self, x: Array, /) -> tuple[Array, Array]: ...  # [R, M] -> int8 [R, M], steps per unit [R]
    def ternary_matmul(self, q: Array, scale: Array, codes: Array, w_scale: Any, width: int, /) -> Array: ...  # -> [R, width]
    def ternary_matmuls(self, q: Array, scale: Array, /, *matrices: tuple[Array, Any, int]) -> list[Array]: ...

    # --- positions and attention ---

    def rotations(self, angle: NDArray, /) -> tuple[Array, Array]: ...  # float64 [R, J] -> cosines and sines [R, J]
    def rope(self, x: Array, cos: Array, sin: Array, /) -> Array: ...  # [R, H, K], [R, J] x 2 -> [R, H, K]; pairs (i, i + J)
    def rope_adjacent(self, x: Array, cos: Array, sin: Array, /) -> Array: ...  # pairs (2i, 2i + 1)
    def attend(
        self, q: Array, k: Array, v: Array, slot: Array, position: Array, window: int | None = None, scale: Any = None, cap: Any = None, /
    ) -> Array:
        """[R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]: row r attends to the keys 0..position[r] of slot[r], or the last `window`.

        scale: float32 that multiplies q . k, by default 1 / sqrt(K). cap: float32 that caps the scores softly.
        """

    def attend_float16(
        self, q: Array, k: Array, v: Array, slot: Array, position: Array, window: int | None = None, scale: Any = None, cap: Any = None, /
    ) -> Array:
        """As `attend`, with probabilities rounded to float16."""

    def attend_masked(
        self, q: Array, k: Array, v: Array, slot: Array, position: Array, mask: Array, scale: Any = None, cap: Any = None, /
    ) -> Array:
        """As `attend`, by an additive mask [1 or B, T, S]."""

    # --- rows ---

    def add(self, a: Array, b: Array, /) -> Array: ...  # [R, D] x 2 -> [R, D]
    def add_bias(self, x: Array, bias: Array, /) -> Array: ...  # [R, N], [N] -> [R, N]
    def scaled(self, x: Array, factor: Any, /) -> Array: ...  # [R, N], float32 -> [R, N]
    def round_as(self, x: Array, kind: str, /) -> Array: ...  # [..., M] -> [..., M]; kind: of cache_types.KINDS, but for float32
    def take(self, x: Array, rows: Array, /) -> Array: ...  # [R, D], [B] -> [B, D]
    def relu2_gate(self, gate: Array, up: Array, /) -> Array: ...  # [R, F] x 2 -> [R, F]
    def silu_gate(self, gate: Array, up: Array, /) -> Array: ...
    def gelu_gate(self, gate: Array, up: Array, /) -> Array: ...
    def gelu(self, x: Array, /) -> Array: ...  # [R, F] -> [R, F]
    def gelu_tanh(self, x: Array, /) -> Array: ...
    def soft_cap(self, x: Array, cap: Any, /) -> Array: ...  # [R, V], float32 -> [R, V]

    # --- experts ---

    def top_experts(self, logits: Array, k: int, /) -> Array: ...  # [R, E] -> int32 [R, k]
    def expert_weights(self, logits: Array, experts: Array, normalized: bool, /) -> Array: ...  # [R, E], [R, k] -> [R, k]
    def mix(self, y: Array, weights: Array, /) -> Array: ...  # [R, k, D], [R, k] -> [R, D]
    def sigmoid_gate(self, x: Array, gate: Array, /) -> Array: ...  # [R, D], [R, 1] -> [R, D]


OPERATIONS = tuple(name for name, member in vars(Backend).items() if isfunction(member) and not name.startswith("_"))
"""The names of all operations."""


def check_backend(name: str, backend: Any) -> None:
    """Raises OptionError unless the value is a Backend, which may be a module or an object. Its operations are not checked."""
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
