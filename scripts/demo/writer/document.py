"""A document: a text, and questions about it whose answers can be graded."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Question:
    kind: str  # who, where, what, why, sum, ...: accuracy is counted by it
    text: str
    answer: str
    combination: str = ""  # the combination of numbers, if it asks for a sum

    @property
    def prompt(self) -> str:
        """All but the answer; the model's next token begins with the space before it."""
        return f"Q: {self.text}\nA:"

    def right(self, continuation: str) -> bool:
        """Whether the first line of a continuation is the answer, but for spaces and a full stop."""
        return continuation.lstrip(" ").split("\n")[0].strip(" .") == self.answer


@dataclass(frozen=True)
class Document:
    """A text and its questions. `combinations` decide its split: training documents have no held-out one, evaluation's have some."""

    kind: str
    body: str  # may be empty
    questions: tuple[Question, ...]
    combinations: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.body, *(f"{q.prompt} {q.answer}" for q in self.questions))))

    def prompt(self, question: Question) -> str:
        """The text and the question, without the other questions and without the answer."""
        return replace(self, questions=()).text + ("\n" if self.body else "") + question.prompt
