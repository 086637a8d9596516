"""transformers in this process, on Hugging Face folders: in float32, and in float64 throughout.

transformers computes in float32 in places, whatever its model's dtype: norms, softmax, RoPE's frequencies and angles, the quantisers.
So its source is run with float64 for every float32 in it.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bitnet_np.base.errors import UnsupportedError
from bitnet_np.traces.hooks import record_transformers
from bitnet_np.traces.points import Key

Points = dict[Key, NDArray]


class _Float64:
    """torch with float64 in place of float32."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.float32 = self.float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Transformers:
    """The part of torch and transformers that is used here. The constructor imports them."""

    def __init__(self) -> None:
        try:
            self.torch: Any = importlib.import_module("torch")
            self.transformers: Any = importlib.import_module("transformers")
            self._rotations: Any = importlib.import_module("transformers.modeling_rope_utils")
        except ImportError as error:
            raise UnsupportedError(f"cross-validation needs them: pip install torch transformers accelerate ({error})") from None
        self.transformers.utils.logging.disable_progress_bar()
        self.transformers.utils.logging.set_verbosity_error()
        self.torch.compiler.set_stance("force_eager")  # otherwise some of BitLinear is compiled, which takes minutes

    @property
    def versions(self) -> str:
        return f"transformers {self.transformers.__version__}, torch {self.torch.__version__}"

    def open(self, folder: Path) -> Any:
        """The model of a folder, in float32."""
        how = {"dtype": self.torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}  # others have no float64
        model = self.transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        return self.torch.nn.Module.float(model)  # codes are unpacked to the type of the file's floats

    @contextmanager
    def strict(self, folder: Path) -> Iterator[Any]:
        """The model of a folder, with float64 for every float32 in it and in transformers' source."""
        torch, model = self.torch, self.open(folder)
        with ExitStack() as stack:
            for module in (sys.modules[type(model).__module__], self._rotations):
                stack.enter_context(mock.patch.object(module, "torch", _Float64(torch)))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
            model.double()
            for module in model.modules():
                if isinstance(getattr(module, "dtype", None), torch.dtype) and hasattr(module, "weight_scale"):
                    module.dtype = torch.float64
                self._widen_frequencies(module, model.config)
            yield model

    def _widen_frequencies(self, module: Any, config: Any) -> None:
        types = getattr(module, "rope_type", {})
        for of_layers, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            init = module.compute_default_rope_parameters if kind == "default" else self._rotations.ROPE_INIT_FUNCTIONS[kind]
            named = {} if of_layers is None else {"layer_type": of_layers}
            frequency = init(config, *(() if kind == "default" else ("cpu",)), **named)[0]
            setattr(module, "inv_freq" if of_layers is None else f"{of_layers}_inv_freq", frequency)
            if frequency.dtype != self.torch.float64:
                raise UnsupportedError("this transformers works out RoPE's frequencies in another way than with torch.float")

    def logits(self, model: Any, tokens: NDArray[np.int64]) -> NDArray:  # [B, T] -> [B, T, V]
        with self.torch.no_grad():
            return model(input_ids=self.torch.from_numpy(tokens), use_cache=False).logits.numpy().copy()

    def points(self, model: Any, tokens: NDArray[np.int64]) -> Points:
        """Every point that is a module's output or input, and rotated queries and keys, each [T, width]."""
        with record_transformers(model) as trace:
            self.logits(model, tokens[None])
        return {key: np.array(trace.points[key]) for key in trace.points}
