"""A document: what is told, and questions about it whose answers can be graded."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Question:
    kind: str  # who, where, what, why, sum, ...: accuracy is counted by it
    text: str
    answer: str
    combination: str = ""  # of numbers, if it asks for a sum

    @property
    def prompt(self) -> str:
        """All but the answer; the model's next token begins with the space before it."""
        return f"Q: {self.text}\nA:"

    def right(self, continuation: str) -> bool:
        """Whether a continuation of the prompt answers it: the first line of it, to the letter but for spaces and a full stop."""
        return continuation.lstrip(" ").split("\n")[0].strip(" .") == self.answer


@dataclass(frozen=True)
class Document:
    """`combinations` are what is held out: a document of the training text has none of those, one for evaluation has one at least."""

    kind: str
    told: str  # may be empty
    questions: tuple[Question, ...]
    combinations: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.told, *(f"{q.prompt} {q.answer}" for q in self.questions))))

    def prompt(self, question: Question) -> str:
        """What comes before the answer, as if no other question had been asked."""
        return replace(self, questions=()).text + ("\n" if self.told else "") + question.prompt
