"""The settings of a run: everything but the code that its bits depend on."""

import math
from dataclasses import dataclass

from bitnet_np.base.errors import OptionError
from bitnet_np.model.records import Config


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, data and optimiser of a run. The defaults are the demo model's."""

    seed: int = 0
    vocabulary: int = 1536
    tokenizer_documents: int = 20000  # the number of documents that the tokenizer learns from
    context: int = 256  # tokens of a sequence
    width: int = 256
    layers: int = 4
    ffn: int = 512
    heads: int = 8
    kv_heads: int = 4
    batch: int = 8  # sequences of a step
    steps: int = 4400
    warmup: int = 50  # steps in which the learning rate rises to its peak
    learning_rate: float = 4e-3  # at the peak
    fall: float = 0.4  # the last part of the steps, in which the rate falls along a half cosine
    last_rate: float = 0.02  # the rate at the end, as a part of the peak
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.05  # of matrices
    clip: float = 1.0  # the largest norm of the gradients
    deviation: float = 0.02  # of the first weights

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def config(self) -> Config:
        """The model's Config."""
        return Config(
            "bitnet-b1.58",
            vocab=self.vocabulary,
            context=self.context,
            width=self.width,
            n_layers=self.layers,
            ffn=self.ffn,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            eps=2.0**-17,  # 7.6e-6: a number that float32 and decimal files hold alike
            rope_base=10000.0,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        length = max(1, round(self.fall * self.steps))
        left = min(1.0, (self.steps - step) / length)
        return self.learning_rate * (self.last_rate + (1 - self.last_rate) * (0.5 - 0.5 * math.cos(math.pi * left)))


DEMO = Settings()
