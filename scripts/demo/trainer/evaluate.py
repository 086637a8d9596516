"""The grades of a model: perplexity on held-out text, and the share of right answers, greedily decoded."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp

from writer.corpus import FRESH, document, held_out
from writer.document import Question

from bitnet_np.generation.batch import Request, generate_batch
from bitnet_np.generation.nll import token_nll
from bitnet_np.model.records import Model
from bitnet_np.text.tokenizer import Tokenizer

_LONGEST_ANSWER = 16  # tokens


@dataclass(frozen=True)
class Perplexity:
    token: float
    byte: float
    tokens: int
    bytes: int


@dataclass
class Grades:
    """The numbers of right answers and of questions, by kind of question."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def shown(self, kind: str) -> str:
        return f"{self.right[kind]} of {self.asked[kind]}" if self.asked[kind] else ""

    @property
    def accuracy(self) -> float:
        return self.right.total() / self.asked.total()


def perplexity(model: Model, tokenizer: Tokenizer, seed: int, documents: int, progress: Callable[[int, int], None]) -> Perplexity:
    """The perplexity of the first held-out documents, each by itself with its end of text, by token and by byte (the end counts as one)."""
    assert tokenizer.eos is not None
    nats, tokens, size = 0.0, 0, 0
    for i in range(documents):
        text = document("held-out", seed, i).text
        values = token_nll(model, [*tokenizer.encode(text), tokenizer.eos])
        nats, tokens, size = nats + float(values.sum()), tokens + len(values), size + len(text.encode()) + 1
        progress(i + 1, documents)
    return Perplexity(exp(nats / tokens), exp(nats / size), tokens, size)


def grade(
    model: Model, tokenizer: Tokenizer, split: str, seed: int, documents: int, progress: Callable[[int, int], None], slots: int = 16
) -> Grades:
    """The grades for all questions of some documents. Those of the training split begin at FRESH, where training never comes."""
    questions: list[Question] = []
    requests = []
    for i in range(documents):
        made = document(split, seed, FRESH + i)
        for question in made.questions:
            if split == "held-out" and question.combination and not held_out(question.combination):
                continue  # a sum of the training text, beside one that is held out
            prompt = tokenizer.encode(made.prompt(question))
            requests.append(Request(len(questions), prompt, _LONGEST_ANSWER, stop=tokenizer.stops))
            questions.append(question)
    grades = Grades()
    for completion in generate_batch(model, requests, slots):
        question = questions[int(completion.request.id)]
        grades.asked[question.kind] += 1
        grades.right[question.kind] += question.right(tokenizer.decode(completion.tokens))
        progress(grades.asked.total(), len(questions))
    return grades


def report(model: Model, tokenizer: Tokenizer, seed: int, documents: int, progress: Callable[[str], Callable[[int, int], None]]) -> str:
    """The published grades of a model, as Markdown."""
    ppl = perplexity(model, tokenizer, seed, documents, progress("perplexity"))
    hidden, seen = (grade(model, tokenizer, split, seed, documents, progress(split)) for split in ("held-out", "train"))
    rows = [(kind, hidden.shown(kind), seen.shown(kind)) for kind in sorted({*hidden.asked, *seen.asked})]
    rows.append(("all", f"{hidden.accuracy:.1%}", f"{seen.accuracy:.1%}"))
    summary = f"perplexity of held-out text {ppl.token:.3f} a token, {ppl.byte:.4f} a byte ({ppl.tokens:,} tokens, {ppl.bytes:,} bytes)"
    header = ("questions", "combinations never seen", "combinations seen, new texts")
    return "\n".join([summary, "", *("| " + " | ".join(row) + " |" for row in (header, ("---",) * 3, *rows))])
